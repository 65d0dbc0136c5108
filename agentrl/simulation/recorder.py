"""Records of a simulation while it runs: its episodes, steps and engines, as little as is measured later.

`Recorder` holds the records, `RecordingJournal` and `RecordingEngine` fill it. The journal keeps nothing else: a
simulated week is not written to disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.errors import CheckFailedError
from agentrl.journal.port import Pruned
from agentrl.simulation.engine import EmulatedEngine

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import (
        BaselineSet,
        EpisodeHeader,
        EpisodeSpec,
        ForkPoint,
        PolicyVersion,
        Proposal,
        WeightsRef,
    )
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import PruneRule, StepRow
    from agentrl.orchestrator.loop import Orchestrator
    from agentrl.simulation.engine import EmulatedSession
    from agentrl.simulation.plan import Plan


class Step(NamedTuple):
    """An optimizer step that was taken."""

    policy: str
    at: float
    """When its version was there."""
    seconds: float
    units: tuple[str, ...]
    """Episodes."""
    engine: tuple[float, float, float, float]
    """Totals over all engines so far: slot seconds in use, capacity seconds in use, seconds in which anything ran, and
    sampled blocks."""


class Snapshot(NamedTuple):
    """The state of the simulation at one moment."""

    at: float
    full_seconds: float
    held: str | None
    """The reason that held admission back; None if there was none."""
    waits_for_memory: bool
    """Whether calls waited for room in the engines' memory."""


class StartedEpisode(NamedTuple):
    """An episode."""

    environment: str
    at: float
    steps: Mapping[str, int]
    """Steps each policy had taken."""


class Recorder:
    """Lengths are in blocks of `grain` tokens."""

    def __init__(self, plan: Plan, grain: int) -> None:
        self.plan = plan
        self.grain = grain
        self.engines: list[RecordingEngine] = []
        self.begun: dict[str, StartedEpisode] = {}
        self.ended: dict[str, float] = {}
        self.lengths: dict[str, int] = {}
        """Sampled blocks of committed episodes."""
        self.spans: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        """By episode, then by version: sampled."""
        self.asked: Counter[str] = Counter()
        """Tokens to sample, by episode, of calls that run or wait for a slot."""
        self.contexts: Counter[str] = Counter()
        """By episode: of all its conversations, what was said to the policies and by them."""
        self.steps: list[Step] = []
        self.snapshots: list[Snapshot] = []
        self.taken: Counter[str] = Counter()
        """Steps, by policy."""
        self.wasted = 0
        """Sampled for units that were dropped."""
        self.exceeded = 0.0
        """Trajectories trained beyond `max_lag`."""

    def busy(self) -> tuple[float, float, float, float]:
        """See `Step.engine`."""
        active = sum(engine.busy_seconds() for engine in self.engines)
        return (
            sum(engine.slot_seconds for engine in self.engines),
            sum(engine.full_seconds for engine in self.engines),
            active,
            sum(engine.sampled for engine in self.engines),
        )

    def record_snapshot(self, held: str | None, *, waits_for_memory: bool) -> None:
        """Note how things stand."""
        self.snapshots.append(Snapshot(asyncio.get_running_loop().time(), self.busy()[1], held, waits_for_memory))


class NullTurnLog:
    """A turn log that stores nothing; see `TurnLog`."""

    name = "turns-0.db"

    def append(self, entry: JournalEntry) -> None:
        """Forget an entry."""

    async def flush(self) -> None:
        """Nothing is written."""

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Nothing was kept."""
        return []

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Nothing was kept."""

    def append_partial(self, entry: JournalEntry) -> None:
        """Forget it."""

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Nothing was kept."""

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Nothing was kept."""
        return []

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Nothing was kept."""
        return []


class NullJournal:
    """See `JournalStore`; a commit yields once, as a disk would."""

    def __init__(self) -> None:
        self._log = NullTurnLog()

    def turn_log(self, worker: str) -> NullTurnLog:
        """The one partition."""
        return self._log

    def admit(self, *specs: EpisodeSpec) -> None:
        """Forget it, as all that follows."""

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Yield."""
        await asyncio.sleep(0)

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """A unit will not be trained."""

    def record_proposal(self, proposal: Proposal) -> None:
        """A proposal."""

    def record_baselines(self, baselines: BaselineSet) -> None:
        """The baseline set of a group."""

    def record_version(self, weights: WeightsRef, parent: PolicyVersion | None) -> None:
        """A version."""

    def record_step(self, row: StepRow) -> None:
        """A step."""

    def record_metrics(self, policy: str, step: int, values: Mapping[str, Any]) -> None:
        """Metrics."""

    async def prune(self, rule: PruneRule, *, stopped: Callable[[], bool] = lambda: False) -> Pruned:
        """Nothing is kept."""
        return Pruned(rule=str(rule))

    async def flush(self) -> None:
        """Nothing is written."""

    async def close(self) -> None:
        """Nothing to release."""


class RecordingJournal(NullJournal):
    """Notes what the loop records, and stops it after the last step.

    Args:
        recorder: where.
        steps: of the first policy that learns; None: the loop ends by itself.
    """

    def __init__(self, recorder: Recorder, steps: int | None) -> None:
        super().__init__()
        self._recorder = recorder
        self._steps = steps
        self._first = next(iter(recorder.plan.trained))
        self.orchestrator: Orchestrator | None = None

    def admit(self, *specs: EpisodeSpec) -> None:
        """Note when."""
        now, taken = asyncio.get_running_loop().time(), dict(self._recorder.taken)
        for spec in specs:
            name = spec.environment.rpartition(":")[2]
            self._recorder.begun[spec.episode_id] = StartedEpisode(name, now, taken)

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Note the length.

        Raises:
            CheckFailedError: an episode was dropped: nothing here can fail.
        """
        if not header.committed and not self._is_over():
            raise CheckFailedError(f"episode {spec.episode_id} was dropped ({header.drop_reason}): {detail}")
        await super().commit_episode(spec, header, digest, metrics, detail)
        self._recorder.lengths[spec.episode_id] = header.tokens
        self._recorder.ended[spec.episode_id] = asyncio.get_running_loop().time()

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """Note what was sampled for nothing."""
        if not self._is_over():
            self._recorder.wasted += self._recorder.lengths[episode_id]

    def record_step(self, row: StepRow) -> None:
        """Record the time and the inputs of a step."""
        recorder, policy = self._recorder, row.version.policy
        units = tuple(unit.episode_id for unit in row.batch.units)
        now = asyncio.get_running_loop().time()
        recorder.steps.append(Step(policy, now, row.report.seconds, units, recorder.busy()))
        recorder.taken[policy] = row.version.step
        if self._is_over() and self.orchestrator is not None:
            self.orchestrator.stop()

    def record_metrics(self, policy: str, step: int, values: Mapping[str, Any]) -> None:
        """Note what a limit on lag did not keep."""
        self._recorder.exceeded += values.get("staleness/exceeded", 0.0)

    def _is_over(self) -> bool:
        return self._steps is not None and self._recorder.taken[self._first] >= self._steps


class RecordingEngine(EmulatedEngine):
    """Notes which versions sampled an episode, and how much it is to say."""

    def __init__(self, recorder: Recorder, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._recorder = recorder

    def submit(self, session: EmulatedSession, request: GenerateRequest) -> Any:
        """Like the base class; records the call."""
        call = super().submit(session, request)
        self._recorder.asked[episode_of(request)] += call.length
        return call

    def finish(self, call: Any) -> Any:
        """Like the base class; records the call."""
        before = call.session.context
        completion = super().finish(call)
        episode = episode_of(call.request)
        self._recorder.contexts[episode] += call.session.context - before
        by_version = self._recorder.spans[episode]
        for span in completion.spans:
            by_version[span.version.policy, span.version.step] += span.stop - span.start
        if call.reason == "abort":  # what it still lacks is asked for again
            self._recorder.asked[episode] -= call.length - len(completion.token_ids)
        return completion


def episode_of(request: GenerateRequest) -> str:
    """The episode of a call, from its request id: episode, attempt and call id."""
    return request.request_id.rsplit(".", 2)[0]
