"""Files, models, data and strangers that attack a run from outside: `python -m benchmarks.oracle --part inputs`.

Each case is real: processes of the command line, links on the disk, sockets. A control is the same without the attack;
it must succeed, so that a refusal of everything is no success. A quick run has no controls.

Figures:
    hostile_inputs  cases that were judged, controls aside
    violations      cases that changed a foreign file, ended with another exit code than promised, or left out the name
    bricked         runs that could not be resumed after the attack was taken back
    runs_ended      viewers that an attack ended or made unreachable
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import agentrl
from agentrl.core.records import Task

LINKED = ("versions", "checkpoints", "steps", "versions/solver", "policies", "best")
REFUSED = (2, 74)
LIMIT_S = 300.0
"""Longest time of a process."""
STRANGERS, FILES = 400, 128
DEPTH = 5_000


class Deep(agentrl.Environment):
    """A task whose data are nested as deeply as an option says."""

    seats = ("solver",)

    @classmethod
    def tasks(cls, split: agentrl.Split, seed: int = 0, depth: int = 0) -> Sequence[Task]:
        """One task."""
        data: dict[str, object] = {}
        for _ in range(depth):
            data = {"deeper": data}
        return [Task(id="deep-task", data=data)]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """One turn."""
        await ctx.agent("solver").act(agentrl.user("Say something."))
        ctx.agent("solver").reward(1.0)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@contextmanager
def _started(*command: str, files: int = 0) -> Iterator[subprocess.Popen[str]]:
    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=limit,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _state(*folders: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for folder in folders for path in folder.rglob("*")}


def _links(root: Path, quick: bool, tally: Counter[str]) -> None:
    """A run directory with a link in the place of one of its directories is resumed."""
    place, steps = root / "links", 3
    place.mkdir()

    def resume(*more: str) -> subprocess.CompletedProcess[str]:
        return _run("tests.support.chaos_run", "scripted", str(place), "0", str(steps), *more)

    assert resume().returncode == 0
    for name in LINKED[:1] if quick else LINKED:
        steps += 1
        run, foreign = place / "run", root / f"foreign-{name.replace('/', '-')}"
        linked, held = run / name, root / "held"
        is_there = linked.exists()
        if is_there:
            linked.rename(held)
            shutil.copytree(held, foreign, symlinks=True)
        (foreign / "step_000001-0").mkdir(parents=True, exist_ok=True)
        (foreign / "step_000001-0" / "file.txt").touch()
        linked.symlink_to(foreign)
        before = _state(run, foreign)
        finished = resume("resume")
        is_named = finished.returncode in REFUSED and str(linked) in finished.stderr
        _judge(tally, f"link {name}", is_named and _state(run, foreign) == before, finished.stderr)
        linked.unlink()
        if is_there:
            held.rename(linked)
        if resume("resume").returncode:
            tally["bricked"] += 1


def _models(root: Path, quick: bool, tally: Counter[str]) -> None:
    """A damaged or hostile model is trained for a step."""
    from safetensors.torch import load_file, save_file

    package = Path(agentrl.__file__).parents[1] / "environments/calculator/model"

    def config(path: Path, **values: object) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def token(path: Path) -> None:
        file = path / "tokenizer.json"
        content = json.loads(file.read_text())
        last = content["added_tokens"][-1]
        content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "x" * 60_000})
        file.write_text(json.dumps(content))

    def weights(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        next(each for name, each in tensors.items() if name.endswith("down_proj.weight"))[:] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})

    attacks: dict[str, Callable[[Path], None]] = {
        "control": lambda path: None,
        "kernel": lambda path: config(path, attn_implementation="kernels-community/evil"),
        "width": lambda path: config(path, hidden_size=10**8),
        "token": token,
        "tensor": weights,
    }
    for name in ("kernel",) if quick else attacks:
        path = Path(shutil.copytree(package, root / f"model-{name}"))
        attacks[name](path)
        small = ("--steps=1", "--policies.solver.step_size=8", "--evaluation.tasks=0", "--max_in_flight=16")
        places = (f"--model.path={path}", f"--directory={root / 'runs'}", f"--name={name}")
        finished = _run("agentrl.cli", "train", "examples/01_tool_use.toml", *places, *small)
        if name == "control":
            assert finished.returncode == 0, finished.stderr
        else:
            named = finished.returncode == 2 and str(path) in finished.stderr and "max_context" not in finished.stderr
            _judge(tally, f"model {name}", named, finished.stderr)


def _tasks(root: Path, quick: bool, tally: Counter[str]) -> None:
    """Task data nested a little, and thousands deep."""
    for depth in (DEPTH,) if quick else (10, DEPTH):
        options = (f"--environment.options.depth={depth}", f"--directory={root / 'runs'}", f"--name=depth-{depth}")
        small = ("--steps=1", "--policies.solver.step_size=8", "--evaluation.tasks=0", "--max_in_flight=16")
        environment = "--environment.id=benchmarks.oracle_inputs:Deep"
        finished = _run("agentrl.cli", "train", "examples/01_tool_use.toml", environment, *options, *small)
        if depth == DEPTH:
            _judge(tally, "deep task", finished.returncode == 2 and "deep-task" in finished.stderr, finished.stderr)
        else:
            assert finished.returncode == 0, finished.stderr


def _viewer(root: Path, tally: Counter[str]) -> None:
    """More half-sent and malformed requests than the viewer has files."""
    with _started("agentrl.cli", "run", "serve", str(root / "links/run"), "--json", files=FILES) as viewer:
        assert viewer.stdout is not None
        address = json.loads(viewer.stdout.readline())["address"]
        place, _, token = address.partition("#token=")
        port = int(place.rstrip("/").rpartition(":")[2])
        held = []
        for number in range(STRANGERS):
            held.append(socket.create_connection(("127.0.0.1", port)))
            try:
                held[-1].sendall(b"\0\r\n\r\n" if number % 2 else b"GET / HTTP/1.1\r\nHost: ")
            except OSError:  # it was closed
                continue
        asked = urllib.request.Request(f"{place}ask/run", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                is_reachable = answer.status == 200
        except OSError:
            is_reachable = False
        lines = Path(f"/proc/{viewer.pid}/fd/2").read_text().count("\n")
        if not is_reachable:
            tally["runs_ended"] += 1
        _judge(tally, "viewer", is_reachable and lines < 10, f"{lines} lines of errors, reachable: {is_reachable}")
        for each in held:
            each.close()


def _judge(tally: Counter[str], name: str, is_right: bool, why: str) -> None:
    tally["hostile_inputs"] += 1
    tally["violations"] += not is_right
    print(f"{name}: {'right' if is_right else f'WRONG: {why[-500:]}'}", flush=True)


def measure(quick: bool) -> dict[str, float | None]:
    """Run all cases; in a quick run a sample."""
    os.chdir(Path(__file__).parents[1])
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="hostile-inputs-") as scratch:
        root = Path(scratch)
        _links(root, quick, tally)
        _viewer(root, tally)
        _models(root, quick, tally)
        _tasks(root, quick, tally)
    return {name: float(tally[name]) for name in ("hostile_inputs", "violations", "bricked", "runs_ended")}
