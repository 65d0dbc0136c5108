"""A run of two policies that teach each other, done again: every episode, what each step was fed, and what it came to.

One policy is an adapter, all weights of the other are trained, and the run was resumed.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

import agentrl
from agentrl.app.replays import ReplayResult, StepRecomputeResult, recompute_step_loss, replay, replay_step
from agentrl.cli.main import main
from agentrl.config.run import RunConfig
from agentrl.environments.propose_and_solve import env
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list
from agentrl.journal.control_rows import row_checksum

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(300)]


def two_policies(directory: Path, *, steps: int) -> RunConfig:
    """A proposer with an adapter, and a solver all of whose weights are trained."""
    return RunConfig(
        name="run",
        directory=str(directory),
        steps=steps,
        environment={"id": "propose_and_solve"},
        model={"path": "agentrl.environments:propose_and_solve/model"},
        policies={
            "proposer": {"lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 3e-3, "step_size": 4},
            "solver": {"learning_rate": 3e-4, "step_size": 24},
        },
        credit={"group_size": 2},
        sampling={"max_tokens": 32, "max_turns": 9},
        engine={"slots": 64, "max_context": 256},
        trainer={"entropy_bonus": 0.04},
        evaluation={"tasks": 0},
        checkpoint={"every": 0, "versions": 0},
        max_in_flight=64,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives of a run: two steps of each policy, and after a resume a third, under another loss."""
    directory = tmp_path_factory.mktemp("replays")
    agentrl.train(two_policies(directory, steps=2), quiet=True)
    config = two_policies(directory, steps=3)
    resumed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"entropy_bonus": 0.02})})
    return agentrl.train(resumed, resume=True, quiet=True).path


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied", symlinks=True))


def computed(run: Path) -> dict[str, StepRecomputeResult]:
    reader = RunReader(run)
    try:
        lines = step_list(reader)
        assert all(replay_step(reader, line).identical for line in lines)
        return {f"{line.policy}@{line.lineage}.{line.step}": recompute_step_loss(reader, line) for line in lines}
    finally:
        reader.close()


def replayed(run: Path, where: str, **options: str) -> list[ReplayResult]:
    reader = RunReader(run)
    try:
        lines = reader.episodes(where, limit=10_000)
    finally:
        reader.close()
    return replay(run, [(line.episode, line.attempt) for line in lines], **options)


def test_every_episode_is_executed_again_identically(run: Path) -> None:
    found = replayed(run, "committed_at != null")
    assert len(found) > 60
    assert [(each.episode, each.text) for each in found if each.outcome != "identical"] == []


@pytest.mark.parametrize(
    ("change", "act"),
    [
        (("agentrl.user(PROMPT)", 'agentrl.user(f"{PROMPT} {id(self)}")'), "turn of proposer"),
        (('structure=f"{len(proposal.terms)} terms"', "structure=str(id(proposal))"), "remember"),
        (
            ("- ALIKE * recollection.share", "- ALIKE * recollection.share - 1e-9 * (id(children) % 97 + 1)"),
            "reward of",
        ),
    ],
)
def test_planted_chance_is_found_at_its_exact_call(
    run: Path, tmp_path: Path, change: tuple[str, str], act: str
) -> None:
    source = Path(env.__file__).read_text(encoding="utf-8")
    assert change[0] in source
    path = tmp_path / f"planted_{act.split()[0]}.py"
    path.write_text(source.replace(*change), encoding="utf-8")
    where = "environment = propose_and_solve and reward > 0"
    before = {each.episode: each for each in replayed(run, where)}
    found = replayed(run, where, environment=f"{path}:ProposeAndSolve")
    assert found
    for each in found:
        expected = [call for call, words in before[each.episode].acts if act in words][-1]
        assert (each.outcome, each.call) == ("departed", expected), (each.text, before[each.episode].acts)


def test_every_step_comes_to_what_it_came_to(run: Path) -> None:
    found = computed(run)
    assert {version.partition(".")[0] for version in found} == {"proposer@0", "solver@0", "proposer@1", "solver@1"}
    for version, step in found.items():
        assert step.same, (version, step)
        assert (step.loss_again, step.grad_norm_again) == (step.loss, step.grad_norm), "the same machine, bit for bit"
    assert any(step.grad_norm for step in found.values())


def test_weights_are_found_wherever_they_are_kept(copied: Path) -> None:
    shutil.rmtree(copied / "versions")
    found = computed(copied)
    kept = {version for version, step in found.items() if step.same}
    assert {f"{policy}@{first}" for policy in ("proposer", "solver") for first in ("0.1", "1.3")} <= kept, (
        "the first starts from the base model, the other, of the second life, from what a checkpoint of the first holds"
    )
    assert "not kept" in found["solver@0.2"].text
    assert found["solver@0.2"].same is None


@pytest.mark.damages_journal
def test_weights_that_were_altered_are_not_computed_with(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "checkpoints")
    for file in copied.glob("versions/*/0.1/*model.safetensors"):
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    for policy in ("proposer", "solver"):
        assert main(["step", "replay", str(copied), "2", "--policy", policy, "--json"]) == 0
        (step,) = json.loads(capsys.readouterr().out)
        assert (step["identical"], step["computed"]["same"]) == (True, None)
        assert "digest" in step["computed"]["text"]


def test_a_step_that_came_to_something_else_is_told(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(copied / "journal" / "control.db") as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(steps)")]
        key = "policy = 'solver' AND lineage = 0 AND step = 1"
        [row] = connection.execute(f"SELECT * FROM steps WHERE {key}")
        values = [*row[:-1]]
        values[names.index("grad_norm")] *= 1.00001
        change = (values[names.index("grad_norm")], row_checksum("steps", tuple(values)))
        connection.execute(f"UPDATE steps SET grad_norm = ?, checksum = ? WHERE {key}", change)
    connection.close()
    assert main(["step", "replay", str(copied), "1", "--policy", "solver"]) == 1
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith(("loss", "grad_norm"))] == [
        "identical",
        "differs",
    ]


@pytest.mark.exhaustive
def test_steps_in_bfloat16_are_computed_forward_from_the_newest_checkpoint(tmp_path: Path) -> None:
    config = two_policies(tmp_path, steps=3)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    checkpoint = config.checkpoint.model_copy(update={"every": 2})
    engine = config.engine.model_copy(update={"publish": "delta"})
    parts = {"model": model, "checkpoint": checkpoint, "engine": engine}
    run = agentrl.train(config.model_copy(update=parts), quiet=True).path
    found = computed(run)
    for version, step in found.items():
        assert (step.loss_again, step.grad_norm_again) == (step.loss, step.grad_norm), (version, step.text)
    assert "1 step from there" in found["solver@0.2"].text
    assert any(step.grad_norm for step in found.values())
