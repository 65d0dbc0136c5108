"""A reply that wins tasks with different answers is an alarm that names its episodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import agentrl
from agentrl.core.clock import LoopClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.observe.alarms import find_alarms
from agentrl.observe.bottleneck import MAX_WON, ActivityClock, winning_replies
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim


class Exact(agentrl.Environment):
    """One turn, compared with the answer."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Well?"))
        ctx.agent("guesser").reward(float(self.wins(turn.text, str(ctx.task.data.get("answer", "")))))

    def wins(self, text: str, answer: str) -> bool:
        return text == answer


class Anywhere(Exact):
    """The answer may stand anywhere in the reply."""

    def wins(self, text: str, answer: str) -> bool:
        return answer in text


class Tolerant(Exact):
    """A number near the answer wins."""

    def wins(self, text: str, answer: str) -> bool:
        return text.isdecimal() and abs(int(text) - int(answer)) < 100


class Shuffled(Exact):
    """The answer is one of the choices, which are shown in another order in each episode, and "B" may be any."""

    def wins(self, text: str, answer: str) -> bool:
        return text == "B"


class Reasoned(Exact):
    """The answer ends the reply."""

    def wins(self, text: str, answer: str) -> bool:
        return text.split()[-1] == answer


PREAMBLE = "I add 0 1 2 3 4 5 6 7 8 9 where they belong, step by step, and check: the answer is"


def says(text: str) -> Callable[[GenerateRequest, str, PolicyVersion], list[int]]:
    """A script that says a text, with `{}` as one of the ten answers."""
    return lambda request, policy, version: [*text.replace("{}", str(request.seed % 10)).encode(), STOP_TOKEN]


@pytest.mark.parametrize(
    ("environment", "text", "key", "alarmed"),
    [
        (Anywhere, "0 1 2 3 4 5 6 7 8 9", "answer", True),
        (Exact, "0 1 2 3 4 5 6 7 8 9", "answer", False),
        (Exact, "7", "answer", False),
        (Anywhere, "0 1 2 3 4 5 6 7 8 9", "question", False),
        (Reasoned, f"{PREAMBLE} {{}}", "answer", False),
        (Tolerant, "5", "answer", False),
        (Shuffled, "B", "answer", False),
        (Anywhere, "0123456789", "answer", False),
    ],
    ids=[
        *("a list wins", "a list wins nothing", "a right answer", "no answers are known"),
        *("replies begin alike", "answers within a tolerance", "shuffled choices", "digits of one number"),
    ],
)
def test_a_reply_that_wins_tasks_with_different_answers_is_an_alarm(
    simulated_loop: SeededSimulation, environment: type[Exact], text: str, key: str, alarmed: bool
) -> None:
    async def main() -> None:
        tasks = [Task(id=f"t{number}", data={key: str(number)}) for number in range(10)]
        config = config_for(steps=12, sampling={"max_tokens": 200})
        run = SmallRun(config=config, environment=environment, script=says(text), tasks=tasks)
        await run.run()
        state = RunState(plan=RunDisplaySettings(name="run"), status=run.orchestrator.status())
        alarms = [alarm for alarm in find_alarms(state) if alarm.name == "reward_template"]
        assert bool(alarms) == alarmed
        for alarm in alarms:
            assert f"the reply {text!r} contains the answers of 4 tasks and won each, in e" in alarm.text
            episodes = next(iter(state.status.winning_replies.values())).split() if state.status else []
            assert len(set(episodes)) == 4
            assert f"`agentrl episode show run {episodes[0]}`" in alarm.advice or episodes[0] in alarm.advice

    simulated_loop.run(main, seeds=1)


def test_replies_are_forgotten_before_they_take_memory(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        activity = ActivityClock(LoopClock())
        for number in range(4):
            activity.count_won("0 1 2 3", str(number), f"e{number}")
        for number in range(2 * MAX_WON):
            activity.count_won(f"reply {number}", str(number), f"e{number}")
        assert winning_replies(activity.totals()) == {"0 1 2 3": "e0 e1 e2 e3"}
        assert len(activity._won) == MAX_WON

    simulated_loop.run(main, seeds=1)
