"""Whoever comes from TRL finds every `loss_type`: as settings that load, or as a line that says why not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from agentrl.config.sections import TrainerConfig
from agentrl.learn.losses import make_loss

GRPO = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
OTHERS = {
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),  # DPO; the first three are online DPO's, too
    *("simpo", "alphapo", "kto", "apo_zero_unpaired", "nll", "dft", "chunked_nll"),
}
"""The choices of `loss_type` in the configurations of TRL 1.16.0."""


def rows(repository: Path) -> dict[str, str]:
    """The tables' second column by each name in the first."""
    text = (repository / "docs" / "coming_from.md").read_text(encoding="utf-8")
    part = text[text.index("Values of `GRPOConfig.loss_type`") : text.index("## verifiers")]
    found: dict[str, str] = {}
    for line in part.splitlines():
        if line.startswith("| `"):
            names, what = line.strip("| ").split(" | ")
            found |= dict.fromkeys(re.findall(r"`(\w+)`", names), what)
    return found


def test_every_loss_type_is_a_setting_that_loads_or_has_a_reason(repository: Path) -> None:
    told = rows(repository)
    assert set(told) == GRPO | OTHERS
    for name, what in told.items():
        settings = re.findall(r"`(\{ name = .*?\})`", what)
        assert settings or what.startswith("not built in: "), name
        assert settings or name not in GRPO
        for setting in settings:
            loss = tomllib.loads(f"loss = {setting}")
            make_loss(TrainerConfig.model_validate(loss))
