"""The size of the project falls: every count has a limit, and no limit is raised."""

from __future__ import annotations

import pytest

from tests.architecture.size import code_lines, conditionals, loose_below, measured_sizes, read_limits

LIMITS = read_limits()


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return measured_sizes()


def test_each_count_has_a_limit_and_each_limit_a_count(sizes: dict[str, int]) -> None:
    assert sizes.keys() == LIMITS.keys(), "run: python -m tests.architecture.size"


def test_each_count_is_within_its_limit(sizes: dict[str, int]) -> None:
    above = {name: f"take {sizes[name] - limit} from it" for name, limit in LIMITS.items() if sizes[name] > limit}
    assert not above


def test_each_limit_follows_a_count_that_fell(sizes: dict[str, int]) -> None:
    loose = [name for name, limit in LIMITS.items() if sizes[name] < loose_below(limit)]
    assert not loose, "lower the limits: python -m tests.architecture.size"


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    documented = b'"""Module."""\n\nx = 1  # one\n"""Of x."""\n# note\ny = """a\nb"""\n'
    assert code_lines(documented) == 3
    assert code_lines(b'def f():\n    """Doc."""\n\n    return "text"\n') == 2


def test_each_kind_of_condition_counts() -> None:
    source = (
        b"if a:\n    pass\nelif b:\n    pass\nwhile c:\n    pass\nd = 1 if e else 2\nf = [g for g in h if g if i]\n"
    )
    assert conditionals(source) == 6
