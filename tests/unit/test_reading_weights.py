"""A version's file, read or mapped into memory, and its values that are not finite."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.weights.reading import read_weights

PRIVATE = pytest.mark.parametrize("is_private", [False, True])


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> WeightsRef:
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return WeightsRef(version=PolicyVersion("policy", 0, 1), path=str(directory), kind="full", sha256=digest)


@PRIVATE
def test_tensors_and_metadata_are_those_of_the_file(tmp_path: Path, is_private: bool) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "empty": torch.empty(0, 4)}
    read = read_weights(written(tmp_path, tensors), is_private=is_private, max_numbers=1 << 24)
    assert read.metadata == {"format": "pt"}
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())


@PRIVATE
def test_a_changed_file_is_refused(tmp_path: Path, is_private: bool) -> None:
    weights = written(tmp_path, {"a": torch.zeros(9)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(EngineError, match="SHA-256"):
        read_weights(weights, is_private=is_private, max_numbers=1 << 24)


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
