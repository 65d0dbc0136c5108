"""What can be combined: the refused pairs of settings, through the real configuration, and the table behind them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.parts import compatible
from tests.combinations import SETTINGS, all_parts, recording, start


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_works_on_the_base(setting: str) -> None:
    start(setting)


def test_exactly_the_listed_pairs_are_refused(repository: Path) -> None:
    """The list is no copy of the table: a need that is removed, added or moved changes it."""
    lines = []
    with recording() as refusals:
        for pair in itertools.combinations(SETTINGS, 2):
            refusals.clear()
            with contextlib.suppress(ConfigError):  # others come from settings that replace each other
                start(*pair)
            lines += [
                f"{' | '.join(pair)} | {part.kind} needs {need.property.name} of {need.of}"
                for part, _, need in refusals
            ]
    listed = repository / "tests" / "golden" / "refused_combinations.txt"
    assert lines == listed.read_text(encoding="utf-8").splitlines()


def test_a_refusal_names_both_settings_the_reason_and_one_that_works() -> None:
    for refusal in compatible(all_parts()):
        message = str(refusal)
        assert all(text in message for text in (refusal.part.setting, refusal.other.setting, refusal.need.why))
        assert refusal.need.remedy or refusal.other.instead or refusal.part.instead, message


def test_every_need_refuses_a_part() -> None:
    parts = all_parts()
    assert {refusal.need for refusal in compatible(parts)} == {need for part in parts for need in part.needs}
