"""The environment checker: run an environment with a random policy, kill it at every entry, and compare.

What it proves, on a few tasks: the class is well formed, its tasks are stable and serialisable, its rewards are
numbers, and executing `run()` again over any prefix of its journal gives the same episode, the outside world (effects,
external tools, clocks) answering as it did. It runs the environment's code; it needs no model and no torch.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.core.rng import stream
from agentrl.credit.advantages import ADVANTAGES
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.environment.base import Environment, Limits
from agentrl.environment.registry import name_of, resolve
from agentrl.environment.tools import ToolEnvironment
from agentrl.journal.entries import EffectEntry, JournalEntry, ToolEntry, TurnEntry, ValueEntry
from agentrl.observe.blocked import watch_loop
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.signal import Signal
from agentrl.rollout.episode import RolloutSettings
from agentrl.rollout.plain_format import STOP_TOKEN, PlainFormat
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.format_check import TASKS as FORMAT_TASKS
from agentrl.testing.format_check import Outcome, format_findings
from agentrl.testing.memory_journal import MemoryJournal
from agentrl.testing.suspects import REMEDY, suspects

POLICY = "random"
MAX_TURNS = 8
MAX_CUTS = 64
"""Prefixes tried per episode; longer journals are cut at evenly spaced entries."""
TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class EnvironmentReport:
    """What the checker found."""

    environment: str
    findings: list[str] = field(default_factory=list)
    """What is wrong and where, in words."""
    episodes: int = 0
    resumptions: int = 0
    """How often an episode was executed again from a prefix of its journal."""
    rewards: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def text(self) -> str:
        """The report for a terminal."""
        if self.findings:
            return "\n".join(
                [f"{self.environment}: {len(self.findings)} finding(s)", *(f"- {f}" for f in self.findings)]
            )
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        return (
            f"{self.environment}: passed. {self.episodes} episodes of a random policy (mean reward {mean:.2f}), "
            f"killed and resumed {self.resumptions} times with the same outcome: class `replay`."
        )


def check_environment(
    environment: str | type, *, tasks: Sequence[Task] | None = None, episodes: int = 4, seed: int = 0
) -> EnvironmentReport:
    """Check an environment; never raises for what the environment does.

    Args:
        environment: a class, a registered name, `module:Class` or a path.
        tasks: tasks to play; default: the first training tasks.
        episodes: how many.
        seed: of the random policy.
    """
    report = EnvironmentReport(environment=environment if isinstance(environment, str) else environment.__qualname__)
    try:
        found = resolve(environment)
    except AgentRLError as error:
        report.findings.append(str(error))
        return report
    chosen = list(tasks) if tasks is not None else _tasks(found, max(episodes, FORMAT_TASKS), report)
    for number, task in enumerate(chosen[:episodes]):
        told: list[str] = []  # by the watch on the loop, some of it only when the loop is closed
        asyncio.run(_check_episode(found, task, number, seed, report, told.append))
        gc.collect()  # an error that nobody awaited is told when its task is collected
        report.findings[:0] = [f"task {task.id!r}: {text}" for text in told]
        if not report.passed:
            break
    if report.passed:
        _check_format(found, chosen, seed, report)
    return report


def _check_format(environment: type[Environment], tasks: Sequence[Task], seed: int, report: EnvironmentReport) -> None:
    def play(task: Task, number: int, script: Script) -> Outcome | str:
        sums: dict[str, float] = {}
        spec = _spec(environment, task, number, seed)
        outcome = asyncio.run(execute(environment, spec, script, sums=sums))
        if isinstance(outcome, str):
            return outcome
        return Outcome(reward=outcome[0].reward or 0.0, broken=sums["broken turns"] > 0)

    has_tools = issubclass(environment, ToolEnvironment)
    report.findings += format_findings(play, tasks, _random_policy(environment), has_tools=has_tools)


def _tasks(environment: type[Environment], count: int, report: EnvironmentReport) -> list[Task]:
    try:
        source, again = environment.tasks("train", seed=0), environment.tasks("train", seed=0)
        chosen = [source[index] for index in range(min(count, len(source)))]
        repeated = [again[index] for index in range(len(chosen))]
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the finding
        report.findings.append(f"tasks('train', seed=0) raised {type(error).__name__}: {error}")
        return []
    if not chosen:
        report.findings.append("tasks('train', seed=0) is empty")
    for first, second in zip(chosen, repeated, strict=True):
        if not isinstance(first, Task):
            report.findings.append(f"tasks('train')[…] is {type(first).__name__}, not agentrl.Task")
            return []
        if first != second:
            report.findings.append(
                f"task {first.id!r} differs when it is asked for again: draw it from the seed and index"
            )
        try:
            msgspec.msgpack.encode(dict(first.data))
        except (TypeError, msgspec.ValidationError) as error:
            report.findings.append(f"task {first.id!r}: data is not JSON data ({error})")
    return chosen


async def _check_episode(
    environment: type[Environment],
    task: Task,
    number: int,
    seed: int,
    report: EnvironmentReport,
    tell: Callable[[str], None],
) -> None:
    spec = _spec(environment, task, number, seed)
    script = _random_policy(environment)
    with watch_loop(tell):
        first = await execute(environment, spec, script)
    if isinstance(first, str):
        report.findings.append(f"task {task.id!r}: {first}")
        return
    report.episodes += 1
    header, entries = first
    unrewarded = [t.seat for t in header.trajectories if t.reward is None]
    if unrewarded:
        report.findings.append(
            f"task {task.id!r}: seat {unrewarded[0]!r} acted but was given no reward; call agent.reward(…) in run()"
        )
    report.rewards.append(header.reward or 0.0)
    for cut in _cuts(len(entries)):
        again = await execute(
            environment, spec, script, entries[:cut], answers=list(filter(_is_from_outside, entries[cut:]))
        )
        report.resumptions += 1
        problem = again if isinstance(again, str) else _difference(entries, again[1], header, again[0])
        if problem:
            remedy = "" if isinstance(again, str) else f". {REMEDY}{suspects(environment)}"
            cause = f"killed after entry {cut} of {len(entries)} and run again: {problem}{remedy}"
            report.findings.append(f"task {task.id!r}, {cause}")
            return


def _spec(environment: type[Environment], task: Task, number: int, seed: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"e{number}",
        environment=name_of(environment),
        task=task,
        seed=seed + number,
        seats={seat: SeatBinding(POLICY) for seat in environment.seats},
        group_id=f"g{number}",
    )


async def execute(
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    recorded: Sequence[JournalEntry] = (),
    *,
    answers: Sequence[JournalEntry] = (),
    sums: dict[str, float] | None = None,
    max_turns: int = MAX_TURNS,
) -> tuple[EpisodeHeader, list[JournalEntry]] | str:
    """An episode over a prefix: its header and entries, or what went wrong; `sums` gets those of the `Dispatcher`."""
    journal = MemoryJournal()
    engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    dispatcher = Dispatcher(
        environment=spec.environment,
        seats=environment.seats,
        policy_of=lambda seat: POLICY,
        run_seed=spec.seed,
        group_size=1,
        buffer=EpisodeBuffer((), ADVANTAGES["none"]),
        store=journal,
        signal=Signal(),
    )
    log = journal.turn_log("check")
    runner = EpisodeRunner(
        engine=engine,
        chat_format=PlainFormat(),
        store=journal,
        log=log,
        host=dispatcher,
        clock=SystemClock(),
        settings=RolloutSettings(
            sampling=SamplingParams(max_tokens=256, stop_token_ids=(STOP_TOKEN,)),
            limits=Limits(max_turns=max_turns, max_tokens=256, max_context=1 << 20),
            tool_timeout_s=TIMEOUT_S,
            episode_timeout_s=TIMEOUT_S,
        ),
    )
    failures: list[BaseException] = []
    dispatcher.worker = AsyncioWorker(runner, environments={}, data_attempts=1, on_failure=failures.append)
    dispatcher.on_collapse = failures.append
    for entry in recorded:
        log.append(entry)
    journal.admit(spec)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            run = runner.run(spec, environment, recorded, answers=answers)
            header = await asyncio.get_running_loop().create_task(run)
        await dispatcher.worker.drain()
    except TimeoutError:
        return f"run() did not end within {TIMEOUT_S:g} s"
    except AgentRLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the finding
        return f"run() raised {type(error).__name__}: {error}"
    if failures:
        return f"a child episode failed: {failures[0]}"
    if sums is not None:
        sums.update(dispatcher.sums)
    return header, log.read(spec.episode_id, spec.attempt)


def _difference(
    before: Sequence[JournalEntry], after: Sequence[JournalEntry], first: EpisodeHeader, second: EpisodeHeader
) -> str | None:
    if first.reward != second.reward or first.stop_reason != second.stop_reason:
        return f"reward {second.reward} ({second.stop_reason}) instead of {first.reward} ({first.stop_reason})"
    then = {entry.call_id: entry for entry in before}
    now = {entry.call_id: entry for entry in after}
    for call_id in sorted(then.keys() | now.keys()):
        if call_id not in now or call_id not in then:
            return f"call {call_id} is {'missing' if call_id not in now else 'new'}"
        if then[call_id].asked != now[call_id].asked:
            return f"call {call_id} asks something else ({_told(then[call_id])} → {_told(now[call_id])})"
    return None


def _is_from_outside(entry: JournalEntry) -> bool:
    body = entry.decode()
    return isinstance(body, EffectEntry | ValueEntry) or (isinstance(body, ToolEntry) and body.external)


def _told(entry: JournalEntry) -> str:
    body = entry.decode()
    if isinstance(body, TurnEntry):
        return " / ".join(str(message.get("content"))[:60] for message in body.messages)
    return type(body).__name__


def _cuts(entries: int) -> list[int]:
    if entries <= MAX_CUTS:
        return list(range(1, entries + 1))
    return sorted({round(index * entries / MAX_CUTS) for index in range(1, MAX_CUTS + 1)})


def _random_policy(environment: type[Environment]) -> Script:
    """Calls tools with arguments that fit their schema, or says something short."""
    tools = list(environment.tool_table().values()) if issubclass(environment, ToolEnvironment) else []

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = stream("check", request.seed)
        text = draw.choice(["yes", "no", "0", "1", "2", "[0]", "left", "a", "hello world"])
        if tools and draw.random() < 0.7:
            spec = draw.choice(tools).spec
            schemas = spec.parameters.get("properties", {})
            arguments = {name: _value(schema, draw) for name, schema in schemas.items()}
            call = msgspec.json.encode({"name": spec.name, "arguments": arguments}).decode()
            text = f"<tool_call>{call}</tool_call>"
        return [*text.encode(), STOP_TOKEN]

    return script


def _value(schema: dict[str, Any], draw: random.Random) -> Any:
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _value(draw.choice(schema["anyOf"]), draw)
    match schema.get("type"):
        case "integer":
            return draw.randint(0, 99)
        case "number":
            return float(draw.randint(0, 99))
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [_value(schema.get("items", {}), draw) for _ in range(2)]
        case "object":
            return {name: _value(inner, draw) for name, inner in schema.get("properties", {}).items()}
        case "null":
            return None
    return draw.choice(["a", "b", "some text"])
