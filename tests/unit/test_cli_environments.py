"""`agentrl env`: a new environment passes as it is; names that would harm are refused; one bad entry hides no other."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl
from agentrl.cli.environments import write_environment
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.observe.progress import LINE_INTERVAL_S, ProgressLine
from agentrl.testing import play


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_environment("word_sums", tmp_path)


def test_a_new_environment_passes_its_tests_as_it_is(written: Path) -> None:
    """Whatever the settings of a checkout around it."""
    settings = '[tool.pytest.ini_options]\naddopts = "--no-such-option"\n'
    (written.parent / "pyproject.toml").write_text(settings)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_a_new_environment_passes_the_checker_and_can_be_trained_as_it_is(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written.parent)
    assert main(["env", "check", "word_sums/env.py"]) == 0
    assert "passed" in capsys.readouterr().out
    config = load(written / "train.toml")
    assert config.environment.id == f"{written / 'env.py'}:WordSums"
    assert (Path(config.model.path) / "model.safetensors").is_file()


def test_the_variant_in_comments_works_when_it_is_uncommented(written: Path) -> None:
    text = (written / "env.py").read_text()
    at = text.index("# class WordSumsInTurns")
    variant = re.sub(r"^# ?", "", text[at:], flags=re.MULTILINE)
    (written / "both.py").write_text(text[:at] + variant)
    name = f"{written / 'both.py'}:WordSumsInTurns"
    report = agentrl.check_environment(name)
    assert report.passed, report.text
    task = agentrl.Task(id="t", data={"question": "1 + 2 =", "answer": "3"})
    played = play(name, task, ["4", "3"])
    assert (played.reward, played.observations) == (1.0, ("1 + 2 =", "That is wrong. Try again."))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Word", "letters"),
        ("../word", "letters"),
        ("word-game", "letters"),
        ("", "letters"),
        ("class", "reserved"),
        ("match", "reserved"),
        ("random", "my_random"),
        ("numpy", "'numpy'"),
        ("calculator", "'calculator'"),
    ],
)
def test_unsafe_names_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        write_environment(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_touched(written: Path) -> None:
    before = {file.name: file.read_text() for file in written.iterdir()}
    with pytest.raises(InputError, match="exists"):
        write_environment("word_sums", written.parent)
    assert {file.name: file.read_text() for file in written.iterdir()} == before


def test_the_list_says_what_each_environment_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--json"]) == 0
    found = {line["id"]: line for line in json.loads(capsys.readouterr().out)}
    assert found["calculator"]["seats"] == ["agent"]
    assert found["calculator"]["entry_point"].endswith("environments.calculator:Calculator")
    assert found["calculator"]["description"].startswith("Sums and differences")
    assert not found["calculator"]["error"]
    assert main(["env", "list"]) == 0
    assert "environments.calculator:Calculator; seats: agent" in capsys.readouterr().out


def test_an_environment_that_cannot_be_imported_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    information = tmp_path / "broken_environment-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-environment\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[agentrl.environments]\nbroken = broken_environment:Broken\n")
    (tmp_path / "broken_environment.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["env", "list"]) == 0
    said = capsys.readouterr().out
    assert "broken_environment: ZeroDivisionError" in said
    assert "Sums and differences" in said


def test_a_play_that_needs_more_replies_says_so(written: Path) -> None:
    task = agentrl.Task(id="t", data={"question": "1 + 2 =", "answer": "3"})
    call = {"name": "calculate", "arguments": {"a": 1, "op": "+", "b": 2}}
    with pytest.raises(CheckFailedError, match="reply 2"):
        play(f"{written / 'env.py'}:WordSums", task, [call])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_check_shows_its_parts_in_place_or_now_and_then() -> None:
    class Clock(SystemClock):
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, file, terminal = Clock(), io.StringIO(), _Terminal()
    parts = {stream: ProgressLine("checking x", stream, clock) for stream in (file, terminal)}
    for number in range(50):
        for stream in (file, terminal):
            parts[stream](f"part {number}\n\x1b[31m")
        clock.now += LINE_INTERVAL_S / 4
    assert file.getvalue().splitlines() == [rf"checking x: part {number}\n\x1b[31m …" for number in range(0, 50, 4)]
    assert terminal.getvalue().count("\r\x1b[2Kchecking x: part ") == 50
    parts[terminal]("half", 0.5)
    assert terminal.getvalue().endswith("checking x: half ████████████░░░░░░░░░░░░ 50%")
    assert "\n" not in terminal.getvalue()
    parts[terminal].close()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_each_phase_leaves_its_seconds() -> None:
    class Clock(SystemClock):
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, file, terminal = Clock(), io.StringIO(), _Terminal()
    lines = {stream: ProgressLine("checking x", stream, clock) for stream in (file, terminal)}
    for phase, part in (("reading", ""), ("playing", "one"), ("playing", "two"), ("playing", "three")):
        for stream in (file, terminal):
            lines[stream].phase(phase, part)
        clock.now += 0.6 * LINE_INTERVAL_S
    for stream in (file, terminal):
        lines[stream].close()
        lines[stream].close()
    assert file.getvalue().splitlines() == [
        *("checking x: reading …", "checking x: reading: 6.0 s"),
        *("checking x: playing …", "checking x: playing: three …", "checking x: playing: 18.0 s"),
    ]
    permanent = [line.rpartition("\x1b[2K")[2] for line in terminal.getvalue().split("\n")]
    assert permanent == ["checking x: reading: 6.0 s", "checking x: playing: 18.0 s", ""]


def test_a_check_says_what_it_does_before_it_does_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow.py").write_text(
        f"import os\nif os.path.exists({str(gate)!r}):\n    open({str(gate)!r}).read()\n    os.remove({str(gate)!r})\n"
        "import agentrl\nclass Slow(agentrl.Environment):\n    async def run(self, ctx):\n"
        "        await ctx.agent('agent').act(agentrl.user('?'))\n        ctx.agent('agent').reward(1.0)\n"
        "    @classmethod\n    def tasks(cls, split, *, seed=0):\n        return [agentrl.Task(id='t', data={})]\n"
    )
    command = [sys.executable, "-m", "agentrl.cli", "env", "check", "slow.py", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as checking:
        assert checking.stderr is not None
        said_first = [checking.stderr.readline(), checking.stderr.readline()]  # the file has not been read yet
        gate.write_text("go on")
        said, said_then = checking.communicate()
    assert said_first == ["loading the checks …\n", "checking slow.py: importing it …\n"]
    timed_phases = re.findall(r"^checking slow.py: (\w+).*: \d+\.\d s$", said_then, re.MULTILINE)
    assert timed_phases == ["importing", "listing", *["playing"] * 4]
    answer = json.loads(said)
    assert (answer["passed"], answer["class"], checking.returncode) == (True, "replay", 0)
    figures = {name: value for check in answer["checks"] for name, value in check["figures"].items()}
    assert (figures["episodes"], figures["resume_class"]) == (1, "replay")
    assert {"tasks", "episodes", "concurrency"} <= {check["name"] for check in answer["checks"]}


PAIR = """
import agentrl


class Pair(agentrl.Environment):
    seats = ("solver", "checker")

    async def run(self, ctx):
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("Guess."))
        ctx.agent("solver").reward(1.0)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}{n}", data={"n": f"{split}{n}"}) for n in range(4)]


class Both(Pair):
    async def run(self, ctx):
        await super().run(ctx)
        ctx.agent("checker").reward(1.0)
"""
PAIR_TOML = """
steps = 2

[environment]
id = "pair.py:Pair"

[model]
path = "agentrl.environments:calculator/model"

[policies.solver]

[policies.checker]
"""


def test_a_check_of_a_configuration_knows_which_seats_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.py").write_text(PAIR)
    (tmp_path / "nr.toml").write_text(PAIR_TOML)
    (tmp_path / "frozen.toml").write_text(f'{PAIR_TOML}kind = "frozen"\n')
    assert main(["env", "check", "nr.toml"]) == 1
    assert "Never rewarded: checker, which nr.toml trains" in capsys.readouterr().out
    assert main(["env", "check", "frozen.toml"]) == 0
    assert main(["env", "check", "nr.toml", "--environment.id=pair.py:Both"]) == 0
    capsys.readouterr()
    assert main(["env", "check", "frozen.toml", "--max_in_flight=2", "--credit.group_size=4"]) == 1
    refusal = "credit.group_size = 4 is larger than max_in_flight = 2, so no group could start"
    assert refusal in " ".join(capsys.readouterr().out.split()), "train refuses it, too"
    assert main(["train", "frozen.toml", "--max_in_flight=2", "--credit.group_size=4"]) == InputError.exit_code
    assert refusal in capsys.readouterr().err
    assert main(["env", "check", "pair.py:Both", "--steps=3"]) == InputError.exit_code
    assert "only a run's FILE.toml has settings" in capsys.readouterr().err


def test_elapsed_time_alone_is_no_news() -> None:
    class Clock(SystemClock):
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, file = Clock(), io.StringIO()
    progress = ProgressLine("evaluating", file, clock)
    for second in range(100):
        progress.phase("starting the engine", f"{second} s" if second else "")
        clock.now += 1.0
    parts = [f"starting the engine: {second} s" for second in (10, 20, 40, 80)]
    assert file.getvalue().splitlines() == [f"evaluating: {part} …" for part in ("starting the engine", *parts)]


def test_a_part_without_news_is_repeated_ever_more_rarely() -> None:
    class Clock(SystemClock):
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, file = Clock(), io.StringIO()
    progress, shown = ProgressLine("evaluating", file, clock), list[float]()
    for second in range(300):
        before = len(file.getvalue())
        progress("0 of 12 episodes" if second < 200 else f"{second // 50} of 12 episodes")
        if len(file.getvalue()) > before:
            shown.append(second)
        clock.now += 1.0
    assert shown == [0, 10, 30, 70, 130, 190, 200, 210, 230, 250, 260, 280]
