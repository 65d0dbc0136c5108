"""All weights of a version, from a trainer's ranks to an engine that asked for them, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.core import rpc
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineError, TrainerError
from agentrl.core.network import Address
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.models import read_meta_model
from agentrl.engines.weights import gloo, receiver, senders, transports
from agentrl.engines.weights.reading import map_weights_to_state
from agentrl.engines.weights.receiver import IncomingTransfer, WeightReceiver
from agentrl.engines.weights.senders import (
    PublishedWeightSource,
    WeightDestination,
    WeightSenders,
    WeightTransferConnection,
)
from agentrl.engines.weights.transfer import TransferCall, TransferReply, WeightOffer
from agentrl.learn.ranks import RankGroup, SingleRankGroup
from agentrl.learn.trainer import PolicyTrainer
from tests.contract.engine_kinds import ModelZoo
from tests.contract.file_sender import FileSender
from tests.learn_cases import run_config
from tests.rank_processes import on_ranks

MODEL = "environments/frozen_lake/model"
VERSION = PolicyVersion("policy", 0, 0)


@pytest.fixture(autouse=True)
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start as processes of their own may take a while until they offer anything."""
    monkeypatch.setattr(receiver, "OFFER_S", 120.0)


class Engine:
    """The engine's end in a thread: takes a version, as vLLM's backend does."""

    def __init__(self, directory: Path, *, host: str = "") -> None:
        self.address = str(directory / "weights")
        self._host = host
        self._receiver: transports.TransportReceiver | None = None
        self.received: dict[str, Tensor] = {}
        self.asked: list[str] = []
        self.offer: WeightOffer | None = None
        self.refused = ""
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._take()))

    def __enter__(self) -> Engine:
        self._thread.start()
        self._listens.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(60)

    async def _take(self) -> None:
        inbox = WeightReceiver()

        def asked(number: int, version: PolicyVersion, address: str) -> None:
            self.address = address
            self._listens.set()

        await inbox.listen(self.address, asked, host=self._host)
        delivery = await inbox.ask(VERSION)
        assert delivery is not None
        self.offer = delivery.offer
        delivery.answer(error=self.refused)
        with contextlib.suppress(receiver.TransferError):
            while True:
                self._do(delivery, await delivery.next_call())
        delivery.close()
        inbox.close()

    def _do(self, delivery: IncomingTransfer, asked: TransferCall) -> None:
        self.asked.append(asked.method)
        if asked.method == "init":
            transport = transports.transport_named(asked.info["transport"]).load()
            self._receiver = transport.make_receiver(self._worker(), asked.info["info"])
        if asked.method == "update":
            self._receive(asked.info)
        delivery.answer()

    def _receive(self, info: dict[str, Any]) -> None:
        if self._receiver is None:
            self.received |= load_file(info["path"])
        else:
            self._receiver.receive(info)

    def _worker(self) -> Any:
        """As much of a worker of vLLM as receivers use."""
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        return SimpleNamespace(parallel_config=parallel, model=SimpleNamespace(load_weights=self.received.update))


def recipient(address: str, silence_s: float = 60.0, transport: str = "gloo") -> WeightDestination:
    return WeightDestination(number=0, address=address, transport=transport, processes=1, silence_s=silence_s)


def source(tensors: dict[str, Tensor]) -> PublishedWeightSource:
    return PublishedWeightSource({name: tensor.to("meta") for name, tensor in tensors.items()}, iter(tensors.items()))


def test_tensors_arrive_in_files_that_are_written_before_the_engine_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 100)
    tensors = {f"layer.{each}": torch.randn(3, 4).bfloat16() for each in range(9)}
    seen: list[str] = []

    def passed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            seen.extend(engine.asked)
            yield name, tensor

    with Engine(tmp_path) as engine:
        WeightSenders(FileSender).send(PublishedWeightSource(tensors, passed()), VERSION, recipient(engine.address))
    assert seen == [], "the engine was asked nothing before all was there"
    assert engine.asked == ["start", "update", "update", "update", "finish"]
    assert all(torch.equal(engine.received[name], tensor) for name, tensor in tensors.items())
    assert engine.offer is not None
    assert {name: (each.dtype, each.shape) for name, each in engine.offer.tensors().items()} == {
        name: (each.dtype, each.shape) for name, each in tensors.items()
    }


class FileReceiver:
    """With `make_sender` and `make_receiver`, this module is a transport."""

    def __init__(self, worker: Any, info: dict[str, Any]) -> None:
        self._worker = worker
        assert info == {"directory": "any"}

    def receive(self, update: dict[str, Any]) -> None:
        self._worker.model.load_weights(load_file(update["path"]))

    def end_transfer(self) -> None: ...

    def shutdown(self) -> None: ...


made: list[FileSender] = []


def make_sender(
    recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
) -> FileSender:
    link.init_weight_transfer_engine({"directory": "any"})
    made.append(FileSender(recipient, link, source))
    return made[-1]


make_receiver = FileReceiver


@pytest.mark.parametrize("keeps_sender", [True, False])
def test_new_transport_needs_one_table_line_and_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_sender: bool
) -> None:
    transport = transports.WeightTransport(__name__, "cpu", keeps_sender=keeps_sender, rejoin_s=1.0)
    monkeypatch.setattr(transports, "TRANSPORTS", {**transports.TRANSPORTS, "files": transport})
    made.clear()
    outbox = WeightSenders()
    with Engine(tmp_path) as engine:
        destination = recipient(engine.address, transport="files")
        outbox.send(source({"a": torch.ones(2)}), VERSION, destination)
    assert engine.asked == ["init", "start", "update", "finish"]
    assert torch.equal(engine.received["a"], torch.ones(2))
    with Engine(tmp_path) as engine:
        outbox.send(source({"a": torch.zeros(2)}), VERSION, destination)
    assert torch.equal(engine.received["a"], torch.zeros(2))
    assert len(made) == 2 - keeps_sender
    made[-1].shutdown()
    with pytest.raises(ValueError, match="'pigeon'; there are ipc, nccl, gloo, files"):
        outbox.send(source({}), VERSION, recipient(engine.address, transport="pigeon"))


HOST = "127.0.0.1"


def test_tensors_arrive_over_the_network_at_an_engine_that_is_told_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 100)
    tensors = {f"layer.{each}": torch.randn(3, 4).bfloat16() for each in range(5)}
    tensors |= {"odd": torch.arange(5).half(), "turned": torch.randn(3, 5).t(), "none": torch.zeros(0)}
    with Engine(tmp_path, host=HOST) as engine:
        WeightSenders().send(source(tensors), VERSION, recipient(engine.address))
    assert engine.asked == ["init", "start", "update", "update", "finish"]
    assert engine.received.keys() == tensors.keys()
    assert all(torch.equal(engine.received[name], tensor) for name, tensor in tensors.items())


def test_a_trainer_with_a_wrong_token_sends_nothing_and_is_not_told_the_right_one(tmp_path: Path) -> None:
    with Engine(tmp_path, host=HOST) as engine:
        address = Address.parse(engine.address)
        wrong = str(address._replace(token="0" * len(address.token)))
        with pytest.raises(TrainerError, match=HOST) as found:
            WeightSenders().send(source({"a": torch.zeros(2)}), VERSION, recipient(wrong))
        assert wrong not in str(found.value)
        WeightSenders().send(source({"a": torch.ones(2)}), VERSION, recipient(engine.address))
    assert torch.equal(engine.received["a"], torch.ones(2))


def test_a_group_that_cannot_form_is_not_tried_again_with_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says why, and is let alone until its process is another one."""
    tensors = {"a": torch.ones(2)}

    class BehindAFirewall(Engine):
        def _do(self, delivery: IncomingTransfer, asked: TransferCall) -> None:
            self.asked.append(asked.method)
            delivery.answer(error="no route to the trainer's store")

    sender = WeightSenders()
    refused = pytest.raises(TrainerError, match="no route")
    with BehindAFirewall(tmp_path, host=HOST) as engine, refused, monkeypatch.context() as quickly:
        quickly.setattr(gloo, "STALL_S", 1.0)  # of the rank's own attempt
        sender.send(source(tensors), VERSION, recipient(engine.address))
    with pytest.raises(TrainerError, match="no route"):
        sender.send(source(tensors), VERSION, recipient(engine.address))
    assert engine.asked == ["init"]
    with Engine(tmp_path, host=HOST) as restarted:
        sender.send(source(tensors), VERSION, recipient(restarted.address))
    assert torch.equal(restarted.received["a"], tensors["a"])
    later = SystemClock.monotonic() + transports.REJOIN_S
    monkeypatch.setattr(SystemClock, "monotonic", staticmethod(lambda: later))
    with pytest.raises(TrainerError, match=HOST):
        sender.send(source(tensors), VERSION, recipient(engine.address))


def test_a_rank_that_cannot_join_says_so_beside_the_engine() -> None:
    def join() -> None:
        raise RuntimeError("no device for 10.0.0.7")

    def ask_engine() -> None:
        raise TrainerError("the engine refused the weights: nobody came")

    with pytest.raises(TrainerError, match=r"nobody came.*no device"):
        senders.join_with_engine(join, ask_engine, grace_s=60.0)
    with pytest.raises(TrainerError, match="no device"):
        senders.join_with_engine(join, lambda: None, grace_s=60.0)


def test_an_engine_that_takes_no_tensor_holds_up_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, and does not receive: more than the connection holds is on the way."""
    monkeypatch.setattr(gloo, "STALL_S", 1.0)
    monkeypatch.setattr(Engine, "_receive", lambda engine, info: None)
    with Engine(tmp_path, host=HOST) as engine:
        sender = WeightSenders()
        with pytest.raises(RuntimeError, match="Timed out"):
            sender.send(source({"a": torch.zeros(1 << 25)}), VERSION, recipient(engine.address))
    assert engine.asked == ["init", "start", "update"]


def test_a_broadcast_to_an_engine_that_is_gone_is_ended(tmp_path: Path) -> None:
    """By whoever asked for the update; nccl, in another thread, knows no time limit."""
    ended: list[str] = []
    with Engine(tmp_path) as engine:
        link = WeightTransferConnection(recipient(engine.address))
        link.on_failure = lambda: ended.append("broadcast")
        engine.refused = "another model"
        with pytest.raises(TrainerError, match="another model"):
            link.offer(source({"a": torch.zeros(2)}).offer(VERSION, 1.0))
        assert ended == []
        link.close()
        with pytest.raises(TrainerError, match="no engine is connected"):
            link.update_weights({})
        assert ended == ["broadcast"]


def test_a_destination_tells_its_place_but_not_its_token() -> None:
    address = str(Address(HOST, 4711, "secret"))
    there, here = recipient(address), recipient("/private/weights")
    assert (there.redacted_address, there.host, there.interface) == (HOST, HOST, "lo")
    assert "secret" not in repr(there)
    assert (here.redacted_address, here.host, here.interface) == ("/private/weights", "", "lo")


def test_a_trainer_that_offers_nothing_holds_up_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is busy; when it comes, the engine has loaded the file and takes no offer."""
    monkeypatch.setattr(receiver, "OFFER_S", 0.05)

    async def main() -> None:
        inbox, address = WeightReceiver(), str(tmp_path / "weights")
        await inbox.listen(address, lambda number, version, address: None)
        assert await inbox.ask(VERSION) is None
        link = WeightTransferConnection(recipient(address))
        with pytest.raises(TrainerError, match="connection"):
            await asyncio.to_thread(link.offer, source({"a": torch.zeros(2)}).offer(VERSION, 1.0))
        link.close()
        inbox.close()

    asyncio.run(main())


def test_a_file_is_asked_for_apart_from_its_weights(tmp_path: Path) -> None:
    """An offer of the version that comes too late answers no request for its file."""

    async def main() -> None:
        inbox = WeightReceiver()
        await inbox.fetch(VERSION)  # nobody to ask: the file is read by path
        asked: list[tuple[int, PolicyVersion, str]] = []
        await inbox.listen("", lambda *each: asked.append(each), host=HOST)
        fetching = asyncio.ensure_future(inbox.fetch(VERSION))
        trainer = asyncio.ensure_future(inbox.ask(VERSION))
        await asyncio.sleep(0)
        (first, _, nowhere), (second, _, address) = asked
        assert (nowhere, Address.parse(address).host) == ("", HOST)
        inbox.not_sent(second)
        assert await trainer is None
        link = WeightTransferConnection(recipient(address))
        with pytest.raises(TrainerError, match="connection"):
            await asyncio.to_thread(link.offer, source({"a": torch.zeros(2)}).offer(VERSION, 1.0))
        link.close()
        assert not fetching.done()
        inbox.not_sent(first)
        await fetching
        inbox.close()

    asyncio.run(main())


def test_an_engine_that_refuses_is_heard_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2)}
    with Engine(tmp_path) as engine:
        engine.refused = "it is another model"
        with pytest.raises(TrainerError, match="another model"):
            WeightSenders(FileSender).send(source(tensors), VERSION, recipient(engine.address))
    with pytest.raises(TrainerError, match="/gone"):
        WeightSenders(FileSender).send(source(tensors), VERSION, recipient(str(tmp_path / "gone")))


@pytest.mark.parametrize("answers", range(4))
def test_an_engine_that_hangs_holds_up_no_trainer(tmp_path: Path, answers: int) -> None:
    """It accepts so many messages, the offer among them, and then says nothing, with its connection open."""
    address, ended = str(tmp_path / "weights"), threading.Event()
    said = rpc.encode_frame(TransferReply())

    def hang() -> None:
        connection, _ = listening.accept()
        for _ in range(answers):
            size = int.from_bytes(connection.recv(rpc.HEAD_BYTES, socket.MSG_WAITALL), "little")
            connection.recv(size, socket.MSG_WAITALL)
            connection.sendall(said)
        ended.wait()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        thread = threading.Thread(target=hang)
        thread.start()
        try:
            unanswered = ("offer", "start", "update", "finish")[answers]
            with pytest.raises(TrainerError, match=f"{address}.*'{unanswered}'"):
                WeightSenders(FileSender).send(
                    source({"a": torch.zeros(2)}), VERSION, recipient(address, silence_s=0.2)
                )
        finally:
            ended.set()
            thread.join()


class Unplugged:
    """A connection whose other machine acknowledges nothing any more, as the kernel reports it."""

    def sendall(self, data: bytes) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    def close(self) -> None:
        pass


def test_a_machine_that_is_gone_is_told_from_an_engine_that_hangs() -> None:
    link: Any = WeightTransferConnection(recipient(str(Address("10.0.0.2", 4711, "secret")), silence_s=300.0))
    link._socket = Unplugged()
    with pytest.raises(TrainerError, match="'start'"):
        link.start_weight_update()


def test_a_trainer_that_hangs_holds_up_no_engine(tmp_path: Path) -> None:
    """It offers weights, and then says nothing, with its connection open."""

    async def main() -> None:
        inbox, listens = WeightReceiver(), asyncio.Event()
        address = str(tmp_path / "weights")
        await inbox.listen(address, lambda number, version, address: listens.set())
        asking = asyncio.ensure_future(inbox.ask(VERSION))
        await listens.wait()
        _, writer = await asyncio.open_unix_connection(address)
        writer.write(rpc.encode_frame(source({"a": torch.zeros(2)}).offer(VERSION, 0.2)))
        delivery = await asking
        assert delivery is not None
        with pytest.raises(receiver.TransferError, match="nothing"):
            await delivery.next_call()
        delivery.close()
        writer.close()
        inbox.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"\x00" * 40,
        rpc.encode_frame(TransferCall(method="start", info={})),
        rpc.encode_frame(
            WeightOffer(version=VERSION._replace(step=9), names=[], dtype_names=[], shapes=[], silence_s=1.0)
        ),
    ],
)
def test_who_offers_something_else_is_disconnected(tmp_path: Path, said: bytes) -> None:
    async def main() -> None:
        inbox = WeightReceiver()
        numbers: list[int] = []
        await inbox.listen(str(tmp_path / "weights"), lambda number, version, address: numbers.append(number))
        asking = asyncio.ensure_future(inbox.ask(VERSION))
        reader, writer = await asyncio.open_unix_connection(tmp_path / "weights")
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert not asking.done()
        inbox.not_sent(numbers[0])
        assert await asking is None
        inbox.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("dtypes", "shapes"), [(["float99"], [[1]]), (["float32"], []), (["nn"], [[1]]), (["float32"], [[-1]])]
)
def test_an_offer_of_no_tensors_is_refused(dtypes: list[str], shapes: list[list[int]]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        WeightOffer(version=VERSION, names=["a"], dtype_names=dtypes, shapes=shapes, silence_s=1.0).tensors()


def test_an_offer_in_the_hub_s_layout_is_compared_with_the_model(tmp_path: Path) -> None:
    """Experts are one tensor each there, and one for all of them in the model."""
    zoo = ModelZoo(tmp_path, "qwen3_moe")
    tensors = load_file(zoo.directory(seed=1) / "model.safetensors")
    model = read_meta_model(str(zoo.directory(seed=1)), max_context=64, dtype=torch.float32)
    weights = WeightsRef(version=VERSION, path="unused", kind="full", sha256="")
    offered = source(tensors).offer(VERSION, 60.0).tensors()
    matched = map_weights_to_state(weights, offered, model.state_dict(), model)
    assert {name: each.shape for name, each in matched.items()} == {
        name: each.shape for name, each in model.state_dict().items()
    }
    for name in ("model.norm.weight", "model.layers.0.mlp.experts.0.up_proj.weight"):
        with pytest.raises(EngineError, match=r"policy@0\.0 refused"):
            map_weights_to_state(
                weights, {key: each for key, each in offered.items() if key != name}, model.state_dict(), model
            )


def sent(ranks: RankGroup, model: str, directory: str, address: str, sharding: str) -> list[str]:
    """Publish; rank 0 sends what was published, then fails to send another version; the messages of its failures."""
    config = run_config(Path(model), sharding=sharding, ranks=ranks.size)
    trainer = PolicyTrainer(config.trainer_plan, Path(directory), ranks=ranks, read=lambda units: [])
    trainer.start(None)
    trainer.publish("policy", VERSION)
    errors: list[str] = []
    if ranks.rank > 0:
        return errors
    trainer.send(VERSION, recipient(address))
    for version in (VERSION._replace(step=1), VERSION):  # the engine is gone
        with pytest.raises(TrainerError) as found:
            trainer.send(version, recipient(address))
        errors.append(str(found.value))
    return errors


def check_sent(engine: Engine, directory: Path, errors: Sequence[str]) -> None:
    published = load_file(directory / "versions/policy/0.0/model.safetensors")
    assert engine.received.keys() == published.keys()
    assert all(torch.equal(engine.received[name], tensor) for name, tensor in published.items())
    moved, gone = errors
    assert "policy@0.1 is not sent" in moved
    assert "no engine accepts weights" in gone


def test_a_trainer_sends_what_it_published_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    with Engine(tmp_path, host=HOST) as engine:
        errors = sent(SingleRankGroup(), str(repository / MODEL), str(tmp_path), engine.address, "none")
    check_sent(engine, tmp_path, errors)


@pytest.mark.slow
def test_rank_0_sends_sharded_weights_alone(repository: Path, tmp_path: Path) -> None:
    """The other rank returns from `publish` and takes no part in sending."""
    arguments: list[Any] = [str(repository / MODEL), str(tmp_path)]
    with Engine(tmp_path, host=HOST) as engine:
        errors, others = on_ranks(2, "tests.unit.test_weight_transfer:sent", *arguments, engine.address, "full")
    assert others == []
    check_sent(engine, tmp_path, errors)
