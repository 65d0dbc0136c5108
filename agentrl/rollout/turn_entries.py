"""Turns on disk: the journal entry of a finished turn, and the partials of a turn in progress.

`completion_from_entry` reads an entry back. `PartialTurn` collects a turn over several engine calls and, if need be,
several processes; `EpisodePartialTurns` decides when new tokens are written to disk, and reads those of an earlier
process.

Invariants: tokens reach the disk in order, each once; tokens read from disk are never sampled again; a turn that ends
before `FIRST_SECONDS` writes no partial.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import EntriesError, JournalError
from agentrl.core.records import Message, find_finish_reason
from agentrl.core.tokens import Completion, Tokens
from agentrl.journal.entries import (
    JournalEntry,
    PartialTurnTokens,
    ReplyRecord,
    TurnEntry,
    decode_partial_turn,
    encode_partial_turn,
)
from agentrl.rollout.calls.journal_data import to_journal_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.ports import SamplingParams
    from agentrl.core.records import FinishReason
    from agentrl.journal.port import TurnLog
    from agentrl.rollout.calls.journal import JournaledCall


def encode_message(message: Message) -> dict[str, Any]:
    """Convert a message to data that the journal can hold, without empty fields."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": to_journal_data(c.arguments)} for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        data["name"] = message.name
    if message.thinking:
        data["thinking"] = message.thinking
    return data


def decode_message(data: Mapping[str, Any]) -> Message:
    """Decode a message that `encode_message` wrote.

    Raises:
        JournalError: `data` is not a message.
    """
    try:
        calls = data.get("tool_calls", ())
        return msgspec.convert(
            {**data, "tool_calls": [{"id": "", **call} for call in calls]} if calls else dict(data), Message
        )
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise JournalError(f"an edited message cannot be read ({error})") from error


def record_reply(message: Message) -> ReplyRecord:
    """Return what the journal holds of a parsed reply besides its text."""
    if not (message.thinking or message.tool_calls):
        return ReplyRecord()
    calls = [
        {"name": call.name, "arguments": to_journal_data(call.arguments)} | ({"form": call.form} if call.form else {})
        for call in message.tool_calls
    ]
    return ReplyRecord(message.thinking, message.content, tuple(calls))


def completion_from_entry(entry: TurnEntry) -> Completion:
    """Return the completion that an entry recorded.

    Raises:
        EntriesError: its tokens are damaged, or the finish reason is unknown.
    """
    finish_reason = find_finish_reason(entry.finish_reason)
    if finish_reason is None:
        raise EntriesError(f"{entry.name}: unknown finish_reason {entry.finish_reason[:100]!r}")
    return Completion.of(entry.sampled(), finish_reason, entry.cached_tokens)


def ended_by_text(completion: Completion, text: str, stops: Sequence[str]) -> Completion:
    """Return a completion as an environment sees it: a text at which its client wanted to stop ends it like a stop
    token, although no stop token follows it."""
    return msgspec.structs.replace(completion, finish_reason="stop") if any(s in text for s in stops) else completion


FIRST_SECONDS = 0.2
"""Seconds that a call runs before its tokens are written to disk: most turns end earlier, and write none."""

_NO_PIECES: list[Completion] = []
"""Shared empty list of turns in their first call; never added to."""
_NONE_RECORDED: dict[str, list[JournalEntry]] = {}


class EpisodePartialTurns:
    """The partials of one attempt.

    Args:
        log: log that stores them.
        episode_id: the episode's id.
        attempt: the attempt's number.
        clock: times `FIRST_SECONDS`.
        kept: whether to write them at all: evaluations are never resumed.
        resumed: whether an earlier process may have left partials.
    """

    __slots__ = ("_attempt", "_episode_id", "_kept", "_log", "_on_disk", "_recorded", "clock")

    def __init__(self, log: TurnLog, episode_id: str, attempt: int, *, clock: Clock, kept: bool, resumed: bool) -> None:
        self._log = log
        self._episode_id = episode_id
        self._attempt = attempt
        self.clock = clock
        self._kept = kept
        call_id = operator.attrgetter("call_id")
        entries = sorted(log.read_partials(episode_id, attempt) if resumed else (), key=call_id)
        self._recorded = {key: list(group) for key, group in groupby(entries, call_id)} or _NONE_RECORDED
        self._on_disk = tuple(self._recorded)

    def turn(self, call: JournaledCall, *, masked: bool) -> PartialTurn:
        """Make a turn to be sampled, with the tokens that an earlier process sampled.

        Args:
            call: the turn's call; partials of another question are ignored.
            masked: whether the tokens have kept sets; those read from disk have none.
        """
        turn = PartialTurn(self, call, masked=masked)
        entries = self._recorded.pop(call.call_id, None)
        if entries is not None:
            turn.recall(_contiguous(entries, call.request_hash))
        return turn

    def append(self, call: JournaledCall, start: int, tokens: Tokens) -> None:
        """Write tokens of a call to disk with the next group commit."""
        if not self._kept:
            return
        recorded = tokens.with_column("kept", None).with_column("experts", None)
        body = encode_partial_turn(PartialTurnTokens(start, recorded.encode()))
        if call.call_id not in self._on_disk:
            self._on_disk = (*self._on_disk, call.call_id)
        self._log.append_partial(JournalEntry(self._episode_id, self._attempt, call.call_id, call.request_hash, body))

    def turn_recorded(self, call: JournaledCall) -> None:
        """Remove the partials of a turn whose journal entry is written."""
        if call.call_id in self._on_disk:
            self._on_disk = tuple(call_id for call_id in self._on_disk if call_id != call.call_id)
            self._log.remove_partials(self._episode_id, self._attempt, call.call_id)

    def forget(self) -> None:
        """Remove the partials of cancelled turns after the attempt has ended."""
        for call_id in sorted(self._on_disk):
            self._log.remove_partials(self._episode_id, self._attempt, call_id)
        self._on_disk = ()

    async def flush(self) -> None:
        """Wait until all appended partials are on disk."""
        if self._kept:
            await self._log.flush()


class PartialTurn:
    """One turn in progress: the tokens of interrupted calls, and the deltas of the running call."""

    __slots__ = (
        "_call",
        "_delivered_pieces",
        "_has_mask",
        "_partials",
        "_since",
        "_unwritten",
        "_written",
        "pieces",
        "sampled",
    )

    def __init__(self, partials: EpisodePartialTurns, call: JournaledCall, *, masked: bool) -> None:
        self.pieces: list[Completion] = _NO_PIECES
        self.sampled = 0
        """Number of tokens in `pieces`."""
        self._partials = partials
        self._call = call
        self._has_mask = masked
        self._delivered_pieces: list[Tokens] | None = None
        """Deltas of the running call; None before the first, since most turns of fast engines have none."""
        self._unwritten: list[Tokens] | None = None
        self._written = 0
        self._since = partials.clock.monotonic()

    def recall(self, pieces: Sequence[Completion]) -> None:
        """Begin with the pieces read from disk."""
        for piece in pieces:
            self._add(piece.lost(masked=self._has_mask))
        self._written = self.sampled

    def on_delta(self, request_id: str, tokens: Tokens) -> None:
        """Receive new tokens of the running call; see `core.ports.NewTokensCallback`."""
        self._delivered_pieces = self._delivered_pieces or []
        self._unwritten = self._unwritten or []
        self._delivered_pieces.append(tokens)
        self._unwritten.append(tokens)
        if self._partials.clock.monotonic() - self._since >= FIRST_SECONDS:
            self._write()

    def call_returned(self, completion: Completion) -> None:
        """Add the completion of the running call; if the call was cut, write tokens that are not on disk at once."""
        self._add(completion)
        if completion.finish_reason == "abort":
            num_delivered = sum(map(len, self._delivered_pieces or ()))
            self._delivered_pieces = None
            if len(completion) > num_delivered:
                self._unwritten = [*(self._unwritten or ()), completion.slice(num_delivered, len(completion))]
            self._write()

    def lost(self) -> bool:
        """Keep the deltas of a running call that will never return; returns whether there were any."""
        pieces, self._delivered_pieces = self._delivered_pieces, None
        self._write()
        if pieces:
            self._add(Completion.of(Tokens.join(pieces).lost(masked=self._has_mask), "abort"))
        return bool(pieces)

    def finish_reason(self, sampling: SamplingParams) -> FinishReason | None:
        """Return the finish reason if the turn has ended, else None."""
        if not self.pieces:
            return None
        last = self.pieces[-1]
        if last.finish_reason != "abort":
            return last.finish_reason
        newest = self.pieces[self._newest()]
        if len(newest) and int(newest.token_ids[-1]) in sampling.stop_token_ids:
            return "stop"
        return "length" if self.sampled >= sampling.max_tokens else None

    def completion(self, sampling: SamplingParams, *, routed: bool) -> Completion | None:
        """Return the turn as one completion if it has ended, else None; with `routed`, only if all tokens have their
        routing."""
        reason = self.finish_reason(sampling)
        return None if reason is None or (routed and self.give_back_last()) else self.whole(reason)

    def whole(self, finish_reason: FinishReason) -> Completion:
        """Return the turn as one completion."""
        if len(self.pieces) == 1 and self.pieces[0].finish_reason == finish_reason:
            return self.pieces[0]
        return Completion.of(Tokens.join(self.pieces), finish_reason, self.pieces[0].cached_tokens)

    def give_back_last(self) -> bool:
        """Drop the last token of an ended turn, to be sampled again, if no call ended with it: only a call that returns
        has the expert routing of the earlier tokens. Returns whether a token was dropped."""
        index = self._newest()
        newest = self.pieces[index]
        if newest.finish_reason != "abort" or newest.experts is not None:
            return False
        self.pieces[index] = Completion.of(newest.slice(0, len(newest) - 1), "abort", newest.cached_tokens)
        self.sampled -= 1
        self._written -= 1
        return True

    def _newest(self) -> int:
        """Return the index of the last piece with tokens; of the first, if none has."""
        return max((at for at, piece in enumerate(self.pieces) if len(piece)), default=0)

    def _add(self, piece: Completion) -> None:
        self.pieces = [*self.pieces, piece]
        self.sampled += len(piece)

    def _write(self) -> None:
        if self._unwritten:
            tokens = Tokens.join(self._unwritten)
            self._partials.append(self._call, self._written, tokens)
            self._written += len(tokens)
            self._unwritten = None


def _contiguous(entries: Iterable[JournalEntry], digest: bytes) -> list[Completion]:
    """Return the partials read from disk, up to the first that is damaged, leaves a gap or has another question."""
    pieces: list[Completion] = []
    end = 0
    for entry in entries:
        try:
            partial = decode_partial_turn(entry.body)
            piece = Completion.of(partial.tokens.decode(), "abort")
        except (msgspec.MsgspecError, ValueError):
            break
        if entry.request_hash != digest or partial.start != end:
            break
        pieces.append(piece)
        end += len(piece)
    return pieces
