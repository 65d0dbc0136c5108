"""What a task format of another project is written with: the public names beside those of `agentrl`.

A format is an `Environment` whose tasks come from another project. `SessionEnvironment` converses with a library or a
server (`session.py`). `RunnerEnvironment` lets the project's own package play, in a process with its own Python
(`runner.py`, `runner_program.py`). Distributions in packages/ import only these names and those of `agentrl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.core.answers import UNCOMPRESSED, read_answer
from agentrl.core.errors import EffectError, EnvironmentDefinitionError, EpisodeError, InputError
from agentrl.core.files import expand_path, open_regular
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.reply_formats import describe_malformed_call
from agentrl.core.text import valid_unicode
from agentrl.environment.context import EpisodeSandbox
from agentrl.environment.environment import Split
from agentrl.environment.isolated import IsolatedObject, isolated
from agentrl.environment.rewards import stated_reward
from agentrl.environment.tasks import DrawnTasks, GameSeedTasks, split_tasks
from agentrl.formats.runner import RunnerEnvironment
from agentrl.formats.session import Call, Session, SessionEnvironment, Start, Step, message_data, tool_message
from agentrl.gateway.bodies import parse_json
from agentrl.gateway.calls import ChatRequest, RequestRefusedError, bounded_repr
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from agentrl.sandbox.driver import Network, check_variables
from agentrl.sandbox.sandbox import copy_refusals, read_sources

__all__ = [
    "UNCOMPRESSED",
    "Call",
    "ChatRequest",
    "DrawnTasks",
    "EffectError",
    "EnvironmentDefinitionError",
    "EpisodeError",
    "EpisodeSandbox",
    "GameSeedTasks",
    "InputError",
    "IsolatedObject",
    "Network",
    "RequestRefusedError",
    "RunnerEnvironment",
    "Session",
    "SessionEnvironment",
    "Split",
    "Start",
    "Step",
    "bounded_repr",
    "check_variables",
    "copy_refusals",
    "describe_malformed_call",
    "expand_path",
    "isolated",
    "message_data",
    "open_regular",
    "outside_event_loop",
    "parse_json",
    "read_answer",
    "read_responses_request",
    "read_sources",
    "split_tasks",
    "stated_reward",
    "tool_message",
    "valid_unicode",
]


def read_responses_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request to OpenAI's Responses API, as a run's endpoint reads it.

    Raises:
        RequestRefusedError: it asks for what is not supported.
    """
    return OpenAIResponsesProtocol().read(dict(body))
