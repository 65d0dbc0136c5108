"""`ctx.branch`, `ctx.resample` and `ctx.roulette`: episodes that continue several times, or stop without bias.

A branch is an episode of its main episode's group. It recalls the turns before the call from the journal, and samples
its own from there, under the version that sampled the newest token (`orchestrator/tree_leases.py` leases it). The main
episode stays on that version too, so the whole tree behind the call is sampled by one version.

Invariants:
1. The entry of the call is on disk before a branch starts, which reads the entries before it.
2. A branch recalls the call too, with its own number as the result (`journal.reader.read_fork_prefix`), so a program
   that does not make it there is a mismatch.
3. A re-executed main episode finds its branches again by their ids, and starts only the missing ones.
4. Only the main episode of training branches. Evaluations, forks, replays and branches get 0.

A probe is a branch that is never trained: `credit/trees.py` gets the mean reward of a call's probes as the value of the
state. A resampled episode is a branch that begins at an earlier turn, chosen when the end was known: it recalls the
turns before, and not the call of `ctx.resample`, which starts nothing there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from agentrl.core import ids
from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import AgentTurns, ForkPoint, PolicyVersion
from agentrl.core.text import plural
from agentrl.journal.entries import BranchEntry, JournalEntry, NondeterministicValueEntry, request_hash
from agentrl.rollout.calls.journal import JournaledCall, current_strand
from agentrl.rollout.turn.agent import LiveAgent

if TYPE_CHECKING:
    from agentrl.environment.context import ResourceLevel
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.turn.recorder import TurnRecorder

ROULETTE = "roulette"
"""Kind of the entry of a call of `ctx.roulette`: the factor on later rewards, 0 if the episode was stopped."""
BRANCHES_REFUSED = "branches"
"""Drop reason of an episode whose call of `ctx.branch` or `ctx.resample` was refused."""


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
        probes: `Environment.probes`.
    """

    __slots__ = ("_branches", "_episode", "_pins", "_probes", "_resampled", "_started", "_started_probes")

    def __init__(self, episode: LiveEpisode, branches: int, probes: int) -> None:
        self._episode = episode
        self._branches = branches
        self._probes = probes
        self._started = 0
        """Number of branches that the attempt started, probes left out."""
        self._started_probes = 0
        self._pins: Mapping[str, PolicyVersion] = MappingProxyType({})
        """Version of the tree, by policy."""
        self._resampled: tuple[str, ...] = ()
        """Turns that were resampled, by call id."""

    def left(self) -> int:
        """Return the number of branches that `start` may still start; journaled, because a branch must see there what
        its main episode saw."""
        journal = self._episode.journal
        call = journal.open(request_hash(b"branches left"), lambda: "the number of branches left")
        recorded = journal.recall(call, NondeterministicValueEntry)
        if recorded is None:
            value = max(self._branches - self._started, 0) if self._may_branch else 0
            recorded = NondeterministicValueEntry("branches_left", value)
            journal.record(call, recorded)
        return int(recorded.value)

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
        probe: bool,
    ) -> int:
        """Start `count` branches or probes of a main episode; returns 0 there, and its number in a branch.

        Raises:
            EnvironmentDefinitionError: `count` is not a positive whole number.
            EpisodeError: the episode cannot branch here; the message has the reason.
        """
        journal = self._episode.journal
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise EnvironmentDefinitionError(f"ctx.branch({count!r}): the number of branches must be 1 or more")
        call = journal.open(
            request_hash(b"branch", str(count).encode(), *([b"probe"] if probe else [])),
            lambda: f"the start of {_counted(count, probe=probe)}",
        )
        await journal.reach(call)
        recorded = journal.recall(call, BranchEntry)
        if recorded is not None and (call.is_inherited or not recorded.children):
            self._count(len(recorded.children), probe=probe)
            return recorded.number
        if recorded is None:
            if not self._may_branch:
                journal.record(call, BranchEntry(()))
                return 0
            if probe:
                self._check("probes", self._probes, self._started_probes, count)
            else:
                self._check("branches", self._branches, self._started, count)
                if not any(agent.turns for agent in agents):
                    raise EpisodeError(
                        "ctx.branch was called before any turn; raise credit.group_size instead",
                        reason=BRANCHES_REFUSED,
                    )
            self._check_copies("ctx.branch", agents, resources, has_children=has_children)
            await self._scores_arrived()
            await self._record_start(call, call.call_id, count)
        self._count(count, probe=probe)
        turns = tuple(AgentTurns(agent.seat, agent.index, len(agent.turns)) for agent in agents)
        await self._start_episodes(replace(self._point(call.call_id, turns), probe=probe), count, agents)
        return 0

    async def resample(
        self,
        count: int,
        at: int,
        weight: float,
        agents: Sequence[TurnRecorder],
        resources: Iterable[LeveledResource],
        *,
        has_children: bool,
    ) -> None:
        """Start `count` episodes of a main episode that sample its turn `at` again; see `EpisodeContext.resample`.

        Raises:
            EnvironmentDefinitionError: `count` is not a whole number of at least 2, `weight` is not positive, or there
                is no turn `at`.
            EpisodeError: the turn cannot be sampled again; the message has the reason.
        """
        journal = self._episode.journal
        taken = self._episode.turn_calls or []
        if isinstance(count, bool) or not isinstance(count, int) or count < 2:
            raise EnvironmentDefinitionError(
                f"ctx.resample({count!r}): resampled episodes are compared with each other, so there must be 2 or more"
            )
        declares = self._episode.turn_calls is not None
        if isinstance(at, bool) or not isinstance(at, int) or (declares and not -len(taken) <= at < len(taken)):
            raise EnvironmentDefinitionError(
                f"ctx.resample(at={at!r}): `at` is the number of one of the episode's {plural(len(taken), 'turn')}"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 < weight < math.inf:
            raise EnvironmentDefinitionError(f"ctx.resample(weight={weight!r}): the weight must be a positive number")
        call = journal.open(
            request_hash(b"resample", str(count).encode(), str(at).encode(), repr(float(weight)).encode()),
            lambda: f"{plural(count, 'further sample')} of turn {at}",
        )
        await journal.reach(call)
        recorded = journal.recall(call, BranchEntry)
        if recorded is not None and (call.is_inherited or not recorded.children):
            self._count(len(recorded.children), probe=False)
            return
        if recorded is None and not self._may_branch:
            journal.record(call, BranchEntry(()))
            return
        at = at if at >= 0 else at + len(taken)
        if recorded is None:
            self._check("branches", self._branches, self._started, count, "ctx.resample")
            self._check_copies("ctx.resample", agents, resources, has_children=has_children)
            self._check_turn(at, taken[at][0], inherited=sum(agent.inherited for agent in agents))
            await self._scores_arrived()
            await self._record_start(call, taken[at][0], count)
        self._count(count, probe=False)
        turn_call, _ = taken[at]
        self._resampled += (turn_call,)
        before = Counter((agent.seat, agent.index) for _, agent in taken[:at])
        turns = tuple(AgentTurns(agent.seat, agent.index, before[agent.seat, agent.index]) for agent in agents)
        point = replace(self._point(turn_call, turns), resample_weight=float(weight))
        await self._start_episodes(point, count, agents)

    async def _record_start(self, call: JournaledCall, first_call: str, count: int) -> None:
        """Record the ids of the episodes that a call starts, on disk before any of them exists."""
        spec, journal = self._episode.spec, self._episode.journal
        numbers = range(1, count + 1)
        names = (ids.branch_episode_id(spec.episode_id, spec.attempt, first_call, number) for number in numbers)
        journal.record(call, BranchEntry(tuple(names)))
        await journal.flush()

    def _point(self, first_call: str, turns: tuple[AgentTurns, ...]) -> ForkPoint:
        spec = self._episode.spec
        return ForkPoint(
            journal=".",
            partition=self._episode.journal.partition,
            episode_id=spec.episode_id,
            attempt=spec.attempt,
            call_id=first_call,
            turns=turns,
        )

    async def _start_episodes(self, point: ForkPoint, count: int, agents: Sequence[TurnRecorder]) -> None:
        """Start the episodes of a call, under the version that sampled the newest turn."""
        episode = self._episode
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

    def keep_version(self, agent: LiveAgent) -> None:
        """Let an agent sample by the version of the tree, if there is one."""
        if agent.policy in self._pins:
            agent.keep_version(self._pins[agent.policy])

    def _count(self, started: int, *, probe: bool) -> None:
        if probe:
            self._started_probes += started
        else:
            self._started += started

    async def _scores_arrived(self) -> None:
        """Wait for the scores of the turns so far, so that the main episode and its branches have the same ones."""
        if self._episode.scores is not None:
            try:
                with self._episode.time_limit_paused():
                    await self._episode.scores.arrived()
            except AgentRLError as error:
                self._episode.journal.fail(error)  # a program that catches the error must not turn it into a reward
                raise

    def _check(self, kind: str, declared: int, started: int, count: int, caller: str = "ctx.branch") -> None:
        """Refuse more episodes than the environment declares, since admission has not reserved them.

        Raises:
            EpisodeError: the message has the numbers.
        """
        if count <= declared - started:
            return
        name = self._episode.spec.environment.rpartition(":")[2]
        before = f" after {started} before" if started else ""
        remedy = "" if kind == "probes" else ", or ask ctx.branches_left()"
        raise EpisodeError(
            f"{name} declares {kind} = {declared}, but {caller} asked for {count}{before}: none was started. Set "
            f"{kind} = {started + count}{remedy}",
            reason=BRANCHES_REFUSED,
        )

    def _check_copies(
        self, caller: str, agents: Sequence[TurnRecorder], resources: Iterable[LeveledResource], *, has_children: bool
    ) -> None:
        """Refuse episodes that could not continue this one exactly.

        Raises:
            EpisodeError: the message has the reason.
        """
        pinned = next((resource.name for resource in resources if resource.level == "pinned"), None)
        if current_strand().path != ids.ROOT_STRAND:
            why = f"{caller} was called inside ctx.gather; call it in run() itself"
        elif any(not isinstance(agent, LiveAgent) for agent in agents):
            why = f"{caller} was called after ctx.endpoint; an external agent cannot continue in a second episode"
        elif has_children:
            why = f"{caller} was called after ctx.spawn, whose children would belong to two episodes. Call it before"
        elif pinned is not None:
            why = (
                f"{caller} cannot copy {pinned}, which is pinned to its process; give the resource level 'replay' or "
                "'snapshot'. Stateful MCP servers cannot be copied"
            )
        else:
            return
        raise EpisodeError(why, reason=BRANCHES_REFUSED)

    def _check_turn(self, at: int, call_id: str, *, inherited: int) -> None:
        """Refuse a turn at which no fork of this episode can begin, or that was resampled before.

        Raises:
            EpisodeError: the message has the reason.
        """
        if at < inherited:
            why = "was recalled from another run; resample one that this episode sampled"
        elif not call_id.startswith(f"{ids.ROOT_STRAND}#"):
            why = "was taken inside ctx.gather; resample one that run() itself requested"
        elif call_id in self._resampled:
            why = "was resampled before; ask for all episodes in one call"
        else:
            return
        raise EpisodeError(f"ctx.resample: turn {at} {why}", reason=BRANCHES_REFUSED)


def _counted(count: int, *, probe: bool) -> str:
    return plural(count, "probe") if probe else plural(count, "branch", "branches")


async def play_roulette(
    episode: LiveEpisode, survival: float, agents: Sequence[TurnRecorder], *, declared: bool
) -> bool:
    """Decide whether an episode continues, with probability `survival`; see `EpisodeContext.roulette`.

    Args:
        episode: the running attempt, whose `roulette_weight` is updated.
        survival: the probability.
        agents: the episode's agents.
        declared: `Environment.roulette`.

    Raises:
        EnvironmentDefinitionError: the call is not declared, or made where it would be biased, or `survival` is not in
            (0, 1].
    """
    journal, spec = episode.journal, episode.spec
    episode.check_not_stopped("ctx.roulette()")
    name = spec.environment.rpartition(":")[2]
    if not declared:
        raise EnvironmentDefinitionError(
            f"{name} calls ctx.roulette and does not declare it: set roulette = True in the class"
        )
    if current_strand().path != ids.ROOT_STRAND:
        raise EnvironmentDefinitionError(
            "ctx.roulette was called inside ctx.gather, where other coroutines may be acting; call it in run() itself"
        )
    if any(not isinstance(agent, LiveAgent) for agent in agents):
        raise EnvironmentDefinitionError(
            "ctx.roulette was called after ctx.endpoint; an external agent ends by itself, and cannot be stopped"
        )
    if isinstance(survival, bool) or not isinstance(survival, int | float) or not 0.0 < survival <= 1.0:
        raise EnvironmentDefinitionError(f"ctx.roulette({survival!r}): the probability must be above 0 and at most 1")
    call = journal.open(request_hash(b"roulette", repr(float(survival)).encode()), lambda: f"roulette({survival:g})")
    await journal.reach(call)
    recorded = journal.recall(call, NondeterministicValueEntry)
    if recorded is None:
        survives = ids.random_stream(spec.seed, spec.attempt, call.call_id).random() < survival
        weight = 1.0 / survival if survives else 0.0
        recorded = NondeterministicValueEntry(ROULETTE, weight if spec.purpose == "train" else None)
        journal.record(call, recorded)
    if recorded.value is None:  # an evaluation measures whole episodes
        return True
    if recorded.value:
        episode.roulette_weight /= survival
        return True
    for agent in agents:
        if agent.turns:
            agent.reward(0.0)
    episode.roulette_weight = 0.0
    return False


def recorded_roulette_weight(entries: Iterable[JournalEntry]) -> float:
    """Return the weight of an episode at its end, from its entries: 0 if it was stopped, 1 without `ctx.roulette`."""
    weight = 1.0
    for entry in entries:
        body = entry.decode()
        if isinstance(body, NondeterministicValueEntry) and body.kind == ROULETTE and body.value is not None:
            weight *= float(body.value)
    return weight
