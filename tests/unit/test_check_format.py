"""The checker names an environment that rewards breaking the format, and counts what breaks it."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest

import agentrl
from agentrl.environment.environment import Split, TaskSource
from agentrl.testing.check import check_environment
from tests.support.checks import keep_checks
from tests.support.slow_episodes import make_slow

TASKS = [agentrl.Task(id=f"t{n}", data={"question": f"{n}?"}) for n in range(8)]


@pytest.fixture(autouse=True)
def _only_these_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_checks(monkeypatch, "tasks", "episodes", "rewards", "format")


class Lake(agentrl.Environment):
    """Three moves; most end in a hole. `broken` is what an illegal move gives."""

    broken = -1.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for _ in range(3):
            turn = await agent.act(agentrl.user("left or right?"))
            if turn.text not in ("left", "right"):
                ctx.metric("turns/illegal", 1)
                return agent.reward(self.broken)
            if ctx.rng.random() < 0.5:
                return agent.reward(-0.5)
        return agent.reward(1.0)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return TASKS


class PayingLake(Lake):
    """Falling into a hole is worse than saying nonsense: nobody will move."""

    broken = 0.25


class SlowLake(PayingLake):
    """Each episode takes a while, in seconds of an idle machine."""

    episode_s: ClassVar[float]
    now_s: ClassVar[float] = 0.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("agent").act(agentrl.user("left or right?"))
        is_legal = turn.text in ("left", "right")
        ctx.metric("turns/illegal", not is_legal)
        ctx.agent("agent").reward(-0.5 if is_legal else self.broken)
        SlowLake.now_s += self.episode_s


class Shop(agentrl.ToolEnvironment):
    """A wrong answer costs more than never answering."""

    wrong = -1.0

    @agentrl.tool
    def price(self, item: Literal["apple", "pear"]) -> int:
        """The price of an item."""
        return len(item)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0 if episode.truncated else 1.0 if episode.answer == "5" else self.wrong

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return TASKS


class FairShop(Shop):
    """Never answering costs as much as a wrong answer."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == "5")


class Fragile(Lake):
    """Fails on what it did not expect."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("agent").act(agentrl.user("a number?"))
        if turn.text.startswith("@"):
            raise ValueError("cannot parse")
        ctx.agent("agent").reward(1.0)


class Whisper(agentrl.Environment):
    """The listener wins with a text that stands in the speaker's, and so with an empty one."""

    seats = ("speaker", "listener")
    wins = staticmethod(lambda guess, said: guess in said)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        speaker, listener = map(ctx.agent, self.seats)
        said = (await speaker.act(agentrl.user("say left or right"))).text
        reward, is_legal = 0.0, said in ("left", "right")
        ctx.metric("turns/illegal", not is_legal)
        if is_legal:
            guess = (await listener.act(agentrl.user("left or right?"))).text
            ctx.metric("turns/illegal", guess not in ("left", "right"))
            reward = float(self.wins(guess, said))
        for agent in (speaker, listener):
            agent.reward(reward)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return TASKS


class SoundWhisper(Whisper):
    """Compares the whole text."""

    wins = staticmethod(lambda guess, said: guess == said)


def test_one_seat_breaks_the_format_while_the_others_play() -> None:
    """If all broke it at once, the speaker would end each episode before the listener speaks."""
    (finding,) = check_environment(Whisper).findings
    assert finding.startswith("breaking the format pays: a policy of seat 'listener' whose every turn says")
    assert "earns 1.000 on average" in finding
    assert check_environment(SoundWhisper).findings == []


def test_an_environment_that_pays_for_nonsense_is_named() -> None:
    (finding,) = check_environment(PayingLake).findings
    assert finding.startswith("breaking the format pays")
    assert "earns 0.250 on average" in finding
    assert check_environment(Lake).findings == []


@pytest.mark.parametrize(
    ("episode_s", "expected"),
    [
        (0.52, "breaking the format pays"),
        (2.0, "15 s of an idle machine: 51 of 56 episodes that compare unreadable with readable replies."),
    ],
)
def test_slow_episodes(monkeypatch: pytest.MonkeyPatch, episode_s: float, expected: str) -> None:
    make_slow(monkeypatch, SlowLake, episode_s)
    assert expected in check_environment(SlowLake).text


class GenerousShop(Shop):
    """Pays for every answer, and for none."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def test_a_reward_that_is_the_same_for_every_reply_is_a_warning() -> None:
    report = check_environment(GenerousShop)
    assert "WARNING every reply, also a broken one, earned 1.000, in " in report.text
    assert not [text for text in check_environment(FairShop).warnings if "every reply" in text]


def test_running_into_a_limit_must_not_pay_either() -> None:
    (finding,) = check_environment(Shop).findings
    assert "<tool_call>" in finding
    assert "truncated_reward" in finding
    assert check_environment(FairShop).findings == []


def test_an_environment_that_fails_on_nonsense_is_named() -> None:
    (finding,) = check_environment(Fragile).findings
    assert "when every turn says '@@ %% zz !!'" in finding
    assert "ValueError: cannot parse" in finding


class LacksAnswers(Lake):
    """Fails on a task, whatever the reply."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("a number?"))
        ctx.agent("agent").reward(1.0 if ctx.task.id in {task.id for task in TASKS[:4]} else ctx.task.data["answer"])


def test_a_task_on_which_every_reply_fails_is_named_without_a_reply() -> None:
    (finding,) = check_environment(LacksAnswers).findings
    assert finding.startswith(f"task {TASKS[4].id!r}: run() raised KeyError: 'answer'")


class LateDefinition(Lake):
    """Where it goes wrong depends on what the policy says, and only nonsense plays are far from it."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("agent").act(agentrl.user("left or right?"))
        ctx.agent("wrong_seat" if turn.text == "right" else "agent").reward(1.0)


def test_an_environment_that_fails_on_a_legal_action_is_named() -> None:
    (finding,) = check_environment(LateDefinition).findings
    assert "when every turn says 'right'" in finding
    assert "has no seat 'wrong_seat'" in finding
