"""LoRA adapters in the embedded engine: mixed batches, every refresh, few places, and files that must be refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from agentrl.core.errors import EngineError
from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import (
    ModelZoo,
    StepClock,
    canary_of,
    check_logprobs,
    check_refused,
    load_engine,
    plain_logprobs,
    prompt,
    request,
    update_after,
    version,
    write_adapter,
    write_full,
)


def with_adapter(zoo: ModelZoo, weights: Any) -> Any:
    """The model as PEFT serves it."""
    return PeftModel.from_pretrained(zoo.load(), weights.path).eval()


def test_adapters_mixed_in_a_batch_equal_peft_alone(zoo: ModelZoo, tmp_path: Path) -> None:
    names = ("solver", "proposer", "judge")
    versions = {name: version(0, name) for name in (*names, "frozen")}

    async def main() -> None:
        engine = load_engine(zoo, versions=versions)
        written = {}
        for seed, name in enumerate(names):
            rank = (4, 8, 2)[seed]
            written[name] = write_adapter(tmp_path / name, version(1, name), zoo.load(), seed=seed, rank=rank)
            await engine.serve([written[name]])
        models = {name: with_adapter(zoo, weights) for name, weights in written.items()}
        models["frozen"] = zoo.load()
        order = [(i, name) for i in range(2) for name in versions]
        contexts = [prompt(6 + 3 * i + len(name), i) for i, name in order]
        calls = [
            engine.open(f"s{i}{name}", name).generate(request(f"r{i}{name}", context, seed=i, max_tokens=12))
            for (i, name), context in zip(order, contexts, strict=True)
        ]
        for (_, name), context, completion in zip(order, contexts, await asyncio.gather(*calls), strict=True):
            assert completion.spans[0].version == version(0 if name == "frozen" else 1, name)
            check_logprobs(models[name], context, completion)
        scored = await engine.score("proposer", contexts[0])
        plain = plain_logprobs(models["proposer"], contexts[0])
        expected = np.take_along_axis(plain, contexts[0][1:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(scored.logprobs[1:], expected, atol=2e-4)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("released", [(), (1, 4)])
def test_many_adapters_in_a_batch_equal_peft_alone(zoo: ModelZoo, tmp_path: Path, released: tuple[int, ...]) -> None:
    """So many that rows are computed adapter by adapter, as many rows of one as of three others; with gaps between."""
    names = [f"p{number}" for number in range(8)]

    async def main() -> None:
        engine = load_engine(zoo, versions={name: version(0, name) for name in names}, adapter_slots=9)
        written = {}
        for seed, name in enumerate(names):
            written[name] = write_adapter(tmp_path / name, version(1, name), zoo.load(), seed=seed, rank=4)
            await engine.serve([written[name]])
        playing = [name for number, name in enumerate(names) if number not in released]
        calls = [(name, index) for name in playing for index in range(3 if name == "p2" else 1)]
        contexts = [prompt(6 + 2 * index + int(name[1]), index) for name, index in calls]
        running = [
            engine.open(f"s{name}{index}", name).generate(request(f"r{name}{index}", context, seed=7, max_tokens=12))
            for (name, index), context in zip(calls, contexts, strict=True)
        ]
        for (name, _), context, completion in zip(calls, contexts, await asyncio.gather(*running), strict=True):
            assert completion.spans[0].version == version(1, name)
            check_logprobs(with_adapter(zoo, written[name]), context, completion)
        newer = write_adapter(tmp_path / "newer", version(2, "p2"), zoo.load(), seed=99, rank=4)
        await engine.serve([newer])
        again = [
            engine.open(f"t{name}", name).generate(request(f"t{name}", contexts[0], max_tokens=6)) for name in playing
        ]
        for name, completion in zip(playing, await asyncio.gather(*again), strict=True):
            model = with_adapter(zoo, newer if name == "p2" else written[name])
            check_logprobs(model, contexts[0], completion)
        await engine.close()

    asyncio.run(main())


def test_rslora_scales_as_peft_does(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        weights = write_adapter(
            tmp_path / "a", version(1), zoo.load(), seed=1, config={"use_rslora": True, "lora_alpha": 3}
        )
        await engine.serve([weights])
        completion = await engine.open("s", "solver").generate(request("r", prompt(9)))
        check_logprobs(with_adapter(zoo, weights), prompt(9), completion)
        await engine.close()

    asyncio.run(main())


def test_many_adapter_updates_in_few_places(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, adapter_slots=1, clock=StepClock())
        session, context = engine.open("s", "solver"), prompt(9)
        for step in range(1, 5):
            weights = write_adapter(tmp_path / f"{step}", version(step), zoo.load(), seed=step)
            running = asyncio.ensure_future(session.generate(request(f"r{step}", context, max_tokens=100)))
            await update_after(engine, 5, weights)
            assert [span.version.step for span in (await running).spans] == [step - 1, step]
            check_logprobs(with_adapter(zoo, weights), context, await session.generate(request(f"c{step}", context)))
        await engine.close()

    asyncio.run(main())


async def versions_over_turns(engine: EmbeddedEngine, zoo: ModelZoo, root: Path, turns: int) -> list[int]:
    """One turn, then an update, and so on: which step sampled each turn of one conversation."""
    session, context, steps = engine.open("s", "solver"), prompt(9), []
    for turn in range(turns):
        completion = await session.generate(request(f"r{turn}", context))
        steps.append(completion.spans[0].version.step)
        context = np.concatenate([context, completion.token_ids])
        await engine.serve([write_adapter(root / f"{turn}", version(turn + 1), zoo.load(), seed=turn)])
    session.close()
    return steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"refresh": "token"}, [0, 1, 2, 3, 4]),
        ({"refresh": "turn"}, [0, 1, 2, 3, 4]),
        ({"refresh": "episode"}, [0, 0, 0, 0, 0]),
        ({"refresh": "lazy", "max_staleness": {"solver": 1}}, [0, 0, 2, 2, 4]),
        ({"refresh": "lazy", "max_staleness": {"solver": 2}}, [0, 0, 0, 3, 3]),
    ],
)
def test_sessions_move_to_newer_adapters_as_refresh_says(
    zoo: ModelZoo, tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    async def main() -> None:
        engine = load_engine(zoo, adapter_slots=6, **options)
        assert await versions_over_turns(engine, zoo, tmp_path, 5) == steps
        await engine.close()

    asyncio.run(main())


def test_lazy_sessions_reuse_their_kv_until_they_move(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="lazy", max_staleness={"proposer": 0})
        session, context, cached = engine.open("s", "solver"), prompt(20), []
        for turn in range(3):
            completion = await session.generate(request(f"r{turn}", context))
            cached.append(completion.cached_tokens)
            context = np.concatenate([context, completion.token_ids])
            await engine.serve([write_adapter(tmp_path / f"{turn}", version(turn + 1), zoo.load(), seed=turn)])
        assert cached == [0, 27, 0]
        await engine.close()

    asyncio.run(main())


def test_lazy_leases_give_way_when_places_are_short(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="lazy", max_staleness={"solver": 100}, adapter_slots=2)
        assert await versions_over_turns(engine, zoo, tmp_path, 5) == [0, 0, 0, 0, 0]
        session = engine.open("t", "solver")
        steps = []
        for turn in range(5, 9):
            completion = await session.generate(request(f"t{turn}", prompt(9)))
            steps.append(completion.spans[0].version.step)
            await engine.serve([write_adapter(tmp_path / f"{turn}", version(turn + 1), zoo.load(), seed=turn)])
        assert steps == [5, 5, 7, 7]
        await engine.close()

    asyncio.run(main())


def test_calls_in_flight_under_turn_refresh_end_on_their_adapter(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="turn", clock=StepClock())
        first = write_adapter(tmp_path / "1", version(1), zoo.load(), seed=1)
        await engine.serve([first])
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", prompt(9), max_tokens=60)))
        await update_after(engine, 5, write_adapter(tmp_path / "2", version(2), zoo.load(), seed=2))
        assert not running.done()
        completion = await running
        assert [span.version.step for span in completion.spans] == [1]
        check_logprobs(with_adapter(zoo, first), prompt(9), completion)
        await engine.close()

    asyncio.run(main())


def test_pinned_adapters_that_fill_all_places_are_named(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, adapter_slots=2)
        pinned = [write_adapter(tmp_path / f"{step}", version(step), zoo.load(), seed=step) for step in (1, 2)]
        await engine.serve(pinned[1:], pinned)
        with pytest.raises(EngineError, match=r"solver@0\.1, solver@0\.2; unpin one"):
            await engine.serve([write_adapter(tmp_path / "3", version(3), zoo.load(), seed=3)], pinned)
        await engine.serve([write_adapter(tmp_path / "4", version(4), zoo.load(), seed=3)], pinned[1:])
        completion = await engine.open("s", "solver").generate(request("r", prompt(5)))
        assert completion.spans[0].version == version(4)
        await engine.close()

    asyncio.run(main())


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
SPOILT_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "rank too large": ({"rank": 65}, "at most 64"),
    "rank not as configured": ({"config": {"r": 3}}, "configured rank 3"),
    "nan": ({"change": lambda t: t[A].fill_(torch.nan)}, "not finite"),
    "shape": ({"change": lambda t: t.update({A: torch.ones(4, 63)})}, "the layer is 64"),
    "dtype": ({"change": lambda t: t.update({A: t[A].to(torch.int8)})}, "dtype"),
    "half": ({"change": lambda t: t.pop(B)}, "has only lora_A"),
    "no such layer": (
        {"change": lambda t: t.update({k.replace("q_proj", "x_proj"): t.pop(k) for k in (A, B)})},
        "no linear layer",
    ),
    "layer left out": (
        {"change": lambda t: [t.pop(k) for k in (A, B)]},
        "no matrices: 'model.layers.0.self_attn.q_proj'",
    ),
    "other prefix": (
        {"change": lambda t: [t.update({k.replace("model.layers", "model.text.layers"): t.pop(k)}) for k in list(t)]},
        "no linear layer model.text.layers",
    ),
    "targets": ({"config": {"target_modules": [["q_proj"]]}}, "target_modules cannot be read"),
    "not lora": ({"config": {"peft_type": "IA3"}}, "IA3"),
    "dora": ({"config": {"use_dora": True}}, "use_dora"),
    "key": ({"change": lambda t: t.update({"model.norm.weight": torch.ones(64)})}, "not a LoRA matrix"),
}


@pytest.mark.parametrize("fault", sorted(SPOILT_ADAPTERS))
def test_spoilt_adapters_are_refused_and_the_old_version_serves(zoo: ModelZoo, tmp_path: Path, fault: str) -> None:
    options, message = SPOILT_ADAPTERS[fault]
    weights = write_adapter(tmp_path / "spoilt", version(1), zoo.load(), seed=1, **options)
    asyncio.run(check_refused(load_engine(zoo), zoo, weights, message))


def test_adapters_on_different_layers_are_served_side_by_side(zoo: ModelZoo, tmp_path: Path) -> None:
    """Also where one takes the place that another, on other layers, has left."""

    async def main() -> None:
        engine = load_engine(zoo, adapter_slots=2)
        targets = [("q_proj", "v_proj"), ("q_proj", "k_proj"), ("down_proj",), ("v_proj",)]
        context, policies = prompt(14), ["solver", "proposer"]
        served = {}
        for step, names in enumerate(targets, start=1):
            policy = policies[step % 2]
            place = tmp_path / f"{step}"
            served[policy] = write_adapter(
                place, version((step + 1) // 2, policy), zoo.load(), seed=step, rank=1 + step, targets=names
            )
            await engine.serve([served[policy]])
            calls = [
                engine.open(f"{step} {name}", name).generate(request(f"{step} {name}", context)) for name in policies
            ]
            for name, completion in zip(policies, await asyncio.gather(*calls), strict=True):
                expected = with_adapter(zoo, served[name]) if name in served else zoo.load()
                check_logprobs(expected, context, completion)
        await engine.close()

    asyncio.run(main())


def test_one_policy_by_adapter_and_another_by_full_weights(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        adapter = write_adapter(tmp_path / "1", version(1), zoo.load(), seed=1)
        await engine.serve([adapter])
        await engine.serve([zoo.full(version(1, "proposer"), seed=2)])
        context = prompt(14)
        solved, proposed = await asyncio.gather(
            engine.open("s", "solver").generate(request("s", context)),
            engine.open("p", "proposer").generate(request("p", context)),
        )
        check_logprobs(with_adapter(zoo, adapter), context, solved)
        check_logprobs(zoo.load(seed=2), context, proposed)
        await engine.close()

    asyncio.run(main())


async def all_places_taken(engine: EmbeddedEngine, zoo: ModelZoo, root: Path) -> Any:
    """A session leases step 1, step 2 is current, no place is left for step 3."""
    await engine.serve([write_adapter(root / "1", version(1), zoo.load(), seed=1)])
    session = engine.open("s", "solver")
    await session.generate(request("a", prompt(5)))
    await engine.serve([write_adapter(root / "2", version(2), zoo.load(), seed=2)])
    return session


async def waiting_update(engine: EmbeddedEngine, zoo: ModelZoo, root: Path) -> tuple[Any, asyncio.Future[None]]:
    """Of step 3, for the place of step 1."""
    session = await all_places_taken(engine, zoo, root)
    updating = asyncio.ensure_future(engine.serve([write_adapter(root / "3", version(3), zoo.load(), seed=3)]))
    await asyncio.wait([updating], timeout=0.2)  # until it waits
    return session, updating


def test_an_update_waits_for_the_place_of_a_leased_adapter(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="episode", adapter_slots=2)
        session, updating = await waiting_update(engine, zoo, tmp_path)
        assert not updating.done()
        session.close()
        await updating
        completion = await engine.open("t", "solver").generate(request("b", prompt(5)))
        assert completion.spans[0].version == version(3)
        await engine.close()

    asyncio.run(main())


def test_an_update_that_waits_fails_when_the_engine_closes(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="episode", adapter_slots=2)
        _, updating = await waiting_update(engine, zoo, tmp_path)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await updating
        with pytest.raises(EngineError, match="closed"):
            await engine.serve([zoo.full(version(4))])

    asyncio.run(main())


@pytest.mark.parametrize("how", ["adapter", "adapter that needs a place", "full"])
def test_an_update_whose_files_are_being_read_fails_when_the_engine_closes(
    zoo: ModelZoo, tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh="turn" if how == "full" else "episode", adapter_slots=2)
        if "needs a place" in how:
            await all_places_taken(engine, zoo, tmp_path)
        weights = (
            zoo.full(version(3)) if how == "full" else write_adapter(tmp_path / "3", version(3), zoo.load(), seed=3)
        )
        updating = asyncio.ensure_future(engine.serve([weights]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await updating

    asyncio.run(main())


def test_whenever_the_engine_closes_an_update_is_applied_or_told_so(zoo: ModelZoo, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in zoo.load(seed=1).state_dict().items() if name != "lm_head.weight"}
    weights = write_full(tmp_path / "1", version(1), tensors, canary=canary_of(zoo.load(seed=1), zoo.load()))

    async def closed_after(ticks: int) -> None:
        engine = load_engine(zoo)
        updating = asyncio.ensure_future(engine.serve([weights]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        await engine.close()
        (failure,) = await asyncio.gather(updating, return_exceptions=True)
        assert failure is None or (isinstance(failure, EngineError) and "the engine was closed" in str(failure))
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.score("solver", prompt(4))

    for power in range(14):
        asyncio.run(closed_after(1 << power))
