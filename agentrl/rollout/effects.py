"""Acts on the outside world: effects, external tools and resources, each journaled once.

Re-execution treats them by kind:

* effects and external tools are performed once and remembered; an effect raises its error, a tool makes it an
  observation. A `once` act leaves its intent on disk before it happens;
* a resource declares its recovery (`JournaledResource`): `replay` repeats the recorded calls and compares
  them, `snapshot` restores the state after the last of them, and a `pinned` object died with its process, so the
  episode restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.clock import RetryBudget
from agentrl.core.errors import (
    AgentRLError,
    EffectError,
    EnvironmentDefinitionError,
    EpisodeError,
    InfrastructureError,
    describe_raise_location,
    format_foreign_error,
    infrastructure_failure,
    recorded_error_type,
)
from agentrl.core.event_loop import CALL_THREADS
from agentrl.core.ids import stable_hash64
from agentrl.core.records import ProposalNovelty
from agentrl.core.text import shorten_lines, valid_unicode
from agentrl.environment.containment import GlobalRandomState, call_with_random_state, keep_episode_in_thread
from agentrl.environment.context import (
    Guarantee,
    InvalidToolCallError,
    LimitReachedError,
    Reconcile,
    Resource,
    ResourceLevel,
)
from agentrl.journal.entries import EffectEntry, ResourceCallEntry, UnansweredEntry, request_hash
from agentrl.observe.metrics import EFFECT_ERROR, RESOURCE_ERROR
from agentrl.rollout.calls.journal import JournaledCall, RepeatedCode, current_strand
from agentrl.rollout.calls.journal_data import (
    after_journal_round_trip,
    decode,
    encode,
    encode_arguments,
    to_journal_data,
)
from agentrl.rollout.calls.mismatch import shortened_repr

if TYPE_CHECKING:
    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")
"""Part of the names of effects that differs between calls, such as `test 7` and `test 8`."""
_tool_limit: ContextVar[tuple[asyncio.Timeout | None, float]] = ContextVar("agentrl_tool_limit", default=(None, 0.0))
"""Timer and time limit, in seconds, of the tool that runs."""


async def perform_effect(
    episode: LiveEpisode,
    name: str,
    function: Callable[[], T | Awaitable[T]],
    guarantee: Guarantee,
    reconcile: Reconcile[T] | None = None,
    *,
    is_program: bool = False,
) -> T:
    """Perform an effect, or recall it.

    Args:
        episode: the running attempt.
        name: see `EpisodeContext.effect`, as of the next three.
        function: performs it.
        guarantee: what a retry may do.
        reconcile: finds out what happened.
        is_program: whether it is the program of an external agent, which runs again on re-execution, and does not count
            as a call of `ctx.effect` in metrics.
    """
    journal, clock, location, performed = episode.journal, episode.services.clock, "", dict[str, EffectEntry]()

    async def perform(call: JournaledCall) -> EffectEntry:
        nonlocal location
        if is_program:
            journal.check_repeatable(call, f"the effect {name!r}")
        start_s = clock.monotonic()
        outcome = partial(_outcome, episode, call, name, function, guarantee, reconcile)
        value, error, location = await retry_infrastructure(episode, guarantee, outcome)
        if not is_program:
            count_call(episode, f"effect {_NUMBER.sub('…', name)!r}", error, EFFECT_ERROR, location)
        return performed.setdefault("", EffectEntry(name, guarantee, value, error, clock.monotonic() - start_s))

    entry = await journal.call(
        request_hash(name.encode("utf-8", "replace")),
        lambda: f"the effect {name!r}",
        EffectEntry,
        perform,
        repeats=(lambda recorded, performed: None) if is_program else None,
        memoised=f"the effect {name!r}",
    )
    entry = performed.get("", entry)  # a program that runs again may do something else
    if not is_program:
        episode.metric("effect/ok" if entry.error is None else EFFECT_ERROR, 1.0)
    if entry.error is not None:
        raise EffectError(f"effect {name!r} failed", error=entry.error, location=location)
    result: T = entry.value
    return result


def count_call(episode: LiveEpisode, name: str, error: str | None, metric: str, place: str = "") -> None:
    """Count a call of the user's code for the alarm `always_fails`, with its error, the metric that counts its failures
    and the place that raised it."""
    text = None if error is None else f"{shorten_lines(error, 200)}{f' at {place}' if place else ''}"
    episode.services.activity.count_call(name, text, metric)


async def _outcome(
    episode: LiveEpisode,
    call: JournaledCall,
    name: str,
    function: Callable[[], T | Awaitable[T]],
    guarantee: Guarantee,
    reconcile: Reconcile[T] | None,
) -> tuple[Any, str | None, str]:
    """Return the journaled value, or the error's type and message; and the location that raised the error."""
    act_name = f"effect {name!r}"
    has_happened, value = False, None
    reconciles = reconcile is not None
    is_first = await begin_effect(episode, call, act_name, guarantee, may_repeat=reconciles, reconciles=reconciles)
    if reconcile is not None and guarantee == "once" and (episode.spec.attempt > 0 or not is_first):
        has_happened, value = await _await_value(reconcile())
    try:
        result = value if has_happened else await _await_value(function())
        return after_journal_round_trip(result, act_name), None, ""
    except AgentRLError:  # includes InfrastructureError
        raise  # errors of agentrl itself (storage, engine, unserializable result), not of the outside world
    except Exception as error:  # foreign code: any exception is its result
        if (failure := infrastructure_failure(error)) is not None:
            raise failure from error
        return None, error_text(error), _raise_location(error)


async def retry_infrastructure(episode: LiveEpisode, guarantee: Guarantee, perform: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `perform`, retrying it when its infrastructure fails, unless it is a `once` effect.

    The time limits of the episode, and of a tool that makes the call, leave out the waits and start again with each
    try.

    Raises:
        InfrastructureError: `perform` failed and may not be tried again here.
    """
    budget = RetryBudget()
    while True:
        try:
            return await perform()
        except InfrastructureError:
            is_last = guarantee == "once" or episode.journal.failure is not None
            wait = None if is_last else budget.lost()
            if wait is None:
                raise
        timer, limit_s = _tool_limit.get()
        if timer is not None and not timer.expired():
            timer.reschedule(None)
        with episode.time_limit_paused():
            await episode.services.clock.sleep(wait)
        if timer is not None and not timer.expired():
            timer.reschedule(asyncio.get_running_loop().time() + limit_s)
        if episode.limit is not None:
            episode.limit.restart()


async def begin_effect(
    episode: LiveEpisode,
    call: JournaledCall,
    act_name: str,
    guarantee: Guarantee,
    *,
    may_repeat: bool,
    reconciles: bool = False,
) -> bool:
    """Leave the intent of a `once` effect on disk before it is performed.

    Args:
        episode: the running attempt.
        call: the effect's call.
        act_name: names the effect in messages.
        guarantee: its guarantee.
        may_repeat: whether a further attempt of the episode may perform it too.
        reconciles: whether its outcome can be found out.

    Returns whether no earlier execution began it.

    Raises:
        EpisodeError: an earlier execution began it, so its outcome is unknown.
    """
    if guarantee != "once":
        return True
    if not episode.journal.intend(call, act_name, may_repeat=may_repeat):
        if reconciles:
            return False
        raise EpisodeError(
            f"episode {episode.spec.episode_id}, call {call.call_id}: {act_name} must happen at most once. It began, "
            "and has no recorded result, so whether it happened is unknown. Give `reconcile=` a function that finds "
            "out, or make the effect idempotent",
            reason="unknown_outcome_error",
        )
    await episode.journal.flush()
    return True


def resource_lost(episode: LiveEpisode, name: str) -> EpisodeError:
    """Make the error of an attempt that needs the state of a resource which is gone."""
    return EpisodeError(
        f"episode {episode.name}: {name} died with its process. Its state is not in the journal, because it is pinned "
        "or a call of it was cancelled, so the episode cannot be resumed",
        reason="resource_lost",
        begin_again=True,
    )


def error_text(error: BaseException) -> str:
    """Return the text of a foreign error, as recorded."""
    return valid_unicode(format_foreign_error(error)[:2000])


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def remember_proposal(episode: LiveEpisode, key: str, structure: str) -> ProposalNovelty:
    journal = episode.journal
    if not (isinstance(key, str) and isinstance(structure, str)):
        raise EnvironmentDefinitionError(f"ctx.remember takes text, not {key!r} and {structure!r}")
    # A structure of more than 64 characters is remembered by its digest.
    digest, structure = _digest(key), structure if len(structure) <= 64 else _digest(structure)
    structure = structure.encode("utf-8", "replace").decode()
    digest_of_call = request_hash(b"remember", digest.encode(), structure.encode())

    async def ask(call: JournaledCall) -> EffectEntry:
        novelty = await episode.services.host.remember(episode.spec, call.call_id, digest, structure)
        return EffectEntry("remember", "idempotent", list(novelty), None, 0.0)

    entry = await journal.call(
        digest_of_call,
        lambda: f"whether a proposal of structure {structure!r} is remembered",
        EffectEntry,
        ask,
        repeats=lambda recorded, asked: None,  # the run may have died before it had stored it
    )
    try:
        times, share = entry.value
        return ProposalNovelty(int(times), float(share))
    except (TypeError, ValueError):
        journal.end_with(
            EpisodeError(f"the journal holds {str(entry.value)[:100]!r} for ctx.remember", reason="nondeterminism")
        )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


async def observe_tool(
    call: Callable[[], str | Awaitable[str]], tool_limit_s: float | None, default_s: float, *, external: bool
) -> tuple[str, str, str]:
    """Run a tool; return its observation, its outcome, and the location of its exception. An exception of the tool
    becomes an observation, for the policy to handle.

    `tool_limit_s` is the tool's own time limit in seconds.
    """
    limit_s = default_s if tool_limit_s is None else tool_limit_s
    timer: asyncio.Timeout | None = None
    try:
        if external and not inspect.iscoroutinefunction(call):
            async with asyncio.timeout(limit_s) as timer:
                result: Any = await in_thread(call)
                if not isinstance(result, str) and inspect.isawaitable(result):
                    result = await result
        else:
            result = call()
            if not isinstance(result, str) and inspect.isawaitable(result):
                async with asyncio.timeout(limit_s) as timer:
                    running = _tool_limit.set((timer, limit_s))
                    try:
                        result = await result
                    finally:
                        _tool_limit.reset(running)
        return valid_unicode(str(result)), "ok", ""
    except InvalidToolCallError as error:
        return f"error: {error}", error.outcome, ""
    except EffectError as error:  # an effect inside the tool failed: treat it as an error of the tool
        return f"error: {error.error}", "error", error.location
    except (EpisodeError, LimitReachedError, InfrastructureError):
        raise
    except Exception as error:  # a tool is foreign code, and its error is the policy's observation
        if (failure := infrastructure_failure(error)) is not None:
            raise failure from error
        # A tool may itself raise TimeoutError.
        if isinstance(error, TimeoutError) and timer is not None and timer.expired():
            return f"error: timed out after {limit_s:g} s (its @tool(timeout_s=…))", "timeout", ""
        return valid_unicode(f"error: {format_foreign_error(error)}"[:2000]), "error", _raise_location(error)


def _raise_location(error: BaseException | None) -> str:
    """Return the location that raised an error, as recorded."""
    return valid_unicode(describe_raise_location(error).removeprefix(" at ")[:500])


class JournaledResource(Resource):
    """A stateful object called through the journal; its declared level is recorded with each call.

    The object has its own global random generators, from its factory to its last call, as if it were alone in the
    process. Draws of other code have no influence. A `snapshot` holds no state of them, so each call of such a resource
    begins with generators that depend on the number of the call alone.
    """

    __slots__ = (
        *("_calls", "_episode", "_is_lost", "_object", "_random", "_random_key", "_restore", "_seed", "_state"),
        "name",
    )

    def __init__(
        self, episode: LiveEpisode, factory: Callable[[], object], name: str, level: ResourceLevel, seed: int | None
    ) -> None:
        self._episode = episode
        self.level = level
        self._seed = seed
        self._calls = 0
        self._is_lost = False
        """Whether the state after a recorded call is gone."""
        self._state = b""
        """Encoded state of a snapshot resource after its last call."""
        self._restore: Any = None
        """State to restore before the next call; None if there is none to restore."""
        self.name = name
        strand = current_strand()
        self._random_key = strand.key
        self._random = self._new_random()
        try:
            with (
                contextlib.nullcontext() if level == "replay" else strand.executing(name),
                self._random.swapped_in(),
            ):
                self._object = factory()
        except InfrastructureError as error:
            episode.journal.end_with(error)
        if level == "snapshot" and not (hasattr(self._object, "get_state") and hasattr(self._object, "set_state")):
            raise EnvironmentDefinitionError(
                f"{type(self._object).__qualname__} is a snapshot resource and needs get_state() and set_state(state)"
            )

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, or recall its recorded result."""
        where, is_performed, location = f"{self.name}.{method}", False, ""

        async def perform(call: JournaledCall) -> ResourceCallEntry:
            nonlocal is_performed, location
            is_performed = True
            entry, location = await self._perform(call, method, arguments)
            return entry

        def compare(recorded: ResourceCallEntry, entry: ResourceCallEntry) -> tuple[str, str] | None:
            # As bytes, since NaN differs from itself.
            if encode(recorded.value) == encode(entry.value) and _kind(recorded.error) == _kind(entry.error):
                return None
            return (
                f"{where} returned {shortened_repr(recorded.error or recorded.value)} when it was recorded",
                f"now {shortened_repr(entry.error or entry.value)}; declare the resource `snapshot` or `pinned`",
            )

        journal = self._episode.journal
        entry = await journal.call(
            request_hash(*map(encode_arguments, (self.name, self.level, method, arguments, self._seed))),
            lambda: f"{where}({shortened_repr(to_journal_data(arguments))})",
            ResourceCallEntry,
            perform,
            repeats=compare if self.level == "replay" else None,
            memoised=self._memoised_name(),
            recalled=self._recall,
        )
        if not is_performed:
            self._recall(entry)
            if self._is_lost:
                journal.end_with(resource_lost(self._episode, self.name))
        if entry.error is not None:
            self._episode.metric(RESOURCE_ERROR, 1.0)
            raise EffectError(f"{where} failed", error=entry.error, location=location)
        return entry.value

    def state(self) -> Any:
        """Return the object's state for comparisons; None if it has no `get_state`.

        For a `snapshot` resource it is the state after the last call, which a resume restores: an object that is closed
        afterward, or is not restored because nothing calls it again, has another one.
        """
        if self.level == "snapshot":
            return decode(self._state) if self._state else None
        get_state = getattr(self._object, "get_state", None)
        return after_journal_round_trip(get_state(), f"{self.name}.get_state") if callable(get_state) else None

    async def _perform(
        self, call: JournaledCall, method: str, arguments: tuple[Any, ...]
    ) -> tuple[ResourceCallEntry, str]:
        """Return the entry of a call, and the location that raised its error."""
        if self._is_lost:
            raise resource_lost(self._episode, self.name)
        clock, where = self._episode.services.clock, f"{self.name}.{method}"
        start_s = clock.monotonic()
        value, problem, location = None, None, ""
        self._calls += 1
        generators = self._random_of(call)
        if self._restore is not None:
            with generators.swapped_in():
                self._object.set_state(self._restore)  # type: ignore[attr-defined]
            self._restore = None
        try:
            code = call_with_random_state(generators, getattr(self._object, method), *arguments)
            value = after_journal_round_trip(await RepeatedCode(self._episode.journal, call, code), where)
        except AgentRLError:
            raise
        except Exception as error:  # foreign code: any exception is its result
            if (failure := infrastructure_failure(error)) is not None:
                raise failure from error
            problem, location = error_text(error), _raise_location(error)
        finally:
            state = call.state = self._new_state() if self.level == "snapshot" else None
        count_call(self._episode, f"{type(self._object).__name__}.{method}", problem, RESOURCE_ERROR, location)
        seconds, data = clock.monotonic() - start_s, to_journal_data(list(arguments))
        return ResourceCallEntry(self.name, self.level, method, value, seconds, data, problem, state), location

    def _recall(self, entry: ResourceCallEntry | UnansweredEntry) -> None:
        """Take over the state that a recorded call left."""
        self._calls += 1
        self._is_lost |= self.level == "pinned"
        if entry.state is not None:
            self._restore, self._state = entry.state, encode(entry.state)

    def _new_state(self) -> Any:
        """Return the state after a call; None if the call did not change it."""
        state = after_journal_round_trip(self._object.get_state(), f"{self.name}.get_state")  # type: ignore[attr-defined]
        if state is None:
            raise EnvironmentDefinitionError(f"{type(self._object).__qualname__}.get_state() returned None")
        state_bytes = encode(state)
        if state_bytes == self._state:
            return None
        self._state = state_bytes
        return state

    def _memoised_name(self) -> str | None:
        """Name of the resource if its calls are never repeated, else None."""
        return None if self.level == "replay" else self.name

    def _random_of(self, call: JournaledCall) -> GlobalRandomState:
        """Return the generators for a call. Without a `seed`, those of a fork change at its first own call."""
        assert call.strand is not None
        if self.level == "snapshot" or (self._seed is None and call.strand.key != self._random_key):
            self.close()
            self._random_key = call.strand.key
            self._random = self._new_random()
        return self._random

    def _new_random(self) -> GlobalRandomState:
        seed = (*self._random_key, self.name) if self._seed is None else (self._seed,)
        return GlobalRandomState(stable_hash64("resource", *seed, self._calls))

    def close(self) -> None:
        """Release the random generators."""
        self._random.close()


def _kind(error: str | None) -> str | None:
    """Return the type of a recorded error; messages are not compared, because they may hold addresses and paths."""
    return None if error is None else recorded_error_type(error)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread; a cancelled caller stops waiting for it."""
    return await asyncio.get_running_loop().run_in_executor(CALL_THREADS, keep_episode_in_thread(call))
