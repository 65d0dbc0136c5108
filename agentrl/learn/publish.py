"""Published versions, which engines load: their files, their canaries, and sending them.

A version is `versions/<policy>/<lineage>.<step>/`: full weights with configuration and tokenizer, or a PEFT adapter.
Full weights of 16 bits are stored as the changes since the policy's last version (`core.weight_deltas`) where these are
small.
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
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.config.sections import ModelConfig
from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import (
    DELTA_FILES,
    WEIGHT_FILES,
    link_or_copy,
    rename_durably,
    rename_whole,
    staging_directory,
)
from agentrl.core.ids import stable_hash64
from agentrl.core.quantization import CONFIG_KEYS
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.weight_deltas import (
    MAX_DELTAS,
    DeltaEncoder,
    DeltaRecord,
    WeightDeltaError,
    digest_of_version,
    make_whole,
    open_weights,
    read_header,
    remove_delta,
    write_record,
)
from agentrl.engines.canary import Canary
from agentrl.engines.models import dtype_name
from agentrl.engines.weights.reading import HeldWeights, hold_weights
from agentrl.engines.weights.senders import PublishedWeightSource, WeightDestination, WeightSenders
from agentrl.engines.weights.transports import transport_named
from agentrl.learn.packing import MicroBatch
from agentrl.learn.publication import PublishedAdapter
from agentrl.learn.ranks import exhaust_on_exit
from agentrl.learn.storage import converting_write_errors, write_tensors
from agentrl.rollout.chat.chat_template import TOOL_TEMPLATE_FILE
from agentrl.rollout.chat.published import published_templates

if TYPE_CHECKING:
    from hashlib import _Hash
    from io import BufferedReader

    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.learn.models import PolicyModel

(FULL_FILE,) = WEIGHT_FILES["full"]
ADAPTER_FILE, ADAPTER_CONFIG = WEIGHT_FILES["adapter"]
_, DELTA_FILE = DELTA_FILES
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
"""File patterns of a model besides its weights: configuration, tokenizer, chat template."""

_CONTEXTS = 1
"""Number of contexts of a canary. One is enough to distinguish versions; each adds a forward pass per publication."""


DELTA_FROM_BYTES = 16 << 20
"""Size of a version from which `engine.publish = "auto"` stores changes; smaller files are kept whole, for other
programs."""


class _Base(NamedTuple):
    """A version as the base of the policy's next one."""

    directory: Path
    sha256: str
    num_deltas: int
    """Number of deltas from which it is read; 0: it is stored whole."""


class Publisher:
    """Writes a run's versions."""

    def __init__(
        self,
        run_directory: Path,
        settings: ModelConfig | None = None,
        *,
        publish: Literal["auto", "full", "delta"] = "full",
        holds: bool = False,
    ) -> None:
        """Publish to `run_directory`/versions; configuration and tokenizer come from the base models, with a chat
        template that shows a conversation as the settings do. `publish` is that of `EngineConfig`; `holds`: an engine
        in this process may copy the newest full weights of a policy until `withdraw`."""
        self._holds = holds
        self._held: dict[str, HeldWeights] = {}
        self._delta_from_bytes = {"auto": DELTA_FROM_BYTES, "full": math.inf, "delta": 0}[publish]
        self._bases: dict[str, _Base] = {}
        """Last version of each policy whose next one may be stored as changes. The first one of a process is whole."""
        self._num_whole: dict[str, int] = {}
        """Number of versions that each policy stores whole because too many numbers changed, before changes are
        tried again."""
        self._root = run_directory / "versions"
        self._settings = settings or ModelConfig()
        self._outbox = WeightSenders()

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
            try:
                digest, num_deltas, changed_numbers = self._write(staging, policy, model, tensors, canary)
            except WeightDeltaError as error:
                raise StorageError(
                    f"{error}; start the run again with --resume, which stores its next version whole"
                ) from error
            try:
                rename(staging, directory, unless_same=lambda same: digest_of_version(same, kind) == digest)
            except FileExistsError as error:
                raise TrainerError(
                    f"version {version} exists in {directory} with different weights; version ids are never reused"
                ) from error
            if kind == "full" and not num_deltas:
                make_whole(directory, durable=False)  # it may have existed as changes
        if kind == "full" and self._holds:
            self._held[policy] = hold_weights(digest, _metadata(canary), model.publication.tensors)
        if self._changes_may_be_small(model.publication.layout()):
            self._bases[policy] = _Base(directory, digest, num_deltas)
        return WeightsRef(
            version=version, path=str(directory), kind=kind, sha256=digest, changed_numbers=changed_numbers
        )

    def withdraw(self, policy: str) -> None:
        """Let no engine copy the policy's weights, which are about to change."""
        held = self._held.pop(policy, None)
        if held is not None:
            held.withdraw()

    def _changes_may_be_small(self, layout: Mapping[str, Tensor]) -> bool:
        """Whether steps leave most of a version's bytes as they are: of 32-bit numbers, each step changes most."""
        num_bytes = sum(tensor.nbytes for tensor in layout.values())
        num_narrow = sum(tensor.nbytes for tensor in layout.values() if tensor.element_size() == 2)
        return num_bytes >= self._delta_from_bytes and 2 * num_narrow > num_bytes

    def send(self, weights: WeightsRef, layout: Mapping[str, Tensor], recipient: WeightDestination) -> None:
        """Send published full weights to an engine. They are read from disk, so training continues.

        Args:
            weights: the published version.
            layout: tensors without data, with the names, shapes and dtypes of those in the file, in its order.
            recipient: the engine.

        Raises:
            TrainerError: the engine did not accept them.
        """
        file = Path(weights.path) / FULL_FILE
        device = transport_named(recipient.transport).device
        try:
            with open_weights(file) as content:  # still in the page cache
                tensors = _read_tensors(content, layout, device)
                self._outbox.send(PublishedWeightSource(layout, tensors), weights.version, recipient)
        except TrainerError:
            raise
        except Exception as error:  # vLLM and NCCL raise many types
            raise TrainerError(
                f"{weights.version} was not sent to the engines: {type(error).__name__}: {error}"
            ) from error

    def _write(
        self,
        directory: Path,
        policy: str,
        model: PolicyModel,
        tensors: Iterator[tuple[str, Tensor]],
        canary: Canary | None,
    ) -> tuple[str, int, float | None]:
        """Write all files of a version of a policy. Returns its digest, the number of deltas from which it is read, and
        the share of its numbers that changed."""
        digest = hashlib.sha256()
        metadata = _metadata(canary)
        layout = model.publication.layout()
        if isinstance(model.publication, PublishedAdapter):
            write_tensors(directory / ADAPTER_FILE, layout, tensors, metadata, digest)
            text = json.dumps(model.publication.config(), indent=2, sort_keys=True, default=list)
            (directory / ADAPTER_CONFIG).write_text(text)
            digest.update(text.encode())
            return digest.hexdigest(), 0, None
        base, num_deltas, changed_numbers = self._readable_base(policy), 0, None
        if base is None or self._num_whole.get(policy, 0):
            write_tensors(directory / FULL_FILE, layout, tensors, metadata, digest, durable=False)
            self._num_whole[policy] = max(0, self._num_whole.get(policy, 0) - 1)
        else:
            encoder = self._write_changes(directory, base, layout, tensors, metadata, digest)
            is_small = 2 * (directory / DELTA_FILE).stat().st_size < sum(each.nbytes for each in layout.values())
            num_deltas = (base.num_deltas + 1) % MAX_DELTAS if is_small else 0
            if not num_deltas:
                make_whole(directory, durable=False)
            if not is_small:
                remove_delta(directory)
                self._num_whole[policy] = MAX_DELTAS
            changed_numbers = encoder.num_changed / encoder.num_words
        self._add_companions(directory, policy, model.base, model.dtype)
        return digest.hexdigest(), num_deltas, changed_numbers

    def _readable_base(self, policy: str) -> _Base | None:
        """Return the base of a policy's next version; None if there is none, or if the user has removed its files."""
        base = self._bases.get(policy)
        if base is not None:
            try:
                open_weights(base.directory / FULL_FILE).close()
            except FileNotFoundError:
                return None
        return base

    def _write_changes(
        self,
        directory: Path,
        base: _Base,
        layout: Mapping[str, Tensor],
        tensors: Iterator[tuple[str, Tensor]],
        metadata: Mapping[str, str],
        digest: _Hash,
    ) -> DeltaEncoder:
        """Write the delta of a version; returns its encoder, which has counted the changes."""
        with open_weights(base.directory / FULL_FILE) as content:
            read_header(content)
            encoder = DeltaEncoder(content)
            write_tensors(directory / DELTA_FILE, layout, tensors, metadata, digest, encoder, durable=False)
        write_record(directory, DeltaRecord(base.directory.name, base.sha256, digest.hexdigest()))
        return encoder

    def _add_companions(self, directory: Path, policy: str, base: Path, dtype: torch.dtype) -> None:
        """Link a base model's configuration and tokenizer into a version with weights of a dtype; the policy's own copy
        of them is made once."""
        source = self._root / ".companions" / policy
        if not source.is_dir():
            with staging_directory(source, depth=2) as copy:
                for pattern in _COMPANIONS:
                    for file in sorted(base.glob(pattern)):
                        if file.is_file() and not file.name.endswith(".index.json") and file.name not in DELTA_FILES:
                            target = copy / file.relative_to(base)
                            target.parent.mkdir(parents=True, exist_ok=True)
                            shutil.copyfile(file, target)
                _describe_weights(copy / "config.json", dtype)
                settings = self._settings
                if settings.template_variables or settings.tools_in != "template":
                    (copy / TOOL_TEMPLATE_FILE).unlink(missing_ok=True)
                    templates = published_templates(base, settings.template_variables, settings.tools_in)
                    for name, template in templates.items():
                        (copy / name).parent.mkdir(exist_ok=True)
                        (copy / name).write_text(template, encoding="utf-8")
                rename_durably(copy, source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, target)


def _metadata(canary: Canary | None) -> dict[str, str]:
    """Return the metadata of a version's safetensors file."""
    return {"format": "pt"} | (canary.metadata() if canary is not None else {})


def _read_tensors(content: BufferedReader, layout: Mapping[str, Tensor], device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version's safetensors file, which has the layout's order, on a device."""
    read_header(content)
    for name, tensor in layout.items():
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if content.readinto(on_host.view(-1).view(torch.uint8).numpy().data) < on_host.nbytes:
            raise ValueError(f"the file ends within {name}")
        yield name, on_host.to(device)


def _describe_weights(path: Path, dtype: torch.dtype) -> None:
    """Make a model's configuration describe the published weights: it names the dtype of the checkpoint, and how that
    was quantized."""
    config = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(config)
    for part in [part for part in (config, *config.values()) if isinstance(part, dict)]:
        part.update({key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)})
        for key in CONFIG_KEYS:
            part.pop(key, None)
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
            contexts=self._contexts,
            token_ids=self._token_ids,
            logprobs=logprobs,
            start_logprobs=self._start_logprobs,
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
