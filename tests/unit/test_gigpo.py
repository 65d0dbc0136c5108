"""GiGPO: turns of a group that met the same state are compared, also in a run that lost its trainer."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agentrl_algorithms.advantages import gigpo
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.cli.main import main
from agentrl.cluster.worker_wire import EpisodeEnded, decode_episode_header, encode_episode_ended
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.core.errors import EnvironmentDefinitionError, InputError
from agentrl.core.ids import group_id_of
from agentrl.core.ports import Engine, GenerateRequest, Trainer
from agentrl.core.records import PolicyVersion
from agentrl.credit.estimators import make_advantage_estimator
from agentrl.credit.group import Group
from agentrl.credit.group_baselines import leave_one_out
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import TurnEntry, gigpo_state_hash
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.function_check import check_advantage
from tests.journal_oracle import judge
from tests.sim.small_run import TASKS, config_for
from tests.support.builders import make_episode_header, make_spec
from tests.support.recording_trainer import RecordingTrainer
from tests.unit.episodes import play
from tests.unit.test_supervisor import Lives, NoWaiting

A, B, C, D = b"a", b"b", b"c", b"d"


def test_turns_are_compared_as_in_the_paper() -> None:
    """By hand from Eq. 3, 6, 7 and 8, divided by 1 or by std (n - 1) + 1e-6, as verl-agent's `mean_norm` and
    `mean_std_norm`.
    """
    group = Group(
        rewards=(3.5, 2.0, 0.0),
        episodes=("e0", "e1", "e2"),
        turn_rewards=(((0, 2.0), (2, 0.5)), (), ()),
        turn_states=((A, B, A), (A, C), (A,)),
    )
    # The last turn of the first agent has .5 of its own and 1 for the episode: G = [2 + .25 · 1.5, .5 · 1.5, 1.5].
    of_episodes = [3.5 - 5.5 / 3, 2.0 - 5.5 / 3, 0.0 - 5.5 / 3]
    in_a = [2.375, 1.5, 1.0, 0.0]
    mean = sum(in_a) / 4
    found = gigpo(group, discount=0.5, step_weight=2.0)
    assert found[0] == pytest.approx(
        [of_episodes[0] + 2 * (2.375 - mean), of_episodes[0], of_episodes[0] + 2 * (1.5 - mean)]
    )
    assert found[1] == pytest.approx([of_episodes[1] + 2 * (1.0 - mean), of_episodes[1]])
    assert found[2] == pytest.approx([of_episodes[2] + 2 * (0.0 - mean)])
    scale, scale_a = statistics.stdev((3.5, 2.0, 0.0)) + 1e-6, statistics.stdev(in_a) + 1e-6
    scaled = gigpo(group, discount=0.5, step_weight=2.0, divide_by_std=True)
    assert scaled[0][0] == pytest.approx(of_episodes[0] / scale + 2 * (2.375 - mean) / scale_a)
    assert scaled[0][1] == pytest.approx(of_episodes[0] / scale)
    assert scaled[2] == pytest.approx([of_episodes[2] / scale + 2 * (0.0 - mean) / scale_a])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-4, 4),
            st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(-4, 4)), min_size=1, max_size=5),
        ),
        min_size=2,
        max_size=5,
    ),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 1.0, 3.0]),
)
def test_it_is_the_naive_loop(
    played: list[tuple[int, list[tuple[bytes, int]]]], discount: float, weight: float
) -> None:
    group = Group(
        rewards=tuple(float(own + sum(paid for _, paid in turns)) for own, turns in played),
        episodes=tuple(f"e{at}" for at in range(len(played))),
        turn_rewards=tuple(tuple((t, float(paid)) for t, (_, paid) in enumerate(turns)) for _, turns in played),
        turn_states=tuple(tuple(state for state, _ in turns) for _, turns in played),
    )
    returns = []
    for own, turns in played:
        rewards = [paid for _, paid in turns]
        rewards[-1] += own
        returns.append([sum(discount ** (k - t) * rewards[k] for k in range(t, len(turns))) for t in range(len(turns))])
    whole = [own + sum(paid for _, paid in turns) for own, turns in played]
    found = gigpo(group, discount=discount, step_weight=weight)
    for i, (_, turns) in enumerate(played):
        assert len(found[i]) == len(turns)
        for t, (state, _) in enumerate(turns):
            same = [
                returns[j][k] for j, (_, others) in enumerate(played) for k, (s, _) in enumerate(others) if s == state
            ]
            expected = whole[i] - sum(whole) / len(whole) + weight * (returns[i][t] - sum(same) / len(same))
            assert found[i][t] == pytest.approx(expected, abs=1e-9)


def test_without_states_it_is_the_mean_of_the_group() -> None:
    """As after a resume that changed the advantage: the episodes played before have no states."""
    group = Group(rewards=(1.0, 0.0), episodes=("a", "b"), turn_states=((), (A, A)))
    assert gigpo(group, discount=1.0) == [[0.5], [-0.5, -0.5]]
    assert gigpo(replace(group, turn_states=())) == [[0.5], [-0.5]]


def test_a_discount_of_none_is_refused_by_name() -> None:
    estimator = make_advantage_estimator("gigpo", {"discount": 1.5})
    with pytest.raises(InputError, match="discount"):
        estimator(Group(rewards=(1.0, 0.0), episodes=("a", "b")))


@pytest.mark.parametrize(
    ("credit", "reason"),
    [
        ({"release": "late"}, "baseline"),
        ({"release": "episode"}, "baseline"),
    ],
)
def test_what_breaks_a_promise_is_refused(credit: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        config_for(credit={"group_size": 4, "advantage": "gigpo", **credit})


def test_the_check_passes() -> None:
    assert not check_advantage("gigpo").findings


ROOMS, RIGHT = 5, 0.55
"""Rooms of a corridor, and how often a policy that is the same in each goes right."""


def walked(rng: random.Random) -> tuple[list[tuple[int, bool]], float]:
    """Rooms and moves of an episode, which has 20 turns to leave on the right, and its reward."""
    moves: list[tuple[int, bool]] = []
    room = 0
    while room < ROOMS and len(moves) < 20:
        right = rng.random() < RIGHT
        moves.append((room, right))
        room = max(0, room + (1 if right else -1))
    return moves, float(room == ROOMS)


def gradient(group: Group, moves: list[list[tuple[int, bool]]], credit: list[list[float]]) -> list[float]:
    """The policy gradient of a group, by room."""
    by_room = [0.0] * ROOMS
    for own, steps in zip(credit, moves, strict=True):
        for turn, (room, right) in enumerate(steps):
            by_room[room] += own[min(turn, len(own) - 1)] * ((1.0 - RIGHT) if right else -RIGHT) / len(group.rewards)
    return by_room


def _dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def test_its_gradient_has_less_noise_in_nearly_the_same_direction() -> None:
    """Over 1,500 groups of 8 in a corridor, against leave-one-out, whose gradient is unbiased."""
    rng = random.Random(0)
    found: dict[str, list[list[float]]] = {"gigpo": [], "leave_one_out": []}
    for _ in range(1500):
        played = [walked(rng) for _ in range(8)]
        moves = [steps for steps, _ in played]
        group = Group(
            rewards=tuple(reward for _, reward in played),
            episodes=tuple(f"e{at}" for at in range(8)),
            turn_states=tuple(tuple(bytes([room]) for room, _ in steps) for steps in moves),
        )
        found["gigpo"].append(gradient(group, moves, gigpo(group)))
        whole = [[own.value] for own in leave_one_out(group.rewards)]
        found["leave_one_out"].append(gradient(group, moves, whole))
    means = {name: [statistics.fmean(column) for column in zip(*each, strict=True)] for name, each in found.items()}
    noise = {name: sum(map(statistics.pvariance, zip(*each, strict=True))) for name, each in found.items()}
    signal = {name: _dot(mean, mean) / noise[name] for name, mean in means.items()}
    assert signal["gigpo"] > 1.4 * signal["leave_one_out"]
    cosine = _dot(means["gigpo"], means["leave_one_out"]) / math.prod(math.sqrt(_dot(m, m)) for m in means.values())
    assert cosine > 0.995


class Corridor(agentrl.Environment):
    """Walk to the end of a corridor; what is said names the turn, so that only the state is equal between episodes."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        walker, place = ctx.agent("guesser"), 0
        for step in range(6):
            turn = await walker.act(agentrl.user(f"Turn {step}."), state=f"at {place}")
            place = max(0, place + (1 if int(turn.text[-1:]) % 2 else -1))
            if place == 2:
                walker.reward(1.0)
                return
        walker.reward(0.0)


class Wander(Corridor):
    """A walk whose state is the way taken so far, which two episodes share for their first turns at most."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        walker, way = ctx.agent("guesser"), ""
        for _ in range(3):
            way += (await walker.act(agentrl.user("On."), state=f"after {way}")).text[-1:]
        walker.reward(float(way > "5"))


def walk(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [ord(str(request.seed % 10)), STOP_TOKEN]


def train(directory: Path, environment: type[agentrl.Environment] = Corridor, **changes: Any) -> Path:
    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(walk, versions=versions)

    def trainer(plan: TrainerPlan, *rest: Any) -> Trainer:
        return RecordingTrainer(list(plan.policies), versions=rest[0] / "versions")

    config = config_for(name="run", directory=str(directory), **changes)
    factories = RunFactories(
        engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat(), clock=NoWaiting()
    )
    asyncio.run(run_training(config, environment, tasks=TASKS, quiet=True, factories=factories))
    return directory / "run"


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run / "journal" / "control.db")
    found = connection.execute(query).fetchall()
    connection.close()
    return found


def test_the_state_that_the_program_says_is_compared(tmp_path: Path) -> None:
    run = train(tmp_path, credit={"group_size": 4, "advantage": {"name": "gigpo", "discount": 0.5}})
    assert judge(run, ended=True) == []
    states = {
        blob[at : at + 8]
        for (blob,) in rows(run, "SELECT turn_states FROM trajectories")
        for at in range(0, len(blob), 8)
    }
    assert states == {gigpo_state_hash(f"at {place}", ()) for place in (0, 1)}
    apart = [json.loads(text) for (text,) in rows(run, "SELECT turn_advantages FROM step_units")]
    assert any(len({round(value, 9) for value in turns}) > 1 for turns in apart), "turns have credit of their own"


def test_the_share_of_turns_in_a_repeated_state_is_a_metric(tmp_path: Path) -> None:
    """Counted again from the journal; a synchronous step trains the groups that ended during it."""
    run = train(tmp_path, Wander, steps=3, max_staleness=0, credit={"group_size": 4, "advantage": "gigpo"})
    shown = {
        line["step"]: line["advantage/repeated_state_share"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["step"]
    }
    met: dict[int, Counter[tuple[str, bytes]]] = {1: Counter(), 2: Counter(), 3: Counter()}
    query = "SELECT step, episode, turn_states FROM step_units JOIN trajectories USING (episode)"
    for step, episode, blob in rows(run, query):
        met[step].update((group_id_of(episode, 4), blob[at : at + 8]) for at in range(0, len(blob), 8))
    expected = {step: sum(n for n in states.values() if n > 1) / states.total() for step, states in met.items()}
    assert shown == pytest.approx(expected)
    assert any(0.0 < share < 1.0 for share in expected.values())


def test_states_and_advantages_of_turns_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, steps=1, credit={"group_size": 4, "advantage": "gigpo"})
    ((episode, text),) = rows(run, "SELECT episode, turn_advantages FROM step_units ORDER BY position LIMIT 1")
    assert main(["episode", "show", str(run), episode]) == 0
    assert "  state\n    at 0\n" in capsys.readouterr().out
    assert main(["episode", "why", str(run), episode]) == 0
    shown = ", ".join(f"{value:.3g}" for value in json.loads(text))
    assert f"; by turn {shown}" in " ".join(capsys.readouterr().out.split())
    with agentrl.open_run(run) as opened:
        (credit,) = opened.episode(episode).agents[0].credits
    assert credit.turn_advantages == list(enumerate(json.loads(text)))


def test_other_advantages_keep_no_states(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert rows(run, "SELECT DISTINCT turn_states FROM trajectories") == [(None,)]
    assert judge(run, ended=True) == []


def test_a_run_that_lost_its_trainer_gives_the_same_credit(tmp_path: Path) -> None:
    """The second reader computes every advantage of both lineages again, from entries alone."""
    lives = Lives(losses=[3])
    lives.run(tmp_path, advantage="gigpo")
    assert len(lives.trainers) == 2
    assert judge(tmp_path / "run", ended=True) == []
    taken = {
        lineage: [
            json.loads(text)
            for (text,) in rows(tmp_path / "run", f"SELECT turn_advantages FROM step_units WHERE lineage = {lineage}")
        ]
        for lineage in (0, 1)
    }
    for turns_of_units in taken.values():
        assert any(len(set(turns)) > 1 for turns in turns_of_units)


@pytest.mark.damages_journal
def test_an_altered_state_is_named(tmp_path: Path) -> None:
    run = train(tmp_path, steps=1, credit={"group_size": 4, "advantage": "gigpo"})
    connection = sqlite3.connect(run / "journal" / "control.db")
    with connection:
        connection.execute("UPDATE trajectories SET turn_states = zeroblob(length(turn_states))")
    connection.close()
    said = " ".join(judge(run, ended=True))
    assert "checksum" in said
    assert "states 00" in said


def test_the_states_of_an_episode_come_back_from_a_worker() -> None:
    spec = make_spec("e0")
    plain = make_episode_header(spec)
    header = replace(plain, trajectories=(replace(plain.trajectories[0], turn_states=bytes(range(24))),))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_episode_ended(1, header)), type=EpisodeEnded)
    assert header.location is not None
    found = decode_episode_header(spec, sent, header.location.partition)
    assert found == header
    assert found.trajectories[0].states == (bytes(range(8)), bytes(range(8, 16)), bytes(range(16, 24)))


def test_without_a_state_it_is_what_the_environment_said() -> None:
    """A way back to the start is the start, although only the first turn has the instructions."""
    first = gigpo_state_hash(None, [agentrl.system("Walk."), agentrl.user("a room")])
    assert first == gigpo_state_hash(None, [agentrl.user("a room")])
    assert first != gigpo_state_hash(None, [agentrl.user("a room"), agentrl.user("")])
    assert first != gigpo_state_hash("a room", [agentrl.user("a room")])


def test_a_tool_environment_says_its_state() -> None:
    class Doors(agentrl.ToolEnvironment):
        opened = 0

        def anchor_state(self) -> str:
            return f"{self.opened} open"

        @agentrl.tool
        def open_door(self) -> str:
            """Open a door."""
            self.opened += 1
            return "It opens."

        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return float(self.opened)

    call = '<tool_call>{"name": "open_door", "arguments": {}}</tool_call>'
    played = play(Doors, [call, call, "done"])
    states = [entry.state for entry in played.entries if isinstance(entry, TurnEntry)]
    assert states == ["0 open", "1 open", "2 open"]


def test_a_state_is_text_and_stands_in_the_entry() -> None:
    class Says(agentrl.Environment):
        seats = ("player",)
        state: Any = "board\ud800"

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            await ctx.agent("player").act(agentrl.user("Your move."), state=self.state)

    played = play(Says, ["x"])
    assert [entry.state for entry in played.entries if isinstance(entry, TurnEntry)] == ["board?"]
    Says.state = 7
    with pytest.raises(EnvironmentDefinitionError, match="state"):
        play(Says, ["x"])
