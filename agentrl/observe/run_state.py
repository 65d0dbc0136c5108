"""The state of a run for displays, and the two files that carry it to other processes.

`RunState` is computed from the lines of `metrics.jsonl` (a repeated step, as after a resume, replaces the older one)
and contains the bounds in the configuration. `RunSnapshot` is a snapshot of the loop, written once a second to
`status.json`; the run does not depend on that file, and an unreadable one counts as absent.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from agentrl.core.errors import StorageError
from agentrl.core.files import file_size, open_regular, read_at_most, replace_file, resume_advice
from agentrl.core.records import ProcessStatus
from agentrl.core.setting_paths import value_at
from agentrl.observe.bottleneck import FailingCalls
from agentrl.observe.metrics import TASK_DIGEST

if TYPE_CHECKING:
    from io import FileIO

Values = Mapping[str, float]

LARGEST = 1e100
"""Largest magnitude of a value; larger ones cannot be summed or drawn and are left out like infinity."""
MAX_METRICS_BYTES = 64 << 20
"""Maximum number of bytes read from the end of `metrics.jsonl`."""
MAX_LINE_BYTES = 1 << 20
MAX_POLICIES = 256
"""Maximum number of policies in `metrics.jsonl`; a file with more was not written by agentrl."""
MAX_STATUS_BYTES = 1 << 20
"""Maximum number of bytes read from `status.json`, which may be from anyone."""
STATUS_FILE = "status.json"
TRAINING = "training"
EVALUATING = ("evaluating before training", "evaluating after training")
PAUSED, DRAINING = "paused", "draining"
"""Phases of a run that was asked to pause or to drain."""
SILENT_S = 15.0
"""Seconds after which a status is out of date; a live run writes one every second."""
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""Integer that a float can represent and a screen can show."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """Snapshot of a running run."""

    phase: str
    """Current activity, for people."""
    progress: tuple[Whole, Whole] | None = None
    """Numbers of ended and of all held-out episodes, during an evaluation."""
    waits: tuple[str, ...] = ()
    """Reasons why trainers and admission wait, for people."""
    in_flight: Whole = 0
    ready: Whole = 0
    trained: Whole = 0
    dropped: Mapping[str, Whole] = field(default_factory=dict)
    """Number of dropped episodes by reason."""
    processes: tuple[ProcessStatus, ...] = ()
    """Other processes of the run, with their nodes."""
    bottleneck: str = ""
    """The part of the run that the others wait for, and why, for people."""
    raised: str = ""
    """The commonest exception of a tool, with its place, since the run's process started; empty if none was raised."""
    failing: Mapping[str, FailingCalls] = field(default_factory=dict)
    """Programs, tools, effects and resources whose last call failed, keyed by name, since the run's process
    started."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Newest training episode with a nonzero metric, a stop reason or a drop reason, keyed by its name."""
    pace: str = ""
    """Estimated time of the first step, and how far it is, for people; empty once a step is taken."""
    wall: Seconds = 0.0
    """Time of writing in seconds since the epoch; set by the observer."""
    seconds: Seconds = 0.0
    """Seconds since the start of the run; set by the observer."""

    @property
    def is_evaluating(self) -> bool:
        """Whether the run does nothing but evaluate."""
        return self.phase in EVALUATING


def write_run_snapshot(directory: Path, status: RunSnapshot) -> None:
    """Write `status.json` atomically; disk errors are ignored."""
    try:
        replace_file(directory / STATUS_FILE, msgspec.json.encode(status))
    except OSError:
        return


def read_run_snapshot(directory: Path) -> RunSnapshot | None:
    """Read `status.json`; None if this version cannot read it or it does not exist."""
    try:
        with open_regular(directory / STATUS_FILE) as file:
            return msgspec.json.decode(read_at_most(file, MAX_STATUS_BYTES), type=RunSnapshot)
    except (OSError, ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDisplaySettings:
    """Part of the configuration that displays and alarms need."""

    name: str = "run"
    environment: str = ""
    model: str = ""
    steps: int = 0
    max_staleness: Mapping[str, int | None] = field(default_factory=dict)
    """Bound on staleness of each trainable policy; None if the run chooses it."""
    own_steps: Mapping[str, int] = field(default_factory=dict)
    """Number of steps of each policy that has its own setting."""
    phased: frozenset[str] = frozenset()
    """Policies that learn in phases."""
    opponent_pools: Mapping[str, str] = field(default_factory=dict)
    """Policies that are opponent pools, with the policy whose earlier versions they contain."""
    late_staleness: float = 0.0
    """Steps by which late members of groups may raise the mean staleness above its bound."""
    group_size: int = 0
    """Episodes of a group; 0 if unknown."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of replies and episodes, keyed by setting, such as `sampling.max_tokens`."""

    def steps_of(self, policy: str) -> int:
        """Return the number of steps a policy takes; 0 if unknown."""
        return self.own_steps.get(policy, self.steps)

    def limit_of(self, policy: str, setting: str) -> tuple[str, int]:
        """Return the setting that limits a policy, which may be its own, and the value; 0 if unknown."""
        policy_setting = f"policies.{policy}.{setting}"
        name = policy_setting if policy_setting in self.limits else setting
        return name, self.limits.get(name, 0)

    def limit_text(self, policy: str, setting: str) -> str:
        """Return the setting that limits a policy, with its value if it is known."""
        name, value = self.limit_of(policy, setting)
        return f"{name} = {value}" if value else name


@dataclass(slots=True, kw_only=True)
class PolicyMetricHistory:
    """Metrics of one policy."""

    name: str
    max_staleness: int | None = None
    steps: dict[int, Values] = field(default_factory=dict)
    """Metrics by optimizer step, in order."""
    evaluations: dict[int, Values] = field(default_factory=dict)
    """Held-out metrics by step, in order."""
    waited: int = 0
    """Number of steps of other policies since the policy's newest step."""
    waits: deque[int] = field(default_factory=lambda: deque(maxlen=5))
    """Numbers of steps of other policies between the policy's newest steps."""

    @property
    def step(self) -> int:
        """Newest step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def last(self) -> Values:
        """Metrics of the newest step; empty before the first."""
        return self.steps.get(self.step, {})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and measured values of a metric; `evaluation/…` is read from the evaluations."""
        source = self.evaluations if name.startswith("evaluation/") else self.steps
        points = [(step, values[name]) for step, values in sorted(source.items()) if name in values]
        return [step for step, _ in points], [value for _, value in points]

    def comparable_evaluations(self) -> list[tuple[int, Values]]:
        """Return the evaluations on the tasks of the newest one, by step; a resumed run may evaluate on others. Older
        versions of agentrl recorded only the number of tasks."""
        evaluations = [item for item in sorted(self.evaluations.items()) if "evaluation/reward" in item[1]]
        newest = evaluations[-1][1] if evaluations else {}
        return [
            (step, values)
            for step, values in evaluations
            if values.get("evaluation/tasks") == newest.get("evaluation/tasks")
            and values.get(TASK_DIGEST, newest.get(TASK_DIGEST)) == newest.get(TASK_DIGEST, values.get(TASK_DIGEST))
        ]

    def held_out(self) -> list[tuple[int, float]]:
        """Return step and held-out reward of the evaluations that are comparable with the newest one."""
        return [(step, values["evaluation/reward"]) for step, values in self.comparable_evaluations()]

    def seconds_left(self, steps: int) -> float | None:
        """Return the estimated seconds until step `steps` at the pace of the last ten steps; None before the first
        step."""
        paces = [values["step/seconds"] for _, values in sorted(self.steps.items())[-10:] if "step/seconds" in values]
        return sum(paces) / len(paces) * max(steps - self.step, 0) if paces else None


@dataclass(slots=True, kw_only=True)
class RunState:
    """State of a run for displays."""

    plan: RunDisplaySettings
    path: str = ""
    policies: dict[str, PolicyMetricHistory] = field(default_factory=dict)
    status: RunSnapshot | None = None
    standing: str = "running"
    """State of the process that leads the run: `running`, or how it ended; see `agentrl.journal.run_process`."""
    failure: str = ""
    """First line of the error that ended the run; empty if none did."""
    raised: dict[str, int] = field(default_factory=dict)
    """Step at which each alarm was last raised, by name, whether or not it still holds."""
    problem: str = ""
    """Description of parts of the run that could not be read, for people."""

    def __post_init__(self) -> None:
        for name, bound in self.plan.max_staleness.items():
            self.policies.setdefault(name, PolicyMetricHistory(name=name, max_staleness=bound))

    def seconds_left(self, policy: str) -> float | None:
        """Return the estimated seconds until a policy's last step; None before its first step, and if the run does not
        work toward the last one: it has ended, is paused or drains."""
        history, steps = self.policies.get(policy), self.plan.steps_of(policy)
        is_held = self.status is not None and self.status.phase in (PAUSED, DRAINING)
        if history is None or is_held or self.standing != "running" or history.step >= steps:
            return None
        return history.seconds_left(steps)

    def forget_after(self, policy: str, step: int) -> None:
        """Forget later steps and evaluations of a policy."""
        history = self.policies.get(policy)
        for table in () if history is None else (history.steps, history.evaluations):
            for later in [number for number in table if number > step]:
                del table[later]

    def record(self, policy: str, step: int, values: Values) -> None:
        """Record a line of metrics; values that are not finite or exceed `LARGEST` are left out."""
        usable = {name: value for name, value in values.items() if abs(value) <= LARGEST}
        state = self.policies.setdefault(policy, PolicyMetricHistory(name=policy))
        if any(name.startswith("evaluation/") for name in usable):
            state.evaluations[step] = usable
        else:
            for history in (state.steps, state.evaluations):
                # The step was taken again after a rollback, so later values are void.
                while history and next(reversed(history)) >= step:
                    history.popitem()
            state.steps[step] = usable
            for policy_state in self.policies.values():
                policy_state.waited += 1
            if len(state.steps) > 1:
                state.waits.append(state.waited - 1)
            state.waited = 0


def display_settings_from_config(config: Mapping[str, Any]) -> RunDisplaySettings:
    """Return the plan in a resolved configuration of any version; missing fields keep their defaults."""
    policies = _mapping(config.get("policies"))
    trainable = {name: _mapping(policy) for name, policy in policies.items()}
    environment = _mapping(config.get("environment")).get("id")
    policy_models = [_text(policy.get("model")) for policy in trainable.values() if policy.get("kind") != "remote"]
    policy_steps = {name: steps for name, value in _mapping(config.get("steps")).items() if (steps := _integer(value))}
    of_policy = ("sampling.max_tokens", "sampling.max_turns")
    limits = [*of_policy, "engine.max_context", *(f"policies.{name}.{path}" for name in policies for path in of_policy)]
    return RunDisplaySettings(
        name=_text(config.get("name"), "run"),
        environment=_text(environment) or " + ".join(map(str, _mapping(environment))),
        model=" + ".join(
            dict.fromkeys(filter(None, [_text(_mapping(config.get("model")).get("path")), *policy_models]))
        ),
        steps=_integer(config.get("steps")) or max(policy_steps.values(), default=0),
        own_steps=policy_steps,
        phased=_frozen_in_turn(config.get("freeze")),
        opponent_pools={
            name: _text(policy.get("of")) for name, policy in trainable.items() if policy.get("kind") == "past"
        },
        late_staleness=0.0 if _mapping(config.get("credit")).get("release", "group") == "group" else 0.5,
        group_size=max(_integer(value_at(config, "credit", "group_size")) or 0, 0),
        limits={path: value for path in limits if (value := _integer(value_at(config, *path.split("."))) or 0) > 0},
        max_staleness={
            name: None if policy.get("max_staleness") == "auto" else _integer(policy.get("max_staleness")) or 0
            for name, policy in trainable.items()
            if policy.get("kind", "trained") == "trained"
        },
    )


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest records of a `.jsonl` file of a run; incomplete and damaged lines are skipped.

    A path that is no regular file counts as absent.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(file_size(file) - MAX_METRICS_BYTES, 0))
            lines = io.BytesIO(read_at_most(file, MAX_METRICS_BYTES))
    except OSError:
        return
    for line in lines:
        if not line.startswith(b"{") or len(line) > MAX_LINE_BYTES:
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def read_metrics(path: Path, state: RunState) -> None:
    """Add the lines of `metrics.jsonl` to a state."""
    for row in read_jsonl(path):
        policy, step = row.pop("policy", None), _integer(row.pop("step", None))
        if not isinstance(policy, str) or step is None:
            continue
        if policy in state.policies or len(state.policies) < MAX_POLICIES:
            numbers = {
                name: value for name, value in row.items() if isinstance(value, float) or _integer(value) is not None
            }
            state.record(policy, step, numbers)


class MetricsFile:
    """The file `metrics.jsonl`, with one line per step: `{"policy", "step", name: value, …}`; NaN and infinity are
    null."""

    def __init__(self, path: str | Path) -> None:
        """Open the file to append.

        Raises:
            StorageError: the file cannot be opened.
        """
        self.path = Path(path)
        try:
            self._file = open_jsonl_to_append(self.path)
        except OSError as error:
            raise self._error(error) from error

    def record(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Append and flush a line.

        Raises:
            StorageError: the disk failed.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            append_jsonl_line(self._file, {"policy": policy, "step": step, **finite})
        except OSError as error:
            raise self._error(error) from error

    def forget_after(self, steps: Mapping[str, int]) -> None:
        """Remove the lines of later steps, which the run takes again.

        Args:
            steps: newest step that stays, by policy.

        Raises:
            StorageError: the disk failed.
        """
        kept, has_later = list[bytes](), False
        try:
            with open_regular(self.path) as file:
                for line in file:
                    is_later = _is_later(line, steps)
                    has_later |= is_later
                    kept += [] if is_later else [line]
            if has_later:
                replace_file(self.path, b"".join(kept))
                self._file.close()
                self._file = open_jsonl_to_append(self.path)
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _error(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path}: metrics cannot be written ({error.strerror}); {resume_advice(error)}")


def _is_later(line: bytes, steps: Mapping[str, int]) -> bool:
    """Whether a line of metrics is of a later step than the newest of its policy; a damaged line is not."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    policy, step = (row.get("policy"), _integer(row.get("step"))) if isinstance(row, dict) else (None, None)
    return isinstance(policy, str) and step is not None and policy in steps and step > steps[policy]


def open_jsonl_to_append(path: Path) -> FileIO:
    """Open a file of lines to append, unbuffered. A last line that a kill cut short is terminated first.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
    )
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        # Unbuffered: a line that a full disk refused must not be written later.
        return os.fdopen(descriptor, "ab", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def append_jsonl_line(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append a record as a line of JSON.

    Raises:
        OSError: the disk failed; a partial line is removed.
    """
    line = (json.dumps(record) + "\n").encode()
    num_written = file.write(line)
    if num_written != len(line):  # a full disk accepts the beginning of a line, and fails only at the next write
        file.truncate(file.seek(0, os.SEEK_END) - (num_written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any, default: str = "") -> str:
    return value if isinstance(value, str) else default


def _integer(value: Any) -> int | None:
    """Return the value if it is an integer that a float can represent, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def _frozen_in_turn(phases: object) -> frozenset[str]:
    """Return the policies named by `freeze`."""
    phase_policies: set[str] = set()
    for phase in phases if isinstance(phases, list | tuple) else ():
        policies = phase[0] if isinstance(phase, list | tuple) and phase else ()
        names = policies if isinstance(policies, list | tuple) else [policies]
        phase_policies.update(name for name in names if isinstance(name, str))
    return frozenset(phase_policies)
