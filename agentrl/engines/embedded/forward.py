"""The model of the embedded engine, its forward passes over slots, and the check that it supports them.

`ForwardPassRunner` turns slots into model inputs, runs the model, samples, and writes the results to the columns, in
the engine's worker thread. The event loop plans which slots run and which weights serve them.

Invariants: rows of a pass do not affect one another; padding is written to a position that is never read; the n-th
token of a request depends only on (seed, n) and its distribution, never on the rest of the batch; a logprob is that of
the processed distribution (after temperature and filters, renormalized); a token outside the kept set is never sampled.

Models differ in how they use a cache, a mask and positions. Instead of keeping a list of supported ones,
`check_slots_match_forward` makes the model prefill two ragged contexts in pieces and decode, and compares the result
with a plain forward pass: for short contexts, and for contexts that grow beyond a length at which the model may change
its computation.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, ModelError
from agentrl.core.machine import machine_memory
from agentrl.core.ports import TokenScores
from agentrl.engines.embedded.slots import PrefixCopy, RowSamplingParameters, SlotColumns, SlotKvCache
from agentrl.engines.models import (
    affordable_tokens,
    cache_argument,
    check_finite_logits,
    check_lengths,
    computing_in_float32,
    frozen_weights,
    keep_cap_of_scores,
    kv_bytes_per_token,
    num_layers_with_state,
    random_tokens,
    read_model,
    state_bytes_per_slot,
    varied,
)
from agentrl.engines.version_table import LiveVersion
from agentrl.engines.weights.merging import adapter_products, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.clock import Clock
    from agentrl.engines.embedded.adapter_bank import AdapterBank
    from agentrl.engines.embedded.capture import ExpertRoutingRecorder, SamplingMaskRecorder
    from agentrl.engines.embedded.slots import Slots
    from agentrl.engines.weights.reading import AdapterWeights

_ATTENTION_NAME = "agentrl_grouped"
BASE = -1
"""Adapter index of rows that use no adapter."""
_CONTEXTS = ((0, 5, 1, 3, 2, 4, 1), (0, 2, 0, 1, 4))
_PIECES = ((4, 2), (2, 2), (1, 1))
"""Number of tokens of each context that each pass of the check computes."""
_SLOT_TOLERANCE = 2e-3
"""Largest difference of logits over slots from those of a plain pass, relative to their spread; rounding in float32
makes about 1e-5."""
_STATE_TOLERANCE = 1e-2
"""The same for recurrent layers, whose gates enlarge rounding, to 2e-3 in random models of Zamba2."""
_ROW_TOKENS = 9


def load_model(
    path: str, *, max_context: int, dtype: torch.dtype, device: str, shares_weights: bool = False
) -> PreTrainedModel:
    """Load a local Hugging Face causal LM directory for sampling.

    Args:
        path: the directory.
        max_context: longest context in tokens.
        dtype: dtype of the parameters.
        device: device of the model.
        shares_weights: use the weights of a trainer in this process, if it has frozen ones on the CPU. On a GPU
            transformers copies them.

    Raises:
        ModelError: the directory holds no such model, or one that cannot serve contexts of `max_context`.
    """
    is_shared = shares_weights and torch.device(device).type == "cpu"
    weights = frozen_weights(path, dtype, torch.device(device)) if is_shared else None
    return prepare_for_sampling(read_model(path, dtype=dtype, max_context=max_context, weights=weights), device)


def prepare_for_sampling(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    """Move a model to its device, without gradients or dropout, with an attention that fits the slots.

    On the CPU, attention does not repeat keys and values; models with their own attention keep it.
    """
    module: nn.Module = model
    module.to(device).requires_grad_(False).train(False)
    keep_cap_of_scores(model)
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_ATTENTION_NAME, _grouped_attention)
        model.set_attn_implementation(_ATTENTION_NAME)
    return model


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention of queries `[B, heads, t, dim]` over KV `[B, kv_heads, T, dim]`, like `sdpa`."""
    if attention_mask is None or unused.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **unused
        )
        return output
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


@dataclass(slots=True, eq=False)
class ServedModelCopy:
    """One copy of the model's weights."""

    model: PreTrainedModel
    state: dict[str, Tensor]
    """Parameters and persistent buffers, keyed by their names in the checkpoint."""
    bank: AdapterBank | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Wrap a loaded model."""
        return cls(model, dict(model.state_dict()))

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Copy checked weights into the model."""
        with torch.inference_mode():
            for name, tensor in weights.items():
                if name in self.state:
                    self.state[name].copy_(tensor)

    def save(self) -> Callable[[], None]:
        """Save the current weights; returns a function that restores them."""
        return partial(self.overwrite, {name: tensor.clone() for name, tensor in self.state.items()})


class MergedModelCopy(ServedModelCopy):
    """A copy into which adapters are merged, one at a time. It shares all other weights with the base copy."""

    def __init__(self, model: PreTrainedModel, base: ServedModelCopy) -> None:
        """Share the weights of `base`; `model` is of its architecture, and its own weights are dropped."""
        super().__init__(model, {})
        self._base = base
        self._adapter: AdapterWeights | None = None
        self._own: dict[str, Tensor] = {}
        """Weights that an adapter has changed, by name."""
        for name, weight in base.state.items():
            self._place(name, weight)
        for name, buffer in base.model.named_buffers():
            if name not in base.state:  # it is not stored, and no initialization has filled it here
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._buffers[leaf] = buffer.clone()

    def merge(self, adapter: AdapterWeights | None) -> None:
        """Merge a checked adapter into the weights of the base, in place of an earlier one."""
        self._adapter, stale = adapter, dict(self._own)
        with torch.no_grad():
            for name, product in () if adapter is None else adapter_products(adapter, self.model.device):
                stale.pop(name, None)
                if name not in self._own:
                    self._own[name] = torch.empty_like(self._base.state[name])
                    self._place(name, self._own[name])
                base = self._base.state[name]
                self._own[name].copy_(merge(base, product, base.dtype))
            for name, weight in stale.items():
                weight.copy_(self._base.state[name])

    def save(self) -> Callable[[], None]:
        return partial(self.merge, self._adapter)

    def _place(self, name: str, weight: Tensor) -> None:
        """Let the model compute with a weight."""
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
        else:
            module._buffers[leaf] = weight
        self.state[name] = weight


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddedVersion(LiveVersion):
    """A version the embedded engine can sample from."""

    model_copy: ServedModelCopy
    adapter: int = BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPassPlan:
    """One forward pass of one model: the number of tokens of each slot, and its adapter."""

    model: PreTrainedModel
    bank: AdapterBank | None
    slots: Slots  # [B], ascending
    counts: NDArray[np.int64]  # [B]; 0 only where `fixed`: the row keeps its place and computes nothing
    adapters: NDArray[np.int64]  # [B], place in the bank, -1: base weights
    fixed: bool = False
    """Whether each row computes one token over the whole capacity, so that all passes have equal shapes."""
    copies: Sequence[PrefixCopy] = ()
    """Positions that slots copy from other slots, which may compute them in this pass."""
    versions: Sequence[int] = ()
    """In a pass of one token per row: numbers that are equal for rows whose keys and values one version computed. Of
    such rows with the same tokens one is computed, for all. Empty: every row is computed."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The passes of one step."""

    prefill: Sequence[ForwardPassPlan]
    """Passes that compute contexts, but for the last token of each."""
    decode: Sequence[ForwardPassPlan]
    """Passes whose rows sample a token."""
    repeats: bool
    """Whether the next step decodes the same rows, as long as no call arrives or ends."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; readers compute rates."""

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    """Number of context tokens computed but for the last of each context, counting recomputed ones again."""
    cached_tokens: int = 0
    """Number of context tokens served from KV."""
    passes: int = 0
    rows: int = 0
    """Number of rows computed, summed over passes: `rows / passes` is the mean batch size."""


class ForwardPassRunner:
    """Runs passes, on the worker thread."""

    def __init__(
        self,
        *,
        cache: SlotKvCache,
        columns: SlotColumns,
        device: torch.device,
        dtype: torch.dtype,
        tap: ExpertRoutingRecorder | None,
        mask_recorder: SamplingMaskRecorder | None,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._columns = columns
        self._device = device
        self._mask_value = torch.finfo(dtype).min
        self._zero = torch.zeros((), dtype=dtype, device=self._device)
        self._keys = torch.arange(cache.capacity + 1, device=self._device)
        self._tap = tap
        self._mask_recorder = mask_recorder
        self._clock = clock
        self.stats = EngineStats()
        self._busy: tuple[float, float | None] = (0.0, None)
        """Seconds of ended computations, and the start of the one in progress."""
        self.interrupted = False
        """Whether the worker must return between two passes; set by the event loop."""

    def run(self, step: StepPlan) -> list[int]:
        """Run the passes in order; returns the slots whose calls ended with a stop token or at their limit.

        If `step.repeats`, the decode passes are repeated for a while, as long as no call ends and `interrupted` is not
        set: switching threads costs as much as a few rows, on a busy machine as a pass.
        """
        start = self._clock.monotonic()
        ended_slots: list[int] = []
        with self._computing():
            for one in step.prefill:
                self.logits(one)
                self.stats.prefill_tokens += int(one.counts.sum())
            while True:
                for one in step.decode:
                    ended_slots += self._sample(one, self.logits(one))
                now = self._clock.monotonic()
                # a plan repeats for 0.1 s at most: partial turns are delivered about every 0.2 s
                if not step.repeats or ended_slots or self.interrupted or now - start > 0.1:
                    break
        return ended_slots

    def busy_seconds(self) -> float:
        """Return the seconds spent computing, of the computation in progress too. For any thread."""
        seconds, start = self._busy
        return seconds if start is None else seconds + self._clock.monotonic() - start

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the time within the context as busy, and infer in it."""
        self._busy = (self._busy[0], self._clock.monotonic())
        try:
            with torch.inference_mode():
                yield
        finally:
            self._busy = (self.busy_seconds(), None)

    def logits(self, one: ForwardPassPlan) -> Tensor:
        """Run one pass; returns the logits after each row's last token, `[B, V]`."""
        slots, counts, adapters, columns = one.slots, one.counts, one.adapters, self._columns
        for copy in one.copies:
            columns.computed[copy.target] = copy.stop
        twins = _twins(one, columns)
        if twins is not None:
            kept, origins = twins
            slots, counts, adapters = slots[kept], counts[kept], adapters[kept]
        first, rows = int(slots[0]), len(slots)
        consecutive = int(slots[-1]) - first + 1 == rows
        begin = columns.computed[slots]
        width = int(counts.max())
        length = self._cache.capacity if one.fixed else int((begin + counts).max())
        write: Tensor | int
        if one.fixed:
            ids = columns.tokens[slots, begin][:, None]
            positions = self._to_device(begin[:, None])
            write = self._to_device(np.where(counts > 0, begin, self._cache.capacity)[:, None])
        elif width == 1:
            ids = columns.tokens[slots, begin][:, None]
            positions = self._to_device(begin[:, None])
            write = int(begin[0]) if length - 1 == begin[0] and bool((begin == begin[0]).all()) else positions
        else:
            offset = np.arange(width) - (width - counts[:, None])
            place = np.where(offset >= 0, begin[:, None] + offset, 0)
            ids = columns.tokens[slots[:, None], place]
            positions = self._to_device(place)
            write = self._to_device(np.where(offset >= 0, place, self._cache.capacity))
        index = None if consecutive else self._to_device(slots)
        written = self._to_device(np.flatnonzero(counts)) if one.fixed else None
        self._cache.address(
            first=first,
            count=rows,
            rows=index,
            positions=write,
            length=length,
            written=written,
            copies=one.copies,
            twins=None if twins is None else (self._to_device(one.slots), self._to_device(origins)),
        )
        mask = torch.where(self._keys[:length] <= positions[:, :, None], self._zero, self._mask_value)[:, None]
        if one.bank is not None:
            one.bank.select(adapters)
        if self._tap is not None:
            self._tap.begin()
        logits: Tensor = one.model(
            input_ids=self._to_device(ids),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(one.model): self._cache},
        ).logits[:, -1]
        self._cache.commit()
        if self._tap is not None:
            copies = one.copies if twins is None else _twin_copies(one.slots, slots[origins], columns)
            self._tap.store(slots, begin, counts, width, copies)
        columns.computed[one.slots] += one.counts
        self.stats.passes += 1
        self.stats.rows += rows
        return logits if twins is None else logits[self._to_device(origins)]

    def _sample(self, one: ForwardPassPlan, logits: Tensor) -> list[int]:
        columns, slots = self._columns, one.slots
        ready = (columns.computed[slots] == columns.length[slots]) & (one.counts > 0)
        if not ready.all():
            slots = slots[ready]
            if not len(slots):
                return []
            logits = logits[torch.from_numpy(np.flatnonzero(ready)).to(self._device)]
        tokens, logprobs, mask = sample(logits, columns.sampling(slots))
        token_ids = tokens.cpu().numpy()
        if self._mask_recorder is not None:
            self._mask_recorder.store(slots, mask, columns.filtered[slots])
        self.stats.sampled_tokens += len(slots)
        return columns.append(slots, token_ids, logprobs.cpu().numpy())

    def score(self, one: ForwardPassPlan, token_ids: NDArray[np.int64], temperature: float, top: int) -> TokenScores:
        """Compute the log-probabilities of one sequence's tokens, and of the likeliest ones, without the cache."""
        ids = self._to_device(token_ids)[None]
        with self._computing():
            if one.bank is not None:
                one.bank.select(one.adapters)
            logits = one.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
            logprobs = torch.log_softmax(logits, dim=-1)
            top_ids, top_logprobs = likeliest(logprobs, top)
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            return TokenScores.after_first(own.cpu().numpy(), top_ids.cpu().numpy(), top_logprobs.cpu().numpy())

    def next_logprobs(
        self, one: ForwardPassPlan, contexts: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Compute the log-probability of each of `tokens` after each context, `[B, n]`, without the cache."""
        with self._computing():
            if one.bank is not None:
                one.bank.select(one.adapters)
            logits = one.model(input_ids=self._to_device(contexts), use_cache=False, logits_to_keep=1).logits[:, -1]
            logprobs: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1)[:, tokens].cpu().numpy()
        return logprobs

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _twins(one: ForwardPassPlan, columns: SlotColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the rows to compute, and for each row of the pass the number of the computed row with the same tokens;
    None if all differ."""
    if not one.versions:
        return None
    numbers: dict[tuple[int, bytes], int] = {}
    first_rows = [
        numbers.setdefault((version, columns.tokens[slot, : columns.length[slot]].tobytes()), row)
        for row, (slot, version) in enumerate(zip(one.slots.tolist(), one.versions, strict=True))
    ]
    kept = np.array(list(numbers.values()))
    return (kept, np.searchsorted(kept, first_rows)) if len(kept) < len(first_rows) else None


def _twin_copies(slots: Slots, sources: Slots, columns: SlotColumns) -> list[PrefixCopy]:
    """Return what each slot that was not computed takes from the one that was."""
    positions = columns.computed[slots].tolist()
    return [
        PrefixCopy(source, slot, position, position + 1)
        for slot, source, position in zip(slots.tolist(), sources.tolist(), positions, strict=True)
        if slot != source
    ]


def likeliest(logprobs: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the ids and log-probabilities of each row's `top` likeliest tokens, ties by id."""
    top = min(top, logprobs.shape[-1])
    values, ids = logprobs.topk(top, dim=-1, sorted=False)
    if top:
        # `topk` chooses any of several tokens with the lowest value; a stable sort of the whole row takes far longer.
        tied = ((logprobs >= values.amin(-1, keepdim=True)).sum(-1) != top).nonzero()[:, 0]
        ids[tied] = logprobs[tied].sort(dim=-1, descending=True, stable=True).indices[:, :top]
        ids = ids.sort(dim=-1).values
        values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    return ids, values


def sample(logits: Tensor, batch: RowSamplingParameters) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row.

    Args:
        logits: `[B, V]`, any floating dtype.
        batch: sampling parameters of each row.

    Returns:
        tokens `[B]` int64; their logprobs `[B]` float32; the kept set `[B, V]` bool, None if no row has a filter.
    """
    scores = logits.float()
    if batch.penalties:
        scores = scores.clone()
    for penalties in batch.penalties:
        penalties.apply(scores)
    if batch.tempered:
        scores = scores / torch.from_numpy(batch.temperature).to(scores.device)[:, None]
    if batch.allowed:
        rows, allowed = torch.tensor(batch.allowed, device=scores.device).T
        excluded = torch.zeros_like(scores, dtype=torch.bool)
        excluded[rows] = True
        excluded[rows, allowed] = False
        scores = scores.masked_fill(excluded, -torch.inf)
    mask = sampling_filter_mask(scores, batch.top_k, batch.top_p, batch.min_p) if batch.filtered else None
    if mask is not None:
        mask &= scores > -torch.inf
        scores = scores.masked_fill(~mask, -torch.inf)
    logprobs = torch.log_softmax(scores, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    at = torch.from_numpy(batch.uniforms).to(scores.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, at, right=True)
    tokens = tokens.clamp(max=scores.shape[-1] - 1)  # of NaN there is no token; its logprob, NaN, ends the episode
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0], mask


def sampling_filter_mask(
    scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32], min_p: NDArray[np.float32]
) -> Tensor:
    """Return the tokens that pass min-p (arXiv:2407.01082), top-k and top-p (arXiv:1904.09751), as `[B, V]` bool.

    The order is vLLM's: min-p keeps tokens with at least `min_p` of the likeliest token's mass, top-k the `top_k`
    likeliest, and top-p the smallest set that holds `top_p` of the mass that the other two left. Ties are broken by
    token id.
    """
    vocabulary = scores.shape[-1]
    sorted_scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)).to(scores.device)[:, None]
    probabilities = torch.softmax(sorted_scores, dim=-1)
    floor = torch.from_numpy(min_p).to(scores.device)[:, None] * probabilities[:, :1]
    removal_mask = (torch.arange(vocabulary, device=scores.device) >= limit) | (probabilities < floor)
    mass = torch.softmax(sorted_scores.masked_fill(removal_mask, -torch.inf), dim=-1)
    before = mass.cumsum(-1, dtype=torch.float64) - mass
    nucleus = torch.from_numpy(top_p.astype(np.float64)).to(scores.device)[:, None]
    keep = ~removal_mask & ((before < nucleus) | (nucleus >= 1))
    keep[:, 0] = True  # a `top_p` that rounds to 0 keeps the likeliest token
    return torch.zeros_like(keep).scatter_(1, order, keep)


def check_kv_memory(model: PreTrainedModel, *, slots: int, max_context: int) -> None:
    """Refuse more KV and states than memory can hold: KV is allocated at the first call.

    Raises:
        EngineCapabilityError: the slots do not fit into the memory of this machine.
    """
    if model.device.type != "cpu":
        return
    context_bytes = (max_context + 1) * kv_bytes_per_token(model.config) + state_bytes_per_slot(model)
    needed_bytes, free = slots * context_bytes, machine_memory().free
    if needed_bytes > free:
        raise EngineCapabilityError(
            f"keys, values and states of {slots} contexts of {max_context} tokens take {needed_bytes >> 20} MiB, and "
            f"{free >> 20} are free; lower engine.slots or engine.max_context"
        )


def check_slots_match_forward(model: PreTrainedModel, path: str, *, max_context: int) -> None:
    """Refuse a model whose results over slots differ from those of a plain forward pass, in contexts of up to
    `max_context` tokens.

    The check computes in float32, because rounding would hide a wrong position, and with noise in weights that are
    still at a constant initial value (`varied`). Besides two short contexts, it computes one of each of the
    `check_lengths` that some seconds allow, its last token apart from the others.

    Raises:
        ModelError: the results differ, or the model fails.
    """
    try:
        with computing_in_float32(model, lambda parameter: varied(parameter.float())):
            difference = _largest_difference(model, _CONTEXTS, _PIECES)
            tokens = affordable_tokens(model, max_context, passes=3)  # over slots, and two plain ones
            for length in check_lengths(model.config, max_context, tokens):
                contexts = (tuple(random_tokens(model.config, (length,), length).tolist()), _CONTEXTS[1])
                pieces = ((length - 1, 2), (1, 1))
                difference = float(np.maximum(difference, _largest_difference(model, contexts, pieces)))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelError(f"{path}: {type(model).__name__} cannot run in the embedded engine ({error!r})") from error
    if not difference < (_STATE_TOLERANCE if num_layers_with_state(model.config) else _SLOT_TOLERANCE):
        raise ModelError(
            f"{path}: {type(model).__name__} computes different logits in a batch of slots than alone (by "
            f"{difference:.2g} of their spread); the embedded engine does not support its kind of attention or cache"
        )


def _largest_difference(
    model: PreTrainedModel, contexts: tuple[tuple[int, ...], ...], pieces: tuple[tuple[int, int], ...]
) -> float:
    """Return the largest difference of logits, relative to their spread."""
    longest = max(map(len, contexts))
    cache = SlotKvCache(model, slots=2, capacity=longest)
    columns = SlotColumns(slots=2, capacity=longest)
    for slot, context in enumerate(contexts):
        columns.tokens[slot, : len(context)] = context
        columns.length[slot] = len(context)
    runner = ForwardPassRunner(
        cache=cache,
        columns=columns,
        device=model.device,
        dtype=torch.float32,
        tap=None,
        mask_recorder=None,
        clock=SystemClock(),
    )
    largest = 0.0
    for counts in pieces:
        for slots in ((0, 1),) if counts[0] == counts[1] or not cache.has_states else ((0,), (1,)):
            one = ForwardPassPlan(
                model=model,
                bank=None,
                slots=np.array(slots),
                counts=np.array([counts[slot] for slot in slots]),
                adapters=np.full(len(slots), BASE, np.int64),
            )
            with torch.inference_mode():
                logits = runner.logits(one)
            for row, slot in enumerate(slots):
                plain = _plain_logits(model, contexts[slot][: columns.computed[slot]])
                # NumPy's maximum, because Python's max ignores NaN.
                largest = float(np.maximum(largest, float((logits[row] - plain).abs().max() / plain.std())))
    return largest


def _plain_logits(model: PreTrainedModel, context: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([context], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    check_finite_logits(model, logits)
    return logits


def check_row_independence(model: PreTrainedModel, path: str, *, slots: int) -> None:
    """Refuse fixed shapes if a row's logits depend on its place in the pass or on the other rows.

    Raises:
        EngineCapabilityError: they do so on this machine with this many slots.
    """
    rng = np.random.default_rng(0)
    context = rng.integers(0, int(model.config.get_text_config().vocab_size), _ROW_TOKENS)
    reference = _fixed_logits(model, np.tile(context, (slots, 1)))
    company = rng.integers(0, int(model.config.get_text_config().vocab_size), (slots, _ROW_TOKENS))
    company[slots // 2] = context
    lone_logits = _fixed_logits(model, company)[slots // 2]
    if not (bool((reference == reference[0]).all()) and bool((lone_logits == reference[0]).all())):
        raise EngineCapabilityError(
            f"{path}: on this machine the logits of a row depend on which of the {slots} slots it is in, so a run "
            "cannot be repeated bit for bit; try another engine.slots (a multiple of 16), or set deterministic = false"
        )


def _fixed_logits(model: PreTrainedModel, contexts: NDArray[np.int64]) -> Tensor:
    """Compute the logits after the last token of each context, one token at a time; `[slots, V]`."""
    slots, length = contexts.shape
    cache = SlotKvCache(model, slots=slots, capacity=length)
    columns = SlotColumns(slots=slots, capacity=length)
    columns.tokens[:, :length] = contexts
    columns.length[:] = length
    runner = ForwardPassRunner(
        cache=cache,
        columns=columns,
        device=model.device,
        dtype=model.dtype,
        tap=None,
        mask_recorder=None,
        clock=SystemClock(),
    )
    all_slots, ones, base = np.arange(slots), np.ones(slots, np.int64), np.full(slots, -1, np.int64)
    one = ForwardPassPlan(model=model, bank=None, slots=all_slots, counts=ones, adapters=base, fixed=True)
    with torch.inference_mode():
        for _ in range(length):
            logits = runner.logits(one)
    return logits
