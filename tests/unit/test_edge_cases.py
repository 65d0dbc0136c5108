"""Cases that users of this field reported of other packages, each with the smallest input and the right outcome."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import sys
import uuid
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pydantic import Field

import agentrl
import agentrl_mcp
from agentrl.core.errors import AgentRLError, CheckFailedError, EnvironmentDefinitionError
from agentrl.core.reply_formats import REPLY_FORMATS
from agentrl.environment.registry import as_environment
from agentrl.testing import play
from agentrl_formats.harbor import Harbor

TASK = agentrl.Task(id="1", data={"question": "?"})


def environment(**namespace: Any) -> type[agentrl.ToolEnvironment]:
    """An environment with tools and attributes."""
    namespace = {"__doc__": "A desk.", "__module__": __name__, "reward": lambda self, task, episode: 0.0} | namespace
    namespace.setdefault("tasks", classmethod(lambda cls, split, *, seed=0: [agentrl.Task(id=split, data=TASK.data)]))
    return type("Desk", (agentrl.ToolEnvironment,), namespace)


def called(environment: type, name: str, **arguments: Any) -> str:
    """What the policy sees of a call."""
    return play(environment, TASK, [{"name": name, "arguments": arguments}, "done"]).observations[1]


class Unit(str, enum.Enum):  # noqa: UP042 (as people write it)
    CELSIUS = "celsius"


@dataclass
class Span:
    low: int
    high: int


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Unit, "celsius"),
        (tuple[int, int], [1, 2]),
        (set[str], ["a"]),
        (datetime.date, "2026-01-02"),
        (uuid.UUID, str(uuid.UUID(int=1))),
        (pathlib.Path, "a/b"),
        (Span, {"low": 1, "high": 2}),
        (dict[int, str], {"1": "a"}),
    ],
    ids=["enum", "tuple", "set", "date", "uuid", "path", "dataclass", "dict_of_ints"],
)
def test_case_values_of_rich_types_reach_a_tool(annotation: Any, value: Any) -> None:
    def look(self: Any, x: Any) -> str:
        return "called"

    look.__annotations__ = {"x": annotation}
    assert called(environment(look=agentrl.tool(look)), "look", x=value) == "called"


def test_case_a_default_in_a_field_is_a_default() -> None:
    @agentrl.tool
    def find(self: Any, word: str, most: int = Field(default=3, ge=1, description="Most results.")) -> str:
        return f"{word}, at most {most!r}"

    assert called(environment(find=find), "find", word="x") == "x, at most 3"
    shown = environment(find=find).tool_table()["find"].spec.parameters["properties"]["most"]
    assert shown == {"type": "integer", "default": 3, "minimum": 1, "description": "Most results."}


class Grade(str, enum.Enum):  # noqa: UP042 (as people write it)
    GOOD = "good"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.float32(0.5), "0.5"),
        (np.array(2), "2"),
        ({"rows": np.arange(2), "found": np.True_}, '{"rows":[0,1],"found":true}'),
        (torch.tensor([1.5]), "[1.5]"),
        (np.str_("a"), "a"),
        (Grade.GOOD, "good"),
        ([float("nan"), float("-inf"), -0.0], "[NaN,-Infinity,-0.0]"),
        (10**30, str(10**30)),
        (decimal.Decimal("1.10"), "1.10"),
        ({"content": b"caf\xc3\xa9"}, '{"content":"café"}'),
        ({(1, 2): None}, '{"1,2":null}'),
        ([{"seen": {"pear", "fig", "kiwi", "plum"}}], '[{"seen":["fig","kiwi","pear","plum"]}]'),
        (frozenset("edcba"), '["a","b","c","d","e"]'),
        ("a\udcff", "a?"),
    ],
)
def test_case_a_result_of_a_tool_is_shown(value: Any, shown: str) -> None:
    def look(self: Any) -> Any:
        return value

    assert called(environment(look=agentrl.tool(look)), "look") == shown


@pytest.mark.parametrize("value", [b"\xff", range(3), object()], ids=["bytes", "range", "object"])
def test_case_a_result_that_is_no_text_is_refused(value: Any) -> None:
    def look(self: Any) -> Any:
        return {"found": value}

    with pytest.raises(CheckFailedError, match=r"tool Desk\.look returned dict, which is not JSON"):
        called(environment(look=agentrl.tool(look)), "look")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 4), 0.25),
        (np.float16(0.5), 0.5),
        (np.array([2]), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([True]), 1.0),
    ],
)
def test_case_a_number_of_another_library_is_a_reward(value: Any, reward: float) -> None:
    assert play(environment(reward=lambda self, task, episode: value), TASK, ["x"]).reward == reward


@pytest.mark.parametrize("value", [torch.tensor([0.5, 1.0]), "1", decimal.Decimal("NaN"), decimal.Decimal("1e999")])
def test_case_what_is_no_number_is_no_reward(value: Any) -> None:
    with pytest.raises(CheckFailedError, match="the reward"):
        play(environment(reward=lambda self, task, episode: value), TASK, ["x"])


class Counted(gymnasium.Env[Any, Any]):
    """Ends after one action."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Text(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.str_("go"), {}

    def step(self, action: Any) -> Any:
        return "end", 1.0, True, False, {}


@pytest.mark.parametrize("text", [np.str_("go"), Grade.GOOD, "a\ud800", "é", "😀"])
def test_case_text_of_any_class_is_text(text: str) -> None:
    """Also in the journal, which knows Python's own types only."""
    plain = str.__str__(text).replace("\ud800", "?")
    shown = environment(prompt=lambda self, task: text)
    assert play(shown, TASK, ["x"]).observations == (plain,)
    listed = environment(prompt=lambda self, task: [agentrl.system(text), agentrl.user(text)])
    assert play(listed, TASK, ["x"]).observations == (f"{plain}\n{plain}",)
    game = agentrl.gym_environment(
        "Game",
        lambda task: Counted(),
        render=lambda observation, info, env: text,
        parse=lambda text, env: 1,
    )
    assert play(game, agentrl.Task(id="1", data={"seed": 1}), ["x"]).observations == (plain,)


def test_case_an_effect_of_numpy_is_journaled_as_numbers() -> None:
    class Measured(agentrl.Environment):
        """Shows what it measured."""

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            found = await ctx.effect(
                "measure", lambda: {"mean": np.float32(0.5), "rows": np.eye(2), "name": np.str_("a")}
            )
            await ctx.agent(self.seats[0]).act(agentrl.user(repr(found)))

    expected = "{'mean': 0.5, 'rows': [[1.0, 0.0], [0.0, 1.0]], 'name': 'a'}"
    assert play(Measured, TASK, ["x"]).observations == (expected,)


@pytest.mark.parametrize("role", ["critic", "developer", "", None])
def test_case_a_message_of_an_unknown_role_is_refused(role: Any) -> None:
    """Chat templates leave such messages out."""
    prompt = [agentrl.Message(role=role, content="No."), agentrl.user("Go.")]
    with pytest.raises(
        CheckFailedError, match=f"a message has role {role!r}; use one of system, user, assistant, tool"
    ):
        play(environment(prompt=lambda self, task: prompt), TASK, ["x"])


def test_case_a_prompt_without_messages_is_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"Desk\.prompt returned \[\]"):
        play(environment(prompt=lambda self, task: []), TASK, ["x"])


class Game:
    """A class for TRL."""

    def reset(self, **row: Any) -> Any:
        return row.get("seen")

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: Five letters in square brackets, such as [apple].
        """
        return word

    def get_reward(self) -> float:
        return 1.0


SYSTEM, USER = {"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Count."}
PARTS = [{"type": "text", "text": "Count."}]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([SYSTEM, USER], "Answer in French.\nCount."),
        ([{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}, USER], "1\none\nCount."),
        ([{"role": "user", "content": PARTS}], "Count."),
    ],
)
def test_case_every_message_of_a_trl_row_is_shown(prompt: Any, shown: str) -> None:
    assert play(Game, agentrl.Task(id="1", data={"prompt": prompt}), ["x"]).observations[0] == shown


@pytest.mark.parametrize("row", [{"prompt": None}, {"prompt": "Count.", "seen": {"board": 1}}])
def test_case_a_trl_row_without_text_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(AgentRLError, match=r"prompt|reset\(\)"):
        play(Game, agentrl.Task(id="1", data=row), ["x"])


def test_case_a_parameter_of_a_trl_class_is_described() -> None:
    (shown,) = as_environment(Game, where="Game").tool_table()["guess"].spec.parameters["properties"].values()  # type: ignore[attr-defined]
    assert shown["description"] == "Five letters in square brackets, such as [apple]."


@pytest.mark.parametrize(
    ("written", "arguments"), [('"{\\"path\\": \\"a\\"}"', {"path": "a"}), ("null", {}), ('""', {})]
)
def test_case_arguments_encoded_twice_are_read(written: str, arguments: dict[str, Any]) -> None:
    text = f'<tool_call>{{"name": "create", "arguments": {written}}}</tool_call>'
    (call,) = REPLY_FORMATS["hermes"].read(text, None).tool_calls
    assert call.arguments == arguments


SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    text = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "the content"}
    answers = {
        "initialize": {"protocolVersion": asked.get("params", {}).get("protocolVersion"), "capabilities": {"tools": {}},
                       "serverInfo": {"name": "s", "version": "1"}},
        "tools/list": {"tools": json.loads(sys.argv[1])},
        "tools/call": {"content": [{"type": "text", "text": "read"}, {"type": "resource", "resource": text}]},
    }
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]}), flush=True)
"""
OBJECT = {"type": "object", "properties": {}}
DRAFT_07 = OBJECT | {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "properties": {"at": {"type": "array", "items": [{"type": "integer"}, {"type": "integer"}]}},
}


@pytest.mark.parametrize(
    ("tools", "selected"),
    [
        ({"read": OBJECT}, ["read"]),
        ({"read": OBJECT, "files list": OBJECT}, ["read"]),
        ({"read": OBJECT, **{f"t{n}": OBJECT for n in range(300)}}, ["read"]),
        ({"read": DRAFT_07}, ["read"]),
        ({"files.list": OBJECT}, []),
    ],
    ids=["resource", "odd-name", "many", "draft-07", "dots"],
)
def test_case_a_tool_of_a_server_can_be_used(tmp_path: pathlib.Path, tools: dict[str, Any], selected: Any) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    listed = [{"name": name, "inputSchema": schema} for name, schema in tools.items()]
    command = [sys.executable, str(server), json.dumps(listed)]
    desk = environment(mcp_servers=[agentrl_mcp.MCPServer(command=command, tools=selected)])
    assert called(desk, next(iter(tools))).endswith("read\n[resource file:///a.txt]\nthe content")


def test_case_a_game_that_is_cut_pays_what_is_due() -> None:
    pettingzoo = pytest.importorskip("pettingzoo")

    class Hands(agentrl.PettingZooEnvironment):
        """Rock, paper, scissors: 0 against 1 is a point for the second player."""

        seats = ("first", "second")
        illegal_reward = -99.0

        def make(self, task: agentrl.Task) -> Any:
            return pettingzoo.make("parallel", "classic/rps_v2")

        def rewards(self, task: agentrl.Task, episode: Any) -> Any:
            paid.append(tuple(episode.rewards))
            return super().rewards(task, episode)

    class Short(Hands):
        """Two rounds."""

        max_turns = 4

    paid: list[tuple[float, ...]] = []
    task = agentrl.Task(id="1", data={"seed": 1})
    play(Short, task, ["0", "1", "0", "1"])
    play(Hands, task, ["0", "1", "0", "1", "what?"])
    assert paid == [(-2.0, 2.0), (-2.0, 2.0)]


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1, 2}, float("inf"), 10**30, "\ud83d", datetime.date(2026, 1, 2)],
    ids=["tuple", "set", "infinity", "large", "surrogate", "date"],
)
def test_case_task_data_that_a_journal_changes_is_refused_by_field(value: Any) -> None:
    def tasks(cls: type, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return [agentrl.Task(id=split, data={"question": "?", "answer": value})]

    report = agentrl.check_environment(environment(tasks=classmethod(tasks)))
    assert not report.passed
    assert "'answer'" in report.text


@pytest.mark.needs("bubblewrap")
def test_case_links_and_directories_of_a_harbor_task_are_carried(tmp_path: pathlib.Path) -> None:
    for directory in ("environment/src/out", "tests/data"):
        (tmp_path / directory).mkdir(parents=True)
    for name, content in {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY src/ /app/\nCOPY src/real.txt /app\n",
        "environment/src/real.txt": "hi\n",
        "tests/data/expected.txt": "e\n",
        "tests/test.sh": "#!/bin/bash\ntest -f /tests/expected.txt && echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "environment/src/link.txt").symlink_to("real.txt")
    (tmp_path / "tests/expected.txt").symlink_to("data/expected.txt")
    data = {
        "directory": str(tmp_path),
        "roots": {"ubuntu:24.04": "/"},
        "rewards": {"reward": [0, 1]},
        "failed_reward": None,
        "network": "none",
    }
    call = {"name": "bash", "arguments": {"command": "ls /app"}}
    played = play(Harbor, agentrl.Task(id="fix", data=data), [call, "done"])
    assert played.observations[1].split() == ["link.txt", "out", "real.txt"]
    assert played.reward == 1.0


def test_case_test_tools_work_inside_a_running_loop() -> None:
    async def cell() -> tuple[float, bool]:
        return play(environment(), TASK, ["7"]).reward, agentrl.check_environment(environment()).passed

    assert asyncio.run(cell()) == (0.0, True)


def test_case_a_tool_that_hides_a_method_is_refused() -> None:
    @agentrl.tool
    def prompt(self: Any, topic: str = "x") -> str:
        return f"about {topic}"

    with pytest.raises(EnvironmentDefinitionError, match=r"self\.prompt"):
        environment(prompt=prompt).tool_table()
    with pytest.raises(EnvironmentDefinitionError, match=r"`Desk\.tool_table` belongs to ToolEnvironment"):
        play(environment(tool_table=prompt), TASK, ["x"])
