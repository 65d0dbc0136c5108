"""Reads files of other tools within bounds, and builds files beside their target.

Reading limits the size, the number of values and the depth. Each error is an `InputError` that names the file, the
line and the fault. Nothing is guessed and nothing is repaired.

`staging_path` makes a directory for an export or an import beside its target. The directory is locked while in use, so
several processes may build for one target at once; directories of dead processes are removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentrl.core.errors import InputError
from agentrl.core.files import STAGING, open_regular, read_at_most, staging_directory

T = TypeVar("T")

MAX_LINE_BYTES = 32 << 20
"""Maximum size of a line, or of a file that holds one value, in bytes."""
MAX_VALUES = 3_000_000
"""Maximum number of values in a line, counted by commas and brackets, because the decoded values must fit into
memory.
"""
MAX_OBJECTS = 200_000
"""Maximum number of objects in a line; the smallest take one to two kilobytes each."""
MAX_DEPTH = 60
"""Maximum nesting of stored values; the commands that read runs show a hundred levels."""
MAX_INT = 2**63
_OBJECT = re.compile(rb'\{\s*["}]')
_NAME = "exchange-"


def walk_directories(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directories of a tree, each with the sorted names of its files; nothing if `source` is a file.

    Raises:
        InputError: a directory cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, NotADirectoryError):
            raise _unreadable(Path(error.filename), error) from error

    for directory, below, names in os.walk(source, onerror=refuse):
        below.sort()
        yield Path(directory), sorted(names)


def json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the position of each line, for error messages, and its bytes; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line is too long.
    """
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB; shorten the output of its tools"
                    )
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if line.strip():
                    yield where, line
    except OSError as error:
        raise _unreadable(path, error) from error


def read_whole_file(path: Path) -> bytes:
    """Return the bytes of a file that holds one value.

    Raises:
        InputError: the file cannot be read, or is too large.
    """
    try:
        with open_regular(path) as file:
            content = read_at_most(file, MAX_LINE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > MAX_LINE_BYTES:
        raise InputError(f"{path}: larger than {MAX_LINE_BYTES >> 20} MiB; shorten the output of its tools")
    return content.removeprefix(BOM_UTF8)


def decode_json(content: bytes, kind: type[T], where: str) -> T:
    """Decode JSON as a value of a type.

    Raises:
        InputError: the content is no JSON, not of the type, or exceeds a limit.
    """
    values = sum(content.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise InputError(f"{where}: about {values:,} values; at most {MAX_VALUES:,} are allowed")
    if next(islice(_OBJECT.finditer(content), MAX_OBJECTS, None), None) is not None:
        raise InputError(f"{where}: more than {MAX_OBJECTS:,} objects")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
        raise InputError(f"{where}: not readable as JSON ({error})") from error


def check_storable(value: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Return the value unchanged if a journal can store it.

    Raises:
        InputError: the value is nested too deeply, or contains a number that journals cannot store.
    """
    if isinstance(value, dict | list):
        if depth == 0:
            raise InputError(f"{where}: values nested deeper than {MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            check_storable(item, where, depth - 1)
    elif isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        raise InputError(f"{where}: a whole number of {value.bit_length()} bits; at most 64 are supported")
    return value


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


@contextlib.contextmanager
def staging_path(target: Path) -> Iterator[Path]:
    """Yield a path on the same disk at which to build `target`. At the end it is removed unless it was renamed.

    Raises:
        OSError: the disk failed.
    """
    with contextlib.ExitStack() as until_built:
        target.parent.mkdir(exist_ok=True)
        # Holds the parent's lock, so that cleanups do not take it for a leftover before it is locked.
        with _locked(target.parent):
            _remove_those_of_the_dead(target.parent)
            directory = until_built.enter_context(staging_directory(target.with_name(_NAME + secrets.token_hex(8))))
            until_built.enter_context(_locked(directory))
        yield directory / target.name


def _remove_those_of_the_dead(parent: Path) -> None:
    for directory in parent.glob(f"{STAGING}{_NAME}*"):
        # Raised for a link, or if it is in use.
        with contextlib.suppress(OSError), _locked(directory, os.O_NOFOLLOW, fcntl.LOCK_NB):
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, opening: int = 0, waiting: int = 0) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | opening)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | waiting)
        yield
    finally:
        os.close(descriptor)
