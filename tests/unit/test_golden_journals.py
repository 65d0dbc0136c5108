"""The journal's format stays readable, by agentrl and by the second reader; earlier ones are refused, untouched."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import JournalError
from agentrl.core.ids import random_stream
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import FORMAT
from tests.golden.read_run import extract, summarize, summary_path
from tests.journal_oracle import judge
from tests.support.fuzzed import commands


def test_todays_reader_finds_what_the_first_writer_of_the_format_recorded(tmp_path: Path) -> None:
    reader = RunReader(extract(FORMAT, tmp_path))
    try:
        summary = summarize(reader)
    finally:
        reader.close()
    assert summary == json.loads(summary_path(FORMAT).read_text(encoding="utf-8"))
    assert {episode["status"] for episode in summary.values()} >= {"trained"}


def test_the_second_reader_finds_no_violation_in_a_golden_run(tmp_path: Path) -> None:
    run = extract(FORMAT, tmp_path)
    assert (run / "journal" / "control.db").is_file()
    assert judge(run, ended=True) == []


TRAIN = """
name = "run"
environment.id = "calculator"
model.path = "agentrl.environments:calculator/model"
policies.solver = {}
"""
REFUSED = "journal format '3', but this version of agentrl reads format 4; use agentrl at commit d59b0c92"


NOT_READERS = {"list", "pause", "resume", "drain", "set"}
"""`list` names the run with its reason; the others speak to a running process."""


def content_of(run: Path) -> dict[str, str]:
    """Digests of the run's files, without the empty logs that SQLite leaves beside a database that was read."""
    assert not any(path.stat().st_size for path in run.rglob("*-wal"))
    files = (path for path in sorted(run.rglob("*")) if path.is_file() and path.name[-4:] not in ("-wal", "-shm"))
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.damages_journal  # tests/journal_oracle.py reads the current format alone
def test_every_reader_refuses_a_run_of_the_format_before_by_name_and_leaves_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = extract(3, tmp_path / "run")
    before = content_of(run)
    file = tmp_path / "run.toml"
    file.write_text(TRAIN + f"directory = {str(tmp_path)!r}\n")
    reading = commands(run, random_stream("format", 3))
    lines = [line for line in reading if not (line[0] == "run" and line[1] in NOT_READERS)]
    lines += [["train", str(file), "--resume"], ["run", "compare", str(run), str(run)], ["run", "serve", str(run)]]
    lines += [["episode", "fork", str(run), "e1", "--at", "1"]]
    for line in lines:
        assert main(line) == 74, line
        assert REFUSED in capsys.readouterr().err, line
    assert content_of(run) == before


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
