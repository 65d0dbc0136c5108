"""Every journal format that was released stays readable, by agentrl and by the second reader."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import JournalError
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import FORMAT
from tests.golden.read_run import extract, summarize, summary_path
from tests.journal_oracle import judge

FORMATS = range(1, FORMAT + 1)


@pytest.mark.parametrize("version", FORMATS)
def test_todays_reader_finds_what_the_first_writer_of_a_format_recorded(version: int, tmp_path: Path) -> None:
    reader = RunReader(extract(version, tmp_path))
    try:
        summary = summarize(reader)
    finally:
        reader.close()
    assert summary == json.loads(summary_path(version).read_text(encoding="utf-8"))
    assert {episode["status"] for episode in summary.values()} >= {"trained"}


@pytest.mark.parametrize("version", FORMATS)
def test_the_second_reader_finds_no_violation_in_a_golden_run(version: int, tmp_path: Path) -> None:
    run = extract(version, tmp_path)
    assert (run / "journal" / "control.db").is_file()
    assert judge(run, ended=True) == []


@pytest.mark.damages_journal
def test_a_newer_format_is_refused_with_both_numbers_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = extract(FORMAT, tmp_path / "run")
    connection = sqlite3.connect(run / "journal" / "control.db")
    with connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (str(FORMAT + 1),))
    connection.close()
    message = (
        f"journal format '{FORMAT + 1}', but this version of agentrl reads format {FORMAT}; install a newer version of "
        "agentrl to read it"
    )
    with pytest.raises(JournalError, match=message):
        RunReader(run)
    assert main(["episode", "list", str(run)]) == 74
    assert message in capsys.readouterr().err
