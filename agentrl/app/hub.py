"""Models by their names on the Hugging Face hub: found in huggingface_hub's cache, or downloaded into it.

`model.path = "Qwen/Qwen3-0.6B"` becomes the directory of one commit of that repository, and `model.revision` that
commit, so that a run is resumed with the weights it began with although the name's branch has moved on. Only what a
causal LM is loaded from is downloaded: weights as safetensors, tokenizer, templates and configuration; no code, and
nothing that would be unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.policies import LocalPolicy
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, ModelError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""Patterns of the files that are downloaded, all from the top of a repository."""


def is_hub_name(path: str) -> bool:
    """Whether a model's path is a name on the hub: `owner/name`, and neither it nor `owner` is a directory here."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists() and not Path(path).parent.is_dir()


def with_local_model(config: RunConfig, before: Mapping[str, Any], *, download: bool = True) -> RunConfig:
    """The configuration with `model.path` and each `policies.NAME.model` as a directory, and `model.revision` as the
    commit that is in the first; policies take the main branch.

    Args:
        config: of the run.
        before: the configuration that the run was started with, as data: its commit is kept; else empty.
        download: whether what the cache lacks may be downloaded.

    Raises:
        ModelError: the model is neither in the cache nor to be had; says what to download, and where.
        ConfigError: a revision of a model that is not on the hub.
    """
    config = _with_local_policies(config, before, download=download)
    model = config.model
    if not is_hub_name(model.path):
        if model.revision and Path(model.path).resolve().name != model.revision:
            raise ConfigError(
                f"model.revision = {model.revision!r} is of a model on the hub, and model.path = {model.path!r} is a "
                "directory; leave one of them out"
            )
        return config
    found = _kept(model.path, model.revision, before.get("model"), "path") or _snapshot(
        "model.path", model.path, model.revision, download=download
    )
    return config.model_copy(
        update={"model": model.model_copy(update={"path": str(found), "revision": found.name})},
    )


def _with_local_policies(config: RunConfig, before: Mapping[str, Any], *, download: bool) -> RunConfig:
    recorded = before.get("policies")
    then = recorded if isinstance(recorded, Mapping) else {}
    policies: dict[str, Any] = dict(config.policies)
    for name, policy in config.of_kind(LocalPolicy).items():
        if is_hub_name(policy.model):
            found = _kept(policy.model, "", then.get(name), "model")
            found = found or _snapshot(f"policies.{name}.model", policy.model, "", download=download)
            policies[name] = policy.model_copy(update={"model": str(found)})
    return config.model_copy(update={"policies": policies})


def _kept(name: str, revision: str, then: object, key: str) -> Path | None:
    """The directory that the run began with, by a section of its configuration, if it is of this model."""
    path = Path(str(then.get(key, ""))) if isinstance(then, Mapping) else Path()
    is_same = path.parent.name == "snapshots" and path.parent.parent.name == f"models--{name.replace('/', '--')}"
    return path if is_same and revision in ("", path.name) and path.is_dir() else None


def _snapshot(key: str, name: str, revision: str, *, download: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = f"{name} at revision {revision}" if revision else name
    argument = f" --revision {revision}" if revision else ""
    fetch = (
        f"download it on a machine with a network (hf download {name}{argument}), into {constants.HF_HUB_CACHE} here "
        f"(HF_HOME moves it), or set {key} to a directory"
    )
    try:
        found = Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(FILES),
                ignore_patterns=["*/*"],
                local_files_only=not download,
            )
        )
    except RevisionNotFoundError as error:
        raise ModelError(f"model.revision: {name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{key}: there is no directory {name} here, and the hub shows no such model: it has another name, or "
            "needs a token (hf auth login)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{key}: {wanted} is not in huggingface_hub's cache, or not all of it; {fetch}") from error
    except (OSError, HFValidationError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{key}: {wanted} cannot be downloaded ({reason}); {fetch}") from error
    if not any(found.glob("*.safetensors")):
        raise ModelError(
            f"{found}: {wanted} has no weights as safetensors here, and no others are read, since they are unpickled; "
            f"convert them (model.save_pretrained), or {fetch}"
        )
    return found
