"""A model by its name on the hub is the directory of one commit in the cache; what is missing is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from agentrl.app.hub import is_hub_name, with_downloaded_models
from agentrl.app.policies import check_adapter_base
from agentrl.cli.main import main
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import InputError, ModelError
from agentrl.core.records import PolicyVersion
from agentrl.learn.models import load_models
from agentrl.learn.publish import Publisher
from tests.learn_cases import LORA, run_config

OLD, NEW = "a" * 40, "b" * 40
NAME = "example-org/Tiny-0.1B"


def named(path: str = NAME, policy: str = "") -> RunConfig:
    policies = {"first": {}, "second": {"model": policy}}
    return RunConfig.model_validate({"environment": {"id": "unused"}, "model": {"path": path}, "policies": policies})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """A cache with two commits of a model: `main` is the newer one, `v1` the older."""
    root = tmp_path / "hub"
    model = root / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    for commit, names in ((OLD, ("v1",)), (NEW, ("main",))):
        shutil.copytree(repository / "environments/calculator/model", model / "snapshots" / commit)
        for name in names:
            (model / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model


def test_a_name_becomes_the_directory_of_its_commit(cache: Path) -> None:
    for revision, commit in (("", NEW), ("@v1", OLD), (f"@{OLD}", OLD)):
        config = with_downloaded_models(named("elsewhere", f"{NAME}{revision}"), {})
        assert config.base_of("second") == with_downloaded_models(named(f"{NAME}{revision}"), {}).model.path
        assert Path(config.base_of("second")) == cache / "snapshots" / commit
        assert with_downloaded_models(config, {}) == config, "the configuration that a run keeps is read again as it is"


def test_a_run_is_resumed_with_the_commit_it_began_with(cache: Path) -> None:
    began = with_downloaded_models(named(f"{NAME}@v1", f"{NAME}@v1"), {})
    before: dict[str, Any] = json.loads(began.model_dump_json())
    assert with_downloaded_models(named(NAME, NAME), before) == began, "although main is another commit now"
    newer = with_downloaded_models(named(f"{NAME}@{NEW}"), before)
    assert Path(newer.model.path).name == NEW, "which check_settings_unchanged will refuse"
    other = {"model": {"path": str(cache.parent / "models--a--b/snapshots" / OLD)}, "policies": "damaged"}
    assert Path(with_downloaded_models(named(), other).model.path).name == NEW


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("example-org/Absent", r"hf download example-org/Absent.*model\.path"),
        (f"{NAME}@v9", f"hf download {NAME} --revision v9"),
    ],
)
def test_what_is_not_there_is_told_with_what_to_download_and_where(cache: Path, path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        with_downloaded_models(named(path), {})


def test_weights_that_would_be_unpickled_are_refused(cache: Path) -> None:
    for file in (cache / "snapshots" / NEW).glob("*.safetensors"):
        file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match="safetensors"):
        with_downloaded_models(named(), {})


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for path in (
        "models/absent",
        "/models/x",
        "./a/b",
        "a/b/c",
        "model",
        "",
        "../a/b",
        "a/.b",
        "a/b@",
        "models/x@main",
    ):
        assert not is_hub_name(path), path
        assert with_downloaded_models(named(path or "x"), {}).model.path == (path or "x")


def test_doctor_explains_a_model_that_was_not_downloaded(
    cache: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", str(repository / "examples/01_tool_use.toml")]
    assert main([*arguments, "--model.path=example-org/Absent"]) == 1
    assert capsys.readouterr().out.count("hf download example-org/Absent") == 1
    assert main([*arguments, f"--model.path={NAME}", "--engine.slots=8", "--trainer.micro_batch_tokens=256"]) == 0


def test_an_adapter_names_its_base_on_the_hub_and_the_commit(cache: Path, tmp_path: Path) -> None:
    """A path into this machine's cache means nothing to others; an adapter from others may name the model, too."""
    base = cache / "snapshots" / OLD
    policies = {"policy": PolicyConfig(lora=LORA.model_copy(update={"target_modules": ()}))}
    model = load_models(run_config(base, policies=policies).trainer_plan, torch.device("cpu"))["policy"]
    (tmp_path / "run").mkdir()
    weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), model)
    file = Path(weights.path) / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, OLD)
    check_adapter_base(weights, base)
    file.write_text(json.dumps(settings | {"base_model_name_or_path": "example-org/Other-0.1B"}))
    with pytest.raises(InputError, match=r"Other-0\.1B"):
        check_adapter_base(weights, base)
