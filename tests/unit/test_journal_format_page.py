"""docs/reference/journal_format.md: its tables are the tables, and its SQL runs."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import get_args

import pytest

from agentrl.journal.schema import Kind, open_database_in_memory
from tests.journal_cases import write_run

PAGE = Path(__file__).parents[2] / "docs/reference/journal_format.md"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("run")
    asyncio.run(write_run(directory))
    return directory / "journal"


def queries() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("query", queries())
def test_the_sql_runs_and_finds_something(journal: Path, query: str) -> None:
    name = "turns-w0.db" if "FROM entries" in query else "control.db"
    connection = sqlite3.connect(f"file:{journal / name}?mode=ro", uri=True)
    found = connection.execute(query.replace("staleness/mean", "loss")).fetchall()
    connection.close()
    assert found or "HAVING" in query


def test_every_table_and_column_is_on_the_page() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        heading = "`turns-WORKER.db`" if kind == "turns" else f"`{kind}.db`"
        section = next(section for section in sections if section.startswith(heading))
        connection = open_database_in_memory(kind)
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        for (table,) in tables:
            line = next(line for line in section.splitlines() if line.startswith(f"| `{table}`"))
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            assert set(columns) <= set(re.findall(r"`(\w+)`", line)), table
        connection.close()


def test_the_python_runs(journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (journal.parent / "runs").mkdir(exist_ok=True)
    monkeypatch.chdir(journal.parent)
    if not Path("runs/demo").exists():
        Path("runs/demo").symlink_to(journal.parent)
    exec(compile(program.replace("turns > 2", "turns < 9"), str(PAGE), "exec"), {})
    assert "TurnEntry" in capsys.readouterr().out
