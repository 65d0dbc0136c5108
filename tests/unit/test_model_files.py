"""The models that a run names: versions of other runs are kept, and files that change in place are noticed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.app.model_files import (
    check_models_unchanged,
    keep_models,
    model_paths,
    record_models,
    with_kept_models,
    with_model_paths,
)
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, JournalError, RunDirectoryError, StorageError
from agentrl.observe.run_directory import RunDirectory

SETTINGS = (
    ("model", "path"),
    ("policies", "solver", "model"),
    ("policies", "solver", "reference"),
    ("policies", "judge", "path"),
)


def write_model(directory: Path, content: str = "first") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model-1.safetensors").write_text(content)
    (directory / "model-2.safetensors").write_text("second")
    return directory


def config_of(directory: Path, **paths: Path) -> RunConfig:
    """Each setting names a model of its own in `directory`, or the one in `paths`."""
    models = {setting[-1]: str(paths.get(setting[-1], directory / setting[-1])) for setting in SETTINGS[1:]}
    values: dict[str, Any] = {
        "name": "two",
        "directory": str(directory / "runs"),
        "environment": {"id": "unused"},
        "model": {"path": str(paths.get("base", directory / "base"))},
        "policies": {
            "solver": {"model": models["model"], "reference": models["reference"]},
            "judge": {"kind": "frozen", "path": models["path"]},
        },
    }
    return RunConfig.model_validate(values)


def written(directory: Path) -> RunConfig:
    config = config_of(directory)
    assert set(model_paths(config)) == set(SETTINGS)
    for path in model_paths(config).values():
        write_model(Path(path))
    return config


def recorded(config: RunConfig) -> Any:
    return json.loads(json.dumps(msgspec.to_builtins(record_models(model_paths(config)))))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "model-2.safetensors").write_text("Second"),
        lambda model: (model / "model-2.safetensors").unlink(),
        lambda model: (model / "model-3.safetensors").write_text("third"),
        lambda model: (model / "config.json").write_text('{"rope_theta": 1}'),
        lambda model: (model / "tokenizer.json").write_text("{}"),
    ],
)
def test_a_model_that_changed_in_place_is_refused_by_its_setting(
    tmp_path: Path, setting: tuple[str, ...], change: Any
) -> None:
    config = written(tmp_path)
    before = recorded(config)
    check_models_unchanged(model_paths(config), before)
    change(Path(model_paths(config)[setting]))
    with pytest.raises(ConfigError, match=rf"^{'.'.join(setting)}: .*(now|missing).*then.*--name"):
        check_models_unchanged(model_paths(config), before)


def test_a_link_that_leads_to_another_model_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path)
    for name in ("base", "other"):
        write_model(tmp_path / "real" / name, content=name)
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "base").symlink_to(tmp_path / "real" / "base")
    before = recorded(config)
    (tmp_path / "base").unlink()
    (tmp_path / "base").symlink_to(tmp_path / "real" / "other")
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_models_unchanged(model_paths(config), before)


def test_the_same_content_in_other_files_is_the_same_model(tmp_path: Path) -> None:
    config = written(tmp_path)
    before = recorded(config)
    for file in (tmp_path / "base").iterdir():
        copy = file.with_suffix(".copy")
        shutil.copyfile(file, copy)
        os.utime(copy, ns=(0, 0))
        copy.replace(file)
    check_models_unchanged(model_paths(config), before)
    check_models_unchanged(model_paths(config), [])  # begun by a version that recorded nothing
    check_models_unchanged(model_paths(config), {"damaged": True})
    # another directory is a change of the setting, which has its own rule
    check_models_unchanged(model_paths(with_model_paths(config, {SETTINGS[0]: str(tmp_path / "path")})), before)


def test_a_file_with_the_recorded_inode_and_times_is_not_read_again(tmp_path: Path) -> None:
    config = written(tmp_path)
    before = recorded(config)
    for model in before:
        for file in model["files"].values():
            file[-1] = "recorded"
    assert {file.sha256 for model in record_models(model_paths(config), before) for file in model.files.values()} == {
        "recorded"
    }


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A run with two versions, and a link to the newer one."""
    run = tmp_path / "runs" / "one"
    for step in (1, 2):
        write_model(run / "versions" / "solver" / f"0.{step}", content=str(step))
    (run / "config.json").write_text("{}")
    (run / "policies").mkdir()
    (run / "policies" / "solver").symlink_to("../versions/solver/0.2")
    return run


@pytest.mark.parametrize("can_link", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_version_of_another_run_outlives_it(
    tmp_path: Path, one: Path, setting: tuple[str, ...], can_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    run = tmp_path / "runs" / "two"
    asked = with_model_paths(written(tmp_path), {setting: str(one / "policies" / "solver")})
    (one / "policies" / "solver" / ".tmp-model.safetensors").write_text("half of it")
    config = keep_models(asked, run)
    kept = Path(model_paths(config)[setting])
    assert {key for key, path in model_paths(config).items() if path != model_paths(asked)[key]} == {setting}
    assert kept == run / "models" / "one-solver-0.2"
    assert not (kept / ".tmp-model.safetensors").exists()
    assert (kept / "model-1.safetensors").samefile(one / "versions/solver/0.2/model-1.safetensors") == can_link
    before = json.loads(RunDirectory.create(run, config.model_dump_json()).path.joinpath("config.json").read_text())
    # one trains on, and is removed: the command of the start, and the version's own name, mean what they meant
    (one / "policies" / "solver").unlink()
    (one / "policies" / "solver").symlink_to("../versions/solver/0.1")
    shutil.rmtree(one / "versions" / "solver" / "0.2")
    for path in (one / "policies" / "solver", one / "versions" / "solver" / "0.2", kept):
        again = with_kept_models(with_model_paths(asked, {setting: str(path)}), run, before)
        assert model_paths(again) == model_paths(config)
    shutil.rmtree(one)
    assert model_paths(with_kept_models(asked, run, before)) == model_paths(config)
    moved = run.rename(tmp_path / "moved")
    again = with_kept_models(config, moved, before)
    assert model_paths(again)[setting] == str(moved / "models" / kept.name), "the configuration that the run recorded"
    moved.rename(run)
    assert (kept / "model-1.safetensors").read_text() == "2"
    other = with_model_paths(asked, {setting: str(tmp_path / "another")})
    assert with_kept_models(other, run, before) == other, "which the check of the settings refuses"


def test_a_kept_model_that_leads_out_of_the_run_is_refused(tmp_path: Path, one: Path) -> None:
    run, config = tmp_path / "runs" / "two", config_of(tmp_path, base=one / "policies/solver")
    before = json.loads(keep_models(config, run).model_dump_json())
    file = run / "models" / "one-solver-0.2" / "config.json"
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(JournalError, match=r"config\.json"):
        with_kept_models(config, run, before)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_the_list_of_kept_models_is_read_only_where_it_lies(
    tmp_path: Path, one: Path, make: Callable[[Path], None]
) -> None:
    run, config = tmp_path / "runs" / "two", config_of(tmp_path, base=one / "policies/solver")
    before = json.loads(keep_models(config, run).model_dump_json())
    (run / "models" / "sources.json").unlink()
    make(run / "models" / "sources.json")
    assert with_kept_models(config, run, before) == config


def test_models_that_a_command_does_not_use_are_not_read(tmp_path: Path) -> None:
    config = written(tmp_path)
    before = recorded(config)
    (tmp_path / "reference" / "config.json").write_text("{ }")
    check_models_unchanged(model_paths(config), before, ignored=["policies.*.reference"])
    with pytest.raises(ConfigError, match="reference"):
        check_models_unchanged(model_paths(config), before, ignored=["policies.*.path"])


def test_versions_of_runs_with_one_name_are_kept_apart(tmp_path: Path, one: Path) -> None:
    namesake = Path(shutil.copytree(one, tmp_path / "elsewhere" / "one", symlinks=True))
    (namesake / "versions/solver/0.2/model-1.safetensors").write_text("namesake")
    config = config_of(tmp_path, base=one / "policies/solver", reference=namesake / "policies/solver")
    kept = model_paths(keep_models(config, tmp_path / "runs" / "two"))
    contents = [Path(kept[setting], "model-1.safetensors").read_text() for setting in (SETTINGS[0], SETTINGS[2])]
    assert contents == ["2", "namesake"]


def test_models_that_are_no_versions_are_not_touched(tmp_path: Path) -> None:
    config, run = written(tmp_path), tmp_path / "runs" / "two"
    assert keep_models(config, run) == config
    assert not run.exists()


def test_a_run_that_exists_is_not_changed(tmp_path: Path, one: Path) -> None:
    run = tmp_path / "runs" / "two"
    config = config_of(tmp_path, base=one / "policies/solver")
    keep_models(config, run)  # and killed before config.json
    kept = keep_models(config, run)
    RunDirectory.create(run, kept.model_dump_json())
    (run / "models" / "one-solver-0.2" / "model-1.safetensors").unlink()
    assert keep_models(config, run) == config
    assert not (run / "models" / "one-solver-0.2" / "model-1.safetensors").exists()
    with pytest.raises(RunDirectoryError, match="resume"):
        RunDirectory.create(run, kept.model_dump_json())


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, one: Path) -> None:
    (tmp_path / "runs" / "two").write_text("")
    with pytest.raises(StorageError, match=r"two.models.*start from there"):
        keep_models(config_of(tmp_path, base=one / "policies/solver"), tmp_path / "runs" / "two")
