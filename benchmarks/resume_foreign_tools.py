"""Tools with a state, for `benchmarks.resume_foreign`; written as users write them.

The last ones are traps: they break the rules of docs/effects.md, to see whether anybody notices.
"""

from __future__ import annotations

import contextlib
import io
import re
import sqlite3
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentrl
from benchmarks.resume_foreign_games import Case, Policy
from benchmarks.resume_foreign_trl import calls

# --- tools with a state -----------------------------------------------------------------------------------------------


class Tool(agentrl.ToolEnvironment):
    """What the tools below share."""

    def prompt(self, task: agentrl.Task) -> str:
        return "Do something useful."

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(sum(len(message.content) for message in episode.messages if message.role == "tool"))


class Sql(Tool):
    """SQLite in memory."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)
        self.connection.execute("create table item (id integer primary key, name text, price real)")

    @agentrl.tool
    def query(self, sql: str) -> str:
        """Run a statement."""
        cursor = self.connection.execute(sql)
        return str(cursor.fetchall() if cursor.description else f"{cursor.rowcount} rows")


class SqlWithChance(Sql):
    """The same, with statements that ask SQLite for random numbers and the time."""


class Shell(Tool):
    """A shell that works in a directory of its own."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()

    @agentrl.tool
    def run_command(self, command: str) -> str:
        """Run a command."""
        return shell(command, self.directory.name)


class ShellWithClock(Shell):
    """The same, with commands that show the time, a path or an inode."""


class Repl(Tool):
    """Python that keeps its variables."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    @agentrl.tool
    def python(self, code: str) -> str:
        """Run some code and show what it prints."""
        return run_python(code, self.names)


class ReplWithChance(Repl):
    """The same, with code that draws from the global generator."""


class ReplWithSets(Repl):
    """The same, with code that prints sets of strings and objects at an address."""


def run_python(code: str, names: dict[str, Any]) -> str:
    """What some code prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def shell(command: str, directory: str) -> str:
    """What a command prints."""
    done = subprocess.run(command, shell=True, cwd=directory, capture_output=True, text=True, timeout=10)
    return f"{done.stdout}{done.stderr}exit {done.returncode}"


def files(directory: str) -> dict[str, str | None]:
    """What is below a directory: the text of each file, None for a directory."""
    root = Path(directory)
    found = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): path.read_text() if path.is_file() else None for path in found}


SQL = (
    "insert into item (name, price) values ('pen', 1.5)",
    "insert into item (name, price) values ('book', 12)",
    "update item set price = price * 2 where name = 'pen'",
    "delete from item where id = 2",
    "select * from item order by id",
    "select name, sum(price) from item group by name",
    "select * from nothing",
)
SHELL = (
    "echo hello >> notes",
    "mkdir -p src && cp notes src/notes.$(ls src | wc -l)",
    "wc -c notes",
    "ls -R",
    "cat notes | sort | uniq -c",
    "rm notes",
    "for i in 1 2 3; do echo $i > src/$i; done",
)
PYTHON = (
    "x = locals().get('x', 0) + 3",
    "rows = [*locals().get('rows', []), x]",
    "print(x, sum(rows))",
    "print({n: n * n for n in range(x % 7)})",
    "def double(n): return 2 * n",
    "print(double(x))",
    "print(1 / 0)",
)
SQL_OF_CHANCE = ("select random()", "select strftime('%f', 'now')")
SHELL_OF_THE_HOUR = ("date +%N", "pwd", "ls -i")
PYTHON_OF_CHANCE = ("import random; x = random.randint(0, 9)", "rows = [random.random() for _ in range(3)]")
PYTHON_OF_ADDRESSES = ("print({'pen', 'book', 'cup'})", "print(object())")


def tool_cases() -> list[Case]:
    """SQL, a shell and Python; each once as it is, and once with what no environment can repeat."""

    def case(environment: type[Tool], tool: str, argument: str, values: Sequence[str], state: Any) -> Case:
        policy = calls((tool, {argument: values}))
        task = [agentrl.Task(id=f"try-{number}", data={}) for number in range(3)]
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", environment.__name__).lower()
        return Case(name=name, family="tools", environment=environment, policy=policy, tasks=task, state=state)

    def rows(env: Any) -> Any:
        return list(env.connection.iterdump())

    def kept(env: Any) -> Any:
        return files(env.directory.name)

    def values(env: Any) -> Any:
        return {name: repr(value) for name, value in env.names.items() if isinstance(value, (int, list))}

    return [
        case(Sql, "query", "sql", SQL, rows),
        case(SqlWithChance, "query", "sql", (*SQL, *SQL_OF_CHANCE), rows),
        case(Shell, "run_command", "command", SHELL, kept),
        case(ShellWithClock, "run_command", "command", (*SHELL, *SHELL_OF_THE_HOUR), kept),
        case(Repl, "python", "code", PYTHON, values),
        case(ReplWithChance, "python", "code", (*PYTHON, *PYTHON_OF_CHANCE), values),
        case(ReplWithSets, "python", "code", (*PYTHON, *PYTHON_OF_ADDRESSES), values),
    ]


# --- remedies ---------------------------------------------------------------------------------------------------------


class Database:
    """SQLite in memory, as a resource that can tell and take its state."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table item (id integer primary key, name text, price real)")

    def query(self, sql: str) -> str:
        """Run a statement; its errors are for the policy to read, and an error of a resource would end the episode."""
        try:
            cursor = self.connection.execute(sql)
        except sqlite3.Error as error:
            return f"error: {error}"
        return str(cursor.fetchall() if cursor.description else f"{cursor.rowcount} rows")

    def get_state(self) -> str:
        """The statements that make the tables."""
        return "\n".join(self.connection.iterdump())

    def set_state(self, state: str) -> None:
        """Begin from them."""
        self.connection = sqlite3.connect(":memory:")
        self.connection.executescript(state)


class Directory:
    """A directory to work in, as a resource that can tell and take its state."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()

    def run_command(self, command: str) -> str:
        """Run a command."""
        return shell(command, self.directory.name)

    def get_state(self) -> dict[str, str | None]:
        """The files."""
        return files(self.directory.name)

    def set_state(self, state: dict[str, str | None]) -> None:
        """Begin from them."""
        self.directory = tempfile.TemporaryDirectory()
        for name, text in state.items():
            path = Path(self.directory.name, name)
            if text is None:
                path.mkdir()
            else:
                path.write_text(text)


class SqlSnapshot(Tool):
    """The tool with chance and time again, its database a resource."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.database = ctx.resource(Database, level="snapshot")
        await super().run(ctx)

    @agentrl.tool
    async def query(self, sql: str) -> str:
        """Run a statement."""
        return str(await self.database.call("query", sql))


class ShellSnapshot(Tool):
    """The shell with the clock again, its directory a resource."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.directory = ctx.resource(Directory, level="snapshot")
        await super().run(ctx)

    @agentrl.tool
    async def run_command(self, command: str) -> str:
        """Run a command."""
        return str(await self.directory.call("run_command", command))


def remedy_cases() -> list[Case]:
    """What was pinned, with a state that can be told and taken."""
    task = [agentrl.Task(id=f"try-{number}", data={}) for number in range(3)]

    def case(name: str, environment: type[Tool], policy: Policy, state: Any) -> Case:
        return Case(
            name=name,
            family="remedy",
            environment=environment,
            policy=policy,
            tasks=task,
            state=state,
            foreign=False,
            level="snapshot",
        )

    sql = calls(("query", {"sql": (*SQL, *SQL_OF_CHANCE)}))
    commands = calls(("run_command", {"command": (*SHELL, *SHELL_OF_THE_HOUR)}))
    return [
        case("sql with chance, snapshot", SqlSnapshot, sql, lambda env: env.database.state()),
        case("shell with clock, snapshot", ShellSnapshot, commands, lambda env: env.directory.state()),
    ]


# --- traps ------------------------------------------------------------------------------------------------------------


class ExternalShell(Tool):
    """A shell declared external: its results are remembered, its directory is gone with the process."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()

    @agentrl.tool(external=True)
    def run_command(self, command: str) -> str:
        """Run a command."""
        return shell(command, self.directory.name)


class SharedCounter(Tool):
    """State on the class: it outlives the episode, and is shared with all others of the process."""

    served: list[int] = []  # noqa: RUF012 - the mistake

    @agentrl.tool
    def take_ticket(self) -> int:
        """The next number."""
        self.served.append(len(self.served))
        return self.served[-1] % 2

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(len(self.served))


def trap_cases() -> list[Case]:
    """Environments that break the rules."""
    commands = calls(("run_command", {"command": SHELL}))
    tickets = calls(("take_ticket", {}))
    task = [agentrl.Task(id="only", data={})]
    return [
        Case(
            name="shell declared external",
            family="trap",
            environment=ExternalShell,
            policy=commands,
            tasks=task,
            state=lambda env: files(env.directory.name),
            foreign=False,
        ),
        Case(
            name="state on the class",
            family="trap",
            environment=SharedCounter,
            policy=tickets,
            tasks=task,
            state=lambda env: len(env.served),
            foreign=False,
        ),
    ]
