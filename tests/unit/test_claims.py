"""The benchmark of claims: the saved rows hold, and a sentence that is altered on purpose is found."""

from __future__ import annotations

import pytest

from benchmarks import claims

ROWS = claims.claims()


def test_every_claim_is_in_its_page_and_rests_on_something_that_holds() -> None:
    texts = claims.pages(ROWS)
    assert len(ROWS) >= 120
    assert claims.false_claims(ROWS, texts) == []
    assert claims.unproved(ROWS) == []
    assert claims.unsourced(ROWS, texts["README.md"]) == []


@pytest.mark.parametrize(
    ("page", "sentence", "altered"),
    [
        ("README.md", "both with the same vLLM and a merged LoRA", "each with a server of its own"),
        ("README.md", "is another project", "is this project"),
        (
            "docs/how-to/coming_from.md",
            'normalizer = "sequences", clip_high = 0.2,',
            'normalizer = "sequences", clip_high = 0.28,',
        ),
        ("docs/how-to/coming_from.md", "no: needs an NVIDIA GPU", "yes"),
        (
            "docs/explanation/durability.md",
            "Every admitted episode is trained once",
            "Every admitted episode is trained",
        ),
    ],
)
def test_a_sentence_altered_on_purpose_is_found(page: str, sentence: str, altered: str) -> None:
    texts = claims.pages(ROWS)
    assert sentence in texts[page]
    found = claims.false_claims(ROWS, {**texts, page: texts[page].replace(sentence, altered)})
    assert found
    assert all(each.startswith(page) for each in found)


@pytest.mark.parametrize(
    "false",
    [
        {"value": "agentrl.config.algorithms:LOSSES", "is": 17},
        {"tests": ["tests/unit/test_claims.py::test_that_nobody_wrote"]},
        {"source": "constraints.txt", "has": "torch==1.0"},
    ],
)
def test_a_ground_that_does_not_hold_is_told(false: claims.Claim) -> None:
    assert claims.objection({"file": "README.md", "says": "x", **false})


@pytest.mark.parametrize("command", ["", "make coffee", "python -m benchmarks.nothing", "somebody measured it"])
def test_a_record_without_a_command_that_repeats_it_is_told(command: str) -> None:
    row = {"file": "README.md", "says": "x", "record": "seen once", "command": command}
    assert claims.unproved([row]) == ["x"]


def test_a_number_that_nothing_covers_is_told() -> None:
    readme = claims.pages(ROWS)["README.md"]
    assert claims.unsourced(ROWS, readme + "\nIt is 7.5 times as fast.\n") == ["README.md: nothing covers 7.5"]
    assert claims.unsourced([{"file": "README.md", "says": "x"}], "")
