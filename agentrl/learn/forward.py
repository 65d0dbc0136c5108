"""The forward pass over a micro-batch: log-probability, entropy and kept mass of its trained tokens.

All tokens of the micro-batch's prefix tree go through the model as one sequence, [1, N]: norms, projections and experts
see no padding, and no token twice. Only attention knows the tree. A model that mixes tokens in other layers (such as
state-space layers) is forwarded as padded rows instead. The model's own head (output projection, soft-capping, scaling)
runs over the hidden states that predict a trained token, in pieces.

Owns: both forward passes, the call of the head. Does not own: packing (`packing.py`), attention (`attention.py`),
losses, the choice between the two passes (`models.py`), routing replay (`routing_replay.py`). Invariant: the
distribution is the one the engine sampled from, so ratios compare like with like.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.learn.attention import Tree
from agentrl.learn.packing import MicroBatch, padded_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.learn.routing_replay import RoutingReplay

TOP_TOKENS = 64
"""Number of a reference's likeliest tokens over which the divergence from it is exact."""
_FLOOR = -100.0
"""Log-probability that stands for a probability of 0 in a divergence."""
MAX_LOGITS = 1 << 26
"""Maximum number of logits in one piece of the projection; with several pieces, each is recomputed in the backward
pass."""


def _body(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM whose output its head projects: the child that holds the input embeddings."""
    embeddings = model.get_input_embeddings()
    return next(child for child in model.children() if any(part is embeddings for part in child.modules()))


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Return the text layers of a model: its body, or the part of the body beside its image layers."""
    decoder: nn.Module = model.get_decoder()
    return _body(model) if decoder is model else decoder


class _BodyOutput:
    """Output of a model's body for its head: the last hidden state, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


def _own_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute the logits [n, V] from the last hidden states [n, H], by the model's own forward pass."""
    body = _body(model)
    before = vars(body).get("forward")
    body.forward = lambda *_, **__: _BodyOutput(hidden[None])
    try:
        unread = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(input_ids=unread, use_cache=False).logits
    finally:
        if before is None:
            del body.forward
        else:
            body.forward = before
    return logits[0]


def device_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a numpy array to a tensor on a device."""
    return torch.from_numpy(array).to(device)


def _replayed(
    replay: RoutingReplay | None, batch: MicroBatch, tokens: NDArray[np.int64] | None, device: torch.device
) -> AbstractContextManager[None]:
    """Replay the routing recorded for `tokens`, in the order in which the model sees them; None: for the whole
    batch.
    """
    if replay is None or batch.expert_routing is None:
        return nullcontext()
    experts = batch.expert_routing if tokens is None else batch.expert_routing[tokens.reshape(-1)]
    return replay.forced(device_tensor(experts, device).long())


def _tree_hidden(
    model: PreTrainedModel, batch: MicroBatch, device: torch.device, replay: RoutingReplay | None
) -> Tensor:
    """Return the hidden states [N, H] of the packed tokens."""
    with _replayed(replay, batch, None, device):
        output = _decoder(model)(
            input_ids=device_tensor(batch.token_ids, device).unsqueeze(0),
            position_ids=device_tensor(batch.position_ids, device).unsqueeze(0),
            use_cache=False,
            tree=Tree(batch, device),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden[0]


def _padded_hidden(
    model: PreTrainedModel, batch: MicroBatch, device: torch.device, replay: RoutingReplay | None
) -> Tensor:
    """Return the hidden states [N, H] from whole rows, padded on the right; the batch was packed without sharing."""
    hidden: list[Tensor] = []
    order: list[NDArray[np.int64]] = []
    for tokens, valid in padded_rows(batch):
        with _replayed(replay, batch, tokens, device):
            output = _decoder(model)(
                input_ids=device_tensor(batch.token_ids[tokens], device),
                attention_mask=None if valid.all() else device_tensor(valid, device).long(),
                use_cache=False,
            )
        hidden.append(output.last_hidden_state[device_tensor(valid, device)])
        order.append(tokens[valid])
    back = np.argsort(np.concatenate(order))
    return torch.cat(hidden)[device_tensor(back, device)]


class HeadOutput(NamedTuple):
    """Results per trained token, [n] each unless noted, float32."""

    logprob: Tensor
    """Natural log of the target's probability under the processed distribution."""
    entropy: Tensor
    """Entropy of the processed distribution in nats."""
    kept_mass: Tensor
    """Probability of the kept set under the full tempered distribution; 1 if nothing was masked. No gradient."""
    top_ids: Tensor | None = None
    """[n, k] int64, the likeliest tokens, if they were asked for. No gradient."""
    top_logprobs: Tensor | None = None
    """[n, k + 1]: log-probabilities of `top_ids`, then of all other tokens together. No gradient."""
    reference_kl: Tensor | None = None
    """See `reference_divergence`; None without a reference."""

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadOutput:
        """Apply a function to every column that is there."""
        return HeadOutput(*(None if column is None else function(column) for column in self))  # type: ignore[arg-type]

    @staticmethod
    def join(pieces: Sequence[HeadOutput]) -> HeadOutput:
        """Join the results of consecutive tokens."""
        columns = zip(*pieces, strict=True)
        return HeadOutput(*(None if column[0] is None else torch.cat(column) for column in columns))

    def slice(self, start: int, stop: int) -> HeadOutput:
        """Return the results of tokens [start, stop)."""
        return self.map(lambda column: column[start:stop])


class KeptSets(NamedTuple):
    """The kept set K_t of each of n tokens, ragged."""

    counts: Tensor  # int64 [n]; 0: the full vocabulary
    token_ids: Tensor  # int64 [sum of counts]

    def mask(self, vocabulary: int) -> Tensor:
        """Return a boolean mask [n, vocabulary]; rows with count 0 are all True."""
        kept = (self.counts == 0).unsqueeze(1).expand(-1, vocabulary).clone()
        rows = torch.repeat_interleave(torch.arange(len(self.counts), device=self.counts.device), self.counts)
        kept[rows, self.token_ids] = True
        return kept

    def slice(self, start: int, stop: int) -> KeptSets:
        """Return the sets of tokens [start, stop)."""
        before, inside = int(self.counts[:start].sum()), int(self.counts[start:stop].sum())
        return KeptSets(self.counts[start:stop], self.token_ids[before : before + inside])


def logprob_head(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    kept_mask: Tensor | None = None,
    entropy_gradient: bool = True,
    top: int = 0,
    reference: HeadOutput | None = None,
) -> HeadOutput:
    """Compute the log-probability of `targets` under softmax(logits / temperature), restricted to the kept set.

    log pi_K(y) = z_y / tau - log sum over k in K ∪ {y} of exp(z_k / tau), with z the logits, tau the temperature; the
    target always belongs to the kept set, so a sampled token never has probability 0.

    Args:
        logits: [n, V], the logits that predict the targets.
        targets: [n], int64.
        temperature: one value for all, or [n].
        kept_mask: bool [n, V], True where the sampler kept the token; None: nothing was masked.
        entropy_gradient: whether the entropy is differentiable; without, it costs less.
        top: number of likeliest tokens to return, `TOP_TOKENS` for a reference.
        reference: result of the reference for the same tokens, with `top`, for `reference_kl`.
    """
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature.unsqueeze(1)
    elif temperature != 1.0:
        logits = logits / temperature
    chosen = targets.unsqueeze(1)
    if kept_mask is None:
        log_softmax = logits.log_softmax(dim=1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
        logprob, kept_mass = log_softmax.gather(1, chosen).squeeze(1), torch.ones_like(entropy).detach()
        return HeadOutput(logprob, entropy, kept_mass, *_compared(log_softmax, logprob, targets, top, reference))
    kept = kept_mask.scatter(1, chosen, True)
    log_kept = logits.masked_fill(~kept, -torch.inf).log_softmax(dim=1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # 0 · log 0 is 0; masked_fill before the product keeps NaN out of the gradient.
        entropy = -(log_kept.exp() * log_kept.masked_fill(~kept, 0.0)).sum(dim=1)
    with torch.no_grad():
        kept_mass = logits.softmax(dim=1).masked_fill(~kept, 0.0).sum(dim=1)
    logprob = log_kept.gather(1, chosen).squeeze(1)
    return HeadOutput(logprob, entropy, kept_mass, *_compared(log_kept, logprob, targets, top, reference))


def _compared(
    log_softmax: Tensor, logprob: Tensor, targets: Tensor, top: int, reference: HeadOutput | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `top_ids`, `top_logprobs` and `reference_kl` of a distribution."""
    ids, logprobs = _likeliest(log_softmax.detach(), top) if top else (None, None)
    kl = None if reference is None else reference_divergence(log_softmax, logprob, targets, reference)
    return ids, logprobs, kl


def _likeliest(log_softmax: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens, [n, k], and log-probabilities, [n, k + 1], the last that of all others."""
    logprobs, ids = log_softmax.topk(min(count, log_softmax.shape[1]), dim=1)
    return ids, torch.cat([logprobs.clamp(min=_FLOOR), _others(log_softmax, ids)], dim=1)


def _others(log_softmax: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of all tokens but `ids` [n, k] together, [n, 1]; about `_FLOOR` if there are none."""
    return log_softmax.scatter(1, ids, _FLOOR).logsumexp(dim=1, keepdim=True)


def reference_divergence(log_softmax: Tensor, logprob: Tensor, targets: Tensor, reference: HeadOutput) -> Tensor:
    """Estimate KL(pi || ref) of each token's distribution, [n], with the gradient of the divergence.

    With K the reference's k likeliest tokens and R all others, the chain rule of the divergence gives

        KL(pi || ref) = sum over v in K of pi_v log(pi_v / ref_v) + pi_R log(pi_R / ref_R) + pi_R KL(pi_|R || ref_|R)

    The first two terms are computed. The sampled token y, if it lies in R, estimates the last by r = log(pi_|R(y) /
    ref_|R(y)), with r ∇ log pi(y) as its gradient. If pi sampled y, value and gradient are unbiased for every k: k = 0
    is on-policy distillation from sampled tokens alone (Lu and Thinking Machines Lab, 2025), and k = V the exact
    divergence (GKD, arXiv:2306.13649). Memory is linear in k, apart from the piece of logits at hand.

    Args:
        log_softmax: [n, V], log pi.
        logprob: [n], log pi of `targets`.
        targets: [n], int64, the sampled tokens.
        reference: result of the reference for the same tokens, with `top_ids` and `top_logprobs`.
    """
    assert reference.top_ids is not None
    assert reference.top_logprobs is not None
    # Tokens that only the reference has, padding of its embeddings, are the last column: pi cannot sample them.
    ids, padded = reference.top_ids.clamp(max=log_softmax.shape[1]), F.pad(log_softmax, (0, 1), value=_FLOOR)
    own = torch.cat([padded.gather(1, ids).clamp(min=_FLOOR), _others(padded, ids)], dim=1)
    kl = (own.exp() * (own - reference.top_logprobs)).sum(dim=1)
    with torch.no_grad():
        inside = (reference.top_ids == targets.unsqueeze(1)).any(dim=1)
        theirs = reference.logprob.clamp(min=_FLOOR) - reference.top_logprobs[:, -1]
        residual = (logprob - own[:, -1] - theirs).masked_fill(inside, 0.0)
    return kl + residual * (1.0 + logprob - logprob.detach())


def logprobs_of(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor,
    kept: KeptSets | None = None,
    entropy_gradient: bool = True,
    top: int = 0,
    reference: HeadOutput | None = None,
) -> HeadOutput:
    """Compute `logprob_head` in pieces of at most `MAX_LOGITS` logits; several pieces are recomputed in the backward
    pass.

    Args:
        model: model whose head computes the logits.
        hidden: [n, H], the states that predict the targets (after the final norm).
        targets: [n], int64.
        temperature: [n].
        kept: the kept sets of the n tokens; None: nothing was masked.
        entropy_gradient: whether the entropy is differentiable.
        top: number of likeliest tokens to return, `TOP_TOKENS` for a reference.
        reference: see `logprob_head`.
    """

    def piece(start: int, stop: int) -> HeadOutput:
        logits = _own_logits(model, hidden[start:stop])
        return logprob_head(
            logits,
            targets[start:stop],
            temperature=temperature[start:stop],
            kept_mask=None if kept is None else kept.slice(start, stop).mask(logits.shape[1]),
            entropy_gradient=entropy_gradient,
            top=top,
            reference=None if reference is None else reference.slice(start, stop),
        )

    count, step = len(targets), max(1, MAX_LOGITS // int(model.config.get_text_config().vocab_size))
    if count <= step:
        return piece(0, count)
    bounds = [(start, min(start + step, count)) for start in range(0, count, step)]
    pieces = [checkpoint(piece, start, stop, use_reentrant=False) for start, stop in bounds]
    return HeadOutput.join(pieces)


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    shared: bool = True,
    entropy_gradient: bool = False,
    replay: RoutingReplay | None = None,
    top: int = 0,
    reference: HeadOutput | None = None,
) -> HeadOutput:
    """Compute log-probability, entropy and kept mass of a micro-batch's trained tokens, [n] each, differentiable.

    Args:
        model: a causal LM, with its active adapter.
        batch: packed with `share=shared`.
        shared: whether to forward the prefix tree or padded rows.
        entropy_gradient: whether the entropy is differentiable.
        replay: routing replay of the model; uses the batch's recorded experts, if there are any.
        top: number of likeliest tokens to return, `TOP_TOKENS` for a reference.
        reference: result of another model for the same micro-batch, with `top`, to diverge from.

    Raises:
        ModelError: the recorded experts belong to another model.
    """
    device = model.device
    hidden = (_tree_hidden if shared else _padded_hidden)(model, batch, device, replay)
    kept = None
    if batch.kept_counts is not None and batch.kept_ids is not None:
        kept = KeptSets(device_tensor(batch.kept_counts, device), device_tensor(batch.kept_ids, device))
    return logprobs_of(
        model,
        F.embedding(device_tensor(batch.hidden_index, device), hidden),
        device_tensor(batch.targets, device),
        temperature=device_tensor(batch.temperature, device),
        kept=kept,
        entropy_gradient=entropy_gradient,
        top=top,
        reference=reference,
    )
