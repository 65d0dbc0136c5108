"""External agents: what they ask, what they get, and what the journal holds of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import aiohttp
import pytest

import agentrl
from agentrl.core.errors import EpisodeError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, Score, ScoreRequest, SeatBinding
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of, resolve
from agentrl.journal.entries import REQUEST_VERSION, BeginEntry, JournalEntry, TurnEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.orchestrator.group_scores import conversations
from agentrl.rollout.calls.journal import CallJournal, Prefix
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.external.agent import cut_at_text
from agentrl.testing.check import check_environment
from agentrl.testing.execution import PARTITION, POLICY, StandInScorer, plain_rollout_settings, wire_dispatcher
from tests.markdown_pages import ROOT, python_of
from tests.support.builders import make_completion
from tests.unit.episodes import Played, play

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    }
]

LONG_TOOLS = [{"type": "function", "function": {"name": "a", "description": "b" * 300_000}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Loop(agentrl.HarnessEnvironment):
    """A coroutine that asks; subclasses say what."""

    seats = ("main",)

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0 if episode.error is None else -1.0

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as client:
            return await self.loop(client, endpoint)

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        raise NotImplementedError


async def ask(
    client: aiohttp.ClientSession, endpoint: agentrl.Endpoint, messages: Sequence[Any], **more: Any
) -> tuple[int, dict[str, Any]]:
    body = {"model": "main", "messages": messages, **more}
    async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
        return response.status, json.loads(await response.read())


def turns(played: Played) -> list[TurnEntry]:
    return [entry for entry in played.entries if isinstance(entry, TurnEntry)]


def outside_spec(environment: type[agentrl.Environment]) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e0",
        environment=name_of(environment),
        task=agentrl.Task(id="t", data={}),
        seed=1,
        seats={"main": SeatBinding(POLICY)},
        group_id="g0",
    )


class ToolLoop(Loop):
    """An ordinary loop with one tool."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        messages: list[Any] = [user("1 + 2?")]
        while True:
            _, reply = await ask(client, endpoint, messages, tools=TOOLS)
            choice = reply["choices"][0]
            messages.append(choice["message"])
            if choice["finish_reason"] != "tool_calls":
                return messages[-1]["content"]
            for call in choice["message"]["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(sum(arguments.values()))})


def test_a_loop_with_a_tool_is_one_row_of_what_was_sampled() -> None:
    played = play(ToolLoop, [CALL, "3"])
    assert played.header.drop_reason is None
    assert (played.header.reward, played.header.turns, played.header.stop_reason) == (1.0, 2, "completed")
    first, second = turns(played)
    assert (first.row, second.row, second.parent_context) == (
        0,
        0,
        len(first.context_ids + first.tokens.token_ids) // 4,
    )
    assert played.seen[1][: len(played.seen[0])] == played.seen[0]
    assert second.text.startswith("3")


class Branching(Loop):
    """Sub-agents and an edited history: three rows, one reward."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        _, first = await ask(client, endpoint, [user("a")])
        await ask(client, endpoint, [user("sub-agent")])
        history = [user("a"), first["choices"][0]["message"]]
        await ask(client, endpoint, [*history, user("b")])
        await ask(client, endpoint, [*history, user("c")])


def test_rows_of_an_episode_are_one_trajectory_with_one_reward() -> None:
    played = play(Branching, ["one", "two", "three", "four"])
    assert [entry.row for entry in turns(played)] == played.rows == [0, 1, 0, 2]
    assert [(t.reward, t.tokens) for t in played.header.trajectories] == [(1.0, 4 + 4 + 6 + 5)]
    assert {name: value for name, value in played.metrics.items() if name.startswith("rows/")} == {
        "rows/conversation": 1.0,
        "rows/branch": 1.0,
    }


class Compared(Branching):
    """Two replies to one request besides, and the first row again."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        await super().loop(client, endpoint)
        _, replies = await ask(client, endpoint, [user("d")], n=2)
        first = replies["choices"][0]["message"]
        await ask(client, endpoint, [user("sub-agent"), {"role": "assistant", "content": "two"}, user("e")])
        await ask(client, endpoint, [user("d"), first, user("f"), {"role": "assistant", "content": "?"}, user("g")])


def test_scorers_see_the_conversation_of_each_request() -> None:
    seen: dict[tuple[str, int], list[str]] = {}

    class Seeing(StandInScorer):
        async def score(self, request: ScoreRequest) -> Score:
            seen[self.per, request.scored.number] = [message.content for message in request.scored.messages]
            return await super().score(request)

    played = play(
        Compared,
        ["one", "two", "three", "four", "five", "six", "seven", "eight"],
        scorers=[Seeing("each"), Seeing("last", per="episode")],
    )
    expected = [
        ["a", "one"],
        ["sub-agent", "two"],
        ["a", "one", "b", "three"],
        ["a", "one", "c", "four"],
        ["d", "five"],
        ["d", "six"],
        ["sub-agent", "two", "e", "seven"],
        ["d", "five", "f", "?", "g", "eight"],
    ]
    assert [seen["turn", number] for number in range(8)] == expected
    assert seen["episode", 7] == expected[-1]
    bodies = turns(played)
    for number in range(8):  # as scorers of groups see them
        entries: list[Any] = [SimpleNamespace(decode=lambda body=body: body) for body in bodies[: number + 1]]
        found = conversations(entries, outside_spec(Compared), [POLICY], lambda _: PlainChatFormat())
        assert [message.content for message in found["main", 0].messages] == expected[number]


class Durable(Loop):
    """Looks, as it gets each reply, what of the journal would survive a crash."""

    journal: ClassVar[MemoryJournal]
    on_disk: ClassVar[list[str]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for text in "ab":
            _, reply = await ask(client, endpoint, [user(text)])
            entries = [entry.decode() for entry in self.journal.turn_log(PARTITION).read("e0", 0)]
            self.on_disk.append(entries[-1].text if isinstance(entries[-1], TurnEntry) else "no turn")
            assert reply["choices"][0]["message"]["content"] in self.on_disk[-1]


def test_a_client_gets_a_reply_once_it_is_on_disk() -> None:
    """Killed at any time later, the episode holds what its client saw: nothing that was seen is sampled again."""
    Durable.journal, said = MemoryJournal(), iter((b"one", b"two"))

    async def played() -> None:
        engine = ScriptedEngine(
            lambda request, policy, version: [*next(said), STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)}
        )
        dispatcher, _ = wire_dispatcher(Durable, engine, Durable.journal, plain_rollout_settings(), [])
        dispatcher.worker.submit(outside_spec(Durable), lambda header: None)
        await dispatcher.worker.drain()

    asyncio.run(played())
    assert Durable.on_disk == ["one<|stop|>", "two<|stop|>"]


def answered_call(call_id: str) -> list[dict[str, Any]]:
    call = {"id": call_id, "function": {"name": "add"}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "tool_call_id": call_id}]


class Refused(Loop):
    """Asks for what a run does not have."""

    asked: ClassVar[Mapping[str, Any]] = {}
    answers: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        self.answers.append(await ask(client, endpoint, **{"messages": [user("a")], **self.asked}))


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"logit_bias": {"1": 1}}, 400, "logit_bias"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "image_url"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": ["x"], "content": "b"}]}, 400, "role"),
        ({"messages": "hello"}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 1000}, 400, "n is 1000"),
        ({"messages": [user("a" * 5000)]}, 400, "context"),
        ({"messages": [user("")] * 5000}, 400, "context"),
        ({"messages": answered_call("a" * 300_000)}, 400, "tool call id of 300000 characters"),
        ({"tools": [{"function": {"name": "a" * 300_000}}]}, 400, "name of 300000 characters"),
        ({"tools": [{"function": {"name": "a"}}] * 5000}, 400, "context"),
        (
            {"messages": [user("a")], "tools": [{"function": {"name": "a", "description": "b" * 300_000}}]},
            400,
            "context",
        ),
    ],
)
def test_what_a_run_cannot_honour_is_refused_in_words(asked: Mapping[str, Any], status: int, says: str) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    environment = type("Asked", (Refused,), {"asked": asked, "answers": answers, "__module__": __name__})
    play(environment, ["x"])
    assert answers[0][0] == status
    assert says in answers[0][1]["error"]["message"]


class NamedModels(Loop):
    """Asks for models by several names; what is refused comes last."""

    answers: ClassVar[list[tuple[int, Any]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        self.answers.append(await ask(client, endpoint, [user("a")], model="openai/small"))
        keyed = {"Authorization": f"Bearer {endpoint.keys['main']}"}
        async with aiohttp.ClientSession(headers=keyed) as of_main:
            self.answers.append(await ask(of_main, endpoint, [user("a")], model="gpt-4o-mini"))
        for model in ("gpt-4o-mini", "openai/gpt-4o"):
            self.answers.append(await ask(client, endpoint, [user("a")], model=model))
        raise ValueError("it gives up")


@pytest.mark.parametrize(
    ("seats", "aliases", "statuses", "line"),
    [
        (("main",), (), [200, 200, 200, 200], ""),
        (("main",), ["gpt-4o-mini"], [200, 200, 200, 200], ""),
        (("main", "small"), {}, [200, 200, 404, 404], 'aliases = {"openai/gpt-4o": "main"}'),
        (
            ("main", "small"),
            {"gpt-4o-mini": "small"},
            [200, 403, 200, 404],
            'aliases = {"gpt-4o-mini": "small", "openai/gpt-4o": "main"}',
        ),
        (("main", "small"), {"main": ["gpt-4o"], "small": ("gpt-4o-mini",)}, [200, 403, 200, 200], ""),
    ],
)
def test_a_model_name_is_the_only_seat_or_that_of_an_alias(
    seats: tuple[str, ...], aliases: Any, statuses: list[int], line: str
) -> None:
    answers: list[tuple[int, Any]] = []
    changes = {"seats": seats, "aliases": aliases, "answers": answers, "__module__": __name__}
    said = play(type("Named", (NamedModels,), changes), ["x"] * 4).said
    assert [status for status, _ in answers] == statuses
    messages = [answer["error"]["message"] for status, answer in answers if status == 404]
    told = f"`{line}` in the environment's class"
    assert [told in message for message in messages[-1:]] == [True] * bool(line)
    assert (told in said) == bool(line)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("aliases", {"gpt-4o-mini": "man"}, "'man' is no seat; the seats are 'main', 'small'"),
        ("aliases", {"main": "gpt-4o-mini"}, "'gpt-4o-mini' is no seat"),
        ("aliases", {"man": ["gpt-4o-mini"]}, "'man' is no seat"),
        ("aliases", {"main": ["gpt-4o"], "small": ["gpt-4o"]}, "'gpt-4o' is not one name of one model"),
        ("aliases", {"small": "main"}, "'small' is not one name of one model"),
        ("aliases", {3: "main"}, "3 is not one name"),
        ("aliases", {"gpt-4o-mini": 3}, "3 is no seat"),
        ("aliases", {"gpt-4o-mini": {}}, "{} is no seat"),
        ("aliases", ["gpt-4o-mini"], "gives no seat"),
        ("aliases", "gpt-4o-mini", "gives no seat"),
        ("aliases", None, "gives no seat"),
        ("ignored_fields", ("temperature"), 'is one text; write `ignored_fields = ["temperature"]`'),
        ("command", "python agent.py", 'is one text; write `command = ["python", "agent.py"]`'),
    ],
)
def test_an_attribute_of_another_form_is_refused_with_the_line_to_write(name: str, value: Any, words: str) -> None:
    environment = type("Misnamed", (Loop,), {"seats": ("main", "small"), name: value, "__module__": __name__})
    report = check_environment(environment)
    assert f"Misnamed.{name}" in report.text
    assert words in report.text
    if name == "aliases":
        assert f"Misnamed.aliases = {value!r}" in report.text
        assert '`aliases = {"gpt-4o-mini": "main"}`, or `aliases = {"main": ["gpt-4o-mini"]}`' in report.text


class Keys(Loop):
    """Keys of two seats, none, another's, and one in the address."""

    seats = ("main", "small")
    statuses: ClassVar[list[int]] = []

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        statuses = self.statuses
        async with aiohttp.ClientSession() as client:

            async def get(key: str, **headers: str) -> None:
                url = endpoint.url.replace("/v1", f"{key}/v1/models")
                async with client.get(url, headers=headers) as response:
                    statuses.append(response.status)

            await get("")
            await get("", Authorization="Bearer sk-other")
            await get("", **{"x-api-key": endpoint.key})
            await get(f"/key/{endpoint.keys['small']}")
            await get(f"/key/{endpoint.key}", Origin="https://page.example")
            await get(f"/key/{endpoint.key}", Host="page.example")
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.keys["small"]}) as client:
            statuses.append((await ask(client, endpoint, [user("a")]))[0])
            statuses.append((await ask(client, endpoint, [user("a")], model="openai/small"))[0])


def test_a_key_admits_to_its_own_seats_from_programs_of_this_machine() -> None:
    Keys.statuses.clear()
    assert play(Keys, ["x"]).header.turns == 1
    assert Keys.statuses == [401, 401, 200, 200, 403, 403, 403, 200]


class Streaming(Loop):
    """Reads a stream."""

    events: ClassVar[list[Any]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        body = {
            "model": "main",
            "messages": [user("a")],
            "tools": TOOLS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        self.events.extend(map(json.loads, lines[:-1]))


def test_a_stream_holds_text_calls_and_true_counts() -> None:
    Streaming.events.clear()
    played = play(Streaming, [f"well{CALL}"])
    deltas = [event["choices"][0]["delta"] for event in Streaming.events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "well"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("add", {"a": 1, "b": 2})
    ]
    usage = Streaming.events[-1]["usage"]
    assert usage["completion_tokens"] == len(turns(played)[0].tokens)
    assert usage["prompt_tokens"] == len(turns(played)[0].context_ids) // 4


class Stopping(Loop):
    """Ends replies at a text."""

    said: ClassVar[list[Any]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        _, first = await ask(client, endpoint, [user("a")], stop=["END"])
        self.said.append(first["choices"][0])
        await ask(client, endpoint, [user("a"), first["choices"][0]["message"], user("b")], stop=["END"])


def test_a_stop_text_ends_the_tokens_that_are_kept_too() -> None:
    Stopping.said.clear()
    played = play(Stopping, ["one END two", "three"])
    assert Stopping.said[0]["message"]["content"] == "one "
    assert Stopping.said[0]["finish_reason"] == "stop"
    first, second = turns(played)
    assert (first.text, first.finish_reason, second.row) == ("one END", "length", 0)
    held = bytes(token for token in played.seen[1] if token < 256)
    assert b"one END" in held
    assert b"two" not in held


def test_the_token_that_ends_a_turn_is_no_stop_text() -> None:
    """Programs written for other servers name it; cut there, the reply would count as cut, and the token come twice."""

    def decode(token_ids: Sequence[int]) -> str:
        return "".join({5: "one ", 6: "END", 7: "<|im_end|>"}[token] for token in token_ids)

    stops = ["<|im_end|>", "END"]
    assert cut_at_text(make_completion([5, 7]), stops, decode) is None
    cut = cut_at_text(make_completion([5, 6, 7]), stops, decode)
    assert cut is not None
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([5, 6], "length")


class Retrying(Loop):
    """Goes away in the middle of a call, and asks again."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        body = {"model": "main", "messages": [user("a")], "stream": True}
        response = await client.post(f"{endpoint.url}/chat/completions", json=body)
        response.close()
        replies = []
        for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}, {}):
            async with client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as answer:
                replies.append(json.loads((await answer.read()).split(b"\n\n")[0].removeprefix(b"data: "))["id"])
        return replies


def test_retries_get_the_reply_of_their_call_and_equal_requests_their_own() -> None:
    played = play(Retrying, ["one", "two", "three", "four"])
    assert played.header.turns in (3, 4)  # the first may have been whole before its client went away


class SameKey(Loop):
    """Sends one `Idempotency-Key` with two requests."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for text in "ab":
            body = {"model": "main", "messages": [user(text)]}
            await client.post(f"{endpoint.url}/chat/completions", json=body, headers={"Idempotency-Key": "k"})


def test_another_request_with_the_same_key_is_a_call_of_its_own() -> None:
    assert play(SameKey, ["one", "two"]).header.turns == 2


class Reusing(Loop):
    """Reuses the idempotency key of another seat's call, with a key that does not admit to that seat."""

    seats = ("main", "small")
    model = ""
    """Name of the model in both requests; empty: each names its seat."""
    said: ClassVar[list[str]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for seat in self.seats:
            headers = {"Authorization": f"Bearer {endpoint.keys[seat]}", "Idempotency-Key": "1"}
            body = {"model": self.model or seat, "messages": [user("a")]}
            async with client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as answer:
                self.said.append((await answer.json())["choices"][0]["message"]["content"])


def test_an_idempotency_key_is_of_one_request() -> None:
    Reusing.said.clear()
    play(Reusing, ["secret of main", "of small"])
    assert Reusing.said == ["secret of main", "of small"]


class Alike(Reusing):
    """Lets two seats send the same request: with a key of one seat, any name of a model is that seat."""

    model = "gpt-4o"


def test_no_seat_gets_the_reply_of_another() -> None:
    Reusing.said.clear()
    play(Alike, ["secret of main", "of small"])
    assert Reusing.said == ["secret of main", "of small"]


class Several(Loop):
    """Asks for more replies at once than the episode has turns left."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        body = {"model": "main", "messages": [user("a")], "n": 50}
        async with client.post(f"{endpoint.url}/chat/completions", json=body) as answer:
            return answer.status


def test_all_replies_of_a_request_are_given_or_none_is_sampled() -> None:
    header = play(Several, ["one"] * 50).header
    assert (header.turns, header.stop_reason) == (0, "max_turns")


class Limited(Loop):
    """Asks until it is refused."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        status, asked = 200, 0
        while status == 200:
            status, _ = await ask(client, endpoint, [user(str(asked := asked + 1))])
        return asked


def test_a_limit_refuses_the_request_and_truncates_the_episode() -> None:
    played = play(Limited, ["a", "b", "c"], max_turns=2)
    assert (played.header.stop_reason, played.header.turns, played.header.reward) == ("max_turns", 2, 1.0)


class Hung(Loop):
    """Asks once and then hangs."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        await ask(client, endpoint, [user("a")])
        await asyncio.Event().wait()


def test_a_program_that_hangs_is_ended_by_the_time_limit() -> None:
    played = play(Hung, ["a"], episode_timeout_s=0.3)
    assert (played.header.stop_reason, played.header.turns, played.header.reward) == ("time_limit", 1, -1.0)


class Failing(Loop):
    """Raises after a turn."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        await ask(client, endpoint, [user("a")])
        raise ValueError("of the program")


def test_a_program_that_fails_is_an_error_unless_its_environment_says_otherwise() -> None:
    assert play(Failing, ["a"]).header.drop_reason == "environment_error"
    environment = type("Penalised", (Failing,), {"failed_reward": -2.0, "__module__": __name__})
    assert play(environment, ["a"]).header.reward == -2.0


PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "main", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
reply = json.load(urllib.request.urlopen(request))
open("answer.txt", "w").write(reply["choices"][0]["message"]["content"])
"""


class Command(agentrl.HarnessEnvironment):
    """A child process."""

    seats = ("main",)
    command = (sys.executable, "-c", PROGRAM, "{task.question} ({task.id})")

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        assert episode.directory is not None
        return float((episode.directory / "answer.txt").read_text() == "yes")


def test_a_command_line_is_an_agent() -> None:
    played = play(Command, ["yes"], data={"question": "well?"})
    assert played.header.reward == 1.0
    assert "well? (t)" in bytes(token for token in played.seen[0] if token < 256).decode()


class Extended(Command):
    """Returns more than the command does."""

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        return {"log": await super().play(task, endpoint), "n": 3}

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result["n"])


def test_what_play_returns_may_contain_what_the_command_returned() -> None:
    assert play(Extended, ["yes"], data={"question": "well?"}).header.reward == 3.0


def test_a_command_that_is_killed_begins_again_with_the_same_replies() -> None:
    program = (
        PROGRAM
        + "\nif 'yes' == open('answer.txt').read() and not os.path.exists(sys.argv[2]):\n"
        + ("    open(sys.argv[2], 'w').close(); os.kill(os.getpid(), 9)\n")
    )
    with tempfile.TemporaryDirectory() as directory:
        command = (sys.executable, "-c", program, "?", str(Path(directory, "killed")))
        environment = type("Killed", (Command,), {"command": command, "__module__": __name__})
        played = play(environment, ["yes", "another"])
    assert (played.header.attempt, played.header.reward, len(played.seen)) == (1, 1.0, 1)
    assert played.metrics["replies/recalled"] == 1.0
    assert [entry.turn for entry in turns(played)] == [0]


class Stable(Loop):
    """Asks twice, with a date."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        messages = [user(f"It is 2026-11-2{next(DAYS)}.")]
        for _ in range(2):
            _, reply = await ask(client, endpoint, messages)
            messages += [reply["choices"][0]["message"], user("and?")]

    @classmethod
    def tasks(cls, split: object, *, seed: int = 0) -> list[agentrl.Task]:
        return [agentrl.Task(id="t", data={})]


class Unstable(Stable):
    """Asks something else each time."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        await ask(client, endpoint, [user(f"number {next(DAYS)} of many")])


DAYS = itertools.cycle(range(10))


def test_the_checker_begins_programs_again_and_names_what_they_ask_otherwise() -> None:
    passed = check_environment(Stable)
    assert (passed.findings, passed.figures["resume_class"]) == ([], "replay")
    (finding,) = check_environment(Unstable).findings
    assert re.search(r"turn 0 of seat 'main'.*content: 'number \d of many', now 'number \d of many'", finding)
    assert check_environment(type("Declared", (Unstable,), {"replay_stable": False, "__module__": __name__})).passed


async def _forked(
    environment: type[agentrl.Environment], at: int
) -> tuple[list[list[int]], EpisodeHeader, list[TurnEntry]]:
    """An episode, forked at a turn: what the engine saw, the fork's end and its own turns."""
    journal, seen, ended = MemoryJournal(), list[list[int]](), list[EpisodeHeader]()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        seen.append(request.token_ids.tolist())
        return [*str(len(seen)).encode(), STOP_TOKEN]

    engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    dispatcher, _ = wire_dispatcher(environment, engine, journal, plain_rollout_settings(), [])
    spec = outside_spec(environment)
    dispatcher.worker.submit(spec, ended.append)
    await dispatcher.worker.drain()
    log = journal.turn_log(PARTITION)
    forked = [entry.call_id for entry in log.read("e0", 0) if isinstance(entry.decode(), TurnEntry)][at]
    point = ForkPoint(journal=".", partition=PARTITION, episode_id="e0", attempt=0, call_id=forked)
    dispatcher.worker.submit(replace(spec, episode_id="f0", purpose="fork", fork=point), ended.append)
    await dispatcher.worker.drain()
    bodies = [entry.decode() for entry in log.read("f0", 0)]
    return seen, ended[1], [body for body in bodies if isinstance(body, TurnEntry)]


def test_a_fork_runs_the_program_again_over_the_turns_before_it() -> None:
    seen, header, own = asyncio.run(_forked(Stable, 1))
    assert (header.drop_reason, header.turns, len(seen)) == (None, 2, 3)
    assert seen[2] == seen[1]
    assert [(turn.turn, turn.text) for turn in own] == [(1, "3<|stop|>")]


class Unordered(Stable):
    """Parallel conversations, begun in another order each time."""

    forwards: ClassVar[bool] = False

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        type(self).forwards = not self.forwards
        numbers = range(4) if self.forwards else range(3, -1, -1)
        asking = []
        for number in numbers:
            asking.append(asyncio.create_task(ask(client, endpoint, [user(f"{number}?")])))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asking)


def test_a_fork_of_parallel_conversations_takes_them_in_the_order_of_its_parent() -> None:
    seen, header, own = asyncio.run(_forked(Unordered, 3))
    assert (header.drop_reason, header.turns, len(seen)) == (None, 4, 5)
    assert seen[4] == seen[3]
    assert [(turn.turn, turn.row, turn.text) for turn in own] == [(3, 3, "5<|stop|>")]


class Reviews(Stable):
    """Parallel sub-agents whose requests differ in volatile text alone, in another order after a kill."""

    orders: ClassVar[list[str]] = []
    replies: ClassVar[list[dict[str, str]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        self.replies.append({})
        for name in self.orders.pop(0):
            _, reply = await ask(client, endpoint, [user(f"Review /tmp/{name}.py")])
            self.replies[-1][name] = reply["choices"][0]["message"]["content"]
        if self.orders:
            raise EpisodeError("killed", reason="harness_killed", begin_again=True)


def test_a_request_gets_the_reply_to_the_same_text_even_if_it_is_volatile() -> None:
    Reviews.orders, Reviews.replies = ["ab", "cba"], []
    played = play(Reviews, ["good", "bad", "new"])
    assert Reviews.replies == [{"a": "good", "b": "bad"}, {"c": "good", "b": "bad", "a": "new"}]
    Reviews.orders, Reviews.replies = ["ab", "ba", "abb"], []
    played = play(Reviews, ["good", "bad", "third"])
    assert Reviews.replies[:2] == [{"a": "good", "b": "bad"}] * 2
    assert Reviews.replies[2] == {"a": "good", "b": "third"}
    assert played.header.turns == 3


class Refusing(Stable):
    """Ends in an error, then kills itself, then goes on; the journal of an episode is kept."""

    ends: ClassVar[list[str]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        _, reply = await ask(client, endpoint, [user("go?")])
        end = self.ends.pop(0)
        if end == "error":
            raise RuntimeError(end)
        if end == "killed":
            raise EpisodeError("killed", reason="harness_killed", begin_again=True)
        return reply["choices"][0]["message"]["content"]


def test_replies_of_an_attempt_that_ended_in_an_error_are_not_given_again() -> None:
    Refusing.ends = ["error", "killed", "well"]
    played = play(Refusing, ["bad", "good", "never"], attempts=2)
    assert (played.header.attempt, played.header.reward, len(played.seen)) == (2, 1.0, 2)
    assert [turn.text for turn in turns(played)] == ["good<|stop|>"]
    begin = played.entries[0]
    assert isinstance(begin, BeginEntry)
    assert begin.recalls_from == 1


class Departing(Stable):
    """Is killed after its first reply, and then asks for something else."""

    ends: ClassVar[list[str]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        end = self.ends.pop(0)
        await ask(client, endpoint, [user(f"Today is {end}.")])
        if end == "Monday":
            raise EpisodeError("killed", reason="harness_killed", begin_again=True)


def test_an_attempt_that_asks_otherwise_than_the_one_before_says_where() -> None:
    Departing.ends = ["Monday", "Tuesday"]
    played = play(Departing, ["one", "two"])
    assert (played.header.attempt, played.header.reward, len(played.seen)) == (1, 1.0, 2)
    assert "turn 0 of seat 'main', new message 0, content: 'Today is Monday.', now 'Today is Tuesday.'" in played.told


class Otherwise(Departing):
    """Asks the same in other words: another limit, stop text or tool."""

    asked: ClassVar[list[Mapping[str, Any]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        end, more = self.ends.pop(0), self.asked.pop(0)
        _, first = await ask(client, endpoint, [user("a")], tools=TOOLS)
        history = [user("a"), first["choices"][0]["message"], user("b")]
        await ask(client, endpoint, history, **{"tools": TOOLS, **more})
        if end == "Monday":
            raise EpisodeError("killed", reason="harness_killed", begin_again=True)


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ({"max_tokens": 20}, {"max_tokens": 30}, "turn 1 of seat 'main', max_tokens: 20, now 30;"),
        ({"stop": ["one"]}, {"stop": "two"}, "turn 1 of seat 'main', stop: ('one',), now ('two',);"),
        ({}, {"tools": [{"function": {"name": "sum"}}]}, """turn 1 of seat 'main', tools: '[["add", "", {"""),
    ],
)
def test_what_is_asked_otherwise_than_in_messages_is_told_with_both_values(
    first: Mapping[str, Any], then: Mapping[str, Any], told: str
) -> None:
    Otherwise.ends, Otherwise.asked = ["Monday", "Tuesday"], [first, then]
    played = play(Otherwise, ["one", "two", "three"])
    assert (played.header.attempt, played.header.reward, len(played.seen)) == (1, 1.0, 3)
    assert told in played.told


async def _resumed_often(attempt: int) -> EpisodeHeader:
    """An episode of `Stable` whose process died in an attempt, resumed."""
    journal, ended, failures = MemoryJournal(), list[EpisodeHeader](), list[BaseException]()
    engine = ScriptedEngine(
        lambda request, policy, version: [*b"x", STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)}
    )
    dispatcher, _ = wire_dispatcher(Stable, engine, journal, plain_rollout_settings(), failures)
    spec = replace(outside_spec(Stable), attempt=attempt)
    log = journal.turn_log(PARTITION)
    begin = BeginEntry(
        *(name_of(Stable), "", "t", {}, 1, {"main": POLICY}, "train", "g0", 1, None),
        settings={},
        request_version=REQUEST_VERSION,
    )
    log.append(JournalEntry("e0", attempt, "begin", b"", encode_body(begin)))
    await log.flush()
    journal.admit(spec)
    dispatcher.worker.submit(spec, ended.append, resume=True)
    await dispatcher.worker.drain()
    assert not failures
    return ended[0]


def test_an_agent_from_outside_survives_as_many_deaths_of_its_process_as_there_are() -> None:
    header = asyncio.run(_resumed_often(40))
    assert (header.drop_reason, header.attempt, header.turns) == (None, 41, 2)


def test_turns_that_were_not_requested_are_those_of_the_newest_attempt() -> None:
    body = encode_body(next(iter(turns(play(ToolLoop, ["3"])))))
    entries = [JournalEntry("e0", attempt, f"main:{attempt}.0", b"", body) for attempt in (0, 1, 1)]
    journal = CallJournal(MemoryJournal().turn_log(PARTITION), "e0", 2, Prefix([], answers=entries))
    assert len(journal.unasked_turns("main")) == 1
    assert journal.unasked_turns("other") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # clients that nobody closes
@pytest.mark.parametrize(("name", "reward"), [("Solver", 1.0), ("SyncSolver", 1.0), ("Hinted", 1.1)])
def test_the_agents_of_the_page_run_as_they_stand(name: str, reward: float, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    page = "\n\n".join(python_of(ROOT / "docs/tutorials/outside_agents.md"))
    for file in ("played.py", "checked.py"):  # each with its own client, whose connections belong to a loop
        (tmp_path / file).write_text(page)
    played = play(resolve(f"{tmp_path}/played.py:{name}"), ["3"], data={"question": "1 + 2?", "answer": "3"})
    assert played.header.reward == pytest.approx(reward), played.detail
    report = check_environment(f"{tmp_path}/checked.py:{name}")
    assert report.passed, report.text
