"""The totals of a worker, whose process may be replaced."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.cluster import worker_wire as wire
from agentrl.cluster.worker_process import WorkerProcess
from agentrl.core.clock import SystemClock


class NoProcesses:
    """A placement whose processes never start, and the owner of the worker."""

    gpus = ()

    async def start(self, program: object) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None: ...

    def lost(self, process: WorkerProcess) -> None: ...


def test_the_totals_of_a_worker_never_fall_when_its_process_is_replaced() -> None:
    async def main() -> None:
        setup = wire.WorkerSetup(0, {}, "", {}, {}, (), None, {}, {})  # type: ignore[arg-type]
        worker = WorkerProcess(
            *(setup, NoProcesses()),  # type: ignore[arg-type]
            placement=NoProcesses(),
            receiver=None,
            attempts=3,
            silence_s=60.0,
            clock=SystemClock(),
            tell=lambda line: None,
        )
        worker._on_message(wire.WorkerHeartbeat(activity={"turns": 40.0, "engine": 9.0, "episodes/most": 8.0}))
        await worker.died("was killed")
        assert worker.activity == {"turns": 40.0, "engine": 9.0}, "no episode is in progress"
        worker._on_message(wire.WorkerHeartbeat(activity={}))
        worker._on_message(wire.WorkerHeartbeat(activity={"turns": 2.0, "engine": 0.5, "episodes/most": 3.0}))
        assert worker.activity == {"turns": 42.0, "engine": 9.5, "episodes/most": 3.0}
        await worker.died("was killed")
        assert worker.activity == {"turns": 42.0, "engine": 9.5}
        await worker.close()

    asyncio.run(main())
