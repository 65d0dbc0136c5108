"""Learning rates of policies that set none."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from agentrl.app.plan import LEARNING_RATES, with_learning_rates
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.run import RunConfig

EXAMPLE = Path("examples/01_tool_use.toml")


def config_with(tmp_path: Path, policy: str) -> RunConfig:
    text, file = EXAMPLE.read_text(), tmp_path / "run.toml"
    file.write_text(text[: text.index("[policies.solver]")] + f"[policies.solver]\n{policy}\n")
    return load(file, [])


def rate_of(config: RunConfig, before: object = None) -> float:
    return with_learning_rates(config, {"policies": before or {}}).trained["solver"].learning_rate


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("", LEARNING_RATES[0][2]), ("lora.rank = 8", LEARNING_RATES[0][1]), ("learning_rate = 7e-4", 7e-4)],
)
def test_a_policy_without_a_rate_gets_that_of_its_models_size(tmp_path: Path, policy: str, rate: float) -> None:
    assert rate_of(config_with(tmp_path, policy)) == rate


def test_rates_fall_with_size_and_adapters_take_more() -> None:
    for smaller, larger in itertools.pairwise(LEARNING_RATES):
        assert smaller[1:] >= larger[1:]
    assert all(adapter > full for _, adapter, full in LEARNING_RATES)


def test_a_resumed_run_keeps_its_rate_unless_it_sets_another(tmp_path: Path) -> None:
    before = {"solver": {"learning_rate": 5e-4}}
    assert rate_of(config_with(tmp_path, ""), before) == 5e-4
    assert rate_of(config_with(tmp_path, "learning_rate = 1e-4"), before) == 1e-4


@pytest.mark.parametrize(
    "before", [[], {"solver": 3}, *({"solver": {"learning_rate": rate}} for rate in ("fast", -1.0, math.inf, 10**400))]
)
def test_a_rate_that_a_damaged_run_records_is_not_kept(tmp_path: Path, before: object) -> None:
    assert rate_of(config_with(tmp_path, ""), before) == LEARNING_RATES[0][2]


def test_a_model_without_weights_keeps_the_default_until_its_load_fails(tmp_path: Path) -> None:
    config = config_with(tmp_path, "")
    empty = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    assert rate_of(empty) == empty.trained["solver"].learning_rate


def test_a_dry_run_shows_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_with(tmp_path, "")
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run", f"--directory={tmp_path}"]) == 0
    assert f"learning_rate = {LEARNING_RATES[0][2]}" in capsys.readouterr().out
