"""Time ends what hangs, and nobody else: an episode whose agents have acted is truncated, whatever it was doing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, EnvironmentDefinitionError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.journal.entries import UnansweredEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.observe.alarms import find_alarms
from agentrl.observe.run_state import RunDisplaySettings, RunSnapshot, RunState
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.episode import GRACE_S
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.replay.executions import Stage, resumed_everywhere
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim

HOURS = 3.0 * 3600.0
"""Longer than any limit here."""


async def for_ever() -> str:
    await asyncio.sleep(HOURS)
    return "at last"


class Hangs(agentrl.Environment):
    """Acts once, then does what its task says; gives no reward itself."""

    truncated_reward = -1.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, how = ctx.agent("agent"), ctx.task.data["how"]
        if how == "before any turn":
            await ctx.effect("hang", for_ever)
        await agent.act(agentrl.user("hello"))
        if how == "effect":
            await ctx.effect("hang", for_ever)
        elif how == "tool":
            await ctx.call_tool("hang", {}, for_ever, external=False, timeout_s=HOURS)
        elif how == "external tool":
            await ctx.call_tool("hang", {}, for_ever, external=True, timeout_s=HOURS)
        elif how == "sleeps":
            while True:
                await ctx.sleep(600.0)
        elif how == "branches":
            await ctx.gather(ctx.sleep(1.0), ctx.effect("one", for_ever), ctx.effect("another", for_ever))
        elif how == "own code":
            await for_ever()
        agent.reward(1.0)


ENDED = ["effect", "tool", "external tool", "sleeps", "branches"]


@pytest.mark.parametrize("how", ENDED)
def test_an_act_that_hangs_after_a_turn_truncates_the_episode_also_on_re_execution(how: str) -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=Hangs, data={"how": how}))
    for execution in (whole, *resumed):
        assert execution.header is not None
        assert (execution.header.stop_reason, execution.header.drop_reason) == ("time_limit", None)
        assert execution.header.reward == -1.0
    assert resumed[-1].transcript == whole.transcript
    limits = [body for body in whole.bodies.values() if isinstance(body, UnansweredEntry)]
    assert len(limits) == (2 if how == "branches" else 1)


@pytest.mark.parametrize("how", ["before any turn", "own code"])
def test_what_hangs_before_any_turn_or_outside_ctx_has_failed(how: str) -> None:
    played = Stage(environment=Hangs, data={"how": how}).play()
    assert played.header is None
    assert played.error is not None
    assert played.error.reason == "episode_timeout"


class Catches(agentrl.ToolEnvironment):
    """The reward is the environment's own, as for every other limit."""

    seats = ("agent",)

    @agentrl.tool(external=True)
    async def wait(self) -> str:
        """Wait."""
        return await for_ever()

    def prompt(self, task: agentrl.Task) -> str:
        return "wait"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return -0.25 if episode.truncated else 1.0


def calls_wait(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*b'<tool_call>{"name": "wait", "arguments": {}}</tool_call>', STOP_TOKEN]


class Insists(agentrl.Environment):
    """Catches the limit, and would go on as if nothing had happened."""

    refused: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        await agent.act(agentrl.user("hello"))
        try:
            await ctx.effect("hang", for_ever)
        except agentrl.LimitReachedError:
            await ctx.effect("tidy", lambda: None)
        agent.reward(0.5)
        await agent.act(agentrl.user("again"))


def test_no_turn_begins_after_it_and_what_tidies_up_still_runs() -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=Insists))
    for execution in (whole, *resumed):
        assert execution.header is not None
        assert execution.header.stop_reason == "time_limit"
        assert (execution.header.turns, execution.header.reward) == (1, 0.5)
        assert execution.transcript == whole.transcript


class TidiesUp(agentrl.Environment):
    """Catches the limit, hangs in code of its own, and is some seconds about to end."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("hello"))
        with contextlib.suppress(agentrl.LimitReachedError):
            await ctx.effect("hang", for_ever)
        try:
            await for_ever()
        finally:
            await asyncio.sleep(GRACE_S - 1.0)


def test_the_seconds_to_end_in_count_from_the_newest_expiry() -> None:
    async def main() -> None:
        await SmallRun(config=config_for(steps=1, episode_timeout_s=2.0), environment=TidiesUp).run()

    with pytest.raises(CheckFailedError, match="took longer than 2 s without a turn"):
        simulate(main, seed=0)


class Patient(agentrl.Environment):
    """Takes hours, and never long between two turns; its child takes hours as well."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for _ in range(20):
            await ctx.sleep(3000.0)
            await agent.act(agentrl.user("go on"))
        if "~" not in ctx.task.id:
            await ctx.gather(*ctx.spawn(Patient, {}))
        agent.reward(1.0)


def test_an_episode_that_gets_on_has_all_the_time_it_takes_and_so_has_its_child() -> None:
    played = Stage(environment=Patient).play()
    assert played.header is not None
    assert played.header.stop_reason == "completed"
    assert played.header.seconds > 2 * 20 * 3000.0


class Tail(agentrl.Environment):
    """Long answers are better, and take a log-normal time with P90 at five medians, turn by turn."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        turn = await guesser.act(agentrl.user("long or short?"))
        is_long = is_long_answer(turn.text)
        left = min(ctx.rng.lognormvariate(0.0, 1.256), 40.0) * (5.0 if is_long else 1.0)
        while left > 0:
            await ctx.sleep(min(left, 9.0))
            left -= 9.0
            await guesser.act(agentrl.user("go on"))
        guesser.reward(float(is_long))


def is_long_answer(text: str) -> bool:
    return text.strip(".") < "5"


def gradient(run: SmallRun, *, within: float) -> float:
    """Σ score · advantage of the trained units over the true gradient of the dispatched: as it is, and without those
    that took longer than so many seconds."""
    ends = {end.header.episode_id: end for end in run.journal.of_kind(EpisodeEnd)}
    first = {
        entry.episode_id: body.text
        for entry in run.journal.turn_log("0").entries
        if entry.call_id == "r#0"
        for body in [entry.decode()]
    }
    total = 0.0
    for batch in run.trainer.batches:
        groups: dict[str, list[tuple[float, float]]] = {}
        for unit in batch.units:
            end = ends[unit.episode_id]
            if end.header.seconds <= within:
                score = float(is_long_answer(first[unit.episode_id])) - 0.5
                groups.setdefault(end.spec.group_id, []).append((score, end.header.reward or 0.0))
        for members in groups.values():
            for score, reward in members:
                others = [r for _, r in members]
                baseline = (sum(others) - reward) / max(len(others) - 1, 1)
                total += score * (reward - baseline)
    units = sum(len(batch.units) for batch in run.trainer.batches)
    return total / (units * 0.25)


def test_the_gradient_is_the_true_one_under_a_tail_that_the_limit_is_far_below() -> None:
    """Half the policy's answers are long: score ± ½. The limit is below the median of the long ones."""

    async def main() -> SmallRun:
        config = config_for(
            step_size=64,
            steps=16,
            episode_timeout_s=10.0,
            credit={"group_size": 8},
            sampling={"max_turns": 100},
            max_in_flight=512,
        )
        run = SmallRun(config=config, environment=Tail, engine_options={"seconds_per_token": 0.0})
        await run.run()
        return run

    run = simulate(main, seed=0)
    assert set(run.orchestrator.buffer.ledger.dropped) <= {"run_ended"}
    assert gradient(run, within=float("inf")) == pytest.approx(1.0, abs=0.06), "three standard errors of 128 groups"
    assert gradient(run, within=10.0) < 0.85, "were who is slow dropped"


def test_time_that_ends_episodes_is_counted_and_dropping_for_it_raises_an_alarm() -> None:
    class Some(Hangs):
        seats = ("guesser",)

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            guesser, drawn = ctx.agent("guesser"), ctx.rng.random()
            await guesser.act(agentrl.user("hello"))
            if drawn < 0.1:
                await ctx.effect("hang", for_ever)
            if drawn > 0.85:
                await for_ever()
            guesser.reward(drawn)

    async def main() -> SmallRun:
        run = SmallRun(config=config_for(steps=6, episode_timeout_s=5.0), environment=Some)
        await run.run()
        return run

    run = simulate(main, seed=0)
    shares = [values["episodes/timed_out"] for _, _, values in run.seen.steps if "episodes/timed_out" in values]
    assert shares
    assert 0 < sum(shares) / len(shares) < 0.6
    reasons = {end.header.stop_reason for end in run.journal.of_kind(EpisodeEnd) if end.header.committed}
    assert reasons == {"completed", "time_limit"}
    place = f"it waited at {__file__}:{for_ever.__code__.co_firstlineno + 1} in for_ever"
    truncated, dropped = (
        {
            end.detail
            for end in run.journal.of_kind(EpisodeEnd)
            if reason in (end.header.stop_reason, end.header.drop_reason)
        }
        for reason in ("time_limit", "episode_timeout")
    )
    assert truncated == {f"at the time limit, {place}"}
    assert dropped
    assert all(place in detail for detail in dropped)
    status = RunSnapshot(phase="training", dropped={"episode_timeout": 3}, trained=200)
    state = RunState(plan=RunDisplaySettings(max_staleness={"guesser": 1}), status=status)
    assert [alarm.name for alarm in find_alarms(state)] == ["dropped_by_time"]


def test_a_tool_environment_gives_the_reward_it_gives_for_every_limit(simulated_loop: SeededSimulation) -> None:
    async def main() -> Any:
        run = SmallRun(
            config=config_for(
                policies={"agent": {"step_size": 8}},
                steps=2,
                episode_timeout_s=5.0,
            ),
            environment=Catches,
            script=calls_wait,
        )
        await run.run()
        return {(e.header.stop_reason, e.header.reward) for e in run.journal.of_kind(EpisodeEnd) if e.header.committed}

    for ends in simulated_loop.run(main):
        assert ends == {("time_limit", -0.25)}


class Retries(agentrl.Environment):
    """The retry loop of many agent scripts, which meets the limit of turns for some tasks."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        is_done = False
        while not is_done:
            try:
                await guesser.act(agentrl.user("Guess."))
                is_done = len(guesser.turns) > 1 or int(ctx.task.data["digit"]) > 4
            except Exception:  # noqa: BLE001 - as many agent scripts do
                continue
        guesser.reward(ctx.rng.random())


class RetriesElsewhere(Retries):
    """Retries in a branch, or in a task of its own."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        retries = super().run(ctx)
        await (ctx.gather(retries, ctx.sleep(0.1)) if int(ctx.task.data["digit"]) % 2 else asyncio.create_task(retries))


class RetriesEverything(Retries):
    """Catches what no program should catch."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        is_done = False
        while not is_done:
            try:
                await guesser.act(agentrl.user("Guess."))
                is_done = len(guesser.turns) > 1 or int(ctx.task.data["digit"]) > 4
            except:  # noqa: E722 - as some agent scripts do
                continue
        guesser.reward(ctx.rng.random())


@pytest.mark.parametrize("environment", [Retries, RetriesElsewhere, RetriesEverything])
def test_a_retry_loop_at_a_limit_ends_its_episode_as_truncated(
    environment: type[agentrl.Environment], simulated_loop: SeededSimulation
) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(steps=2, sampling={"max_turns": 1}), environment=environment)
        await run.run()
        assert asyncio.get_running_loop().time() < run.config.episode_timeout_s
        ends = run.journal.of_kind(EpisodeEnd)
        assert {end.header.stop_reason for end in ends if end.header.committed} == {"completed", "max_turns"}
        cut = next(end for end in ends if end.header.stop_reason == "max_turns")
        assert "asked the agent again" in cut.detail
        assert not any(end.header.drop_reason == "environment_error" for end in ends)

    simulated_loop.run(main)


def test_a_retry_loop_around_a_wrong_argument_ends_the_run_with_its_error(simulated_loop: SeededSimulation) -> None:
    class Wrong(Retries):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            while True:
                with contextlib.suppress(BaseException):
                    await ctx.agent("guesser").act("Guess.")  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(EnvironmentDefinitionError, match="act"):
            await SmallRun(config=config_for(steps=1), environment=Wrong).run()

    simulated_loop.run(main)
