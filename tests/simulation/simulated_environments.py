"""The environments of a simulation: their episodes take the time given by a plan and do nothing else.

The acts of an episode depend only on its task and its own random numbers, so every scheduler gets the same jobs. The
log-length of a turn is a sum of three parts: one common to all episodes of the task, one common to a parent and its
children, and one of the episode.

A message states its own length and the length of the answer: `LengthChatFormat` writes that many tokens, the last of
which is the answer's length, and `requested_turn_length` reads it from the call. Lengths count blocks of `grain`
tokens, so a turn of 30,000 tokens costs no more than one of 300.
"""

from __future__ import annotations

import hashlib
import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from agentrl.core.ids import random_stream
from agentrl.core.records import Message, Task
from agentrl.environment.context import EpisodeContext, user
from agentrl.environment.environment import Environment

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import FinishReason, SampledTurn, ToolSpec
    from agentrl.environment.context import Agent
    from tests.simulation.plan import EnvironmentPlan, SeatPlan, SimulationPlan


class SimulatedTasks:
    """Endless tasks, each with the random numbers that its episodes share.

    Args:
        seed: seed of the random numbers.
        jump: see `SimulationPlan.jump`.
    """

    def __init__(self, seed: int, jump: tuple[int, float] | None = None) -> None:
        self._seed = seed
        self._jump, self._factor = jump or (0, 1.0)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Task:
        shared = [random_stream("simulated task", self._seed, number).gauss()]
        factor = self._factor if number >= self._jump else 1.0
        return Task(id=f"task-{number}", data={"shared": shared, "factor": factor})


class PlannedEnvironment(Environment):
    """Environment whose episodes follow a plan."""

    plan: ClassVar[EnvironmentPlan]
    grain: ClassVar[int]
    children: ClassVar[dict[str, type[PlannedEnvironment]]]

    async def run(self, ctx: EpisodeContext) -> None:
        """Let the seats take turns, with tool calls between the turns of a seat; then run the children."""
        shared = list(ctx.task.data["shared"])
        if self.children:
            shared.append(ctx.rng.gauss())
        players = [
            _Player(ctx.agent(name), seat, self, shared, ctx.task.data["factor"], ctx.rng)
            for name, seat in self.plan.seats.items()
        ]
        for turn in range(max(player.turns for player in players)):
            for player in players:
                if turn < player.turns:
                    if turn and self.plan.tool_seconds is not None:
                        await ctx.sleep(self.plan.tool_seconds.value(ctx.rng.gauss()))
                    await player.act()
        child_data = {"shared": shared, "factor": ctx.task.data["factor"]}
        groups = [ctx.spawn(child, child_data, n=self.fan_out[name]) for name, child in self.children.items()]
        await ctx.gather(*(child for group in groups for child in group))
        for player in players:
            player.agent.reward(float(ctx.rng.random() < 0.5))


class _Player:
    """Agent with the lengths of its future turns."""

    def __init__(
        self,
        agent: Agent,
        seat: SeatPlan,
        program: PlannedEnvironment,
        shared: Sequence[float],
        factor: float,
        rng: random.Random,
    ) -> None:
        likeness = program.plan.likeness
        z = math.sqrt(likeness / len(shared)) * math.fsum(shared) + math.sqrt(1 - likeness) * rng.gauss()
        self.agent = agent
        self.turns = max(round(seat.turns.value(z)), 1)
        self._grain = program.grain
        self._blocks = seat.tokens.value(z) / self.turns / program.grain
        self._answer = factor * program.plan.tool_tokens / program.grain
        self._context = factor * program.plan.prompt / program.grain
        """Length of the context before the next turn, in blocks."""
        self._told = 0
        """Number of blocks of the context that the agent already has."""

    async def act(self) -> None:
        """Take the next turn."""
        sampled = max(round(self._blocks), 1)
        added = max(round(self._context) - self._told, 1)
        await self.agent.act(user(f"{added} {sampled}"))
        self._told += added + sampled
        self._context += sampled + self._answer


def make_root_environment(plan: SimulationPlan) -> type[Environment]:
    """Create the root environment of a plan. All environments are in one module, where production looks for
    children.
    """
    digest = hashlib.blake2b(plan.model_dump_json().encode(), digest_size=6).hexdigest()
    name = f"agentrl_simulated_{digest}"
    if name not in sys.modules:
        module = ModuleType(name)
        made: dict[str, type[PlannedEnvironment]] = {}
        for environment, planned in plan.environments.items():
            made[environment] = type(
                environment,
                (PlannedEnvironment,),
                {
                    "__module__": name,
                    "__doc__": planned.__doc__,
                    "plan": planned,
                    "grain": plan.grain,
                    "seats": tuple(planned.seats),
                    "fan_out": dict(planned.fan_out),
                },
            )
            setattr(module, environment, made[environment])
        for environment, planned in plan.environments.items():
            made[environment].children = {child: made[child] for child in planned.fan_out}
        sys.modules[name] = module
    found: type[Environment] = getattr(sys.modules[name], plan.root)
    return found


# --- how an agent is told ---------------------------------------------------------------------------------------------


class LengthChatFormat:
    """Chat format (see `core.ports.ChatFormat`) in which a message consists of two lengths and has no text."""

    stop_token_ids: tuple[int, ...] = ()
    fingerprint = b"lengths"
    rewrites: tuple[str, ...] = ()
    forks = reads_earlier = False

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return as many tokens as the last message states; the last token is the length of the turn."""
        length, turn = map(int, messages[-1].content.split())
        return [0] * (length - 1) + [turn]

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        return self.start(messages, ())

    def write_reply(self, text: str, context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return no tokens, because simulated tokens have no text."""
        return []

    def rewritten(
        self, turns: Sequence[SampledTurn], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        """See `core.ports.ChatFormat.rewritten`; nothing is ever rewritten."""
        return None

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        context: Sequence[int] = (),
        reads_calls: bool = True,
    ) -> Message:
        """Return an empty message, because simulated tokens have no text."""
        return Message(role="assistant", content="")

    def foreign_call(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], *, context: Sequence[int] = ()) -> None:
        """Return None, because simulated tokens have no text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return "", because simulated tokens have no text."""
        return ""

    def encode(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """Return no tokens."""
        return []

    def drift(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str | None:
        """Return None, because simulated tokens never drift."""
        return None


def requested_turn_length(request: GenerateRequest) -> int:
    """Return the number of blocks of the turn."""
    return int(request.token_ids[-1 - request.sampled_before])
