"""Policies behind a chat endpoint: a real server on loopback, a scripted engine for the others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import agentrl
from agentrl.app.engines import external_policies
from agentrl.config.policies import RemotePolicy
from agentrl.core import clock as core_clock
from agentrl.core.errors import CheckFailedError, ConfigError, EngineLostError, EpisodeError, JournalError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import Message, ToolCall, ToolSpec
from agentrl.engines.remote_policy import (
    MAX_ANSWER_BYTES,
    REFUSAL_SHOWN,
    REFUSED_IN_A_ROW,
    RemotePolicyClient,
    _pattern_of,
)
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import TurnEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from tests.sim.small_run import SmallRun, config_for
from tests.support.dispatched import members

KEY = "sk-very-secret"
SURE = "Sure?\u2028\x85\x0bYou may say no."
"""Of more lines than one, as Python counts them."""


class Asked(agentrl.Environment):
    """The judge is remote."""

    seats = ("guesser", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        said = await ctx.agent("guesser").act(agentrl.user("Guess."))
        verdict = await ctx.agent("judge").act(agentrl.user(f"Is {said.text} good?"))
        again = await ctx.agent("judge").act(agentrl.user(SURE))
        ctx.agent("guesser").reward(float(verdict.text == again.text == "yes"))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(content: str, reason: str = "stop") -> web.Response:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
    return web.json_response({"choices": [choice]})


def _app(handler: Handler) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    return app


def played(
    handler: Handler,
    monkeypatch: pytest.MonkeyPatch,
    *,
    timeout_s: float = 20.0,
    max_concurrent: int = 64,
    environment: type[agentrl.Environment] = Asked,
    held: Sequence[asyncio.Event] = (),
    then: Callable[[SmallRun], Awaitable[None]] | None = None,
) -> SmallRun:
    """A run of one step with the judge behind `handler`; `then` is done meanwhile, what is `held` let go at the end."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(core_clock, "FIRST_WAIT_S", 0.001)

    async def main() -> SmallRun:
        runner = web.AppRunner(_app(handler), shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        judge = {
            "kind": "remote",
            "url": f"http://127.0.0.1:{port}/v1",
            "model": "m",
            "api_key_env": "JUDGE_KEY",
            "timeout_s": timeout_s,
            "max_concurrent": max_concurrent,
            "sampling": {"temperature": 0.25},
        }
        config = config_for(policies={"guesser": {"step_size": 4}, "judge": judge}, steps=1, max_in_flight=4)
        engines: list[EngineRouter] = []

        def engine(*arguments: Any, **keywords: Any) -> EngineRouter:
            engines.append(
                EngineRouter(
                    [ScriptedEngine(*arguments, **keywords)],
                    external=external_policies(config.engine_plan.external, print),
                )
            )
            return engines[-1]

        run = SmallRun(config=config, environment=environment, trainer_options={}, engine_options={})
        run.engine_class = engine  # type: ignore[assignment]
        try:
            await run.run()
            if then is not None:
                await then(run)
        finally:
            for event in held:
                event.set()
            await engines[0].close()
            await runner.cleanup()
        return run

    return asyncio.run(main())


def entries_of(run: SmallRun) -> list[TurnEntry]:
    log = run.journal.turn_log("0")
    units = run.trainer.batches[0].units
    bodies = [entry.decode() for unit in units for entry in log.read(unit.episode_id, unit.attempt)]
    return [body for body in bodies if isinstance(body, TurnEntry) and body.policy == "judge"]


def test_what_it_says_is_recorded_and_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.headers.get("Authorization"), await request.json()))
        return answer("yes")

    async def replay(run: SmallRun) -> None:
        before = len(asked)
        units = run.trainer.batches[0].units
        spec = next(spec for spec, _ in members(run.journal, {"g0"}) if spec.episode_id == units[0].episode_id)
        entries = run.journal.turn_log("0").read(spec.episode_id, 0)
        with pytest.raises(JournalError, match="twice"):  # it came to its end again
            await run.orchestrator.dispatcher.worker._runner.run(spec, Asked, entries)  # type: ignore[attr-defined]
        assert len(asked) == before, "a replay asked the endpoint again"

    run = played(handler, monkeypatch, then=replay)
    assert {policy for policy, _, _ in run.seen.steps} == {"guesser"}
    assert run.seen.steps[0][2]["reward/mean"] == 1.0
    assert {key for key, _ in asked} == {f"Bearer {KEY}"}
    second = next(body for _, body in asked if len(body["messages"]) == 3)
    assert second["messages"][1:] == [{"role": "assistant", "content": "yes"}, {"role": "user", "content": SURE}]
    assert (second["model"], second["temperature"]) == ("m", 0.25)
    recorded = entries_of(run)
    assert {json.loads(entry.text)["content"] for entry in recorded} == {"yes"}
    assert KEY not in repr(recorded) + run.config.model_dump_json()


def test_overload_and_broken_connections_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            return web.Response(status=503)
        if calls % 3 == 2 and request.transport is not None:
            request.transport.close()
        return answer("yes")

    run = played(handler, monkeypatch)
    assert run.orchestrator.buffer.ledger.dropped.total() == 0


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (
            401,
            f"no such key: {KEY}",
            r"e\d+\.0:judge\.0, policy 'judge' at http.*status 401: no such key",
        ),
        (401, "x" * (REFUSAL_SHOWN - 3) + KEY, "status 401: x+"),
        (200, "x" * (MAX_ANSWER_BYTES + 1), "4194304 bytes"),
        (200, "<html>", "chat completion"),
        (200, json.dumps({"choices": [{"message": None}]}), "chat completion"),
        (200, json.dumps({"choices": ["text"]}), "chat completion"),
        (200, json.dumps({"choices": [{"message": {"content": 7}}]}), "content"),
        (302, "", "status 302"),
    ],
)
def test_a_bad_answer_ends_the_episode_by_name(
    monkeypatch: pytest.MonkeyPatch, status: int, body: str, told: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:1/"})

    with pytest.raises(CheckFailedError, match=told) as failure:
        played(handler, monkeypatch)
    assert KEY[:3] not in str(failure.value)


class Lost(Asked):
    """What the guesser says, the judge reads; an end that is not its own costs something."""

    truncated_reward = -1.0


REFUSALS = {
    "a filter before": lambda: web.Response(status=400, text="ResponsibleAIPolicyViolation"),
    "a filter after": lambda: answer("", reason="content_filter"),
    "too long": lambda: web.Response(status=413, text=f"request_too_large; your key is {KEY}"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_the_endpoint_will_not_hear_truncates_the_episode_and_voids_nothing(
    monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        asked = (await request.json())["messages"]
        return REFUSALS[refusal]() if len(asked) == 3 else answer("yes")

    async def replay(run: SmallRun) -> None:
        before = calls
        spec = next(spec for spec, _ in members(run.journal, {"g0"}))
        entries = run.journal.turn_log("0").read(spec.episode_id, 0)
        with pytest.raises(JournalError, match="twice"):
            await run.orchestrator.dispatcher.worker._runner.run(spec, Lost, entries)  # type: ignore[attr-defined]
        assert calls == before, "a refusal was asked for again"

    run = played(handler, monkeypatch, environment=Lost, then=replay)
    assert run.orchestrator.buffer.ledger.dropped.total() == 0
    assert run.seen.steps[0][2]["reward/mean"] == -1.0
    headers = [header for _, header in members(run.journal, {"g0"})]
    assert {header.stop_reason for header in headers} == {"refused"}
    told = [entry.text for entry in entries_of(run) if "refused" in entry.text]
    assert len(told) == 4
    assert all(re.search(r"e\d+\.0:judge\.0, policy 'judge' at http", text) for text in told)
    assert KEY not in "".join(told)


def test_an_endpoint_that_refuses_everything_is_no_limit_of_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=400, text="no such model: m")

    with pytest.raises(CheckFailedError, match=r"remote_refused.*no such model"):
        played(handler, monkeypatch, environment=Lost)


def test_an_endpoint_that_refuses_everything_from_some_time_on_is_no_limit_either() -> None:
    async def main() -> None:
        calls = 0

        async def handler(request: web.Request) -> web.Response:
            nonlocal calls
            calls += 1
            return answer("yes") if calls == 1 else web.Response(status=403, text="this key was revoked")

        async with TestServer(_app(handler)) as server:
            config = RemotePolicy(kind="remote", url=str(server.make_url("/v1")), model="m")
            endpoint = RemotePolicyClient(policy="judge", config=config)
            said = np.frombuffer(b'{"role": "user", "content": "Sure?"}\n', np.uint8).astype(np.int32)
            asked = GenerateRequest(request_id="r", token_ids=said, sampling=SamplingParams(max_tokens=9), seed=0)
            for _ in range(1 + REFUSED_IN_A_ROW):
                assert (await endpoint.generate(asked, "here")).finish_reason == "stop"
            with pytest.raises(EpisodeError, match="this key was revoked") as raised:
                await endpoint.generate(asked, "here")
            assert raised.value.reason == "remote_refused"
            await endpoint.close()

    asyncio.run(main())


def test_requests_that_are_refused_together_for_a_parameter_are_all_sent_again_without_it() -> None:
    async def main() -> None:
        all_arrived, bodies = asyncio.Barrier(4), list[dict[str, Any]]()

        async def handler(request: web.Request) -> web.Response:
            body = await request.json()
            if "max_tokens" in body:
                await all_arrived.wait()
                return web.Response(status=400, text="use max_completion_tokens instead of max_tokens")
            if "temperature" in body:
                await all_arrived.wait()
                return web.Response(status=400, text="temperature is not supported")
            bodies.append(body)
            return answer("yes")

        async with TestServer(_app(handler)) as server:
            config = RemotePolicy(kind="remote", url=str(server.make_url("/v1")), model="m")
            endpoint = RemotePolicyClient(policy="judge", config=config)
            said = np.frombuffer(b'{"role": "user", "content": "Sure?"}\n', np.uint8).astype(np.int32)
            sampling = SamplingParams(max_tokens=9, presence_penalty=0.5)
            requests = [
                GenerateRequest(request_id=f"r{n}", token_ids=said, sampling=sampling, seed=0) for n in range(4)
            ]
            completions = await asyncio.gather(*(endpoint.generate(request, "here") for request in requests))
            await endpoint.close()
        assert [completion.finish_reason for completion in completions] == ["stop"] * 4
        assert [(body["max_completion_tokens"], body["top_p"]) for body in bodies] == [(9, 1.0)] * 4
        assert all(body["presence_penalty"] == 0.5 and "frequency_penalty" not in body for body in bodies)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_compressed_answers_are_refused_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str | None] = set()
    packed = gzip.compress(b" " * (64 << 20))

    async def handler(request: web.Request) -> web.Response:
        asked.add(request.headers.get("Accept-Encoding"))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    with pytest.raises(CheckFailedError, match=r"remote_answer.*'judge'"):
        played(handler, monkeypatch)
    assert asked == {"identity"}


def test_no_more_requests_than_allowed_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    open_now = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal open_now
        open_now += 1
        at_once.append(open_now)
        await request.read()
        for _ in range(20):
            await asyncio.sleep(0)
        open_now -= 1
        return answer("yes")

    run = played(handler, monkeypatch, max_concurrent=2)
    assert run.orchestrator.buffer.ledger.dropped.total() == 0
    assert max(at_once) == 2


@pytest.mark.parametrize("url", ["http://judge.example/v1", "http://10.0.0.7:8000/v1", "http://localhost.example/v1"])
def test_a_key_is_not_sent_in_the_clear(url: str) -> None:
    judge = {"kind": "remote", "url": url, "model": "m", "api_key_env": "JUDGE_KEY"}
    with pytest.raises(ValueError, match=r"policies\.judge\.remote"):
        config_for(policies={"guesser": {}, "judge": judge})
    config_for(policies={"guesser": {}, "judge": {**judge, "api_key_env": ""}})
    for near in ("http://localhost:1/v1", "http://127.0.0.1:1/v1", "http://[::1]:1/v1", "https://judge.example/v1"):
        config_for(policies={"guesser": {}, "judge": {**judge, "url": near}})


def test_one_that_never_answers_is_named_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[asyncio.Event] = []

    async def handler(request: web.Request) -> web.Response:
        held.append(asyncio.Event())
        await held[-1].wait()
        return answer("too late")

    with pytest.raises(CheckFailedError, match=r"engine_lost.*'judge'"):
        played(handler, monkeypatch, timeout_s=0.01, held=held)


def test_one_that_answers_some_and_not_others_costs_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[asyncio.Event] = []

    async def handler(request: web.Request) -> web.Response:
        first = (await request.json())["messages"][0]["content"]
        if int(re.findall(r"\d", first)[0]) % 2:
            held.append(asyncio.Event())
            await held[-1].wait()
        return answer("yes")

    run = played(handler, monkeypatch, timeout_s=0.2, held=held)
    assert len(run.trainer.batches[0].units) == 4
    ends = [row for row in run.journal.records if isinstance(row, EpisodeEnd) and row.header.drop_reason]
    assert {end.header.drop_reason for end in ends} == {"engine_lost"}
    for end in ends:
        told = rf"episode and seat {end.spec.episode_id}\.0:judge\.0, policy 'judge' at http.*no answer within 0\.2 s"
        assert re.search(told, end.detail)


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    policies: Any = {"judge": {"kind": "remote", "url": "https://h/v1", "model": "m", "api_key_env": "JUDGE_KEY"}}
    config = config_for(policies={"guesser": {}, **policies})
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        external_policies(config.engine_plan.external, print)


@pytest.mark.parametrize(("workers", "share"), [(1, 12), (4, 3), (99, 1)])
def test_the_requests_at_once_are_shared_by_the_processes_of_a_run(workers: int, share: int) -> None:
    remote = {"kind": "remote", "url": "https://h/v1", "model": "m", "max_concurrent": 12}
    policies: Any = {"guesser": {}, "judge": remote}
    client = external_policies(config_for(policies=policies, workers=workers).engine_plan.external, print)["judge"]
    assert isinstance(client, RemotePolicyClient)
    assert client.config.max_concurrent == share


def test_tools_and_calls_go_to_and_fro_in_their_form() -> None:
    chat = JsonChatFormat()
    tool = ToolSpec(name="add", description="Add.", parameters={"type": "object"})
    first = json.loads(chat.decode(chat.start([], [tool])))
    assert first["tools"][0]["function"]["name"] == "add"
    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    said = Message(role="assistant", content="", tool_calls=(call,))
    assert chat.parse(chat.extend([said], after="stop")) == said
    assert chat.parse(chat.encode('{"tool_calls": [1, {"function": {"name": "f", "arguments": "{"}}]}')).tool_calls == (
        ToolCall(id="None", name="f", arguments="{"),
    )
    assert chat.parse(chat.encode("no json")).content == "no json"


# --- endpoints that mean no good --------------------------------------------------------------------------------------


def test_a_reply_without_the_key_is_kept_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = r'{"a": 1e999, "a":2, "s": "\u00e9"}'

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]})

    kept = everything_kept(played(handler, monkeypatch))
    assert json.dumps(reply)[1:-1] in kept


def test_a_key_is_found_in_bounded_time_between_backslashes() -> None:
    text = "\\" * 1_000_000 + KEY
    assert _pattern_of(KEY).sub("…", text).endswith("\\…")


def everything_kept(run: SmallRun) -> str:
    """All that the journal, the loop and the configuration hold, as text."""
    log = run.journal.turn_log("0")
    entries = [entry.body for unit in run.trainer.batches[0].units for entry in log.read(unit.episode_id, unit.attempt)]
    ids = [np.frombuffer(entry.tokens.token_ids, "<i4") for entry in entries_of(run)]
    said = b"".join(bytes(row.astype(np.uint8)) for row in ids)
    return repr(entries) + said.decode() + repr(run.journal.records) + run.config.model_dump_json()


@pytest.mark.parametrize(
    "written",
    [
        KEY,
        "".join(f"\\u{ord(letter):04x}" for letter in KEY),
        quote(KEY, safe=""),
        base64.b64encode(KEY.encode()).decode(),
    ],
)
def test_a_key_that_an_endpoint_echoes_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        function = f'{{"name": "{written}", "arguments": "{{\\"{written}\\": 1}}"}}'
        calls = f'[{{"id": "Bearer {written}", "function": {function}}}]'
        calls = calls.replace('\\"\\u', '\\"\\\\u')
        message = f'{{"content": "your key is {written}!", "tool_calls": {calls}, "{written}": 1}}'
        body = f'{{"choices": [{{"message": {message}, "finish_reason": "{written}"}}], "usage": {{"{written}": 2}}}}'
        return web.Response(text=body, content_type="application/json", headers={"X-Key": KEY})

    run = played(handler, monkeypatch)
    kept = everything_kept(run)
    assert "your key is …" in kept
    for form in (KEY, written.rstrip("="), quote(KEY), "very-secret"):
        assert form not in kept


def test_a_key_in_the_body_of_an_error_is_found_however_json_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=401, text=f'{{"error": "\\u{ord(KEY[0]):04x}{KEY[1:]}"}}')

    with pytest.raises(CheckFailedError, match="…") as failure:
        played(handler, monkeypatch)
    assert KEY[1:] not in str(failure.value)


@pytest.mark.parametrize("status", [400, 401, 418, 500, 503])
def test_a_key_in_the_body_of_an_error_is_in_no_message(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=f"Authorization: Bearer {KEY}", reason=f"no {KEY}")

    with pytest.raises(CheckFailedError) as failure:
        played(handler, monkeypatch)
    assert "very-secret" not in str(failure.value)


def test_a_word_that_serves_as_a_key_is_left_in_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT_KEY", "none")
    config = RemotePolicy(kind="remote", url="https://h/v1", model="m", api_key_env="SHORT_KEY")
    assert RemotePolicyClient(policy="judge", config=config)._without_key("none of them") == "none of them"


def test_a_redirect_takes_the_key_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str | None] = []

    async def main() -> None:
        async def thief(request: web.Request) -> web.Response:
            taken.append(request.headers.get("Authorization"))
            return answer("yes")

        monkeypatch.setenv("JUDGE_KEY", KEY)
        async with TestServer(_app(thief)) as elsewhere:

            async def handler(request: web.Request) -> web.Response:
                return web.Response(status=status, headers={"Location": str(elsewhere.make_url(request.path))})

            async with TestServer(_app(handler)) as server:
                for status in (301, 302, 303, 307, 308):
                    await _refused_by(str(server.make_url("/v1")), f"status {status}")

    asyncio.run(main())
    assert taken == []


async def _refused_by(url: str, told: str, error: type[Exception] = EpisodeError, timeout_s: float = 20.0) -> None:
    config = RemotePolicy(kind="remote", url=url, model="m", api_key_env="JUDGE_KEY", timeout_s=timeout_s)
    endpoint = RemotePolicyClient(policy="judge", config=config)
    said = np.frombuffer(b'{"role": "user", "content": "Sure?"}\n', np.uint8).astype(np.int32)
    asked = GenerateRequest(request_id="r", token_ids=said, sampling=SamplingParams(max_tokens=9), seed=0)
    try:
        with pytest.raises(error, match=told) as raised:
            await endpoint.generate(asked, "here")
        assert "very-secret" not in str(raised.value)
    finally:
        await endpoint.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RAW = {
    "garbage": (b"\x00\xff" * 100, EngineLostError, "here"),
    "a header without end": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, EngineLostError, "here"),
    "a false length": (HEAD + b"Content-Length: 99999\r\n\r\n{", EngineLostError, "here"),
    "broken chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", EngineLostError, "here"),
    "nesting": (HEAD + b"Connection: close\r\n\r\n" + b"[" * 100_000, EpisodeError, "not a chat completion"),
    "a number without end": (
        HEAD + b"Connection: close\r\n\r\n" + b"9" * 100_000,
        EpisodeError,
        "not a chat completion",
    ),
    "a list": (HEAD + b"Connection: close\r\n\r\n[]", EpisodeError, "not a chat completion"),
    "more than was asked for": (
        HEAD + b'Connection: close\r\n\r\n{"choices": [{"message": {"content": "' + b"x" * (1 << 17) + b'"}}]}',
        EpisodeError,
        "its answer has 131[0-9]+ bytes, too many for the 9",
    ),
}


@pytest.mark.parametrize("kind", RAW)
def test_what_is_no_answer_ends_by_name_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content, error, told = RAW[kind]
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await _refused_by(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", told, error)

    asyncio.run(main())


def test_an_answer_that_drips_for_ever_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            await response.write(b" ")
            await asyncio.sleep(0.001)
        return response

    async def main() -> None:
        async with TestServer(_app(handler)) as server:
            url = str(server.make_url("/v1"))
            await _refused_by(url, "no answer within 0.2 s", EngineLostError, timeout_s=0.2)

    asyncio.run(main())


# --- the endpoint's own counts ----------------------------------------------------------------------------------------


def test_tokens_are_those_the_endpoint_counts_and_go_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(await request.json())
        choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 11, "completion_tokens": 3}})

    run = played(handler, monkeypatch)
    headers = [header for _, header in members(run.journal, {"g0"})]
    judged = [trajectory for header in headers for trajectory in header.trajectories if trajectory.seat == "judge"]
    assert {trajectory.tokens for trajectory in judged} == {6}
    assert [message for body in asked for message in body["messages"] if "usage" in message] == []
    recorded = np.frombuffer(entries_of(run)[0].tokens.token_ids, "<i4").tolist()
    assert JsonChatFormat().usage(recorded) == {"prompt_tokens": 11, "completion_tokens": 3}
