"""A file is as long as its subject, a function as long as its idea."""

from __future__ import annotations

import ast

from tests.architecture.sources import sources

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80

EVERYTHING = ("agentrl", "environments", "examples", "benchmarks", "tests")


def test_no_file_is_too_long() -> None:
    lengths = {source.path: source.text.count("\n") for source in sources(*EVERYTHING)}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_no_function_is_too_long() -> None:
    too_long = {
        f"{source.path}::{node.name}": length
        for source in sources(*EVERYTHING)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not too_long
