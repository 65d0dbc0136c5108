"""Calibration: makes a plan from a real run, with the lengths, turns, tools, engines and trainers in its journal.

Only data of the journal is used. The speed of engines is fitted to the seconds of turns (`fit_engine_rates`). A turn
takes the seconds of its tokens, each as long as a forward pass with all running calls, and the seconds of the contexts
computed during it, its own and those of others. Seconds per token do not fall as more calls run; nothing else is
assumed about their curve, which is fitted at powers of two with enough turns and extrapolated linearly beyond the last
two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean, median, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.config.load import validate_section
from agentrl.core.errors import InputError
from agentrl.journal.entries import TurnEntry
from agentrl.simulation.plan import FURTHEST, SimulationPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import EpisodeHeader, EpisodeSpec
    from agentrl.inspection.reader import RunReader

MOST = 3000
"""Maximum number of newest episodes to read."""
RANKS = 49
"""Number of values that represent a measured distribution."""
FILLING = 0.25
"""Share of the steps, from the start, that measured shares leave out."""

ENOUGH = 10
"""Minimum number of turns for a fit."""

_NORMAL = NormalDist()


class BusyShares(msgspec.Struct, frozen=True):
    """Shares of time in which engines and trainer were busy."""

    engine: float
    """Share of the time in which any call ran."""
    trainer: float
    steps_per_hour: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a run that a simulation needs."""

    plan: SimulationPlan
    steps: int
    """Number of optimizer steps of the first policy that learns."""
    skipped: int
    measured: BusyShares
    """Measured shares of busy time after the skipped steps."""
    episodes: int
    """Number of episodes that were read."""


class _Seen:
    """Samples of one environment, read from the journal."""

    def __init__(self) -> None:
        self.episodes = 0
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self.turns: dict[str, list[float]] = defaultdict(list)
        self.prompts: list[int] = []
        self.gaps: list[float] = []
        self.added: list[int] = []

    def hear(self, seat: str, bodies: Sequence[TurnEntry]) -> None:
        """Add an agent's turns, in order."""
        self.tokens[seat].append(float(sum(len(body.token_ids) // 4 for body in bodies)))
        self.turns[seat].append(float(len(bodies)))
        self.prompts.append(len(bodies[0].context_ids) // 4)
        for before, after in pairwise(bodies):
            self.gaps.append(after.started - before.started - before.seconds)
            self.added.append(len(after.context_ids) // 4)


def read_calibration(reader: RunReader) -> Calibration:
    """Read the calibration of a run.

    Raises:
        InputError: the run is too short.
    """
    config = reader.info().get("config")
    if not isinstance(config, dict):
        raise InputError(f"{reader.path}: not a training run, so it cannot be used for calibration")
    trained = [name for name, policy in config["policies"].items() if policy["kind"] == "trained"]
    rows = reader.log.rows("SELECT policy, seconds, fed, stepped_at FROM steps ORDER BY stepped_at")
    own = [at for policy, _, _, at in rows if policy == trained[0]]
    if len(own) < 4:
        raise InputError(f"{reader.path}: {len(own)} steps are too few for calibration")
    skipped = max(int(len(own) * FILLING), 1)
    begin, end = own[skipped - 1], own[-1]
    window = [row for row in rows if begin < row[3] <= end]
    seen, turns, since = _read(reader, begin, end)
    if len(turns) < 20:
        raise InputError(f"{reader.path}: {len(turns)} turns after the first steps are too few for calibration")
    published = [value for value in _metric(reader, trained[0]) if value > 0]
    replicas = max(1, config["engine"]["replicas"])  # 0: one engine, in the run's process
    plan = validate_section(
        {
            "seed": config["seed"],
            "max_in_flight": config["max_in_flight"],
            "environments": _environments(reader, seen),
            "policies": {name: _policy(policy, window, name) for name, policy in config["policies"].items()},
            "seats": config["seats"],
            "credit": {
                "group_size": config["credit"]["group_size"],
                "release": config["credit"]["release"].replace("dynamic_sampling", "group"),
            },
            "engine": {
                "replicas": replicas,
                "slots": config["engine"]["slots"],
                **fit_engine_rates(turns, config["engine"]["slots"], replicas),
            },
            "trainer": {
                "step_seconds": max(fmean(seconds for _, seconds, _, _ in window), 1e-6),
                "publish_seconds": median(published) if published else 0.0,
            },
        },
        str(reader.path),
        SimulationPlan,
    )
    return Calibration(
        plan=plan,
        steps=len(own),
        skipped=skipped,
        measured=BusyShares(
            engine=covered_share([(turn.start, turn.stop) for turn in turns], since, end),
            trainer=sum(seconds for _, seconds, _, _ in window) / (end - begin),
            steps_per_hour=3600 * (len(own) - skipped) / (end - begin),
        ),
        episodes=sum(found.episodes for found in seen.values()),
    )


def _policy(policy: Mapping[str, Any], steps: Sequence[tuple[Any, ...]], name: str) -> dict[str, Any]:
    if policy["kind"] != "trained":
        return {"kind": "frozen"}
    found = {key: policy.get(key) for key in ("step_size", "max_staleness", "max_lag")}
    seconds, units = (sum(step[column] for step in steps if step[0] == name) for column in (1, 2))
    if units:
        found["step_seconds"] = max(seconds / units * policy["step_size"], 1e-6)
    return found


def _metric(reader: RunReader, policy: str) -> list[float]:
    """Return the seconds of each step besides waiting and training, which are for publishing and loading."""
    values = {name: dict(reader.metric(name).get(policy, [])) for name in ("step/seconds", "step/waited_s")}
    trained = dict(reader.log.rows("SELECT step, seconds FROM steps WHERE policy = ? AND lineage = 0", policy))
    found = []
    for step, whole in values["step/seconds"].items():
        waited = values["step/waited_s"].get(step)
        if whole is not None and waited is not None and step in trained:
            found.append(whole - waited - trained[step])
    return found


def _read(reader: RunReader, begin: float, end: float) -> tuple[dict[str, _Seen], list[TimedTurn], float]:
    """Return samples of the newest episodes by environment, all turns since a time that is not before `begin`, and that
    time."""
    seen: dict[str, _Seen] = defaultdict(_Seen)
    turns: list[TimedTurn] = []
    ended = reader.episodes(f"purpose = 'train' and committed_at <= {end!r}", sort="committed_at", limit=MOST)
    others = f"purpose = 'train' and (committed_at = null or committed_at > {end!r})"
    since = max(ended[-1].committed_at or begin, begin) if len(ended) == MOST else begin
    for line in (*ended, *reader.episodes(others, limit=MOST)):
        own: dict[tuple[str, int], list[TurnEntry]] = defaultdict(list)
        for _, body in reader.episode(line.episode, line.attempt).entries:
            if isinstance(body, TurnEntry):
                own[body.seat, body.index].append(body)
        turns += [turn for bodies in own.values() for turn in map(timed_turn, bodies) if turn is not None]
        if line.committed_at is not None:
            found = seen[line.environment.rpartition(":")[2]]
            found.episodes += 1
            for (seat, _), bodies in own.items():
                found.hear(seat, sorted(bodies, key=lambda body: body.turn))
    return seen, [turn for turn in turns if turn.stop > since], since


def timed_turn(body: TurnEntry) -> TimedTurn | None:
    """Return a turn from the journal, without pauses at its beginning; None if it sampled nothing."""
    context = len(body.context_ids) // 4
    turn = TimedTurn(
        start=body.started + sum(pause.seconds for pause in body.pauses),
        stop=body.started + body.seconds,
        tokens=len(body.token_ids) // 4,
        context=context,
        computed=max(body.parent_context + context - body.cached_tokens, 0),
    )
    return turn if turn.tokens and 0 < turn.start < turn.stop < math.inf else None


def _environments(reader: RunReader, seen: Mapping[str, _Seen]) -> dict[str, Any]:
    """Return the environments in order of depth, roots first."""
    fan_out: dict[str, Counter[str]] = defaultdict(Counter)
    episodes: Counter[str] = Counter()
    roots: Counter[str] = Counter()
    statement = (
        "SELECT c.environment, p.environment, count(*) FROM admissions c LEFT JOIN admissions p ON p.episode = c.parent"
        " AND p.attempt = (SELECT max(attempt) FROM admissions WHERE episode = p.episode)"
        " WHERE c.purpose = 'train' GROUP BY 1, 2"
    )
    for child, parent, count in reader.log.rows(statement):
        name = str(child).rpartition(":")[2]
        episodes[name] += count
        if parent is None:
            roots[name] += count
        else:
            fan_out[str(parent).rpartition(":")[2]][name] += count
    likeness = sibling_length_correlation(reader.log.members())
    made = {}
    for name in sorted(seen, key=lambda name: -roots[name]):
        found = seen[name]
        children = {
            child: max(round(count / episodes[name]), 1) for child, count in fan_out[name].items() if child in seen
        }
        made[name] = {
            "seats": {
                seat: {"tokens": _distribution(found.tokens[seat]), "turns": _distribution(found.turns[seat])}
                for seat in found.tokens
            },
            "prompt": max(round(fmean(found.prompts)), 1),
            "tool_tokens": round(fmean(found.added)) if found.added else 0,
            "fan_out": children,
            "likeness": likeness,
        }
        if found.gaps:
            made[name]["tool_seconds"] = _distribution([max(gap, 1e-4) for gap in found.gaps])
    return made


def sibling_length_correlation(members: Iterable[tuple[EpisodeSpec, EpisodeHeader]]) -> float:
    """Return the correlation of siblings' log-tokens: the mean product of their deviations over the pairs of all
    groups."""
    logs: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for spec, header in members:
        for own in header.trajectories:
            if own.tokens:
                logs[spec.environment, own.seat][spec.group_id].append(math.log(own.tokens))
    pairs, products = 0, 0.0
    for groups in logs.values():
        known = [log for group in groups.values() for log in group]
        mean, deviation = fmean(known), pstdev(known)
        if not deviation:
            continue
        for group in groups.values():
            total = math.fsum((log - mean) / deviation for log in group)
            squares = math.fsum(((log - mean) / deviation) ** 2 for log in group)
            products += (total**2 - squares) / 2
            pairs += len(group) * (len(group) - 1) // 2
    return min(max(products / pairs, 0.0), 0.95) if pairs else 0.0


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    """Describe a distribution as a `QuantileDistribution` section of a plan."""
    ordered = sorted(max(value, 1e-4) for value in values)
    scores = (FURTHEST * (2 * rank / (RANKS - 1) - 1) for rank in range(RANKS))
    ranks = [ordered[round(_NORMAL.cdf(score) * (len(ordered) - 1))] for score in scores]
    return {
        "p50": ordered[len(ordered) // 2],
        "p90": ordered[int(len(ordered) * 0.9)],
        "cap": ordered[-1],
        "law": "measured",
        "ranks": ranks,
    }


def covered_share(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the share of the time that any of the spans covers."""
    covered, reached = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered += stop - start
            reached = stop
    return covered / (end - begin)


class TimedTurn(NamedTuple):
    """Engine call."""

    start: float
    stop: float
    tokens: int
    context: int
    """Number of new tokens in its context."""
    computed: int
    """Number of tokens of its whole context that no cache held."""


def fit_engine_rates(turns: Sequence[TimedTurn], slots: int, replicas: int) -> dict[str, Any]:
    """Fit the rates of a replica by least squares, in the form of `[engine]` in a plan.

    The time at which a call got a slot is unknown: while `n` calls compete for `slots`, each is assumed to run for
    `slots / n` of the time. Single turns that waited are therefore meaningless; only the mean of all is used.

    `prefill_rate` is the cost of new context tokens, whether computed, recomputed or served by a cache.

    Args:
        turns: all turns of a period, at least one, each with tokens and a duration.
        slots: slots per replica.
        replicas: number of replicas that share the calls.
    """
    import numpy as np

    running, seconds, share = np.array(_ran(turns, slots * replicas)).T
    running = np.maximum(running / replicas, 1.0)
    tokens = np.array([turn.tokens for turn in turns], float)
    own = np.array([turn.computed for turn in turns], float)
    contexts = (own + (np.array(_computed_during(turns), float) - own) / replicas) * share
    counts = _counts(running)
    ramps = [np.maximum((running - low) / (high - low), 0.0) for low, high in pairwise(counts)]
    ramps = [*(np.minimum(ramp, 1.0) for ramp in ramps[:-1]), *ramps[-1:]]
    rows = np.stack([tokens, *(tokens * ramp for ramp in ramps), contexts, seconds], axis=1)
    waited = share < 1 - 1e-9
    if waited.any():
        rows[waited] = rows[waited].mean(axis=0)
    if (~waited).sum() < ENOUGH:  # the cost of contexts cannot be separated from that of tokens
        rows[:, -2] = 0.0
    *steps, context = _least_squares(rows[:, :-1], rows[:, -1])
    points = zip(counts, accumulate(steps), strict=True)
    rates: dict[str, Any] = {"rates": {count: 1.0 / max(value, 1e-9) for count, value in points}}
    new, computed = sum(turn.context for turn in turns), sum(turn.computed for turn in turns)
    if new and context * computed > 1e-6 * seconds.sum():
        rates["prefill_rate"] = new / (context * computed)
    return rates


def _ran(turns: Sequence[TimedTurn], slots: int) -> list[tuple[float, float, float]]:
    """Return for each turn the mean number of running calls during it, and the seconds and the share of time it ran."""
    edges = sorted([(turn.start, 1) for turn in turns] + [(turn.stop, -1) for turn in turns])
    totals: dict[float, tuple[float, float]] = {}
    there, before, running, ran = 0, edges[0][0], 0.0, 0.0
    for at, change in edges:
        running += min(there, slots) * (at - before)
        ran += min(slots / max(there, 1), 1.0) * (at - before)
        totals[at] = running, ran
        there += change
        before = at
    found = []
    for turn in turns:
        (running, ran), (running_before, ran_before) = totals[turn.stop], totals[turn.start]
        whole = turn.stop - turn.start
        found.append(((running - running_before) / whole, ran - ran_before, (ran - ran_before) / whole))
    return found


def _computed_during(turns: Sequence[TimedTurn]) -> list[int]:
    """Return for each turn the context tokens of all calls that began during it, including its own."""
    begun = sorted((turn.start, turn.computed) for turn in turns)
    starts = [start for start, _ in begun]
    total = [0, *accumulate(computed for _, computed in begun)]
    return [total[bisect_left(starts, turn.stop)] - total[bisect_left(starts, turn.start)] for turn in turns]


def _counts(running: NDArray[Any]) -> list[int]:
    """Return the numbers of calls at which seconds per token are fitted: powers of two with enough turns close to
    them.
    """
    import numpy as np

    near = Counter(np.rint(np.log2(running)).astype(int).tolist())
    powers = sorted(power for power, turns in near.items() if turns >= ENOUGH)
    return [2**power for power in powers or [near.most_common(1)[0][0]]]


def _least_squares(columns: NDArray[Any], seconds: NDArray[Any]) -> list[float]:
    """Return the weights of the columns, none of them negative."""
    import numpy as np

    sizes = np.maximum(np.linalg.norm(columns, axis=0), 1e-9)
    found = np.zeros(len(sizes))
    used = list(range(len(sizes)))
    while True:
        weights = np.linalg.lstsq((columns / sizes)[:, used], seconds, rcond=None)[0]
        if (weights >= 0).all():
            break
        del used[int(weights.argmin())]
    found[used] = weights
    weights_found: list[float] = (found / sizes).tolist()
    return weights_found
