"""The environment checker: runs an environment with a random policy, kills it at every entry, and compares.

On a few tasks it shows that the class is well formed, its tasks are stable and serializable, its rewards are numbers,
its own code changes nothing outside, and executing `run()` again over any prefix of its journal yields the same episode
(transcript, reward, final state of resources) if the outside world (effects, external tools, clocks) answers as before.
It runs the environment's code; it needs neither a model nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeVar

from agentrl.core import event_loop
from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError, describe_user_code_error, is_user_code
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeSpec, PolicyVersion, Task
from agentrl.core.text import plural, shorten_lines, strip_numbers
from agentrl.engines.scripted import Script
from agentrl.environment.demonstrations import has_demonstrations
from agentrl.environment.environment import MAX_READ_TASKS, Environment, Split, checked_source
from agentrl.environment.games import LEGAL_ACTIONS
from agentrl.environment.harness import HarnessEnvironment, missing_program
from agentrl.environment.overrides import misspelled_attributes
from agentrl.environment.registry import resolve
from agentrl.environment.schema_values import UnknownSchemaError, random_value
from agentrl.environment.task_contents import SourceContents, SplitOverlap, read_contents
from agentrl.environment.tools import ToolEnvironment
from agentrl.gateway.options import NO_PENALTIES, SAMPLING_FIELDS, UNSUPPORTED, ignored_fields_line
from agentrl.journal.entries import (
    EffectEntry,
    EntryBody,
    ExternalRequestParameters,
    JournalEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
    sum_by_key,
)
from agentrl.observe.blocked_loop import PROGRAM_REMEDY, watch_event_loop
from agentrl.observe.blocked_loop import REMEDY as BLOCKING_REMEDY
from agentrl.observe.metrics import PROGRAM_FAILED
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.episode import GatewaySampling
from agentrl.testing.concurrency_check import compare_concurrent_episodes
from agentrl.testing.differences import differing_call, is_external
from agentrl.testing.execution import (
    DEMONSTRATED_TURNS,
    MAX_TOKENS,
    Cut,
    DemonstrationPolicy,
    ExecutedEpisode,
    Failure,
    execute_episode,
    format_cuts,
    missing_awaits,
    random_policy,
    spec_of,
)
from agentrl.testing.hash_order import may_depend_on_hash_order
from agentrl.testing.load_clock import LoadClock, TimeLimit
from agentrl.testing.malformed_reply_check import TASKS as FORMAT_TASKS
from agentrl.testing.malformed_reply_check import EpisodeFormatReward, find_format_reward_faults, one_seat
from agentrl.testing.new_process import (
    IMPORTS,
    DeadProcessError,
    Play,
    Played,
    SilentProcessError,
    importable_name,
    play_in_new_process,
    program_policy,
    refuse_in_new_process,
)
from agentrl.testing.program_calls import ProgramCall, offered_schemas, program_calls
from agentrl.testing.report import CheckResult, EnvironmentReport, Finding
from agentrl.testing.resumption import MAX_CUTS, Resumptions, resume_at_every_entry, resume_over_replies
from agentrl.testing.reward_check import find_reward_faults
from agentrl.testing.side_effects import MODEL_ADVICE, calls_language_model, watch_side_effects
from agentrl.testing.virtual_time import simulate
from agentrl.testing.wrong_calls import play_wrong_calls, shown_tools

T = TypeVar("T")

WRONG_CALL_TASKS = 2
"""Number of tasks on which each kind of wrong tool call is played."""
DEMONSTRATED_S = 10.0
"""Seconds after which no further demonstration is played, because episodes may be slow."""
INTERRUPTED_S = 10.0
"""Seconds for which the program of an external agent may block the event loop, before its call is interrupted."""
PLAYING_S = 20.0
"""Seconds of an idle machine (`LoadClock`) for playing and resuming episodes, beyond one episode and one resumption,
because its tools may be slow."""
MIN_FORMAT_REWARDS = 4
"""Minimum number of episodes with readable and unreadable replies for a statement about a constant reward."""
MIN_REFUSED = 3
"""Number of refused calls of a tool, or illegal actions of a game, that show a fault if none was accepted."""
FORMAT_S = 15.0
"""Seconds after which no further reply in a broken format is played."""
ANSWERS_S = 10.0
"""Seconds after which the answers of tasks are no longer played, because episodes may be slow."""
WRONG_CALLS_S = 20.0
"""Seconds after which no further kind of wrong tool call is played."""
COMPARED_S = 10.0
"""Seconds after which no further tasks of a split are compared, because reading one may be slow."""
HASH_SEEDS = (1, 44, 38, 50, 9, 24, 67)
"""Values of PYTHONHASHSEED under which a task is played again. A set of any two of 67 usual names of seats (`alice`,
`bob`, `solver`, `judge`, …) has both orders among them, so one of them differs from this process."""
_PLAYING = "playing episodes, and resuming each after kills"
_CODE_ERRORS = re.compile(
    r"(?:ImportError|ModuleNotFoundError|NameError|NotImplementedError|UnboundLocalError)\b"
    r"|AttributeError: '(?P<type>\w+)' object has no attribute"
)
"""Exceptions that the arguments do not explain, if `type` is the environment: a tool that always raises one of them is
broken."""
_PROGRAM_ERRORS = re.compile(
    r"(?:AttributeError|ImportError|ModuleNotFoundError|NameError|NotImplementedError|TypeError|UnboundLocalError)\b"
)
"""Exceptions that hardly ever refuse a call on purpose."""
_PARSE_ERRORS = re.compile(r"\b(?:JSONDecodeError|SyntaxError|ValidationError)\b")
"""Exceptions of code that reads random text as data: the text explains them, though the message may not contain it."""
_ERROR_TEXT = re.compile(r"Traceback \(most recent|\b\w*(?:Error|Exception)\b|\b(?i:error)\b")
"""What a tool's result contains if the external agent made it of an exception."""
_INNER_REPR = re.compile(r"<[\w.<>]+ (?:object )?at 0x[0-9a-f]+>|\[(?:\{'role': '|Message\(role=)")
"""The `repr` of an object, or the beginning of that of a list of messages."""
_CONTAINER_REPR = re.compile(r"""\[(?:['"]|\{['"]|\w+\(\w+=)|\{['"]""")
"""The beginning of a list or a dict of texts or objects."""
_PROOF_TEXTS = {
    "replay": "each time it continued exactly where it was",
    "snapshot": "each time it continued exactly where it was, with resources restored from their snapshots",
    "pinned": "it continued exactly where it was, or started over if it had lost a pinned resource, as declared",
}


@dataclass(slots=True, kw_only=True)
class Subject:
    """The environment under check, and what earlier checks played of it."""

    environment: type[Environment]
    requested_tasks: Sequence[Task] | None
    """Tasks that the caller chose; None for the first training tasks."""
    num_episodes: int
    seed: int
    options: Mapping[str, Any]
    sampling: Mapping[str, float]
    max_tokens: float | None
    """`sampling.max_tokens` of the run; None: unknown."""
    gateway_sampling: GatewaySampling
    on_progress: Callable[[str, str], None]
    hash_order: bool
    report: EnvironmentReport
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs a coroutine in the check's event loop."""
    tasks: list[Task] = field(default_factory=list)
    played: list[tuple[Task, ExecutedEpisode]] = field(default_factory=list)
    """Episodes of the random policy that did not fail, with their tasks."""
    failed: list[Failure] = field(default_factory=list)
    """Failures of its other episodes."""
    offered_tools: dict[str, set[str]] = field(default_factory=dict)
    """Names of the tools that prompts showed, keyed by environment and seat, such as `Solve.solver`."""
    schemas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters of the tools that an external agent offered in earlier episodes, keyed by tool."""
    format_episodes: list[ExecutedEpisode] = field(default_factory=list)
    """Episodes that compare unreadable replies with readable ones."""
    has_won_demonstration: bool = False
    longest_s: float = 0.0
    """Seconds that the longest episode took, of the random policy or demonstrated."""

    @property
    def passed(self) -> bool:
        """Whether no check has found a fault so far."""
        return self.report.passed

    @property
    def is_external(self) -> bool:
        """Whether the environment runs an external agent, whose code is not the user's."""
        return issubclass(self.environment, HarnessEnvironment)

    @property
    def tool_names(self) -> set[str]:
        """Names of the tools that the policy is shown; of an external agent, those seen so far."""
        if self.is_external:
            return set().union(*self.offered_tools.values())
        return set(self.environment.tool_table()) if issubclass(self.environment, ToolEnvironment) else set()

    @property
    def run_values(self) -> Mapping[str, Any]:
        """The run's sampling parameters with which requests are compared."""
        return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **self.sampling}

    @property
    def rewards(self) -> list[float]:
        """Rewards of the random policy's episodes."""
        return [episode.header.reward or 0.0 for _, episode in self.played]

    @property
    def constant_reward(self) -> float | None:
        """The reward above 0 that all replies earned, the unreadable ones included; at 0, chance may fail."""
        rewards = {*self.rewards, *(episode.header.reward or 0.0 for episode in self.format_episodes)}
        is_constant = len(self.format_episodes) >= MIN_FORMAT_REWARDS and len(rewards) == 1
        return next(iter(rewards)) if is_constant and min(rewards) > 0 else None

    def bodies(self) -> Iterator[EntryBody]:
        """The journal entries of the random policy's episodes."""
        return (entry.decode() for _, episode in self.played for entry in episode.entries)

    def requests(self) -> list[ExternalRequestParameters]:
        """What an external agent asked for in the random policy's episodes, failed ones included."""
        entries = [episode.entries for _, episode in self.played] + [failure.entries for failure in self.failed]
        bodies = (entry.decode() for entry in itertools.chain.from_iterable(entries))
        return [body.request for body in bodies if isinstance(body, TurnEntry) and body.request is not None]

    def program_calls(self) -> list[ProgramCall]:
        """Return the tool calls of an external agent in the random policy's episodes."""
        return [call for _, episode in self.played for call in program_calls(episode.entries)]

    def policy(self) -> Script:
        """Return the random policy, which notes the tools that it is shown."""
        script, chat_format = random_policy(self.environment), PlainChatFormat()
        if self.is_external:
            script = program_policy(self.environment, schemas={**self.schemas}, marked=False)

        def noting(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
            if tools := shown_tools(chat_format.decode(request.token_ids.tolist())):
                self.offered_tools.setdefault(request.seat.rpartition(":")[2], set()).update(tools)
            return script(request, policy, version)

        return noting


class Check(NamedTuple):
    """One check: it plays, or looks at what was played, and reports findings and figures."""

    name: str
    run: Callable[[Subject, CheckResult], None]
    applies: Callable[[Subject], bool] = lambda subject: True


@outside_event_loop
def check_environment(  # noqa: PLR0913 (one keyword per setting)
    environment: str | type,
    *,
    tasks: Sequence[Task] | None = None,
    episodes: int = 4,
    seed: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    sampling: Mapping[str, float] = MappingProxyType({}),
    gateway_sampling: GatewaySampling = "agent",
    on_progress: Callable[[str, str], None] | None = None,
    hash_order: bool = False,
) -> EnvironmentReport:
    """Check an environment; never raises because of the environment's behavior.

    Args:
        environment: class, registered name, `module:Class` or path.
        tasks: tasks to play; default: the first training tasks.
        episodes: number of episodes; more are played until the policy has called every tool.
        seed: seed of the random policy.
        options: arguments of the environment's task source.
        sampling: `temperature`, `top_p`, `top_k`, `min_p`, `max_turns` and `max_tokens` of the run, if they are not the
            defaults. The random policy's own replies may be longer.
        gateway_sampling: the run's `gateway.sampling`.
        on_progress: receives the phase of the check, and what is about to be checked.
        hash_order: also play the first training task in processes with other hash seeds, as after `--resume`, unless
            the code contains nothing that depends on them; a process must be able to import the class from its module.
    """
    refuse_in_new_process()
    report = EnvironmentReport(environment if isinstance(environment, str) else environment.__qualname__)
    on_progress = on_progress or (lambda phase, part: None)
    on_progress("importing it", "")
    try:
        environment_class = resolve(environment)
    except AgentRLError as error:
        report.begin("import").fault(str(error))
        return report
    is_external = issubclass(environment_class, HarnessEnvironment)
    if issubclass(environment_class, HarnessEnvironment) and (problem := missing_program(environment_class)):
        report.begin("program").fault(problem)
        return report
    for module in IMPORTS if is_external else IMPORTS[:1]:
        import_module(module)
    with asyncio.Runner(loop_factory=event_loop.EpisodeEventLoop) as runner:
        subject = Subject(
            environment=environment_class,
            requested_tasks=tasks,
            num_episodes=episodes,
            seed=seed,
            options=options,
            sampling={name: value for name, value in sampling.items() if name != "max_tokens"},
            max_tokens=sampling.get("max_tokens"),
            gateway_sampling=gateway_sampling,
            on_progress=on_progress,
            hash_order=hash_order,
            report=report,
            run=runner.run if is_external else event_loop.run,  # clients keep connections, which belong to a loop
        )
        for check in CHECKS:
            if check.applies(subject):
                check.run(subject, report.begin(check.name))
    return report


@outside_event_loop
def replay_from_every_entry(
    environment: str | type, *, tasks: Sequence[Task] | None = None, episodes: int = 2, schedules: Sequence[int] = (0,)
) -> EnvironmentReport:
    """Play episodes in virtual time, under one schedule per seed, and run each again from every entry of its journal.

    In contrast to `check_environment`, schedules are shuffled, which reveals branches that share state without a call
    between. External tools must be coroutines, because a thread cannot be simulated.

    Args:
        environment: as for `check_environment`.
        tasks: tasks to play; default: the first training tasks.
        episodes: number of episodes.
        schedules: seeds of the simulated loop.
    """
    refuse_in_new_process()
    report = EnvironmentReport(environment if isinstance(environment, str) else environment.__qualname__)
    environment_class = resolve(environment)
    script = random_policy(environment_class)
    chosen_tasks = _choose_tasks(environment_class, tasks, episodes, report.begin("tasks"))
    result, rewards, totals = report.begin("episodes"), list[float](), Resumptions()

    async def play_and_resume(spec: EpisodeSpec) -> str | None:
        first = await execute_episode(environment_class, spec, script)
        if isinstance(first, Failure):
            return first.text
        rewards.append(first.header.reward or 0.0)
        return await resume_at_every_entry(environment_class, spec, script, first, totals)

    for number, task in enumerate(chosen_tasks[:episodes]):
        spec = spec_of(environment_class, task, number, 0)
        for schedule in schedules:
            problems: list[str] = []
            with missing_awaits(problems):
                problem = simulate(partial(play_and_resume, spec), seed=schedule)
                if problem:
                    gc.collect()  # the frames of an error hold its coroutines
            for text in [*problems, *[problem] * bool(problem)]:
                result.fault(f"task {task.id!r}, schedule {schedule}: {text}")
            if result.findings:
                return report
    _show_resumptions(result, rewards, totals)
    return report


# --- checks of the class and its tasks --------------------------------------------------------------------------------


def check_names(subject: Subject, result: CheckResult) -> None:
    """Attributes that are almost settings, and methods that may lack `@agentrl.tool`."""
    for text in misspelled_attributes(subject.environment):
        result.warn(text)
    if methods := _unmarked_methods(subject.environment):
        names = ", ".join(f"`{name}`" for name in methods)
        result.warn(f"{subject.report.environment} defines no tool; is @agentrl.tool missing above {names}?")


def _unmarked_methods(environment: type[Environment]) -> list[str]:
    """Return the public methods of a tool environment without tools; methods that its module calls are left out."""
    if not issubclass(environment, ToolEnvironment) or environment.tool_table() or environment.mcp_servers:
        return []
    source = environment.source()
    return [
        name
        for name in dir(environment)
        if not name.startswith("_") and not hasattr(ToolEnvironment, name)
        if inspect.isfunction(method := inspect.getattr_static(environment, name))
        if not method.__module__.startswith("agentrl.") and not re.search(rf"\.{name}\b", source)
    ]


def check_tasks(subject: Subject, result: CheckResult) -> None:
    """The first tasks are well formed and stable."""
    subject.on_progress("listing and comparing its tasks", "")
    subject.tasks = _choose_tasks(
        subject.environment, subject.requested_tasks, _num_listed(subject), result, subject.options
    )


def _num_listed(subject: Subject) -> int:
    return max(subject.num_episodes, FORMAT_TASKS)


def _choose_tasks(
    environment: type[Environment],
    requested: Sequence[Task] | None,
    count: int,
    result: CheckResult,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[Task]:
    """Return the tasks to play: the requested ones, or the first training tasks."""
    if requested is None:
        return _list_tasks(environment, count, result, options)
    if not requested:
        result.fault("tasks is empty, so nothing was checked", "Leave it out to play the first training tasks")
    return list(requested)


def _list_tasks(
    environment: type[Environment], count: int, result: CheckResult, options: Mapping[str, Any], split: Split = "train"
) -> list[Task]:
    """Return the first tasks of a split, and report their faults."""
    try:
        source, second_source = (
            checked_source(environment, split, environment.tasks(split, seed=0, **options)) for _ in range(2)
        )
        chosen_tasks = [source[index] for index in range(min(count, len(source)))]
        second_draw = [second_source[index] for index in range(len(chosen_tasks))]
    except EnvironmentDefinitionError as error:
        result.fault(str(error))
        return []
    except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
        result.fault(f"tasks({split!r}, seed=0) raised {describe_user_code_error(error)}")
        return []
    if not chosen_tasks and split == "train":
        result.fault("tasks('train', seed=0) is empty")
    for first, second in zip(chosen_tasks, second_draw, strict=True):
        if not isinstance(first, Task):
            result.fault(
                f"tasks({split!r})[…] is {type(first).__name__}, not agentrl.Task", "Write agentrl.Task(id=…, data={…})"
            )
            return []
        if first != second:
            result.fault(f"task {first.id!r} differs on second access", "Draw it from the seed and index")
    return chosen_tasks


def check_splits(subject: Subject, result: CheckResult) -> None:
    """Compare the tasks of both splits, and tasks that share an id, up to a limit on their number and on the time."""
    environment = subject.environment
    splits = [split for split in ("held_out", "train") if split in environment.splits]
    if "held_out" in splits:
        _list_tasks(environment, _num_listed(subject), result, subject.options, "held_out")
    if not subject.passed:
        return
    contents: dict[str, SourceContents] = {}
    for split in splits:
        try:
            source = environment.tasks(split, seed=0, **subject.options)
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
            result.fault(f"tasks({split!r}, seed=0) raised {describe_user_code_error(error)}")
            return
        clock = LoadClock().monotonic
        contents[split] = read_contents(source, seconds=COMPARED_S, of_endless=MAX_READ_TASKS, clock=clock)
        if contents[split].problem:
            result.fault(f"tasks({split!r}, seed=0){contents[split].problem}")
            return
    held_out = {name: each for name, each in contents.items() if name != "train"}
    overlap = SplitOverlap.of(contents.get("train"), held_out)
    for text in overlap.warnings:
        result.warn(text)
    uncompared = sum(each.size - each.num_read for each in contents.values())
    result.figures = {**asdict(overlap), "uncompared_tasks": uncompared}
    if uncompared:
        result.remarks.append(
            f"{plural(uncompared, 'task')} {'was' if uncompared == 1 else 'were'} not compared, so more training tasks "
            f"may also be held out: the check reads up to {MAX_READ_TASKS:,} tasks of a split, for up to "
            f"{COMPARED_S:g} s."
        )


# --- episodes of the random policy ------------------------------------------------------------------------------------


def check_episodes(subject: Subject, result: CheckResult) -> None:
    """Play episodes, kill and resume each, until one has a fault or the time is over."""
    tasks = subject.tasks[: subject.num_episodes]
    limit, totals, unplayed = TimeLimit(PLAYING_S), Resumptions(), 0
    for number, task in _tasks_to_play(subject, tasks):
        if number and limit.left < 0:
            unplayed = max(len(tasks) - number, 0)
            break
        share_s = limit.left / max(len(tasks) - number, 1)  # shared by the tasks not yet played
        loop_problems: list[str] = []  # problems that the loop's monitor reports, some only when the loop is closed
        with missing_awaits(loop_problems):
            subject.run(_check_episode(subject, task, number, result, loop_problems, totals, share_s=share_s))
            gc.collect()  # an error that was never retrieved is reported when its task is collected
        result.findings[:0] = [Finding("fault", f"task {task.id!r}: {text}") for text in loop_problems]
        if not subject.passed:
            break
    _show_resumptions(result, subject.rewards, totals, requests=_num_requests(subject).total())
    result.figures["unplayed_tasks"] = unplayed
    cuts = sum((episode.cuts for _, episode in subject.played), Counter[Cut]())
    result.figures["cuts"] = {cut.limit: number for cut, number in cuts.items()}
    if cuts:
        result.remarks.append(f"The check cut off {format_cuts(cuts)}.")
    left_out = [plural(totals.untried_kills, "kill")] * bool(totals.untried_kills)
    left_out += [plural(unplayed, "task")] * bool(unplayed)
    if left_out:
        result.leave_out(" and ".join(left_out), PLAYING_S, f", and kills an episode at most {MAX_CUTS} times")
    if totals.untried_kills and not subject.is_external:
        result.remarks.append(
            "Each resume repeats the episode's tool calls, also in training, except those of "
            "@agentrl.tool(external=True)."
        )


def _tasks_to_play(subject: Subject, tasks: Sequence[Task]) -> Iterator[tuple[int, Task]]:
    """Yield each task once; then repeat tasks a few times while the policy has called some but not all of the tools, or
    one that failed too few times to tell why."""
    for number in range(4 * len(tasks)):  # at most four episodes per task
        if number >= len(tasks):
            calls, failed = _tool_calls(subject)
            is_clear = all(number >= MIN_REFUSED or failed[name] < max(number, 1) for name, number in calls.items())
            if not calls or (is_clear and subject.tool_names <= calls.keys()):
                break
        yield number, tasks[number % len(tasks)]


async def _check_episode(
    subject: Subject,
    task: Task,
    number: int,
    result: CheckResult,
    loop_problems: list[str],
    totals: Resumptions,
    *,
    share_s: float,
) -> None:
    """Check an episode, for about `share_s`."""
    environment = subject.environment
    clock = LoadClock()
    began = clock.monotonic()
    spec = spec_of(environment, task, number, subject.seed)
    script = subject.policy()

    def on_progress(part: str) -> None:
        subject.on_progress(_PLAYING, f"episode {number + 1}, task {task.id!r}: {part}")

    on_progress("playing it")
    with watch_side_effects(environment) as side_effects:
        first = await _execute_interruptibly(subject, spec, script, loop_problems.append, on_progress)
    if first is None:
        if not loop_problems:  # calls at many places, each too short for a finding
            result.fault(f"task {task.id!r}: env check interrupted it: it blocked the event loop", PROGRAM_REMEDY)
        return
    subject.longest_s = max(subject.longest_s, clock.monotonic() - began)
    for text in side_effects.findings.values():
        result.fault(f"task {task.id!r}: {text}")
    if side_effects.asked_model:
        loop_problems.clear()  # the blocking call was the model's own answer, which must be replaced, not awaited
    if isinstance(first, Failure):
        asks = calls_language_model(side_effects.source) and not side_effects.findings and not subject.is_external
        subject.failed.append(first)
        result.fault(f"task {task.id!r}: {first.text}", f"By its imports or addresses {MODEL_ADVICE}" if asks else "")
        return
    subject.played.append((task, first))
    if subject.is_external:
        subject.schemas.update(offered_schemas(first.entries))
    if loop_problems:  # a blocking environment would block again for every entry
        return
    if issubclass(environment, HarnessEnvironment):
        problem = await resume_over_replies(
            environment, spec, script, first, totals, on_progress, sampling=subject.sampling
        )
    else:
        episode_s = max(clock.monotonic() - began, 1e-3)
        max_cuts = max(int(share_s / episode_s) - 1, 1 if number == 0 else 0)
        problem = await resume_at_every_entry(environment, spec, script, first, totals, on_progress, max_cuts=max_cuts)
    if problem:
        result.fault(f"task {task.id!r}, {problem}")


async def _execute_interruptibly(
    subject: Subject,
    spec: EpisodeSpec,
    script: Script,
    on_problem: Callable[[str], None],
    on_progress: Callable[[str], None],
) -> ExecutedEpisode | Failure | None:
    """Execute an episode, and report code that blocks the event loop twice for longer than 0.3 s. A program of an
    external agent that blocks it for long is interrupted; returns None then, because what the program makes of its
    interruption says nothing."""
    clock = LoadClock()
    remedy = PROGRAM_REMEDY if subject.is_external else BLOCKING_REMEDY
    blocked_s, blocked_at, is_interrupted = 0.0, clock.monotonic(), False

    def on_blocked(place: str, seconds: float) -> None:
        # Shown at once. A program that waits in the loop's thread for its own model's reply would wait until its
        # client's timeout of minutes.
        nonlocal blocked_s, blocked_at
        on_progress(f"{place} blocks the event loop: {remedy}")
        now = clock.monotonic()
        is_same_call = now - blocked_at <= seconds + 1.0
        blocked_s, blocked_at = seconds + is_same_call * blocked_s, now
        if subject.is_external and blocked_s > INTERRUPTED_S:
            blocked_s = 0.0
            interrupt()

    def cancel() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        executing.cancel()

    with (
        _interruptible(cancel) as interrupt,
        watch_event_loop(on_problem, repeated_s=0.3, users_only=True, remedy=remedy, count=on_blocked, at_end=True),
    ):
        executing = asyncio.get_running_loop().create_task(
            execute_episode(subject.environment, spec, script, sampling=subject.sampling, on_wait=on_progress)
        )
        try:
            outcome = await executing
        except asyncio.CancelledError:
            if not is_interrupted:
                raise
    return None if is_interrupted else outcome


@contextlib.contextmanager
def _interruptible(cancel: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Yield a function that calls `cancel`, and raises `CancelledError` in the user's code that this thread runs; for
    other threads. Clients that retry after errors do not catch it. It does nothing unless this is the main thread, the
    only one that receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        stack, is_import = ([], False) if frame is None else event_loop.user_frames(frame)
        if stack and is_user_code(stack[0].f_code.co_filename) and not is_import:
            cancel()
            raise asyncio.CancelledError

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)  # None: not set from Python


def _show_resumptions(result: CheckResult, rewards: Sequence[float], totals: Resumptions, requests: int = 0) -> None:
    result.figures |= {
        "episodes": len(rewards),
        "rewards": [*rewards],
        "resumptions": totals.number,
        "resume_class": totals.resume_class,
        "untried_kills": totals.untried_kills,
    }
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    asked = f"{plural(requests, 'request')}, " if requests else ""
    result.shown = (
        f"{plural(len(rewards), 'episode')} of a random policy ({asked}mean reward {mean:.2f}), killed and resumed "
        f"{plural(totals.number, 'time')}: {_PROOF_TEXTS[totals.resume_class]}."
    )


def check_turns(subject: Subject, result: CheckResult) -> None:
    """Some seat acts."""
    if any(episode.has_turns for _, episode in subject.played):
        return
    owner, *bases = [base for base in subject.environment.__mro__ if "run" in vars(base)]
    is_override = not all(getattr(vars(base)["run"], "__isabstractmethod__", False) for base in bases)
    advice = "call `await super().run(ctx)` in it" if is_override else "call `await ctx.agent(seat).act(…)` in it"
    result.fault(
        f"no seat acted in any of {plural(len(subject.played), 'episode')}, so there is nothing to train on",
        f"Look at {owner.__name__}.run: {advice}",
    )


def check_rewards(subject: Subject, result: CheckResult) -> None:
    """Seats that act get a reward. A seat that never gets one while others do is left to the configuration, which may
    give it to a policy that does not learn, such as a judge."""
    rewarded, unrewarded, cut_short = set[str](), dict[str, str](), Counter[str]()
    for task, episode in subject.played:
        if episode.header.stop_reason != "completed":  # `truncated_reward` counts
            if all(trajectory.reward is None for trajectory in episode.header.trajectories):
                cut_short[str(episode.header.stop_reason)] += 1
            continue
        for trajectory in episode.header.trajectories:
            if trajectory.reward is None:
                unrewarded.setdefault(trajectory.seat, task.id)
            else:
                rewarded.add(trajectory.seat)
    advice = "Call agent.reward(…) in run()"
    if subject.is_external:
        advice = "Return one for it from reward(), as {seat: number}"
    for seat, task_id in unrewarded.items():
        if seat in rewarded or not rewarded:
            result.fault(f"task {task_id!r}: seat {seat!r} acted but was given no reward", advice)
    if cut_short and cut_short.total() == len(subject.played):
        reasons = ", ".join(f"{reason} ({plural(number, 'time')})" for reason, number in cut_short.items())
        result.warn(
            f"no episode got a reward: each was cut short by {reasons}",
            "If the policy's will be too, raise that limit, or set truncated_reward in the class",
        )
    judges = {seat: task_id for seat, task_id in unrewarded.items() if rewarded and seat not in rewarded}
    result.figures["unrewarded_seats"] = judges
    if judges:
        result.remarks.append(
            f"Never rewarded: {', '.join(judges)}. A frozen, remote or bot policy must hold such a seat: with a "
            "trained one every episode is dropped (no_reward)."
        )


def check_programs(subject: Subject, result: CheckResult) -> None:
    """The program of an external agent ends without an error in some episode. The same error in all of them is a fault;
    different errors may come from random replies."""
    errors = [episode.detail for _, episode in subject.played if episode.metrics.get(PROGRAM_FAILED)]
    if not errors or len(errors) < len(subject.played):
        return
    problem = (
        f"the program failed in all of {plural(len(errors), 'episode')}, which got failed_reward = "
        f"{_failed_reward(subject.environment)}; of the last one, {shorten_lines(errors[-1], 600)}"
    )
    if _is_one_error(errors) and not _is_of_parsing(errors[0]):
        result.fault(
            problem,
            "Fix it: training would reward all episodes alike. If random replies cause it, let the program handle "
            "them, and end without an error",
        )
    else:
        result.warn(problem)


def _is_one_error(errors: Sequence[str]) -> bool:
    """Whether messages differ in nothing but numbers."""
    return len({strip_numbers(error) for error in errors}) == 1


def _failed_reward(environment: type[Environment]) -> float | None:
    return environment.failed_reward if issubclass(environment, HarnessEnvironment) else None


def check_tools(subject: Subject, result: CheckResult) -> None:
    """Tools that raise or time out: the policy sees this as observations, so they are warnings. A tool is broken if it
    does so in every call, for a reason that is not in the arguments."""
    if subject.is_external:
        _check_program_tools(subject, result)
        return
    calls, raised = Counter[str](), Counter[str]()
    errors: dict[tuple[str, str], list[ToolEntry]] = {}
    for body in subject.bodies():
        if isinstance(body, ToolEntry):
            calls[body.name] += body.outcome in ("ok", "error", "timeout")
            if body.outcome in ("error", "timeout"):
                raised[body.name] += 1
                errors.setdefault((body.name, body.location), []).append(body)
    for (name, _), entries in errors.items():
        problem = f"{_tool_errors_line(entries)}, in {len(entries)} of {plural(calls[name], 'call')}"
        answers = [(entry.error, entry.arguments) for entry in entries]
        if raised[name] == calls[name] and not _is_of_arguments(answers, subject.environment):
            result.fault(
                problem,
                "Fix it. If the tool is meant to refuse such calls, return the reason as text, or narrow the types of "
                "its parameters to what it accepts",
            )
        else:
            result.warn(problem, "Fix it, or ignore this if the tool is meant to refuse such calls")
    called = {*_tool_calls(subject)[0]}
    uncalled = sorted(subject.tool_names - called) if called else []
    result.figures = {
        "called": sorted(called),
        "uncalled": uncalled,
        "tool_calls": dict(calls),
        "tool_errors": dict(raised),
        "offered_tools": {seat: sorted(tools) for seat, tools in subject.offered_tools.items()},
    }
    if uncalled:
        result.remarks.append(f"Never called, and not tried: {', '.join(uncalled)}.")


def _check_program_tools(subject: Subject, result: CheckResult) -> None:
    """Tools of an external agent that answer each call with the same error, for a reason that is not in the arguments.
    The agent runs them itself, so only the text that it sends back is known."""
    by_tool: dict[str, list[ProgramCall]] = {}
    for call in subject.program_calls():
        by_tool.setdefault(call.name, []).append(call)
    errors: dict[str, int] = {}
    for name, calls in by_tool.items():
        answers = [(call.result, call.arguments) for call in calls if call.result is not None]
        errors[name] = sum(_ERROR_TEXT.search(text) is not None for text, _ in answers)
        if answers and errors[name] == len(answers) and not _is_of_arguments(answers, subject.environment):
            result.warn(
                f"tool {name} answered all of {plural(len(answers), 'call')} with the same error: "
                f"{shortened_repr(answers[-1][0])}",
                "Fix it, or ignore this if the tool is meant to refuse such calls",
            )
        elif len(answers) >= MIN_REFUSED and len({text for text, _ in answers}) == 1:  # some libraries send only that
            result.remarks.append(
                f"Tool {name} returned the same text in all of {plural(len(answers), 'call')}: "
                f"{shortened_repr(answers[0][0])}."
            )
    uncalled = sorted(subject.tool_names - by_tool.keys())
    result.figures = {
        "called": sorted(by_tool),
        "uncalled": uncalled,
        "tool_calls": {name: len(calls) for name, calls in by_tool.items()},
        "tool_errors": {name: number for name, number in errors.items() if number},
        "offered_tools": {seat: sorted(tools) for seat, tools in subject.offered_tools.items()},
    }
    if not by_tool and subject.played:
        reason = f"although requests offered {', '.join(uncalled)}" if uncalled else "because no request offered one"
        result.remarks.append(f"No tool was called in these episodes, {reason}.")
    elif uncalled:
        result.remarks.append(f"Never called, and not tried: {', '.join(uncalled)}.")


def _is_of_arguments(answers: Sequence[tuple[str, Any]], environment: type[Environment]) -> bool:
    """Whether the arguments may explain why calls raised: the errors differ, name an argument, or are too few.

    Args:
        answers: error and arguments of each call.
        environment: class of the environment.
    """
    errors = [error for error, _ in answers]
    if _is_of_code(errors[0], environment):
        return False
    if len(errors) < MIN_REFUSED or not _is_one_error(errors) or _is_of_parsing(errors[0]):
        return True
    return any(_names(error, value) for error, arguments in answers for value in _scalars(arguments))


def _is_of_code(raised: str, environment: type[Environment]) -> bool:
    """Whether what user code raised is of a type that no argument explains."""
    match = _CODE_ERRORS.match(raised)
    return match is not None and match["type"] in (None, environment.__name__)


def _is_of_parsing(raised: str) -> bool:
    """Whether what user code raised is of a type that unreadable text explains."""
    return _PARSE_ERRORS.search(raised) is not None


def _names(raised: str, value: Any) -> bool:
    """Whether what user code raised contains an argument; a short text must be quoted in it."""
    text = repr(value) if isinstance(value, str) and len(value) < 4 else str(value)
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", raised) is not None


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the texts and numbers in JSON data."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    elif value is not None and value != "" and not isinstance(value, bool):
        yield value


def _tool_calls(subject: Subject) -> tuple[Counter[str], Counter[str]]:
    """Count the calls that reached each tool, 0 if all were refused, and its calls that raised or timed out."""
    calls, failed = Counter[str](), Counter[str]()
    for call in subject.program_calls() if subject.is_external else ():
        calls[call.name] += 1
        failed[call.name] += call.result is not None and _ERROR_TEXT.search(call.result) is not None
    for body in subject.bodies():
        if isinstance(body, ToolEntry):
            calls[body.name] += body.outcome in ("ok", "error", "timeout")
            failed[body.name] += body.outcome in ("error", "timeout")
    return calls, failed


def _names_program_error(raised: str) -> bool:
    """Whether an exception, which begins with its type, hardly ever refuses a call on purpose."""
    return _PROGRAM_ERRORS.match(raised) is not None


def _tool_errors_line(entries: Sequence[ToolEntry]) -> str:
    """Return the errors of a tool at one location, one of each type, errors of a broken program first."""
    verbs = {"error": "raised ", "bad_arguments": "refused its arguments: ", "unknown_tool": "does not exist: "}
    by_type: dict[str, str] = {}
    for entry in entries:
        verb = verbs.get(entry.outcome, "")  # "timed out"
        by_type.setdefault(entry.error.partition(":")[0], f"{verb}{' '.join(entry.error.split())[:200]}")
    types = sorted(by_type, key=lambda raised: not _names_program_error(raised))
    location = f" at {entries[0].location}" if entries[0].location else ""
    return f"tool {entries[0].name} {' and '.join(by_type[raised] for raised in types[:3])}{location}"


def check_refused_calls(subject: Subject, result: CheckResult) -> None:
    """Tools accept some call that fits their schema."""
    refused: dict[str, list[str]] = {}
    reached = set[str]()
    for body in subject.bodies():
        if isinstance(body, ToolEntry) and body.outcome in ("ok", "error", "timeout"):
            reached.add(body.name)
        elif isinstance(body, ToolEntry) and body.outcome == "bad_arguments" and isinstance(body.arguments, Mapping):
            refused.setdefault(body.name, []).append(body.error)
    tools = subject.environment.tool_table() if issubclass(subject.environment, ToolEnvironment) else {}
    for name, answers in refused.items():
        if len(answers) < MIN_REFUSED or name in reached or name not in tools:
            continue
        parameters = tools[name].spec.parameters
        with contextlib.suppress(UnknownSchemaError):  # the random policy guessed
            for schema in parameters.get("properties", {}).values():
                random_value(schema, random.Random(0), parameters)
            result.fault(
                f"tool {name} was never reached: all of {plural(len(answers), 'call')} that fit its schema, which the "
                f"policy is shown, were refused, such as with {shortened_repr(answers[0])}",
                "Change the parameter's type or its validator",
            )


def check_texts(subject: Subject, result: CheckResult) -> None:
    """No text for the policy is the `repr` of an object, where another text was meant."""
    if subject.is_external:
        return
    shown: dict[tuple[str, str], tuple[str, str]] = {}
    for task, episode in subject.played:
        turns = [body for entry in episode.entries if isinstance(body := entry.decode(), TurnEntry)]
        for message in (message for turn in turns for message in turn.messages):
            text, role = str(message["content"]).strip(), message["role"]
            if role in ("system", "user") and (kind := _repr_kind(text, task.data)):
                shown.setdefault((kind, role), (task.id, text))
    for (kind, role), (task_id, text) in shown.items():
        result.fault(
            f"task {task_id!r}: the {role} message that the policy reads is Python's text of {kind}: "
            f"{shortened_repr(text)}",
            "Write the text that a reader needs",
        )


def _repr_kind(text: str, data: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the kind of object whose `repr` a text is, or contains although the task's data does not; "" if there is
    none.

    Example:
        >>> _repr_kind("None"), _repr_kind("Answer [{'role': 'user', 'content': 'Hi.'}]"), _repr_kind("[1, 2]")
        ('None', 'a list', '')
    """
    if text == "None":
        return "None"
    if _CONTAINER_REPR.match(text) and text.endswith(("]", "}")):
        try:
            json.loads(text)
        except ValueError:
            return "a list" if text.startswith("[") else "a dict"
    found = _INNER_REPR.search(text)
    if found is None or found[0] in json.dumps(dict(data), ensure_ascii=False):
        return ""
    return "a list" if found[0].startswith("[") else "an object"


def check_own_random(subject: Subject, result: CheckResult) -> None:
    """Whether the environment draws from the global random generators, as observed or declared."""
    if subject.environment.own_random:
        result.remarks.append(
            "The environment draws from `random` or `numpy.random`, so each episode gets its own state of them."
        )


def check_requests(subject: Subject, result: CheckResult) -> None:
    """An external agent asks for replies: without one, nothing of it could be trained."""
    environment = subject.environment
    requests = _num_requests(subject)
    result.figures["requests"] = dict(requests)
    if requests:
        if unasked := [seat for seat in environment.seats if not requests[seat]]:
            result.remarks.append(f"Seats without a request, and not tried: {', '.join(unasked)}.")
        return
    _, last = subject.played[-1]
    results: list[Any] = [body.value for entry in last.entries if isinstance(body := entry.decode(), EffectEntry)]
    is_command = issubclass(environment, HarnessEnvironment) and environment.play is HarnessEnvironment.play
    if last.header.stop_reason != "completed":
        end = f"the last one ended as {last.header.stop_reason}"
    elif is_command:
        output_text = results[-1]["output"].strip()[-300:]
        end = f"the program exited 0 and printed {repr(output_text) if output_text else 'nothing'}"
    else:
        end = f"play returned {shortened_repr(results[-1])}"
    seats = " or ".join(repr(seat) for seat in environment.seats)
    named = f" and name the model {seats}" if len(environment.seats) > 1 else ""  # else any name is the seat
    number = len(subject.played)
    result.fault(
        f"no request for seat {seats} was answered in {number} of {plural(number, 'episode')}; "
        f"{end}: does it read {'OPENAI_BASE_URL' if is_command else 'endpoint.url'}{named}?"
    )


def check_request_fields(subject: Subject, result: CheckResult) -> None:
    """What the requests of an external agent ask for, all at once: what is refused, not trained, or has no effect."""
    requests = subject.requests()
    asked, ignored = Counter[tuple[str, Any]](), Counter[str]()
    for request in requests:
        asked.update(request.asked.items())
        ignored.update(request.ignored)
    clamped = {value: asked.pop((name, value)) for name, value in [*asked] if name == "max_tokens"}
    total = plural(len(requests), "request")
    result.figures["asked"] = [[name, value, number] for (name, value), number in asked.items()]
    result.figures["ignored"] = dict(ignored)
    if asked:
        fields = ", ".join(f"{name} = {value!r} ({plural(number, 'time')})" for (name, value), number in asked.items())
        result.remarks.append(f"{total} asked for {fields}.")
    larger = {value: number for value, number in clamped.items() if value > (subject.max_tokens or math.inf)}
    if larger:
        result.warn(
            f"{sum(larger.values())} of {total} asked for up to {max(larger):.0f} tokens, and sampling.max_tokens = "
            f"{subject.max_tokens:.0f} cuts their replies",
            f"Set sampling.max_tokens = {max(larger):.0f}, or what the replies need",
        )
    ignored_by_class = getattr(subject.environment, "ignored_fields", ())
    out_of_range = SAMPLING_FIELDS if subject.gateway_sampling != "run" else frozenset()
    refused = [name for name in ignored if name in UNSUPPORTED.keys() | out_of_range and name not in ignored_by_class]
    if subject.gateway_sampling == "refuse":
        run_values = {**NO_PENALTIES, **subject.run_values}
        different = [name for name, value in asked if name != "logprobs" and run_values.get(name) != value]
        refused = list(dict.fromkeys([*refused, *different]))
    if refused:
        named = [
            f"{name} (a value out of its range)" if name in out_of_range & ignored.keys() else name for name in refused
        ]
        result.fault(
            f"requests with {', '.join(named)} will be refused",
            f"Remove them from the agent's requests, or write "
            f"`{ignored_fields_line([*ignored_by_class, *refused])}` in the class",
        )
    without_effect = [f"{name} ({plural(number, 'time')})" for name, number in ignored.items() if name not in refused]
    if without_effect:
        result.remarks.append(f"Fields without effect: {', '.join(without_effect)}.")
    unenforced = {name for name, value in asked if name in ("tool_choice", "response_format") and value != "none"}
    if unenforced:
        result.remarks.append(
            f"The prompt asks for {' and '.join(sorted(unenforced))}. vLLM enforces it if the model does not think "
            "first; otherwise nothing does, so the agent must check replies."
        )
    penalties = [[name for name, least in NO_PENALTIES.items() if r.asked.get(name, least) != least] for r in requests]
    for cause, number in (
        ("temperature 0", asked["temperature", 0.0]),
        (", ".join(dict.fromkeys(itertools.chain.from_iterable(penalties))), sum(map(bool, penalties))),
    ):
        if number and subject.gateway_sampling == "agent":
            result.warn(
                f"{number} of {total} asked for {cause}: their tokens are played, but not trained",
                "Let the agent ask for a temperature above 0 without penalties, or set gateway.sampling = 'run'",
            )


def _num_requests(subject: Subject) -> Counter[str]:
    """Number of answered requests of an external agent, keyed by seat."""
    if not subject.is_external:
        return Counter()
    return Counter(body.seat for body in subject.bodies() if isinstance(body, TurnEntry))


# --- checks that play more --------------------------------------------------------------------------------------------


def check_concurrency(subject: Subject, result: CheckResult) -> None:
    """Episodes that play at once do not differ from the same ones alone."""
    subject.on_progress("playing several episodes at once", "")
    _compare_concurrent(subject, result, demonstrated=False)


def check_concurrent_demonstrations(subject: Subject, result: CheckResult) -> None:
    """Demonstrations that play at once do not differ from the same ones alone. They find and change what a shared state
    holds, which random calls seldom reach."""
    subject.on_progress("playing several demonstrations at once", "")
    _compare_concurrent(subject, result, demonstrated=True)


def _compare_concurrent(subject: Subject, result: CheckResult, *, demonstrated: bool) -> None:
    concurrency = compare_concurrent_episodes(
        subject.run,
        subject.environment,
        subject.tasks,
        seed=subject.seed,
        sampling=subject.sampling,
        alone_s=subject.longest_s,
        demonstrated=demonstrated,
    )
    for text in concurrency.findings:
        result.fault(text)
    kind = "demonstration" if demonstrated else "episode"
    result.figures[f"concurrent_{kind}s"] = concurrency.episodes
    if concurrency.undecided:
        result.remarks.append(f"Not compared with {kind}s alone: {concurrency.undecided}.")
    elif concurrency.episodes:
        result.shown = f"{plural(concurrency.episodes, kind)} played at once did not mix."


def check_format(subject: Subject, result: CheckResult) -> None:
    """Unreadable replies do not earn more than readable ones, and not all replies earn the same."""
    environment = subject.environment

    def play(task: Task, number: int, script: Script) -> EpisodeFormatReward | str:
        subject.on_progress("playing replies in a broken format", f"game {number + 1} on task {task.id!r}")
        spec = spec_of(environment, task, number, subject.seed)
        outcome = event_loop.run(execute_episode(environment, spec, script))
        if isinstance(outcome, Failure):
            return outcome.text
        subject.format_episodes.append(outcome)
        broken = outcome.counts.of_all_policies("broken turns") > 0
        rewarded = [each for each in outcome.header.trajectories if each.reward is not None]
        rewards = sum_by_key((each.seat, each.reward or 0.0) for each in rewarded)
        return EpisodeFormatReward(rewards, broken)

    faults = find_format_reward_faults(
        play,
        subject.tasks,
        environment.seats,
        random_policy(environment),
        has_tools=issubclass(environment, ToolEnvironment),
        limit=TimeLimit(FORMAT_S),
    )
    for text in faults.texts:
        result.fault(text)
    if faults.played < faults.planned:
        left_out = faults.planned - faults.played
        result.leave_out(
            f"{left_out} of {plural(faults.planned, 'episode')} that compare unreadable with readable replies", FORMAT_S
        )
    if subject.constant_reward is not None:
        episodes = plural(len(subject.played) + len(subject.format_episodes), "episode")
        result.warn(
            f"every reply, also a broken one, earned {subject.constant_reward:.3f}, in {episodes}",
            "Does the reward depend on what the policy said?",
        )


def check_actions(subject: Subject, result: CheckResult) -> None:
    """A game accepts some text as a legal action."""
    actions = _Actions()
    for _, episode in subject.played:
        actions.count(episode.entries)
    for episode in subject.format_episodes:
        if not actions.are_listed:  # else the random policy played legal actions, as these texts need not be
            actions.count(episode.entries)
    if actions.played < MIN_REFUSED or actions.legal > (actions.played / 2 if actions.are_listed else 0):
        return
    number = f"{actions.legal or 'none'} of {plural(actions.played, 'action')} was"
    if actions.refused:
        result.fault(
            f"{number} legal: parse returned, for example, {actions.refused[0]}, which the action space, or the "
            "action mask, does not contain",
            "Return an element of the player's action space",
        )
    elif actions.are_listed:
        result.fault(
            f"{number} legal, although most were copied from the legal actions in the observation: parse returned None",
            "Let parse accept what action_name returns",
        )
    if not actions.legal:
        result.warn(
            f"the game was not played: none of {plural(actions.played, 'text')}, some of them words of the "
            "observations, was a legal action",
            "Does parse accept what the instructions ask for?",
        )


@dataclass(slots=True)
class _Actions:
    """What a game made of the texts that it received."""

    played: int = 0
    legal: int = 0
    are_listed: bool = False
    """Whether the observations list the legal actions."""
    refused: list[str] = field(default_factory=list)
    """Actions that texts were parsed as, and that were not legal."""

    def count(self, entries: Sequence[JournalEntry]) -> None:
        """Count the actions of an episode."""
        for entry in entries:
            body = entry.decode()
            if isinstance(body, ResourceCallEntry) and isinstance(body.value, Mapping) and "legal" in body.value:
                self.are_listed |= LEGAL_ACTIONS in body.value["observation"]
                if body.method == "step":
                    self.played += 1
                    self.legal += body.value["legal"] is True
                    self.refused += filter(None, [body.value.get("refused")])


def _run_watched(subject: Subject, result: CheckResult, executing: Coroutine[Any, Any, T]) -> T:
    """Run an execution whose code the first episodes may not have reached; code that blocks its loop is a fault."""
    problems: list[str] = []
    remedy = PROGRAM_REMEDY if subject.is_external else BLOCKING_REMEDY

    async def watched() -> T:
        with watch_event_loop(problems.append, users_only=True, remedy=remedy, at_end=True):
            return await executing

    outcome: T = subject.run(watched())
    for text in problems[: not result.findings]:  # the same code blocks in each episode
        result.fault(text)
    return outcome


def check_demonstrations(subject: Subject, result: CheckResult) -> None:
    """Demonstrations end, and win: they reach code that only runs after a success, which chance rarely does."""
    clock, limit = LoadClock(), TimeLimit(DEMONSTRATED_S)
    rewards, unrewarded = list[float](), list[str]()
    calls = list[ToolEntry]()
    for number, task in enumerate(subject.tasks):
        began = clock.monotonic()
        if limit.left < 0:
            result.leave_out(plural(len(subject.tasks) - number, "demonstration"), DEMONSTRATED_S)
            break
        subject.on_progress("playing demonstrations", f"task {task.id!r}")
        spec = spec_of(subject.environment, task, number, subject.seed)
        policy = DemonstrationPolicy(subject.environment, [spec])
        executing = execute_episode(
            subject.environment, spec, policy, max_turns=DEMONSTRATED_TURNS, sampling=subject.sampling
        )
        outcome = _run_watched(subject, result, executing)
        calls += (body for entry in outcome.entries if isinstance(body := entry.decode(), ToolEntry))
        if isinstance(outcome, Failure):
            result.fault(policy.failure or f"task {task.id!r}, as demonstrated: {outcome.text}")
            break
        subject.longest_s = max(subject.longest_s, clock.monotonic() - began)
        rewards.append(outcome.header.reward or 0.0)
        if any((trajectory.reward or 0.0) > 0 for trajectory in outcome.header.trajectories):
            subject.has_won_demonstration = True
        else:
            unrewarded.append(task.id)
    if unrewarded:
        result.warn(
            f"{len(unrewarded)} of {plural(len(rewards), 'demonstration')} earned nothing above 0, such as that of "
            f"task {unrewarded[0]!r}",
            "Is `demonstrate` wrong, or the reward?",
        )
    _check_demonstrated_calls(calls, result)
    result.figures["demonstration_rewards"] = rewards
    if rewards:
        lowest = min(rewards)
        task = subject.tasks[rewards.index(lowest)]
        of_lowest = f"; the lowest is {lowest:.2f}, of task {task.id!r}" if lowest < max(rewards) else ""
        mean = sum(rewards) / len(rewards)
        result.shown = f"{plural(len(rewards), 'demonstration')}: mean reward {mean:.2f}{of_lowest}."


def _check_demonstrated_calls(calls: Sequence[ToolEntry], result: CheckResult) -> None:
    """Tools answer the calls of demonstrations, whose arguments are meant to be right."""
    total = Counter(call.name for call in calls)
    failed = Counter(call.name for call in calls if call.outcome != "ok")
    errors: dict[tuple[str, str], list[ToolEntry]] = {}
    for call in calls:
        if call.outcome != "ok":
            errors.setdefault((call.name, call.location), []).append(call)
    for (name, _), entries in errors.items():
        problem = f"{_tool_errors_line(entries)}, in {len(entries)} of {plural(total[name], 'call')} of demonstrations"
        if failed[name] == total[name] or any(_names_program_error(entry.error) for entry in entries):
            result.fault(problem, "Fix the tool, or `demonstrate` if its call is wrong")
        else:
            result.warn(problem, "Fix it, or ignore this if `demonstrate` shows such a call on purpose")
    result.figures["demonstrated_calls"] = dict(total)
    result.figures["demonstrated_errors"] = dict(failed)


def check_answers(subject: Subject, result: CheckResult) -> None:
    """Play replies of one seat that should not win, and the answers in the tasks' data, which should."""
    environment = subject.environment
    others = random_policy(environment)

    def play(seat: str, task: Task, text: str) -> float | None:
        subject.on_progress("playing answers", f"task {task.id!r}")
        script, size = one_seat(seat, text, others), len(text.encode())
        executing = execute_episode(
            environment, spec_of(environment, task, 0, subject.seed), script, max_tokens=size + MAX_TOKENS
        )
        outcome = event_loop.run(executing)
        if isinstance(outcome, Failure):
            return None
        if (seat, task.id) not in prompts:
            turns = (body for entry in outcome.entries if isinstance(body := entry.decode(), TurnEntry))
            messages = next((turn.messages for turn in turns if turn.seat == seat), ())
            texts = [message.get("content") for message in messages if message.get("role") == "user"]
            prompts[seat, task.id] = "\n".join(text for text in texts if isinstance(text, str))
        return sum(each.reward or 0.0 for each in outcome.header.trajectories if each.seat == seat)

    def prompt(seat: str, task: Task) -> str:
        return prompts.get((seat, task.id), "")

    prompts: dict[tuple[str, str], str] = {}
    tools = environment.tool_table().values() if issubclass(environment, ToolEnvironment) else ()
    other_rewards = [*subject.rewards, *(episode.header.reward or 0.0 for episode in subject.format_episodes)]
    faults = [
        find_reward_faults(
            partial(play, seat),
            subject.tasks,
            limit=TimeLimit(ANSWERS_S / len(environment.seats)),
            prompt=partial(prompt, seat),
            reward_code=getattr(environment, "reward", None),
            tools=[tool.spec for tool in tools],
            best_random=math.inf if subject.has_won_demonstration else max(other_rewards, default=-math.inf),
            demonstrates=not subject.is_external,
        )
        for seat in environment.seats
    ]
    for seat, of_seat in zip(environment.seats, faults, strict=True):
        if of_seat.easy_win:
            result.fault(f"seat {seat!r}: {of_seat.easy_win}" if len(faults) > 1 else of_seat.easy_win)
    has_won, is_cut = any(each.has_won for each in faults), any(each.is_cut for each in faults)
    if is_cut and not has_won:
        result.leave_out("answers of tasks, and replies that should not win", ANSWERS_S)
    elif is_cut:
        tried = ", ".join(dict.fromkeys(name for each in faults for name in each.tried))
        without = f" (played without a win: {tried})" if tried else ""
        result.leave_out(f"replies that should not win{without}", ANSWERS_S)
    elif all(each.no_win for each in faults) and subject.constant_reward is None:
        result.warn(faults[0].no_win)
    elif subject.is_external and not has_won and len(set(subject.rewards)) == 1 < len(subject.rewards):
        result.remarks.append(
            f"All {len(subject.rewards)} rewards were equal ({subject.rewards[0]:.3f}), and the check knows no reply "
            "that earns more: look at what `reward` compares."
        )


def check_wrong_calls(subject: Subject, result: CheckResult) -> None:
    """Play wrong tool calls. An error is a fault of the environment; a failing program of an external agent, whose code
    is not the user's, is a warning."""
    environment = subject.environment

    def play(task: Task, number: int, script: Script) -> Failure | bool:
        subject.on_progress("playing wrong tool calls", f"task {task.id!r}")
        spec = spec_of(environment, task, number, subject.seed)
        outcome = _run_watched(subject, result, execute_episode(environment, spec, script, sampling=subject.sampling))
        return outcome if isinstance(outcome, Failure) else bool(outcome.metrics.get(PROGRAM_FAILED))

    num_tasks = min(len(subject.tasks), 1 if subject.is_external else WRONG_CALL_TASKS)
    outcomes = play_wrong_calls(play, subject.tasks[:num_tasks], TimeLimit(WRONG_CALLS_S))
    if outcomes.left_out:
        result.leave_out(f"wrong tool calls ({', '.join(outcomes.left_out)})", WRONG_CALLS_S)
    result.figures["wrong_calls"] = {"kinds": outcomes.kinds, "episodes": outcomes.episodes}
    failed_reward = _failed_reward(environment)
    if outcomes.episodes and not outcomes.errors:
        result.shown = (
            f"Wrong tool calls ({', '.join(outcomes.kinds)}) caused no errors in {plural(outcomes.episodes, 'episode')}"
        )
        if outcomes.ended_programs:
            result.shown += (
                f"; in {outcomes.ended_programs} of them the agent's program failed and got failed_reward = "
                f"{failed_reward}"
            )
        result.shown += "."
    if outcomes.errors and subject.is_external:
        _, _, failure = outcomes.errors[0]
        kinds = ", ".join(dict.fromkeys(kind for kind, _, _ in outcomes.errors))
        reason = failure.text.replace(failure.advice, "").strip().splitlines()[-1][-300:]
        advice = "failed_reward does not apply, because the program did not end by itself"
        if failed_reward is None:
            advice = (
                "Training drops such episodes, so the policy never learns to avoid these calls. Set failed_reward = "
                "0.0 in the class, to train on them with that reward"
            )
        result.warn(f"wrong tool calls ended {outcomes.share} as an error ({kinds}): {reason}", advice)
        return
    for kind in dict.fromkeys(kind for kind, _, _ in outcomes.errors):
        errors = [(task, failure) for other, task, failure in outcomes.errors if other == kind]
        task, failure = errors[0]
        result.fault(
            f"task {task.id!r}, when every turn is a tool call with {kind}: {failure.text} (in {len(errors)} of "
            f"{plural(num_tasks, 'episode')})",
            "Answer such calls, or give them a low reward",
        )


def check_hash_order(subject: Subject, result: CheckResult) -> None:
    """Play a task again in processes with different string hashes, as after `--resume`, and compare."""
    environment, task = subject.environment, subject.tasks[0]
    subject.on_progress("playing it in processes with other string hashes", "")
    name = importable_name(environment)
    first = event_loop.run(execute_episode(environment, spec_of(environment, task, 0, 0), random_policy(environment)))
    if isinstance(first, Failure) or not name:  # it was reported before, for the same task
        return
    play = Play(name, "random", [(0, task)], answers=[entry for entry in first.entries if is_external(entry)])

    def played_with(seed: int) -> Played | None:
        with contextlib.suppress(SilentProcessError, DeadProcessError):
            return play_in_new_process(play, hash_seed=seed)
        return None

    num_silent = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(played_with, HASH_SEEDS)
        for seed, played in zip(HASH_SEEDS, outcomes, strict=True):
            if played is None:  # hash order kills no process
                num_silent += 1
                continue
            second = played.outcomes[0]
            problem = second.failure.text if second.failure else differing_call(first.entries, second.entries)
            if problem:
                result.fault(
                    f"task {task.id!r}, played in a process with PYTHONHASHSEED={seed}: {problem}. The code depends on "
                    "the order of a set or on hash(), which differ between processes, so no other process could resume "
                    "the episode",
                    "Iterate over sorted(…), or use a list or a dict",
                )
                pool.shutdown(cancel_futures=True)
                break
    if num_silent:
        processes = plural(len(HASH_SEEDS), "process", "processes")
        result.remarks.append(f"Not compared: {num_silent} of {processes} with other string hashes did not answer.")


# --- the table --------------------------------------------------------------------------------------------------------


def _passed(subject: Subject) -> bool:
    return subject.passed


def _own_program_passed(subject: Subject) -> bool:
    return subject.passed and not subject.is_external


CHECKS = (
    Check("names", check_names),
    Check("tasks", check_tasks),
    Check("splits", check_splits, lambda subject: subject.passed and subject.requested_tasks is None),
    Check("episodes", check_episodes),
    Check("turns", check_turns, lambda subject: _own_program_passed(subject) and bool(subject.played)),
    Check("rewards", check_rewards),
    Check("programs", check_programs),
    Check("tools", check_tools),
    Check("refused_calls", check_refused_calls),
    Check("texts", check_texts),
    Check("own_random", check_own_random),
    Check("requests", check_requests, lambda subject: subject.passed and subject.is_external and bool(subject.played)),
    Check("concurrency", check_concurrency, lambda subject: subject.passed and bool(subject.played)),
    Check("format", check_format, _own_program_passed),
    Check("actions", check_actions, _own_program_passed),
    Check(
        "demonstrations",
        check_demonstrations,
        lambda subject: _own_program_passed(subject) and has_demonstrations(subject.environment),
    ),
    Check(
        "concurrent_demonstrations",
        check_concurrent_demonstrations,
        lambda subject: _own_program_passed(subject) and has_demonstrations(subject.environment),
    ),
    Check("answers", check_answers, lambda subject: subject.passed and bool(subject.played)),
    Check("wrong_calls", check_wrong_calls, _passed),
    Check("request_fields", check_request_fields, lambda subject: bool(subject.requests())),
    Check(
        "hash_order",
        check_hash_order,
        lambda subject: (
            subject.hash_order and _own_program_passed(subject) and may_depend_on_hash_order(subject.environment)
        ),
    ),
)
"""The checks, in order. The first ones look; a check that plays more runs only if no fault was found before."""
