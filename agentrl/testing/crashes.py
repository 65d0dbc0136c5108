"""Every crash point of a small run: die there, go on in another process, and see whether anything was lost.

The run nothing happens to counts the operations: every transaction of the journal, every file operation of the
checkpoint and version protocols. Since a crash leaves nothing but the disk, that one run also yields, at each
operation, what each fate would have left; from there the run goes on, in a process of its own, to its end.
`crash_oracle` judges.

The fourth fate, `twice`, draws one of the others, and a second crash in the life that follows; over all operations each
operation of a recovery has its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.core.errors import CheckFailedError
from agentrl.core.ids import key64
from agentrl.testing import crash_oracle
from agentrl.testing.crash_scenario import EMPTY_TASKS, CrashScenario, Machine, babble
from agentrl.testing.sim_disk import SimulatedCrashError

if TYPE_CHECKING:
    from agentrl.core.records import Task
    from agentrl.engines.scripted import Script
    from agentrl.environment.base import Environment
    from agentrl.testing.sim_disk import Fate

FATES = ("kill", "lost", "kept", "twice")
_DISK_FATES: tuple[Fate, ...] = ("kill", "lost", "kept", "mixed")
_RECOVERY = 40
"""Operations of a life among which the second crash is placed."""
_MAX_LIVES = 8


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
class _Crash:
    """A moment at which the process died, and what it left."""

    operation: int
    name: str
    acknowledged: Sequence[tuple[str, int]]
    survivor: Machine


def crash_test(
    environment: type[Environment], *, tasks: Sequence[Task] | None = None, script: Script | None = None, share: int = 1
) -> CrashReport:
    """Crash a small training run of an environment at each of its operations, and see whether it goes on as promised.

    Args:
        environment: what is played: 12 episodes, three steps of a policy per seat.
        tasks: what it is played on; by default one task without data.
        script: what the policies say; it must depend on the request alone. By default a few letters.
        share: every `share`-th crash point only, for a quick look.

    Raises:
        CheckFailedError: the run fails by itself, without any crash.

    Example:
        >>> report = crash_test(MyEnvironment, tasks=[Task(id="t", data={})])  # doctest: +SKIP
        >>> assert not report.violations, report  # doctest: +SKIP
    """
    scenario = CrashScenario(environment, tasks=tasks or EMPTY_TASKS, script=script or babble)
    return crash_everywhere(scenario, share=share)


def crash_everywhere(
    scenario: CrashScenario, *, share: int = 1, seed: int = 0, fates: Sequence[str] = FATES, enough: int = 1 << 30
) -> CrashReport:
    """Crash a scenario at each operation.

    Args:
        scenario: the run.
        share: every `share`-th crash point only, the first one drawn from the seed.
        seed: of the schedules, of what is torn, and of second crashes.
        fates: of `FATES`.
        enough: stop at this many violations.

    Raises:
        CheckFailedError: the run fails by itself, without any crash.
    """
    report, undisturbed, crashes = _undisturbed(scenario, share, seed, fates)
    for crash, fate in crashes:
        report.crashes += 1
        salt = key64(seed, crash.operation, fate)
        for what in _after(scenario, crash, undisturbed, report, twice=fate == "twice", salt=salt):
            report.violations.append(Violation(operation=crash.operation, name=crash.name, fate=fate, what=what))
        if len(report.violations) >= enough:
            break
    return report


def _undisturbed(
    scenario: CrashScenario, share: int, seed: int, fates: Sequence[str]
) -> tuple[CrashReport, crash_oracle.Finished, list[tuple[_Crash, str]]]:
    """The run nothing happens to, and what each crash in it would have left."""
    machine = scenario.new_machine()
    report = CrashReport(operations=[])
    crashes: list[tuple[_Crash, str]] = []

    def look(number: int, name: str) -> None:
        report.operations.append(name)
        if number % share != seed % share:
            return
        for fate in fates:
            disk_fate = _DISK_FATES[key64(seed, number) % len(_DISK_FATES)] if fate == "twice" else fate
            crashes.append((_crashed(machine, number, name, disk_fate, seed), fate))  # type: ignore[arg-type]

    machine.disk.before = look
    ended = scenario.run(machine, seed=seed)
    machine.disk.before = None
    look(machine.disk.operations + 1, "the end")
    report.operations.pop()
    if ended is not None:
        raise CheckFailedError(f"the run fails without any crash: {type(ended).__name__}: {ended}") from ended
    undisturbed = crash_oracle.finished(machine, steps=scenario.config.steps, trainable=scenario.trainable)
    if undisturbed.violations:
        raise CheckFailedError(f"the run breaks its promises without any crash: {'; '.join(undisturbed.violations)}")
    return report, undisturbed, crashes


def _crashed(machine: Machine, number: int, name: str, fate: Fate, seed: int) -> _Crash:
    survivor = machine.after_crash(fate, seed=key64(seed, number, fate))
    return _Crash(operation=number, name=name, acknowledged=tuple(machine.journal.acknowledged), survivor=survivor)


def _after(
    scenario: CrashScenario,
    crash: _Crash,
    undisturbed: crash_oracle.Finished,
    report: CrashReport,
    *,
    twice: bool,
    salt: int,
) -> Iterator[str]:
    """What is wrong with the crash and with the lives that follow it."""
    yield from crash_oracle.lost(crash.acknowledged, crash.survivor)
    machine = crash.survivor
    again = 1 + crash.operation % _RECOVERY if twice else 0
    for life in range(_MAX_LIVES):
        recorded = crash_oracle.turns_on_disk(machine)
        following: list[_Crash] = []
        if again:
            fate = _DISK_FATES[salt % len(_DISK_FATES)]
            _crash_at(machine, again, fate, salt, following)
        ended = scenario.run(machine, seed=(salt + life) % (1 << 31))
        yield from crash_oracle.sampled_again(recorded, machine)
        yield from (f"resumed: a checkpoint is damaged: {reason}" for reason in machine.rejected)
        if ended is None:
            break
        if isinstance(ended, SimulatedCrashError) and following:
            report.crashes += 1
            again = 0
            yield from crash_oracle.lost(following[0].acknowledged, following[0].survivor)
            machine = following[0].survivor
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


def _crash_at(machine: Machine, operation: int, fate: Fate, salt: int, following: list[_Crash]) -> None:
    """Let the next life crash at an operation."""

    def look(number: int, name: str) -> None:
        if number == operation:
            following.append(_crashed(machine, number, name, fate, salt))
            machine.disk.crash()

    machine.disk.before = look
