"""Games of TextArena: what each player reads, and its reward; TextArena's own loop is the original."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import agentrl
from agentrl.core.records import Task
from agentrl.environment import games
from agentrl.journal.entries import RewardEntry, TurnEntry
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

_spec = importlib.util.find_spec("textarena")
PACKAGE = _spec.submodule_search_locations[0] if _spec and _spec.submodule_search_locations else "missing"


def translate(given: Any) -> tuple[Any, Any]:
    import textarena

    class Game(agentrl.TextArenaEnvironment):
        seats = ("first", "second")[: given["players"]]
        illegal_reward = -9.0
        max_turns = given.get("max_turns", 256)

        def make(self, task: Task) -> Any:
            return textarena.make(given["game"])

    played = play(Game, given["texts"], data={"seed": given["seed"]}, max_turns=64, max_context=1 << 20)
    seen(played)
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    rewards = {entry.seat: entry.value for entry in played.entries if isinstance(entry, RewardEntry)}
    texts = [[turn.seat, message["content"]] for turn in turns for message in turn.messages]
    return texts, [list(rewards.values()), played.header.stop_reason]


def original(given: Any) -> tuple[Any, Any]:
    """Play by TextArena's loop without its wrappers, which repeat the whole conversation in each observation."""
    import textarena

    env = textarena.make(given["game"])
    env.reset(num_players=given["players"], seed=given["seed"])
    while isinstance(env, textarena.Wrapper):
        env = env.env
    texts: list[Any] = []
    over = False
    for text in given["texts"][: given.get("max_turns", 256)]:
        player, messages = env.get_observation()
        names = env.state.role_mapping
        own = [m for m in messages if not (m[0] == player and m[2].name == "PLAYER_ACTION")]
        shown = "\n".join(f"[{names.get(sender, f'Player {sender}')}] {words}" for sender, words, _ in own)
        texts.append([("first", "second")[player], shown])
        over, _ = env.step(action=text)
        if over:
            break
    rewards, information = env.close() if over else ({}, {})
    paid = [
        -9.0 if information.get(player, {}).get("invalid_move") else float((rewards or {}).get(player, 0.0))
        for player in range(given["players"])
        if any(seat == ("first", "second")[player] for seat, _ in texts)
    ]
    return texts, [paid, "completed" if over else "max_turns"]


def row(name: str, game: str, texts: list[str], *, players: int = 2, seed: int = 1, **more: Any) -> Row:
    given = {"game": game, "texts": texts, "players": players, "seed": seed, **more}
    if PACKAGE == "missing":
        return Row(name=name, input=given, needs="textarena")
    sees, grader = original(given)
    return Row(name=name, input=given, sees=sees, grader=grader, compared=True)


ROWS = [
    row("first wins", "TicTacToe-v0", ["[0]", "[1]", "[3]", "[2]", "[6]"]),
    row("draw", "TicTacToe-v0", ["[0]", "[1]", "[2]", "[4]", "[3]", "[5]", "[7]", "[6]", "[8]"]),
    row("one mistake is forgiven", "TicTacToe-v0", ["[0]", "[0]", "[1]", "[3]", "[2]", "[6]"]),
    row("two mistakes are not", "TicTacToe-v0", ["[0]", "[0]", "no"]),
    row("cut", "TicTacToe-v0", ["[0]", "[1]"], max_turns=2),
    row("poker", "KuhnPoker-v0", ["[check]", "[bet]", "[fold]", "[check]", "[check]"] * 3, max_turns=9),
    row("nim", "Nim-v0", ["[0 3]", "[1 4]", "[2 5]"], max_turns=4),
    row("alone", "TowerOfHanoi-v0", ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"], players=1),
    row("alone, one mistake", "TowerOfHanoi-v0", ["[A C]", "[A C]", "[A B]"], players=1, max_turns=3),
]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Only the newest message reaches a player."""
    if PACKAGE == "missing":
        pytest.skip("the extra games is not installed")
    read = games._TextArenaGame._as_text
    with mock.patch.object(
        games._TextArenaGame, "_as_text", lambda game, player, messages: read(game, player, messages[-1:])
    ):
        yield
