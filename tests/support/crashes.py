"""Every crash point of a small run: die there, go on in another process, and see whether anything was lost.

The run nothing happens to counts the operations: every transaction of the journal, every file operation of the
checkpoint and version protocols. Since a crash leaves nothing but the disk, that one run also yields, at each
operation, what each fate would have left; from there the run goes on, in a process of its own, to its end.
`crash_oracle` judges.

The fourth fate, `twice`, is a second crash in the life that follows: after a kill or another fate, at an operation and
with a fate drawn for each crash point, so that over all of them each operation of a recovery has its turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentrl.core.errors import CheckFailedError
from agentrl.core.ids import random_stream, stable_hash64
from agentrl.environment.environment import Environment
from agentrl.environment.registry import resolve
from agentrl.testing.execution import random_policy
from tests.support import crash_oracle
from tests.support.crash_scenario import EMPTY_TASKS, CrashScenario, Machine
from tests.support.sim_disk import SimulatedCrashError

if TYPE_CHECKING:
    from agentrl.core.records import Task
    from agentrl.engines.scripted import Script
    from tests.support.sim_disk import Fate

DISK_FATES: tuple[Fate, ...] = ("kill", "lost", "kept", "mixed")
RECOVERY = 40
"""Operations of a life among which a second crash is placed; its recovery takes about thirty."""
_MAX_LIVES = 8
_TASKS = 3
"""One for each step of the run."""
_ROOM = {"sampling": {"max_tokens": 256}, "engine": {"max_context": 1 << 16}}
"""A token is a byte here: a tool call must fit a turn, and what tools and games tell a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that a crash broke."""

    operation: int
    name: str
    """What the operation would have done."""
    fate: str
    what: str
    """The rule, a colon, and what was seen."""

    def __str__(self) -> str:
        return f"crash before operation {self.operation} ({self.name}), {self.fate}: {self.what}"


@dataclass(slots=True, kw_only=True)
class CrashReport:
    """What came of crashing at every operation that was asked for."""

    operations: list[str]
    """Names of the operations of the run nothing happens to, in order."""
    crashes: int = 0
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        shown = [f"  {violation}" for violation in self.violations[:5]]
        counts = f"{len(self.operations)} crash points, {self.crashes} crashes, {len(self.violations)} violations"
        return "\n".join([counts, *shown])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """An operation, and what a crash instead of it finds."""

    operation: int
    name: str
    acknowledged: Sequence[tuple[str, int]]
    survivors: Mapping[Fate, Machine]


class _Second(NamedTuple):
    """A crash in the life after a crash."""

    operation: int
    fate: Fate


def crash_test(
    environment: str | type,
    *,
    tasks: Sequence[Task] | None = None,
    script: Script | None = None,
    share: int = 1,
) -> CrashReport:
    """Crash a small training run of an environment at each of its operations, and see whether it goes on as promised.

    Args:
        environment: what is played, as for `check_environment`: 12 episodes, three steps of a policy per seat.
        tasks: what it is played on; default: the first training tasks, or one without data where there are none.
        script: what the policies say; it must depend on the request alone. By default they call tools with arguments
            of the right types, or say something short.
        share: every `share`-th crash point only, for a quick look.

    Raises:
        CheckFailedError: the run fails by itself, without any crash.

    Example:
        >>> report = crash_test(MyEnvironment, share=20)  # doctest: +SKIP
        >>> assert not report.violations, report  # doctest: +SKIP
    """
    found = resolve(environment)
    scenario = CrashScenario(
        found, tasks=tasks or _own_tasks(found), script=script or random_policy(found), changes=_ROOM
    )
    return crash_everywhere(scenario, share=share)


def _own_tasks(environment: type[Environment]) -> Sequence[Task]:
    """The first training tasks of an environment; one without data, where it has no source."""
    if environment.tasks.__func__ is Environment.tasks.__func__:  # type: ignore[attr-defined]
        return EMPTY_TASKS
    source = environment.tasks("train", seed=0)
    return [source[index] for index in range(min(_TASKS, len(source)))]


def crash_everywhere(
    scenario: CrashScenario,
    *,
    share: int = 1,
    seed: int = 0,
    where: str = "",
    every_recovery: bool = False,
    enough: int = 1 << 30,
) -> CrashReport:
    """Crash a scenario at each operation.

    Args:
        scenario: the run.
        share: every `share`-th crash point only, the first one drawn from the seed; with `where`, every `share`-th of
            the operations of that name, from the first on.
        seed: of the schedules, of what is torn, and of second crashes.
        where: only operations whose name contains this.
        every_recovery: kill, and then crash the recovery at each of its operations, with each fate.
        enough: stop at this many violations.

    Raises:
        CheckFailedError: the run fails by itself, without any crash.
    """

    named = itertools.count()

    def wanted(number: int, name: str) -> bool:
        return where in name and (next(named) % share == 0 if where else number % share == seed % share)

    report, undisturbed, points = _undisturbed(scenario, wanted, seed)
    for point in points:
        for first, second in _every_recovery() if every_recovery else _fates(point, seed):
            salt = stable_hash64(seed, point.operation, first, second)
            for what in _after(scenario, point, first, second, undisturbed, report, salt):
                fate = first if second is None else f"{first}, then {second.fate} at operation {second.operation}"
                found = Violation(operation=point.operation, name=point.name, fate=fate, what=what)
                report.violations.append(found)
        if len(report.violations) >= enough:
            break
    return report


def _undisturbed(
    scenario: CrashScenario, wanted: Callable[[int, str], bool], seed: int
) -> tuple[CrashReport, crash_oracle.Finished, list[_Point]]:
    """The run nothing happens to, and what a crash at each operation finds."""
    machine = scenario.new_machine()
    report = CrashReport(operations=[])
    points: list[_Point] = []

    def look(number: int, name: str) -> None:
        report.operations.append(name)
        if wanted(number, name):
            points.append(_point(machine, number, name, seed))

    machine.disk.before = look
    ended = scenario.run(machine, seed=seed)
    machine.disk.before = None
    if ended is not None:
        raise CheckFailedError(f"the run fails without any crash: {type(ended).__name__}: {ended}") from ended
    if wanted(machine.disk.operations + 1, "the end"):
        points.append(_point(machine, machine.disk.operations + 1, "the end", seed))
    undisturbed = crash_oracle.finished(machine, steps=scenario.config.steps, trainable=scenario.trainable)
    if undisturbed.violations:
        raise CheckFailedError(f"the run breaks its promises without any crash: {'; '.join(undisturbed.violations)}")
    return report, undisturbed, points


def _point(machine: Machine, number: int, name: str, seed: int) -> _Point:
    return _Point(
        operation=number,
        name=name,
        acknowledged=tuple(machine.journal.acknowledged),
        survivors={fate: machine.after_crash(fate, seed=stable_hash64(seed, number, fate)) for fate in DISK_FATES},
    )


def _fates(point: _Point, seed: int) -> Iterator[tuple[Fate, _Second | None]]:
    """The four fates of a crash point."""
    for fate in ("kill", "lost", "kept"):
        yield fate, None
    draw = random_stream("second crash", seed, point.operation).randrange
    first: Fate = "kill" if draw(2) else DISK_FATES[draw(len(DISK_FATES))]
    operation = 1 + point.operation % RECOVERY
    yield first, _Second(operation=operation, fate=DISK_FATES[draw(len(DISK_FATES))])


def _every_recovery() -> Iterator[tuple[Fate, _Second]]:
    for operation in range(1, RECOVERY + 1):
        for fate in DISK_FATES:
            yield "kill", _Second(operation=operation, fate=fate)


def _after(
    scenario: CrashScenario,
    point: _Point,
    first: Fate,
    second: _Second | None,
    undisturbed: crash_oracle.Finished,
    report: CrashReport,
    salt: int,
) -> Iterator[str]:
    """What is wrong with a crash and with the lives that follow it."""
    report.crashes += 1
    machine = point.survivors[first].after_crash("kill")  # a copy: this point is crashed at again
    machine.life = 1
    yield from crash_oracle.lost(point.acknowledged, machine)
    yield from crash_oracle.needed(machine)
    for life in range(_MAX_LIVES):
        recorded = crash_oracle.turns_on_disk(machine)
        if second is not None:
            _crash_at(machine, second.operation)
        ended = scenario.run(machine, seed=(salt + life) % (1 << 31))
        yield from crash_oracle.sampled_again(recorded, machine)
        yield from crash_oracle.served_unknown(machine)
        yield from (f"resumed: a checkpoint is damaged: {reason}" for reason in machine.rejected)
        if ended is None:
            break
        if isinstance(ended, SimulatedCrashError) and second is not None:
            report.crashes += 1
            dead, machine = machine, machine.after_crash(second.fate, seed=salt)
            second = None
            yield from crash_oracle.lost(dead.journal.acknowledged, machine)
        elif isinstance(ended, scenario.expected):
            machine = machine.after_crash("kill")
        else:
            yield f"resumed: the run cannot go on: {type(ended).__name__}: {ended}"
            return
    else:
        yield f"resumed: the run has not ended after {_MAX_LIVES} lives"
        return
    found = crash_oracle.finished(machine, steps=scenario.config.steps, trainable=scenario.trainable)
    yield from found.violations
    yield from crash_oracle.compared(found, undisturbed)


def _crash_at(machine: Machine, operation: int) -> None:
    """Let the next life crash at an operation."""

    def look(number: int, name: str) -> None:
        if number == operation:
            machine.disk.crash()

    machine.disk.before = look
