"""Steps of a policy on some ranks, sharded or not, and what they leave: gradients, figures, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from agentrl.config.policies import AnyPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import CreditConfig, OptimizerConfig
from agentrl.core.custom_functions import loss
from agentrl.core.files import read_bytes
from agentrl.core.records import PolicyVersion, TrainBatch, Trajectory, Unit
from agentrl.core.tokens import ExcludedTokens, ExpertRouting, KeptCount, KeptSets, TrajectoryRow
from agentrl.engines.experts import find_experts
from agentrl.learn import context, experts, forward
from agentrl.learn.exchange import exchange_rows
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
from tests.rank_costs import measured_costs
from tests.rank_processes import on_ranks

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
    expert_lora: bool = False,
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
    detailed: bool = False,
    measured: bool = False,
    rows: Mapping[str, int] | None = None,
    fault: str = "",
    **trainer: Any,
) -> dict[str, Any]:
    """The arguments of `run_case`, as JSON can hold them; all advantages of the `silent` steps are 0, in the second
    step no token uses the weights that are named `unused`, with `routed` the rows name the experts of their tokens,
    with `detailed` they have kept sets, an advantage for each turn and cut ends, a step can be `measured`, `rows` are
    arguments of `make_rows`, and a `fault` of `FAULTS` is planted."""
    return {
        "model": str(model),
        "directory": str(directory),
        "lora": lora,
        "expert_lora": expert_lora,
        "reference": str(reference),
        "policies": list(policies),
        "steps": [first, first + steps],
        "resume_from": resume_from,
        "credit": credit or {},
        "silent": list(silent),
        "unused": unused,
        "routed": routed,
        "detailed": detailed,
        "measured": measured,
        "rows": rows or {},
        "fault": fault,
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
        `tokens` of each pass of this rank, their `costs` (`measured_costs`), the share of the `experts` and the `bytes`
        that it holds of weights, gradients and optimizer states, `checkpoint`, the bytes `read`
        of the one it resumed from, and the `versions` by policy.
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

    with pytest.MonkeyPatch.context() as planted:
        if case["fault"]:
            planted.setattr(*FAULTS[case["fault"]])
        trainer = PolicyTrainer(config.trainer_plan, directory, ranks=ranks, read=read, read_file=read_file)
        return _run(trainer, case, episodes) | {"read": sum(counts)}


def _without_others(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Return what a rank sends itself, and zeros from the others."""
    rank = dist.get_rank(group)
    other = torch.ones(sum(received), dtype=torch.bool)
    start = sum(received[:rank])
    other[start : start + received[rank]] = False
    return exchange_rows(rows, sent, received, group).masked_fill(other.view(-1, *[1] * (rows.ndim - 1)), 0.0)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "outputs are not put back in order": (
        experts._DispatchedForward,
        "_in_token_order",
        lambda self, rows, order: rows,
    ),
    "gradients of copies are not added up": (
        experts._DispatchedForward,
        "_sum_over_copies",
        lambda self, gradient: gradient,
    ),
    "attention does not see the tokens of other ranks": (context, "exchange_rows", _without_others),
    "recorded experts are ignored": (forward, "_routing_context", lambda replay, inputs, tokens: nullcontext()),
}
"""Faults of dispatched experts, context ranks and routing replay: an attribute and what takes its place."""


def _run(trainer: PolicyTrainer, case: Mapping[str, Any], episodes: Mapping[str, Episodes]) -> dict[str, Any]:
    ranks, directory, policies = trainer._ranks, Path(case["directory"]), case["policies"]
    started = trainer.start(None if case["resume_from"] is None else Path(case["resume_from"]))
    gradients: dict[str, Tensor] = {}
    tokens: list[int] = []
    costs: dict[str, float] = {}

    def count_tokens(embeddings: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        tokens.append(inputs[0].numel())

    for name in policies:
        _capture(trainer._learner(name), gradients)
        if case["resume_from"] is None and (head := trainer._learner(name).value_head) is not None:
            with torch.no_grad():  # else all values of the first step are 0
                head.weight.copy_(torch.linspace(-3, 4, len(head.weight)))
        trainer._learner(name).model.model.get_input_embeddings().register_forward_hook(count_tokens)
    losses, norms, moved, zero_gradients = [], [], [], []
    for step in range(*case["steps"]):
        for name in policies:
            batch = _batch_of(case, episodes[name], step)
            # In two calls, as units come in, unless the loss sees a whole step.
            whole = case["measured"] or "loss" in case["trainer"]
            with measured_costs(_tensors(trainer), costs) if case["measured"] else nullcontext():
                for units in (batch.units,) if whole else (batch.units[:3], batch.units):
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
    computed, versions = list(tokens), {}
    for name in policies:
        versions[name] = trainer.publish(name, PolicyVersion(name, 0, case["steps"][1] - 1)).path
    trainer.save(directory / "checkpoint")
    return {
        "started": started,
        "losses": losses,
        "norms": norms,
        "moved": moved,
        "tokens": computed,
        "costs": costs,
        "experts": _experts_held(trainer, policies),
        "zero_gradients": zero_gradients,
        "bytes": _held_bytes(trainer, list(policies)),
        "checkpoint": str(directory / "checkpoint"),
        "versions": versions,
    }


def _config_of(case: Mapping[str, Any], ranks: int) -> RunConfig:
    adapted = {"experts": case["expert_lora"]}
    lora = LORA.model_copy(update=adapted) if case["lora"] or case["expert_lora"] else None
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
        rows = make_rows(at, EPISODES[name], **case["rows"])
        if case["routed"]:
            shape = AutoConfig.from_pretrained(case["model"])
            rows = [_routed(row, shape) for row in rows]
        if case["detailed"]:
            rows = [_in_turns(row) for row in rows]
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


def _in_turns(row: TrajectoryRow) -> TrajectoryRow:
    """Make each run of sampled tokens a turn; half of the tokens were sampled from kept sets."""
    starts = np.diff(row.loss_mask.astype(np.int32), prepend=0) == 1
    ids = row.token_ids.astype(np.int32)
    sets: list[Any] = [KeptCount.NONE for _ in ids]
    for at, token in enumerate(ids):
        residues = np.arange(48, dtype=np.int32) % 5
        if at % 4 == 1:
            sets[at] = np.flatnonzero(residues == token % 5).astype(np.int32)
        if at % 4 == 3:
            sets[at] = ExcludedTokens(np.flatnonzero(residues == (token + 1) % 5).astype(np.int32))
    turns = np.where(row.loss_mask, starts.cumsum() - 1, -1).astype(np.int32)
    return row.with_column("turn_index", turns).with_column("kept", KeptSets.of(sets))


def _with_turns(unit: Unit) -> Unit:
    """Give each turn an advantage of its own, and let a limit end the episode."""
    credits = (replace(each, turn_advantages=(each.advantage, -1.0, 0.5)) for each in unit.credits)
    return replace(unit, credits=tuple(credits), is_cut=True)


def _batch_of(case: Mapping[str, Any], episodes: Episodes, step: int) -> TrainBatch:
    batch = episodes.batch(step)
    if step in case["silent"]:
        return replace(batch, units=tuple(map(_without_advantage, batch.units)))
    return replace(batch, units=tuple(map(_with_turns, batch.units))) if case["detailed"] else batch


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
        parameters = learner.model.parameters | learner.value_parameters
        own = {f"{learner.name}/{name}": parameter.grad for name, parameter in parameters.items()}
        gradients.update({name: gradient.clone() for name, gradient in gather_tensors_sequentially(own)})
        apply(rate, grad_norm)

    learner.apply = captured


def _tensors(trainer: PolicyTrainer) -> list[Tensor]:
    """What exists before a step: weights, and gradients to add to."""
    tensors = []
    for learner in trainer._learners.values():
        tensors += [local_shard(parameter) for parameter in learner.model.model.parameters()]
        if not learner.model.sharded:
            tensors += learner.gradients()
    return tensors


def _experts_held(trainer: PolicyTrainer, policies: Sequence[str]) -> float | None:
    """The share of the experts' weights on this rank; None without experts."""
    modules = [each for name in policies for each in find_experts(trainer._learner(name).model.model).values()]
    weights = [weight for module in modules for weight in module.parameters()]
    return sum(local_shard(weight).numel() for weight in weights) / sum(map(Tensor.numel, weights)) if weights else None


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


def made(model: str, **settings: Any) -> dict[str, Any]:
    """A case for `compared`: the name of a model, and settings of `case`."""
    return {"model": model, "settings": settings}


def dispatched(model: str, **settings: Any) -> dict[str, Any]:
    """A case with experts to which tokens travel."""
    return made(model, experts="dispatched", **settings)


class Compared(NamedTuple):
    """A case on several ranks beside the same on one."""

    error: float
    one: Mapping[str, Any]
    """Result of `run_case` on one rank."""
    several: Sequence[Mapping[str, Any]]
    """The same on each rank."""


SEVERAL_ALONE = ("sharding", "fault", "experts", "context_ranks")
"""Settings of several ranks that one does not have."""


def compared(root: Path, place: Path, ranks: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Compared]:
    """Run each case on some ranks and on one, with the models in `root`."""
    several = {
        name: case(root / each["model"], place / name / str(ranks), **each["settings"]) for name, each in cases.items()
    }
    every = on_ranks(ranks, FUNCTION, list(several.values()))
    found = {}
    for at, (name, each) in enumerate(cases.items()):
        settings = {key: value for key, value in each["settings"].items() if key not in SEVERAL_ALONE}
        one = case(root / each["model"], place / name / "1", **settings)
        (result,) = alone([one])
        error = gradient_error(Path(several[name]["directory"]), Path(one["directory"]))
        found[name] = Compared(error, result, [results[at] for results in every])
    return found
