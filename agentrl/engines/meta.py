"""Runs models on the meta device: their tensors have shapes and no data, so memory can be counted without weights.

Importing it gives all attention over tensors of the meta device the shapes and memory that it has on the CPU.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel


@contextmanager
def runnable_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Make a model on the meta device callable within the context, with the memory that it needs on the CPU.

    A number read from a tensor is 0. Other models are unchanged.
    """
    if model.device.type != "meta":
        yield
        return
    with _Shapes():
        yield


class _Shapes(TorchDispatchMode):
    """Makes the result of an operation from its shape, which is computed once for all arguments of the same shapes.

    For most operations torch computes it in Python, in ten times as long as it takes to look it up. A model that loops
    over its tokens repeats a few operations thousands of times.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[tuple[object, ...], tuple[Sequence[int], Sequence[int], torch.dtype] | None] = {}
        """Shape, strides and dtype of a result, keyed by operation and arguments; None: it is not a single new
        tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        keywords = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:  # rotary embeddings compare the largest position
            return 0
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            first, second, *others = args  # without data torch multiplies groups in bfloat16 alone
            product: Tensor = func(first.bfloat16(), second.bfloat16(), *others, **keywords)
            return product.to(first.dtype)
        key = (func, *_described(args), *_described(keywords.items()))
        if key not in self._results:
            result = func(*args, **keywords)
            self._results[key] = _shape_if_new(result, [*args, *keywords.values()])
            return result
        if (found := self._results[key]) is None:
            return func(*args, **keywords)
        shape, strides, dtype = found
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _described(arguments: Iterable[Any]) -> Iterator[object]:
    for value in arguments:
        if isinstance(value, Tensor):
            yield value.device.type, value.shape, value.stride(), value.dtype
        elif isinstance(value, list | tuple):
            yield tuple(_described(value))
        else:
            yield type(value), value  # 1, 1.0 and True are equal, but give results of different types


def _shape_if_new(result: Any, arguments: list[Any]) -> tuple[Sequence[int], Sequence[int], torch.dtype] | None:
    """Return shape, strides and dtype of a single tensor that shares no memory with an argument."""
    if not isinstance(result, Tensor) or not result.is_meta:
        return None
    storages = {each.untyped_storage()._cdata for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    if result.untyped_storage()._cdata in storages:
        return None
    return result.shape, result.stride(), result.dtype


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as on the CPU, where torch keeps no scores if keys and values are equally wide."""
    output: Tensor
    if query.shape[-1] != value.shape[-1]:
        output, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype), -math.inf)
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output


_ON_META = torch.library.Library("aten", "IMPL")
"""Keeps the registrations; a mode would not do, because it is off while layers are recomputed."""
_ON_META.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
