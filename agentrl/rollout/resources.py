"""Stateful objects of an episode, called through the journal: how each comes back when `run` is executed again.

`replay`: recorded calls are made again and compared. `snapshot`: they are not, and the state after the last of them is
restored before the first new one. `pinned`: the object died with its process, so the episode begins again.
Invariant: every call runs under global random states of its own, keyed by the call, so that nothing of them has to be
kept and nobody else's draws count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import AgentRLError, EffectError, EnvironmentDefinitionError, EpisodeError
from agentrl.core.ids import key64
from agentrl.environment.base import Resource, ResourceLevel
from agentrl.environment.global_random import GlobalRandom, awaited_under
from agentrl.journal.entries import ResourceEntry, asked_hash
from agentrl.rollout.branches import current_branch
from agentrl.rollout.effects import error_text
from agentrl.rollout.journaled_data import encode, encode_arguments, journaled, plain
from agentrl.rollout.recorded_words import shortened

if TYPE_CHECKING:
    from agentrl.rollout.branches import StreamKey
    from agentrl.rollout.calls import Call
    from agentrl.rollout.episode import LiveEpisode


class LiveResource(Resource):
    """A stateful object called through the journal; its declared level is recorded with each call."""

    __slots__ = ("_calls", "_episode", "_level", "_object", "_restore", "_seed", "_state", "name")

    def __init__(
        self, episode: LiveEpisode, factory: Callable[[], object], name: str, level: ResourceLevel, seed: int | None
    ) -> None:
        self._episode = episode
        self._level = level
        self._seed = seed
        self._calls = 0
        self._state = b""
        """Of a snapshot resource: its state after the last call, encoded."""
        self._restore: Any = None
        """What the object must be set to before its next call."""
        self.name = name
        branch = current_branch()
        own = self._random(branch.key)
        with branch.inside(self._reaches_outside()), own.swapped_in():
            self._object = factory()
        own.release()
        if level == "snapshot" and not (hasattr(self._object, "get_state") and hasattr(self._object, "set_state")):
            raise EnvironmentDefinitionError(
                f"{type(self._object).__qualname__} is a snapshot resource and needs get_state() and set_state(state)"
            )

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, or remember what it returned."""
        journal = self._episode.journal
        where = f"{self.name}.{method}"
        call = journal.open(
            asked_hash(self.name.encode(), method.encode(), encode_arguments(arguments)),
            lambda: f"{where}({shortened(plain(arguments))})",
        )
        await journal.reach(call)
        self._calls += 1
        recorded = call.recorded
        if isinstance(recorded, ResourceEntry):
            if recorded.level != self._level:
                journal.mismatch(call.call_id, f"{self.name} was {recorded.level}", f"the code now says {self._level}")
            if self._level == "pinned":
                self._lost(call)
            if self._level == "snapshot":
                return self._remembered(call, where)
        return await self._performed(call, method, arguments)

    def state(self) -> Any:
        """The object's state, where it can tell; None elsewhere. For comparisons."""
        if self._restore is not None:
            return self._restore
        get_state = getattr(self._object, "get_state", None)
        return journaled(get_state(), f"{self.name}.get_state") if callable(get_state) else None

    async def _performed(self, call: Call, method: str, arguments: tuple[Any, ...]) -> Any:
        journal, clock, where = self._episode.journal, self._episode.services.clock, f"{self.name}.{method}"
        started = clock.monotonic()
        value, problem, state = None, None, None
        cause: Exception | None = None
        own = self._random(self._key_of(call))
        with journal.performing(call, self._reaches_outside()):
            try:
                if self._restore is not None:
                    with own.swapped_in():
                        self._restored()
                value = journaled(await awaited_under(own, getattr(self._object, method), *arguments), where)
            except AgentRLError:
                raise
            except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is what happened
                problem, cause = error_text(error), error
            finally:
                own.release()
            if self._level == "snapshot":
                state = self._new_state()
        seconds = clock.monotonic() - started
        recorded = journal.recall(call, ResourceEntry)
        if recorded is None:
            journal.write(
                call,
                ResourceEntry(self.name, self._level, method, value, seconds, plain(list(arguments)), problem, state),
            )
        elif recorded.value != value or _kind(recorded.error) != _kind(problem):
            journal.mismatch(
                call.call_id,
                f"{where} returned {shortened(recorded.error or recorded.value)} when it was recorded",
                f"now {shortened(problem or value)}; declare the resource `snapshot` or `pinned`",
            )
        if problem is not None:
            raise EffectError(f"{where} failed", error=problem) from cause
        return value

    def _remembered(self, call: Call, where: str) -> Any:
        recorded = self._episode.journal.recall(call, ResourceEntry)
        assert recorded is not None
        if recorded.state is not None:
            self._restore, self._state = recorded.state, encode(recorded.state)
        if recorded.error is not None:
            raise EffectError(f"{where} failed", error=recorded.error)
        return recorded.value

    def _restored(self) -> None:
        self._object.set_state(self._restore)  # type: ignore[attr-defined]
        self._restore = None

    def _new_state(self) -> Any:
        """The state after a call; None where it is as after the call before."""
        state = journaled(self._object.get_state(), f"{self.name}.get_state")  # type: ignore[attr-defined]
        if state is None:
            raise EnvironmentDefinitionError(f"{type(self._object).__qualname__}.get_state() returned None")
        encoded = encode(state)
        if encoded == self._state:
            return None
        self._state = encoded
        return state

    def _lost(self, call: Call) -> None:
        raise EpisodeError(
            f"episode {self._episode.spec.episode_id}, call {call.call_id}: {self.name} is pinned and died with its "
            "process, so the episode cannot go on from its journal",
            reason="resource_lost",
            begin_again=True,
        )

    def _reaches_outside(self) -> str | None:
        """Its name, where its calls are never made again."""
        return None if self._level == "replay" else self.name

    def _key_of(self, call: Call) -> StreamKey:
        assert call.branch is not None
        return call.branch.key

    def _random(self, key: StreamKey) -> GlobalRandom:
        if self._seed is not None:
            return GlobalRandom(key64("resource", self._seed, self._calls))
        return GlobalRandom(key64("resource", *key, self.name, self._calls))


def _kind(error: str | None) -> str | None:
    """The type of a recorded error; messages may hold addresses and paths."""
    return None if error is None else error.partition(":")[0]
