"""Storage of learners: checkpoints, from which training resumes, published versions, which engines load, and columns.

A checkpoint of a policy is `<directory>/<policy>/`: `weights.safetensors` (trained parameters, float32),
`optimizer.safetensors` (AdamW's moments), `rng.json` (torch's random state), `state.json` (step, version, last report),
and with `credit.advantage = "gae"` the same four for the value head, in `value_head/`.

A version is `versions/<policy>/<lineage>.<step>/`: full weights with configuration and tokenizer, or a PEFT adapter.
`core.files.rename_durably` names the directory last, so a directory that exists is complete, even after a power cut.
The metadata of its weights' file holds the canary: the log-probabilities that the trainer computes for a few next
tokens, which an engine must reproduce before it serves the version.

The columns of a step, the trainer's values for each of its tokens, are `steps/<policy>/<lineage>.<step>.safetensors`:
  `offsets`           int64 [rows + 1], where each row's trained tokens begin in the columns below
  `position`          int64 [tokens], position of the token in its row
  `trainer_logprobs`  float32 [tokens], NaN where the token was not forwarded (no gradient could come from its row)
  `entropy`           float32 [tokens], of the distribution the trainer computed, in nats; NaN likewise
  `behavior_logprobs` float32 [tokens], recorded by the engine
  `advantages`        float32 [tokens]; with `credit.advantage = "gae"` those that the trainer computed
  `lag`               int32 [tokens], steps from the weights that sampled the token to those the trainer computed with;
                      at least 1 for those of an earlier lineage, -1 where it is not known who sampled
  metadata `rows`     JSON, [[episode id, row index of the unit], …] in the order the trainer consumed them
The mismatch metrics compare the trainer's log-probabilities with the recorded ones. For rows sampled by the very
weights that the trainer computes with, both describe the same distribution: their difference is that of the two
implementations (dtype, kernels, routing, filters, a wrong adapter). For other rows, the optimizer steps in between add
to it.

Files are safetensors and JSON, never pickle. Owns: the layouts, the digest of a version, the canary's tokens. Does not
own: version ids, the manifest that completes a checkpoint and the deletion of old files (the orchestrator's); the
canary check of engines (`engines.weights`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save
from torch import Tensor, nn

from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import WEIGHT_FILES, os_error_advice, rename_durably, sha256_of, staging_directory
from agentrl.core.ids import stable_hash64
from agentrl.core.records import PolicyVersion, StepReport, TrainingSample, WeightsRef
from agentrl.credit.samples import input_digest, row_digest, token_lags, trained_positions
from agentrl.engines.models import dtype_name
from agentrl.engines.weights.canary import Canary
from agentrl.engines.weights.transfer import (
    FileSender,
    GlooSender,
    PublishedWeightSource,
    WeightDestination,
    WeightSenders,
    WeightTransferConnection,
)
from agentrl.learn.loss_batch import LOG_RATIO_LIMIT
from agentrl.learn.packing import MicroBatch
from agentrl.learn.ranks import exhaust_on_exit, gather_tensors_sequentially, local_row_slice, local_shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import BoolArray, Float32Array, Int32Array
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


@contextmanager
def converting_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of writing `path` within the context.

    Raises:
        StorageError: writing failed, with an error of the system or of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        mend = os_error_advice(error) if isinstance(error, OSError) else "free space or make it writable"
        raise StorageError(
            f"{path}: could not be written ({reason}); {mend}, then start the run again with --resume"
        ) from error


class LearnerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a policy's learner has got."""

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
    state: LearnerProgress,
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
    with exhaust_on_exit(
        chain(gather_tensors_sequentially(parameters), gather_tensors_sequentially(moments))
    ) as tensors:
        if not writes:
            return
        with converting_write_errors(directory):
            directory.mkdir(parents=True)
            _write_tensors(directory / "weights.safetensors", parameters, tensors)
            _write_tensors(directory / "optimizer.safetensors", moments, tensors)
            (directory / "rng.json").write_text(json.dumps(rng))
            (directory / "state.json").write_bytes(msgspec.json.encode(state))


def load_checkpoint(
    directory: Path, parameters: Parameters, optimizer: torch.optim.Optimizer | None
) -> LearnerProgress:
    """Restore a learner's state; the next step is bit-identical to the one that would have followed.

    Raises:
        TrainerError: the directory lacks a file, or holds another policy's or another configuration's state.
    """
    made: dict[Tensor, dict[str, Tensor]] = {}
    try:
        rng = json.loads((directory / "rng.json").read_text())
        state = msgspec.json.decode((directory / "state.json").read_bytes(), type=LearnerProgress)
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
                    "the model and policy sections that the run was started with"
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
    own = local_shard(tensor)
    if not tensor.ndim:
        own.copy_(file.get_tensor(name))
    elif own.numel():
        own.copy_(file.get_slice(name)[local_row_slice(tensor)])


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
        self._outbox = WeightSenders(_sender)

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
            converting_write_errors(directory),
            staging_directory(directory, depth=2) as staging,
        ):
            self._write(staging, name, version.policy, model, tensors, canary)
            try:
                rename_durably(staging, directory, unless_same=name)
            except FileExistsError as error:
                raise TrainerError(
                    f"version {version} exists in {directory} with different weights; version ids are never reused"
                ) from error
        digest = sha256_of(*(directory / each for each in WEIGHT_FILES[model.kind]))
        return WeightsRef(version=version, path=str(directory), kind=model.kind, sha256=digest)

    def send(self, version: PolicyVersion, model: PolicyModel, recipient: WeightDestination) -> None:
        """Send the full weights of a published version to an engine; the other ranks do as in `publish`.

        Raises:
            TrainerError: the engine did not accept them.
        """
        with exhaust_on_exit(model.published()) as tensors:
            try:
                self._outbox.send(PublishedWeightSource(model.published_layout(), tensors), version, recipient)
            except TrainerError:
                raise
            except Exception as error:  # vLLM and NCCL raise many types, and the other ranks are waiting
                raise TrainerError(f"{version} was not sent to the engines: {type(error).__name__}: {error}") from error

    def _write(
        self,
        directory: Path,
        name: str,
        policy: str,
        model: PolicyModel,
        tensors: Iterator[tuple[str, Tensor]],
        canary: Canary | None,
    ) -> None:
        """Write all files of a version of a policy; `name` is that of the file with its weights."""
        metadata = {"format": "pt"} | (canary.metadata() if canary is not None else {})
        layout = model.published_layout()
        _write_tensors(directory / name, layout, tensors, metadata)
        adapter_config = model.adapter_config()
        if adapter_config is None:
            self._add_companions(directory, policy, model.base, next(iter(layout.values())).dtype)
        else:
            text = json.dumps(adapter_config, indent=2, sort_keys=True, default=list)
            (directory / ADAPTER_CONFIG).write_text(text)

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
                _state_dtype(copy / "config.json", dtype)
                rename_durably(copy, source)
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except OSError:  # the file system has no hard links
                shutil.copyfile(file, target)


def _sender(recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource) -> Any:
    """Return the sender of full weights to an engine: vLLM's own where both have GPUs."""
    if recipient.transfer == "file":
        return FileSender(recipient, link, source)
    if recipient.transfer == "gloo":
        return GlooSender(recipient, link, source)
    from agentrl.engines.weights.vllm_senders import connect_sender

    return connect_sender(recipient, link, source)


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


class CanaryBuilder:
    """Makes the canaries of a run's versions, all over the same tokens.

    Args:
        model: model with the initial weights of the run.
        max_context: longest context of the engines, in tokens, including one sampled token.
    """

    def __init__(self, model: PolicyModel, *, max_context: int) -> None:
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        length = max(1, min(_LENGTH, max_context - 1))

        def drawn(kind: str, count: int) -> Int32Array:
            return np.array([stable_hash64("probe", kind, at) % vocabulary for at in range(count)], np.int32)

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
            behavior_logprobs=np.zeros(count, np.float32),
            advantages=np.zeros(count, np.float32),
            temperature=np.ones(count, np.float32),
            sample=np.zeros(count, np.int64),
            position=np.full(count, length, np.int64),
        )


# --- step columns -----------------------------------------------------------------------------------------------------

LAGS = ("0", "1", "2", "3", "4+")
"""Version lags that the metrics distinguish."""


class StepColumns:
    """The rows of a step in the order of their consumption."""

    def __init__(self) -> None:
        """Begin without rows."""
        self._rows: list[tuple[str, int]] = []
        self._seats: list[str] = []
        self._digests: list[bytes] = []
        self._positions: list[NDArray[np.int64]] = []
        self._advantages: list[NDArray[np.float32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._entropies: list[NDArray[np.float32]] = []
        self._behavior: list[NDArray[np.float32]] = []
        self._lags: list[NDArray[np.int32]] = []
        self._fresh: list[bool] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, samples: Sequence[TrainingSample], version: PolicyVersion) -> int:
        """Append rows to be trained by the weights of `version`; returns the index of the first."""
        first = len(self._rows)
        for sample, positions in zip(samples, trained_positions(samples), strict=True):
            self._rows.append((sample.episode_id, sample.row_index))
            self._seats.append(sample.seat)
            self._digests.append(row_digest(sample))
            self._positions.append(positions)
            self._advantages.append(sample.advantages[positions].astype(np.float32))
            self._logprobs.append(np.full(len(positions), np.nan, np.float32))
            self._entropies.append(np.full(len(positions), np.nan, np.float32))
            self._behavior.append(sample.behavior_logprobs[positions].astype(np.float32))
            lags = token_lags(sample, version)
            self._lags.append(lags[positions])
            self._fresh.append(bool(sample.spans) and not (lags > 0).any())
        return first

    def record_advantages(self, first: int, starts: NDArray[np.int64], advantages: NDArray[np.float32]) -> None:
        """Replace the advantages of rows, from row `first` on; row i has the tokens from `starts[i]` on."""
        for row, (start, stop) in enumerate(pairwise(starts.tolist()), first):
            self._advantages[row] = advantages[start:stop]

    def record(
        self,
        first: int,
        starts: NDArray[np.int64],
        rows: Sequence[int],
        logprobs: NDArray[np.float32],
        entropies: NDArray[np.float32],
    ) -> None:
        """Fill in what was computed for some rows, counted from row `first`; row i has the tokens from `starts[i]`
        on."""
        for row in rows:
            tokens = slice(starts[row], starts[row + 1])
            self._logprobs[first + row], self._entropies[first + row] = logprobs[tokens], entropies[tokens]

    def encode(self) -> bytes:
        """Serialise these rows for `merge`."""
        offsets = np.cumsum([0, *map(len, self._positions)], dtype=np.int64)
        columns: dict[str, NDArray[Any]] = {
            "offsets": offsets,
            "position": np.concatenate([np.empty(0, np.int64), *self._positions]),
            "advantages": np.concatenate([np.empty(0, np.float32), *self._advantages]),
            "trainer_logprobs": np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            "entropy": np.concatenate([np.empty(0, np.float32), *self._entropies]),
            "behavior_logprobs": np.concatenate([np.empty(0, np.float32), *self._behavior]),
            "lag": np.concatenate([np.empty(0, np.int32), *self._lags]),
            "fresh": np.array(self._fresh, np.uint8),
            "digests": np.frombuffer(b"".join(self._digests), np.uint8),
            "rows": np.frombuffer(json.dumps(self._rows).encode(), np.uint8),
            "seats": np.frombuffer(json.dumps(self._seats).encode(), np.uint8),
        }
        return save(columns)


class MergedRankColumns:
    """The step's columns of all ranks together, rows in rank order, for the step's file and its metrics."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        """Merge the results of `StepColumns.encode`, one per rank."""
        decoded = [load(part) for part in parts]
        self.rows: list[list[Any]] = [row for part in decoded for row in json.loads(part["rows"].tobytes())]
        seats = [seat for part in decoded for seat in json.loads(part["seats"].tobytes())]
        lengths = np.concatenate([np.diff(part["offsets"]) for part in decoded])
        names = ("position", "trainer_logprobs", "entropy", "behavior_logprobs", "advantages", "lag")
        self.columns = {name: np.concatenate([part[name] for part in decoded]) for name in names}
        self.columns["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.fresh = np.repeat(np.concatenate([part["fresh"] for part in decoded]).astype(np.bool_), lengths)
        """Bool [tokens]: whether the token's whole row was sampled by the weights the trainer computed with."""
        self.seats = np.repeat(np.array(seats, dtype=object), lengths)
        """Str [tokens]: seat of the agent that sampled the token."""
        self.input_digest = input_digest(part["digests"].tobytes() for part in decoded)

    def mismatch(self) -> dict[str, float]:
        """Return the mismatch metrics of the step; see `mismatch_metrics` and `seat_mismatch_metrics`."""
        trainer, behavior = self.columns["trainer_logprobs"], self.columns["behavior_logprobs"]
        by_lag = mismatch_metrics(trainer, behavior, lag=self.columns["lag"], fresh=self.fresh)
        return by_lag | seat_mismatch_metrics(trainer, behavior, self.seats)

    def write(self, path: Path) -> None:
        """Write the step's file atomically, without syncing it.

        Raises:
            StorageError: writing failed.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with converting_write_errors(path):
            # Only these two, so that a run that was moved is not created again.
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(exist_ok=True)
            try:
                partial.write_bytes(save(self.columns, metadata={"rows": json.dumps(self.rows)}))
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)


def read_step_columns(path: Path) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """Read the rows and columns of a step's file."""
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["rows"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def mismatch_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], *, lag: NDArray[np.int32], fresh: BoolArray
) -> dict[str, float]:
    """Compute mismatch metrics over the tokens whose rows were forwarded.

    With log w = trainer - behavior, `k3` is the mean of w - 1 - log w: never negative, an unbiased estimate of KL(mu ||
    pi) over tokens sampled from mu (Schulman 2020, http://joschu.net/blog/kl-approx.html). `difference` is the mean of
    |log w|, `max_difference` the largest.

    Args:
        trainer: [n], NaN where the token was not forwarded.
        behavior: [n], recorded by the engine.
        lag: [n], steps between the weights of both; -1: unknown.
        fresh: [n], whether the token's whole row was sampled by the weights the trainer computed with: a token of lag 0
            in another row may have been sampled over KV of older weights.

    Returns:
        `mismatch/k3`, `/difference`, `/max_difference`, `/tokens` over fresh tokens, and the same as `lag_k3/<lag>`,
        `lag_difference/<lag>`, `lag_max_difference/<lag>`, `lag_tokens/<lag>` by lag; lags without tokens are left out.
    """
    groups = {"mismatch/{}": fresh}
    for at, word in enumerate(LAGS):
        groups[f"lag_{{}}/{word}"] = lag == at if at < len(LAGS) - 1 else lag >= at
    metrics: dict[str, float] = {}
    for name, tokens in groups.items():
        values = _log_ratio(trainer, behavior, tokens)
        if len(values):
            metrics[name.format("k3")] = float((np.expm1(values) - values).mean())
            metrics[name.format("difference")] = float(np.abs(values).mean())
            metrics[name.format("max_difference")] = float(np.abs(values).max())
            metrics[name.format("tokens")] = float(len(values))
    return metrics


def seat_mismatch_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], seats: NDArray[np.object_]
) -> dict[str, float]:
    """Return `seat_k3/<seat>` if the tokens, all of shape [n], belong to several seats; k3 as in `mismatch_metrics`."""
    names = sorted(set(seats.tolist()))
    if len(names) < 2:
        return {}
    measured = {name: _log_ratio(trainer, behavior, seats == name) for name in names}
    return {f"seat_k3/{name}": float((np.expm1(w) - w).mean()) for name, w in measured.items() if len(w)}


def _log_ratio(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], tokens: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return log w of the forwarded ones among `tokens`."""
    chosen = tokens & np.isfinite(trainer)
    difference: NDArray[np.float64] = trainer[chosen].astype(np.float64) - behavior[chosen]
    return difference.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
