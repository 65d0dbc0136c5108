"""Why new episodes wait: a rule and its numbers. The text for people follows from them, and nothing reads the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentrl.core.text import plural

HoldKind = Literal["paused", "draining", "max_in_flight", "max_staleness", "last_steps"]
"""Rules that hold a root group back; the time that one does so is the activity of its name."""
LimitKind = Literal["set", "first", "room", "places", "raised"]
"""Why `max_in_flight` is what it is: set by the user, or, if it is automatic, the first limit, lowered because calls
waited for room in the KV cache or for a place in the engine, or raised because the engine has places."""


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """Why the limit on episodes in flight is what it is."""

    kind: LimitKind = "set"
    values: Mapping[str, float] = field(default_factory=dict)
    """`places` of the engine; turns that it `sampled` at once; calls that were `waiting`, of the episodes `running`."""

    @property
    def text(self) -> str:
        """For people, read after "episodes are running"."""
        values = self.values
        match self.kind:
            case "set":
                return ""
            case "first":
                return f", the limit at first, since the engine samples {plural(int(values['places']), 'turn')} at once"
            case "raised":
                return (
                    f", the limit since the engine sampled {values['sampled']:.2g} turns at once of "
                    f"{values['places']:.0f} possible"
                )
            case "room" | "places":
                what = "room in the KV cache" if self.kind == "room" else "a place in the engine"
                return f", the limit since {values['waiting']:.2g} of {values['running']:.0f} waited for {what}"


SET_LIMIT = InFlightLimit()


@dataclass(frozen=True, slots=True)
class Hold:
    """What holds a root group back."""

    kind: HoldKind
    policies: tuple[str, ...] = ()
    """Policies whose bound or steps the rule is about."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the rule: episodes `running`, held-out ones `due` before, steps `behind`, `step` and `batch` of a
    deterministic run."""
    limit: InFlightLimit = SET_LIMIT

    @property
    def text(self) -> str:
        """For people, read after "sampling waits"."""
        values, names = self.values, ", ".join(self.policies)
        match self.kind:
            case "paused":
                return "because the run is paused"
            case "draining":
                return "because the run drains"
            case "last_steps":
                return f"because the last steps{f' of {names}' if names else ''} have all their episodes"
            case "max_in_flight":
                count = plural(int(values["running"]), "episode is", "episodes are")
                first = f", and {values['due']:.0f} of an evaluation start first" if values.get("due") else ""
                return f"because {count} running{self.limit.text}{first} (max_in_flight)"
            case "max_staleness" if "batch" in values:
                return (
                    f"because {names} is at step {values['step']:.0f} (batch {values['batch']:.0f} of a deterministic "
                    "run)"
                )
            case "max_staleness" if not values["behind"]:
                return f"for the next step (max_staleness of {names} is 0)"
            case "max_staleness":
                behind = plural(int(values["behind"]), "step")
                return f"because the trainer is {behind} behind (max_staleness of {names})"


@dataclass(frozen=True, slots=True)
class AdmissionWait:
    """How long a rule held a root group back before its admission."""

    seconds: float
    hold: Hold

    @property
    def text(self) -> str:
        """For people, read after "its start waited"."""
        return f"{self.seconds:.3g} s {self.hold.text}"
