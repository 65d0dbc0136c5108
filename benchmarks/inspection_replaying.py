"""Whether every episode of the sample run, its forks among them, and of a run of example 03 is executed again
identically, and what every optimizer step of theirs was fed is made again bit for bit: shares.

A quick run takes a few steps of the example only. `control_bytes`: bytes a terminal would act on, over every reading
command of a run whose every field is hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from pathlib import Path

import agentrl
from agentrl.app.replays import recompute_step_loss, replay, replay_steps
from agentrl.app.run_parts import RunFactories
from agentrl.cli.main import main
from agentrl.cli.sample_run import sample_run_factories, write_sample_run
from agentrl.core.text import escape_text
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list
from benchmarks.coevolution_propose import QUICK_STEPS, config_of
from tests.journal_cases import HOSTILE, write_run


def figures(quick: bool) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory(prefix="agentrl-inspection-") as directory:
        sample = write_sample_run(directory).path
        outcomes = outcomes_of(sample, sample_run_factories()) + outcomes_of(sample / "forks", sample_run_factories())
        taught = agentrl.train(config_of(directory, 0, **({"steps": QUICK_STEPS} if quick else {})), quiet=True).path
        outcomes += outcomes_of(taught)
        steps = steps_of(sample) + steps_of(taught)
        print(f"  {len(outcomes)} episodes, {len(steps)} steps; {losses_of(taught)}", flush=True)
        found = hostile_bytes(Path(directory) / "hostile")
    return {
        "replay_identical": outcomes.count("identical") / len(outcomes),
        "step_replay_identical": sum(steps) / len(steps),
        "control_bytes": float(found),
    }


def outcomes_of(run: Path, factories: RunFactories | None = None) -> list[str]:
    reader = RunReader(run)
    keys = [(line.episode, line.attempt) for line in reader.episodes(limit=100_000)]
    reader.close()
    outcomes = [each.outcome for each in replay(run, keys, factories=factories)]
    print(f"  {run.name}: {outcomes.count('identical')} of {len(outcomes)} episodes are identical", flush=True)
    return outcomes


def losses_of(run: Path) -> str:
    """The steps whose start weights are kept, computed again."""
    reader = RunReader(run)
    try:
        found = [recompute_step_loss(reader, line) for line in step_list(reader)]
    finally:
        reader.close()
    kept = [step for step in found if step.same is not None]
    exact = sum((step.loss, step.grad_norm) == (step.loss_again, step.grad_norm_again) for step in kept)
    same = sum(bool(step.same) for step in kept)
    return f"of {len(kept)} steps whose start weights are kept {same} come to the same loss and norm, {exact} exactly"


def steps_of(run: Path) -> list[bool]:
    reader = RunReader(run)
    try:
        return [each.identical for each in replay_steps(reader)]
    finally:
        reader.close()


def hostile_bytes(run: Path) -> int:
    asyncio.run(write_run(run, text=HOSTILE, name=HOSTILE))
    path = str(run)
    commands = [["episode", verb, path, "e1"] for verb in ("show", "tokens", "why", "timeline")]
    commands += [["episode", "list", path], ["episode", "tokens", path, "e1", "--details"], ["episode", "forks", path]]
    commands += [["episode", "diff", path, "e1", "e2"], ["step", "list", path], ["step", "show", path, "1"]]
    commands += [["run", verb, path] for verb in ("stats", "timeline", "curve", "ledger", "winrates", "metrics")]
    found = 0
    for command in commands:
        for arguments in (command, [*command, "--json"]):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(arguments)
            text = out.getvalue() + err.getvalue()
            found += sum(escape_text(character) != character for character in text)
    return found
