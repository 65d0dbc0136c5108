"""Recurrent layers over the prefix tree of a micro-batch: each node starts from its parent's state.

Attention needs only to know which tokens a token sees; a recurrent layer (Gated DeltaNet, Mamba 2) mixes tokens in
their order, so its tokens are computed node by node. transformers' layers can continue from a state in a cache. Here
the cache holds differentiable tensors, so the gradient of a state at a branch is the sum of those of its children, as
that of any other shared activation.

Inner nodes run one after another, because each needs its parent's state; nodes without children are padded on the right
and run in blocks of similar length. All other layers compute the tree as one sequence (`forward.py`).

A layer may compute a single token by a kernel for sampling, which changes the state in place. So an inner node of one
token is computed as the first token of each child, and a block has at least two tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.learn.device_copies import device_tensors
from agentrl.learn.packing import padded_together, tree_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentrl.learn.packing import Int64Array, MicroBatch


@dataclass(slots=True)
class _Segment:
    """Consecutive tokens of one path that a layer computes together."""

    tokens: Int64Array
    parent: int
    """The inner segment whose state comes before, -1: none."""


@dataclass(slots=True)
class _Block:
    """Segments computed at once."""

    tokens: Tensor  # [B, L], indices of the packed tokens; padding repeats a segment's last token
    parents: list[int]
    """The inner segment before each row; empty if they begin their rows."""


class RecurrencePlan:
    """The order in which recurrent layers compute the tokens of a micro-batch."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        inner, leaves = _segments(batch)
        blocks: list[list[_Segment]] = [[segment] for segment in inner]
        for segment in sorted(leaves, key=lambda leaf: (leaf.parent < 0, -len(leaf.tokens))):
            longest = blocks[-1][0] if len(blocks) > len(inner) else None
            if (
                longest is not None
                and (segment.parent < 0) == (longest.parent < 0)
                and padded_together(len(longest.tokens), len(segment.tokens))
            ):
                blocks[-1].append(segment)
            else:
                blocks.append([segment])
        place, num_computed = np.zeros(len(batch.token_ids), np.int64), 0
        arrays: dict[str, Int64Array] = {}
        for number, segments in enumerate(blocks):
            width = max(len(segments[0].tokens), 2)
            for row, segment in enumerate(segments):
                place[segment.tokens] = num_computed + row * width + np.arange(len(segment.tokens))
            num_computed += width * len(segments)
            padded = [np.pad(segment.tokens, (0, width - len(segment.tokens)), mode="edge") for segment in segments]
            arrays[str(number)] = np.stack(padded)
        on_device = device_tensors(arrays | {"place": place}, device)
        self.place: Tensor = on_device["place"]
        """Where each packed token's output lies in those of all blocks."""
        self.num_inner = len(inner)
        """Number of blocks, the first ones, whose states others start from."""
        self.blocks = [
            _Block(on_device[str(number)], self.starts_from(segments)) for number, segments in enumerate(blocks)
        ]

    def starts_from(self, segments: Sequence[_Segment]) -> list[int]:
        """Return the segments before those of a block; none if they begin their rows."""
        return [segment.parent for segment in segments if segment.parent >= 0]


def _segments(batch: MicroBatch) -> tuple[list[_Segment], list[_Segment]]:
    """Return the segments that others start from, each after its parent, and those without children."""
    nodes = tree_nodes(batch)
    num_children = Counter(node.parent for node in nodes)
    inner: list[_Segment] = []
    leaves: list[_Segment] = []
    last: list[tuple[Int64Array, int]] = []
    """For each node, the tokens that its children compute first, and the segment that they start from."""
    for number, node in enumerate(nodes):
        first, parent = last[node.parent] if node.parent >= 0 else (np.zeros(0, np.int64), -1)
        tokens = np.concatenate([first, np.arange(node.start, node.stop)])
        if not num_children[number]:
            leaves.append(_Segment(tokens, parent))
        elif len(tokens) > 1:
            inner.append(_Segment(tokens, parent))
            tokens, parent = tokens[:0], len(inner) - 1
        last.append((tokens, parent))
    return inner, leaves


class _NodeCache:
    """The states of one layer before and after a block, as the cache that transformers' layers read and write."""

    record_past = True
    """Keeps layers from changing the convolution's window in place."""

    def __init__(self, layer_index: int, before: list[_NodeCache]) -> None:
        self._layer_index = layer_index
        self._has_states = bool(before)
        self.conv_states: dict[int, Tensor] = _join([each.conv_states for each in before])
        self.recurrent_states: dict[int, Tensor] = _join([each.recurrent_states for each in before])

    @property
    def layers(self) -> dict[int, _NodeCache]:
        """The layers of the cache: the one that computes."""
        return {self._layer_index: self}

    def has_previous_state(self, *unused: object, **also_unused: object) -> bool:
        """Whether the block continues from states."""
        return self._has_states

    def update_conv_state(
        self,
        inputs: Tensor,
        layer_index: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **unused: object,
    ) -> Tensor:
        """Append a convolution's inputs `[B, channels, t]`; returns them behind those of the tokens before."""
        before = self.conv_states.get(state_idx)
        whole = inputs if before is None else torch.cat([before, inputs], dim=-1)
        size = conv_kernel_size or whole.shape[-1]
        self.conv_states[state_idx] = F.pad(whole, (max(0, size - whole.shape[-1]), 0))[..., -size:]
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **unused: object) -> Tensor:
        """Set the state after the block."""
        self.recurrent_states[state_idx] = state
        return state


def _join(states: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    return {number: torch.cat([each[number] for each in states]) for number in states[0]} if states else {}


def follow_trees(model: nn.Module) -> int:
    """Make a model's recurrent layers compute a prefix tree where they are called with one; returns their number.
    Idempotent.
    """
    takes_cache = {
        kind: "cache_params" in signature(kind.forward).parameters
        for kind in {type(module) for module in model.modules()}
    }
    num_layers = 0
    for module in model.modules():
        others = (other for other in module.modules() if other is not module)
        if takes_cache[type(module)] and not any(takes_cache[type(other)] for other in others):
            if not hasattr(module.forward, "follows_trees"):
                module.forward = _over_tree(module.forward, int(module.layer_idx))  # type: ignore[arg-type]
            num_layers += 1
    return num_layers


def _over_tree(forward: Callable[..., Any], layer_index: int) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(hidden_states: Tensor, plan: RecurrencePlan, arguments: dict[str, Any]) -> Tensor:
        outputs: list[Tensor] = []
        caches: list[_NodeCache] = []
        for block in plan.blocks:
            cache = _NodeCache(layer_index, [caches[parent] for parent in block.parents])
            output = forward(hidden_states[0, block.tokens], **{**arguments, "cache_params": cache})
            outputs.append(output.flatten(0, 1))
            if len(caches) < plan.num_inner:
                caches.append(cache)
        return torch.cat(outputs)[plan.place].unsqueeze(0)

    def wrapper(hidden_states: Tensor, *, tree: Any = None, **arguments: Any) -> Any:
        if tree is None:
            return forward(hidden_states, **arguments)
        if tree.part is None:
            return compute(hidden_states, tree.recurrence, arguments)
        return compute(tree.part.to_all(hidden_states), tree.recurrence, arguments)[:, tree.part.tokens]

    wrapper.follows_trees = True  # type: ignore[attr-defined]
    return wrapper
