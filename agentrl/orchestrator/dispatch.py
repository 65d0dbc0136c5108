"""From a task to running episodes and back: builds specs, hands them to the worker, takes headers in.

Owns episode numbers, seeds and seat bindings, child episodes (it is the `EpisodeHost`), evaluation episodes, and the
guard that ends a run in which nothing but failures comes back. Training episodes go to the buffer; others never do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentrl.core import ids
from agentrl.core.errors import CheckFailedError
from agentrl.core.ports import SpawnedGroup, Worker
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, Purpose, SeatBinding, Task, dropped_header
from agentrl.environment.registry import resolve
from agentrl.journal.port import JournalStore
from agentrl.orchestrator.buffer import EpisodeBuffer, UnitDrop
from agentrl.orchestrator.signal import Signal

PREFIX: Mapping[Purpose, str] = {"train": "e", "evaluate": "v", "replay": "p", "fork": "f"}
FAILURES_IN_A_ROW = 32
"""Training episodes dropped one after another, before the run gives up; at least two groups."""


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Starts episodes and hears of their ends."""

    environment: str
    """The root environment's name in the registry."""
    seats: Sequence[str]
    policy_of: Callable[[str], str]
    """Which policy holds a seat, by `Env.seat` or bare name."""
    run_seed: int
    group_size: int
    buffer: EpisodeBuffer
    store: JournalStore
    signal: Signal
    next_number: int = 0
    """Of root training episodes."""
    worker: Worker = field(init=False)
    """Set once by the composition root: the worker's runner needs this host first."""
    on_collapse: Callable[[CheckFailedError], None] = field(init=False)
    """Called when too many training episodes in a row were dropped."""
    _bindings: dict[str, SeatBinding] = field(init=False)
    _running: dict[str, EpisodeSpec] = field(default_factory=dict)
    _next_evaluation: int = 0
    _failures_in_a_row: int = 0
    _sums: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._bindings = {seat: SeatBinding(self.policy_of(seat)) for seat in self.seats}

    @property
    def next_group(self) -> int:
        """Number of the next root group."""
        return self.next_number // self.group_size

    def admit_group(self, task: Task) -> None:
        """Start a root group: `group_size` episodes of one task."""
        group = f"g{self.next_group}"
        for _ in range(self.group_size):
            spec = self._root_spec(task, "train", self.next_number, group, self.group_size, self._bindings)
            self.next_number += 1
            self._start(spec, None)

    def restore(self, ended: Sequence[tuple[EpisodeSpec, EpisodeHeader]], unfinished: Sequence[EpisodeSpec]) -> None:
        """Take over what an earlier life of the run left: committed members of open groups, and episodes to go on with.

        A group is complete when what is left of it has ended: members that were dropped do not come back.
        """
        members = Counter(spec.group_id for spec in (*(spec for spec, _ in ended), *unfinished))
        for group_id, size in members.items():
            self.buffer.expect(group_id, size)
        for spec, _ in ended:
            self.buffer.admit(spec)
        for spec in unfinished:
            self._admit(spec)
        for spec, header in ended:
            self._record(self.buffer.end(spec, header))
        for spec in unfinished:
            self.worker.submit(spec, partial(self._end, spec, None), resume=True)

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
    ) -> SpawnedGroup:
        """Start child episodes of a running one; children of an admitted parent are always admitted."""
        name = resolve(environment).__name__
        pins = {binding.policy: binding.pin for binding in parent.seats.values()}
        seats: dict[str, SeatBinding] = {}
        for seat in resolve(environment).seats:
            policy = self.policy_of(f"{name}.{seat}")
            seats[seat] = SeatBinding(policy, pins.get(policy))
        group_id = f"{parent.episode_id}~{parent.attempt}.{spawn_call}"
        episode_ids = []
        for index, task in enumerate(tasks):
            episode_id = ids.child_episode_id(parent.episode_id, parent.attempt, spawn_call, index)
            episode_ids.append(episode_id)
            spec = EpisodeSpec(
                episode_id=episode_id,
                environment=environment,
                task=task,
                seed=ids.key64(parent.seed, spawn_call, index),
                seats=seats,
                group_id=group_id,
                group_size=len(tasks),
                purpose=parent.purpose,
                parent_id=parent.episode_id,
            )
            self._start(spec, partial(on_end, index))
        return SpawnedGroup(group_id=group_id, episode_ids=tuple(episode_ids))

    async def evaluate(self, tasks: Sequence[Task], pins: Mapping[str, PolicyVersion]) -> list[EpisodeHeader]:
        """Run each task once, outside buffer and ledger; `pins` fixes policies at versions.

        Raises:
            CheckFailedError: an episode was dropped: a score over the rest would flatter.
        """
        seats = {
            seat: SeatBinding(binding.policy, pins.get(binding.policy)) for seat, binding in self._bindings.items()
        }
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[EpisodeHeader]] = []
        for task in tasks:
            number = self._next_evaluation
            self._next_evaluation += 1
            spec = self._root_spec(task, "evaluate", number, f"v{number}", 1, seats)
            future: asyncio.Future[EpisodeHeader] = loop.create_future()
            ends.append(future)
            self._start(spec, future.set_result)
        headers = await asyncio.gather(*ends)
        dropped = [header for header in headers if not header.committed]
        if dropped:
            raise CheckFailedError(
                f"evaluation: {len(dropped)} of {len(headers)} episodes were dropped, first {dropped[0].episode_id} "
                f"({dropped[0].drop_reason}); see `agentrl episode show`"
            )
        return headers

    async def end_running(self, reason: str) -> None:
        """Stop every episode in flight; training episodes are dropped with `reason`."""
        await self.worker.cancel()
        running, self._running = self._running, {}
        headers = []
        for spec in running.values():
            header = dropped_header(spec, reason)
            self._record(self.buffer.end(spec, header))
            headers.append((spec, header))
        await asyncio.gather(*(self.store.commit_episode(spec, header, b"", {}) for spec, header in headers))

    def take_sums(self) -> Counter[str]:
        """Training episodes that ended since the last call: their number, tokens and turns."""
        taken, self._sums = self._sums, Counter()
        return taken

    def _root_spec(
        self, task: Task, purpose: Purpose, number: int, group: str, size: int, seats: Mapping[str, SeatBinding]
    ) -> EpisodeSpec:
        episode_id = ids.episode_id(PREFIX[purpose], number)
        return EpisodeSpec(
            episode_id=episode_id,
            environment=self.environment,
            task=task,
            seed=ids.key64(self.run_seed, episode_id),
            seats=seats,
            group_id=group,
            group_size=size,
            purpose=purpose,
        )

    def _start(self, spec: EpisodeSpec, on_end: Callable[[EpisodeHeader], None] | None) -> None:
        self.store.admit(spec)
        if spec.purpose == "train":
            self._admit(spec)
        self.worker.submit(spec, partial(self._end, spec, on_end))

    def _end(self, spec: EpisodeSpec, on_end: Callable[[EpisodeHeader], None] | None, header: EpisodeHeader) -> None:
        if spec.purpose == "train":
            del self._running[spec.episode_id]
            self._record(self.buffer.end(spec, header))
            self._count(header)
        if on_end is not None:
            on_end(header)
        self.signal.notify()

    def _admit(self, spec: EpisodeSpec) -> None:
        self.buffer.admit(spec)
        self._running[spec.episode_id] = spec

    def _record(self, drops: Sequence[UnitDrop]) -> None:
        for drop in drops:
            self.store.record_drop(drop.episode_id, drop.attempt, drop.policy, drop.reason)

    def _count(self, header: EpisodeHeader) -> None:
        self._sums.update(episodes=1, tokens=header.tokens, turns=header.turns)
        useful = header.committed and any(t.reward is not None for t in header.trajectories)
        self._failures_in_a_row = 0 if useful else self._failures_in_a_row + 1
        if self._failures_in_a_row == max(FAILURES_IN_A_ROW, 2 * self.group_size):
            reason = header.drop_reason or "no agent was given a reward"
            self.on_collapse(
                CheckFailedError(
                    f"{self._failures_in_a_row} episodes in a row gave nothing to train on; the last one, "
                    f"{header.episode_id}, because of {reason}: {self.worker.last_failure or 'no detail'}"
                )
            )
