"""A part of the check of environments, for tests of that part: most of a check's time goes to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.testing import check

if TYPE_CHECKING:
    import pytest


def keep_checks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let `check_environment` run only these checks, by their names in `CHECKS`."""
    kept = tuple(each for each in check.CHECKS if each.name in names)
    assert {each.name for each in kept} == {*names}
    monkeypatch.setattr(check, "CHECKS", kept)
