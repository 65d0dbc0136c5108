"""The `ctx` of a running episode: each call goes through the journal.

Plain code and tools run again on re-execution, and their observations are compared. `effects.py` has the calls that are
performed once, `turn/agent.py` the turns, `calls/gather.py` the strands.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import msgspec

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.ids import child_depth, child_episode_id, seeded_uuid4, spawned_group_id
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
from agentrl.journal.entries import NondeterministicValueEntry, SpawnEntry, ToolEntry, request_hash
from agentrl.observe.metrics import ILLEGAL_TURNS, RESERVED_NAMES, why_reserved
from agentrl.rollout.branching import LeveledResource, LiveBranches
from agentrl.rollout.calls.gather import gather
from agentrl.rollout.calls.journal import JournaledCall, RepeatedCode, current_strand
from agentrl.rollout.calls.journal_data import encode_arguments, to_journal_data, to_journal_data_and_bytes
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.children import LiveChildEpisode
from agentrl.rollout.effects import (
    JournaledResource,
    begin_effect,
    count_call,
    observe_tool,
    perform_effect,
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
    """Refuse an argument of another type than a call of the context takes. A truth value is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (Integral, Real)):
        raise EnvironmentDefinitionError(f"ctx.{call}() takes {words}, not {shortened_repr(value)}")


def _whole_number(call: str, value: Any, words: str) -> int:
    """Return a whole number of at least 0, which may be numpy's."""
    words += " that is a whole number of at least 0"
    _check_argument(call, value, Integral, words)
    if value < 0:
        raise EnvironmentDefinitionError(f"ctx.{call}() takes {words}, not {value}")
    return int(value)


def _sum(*counts: Mapping[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


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
        self._branches = LiveBranches(episode, environment.branches)
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
        index = _whole_number("agent", index, "an index")
        agent_found = next((agent for agent in self.agents if agent.seat == seat and agent.index == index), None)
        if agent_found is None:
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
        may_repeat: bool = False,
    ) -> str:
        """Run a tool: its failures are observations, and its outcome is journaled."""
        episode = self.episode
        journal, clock, default_s = episode.journal, episode.services.clock, episode.services.settings.tool_timeout_s
        call_arguments, encoded = to_journal_data_and_bytes(arguments)
        act_name = f"tool {name!r}"

        async def run(opened: JournaledCall) -> ToolEntry:
            started = clock.monotonic()
            if external:
                await begin_effect(episode, opened, act_name, guarantee, may_repeat=may_repeat)
                seen = await retry_infrastructure(
                    episode, guarantee, lambda: observe_tool(call, timeout_s, default_s, external=True)
                )
            else:
                seen = await RepeatedCode(journal, opened, observe_tool(call, timeout_s, default_s, external=False))
            observation, outcome, location = seen
            seconds = clock.monotonic() - started
            return ToolEntry(name, call_arguments, observation, outcome, external, seconds, location)

        def compare(recorded: ToolEntry, result: ToolEntry) -> tuple[str, str] | None:
            if recorded.observation == result.observation or recorded.outcome == result.outcome == "timeout":
                return None
            return (
                f"{act_name} returned {shortened_repr(recorded.observation)} when it was recorded",
                f"now {shortened_repr(result.observation)}; a tool that reaches outside self must be "
                "@tool(external=True)",
            )

        entry = await journal.call(
            request_hash(name.encode("utf-8", "replace"), encoded),
            lambda: f"{name}({shortened_repr(call_arguments)})",
            ToolEntry,
            run,
            repeats=None if external else compare,  # also a tool that timed out, because it may have changed `self`
            memoised=act_name if external else None,
        )
        episode.metric(sys.intern(f"tool/{entry.outcome}"), 1.0, episode.speaker())
        if entry.outcome in ("ok", "error", "timeout"):
            error = None if entry.outcome == "ok" else entry.error
            count_call(episode, f"tool {entry.name}", error, f"tool/{entry.outcome}", entry.location)
        return entry.observation

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
        _check_argument("spawn", environment, type, "an environment class")
        _check_argument("spawn", task, Task | Mapping, "an agentrl.Task, or a dict of its data,")
        n = _whole_number("spawn", n, "n")
        name, spec = name_of(environment), self.episode.spec
        identity, data = ("", task) if not isinstance(task, Task) else (task.id, task.data)
        if self.measured_against is None:
            self.measured_against = {}
        measured_against = self.measured_against
        children = tuple(LiveChildEpisode(self.episode, measured_against) for _ in range(n))

        def make(call: JournaledCall) -> SpawnEntry:
            # Recorded children were already admitted under the fan-out of that time.
            self._check_fan_out(environment, n)
            own = (spec.episode_id, spec.attempt, call.call_id)
            return SpawnEntry(name, spawned_group_id(*own), tuple(child_episode_id(*own, index) for index in range(n)))

        def start(call: JournaledCall, entry: SpawnEntry) -> None:
            child_task = task if isinstance(task, Task) else Task(id=f"{self.task.id}~{call.call_id}", data=dict(task))
            for child, episode_id in zip(children, entry.children, strict=True):
                child.episode_id = episode_id
            self.episode.services.host.spawn(
                self._branches.pinned(spec),
                name,
                [child_task] * n,
                call.call_id,
                lambda index, header: children[index].end(header),
                entry.children,
            )

        self.episode.journal.answer(
            # By class, as in `fan_out`: an edited copy of an environment's file has another module.
            request_hash(*map(encode_arguments, (environment.__name__, n, identity, data))),
            lambda: (
                f"the start of {plural(n, 'child', 'children')} of {name} on {shortened_repr(to_journal_data(data))}"
            ),
            SpawnEntry,
            make,
            start,
        )
        self._spawned = {**self._spawned, environment.__name__: self._spawned.get(environment.__name__, 0) + n}
        return children

    def _check_fan_out(self, environment: type[Environment], n: int) -> None:
        """Refuse children beyond the declared fan-out, over all calls of the attempt."""
        if child_depth(self.episode.spec.episode_id) >= MAX_CHILD_DEPTH:
            raise EpisodeError(f"child episodes nest deeper than {MAX_CHILD_DEPTH}", reason="environment_error")
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

    async def branch(self, n: int) -> int:
        resources: list[LeveledResource] = [*self.resources, *self.sandboxes, *self._servers]
        return await self._branches.start(n, self.agents, resources, has_children=bool(self._spawned))

    def score(self, scorer: str, agent: Agent) -> Verdict:
        """Ask for the score of an agent's newest turn."""
        current_strand()  # refuses tasks that are not the program's
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
        clock = self.episode.services.clock
        entry = self.episode.journal.answer(
            request_hash(b"now"),
            lambda: "the time",
            NondeterministicValueEntry,
            lambda call: NondeterministicValueEntry("now", clock.wall()),
        )
        return float(entry.value)

    def uuid(self) -> str:
        """Draw a UUID from the strand's random stream: the same on every execution, so it needs no entry."""
        return seeded_uuid4(self.rng)

    async def sleep(self, seconds: float) -> None:
        """Wait; a recorded wait is not repeated, however long the code now waits."""
        _check_argument("sleep", seconds, Real, "seconds as a number")

        async def wait(call: JournaledCall) -> NondeterministicValueEntry:
            await self.episode.services.clock.sleep(seconds)
            return NondeterministicValueEntry("sleep", seconds)

        await self.episode.journal.call(
            request_hash(b"sleep"), lambda: f"a sleep of {seconds:g} s", NondeterministicValueEntry, wait
        )

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

    def counted(self) -> Mapping[str, PolicyCounts]:
        """Return turns and metrics of each policy that acted: its own metrics, and those of no particular agent."""
        counted: dict[str, PolicyCounts] = {}
        for agent in self.agents:
            if agent.sampled_turns:
                turns, metrics = counted.get(agent.policy, PolicyCounts(0, self.episode.metrics))
                counted[agent.policy] = PolicyCounts(turns + agent.sampled_turns, _sum(metrics, agent.counts))
        return counted

    @property
    def metrics(self) -> dict[str, float]:
        """Return the episode's metrics, summed with those of its agents."""
        return _sum(self.episode.metrics, *(agent.counts for agent in self.agents))

    def close(self) -> None:
        """Close the journal, and release the engine's resources of the agents."""
        self.episode.journal.end()
        for agent in self.agents:
            agent.close()
        for resource in self.resources:
            resource.close()
        for sandbox in self.sandboxes:
            sandbox.close()
