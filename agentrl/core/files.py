"""Safe file operations: open files that others may have written, and put a directory in place completely or not at all.

`Disk` is the port of every file that must survive a crash: checkpoints and published versions. `LOCAL` is the real one;
tests use one that crashes. Only this module knows the protocol: build in a `staging_directory` directory, then
`rename_durably`: sync every file, sync the directories, rename, sync the parent. A name that exists is therefore
complete, even after a power cut. Files that may be lost in one are put in place by `rename_whole`, and made durable by
`sync_directory` once something durable names them. The half-built directories of dead processes have staging names;
`remove_staging_directories` removes them.

`open_regular` opens regular files only: no endless device or pipe, and no link to another place.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from agentrl.core.errors import InputError, JournalError, ModelError, StorageError

T = TypeVar("T")

STAGING = ".tmp-"
"""Prefix of the names of half-built directories."""
CREATE_FLAGS = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to create a file without following a link or waiting for a pipe of its name."""
SAFETENSORS_LENGTH_BYTES = 8
"""Size of the length that a safetensors file begins with."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header, as the format's own reader has it."""
MAX_JSON_BYTES = 1 << 25
"""Maximum size of a JSON file or template of a model or checkpoint, which may come from others and is parsed whole."""
MAX_TOKENIZER_BYTES = 1 << 27
"""Maximum size of a `tokenizer.json`; the largest in use has 33 MB."""
WEIGHT_FILES: Mapping[str, tuple[str, ...]] = {
    "full": ("model.safetensors",),
    "adapter": ("adapter_model.safetensors", "adapter_config.json"),
}
"""Files of a version's directory that determine what it samples, by kind of weights: tensors first, then their
scale."""


ReadBytes = Callable[[Path, int, int], bytes]
"""Reads a file, perhaps on another host, as `read_bytes` does."""


def read_bytes(path: Path, start: int, count: int) -> bytes:
    """Return `count` bytes of a file from `start` on, fewer at its end.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(start)
        return read_at_most(file, count)


def read_whole(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Read a file of a model directory or checkpoint; follows links.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is longer than `limit` bytes.
    """
    with path.open("rb") as file:
        if (size := file_size(file)) > limit:
            raise ValueError(f"{size:,} bytes, more than {limit:,}")
        return read_at_most(file, limit)


def read_safetensors_header(path: Path, read: ReadBytes = read_bytes) -> bytes:
    """Return the first bytes of a safetensors file: the length of its JSON header, in 8 bytes, and the header.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no header.
    """
    length = read(path, 0, SAFETENSORS_LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES or len(header := read(path, SAFETENSORS_LENGTH_BYTES, size)) < size:
        raise ValueError(f"a header of {size:,} bytes")
    return length + header


def count_parameters(directory: Path) -> int:
    """Count the parameters stored in a model directory, from the headers of its safetensors files.

    Raises:
        ModelError: the directory has no such file, or one cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no weights (no *.safetensors)")
    total = 0
    for file in files:
        try:
            header = json.loads(read_safetensors_header(file)[SAFETENSORS_LENGTH_BYTES:])
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read.

    Raises:
        OSError: it is missing, a symbolic link, a device, a pipe or a directory, or may not be read.
    """
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file", str(path))
        return open(os.fspath(path), "rb", opener=lambda *_: descriptor)  # with its name, unlike `os.fdopen`
    except BaseException:
        os.close(descriptor)
        raise


def expand_path(path: str | Path) -> str:
    """Return a path, or a reference that begins with one, as people write it: `~` is a home directory, a `file:` URL
    its path, and slashes at the end mean nothing. Variables such as `$HOME` are left to the shell.

    Raises:
        InputError: a `file:` URL is malformed, names another machine, or has more than a path; or there is a zero byte.

    Example:
        >>> expand_path("file:///data/my%20model/"), expand_path("runs/"), expand_path("https://example.com/v1/")
        ('/data/my model', 'runs', 'https://example.com/v1/')
    """
    text = os.fspath(path)
    if text[:5].lower() == "file:":
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise InputError(f"{text}: this is no URL ({error}); write the path of a file") from error
        if url.netloc.lower() not in ("", "localhost"):
            raise InputError(f"{text}: names the machine {url.netloc!r}; write the path of a file on this machine")
        if url.query or url.fragment:
            raise InputError(f"{text}: a URL of a file has no `?` or `#`; write %3F or %23, or the path of the file")
        text = unquote(url.path)
    elif "://" in text:
        return text
    if "\0" in text:
        raise InputError(f"{text!r}: a path contains no zero byte")
    return os.path.expanduser(text).rstrip("/") or text[:1]


def refuse_links(*places: Path) -> None:
    """Refuse symbolic links, which could lead from a run directory to another run's files, and pipes and devices, which
    libraries that load weights would wait for.

    Raises:
        JournalError: a place is none of: a file, a directory, missing.
    """
    for place in places:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = place.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise JournalError(
                    f"{place}: this is a symbolic link, which may lead to another run's files. Put the directory or "
                    "file itself there; only the run's directory as a whole may be a link"
                )
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise JournalError(f"{place}: this is neither a file nor a directory. No run wrote it; remove it")


def refuse_links_below(*directories: Path) -> None:
    """Do the same for directories and everything in them.

    Raises:
        JournalError: see `refuse_links`.
    """
    refuse_links(*directories)
    for top in directories:
        for folder, folders, files in os.walk(top):
            refuse_links(*(Path(folder, name) for name in (*folders, *files)))


def was_closed_by_foreign_code(error: BaseException | None) -> bool:
    """Whether a descriptor of this process was closed by code that does not own it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            return True
        error = error.__cause__ or error.__context__
    return False


def temporary_directory() -> Path:
    """Return the directory for temporary files.

    Raises:
        StorageError: there is none that can be written to.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise StorageError(
            "there is no directory for temporary files (tried $TMPDIR, /tmp, /var/tmp and the working directory); set "
            "TMPDIR to a directory that can be written to"
        ) from error


def os_error_advice(error: OSError) -> str:
    """Advice on an error of the operating system, as a clause."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "free space"
        case errno.EFBIG:
            return "raise the limit on the size of files (ulimit -f)"
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit on open files (ulimit -n)"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "make it writable"
        case errno.ENOENT | errno.ENOTDIR:
            return "restore the moved or removed files"
        case errno.EAGAIN:
            return "raise the limit on processes (ulimit -u)"
        case errno.ENOMEM:
            return "free memory"
        case errno.ENAMETOOLONG:
            return "choose a shorter name"
    return "check the disk"


def resume_advice(error: OSError) -> str:
    """Advice on an error of the operating system that ends a run, as a clause."""
    return f"{os_error_advice(error)}, then start again with --resume"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically with one that only its owner can read.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_EXCL | CREATE_FLAGS, 0o600), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link to a file that never changes, or a copy where the file system allows no link.

    Raises:
        FileExistsError: the target exists.
        OSError: the file can be neither linked nor copied.
    """
    try:
        os.link(source, target)
    except FileExistsError:  # a copy would replace its content
        raise
    except OSError:
        shutil.copyfile(source, target)


def file_size(file: BufferedReader) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_at_most(file: BufferedReader, limit: int) -> bytes:
    """Read the rest of an open file, at most `limit` bytes; allocates only as much as there is."""
    return file.read(max(min(file_size(file) - file.tell(), limit), 0))


def sha256_of(*paths: Path) -> str:
    """Hexadecimal SHA-256 of the concatenated contents of files, read in pieces; follows links."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


class Disk(Protocol):
    """Operations on files that must survive a crash. All may raise `OSError`; none follows links."""

    def make_directory(self, path: Path) -> None:
        """Make one directory, whose parent exists; `FileExistsError` if the name is taken."""
        ...

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file; it is durable once the file and its directory are synced."""
        ...

    def sync(self, path: Path) -> None:
        """Make a file's content, or a directory's entries, durable."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory atomically; refused if the new name belongs to a directory with files."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its contents; ignores errors."""
        ...

    def names(self, directory: Path) -> list[str]:
        """Sorted names in a directory; empty if it does not exist."""
        ...

    def files(self, directory: Path) -> dict[str, int]:
        """Sizes in bytes of the regular files below a directory, by relative name, sorted."""
        ...

    def read(self, path: Path, *, limit: int) -> bytes:
        """Contents of a regular file of at most `limit` bytes; `ValueError` for a larger one."""
        ...

    def digest(self, path: Path) -> str:
        """Hexadecimal SHA-256 of a regular file's content."""
        ...

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run many operations without blocking the event loop.

        If the caller is cancelled, it ends with the operations, so that nothing removes files beneath them.
        """
        ...


class LocalDisk:
    """The local disk; see `Disk`."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        with path.open("xb") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def names(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, directory: Path) -> dict[str, int]:
        sizes = {}
        for folder, _, names in os.walk(directory):
            for name in names:
                path = Path(folder, name)
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[str(path.relative_to(directory))] = status.st_size
        return dict(sorted(sizes.items()))

    def read(self, path: Path, *, limit: int) -> bytes:
        with open_regular(path) as file:
            if file_size(file) > limit:
                raise ValueError(f"{file_size(file)} bytes; at most {limit}")
            return file.read()

    def digest(self, path: Path) -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        import asyncio  # imported late: asyncio would be a third of the modules that a reading command loads

        future = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise


LOCAL: Disk = LocalDisk()


@contextlib.contextmanager
def staging_directory(target: Path, *, disk: Disk = LOCAL, depth: int = 1, durable: bool = True) -> Iterator[Path]:
    """Yield an empty staging directory next to `target`; remove it at the end, unless it was renamed.

    Up to `depth` parent directories are created, and synced if the target should be `durable`. A run directory that was
    moved away is never re-created: it would contain nothing but the newest file.
    """
    staging = target.with_name(STAGING + target.name)
    _make_parents(target.parent, disk, depth, durable=durable)
    disk.remove_tree(staging)
    disk.make_directory(staging)
    try:
        yield staging
    finally:
        disk.remove_tree(staging)


def rename_durably(
    staging: Path, target: Path, *, disk: Disk = LOCAL, unless_same: Callable[[Path], bool] | None = None
) -> None:
    """Sync a staged directory with all its contents, rename it to `target` and sync the parent; see `rename_whole`.

    Raises:
        FileExistsError: the target exists with different content.
        OSError: the disk failed; the target does not exist.
    """
    _sync_contents(staging, disk)
    rename_whole(staging, target, disk=disk, unless_same=unless_same)
    disk.sync(target.parent)


def rename_whole(
    staging: Path, target: Path, *, disk: Disk = LOCAL, unless_same: Callable[[Path], bool] | None = None
) -> None:
    """Rename a staged directory to `target`. No other process sees a part of it, but a power cut may leave one, until
    `sync_directory` was called.

    Args:
        staging: a directory from `staging_directory`.
        target: its new name.
        disk: the disk that holds both.
        unless_same: whether the content of an existing target is the same; the target then stays, without an error.

    Raises:
        FileExistsError: the target exists with different content.
        OSError: the disk failed; the target does not exist.
    """
    try:
        disk.rename(staging, target)
    except OSError as error:
        if not disk.files(target):
            raise
        with contextlib.suppress(OSError, ValueError):  # it lacks a file, or is damaged
            if unless_same is not None and unless_same(target):
                return
        raise FileExistsError(error.errno, "exists with different content", str(target)) from error


def sync_directory(directory: Path, *, disk: Disk = LOCAL, depth: int = 1) -> None:
    """Sync a directory that `rename_whole` put in place, with its name and the names of `depth` - 1 parents.

    Raises:
        OSError: the disk failed, or there is no such directory.
    """
    _sync_contents(directory, disk)
    for parent in directory.parents[:depth]:
        disk.sync(parent)


def _sync_contents(directory: Path, disk: Disk) -> None:
    """Sync a directory, its files, and the folders below it."""
    names = disk.files(directory)
    for name in names:
        disk.sync(directory / name)
    folders = {Path(), *(folder for name in names for folder in Path(name).parents)}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        disk.sync(directory / folder)


def remove_whole(directory: Path, *, disk: Disk = LOCAL) -> None:
    """Remove a directory under a staging name, because its own name must never stand for a part of it. A directory that
    cannot be renamed stays as it is."""
    staging = directory.with_name(STAGING + directory.name)
    disk.remove_tree(staging)  # left by a process that was killed here
    with contextlib.suppress(OSError):
        disk.rename(directory, staging)
    disk.remove_tree(staging)


def remove_staging_directories(directory: Path, *, disk: Disk = LOCAL) -> None:
    """Remove the staging directories of dead processes. No process may be building in `directory`."""
    for name in disk.names(directory):
        if name.startswith(STAGING):
            disk.remove_tree(directory / name)


def _make_parents(directory: Path, disk: Disk, depth: int, *, durable: bool) -> None:
    """Make a directory and up to `depth - 1` of its parents. If they should be durable, sync each into the directory
    above, existing ones too: a process may have been killed between making and syncing one."""
    try:
        disk.make_directory(directory)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if depth <= 1:
            raise
        _make_parents(directory.parent, disk, depth - 1, durable=durable)
        disk.make_directory(directory)
    if durable:
        disk.sync(directory.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; empty if there is no such file.

    Raises:
        ModelError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_whole(path).decode())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not contain a JSON object")
    return value


def near_file_hint(path: Path, pattern: str = "*") -> str:
    """Return `; did you mean FILE?` with the file beside a missing one whose name is most like its name, or ""."""
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob(pattern)], n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


def check_model_directory(path: str | Path) -> None:
    """Check that a path is the directory of a model, without reading it.

    Raises:
        ModelError: it is not.
    """
    if not (Path(path) / "config.json").is_file():
        directory = Path(path).absolute()
        names = [config.parent.name for config in directory.parent.glob("*/config.json")]
        close = difflib.get_close_matches(directory.name, names, n=1)
        hint = f" (did you mean {directory.with_name(close[0])}?)" if close else ""
        problem = "contains no model (config.json is missing)" if directory.is_dir() else "there is no such directory"
        raise ModelError(
            f"{directory}: {problem}{hint}. Give the local directory of a Hugging Face causal LM, such as DIR "
            "after `hf download ORGANIZATION/NAME --local-dir DIR`"
        )
