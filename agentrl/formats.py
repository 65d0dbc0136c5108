"""The public names, beside those of `agentrl`, for what other projects define: task formats and tool servers.

The distributions `episodic-rl-formats` and `episodic-rl-mcp` import only these and those of `agentrl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.core.answers import UNCOMPRESSED, read_answer
from agentrl.core.errors import EffectError, EnvironmentDefinitionError, EpisodeError, InputError, format_foreign_error
from agentrl.core.files import expand_path, open_regular
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.parent_death import die_with_parent_hook
from agentrl.core.reply_formats import describe_malformed_call
from agentrl.core.text import shorten_middle, valid_unicode
from agentrl.environment.context import EpisodeSandbox, Guarantee, ResourceLevel
from agentrl.environment.environment import Split
from agentrl.environment.isolated import IsolatedObject, IsolatedObjectError, isolated
from agentrl.environment.rewards import stated_reward
from agentrl.environment.tasks import DrawnTasks, GameSeedTasks, split_tasks
from agentrl.gateway.bodies import parse_json
from agentrl.gateway.calls import ChatRequest, RequestRefusedError, bounded_repr
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from agentrl.sandbox.driver import Network, check_variables
from agentrl.sandbox.sandbox import copy_refusals, read_sources

__all__ = [
    "UNCOMPRESSED",
    "ChatRequest",
    "DrawnTasks",
    "EffectError",
    "EnvironmentDefinitionError",
    "EpisodeError",
    "EpisodeSandbox",
    "GameSeedTasks",
    "Guarantee",
    "InputError",
    "IsolatedObject",
    "IsolatedObjectError",
    "Network",
    "RequestRefusedError",
    "ResourceLevel",
    "Split",
    "bounded_repr",
    "check_variables",
    "copy_refusals",
    "describe_malformed_call",
    "die_with_parent_hook",
    "expand_path",
    "format_foreign_error",
    "isolated",
    "open_regular",
    "outside_event_loop",
    "parse_json",
    "read_answer",
    "read_responses_request",
    "read_sources",
    "shorten_middle",
    "split_tasks",
    "stated_reward",
    "valid_unicode",
]


def read_responses_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request to OpenAI's Responses API, as a run's endpoint reads it.

    Raises:
        RequestRefusedError: it asks for what is not supported.
    """
    return OpenAIResponsesProtocol().read(dict(body))
