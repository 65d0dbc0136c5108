"""Run directories from other people: every recorded field is set to hostile values, and every reading command is tried.

`cases` derives the fields from their declarations: the sections of `RunConfig`, the columns of every table, the structs
of entries, specs and starts, and the files of a recorded run. A new field or command is tried without a change here.
`Watch` observes the harm from outside: code that wrote a file, connections to a listener, and opened files, which the
kernel reports, of another user's run that hostile values lead to.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import io
import json
import os
import pkgutil
import shutil
import sqlite3
import struct
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin
from unittest.mock import patch

import msgspec
import pytest
from pydantic import BaseModel

import agentrl_formats
from agentrl.app.forks import fork
from agentrl.app.training import run_training
from agentrl.cli.commands import READING
from agentrl.cli.main import main
from agentrl.config.fields import shipped_example
from agentrl.config.load import recorded_config
from agentrl.config.policies import AnyPolicy, FrozenPolicy, RemotePolicy
from agentrl.config.run import RunConfig
from agentrl.config.scorers import ScorerConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.holds import AdmissionWait
from agentrl.core.records import ForkPoint, MemberScore, PolicyVersion, RoleMeanAtAdmission, SeatBinding
from agentrl.environment.environment import Environment
from agentrl.environment.registry import resolve
from agentrl.inspection.export.formats import EXPORTS
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer.queries import QUESTIONS
from agentrl.inspection.viewer.served_runs import ServedRuns
from agentrl.journal.control_rows import row_checksum
from agentrl.journal.entries import BeginEntry, EntryBody, entry_checksum
from agentrl.journal.run_log import RunStart, SqliteRunLog
from tests.support.counting_listener import CountingListener
from tests.support.sample_environment import Propose, held_out_tasks
from tests.support.sample_run import play_with_script, sample_run_config, sample_run_factories

NAME = "agentrl.received"
"""Name of the received directory: it begins as the name of an installed package does."""
VARIABLE, VALUE = "RECEIVED_RUNS_SECRET", "the-value-of-the-variable"
UNFINISHED = "e9"
HARMS = ("code_run", "bytes_sent", "files_opened_outside", "connections")
ESCAPE = "\x1b[2J\x9b31m\u202e"
_IN_OPEN = 0x20
KEY = "{key}"
"""Last part of a path that stands for the key of a mapping, not for its value."""
ANY_KEY = "*"
"""Part of a path that stands for the first key of a mapping."""

Place = tuple[str | int, ...]
Edit = Callable[[Any], Any]


# --- harm -------------------------------------------------------------------------------------------------------------


class Watch:
    """Observes what commands do to this user, and to another one, whose run is in `secret`.

    Args:
        root: empty directory.
    """

    def __init__(self, root: Path) -> None:
        self.secret = root / "secret"
        self._ran = root / "code-ran"
        self._listener = CountingListener()
        self.port = self._listener.port
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def guard(self) -> None:
        """Watch everything in `secret` from now on."""
        for folder in [self.secret, *(path for path in self.secret.rglob("*") if path.is_dir())]:
            if self._libc.inotify_add_watch(self._events, os.fsencode(folder), _IN_OPEN) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        self.take()

    def take(self) -> Counter[str]:
        """Return the harm since the last call."""
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._events, 1 << 16):
                self._listener.seen["files_opened_outside"] += _count_events(events)
        if self._ran.exists():
            self._ran.unlink()
            self._listener.seen["code_run"] += 1
        seen, self._listener.seen = self._listener.seen, Counter()
        return seen

    def code(self) -> str:
        """The source of a module that shows that it ran."""
        ran = f"RAN = open({str(self._ran)!r}, 'a').close()"
        return f"{ran}\n\n\ndef Evil(*arguments, **options):\n    return RAN\n"

    def program(self) -> str:
        """A program that shows that it ran."""
        return f"#!/bin/sh\ntouch {self._ran}\n"

    def close(self) -> None:
        """Stop watching."""
        os.close(self._events)
        self._listener.close()


def _count_events(events: bytes) -> int:
    count, at = 0, 0
    while at < len(events):
        length = struct.unpack_from("iIII", events, at)[3]
        count, at = count + 1, at + 16 + length
    return count


# --- schemas ----------------------------------------------------------------------------------------------------------


def _plain(kind: Any) -> Any:
    """Return a type without annotations and without None; the first of a union."""
    while True:
        origin = get_origin(kind)
        if origin is Annotated:
            kind = get_args(kind)[0]
        elif origin in (typing.Union, types.UnionType):
            kind = next(choice for choice in get_args(kind) if choice is not type(None))
        else:
            return kind


def _fields(kind: Any) -> Mapping[str, Any] | None:
    """Return the fields of a record's type; None if it is no record."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        if issubclass(kind, msgspec.Struct):
            return {name: hints[name] for name in kind.__struct_fields__}
        if hasattr(kind, "_fields"):
            return {name: hints[name] for name in kind._fields}
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return None


def _is_array(kind: type) -> bool:
    return hasattr(kind, "_fields") or (issubclass(kind, msgspec.Struct) and kind.__struct_config__.array_like)


def _tag(kind: type) -> list[str]:
    tag = kind.__struct_config__.tag if issubclass(kind, msgspec.Struct) else None
    return [] if tag is None else [str(tag)]


def example(kind: Any) -> Any:
    """Return a value of a type as it is recorded, with a value in every optional field."""
    kind = _plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if (fields := _fields(kind)) is not None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            defaults = {name: field.get_default() for name, field in kind.model_fields.items()}
            return {
                name: default if isinstance(default := defaults[name], bool | int | float | str) else example(type_)
                for name, type_ in fields.items()
            }
        values = {name: example(type_) for name, type_ in fields.items()}
        return [*_tag(kind), *values.values()] if _is_array(kind) else values
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        return [example(argument) for argument in arguments if argument is not ...]
    if origin in (list, frozenset, Sequence):
        return [example(arguments[0])]
    if origin in (dict, Mapping):
        return {ANY_KEY: example(arguments[1])}
    return {str: "text", int: 1, float: 0.5, bool: True, bytes: bytes(8)}.get(kind, {ANY_KEY: "text"})


def places(kind: Any, place: Place = (), name: str = "") -> Iterator[tuple[Place, str, Any]]:
    """Yield place, name and type of every value in a recorded record."""
    kind = _plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if (fields := _fields(kind)) is not None:
        first = len(_tag(kind))
        for number, (field, type_) in enumerate(fields.items()):
            step = number + first if _is_array(kind) else field
            yield from places(type_, (*place, step), f"{name}.{field}")
    elif origin is tuple or origin in (list, frozenset, Sequence):
        for number, argument in enumerate(argument for argument in arguments if argument is not ...):
            yield from places(argument, (*place, number), f"{name}[{number}]")
    elif origin in (dict, Mapping):
        yield (*place, KEY), f"{name}.{KEY}", str
        yield from places(arguments[1], (*place, ANY_KEY), f"{name}.{ANY_KEY}")
    else:
        yield place, name, kind


def recorded_places(value: Any, place: Place = (), name: str = "") -> Iterator[tuple[Place, str, Any]]:
    """Yield place, name and type of the values in a recorded JSON value, of lists those in the first item."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from recorded_places(inner, (*place, key), f"{name}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value[:1]):
            yield from recorded_places(inner, (*place, number), f"{name}[{number}]")
    else:
        yield place, name, type(value)


def put(tree: Any, place: Place, value: Any, model: Any) -> Any:
    """Return a recorded value with another value at a place; what does not exist there is taken from `model`."""
    if not place:
        return value
    step, rest = place[0], place[1:]
    if isinstance(step, int):
        items = list(tree) if isinstance(tree, list | tuple) else []
        items += model[len(items) : step + 1]
        items[step] = put(items[step], rest, value, model[step])
        return items
    entries = dict(tree) if isinstance(tree, dict) else {}
    key = next(iter(entries), "solver") if step in (ANY_KEY, KEY) else step
    inner = model[ANY_KEY] if step in (ANY_KEY, KEY) or step not in model else model[step]
    if step == KEY:
        return {str(value): entries.pop(key, inner), **entries}
    entries[key] = put(entries.get(key, inner), rest, value, inner)
    return entries


# --- cases ------------------------------------------------------------------------------------------------------------


ACTING = (
    *("episode replay", "episode rescore", "episode fork", "step replay", "train --resume"),
    *("run prune", "evaluate"),
)
"""Commands that do more than read a run and print."""
READ_VALUES = ("directory", "journal", "column", "escape", "large", "hostile", "garbage", "deep", "link", "new link")
"""Hostile values that are tried on every command; others are on `ACTING` commands alone."""


class Case(NamedTuple):
    """A change of a received run."""

    field: str
    name: str
    apply: Callable[[Path], None]

    def concerns(self, command: str) -> bool:
        """Whether a command is tried on this change."""
        return command in ACTING or self.name in READ_VALUES


class Values:
    """Hostile values by type.

    Args:
        watch: the observer of harm.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def of(self, kind: Any, *, is_setting: bool = False) -> Mapping[str, Callable[[Path], Any]]:
        """Return values for a field of a type, made for a run's directory, by name; of settings also those that name
        an endpoint, a program or a variable."""
        watch = self._watch
        texts: dict[str, Callable[[Path], Any]] = {
            "file of the run": lambda run: f"{run}/evil.py:Evil",
            "file of a package": lambda run: f"{NAME}/evil.py:Evil",
            "module here": lambda run: "evil_module:Evil",
            "directory": lambda run: str(watch.secret),
            "journal": lambda run: os.path.relpath(watch.secret / "journal", run / "journal"),
            "column": lambda run: os.path.relpath(watch.secret / "steps/solver/0.1.safetensors", run),
            "escape": lambda run: f"{ESCAPE}[/x]",
        }
        services: dict[str, Callable[[Path], Any]] = {
            "url": lambda run: watch.url,
            "address": lambda run: f"127.0.0.1:{watch.port}",
            "program": lambda run: f"{run}/evil.sh",
            "variable": lambda run: VARIABLE,
            "number": lambda run: 2**62,
        }
        if kind is str:
            return {**texts, **services} if is_setting else texts
        if kind is int:
            return {"large": lambda run: 2**62, "negative": lambda run: -7, "escape": lambda run: ESCAPE}
        if kind is float:
            return {"large": lambda run: 1e308, "negative": lambda run: -1e308, "escape": lambda run: ESCAPE}
        if kind is bool:
            return {"escape": lambda run: ESCAPE}
        if kind is bytes:
            return {"garbage": lambda run: b"\xff" * 21, "empty": lambda run: b"", "escape": lambda run: ESCAPE}
        if get_origin(kind) is Literal:
            return {repr(choice): lambda run, choice=choice: choice for choice in get_args(kind)} | {
                "escape": lambda run: ESCAPE
            }
        return {"table": self.data, "escape": lambda run: ESCAPE, "deep": lambda run: _deep(200)}

    def data(self, run: Path) -> dict[str, Any]:
        """Task data that names programs, endpoints, directories and the network."""
        return {
            "python": f"{run}/evil.sh",
            "command": [f"{run}/evil.sh"],
            "url": self._watch.url,
            "directory": str(run / "task"),
            "path": str(self._watch.secret),
            "roots": {"image": "/."},
            "rewards": {"reward": [0.0, 1.0]},
            "failed_reward": 0.0,
            "network": "open",
            "question": "1 + 1",
            "answer": "2",
            "terms": 2,
            "sum": "1 + 1",
            "row": {},
            "id": "evil_module:Evil",
        }


def _deep(depth: int) -> Any:
    data: Any = ESCAPE
    for _ in range(depth):
        data = {"deeper": data}
    return data


class ReceivedRun(NamedTuple):
    """A recorded run, of which copies are changed."""

    directory: Path
    episode: str
    """An episode that was trained."""
    other: str
    """Another one."""
    unfinished: str
    """An episode that a resume continues."""
    has_model: bool
    environment: str
    """The class of its episodes."""
    own: Mapping[str, Callable[[Path], int]]
    """Commands with this user's own configuration, by name, on the directory of a copy: those that resume the run or
    measure its policies."""


def cases(run: ReceivedRun, watch: Watch) -> Iterator[Case]:
    """Yield every change of a run."""
    values = Values(watch)
    for place, name, kind in _config_places():
        for label, value in values.of(kind, is_setting=True).items():
            yield Case(f"config{name}", label, partial(_set_config, place, value, watch.url))
    yield from _row_cases(run, values)
    yield from _entry_cases(run, values)
    yield from _file_cases(run, watch, values)
    yield from _shipped_environments(run, values)


def _config_places() -> Iterator[tuple[Place, str, Any]]:
    for place, name, kind in places(RunConfig):
        if place[0] not in ("policies", "scorers"):
            yield place, name, kind
    for table, sections in (("policies", get_args(get_args(AnyPolicy)[0])), ("scorers", (ScorerConfig,))):
        yield (table, KEY), f".{table}.{KEY}", str
        for section in sections:
            label = f".{table}.{section.__name__}"
            for place, name, kind in places(section):
                yield (section, *place), f"{label}{name}", kind


_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "PolicyConfig": {"kind": "trained"},
    "FrozenPolicy": {"kind": "frozen"},
    "RemotePolicy": {"kind": "remote", "model": "m"},
    "BotPolicy": {"kind": "bot", "id": "random:choice"},
    "OpponentPoolPolicy": {"kind": "past", "of": "solver"},
    "ScorerConfig": {"function": "length"},
}


def _set_config(place: Place, value: Callable[[Path], Any], url: str, run: Path) -> None:
    def change(info: dict[str, Any]) -> dict[str, Any]:
        config = info["config"]
        if isinstance(section := place[0], type):
            table = "scorers" if section is ScorerConfig else "policies"
            model: Any = example(section)
            new = dict(_NEEDED[section.__name__])
            if section is RemotePolicy:
                new["url"] = url
            if section in (RemotePolicy, FrozenPolicy):
                edit_entries(run, _give_seats_to_evil)
            config[table] = {**config[table], "evil": put(new, place[1:], value(run), model)}
        else:
            info["config"] = put(config, place, value(run), example(RunConfig))
        return info

    edit_json(run, "meta", "info", change)


def _give_seats_to_evil(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the policy `evil` hold all seats of the episodes, so that a fork asks it for turns."""
    for entry in entries:
        if entry["call"] == "begin":
            begin = msgspec.msgpack.decode(entry["body"], type=BeginEntry)
            seats = dict.fromkeys(begin.seats, "evil")
            entry["body"] = msgspec.msgpack.encode(msgspec.structs.replace(begin, seats=seats, settings={}))
    return entries


class _SpecFields(msgspec.Struct, array_like=True):
    """The list in `admissions.spec`."""

    seed: int
    seats: dict[str, SeatBinding]
    group_size: int
    pins: dict[str, PolicyVersion]
    fork: ForkPoint | None
    deadline: int
    waited: tuple[AdmissionWait, ...]


_STRUCTURED: Mapping[tuple[str, str], tuple[Any, bool]] = {
    ("admissions", "data"): (dict[str, Any], False),
    ("admissions", "spec"): (_SpecFields, True),
    ("episodes", "seats"): (dict[str, str], False),
    ("episodes", "metrics"): (dict[str, float], False),
    ("episodes", "measured_against"): (tuple[PolicyVersion, ...], False),
    ("trajectories", "turn_rewards"): (tuple[tuple[int, float], ...], False),
    ("trajectories", "named_rewards"): (tuple[tuple[str, float], ...], False),
    ("baselines", "finishers"): (tuple[str, ...], False),
    ("baselines", "earlier"): (tuple[RoleMeanAtAdmission, ...], False),
    ("group_scores", "scores"): (tuple[MemberScore, ...], False),
    ("steps", "metrics"): (dict[str, float], False),
    ("step_units", "turn_advantages"): (tuple[float, ...], False),
}
"""Columns that hold a record: its type, and whether it is msgpack, not JSON."""
_TYPES = {"TEXT": str, "INTEGER": int, "REAL": float, "BLOB": bytes}


def _row_cases(run: ReceivedRun, values: Values) -> Iterator[Case]:
    with contextlib.closing(sqlite3.connect(run.directory / "journal/control.db")) as control:
        columns = [(table, *column) for table, names in tables(control).items() for column in names.items()]
        info = dict(control.execute("SELECT key, value FROM meta"))
    for table, column, type_name in columns:
        if table == "meta" or column == "checksum":
            continue
        kind, is_msgpack = _STRUCTURED.get((table, column), (None, False))
        for label, value in values.of(_TYPES[type_name]).items():
            yield Case(f"{table}.{column}", label, partial(_set_column, run, table, column, value))
        for place, name, inner in () if kind is None else places(kind):
            for label, value in values.of(inner).items():
                edit = partial(_set_in_column, run, table, column, kind, is_msgpack, place, value)
                yield Case(f"{table}.{column}{name}", label, edit)
    for key in info:
        for label, value in values.of(str).items():
            yield Case(f"meta.{key}", label, partial(_set_meta, key, value))
    recorded = {name: value for name, value in json.loads(info["info"]).items() if name != "config"}
    kinds = [("info", recorded_places(recorded), _set_info), ("life", places(RunStart), _set_start)]
    for key, fields, put_there in kinds:
        for place, name, inner in fields:
            for label, value in values.of(inner).items():
                yield Case(f"meta.{key}{name}", label, partial(put_there, place, value))


def tables(connection: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Return the columns of each table, with their types."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        name: {column: type_ for _, column, type_, *_ in connection.execute(f"PRAGMA table_info({name})")}
        for name in names
    }


def _set_meta(key: str, value: Callable[[Path], Any], run: Path) -> None:
    edit_rows(run, "meta", lambda row: {**row, "value": str(value(run))} if row["key"] == key else row)


def _set_info(place: Place, value: Callable[[Path], Any], run: Path) -> None:
    edit_json(run, "meta", "info", lambda info: put(info, place, value(run), info))


def _set_start(place: Place, value: Callable[[Path], Any], run: Path) -> None:
    edit_json(run, "meta", "life.0", lambda start: put(start, place, value(run), example(RunStart)))


_KEYS = (
    "episode",
    "episode_id",
    "attempt",
    "seat",
    "agent",
    "policy",
    "group_id",
    "scorer",
    "lineage",
    "step",
    "position",
    "file",
)
"""Columns of primary keys: changed in one row, so that keys stay unique."""


def _targets(run: ReceivedRun, column: str, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the rows that are changed: those of the episodes that commands read, else the first."""
    episodes = (run.episode, run.unfinished)
    targets = [number for number, row in enumerate(rows) if row.get("episode") in episodes] or [0]
    return targets[:1] if column in _KEYS else targets


def _set_column(received: ReceivedRun, table: str, column: str, value: Callable[[Path], Any], run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for target in _targets(received, column, rows):
            rows[target] = {**rows[target], column: value(run)}
        return rows

    edit_table(run, table, change, received)


def _set_in_column(
    received: ReceivedRun,
    table: str,
    column: str,
    kind: Any,
    is_msgpack: bool,
    place: Place,
    value: Callable[[Path], Any],
    run: Path,
) -> None:
    decode: Callable[[Any], Any] = msgspec.msgpack.decode if is_msgpack else json.loads
    encode: Callable[[Any], Any] = msgspec.msgpack.encode if is_msgpack else json.dumps

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for target in _targets(received, str(place[0]), rows):
            recorded = rows[target][column]
            tree = put(None if recorded is None else decode(recorded), place, value(run), example(kind))
            rows[target] = {**rows[target], column: encode(tree)}
        return rows

    edit_table(run, table, change, received)


def _entry_cases(run: ReceivedRun, values: Values) -> Iterator[Case]:
    for kind in get_args(EntryBody):
        for place, name, inner in places(kind):
            for label, value in values.of(inner).items():
                yield Case(f"{kind.__name__}{name}", label, partial(_set_entry, run, kind, place, value))
    for column, type_name in {"call": "TEXT", "asked": "BLOB", "body": "BLOB", "attempt": "INTEGER"}.items():
        for label, value in values.of(_TYPES[type_name]).items():
            yield Case(f"entries.{column}", label, partial(_set_entry_column, run, column, value))


def _set_entry(received: ReceivedRun, kind: type, place: Place, value: Callable[[Path], Any], run: Path) -> None:
    (tag,) = _tag(kind)

    def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for episode in (received.episode, received.unfinished):
            own = [entry for entry in entries if entry["episode"] == episode]
            chosen = next((entry for entry in own if msgspec.msgpack.decode(entry["body"])[0] == tag), None)
            if chosen is None and own:
                body = msgspec.msgpack.encode(example(kind))
                chosen = {**own[-1], "id": max(entry["id"] for entry in entries) + 1, "call": "r#900", "body": body}
                entries.append(chosen)
            if chosen is not None:
                tree = msgspec.msgpack.decode(chosen["body"])
                chosen["body"] = msgspec.msgpack.encode(put(tree, place, value(run), example(kind)))
        return entries

    edit_entries(run, change)


def _set_entry_column(received: ReceivedRun, column: str, value: Callable[[Path], Any], run: Path) -> None:
    def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        chosen = next(entry for entry in entries if entry["episode"] == received.episode)
        chosen[column] = value(run)
        return entries

    edit_entries(run, change)


def _file_cases(run: ReceivedRun, watch: Watch, values: Values) -> Iterator[Case]:
    """Yield changes of every file, and links in the place of every file and directory."""
    for path in sorted(run.directory.rglob("*")):
        name = str(path.relative_to(run.directory))
        if path.suffix in (".json", ".jsonl") and path.stat().st_size < 1 << 16:
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            for place, field, kind in recorded_places(json.loads(lines[0])):
                for label, value in values.of(kind).items():
                    yield Case(f"{name}{field}", label, partial(_set_in_file, name, place, value))
        if path.is_file() and "journal" not in path.parts:
            for label, content in (("garbage", b"\xff" * 999), ("empty", b""), ("deep", b"[" * 60_000)):
                yield Case(name, label, partial(_replace, name, content))
        yield Case(name, "link", partial(_link, name, watch.secret / name))
    for name in ("policies/evil", "best/evil", "versions/evil", "checkpoints/step_000009-0", "forks2", "tensorboard"):
        yield Case(name, "new link", partial(_link, name, watch.secret))


def _set_in_file(name: str, place: Place, value: Callable[[Path], Any], run: Path) -> None:
    path = run / name
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    tree = json.loads(lines[0])
    path.unlink()
    path.write_text("\n".join([json.dumps(put(tree, place, value(run), tree)), *lines[1:]]) + "\n")


def _replace(name: str, content: bytes, run: Path) -> None:
    path = run / name
    path.unlink()
    path.write_bytes(content)


def _link(name: str, target: Path, run: Path) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def _shipped_environments(run: ReceivedRun, values: Values) -> Iterator[Case]:
    """Yield changes that name each environment of the package of formats, with a task that tells it what to do."""
    names = set()
    for module in pkgutil.iter_modules(agentrl_formats.__path__):
        loaded = importlib.import_module(f"agentrl_formats.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Environment) and value.__module__ == loaded.__name__:
                names.add(f"{value.__module__}:{value.__qualname__}")
    for name in sorted(names):
        yield Case(f"task of {name}", "hostile", partial(_set_environment, run, name, values.data))
    for label in ("file of the run", "file of a package", "module here"):
        value = values.of(str)[label]
        yield Case("environment", label, partial(_set_environment, run, value, None))


def _set_environment(
    received: ReceivedRun, name: str | Callable[[Path], Any], data: Callable[[Path], Any] | None, run: Path
) -> None:
    """Name an environment wherever the journal does."""
    name = name if isinstance(name, str) else name(run)

    def admissions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        changed = {"environment": name} | ({} if data is None else {"data": json.dumps(data(run))})
        return [{**row, **changed} for row in rows]

    def begins(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for entry in entries:
            body = msgspec.msgpack.decode(entry["body"])
            if body[0] == "begin":
                body[1] = name
                if data is not None:
                    body[4] = data(run)
                entry["body"] = msgspec.msgpack.encode(body)
        return entries

    edit_table(run, "admissions", admissions)
    edit_table(run, "episodes", lambda rows: [{**row, "environment": name} for row in rows])
    edit_entries(run, begins)


# --- changes of a journal, signed as agentrl signs them ---------------------------------------------------------------


def edit_json(run: Path, table: str, key: str, change: Edit) -> None:
    """Change the JSON value of a key."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "value": json.dumps(change(json.loads(row["value"])))} if row["key"] == key else row

    edit_rows(run, table, edit)


def edit_rows(run: Path, table: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change each row of a control table."""
    edit_table(run, table, lambda rows: [change(row) for row in rows])


def edit_table(
    run: Path,
    table: str,
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    received: ReceivedRun | None = None,
) -> None:
    """Change the rows of a control table; an empty table gets a row about `received.episode` first."""
    with contextlib.closing(sqlite3.connect(run / "journal/control.db")) as control:
        names = tables(control)[table]
        rows = [dict(zip(names, row, strict=True)) for row in control.execute(f"SELECT * FROM {table}")]
        if not rows and received is not None:
            made = {
                name: {"TEXT": "text", "INTEGER": 1, "REAL": 0.5, "BLOB": b""}[type_] for name, type_ in names.items()
            }
            for (of_table, column), (kind, _) in _STRUCTURED.items():
                if of_table == table:
                    made[column] = json.dumps(example(kind))
            rows = [{**made, **({"episode": received.episode, "attempt": 0} if "episode" in names else {})}]
        rows = change(rows)
        control.execute(f"DELETE FROM {table}")
        for row in rows:
            if "checksum" in row:
                signed = [value for name, value in row.items() if name != "checksum"]
                with contextlib.suppress(OverflowError):
                    row["checksum"] = row_checksum(table, signed)
            control.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", list(row.values()))
        control.commit()


def edit_entries(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the entries of a run's first partition, and sign them and the commits that count them."""
    (path, *_) = sorted((run / "journal").glob("turns-*.db"))
    names = ("id", "episode", "attempt", "call", "asked", "body", "checksum")
    counts: Counter[tuple[str, int]] = Counter()
    with contextlib.closing(sqlite3.connect(path)) as turns:
        rows = turns.execute(f"SELECT {','.join(names)} FROM entries ORDER BY id")
        entries = change([dict(zip(names, row, strict=True)) for row in rows])
        turns.execute("DELETE FROM entries")
        for entry in entries:
            key = [entry[name] for name in names[1:6]]
            with contextlib.suppress(TypeError, AttributeError):
                entry["checksum"] = entry_checksum(*key)
            turns.execute(f"INSERT INTO entries VALUES ({','.join('?' * len(names))})", [entry[name] for name in names])
            counts[entry["episode"], entry["attempt"]] += 1
        turns.commit()

    def sign(row: dict[str, Any]) -> dict[str, Any]:
        # without a digest, the number of entries alone is compared
        return {**row, "digest": b"", "entries": counts.get((row["episode"], row["attempt"]), row["entries"])}

    edit_rows(run, "episodes", sign)


# --- commands ---------------------------------------------------------------------------------------------------------

Arguments = Sequence[str]


def commands(run: ReceivedRun, directory: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield every command that reads a run, by name, for a copy in `directory`. A command without arguments here reads
    the run, and its episode if it takes one."""
    path, out = str(directory), str(directory.parent / "out")
    special: Mapping[str, Sequence[Arguments]] = {
        "run list": [[str(directory.parent)]],
        "run compare": [[path, path]],
        "run view": [[path, "--once"]],
        "run metrics": [[path], [path, "--prometheus"]],
        "run export": [
            [path, "--to", name, "--out", f"{out}-{name}", "--where", f"episode = '{run.episode}'"] for name in EXPORTS
        ],
        "run prune": [[path, "--keep=0"]],
        "run serve": [],
        "episode list": [[path], [path, "--match", "text"]],
        "episode diff": [[path, run.episode, run.other], *([] if run.has_model else [[path, "forks/f0"]])],
        "episode replay": [[path, run.episode], [path, run.unfinished]],
        "episode fork": [
            [path, run.episode, "--at", "0"],
            [path, "--where", f"episode = '{run.episode}'", "--at", "change", "--environment", run.environment],
        ],
        "step list": [[path]],
        "step replay": [[path], [path, "1", "--policy", "solver"]],
    }
    late = []
    for group in READING:
        for verb in group.verbs:
            name = f"{group.name} {verb.name}"
            takes_episode = any(argument.name == "id" for argument in verb.arguments)
            default = [[path, run.episode], [path, run.unfinished]] if takes_episode else [[path]]
            for arguments in special.get(name, default):
                call = partial(main, [group.name, verb.name, *arguments])
                if name == "run prune":
                    late.append((name, call))
                else:
                    yield name, call
    yield "run serve", partial(_serve, run, directory)
    yield "run serve", partial(_serve, run, directory.parent)
    for name, own in run.own.items():
        yield name, partial(own, directory)
    yield from late


def _serve(run: ReceivedRun, place: Path) -> int:
    """Ask the viewer's questions."""
    try:
        runs = ServedRuns(place)
    except AgentRLError as error:
        return error.exit_code
    parameters = {"run": NAME, "id": run.episode, "step": "1", "policy": "solver", "runs": NAME, "metric": "loss"}
    try:
        for question in ("runs", "comparison", *QUESTIONS):
            with contextlib.suppress(AgentRLError):
                runs.answer(question, parameters)
    finally:
        runs.close()
    return 0


class Verdict(NamedTuple):
    """What commands did with a changed run."""

    commands: list[str]
    """Commands that were tried."""
    harm: Counter[str]
    faults: list[str]
    """Descriptions of harm, crashes and unescaped output."""


def attack(
    run: ReceivedRun,
    case: Case | None,
    watch: Watch,
    place: Path,
    only: Iterable[str] | None = None,
    *,
    strict: bool = False,
) -> Verdict:
    """Try commands on a copy of a run with a change.

    Args:
        run: the run.
        case: the change; None: none.
        watch: the observer.
        place: new directory for the copy.
        only: names of the commands to try; None: all, of a changed run of a model those that are `ACTING`.
        strict: whether a command that refuses the run is a fault.
    """
    directory = place / NAME
    shutil.copytree(run.directory, directory, symlinks=True, copy_function=_copy)
    for folder, name in ((directory, "evil.py"), (place, "evil_module.py")):
        (folder / name).write_text(watch.code())
    (directory / "evil.sh").write_text(watch.program())
    (directory / "evil.sh").chmod(0o755)
    if case is not None:
        case.apply(directory)
    watch.take()
    verdict = Verdict([], Counter(), [])
    only = ACTING if only is None and case is not None and run.has_model else only
    label = "unchanged" if case is None else f"{case.field} = {case.name}"
    modules, paths = set(sys.modules), list(sys.path)
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patched:
        if not run.has_model:
            play_with_script(patched)
        for name, call in commands(run, directory):
            if (only is not None and name not in only) or (case is not None and not case.concerns(name)):
                continue
            verdict.commands.append(name)
            problem = _problem(call, strict=strict)
            harm = watch.take()
            verdict.harm.update(harm)
            for fault in [*([problem] if problem else []), *(kind for kind in HARMS if harm[kind])]:
                verdict.faults.append(f"{label}: {name}: {fault}")
            for module in set(sys.modules) - modules:  # of this copy of the run; those of agentrl stay
                if str(getattr(sys.modules[module], "__file__", "")).startswith(str(place)):
                    del sys.modules[module]
            sys.path[:] = paths
    shutil.rmtree(place)
    return verdict


def _copy(source: str, target: str) -> None:
    """Copy a file; one that no command changes in place is linked."""
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _problem(call: Callable[[], int], *, strict: bool) -> str:
    """Run a command; returns what is wrong with its end or its output."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code: Any = call()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{type(error).__name__}: {str(error)[:300]}"
    text = output.getvalue() + errors.getvalue()
    if code not in ((0,) if strict else (0, 1, 2, 74)):
        return f"exit code {code}: {errors.getvalue()[:300]}"
    if any(not (character.isprintable() or character in "\n\r") for character in text):
        return "unescaped characters in the output"
    return "the variable's value in the output" if VALUE in text else ""


# --- recording --------------------------------------------------------------------------------------------------------


def record_scripted_run(root: Path) -> ReceivedRun:
    """Record a run of the sample's environment: three policies, children, steps, a fork; no model."""
    config = sample_run_config(root, "recorded")
    sizes = {"proposer": 2, "solver": 8}
    policies = {
        name: policy.model_copy(update={"step_size": sizes[name]} if name in sizes else {})
        for name, policy in config.policies.items()
    }
    config = config.model_copy(
        update={
            "steps": 1,
            "max_in_flight": 4,
            "policies": policies,
            "checkpoint": config.checkpoint.model_copy(update={"every": 1}),
            "evaluation": config.evaluation.model_copy(update={"tasks": 0}),
        }
    )

    def play(directory: Path, steps: int, *, resume: bool) -> int:
        settings = {"directory": str(directory.parent), "name": directory.name, "steps": steps}
        running = run_training(
            config.model_copy(update=settings),
            Propose,
            held_out=held_out_tasks(),
            quiet=True,
            resume=resume,
            factories=sample_run_factories(),
        )
        try:
            asyncio.run(running)
        except AgentRLError as error:
            return error.exit_code
        return 0

    path = root / "recorded"
    assert play(path, 1, resume=False) == 0
    reader = RunReader(path)
    try:
        solved = reader.episodes("purpose = 'train' and turns > 1 and environment ~ Solve", sort="turns", limit=3)
    finally:
        reader.close()
    fork(path, solved[0].episode, at=0, factories=sample_run_factories())
    add_interrupted(path)
    own = {"train --resume": partial(play, steps=2, resume=True)}
    return ReceivedRun(
        path, solved[0].episode, solved[1].episode, UNFINISHED, False, "tests.support.sample_environment:Solve", own
    )


def add_interrupted(run: Path) -> None:
    """Add an episode to a run that a resume continues."""
    with contextlib.closing(SqliteRunLog(run / "journal")) as log:
        seq = log.next_seq()
    edit_table(run, "admissions", partial(_interrupted, "episode", seq))
    edit_entries(run, partial(_interrupted, "episode", seq))


def _interrupted(column: str, seq: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add an episode that was interrupted after its first turn, as e0 once was; `seq` is the log's next number."""
    first = [row for row in rows if row[column] == "e0"][:2]
    added = [{**row, column: UNFINISHED} for row in first]
    for number, row in enumerate(added):
        if "id" in row:
            row["id"] = max(other["id"] for other in rows) + 1 + number
        else:
            seed, seats, _, *others = msgspec.msgpack.decode(row["spec"])
            row |= {"spec": msgspec.msgpack.encode([seed, seats, 1, *others]), "group_id": f"group of {UNFINISHED}"}
            row["seq"] = seq + number
    return [*rows, *added]


def record_model_run(root: Path) -> ReceivedRun:
    """Record a step of the shipped model's adapter."""
    settings = {
        "policies.solver.step_size": 4,
        "policies.solver.lora": "{rank = 2}",
        "credit.group_size": 2,
        "evaluation.tasks": 0,
        "engine.slots": 4,
        "trainer.loss.normalizer": 16,
        "checkpoint.every": 1,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    train = ["train", str(shipped_example("01_tool_use")), *overrides]

    def play(directory: Path, steps: int, *more: str) -> int:
        return main([*train, f"--directory={directory.parent}", f"--name={directory.name}", f"--steps={steps}", *more])

    def evaluate(directory: Path) -> int:
        weights = f"--policy={directory / 'policies/solver'}"
        return main(["evaluate", *train[1:], weights, "--tasks=1", f"--journal={directory.parent / 'out-evaluated'}"])

    path = root / "recorded"
    assert play(path, 1) == 0
    with contextlib.closing(RunReader(path)) as reader:
        trained = [name for (name,) in reader.log.rows("SELECT DISTINCT episode FROM step_units ORDER BY 1")]
    add_interrupted(path)
    own = {"train --resume": lambda copy: play(copy, 2, "--resume"), "evaluate": evaluate}
    return ReceivedRun(path, trained[0], trained[1], UNFINISHED, True, "calculator", own)


# --- all of it --------------------------------------------------------------------------------------------------------

OF_MODELS = (
    "config.",
    "task of ",
    "environment",
    "admissions.",
    "BeginEntry.",
    "versions/",
    "policies/",
    "checkpoints/",
)
"""First parts of the fields that are tried on a run of a model; all are tried on a scripted run."""
PLANTED = {
    "code_run": ("config.policies.BotPolicy.id", "file of the run", "episode fork"),
    "bytes_sent": ("config.policies.RemotePolicy.url", "url", "episode fork"),
    "connections": ("config.policies.RemotePolicy.url", "url", "episode fork"),
    "files_opened_outside": ("checkpoints", "link", "run ledger"),
}
"""Changes of a run of a model that do harm without the gate: field, value and command."""


@contextlib.contextmanager
def watched(record: Callable[[Path], ReceivedRun], root: Path) -> Iterator[tuple[ReceivedRun, Watch]]:
    """Record a run in `root`, and watch what commands do to another user's, which has the same files."""
    root.mkdir()
    watch = Watch(root)
    with contextlib.closing(watch), patch.dict(os.environ, {VARIABLE: VALUE}):
        run = record(root / "base")
        shutil.copytree(run.directory, watch.secret, symlinks=True)
        watch.guard()
        yield run, watch


def chosen_cases(run: ReceivedRun, watch: Watch, *, shard: int = 0, shards: int = 1) -> Iterator[Case]:
    """Yield a share of a run's cases: the same for each execution, and spread over all fields."""
    for case in cases(run, watch):
        if not run.has_model or case.field.startswith(OF_MODELS):
            digest = hashlib.blake2b(f"{case.field} {case.name}".encode(), digest_size=8).digest()
            if int.from_bytes(digest, "big") % shards == shard:
                yield case


def planted(run: ReceivedRun, watch: Watch, place: Path, *, gate: bool) -> dict[str, bool]:
    """Try the changes in `PLANTED`; returns which of the harms were done.

    Args:
        run: a run of a model.
        watch: its observer.
        place: new directory.
        gate: whether the gate is closed.
    """
    by_name = {(case.field, case.name): case for case in cases(run, watch)}
    done = {}
    with contextlib.nullcontext() if gate else _gate_off():
        for harm, (field, name, command) in PLANTED.items():
            done[harm] = attack(run, by_name[field, name], watch, place, [command]).harm[harm] > 0
    return done


@contextlib.contextmanager
def _gate_off() -> Iterator[None]:
    """Let commands obey a run's records."""
    obey: dict[str, Any] = {
        "config": lambda run, recorded, use, command, *choose_code: recorded_config(recorded),
        "environment": lambda run, name, chosen, **more: resolve(chosen or name),
        "task": lambda run, environment, task, command: task,
    }
    with (
        patch.multiple("agentrl.app.received.ReceivedRun", **obey),
        patch("agentrl.inspection.ledger.refuse_links"),
    ):
        yield
