"""`agentrl.evaluate` and its command: whose weights are served, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import agentrl
from agentrl.app.weights import weights_in
from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry

pytestmark = [pytest.mark.e2e]


class Pair(agentrl.Environment):
    """Two seats, a turn each."""

    seats = ("first", "second")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("1 + 2 ="))
            ctx.agent(seat).reward(0.5)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(2)]


def config_of(base: Path, **sections: object) -> agentrl.RunConfig:
    policies = {"first": {}, "second": {}}
    return agentrl.RunConfig.model_validate(
        {"environment": {"id": "pair"}, "model": {"path": str(base)}, "policies": policies, **sections}
    )


@pytest.fixture
def base(repository: Path) -> Path:
    return repository / "environments" / "calculator" / "model"


@pytest.fixture
def indifferent(base: Path, tmp_path: Path) -> Path:
    """Full weights under which every token is as likely as any other."""
    directory = tmp_path / "indifferent"
    directory.mkdir()
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, directory / "model.safetensors")
    return directory


def adapter(base: Path, directory: Path) -> Path:
    """An adapter that changes nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(directory)
    return directory


def turns(journal: Path) -> dict[str, list[TurnEntry]]:
    """The turns of all episodes, by policy."""
    found: dict[str, list[TurnEntry]] = {}
    reader = RunReader(journal)
    for line in reader.episodes():
        for _, entry in reader.episode(line.episode).entries:
            if isinstance(entry, TurnEntry):
                found.setdefault(entry.policy, []).append(entry)
    reader.close()
    return found


def test_each_policy_is_served_from_the_weights_given_for_it(base: Path, indifferent: Path, tmp_path: Path) -> None:
    given = {"first": adapter(base, tmp_path / "adapter"), "second": indifferent}
    scored = agentrl.evaluate(config_of(base), given, environment=Pair, journal=tmp_path / "kept")
    assert scored["evaluation/reward"] == 1.0
    assert scored["evaluation/reward/first"] == scored["evaluation/reward/second"] == 0.5
    said = turns(tmp_path / "kept")
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    drawn = {name: np.frombuffer(b"".join(turn.logprobs for turn in own), "<f4") for name, own in said.items()}
    for name, own in said.items():
        version = weights_in(name, given[name]).version
        assert {(span.lineage, span.step) for turn in own for span in turn.spans} == {(version.lineage, version.step)}
    assert drawn["second"] == pytest.approx(np.full(len(drawn["second"]), -math.log(vocabulary)), abs=1e-4)
    assert drawn["first"].max() > -1.0, "the adapter's base knows what it says"


def test_weights_are_refused_before_anything_is_sampled(base: Path, indifferent: Path, tmp_path: Path) -> None:
    config = config_of(base)
    with pytest.raises(InputError, match="whose weights"):
        agentrl.evaluate(config, indifferent, environment=Pair)
    with pytest.raises(InputError, match="no policy 'third' to give weights to; there are: first, second"):
        agentrl.evaluate(config, {"third": indifferent}, environment=Pair)
    with pytest.raises(InputError, match="no weights there"):
        agentrl.evaluate(config, {"first": tmp_path}, environment=Pair)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"r": "many"}')
    with pytest.raises(InputError, match="not the configuration of a LoRA adapter"):
        agentrl.evaluate(config, {"first": tmp_path}, environment=Pair)
    save_file({"odd": torch.zeros(1)}, indifferent / "model.safetensors")
    with pytest.raises(InputError, match=r"does not fit .*: weights second"):
        agentrl.evaluate(config, {"second": indifferent}, environment=Pair)


def test_the_command_takes_one_directory_or_names(
    base: Path, indifferent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(base.parents[2] / "examples" / "01_tool_use.toml", "run.toml")
    given = ["evaluate", "run.toml", "--tasks=2", "--json", "--policy"]
    assert main([*given, "indifferent"]) == 0
    assert main([*given, "solver=indifferent"]) == 0
    capsys.readouterr()
    assert main([*given, "indifferent", "--policy", "solver=indifferent"]) == 2
    assert "write NAME=DIR where there are several" in capsys.readouterr().err
