"""What the engine sampled, as the trainer sees it: with kept sets and experts the recorded logprobs come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.config.policies import PolicyConfig
from agentrl.config.run import EngineConfig, EnvironmentConfig, ModelConfig, RunConfig
from agentrl.core.records import DataLocation, MaskKind, RoutingSpan, Row, SamplingMask, Trajectory
from agentrl.core.training_records import TrainingSample, TrajectoryCredit, Unit
from agentrl.credit.samples import samples
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from tests.contract.engine_kinds import ModelZoo, load_engine, prompt, request

PROMPT, TOKENS = 12, 40


def sampled(zoo: ModelZoo, architecture: str, dtype: str) -> Row:
    """A turn under top-k 20 and top-p 0.9."""

    async def main() -> Row:
        engine = load_engine(zoo, architecture, capture_routing=True, capture_mask=True, dtype=dtype)
        context = prompt(PROMPT)
        call = request("r", context, max_tokens=TOKENS, top_k=20, top_p=0.9)
        completion = await engine.open("s", "solver").generate(call)
        await engine.close()
        mask, routing = completion.sampling_mask, completion.expert_routing
        assert mask is not None
        assert routing is not None
        blank = np.zeros(PROMPT, np.int32)
        return Row(
            token_ids=np.concatenate([context, completion.token_ids]),
            loss_mask=np.arange(PROMPT + TOKENS) >= PROMPT,
            behavior_logprobs=np.concatenate([blank.astype(np.float32), completion.logprobs]),
            turn_index=np.concatenate([blank - 1, np.zeros(TOKENS, np.int32)]),
            spans=(),
            routing=(RoutingSpan(0, PROMPT + TOKENS, routing.astype(np.int16)),),
            sampling_mask=SamplingMask(counts=np.concatenate([blank, mask.counts]), token_ids=mask.token_ids),
        )

    return asyncio.run(main())


def trained(row: Row) -> TrainingSample:
    """The row as a unit's only one."""
    trajectory = Trajectory(seat="solver", index=0, policy="solver", rows=(row,), reward=1.0)
    credit = TrajectoryCredit("solver", 0, 1.0, 1.0, 0.0)
    unit = Unit(episode_id="e", attempt=0, policy="solver", location=DataLocation("", 0), credits=(credit,))
    (sample,) = samples(unit, [trajectory])
    return sample


def model_of(zoo: ModelZoo, architecture: str) -> PolicyModel:
    config = RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(zoo.directory(architecture))),
        engine=EngineConfig(capture_routing=True),
        policies={"solver": PolicyConfig()},
    )
    return load_models(config, torch.device("cpu"))["solver"]


def difference(model: PolicyModel, sample: TrainingSample, *, replay: bool = True) -> dict[int, float]:
    """Trainer's minus recorded log-probability by position."""
    (batch,) = pack([sample], max_tokens=1000)
    with torch.no_grad():
        head = token_logprobs(model.model, batch, replay=model.replay if replay else None)
    return dict(zip(batch.position.tolist(), (head.logprob.numpy() - batch.behavior_logprobs).tolist(), strict=True))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_recorded_logprobs_come_back_with_their_kept_sets_and_not_without(zoo: ModelZoo, architecture: str) -> None:
    model, row = model_of(zoo, architecture), sampled(zoo, architecture, "float32")
    found = difference(model, trained(row))
    assert sorted(found) == list(range(PROMPT, PROMPT + TOKENS))
    assert max(map(abs, found.values())) < 1e-4
    biased = difference(model, trained(replace(row, sampling_mask=None)))
    assert np.mean(list(biased.values())) < -0.1, "the filters removed next to nothing"
    assert max(biased.values()) < 1e-4, "renormalising can only raise a probability"


def test_a_set_may_be_none_forced_or_missing(zoo: ModelZoo) -> None:
    """Position 12: nothing masked; 13: the token was forced; 14: the set is lost; the others as they were."""
    model, row = model_of(zoo, "mixtral"), sampled(zoo, "mixtral", "float32")
    mask = row.sampling_mask
    assert mask is not None
    sets = np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])
    counts = mask.counts.copy()
    counts[12:15] = MaskKind.NONE, 1, MaskKind.MISSING
    sets[12:15] = [np.zeros(0, np.int32), row.token_ids[13:14], np.zeros(0, np.int32)]
    behavior = row.behavior_logprobs.copy()
    behavior[13] = 0.0
    changed = replace(
        row, behavior_logprobs=behavior, sampling_mask=SamplingMask(counts=counts, token_ids=np.concatenate(sets))
    )
    found = difference(model, trained(changed))
    unmasked = difference(model, trained(replace(row, sampling_mask=None)))
    assert found[12] == pytest.approx(unmasked[12], abs=1e-6)
    assert found[12] < -0.01
    assert found[13] == 0.0
    assert 14 not in found
    assert max(abs(found[at]) for at in range(15, PROMPT + TOKENS)) < 1e-4


def test_a_bf16_engine_s_experts_are_replayed(zoo: ModelZoo) -> None:
    """Where rounding sent a token through other experts, replay brings the trainer back to the engine's."""
    model, row = model_of(zoo, "qwen3_moe"), sampled(zoo, "qwen3_moe", "bfloat16")
    without = difference(model, trained(row), replay=False)
    found = difference(model, trained(row))
    wrong = [at for at in found if abs(without[at] - found[at]) > 1e-3]
    assert wrong, "rounding changed no expert"
    assert sum(found[at] ** 2 for at in wrong) < 0.5 * sum(without[at] ** 2 for at in wrong)
