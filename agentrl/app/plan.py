"""The plan of a run: what follows from its configuration, its environment, its models and this machine.

`with_chosen_settings` chooses open settings; `resolve` makes the plan of a configuration once it is complete. Each part
of the run gets its part of the plan.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.app.engines import check_vllm_usable, installed_version
from agentrl.app.memory_estimate import with_chosen_token_limits
from agentrl.app.policies import (
    adapter_slots_needed,
    check_expert_adapters,
    check_fill,
    check_held,
    check_names,
    check_quantized_models,
    check_tree_declarations,
    check_vllm_models,
    group_demands,
    seats_by_episode_kind,
    split_group_warnings,
    tree_parts,
)
from agentrl.app.run_parts import environment_of
from agentrl.app.user_functions import load_declarations, load_user_functions
from agentrl.config.devices import device_plan
from agentrl.config.plans import EnginePlan, RolloutPlan, TrainerPlan
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import MIN_GPU_PARAMETERS, RunConfig, run_parts
from agentrl.core import machine
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.files import count_parameters
from agentrl.core.machine import install_command
from agentrl.core.model_layers import check_slot_layers
from agentrl.core.parts import check_compatible
from agentrl.core.setting_paths import value_at
from agentrl.core.text import plural
from agentrl.environment.environment import Environment
from agentrl.environment.mixture import root_environments, seat_prefix, trained_root_environments
from agentrl.environment.overrides import misspelled_attributes
from agentrl.orchestrator.scheduler import GroupDemand


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What follows from the settings of a run and its environment."""

    settings: RunConfig
    """The settings, as the run's journal records them."""
    environment: type[Environment]
    seats: Sequence[str]
    """Seats of the root episodes and their children."""
    demands: Sequence[GroupDemand]
    """Units of each policy in a root group, for each line-up."""
    staleness: Mapping[str, Sequence[int]]
    """Values that the bound on each learning policy's staleness may take, in ascending order: several with
    `max_staleness = "auto"`."""

    @cached_property
    def engine(self) -> EnginePlan:
        """The engines."""
        return self.settings.engine_plan

    @cached_property
    def trainer(self) -> TrainerPlan:
        """The trainer."""
        return self.settings.trainer_plan

    @cached_property
    def rollout(self) -> RolloutPlan:
        """What plays the episodes."""
        return self.settings.rollout_plan

    @cached_property
    def trained(self) -> Mapping[str, PolicyConfig]:
        """Policies that learn."""
        return self.settings.trained

    def lines(self) -> Iterator[str]:
        """Describe the plan: what each policy plays, what a group brings, and what computes where.

        Raises:
            ConfigError: there are too few GPUs.
            InputError: the driver does not list the GPUs, or an adapter lacks its configuration.
        """
        assignment = self.rollout.seats
        for name, sampling in self.rollout.sampling_by_policy.items():
            seats = [seat for seat in self.seats if name in assignment.policies_of([seat])]
            turns = f"{plural(sampling.max_turns, 'turn')} of up to {plural(sampling.max_tokens, 'token')}"
            yield f"policy {name}: {self.settings.policies[name].kind}, plays {', '.join(seats) or 'no seat'}; {turns}"
        demand = self.demands[0]
        units = ", ".join(f"{plural(count, 'unit')} of {name}" for name, count in demand.units.items())
        yield f"group: {plural(demand.episodes, 'episode')} with {units}"
        for base in self.engine.bases:
            adapters = plural(adapter_slots_needed(base.policies), "adapter")
            refresh = ", ".join(sorted({self.engine.refresh[name] for name in base.policies}))
            kind, slots = self.engine.engine.kind, plural(self.engine.slots, "slot")
            yield f"engine of {base.name}: {kind}, {slots}, {adapters}, refresh {refresh}"
        steps = ", ".join(f"{plural(count, 'step')} of {name}" for name, count in self.trainer.steps.items())
        trainer = self.trainer.trainer
        yield f"trainer: {plural(trainer.ranks, 'rank')}, {steps}"
        yield from device_plan(self.engine.demand).lines()

    def warnings(self, *, whole_groups: bool) -> list[str]:
        """Return warnings about settings and an environment that work, but are rarely intended.

        Args:
            whole_groups: whether steps take whole groups; see `UserFunctions.compares_in_step`.
        """
        split_groups: Iterable[str] = ()
        if not whole_groups:
            split_groups = split_group_warnings(self.trained, self.settings.credit.release, self.demands)
        return [*split_groups, *misspelled_attributes(self.environment)]


def check_trees(root: type[Environment], config: RunConfig, learners: Mapping[str, PolicyConfig]) -> None:
    """Refuse settings under which branches of an environment would bias training.

    Args:
        root: the environment.
        config: configuration of the run.
        learners: policies that learn in this environment.

    Raises:
        ConfigError: the message names the declaration and the setting.
    """
    check_tree_declarations(root)
    if trees := list(tree_parts(root)):
        declarations = load_declarations(config.trainer.loss, config.credit.advantage)
        check_compatible([*trees, *run_parts(config, learners, declarations)])


def resolve(config: RunConfig, environment: type[Environment]) -> RunPlan:
    """Make the plan of a run, and check what its sections and its environment need of each other. Imports no torch.

    Raises:
        ConfigError: a group could never be admitted, or a policy never act; the message suggests a change.
    """
    assignment, trained, size = config.seat_assignment, config.trained, config.credit.group_size
    kinds = {
        root: list(seats_by_episode_kind(root, seat_prefix(environment, root)))
        for root in root_environments(environment)
    }
    seats = [seat for kind in itertools.chain.from_iterable(kinds.values()) for seat in kind.seats]
    check_names(config.seats, environment, seats)
    learners: dict[type[Environment], Mapping[str, PolicyConfig]] = {}
    for root in kinds:
        holders = assignment.policies_of(kinds[root][0].seats)
        learners[root] = {name: policy for name, policy in trained.items() if name in holders}
        check_trees(root, config, learners[root])
    by_root = {
        root: group_demands(kinds[root], assignment, size, root.branches, trained)
        for root in trained_root_environments(environment)
    }
    first, demands = next(iter(by_root.items()))
    for root, units in by_root.items():
        if units != demands:
            raise ConfigError(
                f"the environments of a mixture must produce the same number of units per group, but {first.__name__} "
                f"produces {demands[0].units} and {root.__name__} {units[0].units}. Bind their seats to the same "
                "policies; an environment that spawns child episodes can only be mixed with others that spawn the "
                "same number"
            )
    check_held(config.policies, assignment, environment, seats)
    if idle := [name for name in trained if all(name not in demand.units for demand in demands)]:
        raise ConfigError(
            f"policies.{idle[0]} holds a seat only in an environment that is evaluated and not trained, so it would "
            f"learn nothing: bind it to a seat of {first.__name__} in [seats], or give it kind = 'frozen'"
        )
    is_vllm_on_cpu = config.engine.kind == "vllm" and not (config.on_cluster or machine.gpus())
    check_expert_adapters(config.bases, is_vllm_on_cpu=is_vllm_on_cpu)
    staleness = {
        name: _possible_staleness(config, name, learners, [demand.units.get(name, 0) for demand in demands])
        for name in trained
    }
    if config.max_in_flight != "auto" and size > config.max_in_flight:
        raise ConfigError(
            f"credit.group_size = {size} is larger than max_in_flight = {config.max_in_flight}, so no group could "
            "start: raise max_in_flight, or lower credit.group_size"
        )
    return RunPlan(settings=config, environment=environment, seats=seats, demands=demands, staleness=staleness)


def check_settings(config: RunConfig) -> None:
    """Refuse settings that `agentrl train` would refuse before it loads a model. Imports the environment.

    Raises:
        InputError: the message suggests a change.
    """
    load_user_functions(config.trainer, config.credit, config.scorers, config.trained)
    resolve(config, environment_of(config))


def _possible_staleness(
    config: RunConfig,
    name: str,
    learners: Mapping[type[Environment], Mapping[str, PolicyConfig]],
    brought: Sequence[int],
) -> Sequence[int]:
    """Return the values that the bound on a policy's staleness may take. With "auto", values that other settings refuse
    are left out.

    Args:
        config: configuration of the run.
        name: the policy.
        learners: policies that learn in each environment.
        brought: the policy's units of a group, for each line-up.

    Raises:
        ConfigError: they refuse every value.
    """
    policy, refusals, possible = config.trained[name], list[ConfigError](), list[int]()
    for bound in policy.staleness_choices:
        bounded = policy.model_copy(update={"max_staleness": bound})
        at_bound = config.model_copy(update={"policies": {**config.policies, name: bounded}})
        try:
            check_fill(config.credit.group_size, name, bounded, brought)
            check_compatible(run_parts(at_bound, at_bound.trained))
            for root, policies in learners.items():
                if name in policies:
                    check_trees(root, at_bound, {**policies, name: bounded})
        except ConfigError as error:
            refusals.append(error)
        else:
            possible.append(bound)
    if not possible:
        raise refusals[0]
    return possible


class ChoiceLines(NamedTuple):
    """Lines for the user about settings that were chosen, or should be; empty where there is nothing to say."""

    engine: str
    dtype: str


def with_chosen_settings(config: RunConfig, before: Mapping[str, Any]) -> tuple[RunConfig, ChoiceLines]:
    """Return the configuration with engine, dtype and token limits chosen where they are open. Imports torch.

    Args:
        config: configuration of the run, with local model directories.
        before: the configuration with which the run was started, as data, whose choices are kept; empty for a new run.

    Raises:
        ModelError: a directory holds no model that can be trained, and served by the engine.
        ConfigError: not even short contexts fit into memory, or turns are longer than the contexts.
        InputError: the driver does not list the GPUs.
    """
    config = with_learning_rates(config, before)
    config, engine_line = with_chosen_engine(config, before)
    check_quantized_models(config)
    check_vllm_models(config.engine_plan)
    for base in config.bases if config.engine.kind == "embedded" else ():
        check_slot_layers(Path(base.path))
    dtype_line = ""
    on_cpu = not config.on_cluster and (not machine.gpus() or config.stays_on_cpu)
    if on_cpu and config.engine.kind == "embedded":
        dtype, dtype_line = chosen_dtype(config.engine_plan, before)
        config = config.with_dtype(dtype)
    return with_chosen_token_limits(config, before), ChoiceLines(engine_line, dtype_line)


_SLOWER = 1.5
"""Time of a product in bfloat16 over that in float32 from which `model.dtype` = "auto" means float32."""


def chosen_dtype(
    plan: EnginePlan, before: Mapping[str, Any], measure: Callable[[str], tuple[float, float]] | None = None
) -> tuple[str, str]:
    """Return `model.dtype` of an embedded engine on a CPU, and a line for the user; "" if nothing was chosen. It is
    float32 if the setting is "auto", means bfloat16, and this CPU computes bfloat16 more slowly. Imports torch.

    Engine and trainer read the choice from the configuration, so they compute in the same dtype, also after a resume.
    A dtype that the user has set is kept, with a warning.

    Args:
        plan: the engine's part of the run, with local model directories.
        before: the configuration with which the run was started, as data, whose dtype is kept; empty for a new run.
        measure: returns the times of a product of a model's shape in float32 and in bfloat16; default:
            `measure_products`.

    Raises:
        ModelError: a directory holds no model.
    """
    from agentrl.engines.models import dtype_name, measure_products, model_dtype

    if before:
        recorded = value_at(before, "model", "dtype")
        return ("float32" if plan.dtype == "auto" and recorded == "float32" else plan.dtype), ""
    halves = [base.path for base in plan.bases if dtype_name(model_dtype(base.path, plan.dtype, "cpu")) == "bfloat16"]
    if not halves:
        return plan.dtype, ""
    in_float32, in_bfloat16 = (measure or measure_products)(halves[0])
    if in_bfloat16 < _SLOWER * in_float32:
        return plan.dtype, ""
    ratio = f"{in_bfloat16 / in_float32:.1f} times as long as in float32"
    times = f"{ratio} ({in_bfloat16:.3g} ms against {in_float32:.3g})"
    if plan.dtype == "auto":
        return "float32", (
            f"computing in float32: on this CPU, a product in bfloat16, the checkpoint's dtype, takes {times} "
            '(model.dtype = "bfloat16" computes in it)'
        )
    warnings.warn(
        f'model.dtype = "{plan.dtype}": on this CPU, a product in bfloat16 takes {times}; "float32" is faster and '
        "takes twice the memory",
        stacklevel=2,
    )
    return plan.dtype, ""


LEARNING_RATES = ((1e7, 2e-3, 3e-4), (3e8, 3e-4, 3e-5), (5.5e8, 1e-4, 1e-5), (1.2e9, 3e-5, 3e-6), (inf, 1e-5, 1e-6))
"""Default learning rates of adapters and of full weights, for models of up to so many parameters.
docs/how-to/settings.md names the run that each row comes from."""


def with_learning_rates(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with a learning rate by model size for each policy that sets none.

    Args:
        config: configuration of the run, with local model directories.
        before: the configuration with which the run was started, as data, whose rates are kept; empty for a new run.
    """
    policies = {}
    for name, policy in config.trained.items():
        if "learning_rate" not in policy.model_fields_set:
            rate = value_at(before, "policies", name, "learning_rate")
            if not (isinstance(rate, float) and 0 < rate < inf):  # a new run, or a damaged record
                try:
                    parameters = count_parameters(Path(config.base_of(name)))
                except ModelError:  # loading the model reports it
                    continue
                _, adapter, full = next(row for row in LEARNING_RATES if parameters <= row[0])
                rate = full if policy.lora is None else adapter
            policies[name] = policy.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"policies": {**config.policies, **policies}})


def with_chosen_engine(config: RunConfig, before: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the configuration with its engine chosen if it is open, and a line for the user; "" if there is no choice.

    Args:
        config: configuration of the run.
        before: the configuration with which the run was started, as data, whose engine is kept; empty for a new run.

    Raises:
        InputError: the driver does not list the GPUs.
    """
    if config.engine.vllm is not None or not config.bases or config.on_cluster or not machine.gpus():
        return config, ""
    if config.stays_on_cpu:
        return config, (
            f"engine and trainer: on the CPU, which is as fast for models of fewer than {MIN_GPU_PARAMETERS:,} "
            "parameters (CUDA_VISIBLE_DEVICES=0 uses the GPU)"
        )
    if before and not isinstance(value_at(before, "engine", "vllm"), dict):
        return config, "engine: embedded, as when the run began (an empty [engine.vllm] selects vLLM)"
    try:
        if (version := installed_version("vllm")) is None:
            raise ConfigError(f"vLLM is not installed: {install_command('vllm')}")
        chosen_config = config.with_vllm()
        check_vllm_usable(chosen_config.engine, chosen_config.filtered, on_cluster=False)
        check_quantized_models(chosen_config)
        check_vllm_models(chosen_config.engine_plan)
        if conflicts := device_plan(chosen_config.device_demand).memory_conflicts():
            raise ConfigError("; ".join(conflicts))
    except ConfigError as error:
        return config, f"engine: embedded. vLLM samples faster on a GPU, but: {error}"
    return chosen_config, (
        f"engine: vLLM {version}, which samples faster on a GPU than the embedded engine "
        "(engine.vllm = false selects that one)"
    )
