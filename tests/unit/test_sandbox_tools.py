"""The user's scripts: a shell, file tools, and a repair task whose tests are out of the policy's reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError
from agentrl.environment.sandbox_tools import describe_result
from agentrl.sandbox.driver import CommandResult
from agentrl.testing.check import check_environment
from agentrl.testing.execution import play
from tests.support.checks import keep_checks

pytestmark = pytest.mark.needs("bubblewrap")

PROGRAM = "def add(a, b):\n    return a - b\n"
TESTS = "from src.main import add\nassert add(2, 3) == 5\n"


class Repair(agentrl.ToolEnvironment):
    """Repair a program; the tests are out of reach."""

    sandbox = agentrl.Sandbox(disk_mb=16)
    bash = agentrl.bash(seconds=20, characters=200)
    read_file = agentrl.read_file(lines=3)
    write_file = agentrl.write_file()
    edit_file = agentrl.edit_file()

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="add", data={"question": "Repair /box/src/main.py.", "program": PROGRAM})]

    def files(self, task: agentrl.Task) -> Mapping[str, str | bytes | Path]:
        return {"/box/src/main.py": task.data["program"]}

    async def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        async with self.box.copy(only=["/box/src"]) as judge:
            return float((await judge.run(["python3", "tests.py"], files={"tests.py": TESTS})).ok)


class Connected(Repair):
    """A sandbox with a network cannot be restored."""

    sandbox = agentrl.Sandbox(disk_mb=16, network="open")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def played(replies: Sequence[str | Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Return the reward, and what each call of a tool returned."""
    result = play(Repair, Repair.tasks("train")[0], [*replies, "done"])
    return result.reward, list(result.observations[1:])


EDIT = call("edit_file", path="src/main.py", old="a - b", new="a + b")


def test_a_policy_repairs_a_program_and_the_tests_judge_a_copy() -> None:
    reward, told = played([call("bash", command="ls -R; cat src/main.py"), EDIT])
    assert reward == 1.0
    assert told[0] == f".:\nsrc\n\n./src:\nmain.py\n{PROGRAM}".rstrip("\n")
    assert told[1] == "edited src/main.py"
    assert played([])[0] == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "echo > tests.py; echo > /tests.py",
        "mkdir /tmp/x; echo 'assert False' > /tmp/sitecustomize.py; (sleep 30; echo > tests.py) & echo",
        "find / -name 'tests.py' -o -name '*answer*' 2>/dev/null | grep -v ^/usr | grep -v ^/proc",
    ],
)
def test_what_a_policy_leaves_elsewhere_does_not_reach_the_judge(command: str) -> None:
    reward, told = played([call("bash", command=command)])
    assert reward == 0.0
    assert "tests.py\n" not in told[0]
    assert played([call("bash", command=command), EDIT])[0] == 1.0


def test_the_shell_shows_errors_status_and_limits() -> None:
    _, told = played(
        [
            call("bash", command="echo out; echo err >&2; exit 3"),
            call("bash", command="cd /tmp; export A=1"),
            call("bash", command="pwd; echo [$A]"),
            call("bash", command="seq 1000"),
            call("bash", command="for"),
            call("bash", command="printf 'a\\377b'"),
        ]
    )
    assert told[0] == "out\nerr\n[exit status 3]"
    assert told[1:3] == ["", "/box\n[]"]
    assert told[3].startswith("1\n2\n3\n")
    assert "[3693 characters left out]" in told[3]
    assert told[3].endswith("\n1000")
    assert "syntax error" in told[4]
    assert told[5] == "a\N{REPLACEMENT CHARACTER}b"


def test_files_are_read_written_and_edited_with_their_modes() -> None:
    _, told = played(
        [
            call("write_file", path="run.sh", content="#!/bin/sh\n1\n2\n3\n4\necho old\n"),
            call("bash", command="chmod 755 run.sh"),
            call("edit_file", path="/box/run.sh", old="echo old", new="echo new"),
            call("bash", command="./run.sh 2>/dev/null"),
            call("read_file", path="run.sh"),
            call("read_file", path="run.sh", first_line=5),
            call("edit_file", path="run.sh", old="e", new=""),
            call("edit_file", path="run.sh", old="", new="x"),
            call("read_file", path="none"),
            call("read_file", path="../etc/passwd"),
            call("write_file", path="/usr/x", content=""),
        ]
    )
    assert told[3] == "new"
    assert told[4] == "#!/bin/sh\n1\n2\n[3 more lines]"
    assert told[5] == "4\necho new\n"
    assert "stands 2 times" in told[6]
    assert "stands 0 times" in told[7]
    assert "No such file or directory: '/box/none'" in told[8]
    assert "error" in told[9]
    assert "Read-only file system: '/usr/x'" in told[10]
    assert not Path("/usr/x").exists()


def test_results_say_what_the_output_does_not_show() -> None:
    ran = {"status": 137, "stdout": b"abc", "stderr": b"", "killed": "memory", "truncated": True, "seconds": 1.0}
    said = describe_result(CommandResult(**ran, cpu_seconds=0.1), 100)
    assert said == "abc\n[the output is longer than is kept]\n[ended by the limit on memory]"


def test_the_checker_calls_it_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_checks(monkeypatch, "tasks", "episodes")
    report = check_environment(Repair)
    assert not report.findings
    assert report.figures["resume_class"] == "snapshot"


def test_the_checker_calls_it_pinned_with_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_checks(monkeypatch, "tasks", "episodes")
    report = check_environment(Connected)
    assert not report.findings
    assert report.figures["resume_class"] == "pinned"


def test_a_tool_without_a_sandbox_says_so() -> None:
    class Bare(agentrl.ToolEnvironment):
        bash = agentrl.bash()

        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return 0.0

    with pytest.raises(CheckFailedError, match="has no sandbox"):
        play(Bare, agentrl.Task(id="t", data={"question": "?"}), [call("bash", command="ls"), "done"])


def test_directories_of_this_machine_are_copied(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"\0")
    (tmp_path / "inner" / "empty").mkdir()
    (tmp_path / "link").symlink_to("inner/file")

    class Given(Repair):
        def files(self, task: agentrl.Task) -> Mapping[str, str | bytes | Path]:
            return {"/box/given": tmp_path, "/box/one": tmp_path / "inner" / "file", **super().files(task)}

    result = play(Given, Given.tasks("train")[0], [call("bash", command="find . | sort; readlink given/link"), "done"])
    assert result.observations[1].split() == [
        *(".", "./given", "./given/inner", "./given/inner/empty", "./given/inner/file", "./given/link"),
        *("./one", "./src", "./src/main.py", "inner/file"),
    ]
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(CheckFailedError, match="link: a link to /etc/passwd, outside of"):
        play(Given, Given.tasks("train")[0], ["done"])


def test_lines_of_a_file_are_those_that_a_shell_counts() -> None:
    text = "one\x0ctwo\u2028three\x85\nfour\r\nfive"
    _, observations = played(
        [
            call("write_file", path="/box/a.txt", content=text),
            call("read_file", path="/box/a.txt"),
            call("read_file", path="/box/a.txt", first_line=2),
        ]
    )
    assert observations[1:] == [text, "four\r\nfive"]
