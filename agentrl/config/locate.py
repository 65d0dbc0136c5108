"""Where files that come with a package lie: a model inside an installed environment, the shipped examples.

Nothing is imported but the parents of the package that is asked for.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from agentrl.core.errors import InputError

_PACKAGE_DIRECTORY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([^:\\]+)")


def package_directory(path: str) -> str:
    """The absolute directory that `package:directory` stands for; any other path as it is.

    Raises:
        ValueError: there is no such package, or no such directory in it.
    """
    match = _PACKAGE_DIRECTORY.fullmatch(path)
    if match is None or Path(path).exists():
        return path
    package, inner = match.groups()
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    except BaseException as error:  # foreign code: the parents of the package are imported
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"the package {package!r} cannot be imported: {type(error).__name__}: {error}") from error
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"there is no package {package!r}; install it, or give the path of a directory")
    for root in spec.submodule_search_locations:
        found = Path(root, inner)
        if found.is_dir():
            return str(found.resolve())
    raise ValueError(f"the package {package!r} has no directory {inner!r}")


def shipped_example(name: str) -> Path:
    """The path of an example's TOML file, in the installed package or in the source tree.

    Raises:
        InputError: there is no such example; the message lists them.
    """
    package = Path(__file__).resolve().parents[1]
    folders = [package / "examples", package.parent / "examples"]
    files = {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.toml"))}
    if name not in files:
        raise InputError(f"no example {name!r}; there are: {', '.join(sorted(files)) or 'none, reinstall agentrl'}")
    return files[name]
