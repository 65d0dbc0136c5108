"""Text for people: makes untrusted content safe for a terminal, and joins counts with nouns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    # Bidirectional controls, zero-width characters, separators.
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\ud800-\udfff"  # surrogates, which UTF-8 streams cannot encode
    "\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"  # tag characters
    "]"
)


def escape_text(text: str) -> str:
    r"""Escape every control, bidirectional and invisible character of `text` except newline and tab.

    Example:
        >>> escape_text("a\x1b[31mb\u202ec")
        'a\\x1b[31mb\\u202ec'
    """
    return _UNSAFE.sub(_escape, text)


def escape_line(text: str) -> str:
    """`escape_text` for one line: newlines and tabs are escaped too."""
    return escape_text(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def plural(count: float, one: str, several: str = "") -> str:
    """Join a count with its noun; `several` is the plural if it is not `one` with an s.

    Example:
        >>> plural(1, "turn"), plural(0, "turn"), plural(1200, "entry", "entries")
        ('1 turn', '0 turns', '1,200 entries')
    """
    return f"{count:,.12g} {one if count == 1 else several or f'{one}s'}"


def strip_numbers(text: str) -> str:
    """Return a text without its numbers and addresses, in which two messages of one error may differ.

    Example:
        >>> strip_numbers("no answer from <Client at 0x7f12> on port 40123")
        'no answer from <Client at > on port '
    """
    return re.sub(r"0x[0-9a-f]+|\d+", "", text)


def shorten_lines(text: str, max_length: int) -> str:
    """Shorten a text to its first line and as many of its last lines as fit; a line `…` marks the gap.

    A message begins with its subject, and a traceback ends with its exception.

    Example:
        >>> shorten_lines("it failed\\nframe 1\\nframe 2\\nOSError: full", 30)
        'it failed\\n…\\nOSError: full'
    """
    if len(text) <= max_length:
        return text
    head, newline, rest = text.partition("\n")
    head = _cut_line(head, max_length // 2 if newline else max_length)
    if not newline:
        return head
    lines = rest.split("\n")
    room = max_length - len(head) - 3  # the newlines, and the line of the mark
    shown = [_cut_line(lines.pop(), room)]
    room -= len(shown[0])
    while lines and len(lines[-1]) < room:
        shown.append(lines.pop())
        room -= len(shown[-1]) + 1
    return "\n".join([head, *["…"] * bool(lines), *reversed(shown)])


def shorten_middle(text: str, max_length: int = 200) -> str:
    """Shorten a path into data, whose ends say most, by its middle.

    Example:
        >>> shorten_middle("data['a']['b']['c']['d']", 15)
        "data['a…']['d']"
    """
    half = (max_length - 1) // 2
    return text if len(text) <= max_length else f"{text[:half]}…{text[-half:]}"


def _cut_line(line: str, max_length: int) -> str:
    """Cut the end off a line, between two words if it has spaces."""
    if len(line) <= max_length:
        return line
    start = line[: max(max_length - 2, 0)]
    return f"{start.rpartition(' ')[0] or start} …"


def format_seconds(seconds: float) -> str:
    """Format an estimated duration for a sentence.

    Example:
        >>> format_seconds(0.42), format_seconds(38.4), format_seconds(400.0), format_seconds(9000.0)
        ('0.4 s', '38 s', '7 min', '2.5 h')
    """
    if seconds >= 100 * 60:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"


def format_rate(value: float) -> str:
    """Format a rate as a whole number, or with two digits below 10, so that a slow one is not shown as 0.

    Example:
        >>> format_rate(1234.5), format_rate(0.031)
        ('1,234', '0.031')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def agent_name(seat: str, index: int) -> str:
    """Name an agent by its seat, and by its index unless that is 0, the default."""
    return f"{seat}[{index}]" if index else seat


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which file names and models can produce and databases cannot store.

    Text of a subclass of `str`, such as numpy's or an enum's, becomes plain text.
    """
    return str.__str__(text) if text.isascii() else text.encode("utf-8", "replace").decode()


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts, in characters or pieces."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
