"""An environment of OpenEnv, and its own client.

openenv_guess.py serve PORT [PLACES] | play PORT SEED…
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient


class Number(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guess(Environment):
    """Guess a number from 1 to 9 in four turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **more) -> Hint:
        self.secret, self.left = random.Random(seed).randint(1, 9), 4
        return Hint(hint="1 to 9", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **more) -> Hint:
        self.left -= 1
        if action.number == self.secret:
            return Hint(hint="yes", done=True, reward=(self.left + 1) / 4)
        hint = "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, done=self.left == 0, reward=-0.05)

    @property
    def state(self) -> State:
        return self._state


async def play(port: int, seed: int) -> tuple[float, list[int]]:
    """Play with every guess right of the middle; return the reward and the guesses."""
    async with GenericEnvClient(base_url=f"http://127.0.0.1:{port}") as client:
        result = await client.reset(seed=seed)
        low, high, total, guesses = 1, 9, 0.0, []
        while not result.done:
            guesses.append((low + high + 1) // 2)
            result = await client.step({"number": guesses[-1]})
            total += result.reward or 0
            low = guesses[-1] + 1 if result.observation.get("hint") == "higher" else low
            high = guesses[-1] - 1 if result.observation.get("hint") == "lower" else high
        return total, guesses


async def play_all(port: int, seeds: list[int]) -> None:
    print(json.dumps([await play(port, seed) for seed in seeds]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        app = FastAPI()
        places = int(sys.argv[3]) if len(sys.argv) > 3 else 16
        server = HTTPEnvServer(env=Guess, action_cls=Number, observation_cls=Hint, max_concurrent_envs=places)
        server.register_routes(app)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
    else:
        asyncio.run(play_all(int(sys.argv[2]), [int(seed) for seed in sys.argv[3:]]))
