"""References: the frozen model that a loss reads, as teacher or as what the divergence pulls toward."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.app.policies import check_tokenizers
from agentrl.config.policies import FrozenPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ConfigError, InputError, ModelError
from agentrl.core.records import PolicyVersion
from agentrl.credit.group_baselines import leave_one_out
from agentrl.learn.losses import dpo
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import (
    LORA,
    Episodes,
    divisors,
    make_rows,
    predict_trainer_memory,
    run_config,
    write_model,
    write_tokenizer,
)
from tests.loss_cases import batch_of, conversations, evaluated, loss_named


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher with other weights."""
    place = tmp_path_factory.mktemp("models")
    student, teacher = write_model(place / "student"), place / "teacher"
    model = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(teacher)
    return student, teacher


def config_of(student: Path, teacher: Path | str, *, name: str = "distillation", **trainer: object) -> RunConfig:
    policy = PolicyConfig(learning_rate=1e-2, reference=str(teacher))
    loss = {"name": name, **({"kl": 1.0} if name == "ppo" else {})}
    return run_config(student, policies={"policy": policy}, loss=loss, **trainer)


def steps(config: RunConfig, place: Path, count: int = 1) -> list[dict[str, float]]:
    """The metrics of some steps on the same rows, whose advantages the loss ignores."""
    episodes = Episodes(make_rows(0, 8))
    trainer = PolicyTrainer(config.trainer_plan, place, read=episodes.read)
    trainer.start()
    found = []
    for step in range(1, count + 1):
        trainer.forward_backward(episodes.batch(step_id=step))
        report = trainer.optim_step("policy", step)
        trainer.publish("policy", PolicyVersion("policy", 0, step))
        found.append({**report.metrics, "loss": report.loss, "grad_norm": report.grad_norm})
    return found


def test_distillation_moves_the_student_towards_its_teacher(models: tuple[Path, Path], tmp_path: Path) -> None:
    found = steps(config_of(*models), tmp_path, 12)
    distances = [abs(each["reference_kl"]) for each in found]
    assert distances[-1] < 0.5 * distances[0]


def test_a_student_that_is_its_teacher_has_nothing_to_learn(models: tuple[Path, Path], tmp_path: Path) -> None:
    (found,) = steps(config_of(models[0], models[0]), tmp_path)
    assert found["grad_norm"] < 1e-6
    assert abs(found["reference_kl"]) < 1e-6


def test_the_gradient_is_that_of_a_loop(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The norm of the gradient of KL(pi || ref), token by token over rows of one; all 48 tokens are among the 64
    likeliest."""
    from transformers import AutoModelForCausalLM

    (found,) = steps(config_of(*models), tmp_path)
    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models)
    rows = make_rows(0, 8)
    total = torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype("int64"))[None]
        own, theirs = (
            (model(input_ids=ids).logits[0, :-1] / divisors(row)).log_softmax(-1) for model in (student, teacher)
        )
        mask = torch.from_numpy(row.loss_mask)[1:]
        total = total + (own.exp() * (own - theirs.detach())).sum(1)[mask].sum()
    (total / Episodes(rows).batch().normalizer).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters() if p.grad is not None])
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert found["loss"] == pytest.approx(float(total.detach()) / Episodes(rows).batch().normalizer, rel=1e-4)


WHOLE_STEP = """
import agentrl


@agentrl.loss(divergence=True)
def farther(batch):
    return batch.reference_kl - batch.mean(batch.reference_kl, "agent").detach() + 0 * batch.reference_logprobs
"""


def test_a_loss_of_the_whole_step_reads_the_divergence(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Its derivative by the divergence is 1, as that of `distillation`."""
    file = tmp_path / "losses.py"
    file.write_text(WHOLE_STEP)
    (own,) = steps(config_of(*models, name=f"{file}:farther", micro_batch_tokens=32), tmp_path / "own")
    (built_in,) = steps(config_of(*models), tmp_path / "built_in")
    assert own["grad_norm"] == pytest.approx(built_in["grad_norm"], rel=1e-5)
    assert own["loss"] == pytest.approx(0.0, abs=1e-5)


def test_a_reward_is_added_to_the_divergence() -> None:
    """-min(w, 5) A d log pi beside d KL, by hand."""
    batch = batch_of([-1.0, -2.0], [-1.5, -9.0], [1.0, -2.0], reference=[-1.0, -1.0], divergence=[0.3, 0.7])
    found = evaluated(loss_named("distillation", reward=0.5), batch)
    assert found.by_reference_kl.tolist() == [1.0, 1.0]
    assert found.by_logprob.tolist() == pytest.approx([-0.5 * math.exp(0.5), -0.5 * 5.0 * -2.0])
    assert evaluated(loss_named("distillation"), batch).loss.tolist() == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize("name", ["ppo", "distillation"])
def test_micro_batches_change_nothing(models: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    whole, split = (
        steps(config_of(*models, name=name, micro_batch_tokens=tokens), tmp_path / str(tokens))[0]
        for tokens in (8192, 32)
    )
    assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert split["reference_kl"] == pytest.approx(whole["reference_kl"], rel=1e-5)


def trained_adapter(student: Path, place: Path) -> Path:
    """The directory of an adapter after one step."""
    config = run_config(student, policies={"policy": PolicyConfig(lora=LORA, learning_rate=0.1)})
    episodes = Episodes(make_rows(0, 8))
    trainer = PolicyTrainer(config.trainer_plan, place, read=episodes.read)
    trainer.start()
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    return Path(trainer.publish("policy", PolicyVersion("policy", 0, 1)).path)


def test_an_adapter_of_the_base_is_a_reference(models: tuple[Path, Path], tmp_path: Path) -> None:
    trained = trained_adapter(models[0], tmp_path / "first")
    found = steps(config_of(models[0], trained), tmp_path / "second", 12)
    assert abs(found[-1]["reference_kl"]) < 0.5 * abs(found[0]["reference_kl"])


@pytest.mark.parametrize(
    ("rename", "refused"),
    [
        (lambda name: name.replace("model.layers", "model.language_model.layers"), "no tensors .*layers.0.*"),
        (lambda name: name if ".layers.0." in name else None, r"no tensors for layers that it targets.*layers\.1\."),
        (lambda name: name.replace(".layers.1.", ".layers.7."), r"no tensors .*layers\.1\."),
    ],
)
def test_an_adapter_that_does_not_fit_the_base_is_no_reference(
    models: tuple[Path, Path], tmp_path: Path, rename: Callable[[str], str | None], refused: str
) -> None:
    """PEFT would leave out the tensors that fit no layer, and the reference would be the base."""
    file = trained_adapter(models[0], tmp_path / "first") / "adapter_model.safetensors"
    tensors = {name: tensor for old, tensor in load_file(file).items() if (name := rename(old)) is not None}
    save_file(tensors, file)
    with pytest.raises(ModelError, match=refused):
        steps(config_of(models[0], file.parent), tmp_path / "second")


def test_an_adapter_with_more_layers_than_the_base_is_no_reference(models: tuple[Path, Path], tmp_path: Path) -> None:
    file = trained_adapter(models[0], tmp_path / "first") / "adapter_model.safetensors"
    tensors = load_file(file)
    more = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | more, file)
    with pytest.raises(ModelError, match=r"other layers than those of the model.*layers\.2\."):
        steps(config_of(models[0], file.parent), tmp_path / "second")


def test_a_reference_is_counted_in_the_memory(models: tuple[Path, Path]) -> None:
    with_one, without = (predict_trainer_memory(config_of(models[0], teacher)) for teacher in (models[1], ""))
    assert with_one.weights - without.weights == (models[1] / "model.safetensors").stat().st_size // 4 * 4 or (
        with_one.weights > without.weights
    )


def test_a_teacher_with_another_tokenizer_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    import json
    import shutil

    student = shutil.copytree(models[0], tmp_path / "student")
    teacher = shutil.copytree(models[1], tmp_path / "teacher")
    write_tokenizer(student)
    write_tokenizer(teacher)
    frozen = {"kind": "frozen", "path": str(teacher)}
    settings = ("policies.policy.reference", "policies.judge.path", "engine.vllm.speculative_config.model")
    configs = (
        config_of(student, teacher),
        run_config(student, policies={"policy": PolicyConfig(), "judge": FrozenPolicy.model_validate(frozen)}),
        run_config(student).model_copy(
            update={"engine": EngineConfig(vllm={"speculative_config": {"model": str(teacher)}})}
        ),
    )
    for config in configs:
        check_tokenizers(config.engine_plan)
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    for setting, config in zip(settings, configs, strict=True):
        with pytest.raises(ConfigError, match=rf"^{setting}: .*'a'"):
            check_tokenizers(config.engine_plan)
    with pytest.raises(InputError, match="directory"):
        check_tokenizers(config_of(student, tmp_path / "absent").engine_plan)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no weights .*policies/NAME"):
        check_tokenizers(config_of(student, tmp_path / "empty").engine_plan)


def test_a_reference_of_fewer_tokens_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[0])
    model.resize_token_embeddings(32)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ModelError, match="32 tokens"):
        steps(config_of(models[0], tmp_path / "small"), tmp_path / "run")


PAIRS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": lambda ahead: torch.nn.functional.softplus(-0.5 * ahead),
    "hinge": lambda ahead: (1 - 0.5 * ahead).clamp(min=0),
    "ipo": lambda ahead: (ahead - 1) ** 2,
}


@pytest.mark.parametrize("pair", PAIRS)
def test_online_dpo_is_that_of_a_loop_over_pairs(pair: str) -> None:
    """Three conversations of one seat in one group and one of another; a conversation's tokens share its loss."""
    lengths, groups, advantages = [2, 3, 1, 2], [0, 0, 0, 1], [1.0, -0.5, -0.5, 1.0]
    batch, agent = conversations(lengths, advantages, groups, seed=0), np.repeat(np.arange(4), lengths)
    found = dpo(batch, beta=0.5, pair=pair)
    assert batch.reference_logprobs is not None
    h = [(batch.logprobs - batch.reference_logprobs)[torch.from_numpy(agent == each)].sum() for each in range(4)]
    pairs = [PAIRS[pair](h[0] - h[other]) for other in (1, 2)]
    expected = torch.stack(pairs).mean()
    assert found[:6].tolist() == pytest.approx([float(expected.detach())] * 6)
    assert found[6:].tolist() == [0.0, 0.0], "nobody to be compared with"
    weights = torch.from_numpy(1 / (3 * np.repeat(lengths, lengths)))[:6]
    (ours,) = torch.autograd.grad((found[:6] * weights).sum(), batch.logprobs, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, batch.logprobs)
    assert ours.tolist() == pytest.approx(theirs.tolist())


def test_dpo_compares_no_conversations_of_equal_reward() -> None:
    """Rewards of 0 and 1 in a group of eight; a mean of float32 advantages over the tokens would be rounded."""
    rewards = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    advantages = [each.value for each in leave_one_out(rewards)]
    lengths = [20, 101, 399, 733, 1499, 2750, 4097, 5999]
    for one, other in combinations(range(8), 2):
        batch = conversations([lengths[one], lengths[other]], [advantages[one], advantages[other]], [0, 0], seed=1)
        paired = bool((dpo(batch) != 0).any())
        assert paired == (rewards[one] != rewards[other]), (lengths[one], lengths[other])
