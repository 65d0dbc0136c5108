"""The transports of full weights from rank 0 of a trainer to the processes of an engine: the table, and the choice.

A transport is a module with a sender and a receiver, and a line in `TRANSPORTS`. The module is imported in the
processes that use it: rank 0 of the trainer and vLLM's workers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from agentrl.config.devices import DevicePlan

REJOIN_S = 600.0


class WeightSender(Protocol):
    """Sends to one engine, in rank 0."""

    source: Any
    """The tensors of the next transfer."""

    def send_weights(self) -> None:
        """Send the source, by calls of vLLM's protocol: start, updates, finish."""
        ...

    def shutdown(self) -> None:
        """Leave the group with the engine."""
        ...


class TransportReceiver(Protocol):
    """Receives in one worker process of an engine."""

    def receive(self, update: dict[str, Any]) -> None:
        """Receive the tensors of an update, and load them into the model."""
        ...

    def end_transfer(self) -> None:
        """Release what belongs to one transfer."""
        ...

    def shutdown(self) -> None:
        """Leave the group with the trainer."""
        ...


class TransportModule(Protocol):
    """A transport's module."""

    def make_sender(self, recipient: Any, link: Any, source: Any) -> WeightSender:
        """Make a sender that is connected to the engine; for the parameters, see `senders.make_sender`.

        `link.init_weight_transfer_engine` passes what each of the engine's processes needs for `make_receiver`.
        """
        ...

    def make_receiver(self, worker: Any, info: dict[str, Any]) -> TransportReceiver:
        """Make a receiver for a worker's `VersionTransferEngine`, connected to the trainer."""
        ...


class WeightTransport(NamedTuple):
    """A way for tensors from rank 0 to an engine."""

    module: str
    device: Literal["cpu", "cuda"]
    """Device on which rank 0 reads the published tensors."""
    keeps_sender: bool
    """Whether one sender serves all transfers to a process of an engine; otherwise each transfer makes one."""
    rejoin_s: float
    """Seconds after which rank 0 retries to connect to a process after a failure."""

    def load(self) -> TransportModule:
        """Import the module."""
        return cast("TransportModule", importlib.import_module(self.module))


TRANSPORTS: Mapping[str, WeightTransport] = MappingProxyType(
    {
        "ipc": WeightTransport("agentrl.engines.weights.ipc", "cuda", keeps_sender=True, rejoin_s=REJOIN_S),
        # An attempt to join may never end, so there is one with each process.
        "nccl": WeightTransport("agentrl.engines.weights.nccl", "cuda", keeps_sender=True, rejoin_s=math.inf),
        # A failed attempt may block the engine for `JOIN_TIMEOUT`, and rank 0 for `STALL_S`.
        "gloo": WeightTransport("agentrl.engines.weights.gloo", "cpu", keeps_sender=False, rejoin_s=REJOIN_S),
    }
)


def transport_named(name: str) -> WeightTransport:
    """Return a transport.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"no transport of weights is called {name!r}; there are {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def local_transport(plan: DevicePlan, number: int) -> str | None:
    """Choose the transport to an engine on rank 0's machine; None: the engine loads the published file."""
    if not (plan.ranks and plan.engines):
        return None
    gpus = plan.engines[number]
    if gpus == plan.ranks[:1]:
        return "ipc"
    return None if plan.ranks[0] in gpus else "nccl"


def network_transport(publish: Literal["auto", "full", "delta"], *, on_gpus: bool) -> str | None:
    """Choose the transport to an engine on any node of a cluster, by `engine.publish` and whether the engine has GPUs,
    as rank 0 then has too; None: the engine's owner sends the published files. `gloo` sends what `nccl` sends
    between GPUs, so tests without any cover that path."""
    if on_gpus:
        return None if publish == "delta" else "nccl"
    return "gloo" if publish == "full" else None
