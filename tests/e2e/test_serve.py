"""`agentrl serve` as a process: real clients, conversations told apart, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from tests.support.chat_endpoint import ChatEndpoint, said, serving

pytestmark = [pytest.mark.e2e]


class Served:
    """A running `agentrl serve`."""

    def __init__(self, process: subprocess.Popen[str], opened: Mapping[str, Any]) -> None:
        self.process = process
        self.url, self.root_url, self.key = opened["url"], opened["root_url"], opened["key"]
        self.models, self.path = opened["models"], Path(opened["path"])

    def client(self, name: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.key + (name and f":{name}"), max_retries=0)

    def end(self) -> dict[str, Any]:
        """Ctrl-C; returns what the process says at its end."""
        assert self.process.poll() is None
        self.process.send_signal(signal.SIGINT)
        output, errors = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, errors
        return dict(json.loads(output))


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "agentrl.cli", "serve", "run.toml", "--json", *arguments]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        try:
            assert line, process.stderr.read()
            yield Served(process, json.loads(line))
        finally:
            process.kill()


def conversations(run: Path) -> dict[str, list[list[str]]]:
    """Messages of each turn, by episode."""
    reader, found = RunReader(run), {}
    for line in reader.episodes():
        assert (line.purpose, line.stop_reason, line.status) == ("evaluate", "completed", "finished")
        turns = [entry for _, entry in reader.episode(line.episode).entries if isinstance(entry, TurnEntry)]
        found[line.episode] = [[str(message["content"]) for message in turn.messages] for turn in turns]
    reader.close()
    return found


def counting(body: Mapping[str, Any]) -> web.Response:
    return said(f"{len(body['messages'])} after {body['messages'][-1]['content']}")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text('name = "tried"\nenvironment.id = "calculator"\nsampling.max_turns = 20\n')
    return tmp_path


def ask(client: openai.OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    reply = client.chat.completions.create(model=model, messages=messages)  # type: ignore[arg-type]
    content = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": content})
    return content


def test_conversations_are_episodes_of_a_run_and_ctrl_c_leaves_it_whole(directory: Path) -> None:
    held = threading.Event()

    def answer(body: Mapping[str, Any]) -> web.Response:
        if body["messages"][-1]["content"] == "wait":
            held.set()
            return web.Response(status=503)  # which is tried again, as long as the server runs
        return counting(body)

    with serving(ChatEndpoint(answer)) as endpoint, served(directory, "--model", endpoint.url) as server:
        (model,) = server.models
        assert server.url.startswith("http://127.0.0.1:")
        with server.client() as client, server.client("mine") as named:
            assert [each.id for each in client.models.list()] == [model]
            first, second = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
            assert (ask(client, model, first), ask(client, model, second)) == ("1 after a", "1 after b")
            for messages, text in ((second, "d"), (first, "c")):
                messages.append({"role": "user", "content": text})
            assert (ask(client, model, second), ask(client, model, first)) == ("3 after d", "3 after c")
            for text in ("x", "y"):
                ask(named, model, [{"role": "user", "content": text}])

            with pytest.raises(openai.AuthenticationError, match="no episode"):
                client.with_options(api_key="sk-no").models.list()
            with pytest.raises(openai.AuthenticationError, match="the name of a conversation"):
                ask(server.client("no/name"), model, [{"role": "user", "content": "a"}])
            with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
                ask(client, "gpt", [{"role": "user", "content": "a"}])

            responded = client.responses.create(model=model, input="r", store=False)
            assert responded.output_text == "1 after r"
            with anthropic.Anthropic(base_url=server.root_url, api_key=server.key, max_retries=0) as claude:
                given: Any = {"model": model, "messages": [{"role": "user", "content": "m"}]}
                assert claude.messages.count_tokens(**given).input_tokens > 0
                with claude.messages.stream(max_tokens=5, **given) as stream:
                    assert stream.get_final_text() == "1 after m"

            failed: list[type] = []

            def waits() -> None:
                try:
                    ask(server.client(), model, [{"role": "user", "content": "wait"}])
                except openai.OpenAIError as error:
                    failed.append(type(error))

            waiting = threading.Thread(target=waits)
            waiting.start()
            assert held.wait(100)
            ended = server.end()
            waiting.join()
        assert failed == [openai.AuthenticationError], "the episode has ended"
    assert (ended["conversations"], ended["turns"]) == (6, 8)
    asked = sorted(conversations(directory / server.path).values())
    assert asked == [[], [["a"], ["c"]], [["b"], ["d"]], [["m"]], [["r"]], [["x"], ["y"]]]
    command = [sys.executable, "-m", "agentrl.cli", "run", "list", "runs"]
    listed = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout
    assert "finished" in listed


def test_people_read_the_address_and_how_it_went(directory: Path) -> None:
    with serving(ChatEndpoint(counting)) as endpoint:
        command = [sys.executable, "-m", "agentrl.cli", "serve", "run.toml", "--model", endpoint.url]
        with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(6)]
            process.send_signal(signal.SIGINT)
            last = process.communicate(timeout=100)[0]
    assert lines[1].startswith("OPENAI_BASE_URL=http://127.0.0.1:")
    assert "Each conversation is an episode of runs/tried-serve" in lines[5]
    assert (process.returncode, last) == (0, "0 conversations, 0 turns: agentrl episode list runs/tried-serve\n")


@pytest.mark.slow
def test_the_engine_of_the_configuration_answers(directory: Path) -> None:
    with (directory / "run.toml").open("a") as file:
        file.write('model.path = "agentrl.environments:calculator/model"\nengine.max_context = 256\n')
    with served(directory) as server:
        (model,) = server.models
        with server.client() as client:
            reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1 + 2 ="}])
            assert reply.usage is not None
            assert reply.usage.completion_tokens > 0
        assert server.end()["turns"] == 1


def test_what_cannot_be_served_is_refused(directory: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "serve", "run.toml", "--port", "70000"]
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--port must be a number" in ended.stderr
