"""The forward pass over a micro-batch's prefix tree, for any Hugging Face causal LM with pluggable attention.

All tokens go through the model as one sequence, [1, N]: norms, projections, experts see no padding, no token twice.
Only attention looks at rows: it gathers each row's queries and keys into padded blocks and scatters the result back.
Models whose layers mix tokens elsewhere (state-space layers, say) are found by `shares_prefixes`, and forwarded as
padded rows.

Owns: the attention function, both forward passes, the choice between them. Does not own: what is packed (`packing.py`),
the loss, how a router is made to follow the recorded experts (`routing_replay.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from agentrl.core.errors import ModelError
from agentrl.core.training_records import TrainingSample
from agentrl.engines.models import special_lengths
from agentrl.learn.logprobs import HeadOutput, KeptSets, logprobs_of
from agentrl.learn.packing import MicroBatch, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.learn.routing_replay import RoutingReplay

ATTENTION = "agentrl_tree"
"""The name under which `tree_attention` is registered; models are loaded with it."""

_TRIED = 11
"""Tokens at the end of each trial row whose log-probabilities are compared."""

SHARING_TOLERANCE = 2e-3
"""Largest difference of log-probabilities between the model's own forward pass and ours, in nats."""


class _Block(NamedTuple):
    """An `AttentionBlock` on the device."""

    queries: Tensor  # int64 [B, Q]
    keys: Tensor  # int64 [B, K]
    distance: Tensor  # int64 [B, 1, Q, K], position of the query minus position of the key


class Tree(NamedTuple):
    """What attention needs to know about a micro-batch."""

    blocks: tuple[_Block, ...]
    restore: Tensor
    """int64 [N]: where each token's output lies in the concatenation of the blocks' padded outputs."""


def _tree(batch: MicroBatch, device: torch.device) -> Tree:
    restore = np.empty(len(batch.token_ids), np.int64)
    blocks, offset = [], 0
    for block in batch.blocks:
        rows, width = block.queries.shape
        valid = np.arange(width) < block.counts[:, None]
        restore[block.queries[valid]] = offset + np.flatnonzero(valid)
        offset += rows * width
        query_position = block.first[:, None] + np.arange(width)
        distance = query_position[:, None, :, None] - np.arange(block.keys.shape[1])
        tensors = (torch.from_numpy(array).to(device) for array in (block.queries, block.keys, distance))
        blocks.append(_Block(*tensors))
    return Tree(tuple(blocks), torch.from_numpy(restore).to(device))


def tree_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention along the paths of a prefix tree; registered with transformers, which fixes this signature.

    Args:
        module: the attention layer.
        query: [1, heads, N, D].
        key: [1, key heads, N, D].
        value: [1, key heads, N, D].
        attention_mask: not looked at: the tree says what is visible.
        dropout: probability.
        scaling: factor on the scores; None: 1 / sqrt(D).
        sliding_window: how many tokens back a token sees; None: all.
        tree: of the micro-batch, handed through the model's keyword arguments.
        other: what else the model hands to attention.

    Raises:
        ModelError: the model asks attention for something else than a causal softmax.
    """
    strange = [name for name in ("s_aux", "softcap", "position_bias") if other.get(name) is not None]
    if tree is None or strange:
        raise ModelError(f"{type(module).__name__} needs attention with {', '.join(strange) or 'other arguments'}")
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[3]
    flat_query = query[0].transpose(0, 1).reshape(-1, heads * width)
    flat_key_value = torch.cat([key[0], value[0]]).transpose(0, 1).reshape(-1, (key_heads * 2) * width)
    outputs = []
    for block in tree.blocks:
        # F.embedding rather than indexing: its backward pass adds whole rows instead of single elements.
        q = F.embedding(block.queries, flat_query).view(*block.queries.shape, heads, width).transpose(1, 2)
        both = F.embedding(block.keys, flat_key_value).view(*block.keys.shape, 2, key_heads, width)
        k, v = both.transpose(1, 3).unbind(2)
        if heads != key_heads:
            k, v = (part.repeat_interleave(heads // key_heads, dim=1) for part in (k, v))
        allowed = block.distance >= 0
        if sliding_window is not None:
            allowed = allowed & (block.distance < sliding_window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scaling)
        outputs.append(out.transpose(1, 2).reshape(-1, heads * width))
    restored = F.embedding(tree.restore, torch.cat(outputs))
    return restored.view(1, -1, heads, width), None


AttentionInterface.register(ATTENTION, tree_attention)


def _device_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its output projection."""
    decoder: nn.Module = model.get_decoder()
    return decoder


def _replayed(
    replay: RoutingReplay | None, batch: MicroBatch, tokens: NDArray[np.int64] | None, device: torch.device
) -> AbstractContextManager[None]:
    """Replay of the routing recorded for `tokens`, in the order the model sees them; None: all of the batch."""
    if replay is None or batch.expert_routing is None:
        return nullcontext()
    experts = batch.expert_routing if tokens is None else batch.expert_routing[tokens.reshape(-1)]
    return replay.forced(_device_tensor(experts, device).long())


def _tree_hidden(
    model: PreTrainedModel, batch: MicroBatch, device: torch.device, replay: RoutingReplay | None
) -> Tensor:
    """Hidden states [N, H] of the packed tokens."""
    with _replayed(replay, batch, None, device):
        output = _decoder(model)(
            input_ids=_device_tensor(batch.token_ids, device).unsqueeze(0),
            position_ids=_device_tensor(batch.position_ids, device).unsqueeze(0),
            use_cache=False,
            tree=_tree(batch, device),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden[0]


def _padded_hidden(
    model: PreTrainedModel, batch: MicroBatch, device: torch.device, replay: RoutingReplay | None
) -> Tensor:
    """The same hidden states from whole rows, padded on the right; the batch was packed without sharing."""
    hidden: list[Tensor] = []
    order: list[NDArray[np.int64]] = []
    for block in batch.blocks:
        valid = np.arange(block.queries.shape[1]) < block.counts[:, None]
        with _replayed(replay, batch, block.queries, device):
            output = _decoder(model)(
                input_ids=_device_tensor(batch.token_ids[block.queries], device),
                attention_mask=_device_tensor(valid, device).long(),
                use_cache=False,
            )
        hidden.append(output.last_hidden_state[_device_tensor(valid, device)])
        order.append(block.queries[valid])
    back = np.argsort(np.concatenate(order))
    return torch.cat(hidden)[_device_tensor(back, device)]


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    shared: bool = True,
    entropy_gradient: bool = False,
    replay: RoutingReplay | None = None,
) -> HeadOutput:
    """Log-probability, entropy and kept mass of a micro-batch's trained tokens, [n] each, differentiable.

    Args:
        model: a causal LM; its active adapter counts.
        batch: packed with `share=shared`.
        shared: whether the model is forwarded over the prefix tree, or over padded rows.
        entropy_gradient: whether the entropy is differentiable.
        replay: of the model's routers; the batch's recorded experts are used where there is one.

    Raises:
        ModelError: the recorded experts are of another model.
    """
    device = model.device
    hidden = (_tree_hidden if shared else _padded_hidden)(model, batch, device, replay)
    kept = None
    if batch.kept_counts is not None and batch.kept_ids is not None:
        kept = KeptSets(_device_tensor(batch.kept_counts, device), _device_tensor(batch.kept_ids, device))
    head: nn.Module | None = model.get_output_embeddings()
    assert head is not None
    return logprobs_of(
        F.embedding(_device_tensor(batch.hidden_index, device), hidden),
        head,
        _device_tensor(batch.targets, device),
        temperature=_device_tensor(batch.temperature, device),
        kept=kept,
        entropy_gradient=entropy_gradient,
    )


def shares_prefixes(model: PreTrainedModel, max_context: int) -> bool:
    """Whether the prefix tree reproduces the model's own log-probabilities; if not, padded rows do.

    Short rows are packed together with one on each side of every length below `max_context` that the model's
    configuration names (`special_lengths`): windows and chunks are invisible in shorter ones. That costs what a
    few rows of such a length cost in a step. The model is left with the attention that goes with the answer.

    Raises:
        ModelError: neither does: logits are not a plain projection of the last hidden state, say.
    """
    own = "sdpa" if model._supports_sdpa else "eager"
    special = special_lengths(model.config, max_context)
    around = [row for length in special for row in (length - 1, min(length + 5, max_context))]
    rows = _trial_rows(model, [12, 12, 12, *around])
    differences: dict[bool, float] = {}
    with torch.no_grad():
        model.set_attn_implementation(own)
        expected = [_own_logprobs(model, row) for row in rows]
        for shared in (True, False):
            (batch,) = pack(rows, max_tokens=1 << 30, share=shared)
            model.set_attn_implementation(ATTENTION if shared else own)
            try:
                found = token_logprobs(model, batch, shared=shared).logprob
            except (ModelError, TypeError, KeyError, AttributeError, RuntimeError) as error:
                if shared:
                    continue
                raise ModelError(f"{type(model).__name__} cannot be forwarded by the trainer: {error!r}") from error
            wanted = [expected[row][at] for row, at in zip(batch.sample.tolist(), batch.position.tolist(), strict=True)]
            differences[shared] = float((found - torch.tensor(wanted, device=found.device)).abs().max())
            if differences[shared] <= SHARING_TOLERANCE:
                return shared
    raise ModelError(
        f"{type(model).__name__}: log-probabilities recomputed from hidden states, rows of "
        f"{', '.join(map(str, sorted({len(row.token_ids) for row in rows})))} tokens together, differ from the model's "
        f"own by {min(differences.values()):.2g} (allowed: {SHARING_TOLERANCE}), so it cannot be trained; models that "
        "change their logits after the output projection never can"
        + (f", for others set engine.max_context to at most {special[0]}" if special else "")
    )


def _trial_rows(model: PreTrainedModel, lengths: list[int]) -> list[TrainingSample]:
    """Random rows, every other one of which begins like the first; the last tokens of each are trained."""
    draws = np.random.default_rng(0).integers(
        0, model.config.get_text_config().vocab_size, (len(lengths), max(lengths))
    )
    draws[1::2, :7] = draws[0, :7]
    rows = []
    for drawn, length in zip(draws.astype(np.int32), lengths, strict=True):
        nothing = np.zeros(length, np.float32)
        mask = np.arange(length) >= max(1, length - _TRIED)
        rows.append(
            TrainingSample(token_ids=drawn[:length], loss_mask=mask, behavior_logprobs=nothing, advantages=nothing)
        )
    return rows


def _own_logprobs(model: PreTrainedModel, row: TrainingSample) -> dict[int, float]:
    """The model's own log-probabilities of a row's trained tokens, by position: the row alone, its own attention."""
    ids = _device_tensor(row.token_ids.astype(np.int64), model.device)
    few = {"logits_to_keep": _TRIED + 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    logits = model(input_ids=ids[None], use_cache=False, **few).logits[0, -_TRIED - 1 : -1].float().log_softmax(-1)
    targets = ids[-len(logits) :]
    logprobs = logits.gather(1, targets[:, None])[:, 0].tolist()
    return dict(zip(range(len(ids) - len(logits), len(ids)), logprobs, strict=True))
