"""The configuration of a run: one frozen section per component, the same from TOML, Python and the command line.

Combinations that make no sense do not parse; the error names the keys and the fix. Derived values are properties that
state their formula.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ValidationError, field_validator

from agentrl.config.combinations import (
    ADAPTER,
    BEST_EVALUATION,
    CLUSTER,
    DETERMINISTIC,
    EVALUATION,
    FILTERED_ENDPOINT,
    FULL_WEIGHTS,
    MEASURED_STALENESS,
    MERGED_ADAPTER,
    MIXED_FILTERS,
    NO_HELD_OUT_TASKS,
    PAST_POLICY,
    REFRESHES,
    REMOTE_POLICY,
    REPLICAS,
    SCHEDULE,
    SEVERAL_LEARNERS,
    SYNCHRONOUS,
    UNLOADED,
    VLLM,
    Declarations,
    credit_parts,
    scorer_parts,
)
from agentrl.config.fields import (
    Episodes,
    Fixed,
    Free,
    Label,
    Live,
    Machine,
    NumberUnit,
    Positive,
    Seconds,
    Section,
    Steps,
    base_model_display_name,
    expand_paths,
)
from agentrl.config.mistakes import config_error
from agentrl.config.plans import BaseModelPlan, DeviceDemand, EnginePlan, RolloutPlan, SeatAssignment, TrainerPlan
from agentrl.config.policies import (
    AnyPolicy,
    BotPolicy,
    ExternalPolicyConfig,
    LocalPolicy,
    OpponentPoolPolicy,
    PolicyConfig,
    RemotePolicy,
)
from agentrl.config.scorers import ScorerConfig
from agentrl.config.sections import (
    BestConfig,
    CheckpointConfig,
    ClusterConfig,
    CreditConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GatewayConfig,
    JournalConfig,
    ModelConfig,
    SamplingConfig,
    SandboxConfig,
    TrainerConfig,
)
from agentrl.core import machine
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.files import count_parameters
from agentrl.core.ids import is_safe_name
from agentrl.core.parts import Part, Property, check_compatible
from agentrl.core.records import REWARD

if TYPE_CHECKING:
    from agentrl.core.ports import Refresh


P = TypeVar("P", bound=Section)


SLOTS, SLOTS_ON_LARGE_GPU = 64, 256
"""Default of `engine.slots`: decoding on a large GPU is bound by reading the weights, far beyond 64 rows."""
CORES_FOR_TWO, MIN_GPU_PARAMETERS = 2, 20_000_000
"""CPU cores from which an engine has its own process by default; parameters from which a model gets a GPU by itself: a
smaller one spends its time on launching kernels."""


class RunConfig(Section):
    """The configuration of one training run."""

    name: Free[Label[str]] = "run"
    """Name of the run, on disk and in `agentrl run list`."""
    directory: Free[Machine[Annotated[str, BeforeValidator(expand_paths)]]] = "runs"
    """Parent directory of run directories: this run is `directory/name`."""
    seed: Fixed[int] = 0
    """Seed of tasks, sampling, and every other random choice."""
    steps: Live[Label[Annotated[Steps | dict[str, Steps], NumberUnit("optimizer steps")]]] = 40
    """Optimizer steps of each policy that learns: one number for all, or a table such as `{ proposer = 40, solver = 13
    }`."""
    max_in_flight: Live[Annotated[Literal["auto"] | Episodes, NumberUnit("episodes")]] = 256
    """Maximum number of episodes in flight, in training and evaluation, children included, to protect memory and
    services. `auto`: as many as keep the engine busy, adjusted while the run runs (docs/explanation/off_policy.md).
    `max_staleness` may allow fewer. Beside training, an evaluation takes at most half."""
    workers: Free[Annotated[Positive, NumberUnit("processes")]] = 1
    """Number of processes that run episodes; 1: the run's own process. Use more if environments are CPU-bound
    (docs/how-to/several_gpus.md#worker-processes)."""
    episode_timeout_s: Free[Seconds] = 600.0
    """Maximum time between two turns of an episode: tools, effects, sleeps and the environment's own code. Sampling,
    waiting for child episodes, and parked time do not count. On timeout, an episode is truncated (`time_limit`) if its
    agents have acted, and dropped (`episode_timeout`) if it hangs before any turn or outside `ctx`."""
    stop_seconds: Free[Seconds] = 8.0
    """Maximum time from SIGTERM, SIGHUP or SIGUSR1 to the end of the process. The step in progress is finished, and a
    checkpoint written, if they fit; otherwise a resume continues from the newest checkpoint. Ctrl-C has no limit: a
    second one ends the process at once."""
    deterministic: Fixed[bool] = False
    """Produce the same weights, bit for bit, however often the run is killed and resumed. Episodes run in synchronous
    batches of fixed shape. Several times slower; for debugging and tests."""
    sinks: Free[Machine[tuple[Literal["trackio", "wandb", "tensorboard"], ...]]] = ()
    """Destinations of metrics besides `metrics.jsonl` and the journal. Each needs the extra of the same name."""
    environment: EnvironmentConfig
    model: ModelConfig = ModelConfig()
    policies: dict[str, AnyPolicy] = {"policy": PolicyConfig()}
    seats: Fixed[Label[dict[str, str | tuple[str, ...]]]] = {}
    """Policy of each seat. Default: the policy with the seat's name, or else the only policy. The policies in a list
    alternate from group to group, for example to change sides: `x = ["player", "past"]`, `o = ["past", "player"]`."""
    freeze: Free[Label[tuple[tuple[str | tuple[str, ...], Steps], ...]]] = ()
    """Repeating phases in which policies do not learn: `[["solver", 5], ["proposer", 15]]` freezes the solver for 5
    steps of the proposer, then the proposer for 15 steps of the solver (docs/how-to/policies.md)."""
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    gateway: GatewayConfig = GatewayConfig()
    credit: CreditConfig = CreditConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    best: BestConfig = BestConfig()
    journal: JournalConfig = JournalConfig()
    sandbox: SandboxConfig = SandboxConfig()
    scorers: dict[str, ScorerConfig] = {}

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise config_error(error, "RunConfig", RunConfig) from None

        __init__.__pydantic_base_init__ = True  # `model_validate` does not call it, and raises pydantic's error

    @field_validator("policies", mode="before")
    @classmethod
    def _trained_by_default(cls, policies: Any) -> Any:
        """Make a policy table without `kind` a policy that learns."""
        if not isinstance(policies, Mapping):
            return policies
        return {
            name: {"kind": "trained", **table} if isinstance(table, Mapping) else table
            for name, table in policies.items()
        }

    def check(self) -> None:
        """Refuse sections that do not fit each other. Each section has checked itself."""
        if not self.policies:
            raise ValueError("policies: at least one policy is needed")
        for key, name in (("name", self.name), *((f"policies.{name}", name) for name in self.policies)):
            if not is_safe_name(name):
                raise ValueError(f"{key}: {name!r} becomes part of a path: letters, digits, '.', '_' and '-' only")
        _check_steps(self.steps, self.policies, self.trained)
        _check_scorers(self.scorers, self.credit)
        _check_seats(self.seats, self.policies)
        self._check_models()
        for name in self.policies:
            self._check_sampling(name)
        for name, policy in self.trained.items():
            if policy.max_lag is not None and policy.max_lag < policy.largest_staleness:
                raise ValueError(
                    f"policies.{name}.max_lag = {policy.max_lag} is below max_staleness = {policy.max_staleness}, "
                    "which bounds the mean of what max_lag limits: raise it, or lower max_staleness"
                )
        _check_freeze(self.freeze, self.trained)
        _check_best_metric(self.best, self.policies, self.trained)
        try:
            check_compatible(run_parts(self, self.trained))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def _check_models(self) -> None:
        local = [name for name, policy in self.policies.items() if not isinstance(policy, ExternalPolicyConfig)]
        if without := [name for name in local if not self.base_of(name)]:
            raise ValueError(
                f"model.path is needed for {', '.join(f'policies.{name}' for name in without)}: the directory of a "
                "local Hugging Face model such as agentrl.environments:calculator/model. Remote endpoints and bots "
                "need none"
            )
        base_by_name: dict[str, str] = {}
        for base in (base_model.path for base_model in self.bases):
            name = base_model_display_name(base)
            if base_by_name.setdefault(name, base) != base:
                raise ValueError(
                    f"{base_by_name[name]} and {base} are two base models with the same name, {name}, and reports "
                    "identify them by name: rename one of the directories"
                )

    def _check_sampling(self, name: str) -> None:
        try:
            is_greedy = self.sampling_of(name).temperature == 0
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            key = ".".join(map(str, detail["loc"]))
            problem = f"no such setting of [sampling] (it has {', '.join(type(self.sampling).model_fields)})"
            raise ValueError(
                f"policies.{name}.sampling.{key}: {problem if detail['type'] == 'extra_forbidden' else detail['msg']}"
            ) from None
        if is_greedy and name in self.trained:
            raise ValueError(
                f"sampling.temperature = 0 of policies.{name}: the likeliest token has no gradient, so the policy "
                "would learn nothing. Set it above 0; to measure it at 0, set evaluation.sampling.temperature = 0"
            )

    def with_functions(
        self,
        *,
        loss: str | None = None,
        advantage: str | None = None,
        scorers: Mapping[str, str] = MappingProxyType({}),
    ) -> RunConfig:
        """Return the configuration with other references to the loss, the advantage estimator and scorers; None leaves
        one unchanged, and a scorer that it does not have is added.

        Raises:
            ConfigError: a function does not fit the other settings.
        """
        trainer, credit = self.trainer, self.credit
        if loss is not None:
            trainer = trainer.model_copy(update={"loss": trainer.loss.model_copy(update={"name": loss})})
        if advantage is not None:
            credit = credit.model_copy(update={"advantage": credit.advantage.model_copy(update={"name": advantage})})
        functions = dict(self.scorers)
        for name, function in scorers.items():
            scorer = functions.get(name) or ScorerConfig(function=function)
            functions[name] = scorer.model_copy(update={"function": function})
        new_config = self.model_copy(update={"trainer": trainer, "credit": credit, "scorers": functions})
        changed_sections: dict[str, Section] = {
            "trainer.loss": trainer.loss,
            "credit.advantage": credit.advantage,
            "credit": credit,
        }
        changed_sections |= {f"scorers.{name}": functions[name] for name in scorers}
        for key, section in {**changed_sections, "": new_config}.items():
            try:
                section.check()
            except ValueError as error:
                raise ConfigError(f"{key}: {error}" if key else str(error)) from None
        return new_config

    def of_kind(self, kind: type[P]) -> dict[str, P]:
        """Return the policies of a kind, in the order of the configuration."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, kind)}

    @property
    def trained(self) -> dict[str, PolicyConfig]:
        """Policies that learn."""
        return self.of_kind(PolicyConfig)

    def base_of(self, policy: str) -> str:
        """Return the directory of a policy's base model; "" for an endpoint or a bot."""
        section = self.policies[policy]
        if isinstance(section, OpponentPoolPolicy):
            return self.base_of(section.of)
        return (section.model or self.model.path) if isinstance(section, LocalPolicy) else ""

    @property
    def bases(self) -> list[BaseModelPlan]:
        """The base models, each with the policies served on it, in the order of the configuration.

        A vLLM holds one set of weights, so there each policy that trains all weights has a base model of its own.
        """
        policies_by_base: dict[tuple[str, str], dict[str, AnyPolicy]] = {}
        names: dict[tuple[str, str], str] = {}
        for name, policy in self.policies.items():
            if base := self.base_of(name):
                owner = policy.of if isinstance(policy, OpponentPoolPolicy) else name
                has_full_weights = (
                    self.engine.kind == "vllm" and owner in self.trained and self.trained[owner].served_adapter is None
                )
                key = (os.path.realpath(base), owner if has_full_weights else "")
                policies_by_base.setdefault(key, {})[name] = policy
                names[key] = base_model_display_name(key[0]) + (f" for {owner}" if has_full_weights else "")
        return [BaseModelPlan(key[0], names[key], policies) for key, policies in policies_by_base.items()]

    def with_dtype(self, dtype: str) -> RunConfig:
        """Return the configuration with another value of `model.dtype`."""
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})

    def with_token_limits(self, max_context: int, micro_batch_tokens: int) -> RunConfig:
        """Return the configuration with other values of `engine.max_context` and `trainer.micro_batch_tokens`."""
        engine = self.engine.model_copy(update={"max_context": max_context})
        trainer = self.trainer.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        return self.model_copy(update={"engine": engine, "trainer": trainer})

    def with_vllm(self) -> RunConfig:
        """Return the configuration with vLLM as its engine.

        Raises:
            ConfigError: vLLM cannot serve such a run; the message says why.
        """
        new_config = self.model_copy(update={"engine": self.engine.model_copy(update={"vllm": {}})})
        try:
            new_config.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return new_config

    @property
    def stays_on_cpu(self) -> bool:
        """Whether the run uses no GPU of this machine: each of its models has fewer than `MIN_GPU_PARAMETERS`
        parameters, and the user asked for no GPU, by `CUDA_VISIBLE_DEVICES` or `[engine.vllm]`."""
        if self.engine.kind == "vllm" or self.on_cluster or os.environ.get("CUDA_VISIBLE_DEVICES"):
            return False
        try:
            return all(count_parameters(Path(base.path)) < MIN_GPU_PARAMETERS for base in self.bases)
        except ModelError:  # not downloaded yet, or reported elsewhere
            return False

    @property
    def device_demand(self) -> DeviceDemand:
        """The processes of the run that compute, for `plan_devices` and `plan_nodes`."""
        return DeviceDemand(
            stays_on_cpu=self.stays_on_cpu,
            ranks=self.trainer.ranks if self.trained else 0,
            bases=tuple(base.name for base in self.bases),
            engine=self.engine,
            workers=self.workers if self.workers > 1 else 0,
            engine_in_process=self.engine_in_process,
            cluster=self.cluster,
        )

    @property
    def engine_plan(self) -> EnginePlan:
        """The engines' part of the configuration."""
        local = [name for name, policy in self.policies.items() if not isinstance(policy, ExternalPolicyConfig)]
        return EnginePlan(
            bases=tuple(self.bases),
            engine=self.engine,
            dtype=self.model.dtype,
            slots=self.slots,
            refresh={name: self.refresh_of(name) for name in local},
            filtered=self.filtered,
            fixed_shapes=self.deterministic,
            threads=self.threads,
            external=self._external,
            demand=self.device_demand,
        )

    @property
    def _external(self) -> dict[str, RemotePolicy | BotPolicy]:
        """The policies that no engine serves, with a worker's share of `max_concurrent`."""
        external: dict[str, RemotePolicy | BotPolicy] = {**self.of_kind(RemotePolicy), **self.of_kind(BotPolicy)}
        for name, policy in self.of_kind(RemotePolicy).items():
            external[name] = policy.model_copy(update={"max_concurrent": max(1, policy.max_concurrent // self.workers)})
        return external

    @property
    def slots(self) -> int:
        """Number of conversations that an engine samples at once: `engine.slots`, or what suits its GPU."""
        if self.engine.slots or self.engine.kind != "vllm" or self.on_cluster:
            return self.engine.slots or SLOTS
        smallest = min((gpu.memory.total for gpu in machine.gpus()), default=0)
        return SLOTS_ON_LARGE_GPU if smallest >= machine.LARGE_GPU else SLOTS

    @property
    def seat_assignment(self) -> SeatAssignment:
        """The policies that hold the seats."""
        return SeatAssignment(seats=self.seats, policies=tuple(self.policies))

    @property
    def rollout_plan(self) -> RolloutPlan:
        """The workers' part of the configuration."""
        return RolloutPlan(
            model=self.model,
            bases=tuple(self.bases),
            policies=self.policies,
            seats=self.seat_assignment,
            sampling=self.sampling,
            sampling_by_policy={name: self.sampling_of(name) for name in self.policies},
            gateway=self.gateway,
            evaluation_sampling=self.evaluation.sampling,
            scorers=self.scorers,
            external=self._external,
            credit=self.credit,
            episode_timeout_s=self.episode_timeout_s,
            sandbox=self.sandbox,
            seed=self.seed,
            workers=self.workers,
            max_in_flight=self.max_in_flight,
        )

    @property
    def trainer_plan(self) -> TrainerPlan:
        """The trainer's part of the configuration."""
        return TrainerPlan(
            bases=tuple(self.bases),
            policies=self.trained,
            steps={name: self.steps_of(name) for name in self.trained},
            trainer=self.trainer,
            model=self.model,
            credit=self.credit,
            max_context=self.engine.max_context,
            max_sampled=self.sampling.max_tokens * self.sampling.max_turns,
            capture_routing=self.engine.capture_routing,
            seed=self.seed,
            threads=self.threads,
            demand=self.device_demand,
        )

    def check_turns_fit(self) -> None:
        """Refuse turns that are set to be longer than the contexts; a default may be. Recorded configurations are not
        checked, so that their runs can be read.

        Raises:
            ConfigError: `max_tokens` of a policy is above `engine.max_context`.
        """
        for base in self.bases if self.engine.max_context else ():
            for name in base.policies:
                tokens, policy = self.sampling_of(name).max_tokens, self.policies[name]
                own = isinstance(policy, LocalPolicy) and "max_tokens" in policy.sampling
                is_set = own or "max_tokens" in self.sampling.model_fields_set
                if is_set and tokens > self.engine.max_context:
                    raise ConfigError(
                        f"{f'policies.{name}.' if own else ''}sampling.max_tokens = {tokens} is above "
                        f"engine.max_context = {self.engine.max_context}, the longest conversation: no turn can be so "
                        "long. Lower it, or raise engine.max_context"
                    )

    @property
    def engine_in_process(self) -> bool:
        """Whether the engine runs in the run's process. By default it shares a GPU and the frozen weights of adapters
        with the trainer. Otherwise it computes beside it, because Python runs one thread of a process at a time."""
        has_core = len(os.sched_getaffinity(0)) >= CORES_FOR_TWO and (self.stays_on_cpu or not machine.gpus())
        shares = not has_core or all(p.served_adapter or not p.largest_staleness for p in self.trained.values())
        in_process = self.engine.replicas == 0 or (self.engine.replicas == "auto" and shares)
        return self.engine.kind == "embedded" and in_process and self.workers == 1 and not self.cluster.address

    @property
    def on_cluster(self) -> bool:
        """Whether the run's processes are placed on the nodes of a Ray cluster."""
        return bool(self.cluster.ray_address)

    def refresh_of(self, policy: str) -> Refresh:
        """Return when conversations move to newer weights, for a policy served by the run's engine."""
        section = self.policies[policy]
        if not isinstance(section, PolicyConfig):
            return "token"  # without trained policies, no newer weights arrive
        if self.engine.refresh == "auto":
            return "token" if section.served_adapter is None else "lazy"
        return "token" if self.engine.refresh == "token_keep_kv" else self.engine.refresh

    def steps_of(self, policy: str) -> int:
        """Return the number of optimizer steps of a policy that learns."""
        return self.steps if isinstance(self.steps, int) else self.steps[policy]

    def sampling_of(self, policy: str) -> SamplingConfig:
        """Return a policy's sampling parameters: `[sampling]`, overridden by the policy's own section.

        Raises:
            ValidationError: the policy's section has an unknown setting or an invalid value.
        """
        section = self.policies[policy]
        if isinstance(section, BotPolicy):
            return self.sampling
        if isinstance(section, OpponentPoolPolicy):
            return self.sampling_of(section.of)
        return SamplingConfig.model_validate({**self.sampling.model_dump(), **section.sampling})

    @property
    def threads(self) -> int:
        """Torch threads of each engine and each trainer rank on CPUs: an even share of the machine's cores among the
        processes that compute at once. If only one policy learns, at `max_staleness` 0, engines and ranks compute in
        turn; with "auto" too, unless it pays that they share the cores. In one process, parts that overlap divide the
        cores (`engines.shared_cores`).

        A deterministic run uses one thread, because the number of threads decides the order of additions.
        """
        if self.deterministic:
            return 1
        # late members of a group are trained only while sampling overlaps with training
        bounds = [max(policy.staleness_choices[0], self.credit.release == "late") for policy in self.trained.values()]
        engines, ranks = self.engine.count * max(1, len(self.bases)), self.trainer.ranks if bounds else 0
        return max(1, len(os.sched_getaffinity(0)) // (max(engines, ranks) if bounds == [0] else engines + ranks))

    @property
    def filtered(self) -> list[str]:
        """Policies sampled through a filter by the run's engine; their kept sets are recorded and used in training."""
        local = [name for name, policy in self.policies.items() if not isinstance(policy, ExternalPolicyConfig)]
        return [name for name in local if self.sampling_of(name).is_filtered]


def _check_steps(steps: int | Mapping[str, int], policies: Collection[str], trained: Collection[str]) -> None:
    """Check that a table of steps names every policy that learns, and only policies."""
    if isinstance(steps, int):
        return
    trained_names = ", ".join(trained) or "none"
    for name in steps:
        if name not in policies:
            raise ValueError(f"steps.{name}: there is no policy {name!r}; the trained ones are: {trained_names}")
    if missing := set(trained) - steps.keys():
        raise ValueError(
            f"steps: the number for {', '.join(sorted(missing))} is missing; the table must have all trained policies: "
            f"{trained_names}"
        )


def _check_scorers(scorers: Mapping[str, ScorerConfig], credit: CreditConfig) -> None:
    """Check the names of scorers, which are names of rewards."""
    weights = credit.reward_weights
    for name, scorer in scorers.items():
        if not (name.isascii() and name.isidentifier()) or name == REWARD:
            raise ValueError(
                f"scorers.{name}: it becomes the name of a reward: give a Python identifier other than `reward`"
            )
        if scorer.credit == "note" and name in weights:
            raise ValueError(
                f"scorers.{name}.credit = 'note': its scores are never credited; remove {name} from "
                "credit.reward_weights"
            )
        if weights and name not in weights and scorer.credit != "note":
            raise ValueError(
                f"credit.reward_weights has no weight for the scores of {name}: add {name} = 1.0, or another weight"
            )


def _check_seats(seats: Mapping[str, str | Sequence[str]], policies: Mapping[str, AnyPolicy]) -> None:
    choices = ", ".join(sorted(policies))
    for seat, holder in seats.items():
        names = (holder,) if isinstance(holder, str) else holder
        if not names:
            raise ValueError(f"seats.{seat}: the list is empty; name the policies that hold it, group by group")
        for name in names:
            if name not in policies:
                raise ValueError(f"seats.{seat}: no policy {name!r}; there are: {choices}")
    trained = [name for name, policy in policies.items() if isinstance(policy, PolicyConfig)]
    for name, policy in policies.items():
        if isinstance(policy, OpponentPoolPolicy) and policy.of not in trained:
            raise ValueError(
                f"policies.{name}.of: {policy.of!r} is not a trained policy; there are: {', '.join(trained) or 'none'}"
            )


def _check_freeze(freeze: Sequence[tuple[str | tuple[str, ...], int]], trained: Collection[str]) -> None:
    """Check that every phase has a policy that learns, and that every frozen policy learns in some phase."""
    phases = [{policies} if isinstance(policies, str) else set(policies) for policies, _ in freeze]
    phase_policies: set[str] = set().union(*phases)
    for number, frozen in enumerate(phases):
        for name in sorted(frozen - set(trained)):
            choices = ", ".join(trained) or "none"
            raise ValueError(f"freeze[{number}]: {name!r} is not a trained policy; there are: {choices}")
        if frozen == phase_policies:
            raise ValueError(
                f"freeze[{number}]: `freeze` names no other policy, so no steps could end this phase; add a phase for "
                "the policy that should learn in the meantime, or set kind = 'frozen' to freeze this one for good"
            )
    for name in sorted(phase_policies):
        if all(name in frozen for frozen in phases):
            raise ValueError(
                f"freeze: {name!r} is frozen in every phase; remove it from one of them, or set "
                f"policies.{name}.kind = 'frozen'"
            )


def _check_best_metric(best: BestConfig, policies: Collection[str], trained: Mapping[str, PolicyConfig]) -> None:
    """Check that the best metric is of a policy that learns."""
    policy = best.metric.removeprefix("-").partition("/")[0]
    if policy in policies and policy not in trained:
        raise ValueError(
            f"best.metric = {best.metric!r}: {policy!r} is not a trained policy; there are: "
            f"{', '.join(trained) or 'none'}"
        )


# --- the parts that must fit each other -------------------------------------------------------------------------------


def run_parts(
    config: RunConfig, learners: Mapping[str, PolicyConfig], declarations: Declarations = UNLOADED
) -> Iterator[Part]:
    """Yield the parts of a run.

    Args:
        config: configuration of the run.
        learners: policies that learn, of the run or of one environment.
        declarations: what the user's functions declare.

    Raises:
        ConfigError: an option of the loss selects no grouping.
    """
    yield from credit_parts(config.credit, config.trainer.loss, declarations)
    yield from _policy_parts(config, learners)
    yield from scorer_parts(config.scorers)
    if config.on_cluster:
        yield CLUSTER
    if config.deterministic:
        yield DETERMINISTIC
    yield from _schedule_parts(config)
    if config.best.metric and config.best.measured(config.trained)[1].startswith("evaluation/"):
        yield BEST_EVALUATION._replace(setting=f"best.metric = {config.best.metric!r}")
    if not config.evaluation.tasks:
        yield NO_HELD_OUT_TASKS
    yield from _engine_parts(config)


def _policy_parts(config: RunConfig, learners: Mapping[str, PolicyConfig]) -> Iterator[Part]:
    on_vllm = config.engine.kind == "vllm"
    if len(learners) > 1:
        names = " and ".join(f"policies.{name}" for name in sorted(learners))
        yield SEVERAL_LEARNERS._replace(setting=f"{names}, which learn")
    for name, policy in learners.items():
        if policy.served_adapter is not None:
            yield ADAPTER.named(name)
        else:
            part = FULL_WEIGHTS if policy.lora is None else MERGED_ADAPTER
            gives = {Property.STABLE_VERSION: 0 in policy.staleness_choices, Property.KEEPS_VERSIONS: not on_vllm}
            yield part.named(name, *(item for item, applies in gives.items() if applies))
        if policy.max_staleness == "auto":
            yield MEASURED_STALENESS.named(name)
        elif not policy.max_staleness:
            yield SYNCHRONOUS.named(name)
    for name, pool in config.of_kind(OpponentPoolPolicy).items():
        is_full = pool.of in config.trained and config.trained[pool.of].served_adapter is None
        yield PAST_POLICY.named(name, *([] if on_vllm and is_full else [Property.KEEPS_VERSIONS]))
    for name in config.of_kind(RemotePolicy):
        yield REMOTE_POLICY.named(name)
        sampling = config.sampling_of(name)
        if sampling.top_k or sampling.min_p:
            yield FILTERED_ENDPOINT.named(name)


def _schedule_parts(config: RunConfig) -> Iterator[Part]:
    is_set = {
        "freeze": bool(config.freeze),
        "max_in_flight = 'auto'": config.max_in_flight == "auto",
        "steps as a table": isinstance(config.steps, dict),
        "best.stop_at": config.best.stop_at is not None,
    }
    lists = [f"seats.{seat} as a list" for seat, holder in config.seats.items() if isinstance(holder, tuple)]
    for setting in (*(name for name in is_set if is_set[name]), *lists):
        yield SCHEDULE._replace(setting=setting)


def _engine_parts(config: RunConfig) -> Iterator[Part]:
    engine = config.engine
    if engine.refresh != "auto":
        yield REFRESHES[engine.refresh]
    if engine.kind == "vllm":
        only_adapters = all(policy.served_adapter is not None for policy in config.trained.values())
        yield VLLM if only_adapters else VLLM._replace(gives=VLLM.gives | {Property.KEEPS_KV})
        local = [name for base in config.bases for name in base.policies]
        if config.filtered and (unfiltered := [name for name in local if name not in config.filtered]):
            names = " and ".join(f"policies.{name}" for name in unfiltered)
            yield MIXED_FILTERS._replace(setting=f"top_k, top_p or min_p for all policies but {names}")
    if engine.count > 1:
        yield REPLICAS._replace(setting=f"engine.replicas = {engine.replicas}")
    if config.evaluation.every:
        yield EVALUATION._replace(setting=f"evaluation.every = {config.evaluation.every}")
