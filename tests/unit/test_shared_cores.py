"""How many threads the engine and the trainer of one process use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentrl.engines.shared_cores import computing, threads_now

if TYPE_CHECKING:
    import pytest


def test_parts_that_overlap_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    with computing():
        assert threads_now(8) == 8
        with computing():
            assert threads_now(8) == 4
            assert threads_now(4) == 4, "half of the cores already"
            assert threads_now(1) == 1
            with computing():
                assert threads_now(4) == 2
        assert threads_now(8) == 8
    assert threads_now(8) == 8
