"""The plan of a simulation: episodes, hardware, and the settings of a run.

The settings of a run have their production names and are passed on unchanged (`SimulationPlan.config`), so production's
checks hold here too. Further bounds limit a plan's size: far beyond any real one, and small enough to be simulated in
reasonable time.

`QuantileDistribution` is given by its quantiles. `GPUS` and `MODELS` estimate the speed of engines and trainers by the
roofline, with the usually reached shares of it: decoding a token reads all weights once for the whole batch, and each
conversation's keys and values, so memory bandwidth limits it; training is limited by arithmetic, with 6 operations per
parameter and token, and 2 more because activations are recomputed. Measured values (`rates`, `prefill_rate`,
`kv_tokens`, `step_seconds`) are better and replace the estimates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from agentrl.config.fields import Episodes, MaybeSteps, Positive, Section, Share, Tokens
from agentrl.config.mistakes import describe_validation_error, format_short
from agentrl.config.policies import STALENESS_CHOICES
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.rollout.episode_context import MAX_CHILD_DEPTH

MOST = 10_000_000
"""Maximum tokens, seconds or turns of a prompt, an episode, a tool or a step; far beyond any real plan."""
Amount = Annotated[float, Field(ge=1e-6, le=MOST)]
"""Number of tokens, seconds or turns."""
FURTHEST = 3.0
"""Range of the scores of a standard normal variable at which measured quantiles are stored, in deviations."""
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)
SCORES = [_NORMAL.inv_cdf((rank + 0.5) / 200) for rank in range(200)]
"""Equally likely values of a standard normal variable."""


class QuantileDistribution(Section):
    """Distribution of tokens, seconds or turns, given by its quantiles.

    Example:
        >>> tail = QuantileDistribution(p50=32, p90=160, cap=1280)
        >>> round(tail.value(0.0)), round(tail.value(1.2815515)), round(tail.value(9.0))
        (32, 160, 1280)
    """

    p50: Amount
    p90: Amount
    cap: Amount
    """Maximum; larger values are cut off."""
    law: Literal["lognormal", "pareto", "measured"] = "lognormal"
    ranks: tuple[Amount, ...] = ()
    """Quantiles of a `measured` law, up to the cap: at equally spaced scores of a standard normal variable from -3 to
    3."""

    @model_validator(mode="after")
    def _check_order(self) -> QuantileDistribution:
        if not self.p50 <= self.p90 <= self.cap:
            raise ValueError(f"p50 = {self.p50:g}, p90 = {self.p90:g}, cap = {self.cap:g} must be ascending")
        if self.law == "pareto" and not self.p50 < self.p90 < self.cap:
            raise ValueError("law = 'pareto' needs p50 < p90 < cap")
        if (self.law == "measured") != (len(self.ranks) > 1) or list(self.ranks) != sorted(self.ranks):
            raise ValueError("law = 'measured' needs ranks, at least two and ascending; other laws take none")
        if self.ranks and self.ranks[-1] > self.cap:
            raise ValueError(f"ranks end at {self.ranks[-1]:g}, beyond cap = {self.cap:g}")
        return self

    def value(self, z: float) -> float:
        """Return the quantile at which a standard normal variable has the value `z`."""
        if self.law == "lognormal":
            return min(self.p50 * math.exp(math.log(self.p90 / self.p50) / _Z90 * z), self.cap)
        if self.law == "measured":
            place = min(max((z + FURTHEST) / (2 * FURTHEST), 0.0), 1.0) * (len(self.ranks) - 1)
            below = min(int(place), len(self.ranks) - 2)
            return self.ranks[below] + (place - below) * (self.ranks[below + 1] - self.ranks[below])
        cap = self.cap / self.p50
        alpha = _pareto_index(self.p90 / self.p50, cap)
        low = _pareto_low(alpha, cap)
        rank = _NORMAL.cdf(z) * (1 - (low / cap) ** alpha)
        return float(self.p50 * low * (1 - min(rank, 1 - 1e-12)) ** (-1 / alpha))

    @property
    def mean(self) -> float:
        """Mean of the distribution."""
        return fmean(map(self.value, SCORES))


def _pareto_low(alpha: float, cap: float) -> float:
    """Return the lower bound of a Pareto distribution with median 1 that is cut off at `cap`."""
    # 1 - x^a = (1 - (x/cap)^a) / 2  =>  x^a = 1 / (2 - cap^-a)
    return float((2 - cap**-alpha) ** (-1 / alpha))


def _pareto_index(p90: float, cap: float) -> float:
    """Return the index of such a distribution with this P90, by bisection."""
    low, high = 1e-3, 50.0
    while high - low > 1e-9:
        alpha = (low + high) / 2
        begin = _pareto_low(alpha, cap)
        rank = 0.9 * (1 - (begin / cap) ** alpha)
        low, high = (alpha, high) if begin * (1 - rank) ** (-1 / alpha) > p90 else (low, alpha)
    return low


READ_SHARE = 0.6
"""Share of the memory bandwidth that decoding reaches."""
PREFILL_SHARE = 0.45
"""Share of the arithmetic throughput that prefill reaches."""
TRAIN_SHARE = 0.35
"""Share of the arithmetic throughput that training reaches."""
MEMORY_SHARE = 0.9
"""Share of the memory available for weights, keys and values."""
STEP_SECONDS = 0.003
"""Seconds per forward pass besides reading weights, for kernel launches, sampling and the host."""

ModelName = Literal["0.5B", "1.5B", "7B", "14B", "32B", "70B"]
GpuName = Literal["A100", "H100", "H200", "B200", "L40S"]


class DecodeRateCurve:
    """Rate r(b), the tokens per second of each of b calls, from measured points; seconds per token are linear in
    between.

    Example:
        >>> rates = DecodeRateCurve({1: 50.0, 64: 25.0})
        >>> round(rates(1)), round(rates(64)), round(rates(32), 1), round(rates(127), 1)
        (50, 25, 33.5, 16.7)
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._counts = sorted(points)
        self._seconds = [1.0 / points[count] for count in self._counts]
        self._known: dict[int, float] = {}

    def __call__(self, count: int) -> float:
        """Return r(b)."""
        found = self._known.get(count)
        if found is None:
            found = self._known[count] = 1.0 / self._at(count)
        return found

    def _at(self, count: int) -> float:
        counts, seconds = self._counts, self._seconds
        if len(counts) == 1 or count <= counts[0]:
            return seconds[0]
        above = min(max(bisect_left(counts, count), 1), len(counts) - 1)
        slope = (seconds[above] - seconds[above - 1]) / (counts[above] - counts[above - 1])
        return max(seconds[above] + slope * (count - counts[above]), min(seconds))


@dataclass(frozen=True, slots=True)
class GpuDataSheet:
    """Data of a GPU's data sheet, for bf16 without sparsity."""

    memory: float
    """Memory in bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    operations: float
    """Floating-point operations per second."""


@dataclass(frozen=True, slots=True)
class DenseModelSpec:
    """Dense model with grouped-query attention, in bf16."""

    parameters: float
    kv_bytes: int
    """Bytes of keys and values per token of context."""

    def kv_tokens(self, gpu: GpuDataSheet, gpus: int) -> int:
        """Return the number of context tokens that fit beside the weights."""
        room = MEMORY_SHARE * gpu.memory * gpus - 2 * self.parameters
        return max(int(room / self.kv_bytes), 0)

    def prefill_rate(self, gpu: GpuDataSheet, gpus: int) -> float:
        """Return the context tokens computed per second."""
        return PREFILL_SHARE * gpu.operations * gpus / (2 * self.parameters)

    def rates(self, gpu: GpuDataSheet, gpus: int, slots: int, context: float) -> DecodeRateCurve:
        """Return r(b) for contexts of the given length in tokens."""

        def rate(count: int) -> float:
            reading = (2 * self.parameters + count * context * self.kv_bytes) / (READ_SHARE * gpu.bandwidth * gpus)
            computing = 2 * self.parameters * count / (PREFILL_SHARE * gpu.operations * gpus)
            return 1.0 / (max(reading, computing) + STEP_SECONDS)

        counts = {2**power for power in range(int(math.log2(slots)) + 1)} | {slots}
        return DecodeRateCurve({count: rate(count) for count in sorted(counts)})

    def train_rate(self, gpu: GpuDataSheet, gpus: int) -> float:
        """Return the tokens trained per second."""
        return TRAIN_SHARE * gpu.operations * gpus / (8 * self.parameters)


GPUS: Mapping[GpuName, GpuDataSheet] = {
    "A100": GpuDataSheet(80e9, 2.0e12, 312e12),
    "H100": GpuDataSheet(80e9, 3.35e12, 989e12),
    "H200": GpuDataSheet(141e9, 4.8e12, 989e12),
    "B200": GpuDataSheet(180e9, 7.7e12, 2250e12),
    "L40S": GpuDataSheet(48e9, 0.864e12, 362e12),
}
"""Data of GPUs, of the SXM variant if there are several."""

MODELS: Mapping[ModelName, DenseModelSpec] = {
    "0.5B": DenseModelSpec(0.49e9, 24 * 2 * 64 * 4),
    "1.5B": DenseModelSpec(1.54e9, 28 * 2 * 128 * 4),
    "7B": DenseModelSpec(7.6e9, 28 * 4 * 128 * 4),
    "14B": DenseModelSpec(14.8e9, 48 * 8 * 128 * 4),
    "32B": DenseModelSpec(32.8e9, 64 * 8 * 128 * 4),
    "70B": DenseModelSpec(72.7e9, 80 * 8 * 128 * 4),
}
"""Models of the Qwen2.5 family: parameters, and layers x KV heads x head size x 2 (keys, values) x 2 bytes."""


BLOCKS = 24
"""Minimum number of blocks of a median turn, if it has that many tokens; lengths are counted in blocks."""
MAX_TURNS = 2_000_000
"""Maximum number of turns to simulate until the pipeline is full; these take minutes."""
MAX_EPISODES = 1_000_000
"""Maximum number of episodes of a task with all its children, or of a step."""
MAX_BLOCKS = 1_000_000
"""Maximum number of blocks of a conversation."""
Speed = Annotated[float, Field(ge=1e-3, le=1e15)]
"""Tokens per second."""
Count = Annotated[int, Field(gt=0, le=1_000_000)]
"""Number of GPUs or of calls."""
Length = Annotated[int, Field(ge=0, le=MOST)]
"""Number of tokens."""


class SeatPlan(Section):
    """Turns and tokens of a seat's agent in an episode."""

    tokens: QuantileDistribution
    """Tokens sampled in the whole episode, in turns of equal length."""
    turns: QuantileDistribution = QuantileDistribution(p50=1, p90=1, cap=1)
    """Number of turns; episodes with more tokens have more turns."""


class EnvironmentPlan(Section):
    """Environment of one kind of episode: its seats take turns one after another, then its children run."""

    seats: Annotated[dict[str, SeatPlan], Field(min_length=1)]
    prompt: Annotated[Length, Field(gt=0)] = 256
    """Prompt tokens of each seat's conversation."""
    tool_seconds: QuantileDistribution | None = None
    """Seconds between two turns of a seat; absent if tools take no time."""
    tool_tokens: Length = 0
    """Tokens that a tool's answer adds to the conversation."""
    fan_out: dict[str, Positive] = {}
    """Number of child episodes that each episode starts, by environment; they form a group."""
    likeness: Share = 0.5
    """Correlation of the log-lengths of a group's members; half of it is common to all episodes of a task."""

    def longest_context(self) -> float:
        """Return the number of tokens of the longest conversation."""
        return self.prompt + max(
            math.ceil(seat.tokens.cap) + math.ceil(seat.turns.cap - 1) * self.tool_tokens
            for seat in self.seats.values()
        )


class PolicyPlan(Section):
    """Policy settings, as in `policies` of a training file."""

    kind: Literal["trained", "frozen"] = "trained"
    step_size: Episodes = 64
    max_staleness: Literal["auto"] | MaybeSteps = 1
    max_lag: MaybeSteps | None = None
    step_seconds: Amount | None = None
    """Seconds of a step of the policy, if not proportional to `trainer.step_seconds`."""

    @property
    def largest_staleness(self) -> int:
        """Largest value of the bound on staleness."""
        return STALENESS_CHOICES[-1] if self.max_staleness == "auto" else self.max_staleness


class CreditPlan(Section):
    """Credit settings, as in `credit` of a training file."""

    group_size: Episodes = 8
    release: Literal["group", "episode", "late"] = "group"


class EnginePlan(Section):
    """Engines, described by model and GPU or by measured rates."""

    replicas: Annotated[int, Field(gt=0, le=10_000)] = 1
    slots: Count = 64
    """Maximum number of concurrent calls per replica."""
    model: ModelName | None = None
    """Size of the model, in bf16."""
    gpu: GpuName = "H100"
    gpus: Count = 1
    """Number of GPUs per replica."""
    rates: dict[Count, Speed] = {}
    """Tokens per second of each call, by the number of concurrent calls; in between, seconds per token are
    interpolated."""
    prefill_rate: Speed | None = None
    """Context tokens computed per second."""
    kv_tokens: Tokens | None = None
    """Number of context tokens whose keys and values a replica can hold."""

    @field_validator("rates", mode="before")
    @classmethod
    def _read_counts(cls, rates: object) -> object:
        """Convert the keys to integers, because TOML's keys are text."""
        if not isinstance(rates, dict):
            return rates
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: rate for key, rate in rates.items()}

    @model_validator(mode="after")
    def _check_known(self) -> EnginePlan:
        if not self.rates and self.model is None:
            raise ValueError(
                "the engine's speed is missing: give model = '7B' and gpu = 'H100', or rates = { 1 = 80, 64 = 30 }"
            )
        return self


class TrainerPlan(Section):
    """Trainer, described by GPUs or by measured seconds per step."""

    step_seconds: Amount | None = None
    """Seconds of an optimizer step of the first policy that learns; steps of other sizes take proportional times."""
    gpus: Count = 8
    """Number of the trainer's GPUs, from which the duration of a step follows if `step_seconds` is absent; their type
    is that of `[engine]`."""
    publish_seconds: Annotated[float, Field(ge=0, le=MOST)] = 0.0
    """Seconds between the end of a step and the first token of its version."""


class SimulationPlan(Section):
    """Plan of a simulated run."""

    seed: int = 0
    jump: tuple[int, float] | None = None
    """Number of the task from which on the tokens of prompts and tools are multiplied, and the factor."""
    max_in_flight: Literal["auto"] | Episodes = 256
    environments: Annotated[dict[str, EnvironmentPlan], Field(min_length=1)]
    """Environments by name; the first one is that of root episodes."""
    policies: dict[str, PolicyPlan] = {"policy": PolicyPlan()}
    seats: dict[str, str | tuple[str, ...]] = {}
    """Policies by seat, as in a training file."""
    credit: CreditPlan = CreditPlan()
    engine: EnginePlan
    trainer: TrainerPlan = TrainerPlan()

    @model_validator(mode="after")
    def _check_children(self) -> SimulationPlan:
        for name, environment in self.environments.items():
            if not name.isidentifier() or name.startswith("__"):
                raise ValueError(f"environments, key {format_short(name)}: expected a name such as Repair or solve_2")
            for child in environment.fan_out:
                if child not in self.environments:
                    raise ValueError(f"environments.{name}.fan_out names {child!r}, which is not in [environments]")
        root = next(iter(self.environments))
        for name in self.environments:
            if name != root and not any(name in other.fan_out for other in self.environments.values()):
                raise ValueError(
                    f"environments.{name} is spawned by no environment: name it in the fan_out of {root!r}"
                )
        episodes = sum(self.times().values())
        if episodes > MAX_EPISODES:
            raise ValueError(f"fan_out: a task comes to {episodes:,} episodes; at most {MAX_EPISODES:,}")
        return self

    @model_validator(mode="after")
    def _check_learners(self) -> SimulationPlan:
        if not self.trained:
            raise ValueError(
                "policies: none is trained, so there are no steps to simulate; set kind = 'trained' for one"
            )
        return self

    @model_validator(mode="after")
    def _check_numbers(self) -> SimulationPlan:
        sizes = {f"policies.{name}.step_size": policy.step_size for name, policy in self.policies.items()}
        for name, size in {**sizes, "credit.group_size": self.credit.group_size}.items():
            if size > MAX_EPISODES:
                raise ValueError(f"{name} = {size:,}: at most {MAX_EPISODES:,} episodes can be simulated")
        turns = self.filling_steps * self.tasks_per_step() * self.turns_per_task()
        if turns > MAX_TURNS:
            raise ValueError(
                f"{turns:,.0f} turns would have to be simulated until the pipeline is full ({self.filling_steps} "
                f"steps), but at most {MAX_TURNS:,} can be: lower step_size, max_staleness, fan_out, credit.group_size "
                "or turns"
            )
        return self

    @model_validator(mode="after")
    def _check_blocks(self) -> SimulationPlan:
        for name, environment in self.environments.items():
            longest = environment.longest_context()
            if longest > MAX_BLOCKS * self.grain:
                raise ValueError(
                    f"environments.{name}: a conversation may have {longest:,.0f} tokens (prompt, "
                    f"tokens.cap, answers of tools), {self.grain} in a block (1/{BLOCKS} of the shortest median turn), "
                    f"and at most {MAX_BLOCKS:,} blocks can be simulated: lower the prompt or the caps"
                )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> SimulationPlan:
        """Refuse conversations that exceed a replica's memory alone and so could never end."""
        room = self.kv_tokens
        for name, environment in self.environments.items():
            longest = environment.longest_context()
            if room is not None and longest > room:
                raise ValueError(
                    f"environments.{name}: a conversation may have {longest:,.0f} tokens (prompt, tokens.cap, answers "
                    f"of tools), but the KV cache of a replica has room for {room:,}: an episode could never finish. "
                    "Lower the caps, or raise engine.gpus or engine.kv_tokens"
                )
        if self.trainer.step_seconds is None and self.engine.model is None:
            raise ValueError("trainer.step_seconds is needed where engine.model is not given")
        return self

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """Name of the environment of root episodes."""
        return next(iter(self.environments))

    @property
    def trained(self) -> dict[str, PolicyPlan]:
        """Policies that learn."""
        return {name: policy for name, policy in self.policies.items() if policy.kind == "trained"}

    def times(self) -> dict[str, int]:
        """Return the number of episodes of each environment per root episode."""
        found = dict.fromkeys(self.environments, 0)
        generation = Counter({self.root: 1})
        for _ in range(MAX_CHILD_DEPTH + 1):
            below = Counter[str]()
            for name, times in generation.items():
                found[name] += times
                for child, number in self.environments[name].fan_out.items():
                    below[child] += times * number
            generation = below
        if generation:
            deepest = next(iter(generation))
            raise ValueError(f"environments.{deepest}: nests deeper than {MAX_CHILD_DEPTH}, or is its own child")
        return found

    @property
    def grain(self) -> int:
        """Number of tokens per block."""
        seats = [seat for environment in self.environments.values() for seat in environment.seats.values()]
        return max(int(min(seat.tokens.p50 / max(seat.turns.p50, 1) for seat in seats) / BLOCKS), 1)

    @property
    def filling_steps(self) -> int:
        """Number of first steps in which the pipeline fills."""
        return 4 + 2 * max(policy.largest_staleness for policy in self.trained.values())

    @property
    def model(self) -> DenseModelSpec | None:
        """Preset of the model; None if rates are given."""
        return MODELS[self.engine.model] if self.engine.model else None

    @property
    def gpu(self) -> GpuDataSheet:
        """Preset of the GPU."""
        return GPUS[self.engine.gpu]

    @property
    def kv_tokens(self) -> int | None:
        """Number of context tokens that fit a replica; None without a bound."""
        if self.engine.kv_tokens is not None or self.model is None:
            return self.engine.kv_tokens
        return self.model.kv_tokens(self.gpu, self.engine.gpus)

    @property
    def prefill_rate(self) -> float:
        """Context tokens that a replica computes per second."""
        if self.engine.prefill_rate is not None or self.model is None:
            return self.engine.prefill_rate or math.inf
        return self.model.prefill_rate(self.gpu, self.engine.gpus)

    @property
    def rates(self) -> DecodeRateCurve:
        """Rate r(b) of a replica."""
        if self.engine.rates or self.model is None:
            return DecodeRateCurve(self.engine.rates)
        return self.model.rates(self.gpu, self.engine.gpus, self.engine.slots, self.mean_context())

    def mean_context(self) -> float:
        """Return the mean context of a running call in tokens, over all sampled tokens; long episodes have most of
        these."""
        total = weight = 0.0
        for name, times in self.times().items():
            environment = self.environments[name]
            for seat in environment.seats.values():
                for z in SCORES:
                    tokens = seat.tokens.value(z)
                    answers = (max(seat.turns.value(z), 1.0) - 1) * environment.tool_tokens
                    total += times * tokens * (environment.prompt + (tokens + answers) / 2)
                    weight += times * tokens
        return total / weight

    def unit_seconds(self, policy: str) -> float | None:
        """Return the seconds that a policy's trainer takes per unit; None if they depend on the tokens."""
        own = self.policies[policy]
        if own.step_seconds is not None:
            return own.step_seconds / own.step_size
        if self.trainer.step_seconds is None:
            return None
        return self.trainer.step_seconds / next(iter(self.trained.values())).step_size

    def train_rate(self) -> float:
        """Return the tokens trained per second if `step_seconds` is absent."""
        return self.model.train_rate(self.gpu, self.trainer.gpus) if self.model is not None else math.inf

    def capacity(self) -> float:
        """Return the tokens per second of all replicas with all slots in use."""
        return self.engine.replicas * self.engine.slots * self.rates(self.engine.slots)

    def tokens_per_task(self) -> float:
        """Return the mean number of tokens sampled in a root episode and its children."""
        return self._per_task(lambda environment, seat: seat.tokens.mean)

    def turns_per_task(self) -> float:
        """Return the mean number of turns of a root episode and its children."""
        return self._per_task(lambda environment, seat: max(seat.turns.mean, 1.0))

    def _per_task(self, what: Callable[[EnvironmentPlan, SeatPlan], float]) -> float:
        environments = [(self.environments[name], times) for name, times in self.times().items()]
        return sum(times * sum(what(each, seat) for seat in each.seats.values()) for each, times in environments)

    def tasks_per_step(self) -> float:
        """Return the approximate number of root episodes per step of the first policy that learns; at least one
        group.
        """
        size = next(iter(self.trained.values())).step_size
        return max(size / sum(self.times().values()), self.credit.group_size)

    def least_step_seconds(self) -> float:
        """Return a lower bound on the seconds of a step of the first learning policy, from engines, trainer and
        tools.
        """
        first = next(iter(self.trained.values()))
        tasks = first.step_size / sum(self.times().values())
        prompts = self._per_task(lambda environment, seat: environment.prompt)
        rests = (
            (max(seat.turns.mean, 1.0) - 1) * each.tool_seconds.mean
            for each in self.environments.values()
            if each.tool_seconds is not None
            for seat in each.seats.values()
        )
        tools = max(rests, default=0.0) / (first.largest_staleness + 2)
        return max(
            tasks * self.tokens_per_task() / self.capacity(),
            tasks * prompts / self.prefill_rate / self.engine.replicas,
            self.trainer.step_seconds or 0.0,
            tools,
        )

    def config(self, steps: int) -> RunConfig:
        """Return the plan as a configuration of the production loop.

        Raises:
            ConfigError: the production loop refuses the plan.
        """
        policies: dict[str, dict[str, object]] = {
            name: policy.model_dump(include={"step_size", "max_staleness", "max_lag"})
            if policy.kind == "trained"
            else {"kind": "frozen"}
            for name, policy in self.policies.items()
        }
        try:
            return RunConfig.model_validate(
                {
                    "steps": steps,
                    "seed": self.seed,
                    "max_in_flight": self.max_in_flight,
                    "episode_timeout_s": 1e9,
                    "environment": {"id": self.root},
                    "model": {"path": "simulated"},
                    "policies": policies,
                    "seats": self.seats,
                    "credit": self.credit.model_dump(),
                    # Nothing is learned, and a constant is valid for every release.
                    "trainer": {"loss": {"normalizer": 1}},
                    "sampling": {"max_tokens": 10**8, "max_turns": 10**6},
                    "checkpoint": {"every": 0, "versions": 0},
                    "evaluation": {"tasks": 0},
                }
            )
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error, RunConfig)) from None
