"""Recompute the advantages of a journal (docs/reference/journal_format.md) bit for bit; imports nothing of agentrl.

`step_units` has for each trajectory its `reward`, `advantage` and `baseline`. `reward` is that in `trajectories`, plus
`weight` × score of each row in `group_scores` that scored the agent (correctly rounded; a reward
that is NULL counts as 0 then). The formulas below use this sum as the reward, and `turn_rewards` are unchanged. Their
computation depends on the `credit` section of the start of the step's lineage: `info.config.credit`, with the
`changed` settings of every `life.LINEAGE` up to that lineage. A resume recomputes the credit of ready units. All are
doubles; sums are correctly rounded. The *compared* trajectories are those of one policy in one seat, with a reward, of
the committed episodes of one `group_id`. With `release = "group"`, R are the rewards of all compared trajectories:

    leave_one_out   b: mean of R over the other episodes: (ΣR - ΣR of the agent's episode) / (number - number of the
                    agent's episode); advantage R - b
    group_mean      b: mean of R; advantage R - b
    group_std       b: mean of R; advantage (R - b) / (√(Σ(R - b)² / (number - 1)) + 10⁻⁶)
    none            b: 0; advantage R
    role_mean       b: see below; advantage R - b

For the first three, if all compared trajectories are from one episode, b = R and the advantage is 0; it is also 0 if
all R are equal. With `turn_credit = "to_go"`, if one of them has `turn_rewards`, each has `turn_advantages`: the same
formula
over G(t) = R - (`turn_rewards` of turns before t), rounded to 12 significant digits, for t = 0, 1, … up to one more
than the largest turn with a reward among them. The last one applies to every later turn; `advantage` and `baseline`
are still those of R. Otherwise
`turn_advantages` is NULL, and every token has `advantage`.

If a compared trajectory is that of a branch, credit follows the tree (`leave_one_out` and `none` alone). A branch whose
main episode is not compared, or was committed in another attempt, is left out. Let the calls
that started branches of a main episode be ordered by number. The value of a main agent behind its last call is R;
before a call with n branches it is the mean of its value behind the call and R of the same agent in the n branches.
First pieces: the main agents of the group are compared with each other by their values before the first call; weight 1.
Behind each call the weight is divided by n + 1: its main agents, by their values there, and the agents of its branches
are compared with each other as if each were an episode of its own; the advantage is multiplied by the weight. A main
agent's piece behind a call begins with the turn that the fork's `turns` names. `turn_advantages` has the piece's
advantage for each turn up to the first of the agent's last piece, NULL for a branch; `advantage` and `baseline` are
those of turn 0. With rewards to go, the values at turn t are those of G(t), up to t = the larger of the numbers above
and of the largest first turn.

With `advantage = "gigpo"` and the options γ `discount` = 0.95, ω `step_weight` = 1 and `divide_by_std` = false, every
compared trajectory has `turn_advantages`, one for each state in its `turn_states` (one if that is NULL). Let G(t) = Σ
γ^(k - t) r(k) over its turns k ≥ t, where r(k) is the reward of turn k in `turn_rewards` and the last turn also has the
rest of R. The advantage of turn t is `group_mean` over R, plus ω times `group_mean` over G of all turns of the compared
trajectories in the same state, counted individually (0 if there is only one, or all are equal); with `divide_by_std`,
`group_std` replaces both. `advantage` is the first turn's, and b = R - `advantage`.

With `release = "late"` or `"episode"`, the group has a row in `baselines`. A member is compared with the first m - 1 of
the `finishers` other than itself, where m is their number. Let O be their rewards of the policy in the seat, and V the
mean in `earlier` for policy and seat (κ = 3 if present, otherwise κ = 0 and V = 0). Then b = (ΣO + κV) / (|O| + κ) and
the advantage is R - b; without both, b = R and it is 0. (With `advantage = "none"` or `"role_mean"`: b = 0, R;
with `"to_go"`, a trajectory with `turn_rewards` has `turn_advantages` by itself.) m is half of the group, rounded up,
and at least 2 (`late`), or 1 (`episode`). V is a running mean over groups that had ended before this one was admitted:
w ← .98 w + 1, t ← .98 t + R for each reward, V = t/w, of the policy in the seat on the root's task, or else in the
environment. It cannot be recomputed from the journal, which does not record the order in which groups ended.

`role_mean`: each (policy, environment, seat) has a mean t/w after each step with rows of it. t and w begin at 0; the n
rewards of the step's rows enter together: t ← d t + ΣR, w ← d w + n with d = 0.8. Each agent is
compared with the mean after the newest step not above its `trajectories.oldest_step`.
Two cases use a plain mean instead (b = R and advantage 0 over no rewards). In the role's
first step, it covers the step's rows of other episodes. In later steps with `oldest_step` below that first step, it
covers the rows of the first step except its last episode (by `position`). A lineage begins with the means of its parent
if that used `role_mean`, otherwise with none.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Credit = tuple[float, float, "list[float] | None"]
"""Advantage, baseline, advantages by turn."""

COMPARED = ("leave_one_out", "group_mean", "group_std", "none")
"""Estimators that `advantages` computes."""


def advantages(estimator: str, rewards: Sequence[float], episodes: Sequence[str]) -> list[tuple[float, float]]:
    """(advantage, baseline) of rewards that are compared with each other, or with nothing."""
    if estimator == "none":
        return [(reward, 0.0) for reward in rewards]
    if len(set(episodes)) < 2 or len(set(rewards)) < 2:
        return [(0.0, reward) for reward in rewards]
    total, count = math.fsum(rewards), len(rewards)
    if estimator == "leave_one_out":
        own: dict[str, list[float]] = defaultdict(list)
        for episode, reward in zip(episodes, rewards, strict=True):
            own[episode].append(reward)
        means = {name: (total - math.fsum(given)) / (count - len(given)) for name, given in own.items()}
        return [(reward - means[name], means[name]) for name, reward in zip(episodes, rewards, strict=True)]
    mean = total / count
    scale = 1.0
    if estimator == "group_std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)) + 1e-6
    return [((reward - mean) / scale, mean) for reward in rewards]


def by_state(
    members: Sequence[Row], discount: float = 0.95, step_weight: float = 1.0, divide_by_std: bool = False
) -> dict[tuple[str, int, str, int], Credit]:
    """The credit of trajectories that are compared with each other turn by turn (`gigpo`), by agent."""
    estimator = "group_std" if divide_by_std else "group_mean"
    met: dict[bytes, list[tuple[int, int, float]]] = defaultdict(list)
    for number, row in enumerate(members):
        states = row["turn_states"] or b""
        turns = len(states) // 8
        paid: dict[int, float] = dict(map(tuple, json.loads(row["turn_rewards"] or "[]")))
        at_end = row["reward"] - math.fsum(paid.values())
        for turn in range(turns):
            later = [discount ** (k - turn) * paid.get(k, 0.0) for k in range(turn, turns)]
            value = math.fsum([*later, discount ** (turns - 1 - turn) * at_end])
            met[states[8 * turn : 8 * turn + 8]].append((number, turn, value))
    whole = advantages(estimator, [row["reward"] for row in members], [row["episode"] for row in members])
    by_turn = [
        [value] * max(1, len(row["turn_states"] or b"") // 8) for row, (value, _) in zip(members, whole, strict=True)
    ]
    for places in met.values():
        values = advantages(estimator, [value for _, _, value in places], [str(at) for at in range(len(places))])
        for (number, turn, _), (value, _) in zip(places, values, strict=True):
            by_turn[number][turn] += step_weight * value
    return {
        agent_of(row): (turns[0], row["reward"] - turns[0], turns) for row, turns in zip(members, by_turn, strict=True)
    }


def pieces(
    estimator: str, members: Sequence[tuple[str, int]], rewards: Sequence[float], forks: dict[str, Row]
) -> list[list[tuple[int, float, float]]]:
    """The pieces of members, as (episode, agent): the first turn, the advantage and the baseline of each piece.

    `forks` has the call that started each branch, as its `begin` has it.
    """

    def of_point(main: str, call: str) -> list[int]:
        names = [name for name, fork in forks.items() if (fork["episode_id"], fork["call_id"]) == (main, call)]
        return [number for number, (episode, _) in enumerate(members) if episode in names]

    def calls_of(main: str) -> list[str]:
        here = [fork for fork in forks.values() if fork["episode_id"] == main]
        calls = {fork["call_id"] for fork in here}
        return sorted(calls, key=lambda call: int(call.rpartition("#")[2]))

    def value(number: int, behind: int) -> float:
        """Of a member behind its first `behind` calls."""
        episode, agent = members[number]
        later = calls_of(episode)[behind:]
        if not later:
            return rewards[number]
        branches = [rewards[other] for other in of_point(episode, later[0]) if members[other][1] == agent]
        return math.fsum([value(number, behind + 1), *branches]) / (1 + len(branches))

    found: list[list[tuple[int, float, float]]] = [[] for _ in members]
    mains = [number for number, (episode, _) in enumerate(members) if episode not in forks]
    firsts = advantages(estimator, [value(number, 0) for number in mains], [members[number][0] for number in mains])
    for number, credit in zip(mains, firsts, strict=True):
        found[number].append((0, *credit))
    for main in dict.fromkeys(members[number][0] for number in mains):
        own, weight = [number for number in mains if members[number][0] == main], 1.0
        for behind, call in enumerate(calls_of(main), start=1):
            branches = of_point(main, call)
            weight /= 1 + len({members[number][0] for number in branches})
            values = [*(value(number, behind) for number in own), *(rewards[number] for number in branches)]
            siblings = [*own, *branches]
            turns = {agent: count for _, agent, count in forks[members[branches[0]][0]]["turns"]}
            compared = advantages(estimator, values, [members[number][0] for number in siblings])
            for number, (advantage, baseline) in zip(siblings, compared, strict=True):
                first = turns.get(members[number][1], 0) if number in own else 0
                found[number].append((first, weight * advantage, baseline))
    return found


def agent_of(row: Row) -> tuple[str, int, str, int]:
    return row["episode"], row["attempt"], row["seat"], row["agent"]
