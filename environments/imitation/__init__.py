"""Recorded conversations, said again: supervised steps by the loop that trains by reward."""

from agentrl.environments.imitation.env import Imitation

__all__ = ["Imitation"]
