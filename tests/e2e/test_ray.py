"""Real Ray: trainer ranks, whose number does not matter, engines in actors, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.cluster.engine_actors import RayPlacement
from agentrl.cluster.session import RaySession
from agentrl.cluster.trainer_pool import RayTrainerPool
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import (
    EngineLostError,
    JournalError,
    NonFiniteError,
    StorageError,
    TrainerError,
    TrainerLostError,
)
from agentrl.core.ports import Engine, GenerateRequest, Trainer
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, StepReport
from agentrl.core.tokens import Completion, Tokens
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter
from agentrl.learn.trainer import InProcessTrainer
from tests.contract.engine_kinds import START, ModelZoo, prompt, request, version
from tests.learn_cases import LORA, Episodes, make_rows, read_step_file, run_config, write_model
from tests.processes import is_loopback, running
from tests.support import warm

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Ray leaves sockets and files of its own to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    session = RaySession()
    session.start()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def two_steps(trainer: Trainer, episodes: Episodes, directory: Path) -> tuple[list[StepReport], Path]:
    await trainer.start()
    await trainer.publish("policy", PolicyVersion("policy", 0, 0))
    reports = []
    for step in (1, 2):
        await trainer.forward_backward(episodes.batch(step))
        reports.append(await trainer.optim_step("policy", step))
        assert await trainer.optim_step("policy", step) == reports[-1]
    weights = await trainer.publish("policy", PolicyVersion("policy", 0, 2))
    await trainer.save(str(directory / "checkpoint"))
    return reports, Path(weights.path)


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_one_rank_and_two_ranks_give_the_same_update(
    session: RaySession, model: Path, tmp_path: Path, sharding: str
) -> None:
    episodes = Episodes(make_rows(0, 9))

    def config(ranks: int, sharding: str = "none") -> RunConfig:
        return run_config(model, policies={"policy": PolicyConfig(lora=LORA)}, ranks=ranks, sharding=sharding)

    async def run() -> list[tuple[list[StepReport], Path]]:
        results = []
        for name in ("in_process", "two"):
            directory = tmp_path / name
            episodes.locations.clear()
            await episodes.write(directory)
            trainer: Trainer = InProcessTrainer(config(1).trainer_plan, directory)
            if name == "two":
                trainer = RayTrainerPool(config(2, sharding).trainer_plan, directory, session=session)
            try:
                results.append(await two_steps(trainer, episodes, directory))
            finally:
                await trainer.close()
        return results

    (reference, reference_path), (reports, path) = asyncio.run(run())
    expected = load_file(reference_path / "adapter_model.safetensors")
    found = load_file(path / "adapter_model.safetensors")
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
    for report, other in zip(reports, reference, strict=True):
        assert (report.tokens, report.samples) == (other.tokens, other.samples)
        assert report.input_digest == other.input_digest
        assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        # Terms of both signs: rounding is relative to them, not to their sum.
        assert report.loss == pytest.approx(other.loss, abs=1e-6)
    assert reports[1].columns is not None
    rows, columns = read_step_file(tmp_path / "two" / reports[1].columns)
    expected_rows, expected_columns = read_step_file(tmp_path / "in_process" / str(reference[1].columns))
    assert rows == expected_rows
    np.testing.assert_allclose(columns["trainer_logprobs"], expected_columns["trainer_logprobs"], atol=1e-5)
    assert (tmp_path / "two" / "checkpoint" / "policy" / "optimizer.safetensors").is_file()


def test_a_failure_on_one_rank_leaves_both_usable_and_a_dead_rank_ends_the_group(
    session: RaySession, model: Path, tmp_path: Path
) -> None:
    episodes = Episodes(make_rows(0, 6))
    config = run_config(model, ranks=2)

    async def run() -> None:
        await episodes.write(tmp_path)
        pool = RayTrainerPool(config.trainer_plan, tmp_path, session=session)
        await pool.start()
        try:
            good = episodes.locations[5]
            # The last unit belongs to rank 1 alone.
            episodes.locations[5] = EpisodeDataLocation(good.partition, good.entries + 1)
            with pytest.raises(JournalError):
                await pool.forward_backward(episodes.batch())
            episodes.locations[5] = good
            advantage = float(episodes.advantages[5])
            episodes.advantages[5] = float("nan")
            await pool.forward_backward(episodes.batch())
            with pytest.raises(NonFiniteError):
                await pool.optim_step("policy", 1)
            episodes.advantages[5] = advantage
            await pool.forward_backward(episodes.batch())
            (tmp_path / "steps").write_text("in the way")  # of rank 0, which writes the files
            with pytest.raises(StorageError, match=r"0\.1\.safetensors") as caught:
                await pool.optim_step("policy", 1)
            assert "\n" not in str(caught.value)
            (tmp_path / "steps").unlink()
            await pool.forward_backward(episodes.batch())
            assert (await pool.optim_step("policy", 1)).samples == 6
            (tmp_path / "versions").write_text("in the way")
            with pytest.raises(StorageError, match=r"versions/policy/0\.1"):
                await pool.publish("policy", PolicyVersion("policy", 0, 1))
            with pytest.raises(StorageError, match="versions/policy"):
                await pool.save(str(tmp_path / "versions"))
            os.kill(pool.process_ids[1], signal.SIGKILL)
            with pytest.raises(TrainerLostError, match="rank 1"):
                await pool.forward_backward(episodes.batch(2))
            with pytest.raises(TrainerError, match="running"):
                await pool.optim_step("policy", 2)
        finally:
            await pool.close()
            await pool.close()

    asyncio.run(run())


@pytest.mark.exhaustive
def test_a_rank_that_the_others_miss_before_ray_does_is_named(session: RaySession, model: Path, tmp_path: Path) -> None:
    """Its connections end before its process does, as those of a machine that fails."""
    episodes, leaves = Episodes(make_rows(0, 6)), {"name": "tests.support.user_functions:leaves"}

    async def run() -> None:
        await episodes.write(tmp_path)
        pool = RayTrainerPool(run_config(model, ranks=2, loss=leaves).trainer_plan, tmp_path, session=session)
        await pool.start()
        try:
            await pool.forward_backward(episodes.batch())
            with pytest.raises(TrainerLostError, match="optim_step"):
                await pool.optim_step("policy", 1)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_local_session_is_private(session: RaySession) -> None:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert {node.address for node in session.nodes()} == {"127.0.0.1"}


def parent_of(process_id: int) -> int:
    return next(process.parent for process in running() if process.number == process_id)


def long_turn(name: str, context: Sequence[int], sampled_before: int = 0) -> GenerateRequest:
    """Its kept sets and routings are recorded."""
    tokens = np.array(context, np.int32)
    return request(name, tokens, seed=3, max_tokens=400 - sampled_before, sampled_before=sampled_before, top_k=5)


async def begun(engine: Engine, name: str, context: Sequence[int]) -> tuple[asyncio.Task[Completion], list[int]]:
    """A long turn in flight, and what was heard of it."""
    heard: list[int] = []
    first = asyncio.Event()

    def on_delta(request_id: str, tokens: Tokens) -> None:
        heard.extend(tokens.token_ids.tolist())
        first.set()

    turn = engine.open(name, "solver").generate(long_turn(name, context), on_delta)
    task = asyncio.get_running_loop().create_task(turn)  # type: ignore[arg-type]
    await first.wait()
    return task, heard


def test_engines_in_actors_are_replaced_when_they_or_their_actors_die(session: RaySession, tmp_path: Path) -> None:
    zoo = ModelZoo(tmp_path)
    arguments: dict[str, Any] = {"model_path": str(zoo.directory("qwen3_moe")), "max_context": 512, "slots": 4}
    arguments |= {"capture_routing": True, "capture_mask": True}
    program = ChildProgram("agentrl.engines.embedded.engine:EmbeddedEngine.load", arguments)
    contexts = [prompt(9, number).tolist() for number in range(2)]

    async def main() -> None:
        near = EmbeddedEngine.load(versions=START, **arguments)
        replicas = [ProcessEngine(program, START, placement=RayPlacement()) for _ in range(2)]
        for replica in replicas:
            await replica.ready()
        engine = EngineRouter(replicas)
        weights = zoo.full(version(1), "qwen3_moe", seed=1)
        await asyncio.gather(near.serve([weights]), engine.serve([weights]))
        expected = [await near.open("n", "solver").generate(long_turn("n", context)) for context in contexts]
        turns = [await begun(each, "t", context) for each, context in zip(replicas, contexts, strict=True)]
        processes = [replica.supervisor.process_id or 0 for replica in replicas]
        os.kill(processes[0], signal.SIGKILL)
        os.kill(parent_of(processes[1]), signal.SIGKILL)
        for (turn, _), how in zip(turns, ("died .SIGKILL", "was lost with its Ray actor"), strict=True):
            with pytest.raises(EngineLostError, match=how):
                await turn
        for (_, heard), context, whole in zip(turns, contexts, expected, strict=True):
            assert 0 < len(heard) < 400
            rest = await engine.open("r", "solver").generate(long_turn("r", [*context, *heard], len(heard)))
            assert [*heard, *rest.token_ids] == whole.token_ids.tolist()
            assert [span.version for span in rest.spans] == [version(1)]
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[len(heard) :], atol=2e-4)
            np.testing.assert_array_equal(rest.experts.rows, whole.experts.rows)
            assert rest.kept is not None
            assert rest.kept.counts.tolist() == [5] * len(rest.token_ids)
        assert [replica.supervisor.losses for replica in replicas] == [1, 1]
        processes += [replica.supervisor.process_id or 0 for replica in replicas]
        await asyncio.gather(engine.close(), near.close())
        assert len(set(processes)) == 4
        assert not {process.number for process in running()} & set(processes)

    asyncio.run(main())


def test_a_session_is_private_also_where_a_program_imported_ray_before() -> None:
    """Ray reads its environment variables at its import, which comes before the session sets them."""
    program = [sys.executable, "-c", _IMPORTED_BEFORE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    root = Path(__file__).parents[2]
    answer = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    listening = answer.stdout.splitlines()
    assert any(each.startswith("tcp") for each in listening)
    assert [each for each in listening if not is_loopback(each)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_dead_ray_ends_the_group_and_another_can_be_started(model: Path, tmp_path: Path, name: str) -> None:
    """A session of its own, beside which the module's must not live: Ray allows one per process."""
    (script := tmp_path / "dead_ray.py").write_text(_DEAD_RAY)
    answer = warm.script(Path(__file__).parents[2], script, str(model), str(tmp_path), name)
    told = f"the engine's process was lost: Ray's {name} died; it is restarted in 1 s"
    assert answer.stdout.splitlines() == [f"Ray's {name} died", str([told]), "[1, 2] 50"], answer.stdout + answer.stderr


@pytest.mark.exhaustive
def test_a_dead_raylet_ends_no_process_whose_parent_is_process_1() -> None:
    """As in a container, or under nohup."""
    program = [sys.executable, "-c", _ORPHAN]
    answer = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines() == ["stopped", "started again"], answer.stdout + answer.stderr


@pytest.mark.exhaustive
def test_all_processes_of_a_dead_ray_are_lost_also_where_one_of_them_has_started_another_ray() -> None:
    """The second process starts Ray again before the first one's next look at it."""
    program = [sys.executable, "-c", _SHARED_PLACEMENT]
    answer = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines() == ["was lost: Ray's raylet died", "the other lives"], (
        answer.stdout + answer.stderr
    )


_IMPORTED_BEFORE = """
import os
import ray
from agentrl.cluster.session import RaySession
from tests.processes import can_be_reached, descendants

session = RaySession()
session.start()
print(*can_be_reached(descendants(os.getpid())), sep=chr(10))
session.stop()
"""

_SHARED_PLACEMENT = """
import asyncio, os, signal
from agentrl.cluster.engine_actors import RayPlacement
from agentrl.engines.process import ChildProgram

PROGRAM = ChildProgram("tests.contract.scripted_program:scripted_engine", {"max_context": 4096, "refresh": "token"})

async def main():
    placement = RayPlacement()
    first = await placement.start(PROGRAM)
    import ray
    [raylet] = [each.process for each in ray._private.worker._global_node.all_processes["raylet"]]
    os.kill(raylet.pid, signal.SIGKILL)
    while raylet.poll() is None:
        os.sched_yield()
    second = await placement.start(PROGRAM)
    print(await asyncio.wait_for(first.wait(), 200), flush=True)
    living = asyncio.ensure_future(second.wait())
    await asyncio.wait({living}, timeout=2)
    print("dead" if living.done() else "the other lives", flush=True)
    second.kill()
    await living
    await placement.close()

asyncio.run(main())
"""


_ORPHAN = """
import os, select, signal
from agentrl.cluster.session import RaySession

parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    select.select([], [], [], 0.1)
session = RaySession()
session.start()
import ray
[raylet] = [each.process for each in ray._private.worker._global_node.all_processes["raylet"]]
os.kill(raylet.pid, signal.SIGKILL)
while not session.dead():
    select.select([], [], [], 0.1)
session.stop()
print("stopped", flush=True)
session.start()
print("started again" if not session.dead() else "dead", flush=True)
session.stop()
"""


_DEAD_RAY = """
import asyncio, os, signal, sys
from pathlib import Path
import numpy as np
from agentrl.cluster.engine_actors import RayPlacement
from agentrl.cluster.trainer_pool import RayTrainerPool
from agentrl.core.errors import TrainerLostError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from tests.learn_cases import Episodes, make_rows, run_config

SCRIPTED = ChildProgram("tests.contract.scripted_program:scripted_engine", {"max_context": 4096, "refresh": "token"})
model, directory, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

async def main():
    episodes = Episodes(make_rows(0, 6))
    await episodes.write(directory)
    steps = []
    told, versions = [], {"policy": PolicyVersion("policy", 0, 0)}
    engine = ProcessEngine(SCRIPTED, versions, placement=RayPlacement(), tell=told.append)
    for step in (1, 2):
        pool = RayTrainerPool(run_config(model).trainer_plan, directory)
        await pool.start(None if step == 1 else str(directory / "checkpoint"))
        await pool.publish("policy", PolicyVersion("policy", step - 1, step - 1))
        await pool.forward_backward(episodes.batch(step))
        steps.append((await pool.optim_step("policy", step)).step_id)
        if step == 1:
            await pool.publish("policy", PolicyVersion("policy", 0, 1))
            await pool.save(str(directory / "checkpoint"))
            await engine.ready()
            import ray
            [process] = [i.process for i in ray._private.worker._global_node.all_processes[name]]
            os.kill(process.pid, signal.SIGKILL)
            try:
                while True:
                    await pool.publish("policy", PolicyVersion("policy", 0, 1))
                    await asyncio.sleep(0.2)
            except TrainerLostError as error:
                print(str(error).split(" (")[0], flush=True)
        await pool.close()
    turn = GenerateRequest(
        request_id="r", token_ids=np.arange(9, dtype=np.int32), sampling=SamplingParams(max_tokens=50), seed=1
    )
    completion = await engine.open("s", "policy").generate(turn)
    await engine.close()
    print(told)
    print(steps, len(completion.token_ids))

asyncio.run(main())
"""
