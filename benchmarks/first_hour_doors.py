"""What real models meet: calls in forms that a run does not read are named, and answers are not accused."""

from __future__ import annotations

from benchmarks.parts import outcomes


def figures(quick: bool) -> dict[str, float | None]:
    """Run the suite of replies."""
    cases = outcomes("tests/unit/test_foreign_calls.py", "-k", "another_form_is_named or answer_is_not_accused")
    named = {name: passed for name, passed in cases.items() if name.startswith("test_a_call_in_another_form")}
    accused = sum(not passed for name, passed in cases.items() if name not in named)
    return {
        "foreign_calls_named": float(sum(named.values())),
        "foreign_calls_written": float(len(named)),
        "answers_accused": float(accused),
        "answers_written": float(len(cases) - len(named)),
    }
