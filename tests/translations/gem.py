"""Environments of gem (gem-llm 0.1): observations with their prefix and suffix; its wrapper is the original."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from agentrl_formats import gem
from agentrl_formats.gem import Gem
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

PACKAGE = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent")) / "gem"


class Game:
    """An environment that gives recorded observations, and notes the actions and the seed."""

    def __init__(self, input: dict[str, Any], noted: list[Any]) -> None:
        self._steps, self._noted = iter(input["steps"]), noted

    def reset(self, seed: int) -> Any:
        self._noted.append(seed)
        observation, info = next(self._steps)
        return observation, info

    def step(self, action: str) -> Any:
        self._noted.append(action)
        observation, info, reward, terminated, truncated = next(self._steps)
        return observation, reward, terminated, truncated, info


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play the environment; the grader's part is what reached it, and the reward."""
    noted: list[Any] = []
    made: Any = mock.patch.object(sys, "path", [*sys.path, str(PACKAGE)])
    if "steps" in input:
        made = mock.patch.dict(sys.modules, gem=SimpleNamespace(make=lambda id, **arguments: Game(input, noted)))
    with made:
        data = {"id": input.get("id", "game"), "seed": 7, "arguments": input.get("arguments", {})}
        played = play(Gem, input["replies"], data=data, max_context=1 << 16)
    return [content for _, content in seen(played)], [*noted, played.header.reward]


def original(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play by gem, whose wrapper makes the text of an observation; the wrapper forgets what it showed before."""
    with mock.patch.object(sys, "path", [*sys.path, str(PACKAGE)]):
        import gem as package  # type: ignore[import-not-found]
        from gem.wrappers.observation_wrapper import ObservationWrapper  # type: ignore[import-not-found]

        state = random.getstate()
        env = package.make(input["id"], **input.get("arguments", {}))
        wrapper = ObservationWrapper(env, include_action=False, include_chat_template=False)
        shown, info = wrapper.reset(seed=7)
        texts, total = [shown if "suffix" in info else wrapper.obs_queue[-1][0]], 0.0
        for number, reply in enumerate(input["replies"], 1):
            wrapper.obs_queue.clear()
            shown, reward, terminated, truncated, info = wrapper.step(reply)
            total += float(reward)
            if terminated or truncated or number == len(input["replies"]):
                break
            texts.append(shown)
        random.setstate(state)
    return texts, [total]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the suffix, which has the board of most games."""
    message = gem._Game._message

    def without(self: Any, observation: object, info: Any) -> Any:
        return message(self, observation, {name: value for name, value in info.items() if name != "suffix"})

    with mock.patch.object(gem._Game, "_message", without):
        yield


END = ["The end.", {}, 1.0, True, False]


def row(name: str, sees: Any, grader: Any, *steps: Any, replies: Any = ("a", "b", "c")) -> Row:
    input = {"steps": [*steps, END], "replies": [*replies][: len(steps)]}
    return Row(name=name, input=input, sees=sees, grader=grader)


def refused(name: str, words: str, *steps: Any) -> Row:
    return Row(name=name, input={"steps": [*steps], "replies": ["a", "b"]}, refused=words)


def game(name: str, id: str, *replies: str, **arguments: Any) -> Row:
    input = {"id": id, "replies": [*replies], "arguments": arguments}
    if not PACKAGE.exists():
        return Row(name=name, input=input, needs="gem")
    sees, grader = original(input)
    return Row(name=name, input=input, sees=sees, grader=grader, needs="gem", compared=True)


ROWS = [
    row("a text", ["Go."], [7, "a", 1.0], ["Go.", {}]),
    row("a suffix", ["Go.\nBoard"], [7, "a", 1.0], ["Go.", {"suffix": "Board"}]),
    row("a suffix after a line", ["Go.\nBoard"], [7, "a", 1.0], ["Go.\n", {"suffix": "Board"}]),
    row("a suffix alone", ["Board"], [7, "a", 1.0], ["", {"suffix": "Board"}]),
    row("a prefix", ["Rules: Go."], [7, "a", 1.0], ["Go.", {"prefix": "Rules: "}]),
    row(
        "prefix and suffix",
        ["Rules: Go.\nBoard"],
        [7, "a", 1.0],
        ["Go.", {"prefix": "Rules: ", "suffix": "Board"}],
    ),
    row(
        "two turns",
        ["Go.", "Higher.\nBoard 2"],
        [7, "a", "b", 0.75],
        ["Go.", {}],
        ["Higher.", {"suffix": "Board 2"}, -0.25, False, False],
    ),
    row("white space of an observation", ["  a\n\n b\n"], [7, "a", 1.0], ["  a\n\n b\n", {}]),
    row("letters of all scripts", ["得 😀"], [7, "a 得", 1.0], ["得 😀", {}], replies=["a 得"]),
    row("other entries of info", ["Go."], [7, "a", 1.0], ["Go.", {"parsed_action": None, "step_counter": 0}]),
    row("truncated", ["Go."], [7, "a", 0.5], ["Go.", {}], ["Late.", {}, 0.5, False, True], replies=["a"]),
    refused(
        "an image",
        "Game: an observation must be text, and is a dict, {'images': ['…'], 'problem': 'Area?'}",
        [{"problem": "Area?", "images": ["…"]}, {}],
    ),
    refused("observations of several players", "an observation must be text, and is a dict", [{"player 1": "Go."}, {}]),
    refused("no observation", "an observation must be text, and is a NoneType", [None, {}]),
    refused("a number", "an observation must be text, and is a int", ["Go.", {}], [3, {}, 0.0, False, False]),
    refused("a reward as text", "the reward is '1'", ["Go.", {}], ["", {}, "1", True, False]),
    refused("a truth value as reward", "the reward is True", ["Go.", {}], ["", {}, True, True, False]),
    refused("no reward", "the reward is nan", ["Go.", {}], ["", {}, float("nan"), True, False]),
    game("guesses", "game:GuessTheNumber-v0-easy", "\\boxed{5}", "\\boxed{8}", "none"),
    game("guesses without a suffix in between", "game:Mastermind-v0-easy", "\\boxed{12}", "\\boxed{12}", "x"),
    game("a board", "game:Minesweeper-v0-easy", "\\boxed{reveal 2 2}", "\\boxed{flag 0 0}", "no"),
    game("tiles", "game:Game2048-v0-easy", "\\boxed{up}", "\\boxed{left}", "no"),
    game("towers", "game:TowerofHanoi-v0-easy", "\\boxed{A C}", "\\boxed{A C}", "no"),
    game("arguments", "game:TowerofHanoi-v0-easy", "\\boxed{A C}", "no", num_disks=4),
    game("a puzzle", "rg:chain_sum", "\\boxed{1}", size=4),
]
