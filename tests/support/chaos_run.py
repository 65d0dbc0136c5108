"""One life of a chaos run: `python -m tests.support.chaos_run KIND DIRECTORY SEED STEPS [resume]`.

A whole run as `agentrl.train` makes it. `scripted`: the scripted engine and a trainer that digests, each in a process
of its own, playing a game with child episodes and two policies. `real`: the calculator, the tiny model, the embedded
engine in a process of its own, Ray. Small real runs that start fast and take many steps: `one` has one policy,
`workers` two worker processes, `two` two policies and child episodes, `ray` all of its processes under Ray, `cluster`
three workers, two engines and two ranks on the nodes of a cluster, `trees` branches, scores, and tools in sandboxes,
`outside` an external agent, `selected` dynamic sampling, selected tasks and a reference. Two ranks train a mixture of
experts and replay its routing: `experts` adapters, deterministic; `admission` all weights, with two engines and
`max_in_flight = "auto"`. What is acknowledged is appended to `acknowledged.jsonl` beside the run, after the
acknowledgement, for an oracle that trusts nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.config.sections import ModelConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, TrainerLostError
from agentrl.core.ports import ChatFormat, Engine, GenerateRequest
from agentrl.core.records import PolicyVersion, StepReport, Task, TrainBatch, WeightsRef
from agentrl.engines.process import ChildProgram, LocalPlacement
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environments.calculator import Calculator
from agentrl.journal.port import ControlRecord, VersionPublication
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.checkpoints import CheckpointWriter
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.killed_runs import PROPOSE_AND_SOLVE

ROOT = Path(__file__).parents[2]
POLICIES = ["asker", "solver"]


class Guess(agentrl.Environment):
    """Guess a digit in up to three turns."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        message = agentrl.user("Guess a digit.")
        for _ in range(3):
            turn = await solver.act(message)
            await ctx.sleep(0.05 * ctx.rng.random())
            if turn.text.strip(".") == ctx.task.data["digit"]:
                return solver.reward(1.0)
            message = agentrl.user("no")
        return solver.reward(0.0)


class Ask(agentrl.Environment):
    """Name a digit; two children guess it."""

    seats = ("asker",)
    fan_out = {"Guess": 2}  # noqa: RUF012 (declared, never changed)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        asker = ctx.agent("asker")
        turn = await asker.act(agentrl.user("Name a digit."))
        noted = await ctx.effect("note", lambda: turn.text.strip("."))
        children = await ctx.gather(*ctx.spawn(Guess, {"digit": noted}, n=2))
        await asker.act(agentrl.user(f"{[child.reward for child in children]}"))
        asker.reward(float(sum(child.reward or 0.0 for child in children)))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [Task(id=f"task-{number}", data={}) for number in range(16)]


class BoxedTree(Calculator):
    """The calculator with two branches after its first result; its operations are commands in a sandbox that keep a
    list of their results, which the reward counts."""

    branches = 2
    sandbox = agentrl.Sandbox(disk_mb=4, memory_mb=64, seconds=30)

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.branches_left() == self.branches:
            await ctx.branch(self.branches)

    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        ran = await self.box.run(["sh", "-c", f"echo $(({a} {op} {b})) | tee -a results"])
        return int(ran.output)

    async def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:  # type: ignore[override]
        async with self.box.copy() as judge:
            counted = await judge.run(["sh", "-c", "cat results 2>/dev/null | wc -l"])
        answers = [message for message in episode.messages if message.role == "tool"]
        right = sum(not message.content.startswith("error") for message in answers)
        if int(counted.output) != right:
            raise agentrl.AgentRLError(f"{counted.output.strip()} results are in the sandbox, and {right} were seen")
        return super().reward(task, episode)


def scripted(versions: Mapping[str, PolicyVersion]) -> ScriptedEngine:
    """The engine of the scripted runs, at four milliseconds a token."""

    def digit(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return [*b"......"[: request.seed % 7], ord(str(request.seed // 7 % 10)), STOP_TOKEN]

    return ScriptedEngine(digit, versions=versions, seconds_per_token=0.004)


class PipeTrainer:
    """`tests.support.chaos_trainer`, as the port."""

    def __init__(self, plan: TrainerPlan, directory: Path) -> None:
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._one_at_a_time:
            try:
                process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
                return json.loads(answer)
            except (ConnectionError, ValueError) as error:
                raise TrainerLostError(f"the trainer died in {method}") from error

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        command = ["-m", "tests.support.chaos_trainer", str(os.getpid()), str(self._directory), *POLICIES]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=1 << 26
        )
        await self._ask("start", resume_from)
        return ()

    async def forward_backward(self, batch: TrainBatch) -> None:
        units = [[unit.episode_id, unit.attempt] for unit in batch.units]
        await self._ask("forward_backward", batch.policy, batch.step_id, units)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        answer = await self._ask("optim_step", policy, step_id)
        return StepReport(
            step_id=step_id,
            policy=policy,
            started_from=PolicyVersion(*answer["started_from"]),
            loss=0.0,
            grad_norm=0.0,
            samples=answer["samples"],
            tokens=0,
            seconds=0.01,
            metrics={},
            input_digest=answer["digest"],
        )

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        answer = await self._ask("publish", policy, version)
        return WeightsRef(version=version, path=answer["path"], kind="full", sha256=answer["sha256"])

    async def save(self, directory: str) -> None:
        await self._ask("save", directory)

    async def close(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()


def acknowledging(file: Path) -> None:
    """Append to `file` whatever this process is promised to be on disk, once it is."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*what: Any) -> None:
        os.write(descriptor, (json.dumps(what) + "\n").encode())

    commit, write, record = SqliteJournal.commit, CheckpointWriter.write, SqliteJournal.record

    async def commit_and_say(self: Any, end: Any) -> None:
        await commit(self, end)
        if end.spec.purpose == "train":
            say("commit", end.header.episode_id, end.header.attempt, end.header.drop_reason)

    async def write_checkpoint(self: Any, *arguments: Any) -> Path:
        path = await write(self, *arguments)
        say("checkpoint", path.name)
        return path

    def record_and_say(self: Any, *records: ControlRecord) -> None:
        for each in records:
            if isinstance(each, VersionPublication):
                say("version", *each.weights.version, each.weights.sha256)
        record(self, *records)

    SqliteJournal.commit = commit_and_say  # type: ignore[method-assign]
    SqliteJournal.record = record_and_say  # type: ignore[method-assign]
    CheckpointWriter.write = write_checkpoint  # type: ignore[method-assign]


class Hurried(SystemClock):
    """Waits a tenth of the time between attempts: chaos is in a hurry."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 10 if seconds >= 1 else seconds)


async def scripted_engine(
    plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path
) -> Engine:
    program = ChildProgram("tests.support.chaos_run:scripted", {})
    placement = LocalPlacement(log)
    return await ProcessEngine(
        program,
        versions,
        placement=placement,
        silence_s=float(os.environ.get("CHAOS_SILENCE_S", "300")),
        clock=Hurried(),
        tell=tell,
    ).ready()


def scripted_format(model: ModelConfig) -> ChatFormat:
    return PlainChatFormat()


def scripted_config(directory: str, seed: int, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "directory": directory,
            "seed": seed,
            "steps": steps,
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {
                "asker": {"step_size": 8, "max_staleness": 1},
                "solver": {"step_size": 16, "max_staleness": 1},
            },
            "credit": {"group_size": 4},
            "checkpoint": {"every": 2},
            "evaluation": {"tasks": 0},
            "journal": {"keep": 2},
        }
    )


STOPPED = 130
"""Exit code of a run that ended by a signal that asks it to stop."""
TOOL_USE = ROOT / "examples" / "01_tool_use.toml"
SMALL = ["credit.group_size=4", "policies.solver.step_size=8"]
TWO_WORKERS = ["workers=2", "max_in_flight=24"]
TWO_POLICIES = [
    *("deterministic=false", "engine.refresh=token", "engine.max_context=256"),
    *("credit.group_size=2", "policies.proposer.step_size=2", "policies.solver.step_size=16"),
]
MIXTURE = [
    *(*SMALL, "workers=2", "trainer.ranks=2", "trainer.sharding=full", "trainer.recompute=true"),
    *("environment.id=tests.learning.test_other_models:Patient", "sampling.max_tokens=12", "engine.max_context=512"),
    *("engine.capture_routing=true", "policies.solver.learning_rate=0.003"),
]
"""Settings of runs that train a mixture of experts, random at first, on two ranks."""
MIXTURES = ("experts", "admission")
ROUNDED = ["model.dtype=bfloat16", "policies.solver.max_staleness=0"]
REAL: Mapping[str, list[str]] = {
    "real": ["policies.solver.step_size=32", "cluster.address=local"],
    "one": [*SMALL, "max_in_flight=16"],
    "workers": [*SMALL, *TWO_WORKERS],
    "two": [*SMALL, *TWO_WORKERS, *TWO_POLICIES],
    "ray": [*SMALL, *TWO_WORKERS, "cluster.address=local"],
    "cluster": [
        *(*SMALL, "max_in_flight=24", "workers=3", "trainer.ranks=2"),
        *("engine.replicas=2", "cluster.address=auto"),
    ],
    "selected": [
        *(*SMALL, *TWO_WORKERS, "credit.dynamic_sampling=true", "environment.selection={ retire_after = 1 }"),
        *("policies.solver.reference=agentrl.environments:calculator/model", "trainer.loss.kl=0.01"),
    ],
    "trees": [
        *(*SMALL, *TWO_WORKERS, "environment.id=tests.support.chaos_run:BoxedTree"),
        *("policies.solver.lora={ rank = 4 }", "policies.solver.max_staleness=2", "policies.solver.step_size=12"),
        f'scorers.slow={{ function = "{ROOT}/tests/support/score_functions.py:slow", options = {{ seconds = 0.1 }} }}',
    ],
    "experts": [
        *(*MIXTURE, "deterministic=true", "engine.refresh=episode"),
        "policies.solver.lora={ rank = 4 }",
    ],
    "admission": [
        *(*MIXTURE, *ROUNDED, "engine.replicas=2", "max_in_flight=auto"),
    ],
    "outside": [
        *(*SMALL, *TWO_WORKERS, "environment.id=benchmarks.oracle_outside:Asking", "engine.max_context=256"),
        *("engine.slots=24", "sampling.max_tokens=8"),
    ],
}
"""By kind, how the configuration differs from the first example's; `two`: from `PROPOSE_AND_SOLVE`."""


def real_config(kind: str, directory: str, seed: int, steps: int) -> RunConfig:
    from agentrl.config.load import load

    overrides = [
        "name=run",
        f"directory={directory}",
        f"seed={seed}",
        f"steps={steps}",
        "engine.replicas=1",
        "checkpoint.every=2",
        "evaluation.tasks=0",
    ]
    file = TOOL_USE
    if kind == "two":
        file = Path(directory) / "propose_and_solve.toml"
        file.write_text(PROPOSE_AND_SOLVE)
    elif kind in MIXTURES:
        overrides.append(f"model.path={_random_mixture(Path(directory))}")
    return load(file, [*overrides, *REAL[kind]])


def _random_mixture(directory: Path) -> Path:
    """Write a random mixture of experts into a directory unless it is there."""
    from tests.learning.test_other_models import random_model

    model, partial = directory / "model", directory / "partial_model"
    if not model.exists():
        shutil.rmtree(partial, ignore_errors=True)
        random_model("qwen3_moe", ROOT / "environments/calculator/model", partial).rename(model)
    return model


def main() -> int:
    kind, directory, seed, steps, *resume = sys.argv[1:]
    os.environ["ASKING_LOG"] = str(Path(directory) / "replies.jsonl")  # of `outside`; an id is of one run
    acknowledging(Path(directory) / "acknowledged.jsonl")
    environment: type[agentrl.Environment]
    if kind == "scripted":
        environment, config = Ask, scripted_config(directory, int(seed), int(steps))
        factories = RunFactories(
            engine=scripted_engine, trainer=PipeTrainer, chat_format=scripted_format, clock=Hurried()
        )
    else:
        from agentrl.environment.registry import resolve

        config = real_config(kind, directory, int(seed), int(steps))
        environment, factories = resolve(config.environment.id), RunFactories(clock=Hurried())
    try:
        run = asyncio.run(run_training(config, environment, factories=factories, resume=bool(resume)))
    except AgentRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:  # the signal came before the first episode
        return STOPPED
    return STOPPED if run.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
