"""A model directory's chat template as a function, and the text of messages made safe to put through it.

Owns the reading of `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`; rendering in jinja2's
immutable sandbox with the helpers that templates expect; `ControlTokens`, which splits rendered text into control
tokens and plain text. Does not tokenise plain text.

Invariant: a control token's literal inside a message (such as `<|im_end|>` in a tool's output) survives rendering as
plain text: it is escaped with private-use characters before rendering, and restored after the frame is split.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jinja2 import TemplateError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import (
    CallBlock,
    Compare,
    Concat,
    Const,
    Dict,
    ExprStmt,
    Filter,
    For,
    Getitem,
    List,
    Macro,
    Node,
    Output,
    Slice,
    Template,
    TemplateData,
    Tuple,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from agentrl.core.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2.parser import Parser

    from agentrl.core.records import Message, ToolSpec

TEMPLATE_DATE = datetime(2026, 1, 1, tzinfo=UTC)
"""Date that `strftime_now` returns to a template: a constant, so that a prompt does not depend on the day."""

_ESCAPE, _END = "\ue000", "\ue001"
PROBE = f"{_ESCAPE}p{_END}"
"""Placeholder of a message's content in a rendered frame; escaped content cannot contain it."""


MAX_STEPS = 100_000
"""Maximum number of loop rounds and calls in one rendering; a template that takes more is refused."""
NODES_PER_STEP = 256
"""Number of syntax nodes in a loop or macro that costs one more step per round or call."""
MAX_TEMPLATE_CHARACTERS = 1 << 17
MIN_BUILT_BYTES, BUILT_PER_GIVEN = 64 << 20, 8
"""Bytes that one rendering may build, including intermediate values: a minimum, and further bytes for each byte of the
conversation."""
READ_PER_BUILT = 4
"""Bytes that comparisons, searches and sorts may read, per byte that a rendering may build."""
_MAX_OPERAND = 1_000_000
"""Maximum number of items in a repeated sequence."""
_MAX_BITS = 4096
"""Maximum size of an integer in bits."""
_MAX_INDENT = 16
_MAX_SEPARATOR = 8
_MAX_DATE_FORMAT = 256
_MAX_DIGITS = 20
_CHARACTER_BYTES = 4
_ITEM_BYTES = 80
"""Bytes of a reference in a container, with the small object it refers to."""
_ESCAPED_BYTES = 6
"""Largest factor by which escaping lengthens a text."""
_SHOWN_BYTES = 40
"""Bytes per character of a text inside a container when it is printed: `\\U000e0001`, beside characters of four
bytes.
"""
_ITEM_FILTERS = frozenset(
    {"count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max", "min"}
    | {"reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique"}
)
"""Filters of jinja2 whose result has at most as many items as their input."""
_TEXT_FILTERS = frozenset(
    {"abs", "capitalize", "e", "escape", "float", "forceescape", "indent", "int", "join", "lower", "replace", "round"}
    | {"safe", "string", "title", "tojson", "trim", "truncate", "upper", "urlencode"}
)
_SORTING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_COMPARISONS = 32
"""Number of comparisons of one item with others in a sort."""
_CONTAINER_METHODS = frozenset({"copy", "count", "fromkeys", "get", "index", "items", "keys", "values"})
_COMPARING_TESTS = frozenset(
    {"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower"}
    | {"lt", "ne", "upper"}
)
_STRING_METHODS = frozenset(
    {"capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"}
    | {"isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip"}
    | {"partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit"}
    | {"rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"}
)
_MAX_TOKEN_ID = 2**31 - 1


class AddedToken(NamedTuple):
    """A token that the tokenizer matches in text before anything else."""

    token_id: int
    literal: str
    special: bool
    strips_left: bool
    strips_right: bool


class GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, with which some templates mark assistant text; rendered as its
    body."""

    tags = {"generation"}  # noqa: RUF012 - so declared by jinja2

    def parse(self, parser: Parser) -> Node:
        """Return the body, unchanged."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT:
        raise SecurityError("strftime_now accepts only a short format")
    return TEMPLATE_DATE.strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounds on the work and the memory of one rendering.

    Loop rounds and calls count against `MAX_STEPS`. Every value that an operation builds is charged in bytes, before it
    is built if it can be larger than its inputs, so memory stays bounded. Comparisons, searches, sorts and hashes are
    also charged in advance, so no single operation takes long. Filters and string methods without a known bound are
    removed.

    Raises:
        SecurityError: a bound is exceeded during rendering, or the template uses a removed name.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self._steps = self._budget = self._readable = 0
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            if name in _ITEM_FILTERS | _TEXT_FILTERS:
                self.filters[name] = _charging(self, name, function)
            else:
                del self.filters[name]
        for name in _COMPARING_TESTS:
            self.tests[name] = _reading(self, name, self.tests[name])
        self.filters["agentrl_counted"] = self.counted
        self.filters["agentrl_weighed"] = pass_context(lambda _context, steps: self._count_step(steps))
        self.filters["agentrl_read"] = pass_context(lambda _context, value: self.read(value))
        self.filters["agentrl_built"] = pass_context(lambda _context, value: self.built(value))
        self.filters["agentrl_joined"] = pass_context(lambda _context, parts: self._joined(parts))
        self.filters["agentrl_written"] = pass_context(lambda _context, value: self.text(value))
        del self.globals["lipsum"]

    def begin(self, given: Any) -> None:
        """Start a rendering of `given`, a JSON value."""
        self._steps = 0
        self._budget = sys.maxsize
        self._budget = MIN_BUILT_BYTES + BUILT_PER_GIVEN * self.size(given)
        self._readable = READ_PER_BUILT * self._budget

    def charge(self, size: int) -> None:
        """Charge `size` bytes to this rendering's budget for built values."""
        self._budget -= size
        if self._budget < 0:
            raise SecurityError("it builds more text than any conversation needs")

    def read(self, value: Any, times: int = 1) -> Any:
        """Return `value`, which will be searched, and charge its size to this rendering's budget for reading."""
        self._readable -= times * self.size(value, self._readable // times)
        if self._readable < 0:
            raise SecurityError("it compares and searches more than any conversation needs")
        return value

    def size(self, value: Any, most: int | None = None) -> int:
        """Return an upper bound on the bytes of a value as text; stops counting above `most`, or above the rendering's
        budget."""
        if isinstance(value, str):
            return _bytes(value)
        most = self._budget if most is None else most
        total, waiting = 0, [value]
        while waiting and total <= most:
            item = waiting.pop()
            if isinstance(item, str):
                total += _ITEM_BYTES + _SHOWN_BYTES * len(item)
            elif isinstance(item, int | float | None):
                total += _ITEM_BYTES + _bits(item)
            elif isinstance(item, Namespace):
                waiting.append(item._Namespace__attrs)  # a namespace is printed with all its attributes
                total += _ITEM_BYTES
            elif isinstance(item, Mapping):
                total += _ITEM_BYTES
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, Collection):
                total += _ITEM_BYTES
                waiting += item
            else:
                total += _ITEM_BYTES
        return total

    # --- what compiled templates call -------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise SecurityError(f"it is longer than {MAX_TEMPLATE_CHARACTERS} characters")
        return _Charged().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count_step()
            yield item

    def _count_step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} loop rounds and calls")

    def built(self, value: Any) -> Any:
        if _bits(value) > _MAX_BITS:
            raise SecurityError(f"an integer has more than {_MAX_BITS} bits")
        # Hashing a tuple visits everything in it.
        self.charge(self.size(value) if isinstance(value, tuple) else _shallow_bytes(value))
        if isinstance(value, dict):
            self.read([key for key in value if isinstance(key, tuple)])
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.read(argument) if isinstance(argument, tuple) else argument)

    def _joined(self, parts: Sequence[Any]) -> str:
        return "".join(map(self.text, parts))

    def text(self, value: Any) -> str:
        self.charge(self.size(value))
        return str(value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._count_step()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # jinja2 wraps str.format
        self.charge(_ITEM_BYTES * (len(args) + len(kwargs)))
        if isinstance(owner, str):
            self._charge_method(function.__name__, owner, args, kwargs)
        elif isinstance(owner, int | float | complex | bytes | Collection | type):
            if isinstance(owner, range) or function.__name__ not in _CONTAINER_METHODS:
                raise SecurityError(f"the method {function.__name__} is not available in a chat template")
            self.read([owner if function.__name__ in ("count", "index") else None, *args])
        elif owner is not None or isinstance(function, type):
            self.read(args)
        return self.built(super().call(context, function, *args, **kwargs))

    def _charge_method(self, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name not in _STRING_METHODS:
            raise SecurityError(f"str.{name} is not available in a chat template")
        given = (*args, *kwargs.values())
        if hasattr(text, "__html__"):  # Markup escapes its arguments
            self.charge(_ESCAPED_BYTES * (self.size(text) + self.size(given)))
        if name == "replace":
            self.charge_replaced(text, *given)
        elif name in ("split", "rsplit", "splitlines"):
            separator = given[0] if given and isinstance(given[0], str) and given[0] else ""
            count = text.count(separator) if separator else len(text) // 2
            self.charge(_bytes(text) + _ITEM_BYTES * (1 + count))
        elif name == "join":
            items = given[0] if given and isinstance(given[0], list | tuple | str | Mapping) else ()
            self.charge(self.size(list(items)) + _bytes(text) * len(items))
            if given and not isinstance(given[0], list | tuple | str | Mapping):
                raise SecurityError("str.join takes a list in a chat template; write `… | list` before it")
        elif name in ("ljust", "rjust", "center", "zfill"):
            self.charge(_bytes(text) + sum(_CHARACTER_BYTES * width for width in given if isinstance(width, int)))
        else:
            self.charge(2 * _bytes(text))

    def charge_replaced(self, text: str, old: Any = "", new: Any = "", *_rest: Any) -> None:
        """Charge `text.replace(old, new)`."""
        found = text.count(old) if isinstance(old, str) else len(text)
        self.charge(_bytes(text) + _CHARACTER_BYTES * found * len(self.text(new)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text cannot be formatted with % in a chat template; join it with ~")
        bits = 0
        if operator == "**":
            bits = _bits(left) * right if isinstance(right, int) else 0
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            bits = _bits(left) + _bits(right)
        size = 0
        if operator == "*":
            size = max(_repeated(left, right), _repeated(right, left))
        if hasattr(left, "__html__") or hasattr(right, "__html__"):  # Markup escapes the other operand
            self.charge(_ESCAPED_BYTES * (self.size(left) + self.size(right)))
        if size > _MAX_OPERAND or max(bits, _bits(left), _bits(right)) > _MAX_BITS:
            raise SecurityError(f"the result of {operator} is too large")
        self.charge(_CHARACTER_BYTES * size)
        return self.built(super().call_binop(context, operator, left, right))

    def call_unop(self, context: Any, operator: str, arg: Any) -> Any:
        return self.built(super().call_unop(context, operator, self.built(arg)))


class _Charged(NodeTransformer):
    """Wraps the expressions of a parsed template that build, count or compare without a call, a filter or an arithmetic
    operator."""

    def visit_For(self, node: For) -> Node:
        self.generic_visit(node)
        node.iter = _through("agentrl_counted", node.iter)
        return _weighed(node)

    def visit_Macro(self, node: Macro) -> Node:
        self.generic_visit(node)
        return _weighed(node)

    def visit_CallBlock(self, node: CallBlock) -> Node:
        self.generic_visit(node)
        return _weighed(node)

    def visit_Const(self, node: Const) -> Node:
        if _bits(node.value) > _MAX_BITS:
            raise SecurityError(f"an integer has more than {_MAX_BITS} bits")
        return node

    def visit_Tuple(self, node: Tuple) -> Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node) else _through("agentrl_built", node)

    def visit_Compare(self, node: Compare) -> Node:
        self.generic_visit(node)
        for operand in node.ops:
            whole, searched = _is_constant(operand.expr), operand.op in ("in", "notin")
            if not whole and (searched or not _is_constant(node.expr)):
                operand.expr = _through("agentrl_read", operand.expr)
        if not _is_constant(node.expr) and not all(_is_constant(operand.expr) for operand in node.ops):
            node.expr = _through("agentrl_read", node.expr)
        return node

    def visit_Concat(self, node: Concat) -> Node:
        self.generic_visit(node)
        return _through("agentrl_joined", List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: List) -> Node:
        self.generic_visit(node)
        return _through("agentrl_built", node)

    def visit_Dict(self, node: Dict) -> Node:
        self.generic_visit(node)
        return _through("agentrl_built", node)

    def visit_Getitem(self, node: Getitem) -> Node:
        self.generic_visit(node)
        return _through("agentrl_built", node) if isinstance(node.arg, Slice) else node

    def visit_Output(self, node: Output) -> Node:
        self.generic_visit(node)
        node.nodes = [
            _through(
                "agentrl_written", Const(part.data, lineno=part.lineno) if isinstance(part, TemplateData) else part
            )
            for part in node.nodes
        ]
        return node


def _is_constant(node: Any) -> bool:
    return isinstance(node, Const) or (isinstance(node, List | Tuple) and all(map(_is_constant, node.items)))


def _weighed(node: Any) -> Node:
    """Wrap a loop, macro or block so that its steps count its content."""
    steps = sum(1 for _ in node.find_all(Node)) // NODES_PER_STEP
    if steps:
        node.body.insert(0, ExprStmt(_through("agentrl_weighed", Const(steps, lineno=node.lineno)), lineno=node.lineno))
    return node  # type: ignore[no-any-return]


def _through(name: str, value: Any) -> Filter:
    return Filter(value, name, [], [], None, None, lineno=value.lineno)


def _charging(sandbox: _Sandbox, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of jinja2 so that its result is charged."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def charged(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Iterator):
            value = list(sandbox.counted(value))  # such as the generator that `map` returns
        given = (*args, *kwargs.values())
        sandbox.charge(_ITEM_BYTES * len(given))
        if name in _SORTING_FILTERS:
            sandbox.read(value, _COMPARISONS)
        _refuse_settings(name, value, given)
        if name == "replace":
            old, new = _argument(0, "old", args, kwargs), _argument(1, "new", args, kwargs)
            sandbox.charge_replaced(sandbox.text(value), old, new)
        elif name == "join":
            separator = sandbox.text(_argument(0, "d", args, kwargs))
            sandbox.charge(sandbox.size(value) + _bytes(separator) * (len(value) if isinstance(value, Sized) else 0))
        elif name == "indent":
            sandbox.charge(_CHARACTER_BYTES * _MAX_INDENT * (1 + sandbox.text(value).count("\n")))
        elif name == "tojson":
            sandbox.charge(2 * sandbox.size(value))
            if any(isinstance(item, int) and item > 1 for item in given):
                sandbox.charge(_depth(value) * sandbox.size(value))
        elif name in _ITEM_FILTERS:
            is_taken_apart = isinstance(value, str) and name in ("list", "sort", "groupby")
            sandbox.charge(_ITEM_BYTES * len(value) if is_taken_apart else _shallow_bytes(value))
        else:
            sandbox.charge(_ESCAPED_BYTES * sandbox.size(value))
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (sandbox,)}.get(passed, ())
        result = function(*first, value, *args, **kwargs)
        return result if isinstance(result, Iterator) else sandbox.built(result)

    return charged


def _argument(at: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a filter's argument, given by place or by name; empty if it is left out."""
    return args[at] if at < len(args) else kwargs.get(name, "")


def _reading(sandbox: _Sandbox, name: str, function: Any) -> Callable[..., bool]:
    """Wrap a test of jinja2 so that its input is charged."""

    @pass_context
    def read(_context: Any, value: Any, *args: Any) -> bool:
        if name in ("lower", "upper"):
            sandbox.charge(sandbox.size(value))
        return bool(function(sandbox.read(value), *sandbox.read(args)))

    return read


def _refuse_settings(name: str, value: Any, given: tuple[Any, ...]) -> None:
    """Refuse settings of a filter that make its result larger than its charge."""
    if name == "indent" and not all(isinstance(width, bool | int) and width <= _MAX_INDENT for width in given):
        raise SecurityError(f"indent takes a width of up to {_MAX_INDENT} in a chat template")
    if name == "tojson" and not all(map(_is_json_setting, given)):
        raise SecurityError(f"tojson takes an indent of up to {_MAX_INDENT} in a chat template")
    if name == "sum" and not all(isinstance(item, int | float) for item in value):
        raise SecurityError("sum adds numbers in a chat template")
    if name == "round" and not all(isinstance(item, str) or item in range(_MAX_DIGITS) for item in given):
        raise SecurityError(f"round takes up to {_MAX_DIGITS} digits in a chat template")


def _is_json_setting(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(part, str) and len(part) <= _MAX_SEPARATOR for part in value)
    return value is None or isinstance(value, bool) or value in range(_MAX_INDENT)


def _depth(value: Any) -> int:
    """Return the depth of nested containers."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(item, Mapping):
            waiting += [(each, depth + 1) for each in item.values()]
        elif isinstance(item, Collection) and not isinstance(item, str):
            waiting += [(each, depth + 1) for each in item]
    return deepest


def _bytes(text: Any) -> int:
    return _CHARACTER_BYTES * len(text) if isinstance(text, str) else _ITEM_BYTES


def _shallow_bytes(value: Any) -> int:
    if isinstance(value, str):
        return _bytes(value)
    if isinstance(value, Namespace):
        return _ITEM_BYTES * (1 + len(value._Namespace__attrs))
    if isinstance(value, range) or not isinstance(value, Sized):
        return _ITEM_BYTES + _bits(value)
    return _ITEM_BYTES * (1 + len(value))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _repeated(sequence: Any, times: Any) -> int:
    return len(sequence) * times if isinstance(sequence, Sequence) and isinstance(times, int) else 0


class ChatTemplate:
    """Renders conversations with the chat template in `directory`.

    Raises:
        ModelError: there is no template, or it does not compile.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = read_json(directory / "tokenizer_config.json")
        self.source = _template_source(directory, config)
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        self._tokens = {
            key: text for key, value in named.items() if key.endswith("_token") and (text := _literal(value))
        }
        self.fingerprint = json.dumps([self.source, self._tokens], sort_keys=True).encode()
        """Everything that determines a rendering, except the conversation."""
        environment = self._environment = _Sandbox()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime
        try:
            self._template = environment.from_string(self.source)
        except (TemplateError, SyntaxError, ValueError, RuntimeError, MemoryError) as error:
            raise ModelError(f"{directory}: the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        """Render a conversation, with `prompt` up to the start of the assistant's next turn.

        Raises:
            ModelError: the template refuses the conversation.
        """
        self._environment.begin([messages, tools])
        try:
            rendered = self._template.render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except Exception as error:  # a template can make jinja2 raise anything: `truncate` uses assert, for example
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(
                f"{self._directory}: the chat template cannot render a conversation ({roles}): "
                f"{error or type(error).__name__}"
            ) from error
        return valid_unicode(rendered)


def _pattern(token: AddedToken) -> str:
    space = r"\s*"
    # Match only from the start of the white space; otherwise a long run is scanned again from each of its characters.
    left, right = rf"(?:(?<!\s){space})?" if token.strips_left else "", space if token.strips_right else ""
    return f"{left}({re.escape(token.literal)}){right}"


class ControlTokens:
    """The tokens of a model that structure a conversation, as opposed to text; see the module's invariant."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        ordered = sorted(tokens, key=lambda token: -len(token.literal))
        self.ids = {token.literal: token.token_id for token in ordered}
        self.strips = any(token.strips_left or token.strips_right for token in ordered)
        self._literals = [token.literal for token in ordered]
        self._index = {literal: index for index, literal in enumerate(self._literals)}
        self._frame = re.compile("|".join(_pattern(token) for token in ordered))
        self._any = re.compile("|".join(map(re.escape, (*self._literals, _ESCAPE))))
        special = [token.literal for token in ordered if token.special]
        self._special = re.compile("|".join(map(re.escape, (*special, _ESCAPE))))
        self._escaped = re.compile(rf"{_ESCAPE}(\d*){_END}")

    def escape(self, text: str, *, only_special: bool = False) -> str:
        """Replace the literals of control tokens in `text` with private-use characters."""
        return (self._special if only_special else self._any).sub(self._replacement, valid_unicode(text))

    def escape_value(self, value: Any, *, only_special: bool = False) -> Any:
        """Apply `escape` to every string of a JSON value."""
        if isinstance(value, str):
            return self.escape(value, only_special=only_special)
        if isinstance(value, Mapping):
            return {
                self.escape(str(key)): self.escape_value(item, only_special=only_special) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_value(item, only_special=only_special) for item in value]
        return value

    def _replacement(self, match: re.Match[str]) -> str:
        return f"{_ESCAPE}{self._index.get(match[0], '')}{_END}"

    def split(self, rendered: str) -> list[int | str]:
        """Split rendered text into control token ids and the plain text between them, and undo escapes."""
        pieces: list[int | str] = []
        at = 0
        for match in self._frame.finditer(rendered):
            if match.start() > at:
                pieces.append(self._restore(rendered[at : match.start()]))
            pieces.append(self.ids[match[match.lastindex or 0]])
            at = match.end()
        if at < len(rendered):
            pieces.append(self._restore(rendered[at:]))
        return pieces

    def _restore(self, text: str) -> str:
        if _ESCAPE not in text:
            return text
        return self._escaped.sub(lambda match: self._literals[int(match[1])] if match[1] else _ESCAPE, text)


def valid_unicode(text: str) -> str:
    """Replace lone surrogates in `text`, which have no encoding."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def message_for_template(
    message: Message, control: ControlTokens, *, arguments_as_text: bool = False
) -> dict[str, Any]:
    """Convert a message to the template's value. An assistant's own markup (thinking, tool calls) keeps its meaning."""
    own = message.role == "assistant"
    value: dict[str, Any] = {"role": message.role, "content": control.escape(message.content, only_special=own)}
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "type": "function",
                "id": control.escape(call.id),
                "function": {
                    "name": control.escape(call.name),
                    "arguments": _given(control.escape_value(call.arguments, only_special=own), arguments_as_text),
                },
            }
            for call in message.tool_calls
        ]
    if message.thinking:
        value["reasoning_content"] = control.escape(message.thinking, only_special=own)
    if message.tool_call_id is not None:
        value["tool_call_id"] = control.escape(message.tool_call_id)
    if message.name is not None:
        value["name"] = control.escape(message.name)
    return value


def _given(arguments: Any, as_text: bool) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if as_text and not isinstance(arguments, str) else arguments


def tool_for_template(tool: ToolSpec, control: ControlTokens) -> dict[str, Any]:
    """Convert a tool to the template's value."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": control.escape_value(function)}


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; empty if there is no such file.

    Raises:
        ModelError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not contain a JSON object")
    return value


def stop_token_ids(directory: Path) -> list[int]:
    """Return `eos_token_id` of `generation_config.json`, else of `config.json`.

    Raises:
        ModelError: the value is neither a token id nor a list of token ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in ids):
                raise ModelError(
                    f"{directory / name}: eos_token_id is {ascii(value)[:80]}, not a token id or a list of ids"
                )
            return ids
    return []


def _template_source(directory: Path, config: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not readable UTF-8 text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("tool_use", named.get("default"))
    if not isinstance(template, str):
        raise ModelError(
            f"{directory} has no chat template, neither chat_template.jinja nor one in tokenizer_config.json. "
            "Use an instruction-tuned model, or put the template that the model was trained with into "
            "chat_template.jinja"
        )
    return template


def _literal(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
