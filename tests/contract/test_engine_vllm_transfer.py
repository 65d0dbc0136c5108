"""All weights of a version, sent to a real vLLM: by files here; of `ipc` and `nccl`, what vLLM's classes check."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.core import rpc
from agentrl.core.errors import EngineError, TrainerError
from agentrl.core.records import PolicyVersion
from agentrl.engines.weights import senders, transfer, transports
from agentrl.engines.weights.gloo import GlooSender
from agentrl.engines.weights.senders import (
    PublishedWeightSource,
    WeightDestination,
    WeightSenders,
    WeightTransferConnection,
)
from tests.contract.elsewhere import store_as_changes
from tests.contract.engine_kinds import ModelZoo, canary_of, check_logprobs, prompt, request, version, write_full
from tests.contract.file_sender import FileSender
from tests.contract.test_engine_vllm_full import in_flight, steps, tensors_of
from tests.contract.vllm_server import MakeVllm


class TrainerEnd:
    """Sends tensors to an engine that asks for them, in a thread, as rank 0 does."""

    def __init__(self, engine: Any, path: Path, *, host: str = "") -> None:
        self.outbox = WeightSenders(GlooSender if host else FileSender)
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.passes: Callable[[Iterator[Any]], Iterator[Any]] = iter
        self.errors: list[str] = []
        self.sent = 0
        self._engine = engine
        self._path, self._host = str(path / "weights"), host
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        await self._engine.inbox.listen(self._path, self._wanted, host=self._host)

    async def finished(self) -> None:
        """Wait until all has been counted: an engine can serve what it was sent before its sender has returned."""
        await asyncio.gather(*self._tasks)

    def _wanted(self, number: int, wanted: PolicyVersion, address: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._send(number, wanted, address)))

    async def _send(self, number: int, wanted: PolicyVersion, address: str) -> None:
        if not address:  # the file is here already
            self._engine.inbox.not_sent(number)
            return
        try:
            source = PublishedWeightSource(self.tensors, self.passes(iter(self.tensors.items())))
            recipient = WeightDestination(number=0, address=address, transport="gloo", processes=1, silence_s=60.0)
            await asyncio.to_thread(self.outbox.send, source, wanted, recipient)
            self.sent += 1
        except TrainerError as error:
            self.errors.append(str(error))
        self._engine.inbox.not_sent(number)


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_weights_that_a_trainer_sends_serve_as_those_of_its_file_would(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The published files are of no use but for their canaries: what serves is what was sent."""
    monkeypatch.setattr(senders, "CHUNK_BYTES", 1 << 16)

    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        trainer = TrainerEnd(engine, tmp_path, host=host)
        await trainer.listen()
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=400)))
        for step in (1, 2):
            await in_flight(engine)
            canary = canary_of(zoo.load(seed=step), zoo.load())
            weights = write_full(tmp_path / str(step), version(step), tensors_of(zoo, step), canary=canary)
            trainer.tensors = tensors_of(zoo, step)
            await engine.serve([replace(weights, sha256="0" * 64)])
        await trainer.finished()
        assert (trainer.sent, trainer.errors) == (2, [])
        assert steps(await running) == [0, 1, 2]
        check_logprobs(zoo.load(seed=2), context, await engine.open("t", "solver").generate(request("b", context)))
        await engine.close()

    make_vllm.run(main)


def cut(tensors: Iterator[Any]) -> Iterator[Any]:
    yield next(tensors)
    raise TrainerError("the trainer died")


def shapes_of_another(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) for name in tensors}


class LeavesInTheMiddle(FileSender):
    def send_weights(self) -> None:
        files = list(self._written())
        self.link.start_weight_update()
        self.link.update_weights({"path": str(files[0]), "is_last": False})
        raise TrainerError("the trainer died")


class LeavesInTheMiddleOfTheNetwork(GlooSender):
    def send_weights(self) -> None:
        self.source = replace(self.source, tensors=itertools.islice(self.source.tensors, 2))
        super().send_weights()


@pytest.mark.parametrize(
    ("host", "leaves", "half"),
    [
        ("", LeavesInTheMiddle, "parameters are not in the file"),
        ("127.0.0.1", LeavesInTheMiddleOfTheNetwork, "offered tensors do not exist"),
    ],
)
def test_what_a_trainer_cannot_send_is_loaded_from_its_file(
    make_vllm: MakeVllm,
    zoo: ModelZoo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    leaves: Any,
    half: str,
) -> None:
    """It dies before, or in the middle, while vLLM stands still; it offers another model; it sends half of it."""
    monkeypatch.setattr(senders, "CHUNK_BYTES", 1 << 16)

    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        trainer = TrainerEnd(engine, tmp_path, host=host)
        await trainer.listen()
        for step in range(1, 5):
            tensors = trainer.tensors = tensors_of(zoo, step)
            trainer.passes = cut if step == 1 else iter
            trainer.outbox = WeightSenders(leaves if step == 2 else GlooSender if host else FileSender)
            if step == 3:
                trainer.tensors = shapes_of_another(tensors)
            if step == 4:
                trainer.passes = lambda all_of_them: iter([next(all_of_them)])
            canary = canary_of(zoo.load(seed=step), zoo.load())
            await engine.serve([write_full(tmp_path / str(step), version(step), tensors, canary=canary)])
            completion = await engine.open(f"s{step}", "solver").generate(request(f"r{step}", context))
            assert steps(completion) == [step]
            check_logprobs(zoo.load(seed=step), context, completion)
            assert not await make_vllm.llm.is_paused()
        await trainer.finished()
        assert trainer.sent == 0
        assert len(trainer.errors) == 4, trainer.errors
        assert "has shape (3,)" in trainer.errors[2]
        assert half in trainer.errors[3]
        await engine.close()

    make_vllm.run(main)


@pytest.mark.parametrize("stored", ["whole", "as changes"])
def test_half_of_the_weights_never_serve_when_the_file_fails_too(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    """The trainer dies in the middle, and the published file is damaged: the version before serves again."""
    monkeypatch.setattr(senders, "CHUNK_BYTES", 1 << 16)

    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        trainer = TrainerEnd(engine, tmp_path)
        await trainer.listen()
        first, second = (
            write_full(
                tmp_path / f"0.{step}",
                version(step),
                tensors_of(zoo, step),
                canary=canary_of(zoo.load(seed=step), zoo.load()),
            )
            for step in (1, 2)
        )
        if stored == "as changes":
            store_as_changes(first, second)
        trainer.tensors = tensors_of(zoo, 1)
        await engine.serve([first])
        trainer.outbox, trainer.tensors = WeightSenders(LeavesInTheMiddle), tensors_of(zoo, 2)
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: the SHA-256 digest"):
            await engine.serve([replace(second, sha256="0" * 64)])
        await trainer.finished()
        assert (trainer.sent, trainer.errors) == (1, ["the trainer died"])
        completion = await engine.open("s", "solver").generate(request("a", context))
        assert steps(completion) == [1]
        check_logprobs(zoo.load(seed=1), context, completion)
        await engine.close()

    make_vllm.run(main)


def test_sent_weights_that_are_others_are_found_by_their_canary(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        trainer = TrainerEnd(engine, tmp_path)
        await trainer.listen()
        first, second = (canary_of(zoo.load(seed=seed), zoo.load()) for seed in (1, 2))
        trainer.tensors = tensors_of(zoo, 1)
        await engine.serve([write_full(tmp_path / "1", version(1), tensors_of(zoo, 1), canary=first)])
        with pytest.raises(EngineError, match=r"solver@0\.2 refused: .*as solver@0\.1 would"):
            await engine.serve([write_full(tmp_path / "2", version(2), tensors_of(zoo, 2), canary=second)])
        completion = await engine.open("s", "solver").generate(request("a", context))
        assert steps(completion) == [1]
        check_logprobs(zoo.load(seed=1), context, completion)
        await engine.close()

    make_vllm.run(main)


# --- what needs CUDA, as far as vLLM's own classes check it here ------------------------------------------------------


IN_SUITE = pytest.mark.usefixtures("make_vllm")
"""They import vLLM, which the process of other tests is to be without."""


IPC = WeightDestination(number=0, address="", transport="ipc", processes=1, silence_s=60.0)


class Listens(WeightTransferConnection):
    """A link that keeps what is asked."""

    def __init__(self) -> None:
        super().__init__(IPC)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def _request(self, message: Any) -> Any:
        self.asked.append((message.method, message.info))
        return transfer.TransferReply()


TENSORS = {"a.weight": torch.zeros(4, 2, dtype=torch.bfloat16), "b.bias": torch.zeros(3)}
SHARED = (torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
HANDLE = (0, b"memory handle", 64, 0, False, b"counter", 8, b"event", True)


@IN_SUITE
def test_shared_memory_is_described_as_vllm_takes_it_without_a_class_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    from agentrl.engines.weights import ipc

    link, source = Listens(), PublishedWeightSource(TENSORS, iter(TENSORS.items()))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    sender: Any = ipc.make_sender(IPC, link, source)
    assert (sender.packed, sender.packed_buffer_size_bytes) == (True, senders.CHUNK_BYTES)
    assert link.asked.pop() == ("init", {"transport": "ipc", "info": {"packed": True}})
    sender._do_send(
        ["a.weight", "b.bias"], ["bfloat16", "float32"], [[4, 2], [3]], {"GPU-1": SHARED + HANDLE}, [16, 12]
    )
    ((method, info),) = link.asked
    assert method == "update"
    sent = transfer.REQUEST_DECODER.decode(rpc.encode_frame(transfer.TransferCall(method="update", info=info))[4:])
    assert isinstance(sent, transfer.TransferCall)
    handles = {gpu: ipc.cuda_handle_from_plain(handle) for gpu, handle in sent.info["ipc_handles"].items()}
    assert handles == {"GPU-1": SHARED + HANDLE}
    taken = IPCWeightTransferUpdateInfo(**{**sent.info, "ipc_handles": handles})
    assert (taken.names, taken.tensor_sizes) == (["a.weight", "b.bias"], [16, 12])
    with pytest.raises(ValueError, match="bytes in one dimension"):
        ipc.plain_cuda_handle((torch.Tensor, torch.Size([2, 2]), (2, 1), 0, None, torch.uint8, *HANDLE))


@IN_SUITE
def test_broadcasts_are_met_by_an_id_and_no_port() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from agentrl.engines.weights import nccl

    source = PublishedWeightSource(TENSORS, iter(TENSORS.items()))
    sender: Any = SimpleNamespace(packed=True, packed_buffer_size_bytes=source.buffer_bytes, packed_num_buffers=2)
    payload = nccl.nccl_join_message(bytes(range(128)), 5, sender)
    taken = NCCLWeightTransferInitInfo(**payload)
    assert taken.nccl_unique_id_bytes == bytes(range(128))
    assert (taken.master_address, taken.rank_offset, taken.world_size, taken.packed) == (None, 1, 5, True)
    assert taken.packed_buffer_size_bytes == senders.CHUNK_BYTES
    described = source.metadata()
    offer = source.offer(version(1), 60.0)
    assert [(each.name, each.dtype, each.shape) for each in described] == [
        ("a.weight", torch.bfloat16, (4, 2)),
        ("b.bias", torch.float32, (3,)),
    ]
    update = NCCLWeightTransferUpdateInfo(offer.names, offer.dtype_names, offer.shapes)
    assert update.names == ["a.weight", "b.bias"]
    assert {name: tensor.dtype for name, tensor in offer.tensors().items()} == {
        name: tensor.dtype for name, tensor in TENSORS.items()
    }


@IN_SUITE
def test_one_backend_takes_files_and_what_vllm_s_own_take() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from agentrl.engines.weights import vllm_worker

    assert WeightTransferEngineFactory._registry[vllm_worker.BACKEND]() is vllm_worker.VersionTransferEngine
    for each in transports.TRANSPORTS.values():
        assert {"make_sender", "make_receiver"} <= vars(each.load()).keys()
    backend = vllm_worker.VersionTransferEngine.__new__(vllm_worker.VersionTransferEngine)
    assert backend.parse_update_info({"path": "/file", "is_last": False}).path == "/file"
    assert backend.parse_update_info({}).sent is None
    assert backend.parse_update_info({"names": ["a"]}).sent == {"names": ["a"]}
    assert backend.parse_init_info({"transport": "nccl", "info": {"world_size": 2}}).transport == "nccl"
    with pytest.raises(ValueError, match="Invalid init_info"):
        backend.parse_init_info({"port": 1})
