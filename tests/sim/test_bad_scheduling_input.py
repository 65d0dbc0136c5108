"""What a scheduler cannot serve: refused before anything is sampled, or ended by name, with the words a user reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.plan import resolve
from agentrl.app.policies import split_group_warnings
from agentrl.core.errors import CheckFailedError, ConfigError, EnvironmentDefinitionError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.environment.tools import ToolEpisode
from agentrl.journal.entries import ToolEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import Ask, Guess, SmallRun, config_for

pytestmark = pytest.mark.sim

TASKS = [Task(id=f"{number}", data={"question": "?"}) for number in range(4)]


def run_of(program: type[agentrl.Environment], name: str = "", **changes: Any) -> SmallRun:
    """A run, to its end, whose policy calls a tool, or only talks."""
    said = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{}}}}</tool_call>' if name else "four"

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        """In half of the turns, the answer."""
        return [*(b"4" if request.seed % 2 else said.encode()), STOP_TOKEN]

    options = {"seconds_per_token": 0.01, **changes.pop("engine", {})}
    sampling = {"max_tokens": 100, **changes.pop("sampling", {})}
    run = SmallRun(
        config=config_for(seats={"agent": "guesser"}, sampling=sampling, **changes),
        environment=program,
        tasks=TASKS,
        script=script,
        engine_options=options,
    )
    simulate(run.run, seed=0)
    return run


def ends(run: SmallRun) -> Counter[str]:
    records = run.journal.of_kind(EpisodeEnd)
    return Counter(end.header.drop_reason or end.header.stop_reason or "" for end in records)


class Chatter(agentrl.Environment):
    """Asks on and on."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        agent.reward(ctx.rng.random())
        while True:
            await agent.act(agentrl.user("and then?"))


class Wordy(agentrl.ToolEnvironment):
    """A tool whose answer no context holds, and tools that take no time, or for ever."""

    def reward(self, task: Task, episode: ToolEpisode) -> float:
        return float(episode.answer == "4")

    @agentrl.tool
    def recite(self) -> str:
        """Say more than fits."""
        return "x" * 5000

    @agentrl.tool
    def at_once(self) -> str:
        """Take no time."""
        return "here"

    @agentrl.tool(timeout_s=3.0)
    async def for_ever(self) -> str:
        """Never return."""
        await asyncio.get_running_loop().create_future()
        return "never"

    @agentrl.tool(timeout_s=3.0)
    async def deaf(self) -> str:
        """Never return, whoever cancels it."""
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue


# --- longer than the engine's memory --------------------------------------------------------------------------------


def test_an_episode_that_outgrows_the_context_is_truncated_and_trained() -> None:
    run = run_of(Chatter, engine={"max_context": 60}, sampling={"max_turns": 100})
    assert len(run.trainer.batches) == 4
    assert ends(run).keys() <= {"context_length", "run_ended"}


def test_so_is_one_whose_tool_says_more_than_fits() -> None:
    run = run_of(Wordy, "recite", engine={"max_context": 400})
    assert len(run.trainer.batches) == 4
    assert ends(run)["context_length"] > 0
    assert ends(run).keys() <= {"context_length", "completed", "run_ended"}


def test_a_first_prompt_that_does_not_fit_ends_the_run_by_name() -> None:
    with pytest.raises(CheckFailedError, match=r"(?s)prompt_too_long.* 8; raise engine\.max_context"):
        run_of(Chatter, engine={"max_context": 8})


# --- groups and steps that do not fit --------------------------------------------------------------------------------


def refused(environment: type[agentrl.Environment], **changes: Any) -> str:
    with pytest.raises((ConfigError, EnvironmentDefinitionError)) as refusal:
        resolve(config_for(**changes), environment)
    return str(refusal.value)


def test_a_group_larger_than_the_bound_on_what_is_in_flight_is_refused() -> None:
    assert refused(Guess, max_in_flight=3) == (
        "credit.group_size = 4 is larger than max_in_flight = 3, so no group could start: raise max_in_flight, or "
        "lower credit.group_size"
    )
    assert (
        "raise policies.guesser.step_size to 12 or more, or lower credit.group_size, the fan-out or the branches"
        in refused(Ask, step_size=5)
    )


def test_a_step_that_no_fan_out_can_fill_is_refused() -> None:
    told = refused(Ask, step_size=30, max_staleness=0)
    assert told.startswith("policies.guesser.step_size = 30 ")
    assert "12 units of guesser" in told
    assert "step_size = 24 or 36, or max_staleness = 1" in told
    for step_size, staleness in ((36, 0), (30, 1)):
        resolve(config_for(step_size=step_size, max_staleness=staleness), Ask)


def test_steps_that_end_inside_groups_are_told_with_a_size_that_fits() -> None:
    def told(**changes: Any) -> list[str]:
        config = config_for(**changes)
        return list(split_group_warnings(config.trained, "group", resolve(config, Guess).demands))

    [line] = told(step_size=6, max_staleness=1)
    assert "policies.guesser.step_size = 6 is not a multiple of the 4 units" in line
    assert line.endswith("Set step_size = 8 for whole groups")
    assert told(step_size=8, max_staleness=1) == []


class Nobody(Ask):
    """Declares that it starts none."""

    fan_out: ClassVar[dict[str, int]] = {"Guess": 0}


def test_a_fan_out_of_none_is_refused() -> None:
    Nobody.__module__ = Ask.__module__
    assert "Nobody.fan_out['Guess'] is 0;" in refused(Nobody)


class Fewer(Ask):
    """Says that it starts two, and starts none: no step of who plays in them alone can ever be filled."""

    seats = ("parent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        parent = ctx.agent("parent")
        await parent.act(agentrl.user("And?"))
        parent.reward(ctx.rng.random())


def test_a_step_that_nobody_fills_ends_the_run_by_name() -> None:
    Fewer.__module__ = Ask.__module__
    policies = {"parent": {"kind": "frozen"}, "guesser": {"step_size": 8}}
    run = SmallRun(config=config_for(policies=policies), environment=Fewer)
    with pytest.raises(CheckFailedError, match=r"(?s)root episodes, .* gave guesser nothing to train on") as error:
        simulate(run.run, seed=0)
    assert re.search(rf"; `agentrl episode show {run.config.name} e\d+` shows the last episode", str(error.value))


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["group", "late"])
def test_tools_that_take_no_time_are_tools(release: str) -> None:
    run = run_of(Wordy, "at_once", credit={"group_size": 4, "release": release})
    assert len(run.trainer.batches) == 4
    assert ends(run)["completed"] > 0


@pytest.mark.parametrize("release", ["group", "late"])
def test_a_tool_that_never_returns_costs_a_turn(release: str) -> None:
    run = run_of(
        Wordy,
        "for_ever",
        credit={"group_size": 4, "release": release},
    )
    assert len(run.trainer.batches) == 4
    assert ends(run).keys() <= {"completed", "max_turns", "run_ended"}
    entries = [entry.decode() for entry in run.journal.turn_log("0").entries]
    said = {(entry.outcome, entry.observation) for entry in entries if isinstance(entry, ToolEntry)}
    assert said == {("timeout", "error: timed out after 3 s (its @tool(timeout_s=…))")}


def test_one_that_nobody_can_cancel_costs_its_episode() -> None:
    run = run_of(Wordy, "deaf", episode_timeout_s=20.0)
    assert len(run.trainer.batches) == 4
    assert ends(run)["episode_timeout"] > 0
    details = {end.detail for end in run.journal.of_kind(EpisodeEnd) if end.header.drop_reason == "episode_timeout"}
    assert all("ignored the cancellation" in detail for detail in details)
