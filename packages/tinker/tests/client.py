"""A client of the Tinker protocol without the SDK, a server in this process, and one in another, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing.process
import os
import struct
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from agentrl_tinker.command import main
from agentrl_tinker.config import ServedModelConfig, ServerConfig
from agentrl_tinker.http_server import TinkerServer
from agentrl_tinker.service import TinkerService, open_service
from tests.support.warm import WARM

KEY = "tml-0123456789abcdef01234567"
MODEL = "calc"

Row = Mapping[str, Any]
"""A row of training data: `tokens`, and the inputs of the loss by name."""


def server_config(directory: Path, **settings: Any) -> ServerConfig:
    """A server of the model that the repository has, for contexts of 64 tokens."""
    return ServerConfig(
        **{
            "directory": str(directory),
            "models": {MODEL: ServedModelConfig(path="agentrl.environments:calculator/model", max_rank=8)},
            "engine": {"max_context": 64, "slots": 16, "vllm": False},
            "trainer": {"micro_batch_tokens": 512},
            "checkpoint": {"every": 2},
            **settings,
        }
    )


def full_config(directory: Path, **settings: Any) -> ServerConfig:
    """The same, with all weights of the model trained."""
    model = ServedModelConfig(path="agentrl.environments:calculator/model", weights="full")
    return server_config(directory, models={MODEL: model}, **settings)


@contextlib.asynccontextmanager
async def serving(config: ServerConfig, told: list[str] | None = None) -> AsyncIterator[tuple[str, TinkerService]]:
    """Serve in this process; yields the address."""
    lines = [] if told is None else told
    async with (
        open_service(config, lines.append) as service,
        TinkerServer(service, KEY).listen(0) as address,
    ):
        yield address, service


class Refused(Exception):
    """An answer with an HTTP error."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(f"{status}: {sentence}")
        self.status = status
        self.sentence = sentence


class Failed(Exception):
    """A request that was accepted and failed."""


class Client:
    """One client's session."""

    def __init__(self, address: str, key: str = KEY) -> None:
        self.address = address
        self._http = aiohttp.ClientSession(headers={"X-API-Key": key} if key else {})
        self.session = ""
        self._next: dict[str, int] = {}

    async def __aenter__(self) -> Client:
        self.session = (await self.post("create_session", tags=[], user_metadata={}, sdk_version="0"))["session_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def send(self, method: str, path: str, **arguments: Any) -> bytes:
        """Send a request and return its body."""
        async with self._http.request(method, f"{self.address}/api/v1/{path}", **arguments) as response:
            body = await response.read()
            if response.status != 200:
                raise Refused(response.status, json.loads(body)["detail"])
            return body

    async def post(self, route: str, **content: Any) -> Any:
        return json.loads(await self.send("POST", route, json=content))

    async def download(self, model: str, name: str, directory: Path) -> None:
        """Download the files of weights that were saved for a sampler."""
        place = f"training_runs/{model}/checkpoints/sampler_weights/{name}"
        for file in (await self.get(f"{place}/external_weights_urls"))["urls"]:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(await self.send("GET", f"{place}/files/{file}"))

    async def get(self, path: str) -> Any:
        return json.loads(await self.send("GET", path))

    async def result(self, promise: Mapping[str, Any]) -> Any:
        """Poll until a result is there: JSON, or the bytes of a protocol buffer."""
        while True:
            body = await self.send("POST", "retrieve_future", json={"request_id": promise["request_id"]})
            if not body.startswith(b"{"):
                return body
            content = json.loads(body)
            if "error" in content:
                raise Failed(content["error"])
            if content.get("type") != "try_again":
                return content

    async def model(self, number: int = 0, metadata: Mapping[str, str] | None = None, **lora: Any) -> str:
        """Create a model and return its id."""
        shape = {"rank": 4, "seed": 1, **lora}
        promise = await self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=MODEL,
            lora_config=shape,
            user_metadata=metadata,
        )
        return str((await self.result(promise))["model_id"])

    def sequence(self, subject: str, first: int = 1) -> int:
        """The next sequence number of a model or sampler."""
        self._next[subject] = number = self._next.get(subject, first - 1) + 1
        return number

    async def submit(self, route: str, model: str, **content: Any) -> Mapping[str, Any]:
        promise: Mapping[str, Any] = await self.post(route, model_id=model, seq_id=self.sequence(model), **content)
        return promise

    async def forward_backward(
        self,
        model: str,
        rows: Sequence[Row],
        loss: str = "cross_entropy",
        *,
        forward_only: bool = False,
        **settings: float,
    ) -> Mapping[str, Any]:
        body = encode_forward_backward(model, self.sequence(model), rows, loss, settings, forward_only=forward_only)
        return dict(json.loads(await self.send("POST", "forward_backward", data=body)))

    async def step(self, model: str, rate: float = 1e-2, **adam: float) -> float:
        """Take an optimizer step and return the norm of its gradient."""
        promise = await self.submit("optim_step", model, adam_params={"learning_rate": rate, **adam})
        return float((await self.result(promise))["metrics"]["grad_norm"])

    async def sampler(self, model: str, number: int = 0, **content: Any) -> str:
        """Publish a model and return the id of a sampling session."""
        promise = await self.submit("save_weights_for_sampler", model, sampling_session_seq_id=number, **content)
        return str((await self.result(promise))["sampling_session_id"])

    async def sample(self, sampler: str, prompt: Sequence[int], count: int = 1, **content: Any) -> Samples:
        """Sample and wait for the samples."""
        return Samples(await self.sample_body(sampler, prompt, count, **content))

    async def sample_body(self, sampler: str, prompt: Sequence[int], count: int = 1, **content: Any) -> bytes:
        """Sample and return the answer as it came."""
        return bytes(await self.result(await self.submit_sample(sampler, prompt, count, **content)))

    async def submit_sample(
        self, sampler: str, prompt: Sequence[int], count: int = 1, **content: Any
    ) -> Mapping[str, Any]:
        """Ask for samples."""
        more = {name: content.pop(name) for name in list(content) if name.startswith(("prompt_", "topk_", "record_"))}
        promise: Mapping[str, Any] = await self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=self.sequence(sampler, first=0),
            num_samples=count,
            prompt={"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            sampling_params={"max_tokens": 8, **content},
            **more,
        )
        return promise


class Samples:
    """The decoded answer to a request for samples, by a reader that shares no code with the server's writer."""

    def __init__(self, body: bytes) -> None:
        self.tokens: list[list[int]] = []
        self.logprobs: list[np.ndarray[Any, Any]] = []
        self.stopped: list[bool] = []
        self.prompt_logprobs: np.ndarray[Any, Any] | None = None
        for number, value in fields(body):
            if number == 2:
                self.prompt_logprobs = np.frombuffer(value, "<f4")
            if number != 1:
                continue
            sequence = dict(fields(value))
            self.tokens.append(np.frombuffer(sequence[2], "<i4").tolist())
            self.logprobs.append(np.frombuffer(sequence[3], "<f4"))
            self.stopped.append(not sequence.get(1, 0))


def decoded_pass(body: bytes) -> tuple[list[np.ndarray[Any, Any]], float]:
    """The log-probabilities of each row and the loss in the answer to a pass."""
    message = dict(fields(body))
    record = dict(fields(message[2]))
    tensor = dict(fields(dict(fields(record[2]))[2]))
    offsets = np.frombuffer(tensor[2], "<i8") // 4
    values = np.frombuffer(tensor[1], "<f4")
    rows = [values[start:stop] for start, stop in itertools.pairwise(offsets)]
    return rows, float(struct.unpack("<d", dict(fields(message[3]))[2])[0])


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            size = 8 if tag & 7 == 1 else varint()
            at += size
            yield tag >> 3, data[at - size : at]


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def encode_tensor(values: Any, shape: Sequence[int] | None = None) -> bytes:
    """A tensor of the protocol: integers, or floats."""
    array = np.asarray(values)
    is_integer = array.dtype.kind == "i"
    content = array.astype("<i8" if is_integer else "<f4").tobytes()
    dimensions = b"".join(map(_varint, shape or [len(array)]))
    return _field(1, content) + _varint(3 << 3) + _varint(2 if is_integer else 1) + _field(4, dimensions)


def encode_span(kind: str, sequence_id: str, offset: int, length: int) -> bytes:
    """A run of targets that comes from a `prompt`, or was `sampled`."""
    content = _field(1, sequence_id.encode()) + _varint(2 << 3) + _varint(offset) + _varint(3 << 3) + _varint(length)
    return _field({"prompt": 1, "sampled": 2}[kind], content)


def encode_forward_backward(
    model: str,
    sequence: int,
    rows: Sequence[Row],
    loss: str,
    settings: Mapping[str, float] = {},
    *,
    forward_only: bool = False,
) -> bytes:
    """A request for a pass, as the SDK encodes it."""
    parts = [_field(1, model.encode()), _varint(2 << 3), _varint(sequence)]
    for row in rows:
        tokens = np.array(row["tokens"], "<i4").tobytes()
        inputs = [
            _field(2, _field(1, name.encode()) + _field(2, value if isinstance(value, bytes) else encode_tensor(value)))
            for name, value in row.items()
            if name not in ("tokens", "provenance")
        ]
        spans = b"".join(_field(4, encode_span(*span)) for span in row.get("provenance", ()))
        parts.append(_field(3, _field(1, _field(1, _field(1, tokens))) + b"".join(inputs) + spans))
    parts.append(_field(4, loss.encode()))
    parts += [_varint(6 << 3), _varint(int(forward_only))]
    for name, value in settings.items():
        number = _varint(1 << 3 | 1) + struct.pack("<d", value)
        parts.append(_field(7, _field(1, name.encode()) + _field(2, number)))
    return b"".join(parts)


def row(tokens: Sequence[int], **inputs: Any) -> Row:
    """A row whose targets are its next tokens."""
    return {"tokens": tokens[:-1], "target_tokens": np.array(tokens[1:], np.int64), **inputs}


CALCULATOR = """
[models.calc]
path = "agentrl.environments:calculator/model"
max_rank = 8
[engine]
max_context = 64
slots = 16
vllm = false
[trainer]
micro_batch_tokens = 512
[checkpoint]
every = 2
"""

FULL_CALCULATOR = CALCULATOR.replace("max_rank = 8", 'weights = "full"')
"""Clients train all weights of the model."""


class ServerProcess:
    """A server in a process of its own, that can be killed and started again at the same port."""

    def __init__(self, directory: Path, settings: str = CALCULATOR) -> None:
        self.directory = directory
        self.port = 0
        self.file = directory / "server.toml"
        self.file.write_text(settings)
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> str:
        """Start it, wait until it listens, and return its address."""
        command = [str(self.file), "--port", str(self.port), "--json"]
        output = self.directory / "server.out"
        output.write_text("")
        self._process = WARM.Process(target=_serve, args=([*command, f"--directory={self.directory}"], output))
        self._process.start()
        while not (line := output.read_text()).endswith("\n"):
            self._process.join(0.02)
            if self._process.exitcode is not None:
                raise RuntimeError(f"the server ended: {output.with_suffix('.err').read_text()}")
        address: str = json.loads(line)["address"]
        self.port = int(address.rpartition(":")[2])
        return address

    @property
    def process_id(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    async def ended(self) -> int | None:
        """Wait until it ends by itself; its exit code."""
        assert self._process is not None
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode

    def kill(self) -> None:
        """End it as `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.join()


def _serve(command: list[str], output: Path) -> None:
    """Run a command with the clients' key, its output in a file, and its errors in one beside it."""
    os.environ["TINKER_API_KEY"] = KEY
    for number, file in enumerate((output, output.with_suffix(".err")), 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.exit(main(command))


async def until_accepted(client: Client, call: Any) -> Any:
    """Repeat a call, as the SDK does, until a server answers."""
    while True:
        try:
            return await call()
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)
