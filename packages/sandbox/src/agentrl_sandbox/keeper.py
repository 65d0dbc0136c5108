"""The keeper: the process that owns a worker's sandboxes. A separate program, started by `bubblewrap.py`.

It runs as process 1 of a PID namespace, in its own mount namespace. All commands run below it, so the kernel ends
them when it ends, and its files are sized tmpfs mounts that end with its mount namespace: a killed worker leaves
neither processes nor files behind. It and what it imports use the standard library only, and start in about 20 ms.

Requests arrive as JSON over a SOCK_SEQPACKET pair, with attached file descriptors; replies carry the request's
number. The keeper never waits for one sandbox: limits of all others must act meanwhile. What reads or writes many files
is done by a helper, a forked child that fills files in memory, and the keeper sends them. A fork and its end take
longer than to read a few files, so the keeper does that itself.

    python -I -S -c 'import sys; sys.path.append(...); from agentrl_sandbox.keeper import main; main()' \\
        SOCKET OWNER FILTER BWRAP
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from agentrl.sandbox import FileRecord
from agentrl_sandbox.bwrap import SET_DEATH_SIGNAL, Command, Isolation, die_with
from agentrl_sandbox.file_tree import (
    FIRST_UID,
    KINDS,
    FileError,
    check,
    empty_file,
    in_file,
    libc,
    memory_file,
    read_rows,
    write_rows,
)
from agentrl_sandbox.lease import NODEV, NOEXEC, NOSUID, PRIVATE, REC, SMALL_ROOM, KeeperError, Lease, mount

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Fields = dict[str, Any]

_MESSAGE_BYTES = 100_000
_SPILLED = b"@"
"""Message with its content in the last attached file."""
_NEWNS, _NEWUSER, _NEWPID = 0x20000, 0x10000000, 0x20000000
_UIDS = 512
"""As root, each lease has its own user id: limits on processes bind every user but the real root."""
_SAMPLE_S = 0.02


def send(line: socket.socket, message: Fields, files: Sequence[int] = ()) -> None:
    """Send a message of any size; the files stay open here."""
    body = json.dumps(message).encode()
    if len(body) <= _MESSAGE_BYTES:
        socket.send_fds(line, [body], list(files))
        return
    spilled = memory_file(body)
    try:
        socket.send_fds(line, [_SPILLED], [*files, spilled])
    finally:
        os.close(spilled)


def receive(line: socket.socket) -> tuple[Fields | None, list[int]]:
    """Return a message and its attached files; None at the end of the line."""
    data, files, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 8)
    if data == _SPILLED:
        with open(files.pop(), "rb") as file:
            data = file.read()
    return (json.loads(data) if data else None), files


class Request(NamedTuple):
    """A request of the owner with its attached files."""

    number: int
    operation: str
    files: list[int]
    fields: Fields


class Helper:
    """A child of the keeper that works on the files of a lease.

    Args:
        request: what it serves.
        lease: the lease; its next requests wait.
        work: what it does.
        outputs: empty files that it fills for the reply.
        signatures: empty file that it fills with what a walk saw.
    """

    def __init__(
        self,
        request: Request,
        lease: Lease,
        work: Callable[[], object],
        outputs: Sequence[int] = (),
        signatures: int | None = None,
    ) -> None:
        self.request, self.lease = request, lease
        self._outputs, self._signatures, self._failure = outputs, signatures, empty_file()
        self.process = os.fork()
        if self.process == 0:
            self._perform(work)
        self.pidfd = os.pidfd_open(self.process)

    def _perform(self, work: Callable[[], object]) -> NoReturn:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(self._failure, json.dumps(failure(self.request.operation, error)).encode())
        finally:
            os._exit(status)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> tuple[Fields, Sequence[int]]:
        """Return the reply to its request."""
        _, status = os.waitpid(self.process, 0)
        text = os.pread(self._failure, 1 << 16, 0)
        os.close(self.pidfd)
        os.close(self._failure)
        if status == 0:
            if self._signatures is not None:
                self.lease.replace_signatures(self._signatures)
            return {}, self._outputs
        for file in (*self._outputs, *([] if self._signatures is None else [self._signatures])):
            os.close(file)
        return (json.loads(text) if text else {"error": f"{self.request.operation}: its helper was killed"}), ()


def failure(operation: str, error: BaseException) -> Fields:
    """Return the reply that tells a failure."""
    if isinstance(error, FileError):
        number, message, path = error.args
        return {"file_error": [number, message, path[:4096]]}
    if isinstance(error, KeeperError):
        return {"error": str(error)}
    return {"error": f"{operation}: {type(error).__name__}: {error}"[:4096]}


class Keeper:
    """Serves the owner's requests."""

    def __init__(self, line: socket.socket, filter_file: int, bwrap: str, *, is_root: bool, number: int) -> None:
        self.line, self.isolation = line, Isolation(bwrap, filter_file)
        bases = [path for path in ("/srv", "/mnt", "/media", "/opt") if os.path.isdir(path)]
        if not bases:
            raise KeeperError("the keeper mounts its files on /srv, /mnt, /media or /opt, but none of them exists")
        self.base = bases[0]
        mount("agentrl", self.base, "tmpfs", NOSUID | NODEV, "size=4m,mode=755")
        self.leases: dict[str, Lease] = {}
        self.commands: dict[int, Command] = {}
        self.helpers: dict[Lease, Helper] = {}
        self.waiting: dict[Lease, deque[Request]] = {}
        """Requests for leases with a helper, in their order."""
        self.closing: dict[Lease, Request] = {}
        """Leases to be removed once their commands and helper have ended."""
        self.free_uids = list(range(_UIDS)) if is_root else []
        self.is_root = is_root
        self.first_uid = FIRST_UID + number % 4_000_000 * _UIDS
        self.poller = select.poll()
        self.watched: dict[int, Callable[[], None]] = {}
        """What to do when a file can be read."""
        self.watch(line.fileno(), self.receive_request)

    def watch(self, file: int, on_readable: Callable[[], None]) -> None:
        self.watched[file] = on_readable
        self.poller.register(file, select.POLLIN)

    def unwatch(self, file: int) -> None:
        if self.watched.pop(file, None) is not None:
            self.poller.unregister(file)

    def serve(self) -> NoReturn:
        while True:
            now = time.monotonic()
            running = [command for command in self.commands.values() if not command.is_ending]
            wait = min([_SAMPLE_S] + [max(0.0, command.deadline - now) for command in running])
            for file, _ in self.poller.poll(wait * 1000 if running else None):
                if file in self.watched:  # else its command has failed just now
                    self.watched[file]()
            for command in self.commands.values():
                command.keep_limits()

    def receive_request(self) -> None:
        try:
            message, files = receive(self.line)
        except ConnectionError:  # the owner was killed
            os._exit(0)
        if message is None:
            os._exit(0)  # the owner has closed its end
        self.answer(Request(message.pop("number"), message.pop("operation"), files, message))

    def answer(self, request: Request) -> None:
        """Serve a request, or let it wait for the helper of its lease."""
        try:
            fields = dict(request.fields)
            if request.operation not in ("create", "kill"):
                lease = fields["lease"] = self.lease(request.fields["lease"])
                if lease in self.helpers and request.operation != "destroy":
                    self.waiting.setdefault(lease, deque()).append(request)
                    return
            getattr(self, f"do_{request.operation}")(request, **fields)
        except Exception as error:  # any other one would end all sandboxes of the worker
            self.reply(request.number, failure(request.operation, error))
        for file in request.files:
            os.close(file)

    def reply(self, number: int, reply: Fields, files: Sequence[int] = ()) -> None:
        try:
            send(self.line, {"number": number, **reply}, files)
        except OSError:
            os._exit(0)
        for file in files:
            os.close(file)

    def refuse(self, request: Request, why: str) -> None:
        """Reply to a request that waited, and will not be served."""
        self.reply(request.number, {"error": why})
        for file in request.files:
            os.close(file)

    def lease(self, name: str) -> Lease:
        try:
            return self.leases[name]
        except KeyError:
            raise KeeperError(f"there is no sandbox {name}") from None

    def do_create(self, request: Request, lease: str, **limits: Any) -> None:
        if limits["root"] and os.path.realpath(limits["root"]).startswith(self.base + "/"):
            raise KeeperError(f"root {limits['root']!r}: {self.base} is covered by the keeper's own files; move it")
        slot = None
        if self.is_root:
            if not self.free_uids:
                raise KeeperError(f"{_UIDS} sandboxes are open in one worker; close some")
            slot = self.free_uids.pop()
        try:
            made = Lease(f"{self.base}/{lease}", None if slot is None else self.first_uid + slot, limits)
        except BaseException:
            if slot is not None:
                self.free_uids.append(slot)
            raise
        made.slot = slot
        self.leases[lease] = made
        self.reply(request.number, {})

    def do_destroy(self, request: Request, lease: Lease) -> None:
        del self.leases[request.fields["lease"]]
        self.closing[lease] = request
        for waiting in self.waiting.pop(lease, ()):
            self.refuse(waiting, "the sandbox is closed")
        if lease in self.helpers:
            self.helpers[lease].kill()
        for command in self.commands.values():
            if command.lease is lease:
                command.kill("closed")
        self.remove_idle(lease)

    def remove_idle(self, lease: Lease) -> None:
        """Remove a closing lease once nothing works on it."""
        if lease in self.helpers or lease not in self.closing:
            return
        if not any(command.lease is lease for command in self.commands.values()):
            self.await_helper(Helper(self.closing[lease], lease, lease.close))

    def do_open(self, request: Request, lease: Lease, path: str) -> None:
        with in_file(path):
            file = lease.open(path)
        self.reply(request.number, {"size": os.fstat(file).st_size}, [file])

    def do_write(self, request: Request, lease: Lease) -> None:
        """Write files: paths, sizes and kinds are rows of one file, contents lie one after another in another."""
        rows, contents = request.files

        def write() -> None:
            offset = 0
            for path, size, kind in read_rows(rows):
                with in_file(path):
                    lease.write(path, KINDS[kind](os.pread(contents, size, offset)))
                offset += size

        if lease.is_small() and max(os.fstat(file).st_size for file in request.files) <= SMALL_ROOM >> 5:
            write()
            self.reply(request.number, {})
        else:
            self.await_helper(Helper(request, lease, write))

    def do_changed(self, request: Request, lease: Lease, everything: bool) -> None:
        """Reply with a file of rows, which are records and paths that are gone, and a file of contents."""
        rows, contents, signatures = empty_file(), empty_file(), empty_file()

        def walk(room: int | None = None) -> None:
            lease.load_signatures()
            records, gone = lease.changed(contents, everything=everything, room=room)
            write_rows(rows, [*records, *gone])
            lease.store_signatures(signatures)

        if lease.is_small():
            try:
                walk(SMALL_ROOM)
            except FileError as error:
                if error.args[0] != errno.EFBIG:
                    for file in (rows, contents, signatures):
                        os.close(file)
                    raise
                os.ftruncate(contents, 0)
                os.lseek(contents, 0, os.SEEK_SET)
            else:
                lease.replace_signatures(signatures)
                self.reply(request.number, {}, (rows, contents))
                return
        self.await_helper(Helper(request, lease, walk, (rows, contents), signatures))

    def do_restore(self, request: Request, lease: Lease) -> None:
        rows, contents = request.files
        signatures = empty_file()

        def restore() -> None:
            lease.restore([FileRecord(*row) for row in read_rows(rows)], contents)
            lease.store_signatures(signatures)

        self.await_helper(Helper(request, lease, restore, (), signatures))

    def await_helper(self, helper: Helper) -> None:
        """Let a helper work, and reply when it has ended."""
        self.helpers[helper.lease] = helper
        self.watch(helper.pidfd, lambda: self.on_helper_end(helper))

    def on_helper_end(self, helper: Helper) -> None:
        lease, request = helper.lease, helper.request
        self.unwatch(helper.pidfd)
        del self.helpers[lease]
        reply, files = helper.reap()
        self.reap_orphans()
        if request.operation == "destroy":
            del self.closing[lease]
            if lease.slot is not None and not reply:
                self.free_uids.append(lease.slot)
        self.reply(request.number, reply, files)
        self.remove_idle(lease)
        while lease not in self.helpers and (waiting := self.waiting.get(lease)):
            self.answer(waiting.popleft())
        if lease not in self.helpers:
            self.waiting.pop(lease, None)

    def do_run(self, request: Request, lease: Lease, **options: Any) -> None:
        number = request.number
        command = self.commands[number] = Command(lease, request.files, options, self.isolation)
        self.watch(command.report, lambda: self.on_report(number))
        self.watch(command.pidfd, lambda: self.on_end(number))

    def do_kill(self, request: Request, command: int) -> None:
        if command in self.commands:
            self.commands[command].kill("cancelled")
        for waiting in self.waiting.values():
            for run in [each for each in waiting if each.number == command]:
                waiting.remove(run)
                self.refuse(run, "the command was cancelled")

    def on_report(self, number: int) -> None:
        """Bubblewrap reports that it has made a sandbox, or has failed to."""
        command = self.commands[number]
        if command.read_report() and command.listener is not None:
            self.reply(number, {"listening": True}, [command.listener])
            command.listener = None
        if command.init or command.problem:
            self.unwatch(command.report)

    def on_end(self, number: int) -> None:
        """Bubblewrap has ended, with its command or without one; what it leaves must end, too."""
        command = self.commands[number]
        self.unwatch(command.pidfd)
        self.unwatch(command.report)
        if not command.init:
            command.read_report()
        command.has_ended = True
        command.kill("")
        if command.init_pidfd is None:
            self.finish(number)
        else:
            self.watch(command.init_pidfd, lambda: self.finish(number))

    def finish(self, number: int) -> None:
        """Reply to a command: all its processes are gone."""
        command = self.commands.pop(number)
        if command.init_pidfd is not None:
            self.unwatch(command.init_pidfd)
        outcome = command.reap()
        self.reap_orphans()
        self.reply(number, {"error": command.problem} if command.problem else outcome)
        self.remove_idle(command.lease)

    def reap_orphans(self) -> None:
        """Reap the children that processes below left to this one, process 1, and leave commands and helpers."""
        own = {command.process for command in self.commands.values()}
        own |= {helper.process for helper in self.helpers.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in own:
                    return  # the kernel names it first each time; its own end is near
                os.waitpid(ended.si_pid, 0)


def main() -> None:
    line_number, owner, filter_file, bwrap = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    die_with(owner)
    line = socket.socket(fileno=line_number)
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid == 0:
            check(libc.unshare(_NEWNS | _NEWPID))
        else:
            check(libc.unshare(_NEWNS | _NEWUSER | _NEWPID))
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            die_with(owner)  # new credentials clear the signal
    except OSError as error:
        line.send(json.dumps({"number": 0, "error": f"namespaces are refused: {error.strerror}"}).encode())
        os._exit(1)
    number = os.getpid()  # differs between the keepers of a machine
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if child:
        line.close()
        os.close(alive_read)
        os.write(alive_write, b"1")
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    os.close(alive_write)
    if os.read(alive_read, 1) != b"1":  # the parent ended before its end could be signalled
        os._exit(1)
    os.close(alive_read)
    try:
        mount("none", "/", "", REC | PRIVATE)
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        keeper = Keeper(line, filter_file, bwrap, is_root=uid == 0, number=number)
    except (OSError, KeeperError) as error:
        line.send(json.dumps({"number": 0, "error": f"the keeper's files cannot be mounted: {error}"}).encode())
        os._exit(1)
    keeper.reply(0, {})
    keeper.serve()
