"""What a server's clients sample: versions in the engines, stop texts, and each sample as an episode of one turn.

An engine serves as many adapters as it has slots, and one version of all weights of a base model; `PinnedVersions`
keeps those that were used last. A sample is recorded like an episode that was played: `agentrl episode tokens` shows it
with its version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core import ids
from agentrl.core.clock import Clock, RetryBudget
from agentrl.core.errors import EngineError, EngineLostError, InputError
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams
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
from agentrl.journal.store import SqliteJournal
from agentrl.rollout.external.agent import cut_at_text
from agentrl.rollout.scoring.retrying import call_engine
from agentrl.rollout.turn.sampler import LOST_IN_A_ROW
from agentrl.rollout.turn_entries import completion_from_entry
from agentrl.tinker.config import ENVIRONMENT
from agentrl.tinker.messages import Sample, Sampling, write_samples, write_top
from agentrl.tinker.shares import EnginePlaces
from agentrl.tinker.stability import TOP_TOKENS

if TYPE_CHECKING:
    from agentrl.core.ports import NewTokensCallback
    from agentrl.core.records import Int32Array
    from agentrl.tinker.tables import BaseModel

SEAT = "client"
"""Seat of every recorded sample."""
MAX_SAMPLES = 1024
"""Maximum number of samples of one request."""
MIN_TEMPERATURE = 1e-6
"""Minimum temperature above 0, at which logits are divided; its inverse is the maximum."""
MAX_TOP_CELLS = 1 << 20
"""Maximum number of the likeliest tokens in one answer to a client or of the engine, over all positions: 8 MiB."""
UNKNOWN_PLACES = 64
"""Number of calls at once in an engine that does not say how many it samples."""
MAX_STOPS = 64
"""Maximum number of stop texts or tokens of one request."""


@dataclass(slots=True, eq=False)
class _Place:
    """A version that an engine serves, or will serve for calls that have their turn."""

    weights: WeightsRef
    owner: str
    users: int = 0
    is_loaded: bool = False


@dataclass(slots=True, eq=False)
class _Turn:
    """Calls of one version that wait for a place, and get it together."""

    weights: WeightsRef
    owner: str
    waiting: int = 0
    has_come: bool = False


class PinnedVersions:
    """The clients' versions that an engine serves: those used last.

    Adapters share the engine's slots. All weights of a base model have one place: a version of them is the current one
    of its policy, and replaces the one before once the calls of that have ended. Turns come in the order of their first
    calls, and newer calls of a served version wait, too, while there are any. So no call waits for more than one turn
    of each other version of its owner: an owner that uses no slot waits for none of others, as a slot is kept free for
    it.

    Args:
        engine: the engine.
        slots: number of adapters that it serves at once.
        owners: owners for each of whom a slot is kept free.
    """

    def __init__(self, engine: Engine, slots: int, owners: Collection[str]) -> None:
        self._engine = engine
        self._slots = slots
        self._owners = owners
        self._places: OrderedDict[PolicyVersion, _Place] = OrderedDict()
        """By last use."""
        self._turns: dict[PolicyVersion, _Turn] = {}
        """In the order of their first calls."""
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def use(self, weights: WeightsRef, owner: str) -> AsyncIterator[None]:
        """Serve an owner's version within the context; wait if other calls use all places, or wait for one."""
        async with self._changed:
            await self._wait_for_turn(weights, owner)
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

    async def _wait_for_turn(self, weights: WeightsRef, owner: str) -> None:
        """Enter a call of a version once there is a place for it."""
        if not self._waiting(weights, owner) and self._has_room(weights, owner):
            self._enter(weights, owner, 1)
            return
        turn = self._turns.setdefault(weights.version, _Turn(weights, owner))
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
        if (
            not turn.has_come
            and self._waiting(turn.weights, turn.owner)[0] is turn
            and self._has_room(turn.weights, turn.owner)
        ):
            turn.has_come = True
            del self._turns[turn.weights.version]
            self._enter(turn.weights, turn.owner, turn.waiting)
        return turn.has_come

    def _waiting(self, weights: WeightsRef, owner: str) -> list[_Turn]:
        """Return the turns before a call of an owner's version, in order: the owner's own, and those of owners that use
        no place."""
        using = {place.owner for place in self._taken(weights) if place.users} - {owner}
        return [
            turn for turn in self._turns.values() if _shares_places(turn.weights, weights) and turn.owner not in using
        ]

    def _taken(self, weights: WeightsRef) -> list[_Place]:
        """Return the places that a version shares, by last use."""
        return [place for place in self._places.values() if _shares_places(place.weights, weights)]

    def _has_room(self, weights: WeightsRef, owner: str) -> bool:
        """Whether a version has a place, or can have one: the version that was used least recently may lose its own."""
        place = self._places.get(weights.version)
        if place is not None and place.users:
            return True
        taken = self._taken(weights)
        places = 1 if weights.kind == "full" else self._slots
        using = Counter(one.owner for one in taken if one.users)
        kept_free = len(set(self._owners) - using.keys()) if using[owner] else 0
        if using.total() + 1 + kept_free > places:
            return False
        if place is not None:
            return True
        excess = len(taken) + 1 - places
        idle = [place for place in taken if not place.users]
        if len(idle) < excess:
            return False
        for place in idle[: max(0, excess)]:
            del self._places[place.weights.version]
        return True

    async def _load(self, weights: WeightsRef) -> None:
        loaded = [place.weights for place in self._places.values() if place.is_loaded]
        adapters = [other for other in loaded if other.kind == "adapter"]
        if weights.kind == "full":
            await self._engine.serve((weights,), adapters)
        else:
            await self._engine.serve((), (*adapters, weights))

    def _enter(self, weights: WeightsRef, owner: str, calls: int) -> None:
        self._places.setdefault(weights.version, _Place(weights, owner)).users += calls
        self._changed.notify_all()

    def _leave(self, place: _Place) -> None:
        place.users -= 1
        if not (place.users or place.is_loaded):
            del self._places[place.weights.version]
        self._changed.notify_all()


def _shares_places(one: WeightsRef, other: WeightsRef) -> bool:
    """Whether two versions need the same places of an engine."""
    return one.kind == other.kind and (one.kind == "adapter" or one.version.policy == other.version.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSource:
    """The weights of a request for samples."""

    owner: str
    base: BaseModel
    weights: WeightsRef | None
    """Saved weights of a client's model; None: the base model."""
    sampler_id: str
    model_id: str
    """Model of the weights; empty for the base model."""

    @property
    def policy(self) -> str:
        """Policy of the weights in engine and journal."""
        return self.base.own_policy if self.weights is None else self.base.policy

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights."""
        return PolicyVersion(self.policy, 0, 0) if self.weights is None else self.weights.version

    @property
    def scored(self) -> PolicyVersion | str:
        """The weights by the name under which an engine scores."""
        return self.policy if self.weights is None else self.version


def check_sample(request: Sample, *, max_context: int, vocabulary: int) -> None:
    """Refuse a request for samples that no engine could answer.

    Raises:
        InputError: the message says what to change.
    """
    if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
        raise InputError("prompt: only tokens are served here, not images or audio")
    tokens = prompt_tokens(request)
    if not len(tokens):
        raise InputError("prompt: it has no tokens")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise InputError(f"prompt: a token lies outside the vocabulary, [0, {vocabulary})")
    if len(tokens) >= max_context:
        raise InputError(f"prompt: {len(tokens)} tokens, but this server's contexts have at most {max_context}")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InputError(f"num_samples = {request.num_samples}: from 1 to {MAX_SAMPLES} are possible")
    _check_sampling(request.sampling_params, vocabulary)
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(tokens)):
        raise InputError(f"prompt_logprobs_last_n = {last}: needs prompt_logprobs, and fewer tokens than the prompt")
    room = max_context - len(tokens)
    sampled = min(request.sampling_params.max_tokens or room, room)
    computed = len(tokens) + sampled  # for one sample at a time, at its prompt too
    for name, count, positions in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, len(tokens)),
        ("topk_sample_logprobs", request.topk_sample_logprobs, max(request.num_samples * sampled, computed)),
    ):
        if not 0 <= count * positions <= MAX_TOP_CELLS:
            raise InputError(
                f"{name} = {count}: for {positions} tokens, from 0 to {MAX_TOP_CELLS // positions} are possible"
            )
    if request.record_stability_info:
        _check_stability(request.sampling_params, max(request.num_samples * sampled, computed))


def _check_stability(sampling: Sampling, positions: int) -> None:
    """Refuse to record distributions that are cut, whose likeliest tokens say nothing of the others, or too many."""
    if sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p != 1:
        raise InputError(
            "record_stability_info: the whole distribution must be sampled; set a temperature above 0, top_k = -1 and "
            "top_p = 1, or sample with a client that does not record"
        )
    if positions * TOP_TOKENS > MAX_TOP_CELLS:
        raise InputError(
            f"record_stability_info: {positions} tokens in one request, but at most {MAX_TOP_CELLS // TOP_TOKENS} are "
            "possible; lower num_samples or max_tokens"
        )


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InputError(f"sampling_params.max_tokens = {sampling.max_tokens}: at least 1 is needed")
    if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= 1 / MIN_TEMPERATURE:
        raise InputError(
            f"sampling_params.temperature = {sampling.temperature}: 0, or from {MIN_TEMPERATURE} to "
            f"{1 / MIN_TEMPERATURE:.0f}, is possible"
        )
    if not -1 <= sampling.top_k < 1 << 31:
        raise InputError("sampling_params.top_k: -1, 0 (all tokens) or a positive 32-bit number is possible")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"sampling_params.top_p = {sampling.top_p}: it must be above 0 and at most 1")
    stops = _stops(sampling)
    if len(stops) > MAX_STOPS or "" in stops:
        raise InputError(f"sampling_params.stop: at most {MAX_STOPS} tokens or texts, none of them empty")
    if len({type(stop) for stop in stops}) > 1:
        raise InputError("sampling_params.stop: either tokens or texts, not both")
    if not all(0 <= stop < vocabulary for stop in stops if isinstance(stop, int)):
        raise InputError(f"sampling_params.stop: a token lies outside the vocabulary, [0, {vocabulary})")


def _stops(sampling: Sampling) -> list[str | int]:
    """Return the texts or tokens that end a sample."""
    return [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []


def prompt_tokens(request: Sample) -> Int32Array:
    """Return the tokens of a prompt.

    Raises:
        InputError: one is no 32-bit number.
    """
    try:
        return np.array([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int32)
    except OverflowError:
        raise InputError("prompt: a token lies outside the vocabulary") from None


def recorded_samples(store: SqliteJournal, requests: Set[str]) -> dict[str, list[str]]:
    """Return the recorded episodes of requests for samples, in order, by request.

    A process that was killed between the commit of a request's episodes and that of its result leaves them.
    """
    recorded: dict[str, list[str]] = {}
    if not requests:
        return recorded
    for task, episode in store.rows("SELECT task, episode FROM episodes ORDER BY length(episode), episode"):
        if task in requests:
            recorded.setdefault(task, []).append(episode)
    return recorded


class ClientSampler:
    """Samples for clients, and records each sample as an episode.

    Args:
        engine: the server's engine.
        store: the journal.
        clock: times samples.
        seed: seed of samples without one.
        recorded: episodes in the journal of requests without a result, in order, by request.
        owners: the server's owners.
    """

    def __init__(
        self,
        engine: Engine,
        store: SqliteJournal,
        clock: Clock,
        seed: int,
        recorded: Mapping[str, Sequence[str]],
        owners: Collection[str],
    ) -> None:
        self._engine = engine
        self._store = store
        self._log = store.turn_log("0")
        self._clock = clock
        self._seed = seed
        self._next_number = store.next_number("e")
        self._recorded = recorded
        self.pinned = PinnedVersions(engine, max(1, engine.capabilities.adapters), owners)
        self._places = EnginePlaces(engine.capabilities.places or UNKNOWN_PLACES, engine.abort)

    async def sample(self, request_id: str, request: Sample, source: SamplingSource) -> bytes:
        """Sample what a checked request asks for, record it, and return the encoded answer."""
        async with contextlib.AsyncExitStack() as stack:
            if source.weights is not None:
                await stack.enter_async_context(self.pinned.use(source.weights, source.owner))
            started, tokens = self._clock.wall(), prompt_tokens(request)
            sampling, texts = self._sampling(request, len(tokens), source.base.stop_token_ids)
            recorded = self._recorded.get(request_id)
            if recorded is None:
                seeds = [self._seed_of(request, request_id, number) for number in range(request.num_samples)]
                samples = await self._group(request_id, tokens, sampling, texts, source, seeds)
                self._record(request_id, tokens, sampling, samples, source, started)
            else:
                samples = [self._read(name) for name in recorded]
            prompt_logprobs, prompt_top = None, b""
            tops = stability_info = [b""] * len(samples)
            if request.prompt_logprobs or request.topk_prompt_logprobs:
                count = request.topk_prompt_logprobs
                async with self._places.take(source.owner):
                    scores = await self._engine.score(source.scored, tokens, top=count)
                first = len(tokens) - (request.prompt_logprobs_last_n or len(tokens) - 1)
                if request.prompt_logprobs:
                    prompt_logprobs = scores.logprobs.copy()
                    prompt_logprobs[:first] = np.nan
                if count:
                    prompt_top = write_top(scores.top_ids, scores.top_logprobs, width=count, empty_rows=first)
            if request.topk_sample_logprobs:
                tops = [
                    await self._top_of(source, tokens, one, request.topk_sample_logprobs, temperature=1.0)
                    for one in samples
                ]
            if request.record_stability_info:
                temperature = sampling.temperature
                stability_info = [
                    await self._top_of(source, tokens, one, TOP_TOKENS, temperature=temperature) for one in samples
                ]
        return write_samples(samples, tops, prompt_logprobs, prompt_top, stability_info)

    async def _top_of(
        self, source: SamplingSource, prompt: Int32Array, sample: Completion, count: int, *, temperature: float
    ) -> bytes:
        """Compute and write the likeliest tokens at each token of a sample."""
        sequence = np.concatenate([prompt, sample.token_ids])
        async with self._places.take(source.owner):
            scores = await self._engine.score(source.scored, sequence, temperature, top=count)
        ids, logprobs = scores.top_ids[len(prompt) :], scores.top_logprobs[len(prompt) :]
        return write_top(ids, logprobs, width=count, empty_rows=0)

    def _read(self, episode_id: str) -> Completion:
        """Read a sample that an earlier process recorded."""
        entries, _ = self._store.recorded(episode_id, 0)
        turn = decode_entries(entries)[-1]
        assert isinstance(turn, TurnEntry)
        return completion_from_entry(turn)

    def _seed_of(self, request: Sample, request_id: str, number: int) -> int:
        """Return the seed of one sample: the same whenever the request is executed."""
        seed = request.sampling_params.seed
        return ids.stable_hash64(*((self._seed, request_id) if seed is None else ("seed", seed)), number)

    def _sampling(
        self, request: Sample, prompt: int, own_stops: tuple[int, ...]
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """Return the engine's parameters, and the texts that end a sample."""
        sampling = request.sampling_params
        stops = _stops(sampling)
        texts = tuple(item for item in stops if isinstance(item, str))
        tokens = tuple(item for item in stops if isinstance(item, int))
        room = self._engine.capabilities.max_context - prompt
        if request.topk_sample_logprobs or request.record_stability_info:
            room -= 1  # vLLM scores no sequence that fills the context
        is_greedy = sampling.temperature == 0
        params = SamplingParams(
            max_tokens=min(sampling.max_tokens or room, room),
            temperature=1.0 if is_greedy else sampling.temperature,
            top_k=1 if is_greedy else max(0, sampling.top_k),
            top_p=sampling.top_p,
            stop_token_ids=own_stops if sampling.stop is None or texts else tokens,
        )
        return params, texts

    async def _group(
        self,
        request_id: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        texts: Sequence[str],
        source: SamplingSource,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Sample once with each seed, at most as many at once as the engine has places."""
        samples: dict[int, Completion] = {}
        numbers = iter(range(len(seeds)))

        async def work() -> None:
            for number in numbers:
                call_id = f"{request_id}:{number}"
                samples[number] = await self._one(call_id, prompt, sampling, texts, source, seeds[number])

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(len(seeds), self._places.count)):
                    workers.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [samples[number] for number in range(len(seeds))]

    async def _one(  # noqa: C901 - each end of a call is a case
        self,
        call_id: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        texts: Sequence[str],
        source: SamplingSource,
        seed: int,
    ) -> Completion:
        """Sample once; a completion that a text ended has `stop` as its finish reason, too. A call that is interrupted
        for another owner continues where it ended, with the same random numbers; an engine that cannot begins again."""
        decode = source.base.decode
        pieces: list[Completion] = []

        def watch() -> NewTokensCallback | None:
            if not texts:
                return None
            sampled: list[int] = [token for piece in pieces for token in piece.token_ids.tolist()]
            longest = max(len(text.encode()) for text in texts)  # in bytes; most tokens have at least one

            def end_at_text(request_id: str, tokens: Tokens) -> None:
                sampled.extend(tokens.token_ids.tolist())
                end = decode(sampled[-longest - len(tokens.token_ids) :])
                if any(text in end for text in texts):
                    self._engine.abort(request_id)

            return end_at_text

        # An engine serves one version of full weights at a time; conversations cannot be pinned to it.
        pin = source.version if source.weights is not None and source.weights.kind == "adapter" else None
        budget, is_resumed = RetryBudget(LOST_IN_A_ROW), False
        while True:
            count = sum(map(len, pieces))
            request = GenerateRequest(
                request_id=call_id,
                token_ids=np.concatenate([prompt, *(piece.token_ids for piece in pieces)]),
                sampling=replace(sampling, max_tokens=sampling.max_tokens - count),
                seed=seed,
                sampled_before=count,
            )
            async with self._places.take(source.owner, call_id, is_resumed=is_resumed) as place:
                is_resumed = True
                if place.is_interrupted:
                    continue
                pieces.append(
                    await call_engine(self._engine, source.policy, request, self._clock, pin=pin, watch=watch)
                )
            completion = Completion.of(Tokens.join(pieces), pieces[-1].finish_reason, pieces[0].cached_tokens)
            if strange := [span.version for span in completion.spans if span.version != source.version]:
                raise EngineError(f"{call_id}: sampled by {strange[0]}, not by {source.version}")
            cut = cut_at_text(completion, texts, decode)
            if cut is not None:
                return Completion.of(cut, "stop", cut.cached_tokens)
            if completion.finish_reason != "abort" or (texts and not place.is_interrupted):
                return completion
            if not place.is_interrupted:  # the engine ended the call
                if (wait := budget.lost()) is None:
                    raise EngineLostError(f"{call_id}: the call was aborted")
                await self._clock.sleep(wait)
            if not self._engine.capabilities.exact_continuation:
                pieces.clear()  # continued, it would draw other tokens than its seed gives

    def _record(
        self,
        request_id: str,
        tokens: Int32Array,
        sampling: SamplingParams,
        samples: Sequence[Completion],
        source: SamplingSource,
        started: float,
    ) -> None:
        """Queue an episode of one turn for each sample; the next flush writes them: all of a request, or none."""
        records: list[ControlRecord] = []
        version, group_id = source.version, f"g{self._next_number}"
        text = source.base.decode(tokens.tolist())
        for number, completion in enumerate(samples):
            episode_id = ids.episode_id("e", self._next_number)
            self._next_number += 1
            origin = {"sampler": source.sampler_id, "model": source.model_id, "sample": number}
            spec = EpisodeSpec(
                episode_id=episode_id,
                environment=ENVIRONMENT,
                task=Task(id=request_id, data=origin),
                seed=0,
                seats={SEAT: SeatBinding(source.policy, version)},
                group_id=group_id,
                group_size=len(samples),
            )
            settings = SeatSettings(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                max_turns=1,
                max_context=self._engine.capabilities.max_context,
            )
            begin = BeginEntry(
                environment=ENVIRONMENT,
                code_hash="",
                task_id=request_id,
                task=origin,
                seed=0,
                seats={SEAT: source.policy},
                purpose="train",
                group_id=group_id,
                group_size=len(samples),
                parent_id=None,
                settings={"": settings},
                request_version=REQUEST_VERSION,
            )
            seconds = self._clock.wall() - started
            turn = TurnEntry(
                seat=SEAT,
                index=0,
                policy=source.policy,
                row=0,
                turn=0,
                context_ids=tokens.astype("<i4").tobytes(),
                tokens=completion.encode(),
                finish_reason="stop" if completion.finish_reason == "stop" else "length",
                text=source.base.decode(completion.token_ids.tolist()),
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
                trajectories=(
                    TrajectoryHeader(SEAT, 0, source.policy, None, len(completion), version.step, version.lineage),
                ),
                location=EpisodeDataLocation(self._log.name, len(entries)),
            )
            end = EpisodeEnd(spec=spec, header=header, digest=episode_digest(entries), metrics={}, detail="")
            records += [Admission(spec=spec), end]
        self._store.record(*records)
