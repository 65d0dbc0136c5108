"""The distributions in packages/: they import public names, and agentrl names them when they are not installed."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentrl
import agentrl.formats
import agentrl.parts
import agentrl.sandbox
from agentrl.core import machine
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment import registry
from tests.architecture.sources import ROOT, sources

MODULES = (agentrl, agentrl.formats, agentrl.parts, agentrl.sandbox)
PUBLIC = {module.__name__: set(module.__all__) for module in MODULES}
PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))


def project(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return found


def private_imports(tree: ast.Module) -> list[str]:
    """Return what a file imports of agentrl that is not public."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # `import agentrl` also reaches whatever modules happen to be loaded.
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] == "agentrl"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "agentrl":
            public = PUBLIC.get(str(node.module), set())
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import agentrl.core.errors",
        "import agentrl as framework",
        "from agentrl.core.records import Task",
        "from agentrl.core.tokens import Tokens",
        "from agentrl import core",
        "from agentrl.formats import core",
        "from agentrl.parts import learner",
    ],
)
def test_an_import_of_a_private_name_is_found(line: str) -> None:
    assert private_imports(ast.parse(line))


def test_packages_import_only_public_names() -> None:
    files = [source for file in PROJECTS for source in sources(f"packages/{file.parent.name}/src")]
    assert not {source.path: found for source in files if (found := private_imports(source.tree))}


@pytest.mark.parametrize("module", [agentrl.formats, agentrl.parts], ids=lambda module: module.__name__)
def test_each_name_that_is_public_for_packages_is_one_that_a_package_uses_and_exists(module: Any) -> None:
    text = "\n".join(source.text for file in PROJECTS for source in sources(f"packages/{file.parent.name}/src"))
    names = {
        node.id
        for node in ast.walk(ast.parse(text.replace("from __future__", "from future")))
        if isinstance(node, ast.Name)
    }
    assert PUBLIC[module.__name__] <= names
    assert all(hasattr(module, name) for name in module.__all__)


def test_agentrl_knows_each_package_and_its_environments() -> None:
    projects = {file.parent.name: project(file) for file in PROJECTS}
    assert sorted(machine.PACKAGES.values()) == sorted(projects)
    core = project(ROOT / "pyproject.toml")
    environments = {}
    for folder, found in projects.items():
        assert found["name"] == f"{core['name']}-{folder}"
        assert found["version"] == core["version"]
        environments |= found.get("entry-points", {}).get(registry.ENTRY_POINT_GROUP, {})
    packages = {name: reference.partition(".")[0] for name, reference in environments.items()}
    assert packages == registry.PACKAGED_ENVIRONMENTS
    for name, reference in environments.items():
        assert registry.resolve(name) is registry.resolve(reference)


def test_an_environment_of_a_package_that_is_not_installed_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    monkeypatch.setattr(registry, "_loaded_classes", {})
    command = machine.install_command(package="formats")
    assert command.endswith("packages/formats")
    for reference in registry.PACKAGED_ENVIRONMENTS:
        with pytest.raises(EnvironmentDefinitionError) as raised:
            registry.resolve(reference)
        assert command in str(raised.value)


def test_a_module_of_a_package_that_is_not_installed_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded_classes", {})
    for name in ("agentrl_formats", "agentrl_formats.harbor"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentDefinitionError) as raised:
        registry.resolve("agentrl_formats.harbor:Harbor")
    assert machine.install_command(package="formats") in str(raised.value)
