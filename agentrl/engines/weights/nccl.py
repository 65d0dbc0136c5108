"""The transport `nccl`: broadcasts from rank 0's GPU to the GPUs of an engine.

Differs from vLLM's in one thing: processes join by an id that rank 0 makes and sends, because a TCPStore would listen
on every interface. Imports vLLM, in rank 0 too. Not run on a GPU yet.
"""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine

from agentrl.engines.weights.senders import join_with_engine

if TYPE_CHECKING:
    from agentrl.engines.weights.senders import PublishedWeightSource, WeightDestination, WeightTransferConnection


class NcclReceiver(NCCLWeightTransferEngine):
    """Receives broadcasts on the GPU of one process."""

    def receive(self, update: dict[str, Any]) -> None:
        """Receive and load tensors."""
        self.receive_weights(self.parse_update_info(update))

    def end_transfer(self) -> None:
        """Do nothing: the group lasts as long as the process."""


def make_sender(
    recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
) -> NCCLTrainerWeightTransferEngine:
    """Make a sender, and join the group of the engine's processes."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    os.environ.setdefault("NCCL_SOCKET_IFNAME", recipient.interface)
    client: Any = link  # its `finish_weight_update` takes no label, because the engine knows it
    weights: Any = source
    sender = NCCLTrainerWeightTransferEngine(
        client=client, source=weights, packed=True, packed_buffer_size_bytes=source.buffer_bytes
    )
    unique, size = bytes(NCCLLibrary().ncclGetUniqueId().internal), 1 + recipient.processes
    device = torch.accelerator.current_device_index()
    sender.model_update_group = join_with_engine(
        lambda: nccl_common.uid_init_process_group(unique, 0, size, device),
        lambda: link.init_weight_transfer_engine(nccl_join_message(unique, size, sender)),
        grace_s=0.0,  # without the engine, nccl's attempt never ends
    )
    link.on_failure = sender.shutdown  # nccl knows no time limit: this ends a broadcast to an engine that is gone
    return sender


def make_receiver(worker: Any, info: dict[str, Any]) -> NcclReceiver:
    """Make a receiver of a worker of vLLM, and join the group of the trainer's rank 0."""
    receiver = NcclReceiver(WeightTransferConfig(backend="nccl"), worker.vllm_config, worker.device, worker.model)
    receiver.init_transfer_engine(receiver.parse_init_info(info))
    return receiver


def nccl_join_message(unique_id: bytes, size: int, sender: NCCLTrainerWeightTransferEngine) -> dict[str, Any]:
    """Make the message by which the engine's processes join rank 0's group, as ranks 1 and up."""
    worker = nccl_common.NCCLWeightTransferInitInfo(
        rank_offset=1,
        world_size=size,
        nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
        packed=sender.packed,
        packed_buffer_size_bytes=sender.packed_buffer_size_bytes,
        packed_num_buffers=sender.packed_num_buffers,
    )
    return nccl_common.worker_init_payload(worker)
