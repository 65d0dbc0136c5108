"""Alarms of runs in which several policies learn from each other, or one plays against itself. Pure functions.

What proposers and their solvers come to, who wins, and who gets nothing to learn from. `alarms.py` asks for them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from agentrl.observe.alarm_lines import Alarm
from agentrl.observe.windows import WINDOW, mean_of, names_of, newest, total, values_of, weighted

if TYPE_CHECKING:
    from agentrl.observe.run_state import PolicyState, RunState, Values

FRONTIER_SHARE = 0.2
"""Share of the proposals with 0.2 <= p <= 0.8 below which they teach little."""
REPEATED_SHARE = 0.5
"""Share of proposals made before, from which on they repeat themselves."""
STRUCTURE_ENTROPY = 0.2
"""Nats: below it, 19 of 20 proposals are alike."""
GATE_SHARE = 0.5
"""Share the gate accepts, below which most proposals are for nothing."""
MIN_PROPOSALS = 32
"""Proposals, or groups of attempts at them, before a share of them means something."""
MIN_GAMES = 64
"""Games before a share of them means something."""
LOSING_RATE = 0.45
"""Share of the games against its own past below which a policy may have got worse."""
LOSING_ERRORS = 3.0
"""Standard errors by which that share must have fallen besides: a side may be the weaker one from the start."""
SEAT_SHARE = 0.95
"""Share of the decided games from which on a seat wins whoever plays it."""
STARVED_STEPS = 20
"""Steps of other policies during one of its own, from which on a policy may be starved."""
STARVED_RATIO = 5
"""How many times more they must be than during any of its last steps; before the first, than `STARVED_STEPS`."""
MEANINGS = {
    "off_frontier": f"where an environment proposes (it uses a gate, or the memory): of at least {MIN_PROPOSALS} "
    f"proposals of {WINDOW} steps, less than {FRONTIER_SHARE:.0%} got a mean reward between 0.2 and 0.8 in attempts",
    "proposals_repeat": f"{REPEATED_SHARE:.0%} of the proposals of {WINDOW} steps, at least {MIN_PROPOSALS}, were made "
    "before",
    "proposals_alike": f"the entropy of their structures is below {STRUCTURE_ENTROPY:g} nats in each of {WINDOW} steps",
    "gate_closed": f"less than {GATE_SHARE:.0%} pass the gate in each of {WINDOW} steps",
    "loses_to_past": f"over {WINDOW} steps, a policy gets less than {LOSING_RATE:.0%} of the games against its past "
    f"versions, {LOSING_ERRORS:g} standard errors less than before (at least {MIN_GAMES} games in both)",
    "one_seat_wins": f"over {WINDOW} steps, {SEAT_SHARE:.0%} of the decided games (rewards above and below 0), at "
    f"least {MIN_GAMES}, go to one seat",
    "starved": f"a policy without phases takes no step while the others take {STARVED_STEPS}, and {STARVED_RATIO} "
    f"times as many as during any of its last {WINDOW}; before its first step: {STARVED_STEPS * STARVED_RATIO}",
}
"""When each of them is raised."""


def alarms(state: RunState) -> Iterator[Alarm]:
    """Those of the run first."""
    for policy in sorted(state.policies.values(), key=lambda policy: -policy.step)[:1]:  # what is said of the whole run
        window = newest(policy)
        yield from _proposals(window)
        yield from _one_seat_wins(window)
    for opponent, of in state.plan.past.items():
        if of in state.policies:
            yield from _loses_to_past(state.policies[of], opponent)
    for policy in state.policies.values():
        yield from _starved(policy, state)


def _proposals(window: Sequence[Values]) -> Iterator[Alarm]:
    if len(window) < WINDOW or not any("gate/acceptance" in v or "proposals/made" in v for v in window):
        return
    gate, entropy = values_of(window, "gate/acceptance"), values_of(window, "proposals/structure_entropy")
    if len(gate) == WINDOW and max(gate) < GATE_SHARE:
        yield Alarm(
            "gate_closed",
            "",
            f"{mean_of(gate):.0%} of what was proposed in the last {WINDOW} steps passed the gate",
            "a base model that makes valid proposals, a penalty below every reward behind the gate, or a rule it can "
            "learn in steps",
        )
    if len(entropy) == WINDOW and max(entropy) < STRUCTURE_ENTROPY:
        yield Alarm(
            "proposals_alike",
            "",
            f"the structures of the newest proposals have an entropy of {mean_of(entropy):.2f} nats: most are alike",
            "trainer.entropy_bonus = 0.04, a penalty on the `share` that `ctx.remember` gives, or a checkpoint from "
            "before the fall",
        )
    made = total(window, "proposals/made")
    repeated = weighted(window, "proposals/repeated", "proposals/made")
    if made >= MIN_PROPOSALS and repeated >= REPEATED_SHARE:
        yield Alarm(
            "proposals_repeat",
            "",
            f"{repeated:.0%} of the {made:,.0f} proposals of the last {WINDOW} steps had been made before",
            "refuse them at the gate: `proposer.gate(known.times == 0, penalty=-0.5)` after `known = await "
            "ctx.remember(…)`; trainer.entropy_bonus = 0.04",
        )
    groups = total(window, "pass_rate/groups")
    frontier, nobody, everybody = (
        weighted(window, f"pass_rate/{name}", "pass_rate/groups") for name in ("frontier", "0", "1")
    )
    if groups >= MIN_PROPOSALS and frontier < FRONTIER_SHARE:
        easy = everybody > nobody
        yield Alarm(
            "off_frontier",
            "",
            f"{frontier:.0%} of the {groups:,.0f} proposals of the last {WINDOW} steps are solved by some and not by "
            f"others; {everybody:.0%} by everybody, {nobody:.0%} by nobody",
            "a solver that learns more slowly than the proposer (a larger step_size, a smaller learning_rate) and "
            "stops before it does (`steps`); the versions that best.metric = 'pass_rate/frontier' keeps"
            if easy
            else "a narrower gate or a base model that solves some of them; `agentrl.learnability` as the proposer's "
            "reward",
        )


def _one_seat_wins(window: Sequence[Values]) -> Iterator[Alarm]:
    games = total(window, "episodes/decided")
    shares = {name: weighted(window, name, "episodes/decided") for name in names_of(window, "won")}
    if len(window) < WINDOW or games < MIN_GAMES or max(shares.values(), default=0.0) < SEAT_SHARE:
        return
    name = max(shares, key=lambda seat: shares[seat])
    yield Alarm(
        "one_seat_wins",
        "",
        f"seat {name.removeprefix('won/')} wins {shares[name]:.0%} of the {games:,.0f} decided games of the last "
        f"{WINDOW} steps: there is little to learn from",
        "credit.advantage = \"role_mean\", so that a side's advantage is nobody's credit; both policies on both sides "
        "(lists under [seats]); an opponent of like strength: a policy of kind 'past', or a game with a handicap",
    )


def _loses_to_past(policy: PolicyState, opponent: str) -> Iterator[Alarm]:
    rate, played = f"win_rate/{opponent}", f"games/{opponent}"
    window = newest(policy)
    before = newest(policy, len(policy.steps))[:-WINDOW]
    games, earlier = total(window, played), total(before, played)
    if min(games, earlier) < MIN_GAMES:
        return
    now, then = weighted(window, rate, played), weighted(before, rate, played)
    error = 0.5 * math.sqrt(1.0 / games + 1.0 / earlier)  # of shares, at most
    if now < LOSING_RATE and then - now > LOSING_ERRORS * error:
        yield Alarm(
            "loses_to_past",
            policy.name,
            f"against its past versions ({opponent}) it gets {now:.2f} of {games:,.0f} games in the last {WINDOW} "
            f"steps, {then:.2f} before: it unlearns, or goes in circles",
            "see which with `agentrl run winrates`; go on from the checkpoint that won most, with a lower learning "
            f"rate or a larger step_size; more groups against {opponent} in [seats], more versions (size), choose = "
            "'prioritised'",
        )


def _starved(policy: PolicyState, state: RunState) -> Iterator[Alarm]:
    plan, whole = state.plan, state.plan.steps_of(policy.name)
    learns_always = policy.name in plan.max_staleness and policy.name not in plan.phased
    if not learns_always or (whole and policy.step >= whole):
        return
    usual = max(policy.waits, default=STARVED_STEPS)
    if policy.waited >= max(STARVED_STEPS, STARVED_RATIO * usual):
        yield Alarm(
            "starved",
            policy.name,
            f"the other policies took {policy.waited} steps since its step {policy.step}: it gets no units",
            "see in `agentrl run ledger` what becomes of its units; proposals that the gate refuses start no children "
            "(gate/acceptance), and a seat that never acts or is never rewarded has no unit; a smaller step_size; a "
            "larger max_staleness of the policy that admission waits for",
        )
