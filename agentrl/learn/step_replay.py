"""An optimizer step computed again from its start weights by the run's own trainer: its loss and gradient norm.

Nothing is applied and nothing is written. On the machine that trained, with one rank, every bit is the same; several
ranks add the same numbers in another order. Does not own: what the step was fed, where its start weights lie (`app`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from agentrl.config.run import RunConfig
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.training_records import TrainBatch
from agentrl.learn import checkpoint
from agentrl.learn.trainer import PolicyTrainer


class Computed(NamedTuple):
    """What a step came to."""

    loss: float
    grad_norm: float
    """Of the gradient before it is clipped."""


def compute_step(
    config: RunConfig,
    run_directory: Path,
    batch: TrainBatch,
    started_from: PolicyVersion,
    weights: WeightsRef | Path | None,
) -> Computed:
    """Compute a step of a run.

    Args:
        config: of the run.
        run_directory: where its journal lies.
        batch: what the step was fed.
        started_from: the version it started from.
        weights: those of that version: published, or a policy's folder in a checkpoint; None: those a run begins with.

    Raises:
        ModelError: the model cannot be loaded, or the weights are not kept bit for bit.
        EngineError, TrainerError: the files of the weights are damaged, or of another configuration.
        JournalError: what the step was fed cannot be read.
    """
    trainer = PolicyTrainer(config, run_directory, publishes=False)
    trainer.start()
    model = trainer.stand_at(started_from)
    if isinstance(weights, WeightsRef):
        model.load_published(weights)
    elif weights is not None:
        checkpoint.load(weights, model.parameters, None)
    trainer.forward_backward(batch)
    return Computed(*trainer.measure(batch.policy))
