"""Supervised steps by the loop: on a file of conversations, and on the best episodes of a run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config.run import RunConfig
from agentrl.core.errors import InputError
from agentrl.environment.registry import resolve
from agentrl.environments.imitation import Imitation
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from tests.unit.episodes import play

CALCULATOR = "agentrl.environments.calculator:Calculator"
SAID = ["State the final answer to the following arithmetic problem: 7 + 8 =", "13"]


def config(directory: Path, name: str, environment: dict[str, Any], **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": name,
        "directory": str(directory),
        "steps": 6,
        "environment": environment,
        "model": {"path": "agentrl.environments:calculator/model"},
        "policies": {"policy": {"step_size": 4, "max_staleness": 0, "learning_rate": 1e-3}},
        "credit": {"group_size": 1, "advantage": "none"},
        "sampling": {"max_tokens": 16, "max_turns": 4},
        "engine": {"slots": 8, "max_context": 192},
        "trainer": {"loss": {"name": "reinforce"}},
        "evaluation": {"tasks": 0},
    }
    return RunConfig(**{**values, **sections})


def imitated(path: Path, **options: Any) -> dict[str, Any]:
    return {"id": "agentrl.environments.imitation:Imitation", "options": {"path": str(path), **options}}


def test_a_file_is_learned_and_then_the_best_of_a_run_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), SAID, strict=True)]
    file.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    run = agentrl.train(config(tmp_path, "file", imitated(file, tools_of=CALCULATOR)), quiet=True)
    losses = [step["loss"] for step in run.metrics]
    assert losses[-1] < 0.5 * losses[0], "the answer, which is wrong, becomes likely"
    assert {step["reward/mean"] for step in run.metrics} == {1.0}
    assert {step["turns/demonstrated"] for step in run.metrics} == {1.0}
    assert not (run.path / "alarms.jsonl").exists(), "an unlikely reply is no mismatch between engine and trainer"
    with contextlib.closing(RunReader(run.path)) as reader:
        assert reader.ledger().holds
        episode = reader.episodes("", limit=1)[0].episode
        assert [act.text.partition("<")[0] for act in reader_acts(reader, episode)] == [SAID[1]]

    sampled = config(
        tmp_path, "sampled", {"id": CALCULATOR}, steps=1, credit={"group_size": 2}, evaluation={"tasks": 2}
    )
    first = agentrl.train(sampled, quiet=True)
    with contextlib.closing(RunReader(first.path)) as reader:
        assert len(reader.episodes("purpose = evaluate")) >= 2, "of held-out tasks, which are not imitated"
    chosen = Imitation.tasks("train", path=str(first.path), best=1, tools_of=CALCULATOR)
    assert len(chosen) == 2, "one episode of each of two tasks"
    again = agentrl.train(
        config(tmp_path, "best", imitated(first.path, best=1, tools_of=CALCULATOR), steps=2), quiet=True
    )
    assert again.metrics[1]["loss"] < again.metrics[0]["loss"]


def reader_acts(reader: RunReader, episode: str) -> list[Any]:
    from agentrl.inspection.conversation import PolicyTurn, read_conversation

    return [act for act in read_conversation(reader, episode).acts if isinstance(act, PolicyTurn)]


class Restarting(agentrl.Environment):
    """Begins a conversation at each turn, with an example."""

    seats = ("policy",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("policy")
        for number in range(2):
            agent.restart(agentrl.user("1 + 1 ="), agentrl.Message(role="assistant", content="2"))
            await agent.act(agentrl.user(f"{number} + 1 ="))
        agent.reward(1.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(4)]


def test_conversations_of_a_run_are_those_that_the_policy_had(tmp_path: Path) -> None:
    run = agentrl.train(config(tmp_path, "restarts", {"id": f"{__name__}:Restarting"}, steps=1), quiet=True)
    conversations = [task.data["messages"] for task in Imitation.tasks("train", path=str(run.path))]
    assert len(conversations) >= 8, "two of each episode"
    for messages in conversations:
        assert [message.get("given", False) for message in messages] == [False, True, False, False]

    data = {"messages": [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2", "given": True}]}
    data["messages"] += [{"role": "user", "content": "7 + 8 ="}, {"role": "assistant", "content": "15"}]
    played = play(Imitation, ["x"], data={**data, "tools_of": ""})
    (turn,) = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    assert [message["content"] for message in turn.messages] == ["1 + 1 =", "2", "7 + 8 ="]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "conversation"),
        ("{", "read"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "not a conversation"),
        ('{"messages": "x"}', "not a conversation"),
    ],
)
def test_what_is_no_conversation_is_refused_by_line(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=reason):
        Imitation.tasks("train", path=str(file))


def test_options_that_choose_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Imitation.tasks("train", path=str(tmp_path / "absent"))
    with pytest.raises(InputError, match="where and best"):
        Imitation.tasks("train", path=str(tmp_path / "absent"), best=1)
    with pytest.raises(InputError, match="FrozenLake"):
        Imitation.tasks("train", path=str(tmp_path), tools_of="agentrl.environments.frozen_lake:FrozenLake")
    assert resolve("agentrl.environments.imitation:Imitation") is Imitation
