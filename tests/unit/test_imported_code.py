"""Digests of the modules that a user's environment imports."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import agentrl
from agentrl.app.recovery import UserCodeDigests, imported_digests
from agentrl.app.user_functions import UserFunctions
from agentrl.journal.run_log import RunStart

if TYPE_CHECKING:
    import pytest


class Lazy(ModuleType):
    """As of libraries that import themselves at the first use."""

    def __getattr__(self, name: str) -> object:
        raise ImportError(name)


def imported(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    module = ModuleType(name)
    module.__file__ = str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"NAME = {name!r}\n")
    monkeypatch.setitem(sys.modules, name, module)


def test_modules_beside_the_environment_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "rewards", tmp_path / "rewards.py")
    imported(monkeypatch, "helpers.words", tmp_path / "helpers" / "words.py")
    imported(monkeypatch, "elsewhere", tmp_path.parent / f"{tmp_path.name}-other" / "elsewhere.py")
    imported(monkeypatch, "installed", tmp_path / ".venv/lib/python3/site-packages/installed.py")
    imported(monkeypatch, "of_debian", tmp_path / "lib/python3/dist-packages/of_debian.py")
    imported(monkeypatch, "agentrl_function_1f", tmp_path / "loss.py")
    found = imported_digests(str(tmp_path / "env.py"))
    assert {Path(file).name for file in found} == {"rewards.py", "words.py"}


def test_entries_that_are_no_modules_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blocked", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "object", object())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert imported_digests(str(tmp_path / "env.py")) == {}


def test_pythons_library_is_left_out() -> None:
    library = sysconfig.get_path("stdlib")
    assert not any(file.startswith(library) for file in imported_digests(str(Path(library).parent / "env.py")))


def test_a_package_that_was_not_recorded_is_new() -> None:
    start = RunStart(lineage=0, began_at=0.0, code={"/a/tools/__init__.py": "1", "/a/env.py": "2"})
    assert start.digests_of("/a/late/__init__.py") == set()
    assert start.digests_of("/moved/tools/__init__.py") == {"1"}
    assert start.digests_of("/moved/env.py") == {"2"}


def test_rewards_depend_on_an_environment_that_is_in_no_file() -> None:
    async def run(self: agentrl.Environment, ctx: agentrl.EpisodeContext) -> None: ...

    typed = type("Typed", (agentrl.Environment,), {"__module__": "of_a_notebook", "seats": ("solver",), "run": run})
    code = UserCodeDigests.of({}, typed, UserFunctions((), None, compares_in_step=False))
    (place,) = code.digests
    assert place == "of_a_notebook:Typed"
    assert code.determines_rewards(place)


class Ordinary(agentrl.Environment):
    """Repeats its calls."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None: ...


class Outside(agentrl.HarnessEnvironment):
    """Starts over."""

    seats = ("solver",)
    command = ("true",)


class Harmful(Outside):
    """Starts over without its replies."""

    replay_stable = False


class Parent(Outside):
    """Has children of both kinds."""

    fan_out: ClassVar = {"Ordinary": 2, "Harmful": 1}


def continuations(environment: type[agentrl.Environment]) -> list[str]:
    return list(UserCodeDigests.of({}, environment, UserFunctions((), None, compares_in_step=False)).continuations)


def test_a_resume_says_what_unfinished_episodes_do_with_changed_modules() -> None:
    repeat = "repeat their recorded calls, and are dropped (nondeterminism) if a call differs"
    (clause,) = continuations(Ordinary)
    assert clause.startswith(repeat)
    assert continuations(Outside) == ["start over, with the recorded replies to equal requests"]
    assert continuations(Harmful) == ["start over, with new replies"]
    by_name = {words.split()[1]: words for words in continuations(Parent)}
    assert by_name.keys() == {"Ordinary", "Parent", "Harmful"}
    assert by_name["Ordinary"].startswith(f"of Ordinary {repeat}")
