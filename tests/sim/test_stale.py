"""The negative control of `benchmarks.stale_data`: its policy learns as the losses say, and stale data does harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from agentrl.config.sections import TrainerConfig
from tests.simulation.reuse import Logits, Plan, Row, gradient, play
from tests.simulation.stale import LossTrainer, settle

pytestmark = pytest.mark.sim


class Compared(LossTrainer):
    """Compares each ascent with the formula of `truncated` in numpy."""

    differences: ClassVar[list[float]]

    def _ascent(self, rows: Sequence[Row]) -> Logits:
        ascent = super()._ascent(rows)
        expected = gradient(self._logits, rows, exact=False)
        Compared.differences.append(float(np.abs(ascent - expected).max() / np.abs(expected).max()))
        return ascent


def test_the_default_loss_moves_the_table_as_its_formula_does() -> None:
    Compared.differences = []
    plan = Plan(rate=0.4, fresh=16, staleness=1, tool_s=0.1, limit_s=2.5)
    play(plan, seed=0, trainer_class=Compared, section=TrainerConfig())
    assert len(Compared.differences) > 3
    assert max(Compared.differences) < 1e-5


def test_stale_data_without_correction_does_harm() -> None:
    def mean(loss: str, staleness: int) -> float:
        section = TrainerConfig.model_validate({"loss": {"name": loss}})
        return settle(section, staleness=staleness, rate=0.4, seed=0, versions=24).mean

    assert mean("reinforce", 4) < 0.9 * mean("reinforce", 0)
