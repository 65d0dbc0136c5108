"""The engine of a reward model: scores contexts instead of continuing them.

A Hugging Face sequence or token classification model whose backbone is causal, so that its head gives a score of the
context up to each token. Runs in a process of its own, like other engines (`remote/engine_server.py`), and samples
nothing: `generate` returns `Completion.values`.

Calls that wait are computed together, in one forward pass over the new tokens of each. Keys and values stay after a
call, so that the next turn of a conversation costs its own tokens; the oldest leave when `cache_tokens` are full.

Invariants: the model, its caching and its masks are checked at load against its own forward pass, instead of keeping a
list of supported models; a score depends on the context alone, up to rounding, and exactly with `fixed_shapes`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, EngineError, ModelError
from agentrl.core.ports import EngineCapabilities
from agentrl.core.tokens import Completion, Tokens
from agentrl.engines.models import longest_context, model_dtype, read_reward_model

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from transformers import PreTrainedModel

    from agentrl.core.ports import GenerateRequest, NewTokensCallback, TokenScores
    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef

MAX_ROWS = 32
"""Maximum number of contexts in a forward pass."""
MAX_PASS_TOKENS = 1 << 14
"""Maximum number of tokens in a forward pass, padding included, unless one context alone is longer."""
_CHECK_CONTEXTS = ((1, 4, 2, 3, 0, 2, 1), (3, 1, 2))
"""Contexts of the check at load."""


@dataclass(slots=True, eq=False)
class KeptContext:
    """A context whose keys, values and scores are kept."""

    token_ids: Int32Array
    values: Float32Array
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [heads, tokens, dim]."""


@dataclass(slots=True, eq=False)
class _Call:
    """A context to score."""

    token_ids: Int32Array
    future: asyncio.Future[Completion]
    priority: int = 0
    start: int = 0
    """Number of tokens that are computed already."""
    kept: KeptContext | None = None
    """The context that has them."""


@dataclass(slots=True, eq=False)
class ContextCache:
    """The newest contexts, up to a number of tokens."""

    max_tokens: int
    _contexts: list[KeptContext] = field(default_factory=list)
    """Oldest first."""

    def longest_prefix(self, token_ids: Int32Array) -> tuple[int, KeptContext | None]:
        """Return the context that shares the most tokens with a new one from the start on, and their number."""
        best: tuple[int, KeptContext | None] = (0, None)
        for context in reversed(self._contexts):
            length = min(len(context.token_ids), len(token_ids))
            if length > best[0]:
                different = np.flatnonzero(context.token_ids[:length] != token_ids[:length])
                prefix_length = int(different[0]) if len(different) else length
                if prefix_length > best[0]:
                    best = prefix_length, context
        return best

    def keep(self, context: KeptContext, prefix: KeptContext | None) -> None:
        """Keep a context as the newest one; it replaces its prefix."""
        self._contexts = [other_context for other_context in self._contexts if other_context is not prefix] + [context]
        total = sum(len(other_context.token_ids) for other_context in self._contexts)
        while total > self.max_tokens:
            total -= len(self._contexts.pop(0).token_ids)


class RewardModel:
    """A causal reward model that computes scores of several contexts at once, from kept keys and values.

    Raises:
        ModelError: its head does not give one score per token, or its own forward pass gives other scores.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self.device = model.device
        labels = int(model.config.num_labels or 0)
        head = getattr(model, "score", None) or getattr(model, "classifier", None)
        if labels not in (1, 2) or not isinstance(head, nn.Linear):
            raise ModelError(
                f"{path}: a reward model has a linear head with one output, its score, or two, of which the second is "
                f"the probability of a good step; this one has {labels} outputs in a {type(head).__name__}"
            )
        self._head: nn.Linear = head
        self._model = model
        self._backbone: nn.Module = getattr(model, model.base_model_prefix)
        self._pad = int(model.config.get_text_config().pad_token_id or 0)
        self._check(path)

    @torch.inference_mode()
    def compute(self, calls: Sequence[tuple[Int32Array, int, KeptContext | None]]) -> list[KeptContext]:
        """Compute contexts, each from a number of tokens of a kept one."""
        past, new = [start for _, start, _ in calls], [len(ids) - start for ids, start, _ in calls]
        most_past, most_new = max(past), max(new)
        inputs = torch.full((len(calls), most_new), self._pad, dtype=torch.long)
        mask = torch.zeros((len(calls), most_past + most_new), dtype=torch.long)
        for row, (ids, start, _) in enumerate(calls):
            inputs[row, : new[row]] = torch.from_numpy(ids[start:].astype(np.int64))
            mask[row, most_past - start : most_past + new[row]] = 1
        positions = torch.arange(most_new)[None] + torch.tensor(past)[:, None]
        cache = DynamicCache()
        if most_past:
            self._fill(cache, calls, most_past)
        hidden = self._backbone(
            input_ids=inputs.to(self.device),
            attention_mask=mask.to(self.device),
            position_ids=positions.to(self.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        scores = self._scores(self._head(hidden))
        results = []
        for row, (ids, start, prefix) in enumerate(calls):
            first, last = most_past - start, most_past + new[row]
            cache_layers: list[Any] = cache.layers
            layers = [(layer.keys[row, :, first:last], layer.values[row, :, first:last]) for layer in cache_layers]
            before = prefix.values[:start] if prefix is not None else np.zeros(0, np.float32)
            values = np.concatenate([before, scores[row, : new[row]]])
            results.append(
                KeptContext(ids, values, [(keys.clone(), value_cache.clone()) for keys, value_cache in layers])
            )
        return results

    def _fill(
        self, cache: DynamicCache, calls: Sequence[tuple[Int32Array, int, KeptContext | None]], max_start: int
    ) -> None:
        """Write the kept keys and values into a cache, right-aligned."""
        example = next(prefix for _, _, prefix in calls if prefix is not None)
        for number, pair in enumerate(example.layers):
            padded_parts = [
                torch.zeros((len(calls), len(part), max_start, part.shape[-1]), dtype=part.dtype, device=part.device)
                for part in pair
            ]
            for row, (_, start, prefix) in enumerate(calls):
                if prefix is not None and start:
                    for target, part in zip(padded_parts, prefix.layers[number], strict=True):
                        target[row, :, max_start - start :] = part[:, :start]
            keys, values = padded_parts
            cache.update(keys, values, number)

    def _scores(self, logits: Tensor) -> Float32Array:
        """Return the score at each token: the only output, or the probability of the second of two."""
        values = logits.float()
        scores = values[..., 0] if values.shape[-1] == 1 else values.softmax(-1)[..., 1]
        return scores.cpu().numpy()

    @torch.inference_mode()
    def _check(self, path: str) -> None:
        """Compare scores computed together, in pieces, with the model's own."""
        vocabulary = self._model.config.get_text_config().vocab_size
        contexts = [np.array(ids, np.int32) * 7 % vocabulary for ids in _CHECK_CONTEXTS]
        try:
            first = self.compute([(ids[:2], 0, None) for ids in contexts])
            pieces = self.compute([(ids, 2, prefix) for ids, prefix in zip(contexts, first, strict=True)])
            for ids, piece in zip(contexts, pieces, strict=True):
                tokens = torch.from_numpy(ids.astype(np.int64))[None].to(self.device)
                logits = self._model(input_ids=tokens).logits
                reference = self._scores(logits)[0] if logits.dim() == 3 else self._scores(logits)
                is_close = np.allclose(
                    piece.values[-len(reference) :], reference, rtol=0.02, atol=_tolerance(self._model.dtype)
                )
                if not is_close:
                    raise ModelError(
                        f"{path}: scored in pieces, as a conversation grows, this model gives other scores than its "
                        "own forward pass: it is no causal model, or has state besides keys and values. Use a reward "
                        "model with a causal backbone"
                    )
        except (RuntimeError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ModelError(
                f"{path}: this model cannot be computed in pieces ({type(error).__name__}: {error})"
            ) from error


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype is torch.float32 else 0.05


class RewardModelEngine:
    """An engine that scores steps with a reward model and samples nothing. Make one with `load`."""

    def __init__(self, model: RewardModel, *, max_context: int, cache_tokens: int, fixed_shapes: bool) -> None:
        self.capabilities = EngineCapabilities(
            name="reward model",
            refresh=frozenset(),
            expert_routing=False,
            sampling_mask=False,
            adapters=0,
            max_context=max_context,
        )
        self._model = model
        self._cache = ContextCache(0 if fixed_shapes else cache_tokens)
        self._rows = 1 if fixed_shapes else MAX_ROWS
        self._waiting: list[_Call] = []
        self._running: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentrl-reward-model")
        self._clock = SystemClock()
        self._busy = 0.0

    @classmethod
    def load(
        cls,
        *,
        versions: Mapping[str, PolicyVersion],
        model_path: str,
        device: str,
        cache_tokens: int,
        fixed_shapes: bool,
        threads: int,
    ) -> RewardModelEngine:
        """Load a reward model, and check that it can be computed in pieces.

        Args:
            versions: unused; the weights never change.
            model_path: directory of the model.
            device: device to compute on.
            cache_tokens: tokens of contexts to keep between calls.
            fixed_shapes: whether each context is computed alone and whole, so that its scores are always the same.
            threads: threads to compute with on a CPU.

        Raises:
            ModelError: the directory holds no reward model, or one that is not causal.
        """
        torch.set_num_threads(threads)
        dtype = model_dtype(model_path, "auto", torch.device(device))
        model = read_reward_model(model_path, dtype=dtype)
        module: nn.Module = model
        module.to(device)
        context = longest_context(model_path, embedded=False) or 1 << 20
        return cls(
            RewardModel(model, model_path), max_context=context, cache_tokens=cache_tokens, fixed_shapes=fixed_shapes
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> RewardModelSession:
        return RewardModelSession(self)

    async def score_context(self, request: GenerateRequest) -> Completion:
        """Score a context; one that is too long has the finish reason `length` and no values."""
        count = len(request.token_ids)
        if count > self.capabilities.max_context:
            return _completion(0, None)
        call = _Call(request.token_ids, asyncio.get_running_loop().create_future(), request.priority)
        self._waiting.append(call)
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run(), name="agentrl-reward-model")
        return await call.future

    async def _run(self) -> None:
        while batch := self._next_batch():
            start_s = self._clock.monotonic()
            try:
                contexts = await asyncio.get_running_loop().run_in_executor(self._worker, self._compute, batch)
            except Exception as error:  # noqa: BLE001 - the callers get any failure of the model
                failure = EngineError(f"the reward model failed: {type(error).__name__}: {error}")
                for call in batch:
                    if not call.future.done():
                        call.future.set_exception(failure)
                continue
            finally:
                self._busy += self._clock.monotonic() - start_s
            for call, context in zip(batch, contexts, strict=True):
                if context is not call.kept:
                    grown = call.kept is not None and call.start == len(call.kept.token_ids)
                    self._cache.keep(context, call.kept if grown else None)
                if not call.future.done():
                    call.future.set_result(_completion(call.start, context.values[: len(call.token_ids)]))

    def _next_batch(self) -> list[_Call]:
        """Take waiting calls, the most urgent first, as many as fit into one forward pass."""
        self._waiting = sorted((call for call in self._waiting if not call.future.done()), key=lambda c: c.priority)
        batch, longest = list[_Call](), 0
        for call in self._waiting[: self._rows]:
            longest = max(longest, len(call.token_ids))
            if batch and longest * (len(batch) + 1) > MAX_PASS_TOKENS:
                break
            call.start, call.kept = self._cache.longest_prefix(call.token_ids)
            batch.append(call)
        del self._waiting[: len(batch)]
        return batch

    def _compute(self, batch: Sequence[_Call]) -> list[KeptContext]:
        """Compute the contexts of calls; those that are kept whole need no forward pass."""
        missing = [call for call in batch if call.start < len(call.token_ids)]
        results = iter(self._model.compute([(c.token_ids, c.start, c.kept) for c in missing]) if missing else ())
        return [
            call.kept if call.kept is not None and call.start == len(call.token_ids) else next(results)
            for call in batch
        ]

    # --- control ------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """Do nothing: a call ends at once, or is awaited."""

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Do nothing: a reward model has one set of weights."""

    async def ping(self) -> None:
        return None

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        raise EngineCapabilityError("a reward model gives no log-probabilities")

    def busy_seconds(self) -> float:
        return self._busy

    async def close(self) -> None:
        for call in self._waiting:
            call.future.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)


@dataclass(frozen=True, slots=True, eq=False)
class RewardModelSession:
    """A session without state: the engine keeps the contexts."""

    engine: RewardModelEngine

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        """Score the context of a request."""
        return await self.engine.score_context(request)

    async def wait_for_room(self) -> None: ...

    def hold(self, version: PolicyVersion) -> None: ...

    def close(self) -> None: ...


def _completion(cached: int, values: Float32Array | None) -> Completion:
    tokens = Tokens.context(np.zeros(0, np.int32)).with_column("values", values)
    return Completion.of(tokens, "length" if values is None else "stop", cached)
