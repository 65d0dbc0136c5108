"""A run whose trainer is lost goes on by itself, as `--resume` would, within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.app import recovery, stops
from agentrl.app.run_parts import RunFactories
from agentrl.app.stops import cancel_run_on_signal
from agentrl.app.training import Run, run_training
from agentrl.cli.main import main
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.core import own_loop
from agentrl.core.clock import SystemClock
from agentrl.core.errors import (
    AgentRLError,
    ConfigError,
    EngineError,
    InputError,
    JournalError,
    RunDirectoryError,
    StorageError,
    TrainerLostError,
)
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import EpisodeSpec, PolicyVersion, StepReport, Task, VersionSpan
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import EntryBody, JournalEntry, TurnEntry
from agentrl.journal.run_log import RunStart, SettingChange
from agentrl.journal.run_process import RunLock, RunProcessRecord, format_episode_list, record_process_state
from agentrl.journal.store import SqliteJournal
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests import journal_cases
from tests.sim.small_run import TASKS, Guess, config_for, guess
from tests.support.recording_trainer import RecordingTrainer


class NoWaiting(SystemClock):
    """Remembers how long it was asked to wait, if that was a second or more (episodes wait less)."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.sleeps: Callable[[], object] = lambda: None
        """Called whenever somebody does."""

    async def sleep(self, seconds: float) -> None:
        self.sleeps()
        self.waits += [seconds] if seconds >= 1 else []
        await asyncio.sleep(0)


@dataclass
class Lives:
    """Adapters that make a scripted engine and a recording trainer in each life."""

    losses: list[int]
    """Of each life, the step at which its trainer is lost; 0: it is lost when it starts."""
    trainers: list[RecordingTrainer] = field(default_factory=list)
    clock: NoWaiting = field(default_factory=NoWaiting)
    starting: Callable[[], object] = lambda: None
    """Called before an engine is made."""
    awaited: int = 0
    """So many turns of the newest version are sampled before a trainer is lost."""
    turns: Counter[int] = field(default_factory=Counter)
    """Turns sampled, by step of the version."""

    def trainer(self, plan: TrainerPlan, directory: Path) -> RecordingTrainer:
        step = self.losses[len(self.trainers)] if len(self.trainers) < len(self.losses) else -1
        lost = TrainerLostError("trainer rank 0 died")
        versions = directory / "versions"
        failures: Mapping[tuple[str, int], AgentRLError] = {("guesser", step): lost}
        trainer = Fragile(["guesser"], failures=failures, dies_at_once=step == 0, versions=versions)
        if step > 0:
            trainer.may_be_lost = lambda at: at != step or self.turns[step - 1] >= self.awaited
        self.trainers.append(trainer)
        return trainer

    async def engine(
        self, plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path
    ) -> Engine:
        self.starting()
        await asyncio.sleep(0)

        def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
            self.turns[version.step] += 1
            return guess(request, policy, version)

        return ScriptedEngine(script, versions=versions)

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        checkpoint: int = 2,
        held_out: int = 0,
        seed: int = 0,
        best: Mapping[str, Any] | None = None,
        advantage: str = "leave_one_out",
        quiet: bool = True,
        killed: bool = False,
        assembled: Callable[[Orchestrator], None] = lambda orchestrator: None,
    ) -> Run:
        config = config_for(
            steps=6,
            seed=seed,
            name="run",
            directory=str(path),
            checkpoint={"every": checkpoint, "versions": 0},
            evaluation={"tasks": held_out, "every": 0},
            best=best or {},
            credit={"group_size": 4, "advantage": advantage},
        )
        factories = RunFactories(
            engine=self.engine,
            trainer=self.trainer,
            chat_format=lambda model: PlainChatFormat(),
            clock=self.clock,
            assembled=assembled,
        )
        running = run_training(
            config, Guess, tasks=TASKS, held_out=TASKS[:held_out], quiet=quiet, factories=factories, resume=resume
        )
        run = asyncio.run(running)
        if killed:  # as if it had been, before its end: a finished run is not continued
            record_process_state(path / "run", "killed")
        return run


class Fragile(RecordingTrainer):
    """Can be lost as it starts."""

    def __init__(self, policies: list[str], *, dies_at_once: bool, **options: Any) -> None:
        super().__init__(policies, **options)
        self._dies_at_once = dies_at_once
        self.may_be_lost: Callable[[int], bool] = lambda at: True

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        while not self.may_be_lost(step_id):
            await asyncio.sleep(0)
        return await super().optim_step(policy, step_id)

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        if self._dies_at_once:
            raise TrainerLostError("Ray did not start")
        return (*await super().start(resume_from), "guesser: adapters on q_proj")


def test_what_is_adapted_is_said_as_the_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Lives(losses=[]).run(tmp_path, quiet=False)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("guesser: adapters on q_proj\n") == 1


def test_what_an_earlier_process_of_the_run_still_writes_is_waited_for(tmp_path: Path) -> None:
    first = Lives(losses=[])
    first.run(tmp_path, killed=True)
    lock = RunLock(tmp_path / "run/journal", "turns-7.lock")
    again = Lives(losses=[])
    again.clock.sleeps = lambda: lock.release() if len(again.clock.waits) == 3 else None
    again.run(tmp_path, resume=True)
    assert again.clock.waits == [1.0] * 4
    assert len(again.trainers) == 1


def test_what_is_written_for_ever_is_not(tmp_path: Path) -> None:
    Lives(losses=[]).run(tmp_path, killed=True)
    lock = RunLock(tmp_path / "run/journal", "turns-7.lock")
    again = Lives(losses=[])
    with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        again.run(tmp_path, resume=True)
    lock.release()
    assert again.clock.waits == [1.0] * 30
    assert not again.trainers


def surviving_steps(path: Path) -> list[tuple[int, int, set[str]]]:
    """(lineage, step, episodes) of the steps that led to the last checkpoint, by plain SQL."""
    manifest = json.loads(
        max((path / "run/checkpoints").glob("step_*"), key=_order).joinpath("manifest.json").read_text()
    )
    lineage, step = manifest["versions"]["guesser"]
    connection = sqlite3.connect(path / "run/journal/control.db")
    found = []
    while step:
        row = connection.execute(
            "SELECT parent_lineage, parent_step FROM versions WHERE lineage = ? AND step = ?", (lineage, step)
        ).fetchone()
        query = "SELECT DISTINCT episode FROM step_units WHERE lineage = ? AND step = ?"
        episodes = {episode for (episode,) in connection.execute(query, (lineage, step))}
        if episodes:
            found.append((lineage, step, episodes))
        lineage, step = row
    connection.close()
    return found[::-1]


def _order(path: Path) -> tuple[int, int]:
    step, lineage = path.name.removeprefix("step_").split("-")
    return int(lineage), int(step)


def test_a_lost_trainer_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    lives = Lives([4, 6])
    run = lives.run(tmp_path)
    assert not run.interrupted
    assert [[batch.step_id for batch in trainer.batches] for trainer in lives.trainers] == [
        [1, 2, 3],
        [3, 4, 5],
        [5, 6],
    ]
    assert all(trainer.closed for trainer in lives.trainers)
    assert lives.clock.waits == [1.0, 1.0]
    steps = surviving_steps(tmp_path)
    assert [(lineage, step) for lineage, step, _ in steps] == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert max(Counter(episode for _, _, episodes in steps for episode in episodes).values()) == 1


def test_units_of_weights_that_a_rollback_undid_are_trained(tmp_path: Path) -> None:
    def sampled_by(path: Path) -> dict[str, set[tuple[int, int]]]:
        store = SqliteJournal(path / "run" / "journal")
        log = store.turn_log("0")
        trained = {episode for _, _, episodes in surviving_steps(path) for episode in episodes}
        found = {
            episode: {span.version[1:] for entry in log.read(episode, 0) for span in spans_of(entry.decode())}
            for episode in trained
        }
        asyncio.run(store.close())
        return found

    def spans_of(body: EntryBody) -> tuple[VersionSpan, ...]:
        return body.tokens.spans if isinstance(body, TurnEntry) else ()

    dead = (0, 3)  # published after the checkpoint that the second life begins at
    trained = False
    for seed in range(4):  # who has sampled how much when the trainer dies depends on the machine
        path = tmp_path / f"{seed}"
        Lives([4], awaited=4).run(path, seed=seed)
        trained |= any(dead in versions for versions in sampled_by(path).values())
        assert main(["run", "ledger", str(path / "run")]) == 0
    assert trained


def test_without_a_checkpoint_it_starts_again_from_the_base_model(tmp_path: Path) -> None:
    lives = Lives([3])
    lives.run(tmp_path, checkpoint=0)
    assert [len(trainer.batches) for trainer in lives.trainers] == [2, 6]
    units = Counter(unit.episode_id for batch in lives.trainers[1].batches for unit in batch.units)
    assert {unit.episode_id for batch in lives.trainers[0].batches for unit in batch.units} <= set(units)
    assert max(units.values()) == 1


def test_a_trainer_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    lives = Lives([0] * 6)
    with pytest.raises(TrainerLostError, match="Ray"):
        lives.run(tmp_path)
    assert lives.clock.waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    later = Lives([])
    assert later.run(tmp_path, resume=True).summary["steps"] == 6


def test_the_summary_is_of_the_whole_run_and_counts_steps_taken_again_once(tmp_path: Path) -> None:
    with pytest.raises(TrainerLostError):
        Lives([4, 0, 0, 0, 0, 0]).run(tmp_path, held_out=3)
    resumed = Lives([]).run(tmp_path, resume=True, held_out=3)
    assert [values["step"] for values in resumed.metrics] == [3, 4, 5, 6], "the life of this process"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], len(summary["rewards"])) == (6, 6)
    assert [entry["step"] for entry in summary["evaluations"]] == [0, 6]
    before, after = summary["evaluations"]
    assert (summary["reward_start"], summary["reward_end"]) == (before["evaluation/reward"], after["evaluation/reward"])
    assert summary["rl_seconds"] > sum(values["step/seconds"] for values in resumed.metrics)


def test_a_run_gives_out_its_best_versions_whichever_life_made_them(tmp_path: Path) -> None:
    best = {
        "metric": "-episodes/dropped",
        "window": 1,
    }  # always 0: the first step, sampled by 0.0, is as good as the last
    lost = Lives([4])
    run = lost.run(tmp_path, best=best)
    assert len(lost.trainers) == 2
    summary = {"metric": "episodes/dropped", "value": 0.0, "steps": {"guesser": 0}}
    assert run.summary["best"] == {**summary, "versions": {"guesser": "guesser@0.0"}}
    assert {name: path.resolve().name for name, path in run.best.items()} == {"guesser": "0.0"}
    assert run.policies["guesser"].resolve().name == "1.6"
    assert run.best["guesser"] == tmp_path / "run" / "best" / "guesser"
    assert run.summary["ended_early"] is None


def test_a_run_that_its_metric_ended_is_over_when_it_is_resumed(tmp_path: Path) -> None:
    best = {"metric": "episodes/trained", "window": 1, "stop_at": 16.0}
    run = Lives([]).run(tmp_path, best=best)
    assert (run.summary["steps"], run.summary["ended_early"]) == (2, "episodes/trained reached 16")
    assert not run.interrupted
    again = Lives([])
    assert (again.run(tmp_path, best=best, resume=True).metrics, again.trainers[0].batches) == ([], [])
    assert Lives([]).run(tmp_path, best={**best, "stop_at": None}, resume=True).summary["steps"] == 6


def test_links_to_versions_last_from_the_end_of_a_run_to_its_resume(tmp_path: Path) -> None:
    """What a resumed run trains would make them links to older versions, or to none."""
    best, run, seen = {"metric": "episodes/trained", "window": 1, "stop_at": 16.0}, tmp_path / "run", list[object]()

    def links(folder: str) -> list[str]:
        return [path.resolve().name for path in (run / folder).iterdir()]

    Lives([]).run(tmp_path, best=best)
    assert (links("policies"), links("best")) == (["0.2"], ["0.0"])
    with pytest.raises(EngineError):
        Lives([], starting=fail_to_start).run(tmp_path, best={**best, "stop_at": None}, resume=True)
    assert (links("policies"), links("best")) == (["0.2"], ["0.0"]), "nothing was trained"
    Lives([]).run(
        tmp_path,
        best={**best, "stop_at": None},
        resume=True,
        assembled=lambda orchestrator: seen.append([*links("policies"), *links("best")]),
    )
    assert seen == [[]]
    assert links("policies") == ["1.6"]


def fail_to_start() -> None:
    raise EngineError("no GPU answers")


def test_a_run_killed_before_its_journal_was_made_can_be_resumed_or_made_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".config.json").write_text('{"na')
    RunDirectory.create(tmp_path / "a", "{}")
    RunDirectory.reopen(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="exists"):
        RunDirectory.create(tmp_path / "a", "{}")
    assert Lives([]).run(tmp_path / "b").summary["steps"] == 6


def test_of_two_starts_at_once_one_makes_the_run_and_the_other_touches_nothing(tmp_path: Path) -> None:
    made: list[str] = []
    refused: list[RunDirectoryError] = []
    together = threading.Barrier(8)

    def start(number: int) -> None:
        together.wait()
        try:
            RunDirectory.create(tmp_path / "run", json.dumps({"number": number}))
            made.append(json.dumps({"number": number}))
        except RunDirectoryError as error:
            refused.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(refused) == 7
    assert (tmp_path / "run/config.json").read_text() == made[0]


def test_a_run_refused_because_another_process_writes_it_leaves_it_alone(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")
    directory.forget_if_refused(RunDirectoryError, RunDirectoryError("process 7 is writing this run"), None)
    assert (tmp_path / "run/config.json").exists()
    directory.forget_if_refused(InputError, InputError("no such model"), None)
    assert not (tmp_path / "run").exists()


def begins(run: Path, *, died: bool = True, workers: int = 1) -> dict[str, int]:
    """Deaths in a row, by episode, as a process finds them that goes on with the run and ends like this."""
    store = SqliteJournal(run / "journal")
    record = RunProcessRecord.read(run).next(store)
    asyncio.run(store.close())
    record.is_playing, record.workers = died, workers
    record.write(run)
    return {name: standing.deaths for name, standing in record.episodes.items()}


def test_deaths_of_the_process_count_in_a_row_while_an_episode_gets_nowhere(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    both = [journal_cases.spec(0), journal_cases.spec(1)]

    async def write(*entries: JournalEntry, specs: Sequence[EpisodeSpec] = ()) -> None:
        store = SqliteJournal(journal)
        store.admit(*specs)
        for entry in entries:
            store.turn_log("0").append(entry)
        await store.close()

    asyncio.run(write(specs=both))
    assert begins(tmp_path) == {"e0": 0, "e1": 0}
    asyncio.run(write(journal_cases.entry(both[0], 0)))  # the record of its start is nothing new
    assert begins(tmp_path) == {"e0": 1, "e1": 1}
    assert begins(tmp_path) == {"e0": 2, "e1": 2}
    asyncio.run(write(journal_cases.entry(both[0], 1)))
    assert begins(tmp_path, died=False) == {"e0": 1, "e1": 3}
    assert begins(tmp_path, workers=2) == {"e0": 1, "e1": 3}
    assert begins(tmp_path) == {"e0": 1, "e1": 3}  # their code had run elsewhere
    asyncio.run(write(specs=[replace(both[1], attempt=1)]))
    assert begins(tmp_path) == {"e0": 2, "e1": 1}
    (tmp_path / "process.json").write_bytes(b"\xff{")
    record = RunProcessRecord.read(tmp_path)
    assert (record.state, record.has_killer) == ("unknown", True)
    assert "process.json" in record.fault
    assert begins(tmp_path) == {"e0": 1, "e1": 1}, "they may have died before: it is not known how often"
    assert RunProcessRecord.read(tmp_path).has_killer, "episodes run in worker processes from now on"


def test_a_life_that_died_before_it_published_anything_keeps_its_lineage(tmp_path: Path) -> None:
    for lineage in range(3):
        store = SqliteJournal(tmp_path / "journal")
        assert store.highest_lineage() == lineage - 1
        store.record_start(
            RunStart(lineage=lineage, began_at=0.0, changed=(SettingChange(("steps",), lineage, lineage + 1),))
        )
        asyncio.run(store.close())
    store = SqliteJournal(tmp_path / "journal")
    assert [life.changed[0].now for life in store.starts()] == [1, 2, 3]
    asyncio.run(store.close())


def test_an_evaluation_that_kills_is_counted_by_its_task(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    for life in range(3):
        store = SqliteJournal(journal)
        record = RunProcessRecord.read(tmp_path).next(store)
        assert record.evaluated == ({"t7": life} if life else {})
        record.write(tmp_path)
        store.admit(replace(journal_cases.spec(7, purpose="evaluate"), episode_id=f"v{life}"))
        asyncio.run(store.close())


def test_a_message_names_some_episodes_and_counts_the_others() -> None:
    specs = [journal_cases.spec(number) for number in range(16)]
    assert format_episode_list(specs, 2) == "e0 (task 't0'), e1 (task 't1') and 14 more"
    assert format_episode_list(specs[:2], 2) == "e0 (task 't0'), e1 (task 't1')"


def test_evaluation_episodes_that_a_kill_cut_are_dropped_by_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if child == 0:
        lives = Lives([])
        lives.clock.sleeps = lambda: lives.turns[0] > 4 and os.kill(os.getpid(), signal.SIGKILL)
        lives.run(tmp_path, held_out=4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with contextlib.closing(RunReader(tmp_path / "run")) as reader:
        cut = {line.episode for line in reader.episodes("purpose = 'evaluate'") if line.status == "in_flight"}
    assert cut

    Lives([]).run(tmp_path, resume=True, held_out=4, quiet=False)
    told = capsys.readouterr()
    (line,) = [line for line in (told.out + told.err).splitlines() if "It was running" in line]
    assert "held-out episodes that have ended count if their evaluation is resumed" in line
    assert "continue" not in line, "no training episode was running"
    with contextlib.closing(RunReader(tmp_path / "run")) as reader:
        lines = reader.episodes("purpose = 'evaluate'")
        assert {line.episode for line in lines if line.drop_reason == "evaluation_cut"} == cut
        assert {line.status for line in lines if line.episode not in cut} == {"finished"}


def test_a_run_is_resumed_as_its_journal_says_it_was(tmp_path: Path) -> None:
    Lives([]).run(tmp_path, killed=True)
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match="seed"):
        Lives([]).run(tmp_path, resume=True, seed=3)
    assert Lives([]).run(tmp_path, resume=True).summary["steps"] == 6


@pytest.mark.damages_journal
@pytest.mark.parametrize("what", ["checkpoints", "journal"])
def test_a_checkpoint_and_a_journal_of_two_runs_are_not_put_together(tmp_path: Path, what: str) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        Lives([5] * seed).run(tmp_path / name, killed=True)
    shutil.rmtree(tmp_path / "one/run" / what)
    shutil.copytree(tmp_path / "other/run" / what, tmp_path / "one/run" / what)
    before = {path: path.read_bytes() for path in (tmp_path / "one/run/checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match="journal"):
        Lives([]).run(tmp_path / "one", resume=True)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    "place",
    [
        "journal",
        "versions",
        "versions/guesser",
        "versions/.companions",
        "checkpoints",
        "checkpoints/step_000002-0",
        "steps",
        "steps/guesser",
        "policies",
        "best",
        "tensorboard",
    ],
)
def test_a_resume_neither_writes_nor_deletes_through_a_link(tmp_path: Path, place: str) -> None:
    with pytest.raises(TrainerLostError):
        Lives([4, 0, 0, 0, 0, 0]).run(tmp_path)
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    linked = run / place
    linked.parent.mkdir(exist_ok=True)
    linked.rename(foreign) if linked.exists() else foreign.mkdir()
    (foreign / "step_000001-0").mkdir(exist_ok=True)
    (foreign / "step_000001-0" / "file.txt").touch()
    (foreign / "link").symlink_to("file.txt")
    linked.symlink_to(foreign)

    def state() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for folder in (run, foreign) for path in folder.rglob("*")}

    before = state()
    with pytest.raises(JournalError, match=f"{place}: .*link"):
        Lives([]).run(tmp_path, resume=True)
    assert state() == before


def test_a_resume_says_which_versions_changed_since_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"Python": "3.11.7", "torch": "2.9.0", "peft": "0.18.0"}

    def stopped(life: dict[str, str], *, resume: bool) -> str:
        monkeypatch.setattr(recovery, "library_versions", lambda: life)
        lives = Lives([])
        lives.clock.sleeps = lambda: os.kill(os.getpid(), signal.SIGINT)
        lives.run(tmp_path, resume=resume, quiet=False)
        return capsys.readouterr().err

    assert "versions changed" not in stopped(versions, resume=False)
    assert "versions changed" not in stopped(versions, resume=True)
    now = {"Python": "3.11.7", "torch": "2.10.0", "vllm": "0.20"}
    told = "ersions changed since the run began: peft 0.18.0 → missing, torch 2.9.0 → 2.10.0, vllm missing → 0.20"
    assert told in stopped(now, resume=True)
    assert told in stopped(now, resume=True), "since the run began, and not since the resume before"
    reader = RunReader(tmp_path / "run")
    assert [start.libraries for start in reader.log.starts()] == [versions, versions, now, now]
    reader.close()


def test_each_step_has_its_metrics_once_though_some_are_taken_again(tmp_path: Path) -> None:
    lives = Lives([4])
    lives.run(tmp_path, checkpoint=2, held_out=2)
    assert len(lives.trainers) == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "evaluation/reward" in row] == [0, 6]


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        lives = Lives([])
        lives.clock.sleeps = lambda: os.kill(os.getpid(), signal.SIGHUP)
        assert not lives.run(tmp_path).interrupted
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("when", ["starting", "running"])
def test_a_signal_ends_a_run_and_all_it_has_started(tmp_path: Path, number: signal.Signals, when: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    lives = Lives([])
    if when == "running":
        lives.clock.sleeps = lambda: os.kill(os.getpid(), number)
        assert lives.run(tmp_path).interrupted
    else:
        lives.starting = lambda: os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            lives.run(tmp_path)
    signal.signal(signal.SIGHUP, before)
    assert [trainer.closed for trainer in lives.trainers] == [True]
    assert Lives([]).run(tmp_path, resume=True).summary["steps"] == 6 - len(lives.trainers[0].batches)


def test_a_second_signal_while_a_stopped_run_closes_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PressedAgain(Fragile):
        async def close(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await super().close()

    def trainer(plan: TrainerPlan, directory: Path) -> RecordingTrainer:
        return PressedAgain(["guesser"], dies_at_once=False, versions=directory / "versions")

    monkeypatch.setattr(stops, "SAME_PRESS_S", 0.0)
    child = os.fork()
    if child == 0:
        lives = Lives([])

        def press() -> None:
            lives.clock.sleeps = lambda: None
            os.kill(os.getpid(), signal.SIGTERM)

        lives.clock.sleeps = press
        monkeypatch.setattr(lives, "trainer", trainer)
        with contextlib.suppress(BaseException):
            lives.run(tmp_path)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "stopped"
    reader.close()


def test_a_second_ctrl_c_in_a_notebook_cancels_the_run_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "SAME_PRESS_S", -1.0)
    lives = Lives([])

    def press_twice() -> None:
        lives.clock.sleeps = lambda: None
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    async def notebook() -> None:
        own_loop.outside_event_loop(lives.run)(tmp_path)

    lives.clock.sleeps = press_twice
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())
    assert [trainer.closed for trainer in lives.trainers] == [True]
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "stopped"
    reader.close()
    assert not RunProcessRecord.read(tmp_path / "run").is_playing  # it does not count as a death
    Lives([]).run(tmp_path, resume=True)


def test_a_signal_in_the_last_moment_of_a_run_cancels_nothing_after_it(tmp_path: Path) -> None:
    async def main() -> str:
        with cancel_run_on_signal(tmp_path, 60.0, print):
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return "finished"

    assert asyncio.run(main()) == "finished"


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("DELETE FROM step_units WHERE step = 1", "step 1 of guesser"),
        ("DELETE FROM step_units WHERE step = 1 AND position = 3", "step 1 of guesser"),
        ("UPDATE trajectories SET reward = 1.0", "control.db.*`trajectories`"),
        ("", "turns-0.db"),
    ],
)
def test_a_hole_in_the_journal_stops_a_run_that_would_go_on_from_it(tmp_path: Path, damage: str, told: str) -> None:
    Lives([]).run(tmp_path, killed=True)
    journal = tmp_path / "run/journal"
    if damage:
        connection = sqlite3.connect(journal / "control.db")
        connection.execute(damage)
        connection.commit()
        connection.close()
    else:
        (journal / "turns-0.db").unlink()
    with pytest.raises(JournalError, match=told):
        Lives([]).run(tmp_path, resume=True)
    assert (journal / "turns-0.db").exists() == bool(damage)


def test_a_task_whose_data_are_too_deep_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, Any] = {}
    for _ in range(5_000):
        data = {"deeper": data}
    task = Task(id="deep", data={"digit": "5"})
    task.data["deeper"] = data  # type: ignore[index]  # a task refuses it only when it is made
    monkeypatch.setattr(f"{__name__}.TASKS", [task])
    with pytest.raises(InputError, match="'deep'"):
        Lives([]).run(tmp_path)


@pytest.mark.parametrize("act", ["pause", "drain"])
def test_a_pause_and_a_drain_outlive_a_lost_trainer(tmp_path: Path, act: str) -> None:
    orchestrators: list[Orchestrator] = []
    seen: list[str] = []
    lives = Lives([3])

    def ask(step: int) -> bool:
        if step == 3 and len(orchestrators) == 1:
            (orchestrators[0].pause if act == "pause" else orchestrators[0].drain)("me")
        return True

    def look() -> None:
        seen.extend([orchestrators[1].paused_by, orchestrators[1].drained_by])
        orchestrators[1].unpause()

    def assembled(orchestrator: Orchestrator) -> None:
        orchestrators.append(orchestrator)
        lives.trainers[-1].may_be_lost = ask  # type: ignore[attr-defined]
        if len(orchestrators) == 2:
            asyncio.get_running_loop().call_later(0.0, look)

    run = lives.run(tmp_path, assembled=assembled)
    assert seen == (["me", ""] if act == "pause" else ["", "me"])
    assert run.summary["ended_early"] == (None if act == "pause" else "drained by me")
