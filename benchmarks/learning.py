"""Losses, distillation and selection.

    python -m benchmarks.learning [--quick] [--part losses|credit|selection]

* `losses`. `oracle_pairs`: losses and advantages of TRL, verl, AReaL and prime-rl that were computed by their own code,
  in float64 over ragged masks, and recorded with version or commit (`learning_trl.json`: what
  `GRPOTrainer._compute_loss` returned for given log-probabilities, and its gradient; `learning_others.json`:
  `benchmarks.learning_record`); value and gradient count as one pair each. `oracle_max_error` is the largest difference
  of ours, relative to the largest entry. `splitting_error`: the largest relative difference of a step's loss and
  gradient norm in float64, between one micro-batch and many, one rank and two, rows as they are and forked (each token
  in a row of its own), over losses that see a whole step and all normalizers. `lines_sapo`: lines of a script that
  trains with its own loss. `user_loss_under_ray`: 1 if a loss that raises does so by name in a rank, one that is right
  trains as in this process, and one patched by hand is refused.
* `credit`. `dpo_ties_paired`: pairs of conversations of equal reward, of 20 to 6,000 tokens, that `dpo` compares.
  `role_mean_ratio`: E[g] over the true gradient in an event simulation of asynchronous training with a fixed policy,
  reward and length tied; of S = 1 and 4, 16 and 64 units per step, equal and unequal lengths, the ratio farthest
  from 1. `pass_at_k_ratio`: the same for `pass_at_k`, by enumeration, with one and two agents of a seat per episode,
  and its distance from 1, `pass_at_k_error`. `enumeration_max_error`: the largest relative error of the expected
  gradient of `enumeration_cases` programs, with every outcome forced through the whole loop
  (`tests/sim/test_enumeration.py`); `enumeration_planted_error`: the smallest of those that go on after
  `ctx.roulette` stopped them. `roulette_refusals`: the share of estimators and scorers that are refused with roulette
  exactly if enumeration finds a bias.
  `role_mean_variance_ratio`: in the same simulation, the variance of score times advantage over that with the mean
  reward as the baseline, the largest. `sequence_losses_off_policy_error`: by enumeration off policy, the largest change
  that branches make in the expected gradient of a loss that a run with branches accepts, over all built-in losses and
  the groupings that their options select (`tests.branch_losses`); the others are refused (`sequence_losses_refused`),
  and `_control` is the smallest change among those.
  `sharded_over_unsharded`: how far three steps, the second without signal, move the weights of two ranks that hold
  shards over those of one rank; `moved_without_signal`: how far that second step moves any. The figures that end in
  `_control` are those of the rules that these replaced.
* `selection`. A teacher is trained by RL, then a student that begins where it began is distilled from it.
  `distilled_end`: the student's held-out reward in relation to its teacher's; `distilled_steps_ratio`: the steps that
  RL took to nine tenths of the teacher's reward, by those of distillation. `dynamic_sampling_tokens_to_reward`: tokens
  sampled until RL with dynamic sampling gets there, and `plain_tokens_to_reward` without it.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("oracle_pairs", "oracle_max_error", "splitting_error", "lines_sapo", "user_loss_under_ray"),
    *(
        "dpo_ties_paired",
        "role_mean_ratio",
        "role_mean_variance_ratio",
        *("sequence_losses_off_policy_error", "sequence_losses_accepted", "sequence_losses_refused"),
        "pass_at_k_ratio",
        "pass_at_k_error",
        "sharded_over_unsharded",
        "moved_without_signal",
    ),
    *("enumeration_cases", "enumeration_max_error", "enumeration_planted_error", "roulette_refusals"),
    *(
        "dpo_ties_paired_control",
        "role_mean_ratio_control",
        "role_mean_variance_ratio_control",
        "sequence_losses_off_policy_error_control",
        "pass_at_k_ratio_control",
    ),
    *("distilled_end", "distilled_steps_ratio", "dynamic_sampling_tokens_to_reward", "plain_tokens_to_reward"),
)

if __name__ == "__main__":
    run_parts("learning", FIGURES, description=__doc__, apart={"record", "sapo"})
