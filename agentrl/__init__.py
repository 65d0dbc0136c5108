"""Asynchronous reinforcement learning for multi-turn, multi-agent LLM agents.

The public names; importing this loads nothing heavy. Everything else may change between releases.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11, 4):  # pip does not check a source tree on the path
    raise ImportError(
        f"agentrl needs Python 3.11.4 or newer; this is {sys.version.split()[0]} at {sys.executable}. "
        "Install one and make a new environment with it: python3.11 -m venv .venv"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.app.evaluation import evaluate
    from agentrl.app.forks import fork
    from agentrl.app.training import Run, train
    from agentrl.config.run import RunConfig
    from agentrl.core.custom_functions import advantage, loss, scorer
    from agentrl.core.errors import AgentRLError, InfrastructureError
    from agentrl.core.records import Message, Score, Scored, Task, ToolCall, ToolSpec, Turn
    from agentrl.credit.group import Group
    from agentrl.environment.context import (
        Agent,
        ChildResult,
        Endpoint,
        EpisodeContext,
        LimitReachedError,
        assistant,
        system,
        user,
    )
    from agentrl.environment.environment import Environment, TaskSource
    from agentrl.environment.games import PettingZooEnvironment, TextArenaEnvironment
    from agentrl.environment.gym import GymEnvironment, gym_environment
    from agentrl.environment.harness import HarnessEnvironment, HarnessEpisode
    from agentrl.environment.registry import make, register, spec
    from agentrl.environment.sandbox_tools import bash, edit_file, read_file, write_file
    from agentrl.environment.tasks import learnability
    from agentrl.environment.tools import ToolEnvironment, ToolEpisode, tool
    from agentrl.inspection.recorded_run import RecordedRun, open_run
    from agentrl.learn.loss_batch import LossBatch
    from agentrl.sandbox.sandbox import Sandbox
    from agentrl.testing.check import check_environment

_HOME = {
    "Agent": "environment.context",
    "AgentRLError": "core.errors",
    "ChildResult": "environment.context",
    "Endpoint": "environment.context",
    "Environment": "environment.environment",
    "EpisodeContext": "environment.context",
    "Group": "credit.group",
    "GymEnvironment": "environment.gym",
    "HarnessEnvironment": "environment.harness",
    "HarnessEpisode": "environment.harness",
    "InfrastructureError": "core.errors",
    "LimitReachedError": "environment.context",
    "LossBatch": "learn.loss_batch",
    "Message": "core.records",
    "PettingZooEnvironment": "environment.games",
    "RecordedRun": "inspection.recorded_run",
    "Run": "app.training",
    "RunConfig": "config.run",
    "Sandbox": "sandbox.sandbox",
    "Score": "core.records",
    "Scored": "core.records",
    "Task": "core.records",
    "TaskSource": "environment.environment",
    "TextArenaEnvironment": "environment.games",
    "ToolCall": "core.records",
    "ToolEnvironment": "environment.tools",
    "ToolEpisode": "environment.tools",
    "ToolSpec": "core.records",
    "Turn": "core.records",
    "advantage": "core.custom_functions",
    "assistant": "environment.context",
    "bash": "environment.sandbox_tools",
    "check_environment": "testing.check",
    "edit_file": "environment.sandbox_tools",
    "evaluate": "app.evaluation",
    "fork": "app.forks",
    "gym_environment": "environment.gym",
    "learnability": "environment.tasks",
    "loss": "core.custom_functions",
    "make": "environment.registry",
    "open_run": "inspection.recorded_run",
    "read_file": "environment.sandbox_tools",
    "register": "environment.registry",
    "scorer": "core.custom_functions",
    "spec": "environment.registry",
    "system": "environment.context",
    "tool": "environment.tools",
    "train": "app.training",
    "user": "environment.context",
    "write_file": "environment.sandbox_tools",
}

__all__ = [
    "Agent",
    "AgentRLError",
    "ChildResult",
    "Endpoint",
    "Environment",
    "EpisodeContext",
    "Group",
    "GymEnvironment",
    "HarnessEnvironment",
    "HarnessEpisode",
    "InfrastructureError",
    "LimitReachedError",
    "LossBatch",
    "Message",
    "PettingZooEnvironment",
    "RecordedRun",
    "Run",
    "RunConfig",
    "Sandbox",
    "Score",
    "Scored",
    "Task",
    "TaskSource",
    "TextArenaEnvironment",
    "ToolCall",
    "ToolEnvironment",
    "ToolEpisode",
    "ToolSpec",
    "Turn",
    "advantage",
    "assistant",
    "bash",
    "check_environment",
    "edit_file",
    "evaluate",
    "fork",
    "gym_environment",
    "learnability",
    "loss",
    "make",
    "open_run",
    "read_file",
    "register",
    "scorer",
    "spec",
    "system",
    "tool",
    "train",
    "user",
    "write_file",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from agentrl.core.removed import removed_name

        raise AttributeError(removed_name(f"agentrl.{name}") or f"module 'agentrl' has no attribute {name!r}")
    try:
        return getattr(import_module(f"agentrl.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from agentrl.core.machine import install_command

        raise ImportError(f"agentrl.{name} needs torch; install it with: {install_command('train')}") from error


def __dir__() -> list[str]:
    return __all__
