"""Episodes of external agents, executed again from the command line: a coroutine and a child process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentrl.cli.main import main
from tests.support.chat_endpoint import ChatEndpoint, said, serving

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.e2e]

PROGRAM = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    body = json.dumps({"model": "solver", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "And twice " + message["content"] + "?"}]
open("answer.txt", "w").write(message["content"])
"""
ENVIRONMENTS = """
import asyncio, sys
from pathlib import Path

import agentrl
from openai import AsyncOpenAI


class Tasks(agentrl.HarnessEnvironment):
    seats = ("solver",)

    @classmethod
    def tasks(cls, split, *, seed=0):
        program = str(Path("program.py").absolute())
        return [agentrl.Task(id=f"{n}", data={"question": f"2 * {n}", "program": program}) for n in (1, 2)]


class Loop(Tasks):
    async def play(self, task, endpoint):
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            texts = await asyncio.gather(*(self.ask(client, task, branch) for branch in range(3)))
        return texts

    async def ask(self, client, task, branch):
        messages = [{"role": "user", "content": f"{task.data['question']}, branch {branch}"}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="solver", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
        return messages[-2]["content"]

    def reward(self, task, episode):
        return sum(len(text) for text in episode.result) / 10


class Harmful(Loop):
    replay_stable = False


class Program(Tasks):
    command = (sys.executable, "{task.program}", "{task.question}")

    def reward(self, task, episode):
        return float((episode.directory / "answer.txt").read_text())
"""


def doubled(body: Mapping[str, Any]) -> web.Response:
    """Twice the number that the question ends with, or that it has; the length of the conversation elsewhere."""
    content = body["messages"][-1]["content"].removesuffix("?").rpartition(" ")[2]
    return said(str(2 * int(content)) if content.isdigit() else "x" * len(body["messages"]))


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatEndpoint]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "run.toml").write_text(
        'name = "tried"\nenvironment.id = "envs.py:Loop"\nmodel.path = "models/nowhere"\nevaluation.tasks = 2\n'
    )
    with serving(ChatEndpoint(doubled)) as endpoint:
        yield endpoint


def played(endpoint: ChatEndpoint, environment: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The run of an evaluation."""
    code = main(["evaluate", "run.toml", "--json", "--model", endpoint.url, f"--environment.id=envs.py:{environment}"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return str(json.loads(output.out)["path"])


def answered(command: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> list[dict[str, Any]]:
    assert main(["episode", *command, "--json"]) == code, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(("environment", "turns"), [("Loop", 6), ("Program", 3)])
def test_a_replay_runs_the_program_again_and_samples_nothing(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str], environment: str, turns: int
) -> None:
    run = played(endpoint, environment, capsys)
    asked, named = len(endpoint.asked), ["--environment", f"envs.py:{environment}"]
    found = answered(["replay", run, "--where", "turns > 0", *named], capsys)
    assert [(each["outcome"], each["text"]) for each in found] == [("identical", "")] * 2
    assert all(each["calls"] == each["recorded"] for each in found)
    assert sum("turn of solver" in words for _, words in found[0]["acts"]) == turns
    (rescored,) = answered(["rescore", run, found[0]["episode"], *named], capsys)
    assert rescored["before"] == rescored["after"] != {}
    (first,) = [call for call, words in found[0]["acts"] if "2 * 1" in words][:1]
    (stopped,) = answered(["replay", run, found[0]["episode"], "--until", first, *named], capsys)
    assert (stopped["outcome"], stopped["call"]) == ("stopped", first)
    assert len(endpoint.asked) == asked


@pytest.mark.parametrize(
    ("environment", "file", "change", "told"),
    [
        ("Loop", "envs.py", ("branch {branch}", "part {branch}"), r"content: '2 . 1, branch .', now '2 . 1, part .'"),
        ("Loop", "envs.py", ("in range(2)", "in range(1)"), "the external agent no longer requests it"),
        (  # after all recorded turns: before, it would be a recorded turn that differs
            "Loop",
            "envs.py",
            ("branch in range(3)))", "branch in range(3))); await self.ask(client, task, 3)"),
            "a turn that was not requested in the recording",
        ),
        ("Program", "program.py", ("And twice ", "And also "), r"content: 'And twice 2\?', now 'And also 2\?'"),
        ("Program", "program.py", ('open("answer', 'sys.exit(3) # open("answer'), "the program failed: exit status 3"),
    ],
)
def test_a_program_that_does_something_else_departs_by_name(
    endpoint: ChatEndpoint,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    file: str,
    change: tuple[str, str],
    told: str,
    tmp_path: Path,
) -> None:
    run = played(endpoint, environment, capsys)
    written = Path(file).read_text()
    assert change[0] in written
    new = file.replace("envs", tmp_path.name)  # a module that was never imported before
    Path(new).write_text(written.replace(*change))
    asked = len(endpoint.asked)
    reference = f"{new if file == 'envs.py' else 'envs.py'}:{environment}"
    command = ["replay", run, "--where", 'task = "1"', "--environment", reference]
    (found,) = answered(command, capsys, code=1)
    assert found["outcome"] == "departed"
    assert re.search(told, found["text"]), found["text"]
    assert "ctx." not in found["text"] + found["advice"], "the rules for run() do not apply"
    assert len(endpoint.asked) == asked


def test_what_does_harm_when_it_runs_again_is_not_replayed(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(endpoint, "Harmful", capsys)
    (found, _) = answered(["replay", run, "--where", "turns > 0", "--environment", "envs.py:Harmful"], capsys)
    assert found["outcome"] == "not_replayable"
    assert "replay_stable = False" in found["text"]


@pytest.mark.parametrize(("environment", "reward"), [("Loop", 1.1), ("Program", 40.0)])
def test_a_fork_changes_a_reply_and_runs_the_program_on(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str], environment: str, reward: float
) -> None:
    run = played(endpoint, environment, capsys)
    (line,) = answered(["list", run, "--where", 'task = "1"'], capsys)
    Path("reply.txt").write_text("10\n")
    named = ["--environment", f"envs.py:{environment}"]
    asked = len(endpoint.asked)
    (made,) = answered(["fork", run, line["episode"], "--at", "0", "--edit", "reply.txt", *named], capsys)
    assert made["drop_reason"] is None
    assert any("10" in str(body["messages"]) for body in endpoint.asked[asked:])
    assert made["turns"] == line["turns"]
    if environment == "Program":
        assert made["reward"] == reward, "10, twice that, and twice again"
    (found,) = answered(["replay", run, f"forks/{made['episode']}", *named], capsys)
    assert (found["outcome"], found["text"]) == ("identical", "")
    (again,) = answered(["fork", f"{run}/forks", made["episode"], "--at", "-1", *named], capsys)
    assert again["turns"] == line["turns"], "a fork counts the turns that it inherited, too"
    (found,) = answered(["replay", f"{run}/forks", again["episode"], *named], capsys)
    assert (found["outcome"], found["text"]) == ("identical", "")
    assert found["calls"] == found["recorded"]


@pytest.mark.parametrize(
    ("environment", "file", "change", "difference"),
    [
        ("Program", "program.py", ('"content": sys.argv[1]', '"content": "Now: " + sys.argv[1]'), r"now 'Now: 2 . 1'"),
        (
            "Program",
            "program.py",
            ("import json", "raise SystemExit(3); import json"),
            "no longer requests it: its program failed",
        ),
        ("Loop", "envs.py", ("branch {branch}", "part {branch}"), r"content: '2 . 1, branch .', now '2 . 1, part .'"),
    ],
)
def test_a_fork_of_a_program_that_changed_before_its_turn_is_refused(
    endpoint: ChatEndpoint,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    file: str,
    change: tuple[str, str],
    difference: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.rollout.calls.journal.ORDER_S", 0.5)
    run = played(endpoint, environment, capsys)
    (line,) = answered(["list", run, "--where", 'task = "1"'], capsys)
    written = Path(file).read_text()
    assert change[0] in written
    new = file.replace("envs", tmp_path.name)  # a module that was never imported before
    Path(new).write_text(written.replace(*change))
    asked = len(endpoint.asked)
    named = ["--environment", f"{new if file == 'envs.py' else 'envs.py'}:{environment}"]
    command = ["episode", "fork", run, line["episode"], "--at", "1", *named]
    assert main(command) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "dropped as nondeterminism" in page
    assert re.search(difference, page), page
    assert ("file has changed" if file == "envs.py" else "file is the same") in page
    (made,) = answered(command[1:], capsys, code=1)
    assert (made["stop_reason"], made["drop_reason"], made["turns"]) == (None, "nondeterminism", None)
    assert len(endpoint.asked) == asked, "nothing was sampled"
    (made,) = answered(["fork", run, line["episode"], "--at", "0", *named], capsys, code=int("failed" in difference))
    assert len(endpoint.asked) == asked + (made["turns"] or 0)
    if environment == "Program" and made["turns"]:
        assert main(["episode", "diff", run, f"forks/{made['episode']}"]) == 0
        page = capsys.readouterr().out
        assert re.search(r"turn 0 of solver\[0\], token \d+ of", page)
        assert re.search(r"Now: 2 \* 1\n +2 \* 1\n", page), "both prompts are shown"


def test_an_edited_reply_that_is_not_requested_refuses_the_fork(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(endpoint, "Program", capsys)
    Path("program.py").write_text(PROGRAM.replace("And twice ", "And also "))
    Path("reply.txt").write_text("10\n")
    named = ["--environment", "envs.py:Program", "--edit", "reply.txt"]
    (made,) = answered(["fork", run, "--at", "1", *named], capsys, code=1)
    assert made["drop_reason"] == "nondeterminism"
    assert "the fork replaces the reply to this request, the external agent did not send it" in made["detail"]
    (made,) = answered(["fork", run, "--at", "0", *named], capsys)
    assert made["drop_reason"] is None


def test_only_a_reply_can_be_changed(endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    run = played(endpoint, "Program", capsys)
    Path("edit.json").write_text('[{"role": "user", "content": "Well?"}]')
    command = ["episode", "fork", run, "--at", "0", "--edit", "edit.json", "--environment", "envs.py:Program"]
    assert main(command) == 2
    assert "edit the reply" in capsys.readouterr().err
