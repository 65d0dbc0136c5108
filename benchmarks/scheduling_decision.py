"""CPU time of all scheduling decisions per turn, with 10,000 episodes in flight on one worker process.

A simulated run of production's loop in which everything that decides is timed: a call's priority, who has a place in
the engine's memory, which is short, whether a group is admitted and a step taken, what a spawn reserves, when a member
is released and with which credit. The time of the clock's own system calls is within; that
of making and running episodes is not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.kv_budget import KVBudget
from agentrl.rollout.turn import sampler as asking
from benchmarks.simulation.plan import SimulationPlan
from benchmarks.simulation.run import Scenario, simulate_run

TAIL = {"p50": 32, "p90": 160, "cap": 1280}
"""Tokens of an agent."""
IN_FLIGHT = 10_000
STEP_SIZE, STALENESS = 1280, 14
"""So more than 10,000 episodes are in flight once the proposals of fifteen steps are made."""
TURNS = 4
"""Of a child, in the middle."""
KV_TOKENS = 300_000
"""Room for a tenth of the conversations, about."""


class Timed:
    """Adds up the CPU time of calls, by name; of nested ones, that of the outermost."""

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.in_flight = 0
        """Episodes, at most."""
        self._is_inside = False

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:
                return function(*arguments, **options)
            self._is_inside = True
            began = time.thread_time_ns()
            try:
                return function(*arguments, **options)
            finally:
                self.nanoseconds[name] += time.thread_time_ns() - began
                self.calls[name] += 1
                self._is_inside = False

        return timed

    def watch(self, orchestrator: Orchestrator) -> None:
        """Time the decisions of a run."""
        scheduler, buffer = orchestrator.scheduler, orchestrator.buffer
        dispatcher = orchestrator.dispatcher
        for owner, names in (
            (
                scheduler,
                ("may_admit", "may_step", "is_starved", "pop_units", "deadline", "pins", "learning", "record_end"),
            ),
            (buffer, ("admit", "record_end", "consume")),
            (dispatcher.reservations, ("reserve", "hand_over", "cancel")),
        ):
            for name in names:
                setattr(owner, name, self.call(f"{type(owner).__name__}.{name}", getattr(owner, name)))
        record_end = buffer.record_end

        def ended(*arguments: Any) -> Any:
            in_flight = buffer.ledger.in_flight
            if self.in_flight < IN_FLIGHT <= in_flight:  # only now it counts
                self.nanoseconds.clear()
                self.calls.clear()
            self.in_flight = max(self.in_flight, in_flight)
            return record_end(*arguments)

        buffer.record_end = ended  # type: ignore[method-assign]  # see above


def figures(quick: bool) -> dict[str, float | None]:
    """Microseconds of CPU time per turn; not in a sample, which would have to be as large."""
    if quick:
        return {}
    timed = Timed()
    turns, tool = ({"p50": median, "p90": 3 * median, "cap": 9 * median} for median in (TURNS, 1))
    plan = SimulationPlan.model_validate(
        {
            "max_in_flight": 1 << 20,
            "environments": {
                "Propose": {"seats": {"proposer": {"tokens": TAIL}}, "fan_out": {"Solve": 8}},
                "Solve": {"seats": {"solver": {"tokens": TAIL, "turns": turns}}, "tool_seconds": tool},
            },
            "policies": {
                "solver": {"step_size": STEP_SIZE, "max_staleness": STALENESS},
                "proposer": {"kind": "frozen"},
            },
            "credit": {"group_size": 4, "release": "late"},
            "engine": {"slots": 1024, "rates": {1: 32.0}, "kv_tokens": KV_TOKENS, "prefill_rate": 1e6},
            "trainer": {"step_seconds": 1.0},
        }
    )
    scenario = Scenario(plan=plan, steps=3, skipped=1, alter=timed.watch)
    places = {name: getattr(KVBudget, name) for name in ("reserve", "idle", "release", "_admit_waiting", "_on_timer")}
    priority, asking.call_priority = asking.call_priority, timed.call("call_priority", asking.call_priority)
    for name, function in places.items():
        setattr(KVBudget, name, timed.call(f"KVBudget.{name}", function))
    try:
        simulate_run(scenario)
    finally:
        asking.call_priority = priority
        for name, function in places.items():
            setattr(KVBudget, name, function)
    turns = timed.calls["call_priority"]
    for name, spent in timed.nanoseconds.most_common():
        print(f"  {name}: {spent / turns / 1e3:.2f} us per turn, {timed.calls[name] / turns:.2f} calls", flush=True)
    print(f"  {turns} turns, {timed.in_flight} episodes in flight", flush=True)
    if timed.in_flight < IN_FLIGHT:
        raise SystemExit(f"only {timed.in_flight} episodes were in flight")
    return {"decision_us": sum(timed.nanoseconds.values()) / turns / 1e3}
