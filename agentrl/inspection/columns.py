"""Token columns without numpy: those of journal entries, and those of a step's file.

A file of a run is read as hostile: its header is bounded, and what it says of itself is compared with its size.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.files import open_regular, read_at_most
from agentrl.journal.reader import pruned_file

MAX_HEADER_BYTES = 8 << 20
MAX_FILE_BYTES = 192 << 20
_CODES = {"F32": "f", "I32": "i", "I64": "q"}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class StepRow(msgspec.Struct, frozen=True):
    """What a step computed and used for the trained tokens of one row, by position in it."""

    episode: str
    row: int
    """Of the unit: its rows are counted over all its agents."""
    position: Sequence[int]
    trainer_logprobs: Sequence[float]
    """NaN where the row was not forwarded, since no gradient could come from it."""
    entropy: Sequence[float]
    """NaN likewise."""
    behavior_logprobs: Sequence[float]
    advantages: Sequence[float]
    lag: Sequence[int]


def int32(data: bytes) -> array[int]:
    """Little-endian 32-bit integers; a tail that is no whole one is left out."""
    return _column("i", data[: len(data) // 4 * 4])


def float32(data: bytes) -> array[float]:
    """Little-endian 32-bit floats; a tail that is no whole one is left out."""
    return _column("f", data[: len(data) // 4 * 4])


def step_rows(run: Path, name: Any) -> list[StepRow]:
    """The rows of a step's file, in the order they were consumed.

    Args:
        run: the run's directory.
        name: of the file, relative to it, as the step's record has it.

    Raises:
        PrunedError: it was given up.
        JournalError: there is no such file, it lies outside the run, or it is damaged.
    """
    path = run / str(name)
    if not isinstance(name, str) or not path.resolve().is_relative_to(run.resolve()):
        raise JournalError(f"the columns of a step are said to lie in {str(name)[:200]!r}, which is not in the run")
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(read_at_most(file, min(size, MAX_HEADER_BYTES)), type=dict[str, Any])
            data = memoryview(read_at_most(file, MAX_FILE_BYTES))
        described = msgspec.json.decode(header.pop("__metadata__", {})["rows"], type=list[tuple[str, int]])
        columns = {key: _tensor(msgspec.convert(value, _Tensor), data) for key, value in header.items()}
        return _rows(described, columns)
    except OSError as error:
        raise pruned_file(run, name) or JournalError(
            f"{path}: cannot be read ({error.strerror}); the step's columns are gone"
        ) from error
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        raise JournalError(f"{path}: not the columns of a step ({error}); it is damaged") from error


def _rows(described: list[tuple[str, int]], columns: dict[str, Any]) -> list[StepRow]:
    offsets = columns["offsets"]
    if len(offsets) != len(described) + 1 or offsets[-1] != len(columns["position"]) or min(offsets) < 0:
        raise ValueError("its rows and their offsets differ")
    names = ("position", "trainer_logprobs", "entropy", "behavior_logprobs", "advantages", "lag")
    return [
        StepRow(episode, row, *(columns[name][start:stop] for name in names))
        for (episode, row), start, stop in zip(described, offsets, offsets[1:], strict=False)
    ]


def _tensor(tensor: _Tensor, data: memoryview) -> array[Any]:
    start, stop = tensor.data_offsets
    if not 0 <= start <= stop <= len(data):
        raise ValueError("it is shorter than its header says")
    return _column(_CODES[tensor.dtype], data[start:stop])


def _column(code: str, data: bytes | memoryview) -> array[Any]:
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
