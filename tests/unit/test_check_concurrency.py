"""`env check` plays several episodes at once: planted environments that mix them are found, sound ones pass."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from textwrap import dedent

import pytest

from agentrl.testing import new_process
from agentrl.testing.check import check_environment
from agentrl.testing.report import CheckResult, EnvironmentReport

TASKS = """
    @classmethod
    def tasks(cls, split, *, seed=0):
        return [
            agentrl.Task(id=name, data={"question": f"How tall is {name}?", "name": name, "height": height})
            for name, height in (("Everest", 8849), ("Denali", 6190), ("Aconcagua", 6961))
        ]
"""
IMPORTS = """
import asyncio, contextvars, functools, json, os, pathlib, socket, sqlite3, sys, tempfile, threading
import aiohttp
import agentrl
SHARED = pathlib.Path({shared!r})
"""
CLIENT = '''
class Client:
    """A client of OpenAI's protocol."""

    def __init__(self, endpoint=None):
        self.url = endpoint.url if endpoint else os.environ["OPENAI_BASE_URL"]
        self.key = endpoint.key if endpoint else os.environ["OPENAI_API_KEY"]

    async def chat(self, messages, **fields):
        async with aiohttp.ClientSession() as session:
            async with session.post(
                f"{self.url}/chat/completions",
                json={"model": "main", "messages": messages, **fields},
                headers={"Authorization": f"Bearer {self.key}"},
            ) as response:
                data = await response.json()
                if response.status != 200:
                    raise RuntimeError(data)
                return data["choices"][0]["message"]


async def loop(task, chat, turns=3):
    messages = [{"role": "user", "content": task.data["question"]}]
    for _ in range(turns):
        reply = await chat(messages)
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "Go on."}]
    return messages[-2]["content"]
'''
PROGRAM = '''
class E(agentrl.HarnessEnvironment):
    """A program."""
    seats = ("main",)
    {attributes}

    {play}

    def reward(self, task, episode):
        {reward}
'''
TURNS = '''
class E(agentrl.Environment):
    """Two turns."""
    seats = ("main",)
    {attributes}

    async def run(self, ctx):
        agent = ctx.agent("main")
        {run}
'''
TOOLS = '''
class E(agentrl.ToolEnvironment):
    """Tools."""
    {attributes}

    {tools}

    def reward(self, task, episode):
        {reward}
'''
SCRIPT = """
import json, os, pathlib, sys, urllib.request
SHARED = pathlib.Path({shared!r})

def chat(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": "main", "messages": messages}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

def ask(text):
    return chat([{{"role": "user", "content": text}}])

question = sys.argv[1]
"""


def _indented(text: str, spaces: int) -> str:
    return dedent(text).strip().replace("\n", "\n" + " " * spaces)


def program(play: str, *, before: str = "", reward: str = "return 1.0", attributes: str = "") -> str:
    play = "async def play(self, task, endpoint):\n" + "    " + _indented(play, 4)
    return (
        CLIENT
        + dedent(before)
        + PROGRAM.format(play=_indented(play, 4), reward=_indented(reward, 8), attributes=_indented(attributes, 4))
        + TASKS
    )


def command(script: str, *, reward: str = "return 1.0") -> str:
    attributes = 'command = (sys.executable, str(pathlib.Path(__file__).parent / "program.py"), "{task.question}")'
    return (
        f"# program.py\n{SCRIPT}{dedent(script)}# environment.py\n"
        + PROGRAM.format(play="", reward=_indented(reward, 8), attributes=attributes)
        + TASKS
    )


def turns(run: str, *, before: str = "", attributes: str = "") -> str:
    return dedent(before) + TURNS.format(run=_indented(run, 8), attributes=_indented(attributes, 4)) + TASKS


def tools(methods: str, *, before: str = "", reward: str = "return 1.0", attributes: str = "") -> str:
    return (
        dedent(before)
        + TOOLS.format(tools=_indented(methods, 4), reward=_indented(reward, 8), attributes=_indented(attributes, 4))
        + TASKS
    )


def concurrency_of(report: EnvironmentReport) -> CheckResult:
    (result,) = [check for check in report.checks if check.name == "concurrency"]
    return result


def check(tmp_path: Path, source: str) -> EnvironmentReport:
    shared = tmp_path / "shared"
    shared.mkdir()
    files = {"environment.py": source}
    if source.startswith("# program.py"):
        script, _, environment = source.removeprefix("# program.py").partition("# environment.py\n")
        files = {"environment.py": environment, "program.py": script.replace("{shared!r}", repr(str(shared)))}
        files["program.py"] = files["program.py"].replace("{{", "{").replace("}}", "}")
    for name, text in files.items():
        head = IMPORTS.format(shared=str(shared)) if name == "environment.py" else ""
        (tmp_path / name).write_text(head + text)
    with contextlib.chdir(Path.cwd()):  # some environments change it
        return check_environment(f"{tmp_path / 'environment.py'}:E", episodes=3)


PLANTED = {
    "client-rebound": program(
        """
        global client
        client = Client(endpoint)
        return await loop(task, lambda messages: client.chat(messages))
        """,
        before="client = None",
    ),
    "os.environ": program(
        """
        os.environ.update(OPENAI_BASE_URL=endpoint.url, OPENAI_API_KEY=endpoint.key)
        return await loop(task, lambda messages: Client().chat(messages))
        """,
    ),
    "module-task-in-reward": program(
        """
        global TASK
        TASK = task
        return await loop(task, Client(endpoint).chat, turns=1)
        """,
        before="TASK = None",
        reward="return float(TASK.data['height'])",
    ),
    "command-fixed-path": command(
        """
        (SHARED / "plan.txt").write_text(question)
        ask("Plan: " + question)
        ask("Do: " + (SHARED / "plan.txt").read_text())
        """,
    ),
    "command-fixed-port": command(
        """
        import socket
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int((SHARED.parent / "port").read_text())))
        server.listen()
        ask(question)
        """,
    ),
    "class-current-task": turns(
        """
        E.current = ctx.task
        await agent.act(agentrl.user(ctx.task.data["question"]))
        agent.reward(float(E.current.data["height"]))
        """,
        attributes="current = None",
    ),
    "module-list": turns(
        """
        LOG.clear()
        for text in (ctx.task.data["question"], "Again."):
            LOG.append(text)
            turn = await agent.act(agentrl.user(" ".join(LOG)))
            LOG.append(turn.text)
        agent.reward(1.0)
        """,
        before="LOG = []",
    ),
    "chdir": turns(
        """
        def enter():
            path = SHARED / ctx.task.id
            path.mkdir(exist_ok=True)
            (path / "name.txt").write_text(ctx.task.id)
            os.chdir(path)
        await ctx.effect("enter", enter)
        await agent.act(agentrl.user("Ready?"))
        name = await ctx.effect("read", lambda: pathlib.Path("name.txt").read_text())
        await agent.act(agentrl.user(name))
        agent.reward(1.0)
        """,
    ),
    "shared-database": turns(
        """
        def notes(sql, *values):
            with sqlite3.connect(SHARED / "notes.db") as database:
                database.execute("CREATE TABLE IF NOT EXISTS notes (text)")
                return [text for text, in database.execute(sql, values)]
        await ctx.effect("clear", lambda: notes("DELETE FROM notes"))
        await ctx.effect("write", lambda: notes("INSERT INTO notes VALUES (?)", ctx.task.data["question"]))
        await agent.act(agentrl.user("Ready?"))
        await agent.act(agentrl.user(" ".join(await ctx.effect("read", lambda: notes("SELECT text FROM notes")))))
        agent.reward(1.0)
        """,
    ),
    "shared-temporary-file": tools(
        '''
        @agentrl.tool(external=True)
        def note(self, text: str) -> str:
            """Note a text.

            Args:
                text: the text.
            """
            path = SHARED / "note.txt"
            before = path.read_text() if path.exists() and self.noted else "nothing"
            self.noted = True
            path.write_text(text + self.task_name)
            return f"before: {before}"

        def prompt(self, task):
            self.noted, self.task_name = False, task.data["name"]
            return task.data["question"]
        ''',
    ),
    "session-closed-by-the-first-to-end": program(
        """
        global session
        if session is None or session.closed:
            session = aiohttp.ClientSession()
        client = Client(endpoint)
        for turn in range(1 + int(task.data["height"]) % 3):
            async with session.post(
                f"{client.url}/chat/completions",
                json={"model": "main", "messages": [{"role": "user", "content": f"{task.data['question']} {turn}"}]},
                headers={"Authorization": f"Bearer {client.key}"},
            ) as response:
                await response.json()
        await session.close()
        """,
        before="session = None",
    ),
    "cache-of-a-function-without-the-task": turns(
        """
        E.task = ctx.task
        await agent.act(agentrl.user(question()))
        agent.reward(1.0)
        """,
        before="""
        @functools.lru_cache
        def question():
            return E.task.data["question"]
        """,
        attributes="task = None",
    ),
}


SOUND = {
    "shared-session-with-a-key-per-request": program(
        """
        client = Client(endpoint)
        CLIENTS[endpoint.key] = client
        try:
            return await loop(task, lambda messages: CLIENTS[endpoint.key].chat(messages))
        finally:
            del CLIENTS[endpoint.key]
        """,
        before="CLIENTS = {}",
    ),
    "module-client-under-a-lock": program(
        """
        global client
        async with LOCK:
            client = Client(endpoint)
            return await loop(task, lambda messages: client.chat(messages), turns=1)
        """,
        before="LOCK = asyncio.Lock()",
    ),
    "synchronous-in-a-thread": program(
        """
        def solve():
            return asyncio.run(loop(task, Client(endpoint).chat))
        return await asyncio.to_thread(solve)
        """,
    ),
    "not-replay-stable": program(
        """
        import uuid
        task.data["question"] + uuid.uuid4().hex
        return await loop(agentrl.Task(id="", data={"question": uuid.uuid4().hex}), Client(endpoint).chat)
        """,
        attributes="replay_stable = False",
    ),
    "parallel-requests": program(
        """
        client = Client(endpoint)
        ask = lambda text: client.chat([{"role": "user", "content": text}])
        replies = await asyncio.gather(ask(task.data["question"]), ask("Shorter."), ask("Longer."))
        return (await ask(" ".join(reply["content"] for reply in replies)))["content"]
        """,
    ),
    "command-in-its-directory": command(
        """
        pathlib.Path("plan.txt").write_text(question)
        ask("Plan: " + question)
        ask("Do: " + pathlib.Path("plan.txt").read_text())
        """,
        reward="return float(task.data['question'] in (episode.directory / 'plan.txt').read_text())",
    ),
    "cache-keyed-by-task-and-a-counter": turns(
        """
        E.played += 1
        text = CACHE.setdefault(ctx.task.id, ctx.task.data["question"])
        await agent.act(agentrl.user("Ready?"))
        await agent.act(agentrl.user(text))
        agent.reward(1.0)
        """,
        before="CACHE = {}",
        attributes="played = 0",
    ),
    "changing-world": turns(
        """
        import random, time
        luck = await ctx.effect("luck", lambda: random.SystemRandom().choice([0, 1]))
        now = await ctx.effect("now", time.time)
        count = await ctx.effect("count", lambda: COUNTER.append(0) or len(COUNTER))
        await agent.act(agentrl.user(f"{luck} {now} {count} {ctx.uuid()}"))
        await agent.act(agentrl.user(str(ctx.rng.random())))
        agent.reward(1.0)
        """,
        before="COUNTER = []",
    ),
    "database-keyed-by-episode": turns(
        """
        key = ctx.uuid()
        def notes(sql, *values):
            with sqlite3.connect(SHARED / "notes.db", timeout=60) as database:
                database.execute("CREATE TABLE IF NOT EXISTS notes (key, text)")
                return [text for text, in database.execute(sql, values)]
        question = ctx.task.data["question"]
        await ctx.effect("write", lambda: notes("INSERT INTO notes VALUES (?, ?)", key, question))
        await agent.act(agentrl.user("Ready?"))
        read = await ctx.effect("read", lambda: notes("SELECT text FROM notes WHERE key = ?", key))
        await agent.act(agentrl.user(" ".join(read)))
        agent.reward(1.0)
        """,
    ),
    "global-random": tools(
        '''
        @agentrl.tool
        def roll(self) -> str:
            """Roll a die."""
            import random
            return str(random.randint(1, 6))
        ''',
    ),
}
NAMED = {
    "client-rebound": ("'Everest'", "environment.py.client"),
    "command-fixed-path": ("Do: How tall is", "/shared"),
    "chdir": ("'Everest'", "the working directory"),
    "class-current-task": ("8849.0", "'Everest'", "E.current"),
    "shared-database": ("notes.db",),
}
"""What findings name: texts, episodes, names and paths."""
BUNDLED = [
    *("calculator", "propose_and_solve", "tictactoe"),
    pytest.param("frozen_lake", marks=pytest.mark.exhaustive),
    "examples/07_smollm2.py:WordProblems",
    pytest.param("examples/12_code_reward.py:Functions", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("name", PLANTED)
def test_planted(tmp_path: Path, name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    report = check(tmp_path, PLANTED[name])
    assert report.findings == [each.text for each in concurrency_of(report).findings], report.text
    assert len(report.findings) == 1, report.text
    assert all(word in report.text for word in NAMED.get(name, ())), report.text


@pytest.mark.parametrize("name", SOUND)
def test_sound(tmp_path: Path, name: str) -> None:
    report = check(tmp_path, SOUND[name])
    assert report.passed, report.text
    assert report.figures["concurrent_episodes"] == 4


@pytest.mark.parametrize("name", BUNDLED)
def test_sound_bundled(name: str) -> None:
    report = check_environment(name)
    assert report.passed, report.text
    assert not [found for result in report.checks if result.name == "answers" for found in result.findings], report.text
    assert report.figures["concurrent_episodes"] in (2, 4), "two of an environment with one task"


DEMONSTRATED = '''
class E(agentrl.ToolEnvironment):
    """Records heights; random calls never name a mountain of the task."""

    book = {{}}
    nested = {{"heights": {{}}}}

    async def run(self, ctx):
        {heights}
        self.heights[ctx.task.data["name"]] = 0
        await super().run(ctx)

    @agentrl.tool
    def record(self, name: str, height: int) -> str:
        """Record the height of a mountain."""
        if name not in self.heights:
            return "There is no such mountain."
        self.heights[name] = height
        return "Recorded."

    @agentrl.tool
    def roll(self) -> str:
        """Roll a die."""
        import random
        return str(random.randint(1, 6))

    def reward(self, task, episode):
        return float(self.heights == {{task.data["name"]: task.data["height"]}} and episode.answer in "123")

    @classmethod
    def demonstrate(cls, task, random):
        if task.id == "Denali":
            yield {{"name": "roll", "arguments": {{}}}}
        yield {{"name": "record", "arguments": {{"name": task.data["name"], "height": task.data["height"]}}}}
        yield random.choice("123")
'''


def demonstrated(tmp_path: Path, heights: str) -> tuple[EnvironmentReport, CheckResult]:
    report = check(tmp_path, DEMONSTRATED.format(heights=_indented(heights, 8)) + TASKS)
    assert concurrency_of(report).findings == []
    (result,) = [check for check in report.checks if check.name == "concurrent_demonstrations"]
    return report, result


@pytest.mark.parametrize(
    ("heights", "shared"),
    [
        ("self.heights = self.book", "E.book"),
        ('self.heights = self.nested["heights"]', "E.nested"),
        ("self.book.clear()\nself.heights = self.book", "E.book"),
    ],
)
def test_state_that_only_demonstrations_reach_is_found(tmp_path: Path, heights: str, shared: str) -> None:
    """Also if each episode leaves so much behind that none after it, alone or not, wins."""
    report, result = demonstrated(tmp_path, heights)
    (finding,) = report.findings
    assert finding == result.findings[0].text
    assert finding.startswith("4 demonstrations played at once mix. The episode of task '"), finding
    assert f" They share: {shared}. " in finding


@pytest.mark.parametrize(
    "heights",
    ["self.heights = {}", "self.heights = dict(self.book.setdefault(ctx.task.id, {}))"],
    ids=["of-the-episode", "copied-from-a-cache"],
)
def test_demonstrations_of_sound_environments_do_not_mix(tmp_path: Path, heights: str) -> None:
    """Also if some draw from a global generator, so that each process plays them again."""
    report, result = demonstrated(tmp_path, heights)
    assert report.passed, report.text
    assert result.figures["concurrent_demonstrations"] == 4
    assert result.shown in report.text


ALONE = """
running = 0
@agentrl.tool
async def look(self) -> str:
    '''Look.'''
    return "mountains"
async def run(self, ctx):
    type(self).running += 1
    if type(self).running > 1:
        os._exit(0)
    try:
        return await super().run(ctx)
    finally:
        type(self).running -= 1
"""


def test_an_environment_that_ends_the_process_ends_no_check(tmp_path: Path) -> None:
    """The check would end with the environment's exit code, and a test suite that runs it, too."""
    report = check(tmp_path, tools(ALONE))
    assert report.findings == [each.text for each in concurrency_of(report).findings]
    assert ["exit code 0" in finding for finding in report.findings] == [True]


def test_a_second_process_that_is_killed_accuses_no_environment(tmp_path: Path) -> None:
    """By a machine without memory, for example."""
    report = check(tmp_path, tools(ALONE.replace("os._exit(0)", "os.kill(os.getpid(), 9)")))
    assert report.findings == []
    assert "SIGKILL" in concurrency_of(report).remarks[0]


def test_an_import_that_hangs_in_another_process_bounds_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_process, "IMPORT_S", 0.1)
    monkeypatch.setenv("MAIN", str(os.getpid()))
    hangs = "if os.environ['MAIN'] != str(os.getpid()):\n    threading.Event().wait()\n"
    report = check(tmp_path, tools(ALONE.replace("os._exit(0)", "pass"), before=hangs))
    assert (report.findings, report.figures["concurrent_episodes"]) == ([], 0)
    assert concurrency_of(report).remarks[0] in report.text
