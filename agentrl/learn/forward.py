"""The forward pass over a micro-batch: log-probability, entropy and kept mass of its trained tokens.

All tokens of the micro-batch's prefix tree go through the model as one sequence, [1, N]: norms, projections and experts
see no padding, and no token twice. Only attention knows the tree.
A model that mixes tokens in other ways is forwarded as padded rows instead. The
model's own head (output projection, soft-capping, scaling) runs over the hidden states that predict a trained token, in
pieces.

Attention along the paths of the tree takes memory linear in tokens. The tokens lie in depth-first order, so the tokens
that see token j are those from j up to its `MicroBatch.visible_until`: two numbers per token replace a mask. On CPU,
chunks of consecutive queries go through torch's flash kernel with the keys that any of them sees. A chunk's mask is
made when the chunk is computed, forward and backward, and is bounded in size, so no stored tensor grows with the square
of a row's length; a row without a shared prefix is computed whole, without a mask. On CUDA the same rule is a block
mask of flex_attention. Key and value heads shared by several query heads are not copied.

Routing replay routes each token through the experts that the engine's pass used: engine and trainer compute in
different dtypes, batches and kernels, and where two experts score almost equally, the two passes may choose
differently, so that a ratio compares the probabilities of two different networks (R3, arXiv:2510.11370). Only the
choice is replaced: with s the router's logits in this pass and I the recorded set of experts, the router computes its
gate values from its scores at I (for most routers, a softmax over I). The router's weights keep their gradient, and
each architecture its formula. A token without a record (-1) is routed normally.

Owns: both forward passes, attention, the call of the head, the routers' forced choices. Does not own: packing
(`packing.py`), losses, the choice between the two passes (`models.py`), recording of experts
(`engines.embedded.capture`). Invariant: the distribution is the one the engine sampled from, so ratios compare like
with like.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from agentrl.core.errors import ModelError
from agentrl.core.tokens import KeptSets
from agentrl.engines.embedded.capture import chosen_experts, find_routers
from agentrl.learn.device_copies import device_tensors
from agentrl.learn.packing import MicroBatch, TreeSize, padded_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel


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
    """Return the text layers of a model: its body, or the body without its image layers."""
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


def guesses_lengths(model: PreTrainedModel) -> bool:
    """Whether the model, without a mask, takes tokens with the number of its padding token for padding (XLM)."""
    return "lengths" in signature(model.forward).parameters


def _model_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute the logits [n, V] from the last hidden states [n, H], by the model's own forward pass."""
    replaced = {_body(model): None, _decoder(model): None}  # some models call the decoder inside their body directly
    before = {part: vars(part).get("forward") for part in replaced}
    try:
        for part in replaced:
            part.forward = lambda *_, **__: _BodyOutput(hidden[None])
        unread = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(input_ids=unread, use_cache=False).logits
    finally:
        for part, forward in before.items():
            if forward is None:
                del part.forward
            else:
                part.forward = forward
    return logits[0]


def logits_after(model: PreTrainedModel, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
    """Compute the logits [n, V] behind some tokens, `places` [n], of one row, without those behind all others."""
    return _model_logits(model, _decoder(model)(**inputs).last_hidden_state[0, places])


def _model_inputs(batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Copy the columns of a micro-batch that the forward pass reads, by name."""
    names = ("token_ids", "position_ids", "visible_until", "hidden_index", "targets", "temperature")
    arrays: dict[str, NDArray[Any]] = {name: getattr(batch, name) for name in names}
    if batch.expert_routing is not None:
        arrays["expert_routing"] = batch.expert_routing
    if batch.kept_counts is not None and batch.kept_ids is not None:
        arrays["fully_kept"] = batch.kept_counts <= 0
        arrays["kept_rows"] = np.repeat(
            np.arange(len(batch.kept_counts), dtype=np.int32), KeptSets.sizes_of(batch.kept_counts)
        )
        arrays["kept_ids"] = batch.kept_ids
    return device_tensors(arrays, device)


def _routing_context(
    replay: RoutingReplay | None, inputs: Mapping[str, Tensor], tokens: Tensor | slice
) -> AbstractContextManager[None]:
    """Replay the recorded routing of `tokens`, in the model's order."""
    experts = inputs.get("expert_routing")
    if replay is None or experts is None:
        return nullcontext()
    return replay.force_choice(experts[tokens].long())


def _tree_hidden(
    model: PreTrainedModel,
    batch: MicroBatch,
    inputs: Mapping[str, Tensor],
    replay: RoutingReplay | None,
) -> Tensor:
    """Return the hidden states [N, H] of the packed tokens."""
    with _routing_context(replay, inputs, slice(None)):
        output = _decoder(model)(
            input_ids=inputs["token_ids"][None],
            position_ids=inputs["position_ids"][None],
            use_cache=False,
            tree=TreeAttentionMask(batch, model.device, inputs),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden[0]


def _padded_hidden(
    model: PreTrainedModel, batch: MicroBatch, inputs: Mapping[str, Tensor], replay: RoutingReplay | None
) -> Tensor:
    """Return the hidden states [N, H] from whole rows, padded on the right; the batch was packed without sharing."""
    blocks = list(padded_rows(batch))
    place, num_computed = np.zeros(len(batch.token_ids), np.int64), 0
    for tokens, valid in blocks:
        place[tokens[valid]] = num_computed + np.flatnonzero(valid)
        num_computed += valid.size
    arrays: dict[str, NDArray[Any]] = {"place": place}
    for index, (tokens, valid) in enumerate(blocks):
        arrays |= {f"tokens {index}": tokens, f"valid {index}": valid.astype(np.int64)}
    device_arrays = device_tensors(arrays, model.device)
    hidden: list[Tensor] = []
    for index, (_, valid) in enumerate(blocks):
        token_rows = device_arrays[f"tokens {index}"]
        with _routing_context(replay, inputs, token_rows.reshape(-1)):
            output = _decoder(model)(
                input_ids=inputs["token_ids"][token_rows],
                attention_mask=None if valid.all() and not guesses_lengths(model) else device_arrays[f"valid {index}"],
                use_cache=False,
            )
        hidden.append(output.last_hidden_state.flatten(0, 1))
    return torch.cat(hidden)[device_arrays["place"]]


class HeadOutput(NamedTuple):
    """Results per trained token, [n] each unless noted, float32."""

    logprob: Tensor
    """Natural log of the target's probability under the processed distribution."""
    entropy: Tensor
    """Entropy of the processed distribution in nats."""
    kept_mass: Tensor
    """Probability of the kept set under the full tempered distribution; 1 if nothing was masked. No gradient."""
    top_ids: Tensor | None = None
    """[n, k] int64, the likeliest tokens, if requested. No gradient."""
    top_logprobs: Tensor | None = None
    """[n, k + 1]: log-probabilities of `top_ids`, then of all other tokens together. No gradient."""
    reference_kl: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadOutput:
        """Apply a function to every column that is not None."""
        columns: list[Any] = [None if column is None else function(column) for column in self]
        return HeadOutput(*columns)

    @staticmethod
    def join(pieces: Sequence[HeadOutput]) -> HeadOutput:
        """Join the results of consecutive tokens."""
        columns: list[Any] = [None if column[0] is None else torch.cat(column) for column in zip(*pieces, strict=True)]
        return HeadOutput(*columns)

    def slice(self, start: int, stop: int) -> HeadOutput:
        """Return the results of tokens [start, stop)."""
        return self.map(lambda column: column[start:stop])


class SamplerDistributions(NamedTuple):
    """Distributions that n tokens were sampled from, over the sampler's likeliest tokens, to diverge from."""

    top_ids: Tensor
    """[n, k] int64, the likeliest tokens."""
    top_logprobs: Tensor
    """[n, k + 1]: log-probabilities of `top_ids`, then of all other tokens together."""

    def slice(self, start: int, stop: int) -> SamplerDistributions:
        """Return the distributions of tokens [start, stop)."""
        return SamplerDistributions(self.top_ids[start:stop], self.top_logprobs[start:stop])


class KeptVocabularySets(NamedTuple):
    """The kept set K_t of each of n tokens, ragged."""

    fully_kept: Tensor  # bool [n], whether all tokens were kept, but those in `token_ids`
    rows: Tensor  # int32 [sum of the sets' sizes], the token of each id, ascending
    token_ids: Tensor  # int32 [sum of the sets' sizes]
    starts: NDArray[np.int64]  # [n + 1], the first id of each token; on the host, so that it need not wait

    def mask(self, start: int, stop: int, vocabulary: int) -> Tensor:
        """Return a boolean mask [stop - start, vocabulary] of the tokens [start, stop).

        A reference may have a smaller vocabulary than the policy; ids beyond it are left out.
        """
        mask = self.fully_kept[start:stop].unsqueeze(1).expand(-1, vocabulary + 1).clone()
        ids = slice(*self.starts[[start, stop]].tolist())
        rows, columns = self.rows[ids].long(), self.token_ids[ids].long().clamp(max=vocabulary)
        return mask.index_put_((rows - start, columns), ~self.fully_kept[rows])[:, :vocabulary]


def logprobs_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    kept_mask: Tensor | None = None,
    entropy_gradient: bool = True,
    top: int = 0,
    reference: HeadOutput | SamplerDistributions | None = None,
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
        reference: result of the reference for the same tokens, with `top`, for `reference_kl`; or distributions of the
            sampler, of which it is then `sampler_divergence`.
    """
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature.unsqueeze(1)
    elif temperature != 1.0:
        logits = logits / temperature
    target_columns = targets.unsqueeze(1)
    if kept_mask is None:
        log_softmax = logits.log_softmax(dim=1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
        logprob, kept_mass = log_softmax.gather(1, target_columns).squeeze(1), torch.ones_like(entropy).detach()
        return HeadOutput(
            logprob, entropy, kept_mass, *_divergence_terms(log_softmax, logprob, targets, top, reference)
        )
    full_mask = kept_mask.scatter(1, target_columns, True)
    log_kept = logits.masked_fill(~full_mask, -torch.inf).log_softmax(dim=1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # 0 · log 0 is 0; masked_fill before the product keeps NaN out of the gradient.
        entropy = -(log_kept.exp() * log_kept.masked_fill(~full_mask, 0.0)).sum(dim=1)
    with torch.no_grad():
        kept_mass = logits.softmax(dim=1).masked_fill(~full_mask, 0.0).sum(dim=1)
    logprob = log_kept.gather(1, target_columns).squeeze(1)
    return HeadOutput(logprob, entropy, kept_mass, *_divergence_terms(log_kept, logprob, targets, top, reference))


def _divergence_terms(
    log_softmax: Tensor,
    logprob: Tensor,
    targets: Tensor,
    top: int,
    reference: HeadOutput | SamplerDistributions | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `top_ids`, `top_logprobs` and `reference_kl` of a distribution."""
    ids, logprobs = _likeliest(log_softmax.detach(), top) if top else (None, None)
    match reference:
        case None:
            kl = None
        case SamplerDistributions():
            kl = sampler_divergence(log_softmax, reference)
        case HeadOutput():
            kl = reference_divergence(log_softmax, logprob, targets, reference)
    return ids, logprobs, kl


def _likeliest(log_softmax: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens, [n, k], and log-probabilities, [n, k + 1], the last that of all others."""
    logprobs, ids = log_softmax.topk(min(count, log_softmax.shape[1]), dim=1)
    return ids, torch.cat([logprobs.clamp(min=_FLOOR), _tail_logprobs(log_softmax, ids)], dim=1)


def _tail_logprobs(log_softmax: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of all tokens but `ids` [n, k] together, [n, 1]; about `_FLOOR` if there are none."""
    return log_softmax.scatter(1, ids, _FLOOR).logsumexp(dim=1, keepdim=True)


def reference_divergence(log_softmax: Tensor, logprob: Tensor, targets: Tensor, reference: HeadOutput) -> Tensor:
    """Estimate KL(pi || ref) of each token's distribution, [n], with the gradient of the divergence.

    With K the reference's k likeliest tokens and R all others, the chain rule of the divergence gives

        KL(pi || ref) = sum over v in K of pi_v log(pi_v / ref_v) + pi_R log(pi_R / ref_R) + pi_R KL(pi_|R || ref_|R)

    The first two terms are computed. The sampled token y, if it lies in R, estimates the last by r = log(pi_|R(y) /
    ref_|R(y)), with r ∇ log pi(y) as its gradient. If pi sampled y, value and gradient are unbiased for every k: k = 0
    is on-policy distillation from sampled tokens alone (Lu and Thinking Machines Lab, 2025), and k = V the exact
    divergence (GKD, arXiv:2306.13649). Memory is linear in k, plus one piece of logits.

    Args:
        log_softmax: [n, V], log pi.
        logprob: [n], log pi of `targets`.
        targets: [n], int64, the sampled tokens.
        reference: result of the reference for the same tokens, with `top_ids` and `top_logprobs`.
    """
    assert reference.top_ids is not None
    assert reference.top_logprobs is not None
    # The last column holds the reference's extra tokens (padding of its embeddings), which pi cannot sample.
    ids, padded_logprobs = reference.top_ids.clamp(max=log_softmax.shape[1]), F.pad(log_softmax, (0, 1), value=_FLOOR)
    logprobs = torch.cat(
        [padded_logprobs.gather(1, ids).clamp(min=_FLOOR), _tail_logprobs(padded_logprobs, ids)], dim=1
    )
    kl = (logprobs.exp() * (logprobs - reference.top_logprobs)).sum(dim=1)
    with torch.no_grad():
        inside = (reference.top_ids == targets.unsqueeze(1)).any(dim=1)
        log_ratio = reference.logprob.clamp(min=_FLOOR) - reference.top_logprobs[:, -1]
        residual = (logprob - logprobs[:, -1] - log_ratio).masked_fill(inside, 0.0)
    return kl + residual * (1.0 + logprob - logprob.detach())


def sampler_divergence(log_softmax: Tensor, sampler: SamplerDistributions) -> Tensor:
    """Compute KL(mu || pi) of each token's distribution, [n].

    With K the sampler's k likeliest tokens, and mu taken as proportional to pi on all others, R, that is

        sum over v in K of mu_v log(mu_v / pi_v) + mu_R log(mu_R / pi_R)

    Its gradient is minus the expectation of ∇ log pi under that mu, the drift that score centering removes
    (arXiv:2609.20807); k = V is exact.

    Args:
        log_softmax: [n, V], log pi.
        sampler: the distributions mu of the same tokens.
    """
    logprobs = torch.cat(
        [log_softmax.gather(1, sampler.top_ids).clamp(min=_FLOOR), _tail_logprobs(log_softmax, sampler.top_ids)], dim=1
    )
    return (sampler.top_logprobs.exp() * (sampler.top_logprobs - logprobs)).sum(dim=1)


def chunked_logprobs_from_hidden(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor,
    kept_sets: KeptVocabularySets | None = None,
    entropy_gradient: bool = True,
    top: int = 0,
    reference: HeadOutput | SamplerDistributions | None = None,
) -> HeadOutput:
    """Compute `logprobs_from_logits` in pieces of at most `MAX_LOGITS` logits; several pieces are recomputed in the
    backward pass.

    Args:
        model: model whose head computes the logits.
        hidden: [n, H], the states that predict the targets (after the final norm), or [1, H] if it is one for all.
        targets: [n], int64.
        temperature: [n].
        kept_sets: the kept sets of the n tokens; None: nothing was masked.
        entropy_gradient: whether the entropy is differentiable.
        top: number of likeliest tokens to return, `TOP_TOKENS` for a reference.
        reference: see `logprobs_from_logits`.
    """

    def piece(start: int, stop: int) -> HeadOutput:
        logits = _model_logits(model, hidden if len(hidden) == 1 else hidden[start:stop])
        return logprobs_from_logits(
            logits,
            targets[start:stop],
            temperature=temperature[start:stop],
            kept_mask=None if kept_sets is None else kept_sets.mask(start, stop, logits.shape[1]),
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
    reference: HeadOutput | SamplerDistributions | None = None,
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
    inputs = _model_inputs(batch, model.device)
    if shared:
        hidden = _tree_hidden(model, batch, inputs, replay)
    else:
        hidden = _padded_hidden(model, batch, inputs, replay)
    kept_sets = None
    if batch.kept_counts is not None:
        starts = np.cumsum([0, *KeptSets.sizes_of(batch.kept_counts)])
        kept_sets = KeptVocabularySets(inputs["fully_kept"], inputs["kept_rows"], inputs["kept_ids"], starts)
    predicting = inputs["hidden_index"]
    if len(set(batch.hidden_index.tolist())) == 1:
        predicting = predicting[:1]  # a canary's tokens follow one context: its logits are computed once
    return chunked_logprobs_from_hidden(
        model,
        F.embedding(predicting, hidden),
        inputs["targets"],
        temperature=inputs["temperature"],
        kept_sets=kept_sets,
        entropy_gradient=entropy_gradient,
        top=top,
        reference=reference,
    )


# --- attention along the prefix tree ----------------------------------------------------------------------------------

FORWARD_ERRORS = (ModelError, TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)
"""Errors raised by models in unsupported forward passes."""
ATTENTION = "agentrl_tree"
"""Name under which `learn.models` registers `tree_attention` with transformers."""

_CHUNK = (64, 256)
"""Smallest and largest number of queries in a chunk, if its mask allows it: short rows waste less in short chunks."""
_MASK = 1 << 21
"""Number of elements of the largest mask: longer contexts have shorter chunks."""
_KEPT_MASKS = 1 << 22
"""Number of mask elements that are kept for all layers; above it, each layer makes its own masks."""
# Few tokens are not worth compiling. The filter is set once, because all threads share their filters.
warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
_BLOCK = 128
"""Number of tokens in a block of flex_attention."""
UNFUSED_TOKENS = 2048
"""Number of tokens up to which attention without gradients is not fused: the checks and canaries before a first token
must not wait for a compiler."""


@dataclass(slots=True)
class _Chunk:
    """Consecutive queries [start, stop) of a micro-batch, and the keys that any of them sees."""

    start: int
    stop: int
    keys: slice | Tensor
    is_causal: bool = False
    """Whether queries and keys form one row from its first token, so that no mask is needed."""
    mask: Tensor | None = None
    """Attention mask of the chunk; None if it is not kept."""

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.keys.stop - self.keys.start if isinstance(self.keys, slice) else len(self.keys)


_TOKEN_NS = 558.0
"""Time of a token in a layer without its attention, forward and backward, in ns. This and the next two were measured
on an H200 with adapters on Qwen3-0.6B's shape in bfloat16: 617 ms for 28 layers and 32,768 tokens, of which attention
takes 105 ms."""
_TREE_PAIR_NS = 0.524
"""Time of a token and one that it sees in the attention of a tree: 1.65 ms for four rows of 1,535 tokens, of which they
share 1,024."""
_ROW_PAIR_NS = 0.214
"""The same in the attention of rows: 1.01 ms for four rows of 1,536 tokens."""


def sharing_pays(size: TreeSize, hidden_size: int) -> bool:
    """Whether a prefix tree takes less time than its rows on CUDA: it has fewer tokens, and slower attention.

    Of long rows that share little, the tree is slower. The time of a token without attention grows with the square of
    the model's width, and that of attention with the width.
    """
    saved_tokens = size.row_tokens - size.tree_tokens
    saved_ns = saved_tokens * _TOKEN_NS * hidden_size / 1024
    return saved_ns > size.tree_pairs * _TREE_PAIR_NS - size.row_pairs * _ROW_PAIR_NS


class TreeAttentionMask:
    """The visibility of tokens in a micro-batch, on a device."""

    def __init__(
        self,
        batch: MicroBatch,
        device: torch.device,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Like `MicroBatch.visible_until`, from `inputs`: the columns of the batch that are on the device already."""
        inputs = _model_inputs(batch, device) if inputs is None else inputs
        self._batch = batch
        self._device = device
        self._visible_until = inputs["visible_until"]
        self._position = inputs["position_ids"]
        self._order = torch.arange(len(batch.token_ids), device=device)
        self._chunks: dict[int | None, list[_Chunk]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}
        self._num_cached = 0

    def chunks(self, window: int | None) -> list[_Chunk]:
        """Return the queries in chunks; a token sees the `window` newest tokens of its path, or all of them."""
        if window not in self._chunks:
            self._chunks[window] = list(self._make_chunks(window))
        return self._chunks[window]

    def _make_chunks(self, window: int | None) -> Iterator[_Chunk]:
        visible_until, position, starts = self._batch.visible_until, self._batch.position_ids, self._batch.starts
        count, at = len(visible_until), 0
        fewest, largest = _CHUNK
        size = min(largest, max(fewest, count // len(starts)))
        ends = dict(zip(starts.tolist(), [*starts[1:].tolist(), count], strict=True))
        row_starts = {
            start: end
            for start, end in ends.items()
            if window is None and position[start] == 0 and end - start >= largest
        }
        boundaries = np.array([*sorted(row_starts), count])
        while at < count:
            if at in row_starts:
                yield _Chunk(at, row_starts[at], slice(at, row_starts[at]), is_causal=True)
                at = row_starts[at]
                continue
            stop = min(at + size, int(boundaries[np.searchsorted(boundaries, at)]))
            keys = np.flatnonzero(visible_until[:stop] > at)
            if window is not None:
                keys = keys[position[keys] > position[at:stop].min() - window]
            stop = min(stop, at + max(1, _MASK // len(keys)))
            keys = keys[keys < stop]
            first, last = int(keys[0]), int(keys[-1])
            is_range = last - first + 1 == len(keys)
            yield _Chunk(at, stop, slice(first, last + 1) if is_range else torch.from_numpy(keys).to(self._device))
            at = stop

    def mask(self, chunk: _Chunk, window: int | None, dtype: torch.dtype, *, is_read: bool = True) -> Tensor | None:
        """Return the additive mask of a chunk's scores, [1, 1, queries, keys], 0 or -inf, without values if they are
        not read; None if the kernel masks by itself."""
        if chunk.is_causal:
            return None
        if chunk.mask is not None and chunk.mask.dtype == dtype:
            return chunk.mask
        if is_read:
            queries, keys = self._order[chunk.start : chunk.stop, None], self._order[chunk.keys]
            hidden = (keys > queries) | (self._visible_until[chunk.keys] <= queries)
            if window is not None:
                hidden |= self._position[chunk.start : chunk.stop, None] - self._position[chunk.keys] >= window
            mask = torch.zeros((1, 1, *hidden.shape), dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        else:
            mask = torch.empty((1, 1, chunk.stop - chunk.start, chunk.num_keys), dtype=dtype, device=self._device)
        if self._num_cached + mask.numel() <= _KEPT_MASKS:
            self._num_cached += mask.numel()
            chunk.mask = mask
        return mask

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the same visibility for flex_attention: the blocks of keys that each block of queries sees, in part or
        in whole."""
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(window)
        return self._block_masks[window]

    def _make_block_mask(self, window: int | None) -> BlockMask:
        visible_until, position = self._visible_until, self._position
        # A tensor, so that one kernel serves every window size, and none.
        before = torch.full_like(position, -1) if window is None else position - window

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < visible_until[key]) & (position[key] > before[query])

        count = len(self._batch.token_ids)
        edges = np.arange(0, count, _BLOCK)
        latest = np.maximum.reduceat(self._batch.visible_until, edges)
        soonest = np.minimum.reduceat(self._batch.visible_until, edges)
        stops = np.minimum(edges + _BLOCK, count)
        earlier = np.tri(len(edges), dtype=np.bool_)
        any_visible = earlier & (latest > edges[:, None])
        all_visible = np.tri(len(edges), k=-1, dtype=np.bool_) & (soonest >= stops[:, None])
        if window is not None:
            first, last = (extreme.reduceat(self._batch.position_ids, edges) for extreme in (np.minimum, np.maximum))
            any_visible &= last > first[:, None] - window
            all_visible &= first > last[:, None] - window

        lists: dict[str, NDArray[Any]] = {}
        for name, blocks in (("partial", any_visible & ~all_visible), ("full", all_visible)):
            lists[f"{name} counts"] = blocks.sum(axis=1).astype(np.int32)[None, None]
            lists[name] = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)[None, None]
        device_lists = device_tensors(lists, self._device)
        return BlockMask.from_kv_blocks(
            device_lists["partial counts"],
            device_lists["partial"],
            device_lists["full counts"],
            device_lists["full"],
            BLOCK_SIZE=_BLOCK,
            mask_mod=visible,
            seq_lengths=(count, count),
        )


def _computed_chunks(chunks: Sequence[_Chunk], query: Tensor) -> Collection[int]:
    """Return the chunks to compute: all, or of tensors without data only the last of each shape, which needs the memory
    of the others too."""
    if not query.is_meta:
        return range(len(chunks))
    shapes: dict[object, int] = {}
    for number, chunk in enumerate(chunks):
        shapes[chunk.stop - chunk.start, chunk.num_keys, isinstance(chunk.keys, slice), chunk.is_causal] = number
    return set(shapes.values())


class _ChunkedAttention(torch.autograd.Function):
    """Attention in chunks of a tree, on CPU. It saves queries, keys, values, outputs and one number per query and
    head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: TreeAttentionMask,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        _, heads, count, width = query.shape
        output = query.new_empty(1, count, heads, width).transpose(1, 2)
        normalizers = []
        computed = _computed_chunks(tree.chunks(window), query)
        for number, chunk in enumerate(tree.chunks(window)):
            if number not in computed:
                tree.mask(chunk, window, query.dtype, is_read=False)  # which may be kept
                normalizers.append(query.new_empty(1, heads, chunk.stop - chunk.start, dtype=torch.float32))
                continue
            chunk_output, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, chunk.start : chunk.stop],
                key[:, :, chunk.keys],
                value[:, :, chunk.keys],
                0.0,
                chunk.is_causal,
                attn_mask=tree.mask(chunk, window, query.dtype),
                scale=scale,
            )
            output[:, :, chunk.start : chunk.stop] = chunk_output
            normalizers.append(normalizer)
        ctx.save_for_backward(query, key, value, output, *normalizers)
        ctx.tree, ctx.window, ctx.scale = tree, window, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalizers = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        computed = _computed_chunks(ctx.tree.chunks(ctx.window), query)
        for number, (chunk, normalizer) in enumerate(zip(ctx.tree.chunks(ctx.window), normalizers, strict=True)):
            if number not in computed:
                continue
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, chunk.start : chunk.stop],
                query[:, :, chunk.start : chunk.stop],
                key[:, :, chunk.keys],
                value[:, :, chunk.keys],
                output[:, :, chunk.start : chunk.stop],
                normalizer,
                0.0,
                chunk.is_causal,
                attn_mask=ctx.tree.mask(chunk, ctx.window, query.dtype),
                scale=ctx.scale,
            )
            of_query[:, :, chunk.start : chunk.stop] = gradients[0]
            for total, part in ((of_key, gradients[1]), (of_value, gradients[2])):
                if isinstance(chunk.keys, slice):
                    total[:, :, chunk.keys] += part
                else:
                    total.index_add_(2, chunk.keys, part)
        return of_query, of_key, of_value, None, None, None


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: TreeAttentionMask, window: int | None, scale: float | None
) -> Tensor:
    """Compute `tree_attention` with flex_attention, compiled on CUDA; the output is [1, heads, N, D]."""
    arguments = {"block_mask": tree.block_mask(window), "scale": scale, "enable_gqa": True}
    output: Tensor
    if compiles_attention(query.device) and (torch.is_grad_enabled() or query.shape[2] > UNFUSED_TOKENS):
        options = flex_options(query.shape[-1], query.dtype, _shared_memory(query.device))
        output = _compiled_flex()(query, key, value, **arguments, kernel_options=options)
        return output
    output = cast("Any", flex_attention)(query, key, value, **arguments)
    return output


def flex_options(width: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int | bool]:
    """Return options with which the kernels of flex_attention compile and fit a card.

    torch chooses sizes for cards with large shared memory, also on cards with 99 KiB (compute capabilities 8.6, 8.9
    and 12.0). For fewer than 128 queries it would choose a kernel for decoding, which none of our blocks fits.

    Args:
        width: size of a head.
        dtype: of queries, keys and values.
        shared_memory: bytes per block that the card allows.
    """
    kernel: dict[str, int | bool] = {"FORCE_USE_FLEX_ATTENTION": True}
    # On an A100, torch's kernel for float32 and heads of 256 wants 305,792 bytes of 166,912.
    # 160 KiB of shared memory per block fit torch's own kernel sizes for flex_attention: A100, H100, B200
    if shared_memory >= 160 << 10 and (dtype != torch.float32 or width <= 128):
        return kernel
    if dtype != torch.float32:
        return kernel | {"num_stages": 2}
    return kernel | {"fwd_num_stages": 2, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32 if width <= 128 else 16}


def compiles_attention(device: torch.device) -> bool:
    """Whether the attention of steps is compiled on a device."""
    return device.type == "cuda"


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory per block that a card allows."""
    card: Any = torch.cuda.get_device_properties(device)
    return int(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))


@cache
def _compiled_flex() -> Any:
    # fullgraph: exceeding torch's limit of recompilations is an error, instead of a fallback that materializes all
    # scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # much is Python here; flex_attention is compiled all the same
def tree_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: TreeAttentionMask | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute attention along the paths of a prefix tree; registered with transformers, which fixes this signature.

    Args:
        module: the attention layer.
        query: [1, heads, N, D].
        key: [1, key heads, N, D].
        value: [1, key heads, N, D].
        attention_mask: ignored: the tree determines visibility.
        dropout: must be 0.
        scaling: factor on the scores; None: 1 / sqrt(D).
        sliding_window: number of tokens that a token sees, counted backwards; None: all.
        tree: visibility in the micro-batch, passed through the model's keyword arguments.
        other: further arguments from the model.

    Raises:
        ModelError: the model requests attention other than a causal softmax.
    """
    strange = [name for name in ("s_aux", "softcap", "position_bias") if other.get(name) is not None]
    if tree is None or strange or dropout or query.shape[-1] != value.shape[-1]:
        raise ModelError(f"{type(module).__name__} needs attention with {', '.join(strange) or 'other arguments'}")
    if query.device.type not in ("cpu", "meta"):
        output = flex_tree_attention(query, key, value, tree, sliding_window, scaling)
    else:
        output = _ChunkedAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, tree, sliding_window, scaling
        )
    return output.transpose(1, 2), None


# --- routing replay ---------------------------------------------------------------------------------------------------

_TOP_K = (torch.topk, Tensor.topk)


class RoutingReplay:
    """The routers of a model, in the order in which they run."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers, and test that each one's choice can be forced.

        Raises:
            ModelError: the model has no experts, or chooses them in an unsupported way.
        """
        routers = find_routers(model)
        if not routers:
            raise ModelError(
                f"engine.capture_routing: {type(model).__name__} has no router that reports its experts, so there is "
                "no routing to replay. Use a mixture-of-experts model such as Qwen3-MoE or Mixtral, or set "
                "capture_routing = false"
            )
        self._experts: Tensor | None = None  # [tokens, routers, top_k], of the pass in progress
        self._selections = [0] * len(routers)
        """Number of top-k selections of each router, in forced passes."""
        self.top_k = min(routers.values())
        for layer, name in enumerate(routers):
            router = model.get_submodule(name)
            # Patches the instance, because other models use the class too. PEFT's wrappers call the module, and so this
            # method.
            router.forward = self._wrap_forward(router.forward, layer)
        self.layers = len(routers)
        self._check(model, routers)

    def _check(self, model: PreTrainedModel, routers: Mapping[str, int]) -> None:
        """Force the experts of a pass of the whole model, which gathers the weights if they lie in shards.

        Raises:
            ModelError: a router does not choose by one top-k whose indices it returns.
        """
        tokens = 4
        forced = torch.arange(self.top_k, device=model.device).flip(0).expand(tokens, self.layers, self.top_k)
        chosen: dict[str, Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: object, output: object) -> None:
                chosen[name] = chosen_experts(output)

            return hook

        hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in routers]
        reason = ""
        try:
            with torch.no_grad(), self.force_choice(forced):
                model(input_ids=torch.zeros((1, tokens), dtype=torch.int64, device=model.device), use_cache=False)
        except (TypeError, RuntimeError, AttributeError) as error:
            reason = str(error)
        finally:
            for hook in hooks:
                hook.remove()
        for layer, name in enumerate(routers):
            if reason or self._selections[layer] != 1 or not torch.equal(chosen[name], forced[:, layer]):
                raise _unknown(name, model, reason or f"{self._selections[layer]} top-k selections")

    def _wrap_forward(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def wrapper(*inputs: Any, **named: Any) -> Any:
            if self._experts is None:
                return forward(*inputs, **named)
            with _ForcedTopK(self._experts[:, layer]) as mode:
                output = forward(*inputs, **named)
            self._selections[layer] = mode.calls
            return output

        return wrapper

    @contextmanager
    def force_choice(self, experts: Tensor) -> Iterator[None]:
        """Force the recorded experts in a forward pass within the context.

        Args:
            experts: int [tokens, routers, top_k] in the order the model sees the tokens; -1: its own choice.

        Raises:
            ModelError: the record belongs to a model with other experts.
        """
        if tuple(experts.shape[1:]) != (self.layers, self.top_k):
            raise ModelError(
                f"the recorded routing has {experts.shape[1]} layers of {experts.shape[2]} experts per token, the "
                f"model {self.layers} of {self.top_k}: the journal is of another model, or the engine counts layers "
                "differently"
            )
        self._experts = experts
        try:
            yield
        finally:
            self._experts = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two contexts for `torch.utils.checkpoint`: a null context for the forward pass, and one that
        forces the same experts for recomputation."""
        return nullcontext(), nullcontext() if self._experts is None else self.force_choice(self._experts)


class _ForcedTopK(TorchFunctionMode):
    """A mode in which a top-k over the last dimension takes given indices instead of the largest."""

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self._experts = experts
        self.calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keyword_arguments: Mapping[str, Any] = kwargs or {}
        result = function(*args, **keyword_arguments)
        if function not in _TOP_K:
            return result
        self.calls += 1
        scores: Tensor = args[0] if args else keyword_arguments["input"]
        experts = torch.where(self._experts >= 0, self._experts, result[1])
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def _unknown(name: str, model: PreTrainedModel, problem: str) -> ModelError:
    return ModelError(
        f"engine.capture_routing: the router {name} of {type(model).__name__} does not select its experts by one top-k "
        f"({problem}), so a recorded selection cannot be replayed in training. Set capture_routing = false; importance "
        "ratios then include the difference in routing"
    )
