"""Runs one attempt of one episode: makes the environment, runs its program over the journal, commits the result.

`EpisodeRunner.run` owns an attempt from the first entry to the committed header; `turn/agent.py` makes the engine
calls of its turns. Neither knows who scheduled the episode or who trains on it.

Invariants:
1. Each call passes through `CallJournal`: recorded calls are compared, new ones performed and appended.
2. A header is returned only after the episode's entries and its commit are on disk.
3. A limit ends an episode as truncated and committed; an error raises, and the worker decides between retry and drop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import (
    EnvironmentDefinitionError,
    EpisodeError,
    GlobalRandomError,
    JournalError,
    describe_raise_location,
)
from agentrl.core.ports import ChatFormat, EpisodeHost, Sampler
from agentrl.core.records import EpisodeDataLocation, EpisodeHeader, EpisodeSpec, StopReason, dropped_header
from agentrl.core.text import valid_unicode
from agentrl.environment.containment import AlarmGuard, as_episode_error
from agentrl.environment.context import LimitReachedError
from agentrl.environment.environment import Environment
from agentrl.gateway.server import Gateway
from agentrl.journal.entries import (
    REQUEST_VERSION,
    BeginEntry,
    EffectIntentEntry,
    JournalEntry,
    SeatSettings,
    code_digest,
)
from agentrl.journal.port import CommitLog, EpisodeEnd, TurnLog
from agentrl.observe.bottleneck import ActivityClock
from agentrl.rollout.calls.journal import CallJournal, OnNew, Prefix, begin_strand, current_strand
from agentrl.rollout.episode import (
    AS_THE_RUN,
    LiveEpisode,
    Parking,
    PolicySettings,
    RolloutSettings,
    TimeLimit,
    WorkerServices,
)
from agentrl.rollout.episode_context import LiveEpisodeContext
from agentrl.rollout.external.agent import external_turns_with_context
from agentrl.rollout.scoring.scores import LiveScores
from agentrl.rollout.turn_entries import EpisodePartialTurns

CHECKED_EPISODES = 32
"""Number of episodes of each environment whose steps a runner checks for draws from the global random generators.
Re-executions are always checked, so that an undetected draw cannot cause a silent difference."""


class EpisodeRunner:
    """Runs attempts of episodes for one worker."""

    def __init__(
        self,
        *,
        engine: Sampler,
        chat_format: ChatFormat,
        store: CommitLog,
        log: TurnLog,
        host: EpisodeHost,
        clock: Clock,
        settings: RolloutSettings,
    ) -> None:
        self.host = host
        self.clock = clock
        self.parking = Parking()
        self._services = WorkerServices(
            engine=engine,
            default=PolicySettings(chat_format=chat_format, seat=settings.seat),
            host=host,
            clock=clock,
            settings=settings,
            parking=self.parking,
            gateway=Gateway(),
            activity=ActivityClock(clock),
        )
        self.activity = self._services.activity
        self._store = store
        self._log = log
        self._read_lock = asyncio.Lock()
        """Held while an episode's entries are read; see `recorded`."""
        self._code_hashes: dict[type[Environment], str] = {}
        self._check_counts: Counter[type[Environment]] = Counter()
        """Number of episodes so far, by environment."""
        self._run_settings = {"": settings.seat}
        """Settings of the run in the form of `BeginEntry.settings`, shared by all episodes without overrides."""
        self._recorded_settings = {
            policy: policy_settings.seat for policy, policy_settings in settings.policies.items()
        }
        self._running: dict[str, LiveEpisodeContext] = {}
        """Context of the newest attempt, keyed by episode."""

    def stop(self, spec: EpisodeSpec) -> None:
        """Note that a running attempt is about to be cancelled from outside, to be resumed later."""
        context = self._running.get(spec.episode_id)
        if context is not None and context.episode.spec.attempt == spec.attempt:
            context.episode.journal.stop()

    async def run(
        self,
        spec: EpisodeSpec,
        environment: type[Environment],
        recorded: Sequence[JournalEntry] = (),
        *,
        answers: Iterable[JournalEntry] = (),
        recalls_from: int = 0,
        inherited: Sequence[JournalEntry] | None = None,
        regraded: bool = False,
        on_new: OnNew | None = None,
    ) -> EpisodeHeader:
        """Run one attempt to its commit, after replaying the `recorded` entries of an earlier execution.

        Args:
            spec: the attempt's spec.
            environment: its class.
            recorded: its entries on disk.
            answers: recorded answers of the outside world; as `regraded`, see `Prefix`.
            recalls_from: number of the oldest attempt whose recorded replies this attempt and later ones may use again.
            inherited: entries before the fork point; None: those in the log.
            regraded: whether to give rewards again.
            on_new: see `CallJournal`.

        Call it in a new task, which becomes the owner of the episode's root strand.

        Raises:
            EpisodeError: the episode cannot continue; has its drop reason. Other exceptions are the environment's.
        """
        start_s = self.clock.monotonic()
        if inherited is None:
            inherited = () if spec.fork is None else self._log.prefix(spec.fork)
        context = self._open_attempt(
            *(spec, environment, recalls_from, on_new),
            Prefix([*inherited, *recorded], len(inherited), fork=spec.fork, answers=answers, regraded=regraded),
        )
        episode, journal, strand = context.episode, context.episode.journal, current_strand()
        try:
            try:
                # Runs the program within its time limit; inline, because each further coroutine takes 300 bytes.
                limit = episode.limit = TimeLimit(episode, self._services.settings.episode_timeout_s)
                try:
                    self.parking.begin(spec.episode_id, episode)
                    with AlarmGuard(journal):
                        await journal.begin_steps(strand, partial(_call_program, environment, context))
                except BaseException as error:  # noqa: BLE001 - foreign code: raised again, if it says how that ended
                    end_error = _ended_with(error, journal, limit)
                    if end_error is not None:
                        raise end_error  # noqa: B904 - it is the same one, or has it as its cause
                finally:
                    journal.end_steps(strand)
                    limit.end()
                _check_end(environment, journal)
                if limit.is_cancelled:
                    # The program may have cancelled its own task before it returned; let that arrive before the commit.
                    await asyncio.sleep(0)
                stop_reason = context.stop_reason
            except LimitReachedError as limit_error:
                journal.reopen()
                stop_reason = limit_error.stop_reason
            stop_reason = self._settle_truncation(context, environment, stop_reason)
            journal.finish()
            if episode.scores is not None:
                await episode.scores.settle()
            self.finished(context)
        except BaseException as error:  # noqa: BLE001 - raised again
            raise _noted(error, episode)  # noqa: B904 - it is the same one, or has ended the episode
        finally:
            self.close_attempt(spec)
        header = self._header(context, stop_reason, self.clock.monotonic() - start_s)
        episode.partials.forget()
        note = valid_unicode(episode.note)
        with episode.waiting_for("disk"):
            end = EpisodeEnd(spec, header, journal.digest, context.metrics, note, context.counted())
            await _despite_cancellation(self._store.commit(end))
        return header

    def _open_attempt(
        self, spec: EpisodeSpec, environment: type[Environment], recalls_from: int, on_new: OnNew | None, prefix: Prefix
    ) -> LiveEpisodeContext:
        """Make the journal and the context of an attempt, and journal its first entry."""
        for seat in environment.seats:
            if seat not in spec.seats:
                raise EnvironmentDefinitionError(
                    f"episode {spec.episode_id}: seat {seat!r} is bound to no policy; add it to [seats]"
                )
        journal = CallJournal(self._log, spec.episode_id, spec.attempt, prefix, on_new, seed=spec.seed)
        resumed = journal.written > 0
        journal.detects_draws = not prefix.is_empty or self._check_counts[environment] < CHECKED_EPISODES
        self._check_counts[environment] += 1
        begin_strand(journal.enter(ids.ROOT_STRAND))
        began_under = self._begin(journal, spec, environment, recalls_from)
        partials = EpisodePartialTurns(
            self._log, spec.episode_id, spec.attempt, clock=self.clock, kept=spec.purpose == "train", resumed=resumed
        )
        episode = LiveEpisode(spec, journal, self._services, partials, began_under)
        settings = self._services.settings
        if settings.scorers or settings.missing_scorer is not None or journal.recorded_scores():
            episode.scores = LiveScores(episode)
        self._running[spec.episode_id] = context = LiveEpisodeContext(episode, environment)
        return context

    def _header(self, context: LiveEpisodeContext, stop_reason: StopReason, seconds: float) -> EpisodeHeader:
        spec, agents = context.episode.spec, sorted(context.agents, key=lambda agent: (agent.seat, agent.index))
        # Sorted by seat and index, as the journal returns them, so that the rows of a step have the same order after a
        # resume.
        # A fork may end without a turn of its own: its rewards still count for the turns that it inherited.
        inherits = spec.fork is not None
        trajectories = tuple(agent.header() for agent in agents if agent.sampled_turns or (inherits and agent.turns))
        return EpisodeHeader(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            purpose=spec.purpose,
            parent_id=spec.parent_id,
            stop_reason=stop_reason,
            drop_reason=None,
            turns=sum(len(agent.turns) for agent in agents),
            tokens=sum(trajectory.tokens for trajectory in trajectories),
            seconds=seconds,
            trajectories=trajectories,
            location=EpisodeDataLocation(self._log.name, context.episode.journal.written),
            measured_against=tuple(sorted((context.measured_against or {}).values())),
        )

    def abandon(self, spec: EpisodeSpec) -> None:
        """Give up an attempt whose program does not end: canceling its task then ends it in any case."""
        context = self._running.get(spec.episode_id)
        if context is not None and context.episode.spec.attempt == spec.attempt:
            context.episode.journal.abandon()
        self.close_attempt(spec)

    def close_attempt(self, spec: EpisodeSpec) -> None:
        """Close an attempt that ended or was abandoned: nothing it still does counts."""
        context = self._running.get(spec.episode_id)
        if context is not None and context.episode.spec.attempt == spec.attempt:
            del self._running[spec.episode_id]
            context.close()
            context.episode.close()

    def finished(self, context: LiveEpisodeContext) -> None:
        """Hook after a program has returned, before its commit; overridden to compare executions."""

    async def flush(self) -> None:
        """Wait until the entries of this worker's episodes are on disk."""
        await self._log.flush()

    async def recorded(self, spec: EpisodeSpec) -> list[JournalEntry]:
        """Take over an attempt, and return its recorded entries.

        Raises:
            EpisodeError: some entries are damaged.
        """
        async with self._read_lock:  # reads one episode at a time; the event loop runs others in between
            try:
                await self._log.take_over(spec.episode_id, spec.attempt)
                entries = self._log.read(spec.episode_id, spec.attempt)
            except JournalError as error:
                raise EpisodeError(f"it cannot continue: {error}", reason="journal_damaged") from None
            await asyncio.sleep(0)
        return entries

    async def recalled(self, spec: EpisodeSpec, since: int) -> tuple[int, tuple[JournalEntry, ...]]:
        """Return the turns of earlier attempts that external agents requested, each with its whole context; a later
        attempt's turn replaces an earlier one's.

        The first value is the first attempt whose turns are returned: `since`, or a later attempt that sets it.
        """
        turns: dict[str, JournalEntry] = {}
        if since < spec.attempt:
            await self._log.flush()
        for attempt in range(since, spec.attempt):
            try:
                entries = await self.recorded(dataclasses.replace(spec, attempt=attempt))
            except EpisodeError:
                continue  # damaged entries are not reused; their turns are sampled again
            begin = entries[0].decode() if entries else None
            if isinstance(begin, BeginEntry) and begin.recalls_from > since:
                since, turns = begin.recalls_from, {}
            turns.update({entry.call_id: entry for entry in external_turns_with_context(entries)})
        return since, tuple(turns.values())

    async def once_effect(self, spec: EpisodeSpec) -> str | None:
        """Return which `once` effect of an attempt a further attempt would repeat, as the end of a message; None if
        there is none."""
        await self._log.flush()
        try:
            entries = await self.recorded(spec)
        except EpisodeError as error:
            return f"; starting over could repeat an effect: {error}"
        intents = [entry.decode() for entry in entries if entry.call_id.endswith("!")]
        names = [intent.name for intent in intents if isinstance(intent, EffectIntentEntry) and not intent.may_repeat]
        return f"; starting over could repeat {names[0]}; give it reconcile=" if names else None

    def forget(self, spec: EpisodeSpec) -> None:
        """Discard the partial turns of a failed attempt."""
        self._log.remove_partials(spec.episode_id, spec.attempt)

    async def drop(self, spec: EpisodeSpec, reason: str, detail: str, seconds: float) -> EpisodeHeader:
        """Record that an episode ends untrained, with its reason."""
        header = dropped_header(spec, reason, seconds=seconds)
        await _despite_cancellation(self._store.commit(EpisodeEnd(spec, header, b"", {}, valid_unicode(detail))))
        return header

    def _begin(
        self, journal: CallJournal, spec: EpisodeSpec, environment: type[Environment], recalls_from: int
    ) -> Mapping[str, PolicySettings]:
        """Journal or recall the first entry; returns its settings where they differ from the run's now."""
        code_hash = self._code_hashes.get(environment)
        if code_hash is None:
            code_hash = code_digest(environment.source())
            self._code_hashes[environment] = code_hash
        run_settings = self._settings(spec)
        settings = self._evaluation_settings(spec, run_settings) if spec.purpose == "evaluate" else run_settings
        began = journal.begin(
            lambda: BeginEntry(
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
                # The prefix of a fork may have drawn from the global generators.
                own_random=environment.own_random or spec.fork is not None,
                settings=settings
                if journal.forked_from is None
                else _inherited_settings(settings, journal.forked_from, spec),
                recalls_from=recalls_from,
                request_version=REQUEST_VERSION,
            )
        )
        if (journal.forked_from or began).request_version != REQUEST_VERSION:
            raise EpisodeError(
                f"episode {spec.episode_id} was recorded by another version of agentrl, and its calls cannot be "
                "compared with the current ones",
                reason="code_changed",
                begin_again=True,
            )
        policy = self._services.settings.on_code_change or environment.on_code_change
        if journal.code_hash_then != code_hash and policy != "try":
            raise EpisodeError(
                f"episode {spec.episode_id} was recorded with different code ({journal.code_hash_then}) than there is "
                f"now ({code_hash}), and its on_code_change is {policy!r}",
                reason="code_changed",
                begin_again=policy == "restart",
            )
        return AS_THE_RUN if began.settings in ({}, run_settings) else self._began_under(spec, began)

    def _settings(self, spec: EpisodeSpec) -> dict[str, SeatSettings]:
        """Return the run's settings for `BeginEntry.settings`: one shared dict if no policy has overrides."""
        overrides = self._recorded_settings
        if not overrides:
            return self._run_settings
        return self._run_settings | {
            seat: overrides[binding.policy] for seat, binding in spec.seats.items() if binding.policy in overrides
        }

    def _evaluation_settings(self, spec: EpisodeSpec, run_settings: dict[str, SeatSettings]) -> dict[str, SeatSettings]:
        """Return the settings of an evaluation's episode."""
        changes = self._services.settings.evaluation_sampling
        changed = {
            seat: msgspec.structs.replace(run_settings.get(seat, run_settings[""]), **changes[binding.policy])
            for seat, binding in spec.seats.items()
            if changes.get(binding.policy)
        }
        return run_settings | changed

    def _began_under(self, spec: EpisodeSpec, began: BeginEntry) -> Mapping[str, PolicySettings]:
        """Return the settings of an episode that began under others than the run's now.

        Raises:
            EpisodeError: the engine can no longer serve them; the episode restarts under the run's settings.
        """
        services, settings = self._services, began.settings
        run = settings.get("")
        overrides = {} if run is None else {"": services.policy_settings("").as_recorded(run)}
        for seat, binding in spec.seats.items():
            seat_record = settings.get(seat, run)
            if seat_record is None:
                continue
            overrides[seat] = seat_settings = services.policy_settings(binding.policy).as_recorded(seat_record)
            needs_masks = (
                seat_settings.sampling.is_filtered and not seat_settings.is_external and spec.purpose == "train"
            )
            if needs_masks and not services.engine.capabilities.sampling_mask:
                raise EpisodeError(
                    f"episode {spec.episode_id} was sampled with top_k, top_p or min_p, and the run's engine does not "
                    "record which tokens they keep",
                    reason="settings_changed",
                    begin_again=True,
                )
        return overrides

    def _settle_truncation(
        self, context: LiveEpisodeContext, environment: type[Environment], limit: StopReason | None
    ) -> StopReason:
        """Give truncated agents what `Environment.truncated_reward` says; returns why the episode ended.

        Args:
            context: the context of the attempt, whose program has ended.
            environment: its class.
            limit: the limit that ended it, if one did: it truncates all agents. Otherwise, agents are truncated whose
                last turn is cut, and with them agents that got no reward.
        """
        agents = [agent for agent in context.agents if agent.turns]
        reason = limit or next((cut for agent in agents if (cut := agent.cut_by()) is not None), None)
        if reason is None:
            return "completed"
        value = environment.truncated_reward
        for agent in agents:
            if limit is None and agent.rewards and agent.cut_by() is None:
                continue
            if value is None:
                agent.is_void = context.episode.journal.purpose == "train"
            elif value != "keep":
                agent.replace_rewards(value)
            elif not agent.rewards:
                agent.reward(0.0)
        return reason


def _inherited_settings(
    now: Mapping[str, SeatSettings], begin: BeginEntry, spec: EpisodeSpec
) -> dict[str, SeatSettings]:
    """Return the settings of a fork: those of its parent, in seats held by the same policy."""
    settings = begin.settings
    kept_settings = {
        seat: settings.get(seat, settings[""]) if begin.seats.get(seat) == binding.policy else now.get(seat, now[""])
        for seat, binding in spec.seats.items()
        if "" in settings
    }
    return {**now, **({"": settings[""], **kept_settings} if kept_settings else {})}


def _call_program(environment: type[Environment], context: LiveEpisodeContext) -> Awaitable[None]:
    """Call the `run` method of a new instance of the environment."""
    return environment().run(context)


def _ended_with(error: BaseException, journal: CallJournal, limit: TimeLimit) -> BaseException | None:
    """Return the error that ends an episode whose program raised; None if the episode failed or was given up before."""
    if journal.failure is not None:
        if not describe_raise_location(journal.failure):
            journal.failure.with_traceback(error.__traceback__)
        return None
    if isinstance(error, asyncio.CancelledError):
        if journal.cut_error is not None and not journal.is_stopped:
            return None
        if not limit.is_cancelled:
            episode_error = EpisodeError(
                "run() raised CancelledError, but nothing had cancelled it", reason="environment_error"
            )
            episode_error.__cause__ = error
            return episode_error
    return as_episode_error(error, limit.task)


def _noted(error: BaseException, episode: LiveEpisode) -> BaseException:
    """Return the error that ends an attempt, with a note where; for a cancellation, the error that caused it."""
    if isinstance(error, asyncio.CancelledError):
        error = episode.journal.failure or error
    if isinstance(error, Exception):
        error.add_note(episode.location)
    return error


def _check_end(environment: type[Environment], journal: CallJournal) -> None:
    """Raise the error of a failed episode, even if its program caught it."""
    if isinstance(journal.failure, GlobalRandomError):
        environment.own_random = True
    if journal.failure is not None:
        raise journal.failure
    if journal.is_stopped:  # the program swallowed its cancellation; it is resumed from its journal later
        raise asyncio.CancelledError
    if journal.cut_error is not None:  # also if the program swallowed the cancellation and returned
        raise journal.cut_error


async def _despite_cancellation(commit: Coroutine[Any, Any, None]) -> None:
    """Wait for a commit even if cancelled, so that an episode on disk is also reported."""
    commit_task = asyncio.get_running_loop().create_task(commit)
    while not commit_task.done():
        try:
            await asyncio.shield(commit_task)
        except asyncio.CancelledError:
            if commit_task.cancelled():
                raise
    commit_task.result()
