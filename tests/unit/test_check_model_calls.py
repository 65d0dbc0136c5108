"""The checker tells an environment that asks a language model itself to go through its agent, and no other one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.testing.check import check_environment

CLIENT = '''
import http.client


def complete(port, text):
    """Ask an endpoint, as a client does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    connection.request("POST", "{path}", body=text)
    return str(connection.getresponse().status)
'''
ASKING = '''
import agentrl
{imported}


class Asking(agentrl.Environment):
    """Asks in run(), and never acts through its agent."""

    async def run(self, ctx):
        said = {called}
        agent = ctx.agent("agent")
        await agent.act(agentrl.user(said))
        agent.reward(1.0)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={{"port": {port}}})]
'''
RAW = (
    'http.client.HTTPConnection("127.0.0.1", ctx.task.data["port"])\n'
    '        said.request("POST", "{path}", body="?")\n        said = str(said.getresponse().status)'
)


@pytest.fixture
def port() -> Iterator[int]:
    """A server that answers each request with 404."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("client", "path", "imported", "called", "is_model"),
    [
        ("openai", "/v1/x", "import openai", 'openai.complete(ctx.task.data["port"], "?")', True),
        ("anthropic", "/v1/x", "from anthropic import complete", 'complete(ctx.task.data["port"], "?")', True),
        ("my_model", "/v1/chat/completions", "import my_model", 'my_model.complete(ctx.task.data["port"], "?")', True),
        (None, "/v1/messages", "import http.client", RAW.replace("{path}", "/v1/messages"), True),
        ("weather", "/forecast", "import weather", 'weather.complete(ctx.task.data["port"], "?")', False),
        (None, "/forecast", "import http.client", RAW.replace("{path}", "/forecast"), False),
    ],
)
def test_a_model_that_is_asked_past_the_agent_is_told_apart_from_other_calls(
    client: str | None,
    path: str,
    imported: str,
    called: str,
    is_model: bool,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if client is not None:
        (tmp_path / client).mkdir()
        (tmp_path / client / "__init__.py").write_text(CLIENT.replace("{path}", path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, client, raising=False)
    file = tmp_path / f"env_{client}_{path.replace('/', '_')}.py"
    file.write_text(ASKING.format(imported=imported, called=called, port=port))
    report = check_environment(f"{file}:Asking")
    sys.modules.pop(client or "", None)
    assert "uses the network" in report.text
    assert ("go through `ctx.agent(seat).act(…)`" in report.text) is is_model
    assert ("@tool(external=True)" in report.text) is not is_model


def test_a_model_client_that_raises_before_it_asks_is_told_of_too(tmp_path: Path) -> None:
    file = tmp_path / "keyless.py"
    called = "open('/nowhere/key').read()  # of https://api.openai.com"
    file.write_text(ASKING.format(imported="", called=called, port=0))
    report = check_environment(f"{file}:Asking")
    assert "run() raised FileNotFoundError" in report.text
    assert "go through `ctx.agent(seat).act(…)`" in report.text
