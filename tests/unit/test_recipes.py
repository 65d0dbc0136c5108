"""Settings by model size: learning rates of policies that set none, and `agentrl doctor --suggest`."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from agentrl.app import recipes
from agentrl.app.recipes import RECIPES, Suggestion, high_rates, recipe_for, suggestions, with_learning_rates
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.core.errors import ModelError
from agentrl.core.files import count_parameters

EXAMPLE = "examples/01_tool_use.toml"


def _config(tmp_path: Path, policy: str) -> RunConfig:
    file = tmp_path / "run.toml"
    text = Path(EXAMPLE).read_text()
    file.write_text(text[: text.index("[policies.solver]")] + f"[policies.solver]\n{policy}\n")
    return load(file, [])


def test_the_parameters_of_a_stored_model_are_counted(tmp_path: Path) -> None:
    model = Path(load(EXAMPLE, []).model.path)
    config = json.loads((model / "config.json").read_text())
    embedding = config["vocab_size"] * config["hidden_size"]
    assert embedding < count_parameters(model) < 1e6
    with pytest.raises(ModelError, match="weights"):
        count_parameters(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="read"):
        count_parameters(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "row"), [(840_000, 0), (135_000_000, 1), (494_000_000, 2), (600_000_000, 3), (4 * 10**9, 4)]
)
def test_each_size_has_its_recipe(parameters: int, row: int) -> None:
    assert recipe_for(parameters) is RECIPES[row]
    assert recipe_for(10**12) is RECIPES[-1]


def test_rates_fall_with_size_and_adapters_take_more() -> None:
    for smaller, larger in itertools.pairwise(RECIPES):
        assert smaller.full_learning_rate >= larger.full_learning_rate
    assert all(recipe.adapter_learning_rate > recipe.full_learning_rate for recipe in RECIPES)


@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        ("", RECIPES[0].full_learning_rate),
        ("lora.rank = 8", RECIPES[0].adapter_learning_rate),
        ("learning_rate = 7e-4", 7e-4),
    ],
)
def test_a_policy_without_a_rate_gets_that_of_its_models_size(tmp_path: Path, policy: str, rate: float) -> None:
    config = with_learning_rates(_config(tmp_path, policy), {})
    assert config.trained["solver"].learning_rate == rate


def test_a_resumed_run_keeps_its_rate(tmp_path: Path) -> None:
    before = {"policies": {"solver": {"learning_rate": 5e-4}}}
    assert with_learning_rates(_config(tmp_path, ""), before).trained["solver"].learning_rate == 5e-4
    set_now = with_learning_rates(_config(tmp_path, "learning_rate = 1e-4"), before)
    assert set_now.trained["solver"].learning_rate == 1e-4


@pytest.mark.parametrize(
    "policies",
    [[], {"solver": 3}, *({"solver": {"learning_rate": rate}} for rate in ("fast", -1.0, math.inf, 10**400))],
)
def test_a_rate_that_a_damaged_run_records_is_chosen_anew(tmp_path: Path, policies: object) -> None:
    config = with_learning_rates(_config(tmp_path, ""), {"policies": policies})
    assert config.trained["solver"].learning_rate == RECIPES[0].full_learning_rate


def test_suggestions_name_setting_value_and_source(tmp_path: Path) -> None:
    rows = {row.setting: row for row in suggestions(_config(tmp_path, "learning_rate = 1.0\nlora.rank = 64"))}
    rate = rows["policies.solver.learning_rate"]
    assert (rate.current, float(rate.suggested)) == ("1", RECIPES[0].adapter_learning_rate)
    assert rows["policies.solver.lora.rank"].suggested == "8"
    assert not rows["policies.solver.lora.rank"].is_near


MEASURED = {
    "01_tool_use": 840_000,
    "05_vllm": 840_000,
    "07_smollm2": 134_515_008,
    "16_qwen": 494_032_768,
}
"""Examples whose settings were measured, and the parameters of their models, which may not be here."""


@pytest.mark.parametrize("example", MEASURED)
def test_examples_keep_what_was_measured_with_them(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "count_parameters", lambda path: MEASURED[example])
    rows = [*suggestions(load(f"examples/{example}.toml", []))]
    assert [row for row in rows if not row.is_near] == []
    assert {"credit.group_size", "policies.solver.step_size"} <= {row.setting for row in rows}
    assert not {"engine.slots"} & {row.setting for row in rows}, "what a machine holds does not follow from the model"


@pytest.mark.parametrize(
    ("value", "near", "is_near"),
    [(64, 4.0, True), (16, 4.0, True), (256, 4.0, True), (8, 4.0, False), (512, 4.0, False), (0, 4.0, False)],
)
def test_a_value_within_a_factor_stays(value: float, near: float, is_near: bool) -> None:
    assert Suggestion.of("step_size", value, 64, "a run", near).is_near == is_near


@pytest.mark.parametrize(
    ("policy", "warns"),
    [
        ("learning_rate = 2.9e-3", False),
        ("learning_rate = 3.1e-3", True),
        ("learning_rate = 3.1e-3\nlora.rank = 8", False),
        ("learning_rate = 0.03\nlora.rank = 8", True),
        ("", False),
    ],
)
def test_a_rate_far_above_that_of_the_models_size_gives_a_warning(tmp_path: Path, policy: str, warns: bool) -> None:
    """The bundled model's rates are 3e-4 for full weights and 2e-3 for adapters."""
    warnings = [*high_rates(with_learning_rates(_config(tmp_path, policy), {}))]
    assert len(warnings) == warns
    assert all(
        "policies.solver.learning_rate = " in warning and "times the usual rate" in warning for warning in warnings
    )


def test_a_model_without_readable_weights_gives_no_warning(tmp_path: Path) -> None:
    config = _config(tmp_path, "learning_rate = 1.0")
    assert [*high_rates(config)]
    empty = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    assert not [*high_rates(empty)]


def test_doctor_and_the_plan_show_a_rate_that_is_far_too_high(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", EXAMPLE, "--policies.solver.learning_rate=0.1", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["sections"][f"{EXAMPLE} will use"]}
    assert "learning_rate = 0.1 is 333 times the usual rate for full weights" in checks["learning rate"]["result"]
    assert checks["learning rate"]["level"] == "note"
    for rate, warns in (("0.1", True), ("3e-4", False)):
        main(["train", EXAMPLE, "--dry-run", f"--policies.solver.learning_rate={rate}"])
        assert ("WARNING policies.solver.learning_rate" in capsys.readouterr().err) == warns


def test_doctor_shows_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", EXAMPLE, "--suggest", "--policies.solver.step_size=8", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["sections"]["suggested settings"]}
    assert checks["policies.solver.step_size"]["result"] == "8"
    assert checks["policies.solver.step_size"]["fix"].startswith("64 (")
    assert checks["policies.solver.learning_rate"]["level"] == "ok"
