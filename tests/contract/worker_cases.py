"""A pool of worker processes, or one worker in this process, over a scripted engine, a real journal and a host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.app.assemble import make_local_worker
from agentrl.app.run_parts import make_chat_format, make_workers
from agentrl.cluster.worker_pool import WorkerPool
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.ports import Worker
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.release import WholeGroupRelease
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.environment.containment import stop_loop_in_forked_process
from agentrl.environment.environment import Environment
from agentrl.environment.registry import name_of
from agentrl.journal.port import Admission
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher, make_dispatcher
from agentrl.orchestrator.host import DispatchingHost
from tests.contract.warm_processes import WarmPlacement
from tests.contract.worker_environments import TwoTurns

VERSIONS = {"policy": PolicyVersion("policy", 0, 0), "stranger": PolicyVersion("stranger", 0, 0)}


@dataclass
class Workplace:
    """What a test has in hand."""

    directory: Path
    journal: SqliteJournal
    dispatcher: Dispatcher
    engine: ProcessEngine
    worker: Worker
    environment: type[Environment]
    ends: dict[str, EpisodeHeader] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    times: Counter[str] = field(default_factory=Counter)
    """How often each episode's end was told."""
    running: set[str] = field(default_factory=set)
    """Submitted episodes whose end was not told."""

    @property
    def pool(self) -> WorkerPool:
        assert isinstance(self.worker, WorkerPool)
        return self.worker

    def spec(self, name: str, **data: Any) -> EpisodeSpec:
        return EpisodeSpec(
            episode_id=name,
            environment=name_of(self.environment),
            task=Task(id=name, data={"directory": str(self.directory), **data}),
            seed=int(name[1:]),
            seats={seat: SeatBinding("policy") for seat in self.environment.seats},
            group_id=name,
        )

    def submit(self, *specs: EpisodeSpec, resume: bool = False) -> None:
        if not resume:
            self.journal.admit(*specs)
        for spec in specs:
            self.running.add(spec.episode_id)
            if spec.episode_id not in self.dispatcher.in_flight:
                self.dispatcher.apply(Admission(spec=spec))
            self.worker.submit(spec, self._ended, resume=resume)

    def _ended(self, header: EpisodeHeader) -> None:
        self.running.discard(header.episode_id)
        self.times[header.episode_id] += 1
        self.ends[header.episode_id] = header

    def open(self) -> None:
        """Let the episodes that wait go on."""
        (self.directory / "go").touch()

    def reached(self) -> dict[str, int]:
        """In which process each task waits."""
        return {path.name.rpartition(".")[0]: int(path.suffix[1:]) for path in self.directory.glob("*.[0-9]*")}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.failure is not None:
                raise self.failure
            await asyncio.sleep(0.005)

    async def drained(self) -> None:
        """Wait until nothing is in flight, and each end was told."""
        await self.until(lambda: not (len(self.dispatcher.in_flight) or self.running))
        if self.failure is not None:
            raise self.failure


def config_of(workers: int, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"id": "calculator"},
            "model": {"path": "agentrl.environments:calculator/model"},
            "workers": workers,
            "sampling": {"max_tokens": 8, "max_turns": 8},
            **settings,
        }
    )


@contextlib.asynccontextmanager
async def workplace(
    directory: Path,
    workers: int,
    environment: type[Environment] = TwoTurns,
    placement: Any = None,
    seconds_per_token: float = 5e-4,
    kv_tokens: int | None = None,
    **settings: Any,
) -> AsyncIterator[Workplace]:
    """Workers over a scripted engine; with one, it is in this process.

    Their processes are forked from a warm one where `placement` names no other.
    """
    config = config_of(workers, **settings)
    place = directory / "place"
    place.mkdir(exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        journal = SqliteJournal(directory / "journal")
        stack.push_async_callback(journal.close)
        arguments = {
            "max_context": 4096,
            "refresh": "token",
            "seconds_per_token": seconds_per_token,
            "kv_tokens": kv_tokens,
        }
        program = ChildProgram("tests.contract.scripted_program:scripted_engine", arguments)
        engine = await ProcessEngine(program, VERSIONS, clock=SystemClock(), placement=WarmPlacement()).ready()
        stack.push_async_callback(engine.close)
        buffer = EpisodeBuffer((), WholeGroupRelease((), REWARD_ESTIMATORS["none"]))
        at: Workplace

        def fail(error: BaseException) -> None:
            at.failure = at.failure or error

        plan = config.rollout_plan
        dispatcher = make_dispatcher(
            environment=environment,
            policy_of=plan.seats.policy_of,
            run_seed=plan.seed,
            group_size=plan.credit.group_size,
            max_in_flight=plan.max_in_flight,
            buffer=buffer,
            store=journal,
            changed=ChangeCondition(),
            fail=fail,
        )
        at = Workplace(place, journal, dispatcher, engine, None, environment)  # type: ignore[arg-type]
        host = DispatchingHost(dispatcher)
        pool = make_workers(
            *(config.rollout_plan, config.device_demand, environment, engine, journal.directory),
            *(at.told.append, directory / "workers.log", SystemClock()),
        )
        if pool is None:
            stack.enter_context(stop_loop_in_forked_process())
            chat_format = make_chat_format(config.model)
            dispatcher.run(
                make_local_worker(plan, environment, host, engine, chat_format, journal, SystemClock(), fail)
            )
        else:
            pool.placements = [placement or WarmPlacement()] * len(pool.placements)
            stack.push_async_callback(pool.close)
            pool.attach(host, journal, fail)
            dispatcher.run(pool)
        at.worker = dispatcher.worker
        yield at
        await dispatcher.worker.cancel()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's scenario in real time."""
    asyncio.run(main())  # type: ignore[arg-type]
