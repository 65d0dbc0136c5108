"""What the journal pays for: rewards that are attacked before training, and episodes that are trained again.

    python -m benchmarks.journal [--quick] [--part rewards|reuse]

* `rewards`. `planted_rewards_found`, of `planted_rewards`: environments whose reward training would break, and that
  `agentrl env check` finds; `sound_accused`, of `sound_rewards`: sound ones that it accuses, the bundled environments
  among them.
* `reuse`. Slow tools, and a trainer that waits for them: what it gains by training each episode in K steps that are K
  times smaller. `reuse_K_over_once`: seconds to a mean reward of .9, over a run that trains each episode once;
  `reuse_K_over_small_steps`: over such a run whose steps are as small; `…_high_rate`, `…_highest_rate`: at four and
  eight times the learning rate; medians of five seeds in virtual time. `whole_steps_reuse_over_once`: if the new
  episodes of a step are as many as without reuse.
  `reuse_4_over_once_same_rate`: for K = 4, with a quarter of the learning rate. `busy_trainer_reuse_over_once`, the
  control: K = 2 in lockstep, where the trainer has no time to spare. `real_…`: the calculator, until the episodes that
  begin reach a mean reward of .85 and .9; not in `--quick`.
"""

from __future__ import annotations

from benchmarks import journal_reuse
from benchmarks.parts import outcomes, run_functions

FIGURES = (
    *("planted_rewards_found", "planted_rewards", "sound_accused", "sound_rewards"),
    *journal_reuse.FIGURES,
)


def rewards(quick: bool) -> dict[str, float | None]:
    if quick:  # forty environments take a minute by themselves
        return dict.fromkeys(("planted_rewards_found", "planted_rewards", "sound_accused", "sound_rewards"))
    passed = outcomes("tests/unit/test_reward_check.py")
    planted, sound = (
        [each for name, each in passed.items() if name.startswith(start)] for start in ("test_planted", "test_sound")
    )
    return {
        "planted_rewards_found": float(sum(planted)),
        "planted_rewards": float(len(planted)),
        "sound_accused": float(sound.count(False)),
        "sound_rewards": float(len(sound)),
    }


if __name__ == "__main__":
    functions = {
        "rewards": rewards,
        "reuse": journal_reuse.figures,
    }
    run_functions("journal", FIGURES, functions, description=__doc__)
