"""`agentrl.fork` called from a script, on a finished run that trained an adapter and was moved since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from tests.support import warm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = [
    "--name=adapters",
    "--steps=3",
    "--evaluation.tasks=0",
    "--max_in_flight=32",
    "--policies.solver.step_size=16",
    "--policies.solver.learning_rate=0.01",
    "--policies.solver.lora.rank=4",
]
SCRIPT = """\
import json
import sys

import agentrl

run, episode = sys.argv[1:]
first, second = agentrl.fork(run, episode, at=1, n=2)
(again,) = agentrl.fork(f"{run}/forks", first.episode_id, at=0)
print(json.dumps([header.episode_id for header in (first, second, again)]))
"""


def turns_of(reader: RunReader, episode: str) -> list[TurnEntry]:
    view = reader.episode(episode)
    assert view.problems == []
    return [entry for _, entry in view.entries if isinstance(entry, TurnEntry)]


def logprobs_of(turns: list[TurnEntry], base: str, adapter: Path) -> np.ndarray:
    """What transformers and PEFT, knowing nothing of agentrl, give the sampled tokens of the last turn of a row."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    tokens = torch.from_numpy(
        np.frombuffer(b"".join(turn.context_ids + turn.tokens.token_ids for turn in turns), "<i4").copy()
    )
    count = len(turns[-1].tokens.token_ids) // 4
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0, -count - 1 : -1]
    found = logits.log_softmax(-1).gather(-1, tokens[-count:, None].long())[:, 0]
    return np.asarray(found)


def test_forks_of_a_finished_and_moved_run_use_the_adapter_of_their_turn(repository: Path, tmp_path: Path) -> None:
    example = str(repository / "examples/01_tool_use.toml")
    trained = warm.command(tmp_path, "train", example, *SETTINGS)
    assert trained.returncode == 0, trained.stderr
    moved = Path(shutil.move(tmp_path / "runs/adapters", tmp_path / "kept"))
    reader = RunReader(moved)
    episode, recorded = next(
        (line.episode, turns)
        for line in reader.episodes("turns > 1 and purpose = 'train'", limit=1000)
        if (turns := turns_of(reader, line.episode))[1].tokens.spans[-1].version.step > 0
    )
    base = reader.info()["config"]["model"]["path"]
    (script := tmp_path / "play_on.py").write_text(SCRIPT, encoding="utf-8")
    (elsewhere := tmp_path / "elsewhere").mkdir()

    told = warm.script(elsewhere, script, str(moved), episode)
    assert told.returncode == 0, told.stderr

    forks = RunReader(moved / "forks")
    first, second, again = json.loads(told.stdout.splitlines()[-1])
    version = recorded[1].tokens.spans[-1].version[1:]
    for fork in (first, second):
        prefix, *own = turns_of(forks, fork)
        assert prefix == recorded[0], "the turn before is the one recorded"
        assert {span.version[1:] for turn in own for span in turn.tokens.spans} == {version}
        adapter = moved / "versions" / "solver" / f"{version[0]}.{version[1]}"
        sampled = own[0].sampled().logprobs
        np.testing.assert_allclose(sampled, logprobs_of([prefix, own[0]], base, adapter), atol=1e-4)
    assert turns_of(forks, again)[0].messages == recorded[0].messages, "a fork of a fork, at a turn it had not taken"
    assert reader.ledger().holds
    for opened in (reader, forks):
        opened.close()
