"""Agents written for libraries of others, unmodified, as environments: a clerk with a tool that adds.

A class holds what its library needs to be set; docs/tutorials/outside_agents.md shows the same lines.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import agentrl

HERE = Path(__file__).parent
REQUIREMENTS: dict[str, list[str]] = tomllib.loads((HERE / "libraries.toml").read_text(encoding="utf-8"))


class InstallationError(Exception):
    """A library cannot be installed; `is_offline` if the index cannot be reached."""

    def __init__(self, output: str) -> None:
        super().__init__(output[-1000:])
        self.is_offline = any(sign in output for sign in ("connection broken", "Connection", "timed out"))


def python_of(library: str) -> Path:
    """The Python of a library's environment, in the user's cache; libraries with equal requirements share one."""
    digest = hashlib.sha256("\n".join(REQUIREMENTS[library]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentrl-outside-agents" / digest / "bin" / "python"


def install(library: str) -> None:
    """Make a library's environment, unless it exists.

    Raises:
        InstallationError: pip failed.
    """
    python = python_of(library)
    if (python.parents[1] / "installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[library]]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        raise InstallationError(installed.stdout + installed.stderr)
    (python.parents[1] / "installed").touch()


def program(library: str, file: str = "") -> list[str]:
    """The command that runs a library's agent, or another `file` of `programs/`."""
    return [str(python_of(library)), str(HERE / "programs" / (file or f"{library}_agent.py")), "{task.question}"]


class Clerk(agentrl.HarnessEnvironment):
    """Adds two numbers: the agent's last line must contain the sum."""

    seats = ("main",)
    unknown_tool: ClassVar[str] = ""
    """Exception with which the agent ends when the model calls a tool that does not exist; empty if the model is
    told."""
    patience: ClassVar[int] = 0
    """Number of such calls in a row that it forgives."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [
            agentrl.Task(
                id=str(n), data={"question": f"What is {70_000 + n} + {7_000 + n}?", "sum": str(77_000 + 2 * n)}
            )
            for n in range(64)
        ]

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(task.data["sum"] in episode.result.strip().rpartition("\n")[2])


class PydanticAI(Clerk):
    command = program("pydantic_ai")
    failed_reward = 0.0
    unknown_tool = "UnexpectedModelBehavior"
    patience = 1


class Smolagents(Clerk):
    command = program("smolagents")


class CrewAI(Clerk):
    command = ("env", "CREWAI_DISABLE_TELEMETRY=true", *program("crewai"))


class LangGraph(Clerk):
    command = program("langgraph")


class OpenAIAgents(Clerk):
    command = ("env", "OPENAI_AGENTS_DISABLE_TRACING=1", *program("openai_agents"))
    failed_reward = 0.0
    unknown_tool = "ModelBehaviorError"


class ClaudeAgentSDK(Clerk):
    command = ("env", "CLAUDE_CONFIG_DIR=.claude", *program("claude_agent_sdk"))


class Anthropic(Clerk):
    command = program("anthropic")


class AutoGen(Clerk):
    command = program("autogen")
    patience = 1


class OpenAILoop(Clerk):
    """A loop over the OpenAI client: required and parallel calls, JSON at temperature 0, a stream."""

    command = program("openai_loop", "openai_loop.py")
    failed_reward = 0.0


class PydanticAIOutput(Clerk):
    """Structured output that a validator sends back."""

    command = program("pydantic_ai_output", "pydantic_ai_output.py")
    failed_reward = 0.0
    unknown_tool = "UnexpectedModelBehavior"
    patience = 3


class SmolagentsCode(Clerk):
    """An agent that writes Python."""

    command = program("smolagents_code", "smolagents_code.py")


LIBRARIES: dict[str, type[Clerk]] = {
    "pydantic_ai": PydanticAI,
    "smolagents": Smolagents,
    "crewai": CrewAI,
    "langgraph": LangGraph,
    "openai_agents": OpenAIAgents,
    "claude_agent_sdk": ClaudeAgentSDK,
    "anthropic": Anthropic,
    "autogen": AutoGen,
}
WHOLE_PROGRAMS: dict[str, type[Clerk]] = {
    "openai_loop": OpenAILoop,
    "pydantic_ai_output": PydanticAIOutput,
    "smolagents_code": SmolagentsCode,
}
AGENTS = LIBRARIES | WHOLE_PROGRAMS
