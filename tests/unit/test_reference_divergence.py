"""The divergence from a reference: exact over its likeliest tokens, estimated by the sampled token over the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.learn import forward
from agentrl.learn.forward import (
    HeadOutput,
    KeptVocabularySets,
    chunked_logprobs_from_hidden,
    logprobs_from_logits,
    reference_divergence,
)

VOCABULARY = 12


def scores(seed: int, count: int = 3, vocabulary: int = VOCABULARY) -> Tensor:
    """Logits [count, vocabulary] in float64, of some likely and many unlikely tokens."""
    draw = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(count, vocabulary, generator=draw, dtype=torch.float64)


def reference_of(logits: Tensor, targets: Tensor, top: int) -> HeadOutput:
    """Return the output of a reference that has these logits, in float64."""
    log_softmax = logits.log_softmax(1)
    column = log_softmax.gather(1, targets[:, None])[:, 0]
    return HeadOutput(column, column, column, *forward._likeliest(log_softmax, top))


def naive(own: Tensor, theirs: Tensor) -> Tensor:
    """KL of one pair of distributions, token by token, from probabilities."""
    total = torch.zeros((), dtype=own.dtype)
    for p, q in zip(own.softmax(0), theirs.softmax(0), strict=True):
        total = total + p * torch.log(p / q)
    return total


@pytest.mark.parametrize("top", [0, 1, 4, VOCABULARY - 1, VOCABULARY, 64])
def test_value_and_gradient_are_unbiased_for_every_number_of_tokens(top: int) -> None:
    """The mean over every token that may be sampled, weighted by its probability, is the divergence; so is that of
    the gradient."""
    own, theirs = scores(0).requires_grad_(), scores(1)
    exact = sum(naive(own[at], theirs[at]) for at in range(len(own)))
    assert isinstance(exact, Tensor)
    (expected,) = torch.autograd.grad(exact, own, retain_graph=True)
    mean = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        targets = torch.full((len(own),), token)
        log_softmax = own.log_softmax(1)
        logprob = log_softmax[:, token]
        found = reference_divergence(log_softmax, logprob, targets, reference_of(theirs, targets, top))
        mean = mean + (logprob.detach().exp() * found).sum()
    assert float(mean.detach()) == pytest.approx(float(exact.detach()), rel=1e-12)
    (gradient,) = torch.autograd.grad(mean, own)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


def test_with_all_tokens_it_does_not_depend_on_the_sampled_one() -> None:
    own, theirs = scores(0), scores(1)
    for token in (0, 5):
        targets = torch.full((len(own),), token)
        log_softmax = own.log_softmax(1)
        found = reference_divergence(
            log_softmax, log_softmax[:, token], targets, reference_of(theirs, targets, VOCABULARY)
        )
        expected = [float(naive(one, other)) for one, other in zip(own, theirs, strict=True)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_more_tokens_mean_less_variance() -> None:
    """The value's variance over the sampled token falls as more tokens are counted, to zero when all are."""
    own, theirs = scores(2, count=1), scores(3, count=1)
    log_softmax = own.log_softmax(1).expand(VOCABULARY, -1)
    targets = torch.arange(VOCABULARY)
    weights = own.softmax(1)[0]
    variances = []
    for top in (0, 4, VOCABULARY):
        given = reference_of(theirs.expand(VOCABULARY, -1), targets, top)
        found = reference_divergence(log_softmax, log_softmax.gather(1, targets[:, None])[:, 0], targets, given)
        mean = (weights * found).sum()
        variances.append(float((weights * (found - mean) ** 2).sum()))
    assert variances[0] > variances[1] > variances[2]
    assert variances[2] < 1e-20


def test_tokens_that_only_the_reference_has_count_as_impossible() -> None:
    """The embeddings of a larger model are padded; the student cannot sample those rows."""
    own, theirs = scores(0), scores(1, vocabulary=VOCABULARY + 4)
    targets = torch.zeros(len(own), dtype=torch.int64)
    log_softmax = own.log_softmax(1)
    given = reference_of(theirs, targets, VOCABULARY + 4)
    found = reference_divergence(log_softmax, log_softmax[:, 0], targets, given)
    q = theirs.log_softmax(1)[:, :VOCABULARY]
    assert found.tolist() == pytest.approx((log_softmax.exp() * (log_softmax - q)).sum(1).tolist(), rel=1e-12)


def test_a_kept_set_may_leave_out_tokens_that_the_reference_lacks() -> None:
    """A grammar's set is stored as what it excludes: also the ids with which larger embeddings are padded."""
    excluded = torch.tensor([1, VOCABULARY - 1, VOCABULARY + 3], dtype=torch.int32)
    kept_sets = KeptVocabularySets(torch.tensor([True]), torch.zeros(3, dtype=torch.int32), excluded, np.array([0, 3]))
    own, theirs = kept_sets.mask(0, 1, VOCABULARY + 4), kept_sets.mask(0, 1, VOCABULARY)
    assert (~own[0]).nonzero().flatten().tolist() == excluded.tolist()
    assert torch.equal(theirs, own[:, :VOCABULARY])


@pytest.mark.parametrize("top", [2, 64])
def test_both_are_cut_to_the_kept_set(top: int) -> None:
    """A filter of the sampler, and the temperature, hold for student and reference alike."""
    kept = torch.zeros(3, VOCABULARY, dtype=torch.bool)
    kept[:, [1, 4, 7]] = True
    targets = torch.tensor([1, 4, 7])
    settings: dict[str, Any] = {"temperature": 0.7, "kept_mask": kept}
    own, theirs = scores(0).requires_grad_(), scores(1)
    mean = torch.zeros(())
    for token in (1, 4, 7):
        targets = torch.full((3,), token)
        given = logprobs_from_logits(theirs, targets, top=top, **settings)
        found = logprobs_from_logits(own, targets, reference=given, **settings)
        assert found.reference_kl is not None
        mean = mean + (found.logprob.detach().exp() * found.reference_kl).sum()
    expected = sum(naive(own[at, [1, 4, 7]] / 0.7, theirs[at, [1, 4, 7]] / 0.7) for at in range(3))
    assert isinstance(expected, Tensor)
    assert float(mean.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (gradient,), (exact,) = torch.autograd.grad(mean, own), torch.autograd.grad(expected, own)
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-6)


def test_a_token_without_probability_has_a_finite_divergence() -> None:
    """A reference that finds a token impossible, -inf, pushes as one that gives it exp(-100)."""
    theirs = torch.zeros(1, VOCABULARY, dtype=torch.float64)
    theirs[0, 3] = -math.inf
    own, targets = torch.zeros(1, VOCABULARY, dtype=torch.float64, requires_grad=True), torch.tensor([0])
    log_softmax = own.log_softmax(1)
    given = reference_of(theirs, targets, VOCABULARY)
    found = reference_divergence(log_softmax, log_softmax[:, 0], targets, given)
    (gradient,) = torch.autograd.grad(found.sum(), own)
    p = 1 / VOCABULARY
    expected = p * (math.log(p) + 100) + (1 - p) * math.log((VOCABULARY - 1) / VOCABULARY)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-12)
    assert bool(gradient.isfinite().all())
    assert int(gradient.argmax()) == 3


def test_pieces_of_the_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient by the hidden states, with all logits at once and five tokens' at a time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=100, intermediate_size=16, num_key_value_heads=1, initializer_range=0.5, **shape)
    student, teacher = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    states, targets = torch.randn(2, 13, 16), torch.randint(0, 100, (13,))
    results = []
    for limit in (1 << 26, 500):
        monkeypatch.setattr(forward, "MAX_LOGITS", limit)
        own = states[0].clone().requires_grad_()
        settings: dict[str, Any] = {"temperature": torch.full((13,), 0.8)}
        with torch.no_grad():
            given = chunked_logprobs_from_hidden(teacher, states[1], targets, top=8, **settings)
        found = chunked_logprobs_from_hidden(student, own, targets, reference=given, **settings)
        assert found.reference_kl is not None
        (gradient,) = torch.autograd.grad(found.reference_kl.sum(), own)
        results.append((found.reference_kl.detach(), gradient))
    torch.testing.assert_close(results[0], results[1])
