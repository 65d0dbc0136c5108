"""What `env check` plays for an external agent that calls tools, and what it says about a fault of its program."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

import agentrl
from agentrl.testing import execution, new_process
from agentrl.testing.check import check_environment

LOOKUP = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
MAX_REPLIES = 6


async def chat(endpoint: agentrl.Endpoint, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "main", "messages": messages, **fields}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as client,
        client.post(f"{endpoint.url}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        message: dict[str, Any] = json.loads(await response.read())["choices"][0]["message"]
        return message


class Calling(agentrl.HarnessEnvironment):
    """Calls the tools that its model asks for, until it replies with text."""

    seats = ("main",)
    names = ("lookup",)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name} of {arguments['key'] + 1}"

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        tools = [{"type": "function", "function": {"name": name, "parameters": LOOKUP}} for name in self.names]
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.data["question"]}]
        for _ in range(MAX_REPLIES):
            message = await chat(endpoint, messages, **({"tools": tools} if tools else {}))
            messages.append(message)
            for call in message.get("tool_calls") or ():
                function = call["function"]
                try:
                    content = self.call(function["name"], json.loads(function["arguments"]))
                except Exception as error:  # noqa: BLE001 - as agent libraries do
                    content = f"Encountered error: {error}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                break
        return str(messages[-1]["content"])

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(len(str(episode.result)) % 2)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={"question": f"{split} {n}?", "n": 70 + n}) for n in range(8)]


def test_each_tool_of_an_external_agent_is_called_before_its_restart() -> None:
    many = type("Many", (Calling,), {"names": ("a", "b", "c", "d", "e"), "__module__": __name__})
    report = check_environment(many)
    assert report.passed, report.text
    assert not report.warnings
    assert report.figures["called"] == ["a", "b", "c", "d", "e"]
    assert report.figures["requests"]["main"] == 3 * report.figures["episodes"], "two calls and a text in each"
    assert "No tool was called" not in report.text


class Toolless(Calling):
    """Offers no tools."""

    names = ()


def test_episodes_without_a_tool_call_are_told() -> None:
    report = check_environment(Toolless)
    assert report.passed, report.text
    assert "No tool was called in these episodes, because no request offered one." in report.text


class Down(Calling):
    """Has a tool that always raises."""

    names = ("lookup", "other")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "lookup":
            raise RuntimeError("database is down")
        return "database is down"  # as libraries that leave out the type


class Picky(Calling):
    """Has a tool that refuses each argument by its value."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise KeyError(arguments["key"])


def test_a_tool_that_always_answers_with_the_same_error_is_named() -> None:
    report = check_environment(Down)
    (warning,) = [text for text in report.warnings if "same error" in text]
    number = report.figures["tool_calls"]["lookup"]
    assert f"tool lookup answered all of {number} calls with the same error" in warning
    assert "database is down" in warning
    assert report.figures["tool_errors"] == {"lookup": number}
    assert f"Tool other returned the same text in all of {number} calls: 'database is down'." in report.text
    assert not [text for text in check_environment(Picky).warnings if "same error" in text]


class Dicey(Calling):
    """Has a tool that returns another number each time."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return str(random.SystemRandom().getrandbits(64))


def test_a_tool_with_random_results_is_not_repeatable_rather_than_mixed() -> None:
    (finding,) = check_environment(Dicey).findings
    assert "after resuming, the request differs: turn 1 of seat 'main', new message 0, content: " in finding
    assert "mix" not in finding


class Rarely(Calling):
    """Returns a random number while episodes play in a new process, so that no restart in this one shows it."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if new_process._is_new_process:
            return str(random.SystemRandom().getrandbits(64))
        return super().call(name, arguments)


def test_episodes_at_once_are_not_accused_of_what_differs_between_executions_alone() -> None:
    (finding,) = check_environment(Rarely).findings
    assert "played several times alone with the same replies, sends another request: turn " in finding
    assert "mix" not in finding


class Hanging(Calling):
    """Waits for something that never comes, after its first reply."""

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        await chat(endpoint, [{"role": "user", "content": task.data["question"]}])
        return await self.never()

    async def never(self) -> str:
        return await asyncio.wait_for(asyncio.get_running_loop().create_future(), 10_000)


def test_an_agent_that_hangs_is_named_with_its_line_and_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PROGRAM_TIMEOUT_S", 1.0)
    monkeypatch.setattr(execution, "WAITING_S", 0.3)
    parts: list[str] = []
    report = check_environment(Hanging, on_progress=lambda phase, part: parts.append(part))
    line = Hanging.never.__code__.co_firstlineno + 1
    waits = f"waits at {__file__}:{line} in never, after 1 answered request"
    assert report.findings == [f"task 'train0': the program did not end within 1 s: it {waits}"]
    assert f"episode 1, task 'train0': {waits}" in parts


class Mistyped(Toolless):
    """Compares the text that `play` returns with a number."""

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result == task.data["n"])

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        tasks = super().tasks(split, seed=seed)
        return [agentrl.Task(id=task.id, data={**task.data, "answer": task.data["n"]}) for task in tasks]


class Typed(Mistyped):
    """Compares texts."""

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result == str(task.data["n"]))


class Unknown(Toolless):
    """Rewards what the tasks do not say."""

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 0.0


def test_a_reward_that_the_right_answer_does_not_win_is_told() -> None:
    warnings = check_environment(Mistyped).warnings
    assert any("earn no more than an empty reply (0): task 'train0' has '70'" in text for text in warnings), warnings
    assert not any("demonstrate" in text for text in warnings)
    typed = check_environment(Typed)
    assert typed.passed, typed.text
    assert "earn no more" not in typed.text
    equal = "All 4 rewards were equal (0.000), and the check knows no reply that earns more"
    assert equal not in typed.text
    assert equal in check_environment(Unknown).text


class APIError(Exception):
    """As clients name it."""


class APIConnectionError(APIError):
    """As clients derive it."""


@pytest.mark.parametrize(
    ("error", "is_asked"),
    [
        (ValueError("LLM must be a FunctionCallingLLM"), False),
        (RuntimeError("Missing credentials"), False),
        (APIConnectionError("Connection error."), True),
        (TimeoutError("timed out"), True),
    ],
)
def test_the_address_is_asked_for_only_where_it_may_be_the_cause(error: Exception, is_asked: bool) -> None:
    class Failing(Calling):
        async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
            raise error

    (finding,) = check_environment(Failing).findings
    assert f"the program failed before it got a reply: {type(error).__name__}: {str(error).rstrip('.')}" in finding
    assert ("Does it send its requests to endpoint.url?" in finding) == is_asked


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "endpoint.url already ends with /v1, which this request lacks"),
        ("/v1/v1/messages", "give them endpoint.url.removesuffix('/v1')"),
    ],
)
def test_an_address_with_too_few_or_many_versions_is_named(path: str, hint: str) -> None:
    class Misdirected(Calling):
        async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
            headers = {"Authorization": f"Bearer {endpoint.key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as client,
                client.post(endpoint.url.removesuffix("/v1") + path, json={}) as response,
            ):
                response.raise_for_status()
            return "done"

    (finding,) = check_environment(Misdirected).findings
    assert hint in finding
