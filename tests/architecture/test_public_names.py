"""The public surface, pinned: a change here is a change for users and belongs in the changelog."""

from __future__ import annotations

import inspect
from pathlib import Path

import agentrl


def test_public_names_are_those_of_the_snapshot() -> None:
    snapshot = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()
    assert sorted(agentrl.__all__) == sorted(snapshot)


def test_every_public_name_can_be_imported_and_explains_itself() -> None:
    silent = [
        name for name in agentrl.__all__ if callable(found := getattr(agentrl, name)) and not inspect.getdoc(found)
    ]
    assert not silent
    assert set(agentrl.__all__) <= set(dir(agentrl))
