"""Tasks played through sessions: of servers that speak the protocols, and of the libraries where they are installed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import agentrl
from agentrl.core.errors import CheckFailedError, EnvironmentDefinitionError
from agentrl.environment.isolated import IsolatedObject, IsolatedObjectError, isolated
from agentrl.testing.check import check_environment
from agentrl.testing.execution import play
from agentrl_formats import bfcl, servers
from agentrl_formats.bfcl import Bfcl, Interfaces, entries, parsed_call
from agentrl_formats.gem import Gem
from agentrl_formats.servers import NemoGym, OpenEnv
from agentrl_formats.session import Call, Session, SessionEnvironment, Start, Step
from tests.support.served import served
from tests.unit.episodes import Played
from tests.unit.episodes import play as play_episode

FORMATS = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))


class _Dice(Session):
    """A game that seeds the global generator at its start, and draws from it at each turn."""

    async def start(self) -> Start:
        random.seed(7)
        return {"messages": [{"role": "user", "content": "Roll."}], "tools": []}

    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        rolled = str(random.randint(1, 10**6))
        return {"messages": [{"role": "user", "content": rolled}], "reward": 0.5, "done": text == "stop"}

    async def cut(self) -> float:
        return -1.0


class Dice(SessionEnvironment):
    level = "replay"

    def session(self, task: agentrl.Task) -> Session:
        return _Dice()


def test_a_library_that_seeds_globally_plays_the_task_of_its_seed() -> None:
    """As it would alone: one random state lasts from call to call, and other code does not draw from it."""
    result = play(Dice, agentrl.Task(id="t", data={}), ["roll"] * 3 + ["stop"])
    alone = random.Random(7)
    assert list(result.observations[1:]) == [str(alone.randint(1, 10**6)) for _ in range(3)]
    assert result.reward == 2.0
    report = check_environment(Dice, tasks=[agentrl.Task(id="t", data={})], episodes=1)
    assert not report.findings


def test_play_gives_all_its_replies_and_a_limit_asks_for_the_reward() -> None:
    task = agentrl.Task(id="t", data={})
    assert play(Dice, task, ["x" * 5000] + ["roll"] * 20 + ["stop"]).reward == 11.0
    done = play_episode(Dice, ["roll", "roll"], max_turns=2)
    assert (done.header.reward, done.header.stop_reason) == (2 * 0.5 - 1.0, "max_turns")


class Endless:
    """A session in a process of its own that a word of the policy keeps busy forever."""

    def start(self) -> Start:
        return {"messages": [{"role": "user", "content": "Go."}], "tools": []}

    def answer(self, text: str, calls: Sequence[Call]) -> Step:
        while text == "hang":
            pass
        return {"messages": [{"role": "user", "content": "on"}], "reward": 0.5, "done": False}

    def cut(self) -> float:
        return 0.0

    def close(self) -> None: ...


class Hanging(SessionEnvironment):
    level = "replay"
    failed_reward = -0.25

    def session(self, task: agentrl.Task) -> IsolatedObject:
        return isolated(Endless, timeout_s=0.2)()


class Unforgiving(Hanging):
    failed_reward = None


def test_a_session_that_the_policy_blocks_ends_with_the_failed_reward() -> None:
    done = play_episode(Hanging, ["go", "hang", "go"])
    assert (done.header.reward, done.header.drop_reason) == (0.25, None)
    assert play_episode(Unforgiving, ["hang"]).header.drop_reason is not None


# --- NeMo-Gym ---------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "name": "add", "description": "Add to the total.", "strict": True}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
ROW = {
    "responses_create_params": {
        "input": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "Make it 5."}],
        "tools": [{**TOOL, "parameters": PARAMETERS}],
    },
    "goal": 5,
}


def totals() -> web.Application:
    """A resources server: a total for each cookie, and paths that only the session itself may use."""
    totals: dict[str, int] = {}

    async def seed(request: web.Request) -> web.Response:
        name = str(len(totals))
        totals[name] = 0
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def add(request: web.Request) -> web.Response:
        number = (await request.json()).get("n")
        if number is None:
            return web.Response(text="TypeError('n is None')", status=500)
        if not isinstance(number, int):
            return web.json_response({"detail": "n is no integer"}, status=422)
        totals[request.cookies["session"]] += number
        return web.json_response({"total": totals[request.cookies["session"]]})

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        if body["goal"] == -1:
            return web.json_response({}, status=500)
        calls = sum(item["type"] == "function_call" for item in body["response"]["output"])
        reward = float(totals[request.cookies["session"]] == body["goal"]) - calls / 100
        return web.json_response({**body, "reward": reward})

    application = web.Application()
    for path, handler in (("/seed_session", seed), ("/add", add), ("/verify", verify)):
        application.router.add_post(path, handler)
    return application


@pytest.fixture(scope="module")
def nemo() -> Iterator[str]:
    with served(totals) as url:
        yield url


def nemo_task(tmp_path: Path, url: str, **fields: Any) -> agentrl.Task:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, **fields}) + "\n")
    [task] = NemoGym.tasks("train", url=url, file=str(file), held_out=0.0)  # type: ignore[misc]
    return task


def add(n: object) -> dict[str, Any]:
    return {"name": "add", "arguments": {"n": n}}


def test_a_nemo_gym_conversation_is_verified_by_its_server(nemo: str, tmp_path: Path) -> None:
    result = play(NemoGym, nemo_task(tmp_path, nemo), [add(2), add("x"), add(3), "done"])
    assert result.reward == 1 - 3 / 100
    assert result.observations[0] == "Use the tool.\nMake it 5."
    assert result.observations[1:] == ('{"total": 2}', '{"detail": "n is no integer"}', '{"total": 5}')
    result = play(NemoGym, nemo_task(tmp_path, nemo), [add(None), add(5), "done"])
    assert result.observations[1:] == ("TypeError('n is None')", '{"total": 5}'), "the tool failed, and not the server"


@pytest.mark.parametrize("path", ["verify", "seed_session", "../verify", "add/../verify", ""])
def test_only_declared_tools_are_posted(path: str, nemo: str, tmp_path: Path) -> None:
    result = play(NemoGym, nemo_task(tmp_path, nemo), [add(5), {"name": path or "x", "arguments": {}}, "done"])
    assert "there is no tool" in result.observations[2]
    assert result.reward == 1 - 2 / 100


def test_a_failing_server_is_a_failure_of_infrastructure(nemo: str, tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="/verify: status 500"):
        play(NemoGym, nemo_task(tmp_path, nemo, goal=-1), ["done"])
    with pytest.raises(CheckFailedError, match="seed_session"):
        play(NemoGym, nemo_task(tmp_path, "http://127.0.0.1:9"), ["done"])


@pytest.mark.parametrize("row", ["{", "[]", "{}", '{"responses_create_params": {}}'])
def test_a_row_that_is_no_task_is_named(row: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({**ROW, "goal": "one line\u2028of JSON"}, ensure_ascii=False)
    file.write_text(f"{good}\n{row}\n", encoding="utf-8")
    with pytest.raises(EnvironmentDefinitionError, match=r"line 2: (a row is|responses_create_params\.input must be)"):
        NemoGym.tasks("train", file=str(file))
    file.write_text(good + "\n", encoding="utf-8")
    with pytest.raises(EnvironmentDefinitionError, match="url = '': give the server's address"):
        NemoGym.tasks("train", file=str(file))
    with pytest.raises(EnvironmentDefinitionError, match="No such file"):
        NemoGym.tasks("train", file=str(tmp_path / "none"))


REWARDS = ["NaN", "Infinity", "-Infinity", "1e999", "2e6", '"9"', "true", "false", '"true"', "[1]", "{}", '""']
"""Rewards in JSON that state no finite number."""


def verifying(verdict: str, *, tool: web.Response | None = None) -> web.Application:
    """A resources server with one answer to `verify`, and one to the tool."""

    async def verify(request: web.Request) -> web.Response:
        return web.Response(text=verdict, content_type="application/json")

    async def add(request: web.Request) -> web.Response:
        return web.json_response({}) if tool is None else tool

    async def seed(request: web.Request) -> web.Response:
        return web.json_response({})

    application = web.Application()
    for path, handler in (("/seed_session", seed), ("/add", add), ("/verify", verify)):
        application.router.add_post(path, handler)
    return application


@pytest.mark.parametrize("reward", [*REWARDS, "null"])
def test_a_reward_of_a_nemo_gym_server_that_is_no_number_is_refused(reward: str, tmp_path: Path) -> None:
    with served(lambda: verifying(f'{{"reward": {reward}}}')) as url:
        done = play_episode(NemoGym, ["done"], data=dict(nemo_task(tmp_path, url).data))
    assert (done.header.drop_reason, done.header.reward) == ("bad_reward", None)
    assert f"{url}/verify: the reward is" in done.said


@pytest.mark.parametrize("verdict", ["[1.0]", "1.0", "{", "<html>1.0</html>", ""])
def test_an_answer_of_verify_that_states_no_reward_fails_the_episode(verdict: str, tmp_path: Path) -> None:
    with served(lambda: verifying(verdict)) as url:
        done = play_episode(NemoGym, ["done"], data=dict(nemo_task(tmp_path, url).data))
    assert (done.header.drop_reason, done.header.reward) == ("environment_error", None)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_an_answer_that_expands_or_is_too_long_is_refused(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LARGEST_ANSWER", 1 << 20)
    bomb = b"0" * (64 << 20)
    if encoding != "identity":
        bomb = zlib.compress(bomb, wbits=31 if encoding == "gzip" else 15)
    tool = web.Response(body=bomb, headers={"Content-Encoding": encoding} if encoding != "identity" else {})
    with served(lambda: verifying('{"reward": 1.0}', tool=tool)) as url:
        call = f"<tool_call>{json.dumps(add(1))}</tool_call>"
        done = play_episode(NemoGym, [call, "done"], data=dict(nemo_task(tmp_path, url).data))
    assert done.header.drop_reason == "environment_error"
    assert ("more than 1,048,576 bytes" if encoding == "identity" else "it compresses its answers") in done.said


def test_nemo_gym_is_pinned(nemo: str, tmp_path: Path) -> None:
    task = nemo_task(tmp_path, nemo)
    report = check_environment(NemoGym, tasks=[task], episodes=1)
    assert not report.findings
    assert report.figures["resume_class"] == "pinned"


@pytest.mark.parametrize("name", ["verify", "seed_session", "../verify", "x?y", "", "/health"])
def test_a_row_whose_tool_names_another_path_is_refused(name: str, tmp_path: Path) -> None:
    tool = {"name": name, "parameters": {}}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"responses_create_params": {"input": "?", "tools": [tool]}}))
    with pytest.raises(EnvironmentDefinitionError, match="cannot name a tool"):
        NemoGym.tasks("train", file=str(file))


def test_an_action_that_is_nested_too_deeply_is_no_action() -> None:
    for text in ("[" * 100_000, "[1]", "move", '{"a": NaN}', '{"a": 1} or {"a": 2}', ""):
        with pytest.raises(ValueError, match="write one JSON object"):
            OpenEnv().action(text)
    assert OpenEnv().action('{"a": 1}') == {"a": 1}


# --- OpenEnv ----------------------------------------------------------------------------------------------------------


def guesses() -> web.Application:
    """A server of OpenEnv: guess a number; the reward says how many guesses are left."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        secret, left = 0, 0
        async for message in socket:
            asked = message.json()
            if asked["type"] == "reset":
                secret, left = random.Random(asked["data"]["seed"]).randint(1, 9), 4
                found = {"observation": {"hint": "1 to 9"}, "reward": None, "done": False}
            elif not isinstance(asked["data"].get("number"), int):
                await socket.send_json({"type": "error", "data": {"message": "number: Field required"}})
                continue
            else:
                left -= 1
                hit = asked["data"]["number"] == secret
                hint = "yes" if hit else "higher" if asked["data"]["number"] < secret else "lower"
                reward = (left + 1) / 4 if hit else -0.05
                found = {"observation": {"hint": hint}, "reward": reward, "done": hit or not left}
            await socket.send_json({"type": "observation", "data": found})
        return socket

    application = web.Application()
    application.router.add_get("/ws", session)
    return application


class Guess(OpenEnv):
    def action(self, text: str) -> Mapping[str, Any]:
        return {"number": int(text)} if text.isdecimal() else {}

    def render(self, observation: Mapping[str, Any]) -> str:
        return str(observation["hint"])


@pytest.fixture(scope="module")
def openenv() -> Iterator[str]:
    with served(guesses) as url:
        yield url


def test_an_openenv_episode_is_played_over_its_socket(openenv: str) -> None:
    task = Guess.tasks("held_out", url=openenv)[3]
    secret = random.Random(3).randint(1, 9)
    result = play(Guess, task, ["?", str(secret - 1), str(secret)])
    assert result.reward == pytest.approx(0.75 - 0.05)
    assert result.observations == ("1 to 9", "error: number: Field required", "higher")
    by_default = play(OpenEnv, task, [f'{{"number": {secret}}}'])
    assert by_default.reward == 1.0
    assert by_default.observations == ('{"hint": "1 to 9"}',)


def test_an_error_in_the_code_of_an_action_ends_the_episode_and_is_not_shown_to_the_policy(openenv: str) -> None:
    class Broken(OpenEnv):
        def action(self, text: str) -> Mapping[str, Any]:
            found = super().action(text)
            return {"number": int("three" if found["number"] == 0 else found["number"])}

    done = play_episode(Broken, ["left", '{"number": 0}'], data={"url": openenv, "seed": 1})
    assert len(done.seen) == 2  # the policy may try again after a text that is no JSON object
    assert done.header.drop_reason == "environment_error"
    assert "invalid literal for int() with base 10: 'three'" in done.said
    assert "test_session_formats.py" in done.said


def replying(step: str) -> web.Application:
    """A server of OpenEnv with one answer to every step."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        start = {"type": "observation", "data": {"observation": {"hint": "?"}, "reward": None, "done": False}}
        async for message in socket:
            await socket.send_str(json.dumps(start) if message.json()["type"] == "reset" else step)
        return socket

    application = web.Application()
    application.router.add_get("/ws", session)
    return application


def stepped(data: str) -> Played:
    """An episode of one turn, whose step has this answer."""
    with served(lambda: replying(data)) as url:
        return play_episode(Guess, ["1"], data={"url": url, "seed": 1})


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_of_an_openenv_server_that_is_no_number_is_refused(reward: str) -> None:
    done = stepped(
        f'{{"type": "observation", "data": {{"observation": {{"hint": ""}}, "reward": {reward}, "done": true}}}}'
    )
    assert (done.header.drop_reason, done.header.reward) == ("bad_reward", None)
    assert "the reward is" in done.said


def test_a_step_without_a_reward_gives_none() -> None:
    done = stepped('{"type": "observation", "data": {"observation": {"hint": ""}, "reward": null, "done": true}}')
    assert (done.header.drop_reason, done.header.reward) == (None, 0.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('{"type": "observation", "data": {"observation": {"hint": ""}, "done": "false"}}', "neither true nor false"),
        ('{"type": "observation", "data": {"observation": {"hint": ""}}}', "neither true nor false"),
        ("no JSON", "Expecting value"),
        ("[]", "its answer is not a JSON object with `data`"),
        ('{"type": "observation", "data": 1}', "its answer is not a JSON object with `data`"),
        (" " * ((16 << 20) + 1), "its answer has more than 16,777,216 bytes"),
    ],
)
def test_an_answer_to_a_step_that_states_no_result_fails_the_episode(answer: str, problem: str) -> None:
    """It is not shown to the policy as a refused action, whose reward is 0."""
    done = stepped(answer)
    assert (done.header.drop_reason, done.header.reward) == ("environment_error", None)
    assert problem in done.said


def test_openenv_is_pinned(openenv: str) -> None:
    report = check_environment(Guess, options={"url": openenv}, episodes=1)
    assert not report.findings
    assert report.figures["resume_class"] == "pinned"


# --- libraries --------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of a format, installed with `pip install --no-deps --target`."""
    directory = FORMATS / request.param
    if not directory.exists():
        pytest.skip(f"needs {directory}; see benchmarks/sandboxes_formats.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(directory)])


@pytest.mark.parametrize("library", ["bfcl"], indirect=True)
@pytest.mark.usefixtures("library")
def test_bfcl_calls_methods_by_name_and_evaluates_nothing() -> None:
    entry = entries("multi_turn_base")["multi_turn_base_0"]
    interfaces = Interfaces(entry, long_context=False)
    for name in ("_load_scenario", "__class__", "no_such", "__import__('os').getcwd()"):
        assert interfaces.call(name, (), {}) == f"Error during execution: name '{name}' is not defined"
    assert interfaces.call("cd", (), {"folder": "document"}) == '{"current_working_directory": "document"}'
    assert parsed_call("f(1, b=[2, 'x'])") == ("f", [1], {"b": [2, "x"]})
    with pytest.raises(ValueError, match="malformed"):
        parsed_call("f(open('/etc/passwd'))")
    with pytest.raises(EnvironmentDefinitionError, match="multi_turn_miss_func"):
        Bfcl.tasks("train", category="multi_turn_miss_func")


@pytest.mark.parametrize("library", ["bfcl"], indirect=True)
@pytest.mark.usefixtures("library")
def test_bfcl_calls_with_extreme_numbers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in entries("multi_turn_base").values() if "MathAPI" in entry["involved_classes"])
    interfaces = Interfaces(entry, long_context=False)
    assert "4300 digits" in interfaces.call("multiply", (), {"a": 10**4299, "b": 10**4299})
    monkeypatch.setattr(bfcl, "ANSWER_S", 1.0)
    call = Call(id="1", name="power", arguments={"base": 10, "exponent": 10**10})

    async def run() -> None:
        session = Bfcl().session(agentrl.Task(id=entry["id"], data={"category": "multi_turn_base"}))
        await session.start()
        with pytest.raises(IsolatedObjectError, match="longer than 1 s"):
            await session.answer("", [call])

    asyncio.run(run())


@pytest.mark.parametrize("library", ["bfcl"], indirect=True)
@pytest.mark.usefixtures("library")
def test_bfcl_is_replayed() -> None:
    report = check_environment(Bfcl, episodes=2)
    assert not report.findings
    assert report.figures["resume_class"] == "replay"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(1, 1.0), (np.float32(0.5), 0.5), (True, None), (np.True_, None), ("9", None), (float("nan"), None)],
)
def test_a_reward_of_gem_that_is_no_number_is_refused(
    reward: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Game:
        def reset(self, seed: int) -> tuple[str, dict[str, str]]:
            return "Go.", {}

        def step(self, text: str) -> tuple[str, Any, bool, bool, dict[str, str]]:
            return "Done.", reward, True, False, {}

    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=lambda id: Game()))
    done = play_episode(Gem, ["go"], data={"id": "game", "seed": 1, "arguments": {}})
    assert (done.header.reward, done.header.drop_reason) == (expected, None if expected is not None else "bad_reward")
    assert expected is not None or "step() of Game: the reward is" in done.said


@pytest.mark.parametrize("library", ["gem"], indirect=True)
@pytest.mark.usefixtures("library")
def test_gem_is_replayed() -> None:
    ids = ["game:GuessTheNumber-v0-easy", "game:Minesweeper-v0-easy"]
    report = check_environment(Gem, options={"ids": ids}, episodes=2)
    assert not report.findings
    assert report.figures["resume_class"] == "replay"


def test_a_probe_of_an_openenv_server_that_never_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        probe = servers._connect_twice(f"http://127.0.0.1:{silent.getsockname()[1]}")
        asyncio.run(asyncio.wait_for(probe, 30))
