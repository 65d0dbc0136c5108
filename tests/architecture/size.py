"""What a reader has to know, counted: `tests/architecture/limits.toml` holds the limits."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from tests.support.resume_fields import settings

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Path(__file__).with_name("limits.toml")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_STATEMENT_STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def code_lines(source: bytes) -> int:
    """Lines with code: without comments, blank lines and strings that are statements, such as docstrings."""
    lines: set[int] = set()
    before = tokenize.ENCODING
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        is_docstring = token.type == tokenize.STRING and before in _STATEMENT_STARTS
        if token.type not in _NO_CODE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        before = token.type
    return len(lines)


def conditionals(source: bytes) -> int:
    """Number of `if`, `while` and `match` statements, conditional expressions, and conditions of comprehensions."""
    return sum(
        len(node.ifs)
        if isinstance(node, ast.comprehension)
        else isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match)
        for node in ast.walk(ast.parse(source))
    )


def measured_sizes() -> dict[str, int]:
    """Every count that has a limit, by name.

    A room is a folder of `agentrl/`; modules outside of one count as `agentrl/`.
    """
    sizes: Counter[str] = Counter()
    for path in sorted(ROOT.glob("agentrl/**/*.py")):
        source = path.read_bytes()
        parts = path.relative_to(ROOT).parts
        sizes[f"lines of {'/'.join(parts[:2]) if len(parts) > 2 else 'agentrl/'}"] += (lines := code_lines(source))
        sizes["lines in all"] += lines
        sizes["conditionals"] += conditionals(source)
    sizes["settings"] = sum(1 for _ in settings())
    sizes["refused pairs"] = len((ROOT / "tests/golden/refused_combinations.txt").read_text().splitlines())
    sizes["words of docs/"] = sum(len(path.read_text().split()) for path in sorted(ROOT.glob("docs/**/*.md")))
    sizes["words of README.md"] = len((ROOT / "README.md").read_text().split())
    return dict(sizes)


def read_limits() -> dict[str, int]:
    """The limits, by the names of `measured_sizes`."""
    limits: dict[str, int] = tomllib.loads(LIMITS.read_text())
    return limits


def loose_below(limit: int) -> int:
    """The size below which a limit has to be lowered: 2 % less, and at least 10, so that small rooms can breathe."""
    return limit - max(limit // 50, 10)


def tighten() -> None:
    """Lower each limit to the size; never raise one."""
    limits, sizes = read_limits(), measured_sizes()
    lowered = {name: min(size, limits.get(name, size)) for name, size in sizes.items()}
    head = "".join(line for line in LIMITS.read_text().splitlines(keepends=True) if line.startswith("#"))
    LIMITS.write_text(head + "\n" + "".join(f'"{name}" = {limit}\n' for name, limit in sorted(lowered.items())))


if __name__ == "__main__":
    tighten()
