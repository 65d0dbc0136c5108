"""The commands a newcomer types, in processes of their own: train, interrupt, resume, look, load."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.markdown_pages import blocks, python_of
from tests.support import warm

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ["--steps=3", "--evaluation.tasks=16", "--policies.solver.step_size=16", "--max_in_flight=64"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", *arguments]


def run(directory: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    finished = warm.command(directory, *arguments)
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def trained(repository: Path, workplace: Path) -> Iterator[Path]:
    """A short run of the main job with Ray and everything."""
    example = str(repository / "examples/01_tool_use.toml")
    run(workplace, "train", example, "--name=demo", "--cluster.address=local", *SMALL)
    return workplace / "runs" / "demo"


def test_a_run_leaves_its_summary_its_metrics_and_its_policy(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 3
    assert len(summary["rewards"]) == 3
    assert 0.0 <= summary["reward_start"] <= 1.0
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 5, "three steps, two evaluations"
    assert summary["engine_busy_share"] > 0
    assert summary["trainer_busy_share"] > 0


@pytest.mark.exhaustive
def test_an_episode_can_be_forked_at_its_turns(trained: Path) -> None:
    import agentrl
    from agentrl.app.forks import find_parent, weights_at_fork_point
    from agentrl.inspection.reader import RunReader

    reader = RunReader(trained)
    line = reader.episodes("turns > 1 and purpose = 'train'", limit=1)[0]
    reader.close()
    first, second = agentrl.fork(trained, line.episode, at=1, n=2)
    assert [header.purpose for header in (first, second)] == ["fork", "fork"]
    policy = trained / "policies" / line.policies[0]
    (again,) = agentrl.fork(trained / "forks", first.episode_id, at=-1, policy=policy)
    forks = RunReader(trained / "forks")
    assert {view.episode for view in forks.episodes()} == {first.episode_id, second.episode_id, again.episode_id}
    assert forks.episode(again.episode_id).problems == []
    forks.close()
    given = weights_at_fork_point(find_parent(trained / "forks" / "journal", again.episode_id, None, -1))
    assert policy.resolve() in [Path(weights.path) for weights in given], "not the run's, whatever they were called"
    (after,) = agentrl.fork(trained / "forks", again.episode_id, at=-1)
    assert after.drop_reason is None


def test_the_policy_loads_with_from_pretrained(trained: Path, tmp_path: Path) -> None:
    (script := tmp_path / "load.py").write_text(
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "text = tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False)\n"
        "print(sum(p.numel() for p in model.parameters()), 'hi' in text)"
    )
    finished = warm.script(tmp_path, script, str(trained / "policies" / "solver"))
    assert finished.returncode == 0, finished.stderr
    parameters, rendered = finished.stdout.split()
    assert int(parameters) > 100_000
    assert rendered == "True"


def test_the_run_can_be_looked_at(trained: Path, workplace: Path) -> None:
    [line] = json.loads(run(workplace, "run", "list", "--json").stdout)
    assert line["name"] == "demo"
    listed = json.loads(run(workplace, "episode", "list", "demo", "--json").stdout)
    trained_ones = [episode for episode in listed if episode["episode"].startswith("e")]
    shown = run(workplace, "episode", "show", "demo", trained_ones[0]["episode"]).stdout
    assert "calculate" in shown
    assert "reward" in run(workplace, "run", "curve", "demo").stdout


@pytest.mark.exhaustive
def test_the_commands_of_the_readme_work(repository: Path, trained: Path, workplace: Path) -> None:
    (workplace / "examples").symlink_to(repository / "examples")
    shown = [line for block in blocks(repository / "README.md") for line in block.text.splitlines()]
    lines = [line.split("#")[0] for line in shown if line.startswith("agentrl ")]
    lines = [line for line in lines if not line.startswith("agentrl run serve")]  # serves until it is stopped
    assert len(lines) >= 4
    listed = json.loads(run(workplace, "episode", "list", "demo", "--json").stdout)
    episode = next(episode["episode"] for episode in listed if episode["episode"].startswith("e"))
    [code] = python_of(repository / "README.md")
    (workplace / "my_env.py").write_text(code, encoding="utf-8")
    for line in lines:
        arguments = [episode if argument == "e100" else argument for argument in shlex.split(line)[1:]]
        run(workplace, *arguments, *(SMALL if arguments[0] == "train" else ()))
    assert json.loads((workplace / "runs/mine/summary.json").read_text())["held_out_tasks"] == 10, "there are no more"


def test_a_run_directory_is_not_overwritten(repository: Path, trained: Path, workplace: Path) -> None:
    before = (trained / "summary.json").read_bytes()
    example = str(repository / "examples/01_tool_use.toml")
    refused = run(workplace, "train", example, "--name=demo", *SMALL, code=2)
    assert "--resume" in refused.stderr
    assert (trained / "summary.json").read_bytes() == before


def test_a_trained_policy_can_be_evaluated(repository: Path, trained: Path, workplace: Path) -> None:
    example = str(repository / "examples/01_tool_use.toml")
    policy = str(trained / "policies" / "solver")
    kept = ("--policy", policy, "--tasks", "16", "--journal", "evaluations/first")
    answer = run(workplace, "evaluate", example, *kept, "--json").stdout
    metrics = json.loads(answer)
    assert metrics.pop("path") == "evaluations/first"
    assert metrics["evaluation/episodes"] == 16
    assert 0.0 <= metrics["evaluation/reward"] <= 1.0
    (listed,) = json.loads(run(workplace, "run", "list", "evaluations", "--json").stdout)
    assert (listed["name"], listed["purpose"], listed["episodes"]) == ("first", "evaluate", 16)
    assert listed["rewards"]["solver"] == pytest.approx(metrics["evaluation/reward"])
    assert (
        json.loads(run(workplace, "run", "metrics", "evaluations/first", "--json").stdout)["solver"].items()
        >= metrics.items()
    )
    curve = json.loads(
        run(workplace, "run", "curve", "evaluations/first", "--metric=evaluation/reward", "--json").stdout
    )
    assert [point["step"] for point in curve] == [0], "the journal has it too"


def test_ctrl_c_writes_a_checkpoint_and_resume_goes_on(repository: Path, tmp_path: Path) -> None:
    example = str(repository / "examples/01_tool_use.toml")
    arguments = ["train", example, "--name=long", *SMALL, "--steps=400", "--evaluation.tasks=0"]
    with subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/"):
                break
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=280)
    assert process.returncode == 130, said
    summary = json.loads((tmp_path / "runs/long/summary.json").read_text())
    went_on = shlex.join(["agentrl", *arguments, "--resume"])
    assert f"stopped; to continue: {went_on}\n" in said
    assert json.loads(run(tmp_path, "run", "list", "--json").stdout)[0]["state"] == "stopped"
    reached = summary["steps"]
    assert (tmp_path / "runs/long/checkpoints" / f"step_{reached:06d}-0" / "manifest.json").is_file()

    arguments[arguments.index("--steps=400")] = f"--steps={reached + 2}"
    told = run(tmp_path, *arguments, "--resume").stderr
    assert f"checkpoint step_{reached:06d}-0 " in told
    assert f"was 400 and is {reached + 2}" in told
    resumed = json.loads((tmp_path / "runs/long/summary.json").read_text())
    assert resumed["steps"] == len(resumed["rewards"]) == reached + 2
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/long/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, reached + 3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.lerning_rate=1"], "trainer.lerning_rate"),
        (["--steps=many"], "steps"),
        (["--model.path=/nowhere"], "/nowhere"),
        (["--environment.id=calculater"], "did you mean 'calculator'"),
        (["--resume"], "nothing to resume"),
        (["--credit.group_size=512"], "group_size"),
        (["--engine.refresh=lazy"], "one version of full weights"),
    ],
)
def test_bad_input_is_one_clear_message(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    example = str(repository / "examples/01_tool_use.toml")
    assert main(["train", example, "--name=bad", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs" / "bad" / "journal").exists(), "nothing half-made is left"
