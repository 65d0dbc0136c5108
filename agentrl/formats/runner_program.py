"""The standing process that plays tasks of verifiers or Inspect, with the Python of the format's own package.

It imports the package once and forks for each episode, so an episode leaves no state behind. What the first episodes
still imported is imported here too, so that later ones pay for no imports.
It uses nothing of agentrl. Requests and answers are lines of JSON on standard input and output; the process ends with
its input, and its episodes with it.

    python -P runner_program.py verifiers|inspect list|serve SETTINGS
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Iterable
from typing import Any, NoReturn

KEY_VARIABLE = "AGENTRL_ENDPOINT_KEY"
_ERROR_CHARACTERS = 1_000
_ANSWER_BYTES = 1 << 19
"""Longest answer of an episode; its owner reads lines of up to twice that."""
_SET_DEATH_SIGNAL, _BECOME_SUBREAPER = 1, 36


class Verifiers:
    """A taskset of verifiers. Its harness asks the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig
        from verifiers.v1.utils.loaders import default_harness_id, environment_class, load_environment

        config, taskset = settings["config"], settings["taskset"]
        environment = environment_class(taskset, config.get("id", ""))
        if not issubclass(environment, SingleAgentEnv):
            raise SystemExit(
                f"a taskset with an environment of its own ({environment.__name__}) is not supported: only the rewards "
                "of a single agent are read; write its run() as that of an agentrl.Environment, with a seat per agent"
            )
        harness = default_harness_id(taskset)  # "bash" unless the taskset has one
        sections = {
            **config,
            "taskset": {"id": taskset, **config.get("taskset", {})},
            "agent": {
                "harness": {"id": "null" if harness == "bash" else harness},
                "runtime": {"type": "subprocess"},
                **config.get("agent", {}),
            },
        }
        self.environment = load_environment(SingleAgentEnvConfig.model_validate(sections))
        tasks = list(self.environment.taskset)
        self.tasks = _unique((str(task.data.idx), task) for task in tasks)
        self.contents = {id: _digest(task.data.model_dump(exclude={"idx"})) for id, task in self.tasks.items()}

    def prepare(self) -> None:
        asyncio.run(self._prepare())

    async def _prepare(self) -> None:
        """Let the harnesses prepare their programs, which each process does once."""
        from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

        runtime = SubprocessRuntime(SubprocessConfig())
        await runtime.start()
        for harness in self.environment._harnesses.values():
            await harness.setup(runtime)
        await runtime.stop()

    def play(self, request: dict[str, Any]) -> dict[str, float]:
        return asyncio.run(self._play(request))

    async def _play(self, request: dict[str, Any]) -> dict[str, float]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        client = EvalClientConfig(base_url=request["url"], api_key_var=KEY_VARIABLE)
        context = ModelContext(model=request["model"], client=client, sampling=SamplingConfig())
        async with self.environment.serving():
            [slot] = self.environment.slots(self.tasks[request["task"]])
            episode = await self.environment.run_slot(slot, context)
        errors = [error.message for holder in (episode, *episode.traces) for error in holder.errors]
        if errors or not episode.ok:
            raise RuntimeError("; ".join(errors) or "the episode failed without an error")
        rewards: dict[str, float] = {}
        for trace in episode.traces:
            for name, reward in trace.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + reward.score * reward.weight
        return rewards


class Inspect:
    """A task of Inspect. Its solver asks the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["INSPECT_DISPLAY"] = "none"
        module, _, name = settings["taskset"].partition(":")
        self.task = getattr(importlib.import_module(module), name)(**settings["config"])
        if not self.task.scorer:
            raise SystemExit(f"the Inspect task {name} has no scorer, so nothing states its rewards; give it one")
        equal = collections.Counter[str]()
        samples, self.contents = [], {}
        for sample in self.task.dataset:
            content = _digest(sample.model_dump(exclude={"id"}))
            if sample.id is None:  # a position would name another sample after a shuffle
                equal[content] += 1
                sample.id = content if equal[content] == 1 else f"{content}-{equal[content]}"
            samples.append((str(sample.id), sample))
            self.contents[str(sample.id)] = content
        self.tasks = _unique(samples)

    def prepare(self) -> None:
        pass

    def play(self, request: dict[str, Any]) -> dict[str, float]:
        from inspect_ai import Epochs
        from inspect_ai import eval as evaluate
        from inspect_ai.model import get_model
        from inspect_ai.scorer import value_to_float

        model = get_model(
            f"openai/{request['model']}", base_url=request["url"], api_key=request["key"], responses_api=False
        )
        only = self.tasks[request["task"]]
        self.task.dataset = self.task.dataset.filter(lambda sample: sample.id == only.id)
        with tempfile.TemporaryDirectory() as logs:
            [log] = evaluate(
                self.task,
                model=model,
                epochs=Epochs(1, "mean"),  # reducers such as pass_at_2 refuse a single epoch
                log_dir=logs,
                display="none",
                fail_on_error=True,
                max_retries=0,
            )
            if log.status != "success":
                raise RuntimeError(str(log.error.message if log.error else log.status))
            [sample] = log.samples
            scores = sample.scores  # read from the log when it is first used
        if not scores:
            raise ValueError("no scorer gave a score")
        convert, rewards = value_to_float(), {}
        for name, score in scores.items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            for part, value in values.items():
                why = getattr(score, "reason", None) or getattr(score, "explanation", None)
                if why and isinstance(value, float) and value != value:  # as `Score.unscored` states it
                    raise ValueError(f"the scorer {name} left the sample unscored: {why}")
                number = convert(value)
                if number == 0.0 and not _is_zero(value):  # Inspect's warning that it cannot convert the value
                    raise ValueError(f"the score {name} is {value!r}, which is no number")
                rewards[f"{name}_{part}" if part else name] = number
        return rewards


def _unique(tasks: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return tasks by id."""
    by_id: dict[str, Any] = {}
    for id, task in tasks:
        if id in by_id:
            raise SystemExit(f"two tasks have the id {id!r}; give each its own")
        by_id[id] = task
    return by_id


def _digest(content: Any) -> str:
    """Return a digest of a task's content, which is equal in each process that loads it."""
    text = json.dumps(_without_ids(content), sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _without_ids(content: Any) -> Any:
    """Leave out the ids of messages, which packages draw at random."""
    if isinstance(content, dict):
        is_message = "role" in content
        return {str(key): _without_ids(value) for key, value in content.items() if not (is_message and key == "id")}
    return [_without_ids(item) for item in content] if isinstance(content, list | tuple) else content


def _is_zero(value: Any) -> bool:
    """Whether a score of Inspect means 0."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return value == 0 or str(value).lower() in ("i", "n", "no", "false")


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
            os.environ[KEY_VARIABLE] = request["key"]
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
    kind, verb, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sys.path[:0] = settings["path"]
    paths = [*settings["path"], *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for tool servers, which a taskset starts
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"  # verifiers runs uv
    played = Verifiers(settings) if kind == "verifiers" else Inspect(settings)
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
