"""Episodes whose calls have their own temperatures: training's gradient is that of the expected reward, enumerated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrajectoryCredit, Unit, VersionSpan
from agentrl.core.tokens import KeptSets, Tokens, TrainingSample
from agentrl.credit.samples import unit_samples
from agentrl.journal.entries import BeginEntry, JournalEntry, TurnEntry, encode_body
from agentrl.journal.rows import assemble_trajectories
from agentrl.learn.models import load_models
from tests.learn_cases import VOCABULARY, run_config, write_model
from tests.property.test_losses_gradient import gradient, packed_loss, relative_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = np.arange(5, 17, dtype=np.int32)
"""Tokens that the sampled turns may have, as after top-k."""
PROMPT, NEXT = [1, 2, 3], [4]
REWARDS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
"""Reward by the tokens of the two sampled turns."""
TEMPERATURES = (0.5, 0.0, 2.0)
"""One for each turn of one token. The second is greedy: its token is a function of those before it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = write_model(Path(tmp_path_factory.mktemp("model")))
    torch.set_num_threads(1)
    return load_models(run_config(path).trainer_plan, torch.device("cpu"))["policy"].model.double()


def next_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    model.set_attn_implementation("sdpa")
    logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    model.set_attn_implementation("agentrl_tree")
    return logits


def kept_logprobs(logits: Tensor, temperature: float) -> Tensor:
    return (logits[torch.from_numpy(KEPT.astype(np.int64))] / temperature).log_softmax(-1)


def outcomes(model: PreTrainedModel) -> Iterator[tuple[list[int], Tensor, Tensor, float]]:
    """Every episode: its three tokens, the log-probabilities of the sampled ones, and its reward."""
    first = kept_logprobs(next_logits(model, PROMPT), TEMPERATURES[0])
    for at, a in enumerate(KEPT.tolist()):
        greedy = int(next_logits(model, [*PROMPT, a, *NEXT]).argmax())
        last = kept_logprobs(next_logits(model, [*PROMPT, a, *NEXT, greedy, *NEXT]), TEMPERATURES[2])
        for end, b in enumerate(KEPT.tolist()):
            yield [a, greedy, b], first[at], last[end], float(REWARDS[a, b])


def expected_reward(model: PreTrainedModel) -> Tensor:
    return torch.stack([(first + last).exp() * reward for _, first, last, reward in outcomes(model)]).sum()


def turn(number: int, token: int, logprob: float, *, greedy: bool) -> TurnEntry:
    kept = KeptSets.missing(1) if greedy else KeptSets(np.array([len(KEPT)], np.int32), KEPT)
    tokens = Tokens(
        token_ids=np.array([token], np.int32),
        logprobs=np.array([logprob], np.float32),
        spans=(VersionSpan(0, 1, PolicyVersion("policy", 0, 0)),),
        kept=kept,
    )
    return TurnEntry(
        seat="main",
        index=0,
        policy="policy",
        row=0,
        turn=number,
        context_ids=np.array(NEXT if number else PROMPT, "<i4").tobytes(),
        tokens=tokens.encode(),
        finish_reason="stop",
        text="",
        messages=(),
        temperature=TEMPERATURES[number],
        seconds=0.0,
        started=0.0,
    )


def sample_of(tokens: list[int], logprobs: tuple[float, float, float], advantage: float) -> TrainingSample:
    """The sample that training reads from an episode's entries."""
    begin = BeginEntry("test", "", "t", {}, 0, {"main": "policy"}, "train", "g0", 1, None)
    turns = [
        turn(number, token, logprob, greedy=TEMPERATURES[number] == 0)
        for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]
    entries = [JournalEntry("e0", 0, f"r#{n}", b"", encode_body(body)) for n, body in enumerate([begin, *turns])]
    credits = (TrajectoryCredit("main", 0, 0.0, advantage, 0.0),)
    unit = Unit(episode_id="e0", attempt=0, policy="policy", location=EpisodeDataLocation("", 0), credits=credits)
    (sample,) = unit_samples(unit, assemble_trajectories(entries))
    return sample


def trained_gradient(model: PreTrainedModel, *, temperatures: bool = True) -> Tensor:
    """The gradient of training over all episodes, weighted by their probability."""
    with torch.no_grad():
        played = list(outcomes(model))
    samples = []
    for tokens, first, last, reward in played:
        logprobs = (float(first), 0.0, float(last))
        sample = sample_of(tokens, logprobs, reward * math.exp(logprobs[0] + logprobs[2]))
        samples.append(sample if temperatures else sample.with_column("temperatures", None))
    return gradient(model, lambda: packed_loss(model, samples, max_tokens=100_000))


def test_training_has_the_gradient_of_the_expected_reward(model: PreTrainedModel) -> None:
    expected = -gradient(model, lambda: expected_reward(model))
    assert relative_difference(trained_gradient(model), expected) < 1e-6


def test_training_at_the_temperature_of_the_run_is_found(model: PreTrainedModel) -> None:
    expected = -gradient(model, lambda: expected_reward(model))
    assert relative_difference(trained_gradient(model, temperatures=False), expected) > 0.05


def test_a_greedy_token_is_context(model: PreTrainedModel) -> None:
    sample = sample_of([7, 8, 9], (-1.0, 0.0, -1.0), 1.0)
    assert sample.loss_mask.tolist() == [False, False, False, True, False, False, False, True]
    assert sample.temperatures is not None
    assert sample.temperatures.tolist() == [1, 1, 1, 0.5, 1, 1, 1, 2]
