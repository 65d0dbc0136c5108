"""The benchmark beside other libraries: reading logs, summarizing runs, and the tables made from them."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.load import load
from benchmarks.peers import summary
from benchmarks.peers.__main__ import PARTS, combined, overrides, settings_of, staleness, training_began
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS, lines_of_code, user_files
from benchmarks.peers.contestants import progress, words
from benchmarks.peers.running import Life, Samples, at, machine_cpu_seconds, read_log
from benchmarks.peers.trainings import TRAININGS
from docs.generators import peers


def record(contender: str, seed: int, **measured: Any) -> dict[str, Any]:
    constants = {"title": contender.upper(), "lines": 50, "packages": 70, "megabytes": 1234.5}
    constants["settings"] = {"staleness": "4", "versions": "trl==1.16.0"}
    constants |= {"date": "1 May 2026", "machine": "8 CPU cores (Abacus)", "commit": "0123abcd"}
    return {"contender": contender, "seed": seed, "proposer_and_solver": False, **constants, **measured}


STEPS = {"wall_per_step": 0.5, "cpu_per_step": 0.25, "tokens_sampled": 400.0, "tokens_wasted": 100.0}
RECORDS = [
    *(
        record("agentrl_vllm", seed, wall_s=10.0 + seed, cpu_s=8.0, steps_to_goal=9, **STEPS | {"tokens_wasted": 0})
        for seed in range(5)
    ),
    *(
        record("trl_async_merged", seed, wall_s=wall, cpu_s=16.0, steps_to_goal=wall and 12, **STEPS)
        for seed, wall in enumerate([20.0, 20.0, 20.0, 20.0, None])
    ),
]


def test_a_run_that_missed_the_goal_is_the_slowest_in_ratios() -> None:
    values = summary.ratios(RECORDS, "wall_over_trl_async_merged")
    assert values == {0: 0.5, 1: 0.55, 2: 0.6, 3: 0.65, 4: 0.0}
    assert summary.ratios(RECORDS, "wall_over_naive") == {}
    embedded = [record("agentrl_embedded", seed, wall_s=wall) for seed, wall in enumerate([47.0, None, 68.0, None])]
    naive = [record("naive", seed, wall_s=wall) for seed, wall in enumerate([64.0, 42.5, 64.0, None])]
    values = list(summary.ratios([*embedded, *naive], "wall_over_naive").values())
    assert values == [47 / 64, math.inf, 68 / 64, 1.0]
    assert summary.quartiles(values[:3]) == [47 / 64, 68 / 64, None]


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=9), st.integers(0, 3))
def test_quartiles_are_those_of_a_very_slow_run(finished: list[float], missed: int) -> None:
    """Replacing what never arrived by a number far above all others changes only the quartiles that it touches."""
    ours = summary.quartiles([*finished, *[math.inf] * missed])
    assert ours is not None
    slow = statistics.quantiles([*finished, *[1e15] * missed], n=4, method="inclusive")
    for mine, theirs in zip(ours, slow, strict=True):
        assert theirs > 1e13 if mine is None else mine == pytest.approx(theirs, abs=1e-6)


def test_a_report_has_medians_quartiles_and_the_runs_that_missed() -> None:
    report = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    assert report["figures"]["cpu_over_trl_async_merged"] == 0.5
    assert report["figures"]["wall_over_naive"] is None
    assert report["quartiles"]["wall_over_trl_async_merged"] == [0.5, 0.55, 0.6]
    assert report["seeds"]["wall_over_trl_async_merged"] == [0, 1, 2, 3, 4]
    assert report["table"]["agentrl_vllm"]["wall_s"] == [11.0, 12.0, 13.0]
    theirs = report["table"]["trl_async_merged"]
    assert (theirs["wall_s"], theirs["runs"], theirs["commit"]) == ([20.0, 20.0, 20.0], 5, "0123abcd")
    assert json.loads(json.dumps(report)) == report


def test_a_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_log(path) == []
    path.write_text('{"t": 5.0, "begin": true}\n{"t": 7.5, "step": 1, "sampled": 9, "trained": 9}\n{"t": 9')
    life = Life(events=read_log(path))
    assert life.begin == 5.0
    assert [step["t"] for step in life.steps] == [7.5]


def test_an_observer_of_agentrl_counts_the_tokens_of_a_moving_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(progress.SETTINGS, "log", str(tmp_path / "log.jsonl"))
    observer, readings = progress.AgentrlObserver(), [(0.0, 0.0)]
    for step, tokens in enumerate([100.0, 40.0, 0.0, 70.0, 90.0, 80.0, 20.0, 60.0], start=1):
        readings.append((readings[-1][0] + 0.5 * step, readings[-1][1] + tokens))
        (since, before), (now, total) = readings[-6:][0], readings[-1]
        metrics = {"run/seconds": now, "step/tokens": 50, "tokens/sampled_per_s": (total - before) / (now - since)}
        metrics |= {"staleness/mean": step / 2, "staleness/max": step, "episodes/dropped": 3 * step}
        observer.on_step("solver", step, metrics)
    begin, *steps = read_log(tmp_path / "log.jsonl")
    assert staleness(Life(events=[begin, *steps])) == {
        "staleness_mean": 2.25,
        "staleness_max": 8,
        "episodes_dropped": 24,
    }
    assert staleness(Life(events=[{"t": 1.0, "step": 1, "sampled": 9, "trained": 9}])) == {}
    assert [round(step["sampled"], 6) for step in steps] == [100, 40, 0, 70, 90, 80, 20, 60]
    assert steps[0]["t"] - begin["t"] == pytest.approx(0.5, abs=1e-3)


def test_readings_are_interpolated_between_two_moments() -> None:
    samples = Samples(cpu=[(0.0, 1.0), (10.0, 3.0), (20.0, 9.0)])
    assert samples.cpu_between(5.0, 15.0) == pytest.approx(4.0)
    assert at(samples.cpu, -1.0) == 1.0
    assert at(samples.cpu, 99.0) == 9.0


def test_cores_of_others_are_those_of_the_machine_without_the_run() -> None:
    samples = Samples(cpu=[(0.0, 1.0), (10.0, 11.0)], machine=[(0.0, 500.0), (10.0, 513.0)])
    assert samples.cores_of_others(0.0, 10.0) == pytest.approx(0.3)
    assert samples.cores_of_others(5.0, 10.0) == pytest.approx(0.3)


def test_a_machine_has_spent_no_more_than_its_cores_could() -> None:
    spent, uptime = machine_cpu_seconds(), float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < spent <= 1.01 * uptime * (os.cpu_count() or 1)


def test_training_begins_when_the_server_first_samples_even_if_the_trainer_counts_later() -> None:
    life = Life(events=[{"t": 30.0, "begin": True}])
    assert training_began(Samples(), life) == 30.0
    assert training_began(Samples(tokens=[(10.0, 0.0), (20.0, 0.0), (21.0, 5.0)]), life) == 20.0
    assert training_began(Samples(tokens=[(29.0, 0.0), (31.0, 0.0), (32.0, 5.0)]), life) == 30.0


def test_lines_of_code_leave_out_what_the_benchmark_adds() -> None:
    for files in (user_files(contender, part) for contender in CONTENDERS.values() for part in contender.seeds):
        whole = sum(len((SCRIPTS / name).read_text().splitlines()) for name in files)
        assert 0 < lines_of_code(files) < whole


def test_a_word_problem_is_answered_by_its_calculation() -> None:
    assert words.prompt("What is 2 times 3?")[-1] == {"role": "user", "content": "What is 2 times 3?"}
    assert words.reward(" 412 * 37\n", "15244") == 1.0
    assert words.reward("37 * 412", "15244") == 1.0
    assert words.reward("412 + 37", "15244") == 0.0
    assert words.reward("15244", "15244") == 0.0, "the model cannot multiply such numbers, only guess"
    assert words.reward("412 * 37 = 15244", "15244") == 0.0


def test_tables_come_from_the_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = combined({"calculator": summary.report("calculator", quick=False, goal=0.9, records=RECORDS)})
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("Before.\n<!-- peers -->\nold\n<!-- /peers -->\nAfter.\n")
    (tmp_path / "docs" / "peers.json").write_text(json.dumps(line))
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["peers"])
    peers.main()
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("Before.\n<!-- peers -->\n")
    assert readme.endswith("<!-- /peers -->\nAfter.\n")
    assert "\nold\n" not in readme
    assert "| May 2026, 8 CPU cores (Abacus) | s/step, agentrl |" in readme
    assert "| Calculator, 0.84 M parameters (5 seeds) | 0.5 | 0.5 | 0 | 25% |" in readme
    page = (tmp_path / "docs/results/benchmarks.md").read_text()
    assert "| agentrl, vLLM, merged LoRA | 0.5 | 12 (11 to 13) | 5 of 5 | 8 | 0 |" in page
    assert "| TRL async, vLLM, merged LoRA | 0.5 | 20 | 4 of 5 | 16 | 25% |" in page
    assert "| 0, 1, 2, 3, 4 | 1 | 0.55 (0.5 to 0.6) | 0.5 |" in page
    assert "1 May 2026, 8 CPU cores (Abacus)." in page
    assert "seconds lost" not in page, "a column that nobody measured"


def test_word_problems_have_a_table_and_ratios_of_their_own() -> None:
    calculator = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    assert "Word problems" not in peers.page(combined({"calculator": calculator}))
    slower = [{**each, "cpu_s": 32.0} if each["contender"] == "agentrl_vllm" else each for each in RECORDS]
    problems = summary.report("word_problems", quick=False, goal=0.8, records=slower)
    page = peers.page(combined({"calculator": calculator, "word_problems": problems}))
    first, own = page.split("## Word problems")
    assert "seconds to 0.8" in own
    assert "both with a merged LoRA | 0, 1, 2, 3, 4 | 1 | 0.55 (0.5 to 0.6) | 2 |" in own
    assert "both with a merged LoRA | 0, 1, 2, 3, 4 | 1 | 0.55 (0.5 to 0.6) | 0.5 |" in first


def test_curves_are_compared_step_by_step() -> None:
    rewards = {"agentrl_lockstep": (0.4, 0.6), "trl_sync": (0.5, 0.5), "naive": (0.3, 0.5)}
    records = [
        record(name, seed, curve={"3": values[seed], "6": 1.0, **({"9": 1.0} if name == "naive" else {})}, steps=6)
        for name, values in rewards.items()
        for seed in (0, 1)
    ]
    report = summary.report("curves", quick=False, goal=None, records=records)
    assert report["curves"]["agentrl_lockstep"]["3"] == pytest.approx([0.5, 12.706 * 0.1])
    assert report["curves"]["trl_sync"]["3"] == [0.5, 0.0]
    _, own = peers.page(combined({"curves": report})).split("## The same algorithm in two trainers")
    assert "Up to step 6, the mean held-out reward of 2 seeds of agentrl in lockstep differs" in own
    assert "by at most 0.000 ± 1.271, at step 3." in own


def test_every_recorded_seed_counts() -> None:
    records = [*RECORDS[:-2], record("trl_async_merged", 4, wall_s=None, cpu_s=9.0, steps_to_goal=None, **STEPS)]
    report = summary.report("calculator", quick=False, goal=0.9, records=records)
    rows = report["table"]
    assert {name: (row["reached"], row["runs"]) for name, row in rows.items()} == {
        "agentrl_vllm": (5, 5),
        "trl_async_merged": (3, 4),
    }
    assert report["seeds"]["step_over_trl_async_merged"] == [0, 1, 2, 4], "those that both sides ran"
    page = peers.page(combined({"calculator": report}))
    assert "| agentrl, vLLM, merged LoRA | 0.5 | 12 (11 to 13) | 5 of 5 |" in page
    assert "| 3 of 4 |" in page


def test_the_settings_of_every_contestant_of_agentrl_load() -> None:
    for contender in CONTENDERS.values():
        for part in TRAININGS.keys() & contender.seeds.keys():
            words = settings_of(contender, part, TRAININGS[part])
            assert set(words) >= {"weights", "staleness", "in_flight", "threads", "learning_rate", "clip"}


def test_rows_without_a_setting_of_agentrl_have_the_settings_of_their_peers() -> None:
    for part, training in TRAININGS.items():
        rows = {name: settings_of(contender, part, training) for name, contender in CONTENDERS.items()}
        pairs = {"agentrl_lockstep": "naive", "agentrl_vllm_adapter": "trl_async", "agentrl_vllm": "trl_async_merged"}
        for ours, theirs in pairs.items():
            for setting in {"weights", "in_flight", "learning_rate"} | rows[ours].keys() & {"bad_call"}:
                assert rows[ours][setting] == rows[theirs][setting], (part, ours, setting)
        assert rows["agentrl_vllm_adapter"]["clip"] == rows["trl_async"]["clip"] == "0.2"
        ours = load(SCRIPTS / "agentrl_vllm.toml", overrides(CONTENDERS["agentrl_vllm"], training))
        assert str(ours.max_in_flight) == rows["trl_async"]["in_flight"], "not only those in the engine"
        assert rows["agentrl_lockstep"]["staleness"] == rows["naive"]["staleness"] == "0"
        assert rows["agentrl_vllm_adapter"]["staleness"] == "at most 4, older tokens masked"
        for theirs in ("trl_async", "trl_async_merged"):
            assert rows[theirs]["staleness"] == "at most 4, older dropped"
    adapter, merged = (
        load(SCRIPTS / "agentrl_vllm.toml", overrides(CONTENDERS[name], TRAININGS["calculator"]))
        for name in ("agentrl_vllm_adapter", "agentrl_vllm")
    )
    assert adapter.policies["solver"].lora is not None
    assert not adapter.policies["solver"].lora.merge
    assert adapter.policies["solver"].model_dump()["max_lag"] == 4
    assert adapter.engine == merged.engine


def test_the_pages_are_what_the_saved_line_says(repository: Path) -> None:
    line = json.loads((repository / "docs" / "peers.json").read_text(encoding="utf-8"))
    assert (repository / "docs/results/benchmarks.md").read_text(encoding="utf-8") == peers.page(line)
    assert peers.readme_section(line) in (repository / "README.md").read_text(encoding="utf-8")
    for part, report in line["parts"].items():
        again = {name: report[name] for name in ("quick", "goal", "records")}
        assert json.loads(json.dumps(summary.report(part, **again))) == report, "figures of an older routine"


def test_contestants_take_part_in_known_parts() -> None:
    assert {part for contender in CONTENDERS.values() for part in contender.seeds} == set(PARTS)
    assert CONTENDERS["verifiers"].seeds == {"orchestration": math.inf}
    assert {part for part, seeds in CONTENDERS["naive"].seeds.items() if seeds == math.inf} == {
        "calculator",
        "curves",
        "word_problems",
    }
    assert CONTENDERS["agentrl_vllm"].seeds["tools"] == math.inf


def test_quick_runs_make_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = combined({"calculator": summary.report("calculator", quick=True, goal=0.6, records=RECORDS)})
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(line))
    monkeypatch.setattr("sys.argv", ["peers", str(path)])
    with pytest.raises(SystemExit, match="quick run"):
        peers.main()


def test_the_readme_has_a_place_for_the_table(repository: Path) -> None:
    assert len(peers.MARKERS.findall((repository / "README.md").read_text())) == 1
