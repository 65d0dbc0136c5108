"""Engines of tests run in the process of their run, because one of their own costs seconds to start.
`tests/e2e/test_own_process.py` has the default."""

from __future__ import annotations

from agentrl.config import run

run.CORES_FOR_TWO = 1 << 20
