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


class ClientBatch(LossBatch):
    """The input of a client's loss. The ratio has no bound: if it overflows, the pass fails."""

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.behavior_logprobs


# The arguments besides the batch are the protocol's settings. A batch holds a part of a pass, so only losses by token
# fit here.


def _importance_sampling(batch: LossBatch) -> Tensor:
    """-r A, with the ratio r."""
    return losses.ppo(batch, clip_low=math.inf, clip_high=math.inf, dual_clip=math.inf)


def _ppo(batch: LossBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-min(r A, clip(r) A)."""
    return losses.ppo(batch, clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1, dual_clip=math.inf)


def _cispo(batch: LossBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-sg(clip(r)) A log p."""
    return losses.cispo(batch, min_ratio=clip_low_threshold, max_ratio=clip_high_threshold)


def _dro(batch: LossBatch, *, beta: float = 0.05) -> Tensor:
    """-(A log p - β/2 (log r)²): Richemond et al., 2024, arXiv:2405.19107."""
    penalty = losses.kl_divergence(batch.logprobs, batch.behavior_logprobs, estimator="k2")
    return losses.reinforce(batch) + beta * penalty


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
    readable = (*chosen.needs, *chosen.accepts)
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
