"""Whether commands that read a whole run take time in proportion to its episodes; see `pace.py`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from agentrl.app.training import run_training
from agentrl.inspection.reader import RunReader
from benchmarks.processes import command_cpu_seconds
from tests.support.sample_environment import Propose
from tests.support.sample_run import sample_run_config, sample_run_factories

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "jsonl": ("run", "export", "{run}", "--to", "jsonl", "--out", "{run}.jsonl", "--force"),
    "parquet": ("run", "export", "{run}", "--to", "parquet", "--out", "{run}.parquet", "--force"),
    "html": ("run", "export", "{run}", "--to", "html", "--out", "{run}.html", "--force"),
    "ledger": ("run", "ledger", "{run}"),
    "prune": ("run", "prune", "{run}", "--keep", "2", "--dry-run"),
    "search": ("episode", "list", "{run}", "--match", "answer 777", "--limit", "5"),
}
STEPS = (230, 920)
"""Steps of the two runs: about 5,000 and 20,000 episodes."""
LEAST_S = 0.5
"""CPU seconds beyond the start below which a command's growth is noise."""


def record(directory: Path, steps: int) -> int:
    """Write a run of the real loop with a scripted engine, and return the number of its episodes."""
    config = sample_run_config(directory, f"steps{steps}")
    config = config.model_copy(update={"steps": steps})
    run = asyncio.run(run_training(config, Propose, held_out=[], quiet=True, factories=sample_run_factories()))
    reader = RunReader(run.path)
    try:
        return reader.count()
    finally:
        reader.close()


def figures(quick: bool) -> dict[str, float | None]:
    steps = (5, 20) if quick else STEPS
    with tempfile.TemporaryDirectory(prefix="agentrl-growth-") as name:
        directory = Path(name)
        episodes = [record(directory, each) for each in steps]
        print(f"  {episodes} episodes", flush=True)
        start = command_cpu_seconds("run", "list", str(directory), directory=directory, readings=1)
        measured = {
            command: [
                command_cpu_seconds(
                    *(word.format(run=directory / f"steps{each}") for word in words), directory=directory, readings=1
                )
                for each in steps
            ]
            for command, words in COMMANDS.items()
        }
    factor = episodes[1] / episodes[0]
    work = {command: [seconds - start for seconds in both] for command, both in measured.items()}
    growth = {command: large / (factor * small) for command, (small, large) in work.items() if large > LEAST_S}
    print("\n".join(f"  {command}: {ratio:.2f}" for command, ratio in growth.items()))
    return {
        "growth": max(growth.values(), default=None),
        "jsonl_ms_per_episode": 1e3 * work["jsonl"][1] / episodes[1],
        "parquet_ms_per_episode": 1e3 * work["parquet"][1] / episodes[1],
    }
