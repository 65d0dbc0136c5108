"""Experts: they are found in each family, and two ranks compute what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agentrl.engines.experts import find_experts
from tests.learn_cases import write_model
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error

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


def test_ranks_need_equally_many_passes_where_rows_are_computed_whole(root: Path, tmp_path: Path) -> None:
    """gpt-oss shares no prefixes, and the rows of one rank need more blocks than those of the other."""
    kinds = {"all": False, "adapters": True}
    several = [case(root / "gpt_oss", tmp_path / kind / "2", lora=lora) for kind, lora in kinds.items()]
    (started, *_) = (each[0]["started"] for each in on_ranks(2, FUNCTION, several))
    assert "every row is computed whole" in " ".join(started)
    alone([case(root / "gpt_oss", tmp_path / kind / "1", lora=lora) for kind, lora in kinds.items()])
    for kind in kinds:
        assert gradient_error(tmp_path / kind / "2", tmp_path / kind / "1") <= 1e-5


@pytest.mark.parametrize("kind", [*FAMILIES, "mixtral", "qwen3"])
def test_experts_are_found_and_routers_are_not(tmp_path: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / kind, kind=kind))
    found = find_experts(model)
    assert len(found) == {"qwen3": 0, "deepseek": 1}.get(kind, 2)
    assert all(name.endswith("experts") for name in found)
