"""What clients train has the gradient that each row alone would have, by formulas written down a second time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import InputError, NonFiniteError
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.trainer import PolicyTrainer
from agentrl.parts import AdamSettings, ClientLearner, LoraConfig, RowBatch
from agentrl.parts.learner import PassResult
from agentrl_tinker.config import ServedModelConfig, ServerConfig
from agentrl_tinker.losses import CLIENT_LOSSES, check_rows, training_rows
from agentrl_tinker.messages import ClientRow
from tests.learn_cases import VOCABULARY, Episodes, make_rows, run_config, write_model

ADAM = AdamSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, max_grad_norm=0.5)
SETTINGS = {"ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, "cispo": {}, "dro": {"beta": 0.3}}


def moves_beyond(change: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return ((advantages > 0) & (change > 0.2)) | ((advantages < 0) & (change < -0.2))


Numbers = torch.Tensor
Gradient = np.ndarray[tuple[int], np.dtype[np.float32]]
NAIVE: dict[str, Callable[[Numbers, Numbers, Numbers, Numbers], Numbers]] = {
    "cross_entropy": lambda p, q, a, w: -(p * w),
    "importance_sampling": lambda p, q, a, w: -((p - q).exp() * a),
    "ppo": lambda p, q, a, w: torch.maximum(-(p - q).exp() * a, -(p - q).exp().clip(0.5, 1.1) * a),
    "cispo": lambda p, q, a, w: -((p - q).exp().clip(0.8, 1.2).detach() * a * p),
    "dro": lambda p, q, a, w: 0.15 * (p - q).square() - a * p,
    "dppo": lambda p, q, a, w: -(p - q).exp() * a * ~moves_beyond(p.detach().exp() - q.exp(), a),
}


def client_trainer(directory: Path, weights: Literal["adapter", "full"] = "adapter", **settings: Any) -> ClientLearner:
    config = ServerConfig(
        models={"tiny": ServedModelConfig(path=str(write_model(directory / "model")), weights=weights)},
        engine={"max_context": 32, "vllm": False},
        trainer={"micro_batch_tokens": 24, **settings},  # several micro-batches
    )
    return ClientLearner(config.run.trainer_plan, directory / "model", directory, torch.device("cpu"))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> ClientLearner:
    return client_trainer(tmp_path_factory.mktemp("server"))


def passed(
    trainer: ClientLearner, name: str, rows: list[ClientRow], loss: str, settings: dict[str, float], *, backward: bool
) -> PassResult:
    """The result of a pass with a loss of the protocol."""
    chosen = CLIENT_LOSSES[loss]
    function = partial(chosen.function, **settings)
    return trainer.forward_backward(name, training_rows(chosen, rows, None), function, backward=backward)


def client_rows(seed: int = 0) -> list[ClientRow]:
    """Rows that share prefixes, and whose targets are not always the next tokens."""
    random = np.random.default_rng(seed)
    rows = []
    for length in (9, 12, 5, 17, 1):
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        tokens[:4] = [7, 8, 9, 10][:length]
        targets = np.append(tokens[1:], 3).astype(np.int64)
        targets[: length // 2] = 0
        columns = {
            "logprobs": -random.random(length).astype(np.float32) * 6,
            "advantages": random.standard_normal(length).astype(np.float32),
            "weights": random.random(length).astype(np.float32),
        }
        rows.append(ClientRow(token_ids=tokens, targets=targets, columns=columns))
    return rows


def gradient(trainer: ClientLearner, name: str) -> Gradient:
    return np.concatenate([each.numpy().ravel() for each in trainer.learners[name].gradients()])


def row_by_row(trainer: ClientLearner, loss: str, rows: list[ClientRow], result: PassResult | None = None) -> Gradient:
    """The gradient of rows that the model's own forward pass computes one by one; compares `result` with them."""
    learner = trainer.learners[loss]
    learner.discard()
    learner.model.activate()
    learner.model.model.set_attn_implementation("eager")
    total = 0.0
    for number, row in enumerate(rows):
        logits = learner.model.model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0]
        computed = logits.log_softmax(-1)[torch.arange(len(logits)), torch.from_numpy(row.targets)]
        if result is not None:
            assert np.abs(computed.detach().numpy() - result.logprobs[number]).max() < 1e-5
        columns = (torch.from_numpy(row.columns[name]) for name in ("logprobs", "advantages", "weights"))
        summed = NAIVE[loss](computed, *columns).sum()
        summed.backward()
        total += float(summed.detach())
    assert result is None or result.loss == pytest.approx(total, rel=1e-4)
    return gradient(trainer, loss)


@pytest.mark.parametrize("loss", NAIVE)
def test_gradients_are_those_of_each_row_alone(trainer: ClientLearner, loss: str) -> None:
    rows = client_rows()
    trainer.load(loss, LoraConfig(rank=4), seed=5)
    model = trainer.learners[loss].model
    with torch.no_grad():  # B is zero at the start, so A would have no gradient
        for parameter in model.parameters.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    result = passed(trainer, loss, rows, loss, SETTINGS.get(loss, {}), backward=True)
    found = gradient(trainer, loss)
    expected = row_by_row(trainer, loss, rows, result)
    assert np.abs(expected).max() > 0.01
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
    trainer.unload(loss)


LOSSES_OF_RUNS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"name": "reinforce"},
    "importance_sampling": {"name": "importance_sampling", "high": 1e9},
    "ppo": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1e9},
    "cispo": {"name": "cispo", "min_ratio": 0.8, "max_ratio": 1.2},
    "dro": {"name": "packages.tinker.tests.test_tinker_trainer:dro"},
    "dppo": {"name": "dppo"},
}
"""The loss of a run with the same gradient, by the name that clients use."""


@agentrl.loss
def dro(batch: LossBatch) -> torch.Tensor:
    """The loss `dro` as a user's function."""
    return 0.025 * (batch.logprobs - batch.behavior_logprobs).square() - batch.advantages * batch.logprobs


def gradients_of_both_trainers(directory: Path, loss: str) -> tuple[Gradient, Gradient]:
    """The gradients of equal rows by the trainer of clients and by that of a run, from equal weights."""
    made = make_rows(3, 12)
    rows = [
        msgspec.structs.replace(row, loss_mask=np.arange(len(row.token_ids)) > 0, temperatures=None) for row in made
    ]
    episodes = Episodes(rows)
    config = run_config(
        write_model(directory / "model"),
        policies={"policy": PolicyConfig(lora=LoraConfig(rank=4))},
        loss={**LOSSES_OF_RUNS[loss], "normalizer": 1},
        micro_batch_tokens=64,
    )
    of_run = PolicyTrainer(config.trainer_plan, directory, read=episodes.read, publishes=False)
    of_run.start()
    of_clients = ClientLearner(config.trainer_plan, directory / "model", directory, torch.device("cpu"))
    of_clients.load("client", LoraConfig(rank=4), seed=1)
    learners = of_run._learners["policy"], of_clients.learners["client"]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for pair in zip(*(learner.model.parameters.values() for learner in learners), strict=True):
            value = 0.1 * torch.randn(pair[0].shape, generator=generator)
            for parameter in pair:
                parameter.copy_(value)
    of_run.forward_backward(replace(episodes.batch(), normalizer=1.0))
    client_rows = []
    for row, advantage in zip(rows, episodes.advantages, strict=True):
        constant = np.full(len(row.token_ids) - 1, advantage, np.float32)
        columns = {"logprobs": row.logprobs[1:], "advantages": constant, "weights": constant}
        targets = row.token_ids[1:].astype(np.int64)
        client_rows.append(ClientRow(token_ids=row.token_ids[:-1], targets=targets, columns=columns))
    passed(of_clients, "client", client_rows, loss, {}, backward=True)
    found, expected = (np.concatenate([each.numpy().ravel() for each in learner.gradients()]) for learner in learners)
    return found, expected


_EXPENSIVE = [pytest.param(loss, marks=pytest.mark.exhaustive) for loss in LOSSES_OF_RUNS if loss != "ppo"]


@pytest.mark.parametrize("loss", ["ppo", *_EXPENSIVE])
def test_gradients_are_those_of_a_run(tmp_path: Path, loss: str) -> None:
    found, expected = gradients_of_both_trainers(tmp_path, loss)
    assert np.abs(expected).max() > 0.01
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6


def custom_gradients(trainer: ClientLearner, loss: str) -> tuple[Gradient, Gradient]:
    """The gradients of a loss that the client computes, in two passes, and of the same built-in one."""
    rows = client_rows()
    logprobs = passed(trainer, "custom", rows, "cross_entropy", {}, backward=False).logprobs
    weighted = []
    for row, computed in zip(rows, logprobs, strict=True):
        leaf = torch.from_numpy(computed).requires_grad_()
        columns = (torch.from_numpy(row.columns[name]) for name in ("logprobs", "advantages", "weights"))
        (slope,) = torch.autograd.grad(NAIVE[loss](leaf, *columns).sum(), leaf)
        weighted.append(replace(row, columns={"weights": -slope.numpy()}))
    found = []
    for sent, name, settings in ((weighted, "cross_entropy", {}), (rows, loss, SETTINGS.get(loss, {}))):
        passed(trainer, "custom", sent, name, settings, backward=True)
        found.append(gradient(trainer, "custom"))
        trainer.learners["custom"].discard()
    return found[0], found[1]


def test_a_loss_in_two_passes_has_the_gradient_of_the_built_in_one(trainer: ClientLearner) -> None:
    trainer.load("custom", LoraConfig(rank=4), seed=1)
    for loss in NAIVE:
        found, expected = custom_gradients(trainer, loss)
        assert np.linalg.norm(expected) > 0.01
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6
    trainer.unload("custom")


def test_gradients_add_up_and_a_failed_pass_adds_nothing(trainer: ClientLearner) -> None:
    trainer.load("sum", LoraConfig(rank=4), seed=1)
    for seed in (1, 2):
        passed(trainer, "sum", client_rows(seed), "ppo", {}, backward=True)
    both = gradient(trainer, "sum")
    bad = client_rows(3)
    bad[1].columns["logprobs"][:] = -1e5  # type: ignore[index]  # its ratio overflows
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        passed(trainer, "sum", bad, "importance_sampling", {}, backward=True)
    passed(trainer, "sum", client_rows(4), "ppo", {}, backward=False)
    assert np.array_equal(gradient(trainer, "sum"), both)
    trainer.learners["sum"].discard()
    apart = []
    for seed in (1, 2):
        passed(trainer, "sum", client_rows(seed), "ppo", {}, backward=True)
        apart.append(gradient(trainer, "sum"))
        trainer.learners["sum"].discard()
    assert np.allclose(both, apart[0] + apart[1], atol=1e-6)
    trainer.unload("sum")


def test_adapters_come_and_go_in_any_order(trainer: ClientLearner) -> None:
    """What one adapter computes does not depend on others, nor on those that were removed."""
    expected: dict[str, Gradient] = {}
    for order in ("a+ a b+ b a b-", "b+ b a+ a b b- a c+ c a- c c- a+ a"):
        for act in order.split():
            name = act[0]
            if act.endswith("+"):
                trainer.load(name, LoraConfig(rank=2 + ord(name) % 3), seed=ord(name))
            elif act.endswith("-"):
                trainer.unload(name)
            else:
                passed(trainer, name, client_rows(1), "cross_entropy", {}, backward=True)
                found = gradient(trainer, name)
                assert np.array_equal(found, expected.setdefault(name, found))
                trainer.learners[name].discard()
        for name in [name for name in "abc" if name in trainer.loaded]:
            trainer.unload(name)


def test_a_step_is_that_of_adamw(trainer: ClientLearner) -> None:
    trainer.load("adam", LoraConfig(rank=4), seed=1)
    parameters = trainer.learners["adam"].model.parameters
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters.values()]
    reference = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
    for seed in range(3):
        passed(trainer, "adam", client_rows(seed), "cross_entropy", {}, backward=True)
        for copy, found in zip(copies, trainer.learners["adam"].gradients(), strict=True):
            copy.grad = found.clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 0.5)
        assert trainer.step("adam", ADAM) == pytest.approx(float(norm), rel=1e-5)
        reference.step()
    for copy, parameter in zip(copies, parameters.values(), strict=True):
        assert torch.allclose(copy, parameter, atol=1e-5)
    trainer.unload("adam")


def test_a_gradient_of_zeros_moves_weights_as_in_torch(trainer: ClientLearner) -> None:
    """By momentum and decay; a step without a pass before it has no gradient and moves nothing."""
    trainer.load("zero", LoraConfig(rank=4), seed=1)
    parameters = trainer.learners["zero"].model.parameters
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters.values()]
    reference = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
    for advantage in (1.0, 0.0, None, 0.0):
        before = [parameter.detach().clone() for parameter in parameters.values()]
        reference.zero_grad()
        if advantage is not None:
            rows = client_rows()
            for row in rows:
                row.columns["advantages"][:] *= advantage  # type: ignore[index]
            passed(trainer, "zero", rows, "importance_sampling", {}, backward=True)
            for copy, found in zip(copies, trainer.learners["zero"].gradients(), strict=True):
                copy.grad = found.clone()
            assert any(bool(copy.grad.any()) for copy in copies if copy.grad is not None) is bool(advantage)
            torch.nn.utils.clip_grad_norm_(copies, 0.5)
        trainer.step("zero", ADAM)
        reference.step()
        moved = [not torch.equal(old, new) for old, new in zip(before, parameters.values(), strict=True)]
        assert any(moved) is (advantage is not None)
        for copy, parameter in zip(copies, parameters.values(), strict=True):
            assert torch.allclose(copy, parameter, atol=1e-6)
    assert trainer.steps("zero") == 4
    trainer.unload("zero")


@pytest.mark.parametrize("loss", NAIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_is_that_of_the_protocol_at_any_ratio(loss: str, dtype: torch.dtype) -> None:
    """Bit for bit, also beyond the bounds that losses of runs have, and where the ratio overflows."""
    logprobs = torch.tensor([-0.0, -1e-9, -0.3, -1.7, -25.0], dtype=dtype)
    distances = torch.tensor([0.0, 0.02, 0.15, 0.3, 1.5, 19.9, 20.1, 60.0, 1e3], dtype=dtype)
    advantages = torch.tensor([-2.5, -1e-3, 0.0, 0.7], dtype=dtype)
    grid = torch.cartesian_prod(logprobs, torch.cat([distances, -distances]), advantages)
    now, behavior, factors = grid[:, 0], grid[:, 0] - grid[:, 1], grid[:, 2]
    chosen = CLIENT_LOSSES[loss]
    columns = {"logprobs": behavior, "advantages": factors, "weights": factors}
    batch = RowBatch(now.clone().requires_grad_(), None, torch.arange(len(now)), columns)
    leaf = now.clone().requires_grad_()
    losses = chosen.function(batch, **SETTINGS.get(loss, {})), NAIVE[loss](leaf, behavior, factors, factors)
    gradients = [
        torch.autograd.grad(each.sum(), of)[0] for each, of in zip(losses, (batch.logprobs, leaf), strict=True)
    ]
    is_finite = losses[0].isfinite()
    assert torch.equal(is_finite, losses[1].isfinite())
    for found, expected in (losses, gradients):
        torch.testing.assert_close(found[is_finite], expected[is_finite], rtol=0, atol=0, equal_nan=True)
    assert bool(is_finite.all()) == (loss in ("cross_entropy", "cispo", "dro"))


@pytest.mark.parametrize("loss", [name for name, loss in CLIENT_LOSSES.items() if not loss.reads_sampler])
@pytest.mark.parametrize("column", ["weights", "logprobs", "advantages", "mask"])
def test_a_column_that_a_loss_does_not_read_is_refused(trainer: ClientLearner, loss: str, column: str) -> None:
    """Whether a column is read is seen in the loss: another value of it gives another sum."""
    values = {
        "weights": np.ones(4, np.float32),
        "logprobs": np.linspace(-5.0, -4.0, 4, dtype=np.float32),
        "advantages": np.linspace(-1.0, 0.5, 4, dtype=np.float32),
        "sequence_ratio_mask": np.ones(4, np.float32),
    }
    changed = values | {column: values.get(column, np.ones(4, np.float32)) * np.float32(0.99)}
    tokens, targets = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)
    trainer.load("read", LoraConfig(rank=4), seed=1)
    sums = [
        passed(
            trainer, "read", [ClientRow(token_ids=tokens, targets=targets, columns=columns)], loss, {}, backward=False
        ).loss
        for columns in (values, changed)
    ]
    trainer.unload("read")
    needed = {name: values.get(name, np.ones(4, np.float32)) for name in (*CLIENT_LOSSES[loss].needs, column)}
    row = ClientRow(token_ids=tokens, targets=targets, columns=needed)
    if sums[0] != sums[1]:
        check_rows([row], loss, {}, vocabulary=VOCABULARY, max_context=8)
    else:
        with pytest.raises(InputError, match=rf"datum 0: the loss {loss} does not read '{column}'"):
            check_rows([row], loss, {}, vocabulary=VOCABULARY, max_context=8)


@pytest.mark.parametrize("loss", ["custom", "nonsense"])
def test_a_loss_that_is_not_served_is_refused_with_what_is(loss: str) -> None:
    row = ClientRow(token_ids=np.arange(4, dtype=np.int32), targets=np.arange(4, dtype=np.int64), columns={})
    with pytest.raises(InputError, match=rf"'{loss}' is not served here; there are: cross_entropy.*custom"):
        check_rows([row], loss, {}, vocabulary=VOCABULARY, max_context=8)


def test_the_page_names_each_loss_of_the_sdk(repository: Path) -> None:
    """As served or as refused."""
    names = get_args(pytest.importorskip("tinker.types.loss_fn_type").LossFnType)
    page = (repository / "docs/how-to/tinker.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| ")]
    (served,) = (line for line in table if line.startswith("| `forward`"))
    (refused,) = (line for line in table if line.startswith("| refused by name"))
    for name in set(names) - {"custom"}:  # `create_custom_loss`, which the page refuses
        assert (f"`{name}`" in served, f"`{name}`" in refused) == (name in CLIENT_LOSSES, name not in CLIENT_LOSSES)


@pytest.mark.parametrize("settings", [{}, {"sharding": "offload"}, {"recompute": True}])
def test_steps_of_all_weights_are_those_of_adamw_on_the_model_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The second model begins with the base's weights, as the first did; both end with the same, bit for bit, and with
    those of the model's own class and torch's AdamW."""
    trainer = client_trainer(tmp_path, "full", **settings)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    adam = AdamSettings(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01, max_grad_norm=0.5)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
    ends: list[list[torch.Tensor]] = []
    for name in ("first", "second"):
        trainer.load(name, None, None)
        model = weakref.ref(trainer.learners[name].model.model)
        for seed in range(3):
            rows = client_rows(seed)
            passed(trainer, name, rows, "cross_entropy", {}, backward=True)
            found = gradient(trainer, name)
            norm = trainer.step(name, adam)
            if name == "second":
                continue
            reference.zero_grad()
            for row in rows:
                logprobs = alone(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
                chosen = logprobs[torch.arange(len(logprobs)), torch.from_numpy(row.targets)]
                (-chosen * torch.from_numpy(row.columns["weights"])).sum().backward()
            expected = np.concatenate([each.grad.numpy().ravel() for each in alone.parameters()])
            assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6
            assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)), rel=1e-5)
            reference.step()
        ends.append([parameter.detach().clone() for parameter in trainer.learners[name].model.parameters.values()])
        trainer.unload(name)
        assert model() is None  # its memory is free before the next one is read
    for one, other, expected in zip(*ends, alone.parameters(), strict=True):
        assert torch.equal(one, other)
        assert (one - expected).abs().max() < 1e-6


def test_an_adapter_continues_from_its_checkpoint_bit_for_bit(trainer: ClientLearner, tmp_path: Path) -> None:
    def steps(name: str, seeds: range) -> None:
        for seed in seeds:
            passed(trainer, name, client_rows(seed), "cross_entropy", {}, backward=True)
            trainer.step(name, ADAM)

    trainer.load("first", LoraConfig(rank=4), seed=1)
    steps("first", range(2))
    trainer.save("first", tmp_path / "two")
    steps("first", range(2, 4))
    trainer.load("second", LoraConfig(rank=4), seed=2)
    trainer.restore("second", tmp_path / "two")
    assert trainer.steps("second") == 2
    steps("second", range(2, 4))
    ends = [list(trainer.learners[name].model.parameters.values()) for name in ("first", "second")]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    for name in ("first", "second"):
        trainer.unload(name)


def test_layers_are_chosen_by_part(trainer: ClientLearner) -> None:
    assert trainer.layers(attention=True, mlp=True) == ()
    attention, mlp = trainer.layers(attention=True, mlp=False), trainer.layers(attention=False, mlp=True)
    assert attention
    assert all("attn" in name for name in attention)
    assert mlp
    assert all("mlp" in name for name in mlp)
