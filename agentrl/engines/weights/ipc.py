"""The transport `ipc`: one buffer in the memory of the GPU that rank 0 and the engine share.

Differs from vLLM's in one thing: handles of shared GPU memory travel as numbers and bytes, because vLLM pickles them.
Imports vLLM, in rank 0 too. Not run on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
)

if TYPE_CHECKING:
    from agentrl.engines.weights.senders import PublishedWeightSource, WeightDestination, WeightTransferConnection


class IpcSender(IPCTrainerWeightTransferEngine):
    """Shares one buffer of this rank's GPU with the engine on the same GPU."""

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


class IpcReceiver(IPCWeightTransferEngine):
    """Copies from the trainer's buffer."""

    def receive(self, update: dict[str, Any]) -> None:
        """Receive and load tensors."""
        handles = {gpu: cuda_handle_from_plain(handle) for gpu, handle in update["ipc_handles"].items()}
        self.receive_weights(self.parse_update_info({**update, "ipc_handles": handles}))

    def end_transfer(self) -> None:
        """Release the trainer's buffer."""
        self.shutdown()


def make_sender(
    recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
) -> IpcSender:
    """Make a sender, and announce it to the engine's process."""
    client: Any = link  # its `finish_weight_update` takes no label, because the engine knows it
    weights: Any = source
    init = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=source.buffer_bytes)
    return IpcSender.trainer_init(init, client=client, source=weights)


def make_receiver(worker: Any, info: dict[str, Any]) -> IpcReceiver:
    """Make a receiver of a worker of vLLM."""
    receiver = IpcReceiver(WeightTransferConfig(backend="ipc"), worker.vllm_config, worker.device, worker.model)
    receiver.init_transfer_engine(receiver.parse_init_info(info))
    return receiver


def plain_cuda_handle(handle: tuple[Any, ...]) -> list[Any]:
    """Return `torch.multiprocessing`'s arguments for one flat byte buffer, without the classes among them."""
    (_, size, _, offset, _, dtype, *tail) = handle
    if dtype != torch.uint8 or len(size) != 1:
        raise ValueError(f"a shared buffer is bytes in one dimension, not {dtype} {tuple(size)}")
    return [int(size[0]), int(offset), *tail]


def cuda_handle_from_plain(plain: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of `rebuild_cuda_tensor` for a flat byte buffer: the inverse of `plain_cuda_handle`."""
    size, offset, *tail = plain
    return (torch.Tensor, torch.Size([size]), (1,), offset, torch.storage.TypedStorage, torch.uint8, *tail)
