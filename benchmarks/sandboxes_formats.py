"""Rewards of each task format in agentrl, beside those of the format's own code for the same answers.

The formats' packages are looked for below the directory AGENTRL_FORMATS, and a format without its package is left out:

    cd $AGENTRL_FORMATS
    for format in harbor:harbor verifiers:"verifiers uv" inspect:"inspect-ai openai" openenv:openenv-core \\
            nemo:nemo-gym servers:"mcp-server-time mcp-server-git"; do
        python3.12 -m venv ${format%%:*} && ${format%%:*}/bin/pip install ${format#*:}
    done
    pip install --no-deps --target bfcl bfcl-eval && pip install --no-deps --target gem gem-llm
"""

from __future__ import annotations

import asyncio
import contextlib
import http.cookiejar
import http.server
import inspect as inspect_module
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.records import EpisodeSpec, SeatBinding, Task
from agentrl.environment.registry import name_of
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, Failure, execute_episode, play
from agentrl_formats import runner
from agentrl_formats.bfcl import Bfcl, Interfaces, entries, parsed_call
from agentrl_formats.gem import Gem
from agentrl_formats.harbor import Harbor
from agentrl_formats.runner import RunnerEnvironment
from agentrl_formats.runners import Inspect, Verifiers
from agentrl_formats.servers import NemoGym, OpenEnv
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
        return outcome.text if isinstance(outcome, Failure) else outcome.header.reward

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


GEM_IDS = (
    *(
        "game:GuessTheNumber-v0-easy",
        "game:Mastermind-v0-easy",
        "game:Minesweeper-v0-easy",
        "game:TowerofHanoi-v0-easy",
    ),
    *("game:Sudoku-v0-easy", "game:FifteenPuzzle-v0-easy", "rg:chain_sum", "rg:leg_counting"),
)


def gem(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with gem itself: three seeds of eight environments, as many actions as end them, at most six."""
    if not (PACKAGES / "gem").exists():
        return None
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES / "gem")}
    command = [sys.executable, str(REFERENCES / "gem_games.py"), *GEM_IDS]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    sys.path.append(str(PACKAGES / "gem"))
    pairs = []
    for game in json.loads(done.stdout.splitlines()[-1]):
        data = {"id": game["id"], "seed": game["seed"], "arguments": {}}

        class Cut(Gem):
            """Ends after the actions that the reference played."""

            def session(self, task: Task, limit: int = len(game["actions"])) -> Any:
                made = super().session(task)
                answer, count = made.answer, itertools.count(1)

                async def counted(text: str, calls: Any) -> Any:
                    step = await answer(text, calls)
                    return {**step, "done": step["done"] or next(count) == limit}

                made.answer = counted  # type: ignore[method-assign]
                return made

        pairs.append((play(Cut, Task(id="t", data=data), game["actions"]).reward, game["reward"]))
    return pairs


def bfcl(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with BFCL's checker: each task with its reference calls, without the last, and with one too many."""
    if not (PACKAGES / "bfcl").exists():
        return None
    sys.path.append(str(PACKAGES / "bfcl"))
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    pairs = []
    for id, entry in list(entries("multi_turn_base").items())[: 5 if quick else None]:
        truth, interfaces = entry["ground_truth"], Interfaces(entry, long_context=False)
        variants = {
            "all": truth,  # the names become those of Python variables
            "without_the_last": [*truth[:-1], truth[-1][:-1]],
            "one_too_many": [[*truth[0], truth[0][-1]], *truth[1:]],
        }
        for name, turns in variants.items():
            written = [[[call] for call in turn] for turn in turns]
            theirs = multi_turn_checker(written, truth, entry, "multi_turn_base", f"{id}{name}")["valid"]
            replies: list[Any] = []
            for turn in turns:
                replies += [_as_json(interfaces, call) for call in turn]
                replies.append("done")
            ours = play(Bfcl, Task(id=id, data={"category": "multi_turn_base"}), replies).reward
            pairs.append((ours, float(theirs)))
    return pairs


def _as_json(interfaces: Interfaces, call: str) -> dict[str, Any]:
    """Return a reference call with all its arguments by name."""
    name, arguments, named = parsed_call(call)
    parameters = inspect_module.signature(interfaces.method(name)).parameters
    return {"name": name, "arguments": {**dict(zip(parameters, arguments, strict=False)), **named}}


@contextlib.contextmanager
def program(environment: str, name: str) -> Iterator[int]:
    """Run a server of `format_references`; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PACKAGES / environment / "bin" / "python"), str(REFERENCES / name), "serve", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    if process.poll() is not None:
                        raise SystemExit(f"{name} ended with status {process.returncode}") from None
                    time.sleep(0.1)
            yield port
        finally:
            process.kill()


class Guess(OpenEnv):
    """A text is the number."""

    def action(self, text: str) -> dict[str, Any]:
        return {"number": int(text)}


def openenv(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with OpenEnv's own client of the same server."""
    if not (PACKAGES / "openenv").exists():
        return None
    pairs = []
    with program("openenv", "openenv_guess.py") as port:
        played = reference("openenv", "openenv_guess.py", "play", str(port), *map(str, range(10)))
        for seed, (theirs, guesses) in enumerate(played):
            task = Task(id="t", data={"seed": seed, "url": f"http://127.0.0.1:{port}"})
            pairs.append((play(Guess, task, [str(guess) for guess in guesses]).reward, theirs))
    return pairs


def nemo(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Compare with requests to the same server: the reference calls of each row, half of them, and none."""
    if not (PACKAGES / "nemo").exists():
        return None
    file = reference("nemo", "nemo_workplace.py", "rows")
    pairs = []
    with program("nemo", "nemo_workplace.py") as port:
        url = f"http://127.0.0.1:{port}"
        tasks: Any = NemoGym.tasks("train", url=url, file=file, held_out=0.0)
        for task, line in zip(tasks, Path(file).read_text().splitlines(), strict=True):
            row = json.loads(line)
            truth = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in row["ground_truth"]]
            pairs += [
                (play(NemoGym, task, [*calls, "done"]).reward, _verified(url, row, calls))
                for calls in (truth, truth[: len(truth) // 2], [])
            ]
    return pairs


def _verified(url: str, row: dict[str, Any], calls: Sequence[dict[str, Any]]) -> float:
    """Return the reward that the server gives to calls that nobody has posted: it performs them itself."""
    cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    opener = urllib.request.build_opener(cookies)

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.loads(opener.open(request, timeout=60).read())

    post("/seed_session", {})
    output = [
        {"type": "function_call", "call_id": f"c{n}", "name": call["name"], "arguments": json.dumps(call["arguments"])}
        for n, call in enumerate(calls)
    ]
    response = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": output}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return float(post("/verify", {**row, "response": response})["reward"])


FORMATS: dict[str, Callable[[Path, bool], Sequence[Pair] | None]] = {
    "harbor": harbor,
    "verifiers": verifiers,
    "inspect": inspect,
    "bfcl": bfcl,
    "gem": gem,
    "openenv": openenv,
    "nemo": nemo,
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
