"""What `env check` plays for agents that force calls and parse JSON, and what it says about their requests."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import pytest

import agentrl
from agentrl.cli.main import main
from agentrl.core.records import ToolSpec
from agentrl.gateway.calls import ChatRequest, ReplyForm, ToolChoice
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.external.reply_grammar import reply_grammar
from agentrl.testing.check import check_environment
from agentrl.testing.execution import text_of_grammar
from agentrl.testing.wrong_calls import PLAIN_TEXT
from tests.unit.test_chat_format import QWEN_SPECIAL, write_model
from tests.unit.test_tools_in_system import PLAIN

PLAN = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "minItems": 1},
        "mood": {"enum": ["calm", "hasty"]},
        "budget": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 9}, {"type": "null"}]},
    },
    "required": ["steps", "mood", "budget"],
    "additionalProperties": False,
    "$defs": {
        "Step": {
            "type": "object",
            "properties": {"title": {"type": "string", "maxLength": 8}},
            "required": ["title"],
            "additionalProperties": False,
        }
    },
}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
SAY = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def tool(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Asking(agentrl.HarnessEnvironment):
    """Sends requests with the same message; `read` gets each reply's message."""

    seats = ("main",)
    sent: ClassVar[list[dict[str, Any]]] = []

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as client:
            for fields in self.sent:
                body = {"model": "main", "messages": [{"role": "user", "content": task.data["question"]}], **fields}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    reply = json.loads(await response.read())
                self.read(fields, reply["choices"][0]["message"])
        return "done"

    def read(self, fields: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        pass

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={"question": f"{split} {n}?"}) for n in range(4)]


class Insisting(Asking):
    """Forces calls and JSON, and trusts the replies."""

    sent: ClassVar[list[dict[str, Any]]] = [
        {"tools": [tool("add", ADD), tool("say", SAY)], "tool_choice": "required", "max_tokens": 64},
        {
            "tools": [tool("add", ADD), tool("say", SAY)],
            "tool_choice": {"type": "function", "function": {"name": "say"}},
        },
        {"tools": [tool("add", ADD)], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}}},
    ]

    def read(self, fields: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        choice = fields.get("tool_choice")
        form = fields.get("response_format")
        if choice == "none":
            assert not message.get("tool_calls")
        elif choice is not None:
            (call,) = message["tool_calls"]
            name = call["function"]["name"]
            assert name == "say" or choice == "required"
            jsonschema.validate(json.loads(call["function"]["arguments"]), {"add": ADD, "say": SAY}[name])
        if form is not None:
            value = json.loads(message["content"])
            assert isinstance(value, dict)
            if form["type"] == "json_schema":
                jsonschema.validate(value, PLAN)


def test_an_agent_that_forces_calls_and_parses_json_passes() -> None:
    report = check_environment(Insisting)
    assert report.passed, report.text
    assert report.figures["episodes"] == 4
    assert PLAIN_TEXT in report.figures["wrong_calls"]["kinds"]
    (warning,) = [text for text in report.warnings if "wrong tool calls ended" in text]
    assert PLAIN_TEXT in warning, "a model may still write text instead, and training would drop the episode"
    assert "failed_reward = 0.0" in warning


def test_replies_to_any_forced_call_fit_its_schema() -> None:
    """Judged by another library; in 200 draws each alternative comes up."""
    specs = [
        ToolSpec(name="plan", description="", parameters=PLAN),
        ToolSpec(name="add", description="", parameters=ADD),
    ]
    called = set()
    for seed in range(200):
        request = ChatRequest(
            model="main",
            messages=[],
            tools=specs,
            tool_choice=ToolChoice("required" if seed % 2 else "auto"),
            reply_form=ReplyForm("json_schema", json.dumps(PLAN)),
        )
        grammar = reply_grammar(request, PlainChatFormat.call_frame)
        text = text_of_grammar(grammar, random.Random(seed))
        message = PlainChatFormat().parse(text.encode())
        if not message.tool_calls:
            assert not seed % 2
            jsonschema.validate(json.loads(text), PLAN)
            continue
        (call,) = message.tool_calls
        called.add((call.name, seed % 2))
        jsonschema.validate(call.arguments, {"plan": PLAN, "add": ADD}[call.name])
    assert called == {(name, forced) for name in ("plan", "add") for forced in (0, 1)}


# --- all findings of the requests -------------------------------------------------------------------------------------


class Stumbling(Asking):
    """Asks for what is not trained, and then fails over the reply."""

    sent: ClassVar[list[dict[str, Any]]] = [{"temperature": 0, "logit_bias": {"1": 1}}]

    def read(self, fields: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        raise KeyError("answer")


def test_requests_of_an_episode_that_fails_are_judged_too() -> None:
    report = check_environment(Stumbling)
    assert any("with logit_bias will be refused" in text for text in report.findings)
    assert any("asked for temperature 0" in text for text in report.warnings)


# --- where the user's code failed -------------------------------------------------------------------------------------


def test_a_program_that_fails_in_every_episode_is_named_with_its_line() -> None:
    line = Stumbling.read.__code__.co_firstlineno + 1
    place = f"KeyError: 'answer' at {__file__}:{line} in read"
    (failure,) = [text for text in check_environment(Stumbling).findings if "the program failed" in text]
    assert place in failure.partition("\n")[0]
    excused = type("Excused", (Stumbling,), {"failed_reward": 0.0, "__module__": __name__})
    (fault,) = [text for text in check_environment(excused).findings if "failed in all of 4 episodes" in text]
    assert place in fault


COMMAND = """
import json, os, urllib.request

def ask():
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        b'{"model": "main", "messages": [{"role": "user", "content": "?"}]}',
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.loads(urllib.request.urlopen(request).read())

def read(reply):
    return json.loads(reply["text"])

read(ask())
"""


def test_so_is_a_command(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COMMAND)
    excused = type(
        "Command",
        (Asking,),
        {
            "play": agentrl.HarnessEnvironment.play,
            "command": [sys.executable, str(program)],
            "failed_reward": 0.0,
            "__module__": __name__,
        },
    )
    (fault,) = [text for text in check_environment(excused).findings if "failed in all of 4 episodes" in text]
    assert f"exit status 1 (KeyError: 'text') at {program}:11 in read" in fault


class Dividing(agentrl.Environment):
    """Divides by zero in an effect."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("?"))
        ctx.agent("agent").reward(float(await ctx.effect("divide", lambda: 1 // 0)))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={"n": f"{split}{n}"}) for n in range(4)]


class Wordy(Dividing):
    """Gives text for a reward."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("?"))
        ctx.agent("agent").reward("good")  # type: ignore[arg-type]


class Undecided(agentrl.ToolEnvironment):
    """Returns no reward."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return None  # type: ignore[return-value]

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={"question": f"{split}{n}"}) for n in range(4)]


@pytest.mark.parametrize(
    ("environment", "line", "function"),
    [
        (Dividing, Dividing.run.__code__.co_firstlineno + 2, "<lambda>"),
        (Wordy, Wordy.run.__code__.co_firstlineno + 2, "run, calling reward()"),
        (Undecided, Undecided.reward.__code__.co_firstlineno, "reward"),
    ],
)
def test_a_failing_effect_and_a_bad_reward_are_named_with_their_line(
    environment: type[agentrl.Environment], line: int, function: str
) -> None:
    (finding,) = check_environment(environment).findings
    assert f" at {__file__}:{line} in {function}" in finding.partition("\n")[0]


class Patient(Undecided):
    """Waits in the event loop before it answers a call of a tool that does not exist."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        turn = await agent.act(agentrl.user(ctx.task.data["question"]))
        if turn.tool_calls:
            time.sleep(1.5)  # noqa: ASYNC251
        agent.reward(float(turn.text == "yes"))


def test_code_that_blocks_the_loop_after_a_wrong_call_only_is_named() -> None:
    line = Patient.run.__code__.co_firstlineno + 4
    (finding,) = [text for text in check_environment(Patient).findings if "event loop has been blocked" in text]
    assert f"by {__file__}:{line} in run: `time.sleep(1.5)" in finding


# --- tools that a chat template hides ---------------------------------------------------------------------------------

AGENT = """
import json, urllib.request
import agentrl
from asyncio import to_thread

class Agent(agentrl.HarnessEnvironment):
    seats = ("main",)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]

    async def play(self, task, endpoint):
        return await to_thread(self.ask, task, endpoint)

    def ask(self, task, endpoint):
        body = {"model": "main", "messages": [{"role": "user", "content": "?"}], "tools": self.tools}
        request = urllib.request.Request(endpoint.url + "/chat/completions", json.dumps(body).encode(),
            {"Authorization": "Bearer " + endpoint.key})
        return urllib.request.urlopen(request).read().decode()

    def reward(self, task, episode):
        return 1.0

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}{n}", data={"n": f"{split}{n}"}) for n in range(4)]

class Plain(Agent):
    tools = []
"""


def test_tools_that_requests_offer_and_the_template_hides_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", PLAIN, QWEN_SPECIAL)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    config = f'environment.id = "agent.py:Agent"\nmodel.path = "{model}"\n[policies.solver]\n'
    (tmp_path / "run.toml").write_text(config)

    def told(*arguments: str) -> str:
        assert main(["env", "check", *arguments]) == 0
        return capsys.readouterr().out

    hidden = "WARNING the chat template of solver ignores tools, so the model never sees look_up"
    assert hidden in told("run.toml")
    assert "ignores tools" in told("agent.py:Agent", "--model", str(model))
    assert "ignores tools" not in told("run.toml", "--model.tools_in=system")
    assert "ignores tools" not in told("run.toml", "--environment.id=agent.py:Plain"), "no request offers a tool"
    assert "ignores tools" not in told("agent.py:Agent")
    gone = told("run.toml", "--model.path=nobody/nothing-of-this-name")
    assert "Whether nobody/nothing-of-this-name sees the tools is unknown" in gone
