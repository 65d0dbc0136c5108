"""Assigns GPUs to trainer ranks and engines, by the configuration, the sizes of its models and the machine.

Trainer ranks take GPUs from the first, one each; engines take them from the last, as many each as the product of vLLM's
parallel sizes; each base model has its own engines. Where there are fewer GPUs than both need, ranks and engines share
GPUs in the middle: the engine takes a stated share of the memory when it starts, and the rank may not allocate more
than the rest. So either may start first, and an engine can restart while a trainer is loaded. If the engines alone need
more GPUs than there are, the engines of all base models share them.
GPUs of a Ray cluster are never shared, and an
engine's GPUs are on one node.

On a cluster, ranks take nodes from the run's own host onwards, engines from the last backwards, and workers take all in
turn. Rank 0 is on the run's host: it writes versions, step columns and checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentrl.core import machine
from agentrl.core.errors import ConfigError, TrainerLostError
from agentrl.core.machine import GIB, Gpu, Memory
from agentrl.core.text import plural

if TYPE_CHECKING:
    from agentrl.config.plans import DeviceDemand

EXCLUSIVE_SHARE = 0.9
"""Share of a GPU's memory that an engine takes if it has the GPU to itself."""
SHARED_SHARE = 0.45
"""Share of a GPU's memory that an engine takes if a trainer rank computes on the GPU too."""
CONTEXT = 450 << 20
"""Bytes that the CUDA context of a process takes on a GPU, which no allocator counts. An estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """An assignment of GPUs; the numbers are positions in `gpus`."""

    gpus: tuple[Gpu, ...]
    """GPUs of the machine or the cluster; empty: everything computes on CPUs."""
    ranks: tuple[int, ...] = ()
    """GPU of each trainer rank."""
    engines: tuple[tuple[int, ...], ...] = ()
    """GPUs of each engine: first the replicas of the first base model, then those of the next."""
    shares: tuple[float, ...] = ()
    """Share of the memory of each of its GPUs that an engine takes."""

    bases: tuple[str, ...] = ()
    """Name of each engine's base model, if the run has several."""

    def gpus_of_engine(self, number: int) -> tuple[Gpu, ...]:
        """The GPUs of an engine; empty: it computes on CPUs."""
        return tuple(self.gpus[at] for at in self.engines[number]) if self.engines else ()

    def gpu_of_rank(self, rank: int) -> Gpu | None:
        """The GPU of a trainer rank; None: it computes on CPUs."""
        return self.gpus[self.ranks[rank]] if self.ranks else None

    def shares_gpu(self, number: int) -> bool:
        """Whether a trainer rank or another engine computes on a GPU of an engine."""
        other_gpus = {at for engine, gpus in enumerate(self.engines) if engine != number for at in gpus}
        return not {*self.ranks, *other_gpus}.isdisjoint(self.engines[number])

    def share_of_rank(self, rank: int) -> float:
        """The share of its GPU's memory that a trainer rank may allocate."""
        at = self.ranks[rank]
        shares = [share for gpus, share in zip(self.engines, self.shares, strict=True) if at in gpus]
        total = self.gpus[at].memory.total
        contexts = CONTEXT * (1 + len(shares)) / total if total else 0.0  # GPUs of a cluster name no memory
        return 1.0 - contexts - sum(shares)

    def name_of_engine(self, number: int) -> str:
        """The number of an engine, with its base model where there are several."""
        return f"engine {number} of {self.bases[number]}" if self.bases else f"engine {number}"

    def memory_conflicts(self) -> list[str]:
        """Describe the GPUs whose free memory is smaller than the shares of their engines; one message per GPU.

        Call it before the run loads anything: until then, memory in use belongs to other processes.
        """
        messages = []
        for at, gpu in enumerate(self.gpus):
            numbers = [number for number, gpus in enumerate(self.engines) if at in gpus]
            share, (free, total) = sum(self.shares[number] for number in numbers), gpu.memory
            if share * total > free:
                names = " and ".join(map(self.name_of_engine, numbers))
                messages.append(
                    f"GPU {gpu.id}: {names} take{'s' * (len(numbers) == 1)} {share:.0%} of its memory, "
                    f"{share * total / GIB:.1f} GiB, and {free / GIB:.1f} are free: stop what else computes "
                    "there, name other GPUs in CUDA_VISIBLE_DEVICES, or lower engine.memory_share"
                )
        return messages

    def mixed_gpus(self) -> list[str]:
        """Describe the trainer and the engines whose GPUs are different models; one message for each."""
        users = {self.name_of_engine(number): gpus for number, gpus in enumerate(self.engines)}
        users |= {"the trainer": self.ranks}
        messages = []
        for user, gpus in users.items():
            cards = dict.fromkeys(f"{self.gpus[at].name} ({self.gpus[at].memory.total / GIB:.0f} GiB)" for at in gpus)
            if len(cards) > 1:
                messages.append(
                    f"{user} computes on different GPU models, {' and '.join(cards)}, and can use each only as far as "
                    "the smallest. List GPUs of one model in CUDA_VISIBLE_DEVICES"
                )
        return messages

    def lines(self) -> list[str]:
        """Describe the assignment, one line per GPU."""
        lines = []
        for at, gpu in enumerate(self.gpus):
            users = [f"trainer rank {rank}" for rank, device in enumerate(self.ranks) if device == at]
            engines = [number for number, gpus in enumerate(self.engines) if at in gpus]
            if users and engines:
                users = [f"{users[0]} ({self.share_of_rank(self.ranks.index(at)):.0%} of its memory)"]
            for number in engines:
                of_what = "" if users else " of its memory"
                users.append(f"{self.name_of_engine(number)} ({self.shares[number]:.0%}{of_what})")
            where = f" of node {gpu.node[:8]}" if gpu.node else ""
            lines.append(f"GPU {gpu.id}{where}: {' and '.join(users) or 'not used'}")
        return lines


def device_plan(demand: DeviceDemand) -> DevicePlan:
    """Assign the GPUs of this machine to a run's ranks and engines; empty for a run on a cluster (`RaySession.plan`).

    Raises:
        ConfigError: there are too few GPUs.
        InputError: the driver does not list the GPUs.
    """
    return DevicePlan(gpus=()) if demand.cluster.ray_address else plan_devices(demand, machine.gpus())


def plan_devices(demand: DeviceDemand, gpus: Sequence[Gpu], *, ranks: bool = True) -> DevicePlan:
    """Assign the GPUs of a machine or a cluster to the trainer ranks and engines of a run.

    Args:
        demand: processes of the run.
        gpus: available GPUs; GPUs of a cluster name their node.
        ranks: whether the trainer computes on these.

    Raises:
        ConfigError: there are too few, or a rank would have no memory left.
    """
    if not gpus or demand.stays_on_cpu:
        return DevicePlan(gpus=())
    bases, engine = demand.bases, demand.engine
    gpus_per_engine = engine.devices
    may_share = not any(gpu.node for gpu in gpus)
    count = demand.ranks if ranks else 0
    replicas = engine.count * len(bases)
    # Embedded engines reserve no memory, so they share GPUs across base models; vLLMs share only scarce GPUs.
    fits = engine.kind == "vllm" and replicas * gpus_per_engine <= len(gpus)
    engines_per_block = len(bases) if bases and may_share and not fits else 1
    engine_count = replicas // engines_per_block
    free: dict[str, list[int]] = defaultdict(list)
    for at, gpu in enumerate(gpus):
        free[gpu.node].append(at)
    blocks: list[tuple[int, ...]] = []
    for _ in range(engine_count):
        # Of nodes with equally many GPUs, take the last: rank 0 is on the first.
        node = max(reversed(free), key=lambda name: len(free[name]))
        if len(free[node]) < gpus_per_engine:
            break
        blocks.append(tuple(free[node][-gpus_per_engine:]))
        del free[node][-gpus_per_engine:]
    engine_gpus = {at for block in blocks for at in block}
    rank_candidates = [at for at in range(len(gpus)) if may_share or at not in engine_gpus]
    if len(blocks) < engine_count or len(rank_candidates) < count:
        raise ConfigError(_too_few(demand, len(gpus), ranks=count, engines=engine_count, may_share=may_share))
    rank_gpus = tuple(rank_candidates[:count])
    blocks = sorted(blocks) * engines_per_block
    plan = DevicePlan(
        gpus=tuple(gpus),
        ranks=rank_gpus,
        engines=tuple(blocks),
        shares=tuple(
            engine.memory_share
            or (SHARED_SHARE if set(block) & set(rank_gpus) else EXCLUSIVE_SHARE) / engines_per_block
            for block in blocks
        ),
        bases=tuple(name for name in bases for _ in range(engine.count)) if len(bases) > 1 else (),
    )
    for rank in range(count):
        # a rank cannot start with less
        if plan.share_of_rank(rank) < 0.05:
            raise ConfigError(
                f"engines and CUDA contexts take {1 - plan.share_of_rank(rank):.0%} of GPU {gpus[rank_gpus[rank]].id}, "
                f"which leaves {plan.share_of_rank(rank):.0%} to trainer rank {rank}: lower engine.memory_share, or "
                "use a larger GPU"
            )
    return plan


def _too_few(demand: DeviceDemand, count: int, *, ranks: int, engines: int, may_share: bool) -> str:
    gpus_per_engine = demand.engine.devices
    bases = f" for each of {len(demand.bases)} base models" if len(demand.bases) > 1 else ""
    sizes = f"engine.replicas = {demand.engine.count} of {gpus_per_engine} GPU{'s' * (gpus_per_engine > 1)} each{bases}"
    sizes = sizes if engines else "no engine"
    request = f"trainer.ranks = {ranks} and {sizes}" if ranks else sizes
    lower = "trainer.ranks, engine.replicas or a parallel size of [engine.vllm]"
    available = f"{count} GPU{'s' * (count > 1)}"
    if may_share:
        return f"{request} do not fit on {available}, even where ranks share GPUs with engines; lower {lower}"
    total = ranks + engines * gpus_per_engine
    missing = (
        f"{total} are needed, {total - count} more than are free"
        if total > count
        else f"{total} would be enough, if those of one engine were on one node"
    )
    return (
        f"{request} do not fit on the {plural(count, 'free GPU')} of the Ray cluster, where an engine's GPUs are on "
        f"one node and none is shared: {missing}; add nodes, lower {lower}, or run on one machine without "
        "cluster.address, where a rank and an engine can share a GPU"
    )


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a Ray cluster; two are equal if they have the same id and address."""

    id: str
    address: str
    gpus: int = field(default=0, compare=False)
    """GPUs that are free."""
    held: int = field(default=0, compare=False)
    """GPUs that programs of the cluster hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """An assignment of trainer ranks, engines and workers to the nodes of a cluster."""

    devices: DevicePlan
    nodes: tuple[Node, ...] = ()
    """Nodes, the run's own host first; empty: everything is on this machine."""
    ranks: tuple[Node, ...] = ()
    """Node of each trainer rank."""
    engines: tuple[Node, ...] = ()
    """Node of each engine."""
    workers: tuple[Node, ...] = ()
    """Node of each episode worker that has its own process."""

    def gpu_bundles(self) -> dict[str, tuple[Node, int]]:
        """Return the node and the number of GPUs of each process that has any, by its name: first the ranks."""
        ranks = {f"trainer rank {rank}": (node, 1) for rank, node in enumerate(self.ranks) if self.devices.ranks}
        engines = {
            f"engine {number}": (node, len(gpus))
            for number, node in enumerate(self.engines)
            if (gpus := self.devices.gpus_of_engine(number))
        }
        return ranks | engines

    def lines(self) -> list[str]:
        """Describe the assignment, one line per node, then one per GPU."""
        lines = []
        for at, node in enumerate(self.nodes):
            users = [
                f"{name} {number}"
                for name, nodes in (("trainer rank", self.ranks), ("engine", self.engines), ("worker", self.workers))
                for number, place in enumerate(nodes)
                if place == node
            ]
            where = f"{node.address} (the run's host)" if at == 0 else node.address
            lines.append(f"node {where}: {', '.join(users) or 'not used'}")
        return lines + self.devices.lines()


def plan_nodes(demand: DeviceDemand, nodes: Sequence[Node]) -> NodePlan:
    """Assign the parts of a run to the nodes of a cluster.

    Args:
        demand: processes of the run.
        nodes: nodes that are alive, the run's own host first.

    Raises:
        ConfigError: there are too few free GPUs, or none for rank 0 on the run's host.
    """
    gpus = [Gpu(str(number), "", Memory(0, 0), node.id) for node in nodes for number in range(node.gpus)]
    num_occupied, by_id = sum(node.held for node in nodes), {node.id: node for node in nodes}
    message = f"other programs of the Ray cluster hold {plural(num_occupied, 'GPU')}: wait until they end, or add nodes"
    if num_occupied and not gpus and demand.bases:
        raise ConfigError(f"no GPU is free: {message}")
    try:
        devices = plan_devices(demand, gpus)
    except ConfigError as error:
        if not num_occupied:
            raise
        raise ConfigError(f"{error}. In addition, {message}") from None
    ranks, engines = demand.ranks, demand.engine.count * max(1, len(demand.bases))
    if devices.ranks:
        first = devices.gpu_of_rank(0)
        if first is None or first.node != nodes[0].id:
            raise ConfigError(
                f"trainer rank 0 writes the run's files, so it runs on the run's host, {nodes[0].address}, which has "
                "no free GPU for it: start the run on a node that has one"
            )
    rank_gpus = [devices.gpu_of_rank(rank) for rank in range(ranks)]
    hosts = [devices.gpus_of_engine(replica) for replica in range(engines)]
    return NodePlan(
        devices=devices,
        nodes=tuple(nodes),
        ranks=tuple(by_id[gpu.node] if gpu else nodes[rank % len(nodes)] for rank, gpu in enumerate(rank_gpus)),
        engines=tuple(
            by_id[engine_gpus[0].node] if engine_gpus else nodes[-1 - replica % len(nodes)]
            for replica, engine_gpus in enumerate(hosts)
        ),
        workers=_worker_nodes(demand.workers, nodes),
    )


def _worker_nodes(workers: int, nodes: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(nodes[worker % len(nodes)] for worker in range(workers))


def reassign_lost_ranks(plan: NodePlan, workers: int, nodes: Sequence[Node]) -> NodePlan:
    """Move each trainer rank whose node has left to a node with a free GPU, and redistribute the workers.

    Engines stay in the plan: their placement takes another node by itself.

    Args:
        plan: assignment of a run with GPUs.
        workers: number of worker processes, which may have changed.
        nodes: nodes that are alive, the run's own host first, with the GPUs that are free now.

    Raises:
        TrainerLostError: there are too few free GPUs.
    """
    free = [node for node in nodes for _ in range(node.gpus)]
    ranks, gpus = list(plan.ranks), list(plan.devices.gpus)
    for rank, node in enumerate(ranks):
        if node not in nodes:
            if not free:
                raise TrainerLostError(
                    f"node {node.address} of trainer rank {rank} was lost, and no other node has a free GPU; "
                    "start a node, then resume with --resume"
                )
            ranks[rank] = free.pop(0)
            at = plan.devices.ranks[rank]
            gpus[at] = gpus[at]._replace(node=ranks[rank].id)
    devices = replace(plan.devices, gpus=tuple(gpus))
    return replace(plan, devices=devices, nodes=tuple(nodes), ranks=tuple(ranks), workers=_worker_nodes(workers, nodes))
