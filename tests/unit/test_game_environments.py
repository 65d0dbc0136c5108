"""Games of several players: a seat each, hidden cards kept from the others, illegal actions paid below every loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, Task
from agentrl.environment.games import LEGAL_ACTIONS, Game, GameEnvironment, GameEpisode, GamePosition, legal_actions
from agentrl.journal.entries import RewardEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.testing.execution import random_policy
from tests.unit.episodes import Played, play

INSTALL = "the extra games is not installed"


def told(played: Played, seat: str) -> list[str]:
    """The last new message of each turn of a seat."""
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry) and entry.seat == seat]
    return [str(turn.messages[-1]["content"]) for turn in turns]


def rewards(played: Played) -> dict[str, float]:
    return {entry.seat: entry.value for entry in played.entries if isinstance(entry, RewardEntry)}


# --- a game of ours ---------------------------------------------------------------------------------------------------


class Dice(Game):
    """Each in turn names a face, the global generator throws; whoever names it wins. Player 1 sees a secret."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self) -> GamePosition:
        """Draw the secret."""
        self.secret = random.randint(1, 6)
        return self.asked()

    def step(self, text: str) -> GamePosition:
        """Throw."""
        player, self.turn = self.turn % 2, self.turn + 1
        if not text.isdecimal():
            return self.asked() | {"player": None, "legal": False, "illegal": [player]}
        if int(text) != random.randint(1, 6):
            return self.asked()
        won = [1.0, -1.0] if player == 0 else [-1.0, 1.0]
        return self.asked() | {"player": None, "rewards": won}

    def asked(self) -> GamePosition:
        """Whose turn it is."""
        player = self.turn % 2
        shown = f"turn {self.turn}" + (f", secret {self.secret}" if player == 1 else "")
        return GamePosition(
            player=player, observation=shown, legal=True, rewards=[0.0, 0.0], illegal=[], truncated=False
        )


class Throw(GameEnvironment):
    """Two seats."""

    seats = ("first", "second")
    instructions = "Name a face."

    def game(self, task: Task) -> Game:
        return Dice()


def test_seats_take_turns_and_read_only_what_is_theirs() -> None:
    played = play(Throw, ["0"] * 9, data={"seed": 1}, max_turns=2)
    assert told(played, "first") == ["turn 0", "turn 2"]
    assert [text.split(", ")[0] for text in told(played, "second")] == ["turn 1", "turn 3"]
    assert all("secret" in text for text in told(played, "second"))
    first = next(entry for entry in played.entries if isinstance(entry, TurnEntry))
    assert [message["content"] for message in first.messages] == ["Name a face.", "turn 0"]
    assert played.header.stop_reason == "max_turns"


def test_each_seat_gets_its_reward() -> None:
    played = play(Throw, ["0", "0"] + ["3"] * 60, data={"seed": 4}, max_turns=60)
    assert sorted(rewards(played).values()) == [-1.0, 1.0]
    assert played.header.stop_reason == "completed"


def test_an_illegal_action_costs_its_player_more_than_losing() -> None:
    played = play(Throw, ["0", "x"], data={"seed": 1})
    assert rewards(played) == {"first": 0.0, "second": -2.0}
    assert rewards(play(Throw, ["x"], data={"seed": 1})) == {"first": -2.0}  # the other was never asked


def test_a_group_draws_alike_whatever_else_draws() -> None:
    def thrown(seed: int, *, episode: int) -> list[str]:
        played = play(Throw, ["3"] * 60, data={"seed": seed}, max_turns=60, seed=episode)
        random.random()
        return told(played, "first") + told(played, "second")

    assert thrown(5, episode=1) == thrown(5, episode=2)
    assert len({len(thrown(seed, episode=1)) for seed in range(9)}) > 3


def test_the_game_resumes_at_every_entry() -> None:
    report = agentrl.check_environment(Throw, tasks=[Task(id=f"t{seed}", data={"seed": seed}) for seed in range(4)])
    assert report.passed, report.text
    assert report.figures["resumptions"] > 8


def test_the_turns_of_all_players_are_limited() -> None:
    class Short(Throw):
        max_turns: ClassVar[int] = 3

    played = play(Short, ["0"] * 9, data={"seed": 1})
    assert (played.header.turns, played.header.stop_reason) == (3, "max_turns")


@pytest.mark.parametrize(
    ("given", "message"),
    [([1.0], "a number for each"), (None, "a number for each"), ([0.0, -2.0], r"Paid\.illegal_reward")],
)
def test_rewards_that_teach_the_wrong_thing_are_refused(given: Any, message: str) -> None:
    class Paid(Throw):
        max_turns: ClassVar[int] = 2

        def rewards(self, task: Task, episode: GameEpisode) -> Any:
            return given

    with pytest.raises(EnvironmentDefinitionError, match=message):
        play(Paid, ["0"] * 4, data={"seed": 1})


# --- PettingZoo -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pettingzoo_game() -> Callable[..., type[agentrl.PettingZooEnvironment]]:
    """A class for a classic game by its id."""
    pettingzoo = pytest.importorskip("pettingzoo", reason=INSTALL)

    def make(identifier: str, kind: str = "aec", **options: Any) -> type[agentrl.PettingZooEnvironment]:
        class Classic(agentrl.PettingZooEnvironment):
            seats = ("first", "second")
            illegal_reward: ClassVar[float] = -200.0

            def make(self, task: Task) -> Any:
                return pettingzoo.make(kind, f"classic/{identifier}", **options)

        return Classic

    return make


PettingZooGame = Callable[..., type[agentrl.PettingZooEnvironment]]


def test_noughts_and_crosses(pettingzoo_game: PettingZooGame) -> None:
    played = play(pettingzoo_game("tictactoe-v3"), ["0", "1", "3", "2", "6"], data={"seed": 0}, max_context=1 << 16)
    assert rewards(played) == {"first": 1.0, "second": -1.0}
    assert played.header.stop_reason == "completed"
    assert told(played, "first")[1].endswith("Legal actions: 2, 3, 4, 5, 6, 7, 8")


def test_an_action_outside_the_mask_is_illegal(pettingzoo_game: PettingZooGame) -> None:
    game = pettingzoo_game("tictactoe-v3")
    for reply in ("4", "9", "-1", "the middle", ""):
        played = play(game, ["4", reply], data={"seed": 0}, max_context=1 << 16)
        assert rewards(played) == {"first": 0.0, "second": -200.0}
        assert played.header.stop_reason == "completed"

    class Patient(game):  # type: ignore[misc, valid-type]
        illegal_actions: ClassVar[int] = 2

    played = play(Patient, ["4", "4", "0", "8", "4"], data={"seed": 0}, max_context=1 << 16)
    assert rewards(played) == {"first": 0.0, "second": -200.0}
    assert told(played, "second")[1] == "That is not a legal action.\n" + told(played, "second")[0]


def test_actions_can_have_names(pettingzoo_game: PettingZooGame) -> None:
    class Named(pettingzoo_game("connect_four-v3")):  # type: ignore[misc]
        def render(self, observation: Any, info: Any, env: Any) -> str:
            return "Drop a disc."

        def action_name(self, action: int, env: Any) -> str:
            return "ABCDEFG"[action]

    played = play(Named, ["a", "B", "a.", "b", " A ", "b", "a"], data={"seed": 0})
    assert rewards(played) == {"first": 1.0, "second": -1.0}
    assert told(played, "first")[0] == "Drop a disc.\nLegal actions: A, B, C, D, E, F, G"


def test_hidden_cards_reach_only_their_seat(pettingzoo_game: PettingZooGame) -> None:
    class Leduc(pettingzoo_game("leduc_holdem-v4")):  # type: ignore[misc]
        def render(self, observation: Any, info: Any, env: Any) -> str:
            return f"{env.agent_selection} holds {observation['observation'][:3].tolist()}"

    for seed in range(6):
        played = play(Leduc, ["0", "0", "0", "0", "3", "3"], data={"seed": seed})
        for seat, name in (("first", "player_0"), ("second", "player_1")):
            assert all(text.startswith(f"{name} holds ") for text in told(played, seat))


def test_a_parallel_game_is_asked_one_after_the_other_and_tells_no_move(pettingzoo_game: PettingZooGame) -> None:
    rock, paper = "0", "1"
    game = pettingzoo_game("rps-v2", "parallel", max_cycles=2)
    played = play(game, [rock, paper, rock, paper], data={"seed": 0})
    assert rewards(played) == {"first": -2.0, "second": 2.0}
    assert played.header.stop_reason == "max_turns"
    assert told(played, "first")[0] == told(played, "second")[0]


def rounds_of(env: Any, moves: list[str]) -> list[float]:
    """What PettingZoo's own loop pays each player for the moves, played to the end of the last full round."""
    agents = list(env.possible_agents)
    paid = dict.fromkeys(agents, 0.0)
    for start in range(0, len(moves) - len(agents) + 1, len(agents)):
        _, earned, *_ = env.step(dict(zip(agents, map(int, moves[start:]), strict=False)))
        for agent, reward in earned.items():
            paid[agent] += float(reward)
    return list(paid.values())


@pytest.mark.parametrize("kind", ["aec", "parallel"])
@pytest.mark.parametrize("moves", ["01", "010", "0101", "01010", "010210", "0121020"])
def test_players_are_paid_for_every_round_however_the_episode_ends(
    pettingzoo_game: PettingZooGame, kind: str, moves: str
) -> None:
    pettingzoo = pytest.importorskip("pettingzoo", reason=INSTALL)
    direct = pettingzoo.make("parallel", "classic/rps-v2")
    direct.reset(seed=0)
    expected = rounds_of(direct, list(moves))
    game = pettingzoo_game("rps-v2", kind)

    class Short(game):  # type: ignore[misc, valid-type]
        max_turns: ClassVar[int] = len(moves)

    cut = play(Short, list(moves), data={"seed": 0}, max_turns=9)
    assert list(rewards(cut).values()) == expected
    assert sum(expected) == 0.0
    broken = play(game, [*moves, "what?"], data={"seed": 0}, max_turns=9)
    offender = len(moves) % 2
    assert list(rewards(broken).values())[offender] == -200.0
    assert list(rewards(broken).values())[1 - offender] == expected[1 - offender]
    limited = play(game, [*moves, "0"], data={"seed": 0}, max_turns=(len(moves) + 1) // 2)
    assert limited.header.stop_reason == "max_turns"
    assert list(rewards(limited).values()) == expected


def test_three_players_keep_what_they_earned() -> None:
    parallel = pytest.importorskip("pettingzoo", reason=INSTALL).ParallelEnv
    from gymnasium.spaces import Box, Discrete

    class Paying(parallel):  # type: ignore[misc, valid-type]
        """Pays one point to each player and round."""

        metadata: ClassVar[dict[str, Any]] = {"name": "paying"}
        render_mode = None
        possible_agents: ClassVar[list[str]] = ["a", "b", "c"]

        def action_space(self, agent: str) -> Any:
            return Discrete(2, start=5)

        def observation_space(self, agent: str) -> Any:
            return Box(0, 1, (1,))

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.agents = list(self.possible_agents)
            return dict.fromkeys(self.agents, np.zeros(1)), {agent: {} for agent in self.agents}

        def step(self, actions: Any) -> Any:
            no = dict.fromkeys(self.agents, False)
            seen: Any = dict.fromkeys(self.agents, np.zeros(1))
            information: Any = {agent: {} for agent in self.agents}
            return seen, dict.fromkeys(self.agents, np.ones(1)), no, no, information

    class Three(agentrl.PettingZooEnvironment):
        seats = ("first", "second", "third")

        def make(self, task: Task) -> Any:
            return Paying()

    for moves in (6, 7, 8):

        class Short(Three):
            max_turns: ClassVar[int] = moves

        assert list(rewards(play(Short, ["5"] * 9, data={"seed": 0})).values()) == [2.0, 2.0, 2.0]
        broken = list(rewards(play(Three, [*["6"] * moves, "7"], data={"seed": 0})).values())
        assert broken == [-2.0 if seat == moves % 3 else 2.0 for seat in range(3)]


@pytest.mark.parametrize(("mask", "legal"), [(np.array([1, 0, 1]), [-1, 1]), (None, [-1, 0, 1])])
def test_a_mask_counts_from_the_first_action_of_the_space(mask: object, legal: list[int]) -> None:
    from types import SimpleNamespace

    from gymnasium.spaces import Discrete

    env = SimpleNamespace(
        agent_selection="a",
        action_space=lambda agent: Discrete(3, start=-1),
        last=lambda: ({"action_mask": mask}, 0.0, False, False, {}),
    )
    assert legal_actions(env) == legal


def test_one_seat_per_player(pettingzoo_game: PettingZooGame) -> None:
    class Crowd(pettingzoo_game("tictactoe-v3")):  # type: ignore[misc]
        seats = ("only",)

    with pytest.raises(EnvironmentDefinitionError, match="2 players"):
        play(Crowd, ["0"], data={"seed": 0})


# --- TextArena --------------------------------------------------------------------------------------------------------


@pytest.fixture
def textarena_game() -> Callable[[str], type[agentrl.TextArenaEnvironment]]:
    """A class for a game of two by its id."""
    textarena = pytest.importorskip("textarena", reason=INSTALL)

    def make(identifier: str) -> type[agentrl.TextArenaEnvironment]:
        class Arena(agentrl.TextArenaEnvironment):
            seats = ("first", "second")

            def make(self, task: Task) -> Any:
                return textarena.make(identifier)

        return Arena

    return make


TextArenaGame = Callable[[str], type[agentrl.TextArenaEnvironment]]


def test_a_text_game_tells_each_seat_what_is_new(textarena_game: TextArenaGame) -> None:
    moves = ["[0]", "[1]", "[3]", "[2]", "[6]"]
    played = play(textarena_game("TicTacToe-v0"), moves, data={"seed": 0}, max_context=1 << 16)
    assert rewards(played) == {"first": 1.0, "second": -1.0}
    start, after, _ = told(played, "first")
    assert start.startswith("[GAME] You are Player 0 in Tic Tac Toe.")
    assert "You are Player" not in after
    assert "[Player 1] [1]" in after
    assert "[Player 0] [0]" not in after


def test_cards_reach_only_their_player(textarena_game: TextArenaGame) -> None:
    played = play(textarena_game("KuhnPoker-v0"), ["[check]", "[check]"] * 3, data={"seed": 3}, max_context=1 << 16)
    cards = {seat: [text.split("Your card is: '")[1][0] for text in told(played, seat)] for seat in ("first", "second")}
    assert all(first != second for first, second in zip(cards["first"], cards["second"], strict=True))
    for seat, drawn in cards.items():
        assert all(f"card is: '{card}'" in text for card, text in zip(drawn, told(played, seat), strict=True))


def test_the_game_forgives_one_illegal_action(textarena_game: TextArenaGame) -> None:
    game = textarena_game("TicTacToe-v0")
    played = play(game, ["[0]", "[0]", "[1]", "[1]", "[9]"], data={"seed": 0}, max_context=1 << 16)
    assert rewards(played) == {"first": -2.0, "second": 1.0}
    assert "attempted an invalid move" in told(played, "second")[1]
    assert played.header.turns == 5


@pytest.mark.parametrize(
    "identifier",
    ["KuhnPoker-v0", *(pytest.param(game, marks=pytest.mark.exhaustive) for game in ("TicTacToe-v0", "PigDice-v0"))],
)
def test_text_games_resume_at_every_entry(textarena_game: TextArenaGame, identifier: str) -> None:
    report = agentrl.check_environment(textarena_game(identifier))
    assert report.passed, report.text


def test_the_random_policy_takes_actions_it_is_told_are_legal() -> None:
    class Told(agentrl.PettingZooEnvironment):
        def make(self, task: Task) -> Any:
            raise NotImplementedError

    says = random_policy(Told)
    chat_format = PlainChatFormat()
    told = f"{LEGAL_ACTIONS}5\nmoved\n{LEGAL_ACTIONS}red 7, wild\n"
    conversation = np.frombuffer(told.encode(), np.uint8).astype(np.int32)
    answers = []
    for seed in range(200):
        request = GenerateRequest(
            request_id="r", token_ids=conversation, sampling=SamplingParams(max_tokens=9), seed=seed
        )
        answers.append(chat_format.decode(list(says(request, "p", PolicyVersion("p", 0, 0))[:-1])))
    assert answers.count("red 7") > 50
    assert answers.count("wild") > 50
    assert "5" not in answers
