"""Scores on disk: the second reader, the commands that read a run, replays, forks, and what is refused at the start."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.app.evaluation import with_frozen_policies
from agentrl.app.forks import fork
from agentrl.app.replays import replay
from agentrl.app.run_parts import RunFactories
from agentrl.app.scoring import find_scorer_codes, make_scorers
from agentrl.app.training import run_training
from agentrl.cli.main import main
from agentrl.config.load import check_settings_unchanged, load
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.core.errors import CheckFailedError, ConfigError
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.inspection.statistics import scorer_caveats
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.journal_oracle import judge
from tests.sim.small_run import TASKS, Guess, config_for, guess
from tests.support import score_functions
from tests.support.recording_trainer import RecordingTrainer
from tests.unit.test_supervisor import NoWaiting

FUNCTIONS = str(Path(score_functions.__file__))


class Asks(Guess):
    """Asks for a score of its first turn, and is paid by it once more."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        await guesser.act(agentrl.user("Guess a digit."))
        value = await ctx.score("asked", guesser)
        guesser.reward(0.0 if value is None else value)
        await guesser.act(agentrl.user("Again."))


def factories() -> RunFactories:
    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(guess, versions=versions)

    def trainer(plan: TrainerPlan, *rest: Any) -> Trainer:
        return RecordingTrainer(list(plan.policies), versions=rest[0] / "versions")

    return RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat(), clock=NoWaiting())


SCORERS = {
    "short": {"function": f"{FUNCTIONS}:short", "options": {"scale": 10.0}},
    "asked": {"function": f"{FUNCTIONS}:short", "per": "request"},
    "length": {"function": f"{FUNCTIONS}:length", "per": "episode"},
    "shorter": {"function": f"{FUNCTIONS}:short", "credit": "difference"},
    "noted": {"function": f"{FUNCTIONS}:short", "credit": "note"},
}


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("scores")
    weights = {"reward": 1.0, "short": 0.3, "asked": 0.7, "length": 0.1, "shorter": 0.2}
    credit = {"group_size": 4, "turn_credit": "to_go", "reward_weights": weights}
    config = config_for(name="run", directory=str(directory), scorers=SCORERS, credit=credit, steps=3)
    asyncio.run(run_training(config, Asks, tasks=TASKS, quiet=True, factories=factories()))
    return directory / "run"


def test_the_second_reader_finds_every_score_counted(scored_run: Path) -> None:
    assert judge(scored_run, ended=True) == []
    reader = RunReader(scored_run)
    (life,) = [json.loads(value) for (value,) in reader.log.rows("SELECT value FROM meta WHERE key GLOB 'life.*'")]
    assert {f"{FUNCTIONS}:short", f"{FUNCTIONS}:length"} <= life["code"].keys()
    entries = dict(reader.episode("e0").entries)
    assert {name for name in entries if "?" in name} == {
        *("guesser.0.0?short", "guesser.0.1?short", "guesser.0.0?asked", "guesser.0?length"),
        *("guesser.0.0?shorter", "guesser.0.1?shorter", "guesser.0.0?noted", "guesser.0.1?noted"),
    }
    reader.close()


def test_the_commands_show_scores_like_other_named_rewards(
    scored_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*command: str) -> str:
        assert main(list(command)) == 0
        return capsys.readouterr().out

    run = str(scored_run)
    assert "(short, turn 0)" in told("episode", "show", run, "e0")
    why = told("episode", "why", run, "e0")
    assert all(name in why for name in ("(asked, turn 0)", "(length)"))
    assert "by name, before weights: asked" in told("run", "stats", run)
    assert "consumed" in told("run", "ledger", run)
    told("run", "export", run, "--to", "jsonl", "--out", str(tmp_path / "out.jsonl"))
    agents = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["agents"]
    assert {part["name"] for part in agents[0]["reward_parts"]} == {"reward", "short", "asked", "length", "shorter"}


def test_a_replay_finds_the_recorded_scores_and_asks_nobody(scored_run: Path) -> None:
    reader = RunReader(scored_run)
    lines = list(reader.episodes())
    reader.close()
    chosen = [(line.episode, line.attempt) for line in lines]
    for rescoring in (False, True):
        found = replay(scored_run, chosen, environment=Asks, factories=factories(), rescoring=rescoring)
        assert [(each.episode, each.text) for each in found if each.outcome != "identical"] == []
        assert all(each.before == each.after for each in found if rescoring)


def test_a_fork_keeps_the_scores_before_it_and_is_scored_from_there(scored_run: Path) -> None:
    (forked,) = fork(scored_run, "e0", at=1, environment=Asks, factories=factories())
    reader = RunReader(scored_run / "forks")
    (line,) = reader.episodes()
    own, inherited = reader.recorded(line)
    reader.close()
    names = [[entry.call_id for entry in part if "?" in entry.call_id] for part in (inherited, own)]
    every = {"guesser.0.0?asked", "guesser.0?length"}
    every |= {f"guesser.0.{turn}?{name}" for turn in (0, 1) for name in ("short", "shorter", "noted")}
    assert len(names[0] + names[1]) == len(every)
    assert {*names[0], *names[1]} == every
    assert "guesser.0.0?asked" in names[0], "what came before the fork is not asked again"
    assert forked.reward == line.reward is not None


def test_a_scorer_that_begins_to_fail_ends_the_run_with_a_checkpoint_and_its_name(tmp_path: Path) -> None:
    scorers = {"fragile": {"function": f"{FUNCTIONS}:fragile"}}
    config = config_for(name="run", directory=str(tmp_path), scorers=scorers, steps=100)
    with pytest.raises(CheckFailedError, match=r"\d+ episodes in a row .*the scorer 'fragile' failed.* 503"):
        asyncio.run(run_training(config, Guess, tasks=TASKS, quiet=True, factories=factories()))
    reader = RunReader(tmp_path / "run")
    ((steps,),) = reader.log.rows("SELECT max(step) FROM steps")
    reader.close()
    assert steps >= 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{steps:06}-0"]
    assert judge(tmp_path / "run", ended=True) == []


def test_a_scorer_of_a_script_is_a_section_of_its_name() -> None:
    config = config_for().with_functions(scorers={"short": f"{FUNCTIONS}:short"})
    assert config.scorers["short"].per == "turn"
    (code,) = find_scorer_codes(config.scorers).values()
    assert code.name == "short"
    assert make_scorers(config.scorers)["short"].function.__name__ == "short"
    assert config.rollout_plan.scored == {"guesser"}


def test_evaluations_and_forks_score_the_turns_that_the_run_scored() -> None:
    weights = WeightsRef(version=PolicyVersion("opponent", 0, 3), path="elsewhere", kind="full", sha256="")
    policies: Any = {"guesser": {"step_size": 8}, "opponent": {"kind": "frozen"}}
    config = with_frozen_policies(config_for(policies=policies), ())
    recorded = RunConfig.model_validate_json(config.model_dump_json())
    again = with_frozen_policies(recorded, [weights])
    for each in (config, recorded, again):
        assert not each.trained
        assert each.rollout_plan.scored == {"guesser"}
    frozen = config_for(policies={"guesser": {"kind": "frozen"}, "opponent": {"kind": "frozen"}})
    assert with_frozen_policies(frozen, [weights]).rollout_plan.scored == {"guesser", "opponent"}


@pytest.mark.parametrize(
    ("advantage", "scorer", "expected"),
    [
        (
            "leave_one_out",
            {"function": f"{FUNCTIONS}:ranked", "per": "group"},
            "one scores members with their siblings",
        ),
        ("group_mean", {"function": f"{FUNCTIONS}:ranked", "per": "group"}, ""),
        ("leave_one_out", {"function": f"{FUNCTIONS}:ranked", "per": "group", "credit": "note"}, ""),
        ("leave_one_out", {"function": f"{FUNCTIONS}:short"}, ""),
    ],
)
def test_settings_that_bias_the_estimate_are_named(advantage: str, scorer: dict[str, Any], expected: str) -> None:
    credit = {"group_size": 4, "advantage": advantage}
    config = config_for(scorers={"one": scorer}, credit=credit).model_dump(mode="json")
    caveats = scorer_caveats(config)
    assert len(caveats) == bool(expected)
    assert "".join(caveats).startswith(expected)


def test_the_example_scores_the_next_partial_sum(repository: Path) -> None:
    next_step = runpy.run_path(str(repository / "examples" / "11_scores.py"))["next_step"]
    task = agentrl.Task(id="t", data={"question": "State the final answer to the following problem: 54 - 97 + 3 ="})

    def score(number: int, **arguments: Any) -> float | None:
        calls = (agentrl.ToolCall(id="c", name="calculate", arguments=arguments),) if arguments else ()
        message = agentrl.Message(role="assistant", content="-40", tool_calls=calls)
        turn = agentrl.Turn(text="-40", message=message, completion=None)  # type: ignore[arg-type]
        value: float | None = next_step(
            agentrl.Scored(task=task, seat="solver", turn=turn, number=number, messages=(message,))
        )
        return value

    assert score(0, a=54, op="-", b=97) == 1.0
    assert score(1, a=-43, op="+", b=3) == 1.0
    assert (
        score(1, a=54, op="-", b=97)
        == score(2, a=-43, op="+", b=3)
        == score(0, a=54)
        == score(0, a="5", op="-", b=2)
        == 0.0
    )
    assert score(2) is None


def test_scorers_may_come_and_go_between_two_lives_unless_weights_must_not_depend_on_them() -> None:
    short, other = SCORERS["short"], {**SCORERS["short"], "timeout_s": 9.0}
    one, changed, two = (config_for(scorers=each) for each in ({"a": short}, {"a": other}, {"a": short, "b": short}))
    for then, now, path in (
        (one, changed, ("scorers", "a", "timeout_s")),
        (one, two, ("scorers", "b")),
        (two, one, ("scorers", "b")),
    ):
        assert [each.path for each in check_settings_unchanged(then.model_dump(mode="json"), now)] == [path]
    policies = {"guesser": {"step_size": 8, "max_staleness": 0}}
    fixed, more = (
        config_for(scorers=each, policies=policies, deterministic=True)
        for each in ({"a": short}, {"a": short, "b": short})
    )
    with pytest.raises(ConfigError, match=r"scorers\.b"):
        check_settings_unchanged(fixed.model_dump(mode="json"), more)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("length", 0, "ok     a finite score, or None, for each conversation (an answer: 2, a tool call: 2"),
        ("short", 0, "an answer: 0.84, a tool call: nothing"),
        ("wild", 0, "two calls gave"),
        ("broken", 1, "FAILED an answer: it raised ZeroDivisionError"),
        ("infinite", 1, "FAILED an answer: it raised"),
        ("ranked", 0, 'ok     with per = "group", a finite score, or None, for each member of a group'),
        ("too_few", 1, "as a scorer of groups, for a group of 5: it returned 1 score; it must return one per member"),
        ("unmarked", 1, "put @agentrl.loss, @agentrl.advantage or @agentrl.scorer above it"),
    ],
)
def test_a_scorer_is_checked_before_a_run(
    name: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", "--scorer", f"{FUNCTIONS}:{name}"]) == code
    assert message in capsys.readouterr().out


def test_a_file_is_looked_up_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(FUNCTIONS).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        '[environment]\nid = "calculator"\n[model]\npath = "agentrl.environments:calculator/model"\n'
        '[scorers.short]\nfunction = "mine.py:short"\n',
        encoding="utf-8",
    )
    config = load(tmp_path / "run.toml", [])
    assert config.scorers["short"].function == f"{tmp_path / 'mine.py'}:short"


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        ({"two words": {"function": "a.py:f"}}, "scorers.two words: it becomes the name of a reward"),
        ({"reward": {"function": "a.py:f"}}, "other than `reward`"),
        ({"short": {}}, "function"),
        ({"short": {"function": "short"}}, r"'short': there is no such scorer"),
        ({"a": {"function": "a.py:f", "credit": "difference", "per": "episode"}}, "set per = 'turn'"),
    ],
)
def test_what_cannot_be_a_scorer_is_refused(scorers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_for(scorers=scorers)


def test_weights_that_leave_out_a_scorer_are_refused() -> None:
    with pytest.raises(ValueError, match="no weight for the scores of short: add short"):
        config_for(scorers={"short": SCORERS["short"]}, credit={"group_size": 4, "reward_weights": {"reward": 1.0}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"function": f"{FUNCTIONS}:unmarked"}, "put @agentrl.loss"),
        ({"function": f"{FUNCTIONS}:absent"}, "defines no function 'absent'"),
        ({"function": f"{FUNCTIONS}:short", "options": {"size": 3}}, r"scorers\.short\.options: short: .*scale"),
    ],
)
def test_a_function_that_cannot_score_is_refused_at_the_start(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_scorer_codes(config_for(scorers={"short": section}).scorers)
