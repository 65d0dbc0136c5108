"""The command `agentrl-tinker`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl import AgentRLError
from agentrl.parts import InputError
from agentrl_tinker.config import load_server

if TYPE_CHECKING:
    from agentrl_tinker.config import ServerConfig

KEY = "TINKER_API_KEY"
"""Environment variable that holds the key of clients."""
MIN_KEY = 24
"""Minimum length of a key."""
NO_KEY = f" without a key ({KEY} is not set)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="agentrl-tinker",
        description="Serve the Tinker protocol to scripts that use the tinker SDK. Ctrl-C ends the server; a new start "
        "continues.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the server's configuration (TOML)")
    parser.add_argument("--port", type=int, default=8000, help="port of 127.0.0.1 to listen on; default: 8000; 0: any")
    parser.add_argument("--socket", type=Path, help="Unix socket to listen on, instead of a port")
    parser.add_argument("--json", action="store_true", help="print the address and the run directory as JSON")
    for setting, kind in (("name", str), ("directory", str), ("seed", int)):
        parser.add_argument(f"--{setting}", type=kind, help=f"the setting `{setting}`, instead of the file's")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error("--port must be a number from 0 to 65535")
    try:
        config = load_server(options.file, name=options.name, directory=options.directory, seed=options.seed)
        asyncio.run(_serve(config, options.socket or options.port, as_json=options.json))
    except AgentRLError as error:
        sys.stderr.write(f"agentrl-tinker: {error}\n")
        return error.exit_code
    return 0


async def _serve(config: ServerConfig, place: int | Path, *, as_json: bool) -> None:
    from agentrl_tinker.http_server import TinkerServer
    from agentrl_tinker.service import open_service

    key = os.environ.get(KEY, "")
    if key and (not key.startswith("tml-") or len(key) < MIN_KEY):
        raise InputError(
            f"{KEY} holds no key of a client: set it to `tml-` and at least {MIN_KEY - 4} random characters, such as "
            f"{KEY}=tml-$(openssl rand -hex 16), here and for the client; or unset it here to serve without a key"
        )
    stop_event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_event.set)

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    async with open_service(config, tell) as service, TinkerServer(service, key).listen(place) as address:
        run = str(Path(config.directory) / config.name)
        if as_json:
            sys.stdout.write(json.dumps({"address": address, "run": run}) + "\n")
        else:
            sys.stdout.write(
                f"{', '.join(config.models)} at TINKER_BASE_URL={address}{'' if key else NO_KEY}; Ctrl-C ends this.\n"
            )
            sys.stdout.write(f"agentrl run serve {run} shows what clients sample.\n")
        sys.stdout.flush()
        service.failure.add_done_callback(lambda _: stop_event.set())
        await stop_event.wait()
        if service.failure.done():
            service.failure.result()
