"""The smallest patch with which TRL 1.16's asynchronous trainer starts on a CPU.

As shipped it needs `kernels-community/flash-attn3`, which has no build for CPUs, and asks torch.cuda for the peak FLOPS
of the device. The patch computes the same packed attention with torch's own kernel, and leaves the share of the peak
out.
"""

import types

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def flash_attn_varlen_func(query, key, value, query_ends, key_ends, *_, softmax_scale=None, **__):
    """Causal attention of packed segments; a segment's queries are the last of its keys.

    Shapes: query (tokens, heads, width), key and value (tokens, key-value heads, width), ends (segments + 1).
    """
    asked, known = query_ends.diff().tolist(), key_ends.diff().tolist()
    segments = zip(query.split(asked), key.split(known), value.split(known), strict=True)
    outputs = []
    for q, k, v in segments:  # (tokens, heads, width)
        whole = len(q) == len(k)
        mask = None if whole else torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        options = {"attn_mask": mask, "is_causal": whole, "scale": softmax_scale, "enable_gqa": True}
        outputs.append(scaled_dot_product_attention(q, k, v, **options)[0].transpose(0, 1))
    return torch.cat(outputs)


def apply():
    """Patch TRL in this process."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
