"""`agentrl evaluate --model URL`: an endpoint in every seat, without a model, in all kinds of environments."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.cli.main import main
from agentrl.core import clock as core_clock
from tests.support.chat_endpoint import ChatEndpoint, error, said, serving

pytestmark = [pytest.mark.e2e]

KEY = "sk-very-secret-key"
ENVIRONMENTS = '''
import json

import agentrl
from openai import AsyncOpenAI, BadRequestError

TASKS = [agentrl.Task(id=f"{n}", data={"question": f"2 * {n}", "answer": str(2 * n)}) for n in range(4)]


class Doubles:
    @classmethod
    def tasks(cls, split, *, seed=0):
        return TASKS


class Tools(Doubles, agentrl.ToolEnvironment):
    @agentrl.tool
    def double(self, a: int) -> int:
        """Twice as much."""
        return 2 * a

    def reward(self, task, episode):
        return float(episode.answer == task.data["answer"])


class Turns(Doubles, agentrl.Environment):
    seats = ("first", "second")

    async def run(self, ctx):
        for seat in self.seats:
            for n in range(2):
                await ctx.agent(seat).act(agentrl.user(f"turn {n}"))
            ctx.agent(seat).reward(0.5)


class Loop(Doubles, agentrl.HarnessEnvironment):
    seats = ("solver",)

    async def play(self, task, endpoint):
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            return await self.loop(task, client)

    async def loop(self, task, client):
        messages = [{"role": "user", "content": task.data["question"]}]
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": "double", "parameters": parameters}}]
        while True:
            asked = dict(model="solver", messages=messages, tools=tools, stop=["end", "!"])
            reply = await client.chat.completions.create(**asked)
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (20, 5)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                found = str(2 * json.loads(call.function.arguments)["a"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})

    def reward(self, task, episode):
        return float(episode.result == task.data["answer"])


class Long(Loop):
    async def loop(self, task, client):
        message = {"role": "user", "content": task.data["question"]}
        await client.chat.completions.create(model="solver", messages=[message])
        try:
            await client.chat.completions.create(model="solver", messages=[message, message])
        except BadRequestError as refused:
            return refused.code

    def reward(self, task, episode):
        return float(episode.truncated and episode.result == "context_length_exceeded")
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration for training, whose model is nowhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core_clock, "FIRST_WAIT_S", 0.001)
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    file = tmp_path / "run.toml"
    file.write_text(
        'name = "tried"\ndeterministic = true\nenvironment.id = "envs.py:Tools"\nmodel.path = "models/nowhere"\n'
        "evaluation.tasks = 4\nsampling.top_k = 5\npolicies.solver.lora.rank = 4\npolicies.solver.max_staleness = 0\n"
    )
    return file


def doubles(body: Mapping[str, Any]) -> web.Response:
    """Calls the tool and answers with what it said; task 3 it gets wrong."""
    *_, last = body["messages"]
    if last["role"] == "tool":
        assert last["tool_call_id"] == body["messages"][-2]["tool_calls"][0]["id"]
        return said(last["content"] + "! The end")
    number = int(last["content"][-1])
    return said("", ("double", {"a": number if number < 3 else 0}))


def plainly(body: Mapping[str, Any]) -> web.Response:
    """The same without an exclamation mark."""
    answer = doubles(body)
    return answer if body["messages"][-1]["role"] != "tool" else said(body["messages"][-1]["content"])


def evaluated(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["evaluate", str(file), "--json", *arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return dict(json.loads(output.out))


@pytest.mark.parametrize(
    ("environment", "answer", "reward", "solved"),
    [
        ("Tools", plainly, 0.75, 0.75),
        ("Loop", doubles, 0.75, 0.75),
        ("Turns", lambda body: said("yes"), 1.0, 0.0),  # two seats with 0.5 each
    ],
)
def test_an_endpoint_is_tried_in_every_kind_of_environment(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    answer: Any,
    reward: float,
    solved: float,
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    with serving(ChatEndpoint(answer, key=KEY)) as endpoint:
        given = ["--model", endpoint.url, "--api-key-env", "A_KEY", f"--environment.id=envs.py:{environment}"]
        found = evaluated(file, capsys, *given)
    assert found["evaluation/pass_at/1"] == solved
    assert found["evaluation/reward"] == reward
    assert found["evaluation/tokens"] == found["evaluation/turns"] * 5, "as the endpoint counts them"
    assert all(body["model"] == "large" for body in endpoint.asked), "the only model that it lists"
    if environment != "Turns":
        assert all(body["tools"][0]["function"]["name"] == "double" for body in endpoint.asked)

    path = Path(found["path"])
    assert path.name == "tried-endpoint"
    assert KEY not in "".join(each.read_bytes().decode("latin-1") for each in path.rglob("*") if each.is_file())
    assert main(["run", "list", "runs"]) == 0
    assert "tried-endpoint" in capsys.readouterr().out
    assert main(["episode", "show", str(path), "v1"]) == 0
    shown = capsys.readouterr().out
    assert "turn 0" in shown if environment == "Turns" else "double" in shown
    assert re.search(r"turn \d+, 5 tokens of", shown), "as the endpoint counts them"
    assert "oldest weights" not in shown
    assert main(["episode", "list", str(path), "--json"]) == 0
    assert {line["oldest_step"] for line in json.loads(capsys.readouterr().out)} == {None}
    assert main(["run", "view", str(path), "--once"]) == 0
    capsys.readouterr()


def test_a_dropped_episode_says_why_although_it_was_tried_twice(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "broken.py").write_text(
        "import agentrl\n\n\nclass Broken(agentrl.Environment):\n    seats = ('solver',)\n\n"
        "    async def run(self, ctx):\n        raise RuntimeError('no licence')\n\n"
        "    @classmethod\n    def tasks(cls, split, *, seed=0):\n        return [agentrl.Task(id='1', data={})]\n"
    )
    with serving(ChatEndpoint(plainly)) as endpoint:
        assert main(["evaluate", str(file), "--model", endpoint.url, "--environment.id=broken.py:Broken"]) != 0
    assert "no licence" in capsys.readouterr().err


def test_each_evaluation_has_a_directory_of_its_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ChatEndpoint(plainly, models=("org/large", "small"))) as endpoint:
        found = [evaluated(file, capsys, "--model", f"{endpoint.url},org/large")["path"] for _ in range(2)]
        assert [Path(path).name for path in found] == ["tried-org-large", "tried-org-large-2"]
        assert main(["evaluate", str(file), "--model", endpoint.url]) == 2
        assert "it has org/large, small" in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/v1,large"
        for arguments, told in {
            ("--model", nowhere): "the endpoint is unreachable",
            ("--model", "http://"): "is not the URL",
            ("--model", "https://user:pass@example.com/v1"): "use api_key_env",
            ("--model", "http://example.com/v1,m", "--api-key-env", "A"): "Use https",
            ("--model", nowhere, "--api-key-env", "NOT_SET"): "no variable NOT_SET; set it",
            ("--model", nowhere, "--policy", "x"): "remove one of",
        }.items():
            assert main(["evaluate", str(file), *arguments]) == 2, arguments
            assert told in capsys.readouterr().err
    assert main(["train", str(file), "--model", nowhere]) == 2
    assert "evaluated" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_people_read_the_rates_and_where_the_episodes_are(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ChatEndpoint(plainly)) as endpoint:
        assert main(["evaluate", str(file), "--model", endpoint.url]) == 0
    output = capsys.readouterr().out
    assert re.search(r"evaluation/pass_at/1 +0\.75 ± ", output)
    assert "agentrl episode list runs/tried-endpoint" in output


def test_rewards_that_are_all_zero_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for says, is_told in (("no", True), ("4", False)):
        with serving(ChatEndpoint(lambda body, says=says: said(says))) as endpoint:
            assert main(["evaluate", str(file), "--model", endpoint.url, "--evaluation.attempts=4"]) == 0
        assert ("all 16 held-out episodes got reward 0.000" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, r"status 401.*Incorrect API key provided: Bearer ….*\(the key in A_KEY\)"),
        ("large-2", "status 404.*The model `large-2` does not exist"),
        (lambda _: error(400, "this model does not support tools", "x"), "status 400.*does not support tools"),
        (lambda _: error(429, f"quota of {KEY} exceeded", "insufficient_quota"), "status 429.*quota of … exceeded"),
        (lambda _: web.Response(status=500), "status 500"),
        (lambda _: web.json_response({"choices": []}), "not a chat completion"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_named_with_its_words_and_without_the_key(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, told: str
) -> None:
    monkeypatch.setenv("A_KEY", KEY if answer is not None else f"{KEY}-wrong")
    named = answer if isinstance(answer, str) else "large"
    with serving(ChatEndpoint(answer if callable(answer) else plainly, key=KEY)) as endpoint:
        given = ["--model", f"{endpoint.url},{named}", "--api-key-env", "A_KEY", "--tasks=2"]
        assert main(["evaluate", str(file), *given]) == 1
    text = capsys.readouterr().err
    assert re.search(told, text), text
    assert "dropped: 2 of 2 episodes" in text
    assert KEY not in text


def test_overload_is_tried_again_and_a_full_context_truncates(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Counter[str]()

    def busy(body: Mapping[str, Any]) -> web.Response:
        if len(body["messages"]) == 2:
            return error(400, "This model's maximum context length is 9 tokens", "context_length_exceeded")
        seen[question := body["messages"][0]["content"]] += 1
        return said("yes") if seen[question] > 2 else error(429, "later", "rate_limit_exceeded")

    with serving(ChatEndpoint(busy)) as endpoint:
        found = evaluated(file, capsys, "--model", endpoint.url, "--environment.id=envs.py:Long")
    assert found["evaluation/reward"] == 1.0
    assert min(seen.values()) == 3
    assert main(["episode", "list", found["path"], "--json"]) == 0
    assert '"context_length"' in capsys.readouterr().out


def test_another_name_of_a_limit_and_refused_defaults_are_learnt_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def modern(body: Mapping[str, Any]) -> web.Response:
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: use 'max_completion_tokens' instead", "unsupported_parameter")
        if "top_p" in body:
            return error(400, "`temperature` and `top_p` cannot both be specified", "x")
        return plainly(body)

    with serving(ChatEndpoint(modern)) as endpoint:
        found = evaluated(file, capsys, "--model", endpoint.url, "--evaluation.tasks=1")
    assert found["evaluation/episodes"] == 1
    assert endpoint.asked[-1]["max_completion_tokens"] > 0
