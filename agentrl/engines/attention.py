"""Grouped-query attention on CPU without copies of the keys and values.

transformers repeats keys and values for each query head as soon as there is a mask; torch's CPU kernel does not need
that. Registered as an attention implementation of transformers, used for models that would use `sdpa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_NAME = "agentrl_grouped"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model on CPU attend without repeating keys and values; models with attention of their own keep it."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _grouped_attention)
        model.set_attn_implementation(_NAME)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Queries `[B, heads, t, dim]` over keys and values `[B, kv_heads, T, dim]`, as `sdpa` computes it."""
    if attention_mask is None or unused.get("position_bias") is not None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **unused
        )
        return attended
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
