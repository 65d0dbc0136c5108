"""Builds the page: `viewer.html` with its style, script and optionally data, isolated from everything else.

The ES modules are joined into one script, each in its own scope, because a page opened from a file may not import. A
content security policy admits this script and style by their hashes, and forbids all others, every way to turn text
into markup, and every request except to the page's own server. Content enters as text nodes through `dom.js`; data is
embedded as base64, which cannot contain markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "text",
    "dom",
    "colors",
    "routes",
    "where",
    "sources",
    "charts",
    "series",
    "list",
    "tokens",
    "conversation",
    "overview",
    "runs",
    "family",
    "episode",
    "steps",
    "evaluations",
    "difference",
    "compare",
    "keys",
    "main",
)
"""Modules of the page in dependency order: each may import from those before it."""
_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_PAGE_DIRECTORY = Path(__file__).parent


class ViewerPage(NamedTuple):
    """A page, and its content security policy."""

    html: str
    policy: str
    """Content security policy, for the server's response header."""


def viewer_page() -> ViewerPage:
    """Make the page that queries the server it came from."""
    return _page((), connect="connect-src 'self'; ")


def self_contained_page(blocks: Sequence[bytes]) -> str:
    """Make a page that contains all its answers, and sends no request. The first block is the index of the others."""
    return _page(tuple(base64.b64encode(block).decode() for block in blocks), connect="").html


def _page(blocks: tuple[str, ...], *, connect: str) -> ViewerPage:
    html, style, script = _parts()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; {connect}base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = "".join(
        f'<script type="text/plain" class="block" id="block{number}">{block}</script>\n'
        for number, block in enumerate(blocks)
    )
    parts = {"POLICY": policy, "STYLE": style, "DATA": data, "SCRIPT": script}
    return ViewerPage(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], html), policy)


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    """Return the frame, the style, and the script joined from the modules."""
    modules = "".join(_module(name, (_PAGE_DIRECTORY / f"{name}.js").read_text(encoding="utf-8")) for name in MODULES)
    return (
        (_PAGE_DIRECTORY / "viewer.html").read_text(encoding="utf-8"),
        (_PAGE_DIRECTORY / "viewer.css").read_text(encoding="utf-8"),
        f"const modules = {{}};\n{modules}",
    )


def _module(name: str, text: str) -> str:
    """Wrap a module in an immediately called function that returns its exports."""
    names = ", ".join(match[2] for match in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", text))
    return f"\n// --- {name}.js\n\nmodules.{name} = (() => {{\n{body}return {{ {names} }};\n}})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
