"""Faults that stayed silent are found or named: counts over the test suites that prove it.

    python -m benchmarks.mend [--quick] [--part kinds|mixing|thresholds|tinker]

* `kinds`. `kinds_right`: the share of the kinds of fault in `KINDS` whose tests all pass; `silent`: the other kinds.
* `mixing`. `episodes_mixed_found`, of `episodes_mixed_planted`: environments whose episodes mix, and that
  `agentrl env check` finds; `sound_accused`, of `sound_checked`: sound ones that it accuses.
* `thresholds`. `thresholds_found`, of `thresholds_planted`: models whose forward pass changes at a length, and that the
  check at the start finds.
* `tinker`. `tinker_wait_ratio`: a key's wait beside an attack by another, over its wait beside one equal client; the
  worst of six attacks. `requests_lost`: the key's requests that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from benchmarks import tinker_waiting
from benchmarks.parts import outcomes, run_functions

KINDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "a cut reply": (
        ("tests/unit/test_cut_turns.py", "test_"),
        ("tests/sim/test_truncated_units.py", "test_"),
    ),
    "changed tasks, and held-out tasks that are trained on": (("tests/unit/test_run_tasks.py", "test_"),),
    "tool results apart from their calls": (("tests/unit/test_tool_results.py", "test_"),),
    "alarms of graders outside the main thread": (("tests/unit/test_own_loop.py", "test_"),),
    "blocking calls that hang": (("tests/unit/test_event_loop.py", "test_"),),
    "line breaks in arguments": (
        ("tests/unit/test_reply_formats.py", "test_separators_"),
        ("tests/unit/test_reply_formats.py", "test_python_calls_are_split_only_between_them"),
    ),
    "named chat templates": (("tests/unit/test_named_templates.py", "test_"),),
    "user code that breaks the process": (
        ("tests/unit/test_hostile_environments.py", "test_a_working_directory_that_is_removed_costs_nothing"),
        ("tests/unit/test_hostile_environments.py", "test_a_function_that_an_environment_removes_is_named"),
    ),
    "signals and slow stops": (("tests/unit/test_stops.py", "test_"),),
    "inputs of a step with another digest": (("tests/unit/test_credit_samples.py", "test_a_row_with_another_value"),),
    "kinds of waits": (("tests/sim/test_bottleneck.py", "test_the_time_that_a_rule_holds_groups_back"),),
    "repeated steps, and resumes under other versions": (
        ("tests/unit/test_supervisor.py", "test_each_step_has_its_metrics_once"),
        ("tests/unit/test_supervisor.py", "test_a_resume_says_which_versions_changed"),
        ("tests/unit/test_run_comparison.py", "test_the_seconds_of_all_processes"),
    ),
    "calls shown that were never read": (("tests/unit/test_shown_replies.py", "test_"),),
    "requests that continue another episode": (("tests/unit/test_conversations.py", "test_"),),
    "failures that a reward hides": (("tests/unit/test_failing_calls.py", "test_"),),
    "calls that no tool was offered for": (
        ("tests/unit/test_gateway_protocols.py", "test_a_call_that_no_tool_was_offered_for"),
    ),
    "metrics that an episode does not set": (
        ("tests/sim/test_loop.py", "test_metrics_of_episodes_cover"),
        ("tests/unit/test_evaluation_intervals.py", "test_a_metric_that_an_episode_does_not_set"),
    ),
    "starts that fail": (
        ("tests/unit/test_train_start.py", "test_a_start_that_fails_does_not_block_the_next"),
        ("tests/unit/test_cli.py", "test_a_missing_package_is_named"),
        ("tests/unit/test_cli.py", "test_a_dry_run_refuses_a_model"),
    ),
    "slow bfloat16": (("tests/unit/test_chosen_dtype.py", "test_"),),
    "columns and steps of Tinker clients": (("tests/unit/test_tinker_trainer.py", "test_"),),
    "filters of sampling": (("tests/contract/test_engine_filters.py", "test_"),),
    "keys of a Tinker server": (
        ("tests/e2e/test_tinker_shares.py", "test_"),
        ("tests/unit/test_tinker_shares.py", "test_"),
        ("tests/unit/test_hostile_clients.py", "test_slow_bodies_of_an_episode"),
    ),
    "files and templates that are too large": (
        ("tests/unit/test_reading_weights.py", "test_a_file_that_is_too_large"),
        ("tests/unit/test_hostile_templates.py", "test_"),
    ),
    "commands that grow faster than the run": (("tests/unit/test_growth.py", "test_"),),
    "rewards won by lists": (("tests/unit/test_reward_check.py", "test_"),),
    "losses that change their batch": (("tests/unit/test_user_functions.py", "test_a_loss_that_writes"),),
}
"""The tests of each kind: a file, and the beginning of the tests' names."""
MIXING = "tests/unit/test_check_concurrency.py"
THRESHOLDS = "tests/unit/test_start_thresholds.py"
NAMES = (
    *("kinds_right", "silent", "episodes_mixed_planted", "episodes_mixed_found", "sound_checked", "sound_accused"),
    *("thresholds_planted", "thresholds_found", "tinker_wait_ratio", "requests_lost"),
)
_run = cache(outcomes)


def passed(file: str, test: str) -> list[bool]:
    """Whether each test passed whose name begins so; a test that does not exist has failed."""
    return [passed for name, passed in _run(file).items() if name.startswith(test)] or [False]


def kinds(quick: bool) -> dict[str, float | None]:
    """Run the tests of all kinds."""
    right = {kind: all(all(passed(*test)) for test in tests) for kind, tests in KINDS.items()}
    for kind in [kind for kind, is_right in right.items() if not is_right]:
        print(f"  not right: {kind}", flush=True)
    return {"kinds_right": sum(right.values()) / len(right), "silent": float(list(right.values()).count(False))}


def mixing(quick: bool) -> dict[str, float | None]:
    """Count what the check says of environments whose episodes mix, and of sound ones."""
    planted, sound = passed(MIXING, "test_planted"), passed(MIXING, "test_sound")
    return {
        "episodes_mixed_planted": float(len(planted)),
        "episodes_mixed_found": float(sum(planted)),
        "sound_checked": float(len(sound)),
        "sound_accused": float(sound.count(False)),
    }


def thresholds(quick: bool) -> dict[str, float | None]:
    """Count the planted models that the check at the start finds."""
    planted = passed(THRESHOLDS, "test_planted")
    return {"thresholds_planted": float(len(planted)), "thresholds_found": float(sum(planted))}


PARTS = {
    "kinds": kinds,
    "mixing": mixing,
    "thresholds": thresholds,
    "tinker": tinker_waiting.figures,
}

if __name__ == "__main__":
    run_functions("mend", NAMES, PARTS, description=__doc__)
