"""The table `[engine.vllm]`: engine arguments that go to vLLM by name, checked before anything is started.

The names and types come from vLLM's own argument class, read from the source of the installed vLLM, because importing
vLLM takes seconds and changes the process. An argument that would break a promise of agentrl is refused with the
reason, and one that a setting of agentrl decides with the name of that setting. Types that are vLLM's own classes are
left to vLLM, which checks them when it starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal  # noqa: F401 (names in vLLM's annotations, which pydantic looks up here)

from pydantic import PydanticUndefinedAnnotation, PydanticUserError, ValidationError, create_model

from agentrl.core.errors import ConfigError

_CLASSES = ("EngineArgs", "AsyncEngineArgs")
CANARY_LOGPROBS = 128
"""Number of log-probabilities that the canary check requests at once; see `engines.weights`."""

_SETTING_OF_ARGUMENT = {
    "model": "model.path",
    "model_weights": "model.path",
    "revision": "model.path",
    "code_revision": "model.path",
    "tokenizer_revision": "model.path",
    "dtype": "model.dtype, which the trainer computes in too",
    "max_model_len": "engine.max_context",
    "max_num_seqs": "engine.slots",
    "gpu_memory_utilization": "engine.memory_share",
    "device_ids": "engine.replicas (`agentrl doctor FILE` prints which GPUs each engine gets)",
    "enable_lora": "policies.NAME.lora",
    "max_loras": "policies.NAME.lora",
    "max_cpu_loras": "policies.NAME.lora",
    "max_lora_rank": "policies.NAME.lora.rank",
    "enable_return_routed_experts": "engine.capture_routing",
    "return_sampling_mask": "top_k, top_p and min_p in [sampling] or policies.NAME.sampling",
}
"""Arguments that a setting of agentrl decides."""

_ONE_HOST = "an engine is the processes of one host, which end with it; set engine.replicas and cluster.address"
_OTHER_MODEL = "vLLM would serve another model than the one that is trained"
_OTHER_CODE = "it names code to run inside vLLM, which nothing here has checked"
_OTHER_KEYS = "keys and values from outside were computed by weights that no span records"

_TOKENIZER = "token ids go in and come out; only grammars of replies need a tokenizer, the model's own"
_GRAMMARS = "recorded kept sets are those of xgrammar, from the reply's first token"

_REFUSAL_REASONS = {
    "logprobs_mode": "recorded log-probabilities must be those of the distribution that was sampled from "
    "(processed_logprobs)",
    "trust_remote_code": "it runs code that comes with a checkpoint",
    "load_format": "other loaders unpickle files, or load nothing; weights are read from safetensors",
    "model_loader_extra_config": "it configures loaders other than that of safetensors files",
    "skip_tokenizer_init": "token ids go in and come out; vLLM must never tokenize a text again",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "structured_outputs_config": _GRAMMARS,
    "reasoning_parser": _GRAMMARS,
    "enable_sleep_mode": "a vLLM that sleeps drops weights and adapters that it says it serves (vLLM issue 29341)",
    "scheduling_policy": "the canary check of new weights goes before all that waits, by priority",
    "enable_log_requests": "it writes the tokens of conversations into a log",
    "watermark_config": "a watermark changes the distribution that is sampled from",
    "diffusion_config": "a diffusion model has no log-probability of one token after another",
    "logits_processors": f"it changes the distribution that is sampled from, and {_OTHER_CODE}",
    "worker_extension_cls": "agentrl's own extension brings new weights in",
    "weight_transfer_config": "agentrl decides how new weights come in",
    "worker_cls": _OTHER_CODE,
    "scheduler_cls": _OTHER_CODE,
    "reasoning_parser_plugin": _OTHER_CODE,
    "io_processor_plugin": _OTHER_CODE,
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "config_format": _OTHER_MODEL,
    "model_class_overrides": _OTHER_MODEL,
    "runner": _OTHER_MODEL,
    "convert": _OTHER_MODEL,
    "hf_token": "a secret does not belong into a configuration, which is kept with the run; set HF_TOKEN",
    "kv_transfer_config": _OTHER_KEYS,
    "kv_offloading_size": "keys and values that left the GPU would outlive the weights that computed them",
    "kv_offloading_backend": "keys and values that left the GPU would outlive the weights that computed them",
    "kv_events_config": "it publishes the tokens of conversations on a port of every interface",
    "otlp_traces_endpoint": "it sends served content to another machine",
    "collect_detailed_traces": "it sends served content to another machine",
    "logging_config": _OTHER_CODE,
    "log_config_file": _OTHER_CODE,
    "profiler_config": "its traces are written wherever it says, with the shapes of conversations",
    "generation_config": "it ends replies at other tokens than the chat template's; set sampling",
    "override_generation_config": "it ends replies at other tokens than the chat template's; set sampling",
    "lora_target_modules": "an adapter's other modules would be left out without a word",
    "default_mm_loras": _OTHER_MODEL,
    "ec_transfer_config": _OTHER_KEYS,
    "enable_elastic_ep": "the GPUs of an engine are assigned once, when it starts",
    **dict.fromkeys(
        (
            *("nnodes", "node_rank", "master_addr", "master_port", "data_parallel_rank", "data_parallel_start_rank"),
            *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"),
            *("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
        ),
        _ONE_HOST,
    ),
}
"""Arguments that would break a promise, with the reason."""


def check_arguments(arguments: Mapping[str, Any], *, on_gpu: bool) -> None:
    """Refuse invalid arguments of `[engine.vllm]` for the installed vLLM, reporting all mistakes at once.

    Args:
        arguments: values by argument name.
        on_gpu: whether vLLM will compute on GPUs.

    Raises:
        ConfigError: an argument is unknown, of a wrong type, decided by another setting, or would break a promise.
    """
    if not arguments:
        return
    types = argument_types()
    problems = [
        f"engine.vllm.{name}: {problem}"
        for name, value in arguments.items()
        if (problem := _problem(name, value, types, on_gpu=on_gpu))
    ]
    if problems:
        raise ConfigError("\n  ".join(problems))


def argument_types() -> dict[str, str]:
    """Return the arguments of the installed vLLM, each with its annotation in vLLM's source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("engine.vllm: vLLM is not installed, so its arguments cannot be checked")
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    module = ast.parse(source.read_text(encoding="utf-8"))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    }


def _problem(name: str, value: Any, types: Mapping[str, str], *, on_gpu: bool) -> str:
    """Return the reason why an argument is refused; empty if it is accepted."""
    if name not in types:
        suggestions = difflib.get_close_matches(name.replace("-", "_"), types, n=1)
        return f"vLLM has no such engine argument{f'; did you mean {suggestions[0]}?' if suggestions else ''}"
    if name in _SETTING_OF_ARGUMENT:
        return f"is set by {_SETTING_OF_ARGUMENT[name]}; remove it here"
    if name in _REFUSAL_REASONS:
        return f"is refused: {_REFUSAL_REASONS[name]}"
    return _type_problem(value, types[name]) or next(iter(_value_problems(name, value, on_gpu=on_gpu)), "")


def _type_problem(value: Any, annotation: str) -> str:
    try:
        field: Any = (annotation, ...)
        model = create_model("EngineArgument", __module__=__name__, value=field)
        model.model_rebuild()
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError):  # a class of vLLM, which vLLM validates itself
        return ""
    value_to_check = set(value) if annotation.startswith("set[") and isinstance(value, list) else value
    try:
        model.model_validate({"value": value_to_check}, strict=True)
    except ValidationError:
        return f"{value!r} is no {annotation}"
    return ""


def _value_problems(name: str, value: Any, *, on_gpu: bool) -> Iterator[str]:
    if name == "distributed_executor_backend" and value not in ("mp", "uni"):
        yield f"{value!r} is refused: {_ONE_HOST}"
    if name == "max_logprobs" and 0 <= value < CANARY_LOGPROBS:
        yield f"{value} is refused: the canary check of new weights needs {CANARY_LOGPROBS} log-probabilities"
    if name == "quantization" and value in ("gguf", "bitsandbytes"):
        yield f"{value!r} is refused, because it needs a special loader; weights are read from safetensors"
    if name == "enable_chunked_prefill" and value and not on_gpu:
        yield "true is refused: on CPUs a request with a seed kills vLLM 0.32 in a chunked prefill"
    yield from _code_problems(name, value)
    if name == "speculative_config":
        if not isinstance(value, Mapping):
            yield f"{value!r} is no table"
        elif value.get("draft_load_config"):
            yield f"draft_load_config is refused: {_REFUSAL_REASONS['load_format']}"
        elif value.get("code_revision"):
            yield f"code_revision is refused: {_REFUSAL_REASONS['trust_remote_code']}"
        elif value.get("rejection_sample_method", "standard") not in ("standard", "block"):
            yield (
                f"rejection_sample_method = {value['rejection_sample_method']!r} is refused: it accepts tokens that "
                "the model did not sample, so no log-probability belongs to them"
            )
        elif not on_gpu:
            yield (
                "speculative decoding is refused on CPUs: of the tokens it samples, vLLM 0.32 reports wrong "
                "log-probabilities for some, up to several nats off, or none (docs/reference/engines.md)"
            )


def _code_problems(name: str, value: Any) -> Iterator[str]:
    """Yield the problems of code that a table names."""
    if name == "compilation_config" and isinstance(value, Mapping):
        for key in ("backend", "inductor_passes"):
            if value.get(key) and (key != "backend" or value[key] not in ("inductor", "eager")):
                yield f"{key} = {value[key]!r} is refused: {_OTHER_CODE}"
