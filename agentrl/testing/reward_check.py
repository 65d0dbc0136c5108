"""Checks whether an environment's reward tells right answers from others, by replies that need no policy.

A policy finds every reply that wins everywhere: a list of all answers where the reward looks for the answer somewhere
in the reply, another task's answer, the question itself. And a reward that no reply can win teaches nothing. Owns the
replies and the verdict; the checker plays the episodes.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agentrl.core.records import Task, ToolSpec
from agentrl.core.text import plural
from agentrl.environment.demonstrations import format_reply

ANSWER_KEYS = ("answer", "target", "solution", "expected", "ground_truth", "label", "gold", "reference")
"""Names under which a task's data usually holds its right answer."""
ANSWER_FORMS = (
    "{}",
    "Answer: {}",
    "The answer is {}.",
    "#### {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "```\n{}\n```",
)
"""Forms in which rewards usually read an answer."""
TASKS = 8
MIN_TASKS = 4
"""Minimum number of tasks with different answers for a statement about one reply to all of them."""
MAX_ANSWERS = 200
"""Maximum number of answers in one reply."""
MAX_LITERALS = 8
"""Maximum number of texts of the code of `reward` that are tried as replies."""
Form = Callable[[str], str]
"""Makes a reply of an answer."""

Play = Callable[[Task, str], float | None]
"""Plays a task with a policy whose every turn is a text; returns the reward, None if the episode failed."""


class RewardFaults(NamedTuple):
    """Sentences for the user; each is empty if there is nothing to say, or the tasks show no answers."""

    easy_win: str = ""
    """A reply that wins tasks whose answer it is not."""
    no_win: str = ""
    """No reply earned more than an empty one."""


def find_reward_faults(
    play: Play,
    tasks: Sequence[Task],
    *,
    reward_code: Callable[..., Any] | None = None,
    tools: Sequence[ToolSpec] = (),
    best_random: float = -math.inf,
) -> RewardFaults:
    """Play replies that should not win, and the answers of the tasks, which should.

    Args:
        play: plays one episode.
        tasks: tasks to play; only those whose data has an answer count, the first 8 of them with different answers.
        reward_code: the function that computes rewards, whose texts are tried as replies; None if it is not known.
        tools: tools of the environment; those with one required parameter are called with the answer.
        best_random: the best reward of other episodes.
    """
    answers: dict[str, Task] = {}
    for task in tasks:
        if (answer := _answer(task.data)) and len(answers) < MAX_ANSWERS:
            answers.setdefault(answer, task)
    played = dict(list(answers.items())[:TASKS])
    if len(played) < MIN_TASKS:
        return RewardFaults()
    blank = [play(task, "") or 0.0 for task in played.values()]
    forms = [*(form.format for form in ANSWER_FORMS), *_submissions(tools)]
    form, right = max(
        ((form, [play(task, form(answer)) or 0.0 for answer, task in played.items()]) for form in forms),
        key=lambda item: sum(item[1]),
    )
    best = max(right)
    if best <= max(blank):
        return RewardFaults(no_win="" if best_random > best else _no_win_text(*next(iter(played.items())), best))
    for name, reply in _replies(answers, form, reward_code):
        won = [
            task.id
            for (answer, task), reward in zip(played.items(), right, strict=True)
            if answer.strip() != reply.strip() and reward >= best and (play(task, reply) or 0.0) >= best
        ]
        if len(won) >= MIN_TASKS - 1 and len(won) >= len(played) / 2:
            shown = reply if len(reply) <= 60 else f"{reply[:57]}…"
            return RewardFaults(
                f"{name} wins {len(won)} of {plural(len(played), 'task')}: the reply {shown!r} earns {best:g}, as much "
                "as the right answer. Compare the whole answer with the task's"
            )
    return RewardFaults()


def _answer(data: Mapping[str, Any]) -> str:
    """Return the right answer in a task's data; "" if it has none that is a short text or a number."""
    for key in ANSWER_KEYS:
        value = data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, str) and value.strip() and len(value) <= 200:
            return value
    return ""


def _submissions(tools: Sequence[ToolSpec]) -> Iterator[Form]:
    """Yield calls of the tools with one required parameter, such as `submit(answer)`, with the answer."""
    for tool in tools:
        required = tool.parameters.get("required", [])
        if len(required) == 1:
            is_text = tool.parameters["properties"][required[0]].get("type") == "string"
            yield partial(_call, tool.name, required[0], is_text)


def _call(name: str, parameter: str, is_text: bool, answer: str) -> str:
    value: Any = answer
    if not is_text:
        with contextlib.suppress(ValueError):
            value = json.loads(answer)
    return format_reply({"name": name, "arguments": {parameter: value}})


def _replies(
    answers: Mapping[str, Task], form: Form, reward_code: Callable[..., Any] | None
) -> Iterator[tuple[str, str]]:
    """Yield replies that should not win, each with its name."""
    listed = list(answers)
    yield "a list of all answers", form(" ".join(listed))
    yield "a list of all answers", form(", ".join(listed))
    if all(answer.strip().lstrip("-").isdecimal() for answer in listed):
        numbers = range(min(map(int, listed)), max(map(int, listed)) + 1)
        if len(numbers) <= 10 * MAX_ANSWERS:
            yield "a list of numbers", form(" ".join(map(str, numbers)))
    for answer in listed[:2]:
        yield "the answer of another task", form(answer)
    for text in _literals(reward_code):
        yield "a text in the code of the reward", text


def _literals(reward_code: Callable[..., Any] | None) -> list[str]:
    """Return the texts in a function's code, without its docstring."""
    if reward_code is None:
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(reward_code)))
    except (OSError, TypeError, SyntaxError):
        return []
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in dict.fromkeys(texts) if text not in docstrings and text.strip()][:MAX_LITERALS]


def _no_win_text(answer: str, task: Task, reward: float) -> str:
    return (
        f"the answers in the tasks' data earn no more than an empty reply ({reward:g}): task {task.id!r} has "
        f"{answer!r}, tried plain and in {len(ANSWER_FORMS) - 1} usual forms. Check what the reward compares; if a "
        "right reply needs another form, `demonstrate` shows it to the check"
    )
