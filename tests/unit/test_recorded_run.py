"""A run as data: `agentrl.open_run`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentrl
from agentrl.app.replays import replay_steps
from agentrl.inspection.reader import RunReader
from agentrl.inspection.recorded_run import RecordedRun, Records
from tests.markdown_pages import ROOT, python_of


@pytest.fixture
def run(sample_run: Path) -> Any:
    with agentrl.open_run(sample_run) as run:
        yield run


def test_a_run_is_opened_read_only(run: RecordedRun, sample_run: Path) -> None:
    assert (run.path, run.state) == (sample_run, "finished")
    assert run.config["environment"]["id"]
    with pytest.raises(agentrl.AgentRLError):
        agentrl.open_run(sample_run / "missing")


def test_episodes_are_those_of_the_list(run: RecordedRun, sample_run: Path) -> None:
    chosen = list(run.episodes("reward < 0.5", match="checker"))
    assert chosen
    assert all(episode.reward is not None and episode.reward < 0.5 for episode in chosen)
    assert len(list(run.episodes())) == RunReader(sample_run).count()
    admitted = [episode.admitted_at for episode in run.episodes()]
    assert admitted == sorted(admitted)


def test_turns_tokens_and_rewards_agree_with_whole_episodes(run: RecordedRun) -> None:
    where = "status = trained and turns > 1"
    turns, tokens, rewards = list(run.turns(where)), list(run.tokens(where)), list(run.rewards(where))
    for line in list(run.episodes(where))[:5]:
        key = (line.episode, line.attempt)
        episode = run.episode(*key)
        rows = [row for agent in episode.agents for row in agent.rows]
        own = [token for token in tokens if (token.episode, token.attempt) == key]
        assert [token.id for token in own] == [token for row in rows for token in row.token_ids]
        assert [int(token.loss_mask) for token in own] == [bit for row in rows for bit in row.loss_mask]
        advantages = [value for row in rows for value in row.advantages or [None] * len(row.token_ids)]
        assert [token.advantage for token in own] == pytest.approx(advantages)
        assert sum((turn.episode, turn.attempt) == key for turn in turns) == line.turns
        parts = [(part.value, part.weight) for agent in episode.agents for part in agent.reward_parts]
        of_episode = [(part.value, part.weight) for part in rewards if (part.episode, part.attempt) == key]
        assert sorted(of_episode) == sorted(parts)


def test_metrics_by_name(run: RecordedRun) -> None:
    values = list(run.metrics("reward/mean"))
    assert {value.name for value in values} == {"reward/mean"}
    assert len(values) == sum(step.survives for step in run.steps())
    with pytest.raises(agentrl.AgentRLError, match="no metric 'reward/maen'"):
        list(run.metrics("reward/maen"))


@pytest.mark.damages_journal
def test_a_damaged_episode_is_named_and_the_others_are_read(sample_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(sample_run, copy)
    (database,) = [path for path in (copy / "journal").glob("turns-*.db") if path.stat().st_size > 1 << 16][:1]
    with sqlite3.connect(database) as connection:
        ((episode,),) = connection.execute("SELECT episode FROM entries ORDER BY rowid LIMIT 1").fetchall()
        connection.execute("UPDATE entries SET body = x'00' WHERE episode = ?", (episode,))
    with agentrl.open_run(sample_run) as run:
        whole = {turn.episode for turn in run.turns()}
    with agentrl.open_run(copy) as run:
        assert whole - {turn.episode for turn in run.turns()} == {episode}
        assert any(problem.startswith(f"{episode}.") for problem in run.problems)


class Line(msgspec.Struct, frozen=True):
    """A record with values by name, and one without a fixed shape."""

    name: str
    value: float | None
    metrics: dict[str, float]
    calls: list[dict[str, Any]]


LINES = (
    Line("a", None, {"correct": 1.0}, [{"name": "add"}]),
    Line("b", 0.5, {"correct": 0.0, "late": 2.0}, []),
)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_has_a_line_per_record(library: Any) -> None:
    pytest.importorskip(library)
    frame = Records(Line, lambda: LINES).frame(library)
    assert list(frame.columns) == ["name", "value", "calls", "correct", "late"]
    assert frame["name"].to_list() == ["a", "b"]
    assert frame["value"].to_list()[1] == 0.5
    assert frame["correct"].to_list() == [1.0, 0.0]
    assert json.loads(frame["calls"].to_list()[0]) == [{"name": "add"}]
    late = frame["late"].to_list()
    assert late[1] == 2.0
    assert late[0] is None or late[0] != late[0]


def damaged(sample_run: Path, to: Path, statement: str) -> Path:
    shutil.copytree(sample_run, to, symlinks=True)
    with sqlite3.connect(to / "journal" / "control.db") as database:
        assert database.execute(statement).rowcount == 1
    return to


@pytest.mark.damages_journal
def test_a_step_whose_record_is_damaged_is_named(sample_run: Path, tmp_path: Path) -> None:
    path = damaged(
        sample_run,
        tmp_path / "run",
        "UPDATE steps SET tokens = tokens + 1 WHERE stepped_at = (SELECT max(stepped_at) FROM steps)",
    )
    with agentrl.open_run(sample_run) as whole, agentrl.open_run(path) as run:
        assert len(list(run.steps())) == len(list(whole.steps())) - 1
        assert len(run.problems) == 1
    with pytest.raises(agentrl.AgentRLError, match="does not match its checksum"):
        replay_steps(RunReader(path))


@pytest.mark.damages_journal
@pytest.mark.parametrize("change", ["step = 'many'", "name = x'00ff'", "policy = x'00'"])
def test_values_of_another_type_are_damage_and_no_bug(sample_run: Path, tmp_path: Path, change: str) -> None:
    path = damaged(sample_run, tmp_path / "run", f"UPDATE metrics SET {change} WHERE rowid = 3")
    with agentrl.open_run(path) as run:
        for records in (run.metrics(), run.evaluations()):
            with contextlib.suppress(agentrl.AgentRLError):
                list(records)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_reward_that_is_also_a_chosen_field_has_one_column(run: RecordedRun, library: Any) -> None:
    pytest.importorskip(library)
    fields = ["reward/proposer", "reward/proposer", "data.level"]
    episodes = list(run.episodes(fields=fields))
    frame = run.episodes(fields=fields).frame(library)
    assert len(frame) == len(episodes)
    assert list(frame.columns).count("reward/proposer") == 1
    values = [value if value == value else None for value in frame["reward/proposer"].to_list()]
    assert values == pytest.approx([episode.rewards.get("proposer") for episode in episodes])


def test_records_of_a_closed_run_say_so(sample_run: Path) -> None:
    with agentrl.open_run(sample_run) as run:
        steps = run.steps()
        assert list(steps)
    with pytest.raises(agentrl.AgentRLError, match="was closed"):
        list(steps)
    with pytest.raises(agentrl.AgentRLError, match="was closed"):
        run.steps().frame("polars")
    for name in ("config", "state"):
        with pytest.raises(agentrl.AgentRLError, match="was closed"):
            getattr(run, name)


@pytest.mark.parametrize("kind", ["steps", "metrics", "evaluations", "episodes", "turns", "rewards", "tokens"])
def test_each_kind_of_record_has_a_frame(run: RecordedRun, kind: str) -> None:
    pytest.importorskip("polars")
    records = run.tokens("episode = 'e1'") if kind == "tokens" else getattr(run, kind)()
    assert len(records.frame("polars")) == len(list(records)) > 0


def test_a_frame_without_its_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install pandas"):
        Records(Line, lambda: LINES).frame()


def test_a_task_source_reads_a_run(sample_run: Path) -> None:
    """The page's recipe for episodes that begin where another run failed."""
    (source,) = (block for block in python_of(ROOT / "docs/how-to/branches.md") if "open_run" in block)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    tasks = namespace["Retry"].tasks("train", run=sample_run)
    with agentrl.open_run(sample_run) as run:
        failed = run.episodes("reward < 1 and turns > 1")
        assert list(dict.fromkeys(task.id for task in tasks)) == [episode.episode for episode in failed]
        first = next(turn for turn in run.turns(f"episode = '{tasks[0].id}'") if turn.turn == 0)
    assert tasks[0].data == {"messages": first.messages, "reply": first.content}
    assert [message["role"] for message in first.messages][-1] == "user"
