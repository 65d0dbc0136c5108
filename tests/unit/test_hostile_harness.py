"""Programs from outside that leave processes, pipes and directories behind, and task files that are none."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.cli.environments import _config_of_run
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment import harness
from agentrl.environment.harness import _remove_specials, _remove_tree, _task
from agentrl.testing import execution
from agentrl.testing.check import check_environment
from tests.unit.episodes import Played, play


class Program(agentrl.HarnessEnvironment):
    """A child process that asks nothing; its output is kept."""

    seats = ("main",)

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


def played(program: str, *arguments: str, **more: Any) -> Played:
    command = (sys.executable, "-c", program, *arguments)
    return play(type("Hostile", (Program,), {"command": command, "__module__": __name__}), [], **more)


def test_a_process_that_left_and_holds_the_output_is_not_waited_for(tmp_path: Path) -> None:
    leave = (
        "import os, sys, time; print('said', flush=True)\nif (child := os.fork()) == 0: os.setsid(); time.sleep(600)\n"
        "open(sys.argv[1], 'w').write(str(child))"
    )
    open_before = len(os.listdir("/proc/self/fd"))
    found = played(leave, str(tmp_path / "child"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert found.header.drop_reason is None
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_what_a_program_printed_is_there_however_late_it_is_read() -> None:
    async def written(parts: list[bytes]) -> bytes:
        output = harness._Output()
        fcntl.fcntl(output.program_end, fcntl.F_SETPIPE_SZ, harness.PIPE_BYTES)
        for part in parts:
            os.write(output.program_end, part)
        output.close()  # nothing has run the event loop, as if it had been blocked until the time-out
        os.close(output.program_end)
        return bytes(output.tail)

    assert asyncio.run(written([b"4", b"2\n"])) == b"42\n"
    most = asyncio.run(written([b"a" * (harness.PIPE_BYTES - harness.OUTPUT_BYTES), b"b" * harness.OUTPUT_BYTES]))
    assert most == b"b" * harness.OUTPUT_BYTES


def test_children_of_a_program_are_ended_with_it(tmp_path: Path) -> None:
    leave = (
        "import os, sys, time\n"
        "for n in range(3):\n"
        "    if os.fork() == 0:\n"
        "        open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); time.sleep(600)\n"
        "while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n"
    )
    assert played(leave, str(tmp_path)).header.drop_reason is None
    left = [int(path.name) for path in tmp_path.iterdir()]
    assert len(left) == 3
    assert not [pid for pid in left if _runs(pid)]


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_ends_well_without_an_answer_is_left_to_its_reward() -> None:
    said: list[Any] = []

    def reward(self: Program, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        said.append((episode.result, episode.error))
        return 0.0

    changes = {"command": (sys.executable, "-c", ""), "reward": reward, "__module__": __name__}
    assert play(type("Empty", (Program,), changes), []).header.drop_reason is None
    assert said == [("", None)]


ASK = """
import json, os, sys, urllib.error, urllib.request
for fields in sys.argv[1:]:
    body = {"model": "main", "messages": [{"role": "user", "content": "?"}], **json.loads(fields)}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
"""
REFUSED = [
    ('{"model": 3}', "model is 3"),
    (
        '{"temperature": 0.3, "top_p": 0.5}',
        "top_p is 0.5, but the run uses 1.0. Remove them from the request, or write "
        '`ignored_fields = ("tool_choice", "temperature", "top_p")` in the environment\'s class',
    ),
    ('{"logit_bias": {"1": 1}}', '`ignored_fields = ("tool_choice", "logit_bias")`'),
]


@pytest.mark.parametrize("failed_reward", [None, 0.0])
@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_program_that_fails_before_its_first_reply_is_an_error_whatever_failures_are_worth(
    fields: str, words: str, failed_reward: float | None
) -> None:
    changes = {"ignored_fields": ("tool_choice",), "failed_reward": failed_reward, "__module__": __name__}
    for end, how in (("sys.exit", "failed before it got a reply: exit status 1"), ("print", "ended before it got a")):
        changes["command"] = (sys.executable, "-c", ASK.replace("sys.exit", end), fields)
        found = play(type("Refused", (Program,), changes), [], gateway_sampling="refuse")
        assert found.header.drop_reason == "environment_error"
        assert how in found.said
        first, _, output = found.said.partition("\n")
        assert first.startswith("the gateway refused a request: ")
        assert words in first
        assert output.startswith('{"error": {"message": ')
        assert "failed_reward" not in found.said


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("failed_reward", [None, 0.0])
def test_a_request_for_other_sampling_after_a_reply_is_told_first_but_is_a_failure_like_others(
    failed_reward: float | None, in_process: bool
) -> None:
    """A policy with a shell can send such a request: it must not choose to be dropped instead of rewarded."""

    async def in_loop(self: Program, task: agentrl.Task, endpoint: agentrl.Endpoint) -> None:
        env = {**os.environ, **endpoint.variables()}
        command = [sys.executable, "-c", ASK, "{}", '{"temperature": 0.3}']
        failed = await asyncio.to_thread(subprocess.run, command, env=env, stderr=subprocess.PIPE, text=True)
        message = json.loads(failed.stderr)["error"]["message"]
        raise RuntimeError(f"Error code: 400 - {message}")

    refusal = (
        "the gateway refused a request: temperature is 0.3, but the run uses 1.0. Remove it from the request, or write "
        '`ignored_fields = ("temperature",)` in the environment\'s class. Then the program failed: '
    )
    changes: dict[str, Any] = {"failed_reward": failed_reward, "__module__": __name__}
    changes |= {"command": (sys.executable, "-c", ASK, "{}", '{"temperature": 0.3}')}
    refused = type("Refused", (Program,), {**changes, **({"play": in_loop} if in_process else {})})
    ignored = type("Ignored", (Program,), {**changes, "ignored_fields": ("temperature",)})
    assert play(ignored, ["a", "b"], gateway_sampling="refuse").header.drop_reason is None
    if failed_reward is not None:
        with pytest.warns(UserWarning, match="Refused: an episode got failed_reward after .*: temperature is 0.3"):
            found = play(refused, ["a"], gateway_sampling="refuse")
        assert (found.header.drop_reason, found.header.reward) == (None, failed_reward)
        return
    found = play(refused, ["a"], gateway_sampling="refuse")
    assert found.header.drop_reason == "environment_error"
    first = found.said.partition("\n")[0]
    end = f"RuntimeError: Error code: 400 - … at {__file__}:" if in_process else "exit status 1."
    assert first.startswith(refusal + end)
    assert "failed_reward" not in first


def test_env_check_compares_requests_with_the_sampling_of_the_run(tmp_path: Path) -> None:
    class Warm(Program):
        command = (sys.executable, "-c", ASK, '{"temperature": 0.3}')

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id=split, data={"split": split})]

    assert check_environment(Warm).passed
    report = check_environment(Warm, gateway_sampling="refuse")
    assert "requests with temperature will be refused" in report.text.splitlines()[1]
    (tmp_path / "train.toml").write_text(
        'environment.id = "a:B"\nmodel.path = "tiny"\nsampling.temperature = 0.5\n'
        "policies.main.sampling.temperature = 0.3\n"
    )
    config = _config_of_run(str(tmp_path / "train.toml"), [])
    assert config is not None
    sampling = config.sampling_of("main").model_dump(include={"temperature"})
    assert check_environment(Warm, sampling=sampling, gateway_sampling="refuse").passed


def test_a_program_that_fails_after_a_reply_is_worth_what_its_environment_says() -> None:
    command = (sys.executable, "-c", ASK + "sys.exit(3)", "{}")
    fails = type("Fails", (Program,), {"command": command, "__module__": __name__})
    assert play(fails, ["a"]).said == (
        "the program failed: exit status 3. If the policy can cause this, write `failed_reward = 0.0` in class Fails. "
        "(episode e0.0, after a turn of seat 'main', policy 'random')"
    )
    penalised = type("Penalised", (fails,), {"failed_reward": -2.0, "__module__": __name__})
    assert play(penalised, ["a"]).header.reward == -2.0


DEEP = """
def deep(number):
    if number == 0:
        raise ValueError("\\x1b[31mno\\x1b[0m tool 'ad'")
    again(number - 1)

def again(number):
    deep(number)
"""


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("depth", [2, 200])
def test_the_traceback_of_a_program_is_told_by_whole_lines(depth: int, in_process: bool) -> None:
    async def raises(self: Program, task: agentrl.Task, endpoint: agentrl.Endpoint) -> None:
        env = {**os.environ, **endpoint.variables()}
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ASK, "{}"], env=env, check=True)
        scope: dict[str, Any] = {}
        exec(DEEP, scope)
        scope["deep"](depth)

    changes = {"command": (sys.executable, "-c", f"{ASK}{DEEP}deep({depth})", "{}"), "__module__": __name__}
    found = play(type("Fails", (Program,), {**changes, **({"play": raises} if in_process else {})}), ["a"])
    first, *lines = found.told.split("\n")
    assert first.startswith(
        "the program failed: ValueError: no tool" if in_process else "the program failed: exit status 1 (ValueError: no"
    )
    assert "`failed_reward = 0.0` in class Fails. (episode e0.0" in first
    assert lines[-1] == "ValueError: no tool 'ad'"
    assert lines[0] == ("…" if depth == 200 else "Traceback (most recent call last):")
    assert all(line.startswith(('  File "', "    ")) for line in lines[1:-1])
    assert len(found.told) <= 4000


class Asking(agentrl.HarnessEnvironment):
    """A program that asks each model that it is given once."""

    seats = ("main", "small")

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 0.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=str(number), data={}) for number in range(2)]


def asking(*models: str, **changes: Any) -> type[Asking]:
    command = (sys.executable, "-c", ASK + "print('done')", *(f'{{"model": "{model}"}}' for model in models))
    return type("Asked", (Asking,), {"command": command, "__module__": __name__, **changes})


@pytest.mark.parametrize("seats", [("main",), ("main", "small")])
def test_rewards_by_name_count_for_a_single_seat_and_are_refused_for_several(seats: tuple[str, ...]) -> None:
    def reward(self: Asking, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> dict[str, float]:
        return {"correct": 1.0, "format": 0.5}

    found = play(asking("main", seats=seats, reward=reward), ["a"])
    if len(seats) == 1:
        assert found.header.reward == 1.5
        assert dict(found.header.trajectories[0].named_rewards) == {"correct": 1.0, "format": 0.5}
    else:
        assert found.header.drop_reason == "bad_reward"
        assert "'correct'" in found.said


def test_a_reward_for_an_unknown_seat_is_refused_beside_a_known_one() -> None:
    def reward(self: Asking, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> dict[str, float]:
        return {"main": 1.0, "mian": 1.0}

    found = play(asking("main", seats=("main",), reward=reward), ["a"])
    assert found.header.drop_reason == "bad_reward"
    assert "'mian'" in found.said


def test_a_program_that_asks_no_model_is_found() -> None:
    report = check_environment(asking())
    assert report.findings == [
        "no request for seat 'main' or 'small' was answered in 2 of 2 episodes; the program exited 0 and printed "
        "'done': does it read OPENAI_BASE_URL and name the model 'main' or 'small'?"
    ]

    async def play(self: Asking, task: agentrl.Task, endpoint: agentrl.Endpoint) -> int:
        return 3

    report = check_environment(asking(play=play))
    assert "endpoint.url" in report.text


CHECKED = """
import asyncio, sys
from agentrl.testing.check import check_environment

inside = []

def on_event(event, arguments):
    if event == "import" and asyncio._get_running_loop() is not None:
        inside.append(arguments[0])

sys.addaudithook(on_event)
report = check_environment(sys.argv[1])
assert report.passed, report.text
print(*(name for name in inside if name.partition(".")[0] in ("agentrl", "aiohttp", "numpy")))
"""
MODULE = """
import sys
import agentrl

class Asking(agentrl.HarnessEnvironment):
    seats = ("main",)
    command = (sys.executable, "-c", ASK, "{}")

    def reward(self, task, episode):
        return 0.0

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={})]
"""


def test_nothing_of_the_gateway_is_imported_inside_the_loop_of_a_check(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(f"ASK = {ASK!r}\n{MODULE}")
    command = [sys.executable, "-c", CHECKED, f"{tmp_path / 'asking.py'}:Asking"]
    checked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert checked.stdout.split() == []


def test_a_wrong_seat_is_found_whatever_failures_are_worth() -> None:
    report = check_environment(asking("mian", failed_reward=0.0))
    assert not report.passed
    assert "exit status 1" in report.text
    assert "no model 'mian'" in report.text


def test_requests_are_counted_and_seats_without_one_are_named() -> None:
    report = check_environment(asking("main", "main"))
    assert report.passed, report.text
    assert report.figures["requests"] == {"main": 4}
    assert "4 requests" in report.text
    assert "not tried: small" in report.text
    assert "not tried" not in check_environment(asking("main", "small")).text


def test_a_program_that_hangs_ends_the_check_at_the_limit_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PROGRAM_TIMEOUT_S", 0.5)
    report = check_environment(asking(command=(sys.executable, "-c", "import time; time.sleep(600)")))
    assert "0.5 s" in report.text
    assert not report.passed


def test_a_signal_without_a_name_is_a_kill_like_any_other() -> None:
    found = played("import os; os.kill(os.getpid(), 37)")
    assert "signal 37" in found.said


@pytest.mark.parametrize("question", ["a\0b", "a" * 200_000])
def test_a_task_that_is_no_argument_drops_its_episode_alone(question: str) -> None:
    found = played("", "{task.question}", data={"question": question})
    assert found.header.drop_reason == "environment_error"
    assert "an argument" in found.said


def test_what_a_reward_would_wait_for_is_gone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answer.txt")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    _remove_specials(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]


def test_directories_without_rights_and_without_end_are_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    inner = tmp_path / "work/a/b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("")
    (tmp_path / "work/link").symlink_to(outside)
    deep = os.getcwd()
    try:
        os.chdir(tmp_path / "work")
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(deep)
    inner.chmod(0o500)
    inner.parent.chmod(0o000)
    _remove_tree(tmp_path / "work")
    assert not (tmp_path / "work").exists()
    assert outside.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize(
    "line", ['{"a": NaN}', '{"a": 1, "a": 2}', "[1]", "{", '{"split": "trian"}', "[" * 100_000, '{"split": []}']
)
def test_lines_that_are_no_task_are_refused(line: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"tasks\.jsonl, line 3"):
        _task(line, 3, Path("tasks.jsonl"), ())


def test_a_task_without_a_value_of_the_command_is_refused() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"line 3: command: \{task\.question\} is not a known value"):
        _task('{"qestion": "2 + 2?"}', 3, Path("tasks.jsonl"), ["solve", "{task.question}", "{endpoint.url}"])
    task, split = _task('{"question": "2 + 2?"}', 3, Path("tasks.jsonl"), ["solve", "{task.question}", "{task.id}"])
    assert (task.id, split) == ("tasks-3", "train")


def test_the_check_names_a_missing_task_file(tmp_path: Path) -> None:
    module = tmp_path / "lost.py"
    module.write_text(
        "import agentrl\nclass E(agentrl.HarnessEnvironment):\n    seats = ('main',)\n    command = ['true']\n"
        "    task_file = 'tasks.jsonl'\n    def reward(self, task, episode):\n        return 0.0\n"
    )
    report = agentrl.check_environment(f"{module}:E")
    assert report.findings == [f"E.task_file: {tmp_path / 'tasks.jsonl'}: No such file or directory"]


def test_a_line_separator_in_a_text_ends_no_task(tmp_path: Path) -> None:
    module = tmp_path / "separated.py"
    module.write_text("import agentrl\nclass E(agentrl.HarnessEnvironment):\n    task_file = 'tasks.jsonl'\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "a\u2028b"}\r\n{"question": "c"}\n', encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    try:
        tasks = import_module("separated").E.tasks("train")
    finally:
        sys.path.remove(str(tmp_path))
    assert [task.data["question"] for task in tasks] == ["a\u2028b", "c"]


def test_directories_of_processes_that_died_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = (
        "import fcntl, os, sys, time\n"
        "os.makedirs(sys.argv[1] + '/in'); held = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(held, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    )
    paths = [tmp_path / f"{harness.PREFIX}{name}" for name in ("killed", "alive")]
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE) for path in paths
    )
    with killed, alive:
        for process in (killed, alive):
            assert process.stdout is not None
            process.stdout.readline()
        killed.kill()
        killed.wait()
        for name in ("another", f"{harness.PREFIX}file"):
            (tmp_path / name).touch()
        (tmp_path / f"{harness.PREFIX}link").symlink_to(tmp_path / "another")
        everything = {path.name for path in tmp_path.iterdir()}
        harness._sweep.__wrapped__(str(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == everything, (
            "they are too new to be told from one just made"
        )
        monkeypatch.setattr(harness, "UNLOCKED_S", -1.0)
        harness._sweep.__wrapped__(str(tmp_path))
        assert everything - {path.name for path in tmp_path.iterdir()} == {paths[0].name}
        alive.kill()


def test_a_program_runs_in_a_directory_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "UNLOCKED_S", -1.0)
    sweep = (
        "import os; from agentrl.environment import harness; harness.UNLOCKED_S = -1.0\n"
        "harness._sweep(os.path.dirname(os.getcwd())); assert os.listdir('..') == [os.path.basename(os.getcwd())]"
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert played(sweep).header.drop_reason is None
    assert os.listdir(tmp_path) == []
