"""Episodes under a schedule of interruptions in virtual time, and what must hold of them whatever the schedule.

Real: episode runner, worker, dispatcher, scripted engine, journal in memory. A nemesis pauses and updates the engine,
aborts calls, parks episodes, loses the engine, and kills the process; each life goes on from what was on disk.
The policy's token n depends on the turn's seed and n alone, so an undisturbed run says what every turn must be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import agentrl
from agentrl.app.policies import seat_settings
from agentrl.config.sections import SamplingConfig
from agentrl.core import ids
from agentrl.core.clock import LoopClock
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest, NewTokensCallback, Refresh
from agentrl.core.records import PolicyVersion, Task, WeightsRef
from agentrl.core.tokens import Completion, Tokens
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.release import WholeGroupRelease
from agentrl.engines.scripted import ScriptedEngine, ScriptedSession
from agentrl.environment.registry import name_of
from agentrl.journal.entries import JournalEntry, TurnEntry, decode_partial_turn
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import EpisodeEnd, TurnLog
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher, make_dispatcher
from agentrl.orchestrator.host import DispatchingHost
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.episode import RolloutSettings
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.virtual_time import simulate

if TYPE_CHECKING:
    import random

POLICIES = ("left", "right")
GROUPS, GROUP_SIZE = 3, 2
MAX_TOKENS = 48
TOKEN_S = 0.03
SHORT = 200
"""Tokens of context, where the memory is short."""
REFRESHES: tuple[Refresh, ...] = ("token", "turn", "lazy", "episode")
LONGEST_RUN_S = 3_600.0
"""Virtual seconds: a run that takes longer is stuck."""


class Solve(agentrl.Environment):
    """One turn."""

    seats = ("left",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("left").act(agentrl.user(str(ctx.task.data["problem"])))
        ctx.agent("left").reward(float(len(turn.text)))


class Thinker:
    """A resource that takes its time, on re-execution as well."""

    async def think(self) -> str:
        await asyncio.sleep(0.4)
        return "thought"


class Talk(agentrl.Environment):
    """Turns one after another and side by side, waits, and children."""

    seats = POLICIES

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        left, right = ctx.agent("left"), ctx.agent("right")
        opening = await left.act(agentrl.user("begin"))
        ours, theirs = await ctx.gather(left.act(agentrl.user("on")), right.act(agentrl.user(opening.text)))
        await ctx.sleep(ctx.rng.random())
        await ctx.resource(Thinker, level="replay").call("think")
        if ctx.task.data["asks"]:
            solved = await ctx.gather(*ctx.spawn(Solve, {"problem": ours.text}, n=2))
            left.reward(sum(child.rewards["left"] for child in solved))
        closing = await right.act(agentrl.user(theirs.text))
        left.reward(1.0)
        right.reward(float(len(closing.text)))


TASKS = [Task(id=f"t{number}", data={"asks": number == 1}) for number in range(GROUPS)]


def say(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """Up to 59 letters that depend on the seed and their number alone; some turns are cut by `MAX_TOKENS`."""
    return [ord("a") + ids.stable_hash64(request.seed, n) % 26 for n in range(request.seed % 60)] + [STOP_TOKEN]


class WatchedEngine(ScriptedEngine):
    """Says when a call begins before what is known already, or while its episode is parked."""

    def __init__(self, versions: dict[str, PolicyVersion], known: dict[str, int], **options: Any) -> None:
        super().__init__(say, versions=versions, seconds_per_token=TOKEN_S, seeded_logprobs=True, **options)
        self.known = dict(known)
        """By request: tokens that must not be sampled again."""
        self.samplers: dict[str, dict[int, int]] = {}
        """By request: the step of the version that sampled each token, as the engine told it."""
        self.parked: Callable[[], tuple[str, ...]] = tuple
        self.asked: dict[str, float] = {}
        """By request: when it was first made."""
        self.held: dict[str, ScriptedSession] = {}
        self.resampled = 0

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> ScriptedSession:
        held = self.held.get(session_id)
        assert held is None or held.closed or held.life != self.life, f"{session_id} is opened twice"
        session = self.held[session_id] = super().open(session_id, policy, pin=pin)
        return session

    def start(
        self,
        request: GenerateRequest,
        policy: str,
        version: PolicyVersion,
        *,
        pinned: bool,
        on_delta: NewTokensCallback | None,
    ) -> Any:
        name = request.request_id
        self.asked.setdefault(name, asyncio.get_running_loop().time())
        assert not _belongs(name, self.parked()), f"{name} is sampled while its episode is parked"
        self.resampled += max(0, self.known.get(name, 0) - request.sampled_before)
        self.known[name] = request.sampled_before

        def watched(name: str, tokens: Tokens) -> None:
            self._told(name, self.known[name], len(tokens), tokens.spans[0].version)
            self.known[name] += len(tokens)
            if on_delta is not None:
                on_delta(name, tokens)

        return super().start(request, policy, version, pinned=pinned, on_delta=watched)

    def end(self, call: Any) -> Completion:
        completion = super().end(call)
        if not call.future.cancelled() and call.future.exception() is None:
            name, before = call.request.request_id, call.request.sampled_before
            self.known[name] = before + len(completion.token_ids)
            for start, stop, version in completion.spans:
                self._told(name, before + start, stop - start, version)
        return completion

    def _told(self, name: str, start: int, count: int, version: PolicyVersion) -> None:
        self.samplers.setdefault(name, {}).update(dict.fromkeys(range(start, start + count), version.step))


def _belongs(name: str, episodes: Collection[str]) -> bool:
    """Whether a request or session is one of these episodes, all in their first attempt."""
    return any(name.startswith((f"{episode}.0.", f"{episode}.0:")) for episode in episodes)


Turn = tuple[bytes, bytes, bytes, str]
"""Context, tokens, logprobs, finish reason."""


@dataclass(kw_only=True)
class Life:
    """One process: the real parts over what the journal holds."""

    journal: MemoryJournal | SqliteJournal
    engine: WatchedEngine
    run_seed: int
    episode_timeout_s: float = LONGEST_RUN_S
    failure: asyncio.Future[None] = field(init=False)
    """Gets an error no episode can be blamed for."""
    dispatcher: Dispatcher = field(init=False)
    worker: AsyncioWorker = field(init=False)
    runner: EpisodeRunner = field(init=False)

    def __post_init__(self) -> None:
        self.failure = asyncio.get_running_loop().create_future()
        self.dispatcher = make_dispatcher(
            environment=Talk,
            policy_of=lambda seat, group: seat.rpartition(".")[2],
            run_seed=self.run_seed,
            group_size=GROUP_SIZE,
            max_in_flight=GROUP_SIZE,
            buffer=EpisodeBuffer(POLICIES, WholeGroupRelease(POLICIES, REWARD_ESTIMATORS["leave_one_out"])),
            store=self.journal,
            changed=ChangeCondition(),
            fail=self._fail,
        )
        settings = RolloutSettings(
            seat=seat_settings(SamplingConfig(max_turns=8, max_tokens=MAX_TOKENS), 1 << 16),
            tool_timeout_s=60.0,
            episode_timeout_s=self.episode_timeout_s,
            max_staleness={"left": 1, "right": 3},
        )
        self.runner = EpisodeRunner(
            engine=self.engine,
            chat_format=PlainChatFormat(),
            store=self.journal,
            log=self.journal.turn_log("0"),
            host=DispatchingHost(self.dispatcher),
            clock=LoopClock(),
            settings=settings,
        )
        self.worker = AsyncioWorker(
            self.runner,
            environments={name_of(cls): cls for cls in (Talk, Solve)},
            data_attempts=1,
            on_failure=self._fail,
        )
        self.dispatcher.run(self.worker)
        self.engine.parked = lambda: self.runner.parking.parked
        self.dispatcher.resume(PastRun(self.journal, {}, group_size=GROUP_SIZE), lambda group: TASKS[group])
        for task in TASKS[self.dispatcher.next_group :]:
            self.dispatcher.admit_group(task)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def write(self) -> None:
        """The journal's writer: a round every 200 ms, the partition before the control log, and time to die between."""
        while True:
            await asyncio.sleep(0.2)
            assert isinstance(self.journal, MemoryJournal)
            queued = len(self.journal.records)
            await self.journal.turn_log("0").flush()
            await asyncio.sleep(0.02)
            self.journal._on_disk = max(self.journal._on_disk, queued)

    def on_disk(self) -> tuple[MemoryJournal, dict[str, int]]:
        """What a kill leaves: the journal, and by request the tokens that are on disk."""
        assert isinstance(self.journal, MemoryJournal)
        journal = self.journal.after_crash()
        log = journal.turn_log("0")
        return journal, tokens_on_disk(log, {entry.episode_id for entry in log.entries})


def tokens_on_disk(log: TurnLog, episodes: Collection[str]) -> dict[str, int]:
    """By request: how many of its tokens are in the journal, in an entry or in partials."""
    known: dict[str, int] = {}
    for episode in episodes:
        for entry in log.read(episode, 0):
            body = entry.decode()
            if isinstance(body, TurnEntry):
                known[request_name(entry)] = len(body.tokens)
        for entry in log.read_partials(episode, 0):
            partial = decode_partial_turn(entry.body)
            name = request_name(entry)
            known[name] = max(known.get(name, 0), partial.start + len(partial.tokens.token_ids) // 4)
    return known


def request_name(entry: JournalEntry) -> str:
    """The id of the engine calls of a turn."""
    return f"{entry.episode_id}.{entry.attempt}.{entry.call_id}"


def episode_of(name: str) -> str:
    """Whose call a request is."""
    return name.rsplit(".0.", 1)[0]


@dataclass(kw_only=True)
class InterruptedRun:
    """A run from its first life to the end of its last episode."""

    seed: int
    refresh: Refresh = "token"
    kills: int = 2
    """At most so many lives end early."""
    kv_tokens: int | None = None
    """That the engine says it holds."""
    resampled: int = 0
    """Tokens that were on disk, or had been given back by a call, and were sampled again all the same."""
    did: Counter[str] = field(default_factory=Counter)
    """What the nemesis did."""
    _step: int = 0
    _current: list[tuple[float, PolicyVersion]] = field(default_factory=list)
    _asked: dict[str, float] = field(default_factory=dict)
    _samplers: dict[str, dict[int, int]] = field(default_factory=dict)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random_stream("nemesis", self.seed)

    async def run(self, *, disturbed: bool = True) -> dict[str, Turn]:
        """Run to the end; the turns by request.

        Raises:
            AssertionError: something did not hold.
        """
        async with asyncio.timeout(LONGEST_RUN_S):
            versions = {policy: PolicyVersion(policy, 0, 0) for policy in POLICIES}
            self._current = [(0.0, version) for version in versions.values()]
            journal, known = MemoryJournal(), dict[str, int]()
            while True:
                engine = WatchedEngine(versions, known, refresh=self.refresh)
                if self.kv_tokens is not None:
                    engine.capabilities = replace(engine.capabilities, kv_tokens=self.kv_tokens, prefill_rate=200.0)
                life = Life(journal=journal, engine=engine, run_seed=self.seed % 4)
                killed = await self._live(life, disturbed=disturbed)
                self.resampled += engine.resampled
                self._asked = {**engine.asked, **self._asked}
                for name, samplers in engine.samplers.items():
                    self._samplers.setdefault(name, {}).update(samplers)
                if killed is None:
                    break
                journal, known = killed
                versions = {version.policy: version for _, version in self._current}
        assert engine.sessions == 0, f"{engine.sessions} sessions are left open"
        assert isinstance(life.journal, MemoryJournal)
        return self._turns(life.journal)

    async def _live(self, life: Life, *, disturbed: bool) -> tuple[MemoryJournal, dict[str, int]] | None:
        """One life; what was on disk when it was killed, or None when all has ended."""
        loop = asyncio.get_running_loop()
        await life.journal.flush()
        ended = loop.create_task(life.worker.drain())
        beside = [loop.create_task(life.write())]
        if disturbed:
            beside.append(loop.create_task(self._nemesis(life)))
        await asyncio.wait([ended, life.failure, *beside[1:]], return_when=asyncio.FIRST_COMPLETED)
        if life.failure.done():
            life.failure.result()
        killed = not ended.done() and beside[-1].done() and beside[-1].result()
        left = life.on_disk() if killed else None
        if not killed:
            await ended
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await life.worker.cancel()
        if not ended.done():
            await ended
        return left

    async def _nemesis(self, life: Life) -> bool:
        """Interrupts for a while, then leaves everything as it should be; True: the process is to be killed."""
        rng, engine = self._rng, life.engine
        for _ in range(rng.randrange(4, 16)):
            await asyncio.sleep(rng.random() * rng.choice((0.1, 1.0)))
            act = rng.choice(("update", "pause", "abort", "abort", "park", "park", "unpark", "lose", "kill"))
            self.did[act] += 1
            match act:
                case "update":
                    await self._update(engine)
                case "pause":
                    await engine.pause()
                    await asyncio.sleep(rng.random())
                    if rng.random() < 0.5:
                        await self._update(engine)
                    await engine.resume()
                case "abort":
                    engine.abort(rng.choice(sorted(engine.asked) or ["nobody"]))
                case "park":
                    await self._park(life)
                case "unpark":
                    life.worker.unpark(rng.randrange(1, 4))
                case "lose":
                    engine.lose()
                    await asyncio.sleep(rng.random() * 6)
                    engine.restore()
                case "kill" if self.kills > 0:
                    self.kills -= 1
                    return True
        while life.runner.parking.parked:
            life.worker.unpark(rng.randrange(1, 4))
            await asyncio.sleep(rng.random())
        await asyncio.Event().wait()
        return False

    async def _park(self, life: Life) -> None:
        episodes = sorted({episode_of(name) for name in life.engine.asked})
        episode = self._rng.choice(episodes or ["nobody"])
        if not life.worker.park(episode):
            return
        await asyncio.sleep(0.01)  # for calls that were cut to return
        if episode in life.runner.parking.parked:
            engine = life.engine
            held = [name for name, held in engine.held.items() if not held.closed and held.life == engine.life]
            assert not [name for name in held if _belongs(name, [episode])], f"{episode} is parked and holds a session"

    async def _update(self, engine: WatchedEngine) -> None:
        self._step += 1
        version = PolicyVersion(self._rng.choice(POLICIES), 0, self._step)
        await engine.serve([WeightsRef(version=version, path="", kind="full", sha256="")])
        self._current.append((asyncio.get_running_loop().time(), version))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _turns(self, journal: MemoryJournal) -> dict[str, Turn]:
        ends = [end.header for end in journal.of_kind(EpisodeEnd)]
        expected, begun_again = GROUPS * GROUP_SIZE + 2 * GROUP_SIZE, [each for each in ends if each.attempt]
        if self.refresh == "episode":  # with children of their own
            assert len(ends) >= expected
            self.did["begun_again"] += len(begun_again)
        else:
            assert (len(ends), begun_again) == (expected, [])
        assert all(header.committed for header in ends), [header.drop_reason for header in ends]
        turns: dict[str, Turn] = {}
        for header in ends:
            if header.attempt:
                continue
            assert not journal.turn_log("0").read_partials(header.episode_id, 0), f"{header.episode_id} left partials"
            opened: dict[str, float] = {}
            for entry in journal.turn_log("0").read(header.episode_id, 0):
                body = entry.decode()
                if isinstance(body, TurnEntry):
                    self.did["no_room"] += any(pause.why == "no_room" for pause in body.pauses)
                    name = request_name(entry)
                    asked = self._asked[name]
                    opened.setdefault(body.seat, asked)
                    since = asked if self.refresh in ("token", "turn") else opened[body.seat]
                    self._check_spans(name, body, since)
                    turns[name] = what_was_said(body)
        return turns

    def _check_spans(self, name: str, turn: TurnEntry, since: float) -> None:
        """They name who sampled each token, and nobody who was not current between `since` and the turn's end."""
        until = turn.started + turn.seconds
        for span in turn.tokens.spans:
            own = [(time, version.step) for time, version in self._current if version.policy == turn.policy]
            begins = [time for time, step in own if step == span.version.step]
            ends = min((time for time, step in own if step > span.version.step), default=LONGEST_RUN_S)
            assert begins, f"{name}: step {span.version.step} was never served"
            assert begins[0] <= until, f"{name}: step {span.version.step} came later"
            assert ends >= since, f"{name}: step {span.version.step} was gone before"
        told = [self._samplers[name][n] for n in range(len(turn.tokens))]
        assert told == [span.version.step for span in turn.tokens.spans for _ in range(span.start, span.stop)], (
            f"{name}: {turn.tokens.spans}"
        )
        assert list(turn.tokens.spans) == sorted(turn.tokens.spans, key=lambda span: span.version.step), (
            f"{name}: {turn.tokens.spans}"
        )


def what_was_said(turn: TurnEntry) -> Turn:
    """What no interruption may change."""
    return turn.context_ids, turn.tokens.token_ids, turn.tokens.columns["logprobs"], turn.finish_reason


@cache
def undisturbed(run_seed: int) -> dict[str, Turn]:
    """The turns of a run that nothing interrupts."""
    return simulate(lambda: InterruptedRun(seed=run_seed).run(disturbed=False), seed=0)


def check_schedule(seed: int) -> InterruptedRun:
    """Run one schedule and compare it with the undisturbed run; of two, one in an engine with little memory.

    Raises:
        AssertionError: a token, a logprob, a span or an episode is not what it should be.
    """
    run = InterruptedRun(seed=seed, refresh=REFRESHES[seed % 4], kv_tokens=SHORT if seed // 4 % 2 else None)
    turns = simulate(run.run, seed=seed)
    expected = undisturbed(seed % 4)
    if run.did.pop("begun_again", 0):  # another attempt, with other children, says other things
        expected = {name: expected[name] for name in turns if name in expected}
        turns = {name: turns[name] for name in expected}
    assert turns == expected, "the turns differ from those of the undisturbed run"
    assert run.resampled == 0, f"{run.resampled} tokens were sampled again"
    return run
