"""Classes in the style of TRL's `environment_factory`, for `benchmarks.resume_foreign`; written as users write them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from random import Random
from typing import Any

import gymnasium
import numpy as np

import agentrl
from agentrl.environment.registry import adapt_trl
from benchmarks.resume_foreign_games import Case, Policy

CALLS = 24


def calls(*templates: tuple[str, dict[str, Sequence[Any]]], answer: str = "That is all.") -> Policy:
    """A policy that makes `CALLS` calls of tools, each argument one of those listed, and then answers."""

    def policy(text: str, draw: Random) -> str:
        if text.count("<|start|>tool\n") >= CALLS:
            return answer
        name, arguments = draw.choice(templates)
        drawn = {argument: draw.choice(values) for argument, values in arguments.items()}
        return f"<tool_call>{json.dumps({'name': name, 'arguments': drawn})}</tool_call>"

    return policy


class CountdownEnv:
    """Reach a number by adding and multiplying: plain state on `self`."""

    def reset(self, **row: Any) -> str:
        self.value, self.target, self.history = 1, row["target"], []
        return f" Reach {self.target} from 1."

    def add(self, amount: int) -> int:
        """Add to the value."""
        self.value += amount
        self.history.append(amount)
        return self.value

    def double(self) -> int:
        """Double the value."""
        self.value *= 2
        return self.value

    def get_reward(self) -> float:
        return 1.0 / (1.0 + abs(self.target - self.value))


class LakeEnv:
    """A gymnasium game behind tools."""

    def reset(self, **row: Any) -> str:
        self.env = gymnasium.make("FrozenLake-v1", map_name="8x8", is_slippery=True)
        self.position, _ = self.env.reset(seed=row["seed"])
        self.total, self.over = 0.0, False
        return f" You stand on field {int(self.position)}."

    def move(self, direction: int) -> str:
        """Walk: 0 left, 1 down, 2 right, 3 up."""
        if self.over:
            return "The game is over."
        self.position, reward, terminated, truncated, _ = self.env.step(direction)
        self.total += float(reward)
        self.over = terminated or truncated
        return f"field {int(self.position)}"

    def get_reward(self) -> float:
        return self.total


class SudokuEnv:
    """A TextArena puzzle behind a tool; the puzzle is drawn from the global generator, which TextArena seeds."""

    def reset(self, **row: Any) -> str:
        import textarena

        self.env = textarena.make("Sudoku-v0-very-easy")
        self.env.reset(num_players=1, seed=row["seed"])
        self.over = False
        return str(self.env.get_observation()[1])

    def fill(self, row: int, column: int, number: int) -> str:
        """Write a number."""
        if self.over:
            return "The game is over."
        self.over, _ = self.env.step(f"[{row} {column} {number}]")
        return "over" if self.over else str(self.env.get_observation()[1])[-600:]

    def get_reward(self) -> float:
        return float(self.over)


class ChessEnv:
    """White against an opponent that draws its moves from the global generator."""

    def reset(self, **row: Any) -> str:
        import chess

        self.board = chess.Board()
        return self._shown()

    def move(self, number: int) -> str:
        """Play the legal move of this number, counted round."""
        for pick in (lambda moves: moves[number % len(moves)], random.choice):
            if not self.board.is_game_over():
                self.board.push(pick(list(self.board.legal_moves)))
        return self._shown()

    def get_reward(self) -> float:
        return float(sum(piece.color for piece in self.board.piece_map().values()))

    def _shown(self) -> str:
        return f"{self.board.fen()} {', '.join(map(str, self.board.legal_moves))}"


class NumberEnv:
    """Guess a number that is drawn from the global generator and told to nobody."""

    def reset(self, **row: Any) -> str:
        self.secret, self.guesses = random.randint(1, 100), 0
        return " Guess a number from 1 to 100."

    def guess(self, number: int) -> str:
        """Try a number."""
        self.guesses += 1
        return "correct" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.secret) / 100.0


class StoreEnv:
    """A customer's orders, in the way of customer-service benchmarks: a small database of dictionaries."""

    def reset(self, **row: Any) -> str:
        draw = np.random.default_rng(row["seed"])
        self.orders = {f"W{n}": {"items": int(draw.integers(1, 6)), "status": "pending"} for n in range(6)}
        self.log: list[str] = []
        return f" Orders: {', '.join(self.orders)}"

    def show(self, order: str) -> dict[str, Any]:
        """An order."""
        return self.orders[order]

    def cancel(self, order: str, reason: str) -> str:
        """Cancel a pending order."""
        if self.orders[order]["status"] != "pending":
            raise ValueError(f"order {order} is {self.orders[order]['status']}")
        self.orders[order]["status"] = "cancelled"
        self.log.append(f"{order}: {reason}")
        return "cancelled"

    def get_reward(self) -> float:
        return float(len(self.log))


class QueueEnv:
    """Tickets of a help desk, drawn from a generator nobody seeded, each new one told to the policy when it comes."""

    def reset(self, **row: Any) -> str:
        self.draw = np.random.default_rng()
        self.waiting = [int(self.draw.integers(1, 1000))]
        return f" The first ticket: {self.waiting[0]}."

    def answer(self, text: str) -> str:
        """Answer the oldest ticket."""
        self.waiting.append(int(self.draw.integers(1, 1000)))
        return f"Next: {self.waiting[-1]}."

    def get_reward(self) -> float:
        return float(len(self.waiting))


def trl_cases() -> list[Case]:
    """Classes for `environment_factory`, unchanged."""
    orders = [f"W{number}" for number in range(7)]
    made: list[tuple[type, Policy]] = [
        (CountdownEnv, calls(("add", {"amount": range(9)}), ("double", {}))),
        (LakeEnv, calls(("move", {"direction": range(4)}))),
        (SudokuEnv, calls(("fill", {"row": range(1, 10), "column": range(1, 10), "number": range(1, 10)}))),
        (ChessEnv, calls(("move", {"number": range(40)}))),
        (NumberEnv, calls(("guess", {"number": range(101)}))),
        (StoreEnv, calls(("show", {"order": orders}), ("cancel", {"order": orders, "reason": ["late", "wrong"]}))),
        (QueueEnv, calls(("answer", {"text": ["yes", "no"]}))),
    ]
    data = [{"prompt": "Go on.", "seed": number, "target": 11 * number} for number in (7, 8, 9)]
    rows = [agentrl.Task(id=f"row-{row['seed']}", data=row) for row in data]
    return [Case(name=c.__name__, family="TRL", environment=adapt_trl(c), policy=p, tasks=rows) for c, p in made]
