"""The class that a user overrides: `Environment`, with its source of tasks. The handles to call are in `context.py`.

An instance plays one episode and keeps its state on `self`, so that re-execution restores it.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from agentrl.core.errors import EnvironmentDefinitionError

if TYPE_CHECKING:
    import random

    from agentrl.core.records import Task
    from agentrl.environment.context import EpisodeContext


Split = str
"""`train`, `held_out`, or another of `Environment.splits`."""

Reply = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One turn of a demonstration: text, a tool call, or a list of calls."""

OnCodeChange = Literal["try", "restart", "drop"]
"""Treatment of an unfinished episode whose environment was edited before a resume: `Environment.on_code_change`."""


class Environment(ABC):
    """A kind of task. One instance lives for one episode; `run` is the program of that episode.

    Example:
        class Guess(agentrl.Environment):
            seats = ("guesser",)

            async def run(self, ctx):
                turn = await ctx.agent("guesser").act(agentrl.user("Guess a digit."))
                is_right = not turn.is_cut and turn.text.strip() == ctx.task.data["digit"]
                ctx.agent("guesser").reward(float(is_right))
    """

    # --- override these ---------------------------------------------------------------------------------------------

    seats: ClassVar[tuple[str, ...]] = ("agent",)
    """The roles that policies can hold."""
    fan_out: ClassVar[Mapping[str, int]] = {}
    """Maximum number of child episodes that one episode starts, keyed by class name. Admission reserves this many, and
    a further spawn is refused. For a class that is not named, admission reserves the largest number that any episode
    has started so far."""
    branches: ClassVar[int] = 0
    """Maximum number of branches that one episode starts (`ctx.branch`), over all its calls. Admission reserves this
    many."""
    splits: ClassVar[tuple[str, ...]] = ("train", "held_out")
    """The splits that `tasks` knows; `evaluation.tasks` may name further ones."""
    truncated_reward: ClassVar[Literal["keep"] | float | None] = "keep"
    """Reward of a truncated agent: a limit ended the episode (turns, context, time), or a limit on tokens cut the
    agent's last turn. `"keep"`: the rewards that the class gave it; 0 if it has none. A number: this, instead of them.
    None: its unit is dropped (`truncated`), except in evaluations, which keep the rewards."""
    on_code_change: ClassVar[OnCodeChange] = "try"
    """Treatment of unfinished episodes when a resume finds this class's file edited. `try`: replay them, and restart
    only those that depart from the journal; `restart`: restart all of them; `drop`: drop them."""
    selects: ClassVar[tuple[str, ...]] = ()
    """Keys of a task's data that name what the environment runs, opens or connects to: programs, files, addresses.
    Commands that act on a recorded run take them from the user alone (docs/reference/security.md)."""
    own_random: ClassVar[bool] = False
    """Whether the code draws from `random` or `numpy.random`, so that each episode needs its own state of them. If not
    declared, a draw in the first 32 episodes of a process, or a re-executed one, is detected: that episode restarts,
    and later ones in the process have their own state."""

    @abstractmethod
    async def run(self, ctx: EpisodeContext) -> None:
        """Play the episode: act, observe, reward."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return the tasks of a split. Keyword arguments after `seed` are options of the environment."""
        raise NotImplementedError(f"{cls.__name__} has no task source: override `tasks`, or pass tasks= to train()")

    @classmethod
    def demonstrate(cls, task: Task, random: random.Random) -> Iterable[Reply] | Generator[Reply, str, None]:
        """Return the replies of a good policy to a task, turn by turn, for `agentrl.environments.tiny_model`.

        A list, or a generator that receives the environment's answer to each reply. A reply is text, a tool call as
        `{"name": …, "arguments": {…}}`, or a list of calls. A demonstration with a parameter `seat` is called once for
        each seat; a parameter `first_message` receives the text that the agent reads before its first reply.
        """
        raise NotImplementedError(f"{cls.__name__} has no demonstrations: override `demonstrate`")

    @classmethod
    def load(cls) -> None:
        """Load read-only data; called once per worker before the first episode."""

    # --- machinery --------------------------------------------------------------------------------------------------

    @classmethod
    def source(cls) -> str:
        """The source text of the class's module, for the code hash; the qualified name if there is no source."""
        try:
            return inspect.getsource(inspect.getmodule(cls) or cls)
        except (OSError, TypeError):
            return f"{cls.__module__}:{cls.__qualname__}"


class TaskSource(Protocol):
    """A source of tasks: anything with a length and an index. A plain list will do."""

    def __len__(self) -> int:
        """The number of tasks."""
        ...

    def __getitem__(self, index: int, /) -> Task:
        """The task at `index`; the same task every time."""
        ...


MAX_READ_TASKS = 50_000
"""Maximum number of tasks read where all tasks of a source matter: some sources have a task for every seed."""


def checked_source(environment: type[Environment], split: Split, source: object) -> TaskSource:
    """Return what `tasks` returned.

    Raises:
        EnvironmentDefinitionError: it has no length or index, as a generator or a set.
    """
    if isinstance(source, Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        if inspect.iscoroutine(source):
            source.close()
        raise EnvironmentDefinitionError(
            f"{environment.__name__}.tasks({split!r}) returned {reprlib.repr(source)}; return a list of agentrl.Task, "
            "or an object with len() and an index"
        )
    return source


@runtime_checkable
class SelectingTaskSource(Protocol):
    """A task source that chooses the task of each group itself, by the results of earlier ones.

    It is a `TaskSource` with these two methods. They are called in the run's own process; what they remember is built
    again from the journal when the run is resumed, so it must depend on the calls of `record_result` alone.
    """

    def select(self, group: int, rng: random.Random, /) -> Task:
        """The task of root group number `group`. A pure function of these arguments and of the recorded results."""
        ...

    def record_result(self, task: Task, rewards: Sequence[float], /) -> None:
        """Take in the rewards of a group's episodes, each the sum over its agents, in any order; empty if all members
        failed or got no reward."""
        ...


def child_environments(environment: type[Environment]) -> dict[type[Environment], int]:
    """The classes that `fan_out` names, looked up in the environment's module, with their counts.

    Raises:
        EnvironmentDefinitionError: a name is not an environment of that module, or a count is below 1.
    """
    children = {}
    for name, count in environment.fan_out.items():
        child = getattr(sys.modules.get(environment.__module__), name, None)
        if not (isinstance(child, type) and issubclass(child, Environment)):
            raise EnvironmentDefinitionError(
                f"{environment.__qualname__}.fan_out names {name!r}, which is not an environment in "
                f"{environment.__module__}"
            )
        if count < 1:
            raise EnvironmentDefinitionError(
                f"{environment.__qualname__}.fan_out[{name!r}] is {count}; it must be the number of such episodes that "
                "one episode starts, 1 or more; remove the entry if there may be none"
            )
        children[child] = count
    return children
