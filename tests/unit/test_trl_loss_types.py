"""Every `loss_type` of TRL is in docs/how-to/coming_from.md: as settings that compute the same, or as not built in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest

from agentrl.config.sections import TrainerConfig
from agentrl.learn.losses import make_loss
from tests.loss_oracle import compared, recorded

GRPO = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
OTHERS = {
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),  # DPO; the first three are online DPO's, too
    *("simpo", "alphapo", "kto", "apo_zero_unpaired", "nll", "dft", "chunked_nll"),
}
"""The choices of `loss_type` in the configurations of TRL 1.16.0."""


def rows(repository: Path) -> dict[str, str]:
    """The tables' second column by each name in the first."""
    text = (repository / "docs/how-to/coming_from.md").read_text(encoding="utf-8")
    part = text[text.index("Values of `GRPOConfig.loss_type`") : text.index("## Tinker")]
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
        assert settings or what.startswith("not built in"), name
        assert settings or name not in GRPO
        for setting in settings:
            loss = tomllib.loads(f"loss = {setting}")
            make_loss(TrainerConfig.model_validate(loss))


@pytest.fixture(scope="module")
def trl(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with TRL from the package index and, for all that TRL needs and has here, this environment's packages."""
    environment = tmp_path_factory.mktemp("trl")
    venv.create(environment, with_pip=False)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "-c", str(repository / "constraints.txt"), "trl==1.16.0"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"TRL cannot be installed: {installed.stderr}")
    return python


@pytest.mark.exhaustive
def test_pasted_settings_compute_the_losses_of_trl(trl: Path, repository: Path) -> None:
    rows_of_step = recorded("trl")["rows"]
    lengths = np.array([len(row["logprobs"]) for row in rows_of_step])
    cases = {}
    for line in (repository / "docs/how-to/coming_from.md").read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| `(\w+)`(.*?) \| `(\{ name = .*?\})`", line)
        if found and found[1] in GRPO:
            options = tomllib.loads("\n".join(re.findall(r"`(\w+ = .*?)`", found[2])))
            cases[found[1]] = ({"loss_type": found[1], **options}, tomllib.loads(f"loss = {found[3]}")["loss"])
    assert set(cases) == GRPO
    asked = json.dumps({"rows": rows_of_step, "configs": [config for config, _ in cases.values()]})
    command = [str(trl), str(repository / "tests" / "trl_losses.py"), str(repository / "environments/calculator/model")]
    answered = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert answered.returncode == 0, answered.stderr
    for (name, (_, loss)), theirs in zip(cases.items(), json.loads(answered.stdout.splitlines()[-1]), strict=True):
        normalizer = TrainerConfig.model_validate({"loss": loss}).loss.normalizer
        weights = {"tokens": np.full(lengths.sum(), 1 / lengths.sum())}.get(normalizer)
        if normalizer == "sequences":
            weights = np.repeat(1 / (len(lengths) * lengths), lengths)
        elif weights is None:
            weights = np.full(lengths.sum(), 1 / (len(lengths) * normalizer))
        errors = compared(name, loss, theirs, rows_of_step, weights)
        assert max(errors.values()) < 1e-6, errors
