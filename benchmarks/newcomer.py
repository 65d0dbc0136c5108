"""A newcomer's first ten minutes: what is learned on FrozenLake, and what it costs to look around.

    python -m benchmarks.newcomer [--quick]

`frozenlake_start`, `frozenlake_end`, `frozenlake_end_median`: held-out reward before and after
`examples/02_gymnasium.toml`: the largest start, the worst and the median end of three seeds; `frozenlake_s` is the
longest run in seconds.
`scaffold_start`, `scaffold_end`, `scaffold_s`: the same for what `agentrl env new` writes, one seed, from the first
command to the end of training.
`help_cpu_s`, `list_cpu_s`: CPU seconds of `agentrl --help` and of `agentrl episode list` over 200 episodes;
medians of 7.
`core_packages`: what `pip install agentrl` installs besides agentrl. `config_fields`, `public_names`: how much there is
to know.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl
from agentrl.journal.store import SqliteJournal
from benchmarks.report import Report
from docs.generators.configuration import documented_keys
from tests.support.builders import make_episode_header, make_spec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "02_gymnasium.toml"
SEEDS = 3
READINGS = 7
EPISODES = 200


def command(*arguments: str, directory: Path) -> str:
    """The output of an `agentrl` command that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def trained(*arguments: str, directory: Path) -> dict[str, Any]:
    """The summary of a training run, with the seconds of the whole command."""
    started = time.perf_counter()
    summary: dict[str, Any] = json.loads(command("train", *arguments, "--json", directory=directory))["summary"]
    return {**summary, "whole_s": time.perf_counter() - started}


def cpu_seconds(*arguments: str, directory: Path) -> float:
    """CPU seconds of a command, the median of several readings."""
    readings = []
    for _ in range(READINGS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command(*arguments, directory=directory)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        readings.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(readings)


async def write_run(directory: Path) -> None:
    """A run with episodes to list."""
    store = SqliteJournal(directory / "journal", info={"name": directory.name})
    for number in range(EPISODES):
        spec = make_spec(f"e{number}")
        store.admit(spec)
        await store.commit_episode(spec, make_episode_header(spec, reward=number % 3 / 2), b"", {})
    await store.close()


def core_packages() -> set[str]:
    """Distributions that a plain installation brings, agentrl itself left out."""
    pending: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found: set[str] = set()
    while pending:
        requirement = Requirement(pending.pop())
        name = canonicalize_name(requirement.name)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and name not in found:
            found.add(name)
            pending += distribution(name).requires or []
    return found


def frozen_lake(directory: Path) -> dict[str, float | None]:
    """Three seeds of the gymnasium example."""
    runs = []
    for seed in range(SEEDS):
        runs.append(trained(str(EXAMPLE), f"--seed={seed}", f"--name=lake-{seed}", directory=directory))
        told = ", ".join(f"{name} {runs[-1][name]:.3f}" for name in ("reward_start", "reward_end", "whole_s"))
        print(f"frozen lake, seed {seed}: {told}", flush=True)
    ends = [run["reward_end"] for run in runs]
    return {
        "frozenlake_start": max(run["reward_start"] for run in runs),
        "frozenlake_end": min(ends),
        "frozenlake_end_median": statistics.median(ends),
        "frozenlake_s": max(run["whole_s"] for run in runs),
    }


def scaffold(directory: Path) -> dict[str, float | None]:
    """From `agentrl env new` to a trained policy, as its README says."""
    started = time.perf_counter()
    print(command("env", "new", "word_sums", directory=directory))
    print(command("env", "check", "env.py", directory=directory / "word_sums"))
    summary = trained("train.toml", directory=directory / "word_sums")
    return {
        "scaffold_start": summary["reward_start"],
        "scaffold_end": summary["reward_end"],
        "scaffold_s": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing is trained")
    quick = parser.parse_args().quick
    report = Report("newcomer", quick=quick, repeats=1 if quick else SEEDS, compared_with="nothing")
    lake = ("frozenlake_start", "frozenlake_end", "frozenlake_end_median", "frozenlake_s")
    report.figures.update(dict.fromkeys((*lake, "scaffold_start", "scaffold_end", "scaffold_s")))
    with tempfile.TemporaryDirectory(prefix="agentrl-newcomer-") as name:
        directory = Path(name)
        asyncio.run(write_run(directory / "runs" / "listed"))
        report.figures["help_cpu_s"] = cpu_seconds("--help", directory=directory)
        report.figures["list_cpu_s"] = cpu_seconds("episode", "list", "listed", directory=directory)
        if not quick:
            report.figures.update(scaffold(directory))
            report.figures.update(frozen_lake(directory))
    report.figures["core_packages"] = len(core_packages())
    report.figures["config_fields"] = sum(1 for _ in documented_keys())
    report.figures["public_names"] = len(agentrl.__all__)
    report.print()


if __name__ == "__main__":
    main()
