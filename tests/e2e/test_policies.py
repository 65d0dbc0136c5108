"""Policies of several kinds on one real base model: two adapters learn, one is frozen, past versions play."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentrl
from agentrl.app.weights import check_base, weights_in
from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.core.records import Row
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from agentrl.journal.reader import EntryKey, TurnReader
from agentrl.journal.rows import trajectories

pytestmark = [pytest.mark.e2e]


class Match(agentrl.Environment):
    """Two sides, a third seat that is rewarded with them, a judge that is not."""

    seats = ("x", "o", "helpmate", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            turn = await ctx.agent(seat).act(agentrl.user("1 + 2 ="), max_tokens=6)
            if seat != "judge":
                ctx.agent(seat).reward(sum(map(str.isdigit, turn.text)) / 6)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(4)]


@pytest.fixture
def base(repository: Path) -> Path:
    return repository / "environments" / "calculator" / "model"


@pytest.fixture
def judge(base: Path, tmp_path: Path) -> Path:
    """An adapter that changes every logit."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def config_of(base: Path, judge: Path, directory: Path, **more: Any) -> agentrl.RunConfig:
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    learning = {"lora": lora, "step_size": 4, "learning_rate": 1e-2}
    values = {
        "name": "match",
        "directory": str(directory),
        "steps": 4,
        "environment": {"id": "match"},
        "model": {"path": str(base)},
        "policies": {
            "player": learning,
            "other": learning,
            "past": {"kind": "past", "of": "player", "every": 1, "size": 2},
            "judge": {"kind": "frozen", "path": str(judge), "sampling": {"temperature": 0.7}},
        },
        "seats": {"x": ["player", "past"], "o": ["past", "player"], "helpmate": "other", "judge": "judge"},
        "credit": {"group_size": 2},
        "engine": {"max_context": 64, "slots": 8},
        "trainer": {"kind": "in_process"},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 1, "versions": 0},
    }
    return agentrl.RunConfig.model_validate(values | more)


def played(run: Path) -> list[tuple[TurnEntry, Row]]:
    """Every turn of training with its row."""
    reader, log = RunReader(run), TurnReader(run / "journal")
    found = []
    for line in reader.episodes():
        entries = reader.episode(line.episode).entries
        turns = {entry.seat: entry for _, entry in entries if isinstance(entry, TurnEntry)}
        partition = next((run / "journal").glob("turns-*.db")).name
        rows = trajectories(log.read_many([EntryKey(partition, line.episode, 0, len(entries))])[0])
        found += [(turns[t.seat], t.rows[0]) for t in rows if t.rows]
    reader.close()
    log.close()
    return found


def logprobs_under(directory: Path, row: Row) -> np.ndarray[Any, Any]:
    """Of a row's sampled tokens, with an adapter loaded as anybody would."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        logits = model(torch.tensor(row.token_ids[None], dtype=torch.long)).logits[0] / row.temperature
    told = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(row.token_ids[1:, None], dtype=torch.long))
    return np.asarray(told[:, 0])[row.loss_mask[1:]]


def test_each_seat_is_played_by_the_weights_it_says(
    base: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.read_bytes() for file in judge.iterdir()}
    run = agentrl.train(config_of(base, judge, tmp_path / "runs"), environment=Match, quiet=True)
    config = config_of(base, judge, tmp_path / "runs", steps=6)
    run = agentrl.train(config, environment=Match, quiet=True, resume=True)
    assert set(run.policies) == {"player", "other"}
    assert {file.name: file.read_bytes() for file in judge.iterdir()} == before
    turns = played(run.path)
    opponents = {(turn.spans[0].lineage, turn.spans[0].step) for turn, _ in turns if turn.policy == "past"}
    assert all(turn.weights_of == "player" for turn, _ in turns if turn.policy == "past")
    assert len(opponents) > 2
    assert {turn.seat for turn, _ in turns if turn.policy == "past"} == {"x", "o"}
    assert all((turn.temperature == 0.7) == (turn.policy == "judge") for turn, _ in turns)
    judged = [row for turn, row in turns if turn.policy == "judge"]
    versions = {(span.version.lineage, span.version.step) for row in judged for span in row.spans}
    assert versions == {weights_in("judge", judge).version[1:]}
    capsys.readouterr()
    assert main(["run", "winrates", str(run.path), "--json"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert {line["version"] for line in matrix} == {f"player@{lineage}.{step}" for lineage, step in opponents}
    assert sum(line["episodes"] for line in matrix) == sum(turn.policy == "past" for turn, _ in turns)
    assert any(0.0 <= metrics.get("win_rate/past", -1.0) <= 1.0 for metrics in run.metrics)
    assert main(["run", "winrates", str(run.path)]) == 0
    assert "player@0.0" in capsys.readouterr().out
    first = {(turn.policy, turn.spans[0]): (turn, row) for turn, row in reversed(turns) if len(turn.spans) == 1}
    assert {turn.policy for turn, _ in first.values()} == {"player", "other", "past", "judge"}
    for turn, row in list(first.values())[:8]:
        span = turn.spans[0]
        named = run.path / "versions" / (turn.weights_of or turn.policy) / f"{span.lineage}.{span.step}"
        told = row.behavior_logprobs[row.loss_mask]
        own = logprobs_under(judge if turn.policy == "judge" else named, row)
        assert told == pytest.approx(own, abs=2e-3), f"{turn.policy} {turn.spans}"


def test_an_adapter_of_another_base_is_refused_by_name(base: Path, judge: Path, tmp_path: Path) -> None:
    file = judge / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/models/other-base"}))
    with pytest.raises(
        InputError, match=r"policies\.judge\.path: .* is an adapter of another base, /models/other-base"
    ):
        agentrl.train(config_of(base, judge, tmp_path / "runs"), environment=Match, quiet=True)
    moved = tmp_path / "moved"
    moved.mkdir()
    for part in base.iterdir():
        if part.is_file():
            (moved / part.name).write_bytes(part.read_bytes())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    check_base(weights_in("judge", judge), moved)
    (moved / "model.safetensors").write_bytes(b"\0" * (base / "model.safetensors").stat().st_size)
    with pytest.raises(InputError, match="another base"):
        check_base(weights_in("judge", judge), moved)
