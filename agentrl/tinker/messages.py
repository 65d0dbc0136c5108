"""The protocol buffers of the Tinker protocol, and its JSON requests, read from untrusted bytes.

Three messages travel as protocol buffers: `ForwardBackwardRequest`, `ForwardBackwardOutput` and `SampleResponse`. Their
encoding is written here, since it takes fewer lines than the library that would be a dependency: fields are varints
or bytes with a length, and unknown ones are skipped. Field numbers are those of the SDK's `tinker_public.proto`.

JSON requests are structs. A field that a struct does not have is refused unless it is empty: a client that asks for
something must not get an answer that silently lacks it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from agentrl.gateway.bodies import parse_json_body
from agentrl.gateway.calls import RequestRefusedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from agentrl.core.records import Float32Array, Int32Array, Int64Array
    from agentrl.core.tokens import Completion

T = TypeVar("T", bound=msgspec.Struct)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
_FLOAT32 = 1
_NO_LOGPROB = -99999.0
"""Log-probability of an empty cell among the likeliest tokens, in the protocol."""
NO_PROJECTS = "a server has no projects, and each key sees what it made; name weights by their path"
"""Why a request with a project is refused."""
_STABILITY_INFO = 1000
"""Field of a sample with the sampler's likeliest tokens, for `stable_reinforce`. The SDK has no such field and skips
it."""
MAX_FIELDS = 1 << 17
"""Maximum number of fields in a body, with those of its parts. A row of the SDK has about 40."""


# --- protocol buffers -------------------------------------------------------------------------------------------------


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a variable-length integer; returns it and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise RequestRefusedError("the body is not a protocol buffer: an integer does not end")


def _fields(data: memoryview, count: Iterator[int]) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message: an integer, or bytes.

    Args:
        data: the message.
        count: counts the fields of the whole body.

    Raises:
        RequestRefusedError: the bytes are not a message, or the body has too many fields.
    """
    at = 0
    while at < len(data):
        if next(count) >= MAX_FIELDS:
            raise RequestRefusedError(f"the body has more than {MAX_FIELDS} fields; send fewer rows at once", "large")
        tag, at = _varint(data, at)
        kind = tag & 7
        value: Any
        if kind == _VARINT:
            value, at = _varint(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
            if kind == _BYTES:
                size, at = _varint(data, at)
            if size is None or at + size > len(data):
                raise RequestRefusedError(f"the body is not a protocol buffer: field {tag >> 3} does not end")
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def _bytes(value: Any, name: str) -> memoryview:
    if not isinstance(value, memoryview):
        raise RequestRefusedError(f"{name}: a number where bytes belong")
    return value


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int):
        raise RequestRefusedError(f"{name}: bytes where a number belongs")
    return value


def _text(value: Any, name: str) -> str:
    try:
        return str(_bytes(value, name), "utf-8")
    except UnicodeDecodeError:
        raise RequestRefusedError(f"{name}: not text in UTF-8") from None


class ProvenanceSpan(NamedTuple):
    """A run of a row's targets: tokens `[offset, offset + length)` of a sampled sequence, or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientRow:
    """A row that a client trains on: after each input token, one target."""

    token_ids: Int32Array
    targets: Int64Array
    """Token whose log-probability is computed after each input token; need not be the next input token."""
    columns: Mapping[str, Float32Array] = field(default_factory=dict)
    """Further inputs of the loss by name, one number per target."""
    provenance: Sequence[ProvenanceSpan] = ()
    """Where the targets come from, in order; empty if the client does not say."""


@dataclass(slots=True)
class ForwardBackwardRequest:
    """A pass over rows, forward or forward and backward."""

    model_id: str = ""
    seq_id: int = 0
    rows: list[ClientRow] = field(default_factory=list)
    loss_fn: str = ""
    settings: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a request for a pass.

    Raises:
        RequestRefusedError: the body is not such a message, or holds images, audio or sparse tensors.
    """
    request = ForwardBackwardRequest()
    legacy: dict[str, float] = {}
    count = itertools.count()
    for number, value in _fields(memoryview(body), count):
        match number:
            case 1:
                request.model_id = _text(value, "model_id")
            case 2:
                request.seq_id = _number(value, "seq_id")
            case 3:
                request.rows.append(_read_row(_bytes(value, "data"), f"datum {len(request.rows)}", count))
            case 4:
                request.loss_fn = _text(value, "loss_fn")
            case 5:
                name, setting = _entry(value, "loss_fn_config", count)
                legacy[name] = _double(setting, name)
            case 6:
                request.forward_only = bool(_number(value, "forward_only"))
            case 7:
                name, setting = _entry(value, "loss_fn_config_v2", count)
                request.settings[name] = _setting(setting, name, count)
    request.settings = legacy | request.settings
    return request


def _read_row(data: memoryview, where: str, count: Iterator[int]) -> ClientRow:
    import numpy as np

    parts: list[NDArray[np.int32]] = []
    inputs: dict[str, NDArray[Any]] = {}
    spans: list[ProvenanceSpan] = []
    for number, value in _fields(data, count):
        match number:
            case 1:
                parts.append(_read_chunk(_bytes(value, where), where, count))
            case 2:
                name, tensor = _entry(value, f"{where}, loss_fn_inputs", count)
                inputs[name] = _read_tensor(_bytes(tensor, where), f"{where}, {name[:60]}", count)
            case 4:
                spans += _read_spans(_bytes(value, where), where, count)
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise RequestRefusedError(f"{where}: target_tokens are missing, or no integers")
    return ClientRow(
        token_ids=np.concatenate(parts) if parts else np.zeros(0, np.int32),
        targets=targets.astype(np.int64),
        columns={name: column.astype(np.float32) for name, column in inputs.items()},
        provenance=spans,
    )


def _read_spans(data: memoryview, where: str, count: Iterator[int]) -> Iterator[ProvenanceSpan]:
    where = f"{where}, loss_fn_input_spans"
    for kind, content in _fields(data, count):
        sequence_id, offset, length = "", 0, 0
        for number, value in _fields(_bytes(content, where), count):
            match number:
                case 1:
                    sequence_id = _text(value, where)
                case 2:
                    offset = _number(value, where)
                case 3:
                    length = _number(value, where)
        yield ProvenanceSpan(sequence_id, offset, length, is_sampled=kind == 2)


def _read_chunk(data: memoryview, where: str, count: Iterator[int]) -> NDArray[np.int32]:
    import numpy as np

    for number, value in _fields(data, count):
        if number != 1:
            raise RequestRefusedError(f"{where}: only text is served here, not images or audio")
        for inner, tokens in _fields(_bytes(value, where), count):
            if inner == 1:
                content = _bytes(tokens, where)
                if len(content) % 4:
                    raise RequestRefusedError(f"{where}: its tokens are not 32-bit integers")
                return np.frombuffer(content, "<i4")
    return np.zeros(0, np.int32)


def _read_tensor(data: memoryview, where: str, count: Iterator[int]) -> NDArray[Any]:
    import numpy as np

    dense, dtype, shape = memoryview(b""), "", []
    for number, value in _fields(data, count):
        match number:
            case 1:
                dense = _bytes(value, where)
            case 2:
                raise RequestRefusedError(f"{where}: sparse tensors are not served here; send one number per token")
            case 3:
                dtype = _DTYPES.get(_number(value, where), "")
            case 4 if isinstance(value, int):
                shape.append(value)
            case 4:
                packed = _bytes(value, where)
                at = 0
                while at < len(packed) and len(shape) < 8:
                    size, at = _varint(packed, at)
                    shape.append(size)
    if not dtype or len(dense) % int(dtype[2]):
        raise RequestRefusedError(f"{where}: not a tensor of 32-bit floats or of integers")
    if len(shape) > 1:
        raise RequestRefusedError(
            f"{where}: a tensor of {len(shape)} dimensions; this server computes losses with one target per token"
        )
    return np.frombuffer(dense, dtype)


def _entry(value: Any, where: str, count: Iterator[int]) -> tuple[str, Any]:
    """Read an entry of a map: its key, and its value as it stands."""
    key, content = "", memoryview(b"")
    for number, part in _fields(_bytes(value, where), count):
        if number == 1:
            key = _text(part, where)
        elif number == 2:
            content = part
    return key, content


def _double(value: Any, name: str) -> float:
    content = _bytes(value, name)
    return float(struct.unpack("<d", content)[0]) if len(content) == 8 else 0.0


def _setting(value: Any, name: str, count: Iterator[int]) -> float:
    for number, part in _fields(_bytes(value, name), count):
        if number == 1:
            return _double(part, name)
        raise RequestRefusedError(f"loss_fn_config.{name[:60]}: the losses here have only settings that are numbers")
    return 0.0


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _encode(number: int, content: bytes) -> bytes:
    """Encode a field of bytes."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def _encode_number(number: int, value: int) -> bytes:
    return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)


def write_forward_backward(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Write the answer to a pass: the log-probabilities of each row's targets, and metrics."""
    import numpy as np

    offsets = np.cumsum([0, *(4 * len(row) for row in logprobs)]).astype("<i8")
    content = np.concatenate([*logprobs, np.zeros(0, np.float32)]).astype("<f4")
    tensor = _encode(1, content.tobytes()) + _encode(2, offsets.tobytes()) + _encode_number(3, _FLOAT32)
    record = _encode(2, _encode(1, b"logprobs") + _encode(2, tensor)) + _encode_number(3, len(logprobs))
    entries = [
        _encode(3, _encode(1, name.encode()) + _encode_varint(2 << 3 | _FIXED64) + struct.pack("<d", value))
        for name, value in metrics.items()
    ]
    return b"".join([_encode(1, b"ArrayRecord"), _encode(2, record), *entries])


def write_samples(
    samples: Sequence[Completion],
    tops: Sequence[bytes],
    prompt_logprobs: NDArray[np.float32] | None,
    prompt_top: bytes,
    stability_info: Sequence[bytes],
) -> bytes:
    """Write the answer to a request for samples.

    Args:
        samples: the samples.
        tops: the likeliest tokens at each token of each sample, by `write_top`; empty without.
        prompt_logprobs: the log-probability of each token of the prompt; NaN where none was computed.
        prompt_top: the likeliest tokens at each token of the prompt; empty without.
        stability_info: the likeliest tokens at each token of each sample, for `read_stability_info`; empty without.
    """
    parts = [
        _encode(
            1,
            _encode_number(1, 0 if sample.finish_reason == "stop" else 1)
            + _encode(2, sample.token_ids.astype("<i4").tobytes())
            + _encode(3, sample.logprobs.astype("<f4").tobytes())
            + (_encode(4, top) if top else b"")
            + (_encode(_STABILITY_INFO, info) if info else b""),
        )
        for sample, top, info in zip(samples, tops, stability_info, strict=True)
    ]
    if prompt_logprobs is not None:
        parts.append(_encode(2, prompt_logprobs.astype("<f4").tobytes()))
    if prompt_top:
        parts.append(_encode(3, prompt_top))
    return b"".join(parts)


def write_top(ids: NDArray[np.int32], logprobs: NDArray[np.float32], *, width: int, empty_rows: int) -> bytes:
    """Write the likeliest tokens at each position.

    Args:
        ids: the tokens, `[n, k]`.
        logprobs: their log-probabilities.
        width: number of cells in each row, at least k; those without a token are empty.
        empty_rows: number of rows at the start that are emptied.
    """
    import numpy as np

    cells = ((0, 0), (0, width - ids.shape[1]))
    ids, logprobs = np.pad(ids, cells), np.pad(logprobs, cells, constant_values=_NO_LOGPROB)
    ids[:empty_rows], logprobs[:empty_rows] = 0, _NO_LOGPROB
    columns = _encode(1, ids.astype("<i4").tobytes()) + _encode(2, logprobs.astype("<f4").tobytes())
    return columns + _encode_number(3, width) + _encode_number(4, len(ids))


class RecordedSample(NamedTuple):
    """What a recorded answer has of one sample."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    """The sampler's likeliest tokens at each token, `[n, k]`."""
    top_logprobs: NDArray[np.float32]


def read_stability_info(body: bytes) -> list[RecordedSample | None]:
    """Read the samples of a recorded answer; None for one without stability information."""
    count = itertools.count()
    fields = _fields(memoryview(body), count)
    return [_read_recorded(dict(_fields(value, count)), count) for number, value in fields if number == 1]


def _read_recorded(sample: Mapping[int, Any], count: Iterator[int]) -> RecordedSample | None:
    import numpy as np

    if _STABILITY_INFO not in sample:
        return None
    top = dict(_fields(sample[_STABILITY_INFO], count))
    return RecordedSample(
        np.frombuffer(sample[2], "<i4"),
        np.frombuffer(sample[3], "<f4"),
        np.frombuffer(top[1], "<i4").reshape(-1, top[3]),
        np.frombuffer(top[2], "<f4").reshape(-1, top[3]),
    )


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


def read_place(route: str, body: bytes) -> tuple[str, int] | None:
    """Read the model and the sequence number of a request that cannot be read as a whole; None without them."""
    model: Any = None
    sequence: Any = None
    try:
        if route == "forward_backward":
            for number, value in _fields(memoryview(body), itertools.count()):
                if number == 1:
                    model = _text(value, "model_id")
                elif number == 2:
                    sequence = value
                if model is not None and sequence is not None:
                    break
        else:
            content = parse_json_body(body)
            model, sequence = content.get("model_id"), content.get("seq_id")
    except RequestRefusedError:
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
