"""Checkpoints as they are found again: whole, damaged, hostile."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import StorageError
from agentrl.core.files import LocalDisk
from agentrl.core.records import PolicyVersion
from agentrl.credit.baselines import DecayingMean, MeanAtStep, SeatRole
from agentrl.orchestrator.checkpoints import FORMAT, CheckpointWriter, Manifest, find_newest_checkpoint
from agentrl.orchestrator.versions import BestRunningMean
from tests.markdown_pages import ROOT
from tests.support.recording_trainer import RecordingTrainer


def write(directory: Path, step: int, *, keep: int = 10) -> Path:
    versions = {"policy": PolicyVersion("policy", 0, step)}
    return asyncio.run(CheckpointWriter(directory, keep=keep).write(RecordingTrainer(["policy"]), versions))


def change_manifest(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def entry_of(path: Path) -> list[object]:
    return [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def test_the_newest_whole_checkpoint_is_found_and_each_newer_one_is_told(tmp_path: Path) -> None:
    assert find_newest_checkpoint(tmp_path) == (None, [])
    first, second, third = (write(tmp_path, step) for step in (1, 2, 3))
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert manifest is not None
    assert (manifest.directory, manifest.versions, rejected) == (third, {"policy": PolicyVersion("policy", 0, 3)}, [])
    (third / "manifest.json").unlink()
    state = second / "recording_trainer.json"
    whole = state.read_bytes()
    state.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert manifest is not None
    assert manifest.directory == first
    assert rejected == [
        f"checkpoint {third}: 'manifest.json' cannot be read (No such file or directory)",
        f"checkpoint {second}: 'recording_trainer.json' is not the file that was saved: its digest differs",
    ]
    (first / "recording_trainer.json").unlink()
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert (manifest, len(rejected)) == (None, 3)


@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_a_checkpoint_of_every_released_format_is_found(version: int) -> None:
    """The files of `tests/golden/checkpoints_N` were written once by the first writer of format N, and never change."""
    directory = ROOT / "tests" / "golden" / f"checkpoints_{version}"
    manifest, rejected = find_newest_checkpoint(directory)
    assert rejected == []
    assert manifest == Manifest(
        directory=directory / "step_000003-1",
        versions={"solver": PolicyVersion("solver", 1, 3)},
        role_means={SeatRole("solver", "game", "first"): [MeanAtStep(2, DecayingMean(1.5, 2.0))]},
        measured=BestRunningMean(
            what="reward/mean of solver",
            newest=(),  # its 0.5 and 0.75 are of unknown versions
            best=0.625,
            versions={"solver": PolicyVersion("solver", 1, 2)},
        ),
        opponents={"past": (PolicyVersion("solver", 0, 1),)},
    )


def test_the_opponents_of_a_checkpoint_are_those_that_were_drawn_from(tmp_path: Path) -> None:
    pools = {"past": (PolicyVersion("policy", 0, 3), PolicyVersion("policy", 1, 7)), "none": ()}
    versions = {"policy": PolicyVersion("policy", 1, 8)}
    writer = CheckpointWriter(tmp_path, keep=2)
    asyncio.run(writer.write(RecordingTrainer(["policy"]), versions, opponents=pools))
    manifest, _ = find_newest_checkpoint(tmp_path)
    assert manifest is not None
    assert manifest.opponents == pools


def test_a_write_that_is_cancelled_while_it_seals_ends_whole(tmp_path: Path) -> None:
    """Environment code can cancel every task of a run, also while a thread seals a checkpoint."""
    is_sealing, may_continue = threading.Event(), threading.Event()

    class SlowDisk(LocalDisk):
        def files(self, directory: Path) -> dict[str, int]:
            is_sealing.set()
            may_continue.wait(30)
            return super().files(directory)

    async def cancel_it() -> None:
        writer = CheckpointWriter(tmp_path, disk=SlowDisk())
        versions = {"policy": PolicyVersion("policy", 0, 1)}
        writing = asyncio.create_task(writer.write(RecordingTrainer(["policy"]), versions))
        await asyncio.to_thread(is_sealing.wait, 30)
        for _ in range(2):
            writing.cancel()
            await asyncio.sleep(0)
        may_continue.set()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(cancel_it())
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert manifest is not None
    assert (rejected, (manifest.directory / "recording_trainer.json").is_file()) == ([], True)


def test_a_name_that_is_taken_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    taken = tmp_path / "step_000001-0" / "mine"
    taken.mkdir(parents=True)
    (taken / "notes").write_text("keep me")
    with pytest.raises(StorageError, match="step_000001-0"):
        write(tmp_path, 1)
    assert (taken / "notes").read_text() == "keep me"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001-0"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"/dev/zero": [0, ""]}, "not one of its regular files"),
        ({"../../fifo": [0, ""]}, "not one of its regular files"),
        ({"a\0b": [0, ""]}, "not one of its regular files"),
        ({"fifo": [0, ""]}, "not one of its regular files"),
        ({"": [0, ""]}, "not one of its regular files"),
        ({"device": [0, ""]}, "not one of its regular files"),
        ({"away/secret": [6, ""]}, "not one of its regular files"),
        ({"recording_trainer.json": [1, ""]}, "bytes, but 1 were saved"),
        ({"missing": [1, ""]}, "'missing' is not one of its regular files"),
        ({"recording_trainer.json": ["many", ""]}, "its manifest is invalid"),
        ({"recording_trainer.json": [1e400, ""]}, "its manifest is invalid"),
        ({"recording_trainer.json": 1}, "its manifest is invalid"),
        ([1], "its manifest is invalid"),
        (None, "its manifest is invalid"),
    ],
)
def test_a_hostile_list_of_files_is_refused_and_nothing_is_opened(tmp_path: Path, files: object, reason: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    os.mkfifo(tmp_path / "fifo")
    checkpoint = write(tmp_path / "checkpoints", 1)
    os.mkfifo(checkpoint / "fifo")
    (checkpoint / "device").symlink_to("/dev/zero")
    (checkpoint / "away").symlink_to(tmp_path / "outside")
    change_manifest(checkpoint, files=files)
    manifest, rejected = find_newest_checkpoint(tmp_path / "checkpoints")
    assert manifest is None
    assert reason in rejected[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "its manifest is invalid"),
        ("[]", "its manifest is invalid"),
        ("{}", "has no 'format'"),
        ('{"format": 7}', "format is 7"),
        ('{"format": 1, "files": {}, "versions": {"p": [0, "x"]}}', "its manifest is invalid"),
        ('{"format": 1, "files": {}, "versions": 3}', "its manifest is invalid"),
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (write(tmp_path, 1) / "manifest.json").write_text(text)
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert manifest is None
    assert reason in rejected[0]


@pytest.mark.parametrize(
    ("means", "reason"),
    [
        ([["p", "game", "x", 1, math.inf, 1.0]], "the recorded mean of p"),
        ([["p", "game", "x", 1, 1.0, 0.0]], "the recorded mean of p"),
        ([["p", "game", "x"]], "not enough values"),
    ],
)
def test_a_manifest_with_means_that_are_none_is_refused(tmp_path: Path, means: object, reason: str) -> None:
    change_manifest(write(tmp_path, 1), role_means=means)
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert manifest is None
    assert reason in rejected[0]


def test_a_manifest_that_is_a_pipe_or_a_link_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "manifest.json").unlink()
    os.mkfifo(tmp_path / "step_000001-0" / "manifest.json")
    (tmp_path / "step_000002-0" / "manifest.json").symlink_to("/dev/zero")
    manifest, rejected = find_newest_checkpoint(tmp_path)
    assert (manifest, len(rejected)) == (None, 2)


def test_damaged_checkpoints_take_no_place_of_those_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    for step in (3, 4):
        (write(tmp_path, step) / "manifest.json").write_text("{")
    (tmp_path / "step_000009-9").mkdir()
    write(tmp_path, 5, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step_000002-0", "step_000003-0", "step_000004-0", "step_000005-0", "step_000009-9"]
    write(tmp_path, 6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005-0", "step_000006-0", "step_000009-9"]
