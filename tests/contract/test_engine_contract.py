"""What every engine promises, run over all of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl.core.errors import EngineError
from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import Completion
from tests.contract.engine_kinds import START, VOCABULARY, MakeEngine, prompt, request

SOLVER = START["solver"]
NEWER = PolicyVersion("solver", 0, 1)
NEWEST = PolicyVersion("solver", 0, 2)


def spans(completion: Completion) -> list[tuple[int, int, str]]:
    return [(start, stop, str(version)) for start, stop, version in completion.spans]


async def first_tokens_of(engine: Engine, name: str = "pace") -> None:
    """Return when a short call that starts now has ended: calls beside it are in flight."""
    session = engine.open(name, "proposer")
    await session.generate(request(name, prompt(3), max_tokens=6))
    session.close()


def test_a_completion_says_what_was_sampled_by_whom(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        completion = await engine.open("s", "solver").generate(request("r", prompt(20), seed=5))
        assert len(completion.token_ids) == len(completion.logprobs) == 8
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 0).all()
        assert spans(completion) == [(0, 8, str(SOLVER))]
        assert completion.finish_reason == "length"
        await engine.close()

    make_engine.run(main)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        wanted = [request(f"r{i}", prompt(5 + i, i), seed=100 + i, max_tokens=12) for i in range(6)]
        alone = [await engine.open(f"a{i}", "solver").generate(r) for i, r in enumerate(wanted)]
        together = await asyncio.gather(*(engine.open(f"t{i}", "solver").generate(r) for i, r in enumerate(wanted)))
        for one, other in zip(alone, together, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        different = await engine.open("d", "solver").generate(request("d", prompt(5, 0), seed=999, max_tokens=12))
        assert different.token_ids.tolist() != alone[0].token_ids.tolist()
        await engine.close()

    make_engine.run(main)


def test_a_stop_token_ends_the_call_and_is_returned(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        free = await engine.open("a", "solver").generate(request("a", prompt(9), seed=1, max_tokens=20))
        stop = int(free.token_ids[7])
        expected = free.token_ids.tolist()[: free.token_ids.tolist().index(stop) + 1]
        sampling = {"max_tokens": 20, "stop_token_ids": (VOCABULARY + 5, stop)}
        stopped = await engine.open("b", "solver").generate(request("b", prompt(9), seed=1, **sampling))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == expected
        await engine.close()

    make_engine.run(main)


def test_the_context_limit_ends_the_call(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine(max_context=32)
        session = engine.open("s", "solver")
        cut = await session.generate(request("a", prompt(20), max_tokens=50))
        assert (len(cut.token_ids), cut.finish_reason) == (12, "length")
        full = await session.generate(request("b", prompt(32), max_tokens=50))
        assert (len(full.token_ids), full.finish_reason, full.spans) == (0, "length", ())
        await engine.close()

    make_engine.run(main)


def test_an_abort_returns_the_partial(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        free = await engine.open("a", "solver").generate(request("a", prompt(4), seed=3, max_tokens=300))
        running = asyncio.ensure_future(
            engine.open("b", "solver").generate(request("b", prompt(4), seed=3, max_tokens=300))
        )
        await first_tokens_of(engine)
        engine.abort("b")
        engine.abort("nobody")
        partial = await running
        count = len(partial.token_ids)
        assert 0 < count < 300
        assert partial.finish_reason == "abort"
        assert partial.token_ids.tolist() == free.token_ids.tolist()[:count]
        assert spans(partial) == [(0, count, str(SOLVER))]
        await engine.close()

    make_engine.run(main)


@pytest.mark.parametrize("other_session", [False, True])
def test_a_turn_continued_after_an_abort_samples_what_it_would_have(
    make_engine: MakeEngine, other_session: bool
) -> None:
    async def main() -> None:
        engine = make_engine()
        context = prompt(20)
        whole = await engine.open("a", "solver").generate(request("a", context, seed=3, max_tokens=200))
        session = engine.open("b", "solver")
        running = asyncio.ensure_future(session.generate(request("b", context, seed=3, max_tokens=200)))
        await first_tokens_of(engine)
        engine.abort("b")
        partial = await running
        count = len(partial.token_ids)
        assert 0 < count < 200
        if other_session:
            session.close()
            session = engine.open("c", "solver")
        longer = np.concatenate([context, partial.token_ids])
        rest = await session.generate(request("c", longer, seed=3, max_tokens=200 - count, sampled_before=count))
        assert partial.token_ids.tolist() == whole.token_ids.tolist()[:count]
        assert len(rest.token_ids) == 200 - count
        if engine.capabilities.exact_continuation:
            assert [*partial.token_ids, *rest.token_ids] == whole.token_ids.tolist()
            np.testing.assert_allclose([*partial.logprobs, *rest.logprobs], whole.logprobs, atol=1e-5)
        await engine.close()

    make_engine.run(main)


def test_a_cancelled_call_gives_its_place_back(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine(slots=1)
        session = engine.open("a", "solver")
        running = asyncio.ensure_future(session.generate(request("a", prompt(4), max_tokens=400)))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        after = await engine.open("b", "solver").generate(request("b", prompt(4)))
        assert len(after.token_ids) == 8
        await engine.close()

    make_engine.run(main)


def test_an_update_in_flight_gives_spans_of_both_versions(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        session = engine.open("a", "solver")
        running = asyncio.ensure_future(session.generate(request("a", prompt(4), max_tokens=300)))
        await first_tokens_of(engine)
        await engine.serve([make_engine.publish(NEWER, seed=1)])
        completion = await running
        assert [version for _, _, version in completion.spans] == [SOLVER, NEWER]
        assert completion.spans[0].start == 0
        assert completion.spans[1].stop == 300
        after = await session.generate(request("b", prompt(4)))
        assert spans(after) == [(0, 8, str(NEWER))]
        untouched = await engine.open("p", "proposer").generate(request("p", prompt(4)))
        assert spans(untouched) == [(0, 8, str(START["proposer"]))]
        await engine.close()

    make_engine.run(main)


def test_refresh_turn_never_changes_weights_inside_a_call(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine(refresh="turn")
        session = engine.open("a", "solver")
        running = asyncio.ensure_future(session.generate(request("a", prompt(4), max_tokens=200)))
        await first_tokens_of(engine)
        updating = asyncio.ensure_future(engine.serve([make_engine.publish(NEWER, seed=1)]))
        completion = await running
        await updating
        assert spans(completion) == [(0, 200, str(SOLVER))]
        assert spans(await session.generate(request("b", prompt(4)))) == [(0, 8, str(NEWER))]
        await engine.close()

    make_engine.run(main)


def test_a_pinned_session_stays_on_its_version(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        newer, newest = make_engine.publish(NEWER, seed=1), make_engine.publish(NEWEST, seed=2)
        await engine.serve([newer], [newer])
        pinned = engine.open("pinned", "solver", pin=NEWER)
        running = asyncio.ensure_future(pinned.generate(request("a", prompt(4), max_tokens=100)))
        await first_tokens_of(engine)
        await engine.serve([newest], [newer])
        assert spans(await running) == [(0, 100, str(NEWER))]
        assert spans(await pinned.generate(request("b", prompt(4)))) == [(0, 8, str(NEWER))]
        assert spans(await engine.open("free", "solver").generate(request("c", prompt(4)))) == [(0, 8, str(NEWEST))]
        pinned.close()
        await engine.serve([newest])
        with pytest.raises(EngineError, match=r"solver@0\.1"):
            engine.open("late", "solver", pin=NEWER)
        await engine.close()

    make_engine.run(main)


def test_what_is_not_served_is_refused_by_name(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        with pytest.raises(EngineError, match="critic"):
            engine.open("s", "critic")
        with pytest.raises(EngineError, match=r"solver@0\.9"):
            engine.open("s", "solver", pin=PolicyVersion("solver", 0, 9))
        with pytest.raises(EngineError, match="critic"):
            await engine.serve([make_engine.publish(PolicyVersion("critic", 0, 1), seed=1)])
        await engine.close()

    make_engine.run(main)


def test_scores_are_logprobs_of_the_tokens_given_those_before(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        scored = (await engine.score("solver", prompt(12))).logprobs
        assert scored.shape == (12,)
        assert scored[0] == 0
        assert (scored[1:] < 0).all()
        by_version = (await engine.score(SOLVER, prompt(12))).logprobs
        assert by_version.tolist() == scored.tolist()
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0]
        wide = await engine.score("solver", prompt(12), top=3)
        assert wide.top_ids.shape == wide.top_logprobs.shape == (12, 3)
        assert not wide.top_ids[0].any()
        assert (np.diff(wide.top_logprobs, axis=1) <= 0).all()
        await engine.close()

    make_engine.run(main)


def test_a_closed_engine_fails_calls_and_closes_again(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        session = engine.open("a", "solver")
        running = asyncio.ensure_future(session.generate(request("a", prompt(4), max_tokens=400)))
        await first_tokens_of(engine)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await session.generate(request("b", prompt(4)))
        session.close()
        session.close()
        await engine.close()

    make_engine.run(main)


def test_busy_seconds_grow_with_work(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        before = engine.busy_seconds()
        await first_tokens_of(engine)
        assert engine.busy_seconds() > before
        await engine.close()

    make_engine.run(main)
