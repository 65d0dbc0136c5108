"""The losses of the protocol by their names, mapped onto the losses of runs, and checks of the rows for them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.errors import InputError
from agentrl.learn import losses
from agentrl.learn.loss_batch import LossBatch
from agentrl.tinker.messages import ClientRow

if TYPE_CHECKING:
    from torch import Tensor


RATIO_MASK = "sequence_ratio_mask"
"""Column of the tokens over whose log-ratios `gspo` takes the mean: those that are not 0."""


class ClientBatch(LossBatch):
    """The input of a client's loss: whole rows. The ratio has no bound: if it overflows, the pass fails.

    `reference_kl` is KL(mu || pi), the divergence from the sampler (`forward.sampler_divergence`), for a loss that
    reads it.
    """

    ratio_mask: Tensor
    """1 for each token of `RATIO_MASK`, else 0; only for a loss that needs it."""

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.behavior_logprobs


# The arguments besides the batch are the protocol's settings. A batch holds some rows of a pass, each whole, so losses
# by token and by row fit here.


def _importance_sampling(batch: ClientBatch) -> Tensor:
    """-r A, with the ratio r."""
    return losses.ppo(batch, clip_low=math.inf, clip_high=math.inf, dual_clip=math.inf)


def _ppo(batch: ClientBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-min(r A, clip(r) A)."""
    return losses.ppo(batch, clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1, dual_clip=math.inf)


def _cispo(batch: ClientBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-sg(clip(r)) A log p."""
    return losses.cispo(batch, min_ratio=clip_low_threshold, max_ratio=clip_high_threshold)


def _dro(batch: ClientBatch, *, beta: float = 0.05) -> Tensor:
    """-(A log p - β/2 (log r)²): Richemond et al., 2024, arXiv:2405.19107."""
    penalty = losses.kl_divergence(batch.logprobs, batch.behavior_logprobs, estimator="k2")
    return losses.reinforce(batch) + beta * penalty


def _gspo(batch: ClientBatch, *, clip_low_threshold: float = 1 - 3e-4, clip_high_threshold: float = 1 + 4e-4) -> Tensor:
    """-min(s A, clip(s) A), with the value of the row's ratio s and the gradient of each token's own log p.

    log s is the mean of log r over the row's tokens in `RATIO_MASK` (GSPO-token, Zheng et al. 2025, arXiv:2507.18071,
    eq. 14 and 15; tinker-docs.thinkingmachines.ai/tinker/losses/gspo). The default thresholds are the paper's.
    """
    log_ratio = batch.log_ratio.detach() * batch.ratio_mask
    log_s = batch.sum(log_ratio, "row") / batch.sum(batch.ratio_mask, "row")
    s = (log_s + batch.logprobs - batch.logprobs.detach()).exp()
    return losses.clipped_objective(s, batch.advantages, 1 - clip_low_threshold, clip_high_threshold - 1, math.inf)


def _stable_reinforce(batch: ClientBatch) -> Tensor:
    """-A (log p + KL(mu || p)): REINFORCE with score centering (arXiv:2609.20807).

    The gradient is that of -A log p, less its expectation under the sampler mu: the drift by which a difference between
    sampler and trainer adds up. Thinking Machines describes StableReinforce by what it needs and does, without its
    formula (tinker-docs.thinkingmachines.ai/tinker/losses/stable-reinforce); this is a published loss of that kind.
    """
    assert batch.reference_kl is not None
    return -batch.advantages * (batch.logprobs + batch.reference_kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoss:
    """A loss that clients choose by name."""

    function: losses.LossFunction
    """Loss of each token, to be summed."""
    advantages: str = "advantages"
    """Column that the loss reads as advantages; 1 without it."""
    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Columns that each row must have."""
    accepts: tuple[str, ...] = ()
    """Further columns that the loss reads. Any other column is refused: it would change nothing."""
    reads_sampler: bool = False
    """Whether the loss reads the recorded distributions of the sampler, so that each row needs its provenance."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings."""
        return tuple(inspect.signature(self.function).parameters)[1:]


CLIENT_LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(function=losses.reinforce, advantages="weights", needs=(), accepts=("weights",)),
    "importance_sampling": ClientLoss(function=_importance_sampling),
    "ppo": ClientLoss(function=_ppo),
    "cispo": ClientLoss(function=_cispo),
    "dro": ClientLoss(function=_dro),
    "gspo": ClientLoss(function=_gspo, needs=("logprobs", "advantages", RATIO_MASK)),
    "dppo": ClientLoss(function=losses.dppo),
    # Its log-probabilities are compared with the recorded ones (`stability.py`).
    "stable_reinforce": ClientLoss(
        function=_stable_reinforce, needs=("advantages",), accepts=("logprobs",), reads_sampler=True
    ),
}


def check_rows(
    rows: Sequence[ClientRow], loss: str, settings: Mapping[str, float], *, vocabulary: int, max_context: int
) -> None:
    """Check what a client wants to train on, before it is accepted.

    Raises:
        InputError: the loss is unknown, or a row cannot be trained with it; the message names the row.
    """
    chosen = CLIENT_LOSSES.get(loss)
    if chosen is None:
        raise InputError(
            f"the loss {loss[:60]!r} is not served here; there are: {', '.join(CLIENT_LOSSES)}. Any other loss of "
            "log-probabilities can be computed in the script, with forward_backward_custom"
        )
    if unknown := sorted(settings.keys() - set(chosen.settings)):
        raise InputError(
            f"the loss {loss} has no setting {unknown[0][:60]!r}; it has {', '.join(chosen.settings) or 'none'}"
        )
    if not rows:
        raise InputError("there are no rows to train on")
    for number, row in enumerate(rows):
        _check_row(f"datum {number}", row, loss, chosen, vocabulary=vocabulary, max_context=max_context)


def _check_row(where: str, row: ClientRow, loss: str, chosen: ClientLoss, *, vocabulary: int, max_context: int) -> None:
    count = len(row.token_ids)
    if not count:
        raise InputError(f"{where}: it has no tokens")
    if count > max_context:
        raise InputError(f"{where}: {count} tokens, but this server's contexts have at most {max_context}")
    if len(row.targets) != count:
        raise InputError(f"{where}: {len(row.targets)} target_tokens for {count} input tokens; there must be one each")
    for name, tokens in (("model_input", row.token_ids), ("target_tokens", row.targets)):
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise InputError(f"{where}: {name} has a token outside the vocabulary, [0, {vocabulary})")
    _check_columns(where, row, loss, chosen)
    if chosen.reads_sampler:
        _check_provenance(where, row, loss)


def _check_columns(where: str, row: ClientRow, loss: str, chosen: ClientLoss) -> None:
    count, readable = len(row.token_ids), (*chosen.needs, *chosen.accepts)
    for name, column in row.columns.items():
        if name not in readable:
            advice = "; multiply the advantages by them" if name == "weights" and "advantages" in readable else ""
            raise InputError(
                f"{where}: the loss {loss} does not read {name[:60]!r}, only target_tokens, {', '.join(readable)}: "
                f"leave it out{advice}"
            )
        if len(column) != count:
            raise InputError(f"{where}: {len(column)} {name} for {count} tokens; there must be one each")
        if not np.isfinite(column).all():
            raise InputError(f"{where}: {name} has a value that is NaN or infinite")
    if missing := [name for name in chosen.needs if name not in row.columns]:
        raise InputError(f"{where}: the loss {loss} needs {missing[0]}")
    if RATIO_MASK in chosen.needs and not row.columns[RATIO_MASK].any():
        raise InputError(f"{where}: {RATIO_MASK} marks no token, so the row has no ratio")


def _check_provenance(where: str, row: ClientRow, loss: str) -> None:
    if not row.provenance:
        raise InputError(
            f"{where}: the loss {loss} needs the provenance of the targets; add it with Datum.with_provenance, from "
            "samples of a client with record_stability_info"
        )
    covered = sum(span.length for span in row.provenance)
    if covered != len(row.targets):
        raise InputError(f"{where}: its provenance covers {covered} targets, but it has {len(row.targets)}")
    is_sampled = np.repeat([span.is_sampled for span in row.provenance], [span.length for span in row.provenance])
    if row.columns["advantages"][~is_sampled].any():
        raise InputError(f"{where}: the loss {loss} trains on sampled tokens alone; set all other advantages to 0")
