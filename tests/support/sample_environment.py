"""The environment of the sample run: one agent writes sums, others solve and check them. It uses every kind of call.

The policies are a script (`scripted_reply_tokens`): it answers from the conversation alone, and improves with every
step of the solver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environment.tools import bind_tools, run_tool
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import PolicyVersion, Task, Turn
    from agentrl.environment.context import EpisodeContext
    from agentrl.environment.environment import Split, TaskSource

ATTEMPTS = 4
ROUNDS = 2
REVISION = -0.1
"""Reward of a turn whose answer the checker rejected."""
_SUM = re.compile(r"\d{1,3}( \+ \d{1,3}){1,4}")
_FORMAT = PlainChatFormat()


class Propose(agentrl.Environment):
    """Write a sum; it is worth most if half of the attempts at it succeed."""

    seats: ClassVar[tuple[str, ...]] = ("proposer",)
    fan_out: ClassVar[Mapping[str, int]] = {"Solve": ATTEMPTS}

    async def run(self, ctx: EpisodeContext) -> None:
        """Propose a sum, and have it solved."""
        proposer = ctx.agent("proposer")
        sum_text = (await proposer.act(agentrl.user(f"Write a sum of {ctx.task.data['terms']} numbers."))).text.strip()
        if not proposer.gate(_SUM.fullmatch(sum_text) is not None, penalty=-0.5):
            return
        novelty = await ctx.remember(sum_text, structure=f"{sum_text.count('+') + 1} terms")
        children = await ctx.gather(*ctx.spawn(Solve, {"sum": sum_text}, n=ATTEMPTS))
        rewards = [child.rewards.get("solver", 0.0) for child in children if child.drop_reason is None]
        share = sum(reward > 0.5 for reward in rewards) / max(len(rewards), 1)
        ctx.metric("solved", share)
        proposer.reward(4.0 * share * (1.0 - share))
        proposer.reward(-0.25 * novelty.share, turn=0)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return tasks, each with a number of summands."""
        return [agentrl.Task(id=f"{split}-{number}", data={"terms": 2 + number % 3}) for number in range(12)]


class Notebook:
    """Notes of one attempt; a re-execution rebuilds them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> int:
        """Append a line and return the number of lines."""
        self.lines.append(line)
        return len(self.lines)


class Solve(agentrl.Environment):
    """Solve a sum with a tool that adds two numbers; a checker may send the answer back once."""

    seats: ClassVar[tuple[str, ...]] = ("solver", "checker")

    @agentrl.tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    async def run(self, ctx: EpisodeContext) -> None:
        """Look up the sum, solve it, and have it checked."""
        sum_text = str(ctx.task.data["sum"])
        right = sum(map(int, sum_text.split(" + ")))
        await ctx.effect("look up the archive", lambda: look_up(sum_text, right), guarantee="read")
        notebook = ctx.resource(Notebook, level="replay")
        question, answer = f"{sum_text} =", ""
        for attempt in range(ROUNDS):
            turn = await self._solve(ctx, question)
            answer = turn.text.strip()
            await notebook.call("write", f"{sum_text} = {answer}")
            verdict = (await ctx.agent("checker").act(agentrl.user(f"{sum_text} = {answer}. Right or wrong?"))).text
            if "right" in verdict or attempt == ROUNDS - 1:
                break
            ctx.agent("solver").reward(REVISION, turn=len(ctx.agent("solver").turns) - 1)
            question = "The checker says that is wrong. Again:"
        ctx.agent("solver").reward(float(answer == str(right)))
        ctx.metric("rounds", len(ctx.agent("checker").turns))

    async def _solve(self, ctx: EpisodeContext, question: str) -> Turn:
        solver = ctx.agent("solver", tools=[bound.spec for bound in _TOOLS.values()])
        turn = await solver.act(agentrl.user(question))
        while turn.tool_calls:
            turn = await solver.act(*[await run_tool(ctx, self, _TOOLS, call) for call in turn.tool_calls])
        return turn


_TOOLS = bind_tools(Solve)


def look_up(sum_text: str, right: int) -> dict[str, Any]:
    """Return the archive's entry on a sum; a `once` effect on the outside world.

    Raises:
        LookupError: the page is lost, so the episode fails.
    """
    if right % 23 == 7:  # one page of the archive is lost
        raise LookupError(f"the page of {sum_text} is lost")
    return {"page": right % 23, "seen": 0}


# --- the policies -----------------------------------------------------------------------------------------------------


def scripted_reply_tokens(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
    """Return a policy's turn, from its conversation, its seed and its step."""
    draw = random_stream("sample", request.seed)
    context = request.token_ids.tolist()
    num_sampled = request.sampled_before
    conversation = _FORMAT.decode(context[: len(context) - num_sampled] if num_sampled else context)
    answer = {"proposer": _propose, "solver": _solve, "checker": _check}[policy](conversation, draw, version.step)
    return [*answer.encode(), STOP_TOKEN]


def _propose(conversation: str, draw: random.Random, step: int) -> str:
    if draw.randrange(10) == 0:
        return "Let me think of something nice: seven and eight?"
    terms = int(re.findall(r"a sum of (\d+)", conversation)[-1])
    return " + ".join(str(draw.randrange(1, 100)) for _ in range(terms))


def _solve(conversation: str, draw: random.Random, step: int) -> str:
    sum_text = re.findall(rf"({_SUM.pattern}) =", conversation)[-1][0]
    terms = list(map(int, sum_text.split(" + ")))
    tool_results = re.findall(r"<\|start\|>tool\n(-?\d+)<\|stop\|>", conversation.rpartition("<|start|>user\n")[2])
    miss = (-10, -1, 1, 10)[draw.randrange(4)]
    if draw.random() < 0.25 / (1 + step):
        wrong: list[str] = [
            f"I think it is {sum(terms) + miss}",
            str(sum(terms) + miss),
            '<tool_call>{"name": "sum", "arguments": {"a": 1, "b": 2}}</tool_call>',
            f'<tool_call>{{"name": "add", "arguments": {{"a": "{terms[0]}", "b": {terms[1]}}}}}</tool_call>',
        ]
        return wrong[draw.randrange(len(wrong))]
    if len(tool_results) >= len(terms) - 1:
        return str(tool_results[-1])
    term = int(tool_results[-1]) if tool_results else terms[0]
    return (
        f'<tool_call>{{"name": "add", "arguments": {{"a": {term}, "b": {terms[len(tool_results) + 1]}}}}}</tool_call>'
    )


def _check(conversation: str, draw: random.Random, step: int) -> str:
    sum_text, answer = re.findall(r"\n([\d +]+) = (.*)\. Right or wrong\?", conversation)[-1]
    if draw.randrange(8) == 0:
        return ("Hmm, right.", "Hmm, wrong.")[draw.randrange(2)]
    return "right" if answer == str(sum(map(int, sum_text.split(" + ")))) else "wrong"


def held_out_tasks() -> Sequence[Task]:
    """Held-out tasks of the sample run."""
    return [agentrl.Task(id=f"held-out-{number}", data={"terms": 2 + number % 3}) for number in range(4)]
