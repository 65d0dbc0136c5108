"""vLLM's own trainer engines for `ipc` and `nccl`, for rank 0 of a trainer; `worker.py` has their counterparts.

Two things differ from vLLM's: handles of shared GPU memory travel as numbers and bytes, because vLLM pickles them; and
nccl joins by an id that rank 0 makes and sends, because a TCPStore would listen on every interface. Imports vLLM, in a
process that trains on a GPU. Not run on a GPU yet.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from agentrl.engines.weights.transfer import CHUNK_BYTES, join_with_engine

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

    from agentrl.engines.weights.transfer import PublishedWeightSource, WeightDestination, WeightTransferConnection

IPC, NCCL = "agentrl_ipc", "agentrl_nccl"


class IpcInit(IPCTrainerInitInfo):
    """See vLLM's `IPCTrainerInitInfo`."""

    backend = IPC


@dataclass
class NcclInit(NCCLTrainerInitInfo):
    """See vLLM's `NCCLTrainerInitInfo`; address and port are unused."""

    backend = NCCL
    interface: str = "lo"
    """Network interface on the route to the engine, which its processes have too."""


class IpcSender(IPCTrainerWeightTransferEngine):
    """Shares one buffer of this rank's GPU with the engine on the same GPU."""

    @classmethod
    def trainer_init(cls, init_info: IPCTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Announce the transfer to the engine's process."""
        size = init_info.packed_buffer_size_bytes
        engine = cls(client=client, source=source, packed=init_info.packed, packed_buffer_size_bytes=size)
        client.init_weight_transfer_engine({"backend": "ipc", "info": {"packed": init_info.packed}})
        return engine

    def _all_gather_and_merge_handles(self, handles: list[dict[str, tuple[Any, ...]]]) -> Any:
        """Return the handles unchanged: only this rank shares its GPU with the engine."""
        return handles

    @staticmethod
    def _post_send_sync() -> None:
        """Do nothing: the engine's answer means that it has copied, and other ranks share nothing."""
        torch.cuda.ipc_collect()

    def _do_send(self, names: Any, dtype_names: Any, shapes: Any, ipc_handles: Any, tensor_sizes: Any = None) -> None:
        handles = {gpu: plain_cuda_handle(handle) for gpu, handle in ipc_handles.items()}
        layout = {"names": names, "dtype_names": dtype_names, "shapes": shapes, "tensor_sizes": tensor_sizes}
        self.client.update_weights({**layout, "ipc_handles": handles})


class NcclSender(NCCLTrainerWeightTransferEngine):
    """Broadcasts from this rank's GPU to the GPUs of the engine's processes."""

    @classmethod
    def trainer_init(
        cls,
        init_info: NcclInit,  # type: ignore[override]
        *,
        client: Any,
        source: Any = None,
    ) -> Self:
        """Join the group of the engine's processes."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        os.environ.setdefault("NCCL_SOCKET_IFNAME", init_info.interface)
        unique = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        engine = cls(
            client=client,
            source=source,
            packed=init_info.packed,
            packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            packed_num_buffers=init_info.packed_num_buffers,
        )
        payload = nccl_join_message(unique, init_info)
        device = torch.accelerator.current_device_index()
        engine.model_update_group = join_with_engine(
            lambda: nccl_common.uid_init_process_group(unique, 0, init_info.world_size, device),
            lambda: client.init_weight_transfer_engine({"backend": "nccl", "info": payload}),
            grace_s=0.0,  # without the engine, nccl's attempt never ends
        )
        client.on_failure = engine.shutdown  # nccl knows no time limit: this ends a broadcast to an engine that is gone
        return engine


def nccl_join_message(unique_id: bytes, init_info: NCCLTrainerInitInfo) -> dict[str, Any]:
    """Make the message by which the engine's processes join this rank's group, as ranks 1 and up."""
    worker = nccl_common.NCCLWeightTransferInitInfo(
        rank_offset=1,
        world_size=init_info.world_size,
        nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
        packed=init_info.packed,
        packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
        packed_num_buffers=init_info.packed_num_buffers,
    )
    return nccl_common.worker_init_payload(worker)


def plain_cuda_handle(handle: tuple[Any, ...]) -> list[Any]:
    """Return `torch.multiprocessing`'s arguments for one flat byte buffer, without the classes among them."""
    (_, size, _, offset, _, dtype, *tail) = handle
    if dtype != torch.uint8 or len(size) != 1:
        raise ValueError(f"a shared buffer is bytes in one dimension, not {dtype} {tuple(size)}")
    return [int(size[0]), int(offset), *tail]


def trainer_init_info(recipient: WeightDestination, source: PublishedWeightSource) -> TrainerInitInfo:
    """Make vLLM's settings of a transfer for the trainer."""
    largest = max(tensor.nbytes for tensor in source.layout.values())
    buffer = max(CHUNK_BYTES, largest)
    if recipient.transfer == "ipc":
        return IpcInit(rank=0, packed=True, packed_buffer_size_bytes=buffer)
    processes = 1 + recipient.processes
    return NcclInit(
        rank=0,
        master_address="",
        master_port=0,
        world_size=processes,
        packed=True,
        packed_buffer_size_bytes=buffer,
        interface=recipient.interface,
    )


def connect_sender(recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource) -> Any:
    """Make a sender, and connect it to the engine."""
    client: Any = link  # its `finish_weight_update` takes no label, because the engine knows it
    weights: Any = source
    return WeightTransferTrainerFactory.trainer_init(
        trainer_init_info(recipient, source), client=client, source=weights
    )


for _name, _sender in ((IPC, IpcSender), (NCCL, NcclSender)):
    if _name not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(_name, _sender)
