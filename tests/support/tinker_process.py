"""A server's process: what it imports, so that one that is forked from here starts in a fraction of a second."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp.web  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import agentrl.app.tinker
import agentrl.engines.embedded.engine
import agentrl.gateway.tinker
import agentrl.journal.store
import agentrl.learn.client_training  # noqa: F401
from agentrl.cli.main import main


def serve(command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Run a command of `agentrl` in this process, with its output in a file and its errors in one beside it."""
    os.environ.update(environment)
    for number, file in enumerate((output, output.with_suffix(".err")), start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    raise SystemExit(main(list(command)))
