"""Real scripted runs whose sandboxes fail: no failure may become a reward.

    python -m benchmarks.oracle --part failures

The sandbox raises `InfrastructureError` in seven of ten calls, wherever an environment can ask one: effects, plain and
external tools, resources of every level, a factory, the program, a reward, a tool environment and an agent from
outside. Half of the programs catch every error and make a reward of 0 of it. Sound episodes have a reward of 1 or more.
Back-off is shortened to a hundredth. The negative control leaves out that a failed call ends its episode.

Figures: `zeros_from_failures`, committed episodes whose reward comes from a failure; `zeros_without_the_rule`, the same
of the negative control; `infrastructure_failures` that were raised, `failures_committed` and `failures_dropped`,
episodes of each end; `failures_unnamed`, dropped ones with another reason.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import ClassVar

import agentrl
from agentrl.core import clock
from agentrl.core.records import Task
from agentrl.rollout.calls.journal import CallJournal
from benchmarks.oracle_lives import life, query
from tests.replay import sandboxes
from tests.replay.sandboxes import ONCE, WAYS, Asks, Sandbox, calls_the_tool_once

STEPS, QUICK_STEPS = 24, 3
LIFE_LIMIT_S = 400.0
RATE = 0.7
COUNT, WITHOUT_THE_RULE = "INFRASTRUCTURE_FAILURES", "FAILED_CALLS_END_NOTHING"
NAMED = ("infrastructure", "unknown_outcome_error")


def _tasks(cls: type, split: str, *, seed: int = 0) -> agentrl.TaskSource:
    return [Task(id=f"{n}", data={"question": "?"}) for n in range(64)]


class Mixed(Asks):
    """Each way to ask a sandbox, by a program that catches nothing and by one that catches everything."""

    ways: ClassVar[list[str]] = [*WAYS, *ONCE]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await super().run(ctx)
        except Exception:
            if not ctx.task.data["swallows"]:
                raise
            ctx.agent("solver").reward(0.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [
            Task(id=f"{way}-{swallows}-{n}", data={"way": way, "swallows": swallows})
            for n in range(4)
            for way in cls.ways
            for swallows in (False, True)
            if (way, swallows) != ("program", True)  # what a program raises and catches itself is its own
        ]


class Uses(sandboxes.Uses):
    tasks, script = classmethod(_tasks), staticmethod(calls_the_tool_once)


class UsesOutside(sandboxes.UsesOutside):
    tasks, script = classmethod(_tasks), staticmethod(calls_the_tool_once)


class UsesAnEffect(sandboxes.UsesAnEffect):
    tasks, script = classmethod(_tasks), staticmethod(calls_the_tool_once)


class Scores(sandboxes.Scores):
    tasks, script = classmethod(_tasks), staticmethod(calls_the_tool_once)


class Outside(sandboxes.Outside):
    tasks = classmethod(_tasks)


if count := os.environ.get(COUNT):
    Sandbox.rate = RATE
    clock.FIRST_WAIT_S = clock.FIRST_WAIT_S / 100
    atexit.register(lambda: Path(count).write_text(str(Sandbox.failed)))
    if os.environ.get(WITHOUT_THE_RULE):
        CallJournal.fail = lambda self, error: None  # type: ignore[method-assign]


def measure(quick: bool) -> dict[str, float | None]:
    """Run every environment to its end, and look at what was committed."""
    runs = [Mixed] if quick else [Mixed, Uses, UsesOutside, UsesAnEffect, Scores, Outside]
    zeros, committed, dropped, unnamed, raised = 0, 0, 0, list[str](), 0
    with tempfile.TemporaryDirectory(prefix="agentrl-failures-") as scratch:
        without = Path(scratch, "without")
        _run(Mixed, without, QUICK_STEPS, **{WITHOUT_THE_RULE: "1"})
        control = _zeros(without)
        for environment in runs:
            directory = Path(scratch, environment.__name__)
            raised += _run(environment, directory, QUICK_STEPS if quick else STEPS)
            zeros += (found := _zeros(directory))
            ends = query(_control(directory), "SELECT drop_reason, detail FROM episodes")
            committed += sum(reason is None for reason, _ in ends)
            dropped += sum(reason in NAMED for reason, _ in ends)
            unnamed += [f"{reason}: {detail}" for reason, detail in ends if reason not in (None, "run_ended", *NAMED)]
            print(f"{environment.__name__}: {len(ends)} episodes, {found} zeros", flush=True)
    for line in unnamed[:10]:
        print(line, flush=True)
    return {
        "zeros_from_failures": float(zeros),
        "zeros_without_the_rule": float(control),
        "infrastructure_failures": float(raised),
        "failures_committed": float(committed),
        "failures_dropped": float(dropped),
        "failures_unnamed": float(len(unnamed)),
    }


def _run(environment: type, directory: Path, steps: int, **variables: str) -> int:
    """Run an environment to its end; returns the number of failures that its sandbox raised."""
    directory.mkdir()
    count = directory / "failures"
    name = f"{__name__}:{environment.__name__}"
    with life(name, directory, steps=steps, **{COUNT: str(count)}, **variables) as process:
        if process.wait(LIFE_LIMIT_S):
            raise SystemExit(f"{name} ended:\n{(directory / 'log').read_text(errors='replace')[-3000:]}")
    return int(count.read_text())


def _control(directory: Path) -> Path:
    return directory / "run" / "journal" / "control.db"


def _zeros(directory: Path) -> int:
    statement = "SELECT count(*) FROM episodes WHERE drop_reason IS NULL AND (reward IS NULL OR reward < 1)"
    ((zeros,),) = query(_control(directory), statement)
    return int(zeros)
