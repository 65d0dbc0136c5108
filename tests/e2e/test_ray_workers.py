"""Workers' processes as children of Ray actors: the same pool, whatever of it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agentrl.cluster.engine_actors import RayPlacement
from agentrl.journal.reader import TurnLogReader
from tests.contract import worker_environments as environments
from tests.contract.worker_cases import run, workplace
from tests.processes import running

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Ray's own, under -W error
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def parent_of(number: int) -> int:
    return next(process.parent for process in running() if process.number == number)


def test_episodes_of_workers_in_actors_go_on_when_process_or_actor_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 3, environments.TwoTurns, RayPlacement()) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(6)))
            await at.until(lambda: len(at.reached()) == 6)
            await at.until(lambda: all(len(at.journal.recorded(f"e{number}", 0)[0]) == 2 for number in range(6)))
            before = {f"e{number}": at.journal.recorded(f"e{number}", 0)[0] for number in range(6)}
            first, second, _ = sorted(set(at.reached().values()))
            os.kill(first, signal.SIGKILL)
            os.kill(parent_of(second), signal.SIGKILL)
            await at.until(lambda: len(at.told) == 2)
            at.open()
            await at.drained()
            assert sorted(line.partition(" ")[2].partition("; it is")[0][2:] for line in at.told) == [
                "died (SIGKILL)",
                "was lost with its Ray actor",
            ]
            assert set(at.times.values()) == {1}
            assert len(at.times) == 6
            reader = TurnLogReader(at.journal.directory)
            for name, header in at.ends.items():
                assert header.location is not None
                entries = reader.read(header.location.partition, name, 0, entries=header.location.entries)
                assert entries[:2] == before[name]
                assert len({entry.call_id for entry in entries}) == len(entries)
            reader.close()
            workers = [process.supervisor.process_id for process in at.pool.processes]
        assert not {process.number for process in running()} & set(workers)

    run(main)


@pytest.mark.exhaustive
def test_children_run_in_any_actor(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.Parent, RayPlacement()) as at:
            at.submit(at.spec("e0"))
            await at.until(lambda: len(list(at.directory.glob("child.*"))) == 2)
            at.open()
            await at.drained()
            (trajectory,) = at.ends["e0"].trajectories
            assert trajectory.reward == 8.0

    run(main)
