"""What comes from others is translated whole or refused by name: counts over the test suites that prove it.

    python -m benchmarks.edges [--part tools|translations|tasks|check|cases]

* `tools`. `tool_kinds`: kinds of parameters that a tool may declare; each test draws values from the schema that the
  policy is shown, and calls the tool with them. `tool_values_refused`: kinds of which a value did not arrive.
* `translations`. `translations`: tables of rows written for other projects; `wrong`: tables with a failing row.
  `planted_drops_found`: the share of planted drops that the table finds.
* `tasks`. `task_values`: kinds of values in a task's data; `task_values_changed`: kinds that an episode sees changed.
* `check`. `check_planted_found`: the share of planted faults that `agentrl env check` finds; `check_planted`: their
  number. `check_false_alarms`: findings in environments without a fault.
* `cases`. `cases`: the share of reported cases that are right; `cases_tried`: their number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache

from benchmarks.parts import outcomes
from benchmarks.report import Report

Passed = list[bool]
"""Whether each test passed."""


def share(passed: Passed) -> float:
    """The tests that passed, of all."""
    return sum(passed) / len(passed)


def failed(passed: Passed) -> float:
    """Number of tests that failed."""
    return passed.count(False)


FIGURES: dict[str, dict[str, tuple[Callable[[Passed], float], str, str]]] = {
    "tools": {
        "tool_kinds": (len, "tests/unit/test_tool_kinds.py", "test_values_of_a_kind_arrive"),
        "tool_values_refused": (failed, "tests/unit/test_tool_kinds.py", "test_values_of_a_kind_arrive"),
    },
    "translations": {
        "translations": (len, "tests/unit/test_translations.py", "test_each_row_is_translated"),
        "wrong": (failed, "tests/unit/test_translations.py", "test_each_row_is_translated"),
        "planted_drops_found": (share, "tests/unit/test_translations.py", "test_planted"),
    },
    "tasks": {
        "task_values": (len, "tests/unit/test_task_values.py", "test_a_value_is_kept_or_refused"),
        "task_values_changed": (failed, "tests/unit/test_task_values.py", "test_a_value_is_kept_or_refused"),
    },
    "check": {
        "check_planted_found": (share, "tests/unit/test_check_outcomes.py", "test_planted"),
        "check_planted": (len, "tests/unit/test_check_outcomes.py", "test_planted"),
        "check_false_alarms": (failed, "tests/unit/test_check_outcomes.py", "test_no_false_alarm"),
    },
    "cases": {
        "cases": (share, "tests/unit/test_edge_cases.py", "test_case_"),
        "cases_tried": (len, "tests/unit/test_edge_cases.py", "test_case_"),
    },
}
"""Figures of each part: how to count, and the file and the beginning of the names of the tests."""


def main() -> None:
    """Run the tests of the parts, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=FIGURES, help="this part only")
    part = parser.parse_args().part
    run = cache(outcomes)  # each file once, since the tests of a file share results
    report = Report("edges", quick=False, repeats=1, compared_with="")
    report.figures = {name: None for figures in FIGURES.values() for name in figures}
    for figures in [FIGURES[part]] if part else FIGURES.values():
        for name, (count, file, test) in figures.items():
            report.figures[name] = float(count([passed for each, passed in run(file).items() if each.startswith(test)]))
    report.print()


if __name__ == "__main__":
    main()
