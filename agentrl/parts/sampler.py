"""Sampling for clients: base models and published versions in the engine, and each sample as an episode of one turn.

An engine serves as many adapters as it has slots, and one version of all weights of a base model; `VersionPlaces`
keeps those that were used last. A sample is recorded like a played episode: `agentrl episode tokens` shows it with its
version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import EngineError
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams, TokenScores
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    Task,
    TrajectoryHeader,
    WeightsRef,
)
from agentrl.core.tokens import Completion, Tokens
from agentrl.journal.entries import (
    REQUEST_VERSION,
    BeginEntry,
    JournalEntry,
    ReplyRecord,
    SeatSettings,
    TurnEntry,
    decode_entries,
    encode_body,
    episode_digest,
)
from agentrl.journal.port import Admission, ControlRecord, EpisodeEnd
from agentrl.journal.routing import move_routing
from agentrl.rollout.external.agent import cut_at_text
from agentrl.rollout.turn.sampler import call_engine
from agentrl.rollout.turn_entries import completion_from_entry

if TYPE_CHECKING:
    from agentrl.core.ports import NewTokensCallback
    from agentrl.core.records import Int32Array
    from agentrl.journal.store import SqliteJournal

SEAT = "client"
"""Seat of every recorded sample."""
UNKNOWN_PLACES = 64
"""Number of calls at once in an engine that does not say how many it samples."""


@dataclass(slots=True, eq=False)
class _Place:
    """A version that an engine serves, or will serve for calls that have their turn."""

    weights: WeightsRef
    users: int = 0
    is_loaded: bool = False


@dataclass(slots=True, eq=False)
class _Turn:
    """Calls of one version that wait for a place, and get it together."""

    weights: WeightsRef
    waiting: int = 0
    has_come: bool = False


class VersionPlaces:
    """The versions that an engine serves for clients: those used last.

    Adapters share the engine's slots. All weights of a base model have one place: a version of them is the current one
    of its policy, and replaces the previous one once that one's calls have ended. Turns come in the order of their
    first calls, and new calls of a served version wait, too, while there are any.

    Args:
        engine: the engine.
        slots: number of adapters that it serves at once.
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        self._engine = engine
        self._slots = slots
        self._places: OrderedDict[PolicyVersion, _Place] = OrderedDict()
        """By last use."""
        self._turns: dict[PolicyVersion, _Turn] = {}
        """In the order of their first calls."""
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def use(self, weights: WeightsRef) -> AsyncIterator[None]:
        """Serve a version within the context; wait if other calls use all places, or wait for one."""
        async with self._changed:
            await self._wait_for_turn(weights)
            place = self._places[weights.version]
            self._places.move_to_end(weights.version)
            try:
                if not place.is_loaded:
                    await self._load(weights)
                    place.is_loaded = True
            except BaseException:
                self._leave(place)
                raise
        try:
            yield
        finally:
            async with self._changed:
                self._leave(place)

    def is_used(self, version: PolicyVersion) -> bool:
        """Whether a call uses a version, or waits for it."""
        place = self._places.get(version)
        return version in self._turns or (place is not None and place.users > 0)

    async def _wait_for_turn(self, weights: WeightsRef) -> None:
        """Enter a call of a version once there is a place for it."""
        turn = self._turns.setdefault(weights.version, _Turn(weights))
        turn.waiting += 1
        try:
            await self._changed.wait_for(lambda: self._comes(turn))
        except BaseException:
            if turn.has_come:
                self._leave(self._places[weights.version])
            else:
                turn.waiting -= 1
                if not turn.waiting:
                    del self._turns[weights.version]
                    self._changed.notify_all()
            raise

    def _comes(self, turn: _Turn) -> bool:
        """Whether a turn has come, or comes now, with all its calls."""
        if not turn.has_come:
            first = next(other for other in self._turns.values() if _shares_places(other.weights, turn.weights))
            if first is turn and self._make_room(turn.weights):
                turn.has_come = True
                del self._turns[turn.weights.version]
                self._places.setdefault(turn.weights.version, _Place(turn.weights)).users += turn.waiting
                self._changed.notify_all()
        return turn.has_come

    def _make_room(self, weights: WeightsRef) -> bool:
        """Whether a version has a place, or gets that of the versions that were used least recently."""
        if weights.version in self._places:
            return True
        taken = [place for place in self._places.values() if _shares_places(place.weights, weights)]
        excess = max(0, len(taken) + 1 - (1 if weights.kind == "full" else self._slots))
        idle = [place for place in taken if not place.users][:excess]
        if len(idle) < excess:
            return False
        for place in idle:
            del self._places[place.weights.version]
        return True

    async def _load(self, weights: WeightsRef) -> None:
        loaded = [place.weights for place in self._places.values() if place.is_loaded]
        adapters = [other for other in loaded if other.kind == "adapter"]
        if weights.kind == "full":
            await self._engine.serve((weights,), adapters)
        else:
            await self._engine.serve((), (*adapters, weights))

    def _leave(self, place: _Place) -> None:
        place.users -= 1
        if not (place.users or place.is_loaded):
            del self._places[place.weights.version]
        self._changed.notify_all()


def _shares_places(one: WeightsRef, other: WeightsRef) -> bool:
    """Whether two versions need the same places of an engine."""
    return one.kind == other.kind and (one.kind == "adapter" or one.version.policy == other.version.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseText:
    """How a base model writes: its tokens as text, and the tokens that end a turn."""

    decode: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]


class ClientSampler:
    """Samples for clients, and records each sample as an episode. `open_parts` makes it.

    Weights are a version that `Parts.record_version` recorded, or the name of a frozen policy: the base model itself.

    Args:
        engine: engine of the run.
        store: the journal.
        clock: times samples.
        environment: name of the environment in the records.
        texts: how each policy writes.
    """

    def __init__(
        self, engine: Engine, store: SqliteJournal, clock: Clock, environment: str, texts: Mapping[str, BaseText]
    ) -> None:
        self._engine = engine
        self._store = store
        self._log = store.turn_log("0")
        self._clock = clock
        self._environment = environment
        self._texts = texts
        self._next_number = store.next_number("e")
        self._places = VersionPlaces(engine, max(1, engine.capabilities.adapters))
        self._calls = asyncio.Semaphore(engine.capabilities.places or UNKNOWN_PLACES)
        self.max_context = engine.capabilities.max_context
        self.is_used = self._places.is_used

    async def sample(
        self,
        request_id: str,
        weights: WeightsRef | str,
        prompt: Int32Array,
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Sequence[str] | None = (),
        origin: Mapping[str, str] | None = None,
    ) -> list[Completion]:
        """Sample once with each seed, and queue one episode for each sample; the next flush of the journal writes all
        episodes of a request, or none.

        Args:
            request_id: id of the request, which becomes the task's id.
            weights: weights that sample.
            prompt: tokens of the prompt.
            sampling: how to sample.
            seeds: seed of each sample.
            stop: texts that end a sample; None: the model's own stop tokens do, as they do beside texts.
            origin: data of the recorded task.
        """
        started, texts = self._clock.wall(), tuple(stop or ())
        policy, version = _named(weights)
        if stop is None or texts:
            sampling = replace(sampling, stop_token_ids=self._texts[policy].stop_token_ids)
        async with self._served(weights):
            try:
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(self._one(f"{request_id}:{number}", weights, prompt, sampling, texts, seed))
                        for number, seed in enumerate(seeds)
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        samples = [call.result() for call in calls]
        self._record(request_id, prompt, sampling, samples, version, dict(origin or {}), started)
        return samples

    async def score(
        self, weights: WeightsRef | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """Compute the log-probability of each token given those before it, and of the `top` likeliest tokens there."""
        async with self._served(weights), self._calls:
            scored = weights if isinstance(weights, str) else weights.version
            return await self._engine.score(scored, token_ids, temperature, top=top)

    def recorded(self, requests: Iterable[str]) -> dict[str, list[Completion]]:
        """Return the recorded samples of requests that have any, by request.

        A process that was killed between the flush of a request's episodes and that of its result leaves them.
        """
        wanted, samples = set(requests), dict[str, list[Completion]]()
        statement = "SELECT task, episode FROM episodes ORDER BY length(episode), episode"
        for task, episode in self._store.rows(statement) if wanted else ():
            if task in wanted:
                turn = decode_entries(self._store.recorded(episode, 0)[0])[-1]
                assert isinstance(turn, TurnEntry)
                samples.setdefault(task, []).append(completion_from_entry(turn))
        return samples

    def _served(self, weights: WeightsRef | str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if isinstance(weights, str) else self._places.use(weights)

    async def _one(
        self,
        call_id: str,
        weights: WeightsRef | str,
        prompt: Int32Array,
        sampling: SamplingParams,
        texts: Sequence[str],
        seed: int,
    ) -> Completion:
        """Sample once; a completion that a text ended has `stop` as its finish reason, too."""
        policy, version = _named(weights)
        decode = self._texts[policy].decode
        longest = max((len(text.encode()) for text in texts), default=0)  # in bytes; most tokens have at least one

        def watch() -> NewTokensCallback:
            sampled: list[int] = []

            def end_at_text(request_id: str, tokens: Tokens) -> None:
                sampled.extend(tokens.token_ids.tolist())
                end = decode(sampled[-longest - len(tokens.token_ids) :])
                if any(text in end for text in texts):
                    self._engine.abort(request_id)

            return end_at_text

        # An engine serves one version of full weights at a time; conversations cannot be pinned to it.
        pin = None if isinstance(weights, str) or weights.kind == "full" else version
        request = GenerateRequest(request_id=call_id, token_ids=prompt, sampling=sampling, seed=seed)
        async with self._calls:
            completion = await call_engine(
                self._engine, policy, request, self._clock, pin=pin, watch=watch if texts else None
            )
        if strange := [span.version for span in completion.spans if span.version != version]:
            raise EngineError(f"{call_id}: sampled by {strange[0]}, not by {version}")
        cut = cut_at_text(completion, texts, decode)
        return completion if cut is None else Completion.of(cut, "stop", cut.cached_tokens)

    def _record(
        self,
        request_id: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        samples: Sequence[Completion],
        version: PolicyVersion,
        origin: dict[str, str],
        started: float,
    ) -> None:
        """Queue an episode of one turn for each sample."""
        records: list[ControlRecord] = []
        policy, decode = version.policy, self._texts[version.policy].decode
        group_id, text = f"g{self._next_number}", decode(prompt.tolist())
        seconds = self._clock.wall() - started
        settings = SeatSettings(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            max_turns=1,
            max_context=self.max_context,
        )
        for number, completion in enumerate(samples):
            episode_id = ids.episode_id("e", self._next_number)
            self._next_number += 1
            task = {**origin, "sample": number}
            spec = EpisodeSpec(
                episode_id=episode_id,
                environment=self._environment,
                task=Task(id=request_id, data=task),
                seed=0,
                seats={SEAT: SeatBinding(policy, version)},
                group_id=group_id,
                group_size=len(samples),
            )
            begin = BeginEntry(
                environment=self._environment,
                code_hash="",
                task_id=request_id,
                task=task,
                seed=0,
                seats={SEAT: policy},
                purpose="train",
                group_id=group_id,
                group_size=len(samples),
                parent_id=None,
                settings={"": settings},
                request_version=REQUEST_VERSION,
            )
            turn = TurnEntry(
                seat=SEAT,
                index=0,
                policy=policy,
                row=0,
                turn=0,
                context_ids=prompt.astype("<i4").tobytes(),
                tokens=completion.encode(),
                finish_reason="stop" if completion.finish_reason == "stop" else "length",
                text=decode(completion.token_ids.tolist()),
                messages=({"role": "user", "content": text},),
                temperature=sampling.temperature,
                seconds=seconds,
                started=started,
                cached_tokens=completion.cached_tokens,
                reply=ReplyRecord(),  # its client reads it
            )
            entries = [
                JournalEntry(episode_id, 0, call_id, b"", encode_body(body))
                for call_id, body in (
                    ("begin", begin),
                    (ids.call_id(ids.ROOT_STRAND, 0), move_routing(turn, self._log, episode_id, 0)),
                )
            ]
            for entry in entries:
                self._log.append(entry)
            header = EpisodeHeader(
                episode_id=episode_id,
                group_id=group_id,
                attempt=0,
                purpose="train",
                parent_id=None,
                stop_reason="completed",
                drop_reason=None,
                turns=1,
                tokens=len(completion),
                seconds=seconds,
                trajectories=(TrajectoryHeader(SEAT, 0, policy, None, len(completion), version.step, version.lineage),),
                location=EpisodeDataLocation(self._log.name, len(entries)),
            )
            end = EpisodeEnd(spec=spec, header=header, digest=episode_digest(entries), metrics={}, detail="")
            records += [Admission(spec=spec), end]
        self._store.record(*records)


def _named(weights: WeightsRef | str) -> tuple[str, PolicyVersion]:
    """Return the policy of weights in the engine and the journal, and their version."""
    if isinstance(weights, str):
        return weights, PolicyVersion(weights, 0, 0)
    return weights.version.policy, weights.version
