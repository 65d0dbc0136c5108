"""vLLM with full weights: tokens on both sides of an update, and files that must be refused."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from agentrl.core.errors import EngineCapabilityError, EngineError, EngineLostError
from agentrl.core.records import WeightsRef
from agentrl.core.tokens import Completion, Tokens
from tests.contract.engine_kinds import (
    START,
    ModelZoo,
    canary_of,
    check_logprobs,
    check_refused,
    plain_logprobs,
    prompt,
    request,
    token_logprobs,
    version,
    write_adapter,
    write_full,
)
from tests.contract.test_engine_updates import SPOILT
from tests.contract.test_engine_vllm_files import COPIES
from tests.contract.vllm_server import SLOTS, MakeVllm

SOLVER = START["solver"]


async def in_flight(engine: Any) -> None:
    """Return when a short call that starts now has ended: calls beside it are in flight."""
    session = engine.open("pace", "solver")
    await session.generate(request("pace", prompt(3), max_tokens=6))
    session.close()


def tensors_of(zoo: ModelZoo, seed: int) -> dict[str, Any]:
    return load_file(zoo.directory(seed=seed) / "model.safetensors")


def steps(completion: Completion) -> list[int]:
    return [span.version.step for span in completion.spans]


@pytest.mark.parametrize("keep_kv", [True, False])
def test_every_token_is_of_the_version_its_span_says(make_vllm: MakeVllm, zoo: ModelZoo, keep_kv: bool) -> None:
    async def main() -> None:
        engine = make_vllm(keep_kv=keep_kv)
        heard: list[tuple[int, int]] = []

        def on_delta(request_id: str, tokens: Tokens) -> None:
            heard.extend((token, tokens.spans[0].version.step) for token in tokens.token_ids.tolist())

        contexts = [prompt(40 + each, each) for each in range(4)]
        calls = [
            asyncio.ensure_future(
                engine.open(f"s{each}", "solver").generate(
                    request(f"r{each}", context, max_tokens=460), on_delta if each == 0 else None
                )
            )
            for each, context in enumerate(contexts)
        ]
        for step in (1, 2, 3):
            await in_flight(engine)
            await engine.serve([zoo.full(version(step), seed=step)])
        models = [zoo.load(seed=seed) for seed in range(4)]
        completions = await asyncio.gather(*calls)
        for context, completion in zip(contexts, completions, strict=True):
            assert steps(completion) == [0, 1, 2, 3]
            assert completion.spans[0].start == 0
            assert completion.spans[-1].stop == len(completion.token_ids) == 460
            plain = [token_logprobs(model, context, completion) for model in models]
            for at, (start, stop, sampler) in enumerate(completion.spans):
                found = completion.logprobs[start:stop]
                exact = bool(np.allclose(found, plain[sampler.step][start:stop], atol=2e-4))
                assert exact is (at == 0 or not keep_kv)
                if at:
                    assert not np.allclose(found, plain[sampler.step - 1][start:stop], atol=2e-4)
                    assert not np.isclose(found[0], plain[sampler.step - 1][start], atol=2e-4), "nor its first token"
        expected = [int(token) for token in completions[0].token_ids]
        by_token = [span.version.step for span in completions[0].spans for _ in range(span.start, span.stop)]
        assert heard == list(zip(expected, by_token, strict=True))[: len(heard)]
        assert len(heard) >= completions[0].spans[-1].start
        await engine.close()

    make_vllm.run(main)


def test_refresh_turn_waits_for_the_turns_in_flight_and_holds_new_ones(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm(refresh="turn")
        context = prompt(40)
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=200)))
        await in_flight(engine)
        updating = asyncio.ensure_future(engine.serve([zoo.full(version(1), seed=1)]))
        while "solver" not in engine.versions.held:
            await asyncio.sleep(0.001)
        held = asyncio.ensure_future(engine.open("t", "solver").generate(request("b", context)))
        before = await running
        await updating
        after = await held
        assert (steps(before), steps(after)) == ([0], [1])
        check_logprobs(zoo.load(), context, before)
        check_logprobs(zoo.load(seed=1), context, after)
        await engine.close()

    make_vllm.run(main)


def test_no_prefix_is_served_across_versions(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm()
        context = prompt(130)
        for step in range(3):
            if step:
                await engine.serve([zoo.full(version(step), seed=step)])
            for again in range(2):
                completion = await engine.open(f"{step}.{again}", "solver").generate(request("r", context))
                assert (completion.cached_tokens > 0) == bool(again)
                check_logprobs(zoo.load(seed=step), context, completion)
            scored = await engine.score(version(step), np.concatenate([context, completion.token_ids]))
            np.testing.assert_allclose(scored.logprobs[len(context) :], completion.logprobs, atol=2e-4)
        with pytest.raises(EngineError, match=r"solver@0\.1 is not served here"):
            await engine.score(version(1), context)
        await engine.close()

    make_vllm.run(main)


def test_a_prefix_computed_while_weights_changed_is_not_served_again(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm(keep_kv=True)
        session, context = engine.open("s", "solver"), prompt(64)
        running = asyncio.ensure_future(session.generate(request("a", context, max_tokens=200)))
        await in_flight(engine)
        await engine.serve([zoo.full(version(1), seed=1)])
        mixed = await running
        assert steps(mixed) == [0, 1]
        longer = np.concatenate([context, mixed.token_ids])
        after = await session.generate(request("b", longer))
        assert after.cached_tokens == 0
        check_logprobs(zoo.load(seed=1), longer, after)
        await engine.close()

    make_vllm.run(main)


def test_a_turn_that_begins_during_an_update_finds_nothing_of_the_old_weights(
    make_vllm: MakeVllm, zoo: ModelZoo
) -> None:
    async def main() -> None:
        engine = make_vllm(keep_kv=True)
        session, context = engine.open("s", "solver"), prompt(64)
        first = await session.generate(request("a", context))
        longer = np.concatenate([context, first.token_ids])
        begun = []
        make_vllm.llm.before["start_weight_update"] = lambda: begun.append(
            asyncio.ensure_future(session.generate(request("b", longer)))
        )
        await engine.serve([zoo.full(version(1), seed=1)])
        second = await begun[0]
        assert (steps(second), second.cached_tokens) == ([1], 0)
        check_logprobs(zoo.load(seed=1), longer, second)
        await engine.close()

    make_vllm.run(main)


def test_calls_that_wait_for_a_slot_find_nothing_of_the_old_weights(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm(keep_kv=True)
        contexts = [prompt(64, each) for each in range(SLOTS + 8)]
        sessions = [engine.open(f"s{each}", "solver") for each in range(len(contexts))]
        turns = zip(sessions, contexts, strict=True)
        firsts = await asyncio.gather(*(each.generate(request(each.session_id, context)) for each, context in turns))
        longer = [np.concatenate([context, first.token_ids]) for context, first in zip(contexts, firsts, strict=True)]
        calls = [
            asyncio.ensure_future(each.generate(request(each.session_id, context, max_tokens=100)))
            for each, context in zip(sessions, longer, strict=True)
        ]
        while not any(call.tokens for call in engine._calls.values()):
            await asyncio.sleep(0)
        await engine.serve([zoo.full(version(1), seed=1)])
        seconds = await asyncio.gather(*calls)
        waited = [(context, each) for context, each in zip(longer, seconds, strict=True) if steps(each) == [1]]
        assert len(waited) >= len(contexts) - SLOTS - 1  # nobody asks a canary now
        for context, each in waited:
            assert each.cached_tokens == 0
            check_logprobs(zoo.load(seed=1), context, each)
        await engine.close()

    make_vllm.run(main)


def test_a_score_beside_a_held_call_keeps_the_count_of_calls(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm(refresh="turn")
        context, later = prompt(40), []
        make_vllm.llm.before["start_weight_update"] = lambda: later.extend(
            [
                asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context))),
                asyncio.ensure_future(engine.score("solver", context)),
            ]
        )
        await engine.serve([zoo.full(version(1), seed=1)])
        completion, scores = await asyncio.gather(*later)
        assert steps(completion) == [1]
        np.testing.assert_allclose(scores.logprobs[1:], plain_scores(zoo, 1, context), atol=2e-4)
        await engine.serve([zoo.full(version(2), seed=2)])
        assert steps(await engine.open("t", "solver").generate(request("b", context))) == [2]
        await engine.close()

    make_vllm.run(main)


def test_weights_under_a_pinned_conversation_are_not_replaced(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm()
        pinned = engine.open("s", "solver", pin=SOLVER)
        with pytest.raises(EngineError, match=r"1 conversations are pinned to solver@0\.0"):
            await engine.serve([zoo.full(version(1), seed=1)])
        assert not await make_vllm.llm.is_paused()
        assert steps(await pinned.generate(request("a", prompt(9)))) == [0]
        pinned.close()
        await engine.serve([zoo.full(version(1), seed=1)])
        await engine.close()

    make_vllm.run(main)


def test_scores_are_of_one_version_while_weights_change(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm()
        context = prompt(60)
        plain = [plain_scores(zoo, seed, context) for seed in (0, 1)]
        updating = asyncio.ensure_future(engine.serve([zoo.full(version(1), seed=1)]))

        async def until_replaced() -> None:
            while True:
                scores, newest = await asyncio.gather(engine.score(SOLVER, context), engine.score("solver", context))
                np.testing.assert_allclose(scores.logprobs[1:], plain[0], atol=2e-4)
                assert any(np.allclose(newest.logprobs[1:], each, atol=2e-4) for each in plain)

        with pytest.raises(EngineError, match=r"solver@0\.0 is not served here"):
            await until_replaced()
        await updating
        np.testing.assert_allclose((await engine.score("solver", context)).logprobs[1:], plain[1], atol=2e-4)
        await engine.close()

    make_vllm.run(main)


def plain_scores(zoo: ModelZoo, seed: int, context: Any) -> Any:
    scores = plain_logprobs(zoo.load(seed=seed), context)
    return np.take_along_axis(scores, context[1:, None].astype(np.int64), 1)[:, 0]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", sorted([*SPOILT, "digest", "truncated", "absent"]))
def test_spoilt_weights_are_refused_and_the_old_version_serves(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, fault: str
) -> None:
    tensors = tensors_of(zoo, 1)
    spoil, message = SPOILT.get(fault, (lambda tensors: None, "cannot be read" if fault == "absent" else "SHA-256"))
    spoil(tensors)
    weights = write_full(tmp_path / "spoilt", version(1), tensors)
    file = tmp_path / "spoilt" / "model.safetensors"
    match fault:
        case "digest":
            weights = replace(weights, sha256="0" * 64)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-10])
        case "absent":
            file.unlink()

    async def main() -> None:
        engine: Any = make_vllm()
        await check_refused(engine, zoo, weights, message)
        assert not await make_vllm.llm.is_paused()

    make_vllm.run(main)


def newest_copy() -> Path:
    """The private copy of the version that is being loaded."""
    return max(COPIES.glob("weights-*/*/model.safetensors"), key=lambda path: int(path.parent.name))


def test_a_directory_that_is_written_again_changes_nothing_that_is_loaded(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        for step in (1, 2):
            weights = write_full(tmp_path / f"{step}", version(step), tensors_of(zoo, step))
            other = write_full(tmp_path / f"other{step}", version(step), tensors_of(zoo, 3))
            swap = partial(shutil.copyfile, f"{other.path}/model.safetensors", f"{weights.path}/model.safetensors")
            make_vllm.llm.before["start_weight_update"] = swap
            await engine.serve([weights])
            completion = await engine.open(f"s{step}", "solver").generate(request(f"r{step}", context))
            check_logprobs(zoo.load(seed=step), context, completion)
            assert len(list(COPIES.glob("weights-*/*"))) == 1, "the version that serves"
        await engine.close()

    make_vllm.run(main)


def test_a_trainers_version_is_loaded_without_a_copy(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    """If the next one cannot be loaded, its file serves again; if it was changed in place, its canary tells."""

    def publish(step: int, *, seed: int) -> WeightsRef:
        canary = canary_of(zoo.load(seed=seed), zoo.load())
        return write_full(tmp_path / f"{step}", version(step), tensors_of(zoo, seed), canary=canary)

    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        before = set(COPIES.glob("weights-*/*"))

        async def check(name: str) -> None:
            completion = await engine.open(name, "solver").generate(request(name, context))
            assert steps(completion) == [1]
            check_logprobs(zoo.load(seed=1), context, completion)
            assert set(COPIES.glob("weights-*/*")) == before

        await engine.serve([publish(1, seed=1)])
        await check("served")
        second, third = (publish(step, seed=step) for step in (2, 3))
        make_vllm.llm.before["start_weight_update"] = lambda: Path(second.path, "model.safetensors").unlink()
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: vLLM cannot load it.* keeps serving"):
            await engine.serve([second])
        await check("after a load that failed")
        other = Path(publish(4, seed=4).path, "model.safetensors")
        make_vllm.llm.before["start_weight_update"] = partial(
            shutil.copyfile, other, Path(third.path, "model.safetensors")
        )
        with pytest.raises(EngineError, match=r"solver@0\.3 refused"):
            await engine.serve([third])
        await check("after a canary that failed")
        await engine.close()

    make_vllm.run(main)


@pytest.mark.parametrize("updated", [False, True])
def test_a_load_that_fails_half_way_leaves_the_version_before(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, updated: bool
) -> None:
    async def main() -> None:
        engine = make_vllm()
        if updated:
            await engine.serve([zoo.full(version(1), seed=1)])
        context = prompt(40)
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=300)))
        await in_flight(engine)
        weights = write_full(tmp_path / "2", version(2), tensors_of(zoo, 2))

        make_vllm.llm.before["start_weight_update"] = lambda: newest_copy().write_bytes(b"cut short")
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: vLLM cannot load it.* keeps serving"):
            await engine.serve([weights])
        make_vllm.llm.before["start_weight_update"] = lambda: newest_copy().unlink()
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: vLLM cannot load it.* keeps serving"):
            await engine.serve([weights])
        completion = await running
        assert steps(completion) == [int(updated)]
        assert len(completion.token_ids) == 300
        check_logprobs(zoo.load(seed=int(updated)), context, completion)
        await engine.serve([zoo.full(version(3), seed=3)])
        check_logprobs(zoo.load(seed=3), context, await engine.open("t", "solver").generate(request("b", context)))
        await engine.close()

    make_vllm.run(main)


def test_an_engine_that_cannot_go_back_says_it_is_lost(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_vllm()
        first, second = (write_full(tmp_path / f"{step}", version(step), tensors_of(zoo, step)) for step in (1, 2))
        await engine.serve([first])

        def fail() -> None:
            for copy in COPIES.glob("weights-*/*/model.safetensors"):
                copy.unlink()

        make_vllm.llm.before["start_weight_update"] = fail
        with pytest.raises(EngineLostError, match=r"solver@0\.2"):
            await engine.serve([second])
        with pytest.raises(EngineError):
            await engine.open("s", "solver").generate(request("r", prompt(5)))
        await engine.close()

    make_vllm.run(main)


def test_what_full_weights_cannot_do_is_refused_by_name(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        for refresh in ("lazy", "episode"):
            with pytest.raises(EngineCapabilityError, match=r"engine\.refresh = .* 'token' or 'turn'"):
                make_vllm(refresh=refresh)
        with pytest.raises(EngineCapabilityError, match="proposer, solver"):
            make_vllm(versions=START)
        refusing: Any = make_vllm()
        weights = write_adapter(tmp_path / "a", version(1), zoo.load(), seed=1)
        await check_refused(refusing, zoo, weights, "adapter_slots = 0")
        engine = make_vllm()
        first, second = zoo.full(version(1), seed=1), zoo.full(version(2), seed=2)
        with pytest.raises(EngineError, match=r"solver@0\.1 refused: .*no other can be pinned"):
            await engine.serve([], [first])
        with pytest.raises(EngineError, match=r"solver@0\.1 is not served here"):
            engine.open("s", "solver", pin=version(1))
        await engine.serve([first], [first])
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: .*no other can be pinned"):
            await engine.serve([second], [first])
        await engine.serve([second])

    make_vllm.run(main)


def test_a_version_id_is_never_served_with_other_weights(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm()
        await engine.serve([zoo.full(version(1), seed=1)])
        await engine.serve([zoo.full(version(1), seed=1)])  # a repeated delivery
        with pytest.raises(EngineError, match="never reused"):
            await engine.serve([zoo.full(version(1), seed=2)])
        await engine.close()

    make_vllm.run(main)


def test_an_update_that_has_begun_is_finished_though_its_caller_is_cancelled(
    make_vllm: MakeVllm, zoo: ModelZoo
) -> None:
    async def main() -> None:
        engine = make_vllm()
        context, models = prompt(20), [zoo.load(seed=seed) for seed in range(4)]
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=400)))
        await in_flight(engine)
        for step in range(1, 4):
            updating = asyncio.ensure_future(engine.serve([zoo.full(version(step), seed=step)]))
            await asyncio.sleep(0.001 * step)
            updating.cancel()
        await running
        serving = await engine.open("t", "solver").generate(request("b", context))
        check_logprobs(models[serving.spans[0].version.step], context, serving)
        assert not await make_vllm.llm.is_paused()
        await engine.close()

    make_vllm.run(main)
