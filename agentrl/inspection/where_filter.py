"""The filter language of `--where`: `column operator value`, joined by and, or, not and brackets.

    reward < 0 and (turns > 4 or stop_reason = "max_turns") and not seats ~ judge

It becomes SQL over known columns with bound values; nothing of the text itself reaches the database.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from agentrl.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LENGTH = 2_000
MAX_DEPTH = 40

Value = str | float | int


class FilterColumn(NamedTuple):
    """A column of the filter language."""

    sql: str
    kind: Literal["text", "number", "any"]
    """`any`: a field of JSON, compared with a number if the filter's value is one."""
    values: tuple[str, ...] = ()
    """Values to bind in `sql`."""
    choices: tuple[str, ...] = ()
    """All values that a column of text can have; empty: any."""


class ObjectColumn(NamedTuple):
    """An object of an episode, each of whose fields is a column."""

    sql: str
    """The object as JSON, or NULL."""
    field: str
    """A field of the object; binds its name once."""
    kind: Literal["number", "any"] = "any"


def json_column(sql: str) -> ObjectColumn:
    """Return the object in a column of JSON text, of which damaged text has no field."""
    return ObjectColumn(sql, f"CASE WHEN json_valid({sql}) THEN json_extract({sql}, '$.\"' || ? || '\"') END")


class SqlFilter(NamedTuple):
    """An SQL condition with its bound values."""

    sql: str
    values: tuple[Value, ...]


EVERYTHING = SqlFilter("1", ())

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.#~/]))"
    r"|(?P<quoted>\"[^\"]*\"|'[^']*')"
    r"|(?P<operator><=|>=|!=|<>|==|=|<|>|~)"
    r"|(?P<bracket>[()])"
    r"|(?P<word>[^\s()<>=!~\"']+))"
)
_OPERATORS = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


def parse_where_filter(
    text: str, columns: Mapping[str, FilterColumn], objects: Mapping[str, ObjectColumn] | None = None
) -> SqlFilter:
    """Parse a filter; an empty text passes everything. `objects` are columns whose fields can be compared, keyed by the
    prefix of their names.

    Raises:
        InputError: the text is not a filter; the message says where, and what was expected.
    """
    if len(text) > MAX_LENGTH:
        raise InputError(f"--where: {len(text)} characters; at most {MAX_LENGTH}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("--where: not valid Unicode")
    parser = _Parser(_tokens(text), columns, objects or {})
    return parser.parse_all() if text.strip() else EVERYTHING


def find_column(
    option: str, name: str, columns: Mapping[str, FilterColumn], objects: Mapping[str, ObjectColumn]
) -> FilterColumn:
    """Return a column, or the field of an object, whose name becomes a bound value.

    Raises:
        InputError: there is no such column; the message begins with `option`.
    """
    if name in columns:
        return columns[name]
    for prefix, table in objects.items():
        if (field := name.removeprefix(prefix)) not in ("", name) and '"' not in field:
            return FilterColumn(table.field, table.kind, (field,))
    names = [*columns, *(f"{prefix}NAME" for prefix in objects)]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"
    raise InputError(f"{option}: {name!r} is not a column; {hint}")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise InputError(
                f"--where: cannot read {text[at : at + 20].strip()!r}; write a condition as `column operator value`"
            )
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return tokens


class _Parser:
    def __init__(
        self, tokens: list[tuple[str, str]], columns: Mapping[str, FilterColumn], objects: Mapping[str, ObjectColumn]
    ) -> None:
        self._tokens = tokens
        self._columns = columns
        self._objects = objects
        self._at = 0
        self._depth = 0
        self._values: list[Value] = []

    def parse_all(self) -> SqlFilter:
        sql = self._any()
        if self._at < len(self._tokens):
            raise InputError(f"--where: expected `and` or `or` before {self._tokens[self._at][1]!r}")
        return SqlFilter(sql, tuple(self._values))

    def _any(self) -> str:
        parts = [self._all()]
        while self._keyword("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else "(" + " OR ".join(parts) + ")"

    def _all(self) -> str:
        parts = [self._term()]
        while self._keyword("and"):
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else "(" + " AND ".join(parts) + ")"

    def _term(self) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InputError(f"--where: nested deeper than {MAX_DEPTH}")
        if self._keyword("not"):
            sql = f"NOT coalesce({self._term()}, 0)"
        elif self._peek() == ("bracket", "("):
            self._at += 1
            sql = self._any()
            if self._next() != ("bracket", ")"):
                raise InputError("--where: a bracket is not closed")
        else:
            sql = self._comparison()
        self._depth -= 1
        return sql

    def _comparison(self) -> str:
        _, name = self._next()
        if not name:
            raise InputError("--where: a condition is missing")
        column = find_column("--where", name, self._columns, self._objects)
        self._values += column.values
        kind, operator = self._next()
        if kind != "operator":
            raise InputError(f"--where: expected one of = != < <= > >= ~ after {name}")
        kind, text = self._next()
        if kind not in ("number", "quoted", "word"):
            raise InputError(f"--where: expected a value after {name} {operator}")
        if kind == "word" and text.lower() in ("null", "none") and operator in ("=", "==", "!=", "<>"):
            return f"({column.sql}) IS {'' if operator in ('=', '==') else 'NOT '}NULL"
        return self._compare(name, column, operator, text[1:-1] if kind == "quoted" else text, kind)

    def _compare(self, name: str, column: FilterColumn, operator: str, text: str, kind: str) -> str:
        if operator == "~":
            self._values.append(text)
            return f"instr(CAST(({column.sql}) AS TEXT), ?) > 0"
        if column.kind == "number":
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if math.isnan(number):
                raise InputError(f"--where: {name} must be compared with a number, not with {text!r}")
            self._values.append(number)
        elif column.choices and text not in column.choices:
            raise InputError(f"--where: {name} is one of {', '.join(column.choices)}, not {text!r}")
        else:
            self._values.append(_json_value(text, kind) if column.kind == "any" else text)
        return f"({column.sql}) {_OPERATORS[operator]} ?"

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _keyword(self, word: str) -> bool:
        kind, text = self._peek()
        if kind == "word" and text.lower() == word:
            self._at += 1
            return True
        return False


def _json_value(text: str, kind: str) -> Value:
    """Return a number for a number or a truth value, as SQLite extracts them from JSON, or else the text.

    Args:
        text: the value.
        kind: kind of its token: `number`, `quoted` or `word`.
    """
    if kind == "word" and text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    if kind != "number":
        return text
    if re.fullmatch(r"[-+]?\d{1,20}", text) and -(1 << 63) <= int(text) < 1 << 63:
        return int(text)  # a float would round a large id
    return float(text)
