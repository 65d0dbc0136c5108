"""The trainer pool in real Ray: any number of ranks gives the same update, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.cluster.session import RaySession
from agentrl.cluster.trainer_pool import RayTrainerPool
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import JournalError, NonFiniteError, StorageError, TrainerError, TrainerLostError
from agentrl.core.ports import Trainer
from agentrl.core.records import DataLocation, PolicyVersion, StepReport
from agentrl.learn.columns import read_columns
from agentrl.learn.in_process import InProcessTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
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


def test_one_rank_and_two_ranks_give_the_same_update(session: RaySession, model: Path, tmp_path: Path) -> None:
    episodes = Episodes(make_rows(0, 9))

    def config(workers: int) -> RunConfig:
        return run_config(model, policies={"policy": PolicyConfig(lora=LORA)}, workers=workers)

    async def run() -> list[tuple[list[StepReport], Path]]:
        results = []
        for name, workers in (("in_process", 1), ("two", 2)):
            directory = tmp_path / name
            episodes.locations.clear()
            await episodes.write(directory)
            trainer: Trainer = InProcessTrainer(config(1), directory)
            if name != "in_process":
                trainer = RayTrainerPool(config(workers), directory, session=session)
            try:
                results.append(await two_steps(trainer, episodes, directory))
            finally:
                await trainer.close()
        return results

    (reference, reference_path), *others = asyncio.run(run())
    expected = load_file(reference_path / "adapter_model.safetensors")
    for (reports, path), name in zip(others, ("two",), strict=True):
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
        rows, columns = read_columns(tmp_path / name / reports[1].columns)
        expected_rows, expected_columns = read_columns(tmp_path / "in_process" / str(reference[1].columns))
        assert rows == expected_rows
        np.testing.assert_allclose(columns["trainer_logprobs"], expected_columns["trainer_logprobs"], atol=1e-5)
        assert (tmp_path / name / "checkpoint" / "policy" / "optimizer.safetensors").is_file()


def test_a_failure_on_one_rank_leaves_both_usable_and_a_dead_rank_ends_the_group(
    session: RaySession, model: Path, tmp_path: Path
) -> None:
    episodes = Episodes(make_rows(0, 6))
    config = run_config(model, workers=2)

    async def run() -> None:
        await episodes.write(tmp_path)
        pool = RayTrainerPool(config, tmp_path, session=session)
        await pool.start()
        try:
            good = episodes.locations[5]
            # The last unit belongs to rank 1 alone.
            episodes.locations[5] = DataLocation(good.partition, good.entries + 1)
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
            with pytest.raises(StorageError, match=r"0\.1\.safetensors: could not be written") as caught:
                await pool.optim_step("policy", 1)
            assert "\n" not in str(caught.value)
            (tmp_path / "steps").unlink()
            await pool.forward_backward(episodes.batch())
            assert (await pool.optim_step("policy", 1)).samples == 6
            (tmp_path / "versions").write_text("in the way")
            with pytest.raises(StorageError, match=r"versions/policy/0\.1: could not be written"):
                await pool.publish("policy", PolicyVersion("policy", 0, 1))
            with pytest.raises(StorageError, match="versions/policy: could not be written"):
                await pool.save(str(tmp_path / "versions"))
            os.kill(pool.process_ids[1], signal.SIGKILL)
            with pytest.raises(TrainerLostError, match="trainer rank 1 died"):
                await pool.forward_backward(episodes.batch(2))
            with pytest.raises(TrainerError, match="not running"):
                await pool.optim_step("policy", 2)
        finally:
            await pool.close()
            await pool.close()

    asyncio.run(run())


def test_a_local_session_is_private(session: RaySession) -> None:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert session.addresses() == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_dead_ray_ends_the_group_and_another_can_be_started(model: Path, tmp_path: Path, name: str) -> None:
    """A session of its own, beside which the module's must not live: Ray allows one per process."""
    program = [sys.executable, "-c", _DEAD_RAY, str(model), str(tmp_path), name]
    answer = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines() == [f"Ray's {name} died", "[1, 2]"], answer.stdout + answer.stderr


_DEAD_RAY = """
import asyncio, os, signal, sys
from pathlib import Path
from agentrl.cluster.trainer_pool import RayTrainerPool
from agentrl.core.errors import TrainerLostError
from agentrl.core.records import PolicyVersion
from tests.learn_cases import Episodes, make_rows, run_config

model, directory, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

async def main():
    episodes = Episodes(make_rows(0, 6))
    await episodes.write(directory)
    steps = []
    for step in (1, 2):
        pool = RayTrainerPool(run_config(model), directory)
        await pool.start(None if step == 1 else str(directory / "checkpoint"))
        await pool.publish("policy", PolicyVersion("policy", step - 1, step - 1))
        await pool.forward_backward(episodes.batch(step))
        steps.append((await pool.optim_step("policy", step)).step_id)
        if step == 1:
            await pool.publish("policy", PolicyVersion("policy", 0, 1))
            await pool.save(str(directory / "checkpoint"))
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
    print(steps)

asyncio.run(main())
"""
