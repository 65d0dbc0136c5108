"""The context of a running episode: tools, effects, resources, child episodes, branches, all through the journal.

What happens on re-execution differs by kind: plain code and tools run again and their observations are compared;
effects and external tools are memoised; a resource declares how it comes back. Sampling is in `agent.py`, resources in
`resources.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.errors import (
    EffectError,
    EnvironmentDefinitionError,
    EpisodeError,
    InfrastructureError,
    error_words,
)
from agentrl.core.ports import Counted
from agentrl.core.proposals import Recollection
from agentrl.core.records import EpisodeHeader, PolicyVersion, StopReason, Task, ToolSpec
from agentrl.core.rng import uuid4
from agentrl.environment.base import (
    ChildEpisode,
    ChildResult,
    Environment,
    EpisodeContext,
    Guarantee,
    LimitReachedError,
    Reconcile,
    Resource,
    ResourceLevel,
    ToolCallError,
    valid_unicode,
)
from agentrl.environment.registry import name_of
from agentrl.journal.entries import GatherEntry, SpawnEntry, ToolEntry, ValueEntry, asked_hash
from agentrl.observe.metrics import BROKEN_FORMAT
from agentrl.rollout.agent import LiveAgent
from agentrl.rollout.branches import current_branch
from agentrl.rollout.calls import Call
from agentrl.rollout.effects import (
    error_text,
    insist,
    may_perform,
    out_of_reach,
    perform_effect,
    remember,
    unknown_effect,
)
from agentrl.rollout.gathering import gather
from agentrl.rollout.journaled_data import plain_and_encoded
from agentrl.rollout.recorded_words import shortened
from agentrl.rollout.resources import LiveResource
from agentrl.rollout.threads import in_thread

if TYPE_CHECKING:
    import random

    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")

MAX_CHILD_DEPTH = 3
"""Child episodes of child episodes, at most: ids grow with depth and headers stay small."""
_NO_CHILDREN: Mapping[str, int] = MappingProxyType({})
MAX_UNDECLARED = 256
"""Child episodes of one environment that an attempt may start where its `fan_out` says nothing of them."""


class LiveContext(EpisodeContext):
    """What `run` is given."""

    __slots__ = (
        "_fan_out",
        "_journal",
        "_services",
        "_spawned",
        "_spec",
        "agents",
        "episode",
        "limits",
        "measured_against",
        "resources",
        "stop_reason",
        "task",
    )

    def __init__(self, episode: LiveEpisode, environment: type[Environment]) -> None:
        self.episode = episode
        self._fan_out = environment.fan_out
        self._spawned: Mapping[str, int] = _NO_CHILDREN
        """Child episodes of this attempt, by class name."""
        self.task = episode.spec.task
        self.limits = episode.limits
        self.agents: dict[tuple[str, int], LiveAgent] = {}
        self.measured_against: dict[str, PolicyVersion] | None = None
        """See `EpisodeHeader.measured_against`; None until there are children."""
        self._spec = episode.spec
        self._journal = episode.journal
        self._services = episode.services
        self.stop_reason: StopReason | None = None
        self.resources: tuple[LiveResource, ...] = ()

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
        guarantee: Guarantee = "idempotent",
    ) -> str:
        """Run a tool; its failures are observations, its outcome is journaled."""
        journal, clock = self._journal, self._services.clock
        asked, encoded = plain_and_encoded(arguments)
        opened = journal.open(
            asked_hash(name.encode("utf-8", "replace"), encoded), lambda: f"{name}({shortened(asked)})"
        )
        if journal.must_wait(opened):
            await journal.reach(opened)
        if isinstance(opened.recorded, ToolEntry) and (external or opened.recorded.outcome == "timeout"):
            return self._observed(opened, journal.recall(opened, ToolEntry) or opened.recorded)
        what = f"tool {name!r}"
        started = clock.monotonic()
        with journal.performing(opened, what if external else None):
            if external and not await may_perform(self.episode, opened, what, guarantee):
                raise unknown_effect(self.episode, opened, what)
            if external:
                observation, outcome = await self._insisted(call, timeout_s, guarantee)
            else:
                default_s = self._services.settings.tool_timeout_s
                observation, outcome = await _observe(call, timeout_s, default_s, external=False)
        if opened.recorded is not None:
            await journal.reach(opened)  # the tool may have made calls of its own
        recorded = journal.recall(opened, ToolEntry)
        if recorded is None:
            seconds = clock.monotonic() - started
            recorded = ToolEntry(name, asked, observation, outcome, external, seconds)
            journal.write(opened, recorded)
        elif recorded.observation != observation:
            journal.mismatch(
                opened.call_id,
                f"tool {name!r} returned {shortened(recorded.observation)} when it was recorded",
                f"now {shortened(observation)}; a tool that reaches outside self must be @tool(external=True)",
            )
        return self._observed(opened, recorded)

    async def effect(
        self,
        name: str,
        function: Callable[[], T | Awaitable[T]],
        *,
        guarantee: Guarantee = "idempotent",
        reconcile: Reconcile[T] | None = None,
    ) -> T:
        """Perform once, remember for ever."""
        return await perform_effect(self.episode, name, function, guarantee, reconcile)

    def resource(
        self, factory: Callable[[], object], *, level: ResourceLevel = "pinned", seed: int | None = None
    ) -> Resource:
        """Make a stateful object of this episode."""
        branch = current_branch()
        branch.resources += 1
        resource = LiveResource(self.episode, factory, f"resource {branch.path}.{branch.resources}", level, seed)
        self.resources = (*self.resources, resource)
        return resource

    def patched(self, id: str) -> bool:
        """Whether code that was added under running episodes may run here."""
        return self._journal.patched(id)

    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Start a group of child episodes.

        Raises:
            EpisodeError: they are more than may be; none of them was admitted.
        """
        if self._spec.episode_id.count("~") >= MAX_CHILD_DEPTH:
            raise EpisodeError(f"child episodes nest deeper than {MAX_CHILD_DEPTH}", reason="environment_error")
        opened = self._journal.open()
        recorded = self._journal.recall(opened, SpawnEntry)
        if recorded is None:  # else they were admitted, whatever is declared now
            self._check_fan_out(environment, n)
        self._spawned = {**self._spawned, environment.__name__: self._spawned.get(environment.__name__, 0) + n}
        if not isinstance(task, Task):
            task = Task(id=f"{self.task.id}~{opened.call_id}", data=dict(task))
        if self.measured_against is None:
            self.measured_against = {}
        measured_against = self.measured_against
        children = tuple(LiveChild(self.episode, measured_against) for _ in range(n))
        group = self._services.host.spawn(
            self._spec,
            name_of(environment),
            [task] * n,
            opened.call_id,
            lambda index, header: children[index].end(header),
            recorded.children if recorded is not None and self._spec.fork is not None else (),
        )
        for child, episode_id in zip(children, group.episode_ids, strict=True):
            child.episode_id = episode_id
        if recorded is None:
            self._journal.write(opened, SpawnEntry(name_of(environment), group.group_id, group.episode_ids))
        return children

    def _check_fan_out(self, environment: type[Environment], n: int) -> None:
        """Refuse children beyond what the environment declares, over all calls of the attempt."""
        name = environment.__name__
        declared = self._fan_out.get(name)
        spawned = self._spawned.get(name, 0)
        asked = spawned + n
        if asked > (MAX_UNDECLARED if declared is None else declared):
            parent = self._spec.environment.rpartition(":")[2]
            said = f"declares {declared}" if declared is not None else f"declares none (so at most {MAX_UNDECLARED})"
            before = f" after {spawned} before" if spawned else ""
            raise EpisodeError(
                f"{parent} {said} of {name} in fan_out, and ctx.spawn asked for {n}{before}: none of these was "
                f"started. Declare as many as an episode starts in all: fan_out = {{{name!r}: {asked}}}",
                reason="fan_out",
            )

    async def remember(self, key: str, structure: str = "") -> Recollection:
        """Ask the run, once."""
        return await remember(self.episode, key, structure)

    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await on branches; that they ended, and in which order, is journaled."""
        return await gather(self._journal, awaitables)

    def truncate(self, limit: LimitReachedError) -> None:
        """The episode counts as truncated."""
        self.stop_reason = limit.stop_reason

    @property
    def rng(self) -> random.Random:
        """The calling branch's random stream."""
        return current_branch().rng

    def now(self) -> float:
        """The journaled wall clock."""
        opened = self._journal.open()
        recorded = self._journal.recall(opened, ValueEntry)
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
        await self._journal.reach(opened)
        if self._journal.recall(opened, ValueEntry) is None:
            with self._journal.performing(opened):
                await self._services.clock.sleep(seconds)
            self._journal.write(opened, ValueEntry("sleep", seconds))

    def metric(self, name: str, value: float) -> None:
        """Add to a number of the episode; who breaks the format is whoever acted last."""
        self.episode.metric(name, value, self.episode.speaker() if name in BROKEN_FORMAT else None)

    async def _insisted(
        self, call: Callable[[], str | Awaitable[str]], own_s: float | None, guarantee: Guarantee
    ) -> tuple[str, str]:
        """Observation and outcome of an external tool."""
        try:
            default_s = self._services.settings.tool_timeout_s
            return await insist(self.episode, guarantee, lambda: _observe(call, own_s, default_s, external=True))
        except InfrastructureError as error:
            return f"error: {error_text(error)}", "error" if guarantee == "once" else "infrastructure"

    def _observed(self, call: Call, entry: ToolEntry) -> str:
        self.episode.metric(f"tool/{entry.outcome}", 1.0, self.episode.speaker(call.branch))
        if entry.outcome == "infrastructure":
            raise out_of_reach(f"tool {entry.name!r}", entry.observation)
        return entry.observation

    def counted(self) -> Mapping[str, Counted]:
        """What each policy that acted has counted: its own, and what is nobody's in particular."""
        acted = [agent for agent in self.agents.values() if agent.turns]
        own = {name for agent in acted for name in agent.counts}
        counted: dict[str, Counted] = {}
        everything = self.episode.metrics
        for agent in acted:
            shared = {name: value for name, value in everything.items() if name not in own}
            turns, metrics = counted.get(agent.policy, Counted(0, shared))
            for name, value in agent.counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
            counted[agent.policy] = Counted(turns + len(agent.turns), metrics)
        return counted

    def close(self) -> None:
        """Give the engine back what the agents hold; nothing more can be done in the episode."""
        self._journal.end()
        for agent in self.agents.values():
            agent.close()


class LiveChild(ChildEpisode):
    """A child episode in flight."""

    __slots__ = ("_measured_against", "_parent", "_result", "episode_id")

    def __init__(self, parent: LiveEpisode, measured_against: dict[str, PolicyVersion]) -> None:
        """`measured_against`: its parent's, which learns from it whose rewards it was told."""
        self._parent = parent
        self._measured_against = measured_against
        self._result: asyncio.Future[ChildResult] = asyncio.get_running_loop().create_future()
        self.episode_id = ""

    def end(self, header: EpisodeHeader) -> None:
        """Called by the host when the child has ended."""
        rewards: dict[str, float] = {}
        versions: dict[str, PolicyVersion] = {}
        for own in header.trajectories:
            if own.reward is not None:
                rewards[own.seat] = rewards.get(own.seat, 0.0) + own.reward
            version = PolicyVersion(own.policy, own.lineage, own.oldest_step)
            versions[own.policy] = min(versions.get(own.policy, version), version)
        if not self._result.done():
            self._result.set_result(
                ChildResult(
                    episode_id=header.episode_id, drop_reason=header.drop_reason, rewards=rewards, versions=versions
                )
            )

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> ChildResult:
        journal = self._parent.journal
        opened = journal.open(asked_hash(self.episode_id.encode()), lambda: f"the wait for {self.episode_id}")
        await journal.reach(opened)
        recorded = journal.recall(opened, GatherEntry)
        if recorded is not None:
            versions = {policy: PolicyVersion(policy, *at) for policy, at in recorded.versions.items()}
            return self._told(
                ChildResult(
                    episode_id=recorded.child,
                    drop_reason=recorded.drop_reason,
                    rewards=recorded.rewards,
                    versions=versions,
                )
            )
        with journal.performing(opened), self._parent.standing_still():  # the child has a limit of its own
            result = await asyncio.shield(self._result)
        at = {policy: (version.lineage, version.step) for policy, version in result.versions.items()}
        journal.write(opened, GatherEntry(result.episode_id, result.drop_reason, dict(result.rewards), at))
        return self._told(result)

    def _told(self, result: ChildResult) -> ChildResult:
        for policy, version in result.versions.items():
            self._measured_against[policy] = min(self._measured_against.get(policy, version), version)
        return result


async def _observe(
    call: Callable[[], str | Awaitable[str]], own_s: float | None, default_s: float, *, external: bool
) -> tuple[str, str]:
    """A tool's observation and outcome. Whatever the tool raises is an observation: it is the policy's to handle.

    `own_s` is what the tool itself says of how long it may take.
    """
    limit_s = default_s if own_s is None else own_s
    timer: asyncio.Timeout | None = None
    try:
        if external and not inspect.iscoroutinefunction(call):
            async with asyncio.timeout(limit_s) as timer:
                result: Any = await in_thread(call)
        else:
            result = call()
            if not isinstance(result, str) and inspect.isawaitable(result):
                async with asyncio.timeout(limit_s) as timer:
                    result = await result
        return valid_unicode(str(result)), "ok"
    except ToolCallError as error:
        return f"error: {error}", error.outcome
    except EffectError as error:  # of the outside, which the tool asked: as if the tool itself had raised it
        return f"error: {error.error}", "error"
    except (EpisodeError, LimitReachedError):
        raise
    except InfrastructureError as error:
        if external:
            raise
        return f"error: {error_text(error)}", "error"
    except Exception as error:  # noqa: BLE001 - a tool is foreign code, and its error is the policy's observation
        if isinstance(error, TimeoutError) and timer is not None and timer.expired():  # a tool may raise one of its own
            setting = "environment.tool_timeout_s or @tool" if own_s is None else "its @tool"
            return f"error: timed out after {limit_s:g} s ({setting}(timeout_s=…))", "timeout"
        return valid_unicode(f"error: {error_words(error)}"[:2000]), "error"
