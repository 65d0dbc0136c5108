"""Code that is run in a subprocess returns its answer, or the reason why it has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.forked_child import answers_from_forked_child, report_progress, run_in_forked_child
from agentrl.cli.main import main


def _raises(error: BaseException) -> None:
    raise error


def _leaves_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return "answer"


def _leaves_a_process() -> str:
    if os.fork() == 0:
        signal.pause()
    return "answer"


def _forks_and_both_answer() -> int:
    return os.fork() and 1


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: {"a": [1, "\x1b"]}, {"a": [1, "\x1b"]}),
        (lambda: "x" * 1_000_000, "x" * 1_000_000),
        (_leaves_a_thread, "answer"),
        (_leaves_a_process, "answer"),
        (_forks_and_both_answer, 1),
    ],
)
def test_what_is_returned_comes_back(call: Callable[[], Any], answer: object) -> None:
    assert run_in_forked_child(call) == (answer, "")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: os._exit(0), "its process ended (exit code 0) before it could answer"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process ended (killed by SIGKILL) before it could answer"),
        (lambda: _raises(SystemExit(0)), "it was ended by SystemExit: 0 ("),
        (lambda: _raises(KeyboardInterrupt()), "it was ended by KeyboardInterrupt ("),
        (
            lambda: _raises(BaseExceptionGroup("several", [SystemExit(0)])),
            "it was ended by BaseExceptionGroup: several",
        ),
    ],
)
def test_an_end_without_an_answer_is_told(call: Callable[[], Any], told: str) -> None:
    answer, problem = run_in_forked_child(call)
    assert answer is None
    assert problem.startswith(told)


def _answers_twice(end: Callable[[], object]) -> Iterator[int]:
    yield 1
    yield 2
    end()


def test_answers_come_one_by_one_up_to_the_end_of_the_child() -> None:
    assert list(answers_from_forked_child(lambda: _answers_twice(int))) == [(1, ""), (2, "")]
    *first, (last, problem) = answers_from_forked_child(lambda: _answers_twice(lambda: os.kill(os.getpid(), 9)))
    assert first == [(1, ""), (2, "")]
    assert last is None
    assert "SIGKILL" in problem


def test_code_that_never_ends_is_ended_and_its_place_told() -> None:
    code = compile("def spin():\n    while True:\n        pass\n", "/somewhere/env.py", "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    _, problem = run_in_forked_child(namespace["spin"], longest_s=0.5)
    assert "/somewhere/env.py:" in problem
    assert problem.endswith(", in spin")


def _works_for_long(limit_s: float) -> str:
    for _ in range(16):
        time.sleep(limit_s / 10)
        report_progress()
    return "answer"


def _never_ends(limit_s: float) -> None:
    def report() -> None:
        while True:
            time.sleep(limit_s / 10)
            report_progress()

    threading.Thread(target=report, daemon=True).start()
    signal.pause()


def test_progress_restarts_the_time_limit() -> None:
    """But for that of another thread, which goes on while the main one hangs."""
    assert run_in_forked_child(lambda: _works_for_long(1.0), longest_s=1.0) == ("answer", "")
    answer, problem = run_in_forked_child(lambda: _never_ends(0.5), longest_s=0.5)
    assert answer is None
    assert problem.startswith("it made no progress within 0.5 s; it was at ")
    assert problem.endswith(", in _never_ends")


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"""
        import os, pathlib
        from agentrl.cli.forked_child import run_in_forked_child
        def call():
            pathlib.Path({str(child)!r}).write_text(str(os.getpid()))
            os.kill(os.getppid(), 9)
            while True: pass
        run_in_forked_child(call)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == -signal.SIGKILL
    pid = int(child.read_text())
    deadline = time.monotonic() + 30
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_environment_that_ends_the_process_does_not_pass_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {
        "ends": ("os._exit(0)", "the check did not finish"),
        "leaves": ("raise SystemExit(0)", "SystemExit: 0"),
    }
    for name, (end, told) in ends.items():
        file = tmp_path / f"{name}.py"
        file.write_text(f"import os\n{end}\n")
        assert main(["env", "check", str(file)]) == 1
        assert told in capsys.readouterr().out


def test_what_an_environment_prints_stays_out_of_the_result(tmp_path: Path) -> None:
    file = tmp_path / "prints.py"
    file.write_text("print('noise')\n")
    command = [sys.executable, "-m", "agentrl.cli", "env", "check", str(file), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout.startswith("{")
    assert "noise" in ended.stderr
