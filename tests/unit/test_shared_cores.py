"""How many threads the engine and the trainer of one process use."""

from __future__ import annotations

from agentrl.engines.shared_cores import computing, threads_now


def test_parts_that_overlap_divide_the_threads() -> None:
    with computing():
        assert threads_now(8) == 8
        with computing():
            assert threads_now(8) == 4
            assert threads_now(1) == 1
        assert threads_now(8) == 8
    assert threads_now(8) == 8
