"""What a simulation notes while it runs, as little as is measured later: of episodes, of steps, of the engines."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.errors import CheckFailedError
from agentrl.simulation.engine import EmulatedEngine
from agentrl.simulation.journal import BriefJournal

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import EpisodeHeader, EpisodeSpec
    from agentrl.journal.port import StepRow
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
    """Of all engines until then: seconds of slots that ran, of capacity that was used, in which anything ran; blocks
    sampled."""


class Look(NamedTuple):
    """How things stood."""

    at: float
    full_seconds: float
    held: str | None
    """What held admission back."""
    no_room: bool
    """Whether calls waited for room in the engines' memory."""


class Begun(NamedTuple):
    """An episode."""

    environment: str
    at: float
    steps: Mapping[str, int]
    """Steps each policy had taken."""


class Account:
    """Lengths are in blocks of `grain` tokens."""

    def __init__(self, plan: Plan, grain: int) -> None:
        self.plan = plan
        self.grain = grain
        self.engines: list[CountingEngine] = []
        self.begun: dict[str, Begun] = {}
        self.ended: dict[str, float] = {}
        self.lengths: dict[str, int] = {}
        """Of committed episodes, sampled."""
        self.spans: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        """By episode, then by version: sampled."""
        self.asked: Counter[str] = Counter()
        """By episode, begun or waiting for a slot: what it is to sample."""
        self.contexts: Counter[str] = Counter()
        """By episode: of all its conversations, what was said to the policies and by them."""
        self.steps: list[Step] = []
        self.looks: list[Look] = []
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

    def look(self, held: str | None, *, no_room: bool) -> None:
        """Note how things stand."""
        self.looks.append(Look(asyncio.get_running_loop().time(), self.busy()[1], held, no_room))


class ObservedJournal(BriefJournal):
    """Notes what the loop records, and stops it after the last step.

    Args:
        account: where.
        steps: of the first policy that learns; None: the loop ends by itself.
    """

    def __init__(self, account: Account, steps: int | None) -> None:
        super().__init__()
        self._account = account
        self._steps = steps
        self._first = next(iter(account.plan.trained))
        self.orchestrator: Orchestrator | None = None

    def admit(self, *specs: EpisodeSpec) -> None:
        """Note when."""
        now, taken = asyncio.get_running_loop().time(), dict(self._account.taken)
        for spec in specs:
            name = spec.environment.rpartition(":")[2]
            self._account.begun[spec.episode_id] = Begun(name, now, taken)

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
        self._account.lengths[spec.episode_id] = header.tokens
        self._account.ended[spec.episode_id] = asyncio.get_running_loop().time()

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """Note what was sampled for nothing."""
        if not self._is_over():
            self._account.wasted += self._account.lengths[episode_id]

    def record_step(self, row: StepRow) -> None:
        """Note when it was, and what it was fed."""
        account, policy = self._account, row.version.policy
        units = tuple(unit.episode_id for unit in row.batch.units)
        now = asyncio.get_running_loop().time()
        account.steps.append(Step(policy, now, row.report.seconds, units, account.busy()))
        account.taken[policy] = row.version.step
        if self._is_over() and self.orchestrator is not None:
            self.orchestrator.stop()

    def record_metrics(self, policy: str, step: int, values: Mapping[str, Any]) -> None:
        """Note what a limit on lag did not keep."""
        self._account.exceeded += values.get("staleness/exceeded", 0.0)

    def _is_over(self) -> bool:
        return self._steps is not None and self._account.taken[self._first] >= self._steps


class CountingEngine(EmulatedEngine):
    """Notes which versions sampled an episode, and how much it is to say."""

    def __init__(self, account: Account, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._account = account

    def submit(self, session: EmulatedSession, request: GenerateRequest) -> Any:
        """As it is, with a note."""
        call = super().submit(session, request)
        self._account.asked[episode_of(request)] += call.length
        return call

    def finish(self, call: Any) -> Any:
        """As it is, with a note."""
        before = call.session.context
        completion = super().finish(call)
        episode = episode_of(call.request)
        self._account.contexts[episode] += call.session.context - before
        by_version = self._account.spans[episode]
        for span in completion.spans:
            by_version[span.version.policy, span.version.step] += span.stop - span.start
        if call.reason == "abort":  # what it still lacks is asked for again
            self._account.asked[episode] -= call.length - len(completion.token_ids)
        return completion


def episode_of(request: GenerateRequest) -> str:
    """Whose call it is: calls are named by episode, attempt and call id."""
    return request.request_id.rsplit(".", 2)[0]
