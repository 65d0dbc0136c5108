"""A long run's journal: what resuming, counting and listing it cost, and what pruning it gives back.

Writes the journal of a run of many committed and trained episodes with the store's own calls, seals a checkpoint, and
asks it in a process of its own, so that the figures are not those of the writer: how long until a resumed run knows
what is left (`ResumeCheckpoint.find`, `ResumeCheckpoint.resume_state`), what memory that takes, how long `run ledger`
and `run list` take. Then prunes it, and measures the journal's bytes per episode before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentrl.app.recovery import ResumeCheckpoint
from agentrl.config.run import RunConfig
from agentrl.core.files import LOCAL
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    Task,
    WeightsRef,
)
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import (
    BeginEntry,
    JournalEntry,
    RewardEntry,
    TurnEntry,
    TurnVersionSpan,
    encode_body,
    episode_digest,
)
from agentrl.journal.port import MetricRow, PruneRule, VersionPublication
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.buffer import Ledger
from agentrl.orchestrator.checkpoints import CheckpointWriter, resumable_versions
from tests.journal_cases import step_of
from tests.support.builders import make_episode_header, make_spec

GROUP = 8
STEP = 32
POLICY = "policy"
PARTITION = "turns-0.db"
TOKENS = 128
"""Sampled tokens of an episode."""
MANY = 1_000_000
PRUNED = 50_000
QUICK = 3_200
FIGURES = (
    "resume_cpu_s_1e6",
    "resume_mib_1e6",
    "list_cpu_s_1e6",
    "ledger_cpu_s_1e6",
    "journal_bytes_per_episode",
    "pruned_bytes_per_episode",
)


def config() -> RunConfig:
    """Of the run that is written."""
    sections = {"environment": {"id": "calculator"}, "model": {"path": "."}, "policies": {POLICY: {"step_size": STEP}}}
    return RunConfig.model_validate(sections)


def _spec(number: int) -> EpisodeSpec:
    return make_spec(
        f"e{number}",
        environment="calculator",
        task=Task(id=f"t{number // GROUP}", data={"question": "What is 2 + 3?", "answer": "5"}),
        seed=number,
        seats={"solver": POLICY},
        group_id=f"g{number // GROUP}",
        group_size=GROUP,
    )


def _entries(spec: EpisodeSpec, step: int) -> list[JournalEntry]:
    column = os.urandom(4 * TOKENS)
    begin = BeginEntry(
        *(spec.environment, "hash", spec.task.id, dict(spec.task.data), spec.seed, {"solver": POLICY}, "train"),
        *(spec.group_id, GROUP, None),
    )
    turn = TurnEntry(
        seat="solver",
        index=0,
        policy=POLICY,
        row=0,
        turn=0,
        context_ids=column[:64],
        token_ids=column,
        logprobs=column,
        finish_reason="stop",
        spans=(TurnVersionSpan(0, TOKENS, 0, step),),
        text="x" * TOKENS,
        messages=({"role": "user", "content": "What is 2 + 3?"},),
        temperature=1.0,
        seconds=0.1,
        started=1.0,
    )
    bodies = [("begin", begin), ("t#0", turn), ("r#0", RewardEntry("solver", 0, spec.seed % 7 / 7, None))]
    return [JournalEntry(spec.episode_id, 0, call, b"12345678", encode_body(body)) for call, body in bodies]


def _header(spec: EpisodeSpec, step: int) -> EpisodeHeader:
    return make_episode_header(
        spec,
        reward=spec.seed % 7 / 7,
        tokens=TOKENS,
        version=PolicyVersion(POLICY, 0, step),
        seconds=0.25,
        location=EpisodeDataLocation(PARTITION, 3),
    )


class _Saves:
    """A trainer of whom a checkpoint wants files."""

    async def save(self, directory: str) -> None:
        LOCAL.make_directory(Path(directory, POLICY))
        LOCAL.write(Path(directory, POLICY, "weights"), b"w")


async def write_run(run: Path, episodes: int) -> None:
    """A run of committed and trained episodes, and one group in flight; checkpoints at its newest step but ten, and at
    its newest."""
    journal = SqliteJournal(run / "journal", info={"name": run.name, "config": config().model_dump(mode="json")})
    log = journal.turn_log("0")
    checkpoints = CheckpointWriter(run / "checkpoints", keep=2)
    steps = episodes // STEP
    given = WeightsRef(version=PolicyVersion(POLICY, 0, 0), path="", kind="full", sha256="00")
    journal.record(VersionPublication(given, None))

    async def play(spec: EpisodeSpec, step: int) -> None:
        entries = _entries(spec, step)
        for entry in entries:
            log.append(entry)
        await journal.commit_episode(spec, _header(spec, step), episode_digest(entries), {"x": 1.0})

    for first in range(0, steps, 256):
        specs = [_spec(number) for number in range(first * STEP, min(first + 256, steps) * STEP)]
        journal.admit(*specs)
        await asyncio.gather(*(play(spec, spec.seed // STEP) for spec in specs))
        for step in range(first + 1, min(first + 256, steps) + 1):
            version = PolicyVersion(POLICY, 0, step)
            weights = WeightsRef(version=version, path="", kind="full", sha256="00")
            journal.record(VersionPublication(weights, PolicyVersion(POLICY, 0, step - 1)))
            trained = specs[(step - 1 - first) * STEP : (step - first) * STEP]
            journal.record(step_of(POLICY, 0, step, trained, partition=PARTITION))
            journal.record(MetricRow(POLICY, step, {"reward/mean": 0.5, "loss": 0.1}))
        await journal.flush()
    journal.admit(*(_spec(steps * STEP + number) for number in range(GROUP)))
    await journal.flush()
    for step in (steps - 10, steps):
        await checkpoints.write(_Saves(), {POLICY: PolicyVersion(POLICY, 0, step)}, Ledger())  # type: ignore[arg-type]
    await journal.close()


def ask(run: Path) -> dict[str, float]:
    """CPU seconds of resuming, counting and listing a run, and the most memory that resuming took, in MiB."""
    began = time.process_time()
    journal = SqliteJournal(run / "journal")
    recovery = ResumeCheckpoint.find(run / "checkpoints")
    resume_state = recovery.resume_state(config(), journal)
    resumed = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert len(resume_state.unfinished) == GROUP, len(resume_state.unfinished)
    asyncio.run(journal.close())
    reader = RunReader(run)
    began = time.process_time()
    line = reader.line()
    listed = time.process_time() - began
    began = time.process_time()
    ledger = reader.ledger()
    counted = time.process_time() - began
    assert ledger.holds, ledger
    assert line.episodes
    return {"resume_cpu_s": resumed, "resume_mib": memory, "list_cpu_s": listed, "ledger_cpu_s": counted}


def size(run: Path) -> int:
    """Bytes of the journal."""
    return sum(path.stat().st_size for path in (run / "journal").iterdir())


def _asked(run: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.durability_scale", "--ask", str(run)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def pruned_size(run: Path) -> int:
    """Bytes of the journal once all that may go is gone."""

    async def prune() -> None:
        journal = SqliteJournal(run / "journal")
        await journal.prune(PruneRule(keep=0, sealed=resumable_versions(run / "checkpoints")))
        await journal.close()

    asyncio.run(prune())
    return size(run)


def figures(quick: bool) -> dict[str, float | None]:
    """CPU seconds and MiB of questions to a run of a million episodes; bytes per episode, of a smaller one."""
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        few = QUICK if quick else PRUNED
        run = Path(scratch, "few")
        asyncio.run(write_run(run, few))
        found["journal_bytes_per_episode"] = size(run) / few
        found["pruned_bytes_per_episode"] = pruned_size(run) / few
        _asked(run)
        if not quick:
            run = Path(scratch, "many")
            asyncio.run(write_run(run, MANY))
            found |= {f"{name}_1e6": value for name, value in _asked(run).items()}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", type=Path, required=True, help="directory of a run that `write_run` wrote")
    print(json.dumps(ask(parser.parse_args().ask)))
