"""Layers that the embedded engine cannot sample from, by the configuration of a model directory. Reads JSON and imports
no torch, so that a run with such a model is refused at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.core.errors import ModelError
from agentrl.core.files import read_json

WITHOUT_INITIAL_STATE = {"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "zamba"}
"""Model types whose layers cannot compute several tokens from a state in a cache: the scan of Mamba 1 begins without
one, and RG-LRU keeps its state in the layer."""
_INDEXERS = ("index_topk", "indexer_budget")
"""Settings for the number of keys that an indexer selects for attention."""
SELECTED_KEYS = (*_INDEXERS, "keep_window_size")
"""Settings for the number of keys that attention selects by their scores; the last one is Doge's, without an
indexer."""
_INDEXED_LAYERS = {
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}
_OTHER_CACHES = {
    "bloom": "add positions to the attention by a mask of their own (ALiBi)",
    "minimax": "keep the state of lightning attention in a cache of their own",
    "xlm": "take lengths instead of positions",
}
"""Model types, and what of their layers does not fit a slot."""


def config_parts(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of a `config.json` and of its nested text model, if any."""
    text = settings.get("text_config")
    return [settings, text] if isinstance(text, dict) else [settings]


def check_slot_layers(path: Path) -> None:
    """Refuse a model that the embedded engine cannot sample from, because its layers keep what a slot cannot hold.

    Raises:
        ModelError: the message names the model type and the layers.
    """
    for part in config_parts(read_json(path / "config.json")):
        model_type = str(part.get("model_type"))[:40]
        if model_type in WITHOUT_INITIAL_STATE:
            raise ModelError(
                f"{path}: the recurrent layers of {model_type} cannot continue a context from a state in a cache, "
                "with which the embedded engine samples; add an [engine.vllm] table, which selects vLLM"
            )
        kinds = part.get("layer_types")
        selects = any(str(name).startswith(_INDEXERS) and value for name, value in part.items()) or (
            isinstance(kinds, list) and not _INDEXED_LAYERS.isdisjoint(map(str, kinds))
        )
        why = "select or compress keys with an indexer, whose cache a slot lacks" if selects else ""
        if why := why or _OTHER_CACHES.get(model_type, ""):
            raise ModelError(
                f"{path}: the embedded engine cannot sample from {model_type!a}: its layers {why}. Add an "
                "[engine.vllm] table, which selects vLLM"
            )
