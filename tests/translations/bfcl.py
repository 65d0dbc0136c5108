"""Multi-turn tasks of BFCL (bfcl-eval 2026.3.23): its own executor and checker are the original."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.core.records import Task
from agentrl.testing.execution import play
from agentrl_formats import bfcl
from agentrl_formats.bfcl import Bfcl
from tests.translations.rows import Row

PACKAGE = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent")) / "bfcl"
BASE = "multi_turn_base"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with mock.patch.object(sys, "path", [*sys.path, str(PACKAGE)]):
        yield


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play a task with one message of calls for each request; the grader's part is the reward."""
    category = input.get("category", BASE)
    with installed():
        if "offered" in input:
            tools = {tool["name"]: tool for tool in bfcl.Conversation(category, input["id"]).start()["tools"]}
            return tools[input["offered"]], None
        if "id" not in input:
            return [task.id for task in Bfcl.tasks("train", category=category, held_out=0.0)], None  # type: ignore[attr-defined]
        replies = [text for calls in input["requests"] for text in (said(calls), "done") if text]
        played = play(Bfcl, Task(id=input["id"], data={"category": category}), replies)
    return list(played.observations), played.reward


def said(calls: list[Any]) -> str:
    """Return a message with calls."""
    parts = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "".join(f"<tool_call>{json.dumps(part)}</tool_call>" for part in parts)


_names = (f"model{number}" for number in itertools.count())


def original(input: dict[str, Any]) -> tuple[Any, Any]:
    """Execute and check the calls by BFCL, which keeps the objects of each model by its name."""
    category = input.get("category", BASE)
    with installed():
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (  # type: ignore[import-not-found]
            multi_turn_checker,
        )
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import (  # type: ignore[import-not-found]
            execute_multi_turn_func_call,
        )

        entry, model = bfcl.entries(category)[input["id"]], next(_names)
        decoded = [[f"{name}({written(arguments)})" for name, arguments in calls] for calls in input["requests"]]
        texts = []
        for question, calls in zip(entry["question"], decoded, strict=False):
            texts.append("\n".join(message["content"] for message in question))
            if calls:
                results, _ = execute_multi_turn_func_call(
                    calls, entry["initial_config"], entry["involved_classes"], model, input["id"], "long" in category
                )
                texts.append("\n".join(results))
        truth = entry["ground_truth"][: len(decoded)]
        verdict = multi_turn_checker([[calls] for calls in decoded], truth, entry, category, model)
    return texts, float(verdict["valid"])


def written(arguments: dict[str, Any]) -> str:
    return ",".join(f"{name}={value!r}" for name, value in arguments.items())


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the descriptions of a tool's parameters."""
    convert = bfcl._json_schema

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: bare(member) for name, member in convert(value).items() if name != "description"}
        return value

    bfcl._documents.cache_clear()
    with mock.patch.object(bfcl, "_json_schema", bare):
        yield
    bfcl._documents.cache_clear()


def tool(name: str, id: str, offered: str, description: str, parameters: Any) -> Row:
    sees = {"name": offered, "description": description, "parameters": parameters}
    return Row(name=name, input={"id": id, "offered": offered}, sees=sees, needs="bfcl")


def task(name: str, id: str, *requests: Any, category: str = BASE) -> Row:
    input = {"id": id, "requests": [*requests], "category": category}
    if not PACKAGE.exists():
        return Row(name=name, input=input, needs="bfcl")
    sees, grader = original(input)
    return Row(name=name, input=input, sees=sees, grader=grader, needs="bfcl", compared=True)


SYSTEM = "multi_turn_base_28"
FOUND = [["find", {"path": ".", "name": "analysis"}]]
GREP = [["cd", {"folder": "data"}], ["grep", {"file_name": "analysis_report.txt", "pattern": "error"}]]
USAGE = [
    ["du", {"human_readable": True}],
    ["touch", {"file_name": "usage.txt"}],
    ["echo", {"content": "205 bytes", "file_name": "usage.txt"}],
]
MATH = "This tool belongs to the Math API, which provides various mathematical operations. Tool description: "
TICKET = (
    "This tool belongs to the ticketing system that is part of a company, which allows users to create, view, and "
    "manage support business tickets. Tool description: Modify the details of an existing ticket."
)
UPDATES = {"title": "string", "description": "string", "status": "string", "priority": "integer"}
ORDER = [["fund_account", {"amount": 2203.4}]]
LOCKS = [
    ["lockDoors", {"unlock": True, "door": ["driver", "passenger", "rear_left", "rear_right"]}],
    ["setHeadlights", {"mode": "on"}],
]
TWEET = {
    "content": "Initial report content More unsorted data Unsorted data",
    "mentions": ["@Julia"],
    "tags": ["#currenttechtrend"],
}
ROWS = [
    tool(
        "a tool with a list of floats",
        SYSTEM,
        "mean",
        f"{MATH}Calculate the mean of a list of numbers.",
        {
            "type": "object",
            "properties": {
                "numbers": {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "List of numbers to calculate the mean of. ",
                }
            },
            "required": ["numbers"],
        },
    ),
    tool(
        "a tool with a default",
        SYSTEM,
        "round_number",
        f"{MATH}Round a number to a specified number of decimal places.",
        {
            "type": "object",
            "properties": {
                "number": {"type": "number", "description": "The number to round."},
                "decimal_places": {
                    "type": "integer",
                    "description": "The number of decimal places to round to. Defaults to 0. ",
                    "default": 0,
                },
            },
            "required": ["number"],
        },
    ),
    tool(
        "a tool with a dict",
        "multi_turn_base_23",
        "edit_ticket",
        TICKET,
        {
            "type": "object",
            "properties": {
                "ticket_id": {"type": "integer", "description": "ID of the ticket to be changed."},
                "updates": {
                    "type": "object",
                    "description": "Dictionary containing the fields to be updated.",
                    "properties": {
                        name: {"type": kind, "description": f"[Optional] New {name} for the ticket."}
                        for name, kind in UPDATES.items()
                    },
                },
            },
            "required": ["ticket_id", "updates"],
        },
    ),
    task("right", SYSTEM, FOUND, GREP, USAGE),
    task("more calls than needed", SYSTEM, [["ls", {}], *FOUND], GREP, USAGE),
    task("a wrong state", SYSTEM, FOUND, GREP, [*USAGE[:2], ["echo", {"content": "2", "file_name": "usage.txt"}]]),
    task("an answer that is missing", SYSTEM, FOUND, GREP, USAGE[1:]),
    task("no call", SYSTEM, FOUND, GREP, []),
    task("an unknown method", SYSTEM, FOUND, GREP, [["list_all", {}], *USAGE]),
    task("a wrong argument", SYSTEM, FOUND, GREP, [["du", {"readable": 1}], *USAGE]),
    task("a failing call", SYSTEM, FOUND, GREP, [["cat", {"file_name": "none"}], *USAGE]),
    task("floats", "multi_turn_base_100", [["get_stock_info", {"symbol": "NVDA"}]], ORDER),
    task("a list", "multi_turn_base_50", LOCKS),
    task("calls in another order", "multi_turn_base_50", LOCKS[::-1]),
    task(
        "a class without a file system first",
        "multi_turn_base_4",
        [["ls", {"a": True}]],
        [["sort", {"file_name": "report.txt"}]],
        [["post_tweet", TWEET]],
    ),
    task(
        "a request that cannot be met yet",
        "multi_turn_miss_param_0",
        [
            ["cd", {"folder": "document"}],
            ["mkdir", {"dir_name": "temp"}],
            ["mv", {"source": "final_report.pdf", "destination": "temp"}],
        ],
        [["cd", {"folder": "temp"}], ["grep", {"file_name": "final_report.pdf", "pattern": "budget analysis"}]],
        [["sort", {"file_name": "final_report.pdf"}]],
        [],
        [
            ["cd", {"folder": ".."}],
            ["mv", {"source": "previous_report.pdf", "destination": "temp"}],
            ["cd", {"folder": "temp"}],
            ["diff", {"file_name1": "final_report.pdf", "file_name2": "previous_report.pdf"}],
        ],
        category="multi_turn_miss_param",
    ),
    task(
        "long context",
        "multi_turn_long_context_3",
        [["find", {"path": ".", "name": "test"}]],
        [
            ["cd", {"folder": "projects"}],
            ["cd", {"folder": "photography"}],
            ["cp", {"source": "test_image1.jpg", "destination": "backup_tests"}],
            ["cp", {"source": "test_document.txt", "destination": "backup_tests"}],
        ],
        category="multi_turn_long_context",
    ),
    *(
        Row(name=category, input={"category": category}, refused="give one of multi_turn_base", needs="bfcl")
        for category in ("multi_turn_miss_func", "simple_python", "live_parallel", "memory", "web_search")
    ),
]
