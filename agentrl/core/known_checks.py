"""Results of the checks of models, kept in the user's cache, so that a start repeats none whose result is known."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.core.files import replace_file
from agentrl.core.machine import library_versions

_PACKAGE = Path(__file__).parents[1]


def known_result(
    check: str, directory: str | Path, model: Any, max_context: int, compute: Callable[[], str | None]
) -> str:
    """Return the result of a check of a model. A check that raises is made again next time.

    The result is read from `$XDG_CACHE_HOME/agentrl/checks` (default `~/.cache`) if the check was made before on this
    machine: with the same configuration, number of parameters, dtype, device and files of the model, code of agentrl,
    and versions of Python and its libraries. Files are compared by size, inode and time of modification.

    Args:
        check: name of the check.
        directory: directory of the model.
        model: model as loaded from it, a `PreTrainedModel`.
        max_context: longest context, in tokens.
        compute: makes the check and returns its result; None: the model passed.
    """
    files = sorted((*Path(directory).glob("*"), *_PACKAGE.rglob("*.py")))
    facts = [
        *(check, max_context, model.num_parameters(), model.dtype, model.device, model.config.to_json_string()),
        *(platform.node(), library_versions()),
        *((file, status.st_size, status.st_ino, status.st_mtime_ns) for file in files for status in [file.stat()]),
    ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "agentrl" / "checks" / hashlib.sha256(repr(facts).encode()).hexdigest()
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text("utf-8")
    result = compute() or ""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, result.encode())
    return result
