"""How far a training step is from the arithmetic that it needs, and the first token from its imports; see `pace.py`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from agentrl.app.plan import with_chosen_settings
from agentrl.app.time_estimate import TokenSeconds, measure_token_seconds
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.learn.trainer import PolicyTrainer
from agentrl.orchestrator.loop import Orchestrator
from tests.support.computed_tokens import ComputedTokens, counted, unshared

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CALCULATOR, SMOLLM2 = EXAMPLES / "01_tool_use.toml", EXAMPLES / "07_smollm2.toml"
_STEPS = (
    ("SmolLM2, LoRA", "SmolLM2-135M-Instruct", ("", "")),
    ("SmolLM2, full weights", "SmolLM2-135M-Instruct", ("lora.rank = 8", "")),
    ("Qwen2.5-Coder-0.5B, LoRA", "Qwen2.5-Coder-0.5B-Instruct", ("", "")),
)
"""Runs whose time per step is predicted: name, model, and what is replaced in the example's file."""
Shape = tuple[int, int, int]
"""Rows, columns and inner dimension of a matrix product."""


@dataclass
class Products:
    """The matrix products of linear layers."""

    shapes: Counter[Shape] = field(default_factory=Counter)

    def seconds(self) -> float:
        """CPU seconds of the products, each timed alone with warm caches."""
        return sum(count * _product_seconds(shape) for shape, count in self.shapes.items())

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the layers that run in this process. Outside of inference they have a backward pass too."""
        linear, shapes = functional.linear, self.shapes

        def recorded_linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
            (columns, inner), rows = weight.shape, inputs.numel() // weight.shape[1]
            shapes[rows, columns, inner] += 1
            if not torch.is_inference_mode_enabled():
                shapes[rows, inner, columns] += 1
                shapes[columns, inner, rows] += weight.requires_grad
            return linear(inputs, weight, bias)

        with patch.object(functional, "linear", recorded_linear):
            yield


def _product_seconds(shape: Shape) -> float:
    rows, columns, inner = shape
    left, right = torch.randn(rows, inner), torch.randn(columns, inner)
    functional.linear(left, right)
    best, repeats = float("inf"), max(1, int(2e7 // (rows * columns * inner)))
    for _ in range(3):
        before = time.process_time()
        for _ in range(repeats):
            functional.linear(left, right)
        best = min(best, (time.process_time() - before) / repeats)
    return best


def train(example: Path, steps: int, *, shares: bool = True) -> tuple[ComputedTokens, float, float]:
    """Train for a few steps; returns what the engine computed, and CPU seconds of the loop and of its products."""
    products, spent = Products(), 0.0
    loop = Orchestrator._main

    async def timed_loop(self: Any) -> Any:
        nonlocal spent
        before = time.process_time()
        try:
            return await loop(self)
        finally:
            spent = time.process_time() - before

    with tempfile.TemporaryDirectory() as directory, nullcontext() if shares else unshared(), counted() as counts:
        arguments = (f"--directory={directory}", "--name=run", f"--steps={steps}", "--evaluation.tasks=0")
        with patch.object(Orchestrator, "_main", timed_loop), products.recorded():
            if main(["train", str(example), *arguments, "--evaluation.every=0"]):
                raise SystemExit(f"{example}: training failed")
    torch.set_num_threads(1)
    return counts, spent, products.seconds()


def figures(quick: bool) -> Mapping[str, float | None]:
    counts, spent, arithmetic = train(CALCULATOR, 4 if quick else 20)
    control, _, _ = train(CALCULATOR, 2 if quick else 8, shares=False)
    measured = {
        "tokens_over_distinct": counts.over_distinct,
        "unshared_over_distinct": control.over_distinct,
        "calculator_over_arithmetic": spent / arithmetic,
    }
    print(f"  calculator: {spent:.2f} CPU s of the loop, {arithmetic:.2f} of its products", flush=True)
    if not quick:
        counts, spent, arithmetic = train(SMOLLM2, 4)
        print(f"  SmolLM2: {spent:.2f} CPU s of the loop, {arithmetic:.2f} of its products", flush=True)
        measured["tokens_over_distinct"] = max(measured["tokens_over_distinct"], counts.over_distinct)
        measured["smollm2_over_arithmetic"] = spent / arithmetic
    return measured


@dataclass
class _Step:
    """What a step computes."""

    cpu_s: float = 0.0
    passes: int = 0
    sampled: int = 0
    context: int = 0
    forwarded: int = 0
    trained: int = 0


def _steps(arguments: Sequence[str], steps: int) -> list[_Step]:
    """Train in lockstep on one thread, since threads that wait for each other count as busy; return all steps but the
    first."""
    ended, forwarded, trained = list[_Step](), 0, 0
    forward, step = PolicyTrainer._forward, Orchestrator._step_with

    def counted_forward(self: Any, learner: Any, micro_batch: Any, *rest: Any, **named: Any) -> Any:
        nonlocal forwarded, trained
        forwarded, trained = forwarded + len(micro_batch.token_ids), trained + len(micro_batch.targets)
        return forward(self, learner, micro_batch, *rest, **named)

    async def counted_step(self: Any, policy: Any, units: Any) -> bool:
        is_taken = await step(self, policy, units)
        rows = [(rows, width, count) for (rows, width), count in counts.passes.items()]
        passes = sum(count for _, width, count in rows if width == 1)
        sampled = sum(rows * count for rows, width, count in rows if width == 1)
        context = sum(rows * width * count for rows, width, count in rows if width > 1)
        ended.append(_Step(time.process_time(), passes, sampled, context, forwarded, trained))
        return is_taken

    with (
        tempfile.TemporaryDirectory() as directory,
        counted() as counts,
        patch.object(PolicyTrainer, "_forward", counted_forward),
        patch.object(Orchestrator, "_step_with", counted_step),
    ):
        if main(["train", *arguments, f"--directory={directory}", "--name=run", f"--steps={steps}"]):
            raise SystemExit(f"{' '.join(arguments)}: training failed")
    return [
        _Step(*(now - before for now, before in zip(astuple(after), astuple(earlier), strict=True)))
        for earlier, after in pairwise(ended)
    ]


def step_time(quick: bool) -> Mapping[str, float | None]:
    errors, control = list[float](), 0.0
    with tempfile.TemporaryDirectory() as directory, patch.object(RunConfig, "threads", 1):
        calculator = _token_seconds(str(CALCULATOR), [])
        for name, model, replaced in _STEPS[:1] if quick else _STEPS:
            text = SMOLLM2.read_text().replace(
                "../models/SmolLM2-135M-Instruct", str(EXAMPLES.parent / "models" / model)
            )
            text = text.replace("07_smollm2.py", str(EXAMPLES / "07_smollm2.py")).replace(*replaced)
            file = Path(directory) / "run.toml"
            file.write_text(text)
            settings = ["--policies.solver.max_staleness=0", "--policies.solver.step_size=16"]
            seconds = _token_seconds(str(file), settings)
            evaluation = ["--evaluation.tasks=0", "--evaluation.every=0"]
            for seen in _steps([str(file), *settings, *evaluation], 2 if quick else 4):
                counts = asdict(seen)
                cpu_s = counts.pop("cpu_s")
                errors.append(seconds.step(**counts) / cpu_s - 1)
                control = max(control, abs(calculator.step(**counts) / cpu_s - 1))
                print(f"  {name}: {cpu_s * (1 + errors[-1]):.2f} CPU s predicted, {cpu_s:.2f} seen", flush=True)
    return {"step_time_error": max(map(abs, errors)), "step_time_control": control}


def _token_seconds(file: str, settings: Sequence[str]) -> TokenSeconds:
    config, _ = with_chosen_settings(load(file, settings), {})
    return measure_token_seconds(config, time.process_time)


_FIRST_TOKEN = """
import os, sys, time
from agentrl.app.plan import with_chosen_settings
from agentrl.app.time_estimate import TokenSeconds, measure_token_seconds
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.learn.trainer import PolicyTrainer
from agentrl.engines.embedded.forward import ForwardPassRunner
def exit_at_first_token(self, one, logits):
    print(time.process_time(), flush=True)
    os._exit(0)
ForwardPassRunner._sample = exit_at_first_token
main(sys.argv[1:])
"""
_IMPORTS = "import time; from transformers import AutoModelForCausalLM; print(time.process_time())"


def start(quick: bool) -> Mapping[str, float | None]:
    measured: dict[str, list[float]] = {}
    # Cached bytecode as in an installation; the first readings fill the cache.
    with tempfile.TemporaryDirectory(prefix="agentrl-bytecode-") as bytecode:
        for _ in range(2 if quick else 6):
            measured.setdefault("imports_s", []).append(_printed_seconds(bytecode, _IMPORTS))
            for name, example in (("calculator", CALCULATOR), ("smollm2", SMOLLM2)):
                with tempfile.TemporaryDirectory() as directory:
                    arguments = ("train", str(example), f"--directory={directory}")
                    seconds = _printed_seconds(bytecode, _FIRST_TOKEN, *arguments)
                measured.setdefault(f"{name}_first_token_s", []).append(seconds)
    return {name: statistics.median(seconds[1:]) for name, seconds in measured.items()}


def _printed_seconds(bytecode: str, code: str, *arguments: str) -> float:
    """Run code in a process, and return the number on the last line that it prints."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])
