"""`escape_text` over all code points; any text is a filter or an `InputError`."""

from __future__ import annotations

import sqlite3
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.core.errors import InputError
from agentrl.core.text import escape_line, escape_text
from agentrl.inspection.where_filter import MAX_DEPTH, FilterColumn, parse_where_filter

pytestmark = pytest.mark.property

COLUMNS = {
    "reward": FilterColumn("reward", "number"),
    "turns": FilterColumn("turns", "number"),
    "stop": FilterColumn("stop", "text"),
}
WORDS = [
    "reward",
    "turns",
    "stop",
    "and",
    "or",
    "not",
    "(",
    ")",
    "<",
    "=",
    "!=",
    "~",
    "null",
    "1",
    "-2.5",
    "'x y'",
    '"',
    "'",
    ";--",
]


def test_every_code_point_is_shown_or_escaped() -> None:
    for code in range(0x110000):
        character = chr(code)
        kept = escape_text(character) == character
        dangerous = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t"
        assert not (dangerous and kept), hex(code)
        assert kept or escape_text(character).isascii()
        if character.isprintable() and character.isascii():
            assert kept
    assert escape_text("größe 数 🙂 é\n\t") == "größe 数 🙂 é\n\t"
    assert escape_line("a\nb\tc") == "a\\nb\\tc"


def rows() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (reward REAL, turns INTEGER, stop TEXT)")
    connection.executemany(
        "INSERT INTO t VALUES (?, ?, ?)", [(0.5, 3, "completed"), (-1.0, 9, "max_turns"), (None, 0, None)]
    )
    return connection


def matching(text: str) -> list[int]:
    condition = parse_where_filter(text, COLUMNS)
    connection = rows()
    found = connection.execute(f"SELECT rowid FROM t WHERE {condition.sql} ORDER BY rowid", condition.values).fetchall()
    connection.close()
    return [row for (row,) in found]


@pytest.mark.parametrize(("text", "value"), [('x = "38"', "38"), ("x != '3 8'", "3 8"), ("x = 38", 38.0)])
def test_a_quoted_value_is_text(text: str, value: object) -> None:
    assert list(parse_where_filter(text, {"x": FilterColumn("x", "any")}).values) == [value]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [1, 2, 3]),
        ("reward < 0 and turns > 4", [2]),
        ("reward<0 or turns<=3", [1, 2, 3]),
        ("reward = null", [3]),
        ("reward != null and not stop = completed", [2]),
        ("not reward > 0", [2, 3]),
        ("stop ~ 'max_' or (turns == 3 and reward >= .5)", [1, 2]),
        ('turns > -1e3 AND stop != "max_turns"', [1]),
    ],
)
def test_filters_mean_what_they_say(text: str, expected: list[int]) -> None:
    assert matching(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "reward",
        "reward <",
        "< 0",
        "reward < zero",
        "(reward < 0",
        "reward < 0)",
        "reward < 0 turns > 1",
        "and",
        "x = 1",
        "'",
        "!",
    ],
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--where"):
        parse_where_filter(text, COLUMNS)


def test_nesting_and_length_are_bounded() -> None:
    with pytest.raises(InputError, match="nested"):
        parse_where_filter("(" * (MAX_DEPTH + 1) + "turns = 1" + ")" * (MAX_DEPTH + 1), COLUMNS)
    with pytest.raises(InputError, match="nested"):
        parse_where_filter("not " * (MAX_DEPTH + 1) + "turns = 1", COLUMNS)
    with pytest.raises(InputError, match="at most"):
        parse_where_filter("turns = 1 or " * 1000 + "turns = 1", COLUMNS)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=14).map(" ".join) | st.text(max_size=60))
@example("stop = ''; DROP TABLE t; --")
@example("reward = 1e999")
@example("stop = \ud800")
def test_any_text_is_a_filter_or_an_input_error(text: str) -> None:
    try:
        found = matching(text)
    except InputError:
        return
    assert set(found) <= {1, 2, 3}
