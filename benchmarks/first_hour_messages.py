"""Mistakes of a tired user that are answered with place, cause and remedy: each is a case of one test suite."""

from __future__ import annotations

from benchmarks.parts import outcomes


def figures(quick: bool) -> dict[str, float | None]:
    """Run the suite; `quick`: only the commands."""
    cases = outcomes("tests/unit/test_messages.py", "-k", "test_a_command" if quick else "test_a_")
    for name in (name for name, passed in cases.items() if not passed):
        print(f"not answered: {name}", flush=True)
    return {"messages": float(sum(cases.values())), "messages_tried": float(len(cases))}
