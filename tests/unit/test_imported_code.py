"""Digests of the modules that a user's environment imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import agentrl
from agentrl.app.recovery import UserCodeDigests, imported_digests
from agentrl.app.user_functions import UserFunctions
from agentrl.config.run import RunConfig
from agentrl.core.errors import AgentRLError
from agentrl.environment.loaded_code import check_loaded_code
from agentrl.environment.registry import load_function
from agentrl.journal.run_log import RunStart
from agentrl.testing import play
from agentrl.testing.side_effects import written_files


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


ENV = """
import agentrl, grading
class E(agentrl.ToolEnvironment):
    def reward(self, task, episode): return grading.VALUE
    @classmethod
    def tasks(cls, split, *, seed=0): return [agentrl.Task(id=split, data={"question": split})]
def bot(): ...
"""
EDITED = r"was edited after this process imported it\. Restart the process"


@pytest.mark.parametrize("edited", ["env.py", "grading.py"])
def test_code_that_was_edited_after_its_import_is_refused_by_every_start(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edit changes a constant, which no function's code shows."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "grading", raising=False)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "grading.py").write_text("VALUE = 0.25\ndef unused(): ...\n")
    reference, task = f"{tmp_path}/env.py:E", agentrl.Task(id="1", data={"question": "q"})
    assert play(reference, task, ["x"]).reward == 0.25
    assert load_function(f"{tmp_path}/env.py:bot", "bot")() is None
    file = tmp_path / edited
    file.write_text(file.read_text().replace("0.25", "0.75") + "# edited\n")
    config = RunConfig(environment={"id": reference}, model={"path": "agentrl.environments:calculator/model"})
    for start in (
        lambda: play(reference, task, ["x"]),
        lambda: load_function(f"{tmp_path}/env.py:bot", "bot"),
        lambda: agentrl.train(config.model_copy(update={"directory": str(tmp_path)})),
        lambda: agentrl.evaluate(config.model_copy(update={"directory": str(tmp_path)})),
    ):
        with pytest.raises(AgentRLError, match=EDITED):
            start()
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_code_that_was_reloaded_after_an_edit_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_words.py").write_text("def answer(): return 1\n")
    module = importlib.import_module("own_words")
    check_loaded_code(module.answer)
    (tmp_path / "own_words.py").write_text("def answer(): return 22\n")
    with pytest.raises(AgentRLError, match=EDITED):
        check_loaded_code(module.answer)
    importlib.reload(module)
    check_loaded_code(module.answer)
    assert module.answer() == 22


def test_a_lazy_module_stays_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the search for edited code nor the watch of side effects, whose hook hears of each access, loads it."""
    (tmp_path / "lazy_one.py").write_text("raise ImportError('loaded')")
    (tmp_path / "eager_one.py").write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("lazy_one")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    loader.exec_module(lazy)
    with written_files():
        check_loaded_code(importlib.import_module("eager_one").answer)
        sys.audit("object.__getattr__", lazy, "__dict__")
    with pytest.raises(ImportError, match="loaded"):
        lazy.__dict__  # noqa: B018


def test_an_object_that_only_says_it_is_a_module_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cffi's libraries stand in `sys.modules` and say that their class is that of modules."""

    class Library:
        __class__ = ModuleType  # type: ignore[assignment]

    (tmp_path / "plain_one.py").write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "library.lib", Library())
    check_loaded_code(importlib.import_module("plain_one").answer)
