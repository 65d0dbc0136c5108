"""What must not change a gradient: sharing prefixes, order, splitting, distribution over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import ExpertRouting, KeptSets, TrainingSample
from agentrl.credit.samples import trained_positions
from agentrl.learn.forward import token_logprobs
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import truncated
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from agentrl.learn.step_columns import TokenColumns
from tests.learn_cases import VOCABULARY, divisors, make_samples, run_config, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.property


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = write_model(tmp_path_factory.mktemp("model"))
    torch.set_num_threads(1)
    # In double precision rounding cannot hide a wrong gradient.
    return load_models(run_config(path).trainer_plan, torch.device("cpu"))["policy"].model.double()


def gradient(model: PreTrainedModel, run: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    run().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def packed_loss(
    model: PreTrainedModel, samples: Sequence[TrainingSample], *, max_tokens: int, share: bool = True
) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for batch in pack(samples, max_tokens=max_tokens, share=share):
        lp = token_logprobs(model, batch, shared=True).logprob
        members = [samples[int(index)] for index in dict.fromkeys(batch.sample.tolist())]
        columns = TokenColumns.of(members, PolicyVersion("policy", 0, 0), group_size=1)
        assert np.array_equal(columns.tokens.token_ids, batch.targets)
        loss = loss + truncated(LossBatch(columns, logprobs=lp, entropies=lp)).sum()
    return loss


def naive_loss(model: PreTrainedModel, samples: Sequence[TrainingSample]) -> Tensor:
    """Each row alone, through the model's own forward pass and softmax."""
    loss = torch.zeros((), dtype=torch.float64)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0].float()
        for position in trained_positions([sample])[0]:
            row = logits[position - 1] / divisors(sample)[position - 1]
            token = int(sample.token_ids[position])
            if sample.kept is not None and (ids := kept_ids(sample.kept, int(position))):
                kept = torch.tensor([index in {*ids, token} for index in range(VOCABULARY)])
                row = row.masked_fill(~kept, -torch.inf)
            lp = row.log_softmax(0)[token]
            mu, advantage = float(sample.logprobs[position]), float(sample.advantages[position])
            moved = math.exp(lp.item()) - math.exp(mu)
            weight = 0.0 if (moved > 0.2 if advantage > 0 else moved < -0.2) else min(math.exp(lp.item() - mu), 5.0)
            loss = loss - weight * advantage * lp
    model.set_attn_implementation(implementation)
    return loss


def kept_ids(mask: KeptSets, position: int) -> list[int]:
    start = int(np.maximum(mask.counts[:position], 0).sum())
    return [int(token) for token in mask.ids[start : start + max(0, int(mask.counts[position]))]]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 9), max_tokens=st.sampled_from([20, 45, 10_000]))
def test_sharing_and_splitting_leave_the_gradient_of_separate_rows(
    model: PreTrainedModel, seed: int, count: int, max_tokens: int
) -> None:
    samples = make_samples(seed, count)
    expected = gradient(model, lambda: naive_loss(model, samples))
    assert (
        relative_difference(gradient(model, lambda: packed_loss(model, samples, max_tokens=max_tokens)), expected)
        < 1e-6
    )


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)), ranks=st.integers(1, 3))
def test_order_and_ranks_leave_the_gradient(model: PreTrainedModel, seed: int, order: list[int], ranks: int) -> None:
    samples = make_samples(seed, 6)
    expected = gradient(model, lambda: packed_loss(model, samples, max_tokens=10_000))
    shuffled = [samples[index] for index in order]

    def in_shares() -> Tensor:
        shares = [shuffled[rank::ranks] for rank in range(ranks)]
        return torch.stack([packed_loss(model, share, max_tokens=60) for share in shares]).sum()

    assert relative_difference(gradient(model, in_shares), expected) < 1e-6


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 20))
def test_splitting_a_row_leaves_the_gradient(model: PreTrainedModel, seed: int, cut: int) -> None:
    (sample,) = make_samples(seed, 1)
    expected = gradient(model, lambda: packed_loss(model, [sample], max_tokens=10_000))
    before = np.arange(len(sample.token_ids)) < cut
    halves = [
        TrainingSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask & half,
            logprobs=sample.logprobs,
            advantages=sample.advantages,
            temperatures=sample.temperatures,
        )
        for half in (before, ~before)
    ]
    assert relative_difference(gradient(model, lambda: packed_loss(model, halves, max_tokens=10_000)), expected) < 1e-6


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_kept_sets_restrict_the_softmax(model: PreTrainedModel, seed: int, data: st.DataObject) -> None:
    samples = []
    for sample in make_samples(seed, 3):
        sizes = data.draw(st.lists(st.integers(0, 5), min_size=len(sample.token_ids), max_size=len(sample.token_ids)))
        counts = np.where(sample.loss_mask, sizes, 0).astype(np.int32)
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, int(counts.sum())).astype(np.int32)
        samples.append(
            TrainingSample(
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                logprobs=sample.logprobs,
                advantages=sample.advantages,
                kept=KeptSets(counts=counts, ids=ids),
            )
        )
    expected = gradient(model, lambda: naive_loss(model, samples))
    assert relative_difference(gradient(model, lambda: packed_loss(model, samples, max_tokens=50)), expected) < 1e-6


def test_every_parameter_has_a_gradient(model: PreTrainedModel) -> None:
    gradient(model, lambda: packed_loss(model, make_samples(0, 8), max_tokens=10_000))
    assert not [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]


@pytest.mark.parametrize("kind", ["llama", "sliding", "moe"])
def test_other_architectures_agree_with_their_own_forward_pass(kind: str, tmp_path: Path) -> None:
    other = load_models(run_config(write_model(tmp_path, kind=kind)).trainer_plan, torch.device("cpu"))["policy"]
    assert other.shared_prefixes
    samples = make_samples(3, 6)
    expected = gradient(other.model, lambda: naive_loss(other.model, samples))
    found = gradient(other.model, lambda: packed_loss(other.model, samples, max_tokens=60))
    assert relative_difference(found, expected) < 1e-5


def test_shared_tokens_are_forwarded_once() -> None:
    samples = make_samples(5, 8, prefix=30)
    (shared,) = pack(samples, max_tokens=10_000)
    (whole,) = pack(samples, max_tokens=10_000, share=False)
    assert len(whole.token_ids) - len(shared.token_ids) >= 7 * 30
    assert sorted(zip(whole.sample, whole.position, strict=True)) == sorted(
        zip(shared.sample, shared.position, strict=True)
    )


def test_a_prefix_through_other_experts_is_another_prefix() -> None:
    samples = [
        TrainingSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            logprobs=sample.logprobs,
            advantages=sample.advantages,
            experts=ExpertRouting(np.full((len(sample.token_ids), 2, 2), expert, np.uint8)),
        )
        for sample, expert in zip(make_samples(5, 3, prefix=30), (0, 0, 1), strict=True)
    ]
    (batch,) = pack(samples, max_tokens=10_000)
    assert (batch.position_ids == 0).sum() == 2
    assert batch.expert_routing is not None
    assert len(batch.expert_routing) == len(batch.token_ids)
