"""Remembers the environment files that the user named with `--environment`, so that they are named once per run.

The file `environments.json` is in the user's own state directory, never in the run's: a run received from others cannot
choose which code runs. It maps a run's resolved path to references by the name of the environment in the journal.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import InputError
from agentrl.core.files import os_error_advice, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping


def remembered_environment(run: Path, name: str) -> str | None:
    """Return the reference that the user gave for an environment of a run; None if there is none.

    Raises:
        InputError: the file of references cannot be read.
    """
    return _references().get(str(run.resolve()), {}).get(name)


def remember_environment(run: Path, name: str, reference: str) -> None:
    """Remember the reference for an environment of a run.

    Raises:
        InputError: the file of references cannot be read or written.
    """
    references = _references()
    of_run = references.get(str(run.resolve()), {})
    if of_run.get(name) == reference:
        return
    content = json.dumps({**references, str(run.resolve()): {**of_run, name: reference}}, indent=1)
    path = _path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content.encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); {os_error_advice(error)}") from error


def _references() -> Mapping[str, Mapping[str, str]]:
    path = _path()
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it to forget all environments") from error


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "agentrl" / "environments.json"
