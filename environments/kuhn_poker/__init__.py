"""Kuhn poker, for self-play that is measured exactly: the exploitability of every version."""

from agentrl.environments.kuhn_poker.env import KuhnPoker, exploitability, read_strategy

__all__ = ["KuhnPoker", "exploitability", "read_strategy"]
