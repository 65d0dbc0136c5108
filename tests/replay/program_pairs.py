"""Pairs of programs that differ in one field of one call: recorded by the first, executed by the second.

`detect` runs a pair over the whole recording and from each of its prefixes. The replay tests and `benchmarks.oracle`
share the table. `BY_DESIGN` holds the fields that a replay ignores on purpose.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NamedTuple

import agentrl
from agentrl.core.errors import ReplayMismatchError
from agentrl.core.records import Message, ToolSpec
from tests.replay.executions import Stage

Body = Callable[[agentrl.EpisodeContext], Awaitable[Any]]


class Box:
    """A resource."""

    def put(self, value: object) -> str:
        return "kept"

    def add(self, value: object) -> str:
        return "kept"

    def get_state(self) -> list[int]:
        return [1]

    def set_state(self, state: list[int]) -> None:
        """Nothing to restore."""


class Child(agentrl.Environment):
    """One turn."""

    seats = ("alice",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("alice")
        await agent.act(agentrl.user("hello"))
        agent.reward(1.0)


class OtherChild(Child):
    """The same, under another name."""


class Program(agentrl.Environment):
    """Runs the body that the class holds, between two turns that are the same in every program."""

    seats = ("alice", "bob")
    body: ClassVar[Body]

    @classmethod
    def source(cls) -> str:
        return "the same"

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("begin"))
        await type(self).body(ctx)
        await ctx.agent("alice").act(agentrl.user("end"))


class Pair(NamedTuple):
    """Two programs."""

    name: str
    """The call and the field in which they differ."""
    first: Body
    second: Body
    call: str = "r#2"
    """Id of the first call that differs."""

    def undetected(self) -> list[str]:
        """Describe the prefixes of the first program's recording over which the second one runs as if nothing differed,
        and those that raise although they end before the difference."""
        Program.body = self.first
        stage = Stage(environment=Program)
        whole = stage.play()
        assert whole.error is None, (self.name, whole.error)
        assert self.call in whole.bodies, (self.name, list(whole.bodies))
        Program.body = self.second
        wrong = []
        for cut in range(1, len(whole.entries) + 1):
            differs = any(entry.call_id == self.call for entry in whole.entries[:cut])
            error = stage.play(whole.entries[:cut]).error
            if isinstance(error, ReplayMismatchError) is not differs:
                wrong.append(f"{self.name}, {cut} of {len(whole.entries)} entries: {error}")
        return wrong


def turn(seat: str = "alice", index: int = 0, *messages: Message, **options: Any) -> Body:
    """One turn."""
    tools = options.pop("tools", ())

    async def body(ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent(seat, index, tools=tools).act(*(messages or (agentrl.user("?"),)), **options)

    return body


def restarted(*messages: Message, restarts: bool = True) -> Body:
    """A turn in a new row, or in the old one."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        if restarts:
            ctx.agent("alice").restart(*messages)
        await ctx.agent("alice").act(agentrl.user("?"))

    return body


def reward(
    value: Any = 1.0, seat: str = "alice", index: int = 0, turn: int | None = None, name: str = "reward"
) -> Body:
    """A reward."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        ctx.agent(seat, index).reward(value, turn, name=name)

    return body


def gate(accepted: bool = False, penalty: float = -1.0, seat: str = "alice") -> Body:
    """A decision of a gate."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        ctx.agent(seat).gate(accepted, penalty=penalty)

    return body


def tool(name: str = "look", arguments: Any = None, *, result: str = "seen", **options: Any) -> Body:
    """A call of a tool."""
    settings = {"external": False, "timeout_s": None, **options}
    return lambda ctx: ctx.call_tool(name, arguments, lambda: result, **settings)


def effect(name: str = "buy", **options: Any) -> Body:
    """An effect."""
    return lambda ctx: ctx.effect(name, lambda: 3, **options)


def resource(method: str = "put", *arguments: Any, use: int = 0, **options: Any) -> Body:
    """A call on one of two resources."""
    settings = {"level": "replay", **options}

    async def body(ctx: agentrl.EpisodeContext) -> None:
        boxes = [ctx.resource(Box, **settings) for _ in range(2)]
        await boxes[use].call(method, *(arguments or (1,)))

    return body


def spawn(
    task: Any = None, n: int = 2, child: type[agentrl.Environment] = Child, order: tuple[int, ...] = (0, 1)
) -> Body:
    """Children, awaited in an order."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        children = ctx.spawn(child, {"q": 1} if task is None else task, n=n)
        for number in order:
            await children[number]

    return body


def gathered(*bodies: Body) -> Body:
    """Branches."""
    return lambda ctx: ctx.gather(*(body(ctx) for body in bodies))


def in_turn(*bodies: Body) -> Body:
    """One body after another."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        for each in bodies:
            await each(ctx)

    return body


async def now(ctx: agentrl.EpisodeContext) -> None:
    """Ask for the time."""
    ctx.now()


def remember(key: str = "k", structure: str = "s") -> Body:
    """Remember a proposal."""
    return lambda ctx: ctx.remember(key, structure)


def sleep(seconds: float) -> Body:
    """Wait."""
    return lambda ctx: ctx.sleep(seconds)


def patched(name: str) -> Body:
    """Ask for a patch, and act."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        ctx.patched(name)
        await turn()(ctx)

    return body


def metric(name: str, value: float) -> Body:
    """Count something, and act."""

    async def body(ctx: agentrl.EpisodeContext) -> None:
        ctx.metric(name, value)
        await turn()(ctx)

    return body


USER, SYSTEM = agentrl.user, agentrl.system
LOOK, SEE = (ToolSpec(name=name, description="", parameters={}) for name in ("look", "see"))
NEW = {"seat": "alice", "index": 1}

PAIRS = [
    Pair("turn: seat", turn("alice"), turn("bob")),
    Pair("turn: index", turn("alice"), turn("alice", 1)),
    Pair("turn: index of a new agent", turn("alice", 1), turn("alice", 2)),
    Pair("turn: seat of a new agent", turn("alice", 1), turn("bob", 1)),
    Pair("turn: order of seats", in_turn(turn("alice"), turn("bob")), in_turn(turn("bob"), turn("alice"))),
    Pair("turn: content", turn("alice", 0, USER("a")), turn("alice", 0, USER("b"))),
    Pair("turn: role", turn("alice", 0, USER("a")), turn("alice", 0, SYSTEM("a"))),
    Pair(
        "turn: name",
        turn("alice", 0, Message(role="tool", content="a", name="x")),
        turn("alice", 0, Message(role="tool", content="a", name="y")),
    ),
    Pair(
        "turn: tool call",
        turn("alice", 0, Message(role="tool", content="a", tool_call_id="x")),
        turn("alice", 0, Message(role="tool", content="a", tool_call_id="y")),
    ),
    Pair("turn: split of messages", turn("alice", 0, USER("ab"), USER("c")), turn("alice", 0, USER("a"), USER("bc"))),
    Pair("turn: number of messages", turn("alice", 0, USER("a")), turn("alice", 0, USER("a"), USER(""))),
    Pair("turn: max_tokens", turn(max_tokens=8), turn(max_tokens=9)),
    Pair("turn: state", turn(state="a"), turn(state="b")),
    Pair("turn: state or none", turn(), turn(state="")),
    Pair("turn: reply", turn(reply="a"), turn(reply="b")),
    Pair("turn: reply or sampled", turn(max_tokens=1), turn(reply="1")),
    Pair("turn: tools", turn(**NEW, tools=(LOOK,)), turn(**NEW, tools=(SEE,))),
    Pair("turn: restart", restarted(), restarted(restarts=False)),
    Pair("turn: messages of a restart", restarted(USER("a")), restarted(USER("b"))),
    Pair("gather: seats", gathered(turn("alice"), turn("bob")), gathered(turn("bob"), turn("alice")), "r/2.0#0"),
    Pair("gather: index", gathered(turn("alice", 1)), gathered(turn("alice", 2)), "r/2.0#0"),
    Pair(
        "gather: seat while another branch waits",
        gathered(in_turn(sleep(1), turn("alice")), in_turn(sleep(2), sleep(3))),
        gathered(in_turn(sleep(1), turn("bob")), in_turn(sleep(2), sleep(3))),
        "r/2.0#1",
    ),
    Pair("gather: seat of a reward", gathered(reward(seat="alice")), gathered(reward(seat="bob")), "r/2.0#0"),
    Pair("gather: number of branches", gathered(sleep(0)), gathered(sleep(0), in_turn())),
    Pair("reward: value", reward(1.0), reward(2.0)),
    Pair("reward: sign of zero", reward(0.0), reward(-0.0)),
    Pair("reward: seat", reward(seat="alice"), reward(seat="bob")),
    Pair("reward: index", in_turn(turn(**NEW), reward(**NEW)), in_turn(turn(**NEW), reward(seat="alice")), "r#3"),
    Pair("reward: turn or episode", reward(), reward(turn=0)),
    Pair("reward: turn", in_turn(turn(), reward(turn=0)), in_turn(turn(), reward(turn=1)), "r#3"),
    Pair("reward: name", reward(name="style"), reward(name="speed")),
    Pair("reward: name or none", reward(), reward(name="speed")),
    Pair("reward: order of names", reward({"a": 1.0, "b": 1.0}), reward({"b": 1.0, "a": 1.0})),
    Pair("reward: names swapped", reward({"a": 1.0, "b": 2.0}), reward({"a": 2.0, "b": 1.0})),
    Pair("gate: seat", gate(seat="alice"), gate(seat="bob")),
    Pair("gate: penalty", gate(penalty=-1.0), gate(penalty=-2.0)),
    Pair("gate: decision", gate(), gate(accepted=True)),
    Pair("tool: name", tool("look"), tool("see")),
    Pair("tool: argument", tool(arguments={"n": 1}), tool(arguments={"n": 2})),
    Pair("tool: 1 or 1.0", tool(arguments={"n": 1}), tool(arguments={"n": 1.0})),
    Pair("tool: 1 or True", tool(arguments={"n": 1}), tool(arguments={"n": True})),
    Pair("tool: order of arguments", tool(arguments={"a": 1, "b": 2}), tool(arguments={"b": 2, "a": 1})),
    Pair("tool: result", tool(result="seen"), tool(result="heard")),
    Pair("external tool: name", tool("look", external=True), tool("see", external=True)),
    Pair("external tool: argument", tool(arguments=[1], external=True), tool(arguments=[2], external=True)),
    Pair("effect: name", effect("buy"), effect("sell")),
    Pair("once effect: name", effect("buy", guarantee="once"), effect("sell", guarantee="once")),
    Pair("resource: which", resource(use=0), resource(use=1)),
    Pair("resource: method", resource("put"), resource("add")),
    Pair("resource: argument", resource("put", 1), resource("put", 2)),
    Pair("resource: number of arguments", resource("put", None), resource("put", [None])),
    Pair("resource: level", resource(level="replay"), resource(level="snapshot")),
    Pair("resource: seed", resource(seed=1), resource(seed=2)),
    Pair("resource: seed or none", resource(), resource(seed=0)),
    Pair("snapshot: method", resource("put", level="snapshot"), resource("add", level="snapshot")),
    Pair("snapshot: argument", resource("put", 1, level="snapshot"), resource("put", 2, level="snapshot")),
    Pair("snapshot: seed", resource(level="snapshot", seed=1), resource(level="snapshot", seed=2)),
    Pair("spawn: environment", spawn(), spawn(child=OtherChild)),
    Pair("spawn: number", spawn(), spawn(n=3)),
    Pair("spawn: task", spawn({"q": 1}), spawn({"q": 2})),
    Pair("spawn: task's id", spawn(agentrl.Task(id="a", data={"q": 1})), spawn(agentrl.Task(id="b", data={"q": 1}))),
    Pair("child: which", spawn(order=(0, 1)), spawn(order=(1, 0)), "r#3"),
    Pair("remember: key", remember("a"), remember("b")),
    Pair("remember: structure", remember(structure="a"), remember(structure="b")),
    Pair("kind: now or sleep", now, sleep(0)),
    Pair("kind: effect or tool", effect("look"), tool("look")),
    Pair("kind: turn or effect", turn(), effect()),
    Pair("kind: reward or turn", reward(), turn()),
    Pair("missing call", in_turn(effect(), now), in_turn(now)),
    Pair("new call", effect(), in_turn(now, effect())),
    Pair("order of calls", in_turn(effect("a"), effect("b")), in_turn(effect("b"), effect("a"))),
]

BY_DESIGN = [
    Pair("sleep: length (a wait that is over is not repeated)", sleep(1.0), sleep(2.0)),
    Pair("effect: guarantee (it matters while the effect is performed)", effect(), effect(guarantee="read")),
    Pair("tool: external (a recorded result counts either way)", tool(), tool(external=True)),
    Pair("tool: time limit (the same)", tool(timeout_s=1.0), tool(timeout_s=2.0)),
    Pair("patched: name (an unknown one takes the old path)", in_turn(turn()), patched("b")),
    Pair("metric (counted by the code that runs, not by the journal)", metric("a", 1.0), metric("b", 2.0)),
]
"""Fields that no replay compares, with the reason."""
