"""Policy losses: pure functions of a `LossBatch`, one value per token, chosen by name; and their derivatives.

Symbols: pi = exp(logprobs), mu = exp(behavior_logprobs), A = advantages, w = pi / mu, sg = stop-gradient. Every loss
corrects against the *recorded* log-probabilities, so one episode may mix policy versions. docs/reference/algorithms.md
lists them with their names in TRL and verl, and says when to use which.

A loss is evaluated on leaf columns, detached from the model: `evaluate` gives the derivative of the sum by each
log-probability and entropy, and the trainer propagates these through the model in micro-batches. A loss that couples
tokens (a sequence-level ratio, a user's function) therefore sees the whole step at once, however the step is split.

Owns: the formulas, the divergence from the reference, the metrics of the ratio. Does not own: the model (`forward.py`),
the columns (`loss_batch.py`), the normalizer (`trainer.py`), advantages (`credit`).

The gradient of a token's loss with respect to its log pi is bounded by |A| times
truncated   max_ratio, also far from mu: the weight is a constant, cut there
ppo         max(1 + clip_high, dual_clip): the former where A > 0, the latter where A < 0
reinforce   1
The other bounds are in docs/reference/algorithms.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.config.algorithms import LOSSES
from agentrl.core.custom_functions import (
    FunctionCode,
    FunctionDeclaration,
    Grouping,
    check_options,
    declaration_of,
    find_function_code,
)
from agentrl.core.errors import LossError
from agentrl.learn.loss_batch import LossBatch, TokenGradients
from agentrl.learn.step_columns import LOG_RATIO_LIMIT, Id

if TYPE_CHECKING:
    from agentrl.config.sections import TrainerConfig

SUMS = (
    *("measured_tokens", "k3", "abs_logprob_difference", "masked", "truncated"),
    *("ratio", "ratio_squared", "reference_tokens", "reference_kl"),
)
"""Names of the sums that `token_metric_sums` returns, in order."""

LossFunction = Callable[..., Tensor]


def truncated(batch: LossBatch, *, max_ratio: float = 5.0, trust_region: float = 0.2) -> Tensor:
    """Truncated importance weight with a trust region: -sg(min(w, C)) · keep · A · log pi.

    C = `max_ratio` (CISPO, arXiv:2506.13585). keep = 0 where A > 0 and pi - mu > `trust_region`, or A <= 0 and pi - mu
    < -`trust_region` (DPPO-TV, arXiv:2602.04879): a token whose probability has already moved that far in its
    advantage's direction pushes no further.
    """
    with torch.no_grad():
        change = batch.logprobs.exp() - batch.behavior_logprobs.exp()
        is_outside = torch.where(batch.advantages > 0, change > trust_region, change < -trust_region)
        weight = batch.ratio.clamp(max=max_ratio).masked_fill(is_outside, 0.0)
    return -weight * batch.advantages * batch.logprobs


def ppo(batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0) -> Tensor:
    """Clipped surrogate (PPO, arXiv:1707.06347) with dual clip (Ye et al. 2020, arXiv:1912.09729).

    -min(w A, clip(w, 1 - l, 1 + h) A) where A >= 0, -max(min(w A, clip(w, 1 - l, 1 + h) A), c A) where A < 0.
    l = `clip_low`, h = `clip_high` (asymmetric: DAPO, arXiv:2503.14476), c = `dual_clip`: without it the gradient of a
    token of negative advantage grows with the ratio, without bound.
    """
    clipped_ratio = batch.ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(batch.ratio * batch.advantages, clipped_ratio * batch.advantages)
    return -torch.where(batch.advantages < 0, torch.maximum(objective, dual_clip * batch.advantages), objective)


def reinforce(batch: LossBatch) -> Tensor:
    """-A log pi (REINFORCE, Williams 1992), without correction: correct only if pi itself sampled the tokens."""
    return -batch.advantages * batch.logprobs


def importance_sampling(
    batch: LossBatch, *, level: str = "token", outside: str = "truncate", low: float = 0.0, high: float = 2.0
) -> Tensor:
    """-sg(v) A log pi, with v the product of w over the token, its turn, or its agent's conversation (`level`).

    Outside the bounds, `outside` decides: "truncate" cuts v at `high` (TIS; with `level = "agent"` the cut is the only
    bias), "mask" sets v to 0 (MIS; with `low = 0.5, high = 5` per token it is IcePop, arXiv:2510.18855). The bias of
    token weights grows with the length; so does the variance of longer products.
    """
    _check_one_of("level", level, ("token", "turn", "agent"))
    _check_one_of("outside", outside, ("truncate", "mask"))
    with torch.no_grad():
        unit: Id = "turn" if level == "turn" else "agent"
        log_v = batch.log_ratio if level == "token" else batch.sum(batch.log_ratio, unit)
        v = log_v.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        weight = v.clamp(max=high) if outside == "truncate" else v.masked_fill((v < low) | (v > high), 0.0)
    return -weight * batch.advantages * batch.logprobs


def distillation(batch: LossBatch, *, max_ratio: float = 5.0, reward: float = 0.0) -> Tensor:
    """KL(pi || ref) - `reward` sg(min(w, C)) A log pi: reverse KL to a teacher, on the student's own episodes.

    On-policy distillation (GKD with lambda = beta = 1, arXiv:2306.13649; Lu and Thinking Machines Lab, 2025): the
    teacher is the reference. The divergence is that of the whole distribution at each sampled token
    (`LossBatch.reference_kl`), without credit for later tokens; where the student samples does not depend on it. C =
    `max_ratio`.
    """
    assert batch.reference_kl is not None
    return batch.reference_kl - reward * batch.ratio.detach().clamp(max=max_ratio) * batch.advantages * batch.logprobs


def dpo(batch: LossBatch, *, beta: float = 0.1, pair: str = "sigmoid") -> Tensor:
    """Mean over the pairs of a group of -log sigmoid(`beta` d), d = h_win - h_lose, h the sum of log pi - log ref.

    With `pair = "hinge"` (SLiC, arXiv:2305.10425) max(0, 1 - `beta` d), with `"ipo"` (arXiv:2310.12036)
    (d - 1/(2 `beta`))².

    Online preference pairs (DPO, arXiv:2305.18290; from the policy's own samples: arXiv:2402.04792): in each seat of a
    group, every conversation of larger advantage is preferred to every one of smaller, and ties are left out. With
    advantages per turn, that of the first turn counts. The loss of a seat with pairs is divided equally among its n
    conversations, and spread over their tokens, so that with `normalizer = "sequences"` a step's loss is the mean over
    conversations. Conversations without a pair have no loss.
    """
    assert batch.reference_logprobs is not None
    _check_one_of("pair", pair, ("sigmoid", "hinge", "ipo"))
    number, at = torch.unique(batch.agent, return_inverse=True)
    size = len(number)
    h = batch.logprobs.new_zeros(size).index_add(0, at, batch.logprobs - batch.reference_logprobs)
    first = torch.full((size,), len(at), device=at.device).scatter_reduce(
        0, at, torch.arange(len(at), device=at.device), "amin"
    )
    # As recorded: a mean over the tokens would differ by rounding between conversations of equal reward.
    advantage = batch.advantages[first]
    pair_keys = batch.group[first] * (int(batch.seat.max()) + 1 if size else 1) + batch.seat[first]
    together = pair_keys[:, None] == pair_keys
    wins = together & (advantage[:, None] > advantage)
    margins = h[:, None] - h
    match pair:
        case "hinge":
            losses = torch.relu(1 - beta * margins)
        case "ipo":
            losses = (margins - 1 / (2 * beta)) ** 2
        case _:
            losses = -torch.nn.functional.logsigmoid(beta * margins)
    of_seat = (together * (losses * wins).sum(1)).sum(1) / (together * wins.sum(1)).sum(1).clamp(min=1)
    return of_seat[at]


def _check_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option} = {value!r}: expected {', '.join(choices)}")


BUILT_IN: dict[str, LossFunction] = {
    function.__name__: function for function in (truncated, ppo, reinforce, importance_sampling, distillation, dpo)
}
"""Losses, keyed by the name in `trainer.loss.name`; `LOSSES` has their declarations. None reads the entropies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss with its options, and the terms added to it."""

    name: str
    reference: str
    """`trainer.loss.name`: the name of a built-in loss, or the place of a user's."""
    function: LossFunction
    options: Mapping[str, Any]
    mark: FunctionDeclaration
    skips_zeros: bool
    """Whether rows whose advantages are all 0 need not be forwarded. Decides for a loss by token; for others the
    gradients do, and this only estimates the work of each rank."""
    uses_entropy: bool = True
    """Whether the entropy may carry a gradient."""
    entropy_bonus: float = 0.0
    kl: float = 0.0

    @property
    def how_to_inspect(self) -> str:
        """Advice for a step whose loss or gradient is not finite."""
        check = f", and run `agentrl env check --loss {shlex.quote(self.reference)}`"
        return f"inspect the episode's recorded logprobs and reward{'' if self.reference in BUILT_IN else check}"

    @property
    def grouping(self) -> Grouping:
        """The tokens on which a token's loss depends."""
        return self.mark.grouping(self.options)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference must be computed."""
        return self.mark.reference or bool(self.kl)

    def evaluate(self, batch: LossBatch, weights: Tensor) -> TokenGradients:
        """Compute the weighted loss of each token, and the derivatives of their sum.

        Args:
            batch: batch whose `logprobs`, `entropies` and `reference_kl` are leaves that require a gradient.
            weights: [n], factor on each token's loss, from the normalizer.

        Raises:
            LossError: the function raised, or did not return a loss per token that depends on the batch.
        """
        policy = self._check_result(batch) * weights
        by_logprob, by_entropy, by_reference_kl = self._derivatives(policy, batch)
        loss, weight = policy.detach(), by_logprob.abs()
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * weights * batch.entropies.detach()
            by_entropy = by_entropy - self.entropy_bonus * weights
        if self.kl and batch.reference_logprobs is not None:
            away = kl_divergence(batch.logprobs, batch.reference_logprobs)
            away = self.kl * weights * away
            loss, by_logprob = loss + away.detach(), by_logprob + self._derivatives(away, batch)[0]
        return TokenGradients(loss, by_logprob, by_entropy, by_reference_kl, weight)

    def _derivatives(self, loss: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the derivatives of a loss's sum by each log-probability, entropy and divergence; raises as
        `evaluate`."""
        zeros = torch.zeros_like(batch.logprobs)
        if not len(batch):
            return zeros, zeros, zeros
        leaves = [batch.logprobs, batch.entropies]
        if batch.reference_kl is not None:
            leaves.append(batch.reference_kl)
        try:
            gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        except RuntimeError as error:
            raise LossError(
                f"the loss {self.name} gave no gradient: {error}. A loss must compute its result from its batch, "
                "keep no tensor between calls and not call backward()"
            ) from error
        by_logprob, by_entropy, *optional = (zeros if gradient is None else gradient for gradient in gradients)
        return by_logprob, by_entropy, optional[0] if optional else zeros

    def _check_result(self, batch: LossBatch) -> Tensor:
        """Call the function and check its result; raises as `evaluate`."""
        try:
            loss = self.function(batch, **self.options)
        except Exception as error:
            raise LossError(f"the loss {self.name} raised {type(error).__name__}: {error}") from error
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        if shape != tuple(batch.logprobs.shape):
            raise LossError(
                f"the loss {self.name} returned {shape}; it must be a tensor with the loss of each token, of shape "
                f"{tuple(batch.logprobs.shape)} as batch.logprobs. agentrl sums and normalizes it"
            )
        if not loss.requires_grad and len(batch):
            raise LossError(
                f"the loss {self.name} does not depend on batch.logprobs, batch.entropies or batch.reference_kl, so "
                "the policy would not learn: was it detached?"
            )
        return loss


def make_loss(section: TrainerConfig, code: FunctionCode | None = None) -> Loss:
    """Make the loss that a configuration names.

    Args:
        section: the trainer's section.
        code: code of a user's loss that another process found; None: this process finds it.

    Raises:
        ConfigError: there is no such loss, or its options do not fit.
    """
    config = section.loss
    is_built_in = config.name in LOSSES
    if is_built_in:
        function, mark = BUILT_IN[config.name], LOSSES[config.name]
    else:
        function = (code or find_function_code("loss", config.name, key="trainer.loss.name")).load()
        mark = declaration_of(function)
    check_options(function, config.options, "trainer.loss")
    mark.grouping(config.options)
    return Loss(
        name=config.name.rpartition(":")[2],
        reference=config.name,
        function=function,
        options=config.options,
        mark=mark,
        skips_zeros=is_built_in and not (mark.reference or section.entropy_bonus or config.kl),
        uses_entropy=not is_built_in or bool(section.entropy_bonus),
        entropy_bonus=section.entropy_bonus,
        kl=config.kl,
    )


def kl_divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(pi || reference) per token, from tokens of pi (k3 of Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = log pi - log ref: exp(-d) - 1 + d, unbiased and never negative. Its derivative by log pi is 1 - exp(-d).
    The exponential continues as its tangent beyond exp(20): a bound on d would end the pull where pi is farthest from
    the reference.
    """
    d = logprobs - reference
    over = torch.relu(-d - LOG_RATIO_LIMIT)
    return torch.exp(-d - over) * (1 + over) - 1 + d


def token_metric_sums(batch: LossBatch, gradients: TokenGradients, weights: Tensor) -> Tensor:
    """Compute sums over the tokens, [len(SUMS)] in float64, additive over tokens, micro-batches and ranks.

    A token with a nonzero advantage counts as masked if its loss has no gradient, and as truncated if its weight is
    less than its ratio: for losses that cap w, if w > C; for those with other weights, such as `reinforce`, if w
    exceeds the weight.
    """
    with torch.no_grad():
        log_w = batch.log_ratio.double()
        w = log_w.exp()
        scale = (batch.advantages * weights).double().abs()
        weight, reference = gradients.weight.double(), batch.reference_logprobs
        columns = (
            torch.ones_like(w),
            w - 1 - log_w,
            (batch.logprobs - batch.behavior_logprobs).double().abs(),
            ((weight == 0) & (scale > 0)).double(),
            ((weight > 0) & (weight < 0.999 * w * scale)).double(),
            w,
            w * w,
            torch.full_like(w, float(reference is not None)),
            torch.zeros_like(w) if reference is None else (batch.logprobs - reference).double(),
        )
        return torch.stack([column.sum() for column in columns])
