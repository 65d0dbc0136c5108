"""Tasks that another package plays, in its own process: with the packages themselves, and with a stand-in for one."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError, InfrastructureError
from agentrl.core.records import EpisodeSpec, SeatBinding
from agentrl.environment.registry import name_of
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.check import check_environment
from agentrl.testing.execution import POLICY, Failure, execute_episode
from agentrl_formats import runner
from agentrl_formats.runner import RunnerEnvironment
from agentrl_formats.runners import Inspect, Verifiers
from tests.unit.episodes import Played, play

FORMATS = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))
SUMS = Path(__file__).parents[3] / "tests" / "support" / "sums"
"""A taskset of verifiers and a task of Inspect: twelve sums, each with two rewards."""

STANDIN = SUMS.with_name("inspect_standin")
TASKS = """
import os, subprocess
from inspect_ai import MemoryDataset, Sample, Score, Task, scorer

eval_value = eval

def words(count=3, marks=""):
    @scorer(metrics=[])
    def match():
        async def score(state, target):
            reply = state.output.completion
            if reply == "raise": raise ValueError("no such thing")
            if reply == "crash": os._exit(3)
            if reply == "wait":
                waiting = subprocess.Popen(["sleep", "300"], start_new_session=True)
                open(marks, "w").write(str(waiting.pid))
                waiting.wait()
            if reply.startswith("value "): return Score(eval_value(reply[6:]))
            return Score("C" if reply == "right" else "I")
        return score

    @scorer(metrics=[], name="a-b")
    def parts():
        async def score(state, target):
            reply = state.output.completion
            if reply.startswith("value "): return None
            if reply == "flood": return Score({f"{number:0100}": 0.5 for number in range(6_000)})
            if reply == "two names": return Score({"x": 0.5, "x ": 0.5, "x-": 1.0})
            return Score({"x": 0.5})
        return score

    samples = [Sample(f"word {n}", id=None if n == 1 else f"word {n}") for n in range(1, count + 1)]
    return Task(MemoryDataset(samples), scorer=[match(), parts()])
"""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A task of Inspect, and a stand-in for its package."""
    (tmp_path / "tasks.py").write_text(TASKS)
    return {
        "taskset": "tasks:words",
        "path": [str(tmp_path), str(STANDIN)],
        "config": {"marks": str(tmp_path / "mark")},
    }


def tasks_of(environment: type[RunnerEnvironment], **options: Any) -> list[agentrl.Task]:
    return list(environment.tasks("train", held_out=0.0, **options))  # type: ignore[call-overload]


def played(environment: type[agentrl.Environment], task: agentrl.Task, replies: Sequence[str], **more: Any) -> Played:
    return play(environment, replies, data=dict(task.data), **more)


def test_tasks_are_those_of_the_package(options: dict[str, Any]) -> None:
    first, *rest = [task.id for task in tasks_of(Inspect, **options)]
    assert re.fullmatch("[0-9a-f]{16}", first)  # of its content
    assert rest == ["word 2", "word 3"]
    with pytest.raises(EnvironmentDefinitionError, match="No module named 'absent'"):
        tasks_of(Inspect, **{**options, "taskset": "absent:words"})
    with pytest.raises(EnvironmentDefinitionError, match="no-such-python"):
        tasks_of(Inspect, **options, python="no-such-python")


def test_an_episode_gets_the_rewards_of_the_package(options: dict[str, Any]) -> None:
    [_, task, _] = tasks_of(Inspect, **options)
    done = played(Inspect, task, ["right"])
    assert done.header.reward == 1.5, done.said
    assert b"word 2" in bytes(token for token in done.seen[0] if token < 256)
    assert played(Inspect, task, ["wrong"]).header.reward == 0.5


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("raise", "ValueError: no such thing"),
        ("crash", "process ended with status 768"),
        ("flood", "status 0 and 524289 bytes"),
    ],
)
def test_a_failure_is_an_error_or_the_failed_reward(reply: str, error: str, options: dict[str, Any]) -> None:
    class Forgiving(Inspect):
        failed_reward = -1.0

    task = tasks_of(Inspect, **options)[0]
    assert error in played(Inspect, task, [reply]).said
    assert played(Forgiving, task, [reply]).header.reward == -1.0


@pytest.mark.parametrize(
    ("value", "reward"),
    [("0", 0.0), ("'0.0'", 0.0), ("'N'", 0.0), ("'no'", 0.0), ("'P'", 0.5), ("'0.25'", 0.25), ("1", 1.0), ("1.5", 1.5)],
)
def test_a_score_of_inspect_is_the_packages_number(value: str, reward: float, options: dict[str, Any]) -> None:
    assert played(Inspect, tasks_of(Inspect, **options)[0], [f"value {value}"]).header.reward == reward


@pytest.mark.parametrize(
    ("reply", "reason", "problem"),
    [
        ("value 'excellent'", "environment_error", "the score match is 'excellent', which is no number"),
        ("value [1.0]", "environment_error", "the score match is [1.0], which is no number"),
        ("value None", "environment_error", "the score match is None, which is no number"),
        ("value True", "bad_reward", "inspect, 'match': the reward is True (bool)"),
        ("value float('nan')", "bad_reward", "inspect, 'match': the reward is nan"),
        ("value float('inf')", "bad_reward", "inspect, 'match': the reward is inf"),
        ("value 1e7", "bad_reward", "inspect, 'match': the reward is 1e+07"),
        ("two names", "environment_error", "the names of rewards are equal in letters and digits: match, a-b_x, a-b_x"),
    ],
)
def test_a_score_that_is_no_number_is_refused_by_name(
    reply: str, reason: str, problem: str, options: dict[str, Any]
) -> None:
    done = played(Inspect, tasks_of(Inspect, **options)[0], [reply])
    assert (done.header.reward, done.header.drop_reason) == (None, reason)
    assert problem in done.said


def test_an_episode_cut_by_a_limit_gets_the_reward_of_truncated_ones(options: dict[str, Any]) -> None:
    task = tasks_of(Inspect, **options)[0]
    assert played(Inspect, task, ["again", "right"]).header.reward == 1.5
    done = played(Inspect, task, ["again"], max_turns=1)
    assert (done.header.reward, done.header.stop_reason) == (0.0, "max_turns")


def test_a_cancelled_episode_ends_with_all_it_started(options: dict[str, Any], tmp_path: Path) -> None:
    """Also a program in a session of its own."""
    done = played(Inspect, tasks_of(Inspect, **options)[0], ["wait"], episode_timeout_s=2.0)
    assert done.header.stop_reason == "time_limit" or done.said
    process = int((tmp_path / "mark").read_text())
    asyncio.run(_gone(process))


async def _gone(process: int) -> None:
    async with asyncio.timeout(20):
        while Path(f"/proc/{process}").exists():  # noqa: ASYNC240
            await asyncio.sleep(0.01)


def test_a_killed_runner_is_started_again(options: dict[str, Any]) -> None:
    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(Inspect),
        task=tasks_of(Inspect, **options)[0],
        seed=0,
        seats={"agent": SeatBinding(POLICY)},
        group_id="g0",
    )

    async def reward(*, kill: bool = False) -> float | str | None:
        def script(*request: object) -> list[int]:
            if kill:
                [standing] = [each for (loop, _), each in runner._runners.items() if not loop.is_closed()]
                assert standing._process is not None
                standing._process.kill()
            return [*b"right", STOP_TOKEN]

        outcome = await execute_episode(Inspect, spec, script)
        return outcome.text if isinstance(outcome, Failure) else outcome.header.reward

    async def thrice() -> list[float | str | None]:
        return [await reward(), await reward(kill=True), await reward()]

    first, killed, last = asyncio.run(thrice())
    assert (first, last) == (1.5, 1.5)
    assert "the runner ended with status -9" in str(killed)


@pytest.mark.parametrize(
    ("environment", "package", "taskset"),
    [(Verifiers, "verifiers", "sums-v1"), (Inspect, "inspect", "sums_task:sums")],
)
def test_the_packages_themselves(environment: type[RunnerEnvironment], package: str, taskset: str) -> None:
    python = FORMATS / package / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {python}, with {package}; see benchmarks/sandboxes_formats.py")
    options = {"taskset": taskset, "python": str(python), "path": [str(SUMS)]}
    [task] = [task for task in tasks_of(environment, **options) if task.id == "3"]
    right, wrong = (played(environment, task, [reply]).header.reward for reply in ("13", "The answer is 14."))
    assert (right, wrong) == ((1.2, 0.0) if environment is Verifiers else (2.0, 0.0))
    report = check_environment(environment, options=options, episodes=1)
    assert not report.findings
    assert report.figures["resume_class"] == "replay"


@pytest.mark.parametrize("line", ["'x' * 2_000_000", "'[]'", "'{}'", "'[' * 100_000", "'nonsense'"])
def test_an_unreadable_answer_ends_the_runner_and_not_the_wait(line: str) -> None:
    command = (sys.executable, "-c", f"input(); print({line}, flush=True); input()")

    async def run() -> None:
        with pytest.raises(InfrastructureError, match="status -9, after an unreadable answer"):
            await runner._Runner(command).play({})

    asyncio.run(asyncio.wait_for(run(), 30))
