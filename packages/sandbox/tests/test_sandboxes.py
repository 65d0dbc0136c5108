"""Commands in a sandbox: what they see, which limits end them, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from agentrl_sandbox import file_tree as sandbox_files
from agentrl_sandbox import seccomp
from agentrl_sandbox.bubblewrap import BubblewrapDriver, BubblewrapLease

from agentrl import Sandbox
from agentrl.core.connections import RECEIVE_BYTES, BoundedServer
from agentrl.core.errors import InputError
from agentrl.sandbox.driver import CommandResult, SandboxError
from agentrl.sandbox.sandbox import check_sandboxes, read_sources
from agentrl.sandbox.state import FileState, hashed_files
from tests.sandboxes.leaks import leaks, marked
from tests.sandboxes.limits import BOMBS, below
from tests.sandboxes.users import as_users

pytestmark = pytest.mark.needs("bubblewrap")


@asynccontextmanager
async def leased(**limits: object) -> AsyncIterator[tuple[BubblewrapDriver, BubblewrapLease]]:
    driver = BubblewrapDriver()
    try:
        yield driver, await driver.create(Sandbox(**limits))  # type: ignore[arg-type]
    finally:
        await driver.close()


def in_lease(use: Callable[[BubblewrapLease], Awaitable[CommandResult]], **limits: object) -> CommandResult:
    """Use a sandbox of its own and return the result."""

    async def run() -> CommandResult:
        async with leased(**limits) as (_, lease):
            return await use(lease)

    return asyncio.run(run())


def shell(script: str, **limits: object) -> CommandResult:
    return in_lease(lambda lease: lease.run(["sh", "-c", script]), **limits)


def test_a_command_reads_its_files_and_input_and_leaves_no_state() -> None:
    async def run() -> None:
        sandbox = Sandbox(seconds=20)
        ran = await sandbox.run(["sh", "-c", "cat a/b.txt -; echo > c"], files={"a/b.txt": "file "}, stdin="input")
        assert (ran.ok, ran.output, ran.stderr) == (True, "file input", b"")
        again = await sandbox.run(["ls", "-A"])
        assert (again.ok, again.output) == (True, "")

    asyncio.run(run())


def test_a_directory_is_copied_with_its_links_and_empty_directories(tmp_path: Path) -> None:
    (tmp_path / "in" / "empty").mkdir(parents=True)
    (tmp_path / "in" / "program").write_text("echo ran\n")
    (tmp_path / "in" / "program").chmod(0o755)
    for name, target in (("link", "program"), ("outer", "/usr/bin/env"), ("missing", "gone")):
        (tmp_path / "in" / name).symlink_to(target)
    script = "cd copy && ls && ./link && readlink outer missing; ls ../none"
    (tmp_path / "none").mkdir()

    async def run() -> None:
        files = {"copy": tmp_path / "in", "none": tmp_path / "none"}
        ran = await Sandbox(seconds=20).run(["sh", "-c", script], files=files)
        expected = ["empty", "link", "missing", "outer", "program", "ran", "/usr/bin/env", "gone"]
        assert (ran.ok, ran.output.split()) == (True, expected)

    asyncio.run(run())
    with pytest.raises(InputError, match="in/outer: a link to /usr/bin/env, outside of"):
        read_sources({"/box/copy": tmp_path / "in"})


def test_files_stay_from_command_to_command_of_a_lease() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        await lease.run(["sh", "-c", "echo kept > x"])
        assert await lease.read("/box/x") == b"kept\n"
        return await lease.run(["cat", "x"])

    assert in_lease(use).output == "kept\n"


def test_failures_of_the_command_are_its_result() -> None:
    assert shell("exit 3").status == 3
    assert shell("kill -9 $$").status in (-9, 137)
    assert shell("no-such-program").status == 127
    assert shell("echo bwrap: execvp: No such file or directory >&2; exit 1").status == 1


@pytest.mark.parametrize(
    ("script", "limits", "killed"),
    [
        ("sleep 60", {"seconds": 0.3}, "time"),
        ("trap '' TERM INT HUP; setsid sleep 60 & sleep 60", {"seconds": 0.3}, "time"),
        ("head -c 200000000 /dev/zero | tail -c 190000000", {"memory_mb": 64}, None),
    ],
)
def test_limits_end_a_command(script: str, limits: dict[str, object], killed: str | None) -> None:
    ran = shell(script, **limits)
    assert not ran.ok
    assert killed is None or ran.killed == killed


def test_output_is_cut_and_the_flood_is_not_kept() -> None:
    ran = shell("yes", output_bytes=1000, seconds=0.5)
    assert (len(ran.stdout), ran.truncated) == (1000, True)


def test_the_standard_input_cannot_be_changed() -> None:
    program = "import os; print(os.read(0, 9)); os.lseek(0, 0, 0); os.write(0, b'longer')"
    ran = in_lease(lambda lease: lease.run(["python3", "-c", program], stdin=b"input"))
    assert ran.output == "b'input'\n"
    assert b"PermissionError" in ran.stderr


def test_output_that_is_no_text_is_readable() -> None:
    assert shell(r"printf '\377ok'").output == "\N{REPLACEMENT CHARACTER}ok"


def test_a_cancelled_command_ends() -> None:
    async def run() -> None:
        async with leased(seconds=60) as (_, lease):
            command = asyncio.create_task(lease.run(["sh", "-c", "echo > started; sleep 60"]))
            while True:
                try:
                    await lease.read("/box/started")
                    break
                except FileNotFoundError:
                    await asyncio.sleep(0.01)
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command
            ran = await lease.run(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
            assert int(ran.output) < 8

    asyncio.run(run())


def test_commands_run_beside_each_other() -> None:
    """Each waits for the file that the other writes."""

    async def run() -> None:
        async with leased(seconds=30) as (_, lease):
            wait = "echo > {0}; while ! [ -e {1} ]; do sleep 0.01; done"
            both = [lease.run(["sh", "-c", wait.format(*names)]) for names in (("a", "b"), ("b", "a"))]
            assert all(ran.ok for ran in await asyncio.gather(*both))

    asyncio.run(run())


def test_an_event_loop_that_has_ended_keeps_no_keeper() -> None:
    async def run() -> set[int]:
        assert (await Sandbox().run(["true"])).ok
        return set(below(os.getpid())) - others

    others = set(below(os.getpid()))
    first, second = asyncio.run(run()), asyncio.run(run())
    assert not first & second


def test_links_that_a_command_made_lead_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def run() -> None:
        async with leased() as (_, lease):
            links = f"ln -s {secret} file; ln -s {tmp_path} directory; mkfifo pipe; ln -s /tmp out"
            assert (await lease.run(["sh", "-c", links])).ok
            for path in (
                "/box/file",
                "/box/directory/secret",
                "/box/pipe",
                "/box/../../etc/passwd",
                "/box/none",
                "box",
            ):
                with pytest.raises(OSError, match=path):
                    await lease.read(path)
            await lease.write({"/box/file": b"written"})
            assert secret.read_text() == "secret"
            with pytest.raises(OSError, match="/box/directory/secret"):
                await lease.write({"/box/directory/secret": b"written"})
            assert secret.read_text() == "secret"

    asyncio.run(run())


def test_a_gateway_is_all_that_the_network_has() -> None:
    here = socket.create_server(("127.0.0.1", 0))

    def serve(server: socket.socket) -> None:
        def answer() -> None:
            line, _ = server.accept()
            with line, server:
                line.sendall(b"hello")

        threading.Thread(target=answer, daemon=True).start()

    probe = (
        "import socket\n"
        "print(socket.create_connection(('127.0.0.1', 8080), 5).recv(9).decode())\n"
        f"for address in (('127.0.0.1', {here.getsockname()[1]}), ('10.0.0.1', 80)):\n"
        "    try: socket.create_connection(address, 1); print('reached', address)\n"
        "    except OSError: pass\n"
    )
    with here:
        ran = in_lease(
            lambda lease: lease.run(["/usr/bin/python3", "-c", probe], listener=serve), network="gateway", seconds=20
        )
    assert ran.output == "hello\n", ran.stderr


def test_a_gateway_reads_little_of_a_sandbox_at_once() -> None:
    """Parsing a body in chunks of one byte blocks the worker, with default buffers and 16 connections for seconds."""

    async def run() -> None:
        listening, server = socket.create_server(("127.0.0.1", 0)), BoundedServer()
        server.accept_from(asyncio.Protocol, listening)
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * RECEIVE_BYTES
        server.close()

    asyncio.run(run())


def test_a_root_directory_is_the_file_system_and_is_never_written(tmp_path: Path) -> None:
    for name in ("usr", "box", "proc", "dev", "tmp", "etc"):
        (tmp_path / name).mkdir()
    for name in ("bin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}")
    (tmp_path / "etc" / "release").write_text("image")
    tmp_path.chmod(0o755)

    async def use(lease: BubblewrapLease) -> CommandResult:
        ran = await lease.run(["sh", "-c", "cat /etc/release; echo > /box/made; ls /box"])
        assert await lease.read("/etc/release") == b"image"
        return ran

    ran = in_lease(use, root=str(tmp_path), read=("/usr",))
    assert ran.output == "imagemade\n", ran.stderr
    assert not (tmp_path / "box" / "made").exists()


def test_a_lost_keeper_is_an_error_of_the_machine_and_is_replaced() -> None:
    async def run() -> None:
        async with leased(seconds=60) as (driver, lease):
            command = asyncio.create_task(lease.run(["sleep", "60"]))
            assert (await lease.run(["true"])).ok
            assert driver._keeper is not None
            driver._keeper._process.send_signal(signal.SIGKILL)
            with pytest.raises(SandboxError, match="keeper"):
                await command
            with pytest.raises(SandboxError):
                await lease.run(["true"])
            fresh = await driver.create(Sandbox())
            assert (await fresh.run(["true"])).ok

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "noun"),
    [
        ({"memory_mb": 4}, "memory_mb"),
        ({"processes": 1}, "processes"),
        ({"network": "vpn"}, "network"),
        ({"root": "/no/such/directory"}, "directory"),
        ({"root": "/etc/passwd"}, "directory"),
        ({"read": ("relative",)}, "absolute"),
        ({"memory_mb": 10**30}, "memory_mb = 1000.* is too large"),
        ({"seconds": float("nan")}, "seconds = nan"),
        ({"seconds": float("inf")}, "seconds = inf is too large"),
    ],
)
def test_a_sandbox_that_cannot_work_is_refused(limits: dict[str, object], noun: str) -> None:
    with pytest.raises(InputError, match=noun):
        Sandbox(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "files", "why"),
    [
        (["echo", "x" * 131_072], {}, "131,076 bytes"),
        (["echo", *["x" * 100_000] * 11], {}, "1,100,004 bytes"),
        (["echo", "\0"], {}, "NUL"),
        (["true"], {"a": b"x" * 2_000_000}, "No space left on device: '/box/a'"),
        (["true"], {"../a": b""}, "/box/../a"),
        (["true"], {"a": b"", "a/b": b""}, "Not a directory: '/box/a/b'"),
    ],
)
def test_a_command_that_cannot_start_fails_and_says_why(argv: list[str], files: dict[str, bytes], why: str) -> None:
    ran = in_lease(lambda lease: lease.run(argv, files=files), disk_mb=1)
    assert ran.status == 126
    assert why in ran.stderr.decode()


def test_a_path_that_no_file_can_have_fails_and_the_keeper_goes_on() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        for path in ("/box/\ud800", "/box/a\0b", "/box/" + "a" * 5000):
            for call in (lease.write({path: b"x"}), lease.read(path)):
                with pytest.raises(OSError, match=r"surrogates|too long"):
                    await call
        assert b"surrogates" in (await lease.run(["true"], files={"\udcff\ud800": b""})).stderr
        return await lease.run(["echo", "\ud800"])

    assert in_lease(use).output == "?\n"


def test_a_request_that_the_keeper_cannot_serve_ends_no_sandbox() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        with pytest.raises(SandboxError, match="surrogates not allowed"):
            await lease._client.ask("create", lease="\ud800", disk_mb=1, inodes=64, root=None, read=[], writable=[])
        return await lease.run(["echo", "ok"])

    assert in_lease(use).ok


def test_a_sandbox_that_cannot_be_made_leaves_nothing_mounted(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()

    async def use(lease: BubblewrapLease) -> CommandResult:
        for _ in range(2):  # what the first left in place would be in the way of the second
            with pytest.raises(SandboxError, match="may not contain"):
                await lease._client.ask(
                    "create", lease="again", disk_mb=1, inodes=64, root=str(tmp_path / "a:b"), read=[], writable=[]
                )
        return await lease.run(["echo", "ok"])

    assert in_lease(use).ok


@pytest.mark.parametrize("variables", [{"A=B": "c"}, {"": "c"}, {"A": "\ud800"}, {"A": "\0"}])
def test_variables_that_no_process_can_have_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(InputError, match="environment variable"):
        in_lease(lambda lease: lease.run(["true"], environment=variables))


def test_a_time_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="seconds = nan"):
        in_lease(lambda lease: lease.run(["true"], seconds=float("nan")))
    assert in_lease(lambda lease: lease.run(["sleep", "2"], seconds=0)).killed == "time"


@pytest.mark.parametrize("name", ["shared mappings", "shared mappings of a device", "page tables"])
def test_mapped_memory_is_refused_or_counted(name: str) -> None:
    ran = in_lease(lambda lease: lease.run(BOMBS[name]), memory_mb=64, disk_mb=8, seconds=10)
    assert b"reached" not in ran.stdout
    assert not ran.ok
    assert ran.killed != "time"


def test_private_and_file_mappings_work_and_zeros_can_be_read() -> None:
    program = """
import mmap
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)[0] = 1
with open("x", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mmap.mmap(file.fileno(), 4096)[0] = 1
print(open("/dev/zero", "rb").read(3), open("x", "rb").read(1))
"""
    assert in_lease(lambda lease: lease.run(["python3", "-c", program])).output == "b'\\x00\\x00\\x00' b'\\x01'\n"


def test_the_names_of_changed_and_removed_files_count_as_changes(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    for number in range(10):
        (tmp_path / "top" / f"{number}{'x' * 99}").symlink_to("y" * 100)
    whole = sandbox_files.FileChanges({}, 0, -1, 0, names_room=3000)
    whole.walk(str(tmp_path), "top")
    later = sandbox_files.FileChanges(whole.signatures, time.time_ns(), -1, 0, names_room=1000)
    for changes in (sandbox_files.FileChanges({}, 0, -1, 0, names_room=1000), later):
        with pytest.raises(sandbox_files.FileError, match="names"):  # also of files that have not changed
            changes.walk(str(tmp_path), "top")


def test_the_names_of_a_sandbox_are_limited() -> None:
    deep = """
import os
os.chdir("/box")
for _ in range(13):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for number in range(2500):
    open(f"{number:0250}", "w").close()
"""

    async def use(lease: BubblewrapLease) -> CommandResult:
        assert (await lease.run(["python3", "-c", deep])).ok
        with pytest.raises(OSError, match="names of files of more than 8 MiB"):
            await lease.changes()
        return await lease.run(["true"])

    assert in_lease(use).ok


@asynccontextmanager
async def stopped_walk(
    driver: BubblewrapDriver, lease: BubblewrapLease
) -> AsyncIterator[tuple[asyncio.Task[Any], int]]:
    """Read the files of a sandbox, and stop the helper that does it until the end of the block."""
    assert (await lease.run(["sh", "-c", "seq 15000 | xargs touch"])).ok
    assert driver._keeper is not None
    serving = {driver._keeper._process.pid, *below(driver._keeper._process.pid)}
    while True:
        walk: asyncio.Task[Any] = asyncio.create_task(lease.changes(everything=True))
        while not walk.done():
            await asyncio.sleep(0)
            for helper in set(below(driver._keeper._process.pid)) - serving:
                os.kill(helper, signal.SIGSTOP)
                await asyncio.sleep(0.05)
                if walk.done():  # it was about to end
                    continue
                try:
                    yield walk, helper
                finally:
                    with suppress(ProcessLookupError):
                        os.kill(helper, signal.SIGCONT)
                return
        assert len((await walk)[0]) == 15_000


def test_the_limits_of_other_sandboxes_act_while_files_are_read() -> None:
    async def run() -> None:
        async with leased() as (driver, lease):
            small = await driver.create(Sandbox(memory_mb=128))
            async with stopped_walk(driver, lease) as (walk, _):
                own = asyncio.create_task(lease.read("/box/1"))
                assert (await small.run(BOMBS["memory of many processes"])).killed == "memory"
                assert (await small.run(["sleep", "60"], seconds=0.3)).killed == "time"
                await small.write({"/box/x": b"1"})
                assert {record.path for record in (await small.changes())[0]} == {"box/x"}
                assert (await (await driver.create(Sandbox())).run(["true"])).ok
                assert not walk.done()
                assert not own.done()  # the requests of one sandbox are served in their order
            assert len((await walk)[0]) == 15_000
            assert await own == b""

    asyncio.run(run())


def test_a_sandbox_can_be_closed_while_its_files_are_read() -> None:
    async def run() -> None:
        async with leased() as (driver, lease):
            async with stopped_walk(driver, lease) as (walk, _):
                own = asyncio.create_task(lease.read("/box/1"))
                await asyncio.sleep(0)
                await lease.close()
                for task in (walk, own):
                    with pytest.raises(SandboxError):
                        await task
            other = await driver.create(Sandbox())
            async with stopped_walk(driver, other) as (walk, helper):
                os.kill(helper, signal.SIGKILL)
                with pytest.raises(SandboxError, match="helper was killed"):
                    await walk
            assert len((await other.changes())[0]) == 15_000
            await other.close()

    asyncio.run(run())


def test_a_command_that_is_cancelled_before_its_turn_does_nothing() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        await lease.run(["sh", "-c", "for i in $(seq 5000); do : > $i; done"])
        reading = asyncio.create_task(lease.changes())
        await asyncio.sleep(0)
        before = len(lease._client._requests)
        command = asyncio.create_task(lease.run(["touch", "ran"]))
        while len(lease._client._requests) == before:
            await asyncio.sleep(0)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await reading
        return await lease.run(["ls", "ran"])

    assert in_lease(use).output == ""


@pytest.mark.parametrize("method", ["write", "changes"])
def test_a_call_that_is_cancelled_at_any_moment_leaves_no_file_open(method: str) -> None:
    def memory_files() -> int:
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found += os.readlink(file).startswith("/memfd:")
        return found

    async def use(lease: BubblewrapLease) -> CommandResult:
        files = {"/box/a": bytes(8 << 20)}
        await lease.write(files)
        before = memory_files()
        for moment in range(60):
            call: asyncio.Task[Any]
            if method == "write":
                call = asyncio.create_task(lease.write(files))
            else:
                call = asyncio.create_task(lease.changes(everything=True))
            until = time.monotonic() + moment / 3000
            while time.monotonic() < until and not call.done():
                await asyncio.sleep(0)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
        for _ in range(200):
            if memory_files() > before:
                await asyncio.sleep(0.05)
        assert memory_files() == before
        return await lease.run(["true"])

    assert in_lease(use).ok


def test_a_sandbox_whose_caller_is_cancelled_is_removed() -> None:
    async def run() -> None:
        async with leased() as (driver, lease):
            for _ in range(5):
                made = asyncio.create_task(driver.create(Sandbox()))
                await asyncio.sleep(0)
                made.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await made
            (keeper,) = below(lease._client._process.pid)[:1]

            def mounted() -> int:
                return Path(f"/proc/{keeper}/mounts").read_text().count("agentrl ")

            for _ in range(200):
                await lease.read("/etc/hosts")  # answered after what was asked before
                if mounted() <= 2:
                    break
                await asyncio.sleep(0.05)
            assert mounted() == 2, "the keeper's own files, and the open lease"

    asyncio.run(run())


def test_names_are_decoded_while_the_event_loop_serves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    served, read_rows = threading.Event(), sandbox_files.read_rows

    def read(file: int) -> Iterator[object]:
        assert served.wait(30)
        return read_rows(file)

    async def run() -> None:
        async with leased() as (_, lease):
            names = {f"/box/{number:0200}": b"" for number in range(3000)}
            await lease.write(names)
            monkeypatch.setattr("agentrl_sandbox.bubblewrap.read_rows", read)
            changes = asyncio.create_task(lease.changes())
            while not (await asyncio.wait({changes}, timeout=0.01))[0]:
                served.set()
            assert len((await changes)[0]) == len(names)

    asyncio.run(run())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_recorded_state_restores_nothing_outside_for_a_plain_user() -> None:
    assert as_users("tests.hostile_records:faults")["nobody"] == []


def test_a_recorded_link_where_a_root_is_mounted_on_leads_nowhere(tmp_path: Path) -> None:
    for name in ("usr", "proc", "dev", "tmp", "box"):
        (tmp_path / "root" / name).mkdir(parents=True)
    (tmp_path / "root" / "bin").symlink_to("usr/bin")
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o777)

    async def run() -> None:
        for name in ("proc", "dev", "usr", "box", "tmp"):
            async with leased(root=str(tmp_path / "root"), read=("/usr",)) as (_, lease):
                await lease.restore([sandbox_files.FileRecord(name, "link", 0o777, 0, 0, f"/oldroot{victim}")], b"")
                ran = await lease.run(["sh", "-c", f"echo owned > /{name}/owned"])
                assert not ran.ok
                assert not list(victim.iterdir())

    asyncio.run(run())


def test_a_program_that_cannot_start_has_a_status_of_its_own_or_is_missing_here(tmp_path: Path) -> None:
    """A missing interpreter is a failure of the infrastructure, never a reward; a missing build is the policy's."""
    for name in ("usr", "proc", "dev", "tmp"):
        (tmp_path / name).mkdir()
    for name in ("bin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}")

    async def run() -> None:
        async with leased() as (driver, lease):
            await lease.write({"/box/bad": b"#!/no/interpreter\n", "/box/text": b"text"})
            for argv, status in ((["/box/none"], 127), (["./bad"], 127), (["./text"], 126), (["/usr"], 126)):
                ran = await lease.run(argv)
                assert (ran.status, b"execvp" in ran.stderr) == (status, True), argv
            with pytest.raises(SandboxError, match="no program 'nonesuch' in /usr/local/bin"):
                await lease.run(["nonesuch"])
            searched = await lease.run(["nonesuch"], environment={"PATH": "/box/bin:/usr/bin"})
            assert searched.status == 127  # a command may have been asked to make it
            rooted = await driver.create(Sandbox(root=str(tmp_path), read=("/usr",)))
            assert (await rooted.run(["/app/build"])).status == 127
            with pytest.raises(SandboxError, match=f"no program 'nonesuch' .* of {tmp_path}"):
                await rooted.run(["nonesuch"])

    asyncio.run(run())


ODD_FILES = """
import os
open("setuid", "w").write("1")
os.chmod("setuid", 0o4755)
os.mkfifo("pipe")
os.chmod("pipe", 0o1666)
for name, seconds in (("future", 10**14), ("past", -(10**14))):
    open(name, "w").write("1")
    os.utime(name, (seconds, seconds))
os.mkdir("directory")
os.setxattr("directory", "user.overlay.opaque", b"y")
"""


def test_odd_files_are_restored_equal() -> None:
    """Each of them once made a resumed sandbox differ from the interrupted one, or the journal fail."""

    async def run() -> None:
        async with leased() as (driver, lease):
            assert (await lease.run(["python3", "-c", ODD_FILES])).ok
            records, _, contents = await lease.changes()
            state = FileState.of(hashed_files(records, contents))
            again = await driver.create(Sandbox())
            await again.restore(*state.to_restore(disk_mb=64))
            records, _, contents = await again.changes(everything=True)
            assert FileState.of(hashed_files(records, contents)).digest == state.digest
            modes = {record.path: record.mode for record in records}
            assert (modes["box/setuid"], modes["box/pipe"]) == (0o4755, 0o1666)

    asyncio.run(run())


def test_a_bubblewrap_that_cannot_isolate_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        program = Path(directory) / "bwrap"
        program.write_text("#!/bin/sh\necho 'bwrap: Unknown option --bind-fd' >&2\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setattr("agentrl_sandbox.bubblewrap.find_bwrap", lambda: str(program))
        with pytest.raises(SandboxError, match="did not start the command: bwrap: Unknown option --bind-fd"):
            shell("true")


def test_a_link_where_a_directory_is_mounted_leads_nowhere(tmp_path: Path) -> None:
    """bubblewrap makes what it mounts on, also through a link to its view of the host."""
    for name in ("usr", "proc", "dev", "tmp"):
        (tmp_path / "root" / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (tmp_path / "root" / name).symlink_to(f"usr/{name}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as host:
        os.chmod(host, 0o777)

        async def use(lease: BubblewrapLease) -> CommandResult:
            moved = await lease.run(["sh", "-c", f"ls /etc; mv /etc /old; ln -s oldroot{host} /etc"])
            assert moved.output == "ld.so.cache\n"
            return await lease.run(["ls", "/"])

        ran = in_lease(use, root=str(tmp_path / "root"), read=("/usr", "/etc/ld.so.cache"))
        assert not os.listdir(host)
    assert b"sandbox: [Errno 20] Not a directory: '/etc/ld.so.cache'" in ran.stderr


def test_long_arguments_and_many_files_are_used() -> None:
    files = {f"{number:04}-{'x' * 200}": b"" for number in range(1000)}
    ran = in_lease(
        lambda lease: lease.run(["sh", "-c", 'ls | wc -l; echo "${#1}"', "sh", "\N{SNOWMAN}" * 40_000], files=files)
    )
    assert ran.output == "1000\n120000\n", ran.stderr


def test_the_environment_is_not_in_the_arguments_of_a_process() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        command = asyncio.create_task(lease.run(["sleep", "60"], environment={"KEY": "secret-value"}))
        while not (running := marked("sleep\x0060")):
            await asyncio.sleep(0.01)
        assert not marked("secret-value")
        assert running
        command.cancel()
        return await lease.run(["sh", "-c", "echo $KEY"], environment={"KEY": "secret-value"})

    assert in_lease(use).output == "secret-value\n"


def test_every_promise_holds_on_this_machine() -> None:
    checks = asyncio.run(check_sandboxes())
    assert len(checks) > 10
    assert not [check for check in checks if not check.holds]


def test_the_filter_has_a_table_for_each_architecture() -> None:
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        assert len(code) % 8 == 0
        assert len(code) // 8 < 256  # jumps reach 255 instructions
    with pytest.raises(InputError, match="riscv64"):
        seccomp.program("riscv64")


def test_no_attempt_to_escape_succeeds() -> None:
    script = "import json; from tests.sandboxes.escapes import escapes; print(json.dumps(escapes(control=False)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    escaped = json.loads(done.stdout.splitlines()[-1])
    assert int(escaped.pop("attempts")) >= 40
    assert not escaped


def test_kills_of_owner_and_keeper_leave_nothing() -> None:
    assert leaks(6) == 0


def test_a_root_must_exist_and_belong_to_this_user_or_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root, problem in (("none", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(InputError, match=problem):
            Sandbox(root=str(tmp_path / root))
    if os.getuid() == 0:
        (tmp_path / "foreign").mkdir()
        os.chown(tmp_path / "foreign", 12345, 12345)
        with pytest.raises(InputError, match="belongs to user 12345"):
            Sandbox(root=str(tmp_path / "foreign"))


def test_the_smallest_memory_is_enough_for_python() -> None:
    assert in_lease(lambda lease: lease.run(["python3", "-c", "print(1)"]), memory_mb=32).output == "1\n"
    with pytest.raises(InputError, match="memory_mb = 31 is too small; it must be from 32"):
        Sandbox(memory_mb=31)


@pytest.mark.parametrize("path", ["/usr/local/x", "/etc", "/", "app", "/app/../etc"])
def test_directories_of_the_machine_cannot_be_writable(path: str) -> None:
    with pytest.raises(InputError, match=r"writable|not an absolute path"):
        Sandbox(writable=(path,))


def test_further_directories_are_writable_and_the_working_directory_and_variables_are_set() -> None:
    ran = shell(
        "pwd; echo $A$B > out; cat /app/src/out; touch /data/x; ls /data",
        writable=("/app/src", "/data"),
        directory="/app/src",
        environment={"A": "1", "B": "2"},
    )
    assert (ran.output, ran.stderr) == ("/app/src\n12\nx\n", b"")


def test_new_scripts_are_executable() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        await lease.write({"/box/run": b"#!/bin/sh\necho ran\n", "/box/text": b"text"})
        return await lease.run(["sh", "-c", "./run; test ! -x text && echo plain"])

    assert in_lease(use).output == "ran\nplain\n"


def test_processor_time_is_no_limit_of_a_command_with_several_threads() -> None:
    async def use(lease: BubblewrapLease) -> CommandResult:
        return await lease.run(["sh", "-c", "ulimit -t"], seconds=20)

    assert int(in_lease(use).output) >= 20 * (os.cpu_count() or 1)
