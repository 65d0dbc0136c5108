"""`agentrl run serve`: on loopback, to who has the token, under its own name, and only to read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest
from aiohttp import web

from agentrl.cli.main import main
from agentrl.inspection.viewer.application import RunningViewerServer, serve_viewer
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import spec, write, write_run

Ask = Callable[..., Awaitable[tuple[int, Any, "aiohttp.ClientResponse"]]]


def served(
    run: Path, use: Callable[[RunningViewerServer, Ask], Awaitable[None]], host_names: Sequence[str] = ()
) -> None:
    """Serve a run, and use it."""

    async def both() -> None:
        async with serve_viewer(run, host_names=host_names) as server, aiohttp.ClientSession() as session:

            async def ask(path: str, *, method: str = "GET", token: str | None = None, **headers: str) -> Any:
                headers = {name.replace("_", "-"): value for name, value in headers.items()}
                headers.setdefault("Authorization", f"Bearer {server.token if token is None else token}")
                address = f"http://127.0.0.1:{server.port}{path}"
                async with session.request(method, address, headers=headers) as response:
                    text = await response.text()
                    return response.status, json.loads(text) if text.startswith(("{", "[")) else text, response

            await use(server, ask)

    asyncio.run(both())


def test_it_answers_what_the_page_asks(sample_run: Path) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        status, page, response = await ask("/", token="")
        assert status == 200
        assert page.startswith("<!doctype html>")
        assert "e1~0" not in page, "the page by itself says nothing of the run"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        status, found, response = await ask("/ask/episodes?where=reward%20%3C%200&limit=2")
        assert (status, len(found["lines"])) == (200, 2)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in response.headers
        status, found, _ = await ask("/ask/conversation?episode=forks%2Ff0")
        assert (status, found["summary"]["purpose"]) == (200, "fork")

    served(sample_run, use)


@pytest.mark.parametrize("token", ["", "x", "\u00e9", "Bearer"])
def test_without_the_token_nothing_is_told(sample_run: Path, token: str) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        for path in ("/ask/run", "/ask/episodes", "/ask/nothing", f"/ask/run?token={server.token}"):
            status, found, _ = await ask(path, token=token)
            assert (status, set(found)) == (401, {"error"})
        status, _, _ = await ask("/ask/run", Authorization=server.token)
        assert status == 401
        status, _, _ = await ask("/ask/run")
        assert status == 200

    served(sample_run, use)


def test_another_host_s_name_another_page_and_another_method_are_refused(sample_run: Path) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        for host in ("example.com", f"example.com:{server.port}", "127.0.0.1", "127.0.0.1:1", f"0.0.0.0:{server.port}"):
            assert (await ask("/ask/run", Host=host))[0] == 403, host
            assert (await ask("/", Host=host))[0] == 403, host
        assert (await ask("/ask/run", Host=f"localhost:{server.port}"))[0] == 200
        assert (await ask("/ask/run", Origin="http://example.com"))[0] == 403
        assert (await ask("/ask/run", Origin="null"))[0] == 403
        assert (await ask("/ask/run", Origin=f"http://127.0.0.1:{server.port}"))[0] == 200
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert (await ask("/ask/run", method=method))[0] in (405, 403), method

    served(sample_run, use)


def test_a_proxy_is_answered_under_the_names_that_the_user_gave_and_no_others(sample_run: Path) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        for host in ("viewer.example.com", "Viewer.Example.com:8443", "lab.internal", f"127.0.0.1:{server.port}"):
            assert (await ask("/ask/run", Host=host))[0] == 200, host
            assert (await ask("/", Host=host))[0] == 200, host
        for origin in (
            "https://viewer.example.com",
            "http://viewer.example.com:8443",
            f"http://localhost:{server.port}",
        ):
            assert (await ask("/ask/run", Host="viewer.example.com", Origin=origin))[0] == 200, origin
        for origin in (
            "https://example.com",
            "file://viewer.example.com",
            "null",
            "https://viewer.example.com.evil.org",
        ):
            assert (await ask("/ask/run", Host="viewer.example.com", Origin=origin))[0] == 403, origin
        for host in (
            "example.com",
            "viewer.example.com.evil.org",
            "evil.viewer.example.com",
            "viewer.example.com:x",
            "",
        ):
            assert (await ask("/ask/run", Host=host))[0] == 403, host
        assert (await ask("/ask/run", token="", Host="viewer.example.com"))[0] == 401

    served(sample_run, use, ["viewer.example.com", "LAB.internal"])


def test_a_page_behind_a_real_proxy_below_a_path_asks_through_it(sample_run: Path) -> None:
    """A proxy that keeps the client's host name and removes the path under which it serves the viewer."""

    async def use(server: RunningViewerServer, _: Ask) -> None:
        async def forward(request: web.Request) -> web.Response:
            target = f"http://127.0.0.1:{server.port}/{request.match_info['path']}?{request.query_string}"
            headers = {name: request.headers[name] for name in ("Host", "Authorization") if name in request.headers}
            async with aiohttp.ClientSession() as session, session.get(target, headers=headers) as answer:
                return web.Response(status=answer.status, body=await answer.read())

        proxy = web.Application()
        proxy.router.add_get("/user/me/{path:.*}", forward)
        runner = web.AppRunner(proxy)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base = f"{site.name}/user/me/"
        headers = {"Host": "viewer.example.com", "Authorization": f"Bearer {server.token}"}
        async with aiohttp.ClientSession() as session:
            async with session.get(base, headers=headers) as page:
                assert page.status == 200
                script = await page.text()
            (asked,) = re.findall(r"const address = `(.*?)\$\{question\}", script)
            async with session.get(urljoin(base, f"{asked}run"), headers=headers) as answer:
                assert (answer.status, (await answer.json(content_type=None))["name"]) == (200, "sample")
            async with session.get(f"{base}ask/run", headers={**headers, "Host": "evil.example.com"}) as refused:
                assert refused.status == 403
        await runner.cleanup()

    served(sample_run, use, ["viewer.example.com"])


def test_a_proxy_is_named_by_its_host_alone(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("https://viewer.example.com", "viewer.example.com:443", "viewer.example.com/runs", "a b", ""):
        assert main(["run", "serve", str(sample_run), "--host-name", name]) == 2
        assert f"--host-name {name}: give a name alone, such as viewer.example.com" in capsys.readouterr().err


def test_no_path_leads_to_a_file(sample_run: Path) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        for path in (
            "/config.json",
            "/../config.json",
            "/%2e%2e/config.json",
            "/ask/..%2fconfig.json",
            "/ask/",
            "//etc/passwd",
        ):
            status, found, _ = await ask(path)
            assert status == 404, path
            assert '<a href="/">' in found or path.startswith("/ask/"), path
        for episode in ("..%2F..%2Fetc", "forks%2F..%2Fe1", "forks%2Fforks%2Ff0", "%00", "%2Fetc%2Fpasswd"):
            status, found, _ = await ask(f"/ask/conversation?episode={episode}")
            assert (status, "no episode" in found["error"]) == (400, True), episode
        status, found, _ = await ask("/ask/nothing")
        assert (status, "unknown question" in found["error"]) == (400, True)

    served(sample_run, use)


def test_it_shows_what_is_written_while_it_serves(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "run"))

    async def use(server: RunningViewerServer, ask: Ask) -> None:
        before, count = (await ask("/ask/pulse"))[1], (await ask("/ask/episodes"))[1]["total"]
        journal = SqliteJournal(tmp_path / "run" / "journal")
        await write(journal, [spec(700), spec(701)])
        await journal.close()
        assert (await ask("/ask/pulse"))[1] != before
        assert (await ask("/ask/episodes"))[1]["total"] == count + 2

    served(tmp_path / "run", use)


@pytest.mark.parametrize("among_others", [False, True])
def test_a_run_that_took_the_place_of_a_deleted_one_is_shown(tmp_path: Path, among_others: bool) -> None:
    run = tmp_path / "runs" / "run"
    asyncio.run(write_run(run))
    episodes = f"/ask/episodes{'?run=run' if among_others else ''}"

    async def use(server: RunningViewerServer, ask: Ask) -> None:
        before = (await ask(episodes))[1]["total"]
        shutil.rmtree(run)
        assert (await ask(episodes))[0] == 400
        journal = SqliteJournal(run / "journal")
        await write(journal, [spec(1)])
        await journal.close()
        assert before > (await ask(episodes))[1]["total"] == 1

    served(run.parent if among_others else run, use)


def test_many_may_ask_at_once(sample_run: Path) -> None:
    async def use(server: RunningViewerServer, ask: Ask) -> None:
        answers = await asyncio.gather(*(ask(f"/ask/conversation?episode=e{number}") for number in range(20)))
        assert [found["summary"]["episode"] for _, found, _ in answers] == [f"e{number}" for number in range(20)]

    served(sample_run, use)


def test_it_ends_though_a_client_does_not_read_what_it_asked_for(sample_run: Path) -> None:
    with socket.socket() as client:

        async def use(server: RunningViewerServer, ask: Ask) -> None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode() * 200)
            for _ in range(100):  # while it serves another, until neither system nor server take more
                assert (await ask("/"))[0] == 200

        served(sample_run, use)


def test_a_port_that_is_taken_and_a_run_that_is_none_are_named(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "serve", str(sample_run), f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1: cannot be listened on (" in said
    assert said.endswith("choose another --port\n")
    assert main(["run", "serve", str(tmp_path)]) == 2
    assert "no run" in capsys.readouterr().err


def test_the_command_prints_an_address_on_loopback_and_ends_with_ctrl_c(sample_run: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "run", "serve", str(sample_run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        host, _, rest = address.removeprefix("http://").partition("/")
        assert host.startswith("127.0.0.1:")
        assert len(rest.removeprefix("#token=")) > 40
        port = f"{int(host.partition(':')[2]):04X}"
        listens = [
            line.split()[1]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{port}")
        ]
        assert listens == [f"0100007F:{port}"]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "reading the run …\n"
