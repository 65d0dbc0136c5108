"""The handles that a user's program calls: `EpisodeContext`, which `run` receives, and its `Agent`s.

`rollout` implements them. A program keeps its state on `self`; everything non-deterministic or outside `self` goes
through `ctx`, which journals it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError
from agentrl.core.records import REWARD, Message, PolicyVersion, ProposalNovelty, StopReason, Task, Turn
from agentrl.core.removed import removed_name

if TYPE_CHECKING:
    import random
    import socket

    from agentrl.core.records import ToolSpec
    from agentrl.environment.environment import Environment
    from agentrl.gateway.calls import RequestRefusedError
    from agentrl.sandbox.driver import CommandResult
    from agentrl.sandbox.sandbox import Sandbox


T = TypeVar("T")

Guarantee = Literal["read", "idempotent", "once"]

Reconcile = Callable[[], "tuple[bool, T | None] | Awaitable[tuple[bool, T | None]]"]

ResourceLevel = Literal["replay", "snapshot", "pinned"]

Aliases = Mapping[str, str | Collection[str]] | Collection[str]
"""Model names of external agents: see `HarnessEnvironment.aliases`."""


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    """A message of the assistant that no policy sampled, such as an example in a prompt."""
    return Message(role="assistant", content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The limits of an episode."""

    max_turns: int
    """Maximum number of turns per agent."""
    max_tokens: int
    """Maximum number of sampled tokens per turn."""
    max_context: int
    """Maximum number of tokens per conversation."""


class EpisodeContext(ABC):
    """The handle that `run` receives. Every call is journaled under the branch that makes it."""

    task: Task
    limits: EpisodeLimits

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            sentence = removed_name(f"agentrl.EpisodeContext.{name}")
            raise AttributeError(sentence or f"{type(self).__name__!r} object has no attribute {name!r}")

    @abstractmethod
    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> Agent:
        """Return agent `index` of `seat`: the same handle at each call. Only the first call declares `tools`."""

    @abstractmethod
    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Start `n` child episodes on one task. They form a group; each is a whole episode.

        Raises:
            EpisodeError: the attempt would exceed the number that `fan_out` declares; none starts.
        """

    @abstractmethod
    def branches_left(self) -> int:
        """Return the number of branches that `branch` may still start here: 0 in branches, evaluations and forks.
        Journaled."""

    @abstractmethod
    async def branch(self, n: int) -> int:
        """Continue the episode `n` more times from here, each as a further episode of its group.

        Returns 0 here, and 1 to `n` in the branches, which recall everything before the call. All turns before the call
        are sampled and trained once. Each branch counts 1/(n + 1) of the episode, so the gradient stays unbiased if the
        decision to branch depends on the past alone. In branches, evaluations, forks and replays the call returns 0 and
        starts nothing.

        Example:
            class Retry(agentrl.Environment):
                branches = 3

                async def run(self, ctx):
                    solver = ctx.agent("agent")
                    plan = await solver.act(agentrl.user("Make a plan."))
                    if "?" in plan.text and ctx.branches_left() >= 3:
                        await ctx.branch(3)
                    answer = await solver.act(agentrl.user("Now solve it."))
                    solver.reward(grade(answer.text))

        Raises:
            EnvironmentDefinitionError: `n` is not a positive whole number.
            EpisodeError: the episode cannot branch here: more than the environment's `branches`, no turn yet,
                inside `gather`, after `spawn` or `endpoint`, or with a resource that is pinned to its process.
        """

    @abstractmethod
    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await several things at once, each on a separate branch; returns the results in the given order."""

    @abstractmethod
    async def effect(
        self,
        name: str,
        function: Callable[[], T | Awaitable[T]],
        *,
        guarantee: Guarantee = "idempotent",
        reconcile: Reconcile[T] | None = None,
    ) -> T:
        """Act on the outside world. The JSON-serializable result is journaled, and re-execution returns it without
        acting again.

        Args:
            name: names the effect in the journal.
            function: performs the effect. It may use neither `ctx` nor an agent.
            guarantee: what a retry may do if the process died before the result was on disk. `read` and `idempotent`:
                call `function` again (a read changes nothing, an idempotent act may happen twice; a `ctx.uuid()` drawn
                before it is a stable key). `once`: never call it again; the intent is on disk before the act, and an
                act without a result ends the episode as `unknown_outcome_error`, unless `reconcile` finds the outcome.
                Without `reconcile`, an episode that would start over after the act is dropped.
            reconcile: for `once`: asks the outside world what happened. Returns `(True, result)`, or `(False, None)` if
                nothing happened and the act may be tried again. An episode that starts over asks it before the act.

        Raises:
            EffectError: the function raised; re-execution raises the same.
        """

    @abstractmethod
    def resource(
        self, factory: Callable[[], object], *, level: ResourceLevel = "pinned", seed: int | None = None
    ) -> Resource:
        """A stateful object of this episode.

        Args:
            factory: makes the object. The factory and all calls share global random generators (`random`,
                `numpy.random`) that nothing else uses.
            level: recovery of the object when `run` is re-executed. `replay`: its calls are made again and their
                results compared. `snapshot`: it has `get_state()` and `set_state(state)`, JSON data or bytes; the state
                after the last recorded call is restored. `pinned`: it is lost, and the episode restarts.
            seed: seeds those generators; give one to share them between episodes. Default: the episode's seed.
        """

    @abstractmethod
    def sandbox(self, limits: Sandbox) -> EpisodeSandbox:
        """A sandbox of this episode, which keeps its files until the episode ends.

        Raises:
            EnvironmentDefinitionError: its network is `gateway`, which only a `HarnessEnvironment` has.
        """

    @abstractmethod
    def score(self, scorer: str, agent: Agent) -> Verdict:
        """Ask a scorer of the run for the score of an agent's newest turn. It starts now; the next turn does not wait.

        The score is a reward of that turn, like a reward from `run`, and the episode waits for it at its end. Await
        the verdict only to decide by it.

        Args:
            scorer: name of the scorer, `NAME` of `[scorers.NAME]`.
            agent: the agent, which has acted.

        Raises:
            EnvironmentDefinitionError: the run has no such scorer, or the scorer scores whole conversations.
        """

    @property
    @abstractmethod
    def rng(self) -> random.Random:
        """The random stream of the calling branch; re-execution draws the same numbers."""

    @abstractmethod
    def metric(self, name: str, value: float) -> None:
        """Add a number to a metric of the episode; step metrics report its mean over the episodes of the environment.
        An episode that does not add to it counts as 0.

        It belongs to the episode, not to an agent: with several policies, it is reported once, at the steps of the
        first learning policy, by name, that acted in the episode. The exception is `turns/illegal`, which counts for
        the agent that acted last. Names of agentrl's own metrics (docs/reference/metrics.md) are refused.
        """

    # --- rarely ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Wall-clock seconds since the epoch, journaled."""

    @abstractmethod
    def uuid(self) -> str:
        """A random UUID (version 4) of the calling branch; re-execution returns the same."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""

    @abstractmethod
    def truncate(self, limit: LimitReachedError) -> None:
        """Mark the episode as truncated by a limit that `run` caught."""

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
        may_repeat: bool = False,
    ) -> str:
        """Run a tool and journal its observation, for environments with their own tool loop.

        `guarantee` applies to external tools; see `effect`. `call` raises `InvalidToolCallError` if the call fits no
        tool, which counts as a format error. `may_repeat` lets an episode with this `once` call start over, and make
        it again.
        """

    @abstractmethod
    def endpoint(
        self,
        *,
        aliases: Aliases = (),
        volatile: Sequence[str] = (),
        ignored_fields: Sequence[str] = (),
        recall: bool = True,
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Serve a model endpoint for an external agent: each request is a turn of the seat that its model name selects.

        Use it around an effect that runs the agent. Seats that it serves take no `act`. Re-execution begins the episode
        again, and gives the same replies to the same requests.

        Args:
            aliases: additional model names; see `HarnessEnvironment.aliases`.
            volatile: regular expressions of text that is ignored when requests are compared.
            ignored_fields: request fields that are ignored, instead of honored or refused.
            recall: whether a restarted attempt gets the replies of earlier attempts.

        Raises:
            EnvironmentDefinitionError: a seat has acted, or a pattern is not a regular expression.
            EpisodeError: an earlier execution left entries: the episode restarts.
        """

    @abstractmethod
    async def remember(self, key: str, structure: str = "") -> ProposalNovelty:
        """Record a proposal in the run's memory and return what the memory held before. Journaled: re-execution returns
        the same.

        The run remembers the newest 2,000 proposals of all training episodes. Other episodes read the memory and add
        nothing.

        Args:
            key: equal for equal proposals. Normalize it: one more space makes another proposal.
            structure: equal for similar proposals, such as `"3 terms"`: coarse, and cheap to compute.
        """

    @abstractmethod
    def patched(self, id: str) -> bool:
        """Return whether code that was added while episodes were running may run now: `if ctx.patched("shorter
        prompt"): …`.

        It is False only while a branch replays entries that were recorded before the code knew this id. The call uses
        no call id, so a patch does not shift the calls that follow.
        """


class Agent(ABC):
    """One conversation of the policy that holds a seat."""

    __slots__ = ()

    seat: str
    index: int

    @abstractmethod
    async def act(
        self,
        *messages: Message,
        max_tokens: int | None = None,
        reply: str | None = None,
        state: str | None = None,
        choices: Sequence[str] = (),
    ) -> Turn:
        """Append messages to the conversation and return the policy's answer.

        Args:
            messages: messages to append.
            max_tokens: maximum number of tokens of the answer, if less than `ctx.limits.max_tokens`.
            reply: an answer as the policy would write it, which it is trained on in place of one that it samples: a
                demonstration. Its recorded probability is 1.
            state: the environment's state before the turn, as text, such as a board. Turns of a group with equal states
                are compared by `credit.advantage = "gigpo"`; None: with equal new messages, system messages left out.
            choices: the legal replies; empty: any. A policy with weights gives one of them, and is trained under its
                probability among them. Bots and remote endpoints may reply otherwise.

        Raises:
            LimitReachedError: the agent has no turn or no context left.
        """

    @abstractmethod
    def restart(self, *messages: Message) -> None:
        """Begin a new row: the next `act` starts from these messages instead of the conversation."""

    @abstractmethod
    def reward(self, value: float | Mapping[str, float], turn: int | None = None, *, name: str = REWARD) -> None:
        """Add a reward for the episode or, with `turn` (counted from 0), for one turn. An agent's rewards add up.

        Rewards of several names, such as `agent.reward({"correct": 1.0, "format": 0.5})`, are shown separately. The
        total is their sum weighted by `credit.reward_weights` (1 if that is empty, or for a reward without a name).

        By default every token of the agent is credited with the sum. With `credit.turn_credit = "to_go"`, the reward of
        a turn counts for the tokens of that turn and of the turns before it.

        Args:
            value: the reward, or rewards by name.
            turn: the turn it is for; None: the episode.
            name: its name.

        Raises:
            RewardError: a value is not a finite real number, the agent has no such turn yet, or the name is not an
                identifier, or lacks a weight although other names have one.
        """

    @abstractmethod
    def gate(self, accepted: bool, *, penalty: float) -> bool:
        """Accept or reject the agent's work before anything is spent on it; a rejected agent gets `penalty` as its
        reward.

        Call it before the expensive part of a reward: `if not proposer.gate(problem.valid, penalty=-0.5): return`. Be
        strict: the policy learns to satisfy the gate. Returns `accepted`; the metric `gate/acceptance` is
        the share that passed.

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


class ChildEpisode(ABC):
    """A child episode in progress; await it, or pass it to `ctx.gather`."""

    episode_id: str

    @abstractmethod
    def __await__(self) -> Any:
        """Wait for the child to end; returns its `ChildResult`."""


class Verdict(ABC):
    """A score in progress; await it for its value, which is None if the scorer says nothing."""

    @abstractmethod
    def __await__(self) -> Any:
        """Wait for the score. It is journaled: re-execution returns the same."""

    @abstractmethod
    async def peek(self) -> float | None:
        """Return the score if it has arrived, else None. Journaled, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """The result of a child episode."""

    episode_id: str
    drop_reason: str | None
    """Reason the child was dropped, or None if it was committed. Leave dropped children out of every average."""
    rewards: Mapping[str, float]
    """Reward of each seat, summed over its agents."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Oldest version that sampled a token of the child, keyed by policy: the policy that the rewards measure."""

    @property
    def reward(self) -> float | None:
        """Sum of the rewards over all seats; None if the child was dropped."""
        return None if self.drop_reason is not None else sum(self.rewards.values())


class Resource(ABC):
    """A stateful object of the episode, whose calls go through the journal."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; the JSON-serializable result is journaled.

        Raises:
            EffectError: the method raised; re-execution raises the same. agentrl's own errors pass through unchanged.
        """


class EpisodeSandbox(ABC):
    """A sandbox that keeps its files from command to command. Its calls go through the journal.

    Re-execution returns the recorded results and runs nothing; the first new command finds the files as they were after
    the last call that returned: what a cancelled command left is recorded with the next call. Commands run one after
    another. With a network, the files die with the process, and the episode restarts.

    Raises:
        EpisodeError: what a command changed does not fit a journal entry, about 48 MiB (`too_large`).
    """

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> CommandResult:
        """Run one command; see `Sandbox.run`."""

    @abstractmethod
    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files by absolute path.

        Raises:
            EffectError: the disk is full, or a link or a file is on the way.
        """

    @abstractmethod
    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` bytes of the plain file at an absolute path.

        Raises:
            EffectError: there is no plain file, or a link is on the way.
        """

    @abstractmethod
    def copy(
        self, *, only: Sequence[str] = (), without: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[EpisodeSandbox]:
        """A fresh sandbox with copies of the files at or below the absolute paths `only`, but for those at or below
        `without`; default: of all files. A judge works there, out of the reach of everything the policy started or left
        elsewhere.

            async with box.copy(only=["/box/src"]) as judge:
                passed = (await judge.run(["python3", "/box/test.py"], files={"test.py": tests})).ok
        """


class Endpoint(ABC):
    """A model endpoint on this machine whose models are an episode's seats; see `EpisodeContext.endpoint`.

    It answers OpenAI's chat completions and responses, Anthropic's messages, and requests for the list of models.
    """

    url: str
    """Base URL for clients of OpenAI's protocols; ends with `/v1`."""
    key: str
    """API key for all seats; the model's name chooses the seat."""
    keys: Mapping[str, str]
    """API keys, keyed by seat; each key admits to its seat only."""

    @abstractmethod
    def variables(self, url: str | None = None) -> dict[str, str]:
        """Environment variables by which the usual clients find the endpoint and the key; `url` is another address of
        the same endpoint. Clients of the Messages protocol add `/v1` themselves."""

    @abstractmethod
    def serve(self, listening: socket.socket) -> None:
        """Serve the seats at a listening socket too, such as that of a sandbox's network. The endpoint closes it."""

    @property
    @abstractmethod
    def refusal(self) -> RequestRefusedError | None:
        """Why the newest request was refused; None if it was not, or a limit of the run did it."""

    @abstractmethod
    def limit_reached(self) -> LimitReachedError | None:
        """First limit that refused a request; None if none did."""

    @abstractmethod
    def program_ended(self, error: str | None, place: str = "") -> None:
        """Count a run of the program, as the metric `program/ok` or `program/failed`.

        `error` is why it failed, with its type; None: it succeeded. `place` is the line that failed. Both become the
        episode's detail, and the alarm `always_fails` if no run succeeds.
        """

    @abstractmethod
    async def run_program(self, name: str, program: Callable[[], Awaitable[T]]) -> T:
        """Run a program that uses the endpoint, as the effect `name`; cancel it when the episode cannot continue.
        Unlike other effects, it runs again when the episode is replayed, and gets the recorded replies.

        Raises:
            EffectError: the program failed.
            AgentRLError: the episode cannot continue.
        """


def read_aliases(aliases: Aliases, seats: Sequence[str]) -> dict[str, str]:
    """Return the seat of each additional model name.

    Raises:
        EnvironmentDefinitionError: it has another form, names an unknown seat, or gives two seats to a name.
    """
    found: dict[str, str] = {}

    def add(name: object, seat: object) -> None:
        if seat not in seats:
            known = f"; the seats are {', '.join(map(repr, seats))}"
            raise EnvironmentDefinitionError(f"aliases = {aliases!r}: {seat!r} is no seat{known}. {forms}")
        if not isinstance(name, str) or found.get(name, seat) != seat or (name in seats and name != seat):
            raise EnvironmentDefinitionError(f"aliases = {aliases!r}: {name!r} is not one name of one model. {forms}")
        found[name] = str(seat)

    forms = f'Write `aliases = {{"gpt-4o-mini": "{seats[0]}"}}`, or `aliases = {{"{seats[0]}": ["gpt-4o-mini"]}}`'
    if isinstance(aliases, Mapping):
        for key, value in aliases.items():
            if isinstance(value, list | tuple | set | frozenset):
                for name in value:
                    add(name, key)
            else:
                add(key, value)
    elif isinstance(aliases, list | tuple | set | frozenset) and (len(seats) == 1 or not aliases):
        for name in aliases:
            add(name, seats[0])
    else:
        raise EnvironmentDefinitionError(f"aliases = {aliases!r} gives no seat. {forms}")
    return found


class LimitReachedError(AgentRLError):
    """An agent exceeded `ctx.limits`. Uncaught, it ends the episode as truncated, not as failed."""

    def __init__(self, message: str, *, stop_reason: StopReason) -> None:
        super().__init__(message)
        self.stop_reason: StopReason = stop_reason


class InvalidToolCallError(AgentRLError):
    """A tool call that no tool accepts: an unknown name, or arguments that do not fit. Its text becomes the
    observation."""

    def __init__(self, message: str, *, outcome: Literal["unknown_tool", "bad_arguments"]) -> None:
        super().__init__(message)
        self.outcome = outcome
