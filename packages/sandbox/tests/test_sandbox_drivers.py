"""The promises that all drivers of sandboxes keep, and what is particular to container programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from agentrl_sandbox.container import ContainerDriver

from agentrl import Sandbox
from agentrl.core.errors import InputError
from agentrl.rollout.sandbox import changed_files
from agentrl.sandbox.driver import DriverName, SandboxDriver, SandboxError, SandboxLease
from agentrl.sandbox.sandbox import check_sandboxes, choose_driver, make_driver
from agentrl.sandbox.state import FileState
from tests.hostile_records import faults
from tests.sandboxes.leaks import marked


@cache
def missing(name: str) -> str:
    """Return why a driver cannot be tested here; empty if it can."""
    if name == "bubblewrap":
        return ""
    if shutil.which(name) is None:
        return f"needs {name}"
    done = subprocess.run([name, "info"], capture_output=True, check=False, timeout=60)
    return f"`{name} info` fails" if done.returncode else ""


@pytest.fixture(params=[pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")), "podman", "docker"])
def driver(request: pytest.FixtureRequest) -> DriverName:
    if reason := missing(request.param):
        pytest.skip(reason)
    name: DriverName = request.param
    return name


@pytest.fixture(params=["podman", "docker"])
def container(request: pytest.FixtureRequest) -> ContainerDriver:
    if reason := missing(request.param):
        pytest.skip(reason)
    return ContainerDriver(request.param)


@asynccontextmanager
async def leased(driver: SandboxDriver, **limits: object) -> AsyncIterator[SandboxLease]:
    try:
        yield await driver.create(Sandbox(**limits))  # type: ignore[arg-type]
    finally:
        await driver.close()


def containers(driver: ContainerDriver, label: str) -> str:
    command = [driver.program, "ps", "--all", "--quiet", "--filter", f"label=agentrl={label}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_commands_read_and_write_the_files_of_their_sandbox(
    driver: DriverName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "secret")

    async def run() -> None:
        async with leased(make_driver(driver), environment={"A": "b c"}) as lease:
            script = "cat a/b -; echo $A$X$HOME; echo kept > x; env | grep -c SECRET; echo problem >&2; exit 3"
            ran = await lease.run(
                ["sh", "-c", script], files={"a/b": b"file "}, stdin=b"input ", environment={"X": "$"}
            )
            assert (ran.status, ran.stdout, ran.stderr) == (3, b"file input b c$/box\n0\n", b"problem\n")
            assert (ran.killed, ran.truncated, ran.ok) == ("", False, False)
            await lease.write({"/box/run": b"#!/bin/sh\ncat /box/x /etc/shadow"})
            assert (await lease.run(["./run"])).stdout == b"kept\n"
            assert await lease.read("/box/x", limit=3) == b"kep"
            for path in ("/box/none", "/etc/shadow", "/box/../x"):
                with pytest.raises(OSError, match=path):
                    await lease.read(path)
            await lease.write({"/box/text": b"no program"})
            for argv, status in ((["./none"], 127), (["./text"], 126), (["sh", "-c", "exit 127"], 127)):
                assert (await lease.run(argv)).status == status
            for program in ("no-such-program", "/opt/no-such-program"):
                with pytest.raises(SandboxError, match=f"no program '{program}'"):
                    await lease.run([program])

    asyncio.run(run())


def test_the_files_of_one_sandbox_are_restored_in_another(driver: DriverName) -> None:
    async def run() -> None:
        made = make_driver(driver)
        async with leased(made, writable=("/app",)) as lease:
            script = "mkdir d; echo 1 > d/f; ln d/f d/g; ln -s /etc/shadow l; mkfifo p; chmod 700 d; echo 2 > /app/y"
            assert (await lease.run(["sh", "-c", script])).ok
            records, gone, contents = await lease.changes()
            assert not gone
            assert {record.path for record in records} >= {"app/y", "box/d/f", "box/d/g", "box/l", "box/p"}
            with pytest.raises(OSError, match="/box/l"):
                await lease.read("/box/l")
            again = await made.create(Sandbox(writable=("/app",)))
            records.sort(key=lambda record: record.kind == "same")
            await again.restore(records, contents)
            shown = await again.run(["sh", "-c", "cat d/g /app/y; readlink l; stat -c %a d; rm -r d"])
            assert shown.output == "1\n2\n/etc/shadow\n700\n"
            assert {*(await again.changes())[1]} == {"box/d", "box/d/f", "box/d/g"}
            assert await lease.read("/box/d/f") == b"1\n"

    asyncio.run(run())


def test_a_renamed_directory_keeps_the_contents_of_its_links(driver: DriverName) -> None:
    """Whichever name of a file is visited first."""

    async def run() -> None:
        made = make_driver(driver)
        commands = ("mkdir d prev; echo 1 > d/f; ln d/f prev/h", "mv prev d/sub; mkdir prev; echo 2 > prev/h")
        show = ["sh", "-c", "cat d/f d/sub/h prev/h"]
        async with leased(made) as lease:
            state, recorded = FileState(), FileState()
            for command in commands:
                assert (await lease.run(["sh", "-c", command])).ok
                await asyncio.sleep(0.1)  # until what the command wrote counts as unchanged
                files, gone = await changed_files(lease, everything=False)
                change = state.take(state.difference(files, gone))
                assert change is not None
                recorded.apply(change)
            again = await made.create(Sandbox())
            await again.restore(*recorded.to_restore(100))
            assert (await again.run(show)).output == (await lease.run(show)).output == "1\n1\n2\n"

    asyncio.run(run())


def test_a_recorded_state_restores_nothing_outside(driver: DriverName) -> None:
    assert not faults(driver)


def test_limits_on_time_and_output_end_all_processes_and_leave_nothing(driver: DriverName) -> None:
    made = make_driver(driver)

    async def run() -> None:
        async with leased(made, output_bytes=1000, seconds=20) as lease:
            flood = await lease.run(["sh", "-c", "head -c 100000 /dev/zero; setsid sleep 98765 > /dev/null 2>&1 &"])
            assert (flood.ok, len(flood.stdout), flood.truncated) == (True, 1000, True)
            assert not marked("sleep\x0098765")
            slow = await lease.run(["sh", "-c", "trap '' TERM INT; setsid sleep 98765 & sleep 98765"], seconds=1)
            assert slow.killed == "time"
            assert not marked("sleep\x0098765")
            network = "cat /proc/net/dev | grep -c -v -e lo: -e '|'; exec 3<>/dev/tcp/127.0.0.1/22"
            assert (await lease.run(["bash", "-c", network])).output == "0\n"
            command = asyncio.create_task(lease.run(["sleep", "98765"]))
            while not marked("sleep\x0098765"):
                await asyncio.sleep(0.02)
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command
            assert not marked("sleep\x0098765")
            await lease.close()
            with pytest.raises(SandboxError):
                await lease.run(["true"])

    asyncio.run(run())
    if isinstance(made, ContainerDriver):
        assert not list(Path(tempfile.gettempdir()).glob(f"agentrl-{driver}-{os.getuid()}-*"))


def test_a_root_is_read_only_or_changed_in_memory(driver: DriverName, tmp_path: Path) -> None:
    for name in ("usr", "box", "proc", "dev", "tmp", "etc", "app"):
        (tmp_path / name).mkdir()
    for name in ("bin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}")
    (tmp_path / "etc" / "release").write_text("image")
    (tmp_path / "app" / "data").write_text(" data")
    tmp_path.chmod(0o755)

    async def run() -> None:
        async with leased(make_driver(driver), root=str(tmp_path), read=("/usr",)) as lease:
            ran = await lease.run(["sh", "-c", "cat /etc/release /app/data; touch /etc/x /app/x; id -u; echo 1 > made"])
            assert ran.output.startswith("image data"), ran.stderr
            assert await lease.read("/box/made") == b"1\n"
        assert sorted(os.listdir(tmp_path / "app")) == ["data"]
        assert sorted(os.listdir(tmp_path / "etc")) == ["release"]
        assert not os.listdir(tmp_path / "box")

    asyncio.run(run())


def test_files_over_the_limit_of_a_container_are_named(container: ContainerDriver) -> None:
    async def run() -> None:
        async with leased(container, disk_mb=1, inodes=64) as lease:
            full = await lease.run(
                ["sh", "-c", "for i in 1 2 3; do head -c 700000 /dev/zero > $i; done; mkdir d; chmod 0 d"]
            )
            assert (full.ok, full.killed) == (False, "disk")
            refused = await lease.run(["true"], files={"a": b"b"})
            assert (refused.status, refused.stderr) == (126, b"sandbox: [Errno 28] No space left on device: '/box/a'\n")
            many = await lease.run(["sh", "-c", "rm -rf ?; for i in $(seq 99); do : > $i; done"])
            assert many.killed == "disk"
            assert (await lease.run(["sh", "-c", "rm *"])).ok

    asyncio.run(run())


def test_a_status_that_the_program_also_uses_is_the_command_s(container: ContainerDriver) -> None:
    async def run() -> None:
        async with leased(container) as lease:
            assert (await lease.run(["sh", "-c", "exit 125"])).status == 125
            assert isinstance(lease, object)
            lease._image = "agentrl-root:none"  # type: ignore[attr-defined]
            with pytest.raises(SandboxError, match="made no container"):
                await lease.run(["true"])

    asyncio.run(run())


def test_what_a_killed_worker_left_is_removed_by_the_next(container: ContainerDriver) -> None:
    script = (
        "import asyncio, sys\n"
        "from agentrl import Sandbox\n"
        "from agentrl_sandbox.container import ContainerDriver\n"
        "async def main():\n"
        "    driver = ContainerDriver(sys.argv[1])\n"
        "    lease = await driver.create(Sandbox())\n"
        "    print(driver.directory, flush=True)\n"
        "    await lease.run(['sh', '-c', 'mkdir d; chmod 0 d; sleep 98764'])\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, container.program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory = Path(owner.stdout.readline().strip())

    async def run() -> None:
        while not marked("sleep\x0098764"):
            await asyncio.sleep(0.02)
        async with leased(ContainerDriver(container.program)):
            assert os.path.exists(directory)  # noqa: ASYNC240 - a living worker's
            assert containers(container, directory.name)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        async with leased(container):
            assert not os.path.exists(directory)  # noqa: ASYNC240
            assert not marked("sleep\x0098764")
            assert not containers(container, directory.name)

    with owner.stdout:
        asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"network": "gateway"}, "cannot serve network = 'gateway'"),
        ({"environment": {"A": "1\n2"}}, "it has a newline"),
    ],
)
def test_what_containers_cannot_do_is_refused(
    container: ContainerDriver, limits: dict[str, object], problem: str
) -> None:
    async def run() -> None:
        async with leased(container, **limits) as lease:
            await lease.run(["true"])

    with pytest.raises(InputError, match=problem):
        asyncio.run(run())


def test_a_missing_program_is_named_and_its_promises_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    [check] = asyncio.run(check_sandboxes("podman"))
    assert not check.holds
    assert "there is no program podman" in check.result
    assert "podman info" in check.fix
    choose_driver("docker")
    try:
        with pytest.raises(SandboxError, match="there is no program docker"):
            asyncio.run(Sandbox().run(["true"]))
    finally:
        choose_driver("bubblewrap")
