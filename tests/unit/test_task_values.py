"""Values in a task's data: every episode sees them as they were given, in every process and life, or none is played."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import math
import os
import pathlib
import signal
import subprocess
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import agentrl
from agentrl.app.run_parts import held_out_task_splits, task_source
from agentrl.core.errors import InputError
from agentrl.core.json_data import MAX_DEPTH
from agentrl.orchestrator.tasks import Curriculum
from tests.contract.worker_cases import Workplace, config_of, run, workplace
from tests.contract.worker_environments import TaskWitness


class Unit(enum.Enum):
    CELSIUS = "celsius"


class TextUnit(str, enum.Enum):  # noqa: UP042 - as many libraries write it
    CELSIUS = "celsius"


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: int
    second: int


@dataclass
class Span:
    low: int


class Text(str):
    __slots__ = ()


def nested(levels: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(levels - 1), [])


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DAY = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))

KEPT: Mapping[str, Any] = {
    "text": "naïve 🦜 \0",
    "truth": True,
    "nothing": None,
    "integer": 12,
    "whole float": 1.0,
    "negative zero": -0.0,
    "tiny float": 5e-324,
    "largest unsigned": 2**64 - 1,
    "smallest signed": -(2**63),
    "list": [1, 1.0, True, None, "a", []],
    "dict": {"": 1, "b": {"a": [{}]}},
    "key order": {"b": 1, "a": 2},
    "deep": nested(MAX_DEPTH - 1),
}
REFUSED: Mapping[str, Any] = {
    "tuple": (1, 2),
    "named tuple": Pair(1, 2),
    "set": {1},
    "frozenset": frozenset("a"),
    "date": DAY.date(),
    "datetime": DAY,
    "time": DAY.time(),
    "timedelta": datetime.timedelta(1),
    "decimal": decimal.Decimal("0.1"),
    "fraction": fractions.Fraction(1, 3),
    "bytes": b"a",
    "bytearray": bytearray(b"a"),
    "infinity": float("inf"),
    "not a number": float("nan"),
    "integer key": {1: 2},
    "tuple key": {(1, 2): 3},
    "large integer": 10**30,
    "negative large integer": -(2**63) - 1,
    "half character": "\ud83d",
    "half character as key": {"\ud83d": 1},
    "array": np.arange(3),
    "array scalar": np.float64(1.5),
    "array integer": np.int64(1),
    "array text": np.str_("a"),
    "enumeration": Unit.CELSIUS,
    "enumeration of text": TextUnit.CELSIUS,
    "enumeration of integers": Level.LOW,
    "dataclass": Span(1),
    "path": pathlib.PurePosixPath("a/b"),
    "uuid": uuid.UUID(int=1),
    "class of text": Text("a"),
    "ordered dict": collections.OrderedDict(a=1),
    "default dict": collections.defaultdict(list, a=[1]),
    "counter": collections.Counter("aab"),
    "proxy": types.MappingProxyType({"a": 1}),
    "range": range(3),
    "complex": 1j,
    "iterator": iter(()),
    "function": len,
    "too deep": nested(MAX_DEPTH + 1),
    "cycle": CYCLE,
}


def shown(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, list[str]]]:
    """What the episodes of each kept value saw, keyed by scenario and kind."""
    seen = {}
    for scenario, play in SCENARIOS.items():
        directory = tmp_path_factory.mktemp(scenario.replace(" ", "_"))
        play(directory)
        seen[scenario] = {
            kind: (directory / "place" / f"e{2 * number}.seen").read_text().splitlines()
            for number, kind in enumerate(KEPT)
        }
    return seen


def specs_at(at: Workplace) -> list[Any]:
    """Two episodes of each kept value, of one task."""
    values = enumerate(KEPT.values())
    specs = [replace(at.spec(f"e{2 * number}", value=value), group_size=2) for number, value in values]
    return [twin for spec in specs for twin in (spec, replace(spec, episode_id=f"e{int(spec.episode_id[1:]) + 1}"))]


def play_with_workers(directory: Path, *, workers: int, kill: bool) -> None:
    """Play the episodes, and kill one of the workers in the middle."""

    async def main() -> None:
        async with workplace(directory, workers, TaskWitness) as at:
            at.submit(*specs_at(at))
            await at.until(lambda: len(at.reached()) == len(KEPT))
            if kill:
                os.kill(at.reached()["e0"], signal.SIGKILL)
                await at.until(lambda: any("SIGKILL" in line for line in at.told))
            at.open()
            await at.drained()
            assert len(at.ends) == 2 * len(KEPT)

    run(main)


def play_first_life(directory: Path) -> None:
    """Play the episodes until they all wait in the middle, and kill this process."""

    async def main() -> None:
        async with workplace(directory, 1, TaskWitness) as at:
            specs = specs_at(at)
            at.submit(*specs)
            await at.until(lambda: all(at.journal.recorded(spec.episode_id, 0)[0] for spec in specs))
            await at.journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    run(main)


def play_in_two_lives(directory: Path) -> None:
    """Kill the whole run in the middle of its episodes, and resume it."""
    command = [sys.executable, "-c", f"from {__name__} import *; play_first_life(Path({str(directory)!r}))"]
    life = subprocess.run(command, capture_output=True, text=True, check=False)
    assert life.returncode == -signal.SIGKILL, life.stderr

    async def main() -> None:
        async with workplace(directory, 1, TaskWitness) as at:
            specs = at.journal.unfinished()
            assert len(specs) == 2 * len(KEPT)
            at.open()
            at.submit(*specs, resume=True)
            await at.drained()

    run(main)


SCENARIOS: Mapping[str, Callable[[Path], None]] = {
    "one worker": functools.partial(play_with_workers, workers=1, kill=False),
    "two workers": functools.partial(play_with_workers, workers=2, kill=False),
    "killed worker": functools.partial(play_with_workers, workers=2, kill=True),
    "killed run": play_in_two_lives,
}


class Sourced(agentrl.Environment):
    """Its tasks hold a value of one kind, in a list."""

    seats = ("solver",)
    kind = ""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(agentrl.user("Go on."))
        ctx.agent("solver").reward(0.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        data = {"question": "q", "values": ["a", {"b": REFUSED[cls.kind]}]}
        return [agentrl.Task(id=f"{split}-0", data={}), agentrl.Task(id=f"{split}-1", data=data)]


@pytest.mark.parametrize("kind", [*KEPT, *REFUSED])
def test_a_value_is_kept_or_refused(kind: str, request: pytest.FixtureRequest) -> None:
    if kind in KEPT:
        for scenario, values in request.getfixturevalue("seen").items():
            lines = values[kind]
            assert set(lines) == {shown(KEPT[kind])}, scenario
            assert len(lines) >= (3 if scenario == "killed run" else 2), scenario
        return
    environment = type("Sourced", (Sourced,), {"kind": kind})
    report = agentrl.check_environment(environment)
    (finding,) = report.findings
    assert "Task 'train-1': data['values'][1]['b']" in finding
    with pytest.raises(InputError, match=r"Task 'train-1': data\['values'\]\[1\]\['b'\]"):
        task_source(config_of(1).environment, config_of(1).seed, environment, "train")
    with pytest.raises(InputError, match=r"Task 'held_out-1': data\['values'\]\[1\]\['b'\]"):
        held_out_task_splits(
            config_of(1, evaluation={"tasks": 8}).evaluation,
            config_of(1, evaluation={"tasks": 8}).environment,
            config_of(1, evaluation={"tasks": 8}).seed,
            environment,
        )
    with pytest.raises(TypeError, match="lone surrogate"):
        agentrl.Task(id="\ud83d", data={})


def test_data_that_was_changed_to_something_else_is_refused_when_it_is_drawn() -> None:
    task = agentrl.Task(id="t", data={"a": 1})
    curriculum = Curriculum([task], seed=0)
    assert curriculum.task(0) == task
    assert curriculum.task(0).data is not task.data
    task.data["a"] = (1, 2)  # type: ignore[index]
    with pytest.raises(InputError, match=r"Task 't': data\['a'\] is \(1, 2\)"):
        curriculum.task(1)


LISTS: Mapping[str, list[Any]] = {"float": [0.5, -0.0, 1e308], "int": [2**64 - 1, -(2**63)], "str": ["a", ""]}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_one_kind_are_held_to_the_same(kind: str) -> None:
    kept = (True, 1, 1.5, "ü", None)
    refused = (math.nan, math.inf, np.float64(1.5), 2**64, -(2**63) - 1, Level.LOW, "\ud83d", Text("a"), b"a")
    for value in kept:
        values = [*LISTS[kind], value]
        data = agentrl.Task(id="t", data={"x": values}).data
        assert repr(data) == repr({"x": values})
        assert data["x"] is not values
    for value in refused:
        with pytest.raises(TypeError, match=rf"data\['x'\]\[{len(LISTS[kind])}\] is"):
            agentrl.Task(id="t", data={"x": [*LISTS[kind], value]})
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        inner = functools.reduce(lambda value, _: [value], range(depth - 2), LISTS[kind])
        with (
            contextlib.nullcontext() if depth == MAX_DEPTH else pytest.raises(TypeError, match="make the data flatter")
        ):
            assert agentrl.Task(id="t", data={"x": inner}).data == {"x": inner}


def test_recorded_data_is_read_as_an_earlier_version_wrote_it() -> None:
    task = agentrl.Task(id="t", data={"a": 1.0})
    task.data["a"] = math.nan  # type: ignore[index]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=agentrl.Task)
    assert math.isnan(decoded.data["a"])


def test_a_mapping_becomes_a_dict_that_later_changes_do_not_reach() -> None:
    row = {"numbers": [1]}
    task = agentrl.Task(id="t", data=types.MappingProxyType(row))
    row["numbers"].append(2)
    assert task.data == {"numbers": [1]}
    assert type(task.data) is dict


class Parent(Sourced):
    """Starts a child episode with data that is no JSON."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(agentrl.user("Go on."))
        await ctx.gather(*ctx.spawn(Sourced, {"pair": (1, 2)}))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return [agentrl.Task(id=split, data={})]


def test_data_of_child_episodes_is_held_to_the_same() -> None:
    (finding,) = agentrl.check_environment(Parent).findings
    assert "data['pair'] is (1, 2), of type tuple" in finding
