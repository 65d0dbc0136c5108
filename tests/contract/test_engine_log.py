"""What an engine's process says goes to a file, where a death and a bug are looked up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.core.errors import EngineError
from agentrl.engines.process import ChildProgram, LocalPlacement
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
