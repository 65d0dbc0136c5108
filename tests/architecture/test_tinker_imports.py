"""The Tinker server takes listed names from the core, and the core takes nothing from it."""

from __future__ import annotations

import ast

from tests.architecture.sources import ROOT, Source, sources

LIST = ROOT / "tests/architecture/tinker_imports.txt"
"""Names of the core that the server imports. As a distribution of its own it would need each as a public name."""


def imports(source: Source) -> set[str]:
    """The names of agentrl that a file imports, also within functions."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("agentrl.")}


def is_of_the_server(name: str) -> bool:
    return f"{name}.".startswith("agentrl.tinker.")


def test_the_names_that_the_server_takes_from_the_core_are_listed() -> None:
    names = set().union(*map(imports, sources("agentrl/tinker")))
    listed = LIST.read_text(encoding="utf-8").split()
    assert listed == sorted(name for name in names if not is_of_the_server(name))


def test_only_the_command_imports_the_server() -> None:
    importers = {
        source.path for source in sources("agentrl", "environments") if any(map(is_of_the_server, imports(source)))
    }
    assert {path for path in importers if not path.startswith("agentrl/tinker/")} == {"agentrl/cli/serving.py"}
