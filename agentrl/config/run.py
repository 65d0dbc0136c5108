"""What a run is: one frozen section per component, read from TOML, Python or the command line alike.

Combinations that make no sense do not parse; values that can be derived are properties with their formula.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EnvironmentConfig(Section):
    """What the agents do."""

    id: str
    """Registered name, `module:Class`, or `path/to/env.py:Class`."""
    options: dict[str, Any] = {}
    """Passed to the environment's task source."""
    tool_timeout_s: float = 30.0
    """A tool call longer than this becomes a timeout observation, in seconds."""


class ModelConfig(Section):
    """The base model all policies start from."""

    path: str
    """A local Hugging Face causal-LM directory with tokenizer and chat template."""
    tool_call_format: Literal["auto", "hermes", "llama"] = "auto"
    """How the model writes tool calls; `auto` reads it off the chat template."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) instead of full weights."""

    rank: Positive = 16
    alpha: Rate = 32.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PolicyConfig(Section):
    """One policy: trainable weights, or a frozen copy of the base."""

    trainable: bool = True
    lora: LoraConfig | None = None
    """Train an adapter of this shape; null trains all weights."""
    learning_rate: Rate = 3e-4
    step_size: Positive = 64
    """Units (episodes, as this policy saw them) per optimizer step."""
    max_staleness: NonNegative = 1
    """Bound on the mean policy lag in optimizer steps; 0 is synchronous training."""


class EngineConfig(Section):
    """Who samples."""

    kind: Literal["embedded"] = "embedded"
    slots: Positive = 64
    """Conversations whose KV is held at once."""
    max_context: Positive = 512
    """Longest context in tokens."""
    refresh: Literal["token", "turn", "episode", "lazy"] = "token"
    """When a conversation in flight moves to newer weights; full weights: `token` or `turn`."""
    keep_kv: bool = True
    """`token` refresh: keep the KV older weights computed (recorded logprobs stay exact), or recompute it."""
    capture_routing: bool = False
    """Record which experts each position used (mixture-of-experts models)."""
    threads: Positive = 1
    """Torch threads of the engine on CPU."""


class SamplingConfig(Section):
    """How policies sample."""

    temperature: Rate = 1.0
    top_k: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Positive = 64
    """Longest turn in tokens."""
    max_turns: Positive = 8
    """Longest episode in turns of one agent."""

    @property
    def is_filtered(self) -> bool:
        """Whether a filter cuts the distribution: then the kept sets are recorded and trained with."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class CreditConfig(Section):
    """From rewards to advantages."""

    group_size: Positive = 8
    """Episodes sampled per task, compared with each other."""
    advantage: Literal["leave_one_out", "group_mean", "group_std", "none"] = "leave_one_out"
    """`leave_one_out` (RLOO), `group_mean` (Dr. GRPO), `group_std` (GRPO), `none` (REINFORCE on the raw reward)."""


class PolicyGradientLoss(Section):
    """Truncated importance weights against the recorded logprobs, with a trust region on the probability."""

    kind: Literal["truncated"] = "truncated"
    max_ratio: Rate = 5.0
    """Cap on the importance weight pi/mu, which carries no gradient (CISPO, arXiv:2506.13585)."""
    trust_region: Rate = 0.2
    """A token whose probability moved further than this in its advantage's direction is masked (DPPO-TV)."""


class PpoLoss(Section):
    """Clipped surrogate against the recorded logprobs (PPO, arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    """Asymmetric upper bound (DAPO, arXiv:2503.14476)."""


class ReinforceLoss(Section):
    """-A log pi, without correction: right only at staleness 0."""

    kind: Literal["reinforce"] = "reinforce"


LossConfig = Annotated[PolicyGradientLoss | PpoLoss | ReinforceLoss, Field(discriminator="kind")]


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101), one per policy."""

    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: Rate = 1.0
    warmup_steps: NonNegative = 0
    """Steps of linear learning-rate warm-up."""


class TrainerConfig(Section):
    """Who learns."""

    kind: Literal["ray", "in_process"] = "ray"
    workers: Positive = 1
    """Data-parallel ranks; any number gives the same update."""
    loss: LossConfig = PolicyGradientLoss()
    entropy_bonus: float = 0.0
    """Weight of the mean entropy per trained token."""
    tokens_per_unit: Positive = 64
    """The constant c of the normaliser step_size × c: a typical number of sampled tokens of a unit."""
    micro_batch_tokens: Positive = 8192
    """Padded tokens per forward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    threads: Positive = 1
    """Torch threads per rank on CPU."""


class EvaluationConfig(Section):
    """Held-out tasks at a pinned version, beside training."""

    tasks: NonNegative = 256
    """Held-out tasks sampled once each; 0: no evaluation."""
    every: NonNegative = 0
    """Steps between evaluations; 0: only before the first step and after the last."""


class CheckpointConfig(Section):
    """When the run writes a manifest it can resume from."""

    every: NonNegative = 10
    """Steps between checkpoints; one is always written at the end."""
    keep: Positive = 2
    """How many of the newest are kept."""


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    directory: str = "runs"
    """Where run directories are made; this one is `directory/name`."""
    seed: int = 0
    steps: Positive = 40
    """Optimizer steps of each trainable policy."""
    max_in_flight: Positive = 256
    """Episodes running at once."""
    episode_timeout_s: float = 600.0
    """An episode longer than this is dropped (`time_limit`), in seconds."""
    data_attempts: Positive = 2
    """How often an episode whose environment raises is tried before it is dropped."""
    environment: EnvironmentConfig
    model: ModelConfig
    policies: dict[str, PolicyConfig] = {"policy": PolicyConfig()}
    seats: dict[str, str] = {}
    """Which policy holds which seat; a seat not named here is held by the only policy."""
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    credit: CreditConfig = CreditConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        if not self.policies:
            raise ValueError("policies: at least one policy is needed")
        for seat, policy in self.seats.items():
            if policy not in self.policies:
                raise ValueError(f"seats.{seat}: no policy {policy!r}; there are: {', '.join(sorted(self.policies))}")
        for name, policy_config in self.policies.items():
            if policy_config.trainable and policy_config.lora is None and self.engine.refresh in ("episode", "lazy"):
                raise ValueError(
                    f"engine.refresh = {self.engine.refresh!r} needs adapters: an engine has one version of full "
                    f"weights. Set policies.{name}.lora, or refresh = 'token' or 'turn'"
                )
        return self

    def policy_of(self, seat: str) -> str:
        """The policy that holds `seat`; `Env.seat` bindings of child episodes fall back to the bare seat name.

        Raises:
            ValueError: the seat is bound to nothing and there is more than one policy.
        """
        bare = seat.rsplit(".", 1)[-1]
        for key in (seat, bare):
            if key in self.seats:
                return self.seats[key]
        if len(self.policies) == 1:
            return next(iter(self.policies))
        if bare in self.policies:
            return bare
        raise ValueError(
            f"seat {seat!r} is bound to no policy; add it to [seats] (policies: {', '.join(sorted(self.policies))})"
        )
