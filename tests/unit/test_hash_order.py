"""Whether an environment could depend on string hashes is read from its code; only then it takes processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.environment.registry import resolve
from agentrl.testing import check
from agentrl.testing.check import check_environment
from agentrl.testing.hash_order import may_depend_on_hash_order

README = Path(__file__).resolve().parents[2] / "README.md"
PLAIN = """
import json
import agentrl
HELPER
class One(agentrl.Environment):
    async def run(self, ctx):
        turn = await ctx.agent("agent").act(agentrl.user("?"))
        ctx.agent("agent").reward(float(turn.text in {"yes", "no"}))
    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=split, data={"split": split})]
"""


@pytest.mark.parametrize(
    ("helper", "found"),
    [
        ("", False),
        ("import numpy", False),
        ("order = sorted({'a', 'b'})", False),
        ("lowest = min({'a', 'b'}, default='')", False),
        ("import plain_helper", False),
        ("order = list({'a', 'b'})", True),
        ("order = [*frozenset('ab')]", True),
        ("def common(words): return max(set(words), key=words.count)", True),
        ("order = sorted({*'ab'}, key=len)", True),
        ("order = sorted({*'ab'}, **{'key': len})", True),
        ("total = sum({0.1, 0.2})", True),
        ("seed = hash('a')", True),
        ("is_first = hash('a') < hash('b')", True),
        ("first = min(hash('a'), hash('b'))", True),
        ("order = list({'a': 1}.keys() - {'b': 1})", True),
        ("import iterating_helper", True),
        ("from iterating_helper import first", True),
        ("import pytest", True),
    ],
)
def test_sets_are_found_in_an_environment_and_in_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str, found: bool
) -> None:
    (tmp_path / "plain_helper.py").write_text("first = 'a'\n")
    (tmp_path / "iterating_helper.py").write_text("first = next(iter({'a', 'b'}))\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plain_helper", "iterating_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "one.py").write_text(PLAIN.replace("HELPER", helper))
    assert may_depend_on_hash_order(resolve(f"{tmp_path / 'one.py'}:One")) is found


def test_a_base_class_of_a_library_is_not_trusted() -> None:
    assert may_depend_on_hash_order(type("Bandit", (resolve("calculator"),), {"__module__": __name__}))


def test_the_class_of_the_readme_is_checked_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(check, "play_in_new_process", refuse)
    (tmp_path / "my_env.py").write_text(README.read_text().split("```python\n")[1].split("```")[0])
    assert "class Calculator" in (tmp_path / "my_env.py").read_text()
    report = check_environment(f"{tmp_path / 'my_env.py'}:Calculator", hash_order=True)
    assert report.passed, report.text
    assert report.figures["resumptions"]
