"""Checks of a user's loss, advantage or scorer before a run, on synthetic batches and without a model.

A loss is called on steps of ragged conversations, one of them far off policy. It must return one finite loss per token
with a gradient, return the same when called again, leave its input and the random state unchanged, and depend neither
on the order of rows nor on the values of ids, which ranks and micro-batches change, nor on tokens outside the grouping
that it declares. An advantage is called on groups like a run's, a scorer on conversations. Promises of linearity are
tested.

Owns: the batches and groups, the findings. Does not own: finding the functions (`core.custom_functions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config.algorithms import LOSSES
from agentrl.config.sections import LossConfig, TrainerConfig
from agentrl.core.custom_functions import GROUPINGS, FunctionDeclaration, Grouping, find_function
from agentrl.core.errors import AgentRLError, GroupTooSmallError, LossError, describe_user_code_error
from agentrl.core.records import (
    AgentTurns,
    ForkPoint,
    Message,
    PolicyVersion,
    Score,
    Scored,
    Task,
    ToolCall,
    Turn,
    VersionSpan,
)
from agentrl.core.text import plural
from agentrl.core.tokens import LOSS_COLUMNS, Completion, Tokens
from agentrl.credit.estimators import AdvantageEstimator, make_advantage_estimator
from agentrl.credit.group import Group
from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.trees import AgentKey, tree_pieces
from agentrl.environment.rewards import finite_reward
from agentrl.learn.loss_batch import LossBatch, TokenGradients
from agentrl.learn.losses import Loss, make_loss
from agentrl.learn.step_columns import IDS, TokenColumns

TOLERANCE = 1e-9
"""Largest relative difference between two calls in float64 that should agree."""


@dataclass(slots=True)
class FunctionReport:
    """The result of checking a function."""

    title: str
    passed: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the report, one line per result."""
        lines = [self.title]
        for word, texts in (("ok", self.passed), ("hint", self.hints), ("FAILED", self.findings)):
            lines += [f"  {word:<7}{line}" for line in texts]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _SampleStep:
    """A synthetic step: columns, and the values a model would compute for them, in float64."""

    name: str
    columns: TokenColumns
    logprobs: Tensor
    reference: Tensor
    entropies: Tensor
    divergence: Tensor

    def take(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> _SampleStep:
        """Return the step with these tokens alone, in this order."""
        at = np.asarray(tokens, np.int64)
        columns = (self.logprobs, self.reference, self.entropies, self.divergence)
        tensors = (tensor[torch.from_numpy(at)] for tensor in columns)
        return _SampleStep(self.name, self.columns.take(at), *tensors)

    def batch(self, mark: FunctionDeclaration, dtype: torch.dtype = torch.float64) -> LossBatch:
        """Return the step as the input of a loss with this declaration, with fresh columns, so that a loss that writes
        to them is detected.
        """
        return LossBatch(
            self.columns.take(np.arange(len(self.columns))),
            logprobs=self.logprobs.to(dtype, copy=True).requires_grad_(),
            entropies=self.entropies.to(dtype, copy=True).requires_grad_(),
            reference_logprobs=self.reference.to(dtype, copy=True) if mark.reference else None,
            reference_kl=self.divergence.to(dtype, copy=True).requires_grad_() if mark.divergence else None,
        )


def _steps() -> Iterator[_SampleStep]:
    """Yield steps like those of training: on-policy, stale, far off policy, and of a single token."""
    for name, spread, conversations in (
        ("nearly on policy", 0.02, 12),
        ("stale", 0.5, 12),
        ("far off policy (log w to ±25)", 12.0, 12),
        ("one token", 0.1, 1),
    ):
        generator = np.random.default_rng(conversations)
        lengths = generator.integers(1, 15, conversations) if conversations > 1 else np.ones(1, np.int64)
        number = np.repeat(np.arange(conversations), lengths)
        count = len(number)
        within = np.concatenate([np.arange(length) for length in lengths])
        behavior = -max(3.0, 2 * spread) * generator.random(count) - 0.05
        logprobs = np.minimum(behavior + spread * generator.normal(size=count).clip(-2.1, 2.1), -1e-3)
        advantages = generator.normal(size=conversations) * (np.arange(conversations) % 5 > 0)
        columns: Any = {
            "lags": generator.integers(-1, 4, count).astype(np.int32),
            "row": number,
            "turn": number * 2 + (within > 6),
            "agent": number // 2 * 2 if conversations > 1 else number,
            "episode": number // 4,
            "seat": number // 2 % 2,
            "group": number // 8,
            "names": {"seat": ["solver", "judge"], "group": ["g0", "g1"]},
            "starts": np.concatenate([[0], np.cumsum(lengths)]),
        }
        reference = np.minimum(logprobs + 0.1 * generator.normal(size=count), -1e-3)
        arrays = (logprobs, reference, generator.random(count), generator.random(count))
        table: Any = {column.name: generator.integers(1, 9, count).astype(column.dtype) for column in LOSS_COLUMNS}
        table |= {"logprobs": behavior, "advantages": (advantages if conversations > 1 else np.ones(1))[number]}
        columns["tokens"] = Tokens(token_ids=np.zeros(count, np.int32), **table)
        yield _SampleStep(name, TokenColumns(**columns), *(torch.from_numpy(array) for array in arrays))


def check_loss(reference: str, *, title: str = "") -> FunctionReport:
    """Call a loss on synthetic steps.

    Args:
        reference: a built-in name, an entry point, `module:function` or `path/to/file.py:function`.
        title: title of the report.

    Raises:
        ConfigError: there is no such loss, it is not marked as one, or it cannot be recorded.
    """
    loss = make_loss(TrainerConfig(loss=LossConfig(name=reference)))
    report = FunctionReport(title or f"loss {reference}")
    for step in _steps():
        try:
            gradients = _evaluate(loss, step)
        except AgentRLError as error:
            report.findings.append(f"{step.name}: {error}{_undeclared_use(loss, step)}")
            return report
        try:
            _check_values(step, gradients, report)
            if report.findings:
                return report
            _check_purity(loss, step, gradients, report)
            _check_order(loss, step, gradients, report)
            batch = step.batch(loss.mark, torch.float32)
            _check_values(step, loss.evaluate(batch, torch.ones(len(step.columns))), report)
        except AgentRLError as error:
            report.findings.append(f"{step.name}: {error}")
        if report.findings:
            return report
    report.passed += [
        "returns one finite loss per token, with a finite gradient, also where log w = ±20",
        "is pure: gives the same result twice, does not change its batch, draws no random numbers",
        "the order of rows and the numbers of ids make no difference: micro-batches and ranks change nothing",
    ]
    try:
        for variant in _groupings(loss):
            _check_grouping(variant, report, hints=reference not in LOSSES and not loss.mark.groups_option)
    except AgentRLError as error:
        report.findings.append(f"a part of a step: {error}")
    return report


def _groupings(loss: Loss) -> Iterator[Loss]:
    """Yield the loss with every grouping that its options can select."""
    option = loss.mark.groups_option
    for grouping in GROUPINGS if option else ():
        variant = replace(loss, options={**loss.options, option: grouping})
        with contextlib.suppress(LossError):  # a grouping that the loss refuses
            _evaluate(variant, next(_steps()))
            yield variant
    if not option:
        yield loss


def _check_grouping(loss: Loss, report: FunctionReport, *, hints: bool) -> None:
    """Compare with steps of which only half of the tokens, turns, rows, … are present."""
    problems = dict.fromkeys(GROUPINGS, "")
    for step in _steps():
        gradients = _evaluate(loss, step)
        for grouping in GROUPINGS[:-1]:
            problems[grouping] = problems[grouping] or _difference_of_halves(loss, step, gradients, grouping)
    declared, finest = loss.grouping, next(grouping for grouping in GROUPINGS if not problems[grouping])
    promise = "that token" if declared == "token" else f"the tokens of its {declared}"
    if problems[declared]:
        report.findings.append(
            f'@agentrl.loss(groups="{declared}") promises that a token\'s loss depends on {promise} alone, and with '
            f'{problems[declared]}: declare groups="{finest}"'
        )
        return
    if declared != "step":
        report.passed.append(f"a token's loss depends on {promise} alone, as declared")
    if hints and finest != declared and finest in _GAINS:
        tokens = "that token" if finest == "token" else f"the tokens of its {finest}"
        report.hints.append(
            f'each token\'s loss depended on {tokens} alone: @agentrl.loss(groups="{finest}") {_GAINS[finest]}'
        )


_GAINS: dict[Grouping, str] = {
    "token": "saves a forward pass, and can be used with branches off policy",
    "turn": "saves an exchange between ranks, and can be used with branches off policy",
    "row": "saves an exchange between ranks",
    "agent": "saves an exchange between ranks",
    "episode": "saves an exchange between ranks",
}
"""Advantages of a finer grouping."""


def _difference_of_halves(loss: Loss, step: _SampleStep, gradients: TokenGradients, grouping: Grouping) -> str:
    """Describe the difference that the absence of half of the groups makes; "" if it makes none."""
    count = len(step.columns)
    if grouping == "token":
        half = np.random.default_rng(2).integers(0, 2, count)
    else:
        half = np.unique(getattr(step.columns, grouping), return_inverse=True)[1] % 2
    halves = [np.flatnonzero(half == part) for part in range(2)]
    if not all(len(tokens) for tokens in halves):
        return ""
    parts = [_evaluate(loss, step.take(tokens)) for tokens in halves]
    gradients_of_parts = TokenGradients(*(torch.cat(values) for values in zip(*parts, strict=True)))
    problem = _difference(gradients, gradients_of_parts, np.concatenate(halves))
    return problem and f"half of the {grouping}s of a step {problem}"


def _evaluate(loss: Loss, step: _SampleStep, batch: LossBatch | None = None) -> TokenGradients:
    return loss.evaluate(batch or step.batch(loss.mark), torch.ones(len(step.columns), dtype=torch.float64))


def _undeclared_use(loss: Loss, step: _SampleStep) -> str:
    """Suggest the declaration that a failing loss is missing; "" if there is none."""
    for column, option in (("reference_logprobs", "reference"), ("reference_kl", "divergence")):
        mark = loss.mark._replace(reference=True, divergence=option == "divergence")
        with contextlib.suppress(AgentRLError):
            _evaluate(loss, step, step.batch(mark))
            return f". It reads {column}: mark it @agentrl.loss({option}=True)"
    return ""


def _check_values(step: _SampleStep, gradients: TokenGradients, report: FunctionReport) -> None:
    for part, values in (
        ("loss", gradients.loss),
        ("derivative by the log-probability", gradients.by_logprob),
        ("derivative by the entropy", gradients.by_entropy),
        ("derivative by the divergence", gradients.by_reference_kl),
    ):
        wrong = (~values.isfinite()).nonzero()
        if len(wrong):
            at = int(wrong[0])
            report.findings.append(
                f"{step.name}: the {part} of a token is {float(values[at])} where log pi = "
                f"{float(step.logprobs[at]):.3g}, log mu = {float(step.columns.tokens.logprobs[at]):.3g}, A = "
                f"{float(step.columns.advantages[at]):.3g}: a step with such a loss is skipped"
            )
            return
    derivatives = (gradients.by_logprob, gradients.by_entropy, gradients.by_reference_kl)
    if step.name == "nearly on policy" and not any(bool(derivative.any()) for derivative in derivatives):
        report.findings.append(f"{step.name}: every derivative is 0, so the policy would not learn")


def _check_purity(loss: Loss, step: _SampleStep, gradients: TokenGradients, report: FunctionReport) -> None:
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    batch = step.batch(loss.mark)
    second = _evaluate(loss, step, batch)
    if not all(torch.equal(a, b) for a, b in zip(gradients, second, strict=True)):
        report.findings.append(f"{step.name}: two calls with the same batch gave two results")
    now = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    if not torch.equal(states[0], now[0]) or states[1] != now[1] or repr(states[2]) != repr(now[2]):
        report.findings.append(f"{step.name}: it draws random numbers, so a step could not be rebuilt")
    fresh = step.batch(loss.mark)
    for name, before in vars(fresh).items():
        if isinstance(before, torch.Tensor) and not torch.equal(before, getattr(batch, name)):
            report.findings.append(f"{step.name}: it changed batch.{name}, which other parts of the step read")


def _check_order(loss: Loss, step: _SampleStep, gradients: TokenGradients, report: FunctionReport) -> None:
    """Compare with the step in another order."""
    count = len(step.columns)
    rows = np.random.default_rng(1).permutation(int(step.columns.row.max()) + 1)
    order = np.concatenate([np.flatnonzero(step.columns.row == row) for row in rows])
    reordered_step = step.take(order)
    numbers = {name: np.unique(getattr(reordered_step.columns, name), return_inverse=True)[1][:count] for name in IDS}
    new_ids: Any = {name: int(ids.max()) - ids for name, ids in numbers.items() if name not in ("seat", "group")}
    other_gradients = _evaluate(loss, replace(reordered_step, columns=replace(reordered_step.columns, **new_ids)))
    if problem := _difference(gradients, other_gradients, order):
        report.findings.append(
            f"{step.name}: with its rows in another order {problem}: use ids (batch.mean(…, 'agent')), not positions"
        )


def _difference(first: TokenGradients, second: TokenGradients, order: np.ndarray[Any, Any]) -> str:
    """Describe the largest difference; "" if it is a rounding error."""
    for part, first_values, second_values in zip(("loss", *["derivative"] * 3), first, second, strict=False):
        away = (first_values[torch.from_numpy(order)] - second_values).abs().max()
        if float(away) > TOLERANCE * max(1.0, float(first_values.abs().max())):
            return f"the {part} of a token is off by {float(away):.3g}"
    return ""


def check_scorer(reference: str) -> FunctionReport:
    """Call a scorer on conversations like those of runs: an answer, a tool call, nothing, a long reply, other scripts.

    A function that raises for each of them, and not for a group of them, is checked as a scorer of groups.

    Args:
        reference: as in `check_loss`.

    Raises:
        ConfigError: as in `check_loss`.
    """
    report = FunctionReport(f"scorer {reference}")
    code, function = find_function("scorer", reference, key="--scorer")
    values: dict[str, float | None] = {}
    for name, conversation in _conversations():
        before = repr(conversation)
        try:
            values[name], second_value = (asyncio.run(_score(function, conversation)) for _ in range(2))
        except Exception as error:  # noqa: BLE001 - the user's code
            report.findings.append(f"{name}: it raised {describe_user_code_error(error)}")
            continue
        if repr(conversation) != before:
            report.findings.append(f"{name}: it changed what it was given, which other scorers see too")
        if values[name] != second_value:
            report.hints.append(
                f"{name}: two calls gave {values[name]} and {second_value}; only the recorded one counts"
            )
    if len(report.findings) == len([*_conversations()]) and not values:
        of_groups = _check_group_scorer(FunctionReport(report.title), function)
        if of_groups.passed:
            report = of_groups
        else:
            report.hints += [f"as a scorer of groups, for {finding}" for finding in of_groups.findings]
    elif not report.findings:
        score_list = ", ".join(
            f"{name}: {'nothing' if value is None else f'{value:g}'}" for name, value in values.items()
        )
        report.passed.append(f"a finite score, or None, for each conversation ({score_list})")
    report.passed.append(f"its code can be recorded and shipped: {code.name}")
    return report


def _check_group_scorer(report: FunctionReport, function: Any) -> FunctionReport:
    """Call a scorer of groups on groups of one and of five members."""
    members = tuple(scored for _, scored in _conversations())
    for group in (members[:1], members):
        name = f"a group of {len(group)}"
        before = repr(group)
        try:
            values = asyncio.run(_scored_group(function, group))
        except Exception as error:  # noqa: BLE001 - the user's code
            report.findings.append(f"{name}: it raised {describe_user_code_error(error)}")
            continue
        if repr(group) != before:
            report.findings.append(f"{name}: it changed what it was given, which other scorers see too")
        if len(values) != len(group):
            report.findings.append(
                f"{name}: it returned {plural(len(values), 'score')}; it must return one per member, in their order"
            )
    if not report.findings:
        report.passed.append('with per = "group", a finite score, or None, for each member of a group')
    return report


async def _scored_group(function: Any, group: Sequence[Scored]) -> list[float | None]:
    values = function(group)
    values = await values if inspect.isawaitable(values) else values
    values = values.value if isinstance(values, Score) else values
    return [None if value is None else finite_reward(value, "a score") for value in values]


async def _score(function: Any, conversation: Scored) -> float | None:
    value = function(conversation)
    value = await value if inspect.isawaitable(value) else value
    value = value.value if isinstance(value, Score) else value
    return None if value is None else finite_reward(value, "it")


def _conversations() -> Iterator[tuple[str, Scored]]:
    call = ToolCall(id="c0", name="calculate", arguments={"a": 1, "op": "+", "b": 2})
    replies = {
        "an answer": Message(role="assistant", content="The answer is 3."),
        "a tool call": Message(role="assistant", content="", tool_calls=(call,)),
        "an empty reply": Message(role="assistant", content=""),
        "a long reply": Message(role="assistant", content="on and " * 4000),
        "other scripts": Message(role="assistant", content="答案是 3 🎉\u202e"),
    }
    for number, (name, message) in enumerate(replies.items()):
        completion = Completion(
            token_ids=np.arange(1, 4, dtype=np.int32),
            logprobs=np.full(3, -0.5, np.float32),
            finish_reason="stop",
            spans=(VersionSpan(0, 3, PolicyVersion("policy", 0, 0)),),
        )
        task = Task(id="task", data={"question": "1 + 2", "answer": "3"})
        turn = Turn(text=message.content, message=message, completion=completion)
        earlier = (Message(role="user", content="1 + 2?"),)
        yield name, Scored(task=task, seat="agent", turn=turn, number=number, messages=(*earlier, message))


def check_advantage(reference: str, *, title: str = "") -> FunctionReport:
    """Call an advantage on groups like those of runs.

    Args:
        reference: as in `check_loss`.
        title: title of the report.

    Raises:
        ConfigError: as in `check_loss`.
    """
    report = FunctionReport(title or f"advantage {reference}")
    estimator = make_advantage_estimator(reference, {})
    over_trees = estimator.mark.over == "tree"
    for name, group in _groups(estimator.mark.over == "step"):
        group = _with_trees(group) if over_trees else group
        state = random.getstate()
        try:
            advantages, second_values = (_values(estimator, group) for _ in range(2))
            order = random.Random(1).sample(range(len(group.rewards)), len(group.rewards))
            reordered_values = _values(estimator, _reorder(group, order))
        except GroupTooSmallError:
            continue
        except AgentRLError as error:
            report.findings.append(f"{name} {_shorten(group.rewards)}: {error}")
            return report
        if advantages != second_values:
            report.findings.append(f"{name}: two calls with the same group gave {advantages} and {second_values}")
        if random.getstate() != state:
            report.findings.append(f"{name}: it draws random numbers, so a step could not be rebuilt")
        if any(
            not math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            for at, reordered_value in zip(order, reordered_values, strict=True)
            for a, b in zip(advantages[at], reordered_value, strict=False)
        ):
            report.findings.append(f"{name}: an agent's advantage depends on its place in the group")
        if report.findings:
            return report
    unit = "piece" if over_trees else "agent"
    report.passed += [
        f"returns a finite advantage per {unit}, also for equal rewards, one agent and large groups",
        "is pure, and treats the agents of a group alike in any order",
    ]
    return report


def _values(estimator: AdvantageEstimator, group: Group) -> list[tuple[float, ...]]:
    if estimator.mark.over == "tree":
        return [tuple(values) for values in estimator.of_trees(group)]
    return [credit.by_turn or (credit.value,) for credit in estimator(group)]


def _groups(over_step: bool) -> Iterator[tuple[str, Group]]:
    draw = random.Random(0)
    cases: dict[str, list[float]] = {
        "rewards of 0 and 1": [1.0, 0.0, 0.0, 1.0],
        "equal rewards": [0.5] * 4,
        "rewards of 0": [0.0] * 4,
        "one agent": [1.0],
        "64 rewards": [draw.random() for _ in range(64)],
    }
    for name, rewards in cases.items():
        names = tuple(f"e{at}" for at in range(len(rewards)))
        groups = tuple(f"g{at // 4 if over_step else 0}" for at in range(len(rewards)))
        named_rewards = tuple((("format", 0.5 * reward), ("right", 0.5 * reward)) for reward in rewards)
        turns = tuple(((0, 0.25 * reward), (1, 0.25 * reward)) for reward in rewards)
        group = Group(
            rewards=tuple(rewards),
            episodes=names,
            groups=groups,
            named_rewards=named_rewards,
            turn_rewards=turns,
            turn_states=() if over_step else tuple((b"start", draw.randbytes(1), b"end") for _ in rewards),
            tokens=() if over_step else tuple(draw.randrange(1, 100) for _ in rewards),
        )
        yield name, group


def _with_trees(group: Group) -> Group:
    """Return the group with its agents in trees of up to four: a main episode with a branch and, later, with two."""
    agents: list[AgentKey] = []
    branches: dict[str, ForkPoint] = {}
    for at in range(len(group.rewards)):
        main, place = f"e{at // 4}", at % 4
        call, branch = ("r#1", 1) if place == 1 else ("r#5", place - 1)
        name = f"{main}~0.{call}.b{branch}" if place else main
        if place:
            turns = (AgentTurns("agent", 0, 1 if call == "r#1" else 2),)
            branches[name] = ForkPoint(
                journal=".", partition="", episode_id=main, attempt=0, call_id=call, branch=branch, turns=turns
            )
        agents.append((name, "agent", 0))
    pieces = tree_pieces(leave_one_out, group.rewards, agents, branches)
    return replace(group, episodes=tuple(agent[0] for agent in agents), pieces=tuple(map(tuple, pieces)))


def _reorder(group: Group, order: Sequence[int]) -> Group:
    columns = ("rewards", "episodes", "groups", "named_rewards", "turn_rewards", "turn_states", "tokens", "pieces")
    column_values = {name: values for name in columns if (values := getattr(group, name))}
    new_columns: Any = {name: tuple(values[at] for at in order) for name, values in column_values.items()}
    return replace(group, **new_columns)


def _shorten(rewards: Sequence[float]) -> str:
    return f"{list(rewards[:4])}{' …' if len(rewards) > 4 else ''}"
