"""Building blocks of sections: base class, bounded numbers with units, on-resume rules, directories of packages.

Finding a directory of a package imports the package.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agentrl.core.custom_functions import Kind, installed_functions
from agentrl.core.errors import InputError
from agentrl.core.files import expand_path
from agentrl.core.json_data import copy_json
from agentrl.core.machine import install_command
from agentrl.core.ports import LARGEST_TEMPERATURE, LEAST_TEMPERATURE
from agentrl.core.reply_formats import REPLY_FORMATS


class NumberUnit(NamedTuple):
    """The unit of a number, for the configuration page."""

    name: str


class ResumeRule(NamedTuple):
    """Whether a setting may differ when a run is resumed; `config.load.check_settings_unchanged` enforces it."""

    rule: Literal["may differ", "per episode", "refused"]
    """Rule of the setting. `per episode`: an episode keeps the value it began with, from the journal, to its end."""
    of_deterministic: bool = True
    """Whether the setting may differ in a deterministic run too."""
    is_live: bool = False
    """Whether it may also change while the run runs, by `agentrl run set`."""

    def allows(self, *, deterministic: bool) -> bool:
        """Whether a run may be resumed with another value."""
        return self.rule != "refused" and (self.of_deterministic or not deterministic)


class Selects(NamedTuple):
    """What a setting chooses outside the run. `app.received` takes such values from the user alone, never from a run
    directory that others wrote. A test refuses settings that hold text and do not declare it."""

    what: Literal["code", "endpoint", "variable", "path", "machine", "nothing"]
    """`machine`: a part or service of the machine, for which there is a default."""


class DerivedDefault(NamedTuple):
    """The default of a setting that depends on others, in words, for the configuration page."""

    words: str


T = TypeVar("T")

Free = Annotated[T, ResumeRule("may differ")]
"""May differ on resume: a limit, a location, or how optimizer steps work from then on."""
Live = Annotated[T, ResumeRule("may differ", is_live=True)]
"""May differ on resume, and change while the run runs."""
WaveFixed = Annotated[T, ResumeRule("may differ", of_deterministic=False)]
"""May differ on resume, except in a deterministic run, where one value holds for each whole batch."""
PerEpisode = Annotated[T, ResumeRule("per episode", of_deterministic=False)]
"""May differ on resume: new episodes use the new value, running episodes keep theirs."""
Fixed = Annotated[T, ResumeRule("refused")]
"""Identifies the run; may not differ on resume."""


def expand_paths(value: Any) -> Any:
    """Expand a setting that holds a path, or a table keyed by paths, as `expand_path` does."""
    if isinstance(value, Mapping):
        return {expand_paths(key): item for key, item in value.items()}
    return expand_path(value) if isinstance(value, str | Path) else value


def _copy_options(options: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(copy_json(options, "options"))
    except TypeError as error:
        raise ValueError(str(error)) from None


def _check_temperature(value: float) -> float:
    """Check that every engine samples at a temperature: vLLM raises a lower one to the least, in silence."""
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"{value} is below {LEAST_TEMPERATURE}; 0 takes the likeliest token")
    return value


Options = Annotated[dict[str, Any], AfterValidator(_copy_options)]
"""Arguments of a user's function: JSON data, which commands that read the recorded configuration receive unchanged."""
Code = Annotated[T, Selects("code"), BeforeValidator(expand_paths)]
Endpoint = Annotated[T, Selects("endpoint")]
Variable = Annotated[T, Selects("variable")]
Location = Annotated[T, Selects("path"), BeforeValidator(expand_paths)]
Machine = Annotated[T, Selects("machine")]
Label = Annotated[T, Selects("nothing")]
"""Text that chooses nothing outside the run: names, filters, instructions."""

# Upper bounds are far above any machine's capacity; they catch slips such as bytes instead of MiB.
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**6)]
Rate = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0, le=10**8), NumberUnit("tokens")]
Episodes = Annotated[int, Field(gt=0, le=10**7), NumberUnit("episodes")]
Steps = Annotated[int, Field(gt=0, le=10**9), NumberUnit("optimizer steps")]
MaybeSteps = Annotated[int, Field(ge=0, le=10**9), NumberUnit("optimizer steps")]
Seconds = Annotated[float, Field(gt=0, le=1e9), NumberUnit("s")]
Share = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[float, Field(ge=0, le=LARGEST_TEMPERATURE), AfterValidator(_check_temperature)]


def _known_reply_format(name: str) -> str:
    if name != "auto" and name not in REPLY_FORMATS:
        raise ValueError(f"there is no reply format {name!r}; there are: auto, {', '.join(REPLY_FORMATS)}")
    return name


ReplyFormatName = Annotated[str, AfterValidator(_known_reply_format), Selects("nothing")]


_NAMES_IN_PAPERS: Mapping[tuple[str, str], str] = {
    ("advantage", "grpo"): "group_std",
    ("advantage", "dr_grpo"): "group_mean",
    ("advantage", "rloo"): "leave_one_out",
    ("advantage", "maxrl"): "max_rl",
    ("loss", "grpo"): "ppo",
    ("loss", "dr_grpo"): "ppo",
    ("loss", "dapo"): "ppo",
}
"""Built-in functions by their names in papers and other libraries (docs/how-to/coming_from.md)."""
PACKAGED: Mapping[Kind, str] = {
    "loss": "cispo clip_cov decoupled_ppo dppo geometric_mask gspo kl_cov m2po off_policy_mask sapo topr vespo",
    "advantage": "best_of_n gdpo gigpo max_rl pass_at_k reinforce_plus_plus reinforce_plus_plus_baseline",
}
"""Functions of packages/algorithms, by kind."""


def check_function_name(kind: Kind, name: str, built_in: Sequence[str] = ()) -> None:
    """Check that a function is built in, or may be the user's; it is not loaded here.

    Raises:
        ValueError: there is no such function.
    """
    if name not in built_in and ":" not in name and name not in (installed_names := installed_functions(kind)):
        if name in PACKAGED.get(kind, "").split():
            raise ValueError(f"{name!r} is in episodic-rl-algorithms: {install_command(package='algorithms')}")
        built_in_hint = f"; built in are {', '.join((*built_in, *installed_names))}" if built_in else ""
        if name_here := _NAMES_IN_PAPERS.get((kind, name.lower().replace("-", "_"))):
            built_in_hint = f"; here it is {name_here!r} (docs/reference/algorithms.md){built_in_hint}"
        raise ValueError(
            f"{name!r}: there is no such {kind}{built_in_hint}. One of your own is `module:function` or "
            "`path/to/file.py:function`"
        )


class Section(BaseModel):
    """A part of the configuration: immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def check(self) -> None:
        """Refuse values that do not fit each other; `load` names the section in front of the message.

        Raises:
            ValueError: the message names the keys within the section, and the fix.
        """

    @model_validator(mode="after")
    def _run_check(self) -> Self:
        self.check()
        return self


_PACKAGE_DIRECTORY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([^:\\]+)")


def resolve_package_directory(path: str) -> str:
    """Resolve `package:directory` to an absolute directory; return any other path unchanged.

    Raises:
        ValueError: the package, or the directory in it, does not exist.
    """
    match = _PACKAGE_DIRECTORY.fullmatch(path)
    if match is None or Path(path).exists():
        return path
    package, inner = match.groups()
    locations: Iterable[str] = ()
    try:
        locations = getattr(importlib.import_module(package), "__path__", ())
    except ModuleNotFoundError:
        pass
    except BaseException as error:  # importing runs third-party code
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"the package {package!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not locations:
        raise ValueError(f"there is no package {package!r}; install it, or give the path of a directory")
    for location in locations:
        directory = Path(location, inner)
        if directory.is_dir():
            return str(directory.resolve())
    raise ValueError(f"the package {package!r} has no directory {inner!r}")


def base_model_display_name(path: str) -> str:
    """Return the name of a base model, such as `Qwen/Qwen3-8B`: on the hub, or the last two parts of its directory."""
    return hub_commit(path)[0] or "/".join(Path(path).parts[-2:])


def hub_commit(path: str) -> tuple[str, str]:
    """Return the name on the hub and the commit of a model in huggingface_hub's cache; two empty texts for others."""
    *_, model, folder, commit = ("", "", "", *Path(path).parts)
    if folder != "snapshots" or not model.startswith("models--"):
        return "", ""
    return model.removeprefix("models--").replace("--", "/"), commit


def shipped_example(name: str) -> Path:
    """The path of an example's TOML file, in the installed package or in the source tree.

    Raises:
        InputError: the example does not exist; the message lists those that do.
    """
    package = Path(__file__).resolve().parents[1]
    folders = [package / "examples", package.parent / "examples"]
    files = {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.toml"))}
    if name not in files:
        raise InputError(f"no example {name!r}; there are: {', '.join(sorted(files)) or 'none, reinstall agentrl'}")
    return files[name]
