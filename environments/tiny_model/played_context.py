"""An `EpisodeContext` without a journal: plays an episode once, in this process, with a callable for each seat.

Plays demonstrations. Nothing is recorded, so nothing can be resumed; child episodes need an orchestrator and are
refused.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from agentrl.core.clock import SystemClock
from agentrl.core.errors import (
    AgentRLError,
    EffectError,
    EnvironmentDefinitionError,
    InfrastructureError,
    format_foreign_error,
)
from agentrl.core.ids import random_stream, seeded_uuid4
from agentrl.core.records import (
    REWARD,
    Message,
    PolicyVersion,
    ProposalNovelty,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
    VersionSpan,
)
from agentrl.core.tokens import Completion
from agentrl.environment.context import (
    Agent,
    ChildEpisode,
    EpisodeContext,
    EpisodeLimits,
    Guarantee,
    InvalidToolCallError,
    LimitReachedError,
    Reconcile,
    Resource,
    ResourceLevel,
)
from agentrl.environment.environment import Environment
from agentrl.environment.rewards import check_reward_name, finite_reward

T = TypeVar("T")

Speak = Callable[[Sequence[Message]], Awaitable[str]]
"""Answers for a seat: maps new messages to a reply."""
ParseText = Callable[[str], tuple[str, tuple[ToolCall, ...]]]
"""Splits the text of a seat into content and tool calls."""


class PlayedAgent(Agent):
    """One conversation with the callable that answers for the seat."""

    def __init__(self, seat: str, index: int, speak: Speak, parse: ParseText, limits: EpisodeLimits) -> None:
        self.seat = seat
        self.index = index
        self.rewards: list[float] = []
        self._speak = speak
        self._parse = parse
        self._limits = limits
        self._turns: list[Turn] = []
        self._messages: list[Message] = []
        self._pending: tuple[Message, ...] = ()
        self.on_restart: Callable[[], None] = lambda: None

    async def act(
        self,
        *messages: Message,
        max_tokens: int | None = None,
        reply: str | None = None,
        state: str | None = None,
        choices: Sequence[str] = (),
    ) -> Turn:
        """Ask the callable, unless a reply is given; `max_tokens`, `state` and `choices` have no effect on it."""
        if len(self._turns) >= self._limits.max_turns:
            raise LimitReachedError(f"agent {self.seat!r} has no turn left", stop_reason="max_turns")
        new, self._pending = (*self._pending, *messages), ()
        text = await self._speak(new) if reply is None else reply
        content, calls = self._parse(text)
        message = Message(role="assistant", content=content, tool_calls=calls)
        self._messages += [*new, message]
        turn = Turn(text=content, message=message, completion=_completion(self.seat, text))
        self._turns.append(turn)
        return turn

    def restart(self, *messages: Message) -> None:
        """Begin again from these messages."""
        self._messages, self._pending = [], messages
        self.on_restart()

    def reward(self, value: float | Mapping[str, float], turn: int | None = None, *, name: str = REWARD) -> None:
        """Add to the agent's rewards, each with weight 1."""
        for reward_name, part in (value if isinstance(value, Mapping) else {name: value}).items():
            check_reward_name(reward_name, f"agent {self.seat!r}")
            self.rewards.append(finite_reward(part, f"agent {self.seat!r}"))

    def gate(self, accepted: bool, *, penalty: float) -> bool:
        """Add the penalty to the agent's rewards if `accepted` is False."""
        if not accepted:
            self.reward(penalty)
        return accepted

    @property
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""
        return self._turns

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages


async def _acted(name: str, function: Callable[[], Any]) -> Any:
    """Return what a call outside the program returns.

    Raises:
        EffectError: it raised, as in a run.
    """
    try:
        value = function()
        return await value if inspect.isawaitable(value) else value
    except AgentRLError:
        raise
    except Exception as error:
        raise EffectError(f"{name} failed", error=format_foreign_error(error)) from error


class PlayedResource(Resource):
    """A stateful object, called directly."""

    def __init__(self, instance: object) -> None:
        self._object = instance

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method."""
        return await _acted(f"{method} of a resource", lambda: getattr(self._object, method)(*arguments))


class PlayedContext(EpisodeContext):
    """An `EpisodeContext` without a journal.

    Args:
        task: the task to play.
        speakers: callables that answer, by seat.
        limits: limits of the episode.
        seed: seeds `rng`.
        parse: finds tool calls in replies; default: there are none.
    """

    def __init__(
        self,
        task: Task,
        speakers: Mapping[str, Speak],
        *,
        limits: EpisodeLimits,
        seed: int,
        parse: ParseText | None = None,
    ) -> None:
        self.task = task
        self.limits = limits
        self.agents: dict[tuple[str, int], PlayedAgent] = {}
        self.metrics: dict[str, float] = {}
        self.truncated = False
        self._speakers = speakers
        self._parse: ParseText = parse if parse is not None else lambda text: (text, ())
        self._rng = random_stream("plain", seed)
        self._clock = SystemClock()

    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> PlayedAgent:
        """Return the agent of a seat; `tools` is ignored."""
        if seat not in self._speakers:
            raise EnvironmentDefinitionError(f"seat {seat!r} has no player; give a callable for it")
        new_agent = PlayedAgent(seat, index, self._speakers[seat], self._parse, self.limits)
        return self.agents.setdefault((seat, index), new_agent)

    async def effect(
        self,
        name: str,
        function: Callable[[], T | Awaitable[T]],
        *,
        guarantee: Guarantee = "idempotent",
        reconcile: Reconcile[T] | None = None,
    ) -> T:
        """Act on the outside world."""
        result: T = await _acted(f"effect {name!r}", function)
        return result

    def resource(
        self, factory: Callable[[], object], *, level: ResourceLevel = "pinned", seed: int | None = None
    ) -> PlayedResource:
        """A stateful object of this episode."""
        return PlayedResource(factory())

    def patched(self, id: str) -> bool:
        """Return True: this context never replays older code."""
        return True

    def spawn(
        self, environment: type[Environment], task: Task | Mapping[str, Any], *, n: int = 1
    ) -> tuple[ChildEpisode, ...]:
        """Refuse: child episodes need an orchestrator."""
        raise EnvironmentDefinitionError(
            f"{environment.__name__} cannot be spawned here: child episodes need a run of `agentrl.train` or "
            "`agentrl.evaluate`"
        )

    def branches_left(self) -> int:
        """Return 0: branches need a run."""
        return 0

    async def branch(self, n: int) -> int:
        """Return 0 and start nothing, as in an evaluation."""
        return 0

    async def remember(self, key: str, structure: str = "") -> ProposalNovelty:
        """Return an empty recollection: this context remembers no proposals."""
        return ProposalNovelty(times=0, share=0.0)

    async def gather(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """Await several things at once."""
        return list(await asyncio.gather(*awaitables))

    async def call_tool(
        self,
        name: str,
        arguments: Any,
        call: Callable[[], str | Awaitable[str]],
        *,
        external: bool,
        timeout_s: float | None,
        guarantee: Guarantee = "idempotent",
        at_once: bool = False,
        may_repeat: bool = False,
    ) -> str:
        """Run a tool; an exception becomes its observation."""
        try:
            async with asyncio.timeout(timeout_s):
                result = await asyncio.to_thread(call) if external else call()
                return str(await result if inspect.isawaitable(result) else result)
        except InfrastructureError:
            raise
        except InvalidToolCallError as error:
            return f"error: {error}"
        except Exception as error:  # noqa: BLE001 - a tool is foreign code, and its error is the policy's observation
            return f"error: {format_foreign_error(error)}"

    def truncate(self, limit: LimitReachedError) -> None:
        """Mark the episode as truncated."""
        self.truncated = True

    @property
    def rng(self) -> random.Random:
        """One random stream for the whole episode."""
        return self._rng

    def now(self) -> float:
        """Wall-clock seconds since the epoch."""
        return self._clock.wall()

    def uuid(self) -> str:
        """A random UUID."""
        return seeded_uuid4(self._rng)

    def endpoint(self, **_: object) -> NoReturn:
        """Refuse: an endpoint needs a run that samples.

        Raises:
            EnvironmentDefinitionError: always.
        """
        raise EnvironmentDefinitionError("an external agent needs a run: a seat that a callable plays has no endpoint")

    def sandbox(self, *_: object) -> NoReturn:
        """Refuse: a sandbox needs a run's worker.

        Raises:
            EnvironmentDefinitionError: always.
        """
        raise EnvironmentDefinitionError("a sandbox needs a run: demonstrations are played without one")

    def score(self, *_: object) -> NoReturn:
        """Refuse: a scorer needs a run.

        Raises:
            EnvironmentDefinitionError: always.
        """
        raise EnvironmentDefinitionError("a scorer needs a run: demonstrations are played without one")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._clock.sleep(seconds)

    def metric(self, name: str, value: float) -> None:
        """Add to a metric of the episode."""
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)


def _completion(seat: str, text: str) -> Completion:
    """Convert a reply to a completion: one token per byte, sampled by a placeholder version."""
    import numpy as np

    ids = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)
    spans = (VersionSpan(0, len(ids), PolicyVersion(seat, 0, 0)),) if len(ids) else ()
    return Completion(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason="stop", spans=spans)
