"""Evaluation beside training: held-out tasks at pinned versions, outside buffer and ledger.

Invariants: training never waits for an evaluation, nor does a stop; at most one evaluation runs at a time, and one that
would begin meanwhile is left out; episodes that were dropped are counted, never scored as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.core.errors import CheckFailedError
from agentrl.core.ports import Engine, Observer
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task, WeightsRef
from agentrl.journal.port import JournalStore
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.signal import Signal


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Runs evaluations of one run, one after another."""

    tasks: Sequence[Task]
    dispatcher: Dispatcher
    engine: Engine
    store: JournalStore
    observer: Observer
    signal: Signal
    pinned: list[PolicyVersion] = field(default_factory=list)
    """What the running evaluation is pinned to: kept served for it, and loaded again by an engine that is replaced."""
    _busy: bool = False

    async def beside(self, weights: Mapping[str, WeightsRef], stopping: Callable[[], bool]) -> None:
        """Evaluate the newest versions, which are kept served for it while training goes on; nothing if one is running.

        `weights` is read at the moment each is kept: the engine would take an older one for an update.
        """
        if self._busy:
            return
        self._busy = True
        try:
            for policy in list(weights):
                published = weights[policy]
                await self.engine.update(published, keep=True)
                self.pinned.append(published.version)
            await self.now({version.policy: version for version in self.pinned}, stopping, pinned=True)
        finally:
            for version in self.pinned:
                self.engine.release(version)
            self.pinned.clear()
            self._busy = False

    async def now(
        self, versions: Mapping[str, PolicyVersion], stopping: Callable[[], bool], *, pinned: bool = False
    ) -> None:
        """Evaluate the current versions and wait for the result, or for a stop.

        Raises:
            CheckFailedError: every episode was dropped.
        """
        loop = asyncio.get_running_loop()
        running = loop.create_task(self.dispatcher.evaluate(self.tasks, versions if pinned else {}), name="evaluate")
        running.add_done_callback(lambda _: self.signal.notify())
        try:
            await self.signal.wait_for(lambda: running.done() or stopping())
            if not running.done():
                return
            metrics = evaluation_metrics(running.result())
        finally:
            running.cancel()
        for policy, version in versions.items():
            self.store.record_metrics(policy, version.step, metrics)
        self.observer.on_evaluation(versions, metrics)


def evaluation_metrics(headers: Sequence[EpisodeHeader]) -> dict[str, float]:
    """Mean reward, turns and tokens over the committed episodes, and how many were not.

    Raises:
        CheckFailedError: none was committed.
    """
    committed = [header for header in headers if header.committed]
    if not committed:
        raise CheckFailedError(
            f"evaluation: all {len(headers)} episodes were dropped, {headers[0].episode_id} because of "
            f"{headers[0].drop_reason}; `agentrl episode show` has the details"
        )
    count = len(committed)
    return {
        "evaluation/reward": sum(header.reward or 0.0 for header in committed) / count,
        "evaluation/turns": sum(header.turns for header in committed) / count,
        "evaluation/tokens": sum(header.tokens for header in committed) / count,
        "evaluation/episodes": float(count),
        "evaluation/dropped": float(len(headers) - count),
    }
