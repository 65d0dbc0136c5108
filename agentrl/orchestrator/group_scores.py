"""Scores of whole groups: a scorer sees all members together, once the last one has ended (RULER, arXiv:2509.02479).

The ended members of a group are held until the group is complete. Then each scorer of groups is asked once per policy
and seat, with the members' conversations from the journal. The scores are journaled, and only then do the members
enter the buffer, with rewards that include them. Until then they count as in flight.

Invariants:
1. No member is credited before the scores of its group are recorded. After a kill, recorded scores are used again, and
   missing ones are asked for again.
2. A failed scorer gives no reward: all members are dropped as `scorer_failed`.

"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import RUN_ENDED, SCORER_FAILED, VERSION_GONE, EpisodeError
from agentrl.core.records import (
    EpisodeHeader,
    EpisodeSpec,
    GroupScores,
    MemberScore,
    Scored,
    ScoreRequest,
    ToolSpec,
    Turn,
    dropped_header,
)
from agentrl.journal.entries import TurnEntry, add_group_scores
from agentrl.journal.port import UnitDropped
from agentrl.observe.bottleneck import ActivityClock
from agentrl.rollout.turn_entries import completion_from_entry, decode_message, ended_by_text

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Scorer
    from agentrl.core.records import Message
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.past_run import PastRun
    from agentrl.journal.run_log import RunJournal

RecordEnd = Callable[[EpisodeSpec, EpisodeHeader], None]
"""Receives the end of a member, with its final header."""


_DROPS_OF_GROUPS = (SCORER_FAILED, VERSION_GONE, RUN_ENDED)
"""Drop reasons of whole groups that wait for scores."""


class HeldEnd(NamedTuple):
    """A member that ended and waits for the scores of its group."""

    spec: EpisodeSpec
    header: EpisodeHeader
    record: RecordEnd


@dataclass(slots=True, kw_only=True, eq=False)
class GroupScoring:
    """Holds the ended members of groups until their scores are on disk."""

    scorers: Mapping[str, Scorer]
    """Scorers of groups, keyed by name."""
    scored: Collection[str]
    """Policies whose conversations are scored."""
    chat_format_of: Callable[[str], ChatFormat]
    """Chat format of a policy."""
    store: RunJournal
    weights: Mapping[str, float]
    """Weight of each named reward; if empty, each weighs 1."""
    run_seed: int
    clock: Clock
    fail: Callable[[BaseException], None]
    """Callback that ends the run."""
    on_release: Callable[[], None]
    """Callback after the members of a group have been recorded."""
    activity: ActivityClock
    """Counts the members that wait for the scores of their group as episodes in flight."""
    known: dict[str, list[GroupScores]] = field(default_factory=dict)
    """Scores on disk, keyed by group."""
    last_failure: str = ""
    """Detail of the last failed scorer, for people."""
    _held: dict[str, list[HeldEnd]] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)
    """Held groups whose members have all ended."""
    past: PastRun | None = None
    """What the journal knows of scores, while the records of earlier processes are applied."""
    _closed: bool = False
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Requests in progress, keyed by group."""

    def waiting(self) -> Iterator[str]:
        """Yield the ids of the episodes that wait for scores."""
        for held in self._held.values():
            for end in held:
                yield end.spec.episode_id

    def hold(self, spec: EpisodeSpec, header: EpisodeHeader, record: RecordEnd, *, running: int) -> None:
        """Hold an ended member until its group is complete and scored; then call `record`.

        Args:
            spec: the member.
            header: its header, without the group's scores.
            record: receives the member with its final header.
            running: number of members of the group that have not been recorded, this one and held ones included.
        """
        held = self._held.setdefault(spec.group_id, [])
        held.append(HeldEnd(spec, header, record))
        if len(held) == running:
            self._complete.add(spec.group_id)
            self._release_or_ask(spec.group_id)

    def _release_or_ask(self, group_id: str) -> None:
        """Release a complete group whose scores are known; else ask its scorers."""
        held, known = self._held[group_id], self.known.get(group_id, ())
        is_known = {scores.scorer for scores in known} >= self.scorers.keys()
        if self.past is not None and (recorded := self.past.num_scores[group_id]):
            is_known = len(known) == recorded  # by the scorers of that process
        elif self.past is not None and group_id not in self.past.open_groups:
            units = [(agent.policy, end.spec.episode_id) for end in held for agent in end.header.trajectories]
            is_known = not any(self.past.fates.get(unit) in _DROPS_OF_GROUPS for unit in units)
        if is_known or not any(self._roles(held).values()):
            self._release(group_id)
        elif self.past is None and group_id not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._score_counted(group_id, held))
            self._tasks[group_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(group_id, None))

    def end_past(self) -> None:
        """Ask for the scores that earlier processes of the run did not record."""
        self.past = None
        for group_id in self._complete & self._held.keys():
            self._release_or_ask(group_id)

    def apply_scores(self, scores: GroupScores) -> None:
        """Take recorded scores, and release their group with the last of them."""
        self.known.setdefault(scores.group_id, []).append(scores)
        if scores.group_id in self._complete:
            self._release_or_ask(scores.group_id)

    def apply_drop(self, episode_id: str, reason: str) -> None:
        """Drop the group of a held member, whose unit was recorded as dropped."""
        for group_id, held in list(self._held.items()):
            if any(end.spec.episode_id == episode_id for end in held):
                self._drop(group_id, reason)

    def drop_held(self, reason: str) -> None:
        """Drop all held members at the end of a run, and cancel their requests."""
        self.close()
        for group_id in list(self._held):
            self._record_drop(group_id, reason)
            if group_id in self._held:  # each of its members was dropped before
                self._drop(group_id, reason)

    def close(self) -> None:
        """Cancel the requests in progress, at the end of the run. Idempotent."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    async def _score_counted(self, group_id: str, held: Sequence[HeldEnd]) -> None:
        with self.activity.during("episodes", len(held)), self.activity.during("scorer", len(held)):
            await self._score(group_id, held)

    async def _score(self, group_id: str, held: Sequence[HeldEnd]) -> None:
        missing = self.scorers.keys() - {scores.scorer for scores in self.known.get(group_id, ())}
        try:
            await self.store.flush()  # the members' entries are read
            members = [end for end in held if end.header.committed]
            entries = await self.store.read_attempts([(end.spec, end.header.attempt) for end in members])
            roles = self._roles(held)
            conversations_of = {
                end.spec.episode_id: conversations(own, end.spec, self.scored, self.chat_format_of)
                for end, own in zip(members, entries, strict=True)
            }
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(self._ask(self.scorers[name], group_id, held, roles, conversations_of))
                    for name in sorted(missing)
                ]
            new = [task.result() for task in asking]
        except BaseExceptionGroup as errors:
            self._end_without(group_id, errors.exceptions[0])
            return
        except Exception as error:  # noqa: BLE001 - a task that ended silently would hold its group forever
            self._end_without(group_id, error)
            return
        self.store.record(*new)

    def _end_without(self, group_id: str, error: BaseException) -> None:
        """Drop a group whose scorer failed; any other error ends the run."""
        if self._closed:  # what fails because the run ends is no failure of a scorer
            return
        if isinstance(error, EpisodeError):
            self.last_failure = str(error)
            self._record_drop(group_id, error.reason)
        else:
            self.fail(error)

    async def _ask(
        self,
        scorer: Scorer,
        group_id: str,
        held: Sequence[HeldEnd],
        roles: Mapping[tuple[str, str], Sequence[tuple[str, int]]],
        conversations_of: Mapping[str, Mapping[tuple[str, int], Scored]],
    ) -> GroupScores:
        """Ask a scorer for the scores of a group, one request per policy and seat."""
        started = self.clock.monotonic()
        found: list[MemberScore] = []
        answers = []
        for (policy, seat), agents in roles.items():
            members = tuple(conversations_of[episode][seat, index] for episode, index in agents)
            call_id = f"{group_id}?{scorer.name}"
            request = ScoreRequest(
                call_id=call_id,
                where=f"group {group_id}, score of {scorer.name} for {policy} in seat {seat}",
                seed=ids.stable_hash64(self.run_seed, call_id, policy, seat),
                scored=members[0],
                group=members,
            )
            answer = await scorer.score(request)
            answers.append(answer)
            found += [
                MemberScore(episode, seat, index, value)
                for (episode, index), value in zip(agents, answer.value, strict=True)
            ]
        return GroupScores(
            group_id,
            scorer.name,
            None if scorer.credit == "note" else self.weights.get(scorer.name, 1.0),
            tuple(found),
            " || ".join(answer.note for answer in answers if answer.note),
            seconds=self.clock.monotonic() - started,
        )

    def _roles(self, held: Sequence[HeldEnd]) -> dict[tuple[str, str], list[tuple[str, int]]]:
        """Return the agents to score, as (episode, number), by policy and seat, in order of admission."""
        roles: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for end in sorted(held, key=lambda end: ids.episode_sort_key(end.spec.episode_id)):
            for agent in end.header.trajectories if end.header.committed else ():
                if agent.policy in self.scored and not end.header.drops_as_truncated(agent):
                    roles.setdefault((agent.policy, agent.seat), []).append((end.spec.episode_id, agent.index))
        return roles

    def _release(self, group_id: str) -> None:
        scores = self.known.pop(group_id, [])
        self._complete.discard(group_id)
        for end in self._held.pop(group_id):
            end.record(end.spec, add_group_scores(end.header, scores))
        self.on_release()

    def _record_drop(self, group_id: str, reason: str) -> None:
        """Record that all units of a group are dropped; those without a score would be trained otherwise."""
        units = [
            (end.spec.episode_id, end.header.attempt, policy)
            for end in self._held[group_id]
            for policy in sorted({agent.policy for agent in end.header.trajectories} & set(self.scored))
        ]
        self.store.record(
            *[UnitDropped(episode_id=name, attempt=at, policy=policy, reason=reason) for name, at, policy in units]
        )

    def _drop(self, group_id: str, reason: str) -> None:
        held = self._held.pop(group_id)
        self._complete.discard(group_id)
        self.known.pop(group_id, None)
        for end in held:
            end.record(end.spec, dropped_header(end.spec, reason) if end.header.committed else end.header)
        self.on_release()


def conversations(
    entries: Iterable[JournalEntry],
    spec: EpisodeSpec,
    scored: Collection[str],
    chat_format_of: Callable[[str], ChatFormat],
) -> dict[tuple[str, int], Scored]:
    """Return the conversation of each agent of the `scored` policies, keyed by seat and number, as scorers see it: from
    its beginning, or from the last `Agent.restart`; of an external agent, the conversation of its last request. Other
    policies' turns may hold refusals of an endpoint, which have no message.

    Raises:
        JournalError: an entry is damaged.
    """
    turns = [body for entry in entries if isinstance(body := entry.decode(), TurnEntry) and body.policy in scored]
    rows: dict[tuple[str, int], dict[int, _Row]] = {}
    newest: dict[tuple[str, int], _Row] = {}
    found: dict[tuple[str, int], Scored] = {}
    for entry in sorted(turns, key=lambda turn: (turn.seat, turn.index, turn.turn)):
        completion = completion_from_entry(entry)
        chat_format = chat_format_of(entry.policy)
        reads_calls = entry.reply is None or bool(entry.reply.calls)
        context = entry.context().token_ids.tolist()
        reply = chat_format.parse(completion.token_ids.tolist(), context=context, reads_calls=reads_calls)
        if entry.reply is not None and entry.reply.calls and not reply.tool_calls:
            # A call without arguments counts as one if its tool is offered.
            offered = [ToolSpec(name=str(call["name"]), description="", parameters={}) for call in entry.reply.calls]
            reply = chat_format.parse(completion.token_ids.tolist(), offered, context=context)
        agent = entry.seat, entry.index
        new_messages = [*map(decode_message, entry.messages)]
        row = rows.setdefault(agent, {}).get(entry.row)
        if row is None:
            earlier: Sequence[Message] = ()
            if entry.request is not None:
                earlier = _shared_messages(entry, new_messages, rows[agent].values())
            elif agent in newest and not _restarted(entry, newest[agent].messages, chat_format):
                earlier = newest[agent].messages
            row = rows[agent][entry.row] = _Row([*earlier])
        newest[agent] = row
        row.messages += [*new_messages, reply]
        row.tokens = row.tokens[: 4 * entry.parent_context] + entry.context_ids + completion.token_ids.tobytes()
        row.ends.append((len(row.tokens), len(row.messages)))
        text = chat_format.decode(completion.token_ids.tolist())
        completion = ended_by_text(completion, text, () if entry.request is None else entry.request.stop)
        turn = Turn(text=reply.content, message=reply, completion=completion)
        found[agent] = Scored(
            task=spec.task, seat=entry.seat, turn=turn, number=entry.turn, messages=tuple(row.messages)
        )
    return found


@dataclass(slots=True)
class _Row:
    """A row of an agent's conversations."""

    messages: list[Message]
    tokens: bytes = b""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of `tokens` and number of messages up to the end of each turn."""


def _shared_messages(entry: TurnEntry, new_messages: Sequence[Message], rows: Iterable[_Row]) -> Sequence[Message]:
    """Return the messages before a turn that begins a row of an external agent: the longest known history with the same
    tokens, or none if the turn repeats it."""
    places = [
        (end, row.messages[:number])
        for row in rows
        for end, number in row.ends
        if row.tokens[:end] == entry.context_ids[:end]
    ]
    _, messages = max(places, key=lambda place: place[0], default=(0, []))
    replies = [message.content.strip() for message in messages if message.role == "assistant"]
    repeated = [message.content.strip() for message in new_messages if message.role == "assistant"]
    return () if replies == repeated[: len(replies)] else messages


def _restarted(entry: TurnEntry, conversation: Sequence[Message], chat_format: ChatFormat) -> bool:
    """Whether a turn with a new row follows `Agent.restart`, and not a template that rewrote the conversation."""
    if not chat_format.forks:
        return True
    context = chat_format.decode(entry.context().token_ids.tolist())
    return not all(message.content.strip() in context for message in conversation if message.role != "assistant")
