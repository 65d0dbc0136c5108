"""The conformance table: data written for other projects is translated whole, or refused by name.

`tests/translations/rows.py` says how to add rows.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
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
    """The rows of each adapter that need the same."""
    groups = defaultdict(list)
    for name, adapter in ADAPTERS.items():
        for row in adapter.ROWS:
            if row.compared or not only_compared:
                is_exhaustive = bool(row.needs or row.exhaustive or only_compared)
                groups[name, row.needs, is_exhaustive, row.needs_sandbox].append(row)
    return [
        pytest.param(
            ADAPTERS[name],
            rows,
            id=f"{name}-{needs}" if needs else name,
            marks=[
                *([pytest.mark.exhaustive] if is_exhaustive else []),
                *([pytest.mark.needs("bubblewrap")] if needs_sandbox else []),
            ],
        )
        for (name, needs, is_exhaustive, needs_sandbox), rows in groups.items()
    ]


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


@pytest.mark.parametrize(("adapter", "rows"), cases())
def test_each_row_is_translated_whole_or_refused(adapter: ModuleType, rows: list[Row]) -> None:
    wrong = {}
    for row in rows:
        found, refusal = translated(adapter, row)
        if (row.refused not in refusal) if row.refused else (refusal or found != (row.sees, row.grader)):
            wrong[row.name] = (found, refusal)
    assert not wrong


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


@pytest.mark.parametrize(("adapter", "rows"), cases(only_compared=True))
def test_the_original_code_agrees(adapter: ModuleType, rows: list[Row]) -> None:
    for row in rows:
        assert adapter.original(row.input) == (row.sees, row.grader), row.name


def test_no_row_has_two_names() -> None:
    for name, adapter in ADAPTERS.items():
        names = [row.name for row in adapter.ROWS]
        assert len(names) == len(set(names)), name
