"""Whether every episode of the sample run, its forks among them, is executed again identically, and what every
optimizer step was fed is made again bit for bit: shares.

`control_bytes`: bytes a terminal would act on, over every reading command of a run whose every field is hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from pathlib import Path

from agentrl.app.replays import replay
from agentrl.app.step_replays import rebuild_steps
from agentrl.cli.main import main
from agentrl.cli.sample_run import sample_adapters, write_sample_run
from agentrl.core.safe import safe
from agentrl.inspection.reader import RunReader
from tests.journal_cases import HOSTILE, write_run


def figures(quick: bool) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory(prefix="agentrl-inspection-") as directory:
        run = write_sample_run(directory).path
        outcomes = [outcome for each in (run, run / "forks") for outcome in outcomes_of(each)]
        print(f"  {len(outcomes)} episodes", flush=True)
        steps = steps_of(run)
        found = hostile_bytes(Path(directory) / "hostile")
    return {
        "replay_identical": outcomes.count("identical") / len(outcomes),
        "step_replay_identical": sum(steps) / len(steps),
        "control_bytes": float(found),
    }


def outcomes_of(run: Path) -> list[str]:
    reader = RunReader(run)
    keys = [(line.episode, line.attempt) for line in reader.episodes(limit=100_000)]
    reader.close()
    return [each.outcome for each in replay(run, keys, adapters=sample_adapters())]


def steps_of(run: Path) -> list[bool]:
    reader = RunReader(run)
    try:
        return [each.identical for each in rebuild_steps(reader)]
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
            found += sum(safe(character) != character for character in text)
    return found
