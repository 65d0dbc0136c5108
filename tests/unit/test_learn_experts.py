"""Experts to which tokens travel: the update of one rank, for each family, alone and in groups with copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from agentrl.core.errors import ConfigError
from agentrl.learn import models
from agentrl.learn.experts import find_experts, predict_layer_bytes
from tests.learn_cases import run_config, write_model
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case, compared, dispatched, gradient_error

pytestmark = pytest.mark.timeout(900)

FAMILIES = ("moe", "deepseek", "gpt_oss")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for kind in FAMILIES:
        write_model(root / kind, kind=kind)
    return root


def errors(root: Path, place: Path, ranks: int, **cases: dict[str, Any]) -> dict[str, float]:
    """The gradient's error of each case on some ranks, relative to the gradient of one rank."""
    found = compared(root, place, ranks, cases)
    for each in found.values():
        assert "experts: dispatched" in " ".join(each.several[0]["started"])
    return {name: each.error for name, each in found.items()}


@pytest.mark.parametrize(
    "ranks",
    [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])],
)
def test_every_family_has_the_gradient_of_one_rank(root: Path, tmp_path: Path, ranks: int) -> None:
    cases = {kind: dispatched(kind) for kind in FAMILIES}
    cases["deepseek adapters"] = dispatched("deepseek", lora=True)
    found = errors(root, tmp_path, ranks, **cases)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.slow
def test_groups_that_hold_copies_of_experts_add_up_their_gradients(root: Path, tmp_path: Path) -> None:
    fault = "gradients of copies are not added up"
    found = errors(
        root,
        tmp_path,
        4,
        copies=dispatched("moe", sharding=2),
        recomputed=dispatched("moe", sharding=2, recompute=True, routed=True),
        planted=dispatched("moe", sharding=2, fault=fault),
    )
    assert max(found["copies"], found["recomputed"]) <= 1e-5, found
    assert found["planted"] > 0.1


def test_outputs_in_the_wrong_order_are_found(root: Path, tmp_path: Path) -> None:
    found = errors(root, tmp_path, 2, planted=dispatched("moe", fault="outputs are not put back in order"))
    assert found["planted"] > 0.1


def test_ranks_need_equally_many_passes_where_rows_are_computed_whole(root: Path, tmp_path: Path) -> None:
    """gpt-oss shares no prefixes, and the rows of one rank need more blocks than those of the other."""
    several = case(root / "gpt_oss", tmp_path / "2", experts="gathered")
    (started, *_) = (each[0]["started"] for each in on_ranks(2, FUNCTION, [several]))
    assert "every row is computed whole" in " ".join(started)
    alone([one := case(root / "gpt_oss", tmp_path / "1")])
    assert gradient_error(tmp_path / "2", Path(one["directory"])) <= 1e-5


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
    with pytest.raises(ConfigError, match=rf"trainer\.experts = 'dispatched': .*{reason}"):
        models._dispatched_experts(config.trainer, model, mesh, trained=True)
    if kind == "moe":
        gathered = config.trainer.model_copy(update={"experts": "auto"})
        chosen, described = models._dispatched_experts(gathered, model, mesh, trained=True)
        assert not chosen
        assert reason in described
