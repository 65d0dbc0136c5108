"""TOML and dotted overrides to a `RunConfig`, and back to TOML. What is wrong is told by `mistakes.py`."""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.config.mistakes import config_error, misread, path_of, sections_in, short
from agentrl.config.policies import AnyPolicy, BotPolicy, FrozenPolicy
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

S = TypeVar("S", bound=BaseModel)

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
"""Of tables and lists in each other."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOML_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file, changed by `overrides`.

    Args:
        path: the file. A relative `model.path`, `environment.id` (a file's), `policies.NAME.path` or `policies.NAME.id`
            (a file's) is looked for beside it first, then in the working directory.
        overrides: `section.field=value`, with or without leading dashes; values are JSON, or text where they are not.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or a key or value does not fit; all problems are listed.
    """
    source = Path(path)
    data = read_toml(source)
    _check_plain(data, source)
    written = copy.deepcopy(data)
    raw: dict[tuple[str, ...], str] = {}
    for override in overrides:
        keys, text = _split(override)
        _set(data, keys, _value(text))
        raw[keys] = text
    _check_plain(data, source)
    config = _validated(data, raw, str(source))
    _check_read_as_written(written, config, source)
    path = _beside(source, config.model.path, key="model.path") if config.model.path else ""
    model = config.model.model_copy(update={"path": path})
    chosen = _code_beside(source, config.environment.id, key="environment.id")
    environment = config.environment.model_copy(update={"id": chosen})
    policies = {name: _policy_beside(source, name, policy) for name, policy in config.policies.items()}
    return config.model_copy(update={"model": model, "environment": environment, "policies": policies})


def read_mapping(data: Mapping[str, Any], source: str | Path, model: type[S]) -> S:
    """Another section than a `RunConfig`, from what was read; `source` is what errors call it. Raises as `load`."""
    _check_plain(data, Path(source))
    try:
        read = model.model_validate(data)
    except ValidationError as error:
        raise config_error(error, str(source), model) from None
    _check_read_as_written(data, read, Path(source))
    return read


def dump_toml(config: BaseModel) -> str:
    """The resolved configuration as TOML; `load` of it gives an equal configuration."""
    lines: list[str] = []
    _dump(config.model_dump(mode="json", exclude_none=True), (), lines)
    return "\n".join(lines).strip() + "\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def _beside(source: Path, path: str, *, key: str) -> str:
    """A path as seen from the file that names it, if something lies there."""
    try:
        there = source.parent / path
        return str(there.resolve()) if there.exists() else path
    except OSError as error:
        raise ConfigError(f"{source}: {key} = {short(path)}: cannot be looked for ({error.strerror})") from error


def _code_beside(source: Path, reference: str, *, key: str) -> str:
    """`path/to/file.py:Name` as seen from the file that names it; `module:Name` as it is."""
    file, colon, name = reference.partition(".py")
    return f"{_beside(source, file + colon, key=key)}{name}" if colon else reference


def _policy_beside(source: Path, name: str, policy: AnyPolicy) -> AnyPolicy:
    if isinstance(policy, BotPolicy):
        return policy.model_copy(update={"id": _code_beside(source, policy.id, key=f"policies.{name}.id")})
    if not (isinstance(policy, FrozenPolicy) and policy.path):
        return policy
    return policy.model_copy(update={"path": _beside(source, policy.path, key=f"policies.{name}.path")})


def read_toml(path: str | Path) -> dict[str, Any]:
    """What a TOML file says. Raises `ConfigError` where it cannot be read, or is none."""
    source = Path(path)
    try:
        if source.exists() and not (source.is_file() or source.is_dir()):
            raise ConfigError(f"{source}: is no regular file; a TOML file is wanted here, such as train.toml")
        with source.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{source}: longer than {MAX_BYTES:,} bytes, which no configuration is")
        return tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: is not text in UTF-8 ({error.reason} at byte {error.start}); save it so"
        ) from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _TOML_POSITION.search(message)
        where = f"{source}:{at[1]}:{at[2]}" if at else str(source)
        hint = "" if source.suffix == ".toml" else "; a TOML file is wanted here, such as train.toml"
        raise ConfigError(f"{where}: not TOML: {_TOML_POSITION.sub('', message)}{hint}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested deeper than {MAX_DEPTH}, which no configuration is") from error
    except ValueError as error:  # of `int`: it reads at most some thousand digits
        raise ConfigError(f"{source}: holds a number of too many digits") from error


def _check_plain(data: Mapping[str, Any], source: Path) -> None:
    """Refuse what not every reader of a configuration can hold: it is kept as JSON, compared, and printed as TOML."""
    level: list[tuple[tuple[str, ...], Any]] = [((), data)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[tuple[str, ...], Any]] = []
        for path, value in level:
            problem = ""
            if isinstance(value, dict):
                below += [((*path, key), inner) for key, inner in value.items()]
            elif isinstance(value, list):
                below += [((*path, str(index)), inner) for index, inner in enumerate(value)]
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                problem = "a whole number of more than 64 bits"
            elif isinstance(value, float) and not math.isfinite(value):
                problem = f"{value} is no number to go on with"
            elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
                problem = "text with a character that no file or path can hold"
            if problem:
                raise ConfigError(f"{source}: {'.'.join(path)}: {problem}")
        level = below
    if level:
        raise ConfigError(f"{source}: {'.'.join(level[0][0])[:80]}…: nested deeper than {MAX_DEPTH}")


def _check_read_as_written(data: Mapping[str, Any], read: BaseModel, source: Path) -> None:
    """Refuse text and `true` where a number is wanted: a file has a way to write numbers."""
    lines = list(misread(data, read.model_dump()))
    if lines:
        raise ConfigError(f"{source}: " + "\n  ".join(lines))


def _split(override: str) -> tuple[tuple[str, ...], str]:
    name, sign, text = override.lstrip("-").partition("=")
    parts = tuple(name.split("."))
    if not sign or not all(parts):
        raise ConfigError(
            f"{override!r}: an override is written section.field=value, for example trainer.loss.kind=ppo"
        )
    return parts, text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            dotted = ".".join(path[: depth + 1])
            raise ConfigError(f"{'.'.join(path)}: {dotted} is a value, not a section")
    data[path[-1]] = value


def _validated(data: dict[str, Any], raw: Mapping[tuple[str, ...], str], source: str) -> RunConfig:
    _choose_default_members(RunConfig, data)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        texts = [path for path in _wanted_text(error) if path in raw]
        if not texts:
            raise config_error(error, source) from None
    for path in texts:  # `--name=12` is the text "12", not the number
        _set(data, path, raw[path])
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise config_error(error, source) from None


def _wanted_text(error: ValidationError) -> Iterator[tuple[str, ...]]:
    for detail in error.errors(include_url=False):
        if detail["type"] == "string_type":
            yield tuple(str(part) for part in path_of(detail["loc"], RunConfig))


def _choose_default_members(model: type[BaseModel], data: dict[str, Any]) -> None:
    """Where a table of a tagged union leaves its tag out, it means the default's."""
    for name, field in model.model_fields.items():
        value = data.get(name)
        if not isinstance(value, dict):
            continue
        if isinstance(field.discriminator, str) and isinstance(field.default, BaseModel):
            value.setdefault(field.discriminator, getattr(field.default, field.discriminator))
        members, named = sections_in(field.annotation)
        for table in value.values() if named else [value]:
            if len(members) == 1 and isinstance(table, dict):
                _choose_default_members(members[0], table)


# --- writing ----------------------------------------------------------------------------------------------------------


def _dump(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_toml(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _dump(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        return repr(value)
    return "".join(c if c.isprintable() else _escape(c) for c in json.dumps(value, ensure_ascii=False))


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
