"""What the adapter uses of vLLM beside its documented interface, by name, in the source of the installed vLLM.

An update of vLLM that renames one of these fails here, with the name, and not in a worker process.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from agentrl.engines import weights
from agentrl.engines.vllm import arguments
from tests.contract.vllm_suite import MISSING

_SPEC = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(_SPEC is None, reason=MISSING)

USED = {
    "v1/worker/lora_model_runner_mixin.py": {"LoRAModelRunnerMixin.add_lora", "LoRAModelRunnerMixin.lora_manager"},
    "lora/worker_manager.py": {"WorkerLoRAManager.add_dummy_lora", "WorkerLoRAManager.lora_config"},
    "distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory._registry"},
    "model_executor/model_loader/default_loader.py": {"DefaultModelLoader.get_all_weights"},
    "model_executor/model_loader/reload/layerwise.py": {"initialize_layerwise_reload", "finalize_layerwise_reload"},
    "model_executor/layers/fused_moe/fused_moe_method_base.py": {"FusedMoEMethodBase.moe_kernel"},
    "config/vllm.py": {"VllmConfig.use_v2_model_runner"},
    "config/model.py": {"ModelConfig.return_sampling_mask", "ModelConfig.get_vocab_size"},
    "config/cache.py": {"CacheConfig.kv_cache_size_tokens", "CacheConfig.enable_prefix_caching"},
    "config/lora.py": {"LoRAConfig.max_lora_rank"},
    "v1/structured_output/__init__.py": {"StructuredOutputManager._create_grammar"},
    "v1/structured_output/backend_xgrammar.py": {"XgrammarBackend.compile_grammar", "XgrammarGrammar.accept_tokens"},
    "v1/request.py": {"Request.prompt_token_ids", "Request.sampling_params"},
    "sampling_params.py": {
        "SamplingParams.routed_experts_prompt_start",
        "SamplingParams.logprob_token_ids",
        "SamplingParams._all_stop_token_ids",
    },
    "outputs.py": {
        "CompletionOutput.routed_experts",
        "CompletionOutput.sampling_mask",
        "CompletionOutput.weight_versions",
        "SamplingMask.token_ids",
        "WeightVersionSpan.version",
    },
}
RUNNERS = {"v1/worker/gpu_model_runner.py": "V1", "v1/worker/gpu/model_runner.py": "V2"}


def parsed(file: str) -> ast.Module:
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations
    return ast.parse(Path(_SPEC.submodule_search_locations[0], file).read_text(encoding="utf-8"))


def names_of(module: ast.Module) -> set[str]:
    """Functions, and classes with their methods, fields and attributes of `self`."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if not isinstance(node, ast.ClassDef):
            continue
        for each in ast.walk(node):
            match each:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(f"{node.name}.{name}")
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                    names.add(f"{node.name}.{name}")
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    names.add(f"{node.name}.{name}")
    return names


@pytest.mark.parametrize("file", sorted(USED))
def test_vllm_has_what_the_adapter_uses(file: str) -> None:
    assert USED[file] - names_of(parsed(file)) == set()


@pytest.mark.parametrize("file", sorted(RUNNERS), ids=RUNNERS.get)
def test_both_model_runners_load_adapters_alike(file: str) -> None:
    (runner,) = (each for each in parsed(file).body if isinstance(each, ast.ClassDef) and each.name == "GPUModelRunner")
    assert "LoRAModelRunnerMixin" in {base.id for base in runner.bases if isinstance(base, ast.Name)}


def test_the_adapter_uses_no_other_private_name_of_vllm() -> None:
    private = set()
    files = [*Path(arguments.__file__).parent.glob("*.py"), *Path(weights.__path__[0]).glob("vllm_*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            of_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not of_own:
                private.add(node.attr)
    of_python = {"_config", "_exit", "_make_filename", "__init__", "__name__"}
    assert private - of_python == {"_registry", "_create_grammar", "_all_stop_token_ids"}
