"""Agents written for libraries of others train unmodified, and go on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from tests.outside_agents.environments import AGENTS, InstallationError, install
from tests.outside_agents.record import PROGRAMS
from tests.outside_agents.runs import STEPS, UNKNOWN, call, train_killed
from tests.unit.episodes import Played, play

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]


@pytest.fixture(params=list(AGENTS), scope="module")
def library(request: pytest.FixtureRequest) -> str:
    """The name of a library whose environment exists."""
    try:
        install(request.param)
    except InstallationError as error:
        if error.is_offline:
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    return str(request.param)


def test_an_agent_of_others_is_trained_killed_and_resumed(library: str, tmp_path: Path) -> None:
    outcome = train_killed(library, tmp_path)
    assert outcome.violations == []
    assert outcome.dropped == []
    assert outcome.steps == STEPS
    assert outcome.recalled > 0
    assert outcome.resampled_tokens == 0
    assert 0.0 < sum(outcome.rewards) / len(outcome.rewards) <= 1.0


def test_what_an_agent_does_about_a_tool_that_does_not_exist(library: str) -> None:
    environment = AGENTS[library]
    good = [
        call("mcp__sums__add" if library == "claude_agent_sdk" else "add", a=70_000, b=7_000),
        call("final_answer", answer="77000") if library == "smolagents" else "The sum is 77000",
    ]
    data = dict(environment.tasks("train")[0].data)

    if library == "autogen":
        good = good[1:]  # after the first round of calls it wants a text
    elif library in PROGRAMS:
        good = [*PROGRAMS[library]]

    def played(number: int, environment: type[agentrl.Environment]) -> Played:
        replies = [UNKNOWN] * number + good
        return play(environment, replies, data=data, max_turns=20, max_context=1 << 20, episode_timeout_s=300.0)

    is_patient = not (environment.unknown_tool or environment.patience)
    told = played(3 if is_patient else environment.patience, environment)
    assert (told.header.reward, told.header.drop_reason) == (1.0, None), told.told
    if not is_patient:
        assert played(environment.patience + 1, environment).header.reward == 0.0
    if environment.unknown_tool:
        name = environment.__name__
        dropped = type(name, (environment,), {"failed_reward": None, "__module__": __name__})
        message = played(environment.patience + 1, dropped).told
        assert f"failed_reward = 0.0` in class {name}." in message.partition("\n")[0]
        assert message.rpartition("\n")[2].partition(":")[0].endswith(environment.unknown_tool)
