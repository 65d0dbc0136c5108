"""Predicts the memory of training without loading weights: reads shapes, and computes a step without data.

A forward and backward pass over the longest rows runs on tensors that have shapes and no data, and every allocation and
release is counted. A test holds the result equal to that of a real step.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.config.run import RunConfig
from agentrl.config.sections import LOSSES
from agentrl.core.custom_functions import FunctionDeclaration
from agentrl.core.errors import InputError, PredictionError
from agentrl.core.records import TrainingSample
from agentrl.engines.models import dtype_name, outermost_layers, runnable_on_meta
from agentrl.engines.weights.files import device_memory
from agentrl.learn.forward import MAX_LOGITS, TOP_TOKENS, HeadOutput, token_logprobs
from agentrl.learn.learner import ValueHead
from agentrl.learn.models import PolicyModel, load_models, load_references, native_attention
from agentrl.learn.packing import MicroBatch, pack
from agentrl.learn.ranks import BUCKET

_SHORT = 16
"""Length of the first rows that are measured, in tokens."""
_LOOP = 1.3
"""Operations of a forward pass, as a multiple of those over the first rows, above which it loops over its tokens."""


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


def predict_trainer_memory(config: RunConfig) -> TrainerMemory:
    """Predict the peak memory of a trainer process, for a run with at least one policy that learns.

    Raises:
        ModelError: the directory holds no model that can be trained.
        ConfigError: an adapter targets a layer that cannot be both trained and served.
        PredictionError: a step cannot be computed without data.
    """
    models = load_models(config, torch.device("meta"))
    shards = shard_count(config, config.trainer.ranks)
    weights, trained_bytes = _weight_sizes(config, models)
    if shards > 1:  # if all weights are trained, the float32 shards are the masters
        weights -= sum(_bytes(model.model.parameters()) for model in models.values() if model.has_masters)
    return TrainerMemory(
        shards=shards,
        gathered=max(map(_gathered_bytes, models.values())) if shards > 1 else 0,
        dtype=" and ".join(dict.fromkeys(dtype_name(model.model.dtype) for model in models.values())),
        weights=weights // shards,
        trained=trained_bytes // shards,
        copies=_copies(config, models),
        activations=max(_activations(config, name, model) for name, model in models.items()),
        tokens=_micro_batch_tokens(config),
    )


def shard_count(config: RunConfig, ranks: int) -> int:
    """Return the number of ranks that hold one copy of the weights together; 1: each rank holds all of them.

    With `trainer.sharding` "auto", each rank holds all if weights, gradients and optimizer states take at most half of
    its memory (without a GPU, an even share of the machine's memory). The other half is for activations.
    """
    sharding = config.trainer.sharding
    if ranks == 1 or sharding == "none":
        return 1
    if isinstance(sharding, int):
        return sharding
    if sharding == "auto":
        try:
            sizes = _weight_sizes(config, load_models(config, torch.device("meta")))
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


def _copies(config: RunConfig, models: Mapping[str, PolicyModel]) -> int:
    """Return `TrainerMemory.copies`."""
    gradients = (
        [parameter.numel() * torch.float32.itemsize for parameter in _trained_parameters(models)]
        if config.trainer.ranks > 1
        else []
    )
    state_tensors = [
        parameter.nbytes
        for model in models.values()
        if model.published_kind == "full"
        for parameter in model.model.parameters()
    ]
    return max((min(sum(sizes), max(BUCKET, *sizes)) for sizes in (gradients, state_tensors) if sizes), default=0)


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


def _weight_sizes(config: RunConfig, models: Mapping[str, PolicyModel]) -> tuple[int, int]:
    """Return the bytes of `TrainerMemory.weights` and `TrainerMemory.trained`, on one rank."""
    references = load_references(config, models, torch.device("meta"))
    trained_parameters = _trained_parameters(models)
    all_models = (*models.values(), *references.values())
    parameters = {parameter for model in all_models for parameter in model.model.parameters()}
    # parameters, gradients and AdamW's two moments, all of one type
    return _bytes(parameters - trained_parameters), _bytes(trained_parameters) * 4


def _micro_batch_tokens(config: RunConfig) -> int:
    """Return the tokens of the largest micro-batch: a full one, or a longer row alone."""
    return max(config.trainer.micro_batch_tokens, config.engine.max_context)


def _activations(config: RunConfig, policy: str, model: PolicyModel) -> int:
    """Return the peak bytes that a step of a policy allocates beyond weights and gradients.

    A pass whose number of operations grows with the tokens, such as a scan over a state space in Python, would take
    minutes over the longest rows. It is measured over ever longer rows instead, and extrapolated.

    Raises:
        PredictionError: the step needs data.
    """
    context = config.engine.max_context
    try:
        with runnable_on_meta(model.model):
            passes = [_shortest_step(config, policy, model)]
            try:
                limit = _LOOP * passes[0].operations
                return _step(config, policy, model, context, limit).bytes
            except _TooManyOperationsError:
                while passes[-1].operations < _LOOP * passes[0].operations:
                    passes.append(_step(config, policy, model, 4 * passes[-1].length))
    except Exception as error:
        kind = type(model.model).__name__
        raise PredictionError(
            f"the memory of a step of {kind} cannot be predicted ({type(error).__name__}: {error})"
        ) from error
    before, last = passes[-2:]
    return last.bytes + (last.bytes - before.bytes) * (context - last.length) // (last.length - before.length)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward and backward pass over rows of one length."""

    length: int
    bytes: int
    """Peak bytes allocated, without gradients of parameters."""
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


def _shortest_step(config: RunConfig, policy: str, model: PolicyModel) -> _Pass:
    """Measure a step over short rows, as a prefix tree; as padded rows if the model cannot compute that.

    Without weights `why_unshared` cannot tell whether the tree is exact. A model that computes the
    tree but is trained on padded rows takes about the same memory in both.
    """
    length = min(_SHORT, config.engine.max_context)
    try:
        return _step(config, policy, model, length)
    except Exception as error:  # noqa: BLE001 - any error means that the model is trained on padded rows
        model.unshared = str(error) or type(error).__name__
        model.model.set_attn_implementation(native_attention(model.model))
        return _step(config, policy, model, length)


def _step(config: RunConfig, policy: str, model: PolicyModel, length: int, limit: float = math.inf) -> _Pass:
    """Compute a step of a policy over rows of a length.

    Raises:
        _TooManyOperationsError: the forward pass has more than `limit` operations.
    """
    rows = make_worst_case_samples(config, policy, model, length)
    (batch,) = pack(rows, max_tokens=len(rows) * length, share=False)
    module: nn.Module = model.model
    model.activate()
    # Gradients exist from the first micro-batch of a step on; the plan counts them with the weights.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    loss = config.trainer.loss.name
    mark = (
        LOSSES[loss]
        if loss in LOSSES
        else FunctionDeclaration("loss", divergence=bool(config.trained[policy].reference))
    )
    value_head = None
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with AllocationCounter([*module.parameters(), *module.buffers(), *gradients]) as counter:
        if (gae := config.credit.advantage.gae) is not None:
            width = model.model.config.get_text_config().hidden_size
            value_head = ValueHead(width, model.model.device, gae.value_updates)
        reference = _reference_output(batch, model.model.device) if mark.divergence else None
        with _Limit(counter, limit):
            output = token_logprobs(
                model.model,
                batch,
                shared=model.shared_prefixes,
                entropy_gradient=bool(config.trainer.entropy_bonus) or loss not in LOSSES,
                replay=model.replay,
                reference=reference,
                value_head=value_head,
            )
        operations = counter.operations
        total = output.logprob.sum() + output.entropy.sum()
        if output.reference_kl is not None:
            total = total + output.reference_kl.sum()
        if output.values is not None:
            total = total + output.values.sum()
        if value_head is not None and output.values is not None:
            value_head.add_curvature(torch.ones_like(output.values))
        total.backward()
    return _Pass(length, counter.peak, operations)


def _reference_output(batch: MicroBatch, device: torch.device) -> HeadOutput:
    """Make the output of a reference, with its likeliest tokens."""
    zeros = torch.zeros(len(batch.targets), TOP_TOKENS + 1, device=device)
    column = zeros[:, 0]
    return HeadOutput(column, column, column, zeros[:, :-1].long(), zeros)


def make_worst_case_samples(
    config: RunConfig, policy: str, model: PolicyModel, length: int | None = None
) -> list[TrainingSample]:
    """Make the rows of the largest micro batch of a policy: random tokens, each row `engine.max_context` long.

    The end of each row is trained: as many tokens as an episode can sample. With a shorter `length`, the same number
    of rows is shorter, and as large a share of each is trained.
    """
    context = config.engine.max_context
    count = min(max(1, config.trainer.micro_batch_tokens // context), config.trained[policy].step_size)
    num_sampled = min(context - 1, config.sampling.max_tokens * config.sampling.max_turns)
    vocabulary = int(model.model.config.get_text_config().vocab_size)
    if length is None or length == context:
        length = context
    else:  # logits beyond `MAX_LOGITS` take no more memory
        num_sampled = math.ceil(min(num_sampled, MAX_LOGITS // (vocabulary * count) + 1) * (length - 1) / context)
    token_rows = np.random.default_rng(0).integers(0, vocabulary, (count, length)).astype(np.int32)
    mask, zeros = np.arange(length) >= length - num_sampled, np.zeros(length, np.float32)
    return [
        TrainingSample(token_ids=row, loss_mask=mask, behavior_logprobs=zeros, advantages=zeros) for row in token_rows
    ]


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of all storages allocated within the context, until each is released.

    Args:
        known: tensors whose storages are not counted.
    """

    def __init__(self, ignored_tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Number of bytes allocated and not yet released."""
        self.peak = 0
        """Largest value of `live` so far."""
        self.operations = 0
        self._bytes_by_storage: dict[int, int] = {}
        self._ignored_storages = {tensor.untyped_storage()._cdata for tensor in ignored_tensors}

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
