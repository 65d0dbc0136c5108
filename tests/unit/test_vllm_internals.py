"""What the adapter uses of vLLM beside its documented interface, by name, in the source of the installed vLLM.

An update of vLLM that renames one of these fails here, with the name, and not in a worker process.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config.policies import PolicyConfig
from agentrl.core.records import PolicyVersion
from agentrl.engines import weights
from agentrl.engines.experts import ExpertFactors
from agentrl.engines.vllm import arguments
from agentrl.engines.weights.reading import read_adapter
from agentrl.learn.models import load_models
from agentrl.learn.publish import Publisher
from tests.contract.vllm_suite import MISSING
from tests.learn_cases import LORA, run_config, write_model

_SPEC = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(_SPEC is None, reason=MISSING)

USED = {
    "v1/worker/lora_model_runner_mixin.py": {"LoRAModelRunnerMixin.add_lora", "LoRAModelRunnerMixin.lora_manager"},
    "lora/worker_manager.py": {"WorkerLoRAManager.add_dummy_lora", "WorkerLoRAManager.lora_config"},
    "distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory._registry"},
    "distributed/weight_transfer/nccl_common.py": {"uid_init_process_group", "worker_init_payload"},
    "distributed/weight_transfer/ipc_engine.py": {
        "IPCTrainerWeightTransferEngine._do_send",
        "IPCTrainerWeightTransferEngine._post_send_sync",
    },
    "model_executor/model_loader/default_loader.py": {"DefaultModelLoader.get_all_weights"},
    "model_executor/model_loader/reload/layerwise.py": {"initialize_layerwise_reload", "finalize_layerwise_reload"},
    "model_executor/layers/fused_moe/fused_moe_method_base.py": {"FusedMoEMethodBase.moe_kernel"},
    "config/vllm.py": {"VllmConfig.use_v2_model_runner"},
    "config/model.py": {"ModelConfig.return_sampling_mask", "ModelConfig.get_vocab_size"},
    "config/cache.py": {"CacheConfig.kv_cache_size_tokens", "CacheConfig.enable_prefix_caching"},
    "config/lora.py": {"LoRAConfig.max_lora_rank", "LoRAConfig.enable_mixed_moe_lora_format"},
    "v1/structured_output/__init__.py": {"StructuredOutputManager._create_grammar"},
    "v1/structured_output/backend_xgrammar.py": {"XgrammarBackend.compile_grammar", "XgrammarGrammar.accept_tokens"},
    "v1/request.py": {"Request.prompt_token_ids", "Request.sampling_params"},
    "lora/request.py": {"LoRARequest.is_3d_lora_weight"},
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


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize("kind", ["moe", "deepseek", "gpt_oss"])
def test_vllm_reads_adapters_of_experts_as_they_are_computed(tmp_path: Path, kind: str) -> None:
    """Its own reader, and its conversion to matrices of single experts, find what the trainer published."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    policies = {"policy": PolicyConfig(lora=LORA.model_copy(update={"experts": True}))}
    config = run_config(write_model(tmp_path / kind, kind=kind), policies=policies)
    model = load_models(config.trainer_plan, torch.device("cpu"))["policy"]
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.normal_()
    version = Publisher(tmp_path).publish(PolicyVersion("policy", 0, 1), model)
    helper = PEFTHelper.from_local_dir(version.path, 512)
    linear = {name.split(".")[-3] for name in model.publication.layout()} | {"experts"}
    read = LoRAModel.from_local_checkpoint(version.path, linear, helper, lora_model_id=1, device="cpu")
    config_of_vllm = SimpleNamespace(architectures=model.model.config.architectures)
    manager: Any = SimpleNamespace(
        model=SimpleNamespace(config=config_of_vllm), _get_lora_layer_weights=lambda loras, name: loras.get_lora(name)
    )
    written = read_adapter(version, max_numbers=1 << 24).matrices
    path = "model.layers.1.mlp.experts"
    experts = SimpleNamespace(local_num_experts=4, global_num_experts=4, ep_rank=0)
    LoRAModelManager._convert_3d_to_2d_moe_lora(manager, read, experts, path)
    found = read.get_lora(path)
    gate_a, down_a, up_a = found.lora_a
    gate_b, down_b, up_b = (found.scaling * each for each in found.lora_b)
    matrices = (written[name] for name in (f"{path}.base_layer", path))
    gate_up, down = (ExpertFactors.from_peft(a, b * found.scaling, 4) for a, b in matrices)
    rank = LORA.rank
    torch.testing.assert_close(down.down[:, :rank], down_a)
    torch.testing.assert_close(down.up[:, :rank], down_b.transpose(1, 2))
    torch.testing.assert_close(gate_up.down[:, :rank], gate_a)
    torch.testing.assert_close(gate_up.down[:, :rank], up_a)
    joined = torch.stack([gate_b, up_b], 2).flatten(1, 2) if kind == "gpt_oss" else torch.cat([gate_b, up_b], 1)
    torch.testing.assert_close(gate_up.up[:, :rank], joined.transpose(1, 2))
