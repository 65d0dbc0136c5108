"""vLLM with adapters: who sampled what, every refresh, and few places."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.errors import EngineCapabilityError, EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion, Tokens
from tests.contract.engine_kinds import (
    START,
    VOCABULARY,
    ModelZoo,
    check_logprobs,
    check_refused,
    plain_logprobs,
    prompt,
    request,
    token_logprobs,
    version,
    write_adapter,
)
from tests.contract.test_engine_adapters import versions_over_turns, with_adapter
from tests.contract.vllm_server import ADAPTER_PLACES, MakeVllm


def adapter(zoo: ModelZoo, directory: Path, step: int, policy: str = "solver", **options: Any) -> WeightsRef:
    """A random adapter, another one for each step."""
    return write_adapter(directory, version(step, policy), zoo.load(), **{"seed": step, **options})


async def in_flight(engine: Any, policy: str = "proposer") -> None:
    """Return when a short call that starts now has ended: calls beside it are in flight."""
    session = engine.open("pace", policy)
    await session.generate(request("pace", prompt(3), max_tokens=6))
    session.close()


def steps(completion: Completion) -> list[int]:
    return [span.version.step for span in completion.spans]


def check_spans(models: dict[PolicyVersion, Any], context: Any, completion: Completion) -> None:
    """Every token has the logprob that its span's version gives it."""
    for start, stop, sampler in completion.spans:
        expected = token_logprobs(models[sampler], context, completion)[start:stop]
        np.testing.assert_allclose(completion.logprobs[start:stop], expected, atol=2e-4)


# --- who sampled what -------------------------------------------------------------------------------------------------


def test_adapters_mixed_in_a_batch_equal_peft_alone(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    names = ("solver", "proposer", "judge")
    versions = {name: version(0, name) for name in (*names, "frozen")}
    shapes: tuple[dict[str, Any], ...] = ({"rank": 4}, {"rank": 8}, {"rank": 2, "targets": ("q_proj", "up_proj")})

    async def main() -> None:
        engine = make_vllm(versions=versions)
        models = {"frozen": zoo.load()}
        for seed, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            weights = adapter(zoo, tmp_path / name, 1, name, seed=seed, **shape)
            await engine.serve([weights])
            models[name] = with_adapter(zoo, weights)
        order = [(i, name) for i in range(2) for name in versions]
        contexts = [prompt(6 + 3 * i + len(name), i) for i, name in order]
        calls = [
            engine.open(f"s{i}{name}", name).generate(request(f"r{i}{name}", context, seed=i, max_tokens=12))
            for (i, name), context in zip(order, contexts, strict=True)
        ]
        for (_, name), context, completion in zip(order, contexts, await asyncio.gather(*calls), strict=True):
            assert completion.spans == ((0, 12, version(0 if name == "frozen" else 1, name)),)
            check_logprobs(models[name], context, completion)
            # Other requests are in flight: vLLM adds adapters to the logits of all of them at once.
            session = engine.open("other", "judge")
            other = asyncio.ensure_future(session.generate(request("other", context, max_tokens=40)))
            whole = np.concatenate([context, completion.token_ids])
            scored, *again = await asyncio.gather(*(engine.score(name, whole, top=5) for _ in range(3)))
            check_logprobs(models["judge"], context, await other)
            session.close()
            np.testing.assert_allclose(scored.logprobs[len(context) :], completion.logprobs, atol=2e-4)
            plain = plain_logprobs(models[name], whole)
            for scores in (scored, *again):
                found = np.take_along_axis(plain, scores.top_ids[1:].astype(np.int64), 1)
                np.testing.assert_allclose(found, -np.sort(-plain, axis=1)[:, :5], atol=2e-4)
                np.testing.assert_allclose(scores.top_logprobs[1:], found, atol=2e-4)
        everything = await engine.score("solver", contexts[0], top=VOCABULARY + 1)
        assert np.sort(everything.top_ids[1:], axis=1).tolist() == [list(range(VOCABULARY))] * (len(contexts[0]) - 1)
        with pytest.raises(EngineCapabilityError, match=r"temperature 1, not 0\.5"):
            await engine.score("solver", contexts[0], 0.5)
        await engine.close()

    make_vllm.run(main)


def test_temperature_is_in_the_logprobs(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = make_vllm()
        completion = await engine.open("s", "solver").generate(request("r", prompt(20), temperature=0.5, seed=1))
        scores = plain_logprobs(zoo.load(), np.concatenate([prompt(20), completion.token_ids]), 0.5)[19:]
        np.testing.assert_allclose(completion.logprobs, scores[range(8), completion.token_ids], atol=2e-4)
        await engine.close()

    make_vllm.run(main)


def test_two_policies_updated_in_flight_have_spans_of_their_own(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = make_vllm()
        models = {each: zoo.load() for each in START.values()}
        context = prompt(12)
        calls = {
            name: asyncio.ensure_future(engine.open(name, name).generate(request(name, context, max_tokens=300)))
            for name in START
        }
        for step, name in ((1, "solver"), (1, "proposer"), (2, "solver")):
            await in_flight(engine)
            weights = adapter(zoo, tmp_path / f"{name}{step}", step, name, seed=10 * step + len(name))
            models[weights.version] = with_adapter(zoo, weights)
            await engine.serve([weights])
        for name, wanted in (("solver", [0, 1, 2]), ("proposer", [0, 1])):
            completion = await calls[name]
            assert steps(completion) == wanted
            assert {span.version.policy for span in completion.spans} == {name}
            assert len(completion.token_ids) == 300
            check_spans(models, context, completion)
        await engine.close()

    make_vllm.run(main)


def test_deltas_are_the_completion_with_the_versions_of_its_spans(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = make_vllm()
        heard: list[tuple[int, float, PolicyVersion]] = []
        begun = asyncio.Event()

        def on_delta(request_id: str, tokens: Tokens) -> None:
            assert request_id == "r"
            ((_, count, sampler),) = tokens.spans
            heard.extend(zip(tokens.token_ids.tolist(), tokens.logprobs.tolist(), [sampler] * count, strict=True))
            begun.set()

        session = engine.open("s", "solver")
        running = asyncio.ensure_future(session.generate(request("r", prompt(9), max_tokens=480), on_delta))
        await begun.wait()
        await engine.serve([adapter(zoo, tmp_path / "1", 1)])
        completion = await running
        assert steps(completion) == [0, 1]
        for at, (token, logprob, sampler) in enumerate(heard):
            assert token == completion.token_ids[at]
            assert np.float32(logprob) == completion.logprobs[at]
            assert next(span for span in completion.spans if at < span.stop).version == sampler
        assert len(heard) >= completion.spans[0].stop, "what an update cuts is delivered first"
        await engine.close()

    make_vllm.run(main)


# --- refresh ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"refresh": "token"}, [0, 1, 2, 3, 4]),
        ({"refresh": "turn"}, [0, 1, 2, 3, 4]),
        ({"refresh": "episode"}, [0, 0, 0, 0, 0]),
        ({"refresh": "lazy", "max_staleness": {"solver": 1}}, [0, 0, 2, 2, 4]),
        ({"refresh": "lazy", "max_staleness": {"solver": 2}}, [0, 0, 0, 3, 3]),
    ],
)
def test_sessions_move_to_newer_adapters_as_refresh_says(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, options: dict[str, Any], wanted: list[int]
) -> None:
    async def main() -> None:
        engine: Any = make_vllm(**options)
        assert await versions_over_turns(engine, zoo, tmp_path, 5) == wanted
        completion = await engine.open("new", "solver").generate(request("new", prompt(9)))
        assert steps(completion) == [5]
        await unloaded(make_vllm, 1)  # the lease of the session that was closed is over
        await engine.close()

    make_vllm.run(main)


def test_calls_in_flight_under_turn_refresh_end_on_their_adapter(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = make_vllm(refresh="turn")
        first = adapter(zoo, tmp_path / "1", 1)
        await engine.serve([first])
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", prompt(9), max_tokens=200)))
        await in_flight(engine)
        await engine.serve([adapter(zoo, tmp_path / "2", 2)])
        assert not running.done(), "the update does not wait for it"
        completion = await running
        assert steps(completion) == [1]
        check_logprobs(with_adapter(zoo, first), prompt(9), completion)
        await engine.close()

    make_vllm.run(main)


def test_an_update_waits_for_the_place_of_a_leased_adapter(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_vllm(refresh="episode", adapter_slots=2)
        await engine.serve([adapter(zoo, tmp_path / "1", 1)])
        session = engine.open("s", "solver")
        await session.generate(request("a", prompt(5)))
        await engine.serve([adapter(zoo, tmp_path / "2", 2)])
        updating = asyncio.ensure_future(engine.serve([adapter(zoo, tmp_path / "3", 3)]))
        await in_flight(engine, "solver")
        assert not updating.done()
        session.close()
        await updating
        assert steps(await engine.open("t", "solver").generate(request("b", prompt(5)))) == [3]
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.serve([adapter(zoo, tmp_path / "4", 4)])

    make_vllm.run(main)


def test_lazy_leases_give_way_when_places_are_short(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine: Any = make_vllm(refresh="lazy", max_staleness={"solver": 100}, adapter_slots=2)
        session, seen = engine.open("t", "solver"), []
        for turn in range(6):
            seen += steps(await session.generate(request(f"t{turn}", prompt(9))))
            await engine.serve([adapter(zoo, tmp_path / f"{turn}", turn + 1)])
        assert seen == [0, 0, 0, 0, 0, 0], "the first weights need no place"
        session.close()
        session, seen = engine.open("u", "solver"), []
        for turn in range(6, 10):
            seen += steps(await session.generate(request(f"u{turn}", prompt(9))))
            await engine.serve([adapter(zoo, tmp_path / f"{turn}", turn + 1)])
        assert seen == [6, 6, 8, 8]
        await engine.close()

    make_vllm.run(main)


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_no_prefix_is_served_across_versions(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_vllm()
        context = prompt(130)
        models: dict[PolicyVersion, Any] = {START["solver"]: zoo.load()}
        for step in range(3):
            for again in range(2):
                session = engine.open(f"{step}.{again}", "solver")
                completion = await session.generate(request(f"{step}.{again}", context))
                session.close()
                assert (completion.cached_tokens > 0) == bool(again)
                assert steps(completion) == [step]
                check_spans(models, context, completion)
            weights = adapter(zoo, tmp_path / f"{step}", step + 1)
            models[weights.version] = with_adapter(zoo, weights)
            await engine.serve([weights])
        other = await engine.open("p", "proposer").generate(request("p", context))
        check_logprobs(zoo.load(), context, other)
        await engine.close()

    make_vllm.run(main)


def test_full_weights_are_refused(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine: Any = make_vllm()
        await check_refused(engine, zoo, zoo.full(version(1)), "started for adapters")

    make_vllm.run(main)


# --- places -----------------------------------------------------------------------------------------------------------


async def unloaded(make_vllm: MakeVllm, left: int) -> None:
    """Wait until vLLM holds no more adapters than that."""
    async with asyncio.timeout(100):
        while len(await make_vllm.llm.list_loras()) > left:
            await asyncio.sleep(0.01)


def test_pinned_adapters_that_fill_all_places_are_named(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_vllm()
        models: dict[PolicyVersion, Any] = {}
        pinned = []
        for step in range(1, ADAPTER_PLACES + 1):
            weights = adapter(zoo, tmp_path / f"{step}", step)
            pinned.append(weights)
            models[weights.version] = with_adapter(zoo, weights)
            await engine.serve([weights], pinned)
        late = adapter(zoo, tmp_path / "late", 9)
        with pytest.raises(EngineError, match=r"solver@0\.1, .*solver@0\.6; unpin one"):
            await engine.serve([late], pinned)
        sessions = {each: engine.open(str(each), "solver", pin=each) for each in models}
        calls = [session.generate(request(str(each), prompt(20))) for each, session in sessions.items()]
        for completion in await asyncio.gather(*calls):
            check_spans(models, prompt(20), completion)
        sessions[version(1)].close()
        await engine.serve([late], pinned[1:])
        assert steps(await engine.open("s", "solver").generate(request("r", prompt(5)))) == [9]
        await unloaded(make_vllm, ADAPTER_PLACES)
        await engine.close()

    make_vllm.run(main)
