"""Published versions: immutable directories an engine, or `from_pretrained`, loads.

`versions/<policy>/<lineage>.<step>/` holds full weights with configuration and tokenizer, or a PEFT adapter. A version
is put in place by `core.files.place`, so a directory that exists is whole, even after a power cut. In the metadata of
its weights' file stands the probe that an engine must answer before it serves the version.

Owns: the layout and the digest. Does not own: version ids (the orchestrator's) and when old versions are deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from agentrl.core.errors import TrainerError
from agentrl.core.files import WEIGHT_FILES, place, sha256_of, staged
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.learn.checkpoint import writing
from agentrl.learn.models import PolicyModel

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.engines.weights import Probe

(FULL_FILE,) = WEIGHT_FILES["full"]
ADAPTER_FILE, ADAPTER_CONFIG = WEIGHT_FILES["adapter"]

_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "chat_templates/*")
"""What belongs to a model besides its weights: configuration, tokenizer, chat template."""


class Publisher:
    """Writes a run's versions."""

    def __init__(self, run_directory: Path, model_path: Path) -> None:
        """Versions go to `run_directory`/versions; configuration and tokenizer come from `model_path`."""
        self._root = run_directory / "versions"
        self._model_path = model_path

    def publish(self, version: PolicyVersion, model: PolicyModel, probe: Probe | None = None) -> WeightsRef:
        """Write a version; the same weights under the same id again change nothing.

        Raises:
            TrainerError: the id exists with other weights.
            StorageError: the disk refused; nothing of the version is left.
        """
        directory = self._root / version.policy / f"{version.lineage}.{version.step}"
        name = FULL_FILE if model.adapter_config() is None else ADAPTER_FILE
        with writing(directory), staged(directory, depth=2) as staging:
            self._write(staging, name, model, probe)
            try:
                place(staging, directory, unless_same=name)
            except FileExistsError as error:
                raise TrainerError(
                    f"version {version} exists in {directory} with other weights; ids are never reused"
                ) from error
        digest = sha256_of(*(directory / each for each in WEIGHT_FILES[model.kind]))
        return WeightsRef(version=version, path=str(directory), kind=model.kind, sha256=digest)

    def _write(self, directory: Path, name: str, model: PolicyModel, probe: Probe | None) -> None:
        """Write all files of a version."""
        metadata = {"format": "pt"} | (probe.metadata() if probe is not None else {})
        _write_tensors(directory / name, model.published(), metadata)
        adapter_config = model.adapter_config()
        if adapter_config is None:
            self._add_companions(directory)
        else:
            text = json.dumps(adapter_config, indent=2, sort_keys=True, default=list)
            (directory / ADAPTER_CONFIG).write_text(text)

    def _add_companions(self, directory: Path) -> None:
        """Link the run's own copy of configuration and tokenizer, made once, into a version."""
        source = self._root / ".companions"
        if not source.is_dir():
            with staged(source) as copy:
                for pattern in _COMPANIONS:
                    for file in sorted(self._model_path.glob(pattern)):
                        if file.is_file() and not file.name.endswith(".index.json"):
                            target = copy / file.relative_to(self._model_path)
                            target.parent.mkdir(parents=True, exist_ok=True)
                            shutil.copyfile(file, target)
                place(copy, source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, target)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, the same for the same tensors and metadata."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    with path.open("r+b") as file:  # safetensors leaves the order of metadata to chance
        header = file.read(int.from_bytes(file.read(8), "little"))
        found = json.loads(header)["__metadata__"]
        file.seek(8)
        file.write(header.replace(_compact(found), _compact(dict(sorted(found.items()))), 1))


def _compact(metadata: Mapping[str, str]) -> bytes:
    """As safetensors writes it."""
    return json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode()
