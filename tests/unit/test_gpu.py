"""On a GPU, trainer, losses and embedded engine compute what they compute on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.learn import trainer
from tests.support.device_cases import CASES, CPU, largest_difference

TOLERANCE, BFLOAT16_TOLERANCE = 1e-3, 5e-2
"""Largest difference from the CPU, relative to the largest entry: GPUs sum in another order."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_what_the_cpu_does(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert torch.cuda.is_available(), "pytest -m gpu needs a GPU"
    monkeypatch.setattr(trainer, "rank_device", trainer.rank_device)  # the cases replace it
    expected = CASES[name](CPU, tmp_path)
    tolerance = BFLOAT16_TOLERANCE if "bfloat16" in name else TOLERANCE
    assert largest_difference(CASES[name](torch.device("cuda"), tmp_path), expected) < tolerance
