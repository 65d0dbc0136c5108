"""The losses of the protocol by their names, and checks of the rows for them.

With p the trained policy, q the sampler and A the advantages, r = p / q is the ratio of a token; sg stops the gradient.
A batch holds some rows of a pass, each whole, so losses by token and by row fit here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentrl.parts import InputError
from agentrl_tinker.messages import ClientRow

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.parts import Row, RowBatch
    from agentrl_tinker.stability import RowDistributions

RATIO_MASK = "sequence_ratio_mask"
"""Column of the tokens over whose log-ratios `gspo` takes the mean: those that are not 0."""
MAX_TOKENS = 1 << 17
"""Maximum number of tokens in one pass, or one whole context if that is longer. `client/config` tells the SDK to divide
larger passes."""


def _cross_entropy(batch: RowBatch) -> Tensor:
    """-w log p, with the weights w of the rows."""
    return -batch.columns["weights"] * batch.logprobs


def _log_ratio(batch: RowBatch) -> Tensor:
    return batch.logprobs - batch.columns["logprobs"]


def _clipped(batch: RowBatch, ratio: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r) A)."""
    advantages = batch.columns["advantages"]
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def _importance_sampling(batch: RowBatch) -> Tensor:
    """-r A."""
    return -_log_ratio(batch).exp() * batch.columns["advantages"]


def _ppo(batch: RowBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-min(r A, clip(r) A): Schulman et al., 2017, arXiv:1707.06347."""
    return _clipped(batch, _log_ratio(batch).exp(), clip_low_threshold, clip_high_threshold)


def _cispo(batch: RowBatch, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-sg(clip(r)) A log p: arXiv:2506.13585."""
    ratio = _log_ratio(batch).detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return -ratio * batch.columns["advantages"] * batch.logprobs


def _dro(batch: RowBatch, *, beta: float = 0.05) -> Tensor:
    """-(A log p - β/2 (log r)²): Richemond et al., 2024, arXiv:2405.19107."""
    return beta / 2 * _log_ratio(batch).square() - batch.columns["advantages"] * batch.logprobs


def _dppo(batch: RowBatch, *, delta_low: float = 0.2, delta_high: float = 0.2) -> Tensor:
    """-r A, without gradient where p has left [q - low, q + high] in the direction of A: arXiv:2602.04879, eq. 13."""
    advantages = batch.columns["advantages"]
    change = batch.logprobs.detach().exp() - batch.columns["logprobs"].exp()
    is_outside = ((advantages > 0) & (change > delta_high)) | ((advantages <= 0) & (change < -delta_low))
    return -_log_ratio(batch).exp() * advantages * ~is_outside


def _gspo(batch: RowBatch, *, clip_low_threshold: float = 1 - 3e-4, clip_high_threshold: float = 1 + 4e-4) -> Tensor:
    """-min(s A, clip(s) A), with the value of the row's ratio s and the gradient of each token's own log p.

    log s is the mean of log r over the row's tokens in `RATIO_MASK` (GSPO-token, Zheng et al. 2025, arXiv:2507.18071,
    eq. 14 and 15; tinker-docs.thinkingmachines.ai/tinker/losses/gspo). The default thresholds are the paper's.
    """
    mask = (batch.columns[RATIO_MASK] != 0).to(batch.logprobs)
    log_s = batch.sum_by_row(_log_ratio(batch).detach() * mask) / batch.sum_by_row(mask)
    ratio = (log_s + batch.logprobs - batch.logprobs.detach()).exp()
    return _clipped(batch, ratio, clip_low_threshold, clip_high_threshold)


def _stable_reinforce(batch: RowBatch) -> Tensor:
    """-A (log p + KL(q || p)): REINFORCE with score centering (arXiv:2609.20807).

    The gradient is that of -A log p, less its expectation under q: the drift by which a difference between sampler and
    trainer adds up. Thinking Machines describes StableReinforce by what it needs and does, without its formula
    (tinker-docs.thinkingmachines.ai/tinker/losses/stable-reinforce); this is a published loss of that kind.
    """
    assert batch.divergence is not None
    return -batch.columns["advantages"] * (batch.logprobs + batch.divergence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoss:
    """A loss that clients choose by name."""

    function: Callable[..., Tensor]
    """Loss of each token, to be summed. Its arguments besides the batch are the protocol's settings."""
    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Columns that each row must have."""
    accepts: tuple[str, ...] = ()
    """Further columns that the loss reads, 1 where they are missing. Any other column is refused: it would change
    nothing."""
    reads_sampler: bool = False
    """Whether the loss reads the recorded distributions of the sampler, so that each row needs its provenance."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings."""
        return tuple(inspect.signature(self.function).parameters)[1:]


CLIENT_LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(function=_cross_entropy, needs=(), accepts=("weights",)),
    "importance_sampling": ClientLoss(function=_importance_sampling),
    "ppo": ClientLoss(function=_ppo),
    "cispo": ClientLoss(function=_cispo),
    "dro": ClientLoss(function=_dro),
    "gspo": ClientLoss(function=_gspo, needs=("logprobs", "advantages", RATIO_MASK)),
    "dppo": ClientLoss(function=_dppo),
    # Its log-probabilities are compared with the recorded ones (`stability.py`).
    "stable_reinforce": ClientLoss(
        function=_stable_reinforce, needs=("advantages",), accepts=("logprobs",), reads_sampler=True
    ),
}


def training_rows(
    loss: ClientLoss, rows: Sequence[ClientRow], distributions: Sequence[RowDistributions] | None
) -> list[Row]:
    """Return checked rows with the columns that a loss reads, and the distributions of their targets if it reads
    them."""
    from agentrl.parts import Row  # imports torch

    trained = []
    for number, row in enumerate(rows):
        ones = np.ones(len(row.targets), np.float32)
        columns = {name: row.columns.get(name, ones) for name in (*loss.needs, *loss.accepts)}
        top_ids, top_logprobs = (None, None) if distributions is None else distributions[number]
        trained.append(
            Row(
                token_ids=row.token_ids,
                targets=row.targets,
                columns=columns,
                top_ids=top_ids,
                top_logprobs=top_logprobs,
            )
        )
    return trained


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
    if (tokens := sum(len(row.token_ids) for row in rows)) > max(MAX_TOKENS, max_context):
        raise InputError(f"{tokens} tokens in one request, at most {MAX_TOKENS} are possible; send fewer rows at once")
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
