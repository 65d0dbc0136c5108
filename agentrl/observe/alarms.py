"""Alarms: problems in a run that do not end it, each with advice. Pure functions of `RunState`.

Each alarm is a row of `RULES`: a metric with a bound (`MetricRule`), or a function (`Rule`). It looks at a window of
the newest steps, so that a single odd step raises none, and stays silent if its inputs were not measured. The name of
an alarm is stable; its text contains the measured values. `alarms.jsonl` has a line for each alarm that a run raised.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import stdev
from typing import TYPE_CHECKING, NamedTuple

from agentrl.core.records import StopReason
from agentrl.core.reply_formats import REPLY_FORMATS
from agentrl.core.text import plural
from agentrl.observe.metrics import (
    BROKEN_FORMAT,
    DEMONSTRATED,
    EQUAL_GROUPS,
    FOREIGN_CALLS,
    HELD_OUT_CUTS,
    HELD_OUT_FOREIGN_CALLS,
    HELD_OUT_TOOLS_HIDDEN,
    PROGRAM_FAILED,
    PROGRAM_OK,
    STALENESS_BOUND,
    TOOL_ERROR,
    TOOL_TIMEOUT,
    TOOLS_HIDDEN,
    TOOLS_OFFERED,
    count_foreign_calls,
    count_tool_calls,
    no_gradient_text,
)
from agentrl.observe.run_directory import run_argument
from agentrl.observe.run_state import (
    PolicyMetricHistory,
    append_jsonl_line,
    open_jsonl_to_append,
    read_jsonl,
)

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.observe.bottleneck import FailingCalls
    from agentrl.observe.run_state import RunDisplaySettings, RunState, Values

FILE = "alarms.jsonl"


class Alarm(NamedTuple):
    """Alarm of a run."""

    name: str
    policy: str
    """Name of the policy concerned; empty for the whole run."""
    text: str
    """Description with the measured values."""
    advice: str
    """Advice on what to change."""
    example: str = ""
    """Metric, stop reason or drop reason of the episode that the commands in the advice show."""
    subject: str = ""
    """What the alarm is about, such as a tool, if a run can have one for each of several."""

    @property
    def line(self) -> str:
        """Return the alarm as one line."""
        label = f"{self.policy}: " if self.policy else ""
        return f"{self.name}: {label}{self.text}. Try: {self.advice}."


WINDOW = 5
"""Number of newest steps that an alarm looks at."""


FOREIGN_SHARE = 0.1
"""Share of replies with a call in a form that the run does not read at which an alarm is raised."""
BROKEN_SHARE = 0.3
"""Share of turns that break the format at which the policy's output counts as illegal."""
EARLY_BROKEN_SHARE = 0.5
"""The same before `WINDOW` steps."""
MOST_SHARE = 0.5
"""Share of turns or episodes that counts as most of them."""
UNTRAINED_SHARE = 0.01
"""Share of turns that are not trained at which an alarm is raised."""
UNUSED_SHARE = 0.01
"""Calls per episode up to which tools count as unused."""
TOOL_ERROR_SHARE = 0.1
"""Share of tool calls that raise at which an alarm is raised."""
ZERO_SHARE = 0.9
"""Share of units with zero advantage at which a step counts as teaching nothing."""
FLAT = 0.02
"""Change of the mean reward, relative to the largest one or 1, below which it counts as unchanged; distance from 0 of
the best mean over a window below which it never left its floor; distance from 1 below which tasks count as solved."""
EQUAL_STEPS = 3
"""Number of steps without a gradient, among the newest `2 * WINDOW`, at which an alarm is raised."""
FALL_CHANCE = 1e-3
"""Probability that unchanged weights earn the lowest reward in all groups of some steps, below which the reward fell.
It assumes that the episodes of a group all succeed or all fail, the likeliest way to get such groups."""
ALONE_SHARE = 0.5
"""Share of units without a comparison at which these count as the cause of zero advantages."""
LOW_ENTROPY = 0.01
"""Entropy in nats per token below which a policy hardly explores."""
K3_BOUND = 0.05
"""Bound on `k3` in nats per token; healthy runs stay an order of magnitude below."""
MISMATCH_BOUND = 0.002
"""Bound on `k3` in nats per token for tokens sampled by exactly the weights that are trained, where only the difference
between engine and trainer remains. Measured: below 1e-6 in one dtype; 5e-5 with bf16 against float32, or with KV of an
earlier version; ten times that without routing replay; 0.001 (a peaked policy) to 0.5 if kept sets are lost
(`benchmarks.mismatch`)."""
MISMATCH_TOKENS = 200
"""Minimum number of such tokens for a meaningful mean."""
MISMATCH_STEPS = (3, 20)
"""Minimum and maximum number of newest steps that provide these tokens, which are rare among stale ones."""
ALWAYS_CALLS, ALWAYS_IN_A_ROW = 4, 32
"""Minimum number of calls of a program, tool, effect or resource that all failed, while more may follow; and,
if some succeeded, of its failures since the last success, above which it counts as broken."""
MAX_NAMED = 5
"""Maximum number of alarms about calls that always fail."""
DROPPED_SHARE = 0.15
"""Share of ended episodes dropped for one reason above which an alarm is raised."""
TIME_SHARE, TIME_EPISODES = 0.01, 3
"""Share and number of ended episodes lost to timeouts above which the trained episodes are biased toward fast ones."""
MIN_EPISODES = 16
"""Minimum number of episodes for a meaningful share."""
MIN_DROPPED = 8
"""Minimum number of dropped episodes for an alarm."""
FRONTIER_SHARE = 0.2
"""Share of proposals with 0.2 <= p <= 0.8 below which proposals teach little."""
REPEATED_SHARE = 0.5
"""Share of repeated proposals at which an alarm is raised."""
STRUCTURE_ENTROPY = 0.2
"""Entropy of structures in nats below which 19 of 20 proposals have the same structure."""
MASKED_SHARE = 0.25
"""Share of sampled tokens that are not trained from which on slow episodes are hardly learned from."""
GATE_SHARE = 0.5
"""Share of proposals accepted by the gate below which most proposals are wasted."""
MIN_PROPOSALS = 32
"""Minimum number of proposals, or of groups of attempts at them, for a meaningful share."""
MIN_GAMES = 64
"""Minimum number of games for a meaningful share."""
LOSING_RATE = 0.45
"""Share of games won against the opponent pool below which a policy may have deteriorated."""
LOSING_ERRORS = 3.0
"""Standard errors by which that share must also have fallen, because a side may have been the weaker one from the
start."""
SEAT_SHARE = 0.95
"""Share of decided games above which a seat wins regardless of its policy."""
STARVED_STEPS = 20
"""Number of steps of other policies between two steps of a policy above which the policy may be starved."""
STARVED_RATIO = 5
"""Factor by which this number must exceed that during the policy's last steps; before its first step, multiplied by
`STARVED_STEPS`."""
_IF_LATER = (
    "if it began during training, resume from an earlier checkpoint with a lower learning rate and "
    "trainer.entropy_bonus = 0.02"
)
"""Remedy for output that gets worse during training."""
_CHECK_REWARD = (
    "check `reward` first, which gave all replies to a task the same value: `agentrl episode show` shows one with its "
    "reward"
)
"""First remedy for rewards that are all equal: the function that gives them may be wrong."""
_IF_JUNK = "; if a small model's replies are junk, a lower sampling.temperature"
_OF_EPISODE = re.compile(r"`agentrl episode (?:show|why|tokens)(?=`)")
_OF_RUN = re.compile(r"`agentrl (?:episode list|run (?:ledger|winrates))(?=`)")
"""Commands in the advice without their arguments."""
LIMITS: dict[StopReason | None, str] = {
    "max_tokens": "sampling.max_tokens",
    "max_turns": "sampling.max_turns",
    "context_length": "engine.max_context",
    "time_limit": "episode_timeout_s",
}
"""Setting of the limit that ends an episode for each reason."""
_WITHIN_LIMITS: dict[StopReason | None, str] = {
    "max_tokens": f", or ask for shorter replies{_IF_JUNK}",
    "max_turns": ", or say in the prompt how an episode ends",
    "context_length": ", or shorten the prompts",
}
"""What helps episodes to end within a limit."""
_LENGTH_ERROR = re.compile(r"(?:token|length) limit", re.IGNORECASE)
"""Errors of agents whose replies were cut; their advice is to raise a limit that the run does not grant."""
_HELD_OUT_REWARD = re.compile(r"evaluation/(?:reward|named_reward/.*|reward/.*|reward_deviation)$")
"""Metrics of the rewards of an evaluation."""
EXPECTED_DROPS = {"run_ended", "frozen", "no_signal"}

ADVICE_ON_DROPS = {
    "environment_error": "run `agentrl env check`; `agentrl episode show` gives the exception",
    "episode_timeout": "find out with `agentrl episode show` where `run()` hangs, and make that call a tool or an "
    "effect, so that the episode ends as truncated; or raise episode_timeout_s",
    "fan_out": "declare in `fan_out` the total number of child episodes that an episode starts, or start fewer",
    "branches": "`agentrl episode show` says why it may not branch there, or how many `branches` to declare",
    "tree_lost": "find out with `agentrl episode list` why the episodes that branched were dropped or restarted",
    "prompt_too_long": "raise engine.max_context or shorten the first prompt",
    "no_reward": "give every agent a reward on every path through `run()`, or set `truncated_reward`",
    "truncated": "the class drops them (`truncated_reward = None`): raise the limit that cut them, or give a number "
    "instead of None, which the policy learns to avoid",
    "too_few_children": "find out with `agentrl episode list` why child episodes were dropped, or start more of them",
    "too_few_members": "find out with `agentrl episode list` why members of groups were dropped, or choose a smaller k "
    "or larger groups",
    "bad_reward": "return a finite number from `reward`; give turn rewards only for turns that have been taken",
    "scorer_failed": "`agentrl episode show` names the scorer and its error; wrap it in "
    "agentrl_judges.retrying or fallback, or raise scorers.NAME.timeout_s",
    "nondeterminism": "run `agentrl env check`: randomness, time or the outside world bypasses `ctx`",
    "untrainable": "`agentrl episode show` names the entries that are damaged or inconsistent",
    "version_gone": "the engine was restarted and could not load an older version again: restore its files in "
    "`versions/`",
    "nonfinite_gradient": "lower the learning rate; look at k3 and grad_norm before the first of them",
}


class Rule(NamedTuple):
    """A condition that is a function of a policy's metrics or of the run's state."""

    meanings: Mapping[str, str]
    """Condition of each alarm that it raises, by name, for docs/reference/metrics.md; over the newest `WINDOW` steps
    unless it names others. An alarm of several rules has one at the first."""
    find: Callable[[RunState, PolicyMetricHistory], Iterator[Alarm]]
    """Yields the alarms of one policy. Rules of the whole run get the policy with the most steps, which has the newest
    metrics of the whole run."""
    of_run: bool = False
    """Whether the alarm is about the whole run."""
    explained_by: tuple[str, ...] = ()
    """Names of alarms of the same policy that explain this one, which is then not raised."""


class MetricRule(NamedTuple):
    """A metric that is beyond a bound in each of the newest steps that measured it."""

    name: str
    meaning: str
    """As in `Rule.meanings`."""
    metric: str
    text: str
    """Format of the text, with `{mean}` of the metric and `{steps}`, such as "3 steps"."""
    advice: str
    at_least: float = -math.inf
    below: float = math.inf
    per: str = ""
    """Metric by which it is divided; steps without this one do not count."""
    window: int = 2 * WINDOW
    """Number of newest steps among which the `WINDOW` newest with the metric count. It is missing at a step before
    which no episode ended, as in asynchronous training."""
    min_steps: int = 1
    of_run: bool = False
    explained_by: tuple[str, ...] = ()
    example: str = ""
    """As in `Alarm`."""

    @property
    def meanings(self) -> Mapping[str, str]:
        """As in `Rule`."""
        return {self.name: self.meaning}

    def find(self, state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
        """As in `Rule`."""
        steps = newest_step_metrics(policy, self.window)
        if self.per:
            values = [step.get(self.metric, 0.0) / max(step[self.per], 1e-9) for step in steps if self.per in step]
        else:
            values = window_metric_values(steps, self.metric)
        values = values[-WINDOW:]
        if len(values) >= self.min_steps and min(values) >= self.at_least and max(values) < self.below:
            text = self.text.format(mean=mean_of(values), steps=plural(len(values), "step"))
            yield Alarm(self.name, "" if self.of_run else policy.name, text, self.advice, self.example)


def find_alarms(state: RunState) -> list[Alarm]:
    """Return the alarms of a run, the most severe and likeliest causes of others first."""
    alarms: list[Alarm] = []
    newest = max(state.policies.values(), key=lambda policy: policy.step, default=PolicyMetricHistory(name=""))
    for of_run, rules in itertools.groupby(RULES, lambda rule: rule.of_run):
        group = [*rules]
        for policy in [newest] if of_run else state.policies.values():
            raised: list[Alarm] = []
            for rule in group:
                if not any(alarm.name in rule.explained_by for alarm in raised):
                    raised += rule.find(state, policy)
            alarms += raised
    return _with_commands(alarms, state)


def _with_commands(alarms: Sequence[Alarm], state: RunState) -> list[Alarm]:
    """Name the run and an example episode in the commands of the advice, and give equal advice once."""
    examples = {} if state.status is None else state.status.examples
    run = run_argument(state.path or state.plan.name)
    advised: dict[tuple[str, str], str] = {}
    filled: list[Alarm] = []
    for alarm in alarms:
        first = advised.setdefault((alarm.name, alarm.advice), alarm.policy)
        if first != alarm.policy:
            filled.append(alarm._replace(advice=f"the same as for {first}"))
            continue
        episode = examples.get(alarm.example) or examples.get("completed") or next(iter(examples.values()), "")
        filled.append(alarm._replace(advice=fill_commands(alarm.advice, run, episode)))
    return filled


def fill_commands(advice: str, run: str, episode: str) -> str:
    """Return advice whose commands name a run (see `run_argument`) and an episode; without one, they
    take the run's newest."""
    of_episode = f"{run} {episode}" if episode else run
    for command in ("episode list", "episode show"):
        advice = advice.replace(f"`agentrl {command} RUN", f"`agentrl {command} {run}")
    advice = _OF_EPISODE.sub(lambda match: f"{match[0]} {of_episode}", advice)
    return _OF_RUN.sub(lambda match: f"{match[0]} {run}", advice)


def _always_fails(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    if state.status is not None:
        yield from always_fails_alarms(
            state.status.failing, state.plan, policy.name, is_over=state.standing != "running"
        )


def always_fails_alarms(
    calls: Mapping[str, FailingCalls], plan: RunDisplaySettings, policy: str, *, is_over: bool
) -> Iterator[Alarm]:
    """Yield the alarms about calls of the user's code that always fail.

    Args:
        calls: calls that failed last time, by name.
        plan: has the limits of replies.
        policy: policy whose limits are named.
        is_over: whether no more calls follow, so that a single one counts.
    """
    num_named = 0
    for name, failing in sorted(calls.items(), key=lambda item: -item[1].in_a_row):
        is_always = failing.failed == failing.calls >= (1 if is_over else ALWAYS_CALLS)
        if not (is_always or failing.in_a_row >= ALWAYS_IN_A_ROW):
            continue
        num_named += 1
        if num_named > MAX_NAMED:  # the names of effects may come from the policy
            continue
        limit = ""
        if _LENGTH_ERROR.search(failing.error):
            limit = f"; this run cuts replies at {plan.limit_text(policy, LIMITS['max_tokens'])}"
        calls_text = plural(failing.calls, "call")
        times = f"all of its {calls_text}" if is_always else f"its last {failing.in_a_row:.0f} of {calls_text}"
        times = "its only call" if failing.calls == 1 else times
        episodes = f"`agentrl episode list RUN --where 'metric.{failing.metric} > 0'`"
        advice = (
            f"{episodes}, for dropped ones `--where 'drop_reason = environment_error'`, lists episodes for `agentrl "
            "episode why`; until it is fixed, episodes that survive the failure are trained with the reward they get"
        )
        if failing.metric in (TOOL_ERROR, TOOL_TIMEOUT):
            advice = (
                "fix the tool: until then, the policy sees the error as the tool's answer. If it is meant to refuse "
                f"such calls, say in its description what it accepts. {episodes} lists some for `agentrl episode why`"
            )
        yield Alarm(
            "always_fails",
            "",
            f"{name} failed in {times}, most often with {failing.error}{limit}",
            advice,
            failing.metric,
            name,
        )
    if num_named > MAX_NAMED:
        yield Alarm(
            "always_fails",
            "",
            f"{plural(num_named - MAX_NAMED, 'other call')} of your code always failed too",
            "begin with the calls named above",
            subject="others",
        )


def _hidden_tools(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the newest step; before the first one at the evaluation before training."""
    if not count_tool_calls(policy.last) and (alarm := hidden_tools_alarm(_newest(policy), policy.name)) is not None:
        yield alarm


def _newest(policy: PolicyMetricHistory) -> Values:
    """Return the metrics of the newest step; before the first one, those of the evaluation before training."""
    return policy.last or policy.evaluations.get(0, {})


def hidden_tools_alarm(values: Values, policy: str) -> Alarm | None:
    """Return the alarm about a chat template that hides offered tools; None if it hides none.

    Args:
        values: metrics of a step, or of an evaluation.
        policy: name of the policy concerned.
    """
    share = values.get(TOOLS_HIDDEN, values.get(HELD_OUT_TOOLS_HIDDEN, 0.0))
    if not share:
        return None
    return Alarm(
        "hidden_tools",
        policy,
        f"in {share:.0%} of the episodes, the chat template hides the offered tools from the model, which calls none",
        "set model.tools_in = 'system' in a new run, which lists them in the system message",
        TOOLS_HIDDEN,
    )


def _foreign_calls(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the newest step; before the first one at the evaluation before training."""
    if policy.last:
        alarm = foreign_calls_alarm(policy.last, policy.name)
    else:
        alarm = foreign_calls_alarm(policy.evaluations.get(0, {}), policy.name, held_out=True)
    if alarm is not None:
        yield alarm


def foreign_calls_alarm(values: Values, policy: str, *, held_out: bool = False) -> Alarm | None:
    """Return the alarm about calls in forms that the run does not read; None if few replies hold one.

    Args:
        values: metrics of a step, or of an evaluation.
        policy: name of the policy concerned.
        held_out: whether they are those of an evaluation.
    """
    counts = count_foreign_calls(values, HELD_OUT_FOREIGN_CALLS if held_out else FOREIGN_CALLS)
    turns = values.get("evaluation/turns" if held_out else "episodes/turns", 0.0)
    episodes = values.get("evaluation/episodes" if held_out else "format/episodes", 0.0)
    if not counts or sum(counts.values()) < FOREIGN_SHARE * turns:
        return None
    form = next(iter(counts))
    forms = [
        f"{count * episodes:.0f} as {REPLY_FORMATS[name].description if name in REPLY_FORMATS else name}"
        for name, count in counts.items()
    ]
    return Alarm(
        "foreign_calls",
        policy,
        f"{sum(counts.values()) * episodes:.0f} of {turns * episodes:.0f} replies hold a call of an offered tool in a "
        f"form that this run does not read, so no tool is called: {', '.join(forms)}",
        f"read that form in a new run: model.reply_format = {form!r}, which excludes model.tools_in; or train the "
        "form that the run reads, which `agentrl doctor "
        "FILE` shows, with a worked call in the prompt. `agentrl episode list RUN --where "
        f"'metric.{FOREIGN_CALLS}{form} > 0'` lists such replies for `agentrl episode show`",
        f"{FOREIGN_CALLS}{form}",
    )


def _cut_off(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the evaluation before training, until the first steps have their own alarms."""
    if not policy.last and (alarm := cut_off_alarm(policy.evaluations.get(0, {}), policy.name, state.plan)) is not None:
        yield alarm


def cut_off_alarm(values: Values, policy: str, plan: RunDisplaySettings) -> Alarm | None:
    """Return the alarm about an evaluation without reward in which limits cut off most episodes; None if it is none.

    Rewards other than 0, also negative ones, show that the environment rewards what a limit ends, by design.

    Args:
        values: metrics of the evaluation.
        policy: name of the policy concerned.
        plan: plan of the run, with its limits.
    """
    cuts = {limit: values.get(f"{HELD_OUT_CUTS}{limit}", 0.0) for limit in LIMITS}
    episodes = values.get("evaluation/episodes", 0.0)
    rewards = [value for name, value in values.items() if _HELD_OUT_REWARD.match(name)]
    if any(rewards) or not rewards or not episodes or sum(cuts.values()) < MOST_SHARE * episodes:
        return None
    commonest = sorted(filter(cuts.get, cuts), key=lambda limit: -cuts[limit])
    counts = ", ".join(f"{cuts[limit]:.0f} at {plan.limit_text(policy, LIMITS[limit])}" for limit in commonest)
    remedies = {limit: f"raise {plan.limit_of(policy, LIMITS[limit])[0]}" for limit in commonest}
    if "max_tokens" in remedies:
        remedies["max_tokens"] = raise_reply_limit(plan, policy, cuts["max_tokens"], episodes)
    return Alarm(
        "cut_off",
        policy,
        f"all held-out rewards are 0, and limits cut off {sum(cuts.values()):.0f} of {plural(episodes, 'episode')}: "
        f"{counts}",
        f"`agentrl episode list RUN --where 'stop_reason = {commonest[0]}'` lists them; "
        + "; ".join(f"{remedy}{_WITHIN_LIMITS.get(limit, '')}" for limit, remedy in remedies.items()),
    )


def raise_reply_limit(plan: RunDisplaySettings, policy: str, num_cut: float, total: float) -> str:
    """Say to which value to raise the limit of a policy's replies, by how many of them reached it.

    About one in twenty would exceed that value if their lengths have a geometric distribution. It is a power of two,
    from twice to sixteen times the limit, but at most half the context.

    Example:
        >>> from agentrl.observe.run_state import RunDisplaySettings
        >>> raise_reply_limit(RunDisplaySettings(limits={"sampling.max_tokens": 64}), "solver", 38, 64)
        'raise sampling.max_tokens to 512'
    """
    name, limit = plan.limit_of(policy, LIMITS["max_tokens"])
    if limit <= 0 or not num_cut > 0:  # of a received run, they may be anything
        return f"raise {name}"
    share = min(max(num_cut / max(total, num_cut), 1e-9), 0.9)
    factor = min(max(math.log(0.05) / math.log(share), 2.0), 8.0)
    value = 1 << math.ceil(math.log2(limit * factor))
    if context := plan.limits.get("engine.max_context"):
        value = min(value, context // 2)
    return f"raise {name} to {value}" if value > limit else f"raise {name} and engine.max_context"


def _illegal_output(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    # Metrics of episodes are missing at a step whose episodes ended before a resume, if several policies acted.
    window = [step for step in newest_step_metrics(policy, 2 * WINDOW) if "episodes/turns" in step][-WINDOW:]
    shares = window_metric_values(window, "format/broken_turns")
    smallest = BROKEN_SHARE if len(shares) == WINDOW else EARLY_BROKEN_SHARE
    if not shares or min(shares) < smallest or shares[-1] < 0.8 * shares[0]:
        return
    kinds = sorted(((mean_of(window_metric_values(window, name)), name) for name in BROKEN_FORMAT), reverse=True)
    per_episode = max(mean_of(window_metric_values(window, "episodes/turns")), 1e-9)
    kinds_text = ", ".join(f"{name} {mean / per_episode:.0%}" for mean, name in kinds if mean > 0)
    steps = plural(len(shares), "step").removeprefix("1 ")
    cut, repeating = (window_metric_sum(window, name) for name in ("turns/length", "turns/repeating"))
    repeats = f"; {min(repeating / cut, 1.0):.0%} of the cut turns repeat themselves" if cut and repeating else ""
    worst = kinds[0][1] if kinds[0][0] > 0 else "turns/illegal"
    is_program = any(window_metric_values(window, name) for name in (PROGRAM_OK, PROGRAM_FAILED))
    num_cut, num_turns = (
        sum(values.get(name, 0.0) * values.get("format/episodes", 0.0) for values in window)
        for name in ("turns/length", "episodes/turns")
    )
    counts = ""
    if worst == "turns/length" and num_cut:
        limit = state.plan.limit_text(policy.name, LIMITS["max_tokens"])
        request_limit_note = ", or at the request's own limit" * is_program
        counts = f"; {num_cut:.0f} of {num_turns:.0f} replies were cut at {limit}{request_limit_note}"
    yield Alarm(
        "illegal_output",
        policy.name,
        f"{mean_of(shares):.0%} of the turns in the last {steps} break the format"
        + (f" (of all turns: {kinds_text}{repeats})" if kinds_text else "")
        + counts,
        f"`agentrl episode list RUN --where 'metric.{worst} > 0'` lists examples for `agentrl episode show`; "
        + _format_advice(
            worst,
            remedy=raise_reply_limit(state.plan, policy.name, num_cut, num_turns),
            is_repeating=repeating > MOST_SHARE * cut,
            is_program=is_program,
        )
        + f"; {_IF_LATER}",
        worst,
    )


def _format_advice(worst: str, *, remedy: str, is_repeating: bool, is_program: bool) -> str:
    """Return the remedy for the commonest way to break the format; `remedy` is the one for short limits."""
    match worst:
        case "turns/length" if is_repeating:
            return "a base model that ends its turns, such as an instruction-tuned one"
        case "turns/length":
            return f"{remedy}, ask for shorter replies, or use a base model that ends its turns{_IF_JUNK}"
        case "tool/not_offered" if is_program:
            return (
                "the requests of the program offer no tool there: ask for the form of the answer in the prompt, or "
                "offer the tools (`tools`) in every request of the conversation"
            )
        case "tool/not_offered":
            return "the environment offers no tool: ask for the form of the answer, or pass tools= to ctx.agent"
        case "tool/bad_arguments" | "tool/unknown_tool":
            return "a complete call in the prompt, or a base model that knows tool calls"
        case _:
            return f"an example of the format in the prompt, or a base model that knows it{_IF_JUNK}"


def _unused_tools(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the newest steps in which tools were offered."""
    # calls in demonstrations are not executed
    sampled = [values for values in policy.steps.values() if values.get(TOOLS_OFFERED) and not values.get(DEMONSTRATED)]
    window = sampled[-WINDOW:]
    offered = [values[TOOLS_OFFERED] * values.get("format/episodes", 0.0) for values in window]
    calls = [count_tool_calls(values) * values.get("format/episodes", 0.0) for values in window]
    if sum(offered) < MIN_EPISODES or sum(calls) > UNUSED_SHARE * sum(offered):
        return
    yield Alarm(
        "unused_tools",
        policy.name,
        f"tools were offered in {sum(offered):.0f} episodes of the last {plural(len(window), 'step')}, and called "
        f"{sum(calls):.0f} times",
        "`agentrl episode tokens` shows what the replies hold; a worked call in the prompt, or a reward for the first "
        "call",
        TOOLS_OFFERED,
    )


def _tool_errors(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the newest steps with tool calls. A tool that fails in every call has its own alarm."""
    shares: list[float] = []
    for values in policy.steps.values():
        calls = sum(values.get(f"tool/{outcome}", 0.0) for outcome in ("ok", "error", "timeout"))
        if calls and "episodes/turns" in values:
            shares.append(values.get(TOOL_ERROR, 0.0) / calls)
    shares = shares[-WINDOW:]
    if len(shares) < WINDOW or mean_of(shares) < TOOL_ERROR_SHARE or shares[-1] < 0.8 * shares[0]:
        return
    raised = "" if state.status is None else state.status.raised
    if any(raised.startswith(f"{alarm.subject}: ") for alarm in _always_fails(state, policy)):
        return
    most_often = f", most often {raised}" if raised else ""
    yield Alarm(
        "tool_errors",
        policy.name,
        f"{mean_of(shares):.0%} of the tool calls of the last {plural(len(shares), 'step')} with calls raised an "
        f"exception ({TOOL_ERROR}){most_often}",
        f"`agentrl episode list RUN --where 'metric.{TOOL_ERROR} > 0'` lists examples, and `agentrl episode why` gives "
        "the exception with its file and line; fix the tool unless the policy is at fault",
        TOOL_ERROR,
    )


def _fall(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at the newest steps in a row without an advantage and at the lowest reward, and at the steps before them."""
    numbers, steps = [*policy.steps], [*policy.steps.values()]
    if any("reward/mean" not in values for values in steps):
        return
    floor = min((values["reward/mean"] for values in steps), default=0.0)
    fallen = [
        *itertools.takewhile(
            lambda values: values.get("advantage/zero_share") == 1.0 and values["reward/mean"] <= floor + 1e-9,
            reversed(steps),
        )
    ]
    num_before = len(steps) - len(fallen)
    before = steps[:num_before][-WINDOW:]
    if not fallen or not before or mean_of(window_metric_values(fallen, "advantage/alone_share")) >= ALONE_SHARE:
        return
    earlier = mean_of(window_metric_values(before, "reward/mean"))
    group_size = state.plan.group_size or math.inf  # unknown: a step has at least one group
    groups, groups_before = (
        sum(max(values.get("step/units", 0.0) / group_size, 1.0) for values in part) for part in (fallen, before)
    )
    # At most this share of the groups got the floor before, if no reward exceeds the largest one. As few groups tell
    # little, it is estimated by the rule of succession.
    floor_share = 1.0 - (earlier - floor) / max(_largest_reward(policy) - floor, 1e-9)
    floor_share = (groups_before * floor_share + 1.0) / (groups_before + 2.0)
    shares = window_metric_values(fallen, "format/broken_turns")
    intact = mean_of(window_metric_values(before, "format/broken_turns"))
    is_broken = len(shares) == len(fallen) and min(shares) >= max(MOST_SHARE, 2 * intact)
    if earlier - floor < FLAT or not (is_broken or floor_share**groups < FALL_CHANCE):
        return
    if any(_always_fails(state, policy)):  # the cause, which has its own alarm
        return
    rates = window_metric_values(before, "learning_rate")
    yield Alarm(
        "collapse",
        policy.name,
        f"the reward fell from {earlier:.3f} to {floor:.3f} after step {numbers[num_before - 1]}, and no episode "
        "since has an advantage"
        + (f"; {mean_of(shares):.0%} of the turns break the format, {intact:.0%} before" if is_broken else ""),
        f"resume from a checkpoint before the fall, or start again, with a lower policies.{policy.name}.learning_rate"
        + (f" (it was {rates[-1]:g})" if rates else "")
        + "; if the replies that `agentrl episode show` prints make sense, the newer tasks are harder",
    )


def _largest_reward(policy: PolicyMetricHistory) -> float:
    """Estimate the largest reward of an episode: at least 1, and at least what the spread of held-out rewards needs."""
    _, means = policy.series("reward/mean")
    first = policy.evaluations.get(0, {})
    mean, deviation = first.get("evaluation/reward", 0.0), first.get("evaluation/reward_deviation", 0.0)
    # The variance of rewards from 0 to `largest` is at most mean * (largest - mean).
    return max(1.0, *means, mean + deviation**2 / mean if mean > 0 else 0.0)


def _nothing_taught(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    window = newest_step_metrics(policy)
    if len(window) < WINDOW:
        return
    zero, rewards = window_metric_values(window, "advantage/zero_share"), window_metric_values(window, "reward/mean")
    if len(zero) < len(window) or len(rewards) < len(window) or mean_of(zero) < ZERO_SHARE:
        return
    if (alone := _alone(policy, window)) is not None:
        yield alone
        return
    _, history = policy.series("reward/mean")
    best = max(mean_of(history[at : at + WINDOW]) for at in range(len(history) - WINDOW + 1))
    lowest, highest, now = min(history), max(history), mean_of(rewards)
    spread = highest - lowest
    is_solved = now >= 1.0 - FLAT and highest <= 1.0
    is_flat = spread < FLAT * max(abs(lowest), abs(highest), 1.0) or (lowest >= 0.0 and best < FLAT)
    entropy = window_metric_values(window, "entropy")
    tail = f", entropy {mean_of(entropy):.3f} nats per token" if entropy else ""
    text = (
        f"{mean_of(zero):.0%} of the episodes of the last {len(window)} steps have zero advantage, since the rewards "
        "within each group are equal"
    )
    if is_flat and (not is_solved or spread < 1e-9):
        if any(_always_fails(state, policy)):  # the cause, which has its own alarm
            return
        yield Alarm(
            "no_signal",
            policy.name,
            f"{text}, at reward {now:.3f}"
            + (" since the start" if spread < 1e-9 else f", never above {highest:.3f}")
            + tail,
            _signal_advice(now),
        )
    elif is_solved:
        yield Alarm(
            "nothing_to_learn",
            policy.name,
            f"{text}, at reward {now:.3f}: the tasks are solved{tail}",
            "stop here, or continue with harder tasks; if the replies are not right, `reward` is too easily satisfied: "
            "`agentrl episode show`",
        )
    elif now < best - 0.1 * spread and (not entropy or mean_of(entropy) < LOW_ENTROPY):
        yield Alarm(
            "collapse",
            policy.name,
            f"{text}, and the reward fell from {best:.3f} to {now:.3f}{tail}",
            "resume from a checkpoint before the fall with a lower learning rate and trainer.entropy_bonus = 0.02",
        )
    elif now >= best - 0.1 * spread:
        yield Alarm(
            "nothing_to_learn",
            policy.name,
            f"{text}, at reward {now:.3f}, the best so far{tail}",
            # Rewards that are equal within groups and differ between steps depend on the task alone.
            "if some tasks could earn more, the policy has stopped exploring: resume from an earlier checkpoint with a "
            "lower learning rate and trainer.entropy_bonus = 0.02"
            if max(rewards) - min(rewards) > 0.1 * spread
            else "stop here, or continue with harder tasks: this reward cannot measure further improvement on these",
        )


def _equal_groups(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Look at steps without a gradient between others with one. Where all rewards are 1, the tasks are solved."""
    newest = list(policy.steps.items())[-2 * WINDOW :]
    equal = [
        step
        for step, values in newest
        if no_gradient_text(values) == EQUAL_GROUPS and not 1.0 - FLAT <= values.get("reward/mean", 0.0) <= 1.0
    ]
    if len(equal) < EQUAL_STEPS:
        return
    yield Alarm(
        "equal_groups",
        policy.name,
        f"{len(equal)} of the last {plural(len(newest), 'step')} had no gradient, since the rewards within each group "
        f"were equal: steps {', '.join(map(str, equal))}",
        "credit.dynamic_sampling = true in a new run, which samples other groups in place of equal ones; a larger "
        "step_size, or tasks that the policy solves sometimes",
    )


def _held_out_behind(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Compare the steps after the first evaluation with those before the newest one."""
    evaluations = policy.comparable_evaluations()
    if len(evaluations) < 2:
        return
    (first_step, first), (last_step, last) = evaluations[0], evaluations[-1]
    rewards = [
        reward for step, reward in zip(*policy.series("reward/mean"), strict=True) if first_step < step <= last_step
    ]
    if len(rewards) < 2 * WINDOW:
        return
    earlier, newest = rewards[:WINDOW], rewards[-WINDOW:]
    rise, gain = mean_of(newest) - mean_of(earlier), last["evaluation/reward"] - first["evaluation/reward"]
    noise = math.hypot(stdev(earlier), stdev(newest)) / math.sqrt(WINDOW)
    error = math.hypot(
        *(
            values.get("evaluation/reward_deviation", 0.0) / math.sqrt(max(values.get("evaluation/episodes", 1.0), 1.0))
            for values in (first, last)
        )
    )
    if gain <= 0.0 and rise > max(FLAT, 3.0 * noise, 4.0 * error):
        yield Alarm(
            "held_out_behind",
            policy.name,
            f"from step {first_step} to {last_step}, the training reward rose from {mean_of(earlier):.3f} to "
            f"{mean_of(newest):.3f}, and the held-out reward went from {first['evaluation/reward']:.3f} to "
            f"{last['evaluation/reward']:.3f}",
            "look with `agentrl episode show` at what earns the training reward: if it is not what the held-out reward "
            "counts (a shaped reward, a limit), correct it; otherwise draw more training tasks, or keep the best "
            "version (best.metric = 'evaluation/reward')",
        )


def _signal_advice(reward: float) -> str:
    """Return the remedies for rewards that are all equal, the likeliest first."""
    if reward >= 1.0 - FLAT:
        return f"{_CHECK_REWARD}; if it is right, harder tasks"
    return (
        f"{_CHECK_REWARD}; if it is right: easier tasks, a base model that can do some of them, a "
        "larger credit.group_size, a higher sampling.temperature (an agent that sets its own keeps it, unless "
        "gateway.sampling = 'run'), or a reward for partial success"
    )


def _alone(policy: PolicyMetricHistory, window: Sequence[Values]) -> Alarm | None:
    lone_share = mean_of(window_metric_values(window, "advantage/alone_share"))
    if lone_share < ALONE_SHARE:
        return None
    return Alarm(
        "alone",
        policy.name,
        f"{lone_share:.0%} of the episodes of the last {plural(len(window), 'step')} have no other episode to compare "
        "them with",
        "see with `agentrl episode show` who plays; `ctx.spawn` with n = 2 or more: children of one call are compared "
        "with each other; or "
        "credit.advantage = 'role_mean', which compares with what the policy used to get in that seat",
    )


def _nothing_taught_yet(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    """Raise `no_signal` or `alone` before `WINDOW` steps if no unit had an advantage; before the first step, if the
    evaluation before training showed no signal."""
    window = newest_step_metrics(policy)
    if len(window) == WINDOW:
        return
    first = policy.evaluations.get(0, {})
    zero, rewards = window_metric_values(window, "advantage/zero_share"), window_metric_values(window, "reward/mean")
    units = window_metric_sum(window, "step/units")
    if min(zero, default=1.0) < 1.0:
        return
    if (alone := _alone(policy, window)) is not None:
        yield alone
        return
    if units and rewards:
        reward = mean_of(rewards)
        text = (
            f"none of the {plural(units, 'episode')} of {plural(len(window), 'step')} has an advantage, since the "
            f"rewards within each group are equal (mean {reward:.3f}): nothing is learned from them"
        )
    elif (alarm := equal_rewards_alarm(first, policy.name)) is not None:
        reward, text = first["evaluation/reward"], alarm.text
    else:
        return
    if not any(_always_fails(state, policy)):  # else the cause has its own alarm
        yield Alarm("no_signal", policy.name, text, _signal_advice(reward))


def equal_rewards_alarm(values: Values, policy: str) -> Alarm | None:
    """Return the alarm about an evaluation in which all episodes got the same reward; None if they did not, or were too
    few."""
    if values.get("evaluation/episodes", 0.0) < MIN_EPISODES or values.get("evaluation/reward_deviation") != 0.0:
        return None
    reward = values["evaluation/reward"]
    text = (
        f"all {values['evaluation/episodes']:.0f} held-out episodes got reward {reward:.3f}: groups whose rewards are "
        "all equal teach nothing"
    )
    return Alarm("no_signal", policy, text, _signal_advice(reward))


def _staleness(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    window, late = newest_step_metrics(policy), state.plan.late_staleness
    if len(window) < WINDOW or any(window_metric_values(window, "staleness/before_resume")):
        return
    lags = window_metric_values(window, "staleness/mean")
    # after a bound fell, a few steps train what was sampled under the larger one
    is_chosen = STALENESS_BOUND in policy.last
    chosen = window_metric_values(newest_step_metrics(policy, 3 * WINDOW), STALENESS_BOUND) if is_chosen else []
    bound = max(chosen, default=policy.max_staleness)
    if lags and bound is not None and mean_of(lags) > bound + late + max(0.25, 0.25 * bound):
        yield Alarm(
            "staleness",
            policy.name,
            f"the mean lag of the last {len(window)} steps is {mean_of(lags):.2f} steps, the bound {bound:.0f}",
            "episodes outlive several steps: lower max_in_flight or sampling.max_turns, raise step_size, or allow it "
            "with a larger max_staleness",
        )


def _mismatch(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    window = newest_step_metrics(policy)
    minimum, maximum = MISMATCH_STEPS
    if len(window) < WINDOW or any(window_metric_values(newest_step_metrics(policy, maximum), DEMONSTRATED)):
        return  # k3 then tells how likely the environment's replies are, whose recorded probability is 1
    steps_with_lag: list[Values] = []
    tokens = total = 0.0
    for values in reversed(newest_step_metrics(policy, maximum)):
        if "lag_k3/0" in values and (len(steps_with_lag) < minimum or tokens < MISMATCH_TOKENS):
            steps_with_lag.append(values)
            tokens += values.get("lag_tokens/0", 0.0)
            total += values.get("lag_tokens/0", 0.0) * values["lag_k3/0"]
    k3 = mean_of(window_metric_values(window, "k3"))
    seats = {name: mean_of(window_metric_values(window, name)) for name in window_metric_names(window, "seat_k3")}
    if len(steps_with_lag) >= minimum and tokens >= MISMATCH_TOKENS and total > MISMATCH_BOUND * tokens:
        largest = max(window_metric_values(steps_with_lag, "lag_max_difference/0"), default=0.0)
        yield Alarm(
            "engine_mismatch",
            policy.name,
            f"engine and trainer disagree by k3 = {total / tokens:.3f} nats per token (at most {largest:.2f}) on "
            f"tokens that exactly the trained weights sampled (healthy: below {MISMATCH_BOUND:g})",
            "if mismatch/k3 is far lower, engine.refresh = 'token', or 'lazy' with adapters; engine.capture_routing = "
            "true for a mixture of experts; the same dtype and attention on both sides; if kept_mass is 1 with "
            "sampling filters, the kept sets were lost; otherwise the engine serves other weights than it records: "
            "resume from a checkpoint",
        )
    elif k3 > K3_BOUND or max(seats.values(), default=0.0) > K3_BOUND:
        name = max(seats, key=lambda seat: seats[seat], default="")
        worst = f", in seat {name.removeprefix('seat_k3/')} {seats[name]:.3f}" if seats else ""
        yield Alarm(
            "off_policy",
            policy.name,
            f"k3 = {k3:.3f} nats per token between the sampling and the trained weights{worst} (healthy: below "
            f"{K3_BOUND:g})",
            "a lower learning rate, or a smaller max_staleness",
        )


def _drops(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    if state.status is None:
        return
    reasons = state.status.dropped
    num_ended = sum(reasons.values()) + state.status.trained + state.status.ready
    by_time = reasons.get("episode_timeout", 0)
    if by_time >= TIME_EPISODES and TIME_SHARE * num_ended <= by_time < max(DROPPED_SHARE * num_ended, MIN_DROPPED):
        yield Alarm(
            "dropped_by_time",
            "",
            f"{by_time:,} of {num_ended:,} episodes that ended were dropped because their program hung: if that "
            "depends on what a policy says, the gradient is biased",
            _drop_advice("episode_timeout"),
        )
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        if reason in EXPECTED_DROPS or count < MIN_DROPPED or count < DROPPED_SHARE * num_ended:
            continue
        yield Alarm(
            "dropped",
            "",
            f"{count:,} of {num_ended:,} episodes that ended were dropped because of {reason}",
            _drop_advice(reason),
            reason,
        )


def _drop_advice(reason: str) -> str:
    advice = ADVICE_ON_DROPS.get(reason)
    return f"`agentrl episode list RUN --where 'drop_reason = {reason}'` lists them" + (f"; {advice}" if advice else "")


def _proposals(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    window = newest_step_metrics(policy)
    if len(window) < WINDOW or not any("gate/acceptance" in v or "proposals/made" in v for v in window):
        return
    count = window_metric_sum(window, "proposals/made")
    repeated_share = window_weighted_mean(window, "proposals/repeated", "proposals/made")
    if count >= MIN_PROPOSALS and repeated_share >= REPEATED_SHARE:
        yield Alarm(
            "proposals_repeat",
            "",
            f"{repeated_share:.0%} of the {count:,.0f} proposals of the last {WINDOW} steps had been made before",
            "refuse them at the gate: `proposer.gate(known.times == 0, penalty=-0.5)` after `known = await "
            "ctx.remember(…)`; trainer.entropy_bonus = 0.04",
        )
    groups = window_metric_sum(window, "pass_rate/groups")
    frontier, unsolved_share, always_solved = (
        window_weighted_mean(window, f"pass_rate/{name}", "pass_rate/groups") for name in ("frontier", "0", "1")
    )
    if groups >= MIN_PROPOSALS and frontier < FRONTIER_SHARE:
        easy = always_solved > unsolved_share
        yield Alarm(
            "off_frontier",
            "",
            f"{frontier:.0%} of the {groups:,.0f} proposals of the last {WINDOW} steps are solved by some attempts and "
            f"not by others; {always_solved:.0%} by all, {unsolved_share:.0%} by none",
            "a solver that learns more slowly than the proposer (a larger step_size, a smaller learning_rate) and "
            "stops before it does (`steps`); the versions that best.metric = 'pass_rate/frontier' keeps"
            if easy
            else "a narrower gate or a base model that solves some of them; `agentrl.learnability` as the proposer's "
            "reward",
        )


def _one_seat_wins(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    window = newest_step_metrics(policy)
    games = window_metric_sum(window, "episodes/decided")
    shares = {
        name: window_weighted_mean(window, name, "episodes/decided") for name in window_metric_names(window, "won")
    }
    if len(window) < WINDOW or games < MIN_GAMES or max(shares.values(), default=0.0) < SEAT_SHARE:
        return
    name = max(shares, key=lambda seat: shares[seat])
    yield Alarm(
        "one_seat_wins",
        "",
        f"seat {name.removeprefix('won/')} wins {shares[name]:.0%} of the {games:,.0f} decided games of the last "
        f"{WINDOW} steps: there is little to learn from",
        'credit.advantage = "role_mean", which cancels a side\'s built-in advantage; both policies on both sides '
        "(lists under [seats]); an opponent of similar strength: a policy of kind 'past', or a game with a handicap",
    )


def _loses_to_past(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    for opponent, name in state.plan.opponent_pools.items():
        if name == policy.name:
            yield from _loses_to_pool(policy, opponent)


def _loses_to_pool(policy: PolicyMetricHistory, opponent: str) -> Iterator[Alarm]:
    rate, games_metric = f"win_rate/{opponent}", f"games/{opponent}"
    window = newest_step_metrics(policy)
    before = newest_step_metrics(policy, len(policy.steps))[:-WINDOW]
    games, earlier = window_metric_sum(window, games_metric), window_metric_sum(before, games_metric)
    if min(games, earlier) < MIN_GAMES:
        return
    now, then = window_weighted_mean(window, rate, games_metric), window_weighted_mean(before, rate, games_metric)
    error = 0.5 * math.sqrt(1.0 / games + 1.0 / earlier)  # upper bound on the standard error of a share
    if now < LOSING_RATE and then - now > LOSING_ERRORS * error:
        yield Alarm(
            "loses_to_past",
            policy.name,
            f"against its past versions ({opponent}) it wins {now:.2f} of {games:,.0f} games in the last {WINDOW} "
            f"steps, {then:.2f} before: it is forgetting, or going in circles",
            "see which with `agentrl run winrates`; resume from the checkpoint that won most, with a lower learning "
            f"rate or a larger step_size; more groups against {opponent} in [seats], more versions (size), choose = "
            "'prioritized'",
        )


def _starvation(state: RunState, policy: PolicyMetricHistory) -> Iterator[Alarm]:
    plan, total_steps = state.plan, state.plan.steps_of(policy.name)
    learns_always = policy.name in plan.max_staleness and policy.name not in plan.phased
    if not learns_always or (total_steps and policy.step >= total_steps):
        return
    usual = max(policy.waits, default=STARVED_STEPS)
    if policy.waited >= max(STARVED_STEPS, STARVED_RATIO * usual):
        yield Alarm(
            "starved",
            policy.name,
            f"the other policies took {policy.waited} steps since its step {policy.step}: it gets no episodes",
            "see in `agentrl run ledger` what happens to its episodes; proposals that the gate refuses start no "
            "children (gate/acceptance), and a seat that never acts or is never rewarded has no episode; a smaller "
            "step_size; a larger max_staleness of the policy that sampling waits for",
        )


_UNTRAINED = {
    "greedy": ("at temperature 0", "let the agent ask for a temperature above 0"),
    "penalty": ("with a penalty", "remove presence_penalty, frequency_penalty and repetition_penalty from the agent"),
    "filter": (
        "with top_k, top_p or min_p, whose kept sets the engine does not record",
        "write the agent's filters into [sampling], so that the engine records their kept sets",
    ),
    "grammar": (
        "with a response_format or tool_choice whose kept sets were lost, or too large",
        "shorten the replies (max_tokens), or remove it from the agent, which then checks the reply itself",
    ),
}
"""How an agent's calls were sampled that cannot be trained, and what to change, by cause."""

_REACHED_LIMITS: Mapping[StopReason, tuple[str, str, int, str]] = {
    "time_limit": (
        "out_of_time",
        "episodes/timed_out",
        1,
        "`agentrl episode why` names the line at which one waited: give that wait a shorter limit, or raise "
        "episode_timeout_s",
    ),
    "context_length": (
        "context_full",
        "episodes/context_full",
        1,
        "raise engine.max_context, shorten prompts and tool results, or lower sampling.max_tokens or "
        "sampling.max_turns",
    ),
    "max_turns": (
        "out_of_turns",
        "episodes/out_of_turns",
        WINDOW,
        "if they earn more than episodes that end, the policy learns to run out of turns: take some reward from them; "
        "otherwise raise sampling.max_turns, or say in the prompt how an episode ends",
    ),
}
"""Name, metric, least number of steps and advice of the alarm about a limit that ends most episodes."""

RULES: tuple[Rule | MetricRule, ...] = (
    Rule(
        {
            "always_fails": f"all of at least {ALWAYS_CALLS} calls of a program (`HarnessEnvironment`), a tool, an "
            f"effect or a resource failed, or the last {ALWAYS_IN_A_ROW}; after the end of the run or "
            "evaluation, a single call is enough"
        },
        _always_fails,
        of_run=True,
    ),
    Rule(
        {
            "dropped_by_time": f"{TIME_SHARE:.0%} of all ended episodes, at least {TIME_EPISODES}, were dropped "
            "because their program hung (`episode_timeout`)",
            "dropped": f"{DROPPED_SHARE:.0%} of all ended episodes, at least {MIN_DROPPED}, were dropped for one "
            "reason",
        },
        _drops,
        of_run=True,
    ),
    *[
        MetricRule(
            name,
            f"in each step, {MOST_SHARE:.0%} or more of the episodes end at `{LIMITS[reason]}`",
            metric=metric,
            at_least=MOST_SHARE,
            text=f"{{mean:.0%}} of the episodes in the last {{steps}} ended at {LIMITS[reason]}",
            advice=f"`agentrl episode list RUN --where 'stop_reason = {reason}'` lists them; {advice}",
            min_steps=min_steps,
            of_run=True,
            explained_by=("dropped",),
            example=reason,
        )
        for reason, (name, metric, min_steps, advice) in _REACHED_LIMITS.items()
    ],
    Rule(
        {
            "collapse": "the reward fell to its lowest value and no episode has an advantage since, which unchanged "
            f"weights would do with a probability below {FALL_CHANCE:g}, or with {MOST_SHARE:.0%} or more broken turns "
            f"that were intact before; or {ZERO_SHARE:.0%} of the episodes have zero advantage, the reward is below "
            f"its best, and the entropy below {LOW_ENTROPY:g} nats"
        },
        _fall,
    ),
    *[
        MetricRule(
            f"untrained_{cause}",
            f"{UNTRAINED_SHARE:.0%} or more of the newest step's turns are not trained, because an outside agent asked "
            f"for them {how}",
            metric=f"untrained/{cause}",
            per="episodes/turns",
            at_least=UNTRAINED_SHARE,
            text=f"{{mean:.0%}} of the newest step's turns are not trained: the agent asked for them {how}",
            advice=f"{cure}, or set gateway.sampling = 'run' in a new run, whose values then replace the agent's",
            window=1,
            example=f"untrained/{cause}",
        )
        for cause, (how, cure) in _UNTRAINED.items()
    ],
    MetricRule(
        "empty_output",
        f"in each step, {MOST_SHARE:.0%} or more of the turns have no text and no tool call",
        metric="turns/empty",
        per="episodes/turns",
        at_least=MOST_SHARE,
        text="{mean:.0%} of the turns in the last {steps} have no text and no tool call",
        advice="`agentrl episode list RUN --where 'metric.turns/empty > 0'` lists examples, and `agentrl episode "
        "tokens` shows what was sampled; a chat template that fits the model, a base model that answers, or a higher "
        f"sampling.temperature; {_IF_LATER}",
        example="turns/empty",
    ),
    Rule(
        {
            "hidden_tools": "the chat template hides the offered tools from the model, which calls none, in the newest "
            "step or, before the first one, in the evaluation before training"
        },
        _hidden_tools,
    ),
    Rule(
        {
            "foreign_calls": f"in the newest step, or before the first one in the evaluation before training, "
            f"{FOREIGN_SHARE:.0%} or more of the replies hold a call to an offered tool in a form that the run does "
            "not read"
        },
        _foreign_calls,
    ),
    Rule(
        {
            "cut_off": f"in the evaluation before training, before the first step, all rewards are 0 and "
            f"limits (`sampling.max_turns`, for example) ended {MOST_SHARE:.0%} or more of the episodes"
        },
        _cut_off,
        explained_by=("hidden_tools",),
    ),
    Rule(
        {
            "illegal_output": f"in each step, {BROKEN_SHARE:.0%} or more of the turns break the format, and the share "
            f"is not falling; in the first {WINDOW - 1} steps, {EARLY_BROKEN_SHARE:.0%} or more"
        },
        _illegal_output,
        explained_by=("hidden_tools", "foreign_calls", "collapse"),
    ),
    Rule(
        {
            "unused_tools": f"tools are offered, and in the newest {WINDOW} steps, at least {MIN_EPISODES} episodes, "
            f"there is less than one call in {1 / UNUSED_SHARE:.0f} episodes"
        },
        _unused_tools,
        explained_by=("hidden_tools", "illegal_output", "collapse"),
    ),
    Rule(
        {
            "tool_errors": f"{TOOL_ERROR_SHARE:.0%} or more of the tool calls raise an exception, and the share is "
            "not falling; steps without calls do not count"
        },
        _tool_errors,
    ),
    Rule(
        {
            "no_signal": f"{ZERO_SHARE:.0%} of the episodes have zero advantage, and the mean reward has changed by "
            f"less than {FLAT:g} since the start, or never exceeded that; in the first {WINDOW - 1} steps, if no "
            f"episode has an advantage; before the first, if at least {MIN_EPISODES} held-out episodes all got the "
            "same reward",
            "alone": f"{ZERO_SHARE:.0%} of the episodes have zero advantage, {ALONE_SHARE:.0%} because there is no "
            "other episode to compare them with",
        },
        _nothing_taught_yet,
        explained_by=("hidden_tools", "foreign_calls", "collapse"),
    ),
    Rule(
        {
            "nothing_to_learn": f"{ZERO_SHARE:.0%} of the episodes have zero advantage, at the best reward so far or "
            f"at {1 - FLAT:g} to 1",
        },
        _nothing_taught,
        explained_by=("hidden_tools", "illegal_output", "collapse"),
    ),
    Rule(
        {
            "equal_groups": f"at least {EQUAL_STEPS} of the newest {2 * WINDOW} steps had no gradient, because the "
            f"rewards within each group were equal; steps at reward {1 - FLAT:g} to 1 do not count"
        },
        _equal_groups,
        explained_by=("foreign_calls", "illegal_output", "no_signal", "alone", "collapse", "nothing_to_learn"),
    ),
    Rule(
        {
            "held_out_behind": "between two evaluations on the same tasks, the training reward rose by far more than "
            "chance, and the held-out reward did not"
        },
        _held_out_behind,
    ),
    Rule(
        {
            "staleness": "the mean staleness exceeds `max_staleness` (with `credit.release = late` or `episode`, "
            "half a step more) by more than a quarter of it and more than 0.25 steps; not if a step trained on "
            "episodes begun before the last resume"
        },
        _staleness,
    ),
    Rule(
        {
            "engine_mismatch": f"k3 is above {MISMATCH_BOUND:g} nats per token for tokens sampled by exactly the "
            f"trained weights, over at least {MISMATCH_TOKENS} tokens from {MISMATCH_STEPS[0]} or more of the last "
            f"{MISMATCH_STEPS[1]} steps; not if the environment gave replies in them",
            "off_policy": f"k3 is above {K3_BOUND:g} nats per token, for all tokens or one seat's; not if the "
            f"environment gave replies (`agent.act(reply=…)`) in the last {MISMATCH_STEPS[1]} steps",
        },
        _mismatch,
    ),
    MetricRule(
        "lost_routing",
        "turns of the newest step were trained without the experts that the engine recorded for them, because their "
        "files are missing or damaged",
        metric="lost_routing",
        at_least=1.0,
        text="{mean:.0f} turns of the newest step had lost the experts that were recorded for them, and were trained "
        "through experts that the trainer chose",
        advice="nothing if a worker's machine was lost or the power was cut; otherwise make room in the temporary "
        "directories of the workers' machines, and remove nothing in `journal/routing/`",
        window=1,
    ),
    MetricRule(
        "masked",
        f"in each step, {MASKED_SHARE:.0%} or more of the sampled tokens are beyond `max_lag` and not trained",
        metric="staleness/masked",
        at_least=MASKED_SHARE,
        text="{mean:.0%} of the sampled tokens of the last {steps} were beyond max_lag and not trained",
        advice="raise policies.NAME.max_lag, lower policies.NAME.max_staleness, or set credit.release = 'late', with "
        "which a slow episode does not make its group old",
    ),
    MetricRule(
        "gate_closed",
        f"in each step, less than {GATE_SHARE:.0%} of the proposals pass the gate",
        metric="gate/acceptance",
        below=GATE_SHARE,
        text="{mean:.0%} of the proposals of the last {steps} passed the gate",
        advice="a base model that makes valid proposals, a penalty below every reward behind the gate, or a rule it "
        "can learn in steps",
        window=WINDOW,
        min_steps=WINDOW,
        of_run=True,
    ),
    MetricRule(
        "proposals_alike",
        f"in each step, the entropy of the proposals' structures is below {STRUCTURE_ENTROPY:g} nats",
        metric="proposals/structure_entropy",
        below=STRUCTURE_ENTROPY,
        text="the structures of the newest proposals have an entropy of {mean:.2f} nats: most are the same",
        advice="trainer.entropy_bonus = 0.04, a penalty on the `share` that `ctx.remember` returns, or a checkpoint "
        "from before the entropy fell",
        window=WINDOW,
        min_steps=WINDOW,
        of_run=True,
    ),
    Rule(
        {
            "proposals_repeat": f"{REPEATED_SHARE:.0%} of the proposals, at least {MIN_PROPOSALS}, are repeated",
            "off_frontier": f"less than {FRONTIER_SHARE:.0%} of at least {MIN_PROPOSALS} proposals (`agent.gate`, "
            "`ctx.remember`) got a mean reward between 0.2 and 0.8 from their attempts",
        },
        _proposals,
        of_run=True,
    ),
    Rule(
        {
            "one_seat_wins": f"one seat wins {SEAT_SHARE:.0%} of at least {MIN_GAMES} decided games (rewards above "
            "and below 0)"
        },
        _one_seat_wins,
        of_run=True,
    ),
    Rule(
        {
            "loses_to_past": f"a policy wins less than {LOSING_RATE:.0%} of the games against its past versions, and "
            f"{LOSING_ERRORS:g} standard errors less than before (at least {MIN_GAMES} games in both)"
        },
        _loses_to_past,
    ),
    Rule(
        {
            "starved": f"a policy without `freeze` phases takes no step while the others take {STARVED_STEPS}, and "
            f"{STARVED_RATIO} times as many as between its last steps; {STARVED_STEPS * STARVED_RATIO} before its "
            "first step"
        },
        _starvation,
    ),
)
"""Conditions of all alarms, in the order in which a run shows them."""
MEANINGS = {name: meaning for rule in RULES for name, meaning in rule.meanings.items()}
"""Condition that raises each alarm."""


def newest_step_metrics(policy: PolicyMetricHistory, steps: int = WINDOW) -> list[Values]:
    """Return the metrics of the policy's newest steps, in order."""
    return list(itertools.islice(reversed(policy.steps.values()), steps))[::-1]


def window_metric_values(window: Sequence[Values], name: str) -> list[float]:
    """Return the measured values of a metric."""
    return [values[name] for values in window if name in values]


def window_metric_names(window: Sequence[Values], group: str) -> list[str]:
    """Return the names of the measured metrics `group/<…>`."""
    return sorted({name for values in window for name in values if name.startswith(f"{group}/")})


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def window_metric_sum(window: Sequence[Values], name: str) -> float:
    """Return the sum of a metric over a window."""
    return sum(window_metric_values(window, name))


def window_weighted_mean(window: Sequence[Values], name: str, weight: str) -> float:
    """Return the mean of a share, weighted by another metric."""
    return sum(v[name] * v[weight] for v in window if name in v and weight in v) / max(
        window_metric_sum(window, weight), 1e-9
    )


def read_raised_alarms(directory: Path) -> dict[str, int]:
    """Return the step at which each alarm of `alarms.jsonl` was last raised, by name."""
    raised: dict[str, int] = {}
    for row in read_jsonl(directory / FILE):
        name, step = row.get("name"), row.get("step")
        if name in MEANINGS and isinstance(step, int):
            raised[name] = step
    return raised


def write_alarm(directory: Path, alarm: Alarm, step: int) -> None:
    """Append a newly raised alarm and its step to `alarms.jsonl`; disk errors are ignored."""
    try:
        with open_jsonl_to_append(directory / FILE) as file:
            append_jsonl_line(file, {"step": step, **alarm._asdict()})
    except OSError:
        return
