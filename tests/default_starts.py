"""Starts of runs that set no size: the sizes are predicted, and two steps are trained by the run's own trainer."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.app.memory_estimate import with_chosen_token_limits
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig, ModelConfig
from agentrl.core.errors import InputError
from agentrl.learn.models import load_models
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import Episodes, make_rows, write_tokenizer
from tests.model_families import family_config

POSITIONS = 4096
"""Positions of a model, where its family leaves them open: the longest context that is predicted."""
CASES = [(adapter, dtype) for adapter in (True, False) for dtype in ("bfloat16", "float32")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What became of a start."""

    steps: int = 0
    refused: str = ""
    """The error that named what cannot be trained; empty: none."""
    failed: str = ""
    """Any other error that ended the start."""
    unpredicted: str = ""
    """The warning of a prediction that failed; empty: none did."""
    context: int = 0
    micro_batch: int = 0
    predicted_s: float = 0.0
    """CPU seconds in which the sizes were predicted."""
    loaded_s: float = 0.0
    """CPU seconds of the bare load."""


def write_model(name: str, directory: Path, **sizes: int) -> Path:
    """Save a random model of a family, with a tokenizer."""
    config = family_config(name, max_position_embeddings=POSITIONS, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def default_config(model: Path, *, adapter: bool, dtype: str, **sections: Any) -> RunConfig:
    """A configuration that sets no size."""
    return RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(model), dtype=dtype),
        policies={"policy": PolicyConfig(lora=LoraConfig(rank=2) if adapter else None, learning_rate=1e-3)},
        **sections,
    )


def start(config: RunConfig, directory: Path) -> Start:
    """Predict the sizes of a run as `agentrl train` does, start its trainer, and take two steps."""
    began = time.process_time()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            chosen = with_chosen_token_limits(config, {})
        except InputError as error:
            return Start(refused=str(error))
    predicted_s = time.process_time() - began
    unpredicted = next((str(each.message) for each in warned if "predict" in str(each.message)), "")
    episodes = Episodes(make_rows(0, 4, prefix=4, longest=8))
    trainer = PolicyTrainer(chosen.trainer_plan, directory, read=episodes.read)
    try:
        trainer.start()
    except InputError as error:
        return Start(refused=str(error), unpredicted=unpredicted, predicted_s=predicted_s)
    steps = 0
    for step in (1, 2):
        trainer.forward_backward(episodes.batch(step))
        steps += trainer.optim_step("policy", step).samples == 4
    began = time.process_time()
    load_models(chosen.trainer_plan, torch.device("cpu"))
    return Start(
        steps=steps,
        unpredicted=unpredicted,
        context=chosen.engine.max_context,
        micro_batch=chosen.trainer.micro_batch_tokens,
        predicted_s=predicted_s,
        loaded_s=time.process_time() - began,
    )
