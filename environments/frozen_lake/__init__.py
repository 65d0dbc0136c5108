"""Crossing frozen lakes whose map is shown once: a game of several turns, through `GymEnvironment`."""

from agentrl.environments.frozen_lake.env import FrozenLake

__all__ = ["FrozenLake"]
