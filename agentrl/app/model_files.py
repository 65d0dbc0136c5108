"""The models that a configuration names: their files are kept for the run, and must stay the same until its end.

A version of another run would be deleted by that run's retention. So a run that starts from one links its files into
`RUN/models/` (a copy, on another file system) and uses them there, also when it resumes.

A run records the SHA-256 of every model's files when it begins. A resume compares them: a file whose size, time of
modification and inode are the recorded ones is not read again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config.policies import LocalPolicy
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, InputError, StorageError
from agentrl.core.files import (
    STAGING,
    link_or_copy,
    open_regular,
    read_at_most,
    refuse_links,
    replace_file,
    sha256_of,
)
from agentrl.core.setting_paths import value_at

Setting = tuple[str, ...]
"""Path of a setting, such as `("policies", "solver", "reference")`."""
_FILES = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model")
"""Patterns of the files that determine what a model computes."""
_SOURCES = "sources.json"
_MAX_SOURCES_BYTES = 1 << 20


def model_paths(config: RunConfig) -> dict[Setting, str]:
    """Return the directories (or names on the hub) of models and adapters that the configuration names."""
    paths: dict[Setting, str] = {("model", "path"): config.model.path}
    for name, policy in config.of_kind(LocalPolicy).items():
        for key in ("model", "reference", "path"):
            paths["policies", name, key] = getattr(policy, key, "")
    return {setting: path for setting, path in paths.items() if path}


def with_model_paths(config: RunConfig, paths: Mapping[Setting, str]) -> RunConfig:
    """Return the configuration with other directories of models."""
    policies: dict[str, Any] = dict(config.policies)
    model = config.model
    for setting, path in paths.items():
        if setting == ("model", "path"):
            model = model.model_copy(update={"path": path})
        else:
            _, name, key = setting
            policies[name] = policies[name].model_copy(update={key: path})
    return config.model_copy(update={"model": model, "policies": policies})


# --- versions of other runs -------------------------------------------------------------------------------------------


def with_kept_models(config: RunConfig, run: Path, before: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a resumed run with the models that it has kept, where it names their sources.

    Args:
        config: configuration to resume with.
        run: directory of the run.
        before: the configuration with which the run was started, as data.

    Raises:
        JournalError: a kept model, or a file of it, is a symbolic link.
    """
    try:
        with open_regular(run / "models" / _SOURCES) as file:
            sources = json.loads(read_at_most(file, _MAX_SOURCES_BYTES))
    except (OSError, ValueError, RecursionError):
        return config
    kept = {}
    for setting, path in model_paths(config).items():
        value = value_at(before, *setting)
        name = Path(value).name if isinstance(value, str) else ""
        source = sources.get(name) if isinstance(sources, dict) else None
        directory = run / "models" / name
        is_kept = name and directory.is_dir() and isinstance(source, list)
        refuse_links(run / "models", *([directory, *directory.iterdir()] if is_kept else ()))
        if is_kept and {path, os.path.realpath(path)} & {*map(str, source or ()), str(directory), value}:
            kept[setting] = str(directory)
    return with_model_paths(config, kept)


def keep_models(config: RunConfig, run: Path) -> RunConfig:
    """Link the models that are versions of other runs into the directory of a new run; returns the configuration with
    these directories.

    Raises:
        StorageError: the files can be neither linked nor copied.
    """
    kept: dict[Setting, str] = {}
    sources: dict[str, list[str]] = {}
    for setting, path in model_paths(config).items():
        source = Path(os.path.realpath(path))
        if _is_version(source) and not source.is_relative_to(os.path.realpath(run)):
            name = "-".join((source.parents[2].name, source.parent.name, source.name))
            while sources.get(name, [str(source)])[0] != str(source):
                name += "x"  # a run of the same name in another directory
            sources.setdefault(name, [str(source)]).append(path)
            kept[setting] = str(run / "models" / name)
    if not kept or (run / "config.json").exists():  # a run that exists is refused, not changed
        return config
    directory = run / "models"
    try:
        run.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, (real_path, *_) in sources.items():
            _link_files(Path(real_path), directory / name)
        replace_file(directory / _SOURCES, json.dumps(sources).encode())
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot keep a copy of another run's version "
            f"({error.strerror or error}). Copy the version "
            "to a directory of your own, and start from there"
        ) from error
    return with_model_paths(config, kept)


def _is_version(path: Path) -> bool:
    """Whether a directory is a version in a run directory, which the run may delete."""
    return len(path.parents) > 2 and path.parents[1].name == "versions" and (path.parents[2] / "config.json").is_file()


def _link_files(source: Path, target: Path) -> None:
    """Link the files of a version, which never change. On another file system copy them."""
    target.mkdir()
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(STAGING):
            link_or_copy(file, target / file.name)


# --- identity ---------------------------------------------------------------------------------------------------------


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a model when a run began."""

    size: int
    modified_ns: int
    inode: int
    sha256: str


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a run's configuration names, in the form of the run's journal."""

    setting: str
    path: str
    files: dict[str, ModelFile]


def record_models(
    paths: Mapping[Setting, str], before: object = (), *, ignored: Collection[str] = ()
) -> list[ModelRecord]:
    """Return the models of a run with the digests of their files. Reading takes as long as SHA-256, over several files
    at once.

    Args:
        paths: models by setting; see `model_paths`.
        before: result of an earlier call, as data. A file with the same size, modification time and inode is not read.
        ignored: patterns of settings to leave out.

    Raises:
        InputError: a file cannot be read.
    """
    known = {
        (name, file.size, file.modified_ns, file.inode): file.sha256
        for model in decode_models(before)
        for name, file in model.files.items()
    }
    used = {".".join(setting): path for setting, path in paths.items()}
    used = {setting: path for setting, path in used.items() if not any(fnmatchcase(setting, p) for p in ignored)}
    directories = {path: Path(path) for path in used.values() if Path(path).is_dir()}
    files = {path: sorted(_files_of(directory)) for path, directory in directories.items()}
    every = {str(file): file for listed in files.values() for file in listed}

    def read(file: Path) -> ModelFile:
        status = file.stat()
        key = (file.name, status.st_size, status.st_mtime_ns, status.st_ino)
        return ModelFile(*key[1:], known.get(key) or sha256_of(file))

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            records = dict(zip(every, pool.map(read, every.values()), strict=True))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return [
        ModelRecord(setting=setting, path=path, files={file.name: records[str(file)] for file in files[path]})
        for setting, path in used.items()
        if path in files
    ]


def _files_of(directory: Path) -> Iterator[Path]:
    for pattern in _FILES:
        yield from (file for file in directory.glob(pattern) if file.is_file())


def decode_models(data: object) -> list[ModelRecord]:
    """Return the result of `record_models` from data; empty if it cannot be read."""
    try:
        return msgspec.convert(data, list[ModelRecord])
    except msgspec.ValidationError:
        return []


def check_models_unchanged(paths: Mapping[Setting, str], before: object, *, ignored: Collection[str] = ()) -> None:
    """Refuse to continue a run whose models have changed in place.

    Args:
        paths: models by setting; see `model_paths`.
        before: result of `record_models` when the run began, as data; what cannot be read is not compared.
        ignored: patterns of settings whose models are not used now.

    Raises:
        ConfigError: a directory holds another model; the message has the setting and both digests.
        InputError: a file cannot be read.
    """
    models = {(model.setting, model.path): model for model in decode_models(before)}
    for model in record_models(paths, before, ignored=ignored) if models else ():
        then = models.get((model.setting, model.path))
        if then is None:
            continue
        for name in sorted({*then.files, *model.files}):
            old, new = (files[name].sha256 if name in files else "missing" for files in (then.files, model.files))
            if old != new:
                raise ConfigError(
                    f"{model.setting}: {Path(model.path, name)} is not what the run began with (SHA-256 {new[:16]} "
                    f"now, {old[:16]} then). The run's versions and recorded tokens belong to the original: put it "
                    "back, or start a new run with --name"
                )
