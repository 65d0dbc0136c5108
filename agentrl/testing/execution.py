"""One execution of an episode for the checker: everything in memory, the policy a script, over a recorded prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.clock import LoopClock, SystemClock
from agentrl.core.errors import AgentRLError, EpisodeError
from agentrl.core.ports import SamplingParams
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.credit.advantages import ADVANTAGES
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.environment.base import Limits
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.signal import Signal
from agentrl.rollout.episode import RolloutSettings
from agentrl.rollout.plain_format import STOP_TOKEN, PlainFormat
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.memory_journal import MemoryJournal
from agentrl.testing.sim import SimLoop

if TYPE_CHECKING:
    from agentrl.environment.base import Environment
    from agentrl.journal.entries import JournalEntry
    from agentrl.rollout.context import LiveContext

POLICY = "random"
MAX_TURNS = 8
TIMEOUT_S = 30.0
RESOURCE_LOST = "resource_lost: "
"""How the answer of `execute` begins where a pinned resource was reached on re-execution."""


class Executed(NamedTuple):
    """What came of an execution."""

    header: EpisodeHeader
    entries: list[JournalEntry]
    states: dict[str, Any]
    """Of the resources that can tell theirs, at the end."""


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
    sums: dict[str, float] | None = None,
    max_turns: int = MAX_TURNS,
) -> Executed | str:
    """An episode over a prefix: what came of it, or what went wrong.

    Args:
        environment: its class.
        spec: the episode.
        script: the policy.
        recorded: the entries before the kill.
        answers: what the outside world answered after it, and answers again.
        sums: gets those of the `Dispatcher`.
        max_turns: of an agent.
    """
    journal, failures = MemoryJournal(), list[BaseException]()
    dispatcher, runner = _parts(environment, spec, script, journal, failures, max_turns)
    log = journal.turn_log("check")
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
    except EpisodeError as error:
        return f"{RESOURCE_LOST if error.reason == 'resource_lost' else ''}{error}"
    except AgentRLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the finding
        return f"run() raised {type(error).__name__}: {error}"
    if failures:
        return f"a child episode failed: {failures[0]}"
    if sums is not None:
        sums.update(dispatcher.sums)
    return Executed(header, log.read(spec.episode_id, spec.attempt), runner.states[spec.episode_id])


def _parts(
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    journal: MemoryJournal,
    failures: list[BaseException],
    max_turns: int,
) -> tuple[Dispatcher, _StateRunner]:
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
    runner = _StateRunner(
        engine=ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}),
        chat_format=PlainFormat(),
        store=journal,
        log=journal.turn_log("check"),
        host=dispatcher,
        clock=LoopClock() if isinstance(asyncio.get_running_loop(), SimLoop) else SystemClock(),
        settings=RolloutSettings(
            sampling=SamplingParams(max_tokens=256, stop_token_ids=(STOP_TOKEN,)),
            limits=Limits(max_turns=max_turns, max_tokens=256, max_context=1 << 20),
            tool_timeout_s=TIMEOUT_S,
            episode_timeout_s=TIMEOUT_S,
        ),
    )
    dispatcher.worker = AsyncioWorker(runner, environments={}, data_attempts=1, on_failure=failures.append)
    dispatcher.on_collapse = failures.append
    return dispatcher, runner
