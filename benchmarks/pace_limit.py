"""How far a training step is from the arithmetic that it needs, and the first token from its imports; see `pace.py`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from agentrl.cli.main import main
from agentrl.orchestrator.loop import Orchestrator
from tests.support.computed_tokens import ComputedTokens, counted, unshared

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CALCULATOR, SMOLLM2 = EXAMPLES / "01_tool_use.toml", EXAMPLES / "07_smollm2.toml"
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


_FIRST_TOKEN = """
import os, sys, time
from agentrl.cli.main import main
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
