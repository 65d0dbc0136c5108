"""Plays episodes of the check in new processes, where no earlier episode has filled a cache.

Importing agentrl takes longer than playing. A server process therefore imports it once, and forks for each request. It
has one thread and never imports the user's code, so each fork begins where a new process would. Only other string
hashes need another server, because Python chooses them when it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from agentrl.core import event_loop
from agentrl.core.errors import EnvironmentDefinitionError, is_user_code
from agentrl.core.event_loop import CALL_THREADS
from agentrl.core.ids import random_stream
from agentrl.core.parent_death import die_with_parent
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import Script
from agentrl.environment.environment import Environment
from agentrl.environment.registry import module_of, resolve
from agentrl.journal.entries import JournalEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.execution import (
    DEMONSTRATED_TURNS,
    MAX_TURNS,
    RANDOM_TEXTS,
    DemonstrationPolicy,
    ExecutedEpisode,
    Failure,
    execute_episode,
    execute_together,
    random_arguments,
    random_policy,
    spec_of,
    text_of_grammar,
)
from agentrl.testing.side_effects import written_files
from agentrl.testing.wrong_calls import shown_tools

_EPISODE_NUMBER = re.compile(r"e(\d+)")
"""The number of an episode in the id of a request; see `spec_of`."""
CALLED_TURNS = 2
"""Number of tool results after which the policy of external agents answers with text."""
IMPORT_S = 60.0
"""Time limit of the import: code that waits for something at its import would block the check."""
PLAYING_S = 600.0
"""Time limit of the episodes."""
_PLAYED, _RAISED = 83, 84
"""Exit codes of a fork that played, and of one that raised an exception; the user's code may use any other."""
_FORKED, _IMPORTED, _ENDED = 1, 2, 3
_FRAME = struct.Struct("<bi")
"""What a server reports: one of these, with the id of the fork, or its exit code, negative for a signal."""
THREAD_START_S = 0.02
"""Seconds after which a thread begins, while episodes are played at once."""
SWITCH_S = 1e-6
"""Seconds after which a thread lets another one run, while episodes are played at once."""
MAX_CONTENTS = 10_000
"""Number of parts of nested containers beyond which no further container is opened."""
_is_new_process = False
IMPORTS = ("numpy.random", "aiohttp.web")
"""Modules that an episode may import, which would block its event loop."""


class SilentProcessError(Exception):
    """A process did not answer in time, or was killed by others."""


class DeadProcessError(Exception):
    """The user's code ended the process while episodes played."""


class Outcome(msgspec.Struct):
    """The end of an episode, in a form that another process can send."""

    failure: Failure | None = None
    reward: float | None = None
    stop_reason: str = ""
    entries: list[JournalEntry] = []
    states: dict[str, Any] = {}

    @classmethod
    def of(cls, executed: ExecutedEpisode | Failure) -> Outcome:
        """Convert the outcome of an execution."""
        if isinstance(executed, Failure):
            return cls(failure=executed)
        header = executed.header
        return cls(None, header.reward, header.stop_reason or "", executed.entries, executed.states)


class Play(msgspec.Struct):
    """What a process plays: one episode alone, or several at once."""

    environment: str
    """Reference of the class; empty if no other process can import it."""
    policy: str
    """A key of `POLICIES`, or `demonstrated`."""
    tasks: list[tuple[int, Task]]
    """Number and task of each episode; the number decides about its seed."""
    seed: int = 0
    patience_s: float = 0.0
    sampling: dict[str, float] = {}
    answers: list[JournalEntry] = []
    """Answers of the outside world, for a single episode."""


class Played(msgspec.Struct):
    """What a process has played."""

    outcomes: list[Outcome]
    shared: list[str] = []
    """Names that episodes share, and that changed while they were played."""


def program_policy(
    environment: type[Environment],
    *,
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    marked: bool = True,
) -> Script:
    """Return a policy for external agents. It calls a few of the offered tools and then replies with a text; the next
    episode continues with the tools after these. If a request asks for a call or for JSON, it replies with that.

    Args:
        environment: class of the environment.
        schemas: parameters of tools by name, as JSON schemas; arguments of other tools are guesses.
        marked: whether texts and guessed arguments contain a unique mark. If not, texts are as in `random_policy`.
    """
    chat_format = PlainChatFormat()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random_stream("concurrency", request.seed)
        mark = f"#{draw.getrandbits(48):012x}"
        prompt = chat_format.decode(request.token_ids.tolist())
        tools = shown_tools(prompt)
        text = f"{draw.choice(['yes', '0', 'hello world'])} {mark}" if marked else draw.choice(RANDOM_TEXTS)
        results = prompt.count("<|start|>tool\n")
        if tools and results < CALLED_TURNS:
            number = int(_EPISODE_NUMBER.match(request.request_id)[1])  # type: ignore[index]
            name = sorted(tools)[(number * CALLED_TURNS + results) % len(tools)]
            schema = schemas.get(name)
            if schema is None:
                guesses = [draw.randint(1, 9), mark if marked else text]
                arguments: dict[str, Any] = {parameter: draw.choice(guesses) for parameter in tools[name]}
            else:
                arguments = random_arguments(schema, draw)
            call = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
            text = f"<tool_call>{call}</tool_call>"
        if request.sampling.grammar:
            text = text_of_grammar(request.sampling.grammar, draw)
        return [*text.encode(), STOP_TOKEN]

    return script


POLICIES: dict[str, Callable[[type[Environment]], Script]] = {
    "program": program_policy,
    "random": random_policy,
    "calling": partial(random_policy, calling=0.9),  # episodes with few turns overlap little
}


def importable_name(environment: type[Environment]) -> str:
    """Return the reference by which another process imports a class; empty if it cannot, or if it would run a script
    again."""
    if "<locals>" in environment.__qualname__ or environment.__module__ == "__main__":
        return ""
    try:
        return f"{module_of(environment)}:{environment.__qualname__}"
    except EnvironmentDefinitionError:  # of a notebook
        return ""


def refuse_in_new_process() -> None:
    """Refuse a check that begins when a module is imported: each would import the module in one more process.

    Raises:
        EnvironmentDefinitionError: this process plays for another check.
    """
    if _is_new_process:
        raise EnvironmentDefinitionError(
            'importing this module checks an environment; check it below `if __name__ == "__main__":`'
        )


async def play_here(environment: type[Environment], play: Play) -> Played:
    """Play in this process."""
    specs = [spec_of(environment, task, number, play.seed) for number, task in play.tasks]
    is_demonstrated = play.policy == "demonstrated"
    script = DemonstrationPolicy(environment, specs) if is_demonstrated else POLICIES[play.policy](environment)
    max_turns = DEMONSTRATED_TURNS if is_demonstrated else MAX_TURNS
    if len(specs) == 1:
        executed = await execute_episode(
            environment, specs[0], script, answers=play.answers, max_turns=max_turns, sampling=play.sampling
        )
        return Played([Outcome.of(executed)])
    before = _process_state(environment)
    with written_files() as written, _interleaved_threads():
        outcomes = await execute_together(
            environment, specs, script, patience_s=play.patience_s, max_turns=max_turns, sampling=play.sampling
        )
    after = _process_state(environment)
    shared = [name for name in after if before.get(name) != after[name]]
    shared += [path for path, count in written.items() if count > 1]
    return Played([Outcome.of(outcome) for outcome in outcomes], shared)


def play_in_new_process(play: Play, *, hash_seed: int = 0) -> Played | None:
    """Play in a new process; return None if it could not import the class, or raised an exception.

    Args:
        play: what to play.
        hash_seed: seed of the string hashes, so that sets have the same order in every process with this seed.

    Raises:
        SilentProcessError: the import or the episodes took too long, or the process was killed: the machine lacks
            memory, or everything is to end.
        DeadProcessError: the user's code ended the process while episodes played.
    """
    if not hash_seed:
        return _shared_server(os.getpid()).play(play)
    server = _PlayerServer(hash_seed)
    try:
        return server.play(play)
    finally:
        server.close()


@functools.cache
def _shared_server(process_id: int) -> _PlayerServer:
    """Return the server of a process; a fork must not share that of its parent."""
    server = _PlayerServer(hash_seed=0)
    atexit.register(server.close)
    return server


class _PlayerServer:
    """A process that forks for each request. It starts at the first one, and ends with this process."""

    def __init__(self, hash_seed: int) -> None:
        self._hash_seed = hash_seed
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fork = 0
        """Id, and process group, of the fork that plays; 0: none does."""

    def play(self, play: Play) -> Played | None:
        with (
            self._lock,
            tempfile.TemporaryDirectory(prefix="agentrl-check-") as scratch,
            contextlib.suppress(OSError, msgspec.MsgspecError),
        ):
            request, answer = Path(scratch, "request"), Path(scratch, "answer")
            surroundings = _Surroundings(os.getcwd(), [*map(os.path.abspath, sys.path)], self._environ())
            request.write_bytes(msgspec.msgpack.encode((surroundings, play)))
            try:
                has_imported, code = self._run(f"{request}\n{answer}\n".encode())
            except BaseException:  # Ctrl-C too: no one reads what it still plays
                self.close()
                raise
            if has_imported and code not in (_PLAYED, _RAISED):
                if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    raise SilentProcessError(f"a second process was killed ({signal.Signals(-code).name})")
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                raise DeadProcessError(f"their process ended ({how})")
            return None if code != _PLAYED else msgspec.msgpack.decode(answer.read_bytes(), type=Played)
        return None

    def close(self) -> None:
        """End the process, with what it plays."""
        if self._process is not None and self._owner == os.getpid():  # a fork of the owner ends too
            for group in (self._process.pid, *([self._fork] if self._fork else [])):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._fork = 0
            self._process.communicate()
            self._process = None

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONHASHSEED": str(self._hash_seed)}

    def _run(self, request: bytes) -> tuple[bool, int]:
        """Send a request, and wait for its end; returns whether the class was imported, and the fork's exit code.

        Raises:
            SilentProcessError: the server died, or the import or the episodes took too long.
        """
        if self._process is None:
            environ = {**self._environ(), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env=environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # numpy's would not be forked
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,  # a reader with a buffer would take frames that `poll` then does not see
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        has_imported = False
        while True:
            if has_imported:
                kind, value = self._report(PLAYING_S, f"episodes in a second process took more than {PLAYING_S:g} s")
            else:
                kind, value = self._report(IMPORT_S, f"a second process did not import it within {IMPORT_S:g} s")
            has_imported |= kind == _IMPORTED
            self._fork = value if kind == _FORKED else 0 if kind == _ENDED else self._fork
            if kind == _ENDED:
                return has_imported, value

    def _report(self, seconds: float, too_long: str) -> tuple[int, int]:
        assert self._process is not None
        assert self._process.stdout is not None
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise SilentProcessError(too_long)
        frame = self._process.stdout.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            raise SilentProcessError("the process that starts second processes ended")
        kind, value = _FRAME.unpack(frame)
        return kind, value


class _Surroundings(msgspec.Struct, array_like=True):
    """What a fork takes over from the process that asks for it."""

    directory: str
    import_path: list[str]
    environ: dict[str, str]


@contextlib.contextmanager
def _interleaved_threads() -> Iterator[None]:
    """Delay each thread's start and switch threads often, so that episodes overlap."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    CALL_THREADS.delay_s = THREAD_START_S
    try:
        yield
    finally:
        CALL_THREADS.delay_s = 0.0
        sys.setswitchinterval(interval)


def _process_state(environment: type[Environment]) -> dict[str, object]:
    """Return what an environment can share between episodes: names of its modules and classes, and the process's own.

    Values are contents, as of `_contents`."""
    state: dict[str, object] = {"the working directory": os.getcwd()}
    state |= {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    for base in environment.__mro__:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)
        if file is None or not is_user_code(file):
            continue
        for owner, members in ((Path(file).name, vars(module)), (base.__qualname__, vars(base))):
            for name, value in list(members.items()):
                if not name.startswith(("__", "_abc_")) and name != "own_random" and not inspect.ismodule(value):
                    state[f"{owner}.{name}"] = _contents(value)
    return state


def _contents(value: Any) -> list[object]:
    """Return the texts, numbers and lengths in nested containers, and identities of other objects, up to a limit."""
    contents, parts = list[object](), [value]
    for part in parts:  # which grows
        if isinstance(part, str | int | float):
            contents.append(part)
        else:
            contents.append((id(part), len(part) if isinstance(part, list | dict | set) else 0))
        if len(parts) < MAX_CONTENTS and isinstance(part, dict):
            parts += dict.values(part)
        elif len(parts) < MAX_CONTENTS and type(part) in (list, tuple, set):  # others may run the user's code
            parts += part
    return contents


# --- in the other process ---------------------------------------------------------------------------------------------


def _serve() -> None:
    """Fork for each request, until the other process has ended."""
    requests, reports, server = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # the user's code must not read requests, or write answers
        os.dup2(null, stream)
    for module in IMPORTS:
        importlib.import_module(module)
    while (request := requests.readline()) and (answer := requests.readline()):
        child = os.fork()
        if child == 0:
            requests.close()
            os.setpgid(0, 0)
            die_with_parent(server)
            os.write(reports, _FRAME.pack(_FORKED, os.getpid()))
            _play_and_exit(Path(os.fsdecode(request[:-1])), Path(os.fsdecode(answer[:-1])), reports)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what it started
        os.write(reports, _FRAME.pack(_ENDED, os.waitstatus_to_exitcode(status)))


def _play_and_exit(request: Path, answer: Path, reports: int) -> None:
    """Play in a fork, and write what was played."""
    global _is_new_process
    _is_new_process, status = True, _RAISED
    with contextlib.suppress(Exception):  # the check plays in its own process then, where the user sees the exception
        surroundings, play = msgspec.msgpack.decode(request.read_bytes(), type=tuple[_Surroundings, Play])
        os.chdir(surroundings.directory)
        sys.path[:] = surroundings.import_path
        importlib.invalidate_caches()
        os.environ.clear()
        os.environ.update(surroundings.environ)
        numpy_random: Any = sys.modules["numpy.random"]
        numpy_random.seed()  # Python's own generator does this itself after a fork
        environment = resolve(play.environment)
        os.write(reports, _FRAME.pack(_IMPORTED, 0))
        os.close(reports)
        answer.write_bytes(msgspec.msgpack.encode(event_loop.run(play_here(environment, play))))
        status = _PLAYED
    os._exit(status)


if __name__ == "__main__":
    importlib.import_module("agentrl.testing.new_process")._serve()  # the module that others import, not a second one
