"""Scorers for agentrl: judges, reward models, and functions that wrap scorers."""

from agentrl_judges.endpoint import Endpoint, JudgeError
from agentrl_judges.judge import judge
from agentrl_judges.reward_model import reward_model
from agentrl_judges.wrappers import fallback, limited, retrying

__all__ = ["Endpoint", "JudgeError", "fallback", "judge", "limited", "retrying", "reward_model"]
