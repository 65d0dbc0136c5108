"""Specs of root episodes: their numbers, seeds, seat bindings, pins and deadlines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.core import ids
from agentrl.core.holds import AdmissionWait
from agentrl.core.records import EpisodeSpec, PolicyVersion, Purpose, SeatBinding, Task
from agentrl.environment.environment import Environment
from agentrl.environment.mixture import root_environment_of_task, root_environments, seat_prefix
from agentrl.environment.registry import name_of, resolve
from agentrl.orchestrator.admission import AdmissionPolicy
from agentrl.orchestrator.child_reservations import PolicyOf

PREFIX: Mapping[Purpose, str] = {"train": "e", "evaluate": "v", "replay": "p", "fork": "f"}
LATER: Mapping[Purpose, int] = {"train": 0, "fork": 1, "replay": 1, "evaluate": 2}
"""Steps added to the deadline of other purposes, relative to the running training episodes: they never delay those, and
training episodes admitted much later do not delay them."""


@dataclass(slots=True, kw_only=True)
class EpisodeNumbers:
    """The numbers of root episodes that are taken."""

    group_size: int
    next_training: int = 0
    """Number of the next training episode."""
    next_evaluation: int = 0
    """Number of the next evaluation episode."""
    first_evaluated: int = 0
    """Number that an episode at place 0 of the newest evaluation has, or would have."""

    @property
    def next_group(self) -> int:
        """Number of the next root group."""
        return self.next_training // self.group_size


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeSpecs:
    """Makes the specs of root episodes."""

    environment: type[Environment]
    """Class of root episodes, or a mixture of classes."""
    policy_of: PolicyOf
    run_seed: int
    numbers: EpisodeNumbers
    admission: AdmissionPolicy
    _roots: dict[str, type[Environment]] = field(init=False)
    """Classes of root episodes, keyed by name."""

    def __post_init__(self) -> None:
        self._roots = {name_of(root): root for root in root_environments(self.environment)}

    def environment_of(self, spec: EpisodeSpec) -> type[Environment]:
        """Return the class of an episode.

        Raises:
            EnvironmentDefinitionError, ConfigError: its code was edited since the episode was started.
        """
        root = self._roots.get(spec.environment) if spec.parent_id is None else None
        return root or resolve(spec.environment)

    def next_group(self, task: Task, waited: tuple[AdmissionWait, ...]) -> Iterator[EpisodeSpec]:
        """Make the specs of the next root group; `waited` is `EpisodeSpec.waited`."""
        first = self.numbers.next_training
        self.numbers.next_training += self.numbers.group_size
        return self.training(task, range(first, self.numbers.next_training), waited)

    def training(
        self, task: Task, numbers: Sequence[int], waited: tuple[AdmissionWait, ...] = ()
    ) -> Iterator[EpisodeSpec]:
        """Make the specs of one group's root training episodes."""
        size = self.numbers.group_size
        group = numbers[0] // size
        return self._root(task, "train", numbers, self.group_id(group), size, self.admission.pins(group), waited)

    def group_id(self, group: int) -> str:
        """Return the id of a root training group."""
        return f"g{group * self.numbers.group_size}"

    def plays(self, environment: str, task: Task) -> bool:
        """Whether root episodes of a task have an environment, given by name."""
        try:
            return name_of(root_environment_of_task(self.environment, task.id)) == environment
        except KeyError:  # no member of the mixture
            return False

    def evaluation(
        self, tasks: Sequence[Task], pins: Mapping[str, PolicyVersion], places: Sequence[int]
    ) -> list[EpisodeSpec]:
        """Make the specs of an evaluation, or of a part of one.

        Seeds and line-ups depend only on the place of a task, so evaluations of a run differ only by their weights.

        Args:
            tasks: the tasks, at least one.
            pins: the versions at which policies are fixed.
            places: places of the tasks in the evaluation, ascending.
        """
        first = self.numbers.first_evaluated = self.numbers.next_evaluation - places[0]
        self.numbers.next_evaluation = first + places[-1] + 1
        return [
            replace(spec, seed=self.evaluation_seed(place))
            for place, task in zip(places, tasks, strict=True)
            for spec in self._root(task, "evaluate", (first + place,), f"v{first + place}", 1, pins)
        ]

    def evaluation_seed(self, place: int) -> int:
        """Return the seed of the root episode at a place of every evaluation."""
        return ids.stable_hash64(self.run_seed, f"evaluation {place}")

    def group_of(self, purpose: Purpose, episode_id: str) -> int:
        """Return the root group of an episode; outside training, each episode is its own group."""
        number = ids.root_episode_number(episode_id)
        if purpose == "train":
            return number // self.numbers.group_size
        return number - self.numbers.first_evaluated if purpose == "evaluate" else number

    def group_begun_by(self, spec: EpisodeSpec) -> int | None:
        """Return the number of the root training group whose first admission this is; None: it is none."""
        if spec.parent_id is not None or spec.fork is not None or spec.attempt:
            return None
        group, place = divmod(ids.root_episode_number(spec.episode_id), self.numbers.group_size)
        return None if place else group

    def deadline(self, purpose: Purpose, episode_id: str) -> int:
        """Return the deadline of an episode that starts or is resumed now."""
        number = ids.root_episode_number(episode_id) if purpose == "train" else self.numbers.next_training
        return self.admission.deadline(number) + LATER[purpose]

    def _root(
        self,
        task: Task,
        purpose: Purpose,
        numbers: Iterable[int],
        group: str,
        size: int,
        pins: Mapping[str, PolicyVersion],
        waited: tuple[AdmissionWait, ...] = (),
    ) -> Iterator[EpisodeSpec]:
        """Make the specs of one group's root episodes, which share equal parts."""
        pins = dict(pins)
        root = root_environment_of_task(self.environment, task.id)
        name, prefix = name_of(root), seat_prefix(self.environment, root)
        seats: dict[str, SeatBinding] = {}
        for number in numbers:
            episode_id = ids.episode_id(PREFIX[purpose], number)
            if not seats:
                at = self.group_of(purpose, episode_id)
                policies = {seat: self.policy_of(f"{prefix}{seat}", at) for seat in root.seats}
                seats = {seat: SeatBinding(policy, pins.get(policy)) for seat, policy in policies.items()}
            yield EpisodeSpec(
                episode_id=episode_id,
                environment=name,
                task=task,
                seed=ids.stable_hash64(self.run_seed, episode_id),
                seats=seats,
                group_id=group,
                group_size=size,
                purpose=purpose,
                pins=pins,
                deadline=self.deadline(purpose, episode_id),
                waited=waited,
            )
