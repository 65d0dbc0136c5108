"""The sandbox of an episode: its commands are calls of the journal, and its files come back with them.

A command's entry holds its arguments, its result and the files it changed, so they reach the disk together. A crash
before that means that the command runs again on the files before it. Re-execution recalls entries and runs nothing; the
first new command finds the files as the last recorded one left them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.errors import EffectError, EpisodeError
from agentrl.environment.context import EpisodeSandbox, ResourceLevel
from agentrl.journal.entries import ResourceCallEntry, UnansweredEntry, request_hash
from agentrl.rollout.calls.journal_data import encode_arguments, to_journal_data
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.effects import error_text, resource_lost
from agentrl.sandbox.driver import NAME_BYTES, CommandResult, work_on
from agentrl.sandbox.files import LinkTarget
from agentrl.sandbox.sandbox import as_bytes, open_lease
from agentrl.sandbox.state import FileState, HashedFile, hashed_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.sandbox.driver import SandboxLease
    from agentrl.sandbox.sandbox import Sandbox

T = TypeVar("T")

NAME = "sandbox"
"""Prefix of the names of sandboxes in the journal."""
MAX_CHANGED_BYTES = 48 << 20
"""Maximum size of what one command changes: it must fit a journal entry."""
_closing: set[asyncio.Task[None]] = set()


class JournaledSandbox(EpisodeSandbox):
    """Implements `EpisodeSandbox`. Its lease is made by the first command that is not recalled."""

    __slots__ = ("_copies", "_episode", "_is_behind", "_is_lost", "_lease", "_limits", "_lock", "_state", "name")

    def __init__(self, episode: LiveEpisode, limits: Sandbox, name: str, state: FileState | None = None) -> None:
        self.name = name
        self._episode = episode
        self._limits = limits
        self._state = FileState() if state is None else state
        self._lease: SandboxLease | None = None
        self._lock = asyncio.Lock()
        """Held by the command that runs: what it changed is read before the next begins."""
        self._is_behind = False
        self._is_lost = False
        """Whether a recorded call was cancelled, and its changes are in no later entry."""
        self._copies = 0

    @property
    def level(self) -> ResourceLevel:
        """Level of the sandbox as a resource."""
        return "snapshot" if self._limits.network == "none" else "pinned"

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> CommandResult:
        contents, source = {path: as_bytes(body) for path, body in (files or {}).items()}, as_bytes(stdin)

        async def perform(lease: SandboxLease) -> dict[str, Any]:
            ran = await lease.run(argv, files=contents, stdin=source, environment=environment, seconds=seconds)
            result = {name: getattr(ran, name) for name in CommandResult.__dataclass_fields__}
            return {**result, "stdout": _readable(ran.stdout), "stderr": _readable(ran.stderr)}

        arguments = [list(argv), dict(environment or {}), seconds]
        result = await self._call("run", arguments, {**contents, "stdin": source}, perform)
        streams = {name: as_bytes(result[name]) for name in ("stdout", "stderr")}
        return CommandResult(**{**result, **streams})

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        contents = {path: as_bytes(body) for path, body in files.items()}
        await self._call("write", [], contents, lambda lease: lease.write(contents))

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        return await self._call("read", [path, limit], {}, lambda lease: lease.read(path, limit=limit))

    @asynccontextmanager
    async def copy(self, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> AsyncIterator[EpisodeSandbox]:
        self._copies += 1
        async with self._lock:
            if self._lease is None:
                state = self._state.part(only, without)
            else:
                self._is_behind = True
                with self._lease_errors():
                    files, _ = await changed_files(self._lease, everything=True)
                state = await asyncio.to_thread(lambda: FileState.of(files).part(only, without))
        copy = JournaledSandbox(self._episode, self._limits, f"{self.name}.{self._copies}", state)
        try:
            yield copy
        finally:
            copy.close()

    async def _call(
        self,
        method: str,
        arguments: list[Any],
        contents: Mapping[str, bytes],
        perform: Callable[[SandboxLease], Awaitable[T]],
    ) -> T:
        """Perform a call, or recall its result and the files it changed."""
        clock, where = self._episode.services.clock, f"{self.name}.{method}"
        digests = self._state.supply(contents.values(), keep=self._lease is None)
        paths = [f"{path} ->" if isinstance(body, LinkTarget) else path for path, body in contents.items()]
        arguments = [*arguments, dict(zip(paths, digests, strict=True))]
        level, is_performed = self.level, False

        async def act(call: JournaledCall) -> ResourceCallEntry:
            nonlocal is_performed
            if self._is_lost:
                raise resource_lost(self._episode, self.name)
            is_performed, start_s = True, clock.monotonic()
            async with self._lock:
                lease = await self._open_lease()
                value, problem = None, None
                try:
                    value = await perform(lease)
                except OSError as error:  # of a file in the sandbox
                    problem = error_text(error)
                state = await self._changes(lease)
            seconds = clock.monotonic() - start_s
            return ResourceCallEntry(self.name, level, method, value, seconds, arguments, problem, state)

        def lose(end: UnansweredEntry) -> None:
            self._is_lost = True

        entry = await self._episode.journal.call(
            request_hash(*map(encode_arguments, (self.name, method, arguments))),
            lambda: f"{where}({shortened_repr(to_journal_data(arguments))})",
            ResourceCallEntry,
            act,
            memoised=self.name,
            recalled=lose,
        )
        if not is_performed and level == "pinned":
            self._episode.journal.end_with(resource_lost(self._episode, self.name))
        if not is_performed:
            self._is_lost = False  # a call after a cancelled one holds all that both changed
            if entry.state is not None:
                self._state.apply(entry.state)
        if entry.error is not None:
            raise EffectError(f"{where} failed", error=entry.error)
        result: T = entry.value
        return result

    async def _open_lease(self) -> SandboxLease:
        if self._lease is None:
            lease = await open_lease(self._limits)
            try:
                await lease.restore(*await asyncio.to_thread(self._state.to_restore, self._limits.disk_mb))
            except OSError as error:
                _close_later(lease)
                raise EpisodeError(
                    f"{self.name}: the recorded files cannot be restored: {error}", reason="environment_error"
                ) from error
            except BaseException:
                _close_later(lease)
                raise
            self._lease = lease
            self._state.forget_contents()
        return self._lease

    async def _changes(self, lease: SandboxLease) -> dict[str, Any] | None:
        """Return what changed since the last entry; nothing may be awaited before that is recorded.

        All that takes longer with more files is done in a thread, since other episodes wait for the event loop.

        If an earlier call was cancelled here, or the files were copied, the lease counts changes as returned that no
        entry holds.
        """
        is_full, self._is_behind = self._is_behind, True
        with self._lease_errors():
            files, missing_paths = await changed_files(lease, everything=is_full)
        size = NAME_BYTES * (len(self._state) + len(files))
        difference = await work_on(size, self._state.difference, files, None if is_full else missing_paths)
        self._is_behind = False
        change = self._state.take(difference)
        if difference.size > MAX_CHANGED_BYTES:
            raise EpisodeError(
                f"{self.name}: a command changed files and names of {difference.size >> 20} MiB; at most "
                f"{MAX_CHANGED_BYTES >> 20} MiB fit a journal entry",
                reason="too_large",
            )
        return change

    @contextmanager
    def _lease_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EpisodeError(
                f"{self.name}: the files that a command left cannot be kept: {error}", reason="too_large"
            ) from error

    def close(self) -> None:
        """Remove the files, at the end of the attempt."""
        lease, self._lease = self._lease, None
        if lease is not None:
            _close_later(lease)


def _readable(output: bytes) -> str | bytes:
    """Return output as text where it is text, for people who read the journal."""
    try:
        return output.decode()
    except UnicodeDecodeError:
        return output


async def changed_files(lease: SandboxLease, *, everything: bool) -> tuple[list[HashedFile], list[str]]:
    """Return the files that changed, and the paths that are gone; see `SandboxLease.changes`."""
    records, missing_paths, contents = await lease.changes(everything=everything)
    size = NAME_BYTES * len(records) + len(contents)
    return await work_on(size, hashed_files, records, contents), missing_paths


def _close_later(lease: SandboxLease) -> None:
    task = asyncio.get_running_loop().create_task(lease.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
