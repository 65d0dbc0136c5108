"""One run of an arm: train it or resume it as a user does, score it, and describe it in a record."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import agentrl
from agentrl.config.load import load
from agentrl.core.intervals import confidence_half_width
from benchmarks.anchors import recipes
from benchmarks.anchors.cases import ROOT, Arm, Match
from benchmarks.anchors.processes import run_python
from benchmarks.report import conditions


def command(arm: Arm, directory: Path, name: str, seed: int, weights: Path | None, *, quick: bool) -> list[str]:
    """The arguments of `agentrl` that train an arm."""
    settings = [f"--directory={_shown(directory)}", f"--name={name}", f"--seed={seed}"]
    if weights is not None:
        settings.append(f"--model.path={_shown(weights)}")
    return ["train", arm.config, *settings, *arm.settings, *(arm.quick if quick else ())]


def record(arm: Arm, directory: Path, name: str, seed: int, weights: Path | None, *, quick: bool) -> dict[str, Any]:
    """Train an arm to its end and return what is published of it. A run that fails is described as well.

    Raises:
        KeyboardInterrupt: the run was stopped, and can be resumed.
    """
    run = directory / name
    resumed = arm.recipe is None and (run / "checkpoints").exists()
    if run.exists() and not resumed:
        shutil.rmtree(run)  # killed before its first checkpoint, or with a client that cannot be resumed
    started = time.monotonic()
    if arm.recipe:
        ended, shown = recipes.train(arm.recipe, run, seed, quick=quick)
    else:
        arguments = command(arm, directory, name, seed, weights, quick=quick)
        ended = run_python(["-m", "agentrl.cli", *arguments, *(["--resume"] if resumed else [])])
        shown = shlex.join(["agentrl", *arguments])
    code, cpu_s, peak_mib, errors = ended
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    result: dict[str, Any] = {
        **conditions(),
        "commit": _commit(),
        "command": shown,
        # Earlier lives of a resumed run are not in these.
        "wall_s": None if resumed else time.monotonic() - started,
        "cpu_s": None if resumed else cpu_s,
        "peak_mib": None if resumed else peak_mib,
        "error": errors.strip().splitlines()[-1][:300] if code and errors.strip() else "",
        "curve": [],
    }
    if code and not result["error"]:
        result["error"] = f"exit code {code}"
    if arm.recipe and not code:
        result["curve"] = recipes.held_out_curve(arm, run, seed)
        result["training"] = recipes.training_curve(arm, run)
        result["digest"] = digest(run)
    elif (run / "metrics.jsonl").exists() and not arm.recipe:
        result["curve"] = match_curve(run, arm.match) if arm.match else evaluation_curve(run, arm.policy)
        result["training"] = training_curve(run)
        result["digest"] = digest(run)
    return result


def evaluation_curve(run: Path, policy: str = "") -> list[list[float]]:
    """Rows of step, held-out reward of the policy, half its 95 % interval, and number of tasks."""
    rows = []
    with agentrl.open_run(run) as reader:
        for line in reader.evaluations():
            reward, error = line.metrics.get("reward"), line.metrics.get("reward_error")
            if policy in ("", line.policy) and reward is not None and error is not None:
                rows.append([line.step, reward, error, line.metrics["tasks"] or 0.0])
    return sorted(rows)


def match_curve(run: Path, match: Match) -> list[list[float]]:
    """The same for kept versions of the player, which play half of the games in each seat of a match."""
    kept = sorted(int(path.name.partition(".")[2]) for path in (run / "versions" / "player").iterdir())
    rows = []
    for step in kept:
        if step % match.every and step != kept[-1]:
            continue
        weights = {"player": run / "versions" / "player" / f"0.{step}"}
        scores: list[float] = []
        for seat, other in (match.seats, match.seats[::-1]):
            config = load(ROOT / match.config, [f"--seats.{seat}=player", f"--seats.{other}=opponent"])
            episodes = agentrl.evaluate(config, weights, match.games // 2).episodes
            scores += [episode.rewards[seat] for episode in episodes]
        rows.append([step, statistics.fmean(scores), confidence_half_width(scores), len(scores)])
    return rows


def training_curve(run: Path) -> dict[str, list[float]]:
    """Mean rewards of the trained episodes by seat, step by step."""
    rewards: dict[str, list[float]] = {}
    with agentrl.open_run(run) as reader:
        for line in reader.steps():
            if line.survives:
                for seat, reward in line.rewards.items():
                    rewards.setdefault(seat, []).append(round(reward, 4))
    return rewards


def digest(directory: Path) -> str:
    """SHA-256 over the names and contents of all files of a directory, in the order of their names."""
    whole = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{content}  {path.relative_to(directory)}\n".encode())
    return whole.hexdigest()


def _commit() -> str:
    """The newest commit of the code that trains; the anchors have their own commits, whose hashes a rebase changes."""
    newest = ("git", "log", "-1", "--abbrev=8", "--format=%h", "--", "agentrl", "environments")
    return subprocess.run(newest, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _shown(path: Path) -> str:
    """A path as a page shows it: from the root of the checkout if it lies in it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one per line; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
