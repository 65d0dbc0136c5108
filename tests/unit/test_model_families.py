"""The trainer gives the log-probabilities of the plain forward pass of transformers; a benchmark has all families.

Families that are trained in different ways: over a prefix tree, in windows, with experts, as padded rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.learn.models import load_models
from tests.model_families import family_rows, long_run, plain_logprobs, trained_logprobs, ways, write_family


@pytest.mark.parametrize("name", ["Qwen3", "Llama 3", "Gemma 3", "OLMoE", "gpt-oss"])
def test_what_is_trained_is_what_transformers_gives_each_row_alone(tmp_path: Path, name: str) -> None:
    path, rows = write_family(name, tmp_path), family_rows()
    policy = load_models(long_run(path), torch.device("cpu"))["policy"]
    expected = np.concatenate(plain_logprobs(path, rows))
    for way in ways(policy):
        found = np.concatenate(trained_logprobs(policy, rows, way=way))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=way)
