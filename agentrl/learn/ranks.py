"""The data-parallel group of a trainer: communication between its ranks, and a model sharded over them by FSDP2.

Each rank of a sharded model holds a part of every parameter, its gradient and its optimizer state. Layers are gathered
one at a time while they compute; the parts outside the layers (embeddings, output projection, last norm) are gathered
for the whole pass. Where all weights are trained, the shards are the float32 masters, gathered in the model's dtype;
under adapters, base and adapters are each sharded in their own dtype. Gradients are added up, not averaged, in float32.
With a mesh of two dimensions, each row of the mesh holds the weights once (HSDP).

Owns: sums of gradients, exchange of step columns, the choice of the rank that writes files, the units and dtypes of
gathering. Does not own: starting the processes (`cluster`), which parameters are trained (`models.py`).
Invariant: every call is made by all ranks in the same order; nothing is pickled between them. Ranks meet at a TCPStore
that rank 0 serves on one address of its machine: loopback, or the one toward the other nodes. On CPU the group is
gloo, bound to the interface of that address. On GPUs it is nccl for GPU tensors; that path has not been run on a
GPU yet.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from agentrl.core.errors import AgentRLError, ModelError, StorageError, TrainerError, TrainerLostError
from agentrl.core.network import interface_of
from agentrl.engines.models import outermost_layers
from agentrl.learn.forward import HeadOutput, token_logprobs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""Time that a rank waits for the others in a collective operation."""
JOIN_TIMEOUT = timedelta(seconds=45)
"""Time that a rank waits for the others to join the group."""


class Rendezvous(NamedTuple):
    """Address of rank 0's store, where the ranks meet."""

    host: str
    port: int


def serve_rendezvous(host: str) -> tuple[Rendezvous, TCPStore]:
    """Serve the store of a group on one address of this machine and a free port, as rank 0."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    # Given a listening socket, the store listens only at that address, and owns the socket.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach()
    )
    return Rendezvous(host, port), store


def equal_shares(count: int, ranks: int) -> list[range]:
    """Split `count` items into contiguous ranges, one per rank, with lengths that differ by at most 1."""
    return [range(rank * count // ranks, (rank + 1) * count // ranks) for rank in range(ranks)]


def balanced_shares(sizes: Sequence[int], ranks: int) -> list[range]:
    """Split items into contiguous ranges, one per rank, with the smallest possible largest sum of sizes."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:  # finds the smallest limit for which the ranks suffice
        limit = (low + high) // 2
        low, high = (low, limit) if len(_fill_groups(sizes, limit)) <= ranks else (limit + 1, high)
    shares = _fill_groups(sizes, high)
    return shares + [range(len(sizes), len(sizes))] * (ranks - len(shares))


def _fill_groups(sizes: Sequence[int], limit: int) -> list[range]:
    """Split items into ranges, each as long as its sum of sizes stays within the limit."""
    shares, start, total = list[range](), 0, 0
    for at, size in enumerate(sizes):
        if total + size > limit:
            shares.append(range(start, at))
            start, total = at, 0
        total += size
    return [*shares, range(start, len(sizes))]


@torch.no_grad()
def gather_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor, gathered if it is sharded; all ranks must call this.

    Each shard is received into its place, so only the result takes memory. Shards are rounded to `dtype` first.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(placement.is_shard() for placement in tensor.placements):  # a partial sum, such as a norm
        return tensor.full_tensor()
    mesh, dimension = tensor.device_mesh, _sharded_dimension(tensor)
    result = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    size = mesh.size(dimension)
    for rank in range(size):
        rows = result[_rows_of(len(tensor), rank, size)]
        if rank == mesh.get_local_rank(dimension):
            rows.copy_(tensor.to_local())
        if rows.numel():  # sent as bytes, because not every backend supports every dtype
            dist.broadcast(rows.view(-1).view(torch.uint8), group=mesh.get_group(dimension), group_src=rank)
    return result


def gather_tensors_sequentially(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, one at a time, each gathered; all ranks must iterate to the end."""
    for name, tensor in tensors.items():
        yield name, gather_tensor(tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_float32(parameter: Tensor) -> Tensor:
    """Return a whole parameter in float32."""
    return gather_tensor(parameter, torch.float32).float()


def shard_tensor(tensor: Tensor, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """This rank's shard of a tensor, on a device: a part of its rows, as FSDP2 divides them; without communication."""
    dimension = mesh.ndim - 1
    shard = tensor.detach()[_rows_of(len(tensor), mesh.get_local_rank(dimension), mesh.size(dimension))]
    placements = [*[Replicate()] * dimension, Shard(0)]
    shard = shard.to(device, copy=True)
    return DTensor.from_local(
        shard,
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty_like(tensor, device="meta").stride(),
    )


def local_row_slice(tensor: Tensor) -> slice:
    """Return the rows of a tensor (its first dimension) that this rank holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    mesh, dimension = tensor.device_mesh, _sharded_dimension(tensor)
    return _rows_of(len(tensor), mesh.get_local_rank(dimension), mesh.size(dimension))


def _sharded_dimension(tensor: DTensor) -> int:
    """Return the mesh dimension over which a tensor is sharded."""
    (dimension,) = (at for at, placement in enumerate(tensor.placements) if placement.is_shard(0))
    return dimension


def _rows_of(length: int, rank: int, ranks: int) -> slice:
    """Return the range of `length` rows held by one of several ranks."""
    rows = -(-length // ranks)
    start = min(length, rows * rank)
    return slice(start, min(length, start + rows))


@contextmanager
def exhaust_on_exit(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterate to the end even if the block fails, because the other ranks do: all must make the same collective
    calls.
    """
    iterator = iter(items)
    try:
        yield iterator
    finally:
        for _ in iterator:
            pass


def broadcast_from_first_rank(ranks: RankGroup, work: Callable[[], bytes]) -> bytes:
    """Run `work` on every rank; return the result of rank 0 on every rank, or raise its error.

    Raises:
        StorageError, TrainerError: rank 0 raised one.
    """
    data, refusal = b"", ["", ""]
    try:
        data = work()
    except AgentRLError as error:
        if type(error) not in _REFUSALS.values():
            raise
        refusal = [type(error).__name__, str(error)]
    (kind, text), data = msgspec.msgpack.decode(
        ranks.gather(msgspec.msgpack.encode((refusal, data)))[0], type=tuple[tuple[str, str], bytes]
    )
    if kind:
        raise _REFUSALS[kind](text)
    return data


_REFUSALS: Mapping[str, type[AgentRLError]] = {error.__name__: error for error in (StorageError, TrainerError)}


class RankGroup(Protocol):
    """A group of trainers of the same weights, whole or sharded, each of which sees a share of every step."""

    rank: int
    size: int

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, bit-identical on all of them. All of one dtype."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        ...

    def mesh(self, shards: int) -> DeviceMesh | None:
        """Return the mesh over which models are sharded, each copy over `shards` ranks; None: there is no group."""
        ...


class SingleRankGroup:
    """A trainer without other ranks."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors unchanged: there is only one rank."""

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def mesh(self, shards: int) -> DeviceMesh | None: ...


BUCKET = 256 << 20
"""Bytes of gradients that are copied and summed at once, unless one tensor is larger."""


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors, in their order, into lists of at most `BUCKET` bytes; a larger tensor forms its own list."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


class DistributedRankGroup:
    """One of several ranks in a torch.distributed group."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        device: torch.device,
        addresses: Sequence[str],
        store: TCPStore | None = None,
    ) -> None:
        """Join the group; returns when all ranks have joined.

        Args:
            rendezvous: address of the store.
            rank: number of this rank, from 0.
            device: device of the gradients; nccl moves them on CUDA, gloo in main memory.
            addresses: address of each rank's machine, on the network that connects them.
            store: the store, at rank 0.

        Raises:
            TrainerLostError: ranks did not join within `JOIN_TIMEOUT`; the message names them and their machines.
        """
        self.rank = rank
        self.size = size = len(addresses)
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        interface = interface_of(addresses[rank])
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
        # Offloaded shards are gathered in main memory, so a CPU backend is needed too.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        present = [f"present/{rank_number}" for rank_number in range(size)]
        try:
            if store is None:
                store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=JOIN_TIMEOUT)
            store.set(present[rank], addresses[rank])
            store.wait(present, JOIN_TIMEOUT)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        except RuntimeError as error:  # torch.distributed raises RuntimeErrors
            seconds = JOIN_TIMEOUT.total_seconds()
            absent = self._absent(store, present)
            if not absent:
                raise TrainerLostError(
                    f"trainer rank {rank} on node {addresses[rank]} could not join the group: {error}"
                ) from error
            names = ", ".join(f"{rank_number} on node {addresses[rank_number]}" for rank_number in absent)
            raise TrainerLostError(f"trainer rank {names} did not join the group within {seconds:g} s") from error
        self._store = store

    @staticmethod
    def _absent(store: TCPStore | None, present: Sequence[str]) -> list[int]:
        try:
            return [rank for rank, key in enumerate(present) if store is not None and not store.check([key])]
        except RuntimeError:  # the store may have failed too
            return []

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors up over all ranks, with one message for each bucket of them, on any device."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).to(self._device) for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self._device))
        longest = max(1, *(int(size) for size in sizes))
        padded_data = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(padded_data) for _ in range(self.size)]
        dist.all_gather(parts, padded_data)
        return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def mesh(self, shards: int) -> DeviceMesh | None:
        if shards == self.size:
            return init_device_mesh(self._device.type, (self.size,))
        names = ("replicate", "shard")
        return init_device_mesh(self._device.type, (self.size // shards, shards), mesh_dim_names=names)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def rank_device(rank: int, *, stays_on_cpu: bool) -> torch.device:
    """Return the device of a rank: one GPU per rank if the run uses any, else the CPU."""
    if torch.cuda.is_available() and not stays_on_cpu:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def limit_gpu_memory(device: torch.device, share: float) -> None:
    """Limit this process to a share of the memory of a rank's GPU; an engine may have the rest."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


# --- sharding of a model over the ranks -------------------------------------------------------------------------------


class ShardedForward(nn.Module):
    """`forward.token_logprobs` of a model whose weights lie in shards.

    This module is the root of the shards, because `token_logprobs` calls parts of the model separately.

    Args:
        model: model with its weights, on any device, whole or as shards (`ranks.shard_tensor`); its parameters become
            `DTensor`s.
        mesh: see `DistributedRankGroup.mesh`.
        masters: whether full weights are trained, so that the shards are float32.
        offload: whether the shards stay in main memory, with their gradients and optimizer states; layers go to the
            mesh's device while they compute.

    Raises:
        ModelError: FSDP2 cannot shard the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        masters: bool,
        offload: bool = False,
    ) -> None:
        super().__init__()
        self.model: Any = model
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if masters and len(dtypes) > 1:
            raise _refusal(model, f"it has parameters of several dtypes, {', '.join(sorted(map(str, dtypes)))}")
        policy = MixedPrecisionPolicy()
        if masters and dtypes != {torch.float32}:
            policy = MixedPrecisionPolicy(
                param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        shards = _without_data(self.model)
        try:
            for module in [*outermost_layers(self.model), self]:
                if masters:
                    for parameter in module.parameters():
                        if not isinstance(parameter, DTensor):
                            parameter.data = parameter.data.float()
                module_shards: Any = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)
                # Gradients are summed, not averaged, over ranks: the loss is already divided by the normalizer of the
                # whole step.
                module_shards.set_gradient_divide_factor(1.0)
                module_shards.set_force_sum_reduction_for_comms(True)
                # An expert that got no token on this rank may have a gradient on another rank.
                module_shards.set_reduce_scatter_unused_params(True, recurse=False)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _refusal(model, str(error)) from error
        if masters:
            float32_shards = {shard: nn.Parameter(shard.detach().float()) for shard in shards.values()}
            shards = {name: float32_shards[shard] for name, shard in shards.items()}
        self.model.load_state_dict(shards, strict=False, assign=True)

    def forward(self, *arguments: Any, **settings: Any) -> HeadOutput:
        # Clones, because FSDP attaches hooks to the returned tensors and cannot do so for views.
        return token_logprobs(self.model, *arguments, **settings).map(Tensor.clone)

    def __call__(self, *arguments: Any, **settings: Any) -> HeadOutput:
        """Gather weights, call `forward`, and add up gradients."""
        output: HeadOutput = super().__call__(*arguments, **settings)
        if not torch.is_grad_enabled():
            root: Any = self
            root.reshard()  # otherwise the root's weights stay gathered and outdated until a backward pass
        return output


def _without_data(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace parameters that are shards already, which FSDP does not take, by ones without data; return the shards by
    name."""
    parameters = model.named_parameters(remove_duplicate=False)
    shards: dict[str, nn.Parameter] = {
        name: parameter for name, parameter in parameters if isinstance(parameter, DTensor)
    }
    empty = {
        parameter: nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in shards.values()  # keeps tied parameters tied
    }
    for name, parameter in shards.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, empty[parameter])
    return shards


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    kind = type(model).__name__
    return ModelError(f"{kind} cannot be sharded: {' '.join(reason.split())}; set trainer.sharding = 'none'")
