"""Metrics with stable names, units and meanings.

Most names have the form `group/what`; a few are one word. Values are finite numbers; values that could not be measured
are left out. Metrics of one policy are recorded at that policy's step.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A metric's name, unit and meaning; `<…>` at the end of the name stands for any word."""

    name: str
    unit: str
    meaning: str


SCORES_EXPOSED = "scores/exposed_s"
SCORE_REQUESTS = "scores/requests/"
"""Prefix of the metric of a scorer's requests."""
SCORE_TOKENS = "scores/tokens/"
"""Prefix of the metric of the tokens that models computed for a scorer."""

METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean reward of the units the step consumed"),
    Metric("reward/<seat>", "reward", "`reward/mean` of the agents of one seat, if there are several seats"),
    Metric("mixture/reward/<environment>", "reward", "`reward/mean` of the units from one environment of a mixture"),
    Metric("mixture/share/<environment>", "fraction", "share of the step's units from one environment of a mixture"),
    Metric(
        "named_reward/<name>",
        "reward",
        "mean reward of this name per agent of the step's units, before its weight; `reward` is that of rewards "
        "without a name",
    ),
    Metric(
        "reward_agreement/<name>",
        "fraction",
        "share of the step's pairs of conversations that this named reward orders as `reward` does, among pairs with "
        "different `reward`; ½ is chance (docs/scores.md)",
    ),
    Metric(
        "score_spread/<name>",
        "reward",
        "standard deviation of a conversation's score over the votes of a judge of groups; mean over the groups "
        "scored during the step",
    ),
    Metric(
        "evaluation/reward",
        "reward",
        "mean reward of the policy over held-out tasks, at a pinned version. A task's reward is the mean over the "
        "episodes in which the policy acted, including children; in `agentrl.evaluate`, the sum over its agents",
    ),
    Metric(
        "evaluation/reward/<seat>",
        "reward",
        "`evaluation/reward` per agent of one seat, if the policy holds several; in `agentrl.evaluate` with "
        "several policies: `<policy>` and `<policy>/<seat>`",
    ),
    Metric(
        "evaluation/named_reward/<name>",
        "reward",
        "`named_reward/<name>` on held-out tasks; in `agentrl.evaluate` with several policies: `<policy>/<name>`",
    ),
    Metric("evaluation/reward_deviation", "reward", "standard deviation of the held-out rewards over episodes"),
    Metric("evaluation/reward_error", "reward", "half the 95% interval of `evaluation/reward`, over tasks"),
    Metric(
        "evaluation/pass_at/<k>",
        "fraction",
        "probability that at least one of k attempts (`evaluation.attempts`) is solved, over tasks. Solved: every "
        "rewarded agent of the policy, or of all policies, gets 1 or more",
    ),
    Metric("evaluation/pass_at_error/<k>", "fraction", "half the 95% interval of that value, over tasks"),
    Metric(
        "evaluation/metric/<name>",
        "value",
        "an environment's `ctx.metric`: mean over the episodes that set it, by task",
    ),
    Metric("evaluation/metric_error/<name>", "value", "half the 95% interval of that value, over tasks"),
    Metric("evaluation/split_reward/<split>", "reward", "`evaluation/reward` on one of several splits"),
    Metric("evaluation/split_reward_error/<split>", "reward", "half the 95% interval of that value, over tasks"),
    Metric("evaluation/split_pass_at/<split>/<k>", "fraction", "pass@k on one of several splits"),
    Metric("evaluation/split_pass_at_error/<split>/<k>", "fraction", "half the 95% interval of that value, over tasks"),
    Metric("evaluation/turns", "turns", "mean turns of held-out episodes"),
    Metric("evaluation/tokens", "tokens", "mean sampled tokens of held-out episodes"),
    Metric("evaluation/episodes", "episodes", "committed held-out episodes"),
    Metric(
        "evaluation/dropped",
        "episodes",
        "dropped held-out episodes, including children; no other metric counts them",
    ),
    Metric("evaluation/tasks", "tasks", "held-out tasks of an evaluation during a run"),
    Metric("evaluation/seconds", "s", "duration of an evaluation during a run"),
    Metric(
        "evaluation/engine_busy_share",
        "fraction",
        "share of the evaluation's time that the engine spent in forward passes",
    ),
    Metric(
        "staleness/mean",
        "steps",
        "mean staleness of the step's units: current step minus the step of their oldest sampling weights",
    ),
    Metric("staleness/max", "steps", "largest staleness of the step's units"),
    Metric(
        "staleness/exceeded",
        "trajectories",
        "trajectories beyond `max_lag` that began since the last resume; should be 0",
    ),
    Metric("staleness/before_resume", "trajectories", "trajectories that began before the last resume, if any"),
    Metric(
        "advantage/zero_share",
        "fraction",
        "share of the step's units whose advantages are all 0, which teach nothing",
    ),
    Metric(
        "advantage/alone_share",
        "fraction",
        "share of the step's units without another episode to compare with, as after `ctx.spawn` with n=1",
    ),
    Metric(
        "advantage/repeated_state_share",
        "fraction",
        "with `gigpo`: share of turns, in groups that ended during the step, whose anchor state recurs in their group "
        "and seat; the others get their episode's advantage",
    ),
    Metric("step/units", "units", "units the step consumed"),
    Metric("step/tokens", "tokens", "sampled tokens the step trained on"),
    Metric("step/seconds", "s", "wall time since the policy's previous step"),
    Metric("step/waited_s", "s", "time that the trainer waited for the step's units"),
    Metric("run/seconds", "s", "wall time since training began"),
    Metric("run/lineage", "lineages", "lineage of the step's version, which increases with each resume"),
    Metric("run/code_changes", "changes", "resumes after which the environment code had changed"),
    Metric("engine/busy_share", "fraction", "share of the step's wall time the engine spent in forward passes"),
    Metric("trainer/busy_share", "fraction", "share of the step's wall time the trainer was busy"),
    Metric(
        "tokens/sampled_per_s",
        "tokens/s",
        "sampled tokens of all policies per second, from the episodes that ended since the previous step; absent if "
        "none ended",
    ),
    Metric("episodes/per_s", "episodes/s", "episodes that ended during the step"),
    Metric(
        "episodes/turns",
        "turns",
        "mean turns of the policy in the committed episodes of the step in which it acted",
    ),
    Metric("episodes/in_flight", "episodes", "admitted episodes that have not ended"),
    Metric("episodes/ready", "episodes", "committed episodes that wait to be trained on"),
    Metric("episodes/trained", "episodes", "episodes trained on since the run began"),
    Metric("episodes/dropped", "episodes", "episodes dropped since the run began"),
    Metric(
        "episodes/timed_out",
        "fraction",
        "share of the episodes since the policy's last step that `episode_timeout_s` truncated or dropped; absent if "
        "none",
    ),
    Metric("episodes/superseded", "episodes", "ignored ends: reported twice, or of a replaced attempt"),
    Metric("episodes/tokens", "tokens", "mean sampled tokens of the policy in the episodes of `episodes/turns`"),
    Metric(
        "tool/<outcome>",
        "calls",
        "tool calls per episode, by outcome (ok, error, timeout, bad_arguments, unknown_tool)",
    ),
    Metric("turns/length", "turns", "turns per episode that were cut by max_tokens"),
    Metric(
        "turns/interrupted",
        "turns",
        "turns per episode that took more than one engine call because of an interruption",
    ),
    Metric(
        SCORES_EXPOSED,
        "s",
        "seconds per episode between the end of its program and its last score: the part of scoring that sampling does "
        "not hide (docs/scores.md)",
    ),
    Metric(
        "scores/requests/<name>",
        "requests",
        "calls of a scorer's function or model per episode, including votes and retries, without scorers of groups "
        "(docs/scores.md)",
    ),
    Metric("scores/tokens/<name>", "tokens", "tokens that models computed for a scorer, per episode"),
    Metric("parked", "times", "times an episode was parked, per episode"),
    Metric("no_room_s", "s", "seconds per episode that turns waited for KV memory (docs/scheduling.md)"),
    Metric("turns/illegal", "turns", "turns per episode that the environment counted as unreadable"),
    Metric(
        "turns/demonstrated",
        "turns",
        "turns per episode with a reply from the environment (`agent.act(reply=…)`); k3 then tells how likely these "
        "replies are",
    ),
    Metric("history/<cause>", "turns", "turns per episode before which the chat template rewrites earlier messages"),
    Metric(
        "drift/<cause>", "turns", "turns per episode whose sampled tokens the chat template would tokenize differently"
    ),
    Metric(
        "win_rate/<policy>", "fraction", "share of games won against this policy of kind `past`; a draw counts half"
    ),
    Metric("games/<policy>", "episodes", "games against this policy of kind `past`"),
    Metric("episodes/decided", "episodes", "decided games: one seat's reward was above 0, another's below"),
    Metric("won/<seat>", "fraction", "share of decided games in which this seat had the highest reward"),
    Metric("format/episodes", "episodes", "episodes covered by the other `format/` metrics of the step"),
    Metric(
        "format/broken_turns",
        "fraction",
        "share of the policy's turns that broke the format: cut, illegal, or with a call that matches no tool",
    ),
    Metric("format/broken_share", "fraction", "share of episodes with a turn that broke the format"),
    Metric("format/reward_broken", "reward", "mean reward of the episodes with a turn that broke the format"),
    Metric("format/reward_kept", "reward", "mean reward of the episodes without such a turn"),
    Metric(
        "advantage/variance_ratio",
        "1",
        "with credit.release = 'late' or 'episode': mean square of the advantages of newly completed groups, divided "
        "by that of leave-one-out over the same groups (docs/scheduling.md)",
    ),
    Metric(
        "selection_bias/length_ratio",
        "1",
        "mean tokens of the trained units divided by the mean of all units, over the newest 20 steps' worth of units "
        "that were all trained or dropped (docs/scheduling.md)",
    ),
    Metric("selection_bias/seconds_ratio", "1", "`selection_bias/length_ratio` for the duration of episodes"),
    Metric(
        "selection_bias/reward_shift",
        "deviations",
        "mean reward of the groups of the trained units minus that of all units, in standard deviations; above 0: the "
        "trained tasks are easier",
    ),
    Metric(
        "selection_bias/held_share",
        "fraction",
        "share of dispatched units that were neither trained nor dropped when 20 steps' worth of later units had been",
    ),
    Metric("selection_bias/overtaken", "steps", "steps' worth of units that overtook the step's most delayed unit"),
    Metric("gate/acceptance", "fraction", "share of `agent.gate` calls that accepted"),
    Metric("proposals/made", "proposals", "calls of `ctx.remember` since the policy's previous step"),
    Metric("proposals/repeated", "fraction", "share of proposals that the run already remembered"),
    Metric(
        "proposals/structure_entropy", "nats", "entropy of the structures of the newest 100 proposals that have one"
    ),
    Metric(
        "groups/no_signal",
        "groups",
        "groups dropped since the policy's last step because their advantages were all 0 (`credit.dynamic_sampling`)",
    ),
    Metric("pass_rate/groups", "groups", "ended groups of child episodes with rewards between 0 and 1"),
    Metric("pass_rate/frontier", "fraction", "share of these groups with a mean reward p from 0.2 to 0.8"),
    Metric("pass_rate/<range>", "fraction", "share of these groups with p in this range; 0 and 1 have their own bins"),
    Metric("step", "steps", "optimizer steps the policy has taken"),
    Metric("loss", "1", "loss of the step"),
    Metric("grad_norm", "1", "norm of the gradient before clipping"),
    Metric(
        "zero_gradient",
        "steps",
        "1 if the gradient was exactly 0, so that weights and optimizer state did not change; else 0",
    ),
    Metric("learning_rate", "1", "learning rate of the step"),
    Metric("entropy", "nats", "mean entropy of the processed distribution per measured token"),
    Metric(
        "value/loss",
        "1",
        "with `gae`: sum of 0.5 A² over the trained tokens, with the weights of the policy's loss",
    ),
    Metric(
        "value/explained_variance",
        "1",
        "1 - Var(return - value) / Var(return) over the trained tokens; 1: values predict the returns, 0: no better "
        "than a constant; absent if all returns are equal",
    ),
    Metric("kept_mass", "fraction", "mean probability of the kept set under the trainer's full distribution"),
    Metric(
        "k3",
        "nats",
        "k3 estimate of KL(behavior || trainer) over the measured tokens; includes staleness and engine mismatch",
    ),
    Metric(
        "mismatch/k3",
        "nats",
        "k3 over rows sampled by exactly the trained weights: the mismatch of engine and trainer alone",
    ),
    Metric("mismatch/difference", "nats", "mean |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"),
    Metric(
        "mismatch/max_difference", "nats", "largest |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"
    ),
    Metric("mismatch/tokens", "tokens", "trained tokens of the rows of `mismatch/k3`"),
    Metric("seat_k3/<seat>", "nats", "k3 over the tokens of one seat, if the policy holds several"),
    Metric("lag_k3/<lag>", "nats", "k3 over the tokens with this lag in steps (0, 1, 2, 3, 4+)"),
    Metric(
        "lag_difference/<lag>", "nats", "mean |trainer logprob - behavior logprob| over the tokens of `lag_k3/<lag>`"
    ),
    Metric(
        "lag_max_difference/<lag>",
        "nats",
        "largest |trainer logprob - behavior logprob| over the tokens of `lag_k3/<lag>`",
    ),
    Metric(
        "lag_tokens/<lag>",
        "tokens",
        "number of tokens of `lag_k3/<lag>`; tokens of an earlier lineage have lag 1 or more",
    ),
    Metric("unrouted_share", "fraction", "share of forwarded tokens without recorded experts, if routing is replayed"),
    Metric("abs_logprob_difference", "nats", "mean |trainer logprob - behavior logprob|"),
    Metric("mean_ratio", "1", "mean importance ratio, trainer / behavior"),
    Metric(
        "masked_fraction",
        "fraction",
        "share of trained tokens without gradient because of the trust region or the clip",
    ),
    Metric("truncated_fraction", "fraction", "share of trained tokens whose weight is below their importance ratio"),
    Metric("effective_sample_fraction", "fraction", "(sum of ratios)^2 / (n * sum of squared ratios)"),
    Metric("reference_kl", "nats", "mean of log pi - log ref over the trained tokens"),
    Metric("skipped_samples", "rows", "rows whose advantages are all 0, consumed without a gradient"),
    Metric("forwarded_tokens", "tokens", "tokens that the trainer passed through the model"),
    Metric("sharing", "1", "row tokens per forwarded token, the saving from shared prefixes"),
    Metric("shares_prefixes", "1", "1 if shared prefixes of rows are computed once; the run's start says why not"),
)

BROKEN_FORMAT = ("tool/bad_arguments", "tool/unknown_tool", "turns/length", "turns/illegal")
"""Episode metrics whose sum is the number of turns or calls that broke the format."""

DEMONSTRATED = "turns/demonstrated"
"""Episode metric that counts the turns whose reply the environment gave."""

PASS_RATES = ("0", "0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1", "1")
"""Ranges of the mean reward of groups of child episodes, from none solved to all solved."""
FRONTIER = ("0.2-0.4", "0.4-0.6", "0.6-0.8")
"""Ranges of the pass rate that teach the most, including both ends."""

GATE_PASSED, GATE_REFUSED = "gate/passed", "gate/refused"
"""Episode metrics that count the answers of `agent.gate`."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def find_registered_metric(name: str) -> Metric | None:
    """Return the metric registered under a name; None if there is none (an environment's own `ctx.metric`).

    Example:
        >>> find_registered_metric("staleness/max").unit
        'steps'
        >>> find_registered_metric("reward/solver").name
        'reward/<seat>'
    """
    registered_metric = _BY_NAME.get(name)
    if registered_metric is not None:
        return registered_metric
    return next((metric for metric in METRICS if "<" in metric.name and name.startswith(_before_word(metric))), None)


def _before_word(metric: Metric) -> str:
    return metric.name.partition("<")[0]
