"""One execution of an episode for the checker: in memory, with a scripted policy, over a recorded prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from agentrl.core.clock import LoopClock, SystemClock
from agentrl.core.errors import AgentRLError, EpisodeError, GlobalRandomError
from agentrl.core.ports import SamplingParams
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.credit.advantages import ADVANTAGES
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.environment.base import Limits, described
from agentrl.environment.registry import name_of
from agentrl.orchestrator.buffer import EpisodeBuffer, WholeGroups
from agentrl.orchestrator.dispatch import Dispatcher, Signal
from agentrl.orchestrator.metrics import Counts
from agentrl.rollout.byte_formats import STOP_TOKEN, PlainFormat
from agentrl.rollout.episode import OnCodeChange, RolloutSettings
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.simulation.virtual_time import SimLoop
from agentrl.testing.memory_journal import MemoryJournal

if TYPE_CHECKING:
    from agentrl.core.ports import Engine
    from agentrl.environment.base import Environment
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import JournalStore
    from agentrl.rollout.context import LiveContext

POLICY = "random"
PARTITION = "0"
R = TypeVar("R", bound=EpisodeRunner)
MAX_TURNS = 8
TIMEOUT_S = 30.0
RESOURCE_LOST = "resource_lost: "
"""Prefix of the answer of `execute` if re-execution reached a pinned resource."""


class Executed(NamedTuple):
    """The outcome of an execution."""

    header: EpisodeHeader
    entries: list[JournalEntry]
    states: dict[str, Any]
    """Final states of the resources that have `get_state`."""
    counts: Counts


class _StateRunner(EpisodeRunner):
    """Remembers how the resources of each episode ended."""

    def __init__(self, **services: Any) -> None:
        super().__init__(**services)
        self.states: dict[str, dict[str, Any]] = {}

    def finished(self, context: LiveContext) -> None:
        told = {resource.name: resource.state() for resource in context.resources}
        self.states[context.episode.spec.episode_id] = {name: s for name, s in told.items() if s is not None}


async def execute(
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    recorded: Sequence[JournalEntry] = (),
    *,
    answers: Sequence[JournalEntry] = (),
    max_turns: int = MAX_TURNS,
) -> Executed | str:
    """An episode over a prefix: what came of it, or what went wrong.

    Args:
        environment: its class.
        spec: the episode.
        script: the policy.
        recorded: the entries before the kill.
        answers: what the outside world answered after it, and answers again.
        max_turns: of one agent.
    """
    journal, failures = MemoryJournal(), list[BaseException]()
    engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    settings = settings_of(max_turns=max_turns)
    dispatcher, runner = wired(environment, engine, journal, settings, failures, runner_type=_StateRunner)
    log = journal.turn_log(PARTITION)
    for entry in recorded:
        log.append(entry)
    journal.admit(spec)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            running = runner.run(spec, environment, recorded, answers=answers)
            header = await asyncio.get_running_loop().create_task(running)
        await dispatcher.worker.drain()
    except TimeoutError:
        return f"run() did not end within {TIMEOUT_S:g} s"
    except GlobalRandomError as error:
        if recorded:
            return str(error)
        return await execute(environment, spec, script, answers=answers, max_turns=max_turns)
    except EpisodeError as error:
        return f"{RESOURCE_LOST if error.reason == 'resource_lost' else ''}{error}"
    except AgentRLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the finding
        return f"run() raised {described(error)}"
    if failures:
        return f"a child episode failed: {failures[0]}"
    if dispatcher.worker.last_failure:
        return f"a child episode was dropped: {dispatcher.worker.last_failure}"
    entries = log.read(spec.episode_id, spec.attempt)
    return Executed(header, entries, runner.states[spec.episode_id], dispatcher.buffer.counts)


def settings_of(
    *,
    max_turns: int = MAX_TURNS,
    max_tokens: int = 256,
    max_context: int = 1 << 20,
    tool_timeout_s: float = TIMEOUT_S,
    episode_timeout_s: float = TIMEOUT_S,
    on_code_change: OnCodeChange = "try",
) -> RolloutSettings:
    """Sampling settings and limits of episodes in `PlainFormat`."""
    return RolloutSettings(
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,)),
        limits=Limits(max_turns=max_turns, max_tokens=max_tokens, max_context=max_context),
        tool_timeout_s=tool_timeout_s,
        episode_timeout_s=episode_timeout_s,
        on_code_change=on_code_change,
    )


def wired(
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
    """The host, with its worker, and the runner of single episodes of an environment, all played by one policy.

    `failures` gets what no episode can be blamed for.
    """
    dispatcher = Dispatcher(
        environment=environment,
        policy_of=lambda seat, group: policy,
        run_seed=0,
        group_size=1,
        buffer=EpisodeBuffer((), WholeGroups((), ADVANTAGES["none"])),
        store=store,
        signal=Signal(),
    )
    runner = runner_type(
        engine=engine,
        chat_format=PlainFormat(),
        store=store,
        log=store.turn_log(PARTITION),
        host=dispatcher,
        clock=LoopClock() if isinstance(asyncio.get_running_loop(), SimLoop) else SystemClock(),
        settings=settings,
    )
    dispatcher.worker = AsyncioWorker(
        runner,
        environments={name_of(environment): environment},
        data_attempts=data_attempts,
        on_failure=failures.append,
    )
    dispatcher.fail = failures.append
    return dispatcher, runner
