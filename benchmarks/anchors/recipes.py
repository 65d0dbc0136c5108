"""One run of a recipe of tinker-cookbook, unmodified, against `agentrl-tinker`."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import agentrl
from agentrl.config.load import load
from agentrl_tinker.config import load_server
from benchmarks.anchors.cases import ROOT, Arm, Recipe
from benchmarks.anchors.processes import Ended, run_python, wait

QUICK = {"max_steps": "3"}


def train(recipe: Recipe, run: Path, seed: int, *, quick: bool) -> tuple[Ended, str]:
    """Run a recipe against its own server, with the run directory `run`; return how it ended, and the command."""
    from benchmarks.tinker_recipes import INSTALL, PYTHON

    if not PYTHON.exists():
        raise SystemExit(f"the SDK and its cookbook are not installed: {INSTALL}; or set TINKER_PYTHON")
    shown = run.relative_to(ROOT) if run.is_relative_to(ROOT) else run
    serve = [recipe.server, f"--directory={shown.parent}", f"--name={run.name}", f"--seed={seed}"]
    settings = {**recipe.settings, **(QUICK if quick else {}), "log_path": f"{shown}/recipe"}
    arguments = ["-m", recipe.module, *(f"{name}={value}" for name, value in settings.items())]
    key = {"TINKER_API_KEY": f"tml-{secrets.token_hex(16)}"}
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("agentrl-tinker")), *serve, "--port=0", "--json"],
        cwd=ROOT,
        env={**os.environ, **key},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        address = json.loads(server.stdout.readline() or "{}").get("address")
        if address is None:
            raise SystemExit("the server did not start")
        client = {**key, "TINKER_BASE_URL": address, "TINKER_TELEMETRY": "0"}
        ended = run_python(arguments, python=PYTHON, **client)
    finally:
        os.kill(server.pid, signal.SIGTERM)  # `send_signal` would reap one that has ended, for which `wait` waits
        served = wait(server)
        server.stdout.close()
    whole = Ended(ended.code, ended.cpu_s + served.cpu_s, max(ended.peak_mib, served.peak_mib), ended.errors)
    return whole, f"{shlex.join(['agentrl-tinker', *serve])} & {shlex.join(['python', *arguments])}"


def held_out_curve(arm: Arm, run: Path, seed: int) -> list[list[float]]:
    """Rows of step, held-out reward, half its 95 % interval, and number of tasks: the base model, then kept versions.

    `agentrl evaluate` measures the rewards, with the arm's configuration.
    """
    assert arm.recipe is not None
    config = load(ROOT / arm.config, [f"--seed={seed}"])
    (policy,) = config.trained
    (name,) = load_server(ROOT / arm.recipe.server).models
    kept = {int(path.name.partition(".")[2]): path for path in (run / "versions" / Path(name).name).glob("1.*")}
    last = max(kept)
    every = config.evaluation.every or last  # 0: only before and after training
    measured_steps = {step for step in kept if step and step % every == 0} | {last}
    weights = {0: None} | {step: {policy: kept[step]} for step in measured_steps}
    rows = []
    for step, policies in sorted(weights.items()):
        measured = agentrl.evaluate(config, policies)
        reward, error = measured["evaluation/reward"], measured["evaluation/reward_error"]
        rows.append([step, reward, error, float(len(measured.episodes))])
    return rows


def training_curve(arm: Arm, run: Path) -> dict[str, list[float]]:
    """Mean rewards of the recipe's training steps."""
    assert arm.recipe is not None
    lines = map(json.loads, (run / "recipe" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    metric = arm.recipe.metric
    return {"recipe": [round(line[metric], 4) for line in lines if metric in line]}
