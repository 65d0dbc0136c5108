"""How long a sandboxed program waits for its gateway, beside the same program outside."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from agentrl_sandbox.bubblewrap import BubblewrapDriver

from agentrl.gateway.server import Gateway
from agentrl.sandbox import GATEWAY_PORT
from agentrl.sandbox.sandbox import Sandbox

_PROGRAM = """
import http.client, os, statistics, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
times = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer " + os.environ["KEY"]})
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status
    times.append(time.perf_counter() - started)
print(statistics.median(times) * 1e3)
"""


async def _measure(requests: int) -> dict[str, float | None]:
    gateway, driver = Gateway(), BubblewrapDriver()
    try:
        seat: Any = SimpleNamespace(seat="main")
        async with gateway.open({"main": seat}, {}) as opened:
            program = ["/usr/bin/python3", "-c", _PROGRAM]
            lease = await driver.create(Sandbox(network="gateway"))
            ran = await lease.run(
                [*program, str(GATEWAY_PORT), str(requests)],
                environment={"KEY": opened.key},
                listener=partial(gateway.serve, opened),
            )
            port = opened.url.rpartition(":")[2].partition("/")[0]
            bare = await asyncio.create_subprocess_exec(
                *program, port, str(requests), env={"KEY": opened.key}, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await bare.communicate()
        assert ran.ok, ran.stderr
        print(f"  without a sandbox: {float(output):.2f} ms")
        return {"gateway_request_ms": float(ran.output)}
    finally:
        await driver.close()


def figures(quick: bool) -> dict[str, float | None]:
    """`gateway_request_ms`: median time of a request that samples nothing."""
    return asyncio.run(_measure(200 if quick else 2000))
