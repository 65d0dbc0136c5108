"""How long a key of a Tinker server waits beside an attack by another key, over how long beside one equal client.

* `tinker_wait_ratio`: largest ratio of medians, over six attacks: 16 and 300 requests of 16 long samples each, 400
  `create_model`, passes of 24 models, 320 bodies that never end under a limit of 400 open files, and 150 connections
  that send metadata of 60 KB. The equal client does, one after the other, what the waiting key does.
* `requests_lost`: number of the waiting key's requests that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.e2e.test_tinker_shares import PROMPT, ROWS, base_sampler, send_slowly
from tests.support.tinker_client import CALCULATOR, OTHER_KEY, Client, Refused, ServerProcess

SETTINGS = CALCULATOR.replace('["ALICE"]', '["ALICE", "BOB"]').replace("max_context = 64", "max_context = 256")
FILES = 400
LONG: Mapping[str, Any] = {"max_tokens": 240, "stop": []}
METADATA = {"text": "x" * 60_000}

Act = Callable[[Client], Awaitable[object]]


class Acts:
    """What a key does again and again."""

    def __init__(self) -> None:
        self._models: dict[Client, str] = {}
        self._samplers: dict[Client, str] = {}
        self._sent: list[Mapping[str, Any]] = []
        """Requests for long samples."""
        self._numbers = itertools.count(1)

    async def begin(self, client: Client) -> None:
        self._models[client], self._samplers[client] = await client.model(), await base_sampler(client)

    async def sample(self, client: Client) -> None:
        await client.sample(self._samplers[client], PROMPT, 1, max_tokens=4, stop=[])

    async def create(self, client: Client) -> None:
        await client.model(next(self._numbers))

    async def train(self, client: Client) -> None:
        await client.result(await client.forward_backward(self._models[client], ROWS))

    async def connect(self, client: Client) -> None:
        other = Client(client.address, OTHER_KEY)
        try:
            await other.post("create_session", tags=[], user_metadata={}, sdk_version="0")
        finally:
            await other.__aexit__()

    async def send_samples(self, client: Client, count: int) -> None:
        for _ in range(count):
            self._sent.append(await client.submit_sample(self._samplers[client], PROMPT, 16, **LONG))

    async def cancel_samples(self, client: Client) -> None:
        for promise in self._sent:
            await client.post("cancel_future", request_id=promise["request_id"])
        self._sent.clear()


@asynccontextmanager
async def running(*works: Awaitable[object]) -> AsyncIterator[None]:
    """Do works meanwhile; refusals of an attack are no faults."""

    async def one(work: Awaitable[object]) -> None:
        with contextlib.suppress(Refused):
            await work

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(work)) for work in works]
        await asyncio.sleep(0.5)  # until the server is busy with them
        yield
        for task in tasks:
            task.cancel()


async def repeat(act: Act, client: Client) -> None:
    while True:
        await act(client)


async def hold(address: str, count: int) -> None:
    """Keep bodies open that never end."""
    writers = await send_slowly(address, count)
    try:
        await asyncio.Event().wait()
    finally:
        for writer in writers:
            writer.close()


async def send_metadata(client: Client, numbers: itertools.count[int]) -> None:
    while True:
        with contextlib.suppress(Refused):
            await client.post("create_session", tags=[], user_metadata=METADATA, sdk_version="0")
            await client.model(next(numbers), metadata=METADATA)


async def waits(directory: Path, repeats: int, models: int) -> tuple[dict[str, float], int]:
    """Return the ratios by attack, and the number of lost requests."""
    server, lost = ServerProcess(directory, SETTINGS), 0
    address = server.start()
    resource.prlimit(server.process_id, resource.RLIMIT_NOFILE, (FILES, FILES))
    acts = Acts()
    try:
        async with Client(address) as alice, Client(address, OTHER_KEY) as bob:
            for client in (alice, bob):
                await acts.begin(client)

            async def median(act: Act) -> float:
                nonlocal lost
                seconds = []
                for _ in range(repeats):
                    start = time.monotonic()
                    try:
                        await act(bob)
                    except Exception as error:  # noqa: BLE001 - each is a lost request
                        lost += 1
                        print(f"  lost: {error!r}", flush=True)
                    seconds.append(time.monotonic() - start)
                return statistics.median(seconds)

            numbers = itertools.count(10_000)
            many = [await alice.model(number) for number in range(1_000, 1_024)]

            async def passes(model: str) -> None:
                while True:
                    await alice.result(await alice.forward_backward(model, ROWS))

            async def create(number: int) -> object:
                shape = {"rank": 4, "seed": 1}
                return await alice.post(
                    "create_model",
                    session_id=alice.session,
                    model_seq_id=number,
                    base_model="calc",
                    lora_config=shape,
                )

            attacks: dict[str, tuple[Act, list[Awaitable[object]]]] = {
                "16 requests of samples": (acts.sample, [acts.send_samples(alice, 16)]),
                "300 requests of samples": (acts.sample, [acts.send_samples(alice, 300)]),
                "passes of many models": (acts.train, [passes(model) for model in many]),
                "slow bodies": (acts.connect, [hold(address, 320)]),
                "connections and metadata": (acts.connect, [send_metadata(alice, numbers) for _ in range(150)]),
                "many models": (acts.create, [create(number) for number in range(2_000, 2_000 + models)]),
            }
            ratios = {}
            for name, (act, works) in attacks.items():
                async with running(repeat(act, alice)):  # just before, since the machine's speed changes
                    equal = await median(act)
                async with running(*works):
                    seconds = await median(act)
                await acts.cancel_samples(alice)
                ratios[name] = seconds / equal
                print(f"  {name}: {seconds:.3f} s, beside an equal client {equal:.3f} s", flush=True)
    finally:
        server.kill()
    return ratios, lost


def figures(quick: bool) -> dict[str, float | None]:
    """Measure the waits."""
    with tempfile.TemporaryDirectory() as place:
        ratios, lost = asyncio.run(waits(Path(place), 5 if quick else 15, 100 if quick else 400))
    return {"tinker_wait_ratio": max(ratios.values()), "requests_lost": lost}
