"""Harbor task directories: played with a shell, graded by their own tests, and refused with the line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.cli.main import main
from agentrl.core.errors import CheckFailedError, EnvironmentDefinitionError
from agentrl.testing.check import check_environment
from agentrl.testing.execution import play
from agentrl_formats.harbor import Harbor, HarborTask, checked_rewards, read_task
from agentrl_formats.harbor import main as list_tasks
from tests.support.checks import keep_checks
from tests.support.harbor_suite import ANSWERS, MEDIAN, ROOTS, WORD, write_suite, write_task

EXPECTED = {
    ("median", "right"): 1.0,
    ("median", "odd only"): 0.5,
    ("median", "nothing"): 0.0,
    ("median", "its own tests"): 0.0,
    ("median", "its own verdict"): 0.0,
    ("word", "right"): 1.0,
    ("word", "elsewhere"): 0.0,
    ("word", "wrong"): 0.0,
    ("word", "nothing"): 0.0,
}


def tasks_of(top: Path, **options: Any) -> dict[str, agentrl.Task]:
    tasks = Harbor.tasks("train", **{"directory": str(top), "roots": ROOTS, "held_out": 0.0, **options})
    return {task.id: task for task in tasks}  # type: ignore[attr-defined]


def reward_of(task: agentrl.Task, *commands: str) -> float:
    return play(Harbor, task, [*({"name": "bash", "arguments": {"command": c}} for c in commands), "done"]).reward


@pytest.mark.needs("bubblewrap")
def test_a_suite_is_graded_by_its_tests(tmp_path: Path) -> None:
    tasks = tasks_of(write_suite(tmp_path))
    graded = {
        (name, kind): reward_of(tasks[name], command)
        for name, answers in ANSWERS.items()
        for kind, command in answers.items()
    }
    assert graded == EXPECTED


@pytest.mark.needs("bubblewrap")
def test_the_sandbox_is_what_the_dockerfile_says(tmp_path: Path) -> None:
    task = tasks_of(write_suite(tmp_path))["median"]
    commands = ["pwd; find . -type f | sort; echo $STYLE$A", "./tools/show.sh", "cat /tests/test.sh; touch /usr/x"]
    replies = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    result = play(Harbor, task, [*replies, "done"])
    assert result.observations[0] == MEDIAN["instruction.md"]
    assert result.observations[1] == "/app\n./stats.py\n./tools/show.sh\nplain1"
    assert result.observations[2] == "stats.py\ntools"
    assert "No such file" in result.observations[3]
    assert "Read-only" in result.observations[3]


@pytest.mark.needs("bubblewrap")
def test_it_resumes_from_every_entry_and_is_a_snapshot(tmp_path: Path) -> None:
    report = check_environment(Harbor, options={"directory": str(write_suite(tmp_path)), "roots": ROOTS}, episodes=1)
    assert not report.findings
    assert report.figures["resume_class"] == "snapshot"
    assert "bash" in report.figures["called"]


@pytest.mark.needs("bubblewrap")
def test_a_root_directory_takes_the_place_of_the_built_image(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("tmp", "proc", "dev", "opt/program"):
        (root / name).mkdir(parents=True)
    for program in ("/bin/sh", "/bin/bash", "/bin/cat", "/bin/chmod"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in {program, *re.findall(r"/\S+", listed)}:
            (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / file[1:])
    (root / "opt/program/installed").write_text("by RUN\n")
    dockerfile = "FROM x\nRUN install\nWORKDIR /data\nCOPY gone .\nENV WORD=green\nENV WORD=amber\n"
    files = {**WORD, "environment/Dockerfile": dockerfile}
    task = tasks_of(write_task(tmp_path / "tasks" / "built", files).parent, roots={"built": str(root)})["built"]
    assert reward_of(task, "echo $WORD > word.txt") == 1.0
    assert reward_of(task, "cat /opt/program/installed > word.txt") == 0.0


REFUSED = {
    "Dockerfile, line 2: RUN needs an image": {"environment/Dockerfile": "FROM ubuntu:24.04\nRUN apt-get update\n"},
    "Dockerfile, line 1: FROM: neither options": {"environment/Dockerfile": "FROM --platform=x ubuntu:24.04\n"},
    "line 3: FROM: builds of several stages": {"environment/Dockerfile": "FROM ubuntu:24.04\n\nFROM python:3.12\n"},
    "needs the image img": {"environment/Dockerfile": "FROM img\\"},
    "needs the image other": {"environment/Dockerfile": "# a comment\nFROM other \\\n"},
    "line 2: RUN needs an image": {"environment/Dockerfile": "FROM ubuntu:24.04\nRUN install\\"},
    "Dockerfile: it names no image": {"environment/Dockerfile": ""},
    "it names no image (there is none, or no FROM)": {"environment/Dockerfile": "FROM ''\nWORKDIR /app\n"},
    "line 2: COPY: there is no nothing": {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY nothing /app/\n"},
    "line 2: COPY: ../secret is outside": {
        "environment/Dockerfile": "FROM ubuntu:24.04\nCOPY ../secret /app/\n",
        "secret": "",
    },
    "line 2: WORKDIR: variables": {"environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR $HOME\n"},
    "needs the image alpine:3": {"environment/Dockerfile": "FROM alpine:3\n"},
    "line 3: 'apt-get install' needs a network while grading": {
        "tests/test.sh": "#!/bin/sh\n# curl\napt-get install -y x\n"
    },
    "line 2: 'uvx' needs a network": {"tests/test.sh": "#!/bin/sh\nuvx pytest\n"},
    "steps: tasks of several steps": {"task.toml": "[[steps]]\nname = 'one'\n"},
    "environment.mcp_servers: servers beside": {"task.toml": "[[environment.mcp_servers]]\nname = 'x'\n"},
    "environment.gpus: GPUs": {"task.toml": "[environment]\ngpus = 1\n"},
    "environment.os: only linux": {"task.toml": "[environment]\nos = 'windows'\n"},
    "env.KEY: a variable of this machine": {"task.toml": "[environment.env]\nKEY = '${KEY}'\n"},
    "'2T' is not a size": {"task.toml": "[environment]\nmemory = '2T'\n"},
    "task.toml: Expected '='": {"task.toml": "[environment]\nno\n"},
    "memory_mb = 999999999999999999999999999999 is too large": {
        "task.toml": f"[environment]\nmemory_mb = {'9' * 30}\n"
    },
    "seconds = inf is too large": {"task.toml": "[verifier]\ntimeout_sec = inf\n"},
    "int too large": {"task.toml": f"[verifier]\ntimeout_sec = 1{'0' * 400}\n"},
    "'app' is not an absolute path": {"task.toml": "[environment]\nworkdir = 'app'\n"},
    "task.toml: 3 must be a string": {"task.toml": "[environment]\nworkdir = 3\n"},
    "task.toml: maximum recursion": {"task.toml": f"a = {'[' * 9000}{']' * 9000}"},
    "environment variable 'A=B' is unusable": {"task.toml": "[verifier.env]\n'A=B' = 'c'\n"},
    "/etc cannot be writable": {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY . ../../etc\n"},
    "/ cannot be writable": {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY Dockerfile /\n"},
    "longer than 1,048,576 bytes": {"environment/Dockerfile": "#" * (1 << 20) + "\n"},
    "docker-compose.yaml: several services": {"environment/docker-compose.yaml": ""},
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_cannot_be_honored_is_refused_with_the_line(refusal: str, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", {**WORD, **REFUSED[refusal]})
    refusals = read_task(directory, ROOTS).refusals
    assert len(refusals) == 1
    assert refusal in refusals[0]
    with pytest.raises(EnvironmentDefinitionError, match="cannot be honored"):
        Harbor.tasks("train", directory=str(tmp_path), roots=ROOTS)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "environment/Dockerfile", "task.toml"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", WORD)
    (directory / missing).unlink()
    assert str(directory / missing) in read_task(directory, ROOTS).refusals[0]


@pytest.mark.parametrize("name", ["instruction.md", "tests", "environment/Dockerfile"])
def test_a_link_out_of_the_task_is_refused(name: str, tmp_path: Path) -> None:
    """It would show the policy a file of this machine."""
    directory = write_task(tmp_path / "task", WORD)
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert read_task(directory, ROOTS).refusals[0] == f"{directory / name}: a link leads out of the task"


def test_tests_may_use_an_open_network(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", {**WORD, "tests/test.sh": "#!/bin/sh\ncurl http://x\n"})
    assert read_task(directory, ROOTS, network="open").refusals == []


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"no \S+task\.toml"):
        Harbor.tasks("train", directory=str(tmp_path))


VERDICTS = {
    "neither reward.json nor reward.txt": "true",
    "could not convert": "echo one > /logs/verifier/reward.txt",
    "reward = nan, which is no number from 0 to 1": "echo nan > /logs/verifier/reward.txt",
    "reward = 101.0, which": "echo 101 > /logs/verifier/reward.txt",
    "declared rewards are reward": """echo '{"reward": 1, "x": 99}' > /logs/verifier/reward.json""",
    "they wrote 3": "echo 3 > /logs/verifier/reward.json",
    "reward = True": """echo '{"reward": "True"}' > /logs/verifier/reward.json""",
    "reward = True, which": """echo '{"reward": true}' > /logs/verifier/reward.json""",
    "which is no number": "echo 0_1 > /logs/verifier/reward.txt",
    "reward.txt is longer than 65,536 bytes": "printf '1%65536s9' > /logs/verifier/reward.txt",
    "nested too deeply": "head -c 60000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json",
    "limit on time": "echo 1 > /logs/verifier/reward.txt; sleep 60",
}


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("problem", VERDICTS)
def test_a_verdict_that_does_not_fit_is_an_error_or_the_failed_reward(problem: str, tmp_path: Path) -> None:
    limit_s = 1.0 if problem == "limit on time" else 60.0
    task = f"[verifier]\ntimeout_sec = {limit_s}\n"
    files = {"tests/test.sh": f"#!/bin/bash\n{VERDICTS[problem]}\n", "task.toml": task}
    write_task(tmp_path / "task", {**WORD, **files})
    with pytest.raises(CheckFailedError, match=problem):
        reward_of(tasks_of(tmp_path)["task"])
    assert reward_of(tasks_of(tmp_path, failed_reward=-1.0)["task"]) == -1.0


def test_rewards_have_the_declared_names_and_bounds() -> None:
    declared = {"tests": (0, 1), "style": (-1, 1)}
    assert checked_rewards({"style": -1, "tests": 0.5}, declared) == {"style": -1.0, "tests": 0.5}
    for verdict in (
        {"tests": 1},
        {"tests": 1, "style": 2},
        {"tests": None, "style": 0},
        [],
        None,
        {"tests": True, "style": 0},
    ):
        with pytest.raises(ValueError, match="they wrote"):
            checked_rewards(verdict, declared)
    with pytest.raises(ValueError, match="they wrote"):
        checked_rewards({"reward": 10**400}, {"reward": (0.0, float("inf"))})


@pytest.mark.parametrize(
    "name", ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/a.sh"]
)
def test_a_pipe_in_a_task_stops_nothing(name: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", WORD)
    (task / name).unlink(missing_ok=True)
    os.mkfifo(task / name)
    refusals = read_task(task, ROOTS).refusals
    assert len(refusals) == (2 if name == "tests/test.sh" else 1)  # no script, and a pipe that cannot be copied
    assert all(name in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("COPY loop /box/", "loop is outside of the task's environment/"),
        ("COPY pipe /box/", "pipe is neither a file nor a directory"),
        ("COPY Dockerfile", "there is no destination"),
        (f"COPY Dockerfile /{'a' * 256}/x", "is no possible path"),
        (f"COPY Dockerfile {'/a' * 5000}", "is no possible path"),
    ],
)
def test_copies_that_no_sandbox_can_hold_are_refused(line: str, refusal: str, tmp_path: Path) -> None:
    task = write_suite(tmp_path) / "word"
    environment = task / "environment"
    (environment / "loop").symlink_to("loop")
    os.mkfifo(environment / "pipe")
    (environment / "Dockerfile").write_text(f"FROM {next(iter(ROOTS))}\n{line}\n")
    [refused] = read_task(task, ROOTS).refusals
    assert refusal in refused


def test_a_loop_of_links_in_a_task_is_refused(tmp_path: Path) -> None:
    task = write_suite(tmp_path) / "word"
    (task / "instruction.md").unlink()
    (task / "instruction.md").symlink_to("instruction.md")
    assert read_task(task, ROOTS).refusals == [f"{task / 'instruction.md'}: a link leads out of the task"]


def test_scripts_behind_links_are_not_read(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", WORD)
    (task / "tests" / "endless.sh").symlink_to("/dev/zero")
    [refused] = read_task(task, ROOTS).refusals
    assert "endless.sh: a link to /dev/zero" in refused


@pytest.mark.parametrize("name", ["tests/large", "environment/large"])
def test_files_that_do_not_fit_the_sandbox_are_refused_unread(name: str, tmp_path: Path) -> None:
    copied = {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY . /app/\n"}
    task = write_task(tmp_path / "task", {**WORD, **copied})
    with open(task / name, "wb") as file:
        file.truncate(1 << 40)
    assert "its files have 1,048,576 MiB; at most 256 fit" in read_task(task, ROOTS).refusals[0]


def test_a_share_of_the_tasks_is_held_out(tmp_path: Path) -> None:
    for number in range(10):
        write_task(tmp_path / str(number), WORD)
    splits = [
        {task.id for task in Harbor.tasks(split, directory=str(tmp_path), roots=ROOTS)}  # type: ignore[attr-defined]
        for split in ("train", "held_out")
    ]
    assert [len(split) for split in splits] == [8, 2]
    assert not splits[0] & splits[1]


def test_the_import_command_lists_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_suite(tmp_path)
    command = [str(tmp_path), "--root", "python:3.12=/"]
    assert list_tasks(command) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "median: can be played"
    assert shown[1] == "word: refused"
    assert "needs the image ubuntu:24.04" in shown[2]
    assert shown[3] == "1 of 2 tasks can be played"
    assert list_tasks([*command, "--root", "ubuntu:24.04=/"]) == 0
    assert "2 of 2 tasks can be played" in capsys.readouterr().out


@pytest.mark.needs("bubblewrap")
def test_a_configuration_is_checked_with_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_checks(monkeypatch, "tasks", "episodes")
    write_suite(tmp_path / "tasks")
    options = f'directory = "{tmp_path}/tasks", roots = {{ "python:3.12" = "/", "ubuntu:24.04" = "/" }}'
    (tmp_path / "run.toml").write_text(
        f'name = "harbor"\nenvironment = {{ id = "agentrl_formats.harbor:Harbor", options = {{ {options} }} }}\n'
        'model.path = "agentrl.environments:calculator/model"\npolicies.agent = {}\n'
    )
    assert main(["env", "check", str(tmp_path / "run.toml")]) == 0
    assert "restored from their snapshots" in capsys.readouterr().out


@pytest.mark.parametrize("root", ["/", "/.", "//", "/usr/.."])
def test_no_spelling_of_the_root_is_the_whole_disk(root: str) -> None:
    assert HarborTask().sandbox(root, "none").root is None


def test_a_task_is_played_in_its_directory_alone(tmp_path: Path) -> None:
    task = tasks_of(write_suite(tmp_path / "suite"))["median"]
    away = agentrl.Task(id="away", data={**task.data, "task": "../other"})
    with pytest.raises(Exception, match="is outside of"):
        play(Harbor, away, ["done"])
