"""The parts of sections: their base class, numbers with bounds and units, on-resume rules, directories of packages.

Finding a directory of a package imports nothing but the package's parents.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from agentrl.core.errors import InputError


class Unit(NamedTuple):
    """What a number counts or measures, for the configuration page."""

    name: str


class OnResume(NamedTuple):
    """Whether a setting may differ when a run is resumed; `config.run.check_unchanged` enforces it."""

    rule: Literal["may differ", "per episode", "refused"]
    """`per episode`: an episode keeps, to its end, the value that it began with; the journal has it."""
    of_deterministic: bool = True
    """Whether it may differ in a deterministic run, too."""

    def allows(self, *, deterministic: bool) -> bool:
        """Whether a run may be resumed with another value."""
        return self.rule != "refused" and (self.of_deterministic or not deterministic)


T = TypeVar("T")

Free = Annotated[T, OnResume("may differ")]
"""A setting that may differ on resume: a limit, a place, or what optimizer steps do from then on."""
WaveFixed = Annotated[T, OnResume("may differ", of_deterministic=False)]
"""A setting that may differ but of a deterministic run, whose batches are each played with one value of it."""
PerEpisode = Annotated[T, OnResume("per episode", of_deterministic=False)]
"""A setting that episodes to come take over, and episodes that have begun do not."""
Fixed = Annotated[T, OnResume("refused")]
"""A setting that says which run it is."""

# Upper bounds lie far above what any machine holds: they refuse slips, such as bytes where MiB are meant.
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**6)]
Rate = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0, le=10**8), Unit("tokens")]
Episodes = Annotated[int, Field(gt=0, le=10**7), Unit("episodes")]
Steps = Annotated[int, Field(gt=0, le=10**9), Unit("optimizer steps")]
MaybeSteps = Annotated[int, Field(ge=0, le=10**9), Unit("optimizer steps")]
Seconds = Annotated[float, Field(gt=0, le=1e9), Unit("s")]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


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
