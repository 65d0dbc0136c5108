"""An unmodified agent in a sandbox: it reaches its gateway and nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment.registry import resolve
from tests.unit.episodes import Played, play

pytestmark = pytest.mark.needs("bubblewrap")

AGENT = """
import json, os, socket, sys, urllib.request
def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "main", "messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"]
reached = []
for address in json.loads(sys.argv[1]):
    try:
        socket.create_connection(tuple(address), 1)
        reached.append(address)
    except OSError:
        pass
"""
WRITE = "open('answer.txt', 'w').write(ask(open('task.txt').read()) + ask('again'))\nprint('reached', reached)\n"


class Agent(agentrl.HarnessEnvironment):
    """Writes the replies to a file."""

    seats = ("main",)
    sandbox = agentrl.Sandbox(network="gateway", seconds=60, disk_mb=8)
    command = ("/usr/bin/python3", "-c", AGENT + WRITE, "{task.addresses}")

    def files(self, task: agentrl.Task) -> Mapping[str, str | bytes | Path]:
        return {"/box/task.txt": task.data["question"]}

    async def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        assert episode.directory is not None
        assert episode.result == "reached []\n"
        judge = agentrl.Sandbox(disk_mb=8)
        ran = await judge.run(["cat", "given/answer.txt"], files={"given": episode.directory})
        return float(ran.output == "onetwo")


def played(environment: type[Agent], replies: list[str | bytes], **more: Any) -> Played:
    module = {"__module__": __name__}
    return play(type(environment.__name__, (environment,), module), replies, **more)


def test_an_agent_reaches_its_gateway_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        addresses = json.dumps([here.getsockname(), ["10.0.0.1", 80], ["8.8.8.8", 53]])
        done = played(Agent, ["one", "two"], data={"question": "?", "addresses": addresses})
    assert done.header.drop_reason is None, done.said
    assert done.header.reward == 1.0
    assert done.header.turns == 2


def test_what_it_printed_and_wrote_is_there_for_the_reward() -> None:
    class Printing(Agent):
        command = (
            "/usr/bin/python3",
            "-c",
            AGENT + WRITE + "os.link('answer.txt', 'zwei'); os.symlink('/etc', 'l')",
            "[]",
        )

        def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:  # type: ignore[override]
            assert episode.directory is not None
            assert episode.result == "reached []\n"
            assert sorted(path.name for path in episode.directory.iterdir()) == ["answer.txt", "task.txt", "zwei"]
            assert (episode.directory / "zwei").read_text() == "onetwo"
            return 1.0

    done = played(Printing, ["one", "two"])
    assert done.header.reward == 1.0, done.said


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (
            "sys.exit('broken')",
            "policy 'random')\nbroken",
        ),
        ("while True: pass", "limit on time"),
    ],
)
def test_a_failed_agent_gets_the_failed_reward(end: str, error: str) -> None:
    class Failing(Agent):
        sandbox = agentrl.Sandbox(network="gateway", seconds=4, disk_mb=8)
        command = ("/usr/bin/python3", "-c", f"{AGENT}ask('x')\n{end}", "[]")
        failed_reward = -1.0

    assert played(Failing, ["one"]).header.reward == -1.0

    class Unrewarded(Failing):
        failed_reward = None

    assert error in played(Unrewarded, ["one"]).said


def test_paths_too_long_for_this_machine_end_the_episode_by_name() -> None:
    class Deep(Agent):
        deep = "for _ in range(20):\n    os.mkdir('d' * 203)\n    os.chdir('d' * 203)\n"
        command = ("/usr/bin/python3", "-c", f"{AGENT}ask('x')\n{deep}", "[]")

    done = played(Deep, ["one"])
    assert done.header.drop_reason == "too_large", done.said
    assert "File name too long" in done.said


def test_a_sandbox_without_a_network_is_refused() -> None:
    class Deaf(Agent):
        sandbox = agentrl.Sandbox()

    with pytest.raises(EnvironmentDefinitionError, match='network="gateway"'):
        resolve(Deaf)
