"""Finding environments: by registered name, entry point, `module:Class`, or a path to a file.

Anything found is an `Environment` class. A class written for TRL's `environment_factory` runs unchanged, as a
`TrlEnvironment`: `reset(**row)` starts an episode, `get_reward()` ends it, the other public methods are its tools.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from agentrl.core.errors import AgentRLError, EnvironmentDefinitionError, is_user_code
from agentrl.core.files import expand_path, near_file_hint
from agentrl.core.machine import DISTRIBUTION, PACKAGES, describe_missing_package, install_command
from agentrl.core.records import Message, Task
from agentrl.environment.context import EpisodeContext, LimitReachedError, read_aliases
from agentrl.environment.environment import Environment, Split, TaskSource
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.loaded_code import check_loaded_code
from agentrl.environment.mixture import mixture
from agentrl.environment.overrides import fits, override_problem
from agentrl.environment.rewards import stated_reward
from agentrl.environment.tools import (
    BoundTool,
    ToolEnvironment,
    ToolEpisode,
    bind_tools,
    read_messages,
    run_tools,
    tools_without_seat,
)
from agentrl.sandbox.sandbox import Sandbox

_FILE_MODULE = "agentrl_environment_"
"""Prefix of the module names of environments loaded from a file; `name_of` returns the file instead."""
_PACKAGE = Path(__file__).parent
ENTRY_POINT_GROUP = "agentrl.environments"
PACKAGED_ENVIRONMENTS: Mapping[str, str] = dict.fromkeys(
    ("bfcl", "gem", "harbor", "inspect", "nemo_gym", "openenv", "verifiers"), "agentrl_formats"
)
"""Package with an environment of that name; see `agentrl.core.machine.PACKAGES`."""
_NOT_TOOLS = {"reset", "get_reward", "tasks"}
"""Public methods of a TRL-style class that are not its tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """A name and the location of its class."""

    id: str
    entry_point: str
    """`module:Class`, a path, or `registered` for a class given directly."""


_environments_by_id: dict[str, type[Environment]] = {}
_loaded_classes: dict[str, type[Environment]] = {}
"""Resolved references: reading entry points takes milliseconds, and children are spawned by name."""
_installed_ids: dict[type[Environment], str] = {}
"""Entry-point names of resolved classes."""


def register(id: str, environment: type) -> None:
    """Give a class a name.

    Raises:
        EnvironmentDefinitionError: the name is taken by another class, or the class is no environment.
    """
    environment_class, registered_class = as_environment(environment, where=id), _environments_by_id.get(id)
    if registered_class is not None and registered_class is not environment_class:
        raise EnvironmentDefinitionError(
            f"environment {id!r} is already registered as {registered_class.__module__}:{registered_class.__qualname__}"
        )
    _environments_by_id[id] = environment_class


def registered_environments() -> list[EnvironmentSpec]:
    """Return all named environments, installed or registered, sorted by name."""
    specs = {
        point.name: EnvironmentSpec(id=point.name, entry_point=point.value)
        for point in entry_points(group=ENTRY_POINT_GROUP)
    }
    for name in _environments_by_id:
        specs[name] = EnvironmentSpec(id=name, entry_point="registered")
    return [specs[name] for name in sorted(specs)]


def spec(id: str) -> EnvironmentSpec:
    """The spec of a named environment.

    Raises:
        EnvironmentDefinitionError: there is no such name; the message suggests the nearest one.
    """
    for entry in registered_environments():
        if entry.id == id:
            return entry
    raise _unknown(id)


def resolve(reference: str | type | Mapping[str, float]) -> type[Environment]:
    """Return the environment class of a registered name, `module:Class`, `path/env.py:Class`, a class, or a mixture by
    rates.

    Raises:
        EnvironmentDefinitionError: the reference names nothing, or something else than an environment.
    """
    if isinstance(reference, Mapping):
        return mixture({resolve(member): rate for member, rate in reference.items()})
    if isinstance(reference, type):
        return as_environment(reference, where=reference.__qualname__)
    if not isinstance(reference, str | os.PathLike):
        raise EnvironmentDefinitionError(
            f"{reprlib.repr(reference)} is no environment; write the class, such as {type(reference).__qualname__}, or "
            "its name"
        )
    reference = expand_path(reference)
    if reference in _environments_by_id:
        return _environments_by_id[reference]
    if reference not in _loaded_classes:
        _loaded_classes[reference] = _find(reference)
        check_loaded_code(_loaded_classes[reference])
    return _loaded_classes[reference]


def _find(reference: str) -> type[Environment]:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == reference:
            environment = _load(point.value, reference)
            _installed_ids[environment] = reference
            return environment
    if ":" in reference or reference.endswith(".py"):
        return _load(reference, reference)
    raise _unknown(reference)


def loaded_environment(name: str) -> type[Environment] | None:
    """Return the environment of a name if this process has loaded it, without running code; else None."""
    if name in _environments_by_id or name in _loaded_classes:
        return _environments_by_id.get(name) or _loaded_classes[name]
    location, _, attribute = name.rpartition(":")
    module = _file_module_name(Path(location)) if location.endswith(".py") and "\0" not in location else location
    candidate = getattr(sys.modules.get(module), attribute, None) if attribute.isidentifier() else None
    return candidate if isinstance(candidate, type) and issubclass(candidate, Environment) else None


def name_of(environment: type[Environment]) -> str:
    """Return the name under which `resolve` finds a class: the registered one, else `module:Class`."""
    for name, candidate in _environments_by_id.items():
        if candidate is environment:
            return name
    if environment in _installed_ids:
        return _installed_ids[environment]
    module = sys.modules.get(environment.__module__)
    if module is not None and environment.__module__.startswith(_FILE_MODULE):
        return f"{module.__file__}:{environment.__qualname__}"
    return f"{environment.__module__}:{environment.__qualname__}"


def make(id: str) -> Environment:
    """Make a fresh instance for one episode."""
    return resolve(id)()


def _unknown(name: str) -> EnvironmentDefinitionError:
    names = [entry.id for entry in registered_environments()]
    suggestions = difflib.get_close_matches(name, names, n=1)
    files = [file for file in (Path(name) / "env.py", Path(f"{name}.py")) if file.is_file()]
    if name in PACKAGED_ENVIRONMENTS:
        package = PACKAGES[PACKAGED_ENVIRONMENTS[name]]
        hint = f"install its package {DISTRIBUTION}-{package}: {install_command(package=package)}"
    elif files:
        hint = f"its file is {files[0]}: give that path"
    elif suggestions:
        hint = f"did you mean {suggestions[0]!r}?"
    else:
        hint = f"known: {', '.join(names) or 'none'}; a class of your own is `module:Class` or `path/env.py:Class`"
    return EnvironmentDefinitionError(f"no environment is called {name!r}; {hint}")


def _no_such_file(path: Path) -> EnvironmentDefinitionError:
    folder = path.absolute().parent
    message = f"environment file {path} does not exist"
    if not folder.is_dir():
        return EnvironmentDefinitionError(f"{message}: there is no directory {folder}")
    return EnvironmentDefinitionError(f"{message} in {folder}{near_file_hint(path, '*.py')}")


def load_function(reference: str, where: str) -> Callable[..., Any]:
    """Load the function that `module:function` or `path/to/file.py:function` names.

    Args:
        reference: the reference.
        where: names the caller in messages.

    Raises:
        EnvironmentDefinitionError: the reference names nothing, or no function.
    """
    location, _, name = reference.rpartition(":")
    if not location:
        raise EnvironmentDefinitionError(
            f"{where} = {reference!r}: give `module:function` or `path/to/file.py:function`"
        )
    function = getattr(_import_module(location, where), name, None)
    if not callable(function):
        raise EnvironmentDefinitionError(f"{where}: {location} has no function {name!r}")
    check_loaded_code(function)
    return function  # type: ignore[no-any-return]


def _import_module(location: str, where: str) -> Any:
    try:
        return load_module(location)
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        reason = describe_missing_package(error) or _missing_module(error, location)
        if not reason:
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            reason = f"{type(error).__name__}: {text}{_raised_at(error)}"
        raise EnvironmentDefinitionError(f"{where}: cannot import {location}: {reason}") from error


def _load(reference: str, where: str) -> type[Environment]:
    location, _, attribute = reference.rpartition(":") if ":" in reference else (reference, "", "")
    module = _import_module(location, f"environment {where!r}")
    if attribute:
        if not hasattr(module, attribute):
            class_names = [c.__name__ for c in _environments_in(module)]
            close = difflib.get_close_matches(attribute, class_names, n=1)
            hint = f"; did you mean {location}:{close[0]}?" if close else ""
            raise EnvironmentDefinitionError(
                f"environment {where!r}: {location} has no {attribute!r}; the environments it defines: "
                f"{', '.join(class_names) or 'none'}{hint}"
            )
        return as_environment(getattr(module, attribute), where=where)
    local = _environments_in(module)
    if len(local) != 1:
        names = ", ".join(c.__name__ for c in local) or "none"
        raise EnvironmentDefinitionError(
            f"environment {where!r}: {location} defines {len(local)} environments ({names}); name one: {location}:Class"
        )
    return as_environment(local[0], where=where)


def _environments_in(module: Any) -> list[type]:
    """Return the environments that a module defines itself."""
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in classes if issubclass(c, Environment)] or [c for c in classes if is_trl_class(c)]


def load_module(location: str) -> Any:
    """Import a module by its name, or by its file if the location ends with `.py`."""
    return _load_file(Path(location)) if location.endswith(".py") else _import(location)


def module_of(obj: object) -> str:
    """Return the reference by which `load_module` finds the module of a function or class, also in another process.

    Raises:
        EnvironmentDefinitionError: it was defined in a shell or a notebook.
    """
    name = str(getattr(obj, "__module__", None))
    if name != "__main__" and not name.startswith(_FILE_MODULE):
        return name
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        raise EnvironmentDefinitionError(
            f"{obj!r} is not in a module that another process could import: define it in a file"
        )
    return str(Path(file).resolve())


def _missing_module(error: BaseException, location: str) -> str:
    """Return that a module does not exist, with the nearest one; "" if the error has another reason."""
    if not isinstance(error, ModuleNotFoundError) or error.name != location.partition(".")[0]:
        return ""
    folder, names = Path.cwd(), list[str]()
    with contextlib.suppress(OSError):  # the folder cannot be listed
        is_package = os.path.isfile  # which calls one that cannot be opened none, unlike `Path.is_file`
        names = [path.stem for path in folder.iterdir() if path.suffix == ".py" or is_package(path / "__init__.py")]
    close = difflib.get_close_matches(error.name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else "a class in a file is `path/env.py:Class`"
    return f"the module {error.name!r} is neither in {folder} nor installed; {hint}"


def _raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, and the line of a library that raised it
    below, unless the error names its file."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno) for f in frames if not f.filename.startswith(("<", str(_PACKAGE)))]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
    of_user = [place for place in places if is_user_code(place[0])][-1:]
    named = error.path if isinstance(error, ImportError) else None  # its text has the path
    below = [place for place in places[-1:] if not of_user or place[0] != named]
    lines = [f"{file}:{line}" for file, line in dict.fromkeys((*of_user, *below))]
    return f" ({', raised in '.join(lines)})" if lines else ""


def _import(name: str) -> Any:
    """Import a module, also from the working directory, which contains a user's own modules."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        working_directory = str(Path.cwd())
        if error.name != name.split(".")[0] or working_directory in sys.path:
            raise
        sys.path.append(working_directory)
        return importlib.import_module(name)


class _SuppliedFile(importlib.abc.SourceLoader):
    """Loads a module from the source of a file on another machine."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: bytes | str) -> bytes:
        if path != self._path:
            raise FileNotFoundError(path)
        return self._source.encode()


def register_source_files(sources: Mapping[str, str]) -> None:
    """Let `load_module` import files that exist on another machine only. `sources` maps absolute paths to their
    source."""
    _source_by_path.update(sources)


_source_by_path: dict[str, str] = {}


def _file_module_name(path: Path) -> str:
    digest = hashlib.blake2b(os.path.realpath(path).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return f"{_FILE_MODULE}{path.stem}_{digest}"


def _load_file(path: Path) -> Any:
    source = _source_by_path.get(str(path))
    if source is None and not path.is_file():
        raise _no_such_file(path)
    name = _file_module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    loader = None if source is None else _SuppliedFile(str(path), source)
    module_spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if module_spec is None or module_spec.loader is None:
        raise EnvironmentDefinitionError(f"environment file {path} is not a Python module")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a file may import modules in its directory
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def as_environment(candidate: object, *, where: str) -> type[Environment]:
    """Check a class, or adapt a TRL-style one.

    Raises:
        EnvironmentDefinitionError: the class is malformed; the message has the fault and its location.
    """
    if not isinstance(candidate, type):
        raise EnvironmentDefinitionError(f"environment {where!r} is {type(candidate).__name__}, not a class")
    if not issubclass(candidate, Environment):
        if is_trl_class(candidate):
            return adapt_trl(candidate)
        raise EnvironmentDefinitionError(
            f"environment {where!r}: {candidate.__qualname__} is not an agentrl.Environment and has no TRL-style "
            "reset()"
        )
    missing = sorted(getattr(candidate, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentDefinitionError(
            f"environment {where!r}: {candidate.__qualname__} does not define {', '.join(missing)}"
        )
    seats: Any = candidate.seats
    if not (fits(seats, tuple[str, ...]) and seats) or len(set(seats)) != len(seats):
        raise EnvironmentDefinitionError(
            f"environment {where!r}: seats must be a tuple of distinct names, e.g. ('solver',); got {seats!r}"
        )
    if problem := _definition_problem(candidate) or override_problem(candidate):
        raise EnvironmentDefinitionError(f"environment {where!r}: {candidate.__qualname__}{problem}")
    if issubclass(candidate, ToolEnvironment):
        if not inspect.ismethod(candidate.tool_table):
            raise EnvironmentDefinitionError(
                f"environment {where!r}: `{candidate.__qualname__}.tool_table` belongs to ToolEnvironment; give the "
                "method another name"
            )
        candidate.tool_table()
    return candidate


def _definition_problem(candidate: type[Environment]) -> str:
    """Describe a mistake in a class that would otherwise fail obscurely in its first episode; "" if there is none."""
    if not inspect.iscoroutinefunction(candidate.run):
        return ".run must be `async def run(self, ctx)`"
    if not isinstance(inspect.getattr_static(candidate, "tasks"), classmethod | staticmethod):
        return ".tasks must be a class method: write @classmethod above `def tasks(cls, split, *, seed=0)`"
    if issubclass(candidate, HarnessEnvironment) and not inspect.iscoroutinefunction(candidate.play):
        return (
            ".play must be `async def play(self, task, endpoint)`; one that is not asynchronous goes into a thread: "
            "`return await asyncio.to_thread(agent, …)`"
        )
    if (
        issubclass(candidate, HarnessEnvironment)
        and isinstance(candidate.sandbox, Sandbox)
        and candidate.sandbox.network == "none"
    ):
        return '.sandbox has no network, so its program cannot ask the model: write agentrl.Sandbox(network="gateway")'
    if issubclass(candidate, HarnessEnvironment):
        for name in ("command", "volatile", "ignored_fields"):
            if isinstance(value := getattr(candidate, name), str):
                parts = value.split() if name == "command" else [value]
                return f".{name} is one text; write `{name} = {json.dumps(parts, ensure_ascii=False)}`"
        try:
            read_aliases(candidate.aliases, candidate.seats)
        except EnvironmentDefinitionError as error:
            return f".{error}"
    parameters = inspect.signature(candidate).parameters.values()
    required_names = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if required_names:
        return (
            f".__init__ wants {', '.join(required_names)}, but is called without arguments for each episode; options "
            "go to `tasks`, and per-task values into the task's data"
        )
    # A ToolEnvironment may override `run`.
    if not issubclass(candidate, ToolEnvironment) and (unoffered := tools_without_seat(candidate)):
        advice = "subclass ToolEnvironment, or pass tools= to ctx.agent"
        if issubclass(candidate, HarnessEnvironment):
            advice = "the program offers its own tools, in its requests; remove the decorator"
        return f": {', '.join(unoffered)}: tools that are offered to no seat: {advice}"
    return ""


def is_trl_class(candidate: type) -> bool:
    """Whether a class follows TRL's contract: it has a `reset` method."""
    return callable(getattr(candidate, "reset", None))


class TrlEnvironment(ToolEnvironment):
    """Runs one instance of a TRL-style class as an episode.

    The task's data is the dataset row: `reset` gets it as keyword arguments, and its `prompt` has the messages before
    the first turn. The observation that `reset` returns is appended to the last of them.
    """

    own_random = True  # such classes may draw from the global random generators
    wrapped: ClassVar[type]

    instance: Any
    """Object of the wrapped class, available once `run` has started."""

    def prompt(self, task: Task) -> Sequence[Message]:
        """Return the messages of the row's `prompt`: a string is a user message.

        Raises:
            EnvironmentDefinitionError: it is neither a string nor messages with text.
        """
        return self._messages(task, None)

    def _messages(self, task: Task, observation: object) -> Sequence[Message]:
        """Return the messages before the first turn, with the observation of `reset`."""
        where = f"task {task.id!r} of {self.wrapped.__qualname__}"
        for name in ("image", "images"):
            if task.data.get(name) is not None:
                raise EnvironmentDefinitionError(f"{where}: {name}: models here read text only; remove the column")
        prompt = task.data.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if observation is not None and not isinstance(observation, str | list):
            raise EnvironmentDefinitionError(
                f"{where}: reset() returned {reprlib.repr(observation)}; return a string or None"
            )
        if observation is not None and fits(messages, list[dict[str, Any]]) and messages:
            contents = [messages[-1].get("content"), observation]
            messages = [*messages[:-1], {**messages[-1], "content": _joined(contents)}]
        return read_messages(messages, f"{where}: prompt")

    def reward(self, task: Task, episode: ToolEpisode) -> float:
        """Not used: the wrapped class judges through `get_reward`."""
        raise NotImplementedError

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """The wrapped class's own `tasks(split, seed=…)`, if it has one."""
        make_tasks = getattr(cls.wrapped, "tasks", None)
        if make_tasks is None:
            return super().tasks(split, seed=seed)
        source: TaskSource = make_tasks(split, seed=seed)
        return source

    @classmethod
    def tool_table(cls) -> dict[str, BoundTool]:
        """The public methods of the wrapped class that an instance binds.

        TRL offers no class methods since 1.16, and no static methods before; neither is a tool here.
        """
        if "_tools" not in cls.__dict__ or cls._tools is None:
            names = [
                name
                for name, function in inspect.getmembers(cls.wrapped, inspect.isfunction)
                if not name.startswith("_")
                and name not in _NOT_TOOLS
                and not isinstance(inspect.getattr_static(cls.wrapped, name), staticmethod)
            ]
            cls._tools = bind_tools(cls.wrapped, names)
        return cls._tools

    async def run(self, ctx: EpisodeContext) -> None:
        """Reset, converse, and ask the instance for its reward."""
        tools = self.tool_table()
        agent = ctx.agent(self.seats[0], tools=[bound.spec for bound in tools.values()])
        self.instance = self.wrapped()
        observation = await _await_value(self.instance.reset(**self._row(ctx.task.data)))
        pending = self._messages(ctx.task, observation)
        try:
            while pending:
                turn = await agent.act(*pending)
                pending = await run_tools(ctx, self.instance, tools, turn.tool_calls)
        except LimitReachedError as limit:
            ctx.truncate(limit)
        value = await _await_value(self.instance.get_reward())
        agent.reward(stated_reward(value, f"{self.wrapped.__qualname__}.get_reward()"))

    def _row(self, data: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.instance.reset).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return dict(data)
        return {parameter.name: data[parameter.name] for parameter in parameters if parameter.name in data}


def _joined(contents: Sequence[Any]) -> Any:
    """Return the content of several, each text or a list of parts, as TRL joins them."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = ([{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents)
    return [part for content in parts for part in content or []]


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def adapt_trl(trl_class: type) -> type[TrlEnvironment]:
    """Return an `Environment` class that runs `trl_class` unchanged; the same class each time."""
    cached = trl_class.__dict__.get("__agentrl_environment__")
    if cached is not None:
        return cached  # type: ignore[no-any-return]
    if not callable(getattr(trl_class, "get_reward", None)):
        raise EnvironmentDefinitionError(
            f"{trl_class.__qualname__} has no get_reward(): TRL's `reward_funcs` are not used here; write "
            "`def get_reward(self) -> float`, which returns the reward of the finished episode"
        )
    namespace = {"wrapped": trl_class, "__module__": trl_class.__module__, "__doc__": trl_class.__doc__}
    environment_class: type[TrlEnvironment] = type(trl_class.__name__, (TrlEnvironment,), namespace)
    environment_class.tool_table()
    trl_class.__agentrl_environment__ = environment_class  # type: ignore[attr-defined]
    return environment_class
