"""Gymnasium games as environments, and a seat as a gymnasium game."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.records import Task
from agentrl.environment import gym
from agentrl.environment.containment import GlobalRandomState
from agentrl.environment.gym import SeededGame
from agentrl.testing.malformed_reply_check import GARBAGE
from tests.unit.episodes import play

Lake = agentrl.gym_environment(
    "Lake", lambda task: gymnasium.make("FrozenLake-v1", is_slippery=False), **gym.FROZEN_LAKE
)
Slippery = agentrl.gym_environment("Slippery", lambda task: gymnasium.make("FrozenLake-v1"), **gym.FROZEN_LAKE)
Cliff = agentrl.gym_environment("Cliff", lambda task: gymnasium.make("CliffWalking-v1"), **gym.CLIFF_WALKING)
Taxi = agentrl.gym_environment("Taxi", lambda task: gymnasium.make("Taxi-v4"), **gym.TAXI)
Blackjack = agentrl.gym_environment("Blackjack", lambda task: gymnasium.make("Blackjack-v1"), **gym.BLACKJACK)
WORDS = {
    Lake: ["left", "down", "right", "up"],
    Slippery: ["left", "down", "right", "up"],
    Cliff: ["up", "right", "down", "left"],
    Taxi: ["south", "north", "east", "west", "pickup", "dropoff"],
    Blackjack: ["stick", "hit"],
}
GAMES = list(WORDS)


def random_words(game: type[agentrl.GymEnvironment], seed: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(WORDS[game]) for _ in range(200)]


# --- playing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", GAMES)
def test_ready_pairs_play_to_the_end_with_random_legal_moves(game: type[agentrl.GymEnvironment]) -> None:
    for seed in range(12):
        played = play(game, random_words(game, seed), data={"seed": seed}, max_turns=200, max_context=1 << 20)
        assert played.header.stop_reason in ("completed", "max_turns"), played.said
        assert played.header.reward is not None
        assert played.header.reward > game.illegal_reward


@pytest.mark.parametrize("game", GAMES)
def test_words_do_what_the_game_does(game: type[agentrl.GymEnvironment]) -> None:
    direct = game().make(Task(id="t", data={"seed": 3}))
    direct.reset(seed=3)
    words, total, ended = random_words(game, 3), 0.0, False
    for word in words[: game.max_turns]:
        _, reward, terminated, truncated, _ = direct.step(WORDS[game].index(word))
        total += float(reward)
        ended = terminated or truncated
        if ended:
            break
    played = play(game, words, data={"seed": 3}, max_turns=200, max_context=1 << 20)
    assert played.header.reward == pytest.approx(total)
    assert (played.header.stop_reason == "completed") == (ended and terminated)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Box(-1.0, 1.0, (1,)), np.array([0.5]), np.array([0.5], np.float32)),
        (spaces.Box(-1.0, 1.0, (1,)), [0.25], np.array([0.25], np.float32)),
        (spaces.Box(-1.0, 1.0, (1,)), 0.1, np.array([0.1], np.float32)),
        (spaces.Box(-1.0, 1.0, (2,), np.float64), [1, -1], np.array([1.0, -1.0])),
        (spaces.Box(0, 255, (2,), np.uint8), [7, 255], np.array([7, 255], np.uint8)),
        (spaces.Box(0, 255, (2,), np.uint8), [7.0, 0.0], np.array([7, 0], np.uint8)),
        (spaces.Discrete(3, start=1), 3.0, 3),
        (spaces.Discrete(3), np.array([2]), 2),
        (spaces.Discrete(3), True, 1),
        (spaces.MultiDiscrete([3, 2]), [2.0, 1.0], np.array([2, 1])),
        (spaces.MultiBinary(2), [True, False], np.array([1, 0], np.int8)),
        (
            spaces.Dict({"move": spaces.Discrete(2), "force": spaces.Box(0.0, 1.0, (1,))}),
            {"move": 1.0, "force": [1]},
            {"move": 1, "force": np.array([1.0], np.float32)},
        ),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), [1.0, "ab"], (1, "ab")),
    ],
)
def test_an_action_gets_the_types_of_its_space(space: Any, action: Any, expected: Any) -> None:
    cast = gym.cast_action(space, action)
    assert space.contains(cast)
    np.testing.assert_equal(cast, expected)
    np.testing.assert_equal(gym.cast_action(space, cast), cast)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Box(0, 255, (1,), np.uint8), [256]),
        (spaces.Box(0, 255, (1,), np.uint8), [-1]),
        (spaces.Box(0, 255, (1,), np.uint8), [1.5]),
        (spaces.Box(-1.0, 1.0, (1,)), [1.5]),
        (spaces.Box(-1.0, 1.0, (1,)), [float("nan")]),
        (spaces.Box(-np.inf, np.inf, (1,)), [1e300]),
        (spaces.Box(-1.0, 1.0, (2,)), [0.5]),
        (spaces.Box(-1.0, 1.0, (2,)), 0.5),
        (spaces.Box(-1.0, 1.0, (1,)), "0.5"),
        (spaces.Box(-1.0, 1.0, (1,)), [[0.5, 0.1], [0.2]]),
        (spaces.Discrete(3), 1.5),
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), [0, 1]),
        (spaces.Discrete(3), "1"),
        (spaces.MultiDiscrete([3, 2]), [2, 0.5]),
        (spaces.MultiBinary(2), [0.5, 1]),
        (spaces.Dict({"move": spaces.Discrete(2)}), {"move": 1, "more": 1}),
        (spaces.Tuple([spaces.Discrete(2)]), [1, 1]),
    ],
)
def test_an_action_outside_its_space_stays_outside(space: Any, action: Any) -> None:
    cast = gym.cast_action(space, action)
    assert cast is None or not space.contains(cast)


def test_a_text_with_the_action_of_another_type_moves_the_car() -> None:
    class Car(agentrl.GymEnvironment):
        max_turns: ClassVar[int] = 3
        illegal_reward: ClassVar[float] = -100.0

        def make(self, task: Task) -> Any:
            return gymnasium.make("MountainCarContinuous-v0")

        def render(self, observation: Any, info: Any, env: Any) -> str:
            return str(observation.tolist())

        def parse(self, text: str, env: Any) -> Any:
            return [float(text)]

    direct = gymnasium.make("MountainCarContinuous-v0")
    direct.reset(seed=1)
    total = sum(float(direct.step(np.array([0.3], np.float32))[1]) for _ in range(3))
    played = play(Car, ["0.3"] * 3, data={"seed": 1})
    assert played.header.reward == pytest.approx(total)
    assert "turns/illegal" not in played.metrics


def opening(game: type[agentrl.GymEnvironment], seed: int) -> str:
    return SeededGame(game(), Task(id="t", data={"seed": seed})).reset()


def test_what_the_player_reads() -> None:
    assert opening(Lake, 0) == "@FFF\nFHFH\nFFFH\nHFFG"
    assert opening(Cliff, 0).splitlines() == ["............"] * 3 + ["@CCCCCCCCCCG"]
    assert "You hold" in opening(Blackjack, 0)
    taxi = opening(Taxi, 0)
    assert taxi.count("@") == 1
    assert "The passenger is at " in taxi


def test_the_start_is_the_seeds() -> None:
    for game in (Taxi, Blackjack):
        starts = [opening(game, seed) for seed in range(20)]
        assert starts == [opening(game, seed) for seed in range(20)]
        assert len(set(starts)) > 5


def test_held_out_seeds_are_never_training_seeds() -> None:
    held_out, training = Lake.tasks("held_out"), Lake.tasks("train", seed=7)
    hidden = {held_out[index].data["seed"] for index in range(len(held_out))}
    drawn = [training[index].data["seed"] for index in range(2000)]
    assert len(hidden) == 512
    assert hidden.isdisjoint(drawn)
    assert len(set(drawn)) == 2000
    assert drawn[:5] != [Lake.tasks("train", seed=8)[index].data["seed"] for index in range(5)]
    with pytest.raises(IndexError):
        held_out[512]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_illegal_action_ends_the_episode_below_every_legal_end() -> None:
    for reply in ("jump", "", "left right"):
        played = play(Lake, ["down", reply], data={"seed": 0})
        assert (played.header.reward, played.header.turns) == (-1.0, 2)
        assert played.header.stop_reason == "completed"


def test_illegal_actions_can_be_forgiven() -> None:
    class Patient(Lake):  # type: ignore[misc, valid-type]
        illegal_actions: ClassVar[int] = 2

    played = play(Patient, ["jump", "right", "jump"], data={"seed": 0})
    assert (played.header.reward, played.header.turns) == (-1.0, 3)
    assert play(Patient, ["jump", "right", "down"], data={"seed": 0}).header.reward == 0.0
    asked = [entry.messages[-1]["content"] for entry in played.entries if hasattr(entry, "messages")]
    assert asked[1] == "That is not a legal action.\n" + asked[0]


def test_illegal_actions_use_up_the_time() -> None:
    class Patient(Lake):  # type: ignore[misc, valid-type]
        illegal_actions: ClassVar[int] = 9
        max_turns: ClassVar[int] = 3

    played = play(Patient, ["jump"] * 9, data={"seed": 0}, max_turns=200, max_context=1 << 20)
    assert (played.header.stop_reason, played.header.turns) == ("max_turns", 3)


def test_an_action_outside_the_space_is_illegal() -> None:
    wide = agentrl.gym_environment(
        "wide",
        lambda task: gymnasium.make("FrozenLake-v1", is_slippery=False),
        render=lambda observation, info, env: str(observation),
        parse=lambda text, env: int(text),
    )
    assert play(wide, ["1", "4"], data={"seed": 0}).header.reward == -1.0


def test_a_legal_end_may_not_score_as_low_as_an_illegal_one() -> None:
    class Cheap(Cliff):  # type: ignore[misc, valid-type]
        illegal_reward: ClassVar[float] = -1.0

    with pytest.raises(EnvironmentDefinitionError, match=r"Cheap\.illegal_reward"):
        play(Cheap, ["right"], data={"seed": 0}, max_turns=1)


def test_limits_truncate() -> None:
    class Short(Cliff):  # type: ignore[misc, valid-type]
        max_turns: ClassVar[int] = 3

    of_its_own = play(Short, ["up"] * 9, data={"seed": 0}, max_turns=200, max_context=1 << 20)
    assert (of_its_own.header.stop_reason, of_its_own.header.reward) == ("max_turns", -3.0)
    of_the_run = play(Cliff, ["up"] * 9, data={"seed": 0}, max_turns=4)
    assert (of_the_run.header.stop_reason, of_the_run.header.reward) == ("max_turns", -4.0)

    class Hurried(Lake):  # type: ignore[misc, valid-type]
        def make(self, task: Task) -> Any:
            return gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=2)

    of_the_game = play(Hurried, ["left"] * 9, data={"seed": 0})
    assert (of_the_game.header.stop_reason, of_the_game.header.turns) == ("max_turns", 2)


def test_a_render_that_is_no_text_is_named() -> None:
    mute = agentrl.gym_environment(
        "mute",
        lambda task: gymnasium.make("FrozenLake-v1"),
        render=lambda observation, info, env: env.render(),  # type: ignore[return-value, arg-type]
        parse=gym.FROZEN_LAKE["parse"],
    )
    with pytest.warns(UserWarning, match="render"):
        played = play(mute, ["left"], data={"seed": 0})
    assert "render_mode='ansi'" in played.said


# --- durability -------------------------------------------------------------------------------------------------------


def with_words_of_the_checker(game: type[agentrl.GymEnvironment]) -> type[agentrl.GymEnvironment]:
    """The game, played by every text the checker's random policy says; its garbage stays illegal."""

    class Played(game):  # type: ignore[misc, valid-type]
        def parse(self, text: str, env: Any) -> int | None:
            return None if text in GARBAGE else sum(text.encode()) % int(env.action_space.n)

    return Played


@pytest.mark.parametrize(
    "game", [Slippery, *(pytest.param(game, marks=pytest.mark.exhaustive) for game in GAMES if game is not Slippery)]
)
def test_resumption_at_every_entry(game: type[agentrl.GymEnvironment]) -> None:
    for chosen in (game, with_words_of_the_checker(game)):
        report = agentrl.check_environment(chosen)
        assert report.passed, report.text
        assert report.figures["resumptions"] >= 4


class Dicey(gymnasium.Env[int, int]):
    """Draws from the global generators, as some games do."""

    observation_space = gymnasium.spaces.Discrete(1 << 20)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        shown = self._draw()
        return shown, 0.0, shown % 7 == 0, False, {}

    def _draw(self) -> int:
        np.random.randn()
        return int(np.random.randint(1 << 10)) * (1 << 10) + random.randrange(1 << 10)


Dice = agentrl.gym_environment(
    "Dice",
    lambda task: Dicey(),
    render=lambda observation, info, env: str(observation),
    parse=lambda text, env: len(text) % 2,
)


def test_games_that_draw_from_global_generators_resume_too() -> None:
    report = agentrl.check_environment(Dice)
    assert report.passed, report.text
    assert len({opening(Dice, seed) for seed in range(10)}) == 10


def draw(seed: int, between: Callable[[], object]) -> list[float]:
    random.seed(seed)
    np.random.seed(seed)
    drawn = []
    for _ in range(4):
        drawn += [random.random(), *np.random.randn(2)]  # a pair: a single second variate would be discarded
        between()
    return drawn


def test_the_global_generators_of_the_process_are_left_as_they_were() -> None:
    own = GlobalRandomState(5)

    def game_draws() -> None:
        with own.swapped_in():
            random.random()
            np.random.randn()

    python, numpy = random.getstate(), np.random.get_state()
    try:
        assert draw(1, lambda: None) == draw(1, game_draws)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# --- the names a class goes by ----------------------------------------------------------------------------------------


def test_a_class_made_from_functions_is_found_by_module_and_name() -> None:
    assert (Lake.__module__, Lake.__qualname__) == (__name__, "Lake")


class Walk(agentrl.GymEnvironment):
    """The three lines of a user."""

    def make(self, task: Task) -> Any:
        return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")

    def render(self, observation: Any, info: Mapping[str, Any], env: Any) -> str:
        return str(env.render())

    def parse(self, text: str, env: Any) -> int | None:
        return {"l": 0, "d": 1, "r": 2, "u": 3}.get(text)


def test_a_subclass_plays() -> None:
    assert play(Walk, list("ddrrdr"), data={"seed": 0}).header.reward == 1.0


def test_illegal_rewards_of_the_ready_games_are_below_their_worst() -> None:
    for game, per_step in ((gym.CLIFF_WALKING, -100.0), (gym.TAXI, -10.0)):
        assert game["illegal_reward"] < per_step * game["max_turns"]
