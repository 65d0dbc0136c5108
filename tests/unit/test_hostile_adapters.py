"""Adapters that are damaged or written to harm: refused with version and reason before anything serves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

from agentrl.core.errors import EngineError
from agentrl.core.files import sha256_of
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.weights.reading import check_adapter, copy_weight_files, read_adapter

A, B = (f"base_model.model.layer.lora_{half}.weight" for half in "AB")
MATRICES = {A: torch.ones(4, 6), B: torch.ones(6, 4)}
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def published(directory: Path, config: bytes, tensors: Mapping[str, torch.Tensor] = MATRICES) -> WeightsRef:
    """An adapter with the digest that its files have."""
    files = (directory / "adapter_model.safetensors", directory / "adapter_config.json")
    save_file(dict(tensors), files[0])
    files[1].write_bytes(config)
    return WeightsRef(
        version=PolicyVersion("solver", 0, 7), path=str(directory), kind="adapter", sha256=sha256_of(*files)
    )


def with_value(key: str, value: str) -> bytes:
    """A sound configuration but for one key, whose value is JSON."""
    return json.dumps({**PLAIN, key: "VALUE"}).replace('"VALUE"', value).encode()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(with_value("lora_alpha", "NaN"), "supported", id="nan"),
        pytest.param(with_value("lora_alpha", "1e999"), "supported", id="infinite"),
        pytest.param(with_value("lora_alpha", "1e308"), "finite", id="too large"),
        pytest.param(with_value("r", "0"), r"\$\.r", id="no rank"),
        pytest.param(with_value("r", "4.5"), r"\$\.r", id="broken rank"),
        pytest.param(b'{"peft_type": "LORA", "lora_alpha": 8}', "`r`", id="missing rank"),
        pytest.param(b"[]", "supported", id="list"),
        pytest.param(b"\xff{}", "supported", id="no text"),
        pytest.param(b"[" * 60_000, "supported", id="deep"),
        pytest.param(with_value("task_type", "[" * 60_000), "supported", id="deep inside"),
        pytest.param(b" " * 200_000, "longer than", id="long"),
        pytest.param(with_value("bias", '"all"'), r"\$\.bias", id="bias"),
        pytest.param(with_value("init_lora_weights", '"pissa"'), "pissa", id="changes the base"),
        pytest.param(with_value("alora_invocation_tokens", "[3]"), "'alora_invocation_tokens'", id="alora"),
        pytest.param(with_value("use_\x1b[2J", "1"), r"'use_\\x1b\[2J'", id="unknown"),
    ],
)
def test_a_configuration_that_is_not_plain_lora_is_refused(tmp_path: Path, config: bytes, reason: str) -> None:
    with pytest.raises(EngineError, match=rf"solver@0\.7 .*{reason}"):
        read_adapter(published(tmp_path, config), max_numbers=1 << 24)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        pytest.param({}, "no LoRA matrices", id="empty"),
        pytest.param({A: torch.ones(4, 6, 1), B: MATRICES[B]}, "matrix", id="three dimensions"),
        pytest.param({A: torch.tensor(1.0), B: MATRICES[B]}, "matrix", id="no dimension"),
    ],
)
def test_tensors_that_are_not_plain_lora_are_refused(tmp_path: Path, tensors: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=rf"solver@0\.7 .*{reason}"):
        read_adapter(published(tmp_path, json.dumps(PLAIN).encode(), tensors), max_numbers=1 << 24)


def test_a_configuration_that_was_not_published_is_refused(tmp_path: Path) -> None:
    weights = published(tmp_path, json.dumps(PLAIN).encode())
    assert read_adapter(weights, max_numbers=1 << 24).scale == 2.0
    (tmp_path / "adapter_config.json").write_bytes(with_value("lora_alpha", "8000"))
    with pytest.raises(EngineError, match="digest"):
        read_adapter(weights, max_numbers=1 << 24)


def test_what_peft_writes_by_itself_is_plain_lora(tmp_path: Path) -> None:
    config: dict[str, Any] = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["layer"], lora_dropout=0.1).to_dict()
    written = json.dumps({**config, "target_modules": ["layer"]}, default=list)
    assert read_adapter(published(tmp_path, written.encode()), max_numbers=1 << 24).rank == 4


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_an_expression_that_never_ends_is_not_evaluated(tmp_path: Path, key: str) -> None:
    """It would hold the engine for hours: a name of this length takes 2**60 attempts."""
    model: Any = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(6, 6))
    model.add_module("l" * 60, torch.nn.Linear(6, 6))
    config = {**PLAIN, "target_modules": ["layer"], key: r"(\w+)+!"}
    weights = published(tmp_path, json.dumps(config).encode())
    check_adapter(weights, read_adapter(weights, max_numbers=1 << 24), model, max_rank=4)


def test_where_there_is_no_room_for_a_copy_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    weights = published(tmp_path / "run", json.dumps(PLAIN).encode())
    place = tmp_path / "place"
    copied = copy_weight_files(weights, place, max_numbers=1 << 24)
    assert read_adapter(copied, max_numbers=1 << 24).rank == 4
    (place / "adapter_model.safetensors").unlink()
    (place / "adapter_model.safetensors").symlink_to("/dev/full")
    with pytest.raises(EngineError, match=str(place)):
        copy_weight_files(weights, place, max_numbers=1 << 24)
    with pytest.raises(EngineError, match=r"absent/adapter_model\.safetensors"):
        copy_weight_files(replace(weights, path=str(tmp_path / "absent")), place, max_numbers=1 << 24)
