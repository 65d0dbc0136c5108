"""An agent whose calls have their own sampling is trained on what they sampled, in a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.app.replays import replay_step
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list
from agentrl.journal.entries import TurnEntry
from tests import journal_oracle
from tests.support import warm

pytestmark = [pytest.mark.e2e]

PROGRAM = """
import json, sys
import aiohttp
import agentrl

CALLS = (
    {"temperature": 0.6, "top_p": 0.9, "seed": 7},
    {"temperature": 0},
    {"temperature": 1.5, "response_format": {"type": "json_object"}},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 1.5, "top_k": 20},
)

class Solver(agentrl.HarnessEnvironment):
    seats = ("solver",)

    async def play(self, task, endpoint):
        messages = [{"role": "user", "content": task.data["question"]}]
        headers = {"Authorization": "Bearer " + endpoint.key}
        async with aiohttp.ClientSession(headers=headers) as client:
            for fields in CALLS:
                body = {"model": "solver", "messages": messages, **fields}
                async with client.post(endpoint.url + "/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    message = (await response.json())["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "Go on."}]
        return "".join(message["content"] for message in messages[1::2])

    def reward(self, task, episode):
        return float(len(set(episode.result or "")))

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}{n}", data={"question": f"{n} + 5?"}) for n in range(4)]

if __name__ == "__main__":
    run = agentrl.train(agentrl.RunConfig.model_validate(json.loads(sys.argv[1])), environment=Solver, quiet=True)
    print(run.path)
"""
CONFIG = {
    "name": "own",
    "steps": 2,
    "environment": {"id": "program.py:Solver"},
    "model": {"path": "agentrl.environments:calculator/model"},
    "policies": {"solver": {"step_size": 8, "max_staleness": 0, "learning_rate": 1e-3}},
    "credit": {"group_size": 4},
    "sampling": {"max_tokens": 6},
    "engine": {"slots": 8, "max_context": 1024},
    "trainer": {"loss": {"normalizer": 64}},
    "evaluation": {"tasks": 2, "sampling": {"temperature": 0}},
}


def run_program(directory: Path, **changes: object) -> Path:
    (program := directory / "program.py").write_text(PROGRAM)
    ended = warm.script(directory, program, json.dumps({**CONFIG, **changes}))
    assert ended.returncode == 0, ended.stderr
    return directory / ended.stdout.splitlines()[-1]


def test_calls_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    run = run_program(tmp_path)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "mismatch/max_difference" in line]
    assert len(steps) == 2
    # Engine and trainer agree although no two calls in a row have the same distribution.
    assert max(step["mismatch/max_difference"] for step in steps) < 1e-4
    assert {name: step[name] for step in steps for name in step if name.startswith("untrained/")} == {
        "untrained/greedy": 1.0,
        "untrained/penalty": 1.0,
    }
    reader = RunReader(run)
    trained = 0
    for line in reader.episodes("status = trained"):
        turns = [entry for _, entry in reader.episode(line.episode).entries if isinstance(entry, TurnEntry)]
        assert [turn.temperature for turn in turns] == [0.6, 0.0, 1.5, 1.0, 1.5]
        counts = [turn.sampled().kept for turn in turns]
        assert [None if kept is None else bool((kept.counts > 0).all()) for kept in counts] == [
            True,
            False,
            None,
            False,
            True,
        ]
        trained += sum(len(turn.tokens) for turn in (turns[0], turns[2], turns[4]))
    recorded = step_list(reader)
    assert sum(line.tokens for line in recorded) == trained
    assert all(replay_step(reader, line).identical for line in recorded)
    reader.close()
    assert journal_oracle.judge(run, ended=True) == []


def test_a_run_that_insists_trains_every_call_and_measures_the_likeliest_tokens(tmp_path: Path) -> None:
    run = run_program(tmp_path, gateway={"sampling": "run"}, sampling={"max_tokens": 6, "temperature": 0.8}, steps=1)
    reader = RunReader(run)
    temperatures = {
        (line.purpose, entry.temperature)
        for line in reader.episodes()
        for _, entry in reader.episode(line.episode).entries
        if isinstance(entry, TurnEntry)
    }
    reader.close()
    assert temperatures == {("train", 0.8), ("evaluate", 0.0)}
    assert journal_oracle.judge(run, ended=True) == []
