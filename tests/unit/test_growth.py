"""Commands that read a whole run: four times the episodes take four times the work, counted in calls, additions and
steps of SQLite's machine."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.inspection.export.episodes import write_parquet_table
from agentrl.inspection.export.exporting import ExportSelection
from agentrl.inspection.reader import RunReader
from agentrl.journal.port import PruneRule
from agentrl.journal.pruning import PruningSelection, _batches
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support import sample_run

SIZES = (64, 256)


class Sums(agentrl.Environment):
    """Two turns, and a reward that varies."""

    seats: ClassVar[tuple[str, ...]] = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        for number in range(2):
            turn = await agent.act(agentrl.user(f"{ctx.task.id} plus {number} ="))
        agent.reward(float(len(turn.text) % 2))

    @classmethod
    def tasks(cls, split: agentrl.Split, *, seed: int = 0) -> Sequence[agentrl.Task]:
        return [agentrl.Task(id=f"{split}-{number}", data={}) for number in range(16)]


def reply(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
    return [*str(request.seed % 100).encode(), STOP_TOKEN]


def write(directory: Path, episodes: int) -> Path:
    async def engine(plan: Any, versions: Mapping[str, PolicyVersion], tell: object, log: Path) -> ScriptedEngine:
        return ScriptedEngine(reply, versions=versions, seeded_logprobs=True, max_context=1024)

    values: dict[str, Any] = {
        "name": str(episodes),
        "directory": str(directory),
        "steps": episodes // 16,
        "environment": {"id": name_of(Sums)},
        "model": {"path": sample_run.MODEL},
        "policies": {"solver": {"step_size": 16, "max_staleness": 1}},
        "engine": {"max_context": 1024},
        "sampling": {"max_tokens": 96, "max_turns": 4},
        "credit": {"group_size": 8},
        "checkpoint": {"every": 5, "versions": 0},
        "max_in_flight": 32,
    }
    factories = RunFactories(
        engine=engine,
        trainer=lambda plan, place: sample_run.SampleRunTrainer(plan, place, loses=False),
        chat_format=lambda model: PlainChatFormat(),
        clock=SystemClock(),
        assembled=lambda orchestrator: None,
    )
    return asyncio.run(run_training(RunConfig(**values), Sums, quiet=True, factories=factories)).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of which one has four times the episodes of the other."""
    return [write(tmp_path_factory.mktemp("runs"), size) for size in SIZES]


@contextmanager
def counting(work: Counter[str], *, under: CodeType | None = None) -> Iterator[None]:
    """Count the calls of Python and C functions; `under`: only those that one function makes itself."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back if event == "call" else frame
        if event in ("call", "c_call") and (under is None or (caller is not None and caller.f_code is under)):
            work["calls"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def ledger(run: Path, work: Counter[str]) -> None:
    with closing(RunReader(run)) as reader:
        reader.log.connection.set_progress_handler(lambda: work.update(steps=1), 100)
        with counting(work):
            assert reader.ledger().holds
        reader.log.connection.set_progress_handler(None, 0)


def parquet(run: Path, work: Counter[str]) -> None:
    pytest.importorskip("pyarrow")
    with closing(RunReader(run)) as reader:
        selection = ExportSelection(reader, reader.keys(), [], lambda *_: None, [])
        with reader.remembering(), counting(work, under=write_parquet_table.__code__):
            write_parquet_table(selection, run.parent / "rows.parquet")


class Size(int):
    """A size that counts its additions."""

    additions: ClassVar[int] = 0

    def __add__(self, other: int) -> Size:
        Size.additions += 1
        return Size(int(self) + int(other))

    __radd__ = __add__


def prune(run: Path, work: Counter[str]) -> None:
    """Select what a pruning removes, as `prune --dry-run` does."""
    with closing(RunReader(run)) as reader:
        (partition,) = (run / "journal").glob("turns-*.db")
        rule = PruneRule(keep=0, sealed=[{"solver": version} for version in newest(reader)])
        with closing(sqlite3.connect(partition)) as connection:
            connection.row_factory = lambda _, row: (*row[:-1], Size(row[-1])) if len(row) == 3 else row
            reader.log.connection.set_progress_handler(lambda: work.update(steps=1), 100)
            Size.additions = 0
            with counting(work):
                batches = list(_batches(connection, PruningSelection(reader.log, rule, frozenset())))
            reader.log.connection.set_progress_handler(None, 0)
            work["additions"] = Size.additions
            assert sum(map(len, batches)) >= int(run.name) // 2


def newest(reader: RunReader) -> list[PolicyVersion]:
    rows = reader.log.rows("SELECT policy, lineage, max(step) FROM versions GROUP BY policy, lineage")
    return [PolicyVersion(*row) for row in rows]


@pytest.mark.parametrize("command", [ledger, parquet, prune])
def test_a_command_s_work_grows_no_faster_than_the_run(
    runs: list[Path], command: Callable[[Path, Counter[str]], None]
) -> None:
    small, large = Counter[str](), Counter[str]()
    for run, work in zip(runs, (small, large), strict=True):
        command(run, work)
    assert small["calls"] > SIZES[0]
    for kind, count in large.items():
        assert count <= 4.4 * small[kind] + 10, (kind, small, large)
