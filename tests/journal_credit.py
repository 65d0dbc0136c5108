"""The advantages of docs/journal_format.md, for the second reader of journals: it imports nothing of agentrl."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Credit = tuple[float, float, "list[float] | None"]
"""Advantage, baseline, advantages by turn."""

COMPARED = ("leave_one_out", "group_mean", "group_std", "none", "gae")
"""Estimators that `advantages` computes."""


def advantages(estimator: str, rewards: Sequence[float], episodes: Sequence[str]) -> list[tuple[float, float]]:
    """(advantage, baseline) of rewards that are compared with each other, or with nothing."""
    if estimator in ("none", "gae"):
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


def resampled_pieces(
    estimator: str, members: Sequence[tuple[str, int]], rewards: Sequence[float], forks: dict[str, Row]
) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """The pieces of resampled episodes, compared with those of the same turn."""
    resampled: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, (episode, _) in enumerate(members):
        if episode in forks and forks[episode].get("resample_weight"):
            resampled[forks[episode]["episode_id"], forks[episode]["call_id"]].append(number)
    for siblings in resampled.values():
        names = [members[number][0] for number in siblings]
        compared = advantages(estimator, [rewards[number] for number in siblings], names)
        for number, (advantage, baseline) in zip(siblings, compared, strict=True):
            weight = forks[names[0]]["resample_weight"] / len(set(names))
            yield number, (0, weight * advantage, baseline)


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
        here = [fork for fork in forks.values() if fork["episode_id"] == main and not fork.get("resample_weight")]
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
    for number, piece in resampled_pieces(estimator, members, rewards, forks):
        found[number].append(piece)
    return found


def agent_of(row: Row) -> tuple[str, int, str, int]:
    return row["episode"], row["attempt"], row["seat"], row["agent"]
