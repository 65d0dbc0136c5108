"""What an engine's process says goes to a file, where a death and a bug are looked up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import EngineError
from agentrl.engines.process import LOG_VARIABLE, ChildProgram, LocalPlacement
from agentrl.engines.remote.client import ProcessEngine
from tests.contract.engine_kinds import START
from tests.contract.test_engine_process import NoWaiting, kill, weights_of


def test_what_its_process_says_goes_to_the_log_where_a_death_and_a_bug_are_looked_up(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        log = tmp_path / "engine.log"
        log.write_text("the life before\n")
        program = ChildProgram("tests.contract.scripted_program:FaultyEngine", {})
        engine = ProcessEngine(program, START, placement=LocalPlacement(log), clock=NoWaiting(), tell=said.append)
        await engine.ready()
        with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
            await engine.serve([weights_of(1)])
        kill(engine)
        while not said:
            await asyncio.sleep(0.01)
        await engine.close()
        assert said[0].startswith(f"the engine's process died (SIGKILL); its output is in {log}; it is restarted")
        first, *others = log.read_text().splitlines()
        assert first == "the life before"
        assert 'raise ZeroDivisionError("a bug")' in " ".join(others)

    asyncio.run(main())


LOGGED = """\
Traceback (most recent call last):
ValueError: an older one
(EngineCore pid=7) ERROR [core.py:1] RuntimeError: no kernel for head_dim 16
(EngineCore pid=7) ERROR [core.py:1] vllm.EngineDeadError: EngineCore encountered an issue. See above.
"""
ASSERTION = """\
(EngineCore pid=7) ERROR [core.py:1]     assert weight.dtype in [torch.float16, torch.bfloat16]
(EngineCore pid=7) ERROR [core.py:1]            ^^^^^^^^^^^^
(EngineCore pid=7) ERROR [core.py:1] AssertionError
"""


@pytest.mark.parametrize(
    ("logged", "error"),
    [
        (LOGGED, "RuntimeError: no kernel for head_dim 16"),
        (ASSERTION, "AssertionError: assert weight.dtype in [torch.float16, torch.bfloat16]"),
        ("Killed\n", "no error was logged"),
    ],
)
def test_the_cause_of_a_death_is_found_in_the_log(tmp_path: Path, logged: str, error: str) -> None:
    log = tmp_path / "engine.log"
    log.write_text("x" * 100_000 + "\n" + logged)
    code = "from agentrl.engines.process import logged_error; print(logged_error(ignore='EngineDeadError'))"
    for is_log, expected in (("1", f"{error}; its output is in {log}"), ("", "its output above has the cause")):
        with log.open("a") as errors:
            output = subprocess.check_output(
                [sys.executable, "-c", code], stderr=errors, text=True, env={**os.environ, LOG_VARIABLE: is_log}
            )
        assert output.strip() == expected
