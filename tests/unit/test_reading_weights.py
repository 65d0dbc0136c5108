"""A version's file, read or mapped into memory, and its values that are not finite."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.protocol import WeightChunk
from agentrl.engines.remote.engine_server import PRIVATE_DIRECTORY_VARIABLE, ReceivedWeightFiles
from agentrl.engines.weights.reading import (
    copy_weight_files,
    count_adapter_numbers,
    count_numbers,
    hold_weights,
    read_weights,
)
from tests.learn_cases import write_model

MAPPED = pytest.mark.parametrize("maps", [False, True])


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> WeightsRef:
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return WeightsRef(version=PolicyVersion("policy", 0, 1), path=str(directory), kind="full", sha256=digest)


@MAPPED
def test_tensors_and_metadata_are_those_of_the_file(tmp_path: Path, maps: bool) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "empty": torch.empty(0, 4)}
    read = read_weights(written(tmp_path, tensors), maps=maps, max_numbers=1 << 24)
    assert read.metadata == {"format": "pt"}
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())


@MAPPED
def test_a_changed_file_is_refused(tmp_path: Path, maps: bool) -> None:
    weights = written(tmp_path, {"a": torch.zeros(9)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(EngineError, match="SHA-256"):
        read_weights(weights, maps=maps, max_numbers=1 << 24)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_found_anywhere(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    for at in range(67):  # the numbers of a vector register, and the rest
        tensor = torch.randn(67).to(dtype)
        tensor[at] = value
        with pytest.raises(EngineError, match="b has values that are not finite"):
            read_weights(
                written(tmp_path, {"a": torch.full((4,), torch.finfo(dtype).max, dtype=dtype), "b": tensor}),
                max_numbers=1 << 24,
            )


def sparse(directory: Path, header: Mapping[str, Any], size: int, *, is_whole: bool) -> WeightsRef:
    """A file of zeros without blocks on the disk, behind a header."""
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + size if is_whole else size)
    return WeightsRef(version=PolicyVersion("policy", 0, 1), path=str(directory), kind="full", sha256="0" * 64)


def tensor(numbers: int, end: int) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, end]}}


LARGE = 1 << 42
HUGE: dict[str, tuple[Mapping[str, Any], int, bool]] = {
    "numbers": (tensor(LARGE // 4, LARGE), LARGE, True),
    "bytes": (tensor(4, LARGE), LARGE, True),
    "hidden": (tensor(4, 16), LARGE, False),
    "shape": ({"a": {"dtype": "F32", "shape": [1 << 30, 1 << 30, 0, 1], "data_offsets": [0, LARGE]}}, LARGE, True),
    "negative": (tensor(-4, 16), LARGE, False),
    "no header": ({}, LARGE, False),
}


@MAPPED
@pytest.mark.parametrize("name", HUGE)
def test_a_file_that_is_too_large_is_refused_before_it_is_read_or_copied(tmp_path: Path, name: str, maps: bool) -> None:
    """Four tebibytes, which could be neither read nor hashed."""
    header, size, is_whole = HUGE[name]
    weights = sparse(tmp_path, header, size, is_whole=is_whole)
    with pytest.raises(EngineError, match=r"describes|damaged"):
        read_weights(weights, max_numbers=1000, maps=maps)
    with pytest.raises(EngineError, match=r"describes|damaged"):
        copy_weight_files(weights, tmp_path / "copy", max_numbers=1000)
    assert not any((tmp_path / "copy").iterdir())


def test_a_version_is_not_larger_than_its_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path))
    count = count_numbers(model)
    assert sum(one.numel() for one in model.parameters()) <= count <= 3 * sum(one.numel() for one in model.parameters())
    shapes = [one.shape for one in model.parameters() if one.ndim > 1]
    assert count_adapter_numbers(model, 4) == 16 * sum(rows + columns for rows, columns in shapes)


def test_a_trainer_of_this_process_gives_its_weights_until_it_changes_them(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    weights = written(tmp_path, tensors)
    held = hold_weights(weights.sha256, {"format": "of the trainer"}, lambda: iter(tensors.items()))
    read = read_weights(weights, max_numbers=1 << 24)
    assert read.metadata == {"format": "of the trainer"}
    tensors["a"] += 1.0  # the next optimizer step, after the copy
    assert torch.equal(read.tensors["a"] + 1.0, tensors["a"])
    assert torch.equal(read.tensors["b"], tensors["b"])
    held.withdraw()
    assert read_weights(weights, max_numbers=1 << 24).metadata == {"format": "pt"}
    tensors["b"][3] = torch.nan
    held = hold_weights(weights.sha256, {}, lambda: iter(tensors.items()))
    with pytest.raises(EngineError, match="b has values that are not finite"):
        read_weights(weights, max_numbers=1 << 24)
    del held
    assert read_weights(weights, max_numbers=1 << 24).metadata == {"format": "pt"}, "the trainer is gone"


def test_weights_change_only_after_a_copy_that_began_before(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4)}
    copying, may_go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        copying.set()
        may_go_on.wait()
        yield from tensors.items()

    weights = written(tmp_path, tensors)
    held = hold_weights(weights.sha256, {}, slow)
    with ThreadPoolExecutor() as threads:
        read = threads.submit(read_weights, weights, max_numbers=1 << 24)
        copying.wait()
        step = threads.submit(lambda: (held.withdraw(), tensors["a"].add_(1.0)))
        with pytest.raises(TimeoutError):
            step.result(0.2)
        may_go_on.set()
        assert read.result().tensors["a"].sum() == 0.0


def test_a_received_file_may_arrive_again_while_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIVATE_DIRECTORY_VARIABLE, str(tmp_path / "private"))
    tensors = {"a": torch.ones(1 << 16)}
    sent = written(tmp_path, tensors)
    data = (Path(sent.path) / "model.safetensors").read_bytes()
    files = ReceivedWeightFiles()
    for end in (len(data), 4096):  # the second time, the sender dies early
        chunk = WeightChunk(call=1, sha256=sent.sha256, name="model.safetensors", start=0, data=data[:end])
        files.keep_chunk(chunk)
        if end == len(data):
            received = read_weights(files.local(sent), max_numbers=1 << 24, maps=True)
    assert torch.equal(received.tensors["a"], tensors["a"])
