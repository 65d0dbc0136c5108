"""The wait before the first byte, the first refusal and the first turn; see `first_hour.py`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from agentrl.app.memory_estimate import with_chosen_token_limits
from agentrl.core.errors import InputError
from benchmarks.processes import ProcessTree, children_cpu_seconds
from tests.default_starts import CASES, default_config, write_model
from tests.model_families import FAMILIES
from tests.support.sample_run import write_sample_run
from tests.unit.test_train_start import MISTAKES, write_project

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = str(ROOT / "examples" / "01_tool_use.toml")
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
COMMANDS = (
    ("--help",),
    ("train", EXAMPLE),
    ("train", EXAMPLE, "--dry-run"),
    ("doctor", EXAMPLE),
    ("demo",),
    ("env", "check", str(ROOT / "examples" / "07_smollm2.py")),
    ("evaluate", EXAMPLE),
    ("run", "list"),
    ("run", "view", "sample", "--once"),
    ("run", "stats", "sample"),
    ("run", "metrics", "sample"),
    ("run", "curve", "sample"),
    ("run", "export", "sample", "--to", "html"),
    ("run", "serve", "sample"),
    ("episode", "list", "sample"),
    ("episode", "show", "sample", "e1"),
    ("episode", "why", "sample", "e1"),
    ("episode", "fork", "sample", "e1"),
    ("step", "replay", "sample"),
)

ENVIRONMENT = """
from pathlib import Path
import agentrl
class First(agentrl.Environment):
    seats = ("solver",)
    async def run(self, ctx):
        agent = ctx.agent("solver")
        await agent.act(agentrl.user("Say one word."), max_tokens=4)
        Path("sampled").touch()
        agent.reward(0.0)
    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}{n}", data={}) for n in range(64)]
"""
RUN = """
name = "first"
environment.id = "env.py:First"
model.path = MODEL
[policies.solver]
lora.rank = 8
step_size = 64
"""
PREDICTIONS = """
import sys
from agentrl.cli.main import main
from agentrl.learn.memory_prediction import TrainerMemoryPredictor
predicted, begin = [], TrainerMemoryPredictor.__init__
TrainerMemoryPredictor.__init__ = lambda self, config: predicted.append(config) or begin(self, config)
code = main(["train", sys.argv[1], "--name=predicted", "--steps=1", "--evaluation.tasks=0"])
print(len(predicted) if code == 0 else "failed")
"""
QUICK_COMMANDS, QUICK_MISTAKES, QUICK_FAMILIES = 3, 3, ("Qwen3", "Mamba")


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    with tempfile.TemporaryDirectory(prefix="agentrl-first-hour-") as name:
        directory = Path(name)
        found = first_bytes(directory, COMMANDS[:QUICK_COMMANDS] if quick else COMMANDS)
        found |= refusals(directory / "project", QUICK_MISTAKES if quick else len(MISTAKES))
        found |= predictions(directory, QUICK_FAMILIES if quick else tuple(FAMILIES))
        found["first_turn_cpu_s"] = first_turn(directory / "bundled", "agentrl.environments:calculator/model")
        if SMOLLM2.is_dir() and not quick:
            found["first_turn_cpu_s_smollm2"] = first_turn(directory / "smollm2", str(SMOLLM2))
    return found


def first_bytes(directory: Path, commands: tuple[tuple[str, ...], ...]) -> dict[str, float | None]:
    """Start commands on a terminal, and stop each at its first byte."""
    write_sample_run(directory / "runs", name="sample")
    seconds = []
    for arguments in commands:
        terminal, end = pty.openpty()
        started = time.perf_counter()
        command = [sys.executable, "-m", "agentrl.cli", *arguments]
        with subprocess.Popen(
            command, cwd=directory, stdin=end, stdout=end, stderr=end, start_new_session=True
        ) as process:
            os.read(terminal, 1)
            wall = time.perf_counter() - started
            cpu = ProcessTree(process.pid).cpu_seconds()
            os.killpg(process.pid, signal.SIGKILL)
        os.close(terminal)
        os.close(end)
        seconds.append((wall, cpu))
        print(f"  {wall:.2f} s, {cpu:.2f} CPU s to the first byte: agentrl {' '.join(arguments)}", flush=True)
    return {
        "first_byte_s": max(wall for wall, _ in seconds),
        "first_byte_cpu_s": max(cpu for _, cpu in seconds),
        "first_byte_commands": float(len(seconds)),
    }


def refusals(project: Path, count: int) -> dict[str, float | None]:
    """Make mistakes that need no torch."""
    write_project(project)
    seconds = []
    for arguments in list(MISTAKES)[:count]:
        command = [sys.executable, "-m", "agentrl.cli", "train", *arguments]
        before = children_cpu_seconds()
        done = subprocess.run(command, cwd=project, capture_output=True, check=False)
        if done.returncode != 2:
            raise SystemExit(f"agentrl train {' '.join(arguments)}: exit code {done.returncode}")
        seconds.append(children_cpu_seconds() - before)
        print(f"  {seconds[-1]:.2f} CPU s to refuse: agentrl train {' '.join(arguments)}", flush=True)
    return {"refusal_cpu_s": max(seconds), "refusals": float(len(seconds))}


def predictions(directory: Path, families: tuple[str, ...]) -> dict[str, float | None]:
    """Predict the memory of small models of many families, and count the predictions of a start."""
    warnings.filterwarnings("ignore")
    seconds = []
    for family in families:
        path = write_model(family, directory / family.replace(" ", "-"))
        for adapter, dtype in CASES:
            began = time.process_time()
            try:
                with_chosen_token_limits(default_config(path, adapter=adapter, dtype=dtype), {})
            except InputError:  # this family has no such adapter
                continue
            seconds.append(time.process_time() - began)
            print(f"  {seconds[-1]:.2f} CPU s to predict: {family}, {adapter=}, {dtype}", flush=True)
    command = [sys.executable, "-c", PREDICTIONS, EXAMPLE]
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
    return {
        "prediction_cpu_s": max(seconds),
        "prediction_families": float(len(families)),
        "predictions_per_run": float(done.stdout.split()[-1]),
    }


def first_turn(directory: Path, model: str) -> float:
    """CPU seconds of `agentrl train`, its processes included, until an environment has its first turn."""
    directory.mkdir()
    (directory / "env.py").write_text(ENVIRONMENT)
    (directory / "run.toml").write_text(RUN.replace("MODEL", json.dumps(model)))
    command = [sys.executable, "-m", "agentrl.cli", "train", "run.toml"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        tree = ProcessTree(process.pid)
        while not (directory / "sampled").exists():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)}: exit code {process.returncode} before its first turn")
            tree.cpu_seconds()
            time.sleep(0.05)
        seconds = tree.cpu_seconds()
        os.killpg(process.pid, signal.SIGKILL)
    print(f"  {seconds:.1f} CPU s to the first turn: {model}", flush=True)
    return seconds
