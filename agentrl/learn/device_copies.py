"""Copies of numpy arrays to the device that computes, many in one transfer.

A transfer costs the host several microseconds, and from memory that is not pinned the host waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_ALIGNMENT = 16
"""Alignment of arrays in a transfer, in bytes."""


def device_tensors(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to a device in one transfer; on CUDA from pinned memory, so that the host does not wait for it."""
    if device.type in ("cpu", "meta"):
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]).tolist()
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    sources = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays.values()]
    for source, start in zip(sources, [0, *ends], strict=False):
        buffer[start : start + source.nbytes] = source.view(-1).view(torch.uint8)
    device_buffer = buffer.to(device, non_blocking=True)
    return {
        name: device_buffer[start : start + source.nbytes].view(source.dtype).view(source.shape)
        for name, source, start in zip(arrays, sources, [0, *ends], strict=False)
    }
