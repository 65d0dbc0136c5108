"""Entry kinds: all calls of an episode that re-execution must find again; and the checksums that prove them complete.

An entry lives under (episode, attempt, call id); the call id belongs to a strand (`core.ids`), so no order
across strands is needed. `asked` is a hash of the new question: on replay, a different hash is a mismatch. Bodies are
msgspec structs encoded as tagged msgpack arrays; token columns inside them are little-endian bytes.

A `PartialTurnTokens` holds the tokens that a turn has sampled so far, so that another process can resume the turn after
a crash. Partials have a separate table in each partition: no commit counts them, no digest covers them, and they are
removed when their turn has its entry. A missing or damaged partial, or one of another question, is not an error: the
turn resumes before it, and its tokens are sampled again, as after any crash.

Checksums detect torn and corrupted bytes, not an attacker, who can recompute them. An entry's checksum covers its key
as well as its content, so that a valid entry under another episode, attempt or call id is an error too.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from agentrl.core.errors import EntriesError
from agentrl.core.records import REWARD, ForkPoint, StopReason
from agentrl.core.tokens import EncodedTokens, RoutingReference, Tokens, decode_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentrl.core.records import EpisodeHeader, GroupScores, Message

Key = TypeVar("Key", int, str)

FORMAT = 4
"""Journal format. Another value is refused by name."""
LAST_READERS = {"1": "commit 70fcf8e3", "2": "commit 9a6749a5", "3": "commit d59b0c92"}
"""Last version of agentrl that reads each earlier format."""

REQUEST_VERSION = 1
"""Version of the fields that `JournalEntry.request_hash` covers. An unfinished episode of another version starts over,
because its calls cannot be compared. 1: a request names the agent that acts, and the turn of a reward."""


class TurnPause(msgspec.Struct, frozen=True, array_like=True):
    """A pause of a turn: its call was cut and a later call continued from its tokens, or the turn could not begin."""

    start: int
    """Length of the old context in tokens."""
    seconds: float
    why: str
    """Cause of the pause: `parked`, `engine_lost`, or `no_room` in the engine's memory."""


class SeatSettings(msgspec.Struct, frozen=True, array_like=True):
    """The sampling settings and limits of a seat, fixed from the episode's first turn to its last."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    max_turns: int
    max_context: int


class BeginEntry(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The episode's spec and settings; always the entry at call id `begin`."""

    environment: str
    code_hash: str
    task_id: str
    task: dict[str, Any]
    seed: int
    seats: dict[str, str]
    purpose: str
    group_id: str
    group_size: int
    parent_id: str | None
    fork: ForkPoint | None = None
    """Location of the recorded prefix, if the episode is a fork."""
    own_random: bool = False
    """Whether the episode's code has its own global random generators."""
    settings: dict[str, SeatSettings] = {}
    """Policy settings, keyed by seat; the key "" holds those of seats not named, and of `ctx.limits`. Empty if an older
    version wrote the entry."""
    recalls_from: int = 0
    """First attempt whose replies an external agent may get again; earlier ones ended in an error."""
    request_version: int = 0
    """`REQUEST_VERSION` of the code that recorded the attempt."""


class ExternalRequestParameters(msgspec.Struct, frozen=True, array_like=True):
    """The parts of an external agent's request besides its messages.

    An attempt whose request differs from the recorded one ends the replay and names the difference.
    """

    max_tokens: int
    """Maximum number of tokens in the reply, after the run's own limit."""
    stop: tuple[str, ...]
    """Texts that end the reply."""
    tools: str | None = None
    """Tools as JSON text; None: those of the row's first turn."""
    asked: dict[str, float | str | bool] = {}
    """Further fields that the request set: sampling parameters, `tool_choice`, `response_format`, `logprobs`."""
    ignored: tuple[str, ...] = ()
    """Names of fields that had no effect."""


class ReplyRecord(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a reply, as the run read them with its format and tools. All are empty if the reply has no thinking
    and no calls, so that the whole `text` is its content."""

    thinking: str = ""
    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    """`name` and `arguments` of each call; malformed arguments are text. A complete call in a form that the run does
    not read also has its `form`."""


class TurnEntry(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """One engine call of an agent: the context tokens that were new, and the reply.

    A row's tokens are, over its turns in order, `context_ids + token_ids`; `row` grows when the context was rewritten.
    """

    seat: str
    index: int
    policy: str
    row: int
    turn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """Number of the agent's turn over all its rows, from 0."""
    context_ids: bytes  # <i4, new context tokens before the sampled ones
    tokens: EncodedTokens
    """The reply. If a past version of another policy held the seat, its versions are of that policy. See `routing`."""
    finish_reason: str
    text: str
    messages: tuple[dict[str, Any], ...]
    """New messages of `context_ids`, for readers."""
    temperature: float
    seconds: float
    started: float
    """Wall-clock time at the start, seconds since the epoch; a label."""
    drift: str | None = None
    """Cause of a difference between the sampled tokens and the template's tokenisation of their text; None if there is
    none."""
    cached_tokens: int = 0
    parent_context: int = 0
    """Length of the row before this turn's `context_ids`."""
    pauses: tuple[TurnPause, ...] = ()
    """Waits in this process; those in an earlier process that died are unknown."""
    request: ExternalRequestParameters | None = None
    """Request of an external agent; None: `run()` asked for the turn."""
    state: str | None = None
    """State of the environment before the turn, if the program said it; see `Agent.act`."""
    routing: RoutingReference | None = None
    """The turn's expert routing, if it is stored beside the journal and not in `tokens`."""
    reply: ReplyRecord | None = None
    """What the run read in `text`; None if an older version wrote the entry."""

    @property
    def name(self) -> str:
        """The turn, for messages."""
        return f"turn {self.turn} of {self.seat}[{self.index}]"

    def context(self, *, plain: bool = False) -> Tokens:
        """Decode the new context tokens; see `EncodedTokens.decode`.

        Raises:
            EntriesError: they are damaged.
        """
        try:
            return Tokens.context(decode_token_ids(self.context_ids, plain=plain))
        except ValueError as error:
            raise EntriesError(f"{self.name}: its context cannot be read ({error})") from error

    def sampled(self, *, plain: bool = False) -> Tokens:
        """Decode the sampled tokens; see `EncodedTokens.decode`.

        Raises:
            EntriesError: they are damaged.
        """
        try:
            return self.tokens.decode(plain=plain)
        except ValueError as error:
            raise EntriesError(f"{self.name}: its tokens cannot be read ({error})") from error


class ToolEntry(msgspec.Struct, frozen=True, array_like=True, tag="tool"):
    """A tool call and its observation; re-run and compared on replay unless `external`."""

    name: str
    arguments: Any
    observation: str
    outcome: str
    """Outcome of the call: `ok`, `error`, `timeout`, `bad_arguments`, `unknown_tool`."""
    external: bool
    seconds: float
    location: str = ""
    """File, line and function that raised, for developers; the policy does not see it."""

    @property
    def error(self) -> str:
        """The observation of a call whose outcome is not `ok`, without the word that marks it for the policy."""
        return self.observation.removeprefix("error: ")


class EffectEntry(msgspec.Struct, frozen=True, array_like=True, tag="effect"):
    """An effect on the outside world: recalled on re-execution, never repeated."""

    name: str
    guarantee: str
    """Guarantee of the effect: `read`, `idempotent` or `once`."""
    value: Any
    error: str | None
    """Error of the effect, as `Type: message`."""
    seconds: float


class EffectIntentEntry(msgspec.Struct, frozen=True, array_like=True, tag="intent"):
    """A record that a `once` effect is about to be performed, on disk before it is. Its call id is the effect's,
    followed by `!`."""

    name: str
    may_repeat: bool = False
    """Whether a further attempt may begin: it asks what happened, or is the call of an MCP server."""


class ResourceCallEntry(msgspec.Struct, frozen=True, array_like=True, tag="resource"):
    """A call on a stateful object of the episode; `level` names how re-execution restores the object."""

    resource: str
    level: str
    """Level of the resource: `replay`, `snapshot` or `pinned`."""
    method: str
    value: Any
    seconds: float
    arguments: Any = None
    error: str | None = None
    """Error of the call, as `Type: message`."""
    state: Any = None
    """State of a `snapshot` resource after the call; None if the call did not change it."""


class SpawnEntry(msgspec.Struct, frozen=True, array_like=True, tag="spawn"):
    """Child episodes started by one call."""

    environment: str
    group_id: str
    children: tuple[str, ...]


class ChildResultEntry(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """The result of waiting for one child."""

    child: str
    drop_reason: str | None
    rewards: dict[str, float]
    versions: dict[str, tuple[int, int]] = {}
    """Lineage and step of the oldest weights that sampled a token of the child, keyed by policy."""


class NondeterministicValueEntry(msgspec.Struct, frozen=True, array_like=True, tag="value"):
    """A value drawn from outside: `now`, the end of a `sleep`, the order in which strands returned (`gather`), or a
    `patch`, whose call id is its strand, `@` and its id."""

    kind: str
    value: Any


class RewardEntry(msgspec.Struct, frozen=True, array_like=True, tag="reward"):
    """A reward of an agent, for the episode or for one turn; `weighted` is the value that counts."""

    seat: str
    index: int
    value: float
    turn: int | None
    name: str = REWARD
    weight: float = 1.0
    """Weight of the reward's name when the reward was given."""

    @property
    def weighted(self) -> float:
        """Contribution of this reward to the agent's reward."""
        return self.value * self.weight


class ScoreEntry(RewardEntry, frozen=True, array_like=True, tag="score"):
    """A reward that a scorer gave. Its call id is the score's (`ids.score_call_id`), on no strand and in no order: it
    is written when it arrives. `name` is the scorer's. A score that is not credited is a `NondeterministicValueEntry`
    under such an id."""

    seconds: float = 0.0
    """Time from the request to the arrival of the score."""
    note: str = ""
    """Explanation for readers."""
    difference_of: float | None = None
    """The score, where `value` is its difference to the agent's score before it; None: `value` is the score."""

    @property
    def score(self) -> float:
        """The scorer's answer."""
        return self.value if self.difference_of is None else self.difference_of


class BranchEntry(msgspec.Struct, frozen=True, array_like=True, tag="branch"):
    """A call of `ctx.branch`."""

    children: tuple[str, ...]
    """Ids of the branches that it started; empty where nothing is trained."""
    number: int = 0
    """Result of the call. 0 on disk; a branch recalls the entry of its main episode with its own number."""


class UnansweredEntry(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The end of a call without a value: cancelled by its program, or refused by a limit."""

    stop_reason: StopReason | Literal[""] = ""
    """Reason of the `LimitReachedError` that it raised; `time_limit` if the time limit cut it; empty: cancelled."""
    message: str = ""
    """Message of that error."""
    suspensions: int = 0
    """For code that runs again on re-execution: the number of its own suspension at which it was cancelled or cut; 0: a
    call that it made."""
    state: Any = None
    """State that the call left of a `snapshot` resource; None if it did not change it."""
    timer: int = -1
    """Number of the `asyncio.timeout` that cancelled it, among those around the call, from the outermost; -1: none."""


class PartialTurnTokens(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of a turn in progress: the body of a row of `partials`."""

    start: int
    """Index of the first of these tokens in the turn."""
    tokens: EncodedTokens
    """The tokens, without kept sets and experts."""


EntryBody = (
    BeginEntry
    | TurnEntry
    | ToolEntry
    | EffectEntry
    | EffectIntentEntry
    | ResourceCallEntry
    | SpawnEntry
    | ChildResultEntry
    | NondeterministicValueEntry
    | RewardEntry
    | ScoreEntry
    | BranchEntry
    | UnansweredEntry
)


class JournalEntry(msgspec.Struct, frozen=True):
    """An entry as the store holds it."""

    episode_id: str
    attempt: int
    call_id: str
    request_hash: bytes
    """Hash of the new request, 8 bytes of BLAKE2b; empty if the call has none. Column `asked` on disk."""
    body: bytes
    """Encoded body: `encode_body` of one of the kinds."""

    def decode(self) -> EntryBody:
        """Decode the body to a struct.

        Raises:
            msgspec.DecodeError: the bytes are not an entry body of this format.
        """
        return _DECODER.decode(self.body)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[EntryBody] = msgspec.msgpack.Decoder(EntryBody)
_PARTIAL = msgspec.msgpack.Decoder(PartialTurnTokens)


encode_body: Callable[[EntryBody], bytes] = _ENCODER.encode
"""Encodes an entry body."""


def decode_entries(entries: Iterable[JournalEntry]) -> list[EntryBody]:
    """Decode the bodies of entries, in order.

    Raises:
        EntriesError: a body does not have this format; the message names the episode and the call.
    """
    bodies = []
    for entry in entries:
        try:
            bodies.append(entry.decode())
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise EntriesError(
                f"episode {entry.episode_id}, call {entry.call_id}: not an entry of this journal format ({error})"
            ) from error
    return bodies


encode_partial_turn: Callable[[PartialTurnTokens], bytes] = _ENCODER.encode
"""Encodes a partial."""
decode_partial_turn: Callable[[bytes], PartialTurnTokens] = _PARTIAL.decode
"""Decodes a partial. Raises `msgspec.MsgspecError` if the bytes do not have this format."""


def sum_by_key(values: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Sum values by their keys, in order of keys; correctly rounded, so that the order of the values does not
    matter: that in which scores arrive may differ between executions."""
    parts: dict[Key, list[float]] = {}
    for key, value in values:
        parts.setdefault(key, []).append(value)
    return {key: math.fsum(parts[key]) for key in sorted(parts)}


def add_group_scores(header: EpisodeHeader, scores: Sequence[GroupScores]) -> EpisodeHeader:
    """Return a header whose rewards include the scores of its group. Sums are correctly rounded."""
    by_agent: dict[tuple[str, int], list[tuple[str, float, float]]] = {}
    for group in scores:
        for member in group.scores:
            if member.episode_id == header.episode_id and member.value is not None and group.weight is not None:
                agent_scores = by_agent.setdefault((member.seat, member.agent), [])
                agent_scores.append((group.scorer, member.value, group.weight))
    if not by_agent:
        return header
    trajectories = []
    for agent in header.trajectories:
        agent_scores = by_agent.get((agent.seat, agent.index), [])
        if agent_scores:
            before = [] if agent.reward is None else [agent.reward]
            named = agent.named_rewards or [(REWARD, reward) for reward in before]
            agent = replace(
                agent,
                reward=math.fsum([*before, *(value * weight for _, value, weight in agent_scores)]),
                named_rewards=tuple(sum_by_key([*named, *((name, value) for name, value, _ in agent_scores)]).items()),
            )
        trajectories.append(agent)
    return replace(header, trajectories=tuple(trajectories))


# --- hashes and checksums ---------------------------------------------------------------------------------------------


def framed(*parts: bytes) -> bytes:
    """Join parts, each behind its length."""
    data = b""
    for part in parts:
        data += len(part).to_bytes(4, "little") + part
    return data


def request_hash(*parts: bytes, opening: bytes = b"") -> bytes:
    """Hash a new question: 8 bytes of blake2b. `opening`: parts that come first, as `framed` joins them."""
    return hashlib.blake2b(opening + framed(*parts), digest_size=8).digest()


def gigpo_state_hash(state: str | None, messages: Iterable[Message]) -> bytes:
    """Hash the anchor state of a turn, in `STATE_BYTES`: the state that the program reported, else the role and content
    of the turn's new messages. System messages are left out, because only the first turn has them.
    """
    if state is not None:
        return request_hash(state.encode())
    text_parts = [part for message in messages if message.role != "system" for part in (message.role, message.content)]
    return request_hash(*[part.encode("utf-8", "replace") for part in text_parts])


def entry_checksum(episode_id: str, attempt: int, call_id: str, request_digest: bytes, body: bytes) -> int:
    """Compute the CRC-32 over an entry's key, its `asked` hash and its body."""
    key = f"{episode_id}\x1f{attempt}\x1f{call_id}\x1f{len(request_digest)}".encode()
    return zlib.crc32(body, zlib.crc32(request_digest, zlib.crc32(key)))


def code_digest(source: str) -> str:
    """Compute 8 bytes of blake2b over source code, in hexadecimal."""
    return hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=8).hexdigest()


def extend_digest(digest: bytes, entry: JournalEntry) -> bytes:
    """Compute the digest of an attempt's entries up to `entry`, 16 bytes of blake2b.

    Each entry is hashed behind the digest of those before it, since every episode in flight keeps one: a running hash
    would take 448 bytes.

    Args:
        digest: of the entries before; empty before the first.
        entry: the next one.
    """
    return hashlib.blake2b(digest + entry.call_id.encode() + entry.body, digest_size=16).digest()


def episode_digest(entries: Iterable[JournalEntry]) -> bytes:
    """Compute the digest of all entries of an attempt in their order, which its commit names."""
    return functools.reduce(extend_digest, entries, b"")
