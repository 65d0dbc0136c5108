"""Models by their names on the Hugging Face hub: found in huggingface_hub's cache, or downloaded into it.

`model.path = "Qwen/Qwen3-0.6B"`, or `"Qwen/Qwen3-0.6B@REVISION"`, becomes the directory of one commit of that
repository. A run resumes with the commit it began with: a name without a revision keeps it, and a branch or tag is
looked up again, so that the resume is refused if it has moved. Only the files of a causal LM are downloaded: weights
as safetensors, tokenizer, templates and configuration; no code and no pickles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.app.model_files import Setting, model_paths, with_model_paths
from agentrl.config.run import RunConfig
from agentrl.core.errors import InputError, ModelError
from agentrl.core.files import check_model_directory
from agentrl.core.setting_paths import value_at

_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9_./-]{{0,95}}))?")
_HUB_TIMEOUT_S = 10.0
FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""Patterns of the downloaded files. All are at the top of a repository, but for further chat templates."""


def is_hub_name(path: str) -> bool:
    """Whether a path names a model on the hub: `owner/name` or `owner/name@revision`, where neither the path nor
    `owner` is a directory here."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists() and not Path(path).parent.is_dir()


def with_downloaded_models(config: RunConfig, before: Mapping[str, Any], *, download: bool = True) -> RunConfig:
    """Return the configuration with models' names on the hub (`model.path`, `policies.NAME.model` and `.reference`,
    `scorers.NAME.reward_model`) as the directory of a commit: the one of its revision (a commit, tag or branch; by
    default the main branch).

    Args:
        config: configuration of the run.
        before: the configuration with which the run was started, as data, whose commits are kept; empty for a new run.
        download: whether files missing from the cache may be downloaded.

    Raises:
        ModelError: a model is neither in the cache nor available; the message has the download command.
    """

    local = {
        setting: str(
            _previous_path(path, value_at(before, *setting))
            or download_model(".".join(setting), path, download=download)
        )
        for setting, path in model_paths(config).items()
        if is_hub_name(path) and (setting[0] == "model" or setting[-1] != "path")
    }
    return with_model_paths(config, local)


def check_local_models(config: RunConfig) -> None:
    """Check that the models of a configuration that are not on the hub are directories of models.

    Raises:
        ModelError: one is not.
    """
    for setting, path in model_paths(config).items():
        may_be_adapter = setting[-1] in ("reference", "path") and setting[0] != "model"
        if not may_be_adapter and not is_hub_name(path):
            try:
                check_model_directory(path)
            except ModelError as error:
                raise ModelError(f"{'.'.join(setting)}: {error}") from None


def with_local_models(config: RunConfig) -> RunConfig | None:
    """Return the configuration with the directories of its models; None if one is not on this machine."""
    try:
        check_local_models(config)
        return with_downloaded_models(config, {}, download=False)
    except InputError:
        return None


def check_hub_models(paths: Mapping[Setting, str], before: Mapping[str, Any]) -> None:
    """Check that the models on the hub can be had, as `with_downloaded_models` does, without downloading weights.

    Args:
        paths: models by setting; see `model_paths`.
        before: as for `with_downloaded_models`.

    Raises:
        ModelError: a model is neither in the cache nor on the hub, or the hub cannot be asked.
    """
    for setting, path in paths.items():
        if not is_hub_name(path) or _previous_path(path, value_at(before, *setting)):
            continue
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            download_model(".".join(setting), path, download=False)
        except ModelError as missing:
            name, revision = _split(path)
            try:
                HfApi().model_info(name, revision=revision or None, timeout=_HUB_TIMEOUT_S)
            except RevisionNotFoundError as error:
                raise ModelError(f"{'.'.join(setting)}: {name} has no revision {revision!r} on the hub") from error
            except RepositoryNotFoundError as error:
                raise _unknown_model(".".join(setting), name) from error
            except Exception as error:  # its errors depend on the version, and a start would fail just so
                raise missing from error


def _unknown_model(key: str, name: str) -> ModelError:
    return ModelError(
        f"{key}: there is no directory {name} here, and no such model on the hub: check the name, or log in if the "
        "model is private (hf auth login)"
    )


def _split(path: str) -> tuple[str, str]:
    """Split the name and the revision of a model on the hub; the revision is "" for the main branch."""
    name, _, revision = path.partition("@")
    return name, revision


def _previous_path(path: str, began_with: object) -> Path | None:
    """Return the directory that the run began with, if it holds this model in the cache and, if a revision is named,
    this commit. A branch or tag is looked up again."""
    from huggingface_hub import constants

    name, revision = _split(path)
    directory = Path(began_with if isinstance(began_with, str) else "")
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    of_model = directory.parent == snapshots and directory.name not in ("", "..")
    return directory if of_model and revision in ("", directory.name) and directory.is_dir() else None


def download_model(key: str, path: str, *, download: bool = True) -> Path:
    """Return the directory of a model's commit in the cache, downloaded if need be; see `with_downloaded_models`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = _split(path)
    description = f"{name} at revision {revision}" if revision else name
    argument = f" --revision {revision}" if revision else ""
    fetch = (
        f"download it on a machine with a network (hf download {name}{argument}), into {constants.HF_HUB_CACHE} here "
        f"(HF_HOME moves it), or set {key} to a directory"
    )
    try:
        snapshot = Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(FILES),
                ignore_patterns=[f"*/{pattern}" for pattern in FILES if pattern != "*.jinja"],
                local_files_only=not download,
            )
        )
    except RevisionNotFoundError as error:
        raise ModelError(f"{key}: {name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise _unknown_model(key, name) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{key}: there is no directory {Path(path).absolute()}, and the model {description} is missing from "
            f"huggingface_hub's cache, or incomplete there; {fetch}"
        ) from error
    except (OSError, HFValidationError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{key}: {description} cannot be downloaded ({reason}); {fetch}") from error
    if not any(snapshot.glob("*.safetensors")):
        raise ModelError(
            f"{snapshot}: {description} has no safetensors weights here, and other formats are refused because loading "
            f"them unpickles code; convert them (model.save_pretrained), or {fetch}"
        )
    return snapshot
