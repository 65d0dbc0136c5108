"""Rows of the conformance table: what an adapter makes of data written for another project.

Each module beside this one is an adapter, with three names:

* `ROWS`: the rows. `input` is data of the other project, as short as possible. Either `sees` is what the policy sees
  and `grader` what reaches the grader, as JSON data; or `refused` has words of the error, with the place and the name
  of what cannot be translated. Take the values from the other project's own code, not from what agentrl does today.
  A row that needs the project's package says so in `needs`, a path below the directory AGENTRL_FORMATS.
* `translate(input)`: pass one input through agentrl, and return what the policy sees and what reaches the grader.
* `planted()`: a context manager that makes the adapter drop one field. The table must notice.

Optionally `original(input)`: the same by the project's own code, for rows with `compared`.
`tests/unit/test_translations.py` runs all rows. `seen` returns what the policy of a played episode saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.journal.entries import TurnEntry
from tests.unit.episodes import Played


@dataclass(frozen=True, kw_only=True)
class Row:
    """One input, with its translation or refusal."""

    name: str
    input: Any
    sees: Any = None
    grader: Any = None
    refused: str = ""
    needs: str = ""
    needs_sandbox: bool = False
    """Whether its translation runs in a sandbox."""
    compared: bool = False
    exhaustive: bool = False
    """Whether `make test` leaves it out, as it does with rows that need a package."""


def seen(played: Played) -> list[list[str]]:
    """Return the messages that the policy of an episode saw, each as its role and content; fail as the episode did."""
    if played.header.drop_reason is not None:
        raise ValueError(played.said)
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    return [[message["role"], message["content"]] for turn in turns for message in turn.messages]


def texts(value: Any) -> Iterator[str]:
    """Yield the texts, numbers and names in JSON data."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield str(key)
            yield from texts(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from texts(member)
    else:
        yield str(value)
