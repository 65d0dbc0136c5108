"""What scoring costs while episodes run, and what becomes of scorers that fail or are killed.

    python -m benchmarks.scores [--quick] [--part PART]

* `overlap`: scripted policies with real waits play episodes of eight turns; a scorer takes as long as a turn. Three
  variants in turn: `none`, without scores; `pipelined`, `[scorers.slow]`; `inline`, the same wait in `ctx.effect`
  after each turn. `pipelined_over_none` and `inline_over_none` are seconds per step over those of `none`, from the
  third step on, medians over `--pairs`. `exposed_latency_error` compares the journal's `scores/exposed_s` with
  max(end of turn + score) − end of last turn, of the same journal, in a run whose scores take very different times;
  `exposed_latency_error_of_a_lockstep` is that of the formula in which each score may only overlap the next turn.
* `failures`: the bundled model is trained with a judge behind an HTTP endpoint that fails in 20 % of the requests,
  hangs in 1 %, and answers nonsense in 5 %. It never says 0. `zeros_from_failures` are committed episodes without a
  positive score. The negative control gives failed scores the value 0: `zeros_without_the_rule`.
* `replies`: the suite of judges' replies (`tests/judge_cases.py`). `judge_wrong_scores` are forms of replies that are
  read as another score than they state, and wrong scores of judges behind an endpoint that fails in 30 % of its answers
  in the ways of `FAILURES`. The negative control reads the last number: `judge_wrong_scores_of_the_last_number`.
* `agreement`: the bundled model is trained with two judges, of which one computes the sum, and the other answers by the
  length of the conversation: `good_judge_agreement` and `judge_agreement`, that of the planted bad judge, are the means
  over the steps of the metric `reward_agreement/NAME`, of which ½ is chance.
* `tokens`: episodes of eight turns are scored per turn by a small reward model in its process. `scorer_tokens_ratio` is
  the number of tokens that it computed, over that of the conversations; `scorer_tokens_ratio_without_cache` is that of
  a run in which it keeps nothing between turns. `reward_model_errors` are scores that differ from those of a whole
  forward pass over the recorded conversation by more than 1e-4.
* `kills`: a run with a slow scorer, a reward model and two worker processes. In turn, all its processes, a worker, or
  the engine's or the reward model's process are killed with SIGKILL. `scores_lost` are turns without a score,
  `scores_twice` entries that are there twice, `wrong_scores` differ from what the function or a whole forward pass says
  of the recorded turn, `ledger_errors` are what the second reader finds otherwise (`tests/journal_oracle.py`).
  `scores_again_per_kill` are requests of killed processes whose scores are not in the journal, per kill: they are asked
  for again. `scores_in_flight_per_kill` are those without an answer at the kill, and `scores_unwritten_per_kill` those
  whose answer had not reached the disk, at most `unwritten_age_s` old. `scores_after_kill_per_kill` were asked by
  workers that outlived their run, at most `outlived_s` after the kill: they end when the kernel has closed the killed
  process's connections. Each score's last digits name its request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.core.clock import LoopClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import ScoreEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.scoring import retrying as scorers
from agentrl.testing.recording_trainer import RecordingTrainer
from benchmarks.report import Report
from tests.journal_oracle import judge
from tests.judge_cases import FORMS, remote_verdicts
from tests.processes import descendants
from tests.support.chat_endpoint import ChatEndpoint, error, said, serving
from tests.support.reward_models import recomputed_scores, save_reward_model
from tests.support.score_functions import CALL

if TYPE_CHECKING:
    from aiohttp import web

NAMES = (
    *("pipelined_over_none", "inline_over_none", "exposed_latency_error", "exposed_latency_error_of_a_lockstep"),
    *("zeros_from_failures", "zeros_without_the_rule", "scorer_failures", "scorer_drops"),
    *("judge_wrong_scores", "judge_wrong_scores_of_the_last_number", "judge_reply_forms", "judge_remote_verdicts"),
    *("judge_remote_failures", "judge_remote_drops"),
    *("judge_agreement", "good_judge_agreement"),
    *("scorer_tokens_ratio", "scorer_tokens_ratio_without_cache", "reward_model_errors"),
    *("score_kills", "scorer_process_kills", "scores_lost", "scores_twice", "wrong_scores", "ledger_errors"),
    *("scores_again_per_kill", "scores_in_flight_per_kill", "scores_unwritten_per_kill", "unwritten_age_s"),
    *("scores_after_kill_per_kill", "outlived_s"),
)
TURNS, TURN_S, TOKENS = 8, 0.2, 8
TIMEOUT_S = 2.0
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


class TalkScored(Talk):
    """Gives no reward of its own."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Talk."""
        for number in range(TURNS):
            await ctx.agent("talker").act(agentrl.user(f"{number} + {number}"))


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

    async def engine(config: RunConfig, versions: Mapping[str, PolicyVersion], *rest: object) -> ScriptedEngine:
        return ScriptedEngine(_say, versions=versions, seconds_per_token=TURN_S / TOKENS)

    def trainer(config: RunConfig, *rest: Any) -> RecordingTrainer:
        return RecordingTrainer(
            list(config.trained), clock=LoopClock(), step_seconds=0.05, versions=rest[0] / "versions"
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
        scorers={"slow": {"function": f"{FUNCTIONS}:timed", "max_concurrent": 1000, "options": scored}}
        if scored
        else {},
    )
    watch = Watch()
    factories = RunFactories(engine=engine, trainer=trainer, chat_format=lambda config: PlainChatFormat())
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
workers = {workers}
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
CRITIC = """
[policies.critic]
kind = "remote"
url = "{url}"
model = "large"
timeout_s = {timeout_s}
[scorers.judged]
judge = "critic"
per = "episode"
rubric = "Is it right?"
answer = {{ wrong = 0.5, right = 1.0 }}
unscorable = 0.75
attempts = 1
cache = 0
"""
SLOW = """
[scorers.slow]
function = "{here}:timed"
options = {{ seconds = 0.5, log = "{log}" }}
"""


class BadEndpoint(ChatEndpoint):
    """An endpoint that fails in some of its answers."""

    def __init__(self) -> None:
        super().__init__(lambda body: said())
        self._rng = random.Random(0)
        self.failures = 0

    async def _chat(self, request: web.Request) -> web.Response:
        """Answer, hang, or fail."""
        draw = self._rng.random()
        self.failures += draw < 0.26
        if draw < 0.01:
            await asyncio.sleep(3 * TIMEOUT_S)
        if draw < 0.21:
            return error(503, "overloaded", "overloaded")
        if draw < 0.26:
            return said("0.0 nonsense")
        return said("right" if draw < 0.6 else "wrong")


def _zeros(run: Path) -> tuple[int, int]:
    """Return the number of scores of 0, or missing in committed episodes, and that of episodes dropped by a scorer."""
    reader, zeros, drops = RunReader(run), 0, 0
    for line in reader.episodes(limit=100_000):
        drops += line.drop_reason == "scorer_failed"
        if line.stop_reason is not None:
            scores = [body.value for _, body in reader.episode(line.episode).entries if isinstance(body, ScoreEntry)]
            zeros += len(scores) != 1 or not scores[0] > 0
    reader.close()
    return zeros, drops


def _zero_for_a_failure(score: Any) -> Any:
    """Return a scorer's method that gives 0 where it fails."""

    async def replaced(self: Any, request: Any) -> Any:
        try:
            return await score(self, request)
        except agentrl.AgentRLError:
            return scorers.Score(0.0)

    return replaced


def failures(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Train with a judge whose endpoint fails."""
    found = {}
    endpoint = BadEndpoint()
    original = scorers.RetryingScorer.score
    with serving(endpoint) as served:
        for rule in (True, False):
            scorers.RetryingScorer.score = original if rule else _zero_for_a_failure(original)  # type: ignore[method-assign]
            directory = root / f"rule_{rule}"
            directory.mkdir()
            toml = directory / "run.toml"
            toml.write_text(
                TOML.format(steps=2 if quick else 6, workers=1) + CRITIC.format(url=served.url, timeout_s=TIMEOUT_S)
            )
            try:
                agentrl.train(_loaded(toml, directory), quiet=True)
            finally:
                scorers.RetryingScorer.score = original  # type: ignore[method-assign]
            found[rule] = _zeros(directory / "run")
            print(f"zeros and drops {'with' if rule else 'without'} the rule: {found[rule]}", flush=True)
    return {
        "zeros_from_failures": float(found[True][0]),
        "scorer_drops": float(found[True][1]),
        "zeros_without_the_rule": float(found[False][0]),
        "scorer_failures": float(endpoint.failures),
    }


def replies(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Read every form of replies, and ask judges behind an endpoint that fails."""
    verdicts = remote_verdicts(300)
    wrong = [form for form in FORMS if form.read() != form.values]
    print(*wrong, verdicts, sep="\n", flush=True)
    return {
        "judge_wrong_scores": float(len(wrong) + verdicts.wrong),
        "judge_wrong_scores_of_the_last_number": float(
            sum(form.read_as_the_last_number() not in (None, form.values) for form in FORMS)
        ),
        "judge_reply_forms": float(len(FORMS)),
        "judge_remote_verdicts": float(verdicts.scores),
        "judge_remote_failures": float(verdicts.failures.total()),
        "judge_remote_drops": float(verdicts.dropped),
    }


JUDGE = """
[policies.{name}]
kind = "remote"
url = "{url}"
model = "{name}"
[scorers.{name}]
judge = "{name}"
per = "episode"
credit = "reward"
rubric = "Is the last answer right?"
answer = {{ wrong = 0.0, right = 1.0 }}
unscorable = 0.0
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
        judges = [JUDGE.format(name=name, url=served.url) for name in endpoint.models]
        text = TOML.format(steps=2 if quick else 8, workers=1) + "".join(judges)
        toml.write_text(text.replace("step_size = 32", "step_size = 128"))
        metrics = agentrl.train(_loaded(toml, root), quiet=True).metrics
    return {
        figure: statistics.fmean(step[f"reward_agreement/{name}"] for step in metrics)
        for figure, name in (("judge_agreement", "bad"), ("good_judge_agreement", "good"))
    }


PRM = """
[engine]
max_context = 512
[trainer]
micro_batch_tokens = 4096
[scorers.prm]
reward_model = "prm"
credit = "reward"
cache_tokens = {cache_tokens}
unscorable = 0.0
"""


def tokens(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Score conversations turn by turn with a reward model."""
    save_reward_model(root / "prm")
    ratios, wrong = {}, 0
    for cache_tokens in (32768, 0):
        directory = root / f"cache_{cache_tokens}"
        toml = root / f"{cache_tokens}.toml"
        text = TOML.format(steps=1 if quick else 4, workers=2).replace('id = "calculator"', f'id = "{HERE}:TalkScored"')
        toml.write_text(text + PRM.format(cache_tokens=cache_tokens))
        config = _loaded(toml, directory)
        agentrl.train(config, quiet=True)
        reader = RunReader(directory / "run")
        computed = whole = 0
        for line in reader.episodes("stop_reason = completed", limit=100_000):
            entries = dict(reader.episode(line.episode).entries)
            expected = recomputed_scores(entries, root / "prm", config.scorers["prm"])
            whole += max(length for _, length in expected.values())
            for name, (value, _) in expected.items():
                body = entries[name]
                computed += body.tokens if isinstance(body, ScoreEntry) else 0
                wrong += not isinstance(body, ScoreEntry) or value is None or abs(body.value - value) > 1e-4
        reader.close()
        ratios[cache_tokens] = computed / whole
        print(f"keeping {cache_tokens} tokens: {computed} computed for {whole}", flush=True)
    return {
        "scorer_tokens_ratio": ratios[32768],
        "scorer_tokens_ratio_without_cache": ratios[0],
        "reward_model_errors": float(wrong),
    }


def _loaded(toml: Path, directory: Path) -> RunConfig:
    from agentrl.config.load import load

    return load(toml, [f"directory={directory}"])


def kills(root: Path, *, quick: bool, pairs: int) -> dict[str, float | None]:
    """Kill the processes of a run with scorers, in turn, until it has ended."""
    rng, log, toml, errors = random.Random(1), root / "asked.log", root / "run.toml", root / "errors.log"
    save_reward_model(root / "prm")
    scorers_of_run = SLOW.format(here=FUNCTIONS, log=log) + PRM.format(cache_tokens=32768)
    toml.write_text(TOML.format(steps=16 if quick else 400, workers=2) + scorers_of_run)
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(toml), f"--directory={root}", "--resume"]
    killed, least = 0, 3 if quick else 50
    deaths: dict[int, float] = {}
    process: subprocess.Popen[bytes] | None = None
    while killed < least:
        if process is None:
            process = _started(command if (root / "run").is_dir() else command[:-1], errors)
        if not _plays(process, log, 30 if quick else 100):
            raise SystemExit(f"the run ended with {process.wait()} before it was killed {least} times")
        time.sleep(rng.uniform(0.2, 3.0))
        what = ("run", "worker", "model")[killed % 3]
        victims = _children(process.pid, {"worker": "worker_server", "model": "remote.server"}.get(what, ""))
        if not victims:
            continue
        chosen = [process.pid, *victims] if what == "run" else [rng.choice(victims)]
        deaths |= dict.fromkeys(chosen, time.time())
        if what == "run":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(chosen[0], signal.SIGKILL)
        if what == "run":
            process.wait()
            process = None
        killed += 1
        print(f"kill {killed}, {what}: {_steps(root / 'run')} steps", flush=True)
    if process is not None:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
    process = _started([*command, f"--steps={_steps(root / 'run') + 1}"], errors)
    if (code := process.wait()) != 0:
        raise SystemExit(f"the run ended with {code}")
    violations = judge(root / "run", ended=True)
    for violation in violations:
        print(violation, flush=True)
    lost, wrong, recorded = _checked_scores(root)
    fates = _fates(log, deaths, root / "run" / "journal")
    print(f"{recorded} scores of turns; requests: {fates.counts}", flush=True)
    twice = sum("there twice" in str(violation) for violation in violations)
    return {
        "score_kills": float(killed),
        "scorer_process_kills": float(errors.read_text().count("reward model prm's process died")),
        "scores_lost": float(lost),
        "scores_twice": float(twice),
        "wrong_scores": float(wrong),
        "ledger_errors": float(len(violations) - twice),
        "scores_again_per_kill": sum(fates.counts[fate] for fate in AGAIN) / killed,
        "scores_in_flight_per_kill": fates.counts["in flight"] / killed,
        "scores_unwritten_per_kill": fates.counts["unwritten"] / killed,
        "unwritten_age_s": fates.oldest_unwritten,
        "scores_after_kill_per_kill": fates.counts["after the kill"] / killed,
        "outlived_s": fates.outlived,
    }


def _started(command: Sequence[str], errors: Path) -> subprocess.Popen[bytes]:
    with errors.open("ab") as file:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)


def _children(process: int, module: str) -> list[int]:
    """Return the processes that a run has started and that run a module."""
    found = []
    for number in descendants(process):
        with contextlib.suppress(OSError):
            if module in Path(f"/proc/{number}/cmdline").read_text():
                found.append(number)
    return found


AGAIN = ("in flight", "unwritten", "after the kill")


class Fates(NamedTuple):
    """What became of the requests of the function."""

    counts: Counter[str]
    oldest_unwritten: float
    """Largest time between an answer that is not in the journal and the kill, in seconds."""
    outlived: float
    """Largest time between a kill and a later request of a killed run's process, in seconds."""


def _fates(log: Path, deaths: Mapping[int, float], journal: Path) -> Fates:
    """Compare the requests that the function logged with the scores in the journal."""
    times: dict[str, dict[int, tuple[int, float]]] = {"asked": {}, "done": {}}
    for line in log.read_text().splitlines():
        what, process, call, at = line.split()
        times[what][int(call)] = int(process), float(at)
    written = set()
    for partition in journal.glob("turns-*.db"):
        with contextlib.closing(sqlite3.connect(f"file:{partition}?mode=ro", uri=True)) as connection:
            for (body,) in connection.execute("SELECT body FROM entries WHERE call LIKE '%?slow'"):
                value = msgspec.msgpack.decode(body)[3]
                written.add(round((value - math.floor(value * 10 + 1e-3) / 10) / CALL))
    counts: Counter[str] = Counter()
    ages, outlived = [0.0], [0.0]
    for call, (process, asked) in times["asked"].items():
        done = times["done"].get(call, (process, math.inf))[1]
        death = deaths.get(process, math.inf)
        if call in written:
            counts["recorded"] += 1
        elif death == math.inf:
            counts["cut at the end of the run"] += 1
        elif asked > death:
            counts["after the kill"] += 1
            outlived.append(asked - death)
        else:
            counts["in flight" if done > death else "unwritten"] += 1
            ages += [] if done > death else [death - done]
    return Fates(counts, max(ages), max(outlived))


def _checked_scores(root: Path) -> tuple[int, int, int]:
    """Return the number of turns without a score, of wrong scores, and of recorded scores of the function."""
    lost = wrong = recorded = 0
    section = _loaded(root / "run.toml", root).scorers["prm"]
    reader = RunReader(root / "run")
    for line in reader.episodes(limit=1_000_000):
        entries = dict(reader.episode(line.episode, line.attempt).entries)
        expected = recomputed_scores(entries, root / "prm", section) if line.stop_reason is not None else {}
        for name, (value, _) in expected.items():
            body = entries.get(name)
            lost += body is None
            wrong += isinstance(body, ScoreEntry) and (value is None or abs(body.value - value) > 1e-3)
        for turn in [body for body in entries.values() if isinstance(body, TurnEntry)]:
            body = entries.get(f"{turn.seat}.{turn.index}.{turn.turn}?slow")
            recorded += body is not None
            lost += body is None and line.stop_reason is not None
            wrong += isinstance(body, ScoreEntry) and not 0 <= body.value - len(turn.token_ids) / 40 < 1e-4
    reader.close()
    return lost, wrong, recorded


def _plays(process: subprocess.Popen[bytes], log: Path, more: int) -> bool:
    """Wait until the run has asked for so many more scores; returns whether it did before it ended."""

    def asked() -> int:
        return log.read_text().count("asked") if log.exists() else 0

    enough = asked() + more
    while process.poll() is None and asked() < enough:
        time.sleep(0.2)
    return process.poll() is None


def _steps(run: Path) -> int:
    try:
        reader = RunReader(run)
        steps = reader.log.rows("SELECT coalesce(max(step), 0) FROM steps")[0][0]
        reader.close()
    except agentrl.AgentRLError:
        return 0
    return int(steps)


PARTS = {
    "overlap": overlap,
    "failures": failures,
    "replies": replies,
    "agreement": agreement,
    "tokens": tokens,
    "kills": kills,
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
