"""A Tinker script: it samples, rewards and trains through the `tinker` SDK, against a server on this machine.

export TINKER_API_KEY=tml-$(openssl rand -hex 16)
agentrl-tinker server.toml --port 8000        (server.toml: docs/how-to/tinker.md)
TINKER_BASE_URL=http://127.0.0.1:8000 python 15_tinker_client.py [BASE_MODEL]

It needs `pip install tinker` in an environment of its own, and nothing of agentrl. The reward is the share of sampled
tokens with an even id, which a model learns in a few steps.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

STEPS, SAMPLES, TOKENS = 8, 16, 8
PROMPTS = [[10, 20, 30, 40], [11, 22, 33], [7, 8, 9, 10, 11]]


def reward(tokens: list[int]) -> float:
    """Return the share of tokens with an even id."""
    return float(np.mean([token % 2 == 0 for token in tokens]))


def main(base_model: str) -> None:
    """Train an adapter."""
    import tinker
    from tinker import types

    client: Any = tinker.ServiceClient().create_lora_training_client(base_model=base_model, rank=8)
    client = client.result() if hasattr(client, "result") else client  # SDKs of different age
    parameters = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
    for step in range(STEPS):
        sampler = client.save_weights_and_get_sampling_client().result()
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, parameters) for prompt in PROMPTS]
        data, rewards = [], []
        for prompt, future in zip(PROMPTS, futures, strict=True):
            sequences = future.result().sequences
            group = np.array([reward(sequence.tokens) for sequence in sequences])
            rewards.append(group.mean())
            for sequence, advantage in zip(sequences, group - group.mean(), strict=True):
                tokens, context = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
                inputs = {
                    "target_tokens": np.array(tokens[1:], np.int64),
                    "logprobs": np.array([*context, *sequence.logprobs], np.float32),
                    "advantages": np.array([*context, *[advantage] * len(sequence.tokens)], np.float32),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        gradient = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        gradient.result()
        print(f"step {step}: reward {np.mean(rewards):.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M")
