"""Games of gem: prints each with actions that its own code samples, and the rewards of playing them again.

gem_games.py ID…
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import gem


def step_through(game: Any, actions: list[str]) -> tuple[list[str], float, bool]:
    """Play actions, and `\\boxed{4}` where none are given, until the game ends; at most six."""
    total, played, done = 0.0, [], False
    for number in range(6):
        if actions:
            action = actions[number]
        else:
            try:
                action = game.sample_random_action()
            except NotImplementedError:
                action = "\\boxed{4}"
        played.append(action)
        _, reward, terminated, truncated, _ = game.step(action)
        total += float(reward)
        done = bool(terminated or truncated)
        if done:
            break
    return played, total, done


if __name__ == "__main__":
    found = []
    for name in sys.argv[1:]:
        for seed in range(3):
            game = gem.make(name)
            game.reset(seed=seed)
            random.seed(seed + 100)
            actions, _, _ = step_through(game, [])
            game = gem.make(name)  # again: drawing the actions may have changed the game
            game.reset(seed=seed)
            played, total, done = step_through(game, actions)
            found.append({"id": name, "seed": seed, "actions": played, "reward": total, "done": done})
    print(json.dumps(found))
