"""Environments whose agent is an existing program: a loop over a model client, a graph, a command line.

`HarnessEnvironment` starts the program, gives it the address and the keys of a model endpoint, and rewards the outcome.
Each request of the program is a turn of a seat. The program has the rights of this user (docs/reference/security.md),
unless it is given a sandbox.

A program that is restarted, because it or this process was killed, begins in its initial state: an empty working
directory. It gets the recorded replies as long as its requests are the same as before, and new ones after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import inspect
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from agentrl.core.clock import SystemClock
from agentrl.core.errors import (
    AgentRLError,
    EffectError,
    EnvironmentDefinitionError,
    EpisodeError,
    RewardError,
    is_user_code,
)
from agentrl.core.files import near_file_hint
from agentrl.core.parent_death import die_with_parent_hook
from agentrl.core.records import Task, Turn
from agentrl.core.text import shorten_lines
from agentrl.environment.context import Aliases, Endpoint, EpisodeContext, LimitReachedError
from agentrl.environment.environment import Environment, Split, TaskSource
from agentrl.environment.rewards import awaited_reward
from agentrl.gateway.calls import RequestRefusedError
from agentrl.sandbox.driver import GATEWAY_PORT
from agentrl.sandbox.files import FileRecord
from agentrl.sandbox.sandbox import Sandbox, as_bytes, open_lease, read_sources
from agentrl.sandbox.state import hashed_files

_OUTCOME = {"output", "error"}
"""Keys of the result of a command. An extended `play` may return other data."""
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".pl", ".rb")
"""Suffixes of scripts, which an interpreter gets as its first argument."""
_INTERPRETER = re.compile(r"(?:i?python|pypy|node|nodejs|deno|bun|(?:ba|z|da|k|fi)?sh|perl|ruby|tsx|ts-node)[\d.]*")
LONGEST_ARGUMENT = 30_000
"""Maximum length of a command's argument, in characters; Linux allows 128 KiB."""
PREFIX = "agentrl-harness-"
"""Prefix of the names of working directories."""
UNLOCKED_S = 60.0
"""Seconds after which a directory that is not locked belongs to a process that died."""
OUTPUT_BYTES = 65_536
"""Bytes kept from the end of a command's output."""
DETACHED_S = 1.0
"""Seconds to wait, after a command has ended, for processes that hold its output open."""
PIPE_BYTES = 1 << 20
"""Maximum content of a pipe, in bytes; Linux lets a program that is not root enlarge one so far."""
VOLATILE = (
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    r"/tmp/[\w./-]+",
    r"/dev/shm/[\w./-]+",
    r"agentrl-harness-\w+",  # the working directory of a command, in any spelling of its path
    r"Chunk ID: [0-9a-f]{6}\nWall time: [0-9.]+ seconds",  # Codex writes this before the output of a command
    r"x-anthropic-billing-header: [^\n]*",  # Claude Code writes this
)
"""Patterns of dates, UUIDs, temporary paths, and text that single clients add."""
HarnessReward = float | Mapping[str, float] | Mapping[str, Mapping[str, float]]
_hold: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("hold", default=None)
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
"""A line of a Python traceback."""
_ADDRESS_ERRORS = frozenset(
    {
        *("APIError", "ClientError", "ConnectionError", "HTTPError", "HTTPException"),
        *("RequestException", "TimeoutError", "URLError", "gaierror"),
    }
)
"""Classes of the exceptions that Python and its HTTP clients raise if a server is missing or refuses a request."""
_FIELD = re.compile(r"\{(task|endpoint)\.(\w+)\}")


class _Outcome(NamedTuple):
    """The end of a program."""

    result: Any
    error: str | None = None
    output: str = ""
    """What it wrote, for messages."""
    time_limit: LimitReachedError | None = None
    """The time limit, if that ended it."""
    place: str = ""
    """The line of the user's code that failed, as `FILE:LINE in FUNCTION`; empty if unknown."""
    kinds: frozenset[str] | None = None
    """Names of the classes of the exception that `play` raised; None if it raised none, or it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessEpisode:
    """The outcome of a program, passed to `reward`."""

    turns: Mapping[str, Sequence[Turn]]
    """Turns of each seat, in order."""
    result: Any
    """Return value of `play`; for a command, the end of its output. None if the time limit ended the program."""
    error: str | None
    """Why the program failed; None if it ended by itself (a command: with exit status 0)."""
    directory: Path | None
    """Working directory of a command; it is removed after `reward`. Files in a sandbox are lost with a program that the
    time limit ended."""
    truncated: bool
    """Whether a limit of turns, context or time refused a request, the time limit ended the program, or a limit on
    tokens cut the last reply of a seat (its `finish_reason` was `length`)."""


class HarnessEnvironment(Environment):
    """An external agent, trained unchanged: a command line, or a coroutine (override `play`).

    Example:
        class Coder(agentrl.HarnessEnvironment):
            seats = ("main",)
            command = ["mini", "--task", "{task.question}", "--model", "openai/main"]
            task_file = "tasks.jsonl"

            def reward(self, task, episode):
                return float((episode.directory / "answer.txt").exists())
    """

    # --- override these ---------------------------------------------------------------------------------------------

    command: ClassVar[Sequence[str]] = ()
    """Program and arguments. `{task.NAME}` is an entry of the task's data, or its `id`; `{endpoint.url}` and
    `{endpoint.key}` are the model endpoint's, which the environment variables of the usual clients hold too."""
    task_file: ClassVar[str] = ""
    """Path of a JSON Lines file, relative to the module, with one task per line: an object with its data, optionally an
    `id` and a `split` (`train` or `held_out`; default `train`)."""
    aliases: ClassVar[Aliases] = {}
    """Model names of the program for the seats, by name, `{"gpt-4o-mini": "main"}`, or by seat,
    `{"main": ["gpt-4o", "gpt-4o-mini"]}`. A seat's own name always works, also after a provider, as in `openai/main`.
    With a single seat any name is that seat."""
    volatile: ClassVar[Sequence[str]] = VOLATILE
    """Regular expressions of text that differs between requests by nature; it is ignored when requests are compared
    with earlier ones."""
    ignored_fields: ClassVar[Sequence[str]] = ()
    """Request fields without effect: refused ones (`logit_bias`) are ignored, and sampling parameters (`temperature`)
    keep the run's values."""
    replay_stable: ClassVar[bool] = True
    """Whether the program may be run again from its beginning with the recorded replies. If not, an interrupted episode
    restarts with new replies."""
    failed_reward: ClassVar[float | None] = None
    """Reward of an episode whose program fails after it got a reply; `reward` is then not called, unless a limit was
    reached. None: the failure is an error of the environment and is retried, as is every failure before the first
    reply."""

    sandbox: ClassVar[Sandbox | None] = None
    """Sandbox in which `command` runs, in /box, with `network="gateway"`: it then reaches nothing but the endpoint. Its
    `seconds` include the waits for replies. None: the command has the rights of this user."""

    def files(self, task: Task) -> Mapping[str, str | bytes | Path]:
        """Return what lies in the sandbox at the start; see `ToolEnvironment.files`."""
        return {}

    async def play(self, task: Task, endpoint: Endpoint) -> Any:
        """Run the agent; returns JSON data. By default it runs `command`."""
        return await self._run_command(task, endpoint)

    @abstractmethod
    def reward(self, task: Task, episode: HarnessEpisode) -> HarnessReward | Awaitable[HarnessReward]:
        """Return a finite reward for all seats that acted, or rewards keyed by seat, each a number or numbers by reward
        name. With a single seat, numbers by reward name suffice. It may be `async`."""

    # --- machinery --------------------------------------------------------------------------------------------------

    _directory: Path | None = None
    _lock: int
    """Descriptor that holds the lock of the directory: the kernel drops it when this process dies."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return the tasks of `task_file`.

        Raises:
            EnvironmentDefinitionError: the file does not exist, or a line is not a task.
        """
        if not cls.task_file:
            return super().tasks(split, seed=seed)
        path = Path(inspect.getfile(cls)).parent / cls.task_file
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise EnvironmentDefinitionError(f"{cls.__qualname__}.task_file: {path}: {reason}") from error
        tasks = [_task(line, n, path, cls.command) for n, line in enumerate(lines, 1) if line.strip()]
        return [task for task, its_split in tasks if its_split == split]

    async def run(self, ctx: EpisodeContext) -> None:
        """Start the program, answer its requests, and reward it when it has ended."""
        try:
            async with ctx.endpoint(
                aliases=self.aliases,
                volatile=self.volatile,
                ignored_fields=self.ignored_fields,
                recall=self.replay_stable,
            ) as endpoint:
                result, error, output, time_limit, place, kinds = await self._outcome(ctx, endpoint)
                if hold := _hold.get():
                    await hold()
                limit = time_limit or endpoint.limit_reached()
                refusal = endpoint.refusal
                is_command = type(self).play is HarnessEnvironment.play
                last_line = _last_line(output) if is_command and error and refusal is None else ""
                message = f"{error} ({last_line})" if last_line else error
                if limit is None:  # else it had to fail
                    endpoint.program_ended(message, place)
            if limit is not None:
                ctx.truncate(limit)
            turns = {seat: ctx.agent(seat).turns for seat in self.seats}
            if limit is None and (error is not None or refusal) and not any(turns.values()):
                # A wrong address, model name or request field, say: no policy's doing.
                how = "ended" if error is None else "failed"
                address = "OPENAI_BASE_URL" if is_command else "endpoint.url"
                is_elsewhere = refusal is None and (kinds is None or not kinds.isdisjoint(_ADDRESS_ERRORS))
                cure = f" Does it send its requests to {address}?" if is_elsewhere else ""
                raise _failure(
                    f"the program {how} before it got a reply", message, place, refusal, cure, output
                ) from refusal
            is_setting = refusal is not None and refusal.kind == "setting"
            if limit is None and error is not None and self.failed_reward is None:
                cure = f" If the policy can cause this, write `failed_reward = 0.0` in class {type(self).__name__}."
                raise _failure(
                    "the program failed", message, place, refusal, "" if is_setting else cure, output
                ) from refusal
            if limit is None and error is not None and is_setting:
                # Most likely the program's mistake, but a policy with a shell can send such a request too.
                warnings.warn(
                    f"{type(self).__name__}: an episode got failed_reward after the gateway refused a request: "
                    f"{refusal}",
                    stacklevel=1,
                )
            value: Any = self.failed_reward
            if error is None or limit is not None or value is None:
                value = self.reward(
                    ctx.task,
                    HarnessEpisode(
                        turns=turns,
                        result=result,
                        error=error,
                        directory=self._directory,
                        truncated=limit is not None or any(seat and seat[-1].is_cut for seat in turns.values()),
                    ),
                )
            rewards = self._rewards_by_seat(await awaited_reward(type(self), value))
            for seat, num_turns in turns.items():
                if num_turns and seat in rewards:
                    ctx.agent(seat).reward(rewards[seat])
        finally:
            if self._directory is not None:
                await asyncio.to_thread(_remove_tree, self._directory)
                os.close(self._lock)

    async def _outcome(self, ctx: EpisodeContext, endpoint: Endpoint) -> _Outcome:
        """Run the program. Of limits, that of time ends it; the others refuse its requests."""
        raised: list[tuple[str, frozenset[str]]] = []
        try:
            result = await endpoint.run_program("harness", lambda: self._play(ctx.task, endpoint, raised))
        except EffectError as failure:
            output, kinds = raised[-1] if raised else ("", None)
            return _Outcome(None, failure.error, output, place=failure.location, kinds=kinds)
        except LimitReachedError as reached:
            if self._directory is not None:
                await asyncio.to_thread(_remove_specials, self._directory)
            return _Outcome(None, str(reached), "", reached)
        if self._directory is not None and isinstance(result, dict) and result.keys() == _OUTCOME:
            output, error = result["output"], result["error"]
            return _Outcome(output, error, output, place="" if error is None else _place_in_output(output))
        return _Outcome(result)

    async def _play(self, task: Task, endpoint: Endpoint, raised: list[tuple[str, frozenset[str]]]) -> Any:
        """Await `play`; add the traceback and the classes of its error to `raised`, since an effect keeps only the
        message."""
        try:
            return await self.play(task, endpoint)
        except AgentRLError:
            raise
        except Exception as error:
            raised.append((traceback.format_exc(), frozenset(kind.__name__ for kind in type(error).__mro__)))
            raise

    def _rewards_by_seat(self, value: float | Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the value of `reward` by seat.

        Raises:
            RewardError: a key is not a seat.
        """
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.seats, value)
        unknown = [key for key in value if key not in self.seats]
        if unknown and len(self.seats) == 1 and len(unknown) == len(value):
            return {self.seats[0]: value}
        if unknown:
            seats = ", ".join(map(repr, self.seats))
            raise RewardError(
                f"{type(self).__name__}.reward returned a reward for {unknown[0]!r}, which is no seat ({seats}); "
                "return {seat: reward}, or {seat: {name: reward}} for rewards by name"
            )
        return value

    async def _run_command(self, task: Task, endpoint: Endpoint) -> dict[str, Any]:
        """Run `command` in an empty directory, and end everything it started.

        Raises:
            EpisodeError: the program was killed: the episode restarts.
        """
        if not self.command:
            raise EnvironmentDefinitionError(f"{type(self).__qualname__} must define `command`, or override `play`")
        url = endpoint.url
        if self.sandbox is not None and self.sandbox.network == "gateway":
            url = f"http://127.0.0.1:{GATEWAY_PORT}/v1"
        arguments = [_fill_in(argument, task, url, endpoint.key) for argument in self.command]
        if any("\0" in argument or len(argument) > LONGEST_ARGUMENT for argument in arguments):
            raise EpisodeError(
                f"task {task.id!r} gives the command an argument that contains a NUL character, or is longer than "
                f"{LONGEST_ARGUMENT} characters",
                reason="environment_error",
            )
        await asyncio.to_thread(_sweep, tempfile.gettempdir())
        self._directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self.sandbox is not None:
            return await self._run_in_sandbox(self.sandbox, task, endpoint, arguments, url)
        with contextlib.closing(_Output()) as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(argument.encode("utf-8", "replace") for argument in arguments),
                    cwd=self._directory,
                    env={**os.environ, **endpoint.variables()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output.program_end,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent_hook(),
                )
            except (OSError, ValueError) as error:
                raise EnvironmentDefinitionError(
                    f"{type(self).__qualname__}.command: {arguments[0]!r}: {error}"
                ) from error
            finally:
                os.close(output.program_end)
            try:
                status = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                await output.wait_until_closed()
        if status < 0:
            signal_names = {signal_number.value: signal_number.name for signal_number in signal.Signals}
            raise EpisodeError(
                f"the program was killed by {signal_names.get(-status, f'signal {-status}')}; it is restarted",
                reason="harness_killed",
                begin_again=True,
            )
        await asyncio.to_thread(_remove_specials, self._directory)
        output_text = output.tail.decode("utf-8", "replace")
        failure = None if status == 0 else f"exit status {status}"
        return {"output": output_text, "error": failure}

    async def _run_in_sandbox(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, arguments: Sequence[str], url: str
    ) -> dict[str, Any]:
        """Run a command in a sandbox, and copy the plain files it leaves in /box to the working directory."""
        assert self._directory is not None
        lease = await open_lease(sandbox)
        try:
            sources = await asyncio.to_thread(read_sources, self.files(task))
            await lease.write({path: as_bytes(content) for path, content in sources.items()})
            ran = await lease.run(
                arguments,
                environment=endpoint.variables(url),
                listener=endpoint.serve if sandbox.network == "gateway" else None,
            )
            try:
                records, _, contents = await lease.changes(everything=True)
                await asyncio.to_thread(_copy_out, records, contents, self._directory)
            except OSError as error:
                raise EpisodeError(
                    f"the files that the program left cannot be copied: {error}", reason="too_large"
                ) from error
        finally:
            await lease.close()
        output_text = (ran.stdout + ran.stderr)[-OUTPUT_BYTES:].decode("utf-8", "replace")
        failure = None
        if ran.killed:
            failure = f"ended by the sandbox's limit on {ran.killed}"
        elif ran.status:
            failure = f"exit status {ran.status}"
        return {"output": output_text, "error": failure}


@contextlib.contextmanager
def held_programs(hold: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Await `hold` between the end of each program and its reward, in episodes whose tasks the context starts."""
    token = _hold.set(hold)
    try:
        yield
    finally:
        _hold.reset(token)


def missing_program(environment: type[HarnessEnvironment]) -> str:
    """Return why `command` cannot start on this machine, with the remedy; "" if nothing is known to be missing."""
    if not environment.command or environment.sandbox is not None or environment.play is not HarnessEnvironment.play:
        return ""
    program, *arguments = environment.command
    where = f"{environment.__qualname__}.command"
    if "/" not in program and "{" not in program and shutil.which(program) is None:
        return f"{where}: there is no program {program!r} on PATH; install it, or give its absolute path"
    is_interpreter = _INTERPRETER.fullmatch(Path(program).name) is not None
    scripts = [program] * ("/" in program)
    scripts += [script for script in arguments[:1] if is_interpreter and script.endswith(SCRIPTS)]
    for script in scripts:
        if "{" in script:
            continue
        path = _module_directory(environment) / script
        if not path.is_file():
            return f"{where}: there is no file {path}{near_file_hint(path)}"
        if not os.path.isabs(script):
            return (
                f"{where}: {script!r} is relative, and the program starts in an empty directory; write "
                f"str(Path(__file__).with_name({path.name!r}))"
            )
    return ""


def _module_directory(environment: type) -> Path:
    file = getattr(sys.modules.get(environment.__module__), "__file__", None)
    return Path.cwd() if file is None else Path(file).absolute().parent


def _last_line(output: str) -> str:
    """Return the last line of a program's output, which names its error if it is a traceback."""
    return _TERMINAL_CODE.sub("", output).strip().rpartition("\n")[2].strip()[:200]


def _place_in_output(output: str) -> str:
    """Return the innermost line of the user's code in the last traceback of a Python program's output; "" if there is
    none."""
    _, _, last = output.rpartition("Traceback (most recent call last)")
    frames = [match for match in _FRAME.finditer(last) if is_user_code(match["file"])]
    return "{file}:{line} in {function}".format_map(frames[-1].groupdict())[:300] if frames else ""


def _failure(
    what: str, error: str | None, place: str, refusal: RequestRefusedError | None, advice: str, output: str
) -> EpisodeError:
    """Make the error of a program that failed, with the end of its output below. A refused request comes first, since
    the error of the program follows from it."""
    reason = "" if error is None else ": " + error.partition("\n")[0].rstrip(".")
    text = f"{what}{reason}{f' at {place}' if place else ''}.{advice}"
    if refusal is not None:
        text = text.replace(str(refusal), "…")
        text = f"the gateway refused a request: {str(refusal).rstrip('.')}. Then {text}"
    text = _TERMINAL_CODE.sub("", f"{text}\n{output}").strip()
    text = shorten_lines(text, 3500)  # with its place it fits the journal
    return EpisodeError(text, reason="environment_error", advice=advice)


def _copy_out(records: Sequence[FileRecord], all_contents: bytes, directory: Path) -> None:
    """Write the plain files and directories of /box, without links, to an empty directory."""
    contents: dict[str, bytes] = {}
    for record, _, content in hashed_files(records, all_contents):
        top, _, path = record.path.partition("/")
        contents[record.path] = content if record.kind == "file" else contents.get(record.target, b"")
        if top != "box" or not path:
            continue
        if record.kind == "directory":
            (directory / path).mkdir(parents=True, exist_ok=True)
        elif record.kind in ("file", "same"):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(contents[record.path])


def _task(line: str, number: int, path: Path, command: Sequence[str]) -> tuple[Task, str]:
    """Parse a line of the task file into a task, which must have all values of the command, and its split."""
    try:
        data = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
        if not isinstance(data, dict):
            raise TypeError(f"it is of type {type(data).__name__}")
        split = data.pop("split", "train")
        if split not in ("train", "held_out"):
            raise ValueError(f"split is {str(split)[:40]!r}; it must be 'train' or 'held_out'")
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentDefinitionError(f"{path}, line {number}: a task is a JSON object ({error})") from error
    task = Task(id=str(data.pop("id", f"{path.stem}-{number}")), data=data)
    try:
        for argument in command:
            _fill_in(argument, task, "", "")
    except EnvironmentDefinitionError as error:
        raise EnvironmentDefinitionError(f"{path}, line {number}: {error}") from None
    return task, split


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is given twice")
    return result


def _fill_in(argument: str, task: Task, url: str, key: str) -> str:
    """Fill the fields of a command's argument."""

    def value(placeholder: re.Match[str]) -> str:
        source, name = placeholder.groups()
        values = {"id": task.id, **task.data} if source == "task" else {"url": url, "key": key}
        if name not in values:
            raise EnvironmentDefinitionError(
                f"command: {placeholder[0]} is not a known value; there are: {', '.join(values)}"
            )
        return str(values[name])

    return _FIELD.sub(value, argument)


class _Output:
    """The last `OUTPUT_BYTES` that a program wrote. It does not use asyncio's pipe, which waits until every detached
    process has closed it."""

    def __init__(self) -> None:
        self._end, self.program_end = os.pipe()
        self.tail = bytearray()
        self._is_at_end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._end, False)
        self._loop.add_reader(self._end, self._read)

    async def wait_until_closed(self) -> None:
        """Wait until all processes have closed the pipe, at most `DETACHED_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DETACHED_S):
                await self._is_at_end.wait()

    def close(self) -> None:
        """Drain the pipe, and close it."""
        self._loop.remove_reader(self._end)
        # In a busy process the time-out above can come before the first read: the output is there all the same.
        for _ in range(PIPE_BYTES // OUTPUT_BYTES):
            if not self._read():
                break
        os.close(self._end)

    def _read(self) -> int:
        """Read the available bytes; returns their number."""
        try:
            part = os.read(self._end, OUTPUT_BYTES)
        except BlockingIOError:
            return 0
        self.tail += part
        del self.tail[:-OUTPUT_BYTES]
        if not part:
            self._loop.remove_reader(self._end)
            self._is_at_end.set()
        return len(part)


def _remove_specials(directory: Path) -> None:
    """Remove pipes, sockets, devices and links to them: a `reward` that reads one would block forever."""
    for entry in _entries(directory):
        with contextlib.suppress(OSError):
            mode = os.stat(entry).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                os.unlink(entry)


@functools.cache
def _sweep(parent: str) -> None:
    """Remove working directories that processes left behind when they died; once per process."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            status = os.stat(entry.path, follow_symlinks=False)
            is_our_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if (
                not entry.name.startswith(PREFIX)
                or not is_our_directory
                or SystemClock().wall() - status.st_ctime < UNLOCKED_S
            ):
                continue
            directory = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(Path(entry.path))
            finally:
                os.close(directory)


def _remove_tree(directory: Path) -> None:
    """Remove a directory that a program left, including read-only and deeply nested directories."""
    with contextlib.suppress(OSError):
        directory.chmod(0o700)
    for entry in _entries(directory):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry, 0o700)
    with contextlib.suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        subprocess.run(["rm", "-rf", "--", directory], check=False, stderr=subprocess.DEVNULL)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a directory, each directory before its content. `os.walk` is not used: it recurses in
    Python 3.11."""
    directories: list[str] = [str(directory)]
    while directories:
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
