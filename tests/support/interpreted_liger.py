"""liger-kernel's functions on a CPU: its Triton kernels run in Triton's own interpreter.

    python -m tests.support.interpreted_liger

Fuses small models of several families in float32 and prints, as JSON, the classes that were fused, those that were
refused, and `fused_max_error`: the largest difference from the unfused models in log-probabilities and in gradients,
relative to the largest of each. Slow, and exact; what it cannot show is compiled kernels.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

FAMILIES = ("Qwen3", "Llama", "Mistral", "Qwen2", "SmolLM3", "Phi3", "Gemma", "Gemma2")


def interpret_liger() -> None:
    """Let liger-kernel run on a machine without a GPU; call it before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, interpreter

    class Absent:
        """The driver of a card that only has to have a name."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Absent())
    convert: Any = interpreter._implicit_cvt

    def convert_floats(value: Any) -> Any:
        """Compiled kernels receive a float as a scalar of float32, the interpreter's as Python's."""
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = convert_floats
    cuda: Any = torch.cuda
    cuda.device = lambda *_: contextlib.nullcontext()
    from liger_kernel.ops import rms_norm

    rms_norm.rsqrt = lambda value: 1.0 / tl.sqrt(value)  # the interpreter has no functions of CUDA's library


def fused_error(family: str) -> tuple[float, dict[str, int], dict[str, str]]:
    """Return the largest error of a small model of a family, the fused classes and the refused ones."""
    import torch
    import transformers

    from agentrl.learn.fused import find_kernels, fuse_layers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(48, (2, 12))

    def values() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        logprobs[:, :-1].gather(2, ids[:, 1:, None]).mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return logprobs.detach(), gradient

    expected = values()
    kernels = find_kernels()
    assert not isinstance(kernels, str), kernels
    layers = fuse_layers(model, kernels)
    differences = [
        float((one - other).abs().max() / one.abs().max()) for one, other in zip(expected, values(), strict=True)
    ]
    return max(differences), dict(layers.fused), layers.refused


def main() -> None:
    """Compare the families named on the command line, or all."""
    interpret_liger()
    warnings.simplefilter("ignore")
    results = {family: fused_error(family) for family in sys.argv[1:] or FAMILIES}
    figures = {
        "fused_max_error": max(error for error, _, _ in results.values()),
        "fused": {family: fused for family, (_, fused, _) in results.items()},
        "refused": {family: refused for family, (_, _, refused) in results.items()},
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
