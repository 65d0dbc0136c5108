"""The conformance table: data written for other projects is translated whole, or refused by name.

`tests/translations/rows.py` says how to add rows.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.translations.rows import Row, texts

TABLE = Path(__file__).parents[1] / "translations"
FORMATS = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))
ADAPTERS = {
    path.stem: importlib.import_module(f"tests.translations.{path.stem}")
    for path in sorted(TABLE.glob("*.py"))
    if path.stem != "rows"
}


def cases(*, only_compared: bool = False) -> list[Any]:
    return [
        pytest.param(
            adapter,
            row,
            id=f"{name}-{row.name}",
            marks=[
                *([pytest.mark.exhaustive] if row.needs or row.exhaustive or only_compared else []),
                *([pytest.mark.needs("bubblewrap")] if row.needs_sandbox else []),
            ],
        )
        for name, adapter in ADAPTERS.items()
        for row in adapter.ROWS
        if row.compared or not only_compared
    ]


_results: dict[tuple[str, str], tuple[Any, str]] = {}


def result(adapter: ModuleType, row: Row) -> tuple[Any, str]:
    """Return what `translated` returns; each row is translated once."""
    key = (adapter.__name__, row.name)
    if key not in _results:
        _results[key] = translated(adapter, row)
    return _results[key]


def translated(adapter: ModuleType, row: Row) -> tuple[Any, str]:
    """Return what became of a row's input: a pair of what the policy and the grader get, or the words of a refusal."""
    if row.needs and not (FORMATS / row.needs).exists():
        pytest.skip(f"needs {FORMATS / row.needs}; see benchmarks/sandboxes_formats.py")
    try:
        return adapter.translate(row.input), ""
    except Exception as error:  # noqa: BLE001 - any exception may be the refusal
        return None, str(error) or repr(error)


def missing(row: Row, found: Any) -> set[str]:
    """Return the texts of a row's translation that did not arrive; a row that is refused has none."""
    return set() if found is None else set(texts([row.sees, row.grader])) - set(texts(found)) - {"None"}


@pytest.mark.parametrize(("adapter", "row"), cases())
def test_translation(adapter: ModuleType, row: Row) -> None:
    found, refusal = result(adapter, row)
    if row.refused:
        assert row.refused in refusal, found
    else:
        assert not refusal
        assert found == (row.sees, row.grader)


@pytest.mark.parametrize(("adapter", "row"), cases())
def test_nothing_is_dropped(adapter: ModuleType, row: Row) -> None:
    found, refusal = result(adapter, row)
    assert bool(refusal) == bool(row.refused)
    assert not missing(row, found)


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(
            adapter,
            id=name,
            marks=pytest.mark.needs("bubblewrap") if any(row.needs_sandbox for row in adapter.ROWS) else (),
        )
        for name, adapter in ADAPTERS.items()
    ],
)
def test_planted(adapter: ModuleType) -> None:
    """A field that an adapter drops is found."""
    rows = [row for row in adapter.ROWS if not row.needs and not row.exhaustive] or adapter.ROWS[:1]
    with adapter.planted():
        assert any(missing(row, translated(adapter, row)[0]) for row in rows)


@pytest.mark.parametrize(("adapter", "row"), cases(only_compared=True))
def test_the_original_code_agrees(adapter: ModuleType, row: Row) -> None:
    assert adapter.original(row.input) == (row.sees, row.grader)


def test_no_row_has_two_names() -> None:
    for name, adapter in ADAPTERS.items():
        names = [row.name for row in adapter.ROWS]
        assert len(names) == len(set(names)), name
