"""The law of the log: at any quiet moment of a run, the state that a resume rebuilds equals the state that lives.

A scenario plays a random world (`worlds.py`) in up to three lives, each resumed from one of the newest checkpoints. At
random quiet moments, when nothing is under way between the journal and a part, it builds the loop of another process
from a copy of the journal, by the code that resumes runs, and compares the states of all parts (`state_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.app import assemble
from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.plan import resolve
from agentrl.app.policies import pinned_policy_step_lags
from agentrl.app.recovery import ResumeCheckpoint
from agentrl.core.clock import LoopClock
from agentrl.core.errors import CheckFailedError
from agentrl.core.records import GroupScores, Lines, PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.orchestrator import loop
from agentrl.orchestrator.checkpoints import Manifest
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.orchestrator.loop import TRAINING, Orchestrator
from agentrl.orchestrator.versions import NOT_MEASURED, ServedVersions
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.testing.virtual_time import simulate
from tests.laws import worlds
from tests.sim.small_run import Seen
from tests.support.recording_trainer import RecordingTrainer

SEEDS = range(1000, 1000 + int(os.environ.get("AGENTRL_LAW_SEEDS", "8")))
LIVES = 3


@dataclass(slots=True)
class Checkpoints:
    """Keeps manifests in memory."""

    manifests: list[Manifest] = field(default_factory=list)

    async def write(self, trainer: Any, versions: Any, roles: Any, measured: Any, opponents: Any) -> Path:
        await asyncio.sleep(0)
        self.manifests.append(_manifest(versions, roles, measured, opponents))
        return Path("memory")

    def resumable(self) -> list[Manifest]:
        return self.manifests[::-1]

    sealed = resumable


def _manifest(versions: Mapping[str, PolicyVersion], roles: Any, measured: Any, opponents: Any) -> Manifest:
    return Manifest(
        directory=Path("memory"),
        versions=dict(versions),
        role_means={} if roles is None else {role: list(means) for role, means in roles.means.items()},
        measured=measured,
        opponents={name: tuple(drawn) for name, drawn in (opponents or {}).items()},
    )


class _IdleWorker:
    """Plays nothing, since a rebuilt loop is only looked at."""

    last_failure = ""

    def submit(self, *arguments: Any, **options: Any) -> None: ...

    def park(self, episode_id: str) -> bool:
        return False

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        return ()

    def activity(self) -> dict[str, float]:
        return {}

    async def cancel(self) -> None: ...


async def build(journal: MemoryJournal, manifest: Manifest | None, checkpoints: Checkpoints | None) -> Orchestrator:
    """Build a process's loop from a journal and a checkpoint; without `checkpoints` it plays nothing."""
    config = worlds.Played.world.config
    plan, recovery = resolve(config, worlds.Played.world.environment), ResumeCheckpoint(manifest=manifest, rejected=())
    versions = recovery.first_versions(plan, journal, Path("/nonexistent"))
    times = {"step_seconds": 0.7, "publish_seconds": 0.1} if checkpoints else {}
    steps = {name: versions[name].step for name in config.trained}
    trainer = RecordingTrainer(list(config.trained), clock=LoopClock(), steps=steps, **times)
    initial = {name: PolicyVersion(name, 0, 0) for name in config.policies}
    engine = ScriptedEngine(worlds.say, versions=initial, seconds_per_token=0.05)
    served = ServedVersions(engine, batches=pinned_policy_step_lags(config.trained, deterministic=False))
    past = recovery.past_run(plan, journal)
    trained = {name: versions[name] for name in config.trained}
    opponents = await recovery.publish_first_versions(plan, trained, trainer, served, journal, past)
    await journal.flush()
    with pytest.MonkeyPatch.context() as patch:
        if checkpoints is None:
            patch.setattr(assemble, "make_local_worker", lambda *arguments: _IdleWorker())
        return assemble_orchestrator(
            plan,
            RunParts(
                served=served,
                trainer=trainer,
                chat_format=PlainChatFormat(),
                store=journal,
                observer=Seen(),
                clock=LoopClock(),
                tasks=list(worlds.TASKS),
                held_out=[HeldOutSplit("held_out", worlds.HELD_OUT if config.evaluation.tasks else [])],
                opponents=opponents,
                versions=versions,
                past=past,
                checkpoints=checkpoints,  # type: ignore[arg-type]  # in memory
                role_means=recovery.role_means,
                running_best=manifest.measured if manifest else NOT_MEASURED,
            ),
        )


def state_of(run: Orchestrator) -> dict[str, Any]:
    """Return what an admission, a credit, a step, a release or a metric of the loop reads, by name."""
    buffer, dispatcher, policies, lines = run.buffer, run.dispatcher, sorted(run.buffer.trainable), run.board.lines
    groups = buffer._groups
    committed = {name: [header for header in group.headers if header.committed] for name, group in groups.items()}
    in_flight = [spec for spec in map(dispatcher.in_flight.get, dispatcher.in_flight) if spec.purpose == "train"]
    ready = {policy: list(buffer._ready[policy]) for policy in policies}
    state: dict[str, Any] = {
        "numbers": dispatcher.specs.numbers.next_training,
        "attempts in flight": {spec.episode_id: spec.attempt for spec in in_flight},
        "pins in flight": {spec.episode_id: sorted(map(lines.weights, spec.pins.values())) for spec in in_flight},
        "ready units": {
            policy: sorted(map(str, (_rounded(each.unit) for each in ready[policy]))) for policy in policies
        },
        "outstanding": {policy: (buffer.outstanding(policy), buffer.late(policy)) for policy in policies},
        "open groups": {name: (group.size, group.main and group.main.group_id) for name, group in groups.items()},
        "running members": {name: group.running for name, group in groups.items()},
        "ended members": {
            name: [(header.episode_id, header.attempt, _rounded(header.reward)) for header in headers]
            for name, headers in committed.items()
        },
        "released members": {
            name: sorted(each.episode_id for each in group.headers[: group.released] if each.committed)
            for name, group in groups.items()
        },
        "earlier means of open groups": {name: _rounded(group.earlier) for name, group in groups.items()},
        "frozen members": {name: _rounded(group.frozen) for name, group in groups.items()},
        "names of metrics": {name: sorted(names) for name, names in buffer._metric_names.items()},
        "units without signal": {policy: buffer.without_signal[policy] for policy in policies},
        "failures in a row": {task: sum(ends) for task, ends in run.scheduler._starvation._failed.items() if any(ends)},
        "remembered proposals": list(dispatcher.memory._proposals),
        "tree leases": {key: sorted(members) for key, members in dispatcher.leases._members.items()},
        "may step": {policy: run.scheduler.may_step(policy) for policy in policies},
        "frozen policies": sorted(run.scheduler.phases.frozen()),
        "bounds": {policy: controller.bound for policy, controller in run.staleness.items()},
        "best": _best_of(run, lines),
        "role means": None if run.roles is None else _rounded(run.roles.means),
    }
    episodes = {each.unit.episode_id for units in ready.values() for each in units}
    state["counts of ready episodes"] = {
        name: (counts.turns, _rounded(counts.metrics))
        for name in sorted(episodes & buffer._metrics.keys())
        for counts in buffer._metrics[name].values()
    }
    results = getattr(run.curriculum, "results", [])
    state["results in order"] = [(each.group, each.task.id, _rounded(each.rewards)) for each in results]
    state["tallies of opponents"] = {
        name: {lines.weights(version): _rounded(tally) for version, tally in pool.tallies.items()}
        for name, pool in run.opponents.pools.items()
    }
    if (history := getattr(buffer.release, "history", None)) is not None:
        state["history of rewards"] = _rounded((history._by_role, history._by_task))
    if (scoring := dispatcher.group_scoring) is not None:
        known = {group: scores for group, scores in scoring.known.items() if scores}
        state["known scores"] = {group: sorted(each.scorer for each in scores) for group, scores in known.items()}
    return state


def _best_of(run: Orchestrator, lines: Lines) -> Any:
    measured = run.best.measured
    versions = {policy: lines.weights(version) for policy, version in measured.versions.items()}
    return _rounded(measured.best), _rounded(measured.newest), versions


def _rounded(value: Any) -> Any:
    """Return plain data with rounded numbers: sums in another order differ in the last bits."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if names := getattr(type(value), "__dataclass_fields__", None):
        return {name: _rounded(getattr(value, name)) for name in names}
    return value


def _is_quiet(run: Orchestrator, journal: MemoryJournal) -> bool:
    """Whether nothing is under way between the journal and a part, so that both know the same."""
    is_busy = run._phase != TRAINING or run._open_steps or run.scheduler.stepping or run._trainer_free.locked()
    if is_busy or run._finished():
        return False
    scoring = run.dispatcher.group_scoring
    for record in journal.records[-400:]:
        if isinstance(record, EpisodeEnd) and run.dispatcher.in_flight.get_attempt(
            record.spec.episode_id, record.spec.attempt
        ):
            return False
        if isinstance(record, GroupScores) and scoring is not None and record.group_id in scoring._held:
            return False
    return True


def _all_on_disk(journal: MemoryJournal) -> MemoryJournal:
    """Return what another process would open if everything were on disk by now."""
    logs = list(journal.turn_logs.values())
    before = journal._on_disk, [(log.on_disk, log.partials_on_disk) for log in logs]
    journal._on_disk = len(journal.records)
    for log in logs:
        log.on_disk, log.partials_on_disk = len(log.entries), len(log.partials)
    copy = journal.after_crash()
    journal._on_disk = before[0]
    for log, (entries, partials) in zip(logs, before[1], strict=True):
        log.on_disk, log.partials_on_disk = entries, partials
    return copy


@dataclass(slots=True)
class Findings:
    """What a scenario compared, and where the states differed."""

    change: Callable[[Orchestrator], None]
    """Alters each rebuilt loop."""
    moments: int = 0
    differences: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    async def compare(self, run: Orchestrator, journal: MemoryJournal) -> None:
        copy = _all_on_disk(journal)
        manifest = _manifest(run._versions(), run.roles, run.best.measured, run.opponents.drawn_from())
        lived = state_of(run)
        rebuilt_run = await build(copy, manifest, checkpoints=None)
        rebuilt_run.scheduler.is_training = True
        self.change(rebuilt_run)
        rebuilt = state_of(rebuilt_run)
        if rebuilt_run.dispatcher.group_scoring is not None:
            rebuilt_run.dispatcher.group_scoring.close()
        self.moments += 1
        for name in lived.keys() | rebuilt.keys():
            if lived.get(name) != rebuilt.get(name):
                self.differences[name].append(f"lived: {lived.get(name)}\nrebuilt: {rebuilt.get(name)}")


async def play(seed: int, findings: Findings) -> None:
    """Play a seed's world, and compare at random quiet moments."""
    rng = random.Random(seed)
    journal, manifest, checkpoints = MemoryJournal(), None, Checkpoints()
    for life in range(LIVES):
        run = await build(journal, manifest, checkpoints)
        ended = asyncio.Event()

        async def look(run: Orchestrator, journal: MemoryJournal, ended: asyncio.Event) -> None:
            while not ended.is_set():
                await asyncio.sleep(rng.uniform(0.4, 3.0))
                while not _is_quiet(run, journal) and not ended.is_set():
                    await asyncio.sleep(0.02)
                if not ended.is_set():
                    await findings.compare(run, journal)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look(run, journal, ended))
            stop = asyncio.get_running_loop().call_later(rng.uniform(3.0, 14.0) if life < LIVES - 1 else 20.0, run.stop)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "DRAIN_S", 0.0)
                with contextlib.suppress(CheckFailedError):  # nothing was left to learn
                    await run.run()
            ended.set()
            stop.cancel()
        if not run.outcome.interrupted:
            return
        journal = _all_on_disk(journal)
        surviving = [each for each in checkpoints.manifests if all(map(run.board.survives, each.versions.values()))]
        checkpoints.manifests = surviving[: max(len(surviving) - rng.choice([0, 0, 1, 2]), 1)]
        manifest = checkpoints.manifests[-1] if surviving else None


def find_differences(seed: int, change: Callable[[Orchestrator], None] = lambda run: None) -> Findings:
    """Return what the comparisons of a seed's world found."""
    worlds.Played.world, findings = worlds.draw(seed), Findings(change)
    simulate(lambda: play(seed, findings), seed=seed, max_steps=1 << 40)
    return findings


@pytest.mark.parametrize("seed", SEEDS)
def test_a_resume_rebuilds_the_state_that_lived(seed: int) -> None:
    found = find_differences(seed).differences
    assert not found, "\n".join(f"{name}\n{texts[0]}" for name, texts in found.items())


def _forget_ready_units(run: Orchestrator) -> None:
    for units in run.buffer._ready.values():
        units.clear()


def test_a_planted_difference_is_found() -> None:
    assert "ready units" in find_differences(SEEDS[0], _forget_ready_units).differences


def _end_groups(run: Orchestrator) -> None:
    for group in run.buffer._groups.values():
        group.headers.clear()


def _forget_earlier_means(run: Orchestrator) -> None:
    for group in run.buffer._groups.values():
        group.earlier = ()


def _forget_tallies(run: Orchestrator) -> None:
    for pool in run.opponents.pools.values():
        pool.tallies.clear()


def _forget_history(run: Orchestrator) -> None:
    if (history := getattr(run.buffer.release, "history", None)) is not None:
        history._by_role.clear()


PLANTED: Mapping[str, Callable[[Orchestrator], None]] = {
    "ready units": _forget_ready_units,
    "ended members": _end_groups,
    "earlier means of open groups": _forget_earlier_means,
    "results in order": lambda run: run.curriculum.results.reverse(),
    "tallies of opponents": _forget_tallies,
    "history of rewards": _forget_history,
    "units without signal": lambda run: run.buffer.without_signal.clear(),
    "failures in a row": lambda run: run.scheduler._starvation._failed.clear(),
    "remembered proposals": lambda run: run.dispatcher.memory._proposals.clear(),
    "names of metrics": lambda run: run.buffer._metric_names.clear(),
}
"""For each part of the state, an alteration that a comparison must find."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PLANTED)
def test_a_difference_in_each_part_is_found(part: str) -> None:
    seeds = range(1000, 1080)
    assert any(part in find_differences(seed, PLANTED[part]).differences for seed in seeds)
