"""Plays episodes in memory with a scripted policy: `execute_episode` for the checker, over a recorded prefix; `play`
for tests.

`random_policy` is a policy without a model; `play` uses the replies of a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from agentrl.core import event_loop
from agentrl.core.clock import LoopClock, SystemClock
from agentrl.core.errors import (
    AgentRLError,
    CheckFailedError,
    EpisodeError,
    GlobalRandomError,
    InputError,
    describe_failure_location,
    describe_user_code_error,
)
from agentrl.core.ids import random_stream
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.ports import ScoreCredit, ScoreOf
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, Score, ScoreRequest, SeatBinding, Task
from agentrl.core.text import plural
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.release import WholeGroupRelease
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.environment.demonstrations import DemonstratedReplies, format_reply
from agentrl.environment.games import LEGAL_ACTIONS, GameEnvironment
from agentrl.environment.gym import GymEnvironment
from agentrl.environment.harness import HarnessEnvironment, held_programs
from agentrl.environment.loaded_code import check_loaded_code
from agentrl.environment.registry import name_of, resolve
from agentrl.environment.schema_values import UnknownSchemaError, random_value
from agentrl.environment.tools import ToolEnvironment
from agentrl.gateway.calls import RequestRefusedError
from agentrl.journal.entries import JournalEntry, SeatSettings, TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import Admission, EpisodeEnd
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher, make_dispatcher
from agentrl.orchestrator.host import DispatchingHost
from agentrl.orchestrator.metrics import EpisodeTotals
from agentrl.rollout.chat.byte_formats import START_TOKEN, STOP_TOKEN, PlainChatFormat
from agentrl.rollout.episode import RolloutSettings
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.virtual_time import VirtualTimeEventLoop

if TYPE_CHECKING:
    import random

    from agentrl.core.ports import Engine, GenerateRequest
    from agentrl.environment.environment import Environment, OnCodeChange, Reply
    from agentrl.journal.port import JournalStore
    from agentrl.rollout.effects import JournaledResource
    from agentrl.rollout.episode_context import LiveEpisodeContext

POLICY = "random"
PARTITION = "0"
R = TypeVar("R", bound=EpisodeRunner)
MAX_TURNS = 8
DEMONSTRATED_TURNS = 64
"""Maximum number of turns of a demonstration."""
MAX_TOKENS = 4096
TIMEOUT_S = 30.0
PROGRAM_TIMEOUT_S = 120.0
"""Time limit of an episode of an external agent, whose program may take long to start on a busy machine."""
MAX_READ_TOKENS = 4096
"""Number of bytes at the end of a conversation in which the random policy looks for words."""
RANDOM_TEXTS = ("yes", "no", "0", "1", "2", "[0]", "left", "a", "hello world")
"""Replies of the random policy without a call."""
WAITING_S = 5.0
"""Seconds after which `on_wait` is told where an episode waits, and between two times."""
LOCKSTEP_POLL_S = 0.005
_ROOT = re.compile(r"[.~]")
"""What ends the id of the root episode in the id of a request."""
_WORD = re.compile(r"\[?\w+\]?")
_FIRST_LINE = re.compile(r"\n|<\|")
"""Pattern for the end of the first line or of the message."""


class Cut(NamedTuple):
    """A limit of the execution at which an episode or a turn ended."""

    what: Literal["episode", "turn"]
    limit: str


class Failure(msgspec.Struct, frozen=True):
    """Why an execution failed."""

    text: str
    """For people; no decision depends on it."""
    reason: str = ""
    """Drop reason of the episode, such as `resource_lost`; `time_limit` if it did not end; empty for other failures."""
    refusal: str = ""
    """Kind of the refused request that an external agent failed after; empty if none was refused."""
    advice: str = ""
    """The part of `text` that says what to do."""
    entries: tuple[JournalEntry, ...] = ()
    """Journal entries of the episode, if it was executed on its own."""

    @property
    def is_late(self) -> bool:
        """Whether a loaded machine can explain it. Clients of the user's program say so in their own words."""
        return self.reason in ("time_limit", "episode_timeout") or "timed out" in self.text

    @classmethod
    def of_episode(cls, error: EpisodeError, environment: type[Environment]) -> Failure:
        """Convert the error that ended an episode."""
        refusal = error.__cause__.kind if isinstance(error.__cause__, RequestRefusedError) else ""
        first, newline, rest = str(error).partition("\n")
        text = f"{first}{describe_failure_location(error, environment)}{newline}{rest}"
        return cls(text, error.reason, refusal, error.advice)


class ExecutedEpisode(NamedTuple):
    """Outcome of an execution."""

    header: EpisodeHeader
    entries: list[JournalEntry]
    states: dict[str, Any]
    """Final states of the resources that have `get_state`."""
    counts: EpisodeTotals
    metrics: dict[str, float]
    """Metrics of the episode, by name."""
    detail: str
    """What was noted of it for people, such as the error of a program that failed."""
    cuts: Counter[Cut]
    """Number of places at which a limit cut the episode, its children or a turn, keyed by limit."""
    has_turns: bool
    """Whether a seat acted, in the episode or its children."""

    def __repr__(self) -> str:
        """A short text: `asyncio.run` makes one of its result, whatever its size."""
        return f"ExecutedEpisode({self.header.episode_id!r}, …)"


class _StateRunner(EpisodeRunner):
    """Runner that records the final states of each episode's resources."""

    def __init__(self, **services: Any) -> None:
        super().__init__(**services)
        self.states: dict[str, dict[str, Any]] = {}

    def finished(self, context: LiveEpisodeContext) -> None:
        states = {resource.name: _final_state(resource) for resource in context.resources}
        self.states[context.episode.spec.episode_id] = {name: s for name, s in states.items() if s is not None}

    def waits_at(self, spec: EpisodeSpec) -> str:
        """Return where the program of a running episode waits; "" if unknown."""
        context = self._running.get(spec.episode_id)
        return "" if context is None else context.episode.waits_at()


def _final_state(resource: JournaledResource) -> Any:
    try:
        return resource.state()
    except AgentRLError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code: a closed object may have no state
        return f"{type(error).__name__} from get_state"


def spec_of(environment: type[Environment], task: Task, number: int, seed: int) -> EpisodeSpec:
    """Return the spec of episode `number` of a check."""
    return EpisodeSpec(
        episode_id=f"e{number}",
        environment=name_of(environment),
        task=task,
        seed=seed + number,
        seats={seat: SeatBinding(POLICY) for seat in environment.seats},
        group_id=f"g{number}",
    )


async def execute_episode(  # noqa: PLR0913 (one keyword per setting)
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    prefix: Sequence[JournalEntry] = (),
    *,
    answers: Sequence[JournalEntry] = (),
    max_turns: int = MAX_TURNS,
    max_tokens: int = MAX_TOKENS,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    on_wait: Callable[[str], None] = lambda text: None,
) -> ExecutedEpisode | Failure:
    """Execute an episode over a recorded prefix. Returns its outcome, or its failure.

    Args:
        environment: class of the environment.
        spec: spec of the episode.
        script: policy.
        prefix: entries before the kill.
        answers: entries after the kill from which the answers of the outside world are repeated.
        max_turns: maximum number of turns per agent.
        max_tokens: maximum number of tokens per turn.
        sampling: further fields of `SamplingParams`, for requests of an external agent that do not set them.
        on_wait: told now and then where an episode that takes long waits.
    """
    stage = _Stage(environment, script, max_turns=max_turns, max_tokens=max_tokens, sampling=sampling, on_wait=on_wait)
    try:
        outcome = await stage.play(spec, prefix, answers)
    except GlobalRandomError as error:
        if prefix:
            return Failure(str(error))
        return await execute_episode(
            environment,
            spec,
            script,
            answers=answers,
            max_turns=max_turns,
            max_tokens=max_tokens,
            sampling=sampling,
            on_wait=on_wait,
        )
    if isinstance(outcome, Failure):
        return msgspec.structs.replace(outcome, entries=tuple(stage.entries(spec)))
    return outcome


async def execute_together(
    environment: type[Environment],
    specs: Sequence[EpisodeSpec],
    script: Script,
    *,
    patience_s: float,
    max_turns: int = MAX_TURNS,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> list[ExecutedEpisode | Failure]:
    """Execute episodes at once in one worker, and return their outcomes in order; see `execute_episode`.

    The episodes proceed in lockstep: a model call is answered when each episode waits for one, and the programs of
    external agents are rewarded when all have ended. Lockstep ends if that takes longer than `patience_s`, because an
    episode may hold a lock that another needs.
    """
    stage = _Stage(environment, script, max_turns=max_turns, sampling=sampling, in_lockstep=len(specs))
    loop, programs = asyncio.get_running_loop(), _EndedPrograms()
    with held_programs(programs.wait):
        running = {loop.create_task(stage.play(spec)): spec.episode_id for spec in specs}
        lockstep = loop.create_task(_keep_in_lockstep(stage.engine, programs, running, patience_s))
        try:
            return list(await asyncio.gather(*running))
        except GlobalRandomError:  # the class has its own generators now
            pass
        finally:
            for task in (*running, lockstep):
                task.cancel()
            await asyncio.gather(*running, lockstep, return_exceptions=True)
    return await execute_together(
        environment, specs, script, patience_s=patience_s, max_turns=max_turns, sampling=sampling
    )


class _Stage:
    """A worker with a scripted policy, which plays episodes of one environment in memory."""

    def __init__(
        self,
        environment: type[Environment],
        script: Script,
        *,
        max_turns: int = MAX_TURNS,
        max_tokens: int = MAX_TOKENS,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        in_lockstep: int = 0,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._environment = environment
        self._journal = MemoryJournal()
        self._failures = list[BaseException]()
        self._on_wait = on_wait
        self.engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, hold=in_lockstep > 0)
        # Scripts see what a request asks of its reply; scripts of wrong replies do not comply.
        self.engine.capabilities = replace(self.engine.capabilities, grammars=True)
        longest_s = PROGRAM_TIMEOUT_S if issubclass(environment, HarnessEnvironment) else TIMEOUT_S
        self._longest_s = longest_s * max(in_lockstep, 1)
        settings = plain_rollout_settings(max_turns=max_turns, max_tokens=max_tokens, episode_timeout_s=self._longest_s)
        seat = msgspec.structs.replace(settings.seat, **sampling)
        self._settings = replace(settings, seat=seat, gateway_sampling="check")
        self._dispatcher, self._runner = wire_dispatcher(
            environment, self.engine, self._journal, self._settings, self._failures, runner_type=_StateRunner
        )
        self._log = self._journal.turn_log(PARTITION)

    def entries(self, spec: EpisodeSpec) -> list[JournalEntry]:
        """Return the journal entries of an episode."""
        return self._log.read(spec.episode_id, spec.attempt)

    async def play(
        self, spec: EpisodeSpec, prefix: Sequence[JournalEntry] = (), answers: Sequence[JournalEntry] = ()
    ) -> ExecutedEpisode | Failure:
        """Play an episode; see `execute_episode`.

        Raises:
            GlobalRandomError: the environment draws from global generators; play it again.
        """
        try:
            _load_once(self._environment)
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
            return Failure(f"load() raised {describe_user_code_error(error)}")
        dispatcher, journal, log = self._dispatcher, self._journal, self._log
        for entry in prefix:
            log.append(entry)
        journal.write(Admission(spec=spec))  # not a member of a group
        try:
            running = self._runner.run(spec, self._environment, prefix, answers=answers)
            header = await self._ended(asyncio.get_running_loop().create_task(running), spec)
            if isinstance(header, Failure):
                return header
            await dispatcher.changed.wait_for(lambda: not len(dispatcher.in_flight))
        except GlobalRandomError:
            raise
        except EpisodeError as error:
            return Failure.of_episode(error, self._environment)
        except AgentRLError as error:
            return Failure(str(error))
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
            return Failure(f"run() raised {describe_user_code_error(error)}")
        if self._failures:
            return Failure(f"a child episode failed: {self._failures[0]}")
        if dispatcher.worker.last_failure:
            late = {str(end.header.drop_reason) for end in journal.of_kind(EpisodeEnd)} & {"episode_timeout"}
            return Failure(f"a child episode was dropped: {dispatcher.worker.last_failure}", "".join(late))
        ends = {end.spec.episode_id: end for end in journal.of_kind(EpisodeEnd)}
        dispatcher.buffer.counts.count_committed(ends[spec.episode_id].counted)
        return ExecutedEpisode(
            header=header,
            entries=self.entries(spec),
            states=self._runner.states[spec.episode_id],
            counts=dispatcher.buffer.counts,
            metrics=dict(ends[spec.episode_id].metrics),
            detail=ends[spec.episode_id].detail,
            cuts=_find_cuts(journal, log.entries, self._settings),
            has_turns=any(isinstance(entry.decode(), TurnEntry) for entry in log.entries),
        )

    async def _ended(self, running: asyncio.Task[EpisodeHeader], spec: EpisodeSpec) -> EpisodeHeader | Failure:
        """Wait for the end of an episode, and say now and then where it waits; one that takes too long is cancelled."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._longest_s
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=min(WAITING_S, max(end - clock(), 0.0)))
                if not running.done():
                    waits = self._waits(spec)
                    if clock() >= end:
                        what = "the program" if issubclass(self._environment, HarnessEnvironment) else "run()"
                        return Failure(f"{what} did not end within {self._longest_s:g} s: it {waits}", "time_limit")
                    self._on_wait(waits)
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})

    def _waits(self, spec: EpisodeSpec) -> str:
        """Say where an episode waits, and after how many turns."""
        turns = sum(isinstance(entry.decode(), TurnEntry) for entry in self.entries(spec))
        name = "answered request" if issubclass(self._environment, HarnessEnvironment) else "turn"
        place = self._runner.waits_at(spec)
        return f"waits{f' at {place}' if place else ''}, after {plural(turns, name)}"


class _EndedPrograms:
    """Programs of external agents that have ended, and wait for those of other episodes before their reward."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait until `release`."""
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]

    def release(self) -> None:
        """Let the rewards of the waiting programs be computed."""
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting = []


async def _keep_in_lockstep(
    engine: ScriptedEngine,
    programs: _EndedPrograms,
    running: Mapping[asyncio.Task[Any], str],
    patience_s: float,
) -> None:
    clock = SystemClock()
    seen: tuple[object, ...] = ()
    since = clock.monotonic()
    while True:
        await asyncio.sleep(LOCKSTEP_POLL_S)
        unfinished = {episode_id for task, episode_id in running.items() if not task.done()}
        at_call = {_ROOT.split(request_id)[0] for request_id in engine.requests_in_flight}
        state = (unfinished, at_call, len(programs.waiting))
        if state != seen:
            seen, since = state, clock.monotonic()
        is_late = clock.monotonic() - since > patience_s
        if len(at_call & unfinished) + len(programs.waiting) < len(unfinished) and not is_late:
            continue
        if at_call:
            engine.release_held()
            engine.hold_calls()
        else:
            programs.release()
        if is_late:
            patience_s = 0.0


@functools.cache
def _load_once(environment: type[Environment]) -> None:
    """Let a class load its data, as a worker does before its first episode."""
    environment.load()


def _find_cuts(journal: MemoryJournal, entries: Sequence[JournalEntry], settings: RolloutSettings) -> Counter[Cut]:
    """Count what the limits of the execution cut; an environment's own limits do not count."""
    limits = settings.seat
    cuts = Counter[Cut]()
    turns = Counter[tuple[str, str, int]]()
    for entry in entries:
        if isinstance(body := entry.decode(), TurnEntry):
            turns[entry.episode_id, body.seat, body.index] += 1
            is_full = len(body.tokens) >= limits.max_tokens
            cuts[Cut("turn", f"{limits.max_tokens:,} tokens")] += is_full and body.finish_reason == "length"
    full = {episode_id for (episode_id, _, _), number in turns.items() if number >= limits.max_turns}
    for end in journal.of_kind(EpisodeEnd):
        match end.header.stop_reason:
            case "max_turns":
                cuts[Cut("episode", plural(limits.max_turns, "turn"))] += end.spec.episode_id in full
            case "time_limit":
                cuts[Cut("episode", f"{settings.episode_timeout_s:g} s")] += 1
            case "context_length":
                cuts[Cut("episode", f"{limits.max_context:,} tokens")] += 1
    return +cuts


def format_cuts(cuts: Mapping[Cut, int]) -> str:
    """Return what the limits cut, as a clause.

    Example:
        >>> format_cuts({Cut("episode", "8 turns"): 1, Cut("turn", "512 tokens"): 2})
        '1 episode at its limit of 8 turns, 2 turns at its limit of 512 tokens'
    """
    return ", ".join(f"{plural(number, cut.what)} at its limit of {cut.limit}" for cut, number in cuts.items())


def plain_rollout_settings(
    *,
    max_turns: int = MAX_TURNS,
    max_tokens: int = 256,
    max_context: int = 1 << 20,
    tool_timeout_s: float = TIMEOUT_S,
    episode_timeout_s: float = TIMEOUT_S,
    on_code_change: OnCodeChange | None = None,
) -> RolloutSettings:
    """Return sampling settings and limits for episodes in `PlainChatFormat`."""
    return RolloutSettings(
        seat=SeatSettings(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            max_turns=max_turns,
            max_tokens=max_tokens,
            max_context=max_context,
        ),
        tool_timeout_s=tool_timeout_s,
        episode_timeout_s=episode_timeout_s,
        on_code_change=on_code_change,
        missing_scorer=StandInScorer,
    )


@dataclass(frozen=True, slots=True)
class StandInScorer:
    """Stands in for the scorers of a run: a score from 0 to 1 that depends on the request alone."""

    name: str
    per: ScoreOf = "turn"
    credit: ScoreCredit = "reward"

    async def score(self, request: ScoreRequest) -> Score:
        return Score(random_stream(request.seed).random())


def wire_dispatcher(
    environment: type[Environment],
    engine: Engine,
    store: JournalStore,
    settings: RolloutSettings,
    failures: list[BaseException],
    *,
    policy: str = POLICY,
    data_attempts: int = 1,
    runner_type: type[R] = EpisodeRunner,  # type: ignore[assignment]
) -> tuple[Dispatcher, R]:
    """Return the dispatcher, with its worker, and the runner of single episodes of an environment; one policy plays all
    seats.

    `failures` receives errors that no episode caused.
    """
    dispatcher = make_dispatcher(
        environment=environment,
        policy_of=lambda seat, group: policy,
        run_seed=0,
        group_size=1,
        max_in_flight=64,  # callers start their episodes one by one
        buffer=EpisodeBuffer((), WholeGroupRelease((), REWARD_ESTIMATORS["none"])),
        store=store,
        changed=ChangeCondition(),
        fail=failures.append,
    )
    runner = runner_type(
        engine=engine,
        chat_format=PlainChatFormat(),
        store=store,
        log=store.turn_log(PARTITION),
        host=DispatchingHost(dispatcher),
        clock=LoopClock() if isinstance(asyncio.get_running_loop(), VirtualTimeEventLoop) else SystemClock(),
        settings=settings,
    )
    dispatcher.run(
        AsyncioWorker(
            runner,
            environments={name_of(environment): environment},
            data_attempts=data_attempts,
            on_failure=failures.append,
        )
    )
    return dispatcher, runner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayResult:
    """Result of an episode."""

    reward: float
    """Sum of the rewards of all agents."""
    stop_reason: str
    """Why the episode ended: `completed`, or the limit that cut it."""
    metrics: dict[str, float]
    """Values of `ctx.metric` by name."""
    observations: tuple[str, ...] = field(repr=False)
    """Text of the new messages before each turn of the policy."""


def play(environment: str | type, task: Task, replies: Sequence[Reply], *, seed: int = 0) -> PlayResult:
    """Play one episode in which the policy gives `replies` in order, for all seats. None of them is cut.

    Replies that are never asked for are a warning.

    Args:
        environment: class, registered name, `module:Class` or path.
        task: task to play.
        replies: replies in order, each text, a tool call as `{"name": …, "arguments": {…}}`, or a list of calls.
        seed: seed of `ctx.rng`.

    Raises:
        CheckFailedError: the environment failed, lacks an `await`, needed more replies than there are, or took
            more than 30 s.
        InputError: the task or a reply has another form.
    """
    environment_class = resolve(environment)
    check_loaded_code(environment_class)
    if not isinstance(task, Task):
        raise InputError(f"play: the task is {reprlib.repr(task)}; write agentrl.Task(id=…, data={{…}})")
    texts = _texts(replies)
    result, turn_count = _play(environment_class, task, texts, seed)
    if turn_count < len(texts):
        unused = f"{len(texts) - turn_count} of {plural(len(texts), 'reply', 'replies')}"
        warnings.warn(
            f"{name_of(environment_class)}: the episode ended after {plural(turn_count, 'turn')}, and {unused} were "
            f"never asked for, the first of them {texts[turn_count]!r}",
            stacklevel=2,
        )
    return result


@outside_event_loop
def _play(environment_class: type[Environment], task: Task, texts: Sequence[str], seed: int) -> tuple[PlayResult, int]:
    """Play an episode; return its result and its number of turns."""
    turn_count = 0

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        nonlocal turn_count
        turn_count += 1
        if turn_count > len(texts):
            raise CheckFailedError(_too_few(turn_count, len(texts)))
        return [*texts[turn_count - 1].encode(), STOP_TOKEN]

    spec = spec_of(environment_class, task, 0, seed)
    longest = max((len(reply.encode()) for reply in texts), default=0)
    max_turns, max_tokens = max(MAX_TURNS, len(texts) + 1), max(MAX_TOKENS, longest + 1)
    problems: list[str] = []
    with missing_awaits(problems):
        outcome = event_loop.run(
            execute_episode(environment_class, spec, script, max_turns=max_turns, max_tokens=max_tokens)
        )
        if isinstance(outcome, Failure):
            gc.collect()  # the frames of an error hold its coroutines, which the next episode would be blamed for
    if isinstance(outcome, Failure):
        problems.append(outcome.text)
    elif turn_count > len(texts):  # and the environment's code caught the error
        problems.append(_too_few(turn_count, len(texts)))
    elif outcome.cuts:
        problems.append(f"the test cut off {format_cuts(outcome.cuts)}")
    if problems or isinstance(outcome, Failure):
        raise CheckFailedError(f"{spec.environment}: {'; '.join(problems)}")
    header = outcome.header
    turns = [body for entry in outcome.entries if isinstance(body := entry.decode(), TurnEntry)]
    prompts = tuple("\n".join(str(message["content"]) for message in turn.messages) for turn in turns)
    result = PlayResult(
        reward=header.reward or 0.0,
        stop_reason=header.stop_reason or "",
        metrics=outcome.metrics,
        observations=prompts,
    )
    return result, turn_count


def _too_few(asked: int, count: int) -> str:
    return f"the environment asked for reply {asked}, but play has only {plural(count, 'reply', 'replies')}"


def _texts(replies: object) -> list[str]:
    """Return the texts of replies.

    Raises:
        InputError: they are no list, or one of them is neither text nor tool calls.
    """
    if isinstance(replies, str | Mapping) or not isinstance(replies, Iterable):
        problem = "; all seats take their replies from one list, in the order of their turns"
        raise InputError(
            f"play: replies is {reprlib.repr(replies)}{problem if isinstance(replies, Mapping) else ''}: write a list, "
            "such as ['text', {'name': 'tool', 'arguments': {}}]"
        )
    texts = []
    for number, reply in enumerate(replies):
        try:
            texts.append(reply if isinstance(reply, str) else _calls_text(reply))
            texts[-1].encode()
        except (TypeError, ValueError, msgspec.MsgspecError) as error:  # also for arguments or text that is no Unicode
            raise InputError(
                f"play: replies[{number}] is {reprlib.repr(reply)} ({error}): write text, a tool call as "
                "{'name': …, 'arguments': {…}}, or a list of calls; a malformed call is text"
            ) from None
    return texts


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of a reply."""

    name: str
    arguments: dict[str, Any] = {}


def _calls_text(reply: object) -> str:
    calls = [dict(reply)] if isinstance(reply, Mapping) else reply
    texts = (msgspec.json.encode(call).decode() for call in msgspec.convert(calls, list[_Call]))
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


@contextlib.contextmanager
def missing_awaits(problems: list[str]) -> Iterator[None]:
    """Report coroutines that were never awaited, instead of warning about them; other warnings stay warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    texts = dict.fromkeys(str(warning.message) for warning in caught if "was never awaited" in str(warning.message))
    problems += [f"{text}: an `await` is missing before the call" for text in texts]
    for warning in caught:
        if str(warning.message) not in texts:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def random_policy(environment: type[Environment], *, calling: float = 0.7) -> Script:
    """Return a policy that calls tools with arguments of their schemas, takes legal actions or words that a game
    showed, or replies with a short text.

    Its reply depends only on the request, and has the form that an external agent asks for: a required call, or JSON.
    `calling` is the probability of a call in each turn, if there are tools.
    """
    tools = list(environment.tool_table().values()) if issubclass(environment, ToolEnvironment) else []
    is_game = issubclass(environment, GymEnvironment | GameEnvironment)
    chat_format = PlainChatFormat()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random_stream("check", request.seed)
        text = draw.choice(RANDOM_TEXTS)
        if is_game:
            shown = chat_format.decode(request.token_ids.tolist()[-MAX_READ_TOKENS:])
            _, is_listed, actions = shown.rpartition(LEGAL_ACTIONS)
            words = _FIRST_LINE.split(actions)[0].split(", ") if is_listed else _WORD.findall(shown)
            text = draw.choice(words or [text]) if draw.random() < (0.9 if is_listed else 0.5) else text
        if tools and draw.random() < calling:
            spec = draw.choice(tools).spec
            arguments = random_arguments(spec.parameters, draw)
            call = msgspec.json.encode({"name": spec.name, "arguments": arguments}).decode()
            text = f"<tool_call>{call}</tool_call>"
        if request.sampling.grammar:
            text = text_of_grammar(request.sampling.grammar, draw)
        return [*text.encode(), STOP_TOKEN]

    return script


class DemonstrationPolicy:
    """A policy that gives the replies of `demonstrate`. Children of the episodes get random replies.

    Args:
        environment: class with demonstrations.
        specs: specs of the episodes.
    """

    def __init__(self, environment: type[Environment], specs: Sequence[EpisodeSpec]) -> None:
        self._environment = environment
        self._specs = {spec.episode_id: spec for spec in specs}
        self._children = random_policy(environment)
        self._conversations: list[_Conversation] = []
        self.failure = ""
        """Why `demonstrate` itself failed; empty if it did not."""

    def __call__(self, request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        if "~" in request.request_id:  # of a child episode
            return [*self._children(request, policy, version)]
        context = request.token_ids.tolist()
        spec = self._specs[_ROOT.split(request.request_id)[0]]
        if any(request.request_id in conversation.requests for conversation in self._conversations):
            # The episode began again, after a draw from a global generator.
            self._conversations = [each for each in self._conversations if each.name[0] != spec.episode_id]
        conversation = self._find(spec, request.seat.removeprefix(f"{spec.environment}."), request.row, context)
        new = context[len(conversation.tokens) if request.row == conversation.row else 0 :]
        try:
            reply = format_reply(conversation.replies.next(_message_text(new)))
        except AgentRLError as error:
            self.failure = str(error)
            raise
        tokens = [*reply.encode(), STOP_TOKEN]
        conversation.row, conversation.tokens = request.row, context + tokens
        conversation.requests.add(request.request_id)
        return tokens

    def _find(self, spec: EpisodeSpec, seat: str, row: int, context: Sequence[int]) -> _Conversation:
        """Return the conversation that a request continues, or whose row it follows; else a new one."""
        name = (spec.episode_id, seat)
        of_seat = [conversation for conversation in self._conversations if conversation.name == name]
        for conversation in of_seat:
            if conversation.row == row and context[: len(conversation.tokens)] == conversation.tokens:
                return conversation
        for conversation in of_seat:
            if conversation.row == row - 1:
                return conversation
        replies = DemonstratedReplies(self._environment, spec.task, seat, len(of_seat), spec.seed)
        self._conversations.append(_Conversation(name, replies, row, []))
        return self._conversations[-1]


@dataclass(slots=True)
class _Conversation:
    """One agent's conversation in a demonstration."""

    name: tuple[str, str]
    """Its episode and seat."""
    replies: DemonstratedReplies
    row: int
    tokens: list[int]
    """Tokens of its current row, the last reply included."""
    requests: set[str] = field(default_factory=set)
    """Ids of its requests."""


def _message_text(tokens: Sequence[int]) -> str:
    """Return the text of the messages in tokens of `PlainChatFormat`, without a list of tools and the prompt for the
    reply."""
    starts = [at for at, token in enumerate(tokens) if token == START_TOKEN]
    messages = (PlainChatFormat().decode(tokens[start + 1 : end - 1]) for start, end in itertools.pairwise(starts))
    parts = (message.partition("\n") for message in messages)
    return "\n".join(text for role, _, text in parts if role != "tools")


def text_of_grammar(grammar: str, draw: random.Random) -> str:
    """Return a random text that fits a grammar of `reply_grammar`: a tool call, or JSON."""
    return _text_of(msgspec.json.decode(grammar)["format"], draw)


def _text_of(part: Mapping[str, Any], draw: random.Random) -> str:
    match part["type"]:
        case "or":
            return _text_of(draw.choice(part["elements"]), draw)
        case "const_string":
            return str(part["value"])
        case "tags_with_separator":
            tag = draw.choice(part["tags"])
            return f"{tag['begin']}{_text_of(tag['content'], draw)}{tag['end']}"
        case _:
            return msgspec.json.encode(_random_json(part["json_schema"], draw)).decode()


def _random_json(schema: Mapping[str, Any], draw: random.Random) -> Any:
    try:
        return random_value(schema, draw, schema)
    except UnknownSchemaError:  # of some part: the others are still valid
        return random_arguments(schema, draw)


def random_arguments(schema: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a random value for each property of an object's schema."""
    parts = schema.get("properties", {})
    return {name: _random_argument(part, draw, schema) for name, part in parts.items()}


def _random_argument(schema: Any, draw: random.Random, root: Mapping[str, Any]) -> Any:
    try:
        return random_value(schema, draw, root)
    except UnknownSchemaError:
        return "some text"
