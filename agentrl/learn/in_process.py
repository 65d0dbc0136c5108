"""The trainer port in this process: one thread that computes, an event loop that never waits for it.

For tests, notebooks and small runs; `cluster.trainer_pool` is the same behind Ray. Owns: the thread. torch releases the
interpreter lock in its kernels, so the loop runs on meanwhile. Invariant: calls run one at a time, in the order made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from agentrl.config.run import RunConfig
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.training_records import StepReport, TrainBatch
from agentrl.credit.samples import ReadUnits
from agentrl.learn.trainer import PolicyTrainer

P = ParamSpec("P")
T = TypeVar("T")


class InProcessTrainer:
    """`core.ports.Trainer` over a `PolicyTrainer` in a worker thread."""

    def __init__(self, config: RunConfig, run_directory: Path, *, read: ReadUnits | None = None) -> None:
        """See `PolicyTrainer`."""
        self._trainer = PolicyTrainer(config, run_directory, read=read)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(function, *args, **kwargs))

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        """See `PolicyTrainer.start`."""
        return await self._call(self._trainer.start, None if resume_from is None else Path(resume_from))

    async def forward_backward(self, batch: TrainBatch) -> None:
        """See `PolicyTrainer.forward_backward`."""
        await self._call(self._trainer.forward_backward, batch)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """See `PolicyTrainer.optim_step`."""
        return await self._call(self._trainer.optim_step, policy, step_id)

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """See `PolicyTrainer.publish`."""
        return await self._call(self._trainer.publish, policy, version)

    async def save(self, directory: str) -> None:
        """See `PolicyTrainer.save`."""
        await self._call(self._trainer.save, Path(directory))

    async def close(self) -> None:
        """Let the call in progress end, then stop the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
