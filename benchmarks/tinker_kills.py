"""What kills of a Tinker server cost its clients.

Clients run a script of every route against one server, which is killed with SIGKILL and started again at 5 random calls
of each script: while it may handle the call, between that call and the next, or during later ones.

* `kills`: number of kills; a quarter of them while the scripts train all weights, the others with adapters.
* `scripts_differ`: scripts that ended with an error, or got other answers than an undisturbed one: losses,
  log-probabilities, samples, weights.
* `steps_lost`, `steps_twice`: steps and loads that the weights at the end lack, or had more than once.
* `futures_lost`: requests of all scripts without their first result at the end.
* `control_futures_lost`: scripts of 5, each with a kill right after a request was accepted, that end with an error if
  the journal forgets such requests, as a server that keeps futures in memory does.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from packages.tinker.tests.client import CALCULATOR, FULL_CALCULATOR
from packages.tinker.tests.kills import KilledServer, PersistentClient, plan, script

KILLS_OF_SCRIPT = 5
CONTROLS = (2, 4, 7, 8, 12)
"""Calls that post a sample, a model, a pass, a step, and weights to sample from."""


async def kill(directory: Path, settings: str, rank: int, count: int) -> dict[str, int]:
    """Run scripts until the server was killed so often."""
    server = KilledServer(directory, settings=settings)
    differ = lost = twice = scripts = 0
    try:
        async with PersistentClient(server, {}) as client:
            expected = await script(client, rank)
        while server.kills < count:
            scripts += 1
            planned = plan(scripts, KILLS_OF_SCRIPT)
            try:
                async with PersistentClient(server, planned, seed=scripts) as client, asyncio.timeout(600):
                    found = await script(client, rank)
            except Exception as error:  # noqa: BLE001 - counted
                print(f"script {scripts}, kills at {planned}: {error!r}", flush=True)
                differ += 1
                continue
            differ += found.answers != expected.answers
            lost += max(0, expected.changes - found.changes)
            twice += max(0, found.changes - expected.changes)
            print(f"{server.kills} kills, {differ} scripts of {scripts} differ", flush=True)
        figures = {"kills": server.kills, "scripts_differ": differ, "steps_lost": lost, "steps_twice": twice}
        return {**figures, "futures_lost": await server.lost()}
    finally:
        server.process.kill()


async def control(directory: Path) -> int:
    """Count the scripts that fail if accepted requests are not on disk."""
    failed = 0
    server = KilledServer(directory, forgets=True)
    try:
        for call in CONTROLS:
            try:
                async with PersistentClient(server, {call: "answered"}) as client, asyncio.timeout(60):
                    await script(client)
            except Exception:  # noqa: BLE001 - counted
                failed += 1
    finally:
        server.process.kill()
    return failed


def figures(quick: bool) -> dict[str, float | None]:
    """Kill servers with a journal of futures, and one without."""
    with tempfile.TemporaryDirectory() as place:
        adapters = asyncio.run(kill(Path(place) / "adapters", CALCULATOR, 4, 5 if quick else 75))
        full = asyncio.run(kill(Path(place) / "full", FULL_CALCULATOR, 0, 5 if quick else 25))
        lost = asyncio.run(control(Path(place) / "control"))
        return {name: adapters[name] + full[name] for name in adapters} | {"control_futures_lost": lost}
