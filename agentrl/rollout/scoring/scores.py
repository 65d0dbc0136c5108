"""Scores that scorers give while an episode runs.

A score is a named reward that someone other than `run()` gives. It is asked for when its turn is recorded, or by
`ctx.score`, and journaled when it arrives, outside the replay order. The program does not wait for it. The episode
does, at its end, without an engine session; then its agents are credited.

Invariants:
1. A failed scorer gives no reward: it drops the episode, even if the program catches the error.
2. A recorded score stands, whatever the scorer says now. Only the scores in flight at a kill are asked for again.
3. The program sees a score only through a numbered call, so that the moment of its arrival changes nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.core import ids
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.futures import retrieve_exception
from agentrl.core.records import Scored, ScoreRequest
from agentrl.environment.context import Verdict
from agentrl.journal.entries import NondeterministicValueEntry, ScoreEntry, request_hash
from agentrl.observe.metrics import SCORES_EXPOSED

if TYPE_CHECKING:
    from agentrl.core.ports import Scorer
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.turn.recorder import TurnRecorder


class LiveScores:
    """The scores of one attempt."""

    __slots__ = ("_chains", "_entries_by_call", "_episode", "_running")

    def __init__(self, episode: LiveEpisode) -> None:
        self._episode = episode
        entries = episode.journal.recorded_scores()
        self._entries_by_call = {entry.call_id: entry.decode() for entry in entries}
        """Scores in the journal, keyed by call id."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """Requests in flight, keyed by call id."""
        self._chains: dict[tuple[str, int, str], list[str]] = {}
        """Call ids of an agent's scores of one scorer, in the order of the turns, where differences are credited."""

    def start_per_turn(self, agent: TurnRecorder) -> None:
        """Ask for the scores of an agent's newest turn."""
        settings = self._episode.services.settings
        if agent.policy in settings.scored:
            for scorer in settings.scorers.values():
                if scorer.per == "turn":
                    self.start(scorer, agent, len(agent.turns) - 1)

    def start(self, scorer: Scorer, agent: TurnRecorder, turn: int | None) -> str:
        """Ask for a score, unless it was asked for before or is in the journal; returns its call id."""
        call_id = ids.score_call_id(agent.seat, agent.index, turn, scorer.name)
        before: list[str] = []
        if scorer.credit == "difference":
            chain = self._chains.setdefault((agent.seat, agent.index, scorer.name), [])
            if call_id not in chain:
                chain.append(call_id)
            before = chain[: chain.index(call_id)]
        if call_id not in self._entries_by_call and call_id not in self._running:
            number = len(agent.turns) - 1 if turn is None else turn
            conversation = Scored(
                task=self._episode.spec.task,
                seat=agent.seat,
                turn=agent.turns[number],
                number=number,
                messages=tuple(agent.conversation),
            )
            spec = self._episode.spec
            request = ScoreRequest(
                call_id=call_id,
                where=f"episode {self._episode.name}, score {call_id}",
                seed=ids.stable_hash64(spec.seed, spec.attempt, call_id),
                scored=conversation,
            )
            weight = 0.0 if scorer.credit == "note" else agent.weight_of(scorer.name, request.where)
            entry = ScoreEntry(agent.seat, agent.index, 0.0, turn, scorer.name, weight)
            score_call = self._ask(scorer, request, entry, before)
            task = asyncio.get_running_loop().create_task(score_call, name=request.where)
            task.add_done_callback(retrieve_exception)  # the episode may end before it awaits the score
            self._running[call_id] = task
        return call_id

    def ask(self, scorer: str, agent: TurnRecorder) -> Verdict:
        """Ask a scorer for the score of an agent's newest turn.

        Raises:
            EnvironmentDefinitionError: there is none of that name, or it scores whole episodes.
        """
        settings = self._episode.services.settings
        scorer_settings = settings.scorers.get(scorer)
        if scorer_settings is None and settings.missing_scorer is not None:
            scorer_settings = settings.missing_scorer(scorer)
        if scorer_settings is None:
            names = ", ".join(settings.scorers) or "none"
            raise EnvironmentDefinitionError(f"ctx.score({scorer!r}): the run has no such scorer; there are: {names}")
        if scorer_settings.per in ("episode", "group"):
            raise EnvironmentDefinitionError(
                f"ctx.score({scorer!r}): it scores whole conversations when they end; set scorers.{scorer}.per to "
                "'turn' or 'request'"
            )
        return LiveVerdict(self, self.start(scorer_settings, agent, len(agent.turns) - 1))

    async def value(self, call_id: str, *, wait: bool) -> float | None:
        """Return a score to the program, through the journal; without `wait`, None if it has not arrived."""
        description = f"the {'wait for' if wait else 'look at'} the score {call_id}"

        async def look(call: JournaledCall) -> NondeterministicValueEntry:
            running = self._running.get(call_id)
            if running is not None and (wait or running.done()):
                with self._episode.waiting_for("scorer"):
                    await asyncio.shield(running)
            return NondeterministicValueEntry("score", self._score(call_id))

        entry = await self._episode.journal.call(
            request_hash(b"score", call_id.encode(), bytes([wait])),
            lambda: description,
            NondeterministicValueEntry,
            look,
            limit=self._episode.limit,
        )
        return None if entry.value is None else float(entry.value)

    async def arrived(self) -> None:
        """Wait for the requests in flight.

        Raises:
            EpisodeError: a scorer failed.
        """
        if self._running:
            with self._episode.waiting_for("scorer"):
                done_tasks, _ = await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done_tasks:
                task.result()

    async def settle(self) -> None:
        """Wait for all scores without an engine session, and credit the agents with them.

        Raises:
            EpisodeError: a scorer failed.
        """
        episode, start_s = self._episode, self._episode.services.clock.monotonic()
        settings = episode.services.settings
        agents: Mapping[tuple[str, int], Any] = {(agent.seat, agent.index): agent for agent in episode.agents}
        for agent in agents.values():
            if agent.turns and agent.policy in settings.scored and not agent.is_void:
                for scorer in settings.scorers.values():
                    if scorer.per == "episode":
                        self.start(scorer, agent, None)
        for agent in agents.values():
            agent.close()
        if self._running:
            await self.arrived()
            episode.metric(SCORES_EXPOSED, episode.services.clock.monotonic() - start_s)
        for _, entry in sorted(self._entries_by_call.items()):
            if isinstance(entry, ScoreEntry):
                agent = agents[entry.seat, entry.index]
                agent.rewards = (*agent.rewards, entry)

    async def _newest(self, call_ids: Sequence[str]) -> float:
        """Wait for earlier scores, the newest first, until one says something, and return it; 0 if there is none."""
        for call_id in reversed(call_ids):
            if call_id not in self._entries_by_call:
                await asyncio.shield(self._running[call_id])
            if (score := self._score(call_id)) is not None:
                return score
        return 0.0

    def _score(self, call_id: str) -> float | None:
        """Return a scorer's answer; None if it said nothing, or has not arrived."""
        match self._entries_by_call.get(call_id):
            case ScoreEntry() as entry:
                return entry.score
            case NondeterministicValueEntry(value=float() as value):
                return value
        return None

    def close(self) -> None:
        """Give up the requests in flight. Idempotent."""
        for task in self._running.values():
            task.cancel()

    async def _ask(self, scorer: Scorer, request: ScoreRequest, entry: ScoreEntry, before: Sequence[str]) -> None:
        clock = self._episode.services.clock
        start_s = clock.monotonic()
        score = await scorer.score(request)
        body: ScoreEntry | NondeterministicValueEntry = NondeterministicValueEntry("score", score.value)
        if score.value is not None and scorer.credit != "note":
            seconds = clock.monotonic() - start_s
            value, difference_of = score.value, None
            if scorer.credit == "difference":
                value, difference_of = value - await self._newest(before), value
            body = ScoreEntry(
                *(entry.seat, entry.index, value, entry.turn, entry.name, entry.weight),
                seconds=seconds,
                note=score.note,
                difference_of=difference_of,
            )
        self._entries_by_call[request.call_id] = body
        self._episode.journal.record_score(request.call_id, body)


class LiveVerdict(Verdict):
    """The handle of a score that `run()` asked for."""

    __slots__ = ("_call_id", "_scores")

    def __init__(self, scores: LiveScores, call_id: str) -> None:
        self._scores = scores
        self._call_id = call_id

    def __await__(self) -> Any:
        return self._scores.value(self._call_id, wait=True).__await__()

    async def peek(self) -> float | None:
        return await self._scores.value(self._call_id, wait=False)
