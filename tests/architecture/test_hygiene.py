"""What the package never does: print, unpickle, or send more than a header through the control path."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agentrl.core.ids import child_episode_id
from agentrl.core.records import EpisodeDataLocation, PolicyVersion
from tests.architecture.sources import Source, sources
from tests.support.builders import make_episode_header, make_spec

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAX_HEADER_BYTES = 256


def offences(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        found = None
        if isinstance(node, ast.Import):
            found = next((alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES), None)
        elif isinstance(node, ast.ImportFrom):
            found = node.module if (node.module or "").partition(".")[0] in PICKLES else None
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "eval", "exec"}
        ):
            found = node.func.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            found = f"torch.{node.attr}" if node.attr in {"load", "save"} else None
        may_print = source.path.startswith(("agentrl/cli/", "environments/"))
        if found is not None and not (found == "print" and may_print):
            yield f"{source.path}:{node.lineno} {found}"


def test_the_search_finds_what_it_is_for() -> None:
    text = "import pickle\nfrom cloudpickle import dumps\nprint(1)\nx = torch.load(f)\nmodel.load(f)\n"
    planted = Source(path="agentrl/learn/planted.py", text=text, tree=ast.parse(text))
    assert [line.split()[1] for line in offences(planted)] == ["pickle", "cloudpickle", "print", "torch.load"]


def test_nothing_prints_or_unpickles() -> None:
    assert not [offence for source in sources("agentrl", "environments") for offence in offences(source)]


def test_a_header_of_one_agent_fits_into_256_bytes() -> None:
    spec = make_spec(
        child_episode_id("e12345678", 3, "r/12.3#105", 63),
        seats={"proposer_and_solver": "large_policy_name"},
        group_id="g12345678~3.r/12.3#105",
        group_size=64,
        attempt=3,
        parent_id="e12345678",
    )
    header = make_episode_header(
        spec,
        reward=-0.123456789,
        turns=64,
        tokens=1_000_000,
        version=PolicyVersion("large_policy_name", 12, 123_456),
        seconds=3601.123,
        location=EpisodeDataLocation("turns-worker-0123.sqlite", 512),
    )
    encoded = msgspec.msgpack.encode(dataclasses.astuple(header))
    assert len(encoded) <= MAX_HEADER_BYTES
    against = (PolicyVersion("another_policy_name", 12, 123_456),)
    longer = msgspec.msgpack.encode(dataclasses.astuple(dataclasses.replace(header, measured_against=against)))
    assert len(longer) <= len(encoded) + 32


def test_the_examples_of_the_docstrings_are_true() -> None:
    attempted = 0
    for source in sources("agentrl"):
        if ">>> " in source.text:
            name = source.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            results = doctest.testmod(importlib.import_module(name))
            assert results.failed == 0, name
            attempted += results.attempted
    assert attempted > 10


def test_every_dependency_gives_its_reason(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    requirements = [line for line in text.splitlines() if re.match(r'    "[a-z][\w.-]*>=', line)]
    assert len(requirements) > 15
    assert not [line for line in requirements if not re.search(r'",\s+# \w', line)]
