"""Tools: typed methods a policy may call, and the environment that offers them.

A tool's arguments are validated against its annotations before it runs; wrong arguments, an unknown name, an exception
or a timeout become an observation the policy can learn from. Sync tools run in the event loop (they should only touch
`self`); with `external=True` they run in a thread, are never repeated on re-execution, and can time out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import reprlib
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

from pydantic import BaseModel
from pydantic_core import to_json

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import Message, Task, ToolCall, ToolSpec, Turn
from agentrl.core.reply_formats import describe_malformed_call
from agentrl.environment.context import (
    EpisodeContext,
    EpisodeSandbox,
    Guarantee,
    InvalidToolCallError,
    LimitReachedError,
    ResourceLevel,
    user,
)
from agentrl.environment.environment import Environment
from agentrl.environment.rewards import awaited_reward
from agentrl.environment.tool_arguments import ToolArguments, read_arguments
from agentrl.gateway.calls import RequestRefusedError, order_tool_results
from agentrl.gateway.chat_completions import assistant_names, parse_messages
from agentrl.sandbox.sandbox import Sandbox, read_sources

Method = TypeVar(
    "Method",
    bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any] | functools.partialmethod[Any]",
)

MAX_OBSERVATION_CHARACTERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The arguments of `@tool(...)`."""

    external: bool = False
    timeout_s: float | None = None
    guarantee: Guarantee = "idempotent"


@overload
def tool(method: Method, /) -> Method: ...
@overload
def tool(
    *, external: bool = False, timeout_s: float | None = None, guarantee: Guarantee = "idempotent"
) -> Callable[[Method], Method]: ...
def tool(
    method: Method | None = None,
    /,
    *,
    external: bool = False,
    timeout_s: float | None = None,
    guarantee: Guarantee = "idempotent",
) -> Method | Callable[[Method], Method]:
    """Offer a method of a `ToolEnvironment` to the policy.

    Args:
        method: every parameter annotated; the first paragraph of its docstring describes the tool, and the lines under
            `Args:` its parameters.
        external: whether the tool acts outside `self`; its calls are then journaled and never repeated.
        timeout_s: time limit of a call in seconds; a longer call becomes a timeout observation. Default:
            30 s. Only for tools that are external or `async def`: nothing can end a plain
            method, which runs in the event loop.
        guarantee: whether a call of an external tool may be repeated after a crash; see `ctx.effect`.
    """
    options = ToolOptions(external=external, timeout_s=timeout_s, guarantee=guarantee)

    def mark(function: Method) -> Method:
        is_async = inspect.iscoroutinefunction(_layers(function)[-1])
        if timeout_s is not None and not (timeout_s > 0 and (external or is_async)):
            remedy = (
                "a number above 0"
                if not timeout_s > 0
                else "external=True, or `async def`: nothing can end a plain call"
            )
            raise EnvironmentDefinitionError(
                f"tool {getattr(function, '__qualname__', function)}: @tool(timeout_s={timeout_s!r}) needs {remedy}"
            )
        try:
            function.__agentrl_tool__ = options  # type: ignore[union-attr]
        except AttributeError:
            raise EnvironmentDefinitionError(f"@agentrl.tool cannot mark {function!r}; mark a method") from None
        return function

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTool:
    """A tool of a class: its spec, its arguments and its options."""

    spec: ToolSpec
    options: ToolOptions
    arguments: ToolArguments
    is_async: bool

    def validate(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return the values of all parameters by name; raises as `ToolArguments.validate`."""
        return self.arguments.validate(arguments)


_INSTANCE = object()
"""Stands for an instance while a method is bound."""


def bind_tools(owner: type, names: Sequence[str] | None = None) -> dict[str, BoundTool]:
    """Return the tools of a class by name: methods marked with `@tool`, or the methods in `names`, which are described
    by their whole docstrings.

    A method that overrides a tool is one.

    Raises:
        EnvironmentDefinitionError: a tool lacks type annotations, cannot be called, or hides an attribute of the class.
    """
    tools: dict[str, BoundTool] = {}
    for name in dir(owner) if names is None else sorted(names):
        attributes = [base.__dict__[name] for base in owner.__mro__ if name in base.__dict__]
        marks = (_mark(function) for part in attributes for function in _layers(part))
        options = next(filter(None, marks), ToolOptions() if names is not None else None)
        where = f"{owner.__name__}.{name}"
        if attributes and options is None and _hides_mark(name, attributes[0]):
            raise EnvironmentDefinitionError(
                f"tool {where}: the decorator above @agentrl.tool hides it; put @agentrl.tool on top"
            )
        if not attributes or options is None or attributes[0] is None:
            continue
        for base in owner.__mro__:
            is_taken = name in base.__dict__ and not _is_marked(base.__dict__[name])
            if base.__module__.startswith("agentrl.") and (is_taken or name in inspect.get_annotations(base)):
                raise EnvironmentDefinitionError(
                    f"tool {where}: `self.{name}` belongs to {base.__name__}; give the tool another name"
                )
        if not _takes_self(attributes[0]):
            raise EnvironmentDefinitionError(
                f"tool {where}: `self` is missing; make it its first parameter, or put @staticmethod above the function"
            )
        bind = getattr(type(attributes[0]), "__get__", None)
        bound = attributes[0] if bind is None else bind(attributes[0], _INSTANCE, owner)
        if not callable(bound):
            raise EnvironmentDefinitionError(f"tool {where}: {bound!r} cannot be called; mark a method")
        arguments = read_arguments(where, bound, owner, inspect.getdoc(_layers(bound)[-1]) or "")
        description = arguments.description
        if names is None:
            description = description.split("\n\n")[0].replace("\n", " ")
        tools[name] = BoundTool(
            spec=ToolSpec(name=name, description=description, parameters=arguments.schema),
            options=options,
            arguments=arguments,
            is_async=inspect.iscoroutinefunction(bound) or inspect.iscoroutinefunction(type(bound).__call__),
        )
    return tools


def _takes_self(attribute: Any) -> bool:
    """Whether a function of a class has a parameter for the instance; True for what is no function. Its name is free,
    but no such parameter has an annotation."""
    if not inspect.isfunction(attribute):
        return True
    try:
        first = next(iter(inspect.signature(attribute).parameters.values()), None)
    except (ValueError, TypeError):  # raised for what cannot be read; `read_arguments` reports it
        return True
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return False
    return first.name == "self" or first.annotation is first.empty


def _layers(function: Any) -> list[Any]:
    """Return a static, class, bound or partial method, and what it wraps."""
    layers = [function]
    while True:
        if isinstance(function, staticmethod | classmethod | MethodType):
            function = function.__func__
        elif isinstance(function, functools.partial | functools.partialmethod):
            function = function.func
        else:
            return layers
        layers.append(function)


def _is_marked(attribute: Any) -> bool:
    return any(_mark(layer) is not None for layer in _layers(attribute))


def _mark(function: Any) -> ToolOptions | None:
    mark = getattr(function, "__agentrl_tool__", None)
    return mark if isinstance(mark, ToolOptions) else None  # a proxy has attributes of every name


def _hides_mark(name: str, attribute: Any) -> bool:
    """Whether a function wraps a tool of the same name, as a decorator without `functools.wraps` does."""
    function = _layers(attribute)[-1]
    for cell in (inspect.isfunction(function) and function.__closure__) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if _is_marked(cell.cell_contents) and getattr(cell.cell_contents, "__name__", None) == name:
                return True
    return False


def tools_without_seat(environment: type[Environment]) -> list[str]:
    """Return the names of `@tool` methods if no code that `run` reaches passes `tools=`, as `ToolEnvironment.run` does;
    else none."""
    names = [name for name in dir(environment) if _is_marked(inspect.getattr_static(environment, name))]
    return names if names and not _passes_tools(environment) else []


def _passes_tools(environment: type[Environment]) -> bool:
    """Whether a function reachable from `run`, by the names in its code, has a keyword argument or a text `tools`."""
    classes = environment.__mro__
    pending: list[Any] = [base.__dict__["run"] for base in classes if "run" in base.__dict__][:1]
    reached: set[int] = set()
    while pending:
        function = _layers(pending.pop())[-1]
        if not inspect.isfunction(function) or id(function) in reached:
            continue
        reached.add(id(function))
        codes = [function.__code__]
        for code in codes:
            codes += filter(inspect.iscode, code.co_consts)
            if any(const == "tools" or (isinstance(const, tuple) and "tools" in const) for const in code.co_consts):
                return True
        names = {name for code in codes for name in code.co_names}
        # Methods of any class in the hierarchy, since the code may call `super()`.
        pending += [base.__dict__[name] for name in names for base in classes if name in base.__dict__]
        named_globals = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in named_globals if inspect.ismodule(value)]
        helpers = named_globals + [vars(module)[name] for module in modules for name in names if name in vars(module)]
        pending += [helper for helper in helpers if not str(getattr(helper, "__module__", "")).startswith("agentrl.")]
        for cell in function.__closure__ or ():  # the function that a decorator wraps
            with contextlib.suppress(ValueError):  # an empty cell
                pending.append(cell.cell_contents)
    return False


def observation_of(value: Any, where: str) -> str:
    """Convert a tool's result to the policy's observation: strings unchanged, anything else as JSON.

    A result whose JSON is a string, such as a date, an enumeration of texts or a path, is shown without quotes. Numbers
    that are not finite are written as Python does, `NaN`, since `null` would say that there is no number.

    Raises:
        EpisodeError: the result is neither a string nor JSON-serializable.
    """
    if isinstance(value, str):
        return value[:MAX_OBSERVATION_CHARACTERS]
    try:
        text = _json(_ordered(value)).decode()
        return (json.loads(text) if text.startswith('"') else text)[:MAX_OBSERVATION_CHARACTERS]
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(
            f"tool {where} returned {type(value).__name__}, which is not JSON ({error}); return a str or JSON data",
            reason="environment_error",
        ) from error


class _SortedIteration:
    """Makes a set iterate in the order of its members' JSON."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=_json))  # type: ignore[misc]


class _SortedSet(_SortedIteration, set[Any]):
    pass


class _SortedFrozenSet(_SortedIteration, frozenset[Any]):
    pass


def _ordered(value: Any) -> Any:
    """Sort the sets in a result: their order differs between processes, and a resumed episode may run in another.

    They stay sets, since a model's field would warn of a list.
    """
    match value:
        case str() | bool() | int() | float() | None:
            return value
        case set():
            return _SortedSet(map(_ordered, value))
        case frozenset():
            return _SortedFrozenSet(map(_ordered, value))
        case dict():
            return {key: _ordered(item) for key, item in value.items()}
        case list():
            return [_ordered(item) for item in value]
        case tuple():
            return tuple(_ordered(item) for item in value)
        case deque():
            return deque(_ordered(item) for item in value)
        case BaseModel():
            fields = {name: item for name, item in vars(value).items() if name in type(value).model_fields}
            items = fields | (value.__pydantic_extra__ or {})
            return value.model_copy(update={name: _ordered(item) for name, item in items.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Enum):  # JSON has the value of an enum
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _ordered(getattr(value, field.name)))
        return copied
    return value


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants", fallback=_plain)


def _plain(value: Any) -> Any:
    """Return the numbers and texts of an array, or of a scalar of numpy or torch."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"it has a value of type {type(value).__name__}")
    return value.tolist()


class ToolConnection(Protocol):
    """The connection of one episode to a `ToolServer`."""

    has_recalled: bool
    """Whether the result of a call was recalled instead of made, so that the server lacks its effect; set from
    outside."""

    async def listed(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool, as of `ToolSpec`."""
        ...

    def validate(self, tool: ToolSpec, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return a call's arguments by name, or raise `ValueError` with an observation for the policy."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; an error is an observation for the policy, an `EpisodeError` the episode's end."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


@runtime_checkable
class ToolServer(Protocol):
    """A server whose tools an episode may call, such as `agentrl_mcp.MCPServer`."""

    @property
    def name(self) -> str:
        """The server's name in messages."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """Time limit of a call in seconds; None: 30."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """Whether a call may be repeated if the process died during it; see `ctx.effect`."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether calls depend on earlier calls of the episode."""
        ...

    @property
    def level(self) -> ResourceLevel:
        """How the server is recalled; see `ctx.resource`."""
        ...

    def connect(self) -> ToolConnection:
        """Return the connection of one episode; it opens at the first use."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool of a server."""

    spec: ToolSpec
    server: ToolServer
    connection: ToolConnection

    @property
    def is_async(self) -> bool:
        """Whether its calls may run together: they do not depend on each other."""
        return not self.server.stateful

    def validate(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        return self.connection.validate(self.spec, arguments)


async def run_tools(
    ctx: EpisodeContext, instance: object, tools: Mapping[str, BoundTool | ServerTool], calls: Sequence[ToolCall]
) -> list[Message]:
    """Answer the tool calls of a turn with tool messages, in their order.

    Asynchronous tools run together, after the others, which run one after another. The tools of an environment with a
    sandbox share its files, and a stateful server remembers earlier calls, so theirs do not.
    """
    if len(calls) < 2:
        return [await run_tool(ctx, instance, tools, call) for call in calls]
    together: list[int] = []
    if getattr(instance, "sandbox", None) is None:
        together = [n for n, call in enumerate(calls) if call.name in tools and tools[call.name].is_async]
    if len(together) < 2:
        together = []
    messages: list[Message | None] = [None] * len(calls)
    for n, call in enumerate(calls):
        if n not in together:
            messages[n] = await run_tool(ctx, instance, tools, call)
    if together:
        answers = await ctx.gather(*(run_tool(ctx, instance, tools, calls[n]) for n in together))
        for n, answer in zip(together, answers, strict=True):
            messages[n] = answer
    return [message for message in messages if message is not None]


async def run_tool(
    ctx: EpisodeContext, instance: object, tools: Mapping[str, BoundTool | ServerTool], call: ToolCall
) -> Message:
    """Answer one tool call with a tool message. Mistakes of the policy become observations."""
    if call.problem:
        return await _refuse(ctx, call, InvalidToolCallError(call.problem, outcome="bad_arguments"))
    bound = tools.get(call.name)
    if bound is None and not call.name and isinstance(call.arguments, str):
        return await _refuse(
            ctx, call, InvalidToolCallError(describe_malformed_call(call.arguments), outcome="bad_arguments")
        )
    if bound is None:
        return await _refuse(
            ctx, call, InvalidToolCallError(f"no tool {call.name!r}; tools: {', '.join(tools)}", outcome="unknown_tool")
        )
    try:
        arguments = bound.validate(call.arguments)
    except ValueError as error:
        return await _refuse(ctx, call, InvalidToolCallError(str(error), outcome="bad_arguments"))
    if isinstance(bound, ServerTool):
        return await _run_server_tool(ctx, bound, call, arguments)
    method, where = getattr(instance, call.name), f"{type(instance).__qualname__}.{call.name}"

    async def observed(result: Awaitable[Any]) -> str:
        return observation_of(await result, where)

    def invoke() -> str | Awaitable[str]:
        result = bound.arguments.call(method, arguments)
        is_plain = type(result) in (str, int, float, bool, dict, list) or not inspect.isawaitable(result)
        return observation_of(result, where) if is_plain else observed(result)

    async def invoke_async() -> str:
        return observation_of(await bound.arguments.call(method, arguments), where)

    text = await ctx.call_tool(
        call.name,
        call.arguments,
        invoke_async if bound.is_async else invoke,
        external=bound.options.external,
        timeout_s=bound.options.timeout_s,
        guarantee=bound.options.guarantee,
    )
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


async def _run_server_tool(
    ctx: EpisodeContext, tool: ServerTool, call: ToolCall, arguments: Mapping[str, Any]
) -> Message:
    """Call a server's tool, or recall its recorded result."""
    connection, is_called = tool.connection, False

    async def invoke() -> str:
        nonlocal is_called
        is_called = True
        return await connection.call(call.name, arguments)

    server = tool.server
    text = await ctx.call_tool(
        call.name,
        call.arguments,
        invoke,
        external=True,
        timeout_s=server.timeout_s,
        guarantee=server.guarantee,
        may_repeat=True,
    )
    connection.has_recalled |= not is_called
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


async def _refuse(ctx: EpisodeContext, call: ToolCall, error: InvalidToolCallError) -> Message:
    """Journal a call that fits no tool; the policy gets the reason."""

    def refuse() -> str:
        raise error

    text = await ctx.call_tool(call.name, call.arguments, refuse, external=False, timeout_s=None)
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEpisode:
    """A finished conversation, passed to `reward`."""

    turns: Sequence[Turn]
    messages: Sequence[Message]
    truncated: bool
    """Whether a limit ended the episode before the policy answered, `sampling.max_tokens` included."""

    @property
    def answer(self) -> str:
        """Text of the last turn if it called no tool and was not cut; else ""."""
        if not self.turns or self.turns[-1].tool_calls or self.turns[-1].is_cut:
            return ""
        return self.turns[-1].text


def prompt_messages(environment: type, prompt: object) -> list[Message]:
    """Return what `prompt` returned as messages."""
    if isinstance(prompt, str):
        return [user(prompt)]
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(message, Message) for message in prompt):
        return list(prompt)
    raise EnvironmentDefinitionError(
        f"{environment.__name__}.prompt returned {reprlib.repr(prompt)}; return a string, or a list of messages, such "
        "as [agentrl.system('…'), agentrl.user('…')]"
    )


_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name"}
"""Keys of a message in a data set; others, such as audio, would be lost."""


def read_messages(value: Any, where: str) -> list[Message]:
    """Read messages of a data set in OpenAI's form.

    Args:
        value: a list of objects with `role` and `content`.
        where: names their place in messages of errors.

    Raises:
        EnvironmentDefinitionError: they are malformed, contain more than text, or end with the assistant.
    """
    try:
        messages = parse_messages(value)
        if any(message.tool_call_id for message in messages):  # many data sets have no ids
            messages = order_tool_results(messages, "messages")
    except RequestRefusedError as error:
        raise EnvironmentDefinitionError(f"{where}: {error}") from None
    if messages[-1].role == "assistant":
        raise EnvironmentDefinitionError(
            f"{where}: messages: a reply of the assistant cannot be continued; end with another role"
        )
    if names := assistant_names(value):
        raise EnvironmentDefinitionError(
            f"{where}: the assistant's messages have several names ({', '.join(names)}), and the policy would take all "
            "of them for its own; give other speakers the role user"
        )
    for number, message in enumerate(value):
        for key in sorted(message.keys() - _MESSAGE_KEYS):
            if message[key] is not None:  # a column of another row
                raise EnvironmentDefinitionError(f"{where}: messages[{number}].{key} is not supported; remove it")
    return messages


class ToolEnvironment(Environment):
    """An environment in which one agent solves a task with the class's `@tool` methods; a turn without a tool call is
    the answer. A turn that a limit on tokens cuts is neither: it ends the episode as truncated."""

    task: Task
    """The episode's task, for tools; `run` sets it."""

    # --- override these ---------------------------------------------------------------------------------------------

    mcp_servers: ClassVar[Sequence[ToolServer]] = ()
    """Servers whose tools the policy may call too; their names must differ from those of the class's own."""

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """Return the first user message, or all messages before the first turn: a system message, worked examples.

        Raises:
            EnvironmentDefinitionError: the task has no `question`, or it is neither text, a number nor messages.
        """
        if "question" not in task.data:
            has = ", ".join(map(repr, task.data)) or "nothing"
            raise EnvironmentDefinitionError(
                f"task {task.id!r} has no 'question' in its data (it has {has}): give it one, or override prompt(task)"
            )
        question = task.data["question"]
        if isinstance(question, str | int | float) and not isinstance(question, bool):
            return str(question)
        return read_messages(question, f"task {task.id!r}: question")

    sandbox: Sandbox | None = None
    """Limits of the episode's sandbox, `self.box`; None: there is none. A `run` that calls this class's may set it
    before, from the task."""

    def files(self, task: Task) -> Mapping[str, str | bytes | Path]:
        """Return what lies in the sandbox at the start: contents by absolute path. A `Path` is a file or a directory of
        this machine; links that leave the directory are refused."""
        return {}

    async def between_turns(self, ctx: EpisodeContext) -> None:
        """Act after the tools of a turn have answered, before the next turn: the place for `ctx.branch`."""

    def anchor_state(self) -> str | None:
        """Return the environment's state before a turn, as text, for advantages that compare turns in equal states; see
        `Agent.act`. None: the messages since the agent's last turn."""
        return None

    @abstractmethod
    def reward(
        self, task: Task, episode: ToolEpisode
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]:
        """Return a finite reward for the whole episode, or named rewards, which `credit.reward_weights` weights. It may
        be `async`, to run tests in a copy of the sandbox."""

    # --- machinery --------------------------------------------------------------------------------------------------

    _tools: ClassVar[dict[str, BoundTool] | None] = None
    _box: EpisodeSandbox | None = None

    @property
    def box(self) -> EpisodeSandbox:
        """The episode's sandbox.

        Raises:
            EpisodeError: the class has none.
        """
        if self._box is None:
            raise EpisodeError(
                f"{type(self).__qualname__} has no sandbox; write `sandbox = agentrl.Sandbox()` in the class",
                reason="environment_error",
            )
        return self._box

    @classmethod
    def tool_table(cls) -> dict[str, BoundTool]:
        """The class's tools by name.

        Raises:
            EnvironmentDefinitionError: a tool lacks type annotations, or hides `self.task`.
        """
        if "_tools" not in cls.__dict__ or cls._tools is None:
            cls._tools = bind_tools(cls)
        return cls._tools

    async def run(self, ctx: EpisodeContext) -> None:
        """Act and answer tool calls until the policy answers in plain text or a limit is reached."""
        truncated = False
        self.task = ctx.task
        if self.sandbox is not None:
            self._box = ctx.sandbox(self.sandbox)
            if files := self.files(ctx.task):
                await self._box.write(read_sources(files))
        connections = [(server, server.connect()) for server in self.mcp_servers]
        try:
            tools = await self._all_tools(ctx, connections)
            agent = ctx.agent(self.seats[0], tools=tuple(bound.spec for bound in tools.values()))
            observations = prompt_messages(type(self), self.prompt(ctx.task))
            try:
                while observations:
                    turn = await agent.act(*observations, state=self.anchor_state())
                    truncated = turn.is_cut
                    observations = await run_tools(ctx, self, tools, () if truncated else turn.message.tool_calls)
                    if observations:
                        await self.between_turns(ctx)
            except LimitReachedError as limit:
                ctx.truncate(limit)
                truncated = True
        finally:
            for _, connection in connections:
                await connection.close()
        value = self.reward(ctx.task, ToolEpisode(turns=agent.turns, messages=agent.messages, truncated=truncated))
        agent.reward(await awaited_reward(type(self), value))

    async def _all_tools(
        self, ctx: EpisodeContext, connections: Sequence[tuple[ToolServer, ToolConnection]]
    ) -> Mapping[str, BoundTool | ServerTool]:
        """The tools of the class and its servers."""
        if not connections:
            return self.tool_table()
        tools: dict[str, BoundTool | ServerTool] = dict(self.tool_table())
        for server, connection in connections:
            descriptions: list[dict[str, Any]] = await ctx.effect("list MCP tools", connection.listed, guarantee="read")
            for spec in [ToolSpec(**description) for description in descriptions]:
                if spec.name in tools:
                    raise EpisodeError(
                        f"MCP server {server.name!r}: another tool is already called {spec.name!r}; select the "
                        "server's tools with MCPServer(tools=[…])",
                        reason="environment_error",
                    )
                tools[spec.name] = ServerTool(spec=spec, server=server, connection=connection)
        return tools
