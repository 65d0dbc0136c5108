"""Runs one contestant: its server, its process, its log, and what all of them cost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import SCRIPTS, VLLM_ENVIRONMENT, Contender
from benchmarks.peers.environments import ROOT
from benchmarks.processes import ProcessTree

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits by spinning takes a core from the others
}
"""The environment of every contestant, but for `Training.threads`."""
START_S = 300.0
"""Seconds that a contestant may take before its first step, with the start of its server."""


@dataclass
class Samples:
    """Readings of a contestant's processes while it runs, at system-clock times."""

    cpu: list[tuple[float, float]] = field(default_factory=list)
    """(time, CPU seconds so far)."""
    machine: list[tuple[float, float]] = field(default_factory=list)
    """The same of all processes of the machine."""
    tokens: list[tuple[float, float]] = field(default_factory=list)
    """(time, tokens sampled so far), of a server."""
    peak_mib: float = 0.0
    """Largest sum of proportional set sizes."""

    def cpu_between(self, start: float, stop: float) -> float:
        """CPU seconds between two moments."""
        return at(self.cpu, stop) - at(self.cpu, start)

    def cores_of_others(self, start: float, stop: float) -> float:
        """CPU cores that other processes had between two moments, on average."""
        busy = at(self.machine, stop) - at(self.machine, start)
        return max(0.0, busy - self.cpu_between(start, stop)) / (stop - start)


def at(readings: list[tuple[float, float]], moment: float) -> float:
    """The value at a moment, linear between two readings and constant outside."""
    before = [reading for reading in readings if reading[0] <= moment]
    after = [reading for reading in readings if reading[0] > moment]
    if not before or not after:
        return (before or after)[-1 if before else 0][1] if readings else 0.0
    (t0, v0), (t1, v1) = before[-1], after[0]
    return v0 + (v1 - v0) * (moment - t0) / (t1 - t0)


class Sampler:
    """A thread that reads CPU seconds four times, and memory once, a second."""

    def __init__(self, server: str | None) -> None:
        self.samples = Samples()
        self._trees: dict[int, ProcessTree] = {}
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def add(self, pid: int) -> None:
        """Read this process and its descendants from now on."""
        self._trees[pid] = ProcessTree(pid)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        turn = 0
        while not self._stop.wait(0.25):
            now = time.time()
            self.samples.cpu.append((now, sum(tree.cpu_seconds() for tree in list(self._trees.values()))))
            self.samples.machine.append((now, machine_cpu_seconds()))
            if turn % 4 == 0:
                self.samples.peak_mib = max(self.samples.peak_mib, sum(map(pss_mib, descendants(list(self._trees)))))
            if turn % 4 == 2 and self._server is not None and (sampled := server_tokens(self._server)) is not None:
                self.samples.tokens.append((now, sampled))
            turn += 1


def machine_cpu_seconds() -> float:
    """CPU seconds of all processes since the machine started, with those that its host took away."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def descendants(roots: list[int]) -> list[int]:
    """The processes and everything below them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [pid for pid in roots if pid in parents]
    for pid in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def pss_mib(pid: int) -> float:
    """Proportional set size, in which shared pages count once over all processes; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def server_tokens(url: str) -> float | None:
    """Tokens that a vLLM server has sampled."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=2) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    counts = [float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(counts)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and everything below it."""
    for each in reversed(descendants([pid])):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def vllm_server(
    python: Path,
    model: Path,
    directory: Path,
    *,
    arguments: Sequence[str],
    kv_bytes: int,
    threads: int,
    sequences: int,
) -> Iterator[tuple[str, int]]:
    """A vLLM server that starts on a free port; yields its address and process id at once, since TRL waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--host=127.0.0.1", *arguments, f"--kv-cache-memory-bytes={kv_bytes}", f"--max-num-seqs={sequences}"]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET, **VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
            stdout=log,
            stderr=log,
            cwd=directory,
        )
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            kill_tree(process.pid)
            process.wait()


@dataclass(kw_only=True)
class Life:
    """One process of a contestant, from its start to its end or its kill."""

    events: list[dict[str, Any]]
    """Lines of its log: `begin`, and one per step."""
    killed: float | None = None

    @property
    def begin(self) -> float:
        """When training began."""
        return float(next(event["t"] for event in self.events if "begin" in event))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps, in order."""
        return [event for event in self.events if "step" in event]


class Runner:
    """A contestant in a directory of its own, which may be started several times."""

    def __init__(
        self, contender: Contender, python: Path, directory: Path, settings: dict[str, Any], *, threads: int
    ) -> None:
        self.contender, self.python, self.directory = contender, python, directory
        self.settings, self._threads = settings, threads
        self._lives = 0

    def live(
        self, sampler: Sampler, *, resume: bool, limit_s: float, until_step: int | None = None, kill: bool = False
    ) -> Life:
        """Run until its end, until the limit, or until a step is done.

        With `kill`, it gets SIGKILL half a step after `until_step`, which is the middle of the next one.
        """
        log = self.directory / f"log-{self._lives}.jsonl"
        settings_file = self.directory / f"settings-{self._lives}.json"
        self._lives += 1
        settings_file.write_text(json.dumps({**self.settings, "log": str(log), "resume": resume}))
        environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(self._threads)}
        environment.pop("PYTHONPATH", None)
        if self.settings["script"] == "naive.py":
            environment["PYTHONPATH"] = str(ROOT)  # for benchmarks.naive_loop
        output = self.directory / f"output-{self._lives}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [str(self.python), str(SCRIPTS / self.settings["script"]), str(settings_file)],
                cwd=self.directory,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            sampler.add(process.pid)
            try:
                life = Life(events=self._follow(process, log, limit_s, until_step))
                if kill and process.poll() is None:
                    ends = [step["t"] for step in life.steps]
                    time.sleep(statistics.median(b - a for a, b in itertools.pairwise(ends)) / 2)
            finally:
                ended = process.poll()
                kill_tree(process.pid)
                process.wait()
        if ended not in (None, 0) or not life.steps:
            raise SystemExit(f"{self.contender.title} failed ({ended}); {output} ends:\n{output.read_text()[-4000:]}")
        life.killed = time.time()
        life.events = read_log(log)
        return life

    @staticmethod
    def _follow(
        process: subprocess.Popen[bytes], log: Path, limit_s: float, until_step: int | None
    ) -> list[dict[str, Any]]:
        started = time.time()
        while True:
            events = read_log(log)
            last = max((event["step"] for event in events if "step" in event), default=0)
            begun = next((event["t"] for event in events if "begin" in event), None)
            is_late = time.time() > (started + START_S if begun is None else begun + limit_s)
            if process.poll() is not None or is_late or (until_step is not None and last >= until_step):
                return read_log(log)
            time.sleep(0.05)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a contestant's log."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
