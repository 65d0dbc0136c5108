"""The part `experts` of `benchmarks.devices`: mixtures of experts that start with default sizes.

Four families, with an adapter and all weights, in bfloat16 and float32, with experts recorded and not: `moe_starts` is
the number of the 32 starts that take two steps with predicted sizes. `benchmarks.default_starts` starts every family.
"""

from __future__ import annotations

import tempfile
import warnings
from itertools import product
from pathlib import Path

from tests.default_starts import CASES, default_config, start, write_model

FAMILIES = ("Qwen3-MoE", "Qwen2-MoE", "Mixtral", "OLMoE")


def figures(quick: bool) -> dict[str, float | None]:
    """Start all; quick: one family."""
    warnings.filterwarnings("ignore")
    started = 0
    for name in FAMILIES[:1] if quick else FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            model = write_model(name, Path(directory) / "model")
            for number, ((adapter, dtype), capture) in enumerate(product(CASES, (False, True))):
                engine = {"capture_routing": capture}
                config = default_config(model, adapter=adapter, dtype=dtype, engine=engine)
                found = start(config, Path(directory) / f"run{number}")
                started += found.steps == 2 and not found.unpredicted
                weights = ("adapter" if adapter else "all weights") + (", experts recorded" if capture else "")
                print(f"{name}, {weights}, {dtype}: {found.refused or found.unpredicted or 'two steps'}", flush=True)
    return {"moe_starts": started}
