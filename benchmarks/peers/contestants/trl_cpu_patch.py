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
    ends, outputs, shared = (query_ends.tolist(), key_ends.tolist()), [], query.shape[1] // key.shape[1]
    for start, stop, key_start, key_stop in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        q = query[start:stop].transpose(0, 1)
        k, v = (x[key_start:key_stop].transpose(0, 1).repeat_interleave(shared, 0) for x in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outputs.append(scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale)[0])
    return torch.cat([output.transpose(0, 1) for output in outputs])


def apply():
    """Patch TRL in this process."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
