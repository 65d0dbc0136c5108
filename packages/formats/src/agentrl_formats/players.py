"""What plays the tasks of verifiers and Inspect, with the Python of their packages; it uses nothing of agentrl.

`agentrl/formats/runner_program.py` loads this file.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterable
from typing import Any


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

        client = EvalClientConfig(base_url=request["url"], api_key_var="AGENTRL_ENDPOINT_KEY")
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


PLAYERS = {"verifiers": Verifiers, "inspect": Inspect}
