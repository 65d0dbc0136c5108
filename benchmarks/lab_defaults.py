"""Do runs learn on default settings? Small tasks that set only what they must: environment, model, seats and limits.

    python -m benchmarks.lab --part defaults [--tasks NAME …] [--set KEY=VALUE …] [--directory DIR] [--seeds 3]

`rise_of_N`: of N runs, those whose held-out result ends at least two standard errors above its start. `collapses`: runs
that end two standard errors below it, or lose 90 % of a policy's entropy without a rise; `silent_collapses`: those
without an alarm. `shuffled_rise_of_N`: the control, in which the advantages of each group are shuffled. Kuhn poker is
measured by its exploitability, self-play by games against random moves, a proposer by its solver, imitation of the best
episodes of `calculator` by the calculator. A line per run has the least share of the first entropy, and the alarms.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import agentrl
from agentrl.config.load import parse_value
from agentrl.environments.propose_and_solve import Solve
from benchmarks import lab
from benchmarks.report import Report, completed

if TYPE_CHECKING:
    import argparse

ONE_TOKEN = {"sampling.max_tokens": 1}
LORA = {"lora": {"rank": 8}}
TASKS: dict[str, dict[str, Any]] = {
    "calculator": {"environment.id": "calculator"},
    "calculator_lora": {"environment.id": "calculator", "policies.policy": LORA},
    "frozen_lake": {"environment.id": "frozen_lake", "sampling.max_turns": 16, "steps": 64, **ONE_TOKEN},
    "code": {"environment.id": "benchmarks.lab_defaults:Code", "policies": {"speaker": {}, "listener": {}}},
    "signalling": {
        "environment.id": "agentrl.environments.signalling:Signalling",
        "policies": {"speaker": {}, "listener": {}},
        "steps": 160,
        **ONE_TOKEN,
    },
    "kuhn_poker": {
        "environment.id": "agentrl.environments.kuhn_poker:KuhnPoker",
        "policies": {"first": {}, "second": {}},
        "steps": 160,
        **ONE_TOKEN,
    },
    "tictactoe": {
        "environment.id": "agentrl.environments.tictactoe:TicTacToe",
        "sampling.max_turns": 12,
        "evaluation.tasks": 0,
        **ONE_TOKEN,
    },
    "propose_and_solve": {
        "environment.id": "agentrl.environments.propose_and_solve:ProposeAndSolve",
        "policies": {"proposer": LORA, "solver": LORA | {"step_size": 320}},
        "steps": {"proposer": 24, "solver": 10},
        "evaluation.tasks": 0,
    },
    "imitation": {
        "environment.id": "agentrl.environments.imitation:Imitation",
        "credit": {"advantage": "none", "group_size": 1},
        "steps": 24,
        "evaluation.tasks": 0,
    },
}
"""Settings of each task, by dotted name; `model.path` is that of `MODELS`."""
MODELS = {"calculator_lora": "calculator", "code": "calculator", "imitation": "calculator"}
SHUFFLED = {"credit.advantage": "benchmarks.lab_defaults:shuffled"}
RANDOM_MOVES = {"kind": "bot", "id": "agentrl.environments.tictactoe:random_player"}
CONTROLS = ("calculator", "frozen_lake")
ENTROPY_SHARE = 0.1
"""Share of the first entropy below which a policy that has not learned cannot learn any more."""


class Code(agentrl.Environment):
    """A speaker names a digit without saying it, and a listener guesses it: one of six."""

    seats: ClassVar[tuple[str, ...]] = ("speaker", "listener")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Play one round. Saying the digit costs 1."""
        speaker, listener, secret = ctx.agent("speaker"), ctx.agent("listener"), ctx.task.data["secret"]
        word = (await speaker.act(agentrl.user(f"{secret} ="))).text
        said = secret in word
        guess = "" if said else (await listener.act(agentrl.user(f"{word[:8]} ="))).text.strip()
        for agent in (speaker, listener):
            agent.reward(-1.0 if said else float(guess == secret))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return the six digits, again and again."""
        return [agentrl.Task(id=f"{split}-{at}", data={"secret": "456789"[at % 6]}) for at in range(192)]


def config_of(task: str, settings: Mapping[str, Any]) -> agentrl.RunConfig:
    """Return the configuration of a task."""
    nested: dict[str, Any] = {"model": {"path": f"agentrl.environments:{MODELS.get(task, task)}/model"}}
    for path, value in (deepcopy(TASKS[task]) | settings).items():
        *sections, key = path.split(".")
        reduce(lambda table, name: table.setdefault(name, {}), sections, nested)[key] = value
    return agentrl.RunConfig(**nested)


def examine(task: str, weights: Mapping[str, Path] | None) -> tuple[float, float]:
    """Return the held-out result of weights, or of the model without them, and its standard error."""
    settings: dict[str, Any] = {"evaluation.tasks": 512}
    if task == "tictactoe":
        settings |= {"policies": {"policy": {}, "random": RANDOM_MOVES}}
        settings |= {"seats": {"first": ["policy", "random"], "second": ["random", "policy"]}}
    config = config_of("calculator" if task == "imitation" else task, settings)
    result = agentrl.evaluate(config, weights, environment=Solve if task == "propose_and_solve" else None)
    if task == "tictactoe":
        return result["evaluation/reward/policy"], 0.5 / math.sqrt(512)  # at most: a game gives 0, ½ or 1
    return result["evaluation/reward"], result["evaluation/reward_error"] / 1.96


def measure(task: str, run: Path) -> dict[str, Any]:
    """Return start and end, the standard error of their difference, the least share of the first entropy, and the
    alarms of a run."""
    entropies = defaultdict[str, list[float]](lambda: [1.0])
    with agentrl.open_run(run) as opened:
        for value in opened.metrics():
            entropies[value.policy] += [value.value] * (value.name == "entropy")
        lines = sorted(opened.evaluations(), key=lambda line: line.step)
    if task == "kuhn_poker":
        ends = [(-value, 0.01) for value in lab.measure(lab.KUHN, run)]
    elif lines:
        ends = [(line.metrics["reward"], line.metrics["reward_error"] / 1.96) for line in (lines[0], lines[-1])]
    else:
        ends = [
            examine(task, weights) for weights in (None, {path.name: path for path in (run / "policies").iterdir()})
        ]
    alarms = run / "alarms.jsonl"
    return {
        "start": ends[0][0],
        "end": ends[1][0],
        "error": math.hypot(ends[0][1], ends[1][1]),
        "entropy": min(min(values[1:]) / values[1] for values in entropies.values() if len(values) > 1),
        "alarms": sorted({json.loads(line)["name"] for line in alarms.open()} if alarms.exists() else ()),
    }


@agentrl.advantage
def shuffled(group: agentrl.Group) -> list[float]:
    """Return the rewards less their mean, each to a random agent."""
    values = [reward - group.mean for reward in group.rewards]
    Random(repr(group.episodes)).shuffle(values)
    return values


def results(options: argparse.Namespace, directory: Path, *, control: bool) -> Iterator[dict[str, Any]]:
    """Run what the directory lacks, and yield what came of each run."""
    chosen = {key: parse_value(value) for key, _, value in (each.partition("=") for each in options.set)}
    for task, seed in product(options.tasks or TASKS, range(options.seeds)):
        if control and task not in CONTROLS:
            continue
        run = directory / f"{task}{'_shuffled' * control}_{seed}"
        settings = (
            chosen | {"directory": str(directory), "name": run.name, "seed": seed} | (SHUFFLED if control else {})
        )
        if task == "imitation":
            best = {"path": f"{directory}/calculator_{seed}", "where": "reward > 0", "tools_of": "calculator"}
            settings |= {"environment.options": best}
        if not run.exists() and not options.report:
            completed(agentrl.train(config_of(task, settings | ({"steps": 2} if options.quick else {})), quiet=True))
        if (run / "policies").exists():
            yield (result := measure(task, run))
            print(run.name, {key: round(each, 3) if isinstance(each, float) else each for key, each in result.items()})


def report(options: argparse.Namespace, directory: Path) -> None:
    """Print the figures."""
    line = Report("lab", quick=options.quick, repeats=options.seeds, compared_with="shuffled advantages")
    for control in (False, True):
        runs = list(results(options, directory, control=control))
        risen = [run for run in runs if run["end"] >= run["start"] + 2 * run["error"]]
        dead = [
            run
            for run in runs
            if run["end"] < run["start"] - 2 * run["error"] or (run not in risen and run["entropy"] < ENTROPY_SHARE)
        ]
        line.figures[f"{'shuffled_' * control}rise_of_{len(runs)}"] = len(risen)
        if not control:
            line.figures |= {"collapses": len(dead), "silent_collapses": sum(not run["alarms"] for run in dead)}
    line.print()
