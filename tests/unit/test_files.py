"""A directory is put in place whole or not at all, on the machine's disk and on the simulated one alike."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agentrl.core.files import (
    LOCAL,
    Disk,
    LocalDisk,
    link_or_copy,
    os_error_advice,
    remove_staging_directories,
    remove_whole,
    rename_durably,
    rename_whole,
    staging_directory,
    sync_directory,
)
from agentrl.orchestrator.checkpoints import list_version_directories
from tests.support.sim_disk import Fault, SimDisk, SimulatedCrashError


@pytest.fixture(params=["local", "simulated"])
def disk_and_root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    if request.param == "local":
        return LOCAL, tmp_path
    disk = SimDisk()
    disk.make_directory(Path("/run"))
    return disk, Path("/run")


def build(disk: Disk, target: Path, content: bytes, *, unless_same: str | None = None) -> None:
    def is_same(existing: Path) -> bool:
        assert unless_same is not None
        return disk.read(existing / unless_same, limit=99) == content

    with staging_directory(target, disk=disk, depth=2) as staging:
        disk.make_directory(staging / "policy")
        disk.write(staging / "policy" / "weights", content)
        disk.write(staging / "state", b"1")
        rename_durably(staging, target, disk=disk, unless_same=is_same if unless_same else None)


def test_a_directory_is_placed_with_its_parents_and_nothing_else_is_left(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root
    target = root / "versions" / "policy" / "0.1"
    build(disk, target, b"weights")
    assert disk.files(root / "versions") == {"policy/0.1/policy/weights": 7, "policy/0.1/state": 1}
    assert disk.read(target / "policy" / "weights", limit=7) == b"weights"
    with pytest.raises(ValueError, match="at most 6"):
        disk.read(target / "policy" / "weights", limit=6)
    assert disk.names(target.parent) == ["0.1"]


def test_what_is_there_is_never_replaced(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root
    build(disk, root / "0.1", b"weights")
    build(disk, root / "0.1", b"weights", unless_same="policy/weights")
    for same in ("policy/weights", "missing", None):
        with pytest.raises(FileExistsError):
            build(disk, root / "0.1", b"other", unless_same=same)
    assert disk.read(root / "0.1" / "policy" / "weights", limit=99) == b"weights"
    assert disk.names(root) == ["0.1"]


def test_a_build_that_fails_leaves_nothing_and_leftovers_can_be_cleared(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root

    def fail() -> None:
        with staging_directory(root / "0.1", disk=disk) as staging:
            disk.write(staging / "state", b"1")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fail()
    assert disk.names(root) == []
    disk.make_directory(root / ".tmp-0.1")
    disk.write(root / ".tmp-0.1" / "state", b"1")
    build(disk, root / "0.2", b"weights")
    remove_staging_directories(root, disk=disk)
    assert disk.names(root) == ["0.2"]


def test_a_name_never_stands_for_a_part_of_a_removed_directory(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class KillingDisk(LocalDisk):
        def remove_tree(self, path: Path) -> None:
            if path.is_dir():
                (path / "state").unlink()
                raise Killed

    target = tmp_path / "0.1"
    build(LOCAL, target, b"content")
    with pytest.raises(Killed):
        remove_whole(target, disk=KillingDisk())
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-0.1"]
    LOCAL.make_directory(target)
    LOCAL.write(target / "state", b"2")
    remove_whole(target)  # with a part of the first one in its way
    assert not list(tmp_path.iterdir())


def test_a_link_never_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, copy = (tmp_path / name for name in ("source", "target", "copy"))
    source.write_text("new")
    target.write_text("old")
    with pytest.raises(FileExistsError):
        link_or_copy(source, target)
    assert target.read_text() == "old"

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, copy)
    assert copy.read_text() == "new"


def test_versions_are_ordered_by_lineage_and_step(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root
    for name in ("0.10", "0.9", "1.2", "elsewhere", "1", ".tmp-2.0"):
        disk.make_directory(root / name)
    assert list_version_directories(root, disk=disk) == [(0, 9), (0, 10), (1, 2)]
    assert list_version_directories(root / "missing", disk=disk) == []


def test_links_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "folder").symlink_to(tmp_path)
    assert LOCAL.files(inside) == {}
    with pytest.raises(OSError, match="symbolic links"):
        LOCAL.digest(inside / "link")


def test_a_power_cut_leaves_what_was_synced() -> None:
    disk, root = SimDisk(), Path("/")
    disk.write(root / "synced", b"whole")
    disk.sync(root / "synced")
    disk.sync(root)
    disk.write(root / "named", b"content that is torn")
    disk.sync(root)
    disk.write(root / "new", b"content")
    disk.sync(root / "new")
    assert disk.after_crash("kill").names(root) == ["named", "new", "synced"]
    assert disk.after_crash("kill").after_crash("lost").names(root) == ["named", "synced"], "a kill syncs nothing"
    lost, kept = disk.after_crash("lost"), disk.after_crash("kept")
    assert lost.names(root) == ["named", "synced"]
    assert kept.read(root / "new", limit=99) == b"content"
    for survivor in (lost, kept):
        assert survivor.read(root / "synced", limit=99) == b"whole"
        assert survivor.read(root / "named", limit=99) != b"content that is torn"


def test_a_rename_is_kept_or_lost_as_one() -> None:
    disk = SimDisk()
    with staging_directory(Path("/run/0.1"), disk=disk) as staging:
        disk.write(staging / "weights", b"weights")
        disk.sync(staging / "weights")
        disk.sync(staging)
        disk.sync(staging.parent)
        disk.rename(staging, Path("/run/0.1"))
        assert disk.after_crash("lost").files(Path("/run")) == {".tmp-0.1/weights": 7}
        assert disk.after_crash("kept").files(Path("/run")) == {"0.1/weights": 7}


def test_faults_happen_where_they_are_planned() -> None:
    disk = SimDisk(faults=[Fault(operation=1, kind="full"), Fault(operation=2, kind="broken")])
    disk.plan(Fault(operation=4, kind="crash"))
    for code in (errno.ENOSPC, errno.EIO):
        with pytest.raises(OSError, match="/run") as caught:
            disk.make_directory(Path("/run"))
        assert caught.value.errno == code
    disk.make_directory(Path("/run"))
    for _ in range(2):
        with pytest.raises(SimulatedCrashError):
            disk.sync(Path("/"))
    assert disk.operations == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_directory_that_was_moved_away_does_not_come_back(tmp_path: Path, depth: int) -> None:
    target = tmp_path / "run" / ("checkpoints" if depth == 1 else "versions/policy") / "0.1"
    with pytest.raises(FileNotFoundError), staging_directory(target, depth=depth):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    with staging_directory(target, depth=depth) as staging:
        rename_durably(staging, target)
    assert target.is_dir()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EMFILE, "open files"),
        (errno.EROFS, "writable"),
        (errno.EIO, "check the disk"),
    ],
)
def test_what_to_do_depends_on_what_was_refused(number: int, told: str) -> None:
    assert told in os_error_advice(OSError(number, os.strerror(number)))


def test_a_directory_that_was_not_synced_may_be_torn_until_it_is() -> None:
    disk, target = SimDisk(), Path("/run/versions/policy/0.1")
    disk.make_directory(Path("/run"))
    disk.sync(Path("/"))
    with staging_directory(target, disk=disk, depth=2, durable=False) as staging:
        disk.write(staging / "weights", b"weights")
        rename_whole(staging, target, disk=disk)
    assert disk.read(target / "weights", limit=99) == b"weights"
    assert disk.after_crash("kill").read(target / "weights", limit=99) == b"weights"
    assert disk.after_crash("lost").names(Path("/run")) == []
    assert disk.after_crash("kept").read(target / "weights", limit=99) != b"weights"
    sync_directory(target, disk=disk, depth=3)
    for fate in ("lost", "kept", "mixed"):
        assert disk.after_crash(fate).read(target / "weights", limit=99) == b"weights"
    with pytest.raises(FileNotFoundError):
        sync_directory(target.with_name("0.2"), disk=disk)
