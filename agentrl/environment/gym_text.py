"""Gymnasium's toy-text games as text: the arguments of `gym_environment` for each.

    Taxi = agentrl.gym_environment("Taxi", lambda task: gymnasium.make("Taxi-v4"), **gym_text.TAXI)

Observations are written from the game's state, not from `env.render()`: that has colour codes, and Blackjack has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from agentrl.environment.gym import Game, Parse, Render

_PLACES = ("at R", "at G", "at Y", "at B", "in the taxi")


class TextGame(TypedDict):
    """The arguments of `gym_environment` that belong to one game."""

    render: Render
    parse: Parse
    instructions: str
    max_turns: int
    illegal_reward: float
    """Less by one than the lowest possible sum of rewards over `max_turns` legal actions."""


def one_of(names: Sequence[str]) -> Callable[[str, Game], int | None]:
    """A parser: action number n is a text that says `names[n]` and nothing else; case and a final stop do not matter.

    Example:
        >>> one_of(["stick", "hit"])(" Hit. ", None)
        1
    """
    numbers = {name: number for number, name in enumerate(names)}

    def parse(text: str, env: Game) -> int | None:
        return numbers.get(text.strip().removesuffix(".").lower())

    return parse


def _frozen_lake(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    rows = [b"".join(row).decode() for row in env.unwrapped.desc]  # type: ignore[attr-defined]
    return _grid(rows, *divmod(int(observation), len(rows[0])))


def _cliff_walking(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    return _grid(["." * 12] * 3 + ["S" + "C" * 10 + "G"], *divmod(int(observation), 12))


def _taxi(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    row, column, passenger, goal = env.unwrapped.decode(int(observation))  # type: ignore[attr-defined]
    lines = [b"".join(line).decode() for line in env.unwrapped.desc]  # type: ignore[attr-defined]
    shown = "\n".join(_with_mark(line, 2 * column + 1) if n == row + 1 else line for n, line in enumerate(lines))
    return f"{shown}\nThe passenger is {_PLACES[passenger]} and wants to go to {'RGYB'[goal]}."


def _blackjack(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    total, dealer, ace = (int(value) for value in observation)
    return (
        f"You hold {total}{' with a usable ace' if ace else ''}; the dealer shows {dealer if dealer > 1 else 'an ace'}."
    )


def _grid(rows: Sequence[str], row: int, column: int) -> str:
    return "\n".join(_with_mark(line, column) if number == row else line for number, line in enumerate(rows))


def _with_mark(line: str, at: int) -> str:
    return f"{line[:at]}@{line[at + 1 :]}"


FROZEN_LAKE = TextGame(
    render=_frozen_lake,
    parse=one_of(["left", "down", "right", "up"]),
    instructions="You stand at @ on a frozen lake. Go to G over frozen ground F; a hole H ends the game. "
    "Answer with left, down, right or up.",
    max_turns=100,
    illegal_reward=-1.0,
)
CLIFF_WALKING = TextGame(
    render=_cliff_walking,
    parse=one_of(["up", "right", "down", "left"]),
    instructions="You stand at @. Go to G; stepping onto the cliff C costs 100 and takes you back to the start S, "
    "every other step costs 1. Answer with up, right, down or left.",
    max_turns=50,
    illegal_reward=-5001.0,
)
TAXI = TextGame(
    render=_taxi,
    parse=one_of(["south", "north", "east", "west", "pickup", "dropoff"]),
    instructions="You drive the taxi @; it passes : but not |. Fetch the passenger and take them where they want to "
    "go: 20 points; every step costs 1, a wrong pickup or dropoff 10. "
    "Answer with south, north, east, west, pickup or dropoff.",
    max_turns=50,
    illegal_reward=-501.0,
)
BLACKJACK = TextGame(
    render=_blackjack,
    parse=one_of(["stick", "hit"]),
    instructions="Blackjack: come closer to 21 than the dealer without going over it. Answer with hit or stick.",
    max_turns=20,
    illegal_reward=-2.0,
)
