"""The time of a step, measured before a run: `agentrl doctor FILE --time`."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from agentrl.app.time_estimate import TokenSeconds, measure_token_seconds
from agentrl.cli.main import main
from agentrl.config.fields import shipped_example
from agentrl.config.load import load
from agentrl.core.errors import PredictionError

EXAMPLE = shipped_example("01_tool_use")
SECONDS = TokenSeconds(sampling_pass=1.0, sampled=0.5, context=0.1, forwarded=0.01, trained=0.001, update=7.0)


def test_a_step_takes_the_sum_over_its_tokens() -> None:
    seconds = SECONDS.step(passes=2, sampled=20, context=30, forwarded=400, trained=5000)
    assert seconds == pytest.approx(2 + 10 + 3 + 4 + 5 + 7)


def test_the_longest_step_samples_each_episode_in_a_place_of_the_engine() -> None:
    longest = SECONDS.longest_step(episodes=65, slots=64, context=90, sampled=10)
    assert longest == SECONDS.step(passes=20, sampled=650, context=65 * 90, forwarded=6500, trained=650)


def test_doctor_bounds_the_time_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(EXAMPLE), "--time", "--policies.solver.step_size=24", "--json"])
    section = json.loads(capsys.readouterr().out)["sections"]["time of a step in lockstep"]
    results = {check["name"]: check["result"] for check in section}
    assert results.keys() >= {"1,000 sampled tokens", "1,000 context tokens", "1,000 trained tokens", "a new version"}
    assert results["a step"].startswith("at most ")
    assert results["a step"].endswith("if all 24 episodes have 192 tokens, 191 of them sampled")


def test_every_part_of_a_step_is_measured() -> None:
    ticks = count()
    measured = measure_token_seconds(load(EXAMPLE), lambda: float(next(ticks)))
    assert measured.context > 0
    assert measured.forwarded > 0
    assert measured.update == 2.0  # one tick for the optimizer, one for the new version


def test_only_the_embedded_engine_is_measured() -> None:
    config = load(EXAMPLE)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"vllm": {}})})
    with pytest.raises(PredictionError, match="for the embedded engine on CPUs"):
        measure_token_seconds(config, lambda: 0.0)


def test_a_run_has_its_times_already(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(sample_run), "--time"]) == 2
    assert "give other options with a TOML file" in capsys.readouterr().err
