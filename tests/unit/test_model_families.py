"""The trainer gives the log-probabilities of the plain forward pass of transformers; a benchmark has all families.

Families that are trained in different ways: over a prefix tree, with a head of their own, experts, chunks, sinks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.learn.models import load_models
from tests.model_families import (
    MAX_CONTEXT,
    family_rows,
    long_run,
    plain_logprobs,
    trained_logprobs,
    ways,
    write_family,
)
from tests.planted_errors import PlantedErrors, missed


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Phi-3, LongRoPE", "OLMoE", "Llama 4", "gpt-oss"])
def test_what_is_trained_is_what_transformers_gives_each_row_alone(tmp_path: Path, name: str) -> None:
    path, rows = write_family(name, tmp_path), family_rows()
    policy = load_models(long_run(path), torch.device("cpu"))["policy"]
    expected = np.concatenate(plain_logprobs(path, rows))
    for way in ways(policy):
        found = np.concatenate(trained_logprobs(policy, rows, way=way))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=way)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Phi-3, LongRoPE"])
def test_the_check_at_start_finds_planted_errors(tmp_path: Path, name: str) -> None:
    """Of each kind, in the pass over a prefix tree and in that over padded rows."""
    model = load_models(long_run(write_family(name, tmp_path)), torch.device("cpu"))["policy"].model
    assert len(PlantedErrors(model).possible()) == 3
    assert missed(model, MAX_CONTEXT) == []
