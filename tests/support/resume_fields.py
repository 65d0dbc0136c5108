"""Every setting, changed between two starts of a run: refused by name, or the run goes on with a consistent journal.

A first life is killed (SIGKILL) behind its checkpoint, with episodes in flight and others that wait for their group.
Then, for each setting that `RunConfig` has, a copy of the run is resumed with that setting changed and takes two steps.
All of it is the production path (`run_training`) on a real disk; engine, trainer and chat format are scripted, and the
trainer reads the rows of its units from the journal as the real one does.

The figures, for `benchmarks.oracle`: `config_fields_unclassified`, settings that declare nothing about a resume,
and `resumes_judged`, settings that were changed so and judged.
"""

from __future__ import annotations

import asyncio
import copy
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import Run, run_training
from agentrl.config.fields import ResumeRule, Section, resolve_package_directory
from agentrl.config.load import check_settings_unchanged, resume_rule_of
from agentrl.config.mistakes import sections_in_annotation
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.policies import BotPolicy, FrozenPolicy, OpponentPoolPolicy, PolicyConfig, RemotePolicy
from agentrl.config.run import RunConfig
from agentrl.config.scorers import ScorerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import PolicyVersion, Task, TrainBatch
from agentrl.credit.samples import read_samples
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import resolve
from agentrl.inspection.reader import RunReader
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer

GROUP = 4
CHECKPOINT = 2
KILLED_AFTER = 3
"""Steps of the first life; the last of them is behind its checkpoint, and is taken again."""
TRAINED = 5
"""Steps in all: the second life takes three, the first of them again."""
START_S = 600.0

KINDS: dict[type[Section], str] = {
    PolicyConfig: "guesser",
    FrozenPolicy: "frozen",
    RemotePolicy: "remote",
    BotPolicy: "bot",
    OpponentPoolPolicy: "past",
    ScorerConfig: "scorer",
}
"""The run has a policy of each kind, each of which holds the seat of its name, and a scorer."""

FUNCTIONS = Path(__file__).with_name("score_functions.py")
SHIPPED_MODEL = resolve_package_directory("agentrl.environments.calculator:model")
REFERENCE = tempfile.TemporaryDirectory(prefix="agentrl-reference-")
"""Looks like an adapter, which nothing loads here."""
Path(REFERENCE.name, "adapter_model.safetensors").touch()
CHANGED: dict[str, Any] = {
    "environment.options": {"split": "other"},
    "environment.selection": {"replay": 0.5},
    "model.reply_format": "hermes",
    "model.template_variables": {"enable_thinking": False},
    "policies.guesser.model": SHIPPED_MODEL,
    "policies.frozen.model": SHIPPED_MODEL,
    "engine.replicas": 1,
    "policies.guesser.lora": None,
    "policies.guesser.lora.target_modules": ["q_proj"],
    "policies.guesser.reference": REFERENCE.name,
    "policies.guesser.sampling": {"temperature": 0.5},
    "policies.frozen.sampling": {"temperature": 0.5},
    "policies.remote.sampling": {"top_k": 0, "min_p": 0.0, "temperature": 0.5},
    "policies.guesser.kind": {"kind": "frozen"},
    "policies.frozen.kind": {"kind": "trained"},
    "policies.remote.kind": {"kind": "frozen"},
    "policies.bot.kind": {"kind": "frozen"},
    "policies.past.kind": {"kind": "frozen"},
    "policies.past.of": "second",
    "policies.remote.api_key_env": "AGENTRL_NO_SUCH_KEY",
    "policies.remote.url": "https://b.example.com/v1",
    "policies.guesser.step_size": 2 * GROUP,
    "policies.guesser.max_lag": 3,
    "seats": {"helper": "guesser"},
    "sinks": ("tensorboard",),
    "freeze": [["second", 1], ["guesser", 1]],
    "evaluation.sampling.temperature": 0.5,
    "evaluation.sampling.top_k": 5,
    "evaluation.sampling.top_p": 0.5,
    "evaluation.sampling.min_p": 0.1,
    "best.metric": "reward/mean",
    "best.stop_at": 1e9,
    "steps": TRAINED + 1,
    "engine.max_context": 60,
    "engine.refresh": "lazy",
    "engine.vllm": {"enforce_eager": True},
    "sampling.max_tokens": 3,
    "sampling.max_turns": 2,
    "sampling.top_p": 0.5,
    "sampling.min_p": 0.1,
    "credit.group_size": 2,
    "credit.turn_credit": "to_go",
    "credit.reward_weights": {"reward": 0.5, "scorer": 0.25},
    "scorers.scorer.function": f"{FUNCTIONS}:length",
    "scorers.scorer.options": {"scale": 7.0},
    "credit.advantage.name": "group_mean",
    "trainer.sharding": "none",
    "trainer.loss.name": "ppo",
    "journal.keep": 0,
}
"""Another value, where not every other one is a valid one: the others are found by type."""

BESIDE: dict[str, dict[str, Any]] = {
    "policies.guesser.kind": {"policies.past.of": "second"},
    "best.window": {"best.metric": "reward/mean"},
    "best.stop_at": {"best.metric": "reward/mean"},
    "engine.vllm": {"sampling.top_p": 1.0},
}
"""What has to be changed too for the setting to be one."""

NOT_RUN: dict[str, str] = {
    "workers": "episodes would be played in processes of their own, which scripted parts do not reach",
    "sinks": "the sinks are extras, which need not be installed",
    "cluster.address": "there is no cluster",
    "deterministic": "with `true` the configuration itself is refused, for the run's remote policy",
}
"""Settings for which `check_settings_unchanged` is asked and nothing is run, and why."""


NO_FILTERS = {"top_k": 0, "min_p": 0.0}
"""Which chat completions do not know."""


class Setting(NamedTuple):
    """A leaf of the configuration, in a run that has every kind of section."""

    key: str
    section: type[Section]
    name: str

    @property
    def rule(self) -> ResumeRule:
        """What it declares."""
        return resume_rule_of(self.section.model_fields[self.name])


def settings(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[Setting]:
    """All of them, the sections of a union each with its own."""
    for name, each in section.model_fields.items():
        members, is_named = sections_in_annotation(each.annotation)
        if not members or section is PolicyConfig:
            yield Setting(f"{prefix}{name}", section, name)
        for member in members:
            yield from settings(member, f"{prefix}{name}.{KINDS[member]}." if is_named else f"{prefix}{name}.")


def unclassified() -> list[str]:
    """Settings that declare nothing about a resume."""
    return [
        each.key
        for each in settings()
        if not any(isinstance(mark, ResumeRule) for mark in each.section.model_fields[each.name].metadata)
    ]


# --- the run ----------------------------------------------------------------------------------------------------------


class Guess(agentrl.Environment):
    """Others say a word; then a digit is guessed in up to three turns."""

    seats = ("guesser", "helper", "frozen", "remote", "bot", "past")
    truncated_reward = 0.0
    held: ClassVar[int | None] = None
    """Episodes that stand still after a turn, in a life that is to be killed; None: nobody does."""
    begun: ClassVar[int] = 0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        Guess.begun += 1
        may_hold = Guess.begun > KILLED_AFTER * GROUP
        for seat in self.seats[1:]:
            await ctx.agent(seat).act(agentrl.user("?"))
        for number in range(min(3, ctx.limits.max_turns)):
            turn = await guesser.act(agentrl.user(f"guess {number}"), max_tokens=ctx.limits.max_tokens)
            draw = ctx.rng.random()
            if Guess.held is not None and may_hold and draw < 0.6:
                Guess.held += 1
                await asyncio.Event().wait()
        for seat in ("guesser", "helper"):
            ctx.agent(seat).reward(float(turn.text[:1] == str(draw)[2]))


class Reading(RecordingTrainer):
    """Reads the rows of its units, as a trainer does; it learns nothing from them."""

    def __init__(self, plan: TrainerPlan, directory: Path) -> None:
        from agentrl.journal.rows import make_unit_reader

        super().__init__(list(plan.policies), versions=directory / "versions")
        self._rows_of = make_unit_reader(directory)

    async def forward_backward(self, batch: TrainBatch) -> None:
        read_samples(batch.units, self._rows_of)
        await super().forward_backward(batch)


def say(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A few letters that depend on the request alone."""
    return [*b"0123456789"[request.seed % 10 :][:1], *b"....."[: request.seed % 5], STOP_TOKEN]


async def make_engine(
    plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path
) -> Engine:
    """A scripted engine that says it records all an engine can."""
    await asyncio.sleep(0)
    engine = ScriptedEngine(say, versions=versions, refresh="turn", max_context=plan.engine.max_context)
    engine.capabilities = replace(engine.capabilities, sampling_mask=True, expert_routing=True)
    return engine


def base(path: Path) -> dict[str, Any]:
    """The configuration of the first life, with a section of every kind."""
    return {
        "name": path.name,
        "directory": str(path.parent),
        "steps": TRAINED,
        "environment": {"id": "unused"},
        "model": {"path": "unused"},
        "policies": {
            "guesser": {"step_size": GROUP, "max_staleness": 1, "lora": {"rank": 4}},
            "second": {"step_size": GROUP, "max_staleness": 1, "lora": {"rank": 4}},
            "frozen": {"kind": "frozen"},
            "remote": {"kind": "remote", "url": "https://a.example.com/v1", "model": "m", "sampling": NO_FILTERS},
            "bot": {"kind": "bot", "id": "tests.support.resume_fields:say"},
            "past": {"kind": "past", "of": "guesser", "every": 2},
        },
        "seats": {"helper": "second"},
        "engine": {"refresh": "turn", "max_context": 512},
        "credit": {"group_size": GROUP},
        "scorers": {"scorer": {"function": f"{FUNCTIONS}:short"}},
        "trainer": {"loss": {"normalizer": 64}},  # `late` weighs tokens by a constant
        "checkpoint": {"every": CHECKPOINT, "versions": 0},
        "evaluation": {"tasks": 0},
    }


TASKS = [Task(id=f"task-{number}", data={"number": str(number)}) for number in range(64)]


def play(
    config: RunConfig,
    *,
    resume: bool,
    quiet: bool = True,
    assembled: Callable[[Orchestrator], None] = lambda loop: None,
) -> Run:
    """One life of the run."""
    factories = RunFactories(
        engine=make_engine, trainer=Reading, chat_format=lambda model: PlainChatFormat(), assembled=assembled
    )
    return asyncio.run(
        run_training(config, Guess, tasks=TASKS, held_out=TASKS[:1], resume=resume, quiet=quiet, factories=factories)
    )


def play_file(directory: Path, *, resume: bool, **settings: Any) -> None:
    """A life of a run of `env.py:Add` in a directory; the first is stopped with units still to be trained."""

    async def stop(loop: Orchestrator) -> None:
        while not loop.buffer.ready("guesser"):
            await asyncio.sleep(0)
        loop.stop()

    stopping: list[asyncio.Task[None]] = []

    def assembled(loop: Orchestrator) -> None:
        if not resume:
            stopping.append(asyncio.get_running_loop().create_task(stop(loop)))

    config = RunConfig(
        name="run",
        directory=str(directory / "runs"),
        steps=8,
        environment=settings.pop("environment", {"id": f"{directory / 'env.py'}:Add"}),
        model={"path": "unused"},
        engine={"max_context": 512},
        policies={"guesser": {"step_size": 3 * GROUP, "max_staleness": 1}},
        credit={"group_size": GROUP, **settings.pop("credit", {})},
        evaluation={"tasks": 0},
        **settings,
    )
    factories = RunFactories(
        engine=make_engine, trainer=Reading, chat_format=lambda model: PlainChatFormat(), assembled=assembled
    )
    asyncio.run(run_training(config, resolve(config.environment.id), resume=resume, factories=factories))


def first_life(path: Path) -> None:
    """Play until nothing moves any more, have it on disk, say so, and wait to be killed."""
    Guess.held = 0
    watching: list[asyncio.Task[None]] = []

    async def until_still(loop: Orchestrator) -> None:
        while loop.board.step("guesser") < KILLED_AFTER or not Guess.held or loop.buffer.ledger.in_flight > Guess.held:
            await asyncio.sleep(0.01)
        await loop.store.flush()
        await loop.store.turn_log("0").flush()
        print("still", flush=True)

    def assembled(loop: Orchestrator) -> None:
        watching.append(asyncio.get_running_loop().create_task(until_still(loop)))

    play(RunConfig(**base(path)), resume=False, assembled=assembled)


def killed_run(path: Path) -> Path:
    """The run as a SIGKILL left it."""
    code = f"from tests.support.resume_fields import first_life, Path; first_life(Path({str(path)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        if not ready or process.stdout.readline() != "still\n":
            raise RuntimeError("the first life of the run did not come to where it is killed")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return path


# --- a resume ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Resumed:
    """What came of a resume with a setting changed."""

    key: str
    outcome: Literal["went on", "refused", "checked"]
    """`checked`: asked whether it may differ, and not run."""
    message: str = ""
    """Of the refusal."""
    before: Any = None
    now: Any = None
    violations: list[str] = field(default_factory=list)
    steps: int = 0
    """Taken after the kill."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Episodes and units by reason, but those that a run drops at its end."""


Judge = Callable[[Path], list[str]]


def judge(path: Path) -> list[str]:
    """What is wrong with the journal of a run, by its ledger."""
    reader = RunReader(path)
    try:
        ledger = reader.ledger()
    finally:
        reader.close()
    return [] if ledger.holds else [f"the ledger does not hold: {ledger}"]


def changed(setting: Setting, path: Path) -> tuple[RunConfig, RunConfig]:
    """The configurations of the first life and of the second, which differ in a setting."""
    before, now = base(path), base(path)
    for key, value in BESIDE.get(setting.key, {}).items():
        _set(now, key, value)
    first = RunConfig(**before)
    if setting.key in NOT_RUN:
        return first, first.model_copy(update={setting.key: CHANGED.get(setting.key) or _other(setting, first)})
    value = CHANGED[setting.key] if setting.key in CHANGED else _other(setting, first)
    if setting.key.endswith(".kind") and isinstance(value, dict):
        _set(now, setting.key.removesuffix(".kind"), value)
    else:
        _set(now, setting.key, value)
    return first, RunConfig(**now)


def resumed(setting: Setting, killed: Path, scratch: Path, judged: Judge = judge) -> Resumed:
    """Resume a copy of a killed run with a setting changed.

    Args:
        setting: which.
        killed: the run, which stays as it is.
        scratch: a directory for the copy.
        judged: what is wrong with the journal of a run.
    """
    first, now = changed(setting, scratch / killed.name)
    found = Resumed(key=setting.key, outcome="went on", before=_at(first, setting.key), now=_at(now, setting.key))
    if setting.key in NOT_RUN:
        found.outcome = "checked"
        try:
            check_settings_unchanged(first.model_dump(mode="json"), now)
        except ConfigError as error:
            found.outcome, found.message = "refused", str(error)
        return found
    path = Path(now.directory) / now.name
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    try:
        run = play(now, resume=True)
    except ConfigError as error:
        found.outcome, found.message = "refused", str(error)
        found.violations = judged(path)
        return found
    found.steps = len(run.metrics)
    if setting.rule.rule == "per episode":  # and back again, which a run that mixed two values could not
        again = first.model_copy(update={"steps": TRAINED + 1})
        found.steps += len(play(again, resume=True).metrics)
    found.dropped = _dropped(path)
    found.violations = judged(path)
    return found


def _dropped(path: Path) -> dict[str, int]:
    """Reasons for which a run lost episodes or units in its middle."""
    reader = RunReader(path)
    try:
        rows = [
            *reader.log.rows("SELECT drop_reason FROM episodes WHERE drop_reason IS NOT NULL"),
            *reader.log.rows("SELECT reason FROM unit_drops"),
        ]
    finally:
        reader.close()
    reasons = [reason for (reason,) in rows if reason not in ("run_ended", "frozen", "code_changed")]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.setdefault(part, {})
    data[last] = copy.deepcopy(value)


def _at(config: RunConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _other(setting: Setting, config: RunConfig) -> Any:
    """A valid value that is not the one a setting has."""
    described = setting.section.model_fields[setting.name]
    value = _at(config, setting.key)
    if value is None and not described.is_required():
        value = described.default
    annotation = described.annotation
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return next((choice for choice in choices if choice != value), choices[0])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if isinstance(value, str):
        return f"{value}2"
    raise TypeError(f"{setting.key}: give another value than {value!r} in CHANGED")


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(quick: bool, judged: Judge = judge) -> dict[str, float | None]:
    """See the module; a quick run judges every eighth setting."""
    several = list(settings())[:: 8 if quick else 1]
    violations = count = 0
    with tempfile.TemporaryDirectory() as scratch:
        killed = killed_run(Path(scratch) / "killed" / "run")
        for setting in several:
            own = Path(scratch) / f"{setting.key}-{setting.section.__name__}"
            found = resumed(setting, killed, own, judged)
            problems = wrong(setting, found)
            violations += len(problems)
            count += 1
            for problem in problems:
                print(f"{setting.key}: {problem}", file=sys.stderr)
            shutil.rmtree(own, ignore_errors=True)
    return {
        "config_fields_unclassified": float(len(unclassified())),
        "resumes_judged": float(count),
        "config_fields": float(len(list(settings()))),
        "resume_violations": float(violations),
    }


def wrong(setting: Setting, found: Resumed) -> list[str]:
    """What of a resume is not as the setting declares, or not consistent."""
    problems = list(found.violations)
    if found.outcome == "refused":
        problems += [f"it is declared {setting.rule}, and refused: {found.message}"] * setting.rule.allows(
            deterministic=False
        )
        section, _, name = setting.key.rpartition(".")
        key = section if name == "lora" else setting.key
        problems += [
            f"the refusal does not say {said!r}: {found.message}"
            for said in (key, repr(found.before), repr(found.now))
            if said not in found.message
        ]
        return problems
    if not setting.rule.allows(deterministic=False):
        problems.append("it is declared as refused, and the run went on")
    if found.outcome == "went on" and found.steps < 2:
        problems.append(f"{found.steps} steps were taken")
    # `dynamic_sampling` asks for drops without a signal.
    problems += [f"{count} dropped as {reason}" for reason, count in found.dropped.items() if reason != "no_signal"]
    return problems
