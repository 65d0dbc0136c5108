"""Model directories that are damaged or written to harm, read for training and for sampling."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.core.errors import ModelError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.learn.models import load_models
from tests.learn_cases import run_config, write_model

ESCAPE = "\x1b]52;c;aGk=\x07"
NORM = "model.norm.weight"


def train(path: Path) -> None:
    load_models(run_config(path).trainer_plan, torch.device("cpu"))


def sample(path: Path) -> None:
    EmbeddedEngine.load(
        str(path), versions={"policy": PolicyVersion("policy", 0, 0)}, slots=2, max_context=64, device="cpu"
    )


LOADS = pytest.mark.parametrize("load", [train, sample])


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def pickled(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def oversized_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**60) + file.read_bytes()[8:])


def deep_configuration(path: Path) -> None:
    (path / "config.json").write_text('{"a":' * 100_000)


def configuration(path: Path, **values: object) -> None:
    read = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**read, **values}))


def lost_shard(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + at % 3}-of-00003.safetensors" for at, name in enumerate(sorted(tensors))}
    for shard in sorted(set(shards.values()))[:2]:
        kept = {name: tensors[name] for name in tensors if shards[name] == shard}
        save_file(kept, path / shard, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def enormous(path: Path, name: str) -> None:
    with (path / name).open("ab") as file:
        file.truncate(1 << 42)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled": (pickled, "safetensors"),
    "missing": (lambda path: change(path, lambda tensors: tensors.pop(NORM)), f"missing .'{NORM}'"),
    "shape": (lambda path: change(path, lambda tensors: tensors.update({NORM: torch.ones(7)})), "wrong shape"),
    "shard": (lost_shard, r"1 of 3 weight files are missing \('model-00003-of-00003\.safetensors'\)"),
    "truncated": (truncated, "SafetensorError"),
    "header": (oversized_header, "SafetensorError"),
    "long": (lambda path: enormous(path, "config.json"), "4,398,046,511,104 bytes"),
    "long generation": (lambda path: enormous(path, "generation_config.json"), "4,398,046,511,104 bytes"),
    "long index": (lambda path: enormous(path, "model.safetensors.index.json"), "4,398,046,511,104 bytes"),
    "deep": (deep_configuration, "cannot be (loaded|read)"),
    "heads": (lambda path: configuration(path, num_attention_heads="x"), "cannot be loaded"),
    "padding": (lambda path: configuration(path, pad_token_id=10**6), "cannot be loaded.*AssertionError"),
    "layers": (lambda path: configuration(path, num_hidden_layers=3, layer_types=None), "missing"),
    "adapter": (lambda path: (path / "adapter_config.json").write_text("{}"), "contains an adapter"),
}


@LOADS
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(
    tmp_path: Path, load: Callable[[Path], None], damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    apply, complaint = DAMAGE[damage]
    apply(write_model(tmp_path))
    capfd.readouterr()  # what saving said
    with pytest.raises(ModelError, match=complaint):
        load(tmp_path)
    assert capfd.readouterr() == ("", "")


@LOADS
def test_names_of_tensors_reach_no_stream_as_they_are(
    tmp_path: Path, load: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    change(write_model(tmp_path), lambda tensors: tensors.update({ESCAPE: torch.ones(1)}))
    capfd.readouterr()
    with pytest.warns(UserWarning, match="1 tensors ") as caught:
        load(tmp_path)
    assert repr(ESCAPE) in str(caught[0].message)
    assert capfd.readouterr() == ("", "")


@LOADS
@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe"])
def test_a_sound_model_with_or_without_tied_weights_is_read_silently(
    tmp_path: Path, load: Callable[[Path], None], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path, kind=kind)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path)
    assert capfd.readouterr() == ("", "")
