"""Exact gradients of small programs, by enumeration: played in the whole training loop, and as plain episodes.

A program is written once, against `Play`, and interpreted twice. `trained` plays it in the real loop (orchestrator,
scheduler, journal, forks, scores, release, credit, rows) with a scripted engine in virtual time. Every outcome of a
group is forced exactly once (the decisions of all members and branches), and weighted by its
probability under a tabular softmax policy, so the expected gradient is exact. `plain` enumerates the same program as
independent episodes, without branches: the true gradient. Both agree to the float32 of
`TrainingSample.advantages` if training is unbiased.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import agentrl
from agentrl.config.run import RunConfig
from agentrl.core import ids
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Unit
from agentrl.core.tokens import TrainingSample
from agentrl.credit.samples import trained_positions, unit_samples
from agentrl.journal.port import EpisodeEnd, UnitDropped
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.episode_context import LiveEpisodeContext
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for

Gradient = dict[str, float]
"""Derivative by the logit of each state."""
AgentName = tuple[str, int]
"""Seat and number."""
FIRST: AgentName = ("agent", 0)
POLICY = "learner"
_CHAT = PlainChatFormat()
_STATE = re.compile(r"\[([^\]]*)\]")


# --- the policy and the scores ----------------------------------------------------------------------------------------


def uniform(*parts: object) -> float:
    """A number from 0 to 1 that depends on the parts alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()) / 2**48


def probability_of_one(state: str) -> float:
    return 1 / (1 + math.exp(-(2.4 * uniform("logit", state) - 1.2)))


def probability_of(state: str, bit: int) -> float:
    return probability_of_one(state) if bit else 1 - probability_of_one(state)


def add_score(gradient: Gradient, state: str, bit: int, factor: float) -> None:
    """Add a multiple of the gradient of log π(bit | state)."""
    gradient[state] = gradient.get(state, 0.0) + factor * (bit - probability_of_one(state))


def relative_error(found: Gradient, expected: Gradient) -> float:
    """|found - expected| / |expected|."""
    states = found.keys() | expected.keys()
    away = math.fsum((found.get(state, 0.0) - expected.get(state, 0.0)) ** 2 for state in states)
    return math.sqrt(away / math.fsum(value**2 for value in expected.values()))


@agentrl.scorer
def by_content(scored: agentrl.Scored) -> float:
    """A number that depends on the last state and decision."""
    state = scored.messages[-2].content
    return int.from_bytes(hashlib.blake2b(f"score {state}{scored.turn.text}".encode(), digest_size=2).digest()) / 2**16


def score_of(state: str, bit: int) -> float:
    """The score of `by_content`."""
    return int.from_bytes(hashlib.blake2b(f"score [{state}]{bit}".encode(), digest_size=2).digest()) / 2**16


# --- programs ---------------------------------------------------------------------------------------------------------


class Play(ABC):
    """What a program can do. `history` has the decisions so far, in order."""

    def __init__(self) -> None:
        self.history = ""

    async def act(self, agent: AgentName = FIRST, state: str | None = None) -> int:
        """Take a decision of 0 or 1. Its state is the history, unless the program names another."""
        name = f"{agent[0]}:{self.history}" if state is None else state
        bit = await self._decide(agent, name)
        self.history += str(bit)
        return bit

    @property
    def value(self) -> float:
        """A reward from 0 to 1 that depends on the history."""
        return uniform("reward", self.history)

    @abstractmethod
    async def _decide(self, agent: AgentName, state: str) -> int: ...

    @abstractmethod
    def reward(self, value: float, turn: int | None = None, agent: AgentName = FIRST) -> None:
        """Give a reward."""

    @abstractmethod
    async def branch(self, count: int) -> None:
        """Nothing in plain episodes."""

    @abstractmethod
    async def score(self, agent: AgentName = FIRST) -> None:
        """Ask for the score of the agent's newest turn."""

    @abstractmethod
    async def fails(self, probability: float) -> bool:
        """Whether the episode should end without a reward; never in plain episodes."""

    @abstractmethod
    async def wait(self, seconds: float) -> None:
        """Take time; nothing in plain episodes."""


Program = Callable[[Play], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program with its settings."""

    program: Program
    group_size: int = 2
    branches: int = 0
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `credit`."""
    trainer: Mapping[str, Any] = field(default_factory=lambda: {"loss": {"normalizer": 64}})
    """Settings of the section `trainer`."""
    scorer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a scorer; its function defaults to `by_content`."""
    seats: tuple[str, ...] = ("agent",)
    factor: float = 1.0
    """Known ratio of the expected gradient and the true one."""
    together: int = 4096
    """Number of groups per run. 1 for estimators that look beyond their group."""


# --- plain episodes ---------------------------------------------------------------------------------------------------


class PlainPlay(Play):
    """A plain episode with given decisions; further ones are 0."""

    def __init__(self, case: Case, bits: Sequence[int]) -> None:
        super().__init__()
        self._case = case
        self._bits = bits
        self.decisions: list[tuple[AgentName, str, int]] = []
        self.rewards: defaultdict[AgentName, float] = defaultdict(float)

    async def _decide(self, agent: AgentName, state: str) -> int:
        bit = self._bits[len(self.decisions)] if len(self.decisions) < len(self._bits) else 0
        self.decisions.append((agent, state, bit))
        return bit

    def reward(self, value: float, turn: int | None = None, agent: AgentName = FIRST) -> None:
        self.rewards[agent] += value

    async def branch(self, count: int) -> None:
        pass

    async def score(self, agent: AgentName = FIRST) -> None:
        _, state, bit = [decision for decision in self.decisions if decision[0] == agent][-1]
        self.rewards[agent] += score_of(state, bit)

    async def fails(self, probability: float) -> bool:
        return False

    async def wait(self, seconds: float) -> None:
        pass

    def add_scores(self) -> None:
        """Add the scores of the case's scorer to the rewards."""
        scorer = self._case.scorer
        is_paid = scorer and scorer["per"] != "request" and scorer.get("credit") != "note"
        for agent in {agent for agent, _, _ in self.decisions} if is_paid else ():
            scores = [score_of(state, bit) for actor, state, bit in self.decisions if actor == agent]
            whole = scorer["per"] in ("episode", "group") or scorer.get("credit") == "difference"
            self.rewards[agent] += scores[-1] if whole else math.fsum(scores)

    @property
    def probability(self) -> float:
        return math.prod(probability_of(state, bit) for _, state, bit in self.decisions)


def plain_episodes(case: Case) -> list[PlainPlay]:
    """Every plain episode."""
    found: list[PlainPlay] = []
    bits: list[int] | None = []
    while bits is not None:
        episode = PlainPlay(case, bits)
        _run_to_end(case.program(episode))
        episode.add_scores()
        found.append(episode)
        taken = [bit for _, _, bit in episode.decisions]
        zeros = [place for place, bit in enumerate(taken) if not bit]
        bits = [*taken[: zeros[-1]], 1] if zeros else None
    assert math.isclose(math.fsum(episode.probability for episode in found), 1.0)
    return found


def plain(case: Case) -> Gradient:
    """The true gradient: that of each agent's expected reward by its own decisions."""
    gradient: Gradient = {}
    episodes = plain_episodes(case)
    for episode in episodes:
        for agent, state, bit in episode.decisions:
            add_score(gradient, state, bit, episode.probability * episode.rewards[agent])
    return {state: case.factor * value for state, value in gradient.items()}


def _run_to_end(program: Any) -> None:
    """Run a coroutine that never waits."""
    try:
        program.send(None)
    except StopIteration:
        return
    raise AssertionError("the program waited in a plain episode")


# --- the training loop ------------------------------------------------------------------------------------------------

Choice = tuple[str, int]
"""Member or branch of a group, and number of its choice."""


class Outcome:
    """The forced choices of a group; further ones are 0."""

    def __init__(self, forced: Mapping[Choice, int]) -> None:
        self.forced = forced
        self.made: dict[Choice, int] = {}
        self.probability = 1.0
        self._counts: defaultdict[str, int] = defaultdict(int)

    def choose(self, who: str, probability_of_one: float) -> int:
        choice = (who, self._counts[who])
        self._counts[who] += 1
        chosen = self.forced.get(choice, 0)
        self.made[choice] = chosen
        self.probability *= probability_of_one if chosen else 1 - probability_of_one
        return chosen

    def others(self) -> Iterator[dict[Choice, int]]:
        """Yield the forced choices of the outcomes that differ first in a choice that was not forced here."""
        assert self.forced.keys() <= self.made.keys(), "the program is not a function of its choices"
        before: dict[Choice, int] = {}
        for choice, chosen in self.made.items():
            if choice not in self.forced:
                yield {**self.forced, **before, choice: 1}
            before[choice] = chosen


_CHOICES: ContextVar[Callable[[float], int]] = ContextVar("_CHOICES")
"""Makes a choice of the episode that runs."""


class LivePlay(Play):
    """An episode of the training loop."""

    def __init__(self, ctx: LiveEpisodeContext) -> None:
        super().__init__()
        self._ctx = ctx

    async def _decide(self, agent: AgentName, state: str) -> int:
        turn = await self._ctx.agent(*agent).act(agentrl.user(f"[{state}]"))
        return int(turn.text)

    def reward(self, value: float, turn: int | None = None, agent: AgentName = FIRST) -> None:
        self._ctx.agent(*agent).reward(value, turn)

    async def branch(self, count: int) -> None:
        await self._ctx.branch(count)

    async def score(self, agent: AgentName = FIRST) -> None:
        await self._ctx.score("scorer", self._ctx.agent(*agent))

    async def fails(self, probability: float) -> bool:
        return bool(_CHOICES.get()(probability))

    async def wait(self, seconds: float) -> None:
        await self._ctx.sleep(seconds)


def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    state = _STATE.findall(_CHAT.decode(request.token_ids.tolist()))[-1]
    return [ord(str(_CHOICES.get()(probability_of_one(state)))), STOP_TOKEN]


def trained(case: Case) -> Gradient:
    """The expected gradient of training, per episode of a group."""
    gradient: Gradient = {}
    mass = 0.0
    waiting: list[dict[Choice, int]] = [{}]
    while waiting:
        outcomes = [Outcome(forced) for forced in waiting[: case.together]]
        del waiting[: case.together]
        run = _run(case, outcomes)
        for outcome, units in zip(outcomes, _units(case, run, len(outcomes)), strict=True):
            mass += outcome.probability
            waiting += outcome.others()
            for unit, samples in units:
                for state, token, advantage in _advantages(case, unit, samples):
                    if token != STOP_TOKEN:
                        add_score(gradient, state, int(chr(token)), outcome.probability * advantage / case.group_size)
    assert math.isclose(mass, 1.0), f"the outcomes have probability {mass}"
    return gradient


class Enumerated(agentrl.Environment):
    """The environment of the run in progress; `_run` sets its declarations."""

    play: ClassVar[Callable[[LiveEpisodeContext], Awaitable[None]]]

    async def run(self, ctx: Any) -> None:
        await type(self).play(ctx)


def config_of(case: Case, groups: int = 1) -> RunConfig:
    """Return the configuration for a number of groups, and declare what the case's program calls."""
    Enumerated.seats, Enumerated.branches = case.seats, case.branches
    units = groups * case.group_size * (1 + case.branches)
    scorer = {**case.scorer, "function": f"{__file__}:{case.scorer.get('function', 'by_content')}"}
    is_late = case.credit.get("release", "group") != "group"
    return config_for(
        steps=3 if is_late else 1,  # late credit needs staleness, and so a second group beside each that is forced
        policies={POLICY: {"step_size": units, "max_staleness": int(is_late), "lora": {"rank": 1}}},
        trainer=dict(case.trainer),
        credit={"group_size": case.group_size, **case.credit},
        scorers={"scorer": scorer} if case.scorer else {},
        sampling={"max_tokens": 4, "max_turns": 32},
        max_in_flight=2 * units,
    )


def _run(case: Case, outcomes: Sequence[Outcome]) -> SmallRun:
    """Play one group for each outcome."""

    async def play(ctx: LiveEpisodeContext) -> None:
        spec = ctx.episode.spec
        number = ids.root_episode_number(ids.main_episode_id(spec.episode_id))
        group, member = divmod(number, case.group_size)
        outcome = outcomes[group] if group < len(outcomes) else Outcome({})
        branch = spec.episode_id.partition("~")[2]
        _CHOICES.set(lambda probability: outcome.choose(f"{member}~{branch}", probability))
        await case.program(LivePlay(ctx))

    Enumerated.play = play
    run_config = config_of(case, len(outcomes))
    run = SmallRun(
        environment=Enumerated,
        script=script,
        config=run_config,
        engine_options={},
        trainer_options={},
        tasks=[agentrl.Task(id="t", data={})],
    )
    simulate(run.run, seed=0, max_steps=1 << 40)
    return run


def _units(case: Case, run: SmallRun, groups: int) -> list[list[tuple[Unit, list[TrainingSample]]]]:
    """Return the trained units of each group with their rows."""
    specs = {end.header.episode_id: end.spec for end in run.journal.of_kind(EpisodeEnd)}
    found: list[list[tuple[Unit, list[TrainingSample]]]] = [[] for _ in range(groups)]
    log = run.journal.turn_log("0")
    for unit in itertools.chain.from_iterable(batch.units for batch in run.trainer.batches):
        number = ids.root_episode_number(unit.episode_id) // case.group_size
        if number < groups:
            fork = specs[unit.episode_id].fork
            entries, prefix = log.read(unit.episode_id, unit.attempt), () if fork is None else log.prefix(fork)
            found[number].append((unit, unit_samples(unit, assemble_trajectories(entries, unit.policy, prefix))))
    ended = {unit.episode_id for units in found for unit, _ in units}
    ended |= {drop.episode_id for drop in run.journal.of_kind(UnitDropped) if drop.reason in ("no_reward", "probe")}
    missing = [
        name for name in specs if name not in ended and ids.root_episode_number(name) // case.group_size < groups
    ]
    assert not missing, f"neither trained nor dropped: {missing}"
    return found


def _advantages(case: Case, unit: Unit, samples: Sequence[TrainingSample]) -> list[tuple[str, int, float]]:
    """Return state, token and advantage of each trained token of a unit."""
    found: list[tuple[str, int, float]] = []
    for sample, positions in zip(samples, trained_positions(samples), strict=True):
        for at in positions:
            context = _CHAT.decode(sample.token_ids[:at].tolist())
            state = _STATE.findall(context)[-1]
            found.append((state, int(sample.token_ids[at]), float(sample.advantages[at])))
    return found
