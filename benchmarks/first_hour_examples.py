"""What the examples for newcomers learn, and how much there is to install and to know; see `first_hour.py`."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
import tomllib
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.store import SqliteJournal
from benchmarks.processes import command, command_cpu_seconds
from docs.generators.configuration import documented_keys
from tests.support.builders import make_episode_header, make_spec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "02_gymnasium.toml"
SEEDS = 3
READINGS = 7
EPISODES = 200


def trained(*arguments: str, directory: Path) -> dict[str, Any]:
    """The summary of a training run, with the seconds of the whole command."""
    started = time.perf_counter()
    summary: dict[str, Any] = json.loads(command("train", *arguments, "--json", directory=directory))["summary"]
    return {**summary, "whole_s": time.perf_counter() - started}


async def write_run(directory: Path) -> None:
    """A run with episodes to list."""
    store = SqliteJournal(directory / "journal", info={"name": directory.name})
    for number in range(EPISODES):
        spec = make_spec(f"e{number}")
        store.admit(spec)
        await store.commit(EpisodeEnd(spec, make_episode_header(spec, reward=number % 3 / 2)))
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


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part; nothing is trained if `quick`."""
    found: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-newcomer-") as name:
        directory = Path(name)
        asyncio.run(write_run(directory / "runs" / "listed"))
        cpu_seconds = partial(command_cpu_seconds, directory=directory, readings=READINGS)
        found["help_cpu_s"] = cpu_seconds("--help")
        found["list_cpu_s"] = cpu_seconds("episode", "list", "listed")
        if not quick:
            found |= scaffold(directory)
            found |= frozen_lake(directory)
    found["core_packages"] = len(core_packages())
    found["config_fields"] = sum(1 for _ in documented_keys())
    found["public_names"] = len(agentrl.__all__)
    return found
