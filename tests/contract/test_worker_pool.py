"""Workers in processes of their own: what they are asked is done once, whatever dies, and little of it is said."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.app.run_parts import make_workers
from agentrl.cluster import worker_wire
from agentrl.cluster.worker_pool import WorkerPool
from agentrl.core.clock import SystemClock
from agentrl.core.network import Address
from agentrl.core.records import ForkPoint, ProcessStatus, SeatBinding
from agentrl.journal.reader import TurnLogReader
from tests.contract import worker_environments as environments
from tests.contract.scripted_program import SCRIPTED_END
from tests.contract.worker_cases import Workplace, config_of, run, workplace
from tests.support.listening import Listening

EVENT_BYTES = 256
DEATHS = 8
"""Three by which an episode is found that kills processes, one as it is with others, and what it gets on meanwhile."""


def test_episodes_are_spread_and_each_is_told_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(8)))
            await at.until(lambda: len(at.reached()) == 8)
            assert sorted(len(process.episodes) for process in at.pool.processes) == [4, 4]
            at.open()
            await at.drained()
            assert set(at.times.values()) == {1}
            assert {header.stop_reason for header in at.ends.values()} == {SCRIPTED_END}
            partitions = {header.location.partition for header in at.ends.values() if header.location}
            assert partitions == {"turns-0.db", "turns-1.db"}

    run(main)


def test_episodes_are_those_one_process_plays(tmp_path: Path) -> None:
    async def played(workers: int) -> dict[str, Any]:
        (tmp_path / str(workers)).mkdir()
        async with workplace(tmp_path / str(workers), workers) as at:
            at.open()
            at.submit(*(at.spec(f"e{number}") for number in range(4)))
            await at.drained()
            reader = TurnLogReader(at.journal.directory)
            found = {}
            for name, header in at.ends.items():
                assert header.location is not None
                entries = reader.read(header.location.partition, name, 0, entries=header.location.entries)
                tokens = [getattr(entry.decode(), "token_ids", None) for entry in entries]
                found[name] = (header.turns, header.tokens, header.trajectories, tokens)
            reader.close()
            return found

    async def main() -> None:
        assert await played(2) == await played(1)

    run(main)


def test_an_endpoint_that_does_not_answer_a_worker_is_reported(tmp_path: Path) -> None:
    async def main() -> None:
        judge = {"kind": "remote", "url": "http://127.0.0.1:9/v1", "model": "m"}
        async with workplace(tmp_path, 2, policies={"policy": {}, "judge": judge}) as at:
            spec = at.spec("e0")
            at.submit(replace(spec, seats={seat: SeatBinding("judge") for seat in spec.seats}))
            at.open()
            await at.until(lambda: bool(at.told))
            assert re.match(r"worker \d: policy 'judge' at http://127.0.0.1:9/v1 does not answer", at.told[0])

    run(main)


def test_each_worker_is_told_of_the_whole_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 1) as at:
            engine, journal = at.engine, at.journal.directory
            whole = engine.capabilities = replace(engine.capabilities, kv_tokens=30_001, prefill_rate=600.0)
            log = tmp_path / "workers.log"
            config = config_of(3)
            pool = make_workers(
                *(config.rollout_plan, config.device_demand, at.environment, engine, journal),
                *(at.told.append, log, SystemClock()),
            )
            assert pool is not None
            told = worker_wire.TO_WORKER.decode(msgspec.msgpack.encode(pool._settings.work))
            assert isinstance(told, worker_wire.WorkerSetup)
            assert told.capabilities == whole
            await pool.close()

    run(main)


def worker_of(at: Workplace, process_id: int) -> Any:
    return next(each for each in at.pool.processes if each.supervisor.process_id == process_id)


def test_the_episodes_of_a_killed_worker_go_on_in_another_and_nothing_is_sampled_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(6)))
            await at.until(lambda: len(at.reached()) == 6)
            await at.until(lambda: all(at.journal.recorded(f"e{number}", 0)[0] for number in range(6)))
            victim = at.reached()["e0"]
            dead = worker_of(at, victim)
            its = {f"e{number}" for number in range(6) if at.reached()[f"e{number}"] == victim}
            before = {name: at.journal.recorded(name, 0)[0] for name in its}
            os.kill(victim, signal.SIGKILL)
            await at.until(lambda: all(at.reached()[name] != victim or not dead.episodes for name in its))
            at.open()
            await at.drained()
            assert set(at.times) == {f"e{number}" for number in range(6)}
            assert set(at.times.values()) == {1}
            reader = TurnLogReader(at.journal.directory)
            for name in its:
                location = at.ends[name].location
                assert location is not None
                assert location.partition != dead.partition
                entries = reader.read(location.partition, name, 0, entries=location.entries)
                assert entries[: len(before[name])] == before[name]
                assert len({entry.call_id for entry in entries}) == len(entries)
            reader.close()
            assert any("SIGKILL" in line for line in at.told)

    run(main)


@pytest.mark.parametrize("by", ["signal", "run"])
def test_a_worker_that_is_to_leave_parks_its_episodes_which_go_on_elsewhere(tmp_path: Path, by: str) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"sampling": {"max_tokens": 600}, "seconds_per_token": 4e-3}
        async with workplace(tmp_path / "a", 2, environments.LongTurn, **settings) as at:
            names = [f"e{number}" for number in range(6)]
            at.submit(*map(at.spec, names))
            await at.until(lambda: all(at.journal.recorded(name, 0)[1] for name in names))
            worker = worker_of(at, at.reached()["e0"])
            its = [placed.spec.episode_id for placed in at.pool._episodes.values() if placed.process is worker]
            if by == "signal":
                os.kill(at.reached()["e0"], signal.SIGTERM)
            else:
                worker.leave("its node is drained")
            await at.until(lambda: not worker.episodes)
            sampled = {name: at.journal.recorded(name, 0)[1] for name in its}
            assert not any(placed.deaths for placed in at.pool._episodes.values()), "to leave is no death"
            await at.drained()
            turns = {name: at.journal.recorded(name, 0)[0][1].decode() for name in names}
            assert set(at.times.values()) == {1}
            assert any(line.startswith(f"worker {at.pool.processes.index(worker)} leaves") for line in at.told)
            await at.until(lambda: worker.is_ready)  # a new process
        async with workplace(tmp_path / "b", 1, environments.LongTurn, **settings) as at:
            at.submit(*map(at.spec, names))
            await at.drained()
            for name in names:
                whole = at.journal.recorded(name, 0)[0][1].decode()
                assert turns[name].tokens.token_ids == whole.tokens.token_ids  # type: ignore[union-attr]
        assert its
        assert all(sampled.values())

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(main)


def test_a_turn_that_a_killed_worker_was_sampling_goes_on_from_its_last_token_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"sampling": {"max_tokens": 600}, "seconds_per_token": 4e-3}
        async with workplace(tmp_path / "a", 2, environments.LongTurn, **settings) as at:
            at.submit(at.spec("e0"))
            await at.until(lambda: bool(at.journal.recorded("e0", 0)[1]))
            partials = at.journal.recorded("e0", 0)[1]
            os.kill(at.reached()["e0"], signal.SIGKILL)
            await at.drained()
            turn = at.journal.recorded("e0", 0)[0][1].decode()
        async with workplace(tmp_path / "b", 1, environments.LongTurn, **settings) as at:
            at.submit(at.spec("e0"))
            await at.drained()
            whole = at.journal.recorded("e0", 0)[0][1].decode()
        assert partials
        assert turn.tokens.token_ids == whole.tokens.token_ids  # type: ignore[union-attr]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(main)


def test_a_stopped_worker_holds_up_nobody_else_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cluster.worker_process.BEHIND_S", 1.5)
    monkeypatch.setattr("agentrl.app.run_parts.SILENCE_S", 6.0)

    async def main() -> None:
        async with workplace(tmp_path, 2, max_in_flight=12) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(6)))
            await at.until(lambda: len(at.reached()) == 6)
            stopped = at.reached()["e0"]
            os.kill(stopped, signal.SIGSTOP)
            its = {name for name, process in at.reached().items() if process == stopped}
            at.open()
            await at.until(lambda: len(at.ends) == 6 - len(its))
            assert not its & at.ends.keys()
            await at.until(lambda: worker_of(at, stopped).is_behind)
            at.submit(*(at.spec(f"e{number}") for number in range(6, 8)))
            assert len(worker_of(at, stopped).episodes) == len(its)
            await at.drained()
            assert set(at.times.values()) == {1}
            assert len(at.times) == 8
            assert any("no sign of life for 6 s" in line for line in at.told)

    run(main)


def test_an_episode_that_kills_workers_is_dropped_and_its_neighbors_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.Poison) as at:
            at.submit(at.spec("e0"))
            await at.drained()
            assert at.ends["e0"].drop_reason == "worker_lost"
            assert "worker processes died while it ran, and it made no progress" in at.worker.last_failure
            assert at.journal.rows("SELECT drop_reason, detail FROM episodes")[0][0] == "worker_lost"

    run(main)


def heard_more(at: Workplace, lines: int) -> bool:
    return len(at.told) > lines


def test_an_episode_that_gets_on_after_a_death_is_no_suspect(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.TwoWaits) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(4)))
            for _ in range(2):
                await at.until(lambda: len(set(at.reached().values())) > 0 and len(at.reached()) == 4)
                await at.until(lambda: all(at.journal.recorded(f"e{number}", 0)[0] for number in range(4)))
                victim, told = worker_of(at, at.reached()["e0"]), len(at.told)
                (at.directory / f"e0.{at.reached()['e0']}").unlink()
                os.kill(victim.supervisor.process_id, signal.SIGKILL)
                await at.until(partial(heard_more, at, told))
            placed = {placed.spec.episode_id: placed for placed in at.pool._episodes.values()}
            assert placed["e0"].is_suspect
            at.open()
            await at.until(lambda: not any(each.deaths for each in placed.values()))
            assert not any(process.suspects for process in at.pool.processes)
            assert not at.ends
            (at.directory / "on").touch()
            await at.drained()
            assert {header.stop_reason for header in at.ends.values()} == {SCRIPTED_END}

    run(main)


def deaths(at: Workplace) -> int:
    return sum("SIGKILL" in line for line in at.told)


def test_what_was_with_an_episode_that_kills_workers_is_not_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.PoisonOrNot) as at:
            at.open()
            at.submit(at.spec("e0", kills=True), *(at.spec(f"e{number}") for number in range(1, 6)))
            await at.drained()
            assert deaths(at) <= DEATHS
            assert at.ends["e0"].drop_reason == "worker_lost"
            assert {at.ends[f"e{number}"].stop_reason for number in range(1, 6)} == {SCRIPTED_END}

    run(main)


def test_a_parent_of_a_child_that_kills_workers_goes_on_without_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.ParentOfPoison) as at:
            at.open()
            at.submit(at.spec("e0"))
            await at.drained()
            assert deaths(at) <= DEATHS
            assert at.ends["e0"].trajectories[0].reward == 1.0
            rows = dict(at.journal.rows("SELECT episode, drop_reason FROM episodes"))
            assert [name for name, reason in rows.items() if reason] == ["e0~0.r#1.0"]
            assert len(rows) == 4

    run(main)


HOLDS = """
import sys
from pathlib import Path
from agentrl.journal.run_process import RunLock
lock = RunLock(Path(sys.argv[1]), "turns-0.lock")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_partition_that_a_dying_process_still_has_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "journal").mkdir(mode=0o700)
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDS, tmp_path / "journal"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"held\n"
        async with workplace(tmp_path, 2) as at:
            at.open()
            at.submit(at.spec("e0"))
            await at.until(lambda: bool(at.told))
            assert re.fullmatch(rf"worker 0: .*: process {holder.pid} is writing this run; .* 30 s to end", at.told[0])
            assert not at.ends
            holder.stdin.close()
            await holder.wait()
            await at.drained()
            assert at.ends["e0"].stop_reason == SCRIPTED_END

    run(main)


def test_children_run_on_any_worker_and_a_parent_that_moves_finds_them_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, environments.Parent) as at:
            at.submit(at.spec("e0"))
            await at.until(lambda: len(list(at.directory.glob("child.*"))) == 2)
            await at.until(lambda: len(at.journal.recorded("e0", 0)[0]) >= 3)
            os.kill(at.reached()["parent"], signal.SIGKILL)
            await at.until(lambda: len(list(at.directory.glob("parent.*"))) == 2)
            at.open()
            await at.drained()
            (trajectory,) = at.ends["e0"].trajectories
            assert trajectory.reward == 8.0
            assert at.ends["e0"].measured_against[0].policy == "policy"
            rows = at.journal.rows("SELECT episode, count(*) FROM episodes GROUP BY episode")
            assert sorted(rows) == [("e0", 1), *((f"e0~0.r#2.{index}", 1) for index in range(4))]

    run(main)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fork_shares_the_children_of_its_prefix(tmp_path: Path, workers: int) -> None:
    async def main() -> None:
        async with workplace(tmp_path, workers, environments.PatientParent) as at:
            at.submit(at.spec("e0"))
            await at.until(lambda: len(at.journal.recorded("e0", 0)[0]) >= 3)
            partition = TurnLogReader(tmp_path / "journal").partition_of("e0", 0)
            assert partition is not None
            point = ForkPoint(journal=".", partition=partition, episode_id="e0", attempt=0, call_id="r#1")
            at.submit(replace(at.spec("e1"), fork=point, purpose="fork"))
            await at.until(lambda: len(at.journal.recorded("e1", 0)[0]) >= 2)
            at.open()
            await at.drained()
            for parent in ("e0", "e1"):
                (trajectory,) = at.ends[parent].trajectories
                assert trajectory.reward == 4.0
            rows = at.journal.rows("SELECT episode FROM episodes ORDER BY episode")
            assert [name for (name,) in rows] == ["e0", "e0~0.r#0.0", "e0~0.r#0.1", "e1"]

    run(main)


def test_parked_episodes_wait_and_go_on_in_the_order_of_their_deadlines(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            at.submit(at.spec("e0"), at.spec("e1"))
            await at.until(lambda: len(at.reached()) == 2)
            assert at.worker.park("e0")
            assert at.worker.park("e1")
            assert not at.worker.park("e2")
            await at.until(lambda: all(placed.deadline < float("inf") for placed in at.pool._episodes.values()))
            at.open()
            assert at.worker.unpark() == ("e0",)
            await at.until(lambda: "e0" in at.ends)
            assert "e1" not in at.ends
            os.kill(at.reached()["e1"], signal.SIGKILL)  # it is parked where it goes on, too
            await at.until(lambda: bool(at.told))
            assert at.worker.unpark(5) == ("e1",)
            await at.drained()
            assert set(at.times.values()) == {1}

    run(main)


def test_what_is_cancelled_is_not_told_and_can_go_on_later_with_fewer_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(4)))
            await at.until(lambda: len(at.reached()) == 4)
            await at.worker.cancel()
            at.dispatcher.in_flight.clear()
            at.running.clear()
            assert not at.ends
            assert len(at.journal.unfinished()) == 4
            again = at.spec("e7")
            at.open()
            at.submit(again)
            await at.drained()
            assert set(at.ends) == {"e7"}
            before = {f"e{number}": at.journal.recorded(f"e{number}", 0)[0] for number in range(4)}
        async with workplace(tmp_path, 1) as at:
            at.submit(*at.journal.unfinished(), resume=True)
            await at.drained()
            assert set(at.ends) == {f"e{number}" for number in range(4)}
            for name, entries in before.items():
                location = at.ends[name].location
                assert location is not None
                assert location.partition == "turns-0.db"
                assert at.journal.recorded(name, 0)[0][: len(entries)] == entries

    run(main)


def test_no_process_has_more_than_its_share_of_roots_and_the_rest_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2, max_in_flight=4) as at:
            at.submit(*(at.spec(f"e{number}") for number in range(7)))
            await at.until(lambda: len(at.reached()) == 4)
            assert [process.roots["train"] for process in at.pool.processes] == [2, 2]
            assert len(at.pool._queue) == 3
            at.submit(*(replace(at.spec(f"v{number}"), purpose="evaluate") for number in range(5)))
            await at.until(lambda: len(at.reached()) == 8)
            assert [process.roots["evaluate"] for process in at.pool.processes] == [2, 2], "a limit of their own"
            assert len(at.pool._queue) == 4
            at.open()
            await at.drained()
            assert len(at.ends) == 12

    run(main)


@pytest.mark.parametrize(
    "how", ["raises", "sys.exit", "no reward", "no data", "no such seat", "no such policy", "swallows"]
)
def test_what_environments_do_wrong_ends_as_in_one_process(tmp_path: Path, how: str) -> None:
    timeout = {"episode_timeout_s": 1.0} if how == "swallows" else {}

    async def ended(workers: int) -> tuple[Any, ...]:
        directory = tmp_path / str(workers)
        directory.mkdir()
        policies = {"policy": {}, "other": {}}
        settings = {"policies": policies, "seats": {"solver": "policy"}, **timeout}
        async with workplace(directory, workers, environments.Broken, **settings) as at:
            at.submit(at.spec("e0", how=how))
            while not at.ends and at.failure is None:
                await asyncio.sleep(0.005)
            failure = at.failure and (type(at.failure), str(at.failure))
            rows = at.journal.rows("SELECT attempt, drop_reason, detail FROM episodes ORDER BY attempt")
            told = [(attempt, reason, re.sub(r" at /\S+:\d+ in \w+", "", detail)) for attempt, reason, detail in rows]
            return (failure, told, at.times["e0"])

    async def main() -> None:
        one, several = await ended(1), await ended(2)
        assert several == one
        assert one[0] is not None or one[1][0][1] is not None

    run(main)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_an_event_of_an_episode_crosses_in_at_most_256_bytes(tmp_path: Path) -> None:
    """What goes out with an episode, its spec, is its task, and not counted; nor is a task that is spawned."""

    async def main() -> None:
        placement = Listening(tmp_path / "log")
        async with workplace(tmp_path, 2, environments.Parent, placement) as at:
            at.submit(*(at.spec(f"e{number}", story="x" * 5000) for number in range(3)))
            await at.until(
                lambda: any(isinstance(said, worker_wire.SpawnChildEpisodes) for said, _ in placement.frames)
            )
            at.worker.park("e0")
            await at.until(lambda: any(isinstance(said, worker_wire.EpisodeParked) for said, _ in placement.frames))
            at.open()
            at.worker.unpark()
            await at.drained()
        sizes: dict[type, int] = {}
        for said, size in placement.frames:
            sizes[type(said)] = max(size, sizes.get(type(said), 0))
        tasks = {
            worker_wire.WorkerSetup,
            worker_wire.EngineAddresses,
            worker_wire.StartEpisode,
            worker_wire.SpawnChildEpisodes,
            worker_wire.LogLine,
        }
        events = {kind.__name__: size for kind, size in sizes.items() if kind not in tasks}
        assert events.keys() >= {
            "EpisodeEnded",
            "ChildEpisodeEnded",
            "RememberProposal",
            "ProposalReply",
            "ParkEpisode",
            "EpisodeParked",
            "UnparkEpisode",
        }
        assert max(events.values()) <= EVENT_BYTES, events
        (sent,) = {size for said, size in placement.frames if isinstance(said, worker_wire.SpawnChildEpisodes)}
        assert sent < 400  # one task for its four children, and not what the parent was given
        everything = sum(size for said, size in placement.frames if type(said).__name__ in events)
        assert everything < EVENT_BYTES * 15 * 4

    run(main)


def test_a_worker_that_cannot_reach_the_journal_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOffAtFirst:
        """Grants an address at which nobody listens, as after a cut, and then no address: the worker writes itself."""

        granted, host = 0, ""

        async def grant(self, worker: int) -> str:
            self.granted += 1
            nobody = str(Address("127.0.0.1", 1, "0" * 64))
            return nobody if self.granted == 1 else ""

        async def revoke(self, worker: int) -> None:
            pass

        def status(self) -> ProcessStatus:
            return ProcessStatus(name="journal receiver", doing="receives 0.0 kB/s")

        async def close(self) -> None:
            pass

    def with_receiver(*arguments: Any) -> WorkerPool | None:
        pool = make_workers(*arguments)
        assert pool is not None
        pool._receiver = CutOffAtFirst()  # type: ignore[assignment]
        return pool

    monkeypatch.setattr("tests.contract.worker_cases.make_workers", with_receiver)

    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            at.submit(at.spec("e0"))
            at.open()
            await at.drained()
            assert at.failure is None
            assert at.ends["e0"].stop_reason == SCRIPTED_END
            (told,) = at.told
            assert "was killed: " in told
            assert "cannot be reached at port 1 of 127.0.0.1" in told

    run(main)
