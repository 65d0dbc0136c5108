"""What the benchmarks of vLLM share: models, published weights, requests, and a vLLM that is watched.

Imported after `agentrl.engines.vllm.process`, which prepares the process; see `agentrl/engines/vllm/process.py`.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.core.files import WEIGHT_FILES, sha256_of
from agentrl.core.ports import Engine, GenerateRequest, Refresh, SamplingParams
from agentrl.core.records import Completion, PolicyVersion, WeightsRef
from agentrl.engines.canary import Canary
from agentrl.engines.vllm.startup import VllmSettings
from benchmarks.embedded_engine import random_adapter

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array

RANK = 8
ADAPTER_FILE, ADAPTER_CONFIG = WEIGHT_FILES["adapter"]


class WatchedVllm:
    """One `AsyncLLM` for several engines, which do not stop it: says when tokens came, and how often it was paused."""

    def __init__(self, llm: Any) -> None:
        self.bare = llm
        self.pauses = 0
        self.gaps: list[tuple[float, float]] = []
        """Between two tokens of one request: when the one came, and when the next."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    async def pause_generation(self, **settings: Any) -> None:
        """Counted."""
        self.pauses += 1
        await self.bare.pause_generation(**settings)

    async def generate(self, prompt: Any, parameters: Any, name: str, **settings: Any) -> AsyncIterator[Any]:
        """Token by token, whatever the client asked for, with the time of each."""
        parameters.stream_interval = 1
        last = 0.0
        async for output in self.bare.generate(prompt, parameters, name, **settings):
            if output.outputs[0].token_ids:
                now = time.perf_counter()
                if last:
                    self.gaps.append((last, now))
                last = now
            yield output

    def gaps_within(self, windows: Sequence[tuple[float, float]]) -> list[list[float]]:
        """Milliseconds of the gaps that overlap each of these windows, which are in order."""
        found: list[list[float]] = []
        ordered = sorted(self.gaps)
        longest = max((stop - start for start, stop in ordered), default=0.0)
        starts = np.array([start for start, _ in ordered])
        for begin, end in windows:
            first, last = np.searchsorted(starts, [begin - longest, end])
            found.append([1e3 * (stop - start) for start, stop in ordered[first:last] if stop > begin])
        return found

    def shutdown(self) -> None:
        """Others still need it."""


def settings_for(
    *,
    slots: int,
    max_context: int,
    refresh: Refresh,
    adapter_slots: int,
    max_staleness: Mapping[str, int] | None = None,
    keep_kv: bool = True,
) -> VllmSettings:
    """Settings of a vLLM engine."""
    return VllmSettings(
        slots=slots,
        max_context=max_context,
        refresh=refresh,
        keep_kv=keep_kv,
        adapter_slots=adapter_slots,
        max_rank=RANK,
        max_staleness=max_staleness or {},
    )


def random_qwen3(directory: Path, *, hidden: int, layers: int, vocabulary: int = 512, positions: int = 1024) -> Path:
    """A Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        intermediate_size=3 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


class RunFactories:
    """Adapters as a trainer publishes them, each under a new version, with a canary or without."""

    def __init__(self, model_path: Path, root: Path, count: int) -> None:
        def load() -> PreTrainedModel:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            return model

        self._written: list[dict[bool, tuple[Path, str]]] = []
        for number in range(count):
            plain, probed = root / f"a{number}", root / f"a{number}p"
            digest = random_adapter(load(), plain, number, RANK)
            shutil.copytree(plain, probed)
            file = probed / ADAPTER_FILE
            add_probe(file, PeftModel.from_pretrained(load(), plain), load())
            self._written.append({False: (plain, digest), True: (probed, sha256_of(file, probed / ADAPTER_CONFIG))})
        self._step = 0

    def publish(self, policy: str, *, probed: bool = True) -> WeightsRef:
        """The next version's; files lie where they are, as after a trainer's step."""
        self._step += 1
        directory, digest = self._written[self._step % len(self._written)][probed]
        version = PolicyVersion(policy, 0, self._step)
        return WeightsRef(version=version, path=str(directory), kind="adapter", sha256=digest)


def add_probe(file: Path, model: Any, start: Any) -> None:
    """Give published weights the canary of `model`, as large as a trainer's."""
    random = np.random.default_rng(0)
    vocabulary = int(start.config.vocab_size)
    contexts, tokens = (random.integers(0, vocabulary, shape).astype(np.int32) for shape in ((1, 16), 128))
    with torch.no_grad():
        ends = [each(input_ids=torch.from_numpy(contexts).long()).logits[:, -1] for each in (model, start)]
    logprobs, start_logprobs = (end.log_softmax(-1)[:, tokens.astype(np.int64)].numpy() for end in ends)
    canary = Canary(contexts=contexts, token_ids=tokens, logprobs=logprobs, start_logprobs=start_logprobs)
    save_file(load_file(file), file, metadata={"format": "pt", **canary.metadata()})


class CountingModel:
    """A model whose samples show which weights drew them, and whether one is missing or came twice.

    After token t comes t + 1 or t + 1 + `HALF`: counting modulo `HALF`, which no weights change. Which of the two it is
    says chance: even by even versions, 9 to 1 by odd ones, so that a token's log-probability names its version.
    """

    HALF = 64
    _SIZE = 2 * HALF
    _SCALE = 3.0
    """With RMSNorm's sqrt(128): all other tokens together have a probability of 1e-12."""

    def __init__(self, root: Path) -> None:
        self.directories: list[Path] = []
        for parity in (0, 1):
            self.directories.append(self._write(root / f"version-{parity}", parity))
        self._digests = [_digest(directory / "model.safetensors") for directory in self.directories]

    def _write(self, directory: Path, parity: int) -> Path:
        size, half = self._SIZE, self.HALF
        config = Qwen3Config(
            hidden_size=size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            vocab_size=size,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        after = torch.arange(size)
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.eye(size))
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            head = torch.zeros(size, size)
            head[(after + 1) % half, after] = self._SCALE
            # the difference of logits, over what RMSNorm makes of a one-hot row
            head[(after + 1) % half + half, after] = self._SCALE - parity * float(np.log(9.0)) / size**0.5
            model.lm_head.weight.copy_(head)
        model.save_pretrained(directory)
        start = Qwen3ForCausalLM.from_pretrained(self.directories[0]) if self.directories else model
        add_probe(directory / "model.safetensors", model, start)
        return directory

    def weights(self, policy: str, step: int) -> WeightsRef:
        """Full weights of a version."""
        return WeightsRef(
            version=PolicyVersion(policy, 0, step),
            path=str(self.directories[step % 2]),
            kind="full",
            sha256=self._digests[step % 2],
        )

    def faults(self, context: Int32Array, completion: Completion) -> int:
        """Tokens that are missing, come twice, or were drawn by other weights than their span says."""
        tokens = completion.token_ids.astype(np.int64)
        counted = (int(context[-1]) + 1 + np.arange(len(tokens))) % self.HALF
        faults = int((tokens % self.HALF != counted).sum())
        at = 0
        for span in completion.spans:
            faults += span.start != at
            drawn, at = slice(span.start, span.stop), span.stop
            odd = span.version.step % 2
            expected = np.log(np.where(tokens[drawn] < self.HALF, 0.9, 0.1) if odd else np.full(at - span.start, 0.5))
            faults += int((np.abs(completion.logprobs[drawn] - expected) > 1e-3).sum())
        return faults + (at != len(tokens))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Requests:
    """Calls with prompts and names that nobody has used before."""

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._sent = 0

    def prompt(self, length: int) -> Int32Array:
        """Random tokens."""
        return self._random.integers(0, self._vocabulary, length).astype(np.int32)

    def call(self, prompt: Int32Array, new: int) -> GenerateRequest:
        """A call for exactly `new` tokens."""
        self._sent += 1
        sampling = SamplingParams(max_tokens=new)
        return GenerateRequest(request_id=f"r{self._sent}", token_ids=prompt, sampling=sampling, seed=self._sent)

    async def ask(self, engine: Engine, policy: str, prompt: Int32Array, new: int) -> Completion:
        """One call in a session of its own."""
        session = engine.open(f"s{self._sent}", policy)
        try:
            return await session.generate(self.call(prompt, new), _listen)
        finally:
            session.close()


def _listen(request_id: str, token_ids: Sequence[int], logprobs: Sequence[float], version: PolicyVersion) -> None:
    """Partials, as a run takes them."""


def at_percent(values: Sequence[float], percent: float) -> float:
    """A percentile."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> str:
    """`median [first quartile, third quartile]`."""
    if len(values) < 2:
        return ", ".join(f"{value:.3f}" for value in values)
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
