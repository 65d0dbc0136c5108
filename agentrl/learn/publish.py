"""Published versions, which engines load: their files and their canaries.

A version is `versions/<policy>/<lineage>.<step>/`: full weights with configuration and tokenizer, or a PEFT adapter.
The directory is named last, so one that exists is complete. Adapters are durable then: unfinished trees and pinned
episodes resume with them. Full weights are not synced, because a resumed run publishes its checkpoint's: after a power
cut only the digest in the journal tells whether a version is complete. The orchestrator syncs those that a checkpoint
needs (`VersionRetention.make_durable`).

The metadata of its weights' file holds the canary: the log-probabilities that the trainer computes for a few next
tokens, which an engine must reproduce before it serves the version.

Owns: the layout, the digest of a version, the canary's tokens. Does not own: version ids and the deletion of old files
(the orchestrator's); the canary check of engines (`engines.weights`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.core.errors import TrainerError
from agentrl.core.files import WEIGHT_FILES, link_or_copy, rename_durably, rename_whole, sha256_of, staging_directory
from agentrl.core.ids import stable_hash64
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.canary import Canary
from agentrl.engines.models import dtype_name
from agentrl.engines.weights.reading import HeldWeights, hold_weights
from agentrl.learn.packing import MicroBatch
from agentrl.learn.publication import PublishedAdapter
from agentrl.learn.ranks import exhaust_on_exit
from agentrl.learn.storage import converting_write_errors, write_tensors

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.learn.models import PolicyModel

(FULL_FILE,) = WEIGHT_FILES["full"]
ADAPTER_FILE, ADAPTER_CONFIG = WEIGHT_FILES["adapter"]
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
"""File patterns of a model besides its weights: configuration, tokenizer, chat template."""

_CONTEXTS = 1
"""Number of contexts of a canary. One is enough to distinguish versions; each adds a forward pass per publication."""


class Publisher:
    """Writes a run's versions."""

    def __init__(self, run_directory: Path, *, holds: bool = False) -> None:
        """Publish to `run_directory`/versions; configuration, tokenizer and chat template are those of the base models.
        `holds`: an engine in this process may copy the newest full weights of a policy until `withdraw`."""
        self._holds = holds
        self._held: dict[str, HeldWeights] = {}
        self._root = run_directory / "versions"

    def publish(self, version: PolicyVersion, model: PolicyModel, canary: Canary | None = None) -> WeightsRef:
        """Write a version. Publishing the same weights again under the same id changes nothing.

        If the model is sharded, all ranks iterate over its tensors together; this rank does so to the end even if
        writing fails.

        Raises:
            TrainerError: the id exists with other weights.
            StorageError: writing failed; nothing of the version is left.
        """
        directory = self._root / version.policy / f"{version.lineage}.{version.step}"
        kind, policy = model.publication.kind, version.policy
        durable = kind == "adapter"
        rename = rename_durably if durable else rename_whole
        with (
            exhaust_on_exit(model.publication.tensors()) as tensors,
            converting_write_errors(directory),
            staging_directory(directory, depth=2, durable=durable) as staging,
        ):
            digest = self._write(staging, policy, model, tensors, canary)

            def is_same(other: Path) -> bool:
                return sha256_of(*(other / name for name in WEIGHT_FILES[kind])) == digest

            try:
                rename(staging, directory, unless_same=is_same)
            except FileExistsError as error:
                raise TrainerError(
                    f"version {version} exists in {directory} with different weights; version ids are never reused"
                ) from error
        if kind == "full" and self._holds:
            self._held[policy] = hold_weights(digest, _metadata(canary), model.publication.tensors)
        return WeightsRef(version=version, path=str(directory), kind=kind, sha256=digest)

    def withdraw(self, policy: str) -> None:
        """Let no engine copy the policy's weights, which are about to change."""
        held = self._held.pop(policy, None)
        if held is not None:
            held.withdraw()

    def _write(
        self,
        directory: Path,
        policy: str,
        model: PolicyModel,
        tensors: Iterator[tuple[str, Tensor]],
        canary: Canary | None,
    ) -> str:
        """Write all files of a version of a policy; returns its digest."""
        digest = hashlib.sha256()
        metadata = _metadata(canary)
        layout = model.publication.layout()
        if isinstance(model.publication, PublishedAdapter):
            write_tensors(directory / ADAPTER_FILE, layout, tensors, metadata, digest)
            text = json.dumps(model.publication.config(), indent=2, sort_keys=True, default=list)
            (directory / ADAPTER_CONFIG).write_text(text)
            digest.update(text.encode())
        else:
            write_tensors(directory / FULL_FILE, layout, tensors, metadata, digest, durable=False)
            self._add_companions(directory, policy, model.base, model.dtype)
        return digest.hexdigest()

    def _add_companions(self, directory: Path, policy: str, base: Path, dtype: torch.dtype) -> None:
        """Link a base model's configuration and tokenizer into a version with weights of a dtype; the policy's own copy
        of them is made once."""
        source = self._root / ".companions" / policy
        if not source.is_dir():
            with staging_directory(source, depth=2) as copy:
                for pattern in _COMPANIONS:
                    for file in sorted(base.glob(pattern)):
                        if file.is_file() and not file.name.endswith(".index.json"):
                            target = copy / file.relative_to(base)
                            target.parent.mkdir(parents=True, exist_ok=True)
                            shutil.copyfile(file, target)
                _describe_weights(copy / "config.json", dtype)
                rename_durably(copy, source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, target)


def _metadata(canary: Canary | None) -> dict[str, str]:
    """Return the metadata of a version's safetensors file."""
    return {"format": "pt"} | (canary.metadata() if canary is not None else {})


def _describe_weights(path: Path, dtype: torch.dtype) -> None:
    """Make a model's configuration describe the published weights: it names the dtype of the checkpoint."""
    config = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(config)
    for part in [part for part in (config, *config.values()) if isinstance(part, dict)]:
        part.update({key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)})
    if json.dumps(config) != before:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class CanaryBuilder:
    """Makes the canaries of a run's versions, all over the same tokens.

    Args:
        model: model with the initial weights of the run.
        max_context: longest context of the engines, in tokens, including one sampled token.
    """

    def __init__(self, model: PolicyModel, *, max_context: int) -> None:
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        length = max(1, min(16, max_context - 1))  # of a context, in tokens

        def draw_tokens(kind: str, count: int) -> Int32Array:
            return np.array([stable_hash64("probe", kind, at) % vocabulary for at in range(count)], np.int32)

        # Tokens are drawn from the whole vocabulary, because the probabilities of likely tokens hardly change with the
        # weights.
        self._contexts = draw_tokens("contexts", _CONTEXTS * length).reshape(_CONTEXTS, length)
        self._token_ids = draw_tokens("tokens", 128)  # tested after each context
        self._start_logprobs = self._logprobs(model)

    def of(self, model: PolicyModel) -> Canary:
        """Make the canary of a policy's current weights.

        Raises:
            TrainerError: a log-probability is not finite.
        """
        logprobs = self._logprobs(model) if model.parameters else self._start_logprobs
        if not np.isfinite(logprobs).all():
            raise TrainerError(
                "the weights to be published produce log-probabilities that are not finite: training has diverged; "
                "resume from an older checkpoint with a smaller learning rate"
            )
        return Canary(
            contexts=self._contexts, token_ids=self._token_ids, logprobs=logprobs, start_logprobs=self._start_logprobs
        )

    def _logprobs(self, model: PolicyModel) -> Float32Array:
        """Compute the log-probability of each token after each context, [m, n]."""
        model.activate()
        with torch.no_grad():
            heads = [model.token_logprobs(self._micro_batch(context)) for context in self._contexts]
        return np.stack([head.logprob.cpu().numpy() for head in heads])

    def _micro_batch(self, context: Int32Array) -> MicroBatch:
        """Return a micro-batch of one row, whose last hidden state predicts every token."""
        length, count = len(context), len(self._token_ids)
        return MicroBatch(
            token_ids=context.astype(np.int64),
            position_ids=np.arange(length, dtype=np.int64),
            visible_until=np.full(length, length, np.int64),
            starts=np.zeros(1, np.int64),
            hidden_index=np.full(count, length - 1, np.int64),
            targets=self._token_ids.astype(np.int64),
            temperature=np.ones(count, np.float32),
            sample=np.zeros(count, np.int64),
            position=np.full(count, length, np.int64),
        )
