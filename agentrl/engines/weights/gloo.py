"""The transport `gloo`: broadcasts between machines without GPUs. Imports no vLLM, which a trainer there may lack.

`serve_rendezvous` also serves the trainer's ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.errors import TrainerError
from agentrl.core.network import own_address
from agentrl.engines.weights.senders import JOIN_TIMEOUT, in_chunks, join_with_engine

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import Work

    from agentrl.engines.weights.senders import PublishedWeightSource, WeightDestination, WeightTransferConnection

STALL_S = 60.0
"""Seconds for one tensor after which either end gives up."""


class Rendezvous(NamedTuple):
    """Address of rank 0's store, the rendezvous of a group."""

    host: str
    port: int


def serve_rendezvous(host: str) -> tuple[Rendezvous, TCPStore]:
    """Serve the store of a group on one address of this machine and a free port, as rank 0."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    # Given a listening socket, the store listens only at that address, and owns the socket.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach()
    )
    return Rendezvous(host, port), store


class GlooBroadcast:
    """A group of a trainer's rank 0 and the processes of an engine, on the network between their machines.

    It is a separate group, bound to one address regardless of gloo's environment variables.

    Args:
        store: where the group meets.
        rank: number of this process; rank 0 sends.
        size: number of processes.
        host: address of this machine on the route to the others.

    Raises:
        RuntimeError: the others did not come within `STALL_S`; so do `start` and the result's `wait`.
    """

    def __init__(self, store: TCPStore, *, rank: int, size: int, host: str) -> None:
        import torch.distributed

        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=STALL_S)
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(store, rank, size, options)
        self._store = store

    def start(self, tensors: Iterable[Tensor]) -> list[Work]:
        """Start to send contiguous tensors or to receive into them; a waiting list keeps them alive."""
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]  # gloo lacks some dtypes
        return [self._group.broadcast([flat_tensor], options) for flat_tensor in flat]


def join_broadcast(rendezvous: Rendezvous, *, rank: int, size: int) -> GlooBroadcast:
    """Join a group at the store that rank 0 serves.

    Raises:
        RuntimeError: see `GlooBroadcast`.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=JOIN_TIMEOUT)
    return GlooBroadcast(store, rank=rank, size=size, host=own_address(rendezvous.host))


class GlooSender:
    """Broadcasts weights over the network to the processes of an engine on another machine, without GPUs."""

    def __init__(
        self, recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
    ) -> None:
        self.link = link
        self.source = source
        host, size = own_address(recipient.host), 1 + recipient.processes
        rendezvous, store = serve_rendezvous(host)
        info = {"host": host, "port": rendezvous.port, "size": size}
        self._group = join_with_engine(
            lambda: GlooBroadcast(store, rank=0, size=size, host=host),
            lambda: link.init_weight_transfer_engine(info),
            grace_s=STALL_S,
        )

    def send_weights(self) -> None:
        """See vLLM's `TrainerWeightTransferEngine`."""
        from agentrl.engines.models import dtype_name

        self.link.start_weight_update()
        missing = set(self.source.layout)
        for chunk in in_chunks(self.source):
            missing -= chunk.keys()
            transfers = self._group.start(chunk.values())
            self.link.update_weights(
                {
                    "names": list(chunk),
                    "dtype_names": [dtype_name(item.dtype) for item in chunk.values()],
                    "shapes": [list(item.shape) for item in chunk.values()],
                }
            )
            for item in transfers:
                item.wait()
        if missing:
            raise TrainerError(f"{len(missing)} offered tensors do not exist: {', '.join(sorted(missing)[:4])}")
        self.link.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the process group."""
        del self._group


class GlooReceiver:
    """Receives weights on CPUs in a worker process of vLLM."""

    def __init__(self, worker: Any, info: dict[str, Any]) -> None:
        parallel = worker.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank  # as vLLM counts for nccl
        self._worker = worker
        self._group: GlooBroadcast | None = join_broadcast(
            Rendezvous(info["host"], info["port"]), rank=1 + number, size=info["size"]
        )

    def receive(self, update: dict[str, Any]) -> None:
        """Receive and load tensors."""
        import torch

        if self._group is None:
            raise ValueError("the trainer has not announced the weights it sends")
        dtypes = [getattr(torch, name) for name in update["dtype_names"]]
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in zip(dtypes, update["shapes"], strict=True)]
        for transfer in self._group.start(tensors):
            transfer.wait()
        self._worker.model.load_weights(zip(update["names"], tensors, strict=True))

    def end_transfer(self) -> None:
        """Leave the group, which serves one transfer."""
        self._group = None

    shutdown = end_transfer


make_sender, make_receiver = GlooSender, GlooReceiver
