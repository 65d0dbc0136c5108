"""A turn that is cut goes on where it was, under the version its session is due, with all that a trainer needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.app.policies import seat_settings
from agentrl.config.sections import SamplingConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineError
from agentrl.core.ports import Engine, Refresh
from agentrl.core.records import EpisodeSpec, ProposalNovelty, SeatBinding, Task
from agentrl.core.tokens import Completion, KeptCount, Tokens, TrajectoryRow
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.episode import RolloutSettings
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from tests.contract.engine_kinds import (
    START,
    MakeEngine,
    ModelZoo,
    StepClock,
    load_engine,
    plain_logprobs,
    prompt,
    request,
    until,
    version,
    write_adapter,
)
from tests.contract.test_engine_capture import plain_routing
from tests.support.builders import spans_of

OLD, NEW = START["solver"], version(1)
TOKENS = 60


async def cut_and_continued(engine: Engine, update: Any, *, new_session: bool) -> Completion:
    """A turn whose call is aborted, and that goes on after an update, in its session or in another one."""
    session = engine.open("a", "solver")
    beside = engine.open("pace", "proposer")
    running = asyncio.ensure_future(session.generate(request("r", prompt(12), seed=3, max_tokens=200)))
    await beside.generate(request("pace", prompt(3), max_tokens=6))
    engine.abort("r")
    first = await running
    count = len(first.token_ids)
    assert 0 < count < 200
    if new_session:
        session.close()
        session = engine.open("b", "solver")
    await update()
    context = np.concatenate([prompt(12), first.token_ids])
    rest = await session.generate(request("r", context, seed=3, max_tokens=200 - count, sampled_before=count))
    session.close()
    beside.close()
    return Completion.of(Tokens.join([first, rest]), rest.finish_reason)


@pytest.mark.parametrize("refresh", ["token", "turn"])
@pytest.mark.parametrize("new_session", [False, True])
def test_after_an_update_a_cut_turn_goes_on_under_the_new_version(
    make_engine: MakeEngine, refresh: str, new_session: bool
) -> None:
    async def main() -> None:
        engine = make_engine(refresh=refresh)
        turn = await cut_and_continued(
            engine, lambda: engine.serve([make_engine.publish(NEW, seed=1)]), new_session=new_session
        )
        assert [span.version for span in turn.spans] == [OLD, NEW]
        assert turn.spans[-1].stop == len(turn.token_ids) == 200
        assert turn.finish_reason == "length"
        await engine.close()

    make_engine.run(main)


@pytest.mark.parametrize("refresh", ["lazy", "episode"])
@pytest.mark.parametrize("new_session", [False, True])
def test_a_leased_turn_goes_on_under_its_version_as_long_as_its_session_lives(
    zoo: ModelZoo, tmp_path: Path, refresh: Refresh, new_session: bool
) -> None:
    async def main() -> None:
        engine = load_engine(zoo, refresh=refresh)
        weights = write_adapter(tmp_path / "a", NEW, zoo.load(), seed=1)
        turn = await cut_and_continued(engine, lambda: engine.serve([weights]), new_session=new_session)
        assert [span.version for span in turn.spans] == ([OLD, NEW] if new_session else [OLD])
        await engine.close()

    asyncio.run(main())


# --- episodes ---------------------------------------------------------------------------------------------------------


class SmallFormat(PlainChatFormat):
    """Bytes folded into a small vocabulary; no turn ends before its limit."""

    stop_token_ids: tuple[int, ...] = ()
    fingerprint = b"folded bytes"

    def start(self, messages: Any, tools: Any) -> list[int]:
        return [3 + token % 90 for token in super().start(messages, tools)]

    def extend(self, messages: Any, *, after: Any, **conversation: Any) -> list[int]:
        return [3 + token % 90 for token in super().extend(messages, after="length")]


class TwoTurns(agentrl.Environment):
    """The first is short, the second is cut."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(agentrl.user("begin"), max_tokens=4)
        await ctx.agent("solver").act(agentrl.user("go on"))
        ctx.agent("solver").reward(1.0)


SPEC = EpisodeSpec(
    episode_id="e0",
    environment="two-turns",
    task=Task(id="t", data={}),
    seed=7,
    seats={"solver": SeatBinding("solver")},
    group_id="g0",
)


class Host:
    """Of an episode without children."""

    def spawn(self, *arguments: Any) -> Any:
        raise EngineError("no children here")

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        raise AssertionError("nothing is proposed here")

    def readmit(self, spec: EpisodeSpec) -> None:
        raise EngineError("no second attempt here")


def worker_over(
    engine: Engine, journal: MemoryJournal, sampling: dict[str, Any], partition: str = "0"
) -> AsyncioWorker:
    settings = RolloutSettings(
        seat=seat_settings(SamplingConfig(max_turns=4, max_tokens=TOKENS, **sampling), 256),
        tool_timeout_s=60.0,
        episode_timeout_s=600.0,
    )
    runner = EpisodeRunner(
        engine=engine,
        chat_format=SmallFormat(),
        store=journal,
        log=journal.turn_log(partition),
        host=Host(),
        clock=SystemClock(),
        settings=settings,
    )
    return AsyncioWorker(
        runner, environments={"two-turns": TwoTurns}, data_attempts=1, on_failure=lambda error: pytest.fail(str(error))
    )


def moe_engine(zoo: ModelZoo) -> EmbeddedEngine:
    return load_engine(zoo, "qwen3_moe", capture_routing=True, capture_mask=True, clock=StepClock())


async def interrupted(zoo: ModelZoo, how: str, sampling: dict[str, Any]) -> TrajectoryRow:
    """The row of the episode, interrupted in its second turn."""
    engine, journal = moe_engine(zoo), MemoryJournal()
    worker = worker_over(engine, journal, sampling)
    journal.admit(SPEC)
    worker.submit(SPEC, lambda header: None)
    if how != "nothing":
        await until(lambda: engine.stats.sampled_tokens > 4 + 20)
    if how == "abort":
        engine.abort("e0.0.r#1")
    elif how in ("park", "update", "kill", "another worker"):
        worker.park("e0")
        await until(lambda: bool(journal.turn_log("0").partials_on_disk))
    if how == "update":
        await engine.serve([zoo.full(NEW, "qwen3_moe", seed=1)])
    partition = "1" if how == "another worker" else "0"
    if how in ("kill", "another worker"):
        journal = journal.after_crash()
        await worker.cancel()
        await engine.close()
        engine = moe_engine(zoo)
        worker = worker_over(engine, journal, sampling, partition)
        worker.submit(SPEC, lambda header: None, resume=True)
    worker.unpark()
    await worker.drain()
    await engine.close()
    (trajectory,) = assemble_trajectories(journal.turn_log(partition).read("e0", 0))
    (row,) = trajectory.rows
    return row


@pytest.mark.parametrize("how", ["abort", "park", "kill", "another worker"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}])
def test_a_cut_turn_is_the_turn_it_would_have_been(zoo: ModelZoo, how: str, sampling: dict[str, Any]) -> None:
    whole = asyncio.run(interrupted(zoo, "nothing", sampling))
    row = asyncio.run(interrupted(zoo, how, sampling))
    assert row.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(row.logprobs, whole.logprobs, atol=1e-5)
    (routing,), (expected,) = spans_of(row), spans_of(whole)
    assert routing[:2] == expected[:2] == (0, len(row.token_ids))
    assert routing.experts.tolist() == expected.experts.tolist()
    assert routing.experts.min() >= 0
    assert {span.version for span in row.spans} == {OLD}
    if not sampling:
        assert row.kept is whole.kept is None
        return
    assert row.kept is not None
    assert whole.kept is not None
    missing = row.kept.counts == KeptCount.MISSING
    assert missing.any() == (how in ("kill", "another worker"))
    assert row.kept.counts[~missing].tolist() == whole.kept.counts[~missing].tolist()


def test_a_turn_parked_over_an_update_is_sampled_by_both_versions(zoo: ModelZoo) -> None:
    row = asyncio.run(interrupted(zoo, "update", {}))
    assert [span.version for span in row.spans] == [OLD, OLD, NEW]
    for seed, span in zip((0, 0, 1), row.spans, strict=True):
        scores = plain_logprobs(zoo.load("qwen3_moe", seed), row.token_ids)
        positions = np.arange(span.start, span.stop)
        np.testing.assert_allclose(row.logprobs[positions], scores[positions - 1, row.token_ids[positions]], atol=2e-4)
    at = row.spans[-1].start
    before, after = spans_of(row)
    assert (before.start, before.stop, after.start, after.stop) == (0, at, at, len(row.token_ids))
    assert np.array_equal(before.experts, plain_routing(zoo.load("qwen3_moe", 0), row.token_ids)[: at - 1])
    assert np.array_equal(after.experts, plain_routing(zoo.load("qwen3_moe", 1), row.token_ids)[:-1])
