"""Predicts the memory of training without loading weights: reads shapes, and computes a step without data.

A forward and backward pass over the longest rows runs on tensors that have shapes and no data, and every allocation and
release is counted. Only one or two layers of each kind are computed, because each further one adds the same. Tests hold
the result equal to that of all layers, and to that of a real step.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.config.algorithms import LOSSES
from agentrl.config.plans import BaseModelPlan, TrainerPlan
from agentrl.core.custom_functions import FunctionDeclaration
from agentrl.core.errors import InputError, PredictionError
from agentrl.core.tokens import TrainingSample
from agentrl.engines.meta import runnable_on_meta
from agentrl.engines.models import LayerKinds, dtype_name, native_attention, outermost_layers
from agentrl.engines.weights.reading import device_memory
from agentrl.learn.forward import MAX_LOGITS, TOP_TOKENS, HeadOutput, token_logprobs
from agentrl.learn.models import PolicyModel, load_models, load_references
from agentrl.learn.packing import MicroBatch, pack
from agentrl.learn.ranks import BUCKET

_LOOP, _LONG_LOOP = 1.3, 20
"""Operations of a forward pass, as multiples of those over the first rows, above which it loops over its tokens, and
above which the loop would take minutes. Logits that are computed in pieces are a short loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """The memory of one trainer process, in bytes."""

    dtype: str
    """Dtype that the models compute in, such as `bfloat16`."""
    shards: int
    """Number of ranks that hold one copy of the weights together; 1: each rank holds all."""
    weights: int
    """Frozen parameters, and rounded copies of trained ones, in bytes; a rank's shard of them."""
    trained: int
    """Trained parameters with gradients and optimizer state, all float32, in bytes; a rank's shard of them. With
    `trainer.sharding` "offload" these are in main memory, and so are the weights of several ranks."""
    gathered: int
    """Approximate bytes of a sharded model that are gathered at once: everything outside the layers, two layers,
    gradients."""
    activations: int
    """Peak bytes that a step allocates in addition."""
    copies: int
    """Peak bytes of copies between steps, when no activations are held: gradients that ranks sum, or weights on their
    way to an engine."""
    tokens: int
    """Number of tokens of the micro-batch at this peak."""


class TrainerMemoryPredictor:
    """Predicts the memory of a run's trainer for any context and micro-batch.

    Layers of one kind need the same memory, so one layer of each kind is measured, and then a second one of each kind;
    the difference counts for every other layer of that kind.

    Args:
        plan: the trainer's part of a run in which at least one policy learns.

    Raises:
        ModelError: the directory holds no model that can be trained.
        ConfigError: an adapter targets a layer that cannot be both trained and served.
    """

    def __init__(self, plan: TrainerPlan) -> None:
        self._plan = plan
        self._samples = [_LayerSamples(plan, base) for base in plan.bases if base.trained]
        models = {name: model for samples in self._samples for name, model in samples.first.items()}
        self.models = {name: models[name] for name in plan.policies}
        """Models with one layer of each kind, keyed by policy."""
        references = load_references(plan, self.models, torch.device("meta"))
        self._predictions: dict[tuple[int, int], TrainerMemory] = {}
        self._sizes = Counter(frozen=_bytes({p for each in references.values() for p in each.model.parameters()}))
        """Bytes by the names of `_sizes_of`, on a rank that holds all; those of references are frozen."""
        for samples in self._samples:
            self._sizes.update(samples.extrapolate(_sizes_of))

    def weight_sizes(self) -> tuple[int, int]:
        """Return the bytes of `TrainerMemory.weights` and `TrainerMemory.trained`, on a rank that holds all."""
        return self._sizes["frozen"], self._sizes["trained"]

    def predict(self, max_context: int, micro_batch_tokens: int) -> TrainerMemory:
        """Predict the peak memory of a trainer process, or return an earlier prediction.

        Args:
            max_context: `engine.max_context`.
            micro_batch_tokens: `trainer.micro_batch_tokens`.

        Raises:
            PredictionError: a step cannot be computed without data.
        """
        if (max_context, micro_batch_tokens) not in self._predictions:
            plan = self._plan.with_token_limits(max_context, micro_batch_tokens)
            self._predictions[max_context, micro_batch_tokens] = self._predict(plan)
        return self._predictions[max_context, micro_batch_tokens]

    def _predict(self, plan: TrainerPlan) -> TrainerMemory:
        shards = shard_count(plan, plan.trainer.ranks, self.weight_sizes)
        weights, trained_bytes = self.weight_sizes()
        if shards > 1:  # if all weights are trained, the float32 shards are the masters
            weights -= self._sizes["rounded"]
        return TrainerMemory(
            shards=shards,
            gathered=max(map(_gathered_bytes, self.models.values())) if shards > 1 else 0,
            dtype=" and ".join(dict.fromkeys(dtype_name(model.model.dtype) for model in self.models.values())),
            weights=weights // shards,
            trained=trained_bytes // shards,
            copies=self._copies(),
            activations=max(samples.activations(plan, name) for samples in self._samples for name in samples.first),
            tokens=max(plan.trainer.micro_batch_tokens, plan.max_context),
        )

    def _copies(self) -> int:
        """Return `TrainerMemory.copies`."""
        largest_gradient = max(4 * parameter.numel() for parameter in _trained_parameters(self.models))
        gradients = self._sizes["gradients"] if self._plan.trainer.ranks > 1 else 0
        published = self._sizes["published"]
        largest_published = max(
            (p.nbytes for model in self.models.values() for p in _published_parameters(model)), default=0
        )
        return max(min(gradients, max(BUCKET, largest_gradient)), min(published, max(BUCKET, largest_published)))


def shard_count(plan: TrainerPlan, ranks: int, weight_sizes: Callable[[], tuple[int, int]] | None = None) -> int:
    """Return the number of ranks that hold one copy of the weights together; 1: each rank holds all of them.

    With `trainer.sharding` "auto", each rank holds all if weights, gradients and optimizer states take at most half of
    its memory (without a GPU, an even share of the machine's memory). The other half is for activations.
    """
    sharding = plan.trainer.sharding
    if ranks == 1 or sharding == "none":
        return 1
    if isinstance(sharding, int):
        return sharding
    if sharding == "auto":
        try:
            sizes = (weight_sizes or TrainerMemoryPredictor(plan).weight_sizes)()
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - no failed prediction may stop a run
            warnings.warn(
                f"the memory of a rank cannot be predicted ({type(error).__name__}: {error}), so the weights are "
                "sharded; set trainer.sharding to choose",
                stacklevel=2,
            )
            return ranks
        memory, on_gpu = device_memory()
        if sum(sizes) <= memory.total / (2 if on_gpu else 2 * ranks):
            return 1
    return ranks


class _LayerSamples:
    """The models of the policies on one base, with one layer of each kind, and with a second one of each kind in turn.

    Models whose layers cannot be told apart or stand alone are kept whole.
    """

    def __init__(self, plan: TrainerPlan, base: BaseModelPlan) -> None:
        self._plan = replace(plan, bases=(base,), policies=base.trained)
        names_layers = any(
            part.isdecimal()
            for policy in base.trained.values()
            if policy.lora is not None
            for target in policy.lora.target_modules
            for part in target.split(".")
        )
        self._load(whole=names_layers)

    def _load(self, *, whole: bool) -> None:
        def models(repeated: int | None = None) -> dict[str, PolicyModel]:
            trim = None if whole else partial(kinds.trim, repeated=repeated)
            return load_models(self._plan, torch.device("meta"), trim=trim)

        kinds = LayerKinds()
        self._shortest: dict[tuple[str, int], _Pass] = {}
        self.whole = whole
        self.first = models()
        """Models with one layer of each kind, keyed by policy."""
        self._second = [(count - 1, models(kind)) for kind, count in enumerate(kinds.counts) if count > 1]
        """The number of further layers of a kind, and the models with one of them."""

    def extrapolate(self, measure: Callable[[Mapping[str, PolicyModel]], dict[str, int]]) -> dict[str, int]:
        """Measure the models with few layers, and return the numbers of the whole models."""
        first = measure(self.first)
        seconds = [(count, measure(models)) for count, models in self._second]
        return {
            name: number + sum(count * (second[name] - number) for count, second in seconds)
            for name, number in first.items()
        }

    def activations(self, plan: TrainerPlan, policy: str) -> int:
        """Return the peak bytes that a step of a policy allocates beyond weights and gradients.

        A pass whose number of operations grows with the tokens, such as a scan over a state space in Python, would take
        minutes over the longest rows. It is measured over short rows instead, and extrapolated.

        Raises:
            PredictionError: the step needs data.
        """
        kind = type(self.first[policy].model).__name__
        try:
            try:
                return self._activations(plan, policy)
            except Exception:
                if self.whole:
                    raise
                self._load(whole=True)  # its layers depend on each other
                return self._activations(plan, policy)
        except Exception as error:
            raise PredictionError(
                f"the memory of a step of {kind} cannot be predicted ({type(error).__name__}: {error})"
            ) from error

    def _activations(self, plan: TrainerPlan, policy: str) -> int:
        first = self.first[policy]
        with runnable_on_meta(first.model):
            key = policy, _num_rows(plan, policy)  # passes over as many rows are compared
            if key not in self._shortest:
                self._shortest[key] = _shortest_pass(plan, policy, first)
            passes = _passes(plan, policy, first, self._shortest[key])
        held, beyond = [each.held for each in passes], [each.peak - each.held for each in passes]
        for count, models in self._second:
            model = models[policy]
            if first.unshared and not model.unshared:
                _compute_padded(model, first.unshared)
            with runnable_on_meta(model.model):
                for at, each in enumerate(passes):
                    second = _step(plan, policy, model, each.length, each.trained)
                    held[at] += count * (second.held - each.held)
                    beyond[at] = max(beyond[at], second.peak - second.held)
        if len(passes) == 1:
            return held[0] + beyond[0]
        short, long, other = passes
        further = plan.max_context - long.length
        per_trained = (held[2] - held[0]) / (other.trained - short.trained)
        per_token = (held[1] - held[0] - per_trained * (long.trained - short.trained)) / (long.length - short.length)
        further_trained = _num_with_logits(plan, policy, first) - long.trained
        # Which operation has the peak may differ between short rows, so that longer ones seem to need less.
        beyond_per_token = max((beyond[1] - beyond[0]) / (long.length - short.length), beyond[1] / long.length)
        measured = held[1] + beyond[1]
        return max(measured, round(measured + (per_token + beyond_per_token) * further + per_trained * further_trained))


def _sizes_of(models: Mapping[str, PolicyModel]) -> dict[str, int]:
    """Return bytes of the parameters of models on one base."""
    trained_parameters = _trained_parameters(models)
    parameters = {parameter for model in models.values() for parameter in model.model.parameters()}
    return {
        "frozen": _bytes(parameters - trained_parameters),
        "trained": _bytes(trained_parameters) * 4,  # parameters, gradients and AdamW's two moments, all of one type
        "rounded": sum(_bytes(model.model.parameters()) for model in models.values() if model.has_masters),
        "gradients": sum(4 * parameter.numel() for parameter in trained_parameters),
        "published": sum(_bytes(_published_parameters(model)) for model in models.values()),
    }


def _published_parameters(model: PolicyModel) -> Iterable[Tensor]:
    return model.model.parameters() if model.publication.kind == "full" else ()


def _trained_parameters(models: Mapping[str, PolicyModel]) -> set[nn.Parameter]:
    return {parameter for model in models.values() for parameter in model.parameters.values()}


def _gathered_bytes(model: PolicyModel) -> int:
    """Return `TrainerMemory.gathered` of a model. The next layer is gathered while one computes, and its gradients are
    added up in float32 if all weights are trained."""
    module: nn.Module = model.model
    layers = sorted(sum(parameter.nbytes for parameter in layer.parameters()) for layer in outermost_layers(module))
    outside = _bytes(module.parameters()) - sum(layers)
    largest = layers[-1] if layers else 0
    if model.kind == "adapter":
        return outside + 2 * largest
    return 2 * outside + 3 * largest + largest * torch.float32.itemsize // model.model.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward and backward pass over rows of one length."""

    length: int
    trained: int
    """Number of trained tokens of a row."""
    held: int
    """Bytes allocated at the end of the forward pass, without gradients of parameters. Every layer adds to these."""
    peak: int
    """Largest number of such bytes at any time."""
    operations: int
    """Number of operations of the forward pass."""


class _TooManyOperationsError(Exception):
    pass


class _Limit(TorchFunctionMode):
    """Raises an error in the forward pass once more operations than `limit` are counted.

    It stands between Python and torch: an error in `__torch_dispatch__` may end the process.
    """

    def __init__(self, counter: AllocationCounter, limit: float) -> None:
        super().__init__()
        self._counter = counter
        self._limit = limit

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, unless there were too many operations."""
        if self._counter.operations > self._limit:
            raise _TooManyOperationsError
        return function(*args, **(kwargs or {}))


def _shortest_pass(plan: TrainerPlan, policy: str, model: PolicyModel) -> _Pass:
    """Measure a step over short rows, as a prefix tree; as padded rows if the model cannot compute that.

    Without weights `why_unshared` cannot tell whether the tree is exact. A model that computes the tree but is trained
    on padded rows takes about the same memory in both.
    """
    length = min(4, plan.max_context)
    try:
        return _step(plan, policy, model, length)
    except Exception as error:  # noqa: BLE001 - any error means that the model is trained on padded rows
        _compute_padded(model, str(error) or type(error).__name__)
        return _step(plan, policy, model, length)


def _passes(plan: TrainerPlan, policy: str, model: PolicyModel, shortest: _Pass) -> list[_Pass]:
    """Measure a step over the longest rows; or, if the pass loops over its tokens, over two lengths to extrapolate, and
    over the shorter one with another number of trained tokens, whose share of short rows is rounded."""
    try:
        return [_step(plan, policy, model, plan.max_context, limit=_LONG_LOOP * shortest.operations)]
    except _TooManyOperationsError:
        passes = [shortest, _step(plan, policy, model, 2 * shortest.length)]
        while passes[-1].operations < _LOOP * shortest.operations:  # it loops over chunks, of which few are below 64
            passes.append(_step(plan, policy, model, min(max(128, 4 * passes[-1].length), plan.max_context)))
        short, long = passes[-2:]
        return [short, long, _step(plan, policy, model, short.length, short.trained - 1 or 2)]


def _compute_padded(model: PolicyModel, reason: str) -> None:
    model.unshared = reason
    model.model.set_attn_implementation(native_attention(model.model))


def _step(
    plan: TrainerPlan,
    policy: str,
    model: PolicyModel,
    length: int,
    trained: int | None = None,
    *,
    limit: float = math.inf,
) -> _Pass:
    """Compute a step of a policy over rows of a length.

    Raises:
        _TooManyOperationsError: the forward pass has more than `limit` operations.
    """
    rows = make_worst_case_samples(plan, policy, model, length, trained)
    (batch,) = pack(rows, max_tokens=len(rows) * length, share=False)
    module: nn.Module = model.model
    model.activate()
    # Gradients exist from the first micro-batch of a step on; the plan counts them with the weights.
    for parameter in model.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    loss = plan.trainer.loss.name
    mark = (
        LOSSES[loss]
        if loss in LOSSES
        else FunctionDeclaration("loss", divergence=bool(plan.policies[policy].reference))
    )
    gradients = [parameter.grad for parameter in model.parameters.values() if parameter.grad is not None]
    with AllocationCounter([*module.parameters(), *module.buffers(), *gradients]) as counter:
        reference = _reference_output(batch, model.model.device) if mark.divergence else None
        with torch.enable_grad(), _Limit(counter, limit):  # the limit may end a change of this mode
            output = token_logprobs(
                model.model,
                batch,
                shared=model.shared_prefixes,
                entropy_gradient=bool(plan.trainer.entropy_bonus) or loss not in LOSSES,
                replay=model.replay,
                reference=reference,
            )
        operations = counter.operations
        total = output.logprob.sum() + output.entropy.sum()
        if output.reference_kl is not None:
            total = total + output.reference_kl.sum()
        held = counter.live
        total.backward()
    return _Pass(length, int(rows[0].loss_mask.sum()), held, counter.peak, operations)


def _reference_output(batch: MicroBatch, device: torch.device) -> HeadOutput:
    """Make the output of a reference, with its likeliest tokens."""
    zeros = torch.zeros(len(batch.targets), TOP_TOKENS + 1, device=device)
    column = zeros[:, 0]
    return HeadOutput(column, column, column, zeros[:, :-1].long(), zeros)


def make_worst_case_samples(
    plan: TrainerPlan, policy: str, model: PolicyModel, length: int | None = None, trained: int | None = None
) -> list[TrainingSample]:
    """Make the rows of the largest micro batch of a policy: random tokens, each row `engine.max_context` long.

    The end of each row is trained: as many tokens as an episode can sample. With a shorter `length`, the same number
    of rows is shorter, and as large a share of each is trained, or `trained` tokens.
    """
    context = plan.max_context
    length, count = length or context, _num_rows(plan, policy)
    vocabulary = int(model.model.config.get_text_config().vocab_size)
    if trained is None:
        share = _num_with_logits(plan, policy, model) / context
        trained = _num_sampled(plan) if length == context else math.ceil(share * (length - 1))
    token_rows = np.random.default_rng(0).integers(0, vocabulary, (count, length)).astype(np.int32)
    mask, zeros = np.arange(length) >= length - trained, np.zeros(length, np.float32)
    return [TrainingSample(token_ids=row, loss_mask=mask, logprobs=zeros, advantages=zeros) for row in token_rows]


def _num_rows(plan: TrainerPlan, policy: str) -> int:
    return min(max(1, plan.trainer.micro_batch_tokens // plan.max_context), plan.policies[policy].step_size)


def _num_sampled(plan: TrainerPlan) -> int:
    return min(plan.max_context - 1, plan.max_sampled)


def _num_with_logits(plan: TrainerPlan, policy: str, model: PolicyModel) -> int:
    """Return the number of a row's trained tokens whose logits take memory: those beyond `MAX_LOGITS` take no more."""
    vocabulary = int(model.model.config.get_text_config().vocab_size)
    return min(_num_sampled(plan), MAX_LOGITS // (vocabulary * _num_rows(plan, policy)) + 1)


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of all storages allocated within the context, until each is released.

    Args:
        ignored_tensors: tensors whose storages are not counted.
    """

    def __init__(self, ignored_tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Number of bytes allocated and not yet released."""
        self.peak = 0
        """Largest value of `live` so far."""
        self.operations = 0
        self._bytes_by_storage: dict[int, int] = {}
        # Held, because an address that is freed is given to another storage.
        self._ignored_storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in ignored_tensors
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the bytes it allocated."""
        self.operations += 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._ignored_storages or key in self._bytes_by_storage:
            return
        self._bytes_by_storage[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._bytes_by_storage.pop(key, 0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
