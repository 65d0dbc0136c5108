"""Full weights stored as the changes since an earlier version.

A version's directory holds `model.safetensors`, or the two files of a delta, or both:

* `delta.json`: the base version's directory and digest (`DeltaRecord`).
* `delta.bin`: the header of the version's `model.safetensors`, compressed, then one frame per `BLOCK_BYTES` of its
  data. A frame holds the 16-bit words that differ from the base: the distances between them, and the differences of
  their values, which after an optimizer step are mostly ±1. A block with too many changes is stored as it is.

A base may be a delta too. `open_weights` reads any version as if `model.safetensors` were there. The digest of a
version does not depend on how it is stored. Readers check it, which detects changes applied to another base.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import msgspec

from agentrl.core.files import (
    DELTA_FILES,
    LOCAL,
    MAX_HEADER_BYTES,
    SAFETENSORS_LENGTH_BYTES,
    STAGING,
    WEIGHT_FILES,
    Disk,
    open_regular,
)

if TYPE_CHECKING:
    from hashlib import _Hash

BLOCK_BYTES = 1 << 20
"""Number of bytes of a version's data in one frame."""
MAX_DELTAS = 8
"""Maximum number of deltas that a reader applies; the version after them is stored whole."""
_RECORD_FILE, _DELTA_FILE = DELTA_FILES
(_WHOLE_FILE,) = WEIGHT_FILES["full"]
_RECORD_BYTES = 4096
_FRAME = struct.Struct("<II")
"""Start of a frame: the number of bytes of distances, and of the payload."""
_VERBATIM = 0xFFFFFFFF
"""In place of the number of distances: the payload is the block itself."""
_SKIP = 255
"""A distance of 255 unchanged words, after which the distance continues."""


class WeightDeltaError(ValueError):
    """A delta that is damaged, or that belongs to another base."""


class DeltaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a delta changes: the content of `delta.json`."""

    base: str
    """Name of the base version's directory, next to the delta's."""
    base_sha256: str
    """Digest of the base version."""
    sha256: str
    """Digest of the version itself."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d{1,18}\.\d{1,18}", self.base):
            raise ValueError(f"{self.base[:80]!r} is not a directory of a version")
        for digest in (self.base_sha256, self.sha256):
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{digest[:80]!r} is not a digest")


def read_record(directory: Path, *, disk: Disk = LOCAL) -> DeltaRecord | None:
    """Return what the delta in a directory changes; None if there is no delta.

    Raises:
        OSError: the record cannot be read.
        WeightDeltaError: it is damaged.
    """
    path = directory / _RECORD_FILE
    try:
        return msgspec.json.decode(disk.read(path, limit=_RECORD_BYTES), type=DeltaRecord)
    except FileNotFoundError:
        return None
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise WeightDeltaError(f"{path} is damaged ({error})") from error


def base_needed(directory: Path, *, disk: Disk = LOCAL) -> str | None:
    """Return the name of the directory without which a version cannot be read; None if it is whole.

    Raises:
        OSError, WeightDeltaError: see `read_record`.
    """
    record = None if _WHOLE_FILE in disk.files(directory) else read_record(directory, disk=disk)
    return None if record is None else record.base


# --- reading ----------------------------------------------------------------------------------------------------------


def open_weights(path: Path, *, base: Path | None = None) -> io.BufferedReader:
    """Open a file of a version to read from start to end; `model.safetensors` is rebuilt if a delta is stored.

    Args:
        path: path of the file.
        base: directory of the delta's base, if it is not next to the delta.

    Raises:
        OSError: the file, or one that it is rebuilt from, cannot be read; from `read` as well.
        WeightDeltaError: a delta is damaged; from `read` as well. Only the digest tells whether the bytes are the
            version's.
    """
    if not _is_rebuilt(path):
        return path.open("rb")
    return io.BufferedReader(_PiecesFile(str(path), _rebuild(path.parent, base)), BLOCK_BYTES)


def _is_rebuilt(path: Path) -> bool:
    """Whether a file of a version is not stored itself."""
    return path.name == _WHOLE_FILE and not path.is_file() and (path.parent / _RECORD_FILE).is_file()


def read_header(file: BinaryIO) -> bytes:
    """Read an open safetensors file up to its first tensor.

    Raises:
        OSError: the file cannot be read.
        WeightDeltaError: it has no header, or is rebuilt and cannot be.
    """
    length = file.read(SAFETENSORS_LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES or len(header := file.read(size)) < size:
        raise WeightDeltaError(f"{file.name} has no safetensors header")
    return length + header


def read_header_of(path: Path) -> bytes:
    """Read the header of a safetensors file of a version.

    Raises:
        OSError, WeightDeltaError: see `read_header`.
    """
    with open_weights(path) as file:
        return read_header(file)


class _PiecesFile(io.RawIOBase):
    """A file to read, made of pieces."""

    def __init__(self, name: str, pieces: Generator[bytes | bytearray]) -> None:
        self.name = name
        self._pieces = pieces
        self._rest = memoryview(next(pieces))  # raises here what opening would raise

    def readable(self) -> bool:
        return True

    def readall(self) -> bytes:
        return b"".join((self._rest, *self._pieces))  # by default, 8 KiB at a time

    def close(self) -> None:
        self._pieces.close()
        super().close()

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(target), len(self._rest))
        target[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _rebuild(directory: Path, base: Path | None) -> Generator[bytes | bytearray]:
    """Yield the header and the blocks of a version's `model.safetensors`."""
    with ExitStack() as files:
        deltas: list[_DeltaFile] = []
        """Deltas that lead from a whole version to this one, oldest first."""
        while not (directory / _WHOLE_FILE).is_file() and (record := read_record(directory)) is not None:
            if len(deltas) == MAX_DELTAS:
                raise WeightDeltaError(f"{directory}: more than {MAX_DELTAS} deltas lead to it")
            deltas.insert(0, _DeltaFile(files.enter_context(open_regular(directory / _DELTA_FILE))))
            directory, base = base or directory.parent / record.base, None
            if directory.is_symlink():
                raise WeightDeltaError(f"{directory} is a symbolic link, but another version needs it as its base")
        whole = files.enter_context(open_regular(directory / _WHOLE_FILE))
        read_header(whole)
        yield [delta.read_header() for delta in deltas][-1]
        while True:
            block = bytearray(whole.read(BLOCK_BYTES))
            for delta in deltas:
                changed = delta.change(block)
                block = block if changed is None else changed
            if changed is None:  # the end of the newest delta
                return
            yield block


class _DeltaFile:
    """A `delta.bin`, read from start to end.

    Raises, from every method:
        WeightDeltaError: the file is damaged.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read_header(self) -> bytes:
        """Return the header of the version's `model.safetensors`."""
        frame = self._read_frame()
        if frame is None:
            raise WeightDeltaError(f"{self._file.name} is empty")
        return self._decompress(frame[1], MAX_HEADER_BYTES)

    def change(self, block: bytearray) -> bytearray | None:
        """Apply the next frame to the base's next block, in place, and return the result; None at the end."""
        if (frame := self._read_frame()) is None:
            return None
        num_distances, payload = frame
        if num_distances == _VERBATIM:
            return bytearray(payload)
        if not payload:
            return block
        import numpy as np  # imported late: most readers of a run have no deltas

        data = self._decompress(payload, 2 * BLOCK_BYTES)
        distances = np.frombuffer(data, np.uint8, min(num_distances, len(data)))
        is_change = distances != _SKIP
        positions = np.cumsum(distances + is_change, dtype=np.int64)[is_change] - 1
        has_words = not len(block) % 2 and (not len(positions) or 2 * positions[-1] < len(block))
        if not has_words or len(data) != num_distances + 2 * len(positions):
            raise WeightDeltaError(f"{self._file.name} is damaged (its changes do not fit the base)")
        words = np.frombuffer(block, "<u2")
        folded = np.frombuffer(data, np.uint8, offset=num_distances).reshape(2, -1).astype("<u2")
        folded = folded[0] | folded[1] << 8
        words[positions] += folded >> 1 ^ -(folded & 1)
        return block

    def _read_frame(self) -> tuple[int, bytes] | None:
        """Return the next frame's number of distances and payload; None at the end."""
        if not (start := self._file.read(_FRAME.size)):
            return None
        num_distances, size = _FRAME.unpack(start.ljust(_FRAME.size, b"\xff"))
        if size > MAX_HEADER_BYTES or len(payload := self._file.read(size)) < size:
            raise WeightDeltaError(f"{self._file.name} ends within a frame")
        return num_distances, payload

    def _decompress(self, payload: bytes, limit: int) -> bytes:
        decompressor = zlib.decompressobj()
        try:
            data = decompressor.decompress(payload, limit)
        except zlib.error as error:
            raise WeightDeltaError(f"{self._file.name} is damaged ({error})") from error
        if not decompressor.eof:
            raise WeightDeltaError(f"{self._file.name} is damaged (a frame does not end where it should)")
        return data


# --- writing ----------------------------------------------------------------------------------------------------------


class DeltaEncoder:
    """Turns the bytes of a version's `model.safetensors` into those of its `delta.bin`.

    Args:
        base: `model.safetensors` of the base version, after its header.
    """

    def __init__(self, base: BinaryIO) -> None:
        self._base = base
        self._has_header = False
        self._block = bytearray()
        self.num_words = self.num_changed = 0
        """Number of 16-bit words, and how many of them differ from the base."""

    def add(self, data: memoryview) -> Iterator[memoryview]:
        """Yield the frames that the next bytes complete; the first ones are the header."""
        if not self._has_header:
            self._has_header = True
            yield _frame(0, zlib.compress(data))
            return
        while data:
            count = BLOCK_BYTES - len(self._block)
            self._block += data[:count]
            data = data[count:]
            if len(self._block) == BLOCK_BYTES:
                yield from self.finish()

    def finish(self) -> Iterator[memoryview]:
        """Yield the frame of the bytes that are left, if there are any."""
        new, self._block = bytes(self._block), bytearray()
        if new:
            yield self._encode(new)

    def _encode(self, new: bytes) -> memoryview:
        old = self._base.read(len(new))
        self.num_words += len(new) // 2
        if len(old) != len(new) or len(new) % 2:
            self.num_changed += len(new) // 2
            return _frame(_VERBATIM, new)
        import numpy as np  # imported late: most readers of a run have no deltas

        old_words, new_words = np.frombuffer(old, "<u2"), np.frombuffer(new, "<u2")
        positions = np.flatnonzero(old_words != new_words)
        self.num_changed += len(positions)
        if 3 * len(positions) >= len(new):  # a change takes three bytes before compression
            return _frame(_VERBATIM, new)
        if not len(positions):
            return _frame(0, b"")
        num_skips, remainders = np.divmod(np.diff(positions, prepend=-1) - 1, _SKIP)
        distances = np.full(len(positions) + int(num_skips.sum()), _SKIP, np.uint8)
        distances[np.cumsum(num_skips + 1) - 1] = remainders
        differences = (new_words[positions] - old_words[positions]).view("<i2")
        # Folded, so that small differences of either sign have a second byte of 0.
        folded = (differences << 1 ^ differences >> 15).view("<u2")
        # Little but zeros repeats, so searching for repetitions would only cost time.
        compressor = zlib.compressobj(strategy=zlib.Z_RLE)
        payload = b""
        # Each part ends a block of the compressor, so it has a Huffman code for its own values.
        for part in (distances, (folded & 0xFF).astype(np.uint8), (folded >> 8).astype(np.uint8)):
            payload += compressor.compress(part.tobytes())
            payload += compressor.flush(zlib.Z_SYNC_FLUSH)
        return _frame(len(distances), payload + compressor.flush())


def _frame(num_distances: int, payload: bytes) -> memoryview:
    return memoryview(_FRAME.pack(num_distances, len(payload)) + payload)


def write_record(directory: Path, record: DeltaRecord) -> None:
    """Write what the delta in a directory changes."""
    (directory / _RECORD_FILE).write_bytes(msgspec.json.encode(record))


def remove_delta(directory: Path) -> None:
    """Remove the delta of a version that is whole."""
    for name in DELTA_FILES:
        (directory / name).unlink(missing_ok=True)


def make_whole(directory: Path, *, into: Path | None = None, base: Path | None = None, durable: bool = True) -> None:
    """Write the `model.safetensors` of a version that lacks it, for programs that cannot read deltas.

    Args:
        directory: directory of the version.
        into: directory of the file, if it is another one.
        base: see `open_weights`.
        durable: whether the file must survive a power cut.

    Raises:
        OSError: a file cannot be read or written.
        WeightDeltaError: the delta is damaged, or belongs to another base.
    """
    if not _is_rebuilt(directory / _WHOLE_FILE):
        return
    into = into or directory
    partial = into / f"{STAGING}{_WHOLE_FILE}"
    try:
        with partial.open("wb") as file:
            copy_weights(directory / _WHOLE_FILE, file, base=base)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, into / _WHOLE_FILE)
        if durable:
            LOCAL.sync(into)
    finally:
        partial.unlink(missing_ok=True)


def copy_weights(path: Path, into: BinaryIO, *, base: Path | None = None) -> None:
    """Write the bytes of a version's file into an open, empty one. If the file is rebuilt, its digest is checked.

    Raises:
        OSError, WeightDeltaError: see `open_weights`.
    """
    if _is_rebuilt(path):
        _read_checked(path, hashlib.sha256(), base=base, copy=into)
    else:
        with path.open("rb") as content:
            try:
                while os.sendfile(into.fileno(), content.fileno(), None, 1 << 30):  # the kernel copies
                    pass
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                shutil.copyfileobj(content, into, BLOCK_BYTES)  # `sendfile` cannot write into this file


def digest_of_version(directory: Path, kind: Literal["full", "adapter"]) -> str:
    """Return the digest of a version, however it is stored.

    Raises:
        OSError: a file cannot be read.
        WeightDeltaError: the delta is damaged, or belongs to another base.
    """
    digest = hashlib.sha256()
    for name in WEIGHT_FILES[kind]:
        _read_checked(directory / name, digest)
    return digest.hexdigest()


def _read_checked(path: Path, digest: _Hash, *, base: Path | None = None, copy: BinaryIO | None = None) -> None:
    """Add the bytes of a version's file to a digest and to a copy. If the file is rebuilt, the digest must be that of
    its record."""
    record = read_record(path.parent) if _is_rebuilt(path) else None
    with open_weights(path, base=base) as content:
        while data := content.read(BLOCK_BYTES):
            digest.update(data)
            if copy is not None:
                copy.write(data)
    if record is not None and digest.hexdigest() != record.sha256:
        raise WeightDeltaError(
            f"{path.parent}: the SHA-256 digest of its weights is {digest.hexdigest()}, but {record.sha256} was "
            "published"
        )
