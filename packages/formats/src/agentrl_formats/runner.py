"""Tasks that another project's package plays itself.

The package asks the model at the run's endpoint, as any external agent does, and returns the rewards. It has a Python
of its own, in a process for each worker that stands until the worker ends (`runner_program.py`), with your rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl import Endpoint, HarnessEnvironment, HarnessEpisode, InfrastructureError, Task, TaskSource
from agentrl.formats import EnvironmentDefinitionError, Split, expand_path, split_tasks, stated_reward

PROGRAM = Path(__file__).with_name("runner_program.py")
_LONGEST_LINE = 1 << 20
Command = tuple[str, ...]


class RunnerEnvironment(HarnessEnvironment):
    """Base of the environments whose tasks another package plays."""

    package: ClassVar[str]
    """Name of the package among `players`."""
    players: ClassVar[Path]
    """A Python file that imports only the package and the standard library. Its dictionary `PLAYERS` has a class by
    package, made with the settings of `tasks` in the package's Python. An instance has `contents`, a digest of each
    task by id; `prepare()`, called once before the first episode; and `play(request)`, which returns the rewards of the
    task `request["task"]`. It asks `request["model"]` at `request["url"]` with the key `request["key"]`, which is also
    in the variable AGENTRL_ENDPOINT_KEY."""
    seats = ("agent",)
    selects = ("python", "settings")

    @classmethod
    def tasks(
        cls,
        split: Split,
        *,
        seed: int = 0,
        taskset: str = "",
        python: str = "python3",
        path: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        held_out: float = 0.2,
    ) -> TaskSource:
        """Return the tasks of a taskset; its package is imported once, to list them.

        Args:
            split: the split.
            seed: not used.
            taskset: see the class.
            python: a Python that has the package, such as `/opt/verifiers/bin/python`.
            path: directories from which that Python also imports modules.
            config: see the class.
            held_out: the share of tasks that is held out.

        Raises:
            EnvironmentDefinitionError: the package cannot list the tasks.
        """
        python, path = expand_path(python), [os.path.abspath(expand_path(each)) for each in path]
        settings = {"taskset": taskset, "path": path, "config": dict(config or {})}
        command = (python, "-P", str(PROGRAM), str(cls.players), cls.package, "list", json.dumps(settings))
        try:
            listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise EnvironmentDefinitionError(
                f"{cls.__name__}: {python} cannot list the tasks of {taskset!r}: {said.strip()[-1000:]}"
            ) from error
        data = {"python": python, "settings": settings}
        contents: dict[str, str] = json.loads(listed.stdout)
        tasks = [Task(id=id, data={**data, "task": id, "content": content}) for id, content in contents.items()]
        return split_tasks(tasks, split, held_out)

    async def play(self, task: Task, endpoint: Endpoint) -> Any:
        """Let the package play the task.

        Raises:
            EnvironmentDefinitionError: the task is not the one that was listed.
            RuntimeError: it failed, and no limit was the cause.
        """
        data = task.data
        players = str(self.players)
        command = (data["python"], "-P", str(PROGRAM), players, self.package, "serve", json.dumps(data["settings"]))
        answer = await _standing(command).play(
            {
                "task": data["task"],
                "content": data["content"],
                "url": endpoint.url,
                "key": endpoint.key,
                "model": self.seats[0],
            }
        )
        if answer["refusal"]:
            raise EnvironmentDefinitionError(f"{data['settings']['taskset']}: {answer['refusal']}")
        if answer["error"] and endpoint.limit_reached() is None:
            raise RuntimeError(answer["error"])
        return answer["rewards"]

    def reward(self, task: Task, episode: HarnessEpisode) -> Mapping[str, float]:
        rewards: dict[str, Any] = episode.result or {}
        return {name: stated_reward(value, f"{self.package}, {name!r}") for name, value in rewards.items()}


class _Runner:
    """The owner's end of a standing process."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Play a task; cancelled, end its episode.

        Raises:
            InfrastructureError: the process ended.
        """
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LONGEST_LINE
                )
                self._reader = asyncio.get_running_loop().create_task(self._read(self._process))
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(self._process, {"number": number, **request})
            return await answer
        except asyncio.CancelledError:
            self._send(self._process, {"cancel": number})
            raise
        finally:
            del self._waiting[number]

    def _send(self, process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        unreadable = ""
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                waiting = self._waiting.get(answer.pop("number"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except ConnectionError:
            pass
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:  # too long, or no answer
            unreadable = f", after an unreadable answer: {error}"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        status = await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    InfrastructureError(f"{self._command[0]}: the runner ended with status {status}{unreadable}")
                )


_runners: dict[tuple[asyncio.AbstractEventLoop, Command], _Runner] = {}
"""The standing processes of each event loop; a worker has one loop. They end when their worker does."""


def _standing(command: Command) -> _Runner:
    loop = asyncio.get_running_loop()
    for key in [key for key in _runners if key[0].is_closed()]:
        del _runners[key]
    return _runners.setdefault((loop, command), _Runner(command))
