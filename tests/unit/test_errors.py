"""The error tree: what an error says and carries survives the way from one process to another."""

from __future__ import annotations

import copy
import pickle

import pytest

from agentrl.core import errors
from agentrl.core.errors import AgentRLError, EpisodeError, RewardError, StorageError, UntrainableUnitsError
from agentrl.environment.context import LimitReachedError


@pytest.mark.parametrize(
    "error",
    [
        EpisodeError("what happened", reason="too_large"),
        RewardError("NaN"),
        LimitReachedError("no turn left", stop_reason="max_turns"),
        StorageError("full"),
        UntrainableUnitsError([("e1", 0, "another temperature")]),
    ],
)
def test_an_error_survives_pickling(error: AgentRLError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 (our own bytes)
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
        assert again.exit_code == error.exit_code


def test_every_error_of_the_tree_has_an_exit_code_of_the_command_line() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AgentRLError)]
    assert len(kinds) > 10
    assert {kind.exit_code for kind in kinds} == {1, 2, 70, 74}
