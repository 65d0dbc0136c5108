"""Experts to which tokens travel: the update of one rank, for each family, alone and in groups with copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import ConfigError
from agentrl.core.records import PolicyVersion
from agentrl.engines.experts import find_experts
from agentrl.learn import models
from agentrl.learn.experts import predict_layer_bytes
from agentrl.learn.packing import pack
from agentrl.learn.publish import Publisher
from tests.learn_cases import LORA, make_samples, run_config, write_model
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case, compared, dispatched, gradient_error

pytestmark = pytest.mark.timeout(900)

FAMILIES = ("moe", "deepseek", "gpt_oss")


def write_models(root: Path) -> None:
    for kind in FAMILIES:
        write_model(root / kind, kind=kind)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    write_models(root)
    return root


def cases(ranks: int, *, exhaustive: bool) -> dict[str, dict[str, Any]]:
    """Cases by name: each family with all weights or with adapters of experts, or both; those on four ranks are also in
    groups that hold copies."""
    every = {kind: dispatched(kind) for kind in FAMILIES}
    every["deepseek adapters"] = dispatched("deepseek", lora=True)
    every |= {f"{kind} adapters of experts": dispatched(kind, expert_lora=True, steps=2) for kind in FAMILIES}
    if ranks == 2 and not exhaustive:
        for name in ("deepseek", "moe adapters of experts", "gpt_oss adapters of experts"):
            del every[name]
    every["planted order"] = dispatched("moe", fault="outputs are not put back in order")
    every["planted routing"] = dispatched("moe", routed=True, fault="recorded experts are ignored")
    if ranks == 2:
        return every
    groups = {"sharding": 2}
    return every | {
        "moe adapters": dispatched("moe", lora=True),
        "deepseek recomputed": dispatched("deepseek", recompute=True),
        **{f"copies, {kind}": dispatched(kind, **groups) for kind in FAMILIES},
        "copies, adapters": dispatched("deepseek", **groups, lora=True),
        **{
            f"copies, {kind} adapters of experts": dispatched(kind, **groups, expert_lora=True, steps=2)
            for kind in FAMILIES
        },
        "copies, recorded and recomputed": dispatched("moe", **groups, recompute=True, routed=True),
        "adapters of experts, recorded and recomputed": dispatched(
            "moe", recompute=True, routed=True, expert_lora=True, steps=2
        ),
        "planted sum": dispatched("moe", **groups, fault="gradients of copies are not added up"),
    }


@pytest.mark.parametrize(
    ("ranks", "exhaustive"),
    [
        (2, False),
        pytest.param(2, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(4, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_every_case_has_the_gradient_of_one_rank(root: Path, tmp_path: Path, ranks: int, exhaustive: bool) -> None:
    every = cases(ranks, exhaustive=exhaustive)
    for name, each in compared(root, tmp_path, ranks, every).items():
        assert "experts: dispatched" in " ".join(each.several[0]["started"])
        assert (each.error > 0.1) if "fault" in every[name]["settings"] else (each.error <= 1e-5), name


def test_ranks_need_equally_many_passes_where_rows_are_computed_whole(root: Path, tmp_path: Path) -> None:
    """gpt-oss shares no prefixes, and the rows of one rank need more blocks than those of the other."""
    kinds = {"all": False, "adapters": True}
    several = [
        case(root / "gpt_oss", tmp_path / kind / "2", experts="gathered", expert_lora=lora)
        for kind, lora in kinds.items()
    ]
    (started, *_) = (each[0]["started"] for each in on_ranks(2, FUNCTION, several))
    assert "every row is computed whole" in " ".join(started)
    alone([case(root / "gpt_oss", tmp_path / kind / "1", expert_lora=lora) for kind, lora in kinds.items()])
    for kind in kinds:
        assert gradient_error(tmp_path / kind / "2", tmp_path / kind / "1") <= 1e-5


def expert_lora_error(path: Path, place: Path) -> float:
    """The largest difference of log-probabilities and gradients of a model with adapters on experts from PEFT's, which
    loads the published files; that of gradients over their norm."""
    policies = {
        "policy": PolicyConfig(lora=LORA.model_copy(update={"experts": True})),
        "other": PolicyConfig(lora=LORA),
    }
    model = models.load_models(run_config(path, policies=policies).trainer_plan, torch.device("cpu"))["policy"]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    place.mkdir(parents=True, exist_ok=True)
    version = Publisher(place).publish(PolicyVersion("policy", 0, 1), model)
    base = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    served: Any = peft.PeftModel.from_pretrained(base, version.path, is_trainable=True)
    model.activate()
    sample = make_samples(0, 2)[1]
    (batch,) = pack([sample], max_tokens=1000, share=model.shared_prefixes)
    with pytest.MonkeyPatch.context() as forbidden:
        forbidden.setattr(torch.nn.utils.parametrize, "register_parametrization", None)  # with it PEFT adds B A
        found = model.token_logprobs(batch).logprob
        found.sum().backward()
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    rows = served(input_ids=ids).logits[0].log_softmax(-1)
    expected = rows[:-1].gather(1, ids[0, 1:, None])[torch.from_numpy(batch.position - 1), 0]
    expected.sum().backward()
    named = served.named_parameters()
    theirs = {name.replace(".default.", "."): each.grad for name, each in named if each.requires_grad}
    mine = {name: parameter.grad for name, parameter in model.publication.parameters().items()}
    assert mine.keys() == theirs.keys()
    assert sum(".experts." in name for name in mine) == 4 * len(find_experts(base))
    off, whole = (
        torch.cat([each.flatten() for each in gradients])
        for gradients in ((mine[name] - theirs[name] for name in mine), theirs.values())
    )
    return max(float((found - expected).detach().abs().max()), float(off.norm() / whole.norm()))


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_of_experts_compute_what_peft_computes(root: Path, tmp_path: Path, kind: str) -> None:
    assert expert_lora_error(root / kind, tmp_path) <= 1e-5


@pytest.mark.parametrize("kind", [*FAMILIES, "mixtral", "qwen3"])
def test_experts_are_found_and_routers_are_not(tmp_path: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / kind, kind=kind))
    found = find_experts(model)
    assert len(found) == {"qwen3": 0, "deepseek": 1}.get(kind, 2)
    assert all(name.endswith("experts") for name in found)


def test_bytes_of_published_models() -> None:
    """Qwen3-30B-A3B and DeepSeek-V3 on many ranks, bfloat16, trained in full."""
    qwen3 = {"weights": 128 * 3 * 768 * 2048, "width": 2048, "top_k": 8, "itemsize": 2, "ranks": 1 << 20}
    sent = predict_layer_bytes(**qwen3, tokens=16_384, trained=True)
    assert sent.gathered == pytest.approx(4.8e9, rel=0.01)
    assert sent.dispatched == pytest.approx(2.1e9, rel=0.03)
    frozen = predict_layer_bytes(**qwen3, tokens=16_384, trained=False)
    assert frozen.gathered == pytest.approx(2.4e9, rel=0.01)
    deepseek = {"weights": 256 * 3 * 2048 * 7168, "width": 7168, "top_k": 8, "itemsize": 2, "ranks": 1 << 20}
    assert predict_layer_bytes(**deepseek, tokens=16_384, trained=True).gathered == pytest.approx(90e9, rel=0.01)


def test_context_ranks_send_their_part_of_the_tokens_to_experts(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "moe")
    mesh: Any = SimpleNamespace(ndim=1, size=lambda dimension: 4)
    sent = []
    for context_ranks in (1, 4):
        trainer = run_config(root / "moe", experts="dispatched", ranks=4, context_ranks=context_ranks).trainer
        _, described = models._dispatched_experts(trainer, model, mesh, trained=True)
        sent.append(float(described.split(" about ")[1].split()[0]))
    assert sent == pytest.approx([4 * 8192 * 2 * 32 * 4 * 0.75 / 1e6, 8192 * 2 * 32 * 4 * 0.75 / 1e6], abs=0.05)


@pytest.mark.parametrize(
    ("kind", "settings", "ranks", "reason"),
    [
        ("qwen3", {}, 2, "no experts whose weights lie in one tensor"),
        ("moe", {"sharding": "offload"}, 2, "'offload'"),
        ("moe", {}, 3, "3 ranks do not divide 4 experts"),
    ],
)
def test_what_cannot_be_dispatched_is_refused_by_name(
    tmp_path: Path, kind: str, settings: dict[str, Any], ranks: int, reason: str
) -> None:
    path = write_model(tmp_path / kind, kind=kind)
    config = run_config(path, experts="dispatched", ranks=ranks, **settings)
    model = AutoModelForCausalLM.from_pretrained(path)
    mesh: Any = SimpleNamespace(ndim=1, size=lambda dimension: ranks)
    with pytest.raises(ConfigError, match=rf"trainer\.experts = 'dispatched'.*{reason}"):
        models._dispatched_experts(config.trainer, model, mesh, trained=True)
    if kind == "moe":
        gathered = config.trainer.model_copy(update={"experts": "auto"})
        chosen, described = models._dispatched_experts(gathered, model, mesh, trained=True)
        assert not chosen
        assert reason in described
