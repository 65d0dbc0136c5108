"""Storage of learners: checkpoints, from which training resumes, and published versions, which engines load.

A checkpoint of a policy is `<directory>/<policy>/`: `weights.safetensors` (trained parameters, float32),
`optimizer.safetensors` (AdamW's moments), `rng.json` (torch's random state), `state.json` (step, version, last report).

A version is `versions/<policy>/<lineage>.<step>/`: full weights with configuration and tokenizer, or a PEFT adapter.
`core.files.rename_durably` names the directory last, so a directory that exists is complete, even after a power cut.
The metadata of its weights' file holds the canary: the log-probabilities that the trainer computes for a few next
tokens, which an engine must reproduce before it serves the version.

Files are safetensors and JSON, never pickle. Owns: both layouts, the digest of a version, the canary's tokens. Does not
own: version ids, the manifest that completes a checkpoint and the deletion of old files (the orchestrator's); the
canary check of engines (`engines.weights`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentrl.config.fields import base_name
from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import WEIGHT_FILES, remedy, rename_durably, sha256_of, staged
from agentrl.core.ids import key64
from agentrl.core.records import PolicyVersion, StepReport, TrainingSample, WeightsRef
from agentrl.engines.models import dtype_name
from agentrl.engines.transfer import FileSender, Outbox, Recipient, Source, WeightLink
from agentrl.engines.versions import Canary
from agentrl.learn.packing import pack
from agentrl.learn.ranks import exhaust_on_exit, gathered, local, own_rows

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.learn.models import PolicyModel

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""

(FULL_FILE,) = WEIGHT_FILES["full"]
ADAPTER_FILE, ADAPTER_CONFIG = WEIGHT_FILES["adapter"]
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "chat_templates/*")
"""File patterns of a model besides its weights: configuration, tokenizer, chat template."""

_CONTEXTS = 1
"""Number of contexts of a canary: one tells versions apart; each further one costs every publication a forward pass."""
_TOKENS = 128
"""Number of next tokens tested after each context."""
_LENGTH = 16
"""Number of tokens in a context."""
_PASS = 2048
"""Number of tokens forwarded at once."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of writing `path` within the context.

    Raises:
        StorageError: writing failed, with an error of the system or of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        mend = remedy(error) if isinstance(error, OSError) else "free space or make it writable"
        raise StorageError(
            f"{path}: could not be written ({reason}); {mend}, then start the run again with --resume"
        ) from error


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a policy's learner."""

    step: int
    version: PolicyVersion
    """Last published version."""
    report: StepReport | None
    """Report of the last applied step."""


Parameters = Mapping[str, nn.Parameter]
"""Parameters that an optimizer changes, keyed by name, in the optimizer's order."""


def save_checkpoint(
    directory: Path,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    state: LearnerState,
    *,
    writes: bool = True,
) -> None:
    """Write a learner's state into `directory`, which must not exist; sharded tensors are gathered.

    Args:
        directory: directory of the policy in the checkpoint.
        parameters: parameters that the optimizer changes.
        optimizer: optimizer; None leaves its state out.
        state: remaining state of the learner.
        writes: whether this rank writes the files; the others take part, so that each tensor can be gathered.

    Raises:
        StorageError: writing failed, or the directory exists.
    """
    moments = _moments(parameters, optimizer)
    rng = {"torch_cpu": torch.get_rng_state().numpy().tobytes().hex()}
    with exhaust_on_exit(chain(gathered(parameters), gathered(moments))) as tensors:
        if not writes:
            return
        with writing(directory):
            directory.mkdir(parents=True)
            _write_tensors(directory / "weights.safetensors", parameters, tensors)
            _write_tensors(directory / "optimizer.safetensors", moments, tensors)
            (directory / "rng.json").write_text(json.dumps(rng))
            (directory / "state.json").write_bytes(msgspec.json.encode(state))


def load_checkpoint(directory: Path, parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> LearnerState:
    """Restore a learner's state; the next step is bit-identical to the one that would have followed.

    Raises:
        TrainerError: the directory lacks a file, or holds another policy's or another configuration's state.
    """
    made: dict[Tensor, dict[str, Tensor]] = {}
    try:
        rng = json.loads((directory / "rng.json").read_text())
        state = msgspec.json.decode((directory / "state.json").read_bytes(), type=LearnerState)
        with (
            safe_open(directory / "weights.safetensors", framework="pt") as weights,
            safe_open(directory / "optimizer.safetensors", framework="pt") as moments,
        ):
            if optimizer is not None and moments.keys():
                made = {parameter: _no_moments(parameter) for parameter in parameters.values()}
            named = zip(parameters, made.values(), strict=False)
            found = {f"{name}|{moment}": each for name, own in named for moment, each in own.items()}
            if _shapes(weights) != _shapes(parameters) or (made and _shapes(moments) != _shapes(found)):
                raise TrainerError(
                    f"the checkpoint in {directory} contains other weights than the configuration trains; resume with "
                    f"the model and policy sections that the run was started with"
                )
            for name, parameter in parameters.items():
                _read_into(parameter, weights, name)
            for name, tensor in found.items():
                _read_into(tensor, moments, name)
    except (OSError, SafetensorError, ValueError) as error:
        raise TrainerError(f"checkpoint {directory} cannot be read: {error}; resume from an older one") from error
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(made)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(rng["torch_cpu"]), dtype=torch.uint8))
    return state


def _shapes(tensors: Any) -> dict[str, list[int]]:
    """Return the shapes of tensors, or of an open file's tensors, by name."""
    if isinstance(tensors, Mapping):
        return {name: list(tensor.shape) for name, tensor in tensors.items()}
    return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def _no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's initial state of a parameter, all zeros, sharded like it."""
    step = torch.zeros((), device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


@torch.no_grad()
def _read_into(tensor: Tensor, file: Any, name: str) -> None:
    """Copy a tensor of an open file, or the rows of it that this rank holds, into `tensor`."""
    own = local(tensor)
    if not tensor.ndim:
        own.copy_(file.get_tensor(name))
    elif own.numel():
        own.copy_(file.get_slice(name)[own_rows(tensor)])


def _moments(parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return AdamW's state by parameter name; empty before the first step."""
    if optimizer is None:
        return {}
    return {
        f"{name}|{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


class Publisher:
    """Writes a run's versions."""

    def __init__(self, run_directory: Path) -> None:
        """Publish to `run_directory`/versions; configuration and tokenizer come from the base models."""
        self._root = run_directory / "versions"
        self._outbox = Outbox(_sender)

    def publish(self, version: PolicyVersion, model: PolicyModel, canary: Canary | None = None) -> WeightsRef:
        """Write a version. Publishing the same weights again under the same id changes nothing.

        If the model is sharded, the other ranks iterate over `model.published()` meanwhile; this rank does so to the
        end even if writing fails.

        Raises:
            TrainerError: the id exists with other weights.
            StorageError: writing failed; nothing of the version is left.
        """
        directory = self._root / version.policy / f"{version.lineage}.{version.step}"
        name = FULL_FILE if model.adapter_config() is None else ADAPTER_FILE
        with (
            exhaust_on_exit(model.published()) as tensors,
            writing(directory),
            staged(directory, depth=2) as staging,
        ):
            self._write(staging, name, model, tensors, canary)
            try:
                rename_durably(staging, directory, unless_same=name)
            except FileExistsError as error:
                raise TrainerError(
                    f"version {version} exists in {directory} with different weights; version ids are never reused"
                ) from error
        digest = sha256_of(*(directory / each for each in WEIGHT_FILES[model.kind]))
        return WeightsRef(version=version, path=str(directory), kind=model.kind, sha256=digest)

    def send(self, version: PolicyVersion, model: PolicyModel, recipient: Recipient) -> None:
        """Send the full weights of a published version to an engine; the other ranks do as in `publish`.

        Raises:
            TrainerError: the engine did not accept them.
        """
        with exhaust_on_exit(model.published()) as tensors:
            try:
                self._outbox.send(Source(model.published_layout(), tensors), version, recipient)
            except TrainerError:
                raise
            except Exception as error:  # vLLM and NCCL raise many types, and the other ranks are waiting
                raise TrainerError(f"{version} was not sent to the engines: {type(error).__name__}: {error}") from error

    def _write(
        self,
        directory: Path,
        name: str,
        model: PolicyModel,
        tensors: Iterator[tuple[str, Tensor]],
        canary: Canary | None,
    ) -> None:
        """Write all files of a version."""
        metadata = {"format": "pt"} | (canary.metadata() if canary is not None else {})
        layout = model.published_layout()
        _write_tensors(directory / name, layout, tensors, metadata)
        adapter_config = model.adapter_config()
        if adapter_config is None:
            self._add_companions(directory, model.base, next(iter(layout.values())).dtype)
        else:
            text = json.dumps(adapter_config, indent=2, sort_keys=True, default=list)
            (directory / ADAPTER_CONFIG).write_text(text)

    def _add_companions(self, directory: Path, base: Path, dtype: torch.dtype) -> None:
        """Link a base model's configuration and tokenizer into a version with weights of a dtype; the run's own copy is
        made once."""
        source = self._root / ".companions" / base_name(str(base)).replace("/", "--")
        if not source.is_dir():
            with staged(source, depth=2) as copy:
                for pattern in _COMPANIONS:
                    for file in sorted(base.glob(pattern)):
                        if file.is_file() and not file.name.endswith(".index.json"):
                            target = copy / file.relative_to(base)
                            target.parent.mkdir(parents=True, exist_ok=True)
                            shutil.copyfile(file, target)
                _state_dtype(copy / "config.json", dtype)
                rename_durably(copy, source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except OSError:  # the file system has no hard links
                shutil.copyfile(file, target)


def _sender(recipient: Recipient, link: WeightLink, source: Source) -> Any:
    """Return the sender of full weights to an engine: vLLM's own where both have GPUs."""
    if recipient.transfer == "file":
        return FileSender(recipient, link, source)
    from agentrl.engines.vllm.senders import make

    return make(recipient, link, source)


def _state_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the published weights in a model's configuration, which names that of the checkpoint."""
    config = json.loads(path.read_text(encoding="utf-8"))
    stated = [part for part in (config, *config.values()) if isinstance(part, dict)]
    keys = [(part, key) for part in stated for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)]
    if any(part[key] != dtype_name(dtype) for part, key in keys):
        for part, key in keys:
            part[key] = dtype_name(dtype)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tensors(
    path: Path,
    layout: Mapping[str, Tensor],
    tensors: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, one tensor at a time; equal tensors and metadata give equal files.

    Args:
        path: path of the file.
        layout: tensors with the names, shapes and dtypes of `tensors`, in the same order; those with larger elements
            come first, so that all are aligned.
        tensors: tensors to write, as many as `layout` has.
        metadata: metadata of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, expected in layout.items():
            found, tensor = next(tensors)
            assert (name, expected.shape, expected.dtype) == (found, tensor.shape, tensor.dtype)
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # free it before the next tensor is gathered


class CanaryMaker:
    """Makes the canaries of a run's versions, all over the same tokens.

    Args:
        model: model with the initial weights of the run.
        max_context: longest context of the engines, in tokens, including one sampled token.
    """

    def __init__(self, model: PolicyModel, *, max_context: int) -> None:
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        length = max(1, min(_LENGTH, max_context - 1))

        def drawn(kind: str, count: int) -> Int32Array:
            return np.array([key64("probe", kind, at) % vocabulary for at in range(count)], np.int32)

        # Tokens are drawn from the whole vocabulary, because the probabilities of likely tokens hardly change with the
        # weights.
        self._contexts = drawn("contexts", _CONTEXTS * length).reshape(_CONTEXTS, length)
        self._token_ids = drawn("tokens", _TOKENS)
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
        rows = [np.append(context, token).astype(np.int32) for context in self._contexts for token in self._token_ids]
        nothing = np.zeros(len(rows[0]), np.float32)
        last = np.arange(len(rows[0])) == len(rows[0]) - 1
        samples = [
            TrainingSample(token_ids=row, loss_mask=last, behavior_logprobs=nothing, advantages=nothing) for row in rows
        ]
        model.activate()
        found = np.zeros(len(samples), np.float32)
        with torch.no_grad():
            for batch in pack(samples, max_tokens=_PASS, share=model.shared_prefixes):
                head = model.token_logprobs(batch)
                found[batch.sample] = head.logprob.cpu().numpy()
        return found.reshape(len(self._contexts), len(self._token_ids))
