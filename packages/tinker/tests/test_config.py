"""The configuration of a server: what it reads, and what it refuses with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.parts import InputError
from agentrl_tinker.config import load_server

CALCULATOR = '[models.calc]\npath = "agentrl.environments:calculator/model"\n'


def write(directory: Path, text: str = CALCULATOR) -> Path:
    path = directory / "server.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.ranks=2",
        "trainer.loss.name='ppo'",
        "engine.capture_routing=true",
        "engine.refresh='token'",
    ],
)
def test_a_server_refuses_settings_that_it_does_not_read(tmp_path: Path, setting: str) -> None:
    section, name = re.split("[.=]", setting)[:2]
    with pytest.raises(InputError, match=rf"{section}\.{name} changes nothing in a server.*; remove it"):
        load_server(write(tmp_path, f"{setting}\n{CALCULATOR}"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"keys=['A']\n{CALCULATOR}", "keys: Extra inputs are not permitted"),
        (f"engine.slot=3\n{CALCULATOR}", "slot"),
        (f"name='../x'\n{CALCULATOR}", "name"),
        ("[models.calc]\npath = 3\n", "models.calc.path: "),
        ("models = 3\n", "cannot be read"),
        ("[models.calc", "cannot be read"),
        ('[models."a/calc"]\npath = "x"\n[models."b/calc"]\npath = "y"\n', "recorded as 'calc'"),
        (CALCULATOR + 'weights = "full"\nmax_rank = 8\n', "max_rank changes nothing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"server.toml: .*{sentence}"):
        load_server(write(tmp_path, text))


def test_a_model_is_found_beside_the_file_and_settings_may_replace_the_file_s(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = write(tmp_path, 'name = "file"\ntrainer.recompute = true\n[models.calc]\npath = "model"\n')
    config = load_server(file, name="mine", directory=str(tmp_path), seed=None)
    assert config.models["calc"].path == str(tmp_path / "model")
    assert (config.name, config.directory, config.seed) == ("mine", str(tmp_path), 0)
    assert config.run.trainer.recompute


@pytest.mark.parametrize("weights", ["adapter", "full"])
def test_a_server_computes_with_a_constant_number_of_threads(tmp_path: Path, weights: str) -> None:
    config = load_server(write(tmp_path, f'{CALCULATOR}weights = "{weights}"\n'))
    assert config.run.trained["calc"].max_staleness != "auto"
