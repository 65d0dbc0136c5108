"""`.ci/run` hides the programs that tests are skipped without, runs the tests, installs the programs where it can, and
runs the tests that need them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = "#!/bin/sh\n"
INSTALL = "install -y --no-install-recommends chromium"
WORKS = 'printf "#!/bin/sh\\n" > "$BIN/chromium"; chmod +x "$BIN/chromium"'
FAILS = "exit 100"


def run_ci(tmp_path: Path, repository: Path, *, user: int, **programs: str) -> tuple[str, str]:
    """Run the script where only these programs exist; returns what apt-get was called with, and standard error."""
    bin_directory, log = tmp_path / "bin", tmp_path / "log"
    bin_directory.mkdir()
    log.touch()
    (tmp_path / ".ci").mkdir()
    shutil.copy(repository / ".ci" / "run", tmp_path / ".ci" / "run")
    make = '#!/bin/sh\n! read line || exit 3\nhas=$(command -v chromium)\necho "make $@ ${has:+with it}"\n'
    programs |= {"id": f"#!/bin/sh\necho {user}\n", "make": make}
    for name, text in programs.items():
        (bin_directory / name).write_text(text)
        (bin_directory / name).chmod(0o755)
    for name in ("sh", "dirname", "chmod", "mktemp", "ln", "rm"):
        (bin_directory / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={"PATH": str(bin_directory), "BIN": str(bin_directory), "LOG": str(log), "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == "make test "
    assert second == "make test-programs " + ("with it" if (bin_directory / "chromium").exists() else "")
    return log.read_text(), done.stderr


def apt(on_install: str) -> dict[str, str]:
    script = f'#!/bin/sh\necho "$@" >> "$LOG"\ncase "$*" in\n*" {INSTALL}") {on_install} ;;\nesac\n'
    return {"apt-get": script}


def test_root_installs_chromium_if_it_is_missing(tmp_path: Path, repository: Path) -> None:
    log, said = run_ci(tmp_path, repository, user=0, **apt(WORKS))
    assert log.index(" update") < log.index(INSTALL)
    assert "chromium" not in said


def test_a_chromium_that_is_there_is_left_alone(tmp_path: Path, repository: Path) -> None:
    log, said = run_ci(tmp_path, repository, user=0, chromium=CHROMIUM, **apt(WORKS))
    assert INSTALL not in log
    assert "chromium" not in said


@pytest.mark.parametrize(("user", "programs"), [(1000, apt(WORKS)), (0, apt(FAILS)), (0, {})])
def test_the_tests_run_without_a_chromium_that_cannot_be_installed(
    user: int, programs: dict[str, str], tmp_path: Path, repository: Path
) -> None:
    log, said = run_ci(tmp_path, repository, user=user, **programs)
    assert (INSTALL in log) == (programs == apt(FAILS))
    assert "no chromium" in said
