"""What running episodes ask of the run: child episodes, branches, proposals, further attempts, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.core import ids
from agentrl.core.records import (
    EpisodeHeader,
    EpisodeSpec,
    ForkPoint,
    PolicyVersion,
    Proposal,
    ProposalNovelty,
    SeatBinding,
    Task,
)
from agentrl.environment.registry import resolve
from agentrl.orchestrator.child_episodes import OnEnd
from agentrl.orchestrator.dispatch import Dispatcher


@dataclass(frozen=True, slots=True, eq=False)
class DispatchingHost:
    """The `EpisodeHost` of a dispatcher's episodes."""

    dispatcher: Dispatcher

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str],
    ) -> None:
        """Start child episodes of a running one; children of an admitted parent are always admitted."""
        child, specs, children = resolve(environment), self.dispatcher.specs, self.dispatcher.children
        group = specs.group_of(parent.purpose, parent.episode_id)
        seats = {seat: SeatBinding(specs.policy_of(f"{child.__name__}.{seat}", group)) for seat in child.seats}
        self.dispatcher.reservations.hand_over(parent.episode_id, child, len(tasks), spawn_call)
        group_id = ids.spawned_group_id(parent.episode_id, parent.attempt, spawn_call)
        starting: list[tuple[EpisodeSpec, OnEnd]] = []
        for index, task in enumerate(tasks):
            episode_id = ids.child_episode_id(parent.episode_id, parent.attempt, spawn_call, index)
            if known[index] != episode_id and children.share(parent, known[index], partial(on_end, index)):
                continue
            if children.rejoin(parent.episode_id, episode_id, partial(on_end, index)):
                continue
            spec = parent.start_another(
                *(spawn_call, index),
                episode_id=episode_id,
                environment=environment,
                task=task,
                seats=seats,
                group_id=group_id,
                group_size=len(tasks),
                parent_id=parent.episode_id,
            ).pinned(parent.pins)
            starting.append((spec, partial(on_end, index)))
        self.dispatcher.start(starting)

    async def branch(
        self, main: EpisodeSpec, point: ForkPoint, count: int, versions: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        """Start the branches of a running episode: further members of its group, which are always admitted."""
        pins: dict[str, PolicyVersion] = {}
        dispatcher, leases = self.dispatcher, self.dispatcher.leases
        current = partial(dispatcher.in_flight.get_attempt, main.episode_id, main.attempt)
        if leases is not None and current() is not None:  # nothing would end the lease of a superseded attempt
            trained = dispatcher.buffer.trainable.difference(main.pins)
            pins = {policy: version for policy, version in versions.items() if policy in trained}
            for version in pins.values():
                await leases.acquire(main, version)
        running = current()
        if running is None:
            return pins  # the episode was dropped or restarted, perhaps while it waited
        specs = []
        for number in range(1, count + 1):
            episode_id = ids.branch_episode_id(main.episode_id, main.attempt, point.call_id, number)
            if not dispatcher.children.exists(main.episode_id, episode_id):
                spec = running.start_another(
                    *(point.call_id, number),
                    episode_id=episode_id,
                    parent_id=main.episode_id,
                    fork=replace(point, branch=number),
                )
                specs.append(spec.pinned({**main.pins, **pins}))
        dispatcher.reservations.hand_over_branches(main.episode_id, count, point.call_id)
        dispatcher.start([(spec, None) for spec in specs])
        return pins

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        """Compare a proposal with the remembered ones; record and remember it if its episode is for training."""
        memory = self.dispatcher.memory
        made_by = (spec.episode_id, spec.attempt, call_id)
        proposal = Proposal(memory.next_number, *made_by, spec.environment, key, structure)
        known = memory.recall(proposal)
        if spec.purpose == "train" and not memory.knows(proposal):
            self.dispatcher.store.record(proposal)
            self.dispatcher.buffer.counts.count_proposal(is_repeated=known.times > 0)
        return known

    def readmit(self, spec: EpisodeSpec) -> None:
        """Note that a further attempt of a running episode begins."""
        self.dispatcher.store.admit(spec)
