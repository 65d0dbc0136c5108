"""Games of gymnasium: actions in the types of their space, rewards of every numeric type; gymnasium is the original."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from gymnasium import spaces

import agentrl
from agentrl.core.records import Task
from agentrl.environment import gym
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

PACKAGE = gymnasium.__path__[0]
ILLEGAL = gym.GymEnvironment.illegal_text
BOX = spaces.Box(-1.0, 1.0, (1,))
SPACES: dict[str, spaces.Space[Any]] = {
    "float": BOX,
    "pixel": spaces.Box(0, 255, (2,), np.uint8),
    "choice": spaces.Discrete(3, start=1),
    "choices": spaces.MultiDiscrete([3, 2]),
    "switches": spaces.MultiBinary(2),
    "text": spaces.Text(4),
    "both": spaces.Dict({"move": spaces.Discrete(2), "force": BOX}),
    "pair": spaces.Tuple([spaces.Discrete(2), BOX]),
}
REWARDS: dict[str, Any] = {
    "float32": np.float32(0.5),
    "scalar array": np.array(0.5),
    "array of one": np.array([0.5]),
    "integer": 2,
    "truth": np.bool_(True),
    "array of two": np.array([0.5, 1.0]),
    "text": "1",
    "nothing": None,
    "no number": float("nan"),
}
READY = {
    "FrozenLake-v1": (gym.FROZEN_LAKE, {"is_slippery": False}),
    "CliffWalking-v1": (gym.CLIFF_WALKING, {}),
    "Taxi-v4": (gym.TAXI, {}),
    "Blackjack-v1": (gym.BLACKJACK, {}),
}


class Probe(gymnasium.Env[Any, Any]):
    """Notes the actions that it receives, with their types, and pays for the second."""

    def __init__(self, given: Any) -> None:
        self.action_space = SPACES[given.get("space", "choice")]
        self.given = given
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}", {}

    def step(self, action: Any) -> Any:
        self.received.append(described(action))
        is_last = len(self.received) == 2
        reward = REWARDS[self.given.get("reward", "integer")] if is_last else 0.0
        return f"step {len(self.received)}", reward, is_last, is_last and bool(self.given.get("truncated")), {}


def described(action: Any) -> Any:
    """An action as JSON, each array and number with its type."""
    if isinstance(action, dict):
        return {name: described(part) for name, part in action.items()}
    if isinstance(action, tuple):
        return [described(part) for part in action]
    if isinstance(action, np.ndarray | np.generic):
        return [str(action.dtype), action.tolist()]
    return [type(action).__name__, action]


def translate(given: Any) -> tuple[Any, Any]:
    if "game" in given:
        ready, options = READY[given["game"]]
        game = agentrl.gym_environment("Game", lambda task: gymnasium.make(given["game"], **options), **ready)
        played = play(game, given["texts"], data={"seed": given["seed"]}, max_turns=60, max_context=1 << 20)
        return [text for role, text in seen(played) if role == "user"], [
            played.header.reward,
            played.header.stop_reason,
        ]

    probes: list[Probe] = []

    class Game(agentrl.GymEnvironment):
        illegal_actions = 2
        illegal_reward = -9.0

        def make(self, task: Task) -> Any:
            probes.append(Probe(given))
            return probes[-1]

        def render(self, observation: Any, info: Any, env: Any) -> Any:
            return given.get("shown", observation)

        def parse(self, text: str, env: Any) -> Any:
            value = json.loads(text)
            return np.array(value, given["dtype"]) if "dtype" in given else value

    played = play(Game, given["texts"], data={"seed": 3})
    return [text for _, text in seen(played)], [probes[-1].received, played.header.reward, played.header.stop_reason]


def original(given: Any) -> tuple[Any, Any]:
    """Play a game by gymnasium's own loop, with the numbers that the texts name."""
    ready, options = READY[given["game"]]
    env = gymnasium.make(given["game"], **options)
    observation, info = env.reset(seed=given["seed"])
    shown, total, ended = [ready["render"](observation, info, env)], 0.0, (False, False)
    for turn, text in enumerate(given["texts"], 1):
        observation, reward, *ended, info = env.step(ready["parse"](text, env))  # type: ignore[assignment]
        total += float(reward)
        if any(ended) or turn == len(given["texts"]):
            break
        shown.append(ready["render"](observation, info, env))
    return shown, [total, "completed" if ended[0] else "max_turns"]


def action(name: str, space: str, texts: list[str], *received: Any, **more: Any) -> Row:
    """A row whose two texts become `received`."""
    return Row(
        name=name,
        input={"space": space, "texts": texts, **more},
        sees=["seed 3", "step 1"],
        grader=[list(received), 2.0, "completed"],
    )


def illegal(name: str, space: str, text: str, **more: Any) -> Row:
    """A row whose text is no action."""
    return Row(
        name=name,
        input={"space": space, "texts": [text, text], **more},
        sees=["seed 3", f"{ILLEGAL}seed 3"],
        grader=[[], -9.0, "completed"],
    )


def paid(name: str, reward: float | None, words: str = "") -> Row:
    """A row with a reward of a type."""
    return Row(
        name=f"reward: {name}",
        input={"reward": name, "texts": ["1", "1"]},
        sees=["seed 3", "step 1"],
        grader=[[["int", 1], ["int", 1]], reward, "completed"],
        refused=words,
    )


ROWS = [
    action("list for an array", "float", ["[0.5]", "[1]"], ["float32", [0.5]], ["float32", [1.0]]),
    action("number for an array", "float", ["0.25", "-1"], ["float32", [0.25]], ["float32", [-1.0]]),
    action("larger floats", "float", ["[0.5]", "[1]"], ["float32", [0.5]], ["float32", [1.0]], dtype="float64"),
    action("integers for floats", "float", ["[0]", "[1]"], ["float32", [0.0]], ["float32", [1.0]], dtype="int64"),
    action(
        "integers for bytes", "pixel", ["[7, 255]", "[0, 1]"], ["uint8", [7, 255]], ["uint8", [0, 1]], dtype="int64"
    ),
    action("whole floats for bytes", "pixel", ["[7.0, 255.0]", "[0, 1]"], ["uint8", [7, 255]], ["uint8", [0, 1]]),
    action("integers", "choice", ["1", "3"], ["int", 1], ["int", 3]),
    action("whole floats", "choice", ["1.0", "3.0"], ["int", 1], ["int", 3]),
    action("array of one", "choice", ["[1]", "[3]"], ["int", 1], ["int", 3], dtype="int32"),
    action("choices", "choices", ["[2, 1]", "[0.0, 1.0]"], ["int64", [2, 1]], ["int64", [0, 1]]),
    action("switches", "switches", ["[true, false]", "[1, 1]"], ["int8", [1, 0]], ["int8", [1, 1]]),
    action("text", "text", ['"ab"', '"b"'], ["str", "ab"], ["str", "b"]),
    action(
        "parts",
        "both",
        ['{"move": 1, "force": [0.5]}', '{"move": 0.0, "force": 1}'],
        {"move": ["int", 1], "force": ["float32", [0.5]]},
        {"move": ["int", 0], "force": ["float32", [1.0]]},
    ),
    action(
        "pair",
        "pair",
        ["[1, [0.5]]", "[0, 1]"],
        [["int", 1], ["float32", [0.5]]],
        [["int", 0], ["float32", [1.0]]],
    ),
    illegal("out of bounds", "float", "[1.5]"),
    illegal("fraction of a byte", "pixel", "[1.5, 0]"),
    illegal("byte that overflows", "pixel", "[256, 0]", dtype="int64"),
    illegal("below the first", "choice", "0"),
    illegal("fraction of a choice", "choice", "1.5"),
    illegal("another shape", "choices", "[1]"),
    illegal("text for a number", "choice", '"1"'),
    illegal("null", "choice", "null"),
    illegal("a part too many", "both", '{"move": 1, "force": [0.5], "more": 1}'),
    illegal("a part too few", "pair", "[1]"),
    illegal("long text", "text", '"abcde"'),
    paid("float32", 0.5),
    paid("scalar array", 0.5),
    paid("array of one", 0.5),
    paid("integer", 2.0),
    paid("truth", 1.0),
    paid("array of two", None, "step() of Probe: the reward is array([0.5, 1. ]) (ndarray)"),
    paid("text", None, "step() of Probe: the reward is '1' (str)"),
    paid("nothing", None, "step() of Probe: the reward is None (NoneType)"),
    paid("no number", None, "step() of Probe: the reward is nan"),
    Row(
        name="terminated and truncated",
        input={"texts": ["1", "1"], "truncated": True},
        sees=["seed 3", "step 1"],
        grader=[[["int", 1], ["int", 1]], 2.0, "completed"],
    ),
    Row(
        name="observation that is no text",
        input={"texts": ["1", "1"], "shown": {"board": [1]}},
        refused="Game.render returned dict; return a str",
    ),
    *(
        Row(
            name=f"{game} {' '.join(texts)[:30]}",
            input=given,
            sees=original(given)[0],
            grader=original(given)[1],
            compared=True,
        )
        for game, texts in {
            "FrozenLake-v1": ["down", "down", "right", "right", "down", "right"],
            "CliffWalking-v1": ["up", *["right"] * 11, "down"],
            "Taxi-v4": ["north", "pickup", "west", "south", *["dropoff"] * 2, *["east"] * 44],
            "Blackjack-v1": ["hit"] * 9,
        }.items()
        for given in [{"game": game, "seed": 1, "texts": texts}]
    ),
]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Numbers keep their own type."""
    with mock.patch.object(gym, "cast_action", lambda space, action: action):
        yield
