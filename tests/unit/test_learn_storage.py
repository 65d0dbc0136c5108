"""A disk that refuses: the error says which path and what to do, and a step that was not taken can be taken later."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import read_bytes, read_safetensors_header
from agentrl.core.records import PolicyVersion
from agentrl.learn import storage
from agentrl.learn.publish import Publisher
from agentrl.learn.storage import write_tensors
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import Episodes, make_rows, run_config, write_model

START = PolicyVersion("policy", 0, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(make_rows(0, 8))


def started(model: Path, directory: Path, episodes: Episodes) -> PolicyTrainer:
    directory.mkdir(exist_ok=True)
    trainer = PolicyTrainer(run_config(model).trainer_plan, directory, read=episodes.read)
    trainer.start()
    return trainer


def weights(trainer: PolicyTrainer, version: PolicyVersion) -> dict[str, torch.Tensor]:
    return load_file(Path(trainer.publish("policy", version).path) / "model.safetensors")


@contextmanager
def little_space(size: int = 4096) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writing fails half-way, as on a full disk. Python ignores the signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_columns_that_cannot_be_written_leave_the_step_untaken(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    undisturbed = started(model, tmp_path / "undisturbed", episodes)
    trainer = started(model, tmp_path / "disturbed", episodes)
    for each in (undisturbed, trainer):
        before = weights(each, START)
        each.forward_backward(episodes.batch())
    with little_space(64), pytest.raises(StorageError, match=r"steps/policy/0\.1\.safetensors"):
        trainer.optim_step("policy", 1)
    assert not list((tmp_path / "disturbed" / "steps").rglob("*.*"))
    after = weights(trainer, PolicyVersion("policy", 1, 0))
    assert all(torch.equal(after[name], before[name]) for name in before)
    trainer.publish("policy", START)
    trainer.forward_backward(episodes.batch())
    report, expected = trainer.optim_step("policy", 1), undisturbed.optim_step("policy", 1)
    assert (report.grad_norm, report.input_digest) == (expected.grad_norm, expected.input_digest)
    found, wanted = (weights(each, PolicyVersion("policy", 0, 1)) for each in (trainer, undisturbed))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_version_that_cannot_be_written_leaves_nothing_behind(
    model: Path, tmp_path: Path, episodes: Episodes
) -> None:
    trainer = started(model, tmp_path, episodes)
    with little_space(), pytest.raises(StorageError, match=r"versions/policy/0\.0") as caught:
        trainer.publish("policy", START)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 74
    assert not list((tmp_path / "versions" / "policy").iterdir())
    assert trainer.publish("policy", START).version == START


def test_a_version_directory_that_cannot_be_made_is_named(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    trainer = started(model, tmp_path, episodes)
    (tmp_path / "versions").write_text("in the way")
    with pytest.raises(StorageError, match=r"versions/policy/0\.0"):
        trainer.publish("policy", START)


class ShardedModel:
    """Stands for a model whose tensors all ranks gather together, one at a time."""

    kind = "adapter"

    def __init__(self) -> None:
        self.gathered = 0
        self.publication = self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            self.gathered += 1
            yield name, torch.zeros(1)


def test_a_rank_that_cannot_write_a_version_takes_part_in_gathering_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "versions").write_text("in the way")
    model: Any = ShardedModel()
    with pytest.raises(StorageError):
        Publisher(tmp_path).publish(START, model)
    assert model.gathered == 3, "else the other ranks wait for it"


def test_a_checkpoint_that_cannot_be_written_is_named(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    trainer = started(model, tmp_path, episodes)
    with little_space(), pytest.raises(StorageError, match="checkpoint/policy"):
        trainer.save(tmp_path / "checkpoint")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file/policy"):
        trainer.save(tmp_path / "file")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path, episodes: Episodes) -> Path:
    """A checkpoint after one step."""
    trainer = started(model, tmp_path / "run", episodes)
    trainer.publish("policy", START)
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    trainer.save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_checkpoint_is_read_in_pieces_and_once(
    model: Path, tmp_path: Path, episodes: Episodes, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another host reads pieces of it as messages."""
    monkeypatch.setattr(storage, "PIECE_BYTES", 1000)
    pieces: list[int] = []

    def read(path: Path, start: int, count: int) -> bytes:
        data = read_bytes(path, start, count)
        if path.suffix == ".safetensors":
            pieces.append(len(data))
        return data

    plan = run_config(model).trainer_plan
    trainer = PolicyTrainer(plan, tmp_path / "resumed", read=episodes.read, read_file=read)
    trainer.start(checkpoint)
    assert sum(pieces) == sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
    headers = [len(read_safetensors_header(file)) for file in checkpoint.rglob("*.safetensors")]
    assert max(pieces) <= max(1000, *headers)
    trainer.save(tmp_path / "again")
    for name in ("weights", "optimizer"):
        again, before = (folder / f"policy/{name}.safetensors" for folder in (tmp_path / "again", checkpoint))
        assert again.read_bytes() == before.read_bytes()


@pytest.mark.parametrize("damage", ["short", "offsets", "dtype", "header", "missing"])
def test_a_damaged_checkpoint_is_named(
    model: Path, tmp_path: Path, episodes: Episodes, checkpoint: Path, damage: str
) -> None:
    file = checkpoint / "policy/optimizer.safetensors"
    data = file.read_bytes()
    match damage:
        case "short":
            file.write_bytes(data[:-1])
        case "offsets":
            file.write_bytes(data.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1))
        case "dtype":
            file.write_bytes(data.replace(b'"F32"', b'"F33"', 1))
        case "header":
            file.write_bytes(b"\xff" * 8 + data[8:])
        case _:
            file.unlink()
    trainer = PolicyTrainer(run_config(model).trainer_plan, tmp_path / "resumed", read=episodes.read)
    with pytest.raises(TrainerError, match=r"checkpoint .*policy cannot be read: .*optimizer"):
        trainer.start(checkpoint)


def test_writing_continues_while_the_disk_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layer.{number}": torch.full((64,), float(number)) for number in range(16)}
    all_gathered, synced = threading.Event(), os.fdatasync

    def slow_sync(descriptor: int) -> None:
        assert all_gathered.wait(30), "writing waited for the disk"
        synced(descriptor)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors.items(), start=1):
            if number == len(tensors):
                all_gathered.set()
            yield item

    monkeypatch.setattr(storage, "SYNC_BYTES", 256)
    monkeypatch.setattr(os, "fdatasync", slow_sync)
    write_tensors(tmp_path / "weights", tensors, gathered())
    assert load_file(tmp_path / "weights").keys() == tensors.keys()


def test_a_sync_that_fails_while_weights_are_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_sync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "SYNC_BYTES", 256)
    monkeypatch.setattr(os, "fdatasync", failing_sync)
    tensors = {"weight": torch.zeros(256)}
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors(tmp_path / "weights", tensors, iter(tensors.items()))
