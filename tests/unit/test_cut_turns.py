"""A turn that a limit on tokens cuts: neither an answer, nor a move, nor a tool call, in every class that reads one.

Tokens are bytes here, so `max_tokens` cuts a reply after as many letters. Each stump below is worth something to a
class that takes it for a whole reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import aiohttp
import gymnasium
import pytest
from gymnasium import spaces

import agentrl
from agentrl.core.records import Task
from agentrl.environment.games import Game, GameEnvironment, GamePosition
from agentrl.environment.registry import resolve
from agentrl.environments.calculator.env import Calculator
from agentrl.environments.frozen_lake.env import FrozenLake
from agentrl.environments.propose_and_solve.env import INVALID, ProposeAndSolve
from agentrl.environments.tictactoe.env import TicTacToe
from agentrl.journal.entries import RewardEntry
from agentrl_formats.session import Call, Session, SessionEnvironment, Start, Step
from tests.unit.episodes import Played, play

SEEN: list[Any] = []
"""Episodes that the classes below were given to reward."""
CALL = '<tool_call>{"name": "add", "arguments": {"n": 3}}</tool_call>'


class Adder(agentrl.ToolEnvironment):
    """Pays 1 for any answer, and 10 for each call."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.calls = 0
        await super().run(ctx)

    @agentrl.tool
    def add(self, n: int) -> int:
        """Add."""
        self.calls += 1
        return n

    def reward(self, task: Task, episode: agentrl.ToolEpisode) -> float:
        SEEN.append(episode)
        return float(episode.answer != "") + 10.0 * self.calls


class Counter:
    """As for TRL: one call of 3 is right."""

    def reset(self, **row: object) -> str:
        self.total = 0
        return "Count."

    def add(self, n: int) -> int:
        """Add.

        Args:
            n: how much.
        """
        self.total += n
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


class Numbers(gymnasium.Env[Any, Any]):
    """The action is the reward, and ends the game."""

    action_space = spaces.Discrete(100)
    observation_space = spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, float(action), True, False, {}


class Gym(agentrl.GymEnvironment):
    def make(self, task: Task) -> Any:
        return Numbers()

    def render(self, observation: Any, info: Any, env: Any) -> str:
        return "a number"

    def parse(self, text: str, env: Any) -> int | None:
        return int(text) if text.isdecimal() else None

    def reward(self, task: Task, episode: Any) -> float:
        SEEN.append(episode)
        return super().reward(task, episode)


class Dice(Game):
    """Whoever names a number gets it."""

    def reset(self) -> GamePosition:
        return GamePosition(player=0, observation="?", legal=True, rewards=[0.0], illegal=[], truncated=False)

    def step(self, text: str) -> GamePosition:
        is_legal = text.isdecimal()
        over = {"player": None, "legal": is_legal, "illegal": [] if is_legal else [0]}
        return self.reset() | over | {"rewards": [float(text) if is_legal else 0.0]}  # type: ignore[return-value]


class Named(GameEnvironment):
    seats = ("agent",)

    def game(self, task: Task) -> Game:
        return Dice()

    def rewards(self, task: Task, episode: Any) -> Any:
        SEEN.append(episode)
        return super().rewards(task, episode)


class Echo(Session):
    """Pays a number."""

    async def start(self) -> Start:
        return {"messages": [{"role": "user", "content": "?"}], "tools": []}

    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        return {"messages": [], "reward": float(text or 0), "done": True}

    async def cut(self) -> float:
        return -0.5


class Sessions(SessionEnvironment):
    level = "replay"

    def session(self, task: Task) -> Session:
        return Echo()


async def ask(endpoint: agentrl.Endpoint, **fields: Any) -> str:
    """Send one request; return the finish reason of its reply."""
    body = {"model": "main", "messages": [{"role": "user", "content": "?"}], **fields}
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{endpoint.url}/chat/completions", json=body) as response,
    ):
        return str(json.loads(await response.read())["choices"][0]["finish_reason"])


class Program(agentrl.HarnessEnvironment):
    """A program that returns what it was told about its reply."""

    seats = ("main",)

    async def play(self, task: Task, endpoint: agentrl.Endpoint) -> Any:
        return await ask(
            endpoint, tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        )

    def reward(self, task: Task, episode: agentrl.HarnessEpisode) -> float:
        SEEN.append(episode)
        return 1.0 if episode.result in ("stop", "tool_calls") else 0.0


class Plain(agentrl.Environment):
    """As in README: the text of the turn is the answer, unless it is cut."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("agent").act(agentrl.user("?"))
        ctx.agent("agent").reward(float(not turn.is_cut and turn.text.isdecimal()))


class Careless(agentrl.Environment):
    """Does not ask whether the turn is cut, and rewards each turn."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for number in range(2):
            turn = await agent.act(agentrl.user("?"))
            agent.reward({"right": float(turn.text.isdecimal())}, turn=number)


class Row(NamedTuple):
    """A class, with replies of which `max_tokens` cuts the last, and the same replies with its stump as a whole one."""

    environment: type[Any]
    replies: Sequence[str]
    max_tokens: int
    whole_replies: Sequence[str]
    whole: float
    """Reward of the agent if the stump is a whole reply: what it is worth to a class that takes it for one."""
    cut: float
    """Its reward if the reply is cut."""
    data: Mapping[str, Any] = {}


def connect_four() -> type[agentrl.Environment]:
    pettingzoo = pytest.importorskip("pettingzoo", reason="the extra games is not installed")

    class Discs(agentrl.PettingZooEnvironment):
        seats = ("agent", "other")

        def make(self, task: Task) -> Any:
            return pettingzoo.make("aec", "classic/connect_four-v3")

        def render(self, observation: Any, info: Any, env: Any) -> str:
            return "?"

    return Discs


def tic_tac_toe() -> type[agentrl.Environment]:
    pytest.importorskip("textarena", reason="the extra games is not installed")
    return TicTacToe


LAKE = {"map": ["SFFF", "FHFH", "FFFH", "HFFG"], "seed": 0, "shaped": True}
SUM = "1 + 1 + 1 + 1 + 1 + 1 + 1"
GAME = {"seed": 0, "opening": []}

ROWS: dict[str, Callable[[], Row]] = {
    "tools: an answer": lambda: Row(Adder, ["13"], 1, ["1"], 1.0, 0.0),
    "tools: half a call": lambda: Row(Adder, [CALL], 20, [CALL[:20], "x"], 1.0, 0.0),
    "tools: a whole call, and more": lambda: Row(Adder, [CALL + CALL], len(CALL), [CALL, "x"], 11.0, 0.0),
    "tools: an answer after a call": lambda: Row(
        Adder, [CALL, "x" * 99], len(CALL) + 1, [CALL, "x" * (len(CALL) + 1)], 11.0, 10.0
    ),
    "TRL": lambda: Row(resolve(Counter), [CALL + CALL], len(CALL), [CALL, "x"], 3.0, 0.0),
    "gymnasium": lambda: Row(Gym, ["13"], 1, ["1"], 1.0, -1.0, {"seed": 0}),
    "a game of ours": lambda: Row(Named, ["13"], 1, ["1"], 1.0, -2.0, {"seed": 0}),
    "PettingZoo": lambda: Row(
        connect_four(), [*["0", "1"] * 3, "0 x"], 2, [*["0", "1"] * 3, "0 "], 1.0, -2.0, {"seed": 0}
    ),
    "TextArena": lambda: Row(tic_tac_toe(), ["[4] x"] * 2, 4, ["[4] ", "x", "x"], 1.0, -0.5, GAME),
    "a session": lambda: Row(Sessions, ["13"], 1, ["1"], 1.0, -0.5),
    "a program: an answer": lambda: Row(Program, ["13"], 1, ["1"], 1.0, 0.0),
    "a program: a whole call, and more": lambda: Row(Program, [CALL + CALL], len(CALL), [CALL], 1.0, 0.0),
    "a plain class": lambda: Row(Plain, ["13"], 1, ["1"], 1.0, 0.0),
    "the calculator": lambda: Row(Calculator, ["13"], 1, ["1"], 1.0, 0.0, {"question": "?", "answer": "1"}),
    "the lake": lambda: Row(FrozenLake, ["D."], 1, [*"DDRDRR"], 1.0, -0.5, LAKE),
    "a proposer": lambda: Row(ProposeAndSolve, [SUM + "2"], 25, [SUM, *["7"] * 4, *["8"] * 4], 8 / 7, INVALID),
}


def played(row: Row, environment: type[Any], *, whole: bool = False) -> Played:
    SEEN.clear()
    replies, max_tokens = (row.whole_replies, 512) if whole else (row.replies, row.max_tokens)
    return play(environment, replies, data=dict(row.data) or None, max_tokens=max_tokens, max_context=1 << 16)


def reward_of(episode: Played) -> float | None:
    """The reward of the agent whose turn is cut."""
    assert episode.header.committed, episode.said
    return episode.header.trajectories[0].reward


@pytest.mark.parametrize("name", ROWS)
def test_a_cut_turn_is_no_answer_no_move_and_no_call(name: str) -> None:
    row = ROWS[name]()
    whole = played(row, row.environment, whole=True)
    assert (reward_of(whole), whole.header.stop_reason) == (pytest.approx(row.whole), "completed")
    assert [episode.truncated for episode in SEEN] == [False] * len(SEEN)
    cut = played(row, row.environment)
    assert (reward_of(cut), cut.header.stop_reason) == (row.cut, "max_tokens")
    assert [episode.truncated for episode in SEEN] == [True] * len(SEEN)


@pytest.mark.parametrize("name", ROWS)
def test_one_switch_drops_or_penalizes_the_unit_of_a_truncated_agent(name: str) -> None:
    row = ROWS[name]()
    kept = played(row, row.environment).header.trajectories
    for value in (None, -7.0, 0.25):
        environment = type("Switched", (row.environment,), {"truncated_reward": value, "__module__": __name__})
        cut = played(row, environment)
        assert (reward_of(cut), cut.header.stop_reason) == (value, "max_tokens")
        assert cut.header.drops_as_truncated(cut.header.trajectories[0]) == (value is None)
        others = cut.header.trajectories[1:]
        assert others == kept[1:], "an agent whose turn is not cut keeps its reward"
        whole = played(row, environment, whole=True)
        assert reward_of(whole) == pytest.approx(row.whole)


def test_a_class_that_does_not_ask_is_truncated_all_the_same() -> None:
    for value, reward in (("keep", 2.0), (None, None), (-1.0, -1.0), (2.0, 2.0)):
        environment = type("Switched", (Careless,), {"truncated_reward": value, "__module__": __name__})
        cut = play(environment, ["1", "13x"], max_tokens=2)
        assert (reward_of(cut), cut.header.stop_reason) == (reward, "max_tokens")
        given = [entry.value for entry in cut.entries if isinstance(entry, RewardEntry)]
        assert given == [1.0, 1.0, *([-1.0, -1.0, value] if isinstance(value, float) else [])]


def test_an_agent_without_a_reward_gets_none_of_its_own_making() -> None:
    class Silent(agentrl.Environment):
        seats = ("agent", "other")

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            for seat in self.seats:
                await ctx.agent(seat).act(agentrl.user("?"))

    for value, reward in (("keep", 0.0), (None, None), (-1.0, -1.0)):
        environment = type("Switched", (Silent,), {"truncated_reward": value, "__module__": __name__})
        rewards = [agent.reward for agent in play(environment, ["123", "1"], max_tokens=2).header.trajectories]
        assert rewards == [reward, reward]
    assert [agent.reward for agent in play(Silent, ["1", "1"], max_tokens=2).header.trajectories] == [None, None]


def test_an_earlier_cut_turn_does_not_truncate_the_episode() -> None:
    class Patient(Gym):
        illegal_actions: ClassVar[int] = 2

    forgiven = play(Patient, ["13", ""], data={"seed": 0}, max_tokens=1)
    assert (forgiven.header.reward, forgiven.header.stop_reason) == (-1.0, "completed")
    assert forgiven.metrics["turns/illegal"] == 2.0


def test_a_full_context_cuts_a_turn_by_its_own_name() -> None:
    full = play(Adder, ["x" * 500], max_context=80)
    assert (full.header.reward, full.header.stop_reason) == (0.0, "context_length")


def test_a_text_that_a_program_stops_at_cuts_nothing() -> None:
    class Stopping(Program):
        async def play(self, task: Task, endpoint: agentrl.Endpoint) -> Any:
            return await ask(endpoint, stop=["END"])

    stopped = played(Row(Stopping, ["one END two three"], 9, [], 0, 0), Stopping)
    assert (stopped.header.reward, stopped.header.stop_reason) == (1.0, "completed")
    assert [episode.truncated for episode in SEEN] == [False]
