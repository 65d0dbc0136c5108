"""The environment checker: runs an environment with a random policy, kills it at every entry, and compares.

On a few tasks it shows that the class is well formed, its tasks are stable and serializable, its rewards are numbers,
its own code changes nothing outside, and executing `run()` again over any prefix of its journal yields the same episode
(transcript, reward, final state of resources) if the outside world (effects, external tools, clocks) answers as before.
It runs the environment's code; it needs neither a model nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from agentrl.core import event_loop
from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError, describe_user_code_error
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.records import EpisodeSpec, Task
from agentrl.core.text import plural, shorten_lines
from agentrl.engines.scripted import Script
from agentrl.environment.context import ResourceLevel
from agentrl.environment.demonstrations import has_demonstrations
from agentrl.environment.environment import MAX_READ_TASKS, Environment, Split, checked_source
from agentrl.environment.games import LEGAL_ACTIONS
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.overrides import misspelled_attributes
from agentrl.environment.registry import resolve
from agentrl.environment.schema_values import UnknownSchemaError, random_value
from agentrl.environment.task_contents import SourceContents, SplitOverlap, read_contents
from agentrl.environment.tools import ToolEnvironment
from agentrl.journal.entries import (
    EffectEntry,
    JournalEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.observe.blocked_loop import PROGRAM_REMEDY, watch_event_loop
from agentrl.observe.blocked_loop import REMEDY as BLOCKING_REMEDY
from agentrl.observe.metrics import PROGRAM_FAILED
from agentrl.rollout.calls.mismatch import REMEDY, shortened_repr
from agentrl.rollout.external.agent import describe_request_difference, external_turns_with_context
from agentrl.testing.concurrency_check import ConcurrencyResult, compare_concurrent_episodes
from agentrl.testing.differences import difference, differing_call, is_external
from agentrl.testing.execution import (
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
from agentrl.testing.load_clock import LoadClock
from agentrl.testing.malformed_reply_check import TASKS as FORMAT_TASKS
from agentrl.testing.malformed_reply_check import EpisodeFormatReward, always, find_format_reward_faults
from agentrl.testing.new_process import (
    IMPORTS,
    DeadProcessError,
    Play,
    Played,
    SilentProcessError,
    importable_name,
    play_in_new_process,
    refuse_in_new_process,
)
from agentrl.testing.reward_check import find_reward_faults
from agentrl.testing.side_effects import MODEL_ADVICE, calls_language_model, watch_side_effects
from agentrl.testing.virtual_time import simulate
from agentrl.testing.wrong_calls import WrongCallOutcomes, play_wrong_calls

MAX_CUTS = 64
"""Maximum number of prefixes tried per episode; longer journals are cut at evenly spaced entries."""
WRONG_CALL_TASKS = 2
"""Number of tasks on which each kind of wrong tool call is played."""
DEMONSTRATED_TURNS = 64
"""Maximum number of turns of a demonstration."""
DEMONSTRATED_S = 10.0
"""Seconds after which no further demonstration is played, because episodes may be slow."""
PLAYING_S = 20.0
"""Seconds of an idle machine (`LoadClock`) for playing and resuming episodes, beyond one episode and one resumption,
because its tools may be slow."""
MIN_FORMAT_REWARDS = 4
"""Minimum number of episodes with readable and unreadable replies for a statement about a constant reward."""
MIN_REFUSED = 3
"""Number of refused calls of a tool, or illegal actions of a game, that show a fault if none was accepted."""
ANSWERS_S = 10.0
"""Seconds after which the answers of tasks are no longer played, because episodes may be slow."""
COMPARED_S = 10.0
"""Seconds after which no further tasks of a split are compared, because reading one may be slow."""
HASH_SEEDS = (1, 44, 38, 50, 9, 24, 67)
"""Values of PYTHONHASHSEED under which a task is played again. A set of any two of 67 usual names of seats (`alice`,
`bob`, `solver`, `judge`, …) has both orders among them, so one of them differs from this process."""
_PLAYING = "playing episodes, and resuming each after kills"
PlayEpisode = Callable[[Coroutine[Any, Any, ExecutedEpisode | Failure]], ExecutedEpisode | Failure]
"""Runs an execution in the check's event loop."""
_STRAY = re.compile(
    r"\b(?:random\.(?:Random|RandomState|default_rng)\(\)|random\.SystemRandom\("
    r"|(?:time\.(?:time|monotonic|perf_counter)|uuid\.uuid[14]|os\.urandom|secrets\.\w+"
    r"|datetime\.(?:now|utcnow|today))\()"
)
_CODE_ERRORS = re.compile(
    r"(?:ImportError|ModuleNotFoundError|NameError|NotImplementedError|UnboundLocalError)\b"
    r"|AttributeError: '(?P<type>\w+)' object has no attribute"
)
"""Exceptions that the arguments do not explain, if `type` is the environment: a tool that always raises one of them is
broken."""
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
class EnvironmentReport:
    """Result of the checker."""

    environment: str
    findings: list[str] = field(default_factory=list)
    """Faults with their locations, for the user."""
    episodes: int = 0
    longest_s: float = 0.0
    """Seconds that the longest episode took alone."""
    resumptions: int = 0
    """Number of re-executions of an episode from a prefix of its journal."""
    has_turns: bool = False
    """Whether a seat acted in any episode."""
    rewards: list[float] = field(default_factory=list)
    format_rewards: list[float] = field(default_factory=list)
    """Rewards of the episodes that compare unreadable replies with readable ones."""
    resume_class: ResourceLevel = "replay"
    """Form of recovery: episodes are re-executed and compared, restored from snapshots of their resources, or
    neither.
    """
    untried_kills: int = 0
    """Number of entries after which an episode was not killed, because its resumptions are slow."""
    unplayed: int = 0
    """Number of tasks that were not played, because episodes are slow."""
    called: set[str] = field(default_factory=set)
    """Names of the tools that the random policy called."""
    uncalled: list[str] = field(default_factory=list)
    """Names of the tools that the policy never called; they remain unchecked."""
    tool_calls: Counter[str] = field(default_factory=Counter)
    """Number of calls with valid arguments, keyed by tool."""
    tool_errors: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Exceptions that tools raised, as `Type: message`, keyed by tool and location."""
    broken_tools: set[str] = field(default_factory=set)
    """Tools that raised in every call, for a reason that is not in the arguments."""
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests of an external agent that were answered, keyed by seat."""
    unasked: list[str] = field(default_factory=list)
    """Seats of an external agent that got no request; they remain unchecked."""
    refused_calls: dict[str, list[str]] = field(default_factory=dict)
    """Answers to calls that did not reach their tool, although they fit its schema, keyed by tool."""
    game_turns: int = 0
    """Number of texts that a game received."""
    legal_turns: int = 0
    """Number of them that were legal actions."""
    lists_actions: bool = False
    """Whether the observations of the game list the legal actions."""
    refused_actions: list[str] = field(default_factory=list)
    """Actions that texts were parsed as, and that were not legal."""
    repr_texts: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """The first task, and the text, in which the policy read the `repr` of an object, keyed by the kind of object and
    the role of the message."""
    rewarded: set[str] = field(default_factory=set)
    """Seats that got a reward in some episode that no limit cut."""
    unrewarded: dict[str, str] = field(default_factory=dict)
    """The first task in which a seat acted and got no reward before the end, keyed by seat."""
    overlap: SplitOverlap = field(default_factory=SplitOverlap)
    """Tasks that both splits have, and tasks that repeat others."""
    uncompared: int = 0
    """Number of tasks of both splits that were not compared, because there are too many or reading them is slow."""
    demonstrated: int = 0
    """Number of demonstrations that were played."""
    unrewarded_demonstrations: list[str] = field(default_factory=list)
    """Tasks, by id, whose demonstration earned no seat more than 0."""
    unwinnable: str = ""
    """A sentence about answers that win nothing; empty if they do, or the tasks show none."""
    misspelled: list[str] = field(default_factory=list)
    """Sentences about attributes that are almost settings of the class."""
    unmarked_methods: list[str] = field(default_factory=list)
    """Public methods of a tool environment without tools."""
    wrong_calls: WrongCallOutcomes = field(default_factory=WrongCallOutcomes)
    concurrency: ConcurrencyResult = field(default_factory=ConcurrencyResult)
    """Comparison of episodes played at once with the same episodes alone."""
    cuts: Counter[Cut] = field(default_factory=Counter)
    """Number of episodes and turns that the check's limits cut, keyed by limit."""
    own_random: bool = False
    """Whether the environment draws from the global random generators, as observed or declared."""
    failed_reward: float | None = None
    """`failed_reward` of an external agent."""
    program_errors: list[str] = field(default_factory=list)
    """Errors of its program that `failed_reward` paid for, in the random policy's episodes."""
    sampling: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    """Sampling parameters of the run that are not the defaults."""
    on_progress: Callable[[str, str], None] = field(default=lambda phase, part: None, repr=False, compare=False)
    """Receives the phase of the check, and what is about to be checked."""

    @property
    def passed(self) -> bool:
        """Whether the check found no faults."""
        return not self.findings

    @property
    def warnings(self) -> list[str]:
        """Exceptions of tools, which the policy sees as observations: they fail the check only if the tool always
        raises one that its arguments cannot explain. Methods that may lack `@agentrl.tool`. Programs of
        external agents that wrong tool calls end. Games that were not played, because no text was an action. A reward
        that is the same for all replies, or that no answer wins. Tasks that are in both splits, or repeat others.
        Attributes that are almost settings."""
        wrong_calls = [self._wrong_calls_warning] if self.wrong_calls.errors else []
        unplayed = [self._unplayed_warning] if self.game_turns >= MIN_REFUSED and not self.legal_turns else []
        constant = [self._constant_reward_warning] if self._earns_the_same else []
        failed = [self._failed_programs_warning] if 0 < self.episodes == len(self.program_errors) else []
        tools = [
            f"{text}. Fix it, or ignore this if the tool is meant to refuse such calls"
            for (name, _), text in zip(self.tool_errors, self._tool_warnings, strict=True)
            if name not in self.broken_tools
        ]
        return [
            *(*self.misspelled, *self._unmarked, *constant, *failed, *tools, *wrong_calls, *unplayed),
            *(*self._demonstration_warnings, *self.overlap.warnings),
            *([self.unwinnable] if self.unwinnable and not constant else []),
        ]

    @property
    def _demonstration_warnings(self) -> list[str]:
        if not self.unrewarded_demonstrations:
            return []
        return [
            f"{len(self.unrewarded_demonstrations)} of {plural(self.demonstrated, 'demonstration')} earned nothing "
            f"above 0, such as that of task {self.unrewarded_demonstrations[0]!r}. Is `demonstrate` wrong, or the "
            "reward?"
        ]

    @property
    def _unmarked(self) -> list[str]:
        if not self.unmarked_methods:
            return []
        names = ", ".join(f"`{name}`" for name in self.unmarked_methods)
        return [f"{self.environment} defines no tool; is @agentrl.tool missing above {names}?"]

    @property
    def _earns_the_same(self) -> bool:
        """Whether all replies earned the same reward above 0, the unreadable ones included; at 0, chance may fail."""
        rewards = {*self.rewards, *self.format_rewards}
        return len(self.format_rewards) >= MIN_FORMAT_REWARDS and len(rewards) == 1 and min(rewards) > 0

    @property
    def _failed_programs_warning(self) -> str:
        return (
            f"the program failed in all of {plural(self.episodes, 'episode')}, which got failed_reward = "
            f"{self.failed_reward}, the last time with {self.program_errors[-1]}"
        )

    @property
    def _constant_reward_warning(self) -> str:
        episodes = plural(len(self.rewards) + len(self.format_rewards), "episode")
        return (
            f"every reply, also a broken one, earned {self.rewards[0]:.3f}, in {episodes}. Does the reward depend on "
            "what the policy said?"
        )

    @property
    def _unplayed_warning(self) -> str:
        return (
            f"the game was not played: none of {plural(self.game_turns, 'text')}, some of them words of the "
            "observations, was a legal action. Does parse accept what the instructions ask for?"
        )

    @property
    def _tool_warnings(self) -> list[str]:
        return [
            f"tool {name} raised {' '.join(errors[0].split())[:200]}{f' at {location}' if location else ''}, in "
            f"{len(errors)} of {plural(self.tool_calls[name], 'call')}"
            for (name, location), errors in self.tool_errors.items()
        ]

    @property
    def _wrong_calls_warning(self) -> str:
        """Whether an external agent survives wrong tool calls, and what to do if not."""
        kinds = ", ".join(dict.fromkeys(kind for kind, _, _ in self.wrong_calls.errors))
        _, _, failure = self.wrong_calls.errors[0]
        reason = failure.text.replace(failure.advice, "").strip().splitlines()[-1][-300:]
        if self.failed_reward is None:
            remedy = (
                "Training drops such episodes, so the policy never learns to avoid these calls. Set failed_reward = "
                "0.0 in the class, to train on them with that reward"
            )
        else:
            remedy = "failed_reward does not apply, because the program did not end by itself"
        return f"wrong tool calls ended {self.wrong_calls.share} as an error ({kinds}): {reason}. {remedy}"

    @property
    def text(self) -> str:
        """Return the report for a terminal."""
        return "\n".join([self._verdict, *(f"WARNING {text}" for text in self.warnings)])

    @property
    def _verdict(self) -> str:
        if self.findings:
            return "\n".join(
                [f"{self.environment}: {plural(len(self.findings), 'finding')}", *(f"- {f}" for f in self.findings)]
            )
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        requests = f"{plural(self.requests.total(), 'request')}, no tool call, " if self.requests else ""
        judges = ", ".join(seat for seat in self.unrewarded if seat not in self.rewarded)
        random_note = (
            " The environment draws from `random` or `numpy.random`, so each episode gets its own state of them."
            if self.own_random
            else ""
        )
        return (
            (
                f"{self.environment}: passed. {plural(self.episodes, 'episode')} of a random policy "
                f"({requests}mean reward {mean:.2f}), killed and resumed {plural(self.resumptions, 'time')}: "
                f"{_PROOF_TEXTS[self.resume_class]}."
            )
            + self._concurrency_sentence
            + self._wrong_calls_sentence
            + (f" Never called, and not tried: {', '.join(self.uncalled)}." if self.uncalled else "")
            + (f" Seats without a request, and not tried: {', '.join(self.unasked)}." if self.unasked else "")
            + (
                f" Never rewarded: {judges}. A frozen, remote or bot policy must hold such a seat: with a trained one "
                "every episode is dropped (no_reward)."
                if judges
                else ""
            )
            + (f" The check cut off {format_cuts(self.cuts)}." if self.cuts else "")
            + self._left_out_sentence
            + self._uncompared_sentence
            + random_note
        )

    @property
    def _concurrency_sentence(self) -> str:
        if self.concurrency.undecided:
            return f" Not compared with episodes alone: {self.concurrency.undecided}."
        episodes = plural(self.concurrency.episodes, "episode")
        return f" {episodes} played at once did not mix." if self.concurrency.episodes else ""

    @property
    def _wrong_calls_sentence(self) -> str:
        if not self.wrong_calls.episodes or self.wrong_calls.errors:
            return ""
        kinds = ", ".join(self.wrong_calls.kinds)
        text = f" Wrong tool calls ({kinds}) caused no errors in {plural(self.wrong_calls.episodes, 'episode')}"
        if self.wrong_calls.ended_programs:
            text += (
                f"; in {self.wrong_calls.ended_programs} of them the agent's program failed and got failed_reward = "
                f"{self.failed_reward}"
            )
        return f"{text}."

    @property
    def _left_out_sentence(self) -> str:
        left_out = [plural(self.untried_kills, "kill")] * bool(self.untried_kills)
        left_out += [plural(self.unplayed, "task")] * bool(self.unplayed)
        if not left_out:
            return ""
        repeats = " Each resume repeats the episode's tool calls, also in training, except those of "
        return (
            f" Left out, because the check plays for about {PLAYING_S:g} s of an idle machine, and kills an episode at "
            f"most {MAX_CUTS} times: {' and '.join(left_out)}."
            + (f"{repeats}@agentrl.tool(external=True)." if self.untried_kills and not self.requests else "")
        )

    @property
    def _uncompared_sentence(self) -> str:
        if not self.uncompared:
            return ""
        return (
            f" {plural(self.uncompared, 'task')} {'was' if self.uncompared == 1 else 'were'} not compared, so more "
            f"training tasks may also be held out: the check reads up to {MAX_READ_TASKS:,} tasks of a split, for "
            f"up to {COMPARED_S:g} s."
        )


@outside_event_loop
def check_environment(
    environment: str | type,
    *,
    tasks: Sequence[Task] | None = None,
    episodes: int = 4,
    seed: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    sampling: Mapping[str, float] = MappingProxyType({}),
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
        sampling: `temperature`, `top_p`, `top_k` and `min_p` of the run, if they are not the defaults: requests of an
            external agent for other values are refused.
        on_progress: receives the phase of the check, and what is about to be checked.
        hash_order: also play the first training task in processes with other hash seeds, as after `--resume`, unless
            the code contains nothing that depends on them; a process must be able to import the class from its module.
    """
    refuse_in_new_process()
    report = EnvironmentReport(environment=environment if isinstance(environment, str) else environment.__qualname__)
    report.on_progress = on_progress or report.on_progress
    report.sampling = sampling
    report.on_progress("importing it", "")
    try:
        environment_class = resolve(environment)
    except AgentRLError as error:
        report.findings.append(str(error))
        return report
    report.misspelled += misspelled_attributes(environment_class)
    report.unmarked_methods = _unmarked_methods(environment_class)
    is_harness = issubclass(environment_class, HarnessEnvironment)
    for module in IMPORTS if is_harness else IMPORTS[:1]:
        import_module(module)
    report.on_progress("listing and comparing its tasks", "")
    count = max(episodes, FORMAT_TASKS)
    if _is_empty_choice(tasks, report):
        return report
    chosen_tasks = list(tasks) if tasks is not None else _tasks(environment_class, count, report, options)
    if tasks is None and report.passed:
        _compare_splits(environment_class, count, report, options)
    with asyncio.Runner(loop_factory=event_loop.EpisodeEventLoop) as runner:
        run = runner.run if is_harness else event_loop.run  # clients keep connections, which belong to an event loop
        last = _check_episodes(run, environment_class, chosen_tasks[:episodes], seed, report)
        if report.passed and report.episodes and not report.has_turns and not is_harness:
            report.findings.append(_idle_text(environment_class, report.episodes))
        _check_rewards(environment_class, report)
        _check_tools(environment_class, report)
        _check_refused_calls(environment_class, report)
        _check_texts(report)
        report.own_random = environment_class.own_random
        if report.passed and issubclass(environment_class, HarnessEnvironment) and last is not None:
            _check_requests(environment_class, last, report)
        _check_concurrency(run, environment_class, chosen_tasks, seed, report)
        if report.passed and not is_harness:
            _check_format(environment_class, chosen_tasks, seed, report)
            _check_actions(report)
        if report.passed and not is_harness and has_demonstrations(environment_class):
            _check_demonstrations(run, environment_class, chosen_tasks, seed, report)
        if report.passed and not is_harness:
            _check_answers(environment_class, chosen_tasks, seed, report)
        if report.passed:
            _check_wrong_calls(run, environment_class, chosen_tasks, seed, report)
    if report.passed and hash_order and not is_harness and may_depend_on_hash_order(environment_class):
        _check_hash_order(environment_class, chosen_tasks[0], report)
    return report


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


def _idle_text(environment: type[Environment], episodes: int) -> str:
    """Describe a `run` in which no seat acts, and its likely cause."""
    owner, *bases = [base for base in environment.__mro__ if "run" in vars(base)]
    is_override = not all(getattr(vars(base)["run"], "__isabstractmethod__", False) for base in bases)
    advice = "call `await super().run(ctx)` in it" if is_override else "call `await ctx.agent(seat).act(…)` in it"
    return (
        f"no seat acted in any of {plural(episodes, 'episode')}, so there is nothing to train on. Look at "
        f"{owner.__name__}.run: {advice}"
    )


def _check_rewards(environment: type[Environment], report: EnvironmentReport) -> None:
    """Report seats that acted without getting a reward. A seat that never gets one while others do is left to the
    configuration, which may give it to a policy that does not learn, such as a judge."""
    advice = "call agent.reward(…) in run()"
    if issubclass(environment, HarnessEnvironment):
        advice = "return one for it from reward(), as {seat: number}"
    for seat, task_id in report.unrewarded.items():
        if seat in report.rewarded or not report.rewarded:
            report.findings.append(f"task {task_id!r}: seat {seat!r} acted but was given no reward; {advice}")


def _check_tools(environment: type[Environment], report: EnvironmentReport) -> None:
    """Report tools that raised in every call, for a reason that is not in the arguments."""
    raised = Counter[str]()
    for (name, _), errors in report.tool_errors.items():
        raised[name] += len(errors)
    for text, ((name, _), errors) in zip(report._tool_warnings, report.tool_errors.items(), strict=True):
        match = _CODE_ERRORS.match(errors[0])
        is_broken = match is not None and match["type"] in (None, environment.__name__)
        if is_broken and raised[name] == report.tool_calls[name]:
            report.broken_tools.add(name)
            report.findings.append(text)


def _check_refused_calls(environment: type[Environment], report: EnvironmentReport) -> None:
    """Report tools that can never be called: all calls were refused, although their arguments fit the schema."""
    tools = environment.tool_table() if issubclass(environment, ToolEnvironment) else {}
    for name, answers in report.refused_calls.items():
        if len(answers) < MIN_REFUSED or report.tool_calls[name] or name not in tools:
            continue
        parameters = tools[name].spec.parameters
        with contextlib.suppress(UnknownSchemaError):  # the random policy guessed
            for schema in parameters.get("properties", {}).values():
                random_value(schema, random.Random(0), parameters)
            report.findings.append(
                f"tool {name} was never reached: all of {plural(len(answers), 'call')} that fit its schema, which the "
                f"policy is shown, were refused, such as with {shortened_repr(answers[0])}. Change the parameter's "
                "type or its validator"
            )


def _count_entries(
    environment: type[Environment], task: Task, entries: Sequence[JournalEntry], report: EnvironmentReport
) -> None:
    """Count the outcomes of an episode's tool calls, actions and requests, and look at its texts."""
    _count_actions(entries, report)
    is_harness = issubclass(environment, HarnessEnvironment)
    for entry in entries:
        match entry.decode():
            case ToolEntry(name=name, arguments=arguments, outcome=outcome, error=error, location=location):
                report.called.add(name)
                report.tool_calls[name] += outcome in ("ok", "error", "timeout")
                if outcome == "bad_arguments" and isinstance(arguments, Mapping):
                    report.refused_calls.setdefault(name, []).append(error)
                elif outcome == "error":
                    report.tool_errors.setdefault((name, location), []).append(error)
            case TurnEntry(seat=seat) if is_harness:
                report.requests[seat] += 1
            case TurnEntry(messages=messages):
                for message in messages:
                    text, role = str(message["content"]).strip(), message["role"]
                    if role in ("system", "user") and (kind := _repr_kind(text, task.data)):
                        report.repr_texts.setdefault((kind, role), (task.id, text))


def _count_actions(entries: Sequence[JournalEntry], report: EnvironmentReport) -> None:
    """Count what a game made of the texts that it received."""
    for entry in entries:
        body = entry.decode()
        if isinstance(body, ResourceCallEntry) and isinstance(body.value, Mapping) and "legal" in body.value:
            report.lists_actions |= LEGAL_ACTIONS in body.value["observation"]
            if body.method == "step":
                report.game_turns += 1
                report.legal_turns += body.value["legal"] is True
                report.refused_actions += filter(None, [body.value.get("refused")])


def _check_actions(report: EnvironmentReport) -> None:
    """Report a game without a legal action."""
    if report.game_turns < MIN_REFUSED or report.legal_turns > (report.game_turns / 2 if report.lists_actions else 0):
        return
    number = f"{report.legal_turns or 'none'} of {plural(report.game_turns, 'action')} was"
    if report.refused_actions:
        report.findings.append(
            f"{number} legal: parse returned, for example, {report.refused_actions[0]}, which the action space, or the "
            "action mask, does not contain. Return an element of the player's action space"
        )
    elif report.lists_actions:
        report.findings.append(
            f"{number} legal, although most were copied from the legal actions in the observation: parse returned "
            "None. Let parse accept what action_name returns"
        )


def _check_texts(report: EnvironmentReport) -> None:
    """Report a text for the policy that is the `repr` of an object, where another text was meant."""
    for (kind, role), (task_id, text) in report.repr_texts.items():
        report.findings.append(
            f"task {task_id!r}: the {role} message that the policy reads is Python's text of {kind}: "
            f"{shortened_repr(text)}. Write the text that a reader needs"
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


def _program_error(entries: Sequence[JournalEntry]) -> str:
    """Return why the program of an external agent failed."""
    ends = [body for entry in entries if isinstance(body := entry.decode(), EffectEntry)]
    error = ends[-1].error if ends else None
    if error is None and ends and isinstance(ends[-1].value, dict):  # a command
        error = ends[-1].value.get("error")
    return shorten_lines(str(error), 300)


def _check_requests(environment: type[HarnessEnvironment], last: ExecutedEpisode, report: EnvironmentReport) -> None:
    """Report an external agent that never got a reply: nothing of it could be trained."""
    report.unasked = [seat for seat in environment.seats if not report.requests[seat]]
    if report.requests:
        return
    results: list[Any] = [body.value for entry in last.entries if isinstance(body := entry.decode(), EffectEntry)]
    is_command = environment.play is HarnessEnvironment.play
    if last.header.stop_reason != "completed":
        end = f"the last one ended as {last.header.stop_reason}"
    elif is_command:
        output_text = results[-1]["output"].strip()[-300:]
        end = f"the program exited 0 and printed {repr(output_text) if output_text else 'nothing'}"
    else:
        end = f"play returned {shortened_repr(results[-1])}"
    seats = " or ".join(repr(seat) for seat in environment.seats)
    named = f" and name the model {seats}" if len(environment.seats) > 1 else ""  # else any name is the seat
    report.findings.append(
        f"no request for seat {seats} was answered in {report.episodes} of {plural(report.episodes, 'episode')}; "
        f"{end}: does it read {'OPENAI_BASE_URL' if is_command else 'endpoint.url'}{named}?"
    )


def _check_hash_order(environment: type[Environment], task: Task, report: EnvironmentReport) -> None:
    """Play a task again in processes with different string hashes, as after `--resume`, and compare."""
    report.on_progress("playing it in processes with other string hashes", "")
    name = importable_name(environment)
    first = event_loop.run(execute_episode(environment, spec_of(environment, task, 0, 0), random_policy(environment)))
    if isinstance(first, Failure) or not name:  # it was reported before, for the same task
        return
    play = Play(name, "random", [(0, task)], answers=[entry for entry in first.entries if is_external(entry)])

    def played_with(seed: int) -> Played | None:
        with contextlib.suppress(SilentProcessError, DeadProcessError):
            return play_in_new_process(play, hash_seed=seed)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(played_with, HASH_SEEDS)
        for seed, played in zip(HASH_SEEDS, outcomes, strict=True):
            if played is None:  # hash order kills no process
                continue
            second = played.outcomes[0]
            problem = second.failure.text if second.failure else differing_call(first.entries, second.entries)
            if problem:
                report.findings.append(
                    f"task {task.id!r}, played in a process with PYTHONHASHSEED={seed}: {problem}. The code depends on "
                    "the order of a set or on hash(), which differ between processes, so no other process could resume "
                    "the episode: iterate over sorted(…), or use a list or a dict"
                )
                pool.shutdown(cancel_futures=True)
                break


def _games(
    environment: type[Environment], tasks: Sequence[Task], report: EnvironmentReport
) -> Iterator[tuple[int, Task]]:
    """Yield each task once; then repeat tasks a few times while the policy has called some but not all of the tools."""
    tools = set(environment.tool_table()) if issubclass(environment, ToolEnvironment) else set()
    for number in range(4 * len(tasks)):  # at most four episodes per task
        if number >= len(tasks) and (not report.called or tools <= report.called):
            break
        yield number, tasks[number % len(tasks)]
    report.uncalled = sorted(tools - report.called) if report.called else []


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
    report = EnvironmentReport(environment=environment if isinstance(environment, str) else environment.__qualname__)
    environment_class = resolve(environment)
    script = random_policy(environment_class)
    if _is_empty_choice(tasks, report):
        return report
    chosen_tasks = list(tasks) if tasks is not None else _tasks(environment_class, episodes, report)
    for number, task in enumerate(chosen_tasks[:episodes]):
        spec = spec_of(environment_class, task, number, 0)

        async def main(spec: EpisodeSpec = spec) -> str | None:
            first = await execute_episode(environment_class, spec, script)
            if isinstance(first, Failure):
                return first.text
            report.episodes += 1
            report.rewards.append(first.header.reward or 0.0)
            return await resume_at_every_entry(environment_class, spec, script, first, report)

        for schedule in schedules:
            problems: list[str] = []
            with missing_awaits(problems):
                problem = simulate(main, seed=schedule)
                if problem:
                    gc.collect()  # the frames of an error hold its coroutines
            if problems or problem:
                where = f"task {task.id!r}, schedule {schedule}: "
                report.findings += [f"{where}{text}" for text in [*problems, *[problem] * bool(problem)]]
                return report
    return report


def _check_concurrency(
    run: PlayEpisode, environment: type[Environment], tasks: Sequence[Task], seed: int, report: EnvironmentReport
) -> None:
    """Report episodes that differ when several play at once."""
    if not (report.passed and report.episodes):
        return
    report.on_progress("playing several episodes at once", "")
    report.concurrency = compare_concurrent_episodes(
        run, environment, tasks, seed=seed, sampling=report.sampling, alone_s=report.longest_s
    )
    report.findings += report.concurrency.findings


def _check_format(environment: type[Environment], tasks: Sequence[Task], seed: int, report: EnvironmentReport) -> None:
    def play(task: Task, number: int, script: Script) -> EpisodeFormatReward | str:
        report.on_progress("playing replies in a broken format", f"game {number + 1} on task {task.id!r}")
        spec = spec_of(environment, task, number, seed)
        outcome = event_loop.run(execute_episode(environment, spec, script))
        if isinstance(outcome, Failure):
            return outcome.text
        if not report.lists_actions:  # else the random policy played legal actions, as these texts need not be
            _count_actions(outcome.entries, report)
        broken, reward = outcome.counts.of_all_policies("broken turns") > 0, outcome.header.reward or 0.0
        report.format_rewards.append(reward)
        return EpisodeFormatReward(reward=reward, broken=broken)

    has_tools = issubclass(environment, ToolEnvironment)
    report.findings += find_format_reward_faults(play, tasks, random_policy(environment), has_tools=has_tools)


def _check_answers(environment: type[Environment], tasks: Sequence[Task], seed: int, report: EnvironmentReport) -> None:
    """Play replies that should not win, and the answers in the tasks' data, which should."""
    clock = LoadClock()
    end = clock.monotonic() + ANSWERS_S

    def play(task: Task, text: str) -> float | None:
        if clock.monotonic() > end:
            raise TimeoutError
        report.on_progress("playing answers", f"task {task.id!r}")
        script, size = always(text), len(text.encode())
        executing = execute_episode(
            environment, spec_of(environment, task, 0, seed), script, max_tokens=size + MAX_TOKENS
        )
        outcome = event_loop.run(executing)
        return None if isinstance(outcome, Failure) else outcome.header.reward

    tools = environment.tool_table().values() if issubclass(environment, ToolEnvironment) else ()
    is_won = report.demonstrated > len(report.unrewarded_demonstrations)
    with contextlib.suppress(TimeoutError):
        faults = find_reward_faults(
            play,
            tasks,
            reward_code=getattr(environment, "reward", None),
            tools=[tool.spec for tool in tools],
            best_random=math.inf if is_won else max([*report.rewards, *report.format_rewards], default=-math.inf),
        )
        report.findings += filter(None, [faults.easy_win])
        report.unwinnable = faults.no_win


def _check_demonstrations(
    run: PlayEpisode,
    environment: type[Environment],
    tasks: Sequence[Task],
    seed: int,
    report: EnvironmentReport,
) -> None:
    """Play the demonstrations of tasks: they reach code that only runs after a success, which chance rarely does."""
    clock = LoadClock()
    end = clock.monotonic() + DEMONSTRATED_S
    for number, task in enumerate(tasks):
        if clock.monotonic() > end:
            break
        report.on_progress("playing demonstrations", f"task {task.id!r}")
        spec = spec_of(environment, task, number, seed)
        policy = DemonstrationPolicy(environment, spec)
        executing = execute_episode(environment, spec, policy, max_turns=DEMONSTRATED_TURNS, sampling=report.sampling)
        outcome = run(executing)
        if isinstance(outcome, Failure):
            report.findings.append(policy.failure or f"task {task.id!r}, as demonstrated: {outcome.text}")
            return
        report.demonstrated += 1
        if not any((trajectory.reward or 0.0) > 0 for trajectory in outcome.header.trajectories):
            report.unrewarded_demonstrations.append(task.id)


def _check_wrong_calls(
    run: PlayEpisode,
    environment: type[Environment],
    tasks: Sequence[Task],
    seed: int,
    report: EnvironmentReport,
) -> None:
    """Play wrong tool calls. An error is a fault of the environment; a failing program of an external agent, whose code
    is not the user's, is a warning."""

    def play(task: Task, number: int, script: Script) -> Failure | bool:
        report.on_progress("playing wrong tool calls", f"task {task.id!r}")
        spec = spec_of(environment, task, number, seed)
        outcome = run(execute_episode(environment, spec, script, sampling=report.sampling))
        return outcome if isinstance(outcome, Failure) else is_harness and _has_failed(outcome)

    is_harness = issubclass(environment, HarnessEnvironment)
    report.wrong_calls = play_wrong_calls(play, tasks[: 1 if is_harness else WRONG_CALL_TASKS])
    if issubclass(environment, HarnessEnvironment):
        report.failed_reward = environment.failed_reward
        return
    for kind in dict.fromkeys(kind for kind, _, _ in report.wrong_calls.errors):
        errors = [(task, failure) for other, task, failure in report.wrong_calls.errors if other == kind]
        task, failure = errors[0]
        report.findings.append(
            f"task {task.id!r}, when every turn is a tool call with {kind}: {failure.text} (in {len(errors)} of "
            f"{plural(min(len(tasks), WRONG_CALL_TASKS), 'episode')}); answer such calls, or give them a low reward"
        )


def _has_failed(outcome: ExecutedEpisode) -> bool:
    """Whether the program of an external agent failed."""
    results = [body for entry in outcome.entries if isinstance(body := entry.decode(), EffectEntry)]
    return any(
        body.error is not None or (isinstance(body.value, Mapping) and body.value.get("error") is not None)
        for body in results
    )


def _is_empty_choice(tasks: Sequence[Task] | None, report: EnvironmentReport) -> bool:
    """Whether the caller chose no tasks, which is a fault."""
    if tasks is None or len(tasks):
        return False
    report.findings.append("tasks is empty, so nothing was checked; leave it out to play the first training tasks")
    return True


def _tasks(
    environment: type[Environment],
    count: int,
    report: EnvironmentReport,
    options: Mapping[str, Any] = MappingProxyType({}),
    split: Split = "train",
) -> list[Task]:
    """Return the first tasks of a split, and report their faults."""
    try:
        source, second_source = (
            checked_source(environment, split, environment.tasks(split, seed=0, **options)) for _ in range(2)
        )
        chosen_tasks = [source[index] for index in range(min(count, len(source)))]
        second_draw = [second_source[index] for index in range(len(chosen_tasks))]
    except EnvironmentDefinitionError as error:
        report.findings.append(str(error))
        return []
    except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
        report.findings.append(f"tasks({split!r}, seed=0) raised {describe_user_code_error(error)}")
        return []
    if not chosen_tasks and split == "train":
        report.findings.append("tasks('train', seed=0) is empty")
    for first, second in zip(chosen_tasks, second_draw, strict=True):
        if not isinstance(first, Task):
            report.findings.append(
                f"tasks({split!r})[…] is {type(first).__name__}, not agentrl.Task; write agentrl.Task(id=…, data={{…}})"
            )
            return []
        if first != second:
            report.findings.append(f"task {first.id!r} differs on second access: draw it from the seed and index")
    return chosen_tasks


def _compare_splits(
    environment: type[Environment], count: int, report: EnvironmentReport, options: Mapping[str, Any]
) -> None:
    """Compare the tasks of both splits, and tasks that share an id, up to a limit on their number and on the time."""
    splits = [split for split in ("held_out", "train") if split in environment.splits]
    if "held_out" in splits:
        _tasks(environment, count, report, options, "held_out")
    if not report.passed:
        return
    contents: dict[str, SourceContents] = {}
    for split in splits:
        try:
            source = environment.tasks(split, seed=0, **options)
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
            report.findings.append(f"tasks({split!r}, seed=0) raised {describe_user_code_error(error)}")
            return
        clock = LoadClock().monotonic
        contents[split] = read_contents(source, seconds=COMPARED_S, of_endless=MAX_READ_TASKS, clock=clock)
        if contents[split].problem:
            report.findings.append(f"tasks({split!r}, seed=0){contents[split].problem}")
            return
        report.uncompared += contents[split].size - contents[split].num_read
    held_out = {name: each for name, each in contents.items() if name != "train"}
    report.overlap = SplitOverlap.of(contents.get("train"), held_out)


def _check_episodes(
    run: Callable[[Coroutine[Any, Any, ExecutedEpisode | None]], ExecutedEpisode | None],
    environment: type[Environment],
    tasks: Sequence[Task],
    seed: int,
    report: EnvironmentReport,
) -> ExecutedEpisode | None:
    """Check episodes until one has a fault or the time is over; returns how the last one was played."""
    last: ExecutedEpisode | None = None
    clock = LoadClock()
    end = clock.monotonic() + PLAYING_S
    for number, task in _games(environment, tasks, report):
        if number and clock.monotonic() > end:
            report.unplayed = max(len(tasks) - number, 0)
            break
        share_s = (end - clock.monotonic()) / max(len(tasks) - number, 1)  # shared by the tasks not yet played
        loop_problems: list[str] = []  # problems that the loop's monitor reports, some only when the loop is closed
        with missing_awaits(loop_problems):
            last = run(_check_episode(environment, task, number, seed, report, loop_problems, share_s=share_s))
            gc.collect()  # an error that was never retrieved is reported when its task is collected
        report.findings[:0] = [f"task {task.id!r}: {text}" for text in loop_problems]
        if not report.passed:
            break
    return last


async def _check_episode(
    environment: type[Environment],
    task: Task,
    number: int,
    seed: int,
    report: EnvironmentReport,
    loop_problems: list[str],
    *,
    share_s: float,
) -> ExecutedEpisode | None:
    """Check an episode, for about `share_s`; returns how it was played, or None if that was a fault."""
    clock = LoadClock()
    began = clock.monotonic()
    spec = spec_of(environment, task, number, seed)
    script = random_policy(environment)
    part = f"episode {number + 1}, task {task.id!r}: "
    report.on_progress(_PLAYING, f"{part}playing it")
    # Report code that blocks the event loop twice for longer than 0.3 s.
    remedy = PROGRAM_REMEDY if issubclass(environment, HarnessEnvironment) else BLOCKING_REMEDY

    def on_blocked(place: str, seconds: float) -> None:
        # Shown at once: a program that waits in the loop's thread for its own model's reply waits until its client's
        # timeout, and the finding comes only then.
        report.on_progress(_PLAYING, f"{part}{place} blocks the event loop: {remedy}")

    with (
        watch_event_loop(loop_problems.append, repeated_s=0.3, users_only=True, remedy=remedy, count=on_blocked),
        watch_side_effects(environment) as side_effects,
    ):
        first = await execute_episode(environment, spec, script, sampling=report.sampling)
    report.longest_s = max(report.longest_s, clock.monotonic() - began)
    report.findings += [f"task {task.id!r}: {text}" for text in side_effects.findings.values()]
    if side_effects.asked_model:
        loop_problems.clear()  # the blocking call was the model's own answer, which must be replaced, not awaited
    if isinstance(first, Failure):
        asks = (
            calls_language_model(side_effects.source)
            and not side_effects.findings
            and not issubclass(environment, HarnessEnvironment)
        )
        hint = f". By its imports or addresses {MODEL_ADVICE}" if asks else ""
        report.findings.append(f"task {task.id!r}: {first.text}{hint}")
        return None
    report.episodes += 1
    report.has_turns |= first.has_turns
    _count_entries(environment, task, first.entries, report)
    is_complete = first.header.stop_reason == "completed"  # else `truncated_reward` counts
    for trajectory in first.header.trajectories if is_complete else ():
        if trajectory.reward is None:
            report.unrewarded.setdefault(trajectory.seat, task.id)
        else:
            report.rewarded.add(trajectory.seat)
    report.cuts += first.cuts
    if first.metrics.get(PROGRAM_FAILED):
        report.program_errors.append(_program_error(first.entries))
    report.rewards.append(first.header.reward or 0.0)
    if loop_problems:  # a blocking environment would block again for every entry
        return first
    if issubclass(environment, HarnessEnvironment):
        problem = await _recall_everything(environment, spec, script, first, report, part)
    else:
        episode_s = max(clock.monotonic() - began, 1e-3)
        max_cuts = max(int(share_s / episode_s) - 1, 1 if number == 0 else 0)
        problem = await resume_at_every_entry(environment, spec, script, first, report, part, max_cuts=max_cuts)
    if problem:
        report.findings.append(f"task {task.id!r}, {problem}")
    return first


async def resume_at_every_entry(
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    first: ExecutedEpisode,
    report: EnvironmentReport,
    part: str = "",
    *,
    max_cuts: int = MAX_CUTS,
) -> str | None:
    """Kill an episode at every entry, resume it and compare; returns the differences as sentences that begin with
    `part`. An episode with more than `max_cuts` entries is killed at evenly spaced ones."""
    entries = first.entries
    cuts = _cuts(len(entries), min(max_cuts, MAX_CUTS))
    report.untried_kills += len(entries) - len(cuts)
    for before, cut in enumerate(cuts):
        report.on_progress(
            _PLAYING, f"{part}killed after entry {cut} of {len(entries)} and resumed ({before} of {len(cuts)} kills)"
        )
        answers = [entry for entry in entries[cut:] if is_external(entry)]
        outcome = await execute_episode(environment, spec, script, entries[:cut], answers=answers)
        report.resumptions += 1
        if isinstance(outcome, Failure):
            problem, remedy = outcome.text, ""
            if outcome.reason == "resource_lost" and _has_pinned(entries[:cut]):
                continue  # as declared, the episode starts over
        else:
            problem, remedy = difference(first, outcome) or "", f". {REMEDY}{_stray_lines(environment)}"
        if problem:
            return f"killed after entry {cut} of {len(entries)} and run again: {problem}{remedy}"
    report.resume_class = _weaker(report.resume_class, entries)
    return None


async def _recall_everything(
    environment: type[HarnessEnvironment],
    spec: EpisodeSpec,
    script: Script,
    first: ExecutedEpisode,
    report: EnvironmentReport,
    part: str,
) -> str | None:
    """Restart an episode of an external agent over the first of its replies, then over all. Returns the first request
    that the agent does not repeat."""
    if not environment.replay_stable:
        report.resume_class = "pinned"
        return None
    recorded_turns = list(external_turns_with_context(first.entries))
    turns = {entry.call_id: body for entry in recorded_turns if isinstance(body := entry.decode(), TurnEntry)}
    for count in sorted({min(1, len(recorded_turns)), len(recorded_turns)}):
        report.on_progress(_PLAYING, f"{part}resumed with {plural(count, 'recorded reply', 'recorded replies')}")
        next_attempt = dataclasses.replace(spec, attempt=1)
        outcome = await execute_episode(
            environment, next_attempt, script, answers=recorded_turns[:count], sampling=report.sampling
        )
        report.resumptions += 1
        if isinstance(outcome, Failure):
            return f"after resuming with {plural(count, 'recorded reply', 'recorded replies')}: {outcome.text}"
        recorded_requests = {
            entry.call_id: body
            for entry in external_turns_with_context(outcome.entries)
            if isinstance(body := entry.decode(), TurnEntry)
        }
        missing = [body for call_id, body in turns.items() if call_id not in recorded_requests][:count]
        if missing and len(missing) > len(turns) - count:
            new = [
                body
                for call_id, body in recorded_requests.items()
                if call_id not in turns and body.seat == missing[0].seat
            ]
            if not new:
                return f"after resuming, turn {missing[0].turn} of seat {missing[0].seat!r} was never requested"
            assert new[0].request is not None
            difference = describe_request_difference(missing[:1], new[0].messages, new[0].request)
            return f"after resuming, the request differs: {difference}"
    return None


def _has_pinned(entries: Sequence[JournalEntry]) -> bool:
    return any(isinstance(body := entry.decode(), ResourceCallEntry) and body.level == "pinned" for entry in entries)


def _weaker(level: ResourceLevel, entries: Sequence[JournalEntry]) -> ResourceLevel:
    """Return the weakest resource level that the environment has used."""
    levels = {body.level for entry in entries if isinstance(body := entry.decode(), ResourceCallEntry)} | {level}
    return "pinned" if "pinned" in levels else "snapshot" if "snapshot" in levels else "replay"


def _cuts(entries: int, max_cuts: int) -> list[int]:
    if entries <= max_cuts:
        return list(range(1, entries + 1))
    return sorted({max(round(index * entries / max_cuts), 1) for index in range(1, max_cuts + 1)})


def _stray_lines(environment: type[Environment]) -> str:
    """Return up to three lines of an environment that seem to use time or unseeded randomness, as a clause; "" if there
    are none.

    Example:
        >>> bool(_STRAY.search("draw = random.Random()")), bool(_STRAY.search("draw = random.Random(3)"))
        (True, False)
    """
    lines = enumerate(environment.source().splitlines(), start=1)
    stray = [f"line {number}: `{line.strip()}`" for number, line in lines if _STRAY.search(line)][:3]
    return f". Look at {', '.join(stray)}" if stray else ""
