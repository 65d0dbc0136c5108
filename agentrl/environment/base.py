"""What a user subclasses, and what its `run` may ask for.

Owns: `Environment`, and the abstract `EpisodeContext` and `Agent` handed to it. Does not run anything:
`rollout/runner.py` implements the handles.
Rules that make an episode durable: an instance is one episode, its state lives on `self`, and
everything non-deterministic or outside `self` goes through `ctx`.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError, RewardError, error_words
from agentrl.core.records import Message, PolicyVersion, Recollection, StopReason, Task, Turn

if TYPE_CHECKING:
    import random

    from agentrl.core.records import ToolSpec

T = TypeVar("T")
Split = Literal["train", "held_out"]
Guarantee = Literal["read", "idempotent", "once"]
Reconcile = Callable[[], "tuple[bool, T | None] | Awaitable[tuple[bool, T | None]]"]
Reply = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What a demonstration says in a turn."""
ResourceLevel = Literal["replay", "snapshot", "pinned"]

LARGEST_REWARD = 1e6
"""A larger reward, either way, is taken for a mistake."""


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


class TaskSource(Protocol):
    """Where tasks come from: anything with a length and an index. A plain list will do."""

    def __len__(self) -> int:
        """How many tasks there are."""
        ...

    def __getitem__(self, index: int, /) -> Task:
        """Task number `index`, the same each time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds an episode."""

    max_turns: int
    """Turns of one agent."""
    max_tokens: int
    """Sampled tokens of one turn."""
    max_context: int
    """Tokens of one conversation."""


class LimitReachedError(AgentRLError):
    """An agent asked for more than `ctx.limits` allow. Uncaught, it ends the episode as truncated, not as failed."""

    def __init__(self, message: str, *, stop_reason: StopReason) -> None:
        super().__init__(message)
        self.stop_reason: StopReason = stop_reason


class ToolCallError(AgentRLError):
    """A tool call that no tool can take: an unknown name, or arguments that do not fit. Its text is the observation."""

    def __init__(self, message: str, *, outcome: Literal["unknown_tool", "bad_arguments"]) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """How a child episode ended."""

    episode_id: str
    drop_reason: str | None
    """None where it was committed; a dropped child belongs in no numerator and no denominator."""
    rewards: Mapping[str, float]
    """By seat, summed over its agents."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """The oldest weights that each policy sampled a token of it with: whom the rewards were measured against."""

    @property
    def reward(self) -> float | None:
        """The sum over seats; None where the child was dropped."""
        return None if self.drop_reason is not None else sum(self.rewards.values())


class ChildEpisode(ABC):
    """A child episode that was started; await it, or pass it to `ctx.gather`."""

    episode_id: str

    @abstractmethod
    def __await__(self) -> Any:
        """Wait for its `ChildResult`."""


class Agent(ABC):
    """One conversation of the policy that holds a seat."""

    seat: str
    index: int

    @abstractmethod
    async def act(self, *messages: Message, max_tokens: int | None = None) -> Turn:
        """Append messages to the conversation and let the policy answer.

        Raises:
            LimitReachedError: the agent has no turn or no context left.
        """

    @abstractmethod
    def restart(self, *messages: Message) -> None:
        """Begin a new row: the next `act` starts from these messages instead of the conversation so far."""

    @abstractmethod
    def reward(self, value: float, turn: int | None = None) -> None:
        """Give a reward for the episode, or for the agent's turn number `turn`, from 0. Rewards of an agent add up.

        By default all tokens of the agent are credited with the sum; with `credit.turn_credit = "to_go"` a turn's
        reward counts for the tokens of that turn and of those before it.

        Raises:
            RewardError: not a finite real number, or there is no such turn yet.
        """

    @abstractmethod
    def gate(self, accepted: bool, *, penalty: float) -> bool:
        """Say whether what the agent made is good enough to spend anything on; where not, `penalty` is its reward.

        Before `reward`, which needs something to have been spent: `if not proposer.gate(problem.valid, penalty=-0.5):
        return`. What it lets through is what the policy learns to make, whatever the reward is: be strict here.
        Returns `accepted`; the share that is accepted is the metric `gate/acceptance`.

        Raises:
            RewardError: the penalty is not a finite real number.
        """

    @property
    @abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """The conversation so far, the agent's own messages included."""


class EpisodeContext(ABC):
    """What `run` may ask for. Every call is journaled under the branch that makes it."""

    task: Task
    limits: Limits

    @abstractmethod
    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> Agent:
        """The agent `index` of `seat`; the same handle each time. `tools` count at its first call."""

    @abstractmethod
    async def effect(
        self,
        name: str,
        function: Callable[[], T | Awaitable[T]],
        *,
        guarantee: Guarantee = "idempotent",
        reconcile: Reconcile[T] | None = None,
    ) -> T:
        """Act on the outside world; the JSON-serialisable result is journaled and never asked for twice.

        Args:
            name: in the journal.
            function: what is done. It may use neither `ctx` nor an agent.
            guarantee: what another try may do where the process died before the result was on disk. `read` and
                `idempotent`: it is tried again (a read changes nothing, an idempotent act may be done twice; a
                `ctx.uuid()` drawn before it is a key that stays). `once`: it is not; the intent is on disk before the
                act, and an act without a result ends the episode as `unknown_effect`, unless `reconcile` knows.
            reconcile: for `once`: asks the outside what happened; `(True, result)`, or `(False, None)` where nothing
                did and the act may be tried again.

        Raises:
            EffectError: the function raised; the same on every execution.
        """

    @abstractmethod
    def resource(
        self, factory: Callable[[], object], *, level: ResourceLevel = "pinned", seed: int | None = None
    ) -> Resource:
        """A stateful object of this episode.

        Args:
            factory: makes the object. It, and every call, run under global random states (`random`, `numpy.random`) of
                their own.
            level: how the object comes back when `run` is executed again. `replay`: its calls are made again and their
                results compared. `snapshot`: it has `get_state()` and `set_state(state)`, JSON data or bytes; the state
                after the last recorded call is restored. `pinned`: not at all, the episode begins again.
            seed: of those random states, where they shall be the same in other episodes as well; default: the
                episode's.
        """

    @abstractmethod
    def patched(self, id: str) -> bool:
        """Whether code that was added under running episodes may run here: `if ctx.patched("shorter prompt"): …`.

        False only while a branch replays what was recorded before the code knew this id. A call id of its own is not
        used, so that the patch does not shift the calls that follow.
        """

    @abstractmethod
    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Start `n` child episodes on one task: a group of their own, each whole in itself.

        Raises:
            EpisodeError: with those the attempt has started before they are more than `fan_out` declares; none starts.
        """

    @abstractmethod
    async def remember(self, key: str, structure: str = "") -> Recollection:
        """Have the run remember a proposal, and hear what it knew of it: journaled, so the same on every execution.

        The newest 2,000 proposals of all training episodes are remembered. Other episodes only hear.

        Args:
            key: equal for proposals that are the same. Normalise it: what differs by a space is another one.
            structure: equal for proposals that are alike, such as `"3 terms"`: coarse, and cheap to tell.
        """

    @abstractmethod
    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await several things at once, each on a branch of its own; results in the order given."""

    @abstractmethod
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
        """Run a tool and journal its observation; for environments that bring a tool loop of their own.

        `guarantee` counts for external tools and is that of `effect`. `call` raises `ToolCallError` where the call fits
        no tool: that counts as breaking the format.
        """

    @abstractmethod
    def truncate(self, limit: LimitReachedError) -> None:
        """Say that a limit which `run` caught cut the episode short: it counts as truncated."""

    @property
    @abstractmethod
    def rng(self) -> random.Random:
        """Random numbers of the calling branch: the same on every execution."""

    @abstractmethod
    def now(self) -> float:
        """Wall-clock seconds since the epoch, journaled."""

    @abstractmethod
    def uuid(self) -> str:
        """A random UUID (version 4) of the calling branch: the same on every execution."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    def metric(self, name: str, value: float) -> None:
        """Record a number beside the episode; the mean over episodes appears in the metrics."""


class Resource(ABC):
    """A stateful object that belongs to the episode, called through the journal."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; the JSON-serialisable result is journaled.

        Raises:
            EffectError: the method raised; the same on every execution. agentrl's own errors come as they are.
        """


class Environment(ABC):
    """A kind of task. One instance lives for one episode; `run` is the program of that episode.

    Example:
        class Guess(agentrl.Environment):
            seats = ("guesser",)

            async def run(self, ctx):
                turn = await ctx.agent("guesser").act(agentrl.user("Guess a digit."))
                ctx.agent("guesser").reward(1.0 if turn.text.strip() == ctx.task.data["digit"] else 0.0)
    """

    # --- override these ---------------------------------------------------------------------------------------------

    seats: ClassVar[tuple[str, ...]] = ("agent",)
    """The roles policies can hold."""
    fan_out: ClassVar[Mapping[str, int]] = {}
    """Child episodes one episode starts at most, by class name, so that admission can reserve them: a spawn beyond that
    is refused. Of classes that are not named here, the most that an episode has had is reserved."""
    truncated_reward: ClassVar[float | None] = 0.0
    """What an agent without a reward gets when a limit ends the episode; None drops such episodes."""
    own_random: ClassVar[bool] = False
    """Its code draws from `random` or `numpy.random`, so each episode has a state of its own there. Seen at the first
    draw, after which the episode begins again; declared, it need not."""

    @abstractmethod
    async def run(self, ctx: EpisodeContext) -> None:
        """Play the episode: act, observe, reward."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """The tasks of a split. Keyword arguments after `seed` are the environment's options."""
        raise NotImplementedError(f"{cls.__name__} has no task source: override `tasks`, or pass tasks= to train()")

    @classmethod
    def demonstrate(cls, task: Task, random: random.Random) -> Iterable[Reply] | Generator[Reply, str, None]:
        """What a good policy says in an episode of a task, turn by turn, for `agentrl env warm-up`.

        A list, or a generator, which is sent what the environment answered to each reply. A reply is text, a tool call
        as `{"name": …, "arguments": {…}}`, or a list of calls. One that takes `seat=` is told for which seat it speaks.
        """
        raise NotImplementedError(f"{cls.__name__} has no demonstrations: override `demonstrate`")

    @classmethod
    def load(cls) -> None:
        """Load read-only data; called once per worker before the first episode."""

    # --- machinery --------------------------------------------------------------------------------------------------

    @classmethod
    def source(cls) -> str:
        """Text of the class's module, for the code hash; the qualified name where there is no source."""
        try:
            return inspect.getsource(inspect.getmodule(cls) or cls)
        except (OSError, TypeError):
            return f"{cls.__module__}:{cls.__qualname__}"


def described(error: BaseException) -> str:
    """A foreign error on one line, with the place it was raised at."""
    return f"{error_words(error)}{raised_at(error)}"


def raised_at(error: BaseException | None) -> str:
    """Where an error was raised, as ` at FILE:LINE in FUNCTION`; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def finite_reward(value: object, where: str) -> float:
    """A reward as a float: of Python's real numbers, or of numpy's.

    Args:
        value: the reward an environment gave.
        where: the agent and turn, for the message.

    Raises:
        RewardError: it is None, a string, an object that merely converts to a float, NaN, or larger than
            `LARGEST_REWARD` in either direction.
    """
    numpy = sys.modules.get("numpy")  # whoever has a number of numpy has imported it
    is_number = isinstance(value, Real) or (numpy is not None and isinstance(value, numpy.floating | numpy.bool_))
    if not is_number or (numpy is not None and isinstance(value, numpy.timedelta64)):  # which calls itself an integer
        shown = reprlib.repr(value)  # short, whatever the object says of itself
        raise RewardError(f"{where}: the reward is {shown} ({type(value).__name__}); it must be a finite number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError) as error:
        raise RewardError(f"{where}: the reward {type(value).__name__} is no finite real number ({error})") from error
    if not abs(number) <= LARGEST_REWARD:  # NaN is not, either
        raise RewardError(
            f"{where}: the reward is {number:g}; it must be finite and no larger than {LARGEST_REWARD:g} either way, "
            "since one such reward would decide the whole step: scale rewards to about 1"
        )
    return number


def valid_unicode(text: str) -> str:
    """Text without lone surrogates, which file names and models can bring and no database can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def children_of(environment: type[Environment]) -> dict[type[Environment], int]:
    """The classes that `fan_out` names, found in the environment's module, and how many of each.

    Raises:
        EnvironmentDefinitionError: a name that is no environment there, or a number below 1.
    """
    found = {}
    for name, count in environment.fan_out.items():
        child = getattr(sys.modules.get(environment.__module__), name, None)
        if not (isinstance(child, type) and issubclass(child, Environment)):
            raise EnvironmentDefinitionError(
                f"{environment.__qualname__}.fan_out names {name!r}, no environment in {environment.__module__}"
            )
        if count < 1:
            raise EnvironmentDefinitionError(
                f"{environment.__qualname__}.fan_out says {count} of {name}: how many an episode starts, 1 or more; "
                "leave it out where it may be none"
            )
        found[child] = count
    return found
