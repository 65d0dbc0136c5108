"""The anchors: their environments, their records, and the page made from them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.inspection.steps import EvaluationLine
from benchmarks.anchors import __main__ as command_line
from benchmarks.anchors import recipes, recording
from benchmarks.anchors.cases import ANCHORS, HERE, Arm, Recipe
from benchmarks.anchors.processes import run_python
from docs.generators import anchors
from packages.tinker.tests.client import CALCULATOR

ARMS = [(name, arm) for name, anchor in ANCHORS.items() for arm in anchor.arms]
ENVIRONMENTS = (
    f"{HERE}/arithmetic.py:Arithmetic",
    f"{HERE}/countdown.py:Countdown",
    f"{HERE}/files.py:Files",
    f"{HERE}/guess_number.py:GuessNumber",
    f"{HERE}/reverse_text.py:ReverseText",
    f"{HERE}/sokoban.py:Sokoban",
    "examples/16_qwen.py:OneOperation",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments_of_the_anchors_pass_the_check(name: str, repository: Path) -> None:
    assert agentrl.check_environment(str(repository / name)).passed


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if "sokoban" in name else ()) for name in ENVIRONMENTS],
)
def test_no_held_out_task_is_trained(name: str, repository: Path) -> None:
    from agentrl.environment.registry import resolve

    environment = resolve(str(repository / name))
    held_out = {json.dumps(task.data, sort_keys=True) for task in environment.tasks("held_out")}
    training = [
        {json.dumps(task.data, sort_keys=True) for task in environment.tasks("train", seed=seed)} for seed in (0, 1)
    ]
    assert len(held_out) > 50
    assert all(not held_out & tasks for tasks in training)
    assert held_out == {json.dumps(task.data, sort_keys=True) for task in environment.tasks("held_out", seed=1)}


def test_every_arm_is_a_configuration_with_held_out_rewards(repository: Path) -> None:
    """Also with the settings of a quick run, and of a seed."""
    for each in (ANCHORS[anchor].arms[arm] for anchor, arm in ARMS):
        for quick in (False, True):
            _, config, *settings = recording.command(each, Path("runs"), "a", 5, None, quick=quick)
            loaded = load(repository / config, settings)
            assert (loaded.seed, loaded.name) == (5, "a"), each.title
            assert loaded.evaluation.splits or each.match, each.title
        if each.match:
            assert load(repository / each.match.config).evaluation.splits


def test_similarity_to_a_reversed_text(repository: Path) -> None:
    similarity = module_of("reverse_text.py:ReverseText", repository).similarity
    for reply, reward in (("cba fed", 1.0), ("cba", 2 * 3 / 10), ("", 0.0), ("CBA FED", 0.0), ("cba!", 0.0)):
        assert similarity(reply, "cba fed") == pytest.approx(reward), reply


def module_of(name: str, repository: Path) -> Any:
    from agentrl.environment.registry import resolve

    return sys.modules[resolve(str(repository / HERE / name)).__module__]


def test_an_expression_has_each_number_once_and_the_right_value(repository: Path) -> None:
    countdown = module_of("countdown.py:Countdown", repository)
    expressions = ("3 + 8 - 2", "8 - 2 + 3", "3 + 8 + 2", "9", "1 + 8", "3 + 8 - 2 = 9", "8 + 3 -2")
    right = [expression for expression in expressions if countdown.is_right(expression, [3, 8, 2], 9)]
    assert right == ["3 + 8 - 2", "8 - 2 + 3"]


def test_no_held_out_problem_is_trained_in_another_order(repository: Path) -> None:
    countdown = module_of("countdown.py:Countdown", repository).Countdown
    train, held_out = (
        {(*sorted(task.data["numbers"]), task.data["target"]) for task in countdown.tasks(split)}
        for split in ("train", "held_out")
    )
    assert len(held_out) > 50
    assert not train & held_out


def test_a_judge_is_rewarded_for_its_choice_and_a_solver_for_right_expressions(repository: Path) -> None:
    """`chosen` counts in training alone."""
    from agentrl.testing.execution import play

    countdown = module_of("countdown.py:Countdown", repository).Countdown
    for split, chosen in (("train", 0.25), ("held_out", 0.0)):
        task = countdown.tasks(split)[0]
        task = agentrl.Task(id="t", data={**task.data, "numbers": [3, 8, 2], "target": 9})
        played = play(countdown, task, ["3 + 8 - 2", "3 + 8 + 2", "1"])
        assert played.reward == 1.5 + chosen, "half for the right expression, 1 for the judge"
        assert (played.metrics["one_right"], played.metrics["chosen_of_one_right"]) == (1.0, 1.0)


def test_levels_are_solved_by_their_solutions(repository: Path) -> None:
    """On a level whose moves were found by hand, and on drawn ones."""
    sokoban = module_of("sokoban.py:Sokoban", repository)
    level = sokoban.Level(walls=frozenset({(1, 2)}), target=(3, 3), box=(3, 2), player=(1, 1))
    assert level.text() == "@#--\n----\n-$.-\n----\n11 32 33"
    assert (level.after("R"), level.after("U"), level.after("D").player) == (level, level, (2, 1))
    assert level.solution() == "DDR"
    cornered = level._replace(box=(4, 1), player=(4, 2))
    assert (cornered.after("L"), cornered.solution()) == (cornered, None)
    for task in (*sokoban.Sokoban.tasks("train")[:20], *sokoban.Sokoban.tasks("held_out")[:20]):
        drawn = sokoban.read_level(task.data["level"])
        moves = drawn.solution()
        assert 1 <= len(moves) <= sokoban.MAX_MOVES
        for move in moves:
            assert not drawn.is_solved
            drawn = drawn.after(move)
        assert drawn.is_solved


def row(**changes: Any) -> dict[str, Any]:
    curve = [[0, 0.1, 0.05, 64.0], [8, 0.8, 0.06, 64.0]]
    return {
        **{"anchor": "arithmetic", "arm": "qwen", "seed": 0, "curve": curve, "error": "", "cpu_s": 90.0},
        **{"peak_mib": 1234.5, "date": "1 May 2026", "machine": "8 CPU cores (Abacus)", "commit": "0123abcd"},
        **{"command": "agentrl train a.toml", "digest": "ab" * 32},
        **changes,
    }


def test_the_page_is_what_the_records_say(repository: Path) -> None:
    page = (repository / "docs/results/anchors.md").read_text(encoding="utf-8")
    assert page == anchors.page(anchors.read_records()), "run `python -m docs.generators.anchors`"


def test_every_record_is_complete_and_no_seed_is_left_out() -> None:
    records = anchors.read_records()
    for each in records:
        assert (each["anchor"], each["arm"]) in ARMS
        is_recipe = ANCHORS[each["anchor"]].arms[each["arm"]].recipe is not None
        assert each["command"].startswith("agentrl-tinker " if is_recipe else "agentrl train ")
        assert f"--seed={each['seed']}" in each["command"]
        assert each["error"] or re.fullmatch("[0-9a-f]{64}", each["digest"])
    for anchor, arm in ARMS:
        seeds = sorted(each["seed"] for each in records if (each["anchor"], each["arm"]) == (anchor, arm))
        assert seeds == list(range(len(seeds))), f"{anchor}, {arm}: seeds are run in order"


def test_a_page_shows_means_over_seeds_and_failures() -> None:
    low = row(seed=1, curve=[[0, 0.3, 0.05, 64.0], [8, 0.6, 0.06, 64.0]])
    failed = row(seed=2, curve=[], error="killed", cpu_s=None, peak_mib=None, digest="")
    page = anchors.page([row(), low, failed])
    # Student's quantile for two runs is 12.706, and their standard error 0.1.
    assert "| 3, 1 failed | 8 | 0.20 ± 1.27 | 0.70 ± 1.27 |" in page
    assert "| 1, 1 failed | – | – | – |" in anchors.page([failed])


@pytest.mark.parametrize(("last", "improved"), [(0.22, True), (0.18, False), (0.0, False)])
def test_a_run_improved_if_its_intervals_are_apart(last: float, improved: bool) -> None:
    assert command_line.improved(row(curve=[[0, 0.1, 0.05, 64.0], [8, last, 0.06, 64.0]])) is improved
    assert not command_line.improved(row(curve=[]))


def test_a_digest_changes_with_each_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    first = recording.digest(tmp_path)
    (tmp_path / "a" / "one").write_text("2")
    second = recording.digest(tmp_path)
    (tmp_path / "a" / "one").rename(tmp_path / "a" / "two")
    assert len({first, second, recording.digest(tmp_path)}) == 3


def test_what_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that needs the weights of another waits for it, and both are recorded once."""
    commands: list[list[str]] = []

    def wait(arguments: list[str]) -> tuple[int, float, float, str]:
        commands.append(arguments)
        return 1, 2.0, 3.0, "out of memory\n"

    monkeypatch.setattr(recording, "run_python", wait)
    for _ in range(2):
        command_line.measure(tmp_path, ["reverse_text"], None, 0, quick=False)
    assert [command[3] for command in commands] == [
        f"{HERE}/reverse_text_taught.toml",
        f"{HERE}/reverse_text.toml",
    ]
    assert any(setting.endswith("reverse_text-taught-0/policies/writer") for setting in commands[1])
    records = recording.read_records(tmp_path / "results.jsonl")
    assert [(each["arm"], each["error"], each["cpu_s"]) for each in records] == [
        ("taught", "out of memory", 2.0),
        ("rewarded", "out of memory", 2.0),
    ]
    assert not any(map(command_line.improved, records))


def test_a_stopped_run_is_resumed_and_its_cpu_time_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, commands = [130, 0], []

    def wait(arguments: list[str]) -> tuple[int, float, float, str]:
        commands.append(arguments)
        (tmp_path / "arithmetic-qwen-0" / "checkpoints").mkdir(parents=True, exist_ok=True)
        return codes.pop(0), 2.0, 3.0, ""

    monkeypatch.setattr(recording, "run_python", wait)
    with pytest.raises(KeyboardInterrupt):
        command_line.measure(tmp_path, ["arithmetic"], "qwen", 0, quick=False)
    assert recording.read_records(tmp_path / "results.jsonl") == []
    command_line.measure(tmp_path, ["arithmetic"], "qwen", 0, quick=False)
    assert ["--resume" in command for command in commands] == [False, True]
    (record,) = recording.read_records(tmp_path / "results.jsonl")
    assert (record["cpu_s"], record["peak_mib"], record["curve"]) == (None, None, [])


def test_an_unknown_arm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["anchors", "--anchor", "tictactoe", "--arm", "qwen"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="no arm 'qwen'; there are: pool, self"):
        command_line.main()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.* training tasks are also held out")  # all games start from the empty board
def test_a_run_of_self_play_is_trained_scored_and_recorded(tmp_path: Path) -> None:
    """Its first and its last version play against the model that the run started from."""
    command_line.measure(tmp_path, ["tictactoe"], "self", None, quick=True)
    (record,) = recording.read_records(tmp_path / "results.jsonl")
    assert (record["arm"], record["seed"], record["error"]) == ("self", 0, "")
    assert [(step, games) for step, _, _, games in record["curve"]] == [(0, 256), (3, 256)]
    first, half = record["curve"][0][1:3]
    assert abs(first - 0.5) < 3 * half, "the same weights on both sides"
    assert {seat: len(rewards) for seat, rewards in record["training"].items()} == {"first": 3, "second": 3}
    assert record["digest"] == recording.digest(tmp_path / "tictactoe-self-0")
    assert record["cpu_s"] > 1


def test_processes_are_measured_and_stopped_with_the_benchmark(tmp_path: Path) -> None:
    burn = (
        "import time, sys; sys.stderr.write('began\\nended\\n'); kept = bytearray(200 << 20)\n"
        "while time.process_time() < 0.5: pass"
    )
    code, cpu_s, peak_mib, errors = run_python(["-c", burn])
    assert (code, errors) == (0, "began\nended\n")
    assert 0.5 <= cpu_s < 5
    assert peak_mib > 200
    stop = f"import os, signal, time; os.kill(os.getppid(), {signal.SIGINT:d}); time.sleep(60)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        code, *_ = run_python(["-c", stop])
    finally:
        signal.signal(signal.SIGINT, before)
    assert code != 0


RECIPE = """\
import asyncio, json, os, sys
from pathlib import Path
import numpy as np
from packages.tinker.tests.client import Client, row

settings = dict(argument.split("=", 1) for argument in sys.argv[1:])

async def main():
    async with Client(os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"]) as client:
        model = await client.model()
        await client.sampler(model)
        await client.result(await client.forward_backward(model, [row([5, 6, 7], weights=np.ones(2, np.float32))]))
        await client.step(model)
        await client.sampler(model, 1)

asyncio.run(main())
log = Path(settings["log_path"])
log.mkdir()
(log / "metrics.jsonl").write_text(json.dumps({"reward": float(settings["reward"])}) + "\\n" + json.dumps({"other": 1}))
"""
"""A client in place of the cookbook's, which has an environment of its own."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_recipe_trains_through_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tinker_recipes

    (tmp_path / "own_recipe.py").write_text(RECIPE)
    (tmp_path / "server.toml").write_text(CALCULATOR)
    monkeypatch.setattr(tinker_recipes, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = Recipe(
        module="own_recipe", server=str(tmp_path / "server.toml"), settings={"reward": "0.5"}, metric="reward"
    )
    ended, command = recipes.train(recipe, tmp_path / "run", 3, quick=False)
    assert (ended.code, ended.cpu_s > 1, ended.peak_mib > 100) == (0, True, True)
    assert command == (
        f"agentrl-tinker {tmp_path}/server.toml --directory={tmp_path} --name=run --seed=3 & "
        f"python -m own_recipe reward=0.5 log_path={tmp_path}/run/recipe"
    )
    arm = Arm(title="", config="", recipe=recipe)
    assert recipes.training_curve(arm, tmp_path / "run") == {"recipe": [0.5]}
    assert sorted(path.name for path in (tmp_path / "run/versions/calc").iterdir()) == ["1.0", "1.1"]


def test_a_curve_of_several_policies_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        EvaluationLine(policy=policy, step=step, metrics={"reward": reward, "reward_error": 0.1, "tasks": 8.0})
        for policy, step, reward in (("judge", 4, 0.9), ("solver", 4, 0.5), ("solver", 0, 0.2), ("judge", 0, 0.8))
    ]
    reader = SimpleNamespace(evaluations=lambda: lines)
    monkeypatch.setattr(agentrl, "open_run", lambda run: contextlib.nullcontext(reader))
    assert recording.evaluation_curve(Path(), "solver") == [[0, 0.2, 0.1, 8.0], [4, 0.5, 0.1, 8.0]]
