"""Rewards of each task format in agentrl, beside those of the format's own code for the same answers.

The formats' packages are looked for below the directory AGENTRL_FORMATS, and a format without its package is left out:

    cd $AGENTRL_FORMATS
    for format in harbor:harbor verifiers:"verifiers uv" inspect:"inspect-ai openai"; do
        python3.12 -m venv ${format%%:*} && ${format%%:*}/bin/pip install ${format#*:}
    done
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.records import EpisodeSpec, SeatBinding, Task
from agentrl.environment.registry import name_of
from agentrl.formats import runner
from agentrl.formats.harbor import Harbor
from agentrl.formats.runner import Inspect, RunnerEnvironment, Verifiers
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, execute_episode, play
from tests.support.harbor_suite import ANSWERS, MEDIAN, ROOTS, WORD, write_task

PACKAGES = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))
REFERENCES = Path(__file__).parent / "format_references"
SUMS = Path(__file__).parents[1] / "tests" / "support" / "sums"
"""A taskset of verifiers and a task of Inspect with the same twelve sums."""
Pair = tuple[Any, Any]
"""A reward in agentrl, and by the format's own code."""


def reference(environment: str, program: str, *arguments: str) -> Any:
    """Run a program of `format_references` with the Python of a format; return the JSON of its last line."""
    done = subprocess.run(
        [PACKAGES / environment / "bin" / "python", REFERENCES / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def harbor(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Each answer is the solution of a task, which Harbor's oracle runs and its verifier grades."""
    if not (PACKAGES / "harbor").exists():
        return None
    commands = {}
    for name, answers in ANSWERS.items():
        for kind, command in answers.items():
            commands[f"{name}-{kind}".replace(" ", "-")] = command
            solution = {"solution/solve.sh": f"#!/bin/bash\n{command}\n"}
            files = MEDIAN if name == "median" else WORD
            write_task(scratch / f"{name}-{kind}".replace(" ", "-"), {**files, **solution})
    theirs = reference("harbor", "harbor_trials.py", str(scratch))
    tasks = Harbor.tasks("train", directory=str(scratch), roots=ROOTS, held_out=0.0)
    pairs = []
    for task in tasks:  # type: ignore[attr-defined]
        call = {"name": "bash", "arguments": {"command": commands[task.id]}}
        pairs.append((play(Harbor, task, [call, "done"]).reward, theirs[task.id]["reward"]))
    return pairs


def sum_reply(number: int) -> str:
    """Answer the sum `number` + (3 `number` + 1): right, wrong, or in too many words."""
    return (str(4 * number + 1), str(4 * number + 2), f"The answer is {4 * number + 1}.")[number % 3]


class _ScriptedModel(http.server.BaseHTTPRequestHandler):
    """Chat completions that answer sums, streamed or not, for the formats' own commands."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.search(r"What is (\d+) \+", json.dumps(body["messages"]))
        assert found is not None
        message = {"role": "assistant", "content": sum_reply(int(found[1]))}
        choice = {"index": 0, "finish_reason": "stop"}
        answer = {"id": "c", "created": 1, "model": body["model"]}
        if body.get("stream"):
            chunk = {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
            sent, kind = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream"
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            whole = {**answer, "object": "chat.completion", "choices": [{**choice, "message": message}], "usage": usage}
            sent, kind = json.dumps(whole), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent.encode())

    def log_message(self, *message: object) -> None:
        pass


@contextlib.contextmanager
def scripted_model() -> Iterator[dict[str, str]]:
    """Serve the model; yields the environment of a command that asks it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ScriptedModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        yield {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "PYTHONPATH": str(SUMS)}
        server.shutdown()


def verifiers(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with `vf-eval`."""
    programs = PACKAGES / "verifiers" / "bin"
    if not programs.exists():
        return None
    with scripted_model() as environment:
        environment["PATH"] = f"{programs}:{environment['PATH']}"
        command = [*(programs / "vf-eval", "sums-v1", "-m", "agent", "--no-push", "-o", scratch)]
        command += ["--client.base-url", environment["OPENAI_BASE_URL"], "--client.api-key-var", "OPENAI_API_KEY"]
        command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    [log] = scratch.rglob("traces.jsonl")
    episodes = [json.loads(line) for line in log.read_text().splitlines()]
    theirs = {
        str(episode["task"]["data"]["idx"]): sum(
            reward["score"] * reward["weight"] for reward in episode["traces"][0]["rewards"].values()
        )
        for episode in episodes
    }
    return played_sums(Verifiers, "verifiers", "sums-v1", theirs)


def inspect(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with `inspect eval`."""
    if not (PACKAGES / "inspect").exists():
        return None
    with scripted_model() as environment:
        command = [*(PACKAGES / "inspect/bin/inspect", "eval", "sums_task.py", "--model", "openai/agent")]
        command += ["-M", "responses_api=false", "--log-dir", scratch, "--log-format", "json", "--display", "none"]
        subprocess.run(command, env=environment, cwd=SUMS, stdout=subprocess.DEVNULL, check=True)
    [log] = scratch.glob("*.json")
    grades = {"C": 1.0, "I": 0.0}
    theirs = {
        str(sample["id"]): sum(grades[score["value"]] for score in sample["scores"].values())
        for sample in json.loads(log.read_text())["samples"]
    }
    return played_sums(Inspect, "inspect", "sums_task:sums", theirs)


_cpu_per_episode: dict[str, float] = {}
"""CPU seconds of a runner's processes for an episode, after the first, by format."""


def played_sums(
    environment: type[RunnerEnvironment], package: str, taskset: str, theirs: dict[str, float]
) -> Sequence[Pair]:
    """Play the sums, two at a time after the first."""
    python = str(PACKAGES / package / "bin" / "python")
    tasks: Any = environment.tasks("train", taskset=taskset, python=python, path=[str(SUMS)], held_out=0.0)

    two = asyncio.Semaphore(2)

    async def reward(task: Task) -> float | str | None:
        seats = {"agent": SeatBinding(POLICY)}
        spec = EpisodeSpec(
            episode_id="e", environment=name_of(environment), task=task, seed=0, seats=seats, group_id="g"
        )
        reply = [*sum_reply(int(task.id)).encode(), STOP_TOKEN]
        async with two:
            outcome = await execute_episode(environment, spec, lambda *request: reply)
        return outcome if isinstance(outcome, str) else outcome.header.reward

    async def play_all() -> list[float | str | None]:
        first = await reward(tasks[0])
        [standing] = [each for (loop, _), each in runner._runners.items() if not loop.is_closed()]
        assert standing._process is not None
        before = cpu_seconds(standing._process.pid)
        others = await asyncio.gather(*map(reward, tasks[1:]))
        _cpu_per_episode[package] = (cpu_seconds(standing._process.pid) - before) / len(others)
        return [first, *others]

    return [(ours, theirs[task.id]) for task, ours in zip(tasks, asyncio.run(play_all()), strict=True)]


def cpu_seconds(process: int) -> float:
    """CPU time of a process and the ended processes that it waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


FORMATS: dict[str, Callable[[Path, bool], Sequence[Pair] | None]] = {
    "harbor": harbor,
    "verifiers": verifiers,
    "inspect": inspect,
}


def figures(quick: bool) -> dict[str, float | None]:
    """Compare the formats whose packages there are."""
    counts: dict[str, tuple[int, int]] = {}
    for name, compare in FORMATS.items():
        with tempfile.TemporaryDirectory(prefix="agentrl-formats-") as scratch:
            pairs = compare(Path(scratch), quick)
        if pairs is None:
            print(f"  {name}: its package is not below {PACKAGES}", flush=True)
            continue
        counts[name] = (sum(_equal(ours, theirs) for ours, theirs in pairs), len(pairs))
        cpu = f", {_cpu_per_episode[name]:.2f} CPU s an episode" if name in _cpu_per_episode else ""
        print(f"  {name}: {counts[name][0]} of {counts[name][1]} rewards equal{cpu}", flush=True)
    total = sum(number for _, number in counts.values())
    return {
        "formats": float(len(counts)) if counts else None,
        "format_rewards": float(total) if counts else None,
        "format_rewards_equal": sum(equal for equal, _ in counts.values()) / total if total else None,
        "harness_cpu_per_episode": max(_cpu_per_episode.values(), default=None),
    }


def _equal(ours: Any, theirs: Any) -> bool:
    return isinstance(ours, float) and isinstance(theirs, int | float) and abs(ours - theirs) < 1e-9
