"""The benchmark of claims: the saved rows hold, and planted lies of each kind are found. The tests that prove a claim
are tests of this suite, so here they only have to exist; `python -m benchmarks.claims` runs them, and the commands."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import claims

ROWS = claims.claims()


def test_every_claim_is_in_its_page_and_no_file_contradicts_it() -> None:
    texts = claims.pages(ROWS)
    assert len(ROWS) <= 60
    assert sum("quotes" in row for row in ROWS) <= 4
    assert claims.unsaid(ROWS, texts) == []
    assert claims.contradicted(ROWS) == []
    assert claims.unsourced(ROWS, texts["README.md"]) == []


@pytest.mark.parametrize(
    ("page", "sentence", "altered"),
    [
        ("README.md", "both with the same vLLM and a merged LoRA", "each with a server of its own"),
        ("README.md", "is another project", "is this project"),
        ("README.md", "about 100 CPU seconds", "about 1 CPU second"),
        (
            "docs/explanation/durability.md",
            "Every admitted episode is trained once",
            "Every admitted episode is trained",
        ),
    ],
)
def test_an_altered_sentence_is_found(page: str, sentence: str, altered: str) -> None:
    texts = claims.pages(ROWS)
    assert sentence in texts[page]
    found = claims.unsaid(ROWS, {**texts, page: texts[page].replace(sentence, altered)})
    assert found
    assert all(each.startswith(page) for each in found)


@pytest.mark.parametrize(
    "lie",
    [
        {"value": "agentrl.config.algorithms:LOSSES", "is": 17},
        {"source": "constraints.txt", "has": ["torch==1.0"]},
        {"quotes": "https://example.org"},
        {"tests": ["tests/unit/test_claims.py::test_that_nobody_wrote"]},
        {},
    ],
)
def test_a_row_that_the_repository_contradicts_is_found(lie: claims.Claim) -> None:
    assert claims.contradicted([{"file": "README.md", "says": "x", **lie}])


def test_a_failing_or_skipped_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(
        "import pytest\n"
        "def test_true(): pass\n"
        "def test_false(): assert False\n"
        "def test_skipped(): pytest.skip('no card')\n",
        encoding="utf-8",
    )

    names = ("true", "false", "skipped")
    rows = [{"file": "README.md", "says": name, "tests": [f"test_planted.py::test_{name}"]} for name in names]
    assert [line.split(": ")[1] for line in claims.failed_tests(rows, root=tmp_path)] == ["false", "skipped"]


@pytest.mark.parametrize(
    ("command", "prints", "cpu_seconds", "is_found"),
    [
        ("agentrl --version", r"agentrl \d", 60.0, False),
        ("agentrl believe", "", 60.0, True),
        ("agentrl --version", r"held-out reward 0\.999", 60.0, True),
        ("agentrl --version", "agentrl", 0.0, True),
    ],
)
def test_a_command_that_fails_prints_another_figure_or_takes_longer_is_found(
    command: str, prints: str, cpu_seconds: float, is_found: bool
) -> None:
    row = {"file": "README.md", "says": "x", "command": command, "prints": prints, "cpu_seconds": cpu_seconds}
    assert bool(claims.failed_commands([row])) is is_found


def test_a_number_that_nothing_covers_is_found() -> None:
    readme = claims.pages(ROWS)["README.md"]
    assert claims.unsourced(ROWS, readme + "\nIt is 7.5 times as fast.\n") == ["README.md: nothing covers 7.5"]


def test_what_a_run_needs_has_the_size_that_readme_names() -> None:
    """Of the files of the distributions that `make setup` installs."""
    needed: dict[str, int] = {}
    waiting = [Requirement("episodic-rl[train,calculator]")]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        extras = {"", *requirement.extras}
        if name in needed and not requirement.extras:
            continue
        found = distribution(name)
        needed[name] = sum(Path(str(file.locate())).stat().st_size for file in found.files or () if _exists(file))
        for text in found.requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(inner)
    assert sum(needed.values()) / 1e9 == pytest.approx(1.1, rel=0.1)


def _exists(file: object) -> bool:
    return Path(str(file.locate())).is_file()  # type: ignore[attr-defined]
