"""Checkpoints: one manifest, written last, that a run resumes from.

    checkpoints/step_000120-3/        sum of the policies' steps, lineage; put in place by `core.files.place`
        <trainer's files>             weights, optimizer and random state of every policy
        manifest.json                 versions, ledger, role means, measurements, digests of the files

The manifest says what is *consumed*: every unit of a step up to its versions, along their lineage. The control log says
which units those are, and is flushed before the manifest is written; training after the newest manifest is lost
together with the weights it made, and done again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.core.errors import StorageError
from agentrl.core.files import LOCAL, Disk, place, remedy, staged
from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion
from agentrl.credit.role_means import Mean, Role, RoleMeans, read_means
from agentrl.orchestrator.choice import UNMEASURED, Measured, read_measured
from agentrl.orchestrator.ledger import Ledger

FORMAT = 0
KEPT_CHECKPOINTS = 2
"""The newest that stay on disk: a damaged one costs no more than `checkpoint.every` steps."""
MAX_MANIFEST_BYTES = 64 << 20
_NAME = re.compile(r"step_(\d{6,})-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint that can be resumed from."""

    directory: Path
    versions: Mapping[str, PolicyVersion]
    role_means: Mapping[Role, Mean] = field(default_factory=dict)
    measured: Measured = UNMEASURED
    opponents: Mapping[str, tuple[PolicyVersion, ...]] = field(default_factory=dict)
    """Versions that were drawn from, by past policy, oldest first."""


class CheckpointWriter:
    """Writes checkpoints of one run and prunes old ones.

    Args:
        directory: the run's checkpoint directory.
        keep: how many of the newest stay.
        disk: where it lies.
    """

    def __init__(self, directory: Path, *, keep: int = KEPT_CHECKPOINTS, disk: Disk = LOCAL) -> None:
        self._directory = directory
        self._keep = keep
        self._disk = disk

    async def write(
        self,
        trainer: Trainer,
        versions: Mapping[str, PolicyVersion],
        ledger: Ledger,
        roles: RoleMeans | None = None,
        measured: Measured = UNMEASURED,
        opponents: Mapping[str, Sequence[PolicyVersion]] = MappingProxyType({}),
    ) -> Path:
        """Save the trainer and seal it with a manifest; the control log must have been flushed.

        Raises:
            StorageError: the disk refused; earlier checkpoints are untouched.
        """
        # The sum of steps grows with every policy's, so no two cuts of a lineage share a name.
        step = sum(version.step for version in versions.values())
        lineage = max(version.lineage for version in versions.values())
        target = self._directory / f"step_{step:06d}-{lineage}"

        def seal() -> None:
            folds = {
                "role_means": [] if roles is None else roles.as_data(),
                "measured": measured.as_data(),
                "opponents": dict(opponents),
            }
            content = _manifest(staging, versions, ledger, folds, self._disk)
            self._disk.write(staging / "manifest.json", content)
            place(staging, target, disk=self._disk)
            self._prune(target)

        try:
            with staged(target, disk=self._disk) as staging:
                await trainer.save(str(staging))
                await self._disk.apart(seal)
        except FileExistsError as error:
            raise StorageError(
                f"checkpoint {target}: something has this name already, and it is not touched; move it away and resume "
                "the run"
            ) from error
        except OSError as error:
            raise StorageError(
                f"checkpoint {target}: {error.strerror or error}; {remedy(error)}, then start again with --resume"
            ) from error
        return target

    def sealed(self) -> list[Mapping[str, PolicyVersion]]:
        """See `sealed`; those that were removed are gone for good, so that no power cut brings one back.

        Raises:
            OSError: the disk refused.
        """
        self._disk.sync(self._directory)
        return sealed(self._directory, disk=self._disk)

    def _prune(self, written: Path) -> None:
        """Remove what is older than the newest `keep` that can be resumed from; a damaged one takes nobody's place."""
        whole = 0
        for candidate in _candidates(self._directory, self._disk):
            if whole >= self._keep and candidate != written:
                self._disk.remove_tree(candidate)
            else:
                whole += _is_whole(candidate, self._disk)


def sealed(directory: Path, *, disk: Disk = LOCAL) -> list[Mapping[str, PolicyVersion]]:
    """The versions of every checkpoint that can be resumed from, newest first; the bytes of its files are not read."""
    found = []
    for candidate in _candidates(directory, disk):
        with contextlib.suppress(StorageError):
            found.append(_read(candidate, disk)[0].versions)
    return found


def newest(directory: Path, *, disk: Disk = LOCAL) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint whose files are those of its manifest, and why each newer one was passed over.

    Args:
        directory: a run's checkpoint directory.
        disk: where it lies.

    Returns:
        The checkpoint, None if there is none that can be resumed from; and a sentence for each that was rejected,
        newest first.
    """
    rejected: list[str] = []
    for candidate in _candidates(directory, disk):
        try:
            return _verified(candidate, disk), rejected
        except StorageError as error:
            rejected.append(str(error))
    return None, rejected


def holding(directory: Path, versions: Collection[PolicyVersion], *, disk: Disk = LOCAL) -> Path | None:
    """Where a checkpoint keeps the state of a policy at one of these versions, which are of one policy.

    Raises:
        StorageError: the files of the checkpoint that does are not those of its manifest.
    """
    for candidate in _candidates(directory, disk):
        try:
            manifest, _ = _read(candidate, disk)
        except StorageError:
            continue
        for version in versions:
            if manifest.versions.get(version.policy) == version:
                return _verified(candidate, disk).directory / version.policy
    return None


def _candidates(directory: Path, disk: Disk) -> list[Path]:
    """Checkpoint directories, newest first: a later lineage is newer than a higher step of a dead one."""
    found = []
    for name in disk.names(directory):
        match = _NAME.fullmatch(name)
        if match:
            found.append((int(match[2]), int(match[1]), directory / name))
    return [path for _, _, path in sorted(found, reverse=True)]


def _manifest(
    staging: Path,
    versions: Mapping[str, PolicyVersion],
    ledger: Ledger,
    folds: Mapping[str, Any],
    disk: Disk,
) -> bytes:
    files = {name: [size, disk.digest(staging / name)] for name, size in disk.files(staging).items()}
    content = {
        "format": FORMAT,
        "versions": {policy: [version.lineage, version.step] for policy, version in versions.items()},
        "ledger": ledger.as_data(),
        **folds,
        "files": files,
    }
    return json.dumps(content, indent=1).encode()


def _verified(directory: Path, disk: Disk) -> Manifest:
    """The manifest of a checkpoint every file of which has its digest; StorageError says what is wrong."""
    manifest, digests = _read(directory, disk)
    for name, digest in digests.items():
        try:
            found = disk.digest(directory / name)
        except OSError as error:
            raise StorageError(f"checkpoint {directory}: {name!r} cannot be read ({error.strerror})") from error
        if found != digest:
            raise StorageError(
                f"checkpoint {directory}: {name!r} is not the file that was saved: its digest is another"
            )
    return manifest


def _is_whole(directory: Path, disk: Disk) -> bool:
    """Whether a checkpoint has its manifest and files of the right sizes; their bytes are not read."""
    try:
        _read(directory, disk)
    except StorageError:
        return False
    return True


def _read(directory: Path, disk: Disk) -> tuple[Manifest, Mapping[str, str]]:
    """A manifest, and the digest of each of its files, all of which are there in their sizes.

    Raises:
        StorageError: it cannot be read, or a file is missing, of another size, or not inside the checkpoint.
    """
    try:
        content = json.loads(disk.read(directory / "manifest.json", limit=MAX_MANIFEST_BYTES))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version reads {FORMAT}")
        files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        sizes = disk.files(directory)
        for name, (size, _) in files.items():
            if name not in sizes:  # so no name leads out of the checkpoint, or through a link
                raise ValueError(f"{name!r} is not one of its regular files")
            if sizes[name] != size:
                raise ValueError(f"{name!r} has {sizes[name]} bytes, and {size} were saved")
        versions = {
            policy: PolicyVersion(policy, int(lineage), int(step))
            for policy, (lineage, step) in content["versions"].items()
        }
        role_means = read_means(content["role_means"])
        measured = read_measured(content["measured"])
        opponents = {
            name: tuple(PolicyVersion(str(policy), int(lineage), int(step)) for policy, lineage, step in pool)
            for name, pool in content["opponents"].items()
        }
    except OSError as error:
        name = Path(str(error.filename or "manifest.json")).name
        raise StorageError(f"checkpoint {directory}: {name!r} cannot be read ({error.strerror})") from error
    except KeyError as error:
        raise StorageError(f"checkpoint {directory}: its manifest has no {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StorageError(f"checkpoint {directory}: its manifest does not hold ({error})") from error
    manifest = Manifest(
        directory=directory, versions=versions, role_means=role_means, measured=measured, opponents=opponents
    )
    return manifest, {name: digest for name, (_, digest) in files.items()}
