"""One attempt of one episode: make the environment, run its program over the journal, commit what happened.

`EpisodeRunner.run` owns an attempt from the first entry to the committed header; `agent.py` beside it is the engine
call every turn goes through. Neither knows who scheduled the episode or who will train on it.

Invariants:
1. Each act passes through `CallJournal`: recorded acts are compared, new ones performed and appended.
2. A header is returned only after the episode's entries and its commit are on disk.
3. A limit ends an episode as truncated and committed; an error raises, and the worker decides between retry and drop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError, GlobalRandomError, JournalError
from agentrl.core.ports import ChatFormat, Commits, EpisodeHost, Sampler
from agentrl.core.records import (
    DataLocation,
    EpisodeHeader,
    EpisodeSpec,
    StopReason,
    dropped_header,
)
from agentrl.environment.base import Environment, LimitReachedError, valid_unicode
from agentrl.journal.entries import Begin, JournalEntry
from agentrl.journal.forks import edits_of
from agentrl.journal.port import TurnLog
from agentrl.rollout.branches import current_branch
from agentrl.rollout.calls import CallJournal
from agentrl.rollout.context import LiveContext
from agentrl.rollout.endings import end_if_forked, of_the_episode
from agentrl.rollout.episode import LiveEpisode, RolloutSettings, Services
from agentrl.rollout.gathering import played
from agentrl.rollout.parking import Parking
from agentrl.rollout.partials import EpisodePartials
from agentrl.rollout.room import room_of

GRACE_S = 5.0
"""How long a program that was cancelled may take to end, before it is left behind."""


class EpisodeRunner:
    """Runs attempts of episodes for one worker."""

    def __init__(
        self,
        *,
        engine: Sampler,
        chat_format: ChatFormat,
        store: Commits,
        log: TurnLog,
        host: EpisodeHost,
        clock: Clock,
        settings: RolloutSettings,
    ) -> None:
        self.host = host
        self.clock = clock
        self.parking = Parking()
        self.room = room_of(engine.capabilities)
        self._services = Services(
            engine=engine,
            chat_format=chat_format,
            host=host,
            clock=clock,
            settings=settings,
            parking=self.parking,
            room=self.room,
        )
        self._store = store
        self._log = log
        self._code_hashes: dict[type[Environment], str] = {}
        self._running: dict[tuple[str, int], LiveContext] = {}

    def stop(self, spec: EpisodeSpec) -> None:
        """Say that a running attempt is about to be cancelled to go on another time: it did not cancel itself."""
        context = self._running.get((spec.episode_id, spec.attempt))
        if context is not None:
            context.episode.journal.stop()

    async def run(
        self,
        spec: EpisodeSpec,
        environment: type[Environment],
        recorded: Iterable[JournalEntry] = (),
        *,
        answers: Iterable[JournalEntry] = (),
        on_stuck: Callable[[], None] | None = None,
    ) -> EpisodeHeader:
        """Run one attempt to its commit; `recorded` entries of an earlier execution are replayed first.

        `answers` are what the outside world would say if it were asked again; see `CallJournal`. `on_stuck` is called
        when the program swallows the cancellation at its deadline and goes on.

        Must be called in a task of its own: the task owns the episode's root branch.

        Raises:
            EpisodeError: the episode cannot go on, with its drop reason. Other exceptions are the environment's.
        """
        started = self.clock.monotonic()
        missing = [seat for seat in environment.seats if seat not in spec.seats]
        if missing:
            raise EnvironmentDefinitionError(
                f"episode {spec.episode_id}: seat {missing[0]!r} is bound to no policy; add it to [seats]"
            )
        journal = self._journal_of(spec, recorded, answers)
        resumed = journal.written > 0
        journal.enter(ids.ROOT_BRANCH).begin()
        self._begin(journal, spec, environment)
        partials = EpisodePartials(
            self._log, spec.episode_id, spec.attempt, clock=self.clock, kept=spec.purpose == "train", resumed=resumed
        )
        episode = LiveEpisode(spec, journal, self._services, partials)
        context = self._running[spec.episode_id, spec.attempt] = LiveContext(episode)
        try:
            try:
                await self._play(environment, context, on_stuck or _nobody)
                stop_reason: StopReason = context.stop_reason or "completed"
            except LimitReachedError as limit:
                stop_reason = limit.stop_reason
            if stop_reason != "completed":
                self._reward_truncated(context, environment)
            journal.finish()
            self.finished(context)
        except Exception as error:
            error.add_note(episode.whereabouts)
            raise
        finally:
            self.leave(spec)
        header = self._header(context, stop_reason, self.clock.monotonic() - started)
        partials.forget()
        await _whatever_happens(self._store.commit_episode(spec, header, journal.digest, episode.metrics))
        self.host.measured(spec, header, context.counted())
        return header

    def _header(self, context: LiveContext, stop_reason: StopReason, seconds: float) -> EpisodeHeader:
        spec, agents = context.episode.spec, context.agents.values()
        return EpisodeHeader(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            purpose=spec.purpose,
            parent_id=spec.parent_id,
            stop_reason=stop_reason,
            drop_reason=None,
            turns=sum(len(agent.turns) for agent in agents),
            tokens=sum(len(turn.completion.token_ids) for agent in agents for turn in agent.turns),
            seconds=seconds,
            # By seat and index, as the journal gives them back: a step's rows are in one order in every life of a run.
            trajectories=tuple(agent.header() for _, agent in sorted(context.agents.items()) if agent.turns),
            location=DataLocation(self._log.name, context.episode.journal.written),
            measured_against=tuple(sorted(context.measured_against.values())),
        )

    def leave(self, spec: EpisodeSpec) -> None:
        """Take everything from an attempt that ended, or is to count as ended: nothing it still does is heard."""
        context = self._running.pop((spec.episode_id, spec.attempt), None)
        if context is not None:
            context.close()
            context.episode.agents.clear()  # each knows its episode: without the circle both are freed at once

    def finished(self, context: LiveContext) -> None:
        """Called when a program has returned, before its commit: for who compares executions."""

    async def recorded(self, spec: EpisodeSpec) -> list[JournalEntry]:
        """What the journal holds of an attempt, which goes on here, whoever began it.

        Raises:
            EpisodeError: some of it is damaged.
        """
        try:
            await self._log.take_over(spec.episode_id, spec.attempt)
            return self._log.read(spec.episode_id, spec.attempt)
        except JournalError as error:
            raise EpisodeError(f"it cannot go on: {error}", reason="journal_damaged") from None

    def forget(self, spec: EpisodeSpec) -> None:
        """An attempt has failed: what its turns had sampled will not be gone on with."""
        self._log.remove_partials(spec.episode_id, spec.attempt)

    async def drop(self, spec: EpisodeSpec, reason: str, detail: str, seconds: float) -> EpisodeHeader:
        """Record that an episode ends without being trained, with its reason."""
        header = dropped_header(spec, reason, seconds=seconds)
        await _whatever_happens(self._store.commit_episode(spec, header, b"", {}, valid_unicode(detail)))
        return header

    def _journal_of(
        self, spec: EpisodeSpec, recorded: Iterable[JournalEntry], answers: Iterable[JournalEntry]
    ) -> CallJournal:
        inherited = self._log.prefix(spec.fork) if spec.fork is not None else ()
        return CallJournal(
            *(self._log, spec.episode_id, spec.attempt, recorded),
            seed=spec.seed,
            inherited=inherited,
            edits=edits_of(spec.fork),
            answers=answers,
        )

    async def _play(self, environment: type[Environment], context: LiveContext, on_stuck: Callable[[], None]) -> None:
        """The program of the episode, within its time. The commit is outside: what is on disk is what is told."""
        limit = self._services.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                overdue = _Overdue(deadline, on_stuck)
                try:
                    context.episode.limit = deadline
                    self.parking.begin(context.episode.spec.episode_id, context.episode)
                    await _program(environment, context)
                finally:
                    context.episode.limit = None
                    overdue.cancel()
        except TimeoutError:
            if not deadline.expired():
                raise
        if deadline.expired():  # also where the program swallowed the cancellation and returned
            raise EpisodeError(f"the episode took longer than {limit:g} s", reason="episode_timeout")

    def _begin(self, journal: CallJournal, spec: EpisodeSpec, environment: type[Environment]) -> None:
        code_hash = self._code_hashes.get(environment)
        if code_hash is None:
            code_hash = hashlib.blake2b(environment.source().encode(), digest_size=8).hexdigest()
            self._code_hashes[environment] = code_hash
        journal.begin(
            lambda: Begin(
                environment=spec.environment,
                code_hash=code_hash,
                task_id=spec.task.id,
                task=dict(spec.task.data),
                seed=spec.seed,
                seats={seat: binding.policy for seat, binding in spec.seats.items()},
                purpose=spec.purpose,
                group_id=spec.group_id,
                group_size=spec.group_size,
                parent_id=spec.parent_id,
                fork=spec.fork,
                # A fork's recorded part may have them, and can do without them only where it drew nothing.
                own_random=environment.own_random or spec.fork is not None,
            )
        )
        policy = self._services.settings.on_code_change
        if journal.code_hash_then != code_hash and policy != "try":
            raise EpisodeError(
                f"episode {spec.episode_id} was recorded by other code ({journal.code_hash_then}) than there is now "
                f"({code_hash}), and environment.on_code_change is {policy!r}",
                reason="code_changed",
                begin_again=policy == "restart",
            )

    def _reward_truncated(self, context: LiveContext, environment: type[Environment]) -> None:
        value = environment.truncated_reward
        if value is not None:
            for agent in context.agents.values():
                if agent.turns and not agent.rewards:
                    agent.reward(value)


def _nobody() -> None:
    """Nobody minds a stuck program."""


async def _program(environment: type[Environment], context: LiveContext) -> None:
    """The environment's program; where the episode failed under it, it ends with that, caught or not."""
    journal = context.episode.journal

    async def program() -> None:
        await environment().run(context)

    try:
        await played(program(), current_branch(), journal)
        end_if_forked()
    except BaseException as error:
        end_if_forked()
        task = asyncio.current_task()
        if journal.failure is None and isinstance(error, asyncio.CancelledError) and task and not task.cancelling():
            raise EpisodeError(
                "run() raised CancelledError, and nobody had cancelled it", reason="environment_error"
            ) from error
        if journal.failure is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise of_the_episode(error)  # noqa: B904 - it is the same one, or has it as its cause
    if isinstance(journal.failure, GlobalRandomError):
        environment.own_random = True
    if journal.failure is not None:
        raise journal.failure
    if journal.is_stopped:  # the program swallowed it: another time it goes on where it was
        raise asyncio.CancelledError


class _Overdue:
    """Calls `on_stuck` when a deadline, which may be put off, has passed by `GRACE_S`; until it is cancelled."""

    def __init__(self, deadline: asyncio.Timeout, on_stuck: Callable[[], None]) -> None:
        self._deadline = deadline
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        now, when = self._loop.time(), self._deadline.when()
        if when is not None and now >= when + GRACE_S:
            self._on_stuck()
            return
        self._timer = self._loop.call_at((now if when is None else when) + GRACE_S, self._look)

    def cancel(self) -> None:
        """Look no more."""
        self._timer.cancel()


async def _whatever_happens(commit: Coroutine[Any, Any, None]) -> None:
    """Wait for a commit through a cancellation: an episode that reached the disk is reported as it is there."""
    writing = asyncio.get_running_loop().create_task(commit)
    while not writing.done():
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            if writing.cancelled():
                raise
    writing.result()
