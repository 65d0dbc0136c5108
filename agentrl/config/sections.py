"""The sections of a run's configuration, one per component; `run.py` puts them together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from agentrl.config.algorithms import ADVANTAGES, LOSSES
from agentrl.config.fields import (
    Code,
    Episodes,
    Fixed,
    Free,
    Label,
    Live,
    Location,
    Machine,
    MaybeSteps,
    NonNegative,
    NumberUnit,
    Options,
    PerEpisode,
    Positive,
    Rate,
    ReplyFormatName,
    Section,
    Share,
    Temperature,
    Tokens,
    WaveFixed,
    check_function_name,
    resolve_package_directory,
)
from agentrl.core.custom_functions import Kind
from agentrl.core.json_data import copy_json
from agentrl.core.removed import removed_setting


class EnvironmentConfig(Section):
    """The environment in which agents act."""

    id: Fixed[Code[str | dict[str, Rate]]]
    """A registered name, `module:Class`, or `path/to/env.py:Class`. A table of environments and sampling rates makes a
    mixture: `{ calculator = 3, frozen_lake = 1 }` (docs/how-to/selection.md)."""
    options: Fixed[Code[Options]] = {}
    """Arguments of the environment's task source. In a mixture: one table per class name."""
    selection: Fixed[Label[dict[str, float]]] = {}
    """Choose tasks by the results of earlier groups: `{ low = 0.1, high = 0.9, replay = 0.5, retire_after = 2 }`
    (docs/how-to/selection.md). Empty: repeated passes over all tasks, in seeded random order."""

    @field_validator("selection")
    @classmethod
    def _check_selection(cls, selection: dict[str, float]) -> dict[str, float]:
        """Check the arguments of `orchestrator.tasks.PassRateCurriculum`."""
        bounds = {"low": 1.0, "high": 1.0, "replay": 1.0, "retire_after": math.inf}
        for name, value in selection.items():
            if name not in bounds:
                raise ValueError(f"{name}: there is no such argument; there are {', '.join(bounds)}")
            if not 0 <= value <= bounds[name]:
                raise ValueError(f"{name} = {value}: a number from 0 to {bounds[name]:g} is expected")
        low, high = selection.get("low", 0.1), selection.get("high", 0.9)
        if low > high:
            raise ValueError(
                f"low = {low} is above high = {high}, so no task would be replayed: raise high, or lower low"
            )
        return selection


class ModelConfig(Section):
    """The base model that policies start from, unless they name their own (`policies.NAME.model`)."""

    path: Fixed[Location[str]] = ""
    """A Hugging Face causal LM with tokenizer and chat template: a directory, `package:directory` inside an installed
    package, or a hub name such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@main` (downloaded if not cached; safetensors
    only). A resumed run uses the same commit, and is refused if the branch or tag has moved. Required unless every
    policy is remote, a bot, or names its own `model`."""
    dtype: Fixed[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Data type of the engine, the trainer and published full weights. `auto`: the checkpoint's, but float32 for a
    float16 checkpoint, and on a CPU that computes bfloat16 more slowly (docs/reference/engines.md)."""
    reply_format: Fixed[ReplyFormatName] = "auto"
    """Syntax of tool calls and thinking in replies (docs/reference/models.md). `auto`: detected from the chat template.
    Policies that name their own `model` always use `auto`."""
    history: Fixed[Literal["keep", "fork"]] = "keep"
    """What to do when the chat template rewrites earlier turns, for example by removing their thinking. `keep`: the
    model continues to see what it sampled. `fork`: the rewritten conversation continues in a new row of the episode."""
    tools_in: Fixed[Literal["template", "system"]] = "template"
    """Where the prompt lists tools. `template`: where the chat template puts them. `system`: in the system message,
    with `hermes` calls and with results as user messages, for chat templates that ignore tools."""
    template_variables: Fixed[Label[dict[str, Any]]] = {}
    """Values of variables that the chat template reads, such as `{ enable_thinking = false }`: texts, numbers, truth
    values, and lists and tables of them."""

    @field_validator("template_variables")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if not name.isidentifier() or name in ("messages", "tools", "documents", "add_generation_prompt"):
                raise ValueError(f"{name!r} is no variable of a chat template's own")
        try:
            return dict(copy_json(variables, "template_variables"))
        except TypeError as error:
            raise ValueError(str(error)) from None

    @field_validator("path")
    @classmethod
    def _find_package_directory(cls, path: str) -> str:
        return resolve_package_directory(path) if path else path


PARALLEL_SIZES = frozenset(
    {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"}
)
"""Arguments of vLLM that multiply the GPUs of an engine; experts are spread over the GPUs of the others."""
MAX_PARALLEL = 1024
VllmArguments = dict[str, Any] | Literal[False] | None


class EngineConfig(Section):
    """The inference engine."""

    vllm: WaveFixed[Machine[VllmArguments]] = None
    """A table, even an empty one, selects vLLM; false: the embedded engine; null: vLLM on a GPU if it is installed and
    serves the run, otherwise the embedded engine; a resumed run keeps its engine. Keys are vLLM's engine arguments,
    such as `tensor_parallel_size = 2` (docs/reference/engines.md)."""
    replicas: Free[Machine[Literal["auto"] | Annotated[int, Field(ge=0, le=10**6), NumberUnit("engines")]]] = "auto"
    """Number of engines, each in its own process. 0: one engine, in the run's process. `auto`: one, in its own process
    (260 MiB more) where full or merged weights learn, not in lockstep, on two CPU cores. vLLM, and engines with several
    `workers` or `cluster.address`, have their own."""
    slots: WaveFixed[Annotated[NonNegative, NumberUnit("conversations")]] = 0
    """Number of conversations whose KV cache is held at once; they share each forward pass. 0: 64, or 256 for vLLM on
    GPUs of at least 40 GB."""
    max_context: PerEpisode[Annotated[NonNegative, NumberUnit("tokens")]] = 0
    """Maximum length of a conversation. 0: the model's maximum, or less if memory is short; a resumed run keeps the
    length."""
    refresh: WaveFixed[Literal["auto", "token", "token_keep_kv", "turn", "episode", "lazy"]] = "auto"
    """When a running conversation switches to newer weights (docs/reference/engines.md). `auto`: `lazy` for adapters,
    `token` for full weights."""
    capture_routing: WaveFixed[bool] = False
    """Record the experts chosen at each position, and reuse them in training (mixture-of-experts models)."""
    memory_share: Free[Machine[Annotated[float, Field(ge=0, le=0.97)]]] = 0.0
    """Share of a GPU's memory for the engine. 0: 0.9 of a GPU of its own, or 0.45 of a GPU shared with a trainer rank
    (docs/how-to/several_gpus.md). With vLLM on CPUs, the share of the machine's memory for weights and KV cache; 0:
    enough for `slots` contexts."""

    @field_validator("vllm")
    @classmethod
    def _check_parallel_sizes(cls, arguments: VllmArguments) -> VllmArguments:
        """Check the parallel sizes, which decide how many GPUs an engine takes."""
        for name in PARALLEL_SIZES & (sizes := arguments or {}).keys():
            if type(sizes[name]) is not int or not 0 < sizes[name] <= MAX_PARALLEL:
                raise ValueError(f"{name} = {sizes[name]!r}: a whole number from 1 to {MAX_PARALLEL} is expected")
        return arguments

    @property
    def kind(self) -> Literal["embedded", "vllm"]:
        """Kind of the engine."""
        return "vllm" if isinstance(self.vllm, dict) else "embedded"

    @property
    def count(self) -> int:
        """Number of engines of each base model."""
        return int(self.replicas != "auto" and self.replicas) or 1

    @property
    def devices(self) -> int:
        """Number of GPUs that one engine computes on: the product of vLLM's parallel sizes, 1 without them."""
        return math.prod((self.vllm or {}).get(name, 1) for name in PARALLEL_SIZES)

    @property
    def keep_kv(self) -> bool:
        """Whether a turn that continues under newer weights keeps the KV computed by older ones."""
        return self.refresh == "token_keep_kv"


class SamplingConfig(Section):
    """Sampling parameters of policies."""

    temperature: PerEpisode[Temperature] = 1.0
    """Divisor of the logits, from 0.01 to 2. Training optimizes the policy at this temperature. 0: always the likeliest
    token; refused for policies that learn."""
    top_k: PerEpisode[Annotated[NonNegative, NumberUnit("tokens")]] = 0
    """Sample from the k most likely tokens, after `min_p`; 0: all. The kept set of any filter is recorded and used in
    training."""
    top_p: PerEpisode[Annotated[float, Field(gt=0, le=1)]] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this share, after `min_p` and `top_k`."""
    min_p: PerEpisode[Share] = 0.0
    """Sample from tokens with at least this fraction of the largest probability, after `temperature`. This filter is
    the first, as in vLLM."""
    max_tokens: PerEpisode[Tokens] = 64
    """Maximum sampled tokens per turn. A turn that is cut off (`Turn.is_cut`) is no answer, move or tool call."""
    max_turns: PerEpisode[Annotated[Positive, NumberUnit("turns")]] = 8
    """Maximum turns per agent. An episode that is cut off is truncated."""

    @property
    def is_filtered(self) -> bool:
        """Whether a filter cuts the distribution, so that kept sets are recorded and used in training."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class GatewayConfig(Section):
    """How requests of external agents are answered."""

    sampling: Fixed[Literal["agent", "run", "refuse"]] = "agent"
    """Which sampling parameters win if a request sets some. `agent`: the request's. Its tokens are trained at its
    temperature, or not at all at temperature 0 or with penalties. `run`: `[sampling]`. `refuse`: a request is refused
    if it differs from `[sampling]`."""


class FunctionConfig(Section):
    """A function by its name; every further key is an argument of the function."""

    model_config = ConfigDict(extra="allow")
    name: Free[Code[str]]

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the function."""
        return dict(self.model_extra or {})

    kind: ClassVar[Kind]
    table: ClassVar[str]
    built_in: ClassVar[tuple[str, ...]]

    def check(self) -> None:
        """Refuse a name that is neither built in nor possibly the user's, and an argument that is a misspelt setting.
        The function itself is not loaded here."""
        for key in (self.name, *self.options):
            if sentence := removed_setting(f"{self.table}.{key}"):
                raise ValueError(sentence)
        check_function_name(self.kind, self.name, self.built_in)
        for key in self.options:
            if suggestions := difflib.get_close_matches(key, type(self).model_fields, n=1, cutoff=0.85):
                raise ValueError(f"unknown key {key}; did you mean {suggestions[0]}?")


class AdvantageConfig(FunctionConfig):
    """The advantage estimator: its name, or a table with its arguments, such as `credit.advantage = { name =
    "pass_at_k", k = 4 }`, which may change on resume."""

    kind = "advantage"
    table = "credit.advantage"
    built_in = tuple(ADVANTAGES)
    name: Free[Code[str]] = "leave_one_out"
    """`leave_one_out` (RLOO), `group_mean` (Dr. GRPO) and `group_std` (GRPO) compare with the same seat in the group;
    `role_mean` compares with the policy's mean reward in that seat, for zero-sum games; `none` uses the raw reward. See
    docs/reference/algorithms.md for others and your own."""

    def check(self) -> None:
        super().check()
        if self.name in ADVANTAGES and self.options:
            raise ValueError(f"{self.name!r} has no arguments; remove {', '.join(self.options)}")


class CreditConfig(Section):
    """How advantages are computed from rewards."""

    group_size: Fixed[Episodes] = 8
    """Episodes sampled per task and compared with each other."""
    advantage: AdvantageConfig = AdvantageConfig()
    reward_weights: WaveFixed[Label[dict[str, Annotated[float, Field(allow_inf_nan=False)]]]] = {}
    """Weight of each named reward (`agent.reward(x, name=…)`), such as `{ correct = 1.0, format = 0.2 }`. Empty: 1 for
    each; otherwise every name needs a weight, except `reward`, which is 1 if absent: the name of rewards without one,
    of the penalty of `gate`, of `failed_reward` and of `truncated_reward`. Rewards recorded before a resume keep their
    weight."""
    release: Fixed[Literal["group", "episode", "late"]] = "group"
    """When a group's episodes become available for training (docs/explanation/off_policy.md). `group`: when all have
    ended. `late`: the first half together, then each as it ends, with the first half as its baseline. `episode`: each
    as it ends, with earlier groups as its baseline."""
    dynamic_sampling: Fixed[bool] = False
    """Drop groups whose advantages are all 0 (`no_signal`) and sample others instead (DAPO, arXiv:2503.14476;
    docs/how-to/selection.md). Needs `release = "group"`."""
    turn_credit: Free[Literal["sum", "to_go"]] = "sum"
    """Which tokens a turn's reward (`agent.reward(x, turn=…)`) credits. `sum`: the agent's whole trajectory. `to_go`:
    that turn and the turns before it; each turn is compared with the group's rewards from that turn on."""

    @property
    def compares_turns(self) -> bool:
        """Whether the advantage may compare the states of turns: any but the built-in ones."""
        return self.advantage.name not in ADVANTAGES

    @field_validator("advantage", mode="before")
    @classmethod
    def _accept_name(cls, advantage: Any) -> Any:
        return {"name": advantage} if isinstance(advantage, str) else advantage

    @field_validator("reward_weights")
    @classmethod
    def _check_reward_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        """Check that weights do not cancel: a reward of 1 under every name must be worth more than 0."""
        for name in weights:
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(f"{name!r} is not a valid name for a reward; give a Python identifier")
        if not math.isfinite(sum(weights.values())):
            raise ValueError("their sum is not a finite number")
        if weights and (total := math.fsum(weights.values())) <= 0:
            weight_list = ", ".join(f"{name} = {weight:g}" for name, weight in weights.items())
            raise ValueError(
                f"{weight_list}: they sum to {total:g}, so raising every reward would earn nothing, or less. Express a "
                "penalty as a negative reward with a positive weight"
            )
        return weights


class LossConfig(FunctionConfig):
    """The loss and its divisor (docs/reference/algorithms.md). Other keys are arguments of the loss, such as `clip_high
    = 0.3` for `ppo`, and may change on resume."""

    kind = "loss"
    table = "trainer.loss"
    built_in = tuple(LOSSES)
    name: Free[Code[str]] = "truncated"
    """A built-in or installed loss, `module:function`, or `path/to/file.py:function`. The default truncates importance
    weights per token: bounded at any staleness, but not unbiased (docs/explanation/off_policy.md)."""
    normalizer: Free[Literal["tokens", "sequences"] | Positive] = "tokens"
    """Divisor of a step's summed token losses (docs/reference/algorithms.md). `tokens`: the step's sampled tokens.
    `sequences`: each conversation's tokens, then the conversations. A number: this number times
    `step_size`, however many units the step takes; give the sampled tokens of a typical episode. Required with
    `credit.release = "late"` or `"episode"`."""
    kl: Free[Annotated[float, Field(ge=0), NumberUnit("per nat")]] = 0.0
    """Weight of the KL divergence from the reference (`policies.NAME.reference`)."""

    @property
    def tokens_per_unit(self) -> int:
        """`normalizer` if it is a number of tokens, else 0."""
        return self.normalizer if isinstance(self.normalizer, int) else 0


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101), one per policy."""

    max_grad_norm: Free[Rate] = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down."""
    warmup_steps: Free[MaybeSteps] = 0
    """Steps over which the learning rate rises linearly."""
    final_learning_rate_share: Free[Annotated[float, Field(ge=0, le=1)]] = 1.0
    """Learning rate at the last step, as a share of `learning_rate`; it falls linearly after warm-up."""

    def rate(self, learning_rate: float, step: int, steps: int) -> float:
        """Return the learning rate of a step of a run of `steps` steps: it rises linearly to its full value at step
        `warmup_steps`, then falls linearly to its final share at the last step."""
        if step < self.warmup_steps:
            return learning_rate * step / self.warmup_steps
        fallen = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        return learning_rate * (1.0 - fallen * (1.0 - self.final_learning_rate_share))


class TrainerConfig(Section):
    """Gradients and optimizer steps."""

    ranks: Free[Annotated[Positive, NumberUnit("processes")]] = 1
    """Number of data-parallel ranks; it does not change the update. One rank is a thread of the run's process. Several
    ranks, and any rank with `cluster.address`, are Ray actors."""
    sharding: Free[Literal["auto", "none", "full", "offload"] | Positive] = "auto"
    """Sharding of weights, gradients and optimizer state (docs/how-to/several_gpus.md); it does not change the update.
    `none`: each rank holds all. `full`: over all ranks. A number that divides `ranks`: within groups of that many
    ranks. `offload`: as `full`, in main memory. `auto`: `none` if that takes at most half of a rank's memory, else
    `full`."""
    loss: LossConfig = LossConfig()
    entropy_bonus: Free[Annotated[float, NumberUnit("per nat")]] = 0.0
    """Weight of the trained tokens' entropy, normalized like the loss. A positive weight slows entropy collapse."""
    micro_batch_tokens: Free[Annotated[NonNegative, NumberUnit("tokens")]] = 0
    """Maximum tokens per forward pass. It bounds memory and does not change the update. Padding, of the few models that
    need it, can add a quarter. 0: as many as fit in memory, at most 16,384; without a GPU, at most 2,048 or four
    contexts of full length."""
    recompute: Free[bool] = False
    """Recompute activations in the backward pass instead of storing them: much less memory, about a third more time,
    the same update."""
    optimizer: OptimizerConfig = OptimizerConfig()

    def check(self) -> None:
        if isinstance(self.sharding, int) and self.ranks % self.sharding:
            raise ValueError(
                f"sharding = {self.sharding} does not divide ranks = {self.ranks}: every rank belongs to one group of "
                "that size"
            )


class ClusterConfig(Section):
    """The Ray cluster of trainer ranks, engines and workers (docs/how-to/several_gpus.md)."""

    address: Free[Machine[str]] = ""
    """`auto`: the Ray instance on this machine. HOST:PORT: the head of a cluster. `local`: a Ray instance for this run
    alone. Empty: no Ray, unless there are several trainer ranks; the run then listens on loopback only. The run
    directory always stays on this machine."""

    @property
    def ray_address(self) -> str:
        """Address of the Ray cluster; "" for a Ray that the run starts itself."""
        return "" if self.address == "local" else self.address


class EvaluationSamplingConfig(Section):
    """How the evaluated policies are sampled in evaluations, where that differs from training."""

    temperature: Fixed[Temperature | None] = None
    """As in `[sampling]`; 0: the likeliest token is taken. Null, here and below: as in training."""
    top_k: Fixed[Annotated[NonNegative, NumberUnit("tokens")] | None] = None
    """As in `[sampling]`."""
    top_p: Fixed[Annotated[float, Field(gt=0, le=1)] | None] = None
    """As in `[sampling]`."""
    min_p: Fixed[Share | None] = None
    """As in `[sampling]`."""

    @property
    def changes(self) -> dict[str, float]:
        """The settings that are not null."""
        return self.model_dump(exclude_none=True)


class EvaluationConfig(Section):
    """Evaluation of pinned versions on held-out tasks, during training."""

    tasks: Free[Code[Annotated[NonNegative, NumberUnit("tasks")] | dict[str, Positive]]] = 256
    """Number of held-out tasks; if there are more, they are drawn with `seed`. 0: no evaluation. A table sets the
    number for each split, also of other environments: `{ held_out = 256, hard = 64, "calculator@held_out" = 64 }`."""
    attempts: Free[Annotated[int, Field(gt=0, le=1024), NumberUnit("episodes")]] = 1
    """Episodes per held-out task. With several, pass@k is measured for k = 1, 2, 4, … up to this number."""
    every: Live[MaybeSteps] = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()

    @property
    def splits(self) -> list[tuple[str, str, int]]:
        """(environment, split, number of tasks) of each split; environment '': those of the run."""
        by_name = self.tasks if isinstance(self.tasks, dict) else {"held_out": self.tasks}
        return [(*_split_of(name), count) for name, count in by_name.items() if count]

    @field_validator("tasks")
    @classmethod
    def _check_names(cls, tasks: int | dict[str, int]) -> int | dict[str, int]:
        for name in tasks if isinstance(tasks, dict) else ():
            if not _split_of(name)[1].isidentifier():
                raise ValueError(
                    f"{name!r}: the name of a split is expected, such as held_out, or ENVIRONMENT@held_out"
                )
        return tasks


def _split_of(name: str) -> tuple[str, str]:
    """Environment and split of `ENVIRONMENT@SPLIT` or `SPLIT`."""
    environment, _, split = name.rpartition("@")
    return environment, split


class BestConfig(Section):
    """The run's best versions by the running mean of a metric, and early stopping."""

    metric: Free[Label[str]] = ""
    """Metric of steps or evaluations whose largest running mean is best; with `-` in front, the smallest. It belongs to
    the first policy that learns, or to a named one: `solver/reward/mean`. Empty: none."""
    window: Free[Annotated[Positive, NumberUnit("measurements")]] = 5
    """Number of newest measurements in the running mean."""
    stop_at: Free[float | None] = None
    """The run ends once the running mean reaches this value; null: never."""

    def check(self) -> None:
        if not self.metric and self.stop_at is not None:
            raise ValueError("stop_at ends a run by a metric: set metric")

    def measured(self, policies: Collection[str]) -> tuple[str, str]:
        """Return the policy whose metric it is, among those that learn, and the metric's name without the sign."""
        name = self.metric.removeprefix("-")
        policy, slash, metric = name.partition("/")
        return (policy, metric) if slash and policy in policies else (next(iter(policies), ""), name)


class CheckpointConfig(Section):
    """Checkpoints from which the run can resume."""

    every: Live[MaybeSteps] = 10
    """Steps between checkpoints. One is always written at the end; 0: only that one."""
    versions: Free[Annotated[NonNegative, NumberUnit("versions")]] = 4
    """Number of each policy's newest published versions kept on disk; 0: all."""


class SandboxConfig(Section):
    """The sandboxes of the environments (docs/how-to/sandboxes.md)."""

    driver: Free[Machine[Literal["bubblewrap", "podman", "docker"]]] = "bubblewrap"
    """Program that isolates commands. `podman` and `docker` give weaker guarantees, and need `unproved = "accept"`."""
    unproved: Free[Machine[Literal["refuse", "accept"]]] = "refuse"
    """What to do if this machine fails a check of `agentrl doctor --sandbox`: `refuse` to start, or `accept` it with a
    warning."""


class JournalConfig(Section):
    """Retention of the run's journal on disk."""

    keep: Free[Literal["all"] | Annotated[int, Field(ge=0, le=10**9)]] = "all"
    """`all`, or a number N: each checkpoint deletes tokens of training episodes and step columns that are older than
    their policy's last N steps and no longer needed (docs/how-to/operations.md)."""
