"""What a recorded run may use outside its directory: the one gate for every command that acts on a run's records.

A run directory is data, and may come from someone else. What it recorded never chooses code, endpoints, environment
variables, files or parts of the machine. Those come from

* the user's command line: `--environment`, `--section.field=value`, `--task.key=value`;
* the user's own state directory, which holds what this user's `train`, `evaluate` and earlier commands chose for the
  run, by value. A moved run has no such record, and a changed value differs from it.

`config.fields.Selects` marks the settings concerned, and `Environment.selects` the keys of a task's data.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import linecache
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic_core import PydanticUndefined, to_jsonable_python

from agentrl.app.hub import download_model, is_hub_name
from agentrl.config.fields import Selects, expand_paths
from agentrl.config.load import parse_value, recorded_config, split_override
from agentrl.config.mistakes import format_short, sections_in_annotation
from agentrl.config.run import RunConfig
from agentrl.config.sections import FunctionConfig
from agentrl.core.choices import Choices, run_root
from agentrl.core.errors import EnvironmentDefinitionError, InputError, JournalError
from agentrl.core.files import refuse_links_below
from agentrl.core.records import EpisodeSpec, Task, WeightsRef
from agentrl.core.setting_paths import set_value
from agentrl.core.text import escape_line
from agentrl.environment.environment import MAX_READ_TASKS, Environment, TaskSource
from agentrl.environment.mixture import MixedTasks, all_environment_classes, root_environment_of_task, root_environments
from agentrl.environment.registry import (
    as_environment,
    is_trl_class,
    loaded_environment,
    name_of,
    registered_environments,
    resolve,
)
from agentrl.journal.entries import code_digest
from agentrl.journal.reader import referred_journal

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_SHOWN = 200
"""Maximum number of characters shown of a name or value from a journal."""
PACKAGES = ("agentrl", "environments")
"""Packages that came with agentrl: their environments run when a journal names them."""
TASK = "task"
"""Prefix of options that name values of a task's data."""
_INSTALLATION = Path(__file__).resolve().parents[2]


class Use(NamedTuple):
    """The settings that a command acts on."""

    kinds: frozenset[str]
    """Kinds of `Selects`."""
    ignored: tuple[str, ...]
    """Patterns of settings that the command does not act on."""

    def includes(self, selection: Selection) -> bool:
        """Whether the command acts on a setting."""
        is_ignored = any(fnmatchcase(selection.key, pattern) for pattern in self.ignored)
        return selection.what in self.kinds and not is_ignored

    def without_models(self) -> Use:
        """For a caller that brings its own models."""
        return self._replace(ignored=(*self.ignored, "model.path", "policies.*.model"))


_TRAINING = ("environment.*", "evaluation.*", "credit.*", "directory", "sinks")
FORK = Use(
    frozenset({"code", "endpoint", "variable", "path", "machine"}), (*_TRAINING, "trainer.*", "policies.*.reference")
)
REPLAY = Use(frozenset({"path"}), (*_TRAINING, "trainer.*", "scorers.*", "policies.*.reference", "policies.*.path"))
STEP_REPLAY = Use(frozenset({"code", "path"}), (*_TRAINING, "scorers.*", "policies.*.path", "policies.*.id"))


class Selection(NamedTuple):
    """A recorded setting that chooses something outside the run."""

    path: tuple[str, ...]
    what: str
    value: Any
    default: Any
    """The default as JSON data; `PydanticUndefined`: there is none."""

    @property
    def key(self) -> str:
        """Key as written on a command line."""
        return ".".join(self.path)

    @property
    def is_harmless(self) -> bool:
        """Whether the value is the default, or names something that is installed with agentrl or by an entry point."""
        if self.value == self.default or self.value in ("", None):
            return True
        if not isinstance(self.value, str):
            return self.value in ({}, [], ())
        if self.what == "code":
            return ":" not in self.value and not self.value.endswith(".py")
        return self.what == "path" and any(
            Path(os.path.realpath(self.value)).is_relative_to(package) for package in _package_directories()
        )


def selections(
    data: Mapping[str, Any], section: type[BaseModel] = RunConfig, above: tuple[str, ...] = ()
) -> Iterator[Selection]:
    """Yield the settings in a configuration's data that choose something outside the run. The data need not be
    valid."""
    if issubclass(section, FunctionConfig) and data.get("name") not in (*section.built_in, None):
        for name in data.keys() - section.model_fields.keys():
            yield Selection((*above, name), "code", data[name], PydanticUndefined)
    for name, field in section.model_fields.items():
        if name not in data:
            continue
        mark = next((mark for mark in field.metadata if isinstance(mark, Selects)), None)
        if mark is not None and mark.what != "nothing":
            default = field.default if field.default_factory is None else PydanticUndefined
            default = default if default is PydanticUndefined else to_jsonable_python(default)
            # Judged by what the setting becomes, not by how it is written.
            value = expand_paths(data[name]) if mark.what in ("code", "path") else data[name]
            yield Selection((*above, name), mark.what, value, default)
        members, is_table = sections_in_annotation(field.annotation)
        tables = data[name].items() if is_table and isinstance(data[name], Mapping) else [(None, data[name])]
        for key, table in tables if members else ():
            path = (*above, name) if key is None else (*above, name, str(key))
            if isinstance(table, str) and issubclass(members[0], FunctionConfig):
                table = {"name": table}
            member = members[0] if len(members) == 1 else _member(members, table)
            if member is not None and isinstance(table, Mapping):
                yield from selections(table, member, path)


def _member(members: Sequence[type[BaseModel]], table: Any) -> type[BaseModel] | None:
    """Return the section of a tagged union that a table belongs to; None: it is invalid."""
    kind = table.get("kind", "trained") if isinstance(table, Mapping) else None
    return next((member for member in members if kind in get_args(member.model_fields["kind"].annotation)), None)


def remember_run(
    run: Path,
    config: RunConfig,
    environments: Mapping[str, str],
    tasks: Sequence[Mapping[str, Any]] = (),
    *,
    resumed: bool = False,
) -> list[str]:
    """Remember what this user's run uses outside its directory. Returns a warning if that is impossible.

    Args:
        run: the run's directory.
        config: its resolved configuration.
        environments: references to its environments, by name.
        tasks: what its tasks choose; see `selected_by_tasks`.
        resumed: whether to keep what is remembered for the directory.
    """
    try:
        before = Choices.of(run)
        if not resumed:
            before = Choices.nothing(before.run)
        settings = {key: list(values) for key, values in before.settings.items()}
        for selection in selections(config.model_dump(mode="json")):
            if not selection.is_harmless and selection.value not in (values := settings.setdefault(selection.key, [])):
                values.append(selection.value)
        all_tasks = _distinct((*before.tasks, *tasks))
        known = {**before.environments, **environments}
        Choices(before.run, settings, before.named, known, all_tasks).save()
    except InputError as error:
        return [f"replays and forks of this run will ask for what it uses: {error}"]
    return []


def selected_by_task(environment: type[Environment], task: Task) -> dict[str, Any]:
    """Return what the data of a task choose outside the run, as JSON data."""
    return {key: to_jsonable_python(task.data.get(key)) for key in environment.selects}


def selected_by_tasks(environment: type[Environment], sources: Iterable[TaskSource]) -> list[Mapping[str, Any]]:
    """Return what the tasks of a run choose, from the first `MAX_READ_TASKS` tasks of each source."""
    if not any(root.selects for root in root_environments(environment)):
        return []
    members = [m for source in sources for m in (source.members if isinstance(source, MixedTasks) else [source])]
    tasks = (member[index] for member in members for index in range(min(len(member), MAX_READ_TASKS)))
    return _distinct(selected_by_task(root_environment_of_task(environment, task.id), task) for task in tasks)


def _distinct(choices: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({json.dumps(choice, sort_keys=True): choice for choice in choices}.values())


# --- the gate ---------------------------------------------------------------------------------------------------------


class ReceivedRun:
    """A recorded run as a command may use it.

    Args:
        run: the run's directory, or that of its forks.
        overrides: values that the user names, as `section.field=value` or `task.key=value`; see `config.load.load`.

    Raises:
        InputError: an override is malformed.
        JournalError: a file of its weights is a link, a pipe or a device.
    """

    def __init__(self, run: Path, overrides: Sequence[str] = ()) -> None:
        self.run = run
        # One place, unless the run's forks are elsewhere.
        places = dict.fromkeys((Path(os.path.realpath(run)), run_root(run)))
        refuse_links_below(*(place / name for place in places for name in ("versions", "checkpoints")))
        self.choices = Choices.of(run)
        self.overrides = dict(map(split_override, overrides))

    def command(self, name: str, *arguments: object, environment: type | str | None = None) -> str:
        """Return a command on this run, with everything that the user named, for a message that adds options to it."""
        words = ["agentrl", *name.split(), str(self.run), *map(str, arguments)]
        words += ["--environment", environment] if isinstance(environment, str) else []
        words += [f"--{'.'.join(path)}={text}" for path, text in self.overrides.items()]
        return shlex.join(words)

    def config(
        self,
        recorded: Mapping[str, Any],
        use: Use,
        command: str,
        choose_code: Callable[[str], object] = lambda command: None,
    ) -> RunConfig:
        """Return a recorded configuration with what the user chose.

        Settings of the machine that the user did not choose have their defaults: the run is used on this machine.

        Args:
            recorded: the configuration as data.
            use: settings that the command acts on.
            command: the user's command, for the message.
            choose_code: chooses the code to run by `environment`, given the command for its message: one refusal then
                names everything that the command needs.

        Raises:
            InputError: only the run names a value that the command acts on; the message has the options that allow it.
            JournalError: the configuration is invalid.
        """
        data = copy.deepcopy(dict(recorded))
        named = self._name(data)
        requested = [
            selection
            for selection in list(selections(data))
            if selection.key not in named and not self._settle(data, selection, use)
        ]
        if requested:
            command += f" {_options(requested)}"
            try:
                choose_code(command)
                how = f"name them once:\n  {command}"
            except InputError as error:
                how = f"name them once, with the code: {error}"
            raise InputError(_how_to_allow(self.run, requested, how))
        config = recorded_config(data)
        if named:
            self.choices = replace(self.choices, named={**self.choices.named, **named})
            self.choices.save()
        return config

    def _name(self, data: dict[str, Any]) -> dict[str, Any]:
        """Set the values that the user names on the command line; returns them by setting.

        Raises:
            InputError: a named setting is the run's alone.
        """
        texts = {selection.path for selection in selections(data) if isinstance(selection.value, str)}
        overrides = {path: text for path, text in self.overrides.items() if path[0] != TASK}
        for path, text in overrides.items():
            set_value(data, path, text if path in texts else parse_value(text))
        usable = {selection.path: selection for selection in selections(data)}
        if unusable := overrides.keys() - usable.keys():
            raise InputError(
                f"--{'.'.join(min(unusable))}: only settings that choose code, endpoints, environment variables, files "
                "or parts of the machine can be given here; the others are the run's"
            )
        for path in overrides:
            set_value(data, path, _absolute(usable[path]))
        return {usable[path].key: _absolute(usable[path]) for path in overrides}

    def _settle(self, data: dict[str, Any], selection: Selection, use: Use) -> bool:
        """Keep a recorded value that is the user's choice, or replace it; returns whether the command may continue."""
        if selection.is_harmless or selection.value in self.choices.settings.get(selection.key, ()):
            return True
        if selection.key in self.choices.named:
            set_value(data, selection.path, self.choices.named[selection.key])
        elif selection.what == "machine":
            _remove(data, selection.path)
        elif use.includes(selection):
            return False
        elif selection.what == "path" and isinstance(selection.value, str) and ":" in selection.value:
            set_value(data, selection.path, f"./{selection.value}")  # unused; `package:directory` would be imported
        return True

    def remember_weights(self, all_weights: Iterable[WeightsRef]) -> None:
        """Remember the weights with which the user's command writes forks, whose configuration then names them.

        Raises:
            InputError: the user's state directory cannot be written.
        """
        settings = {key: list(values) for key, values in self.choices.settings.items()}
        for weights in all_weights:
            paths = settings.setdefault(f"policies.{weights.version.policy}.path", [])
            if weights.path not in paths:
                paths.append(weights.path)
        if settings != self.choices.settings:
            self.choices = replace(self.choices, settings=settings)
            self.choices.save()

    def allows_weights(self, policy: str, path: str) -> bool:
        """Whether the user chose a directory of weights for a policy."""
        key = f"policies.{policy}.path"
        return path in (*self.choices.settings.get(key, ()), self.choices.named.get(key))

    def task(self, environment: type[Environment], task: Task, command: str) -> Task:
        """Return a recorded task with the values that the user named for its data.

        Raises:
            InputError: only the run names a program, address or file that its environment uses.
        """
        overrides = {
            path[1]: text if isinstance(task.data.get(path[1]), str) else parse_value(text)
            for path, text in self.overrides.items()
            if path[0] == TASK and len(path) == 2
        }
        if unknown := overrides.keys() - set(environment.selects):
            known = ", ".join(f"--{TASK}.{key}" for key in environment.selects) or "no such option"
            raise InputError(f"--{TASK}.{min(unknown)}: {environment.__name__} has {known}")
        selected = {**selected_by_task(environment, task), **overrides}
        if selected == selected_by_task(environment, task) and selected in ({}, *self.choices.tasks):
            return task
        if missing := [key for key in environment.selects if key not in overrides]:
            names = [Selection((TASK, key), "task", selected[key], None) for key in missing]
            raise InputError(_how_to_allow(self.run, names, f"name them once:\n  {command} {_options(names)}"))
        if selected not in self.choices.tasks:
            self.choices = replace(self.choices, tasks=[*self.choices.tasks, selected])
            self.choices.save()
        return replace(task, data={**task.data, **overrides})

    def environment(
        self,
        name: str,
        chosen: type | str | None,
        *,
        references: Mapping[str, str],
        code_hash: str,
        command: str,
        is_child: bool = False,
    ) -> type[Environment]:
        """Choose the class to run for an episode of an environment.

        Args:
            name: name of the environment in the journal.
            chosen: the class that the user named, or a reference to it. The class of the recorded name in the same
                module takes its place for a child, and if the run has an environment of the chosen name: the user then
                means the module. Otherwise the chosen class replaces the recorded one. A reference to the file that
                played the episode is remembered for the run.
            references: references to the code of the run's environments, by name; see `environment_code_references`.
            code_hash: hash of the environment's module when the episode was played.
            command: the user's command without `--environment`, for the message.
            is_child: whether another episode started this one.

        Raises:
            InputError: only the journal names the code; the message has the command with which the user can name it.
        """
        if chosen is not None:
            environment = resolve(chosen)
            recorded = {class_name(other) for other in (*references, *references.values(), name)}
            if is_child or environment.__name__ in recorded:
                environment = _class_or_sibling(environment, references.get(name, name))
            remembered = _file_of(self.choices.environments.get(name, ""))
            is_known = bool(remembered) and _source_hash(remembered) == code_hash
            file = _file_of(chosen) if isinstance(chosen, str) and not is_known else ""
            if isinstance(chosen, str) and file and _source_hash(file) == code_hash:
                reference = os.path.abspath(file) + chosen.removeprefix(file)
                environments = {**self.choices.environments, name: reference}
                self.choices = replace(self.choices, environments=environments)
                self.choices.save()
            return environment
        if (loaded_type := loaded_environment(name)) is not None:
            return loaded_type
        try:
            installed = {
                reference for entry in registered_environments() for reference in (entry.id, entry.entry_point)
            }
            if name in installed or _came_with_agentrl(name):
                return resolve(name)
        except EnvironmentDefinitionError as error:
            raise InputError(f"{error}; name the code to run: {command} --environment path/to/env.py:Class") from error
        reference = self.choices.environments.get(name, "")
        file = _file_of(reference) or _module_file(reference.rpartition(":")[0])
        if not file or _source_hash(file) != code_hash or not _is_guarded(name, file):
            raise InputError(_how_to_name(name, references, code_hash, command))
        return _class_or_sibling(resolve(reference), name)


def refusal_on_resume(
    journal: Path, environment: type[Environment], tasks: Sequence[Mapping[str, Any]], spec: EpisodeSpec
) -> str:
    """Return why an episode that a run left unfinished cannot be resumed: only the journal names what it needs. Empty
    if it can.

    Args:
        journal: directory of the run's journal.
        environment: class of root episodes of the user's configuration, or a mixture of classes. A child may also have
            any environment that their code has loaded.
        tasks: what the configuration's tasks choose; see `selected_by_tasks`.
        spec: the episode, as the journal has it.
    """
    configured = {name_of(known): known for known in all_environment_classes(environment)}.get(spec.environment)
    played_by = (
        loaded_environment(spec.environment) if configured is None and spec.parent_id is not None else configured
    )
    if played_by is None:
        return (
            f"the journal names the environment {spec.environment[:MAX_SHOWN]!r}, which the configuration does not; "
            "if a configured environment spawns it, name it in fan_out"
        )
    if spec.fork is not None:
        try:
            referred_journal(journal, spec.fork.journal)
        except JournalError as error:
            return str(error)
    if (selected := selected_by_task(played_by, spec.task)) and selected not in tasks:
        return f"the journal's task names {format_short(selected)}, which no task of the configuration does"
    return ""


def _absolute(selection: Selection) -> Any:
    """Return a value that the user named, independent of the working directory and of the state of the hub."""
    value = selection.value
    if not isinstance(value, str) or selection.what not in ("code", "path"):
        return value
    if selection.what == "code":
        file, extension, name = value.partition(".py")
        return f"{os.path.abspath(file + extension)}{name}" if extension else value
    if is_hub_name(value):
        return str(download_model(selection.key, value))
    return os.path.abspath(value) if os.path.exists(value) else value


def _package_directories() -> list[Path]:
    """Return the directories of the packages that came with agentrl."""
    return [_INSTALLATION / name for name in PACKAGES if _is_own_package(name)]


def _is_own_package(name: str) -> bool:
    """Whether Python finds a package only where agentrl was installed, or checked out."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec
        return False
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return bool(places) and all(os.path.realpath(place) == str(_INSTALLATION / name) for place in places)


def _came_with_agentrl(name: str) -> bool:
    """Whether a journal's name of an environment is `module:Class` of a package that came with agentrl. A path, or a
    module of the working directory, is not."""
    location, _, attribute = name.rpartition(":")
    parts = location.split(".")
    is_module = all(part.isidentifier() for part in (*parts, attribute))
    return is_module and parts[0] in PACKAGES and _is_own_package(parts[0])


def _remove(data: dict[str, Any], path: Sequence[str]) -> None:
    for key in path[:-1]:
        data = data[key]
    del data[path[-1]]


def _text(value: Any) -> str:
    """Return a value as written behind `--section.field=`."""
    return value if isinstance(value, str) else json.dumps(value)


def _options(requested: Sequence[Selection]) -> str:
    """Return the options that allow settings; keys may be of a section that others have named."""
    pairs = [(escape_line(each.key), escape_line(_text(each.value)[:MAX_SHOWN])) for each in requested]
    return " ".join(f"--{shlex.quote(key)}={shlex.quote(value)}" for key, value in pairs)


def _how_to_allow(run: Path, requested: Sequence[Selection], how: str) -> str:
    lines = [f"  {escape_line(selection.key)} = {format_short(selection.value)}" for selection in requested]
    return (
        f"{run} is not a run that you trained here, or was changed since, and would choose what is used on this "
        "machine:\n" + "\n".join(lines) + f"\nIf you trust these values, or have others, {how}"
    )


# --- environments -----------------------------------------------------------------------------------------------------


def recorded_environment_code(info: Mapping[str, Any]) -> Mapping[str, str]:
    """Return references to the code of a run's environments, by name, from its journal's `info`; see
    `app.run_parts.environment_code_references`."""
    code = info.get("code")
    return (
        {name: location for name, location in code.items() if isinstance(location, str)}
        if isinstance(code, dict)
        else {}
    )


def class_name(name: str) -> str:
    """Return the name of the class in an environment's name."""
    return name.rpartition(":")[2].rpartition(".")[2]


def _class_or_sibling(environment: type[Environment], name: str) -> type[Environment]:
    """Return the class, or the one of its module that the journal names: its child environment."""
    sibling = getattr(sys.modules.get(environment.__module__), class_name(name), None)
    if not isinstance(sibling, type) or sibling.__module__ != environment.__module__:
        return environment
    if not (issubclass(sibling, Environment) or is_trl_class(sibling)):
        return environment
    return as_environment(sibling, where=name)


def _file_of(reference: str) -> str:
    """Return the file of a reference; empty if it names a module."""
    file = reference if reference.endswith(".py") else reference.rpartition(":")[0]
    return file if file.endswith(".py") else ""


def _module_file(module: str) -> str:
    """Return the file of a module, without importing it; empty if there is none."""
    places: Sequence[str] | None = None
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return ""
        places = spec.submodule_search_locations or []
    return (spec.origin or "") if spec is not None else ""


def _is_guarded(name: str, file: str) -> bool:
    """Whether a file can be loaded for an environment without running a script."""
    return not name.startswith("__main__:") or "__name__" in "".join(linecache.getlines(file))


def _source_hash(file: str) -> str:
    """Return the hash that an episode records of the file that played it; of an empty file if there is none."""
    return code_digest("".join(linecache.getlines(file)))


def _how_to_name(name: str, references: Mapping[str, str], code_hash: str, command: str) -> str:
    """Describe the refusal of code that only a journal names, with the command that names it."""
    name = name[:MAX_SHOWN]
    location, _, qualname = name.rpartition(":")
    if location == "__main__":  # undeclared child environments are in the same file
        location = next((r.rpartition(":")[0] for n, r in references.items() if n.startswith("__main__:")), location)
    elif name in references:
        location, _, qualname = references[name][:MAX_SHOWN].rpartition(":")
    because = f"the episode was played by {name!r}, and a journal may not choose the code that runs here"
    example = f"{command} --environment path/to/env.py:Class"
    if "<locals>" in qualname:
        return (
            f"{because}. Its class was defined inside a function: move it to the top level of a file, then\n  {example}"
        )
    if location in ("", "__main__"):
        origin = "registered under that name by the program that trained" if not location else "typed into a notebook"
        return f"{because}; it was {origin}. Name its file:\n  {example}"
    if not location.endswith(".py"):
        reference = shlex.quote(escape_line(f"{location}:{qualname}"))
        return f"{because}. Where Python finds that module (here, or on PYTHONPATH), run:\n  {command} " + (
            f"--environment {reference}"
        )
    if not os.path.isfile(location):
        new_location = shlex.quote(escape_line(f"NEW/{Path(location).name}:{qualname}"))
        return (
            f"{because}, and {escape_line(location)} no longer exists. Give its new location:\n  {command} "
            f"--environment {new_location}"
        )
    notes = ""
    if _source_hash(location) != code_hash:
        notes += "\nIt was edited since, so the episode may depart."
    if name.startswith("__main__:") and "__name__" not in "".join(linecache.getlines(location)):
        notes += "\nFirst guard the script's own code with `if __name__ == '__main__':`, or it runs again."
    return (
        f"a journal may not choose the code that runs here; if you trust the file, run:\n  {command} --environment "
        + (f"{shlex.quote(escape_line(f'{location}:{qualname}'))}{notes}")
    )
