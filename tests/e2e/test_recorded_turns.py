"""`environment.start_from`: a run that trains from the recorded turns of another, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.recorded_turns import _check_recallable, _parents, find_recorded_turns
from agentrl.app.replays import replay
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.cli.main import main
from agentrl.config.run import RunConfig
from agentrl.config.sections import RecordedTurnsConfig
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.records import Task
from agentrl.environment.registry import name_of, resolve
from agentrl.inspection.reader import RunReader
from agentrl.inspection.tokens import episode_tokens
from agentrl.journal.entries import ToolEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.support.resume_fields import Reading, make_engine

pytestmark = [pytest.mark.e2e]

BASE: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "agentrl.environments:calculator/model"},
    "policies": {"solver": {"learning_rate": 3e-4, "step_size": 16}},
    "credit": {"group_size": 4},
    "sampling": {"max_tokens": 32, "max_turns": 4},
    "engine": {"slots": 32, "max_context": 192},
    "trainer": {"loss": {"normalizer": 64}, "micro_batch_tokens": 8192},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 0},
}


def config(directory: Path, name: str, **start_from: Any) -> agentrl.RunConfig:
    environment = {"id": "calculator", **({"start_from": start_from} if start_from else {})}
    return agentrl.RunConfig.model_validate(
        {**BASE, "name": name, "directory": str(directory), "environment": environment}
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose turns others begin at."""
    directory = tmp_path_factory.mktemp("runs")
    return agentrl.train(config(directory, "a"), quiet=True).path


def test_a_share_of_the_groups_begins_at_recorded_turns(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentrl.train(
        config(recorded.parent, "b", run=str(recorded), where="turns > 1", at=1, share=0.5), quiet=True
    ).path
    assert main(["run", "ledger", str(run)]) == 0
    reader, other = RunReader(run), RunReader(recorded)
    begun = {}
    for line in reader.episodes("purpose = 'train'", limit=1000):
        view = reader.episode(line.episode)
        if view.inherited:
            begun[line.episode] = view
    assert 0 < len(begun) < reader.count()
    for name, view in begun.items():
        bodies = [body for _, body in view.entries]
        inherited, own = bodies[1 : 1 + view.inherited], bodies[1 + view.inherited :]
        assert [body.turn for body in inherited if isinstance(body, TurnEntry)] == [0]
        turns = [body.turn for body in own if isinstance(body, TurnEntry)]
        assert turns == list(range(1, 1 + len(turns)))
        assert view.summary.turns == 1 + len(turns)
        point = next(body.fork for body in bodies if hasattr(body, "fork"))
        of_parent = [body for _, body in other.episode(point.episode_id, point.attempt).entries]
        assert inherited == of_parent[1 : 1 + len(inherited)]
        (row,) = episode_tokens(reader, name).rows
        for token in row.tokens:
            assert token.loss_mask == (token.turn >= 1 and token.logprob is not None)
            assert (token.advantage is not None) <= token.loss_mask
    trained = [episode_tokens(reader, name).rows[0].step for name in begun]
    assert any(trained)
    reader.close()
    other.close()
    assert {result.outcome for result in replay(run, [(name, None) for name in begun])} == {"identical"}
    assert main(["step", "replay", str(run), "1"]) == 0
    assert "identical" in capsys.readouterr().out
    assert main(["episode", "why", str(run), next(iter(begun))]) == 0
    assert "the turns before it are context" in " ".join(capsys.readouterr().out.split())

    shutil.rmtree(run / "checkpoints")
    kept = find_recorded_turns(
        config(recorded.parent, "b", run="gone", at=0).environment.start_from,
        config(recorded.parent, "b", run="gone", at=0).seed,
        resolve("calculator"),
        run,
    )
    assert {start.point.call_id for start in kept if start.point} == {"r#2"}, "a resumed run keeps its choice"


def test_the_turn_of_the_last_tool_error(recorded: Path, tmp_path: Path) -> None:
    reader = RunReader(recorded)
    failed = {}
    for line in reader.episodes("purpose = 'train' and turns > 0", limit=1000):
        turn = None
        for _, body in reader.episode(line.episode).entries:
            if isinstance(body, TurnEntry):
                turn = body.turn
            elif isinstance(body, ToolEntry) and body.outcome != "ok":
                failed[line.episode, line.attempt] = turn
    reader.close()
    chosen = config(tmp_path, "c", run=str(recorded), at="last tool error")
    if not failed:
        with pytest.raises(InputError, match="have no such turn"):
            find_recorded_turns(chosen.environment.start_from, chosen.seed, resolve("calculator"), tmp_path / "c")
        return
    starts = find_recorded_turns(chosen.environment.start_from, chosen.seed, resolve("calculator"), tmp_path / "c")
    points = {(start.point.episode_id, start.point.attempt) for start in starts if start.point}
    assert points == failed.keys()


@pytest.mark.parametrize(
    ("start_from", "message"),
    [
        ({"run": "nowhere", "at": 0}, "nowhere contains no run"),
        ({"at": 0, "where": "rewards = 0"}, "'rewards' is not a column"),
        ({"at": 0, "where": "reward = 17"}, "none of the .* training episodes of .* matches 'reward = 17'"),
        ({"at": 99}, r"environment\.start_from\.at = 99: of the .* have no such turn"),
    ],
)
def test_bad_input_is_refused_before_a_run_begins(
    recorded: Path, tmp_path: Path, start_from: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        agentrl.train(config(tmp_path, "bad", **{"run": str(recorded), **start_from}), quiet=True)
    assert not (tmp_path / "bad").exists()


def test_other_code_and_other_environments_are_refused(recorded: Path, tmp_path: Path) -> None:
    class Other(agentrl.Environment):
        """Another environment."""

    starts = config(tmp_path, "bad", run=str(recorded), at=0)
    with pytest.raises(InputError, match="was played in calculator, which is not trained here"):
        find_recorded_turns(starts.environment.start_from, starts.seed, Other, tmp_path)
    calculator = resolve("calculator")
    source = calculator.source()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calculator, "source", classmethod(lambda cls: source + "# edited"))
        with pytest.raises(InputError, match="was played by other code of calculator"):
            find_recorded_turns(starts.environment.start_from, starts.seed, calculator, tmp_path)


class Die:
    """A resource that is pinned to its process."""

    def roll(self) -> int:
        return 4


class Child(agentrl.Environment):
    """Says one word."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("?"))
        ctx.agent("guesser").reward(1.0)


class Uses(agentrl.Environment):
    """Acts, uses a die or starts a child, and acts again."""

    seats = ("guesser",)
    fan_out: ClassVar = {"Child": 1}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for number in range(2):
            await guesser.act(agentrl.user(f"{number}?"))
            if number == 0 and ctx.task.data["kind"] == "die":
                await ctx.resource(Die).call("roll")
            elif number == 0:
                await ctx.gather(*ctx.spawn(Child, ctx.task, n=1))
        guesser.reward(ctx.rng.random())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("die", "had used resource .* before turn 1, which is pinned"),
        ("child", "had started child episodes before turn 1"),
    ],
)
def test_what_cannot_be_recalled_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    tasks = [Task(id=f"{kind}-{number}", data={"kind": kind}) for number in range(4)]
    factories = RunFactories(engine=make_engine, trainer=Reading, chat_format=lambda model: PlainChatFormat())
    settings = {
        "name": "a",
        "directory": str(tmp_path),
        "steps": 1,
        "environment": {"id": "unused"},
        "model": {"path": "unused"},
        "engine": {"max_context": 512},
        "policies": {"guesser": {"step_size": 2}},
        "credit": {"group_size": 2},
        "evaluation": {"tasks": 0},
    }
    asyncio.run(run_training(RunConfig(**settings), Uses, tasks=tasks, held_out=[], quiet=True, factories=factories))
    starts = {"id": "unused", "start_from": {"run": str(tmp_path / "a"), "at": 1}}
    with pytest.raises(InputError, match=message):
        find_recorded_turns(
            RunConfig(**settings | {"environment": starts}).environment.start_from,
            RunConfig(**settings | {"environment": starts}).seed,
            Uses,
            tmp_path / "b",
        )
    (parent, *_) = _parents(RecordedTurnsConfig(run=str(tmp_path / "a"), at=0), 0)
    roots = {name_of(Uses): Uses}
    _check_recallable(parent, roots, Uses, RecordedTurnsConfig(run="a", at=0))
    requested = replace(parent, point=replace(parent.point, call_id="guesser:0f.0"))
    with pytest.raises(InputError, match="was requested by an external agent"):
        _check_recallable(requested, roots, Uses, RecordedTurnsConfig(run="a", at=0))


def test_settings_that_cannot_be_combined(tmp_path: Path) -> None:
    starts = {"id": "calculator", "start_from": {"run": "runs/a", "at": 0}}
    with pytest.raises((ConfigError, ValueError), match="workers on other machines cannot"):
        agentrl.RunConfig.model_validate({**BASE, "environment": starts, "cluster": {"address": "auto"}})
    with pytest.raises((ConfigError, ValueError), match=r"credit\.advantage = 'gigpo'"):
        agentrl.RunConfig.model_validate({**BASE, "environment": starts, "credit": {"advantage": "gigpo"}})
    assert json.loads(agentrl.RunConfig.model_validate({**BASE, "environment": starts}).model_dump_json())
