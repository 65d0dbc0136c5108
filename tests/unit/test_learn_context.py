"""Context ranks: the update of one rank, from a part of the tokens each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.app.plan import with_chosen_settings
from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import ConfigError
from agentrl.learn.context import ContextGroup
from agentrl.learn.forward import ATTENTION, token_logprobs
from agentrl.learn.packing import pack
from agentrl.learn.ranks import SingleRankGroup
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import make_samples, predict_trainer_memory, run_config, write_model
from tests.model_families import write_family
from tests.sharding_cases import compared, made

pytestmark = pytest.mark.timeout(900)

GAE = {
    "group_size": 1,
    "advantage": {"name": "gae", "discount": 0.97, "trace_decay": 0.8, "bootstrap": True, "value_updates": 2},
}
STEP = {"name": "tests.sharding_cases:spread", "kl": 0.1}
PLAIN = {"context_ranks": 2, "sharding": "none"}


def write_models(root: Path) -> None:
    for kind in ("qwen3", "sliding", "moe", "gpt_oss", "recurrent"):
        write_model(root / kind, kind=kind, key_heads=4)
    write_family("Qwen3.5, 3.6", root / "images")
    teacher = AutoModelForCausalLM.from_pretrained(root / "qwen3")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    teacher.save_pretrained(root / "teacher")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    write_models(root)
    return root


def cases(root: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """Cases by name, with the models in `root`: on four ranks in groups of two or in one."""
    every = {
        "dense": made("qwen3", **PLAIN),
        "sliding windows": made("sliding", **PLAIN),
        "recurrent layers": made("recurrent", **PLAIN, recompute=True),
        "values": made("qwen3", **PLAIN, detailed=True, credit=GAE),
        "whole steps": made("qwen3", context_ranks=2, lora=True, policies=("policy", "other"), loss=STEP),
        "experts": made("moe", context_ranks=2, experts="gathered"),
        "dispatched": made("moe", context_ranks=2, experts="dispatched", routed=True, recompute=True),
        "planted": made("qwen3", **PLAIN, fault="attention does not see the tokens of other ranks"),
    }
    if ranks == 2:
        return every | {
            "recomputed": made("qwen3", **PLAIN, recompute=True),
            "for images and text": made("images", **PLAIN, recompute=True),
            "turns and kept sets": made("qwen3", **PLAIN, detailed=True),
            "over sequences": made("qwen3", **PLAIN, loss={"normalizer": "sequences"}),
            "distillation": made("qwen3", **PLAIN, reference=root / "teacher", loss={"name": "distillation"}),
            "adapters": made("qwen3", **PLAIN, lora=True, loss={"name": "ppo", "kl": 0.1}),
        }
    return every | {
        "dense in one group": made("qwen3", context_ranks=4, sharding="none"),
        "sliding windows in one group": made("sliding", context_ranks=4, sharding="none"),
        "dispatched in one group": made("moe", context_ranks=4, experts="dispatched"),
    }


def check(root: Path, place: Path, ranks: int, every: Mapping[str, dict[str, Any]]) -> None:
    """Compare cases with one rank, whose micro-batches are those of one group."""
    for name, each in compared(root, place, ranks, every).items():
        if "fault" in every[name]["settings"]:
            assert each.error > 0.1
            continue
        in_one_group = every[name]["settings"]["context_ranks"] == ranks
        assert each.error <= (1e-6 if in_one_group else 3e-6), name
        for rank, result in enumerate(each.several):
            assert result["losses"] == pytest.approx(each.one["losses"], abs=1e-6)
            assert result["norms"] == each.several[0]["norms"]
            slices = [count * (rank + 1) // ranks - count * rank // ranks for count in each.one["tokens"]]
            assert not in_one_group or result["tokens"] == slices


def test_two_ranks_give_the_update_of_one(root: Path, tmp_path: Path) -> None:
    every = cases(root, 2)
    check(root, tmp_path, 2, {name: every[name] for name in ("values", "dispatched", "planted")})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_has_the_update_of_one_rank(root: Path, tmp_path: Path, ranks: int) -> None:
    """Each group computes a share of the step; the ranks of a sharded model compute equally many passes."""
    check(root, tmp_path, ranks, cases(root, ranks))


@pytest.mark.parametrize("reference", [False, True])
def test_heads_that_context_ranks_do_not_divide_are_refused(root: Path, tmp_path: Path, reference: bool) -> None:
    model, other = root / "qwen3", write_model(tmp_path / "other", key_heads=2)
    policies = {"policy": PolicyConfig(reference=str(other) if reference else "")}
    config = run_config(model if reference else other, policies=policies, ranks=4, context_ranks=4)
    with pytest.raises(ConfigError, match=r"context_ranks = 4 does not divide the 2 key-value heads of .*other"):
        with_chosen_settings(config, {})


def test_groups_that_do_not_divide_the_ranks_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"context_ranks = 2 does not divide ranks = 3"):
        run_config(root / "qwen3", ranks=3, context_ranks=2)


def test_added_tokens_change_no_prediction(root: Path) -> None:
    """A micro-batch may have fewer tokens than its context ranks, and models do not compute 0 tokens."""
    model = AutoModelForCausalLM.from_pretrained(root / "qwen3", attn_implementation=ATTENTION)
    (batch,) = pack(make_samples(0, 2), max_tokens=1 << 20)
    count = len(batch.token_ids) + 3
    longer = batch.with_min_tokens(count)
    assert len(longer.token_ids) == count
    torch.testing.assert_close(token_logprobs(model, longer).logprob, token_logprobs(model, batch).logprob)


class _FirstOfTwo(SingleRankGroup):
    """A rank whose group of two is not there, for what is refused before it is needed."""

    def context(self, size: int) -> ContextGroup:
        return ContextGroup(rank=0, size=size)


def test_models_that_compute_whole_rows_are_refused(root: Path, tmp_path: Path) -> None:
    config = run_config(root / "gpt_oss", ranks=2, context_ranks=2, sharding="none")
    with pytest.raises(ConfigError, match=r"context_ranks = 2 .*computes every row whole because of .*s_aux"):
        PolicyTrainer(config.trainer_plan, tmp_path, ranks=_FirstOfTwo()).start()


def test_the_predicted_activations_of_a_rank_are_those_of_its_tokens(root: Path) -> None:
    one, four = (
        predict_trainer_memory(run_config(root / "qwen3", ranks=4, context_ranks=ranks)).activations for ranks in (1, 4)
    )
    assert four < 0.3 * one
