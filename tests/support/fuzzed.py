"""Damaged runs and files, and what the reading commands make of each.

    python -m tests.support.fuzzed RUN FIRST COUNT

RUN is a whole sample run, copied once and damaged COUNT times over, with seeds from FIRST on. Each damage is one of
`DAMAGES`, and some of all commands are asked about it. Memory is bounded as the figure says, and a command by CPU time.
A line of JSON says what went wrong; nothing, where each command answered or ended with a named error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from agentrl.cli.commands import READING
from agentrl.cli.main import main
from agentrl.core.ids import random_stream
from agentrl.core.text import escape_text
from agentrl.inspection.export.formats import EXPORTS
from agentrl.journal.control_rows import CHECKED_TABLES, row_checksum
from agentrl.journal.entries import entry_checksum

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 120.0
"""Of this process, that one command may take: however busy the machine is, it is the same."""
STILL_S = 600.0
"""Seconds in which a command uses no CPU time at all: it waits for what will not come."""
ASKED = 4
"""Commands for each damage."""
LEFT_OUT = {"run serve", "episode fork"}
"""They listen, or sample."""
DATABASES = ("journal/control.db", "journal/turns-0.db", "forks/journal/control.db", "forks/journal/turns-0.db")
FORMATS = [name for name in EXPORTS if name != "parquet"]
"""pyarrow reserves more address space than all else takes; its lines are those of JSON."""
ODD: tuple[Any, ...] = (
    *(None, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, float("inf"), "", "\0", "x" * 100_000, "e0", "[]"),
    *(
        "{}",
        "null",
        "NaN",
        "[" * 5_000,
        '{"a":' * 2_000,
        '{"solver": 7}',
        "\x1b[2J\u202e",
        b"",
        b"\xff\xfe",
        b"\x80" * 99,
    ),
    *("solver@0.1", "../../../etc/passwd", "9" * 400, "1e999", '{"x": 1e999}', "\N{SNOWMAN}", "turns-0.db", "%s%n"),
)


def commands(run: Path, draw: Random) -> list[list[str]]:
    """A command line for each reading command, about an episode or a step that may be there."""
    episode = draw.choice([f"e{draw.randrange(16)}", f"e{draw.randrange(12)}~0.r#2.{draw.randrange(4)}", "v1", "f0"])
    asked = []
    for noun in READING:
        for verb in noun.verbs:
            if f"{noun.name} {verb.name}" in LEFT_OUT:
                continue
            names = [argument.name for argument in verb.arguments]
            line = [noun.name, verb.name, str(run.parent if "directory" in names else run)]
            line += [episode] if "id" in names else []
            line += [str(draw.randrange(1, 9))] if "step" in names else []
            line += ["--details"] if "--details" in names else []
            line += ["--once"] if "--once" in names else []
            line += ["--to", draw.choice(FORMATS), "--out", str(run.parent / "out")] if "--to" in names else []
            if "--match" in names and draw.random() < 0.5:
                line += ["--match", "right 63"]
            if "--where" in names and "id" not in names:
                line += ["--where", draw.choice(["", "reward < 1 or status = dropped", "staleness > 0", "detail ~ a"])]
            asked.append([*line, *(["--json"] if draw.random() < 0.3 else [])])
    return asked


# --- damages ----------------------------------------------------------------------------------------------------------


def bytes_changed(run: Path, draw: Random) -> None:
    path = run / draw.choice(DATABASES)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 4, 64, 512))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def cut(run: Path, draw: Random) -> None:
    path = run / draw.choice(DATABASES)
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def pages_swapped(run: Path, draw: Random) -> None:
    path = run / draw.choice(DATABASES)
    content = path.read_bytes()
    pages = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    for _ in range(draw.choice((1, 3))):
        one, other = draw.randrange(len(pages)), draw.randrange(len(pages))
        pages[one], pages[other] = pages[other], pages[one]
    path.write_bytes(b"".join(pages))


def rows_altered(run: Path, draw: Random) -> None:
    """Values of any type in the control log, in half of all cases under a checksum that fits."""
    with contextlib.closing(sqlite3.connect(run / draw.choice((DATABASES[0], DATABASES[2])))) as connection:
        table = draw.choice((*CHECKED_TABLES, "meta", "metrics"))
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
        for row in draw.sample(rows, min(len(rows), draw.choice((1, 5, 1000)))):
            changed = list(row)
            for _ in range(draw.choice((1, 1, 3))):
                place = draw.randrange(len(names) - 1)
                changed[place] = draw.choice([*ODD, row[place]])
            if table in CHECKED_TABLES and draw.random() < 0.7:
                with contextlib.suppress(UnicodeEncodeError):
                    changed[-1] = row_checksum(table, changed[:-1])
            same = " AND ".join(f"{name} IS ?" for name in names)
            sets = ", ".join(f"{name} = ?" for name in names)
            with contextlib.suppress(sqlite3.Error):
                connection.execute(f"UPDATE {table} SET {sets} WHERE {same}", (*changed, *row))
        connection.commit()


def entries_altered(run: Path, draw: Random) -> None:
    """Other contents of entries under checksums that fit, of episodes whose commit names no digest."""
    connection = sqlite3.connect(run / DATABASES[1])
    rows = connection.execute("SELECT id, episode, attempt, call, asked, body FROM entries").fetchall()
    for number, episode, attempt, call, asked, body in draw.sample(rows, draw.choice((1, 20, len(rows)))):
        value = msgspec.msgpack.decode(body)
        damaged = msgspec.msgpack.encode(altered(value, draw))
        connection.execute(
            "UPDATE entries SET body = ?, checksum = ? WHERE id = ?",
            (damaged, entry_checksum(episode, attempt, call, asked, damaged), number),
        )
    connection.commit()
    connection.close()
    control = sqlite3.connect(run / DATABASES[0])
    names = [row[1] for row in control.execute("PRAGMA table_info(episodes)")]
    for row in control.execute("SELECT * FROM episodes").fetchall():
        changed = [b"" if name == "digest" else value for name, value in zip(names, row, strict=True)]
        checksum = row_checksum("episodes", changed[:-1])
        control.execute(
            "UPDATE episodes SET digest = x'', checksum = ? WHERE episode = ? AND attempt = ?", (checksum, *row[:2])
        )
    control.commit()
    control.close()


def altered(value: Any, draw: Random) -> Any:
    """A value with something else somewhere in it."""
    if isinstance(value, list | dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = altered(value[key], draw)
        return value
    if isinstance(value, bytes) and draw.random() < 0.5:
        return value[: draw.randrange(len(value) + 1)] + draw.randbytes(draw.randrange(9))
    return draw.choice([*ODD, {7: [None]}, {None: b""}, [[[]]] * 9, list(range(5_000)), {"role": 3, "content": [1]}])


def schema_changed(run: Path, draw: Random) -> None:
    statements = (
        "CREATE VIEW trap AS SELECT 1",
        "CREATE TRIGGER trap AFTER INSERT ON meta BEGIN SELECT 1; END",
        "DROP TABLE meta",
        "DROP INDEX entries_by_episode",
        "DROP TABLE step_units",
        "ALTER TABLE episodes RENAME COLUMN reward TO prize",
        "UPDATE meta SET value = '7' WHERE key = 'format'",
        "UPDATE meta SET value = 'x' WHERE key = 'info'",
        "UPDATE meta SET value = '[' WHERE key = 'info'",
        'UPDATE meta SET value = \'{"config": {"model": {"path": 7}}, "name": [1]}\' WHERE key = \'info\'',
        "DELETE FROM meta",
        "PRAGMA writable_schema = 1; UPDATE sqlite_master SET sql = 'CREATE TABLE x(y)' WHERE type = 'table'",
        "PRAGMA writable_schema = 1; UPDATE sqlite_master SET rootpage = 3",
    )
    with contextlib.closing(sqlite3.connect(run / draw.choice(DATABASES))) as connection:
        with contextlib.suppress(sqlite3.Error):
            connection.executescript(draw.choice(statements))
        connection.commit()


def files_damaged(run: Path, draw: Random) -> None:
    """The files of a run beside its databases: step columns, process record, status, metrics, configuration."""
    steps = [path.relative_to(run) for path in sorted((run / "steps").rglob("*.safetensors"))]
    name = draw.choice([*steps[:3], "process.json", "status.json", "metrics.jsonl", "config.json"])
    content = bytearray((run / name).read_bytes())
    for _ in range(draw.choice((1, 8, 64))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    (run / name).write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.3 else content)


DAMAGES: tuple[Callable[[Path, Random], None], ...] = (
    *(bytes_changed, bytes_changed, cut, pages_swapped, rows_altered, rows_altered, rows_altered),
    *(entries_altered, entries_altered, schema_changed, files_damaged),
)


# --- asking -----------------------------------------------------------------------------------------------------------


class TooSlowError(BaseException):
    """A command took more CPU time than any may, or stood still."""


@contextlib.contextmanager
def limited(cpu_seconds: float = CPU_SECONDS, still_s: float = STILL_S) -> Iterator[None]:
    """Within, in the main thread: at most so much CPU time, and no standstill.

    Raises:
        TooSlowError: where the code within is then.
    """
    used = time.process_time()

    def too_slow(*_: object) -> None:
        raise TooSlowError(f"more than {cpu_seconds:g} s of CPU time")

    def look(*_: object) -> None:
        nonlocal used
        before, used = used, time.process_time()
        if used - before < 0.01:
            raise TooSlowError(f"no CPU time used in {still_s:g} s")

    signal.signal(signal.SIGPROF, too_slow)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, still_s, still_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def wrong_with(command: list[str]) -> str | None:
    """What a command did that none may; None where it answered, or ended with a named error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
            code = main(command)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - what is looked for
        return traceback.format_exc()
    told = out.getvalue() + err.getvalue()
    if code not in (0, 1, 2, 74) or "Traceback" in err.getvalue() or "not enough memory" in err.getvalue():
        found = re.search(r"/\S*agentrl-error-\S+\.txt", err.getvalue())
        trace = Path(found[0]).read_text(encoding="utf-8", errors="replace") if found else ""
        Path(found[0]).unlink() if found else None
        return f"exit code {code}: {err.getvalue()[-1000:]}{trace[-3000:]}"
    return None if escape_text(told) == told else "a control character reached the terminal"


def damaged_run(folder: Path, whole: Path, draw: Random) -> list[list[str]]:
    run = folder / "run"
    draw.choice(DAMAGES)(run, draw)
    return draw.sample(commands(run, draw), ASKED)


def work(whole: Path, first: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for number in range(first, first + count):
        draw = random_stream("fuzz", number)
        with tempfile.TemporaryDirectory(prefix="agentrl-fuzz-", dir=whole.parent) as name:
            folder = Path(name)
            shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("versions"))
            for command in damaged_run(folder, whole, draw):
                if (wrong := wrong_with(command)) is not None:
                    told = [part.replace(name, "TMP") for part in command]
                    print(json.dumps({"seed": number, "command": told, "wrong": wrong}), flush=True)
        print(json.dumps({"finished": number}), flush=True)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
