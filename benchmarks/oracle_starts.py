"""Starts of runs that set no size: predicted, trained for two steps, or refused by name.

A small model of every family of `tests/model_families.py`, with an adapter and with all weights, in bfloat16 and in
float32: `default_starts`. The sizes are chosen by the function that `agentrl train` calls, and the trainer is that of a
run in one process. `default_starts_refused`: of them, those that end with an error that names the reason.
`starts_failed`: any other end. `predictions_failed`: starts with a warning and the fallback sizes.
`prediction_errors_that_stop`: starts that an error of the prediction ended. `start_s`: the largest CPU time of the
prediction, which comes on top of the bare load.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from pathlib import Path

from agentrl.core.errors import PredictionError
from tests.default_starts import CASES, Start, default_config, start, write_model
from tests.model_families import FAMILIES, FURTHER_FAMILIES

QUICK = ("Qwen3", "Qwen3-MoE", "Gemma 2", "gpt-oss", "Mamba", "JetMoE", "GPT-2")


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    warnings.filterwarnings("ignore")
    counts, predicted = Counter[str](), [0.0]
    print(
        "| model | weights | dtype | start | context | micro-batch | predicted in, s |\n|---|---|---|---|---|---|---|"
    )
    for name in QUICK if quick else {**FAMILIES, **FURTHER_FAMILIES}:
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(name, Path(directory) / "model")
            for number, (adapter, dtype) in enumerate(CASES):
                config = default_config(path, adapter=adapter, dtype=dtype)
                counts["default_starts"] += 1
                try:
                    found = start(config, Path(directory) / f"run{number}")
                except Exception as error:  # noqa: BLE001 - it is counted
                    counts["prediction_errors_that_stop"] += _is_of_prediction(error)
                    found = Start(failed=f"{type(error).__name__}: {error}")
                counts["starts_failed"] += bool(found.failed) or not (found.refused or found.steps == 2)
                counts["default_starts_refused"] += bool(found.refused)
                counts["predictions_failed"] += bool(found.unpredicted)
                predicted.append(found.predicted_s)
                weights, what = "adapter" if adapter else "all", found.failed or found.refused or "two steps"
                sizes = f"{found.context} | {found.micro_batch}" + (" (not predicted)" if found.unpredicted else "")
                print(f"| {name} | {weights} | {dtype} | {what} | {sizes} | {found.predicted_s:.1f} |", flush=True)
    names = (
        "default_starts",
        "default_starts_refused",
        "starts_failed",
        "predictions_failed",
        "prediction_errors_that_stop",
    )
    return {**{name: float(counts[name]) for name in names}, "start_s": round(max(predicted), 2)}


def _is_of_prediction(error: BaseException | None) -> bool:
    """Whether an error came out of the modules that predict memory."""
    if isinstance(error, PredictionError):
        return True
    frame = None if error is None else error.__traceback__
    while frame is not None:
        if Path(frame.tb_frame.f_code.co_filename).stem in ("memory_prediction", "memory_estimate"):
            return True
        frame = frame.tb_next
    return False
