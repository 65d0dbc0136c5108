"""Agents that block their threads run at once, stop nobody else, and let a run end."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.app.stops import INTERRUPTED
from tests.support.blocking_agents import AGENTS, HANGING, STEPS_MEANWHILE, stop_run

pytestmark = [pytest.mark.e2e]


def test_synchronous_agents_run_at_once_and_those_that_hang_stop_nobody(tmp_path: Path) -> None:
    outcome = stop_run(tmp_path)
    assert outcome.agents_at_once == AGENTS
    assert AGENTS <= outcome.threads <= AGENTS + 8  # agentrl's own calls included
    assert outcome.steps >= STEPS_MEANWHILE
    assert outcome.status == INTERRUPTED
    left = f"WARNING {HANGING} calls in threads did not end, and will end with this process: "
    assert left in outcome.output
    assert f" in leave ({HANGING} calls)" in outcome.output
