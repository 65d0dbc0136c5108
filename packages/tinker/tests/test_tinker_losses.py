"""The client losses by row and by the sampler's distribution, against their papers' formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.core.errors import InputError
from agentrl.learn.forward import SamplerDistributions, sampler_divergence
from agentrl.parts import RowBatch
from agentrl_tinker.losses import CLIENT_LOSSES, RATIO_MASK, check_rows
from agentrl_tinker.messages import ClientRow, ProvenanceSpan

TOLERANCE = 1e-6
LENGTHS = (5, 1, 8, 3)
VOCABULARY = 12


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --- GSPO -------------------------------------------------------------------------------------------------------------


def gspo_rows(seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """log pi, log mu, advantages and mask of rows; the first token of a long row is a prompt's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS:
        mu = -3 * torch.rand(length, generator=generator, dtype=torch.float64) - 0.05
        pi = mu + 0.2 * torch.randn(length, generator=generator, dtype=torch.float64)
        advantages = torch.randn(length, generator=generator, dtype=torch.float64)
        mask = torch.ones(length, dtype=torch.float64)
        if length > 1:
            mask[0], mu[0] = 0, 0
        rows.append((pi, mu, advantages, mask))
    return rows


def gspo_oracle(pi: Tensor, mu: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> list[float]:
    """The derivative of a row's loss by each log pi, from eq. 14 and 15 of arXiv:2507.18071, one token at a time."""
    marked = [at for at in range(len(pi)) if mask[at]]
    s = math.exp(sum(float(pi[at] - mu[at]) for at in marked) / len(marked))
    derivatives = []
    for advantage in advantages.tolist():
        is_clipped = s > high if advantage > 0 else s < low
        derivatives.append(0.0 if is_clipped else -s * advantage)
    return derivatives


def gspo_gradient(rows: Sequence[tuple[Tensor, ...]], **settings: float) -> Tensor:
    ids = [number for number, row in enumerate(rows) for _ in row[0]]
    pi, mu, advantages, mask = (torch.cat(column) for column in zip(*rows, strict=True))
    columns = {"logprobs": mu, "advantages": advantages, RATIO_MASK: mask}
    batch = RowBatch(pi.clone().requires_grad_(), None, torch.tensor(ids), columns)
    (gradient,) = torch.autograd.grad(CLIENT_LOSSES["gspo"].function(batch, **settings).sum(), batch.logprobs)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("low", "high"), [(0.95, 1.05), (0.9997, 1.0004), (0.0, 100.0)])
def test_gspo_is_that_of_the_paper_row_by_row(seed: int, low: float, high: float) -> None:
    rows = gspo_rows(seed)
    expected = torch.tensor([one for row in rows for one in gspo_oracle(*row, low, high)], dtype=torch.float64)
    found = gspo_gradient(rows, clip_low_threshold=low, clip_high_threshold=high)
    assert relative_error(found, expected) < TOLERANCE


def test_a_planted_fault_in_gspo_is_found() -> None:
    """A mean over all tokens, or over all rows together, is another gradient."""
    rows = gspo_rows(0)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    expected = torch.tensor([one for row in rows for one in gspo_oracle(*row, 0.0, 100.0)], dtype=torch.float64)
    unmasked = [(pi, mu, advantages, torch.ones_like(mask)) for pi, mu, advantages, mask in rows]
    together = [tuple(torch.cat(column) for column in zip(*rows, strict=True))]
    for faulty in (unmasked, together):
        assert relative_error(gspo_gradient(faulty, **wide), expected) > 0.01


def test_the_thresholds_of_gspo_are_the_papers() -> None:
    found = gspo_gradient(gspo_rows(1))
    assert torch.equal(found, gspo_gradient(gspo_rows(1), clip_low_threshold=0.9997, clip_high_threshold=1.0004))


# --- REINFORCE with score centering -----------------------------------------------------------------------------------


def distributions(seed: int, count: int, kept: int) -> tuple[Tensor, Tensor, SamplerDistributions, Tensor, Tensor]:
    """Logits of pi, probabilities of the sampler, its `kept` likeliest tokens, sampled tokens, and advantages."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)
    mu = (logits + 0.5 * torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)).softmax(1)
    top, ids = mu.topk(kept, dim=1)
    others = (1 - top.sum(1, keepdim=True)).clamp(min=1e-40)
    sampled = torch.multinomial(mu, 1, generator=generator)[:, 0]
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    return logits, mu, SamplerDistributions(ids, torch.cat([top, others], 1).log()), sampled, advantages


def centered_oracle(
    logits: Tensor, mu: Tensor, ids: Tensor, sampled: Tensor, advantages: Tensor, *, has_tail: bool = True
) -> Tensor:
    """The derivative by the logits: -A (one-hot of the sampled token - mu'), with mu' the sampler's probabilities on
    its likeliest tokens, and pi scaled to the remaining mass on the others (arXiv:2609.20807, eq. 14)."""
    rows = []
    for row in range(len(logits)):
        pi, head = logits[row].softmax(0), set(ids[row].tolist())
        scale = (1 - sum(float(mu[row, v]) for v in head)) / max(1e-12, 1 - sum(float(pi[v]) for v in head))
        modelled = [float(mu[row, v]) if v in head else scale * has_tail * float(pi[v]) for v in range(VOCABULARY)]
        rows.append([-float(advantages[row]) * ((v == int(sampled[row])) - modelled[v]) for v in range(VOCABULARY)])
    return torch.tensor(rows, dtype=torch.float64)


def centered_gradient(logits: Tensor, sampler: SamplerDistributions, sampled: Tensor, advantages: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    log_softmax = leaf.log_softmax(1)
    logprobs, divergence = log_softmax.gather(1, sampled[:, None])[:, 0], sampler_divergence(log_softmax, sampler)
    batch = RowBatch(logprobs, divergence, torch.arange(len(leaf)), {"advantages": advantages})
    (gradient,) = torch.autograd.grad(CLIENT_LOSSES["stable_reinforce"].function(batch).sum(), leaf)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [1, 4, VOCABULARY])
def test_stable_reinforce_is_reinforce_with_a_centered_score(seed: int, kept: int) -> None:
    logits, mu, sampler, sampled, advantages = distributions(seed, 20, kept)
    expected = centered_oracle(logits, mu, sampler.top_ids, sampled, advantages)
    found = centered_gradient(logits, sampler, sampled, advantages)
    assert relative_error(found, expected) < TOLERANCE


def test_a_planted_fault_in_stable_reinforce_is_found() -> None:
    """Without the mass of the other tokens, or without centering."""
    logits, mu, sampler, sampled, advantages = distributions(0, 20, 4)
    found = centered_gradient(logits, sampler, sampled, advantages)
    without_tail = centered_oracle(logits, mu, sampler.top_ids, sampled, advantages, has_tail=False)
    assert relative_error(found, without_tail) > 0.01
    plain = centered_oracle(logits, logits.softmax(1), sampler.top_ids, sampled, advantages)  # REINFORCE
    assert relative_error(found, plain) > 0.01


def test_a_sampler_with_the_trained_weights_leaves_reinforce() -> None:
    logits, _, _, sampled, advantages = distributions(1, 20, 4)
    top, ids = logits.softmax(1).topk(4, dim=1)
    sampler = SamplerDistributions(ids, torch.cat([top, 1 - top.sum(1, keepdim=True)], 1).log())
    one_hot = torch.nn.functional.one_hot(sampled, VOCABULARY).double()
    expected = -advantages[:, None] * (one_hot - logits.softmax(1))
    assert relative_error(centered_gradient(logits, sampler, sampled, advantages), expected) < TOLERANCE


def test_the_mean_gradient_of_constant_advantages_is_zero_under_any_sampler() -> None:
    """The drift that score centering removes: with one advantage for all tokens, nothing is to be learned."""
    logits, mu, sampler, _, _ = distributions(2, 1, VOCABULARY)
    every = torch.arange(VOCABULARY)
    gradients = centered_gradient(
        logits.expand(VOCABULARY, -1),
        SamplerDistributions(*(column.expand(VOCABULARY, -1) for column in sampler)),
        every,
        torch.ones(VOCABULARY, dtype=torch.float64),
    )
    assert (mu[0][:, None] * gradients).sum(0).abs().max() < 1e-12
    drift = mu[0] - logits[0].softmax(0)  # that of REINFORCE
    assert drift.abs().max() > 0.01


# --- what a row needs -------------------------------------------------------------------------------------------------


def row(provenance: Sequence[ProvenanceSpan] = (), **columns: Sequence[float]) -> ClientRow:
    return ClientRow(
        token_ids=np.arange(4, dtype=np.int32),
        targets=np.arange(4, dtype=np.int64),
        columns={name: np.array(column, np.float32) for name, column in columns.items()},
        provenance=provenance,
    )


def span(length: int, *, is_sampled: bool) -> ProvenanceSpan:
    return ProvenanceSpan("s:sample:0:0:0", 0, length, is_sampled)


PROMPT, SAMPLED = span(1, is_sampled=False), span(3, is_sampled=True)
ADVANTAGES = [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("loss", "given", "sentence"),
    [
        ("gspo", row(logprobs=ADVANTAGES, advantages=ADVANTAGES), f"needs {RATIO_MASK}"),
        ("gspo", row(logprobs=ADVANTAGES, advantages=ADVANTAGES, sequence_ratio_mask=[0] * 4), "marks no token"),
        ("stable_reinforce", row(advantages=ADVANTAGES), "needs the provenance"),
        ("stable_reinforce", row([SAMPLED], advantages=ADVANTAGES), "covers 3 targets, but it has 4"),
        ("stable_reinforce", row([PROMPT, span(1 << 60, is_sampled=True)], advantages=ADVANTAGES), "covers 1152921"),
        ("stable_reinforce", row([PROMPT, SAMPLED], advantages=[1.0] * 4), "trains on sampled tokens alone"),
        ("stable_reinforce", row([PROMPT, SAMPLED], advantages=ADVANTAGES, weights=ADVANTAGES), "does not read"),
    ],
)
def test_a_row_that_a_loss_cannot_train_on_is_refused(loss: str, given: ClientRow, sentence: str) -> None:
    with pytest.raises(InputError, match=f"datum 0: .*{sentence}"):
        check_rows([given], loss, {}, vocabulary=VOCABULARY, max_context=8)


@pytest.mark.parametrize("loss", CLIENT_LOSSES)
def test_a_row_with_what_its_loss_needs_is_accepted(loss: str) -> None:
    columns = dict.fromkeys(CLIENT_LOSSES[loss].needs, ADVANTAGES)
    check_rows([row([PROMPT, SAMPLED], **columns)], loss, {}, vocabulary=VOCABULARY, max_context=8)
