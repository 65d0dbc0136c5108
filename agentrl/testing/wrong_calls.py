"""Plays tool calls that no tool can answer, and text where a call or JSON was asked for. Every model writes some early
in training.

An episode that they end as an error is dropped, so the policy never learns to stop writing them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.core.text import plural
from agentrl.engines.scripted import Script
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.execution import Failure
from agentrl.testing.load_clock import TimeLimit

UNKNOWN, WRONG_ARGUMENTS, BROKEN_JSON = "an unknown tool", "wrong arguments", "broken JSON"
OTHER_FORM = "a form that the run does not read"
PLAIN_TEXT = "text instead of the required call or JSON"
_TOOL = re.compile(r"^([^\s(]+)\((.*)\)$", re.MULTILINE)
"""Pattern for a tool in the first message of `PlainChatFormat`."""
_TOOLS = "<|start|>tools\n"
_REPLIES: dict[str, Callable[[str], str]] = {
    UNKNOWN: lambda tool: _written({"name": "no_such_tool", "arguments": {}}),
    WRONG_ARGUMENTS: lambda tool: _written({"name": tool, "arguments": {"no_such_argument": 0}}),
    OTHER_FORM: lambda tool: msgspec.json.encode({"name": tool, "arguments": {"no_such_argument": 0}}).decode(),
    BROKEN_JSON: lambda tool: f'<tool_call>{{"name": "{tool or "no_such_tool"}", "arguments": {{"a": </tool_call>',
    PLAIN_TEXT: lambda tool: "I do not know.",
}


@dataclass(slots=True)
class WrongCallOutcomes:
    """The ends of episodes whose every turn is a wrong call."""

    episodes: int = 0
    kinds: list[str] = field(default_factory=list)
    """Kinds of wrong calls that were played."""
    left_out: list[str] = field(default_factory=list)
    """Kinds that the time limit left out."""
    errors: list[tuple[str, Task, Failure]] = field(default_factory=list)
    """Kind, task and failure of each episode that ended as an error."""
    ended_programs: int = 0
    """Number of episodes in which the program of an external agent failed and got `failed_reward`."""

    @property
    def share(self) -> str:
        """How many episodes ended as an error, as a clause."""
        return f"{len(self.errors)} of {plural(self.episodes, 'episode')}"


Play = Callable[[Task, int, Script], Failure | bool]
"""Plays a task with a seed and a policy. Returns the failure if the episode ended as an error, else whether the program
of an external agent failed."""


@dataclass(slots=True)
class _Seen:
    """What the requests of the played episodes ask for."""

    tools: set[str] = field(default_factory=set)
    """Names of the offered tools."""
    has_form: bool = False
    """Whether a request asks for a call or for JSON."""


def play_wrong_calls(play: Play, tasks: Sequence[Task], limit: TimeLimit) -> WrongCallOutcomes:
    """Play each kind of wrong call on each task; after the time limit, no further kind but the first."""
    outcomes = WrongCallOutcomes()
    seen = _Seen()
    for kind in _REPLIES:  # the first kind shows what there is to get wrong
        if (kind in (WRONG_ARGUMENTS, OTHER_FORM) and not seen.tools) or (kind == PLAIN_TEXT and not seen.has_form):
            continue
        if outcomes.kinds and limit.left < 0:
            outcomes.left_out.append(kind)
            continue
        outcomes.kinds.append(kind)
        for number, task in enumerate(tasks):
            outcome = play(task, number, _always(kind, seen))
            outcomes.episodes += 1
            if isinstance(outcome, Failure):
                outcomes.errors.append((kind, task, outcome))
            else:
                outcomes.ended_programs += outcome
    return outcomes


def shown_tools(prompt: str) -> dict[str, list[str]]:
    """Return the tools that a prompt of `PlainChatFormat` lists: the names of their parameters, keyed by name."""
    if not prompt.startswith(_TOOLS):
        return {}
    listed = prompt.removeprefix(_TOOLS).partition("<|stop|>")[0]
    return {name: [*filter(None, parameters.split(", "))] for name, parameters in _TOOL.findall(listed)}


def _always(kind: str, seen: _Seen) -> Script:
    """Return a policy whose every turn is a wrong call; it notes what it is asked for."""
    chat_format = PlainChatFormat()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        tools = shown_tools(chat_format.decode(request.token_ids.tolist()))
        seen.tools.update(tools)
        seen.has_form |= bool(request.sampling.grammar)
        return [*_REPLIES[kind](next(iter(tools), "")).encode(), STOP_TOKEN]

    return script


def _written(call: dict[str, object]) -> str:
    return f"<tool_call>{msgspec.json.encode(call).decode()}</tool_call>"
