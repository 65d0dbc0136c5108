"""Branches of episodes: sampled once, trained once, whole, under one version, and without bias.

    python -m benchmarks.branches [--quick] [--part PART]

* `versions`: whole runs in virtual time with updates inside the trees. `mixed_version_branches` are trees of 1,000
  whose tokens behind the call are of several versions; `mixed_without_leases` those of the same runs if nothing is
  leased. `trees_cut` are trees whose units enter several steps, `trees_cut_by_units` those if a step takes exactly
  `step_size` units.
* `training`: the bundled model is trained for a step. `prefix_computed_once` is the share of branches whose first turn
  reuses the whole recalled context in the engine, `prefix_trained_once` the number of times that a sampled token is
  trained, at most and at least (1). `tree_loss_error` and `tree_grad_norm_error` compare the step's loss and gradient
  norm with those of the unrolled trees: each continuation as a whole row, by a plain loop in float64. The loss is a sum
  of terms of both signs, so its error is relative to the sum of their absolute values.
* `pivot`: sampled tokens up to a reward with `ctx.resample`; see `benchmarks.branches_pivot`.
* `recorded`: sampled tokens up to a reward if groups begin at recorded turns; see `benchmarks.branches_recorded`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import agentrl
from agentrl.config.fields import resolve_package_directory
from agentrl.core import ids
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeSpec,
    ForkPoint,
    PolicyVersion,
    TrainingSample,
    TrajectoryCredit,
    Unit,
)
from agentrl.credit.samples import unit_samples
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from agentrl.journal.rows import make_unit_reader
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.testing.virtual_time import simulate
from benchmarks.branches_pivot import NAMES as PIVOT
from benchmarks.branches_pivot import pivot
from benchmarks.branches_recorded import NAMES as RECORDED
from benchmarks.branches_recorded import recorded
from benchmarks.report import Report, completed
from tests.sim.small_run import SmallRun
from tests.sim.test_branches import bodies, ends, retry_run, versions_of
from tests.support.branching_calculator import BranchingCalculator

NAMES = (
    *("trees", "mixed_version_branches", "mixed_without_leases", "trees_cut", "trees_cut_by_units"),
    *("prefix_computed_once", "prefix_trained_once", "tree_loss_error", "tree_grad_norm_error", *RECORDED, *PIVOT),
)


STEP = 10
"""Step size in `versions`: a group gives 12 units, so steps end inside groups."""


# --- versions ---------------------------------------------------------------------------------------------------------


def versions(_: Path, *, quick: bool) -> dict[str, float | None]:
    """Count trees of several versions, and trees in several steps."""
    count = 120 if quick else 1000
    leased = _trees(count, leases=True, whole=True)
    free = _trees(count, leases=False, whole=False)
    return {
        "trees": float(min(leased["trees"], count)),
        "mixed_version_branches": float(leased["mixed"]),
        "mixed_without_leases": float(free["mixed"]),
        "trees_cut": float(leased["cut"]),
        "trees_cut_by_units": float(free["cut"]),
    }


def _trees(count: int, *, leases: bool, whole: bool) -> Counter[str]:
    """Count what became of `count` trees."""
    found = Counter[str]()
    for seed in itertools.count():
        if found["trees"] >= count:
            return found
        run = simulate(lambda: _sampled(leases=leases, whole=whole), seed=seed)
        found += _counted(run)
    raise AssertionError("the counter has no end")


async def _sampled(*, leases: bool, whole: bool) -> SmallRun:
    run = retry_run(
        steps=14,
        policies={"guesser": {"step_size": STEP, "max_staleness": 3, "lora": {"rank": 1}}},
    )
    branch = Dispatcher.branch

    async def branch_without_lease(
        host: Dispatcher, main: EpisodeSpec, point: ForkPoint, count: int, newest: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        return await branch(host, main, point, count, {})

    def during(orchestrator: Any) -> None:
        if not whole:
            orchestrator.scheduler.pop_units = lambda policy: _pop_units(orchestrator.buffer, policy, STEP)

    run.during = during
    with contextlib.ExitStack() as stack:
        if not leases:
            stack.enter_context(patch.object(Dispatcher, "branch", branch_without_lease))
        await run.run()
    return run


def _pop_units(buffer: EpisodeBuffer, policy: str, count: int) -> list[ReadyUnit]:
    queue = buffer._ready[policy]  # what the buffer did before it knew trees
    return [queue.popleft() for _ in range(min(count, len(queue)))]


def _counted(run: SmallRun) -> Counter[str]:
    found, ended = Counter[str](), ends(run)
    sampled: dict[str, list[TurnEntry]] = {}
    for name, (spec, header) in ended.items():
        if header.committed:
            turns = [body for body in bodies(run, header) if isinstance(body, TurnEntry)]
            own = turns if spec.branched_from is not None else turns[3:]
            sampled.setdefault(ids.main_episode_id(name), []).extend(own)
    found["trees"] = len(sampled)
    found["mixed"] = sum(len(versions_of(turns)) > 1 for turns in sampled.values())
    steps: dict[str, set[int]] = {}
    for batch in run.trainer.batches:
        for unit in batch.units:
            steps.setdefault(ids.main_episode_id(unit.episode_id), set()).add(batch.step_id)
    found["cut"] = sum(len(of_tree) > 1 for of_tree in steps.values())
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def training(directory: Path, *, quick: bool) -> dict[str, float | None]:
    """Train a step, and compute its loss again."""
    config = agentrl.RunConfig(
        name="branches",
        directory=str(directory),
        steps=1,
        environment={"id": "calculator"},
        model={"path": "agentrl.environments:calculator/model"},
        policies={"solver": {"learning_rate": 1e-5, "step_size": 64, "max_staleness": 0}},
        credit={"group_size": 4},
        sampling={"max_tokens": 32, "max_turns": 6},
        engine={"slots": 160, "max_context": 192},
        trainer={
            "loss": {"name": "reinforce", "normalizer": 64},
            "micro_batch_tokens": 8192,
            "optimizer": {"max_grad_norm": 1e9},
        },
        evaluation={"tasks": 0},
        checkpoint={"every": 0},
    )
    path = completed(agentrl.train(config, environment=BranchingCalculator, quiet=True)).path
    reader = RunReader(path)
    first_turns, reused = 0, 0
    for line in reader.episodes("purpose = 'train' and turns > 0", limit=10_000):
        view = reader.episode(line.episode)
        own = [body for _, body in view.entries[1 + view.inherited :] if isinstance(body, TurnEntry)]
        if view.inherited and own:
            first_turns += 1
            reused += own[0].cached_tokens >= own[0].parent_context - 1
    reader.close()
    step, samples = _step(path)
    trained = Counter(key for sample in samples for key in _keys(sample, np.flatnonzero(sample.loss_mask)))
    whole = {key for sample in samples for key in _keys(sample, _sampled_positions(sample, samples))}
    loss, scale, norm = _unrolled(samples, step["normaliser"])
    once = trained.keys() == whole and set(trained.values()) == {1}
    return {
        "prefix_computed_once": reused / first_turns,
        "prefix_trained_once": 1.0 if once else max(trained.values()) if trained.keys() >= whole else 0.0,
        "tree_loss_error": abs(loss - step["loss"]) / scale,
        "tree_grad_norm_error": abs(norm - step["grad_norm"]) / norm,
    }


def _step(path: Path) -> tuple[Mapping[str, float], list[TrainingSample]]:
    """Read the only step of a run: its loss, gradient norm and divisor, and its rows."""
    with contextlib.closing(sqlite3.connect(path / "journal" / "control.db")) as connection:
        connection.row_factory = sqlite3.Row
        [step] = connection.execute("SELECT loss, grad_norm, normaliser FROM steps").fetchall()
        rows = connection.execute(
            "SELECT u.*, e.partition, e.entries FROM step_units u JOIN episodes e"
            " ON e.episode = u.episode AND e.attempt = u.attempt ORDER BY position"
        ).fetchall()
    units = [
        Unit(
            episode_id=row["episode"],
            attempt=row["attempt"],
            policy=row["policy"],
            location=EpisodeDataLocation(row["partition"], row["entries"]),
            credits=(
                TrajectoryCredit(
                    *(row["seat"], row["agent"], row["reward"], row["advantage"], row["baseline"]),
                    turn_advantages=tuple(json.loads(row["turn_advantages"] or "[]")),
                ),
            ),
        )
        for row in rows
    ]
    trajectories = make_unit_reader(path)(units)
    samples = [
        sample
        for unit, of_episode in zip(units, trajectories, strict=True)
        for sample in unit_samples(unit, of_episode)
    ]
    return dict(step), samples


Token = tuple[str, int]
"""A sampled token: the episode that sampled it, and its position in the row. The same text in two branches is sampled
twice."""


def _keys(sample: TrainingSample, positions: np.ndarray) -> list[Token]:
    main = ids.main_episode_id(sample.episode_id)
    return [(sample.episode_id if sample.loss_mask[at] else main, int(at)) for at in positions]


def _sampled_positions(sample: TrainingSample, samples: list[TrainingSample]) -> np.ndarray:
    """Positions of the row's sampled tokens, those that a branch recalled included."""
    own = sample.loss_mask.copy()
    main = next((other for other in samples if other.episode_id == ids.main_episode_id(sample.episode_id)), sample)
    before = int(np.flatnonzero(own)[0])
    shared = min(before, len(main.loss_mask))
    own[:shared] |= main.loss_mask[:shared] & (main.token_ids[:shared] == sample.token_ids[:shared])
    return np.flatnonzero(own)


def _unrolled(samples: list[TrainingSample], normaliser: float) -> tuple[float, float, float]:
    """Loss, sum of its terms' absolute values, and gradient norm if every continuation is a whole row: a token's
    advantage is divided by the number of rows that contain it."""
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve_package_directory("agentrl.environments:calculator/model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    rows = [(sample, _sampled_positions(sample, samples)) for sample in samples]
    advantages: dict[Token, float] = {}
    leaves = Counter[Token]()
    for sample, positions in rows:
        for at in np.flatnonzero(sample.loss_mask):
            advantages[sample.episode_id, int(at)] = float(sample.advantages[at])
        leaves.update(_keys(sample, positions))
    total = scale = 0.0
    for sample, positions in rows:
        tokens = torch.tensor(sample.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(model(input_ids=tokens).logits[0].double()[:-1], -1)
        terms = [
            advantages[key] / leaves[key] * logprobs[at - 1, tokens[0, at]]
            for key, at in zip(_keys(sample, positions), positions, strict=True)
        ]
        loss = -torch.stack(terms).sum() / normaliser
        loss.backward()
        total += float(loss.detach())
        scale += sum(abs(float(term.detach())) for term in terms) / normaliser
    norm = sum(float((each.grad.double() ** 2).sum()) for each in model.parameters() if each.grad is not None)
    return total, scale, math.sqrt(norm)


PARTS = {"versions": versions, "training": training, "recorded": recorded, "pivot": pivot}


def main() -> None:
    """Run the parts, and print the line."""
    parser = argparse.ArgumentParser(description="Branches of episodes.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    report = Report(
        "branches", quick=options.quick, repeats=1, compared_with="the same trees without leases, whole rows"
    )
    report.figures = dict.fromkeys(NAMES)
    with tempfile.TemporaryDirectory() as directory:
        for name, part in PARTS.items():
            if options.part in (None, name):
                root = Path(directory) / name
                root.mkdir()
                report.figures |= part(root, quick=options.quick)
    report.print()


if __name__ == "__main__":
    main()
