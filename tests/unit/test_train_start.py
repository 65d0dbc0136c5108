"""The first seconds of `agentrl train`: what it says, what exists, and what is refused before torch is loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.app import training
from agentrl.app.evaluation import EvaluatedEpisode
from agentrl.app.plan import ChoiceLines, with_chosen_settings
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import Run, run_training
from agentrl.config.plans import EnginePlan
from agentrl.config.run import RunConfig
from agentrl.config.sections import ModelConfig
from agentrl.core.errors import EngineError, RunDirectoryError
from agentrl.core.ports import ChatFormat, Engine
from agentrl.core.records import PolicyVersion
from agentrl.inspection.reader import RunReader, list_runs
from agentrl.journal.run_process import RunLock
from agentrl.testing.execution import PlayResult
from tests.support.sample_environment import Propose
from tests.support.sample_run import sample_run_config, sample_run_factories

ENVIRONMENT = """
import agentrl
class Coin(agentrl.Environment):
    seats = ("solver",)
    async def run(self, ctx):
        await ctx.agent("solver").act(agentrl.user("Say"))
        ctx.agent("solver").reward(0.0)
    @classmethod
    def tasks(cls, split, *, seed=0):
        data = {"answers": [(1, 2)]} if seed == 2 else {}
        return [] if seed == 1 else [agentrl.Task(id=f"{split}{n}", data=data) for n in range(4)]
"""
RUN = """
name = "x"
directory = "runs"
environment.id = "env.py:Coin"
model.path = "model"
[policies.solver]
"""
MISTAKES = {
    ("run.toml", "--name=taken"): "exists; resume it with --resume",
    ("run.toml", "--polices.solver.step_size=4"): "unknown key polices",
    ("run.toml", "--policies.solver.step_sise=4"): "did you mean policies.solver.step_size",
    ("run.toml", "--policies.solver.step_size=abc"): "whole number",
    ("run.toml", "--credit.group_size=1"): "group_size",
    ("run.toml", '--sinks=["wandb"]'): "needs a package that is not installed",
    ("run.toml", "--environment.id=nope.py:Coin"): "nope.py",
    ("run.toml", "--environment.id=env.py:Com"): "has no 'Com'",
    ("run.toml", "--policies.other.step_size=4"): "other",
    ("run.toml", "--seed=1"): "is empty",
    ("run.toml", "--seed=2"): "Task 'train0': data['answers'][0] is (1, 2)",
    ("run.toml", "--model.path=./nope"): "there is no such directory",
    ("run.toml", "--model.path=org/nope"): "there is no directory",
    ("run.toml", "--model.path=empty"): "contains no model",
    ("run.toml", "--model", "empty"): "contains no model",
    ("run.toml", "--resume"): "nothing to resume",
    ("run.toml", "--model=http://127.0.0.1:1/v1"): "cannot be trained",
    ("broken.toml",): "not TOML",
    ("absent.toml",): "no such file",
}
"""Arguments of `agentrl train`, and words of the answer."""


def write_project(directory: Path) -> None:
    """The files that `MISTAKES` are made with."""
    directory.mkdir(exist_ok=True)
    (directory / "env.py").write_text(ENVIRONMENT)
    (directory / "run.toml").write_text(RUN)
    (directory / "broken.toml").write_text("name = \n")
    (directory / "empty").mkdir()
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    (directory / "runs" / "taken").mkdir(parents=True)
    (directory / "runs" / "taken" / "notes.txt").write_text("mine")


@pytest.mark.parametrize("error", [EngineError("no GPU answers"), ModuleNotFoundError("No module named 'triton'")])
def test_a_start_that_fails_does_not_block_the_next(tmp_path: Path, error: Exception) -> None:
    async def broken(*_: object) -> Engine:
        raise error

    config = sample_run_config(tmp_path, "run")
    with pytest.raises(type(error)):
        asyncio.run(run_training(config, Propose, factories=replace(sample_run_factories(), engine=broken), quiet=True))
    run = tmp_path / "run"
    if run.exists():
        (run / "notes.txt").write_text("mine")
        with pytest.raises(RunDirectoryError):
            asyncio.run(run_training(config, Propose, factories=sample_run_factories(), quiet=True))
        (run / "notes.txt").unlink()
    assert asyncio.run(run_training(config, Propose, factories=sample_run_factories(), quiet=True)).summary["steps"]
    with pytest.raises(RunDirectoryError):
        asyncio.run(run_training(config, Propose, factories=sample_run_factories(), quiet=True))


def test_a_starting_run_is_listed_with_its_phase_and_resumes_if_it_is_killed_there(tmp_path: Path) -> None:
    factories, seen = sample_run_factories(), list[str]()

    class KilledError(BaseException):
        pass

    async def engine(
        plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path
    ) -> Engine:
        (line,) = list_runs(tmp_path)
        reader = RunReader(tmp_path / "x")
        seen.extend((line.state, reader.start_phase()))
        assert reader.episodes() == []
        reader.close()
        raise KilledError

    config = sample_run_config(tmp_path, "x")
    killed = RunFactories(engine=engine, trainer=factories.trainer, chat_format=factories.chat_format)
    with pytest.raises(KilledError):
        asyncio.run(run_training(config, Propose, held_out=[], quiet=True, factories=killed))
    assert seen == ["starting: loading trainer and engine", "loading trainer and engine"]
    run = asyncio.run(run_training(config, Propose, held_out=[], quiet=True, resume=True, factories=factories))
    assert run.metrics
    assert list_runs(tmp_path)[0].state == "finished"


def test_a_run_that_was_killed_before_it_chose_its_settings_chooses_them_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    class KilledError(BaseException):
        pass

    def chosen(*arguments: Any) -> tuple[RunConfig, ChoiceLines]:
        recorded.append(arguments[1])
        return with_chosen_settings(*arguments)

    def chat_format(model: ModelConfig) -> ChatFormat:
        raise KilledError

    monkeypatch.setattr(training, "with_chosen_settings", chosen)
    factories = RunFactories(chat_format=chat_format)
    data = sample_run_config(tmp_path, "x").model_dump(exclude_unset=True)
    data["model"] = {"path": "agentrl.environments.propose_and_solve:model"}
    config = RunConfig(**data, trainer={"micro_batch_tokens": 1024})
    for resume in (False, True, True):
        run = run_training(config, Propose, held_out=[], quiet=True, resume=resume, factories=factories)
        with pytest.raises(KilledError):
            asyncio.run(run)
    assert recorded == [{}] * 3


def test_the_name_of_a_running_run_is_refused_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "x" / "journal").mkdir(parents=True)
    lock = RunLock(tmp_path / "x" / "journal")
    run = run_training(sample_run_config(tmp_path, "x"), Propose, held_out=[], factories=sample_run_factories())
    with pytest.raises(RunDirectoryError, match=f"x is running, in process {os.getpid()}: `agentrl run view "):
        asyncio.run(run)
    lock.release()


def test_a_step_size_that_splits_groups_is_told_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    class KilledError(BaseException):
        pass

    def chat_format(model: ModelConfig) -> ChatFormat:
        told.append(capsys.readouterr().err)
        raise KilledError

    data = sample_run_config(tmp_path, "x").model_dump(exclude_unset=True)
    data["policies"]["solver"]["step_size"] = 7
    factories = RunFactories(engine=sample_run_factories().engine, chat_format=chat_format)
    with pytest.raises(KilledError):
        asyncio.run(run_training(RunConfig(**data), Propose, held_out=[], factories=factories))
    assert "policies.solver.step_size = 7 is not a multiple of" in told[0]


def test_inspecting_a_result_shows_one_short_line(tmp_path: Path) -> None:
    metrics = [{f"metric/{number}": 0.5 for number in range(60)}] * 8
    run = Run(path=tmp_path, metrics=metrics, policies={}, best={}, summary={"metrics": metrics}, interrupted=False)
    assert repr(run) == f"Run(path={tmp_path!r}, interrupted=False)"
    played = PlayResult(reward=1.0, stop_reason="completed", metrics={}, observations=("a long text\n" * 500,))
    assert repr(played) == "PlayResult(reward=1.0, stop_reason='completed', metrics={})"
    text = [{"role": "user", "content": "long" * 500}]
    counts = {"turns": 1, "tokens": 2}
    names = {"id": "v0", "task_id": "t", "stop_reason": "completed", "detail": ""}
    results: dict[str, Any] = {"parent_id": None, "reward": 1.0, "rewards": {}, "metrics": {}, **counts, **names}
    episode = EvaluatedEpisode(task=text, conversations={"a": text}, **results)
    assert len(repr(episode)) < 200
