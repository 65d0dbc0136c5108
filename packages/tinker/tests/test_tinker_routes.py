"""Every route of the installed SDK is served, or refused as the documentation says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_tinker.http_server import API, TinkerServer

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def sdk_routes() -> set[str]:
    """The routes that the SDK's source calls: the path is the first text that begins with the protocol's prefix."""
    import tinker

    found = set()
    for file in Path(tinker.__path__[0]).rglob("*.py"):
        if not file.name.endswith("_test.py"):
            found |= set(_calls(ast.parse(file.read_text())))
    return found


def _calls(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [_text(argument) for argument in node.args[:2]]
            path = next((text for text in texts if text.startswith(API)), None)
            if path is not None:
                method = node.func.attr.strip("_").upper()
                yield _route(texts[0] if method == "REQUEST" else method, path.removeprefix(API))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _route(method: str, path: str) -> str:
    assert method in METHODS, (method, path)
    return f"{method} {re.sub(r'{[^}]*}', '{}', path)}"


def refused_routes() -> set[str]:
    """The routes that the page refuses, which stand there without the prefix."""
    page = (ROOT / "docs/how-to/tinker.md").read_text(encoding="utf-8")
    table = page.partition("### Routes")[2].partition("\n## ")[0]
    return {_route(method, path) for method, path in re.findall(rf"`({'|'.join(METHODS)}) (/[^`]+)`", table)}


def test_the_routes_of_the_installed_sdk_are_known() -> None:
    pytest.importorskip("tinker")
    service: Any = None
    known = {
        _route(method, route.resource.canonical.removeprefix(API))
        for route in TinkerServer(service)._application().router.routes()
        if route.resource is not None
        for method in (METHODS if route.method == "*" else {route.method} & set(METHODS))
    }
    routes = sdk_routes()
    assert len(routes) > 40
    assert routes - known == refused_routes()
