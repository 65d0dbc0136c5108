"""`agentrl simulate`: what a file may say, what it is refused for, and what a terminal and `--json` show."""

from __future__ import annotations

import json
import math
import os
import random
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl.journal.entries import TurnEntry, TurnPause
from agentrl.simulation.calibration import TimedTurn, covered_share, sibling_length_correlation, timed_turn
from agentrl.simulation.plan import SimulationPlan, load
from agentrl.simulation.report import knobs
from tests.support.builders import make_episode_header, make_spec

SMALL = """
[engine]
slots = 8
rates = { 1 = 40, 8 = 30 }
prefill_rate = 2000
kv_tokens = 4000

[trainer]
step_seconds = 5

[policies.solver]
step_size = 16

[credit]
group_size = 4

[environments.Repair]
prompt = 100
tool_seconds = { p50 = 1, p90 = 5, cap = 20 }

[environments.Repair.seats.solver]
turns = { p50 = 2, p90 = 4, cap = 6 }
tokens = { p50 = 100, p90 = 400, cap = 1000 }
"""


def written(directory: Path, *changes: tuple[str, str]) -> str:
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (directory / "plan.toml").write_text(text)
    return str(directory / "plan.toml")


def test_the_example_can_be_simulated(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = repository / "examples" / "07_simulate.toml"
    assert load(example).config(1).trained["solver"].step_size == 128
    assert main(["simulate", str(example), "--as-is", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    for word in ("engines", "trainer", "token lag", "Repair", "bottleneck", "in flight"):
        assert word in shown


def test_knobs_are_tried_and_the_best_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", written(tmp_path), "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    for knob in ("max_staleness", "credit.release", "engine.slots", "engine.replicas", "trainer.step_seconds"):
        assert knob in shown
    assert main(["simulate", written(tmp_path), "--steps", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {
        "engine_busy",
        "trainer_busy",
        "token_lag",
        "steps_per_hour",
        "knobs",
        "advice",
        "bottleneck",
    } <= told.keys()
    by_knob = {(knob["knob"], knob["then"]): knob["throughput"] for knob in told["knobs"]}
    assert by_knob["engine.replicas", 2] > 1.05
    assert by_knob["policies.solver.max_staleness", 0] < 1.0


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "timeline.svg"
    assert main(["simulate", written(tmp_path), "--steps", "3", "--as-is", "--timeline", str(drawn)]) == 0
    shapes = [element.get("class") for element in ElementTree.parse(drawn).iter()]
    assert {"engine", "trainer", "flight"} <= set(shapes)
    assert main(["simulate", written(tmp_path), "--as-is", "--timeline", str(tmp_path / "no" / "where.svg")]) == 74
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("slots = 8", "slotz = 8", "unknown key engine.slotz; did you mean engine.slots?"),
        ("kv_tokens = 4000", "kv_tokens = 1000", "the KV cache of a replica has room for"),
        ("group_size = 4", "group_size = 40", "more than may be in flight"),
        ("[credit]", "max_in_flight = 2\n[credit]", "unknown key policies.solver.max_in_flight"),
        ("group_size = 4", 'group_size = 4\nrelease = "late"\n[policies.x]\nmax_staleness = 0', "x"),
        (
            "p50 = 1, p90 = 5, cap = 20",
            "p50 = 0, p90 = 0, cap = 0",
            "tool_seconds.p50 = 0: expected greater than or equal to 0.000001",
        ),
        ("p50 = 1, p90 = 5, cap = 20", "p50 = 1, p90 = 5, cap = inf", "inf is not a finite number"),
        ("p50 = 1, p90 = 5, cap = 20", "p50 = 1, p90 = 5", "tool_seconds.cap is missing"),
        ("p50 = 1, p90 = 5, cap = 20", "p50 = 9, p90 = 5, cap = 20", "p50 = 9, p90 = 5, cap = 20 must"),
        ("rates = { 1 = 40, 8 = 30 }", "", "rates"),
        ("rates = { 1 = 40, 8 = 30 }", "rates = { one = 40 }", 'engine.rates, key "one": expected a whole number'),
        ("rates = { 1 = 40, 8 = 30 }", "rates = 40", "expected a table { a whole number = a number, ... }"),
        (
            "p50 = 1, p90 = 5, cap = 20",
            'p50 = "1", p90 = 5, cap = 20',
            'p50 = "1": expected a number, without quotes: 1',
        ),
        (
            "{ p50 = 1, p90 = 5, cap = 20 }",
            "5",
            "tool_seconds = 5: expected a table { p50 = ..., p90 = ..., cap = ... }",
        ),
        ("{ p50 = 1, p90 = 5, cap = 20 }", "{ mean = 5 }", "tool_seconds.mean; there are: p50, p90, cap, law, ranks"),
        ("group_size = 4", "group_size = true", "credit.group_size = true: expected a whole number"),
        ("group_size = 4", 'group_size = "8"', 'group_size = "8": expected a whole number, without quotes: 8'),
        ("prompt = 100", "fan_out = 8", "fan_out = 8: expected a table { NAME = a whole number, ... }"),
        (
            "[environments.Repair.seats.solver]",
            "[environments.Repair.seats]",
            "missing: environments.Repair.seats.NAME.turns",
        ),
        ("[policies.solver]", "[policies]", "step_size: a name is missing: policies.NAME.step_size"),
        ("step_size = 16", 'kind = "frozen"', "policies: none is trained"),
        ("[policies.solver]\nstep_size = 16", "[policies]", "policies: none is trained"),
        ("[engine]", "seats = { solver = 5 }\n[engine]", "seats.solver = 5: expected text or a list"),
        ("[engine]", 'seats = { solver = "nobody" }\n[engine]', "plan.toml: seats.solver: no policy 'nobody'"),
        ("[engine]", 'seats = { judge = "solver" }\n[engine]', "plan.toml: seats.judge: Repair has no such seat"),
        ("[trainer]", "policies = 5\n[trainer]", "unknown key engine.policies; did you mean policies?"),
        ("step_seconds = 5", "gpus = 4", "trainer.step_seconds is needed"),
        ("prompt = 100", "fan_out = { Solve = 8 }", "names 'Solve', which is not in [environments]"),
        ("prompt = 100", "fan_out = { Repair = 2 }", "is its own child"),
        ("group_size = 4", "group_size = 10_000_000", "at most 1,000,000 episodes can be simulated"),
        ("prompt = 100", "fan_out = { Repair = 1_000_000 }", "is its own child"),
        (
            "prompt = 100",
            "prompt = 1_000_000_000",
            "environments.Repair.prompt = 1000000000: expected less than or equal",
        ),
        ("prompt = 100", "prompt = 10_000_000", "and at most 1,000,000 blocks can be simulated: lower the prompt"),
        (
            "prompt = 100",
            "tool_tokens = 1_000_000_000_000",
            "environments.Repair.tool_tokens = 1000000000000: expected",
        ),
        ("cap = 1000 }", "cap = 1e308 }", "solver.tokens.cap = 1e+308: expected less than or equal to 10000000"),
        ("cap = 1000 }", 'cap = 1000, law = "measured", ranks = [1, 9000] }', "ranks end at 9000, beyond cap = 1000"),
        ("cap = 6 }", "cap = 1e12 }", "solver.turns.cap = 1000000000000.0: expected less than or equal to 10000000"),
        ("cap = 20 }", "cap = 1e17 }", "tool_seconds.cap = 1e+17: expected less than or equal to 10000000"),
        ("step_seconds = 5", "step_seconds = 1e17", "trainer.step_seconds = 1e+17: expected less than or equal to"),
        ("step_seconds = 5", "step_seconds = 5\npublish_seconds = 1e17", "trainer.publish_seconds = 1e+17: expected"),
        ("1 = 40", "1 = 1e300", "engine.rates.1 = 1e+300: expected less than or equal to 1000000000000000"),
        ("1 = 40", "1 = 5e-324", "engine.rates.1 = 5e-324: expected greater than or equal to 0.001"),
        ("8 = 30", f"{'9' * 400} = 30", "expected less than or equal to 1000000"),
        (
            "prefill_rate = 2000",
            "prefill_rate = 1e-9",
            "engine.prefill_rate = 1e-09: expected greater than or equal to",
        ),
        (
            "slots = 8",
            "slots = 8\nreplicas = 1_000_000_000",
            "engine.replicas = 1000000000: expected less than or equal",
        ),
        ("step_size = 16", "step_size = 16\nmax_staleness = 1_000_000", "until the pipeline is full (2000004 steps)"),
        ("step_size = 16", "step_size = 1_000_000", "until the pipeline is full (6 steps)"),
        ("[environments.Repair", '[environments."a:b"', 'environments, key "a:b": expected a name such as Repair'),
        ("[environments.Repair", "[environments.__dict__", 'environments, key "__dict__": expected a name'),
        ("slots = 8", 'model = "3B"', 'engine.model = "3B": expected'),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    assert main(["simulate", written(tmp_path, (old, new)), "--as-is"]) == 2
    assert says in capsys.readouterr().err


def test_bounds_of_production_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = written(
        tmp_path,
        ("group_size = 4", 'group_size = 4\nrelease = "late"'),
        ("step_size = 16", "step_size = 16\nmax_staleness = 0"),
    )
    assert main(["simulate", late, "--as-is"]) == 2
    assert "max_staleness" in capsys.readouterr().err
    few = written(tmp_path, ("[engine]", "max_in_flight = 2\n[engine]"))
    assert main(["simulate", few, "--as-is"]) == 2
    assert "larger than max_in_flight" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "missing.toml")]) == 2
    assert main(["simulate", few, "--steps", "1"]) == 2


def test_neighbours_that_production_refuses_are_left_out() -> None:
    plan = SimulationPlan.model_validate(tomllib.loads(SMALL))
    names = [(knob.name, knob.then) for knob in knobs(plan)]
    assert ("policies.solver.max_staleness", 0) in names
    assert ("policies.solver.max_staleness", -1) not in names
    still = plan.model_copy(
        update={"policies": {"solver": plan.policies["solver"].model_copy(update={"max_staleness": 0})}}
    )
    assert ("credit.release", "late") not in [(knob.name, knob.then) for knob in knobs(still)]


# --- from a run -------------------------------------------------------------------------------------------------------


def test_a_run_is_simulated_and_shown_beside_itself(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--from", str(sample_run), "--as-is", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["plan"]["environments"]) == ["Propose", "Solve"]
    assert list(told["plan"]["environments"]["Propose"]["fan_out"]) == ["Solve"]
    for found in (told["measured"], told["simulated"]):
        assert 0 < found["engine"] <= 1 + 1e-9
        assert 0 < found["trainer"] <= 1 + 1e-9
        assert found["steps_per_hour"] > 0
    (tmp_path / "what_if.toml").write_text("[policies.solver]\nmax_staleness = 3\n")
    assert main(["simulate", str(tmp_path / "what_if.toml"), "--from", str(sample_run), "--as-is"]) == 0
    assert "beside the real run" in capsys.readouterr().out
    (tmp_path / "bad.toml").write_text("[policies.solver]\nstaleness = 3\n")
    assert main(["simulate", str(tmp_path / "bad.toml"), "--from", str(sample_run), "--as-is"]) == 2
    assert "unknown key policies.solver.staleness" in capsys.readouterr().err


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "plan.toml")
    assert main(["simulate", str(tmp_path / "plan.toml")]) == 2
    assert "plan.toml: not a regular file" in capsys.readouterr().err


def test_without_file_and_run_there_is_nothing_to_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "--from RUN" in capsys.readouterr().err
    assert main(["simulate", "--from", str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err


def test_a_turn_is_what_it_took_the_engine() -> None:
    """Ten seconds, six of which it was parked; of a context of 100 tokens, 20 of them new, a cache held 70."""
    entry = TurnEntry(
        seat="solver",
        index=0,
        policy="policy",
        row=0,
        turn=1,
        context_ids=np.zeros(20, "<i4").tobytes(),
        token_ids=np.zeros(5, "<i4").tobytes(),
        logprobs=b"",
        finish_reason="stop",
        spans=(),
        text="",
        messages=(),
        temperature=1.0,
        seconds=10.0,
        started=100.0,
        cached_tokens=70,
        parent_context=80,
        pauses=(TurnPause(2, 4.0, "parked"), TurnPause(3, 2.0, "engine_lost")),
    )
    assert timed_turn(entry) == TimedTurn(106.0, 110.0, tokens=5, context=20, computed=30)
    for broken in ({"token_ids": b""}, {"seconds": 6.0}, {"seconds": math.nan}, {"seconds": math.inf}):
        assert timed_turn(msgspec.structs.replace(entry, **broken)) is None, broken


def test_time_is_covered_once() -> None:
    assert covered_share([(0, 2), (1, 3), (5, 9), (6, 7)], begin=1, end=11) == pytest.approx(0.6)


def test_children_without_number_are_refused_at_once(tmp_path: Path) -> None:
    """Forty kinds, each the child of all before it: as many ways as 2^39."""
    kinds = [
        f"[environments.e{number}]\nfan_out = {{ {', '.join(f'e{child} = 1' for child in range(number + 1, 40))} }}\n"
        f"[environments.e{number}.seats.s]\ntokens = {{ p50 = 1, p90 = 2, cap = 3 }}\n"
        for number in range(40)
    ]
    file = tmp_path / "plan.toml"
    file.write_text("[engine]\nrates = { 1 = 80 }\n[trainer]\nstep_seconds = 1\n" + "".join(kinds))
    with pytest.raises(ConfigError, match="nests deeper than 3"):
        load(file)


@pytest.mark.parametrize("likeness", [0.0, 0.5, 0.9])
def test_the_likeness_of_siblings_is_found(likeness: float) -> None:
    draw = random.Random(4)
    members = []
    for group in range(400):
        common = draw.gauss(0, math.sqrt(likeness))
        for member in range(4):
            spec = make_spec(f"e{4 * group + member}", group_id=f"g{group}")
            z = common + draw.gauss(0, math.sqrt(1 - likeness))
            members.append((spec, make_episode_header(spec, tokens=round(math.exp(6.0 + 1.2 * z)))))
    assert sibling_length_correlation(members) == pytest.approx(likeness, abs=0.05)
    assert sibling_length_correlation(members[:1]) == 0.0
