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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import StorageError
from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion
from agentrl.orchestrator.ledger import Ledger

FORMAT = 0
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
            _sync_directory(self._directory)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise StorageError(
                f"checkpoint {target}: {error.strerror or error}; free space and resume the run"
            ) from error
        self._prune()
        return target

    def _prune(self) -> None:
        for stale in _candidates(self._directory)[self._keep :]:
            shutil.rmtree(stale, ignore_errors=True)


def newest(directory: Path) -> Manifest | None:
    """The newest checkpoint whose manifest parses and whose files have their sizes; None if there is none."""
    for candidate in _candidates(directory):
        manifest = _read(candidate)
        if manifest is not None:
            return manifest
    return None


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
        str(path.relative_to(staging)): [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
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
    _sync_directory(staging)


def _read(directory: Path) -> Manifest | None:
    try:
        content = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        for name, (size, digest) in content["files"].items():
            data = (directory / name).read_bytes()
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                return None
        versions = {
            policy: PolicyVersion(policy, lineage, step) for policy, (lineage, step) in content["versions"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Manifest(directory=directory, versions=versions)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
