"""Mixtures: several environments in one run, each with its rate of the root groups.

A mixture is an `Environment` class that plays no episode itself: `root_environment_of_task` says which of its members
plays a task. Seats go by class name (`Calculator.solver`, else the bare name). So do options and task ids, except those
of a member that alone is trained: they stay what they are without the environments that are only evaluated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from agentrl.core.errors import ConfigError, EnvironmentDefinitionError
from agentrl.core.records import Task
from agentrl.environment.context import EpisodeContext
from agentrl.environment.environment import Environment, SelectingTaskSource, Split, TaskSource, child_environments

MEMBER = ":"
"""Separator between the member's name and the task's own id."""


def with_task_id_prefix(task: Task, *names: str) -> Task:
    """A task with prefixes on its id, to distinguish tasks of several sources."""
    return Task(id=MEMBER.join((*names, task.id)), data=task.data)


class MemberTasks(Sequence[Task]):
    """The tasks of a member, with its name before their ids."""

    def __init__(self, name: str, source: TaskSource) -> None:
        self.name = name
        self.source = source

    @staticmethod
    def of(name: str, source: TaskSource) -> MemberTasks:
        """The tasks of a member, whose source may select them itself."""
        return (SelectingMemberTasks if isinstance(source, SelectingTaskSource) else MemberTasks)(name, source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return with_task_id_prefix(self.source[index], self.name)


class SelectingMemberTasks(MemberTasks):
    """The tasks of a member whose source selects them itself (`SelectingTaskSource`)."""

    source: Any

    def select(self, group: int, rng: random.Random) -> Task:
        """The task of the member's group of that number."""
        return with_task_id_prefix(self.source.select(group, rng), self.name)

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Record the rewards of a group."""
        member_id = task.id.removeprefix(f"{self.name}{MEMBER}")
        self.source.record_result(Task(id=member_id, data=task.data), rewards)


class MixedTasks(Sequence[Task]):
    """The tasks of several members, one member after another; `orchestrator.tasks` draws from them by their rates."""

    def __init__(self, members: Sequence[MemberTasks], rates: Mapping[str, float]) -> None:
        self.members = members
        self.rates = rates

    def __len__(self) -> int:
        return sum(map(len, self.members))

    def __getitem__(self, index: Any) -> Any:
        for member in self.members:
            if index < len(member):
                return member[index]
            index -= len(member)
        raise IndexError(index)


class Mixture(Environment):
    """Several environments; `mixture` makes a subclass."""

    seats = ()
    members: ClassVar[Mapping[str, type[Environment]]] = {}
    """Environment classes by class name."""
    rates: ClassVar[Mapping[str, float]] = {}
    """Share of the root groups by class name, in relation to each other; 0: evaluated alone."""

    async def run(self, ctx: EpisodeContext) -> NoReturn:
        """Refuse to be played.

        Raises:
            EnvironmentDefinitionError: always; episodes are played by a member.
        """
        raise EnvironmentDefinitionError(
            f"{type(self).__name__} is a mixture and plays no episodes itself: its members do"
        )


def mixture(rates: Mapping[type[Environment], float]) -> type[Mixture]:
    """The mixture of some environments.

    Args:
        rates: share of the root groups, in relation to each other.

    Raises:
        EnvironmentDefinitionError: two have one name, a rate is below 0, or none is above.
    """
    members: dict[str, type[Environment]] = {}
    for member, rate in rates.items():
        if members.setdefault(member.__name__, member) is not member:
            raise EnvironmentDefinitionError(
                f"a mixture contains two environments called {member.__name__}: seats and options are looked up by "
                "that name, so rename one of the classes"
            )
        if not (math.isfinite(rate) and rate >= 0):
            raise EnvironmentDefinitionError(f"{member.__name__}: its rate is {rate}; give a number of 0 or more")
    if not any(rates.values()):
        raise EnvironmentDefinitionError("a mixture whose rates are all 0 has nothing to train on")
    seats = tuple(dict.fromkeys(seat for member in rates for seat in member.seats))
    by_name = {member.__name__: rate for member, rate in rates.items()}
    name = "_".join(members)
    return type(name, (Mixture,), {"__module__": __name__, "members": members, "rates": by_name, "seats": seats})


def root_environments(environment: type[Environment]) -> tuple[type[Environment], ...]:
    """The classes that play root episodes: a mixture's members, or the class itself."""
    return tuple(environment.members.values()) if issubclass(environment, Mixture) else (environment,)


def trained_root_environments(environment: type[Environment]) -> tuple[type[Environment], ...]:
    """Return the classes that play root episodes whose data is trained on."""
    if issubclass(environment, Mixture):
        return tuple(member for name, member in environment.members.items() if environment.rates[name])
    return (environment,)


def with_evaluated_environments(
    environment: type[Environment], evaluated_only: Iterable[type[Environment]]
) -> type[Environment]:
    """An environment, with others that are only evaluated."""
    new = [candidate for candidate in dict.fromkeys(evaluated_only) if candidate not in root_environments(environment)]
    if not new:
        return environment
    rates = environment.rates if issubclass(environment, Mixture) else {environment.__name__: 1.0}
    return mixture(
        {**{root: rates[root.__name__] for root in root_environments(environment)}, **dict.fromkeys(new, 0.0)}
    )


def root_environment_of_task(environment: type[Environment], task_id: str) -> type[Environment]:
    """The class that plays a task.

    Raises:
        KeyError: no member of the mixture does.
    """
    if not issubclass(environment, Mixture):
        return environment
    name = task_id.partition(MEMBER)[0]
    trained = trained_root_environments(environment)
    if len(trained) == 1 and name not in environment.members:
        return trained[0]
    return environment.members[name]


def all_environment_classes(environment: type[Environment]) -> Iterator[type[Environment]]:
    """The classes of root episodes and of their declared children."""
    for root in root_environments(environment):
        yield root
        yield from child_environments(root)


def seat_prefix(environment: type[Environment], root: type[Environment]) -> str:
    """The prefix of a root's seats in `[seats]`: in a mixture its name, as for children."""
    return f"{root.__name__}." if issubclass(environment, Mixture) else ""


def check_split(environment: type[Environment], split: Split) -> None:
    """Refuse a split that an environment does not have: many would take its name for that of another.

    Raises:
        ConfigError: it is not in `Environment.splits`.
    """
    if split not in environment.splits:
        raise ConfigError(
            f"{environment.__name__} has no split {split!r}; it has {', '.join(environment.splits)} (declare more in "
            "the class attribute `splits`)"
        )
