"""Losses, distillation, selection, and what kills leave of them.

    python -m benchmarks.learning [--quick] [--part losses|selection|kills]

* `losses`. `oracle_pairs`: losses and advantages of TRL, verl, AReaL and prime-rl that were computed by their own code,
  in float64 over ragged masks, and recorded with version or commit (`learning_trl.json`: what
  `GRPOTrainer._compute_loss` returned for given log-probabilities, and its gradient; `learning_others.json`:
  `benchmarks.learning_record`); value and gradient count as one pair each. `oracle_max_error` is the largest difference
  of ours, relative to the largest entry. `splitting_error`: the largest relative difference of a step's loss and
  gradient norm in float64, between one micro-batch and many, one rank and two, rows as they are and forked (each token
  in a row of its own), over losses that see a whole step and all normalisers. `lines_sapo`: lines of a script that
  trains with its own loss. `user_loss_under_ray`: 1 if a loss that raises does so by name in a rank, one that is right
  trains as in this process, and one patched by hand is refused.
* `selection`. A teacher is trained by RL, then a student that begins where it began is distilled from it.
  `distilled_end`: the student's held-out reward in relation to its teacher's; `distilled_steps_ratio`: the steps that
  RL took to nine tenths of the teacher's reward, by those of distillation. `dynamic_sampling_tokens_to_reward`: tokens
  sampled until RL with dynamic sampling gets there, and `plain_tokens_to_reward` without it.
* `kills`. `ledger_errors` over `kills` of a run with dynamic sampling, task selection and a reference (SIGKILL of the
  run, its engine or a worker), with what else the two oracles of `benchmarks.chaos` found: `lost`, `twice`,
  `violations`, and runs that did not go on (`bricked`).
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("oracle_pairs", "oracle_max_error", "splitting_error", "lines_sapo", "user_loss_under_ray"),
    *("distilled_end", "distilled_steps_ratio", "dynamic_sampling_tokens_to_reward", "plain_tokens_to_reward"),
    *("kills", "ledger_errors", "lost", "twice", "violations", "bricked"),
)

if __name__ == "__main__":
    run_parts("learning", FIGURES, description=__doc__, apart={"record", "sapo"})
