"""What this user chose for recorded runs: the files in the user's own state directory; see `app.received`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import InputError
from agentrl.core.files import os_error_advice, replace_file


def run_root(run: Path) -> Path:
    """Return the resolved directory of a run, or of the run that a directory of forks belongs to."""
    root = Path(os.path.realpath(run))
    return root.parent if root.name == "forks" and (root.parent / "journal").is_dir() else root


@dataclass(frozen=True, slots=True)
class Choices:
    """What this user chose for a run, from the user's own state directory, which maps the run's resolved path to it."""

    run: Path
    settings: Mapping[str, Sequence[Any]]
    """Values that the user's own commands recorded in the run, by setting."""
    named: Mapping[str, Any]
    """Values that the user named for recorded ones, by setting."""
    environments: Mapping[str, str]
    """References to environments, by their names in the journal."""
    tasks: Sequence[Mapping[str, Any]]
    """What the data of the run's tasks choose; see `Environment.selects`."""

    @classmethod
    def nothing(cls, root: Path) -> Choices:
        """Make the choices for a run about which nothing is known."""
        return cls(root, {}, {}, {}, ())

    @classmethod
    def of(cls, run: Path) -> Choices:
        """Read the choices for a run, or for the run that a directory of forks belongs to.

        Raises:
            InputError: the file cannot be read.
        """
        root = run_root(run)
        path = _file(root)
        try:
            data = json.loads(path.read_bytes())
            return cls(root, data["settings"], data["named"], data["environments"], data["tasks"])
        except (FileNotFoundError, NotADirectoryError):  # the home may be no directory, such as /dev/null
            return cls.nothing(root)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise InputError(f"{path}: cannot be read ({error}); remove it to forget what it allows") from error

    def value_for(self, setting: str, recorded: Any) -> Any:
        """Return a recorded value that is the user's choice, or the one that the user named instead; else None."""
        return recorded if recorded in self.settings.get(setting, ()) else self.named.get(setting)

    def save(self) -> None:
        """Write the choices.

        Raises:
            InputError: the file cannot be written.
        """
        path = _file(self.run)
        content = {
            "run": str(self.run),
            "settings": dict(self.settings),
            "named": dict(self.named),
            "environments": dict(self.environments),
            "tasks": list(self.tasks),
        }
        encoded = json.dumps(content, indent=1).encode()
        try:
            if not path.is_file() or path.read_bytes() != encoded:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(path, encoded)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written ({error.strerror}); {os_error_advice(error)}, or set XDG_STATE_HOME to "
                "another directory"
            ) from error


def _file(run: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    digest = hashlib.blake2b(str(run).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return Path(state) / "agentrl" / "runs" / f"{digest}.json"
