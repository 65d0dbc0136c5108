"""Games of PettingZoo: rewards of every player however the episode ends; PettingZoo's own loop is the original."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import agentrl
from agentrl.core.records import Task
from agentrl.environment import games
from agentrl.journal.entries import RewardEntry
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

_spec = importlib.util.find_spec("pettingzoo")
PACKAGE = _spec.submodule_search_locations[0] if _spec and _spec.submodule_search_locations else "missing"
ILLEGAL_REWARD = -1000.0


def payout(players: int, kind: str, ends: Any) -> Any:
    """A game in which each round, or each move, pays one point to every player; `ends` has the round in which a player
    dies."""
    import pettingzoo

    agents = [f"p{number}" for number in range(players)]

    class Base:
        metadata = {"name": "payout"}  # noqa: RUF012 - as PettingZoo's games declare it
        render_mode = None
        possible_agents = agents

        def action_space(self, agent: str) -> Any:
            return Discrete(2)

        def observation_space(self, agent: str) -> Any:
            return Box(0, 99, (1,), np.int64)

    class Rounds(Base, pettingzoo.ParallelEnv):  # type: ignore[misc]
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.agents, self.round = list(agents), 0
            return self._seen(), {agent: {} for agent in agents}

        def _seen(self) -> Any:
            return {agent: np.array([self.round]) for agent in self.agents}

        def step(self, actions: Any) -> Any:
            self.round += 1
            played, dead = list(self.agents), {agent: ends.get(agent) == self.round for agent in self.agents}
            result: Any = (
                self._seen(),
                dict.fromkeys(played, 1.0),
                dead,
                dict.fromkeys(played, False),
                {agent: {} for agent in played},
            )
            self.agents = [agent for agent in played if not dead[agent]]
            return result

    class Moves(Base, pettingzoo.AECEnv):  # type: ignore[misc]
        def reset(self, seed: int | None = None, options: Any = None) -> None:
            self.agents, self.moves = list(agents), 0
            self.rewards, self._cumulative_rewards = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0.0)
            self.terminations, self.truncations = dict.fromkeys(agents, False), dict.fromkeys(agents, False)
            self.infos: Any = {agent: {} for agent in agents}
            self.agent_selection = agents[0]

        def observe(self, agent: str) -> Any:
            return np.array([self.moves])

        def step(self, action: Any) -> None:
            self._cumulative_rewards[self.agent_selection] = 0.0
            self.moves += 1
            self.rewards = dict.fromkeys(agents, 1.0)
            self._accumulate_rewards()
            self.agent_selection = agents[self.moves % players]

    return Rounds() if kind == "parallel" else Moves()


def made(given: Any) -> Any:
    if given["game"] == "payout":
        return payout(given["players"], given["kind"], given.get("ends", {}))
    import pettingzoo

    return pettingzoo.make(given["kind"], f"classic/{given['game']}", **given.get("options", {}))


def translate(given: Any) -> tuple[Any, Any]:
    class Game(agentrl.PettingZooEnvironment):
        seats = tuple(f"seat{number}" for number in range(given.get("players", 2)))
        illegal_reward = ILLEGAL_REWARD
        max_turns = given.get("max_turns", 256)

        def make(self, task: Task) -> Any:
            return made(given)

    played = play(Game, given["texts"], data={"seed": given.get("seed", 0)}, max_turns=64, max_context=1 << 20)
    rewards = {entry.seat: entry.value for entry in played.entries if isinstance(entry, RewardEntry)}
    listed = [text.partition(games.LEGAL_ACTIONS)[2] for _, text in seen(played)]
    return listed, [list(rewards.values()), played.header.stop_reason]


def original(given: Any) -> tuple[Any, Any]:
    """Play by PettingZoo's loops: what each player earned when the last full round, or the last move, was over."""
    import pettingzoo

    env, texts = made(given), list(given["texts"])[: given.get("max_turns", 256)]
    env.reset(seed=given.get("seed", 0))
    paid = dict.fromkeys(env.possible_agents, 0.0)
    listed, is_over, offender = [], False, None
    if isinstance(env, pettingzoo.ParallelEnv):
        while texts and not is_over:
            agents, round_texts = list(env.agents), texts[: len(env.agents)]
            listed += ["0, 1, 2" if given["game"] == "rps-v2" else "0, 1"] * len(round_texts)
            texts = texts[len(agents) :]
            offender = next((agent for agent, text in zip(agents, round_texts, strict=False) if text == "what?"), None)
            if offender or len(round_texts) < len(agents):
                break
            _, earned, *_ = env.step(dict(zip(agents, map(int, round_texts), strict=True)))
            for agent, reward in earned.items():
                paid[agent] += float(reward)
            is_over = not env.agents
    else:
        while env.agents and not is_over:
            observation, _, ended, cut, info = env.last()
            if ended or cut:
                env.step(None)
            elif not texts:
                break
            else:
                mask = observation.get("action_mask") if isinstance(observation, dict) else None
                mask = info.get("action_mask") if mask is None else mask
                space: Any = env.action_space(env.agent_selection)
                legal = [str(n) for n in range(int(space.n)) if mask is None or mask[n]]
                listed.append(", ".join(legal))
                text = texts.pop(0)
                offender = env.agent_selection if text not in legal else None
                if offender:
                    break
                env.step(int(text))
                for agent, reward in env.rewards.items():
                    paid[agent] += float(reward)
        is_over = not env.agents or all(env.terminations.values())
    if offender:
        paid[offender] = ILLEGAL_REWARD
    asked = list(env.possible_agents)[: len(listed)]
    is_cut = len(given["texts"]) >= given.get("max_turns", 256) and not is_over and not offender
    return listed, [[paid[agent] for agent in asked], "max_turns" if is_cut else "completed"]


def row(name: str, game: str, moves: str, rewards: Sequence[float], stop: str = "completed", **more: Any) -> Row:
    """A row with known rewards; what the players read is PettingZoo's."""
    kind = more.pop("kind", "aec")
    given = {"game": game, "kind": kind, "texts": moves.split(), **more}
    if PACKAGE == "missing":
        return Row(name=name, input=given, needs="pettingzoo")
    return Row(name=name, input=given, sees=original(given)[0], grader=[[*map(float, rewards)], stop], compared=True)


def cut(name: str, game: str, moves: str, rewards: Sequence[float], **more: Any) -> Row:
    """A row that `max_turns` ends after its moves."""
    return row(name, game, moves, rewards, "max_turns", max_turns=len(moves.split()), **more)


ROWS = [
    row("cross wins", "tictactoe-v3", "0 1 3 2 6", [1, -1]),
    row("nought wins", "tictactoe-v3", "0 1 3 4 8 7", [-1, 1]),
    row("draw", "tictactoe-v3", "0 1 2 4 3 5 7 6 8", [0, 0]),
    row("taken square", "tictactoe-v3", "4 4", [0, ILLEGAL_REWARD]),
    row("no number", "tictactoe-v3", "4 what?", [0, ILLEGAL_REWARD]),
    cut("cut", "tictactoe-v3", "0 1 3", [0, 0]),
    row("four in a row", "connect_four-v3", "0 1 0 1 0 1 0", [1, -1]),
    row("full column", "connect_four-v3", "0 0 0 0 0 0 0", [ILLEGAL_REWARD, 0]),
    row("fold", "leduc_holdem-v4", "2", [-0.5], seed=3),
    *(
        row(
            f"{kind} rock and paper, cut after {turns}",
            "rps-v2",
            moves,
            rewards,
            "max_turns",
            kind=kind,
            max_turns=turns,
        )
        for kind in ("aec", "parallel")
        for turns, moves, rewards in (
            (2, "0 1", [-1, 1]),
            (3, "0 1 0", [-1, 1]),
            (4, "0 1 0 1", [-2, 2]),
            (5, "0 1 0 1 2", [-2, 2]),
            (6, "0 1 0 1 1 0", [-1, 1]),
        )
    ),
    *(
        row(f"{kind} rock and paper, broken at {len(moves.split())}", "rps-v2", moves, rewards, kind=kind)
        for kind in ("aec", "parallel")
        for moves, rewards in (
            ("what?", [ILLEGAL_REWARD]),  # the other was not asked
            ("0 1 0 1 what?", [ILLEGAL_REWARD, 2]),
            ("0 1 0 what?", [-1, ILLEGAL_REWARD]),
        )
    ),
    *(
        row(
            f"three players, cut after {turns}",
            "payout",
            "0 " * turns,
            [2] * 3,
            "max_turns",
            players=3,
            kind="parallel",
            max_turns=turns,
        )
        for turns in (6, 7, 8)
    ),
    *(
        row(
            f"three movers, cut after {turns}",
            "payout",
            "0 " * turns,
            [turns] * 3,
            "max_turns",
            players=3,
            max_turns=turns,
        )
        for turns in (3, 4, 5)
    ),
    row(
        "one of three dies", "payout", "0 " * 8, [3, 2, 3], players=3, kind="parallel", ends={"p0": 3, "p1": 2, "p2": 3}
    ),
    row(
        "one of three dies, cut",
        "payout",
        "0 " * 8,
        [3, 2, 3],
        "max_turns",
        players=3,
        kind="parallel",
        ends={"p1": 2},
        max_turns=8,
    ),
    row("three movers, broken", "payout", "0 0 0 what?", [ILLEGAL_REWARD, 3, 3], players=3),
]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Rewards that players were not told are left out."""
    if PACKAGE == "missing":
        pytest.skip("the extra games is not installed")
    with mock.patch.object(games._PettingZooGame, "_rewards_so_far", lambda game: list(game._rewards)):
        yield
