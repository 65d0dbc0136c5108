"""Steps of a trainer with and without compiled layers, as one line of JSON.

    python -m tests.support.compiled_steps [lora] [experts] [recompute]

runs in a process of its own, because pytest makes errors of the warnings that torch hides while it compiles.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from torch._dynamo.utils import counters

from agentrl.config.policies import PolicyConfig
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model


def main(options: list[str]) -> None:
    """Take two steps over rows of many lengths, without and with compiled layers."""
    lora = LORA.model_copy(update={"experts": "experts" in options}) if "lora" in options else None
    policies = {"policy": PolicyConfig(learning_rate=1e-2, lora=lora)}
    rows, steps = make_rows(0, 12, longest=400), []
    with tempfile.TemporaryDirectory() as place:
        base = write_model(Path(place) / "model", kind="moe" if "experts" in options else "qwen3")
        for compiled in (False, True):
            recompute = "recompute" in options
            config = run_config(base, policies=policies, compile=compiled, recompute=recompute, micro_batch_tokens=900)
            episodes = Episodes(rows)
            trainer = PolicyTrainer(config.trainer_plan, Path(place) / str(compiled), read=episodes.read)
            trainer.start()
            for step in (1, 2):
                trainer.forward_backward(episodes.batch(step))
                report = trainer.optim_step("policy", step)
                figures = [report.loss, report.grad_norm, report.metrics["k3"], report.metrics["entropy"]]
                steps.append({"figures": figures, "graphs": counters["stats"]["unique_graphs"]})
    sys.stdout.write(json.dumps(steps) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
