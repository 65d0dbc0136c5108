"""Hosts on one machine: network namespaces joined by a bridge, each with a private /tmp, /dev/shm, /run and HOME.

Nothing is shared but TCP and what is installed. Needs root and iproute2: a test that uses it is skipped by name
without. Traffic stays inside the namespaces; whatever runs in them ends with `down`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PREPARE = """
set -e; own=$1 checkout=$2
if [[ $checkout == /tmp/* ]]; then mkdir -p "$own$checkout"; mount --bind "$checkout" "$own$checkout"; fi
mount --bind "$own/run" /run; mount --rbind "$own/tmp" /tmp; mount -t tmpfs -o size=4g shm /dev/shm
touch /run/ready; exec sleep infinity
"""
CHECKOUT = Path(__file__).resolve().parents[2]
"""Is installed on every host: seen there also if it lies in /tmp, of which each has its own."""
START_S = 120.0
"""Longest time for a Ray node to start."""


def unavailable() -> str:
    """The reason why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    made = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=False)
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _command(process: int) -> str:
    """Its command line; empty where it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Hosts:
    """Hosts 1 … n at 10.78.0.1 … 10.78.0.n, with their disks; both are there until the context ends.

    Args:
        count: number of hosts.
    """

    def __init__(self, count: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="agentrl-hosts-", dir="/var/tmp"))
        """Holds the disk of each host, by its number; outside /tmp, of which each has its own."""
        self.count = count
        self._name = f"a{os.getpid() % 100000}"
        self._holders: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        bridge = f"{self._name}b"
        try:
            _run("ip", "netns", "add", bridge)
            _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", bridge, "link", "set", "br0", "up")
            for number in range(1, self.count + 1):
                self._add(number, bridge)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, number: int, bridge: str) -> None:
        name, inside, outside = self._space(number), f"v{self._name}-{number}", f"w{self._name}-{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
        _run("ip", "link", "set", inside, "netns", name)
        _run("ip", "link", "set", outside, "netns", bridge)
        _run("ip", "-n", name, "link", "set", inside, "name", "eth0")
        _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _run("ip", "-n", name, "link", "set", link, "up")
        _run("ip", "-n", bridge, "link", "set", outside, "master", "br0")
        _run("ip", "-n", bridge, "link", "set", outside, "up")
        own = self.directory / str(number)
        (own / "run").mkdir(parents=True)
        (own / "tmp" / "home").mkdir(parents=True)
        (own / "tmp").chmod(0o1777)
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-c",
            _PREPARE,
            "_",
            str(own),
            str(CHECKOUT),
        ]
        self._holders[number] = subprocess.Popen(["ip", "netns", "exec", name, *command])
        deadline = time.monotonic() + START_S
        while not (own / "run" / "ready").exists():
            assert time.monotonic() < deadline, "the host did not start"
            assert self._holders[number].poll() is None, "the host ended"
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        for number in range(1, self.count + 1):
            self.kill(number)
            if number in self._holders:
                self._holders[number].kill()
                self._holders[number].wait()
            subprocess.run(["ip", "netns", "del", self._space(number)], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", f"{self._name}b"], check=False, capture_output=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _space(self, number: int) -> str:
        return f"{self._name}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """The address of a host."""
        return f"10.78.0.{number}"

    def entering(self, number: int) -> list[str]:
        """The words before a command that runs on a host."""
        return ["nsenter", "-t", str(self._holders[number].pid), "-n", "-m", "--"]

    def start(
        self, number: int, command: Sequence[str], *, hide: Path | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a command on a host; with `hide`, it and what it starts see an empty directory in that place."""
        environment = options.pop("env", None) or os.environ
        assert isinstance(environment, Mapping)
        mounts = "" if hide is None else 'mount -t tmpfs none "$1"; '
        script = f'{mounts}cd "$2"; shift 2; exec "$@"'
        entered = self.entering(number)
        private = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", script, "_"]
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            [*entered, *private, str(hide or ""), os.getcwd(), *command],
            env={**environment, "HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": os.getcwd()},
            text=True,
            **options,
        )

    def run(self, number: int, command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        process = self.start(number, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(list(command), process.returncode, output, errors)

    def start_ray(
        self,
        numbers: Sequence[int],
        *,
        head: int = 1,
        gpus: int = 0,
        env: Mapping[str, str] | None = None,
        hide: Path | None = None,
    ) -> None:
        """Start a Ray node on each of these hosts, with what `hide` names hidden; on all but the head after that.

        With `gpus`, Ray counts so many on each, which are not there: what asks for one computes on the CPU.
        """
        for number in numbers:
            is_head = number == head
            place = ["--head", "--port=6379", "--include-dashboard=false"]
            join = [f"--address={self.address(head)}:6379"]
            own = [f"--node-ip-address={self.address(number)}", "--num-cpus=4", "--object-store-memory=80000000"]
            own += [f"--num-gpus={gpus}"] if gpus else []
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *(place if is_head else join), *own]
            found = self.run(
                number,
                [*ray, "--disable-usage-stats"],
                env={**os.environ, "RAY_worker_niceness": "0", **(env or {})},
                hide=None if is_head else hide,
            )
            assert found.returncode == 0, found.stdout + found.stderr

    def processes(self, number: int, *marks: str) -> list[int]:
        """Ids of the processes on a host, without the one that holds it open.

        Args:
            number: of the host.
            marks: only processes whose command line contains one of these.
        """
        found = self._all_processes(number)
        return [each for each in found if not marks or any(mark in _command(each) for mark in marks)]

    def roles(self, number: int, marks: Mapping[str, Sequence[str]]) -> set[str]:
        """The roles of which a process runs on a host.

        Args:
            number: of the host.
            marks: texts by role, of which the command line of each of its processes contains one.
        """
        commands = list(map(_command, self._all_processes(number)))
        return {role for role, own in marks.items() if any(mark in each for mark in own for each in commands)}

    def _all_processes(self, number: int) -> list[int]:
        answer = subprocess.run(
            ["ip", "netns", "pids", self._space(number)], capture_output=True, text=True, check=False
        )
        holder = self._holders[number].pid if number in self._holders else 0
        return [int(line) for line in answer.stdout.split() if int(line) != holder]

    def cut(self, number: int) -> None:
        """Unplug a host's network."""
        _run("ip", "-n", f"{self._name}b", "link", "set", f"w{self._name}-{number}", "down")

    def plug(self, number: int) -> None:
        """Put it back."""
        _run("ip", "-n", f"{self._name}b", "link", "set", f"w{self._name}-{number}", "up")

    def kill(self, number: int) -> None:
        """Kill all that runs on a host, as if its power had failed; its disk stays."""
        for process in self.processes(number):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
