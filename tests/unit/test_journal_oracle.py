"""The second reader of journals finds nothing in a run that holds, and every broken rule in one that does not."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.core.errors import TrainerLostError
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.inspection.reasons import explain_episode
from agentrl.inspection.statistics import run_statistics
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.journal_oracle import entry_checksum, judge, row_checksum
from tests.sim.small_run import TASKS, config_for
from tests.sim.test_scores import FUNCTIONS as SCORERS
from tests.support.recording_trainer import RecordingTrainer
from tests.unit.test_supervisor import NoWaiting

pytestmark = pytest.mark.damages_journal


@pytest.fixture
def run(sample_run: Path, tmp_path: Path) -> Path:
    """A copy of the sample run, which lost its trainer once: two lineages, two trained policies, children, forks."""
    shutil.copytree(sample_run, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def change(run: Path, *statements: str, database: str = "control.db") -> None:
    """Alter rows as a bug would: with checksums that fit."""
    connection = sqlite3.connect(run / "journal" / database)
    with connection:
        connection.create_function("checked", -1, lambda table, *values: row_checksum(table, values))
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'meta'").fetchall()
        for (table,) in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            if columns[-1] == "checksum" and "body" not in columns:
                keys = ", ".join(columns[:-1])
                connection.execute(f"UPDATE {table} SET checksum = checked('{table}', {keys})")
    connection.close()


def change_entries(run: Path, kind: str, alter: Callable[[list[object]], None]) -> None:
    """Alter the first entry of a kind that a committed training episode has, with a checksum that fits."""
    connection = sqlite3.connect(run / "journal" / "turns-0.db")
    with connection:
        rows = connection.execute("SELECT id, episode, attempt, call, asked, body FROM entries WHERE episode LIKE 'e%'")
        for number, episode, attempt, call, asked, body in rows.fetchall():
            content = msgspec.msgpack.decode(body)
            if content[0] == kind:
                alter(content)
                body = msgspec.msgpack.encode(content)
                checksum = entry_checksum(episode, attempt, call, asked, body)
                connection.execute("UPDATE entries SET body = ?, checksum = ? WHERE id = ?", (body, checksum, number))
                break
    connection.close()


def rules(run: Path) -> set[str]:
    return {violation.split(":")[0] for violation in judge(run)}


def test_a_run_that_lost_its_trainer_holds_and_so_do_its_forks(run: Path) -> None:
    assert judge(run, ended=True) == []
    assert judge(run / "forks") == []
    assert judge(run / "forks" / "forks") == []
    connection = sqlite3.connect(run / "journal" / "control.db")
    assert connection.execute("SELECT count(DISTINCT lineage) FROM versions").fetchone() == (2,)
    connection.close()


@pytest.mark.parametrize(("step", "found"), [(0, set()), (77, {"unknown version"})])
def test_versions_of_partials_are_known_too(run: Path, step: int, found: set[str]) -> None:
    """A kill leaves the tokens of unfinished turns."""
    tokens = [bytes(4), [[0, 1, ["solver", 0, step]]], {"logprobs": bytes(4)}]
    body = msgspec.msgpack.encode([0, tokens])
    row = ("e1", 0, "r#0", b"")
    connection = sqlite3.connect(run / "journal" / "turns-0.db")
    with connection:
        statement = "INSERT INTO partials (episode, attempt, call, asked, body, checksum) VALUES (?, ?, ?, ?, ?, ?)"
        connection.execute(statement, (*row, body, entry_checksum(*row, body)))
    connection.close()
    assert rules(run) == found


NAMED = "(lineage, step) IN (SELECT lineage, oldest_step FROM trajectories WHERE policy = 'solver')"
"""A version that a token names."""
FIRST = "(SELECT min(episode) FROM step_units WHERE policy = 'solver')"


@pytest.mark.parametrize(
    ("rule", "statements"),
    [
        ("unknown version", [f"DELETE FROM versions WHERE policy = 'solver' AND {NAMED}"]),
        ("unknown version", [f"DELETE FROM steps WHERE policy = 'solver' AND {NAMED}"]),
        ("versions", ["UPDATE versions SET sha256 = 'x' WHERE step = 1"]),
        ("versions", ["UPDATE versions SET parent_step = 0 WHERE lineage = 0 AND step = 2 AND policy = 'solver'"]),
        ("versions", ["DELETE FROM versions WHERE step = (SELECT max(step) FROM versions)"]),
        ("ledger", [f"DELETE FROM admissions WHERE episode = {FIRST}"]),
        ("ledger", [f"INSERT INTO unit_drops SELECT {FIRST}, 0, 'solver', 'no_reward', 0.0, 0, 0"]),
        ("ledger", ["INSERT INTO unit_drops VALUES ('e777', 0, 'solver', 'no_reward', 0.0, 0, 0)"]),
        (
            "ledger",
            [
                "UPDATE step_units SET episode = (SELECT min(episode) FROM step_units WHERE lineage = 1) WHERE"
                " policy = 'solver' AND episode = (SELECT max(episode) FROM step_units WHERE lineage = 1)"
            ],
        ),
        ("step", ["UPDATE steps SET input_digest = 'x' WHERE step = 1"]),
        ("step", ["UPDATE steps SET fed = fed + 1 WHERE step = 1"]),
        ("step", [f"UPDATE step_units SET reward = reward + 1 WHERE episode = {FIRST}"]),
        (
            "step",
            [
                "UPDATE step_units SET step = 1 WHERE lineage = 1 AND policy = 'solver' AND step ="
                " (SELECT max(step) FROM step_units WHERE policy = 'solver')"
            ],
        ),
        ("credit", [f"UPDATE step_units SET advantage = advantage + .001 WHERE episode = {FIRST}"]),
        ("credit", [f"UPDATE step_units SET baseline = 7 WHERE episode = {FIRST}"]),
        ("credit", [f"UPDATE step_units SET turn_advantages = '[1]' WHERE episode = {FIRST}"]),
        ("reward", [f"UPDATE trajectories SET reward = reward + 1 WHERE episode = {FIRST}"]),
        ("reward", [f"UPDATE episodes SET reward = 7 WHERE episode = {FIRST}"]),
        ("reward", [f"UPDATE trajectories SET turn_rewards = '[[0, 1.0]]' WHERE episode = {FIRST}"]),
        ("entries", [f"UPDATE episodes SET entries = entries - 1 WHERE episode = {FIRST}"]),
        ("entries", [f"UPDATE episodes SET partition = 'turns-7.db' WHERE episode = {FIRST}"]),
        ("entries", [f"UPDATE trajectories SET tokens = tokens + 1 WHERE episode = {FIRST}"]),
        ("entries", [f"UPDATE trajectories SET oldest_step = oldest_step + 1 WHERE episode = {FIRST}"]),
        ("digest", [f"UPDATE episodes SET digest = x'00' WHERE episode = {FIRST}"]),
    ],
)
def test_what_a_bug_would_write_is_named(run: Path, rule: str, statements: list[str]) -> None:
    change(run, *statements)
    assert rule in rules(run), judge(run)


@pytest.mark.parametrize(
    ("rule", "kind", "field", "value"),
    [
        ("unknown version", "turn", (7, 1), [[0, 1, ["solver", 0, 77]]]),
        ("entries", "turn", (7, 1), [[1, 2, ["solver", 0, 0]]]),
        ("entries", "turn", (7, 1), []),
        ("entries", "turn", (7, 2, "logprobs"), b"\0" * 4),
        ("entries", "turn", (7, 2, "kept"), b"\0" * 4),
        ("entries", "turn", (7, 2, "taste"), b""),
        ("entries", "turn", 16, 7),
        ("entries", "turn", 1, "nobody"),
        ("entries", "turn", 2, 7),
        ("entries", "turn", 5, 7),
        ("step", "turn", (7, 2, "logprobs"), b"\1"),
        ("reward", "reward", 1, "nobody"),
        ("reward", "reward", 2, 7),
        ("reward", "reward", 4, 0),
        ("reward", "reward", 3, 123.0),
        ("digest", "reward", 3, 123.0),
    ],
)
def test_entries_that_a_bug_would_write_are_named(
    run: Path, rule: str, kind: str, field: int | tuple[int | str, ...], value: object
) -> None:
    *path, last = field if isinstance(field, tuple) else (field,)

    def alter(content: list[object]) -> None:
        inner: Any = content
        for part in path:
            inner = inner[part]
        before = inner.get(last) if isinstance(inner, dict) else inner[last]
        inner[last] = value * len(before) if value == b"\1" and isinstance(before, bytes) else value

    change_entries(run, kind, alter)
    assert rule in rules(run), judge(run)


@pytest.mark.parametrize(
    ("database", "statement"),
    [
        ("control.db", "UPDATE step_units SET advantage = 0 WHERE position = 0"),
        ("control.db", "UPDATE admissions SET spec = x'00' WHERE episode = 'e0'"),
        ("turns-0.db", "UPDATE entries SET attempt = 1 WHERE id = 3"),
        ("turns-0.db", "UPDATE entries SET asked = x'00' WHERE id = 3"),
    ],
)
def test_what_the_disk_changed_is_named(run: Path, database: str, statement: str) -> None:
    with sqlite3.connect(run / "journal" / database) as connection:
        connection.execute(statement)
    connection.close()
    assert "checksum" in rules(run)


def test_entries_that_are_gone_are_named(run: Path) -> None:
    for path in (run / "journal").glob("turns-*"):
        path.unlink()
    assert "entries" in rules(run)


def test_an_episode_in_flight_at_the_end_is_named(run: Path) -> None:
    change(run, f"DELETE FROM episodes WHERE episode = {FIRST}")
    assert any("in flight" in violation for violation in judge(run, ended=True))


def test_a_file_of_a_version_that_is_another_is_named(run: Path) -> None:
    directory = run / "versions" / "solver" / "0.1"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(b"other weights")
    assert "versions" in rules(run)


def test_a_checkpoint_of_a_version_without_a_row_is_named(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_000099-0"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"versions": {"solver": [0, 99]}}))
    assert any("checkpoint step_000099-0" in violation for violation in judge(run))


class Guesses(agentrl.Environment):
    """Two players guess digits over three turns; each right one is paid for its turn, and the rest at the end."""

    seats = ("guesser", "rival")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(self.play(ctx, "guesser"), self.play(ctx, "rival"))

    async def play(self, ctx: agentrl.EpisodeContext, seat: str) -> None:
        agent = ctx.agent(seat)
        for turn in range(3):
            said = (await agent.act(agentrl.user(f"{turn}: guess"))).text
            await ctx.sleep(0.003 * ctx.rng.random())
            if said in "135":
                agent.reward(0.1 * float(said), turn=turn)
        agent.reward(len(said) / 3)


CREDITS: list[dict[str, object]] = [
    *({"advantage": name} for name in ("leave_one_out", "group_mean", "group_std", "role_mean", "none")),
    *({"advantage": name, "turn_credit": "to_go"} for name in ("leave_one_out", "group_mean")),
    *({"advantage": "leave_one_out", "release": release} for release in ("late", "episode")),
    {"advantage": "role_mean", "release": "episode"},
]


@pytest.mark.parametrize("credit", CREDITS, ids=lambda credit: "-".join(map(str, credit.values())))
def test_every_kind_of_credit_follows_from_the_page_also_after_a_loss(
    tmp_path: Path, credit: dict[str, object]
) -> None:
    connection = trained_with_a_loss(tmp_path, {"credit": {"group_size": 4, **credit}})
    told = connection.execute(
        "SELECT count(DISTINCT lineage), count(DISTINCT reward) > 2, max(turn_advantages IS NOT NULL) FROM step_units"
    ).fetchone()
    assert told == (2, 1, int("turn_credit" in credit))
    assert connection.execute("SELECT count(*) > 0 FROM baselines").fetchone() == (int("release" in credit),)
    connection.close()


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "role_mean"])
def test_scores_of_groups_follow_from_the_page_also_after_a_loss(tmp_path: Path, advantage: str) -> None:
    ranked = {"function": f"{SCORERS}:slowly_ranked", "options": {"seconds": 0.0}, "per": "group"}
    weights = {"reward": 1.0, "ranked": 2.0}
    credit: dict[str, Any] = {
        "group_size": 4,
        "advantage": advantage,
        "reward_weights": weights,
        "turn_credit": "to_go",
    }
    if advantage == "role_mean":
        del credit["turn_credit"]
    connection = trained_with_a_loss(tmp_path, {"credit": credit, "scorers": {"ranked": ranked}})
    query = (
        "SELECT count(*) FROM step_units s JOIN trajectories t ON s.episode = t.episode AND s.seat = t.seat"
        " WHERE s.reward > t.reward"
    )
    assert connection.execute(query).fetchone() > (10,)
    connection.close()
    reader = RunReader(tmp_path / "run")
    reasons = [reason.text for reason in explain_episode(reader, "e3") if reason.about == "reward"]
    caveats = run_statistics(reader).caveats
    reader.close()
    assert "guesser[0]: ranked 3, compared with the group; credited with weight 2" in reasons
    assert len(caveats) == (advantage == "leave_one_out")
    with sqlite3.connect(tmp_path / "run" / "journal" / "control.db") as altered:
        altered.execute("UPDATE group_scores SET scores = replace(scores, '3.0', '3.5')")
    assert {each.split(":")[0] for each in judge(tmp_path / "run", ended=True)} >= {"checksum", "step"}


def trained_with_a_loss(tmp_path: Path, changes: dict[str, Any]) -> sqlite3.Connection:
    """The control log of a run whose trainer is lost after a checkpoint: some steps are taken in two lineages."""
    config = config_for(
        steps=5,
        name="run",
        directory=str(tmp_path),
        checkpoint={"every": 2, "versions": 0},
        policies={"guesser": {"step_size": 4, "max_staleness": 1}, "rival": {"step_size": 4, "max_staleness": 1}},
        **changes,
    )
    trainers: list[RecordingTrainer] = []

    def trainer(plan: TrainerPlan, directory: Path) -> RecordingTrainer:
        losses = {} if trainers else {("guesser", 4): TrainerLostError("it died")}
        made = RecordingTrainer(["guesser", "rival"], failures=losses, versions=directory / "versions")
        trainers.append(made)
        return made

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(digit, versions=versions)

    factories = RunFactories(
        engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat(), clock=NoWaiting()
    )
    asyncio.run(run_training(config, Guesses, tasks=TASKS, quiet=True, factories=factories))
    assert len(trainers) == 2
    assert judge(tmp_path / "run", ended=True) == []
    return sqlite3.connect(tmp_path / "run" / "journal" / "control.db")


LIVES = [
    ("leave_one_out", "role_mean", "group_std", "role_mean"),
    ("none", "gigpo", "group_mean", "leave_one_out"),
]


@pytest.mark.parametrize("lives", LIVES, ids="-".join)
def test_a_run_whose_advantage_changed_on_resume_follows_from_the_page(tmp_path: Path, lives: tuple[str, ...]) -> None:
    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(digit, versions=versions)

    def trainer(plan: TrainerPlan, directory: Path) -> RecordingTrainer:
        return RecordingTrainer(["guesser", "rival"], versions=directory / "versions")

    for life, advantage in enumerate(lives):
        stopped = Stopped(3 * (life + 1))
        config = config_for(
            steps=3 * len(lives) + 3,
            name="run",
            directory=str(tmp_path),
            credit={"group_size": 4, "advantage": advantage},
            policies={"guesser": {"step_size": 6, "max_staleness": 2}, "rival": {"step_size": 6, "max_staleness": 2}},
        )
        factories = RunFactories(
            engine=engine,
            trainer=trainer,
            chat_format=lambda model: PlainChatFormat(),
            clock=NoWaiting(),
            assembled=stopped.watch,
        )
        running = run_training(
            *(config, Guesses), tasks=TASKS, quiet=True, factories=factories, observers=[stopped], resume=life > 0
        )
        assert asyncio.run(running).interrupted
        assert judge(tmp_path / "run") == []
    change(tmp_path / "run", "UPDATE step_units SET advantage = advantage + .001 WHERE lineage = 2")
    assert rules(tmp_path / "run") == {"credit"}


class Stopped:
    """Observer that stops a run at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def watch(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._step:
            self._orchestrator.stop()

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Evaluations do not matter."""


def digit(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*b"......"[: request.seed % 3], ord(str(request.seed // 7 % 10)), STOP_TOKEN]
