"""Processes that are forked from one which has imported torch and transformers: importing them takes five seconds."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.cli.main import main

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "agentrl.app.training",
        "agentrl.app.worker_server",
        "agentrl.engines.embedded.engine",
        "agentrl.engines.remote.engine_server",
        "agentrl.learn.trainer",
        "agentrl_tinker.service",
        "agentrl.parts.learner",
        "transformers.models.qwen3.modeling_qwen3",
        "tests.support.one_process",
        "tests.support.short_start_checks",
    ]
)


def command(directory: Path, *arguments: str, file_size: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `agentrl` in a directory, with a limit on the size of files."""
    return call(main, list(arguments), directory=directory, file_size=file_size)


def script(directory: Path, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a file of Python in a directory."""
    return call(_run, file, arguments, directory=directory)


def cell(directory: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that stands in no file in a directory, as `python -c` or a notebook does."""
    return call(_run_cell, code, arguments, directory=directory)


def _run_cell(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    exec(code, main_module.__dict__)


def _run(file: Path, arguments: tuple[str, ...]) -> None:
    sys.argv = [str(file), *arguments]
    sys.path[0] = str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def call(
    function: Callable[..., int | None], *arguments: Any, directory: Path, file_size: int = 0
) -> subprocess.CompletedProcess[str]:
    """Call a function in a process of its own; what it returns is the exit code."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, name) for name in ("stdout", "stderr")]
        given = (function, arguments, directory, outputs, dict(os.environ), file_size)
        process = WARM.Process(target=_called, args=given)
        process.start()
        process.join()
        assert process.exitcode is not None
        said = [output.read_text() for output in outputs]
    return subprocess.CompletedProcess(repr(function), process.exitcode, *said)


def _called(
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
    directory: Path,
    outputs: list[Path],
    environment: dict[str, str],
    file_size: int,
) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path.insert(0, "")
    if file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.exit(function(*arguments))
