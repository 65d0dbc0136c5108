"""The dtype of a run on a CPU that computes bfloat16 slowly: one measurement decides for engine and trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.app.plan import chosen_dtype
from agentrl.config.run import RunConfig
from agentrl.engines.models import measure_products
from tests.learn_cases import run_config, write_model

SLOW, FAST = (37.0, 246.0), (37.0, 20.0)
"""Times of a product in float32 and bfloat16, of a CPU with AVX2 alone, and of one with AMX."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16."""
    path = write_model(tmp_path_factory.mktemp("half"))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _config(path: Path, dtype: str) -> RunConfig:
    config = run_config(path)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _never(path: str) -> tuple[float, float]:
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("setting", "times", "chosen"),
    [
        ("auto", SLOW, "float32"),
        ("auto", FAST, "auto"),
        ("auto", (37.0, 38.0), "auto"),
        ("bfloat16", FAST, "bfloat16"),
        ("bfloat16", SLOW, "bfloat16"),
    ],
)
@pytest.mark.filterwarnings("ignore:model.dtype")
def test_a_measured_product_decides(half: Path, setting: str, times: tuple[float, float], chosen: str) -> None:
    config = _config(half, setting)
    dtype, line = chosen_dtype(config.engine_plan, {}, lambda path: times)
    assert dtype == chosen
    config = config.with_dtype(dtype)
    assert config.engine_plan.dtype == config.trainer_plan.model.dtype == chosen
    assert line.startswith("computing in float32") is (chosen == "float32")
    assert bool(line) is (chosen == "float32")


def test_a_dtype_that_the_user_set_is_kept_with_a_warning(half: Path) -> None:
    with pytest.warns(UserWarning, match=r'model\.dtype = "bfloat16".*6\.6 times'):
        chosen_dtype(_config(half, "bfloat16").engine_plan, {}, lambda path: SLOW)


@pytest.mark.parametrize("recorded", ["float32", "auto"])
def test_a_resumed_run_keeps_the_choice_and_measures_nothing(half: Path, recorded: str) -> None:
    before = {"model": {"dtype": recorded}}
    assert chosen_dtype(_config(half, "auto").engine_plan, before, _never) == (recorded, "")


def test_a_checkpoint_in_float32_needs_no_measurement(tmp_path: Path) -> None:
    assert chosen_dtype(_config(write_model(tmp_path), "auto").engine_plan, {}, _never) == ("auto", "")


def test_both_dtypes_are_measured(half: Path) -> None:
    times: Any = measure_products(half)
    assert all(0 < each < 1e4 for each in times)
