"""Faults that stayed silent are found or named: counts over the test suites that prove it.

    python -m benchmarks.mend [--quick] [--part kinds|planted]

* `kinds`. `kinds_right`: the share of the kinds of fault in `KINDS` whose tests all pass; `silent`: the other kinds.
* `planted`. For each row of `PLANTED`, the faults that were planted and found: environments whose episodes mix, models
  whose forward pass changes at a length, and runs that need an alarm. For each row of `SOUND`, the sound environments
  or runs that were checked, and those that were accused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

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
        ("tests/unit/test_imports.py", "test_a_missing_package_is_named"),
        ("tests/unit/test_cli.py", "test_a_dry_run_refuses_a_model"),
    ),
    "slow bfloat16": (("tests/unit/test_chosen_dtype.py", "test_"),),
    "columns and steps of Tinker clients": (("packages/tinker/tests/test_tinker_trainer.py", "test_"),),
    "filters of sampling": (("tests/contract/test_engine_filters.py", "test_"),),
    "slow bodies of an agent": (("tests/unit/test_hostile_clients.py", "test_slow_bodies_of_an_episode"),),
    "files and templates that are too large": (
        ("tests/unit/test_reading_weights.py", "test_a_file_that_is_too_large"),
        ("tests/unit/test_hostile_templates.py", "test_"),
    ),
    "commands that grow faster than the run": (("tests/unit/test_growth.py", "test_"),),
    "rewards won by lists": (("tests/unit/test_reward_check.py", "test_"),),
    "losses that change their batch": (("tests/unit/test_user_functions.py", "test_a_loss_that_writes"),),
    "replies that were not sampled": (("tests/unit/test_written_replies.py", "test_"),),
    "imitated runs": (
        ("tests/learning/test_imitation.py", "test_turns_that_were_cut_are_context"),
        ("tests/learning/test_imitation.py", "test_one_of_several_rewarded_seats_is_imitated"),
        ("tests/learning/test_imitation.py", "test_an_unrewarded_seat_is_not_imitated"),
    ),
    "odd numbers and names in rewards and credit": (("tests/unit/test_rewards.py", "test_"),),
    "replies of an endpoint": (("tests/e2e/test_evaluate.py", "test_the_reply_of_an_endpoint"),),
    "memory of contexts": (
        ("tests/unit/test_memory_plan.py", "test_no_context_needs_less"),
        ("tests/unit/test_memory_plan.py", "test_contexts_take_memory"),
    ),
    "steps and resumes without a word": (
        ("tests/unit/test_observe.py", "test_a_later_step"),
        ("tests/unit/test_plan.py", "test_a_resume_with_more_steps"),
        ("tests/unit/test_cli.py", "test_a_dry_run_refuses_a_name"),
        ("tests/unit/test_recorded_run.py", "test_records_of_a_closed_run"),
        ("tests/unit/test_viewer_server.py", "test_a_port_that_is_taken"),
    ),
    "odd numbers of received runs": (
        ("tests/unit/test_run_comparison.py", "test_rewards_that_no_run_records"),
        ("tests/unit/test_run_comparison.py", "test_metrics_beyond_all_measure"),
        ("tests/unit/test_inspection_ledger.py", "test_an_attempt_below_the_first"),
    ),
    "marks in arguments": (
        ("tests/unit/test_reply_formats.py", "test_a_mark_in_an_argument_is_text"),
        ("tests/unit/test_reply_formats.py", "test_no_text_in_an_argument_runs_a_call"),
    ),
    "code that was edited after its import": (("tests/unit/test_imported_code.py", "test_"),),
    "one seat that cheats": (
        ("tests/unit/test_check_format.py", "test_one_seat_breaks_the_format"),
        ("tests/unit/test_reward_check.py", "test_planted[HintToList]"),
    ),
    "credit and losses that are not as written": (
        ("tests/sim/test_loop.py", "test_a_constant_normalizer"),
        ("tests/sim/test_selection.py", "test_groups_too_small_for_k"),
        ("tests/unit/test_credit_advantages.py", "test_rewards_to_go_tie"),
    ),
    "signals of forked children": (("tests/unit/test_forked_signals.py", "test_"),),
    "loops that retry every error": (("tests/sim/test_time_limit.py", "test_a_retry_loop"),),
    "columns of steps after a power cut": (
        ("tests/unit/test_learn_trainer.py", "test_a_checkpoint_syncs_the_columns"),
    ),
}
"""The tests of each kind: a file, and the beginning of the tests' names."""
PLANTED = {
    "episodes_mixed": ("tests/unit/test_check_concurrency.py", "test_planted"),
    "thresholds": ("tests/unit/test_start_thresholds.py", "test_planted"),
    "alarms": ("tests/unit/test_alarm_runs.py", "test_each_alarm_has_a_run_that_raises_it"),
}
SOUND = {
    "sound": ("tests/unit/test_check_concurrency.py", "test_sound"),
    "runs": ("tests/unit/test_alarm_runs.py", "test_a_sound_run_raises_none"),
}
NAMES = (
    *("kinds_right", "silent", "episodes_mixed_planted", "episodes_mixed_found", "thresholds_planted"),
    *("thresholds_found", "alarms_planted", "alarms_found", "sound_checked", "sound_accused", "runs_checked"),
    "runs_accused",
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


def planted(quick: bool) -> dict[str, float | None]:
    """Count what is found of the planted faults, and accused of what is sound."""
    figures: dict[str, float | None] = {}
    for name, test in PLANTED.items():
        found = passed(*test)
        figures |= {f"{name}_planted": float(len(found)), f"{name}_found": float(sum(found))}
    for name, test in SOUND.items():
        sound = passed(*test)
        figures |= {f"{name}_checked": float(len(sound)), f"{name}_accused": float(sound.count(False))}
    return figures


if __name__ == "__main__":
    run_functions("mend", NAMES, {"kinds": kinds, "planted": planted}, description=__doc__)
