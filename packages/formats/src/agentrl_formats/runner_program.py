"""The standing process that plays tasks of another project's package, with the Python of that package.

It imports the package once and forks for each episode, so an episode leaves no state behind. What the first episodes
still imported is imported here too, so that later ones pay for no imports.
It uses nothing of agentrl. Requests and answers are lines of JSON on standard input and output; the process ends with
its input, and its episodes with it.

    python -P runner_program.py PLAYERS PACKAGE list|serve SETTINGS

PLAYERS is a Python file with a dictionary `PLAYERS` of classes by package; see `RunnerEnvironment.players`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import unicodedata
from typing import Any, NoReturn

_ERROR_CHARACTERS = 1_000
_ANSWER_BYTES = 1 << 19
"""Longest answer of an episode; its owner reads lines of up to twice that."""
_SET_DEATH_SIGNAL, _BECOME_SUBREAPER = 1, 36


def _answer(played: Any, request: dict[str, Any]) -> dict[str, Any]:
    id = request["task"]
    if played.contents.get(id) != request["content"]:
        refusal = (
            f"task {id!r} differs from the one that was listed, so the tasks are drawn or shuffled anew in each "
            "process; give the shuffle a seed"
        )
        return {"rewards": {}, "error": "", "refusal": refusal}
    try:
        stated = played.play(request)
        rewards = {_identifier(name): value for name, value in stated.items()}
        if len(rewards) < len(stated):
            raise ValueError(f"the names of rewards are equal in letters and digits: {', '.join(stated)}")
        return {"rewards": rewards, "error": "", "refusal": ""}
    except Exception as error:  # noqa: BLE001 - foreign code: any exception is the answer
        return {"rewards": {}, "error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS], "refusal": ""}


def _identifier(name: str) -> str:
    """Return the name of a reward in ASCII letters, digits and underscores, such as `_5_shot` or `precision`."""
    plain = unicodedata.normalize("NFKD", name)
    letters = "".join(c if c.isascii() and c.isalnum() else "_" for c in plain if not unicodedata.combining(c))
    return f"_{letters}" if letters[:1].isdigit() else letters


class Server:
    """Forks a process for each request, and passes its answer on."""

    def __init__(self, played: Any, output: int) -> None:
        self.played, self.output = played, output
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1)
        self.selector = selectors.DefaultSelector()
        self.episodes: dict[int, tuple[int, int, bytearray]] = {}
        """Process, number and answer of each episode, by the read end of its pipe."""

    def serve(self) -> None:
        self.selector.register(0, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in self.selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd:
                    self.on_answer(key.fd, data)
                elif not data:
                    return
                else:
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self.on_request(json.loads(line))

    def on_request(self, request: dict[str, Any]) -> None:
        if "cancel" in request:
            for process, number, _ in self.episodes.values():
                if number == request["cancel"]:
                    _kill(process)
            return
        reading, writing = os.pipe()
        gc.freeze()  # a collection in the new process would copy all pages
        process = os.fork()
        if process == 0:
            self.play_and_exit(request, writing)
        os.close(writing)
        self.episodes[reading] = (process, request["number"], bytearray())
        self.selector.register(reading, selectors.EVENT_READ)

    def play_and_exit(self, request: dict[str, Any], writing: int) -> NoReturn:
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            os.environ["AGENTRL_ENDPOINT_KEY"] = request["key"]
            imported = set(sys.modules)
            fields = _answer(self.played, request)
            answer = json.dumps({**fields, "modules": sorted(set(sys.modules) - imported)}).encode() + b"\n"
            while answer:
                answer = answer[os.write(writing, answer) :]
        finally:
            os._exit(0)

    def on_answer(self, reading: int, data: bytes) -> None:
        process, number, answer = self.episodes[reading]
        answer += data[: _ANSWER_BYTES + 1 - len(answer)]
        if data and not answer.endswith(b"\n"):  # processes that the episode left may keep its end of the pipe open
            return
        self.selector.unregister(reading)
        os.close(reading)
        del self.episodes[reading]
        _kill(process)
        _, status = os.waitpid(process, 0)
        self.end_orphans()
        try:
            if len(answer) > _ANSWER_BYTES:
                raise ValueError("too long")
            fields = json.loads(answer)
            for module in fields.pop("modules"):  # the next episode finds them imported
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        except ValueError:
            fields = {
                "rewards": {},
                "error": f"the episode's process ended with status {status} and {len(answer)} bytes",
                "refusal": "",
            }
        line = json.dumps({"number": number, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self.output, line) :]

    def end_orphans(self) -> None:
        """End what ended episodes started, which is now this process's own, also if it has a session of its own."""
        episodes = {process for process, _, _ in self.episodes.values()}
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            orphans = {int(process) for process in file.read().split()} - episodes
        for process in orphans:
            _kill(process)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)

    def close(self) -> None:
        for process, _, _ in self.episodes.values():
            _kill(process)
            os.waitpid(process, 0)
        self.episodes.clear()
        self.end_orphans()


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def main() -> None:
    """List the tasks, or play them."""
    output = os.dup(1)
    os.dup2(2, 1)  # what the packages print is not an answer
    players, package, verb, settings = *sys.argv[1:4], json.loads(sys.argv[4])
    sys.path[:0] = settings["path"]
    paths = [*settings["path"], *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for tool servers, which a taskset starts
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"  # verifiers runs uv
    played = runpy.run_path(players)["PLAYERS"][package](settings)
    if verb == "list":
        os.write(output, json.dumps(played.contents).encode())
        return
    played.prepare()
    server = Server(played, output)
    try:
        server.serve()
    finally:
        server.close()


if __name__ == "__main__":
    main()
