"""`model.dtype`: what engine and trainer compute in, what is trained in float32, and what a published version holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import ModelConfig
from agentrl.core.errors import ModelError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.models import model_dtype
from agentrl.learn.models import PolicyModel, _move_gradient, load_models
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model, write_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(make_rows(0, 8))


@pytest.fixture
def rounded(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    path = write_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


def config_of(path: Path, dtype: str = "auto", *, lora: bool = False, learning_rate: float = 1e-2) -> RunConfig:
    policy = PolicyConfig(learning_rate=learning_rate, lora=LORA if lora else None)
    config = run_config(path, policies={"policy": policy})
    return config.model_copy(update={"model": ModelConfig(path=str(path), dtype=dtype)})


def started(config: RunConfig, directory: Path, episodes: Episodes) -> PolicyTrainer:
    trainer = PolicyTrainer(config.trainer_plan, directory, read=episodes.read)
    trainer.start()
    return trainer


def taken(trainer: PolicyTrainer, episodes: Episodes, steps: range) -> None:
    for step in steps:
        trainer.forward_backward(episodes.batch(step))
        trainer.optim_step("policy", step)


def test_auto_is_the_dtype_of_the_checkpoint(rounded: Path, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain")
    half = write_model(tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.float16).save_pretrained(half)
    found = [model_dtype(path, "auto", CPU) for path in (rounded, plain, half)]
    assert found == [torch.bfloat16, torch.float32, torch.float32]
    silent = json.loads((rounded / "config.json").read_text())
    del silent["dtype"]
    (rounded / "config.json").write_text(json.dumps(silent))
    assert model_dtype(rounded, "auto", CPU) is torch.bfloat16
    assert model_dtype(rounded, "float32", CPU) is torch.float32


def test_a_dtype_the_device_lacks_is_refused(rounded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(ModelError, match=r"model\.dtype"):
        model_dtype(rounded, "auto", torch.device("cuda"))


def test_an_adapter_is_float32_on_a_base_in_bfloat16(rounded: Path, tmp_path: Path, episodes: Episodes) -> None:
    trainer = started(config_of(rounded, lora=True), tmp_path, episodes)
    policy = trainer._learners["policy"].model
    base = {name: each for name, each in policy.model.named_parameters() if "lora_" not in name}
    assert {each.dtype for each in base.values()} == {torch.bfloat16}
    assert not any(each.requires_grad for each in base.values())
    before = {name: each.clone() for name, each in base.items()}
    trainer.forward_backward(episodes.batch())
    own = policy.parameters.values()
    assert {each.dtype for each in own} == {each.grad.dtype for each in own if each.grad is not None} == {torch.float32}
    computed = {name: each for name, each in policy.model.named_parameters() if "lora_" in name}
    assert {each.dtype for each in computed.values()} == {torch.bfloat16}, "it is computed in the dtype of the base"
    trainer.optim_step("policy", 1)
    assert all(torch.equal(each, policy.parameters[name].bfloat16()) for name, each in computed.items())
    assert all(torch.equal(before[name], each) for name, each in base.items())
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 1))
    published = load_file(Path(reference.path) / "adapter_model.safetensors")
    assert {each.dtype for each in published.values()} == {torch.float32}


def test_all_weights_have_float32_masters_and_are_published_rounded(
    rounded: Path, tmp_path: Path, episodes: Episodes
) -> None:
    trainer = started(config_of(rounded, learning_rate=1e-5), tmp_path, episodes)
    policy = trainer._learners["policy"].model
    start = {name: each.clone() for name, each in policy.model.named_parameters()}
    assert {each.dtype for each in start.values()} == {torch.bfloat16}
    trainer.forward_backward(episodes.batch(1))
    assert all(each.grad is None for each in policy.model.parameters())
    assert {each.grad.dtype for each in policy.parameters.values() if each.grad is not None} == {torch.float32}
    trainer.optim_step("policy", 1)
    moved = {name: (master - start[name].float()).abs().max() for name, master in policy.parameters.items()}
    assert all(0 < each < 1.1e-5 for each in moved.values()), "steps smaller than bfloat16 resolves add up"
    for name, each in policy.model.named_parameters():
        assert torch.equal(each, policy.parameters[name].bfloat16())
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 1))
    file = Path(reference.path) / "model.safetensors"
    assert {each.dtype for each in load_file(file).values()} == {torch.bfloat16}
    assert json.loads((Path(reference.path) / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_says_the_dtype_it_is_published_in(tmp_path: Path, episodes: Episodes, dtype: str) -> None:
    path = write_model(tmp_path / "model")
    if dtype == "float32":
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    trainer = started(config_of(path, dtype), tmp_path / "run", episodes)
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 0))
    assert {each.dtype for each in load_file(Path(reference.path) / "model.safetensors").values()} == {
        getattr(torch, dtype)
    }
    assert AutoModelForCausalLM.from_pretrained(reference.path, dtype="auto").dtype == getattr(torch, dtype)


def test_gradients_in_bfloat16_are_near_those_in_float32(rounded: Path, tmp_path: Path, episodes: Episodes) -> None:
    gradients = []
    for dtype in ("float32", "bfloat16"):
        trainer = started(config_of(rounded, dtype), tmp_path / dtype, episodes)
        trainer.forward_backward(episodes.batch())
        parameters = trainer._learners["policy"].model.parameters
        gradients.append(torch.cat([each.grad.flatten() for each in parameters.values() if each.grad is not None]))
    exact, found = gradients
    assert float((found - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_trainer_goes_on_bit_for_bit(rounded: Path, tmp_path: Path, episodes: Episodes, lora: bool) -> None:
    config = config_of(rounded, lora=lora)
    undisturbed = started(config, tmp_path / "one", episodes)
    taken(undisturbed, episodes, range(1, 3))
    undisturbed.save(tmp_path / "checkpoint")
    taken(undisturbed, episodes, range(3, 4))
    resumed = PolicyTrainer(config.trainer_plan, tmp_path / "two", read=episodes.read)
    resumed.start(tmp_path / "checkpoint")
    taken(resumed, episodes, range(3, 4))
    for one, two in zip(
        undisturbed._learners["policy"].model.model.parameters(),
        resumed._learners["policy"].model.model.parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_in_main_memory_give_the_same_run_bit_for_bit(
    rounded: Path, tmp_path: Path, episodes: Episodes, dtype: str, lora: bool
) -> None:
    plain = config_of(rounded, dtype, lora=lora)
    offloaded = plain.model_copy(update={"trainer": plain.trainer.model_copy(update={"sharding": "offload"})})
    files, reports = [], []
    for config in (plain, offloaded):
        directory = tmp_path / str(config.trainer.sharding)
        trainer = started(config, directory, episodes)
        taken(trainer, episodes, range(1, 3))
        trainer.save(directory / "checkpoint")
        reference = trainer.publish("policy", PolicyVersion("policy", 0, 2))
        files.append((reference.sha256, (directory / "checkpoint/policy/optimizer.safetensors").read_bytes()))
    assert files[0] == files[1]
    assert trainer.only_in_checkpoints("policy") == (dtype == "bfloat16" and not lora), "none is rounded in float32"
    for config, saved in ((offloaded, "auto"), (plain, "offload")):
        resumed = PolicyTrainer(config.trainer_plan, tmp_path / f"after {saved}", read=episodes.read)
        resumed.start(tmp_path / saved / "checkpoint")
        resumed.forward_backward(episodes.batch(3))
        report = resumed.optim_step("policy", 3)
        reports.append((report.loss, report.grad_norm, report.input_digest))
    assert reports[0] == reports[1]
    if not trainer.only_in_checkpoints("policy"):
        trainer._learners["policy"].model.publication.load(reference)
        trainer.forward_backward(episodes.batch(3))
        report = trainer.optim_step("policy", 3)
        assert (report.loss, report.grad_norm) == reports[0][:2], "masters follow what is loaded"


def test_masters_in_main_memory_are_stepped_there(rounded: Path) -> None:
    """With tensors that are on a GPU, and have no data; no GPU computes."""
    (planned,) = load_models(config_of(rounded).trainer_plan, torch.device("meta")).values()
    model: torch.nn.Module = planned.model
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                there = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                module.register_parameter(name, torch.nn.Parameter(there))
        policy = PolicyModel(model=planned.model, base=rounded, peft_model=None, adapter=None)
        policy.train(offload=True)
        optimizer = torch.optim.AdamW(list(policy.parameters.values()), fused=True)
        for _ in range(2):  # as two micro-batches do
            for name, parameter in model.named_parameters():
                parameter.grad = torch.empty_like(parameter)
                _move_gradient(policy.parameters[name], parameter)
                assert parameter.grad is None
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), 1.0)
        optimizer.step()
        held = [each for state in optimizer.state.values() for each in state.values()]
        own = [
            *policy.parameters.values(),
            *(each.grad for each in policy.parameters.values() if each.grad is not None),
        ]
        assert {each.device.type for each in (*held, *own, norm)} == {"cpu"}
        assert {each.dtype for each in own} == {torch.float32}
        assert {each.device.type for each in model.parameters()} == {"cuda"}


def test_a_step_is_computed_again_from_the_masters_of_a_checkpoint(
    rounded: Path, tmp_path: Path, episodes: Episodes
) -> None:
    config = config_of(rounded)
    trainer = started(config, tmp_path / "run", episodes)
    taken(trainer, episodes, range(1, 2))
    trainer.save(tmp_path / "checkpoint")
    reports = []
    for step in (2, 3):
        trainer.forward_backward(episodes.batch(step))
        reports.append(trainer.optim_step("policy", step))
    again = PolicyTrainer(config.trainer_plan, tmp_path / "run", read=episodes.read, publishes=False)
    again.start()
    assert again.only_in_checkpoints("policy")
    between = [(episodes.batch(2), reports[0].metrics["learning_rate"])]
    saved = tmp_path / "checkpoint" / "policy"
    found = again.recompute(episodes.batch(3), PolicyVersion("policy", 0, 1), saved, between)
    assert found == (reports[1].loss, reports[1].grad_norm)
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 3))
    with pytest.raises(ModelError, match="rounded"):
        again.recompute(episodes.batch(4), reference.version, reference)


def test_the_embedded_engine_computes_in_the_dtype_of_the_checkpoint(rounded: Path) -> None:
    versions = {"policy": PolicyVersion("policy", 0, 0)}
    engine = EmbeddedEngine.load(str(rounded), versions=versions, slots=2, max_context=32)
    assert engine.versions.base.model.dtype is torch.bfloat16
