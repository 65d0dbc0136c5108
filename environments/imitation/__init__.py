"""Supervised training on recorded conversations, in the reinforcement learning loop."""

from agentrl.environments.imitation.env import Imitation

__all__ = ["Imitation"]
