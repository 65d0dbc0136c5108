"""Checkpoints of learners, from which training resumes.

A checkpoint of a policy is `<directory>/<policy>/`: `weights.safetensors` (trained parameters, float32),
`optimizer.safetensors` (AdamW's moments), `rng.json` (torch's random state), `state.json` (step, version, last report).

Files are safetensors and JSON, never pickle. Owns: the layout, and how tensors are written to a file. Does not own: the
manifest that completes a checkpoint and the deletion of old files (the orchestrator's).
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import (
    MAX_JSON_BYTES,
    SAFETENSORS_LENGTH_BYTES,
    ReadBytes,
    os_error_advice,
    read_bytes,
    read_safetensors_header,
)
from agentrl.core.records import PolicyVersion, StepReport
from agentrl.learn.ranks import exhaust_on_exit, gather_tensors_sequentially, local_row_slice, local_shard

if TYPE_CHECKING:
    from hashlib import _Hash

SYNC_BYTES = 1 << 26
"""Number of bytes after which a file is synced while writing continues, so that little is left to sync at the end."""
PIECE_BYTES = 1 << 26
"""Maximum number of bytes of a checkpoint that are read at once, unless a row of a tensor is larger."""
STATE_FILE = "state.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


@contextmanager
def converting_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of writing `path` within the context.

    Raises:
        StorageError: writing failed, with an error of the system or of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        remedy = os_error_advice(error) if isinstance(error, OSError) else "free space or make it writable"
        raise StorageError(
            f"{path}: could not be written ({reason}); {remedy}, then start the run again with --resume"
        ) from error


class LearnerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a policy's learner has got."""

    step: int
    version: PolicyVersion
    """Last published version."""
    report: StepReport | None
    """Report of the last applied step."""


Parameters = Mapping[str, nn.Parameter]
"""Parameters that an optimizer changes, keyed by name, in the optimizer's order."""


def save_checkpoint(
    directory: Path,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    state: LearnerProgress,
    *,
    writes: bool = True,
) -> None:
    """Write a learner's state into `directory`, which must not exist; sharded tensors are gathered.

    Args:
        directory: directory of the policy in the checkpoint.
        parameters: parameters that the optimizer changes.
        optimizer: optimizer; None leaves its state out.
        state: remaining state of the learner.
        writes: whether this rank writes the files; the others take part, so that each tensor can be gathered.

    Raises:
        StorageError: writing failed, or the directory exists.
    """
    moments = _moments(parameters, optimizer)
    rng = {"torch_cpu": torch.get_rng_state().numpy().tobytes().hex()}
    with exhaust_on_exit(
        chain(gather_tensors_sequentially(parameters), gather_tensors_sequentially(moments))
    ) as tensors:
        if not writes:
            return
        with converting_write_errors(directory):
            directory.mkdir(parents=True)
            write_tensors(directory / "weights.safetensors", parameters, tensors)
            write_tensors(directory / "optimizer.safetensors", moments, tensors)
            (directory / "rng.json").write_text(json.dumps(rng))
            (directory / STATE_FILE).write_bytes(msgspec.json.encode(state))


def load_checkpoint(
    directory: Path,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    read: ReadBytes = read_bytes,
) -> LearnerProgress:
    """Restore a learner's state; the next step is bit-identical to the one that would have followed. Of sharded
    tensors, only the rows of this rank are read.

    Raises:
        TrainerError: the directory lacks a file, or holds another policy's or another configuration's state.
    """
    moments_by_parameter: dict[Tensor, dict[str, Tensor]] = {}
    try:
        rng = json.loads(read(directory / "rng.json", 0, MAX_JSON_BYTES))
        state = msgspec.json.decode(read(directory / STATE_FILE, 0, MAX_JSON_BYTES), type=LearnerProgress)
        weights = _StoredTensors(directory / "weights.safetensors", read)
        moments = _StoredTensors(directory / "optimizer.safetensors", read)
        if optimizer is not None and moments.shapes:
            moments_by_parameter = {parameter: _no_moments(parameter) for parameter in parameters.values()}
        moments_by_name = zip(parameters, moments_by_parameter.values(), strict=False)
        states = {
            f"{name}|{moment}": tensor for name, moments_of in moments_by_name for moment, tensor in moments_of.items()
        }
        if weights.shapes != _shapes(parameters) or (moments_by_parameter and moments.shapes != _shapes(states)):
            raise TrainerError(
                f"the checkpoint in {directory} contains other weights than the configuration trains; resume with "
                "the model and policy sections that the run was started with"
            )
        for name, parameter in parameters.items():
            weights.read_into(parameter, name)
        for name, tensor in states.items():
            moments.read_into(tensor, name)
    except (OSError, ValueError) as error:
        raise TrainerError(f"checkpoint {directory} cannot be read: {error}; resume from an older one") from error
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(moments_by_parameter)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(rng["torch_cpu"]), dtype=torch.uint8))
    return state


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


class _StoredTensor(msgspec.Struct, frozen=True):
    """Entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _StoredTensors:
    """The tensors of a safetensors file, which is read in pieces.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """

    def __init__(self, path: Path, read: ReadBytes) -> None:
        self._path, self._read = path, read
        try:
            header = read_safetensors_header(path, read)
            self._tensors = msgspec.json.decode(header[SAFETENSORS_LENGTH_BYTES:], type=dict[str, _StoredTensor])
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        self._start = len(header)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes by name."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    @torch.no_grad()
    def read_into(self, tensor: Tensor, name: str) -> None:
        """Copy a tensor of the file, or the rows of it that this rank holds, into `tensor`."""
        stored, shard = self._tensors[name], local_shard(tensor)
        (start, end), dtype = stored.data_offsets, _TORCH_DTYPES.get(stored.dtype)
        if dtype is None or end - start != tensor.numel() * dtype.itemsize:
            raise ValueError(f"{self._path.name} does not hold {name} as its header says")
        if not shard.numel():
            return
        rows, first = (shard, local_row_slice(tensor).start) if tensor.ndim else (shard[None], 0)
        row_bytes = rows[0].numel() * dtype.itemsize
        start += self._start + first * row_bytes
        for piece in rows.split(max(1, PIECE_BYTES // row_bytes)):
            data = self._read(self._path, start, len(piece) * row_bytes)
            if len(data) < len(piece) * row_bytes:
                raise ValueError(f"{self._path.name} ends within {name}")
            piece.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(piece.shape))
            start += len(data)


def _no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's initial state of a parameter, all zeros, sharded like it."""
    step = torch.zeros((), device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def _moments(parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return AdamW's state by parameter name; empty before the first step."""
    if optimizer is None:
        return {}
    return {
        f"{name}|{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def write_tensors(
    path: Path,
    layout: Mapping[str, Tensor],
    tensors: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
    digest: _Hash | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a safetensors file, one tensor at a time; equal tensors and metadata give equal files.

    Threads write, sync and hash while the next tensor is gathered; at most two tensors wait to be written and hashed.

    Args:
        path: path of the file.
        layout: tensors with the names, shapes and dtypes of `tensors`, in the same order; those with larger elements
            come first, so that all are aligned.
        tensors: tensors to write, as many as `layout` has.
        metadata: metadata of the file.
        digest: hash to update with the file's content.
        durable: whether the file will be synced when it is complete.
    """
    with (
        path.open("wb", buffering=0) as file,
        ThreadPoolExecutor(1) as syncer,
        ThreadPoolExecutor(1) as writer,
        ThreadPoolExecutor(1) as hasher,
    ):
        pending: deque[list[Future[None]]] = deque()
        syncs: list[Future[None]] = []
        unsynced_bytes = 0

        def write(data: memoryview) -> None:
            nonlocal unsynced_bytes
            while data:
                num_written = file.write(data[:SYNC_BYTES])
                data = data[num_written:]
                unsynced_bytes += num_written
                if durable and unsynced_bytes >= SYNC_BYTES:
                    unsynced_bytes = 0
                    syncs.append(syncer.submit(os.fdatasync, file.fileno()))

        def add(data: memoryview) -> None:
            pending.append([writer.submit(write, data)])
            if digest is not None:
                pending[-1].append(hasher.submit(digest.update, data))
            if len(pending) > 2:
                for future in pending.popleft():
                    future.result()

        add(memoryview(_safetensors_header(layout, metadata)))
        for name, expected in layout.items():
            tensor_name, tensor = next(tensors)
            assert (name, expected.shape, expected.dtype) == (tensor_name, tensor.shape, tensor.dtype)
            add(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # free it before the next tensor is gathered
        for future in chain(chain.from_iterable(pending), syncs):
            future.result()


def _safetensors_header(layout: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a safetensors file before its first tensor."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(SAFETENSORS_LENGTH_BYTES, "little") + text
