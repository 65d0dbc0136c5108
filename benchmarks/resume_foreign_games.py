"""Games that nobody here wrote, for `benchmarks.resume_foreign`: gymnasium, MiniGrid, PettingZoo and TextArena.

Each game is what a user of ours would write for it, and a policy that plays legal actions at random: a function of all
that its player was told and of a stream of random numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from typing import Any

import gymnasium

import agentrl
from agentrl.environment import gym
from agentrl.environment.gym import TextGame

Policy = Callable[[str, Random], str]
"""From everything its player was told and said, and random numbers, to what it says."""


def _seed(seed: int) -> agentrl.Task:
    return agentrl.Task(id=f"seed-{seed}", data={"seed": seed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment of the study."""

    name: str
    family: str
    environment: type[agentrl.Environment]
    policy: Policy
    tasks: Sequence[agentrl.Task] = field(default_factory=lambda: [_seed(7), _seed(8), _seed(9)])
    state: Callable[[Any], Any] | None = None
    """The state of an environment, as plain data; default: everything reachable from its attributes."""
    foreign: bool = True
    """False for what was written for this study: remedies, and traps to see who notices."""
    level: str = "replay"
    """How it comes back where it does."""


def one_of(*choices: str) -> Policy:
    """A policy that says one of some words."""
    return lambda text, draw: draw.choice(choices)


def numbers(text: str) -> list[int]:
    """The whole numbers in a text."""
    return [int(found) for found in re.findall(r"\d+", text)]


# --- gymnasium --------------------------------------------------------------------------------------------------------


def _as_json(observation: Any, info: Mapping[str, Any], env: Any) -> str:
    return json.dumps(observation.tolist())


def _as_map(observation: Any, info: Mapping[str, Any], env: Any) -> str:
    return f"{observation.get('mission')}, facing {observation['direction']}\n{env.unwrapped}"


def _number(text: str, env: Any) -> int | None:
    return int(text) if text.isdecimal() else None


def _push(text: str, env: Any) -> Any:
    import numpy as np

    return np.array([float(text)], dtype=np.float32)


def _gym(identifier: str, game: TextGame, policy: Policy, family: str = "gymnasium", **options: Any) -> Case:
    def make(task: agentrl.Task) -> Any:
        if family == "MiniGrid":
            import_module("minigrid")
        return gymnasium.make(identifier, **options)

    environment = agentrl.gym_environment(identifier, make, **game)
    return Case(name=identifier, family=family, environment=environment, policy=policy)


def _game(render: Any, parse: Any) -> TextGame:
    return TextGame(render=render, parse=parse, instructions="", max_turns=120, illegal_reward=-1e9)


def _control(actions: int) -> tuple[TextGame, Policy]:
    return _game(_as_json, _number), one_of(*map(str, range(actions)))


_PUSH = _game(_as_json, _push)
_GRID = _game(_as_map, _number)


def _torque(text: str, draw: Random) -> str:
    return f"{draw.uniform(-1, 1):.3f}"


def _walk(text: str, draw: Random) -> str:
    return draw.choice("0122223356")  # turn, forward more often, pick up, toggle, done


def gymnasium_cases() -> list[Case]:
    """Toy text, classic control and MiniGrid."""
    two, three = _control(2), _control(3)
    return [
        _gym("FrozenLake-v1", gym.FROZEN_LAKE, one_of("left", "down", "right", "up"), map_name="8x8"),
        _gym("CliffWalking-v1", gym.CLIFF_WALKING, one_of("up", "right", "down", "left"), is_slippery=True),
        _gym("Taxi-v4", gym.TAXI, one_of("south", "north", "east", "west", "pickup", "dropoff"), is_rainy=True),
        _gym("Blackjack-v1", gym.BLACKJACK, one_of("hit", "hit", "stick")),
        _gym("CartPole-v1", *two),
        _gym("MountainCar-v0", *three),
        _gym("Acrobot-v1", *three),
        _gym("Pendulum-v1", _PUSH, _torque),
        _gym("MountainCarContinuous-v0", _PUSH, _torque),
        _gym("MiniGrid-Empty-Random-6x6-v0", _GRID, _walk, "MiniGrid"),
        _gym("MiniGrid-DoorKey-6x6-v0", _GRID, _walk, "MiniGrid"),
        _gym("MiniGrid-MultiRoom-N2-S4-v0", _GRID, _walk, "MiniGrid"),
        _gym("MiniGrid-Dynamic-Obstacles-Random-6x6-v0", _GRID, one_of("0", "1", "2"), "MiniGrid"),
    ]


# --- PettingZoo -------------------------------------------------------------------------------------------------------


def _legal(rarely: str = "") -> Policy:
    """A policy that draws one of the legal actions; `rarely` is to fold, which ends a game of cards at once."""

    def policy(text: str, draw: Random) -> str:
        legal = text.rsplit("Legal actions: ", 1)[1].split("<|stop|>", 1)[0].split(", ")
        return draw.choices(legal, [0.1 if name == rarely else 1.0 for name in legal])[0]

    return policy


def _pettingzoo(identifier: str, *, kind: str = "aec", fold: str = "", board: bool = False, turns: int = 256) -> Case:
    class Played(agentrl.PettingZooEnvironment):
        """A classic game."""

        seats = ("first", "second")
        illegal_reward = -1000.0
        max_turns = turns

        def make(self, task: agentrl.Task) -> Any:
            import pettingzoo

            return pettingzoo.make(kind, f"classic/{identifier}")

        def render(self, observation: Any, info: Mapping[str, Any], env: Any) -> str:
            return str(env.unwrapped.board) if board else super().render(observation, info, env)

    Played.__qualname__ = Played.__name__ = identifier
    return Case(name=identifier, family="PettingZoo", environment=Played, policy=_legal(rarely=fold))


def pettingzoo_cases() -> list[Case]:
    """The classic games, two of them with hidden cards, one played at the same time."""
    return [
        _pettingzoo("tictactoe-v3"),
        _pettingzoo("connect_four-v3"),
        _pettingzoo("leduc_holdem-v4", fold="2"),
        _pettingzoo("texas_holdem-v4", fold="2"),
        _pettingzoo("texas_holdem_no_limit-v6", fold="0"),
        _pettingzoo("chess-v6", board=True, turns=64),
        _pettingzoo("rps-v2", kind="parallel"),
    ]


# --- TextArena --------------------------------------------------------------------------------------------------------


def _offered(text: str, draw: Random) -> str:
    """One of the moves in brackets and quotes of the last line that offers some."""
    offers = re.findall(r"^.*(?:vailable|Valid).*'\[.*$", text, flags=re.MULTILINE)
    moves = re.findall(r"\[[^\]]+\]", offers[-1])
    return str(draw.choice(moves))


def _column(text: str, draw: Random) -> str:
    board = text.rsplit("-------------\n", 1)[1].splitlines()[0].split()
    return f"[col {draw.choice([number for number, cell in enumerate(board) if cell == '.'])}]"


def _pile(text: str, draw: Random) -> str:
    piles = {int(pile): int(left) for pile, left in re.findall(r"pile (\d+): (\d+)", text)}
    pile = draw.choice([number for number, left in piles.items() if left])
    return f"[{pile} {draw.randint(1, piles[pile])}]"


def _bid(text: str, draw: Random) -> str:
    bids = re.findall(r"bids (\d+) of face (\d)|\[Bid: (\d+), (\d)\]|(New round)", text)
    last = [bid for bid in bids if any(bid)][-1]
    said = [int(number) for number in last[:4] if number]
    if not said:
        return f"[Bid: 1, {draw.randint(1, 3)}]"
    if said[1] == 6 or draw.random() < 0.3:
        return "[Call]"
    return f"[Bid: {said[0]}, {draw.randint(said[1] + 1, 6)}]"


def _bet(text: str, draw: Random) -> str:
    return draw.choices(["[Call]", "[Fold]", "[Bet 40]"], [80, 10, 10])[0]


def _code(text: str, draw: Random) -> str:
    return f"[{' '.join(map(str, draw.sample(range(1, 7), 4)))}]"


def _cell(text: str, draw: Random) -> str:
    board = [line.split() for line in text.rsplit("Game Board:", 1)[1].splitlines() if re.match(r" ?\d  ", line)]
    hidden = [(row, column) for row, line in enumerate(board) for column, cell in enumerate(line[1:]) if cell == "."]
    return "[{} {}]".format(*draw.choice(hidden))


def _textarena(identifier: str, policy: Policy, players: int = 2) -> Case:
    class Played(agentrl.TextArenaEnvironment):
        """A game of TextArena."""

        seats = tuple(f"player-{number}" for number in range(players))

        def make(self, task: agentrl.Task) -> Any:
            import textarena

            return textarena.make(identifier)

    Played.__qualname__ = Played.__name__ = identifier
    return Case(name=identifier, family="TextArena", environment=Played, policy=policy)


def textarena_cases() -> list[Case]:
    """Games for one, two and three players; most draw cards or dice from the global generator in mid-game."""
    return [
        _textarena("TicTacToe-v0", _offered),
        _textarena("ConnectFour-v0", _column),
        _textarena("Othello-v0", _offered),
        _textarena("Nim-v0", _pile),
        _textarena("KuhnPoker-v0", _offered),
        _textarena("LiarsDice-v0", _bid),
        _textarena("PigDice-v0", one_of("[roll]", "[roll]", "[hold]")),
        _textarena("Poker-v0", _bet, players=3),
        _textarena("Blackjack-v0", one_of("[Hit]", "[Stand]"), players=1),
        _textarena("Mastermind-v0", _code, players=1),
        _textarena("Minesweeper-v0", _cell, players=1),
        _textarena("Sokoban-v0", one_of("[up]", "[down]", "[left]", "[right]"), players=1),
    ]
