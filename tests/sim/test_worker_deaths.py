"""Worker processes die, of episodes or of nothing the episodes did: who is dropped, how many die, and who waits."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.cluster import worker_wire as wire
from agentrl.cluster.worker_pool import PoolSettings, WorkerPool
from agentrl.core import ids
from agentrl.core.clock import LoopClock
from agentrl.core.errors import EngineFailedError
from agentrl.core.ports import EngineCapabilities
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, Task, dropped_header
from agentrl.core.rpc import send
from agentrl.engines.process import ChildProgram
from agentrl.journal.port import EpisodeEnd
from agentrl.testing.plugin import SeededSimulation
from tests.support.frames import bodies

pytestmark = pytest.mark.sim

SEEDS = 6
ACTS, ACT_S = 10, 30.0
STARTS_S = 3.0
"""How long a process takes to start."""
CAPABILITIES = EngineCapabilities(
    name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=1
)


class Process:
    """A worker's process in simulated time; implements `process.ConnectedChildProcess`, and its writer."""

    process_id = 0
    host = ""
    is_drained = False

    def __init__(self, machine: Machine) -> None:
        self.reader = asyncio.StreamReader()
        self._machine = machine
        self._dead = asyncio.Event()
        self._children: dict[int, asyncio.Queue[int]] = {}
        self.replies: list[wire.BranchesStarted] = []

    @property
    def writer(self) -> Process:
        return self

    async def wait(self) -> str:
        await self._dead.wait()
        return "died"

    def kill(self) -> None:
        if not self._dead.is_set():
            self._dead.set()
            self.reader.feed_eof()

    close = kill

    def write(self, data: bytes, /) -> None:
        for body in bodies(data):
            self._hear(wire.TO_WORKER.decode(body))

    def _hear(self, message: wire.ToWorker) -> None:
        match message:
            case wire.WorkerSetup() as work:
                self._machine.processes[work.number] = self
                self._say(wire.WorkerReady())
            case wire.StartEpisode() as start:
                self._children[start.number] = asyncio.Queue()
                self._machine.tasks.append(asyncio.get_running_loop().create_task(self._play(start)))
            case wire.ChildEpisodeEnded() as ended:
                self._children[ended.number].put_nowait(ended.index)
            case wire.BranchesStarted():
                self.replies.append(message)
            case wire.CancelEpisodes():
                self._say(wire.EpisodesCancelled())
            case wire.ShutDownWorker():
                asyncio.get_running_loop().call_later(1.0, self.kill)

    def _say(self, message: wire.FromWorker) -> None:
        send(_Line(self.reader), message)

    async def _play(self, start: wire.StartEpisode) -> None:
        """Acts that were done before take no time; the first one may be to spawn children and to wait for them."""
        name, data, disk = start.spec.episode_id, start.spec.task.data, self._machine.disk
        await asyncio.sleep(0.1)
        if children := [Task(id=name, data=child) for child in data.get("children", ())]:
            await self._spawn(start, children)
        if data.get("branches"):
            point = ForkPoint(journal=".", partition="turns-0.db", episode_id=name, attempt=0, call_id="r#0")
            self._say(wire.StartBranches(call=1, number=start.number, point=point, count=1, versions={}))
        if data.get("asks"):
            self._say(wire.RememberProposal(call=1, number=start.number, call_id="r#0", key="", structure=""))
        is_moved = start.resume
        while disk[name] < ACTS and not self._dead.is_set():
            if disk[name] == data.get("kills_at"):
                self._killed_by(name)
                return
            await asyncio.sleep(ACT_S)
            if self._dead.is_set():
                return
            disk[name] += 1
            if is_moved:
                self._say(wire.EpisodeProgressed(number=start.number))
                is_moved = False
        if not self._dead.is_set():
            header = replace(dropped_header(start.spec, ""), drop_reason=None, stop_reason="completed")
            self._say(wire.encode_episode_ended(start.number, header))

    async def _spawn(self, start: wire.StartEpisode, children: Sequence[Task]) -> None:
        if self._dead.is_set():
            return
        of = tuple(range(len(children)))
        self._say(
            wire.SpawnChildEpisodes(
                number=start.number, attempt=0, call="r#0", environment="", tasks=tuple(children), of=of, known=()
            )
        )
        if start.spec.task.data.get("kills_beside"):
            await asyncio.sleep(1.0)
            self._killed_by(start.spec.episode_id)
        for _ in of:
            await self._children[start.number].get()

    def _killed_by(self, name: str) -> None:
        if not self._dead.is_set():
            self._machine.deaths[name] += 1
            self.kill()


def _spec(name: str, data: Mapping[str, Any], parent_id: str | None = None) -> EpisodeSpec:
    task = Task(id=name, data=dict(data))
    return EpisodeSpec(episode_id=name, environment="", task=task, seed=0, seats={}, group_id=name, parent_id=parent_id)


class _Line:
    """What a process writes is what the run reads."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.write = reader.feed_data

    def close(self) -> None: ...


class Machine:
    """Where processes run, what is on disk, and whom episodes ask: placement, engine, store and host of a pool."""

    addresses = ()

    def __init__(self, *, workers: int = 2, in_flight: int, attempts: int = 5) -> None:
        self.processes: dict[int, Process] = {}
        self.tasks: list[asyncio.Task[None]] = []
        """Of episodes, those of dead processes included."""
        self.deaths: Counter[str] = Counter()
        """Of processes, by who killed them."""
        self.disk: Counter[str] = Counter()
        self.ends: dict[str, float] = {}
        """When episodes ended that were not dropped."""
        self.dropped: dict[str, str] = {}
        self.failure: BaseException | None = None
        self.branch_s: list[float] = []
        """How long each request for branches waits, the last one first."""
        self._spawned: dict[str, EpisodeHeader | None] = {}
        self._waiting: dict[str, Callable[[int, EpisodeHeader], None]] = {}
        work = wire.WorkerSetup(
            number=0,
            plan={},
            journal="",
            environments={},
            sources={},
            paths=(),
            capabilities=CAPABILITIES,
            scorers={},
        )
        settings = PoolSettings(workers=workers, work=work, max_in_flight=in_flight, attempts=attempts, silence_s=1e6)
        self.pool = WorkerPool(
            settings, engines=[self], placements=[self] * settings.workers, clock=LoopClock(), tell=lambda line: None
        )
        self.pool.attach(self, self, self._failed)  # type: ignore[arg-type]  # and of a host

    def submit(self, name: str, **data: Any) -> None:
        self.pool.submit(_spec(name, data), lambda header: None)

    async def ready(self) -> Machine:
        while not all(process.is_ready for process in self.pool.processes):
            await asyncio.sleep(0.1)
        return self

    async def drained(self) -> None:
        while self.pool._episodes:
            await asyncio.sleep(1.0)
            if self.failure is not None:
                raise self.failure
        await self.pool.close()

    def _failed(self, error: BaseException) -> None:
        self.failure = error

    # --- the ports ----------------------------------------------------------------------------------------------------

    async def start(self, program: ChildProgram) -> Process:
        await asyncio.sleep(STARTS_S)
        return Process(self)

    async def close(self) -> None: ...

    def on_move(self, moved: Callable[[], None]) -> None:
        self.moved = moved

    async def ping(self) -> None:
        """Fails after a while, as an engine that is not started again."""
        await asyncio.sleep(30.0)
        raise EngineFailedError("it is not started again")

    async def commit(self, end: EpisodeEnd) -> None:
        await asyncio.sleep(0.01)
        if end.header.drop_reason is None:
            self.ends[end.spec.episode_id] = asyncio.get_running_loop().time()
        else:
            self.dropped[end.spec.episode_id] = end.header.drop_reason

    async def remember(self, *_: object) -> None:
        """Never answers, as while a tree waits for a version that another one holds."""
        await asyncio.Event().wait()

    async def branch(self, main: EpisodeSpec, *_: object) -> Mapping[str, PolicyVersion]:
        seconds = self.branch_s.pop()
        await asyncio.sleep(seconds)
        return {f"{seconds:g} s": PolicyVersion("policy", 0, 0)}

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str],
    ) -> None:
        """Children that live are not started again, whose end is known is told again."""
        for index, task in enumerate(tasks):
            name = ids.child_episode_id(parent.episode_id, 0, call, index)
            is_new = name not in self._spawned
            header = self._spawned.setdefault(name, None)
            self._waiting[name] = on_end
            if header is not None:
                on_end(index, header)
            if is_new:
                self.pool.submit(_spec(name, task.data, parent.episode_id), self._child_ended)

    def _child_ended(self, header: EpisodeHeader) -> None:
        name = header.episode_id
        self._spawned[name] = header
        self._waiting[name](int(name.rpartition(".")[2]), header)


async def machine(roots: int = 0, *, killers: Mapping[int, int] | None = None, **settings: Any) -> Machine:
    """With so many episodes, of which some kill their process before one of their acts."""
    at = await Machine(in_flight=max(2 * roots, 8), **settings).ready()
    for number in range(roots):
        kills_at = (killers or {}).get(number)
        at.submit(f"e{number}", **({} if kills_at is None else {"kills_at": kills_at}))
    return at


def test_two_deaths_from_outside_hold_nothing_back(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        at = await machine(256)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(40.0)
        at.processes[0].kill()
        await asyncio.sleep(4.5)
        at.processes[1].kill()
        await asyncio.sleep(10.0)
        assert sum(placed.is_suspect for placed in at.pool._episodes.values()) == 128
        assert not at.pool._queue
        await at.drained()
        assert len(at.ends) == 256
        late = max(at.ends.values()) - began - ACTS * ACT_S
        assert late < 2 * ACT_S + 10.0  # twice the act it was in, and a process's start

    simulated_loop.run(main, seeds=SEEDS)


@pytest.mark.parametrize("closes", [False, True])
def test_what_an_episode_asked_for_ends_with_it(simulated_loop: SeededSimulation, closes: bool) -> None:
    async def main() -> None:
        at = await machine()
        at.submit("e0", asks=True)
        await asyncio.sleep(ACT_S / 2)
        async with asyncio.timeout(100.0):
            await (at.pool.close() if closes else at.pool.cancel())
        assert at.failure is None

    simulated_loop.run(main, seeds=1)


def test_a_reply_to_a_dead_process_does_not_go_to_the_next_one(simulated_loop: SeededSimulation) -> None:
    """Each process numbers its calls from 1."""

    async def main() -> None:
        at = await machine(workers=1)
        at.branch_s = [2.0, 20.0]
        at.submit("e0", branches=True)
        await asyncio.sleep(1.0)
        at.processes[0].kill()
        await at.drained()
        assert [list(reply.pins) for reply in at.processes[0].replies] == [["2 s"]]

    simulated_loop.run(main, seeds=1)


def test_an_engine_that_failed_for_good_is_heard_of_though_only_workers_call_it(
    simulated_loop: SeededSimulation,
) -> None:
    async def main() -> None:
        at = await machine(4)
        for _ in range(3):
            at.moved()
        with pytest.raises(EngineFailedError, match="not started again"):
            await at.drained()
        await at.pool.close()

    simulated_loop.run(main, seeds=1)


def test_deaths_from_outside_drop_nobody_that_gets_on_in_between(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        at = await machine(4)
        at.submit("e4", children=[{}, {}])  # gets nowhere while it waits for them
        for death in range(12):
            await asyncio.sleep(ACT_S + 10.0)
            at.processes[death % 2].kill()
        await at.drained()
        assert not at.dropped
        assert len(at.ends) == 7

    simulated_loop.run(main, seeds=SEEDS)


@pytest.mark.parametrize("kills_at", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_one_that_kills_is_found_beside_255_that_do_not(simulated_loop: SeededSimulation, kills_at: int) -> None:
    async def main() -> None:
        at = await machine(256, killers={77: kills_at})
        await at.drained()
        assert at.dropped == {"e77": "worker_lost"}
        assert len(at.ends) == 255
        assert at.deaths["e77"] <= 7

    simulated_loop.run(main, seeds=SEEDS)


def test_several_that_kill_are_found_and_they_alone_are_dropped(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        killers = {number: number % 7 for number in range(5, 128, 30)}
        at = await machine(128, killers=killers)
        await at.drained()
        assert at.dropped.keys() == {f"e{number}" for number in killers}
        assert len(at.ends) == 128 - len(killers)
        assert max(at.deaths.values()) <= 9  # in 600 schedules: 7, eight times 8

    simulated_loop.run(main, seeds=SEEDS)


def test_a_child_that_kills_is_dropped_and_not_its_parent_or_its_siblings(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        at = await machine()
        for number in range(8):
            at.submit(f"e{number}", children=[{"kills_at": 2} if number == child == 3 else {} for child in range(8)])
        await at.drained()
        assert at.dropped.keys() == {"e3~0.r#0.3"}
        assert len(at.ends) == 8 * 9 - 1

    simulated_loop.run(main, seeds=SEEDS)


def test_the_end_of_the_processes_names_the_episodes_that_were_with_them(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        at = await machine(3, attempts=1)
        while at.failure is None:
            for process in list(at.processes.values()):
                process.kill()
            await asyncio.sleep(STARTS_S + 1.0)
        told = str(at.failure)
        assert re.search(r"processes that died.*: e\d \(task 'e\d'\) \d times?", told)
        await at.pool.close()

    simulated_loop.run(main, seeds=SEEDS)


def test_a_parent_that_kills_is_dropped_and_not_its_children(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        at = await machine()
        for number in range(4):
            at.submit(f"e{number}", children=[{}] * 8, kills_beside=number == 2)
        await at.drained()
        assert at.dropped.keys() == {"e2"}
        assert len(at.ends) == 4 * 9 - 1

    simulated_loop.run(main, seeds=SEEDS)
