"""Tiny models, engines of every kind behind one fixture, and published weights, for the contract suite."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from agentrl.core.errors import EngineError
from agentrl.core.files import sha256_of
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.canary import Canary
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter
from agentrl.testing.virtual_time import simulate
from tests.contract.scripted_program import VOCABULARY, scripted_engine
from tests.contract.warm_processes import WarmPlacement

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.core.tokens import Completion

START = {"solver": PolicyVersion("solver", 0, 0), "proposer": PolicyVersion("proposer", 0, 0)}
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
_HYBRID = {**_SHAPE, "num_hidden_layers": 4}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "qwen3_sharded": lambda: transformers.Qwen3Config(**_SHAPE),
    "wide": lambda: transformers.Qwen3Config(
        **{**_SHAPE, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1, "head_dim": 144}
    ),
    "llama": lambda: transformers.LlamaConfig(**{**_SHAPE, "tie_word_embeddings": False}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "many_experts": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE, moe_intermediate_size=8, num_experts=300, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{name: value for name, value in _SHAPE.items() if name != "head_dim"} | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**_SHAPE, "tie_word_embeddings": False}, num_local_experts=4, num_experts_per_tok=2, sliding_window=512
    ),
    "phi3": lambda: transformers.Phi3Config(**_SHAPE, pad_token_id=0),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{name: value for name, value in _SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_HYBRID, **_DELTA_NET),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_HYBRID,
        **_DELTA_NET,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=8,
        n_groups=1,
        chunk_size=16,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(**{**_SHAPE, "num_hidden_layers": 3, "lru_width": 64}),
    "bloom": lambda: transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCABULARY),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=512, initializer_range=0.2
    ),
}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass
class ModelZoo:
    """Random models by architecture and seed, saved once per session; of a sharded one, what a run starts on is."""

    root: Path
    default: str = "qwen3"
    saved: dict[tuple[str, int], Path] = field(default_factory=dict)

    def directory(self, architecture: str = "", seed: int = 0) -> Path:
        """A Hugging Face directory; another seed gives other weights."""
        key = architecture, _ = (architecture or self.default, seed)
        if key not in self.saved:
            torch.manual_seed(seed)
            config = _ARCHITECTURES[architecture]()
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            self.saved[key] = self.root / f"{architecture}-{seed}"
            in_shards = architecture.endswith("_sharded") and seed == 0
            model.save_pretrained(self.saved[key], max_shard_size="100KB" if in_shards else "1GB")
        return self.saved[key]

    def load(self, architecture: str = "", seed: int = 0) -> Any:
        """The model itself, to compare with."""
        directory = self.directory(architecture, seed)
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def full(self, version: PolicyVersion, architecture: str = "", seed: int = 1) -> WeightsRef:
        """Full weights as a trainer publishes them."""
        directory = self.directory(architecture, seed)
        return WeightsRef(
            version=version, path=str(directory), kind="full", sha256=digest(directory / "model.safetensors")
        )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def canary_of(model: Any, start: Any, *, contexts: int = 4) -> Canary:
    """What a trainer with these weights writes beside them, if it began with those of `start`."""
    rows, tokens = prompt(16 * contexts, seed=99).reshape(contexts, 16), prompt(24, seed=98)
    with torch.no_grad():
        ends = [each(input_ids=torch.from_numpy(rows).long(), use_cache=False).logits[:, -1] for each in (model, start)]
    logprobs, start_logprobs = (end.float().log_softmax(-1)[:, tokens.astype(np.int64)].numpy() for end in ends)
    return Canary(contexts=rows, token_ids=tokens, logprobs=logprobs, start_logprobs=start_logprobs)


def write_full(
    directory: Path, version: PolicyVersion, tensors: Mapping[str, torch.Tensor], *, canary: Canary | None = None
) -> WeightsRef:
    """Publish tensors as full weights."""
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata=canary.metadata() if canary else None)
    return WeightsRef(version=version, path=str(directory), kind="full", sha256=digest(directory / "model.safetensors"))


def write_adapter(
    directory: Path,
    version: PolicyVersion,
    model: Any,
    *,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    config: Mapping[str, object] | None = None,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    metadata: dict[str, str] | None = None,
) -> WeightsRef:
    """Publish a random LoRA adapter in PEFT's format; `change` may spoil its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = 0.3 * torch.randn(rank, module.in_features, generator=generator)
            tensors[f"{key}.lora_B.weight"] = 0.3 * torch.randn(module.out_features, rank, generator=generator)
    change(tensors)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata=metadata)
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**written, **(config or {})}))
    files = (directory / "adapter_model.safetensors", directory / "adapter_config.json")
    return WeightsRef(version=version, path=str(directory), kind="adapter", sha256=sha256_of(*files))


def request(
    name: str,
    token_ids: list[int] | Int32Array,
    *,
    seed: int = 0,
    sampled_before: int = 0,
    priority: int = 0,
    row: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """An engine call; sampling as keywords."""
    return GenerateRequest(
        request_id=name,
        token_ids=np.asarray(token_ids, np.int32),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        seed=seed,
        sampled_before=sampled_before,
        priority=priority,
        row=row,
    )


def prompt(length: int, seed: int = 0) -> Int32Array:
    """Random context tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)


def plain_logprobs(model: Any, token_ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """Log-probabilities `[T - 1, V]` of a plain forward pass without any cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False).logits[0, :-1]
    scores: Float32Array = torch.log_softmax(logits.float() / temperature, dim=-1).numpy()
    return scores


class MakeEngine(Protocol):
    """Makes an engine of one kind that serves `START`."""

    kind: str

    def __call__(self, *, max_context: int = 512, refresh: str = "token", slots: int = 16) -> Engine:
        """A new engine; calls take long enough to be caught in flight."""
        ...

    def publish(self, version: PolicyVersion, seed: int) -> WeightsRef:
        """Weights that the engine accepts as `version`."""
        ...

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test, in virtual time where the engine waits for nothing real."""
        ...


class MakeScripted:
    """Replies keyed by the seed, half a millisecond a token."""

    kind = "scripted"

    def __call__(self, *, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Engine:
        return scripted_engine(START, max_context=max_context, refresh=refresh)

    def publish(self, version: PolicyVersion, seed: int) -> WeightsRef:
        """No file is read."""
        return WeightsRef(version=version, path="", kind="full", sha256="")

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In virtual time: a slow machine does not end a call early."""
        simulate(main, seed=0)


class MakeReplicas(MakeScripted):
    """Three scripted engines as one."""

    kind = "replicas"

    def __call__(self, *, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Engine:
        one = super().__call__
        return EngineRouter([one(max_context=max_context, refresh=refresh) for _ in range(3)])


class MakeEmbedded:
    """A tiny Qwen3."""

    kind = "embedded"

    def __init__(self, zoo: ModelZoo) -> None:
        self._zoo = zoo

    def __call__(self, *, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Engine:
        return EmbeddedEngine.load(
            str(self._zoo.directory()), versions=START, slots=slots, max_context=max_context, refresh=refresh
        )

    def publish(self, version: PolicyVersion, seed: int) -> WeightsRef:
        """Full weights of another random model."""
        return self._zoo.full(version, seed=seed)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In real time: a thread computes."""
        asyncio.run(main())


class MakeProcess:
    """An engine of another kind, in a process of its own."""

    def __init__(self, inner: MakeScripted | MakeEmbedded, factory: str, **arguments: Any) -> None:
        self.kind = f"{inner.kind} in a process"
        self.publish = inner.publish
        self._factory = factory
        self._arguments = arguments

    def __call__(self, *, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Engine:
        options = {"max_context": max_context, "refresh": refresh, "slots": slots, **self._arguments}
        return ProcessEngine(ChildProgram(self._factory, options), START, placement=WarmPlacement())

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In real time: another process computes."""
        asyncio.run(main())


def load_engine(zoo: ModelZoo, architecture: str = "", **options: Any) -> EmbeddedEngine:
    """An embedded engine over a tiny model."""
    settings = {"versions": START, "slots": 8, "max_context": 256, **options}
    return EmbeddedEngine.load(str(zoo.directory(architecture)), **settings)


def version(step: int, policy: str = "solver") -> PolicyVersion:
    """Lineage 0."""
    return PolicyVersion(policy, 0, step)


def token_logprobs(model: Any, context: Int32Array, completion: Completion) -> Float32Array:
    """Log-probabilities of the completion's tokens by a plain forward pass."""
    scores = plain_logprobs(model, np.concatenate([context, completion.token_ids]))[len(context) - 1 :]
    taken: Float32Array = np.take_along_axis(scores, completion.token_ids[:, None].astype(np.int64), 1)[:, 0]
    return taken


def check_logprobs(model: Any, context: Int32Array, completion: Completion) -> None:
    """The completion was sampled by `model`, without filters."""
    np.testing.assert_allclose(completion.logprobs, token_logprobs(model, context, completion), atol=2e-4)


class StepClock:
    """A clock that moves by a second each time it is read.

    The embedded engine then comes back to the event loop after every forward pass: a test can act after a given number
    of tokens, however busy the machine is.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """A second later than last time."""
        self._now += 1.0
        return self._now

    def wall(self) -> float:
        """No wall."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Not used."""


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds."""
    while not condition():
        await asyncio.sleep(0)


async def update_after(engine: EmbeddedEngine, tokens: int, weights: WeightsRef) -> None:
    """New weights for calls in flight when they have sampled so many more tokens; none while the files are read."""
    before = engine.stats.sampled_tokens
    await until(lambda: engine.stats.sampled_tokens >= before + tokens)
    engine.interrupt()
    async with engine.between_passes:
        engine._batcher.plan = lambda: None  # type: ignore[method-assign]
    await engine.serve([weights])
    del engine._batcher.plan
    engine.interrupt()


async def check_refused(engine: EmbeddedEngine, zoo: ModelZoo, weights: WeightsRef, message: str) -> None:
    """The engine refuses the weights and goes on serving what it served."""
    session, context = engine.open("s", "solver"), prompt(12)
    with pytest.raises(EngineError, match=message):
        await engine.serve([weights])
    completion = await session.generate(request("r", context))
    assert completion.spans[0].version == START["solver"]
    check_logprobs(zoo.load(), context, completion)
    await engine.close()
