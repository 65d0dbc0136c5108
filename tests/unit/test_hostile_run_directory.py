"""Run directories from others: whatever lies in them, a reader answers, and nothing is written outside."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentrl.app.received import FORK, STEP_REPLAY, ReceivedRun
from agentrl.cli.main import main
from agentrl.cli.runs import _keys
from agentrl.core.errors import AgentRLError, ConfigError, InputError, JournalError, StorageError
from agentrl.core.files import replace_file
from agentrl.core.records import PolicyVersion
from agentrl.inspection.reader import RunReader
from agentrl.inspection.statistics import run_state
from agentrl.inspection.viewer.queries import QUESTIONS
from agentrl.inspection.viewer.served_runs import ServedRuns
from agentrl.journal.port import PruneRule, VersionPublication
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.run_log import RunStart, SettingChange, SqliteRunLog
from agentrl.journal.run_process import RunProcessRecord, read_process_state, record_process_state
from agentrl.journal.store import SqliteJournal
from agentrl.observe.alarms import Alarm, write_alarm
from agentrl.observe.progress import spinner
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.run_observer import RunObserver
from agentrl.observe.run_screen import MAX_TEXT, plot_curve, render_run_screen, sparkline, terminal_safe_line
from agentrl.observe.run_state import (
    MAX_POLICIES,
    MetricsFile,
    RunDisplaySettings,
    RunSnapshot,
    RunState,
    read_metrics,
    read_run_snapshot,
    write_run_snapshot,
)
from agentrl.observe.sinks import format_prometheus_metrics, open_sinks
from tests.journal_cases import spec, step_of, weights, write_run
from tests.received_runs import edit_table

ESCAPES = "\x1b]52;c;aGk=\x07\x9b31m\u202e[bold][/x]"
MARKUP = "\"'><script>alert(1)</script><img src=x onerror=alert(1)></pre></style>&lt;"
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def shown(state: RunState) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state))
    return stream.getvalue()


@settings(max_examples=30)  # each draws a whole screen
@given(st.dictionaries(st.integers(-(2**53), 2**53), NUMBERS, min_size=1, max_size=12), st.integers(0, 2**53))
@example({1: 1.7e308, 2: -1.7e308}, 5)
@example({1: 1e16, 2: 1e16 + 2}, 5)
@example({1: 1e100, 2: 1e100 * (1 - 2**-52)}, 5)
@example({1: 5e-324, 2: 0.0}, 5)
def test_any_numbers_can_be_shown(points: dict[int, float], steps: int) -> None:
    state = RunState(plan=RunDisplaySettings(name="run", steps=steps, max_staleness={"policy": 1}))
    names = ("reward/mean", "entropy", "k3", "step/seconds", "engine/busy_share", "tokens/sampled_per_s", "grad_norm")
    formats = ("format/episodes", "format/broken_share", "format/reward_broken", "format/reward_kept")
    for step, value in sorted(points.items()):
        state.record("policy", step, dict.fromkeys((*names, *formats, "staleness/mean", "advantage/zero_share"), value))
        state.record("policy", step, {"evaluation/reward": value})
    assert "run" in shown(state)


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=8))
def test_any_curve_can_be_drawn(values: list[float]) -> None:
    assert plot_curve(values)
    assert len(sparkline(values)) == len(values)


@pytest.mark.parametrize(
    "record",
    [
        {"evaluated": {"held_out-1": int("9" * 4300)}},
        {"episodes": {"e1": [0, 1, 0, 1 << 60]}},
        {"episodes": {"e1": [0, 1, 0, -1]}},
        {"workers": 10**30},
    ],
)
def test_a_record_of_the_process_beyond_all_measure_is_not_believed(tmp_path: Path, record: dict[str, object]) -> None:
    """One more death, and Python would refuse to write the count."""
    (tmp_path / "process.json").write_text(json.dumps({"state": "running", "is_playing": True, **record}))
    assert read_process_state(tmp_path) == "unknown"
    found = RunProcessRecord.read(tmp_path)
    assert (found.episodes, found.evaluated, found.has_killer) == ({}, {}, True)
    record_process_state(tmp_path, "stopped")
    assert read_process_state(tmp_path) == "stopped"
    assert RunProcessRecord.read(tmp_path).has_killer


def test_only_a_run_without_a_record_was_never_led(tmp_path: Path) -> None:
    assert (read_process_state(tmp_path), RunProcessRecord.read(tmp_path)) == ("", RunProcessRecord())


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "x", "progress": [10**400, 3]},
        {"phase": "x", "seconds": 1e300},
        {"phase": "x", "wall": -1e300},
        {"phase": "x", "in_flight": 10**30},
        {"phase": "x", "dropped": {"a": 10**30}},
    ],
)
def test_a_status_beyond_all_measure_counts_as_absent(tmp_path: Path, status: dict[str, object]) -> None:
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert read_run_snapshot(tmp_path) is None


def test_long_texts_of_a_status_are_cut(tmp_path: Path) -> None:
    write_run_snapshot(tmp_path, RunSnapshot(phase="p" * 500_000, waits=("w" * 500_000,), in_flight=1))
    state = RunState(plan=RunDisplaySettings(), status=read_run_snapshot(tmp_path))
    assert len(shown(state)) < 4 * MAX_TEXT
    assert terminal_safe_line("x" * MAX_TEXT) == "x" * MAX_TEXT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose journal holds a hostile configuration."""
    config = {"name": ESCAPES + MARKUP, "environment": {"id": MARKUP}, "policies": {MARKUP: {}, "other": {}}}

    async def write() -> None:
        await SqliteJournal(tmp_path / "run" / "journal", info={"name": MARKUP, "config": config}).close()

    asyncio.run(write())
    return tmp_path / "run"


@pytest.mark.damages_journal
@pytest.mark.parametrize("place", ["journal", "journal/control.db", "journal/turns-w0.db", "journal/control.db-wal"])
@pytest.mark.parametrize("act", ["read", "write"])
def test_a_journal_is_opened_only_where_it_lies(tmp_path: Path, place: str, act: str) -> None:
    for name in ("mine", "other"):
        asyncio.run(write_run(tmp_path / name))
    mine, other = tmp_path / "mine", tmp_path / "other"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    (mine / place).rename(tmp_path / "away") if (mine / place).exists() else None
    (other / place).touch()
    (mine / place).symlink_to(other / place)

    async def write() -> None:
        journal = SqliteJournal(mine / "journal")
        try:
            journal.turn_log("w0")
        finally:
            await journal.close()

    def read() -> None:
        RunReader(mine).close()
        TurnLogReader(mine / "journal").read("turns-w0.db", "e0", 0)

    with pytest.raises(JournalError, match=f"{place}: .*symbolic link"):
        asyncio.run(write()) if act == "write" else read()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.damages_journal
@pytest.mark.parametrize("config", [[1], {"journal": 5}, {"journal": {"keep": True}}, {"journal": {"keep": -1}}])
def test_a_rule_that_a_journal_records_and_that_is_none_prunes_nothing(
    tmp_path: Path, config: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async def write() -> None:
        await SqliteJournal(tmp_path / "run" / "journal", info={"config": config}).close()

    asyncio.run(write())
    assert main(["run", "prune", str(tmp_path / "run")]) == 2
    assert "how much to keep" in capsys.readouterr().err


INJECTIONS = ("$(touch ran)", "`touch ran`", "x; touch ran #", "'; touch ran; '", "x\n  touch ran")


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_command_that_a_refusal_suggests_can_be_pasted(tmp_path: Path, text: str) -> None:
    """Whatever names and values a run recorded, the shell reads each as a word."""
    received, command = ReceivedRun(tmp_path / "run"), "agentrl episode fork run e1"
    remote = {"kind": "remote", "url": text, "model": "m"}

    def environment(references: dict[str, str]) -> None:
        received.environment("__main__:Env", None, references=references, code_hash="", command=command)

    attempts: list[Callable[[], object]] = [
        lambda: received.config({"policies": {text: remote}}, FORK, command),
        lambda: received.config({"trainer": {"loss": {"name": "a.py:b", text: text}}}, STEP_REPLAY, command),
        lambda: environment({"__main__:Env": f"/gone/{text}.py:Env"}),
        lambda: environment({"__main__:Env": f"{text}:Env"}),
    ]
    for attempt in attempts:
        with pytest.raises(InputError) as refusal:
            attempt()
        lines = [line for line in str(refusal.value).splitlines() if "agentrl episode" in line or "touch" in line]
        suggested = [line[line.index("agentrl episode") :] for line in lines if "agentrl episode" in line]
        assert suggested
        assert not [line for line in lines if line.strip() == "touch ran"]
        for line in suggested:
            subprocess.run(["sh", "-c", f"agentrl() {{ :; }}; {line}"], cwd=tmp_path, check=True)
            assert not (tmp_path / "ran").exists(), line


def test_weights_behind_a_linked_directory_are_not_the_runs(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        asyncio.run(write_run(tmp_path / name))
        (tmp_path / name / "versions" / "policy" / "0.1").mkdir(parents=True)
    version, log = PolicyVersion("policy", 0, 1), SqliteRunLog(tmp_path / "mine" / "journal")
    found = log.published(version)
    assert found is not None
    assert found.path == str(tmp_path / "mine" / "versions" / "policy" / "0.1")
    shutil.rmtree(tmp_path / "mine" / "versions")
    (tmp_path / "mine" / "versions").symlink_to(tmp_path / "other" / "versions")
    with pytest.raises(JournalError, match="outside the run"):
        log.published(version)
    log.close()


@pytest.mark.damages_journal
def test_a_start_that_changed_a_setting_without_a_name_is_damaged(tmp_path: Path) -> None:
    async def write() -> None:
        journal = SqliteJournal(tmp_path / "journal", info={"config": {"steps": 1}})
        journal.record_start(RunStart(lineage=1, began_at=0.0, changed=(SettingChange((), 1, 2),)))
        await journal.close()

    asyncio.run(write())
    log = SqliteRunLog(tmp_path / "journal")
    with pytest.raises(JournalError, match="start of the run"):
        log.config()
    log.close()


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("forks", ("episode", "show", "forks/e0")),
        ("forks", ("run", "export", "--to=html")),
        ("checkpoints", ("run", "ledger")),
        ("checkpoints", ("run", "prune", "--keep=0")),
    ],
)
def test_no_command_reads_another_run_through_a_link(
    tmp_path: Path, place: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "other"):
        asyncio.run(write_run(tmp_path / name))
    (tmp_path / "run" / place).symlink_to(tmp_path / "other")
    noun, verb, *more = command
    assert main([noun, verb, str(tmp_path / "run"), *more]) == 74
    assert f"{place}: this is a symbolic link" in capsys.readouterr().err


def test_a_pruning_removes_nothing_through_a_link(tmp_path: Path) -> None:
    """A record names `steps/columns`, and `steps` is a link to the user's own directory."""
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    (home / "columns").write_text("private")
    with_columns = step_of("policy", 0, 1, [spec(0)])
    with_columns = replace(with_columns, report=replace(with_columns.report, columns="steps/columns"))

    async def prune() -> None:
        journal = SqliteJournal(run / "journal")
        journal.record(VersionPublication(weights("policy", 0, 1), None))
        journal.record(with_columns)
        await journal.flush()
        (run / "steps").symlink_to(home)
        try:
            await journal.prune(PruneRule(keep=0, sealed=[{"policy": PolicyVersion("policy", 0, 1)}]))
        finally:
            await journal.close()

    with pytest.raises(JournalError, match="steps: this is a symbolic link"):
        asyncio.run(prune())
    assert (home / "columns").exists()


def altered(run: Path, table: str, column: str, value: object) -> None:
    """Change the first row of a control table, with a checksum that fits."""

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**rows[0], column: value}, *rows[1:]]

    edit_table(run, table, change)


@pytest.mark.damages_journal
def test_advantages_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(write_run(tmp_path))
    altered(tmp_path, "step_units", "turn_advantages", "[[1, 2]]")
    assert main(["step", "replay", str(tmp_path)]) == 1
    assert "advantages by turn cannot be read" in capsys.readouterr().out


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("admissions", "admitted_at", "yesterday"), ("versions", "published_at", 1e308), ("steps", "seconds", 1e308)],
)
def test_the_viewer_answers_or_refuses_a_record_that_no_run_writes(
    tmp_path: Path, table: str, column: str, value: object
) -> None:
    asyncio.run(write_run(tmp_path))
    altered(tmp_path, table, column, value)
    with contextlib.closing(ServedRuns(tmp_path)) as runs:
        for question in ("runs", *QUESTIONS):
            with contextlib.suppress(AgentRLError):
                runs.answer(question, {"episode": "e0", "step": "1", "id": "e0"})


@pytest.mark.damages_journal
def test_an_episode_without_a_number_is_not_resumed(tmp_path: Path) -> None:
    async def admit() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.admit(replace(spec(0), episode_id="other"))
        await journal.close()

    asyncio.run(admit())
    with contextlib.closing(SqliteRunLog(tmp_path / "journal")) as log, pytest.raises(JournalError, match="no name of"):
        log.unfinished()


def test_a_run_directory_may_be_a_link(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "demo"))
    (tmp_path / "runs").symlink_to(tmp_path / "demo")
    reader = RunReader(tmp_path / "runs")
    assert reader.ledger().holds
    reader.close()


def test_nothing_of_a_run_reaches_the_live_view_as_an_escape(run: Path) -> None:
    line = {"policy": MARKUP, "reward/mean": 0.5, MARKUP: 1.0, ESCAPES: 2.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in range(9)))
    (run / "status.json").write_text(json.dumps({"phase": ESCAPES, "dropped": {ESCAPES: 3}, "waits": [ESCAPES]}))
    reader = RunReader(run)
    text = shown(run_state(reader))
    reader.close()
    assert "\\x1b]52" in text
    assert all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_nothing_is_appended_to_what_is_not_a_file(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("metrics.jsonl", "alarms.jsonl"):
        {"link": lambda p: p.symlink_to(precious), "pipe": os.mkfifo, "directory": Path.mkdir}[kind](tmp_path / name)
    with pytest.raises(StorageError, match="metrics"):
        MetricsFile(tmp_path / "metrics.jsonl")
    write_alarm(tmp_path, Alarm("n", "", "t", "a"), 1)
    assert precious.read_text() == "precious"


def test_a_line_cut_short_by_a_kill_costs_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"policy": "policy", "step": 1, "loss": 1.0}\n{"policy": "policy", "st')
    sink = MetricsFile(path)
    sink.record("policy", 2, {"loss": 2.0})
    sink.close()
    state = RunState(plan=RunDisplaySettings())
    read_metrics(path, state)
    assert state.policies["policy"].series("loss") == ([1, 2], [1.0, 2.0])


def test_a_file_that_cannot_be_replaced_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "taken", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_disk_that_refuses_the_end_of_a_run_is_named(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")
    (directory.path / "summary.json").mkdir()
    (directory.path / "policies").write_text("")
    with pytest.raises(StorageError, match=r"summary\.json.*--resume"):
        directory.write_summary({})
    with pytest.raises(StorageError, match=r"policies.*--resume"):
        directory.link("policies", {})


def test_many_steps_and_policies_are_read_in_time_linear_in_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [*range(1, 20_001), *[20_000] * 20_000]
    lines = [json.dumps({"policy": "policy", "step": step, "loss": 1.0}) for step in steps]
    lines += [json.dumps({"policy": f"p{number}", "step": 1}) for number in range(2 * MAX_POLICIES)]
    path.write_text("\n".join(lines))
    state = RunState(plan=RunDisplaySettings())
    read_metrics(path, state)
    assert len(state.policies["policy"].steps) == 20_000
    assert len(state.policies) == MAX_POLICIES


def test_the_prometheus_text_has_each_series_once_and_no_escapes() -> None:
    latest = {MARKUP + ESCAPES + '"\n': {"tool/ok": 1.0, "tool_ok": 2.0, 'x"}\n# TYPE y counter\ny 1 \\': 3.0}}
    text = format_prometheus_metrics(ESCAPES, latest)
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)) == 2
    assert all(line.startswith(("# HELP agentrl_", "# TYPE agentrl_", "agentrl_")) for line in text.splitlines())
    assert all(character == "\n" or character.isprintable() for character in text)


def test_what_is_waited_for_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with spinner("checking [/x] [bold]a\x1b[2J", stream):
        pass
    assert "checking [/x] [bold]a\\x1b[2J" in stream.getvalue()


def test_the_place_of_a_run_is_printed_without_escapes(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run\x1b[2J\x9b31m", "{}")
    stream = io.StringIO()
    keys = ("reward_start", "reward_end")
    seconds = dict.fromkeys(("run_seconds", "rl_seconds"), 0.0)
    shares = dict.fromkeys(("engine_busy_share", "trainer_busy_share", "held_out_tasks"), 0.0)
    with RunObserver(directory, plan=RunDisplaySettings(), stream=stream) as observer:
        observer.finish({"rewards": [], "steps": 0, **dict.fromkeys(keys), **shares, **seconds})
    assert "run\\x1b[2J\\x9b31m" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_keys_are_asked_of_nobody_where_there_is_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with _keys() as pressed:
        assert not pressed(0.0)


def test_a_sink_that_cannot_start_is_a_mistake_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("def init(**options):\n    raise RuntimeError('api_key not configured')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="wandb"):
        open_sinks(["wandb"], tmp_path, {"name": "run"})
