"""An engine in a process of its own: what its death costs, what the next process knows, and what ends it for good."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.clock import RetryBudget, SystemClock
from agentrl.core.errors import EngineError, EngineLostError, ModelError
from agentrl.core.records import VersionSpan, WeightsRef
from agentrl.core.tokens import Tokens
from agentrl.engines.process import ChildProcess, ChildProgram, ProcessPlacement, Supervisor
from agentrl.engines.remote.client import ProcessEngine
from tests.contract.engine_kinds import START, ModelZoo, check_logprobs, prompt, request, version
from tests.contract.warm_processes import WarmPlacement

SCRIPTED = ChildProgram("tests.contract.scripted_program:scripted_engine", {"max_context": 4096, "refresh": "token"})


class NoWaiting(SystemClock):
    """Remembers how long it was asked to wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def kill(engine: ProcessEngine) -> None:
    assert engine.supervisor.process_id is not None
    os.kill(engine.supervisor.process_id, signal.SIGKILL)


def weights_of(step: int) -> WeightsRef:
    """Of a version whose files nobody reads."""
    return WeightsRef(version=version(step), path="", kind="full", sha256="")


async def made(
    program: ChildProgram = SCRIPTED, attempts: int = 5, placement: ProcessPlacement | None = None
) -> tuple[ProcessEngine, NoWaiting]:
    clock = NoWaiting()
    engine = ProcessEngine(program, START, attempts=attempts, clock=clock, placement=placement)
    return await engine.ready(), clock


def test_a_call_whose_process_dies_keeps_what_was_delivered_and_goes_on_in_the_next() -> None:
    async def main() -> None:
        engine, _ = await made()
        whole = await engine.open("a", "solver").generate(request("a", prompt(9), seed=3, max_tokens=590))
        got: list[int] = []
        heard = asyncio.Event()

        def on_delta(request_id: str, tokens: Tokens) -> None:
            assert (request_id, tokens.spans) == ("b", (VersionSpan(0, len(tokens.logprobs), START["solver"]),))
            got.extend(tokens.token_ids.tolist())
            heard.set()

        session = engine.open("b", "solver")
        running = asyncio.ensure_future(session.generate(request("b", prompt(9), seed=3, max_tokens=590), on_delta))
        beside = asyncio.ensure_future(engine.open("p", "proposer").generate(request("p", prompt(9), max_tokens=590)))
        await heard.wait()
        kill(engine)
        for lost in (running, beside):
            with pytest.raises(EngineLostError, match="SIGKILL"):
                await lost
        assert 0 < len(got) < 590
        assert got == whole.token_ids.tolist()[: len(got)]
        longer = [*prompt(9).tolist(), *got]
        rest = await session.generate(request("b", longer, seed=3, max_tokens=590 - len(got), sampled_before=len(got)))
        assert [*got, *rest.token_ids] == whole.token_ids.tolist()
        assert engine.supervisor.losses == 1
        await engine.close()

    asyncio.run(main())


def test_the_next_process_serves_the_versions_of_the_one_before(zoo: ModelZoo) -> None:
    async def main() -> None:
        program = ChildProgram(
            "agentrl.engines.embedded.engine:EmbeddedEngine.load",
            {"model_path": str(zoo.directory()), "max_context": 256},
        )
        engine, _ = await made(program, placement=WarmPlacement())
        first = zoo.full(version(1), seed=1)
        await engine.serve([first], [first])
        pinned = engine.open("pinned", "solver", pin=version(1))
        await engine.serve([zoo.full(version(2), seed=2)], [first])
        kill(engine)
        while not engine.supervisor.losses:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(engine.open("w", "solver").generate(request("w", prompt(12))))
        scored = await engine.score(version(1), prompt(12))  # pure: asked again of the next process
        newest, older, base = await asyncio.gather(
            waiting,
            pinned.generate(request("b", prompt(12))),
            engine.open("p", "proposer").generate(request("c", prompt(12))),
        )
        assert [completion.spans[0].version for completion in (newest, older, base)] == [
            version(2),
            version(1),
            START["proposer"],
        ]
        check_logprobs(zoo.load(seed=2), prompt(12), newest)
        check_logprobs(zoo.load(seed=1), prompt(12), older)
        check_logprobs(zoo.load(), prompt(12), base)
        assert scored.logprobs.shape == (12,)
        await engine.close()

    asyncio.run(main())


def test_a_pinned_version_stays_until_it_is_unpinned_also_in_the_next_process() -> None:
    async def main() -> None:
        engine, _ = await made()
        for _ in range(2):
            await engine.serve([weights_of(1)], [weights_of(1)])
        await engine.serve([weights_of(2)], [weights_of(1)])
        for losses, name in ((1, "a"), (2, "b")):
            completion = await engine.open(name, "solver", pin=version(1)).generate(request(name, prompt(12)))
            assert completion.spans[0].version == version(1)
            kill(engine)
            while engine.supervisor.losses < losses:
                await asyncio.sleep(0.01)
        for _ in range(2):
            await engine.serve([weights_of(2)])
            with pytest.raises(EngineError, match="not served here"):
                engine.open("c", "solver", pin=version(1))
        completion = await engine.open("d", "solver").generate(request("d", prompt(12)))
        assert completion.spans[0].version == version(2)
        assert engine.supervisor.losses == 2
        await engine.close()

    asyncio.run(main())


def test_what_is_said_to_a_process_that_has_not_been_told_all_does_not_end_it() -> None:
    async def main() -> None:
        engine = ProcessEngine(SCRIPTED, START, clock=NoWaiting())
        while engine.supervisor.process_id is None:
            engine.abort("nobody")
            await asyncio.sleep(0)
        engine.abort("nobody")
        await engine.ready()
        assert engine.supervisor.losses == 0
        await engine.close()

    asyncio.run(main())


def test_a_process_that_hangs_is_replaced_like_one_that_died_and_named() -> None:
    async def main() -> None:
        said: list[str] = []
        engine = ProcessEngine(SCRIPTED, START, silence_s=2, clock=NoWaiting(), tell=said.append)
        await engine.ready()
        running = asyncio.ensure_future(engine.open("a", "solver").generate(request("a", prompt(9), max_tokens=590)))
        await asyncio.sleep(0)
        assert engine.supervisor.process_id is not None
        os.kill(engine.supervisor.process_id, signal.SIGSTOP)
        async with asyncio.timeout(200):
            updating = asyncio.ensure_future(engine.serve([weights_of(1)]))
            with pytest.raises(EngineLostError, match="was killed"):
                await running
            await updating
            completion = await engine.open("b", "solver").generate(request("b", prompt(9)))
        assert completion.spans[0].version == version(1)
        assert said == ["the engine's process was killed: it gave no sign of life for 2 s; it is restarted in 1 s"]
        await engine.close()

    asyncio.run(main())


def test_a_process_whose_engine_hangs_hangs() -> None:
    async def main() -> None:
        program = ChildProgram("tests.contract.scripted_program:HangingEngine", {})
        said: asyncio.Queue[str] = asyncio.Queue()
        engine = await ProcessEngine(program, START, silence_s=0.5, clock=NoWaiting(), tell=said.put_nowait).ready()
        async with asyncio.timeout(200):
            assert "0.5 s" in await said.get()
        await engine.close()

    asyncio.run(main())


def test_a_process_that_talks_nonsense_is_replaced_by_name() -> None:
    async def main() -> None:
        said: list[str] = []
        engine = ProcessEngine(
            ChildProgram("tests.contract.scripted_program:confused_engine", {}),
            START,
            clock=NoWaiting(),
            tell=said.append,
        )
        async with asyncio.timeout(200):
            with pytest.raises(EngineLostError, match="was killed: it sent an invalid message"):
                await engine.open("a", "solver").generate(request("a", prompt(9), max_tokens=590), lambda *_: None)
            await engine.ready()
        assert len(said) == engine.supervisor.losses == 1
        await engine.close()

    asyncio.run(main())


def test_a_listener_that_raises_ends_its_own_call_and_no_other() -> None:
    async def main() -> None:
        engine, _ = await made()

        def on_delta(*_: Any) -> None:
            raise LookupError("of the listener")

        async with asyncio.timeout(200):
            beside = asyncio.ensure_future(engine.open("b", "solver").generate(request("b", prompt(9), max_tokens=590)))
            session = engine.open("a", "solver")
            with pytest.raises(LookupError, match="of the listener"):
                await session.generate(request("a", prompt(9), max_tokens=590), on_delta)
            assert len((await session.generate(request("a", prompt(9)))).token_ids) == 8
            assert len((await beside).token_ids) == 590
        assert engine.supervisor.losses == 0
        await engine.close()

    asyncio.run(main())


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        engine, _ = await made(attempts=1)
        await engine.close()

    asyncio.run(main())


class Unwelcome:
    """A process that a bug of ours keeps from being made ready."""

    async def launch(self) -> ChildProcess:
        return ChildProcess(await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True))

    async def welcome(self) -> None:
        raise KeyError("a bug")

    async def died(self, how: str) -> None:
        pass


def test_a_bug_in_making_a_process_ready_is_raised_by_who_waits_for_it() -> None:
    async def main() -> None:
        supervisor = Supervisor(
            "the process", Unwelcome(), budget=RetryBudget(5), silence_s=300, clock=NoWaiting(), tell=lambda line: None
        )
        async with asyncio.timeout(200):
            with pytest.raises(EngineError, match="KeyError: 'a bug'"):
                await supervisor.serving()
            await supervisor.stop()
        assert supervisor.process_id is None

    asyncio.run(main())


class Unmourned(Unwelcome):
    """A process whose death a bug of ours stumbles over."""

    async def welcome(self) -> None:
        await asyncio.Event().wait()

    async def died(self, how: str) -> None:
        raise KeyError("a bug")


def test_a_bug_in_taking_leave_of_a_process_is_raised_by_who_waits_for_the_next() -> None:
    async def main() -> None:
        supervisor = Supervisor(
            "the process", Unmourned(), budget=RetryBudget(5), silence_s=300, clock=NoWaiting(), tell=lambda line: None
        )
        while supervisor.process_id is None:
            await asyncio.sleep(0)
        supervisor.kill()
        async with asyncio.timeout(200):
            with pytest.raises(EngineError, match="could not be kept running: KeyError: 'a bug'"):
                await supervisor.serving()
            await supervisor.stop()

    asyncio.run(main())


def test_a_process_that_dies_again_and_again_is_given_up_and_an_answer_starts_the_count_anew() -> None:
    async def main() -> None:
        engine, clock = await made(attempts=2)
        session = engine.open("s", "solver")
        for losses in (1, 2, 3):
            kill(engine)
            with pytest.raises(EngineLostError):
                await engine.open("d", "solver").generate(request("d", prompt(3), max_tokens=500))
            await session.generate(request("s", prompt(3)))
            assert engine.supervisor.losses == losses
        assert clock.waits == [1.0, 1.0, 1.0]
        for _ in range(3):
            await engine.ready()
            process = engine.supervisor.process_id
            kill(engine)
            while engine.supervisor.process_id == process:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"died \(SIGKILL\), 6 times"):
            await session.generate(request("s", prompt(3)))
        with pytest.raises(EngineError, match="not be restarted"):
            await engine.serve([weights_of(1)])
        await engine.close()

    asyncio.run(main())


@pytest.mark.exhaustive
def test_a_process_that_dies_before_it_serves_is_replaced() -> None:
    async def main() -> None:
        clock = NoWaiting()
        engine = ProcessEngine(SCRIPTED, START, clock=clock)
        while engine.supervisor.process_id is None:
            await asyncio.sleep(0)
        kill(engine)
        completion = await engine.open("s", "solver").generate(request("s", prompt(3)))
        assert len(completion.token_ids) == 8
        assert engine.supervisor.losses == 1
        await engine.close()
        closing = ProcessEngine(SCRIPTED, START, clock=clock)
        await closing.close()

    asyncio.run(main())


@pytest.mark.exhaustive
def test_what_the_factory_raises_is_raised_here(tmp_path: Path) -> None:
    async def main() -> None:
        program = ChildProgram("agentrl.engines.embedded.engine:EmbeddedEngine.load", {"model_path": str(tmp_path)})
        engine = ProcessEngine(program, START)
        with pytest.raises(ModelError, match=str(tmp_path)):
            await engine.ready()
        await engine.close()
        assert engine.supervisor.process_id is None

    asyncio.run(main())


def test_whatever_the_factory_raises_is_raised_here_at_once() -> None:
    async def main() -> None:
        program = ChildProgram(SCRIPTED.factory, {"no_such_argument": 1})
        engine = ProcessEngine(program, START, clock=NoWaiting())
        with pytest.raises(EngineError, match=r"TypeError: .*no_such_argument"):
            await engine.ready()
        assert engine.supervisor.losses == 0
        await engine.close()

    asyncio.run(main())


def test_of_all_calls_of_an_engine_that_is_lost_the_last_words_are_heard() -> None:
    async def main() -> None:
        engine = ProcessEngine(
            ChildProgram("tests.contract.scripted_program:MortalEngine", {}), START, clock=NoWaiting()
        )
        heard: list[str] = []

        def on_delta(request_id: str, *_: Any) -> None:
            heard.append(request_id)

        calls = (engine.open(name, "solver").generate(request(name, prompt(9)), on_delta) for name in "abc")
        for lost in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(lost, EngineLostError)
        assert sorted(heard) == ["a", "b", "c"]
        await engine.close()

    asyncio.run(main())


class LeavesOneBehind:
    """A child that starts another process and dies."""

    def __init__(self) -> None:
        self.watches: list[int] = []

    async def launch(self) -> ChildProcess:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", "sleep 600 >/dev/null & echo $!; exit 3", stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        self.watches.append(os.pidfd_open(int(await process.stdout.readline())))
        return ChildProcess(process)

    async def welcome(self) -> None:
        await asyncio.Event().wait()

    async def died(self, how: str) -> None:
        assert len(self.watches) > 0


@pytest.mark.exhaustive
def test_what_a_dead_child_had_started_is_ended_too() -> None:
    async def main() -> None:
        child = LeavesOneBehind()
        supervisor = Supervisor(
            "a child", child, budget=RetryBudget(1), silence_s=300, clock=NoWaiting(), tell=lambda line: None
        )
        with pytest.raises(EngineError, match="not be restarted"):
            await supervisor.serving()
        await supervisor.stop()
        for watch in child.watches:
            assert select.select([watch], [], [], 20)[0]
            os.close(watch)

    asyncio.run(main())


_PARENT = """
import asyncio, os, sys
from tests.contract.test_engine_process import made, prompt, request

async def main():
    engine, _ = await made()
    asyncio.ensure_future(engine.open("a", "solver").generate(request("a", prompt(9), max_tokens=590)))
    print(engine.supervisor.process_id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_process_dies_with_its_parent(repository: Path) -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watch = os.pidfd_open(child)
        parent.kill()
    assert select.select([watch], [], [], 20)[0], "the engine's process outlived its parent"
    os.close(watch)
