"""Routing replay: the recorded experts are used, by the router's own formula, with its gradient, wherever rows lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ModelError
from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import ExpertRouting, TrainingSample
from agentrl.engines.embedded.capture import chosen_experts, find_routers
from agentrl.learn.forward import RoutingReplay, token_logprobs
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, divisors, make_rows, make_samples, run_config, write_model

KINDS = ("moe", "mixtral")
EXPERTS, LAYERS, TOP_K = 4, 2, 2


def loaded(directory: Path, kind: str = "moe", **policies: Any) -> PolicyModel:
    """A model with replay."""
    config = replace_engine(run_config(write_model(directory, kind=kind), **policies))
    return load_models(config.trainer_plan, torch.device("cpu"))["policy"]


def replace_engine(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"engine": EngineConfig(capture_routing=True)})


def random_routing(seed: int, length: int, *, known: float = 1.0) -> Any:
    """Two different experts per position and layer; some positions not recorded."""
    rng = np.random.default_rng(seed)
    draws = rng.random((length, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.int16)
    draws[rng.random(length) >= known] = -1
    return draws


def routed_samples(count: int, *, known: float = 1.0) -> list[TrainingSample]:
    """Rows that share tokens, and half of them the routing too; the last has none."""
    samples = make_samples(5, count, prefix=12)
    found = [
        sample.with_column("experts", ExpertRouting(random_routing(index // 2, len(sample), known=known)))
        for index, sample in enumerate(samples)
    ]
    return [*found[:-1], found[-1].with_column("experts", None)]


def by_hand(model: PolicyModel, sample: TrainingSample) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities [T - 1] of the row's tokens, with a router written out and put in the place of each; and what
    they chose.
    """
    names = routers(model)
    taken: list[Tensor] = []
    forwards = [model.model.get_submodule(name).forward for name in names]
    for layer, name in enumerate(names):
        router = model.model.get_submodule(name)

        def forward(hidden: Tensor, router: Any = router, layer: int = layer) -> tuple[Tensor, Tensor, Tensor]:
            scores = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            chosen = scores.topk(TOP_K, dim=-1).indices
            if sample.experts is not None:
                for position, experts in enumerate(sample.experts.rows[: len(chosen), layer]):
                    if experts[0] >= 0:
                        chosen[position] = torch.from_numpy(experts.astype(np.int64))
            gates = torch.stack([row[at].exp() for row, at in zip(scores, chosen, strict=True)])
            everything = scores.exp().sum(-1, keepdim=True) if not getattr(router, "norm_topk_prob", True) else None
            taken.append(chosen)
            return scores, gates / (gates.sum(-1, keepdim=True) if everything is None else everything), chosen

        router.forward = forward
    try:
        model.model.set_attn_implementation("sdpa")
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logits = model.model(input_ids=ids, use_cache=False).logits[0, :-1] / divisors(sample)
    finally:
        model.model.set_attn_implementation("agentrl_tree")
        for name, forward in zip(names, forwards, strict=True):
            model.model.get_submodule(name).forward = forward
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], taken


def routers(model: PolicyModel) -> tuple[str, ...]:
    model.model.set_attn_implementation("sdpa")
    names = find_routers(model.model)
    model.model.set_attn_implementation("agentrl_tree")
    return names


def gradients(model: PolicyModel, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}


def packed(model: PolicyModel, samples: list[TrainingSample], *, shared: bool) -> Tensor:
    """Summed log-probabilities of all trained tokens, each with a weight of its own, in the order of the rows."""
    model.model.set_attn_implementation("agentrl_tree" if shared else "sdpa")
    total = torch.zeros(())
    for batch in pack(samples, max_tokens=120, share=shared):
        head = token_logprobs(model.model, batch, shared=shared, replay=model.replay)
        total = total + (head.logprob * torch.from_numpy(np.cos(batch.position + batch.sample))).sum()
    model.model.set_attn_implementation("agentrl_tree")
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [1.0, 0.6])
def test_packed_rows_follow_their_records_as_single_rows_by_hand_do(tmp_path: Path, kind: str, known: float) -> None:
    """Values and every gradient, those of the routers too: over a prefix tree and over padded rows."""
    model = loaded(tmp_path, kind)
    samples = routed_samples(7, known=known)

    def expected() -> Tensor:
        total = torch.zeros(())
        for index, sample in enumerate(samples):
            at = np.flatnonzero(sample.loss_mask)
            logprobs, _ = by_hand(model, sample)
            total = total + (logprobs[at - 1] * torch.from_numpy(np.cos(at + index))).sum()
        return total

    wanted = gradients(model, expected)
    value = expected().item()
    plain = packed(model, [sample.with_column("experts", None) for sample in samples], shared=True).item()
    assert abs(plain - value) > 1e-2, "the record makes no difference"
    for shared in (True, False):
        assert packed(model, samples, shared=shared).item() == pytest.approx(value, abs=2e-4)
        found = gradients(model, lambda shared=shared: packed(model, samples, shared=shared))  # type: ignore[misc]
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                found[name], gradient, atol=2e-3, rtol=2e-3, msg=lambda text, n=name: f"{n} {text}"
            )
        assert all(bool(found[f"{name}.weight"].any()) for name in routers(model)), "routers have lost their gradient"


@pytest.mark.parametrize("kind", KINDS)
def test_the_routers_use_what_was_recorded_and_choose_where_nothing_was(tmp_path: Path, kind: str) -> None:
    model = loaded(tmp_path, kind)
    (sample,) = routed_samples(2, known=0.5)[:1]
    (batch,) = pack([sample], max_tokens=1000)
    assert batch.expert_routing is not None
    used: list[Tensor] = []
    for name in routers(model):
        model.model.get_submodule(name).register_forward_hook(lambda m, i, output: used.append(chosen_experts(output)))
    before = token_logprobs(model.model, batch).logprob
    own, used[:] = torch.stack(used, dim=1).numpy(), []
    token_logprobs(model.model, batch, replay=model.replay)
    found, used[:] = torch.stack(used, dim=1).numpy(), []
    known = batch.expert_routing[:, 0, 0] >= 0
    assert known.any()
    assert not known.all()
    assert np.array_equal(found[known], batch.expert_routing[known])
    assert np.array_equal(found[~known][:, 0], own[~known][:, 0])
    assert torch.equal(token_logprobs(model.model, batch).logprob, before), "the replay outlives its pass"


def test_a_pass_that_fails_leaves_the_model_to_itself(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    assert model.replay is not None
    (batch,) = pack(routed_samples(3), max_tokens=1000)
    before = token_logprobs(model.model, batch).logprob
    with pytest.raises(RuntimeError, match="stop"), model.replay.force_choice(torch.zeros((1, LAYERS, TOP_K))):
        raise RuntimeError("stop")
    assert torch.equal(token_logprobs(model.model, batch).logprob, before)


def test_adapters_are_trained_through_the_recorded_experts(tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
    model = loaded(tmp_path, policies={"policy": PolicyConfig(lora=lora)})
    samples = routed_samples(4)
    value = packed(model, samples, shared=True).item()
    expected = sum(
        (by_hand(model, s)[0][at - 1] * torch.from_numpy(np.cos(at + i))).sum().item()
        for i, s in enumerate(samples)
        for at in [np.flatnonzero(s.loss_mask)]
    )
    assert value == pytest.approx(expected, abs=2e-4)
    assert gradients(model, lambda: packed(model, samples, shared=True))


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="router"):
        loaded(tmp_path / "dense", "qwen3")
    grouped = transformers.DeepseekV3Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
        topk_group=2, first_k_dense_replace=0, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8,
    )  # fmt: skip
    with pytest.raises(ModelError, match="3 top-k"):
        RoutingReplay(transformers.DeepseekV3ForCausalLM(grouped))
    model = loaded(tmp_path / "moe")
    (sample, _) = routed_samples(2)
    assert sample.experts is not None
    (batch,) = pack([sample.with_column("experts", ExpertRouting(sample.experts.rows[:, :1]))], max_tokens=1000)
    with pytest.raises(ModelError, match=r"1 layers .*2"):
        token_logprobs(model.model, batch, replay=model.replay)


def test_a_step_says_how_much_was_not_recorded_and_how_far_engine_and_trainer_are_apart(tmp_path: Path) -> None:
    """The trainer's own log-probabilities as the record: with the recorded experts the mismatch is nothing."""
    path = write_model(tmp_path / "model", kind="moe")
    config = replace_engine(run_config(path))
    model = load_models(config.trainer_plan, torch.device("cpu"))["policy"]
    version = PolicyVersion("policy", 0, 0)
    rows = []
    for index, row in enumerate(make_rows(0, 4)):
        length = len(row.token_ids)
        routing = random_routing(index, length - 1)
        sample = TrainingSample(
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            logprobs=row.logprobs,
            advantages=row.logprobs,
            temperatures=row.temperatures,
            experts=ExpertRouting(routing),
        )
        logprobs = np.where(row.loss_mask, np.concatenate([[0], by_hand(model, sample)[0].detach().numpy()]), 0)
        rows.append(
            replace(
                row,
                logprobs=logprobs.astype(np.float32),
                experts=ExpertRouting(routing),
                spans=(VersionSpan(0, length, version),),
            )
        )
    results = []
    for routed in (True, False):
        episodes = Episodes(rows if routed else [row.with_column("experts", None) for row in rows])
        trainer = PolicyTrainer(config.trainer_plan, tmp_path / str(routed), read=episodes.read)
        trainer.start()
        trainer.forward_backward(episodes.batch())
        results.append(trainer.optim_step("policy", 1).metrics)
    with_replay, without = results
    assert (with_replay["unrouted_share"], without["unrouted_share"]) == (0.0, 1.0)
    assert with_replay["mismatch/k3"] < 1e-8
    assert with_replay["mismatch/max_difference"] < 1e-4
    assert without["mismatch/k3"] > 1e-4


def test_the_base_under_an_adapter_chooses_its_own_experts(tmp_path: Path) -> None:
    """The divergence from the base equals that from a separate copy of it: recorded experts are the policy's."""
    path = write_model(tmp_path / "model", kind="moe")
    rows = [
        row.with_column("experts", ExpertRouting(random_routing(index, len(row) - 1)))
        for index, row in enumerate(make_rows(0, 4))
    ]
    divergences = []
    for reference in ("", str(path)):
        policy = PolicyConfig(lora=LORA, learning_rate=0.1, reference=reference)
        config = replace_engine(run_config(path, policies={"policy": policy}, loss={"kl": 0.1}))
        episodes = Episodes(rows)
        trainer = PolicyTrainer(config.trainer_plan, tmp_path / f"run{reference and 1}", read=episodes.read)
        trainer.start()
        for step in (1, 2):
            trainer.forward_backward(episodes.batch(step_id=step))
            metrics = trainer.optim_step("policy", step).metrics
            trainer.publish("policy", PolicyVersion("policy", 0, step))
        divergences.append(metrics["reference_kl"])
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-5)
    assert abs(divergences[0]) > 1e-3
