"""Environments are found by name, entry point, module, file and class, and refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment.registry import make, name_of, register, registered_environments, resolve, spec
from agentrl.environments.calculator import Calculator
from tests.unit.episodes import play

SOURCE = """
import agentrl

class Echo(agentrl.Environment):
    \"\"\"Says it back.\"\"\"
    async def run(self, ctx):
        turn = await ctx.agent("agent").act(agentrl.user("say a"))
        ctx.agent("agent").reward(float(turn.text == "a"))
"""


class Mine(agentrl.Environment):
    """For the registry."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.agent("agent").reward(1.0)


class AsInTrl:
    """For the registry, too."""

    def reset(self, **task: object) -> str:
        return "?"

    def get_reward(self) -> float:
        return 1.0


def test_the_installed_entry_point_is_found() -> None:
    assert resolve("calculator") is Calculator
    assert spec("calculator").entry_point.endswith("environments.calculator:Calculator")
    assert isinstance(make("calculator"), Calculator)


def test_registered_classes_have_their_name() -> None:
    register("mine", Mine)
    register("mine", Mine)
    assert resolve("mine") is Mine
    assert name_of(Mine) == "mine"
    assert "mine" in [entry.id for entry in registered_environments()]
    with pytest.raises(EnvironmentDefinitionError, match="registered"):
        register("mine", Calculator)
    register("as in TRL", AsInTrl)
    register("as in TRL", AsInTrl)


def test_a_module_and_a_file_are_found(tmp_path: Path) -> None:
    assert resolve("agentrl.environments.calculator:Calculator") is Calculator
    file = tmp_path / "env.py"
    file.write_text(SOURCE)
    echo = resolve(str(file))
    assert resolve(f"{file}:Echo") is echo
    assert resolve(name_of(echo)) is echo
    assert name_of(echo) == f"{file}:Echo"
    assert play(echo, ["a"]).header.reward == 1.0


@pytest.mark.parametrize(
    "lines",
    [
        "max_turn = 3\n    def last(self): return self.max_turn",  # read by the class
        "seats = ('agent',)\n    seat = 'agent'",  # beside the attribute that it resembles
        "_seat = 'agent'",
        "level = 3",
    ],
)
def test_attributes_of_ones_own_are_accepted(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "env.py"
    file.write_text(f"{SOURCE}\n    {lines}\n")
    assert issubclass(resolve(str(file)), agentrl.Environment)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("calculater", "'calculator'"),
        ("environments.calculator:Nothing", "'Nothing'"),
        ("no.such.module:X", "import no.such.module"),
        ("nowhere/env.py", "does not exist"),
        ("agentrl.core.records:Task", "agentrl.Environment"),
        ("agentrl.core.ids:call_id", "not a class"),
    ],
)
def test_what_cannot_be_found_is_explained(reference: str, words: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=words):
        resolve(reference)


def test_a_missing_file_names_the_folder_and_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SOURCE)
    with pytest.raises(EnvironmentDefinitionError, match=f"does not exist in {tmp_path}; did you mean .*/shop.py"):
        resolve(f"{tmp_path / 'shopp.py'}:Echo")
    with pytest.raises(EnvironmentDefinitionError, match=f"there is no directory {tmp_path / 'here'}"):
        resolve(f"{tmp_path / 'here' / 'shop.py'}:Echo")


def test_a_missing_class_or_module_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentDefinitionError, match=r"it defines: Echo; did you mean shop\.py:Echo\?"):
        resolve("shop.py:Ecko")
    with pytest.raises(
        EnvironmentDefinitionError, match=rf"module 'shopp' is neither in {tmp_path} .* did you mean shop\?"
    ):
        resolve("shopp:Echo")
    with pytest.raises(EnvironmentDefinitionError, match=r"a class in a file is `path/env.py:Class`"):
        resolve("nowhere.near:Echo")


def test_an_import_that_fails_names_the_users_line_first_and_each_place_once(tmp_path: Path) -> None:
    def error_of(name: str, source: str) -> str:
        (tmp_path / name).write_text(source)
        with pytest.raises(EnvironmentDefinitionError) as raised:
            resolve(str(tmp_path / name))
        return str(raised.value)

    text = error_of("user.py", "import json\njson.loads('{')\n")
    assert re.search(rf"JSONDecodeError: .* \({tmp_path}/user\.py:2, raised in \S+/json/decoder\.py:\d+\)$", text), text
    text = error_of("names.py", "from json import nothing\n")
    assert text.endswith(f"({tmp_path}/names.py:1)"), text
    text = error_of("broken.py", "def f(:\n")
    assert text.endswith(f"SyntaxError: invalid syntax ({tmp_path}/broken.py:1)"), text


def test_seats_must_be_distinct_names() -> None:
    class Twice(Mine):
        seats = ("a", "a")

    class Letters(Mine):
        seats = "solver"  # type: ignore[assignment]

    for wrong in (Twice, Letters):
        with pytest.raises(EnvironmentDefinitionError, match="seats"):
            resolve(wrong)


def test_an_abstract_environment_names_what_it_lacks() -> None:
    class Half(agentrl.ToolEnvironment):
        """No reward."""

    with pytest.raises(EnvironmentDefinitionError, match="reward"):
        resolve(Half)
