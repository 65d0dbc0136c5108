"""Runs whose machine misbehaves: a clock that jumps, a disk that turns read-only, processes that stand still."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.chaos import processes_of
from tests.support.chaos_oracle import judge
from tests.support.programs import FAKETIME

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 12
JUMPING = 18
"""Steps of the run whose clock jumps: three times as many as the jumps need."""


def start(
    repository: Path, directory: Path, *, steps: int = STEPS, resume: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """A whole run in processes of its own: scripted engine and a trainer that digests, both beside the loop."""
    command = ["tests.support.chaos_run", "scripted", str(directory), "0", str(steps), *(["resume"] if resume else [])]
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


@contextmanager
def reaped(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def asked(directory: Path, statement: str) -> list[tuple[object, ...]]:
    path = directory / "run" / "journal" / "control.db"
    if not path.exists():
        return []
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)
    try:
        return connection.execute(statement).fetchall()
    except sqlite3.OperationalError:  # its tables are being made
        return []
    finally:
        connection.close()


def steps_taken(directory: Path) -> int:
    """The steps that the policy which is furthest behind has taken."""
    taken = [int(str(step)) for (step,) in asked(directory, "SELECT max(step) FROM steps GROUP BY policy")]
    return min(taken) if len(taken) == 2 else 0


def latest(directory: Path) -> float:
    """When the newest step was taken, as its label has it."""
    return float(str(asked(directory, "SELECT max(stepped_at) FROM steps")[0][0]))


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def flawless(directory: Path, *, ended: bool, steps: int = STEPS) -> None:
    verdict = judge(directory, ended=ended)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors
    if ended:
        assert set(verdict.steps.values()) == {steps}


@pytest.mark.exhaustive
@pytest.mark.needs("libfaketime")
def test_a_clock_that_jumps_an_hour_both_ways_changes_nothing(repository: Path, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0")
    faked = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with reaped(start(repository, tmp_path, steps=JUMPING, **faked)) as process:
        until(lambda: steps_taken(tmp_path) >= 2, process)
        offset.write_text("+3600")
        until(lambda: latest(tmp_path) > time.time() + 3000, process)
        for jump in ("+0", "-3600"):
            offset.write_text(jump)
            taken = steps_taken(tmp_path)
            until(lambda: steps_taken(tmp_path) > taken, process)  # noqa: B023
        _, said = process.communicate(timeout=800)
    assert process.returncode == 0, said
    flawless(tmp_path, ended=True, steps=JUMPING)
    assert asked(tmp_path, "SELECT DISTINCT drop_reason FROM episodes WHERE drop_reason IS NOT NULL") in (
        [],
        [("run_ended",)],
    )
    for policy in ("asker", "solver"):
        labels = [
            float(str(at))
            for (at,) in asked(tmp_path, f"SELECT stepped_at FROM steps WHERE policy = '{policy}' ORDER BY step")
        ]
        assert labels == sorted(labels)
        assert labels[-1] - labels[0] > 3000  # the clock did jump
    ((longest,),) = asked(tmp_path, "SELECT max(seconds) FROM episodes")
    assert 0 <= float(str(longest)) < 600


@pytest.mark.exhaustive
@pytest.mark.needs("libfaketime")
def test_a_clock_set_back_between_two_lives_keeps_the_order_of_what_happened(repository: Path, tmp_path: Path) -> None:
    faked = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    with reaped(start(repository, tmp_path, **faked, FAKETIME="+3600")) as process:
        until(lambda: steps_taken(tmp_path) >= 4, process)
        process.send_signal(signal.SIGKILL)
    flawless(tmp_path, ended=False)
    ((before,),) = asked(tmp_path, "SELECT max(committed_at) FROM episodes")
    with reaped(start(repository, tmp_path, resume=True, **faked, FAKETIME="-3600")) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    flawless(tmp_path, ended=True)
    ((first,),) = asked(tmp_path, "SELECT min(stepped_at) FROM steps WHERE lineage > 0")
    assert float(str(first)) > float(str(before))


STILL_S = 4.0
SILENCE_S = 2.0


@pytest.mark.parametrize(
    "role", ["engine", *(pytest.param(role, marks=pytest.mark.exhaustive) for role in ("orchestrator", "trainer"))]
)
def test_a_process_that_stands_still_costs_time_and_nothing_else(repository: Path, tmp_path: Path, role: str) -> None:
    """The engine's silence is noticed and it is replaced; the trainer and the loop are waited for."""
    with reaped(start(repository, tmp_path, CHAOS_SILENCE_S=f"{SILENCE_S}")) as process:
        until(lambda: steps_taken(tmp_path) >= 3, process)
        victims = [process.pid] if role == "orchestrator" else processes_of(process.pid)[role]
        for victim in victims:
            os.kill(victim, signal.SIGSTOP)
        time.sleep(STILL_S)
        flawless(tmp_path, ended=False)
        for victim in victims:
            if Path(f"/proc/{victim}").exists():
                os.kill(victim, signal.SIGCONT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    flawless(tmp_path, ended=True)
    assert ("no sign of life" in said) == (role == "engine"), said


def can_break_a_disk() -> bool:
    tools = ("mkfs.ext4", "losetup", "mount", "findmnt", "unshare")
    return os.geteuid() == 0 and all(map(shutil.which, tools)) and Path("/dev/loop-control").exists()


ON_A_DISK = """
set -e
mount -o loop,errors=remount-ro "$1/disk.img" "$1/disk"
if [ -n "$2" ]; then
  ( while [ "$(ls "$1/disk/run/versions/solver" 2>/dev/null | wc -l)" -lt 3 ]; do sleep 0.05; done
    echo broken > /sys/fs/ext4/$(basename $(findmnt -no SOURCE "$1/disk"))/trigger_fs_error ) >/dev/null 2>&1 &
  trap "kill $! 2>/dev/null || true" EXIT
fi
shift 2
code=0; "$@" || code=$?
exit $code
"""


@pytest.mark.skipif(not can_break_a_disk(), reason="needs root, ext4 on a loop device, and a mount namespace")
def test_a_disk_that_turns_read_only_ends_the_run_by_name_and_it_goes_on_later(
    repository: Path, tmp_path: Path
) -> None:
    """The kernel's own: an error of the file system, and it takes no more writes, from open files either."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with (tmp_path / "disk.img").open("wb") as image:
        image.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(tmp_path / "disk.img")], check=True)

    def on_the_disk(*command: str, breaks: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["unshare", "-m", "bash", "-c", ON_A_DISK, "disk", str(tmp_path), breaks, *command],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    run = [sys.executable, "-m", "tests.support.chaos_run", "scripted", str(disk), "0", str(STEPS)]
    look = (
        "from pathlib import Path; from tests.support.chaos_oracle import judge; import sys\n"
        "verdict = judge(Path(sys.argv[1]), ended=sys.argv[2] == 'ended')\n"
        "print(sorted(verdict.lost | verdict.twice | verdict.ledger_errors), sorted(verdict.steps.values()))"
    )
    with reaped(on_the_disk(*run, breaks="yes")) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 74, said
    assert "--resume" in said, said
    with reaped(on_the_disk(sys.executable, "-c", look, str(disk), "no")) as process:
        found, said = process.communicate(timeout=240)
    assert found.startswith("[] "), found + said
    with reaped(on_the_disk(*run, "resume")) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    with reaped(on_the_disk(sys.executable, "-c", look, str(disk), "ended")) as process:
        found, said = process.communicate(timeout=240)
    assert found.strip() == f"[] [{STEPS}, {STEPS}]", found + said
