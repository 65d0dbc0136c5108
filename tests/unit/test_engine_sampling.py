"""Counter-based random numbers and the kept set."""

from __future__ import annotations

import numpy as np
import torch

from agentrl.core.tokens import KeptCount
from agentrl.engines.counter_random import uniform
from agentrl.engines.embedded.capture import SamplingMaskRecorder
from agentrl.engines.embedded.forward import RowSamplingParameters, sample, sampling_filter_mask


def batch(uniforms: list[float], **filters: float) -> RowSamplingParameters:
    rows = len(uniforms)
    return RowSamplingParameters(
        uniforms=np.array(uniforms),
        temperature=np.full(rows, filters.get("temperature", 1.0), np.float32),
        top_k=np.full(rows, filters.get("top_k", 0), np.int64),
        top_p=np.full(rows, filters.get("top_p", 1.0), np.float32),
        min_p=np.full(rows, filters.get("min_p", 0.0), np.float32),
        filtered=bool(filters.keys() - {"temperature"}),
        tempered="temperature" in filters,
    )


def test_numbers_depend_on_seed_and_counter_alone() -> None:
    seeds, counters = np.array([7, 8, 2**64 - 1], np.uint64), np.array([0, 5, 9])
    together = uniform(seeds, counters)
    alone = [uniform(seeds[i : i + 1], counters[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert uniform(seeds[::-1], counters[::-1]).tolist() == together[::-1].tolist()


def test_numbers_never_change_between_versions_of_agentrl() -> None:
    drawn = uniform(np.array([0, 1, 2**63], np.uint64), np.array([0, 0, 1]))
    assert [round(float(x), 12) for x in drawn] == [0.652448486374, 0.368189515652, 0.35978012632]


def test_numbers_are_uniform_along_seeds_and_along_counters() -> None:
    many = np.arange(20000)
    for drawn in (
        uniform(many.astype(np.uint64), np.zeros_like(many)),
        uniform(np.full(20000, 3, np.uint64), many),
        uniform(many.astype(np.uint64), many),
    ):
        assert 0 <= drawn.min() <= drawn.max() < 1
        counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_the_inverse_of_the_distribution_is_exact_at_its_edges() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.0, 0.5, 0.25]])).expand(5, 4)
    tokens, logprobs, kept = sample(logits, batch([0.0, 0.2499, 0.2501, 0.7501, 1 - 2**-48]))
    assert tokens.tolist() == [0, 0, 2, 3, 3]
    assert kept is None
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 0.25, 0.5, 0.25, 0.25]))


def test_filters_act_one_after_the_other_on_what_is_left() -> None:
    scores = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]))

    def kept(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        found = sampling_filter_mask(
            scores, np.array([top_k]), np.array([top_p], np.float32), np.array([min_p], np.float32)
        )
        return found[0].nonzero()[:, 0].tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_p=0.75) == [0, 1, 2]
    assert kept(top_p=1e-6) == [0]
    assert kept(min_p=0.4) == [0, 1, 2]
    assert kept(top_k=3, top_p=0.75) == [0, 1]  # of 0.9, 0.7 is more than three quarters
    assert kept(min_p=0.4, top_p=0.75) == [0, 1]  # min-p first, as in vLLM
    assert kept(top_k=9) == [0, 1, 2, 3, 4]


def test_ties_at_the_edge_of_top_k_are_broken_by_token_id() -> None:
    found = sampling_filter_mask(torch.zeros(1, 6), np.array([2]), np.ones(1, np.float32), np.zeros(1, np.float32))
    assert found[0].tolist() == [True, True, False, False, False, False]


def test_a_filtered_token_is_never_drawn_and_the_rest_renormalized() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.1, 0.3, 0.2]])).expand(1000, 4)
    tokens, logprobs, _ = sample(logits, batch(np.linspace(0, 1 - 1e-9, 1000).tolist(), top_k=2))
    assert set(tokens.tolist()) == {0, 2}
    torch.testing.assert_close(logprobs[tokens == 0][0].exp(), torch.tensor(4 / 7))


def test_temperature_sharpens_before_the_filters() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    _, logprobs, _ = sample(logits, batch([0.0], temperature=0.5))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25 / 0.38]))


def test_a_top_p_that_rounds_to_zero_keeps_the_likeliest_token() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    found = sampling_filter_mask(scores, np.array([0]), np.full(1, 1e-300, np.float32), np.zeros(1, np.float32))
    assert found.tolist() == [[False, True, False]]


def test_a_filter_that_keeps_all_tokens_records_no_set() -> None:
    recorder = SamplingMaskRecorder(1)
    for kept in ([True, True, True], [True, False, True]):
        recorder.store(np.array([0]), torch.tensor([kept]), np.array([True]))
    everything, some = recorder.sets_of_call(0)
    assert everything is KeptCount.NONE
    assert not isinstance(some, KeptCount)
    assert some.tolist() == [0, 2]
    recorder.clear(0)
    assert recorder.sets_of_call(0) == []
