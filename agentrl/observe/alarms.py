"""Alarms: what goes wrong in a run without ending it, named with what to try. Pure functions of `RunState`.

Each looks at a window of the newest steps, so that a single odd step raises none, and says nothing where what it needs
was not measured. An alarm's name is stable; its text carries the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.observe import coevolution_alarms
from agentrl.observe.alarm_lines import Alarm
from agentrl.observe.metrics import BROKEN_FORMAT
from agentrl.observe.windows import WINDOW, mean_of, names_of, newest, values_of

if TYPE_CHECKING:
    from agentrl.observe.run_state import PolicyState, RunState, Values

BROKEN_SHARE = 0.3
"""Share of turns that break the format, from which on the policy counts as fallen into illegal output."""
ZERO_SHARE = 0.9
"""Share of units without advantage, from which on a step teaches nothing."""
ALONE_SHARE = 0.5
"""Share of units compared with nothing, from which on that is why a step teaches nothing."""
LOW_ENTROPY = 0.01
"""Nats per token below which a policy hardly explores."""
K3_BOUND = 0.05
"""Nats per token: `k3` of a healthy run stays an order of magnitude below."""
MISMATCH_BOUND = 0.002
"""The same for tokens sampled by the very weights that are trained: what is left is the difference between engine and
trainer. Seen: below 1e-6 in one dtype; 5e-5 with bf16 against float32, or over KV of a version before; ten times that
without routing replay; 0.001 (a peaked policy) to 0.5 where kept sets are lost (`benchmarks.mismatch`)."""
MISMATCH_TOKENS = 200
"""Such tokens before their mean means something."""
MISMATCH_STEPS = (3, 20)
"""They come from this many of the newest steps, at least and at most: with stale tokens beside them they are few."""
DROPPED_SHARE = 0.25
"""Share of the ended episodes lost to one reason."""
TIME_SHARE, TIME_EPISODES = 0.01, 3
"""Share and number of the ended episodes lost to time, from which on what is trained is quicker than what was begun."""
MIN_EPISODES = 16
"""Episodes before a share of them means something."""
FORMAT_EPISODES = 64
"""Episodes of each kind before those that break the format are compared with those that keep it."""
FORMAT_ERRORS = 4.0
"""Standard errors by which the former must be ahead: the comparison is made at every step."""
FORMAT_MARGIN = 0.05
"""Share of the spread of all steps' mean rewards by which they must be ahead besides."""
COMPOSITION_BOUND = 0.05
"""How far what is trained may be from what was dispatched: a share of its length, deviations of its reward."""
LENGTH_STEPS = 20
"""Steps over which they are compared."""
MEANINGS = {
    "illegal_output": f"{BROKEN_SHARE:.0%} of the turns or more break the format in each of {WINDOW} steps, and no "
    "fewer at their end",
    "format_pays": "over the whole run, episodes that break the format earn more than those that keep it, by "
    f"{FORMAT_ERRORS:g} standard errors and {FORMAT_MARGIN:.0%} of the rewards' spread (at least {FORMAT_EPISODES} of "
    f"each, over {WINDOW} steps)",
    "alone": f"{ZERO_SHARE:.0%} of the units of {WINDOW} steps have no advantage, {ALONE_SHARE:.0%} for want "
    "of other episodes to be compared with",
    "collapse": f"{ZERO_SHARE:.0%} of the units of {WINDOW} steps have no advantage, the reward is below its best, the "
    f"entropy below {LOW_ENTROPY:g} nats",
    "no_signal": "the same, and the reward has never differed; before that many steps: all of at least "
    f"{MIN_EPISODES} held-out episodes before training got the same reward, and no step has taught anything yet",
    "nothing_to_learn": "the same, at the best reward so far",
    "staleness": f"the mean lag of {WINDOW} steps is above max_staleness by a quarter of it, at least by 0.25 steps",
    "max_lag": f"trained tokens older than max_lag in the last {WINDOW} steps, though begun in this life of the run",
    "off_policy": f"k3 above {K3_BOUND:g} nats per token over {WINDOW} steps, of all tokens or of one seat's",
    "engine_mismatch": f"k3 above {MISMATCH_BOUND:g} nats per token sampled by the very weights that were trained: the "
    f"newest {MISMATCH_TOKENS} of them, from {MISMATCH_STEPS[0]} steps or more of the last {MISMATCH_STEPS[1]}",
    "composition": f"over {LENGTH_STEPS} steps, trained units are {COMPOSITION_BOUND:.0%} shorter or longer, in tokens "
    "or seconds, than all that were dispatched, or their groups' rewards differ by "
    f"{COMPOSITION_BOUND:g} standard deviations, or {COMPOSITION_BOUND:.0%} are held back",
    "dropped_by_time": f"{TIME_SHARE:.0%} of the episodes that ended, at least {TIME_EPISODES}, were dropped because "
    "their program hung (`episode_timeout`)",
    "dropped": f"{DROPPED_SHARE:.0%} of the episodes that ended, at least {MIN_EPISODES}, were dropped for one reason",
    **coevolution_alarms.MEANINGS,
}
"""When each alarm is raised."""
EXPECTED_DROPS = {"run_ended", "frozen"}

ADVICE_ON_DROPS = {
    "environment_error": "run `agentrl env check`; `agentrl episode show` of a dropped one gives the exception",
    "episode_timeout": "see with `agentrl episode show` where `run()` hangs, and go through ctx there (a tool, an "
    "effect), which then ends as truncated; or raise episode_timeout_s",
    "fan_out": "declare in `fan_out` as many child episodes as an episode starts in all, or start fewer",
    "prompt_too_long": "raise engine.max_context or shorten the first prompt",
    "no_reward": "give every agent a reward on every path through `run()`, or set `truncated_reward`",
    "too_few_children": "see with `agentrl episode list` why child episodes were dropped; start more of them",
    "bad_reward": "return a finite number from `reward`; for a turn, one that has been",
    "nondeterminism": "run `agentrl env check`: randomness, time or the outside world bypasses `ctx`",
    "untrainable": "`agentrl episode show` of a dropped one says what of its entries is damaged or does not fit",
    "nonfinite_gradient": "lower the learning rate; look at k3 and grad_norm before the first of them",
}


def alarms(state: RunState) -> list[Alarm]:
    """The alarms of a run, the gravest first."""
    found: list[Alarm] = []
    for policy in state.policies.values():
        window = newest(policy)
        about_format = [*_format_pays(policy), *_illegal_output(policy, window)]
        found += about_format
        found += _max_lag(policy, window)
        if len(window) < WINDOW:
            found += _nothing_to_tell_apart(policy)
        else:
            if not about_format:
                found += _nothing_taught(policy, window)
            found += _staleness(policy, window)
            found += _mismatch(policy, window)
        found += _composition(policy)
    found += coevolution_alarms.alarms(state)
    if state.status is not None:
        found += _dropped(state.status.dropped, state.status.trained + state.status.ready)
    return found


def _format_pays(policy: PolicyState) -> Iterator[Alarm]:
    broken: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    for values in policy.steps.values():
        episodes, share = values.get("format/episodes", 0.0), values.get("format/broken_share", 0.0)
        if "format/reward_broken" in values:
            broken.append((episodes * share, values["format/reward_broken"]))
        if "format/reward_kept" in values:
            kept.append((episodes * (1.0 - share), values["format/reward_kept"]))
    counts = sum(count for count, _ in broken), sum(count for count, _ in kept)
    if min(counts) < FORMAT_EPISODES or min(len(broken), len(kept)) < WINDOW:
        return
    (mean_broken, error_broken), (mean_kept, error_kept) = _pooled(broken), _pooled(kept)
    means = [mean for _, mean in (*broken, *kept)]
    needed = max(FORMAT_ERRORS * math.hypot(error_broken, error_kept), FORMAT_MARGIN * (max(means) - min(means)))
    if mean_broken - mean_kept > max(needed, 1e-9):
        yield Alarm(
            "format_pays",
            policy.name,
            f"episodes that break the format earn {mean_broken:.3f} on average, those that keep it {mean_kept:.3f}, "
            f"over {sum(counts):.0f} episodes: breaking it is what will be learned",
            "reward a broken format below every legal end (`illegal_reward`, a penalty in `reward`), then start anew",
        )


def _pooled(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean of all episodes and its standard error, from (episodes, their mean) of each step.

    The mean of c rewards of variance v has variance v / c, so c times its squared distance estimates v at every step; a
    reward that rises meanwhile makes the error larger.
    """
    total = sum(count for count, _ in steps)
    mean = sum(count * value for count, value in steps) / total
    variance = sum(count * (value - mean) ** 2 for count, value in steps) / (len(steps) - 1)
    return mean, math.sqrt(variance / total)


def _illegal_output(policy: PolicyState, window: Sequence[Values]) -> Iterator[Alarm]:
    shares = values_of(window, "format/broken_turns")
    if len(shares) < WINDOW or min(shares) < BROKEN_SHARE or shares[-1] < 0.8 * shares[0]:
        return
    kinds = sorted(((mean_of(values_of(window, name)), name) for name in BROKEN_FORMAT), reverse=True)
    per_episode = max(mean_of(values_of(window, "episodes/turns")), 1e-9)
    what = ", ".join(f"{name} {mean / per_episode:.0%}" for mean, name in kinds if mean > 0)
    yield Alarm(
        "illegal_output",
        policy.name,
        f"{mean_of(shares):.0%} of the turns of the last {len(window)} steps break the format"
        + (f" (of all turns: {what})" if what else ""),
        "see one with `agentrl episode show`; resume from an earlier checkpoint with a lower learning rate and "
        "trainer.entropy_bonus = 0.02; where it was so from the start, a base model that knows the format, or "
        "a larger sampling.max_tokens if turns end by length",
    )


def _nothing_taught(policy: PolicyState, window: Sequence[Values]) -> Iterator[Alarm]:
    zero, rewards = values_of(window, "advantage/zero_share"), values_of(window, "reward/mean")
    if len(zero) < len(window) or len(rewards) < len(window) or mean_of(zero) < ZERO_SHARE:
        return
    if (alone := mean_of(values_of(window, "advantage/alone_share"))) >= ALONE_SHARE:
        yield Alarm(
            "alone",
            policy.name,
            f"{alone:.0%} of the units of the last {len(window)} steps have nothing to be compared with",
            "`ctx.spawn` with n = 2 or more: children of one call are compared with each other; or "
            "credit.advantage = 'role_mean', which compares with what the policy used to get in that seat",
        )
        return
    _, history = policy.series("reward/mean")
    best = max(mean_of(history[at : at + WINDOW]) for at in range(len(history) - WINDOW + 1))
    spread, now = max(history) - min(history), mean_of(rewards)
    entropy = values_of(window, "entropy")
    tail = f", entropy {mean_of(entropy):.3f} nats per token" if entropy else ""
    text = f"{mean_of(zero):.0%} of the units of the last {len(window)} steps have no advantage: every group agrees"
    if spread < 1e-9:
        yield Alarm(
            "no_signal",
            policy.name,
            f"{text} on reward {now:.3f}, as since the start{tail}",
            "easier tasks, a larger credit.group_size, a higher sampling.temperature, or a reward for partial success",
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
            f"{text} at reward {now:.3f}, the best so far{tail}",
            "stop here, or go on with harder tasks: these are solved as well as this reward can tell",
        )


def _nothing_to_tell_apart(policy: PolicyState) -> Iterator[Alarm]:
    """Before enough steps are taken to tell: whether the evaluation before training already showed no signal."""
    first = policy.evaluations.get(0, {})
    episodes = first.get("evaluation/episodes", 0.0)
    taught = [values for values in policy.steps.values() if values.get("advantage/zero_share", 0.0) < 1.0]
    if episodes >= MIN_EPISODES and first.get("evaluation/reward_deviation") == 0.0 and not taught:
        yield Alarm(
            "no_signal",
            policy.name,
            f"all {episodes:.0f} held-out episodes before training got reward {first['evaluation/reward']:.3f}: groups "
            "whose rewards are all equal teach nothing",
            "easier tasks, a base model that can do some of them, a larger credit.group_size, a higher "
            "sampling.temperature, or a reward for partial success",
        )


def _staleness(policy: PolicyState, window: Sequence[Values]) -> Iterator[Alarm]:
    lags, bound = values_of(window, "staleness/mean"), policy.max_staleness
    if lags and bound is not None and mean_of(lags) > bound + max(0.25, 0.25 * bound):
        yield Alarm(
            "staleness",
            policy.name,
            f"the mean lag of the last {len(window)} steps is {mean_of(lags):.2f} steps, the bound {bound}",
            "episodes outlive several steps: lower max_in_flight or sampling.max_turns, raise step_size, or allow it "
            "with a larger max_staleness",
        )


def _max_lag(policy: PolicyState, window: Sequence[Values]) -> Iterator[Alarm]:
    exceeded = sum(values_of(window, "staleness/exceeded"))
    if exceeded:
        largest = max(values_of(window, "staleness/max"))
        yield Alarm(
            "max_lag",
            policy.name,
            f"{exceeded:.0f} trajectories of the last {len(window)} steps were older than max_lag; the "
            f"oldest was {largest:.0f} steps old",
            "admission did not know of them: declare all child episodes in `fan_out`; see with `agentrl episode why` "
            "whether they began again",
        )


def _mismatch(policy: PolicyState, window: Sequence[Values]) -> Iterator[Alarm]:
    least, most = MISMATCH_STEPS
    measured: list[Values] = []
    tokens = total = 0.0
    for values in reversed(newest(policy, most)):
        if "lag_k3/0" in values and (len(measured) < least or tokens < MISMATCH_TOKENS):
            measured.append(values)
            tokens += values.get("lag_tokens/0", 0.0)
            total += values.get("lag_tokens/0", 0.0) * values["lag_k3/0"]
    k3 = mean_of(values_of(window, "k3"))
    seats = {name: mean_of(values_of(window, name)) for name in names_of(window, "seat_k3")}
    if len(measured) >= least and tokens >= MISMATCH_TOKENS and total > MISMATCH_BOUND * tokens:
        largest = max(values_of(measured, "lag_max_difference/0"), default=0.0)
        yield Alarm(
            "engine_mismatch",
            policy.name,
            f"engine and trainer disagree by k3 = {total / tokens:.3f} nats per token (at most {largest:.2f}) about "
            f"tokens that the trained weights themselves had sampled (healthy: below {MISMATCH_BOUND:g})",
            "if mismatch/k3 is far lower, engine.refresh = 'token', or 'lazy' with adapters; "
            "engine.capture_routing = true for a mixture of "
            "experts; the same dtype and attention on both sides; a kept_mass of 1 with sampling filters: kept sets "
            "were lost; none of these: the engine serves other weights than it records, resume from a checkpoint",
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


def _composition(policy: PolicyState) -> Iterator[Alarm]:
    window = newest(policy, LENGTH_STEPS)
    off: list[str] = []
    for name, healthy, more, less in (
        ("length_ratio", 1.0, "{:.0%} longer", "{:.0%} shorter"),
        ("seconds_ratio", 1.0, "{:.0%} slower", "{:.0%} faster"),
        ("reward_shift", 0.0, "{:.2f} deviations of the reward easier", "{:.2f} deviations of the reward harder"),
    ):
        values = values_of(window, f"composition/{name}")
        if len(values) == LENGTH_STEPS and abs(values[-1] - healthy) > COMPOSITION_BOUND:
            off.append((more if values[-1] > healthy else less).format(abs(values[-1] - healthy)))
    held = values_of(window, "composition/held_share")
    if off:
        yield Alarm(
            "composition",
            policy.name,
            f"what was trained is {', '.join(off)} than all that was dispatched with it: the steps see a part of it",
            "something drops units, or holds units back, that are not like the others; `agentrl run ledger` counts by "
            "reason. End long episodes with a reward (`truncated_reward`) rather than with episode_timeout_s",
        )
    elif len(held) == LENGTH_STEPS and held[-1] > COMPOSITION_BOUND:
        yield Alarm(
            "composition",
            policy.name,
            f"{held[-1]:.0%} of what was dispatched was still not trained {LENGTH_STEPS} steps later",
            "see what they wait for with `agentrl episode timeline`; a larger step_size, or a shorter "
            "environment.tool_timeout_s or sampling.max_turns, if they are that long",
        )


def _dropped(reasons: Mapping[str, int], others: int) -> Iterator[Alarm]:
    ended = sum(reasons.values()) + others
    by_time = reasons.get("episode_timeout", 0)
    if by_time >= TIME_EPISODES and TIME_SHARE * ended <= by_time < max(DROPPED_SHARE * ended, MIN_EPISODES):
        yield Alarm(
            "dropped_by_time",
            "",
            f"{by_time:,} of {ended:,} episodes that ended were dropped because their program hung: if what hangs "
            "depends on what a policy says, the gradient leaves it out",
            ADVICE_ON_DROPS["episode_timeout"],
        )
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        if reason in EXPECTED_DROPS or count < MIN_EPISODES or count < DROPPED_SHARE * ended:
            continue
        yield Alarm(
            "dropped",
            "",
            f"{count:,} of {ended:,} episodes that ended were dropped because of {reason}",
            ADVICE_ON_DROPS.get(reason, f"`agentrl episode list RUN --where 'drop_reason = {reason}'` shows them"),
        )
