"""Full-weight updates of the embedded engine, and files that must be refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.app.engines import make_engine
from agentrl.config.run import RunConfig
from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import (
    START,
    ModelZoo,
    StepClock,
    check_logprobs,
    check_refused,
    load_engine,
    prompt,
    request,
    token_logprobs,
    until,
    update_after,
    version,
    write_adapter,
    write_full,
)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mixtral", "qwen3_moe", "gpt2"])
def test_a_full_update_serves_the_new_weights(zoo: ModelZoo, architecture: str) -> None:
    async def main() -> None:
        engine = load_engine(zoo, architecture, versions={"solver": START["solver"]})
        session, context = engine.open("s", "solver"), prompt(20)
        before = await session.generate(request("a", context))
        check_logprobs(zoo.load(architecture, 0), context, before)
        await engine.serve([zoo.full(version(1), architecture, seed=1)])
        after = await session.generate(request("b", context))
        check_logprobs(zoo.load(architecture, 1), context, after)
        assert after.cached_tokens == 0
        assert after.spans[0].version == version(1)
        await engine.close()

    asyncio.run(main())


def test_old_kv_never_serves_a_new_version_between_turns(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo, keep_kv=True, clock=StepClock())
        session, context = engine.open("s", "solver"), prompt(30)
        running = asyncio.ensure_future(session.generate(request("a", context, max_tokens=60)))
        await update_after(engine, 20, zoo.full(version(1)))
        mixed = await running
        assert [span.version for span in mixed.spans] == [START["solver"], version(1)]
        longer = np.concatenate([context, mixed.token_ids, prompt(4, 1)])
        after = await session.generate(request("b", longer))
        assert after.cached_tokens == 0
        check_logprobs(zoo.load(seed=1), longer, after)
        again = await session.generate(request("c", np.concatenate([longer, after.token_ids])))
        assert again.cached_tokens == len(longer) + 7
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("keep_kv", [True, False])
def test_tokens_after_an_update_come_from_the_new_weights_over_kept_or_recomputed_kv(
    zoo: ModelZoo, keep_kv: bool
) -> None:
    async def main() -> None:
        engine = load_engine(zoo, keep_kv=keep_kv, clock=StepClock())
        session, context = engine.open("s", "solver"), prompt(30)
        running = asyncio.ensure_future(session.generate(request("a", context, max_tokens=60)))
        await update_after(engine, 20, zoo.full(version(1)))
        mixed = await running
        boundary = mixed.spans[1].start
        old, new = (token_logprobs(zoo.load(seed=seed), context, mixed) for seed in (0, 1))
        np.testing.assert_allclose(mixed.logprobs[:boundary], old[:boundary], atol=2e-4)
        recomputed = bool(np.allclose(mixed.logprobs[boundary:], new[boundary:], atol=2e-4))
        assert recomputed is not keep_kv
        assert not np.allclose(mixed.logprobs[boundary:], old[boundary:], atol=2e-4)
        await engine.close()

    asyncio.run(main())


def test_by_default_every_token_has_the_logprob_that_its_version_alone_gives(zoo: ModelZoo, tmp_path: Path) -> None:
    """An adapter and full weights in one engine, started as a run starts it, both updated while they sample."""
    config = RunConfig.model_validate(
        {
            "environment": {"id": "none"},
            "model": {"path": str(zoo.directory())},
            "policies": {"solver": {"lora": {"rank": 4}}, "proposer": {}},
            "engine": {"max_context": 256},
        }
    )
    full = replace(zoo.full(version(1)), version=PolicyVersion("proposer", 0, 1))
    adapter = write_adapter(tmp_path / "1", version(1), zoo.load(), seed=1)

    async def main() -> None:
        engine = await make_engine(config.engine_plan, START, lambda line: None)
        assert isinstance(engine, EmbeddedEngine)
        context, found = prompt(30), {}
        for policy in START:
            session = engine.open(policy, policy)
            found[policy] = asyncio.ensure_future(session.generate(request(policy, context, max_tokens=200)))
        await update_after(engine, 20, full)
        await update_after(engine, 20, adapter)
        solver, proposer = await found["solver"], await found["proposer"]
        assert [span.version.step for span in solver.spans] == [0], "an adapter's turn ends on its version"
        assert [span.version.step for span in proposer.spans] == [0, 1], "full weights change within a turn"
        check_logprobs(zoo.load(), context, solver)
        by_version = [token_logprobs(zoo.load(seed=seed), context, proposer) for seed in (0, 1)]
        for span, expected in zip(proposer.spans, by_version, strict=True):
            part = slice(span.start, span.stop)
            np.testing.assert_allclose(proposer.logprobs[part], expected[part], atol=2e-4)
        await engine.close()

    asyncio.run(main())


def test_pinned_versions_and_other_policies_have_copies_of_their_own(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        published = [zoo.full(version(step), seed=step) for step in (1, 2, 3)]
        for step in (1, 2, 3):
            await engine.serve([published[step - 1]], published[: min(step, 2)])
        sessions = {
            0: engine.open("other", "proposer"),
            1: engine.open("one", "solver", pin=version(1)),
            2: engine.open("two", "solver", pin=version(2)),
            3: engine.open("three", "solver"),
        }
        context = prompt(15)
        calls = [s.generate(request(f"r{step}", context, seed=step)) for step, s in sessions.items()]
        for step, completion in enumerate(await asyncio.gather(*calls)):
            check_logprobs(zoo.load(seed=step), context, completion)
        for step in (1, 2):
            sessions[step].close()
        await engine.serve([zoo.full(version(4), seed=1)])
        check_logprobs(zoo.load(seed=1), context, await sessions[3].generate(request("last", context)))
        check_logprobs(zoo.load(seed=0), context, await sessions[0].generate(request("other", context)))
        await engine.close()

    asyncio.run(main())


def test_a_turn_ends_on_its_version_although_the_last_pin_ends_before_the_swap(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pin makes the update use a new copy, so it does not wait for the turns."""

    async def main() -> None:
        engine = load_engine(zoo, refresh="turn", versions={"solver": START["solver"]}, clock=StepClock())
        pinned, context = engine.open("pinned", "solver", pin=START["solver"]), prompt(20)
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=60)))
        await until(lambda: engine.stats.sampled_tokens > 2)
        async with engine.between_passes:
            at_swap, interrupt = asyncio.Event(), engine.interrupt
            monkeypatch.setattr(engine, "interrupt", lambda: (at_swap.set(), interrupt()))
            updating = asyncio.ensure_future(engine.serve([zoo.full(version(1))]))
            await at_swap.wait()
            pinned.close()
        completion = await running
        assert [span.version for span in completion.spans] == [START["solver"]]
        check_logprobs(zoo.load(), context, completion)
        await updating
        after = await engine.open("t", "solver").generate(request("b", context))
        check_logprobs(zoo.load(seed=1), context, after)
        await engine.close()

    asyncio.run(main())


def test_full_weights_are_refused_where_sessions_stay_on_versions(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="lazy")
        with pytest.raises(EngineError, match="needs adapters"):
            await engine.serve([zoo.full(version(1))])
        await engine.close()

    asyncio.run(main())


Spoil = Callable[[dict[str, torch.Tensor]], None]
NORM = "model.layers.0.input_layernorm.weight"
SPOILT: dict[str, tuple[Spoil, str]] = {
    "nan": (lambda t: t[NORM].fill_(torch.nan), "not finite"),
    "shape": (lambda t: t.update({NORM: torch.ones(63)}), "shape"),
    "missing": (lambda t: t.pop(NORM), "missing"),
    "surplus": (lambda t: t.update({"model.extra": torch.ones(2)}), "not those of the model"),
    "dtype": (lambda t: t.update({NORM: t[NORM].to(torch.int8)}), "dtype"),
}


@pytest.mark.parametrize("fault", sorted(SPOILT))
def test_spoilt_full_weights_are_refused_and_the_old_version_serves(zoo: ModelZoo, tmp_path: Path, fault: str) -> None:
    tensors = {
        name: tensor.clone() for name, tensor in zoo.load(seed=1).state_dict().items() if name != "lm_head.weight"
    }
    spoil, message = SPOILT[fault]
    spoil(tensors)
    weights = write_full(tmp_path / "spoilt", version(1), tensors)
    asyncio.run(check_refused(load_engine(zoo), zoo, weights, message))


@pytest.mark.parametrize("fault", ["digest", "truncated", "absent"])
def test_files_that_are_not_what_was_published_are_refused(zoo: ModelZoo, tmp_path: Path, fault: str) -> None:
    weights = write_full(tmp_path / "v1", version(1), {"model.norm.weight": torch.ones(64)})
    file = tmp_path / "v1" / "model.safetensors"
    if fault == "digest":
        weights = replace(weights, sha256="0" * 64)
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.unlink()
    asyncio.run(check_refused(load_engine(zoo), zoo, weights, "cannot be read" if fault == "absent" else "SHA-256"))


def test_a_version_id_is_never_served_with_other_weights(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        await engine.serve([zoo.full(version(1), seed=1)])
        await engine.serve([zoo.full(version(1), seed=1)])  # a repeated delivery
        with pytest.raises(EngineError, match="never reused"):
            await engine.serve([zoo.full(version(1), seed=2)])
        await engine.close()

    asyncio.run(main())


def test_the_starting_version_may_be_published_too(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        session, context = engine.open("s", "solver"), prompt(10)
        await session.generate(request("a", context))
        await engine.serve([zoo.full(START["solver"], seed=1)])
        completion = await session.generate(request("b", context))
        assert completion.cached_tokens == 0
        check_logprobs(zoo.load(seed=1), context, completion)
        await engine.close()

    asyncio.run(main())


def test_an_update_that_has_begun_is_finished_though_its_caller_is_cancelled(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo, versions={"solver": START["solver"]}, clock=StepClock())
        session, context = engine.open("s", "solver"), prompt(10)
        running = asyncio.ensure_future(session.generate(request("a", context, max_tokens=200)))
        for step in range(1, 6):
            sampled = engine.stats.sampled_tokens
            updating = asyncio.ensure_future(engine.serve([zoo.full(version(step), seed=step % 2)]))
            await until(lambda sampled=sampled, step=step: engine.stats.sampled_tokens > sampled + 3 * step)  # type: ignore[misc]
            updating.cancel()
        serving = (await running).spans[-1].version.step
        check_logprobs(zoo.load(seed=serving % 2), context, await session.generate(request("b", context)))
        await engine.close()

    asyncio.run(main())
