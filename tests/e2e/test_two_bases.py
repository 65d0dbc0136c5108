"""A proposer and a solver of different base models: sizes, vocabularies, tokenizers and chat templates of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.app.engines import make_engine
from agentrl.app.replays import recompute_step_loss, replay, replay_step
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.plans import EnginePlan
from agentrl.core.errors import ConfigError, InputError
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list
from agentrl.inspection.tokens import episode_tokens
from tests.contract.test_engine_vllm_process import needs_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SMALL, LARGE = "frozen_lake/model", "propose_and_solve/model"
"""Names of the bases: of 96 × 3 and 128 × 4 hidden units and layers, and of 260 and 440 tokens."""


class Ask(agentrl.Environment):
    """Says something, which is then answered twice."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Answer": 2}
    truncated_reward = 0.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("proposer").act(agentrl.user("Propose a sum."))
        await ctx.gather(*ctx.spawn(Answer, {"question": turn.text[:20]}, n=2))
        ctx.agent("proposer").reward(float(len(turn.text) > 10))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{number}", data={}) for number in range(4)]


class Answer(agentrl.Environment):
    """Is paid for the letter D."""

    seats = ("solver",)
    truncated_reward = 0.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user(f"{ctx.task.data['question']} é"))
        ctx.agent("solver").reward(turn.text.count("D") / 4)


def config_of(repository: Path, directory: Path, **more: Any) -> agentrl.RunConfig:
    """An adapter on the large base and all weights of the small one, which comes second."""
    values = {
        "name": "run",
        "directory": str(directory),
        "steps": 2,
        "environment": {"id": "ask"},
        "model": {"path": str(repository / "environments" / LARGE)},
        "policies": {
            "proposer": {"lora": {"rank": 2}, "learning_rate": 1e-2, "step_size": 4},
            "solver": {
                "model": str(repository / "environments" / SMALL),
                "learning_rate": 1e-3,
                "step_size": 8,
                "sampling": {"max_tokens": 4},
            },
        },
        "credit": {"group_size": 2},
        "sampling": {"max_tokens": 12},
        "engine": {"slots": 8},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 1, "versions": 0},
        "max_in_flight": 16,
    }
    return agentrl.RunConfig.model_validate(values | more)


@pytest.fixture(scope="module")
def run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives: both engines in the run's process, then each in a process of its own, for two workers."""
    directory = tmp_path_factory.mktemp("two-bases")
    agentrl.train(config_of(repository, directory), environment=Ask, quiet=True)
    apart = {"steps": 3, "workers": 2, "engine": {"slots": 8, "replicas": 1}}
    return agentrl.train(config_of(repository, directory, **apart), environment=Ask, quiet=True, resume=True).path


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run / "journal" / "control.db") as journal:
        return journal.execute(query).fetchall()


@pytest.mark.exhaustive
def test_both_learn_and_each_version_is_of_its_base(run: Path, repository: Path) -> None:
    info = json.loads(rows(run, "SELECT value FROM meta WHERE key = 'info'")[0][0])
    assert [(base["name"], base["policies"]) for base in info["bases"]] == [(LARGE, ["proposer"]), (SMALL, ["solver"])]
    assert rows(run, "SELECT policy, max(step), count(DISTINCT lineage) FROM steps GROUP BY policy") == [
        ("proposer", 3, 2),
        ("solver", 3, 2),
    ]
    assert info["config"]["engine"]["max_context"] == 256, "the positions of both"
    versions = rows(run, "SELECT policy, kind, path, sha256 FROM versions ORDER BY policy, lineage, step")
    assert len({digest for policy, _, _, digest in versions if policy == "solver"}) > 1
    for policy, kind, path, _ in versions:
        if policy == "solver":
            own = repository / "environments" / SMALL
            assert kind == "full"
            for name in ("tokenizer.json", "chat_template.jinja"):
                assert Path(path, name).read_bytes() == (own / name).read_bytes()
            assert json.loads(Path(path, "config.json").read_text())["vocab_size"] == 260
        else:
            adapter = json.loads(Path(path, "adapter_config.json").read_text())
            assert kind == "adapter"
            assert adapter["base_model_name_or_path"].endswith(LARGE)


@pytest.mark.exhaustive
def test_the_ledger_holds_and_every_step_and_episode_is_done_again(run: Path) -> None:
    reader = RunReader(run)
    try:
        assert reader.ledger().problems == []
        lines = step_list(reader)
        assert {line.policy for line in lines} == {"proposer", "solver"}
        assert all(replay_step(reader, line).identical for line in lines)
        newest = {line.policy: line for line in sorted(lines, key=lambda line: (line.lineage, line.step))}
        assert all(recompute_step_loss(reader, line).same for line in newest.values())
        episodes = [(line.episode, line.attempt) for line in reader.episodes("committed_at != null", limit=1000)]
    finally:
        reader.close()
    found = replay(run, episodes, environment=Ask)
    assert [(each.episode, each.text) for each in found if each.outcome != "identical"] == []


@pytest.mark.exhaustive
def test_tokens_are_shown_by_the_tokenizer_of_their_policy(run: Path, repository: Path) -> None:
    reader = RunReader(run)
    try:
        parent = reader.episodes("parent = null and committed_at != null", limit=1)[0]
        child = reader.episodes("parent != null and committed_at != null", limit=1)[0]
        for line, policy, base in ((parent, "proposer", LARGE), (child, "solver", SMALL)):
            tokenizer = Tokenizer.from_file(str(repository / "environments" / base / "tokenizer.json"))
            (row,) = (row for row in episode_tokens(reader, line.episode).rows if row.policy == policy)
            wanted = [tokenizer.decode([token.id], skip_special_tokens=False) for token in row.tokens]
            shown = [token.text for token in row.tokens]
            assert [a for a, b in zip(shown, wanted, strict=True) if b.isascii()] == [b for b in wanted if b.isascii()]
    finally:
        reader.close()


@pytest.mark.exhaustive
def test_policies_are_evaluated_on_their_bases(run: Path, repository: Path, tmp_path: Path) -> None:
    config = config_of(repository, tmp_path)
    tasks = Ask.tasks("held_out")[:2]
    trained = {name: run / "policies" / name for name in ("proposer", "solver")}
    assert "evaluation/reward" in agentrl.evaluate(config, trained, tasks, environment=Ask)
    with pytest.raises(InputError, match=SMALL):
        agentrl.evaluate(config, {"solver": repository / "environments" / LARGE}, tasks, environment=Ask)


@pytest.mark.exhaustive
def test_a_run_is_not_resumed_on_another_model_in_the_same_place(repository: Path, tmp_path: Path) -> None:
    own = tmp_path / "models" / "small"
    shutil.copytree(repository / "environments" / SMALL, own)
    config = config_of(repository, tmp_path, steps=1)
    policies = {**config.model_dump(exclude_none=True)["policies"]}
    policies["solver"] |= {"model": str(own)}
    config = config_of(repository, tmp_path, steps=1, policies=policies)
    agentrl.train(config, environment=Ask, quiet=True)
    shutil.rmtree(own)
    shutil.copytree(repository / "environments" / "tictactoe/model", own)
    with pytest.raises(ConfigError, match=rf"policies.solver.model: {own}/config.json is not what the run began with"):
        agentrl.train(config, environment=Ask, quiet=True, resume=True)


def test_two_bases_with_one_name_are_refused(repository: Path, tmp_path: Path) -> None:
    twin = tmp_path / "frozen_lake" / "model"
    with pytest.raises(ValueError, match=SMALL):
        config_of(repository, tmp_path, model={"path": str(twin)})


def full_weights(run: Path, step: int) -> dict[str, Tensor]:
    """The weights of every policy after a step of the first lineage, by policy and name."""
    found = rows(run, f"SELECT policy, path FROM versions WHERE lineage = 0 AND step = {step}")
    files = ((policy, file) for policy, path in found for file in Path(path).glob("*.safetensors"))
    return {f"{policy} {name}": tensor for policy, file in files for name, tensor in load_file(file).items()}


SYNCHRONOUS: dict[str, Any] = {"deterministic": True, "engine": {"slots": 8, "max_context": 64}}


def synchronous(repository: Path, directory: Path, **more: Any) -> agentrl.RunConfig:
    config = config_of(repository, directory).model_dump(exclude_none=True)
    policies = {name: policy | {"max_staleness": 0} for name, policy in config["policies"].items()}
    return config_of(repository, directory, policies=policies, **SYNCHRONOUS | more)


@pytest.mark.exhaustive
def test_a_deterministic_run_gives_both_the_same_weights_again(repository: Path, tmp_path: Path) -> None:
    runs = [agentrl.train(synchronous(repository, tmp_path / each), environment=Ask, quiet=True) for each in "ab"]
    one, other = (full_weights(run.path, 2) for run in runs)
    assert {name.split()[0] for name in one} == {"proposer", "solver"}
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    start = full_weights(runs[0].path, 0)
    for policy in ("proposer", "solver"):
        assert any(not torch.equal(tensor, start[name]) for name, tensor in one.items() if name.startswith(policy))


@pytest.mark.ray
@pytest.mark.exhaustive
def test_both_bases_are_sharded_over_the_same_ranks(repository: Path, tmp_path: Path) -> None:
    """The tokens of a deterministic run's first step are the same, so its weights differ by rounding only."""
    whole = agentrl.train(synchronous(repository, tmp_path / "whole", steps=1), environment=Ask, quiet=True)
    sharding = {"ranks": 2, "sharding": "full"}
    config = synchronous(repository, tmp_path / "sharded", steps=1, trainer=sharding)
    sharded = agentrl.train(config, environment=Ask, quiet=True)
    one, other = full_weights(whole.path, 1), full_weights(sharded.path, 1)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4, msg=name)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_each_base_has_a_vllm_of_its_own_that_is_restarted_and_resumed(repository: Path, tmp_path: Path) -> None:
    made: list[EngineRouter] = []

    async def engine(plan: EnginePlan, *arguments: Any) -> Any:
        made.append(await make_engine(plan, *arguments))  # type: ignore[arg-type]
        return made[-1]

    class Kill:
        """Kills the solver's vLLM after its first step."""

        def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
            (solver,) = made[-1].of_policy("solver").engines
            if (policy, step) == ("solver", 1) and isinstance(solver, ProcessEngine):
                os.kill(solver.supervisor.process_id or 0, signal.SIGKILL)

        def on_evaluation(self, *arguments: Any) -> None:
            pass

    def trained(steps: int, *, resume: bool) -> Path:
        config = config_of(repository, tmp_path, steps=steps, engine={"vllm": {}, "slots": 8, "max_context": 64})
        factories = RunFactories(engine=engine)
        run = run_training(config, Ask, observers=[Kill()], quiet=True, resume=resume, factories=factories)
        return asyncio.run(run).path

    run = trained(2, resume=False)
    assert trained(3, resume=True) == run
    assert [len(engines.fleets) for engines in made] == [2, 2]
    log = (run / "engine.log").read_text()
    assert made[0].of_policy("proposer") is not made[0].of_policy("solver"), log
    assert rows(run, "SELECT policy, max(step) FROM steps GROUP BY policy") == [("proposer", 3), ("solver", 3)]
    reader = RunReader(run)
    try:
        assert reader.ledger().problems == []
        newest = {line.policy: line for line in sorted(step_list(reader), key=lambda line: (line.lineage, line.step))}
        assert {policy: recompute_step_loss(reader, line).same for policy, line in newest.items()} == {
            "proposer": True,
            "solver": True,
        }
    finally:
        reader.close()


class Chance(Ask):
    """Two seats, paid by chance, so that every step has a gradient."""

    seats = ("proposer", "solver")
    fan_out: ClassVar[dict[str, int]] = {}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("Go."))
            ctx.agent(seat).reward(ctx.rng.random())


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_policies_that_train_all_weights_of_one_model_have_a_vllm_each(repository: Path, tmp_path: Path) -> None:
    """With `max_staleness` 0 a step samples with the weights of the step before, so its figures tell whether each vLLM
    has those of its own policy."""
    learns = {"learning_rate": 1e-2, "max_staleness": 0, "step_size": 4}
    config = config_of(
        repository,
        tmp_path,
        environment={"id": "chance"},
        model={"path": str(repository / "environments" / SMALL)},
        policies={"proposer": learns, "solver": learns},
        engine={"vllm": {}, "slots": 8, "max_context": 64},
    )
    assert [list(base.policies) for base in config.bases] == [["proposer"], ["solver"]]
    run = agentrl.train(config, environment=Chance, quiet=True)
    assert rows(run.path, "SELECT policy, max(step) FROM steps GROUP BY policy") == [("proposer", 2), ("solver", 2)]
    trained = full_weights(run.path, 1)
    differences = [
        (tensor - trained[name.replace("proposer", "solver", 1)]).abs().max()
        for name, tensor in trained.items()
        if name.startswith("proposer")
    ]
    assert max(differences) > 1e-3
    assert len(run.metrics) == 4
    for metrics in run.metrics:
        assert metrics["grad_norm"] > 0
        assert metrics["mismatch/k3"] <= 1e-5, metrics


def test_doctor_plans_for_each_base(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.toml").write_text(
        '[environment]\nid = "ask"\n[policies.proposer]\nmodel = "large"\n[policies.solver]\nmodel = "small"\n'
    )
    for name, base in (("large", LARGE), ("small", SMALL)):
        shutil.copytree(repository / "environments" / base, tmp_path / name)
        # One layer, since the memory of each is predicted.
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, num_hidden_layers=1, layer_types=["full_attention"]
        )
        model.save_pretrained(tmp_path / name)
    config = load(tmp_path / "train.toml")
    assert [base.path for base in config.bases] == [str(tmp_path / "large"), str(tmp_path / "small")]
    main(["doctor", str(tmp_path / "train.toml"), "--engine.replicas=1", "--json"])
    report = json.loads(capsys.readouterr().out)["sections"]["memory"]
    engines = {check["name"] for check in report if check["name"].startswith("engine of ")}
    assert engines == {f"engine of {tmp_path.name}/{name}" for name in ("large", "small")}
