"""Metrics with stable names, units and meanings.

Most names have the form `group/what`; a few are one word. Values are finite numbers; values that could not be measured
are left out. Metrics of one policy are recorded at that policy's step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

MAX_OWN_METRICS = 6
"""Maximum number of an environment's own metrics that an overview shows."""


class Metric(NamedTuple):
    """A metric's name, unit and meaning; `<…>` at the end of the name stands for any word."""

    name: str
    unit: str
    meaning: str


TASK_DIGEST = "evaluation/task_digest"
GRADIENT_METRICS = ("zero_gradient", "advantage/zero_share", "advantage/alone_share")
"""Metrics of a step that say whether it had a gradient: `no_gradient_text` puts them into words."""
EQUAL_GROUPS = "no gradient: all groups were equal"
SCORES_EXPOSED = "scores/exposed_s"
PROGRAM_OK, PROGRAM_FAILED = "program/ok", "program/failed"
EFFECT_ERROR, RESOURCE_ERROR = "effect/error", "resource/error"
TOOL_ERROR, TOOL_TIMEOUT = "tool/error", "tool/timeout"
TOOLS_OFFERED = "tools_offered"
CALLS_OUTSIDE = "tool/outside"
"""Metric of the calls in replies to external agents, which run their own tools."""
FOREIGN_CALLS = "foreign_calls/"
"""Prefix of the metric of the turns that hold a call in a form that the run does not read."""
HELD_OUT_FOREIGN_CALLS = f"evaluation/{FOREIGN_CALLS}"
HELD_OUT_CUTS = "evaluation/cut/"
TOOLS_HIDDEN = "tools_hidden"
HELD_OUT_TOOLS_HIDDEN = f"evaluation/{TOOLS_HIDDEN}"

STALENESS_BOUND = "staleness/bound"
TIMED_STEP = "pace/seconds/"
"""Prefix of the metrics of measured seconds per step, by bound on staleness."""

METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean reward of the step's episodes"),
    Metric(
        "reward/<seat>",
        "reward",
        "`reward/mean` of one seat's agents, if the policy holds several seats; of a policy with one seat, this is "
        "`reward/mean`",
    ),
    Metric("mixture/reward/<environment>", "reward", "`reward/mean` of one environment of a mixture"),
    Metric("mixture/share/<environment>", "fraction", "share of the step's episodes from this environment"),
    Metric(
        "named_reward/<name>",
        "reward",
        "mean unweighted reward of this name per agent of the step's episodes; `reward` stands for rewards without a "
        "name",
    ),
    Metric(
        "reward_agreement/<name>",
        "fraction",
        "share of the step's pairs of conversations with different `reward` that this named reward puts in the same "
        "order; ½ is chance (docs/how-to/scores.md)",
    ),
    Metric(
        "evaluation/reward",
        "reward",
        "mean reward of the policy over held-out tasks, at a pinned version. A task's reward is the mean over "
        "episodes in which the policy acted, children included; in `agentrl.evaluate`, the sum over its agents",
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
    Metric("evaluation/reward_deviation", "reward", "standard deviation of the reward over held-out episodes"),
    Metric(
        "evaluation/reward_error",
        "reward",
        "half of the 95% interval of `evaluation/reward` over tasks",
    ),
    Metric(
        "evaluation/pass_at/<k>",
        "fraction",
        "probability that at least one of k attempts (`evaluation.attempts`) solves a task: every rewarded agent of "
        "the policy, or of all policies, gets 1 or more",
    ),
    Metric("evaluation/pass_at_error/<k>", "fraction", "half of the 95% interval of `evaluation/pass_at/<k>`"),
    Metric(
        "evaluation/metric/<name>",
        "value",
        "`ctx.metric` of an environment: mean over its episodes, by task; an episode that does not set it counts as 0",
    ),
    Metric("evaluation/metric_error/<name>", "value", "half of the 95% interval of `evaluation/metric/<name>`"),
    Metric("evaluation/split_reward/<split>", "reward", "`evaluation/reward` on one of several splits"),
    Metric(
        "evaluation/split_reward_error/<split>",
        "reward",
        "half of the 95% interval of `evaluation/split_reward/<split>`",
    ),
    Metric("evaluation/split_pass_at/<split>/<k>", "fraction", "pass@k on one of several splits"),
    Metric(
        "evaluation/split_pass_at_error/<split>/<k>",
        "fraction",
        "half of the 95% interval of `evaluation/split_pass_at/<split>/<k>`",
    ),
    Metric("evaluation/turns", "turns", "mean turns of held-out episodes"),
    Metric("evaluation/tokens", "tokens", "mean sampled tokens of held-out episodes"),
    Metric("evaluation/episodes", "episodes", "committed held-out episodes"),
    Metric(
        "evaluation/truncated",
        "episodes",
        "committed held-out episodes that a limit ended, such as `sampling.max_tokens`, without their children",
    ),
    Metric(
        f"{HELD_OUT_CUTS}<reason>",
        "episodes",
        "`evaluation/truncated` by stop reason, without zeros: `max_tokens`, `max_turns`, `context_length`, "
        "`time_limit`, `refused`",
    ),
    Metric(
        "evaluation/failed",
        "episodes",
        "committed held-out episodes whose program failed (`HarnessEnvironment.failed_reward`), if there are any",
    ),
    Metric(
        f"{HELD_OUT_FOREIGN_CALLS}<form>",
        "turns",
        f"`{FOREIGN_CALLS}<form>` per held-out episode, if there are any",
    ),
    Metric(HELD_OUT_TOOLS_HIDDEN, "fraction", f"`{TOOLS_HIDDEN}` of the held-out episodes, if there are any"),
    Metric(
        "evaluation/dropped",
        "episodes",
        "dropped held-out episodes, children included; other metrics exclude them",
    ),
    Metric("evaluation/tasks", "tasks", "held-out tasks of an evaluation during a run"),
    Metric(
        TASK_DIGEST,
        "1",
        "identifies the held-out tasks: evaluations with different values were on different tasks",
    ),
    Metric("evaluation/seconds", "s", "duration of an evaluation during a run"),
    Metric(
        "evaluation/engine_busy_share",
        "fraction",
        "share of `evaluation/seconds` that the engine spent in forward passes",
    ),
    Metric(
        "staleness/mean",
        "steps",
        "mean staleness of the step's episodes: current step minus the step of their oldest sampling weights",
    ),
    Metric(
        STALENESS_BOUND,
        "steps",
        'bound on the mean staleness from this step on, with `max_staleness = "auto"` (docs/explanation/off_policy.md)',
    ),
    Metric(
        f"{TIMED_STEP}<bound>",
        "s",
        "seconds per step with this bound on staleness, from the steps that were timed to choose the bound",
    ),
    Metric("staleness/max", "steps", "largest staleness of the step's episodes"),
    Metric(
        "staleness/masked",
        "fraction",
        "share of the step's sampled tokens that were beyond `max_lag`, and not trained",
    ),
    Metric("staleness/before_resume", "trajectories", "trajectories from episodes begun before the last resume"),
    Metric(
        "advantage/zero_share",
        "fraction",
        "share of the step's episodes whose advantages are all 0; they teach nothing",
    ),
    Metric(
        "advantage/alone_share",
        "fraction",
        "share of the step's episodes without another episode to compare with, as after `ctx.spawn` with n=1",
    ),
    Metric(
        "advantage/repeated_state_share",
        "fraction",
        "with `gigpo`: share of turns, in groups that ended during the step, whose anchor state recurs in the group "
        "and seat; other turns get their episode's advantage",
    ),
    Metric("step/units", "episodes", "episodes in the step, each with all of the policy's conversations in it"),
    Metric("step/tokens", "tokens", "sampled tokens in the step"),
    Metric("step/seconds", "s", "wall time since the policy's previous step"),
    Metric("step/waited_s", "s", "time the trainer waited for the step's episodes"),
    Metric(
        "run/seconds",
        "s",
        "wall time since training began in this process; `agentrl run compare` adds up the processes of a resumed run",
    ),
    Metric("run/lineage", "lineages", "lineage of the step's version; it grows with each resume"),
    Metric("run/code_changes", "changes", "resumes at which the environment code had changed"),
    Metric("engine/busy_share", "fraction", "share of the step's wall time the engine spent in forward passes"),
    Metric("trainer/busy_share", "fraction", "share of the step's wall time the trainer was busy"),
    Metric(
        "tokens/sampled_per_s",
        "tokens/s",
        "tokens per second that all policies sampled in this process, evaluations included, over the newest 5 steps; a "
        "call to an engine counts when it returns; absent if none did",
    ),
    Metric("episodes/per_s", "episodes/s", "episodes that ended during the step"),
    Metric(
        "episodes/turns",
        "turns",
        "mean turns of the policy in the step's episodes; like all counts per episode, over the episodes of "
        "`reward/mean`",
    ),
    Metric(
        "episodes/in_flight",
        "episodes",
        "started training episodes that have not ended, children included",
    ),
    Metric(
        "episodes/threads",
        "threads",
        "threads that were started for `asyncio.to_thread` and external tools, in all worker processes; no call waits "
        "for one",
    ),
    Metric(
        "episodes/limit",
        "episodes",
        'episodes that may be in flight now, with `max_in_flight = "auto"` (docs/explanation/off_policy.md)',
    ),
    Metric("episodes/ready", "episodes", "committed episodes waiting to be trained"),
    Metric("episodes/trained", "episodes", "episodes trained since the run began"),
    Metric("episodes/dropped", "episodes", "episodes dropped since the run began"),
    Metric(
        "episodes/timed_out",
        "fraction",
        "share of episodes truncated or dropped by `episode_timeout_s` since the policy's last step; absent if none "
        "ended",
    ),
    Metric(
        "episodes/context_full",
        "fraction",
        "share of episodes truncated because their context was full since the policy's last step; absent if none ended",
    ),
    Metric(
        "episodes/out_of_turns",
        "fraction",
        "share of episodes truncated by `sampling.max_turns` since the policy's last step; absent if none ended",
    ),
    Metric("episodes/tokens", "tokens", "mean sampled tokens of the policy in the episodes of `episodes/turns`"),
    Metric(
        "tool/<outcome>",
        "calls",
        "tool calls per episode, by outcome (ok, error, timeout, bad_arguments, unknown_tool); calls in replies to "
        "external agents, which run their own tools (outside); and turns that call tools although none is offered "
        "(not_offered)",
    ),
    Metric(TOOLS_OFFERED, "fraction", "share of episodes in which the policy was offered tools"),
    Metric(TOOLS_HIDDEN, "fraction", "share of episodes in which the chat template hid the tools from the policy"),
    Metric(
        f"{FOREIGN_CALLS}<form>",
        "turns",
        "turns per episode that hold a call to an offered tool in a form that the run does not read, named as in "
        "`model.reply_format` (docs/reference/models.md); such a call is malformed",
    ),
    Metric(
        "program/<outcome>",
        "fraction",
        "share of episodes whose program (`HarnessEnvironment`) ended so, whatever reward they got: ok, failed; the "
        "rest ran into a limit",
    ),
    Metric("effect/<outcome>", "calls", "calls of `ctx.effect` per episode, by outcome (ok, error)"),
    Metric(RESOURCE_ERROR, "calls", "calls of `ctx.resource` per episode that raised an exception"),
    Metric("turns/length", "turns", "turns per episode cut off by `max_tokens`"),
    Metric(
        "turns/repeating",
        "turns",
        "turns per episode cut off by `max_tokens` while the policy repeated the same text over and over",
    ),
    Metric("turns/empty", "turns", "turns per episode without any text, thinking or tool call"),
    Metric(
        "turns/interrupted",
        "turns",
        "turns per episode that were interrupted and took more than one engine call",
    ),
    Metric(
        SCORES_EXPOSED,
        "s",
        "seconds per episode from the end of its program to its last score: the scoring time that sampling does not "
        "hide (docs/how-to/scores.md)",
    ),
    Metric("parked", "times", "times per episode that it was parked"),
    Metric(
        "no_room_s", "s", "seconds per episode that turns waited for KV-cache memory (docs/explanation/off_policy.md)"
    ),
    Metric("turns/illegal", "turns", "turns per episode that the environment could not read"),
    Metric(
        "turns/demonstrated",
        "turns",
        "turns per episode whose reply came from the environment (`agent.act(reply=…)`); `k3` then measures how "
        "likely these replies are",
    ),
    Metric("history/<cause>", "turns", "turns per episode before which the chat template rewrote earlier messages"),
    Metric(
        "drift/<cause>", "turns", "turns per episode that the chat template would tokenize differently than sampled"
    ),
    Metric("rows/<cause>", "turns", "turns per episode of outside agents that began a row, because of this rewrite"),
    Metric(
        "untrained/<cause>",
        "turns",
        "turns per episode of outside agents whose tokens are not trained: `greedy` at temperature 0, `penalty` with a "
        "penalty, `filter` with a filter whose kept sets the engine does not record, `grammar` with an enforced format "
        "whose kept sets were not recorded for some tokens (docs/reference/gateway.md)",
    ),
    Metric("replies/recalled", "turns", "turns per episode that an outside agent got from an earlier attempt"),
    Metric("win_rate/<policy>", "fraction", "share of games won against this `past` policy; a draw counts half"),
    Metric("games/<policy>", "episodes", "games against this `past` policy"),
    Metric("episodes/decided", "episodes", "games with one reward above 0 and another below"),
    Metric("won/<seat>", "fraction", "share of decided games in which this seat had the highest reward"),
    Metric("format/episodes", "episodes", "episodes that the other `format/` metrics of the step cover"),
    Metric(
        "format/broken_turns",
        "fraction",
        "share of the policy's turns that broke the format: cut off, illegal, calling no known or offered tool, or "
        "calling one in a form that the run does not read",
    ),
    Metric("format/broken_share", "fraction", "share of episodes with a turn that broke the format"),
    Metric("format/reward_broken", "reward", "mean reward of episodes with a turn that broke the format"),
    Metric("format/reward_kept", "reward", "mean reward of episodes without a turn that broke the format"),
    Metric(
        "advantage/variance_ratio",
        "1",
        "with `credit.release` = `late` or `episode`: mean squared advantage of newly completed groups, relative to "
        "leave-one-out over the same groups (docs/explanation/off_policy.md)",
    ),
    Metric(
        "gate/<answer>",
        "calls",
        "`agent.gate` calls with this answer, passed or refused; a metric of episodes, not of steps",
    ),
    Metric("gate/acceptance", "fraction", "share of `agent.gate` calls that accepted"),
    Metric("proposals/made", "proposals", "calls of `ctx.remember` since the policy's previous step"),
    Metric("proposals/repeated", "fraction", "share of proposals that the run already remembered"),
    Metric(
        "proposals/structure_entropy", "nats", "entropy of the structures of the newest 100 proposals with a structure"
    ),
    Metric(
        "groups/no_signal",
        "groups",
        "groups dropped by `credit.dynamic_sampling` since the policy's last step",
    ),
    Metric("pass_rate/groups", "groups", "groups of child episodes that ended, with rewards between 0 and 1"),
    Metric("pass_rate/frontier", "fraction", "share of `pass_rate/groups` with a mean reward from 0.2 to 0.8"),
    Metric(
        "pass_rate/<range>",
        "fraction",
        "share of `pass_rate/groups` with a mean reward in this range; exactly 0 and 1 are ranges of their own",
    ),
    Metric("step", "steps", "optimizer steps the policy has taken"),
    Metric("loss", "1", "loss"),
    Metric("grad_norm", "1", "norm of the gradient before clipping"),
    Metric(
        "zero_gradient",
        "steps",
        "1 if the gradient was exactly 0, which leaves weights and optimizer state unchanged; else 0",
    ),
    Metric("learning_rate", "1", "learning rate"),
    Metric(
        "measured_share",
        "fraction",
        "share of the trained tokens that are measured; a loss by token without a reference forwards no rows whose "
        "advantages are all 0, so the metrics of measured tokens leave these out",
    ),
    Metric("entropy", "nats", "mean entropy per measured token, after temperature and filters"),
    Metric(
        "kept_mass",
        "fraction",
        "mean probability of the kept set under the trainer's full distribution, over the measured tokens",
    ),
    Metric(
        "k3",
        "nats",
        "k3 estimate of KL(behavior || trainer) over the measured tokens; includes staleness and engine mismatch",
    ),
    Metric(
        "mismatch/k3",
        "nats",
        "k3 over measured rows sampled entirely by the trained weights: the mismatch of engine and trainer alone",
    ),
    Metric("mismatch/difference", "nats", "mean |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"),
    Metric(
        "mismatch/max_difference", "nats", "largest |trainer logprob - behavior logprob| over the rows of `mismatch/k3`"
    ),
    Metric("mismatch/tokens", "tokens", "trained tokens of the rows of `mismatch/k3`"),
    Metric("seat_k3/<seat>", "nats", "k3 over one seat's measured tokens, if the policy holds several seats"),
    Metric("lag_k3/<lag>", "nats", "k3 over the measured tokens with this lag in steps (0, 1, 2, 3, 4+)"),
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
    Metric(
        "lost_routing",
        "turns",
        "turns whose recorded experts could not be read and were left to the trainer, if routing is replayed",
    ),
    Metric("abs_logprob_difference", "nats", "mean |trainer logprob - behavior logprob| over the measured tokens"),
    Metric("mean_ratio", "1", "mean importance ratio, trainer / behavior, over the measured tokens"),
    Metric(
        "masked_fraction",
        "fraction",
        "share of measured tokens with an advantage but without gradient, because of the trust region or clipping",
    ),
    Metric("truncated_fraction", "fraction", "share of measured tokens with a weight below their importance ratio"),
    Metric(
        "effective_sample_fraction",
        "fraction",
        "(sum of ratios)^2 / (n * sum of squared ratios) over the n measured tokens",
    ),
    Metric("reference_kl", "nats", "mean of log pi - log ref over the trained tokens, all of which are measured"),
    Metric("skipped_samples", "rows", "rows consumed without a gradient, because their advantages are all 0"),
    Metric("forwarded_tokens", "tokens", "tokens passed through the model by the trainer"),
    Metric("sharing", "1", "row tokens per forwarded token: what shared prefixes save"),
    Metric(
        "shares_prefixes",
        "1",
        "share of the forwarded tokens in micro-batches whose shared prefixes are computed once; on CUDA, others are "
        "computed row by row where that is faster. 0 if sharing is impossible, for a reason printed at startup",
    ),
)

BROKEN_FORMAT = ("tool/bad_arguments", "tool/unknown_tool", "tool/not_offered", "turns/length", "turns/illegal")
"""Episode metrics that count turns or calls that broke the format."""
ILLEGAL_TURNS = "turns/illegal"
"""The only metric of this module that an environment records with `ctx.metric`."""
RESERVED_NAMES = ("policy", "reward", "seconds", "tokens", "turns")
"""Names besides those of `METRICS` that an environment's own metric may not have: fields and columns beside it."""

DEMONSTRATED = "turns/demonstrated"
"""Episode metric that counts the turns whose reply the environment gave."""

PASS_RATES = ("0", "0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1", "1")
"""Ranges of the mean reward of groups of child episodes, from none solved to all solved."""
FRONTIER = ("0.2-0.4", "0.4-0.6", "0.6-0.8")
"""Ranges of the pass rate that teach the most, including both ends."""

GATE_PASSED, GATE_REFUSED = "gate/passed", "gate/refused"
"""Episode metrics that count the answers of `agent.gate`."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def interval_metric(metric: str) -> str:
    """Return the name of half the width of a metric's 95% interval, which only estimates of evaluations have.

    Example:
        >>> interval_metric("evaluation/reward"), interval_metric("evaluation/split_pass_at/train/1")
        ('evaluation/reward_error', 'evaluation/split_pass_at_error/train/1')
    """
    group, _, suffix = metric.partition("/")
    kind, slash, label = suffix.partition("/")
    return f"{group}/{kind}_error{slash}{label}" if group == "evaluation" else ""


@lru_cache(4096)
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


def why_reserved(name: str) -> str | None:
    """Return why an environment's own metric may not have a name; None if it may."""
    registered_metric = None if name == ILLEGAL_TURNS else find_registered_metric(name)
    if registered_metric is not None:
        return f"agentrl records {registered_metric.name} itself: {registered_metric.meaning}"
    return "it is the name of a column of episodes and steps" if name in RESERVED_NAMES else None


def no_gradient_text(metrics: Mapping[str, float]) -> str:
    """Return why a step had no gradient, as far as known; empty if it had one.

    Example:
        >>> no_gradient_text(dict(zip(GRADIENT_METRICS, (1.0, 1.0, 0.0))))
        'no gradient: all groups were equal'
    """
    zero_gradient, zero_share, alone_share = (metrics.get(name, 0.0) for name in GRADIENT_METRICS)
    if not zero_gradient:
        return ""
    are_equal = zero_share == 1.0 and alone_share < 0.5  # else most units had nothing to be compared with
    return EQUAL_GROUPS if are_equal else "no gradient"


def metrics_owner(policies: Iterable[str], acted: Container[str]) -> str | None:
    """Return the policy whose steps report an episode's own metrics: the first of `policies`, by name, that acted in
    it. They belong to the episode and to no agent, so that they are reported once."""
    return min((policy for policy in policies if policy in acted), default=None)


def with_unset_metrics(
    metrics: Mapping[str, Mapping[str, float]],
    environments: Mapping[str, str],
    known: dict[str, dict[str, None]],
) -> dict[str, dict[str, float]]:
    """Return metrics by episode, with 0 for each of an environment's own metrics that another of its episodes has set:
    the mean of a metric that is set only when something happens is then its rate.

    Args:
        metrics: values of `ctx.metric` by episode.
        environments: environment of each episode.
        known: names of each environment's own metrics that some episode has set; those of `metrics` are added.
    """
    for episode, values in metrics.items():
        names = known.setdefault(environments[episode], {})
        names.update((name, None) for name in values if find_registered_metric(name) is None)
    return {
        episode: {**dict.fromkeys(known[environments[episode]], 0.0), **values} for episode, values in metrics.items()
    }


def reward_metrics(names: Iterable[str], total: str = "reward/mean") -> list[str]:
    """Return the metrics that show a policy's reward: that of each of its seats if there are several, whose sum means
    nothing, else `total`; `evaluation/reward` for held-out tasks."""
    group = f"{total.removesuffix('/mean')}/<seat>"
    by_seat = [name for name in names if (metric := find_registered_metric(name)) is not None and metric.name == group]
    return sorted(by_seat) or [total]


def broken_turns(metrics: Mapping[str, float]) -> float:
    """Return the number of turns or calls of an episode that broke the format.

    An environment may itself judge a turn that calls a tool although none is offered, or in a form that the run does
    not read, so these count once.
    """
    cut, stray = metrics.get("turns/length", 0.0), metrics.get("tool/not_offered", 0.0)
    foreign = sum([value for name, value in metrics.items() if name.startswith(FOREIGN_CALLS)])
    judged = sum([metrics.get(name, 0.0) for name in ("tool/bad_arguments", "tool/unknown_tool", "turns/illegal")])
    return cut + max(judged, stray + foreign)


def count_foreign_calls(values: Mapping[str, float], prefix: str = FOREIGN_CALLS) -> dict[str, float]:
    """Return the turns per episode that hold a call in a form that the run does not read, keyed by form, the commonest
    first.

    Args:
        values: metrics of a step or an episode, or with `HELD_OUT_FOREIGN_CALLS` as `prefix` of an evaluation.
        prefix: beginning of the metrics' names.
    """
    counts = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix) and value}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def count_tool_calls(values: Mapping[str, float]) -> float:
    """Return the calls of tools per episode, whether or not they ran, in metrics of a step or an episode."""
    outcomes = ("ok", "error", "timeout", "bad_arguments", "unknown_tool", "outside")
    return sum(values.get(f"tool/{outcome}", 0.0) for outcome in outcomes) + sum(count_foreign_calls(values).values())


def is_failure(name: str) -> bool:
    """Whether an episode metric counts failures of the user's code."""
    return name in (TOOL_ERROR, TOOL_TIMEOUT, PROGRAM_FAILED, EFFECT_ERROR, RESOURCE_ERROR)


def registered_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of built-in metrics, without an environment's own."""
    return {name: value for name, value in values.items() if find_registered_metric(name) is not None}


def own_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of an environment's own metrics among others, sorted; at most `MAX_OWN_METRICS`."""
    return [name for name in sorted(names) if find_registered_metric(name) is None][:MAX_OWN_METRICS]


def _before_word(metric: Metric) -> str:
    return metric.name.partition("<")[0]
