"""The tokens of an episode, one by one: text, version, probability, and training.

Token columns are read from journal entries and from a step's file. A run's file counts as hostile: its header is
bounded, and its stated sizes are compared with the file's. Texts come from the model's `tokenizer.json`,
without a library, if the model is on this machine and the user chose it for this run: a run directory names no file to
open.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core.choices import Choices
from agentrl.core.column_files import decode_columns
from agentrl.core.errors import EntriesError, JournalError
from agentrl.core.files import open_regular, read_at_most
from agentrl.core.ports import SamplingParams
from agentrl.core.tokens import RECORDED_COLUMNS, ExpertRouting, Tokens
from agentrl.inspection.reader import verified_control_rows
from agentrl.journal.entries import BeginEntry, TurnEntry
from agentrl.journal.reader import pruned_file_error
from agentrl.journal.routing import decode_routing, read_locally

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from agentrl.inspection.reader import EpisodeView, RunReader

MAX_HEADER_BYTES = 8 << 20
MAX_FILE_BYTES = 192 << 20
_STEP_COLUMNS = ("position", "trainer_logprobs", "entropy", "behavior_logprobs", "advantages", "lag")
MAX_TOKENIZER_BYTES = 128 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
MIN_ADDITION = 12
"""Minimum length of a chat template's addition to a prompt that `text_beside_messages` returns, in characters, without
tags."""
_MARKERS = re.compile(
    r"(?:<\|(?:im_start|start_header_id|header_start|start)\|>|<start_of_turn>)"
    r"(?:(?:system|developer|user|assistant|model|tool)\b)?"
    r"|<\|[^<>|]*\|>|<\uff5c[^<>\uff5c]*\uff5c>|</?s>|<end_of_turn>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
"""Control tokens, with the roles that opening ones name."""
_TAGS = re.compile(r"</?\w+>")
_END = re.compile(r"(?:<\|\w+\|>|<\uff5c[^\s<>\uff5c]*\uff5c>|</s>|<end_of_turn>)\s*\Z")
"""The control token at the end of a reply. It has no spaces: a reply could hide a sentence in what is left out."""
MAX_CONTROL_TOKEN = 100
"""Maximum length of a control token that is left out, in characters."""
_CONTROL = ("<|start|>", "<|stop|>")
"""Names of the ids above the bytes, in formats with bytes as tokens."""
_DEFAULT_SAMPLING = dataclasses.asdict(SamplingParams(max_tokens=0))
_OWN_PACKAGES = tuple(Path(__file__).resolve().parents[2] / name for name in ("agentrl", "environments"))
"""Directories whose models came with agentrl."""


class StepRow(NamedTuple):
    """A row of a step's file."""

    episode: str
    row: int
    """Index of the row in the unit, counted over all its agents."""
    columns: dict[str, array[Any]]
    """Columns of the file for the row's trained tokens; see `learn/step_columns.py`."""


def read_step_rows(run: Path, name: Any) -> list[StepRow]:
    """Read the rows of a step's file, in the order in which they were consumed.

    Args:
        run: the run's directory.
        name: path of the file relative to the run, from the step's record.

    Raises:
        PrunedDataError: the file was pruned.
        JournalError: the file does not exist, is outside the run, or is damaged.
    """
    path = run / str(name)
    if not isinstance(name, str) or not path.resolve().is_relative_to(run.resolve()):
        raise JournalError(f"the record of a step refers to columns in {str(name)[:200]!r}, which is outside the run")
    try:
        with open_regular(path) as file:
            data = read_at_most(file, MAX_FILE_BYTES)
        metadata, columns = decode_columns(data, max_header_bytes=MAX_HEADER_BYTES)
        return _rows(msgspec.json.decode(metadata["rows"], type=list[tuple[str, int]]), columns)
    except OSError as error:
        raise pruned_file_error(run, name) or JournalError(
            f"{path}: cannot be read ({error.strerror}); the step's columns are lost"
        ) from error
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        raise JournalError(f"{path}: not the columns of a step ({error}); the file is damaged") from error


def _rows(row_keys: list[tuple[str, int]], columns: dict[str, array[Any]]) -> list[StepRow]:
    offsets = columns.pop("offsets").tolist()
    lengths = {len(columns[name]) for name in _STEP_COLUMNS}
    if len(offsets) != len(row_keys) + 1 or lengths != {offsets[-1]} or min(offsets) < 0:
        raise ValueError("its rows and their offsets differ")
    return [
        StepRow(episode, row, {name: columns[name][start:stop] for name in _STEP_COLUMNS})
        for (episode, row), start, stop in zip(row_keys, offsets, offsets[1:], strict=False)
    ]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


@lru_cache(maxsize=4)
def load_vocabulary(model: str | None) -> Vocabulary:
    """Return the `Vocabulary` of a model, read once per process."""
    return Vocabulary(model)


class Vocabulary:
    """The text pieces of a tokenizer by id; empty if there is no tokenizer to read.

    Args:
        model: directory of a base model.
    """

    def __init__(self, model: str | None) -> None:
        self._pieces: dict[int, bytes] = {}
        self._bytes = _byte_characters()
        if model is not None:
            self._read(Path(model) / "tokenizer.json")

    @property
    def is_known(self) -> bool:
        """Whether ids can be converted to text."""
        return bool(self._pieces)

    def text(self, token: int) -> str:
        """Return the text of a single token; "" if unknown. Half a character is U+FFFD."""
        return self.decode([token])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of successive tokens, without unknown ones."""
        return b"".join(self._pieces.get(token, b"") for token in token_ids).decode("utf-8", "replace")

    def _read(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                tokenizer = msgspec.json.decode(read_at_most(file, MAX_TOKENIZER_BYTES), type=_Tokenizer)
        except (OSError, ValueError, RecursionError):
            return
        is_byte_level = all(
            character in self._bytes for piece in list(tokenizer.model.vocab)[:2000] for character in piece
        )
        for piece, token in tokenizer.model.vocab.items():
            self._pieces[token] = self._of_bytes(piece) if is_byte_level else _of_pieces(piece)
        self._pieces.update({token.id: _encode(token.content) for token in tokenizer.added_tokens})

    def _of_bytes(self, piece: str) -> bytes:
        return bytes(self._bytes.get(character, 63) for character in piece)


def _of_pieces(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else _encode(piece.replace("\u2581", " "))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _byte_characters() -> dict[str, int]:
    """Return the characters with which byte-level vocabularies write bytes: printable ones as themselves, others from
    U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(other_bytes)}


ReadStep = Callable[[Path, Any], list[StepRow]]
"""Type of `read_step_rows`, or of a caching replacement."""


class EpisodeToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a row."""

    position: int
    """Position of the token in its row."""
    turn: int
    """Number of the agent's turn to which the token belongs, as context or as a sampled token."""
    id: int
    text: str
    """Text of the token; empty if the run's tokenizer is not on this machine, or only the run names it."""
    loss_mask: bool
    """Whether the policy sampled the token, in this episode."""
    logprob: float | None = None
    version: str | None = None
    kept: int | None = None
    """Size of the kept set, or minus the number of tokens that it lacks; None if nothing was filtered, or it was not
    recorded."""
    entropy: float | None = None
    """Entropy over the kept set, in nats: 0 if the set had one member, else as the trainer computed it."""
    routing: str | None = None
    """Digest of the experts recorded at the token's position."""
    advantage: float | None = None
    trainer_logprob: float | None = None
    ratio: float | None = None
    """Probability of the token under the trained weights, divided by its probability under the weights that sampled
    it."""
    lag: int | None = None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of an agent: one token sequence."""

    seat: str
    index: int
    policy: str
    row: int
    step: str | None
    """Version made by the optimizer step that trained the row; None: no step did."""
    tokens: list[EpisodeToken]
    recorded: dict[str, list[float | None]]
    asked: dict[int, dict[str, Any]]
    """What requests of an external agent asked for, by turn; see `differing_request`."""


class EpisodeTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The token rows of an episode."""

    episode: str
    attempt: int
    rows: list[TokenRow]
    problems: list[str]


class AssembledTokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of an agent, assembled from its turns."""

    seat: str
    index: int
    row: int
    policy: str
    number: int
    """Index of the row in its unit, counted over all agents, as in a step's file; -1 if all its turns are inherited."""
    turns: list[TurnEntry]
    tables: list[tuple[Tokens, Tokens]]
    """New context and sampled tokens of each turn, as plain columns."""
    first: int = 0
    """Number of the agent's first turn that was sampled in this episode; a fork inherited those before it."""


class StepTokenValues(NamedTuple):
    """Values of a step for a row's tokens, by position."""

    step: str
    places: dict[int, dict[str, Any]]
    """The token's values by column, keyed by position; a row routed twice is two rows of the step."""


def episode_tokens(reader: RunReader, episode_id: str, attempt: int | None = None) -> EpisodeTokens:
    """Return the tokens of an episode, agent by agent, row by row. Raises as `RunReader.episode`."""
    return tokens_from_view(reader, reader.episode(episode_id, attempt))


def tokens_from_view(reader: RunReader, view: EpisodeView, read: ReadStep = read_step_rows) -> EpisodeTokens:
    """Return the tokens of an episode that was read; `read` reads a step's file."""
    problems = list(view.problems)
    begin = next((body for _, body in view.entries if isinstance(body, BeginEntry)), None)
    rows = []
    for token_row in assemble_token_rows(view, problems):
        words = _vocabulary(reader, token_row.policy)
        step_values = newest_step_token_values(reader, view, token_row, problems, read)
        tokens = list(_tokens(token_row, words, step_values, list(_routing(reader.journal, token_row, problems))))
        step = None if step_values is None else step_values.step
        rows.append(
            TokenRow(
                seat=token_row.seat,
                index=token_row.index,
                policy=token_row.policy,
                row=token_row.row,
                step=step,
                tokens=tokens,
                recorded=recorded_columns(token_row),
                asked={turn.turn: asked for turn in token_row.turns if (asked := differing_request(turn, begin))},
            )
        )
    return EpisodeTokens(episode=view.summary.episode, attempt=view.summary.attempt, rows=rows, problems=problems)


def base_model_directory(run: Path, config: object, policy: str) -> str | None:
    """Return the directory of a policy's base model in a recorded configuration, or the one that the user named for it.

    None if there is none, or only the run's directory names it.

    Raises:
        InputError: the user's choices for the run cannot be read.
    """
    if not isinstance(config, dict):
        return None
    policies, model = config.get("policies"), config.get("model")
    settings = policies if isinstance(policies, dict) else {}
    policy_settings = settings.get(policy)
    if isinstance(policy_settings, dict) and policy_settings.get("kind") == "past":
        policy = str(policy_settings.get("of"))
        policy_settings = settings.get(policy)
    key, path = f"policies.{policy}.model", None
    if isinstance(policy_settings, dict) and policy_settings.get("kind") != "remote":
        path = policy_settings.get("model")
    if not path:
        key, path = "model.path", model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        return None
    if _is_own_model(path):
        return os.path.normpath(path)
    chosen: str | None = Choices.of(run).value_for(key, path)
    return chosen


def _vocabulary(reader: RunReader, policy: str) -> Vocabulary:
    """Return the vocabulary of a policy's base model."""
    config = reader.info().get("config")
    return load_vocabulary(reader.model_of(policy, lambda: base_model_directory(reader.path, config, policy)))


@lru_cache(maxsize=64)
def _is_own_model(path: str) -> bool:
    return any(Path(os.path.normpath(path)).is_relative_to(package) for package in _OWN_PACKAGES)


def differing_request(turn: TurnEntry, begin: BeginEntry | None) -> dict[str, Any]:
    """Return what the request of an external agent asked for, by field, where it differs from the run's sampling."""
    request = turn.request
    if request is None:
        return {}
    seats = {} if begin is None else begin.settings
    settings = seats.get(turn.seat) or seats.get("")
    run_values = _DEFAULT_SAMPLING | ({} if settings is None else msgspec.structs.asdict(settings))
    asked: dict[str, Any] = {
        name: value for name, value in request.asked.items() if run_values.get(name) != value and name != "stop"
    }
    if settings is not None and request.max_tokens < settings.max_tokens:
        asked["max_tokens"] = request.max_tokens
    if request.stop:
        asked["stop"] = list(request.stop)
    return asked


def text_beside_messages(reader: RunReader, turn: TurnEntry) -> str:
    """Return what a row's first prompt says besides its messages: the tools, and what else the chat template adds.

    Control tokens, roles and short additions are left out; `agentrl episode tokens` has them. Without the model's
    tokenizer, only the tools that an external agent sent are known.
    """
    vocabulary = _vocabulary(reader, turn.policy)
    try:
        context, token_ids = (
            table.token_ids.tolist() for table in (turn.context(plain=True), turn.sampled(plain=True))
        )
    except EntriesError:
        context = token_ids = []
    prompt = "" if _is_bytes(turn, token_ids) else vocabulary.decode(context)
    if not prompt:
        return "" if turn.request is None else turn.request.tools or ""
    parts, start, has_calls = [], 0, False
    for message in turn.messages:
        content = str(message.get("content") or "").strip()
        at = prompt.find(content, start) if content else -1
        if at >= 0:
            parts += [] if has_calls else [prompt[start:at]]
            start, has_calls = at + len(content), False
        has_calls = has_calls or bool(message.get("tool_calls"))  # written after its content, and shown with it
    parts += [] if has_calls else [prompt[start:]]
    texts = (_MARKERS.sub("\n", part).strip() for part in parts)
    return "\n".join(text for text in texts if len(_TAGS.sub("", text).strip()) >= MIN_ADDITION)


def without_end(text: str) -> str:
    """Return the text of a reply without the control token that ends it.

    Example:
        >>> without_end("372<|im_end|>"), without_end("It is [B].")
        ('372', 'It is [B].')
    """
    match = _END.search(text, max(len(text) - MAX_CONTROL_TOKEN, 0))
    return text if match is None else text[: match.start()]


def assemble_token_rows(view: EpisodeView, problems: list[str]) -> list[AssembledTokenRow]:
    """Return the rows of an episode, agent by agent; those with damaged tokens are problems instead."""
    by_row: dict[tuple[str, int, int], list[TurnEntry]] = {}
    num_inherited = Counter(
        (body.seat, body.index) for _, body in view.entries[1 : 1 + view.inherited] if isinstance(body, TurnEntry)
    )
    for _, body in view.entries:
        if isinstance(body, TurnEntry):
            by_row.setdefault((body.seat, body.index, body.row), []).append(body)
    numbers: dict[str, int] = {}
    rows = []
    for (seat, index, row), turns in sorted(by_row.items()):
        policy, first, number = turns[-1].policy, num_inherited[seat, index], -1
        if turns[-1].turn >= first:
            number = numbers[policy] = numbers.get(policy, -1) + 1
        try:
            tables = [(turn.context(plain=True), turn.sampled(plain=True)) for turn in turns]
        except EntriesError as error:
            problems.append(str(error))
            continue
        rows.append(
            AssembledTokenRow(
                seat=seat, index=index, row=row, policy=policy, number=number, turns=turns, tables=tables, first=first
            )
        )
    return rows


def recorded_columns(token_row: AssembledTokenRow) -> dict[str, list[float | None]]:
    """Return what engines recorded for each token of a row besides log-probabilities, by column.

    None where a token has no value, as in context, or none that is finite; columns that no turn has are left out.
    """
    tables = [table for of_turn in token_row.tables for table in of_turn]
    columns: dict[str, list[float | None]] = {}
    for name in (column.name for column in RECORDED_COLUMNS if column.name != "logprobs"):
        parts = [getattr(table, name) for table in tables]
        if any(part is not None for part in parts):
            columns[name] = [
                value
                for part, table in zip(parts, tables, strict=True)
                for value in ([None] * len(table) if part is None else map(_finite, part.tolist()))
            ]
    return columns


def newest_step_token_values(
    reader: RunReader,
    view: EpisodeView,
    token_row: AssembledTokenRow,
    problems: list[str],
    read: ReadStep = read_step_rows,
) -> StepTokenValues | None:
    """Return the values of the newest step that consumed a row, if its columns still exist; `read` reads the step's
    file."""
    line, policy = view.summary, token_row.policy
    unit_rows = verified_control_rows(
        reader.log,
        "step_units",
        "episode = ? AND attempt = ? AND policy = ? ORDER BY lineage DESC, step DESC LIMIT 1",
        *(line.episode, line.attempt, policy),
        problems=problems,
    )
    for unit in unit_rows:
        key = (policy, unit["lineage"], unit["step"])
        for step in verified_control_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key):
            if step["columns_file"] is None:
                continue
            try:
                rows = read(reader.path, step["columns_file"])
            except JournalError as error:
                problems.append(str(error))
                continue
            matches = [row for row in rows if row.episode == line.episode and row.row == token_row.number]
            if matches:
                columns = [{name: values.tolist() for name, values in match.columns.items()} for match in matches]
                tokens = [
                    dict(zip(part, values, strict=True))
                    for part in columns
                    for values in zip(*part.values(), strict=True)
                ]
                places = {token["position"]: token for token in tokens}
                return StepTokenValues(f"{policy}@{key[1]}.{key[2]}", places)
    return None


def _tokens(
    token_row: AssembledTokenRow,
    vocabulary: Vocabulary,
    step_values: StepTokenValues | None,
    routing: Sequence[ExpertRouting | None],
) -> Iterator[EpisodeToken]:
    position = 0
    for turn, (context, sampled), experts in zip(token_row.turns, token_row.tables, routing, strict=True):
        token_ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        counts = [0] * len(token_ids) if sampled.kept is None else sampled.kept.counts.tolist()
        says = _bytes_as_text if _is_bytes(turn, token_ids) else vocabulary.text
        for token in context.token_ids.tolist():
            yield EpisodeToken(position=position, turn=turn.turn, id=token, text=says(token), loss_mask=False)
            position += 1
        versions, digests = _versions(sampled), _expert_digests(experts)
        for token, logprob, count, version in zip(token_ids, logprobs, counts, versions, strict=True):
            yield EpisodeToken(
                position=position,
                turn=turn.turn,
                id=token,
                text=says(token),
                loss_mask=turn.turn >= token_row.first,
                logprob=_finite(logprob),
                version=version,
                kept=(count if count >= 0 else count + 1) or None,
                routing=digests.get(position),
                **_training(step_values, position, is_forced=count == 1),
            )
            position += 1


def _training(step_values: StepTokenValues | None, position: int, *, is_forced: bool) -> dict[str, Any]:
    token = None if step_values is None else step_values.places.get(position)
    if token is None:
        return {"entropy": 0.0 if is_forced else None}
    now, then = token["trainer_logprobs"], token["behavior_logprobs"]
    is_finite = math.isfinite(now) and math.isfinite(then) and abs(now - then) < 700.0
    return {
        "advantage": _finite(token["advantages"]),
        "trainer_logprob": _finite(now),
        "entropy": 0.0 if is_forced else _finite(token["entropy"]),
        "ratio": math.exp(now - then) if is_finite else None,
        "lag": token["lag"] if token["lag"] >= 0 else None,
    }


def _versions(tokens: Tokens) -> list[str | None]:
    versions: list[str | None] = [None] * len(tokens)
    for start, stop, version in tokens.spans:
        versions[start:stop] = [str(version)] * (stop - start)
    return versions


def _routing(journal: Path, token_row: AssembledTokenRow, problems: list[str]) -> Iterator[ExpertRouting | None]:
    """Yield the expert routing of each turn, or None if it was not recorded or is lost."""
    read, end = read_locally(journal), 0
    for turn, (context, sampled) in zip(token_row.turns, token_row.tables, strict=True):
        end += len(context) + len(sampled)
        if turn.routing is None:
            yield sampled.experts
            continue
        (content,) = read([turn.routing])
        try:
            yield decode_routing(content, end, plain=True)
        except ValueError as error:
            problems.append(f"{turn.name}: its expert routing is lost: {error}")
            yield None


def _expert_digests(experts: ExpertRouting | None) -> dict[int, str]:
    """Return a digest of each position's experts; if it was computed twice, of the newest."""
    stretches = [] if experts is None else experts.stretches()
    return {
        start + at: hashlib.blake2b(rows[at : at + 1].tobytes(), digest_size=4).hexdigest()
        for start, rows in stretches
        for at in range(len(rows))
    }


def _is_bytes(turn: TurnEntry, token_ids: Sequence[int]) -> bool:
    """Whether the turn's tokens are the bytes of its text, as in formats without a tokenizer."""
    if any(not 0 <= token < 256 + len(_CONTROL) for token in token_ids):
        return False
    text = turn.text
    for control in _CONTROL:
        text = text.replace(control, "")
    return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace") == text


def _bytes_as_text(token: int) -> str:
    if token >= 256:
        return _CONTROL[token - 256] if token - 256 < len(_CONTROL) else ""
    return bytes([token]).decode("utf-8", "replace") if token >= 0 else ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
