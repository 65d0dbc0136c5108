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
from agentrl.exchange.exporting import export
from agentrl.exchange.files import staging_path
from agentrl.exchange.formats import EXPORTS
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
    with pytest.raises(InputError, match="exists; use --force"):
        export_between(sample_run, out, "jsonl", force=False)
    assert [json.loads(line)["episode"] for line in out.read_text().splitlines()] == ["e1"]
    out.unlink()
    export_between(sample_run, out, "jsonl", force=True)
    assert len(out.read_text().splitlines()) > 3, "the last to end wins"
    assert list(tmp_path.iterdir()) == [out]


def test_of_two_exports_to_one_directory_the_first_to_end_stays(sample_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="exists; remove it"):
        export_between(sample_run, out, "atif", force=True)
    assert [file.name for file in out.iterdir()] == ["e1.0.json"]
    assert list(tmp_path.iterdir()) == [out]


def test_only_a_file_is_replaced(sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("mine")
    for out, format, why in (
        (tmp_path / "pipe", "jsonl", "exists; name another place"),
        (tmp_path / "directory", "jsonl", "exists; remove it"),
        (tmp_path / "file", "atif", "exists; remove it"),
        (Path("."), "jsonl", "is a directory"),
        (Path("/"), "jsonl", "is a directory"),
        (tmp_path / "..", "atif", "is a directory"),
        (tmp_path / ("n" * 300), "jsonl", "choose a shorter name"),
    ):
        command = ["run", "export", str(sample_run), "--to", format, "--where", "episode = e1", "--out", str(out)]
        assert main([*command, "--force"]) in (2, 74)
        assert why in capsys.readouterr().err, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file", "pipe"]


KILLED = """
import os, signal, sys
from pathlib import Path
from agentrl.exchange.exporting import export
from tests.unit.test_exchange_building import Interrupted
export(Interrupted(Path(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)), sys.argv[2], Path(sys.argv[3]))
"""


@pytest.mark.parametrize("format", ["jsonl", "atif"])
def test_what_a_killed_export_leaves_is_gone_after_the_next(sample_run: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, sample_run, format, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-exchange-")
    (tmp_path / ".tmp-exchange-link").symlink_to(sample_run)
    reader = RunReader(sample_run)
    with staging_path(tmp_path / "other") as others:
        others.mkdir()
        export(reader, format, out)
        assert others.is_dir(), "it is in use"
    reader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-exchange-link", "out"]
    assert (sample_run / "journal" / "control.db").is_file()


def test_what_is_built_may_be_read_by_whom_the_user_lets(sample_run: Path, tmp_path: Path) -> None:
    reader, before = RunReader(sample_run), os.umask(0o022)
    try:
        export(reader, "jsonl", tmp_path / "lines", where="episode = e1")
        export(reader, "atif", tmp_path / "trajectories", where="episode = e1")
    finally:
        os.umask(before)
        reader.close()
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "trajectories").stat().st_mode & 0o777 == 0o755


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
    assert full.stderr == f"agentrl: {out}: {why}\n"
    assert list(tmp_path.iterdir()) == []


KILLED_IMPORT = """
import os, signal, sys
from itertools import islice
from pathlib import Path
from agentrl.exchange import verifiers
from agentrl.exchange.importing import BATCH_EPISODES, import_run
read = verifiers.read

def until_killed(source):
    yield from islice(read(source), BATCH_EPISODES + 1)
    os.kill(os.getpid(), signal.SIGKILL)

verifiers.read = until_killed
import_run(Path(sys.argv[1]), "verifiers", Path(sys.argv[2]))
"""


def test_what_a_killed_import_leaves_is_no_run_and_gone_after_the_next(tmp_path: Path) -> None:
    source, out = tmp_path / "results.jsonl", tmp_path / "theirs" / "run"
    source.write_text(f"{json.dumps({'prompt': 'how many?', 'completion': 'three'})}\n" * 300)
    killed = subprocess.run([sys.executable, "-c", KILLED_IMPORT, source, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".tmp-exchange-")
    assert any(file.name.startswith("turns-") for file in left.rglob("*.db")), "something was written"
    assert main(["run", "import", str(source), str(out), "--from", "verifiers"]) == 0
    assert list(out.parent.iterdir()) == [out]
    reader = RunReader(out)
    assert reader.count() == 300
    reader.close()


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


def test_what_may_not_be_written_or_read_is_named(sample_run: Path, tmp_path: Path) -> None:
    source, closed, hidden = tmp_path / "results.jsonl", tmp_path / "closed", tmp_path / "job" / "hidden"
    source.write_text(json.dumps({"prompt": "how many?", "completion": "three"}))
    closed.mkdir(0o555)
    hidden.mkdir(0o000, parents=True)
    mend = "cannot be written (Permission denied); make it writable"
    for format in ("jsonl", "atif"):
        said = refused("export", sample_run, "--to", format, "--out", closed / "out")
        assert said == f"agentrl: {closed / 'out'}: the export {mend}\n"
    assert (
        refused("import", source, closed / "run", "--from", "verifiers")
        == f"agentrl: {closed / 'run'}: the run {mend}\n"
    )
    assert list(closed.iterdir()) == []
    for format, where in (("verifiers", hidden), ("atif", hidden), ("atif", hidden.parent), ("atif", hidden / "below")):
        said = refused("import", where, tmp_path / "run", "--from", format)
        assert (
            said == f"agentrl: {hidden if where != hidden / 'below' else where}: cannot be read (Permission denied)\n"
        )
    assert not (tmp_path / "run").exists()
    hidden.chmod(0o700)


@pytest.mark.parametrize("size", [0, 4_096, 100_000, 300_000])
def test_an_import_that_finds_no_room_says_so_and_leaves_nothing(tmp_path: Path, size: int) -> None:
    source, out = tmp_path / "results.jsonl", tmp_path / "theirs" / "run"
    said = {"prompt": "how many? " * 100, "completion": "three " * 100, "reward": 1.0}
    source.write_text(f"{json.dumps(said)}\n" * 300)
    full = limited("import", source, out, "--from", "verifiers", size=size)
    assert full.returncode == 74
    assert full.stderr.startswith(f"agentrl: {out}: the run cannot be written (")
    assert "--resume" not in full.stderr
    assert list(out.parent.iterdir()) == []
    assert limited("import", source, out, "--from", "verifiers", size=100_000_000).returncode == 0
    assert list(out.parent.iterdir()) == [out]
