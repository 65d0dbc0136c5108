"""Steps of a policy on some ranks, sharded or not, and what they leave: gradients, figures, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from agentrl.config.policies import AnyPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import CreditConfig, OptimizerConfig
from agentrl.core.custom_functions import loss
from agentrl.core.files import read_bytes
from agentrl.core.records import PolicyVersion, TrainBatch, Trajectory, Unit
from agentrl.core.tokens import ExpertRouting, TrajectoryRow
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.ranks import (
    DistributedRankGroup,
    RankGroup,
    SingleRankGroup,
    gather_tensors_sequentially,
    local_shard,
)
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config

FUNCTION = "tests.sharding_cases:on_rank"
EPISODES = {"policy": 11, "other": 1}
"""Units of a step: of `other`, all but one of several ranks have none."""


@loss
def spread(batch: LossBatch) -> Tensor:
    """A loss whose derivative for one token depends on the log-probability of every other in the step."""
    return -batch.advantages * batch.logprobs * (1.0 + batch.logprobs.mean())


@loss(divergence=True)
def concentrated(batch: LossBatch) -> Tensor:
    """A loss whose derivative by one token's divergence depends on the divergence of every other in the step."""
    assert batch.reference_kl is not None
    return batch.reference_kl * (1.0 + batch.reference_kl.mean())


def case(
    model: Path,
    directory: Path,
    *,
    lora: bool = False,
    policies: Sequence[str] = ("policy",),
    sharding: str = "full",
    reference: Path | str = "",
    steps: int = 1,
    first: int = 1,
    resume_from: str | None = None,
    credit: Mapping[str, Any] | None = None,
    silent: Sequence[int] = (),
    unused: str = "",
    routed: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    """The arguments of `run_case`, as JSON can hold them; all advantages of the `silent` steps are 0, in the second
    step no token uses the weights that are named `unused`, and with `routed` the rows name the experts of their
    tokens."""
    return {
        "model": str(model),
        "directory": str(directory),
        "lora": lora,
        "reference": str(reference),
        "policies": list(policies),
        "steps": [first, first + steps],
        "resume_from": resume_from,
        "credit": credit or {},
        "silent": list(silent),
        "unused": unused,
        "routed": routed,
        "trainer": {"sharding": sharding, "micro_batch_tokens": 40, **trainer},
    }


def on_rank(ranks: DistributedRankGroup, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of `run_case` for several cases, one after the other."""
    return [run_case(ranks, each) for each in cases]


def alone(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same in this process."""
    return [run_case(SingleRankGroup(), each) for each in cases]


def run_case(ranks: RankGroup, case: Mapping[str, Any]) -> dict[str, Any]:
    """Take the steps of a case, each policy in turn; rank 0 leaves `gradients.safetensors` of the last one.

    Returns:
        `losses` and `norms` of the steps, how far each `moved` the weights, their metric `zero_gradients`, the
        `bytes` that this rank holds of weights, gradients and optimizer states, `checkpoint`, the bytes `read` of the
        one it resumed from, and the `versions` by policy.
    """
    directory = Path(case["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    config, episodes = _config_of(case, ranks.size), _episodes_of(case)

    def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        return [(episodes[unit.policy].trajectories[int(unit.episode_id[1:])],) for unit in units]

    counts: list[int] = []

    def read_file(path: Path, start: int, count: int) -> bytes:
        data = read_bytes(path, start, count)
        counts.append(len(data))
        return data

    trainer = PolicyTrainer(config.trainer_plan, directory, ranks=ranks, read=read, read_file=read_file)
    return _run(trainer, case, episodes) | {"read": sum(counts)}


def _run(trainer: PolicyTrainer, case: Mapping[str, Any], episodes: Mapping[str, Episodes]) -> dict[str, Any]:
    ranks, directory, policies = trainer._ranks, Path(case["directory"]), case["policies"]
    started = trainer.start(None if case["resume_from"] is None else Path(case["resume_from"]))
    gradients: dict[str, Tensor] = {}
    for name in policies:
        _capture(trainer._learner(name), gradients)
    losses, norms, moved, zero_gradients = [], [], [], []
    for step in range(*case["steps"]):
        for name in policies:
            batch = _batch_of(case, episodes[name], step)
            # In two calls, as units come in, unless the loss sees a whole step.
            for units in (batch.units,) if "loss" in case["trainer"] else (batch.units[:3], batch.units):
                trainer.forward_backward(replace(batch, units=units))
        for name in policies:
            before = _weights(trainer._learner(name))
            if step == 2 and case["unused"]:
                _remove_gradients(trainer._learner(name), case["unused"])
            report = trainer.optim_step(name, step)
            after = _weights(trainer._learner(name))
            losses.append(report.loss)
            norms.append(report.grad_norm)
            moved.append(float(sum((after[key] - each).norm() ** 2 for key, each in before.items()) ** 0.5))
            zero_gradients.append(report.metrics["zero_gradient"])
    if ranks.rank == 0:
        save_file(gradients, directory / "gradients.safetensors")
    versions = {}
    for name in policies:
        versions[name] = trainer.publish(name, PolicyVersion(name, 0, case["steps"][1] - 1)).path
    trainer.save(directory / "checkpoint")
    return {
        "started": started,
        "losses": losses,
        "norms": norms,
        "moved": moved,
        "zero_gradients": zero_gradients,
        "bytes": _held_bytes(trainer, list(policies)),
        "checkpoint": str(directory / "checkpoint"),
        "versions": versions,
    }


def _config_of(case: Mapping[str, Any], ranks: int) -> RunConfig:
    lora = LORA if case["lora"] else None
    settings: dict[str, Any] = {"lora": lora, "reference": case["reference"]}
    policies: dict[str, AnyPolicy] = {name: PolicyConfig(learning_rate=1e-2, **settings) for name in case["policies"]}
    # Nothing is clipped, so that what is written is the gradient.
    section = {"optimizer": OptimizerConfig(max_grad_norm=1e9), "ranks": ranks, **case["trainer"]}
    config = run_config(Path(case["model"]), policies=policies, **section)
    engine = config.engine.model_copy(update={"capture_routing": case["routed"]})
    return config.model_copy(update={"credit": CreditConfig(**case["credit"]), "engine": engine})


def _episodes_of(case: Mapping[str, Any]) -> dict[str, Episodes]:
    episodes = {}
    for at, name in enumerate(case["policies"]):
        rows = make_rows(at, EPISODES[name])
        if case["routed"]:
            shape = AutoConfig.from_pretrained(case["model"])
            rows = [_routed(row, shape) for row in rows]
        episodes[name] = Episodes(rows, policy=name, seed=at)
    return episodes


def _routed(row: TrajectoryRow, shape: Any) -> TrajectoryRow:
    """Name experts that follow from a token and those before it, so that equal prefixes stay equal."""
    positions, layers = len(row.token_ids) - 1, shape.num_hidden_layers
    experts = np.empty((positions, layers, shape.num_experts_per_tok), np.int16)
    for at in range(positions):
        drawn = np.random.default_rng(row.token_ids[: at + 1].astype(np.uint32))
        for layer in range(layers):
            experts[at, layer] = drawn.permutation(shape.num_experts)[: shape.num_experts_per_tok]
    return row.with_column("experts", ExpertRouting(experts))


def _batch_of(case: Mapping[str, Any], episodes: Episodes, step: int) -> TrainBatch:
    batch = episodes.batch(step)
    if step in case["silent"]:
        return replace(batch, units=tuple(map(_without_advantage, batch.units)))
    return batch


def _without_advantage(unit: Unit) -> Unit:
    return replace(unit, credits=tuple(replace(credit, advantage=0.0) for credit in unit.credits))


def _remove_gradients(learner: Any, ending: str) -> None:
    for name, parameter in learner.model.parameters.items():
        if name.endswith(ending):
            parameter.grad = None


def _weights(learner: Any) -> dict[str, Tensor]:
    """Copies of the trained weights in float64, whole on every rank."""
    whole = gather_tensors_sequentially(learner.model.parameters)
    return {name: parameter.detach().double().clone() for name, parameter in whole}


def _capture(learner: Any, gradients: dict[str, Tensor]) -> None:
    """Keep the gradients of the last step of a learner, summed over ranks; its own stay until the next."""
    apply = learner.apply

    def captured(rate: float, grad_norm: float) -> None:
        parameters = learner.model.parameters
        own = {f"{learner.name}/{name}": parameter.grad for name, parameter in parameters.items()}
        gradients.update({name: gradient.clone() for name, gradient in gather_tensors_sequentially(own)})
        apply(rate, grad_norm)

    learner.apply = captured


def _held_bytes(trainer: PolicyTrainer, policies: Sequence[str]) -> int:
    """Bytes of weights and optimizer states, and of a gradient for each trained parameter."""
    held: dict[int, int] = {}
    for learner in (trainer._learner(name) for name in policies):
        trained = list(learner.model.parameters.values())
        states = [each for state in learner.optimizer.state.values() for each in state.values()]
        for tensor in (*learner.model.model.parameters(), *trained, *states):
            held[id(tensor)] = local_shard(tensor).nbytes
        held[id(learner)] = sum(local_shard(parameter).nbytes for parameter in trained)
    return sum(held.values())


def gradient_error(found: Path, expected: Path) -> float:
    """The norm of the difference over that of the gradient, the worst policy's."""
    mine, other = (load_file(path / "gradients.safetensors") for path in (found, expected))
    assert mine.keys() == other.keys()
    worst = 0.0
    for policy in {name.split("/")[0] for name in mine}:
        names = [name for name in mine if name.startswith(f"{policy}/")]
        off, whole = (
            torch.cat([tensors[name].double().flatten() for name in names])
            for tensors in ({name: mine[name] - other[name] for name in names}, other)
        )
        worst = max(worst, float(off.norm() / whole.norm()))
    return worst
