"""Exports and imports at once, killed half-way, and on disks that refuse: the target is whole or it is not there."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.inspection.comparisons import fork_tree
from agentrl.inspection.export.exporting import export
from agentrl.inspection.export.formats import EXPORTS
from agentrl.inspection.export.staging import staging_path
from agentrl.inspection.reader import EpisodeView, RunReader
from tests.processes import without_the_rights_of_root


class Interrupted(RunReader):
    """A reader to whom something happens between two episodes of an export."""

    def __init__(self, run: Path, happens: Callable[[], object]) -> None:
        super().__init__(run)
        self._happens: Callable[[], object] | None = happens
        self._read = 0

    def episode(self, episode_id: str, attempt: int | None = None) -> EpisodeView:
        self._read += 1
        if self._read == 3 and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return super().episode(episode_id, attempt)


def export_between(run: Path, out: Path, format: str, *, force: bool) -> None:
    """Two exports at once: the second begins and ends while the first is being written."""

    def other() -> None:
        with_other = RunReader(run)
        export(with_other, format, out, where="episode = e1")
        with_other.close()

    reader = Interrupted(run, other)
    try:
        export(reader, format, out, where="environment ~ Propose", force=force)
    finally:
        reader.close()


def test_two_exports_to_one_file_at_once_are_each_whole(sample_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="--force"):
        export_between(sample_run, out, "jsonl", force=False)
    assert [json.loads(line)["episode"] for line in out.read_text().splitlines()] == ["e1"]
    out.unlink()
    export_between(sample_run, out, "jsonl", force=True)
    assert len(out.read_text().splitlines()) > 3, "the last to end wins"
    assert list(tmp_path.iterdir()) == [out]


def test_only_a_file_is_replaced(sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for out, format, why in (
        (tmp_path / "pipe", "jsonl", "exists; name another place"),
        (tmp_path / "directory", "jsonl", "exists; remove it"),
        (Path("."), "jsonl", "is a directory"),
        (Path("/"), "jsonl", "is a directory"),
        (tmp_path / "..", "jsonl", "is a directory"),
        (tmp_path / ("n" * 300), "jsonl", "choose a shorter name"),
    ):
        command = ["run", "export", str(sample_run), "--to", format, "--where", "episode = e1", "--out", str(out)]
        assert main([*command, "--force"]) in (2, 74)
        assert why in capsys.readouterr().err, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "pipe"]


KILLED = """
import os, signal, sys
from pathlib import Path
from agentrl.inspection.export.exporting import export
from tests.unit.test_export_building import Interrupted
export(Interrupted(Path(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)), sys.argv[2], Path(sys.argv[3]))
"""


def test_what_a_killed_export_leaves_is_gone_after_the_next(sample_run: Path, tmp_path: Path) -> None:
    out, format = tmp_path / "out", "jsonl"
    killed = subprocess.run([sys.executable, "-c", KILLED, sample_run, format, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-export-")
    (tmp_path / ".tmp-export-link").symlink_to(sample_run)
    reader = RunReader(sample_run)
    with staging_path(tmp_path / "other") as others:
        others.mkdir()
        export(reader, format, out)
        assert others.is_dir(), "it is in use"
    reader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-export-link", "out"]
    assert (sample_run / "journal" / "control.db").is_file()


def test_what_is_built_may_be_read_by_whom_the_user_lets(sample_run: Path, tmp_path: Path) -> None:
    reader, before = RunReader(sample_run), os.umask(0o022)
    try:
        export(reader, "jsonl", tmp_path / "lines", where="episode = e1")
    finally:
        os.umask(before)
        reader.close()
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o644


def limited(*arguments: str | Path, size: int) -> subprocess.CompletedProcess[str]:
    """A command in a process that may write no file larger than so many bytes: the disk that is full."""
    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )


@pytest.mark.parametrize("format", EXPORTS)
def test_an_export_that_finds_no_room_says_so_and_leaves_nothing(sample_run: Path, tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    full = limited("export", sample_run, "--to", format, "--where", "turns > 5", "--out", out, size=4_000)
    assert full.returncode == 74
    why = "the export cannot be written (File too large); raise the limit on the size of files (ulimit -f)"
    assert full.stderr == f"reading the run …\nagentrl: {out}: {why}\n"
    assert list(tmp_path.iterdir()) == []


def refused(*arguments: str | Path) -> str:
    """What a command says that fails on files it has no right to."""
    found = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=without_the_rights_of_root,
    )
    assert found.returncode in (2, 74)
    return found.stderr


def test_an_export_without_the_right_to_write_is_named(sample_run: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o555)
    message = refused("export", sample_run, "--to", "jsonl", "--out", closed / "out")
    assert f"{closed / 'out'}: " in message
    assert list(closed.iterdir()) == []


def test_a_long_page_reports_its_progress(sample_run: Path, tmp_path: Path) -> None:
    parts: list[tuple[str, float]] = []
    reader = RunReader(sample_run)
    export(reader, "html", tmp_path / "page.html", on_progress=lambda *part: parts.append(part))
    forks = sum(node.depth > 0 for node in fork_tree(reader))
    count = reader.count() + forks
    reader.close()
    total = f"{count} episodes, with {forks} forks"
    assert parts[:2] == [(f"100 of {total}", 100 / count), (f"200 of {total}", 200 / count)]
