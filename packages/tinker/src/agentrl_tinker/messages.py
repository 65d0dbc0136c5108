"""The requests and answers of the Tinker protocol, read from untrusted bytes.

Passes and their answers, and samples, are protocol buffers of the SDK. Other requests are JSON, read as structs. A
field that a struct does not have is refused unless it is empty: a client that asks for something must not get an answer
that silently lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker.proto import tinker_public_pb2 as protocol

from agentrl_tinker.errors import RequestRefusedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.parts import Completion

T = TypeVar("T", bound=msgspec.Struct)
MAX_BODY_BYTES = 8 << 20
"""Maximum size of a body when it is unpacked."""
NO_PROJECTS = "a server has no projects; name weights by their path"
"""Why a request with a project is refused."""
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
_NO_LOGPROB = -99999.0
"""Log-probability of an empty cell among the likeliest tokens, in the protocol."""
_STABILITY_INFO = 1000
"""Field of a sample with the sampler's likeliest tokens, for `stable_reinforce`. The SDK has no such field and skips
it."""


# --- protocol buffers -------------------------------------------------------------------------------------------------


class ProvenanceSpan(NamedTuple):
    """A run of a row's targets: tokens `[offset, offset + length)` of a sampled sequence, or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientRow:
    """A row that a client trains on: after each input token, one target."""

    token_ids: NDArray[np.int32]
    targets: NDArray[np.int64]
    """Token whose log-probability is computed after each input token; need not be the next input token."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further inputs of the loss by name, one number per target."""
    provenance: Sequence[ProvenanceSpan] = ()
    """Where the targets come from, in order; empty if the client does not say."""


@dataclass(slots=True)
class ForwardBackwardRequest:
    """A pass over rows, forward or forward and backward."""

    model_id: str
    seq_id: int
    rows: list[ClientRow]
    loss_fn: str
    settings: dict[str, float]
    forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a request for a pass.

    Raises:
        RequestRefusedError: the body is not such a message, or holds images, audio or sparse tensors.
    """
    try:
        message = protocol.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestRefusedError(f"the body is not a protocol buffer: {error}") from None
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RequestRefusedError(f"loss_fn_config.{name[:60]}: the losses have only settings that are numbers")
        settings[name] = value.number
    rows = [_read_row(datum, f"datum {number}") for number, datum in enumerate(message.data)]
    return ForwardBackwardRequest(
        message.model_id, message.seq_id, rows, message.loss_fn, settings, message.forward_only
    )


def _read_row(datum: Any, where: str) -> ClientRow:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
        raise RequestRefusedError(f"{where}: only text is served here, not images or audio")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    if len(tokens) % 4:
        raise RequestRefusedError(f"{where}: its tokens are not 32-bit integers")
    inputs = {name: _read_tensor(each, f"{where}, {name[:60]}") for name, each in datum.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise RequestRefusedError(f"{where}: target_tokens are missing, or no integers")
    spans = []
    for each in datum.loss_fn_input_spans:
        is_sampled = each.WhichOneof("span") == "sampled_tokens"
        span = each.sampled_tokens if is_sampled else each.prompt_tokens
        if span.offset < 0 or span.length < 0:
            raise RequestRefusedError(f"{where}: a span of its provenance has a negative offset or length")
        spans.append(ProvenanceSpan(span.sequence_id, span.offset, span.length, is_sampled))
    return ClientRow(
        token_ids=np.frombuffer(tokens, "<i4"),
        targets=targets.astype(np.int64),
        columns={name: column.astype(np.float32) for name, column in inputs.items()},
        provenance=spans,
    )


def _read_tensor(tensor: Any, where: str) -> NDArray[Any]:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise RequestRefusedError(f"{where}: sparse tensors are not served here; send one number per token")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or len(tensor.dense) % int(dtype[2]):
        raise RequestRefusedError(f"{where}: not a tensor of 32-bit floats or of integers")
    if len(tensor.shape) > 1:
        raise RequestRefusedError(
            f"{where}: a tensor of {len(tensor.shape)} dimensions; losses here have one target per token"
        )
    return np.frombuffer(tensor.dense, dtype)


def write_forward_backward(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Write the answer to a pass: the log-probabilities of each row's targets, and metrics."""
    offsets = np.cumsum([0, *(4 * len(row) for row in logprobs)]).astype("<i8")
    content = np.concatenate([*logprobs, np.zeros(0, np.float32)]).astype("<f4")
    tensor = protocol.BatchedTensor(data=content.tobytes(), offsets=offsets.tobytes(), dtype=protocol.DTYPE_FLOAT32)
    record = protocol.ArrayRecord(fields={"logprobs": tensor}, num_datums=len(logprobs))
    output = protocol.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return bytes(output.SerializeToString(deterministic=True))


def write_samples(
    samples: Sequence[Completion],
    tops: Sequence[protocol.TopkLogprobs | None],
    prompt_logprobs: NDArray[np.float32] | None,
    prompt_top: protocol.TopkLogprobs | None,
    stability_info: Sequence[protocol.TopkLogprobs | None],
) -> bytes:
    """Write the answer to a request for samples.

    Args:
        samples: the samples.
        tops: the likeliest tokens at each token of each sample, by `write_top`.
        prompt_logprobs: the log-probability of each token of the prompt; NaN where none was computed.
        prompt_top: the likeliest tokens at each token of the prompt.
        stability_info: the likeliest tokens at each token of each sample, for `read_stability_info`.
    """
    sequences = []
    for sample, top, info in zip(samples, tops, stability_info, strict=True):
        sequence = protocol.SampledSequence(
            stop_reason=protocol.STOP_REASON_STOP if sample.finish_reason == "stop" else protocol.STOP_REASON_LENGTH,
            tokens=sample.token_ids.astype("<i4").tobytes(),
            logprobs=sample.logprobs.astype("<f4").tobytes(),
            topk_sampled_logprobs=top,
        )
        if info is not None:
            content = info.SerializeToString()
            sequence.MergeFromString(_varint(_STABILITY_INFO << 3 | 2) + _varint(len(content)) + content)
        sequences.append(sequence)
    logprobs = None if prompt_logprobs is None else prompt_logprobs.astype("<f4").tobytes()
    response = protocol.SampleResponse(sequences=sequences, prompt_logprobs=logprobs, topk_prompt_logprobs=prompt_top)
    return bytes(response.SerializeToString())


def _varint(value: int) -> bytes:
    """Encode a number of a protocol buffer."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def write_top(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32], *, width: int, empty_rows: int
) -> protocol.TopkLogprobs:
    """Write the likeliest tokens at each position.

    Args:
        ids: the tokens, `[n, k]`.
        logprobs: their log-probabilities.
        width: number of cells in each row, at least k; those without a token are empty.
        empty_rows: number of rows at the start that are emptied.
    """
    cells = ((0, 0), (0, width - ids.shape[1]))
    ids, logprobs = np.pad(ids, cells), np.pad(logprobs, cells, constant_values=_NO_LOGPROB)
    ids[:empty_rows], logprobs[:empty_rows] = 0, _NO_LOGPROB
    return protocol.TopkLogprobs(
        token_ids=ids.astype("<i4").tobytes(), logprobs=logprobs.astype("<f4").tobytes(), k=width, length=len(ids)
    )


class RecordedSample(NamedTuple):
    """What a recorded answer has of one sample."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    """The sampler's likeliest tokens at each token, `[n, k]`."""
    top_logprobs: NDArray[np.float32]


def read_stability_info(body: bytes) -> list[RecordedSample | None]:
    """Read the samples of a recorded answer; None for one without stability information."""
    return [_read_recorded(sequence) for sequence in protocol.SampleResponse.FromString(body).sequences]


def _read_recorded(sequence: Any) -> RecordedSample | None:
    for unknown in UnknownFieldSet(sequence):
        if unknown.field_number == _STABILITY_INFO:
            top = protocol.TopkLogprobs.FromString(unknown.data)
            return RecordedSample(
                np.frombuffer(sequence.tokens, "<i4"),
                np.frombuffer(sequence.logprobs, "<f4"),
                np.frombuffer(top.token_ids, "<i4").reshape(-1, top.k),
                np.frombuffer(top.logprobs, "<f4").reshape(-1, top.k),
            )
    return None


# --- JSON -------------------------------------------------------------------------------------------------------------


class CreateSession(msgspec.Struct):
    """A client's session begins."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(msgspec.Struct):
    """A session is still there."""

    session_id: str


class FinishSession(msgspec.Struct):
    """A session ends: no further models and samplers are made in it."""

    session_id: str
    reason: dict[str, str] = {}
    detail: str | None = None


class Lora(msgspec.Struct):
    """The shape of an adapter."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(msgspec.Struct, frozen=True):
    """The kind of an optimizer."""

    type: str = "adamw"


class CreateModel(msgspec.Struct):
    """A model to be trained."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(msgspec.Struct):
    """Asks about a model."""

    model_id: str


class Adam(msgspec.Struct):
    """The settings of an optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
    """An optimizer step."""

    model_id: str
    seq_id: int
    adam_params: Adam


class SaveWeights(msgspec.Struct):
    """Saves weights and optimizer state."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(msgspec.Struct):
    """Saves weights to sample from them, by a name or as a sampling session."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(msgspec.Struct):
    """Saves weights in PEFT's format, to be downloaded."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(msgspec.Struct):
    """Loads weights into a model, or creates a model from them."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None


class CreateSampler(msgspec.Struct):
    """A sampling session of a base model, or of saved weights."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct):
    """A part of a prompt."""

    tokens: list[int] = []
    type: str = "encoded_text"


class Prompt(msgspec.Struct):
    """A prompt."""

    chunks: list[Chunk]


class Sampling(msgspec.Struct):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct):
    """A request for samples."""

    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    record_stability_info: bool | None = None


FUTURES: Mapping[str, Any] = {
    "create_model": CreateModel,
    "load_weights": LoadWeights,
    "forward_backward": ForwardBackwardRequest,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveForSampler,
    "save_weights_external": SaveExternal,
    "asample": Sample,
}
"""Requests whose results are polled for, keyed by route."""


class Retrieve(msgspec.Struct):
    """Asks for the result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(msgspec.Struct):
    """Cancels a request for samples."""

    request_id: str


class SetTtl(msgspec.Struct):
    """Changes how long saved weights are kept from now on."""

    model_id: str
    checkpoint: str
    ttl_seconds: int | None = None


class OfPath(msgspec.Struct):
    """Asks about saved weights."""

    tinker_path: str


def read_request(route: str, body: bytes) -> Any:
    """Read the body of a route of `FUTURES`.

    Raises:
        RequestRefusedError: it is malformed, or asks for something that is not served.
    """
    if route == "forward_backward":
        return read_forward_backward(body)
    return read_json(parse_json_body(body), FUTURES[route])


def parse_json_body(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body.

    Raises:
        RequestRefusedError: the body is no JSON object.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not a JSON object: {error}") from None


def read_place(route: str, body: bytes) -> tuple[str, int] | None:
    """Read the model and the sequence number of a request that cannot be read as a whole; None without them."""
    try:
        if route == "forward_backward":  # they stand at the beginning: fields 1 and 2
            number_at = 3 + body[1]
            end = next(at for at in range(number_at, number_at + 10) if body[at] < 0x80) + 1
            message = protocol.ForwardBackwardRequest.FromString(body[:end])
            return message.model_id, message.seq_id
        content = parse_json_body(body)
        model, sequence = content.get("model_id"), content.get("seq_id")
    except (RequestRefusedError, DecodeError, IndexError, StopIteration):
        return None
    return (model, sequence) if isinstance(model, str) and type(sequence) is int else None


def read_json(value: Mapping[str, Any], kind: type[T]) -> T:
    """Read a JSON request.

    Raises:
        RequestRefusedError: a field is missing, of another type, or unknown and not empty.
    """
    _refuse_unknown(value, kind, "")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestRefusedError(str(error)) from None


def _refuse_unknown(value: Any, kind: Any, where: str) -> None:
    for part_field in msgspec.structs.fields(kind):
        part, part_kind = value.get(part_field.encode_name), _struct_in(part_field.type)
        if part_kind is not None:
            for item in part if isinstance(part, list) else [part]:
                if isinstance(item, Mapping):
                    _refuse_unknown(item, part_kind, f"{where}{part_field.encode_name}.")
    known = {each.encode_name for each in msgspec.structs.fields(kind)} | {"type"}
    for name, content in value.items():
        if name not in known and content not in (None, False, 0, "", [], {}):
            raise RequestRefusedError(
                f"{where}{name[:60]} is not served here; leave it out (served: {', '.join(sorted(known - {'type'}))})"
            )


def _struct_in(annotation: Any) -> Any:
    """Return the struct in a field's type, such as `Chunk` in `list[Chunk]`; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    parts = (_struct_in(part) for part in getattr(annotation, "__args__", ()))
    return next((part for part in parts if part is not None), None)
