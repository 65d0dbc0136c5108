"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard (package `bfcl-eval`, installed with `--no-deps`).

Its own runner evaluates what the model wrote as Python. Here a call is a method's name and JSON arguments, and no
text is evaluated. Its own checker compares the state and the answers of the tools with those of the reference calls.
The tools take any number, such as 10 to the power of 10**9, so each task has a process with limits.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import Task, TaskSource
from agentrl.formats import (
    EnvironmentDefinitionError,
    IsolatedObject,
    Split,
    describe_malformed_call,
    isolated,
    split_tasks,
)
from agentrl_formats.session import Call, SessionEnvironment, Start, Step, tool_message

CATEGORIES = ("multi_turn_base", "multi_turn_miss_param", "multi_turn_long_context")
"""Categories whose tools stay the same during a task."""
ANSWER_S, MEMORY_BYTES = 30.0, 4 << 30
"""Limits of a task's process: time of the calls of a turn, and address space."""


class Bfcl(SessionEnvironment):
    """Multi-turn tasks of BFCL: a user's requests, and stateful programming interfaces as tools. The reward is 1 if the
    state and the results are right after every request. Calls that exceed the limits end the task with reward 0."""

    level = "replay"
    selects = ("category",)
    failed_reward = 0.0

    def session(self, task: Task) -> IsolatedObject:
        make = isolated(Conversation, task.data["category"], task.id, timeout_s=ANSWER_S, memory_bytes=MEMORY_BYTES)
        return make()

    @classmethod
    def tasks(
        cls, split: Split, *, seed: int = 0, category: str = "multi_turn_base", held_out: float = 0.2
    ) -> TaskSource:
        """Return the tasks of a category.

        Args:
            split: the split.
            seed: not used.
            category: one of `CATEGORIES`.
            held_out: the share of tasks that is held out.

        Raises:
            EnvironmentDefinitionError: the category's tools change during a task, or there is none of that name.
        """
        if category not in CATEGORIES:
            raise EnvironmentDefinitionError(f"BFCL category {category!r}: give one of {', '.join(CATEGORIES)}")
        tasks = [Task(id=name, data={"category": category}) for name in entries(category)]
        return split_tasks(tasks, split, held_out)


def _data() -> Path:
    import bfcl_eval

    return Path(bfcl_eval.__file__).parent / "data"


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@functools.cache
def entries(category: str) -> dict[str, dict[str, Any]]:
    """Return the tasks of a category by id, each with its reference calls as `ground_truth`."""
    name = f"BFCL_v4_{category}.json"
    truth = {entry["id"]: entry["ground_truth"] for entry in _lines(_data() / "possible_answer" / name)}
    return {entry["id"]: {**entry, "ground_truth": truth[entry["id"]]} for entry in _lines(_data() / name)}


@functools.cache
def _documents(interface: str) -> list[dict[str, Any]]:
    """Return the tools of an interface."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    documents = _lines(_data() / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[interface])
    return [
        {
            "name": document["name"],
            "description": document["description"],
            "parameters": _json_schema(document["parameters"]),
        }
        for document in documents
    ]


def _json_schema(value: Any) -> Any:
    """Return a schema with JSON Schema's names of types, such as `number` for BFCL's `float`."""
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    if isinstance(value, list):
        return [_json_schema(member) for member in value]
    if not isinstance(value, dict):
        return value
    members = {name: _json_schema(member) for name, member in value.items()}
    kind = members.get("type")
    return members | {"type": GORILLA_TO_OPENAPI[kind]} if isinstance(kind, str) else members


class Interfaces:
    """The stateful objects of one task."""

    def __init__(self, entry: dict[str, Any], *, long_context: bool) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

        self.objects: dict[str, Any] = {}
        for name in entry["involved_classes"]:
            made = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                scenario = copy.deepcopy(entry["initial_config"].get(name, {}))
                made._load_scenario(scenario, long_context=long_context)
            self.objects[name] = made

    def method(self, name: str) -> Any:
        """Return the public method of a name, or None. The last object that has one wins, as in BFCL."""
        methods = [getattr(each, name, None) for each in self.objects.values()] if not name.startswith("_") else []
        return next((method for method in reversed(methods) if inspect.ismethod(method)), None)

    def call(self, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> str:
        """Call a method; returns its result, or its error, as BFCL writes it."""
        method = self.method(name)
        if method is None:
            return f"Error during execution: name '{name}' is not defined"
        try:
            result = method(*arguments, **named)
            if isinstance(result, dict):
                with contextlib.suppress(TypeError, ValueError):
                    return json.dumps(result)
            return str(result)
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is the tool's answer
            return f"Error during execution: {error}"


def parsed_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse a reference call, whose arguments are literals."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return call.func.id, [ast.literal_eval(argument) for argument in call.args], named


class Conversation:
    """A task, with the objects that the policy uses, and those of the reference calls. Lives in a process of its own,
    where a `Session`'s methods are plain functions."""

    def __init__(self, category: str, id: str) -> None:
        self._entry = entries(category)[id]
        is_long = category == "multi_turn_long_context"
        self._model, self._truth = (Interfaces(self._entry, long_context=is_long) for _ in range(2))
        self._request = 0
        self._results: list[str] = []
        self._has_called = False

    def start(self) -> Start:
        tools = {tool["name"]: tool for name in self._entry["involved_classes"] for tool in _documents(name)}
        return {"messages": self._entry["question"][0], "tools": list(tools.values())}

    def answer(self, text: str, calls: Sequence[Call]) -> Step:
        if calls:
            messages = [tool_message(call, self._call(call)) for call in calls]
            return {"messages": messages, "reward": 0.0, "done": False}
        is_right = self._is_right()
        self._request += 1
        is_last = self._request == len(self._entry["question"])
        messages = [] if is_last or not is_right else self._entry["question"][self._request]
        return {"messages": messages, "reward": float(is_right and is_last), "done": is_last or not is_right}

    def cut(self) -> float:
        return 0.0

    def close(self) -> None: ...

    def _call(self, call: Call) -> str:
        self._has_called = True
        arguments = call["arguments"]
        if not isinstance(arguments, dict):
            return f"Error during execution: {describe_malformed_call(arguments)}"
        result = self._model.call(call["name"], (), arguments)
        self._results.append(result)
        return result

    def _is_right(self) -> bool:
        """Whether the state and all results so far are right after a request."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        references = self._entry["ground_truth"][self._request]
        results = [self._truth.call(*parsed_call(reference)) for reference in references]
        has_called, self._has_called = self._has_called, False
        if not references:
            return True
        return (
            has_called
            and state_checker(self._model.objects, self._truth.objects)["valid"]
            and response_checker(self._results, results, self._request)["valid"]
        )
