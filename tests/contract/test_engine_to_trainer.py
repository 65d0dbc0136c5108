"""What the engine sampled, as the trainer sees it: kept sets, experts and adapters give back the recorded logprobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig
from agentrl.core.errors import ConfigError
from agentrl.core.records import (
    EpisodeDataLocation,
    Trajectory,
    TrajectoryCredit,
    Unit,
)
from agentrl.core.tokens import ExcludedTokens, KeptCount, KeptSets, TrainingSample, TrajectoryRow
from agentrl.credit.samples import unit_samples
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from agentrl.learn.publish import Publisher
from tests.contract.engine_kinds import ModelZoo, check_logprobs, load_engine, prompt, request, version
from tests.contract.scripted_program import VOCABULARY

PROMPT, TOKENS = 12, 40


def sampled(zoo: ModelZoo, architecture: str, dtype: str) -> TrajectoryRow:
    """A turn under top-k 20 and top-p 0.9."""

    async def main() -> TrajectoryRow:
        engine = load_engine(zoo, architecture, capture_routing=True, capture_mask=True, dtype=dtype)
        context = prompt(PROMPT)
        call = request("r", context, max_tokens=TOKENS, top_k=20, top_p=0.9)
        completion = await engine.open("s", "solver").generate(call)
        await engine.close()
        mask = completion.kept
        assert mask is not None
        assert completion.experts is not None
        blank = np.zeros(PROMPT, np.int32)
        return TrajectoryRow(
            token_ids=np.concatenate([context, completion.token_ids]),
            loss_mask=np.arange(PROMPT + TOKENS) >= PROMPT,
            logprobs=np.concatenate([blank.astype(np.float32), completion.logprobs]),
            turn_index=np.concatenate([blank - 1, np.zeros(TOKENS, np.int32)]),
            spans=(),
            experts=completion.experts,
            kept=KeptSets(counts=np.concatenate([blank, mask.counts]), ids=mask.ids),
        )

    return asyncio.run(main())


def trained(row: TrajectoryRow) -> TrainingSample:
    """The row as a unit's only one."""
    trajectory = Trajectory(seat="solver", index=0, policy="solver", rows=(row,), reward=1.0)
    credit = TrajectoryCredit("solver", 0, 1.0, 1.0, 0.0)
    unit = Unit(episode_id="e", attempt=0, policy="solver", location=EpisodeDataLocation("", 0), credits=(credit,))
    (sample,) = unit_samples(unit, [trajectory])
    return sample


def model_of(zoo: ModelZoo, architecture: str) -> PolicyModel:
    config = RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(zoo.directory(architecture))),
        engine=EngineConfig(capture_routing=True),
        policies={"solver": PolicyConfig()},
    )
    return load_models(config.trainer_plan, torch.device("cpu"))["solver"]


def difference(model: PolicyModel, sample: TrainingSample, *, replay: bool = True) -> dict[int, float]:
    """Trainer's minus recorded log-probability by position."""
    (batch,) = pack([sample], max_tokens=1000)
    with torch.no_grad():
        head = token_logprobs(model.model, batch, replay=model.replay if replay else None)
    differences = head.logprob.numpy() - sample.logprobs[batch.position]
    return dict(zip(batch.position.tolist(), differences.tolist(), strict=True))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_recorded_logprobs_come_back_with_their_kept_sets_and_not_without(zoo: ModelZoo, architecture: str) -> None:
    model, row = model_of(zoo, architecture), sampled(zoo, architecture, "float32")
    found = difference(model, trained(row))
    assert sorted(found) == list(range(PROMPT, PROMPT + TOKENS))
    assert max(map(abs, found.values())) < 1e-4
    biased = difference(model, trained(row.with_column("kept", None)))
    assert np.mean(list(biased.values())) < -0.1, "the filters removed next to nothing"
    assert max(biased.values()) < 1e-4, "renormalizing can only raise a probability"


def test_a_set_may_be_none_forced_or_missing(zoo: ModelZoo) -> None:
    """Position 12: nothing masked; 13: the token was forced; 14: the set is lost; the others as they were."""
    model, row = model_of(zoo, "mixtral"), sampled(zoo, "mixtral", "float32")
    mask = row.kept
    assert mask is not None
    sets = np.split(mask.ids, np.cumsum(mask.counts)[:-1])
    counts = mask.counts.copy()
    counts[12:15] = KeptCount.NONE, 1, KeptCount.MISSING
    sets[12:15] = [np.zeros(0, np.int32), row.token_ids[13:14], np.zeros(0, np.int32)]
    behavior = row.logprobs.copy()
    behavior[13] = 0.0
    kept = KeptSets(counts=counts, ids=np.concatenate(sets))
    changed = row.with_column("logprobs", behavior).with_column("kept", kept)
    found = difference(model, trained(changed))
    unmasked = difference(model, trained(row.with_column("kept", None)))
    assert found[12] == pytest.approx(unmasked[12], abs=1e-6)
    assert found[12] < -0.01
    assert found[13] == 0.0
    assert 14 not in found
    assert max(abs(found[at]) for at in range(15, PROMPT + TOKENS)) < 1e-4


def test_a_set_by_the_tokens_that_it_lacks_is_the_same_set(zoo: ModelZoo) -> None:
    model, row = model_of(zoo, "mixtral"), sampled(zoo, "mixtral", "float32")
    assert row.kept is not None
    sets: list[Any] = np.split(row.kept.ids, np.cumsum(row.kept.counts)[:-1])
    for at in range(PROMPT, PROMPT + TOKENS, 2):
        sets[at] = ExcludedTokens(np.setdiff1d(np.arange(VOCABULARY, dtype=np.int32), sets[at]))
    mixed = row.with_column("kept", KeptSets.of([*[KeptCount.NONE] * PROMPT, *sets[PROMPT:]]))
    assert difference(model, trained(mixed)) == difference(model, trained(row))


def test_a_bf16_engine_s_experts_are_replayed(zoo: ModelZoo) -> None:
    """Where rounding sent a token through other experts, replay brings the trainer back to the engine's."""
    model, row = model_of(zoo, "qwen3_moe"), sampled(zoo, "qwen3_moe", "bfloat16")
    without = difference(model, trained(row), replay=False)
    found = difference(model, trained(row))
    wrong = [at for at in found if abs(without[at] - found[at]) > 1e-3]
    assert wrong, "rounding changed no expert"
    assert sum(found[at] ** 2 for at in wrong) < 0.5 * sum(without[at] ** 2 for at in wrong)


# --- adapters ---------------------------------------------------------------------------------------------------------

_ATTENTION = "q_proj, k_proj, v_proj, o_proj"
_SAID = {
    "llama": "all linear layers",
    "phi3": "all linear layers",
    "gpt_neox": "all linear layers",
    "mixtral": f"{_ATTENTION}, 24.9% of the linear weights; not on mlp.gate, experts.gate_up_proj, experts.down_proj",
    "qwen3_moe": f"{_ATTENTION}, 33.1% of the linear weights; not on experts.gate_up_proj, experts.down_proj, mlp.gate",
    "qwen2_moe": f"{_ATTENTION}, gate_proj, up_proj, down_proj, 55.2% of the linear weights; "
    "not on mlp.gate, experts.gate_up_proj, experts.down_proj, mlp.shared_expert_gate",
}


def lora_model(zoo: ModelZoo, architecture: str, *targets: str) -> PolicyModel:
    config = RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(zoo.directory(architecture))),
        policies={"solver": PolicyConfig(lora=LoraConfig(rank=4, target_modules=targets))},
    )
    return load_models(config.trainer_plan, torch.device("cpu"))["solver"]


def fill_adapter(model: PolicyModel, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))


@pytest.mark.parametrize("architecture", sorted(_SAID))
def test_an_adapter_on_all_it_can_be_on_is_served_as_it_is_trained(
    zoo: ModelZoo, tmp_path: Path, architecture: str
) -> None:
    """Fused projections and shared experts too; what is left out is said."""
    model = lora_model(zoo, architecture)
    size = sum(parameter.numel() for parameter in model.parameters.values())
    layers = _SAID[architecture]
    assert model.described == f"solver: adapters of rank 4: {size:,} trained parameters on {layers}"
    fill_adapter(model, 1)
    weights = Publisher(tmp_path).publish(version(1), model)
    context, served = prompt(PROMPT), PeftModel.from_pretrained(zoo.load(architecture), weights.path).eval()

    async def main() -> None:
        engine = load_engine(zoo, architecture)
        base = await engine.open("base", "solver").generate(request("base", context))
        await engine.serve([weights])
        completion = await engine.open("s", "solver").generate(request("r", context))
        assert completion.token_ids.tolist() != base.token_ids.tolist()
        check_logprobs(served, context, completion)
        blank = np.zeros(PROMPT, np.float32)
        row = TrainingSample(
            token_ids=np.concatenate([context, completion.token_ids]),
            loss_mask=np.arange(PROMPT + len(completion.token_ids)) >= PROMPT,
            logprobs=np.concatenate([blank, completion.logprobs]),
            advantages=np.ones(PROMPT + len(completion.token_ids), np.float32),
        )
        assert max(map(abs, difference(model, row, replay=False).values())) < 2e-4
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("architecture", "targets", "message"),
    [
        ("llama", ["embed_tokens"], r"'embed_tokens' is model.embed_tokens, on which no adapter can be"),
        ("llama", ["q_proj", "embed_tokens"], r"'embed_tokens' is model.embed_tokens"),
        ("llama", ["lm_head"], r"'lm_head' is lm_head, on which no adapter"),
        ("llama", ["q_proj", "querry"], r"'querry' is not a layer of LlamaForCausalLM.*q_proj, k_proj"),
        ("llama", ["norm"], r"'norm' is model.norm"),
        (
            "phi3",
            ["q_proj", "o_proj"],
            r"'q_proj' is not a layer of Phi3.*qkv_proj, o_proj, gate_up_proj",
        ),
        (
            "qwen3_moe",
            ["gate_proj"],
            r"'gate_proj' is not a layer of Qwen3Moe.*q_proj, k_proj, v_proj, o_proj\.",
        ),
        ("mixtral", ["experts"], r"'experts' is model.layers.0.mlp.experts, on which no adapter"),
        ("mixtral", ["gate"], r"'gate' is model.layers.0.mlp.gate, on which no adapter"),
        ("gpt2", [], r"GPT2LMHeadModel has no linear layers"),
    ],
)
def test_what_cannot_be_trained_and_served_is_refused_with_what_can(
    zoo: ModelZoo, architecture: str, targets: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"policies\.solver\.lora.*{message}"):
        lora_model(zoo, architecture, *targets)


@pytest.mark.parametrize("targets", [["q_proj", "model.layers.1.mlp.down_proj"], ["self_attn.v_proj"]])
def test_layers_are_named_by_the_end_of_their_names(zoo: ModelZoo, targets: list[str]) -> None:
    model = lora_model(zoo, "llama", *targets)
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in model.publication.layout()}
    assert {name for name in adapted if not any(name.endswith(f".{target}") for target in targets)} <= set(targets)
    assert len(adapted) == (3 if "q_proj" in targets else 2)


def test_two_policies_have_adapters_on_layers_of_their_own(zoo: ModelZoo) -> None:
    lora = {"one": LoraConfig(rank=2, target_modules=("q_proj",)), "all": LoraConfig(rank=4)}
    config = RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(zoo.directory("llama"))),
        policies={name: PolicyConfig(lora=each) for name, each in lora.items()},
    )
    models = load_models(config.trainer_plan, torch.device("cpu"))
    layers = {name: {key.split(".lora_")[0] for key in model.publication.layout()} for name, model in models.items()}
    assert {name: len(found) for name, found in layers.items()} == {"one": 2, "all": 14}
    assert models["one"].described.startswith(
        "one: adapters of rank 2: 768 trained parameters on q_proj, 19.0% of the "
    )
