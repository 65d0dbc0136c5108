"""Attempts to leave a sandbox, in one and without one; the run without one is contained by namespaces of its own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.sandbox.driver import DriverName
from agentrl.sandbox.sandbox import Sandbox, make_driver

if TYPE_CHECKING:
    from collections.abc import Callable

ATTEMPTS = Path(__file__).with_name("attempts.py")
PYTHON = "/usr/bin/python3"
WRITABLE = ("/etc", "/usr/bin", "/usr/local/lib", "/root", "/home", "/var/tmp", "/opt", "/", "/dev/shm", "/tmp")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Host:
    """What must not be reached, laid out on this machine: files, sockets, keys, memory, processes."""

    base: Path
    canary: str
    targets: dict[str, Any]

    def judge(self, name: str, started: float, heartbeat: float) -> tuple[bool, str]:
        """Whether an attempt that only the host can judge got through."""
        if name == "write_outside":
            directories = [*WRITABLE, str(self.base / "secret")]
            written = [path for path in directories if os.path.exists(f"{path}/escape-{self.targets['tag']}")]
            for path in written:
                Path(path, f"escape-{self.targets['tag']}").unlink()
            return bool(written), f"{written}"
        if name == "time_bomb":
            return heartbeat > started + 0.5, f"last heartbeat {heartbeat - started:+.1f} s after the end"
        return False, ""


def lay_out(stack: ExitStack, *, control: bool) -> Host:
    """Lay out a host's secrets; the stack removes them."""
    base = Path(tempfile.mkdtemp(prefix="agentrl-escapes-"))
    stack.callback(shutil.rmtree, base, ignore_errors=True)
    base.chmod(0o755)
    canary, tag = f"canary-{secrets.token_hex(12)}", secrets.token_hex(4)
    os.environ["OPENAI_API_KEY"] = canary
    stack.callback(os.environ.pop, "OPENAI_API_KEY", None)
    victim = subprocess.Popen(["/bin/sleep", "600"])
    stack.callback(victim.wait)
    stack.callback(victim.kill)
    targets = {
        "control": control,
        "canary": canary[::-1],
        "tag": tag,
        "owner": os.getpid(),
        "victim": victim.pid,
        "address": "127.0.0.1",
        "uts": os.readlink("/proc/self/ns/uts"),
        "writable": [*WRITABLE, str(base / "secret")],
    }
    host = Host(base, canary, targets)
    targets |= _files(host, stack) | _servers(host, stack) | _memory(host, stack)
    return host


def _files(host: Host, stack: ExitStack) -> dict[str, str]:
    """Write secret files, and open descriptors that a careless owner lets its children inherit."""
    names = {"secret": "secret/canary", "answer": "tasks/t1/answer.txt", "sibling": "other/sibling.txt"}
    for name in (*names.values(), "run/control.db"):
        path = host.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(host.canary)
    (host.base / "run/control.db").chmod(0o600)
    for path, flags in ((host.base / names["secret"], os.O_RDONLY), (Path("/"), os.O_RDONLY | os.O_DIRECTORY)):
        file = os.open(path, flags)
        os.set_inheritable(file, True)
        stack.callback(os.close, file)
    return {key: str(host.base / name) for key, name in names.items()} | {"run": str(host.base / "run")}


def _servers(host: Host, stack: ExitStack) -> dict[str, Any]:
    """Serve the canary on loopback, on datagrams, and on Unix sockets with a path and without one."""

    def answer_all(server: socket.socket) -> None:
        while True:
            try:
                line, _ = server.accept()
                with line:
                    line.sendall(host.canary.encode())
            except OSError:
                return

    def answer_datagrams(server: socket.socket) -> None:
        while True:
            try:
                _, sender = server.recvfrom(100)
                server.sendto(host.canary.encode(), sender)
            except OSError:
                return

    def serve(server: socket.socket, answer: Callable[[socket.socket], None]) -> socket.socket:
        stack.callback(server.close)
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        return server

    def bound(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> socket.socket:
        server = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen(8)
        return server

    port = serve(bound(socket.AF_INET, ("127.0.0.1", 0)), answer_all).getsockname()[1]
    serve(bound(socket.AF_INET6, ("::1", port)), answer_all)
    udp = serve(bound(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM), answer_datagrams).getsockname()[1]
    abstract, path = f"agentrl-{host.targets['tag']}", f"{host.base}/gateway.sock"
    for address in (f"\0{abstract}", path):
        serve(bound(socket.AF_UNIX, address), answer_all)
    Path(path).chmod(0o777)
    return {"port": port, "udp": udp, "abstract": abstract, "socket": path}


def _memory(host: Host, stack: ExitStack) -> dict[str, Any]:
    """Put the canary into System V and POSIX shared memory and into the kernel's keyrings."""
    text, tag = host.canary.encode(), host.targets["tag"]
    key = 0x41000000 | int(tag[:6], 16)
    segment = _LIBC.shmget(key, 4096, 0o1666)
    _LIBC.shmat.restype = ctypes.c_void_p
    if segment >= 0:
        ctypes.memmove(_LIBC.shmat(segment, None, 0), text, len(text))
        stack.callback(_LIBC.shmctl, segment, 0, None)
    posix = Path("/dev/shm", f"agentrl-{tag}")
    posix.write_text(host.canary)
    stack.callback(posix.unlink, missing_ok=True)
    _LIBC.syscall(250, 1, 0)  # a session keyring
    for ring in (-3, -4):  # session, user
        _LIBC.syscall(248, b"user", b"agentrl:canary", text, len(text), ring)
    return {"shared_memory": key, "posix_shared_memory": posix.name}


async def _in_sandbox(host: Host, name: DriverName) -> tuple[bytes, float, float]:
    driver = make_driver(name)
    try:
        other, lease = [await driver.create(Sandbox(seconds=120, processes=128)) for _ in range(2)]
        await other.write({"/box/sibling.txt": host.canary.encode()})
        result = await lease.run([PYTHON, "-c", ATTEMPTS.read_text(), json.dumps(host.targets)])
        ended = time.time()
        await asyncio.sleep(1.5)
        try:
            heartbeat = float(await lease.read("/box/heartbeat") or b"0")
        except FileNotFoundError:
            heartbeat = 0.0
        return result.stdout, ended, heartbeat
    finally:
        await driver.close()


def _without_sandbox(host: Host) -> tuple[bytes, float, float]:
    work = host.base / "work"
    work.mkdir()
    command = [PYTHON, "-c", ATTEMPTS.read_text(), json.dumps(host.targets)]
    done = subprocess.run(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=False, timeout=200, check=False
    )
    ended = time.time()
    time.sleep(1.5)
    heartbeat = work / "heartbeat"
    return done.stdout, ended, float(heartbeat.read_text() or 0) if heartbeat.exists() else 0.0


def escapes(*, control: bool, driver: DriverName = "bubblewrap") -> dict[str, str]:
    """Run all attempts; return those that got through, with what they reached, and "attempts" with their number."""
    with ExitStack() as stack:
        host = lay_out(stack, control=control)
        output, ended, heartbeat = _without_sandbox(host) if control else asyncio.run(_in_sandbox(host, driver))
        outcomes = [json.loads(line) for line in output.decode("utf-8", "replace").splitlines()]
        found: dict[str, str] = {"attempts": str(len(outcomes))}
        for name, escaped, detail in outcomes:
            if escaped is None:
                escaped, detail = host.judge(name, ended, heartbeat)
            if escaped:
                found[name] = detail
        return found


def escapes_without_sandbox() -> dict[str, str]:
    """Run the attempts without a sandbox in mount, PID, network, UTS and IPC namespaces that nothing else is in."""
    script = "import json, sys; from tests.sandboxes.escapes import escapes; print(json.dumps(escapes(control=True)))"
    unshare = [
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    if os.getuid():
        unshare += ["--user", "--map-root-user"]
    mounts = "mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm"
    inside = f"ip link set lo up; {mounts} && exec {sys.executable} -c '{script}'"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*unshare, "sh", "-c", inside], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"the contained run without a sandbox failed: {done.stderr[-2000:]}")
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result
