"""Model directories from others that are damaged or written to harm: what refuses each, and what is said.

They would run code of a hub or of a pickle, never end, fill the memory, or compute nothing but NaN.
"""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.app.policies import check_tokenizers
from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import ModelError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.forward import check_slots_match_forward
from agentrl.engines.models import read_meta_model, read_model
from agentrl.learn.forward_check import why_unshared
from agentrl.learn.models import load_models
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests import default_starts
from tests.learn_cases import run_config, write_model

ESCAPE = "\x1b]52;c;aGk=\x07"
NORM = "model.norm.weight"
EVIL = "kernels-community/evil"


# --- who reads a directory --------------------------------------------------------------------------------------------


def train(path: Path) -> None:
    load_models(run_config(path).trainer_plan, torch.device("cpu"))


def sample(path: Path) -> None:
    EmbeddedEngine.load(
        str(path), versions={"policy": PolicyVersion("policy", 0, 0)}, slots=2, max_context=64, device="cpu"
    )


def read(path: Path) -> None:
    read_model(path, dtype=torch.float32, max_context=64)


def read_shapes(path: Path) -> None:
    read_meta_model(path, max_context=64)


def chat(path: Path) -> None:
    TemplateChatFormat.load(path)


def check_slots(path: Path) -> None:
    check_slots_match_forward(read_model(path, dtype=torch.float32, max_context=64), str(path), max_context=64)


def check_sharing(path: Path) -> None:
    why_unshared(read_model(path, dtype=torch.float32, max_context=64), 64)


def check_tokens(path: Path) -> None:
    policy = PolicyConfig(learning_rate=1e-2, reference=str(path))
    check_tokenizers(run_config(path, policies={"policy": policy}).engine_plan)


# --- what is wrong with it --------------------------------------------------------------------------------------------


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


def configuration(path: Path, **values: object) -> None:
    known = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, **values}))


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


def weight_of(value: float) -> Damage:
    def fill(tensors: dict[str, torch.Tensor]) -> None:
        next(tensor for name, tensor in tensors.items() if name.endswith("down_proj.weight"))[:] = value

    return lambda path: change(path, fill)


def long_token(path: Path) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "x" * 60_000})
    file.write_text(json.dumps(content))


def setting(**values: object) -> Damage:
    return lambda path: configuration(path, **values)


def content(name: str, data: bytes, *, without: str = "") -> Damage:
    """A file's content; the file that would be read instead of it is removed."""

    def write(path: Path) -> None:
        (path / name).write_bytes(data)
        if without:
            (path / without).unlink()

    return write


def size(name: str) -> Damage:
    return lambda path: enormous(path, name)


Damage = Callable[[Path], object]
Reader = Callable[[Path], None]
LOADS: tuple[Reader, ...] = (train, sample)
READS: tuple[Reader, ...] = (read, read_shapes)
CHECKS: tuple[Reader, ...] = (check_slots, check_sharing)
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
GENERATION = "generation_config.json"
HUB = "_implementation = .*hub"
LARGE = "4,398,046,511,104 bytes"


class Case(NamedTuple):
    damage: Damage
    readers: tuple[Reader, ...]
    """Who refuses it."""
    told: str
    """A pattern of what is said."""


CASES = {
    # weights
    "pickled": Case(pickled, LOADS, "safetensors"),
    "missing": Case(lambda path: change(path, lambda tensors: tensors.pop(NORM)), LOADS, f"missing .'{NORM}'"),
    "shape": Case(
        lambda path: change(path, lambda tensors: tensors.update({NORM: torch.ones(7)})), LOADS, "wrong shape"
    ),
    "shard": Case(lost_shard, LOADS, r"1 of 3 weight files are missing \('model-00003-of-00003\.safetensors'\)"),
    "truncated": Case(truncated, LOADS, "SafetensorError"),
    "header": Case(oversized_header, LOADS, "SafetensorError"),
    "nan": Case(weight_of(float("nan")), CHECKS, "down_proj.weight contains NaN"),
    "infinite": Case(weight_of(float("inf")), CHECKS, "down_proj.weight contains NaN"),
    "overflowing": Case(weight_of(3e38), CHECKS, "too large"),
    # the configuration
    "deep": Case(content("config.json", b'{"a":' * 100_000), LOADS, "cannot be (loaded|read)"),
    "heads": Case(setting(num_attention_heads="x"), LOADS, "cannot be loaded"),
    "padding": Case(setting(pad_token_id=10**6), LOADS, "cannot be loaded.*AssertionError"),
    "layers": Case(setting(num_hidden_layers=9, layer_types=None), LOADS, "missing"),
    "adapter": Case(content("adapter_config.json", b"{}"), LOADS, "contains an adapter"),
    # code of a hub
    "attention": Case(setting(attn_implementation=EVIL), READS, HUB),
    "private attention": Case(setting(_attn_implementation=EVIL), READS, HUB),
    "attention of a version": Case(setting(attn_implementation=f"{EVIL}@v1:flash"), READS, HUB),
    "attention by part": Case(setting(attn_implementation={"": EVIL}), READS, HUB),
    "attention of the text": Case(setting(attn_implementation={"text_config": EVIL}), READS, HUB),
    "attention in a part": Case(setting(text_config={"_attn_implementation": EVIL}), READS, HUB),
    "attention of a package": Case(setting(attn_implementation="flash_attention_2"), READS, HUB),
    "experts": Case(setting(experts_implementation="deepgemm"), READS, HUB),
    "attention in a list": Case(setting(attn_implementation=[EVIL]), READS, HUB),
    # tokenizer and template
    "deep in a chat": Case(content("config.json", b'{"a":' * 100_000), (chat,), "config.json"),
    "long token": Case(long_token, (chat, check_tokens), "60,000"),
    "template without text": Case(content("chat_template.jinja", b"\xff\xfe"), (chat,), "chat_template.jinja"),
    "tokenizer without text": Case(content(TOKENIZER, b'{"chat_template": "\xff"}'), (chat,), TOKENIZER),
    "template without name": Case(
        content(TOKENIZER, b'{"chat_template": [{"name": [], "template": "x"}]}', without=TEMPLATE), (chat,), TEMPLATE
    ),
    "stop token as text": Case(
        content("config.json", b'{"eos_token_id": "abc"}', without=GENERATION), (chat,), "eos_token_id"
    ),
    "stop token as object": Case(
        content("config.json", b'{"eos_token_id": [1, {}]}', without=GENERATION), (chat,), "eos_token_id"
    ),
    "stop token too large": Case(
        content("config.json", b'{"eos_token_id": 99999999999}', without=GENERATION), (chat,), "eos_token_id"
    ),
    "stop token as truth": Case(content("generation_config.json", b'{"eos_token_id": true}'), (chat,), "eos_token_id"),
    # files too large to read
    "large configuration": Case(size("config.json"), (*LOADS, chat), LARGE),
    "large generation": Case(size("generation_config.json"), (*LOADS, chat), LARGE),
    "large index": Case(size("model.safetensors.index.json"), LOADS, LARGE),
    "large template": Case(size("chat_template.jinja"), (chat,), LARGE),
    "large tokenizer": Case(size("tokenizer.json"), (chat,), LARGE),
    "large tokenizer configuration": Case(size("tokenizer_config.json"), (chat,), LARGE),
    "large tokens": Case(size("special_tokens_map.json"), (chat,), LARGE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_model_is_refused(
    name: str, repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case, model = CASES[name], tmp_path / "model"
    shutil.copytree(repository / "environments" / "calculator" / "model", model)
    case.damage(model)
    capfd.readouterr()  # what saving said
    for reader in case.readers:
        with pytest.raises(ModelError, match=case.told):
            reader(model)
    assert capfd.readouterr() == ("", "")


# --- what is not refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
def test_names_of_tensors_reach_no_stream_as_they_are(
    tmp_path: Path, load: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    change(write_model(tmp_path), lambda tensors: tensors.update({ESCAPE: torch.ones(1)}))
    capfd.readouterr()
    with pytest.warns(UserWarning, match="1 tensors ") as caught:
        load(tmp_path)
    assert repr(ESCAPE) in str(caught[0].message)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("load", LOADS)
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


@pytest.mark.parametrize("value", [None, "eager", "sdpa"])
def test_an_implementation_of_this_machine_is_accepted(repository: Path, tmp_path: Path, value: str | None) -> None:
    model = tmp_path / "model"
    shutil.copytree(repository / "environments" / "calculator" / "model", model)
    configuration(model, attn_implementation=value)
    read_model(model, dtype=torch.float32, max_context=64)


def test_outputs_that_a_checkpoint_s_training_asked_for_are_left_out(tmp_path: Path) -> None:
    path = default_starts.write_model(
        "Qwen3-MoE", tmp_path / "model", output_router_logits=True, output_hidden_states=True
    )
    assert json.loads((path / "config.json").read_text())["output_router_logits"]
    output = read_model(path, dtype=torch.float32, max_context=16)(input_ids=torch.zeros((1, 4), dtype=torch.long))
    assert output.hidden_states is None
    assert output.aux_loss is None
    assert not read_meta_model(path, max_context=16).config.output_router_logits
