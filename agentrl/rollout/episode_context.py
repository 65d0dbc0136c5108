"""The `ctx` of a running episode: each call goes through the journal.

Plain code and tools run again on re-execution, and their observations are compared. `effects.py` has the calls that are
performed once, `turn/agent.py` the turns, `calls/gather.py` the strands.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import msgspec

from agentrl.core.errors import (
    EnvironmentDefinitionError,
    EpisodeError,
)
from agentrl.core.ids import child_depth, seeded_uuid4
from agentrl.core.ports import PolicyCounts
from agentrl.core.records import PolicyVersion, ProposalNovelty, StopReason, Task, ToolSpec
from agentrl.core.text import plural
from agentrl.environment.context import (
    Agent,
    Aliases,
    ChildEpisode,
    Endpoint,
    EpisodeContext,
    EpisodeSandbox,
    Guarantee,
    LimitReachedError,
    Reconcile,
    Resource,
    ResourceLevel,
    Verdict,
)
from agentrl.environment.environment import Environment
from agentrl.environment.registry import name_of
from agentrl.journal.entries import (
    NondeterministicValueEntry,
    SpawnEntry,
    ToolEntry,
    request_hash,
)
from agentrl.observe.metrics import ILLEGAL_TURNS, RESERVED_NAMES, why_reserved
from agentrl.rollout.branching import BRANCHES_REFUSED, LeveledResource, LiveBranches, play_roulette
from agentrl.rollout.calls.gather import gather
from agentrl.rollout.calls.journal import CallExecution, JournaledCall, current_strand
from agentrl.rollout.calls.journal_data import (
    encode_arguments,
    to_journal_data,
    to_journal_data_and_bytes,
)
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.children import LiveChildEpisode
from agentrl.rollout.effects import (
    JournaledResource,
    count_call,
    may_perform_effect,
    observe_tool,
    perform_effect,
    raise_unknown_outcome,
    remember_proposal,
    retry_infrastructure,
)
from agentrl.rollout.external.agent import open_endpoint
from agentrl.rollout.sandbox import NAME as SANDBOX
from agentrl.rollout.sandbox import JournaledSandbox
from agentrl.rollout.turn.agent import LiveAgent
from agentrl.rollout.turn.recorder import TurnRecorder
from agentrl.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    import random

    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")

MAX_CHILD_DEPTH = 3
"""Maximum depth of child episodes: ids grow with depth, and headers must stay small."""
_NO_CHILDREN: Mapping[str, int] = MappingProxyType({})
MAX_UNDECLARED = 256
"""Maximum number of child episodes of an environment per attempt, if `fan_out` does not name it."""


def _check_argument(call: str, value: object, kind: Any, words: str) -> None:
    """Refuse an argument of another type than a call of the context takes."""
    if not isinstance(value, kind):
        raise EnvironmentDefinitionError(f"ctx.{call}() takes {words}, not {shortened_repr(value)}")


class LiveEpisodeContext(EpisodeContext):
    """The `EpisodeContext` that `run` is given."""

    __slots__ = (
        "_branches",
        "_fan_out",
        "_servers",
        "_spawned",
        "agents",
        "episode",
        "limits",
        "measured_against",
        "resources",
        "sandboxes",
        "stop_reason",
        "task",
    )

    def __init__(self, episode: LiveEpisode, environment: type[Environment]) -> None:
        self.episode = episode
        self._fan_out = environment.fan_out
        self._spawned: Mapping[str, int] = _NO_CHILDREN
        """Number of child episodes of this attempt, keyed by class name."""
        self._branches = LiveBranches(episode, environment.branches, environment.probes)
        self._roulette = environment.roulette
        if environment.branches:
            episode.turn_calls = []
        # A copy, as another process or life receives it: changes must not reach other episodes of this process.
        self.task = msgspec.msgpack.decode(msgspec.msgpack.encode(episode.spec.task), type=Task)
        self.limits = episode.limits
        episode.agents = self.agents = list[TurnRecorder]()
        """Agents in the order in which the program first requested them."""
        self.measured_against: dict[str, PolicyVersion] | None = None
        self.stop_reason: StopReason | None = None
        self.resources: tuple[JournaledResource, ...] = ()
        self.sandboxes: tuple[JournaledSandbox, ...] = ()
        self._servers: Sequence[LeveledResource] = getattr(environment, "mcp_servers", ())

    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> TurnRecorder:
        """The handle of a seat's conversation."""
        agent_found = next((agent for agent in self.agents if agent.seat == seat and agent.index == index), None)
        if agent_found is None:
            _check_argument("agent", index, int, "an index that is a whole number")
            for tool in [tools] if isinstance(tools, str) else tools:
                _check_argument("agent", tool, ToolSpec, "tools that are agentrl.ToolSpec")
            if seat not in self.episode.spec.seats:
                seats = ", ".join(repr(name) for name in self.episode.spec.seats)
                raise EnvironmentDefinitionError(
                    f"{self.episode.spec.environment} has no seat {seat!r}; its seats: {seats}"
                )
            agent_found = new_agent = LiveAgent(self.episode, seat, index, tools)
            self._branches.keep_version(new_agent)
            self.agents.append(new_agent)
        return agent_found

    async def call_tool(
        self,
        name: str,
        arguments: Any,
        call: Callable[[], str | Awaitable[str]],
        *,
        external: bool,
        timeout_s: float | None,
        guarantee: Guarantee = "idempotent",
        at_once: bool = False,
        may_repeat: bool = False,
    ) -> str:
        """Run a tool: its failures are observations, and its outcome is journaled."""
        journal, clock = self.episode.journal, self.episode.services.clock
        call_arguments, encoded = to_journal_data_and_bytes(arguments)
        opened = journal.open(
            request_hash(name.encode("utf-8", "replace"), encoded), lambda: f"{name}({shortened_repr(call_arguments)})"
        )
        result = opened.recorded if isinstance(opened.recorded, ToolEntry) else None
        begins_early = at_once and not external and result is opened.recorded
        if opened.waits and not begins_early:
            await journal.reach(opened)
        # Other tools run again, even if they timed out, because they may change `self`.
        if external and (recalled := journal.recall(opened, ToolEntry)) is not None:
            return self._observed(opened, recalled)
        act_name = f"tool {name!r}"
        started = clock.monotonic()
        with CallExecution(journal, opened, act_name if external else None):
            if external and not await may_perform_effect(
                self.episode, opened, act_name, guarantee, may_repeat=may_repeat
            ):
                raise_unknown_outcome(self.episode, opened, act_name)
            if external:
                observation, outcome, location = await self._observe_external(call, timeout_s, guarantee)
            else:
                default_s = self.episode.services.settings.tool_timeout_s
                observation, outcome, location = await observe_tool(call, timeout_s, default_s, external=False)
        if opened.recorded is None:
            if begins_early and journal.is_replaying:
                await journal.reach(opened)
            seconds = clock.monotonic() - started
            entry = ToolEntry(name, call_arguments, observation, outcome, external, seconds, location)
            journal.record(opened, entry)
            return self._observed(opened, entry)
        await journal.reach(opened)  # the tool may have made journaled calls
        recorded = journal.recall(opened, ToolEntry)
        assert recorded is not None
        if recorded.observation != observation and not recorded.outcome == outcome == "timeout":
            journal.mismatch(
                opened.call_id,
                f"tool {name!r} returned {shortened_repr(recorded.observation)} when it was recorded",
                f"now {shortened_repr(observation)}; a tool that reaches outside self must be @tool(external=True)",
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
        """Perform an effect once, and recall it from the journal afterward."""
        return await perform_effect(self.episode, name, function, guarantee, reconcile)

    def resource(
        self, factory: Callable[[], object], *, level: ResourceLevel = "pinned", seed: int | None = None
    ) -> Resource:
        """Make a stateful object of this episode."""
        _check_argument("resource", factory, Callable, "a function that makes the object")
        strand = current_strand()
        strand.resources += 1
        resource = JournaledResource(self.episode, factory, f"resource {strand.path}.{strand.resources}", level, seed)
        self.resources = (*self.resources, resource)
        return resource

    def sandbox(self, limits: Sandbox) -> EpisodeSandbox:
        """Make a sandbox of this episode."""
        _check_argument("sandbox", limits, Sandbox, "an agentrl.Sandbox")
        if limits.network == "gateway":
            raise EnvironmentDefinitionError(
                'a sandbox with network="gateway" is for the program of a HarnessEnvironment; write "none" or "open"'
            )
        strand = current_strand()
        strand.resources += 1
        sandbox = JournaledSandbox(self.episode, limits, f"{SANDBOX} {strand.path}.{strand.resources}")
        self.sandboxes = (*self.sandboxes, sandbox)
        return sandbox

    def endpoint(
        self,
        *,
        aliases: Aliases = (),
        volatile: Sequence[str] = (),
        ignored_fields: Sequence[str] = (),
        recall: bool = True,
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Serve the seats to an external agent."""
        self.episode.check_not_stopped("ctx.endpoint()")
        return open_endpoint(self.episode, self.agents, aliases, volatile, ignored_fields, recall=recall)

    def patched(self, id: str) -> bool:
        """Whether code that was added while episodes were in flight may run here."""
        return self.episode.journal.patched(id)

    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Start a group of child episodes.

        Raises:
            EpisodeError: the number exceeds the limit; none was admitted.
        """
        self.episode.check_not_stopped("ctx.spawn()")
        _check_argument("spawn", environment, type, "an environment class")
        _check_argument("spawn", task, Task | Mapping, "an agentrl.Task, or a dict of its data,")
        _check_argument("spawn", n, int, "n as a whole number")
        if self.episode.roulette_weight != 1.0:
            raise EnvironmentDefinitionError(
                "ctx.spawn() was called after ctx.roulette, whose survivors count for more, and their children would "
                "not; call it before"
            )
        if child_depth(self.episode.spec.episode_id) >= MAX_CHILD_DEPTH:
            raise EpisodeError(f"child episodes nest deeper than {MAX_CHILD_DEPTH}", reason="environment_error")
        name = name_of(environment)
        identity, data = ("", task) if not isinstance(task, Task) else (task.id, task.data)
        opened = self.episode.journal.open(
            # By class, as in `fan_out`: an edited copy of an environment's file has another module.
            request_hash(*map(encode_arguments, (environment.__name__, n, identity, data))),
            lambda: (
                f"the start of {plural(n, 'child', 'children')} of {name} on {shortened_repr(to_journal_data(data))}"
            ),
        )
        recorded = self.episode.journal.recall(opened, SpawnEntry)
        if recorded is None:  # recorded children were already admitted under the fan-out of that time
            self._check_fan_out(environment, n)
        self._spawned = {**self._spawned, environment.__name__: self._spawned.get(environment.__name__, 0) + n}
        if not isinstance(task, Task):
            task = Task(id=f"{self.task.id}~{opened.call_id}", data=dict(task))
        if self.measured_against is None:
            self.measured_against = {}
        measured_against = self.measured_against
        children = tuple(LiveChildEpisode(self.episode, measured_against) for _ in range(n))
        group = self.episode.services.host.spawn(
            self.episode.spec,
            name,
            [task] * n,
            opened.call_id,
            lambda index, header: children[index].end(header),
            recorded.children if recorded is not None and self.episode.spec.fork is not None else (),
        )
        for child, episode_id in zip(children, group.episode_ids, strict=True):
            child.episode_id = episode_id
        if recorded is None:
            self.episode.journal.record(opened, SpawnEntry(name, group.group_id, group.episode_ids))
        return children

    def _check_fan_out(self, environment: type[Environment], n: int) -> None:
        """Refuse children beyond the declared fan-out, over all calls of the attempt, and children of a probe."""
        if self.episode.spec.is_probe:
            raise EpisodeError(
                "ctx.spawn was called in a probe, whose children would be trained; end the episode without child "
                "episodes, or use trained branches",
                reason=BRANCHES_REFUSED,
            )
        name = environment.__name__
        declared = self._fan_out.get(name)
        spawned = self._spawned.get(name, 0)
        requested = spawned + n
        if requested > (MAX_UNDECLARED if declared is None else declared):
            parent = self.episode.spec.environment.rpartition(":")[2]
            declaration = (
                f"declares {declared}" if declared is not None else f"declares none (so at most {MAX_UNDECLARED})"
            )
            before = f" after {spawned} before" if spawned else ""
            raise EpisodeError(
                f"{parent} {declaration} of {name} in fan_out, but ctx.spawn asked for {n}{before}: none was "
                f"started. Declare the total that one episode starts: fan_out = {{{name!r}: {requested}}}",
                reason="fan_out",
            )

    def branches_left(self) -> int:
        return self._branches.left()

    async def branch(self, n: int, *, probe: bool = False) -> int:
        self.episode.check_not_stopped("ctx.branch()")
        return await self._branches.start(
            n, self.agents, self._leveled(), has_children=bool(self._spawned), probe=probe
        )

    async def resample(self, n: int, *, at: int, weight: float = 1.0) -> None:
        self.episode.check_not_stopped("ctx.resample()")
        await self._branches.resample(n, at, weight, self.agents, self._leveled(), has_children=bool(self._spawned))

    def _leveled(self) -> Sequence[LeveledResource]:
        return [*self.resources, *self.sandboxes, *self._servers]

    async def roulette(self, survival: float) -> bool:
        return await play_roulette(self.episode, survival, self.agents, declared=self._roulette)

    def score(self, scorer: str, agent: Agent) -> Verdict:
        """Ask for the score of an agent's newest turn."""
        current_strand()  # refuses tasks that are not the program's
        self.episode.check_not_stopped("ctx.score()")
        if not (isinstance(agent, TurnRecorder) and agent in self.agents and agent.turns):
            raise EnvironmentDefinitionError(f"ctx.score({scorer!r}, …) needs an agent of this episode that has acted")
        if self.episode.scores is None:
            raise EnvironmentDefinitionError(f"ctx.score({scorer!r}): the run has no scorers; add [scorers.{scorer}]")
        return self.episode.scores.ask(scorer, agent)

    async def remember(self, key: str, structure: str = "") -> ProposalNovelty:
        """Ask the run once, and recall the answer afterward."""
        return await remember_proposal(self.episode, key, structure)

    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await on strands; their ends, and the order of the ends, are journaled."""
        for awaitable in awaitables:
            _check_argument("gather", awaitable, Awaitable, "awaitables, as in ctx.gather(*calls),")
        return await gather(self.episode.journal, awaitables)

    def truncate(self, limit: LimitReachedError) -> None:
        """Mark the episode as truncated."""
        _check_argument("truncate", limit, LimitReachedError, "the LimitReachedError that was caught")
        self.stop_reason = limit.stop_reason

    @property
    def rng(self) -> random.Random:
        """The calling strand's random stream."""
        return current_strand().rng

    def now(self) -> float:
        """Return the journaled wall-clock time."""
        opened = self.episode.journal.open(request_hash(b"now"), lambda: "the time")
        recorded = self.episode.journal.recall(opened, NondeterministicValueEntry)
        if recorded is not None:
            return float(recorded.value)
        value = self.episode.services.clock.wall()
        self.episode.journal.record(opened, NondeterministicValueEntry("now", value))
        return value

    def uuid(self) -> str:
        """Draw a UUID from the strand's random stream: the same on every execution, so it needs no entry."""
        return seeded_uuid4(self.rng)

    async def sleep(self, seconds: float) -> None:
        """Wait; a recorded wait is not repeated, however long the code now waits."""
        _check_argument("sleep", seconds, Real, "seconds as a number")
        opened = self.episode.journal.open(request_hash(b"sleep"), lambda: f"a sleep of {seconds:g} s")
        await self.episode.journal.reach(opened)
        if self.episode.journal.recall(opened, NondeterministicValueEntry) is None:
            with CallExecution(self.episode.journal, opened):
                await self.episode.services.clock.sleep(seconds)
            self.episode.journal.record(opened, NondeterministicValueEntry("sleep", seconds))

    def metric(self, name: str, value: float) -> None:
        _check_argument("metric", name, str, "a name that is a string")
        _check_argument("metric", value, SupportsFloat, f"a number for {name!r}")
        if not math.isfinite(value):
            raise EnvironmentDefinitionError(f"ctx.metric() takes a finite number for {name!r}, not {value}")
        if (why := why_reserved(name)) is not None:
            raise EnvironmentDefinitionError(
                f"ctx.metric() cannot record {name!r}, because {why}. Choose another name; reserved are "
                f"{', '.join(RESERVED_NAMES)} and the names in docs/reference/metrics.md"
            )
        self.episode.metric(name, value, self.episode.speaker() if name == ILLEGAL_TURNS else None)

    async def _observe_external(
        self, call: Callable[[], str | Awaitable[str]], own_s: float | None, guarantee: Guarantee
    ) -> tuple[str, str, str]:
        """Return the result of `observe_tool` for an external tool."""
        default_s = self.episode.services.settings.tool_timeout_s
        return await retry_infrastructure(
            self.episode, guarantee, lambda: observe_tool(call, own_s, default_s, external=True)
        )

    def _observed(self, call: JournaledCall, entry: ToolEntry) -> str:
        self.episode.metric(sys.intern(f"tool/{entry.outcome}"), 1.0, self.episode.speaker(call.strand))
        if entry.outcome in ("ok", "error", "timeout"):
            error = None if entry.outcome == "ok" else entry.error
            count_call(self.episode, f"tool {entry.name}", error, f"tool/{entry.outcome}", entry.location)
        return entry.observation

    def counted(self) -> Mapping[str, PolicyCounts]:
        """Return turns and metrics of each policy that acted: its own metrics, and those of no particular agent."""
        acted = [agent for agent in self.agents if agent.sampled_turns]
        agent_metrics = {name for agent in acted for name in agent.counts}
        counted: dict[str, PolicyCounts] = {}
        everything = self.episode.metrics
        for agent in acted:
            shared = {name: value for name, value in everything.items() if name not in agent_metrics}
            turns, metrics = counted.get(agent.policy, PolicyCounts(0, shared))
            for name, value in agent.counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
            counted[agent.policy] = PolicyCounts(turns + agent.sampled_turns, metrics)
        return counted

    def close(self) -> None:
        """Close the journal, and release the engine's resources of the agents."""
        self.episode.journal.end()
        for agent in self.agents:
            agent.close()
        for resource in self.resources:
            resource.close()
        for sandbox in self.sandboxes:
            sandbox.close()
