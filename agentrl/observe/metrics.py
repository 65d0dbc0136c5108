"""Metrics with stable names, units and meanings.

A name has the form `group/what`, or one word for values that the trainer measures on a step's tokens. Values are finite
numbers; values that could not be measured are left out. Metrics of one policy are recorded at that policy's step.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A metric's name, unit and meaning; `<…>` at the end of the name stands for any word."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean reward of the units the step consumed"),
    Metric("reward/<seat>", "reward", "the same for the agents of one seat, where there are several"),
    Metric("mixture/reward/<environment>", "reward", "`reward/mean` of the units from one environment of a mixture"),
    Metric("mixture/share/<environment>", "fraction", "share of the step's units that came from it"),
    Metric(
        "named_reward/<name>",
        "reward",
        "mean of what an agent of these units was given under one name, before its weight, where rewards have names; "
        "`reward`: those without one, weighted where an agent has no other",
    ),
    Metric(
        "evaluation/reward",
        "reward",
        "mean reward of the policy over held-out tasks at a pinned version; a task's is the mean over the episodes it "
        "acted in, children too; of `agentrl.evaluate`: what the agents of a task get together",
    ),
    Metric(
        "evaluation/reward/<seat>",
        "reward",
        "`evaluation/reward` per agent of one seat, if the policy holds several; of `agentrl.evaluate`, if several "
        "policies play: `<policy>` and `<policy>/<seat>`",
    ),
    Metric(
        "evaluation/named_reward/<name>",
        "reward",
        "`named_reward/<name>` on held-out tasks; of `agentrl.evaluate`, if several policies play: `<policy>/<name>`",
    ),
    Metric(
        "evaluation/reward_deviation",
        "reward",
        "standard deviation of the policy's held-out rewards over episodes; 0: nothing distinguishes any two of them",
    ),
    Metric(
        "evaluation/reward_error", "reward", "half the width of the 95 % interval of `evaluation/reward`, over tasks"
    ),
    Metric(
        "evaluation/pass_at/<k>",
        "fraction",
        "pass@k over tasks: the chance that one of k attempts gets a reward of 1 or more (`evaluation.attempts`)",
    ),
    Metric("evaluation/pass_at_error/<k>", "fraction", "half the width of its 95 % interval, over tasks"),
    Metric("evaluation/split_reward/<split>", "reward", "`evaluation/reward` on one of several splits"),
    Metric("evaluation/split_reward_error/<split>", "reward", "half the width of its 95 % interval, over tasks"),
    Metric("evaluation/split_pass_at/<split>/<k>", "fraction", "pass@k on one of several splits"),
    Metric("evaluation/split_pass_at_error/<split>/<k>", "fraction", "half the width of its 95 % interval, over tasks"),
    Metric("evaluation/turns", "turns", "mean turns of held-out episodes"),
    Metric("evaluation/tokens", "tokens", "mean sampled tokens of held-out episodes"),
    Metric("evaluation/episodes", "episodes", "held-out episodes that were committed"),
    Metric(
        "evaluation/dropped",
        "episodes",
        "held-out episodes that were dropped, including children; no other figure counts them",
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
        "mean staleness of the step's units: current step minus the step of the oldest weights that sampled them",
    ),
    Metric("staleness/max", "steps", "largest staleness of the step's units"),
    Metric(
        "staleness/exceeded",
        "trajectories",
        "trajectories of the step that began in this attempt of the run and exceed `max_lag`, if set; should be 0",
    ),
    Metric("advantage/zero_share", "fraction", "units of the step whose advantages are all 0: they taught nothing"),
    Metric(
        "advantage/alone_share",
        "fraction",
        "units of the step that had no other episode to be compared with, as after `ctx.spawn` with n=1",
    ),
    Metric("step/units", "units", "units the step consumed"),
    Metric("step/tokens", "tokens", "sampled tokens the step trained on"),
    Metric("step/seconds", "s", "wall time since the policy's previous step"),
    Metric("step/waited_s", "s", "time that the trainer waited for the step's units"),
    Metric("run/seconds", "s", "wall time since training began"),
    Metric("run/lineage", "lineages", "lineage of the step's version; it grows when the run is resumed"),
    Metric("run/code_changes", "changes", "resumes so far that met changed environment code"),
    Metric("engine/busy_share", "fraction", "share of the step's wall time the engine spent in forward passes"),
    Metric("trainer/busy_share", "fraction", "share of the step's wall time the trainer was busy"),
    Metric(
        "tokens/sampled_per_s",
        "tokens/s",
        "sampled tokens, of all policies, of the episodes that ended since the previous step, per second since then; "
        "absent if none has ended; the next step then covers both",
    ),
    Metric("episodes/per_s", "episodes/s", "episodes that ended during the step"),
    Metric(
        "episodes/turns",
        "turns",
        "mean turns of the policy in the committed episodes it acted in, of those that ended during the step",
    ),
    Metric("episodes/in_flight", "episodes", "admitted and not ended"),
    Metric("episodes/ready", "episodes", "committed and waiting to be trained"),
    Metric("episodes/trained", "episodes", "trained since the run began"),
    Metric("episodes/dropped", "episodes", "dropped since the run began, whatever the reason"),
    Metric("episodes/superseded", "episodes", "ends reported twice, or of an attempt that another replaced: ignored"),
    Metric("episodes/tokens", "tokens", "mean tokens the policy sampled in the episodes of `episodes/turns`"),
    Metric(
        "tool/<outcome>",
        "calls",
        "per episode: tool calls by outcome (ok, error, timeout, bad_arguments, unknown_tool)",
    ),
    Metric("turns/length", "turns", "per episode: turns cut by max_tokens"),
    Metric(
        "turns/interrupted", "turns", "per episode: turns that were interrupted, and so took more than one engine call"
    ),
    Metric("parked", "times", "per episode: number of times it was parked"),
    Metric(
        "no_room_s",
        "s",
        "per episode: how long its turns waited for room in the engine's memory for keys and values "
        "(docs/scheduling.md)",
    ),
    Metric("turns/illegal", "turns", "per episode: turns that the environment itself counted as unreadable"),
    Metric("win_rate/<policy>", "fraction", "wins against this policy of kind `past`; draws count half"),
    Metric("games/<policy>", "episodes", "games against this policy of kind `past`"),
    Metric("episodes/decided", "episodes", "games: one seat's reward was above 0, another's below"),
    Metric("won/<seat>", "fraction", "decided games in which this seat had the largest reward"),
    Metric("format/episodes", "episodes", "episodes that the other `format/` figures of the step cover"),
    Metric(
        "format/broken_turns",
        "fraction",
        "turns of the policy that broke the format: cut, illegal, or with a call that fits no tool",
    ),
    Metric("format/broken_share", "fraction", "episodes with such a turn"),
    Metric("format/reward_broken", "reward", "mean reward of the episodes with such a turn"),
    Metric("format/reward_kept", "reward", "mean reward of the episodes without one"),
    Metric(
        "episodes/timed_out",
        "fraction",
        "of the episodes that ended since the policy's last step, those ended by `episode_timeout_s`: truncated or "
        "dropped; absent where none was",
    ),
    Metric(
        "advantage/variance_ratio",
        "1",
        "with credit.release = 'late' or 'episode': mean square of the advantages of groups completed since the "
        "policy's last step, over that of leave-one-out over the same whole groups: what training before a group is "
        "complete costs in variance (docs/scheduling.md)",
    ),
    Metric(
        "selection_bias/length_ratio",
        "1",
        "mean tokens of the trained units over those of all, in the order of dispatch: the newest groups of which all "
        "were trained or dropped, 20 steps' worth of units (docs/scheduling.md)",
    ),
    Metric(
        "selection_bias/seconds_ratio",
        "1",
        "`selection_bias/length_ratio` for the duration of episodes instead of tokens",
    ),
    Metric(
        "selection_bias/reward_shift",
        "deviations",
        "mean reward of the groups of the trained units minus that of all, over its standard deviation: above 0, what "
        "is trained is easier",
    ),
    Metric(
        "selection_bias/held_share",
        "fraction",
        "of these units, those neither trained nor dropped when 20 steps' worth of later ones had been",
    ),
    Metric(
        "selection_bias/overtaken",
        "steps",
        "the most that a unit of the step was trained after its turn in the order of dispatch",
    ),
    Metric("gate/acceptance", "fraction", "share of `agent.gate` calls that accepted"),
    Metric("proposals/made", "proposals", "passed to `ctx.remember` since the policy's previous step"),
    Metric("proposals/repeated", "fraction", "share of proposals that the run remembered already"),
    Metric(
        "proposals/structure_entropy", "nats", "entropy of the structures of the newest 100 proposals that have one"
    ),
    Metric(
        "groups/no_signal",
        "groups",
        "groups dropped since the policy's last step because their advantages were all 0 (`credit.dynamic_sampling`)",
    ),
    Metric("pass_rate/groups", "groups", "groups of child episodes that ended, their rewards between 0 and 1"),
    Metric("pass_rate/frontier", "fraction", "share of these groups with a mean reward p from 0.2 to 0.8"),
    Metric(
        "pass_rate/<range>",
        "fraction",
        "share of these groups with p in this range: a histogram of p, with bins of their own for 0 and 1",
    ),
    Metric("history/<cause>", "turns", "per episode: turns before which the chat template rewrites what was said"),
    Metric("drift/<cause>", "turns", "per episode: turns whose sampled tokens the template would tokenise differently"),
    Metric("step", "steps", "optimizer steps the policy has taken"),
    Metric("loss", "1", "the step's loss"),
    Metric("grad_norm", "1", "norm of the gradient before clipping"),
    Metric("learning_rate", "1", "learning rate of the step"),
    Metric("entropy", "nats", "mean entropy of the processed distribution per trained token"),
    Metric("kept_mass", "fraction", "mean probability of the kept set under the trainer's full distribution"),
    Metric("k3", "nats", "k3 estimate of KL(behavior || trainer): staleness and engine mismatch together"),
    Metric(
        "mismatch/k3",
        "nats",
        "k3 over rows sampled by the very weights that were trained: the mismatch of engine and trainer alone",
    ),
    Metric("mismatch/difference", "nats", "mean |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"),
    Metric(
        "mismatch/max_difference", "nats", "largest |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"
    ),
    Metric("mismatch/tokens", "tokens", "trained tokens of the rows of `mismatch/k3`"),
    Metric(
        "seat_k3/<seat>",
        "nats",
        "k3 over the tokens of one seat, where the policy holds several: KL from the version that sampled them to the "
        "one that trains, not to a reference",
    ),
    Metric("lag_k3/<lag>", "nats", "k3 over the tokens sampled this many steps before (0, 1, 2, 3, 4+)"),
    Metric(
        "lag_difference/<lag>", "nats", "mean |trainer logprob - behavior logprob| over the tokens of `lag_k3/<lag>`"
    ),
    Metric("lag_max_difference/<lag>", "nats", "largest |trainer logprob - behavior logprob| over these tokens"),
    Metric("lag_tokens/<lag>", "tokens", "number of these tokens; tokens of an earlier lineage have lag 1 or more"),
    Metric("unrouted_share", "fraction", "forwarded tokens without recorded experts, where routing is replayed"),
    Metric("abs_logprob_difference", "nats", "mean |trainer logprob - behavior logprob|"),
    Metric("mean_ratio", "1", "mean importance ratio trainer / behavior"),
    Metric("masked_fraction", "fraction", "trained tokens the trust region or the clip left without gradient"),
    Metric(
        "truncated_fraction",
        "fraction",
        "trained tokens that weigh less than their importance ratio: it was capped, or the loss has other weights",
    ),
    Metric("effective_sample_fraction", "fraction", "(sum of ratios)^2 / (n * sum of squared ratios)"),
    Metric("reference_kl", "nats", "mean of log pi - log ref of the trained tokens: the distance from the reference"),
    Metric("skipped_samples", "rows", "rows whose advantages are all 0: consumed, but without a gradient to compute"),
    Metric("forwarded_tokens", "tokens", "tokens the trainer passed through the model"),
    Metric("sharing", "1", "row tokens per forwarded token: what sharing common prefixes saved"),
)

BROKEN_FORMAT = ("tool/bad_arguments", "tool/unknown_tool", "turns/length", "turns/illegal")
"""Episode metrics whose sum is the number of turns or calls that broke the format."""

PASS_RATES = ("0", "0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1", "1")
"""Ranges of the mean reward of groups of child episodes, from none solved to all solved."""
FRONTIER = ("0.2-0.4", "0.4-0.6", "0.6-0.8")
"""Ranges of the pass rate that teach the most, including both ends."""

GATE_PASSED, GATE_REFUSED = "gate/passed", "gate/refused"
"""Episode metrics that count the answers of `agent.gate`."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def describe(name: str) -> Metric | None:
    """The registered metric of a name; None if there is none (an environment's own `ctx.metric`).

    Example:
        >>> describe("staleness/max").unit
        'steps'
        >>> describe("reward/solver").name
        'reward/<seat>'
    """
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    return next((metric for metric in METRICS if "<" in metric.name and name.startswith(_before_word(metric))), None)


def _before_word(metric: Metric) -> str:
    return metric.name.partition("<")[0]
