"""One running attempt of an episode, its settings and services, and the parking of episodes.

`runner.py` makes a `LiveEpisode` per attempt; its agents, resources and context share it. It sums the episode's
`metrics`, and pauses its `TimeLimit` while the episode is parked or its engine is gone. `Parking` delays the calls of
parked episodes; which episodes to park is the scheduler's decision.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import msgspec

from agentrl.core.errors import EpisodeError, is_user_code
from agentrl.core.event_loop import frame_location, suspended_frames
from agentrl.core.ports import SamplingParams
from agentrl.environment.context import EpisodeLimits
from agentrl.journal.entries import SeatSettings
from agentrl.rollout.calls.journal import running_strand

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.core.ports import ChatFormat, EpisodeHost, Sampler, Scorer
    from agentrl.core.records import EpisodeSpec, PolicyVersion, Turn
    from agentrl.environment.context import Verdict
    from agentrl.environment.environment import OnCodeChange
    from agentrl.gateway.server import Gateway
    from agentrl.observe.bottleneck import Activity, ActivityClock
    from agentrl.rollout.calls.journal import CallJournal, Strand
    from agentrl.rollout.turn_entries import EpisodePartialTurns


GatewaySampling = Literal["agent", "run", "refuse", "check"]
"""As `GatewayConfig.sampling`. `check`: as `agent`, and a request is answered without the fields that would be refused,
so that a check finds all of them at once."""

AS_THE_RUN: Mapping[str, PolicySettings] = MappingProxyType({})
"""Value of `LiveEpisode.began_under` for an episode that began with the run's current settings."""

GRACE_S = 5.0
"""Seconds that a cancelled program has to end before it is abandoned."""

_TIMER_CONTEXT = contextvars.Context()
"""Context of all time limits' timers, which would otherwise each copy the context of their task."""

TOOL_TIMEOUT_S = 30.0
"""Default time limit of tools."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Chat format and settings of the seats that a policy holds."""

    chat_format: ChatFormat
    seat: SeatSettings
    """The settings, as an episode's first entry records them."""
    is_external: bool = False
    """Whether another engine than the run's samples the policy, so that it uses none of the engine's memory."""

    @cached_property
    def sampling(self) -> SamplingParams:
        """The settings that the engine gets."""
        seat = self.seat
        return SamplingParams(
            max_tokens=seat.max_tokens,
            temperature=seat.temperature,
            top_k=seat.top_k,
            top_p=seat.top_p,
            min_p=seat.min_p,
            stop_token_ids=self.chat_format.stop_token_ids,
        )

    @cached_property
    def limits(self) -> EpisodeLimits:
        """The limits that the environment sees."""
        seat = self.seat
        return EpisodeLimits(max_turns=seat.max_turns, max_tokens=seat.max_tokens, max_context=seat.max_context)

    def as_recorded(self, began: SeatSettings) -> PolicySettings:
        """Return the policy with the settings that an episode began with; a context limit lowered since then still
        applies."""
        max_context = min(began.max_context, self.seat.max_context)
        return replace(self, seat=msgspec.structs.replace(began, max_context=max_context))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings that every episode of a worker shares."""

    seat: SeatSettings
    policies: Mapping[str, PolicySettings] = field(default_factory=dict)
    """Settings of policies that override the one above or the worker's chat format."""
    tool_timeout_s: float = TOOL_TIMEOUT_S
    episode_timeout_s: float
    max_staleness: Mapping[str, int] = field(default_factory=dict)
    """Bound of each policy on staleness, for the order in which parked episodes resume; 0 if absent."""
    on_code_change: OnCodeChange | None = None
    """Treatment of recorded episodes whose environment was edited; None: as the environment says."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each named reward; if empty, each weighs 1."""
    compares_turns: bool = False
    """Whether the headers of episodes have the states of their turns."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    """Scorers, keyed by name."""
    scored: Collection[str] = ()
    """Policies whose turns and episodes are scored without being asked for."""
    missing_scorer: Callable[[str], Scorer] | None = None
    """Makes a scorer for a name that is not among `scorers`, for checks of environments without a run."""
    evaluation_sampling: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Fields of `SeatSettings` that differ in evaluations, keyed by policy."""
    gateway_sampling: GatewaySampling = "agent"
    """Whose sampling parameters the calls of external agents have; see `GatewayConfig.sampling`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerServices:
    """The engine, host, clock and settings that the episodes of a worker share."""

    engine: Sampler
    default: PolicySettings
    """Settings of policies without overrides."""
    host: EpisodeHost
    clock: Clock
    settings: RolloutSettings
    parking: Parking
    gateway: Gateway
    activity: ActivityClock

    def policy_settings(self, policy: str) -> PolicySettings:
        """Return the settings of a policy."""
        return self.settings.policies.get(policy) or self.default


class EpisodeAgent(Protocol):
    """The interface of an episode's agents; see `turn.recorder.TurnRecorder`."""

    seat: str
    index: int
    policy: str
    counts: dict[str, float]
    """Share of the episode's `metrics` that belongs to the agent."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""
        ...

    def suspend(self) -> None:
        """Cut the running call and release the engine's resources."""
        ...

    def versions(self) -> Iterable[PolicyVersion]:
        """The versions that sampled the agent's tokens."""
        ...

    def close(self) -> None:
        """Give back what the engine holds. Idempotent."""
        ...


class EpisodeScores(Protocol):
    """The interface of an attempt's scores; see `scores.LiveScores`."""

    def start_per_turn(self, agent: Any) -> None:
        """Ask for the scores of an agent's newest turn."""
        ...

    def ask(self, scorer: str, agent: Any) -> Verdict:
        """Ask a scorer for the score of an agent's newest turn."""
        ...

    async def arrived(self) -> None:
        """Wait for the requests in flight."""
        ...

    async def settle(self) -> None:
        """Wait for all scores, and credit the agents with them."""
        ...

    def close(self) -> None:
        """Give up the requests in flight. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """A running attempt of an episode."""

    spec: EpisodeSpec
    journal: CallJournal
    services: WorkerServices
    partials: EpisodePartialTurns
    began_under: Mapping[str, PolicySettings] = field(default_factory=lambda: AS_THE_RUN)
    """Settings the episode began with, if they differ from the run's now, keyed by seat, and by "" for `ctx.limits`."""
    agents: Sequence[EpisodeAgent] = ()
    limit: TimeLimit | None = None
    """Time limit of the program, while it runs."""
    external: asyncio.Task[Any] | None = None
    """Task of the external agent, while it runs."""
    scores: EpisodeScores | None = None
    """Scores of the attempt; None if there are no scorers, and no scores in its journal."""
    note: str = ""
    """Notes on a committed episode: a failed program, or how its external agent departed from an earlier attempt."""
    _counts: dict[str, float] | None = None
    """Metrics that belong to no particular agent."""
    num_waits: int = 0
    """Number of waits that `waiting_for` counts now."""
    is_open: bool = True

    def __post_init__(self) -> None:
        self.services.activity.change("environment", 1)

    @property
    def name(self) -> str:
        """Episode and attempt, for messages and session ids."""
        return f"{self.spec.episode_id}.{self.spec.attempt}"

    @property
    def location(self) -> str:
        """Episode and its last turn, for error messages."""
        agent = self.speaker() or next((agent for agent in self.agents if agent.turns), None)  # requested, if external
        position = (
            "before any turn" if agent is None else f"after a turn of seat {agent.seat!r}, policy {agent.policy!r}"
        )
        return f"episode {self.name}, {position}"

    @property
    def limits(self) -> EpisodeLimits:
        """The limits that `ctx.limits` shows."""
        return (self.began_under.get("") or self.services.default).limits

    def policy_settings(self, seat: str) -> PolicySettings:
        """Return the settings of the policy that holds a seat."""
        return self.began_under.get(seat) or self.services.policy_settings(self.spec.seats[seat].policy)

    def waits_at(self) -> str:
        """Return the innermost line of the user's code at which the program waits, as `FILE:LINE in FUNCTION`; "" if
        unknown, such as in a command."""
        for code in (None if self.external is None else self.external.get_coro(), self.journal.program):
            if of_user := [frame for frame in suspended_frames(code) if is_user_code(frame.f_code.co_filename)]:
                return frame_location(of_user[-1])
        return ""

    def add_note(self, text: str) -> None:
        """Add a sentence to `note`."""
        self.note = f"{self.note}; {text}" if self.note else text

    def metric(self, name: str, value: float, agent: EpisodeAgent | None = None) -> None:
        """Add to a metric of the episode, or of one of its agents."""
        if agent is not None:
            counts = agent.counts
        else:
            counts = self._counts = self._counts or {}
        counts[name] = counts.get(name, 0.0) + float(value)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the episode's metrics, without those of its agents."""
        metrics = dict(self._counts or {})
        return metrics

    def waiting_for(self, activity: Activity) -> ActivityWait:
        """Count a wait of the program within the context; without any, it is in its own code and tools."""
        return ActivityWait(self, activity)

    def close(self) -> None:
        """Drop the agents, which refer to the episode, at the end of the attempt."""
        if self.is_open and not self.num_waits:
            self.services.activity.change("environment", -1)
        self.is_open = False
        self.agents = ()
        if self.scores is not None:
            self.scores.close()
            self.scores = None

    def speaker(self, strand: Strand | None = None) -> EpisodeAgent | None:
        """Return the agent that acted last on a strand; default: the running strand."""
        strand = strand or running_strand()
        return None if strand is None or strand.speaker is None else self.agents[strand.speaker]

    def deadline(self) -> float:
        """Return the policy's step at which the episode's oldest tokens become too old; infinite before the first
        token."""
        bounds = self.services.settings.max_staleness
        return min(
            (
                version.step + bounds.get(version.policy, 0)
                for agent in self.agents
                for version in agent.versions()
                if version.policy == agent.policy  # the age of an opponent's version does not matter
            ),
            default=float("inf"),
        )

    def suspend(self) -> None:
        """Cut the calls in flight, release the engine's resources, and pause the time limit."""
        self.metric("parked", 1.0)
        for agent in self.agents:
            agent.suspend()
        if self.limit is not None:
            self.limit.pause()

    def resume(self) -> None:
        """Resume the time limit."""
        if self.limit is not None:
            self.limit.resume()

    def time_limit_paused(self) -> AbstractContextManager[None]:
        """Pause the episode's time limit within the context, for waits that do not count."""
        return nullcontext() if self.limit is None else self.limit


class ActivityWait:
    """The context of `LiveEpisode.waiting_for`.

    A class, because every episode in flight holds one, and the context of a generator takes 350 bytes.
    """

    __slots__ = ("_activity", "_episode")

    def __init__(self, episode: LiveEpisode, activity: Activity) -> None:
        self._episode = episode
        self._activity = activity

    def __enter__(self) -> Self:
        episode = self._episode
        if episode.is_open and not episode.num_waits:
            episode.services.activity.switch("environment", self._activity)
        else:
            episode.services.activity.change(self._activity, 1)
        episode.num_waits += 1
        return self

    def __exit__(self, *_: object) -> None:
        episode = self._episode
        episode.num_waits -= 1
        if episode.is_open and not episode.num_waits:
            episode.services.activity.switch(self._activity, "environment")
        else:
            episode.services.activity.change(self._activity, -1)

    def count_turn(self, tokens: int) -> None:
        """Count the tokens of a call that has returned."""
        self._episode.services.activity.count_tokens(tokens)


class TimeLimit:
    """Ends a program that spends too many seconds without a turn.

    If its agents have acted, the call in flight raises `LimitReachedError`, and the episode is truncated as if it had
    no turn left. If no agent has acted, or the program hangs in its own code, the episode fails. A program that
    swallows its cancellation is abandoned.

    Paused time, also within a `with` statement, does not count. There is one timer per episode; if the deadline was
    postponed when it fires, it is set again.
    """

    __slots__ = (
        "_deadline",
        "_episode",
        "_grace",
        "_loop",
        "_pauses",
        "_remaining_s",
        "_seconds",
        "_timer",
        "_waits_at",
        "task",
    )

    def __init__(self, episode: LiveEpisode, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._episode = episode
        self.task = task
        self._grace: asyncio.TimerHandle | None = None
        self._waits_at = ""
        """Where the program waited when the time limit expired last."""
        self._loop = asyncio.get_running_loop()
        self._seconds = self._remaining_s = seconds
        self._pauses = 0
        self._deadline = self._loop.time() + seconds
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._look, context=_TIMER_CONTEXT)

    @property
    def is_cancelled(self) -> bool:
        """Whether the program's task was cancelled."""
        return bool(self.task.cancelling())

    def _error(self) -> EpisodeError:
        turns = sum(len(agent.turns) for agent in self._episode.agents)
        where = "outside ctx calls, so it cannot end as truncated" if turns else "before any turn"
        at = f"; it waited at {self._waits_at}" if self._waits_at else ""
        text = f"the episode took longer than {self._seconds:g} s without a turn, {where}{at}"
        return EpisodeError(text, reason="episode_timeout")

    def restart(self) -> None:
        """Restore the full time limit after a turn has ended."""
        self._remaining_s = self._seconds
        if not self._pauses:
            self._set_deadline()

    def pause(self) -> None:
        """Stop the clock; each `pause` needs a `resume`."""
        if not self._pauses:
            self._remaining_s = max(self._deadline - self._loop.time(), 0.0)
        self._pauses += 1

    def resume(self, *raised: object) -> None:
        """Let the clock run, unless another `pause` is open."""
        self._pauses -= 1
        if not self._pauses:
            self._set_deadline()

    __enter__, __exit__ = pause, resume

    def end(self) -> None:
        """Stop the timer after the program has ended."""
        self._episode.limit = None
        self._pauses += 1  # an abandoned program may continue
        for handle in filter(None, (self._timer, self._grace)):
            handle.cancel()
        for _ in range(self._episode.journal.cancellations):
            self.task.uncancel()

    def _set_deadline(self) -> None:
        self._deadline = self._loop.time() + self._remaining_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._look, context=_TIMER_CONTEXT)

    def _look(self) -> None:
        self._timer = None
        if self._pauses:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look, context=_TIMER_CONTEXT)
        else:
            self._on_expiry()

    def _on_expiry(self) -> None:
        """End the call in flight, or give the program up."""
        journal = self._episode.journal
        acted = any(agent.turns for agent in self._episode.agents)
        self._waits_at = self._episode.waits_at()
        if acted and journal.cut_calls(self._error()):
            if self._waits_at:
                self._episode.add_note(f"at the time limit, it waited at {self._waits_at}")
            self.restart()
        else:
            journal.fail(journal.cut_error or self._error())
        journal.cancellations += 1
        self.task.cancel()
        if self._grace is not None:
            self._grace.cancel()
        self._grace = self._loop.call_later(GRACE_S, self._end_of_grace)

    def _end_of_grace(self) -> None:
        journal = self._episode.journal
        if journal.failure is not None or journal.cut_error is not None:
            ignored = (
                f"run() was cancelled at its deadline, ignored the cancellation, and was abandoned {GRACE_S:g} s later"
            )
            journal.fail(EpisodeError(ignored, reason="episode_timeout"))
            journal.abandon()


class Parking:
    """Parks and unparks the episodes of one worker.

    A call of a parked episode waits. Episodes resume in deadline order and, within an episode, calls in the order of
    their ids. An episode stays parked through a retry, but only while it is in flight.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, LiveEpisode | None] = {}
        self.waiting: dict[str, list[tuple[str, asyncio.Future[None]]]] = {}
        """Waiting calls and their ids, keyed by parked episode."""

    def admit(self, episode_id: str) -> None:
        """Note that an episode is in flight, so that it can be parked."""
        self._in_flight[episode_id] = None

    def begin(self, episode_id: str, attempt: LiveEpisode) -> None:
        """Note the running attempt of an episode."""
        if episode_id in self._in_flight:
            self._in_flight[episode_id] = attempt
        if episode_id in self.waiting:
            attempt.suspend()

    def forget(self, episode_id: str) -> None:
        """Forget an episode that is no longer in flight."""
        self._in_flight.pop(episode_id, None)
        self.waiting.pop(episode_id, None)

    @property
    def parked(self) -> tuple[str, ...]:
        """Parked episodes, in the order in which they will resume."""
        return tuple(sorted(self.waiting, key=lambda episode_id: (self.deadline(episode_id), episode_id)))

    def park(self, episode_id: str) -> bool:
        if episode_id not in self._in_flight:
            return False
        if episode_id not in self.waiting:
            self.waiting[episode_id] = []
            attempt = self._in_flight[episode_id]
            if attempt is not None:
                attempt.suspend()
        return True

    async def wait_while_parked(self, episode_id: str, call_id: str) -> None:
        """Wait while the episode is parked."""
        while (gates := self.waiting.get(episode_id)) is not None:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gates.append((call_id, gate))
            await gate

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        episode_ids = self.parked[:count]
        for episode_id in episode_ids:
            self.resume(episode_id)
        return episode_ids

    def resume(self, episode_id: str) -> None:
        """Resume one parked episode."""
        attempt = self._in_flight.get(episode_id)
        if attempt is not None and episode_id in self.waiting:
            attempt.resume()
        for _, gate in sorted(self.waiting.pop(episode_id, []), key=lambda waiting: waiting[0]):
            if not gate.done():
                gate.set_result(None)

    def deadline(self, episode_id: str) -> float:
        attempt = self._in_flight.get(episode_id)
        return float("inf") if attempt is None else attempt.deadline()
