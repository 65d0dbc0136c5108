"""What scoring costs while episodes run.

    python -m benchmarks.scores [--quick] [--part PART]

* `overlap`: scripted policies with real waits play episodes of eight turns; a scorer takes as long as a turn. Three
  variants in turn: `none`, without scores; `pipelined`, `[scorers.slow]`; `inline`, the same wait in `ctx.effect`
  after each turn. `pipelined_over_none` and `inline_over_none` are seconds per step over those of `none`, from the
  third step on, medians over `--pairs`. `exposed_latency_error` compares the journal's `scores/exposed_s` with
  max(end of turn + score) − end of last turn, of the same journal, in a run whose scores take very different times;
  `exposed_latency_error_of_a_lockstep` is that of the formula in which each score may only overlap the next turn.
* `agreement`: the bundled model is trained with two judges, of which one computes the sum, and the other answers by the
  length of the conversation: `good_judge_agreement` and `judge_agreement`, that of the planted bad judge, are the means
  over the steps of the metric `reward_agreement/NAME`, of which ½ is chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.core.clock import LoopClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import ScoreEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from benchmarks.report import Report
from tests.support.chat_endpoint import ChatEndpoint, said, serving
from tests.support.recording_trainer import RecordingTrainer

if TYPE_CHECKING:
    from aiohttp import web

NAMES = (
    *("pipelined_over_none", "inline_over_none", "exposed_latency_error", "exposed_latency_error_of_a_lockstep"),
    *("judge_agreement", "good_judge_agreement"),
)
TURNS, TURN_S, TOKENS = 8, 0.2, 8
HERE = Path(__file__)
FUNCTIONS = HERE.parents[1] / "tests" / "support" / "score_functions.py"


class Talk(agentrl.Environment):
    """Eight turns, and a reward."""

    seats = ("talker",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Talk."""
        talker = ctx.agent("talker")
        for number in range(TURNS):
            await talker.act(agentrl.user(str(number)))
            await self.judge(ctx, number)
        talker.reward(1.0)

    async def judge(self, ctx: agentrl.EpisodeContext, number: int) -> None:
        """Leave the turn to scorers."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return tasks that differ in nothing."""
        return [Task(id=str(number), data={}) for number in range(64)]


class TalkInline(Talk):
    """Waits for the score of each turn before the next one."""

    async def judge(self, ctx: agentrl.EpisodeContext, number: int) -> None:
        """Wait."""

        async def wait() -> float:
            await asyncio.sleep(TURN_S)
            return 0.5

        ctx.agent("talker").reward(await ctx.effect(f"score {number}", wait, guarantee="read"), turn=number)


def _say(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*b"." * (TOKENS // 2 + request.seed % TOKENS), STOP_TOKEN]


class Watch:
    """Notes when steps are taken."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note the time."""
        self.at.append(time.monotonic())

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Do nothing."""

    @property
    def step_s(self) -> float:
        """Seconds per step, from the third step on."""
        return (self.at[-1] - self.at[2]) / (len(self.at) - 3)


def _scripted(directory: Path, environment: type[agentrl.Environment], steps: int, scored: dict[str, Any]) -> float:
    """Run with real waits; returns seconds per step."""

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> ScriptedEngine:
        return ScriptedEngine(_say, versions=versions, seconds_per_token=TURN_S / TOKENS)

    def trainer(plan: TrainerPlan, *rest: Any) -> RecordingTrainer:
        return RecordingTrainer(
            list(plan.policies), clock=LoopClock(), step_seconds=0.05, versions=rest[0] / "versions"
        )

    config = RunConfig(
        name="run",
        directory=str(directory),
        steps=steps,
        environment={"id": "unused"},
        model={"path": "unused"},
        policies={"talker": {"step_size": 16, "max_staleness": 1}},
        credit={"group_size": 4},
        trainer={"loss": {"normalizer": 64}},
        checkpoint={"every": 0, "versions": 0},
        evaluation={"tasks": 0},
        scorers={"slow": {"function": f"{FUNCTIONS}:timed", "options": scored}} if scored else {},
    )
    watch = Watch()
    factories = RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat())
    asyncio.run(run_training(config, environment, quiet=True, factories=factories, observers=[watch]))
    return watch.step_s


def _exposed(run: Path) -> tuple[float, float, float]:
    """Return the exposed seconds of a run's episodes: as measured, by the formula, and by that of a lockstep."""
    measured, formula, lockstep = 0.0, 0.0, 0.0
    reader = RunReader(run)
    for line in reader.episodes("stop_reason = completed", limit=100_000):
        (metrics,) = reader.log.rows("SELECT metrics FROM episodes WHERE episode = ?", line.episode)[0]
        measured += json.loads(metrics)["scores/exposed_s"]
        bodies = [body for _, body in reader.episode(line.episode).entries]
        ends = {body.turn: body.started + body.seconds for body in bodies if isinstance(body, TurnEntry)}
        seconds = {body.turn: body.seconds for body in bodies if isinstance(body, ScoreEntry)}
        last = max(ends)
        formula += max(ends[turn] + seconds[turn] for turn in ends) - ends[last]
        waits = (max(0.0, seconds[turn] - (ends[turn + 1] - ends[turn])) for turn in range(last))
        lockstep += sum(waits) + seconds[last]
    reader.close()
    return measured, formula, lockstep


def overlap(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Measure what the scores of a slow scorer add to a step."""
    steps = 6 if quick else 14
    found: dict[str, list[float]] = {"none": [], "pipelined": [], "inline": []}
    for pair in range(1 if quick else pairs):
        order = list(found) if pair % 2 == 0 else list(found)[::-1]
        for variant in order:
            scored = {"seconds": TURN_S} if variant == "pipelined" else {}
            environment = TalkInline if variant == "inline" else Talk
            found[variant].append(_scripted(root / f"{variant}{pair}", environment, steps, scored))
        print(
            f"pair {pair}: " + ", ".join(f"{name} {each[-1]:.3f} s a step" for name, each in found.items()), flush=True
        )
    _scripted(root / "spread", Talk, steps, {"seconds": TURN_S, "spread": True})
    measured, formula, lockstep = _exposed(root / "spread" / "run")
    print(
        f"exposed: measured {measured:.2f} s, by the formula {formula:.2f} s, by a lockstep {lockstep:.2f} s",
        flush=True,
    )

    def over_none(variant: str) -> float:
        return statistics.median(each / none for each, none in zip(found[variant], found["none"], strict=True))

    return {
        "pipelined_over_none": over_none("pipelined"),
        "inline_over_none": over_none("inline"),
        "exposed_latency_error": abs(measured / formula - 1),
        "exposed_latency_error_of_a_lockstep": abs(measured / lockstep - 1),
    }


TOML = """
name = "run"
steps = {steps}
[environment]
id = "calculator"
[model]
path = "agentrl.environments:calculator/model"
[policies.solver]
step_size = 32
max_staleness = 1
[credit]
group_size = 4
[sampling]
max_tokens = 32
[evaluation]
tasks = 0
[checkpoint]
every = 2
"""
JUDGE = """
[scorers.{name}]
function = "score.py:{name}"
per = "episode"
"""
SCORES = """
from agentrl_judges import Endpoint, judge

answer = {{"wrong": 0.0, "right": 1.0}}
good = judge("Is the last answer right?", Endpoint({url!r}, "good"), answer=answer)
bad = judge("Is the last answer right?", Endpoint({url!r}, "bad"), answer=answer)
"""


def _judged(body: Mapping[str, Any]) -> web.Response:
    """Answer as the good judge, which computes the sum, or as the bad one, to which long conversations are right."""
    question = body["messages"][-1]["content"]
    messages = [json.loads(line) for line in question.splitlines() if line.startswith("{")]
    if body["model"] == "bad":
        return said("right" if len(question) % 2 else "wrong")
    terms = re.findall(r"[-+]? ?\d+", messages[0]["content"].partition("problem:")[2])
    total = sum(int(term.replace(" ", "")) for term in terms)
    return said("right" if messages[-1]["content"].strip() == str(total) else "wrong")


def agreement(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Train with a good judge and a bad one."""
    endpoint = ChatEndpoint(_judged, models=("good", "bad"))
    with serving(endpoint) as served:
        toml = root / "run.toml"
        (root / "score.py").write_text(SCORES.format(url=served.url))
        text = TOML.format(steps=2 if quick else 8) + "".join(JUDGE.format(name=name) for name in endpoint.models)
        toml.write_text(text.replace("step_size = 32", "step_size = 128"))
        metrics = agentrl.train(_loaded(toml, root), quiet=True).metrics
    return {
        figure: statistics.fmean(step[f"reward_agreement/{name}"] for step in metrics)
        for figure, name in (("judge_agreement", "bad"), ("good_judge_agreement", "good"))
    }


def _loaded(toml: Path, directory: Path) -> RunConfig:
    from agentrl.config.load import load

    return load(toml, [f"directory={directory}"])


PARTS = {
    "overlap": overlap,
    "agreement": agreement,
}


def main() -> None:
    """Run the parts, and print the line."""
    parser = argparse.ArgumentParser(description="Scores while episodes run.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    report = Report("scores", quick=options.quick, repeats=options.pairs, compared_with="the same run without scores")
    report.figures = dict.fromkeys(NAMES)
    with tempfile.TemporaryDirectory() as directory:
        for name, part in PARTS.items():
            if options.part in (None, name):
                root = Path(directory) / name
                root.mkdir()
                report.figures |= part(root, quick=options.quick, pairs=options.pairs)
    report.print()


if __name__ == "__main__":
    main()
