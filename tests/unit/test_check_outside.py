"""The checker sees environments that touch the outside, proves how they come back, and replays them always."""

from __future__ import annotations

import asyncio
import importlib
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.testing.check import check_environment, replay_from_every_entry


class Tasks(agentrl.ToolEnvironment):
    """A tool environment with one task."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="t", data={"question": "?"})]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return len(episode.turns) / 10


def _act(kind: str) -> str:
    where = Path(tempfile.gettempdir()) / "agentrl-test-outside"
    if kind == "write":
        where.write_text("x")
    elif kind == "process":
        subprocess.run(["true"], check=True)
    elif kind == "network":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect_ex(str(where) + ".socket")
    elif kind == "database":
        sqlite3.connect(str(where) + ".db").close()
    elif kind == "remove":
        (where.with_suffix(".none")).unlink(missing_ok=True)
    elif kind == "pair":
        ends = socket.socketpair()
        ends[0].sendmsg([b"x"])
        for end in ends:
            end.close()
        asyncio.new_event_loop().close()
    elif kind == "import":
        importlib.import_module("binds_at_import")
    elif kind == "read":
        Path(__file__).read_text()
        sqlite3.connect(":memory:").close()
        Path("/dev/null").write_text("x")
    return "ok"


class Reaching(Tasks):
    """Touches the outside in a tool that says it does not."""

    kind: ClassVar[str] = ""

    @agentrl.tool
    def reach(self) -> str:
        """Reach."""
        return _act(self.kind)


class Declared(Reaching):
    """Does so where it may."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.effect("reach", lambda: _act(self.kind))
        await ctx.resource(Reacher, level="snapshot").call("reach", self.kind)
        await super().run(ctx)

    @agentrl.tool(external=True)
    async def reach(self) -> str:
        """Reach."""
        return _act(self.kind)


class Reacher:
    """A resource that reaches outside, from its making on."""

    def __init__(self) -> None:
        _act(Declared.kind)

    def reach(self, kind: str) -> str:
        return _act(kind)

    def get_state(self) -> int:
        return 0

    def set_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("write", "opens '"),
        ("process", "starts a process"),
        ("network", "uses the network"),
        ("database", "opens the database"),
        ("remove", "changes files"),
    ],
)
def test_a_tool_that_reaches_outside_is_found(kind: str, words: str) -> None:
    Reaching.kind = Declared.kind = kind
    report = check_environment(Reaching)
    assert not report.passed
    assert words in report.text
    assert "_act (test_check_outside.py:" in report.text
    assert "external=True" in report.text
    declared = check_environment(Declared)
    assert declared.passed, declared.text
    assert declared.figures["resume_class"] == "snapshot"


def test_the_first_import_of_a_library_is_no_reaching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Urllib3 tries whether it can listen with IPv6, and Python stores the bytecode of what it imports."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for folder, passes in (("site-packages", True), ("mine", False)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "binds_at_import.py").write_text("import socket\nsocket.socket().bind(('127.0.0.1', 0))\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        monkeypatch.delitem(sys.modules, "binds_at_import", raising=False)
        Reaching.kind = "import"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            report = check_environment(Reaching)
        assert report.passed == passes, report.text


@pytest.mark.parametrize("kind", ["read", "pair"])
def test_what_stays_inside_is_no_reaching(kind: str) -> None:
    Reaching.kind = kind
    report = check_environment(Reaching)
    assert report.passed, report.text


class Dice:
    """A stateful object."""

    def __init__(self) -> None:
        self.rolled: list[int] = []

    def roll(self) -> int:
        self.rolled.append(random.randint(1, 6))
        return self.rolled[-1]

    def get_state(self) -> list[int]:
        return self.rolled

    def set_state(self, state: list[int]) -> None:
        self.rolled = list(state)


class Rolling(agentrl.Environment):
    """Rolls dice of a level."""

    level: ClassVar[Any] = "replay"
    dice: ClassVar[type] = Dice

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        dice = ctx.resource(self.dice, level=self.level)
        for _ in range(3):
            await ctx.agent("agent").act(agentrl.user(str(await dice.call("roll"))))
        ctx.agent("agent").reward(1.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{number}", data={}) for number in range(4)]


@pytest.mark.parametrize("level", ["replay", "snapshot", "pinned"])
def test_how_episodes_resume_is_told(level: str) -> None:
    Rolling.level = level
    report = check_environment(Rolling)
    assert report.passed, report.text
    assert report.figures["resume_class"] == level
    words = {"replay": "was.\n", "snapshot": "restored from their snapshots", "pinned": "started over if it had lost"}
    assert words[level] in report.text
    assert "class" not in report.text


class Forgetful(Dice):
    """Loses what it had when it is set."""

    def set_state(self, state: list[int]) -> None:
        self.rolled = []


class Rolled(Rolling):
    level = "snapshot"
    dice = Forgetful


def test_a_final_state_that_differs_is_found() -> None:
    report = check_environment(Rolled)
    assert not report.passed
    assert "ends as [" in report.text


class Box(Dice):
    """Holds something that must be closed, and has no state to tell afterwards."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def get_state(self) -> list[int]:
        if self.is_closed:
            raise ValueError("the box is closed")
        return super().get_state()


class EmptiedBox(Box):
    """As `Box`, but tells an empty state."""

    def get_state(self) -> list[int]:
        return [] if self.is_closed else self.rolled


class Closing(Rolling):
    """Closes its resource at the end."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        box = self.dice()
        self.dice = lambda: box  # type: ignore[assignment,misc]
        try:
            await super().run(ctx)
        finally:
            box.close()


@pytest.mark.parametrize("level", ["replay", "snapshot"])
@pytest.mark.parametrize("box", [Box, EmptiedBox])
def test_a_resource_that_is_closed_at_the_end_is_no_difference(box: type[Box], level: str) -> None:
    report = check_environment(type("Closed", (Closing,), {"dice": box, "level": level}))
    assert report.passed, report.text
    assert report.figures["resume_class"] == level


class Sharing(agentrl.Environment):
    """Branches that look at each other before their first call."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        seen: list[int] = []

        async def look(index: int) -> None:
            await asyncio.sleep(0)  # branches begin in order, and from here on in any
            seen.append(index)
            await ctx.agent("agent", index).act(agentrl.user(str(seen)))

        await ctx.gather(*(look(index) for index in range(4)))
        for index in range(4):
            ctx.agent("agent", index).reward(1.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="t", data={})]


def test_always_replay_finds_what_one_schedule_hides(always_replay: Callable[..., None]) -> None:
    Rolling.level = "replay"
    always_replay(Rolling)
    report = replay_from_every_entry(Sharing, episodes=2, schedules=range(10))  # three rarely suffice
    assert "differs" in report.text
