"""Reads a `RunConfig` from TOML with dotted overrides or from a journal, and writes it back to TOML.

Reports every mistake of a file at once, each with its key, the given value, the expected value and the nearest key that
exists.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import math
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from agentrl.config.fields import ResumeRule
from agentrl.config.mistakes import (
    converted_values,
    describe_validation_error,
    find_problems,
    format_short,
    keys_of_error,
    listed_problems,
)
from agentrl.config.policies import AnyPolicy, BotPolicy, FrozenPolicy, LocalPolicy, PolicyConfig, RemotePolicy
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, JournalError
from agentrl.core.files import expand_path, near_file_hint
from agentrl.core.masking import MASK, mask_secrets
from agentrl.core.removed import removed_settings
from agentrl.core.setting_paths import set_value, value_at

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


MAX_BYTES = 1 << 20
MAX_DEPTH = 32
"""Maximum nesting of tables and lists."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOML_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")
_TABLE, _SETTING = re.compile(r"\s*\[([^\[\]]+)\]"), re.compile(r"\s*([\w.-]+)\s*=")


def load(path: str | Path, overrides: Sequence[str] = (), *, endpoint: RemotePolicy | None = None) -> RunConfig:
    """Read the configuration in a TOML file, changed by `overrides`.

    Args:
        path: the file. A relative `model.path`, `policies.NAME.model`, `.reference` or `.path`, and the file of an
            `environment.id`, `policies.NAME.id`, `trainer.loss.name`, `credit.advantage` or `scorers.NAME.function`, is
            looked up first in the file's directory, then in the working directory.
        overrides: `section.field=value`, with or without leading dashes; values are JSON, numbers and
            inline tables of TOML, or else text.
        endpoint: takes the place of every policy that an engine of ours would serve, for an evaluation: no base model
            is needed, and what only training reads is left out.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or a key or value does not fit; all problems are listed.
    """
    source = Path(expand_path(path))
    data = read_toml(source)
    raw = dict(map(split_override, overrides))
    _check_policy_names(data, raw, source)
    config = _with_overrides(data, raw, source, endpoint)
    if isinstance(config, list):
        in_file = _with_overrides(data, {}, source, endpoint) if raw else config
        in_file = [line for line in config if isinstance(in_file, list) and line in in_file]
        elsewhere = [line for line in config if line not in in_file]
        by_place = {str(source): in_file, "on the command line": elsewhere}
        raise ConfigError("\n".join(f"{place}: {listed_problems(lines)}" for place, lines in by_place.items() if lines))
    path = resolve_path(source, config.model.path, key="model.path") if config.model.path else ""
    model = config.model.model_copy(update={"path": path})
    environment = config.environment.model_copy(update={"id": _resolve_environment(source, config.environment.id)})
    evaluation = config.evaluation.model_copy(update={"tasks": _resolve_splits(source, config.evaluation.tasks)})
    policies = {name: _resolve_policy(source, name, policy) for name, policy in config.policies.items()}
    update = {"model": model, "environment": environment, "evaluation": evaluation, "policies": policies}
    loss = _resolve_code(source, config.trainer.loss.name, key="trainer.loss.name")
    advantage = _resolve_code(source, config.credit.advantage.name, key="credit.advantage")
    scorers = {
        name: _resolve_code(source, scorer.function, key=f"scorers.{name}.function")
        for name, scorer in config.scorers.items()
    }
    config = config.model_copy(update=update)
    return config.with_functions(loss=loss, advantage=advantage, scorers=scorers)


def _with_overrides(
    data: Mapping[str, Any], raw: Mapping[tuple[str, ...], str], source: Path, endpoint: RemotePolicy | None
) -> RunConfig | list[str]:
    """Return the configuration of a file's data and overrides, or its mistakes."""
    changed: dict[str, Any] = copy.deepcopy(dict(data))
    try:
        for keys, text in raw.items():
            set_value(changed, keys, parse_value(text))
        _check_plain(changed)
    except ConfigError as error:
        return [str(error)]
    if endpoint is not None:
        _put_behind(endpoint, changed)
    try:
        config = _validate(changed, raw)
        config.check_turns_fit()
    except ValidationError as error:
        return find_problems(error, RunConfig)
    except ConfigError as error:
        return [str(error)]
    return list(converted_values(changed, config.model_dump())) or config


def _put_behind(endpoint: RemotePolicy, data: dict[str, Any]) -> None:
    """Make an endpoint hold every seat of a configuration except those of remote policies and bots.

    Names of policies, seats, limits and sampling stay, except the filters that the chat completions API lacks.
    """
    for only_trained in ("model", "best", "freeze", "deterministic"):
        data.pop(only_trained, None)
    unknown = {"top_k": 0, "min_p": 0.0}
    policies = data.get("policies") or {"policy": {}}
    for name, policy in policies.items() if isinstance(policies, dict) else ():
        if isinstance(policy, dict) and policy.get("kind") not in ("remote", "bot"):
            sampling = policy.get("sampling", {})
            policies[name] = endpoint.model_dump(mode="json")
            policies[name]["sampling"] = {**sampling, **unknown} if isinstance(sampling, dict) else sampling
    data["policies"] = policies


def dump_toml(config: BaseModel) -> str:
    """Write the resolved configuration as TOML; `load` of the text gives an equal one, except for masked secrets."""
    lines: list[str] = []
    data = config.model_dump(mode="json", exclude_none=True)
    _dump(mask_secrets(data), (), lines)
    return "\n".join(lines).strip() + "\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def resolve_path(source: Path, path: str, *, key: str) -> str:
    """Resolve a path against the file that names it, if something exists there, or at least its directory does, and
    nothing in the working directory."""
    try:
        relative_path = source.parent / path
        if relative_path.exists():
            return str(relative_path.resolve())
        is_missing_there = relative_path.parent.is_dir() and relative_path.parent.resolve() != source.parent.resolve()
        return os.path.abspath(relative_path) if is_missing_there and not Path(path).exists() else path
    except OSError as error:
        raise ConfigError(f"{source}: {key} = {format_short(path)}: cannot be read ({error.strerror})") from error


def _resolve_code(source: Path, reference: str, *, key: str) -> str:
    """Resolve `path/to/file.py:Name` against the file that names it; leave `module:Name` as it is."""
    file, extension, name = reference.partition(".py")
    if not extension:
        return reference
    path = resolve_path(source, file + extension, key=key)
    if not Path(path).exists() and name[:1] in ("", ":"):
        folders = dict.fromkeys(str((folder / path).parent.resolve()) for folder in (source.parent, Path()))
        names = [str(each.name) for folder in folders for each in Path(folder).glob("*.py")]
        close = difflib.get_close_matches(Path(path).name, names, n=1)
        hint = f"; did you mean {Path(file).with_name(close[0])}{name}?" if close else ""
        where = " or ".join(folders)
        raise ConfigError(
            f"{setting_place(source, key, reference)}: {key} = {format_short(reference)}: there is no file "
            f"{Path(path).name} in {where}{hint}. A relative path starts at the TOML file's directory, or else at the "
            "working directory"
        )
    return f"{path}{name}"


def setting_place(source: Path, key: str, value: str) -> str:
    """Return `FILE:LINE` of the line of a TOML file that gives a setting a value; without such a line, where else the
    value may come from."""
    table = ""
    for number, line in enumerate(source.read_text(encoding="utf-8-sig").splitlines(), 1):
        if heading := _TABLE.match(line):
            table = f"{heading[1].strip()}."
        elif (setting := _SETTING.match(line)) and f"{table}{setting[1]}" == key and value in line:
            return f"{source}:{number}"
    return f"{source}, or the command line"


def _resolve_environment(source: Path, setting: str | Mapping[str, float]) -> str | dict[str, float]:
    key = "environment.id"
    if isinstance(setting, str):
        return _resolve_code(source, setting, key=key)
    return {_resolve_code(source, member, key=key): rate for member, rate in setting.items()}


def _resolve_splits(source: Path, tasks: int | Mapping[str, int]) -> int | dict[str, int]:
    if isinstance(tasks, int):
        return tasks
    return {_resolve_code(source, name, key="evaluation.tasks"): count for name, count in tasks.items()}


def _resolve_policy(source: Path, name: str, policy: AnyPolicy) -> AnyPolicy:
    if isinstance(policy, BotPolicy):
        return policy.model_copy(update={"id": _resolve_code(source, policy.id, key=f"policies.{name}.id")})
    paths = {"model": policy.model} if isinstance(policy, LocalPolicy) else {}
    paths |= {"path": policy.path} if isinstance(policy, FrozenPolicy) else {}
    paths |= {"reference": policy.reference} if isinstance(policy, PolicyConfig) else {}
    absolute_paths = {
        key: resolve_path(source, path, key=f"policies.{name}.{key}") for key, path in paths.items() if path
    }
    return policy.model_copy(update=absolute_paths)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises `ConfigError` if it cannot be read or is not TOML."""
    source = Path(path)
    try:
        if source.exists() and not (source.is_file() or source.is_dir()):
            raise ConfigError(f"{source}: not a regular file; give a TOML file, such as train.toml")
        with source.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{source}: longer than {MAX_BYTES:,} bytes, which is too much for a configuration")
        data = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except FileNotFoundError as error:
        is_class = ".py:" in source.name
        hint = f"; give a TOML file, and --environment.id={source}" if is_class else near_file_hint(source, "*.toml")
        raise ConfigError(f"{source}: there is no such file in {source.parent.absolute()}{hint}") from error
    except IsADirectoryError as error:
        config_file = source / "train.toml"
        hint = f"; did you mean {config_file}?" if config_file.is_file() else "; give a TOML file, such as train.toml"
        raise ConfigError(f"{source}: is a directory{hint}") from error
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
        raise ConfigError(f"{source}: nested deeper than {MAX_DEPTH}, which is too much for a configuration") from error
    except ValueError as error:  # `int` refuses more than some thousand digits
        raise ConfigError(f"{source}: contains a number with too many digits") from error
    try:
        _check_plain(data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return data


def _check_plain(data: Mapping[str, Any]) -> None:
    """Refuse values that JSON or TOML cannot hold: the configuration is stored as JSON, compared, and printed as
    TOML."""
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
                problem = f"{value} is not a finite number"
            elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
                problem = "text with a character that is not allowed in files or paths"
            elif isinstance(value, str) and MASK in value:
                problem = f"{MASK} stands for a secret where a configuration is printed; write the value in its place"
            elif isinstance(value, datetime.date | datetime.time):
                problem = f"{value} is a date or a time, which a resumed run would receive as text: put it in quotes"
            if problem:
                raise ConfigError(f"{'.'.join(path)}: {problem}")
        level = below
    if level:
        raise ConfigError(f"{'.'.join(level[0][0])[:80]}…: nested deeper than {MAX_DEPTH}")


_KEY = re.compile(r""""[^"]+"|'[^']+'|[^.=]+""")
_OVERRIDE = re.compile(rf"(?P<keys>(?:{_KEY.pattern})(?:\.(?:{_KEY.pattern}))*)=(?P<value>.*)", re.DOTALL)


def split_override(override: str) -> tuple[tuple[str, ...], str]:
    """Split `section.field=value` into the keys and the text of the value. A key with a dot is quoted, as in TOML.

    Raises:
        ConfigError: it has no such form.

    Example:
        >>> split_override('--models."Qwen/Qwen2.5-0.5B".max_rank=64')
        (('models', 'Qwen/Qwen2.5-0.5B', 'max_rank'), '64')
    """
    match = _OVERRIDE.fullmatch(override.lstrip("-"))
    if match is None:
        raise ConfigError(f"{override!r}: write an override as section.field=value, for example trainer.loss.name=ppo")
    return tuple(key.strip("\"'") for key in _KEY.findall(match["keys"])), match["value"]


def _check_policy_names(data: Mapping[str, Any], raw: Mapping[tuple[str, ...], str], source: Path) -> None:
    """Refuse to override a setting of a policy that the file's `policies` lack: it would be a further policy, without a
    seat. One that is meant has a `kind`, or a seat."""
    policies = data.get("policies")
    if not isinstance(policies, Mapping) or any(keys[0] == "seats" for keys in raw):
        return
    of_policies = [keys for keys in raw if keys[0] == "policies" and len(keys) > 1]
    new_policies = {keys[1] for keys in of_policies if keys[2:] in ((), ("kind",))}
    for keys in of_policies:
        if keys[1] not in {*policies, *new_policies}:
            names = ", ".join(policies)
            raise ConfigError(f"{'.'.join(keys)}: {source} has no policy {keys[1]!r}; its policies: {names}")


def parse_value(text: str) -> Any:
    """Parse the value of an override: JSON, numbers and inline tables of TOML, or else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    with suppress(ValueError, RecursionError):
        value = tomllib.loads(f"value = {text}")["value"]  # parse the value as TOML
        if isinstance(value, dict | int | float):
            return value
    return text


def _validate(data: dict[str, Any], raw: Mapping[tuple[str, ...], str]) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        texts = [path for path in _text_keys(error) if path in raw]
        if not texts:
            raise
    for path in texts:  # `--name=12` is the text "12", not the number
        set_value(data, path, raw[path])
    return RunConfig.model_validate(data)


def _text_keys(error: ValidationError) -> Iterator[tuple[str, ...]]:
    for detail in error.errors(include_url=False):
        if detail["type"] == "string_type":
            yield tuple(str(part) for part in keys_of_error(detail["loc"], RunConfig))


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


def recorded_config(config: Mapping[str, Any]) -> RunConfig:
    """Validate a configuration that a journal recorded; see `RunLog.config`.

    Raises:
        JournalError: the configuration does not fit this version of agentrl.
        ConfigError: it has a setting that agentrl no longer has.
    """
    _check_removed(config)
    try:
        return RunConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise JournalError(
            f"the configuration in the run's journal cannot be used ({where}: {first['msg']}); it was altered, or was "
            "written by another version of agentrl"
        ) from error


def _check_removed(recorded: Mapping[str, Any]) -> None:
    if lines := list(removed_settings(recorded)):
        raise ConfigError(f"the run was made by an earlier version of agentrl: {listed_problems(lines)}")


# --- what a resume may change -----------------------------------------------------------------------------------------


class SettingDifference(NamedTuple):
    """A setting whose value on resume differs from the run's."""

    path: tuple[str, ...]
    before: Any
    now: Any
    rule: ResumeRule
    is_set: bool = True
    """Whether the configuration of the resume sets it; otherwise, its value may still be chosen."""

    @property
    def key(self) -> str:
        """Key as written on a command line."""
        return ".".join(self.path)

    def __str__(self) -> str:
        before, now = (mask_secrets(value, self.key) for value in (self.before, self.now))
        return f"{self.key} was {before!r} and is {now!r}"


def check_settings_unchanged(
    before: Mapping[str, Any], now: RunConfig, is_open: Callable[[SettingDifference], bool] = lambda _: False
) -> list[SettingDifference]:
    """Return the settings that differ from those of the run to resume, all of which may differ.

    Args:
        before: the configuration that the run was started with, as data; empty if unknown.
        now: the configuration to resume with.
        is_open: whether a setting may still get another value before the run resumes; such are not compared.

    Raises:
        ConfigError: a setting differs that must not; the message has its key, both values, and what to do. Or the run
            has a setting that agentrl no longer has.
    """
    _check_removed(before)
    differences = [difference for difference in setting_differences(before, now) if not is_open(difference)]
    violations = [
        difference for difference in differences if not difference.rule.allows(deterministic=now.deterministic)
    ]
    if violations:
        added = [each.key for each in violations if each.path[:-1] == ("policies",) and each.before is None]
        values = {difference.key: difference.before for difference in violations if difference.key not in added}
        shown = {key: value for key, value in values.items() if mask_secrets(value, key) == value}
        options = " ".join(f"--{key}={json.dumps(value)}" for key, value in shown.items())
        masked = [f"{key}: its value in config.json" for key in values if key not in shown]
        restore = "; ".join(filter(None, [options, *masked, *(f"remove {key}" for key in added)]))
        also = " of a deterministic run" if any(difference.rule.rule != "refused" for difference in violations) else ""
        raise ConfigError(
            f"{'; '.join(map(str, violations))}: a run is resumed with the settings it was started with, and its "
            "environment and model in the same place; docs/reference/configuration.md lists the settings that may "
            f"differ{also}. "
            f"Restore the original ({restore}), or start a new run with --name"
        )
    return differences


def setting_differences(before: Mapping[str, Any], now: RunConfig) -> list[SettingDifference]:
    """Return the settings that differ from `before`, the configuration of an earlier start; none if it is empty."""
    return [*_differences(now, now.model_dump(mode="json"), before)] if before else []


def _differences(
    section: BaseModel, now: Mapping[str, Any], before: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[SettingDifference]:
    """Compare setting by setting; one that an older version did not write had its default."""
    for name, field in type(section).model_fields.items():
        path, value = (*above, name), getattr(section, name)
        default = None
        if not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True, validated_data=dict(before)))
        then = before.get(name, default)
        if isinstance(value, BaseModel) and isinstance(then, Mapping):
            yield from _differences(value, now[name], then, path)
        elif path in (("policies",), ("scorers",)) and isinstance(then, Mapping):
            yield from _named_differences(value, now[name], then, path)
        elif then != now[name]:
            yield SettingDifference(path, then, now[name], resume_rule_of(field), name in section.model_fields_set)
    extra_arguments = section.model_extra or {}  # arguments of a function
    for name in {**extra_arguments, **before} if type(section).model_config["extra"] == "allow" else ():
        if name not in type(section).model_fields and extra_arguments.get(name) != before.get(name):
            yield SettingDifference(
                (*above, name), before.get(name), extra_arguments.get(name), ResumeRule("may differ")
            )


def _named_differences(
    sections: Mapping[str, BaseModel], now: Mapping[str, Any], before: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[SettingDifference]:
    """Compare policies or scorers by their names. The policies of a run stay; scorers may come and go."""
    for name in {**before, **sections}:
        was, section = before.get(name), sections.get(name)
        kind_then, kind = was.get("kind") if isinstance(was, Mapping) else None, getattr(section, "kind", None)
        if isinstance(was, Mapping) and section is not None and kind_then == kind:
            yield from _differences(section, now[name], was, (*path, name))
        elif path == ("policies",):
            key = (*path, name, "kind") if name in before else (*path, name)
            yield SettingDifference(key, kind_then, kind, ResumeRule("refused"))
        else:
            rule = ResumeRule("may differ", of_deterministic=False)
            yield SettingDifference((*path, name), was, now.get(name), rule)


def resume_rule_of(field: FieldInfo) -> ResumeRule:
    """The resume rule of a setting; a test refuses settings without one."""
    return next((mark for mark in field.metadata if isinstance(mark, ResumeRule)), ResumeRule("refused"))


class SettingSources(NamedTuple):
    """Where the settings of a start come from."""

    file: str = "the configuration"
    """The configuration's file, for messages."""
    named: Mapping[tuple[str, ...], Any] = types.MappingProxyType({})
    """Settings that the command line names, each with its value in the file."""

    def configured(self, config: BaseModel) -> dict[str, Any]:
        """Return a configuration's data as if its command line named no setting."""
        data = config.model_dump(mode="json")
        for path, value in self.named.items():
            set_value(data, path, value)
        return data


WITHOUT_COMMAND_LINE = SettingSources()


def setting_sources(file: str | Path, overrides: Sequence[str]) -> SettingSources:
    """Return the sources of the settings that `load` reads from a file and from overrides.

    Only a live setting has its value in the file, since no other one is compared after a resume.
    """
    live = [tuple(key.split(".")) for key in live_settings()]
    paths = {override: split_override(override)[0] for override in overrides}
    paths = {override: path for override, path in paths.items() if any(overlap(path, key) for key in live)}
    in_file: Mapping[str, Any] = {}
    if paths:
        with suppress(ConfigError):  # the file cannot be read without the override, so a resume needs it too
            others = [override for override in overrides if override not in paths]
            in_file = load(file, others).model_dump(mode="json")
    return SettingSources(str(file), {path: value_at(in_file, *path) for path in paths.values()})


def overlap(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether one of two settings is the other, or an entry of its table."""
    return all(key == other_key for key, other_key in zip(path, other, strict=False))


# --- what may change while a run runs ---------------------------------------------------------------------------------


def changed_config(config: RunConfig, path: tuple[str, ...], value: Any) -> tuple[RunConfig, list[SettingDifference]]:
    """Return a configuration with another value of a setting, and the differences.

    Raises:
        ConfigError: there is no such setting, or the value does not fit.
    """
    before = config.model_dump(mode="json")
    data = copy.deepcopy(before)
    set_value(data, path, value)
    _check_plain(data)
    try:
        new = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, RunConfig)) from None
    if lines := list(converted_values(data, new.model_dump())):
        raise ConfigError(listed_problems(lines))
    return new, list(_differences(new, new.model_dump(mode="json"), before))


def live_settings(section: type[BaseModel] = RunConfig, above: tuple[str, ...] = ()) -> list[str]:
    """Return the keys of the settings that may change while a run runs."""
    keys = []
    for name, field in section.model_fields.items():
        if resume_rule_of(field).is_live:
            keys.append(".".join((*above, name)))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += live_settings(field.annotation, (*above, name))
    return keys
