"""Forks at the first call that differs in changed code: `agentrl episode fork --at change`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.core.errors import InputError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.inspection.comparisons import compare_episodes
from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import compare_runs
from agentrl.journal.entries import TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer

if TYPE_CHECKING:
    from agentrl.config.plans import EnginePlan, TrainerPlan
    from agentrl.core.ports import Engine, Trainer

TASKS = 48
HINT = "it is a large one"
ASKS, KNOWS = 0.6, 0.95
"""Probability that the policy asks a tool, and that it answers with a large digit after a hint; otherwise that is ½."""


class Shop(agentrl.ToolEnvironment):
    """Guess whether the price is a large digit. The tool says nothing about it."""

    answer: ClassVar[str] = "nobody knows"
    worth: ClassVar[float] = 1.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return [Task(id=f"{split}-{number}", data={"number": number}) for number in range(TASKS)]

    def prompt(self, task: Task) -> str:
        return f"Price {task.data['number']}?"

    @agentrl.tool
    def ask(self) -> str:
        """Ask for a hint."""
        return self.answer

    def reward(self, task: Task, episode: agentrl.ToolEpisode) -> float:
        return self.worth * float("5" <= episode.answer <= "9")


class Hinting(Shop):
    """The tool's text has changed."""

    answer = HINT


class Dear(Shop):
    """The reward has changed."""

    worth = 3.0


class Failing(Shop):
    """The reward fails."""

    def reward(self, task: Task, episode: agentrl.ToolEpisode) -> float:
        raise ValueError("no reward")


def reply(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """Ask the tool now and then, or answer with a digit, depending on the request's seed."""
    draw = random.Random(request.seed)
    context = bytes(token for token in request.token_ids.tolist() if token < 256).decode()
    if "tool\n" not in context and draw.random() < ASKS:
        text = '<tool_call>{"name": "ask", "arguments": {}}</tool_call>'
    else:
        is_large = draw.random() < (KNOWS if HINT in context else 0.5)
        text = str(draw.randrange(5, 10) if is_large else draw.randrange(5))
    return [*text.encode(), STOP_TOKEN]


def factories() -> RunFactories:
    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: object, log: Path) -> Engine:
        return ScriptedEngine(reply, versions=versions)

    def trainer(plan: TrainerPlan, directory: Path) -> Trainer:
        return RecordingTrainer(
            list(plan.policies),
            clock=RunFactories().clock,
            step_seconds=0.0,
            publish_seconds=0.0,
            versions=directory / "versions",
        )

    return RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with an evaluation before and after it."""
    values: dict[str, Any] = {
        "name": "shop",
        "directory": str(tmp_path_factory.mktemp("change")),
        "steps": 1,
        "environment": {"id": name_of(Shop)},
        "model": {"path": "a script"},
        "policies": {"buyer": {"step_size": 4, "max_staleness": 0}},
        "seats": {"agent": "buyer"},
        "credit": {"group_size": 4},
        "checkpoint": {"versions": 0},
        "evaluation": {"tasks": TASKS},
        "engine": {"max_context": 4096},
    }
    config = RunConfig.model_validate(values)
    done = asyncio.run(run_training(config, Shop, held_out=Shop.tasks("held-out"), quiet=True, factories=factories()))
    return Path(done.path)


def evaluated(run: Path) -> list[tuple[str, int | None]]:
    """The episodes of the evaluation after the step."""
    with contextlib.closing(RunReader(run)) as reader:
        lines = reader.episodes("purpose = 'evaluate' and oldest_step = 1", descending=False, limit=1000)
        return [(line.episode, line.attempt) for line in lines]


def turns(run: Path, episode: str) -> list[TurnEntry]:
    with contextlib.closing(RunReader(run)) as reader:
        return [body for _, body in reader.episode(episode).entries if isinstance(body, TurnEntry)]


def forked(run: Path, environment: type[agentrl.Environment]) -> list[Any]:
    return agentrl.fork(run, evaluated(run), at="change", environment=environment, factories=factories())


def test_only_episodes_that_the_change_touches_are_sampled(run: Path) -> None:
    assert len(evaluated(run)) == TASKS
    assert forked(run, Shop) == []
    asked = {name for name, _ in evaluated(run) if len(turns(run, name)) > 1}
    forks = forked(run, Hinting)
    assert len(forks) == len(asked) > 10
    with contextlib.closing(RunReader(run)) as reader:
        for header in forks:
            difference = compare_episodes(reader, f"forks/{header.episode_id}", None)
            assert difference.departure is not None
            first, second = turns(run / "forks", header.episode_id)
            assert HINT in str(second.messages)
            assert header.tokens == len(second.sampled(plain=True)), "the first turn comes from the record"
            assert first in [turns(run, name)[0] for name in asked]
        with contextlib.closing(RunReader(run / "forks")) as changed:
            (line,) = compare_runs([reader, changed]).paired
    assert (line.tasks, line.verdict) == (len(asked), "better")
    assert abs(line.reward - KNOWS) < 0.2
    assert abs(line.baseline - 0.5) < 0.25


def test_a_changed_reward_forks_at_the_end_and_samples_nothing(run: Path) -> None:
    with contextlib.closing(RunReader(run)) as reader:
        right = reader.count("purpose = 'evaluate' and oldest_step = 1 and reward = 1")
    forks = forked(run, Dear)
    assert len(forks) == right > 10
    assert {(header.reward, header.tokens) for header in forks} == {(3.0, 0)}


def test_a_change_that_fails_is_shown_by_its_dropped_forks(run: Path) -> None:
    assert {header.drop_reason for header in forked(run, Failing)} <= {"environment_error"}


def test_changed_code_is_named(run: Path) -> None:
    with pytest.raises(InputError, match=r"name it with --environment"):
        agentrl.fork(run, evaluated(run), at="change", factories=factories())
    with pytest.raises(InputError, match="nowhere"):
        agentrl.fork(run, [("nowhere", None)], at="change", environment=Hinting, factories=factories())
