"""Small random models of the architectures people train, sharp enough that a wrong position shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from agentrl.config.policies import AnyPolicy
from agentrl.config.run import RunConfig
from agentrl.core.tokens import TrainingSample
from agentrl.engines.models import language_model_class, native_attention
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import PolicyModel
from agentrl.learn.packing import pack
from tests.learn_cases import run_config

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 97
POSITIONS = 128
MAX_CONTEXT = 64
WINDOW = 16
"""Of sliding windows and attention chunks."""
ORIGINAL = 32
"""Positions a stretched rope was trained with."""
LENGTHS = (5, 15, 16, 17, 18, 31, 32, 33, 47, 64)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_LEFT_OUT = object()
_SLIDING = ["sliding_attention", "full_attention"]


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    stretched = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    return {"rope_parameters": {**stretched, **parameters}}


def _long_rope(dimensions: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * dimensions, "long_factor": [1.0 + 2 * n for n in range(dimensions)]}
    return {**_rope("longrope", **factors), "original_max_position_embeddings": ORIGINAL}


_UNSCALED = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "conv1d.weight")
"""Weights that decide what a recurrent state keeps and forgets. Saturated gates leave states near zero, which a norm
divides by themselves: in float32, transformers' own results then depend on where a context is cut."""
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama 2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "Llama 3": ("LlamaConfig", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "Llama, linear": ("LlamaConfig", _rope("linear")),
    "Llama, YaRN": ("LlamaConfig", _rope("yarn")),
    "Llama, dynamic NTK": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 32},
    ),
    "Llama 4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 1, 0],
            "floor_scale": 16,
        },
    ),
    "Qwen2.5": ("Qwen2Config", {}),
    "Qwen2, window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 32,
            **_DELTA_NET,
        },
    ),
    "Qwen3.5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4,
            **_DELTA_NET,
        },
    ),
    "Mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "Ministral": ("MinistralConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}),
    "Phi-3": ("Phi3Config", {"sliding_window": WINDOW}),
    "Phi-3, LongRoPE": ("Phi3Config", _long_rope(4)),
    "Phi-4": ("Phi3Config", {"partial_rotary_factor": 0.5, **_rope("default")}),
    "Phi-4-mini": (
        "Phi3Config",
        {"tie_word_embeddings": True, "partial_rotary_factor": 0.75, **_long_rope(3)},
    ),
    "Phi-3.5-MoE": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    "OLMoE": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4-0414": ("Glm4Config", {"partial_rotary_factor": 0.5}),
    "GLM-4-9B": ("GlmConfig", {"partial_rotary_factor": 0.5}),
    "GLM-4.5": ("Glm4MoeConfig", {**_ROUTED, "partial_rotary_factor": 0.5}),
    "GLM-4.7-Flash": ("Glm4MoeLiteConfig", {**_ROUTED, **_LATENT}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": _SLIDING},
    ),
    "DeepSeek-V2": ("DeepseekV2Config", {**_ROUTED, **_LATENT, "topk_method": "group_limited_greedy"}),
    "DeepSeek-V3": ("DeepseekV3Config", {**_ROUTED, **_LATENT}),
    "DeepSeek-V3.2": (  # its indexer selects all keys; otherwise it is refused
        "DeepseekV32Config",
        {**_ROUTED, **_LATENT, "index_n_heads": 4, "index_head_dim": 8, "index_topk": MAX_CONTEXT},
    ),
    "Granite": (
        "GraniteConfig",
        {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    ),
    "Granite-MoE": (
        "GraniteMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "Cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2Config", {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    "SmolLM 2": ("LlamaConfig", {"tie_word_embeddings": True}),
    "SmolLM 3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "EXAONE 4": ("Exaone4Config", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    "ERNIE 4.5": ("Ernie4_5Config", {}),
    "Seed-OSS": ("SeedOssConfig", {}),
    "StableLM": ("StableLmConfig", {}),
    "Starcoder 2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "Nemotron": ("NemotronConfig", {}),
    "MiniMax-M2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "Falcon": ("FalconConfig", {"head_dim": _LEFT_OUT, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "BLOOM": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "Mamba 2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": WINDOW}),
    "Falcon-H1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": WINDOW},
    ),
    "AFMoE": ("AfmoeConfig", {**_EXPERTS, "sliding_window": WINDOW, "num_dense_layers": 1}),
    "Apertus": ("ApertusConfig", {}),
    "Arcee": ("ArceeConfig", {}),
    "Dots 1": ("Dots1Config", _ROUTED),
    "ERNIE 4.5 MoE": ("Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}
"""Name, class of its configuration, what differs from the common shape."""
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": WINDOW}
RECURRENT = ("Qwen3.5", "Qwen3-Next", "Mamba 2", "Falcon-H1", "Bamba", "Granite-MoE-Hybrid")
"""Families with recurrent layers that start from a state."""
FURTHER_FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "BioGPT": ("BioGptConfig", {}),
    "Bamba": ("BambaConfig", {**_STATE_SPACE, "attn_layer_indices": [1]}),
    "Falcon-Mamba": ("FalconMambaConfig", {"state_size": 8}),
    "Flex-OLMo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GPT-Neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "Granite-MoE-Hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_STATE_SPACE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 32,
        },
    ),
    "GLM-5": (
        "GlmMoeDsaConfig",
        {**_ROUTED, **_LATENT, "index_n_heads": 4, "index_head_dim": 8, "index_topk": MAX_CONTEXT},
    ),
    "HunYuan-MoE": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32}),
    "Jamba": (
        "JambaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            **{f"{kind}_layer_period": 2 for kind in ("attn", "expert")},
            **{f"{kind}_layer_offset": 1 for kind in ("attn", "expert")},
        },
    ),
    "JetMoE": ("JetMoeConfig", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "LongCat-Flash": (
        "LongcatFlashConfig",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 64,
            "zero_expert_num": 2,
            "num_layers": 2,
            "num_hidden_layers": _LEFT_OUT,
        },
    ),
    "Mamba": ("MambaConfig", {"state_size": 8}),
    "MiniCPM3": ("MiniCPM3Config", _LATENT),
    "MPT": (
        "MptConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 1 << 12,
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), _LEFT_OUT),
        },
    ),
    "BART": ("BartConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}),
    "XLM": ("XLMConfig", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True}),
    "OPT": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "attention_window_size": 1 << 12, "lru_width": 32},
    ),
    "VaultGemma": (
        "VaultGemmaConfig",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": _SLIDING},
    ),
    "XGLM": ("XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    "Youtu": ("YoutuConfig", _LATENT),
    "Zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid"] * 3,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": WINDOW,
            "attention_head_dim": 16,
            "num_mem_blocks": 2,
            "adapter_rank": 4,
        },
    ),
}
"""Families that docs/reference/models.md does not list, whose runs start or are refused by name."""
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}
# Beyond `VOCABULARY`, so that no row has a token that the released class takes for an image.
_IMAGE_TOKENS = {"image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 99, "vision_end_token_id": 100}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN3_5 = {**_DELTA_NET, "num_hidden_layers": 4}
_ROPE_3D = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
WRAPPED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3.5, 3.6": ("Qwen3_5Config", {"text_config": _QWEN3_5, "vision_config": _TOWER, **_IMAGE_TOKENS}),
    "Qwen3.5-MoE, 3.6": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 32},
            "vision_config": _TOWER,
            **_IMAGE_TOKENS,
        },
    ),
    "Qwen3-VL": (
        "Qwen3VLConfig",
        {
            "text_config": {"rope_parameters": {**_ROPE_3D, "mrope_interleaved": True}},
            "vision_config": {**_TOWER, "deepstack_visual_indexes": [0, 1]},
            **_IMAGE_TOKENS,
        },
    ),
    "Gemma 3, with images": (
        "Gemma3Config",
        {
            "text_config": {"sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 8},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 97,
            "boi_token_index": 98,
            "eoi_token_index": 99,
        },
    ),
    "Gemma 4": (
        "Gemma4Config",
        {
            "text_config": {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "global_head_dim": 8,
                "sliding_window": WINDOW,
                "layer_types": _SLIDING,
            },
            "vision_config": {key: _SIGLIP[key] for key in _SIGLIP if key != "image_size"} | {"head_dim": 8},
            "audio_config": None,
            "image_token_id": 97,
            "boi_token_id": 98,
            "eoi_token_id": 99,
        },
    ),
    "Mistral 3": (
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", "sliding_window": None},
            "vision_config": {**_SIGLIP, "model_type": "pixtral"},
            "image_token_index": 97,
            "spatial_merge_size": 2,
        },
    ),
    "GLM-4.1V": (
        "Glm4vConfig",
        {
            "text_config": {"rope_parameters": {**_ROPE_3D, "mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}},
            "vision_config": {
                **{key: value for key, value in _TOWER.items() if key != "num_position_embeddings"},
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_id": 97,
            "video_token_id": 98,
        },
    ),
    "Llama 4, with images": (
        "Llama4Config",
        {
            "text_config": {
                "attention_chunk_size": WINDOW,
                "num_local_experts": 4,
                "intermediate_size_mlp": 64,
                "attn_temperature_tuning": False,
            },
            "vision_config": {
                **_SIGLIP,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "vision_output_dim": 32,
            },
            "image_token_index": 97,
        },
    ),
}
"""Checkpoints for images and text, loaded as their released class: name, class of its configuration, its arguments.
What `text_config` says differs from the common shape."""


SERVED_BY_VLLM = {
    "Qwen3": "tests/contract/test_engine_vllm.py",
    "Qwen3-MoE": "tests/contract/test_engine_vllm_experts.py",
    "Gemma 3, with images": "tests/contract/test_engine_vllm_images.py",
    "Qwen3.5, 3.6": "tests/contract/test_engine_vllm_images.py",
}
"""Families of which a test serves a small model with vLLM: the test."""


def family_config(name: str, **shape: Any) -> PretrainedConfig:
    """The configuration of a small model of a family."""
    kind, different = {**FAMILIES, **FURTHER_FAMILIES, **WRAPPED}[name]
    if name in WRAPPED:
        sizes = {**_SHAPE, "vocab_size": VOCABULARY + 7, **shape, **different["text_config"]}
        different = {**different, "text_config": sizes}
        return cast("PretrainedConfig", getattr(transformers, kind)(**different))
    values = {name: value for name, value in {**_SHAPE, **shape, **different}.items() if value is not _LEFT_OUT}
    made: PretrainedConfig = getattr(transformers, kind)(**values)
    return made


def sharp_model(config: PretrainedConfig, *, seed: int = 1) -> PreTrainedModel:
    """A random model whose next tokens have at most half the entropy of the uniform distribution, in the mean.

    Raises:
        AssertionError: no scale of its matrices gives one.
    """
    import torch

    scale = 1.5
    for _ in range(20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = language_model_class(config).from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    if parameter.ndim > 1 and not name.endswith(_UNSCALED):
                        parameter.mul_(scale)
                    elif name.endswith("bias") or "sink" in name:
                        parameter.normal_(0, 0.5)
        model.train(False)
        if mean_entropy(model) <= math.log(VOCABULARY) / 2:
            return model
        scale *= 1.25
    raise AssertionError(f"{type(config).__name__}: no scale makes it sharp")


def mean_entropy(model: PreTrainedModel) -> float:
    """Of the next token, in nats, over random rows."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        logits = model(input_ids=torch.randint(3, VOCABULARY, (4, 48)), use_cache=False).logits.float()
        logprobs = logits.log_softmax(-1)
        return float(-(logprobs.exp() * logprobs).sum(-1).mean())


def lost_in_publishing(base: Path, path: Path) -> list[str]:
    """What differs between a checkpoint and a version published from it: names and shapes of tensors, and what the
    released class does not find in it."""
    stored, published = (
        {name: tensor.shape for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for directory in (base, path)
    )
    config = transformers.AutoConfig.from_pretrained(path)
    model, report = language_model_class(config).from_pretrained(path, output_loading_info=True)
    released = json.loads((path / "config.json").read_text())["architectures"]
    return [
        *(name for name in stored.keys() | published.keys() if stored.get(name) != published.get(name)),
        *report["missing_keys"],
        *(name for name in report["unexpected_keys"] if name not in stored),
        *(name for name, *_ in report["mismatched_keys"]),
        *([] if released == [type(model).__name__] else released),
    ]


def write_family(name: str, directory: Path) -> Path:
    """Save a sharp model of a family as a Hugging Face directory."""
    sharp_model(family_config(name)).save_pretrained(directory)
    return directory


def write_released(name: str, directory: Path, **options: Any) -> Path:
    """Save a random checkpoint of a family as its released class."""
    config = family_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        language_model_class(config).from_config(config).save_pretrained(directory, **options)
    return directory


def family_rows(*, seed: int = 3) -> list[TrainingSample]:
    """Rows on both sides of the window and of the original positions, half of which begin alike; all tokens trained."""
    random = np.random.default_rng(seed)
    prefix = random.integers(3, VOCABULARY, max(LENGTHS))
    rows = []
    for index, length in enumerate(LENGTHS):
        token_ids = random.integers(3, VOCABULARY, length)
        if index % 2:
            token_ids[: 2 * length // 3] = prefix[: 2 * length // 3]
        nothing = np.zeros(length, np.float32)
        rows.append(
            TrainingSample(
                token_ids=token_ids.astype(np.int32),
                loss_mask=np.arange(length) > 0,
                logprobs=nothing,
                advantages=nothing,
            )
        )
    return rows


def logprobs_of(model: PreTrainedModel, rows: Sequence[TrainingSample]) -> list[Tensor]:
    """Log-probabilities that transformers gives to the tokens behind the first of each row, forwarded alone.

    Positions of some models depend on how long the context is; a run computes all as in a context of `MAX_CONTEXT`, so
    there the row goes on to that length. What comes after a token does not change its probability otherwise.
    """
    ropes = getattr(model.config, "rope_parameters", None) or {}
    continued = ropes.get("rope_type") in ("dynamic", "longrope")
    found = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        whole = functional.pad(ids, (0, MAX_CONTEXT - len(ids)), value=5) if continued else ids
        logits = model(input_ids=whole[None], use_cache=False).logits[0, : len(ids) - 1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return found


def plain_model(directory: Path) -> PreTrainedModel:
    """The model of a directory as transformers loads its released class; its `sdpa` ignores Gemma 2's cap of scores."""
    config = transformers.AutoConfig.from_pretrained(directory)
    attention = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
    load = language_model_class(config).from_pretrained
    model: PreTrainedModel = load(directory, dtype=torch.float32, attn_implementation=attention)
    return model


def plain_logprobs(directory: Path, rows: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
    """Log-probabilities that transformers gives to the tokens behind the first of each row, forwarded alone."""
    model = plain_model(directory)
    with torch.no_grad():
        return [each.numpy() for each in logprobs_of(model, rows)]


def gradient_error(directory: Path, policy: PolicyModel, rows: Sequence[TrainingSample]) -> float:
    """Difference of the gradient of the summed log-probabilities from that of transformers, over its norm."""
    plain = plain_model(directory)
    torch.cat(logprobs_of(plain, rows)).sum().backward()
    policy.model.zero_grad()
    for batch in pack(rows, max_tokens=1 << 20, share=policy.shared_prefixes):
        token_logprobs(policy.model, batch, shared=policy.shared_prefixes).logprob.sum().backward()
    pairs = [
        (mine.grad, other.grad)
        for mine, other in zip(policy.model.parameters(), plain.parameters(), strict=True)
        if mine.grad is not None or other.grad is not None
    ]
    assert all(mine is not None and other is not None for mine, other in pairs)
    error = sum(float((mine - other).square().sum()) for mine, other in pairs)
    return math.sqrt(error / sum(float(other.square().sum()) for _, other in pairs))


def trained_logprobs(policy: PolicyModel, rows: Sequence[TrainingSample], *, way: str) -> list[NDArray[np.float32]]:
    """Log-probabilities the trainer gives to the same tokens.

    Args:
        policy: whose model computes them.
        rows: of which every token but the first is trained.
        way: "packed" in one micro-batch without sharing, "shared", "split" into several, or "padded".
    """
    model, tree = policy.model, way != "padded"
    found = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    most = max(LENGTHS) + 30 if way == "split" else 1 << 20
    with torch.no_grad(), forward_as(model, tree=tree):
        for batch in pack(rows, max_tokens=most, share=way in ("shared", "split")):
            values = token_logprobs(model, batch, shared=tree).logprob.cpu().numpy()
            for sample, position, value in zip(batch.sample, batch.position, values, strict=True):
                found[sample][position] = value
    return [each[1:] for each in found]


@contextmanager
def forward_as(model: PreTrainedModel, *, tree: bool) -> Iterator[None]:
    """Within the context, a model loaded for trees forwards padded rows unless `tree`."""
    before = model.config._attn_implementation
    if not tree:
        model.set_attn_implementation(native_attention(model))
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def long_run(directory: Path, *, policies: Mapping[str, AnyPolicy] | None = None) -> RunConfig:
    """The configuration of a run in contexts of up to `MAX_CONTEXT` tokens."""
    config = run_config(directory, policies=policies)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"max_context": MAX_CONTEXT})})


def ways(policy: PolicyModel) -> tuple[str, ...]:
    """How the rows of a model are forwarded in training."""
    return ("packed", "shared", "split", "padded") if policy.shared_prefixes else ("padded",)
