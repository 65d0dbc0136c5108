"""Frozen lakes with the map shown once: a multi-turn game, through `GymEnvironment`."""

from agentrl.environments.frozen_lake.env import FrozenLake

__all__ = ["FrozenLake"]
