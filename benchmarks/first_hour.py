"""What a newcomer waits for and is told in the first hour.

    python -m benchmarks.first_hour [--quick] [--part start|check|export|alarms|messages|doors|agents|examples]

Seconds are CPU seconds of real processes unless said otherwise, so that they mean the same on a busy machine.

* `start`. `first_byte_s` and `first_byte_cpu_s`: wall and CPU seconds before the first byte of output, the largest of
  `first_byte_commands`. `refusal_cpu_s`: the whole command for a mistake that needs no torch, the largest of
  `refusals`. `prediction_cpu_s`: what predicting a trainer's memory takes beyond imports, the largest of
  `prediction_families`; `predictions_per_run`: how often a start predicts. `first_turn_cpu_s` and
  `first_turn_cpu_s_smollm2`: from the command to the first finished turn.
* `check`. `env_check_cpu_s` of the README's class; `doctor_cpu_s` of SmolLM2-135M.
* `export`. `export_ms_per_episode`: an HTML export of the README's demo, with the default number of episodes, beyond
  imports.
* `alarms`. `early_alarms_found`: the share of planted failures (`early_alarms_planted`) whose alarm comes after one
  step with the cause first; `false_alarms`: those of runs without a failure. `bottleneck_right`: the share of
  `bottleneck_runs` with a known bottleneck that is shown at every refresh after the third turn.
* `messages`: mistakes that are answered with place, cause and remedy, of `messages_tried`.
* `doors`. `programs_trained`: requests that agents of others sent, and whole programs, that are answered, sampled as
  they ask and trained, of `programs_recorded`. `own_settings_wrongly_trained`: those of which a token is trained under
  another distribution than its own, of `own_settings_recorded`; `own_settings_faults_found`, of
  `own_settings_faults_planted`: training at the run's temperature, planted. `agents_at_once`: synchronous agents at
  once, of 64; `stop_seconds`: from SIGTERM to the end of their run while eight calls hang for ever.
  `wheel_steps_failed`: first steps outside a checkout that fail with the built wheel, on the core alone and with all
  packages, of `wheel_steps` (not with `--quick`). `foreign_calls_named`: replies with a call in a form that the run
  does not read that are named, of `foreign_calls_written` in ten forms; `answers_accused`: plain answers that are taken
  for one, of `answers_written`.
* `agents` (on request, it installs packages). `agents_trained`: agents written for other libraries that train
  unmodified and go on after a kill; `agents_tokens_resampled`: tokens that the resumed runs sampled again.
* `examples`. `frozenlake_start`, `frozenlake_end`, `frozenlake_end_median`: held-out reward before and after
  `examples/02_gymnasium.toml`: the largest start, the worst and the median end of three seeds; `frozenlake_s`, the
  longest run, and `scaffold_s` in seconds of wall time. `scaffold_start`, `scaffold_end`: the same for what
  `agentrl env new` writes. `help_cpu_s`, `list_cpu_s`: `agentrl --help`, and `agentrl episode list` over 200 episodes.
  `core_packages`: what the core installs besides agentrl. `config_fields`, `public_names`: how much there
  is to know.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("first_byte_s", "first_byte_cpu_s", "first_byte_commands", "refusal_cpu_s", "refusals"),
    *("prediction_cpu_s", "prediction_families", "predictions_per_run", "first_turn_cpu_s", "first_turn_cpu_s_smollm2"),
    *("env_check_cpu_s", "doctor_cpu_s"),
    "export_ms_per_episode",
    *("early_alarms_found", "early_alarms_planted", "false_alarms", "bottleneck_right", "bottleneck_runs"),
    *("messages", "messages_tried"),
    *("programs_trained", "programs_recorded", "own_settings_wrongly_trained", "own_settings_recorded"),
    *("own_settings_faults_found", "own_settings_faults_planted", "agents_at_once", "stop_seconds"),
    *("wheel_steps_failed", "wheel_steps"),
    *("foreign_calls_named", "foreign_calls_written", "answers_accused", "answers_written"),
    *("agents_trained", "agents_tokens_resampled"),
    *("frozenlake_start", "frozenlake_end", "frozenlake_end_median", "frozenlake_s"),
    *("scaffold_start", "scaffold_end", "scaffold_s", "help_cpu_s", "list_cpu_s"),
    *("core_packages", "config_fields", "public_names"),
)

if __name__ == "__main__":
    run_parts("first_hour", FIGURES, description=__doc__, on_request={"agents"})
