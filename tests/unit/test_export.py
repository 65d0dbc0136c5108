"""Runs as files of other tools: whole or not at all, and with all that training on them needs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.core.errors import InputError, JournalError
from agentrl.inspection.export import episodes, exporting
from agentrl.inspection.export.exporting import export
from agentrl.inspection.export.formats import EXPORTS
from agentrl.inspection.reader import EpisodeView, RunReader
from agentrl.inspection.tokens import episode_tokens
from agentrl.inspection.viewer.queries import answer_episode_queries, as_json
from agentrl.journal.rows import assemble_trajectories


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_the_rows_that_a_trainer_is_fed(sample_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    assert main(["run", "export", str(sample_run), "--to", "jsonl", "--out", str(out)]) == 0
    reader = RunReader(sample_run)
    exported = lines_of(out)
    assert len(exported) == reader.count()
    rows = 0
    for episode in exported:
        assert episode["problems"] == []
        entries, _ = reader.recorded(reader.lines([(episode["episode"], episode["attempt"])])[0])
        known = {(each.seat, each.index): each for each in assemble_trajectories(entries)}
        for agent in episode["agents"]:
            trajectory = known[agent["seat"], agent["index"]]
            assert agent["reward"] == pytest.approx(trajectory.reward)
            for told, row in zip(agent["rows"], trajectory.rows, strict=True):
                rows += 1
                np.testing.assert_array_equal(told["token_ids"], row.token_ids)
                np.testing.assert_array_equal(told["loss_mask"], row.loss_mask)
                np.testing.assert_array_equal(told["turn_index"], row.turn_index)
                np.testing.assert_array_equal(np.float32(told["logprobs"]), row.logprobs)
                assert [(*span[:2], str(span.version)) for span in row.spans] == [tuple(v) for v in told["versions"]]
    assert rows > 100
    reader.close()


def test_json_lines_say_what_training_made_of_a_row(sample_run: Path, tmp_path: Path) -> None:
    reader = RunReader(sample_run)
    export(reader, "jsonl", tmp_path / "trained.jsonl", where="status = trained and policies ~ solver")
    episode = lines_of(tmp_path / "trained.jsonl")[0]
    agent = next(agent for agent in episode["agents"] if agent["seat"] == "solver")
    known = next(row for row in episode_tokens(reader, episode["episode"]).rows if row.seat == "solver")
    (row,) = agent["rows"]
    assert row["trained_in"] == known.step is not None
    assert row["advantages"] == [token.advantage for token in known.tokens]
    assert row["trainer_logprobs"] == [token.trainer_logprob for token in known.tokens]
    assert agent["credits"][-1]["step"] == known.step
    assert agent["credits"][-1]["advantage"] == pytest.approx(agent["reward"] - agent["credits"][-1]["baseline"])
    assert sum(part["value"] for part in agent["reward_parts"]) == pytest.approx(agent["reward"])
    assert [message["role"] for message in row["messages"]].count("assistant") == max(row["turn_index"]) + 1
    reader.close()


def test_a_page_has_the_newest_thousand_episodes_and_other_formats_have_all(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(sample_run)
    keys = reader.keys()
    assert EXPORTS["html"].limit == 1000
    assert all(format.limit is None for name, format in EXPORTS.items() if name != "html")
    out = tmp_path / "episodes.jsonl"
    assert main(["run", "export", str(sample_run), "--to", "jsonl", "--out", str(out), "--limit", "3"]) == 0
    assert [(line["episode"], line["attempt"]) for line in lines_of(out)] == keys[-3:]
    assert f"the newest of {len(keys):,}: write all with --limit {len(keys)}" in capsys.readouterr().out
    monkeypatch.setitem(EXPORTS, "html", EXPORTS["html"]._replace(limit=5))  # type: ignore[arg-type]
    monkeypatch.setattr(exporting, "MAX_EPISODES", 6)
    assert main(["run", "export", str(sample_run), "--to", "html", "--out", str(tmp_path / "short.html")]) == 0
    assert f"browse all of them with `agentrl run serve {sample_run}`" in capsys.readouterr().out
    monkeypatch.setattr(exporting, "MAX_EPISODES", 10_000)
    whole = export(reader, "html", tmp_path / "page.html")
    assert (whole.episodes, whole.left_out) == (5, len(keys) - 5)
    whole = export(reader, "html", tmp_path / "whole.html", limit=len(keys))
    assert (whole.episodes, whole.left_out) == (len(keys), 0)
    with pytest.raises(InputError, match="--limit must be 1 or more"):
        export(reader, "html", tmp_path / "none.html", limit=0)
    reader.close()


def test_episodes_read_together_are_what_they_are_one_by_one_at_a_cost_that_does_not_grow(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    keys = reader.keys()
    alone = [as_json(answer_episode_queries(reader, {"episode": name, "attempt": str(no)})) for name, no in keys]
    statements: list[str] = []
    reader.log.connection.set_trace_callback(statements.append)
    with reader.remembering():
        lines = reader.lines(keys)
        assert len(statements) <= 4 * len(lines) + 1
        together = [as_json(answer_episode_queries(reader, {"episode": name, "attempt": str(no)})) for name, no in keys]
    assert together == alone
    passes = [statement for statement in statements if re.search(r"FROM admissions a WHERE a\.\w+ (?!= )", statement)]
    assert len(passes) == 2  # over groups, and over parents, for all episodes
    assert len(statements) <= 19 * len(keys)
    reader.close()


def test_a_name_that_is_taken_is_left_alone(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, elsewhere = tmp_path / "out.jsonl", tmp_path / "elsewhere"
    command = ["run", "export", str(sample_run), "--to", "jsonl", "--where", "episode = e1", "--out", str(out)]
    elsewhere.write_text("mine")
    out.symlink_to(elsewhere)
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert elsewhere.read_text() == "mine"
    assert not out.is_symlink()
    assert len(lines_of(out)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out.jsonl"]


@pytest.mark.parametrize("name", ["new/out.jsonl", "new/deeper/out.jsonl", "file/out.jsonl"])
def test_an_export_creates_no_directory_around_it(
    sample_run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["run", "export", str(sample_run), "--to", "jsonl", "--out", str(tmp_path / name)]) == 2
    assert (
        f"no directory {(tmp_path / name).parent}, and the nearest that exists is {tmp_path}" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nothing_is_left_of_an_export_that_fails(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "export", str(sample_run), "--to", "jsonl", "--out", str(tmp_path / "out.jsonl")]
    assert main([*command, "--where", "reward > 1000"]) == 2
    assert "no episode matches" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.damages_journal
def test_what_a_damaged_run_lacks_is_said(sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(sample_run, run)
    (run / "journal" / "turns-0.db").unlink()
    assert main(["run", "export", str(run), "--to", "jsonl", "--where", "episode = e1"]) == 0
    assert "not readable" in capsys.readouterr().out
    (episode,) = lines_of(run / "episodes.jsonl")
    assert episode["problems"]
    assert episode["agents"][0]["rows"] == []


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_that_lacks_an_episode_is_no_success(
    sample_run: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_episode = episodes.read_episode

    def fail(reader: RunReader, view: EpisodeView, read: episodes.ReadStep) -> episodes.ExportedEpisode:
        if view.summary.episode == "e1":
            raise JournalError("its record is damaged")
        return read_episode(reader, view, read)

    monkeypatch.setattr(episodes, "read_episode", fail)
    command = [
        "run",
        "export",
        str(sample_run),
        "--to",
        format,
        "--where",
        "episode = e0 or episode = e1 or episode = e2",
    ]
    assert main([*command, "--out", str(tmp_path / "out"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["episodes"], told["unreadable"]) == (2, 1)
    assert told["problems"] == ["e1: left out: its record is damaged"]


# --- Parquet ----------------------------------------------------------------------------------------------------------


def test_without_pyarrow_the_extra_is_named_and_nothing_is_written(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "agentrl.inspection.export.episodes", raising=False)
    assert main(["run", "export", str(sample_run), "--to", "parquet", "--out", str(tmp_path / "rows")]) == 2
    assert "[parquet]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_table_has_the_rows_of_the_json_lines(sample_run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    reader = RunReader(sample_run)
    export(reader, "jsonl", tmp_path / "lines")
    export(reader, "parquet", tmp_path / "rows")
    reader.close()
    rows = parquet.read_table(tmp_path / "rows").to_pylist()
    assert {row["episode"] for row in rows} == {episode["episode"] for episode in lines_of(tmp_path / "lines")}
    known = {
        (episode["episode"], episode["attempt"], agent["seat"], agent["index"], row["row"]): row
        for episode in lines_of(tmp_path / "lines")
        for agent in episode["agents"]
        for row in agent["rows"]
    }
    told = [row for row in rows if row["token_ids"] is not None]
    assert len(told) == len(known)
    for row in told:
        same = known[row["episode"], row["attempt"], row["seat"], row["index"], row["row"]]
        assert dict(row["recorded"]) == same["recorded"]
        for name in same.keys() - {"messages", "versions", "recorded"}:
            assert row[name] == same[name], name
        assert [(each["start"], each["stop"], each["version"]) for each in row["versions"]] == [
            tuple(each) for each in same["versions"]
        ]
        assert [message["content"] for message in row["messages"]] == [each["content"] for each in same["messages"]]
