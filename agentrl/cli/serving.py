"""`agentrl serve`: servers for programs that bring their own loop."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json_line
from agentrl.core.errors import InputError
from agentrl.core.text import escape_line
from agentrl.tinker.config import load_server

if TYPE_CHECKING:
    import argparse

    from agentrl.tinker.config import ServerConfig


def serve_tinker(options: argparse.Namespace) -> int:
    """`agentrl serve tinker FILE [--port N] [--host ADDRESS] [--section.field=value …]`."""
    if not 0 <= options.port < 65_536:
        raise InputError("--port must be a number from 0 to 65535")
    config = load_server(options.file, options.overrides)
    asyncio.run(_serve(config, options.host, options.port, as_json=options.json))
    return 0


async def _serve(config: ServerConfig, host: str, port: int, *, as_json: bool) -> None:
    from agentrl.tinker.http_server import TinkerServer
    from agentrl.tinker.service import open_service, read_keys

    keys = read_keys(config)
    stop_event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_event.set)

    def tell(line: str) -> None:
        sys.stderr.write(f"{escape_line(line)}\n")

    async with open_service(config, tell) as service, TinkerServer(service, keys, host).listen(port) as bound:
        address, run = f"http://{host}:{bound}", str(Path(config.directory) / config.name)
        if as_json:
            print_json_line({"address": address, "run": run})
        else:
            sys.stdout.write(f"{', '.join(config.models)} at TINKER_BASE_URL={address}; Ctrl-C ends this.\n")
            sys.stdout.write(f"agentrl run serve {escape_line(run)} shows what clients sample.\n")
            sys.stdout.flush()
        service.failure.add_done_callback(lambda _: stop_event.set())
        await stop_event.wait()
        if service.failure.done():
            service.failure.result()
