"""Distillation and dynamic sampling on frozen lakes: a part of `benchmarks.learning`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentrl
from agentrl.config.load import load
from benchmarks.killed_runs import ROOT
from benchmarks.report import completed

GROUP = 8
STEPS = 100
EVERY = 5
DISTILLED_STEPS = 64
REACHED = 0.9

SETTINGS = (
    f"steps={STEPS}",
    "evaluation.tasks=256",
    f"evaluation.every={EVERY}",
    "checkpoint.every=0",
)
DISTILLED = (
    f"steps={DISTILLED_STEPS}",
    "trainer.loss.name=distillation",
    "trainer.entropy_bonus=0",
    "policies.player.learning_rate=1.6e-3",  # a target for every token bears more than a reward per episode
    "credit.advantage=none",
    "credit.group_size=1",  # nobody is compared, so each episode of a step is of another map
    "evaluation.every=4",
)


def train(directory: Path, name: str, *changes: str) -> agentrl.Run:
    """A run of the frozen lakes, whose model has 0.39 M parameters."""
    overrides = [*SETTINGS, f"directory={directory}", f"name={name}", *changes]
    return completed(agentrl.train(load(ROOT / "examples/02_gymnasium.toml", overrides), quiet=True))


def rewards(run: agentrl.Run) -> dict[int, float]:
    """Held-out rewards by step."""
    evaluations: list[Mapping[str, Any]] = run.summary["evaluations"]
    return {int(each["step"]): float(each["evaluation/reward"]) for each in evaluations}


def steps_to(run: agentrl.Run, reward: float) -> int | None:
    """The first evaluated step with that reward."""
    return next((step for step, found in sorted(rewards(run).items()) if found >= reward), None)


def tokens_to(run: agentrl.Run, step: int | None) -> float | None:
    """Tokens sampled for the steps up to one: trained ones, and those of dropped groups by the mean of an episode."""
    if step is None:
        return None
    return sum(
        each["step/tokens"] + GROUP * each.get("groups/no_signal", 0.0) * each.get("episodes/tokens", 0.0)
        for each in run.metrics[:step]
    )


def figures(quick: bool) -> dict[str, float | None]:
    """See `benchmarks.learning`; null where a run did not reach the reward."""
    if quick:
        return {}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        teacher = train(directory, "teacher")
        best = rewards(teacher)[STEPS]
        student = train(directory, "student", *DISTILLED, f"policies.player.reference={teacher.policies['player']}")
        selected = train(directory, "dynamic_sampling", "credit.dynamic_sampling=true")
        for run in (teacher, student, selected):
            print(f"{run.path.name}: {rewards(run)}", flush=True)
        taught, learned = steps_to(teacher, REACHED * best), steps_to(student, REACHED * best)
        return {
            "distilled_end": rewards(student)[DISTILLED_STEPS] / best,
            "distilled_steps_ratio": None if not (taught and learned) else taught / learned,
            "dynamic_sampling_tokens_to_reward": tokens_to(selected, steps_to(selected, REACHED * best)),
            "plain_tokens_to_reward": tokens_to(teacher, taught),
        }
