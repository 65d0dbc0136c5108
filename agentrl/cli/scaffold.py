"""`agentrl env new NAME`: a directory with an environment, its tests and a configuration that pass as they are."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json
from agentrl.cli.scaffold_files import FILES
from agentrl.core.errors import InputError, StorageError

if TYPE_CHECKING:
    import argparse

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def env_new(options: argparse.Namespace) -> int:
    """`agentrl env new NAME`."""
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise InputError("the working directory was removed; go to one that exists") from error
    directory = write_environment(options.name, here)
    if options.json:
        print_json({"directory": str(directory), "files": sorted(FILES)})
        return 0
    name = options.name
    sys.stdout.write(
        f"wrote {name}/: {', '.join(FILES)}\n"
        "Next:\n"
        f"  cd {name}\n"
        "  agentrl env check env.py      # is it sound?\n"
        "  agentrl train train.toml      # the first curve, in half a minute\n"
    )
    return 0


def write_environment(name: str, parent: Path) -> Path:
    """Write the files of a new environment into `parent/name`, all or none.

    Raises:
        InputError: the name cannot be a package's, or means something already, or something lies there.
        StorageError: the files cannot be written.
    """
    _check_name(name)
    directory = parent / name
    if os.path.lexists(directory):
        raise InputError(f"{directory} exists; choose another name, or remove it")
    words = {"NAME": name, "CLASS": "".join(part.capitalize() for part in name.split("_"))}
    partial = parent / f".{name}.partial"
    try:
        partial.mkdir()
        for file, text in FILES.items():
            filled = re.sub(r"NAME|CLASS", lambda match: words[match[0]], text)
            (partial / file).write_text(filled, encoding="utf-8")
        partial.rename(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{directory} cannot be written ({error.strerror}); choose another directory") from error
    return directory


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith("_"):
        raise InputError(
            f"{name!r} cannot be the name of a package; write lower-case letters, digits and underscores, "
            "beginning with a letter, such as word_game"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise InputError(f"{name!r} is a word of Python; choose another name, such as {name}_game")
    from agentrl.environment.registry import registered

    is_module = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if is_module or name in {spec.id for spec in registered()}:
        kind = "a Python module" if is_module else "an environment"
        raise InputError(f"{name!r} is {kind} already; choose another name, such as my_{name}")
