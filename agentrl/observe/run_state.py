"""All that is shown of a run, folded from its metrics: the same for the live view, another process and the report.

Owns the fold of metric lines (a repeated step replaces the older one, as after a resume) and what the configuration
says about bounds. Knows neither terminals nor HTML.
"""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.files import open_regular, read_at_most, size_of
from agentrl.observe.status import Status

Values = Mapping[str, float]

LARGEST = 1e100
"""What is larger cannot be added up or drawn, and means as little as infinity."""
RECENT_STEPS = 5
"""Of a policy: how long it waited for each is remembered."""
MAX_METRICS_BYTES = 64 << 20
"""Of a longer `metrics.jsonl` the newest so many bytes are read."""
MAX_LINE_BYTES = 1 << 20
MAX_POLICIES = 256
"""A file that names more is not one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the configuration says that is needed to read the metrics."""

    name: str = "run"
    environment: str = ""
    model: str = ""
    steps: int = 0
    max_staleness: Mapping[str, int] = field(default_factory=dict)
    """Of each policy that steps; its keys are the trainable policies."""
    own_steps: Mapping[str, int] = field(default_factory=dict)
    """Of policies that take other than `steps`."""
    phased: frozenset[str] = frozenset()
    """Policies that learn in turn."""
    past: Mapping[str, str] = field(default_factory=dict)
    """Policies that stand for past versions, and whose."""

    def steps_of(self, policy: str) -> int:
        """How many steps a policy takes; 0: not known."""
        return self.own_steps.get(policy, self.steps)


@dataclass(slots=True, kw_only=True)
class PolicyState:
    """What is known of one policy."""

    name: str
    max_staleness: int | None = None
    steps: dict[int, Values] = field(default_factory=dict)
    """Metrics by optimizer step, in order."""
    evaluations: dict[int, Values] = field(default_factory=dict)
    """Held-out metrics by step, in order."""
    waited: int = 0
    """Steps that others have taken since its newest."""
    waits: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The same between its last steps."""

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def last(self) -> Values:
        """Metrics of the newest step; empty before the first."""
        return self.steps.get(self.step, {})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric where it was measured; `evaluation/…` comes from the evaluations."""
        source = self.evaluations if name.startswith("evaluation/") else self.steps
        points = [(step, values[name]) for step, values in sorted(source.items()) if name in values]
        return [step for step, _ in points], [value for _, value in points]

    def seconds_left(self, steps: int) -> float | None:
        """Wall seconds until step `steps` at the pace of the last ten steps; None before the first."""
        paces = [values["step/seconds"] for _, values in sorted(self.steps.items())[-10:] if "step/seconds" in values]
        return sum(paces) / len(paces) * max(steps - self.step, 0) if paces else None


@dataclass(slots=True, kw_only=True)
class RunState:
    """A run as it is shown."""

    plan: RunPlan
    path: str = ""
    policies: dict[str, PolicyState] = field(default_factory=dict)
    status: Status | None = None
    problem: str = ""
    """What of the run could not be read, in words."""

    def __post_init__(self) -> None:
        for name, bound in self.plan.max_staleness.items():
            self.policies.setdefault(name, PolicyState(name=name, max_staleness=bound))

    def record(self, policy: str, step: int, values: Values) -> None:
        """Take a line of metrics; those that are not finite, or beyond `LARGEST`, are left out."""
        known = {name: value for name, value in values.items() if abs(value) <= LARGEST}
        state = self.policies.setdefault(policy, PolicyState(name=policy))
        if any(name.startswith("evaluation/") for name in known):
            state.evaluations[step] = known
        else:
            for measured in (state.steps, state.evaluations):
                while measured and next(reversed(measured)) >= step:  # taken again: what came after it is void
                    measured.popitem()
            state.steps[step] = known
            for other in self.policies.values():
                other.waited += 1
            if len(state.steps) > 1:
                state.waits.append(state.waited - 1)
            state.waited = 0


def plan_of(config: Mapping[str, Any]) -> RunPlan:
    """What the resolved configuration of a run says, of any version; what is missing is left at its default."""
    policies = _mapping(config.get("policies"))
    trainable = {name: _mapping(policy) for name, policy in policies.items()}
    return RunPlan(
        name=_text(config.get("name"), "run"),
        environment=_text(_mapping(config.get("environment")).get("id")),
        model=_text(_mapping(config.get("model")).get("path")),
        steps=_whole(config.get("steps")) or 0,
        own_steps={name: steps for name, policy in trainable.items() if (steps := _whole(policy.get("steps")))},
        phased=_frozen_in_turn(config.get("freeze")),
        past={name: _text(policy.get("of")) for name, policy in trainable.items() if policy.get("kind") == "past"},
        max_staleness={
            name: _whole(policy.get("max_staleness")) or 0
            for name, policy in trainable.items()
            if policy.get("kind", "trained") == "trained"
        },
    )


def read_metrics(path: Path, state: RunState) -> None:
    """Fold `metrics.jsonl` into a state; a line that is being written, or is damaged, is left out.

    What is not a regular file counts as absent.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(size_of(file) - MAX_METRICS_BYTES, 0))
            lines = io.BytesIO(read_at_most(file, MAX_METRICS_BYTES))
    except OSError:
        return
    for line in lines:
        if line.startswith(b"{") and len(line) <= MAX_LINE_BYTES:
            _take(line, state)


def _take(line: bytes, state: RunState) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(row, dict):
        return
    policy, step = row.pop("policy", None), _whole(row.pop("step", None))
    if (
        isinstance(policy, str)
        and step is not None
        and (policy in state.policies or len(state.policies) < MAX_POLICIES)
    ):
        state.record(policy, step, {name: value for name, value in row.items() if _is_number(value)})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any, default: str = "") -> str:
    return value if isinstance(value, str) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value) is not None


def _whole(value: Any) -> int | None:
    """The value where it is an integer that a float can hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def _frozen_in_turn(phases: object) -> frozenset[str]:
    """The policies that `freeze` names."""
    named: set[str] = set()
    for phase in phases if isinstance(phases, list | tuple) else ():
        held = phase[0] if isinstance(phase, list | tuple) and phase else ()
        names = held if isinstance(held, list | tuple) else [held]
        named.update(name for name in names if isinstance(name, str))
    return frozenset(named)
