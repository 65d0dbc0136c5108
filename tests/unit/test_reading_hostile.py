"""What the reading commands take: damaged runs, huge numbers and outputs, a machine with nothing but agentrl."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agentrl.cli.commands import READING
from agentrl.cli.main import main
from agentrl.core.ids import random_stream
from agentrl.core.text import escape_text
from agentrl.journal.entries import (
    EffectEntry,
    JournalEntry,
    NondeterministicValueEntry,
    ToolEntry,
    TurnEntry,
    encode_body,
    episode_digest,
)
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import entries_with, header, spec
from tests.support.damaged_runs import crashed, sample
from tests.support.fuzzed import commands

ALONE = """
import sys
from pathlib import Path

MISSING = {"torch", "ray", "gymnasium", "transformers", "peft", "vllm", "numpy", "environments", "pyarrow"}
MISSING |= {"tests.support.sample_environment", "agentrl.learn"}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"{name} is missing", name=name)


sys.meta_path.insert(0, Missing())
from agentrl.cli.main import main
from agentrl.core.ids import random_stream
from tests.support.fuzzed import commands

EXECUTES = {("episode", "replay"), ("episode", "rescore"), ("step", "replay")}
for draw in (random_stream("alone", number) for number in range(4)):
    for command in commands(Path(sys.argv[1]), draw):
        if tuple(command[:2]) in EXECUTES or "parquet" in command:
            continue
        command = ["e1" if word.startswith(("e", "v", "f")) and word[1:].isdecimal() else word for word in command]
        print(command, flush=True)
        code = main([*command, "--force"] if command[:2] == ["run", "export"] else command)
        assert code in (0, 2), (command, code)
loaded = MISSING & set(sys.modules)
assert not loaded, loaded
"""


def test_every_reading_command_works_where_nothing_but_agentrl_is(sample_run: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(sample_run, run)
    finished = subprocess.run([sys.executable, "-c", ALONE, str(run)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    asked = {tuple(eval(line)[:2]) for line in finished.stdout.splitlines() if line.startswith("['")}  # noqa: S307
    assert len(asked) >= sum(len(noun.verbs) for noun in READING) - 8


@pytest.mark.parametrize(
    "command",
    [
        ["episode", "list", "RUN", "--limit", "99999999999999999999"],
        ["episode", "list", "RUN", "--offset", "9" * 5000],
        ["episode", "show", "RUN", "e1", "--attempt", str(2**63)],
        ["step", "replay", "RUN", str(-(2**70))],
        ["step", "replay", "RUN", "1", "--lineage", "1e9"],
        ["run", "serve", "RUN", "--port", "99999999999"],
    ],
)
def test_a_number_that_is_none_is_bad_usage(
    command: list[str], sample_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(sample_run) if word == "RUN" else word for word in command])
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


async def write_large_episode(run: Path, text: str) -> None:
    journal = SqliteJournal(run / "journal")
    of = spec(1)
    bodies = entries_with(1, "small")
    turn, tool = bodies[1], bodies[2]
    assert isinstance(turn, TurnEntry)
    assert isinstance(tool, ToolEntry)
    message = {"role": "tool", "content": text}
    bodies[1:3] = [
        msgspec.structs.replace(turn, text=text, messages=(message,)),
        msgspec.structs.replace(tool, observation=text, arguments={"a": text}),
        EffectEntry("look", "read", [text], text, 0.1),
        NondeterministicValueEntry("reasoning", text),
    ]
    calls = ["begin", *(f"r#{number}" for number in range(len(bodies)))]
    written = [JournalEntry("e1", 0, call, b"", encode_body(body)) for call, body in zip(calls, bodies, strict=False)]
    log = journal.turn_log("w0")
    journal.admit(of)
    for each in written:
        log.append(each)
    await journal.commit(EpisodeEnd(of, header(of, len(written)), episode_digest(written), {}, text))
    await journal.close()


@pytest.mark.slow
def test_megabytes_of_output_in_every_field_are_shown_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    asyncio.run(write_large_episode(run, "\x1b[31m<b>\u202e\n" * 200_000))
    for command in commands(run, random_stream("large", 0)):
        if "e1" not in command and command[0] == "episode" and command[1] != "list":
            command = [*command[:3], "e1", *[word for word in command[4:] if word.startswith("--")]]
        is_about_it = command[0] == "episode" or command[1] in ("export", "stats")
        if not is_about_it or command[1] in ("replay", "rescore") or "parquet" in command:
            continue
        assert main(command) in (0, 1, 2), command
        shown = capsys.readouterr()
        assert "--json" in command or len(shown.out) < 1_000_000, command
        assert all(
            character in "\n\t" or escape_text(character) == character for character in set(shown.out + shown.err)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [(0, 20), pytest.param(20, 230, marks=pytest.mark.exhaustive)])
def test_damaged_runs_and_files_are_answered_or_refused_by_name(tmp_path: Path, first: int, count: int) -> None:
    assert list(crashed(sample(tmp_path), first, count)) == []


LIMITED = """
import time
from tests.support.fuzzed import TooSlowError, limited

with limited(cpu_seconds=0.5, still_s=60.0):
    time.sleep(1.0)  # on a busy machine a command waits, and that is no crash
for limits, act in (
    ({"cpu_seconds": 0.2, "still_s": 60.0}, lambda: sum(1 for _ in iter(int, 1))),
    ({"cpu_seconds": 60.0, "still_s": 0.2}, lambda: time.sleep(60.0)),
):
    try:
        with limited(**limits):
            act()
    except TooSlowError as error:
        print(error)
"""


def test_what_counts_as_too_slow_does_not_depend_on_how_busy_the_machine_is(repository: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], cwd=repository, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == ["more than 0.2 s of CPU time", "no CPU time used in 0.2 s"], ended.stderr
