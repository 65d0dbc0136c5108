"""The production loop in virtual time, over shuffled schedules."""

from __future__ import annotations

import os

MANY_SEEDS = int(os.environ.get("AGENTRL_SIM_SEEDS", "0")) >= 100
"""Whether this is `make sim`, where tests that draw points of a run try more of them."""
