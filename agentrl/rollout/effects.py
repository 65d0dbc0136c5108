"""Acts on the outside world: performed once, remembered for ever.

An effect and an external tool are the same thing, told apart by what becomes of an error: an effect raises it, a tool
makes it an observation. What nobody may repeat (`once`) leaves its intent on disk before it happens.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.budget import RetryBudget
from agentrl.core.errors import (
    AgentRLError,
    EffectError,
    EnvironmentDefinitionError,
    EpisodeError,
    InfrastructureError,
    error_words,
)
from agentrl.core.proposals import Recollection
from agentrl.journal.entries import EffectEntry, asked_hash
from agentrl.rollout.journaled_data import journaled

if TYPE_CHECKING:
    from agentrl.environment.base import Guarantee, LimitReachedError, Reconcile
    from agentrl.rollout.calls import Call
    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")

LONGEST_STRUCTURE = 64
"""Characters; of a longer one its digest is remembered."""


async def perform_effect(
    episode: LiveEpisode,
    name: str,
    function: Callable[[], T | Awaitable[T]],
    guarantee: Guarantee,
    reconcile: Reconcile[T] | None,
) -> T:
    """See `EpisodeContext.effect`."""
    journal = episode.journal
    call = journal.open(asked_hash(name.encode("utf-8", "replace")), lambda: f"the effect {name!r}")
    await journal.reach(call)
    entry = journal.recall(call, EffectEntry)
    if entry is None:
        started = episode.services.clock.monotonic()
        is_out_of_reach = False
        with journal.performing(call, f"the effect {name!r}"):
            try:
                value, error = await insist(
                    episode, guarantee, lambda: _outcome(episode, call, name, function, guarantee, reconcile)
                )
            except InfrastructureError as failure:
                value, error, is_out_of_reach = None, error_text(failure), guarantee != "once"
        seconds = episode.services.clock.monotonic() - started
        entry = EffectEntry(name, guarantee, value, error, seconds, is_out_of_reach)
        journal.write(call, entry)
    if entry.is_out_of_reach:
        raise out_of_reach(f"effect {name!r}", entry.error or "")
    if entry.error is not None:
        raise EffectError(f"effect {name!r} failed", error=entry.error)
    result: T = entry.value
    return result


async def remember(episode: LiveEpisode, key: str, structure: str) -> Recollection:
    """See `EpisodeContext.remember`: an effect on the run itself."""
    journal = episode.journal
    if not (isinstance(key, str) and isinstance(structure, str)):
        raise EnvironmentDefinitionError(f"ctx.remember takes text, not {key!r} and {structure!r}")
    digest, structure = _digest(key), structure if len(structure) <= LONGEST_STRUCTURE else _digest(structure)
    structure = structure.encode("utf-8", "replace").decode()
    asked = asked_hash(b"remember", digest.encode(), structure.encode())
    call = journal.open(asked, lambda: f"whether a proposal of structure {structure!r} is remembered")
    await journal.reach(call)
    entry = journal.recall(call, EffectEntry)
    with journal.performing(call):  # also where it is recorded: the run may have died before it had noted it
        found = await episode.services.host.remember(episode.spec, call.call_id, digest, structure)
    if entry is None:
        journal.write(call, EffectEntry("remember", "idempotent", list(found), None, 0.0))
        return found
    try:
        times, share = entry.value
        return Recollection(int(times), float(share))
    except (TypeError, ValueError):
        journal.mismatch(call.call_id, f"the journal holds {str(entry.value)[:100]!r}", "what is remembered is asked")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


async def insist(episode: LiveEpisode, guarantee: Guarantee, perform: Callable[[], Awaitable[T]]) -> T:
    """What `perform` returns; where its infrastructure fails it is tried again, unless it must happen once at most.

    Raises:
        InfrastructureError: it failed as often in a row as is borne.
    """
    budget: RetryBudget | None = None
    while True:
        try:
            return await perform()
        except InfrastructureError:
            budget = budget or RetryBudget(episode.services.settings.infrastructure_attempts)
            wait = None if guarantee == "once" else budget.lost()
            if wait is None:
                raise
        await episode.services.clock.sleep(wait)


def out_of_reach(what: str, error: str) -> LimitReachedError:
    """The limit an act has reached whose infrastructure failed again and again: what was asked of it broke it."""
    from agentrl.environment.base import LimitReachedError

    return LimitReachedError(f"{what} failed again and again: {error}", stop_reason="infrastructure")


async def may_perform(episode: LiveEpisode, call: Call, what: str, guarantee: Guarantee) -> bool:
    """Whether an act may be performed now; False where an earlier process began one that must not happen twice."""
    if guarantee != "once":
        return True
    if not episode.journal.intend(call, what):
        return False
    await episode.journal.flush()
    return True


def unknown_effect(episode: LiveEpisode, call: Call, what: str) -> EpisodeError:
    """The error of an act that an earlier process began, and whose outcome nobody knows."""
    return EpisodeError(
        f"episode {episode.spec.episode_id}, call {call.call_id}: {what} must happen once at most, and the process "
        "ended while it was performed: whether it happened is not known. Give `reconcile=` a function that finds out, "
        "or make it idempotent",
        reason="unknown_effect",
    )


async def _outcome(
    episode: LiveEpisode,
    call: Call,
    name: str,
    function: Callable[[], T | Awaitable[T]],
    guarantee: Guarantee,
    reconcile: Reconcile[T] | None,
) -> tuple[Any, str | None]:
    """The journaled value, or the error's type and message."""
    what = f"effect {name!r}"
    happened, value = False, None
    if not await may_perform(episode, call, what, guarantee):
        if reconcile is None:
            raise unknown_effect(episode, call, what)
        happened, value = await _awaited(reconcile())
    try:
        return journaled(value if happened else await _awaited(function()), what), None
    except AgentRLError:  # InfrastructureError among them
        raise  # of ours, not of the outside world: storage, an engine, a result that cannot be journaled
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is what happened
        return None, error_text(error)


def error_text(error: BaseException) -> str:
    """A foreign error as it is recorded."""
    from agentrl.environment.base import valid_unicode

    return valid_unicode(error_words(error)[:2000])


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
