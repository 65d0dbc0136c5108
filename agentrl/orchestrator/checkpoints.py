"""Checkpoints, and the retention of versions and journal data between them.

    checkpoints/step_000120-3/        sum of the policies' steps, lineage; put in place by `core.files.rename_durably`
        <trainer's files>             weights, optimizer and random state of every policy
        manifest.json                 versions, role means, measurements, digests of the files

A checkpoint's manifest is written last, and a run resumes from it. The manifest determines what is *consumed*: every
unit of a step up to its versions, along their lineage. The control log lists those units, and is flushed before the
manifest is written. Training after the newest manifest is lost together with the weights it made, and repeated.

`VersionRetention` keeps the newest few published versions of each policy on disk: their files are needed while an
engine may load them again; checkpoints hold separate weights, and the link `policies/NAME` points at the newest.
`JournalRetention` prunes the journal after checkpoints; which entries may go, and why, is defined in
`journal/pruning.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agentrl.core.errors import StorageError
from agentrl.core.files import (
    LOCAL,
    Disk,
    refuse_links,
    rename_durably,
    resume_advice,
    staging_directory,
    sync_directory,
)
from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.credit.baselines import DecayingMean, MeanAtStep, RoleMeans, SeatRole
from agentrl.journal.port import JournalStore, PruneRule
from agentrl.orchestrator.versions import NOT_MEASURED, BestRunningMean, PolicyBoard, decode_best_running_mean

FORMAT = 1
"""Format of the manifest. `tests/golden/` holds a checkpoint of each format, which every later version must read."""
KEPT_CHECKPOINTS = 2
"""Number of newest checkpoints that stay on disk: a damaged one costs no more than `checkpoint.every` steps."""
MAX_MANIFEST_BYTES = 64 << 20
_CHECKPOINT_NAME = re.compile(r"step_(\d{6,})-(\d+)")
_VERSION_NAME = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint from which a run can resume."""

    directory: Path
    versions: Mapping[str, PolicyVersion]
    role_means: Mapping[SeatRole, Sequence[MeanAtStep]] = field(default_factory=dict)
    measured: BestRunningMean = NOT_MEASURED
    opponents: Mapping[str, tuple[PolicyVersion, ...]] = field(default_factory=dict)
    """Versions from which opponents were drawn, keyed by pool, oldest first."""


class CheckpointWriter:
    """Writes checkpoints of one run and prunes old ones.

    Args:
        directory: the run's checkpoint directory.
        keep: number of newest checkpoints that stay.
        disk: the file system.
    """

    def __init__(self, directory: Path, *, keep: int = KEPT_CHECKPOINTS, disk: Disk = LOCAL) -> None:
        self._directory = directory
        self._keep = keep
        self._disk = disk

    async def write(
        self,
        trainer: Trainer,
        versions: Mapping[str, PolicyVersion],
        roles: RoleMeans | None = None,
        measured: BestRunningMean = NOT_MEASURED,
        opponents: Mapping[str, Sequence[PolicyVersion]] = MappingProxyType({}),
    ) -> Path:
        """Save the trainer and seal it with a manifest; the control log must have been flushed.

        Raises:
            StorageError: writing failed; earlier checkpoints are untouched.
        """
        # The sum of steps grows with every policy's step, so checkpoints of a lineage have distinct names.
        step = sum(version.step for version in versions.values())
        lineage = max(version.lineage for version in versions.values())
        target = self._directory / f"step_{step:06d}-{lineage}"

        def seal() -> None:
            folds = {
                "role_means": []
                if roles is None
                else [
                    [*role, step, *mean]
                    for role, step_means in sorted(roles.means.items())
                    for step, mean in step_means
                ],
                "measured": measured.as_data(),
                "opponents": dict(opponents),
            }
            content = _manifest(staging, versions, folds, self._disk)
            self._disk.write(staging / "manifest.json", content)
            rename_durably(staging, target, disk=self._disk)
            self._prune(target)

        try:
            with staging_directory(target, disk=self._disk) as staging:
                await trainer.save(str(staging))
                await self._disk.run_in_thread(seal)
        except FileExistsError as error:
            raise StorageError(
                f"checkpoint {target}: something with this name exists already and is not overwritten; move it away "
                "and resume the run"
            ) from error
        except OSError as error:
            raise StorageError(f"checkpoint {target}: {error.strerror or error}; {resume_advice(error)}") from error
        return target

    def resumable(self) -> list[Manifest]:
        """Return the result of the function `resumable_manifests`."""
        return resumable_manifests(self._directory, disk=self._disk)

    def sealed(self) -> list[Manifest]:
        """Sync the directory, then return `resumable`: no removed checkpoint returns after a power cut.

        Raises:
            OSError: the sync failed.
        """
        self._disk.sync(self._directory)
        return self.resumable()

    def _prune(self, written: Path) -> None:
        """Remove all but the newest `keep` checkpoints from which a run can resume; damaged ones do not count."""
        num_complete = 0
        for candidate in _candidates(self._directory, self._disk):
            if num_complete >= self._keep and candidate != written:
                self._disk.remove_tree(candidate)
            else:
                num_complete += _is_whole(candidate, self._disk)


def resumable_manifests(directory: Path, *, disk: Disk = LOCAL) -> list[Manifest]:
    """Return the manifest of every checkpoint from which a run can resume, newest first, without reading the other
    files' bytes."""
    manifests = []
    for candidate in _candidates(directory, disk):
        with contextlib.suppress(StorageError):
            manifests.append(_read(candidate, disk)[0])
    return manifests


def find_newest_checkpoint(directory: Path, *, disk: Disk = LOCAL) -> tuple[Manifest | None, list[str]]:
    """Find the newest checkpoint whose files match its manifest, and the reasons why newer ones were rejected.

    Args:
        directory: a run's checkpoint directory.
        disk: the file system.

    Returns:
        The checkpoint, or None if there is none to resume from; and a sentence per rejected one, newest first.
    """
    rejections: list[str] = []
    for candidate in _candidates(directory, disk):
        try:
            return _verify(candidate, disk), rejections
        except StorageError as error:
            rejections.append(str(error))
    return None, rejections


def find_checkpoint_of(directory: Path, versions: Collection[PolicyVersion], *, disk: Disk = LOCAL) -> Path | None:
    """Return the directory with a policy's state in a checkpoint of one of these versions; None if there is none.

    Raises:
        StorageError: the files of that checkpoint do not match its manifest.
    """
    for candidate in _candidates(directory, disk):
        try:
            manifest, _ = _read(candidate, disk)
        except StorageError:
            continue
        for version in versions:
            if manifest.versions.get(version.policy) == version:
                return _verify(candidate, disk).directory / version.policy
    return None


def _candidates(directory: Path, disk: Disk) -> list[Path]:
    """Return the checkpoint directories, newest first: a later lineage is newer than a higher step of a dead one.

    Raises:
        JournalError: the directory is a symbolic link.
    """
    refuse_links(directory)
    keyed_paths = []
    for name in disk.names(directory):
        match = _CHECKPOINT_NAME.fullmatch(name)
        if match:
            keyed_paths.append((int(match[2]), int(match[1]), directory / name))
    return [path for _, _, path in sorted(keyed_paths, reverse=True)]


def _manifest(
    staging: Path,
    versions: Mapping[str, PolicyVersion],
    folds: Mapping[str, Any],
    disk: Disk,
) -> bytes:
    files = {name: [size, disk.digest(staging / name)] for name, size in disk.files(staging).items()}
    content = {
        "format": FORMAT,
        "versions": {policy: [version.lineage, version.step] for policy, version in versions.items()},
        **folds,
        "files": files,
    }
    return json.dumps(content, indent=1).encode()


def _verify(directory: Path, disk: Disk) -> Manifest:
    """Return the manifest of a checkpoint after checking every file's digest; raises StorageError if one does not
    match."""
    manifest, digests = _read(directory, disk)
    for name, digest in digests.items():
        try:
            actual_digest = disk.digest(directory / name)
        except OSError as error:
            raise StorageError(f"checkpoint {directory}: {name!r} cannot be read ({error.strerror})") from error
        if actual_digest != digest:
            raise StorageError(f"checkpoint {directory}: {name!r} is not the file that was saved: its digest differs")
    return manifest


def _is_whole(directory: Path, disk: Disk) -> bool:
    """Whether a checkpoint has its manifest, and files of the right sizes; does not read their bytes."""
    try:
        _read(directory, disk)
    except StorageError:
        return False
    return True


def _read(directory: Path, disk: Disk) -> tuple[Manifest, Mapping[str, str]]:
    """Read a manifest and the digests of its files, after checking the files' sizes.

    Raises:
        StorageError: the manifest cannot be read, or a file is missing, has another size, or is outside the
            checkpoint, as behind a symbolic link.
    """
    try:
        refuse_links(directory)
        content = json.loads(disk.read(directory / "manifest.json", limit=MAX_MANIFEST_BYTES))
        if content["format"] != FORMAT:
            raise ValueError(
                f"its format is {content['format']!r}, and this version of agentrl reads {FORMAT}; resume with the "
                "version that wrote it"
            )
        files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        sizes = disk.files(directory)
        for name, (size, _) in files.items():
            if name not in sizes:  # this also refuses names that lead out of the checkpoint or through a link
                raise ValueError(f"{name!r} is not one of its regular files")
            if sizes[name] != size:
                raise ValueError(f"{name!r} has {sizes[name]} bytes, but {size} were saved")
        versions = {
            policy: PolicyVersion(policy, int(lineage), int(step))
            for policy, (lineage, step) in content["versions"].items()
        }
        role_means = _role_means(content["role_means"])
        running_mean = decode_best_running_mean(content["measured"])
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
        raise StorageError(f"checkpoint {directory}: its manifest is invalid ({error})") from error
    manifest = Manifest(
        directory=directory, versions=versions, role_means=role_means, measured=running_mean, opponents=opponents
    )
    return manifest, {name: digest for name, (_, digest) in files.items()}


def _role_means(data: Iterable[Sequence[str | float]]) -> dict[SeatRole, list[MeanAtStep]]:
    """Read the role means of a manifest; raises ValueError if a mean is not valid."""
    means: dict[SeatRole, list[MeanAtStep]] = {}
    for policy, environment, seat, step, total, weight in data:
        mean = DecayingMean(float(total), float(weight))
        if not (
            abs(mean.total) < float("inf") and 0.0 <= mean.weight < float("inf") and (mean.weight or not mean.total)
        ):
            raise ValueError(
                f"the recorded mean of {policy} in seat {seat} is {total} / {weight}, which is not a finite number"
            )
        role = SeatRole(str(policy), str(environment), str(seat))
        means.setdefault(role, []).append(MeanAtStep(int(step), mean))
    return means


class VersionRetention:
    """Syncs the versions that a checkpoint needs. Deletes older versions than the window, of any attempt of the run,
    unless a resume from any checkpoint on disk needs them.

    Args:
        keep: number of newest versions of each policy that stay; 0 keeps all.
        lags: for each policy whose older versions a resume loads, the number of steps by which the oldest one is behind
            the checkpoint.
        disk: the file system.
    """

    def __init__(self, *, keep: int, lags: Mapping[str, int] = MappingProxyType({}), disk: Disk = LOCAL) -> None:
        self._keep = keep
        self._lags = lags
        self._disk = disk
        self._needed: set[PolicyVersion] = set()
        """Versions that a resume from a checkpoint on disk loads."""
        self._durable: set[WeightsRef] = set()
        """Versions that `make_durable` has synced."""

    async def make_durable(self, versions: Iterable[WeightsRef]) -> None:
        """Sync versions before something durable names them. Versions whose files are
        gone are left out.

        Raises:
            StorageError: the disk failed.
        """
        new = set(versions) - self._durable
        try:
            await self._disk.run_in_thread(lambda: self._sync(new))
        except OSError as error:
            raise StorageError(
                f"published versions could not be synced ({error.strerror or error}); {resume_advice(error)}"
            ) from error
        self._durable |= new

    def _sync(self, versions: Iterable[WeightsRef]) -> None:
        for weights in versions:
            with contextlib.suppress(FileNotFoundError):  # readers of a version report its damage
                sync_directory(Path(weights.path), disk=self._disk, depth=3)

    async def keep_for(self, checkpoints: CheckpointWriter | None, board: PolicyBoard) -> None:
        """Keep the versions that a resume from any checkpoint on disk needs, until the next call: opponents, the best
        versions, and older ones within `lags`.

        Args:
            checkpoints: the run's checkpoint writer; None: there are no checkpoints.
            board: knows the run's lineages.
        """
        needed: set[PolicyVersion] = set()
        for manifest in await self._disk.run_in_thread(checkpoints.resumable) if checkpoints is not None else ():
            needed.update(manifest.measured.needed(), *manifest.opponents.values())
            needed.update(board.at_versions(manifest.versions).recent(self._lags))
        self._needed = needed

    async def prune(self, weights: WeightsRef, pinned: Collection[PolicyVersion] = ()) -> None:
        """Delete outdated versions of a policy after its new version became current; `pinned` ones stay."""
        if self._keep:
            policy = weights.version.policy
            needed = (*pinned, *self._needed)
            stay = {(version.lineage, version.step) for version in needed if version.policy == policy}
            await self._disk.run_in_thread(lambda: self._prune(Path(weights.path).parent, stay))

    def _prune(self, directory: Path, stay: Collection[tuple[int, int]]) -> None:
        versions = list_version_directories(directory, disk=self._disk)
        needed = {*versions[-self._keep :], *stay}
        for lineage, step in versions:
            if (lineage, step) not in needed:
                self._disk.remove_tree(directory / f"{lineage}.{step}")


def list_version_directories(directory: Path, *, disk: Disk = LOCAL) -> list[tuple[int, int]]:
    """Return (lineage, step) of each version in a policy's directory, oldest first."""
    matches = [_VERSION_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


class JournalRetention:
    """Prunes the journal after checkpoints, in a background task.

    Args:
        store: the run's journal.
        checkpoints: the run's checkpoint writer; None: there are no checkpoints, and nothing is pruned.
        keep: `journal.keep`.
        disk: the file system.
    """

    def __init__(
        self,
        store: JournalStore,
        checkpoints: CheckpointWriter | None,
        *,
        keep: Literal["all"] | int = "all",
        disk: Disk = LOCAL,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._keep = keep
        self._disk = disk
        self._prune_task: asyncio.Task[None] | None = None
        self._is_due = self._is_ending = False

    def start_pruning(self, fail: Callable[[BaseException], None]) -> None:
        """Prune data that the newest checkpoint makes obsolete; if a pruning is running, prune once more after it.

        Args:
            fail: called with the error that ended the pruning, such as a full disk.
        """
        if self._checkpoints is None or self._keep == "all":
            return
        self._is_due = True
        if self._prune_task is None or self._prune_task.done():
            self._prune_task = asyncio.get_running_loop().create_task(self._prune(self._keep, fail), name="prune")

    async def _prune(self, keep: int, fail: Callable[[BaseException], None]) -> None:
        assert self._checkpoints is not None
        try:
            while self._is_due and not self._is_ending:
                self._is_due = False
                manifests = await self._disk.run_in_thread(self._checkpoints.sealed)
                rule = PruneRule(keep=keep, sealed=[manifest.versions for manifest in manifests])
                await self._store.prune(rule, should_stop=lambda: self._is_ending)
        except OSError as error:
            fail(StorageError(f"checkpoints: {error.strerror or error}; {resume_advice(error)}"))
        except Exception as error:  # noqa: BLE001 - no caller awaits this task's result
            fail(error)

    async def wait(self) -> None:
        """Wait for the running pruning to end."""
        if self._prune_task is not None:
            await asyncio.wait({self._prune_task})

    async def close(self) -> None:
        """Stop pruning; the rest is left to the next run. Idempotent."""
        self._is_ending = True
        await self.wait()
