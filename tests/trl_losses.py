"""Prints the losses and gradients of TRL's GRPOTrainer for given log-probabilities; runs in an environment with TRL.

    python tests/trl_losses.py MODEL < cases.json

The input has `rows` as in `losses_of_trl.json` and `configs`, keyword arguments of `GRPOConfig`. TRL's own constructor
reads each configuration, so that its defaults apply; only the model's forward pass is replaced.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def evaluated(model: str, config: dict[str, Any], rows: list[dict[str, Any]], output: str) -> dict[str, Any]:
    """The loss of a step whose log-probabilities are those of the rows, and its gradient token by token."""
    arguments = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=len(rows),
        num_generations=len(rows),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **config,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "2 + 2 ="}] * len(rows)),
    )
    trainer.current_gradient_accumulation_steps = 1
    lengths = torch.tensor([len(row["logprobs"]) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()

    def padded(name: str) -> torch.Tensor:
        values = torch.zeros(mask.shape, dtype=torch.float64)
        values[mask.bool()] = torch.tensor([value for row in rows for value in row[name]], dtype=torch.float64)
        return values

    logprobs = padded("logprobs").requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        "old_per_token_logps": padded("behavior"),
        "num_items_in_batch": mask.sum(),
    }
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    [gradient] = torch.autograd.grad(loss, logprobs)
    return {"loss": float(loss), "gradient": gradient[mask.bool()].tolist()}


def main() -> None:
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as output:
        found = [evaluated(sys.argv[1], config, asked["rows"], output) for config in asked["configs"]]
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
