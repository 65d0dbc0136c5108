"""Models, rows and batches for the tests of the learning side, small enough to compute in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.policies import AnyPolicy, LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig, TrainerConfig
from agentrl.core.column_files import decode_columns
from agentrl.core.records import (
    EpisodeDataLocation,
    PolicyVersion,
    TrainBatch,
    Trajectory,
    TrajectoryCredit,
    Unit,
    VersionSpan,
)
from agentrl.core.tokens import Tokens, TrainingSample, TrajectoryRow
from agentrl.credit.samples import ReadUnits
from agentrl.journal.entries import BeginEntry, JournalEntry, TurnEntry, encode_body
from agentrl.journal.store import SqliteJournal

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from agentrl.learn.memory_prediction import TrainerMemory

VOCABULARY = 48
LORA = LoraConfig(rank=4, alpha=8.0)


def read_step_file(path: Path) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """The rows and columns of a step's file."""
    metadata, columns = decode_columns(path.read_bytes())
    return json.loads(metadata["rows"]), {name: np.asarray(column) for name, column in columns.items()}


def write_model(
    directory: Path, *, kind: str = "qwen3", key_heads: int = 2, num_experts: int = 4, head_dim: int = 8
) -> Path:
    """A random two-layer model with tied embeddings, saved as a Hugging Face directory; float32."""
    import torch
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        match kind:
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**shape))
            case "llama":
                model = LlamaForCausalLM(LlamaConfig(**{**shape, "tie_word_embeddings": False}))
            case "sliding":
                model = MistralForCausalLM(MistralConfig(**shape, sliding_window=6))
            case "moe":
                experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
                model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
            case "deepseek":
                experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2}
                ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
                sizes = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
                groups = {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
                del shape["head_dim"]
                config = DeepseekV3Config(**shape | experts | ranks | sizes | groups)
                model = DeepseekV3ForCausalLM(config)
            case "gpt_oss":
                experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
                model = GptOssForCausalLM(GptOssConfig(**shape | experts | {"tie_word_embeddings": False}))
            case "recurrent":
                heads = {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
                heads |= {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
                kinds = {"layer_types": ["linear_attention", "full_attention"]}
                model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape | heads | kinds))
            case "mixtral":
                few = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
                model = MixtralForCausalLM(MixtralConfig(**shape, **few))
            case _:
                raise ValueError(kind)
    model.save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of single letters with a chat template, beside a model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({chr(97 + index): index for index in range(26)} | {"<unk>": 26}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(directory)


def run_config(model: Path, *, policies: Mapping[str, AnyPolicy] | None = None, **trainer: Any) -> RunConfig:
    """A configuration with one fully trained policy unless `policies` says otherwise."""
    return RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(model)),
        policies=policies or {"policy": PolicyConfig(learning_rate=1e-2)},
        engine=EngineConfig(max_context=512),
        trainer=TrainerConfig(**{"micro_batch_tokens": 8192, **trainer}),
    )


def make_rows(seed: int, count: int, *, prefix: int = 10, longest: int = 14) -> list[TrajectoryRow]:
    """Rows that share a preamble, some also more of it, with sampled tokens in several runs."""
    rng = np.random.default_rng(seed)
    preamble = rng.integers(0, VOCABULARY, prefix)
    rows = []
    for index in range(count):
        # Few different tokens, so that sampled prefixes coincide too.
        body = rng.integers(0, 3 if index % 2 else VOCABULARY, int(rng.integers(3, longest + 1)))
        token_ids = np.concatenate([preamble, body]).astype(np.int32)
        loss_mask = np.zeros(len(token_ids), np.bool_)
        loss_mask[prefix:] = rng.random(len(body)) < 0.6
        loss_mask[prefix] = True
        behavior = np.where(loss_mask, rng.normal(-3.5, 0.5, len(token_ids)), 0.0).astype(np.float32)
        turn_index = np.where(loss_mask, 0, -1).astype(np.int32)
        rows.append(
            TrajectoryRow(
                token_ids=token_ids,
                loss_mask=loss_mask,
                logprobs=behavior,
                turn_index=turn_index,
                spans=(),
                temperatures=None if index % 3 else turn_temperatures(loss_mask),
            )
        )
    return rows


def turn_temperatures(loss_mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Temperatures of a row whose turns, its runs of sampled tokens, have 0.7 and 1.3 in turn."""
    turn = np.cumsum(np.diff(loss_mask.astype(np.int8), prepend=0) == 1)
    return np.where(loss_mask, np.where(turn % 2, 0.7, 1.3), 1.0)


def divisors(row: Tokens) -> torch.Tensor:
    """What a forward pass over a row divides its logits by, [tokens - 1, 1]: those of a token stand before it."""
    import torch

    temperatures = np.ones(len(row)) if row.temperatures is None else row.temperatures
    return torch.from_numpy(temperatures[1:, None].astype(np.float32))


def make_samples(seed: int, count: int, **shape: int) -> list[TrainingSample]:
    """Training samples over `make_rows`, with one advantage each."""
    rng = np.random.default_rng(seed + 1)
    return [
        TrainingSample(
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            logprobs=row.logprobs,
            advantages=np.where(row.loss_mask, rng.normal(), 0.0).astype(np.float32),
            temperatures=row.temperatures,
            episode_id=f"e{index}",
        )
        for index, row in enumerate(make_rows(seed, count, **shape))
    ]


class Episodes:
    """Episodes held in memory, one trajectory each, and the batches over them."""

    def __init__(self, rows: Sequence[TrajectoryRow], *, policy: str = "policy", seed: int = 0) -> None:
        """Episode `e<k>` has row k; advantages are drawn from `seed`."""
        self.policy = policy
        self.locations: list[EpisodeDataLocation] = []
        self.trajectories = [Trajectory(seat="agent", index=0, policy=policy, rows=(row,), reward=0.0) for row in rows]
        self.advantages = np.random.default_rng(seed).normal(size=len(rows))

    @property
    def read(self) -> ReadUnits:
        """What a trainer reads units with."""
        return lambda units: [(self.trajectories[int(unit.episode_id[1:])],) for unit in units]

    def units(self) -> tuple[Unit, ...]:
        """One unit per episode."""
        return tuple(
            Unit(
                episode_id=f"e{index}",
                attempt=0,
                policy=self.policy,
                location=self.locations[index] if self.locations else EpisodeDataLocation("nowhere", 0),
                credits=(TrajectoryCredit("agent", 0, 0.0, float(advantage), 0.0),),
            )
            for index, advantage in enumerate(self.advantages)
        )

    async def write(self, run_directory: Path) -> None:
        """Put the episodes into the run's journal, where a trainer in another process finds them."""
        journal = SqliteJournal(run_directory / "journal")
        log = journal.turn_log("worker-0")
        for number, trajectory in enumerate(self.trajectories):
            entries = _entries(f"e{number}", trajectory)
            for entry in entries:
                log.append(entry)
            self.locations.append(EpisodeDataLocation(log.name, len(entries)))
        await log.flush()
        await journal.close()

    def batch(self, step_id: int = 1) -> TrainBatch:
        """All units as one batch."""
        return TrainBatch(
            step_id=step_id, policy=self.policy, units=self.units(), normalizer=8.0 * len(self.advantages)
        )


def _entries(episode_id: str, trajectory: Trajectory) -> list[JournalEntry]:
    """A one-row episode as journal entries: a turn per run of sampled tokens; context behind the last is left out."""
    (row,) = trajectory.rows
    begin = BeginEntry("test", "", episode_id, {}, 0, {trajectory.seat: trajectory.policy}, "train", "g0", 1, None)
    entries = [JournalEntry(episode_id, 0, "begin", b"", encode_body(begin))]
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0))
    end = 0
    for number, (start, stop) in enumerate(edges.reshape(-1, 2)):
        version = PolicyVersion(trajectory.policy, 0, 0)
        sampled = Tokens(
            token_ids=row.token_ids[start:stop],
            logprobs=row.logprobs[start:stop],
            spans=(VersionSpan(0, int(stop - start), version),),
        )
        turn = TurnEntry(
            seat=trajectory.seat,
            index=trajectory.index,
            policy=trajectory.policy,
            row=0,
            turn=number,
            context_ids=row.token_ids[end:start].astype("<i4").tobytes(),
            tokens=sampled.encode(),
            finish_reason="stop",
            text="",
            messages=(),
            temperature=1.0 if row.temperatures is None else float(row.temperatures[start]),
            seconds=0.0,
            started=0.0,
            parent_context=int(end),
        )
        entries.append(JournalEntry(episode_id, 0, f"r#{number}", b"", encode_body(turn)))
        end = stop
    return entries


def plans(config: RunConfig) -> tuple[EnginePlan, TrainerPlan]:
    """What `estimate_memory` takes."""
    return config.engine_plan, config.trainer_plan


def predict_trainer_memory(config: RunConfig) -> TrainerMemory:
    """The memory of a run's trainer with the sizes of its configuration."""

    from agentrl.learn.memory_prediction import TrainerMemoryPredictor  # imports torch

    return TrainerMemoryPredictor(config.trainer_plan).predict(
        config.engine.max_context, config.trainer.micro_batch_tokens
    )
