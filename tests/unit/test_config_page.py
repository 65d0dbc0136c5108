"""The configuration page is that of the models, and the three ways to write a configuration mean the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import agentrl
from agentrl.config.fields import shipped_example
from agentrl.config.load import dump_toml, load
from agentrl.core.errors import ConfigError, InputError
from docs.generators.commands import render_commands_page
from docs.generators.configuration import configuration_page, documented_keys


def test_the_page_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs/reference/configuration.md").read_text(encoding="utf-8") == configuration_page(), (
        "run `make docs-config`"
    )


def test_the_page_of_the_command_line_is_up_to_date(repository: Path) -> None:
    page = (repository / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert page == render_commands_page(), "run `make docs-config`"


def test_the_page_of_the_python_api_has_every_public_name_once(repository: Path) -> None:
    lines = (repository / "docs/reference/api.md").read_text(encoding="utf-8").splitlines()
    names = [line.removeprefix("::: agentrl.") for line in lines if line.startswith(":::")]
    assert sorted(names) == sorted([*agentrl.__all__, "formats", "parts"])


SETTING = re.compile(r"^\* `(\w+)( = .+?)?`(.*)<br>\n  (.+)$", re.MULTILINE)
"""Name, default, facts and description."""


def test_every_setting_is_described() -> None:
    page = configuration_page()
    settings = SETTING.findall(page)
    assert len(settings) == page.count("\n* `")
    assert {setting[0] for setting in settings} == {key.rpartition(".")[2] for key in documented_keys()}
    assert len(settings) >= len(set(documented_keys())) == len(documented_keys())


def test_every_number_of_seconds_has_its_unit() -> None:
    facts = [facts for name, _, facts, _ in SETTING.findall(configuration_page()) if name.endswith("_s")]
    assert facts
    assert all(fact.endswith(", s") for fact in facts)


def test_file_python_and_command_line_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[environment]\nid = "calculator"\n[model]\npath = "agentrl.environments:calculator/model"\n'
        "[policies.solver]\nlearning_rate = 1e-4\n[policies.solver.lora]\nrank = 4\n"
        '[trainer.loss]\nname = "ppo"\n[seats]\nagent = "solver"\n'
    )
    from_file = load(path)
    python = agentrl.RunConfig(
        environment={"id": "calculator"},
        model={"path": "agentrl.environments:calculator/model"},
        policies={"solver": {"learning_rate": 1e-4, "lora": {"rank": 4}}},
        trainer={"loss": {"name": "ppo"}},
        seats={"agent": "solver"},
    )
    (tmp_path / "empty.toml").touch()
    overrides = [
        "--environment.id=calculator",
        "--model.path=agentrl.environments:calculator/model",
        "--policies.solver.learning_rate=1e-4",
        "--policies.solver.lora.rank=4",
        "--trainer.loss.name=ppo",
        "--seats.agent=solver",
    ]
    assert from_file == python == load(tmp_path / "empty.toml", overrides)
    (tmp_path / "dumped.toml").write_text(dump_toml(python))
    assert load(tmp_path / "dumped.toml") == python


def test_a_model_inside_a_package_is_found_and_what_is_not_there_is_named(repository: Path) -> None:
    model = repository / "environments" / "calculator" / "model"
    assert load(shipped_example("01_tool_use")).model.path == str(model)
    for path, words in (
        ("environments.calculater:model", "there is no package 'environments.calculater'; install it"),
        (
            "agentrl.environments:calculator/modle",
            "the package 'agentrl.environments' has no directory 'calculator/modle'",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            load(shipped_example("01_tool_use"), [f"model.path={path}"])


def test_an_environment_file_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[environment]\nid = "env.py:Mine"\n[model]\npath = "tiny"\n')
    with pytest.raises(ConfigError, match=re.escape(f"there is no file env.py in {tmp_path} or {Path.cwd()}")):
        load(tmp_path / "run.toml")
    (tmp_path / "env.py").touch()
    assert load(tmp_path / "run.toml").environment.id == f"{tmp_path / 'env.py'}:Mine"


def test_examples_are_found_by_name(repository: Path) -> None:
    assert tomllib.loads(shipped_example("01_tool_use").read_text())["environment"]["id"] == "calculator"
    with pytest.raises(InputError, match="01_tool_use"):
        shipped_example("tool_use")
