"""Checkpoints: one manifest, written last, that a run resumes from.

    checkpoints/step_000120/          built as .tmp-…, every file synced, renamed, parent synced
        <trainer's files>             weights, optimizer and random state of every policy
        manifest.json                 versions, ledger, digests of the files

The manifest says what is *consumed*: every unit of a step up to its versions, along their lineage. The control log says
which units those are, and is flushed before the manifest is written; training after the newest manifest is lost
together with the weights it made, and done again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.core.errors import StorageError
from agentrl.core.files import open_regular, sha256_of, size_of, sync_directory
from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion
from agentrl.orchestrator.ledger import Ledger

FORMAT = 0
MAX_MANIFEST_BYTES = 64 << 20
_NAME = re.compile(r"step_(\d{6,})-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint that can be resumed from."""

    directory: Path
    versions: Mapping[str, PolicyVersion]


class CheckpointWriter:
    """Writes checkpoints of one run and prunes old ones.

    Args:
        directory: the run's checkpoint directory.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    async def write(self, trainer: Trainer, versions: Mapping[str, PolicyVersion], ledger: Ledger) -> Path:
        """Save the trainer and seal it with a manifest; the control log must have been flushed.

        Raises:
            StorageError: the disk refused; earlier checkpoints are untouched.
        """
        # The sum of steps grows with every policy's, so no two cuts of a lineage share a name.
        step = sum(version.step for version in versions.values())
        lineage = max(version.lineage for version in versions.values())
        target = self._directory / f"step_{step:06d}-{lineage}"
        staging = self._directory / f".tmp-{target.name}"
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            await trainer.save(str(staging))
            await asyncio.to_thread(_seal, staging, versions, ledger)
            staging.rename(target)
            sync_directory(self._directory)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise StorageError(
                f"checkpoint {target}: {error.strerror or error}; free space and resume the run"
            ) from error
        self._prune(target)
        return target

    def _prune(self, written: Path) -> None:
        """Remove what is older than the newest `keep` that can be resumed from; a damaged one takes nobody's place."""
        whole = 0
        for candidate in _candidates(self._directory):
            if whole >= self._keep and candidate != written:
                shutil.rmtree(candidate, ignore_errors=True)
            else:
                whole += _is_whole(candidate)


def newest(directory: Path) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint whose files are those of its manifest, and why each newer one was passed over.

    Args:
        directory: a run's checkpoint directory.

    Returns:
        The checkpoint, None if there is none that can be resumed from; and a sentence for each that was rejected,
        newest first.
    """
    rejected: list[str] = []
    for candidate in _candidates(directory):
        try:
            return _verified(candidate), rejected
        except StorageError as error:
            rejected.append(str(error))
    return None, rejected


def _candidates(directory: Path) -> list[Path]:
    """Checkpoint directories, newest first: a later lineage is newer than a higher step of a dead one."""
    found = []
    for path in directory.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[2]), int(match[1]), path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _seal(staging: Path, versions: Mapping[str, PolicyVersion], ledger: Ledger) -> None:
    files = {
        str(path.relative_to(staging)): [path.stat().st_size, sha256_of(path)]
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    content = {
        "format": FORMAT,
        "versions": {policy: [version.lineage, version.step] for policy, version in versions.items()},
        "ledger": ledger.as_data(),
        "files": files,
    }
    path = staging / "manifest.json"
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(staging)


def _verified(directory: Path) -> Manifest:
    """The manifest of a checkpoint every file of which has its digest; StorageError says what is wrong."""
    manifest, files = _read(directory)
    for name, (_, digest) in files.items():
        try:
            with open_regular(directory / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StorageError(f"checkpoint {directory}: {name!r} cannot be read ({error.strerror})") from error
        if found != digest:
            raise StorageError(
                f"checkpoint {directory}: {name!r} is not the file that was saved: its digest is another"
            )
    return manifest


def _is_whole(directory: Path) -> bool:
    """Whether a checkpoint has its manifest and files of the right sizes; their bytes are not read."""
    try:
        _read(directory)
    except StorageError:
        return False
    return True


def _read(directory: Path) -> tuple[Manifest, Mapping[str, tuple[int, str]]]:
    """A manifest, and size and digest of each of its files, all of which are there in their sizes.

    Raises:
        StorageError: it cannot be read, or a file is missing, of another size, or not inside the checkpoint.
    """
    try:
        content = _load(directory / "manifest.json")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version reads {FORMAT}")
        files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        for name, (size, _) in files.items():
            _check_file(directory, name, size)
        versions = {
            policy: PolicyVersion(policy, int(lineage), int(step))
            for policy, (lineage, step) in content["versions"].items()
        }
    except OSError as error:
        name = Path(str(error.filename or "manifest.json")).name
        raise StorageError(f"checkpoint {directory}: {name!r} cannot be read ({error.strerror})") from error
    except KeyError as error:
        raise StorageError(f"checkpoint {directory}: its manifest has no {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StorageError(f"checkpoint {directory}: its manifest does not hold ({error})") from error
    return Manifest(directory=directory, versions=versions), files


def _load(path: Path) -> Any:
    with open_regular(path) as file:
        if size_of(file) > MAX_MANIFEST_BYTES:
            raise ValueError(f"{size_of(file)} bytes; at most {MAX_MANIFEST_BYTES}")
        return json.loads(file.read())


def _check_file(directory: Path, name: str, size: int) -> None:
    """Refuse a name that leads out of the checkpoint, through a link too, and a file of another size."""
    relative = PurePosixPath(name)
    path = directory / relative
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file inside the checkpoint")
    if path.resolve() != directory.resolve() / relative:
        raise ValueError(f"{name!r} is reached through a symbolic link")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name!r} is not a regular file")
    if found.st_size != size:
        raise ValueError(f"{name!r} has {found.st_size} bytes, and {size} were saved")
