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


class Cutting(Restarting):
    """Cuts the first of two turns in half of the episodes, and the second in all."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("policy")
        await agent.act(agentrl.user("1 + 1 ="), reply="2" if int(ctx.task.id) % 2 else None, max_tokens=1)
        await agent.act(agentrl.user("2 + 2 ="), reply="4")
        await agent.act(agentrl.user("3 + 3 ="), max_tokens=1)
        agent.reward(1.0)


def test_turns_that_were_cut_are_context_and_counted(tmp_path: Path) -> None:
    run = agentrl.train(config(tmp_path, "cut", {"id": f"{__name__}:Cutting"}, steps=1), quiet=True)
    with pytest.warns(UserWarning, match=r"(\d+) of (\d+) turns of .* were cut, and are not imitated") as told:
        tasks = Imitation.tasks("train", path=str(run.path))
    with contextlib.closing(RunReader(run.path)) as reader:
        played = {f"{line.episode}:policy[0]": reader_acts(reader, line.episode) for line in reader.episodes("")}
    cut = sum(act.finish_reason == "length" for acts in played.values() for act in acts)
    assert str(told[0].message).startswith(f"{cut} of {sum(map(len, played.values()))} turns")
    assert len(tasks) == len(played)
    assert cut >= len(played), "the last turn of each"
    for task in tasks:
        replies = [message for message in task.data["messages"] if message["role"] == "assistant"]
        assert len(replies) == 2, "nothing follows the last reply that is trained"
        expected = [act.finish_reason != "stop" for act in played[task.id][:2]]
        assert [message.get("given", False) for message in replies] == expected


class Duel(agentrl.Environment):
    """The winner is rewarded with 1, the loser with −1, the referee not at all."""

    seats = ("x", "o", "referee")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        x, o, referee = map(ctx.agent, self.seats)
        for agent in (x, o, referee):
            await agent.act(agentrl.user(f"{agent.seat} to move"), reply="1")
        sign = 1.0 if int(ctx.task.id) % 2 else -1.0
        x.reward(sign)
        o.reward(-sign)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(4)]


class Solo(Duel):
    """One seat is rewarded."""

    seats = ("x", "referee")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        x, referee = map(ctx.agent, self.seats)
        for agent in (x, referee):
            await agent.act(agentrl.user(f"{agent.seat} to move"), reply="1")
        x.reward(1.0)


def with_referee(directory: Path, name: str) -> RunConfig:
    """Return a run of self-play before a frozen referee."""
    policy = {"step_size": 4, "max_staleness": 0, "learning_rate": 1e-3}
    seats = {seat: "policy" for seat in ("x", "o") if name == "Duel" or seat == "x"}
    return config(
        directory,
        name,
        {"id": f"{__name__}:{name}"},
        steps=1,
        policies={"policy": policy, "ref": {"kind": "frozen"}},
        seats={**seats, "referee": "ref"},
    )


def test_one_of_several_rewarded_seats_is_imitated(tmp_path: Path) -> None:
    run = agentrl.train(with_referee(tmp_path, "Duel"), quiet=True)
    with pytest.raises(InputError, match=r"options\.seat: .* name one to imitate, 'o' or 'x'"):
        Imitation.tasks("train", path=str(run.path))
    for seat in ("x", "o"):
        tasks = Imitation.tasks("train", path=str(run.path), seat=seat, where=f"reward/{seat} > 0", best=1)
        assert len(tasks) == 2
        assert {task.data["messages"][0]["content"] for task in tasks} == {f"{seat} to move"}


def test_an_unrewarded_seat_is_not_imitated(tmp_path: Path) -> None:
    run = agentrl.train(with_referee(tmp_path, "Solo"), quiet=True)
    tasks = Imitation.tasks("train", path=str(run.path))
    assert {task.data["messages"][0]["content"] for task in tasks} == {"x to move"}


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
    with pytest.raises(InputError, match="where, best and seat"):
        Imitation.tasks("train", path=str(tmp_path / "absent"), best=1)
    with pytest.raises(InputError, match="FrozenLake"):
        Imitation.tasks("train", path=str(tmp_path), tools_of="agentrl.environments.frozen_lake:FrozenLake")
    assert resolve("agentrl.environments.imitation:Imitation") is Imitation
