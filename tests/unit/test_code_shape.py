"""The shape of the code: what must not be there is found where it is planted, and agentrl has none."""

from __future__ import annotations

import ast

import pytest

from benchmarks.code_shape import (
    OTHER_REFUSALS,
    Module,
    decisions_from_prose,
    refusal_places,
)


def planted(source: str) -> list[Module]:
    return [Module(name="planted", is_package=False, text=source, tree=ast.parse(source))]


def found(expression: str) -> list[str]:
    source = f"def decide(error, reason, hold, rows, failures):\n    return {expression}\n"
    return decisions_from_prose(planted(source))


@pytest.mark.parametrize(
    "expression",
    [
        "reason.endswith('(max_in_flight)')",
        "hold.text.partition('. Set failed_reward')[0]",
        "'resource_lost: ' in str(error)",
        "'took longer than' in failures[0]",
        "RESOURCE_LOST in reason",
        "error not in (hold.detail or '')",
        "re.search(r'did not end', str(error))",
        "_PATTERN.match(hold.advice)",
        "reason == 'the run is paused'",
        "hold.phase.startswith('evaluating')",
        "f'{error}'.startswith('load')",
    ],
)
def test_a_planted_decision_is_found(expression: str) -> None:
    (place,) = found(expression)
    assert place.startswith("planted:decide, line 2: ")


@pytest.mark.parametrize(
    "expression",
    [
        "reason == 'resource_lost'",
        "hold.kind == 'max_in_flight'",
        "reason in ('frozen', 'probe')",
        "'reason' in rows",
        "' '.join(str(error).split())",
        "str(error).partition('\\n')[0]",
    ],
)
def test_kinds_keys_and_layout_are_no_decisions_from_prose(expression: str) -> None:
    assert not found(expression)


def test_no_decision_is_taken_from_a_text_for_people(package_modules: list[Module]) -> None:
    assert decisions_from_prose(package_modules) == []


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("raise ValueError('engine.replicas above 1: set deterministic = false')", 1),
        ("raise ConfigError(f'credit.release = {release!r}: set policies.{name}.max_staleness = 1')", 1),
        ("for refusal in compatible(parts):\n        raise ConfigError(str(refusal))", 1),
        ("return [each.why for each in compatible(parts)]", 0),
        ("raise ValueError('credit.group_size = 1: set credit.advantage')", 0),
        ("raise ValueError('the policies. credit is due')", 0),
        ("raise InputError('give model.path, or policies.NAME.model')", 0),
    ],
)
def test_a_planted_refusal_of_a_combination_is_found(statement: str, count: int) -> None:
    assert len(refusal_places(planted(f"def check(release, name, parts):\n    {statement}\n"))) == count


def test_combinations_are_refused_in_one_place(package_modules: list[Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each exception is one."""
    monkeypatch.setattr("benchmarks.code_shape.OTHER_REFUSALS", {})
    places = {place.partition(",")[0] for place in refusal_places(package_modules)}
    assert places == {*OTHER_REFUSALS, "agentrl.core.parts:check_compatible"}
