"""The files of a sandbox as a journal keeps them: what each command changed, and every content once, by its digest."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core.errors import EntriesError
from agentrl.sandbox.files import FileRecord, contents_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_encode = msgspec.msgpack.Encoder().encode


def content_digest(content: bytes) -> str:
    """Compute the digest by which a content is known: 16 bytes of blake2b, in hexadecimal.

    Example:
        >>> content_digest(b"")
        'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class HashedFile(NamedTuple):
    """A file of a sandbox with its content, which is empty unless it is a plain file."""

    record: FileRecord
    digest: str
    content: bytes


def hashed_files(records: Sequence[FileRecord], contents: bytes) -> list[HashedFile]:
    """Pair the files that `SandboxLease.changes` returned with their contents."""
    files, offset = [], 0
    for record in records:
        content = contents[offset : offset + record.size]
        offset += record.size
        files.append(HashedFile(record, content_digest(content) if record.kind == "file" else "", content))
    return files


class _Change(msgspec.Struct):
    """What a command changed, as the journal holds it."""

    digest: str
    changed: list[tuple[bytes, str, int, int, int, bytes, str]]
    gone: list[bytes]
    contents: dict[str, bytes]


class Difference(NamedTuple):
    """What a command changed."""

    change: dict[str, Any] | None
    """The change for the journal; None if there is none."""
    size: int
    """Size of the contents and names in it, in bytes."""
    after: FileState
    digests: Collection[str]
    """Digests of its contents."""


class FileState:
    """The files of one sandbox after its last command."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[FileRecord, str]] = {}
        """Each file and the digest of its content, by path."""
        self._known_digests: set[str] = set()
        """Digests of contents that need no further place in the journal."""
        self._contents: dict[str, bytes] = {}
        """Contents from which the files can be made again, by digest; empty once a lease holds the files."""

    def __len__(self) -> int:
        return len(self._files)

    @property
    def digest(self) -> str:
        """Digest of all files."""
        return content_digest(_encode([_row(record, digest) for _, (record, digest) in sorted(self._files.items())]))

    def supply(self, contents: Iterable[bytes], *, keep: bool) -> list[str]:
        """Note contents that a re-execution supplies again, so the journal need not hold them. Returns their digests.

        `keep` says that no lease holds the files, so that they are made again from these contents.
        """
        digests = []
        for content in contents:
            digest = content_digest(content)
            digests.append(digest)
            self._known_digests.add(digest)
            if keep:
                self._contents[digest] = content
        return digests

    def difference(self, files: Sequence[HashedFile], missing_paths: Sequence[str] | None) -> Difference:
        """Compute what a command changed. It may run in a thread: it changes nothing.

        Args:
            files: files that may have changed.
            missing_paths: paths that are gone; None: all that are not among `files`.
        """
        after = FileState()
        after._files = dict(self._files)
        if missing_paths is None:
            missing_paths = [*after._files.keys() - {file.record.path for file in files}]
        rows, fresh = [], dict[str, bytes]()
        for record, digest, content in files:
            if record.kind == "file" and digest not in self._known_digests:
                fresh[digest] = content
            if after._files.get(record.path) != (record, digest):
                after._files[record.path] = (record, digest)
                rows.append(_row(record, digest))
        removed_names = [os.fsencode(path) for path in missing_paths if after._files.pop(path, None) is not None]
        if not rows and not removed_names:
            return Difference(None, 0, after, fresh.keys())
        change = {"digest": after.digest, "changed": rows, "gone": removed_names, "contents": fresh}
        return Difference(change, change_size(change), after, fresh.keys())

    def take(self, difference: Difference) -> dict[str, Any] | None:
        """Take in what a command changed. Returns the change for the journal; None if there is none."""
        self._files = difference.after._files
        self._known_digests.update(difference.digests)
        return difference.change

    def apply(self, change: dict[str, Any]) -> None:
        """Take in a change from the journal.

        Raises:
            EntriesError: it is not what `update` returned.
        """
        try:
            recorded = msgspec.convert(change, _Change)
        except msgspec.ValidationError as error:
            raise EntriesError(f"the files that a sandbox's command changed cannot be read: {error}") from error
        for path, kind, mode, modified, size, target, digest in recorded.changed:
            record = FileRecord(os.fsdecode(path), kind, mode, modified, size, os.fsdecode(target))
            self._files[record.path] = (record, digest)
        for path in recorded.gone:
            self._files.pop(os.fsdecode(path), None)
        self._known_digests.update(recorded.contents)
        self._contents.update(recorded.contents)

    def to_restore(self, disk_mb: int) -> tuple[list[FileRecord], bytes]:
        """Return all files and their contents, while no lease holds them.

        Raises:
            EntriesError: the journal lacks a content, or they have more bytes than a sandbox with `disk_mb` can hold.
        """
        # Further names come last: the file itself must exist by then.
        files = sorted(self._files.values(), key=lambda file: (file[0].kind == "same", file[0].path))
        plain = [(record, self._contents.get(digest)) for record, digest in files if record.kind == "file"]
        if wrong := [record.path for record, content in plain if content is None or len(content) != record.size]:
            raise EntriesError(f"the journal lacks the content of {wrong[0]!r}, a file of a sandbox")
        if sum(record.size for record, _ in plain) > (limit := contents_limit(disk_mb)):
            raise EntriesError(f"the files of a sandbox have more than {limit >> 20} MiB")
        return [record for record, _ in files], b"".join(content for _, content in plain if content is not None)

    def forget_contents(self) -> None:
        """Forget the contents, since a lease holds the files."""
        self._contents = {}

    def part(self, only: Sequence[str] = (), without: Sequence[str] = ()) -> FileState:
        """Return the files at or below the absolute paths `only`, or all, but for those at or below `without`."""
        part = FileState()
        for path, (record, digest) in self._files.items():
            if (only and not is_below(path, only)) or is_below(path, without):
                continue
            if record.kind == "same":  # its first name may be left out
                first, digest = self._files.get(record.target, (record, digest))
                record = first._replace(path=path)
            part._files[path] = (record, digest)
        part._known_digests, part._contents = set(self._known_digests), dict(self._contents)
        return part

    @classmethod
    def of(cls, files: Sequence[HashedFile]) -> FileState:
        """Return the state that consists of these files."""
        state = cls()
        state.take(state.difference(files, ()))
        state._contents = {digest: content for _, digest, content in files}
        return state


def change_size(change: dict[str, Any]) -> int:
    """Return the size of the contents and names in a change, in bytes."""
    names = sum(len(path) + len(target) for path, *_, target, _ in change["changed"])
    return names + sum(map(len, change["gone"])) + sum(map(len, change["contents"].values()))


def is_below(path: str, tops: Sequence[str]) -> bool:
    """Whether a file is at or below one of some absolute paths."""
    return any(f"{path}/".startswith(f"{top.strip('/')}/") for top in tops)


def _row(record: FileRecord, digest: str) -> tuple[bytes, str, int, int, int, bytes, str]:
    """Return a record as the journal holds it; paths need not be text."""
    return (
        os.fsencode(record.path),
        record.kind,
        record.mode,
        record.modified,
        record.size,
        os.fsencode(record.target),
        digest,
    )
