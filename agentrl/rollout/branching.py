"""`ctx.branch`: episodes that continue several times.

A branch is an episode of its main episode's group. It recalls the turns before the call from the journal, and samples
its own from there, under the version that sampled the newest token (`orchestrator/tree_leases.py` leases it). The main
episode stays on that version too, so the whole tree behind the call is sampled by one version.

Invariants:
1. The entry of the call is on disk before a branch starts, which reads the entries before it.
2. A branch recalls the call too, with its own number as the result (`journal.reader.read_fork_prefix`), so a program
   that does not make it there is a mismatch.
3. A re-executed main episode finds its branches again by their ids, and starts only the missing ones.
4. Only the main episode of training branches. Evaluations, forks, replays and branches get 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from agentrl.core import ids
from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import AgentTurns, ForkPoint, PolicyVersion
from agentrl.core.text import plural
from agentrl.journal.entries import BranchEntry, NondeterministicValueEntry, request_hash
from agentrl.rollout.calls.journal import current_strand
from agentrl.rollout.turn.agent import LiveAgent

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeSpec
    from agentrl.environment.context import ResourceLevel
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.turn.recorder import TurnRecorder

BRANCHES_REFUSED = "branches"
"""Drop reason of an episode whose call of `ctx.branch` was refused."""


class LeveledResource(Protocol):
    """A resource, a sandbox or an MCP server of an episode."""

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> ResourceLevel:
        """How the resource is recalled."""
        ...


class LiveBranches:
    """The branches of one attempt.

    Args:
        episode: the running attempt.
        branches: `Environment.branches`.
    """

    __slots__ = ("_branches", "_episode", "_pins", "_started")

    def __init__(self, episode: LiveEpisode, branches: int) -> None:
        self._episode = episode
        self._branches = branches
        self._started = 0
        """Number of branches that the attempt started."""
        self._pins: Mapping[str, PolicyVersion] = MappingProxyType({})
        """Version of the tree, by policy."""

    def left(self) -> int:
        """Return the number of branches that `start` may still start; journaled, because a branch must see there what
        its main episode saw."""
        left = max(self._branches - self._started, 0) if self._may_branch else 0
        entry = self._episode.journal.answer(
            request_hash(b"branches left"),
            lambda: "the number of branches left",
            NondeterministicValueEntry,
            lambda call: NondeterministicValueEntry("branches_left", left),
        )
        return int(entry.value)

    @property
    def _may_branch(self) -> bool:
        spec = self._episode.spec
        return spec.purpose == "train" and spec.branched_from is None

    async def start(
        self,
        count: int,
        agents: Sequence[TurnRecorder],
        resources: Iterable[LeveledResource],
        *,
        has_children: bool,
    ) -> int:
        """Start `count` branches of a main episode; returns 0 there, and its number in a branch.

        Raises:
            EnvironmentDefinitionError: `count` is not a positive whole number.
            EpisodeError: the episode cannot branch here; the message has the reason.
        """
        journal = self._episode.journal
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise EnvironmentDefinitionError(f"ctx.branch({count!r}): the number of branches must be 1 or more")

        async def admit(call: JournaledCall) -> BranchEntry:
            if not self._may_branch:
                return BranchEntry(())
            self._check(count, agents, resources, has_children=has_children)
            if self._episode.scores is not None:  # the main episode and its branches have the same scores
                with self._episode.time_limit_paused():
                    await self._episode.scores.arrived()
            spec, numbers = self._episode.spec, range(1, count + 1)
            names = (ids.branch_episode_id(spec.episode_id, spec.attempt, call.call_id, n) for n in numbers)
            return BranchEntry(tuple(names))

        entry = await journal.call(
            request_hash(b"branch", str(count).encode()),
            lambda: f"the start of {plural(count, 'branch', 'branches')}",
            BranchEntry,
            admit,
        )
        self._started += len(entry.children)
        if entry.children and self._may_branch:
            strand = current_strand()
            try:
                await journal.flush()
                await self._start_episodes(ids.call_id(strand.path, strand.calls - 1), count, agents)
            except asyncio.CancelledError:
                if journal.is_stopped:
                    raise
                why = "run() cancelled ctx.branch while its branches started"
                journal.end_with(EpisodeError(why, reason=BRANCHES_REFUSED))
        return entry.number

    async def _start_episodes(self, call_id: str, count: int, agents: Sequence[TurnRecorder]) -> None:
        """Start the branches of a call, under the version that sampled the newest turn."""
        episode = self._episode
        point = ForkPoint(
            journal=".",
            partition=episode.journal.partition,
            episode_id=episode.spec.episode_id,
            attempt=episode.spec.attempt,
            call_id=call_id,
            turns=tuple(AgentTurns(agent.seat, agent.index, len(agent.turns)) for agent in agents),
        )
        newest: dict[str, PolicyVersion] = {}
        for agent in agents:
            version = agent.newest_version()
            if version is not None:
                newest[agent.policy] = max(newest.get(agent.policy, version), version)
        with episode.time_limit_paused():
            pins = await episode.services.host.branch(episode.spec, point, count, newest)
        self._pins = {**self._pins, **pins}
        for agent in agents:
            if isinstance(agent, LiveAgent):
                self.keep_version(agent)

    def pinned(self, spec: EpisodeSpec) -> EpisodeSpec:
        """Return the episode's spec with the version of its tree, for children that it starts."""
        return spec.pinned({**spec.pins, **self._pins}) if self._pins else spec

    def keep_version(self, agent: LiveAgent) -> None:
        """Let an agent sample by the version of the tree, if there is one."""
        if agent.policy in self._pins:
            agent.keep_version(self._pins[agent.policy])

    def _check(
        self, count: int, agents: Sequence[TurnRecorder], resources: Iterable[LeveledResource], *, has_children: bool
    ) -> None:
        """Refuse more branches than the environment declares, since admission has not reserved them, and branches that
        could not continue this episode exactly.

        Raises:
            EpisodeError: the message has the reason.
        """
        pinned = next((resource.name for resource in resources if resource.level == "pinned"), None)
        if count > self._branches - self._started:
            name = self._episode.spec.environment.rpartition(":")[2]
            before = f" after {self._started} before" if self._started else ""
            why = (
                f"{name} declares branches = {self._branches}, but ctx.branch asked for {count}{before}: none was "
                f"started. Set branches = {self._started + count}, or ask ctx.branches_left()"
            )
        elif not any(agent.turns for agent in agents):
            why = "ctx.branch was called before any turn; raise credit.group_size instead"
        elif current_strand().path != ids.ROOT_STRAND:
            why = "ctx.branch was called inside ctx.gather; call it in run() itself"
        elif any(not isinstance(agent, LiveAgent) for agent in agents):
            why = "ctx.branch was called after ctx.endpoint; an external agent cannot continue in a second episode"
        elif has_children:
            why = "ctx.branch was called after ctx.spawn, whose children would belong to two episodes. Call it before"
        elif pinned is not None:
            why = (
                f"ctx.branch cannot copy {pinned}, which is pinned to its process; give the resource level 'replay' or "
                "'snapshot'. Stateful MCP servers cannot be copied"
            )
        else:
            return
        raise EpisodeError(why, reason=BRANCHES_REFUSED)
