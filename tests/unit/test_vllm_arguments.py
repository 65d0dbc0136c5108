"""`[engine.vllm]`: arguments go to vLLM by name; what vLLM does not know or would break a promise is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ConfigError
from agentrl.engines.vllm.arguments import _REFUSAL_REASONS, _SETTING_OF_ARGUMENT, argument_types, check_arguments

ACCEPTED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "seed": 3,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "cpu_offload_gb": 2,
    "cpu_offload_params": ["mlp"],
    "compilation_config": {"level": 0},
    "disable_custom_all_reduce": True,
    "distributed_executor_backend": "mp",
    "long_prefill_token_threshold": 1024,
    "max_logprobs": 256,
    "limit_mm_per_prompt": {"image": 0},
    "cudagraph_capture_sizes": [1, 2, 4],
    "async_scheduling": True,
    "fully_sharded_loras": True,
}
REFUSED = [
    ("tensor_paralel_size", 2, "did you mean tensor_parallel_size"),
    ("enforce-eagr", True, "did you mean enforce_eager"),
    ("gpu_memory_utilization", 0.5, "set by engine.memory_share"),
    ("max_model_len", 512, "set by engine.max_context"),
    ("logprobs_mode", "raw_logprobs", "distribution that was sampled from"),
    ("trust_remote_code", True, "code that comes with a checkpoint"),
    ("load_format", "auto", "unpickle"),
    ("skip_tokenizer_init", False, "never tokenize"),
    ("enable_sleep_mode", True, "drops weights"),
    ("logits_processors", ["a:b"], "changes the distribution"),
    ("worker_cls", "a.B", "code to run inside"),
    ("hf_overrides", {"rope_theta": 1.0}, "another model"),
    ("nnodes", 2, "engine.replicas"),
    ("distributed_executor_backend", "ray", "cluster.address"),
    ("max_logprobs", 5, "128"),
    ("speculative_config", {"rejection_sample_method": "synthetic"}, "did not sample"),
    ("speculative_config", 3, "is no"),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}, "wrong log-probabilities"),
    ("speculative_config", {"draft_load_config": {"load_format": "pt"}}, "unpickle"),
    ("compilation_config", {"backend": "package.module.function"}, "code to run inside"),
    ("compilation_config", {"inductor_passes": {"a": "package.module.function"}}, "code to run inside"),
    ("structured_outputs_config", {"backend": "guidance"}, "kept sets are those of xgrammar"),
    ("reasoning_parser", "qwen3", "kept sets are those of xgrammar"),
    ("kv_events_config", {"enable_kv_cache_events": True, "publisher": "zmq"}, "every interface"),
    ("kv_offloading_size", 4.0, "outlive"),
    ("logging_config", {}, "code to run inside"),
    ("otlp_traces_endpoint", "http://192.0.2.1", "another machine"),
    ("override_generation_config", {"eos_token_id": [1]}, "other tokens"),
    ("lora_target_modules", ["q_proj"], "left out"),
    ("enforce_eager", "yes", "is no bool"),
    ("cpu_offload_gb", "much", "is no float"),
    ("cudagraph_capture_sizes", [1, "two"], "is no list"),
    ("enable_chunked_prefill", True, "seed"),
]


def test_arguments_of_vllm_are_accepted() -> None:
    assert len(ACCEPTED) >= 20
    check_arguments(ACCEPTED, on_gpu=True)


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED)
def test_an_argument_is_refused_with_its_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name}: .*{reason}"):
        check_arguments({"seed": 1, name: value}, on_gpu=False)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)load_format.*seed.*no_such"):
        check_arguments({"load_format": "auto", "seed": "1", "no_such": 1}, on_gpu=True)


def test_every_refused_name_is_one_of_the_installed_vllm() -> None:
    assert not {*_SETTING_OF_ARGUMENT, *_REFUSAL_REASONS} - argument_types().keys()


def test_parallel_sizes_are_whole_numbers() -> None:
    assert EngineConfig(vllm={"tensor_parallel_size": 2, "data_parallel_size": 3}).devices == 6
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        EngineConfig(vllm={"tensor_parallel_size": "2"})
    assert [EngineConfig(vllm=table).kind for table in (None, {}, {"enforce_eager": True})] == [
        "embedded",
        *2 * ["vllm"],
    ]
