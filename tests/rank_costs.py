"""What a step costs a rank: the bytes that it sends, the tensors that it allocates, the memory that it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.learn.memory_prediction import AllocationCounter


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to others: the weights that it gathers and reduces, and exchanged rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = Counter[str]()
        """Bytes by "weights" and "rows"."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            group = dist.ProcessGroup.unbox(args[2])
            source, size, rank = args[1], group.size(), group.rank()
            match name:
                case "_allgather_base_":
                    self.sent["weights"] += source.nbytes * (size - 1)
                case "_reduce_scatter_base_":
                    self.sent["weights"] += source.nbytes * (size - 1) // size
                case _:
                    splits = args[4] or [len(source) // size] * size
                    kept = source.nbytes * splits[rank] // max(1, len(source))
                    self.sent["rows"] += source.nbytes - kept
        return func(*args, **(kwargs or {}))


@contextmanager
def measured_costs(held: list[Tensor], costs: dict[str, int]) -> Iterator[None]:
    """Add what the block costs: bytes sent of `weights` and `rows`, the `peak` of its tensors, and of resident memory.

    Args:
        held: tensors that exist already.
        costs: costs of this rank so far.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts at what is resident
    before = _resident("VmRSS")
    with AllocationCounter(held) as allocated, SentBytes() as traffic:
        yield
    grown = _resident("VmHWM") - before
    costs.update({name: costs.get(name, 0) + count for name, count in traffic.sent.items()})
    costs["peak"] = max(costs.get("peak", 0), allocated.peak)
    costs["grown"] = max(costs.get("grown", 0), grown)


def _resident(name: str) -> int:
    (kibibytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kibibytes) << 10
