"""The context of a running episode: tools, effects, resources, child episodes, branches, all through the journal.

What happens on re-execution differs by kind: plain code and tools run again and their observations are compared;
effects and external tools are memoised; a resource declares how it comes back. Sampling is in `agent.py`, resources in
`resources.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core import ids
from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError, ReplayMismatchError
from agentrl.core.records import EpisodeHeader, StopReason, Task, ToolSpec
from agentrl.core.rng import uuid4
from agentrl.environment.base import (
    ChildEpisode,
    ChildResult,
    Environment,
    EpisodeContext,
    Guarantee,
    LimitReachedError,
    Resource,
    ResourceLevel,
    ToolCallError,
    valid_unicode,
)
from agentrl.environment.registry import name_of
from agentrl.journal.entries import (
    EffectEntry,
    GatherEntry,
    OrderEntry,
    SpawnEntry,
    ToolEntry,
    ValueEntry,
    asked_hash,
)
from agentrl.rollout.agent import LiveAgent
from agentrl.rollout.calls import CallJournal, current_branch, enter_branch
from agentrl.rollout.journaled_data import checked, encode_arguments, plain
from agentrl.rollout.resources import LiveResource
from agentrl.rollout.threads import in_thread

if TYPE_CHECKING:
    import random

    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")

MAX_CHILD_DEPTH = 3
"""Child episodes of child episodes, at most: ids grow with depth and headers stay small."""


class LiveContext(EpisodeContext):
    """What `run` is given."""

    __slots__ = ("_journal", "_resources", "_services", "_spec", "agents", "episode", "limits", "stop_reason", "task")

    def __init__(self, episode: LiveEpisode) -> None:
        self.episode = episode
        self.task = episode.spec.task
        self.limits = episode.services.settings.limits
        self.agents: dict[tuple[str, int], LiveAgent] = {}
        self._spec = episode.spec
        self._journal = episode.journal
        self._services = episode.services
        self.stop_reason: StopReason | None = None
        self._resources = 0

    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> LiveAgent:
        """The handle of a seat's conversation."""
        found = self.agents.get((seat, index))
        if found is None:
            if seat not in self._spec.seats:
                known = ", ".join(repr(name) for name in self._spec.seats)
                raise EnvironmentDefinitionError(f"{self._spec.environment} has no seat {seat!r}; its seats: {known}")
            found = self.agents[seat, index] = LiveAgent(self.episode, seat, index, tools)
        return found

    async def call_tool(
        self,
        name: str,
        arguments: Any,
        call: Callable[[], str | Awaitable[str]],
        *,
        external: bool,
        timeout_s: float | None,
    ) -> str:
        """Run a tool; its failures are observations, its outcome is journaled."""
        asked = asked_hash(name.encode("utf-8", "replace"), encode_arguments(arguments))
        opened = self._journal.open(asked)
        recorded = self._journal.expect(opened, ToolEntry)
        if recorded is not None and (external or recorded.outcome == "timeout"):
            self.metric(f"tool/{recorded.outcome}", 1.0)
            return recorded.observation
        started = self._services.clock.monotonic()
        limit = self._services.settings.tool_timeout_s if timeout_s is None else timeout_s
        observation, outcome = await _observe(call, limit, external=external)
        self.metric(f"tool/{outcome}", 1.0)
        if recorded is not None:
            if recorded.observation != observation:
                raise ReplayMismatchError(
                    f"episode {self._spec.episode_id}, call {opened.call_id}: tool {name!r} returned "
                    f"{observation[:200]!r}, the journal holds {recorded.observation[:200]!r}. "
                    "A tool that reaches outside self must be @tool(external=True)"
                )
            return observation
        seconds = self._services.clock.monotonic() - started
        self._journal.write(opened, ToolEntry(name, plain(arguments), observation, outcome, external, seconds))
        return observation

    async def effect(
        self, name: str, function: Callable[[], T | Awaitable[T]], *, guarantee: Guarantee = "idempotent"
    ) -> T:
        """Perform once, remember for ever."""
        opened = self._journal.open(asked_hash(name.encode()))
        recorded = self._journal.expect(opened, EffectEntry)
        if recorded is not None:
            if recorded.error is not None:
                raise EpisodeError(f"effect {name!r} failed: {recorded.error}", reason="environment_error")
            value: T = recorded.value
            return value
        started = self._services.clock.monotonic()
        result = function()
        performed: T = await result if inspect.isawaitable(result) else result
        seconds = self._services.clock.monotonic() - started
        self._journal.write(opened, EffectEntry(name, guarantee, checked(performed, f"effect {name!r}"), None, seconds))
        return performed

    def resource(self, factory: Callable[[], object], *, level: ResourceLevel = "pinned") -> Resource:
        """Make a stateful object of this episode."""
        self._resources += 1
        return LiveResource(self.episode, factory(), f"resource-{self._resources}", level)

    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Start a group of child episodes."""
        if self._spec.episode_id.count("~") >= MAX_CHILD_DEPTH:
            raise EpisodeError(f"child episodes nest deeper than {MAX_CHILD_DEPTH}", reason="environment_error")
        opened = self._journal.open()
        if not isinstance(task, Task):
            task = Task(id=f"{self.task.id}~{opened.call_id}", data=dict(task))
        children = tuple(LiveChild(self._journal) for _ in range(n))
        group = self._services.host.spawn(
            self._spec,
            name_of(environment),
            [task] * n,
            opened.call_id,
            lambda index, header: children[index].end(header),
        )
        for child, episode_id in zip(children, group.episode_ids, strict=True):
            child.episode_id = episode_id
        if self._journal.expect(opened, SpawnEntry) is None:
            self._journal.write(opened, SpawnEntry(name_of(environment), group.group_id, group.episode_ids))
        return children

    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await on branches; the order in which they finished is journaled."""
        branch = current_branch()
        opened = self._journal.open()
        number = branch.calls - 1
        finished: list[int] = []

        async def on_branch(index: int, awaitable: Awaitable[Any]) -> Any:
            enter_branch(ids.child_branch(branch.path, number, index))
            value = await awaitable
            finished.append(index)
            return value

        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(on_branch(index, awaitable), context=contextvars.copy_context())
            for index, awaitable in enumerate(awaitables)
        ]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for awaitable in awaitables:
                if inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
                    awaitable.close()  # its branch never begins, and it would complain of that
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        if self._journal.expect(opened, OrderEntry) is None:
            self._journal.write(opened, OrderEntry(tuple(finished)))
        return list(results)

    def truncate(self, limit: LimitReachedError) -> None:
        """The episode counts as truncated."""
        self.stop_reason = limit.stop_reason

    @property
    def rng(self) -> random.Random:
        """The calling branch's random stream."""
        return current_branch().rng(self._spec.seed, self._spec.attempt)

    def now(self) -> float:
        """The journaled wall clock."""
        opened = self._journal.open()
        recorded = self._journal.expect(opened, ValueEntry)
        if recorded is not None:
            return float(recorded.value)
        value = self._services.clock.wall()
        self._journal.write(opened, ValueEntry("now", value))
        return value

    def uuid(self) -> str:
        """A UUID from the branch's random stream: the same on every execution, so it needs no entry."""
        return uuid4(self.rng)

    async def sleep(self, seconds: float) -> None:
        """Wait; a wait that was over before is not repeated."""
        opened = self._journal.open()
        if self._journal.expect(opened, ValueEntry) is None:
            await self._services.clock.sleep(seconds)
            self._journal.write(opened, ValueEntry("sleep", seconds))

    def metric(self, name: str, value: float) -> None:
        """Add to a number of the episode."""
        self.episode.metric(name, value)

    def close(self) -> None:
        """Give the engine back what the agents hold; nothing more can be done in the episode."""
        self._journal.end()
        for agent in self.agents.values():
            agent.close()


class LiveChild(ChildEpisode):
    """A child episode in flight."""

    __slots__ = ("_journal", "_result", "episode_id")

    def __init__(self, journal: CallJournal) -> None:
        self._journal = journal
        self._result: asyncio.Future[ChildResult] = asyncio.get_running_loop().create_future()
        self.episode_id = ""

    def end(self, header: EpisodeHeader) -> None:
        """Called by the host when the child has ended."""
        rewards: dict[str, float] = {}
        for trajectory in header.trajectories:
            if trajectory.reward is not None:
                rewards[trajectory.seat] = rewards.get(trajectory.seat, 0.0) + trajectory.reward
        if not self._result.done():
            self._result.set_result(
                ChildResult(episode_id=header.episode_id, drop_reason=header.drop_reason, rewards=rewards)
            )

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> ChildResult:
        journal = self._journal
        opened = journal.open(asked_hash(self.episode_id.encode()))
        recorded = journal.expect(opened, GatherEntry)
        if recorded is not None:
            return ChildResult(episode_id=recorded.child, drop_reason=recorded.drop_reason, rewards=recorded.rewards)
        result = await asyncio.shield(self._result)
        journal.write(opened, GatherEntry(result.episode_id, result.drop_reason, dict(result.rewards)))
        return result


async def _observe(call: Callable[[], str | Awaitable[str]], timeout_s: float, *, external: bool) -> tuple[str, str]:
    """A tool's observation and outcome. Whatever the tool raises is an observation: it is the policy's to handle."""
    try:
        if external and not inspect.iscoroutinefunction(call):
            async with asyncio.timeout(timeout_s):
                result = await in_thread(call)
        else:
            result = call()
        if inspect.isawaitable(result):
            async with asyncio.timeout(timeout_s):
                result = await result
        return valid_unicode(str(result)), "ok"
    except TimeoutError:
        return f"error: timed out after {timeout_s:g} s", "timeout"
    except ToolCallError as error:
        return f"error: {error}", error.outcome
    except EpisodeError:
        raise
    except Exception as error:  # noqa: BLE001 - a tool is foreign code, and its error is the policy's observation
        return valid_unicode(f"error: {type(error).__name__}: {error}"[:2000]), "error"
