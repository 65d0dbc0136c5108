"""Checks whether an environment's reward tells right answers from others, by replies that need no policy.

A policy finds every reply that wins everywhere: a list of all answers where the reward looks for the answer somewhere
in the reply, another task's answer, the question itself, a tool call that writes what the reward reads. And a reward
that no reply can win teaches nothing. Owns the replies and the verdict; the checker plays the episodes.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.core.records import Task, ToolSpec
from agentrl.core.text import plural
from agentrl.environment.demonstrations import format_reply
from agentrl.environment.task_contents import answer_of
from agentrl.testing.load_clock import TimeLimit

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
"""Minimum number of tasks with different answers for a statement about one reply to all of them; as many are played if
episodes are slow."""
MAX_ANSWERS = 200
"""Maximum number of answers in one reply."""
MAX_LITERALS = 8
"""Maximum number of texts of the code of `reward` that are tried as replies."""
MAX_ARGUMENTS = 5
"""Maximum number of these texts that are tried as arguments of a tool."""
Form = Callable[[str], str]
"""Makes a reply of an answer."""
Reply = Callable[[Task], str]
"""Returns a reply to a task that should not win; empty: there is none."""

Play = Callable[[Task, str], float | None]
"""Plays a task with a policy whose every turn is a text; returns the reward, None if the episode failed."""


@dataclass(slots=True)
class RewardFaults:
    """Sentences for the user; each is empty if there is nothing to say, or the tasks show no answers."""

    easy_win: str = ""
    """A reply that wins tasks whose answer it is not."""
    no_win: str = ""
    """No reply earned more than an empty one."""
    has_won: bool = False
    """Whether an answer earned more than an empty reply."""
    tried: list[str] = field(default_factory=list)
    """Kinds of replies that should not win, and were played."""
    is_cut: bool = False
    """Whether the time ended before all replies were played."""


def find_reward_faults(
    play: Play,
    tasks: Sequence[Task],
    *,
    limit: TimeLimit,
    prompt: Callable[[Task], str] = lambda task: "",
    reward_code: Callable[..., Any] | None = None,
    tools: Sequence[ToolSpec] = (),
    best_random: float = -math.inf,
    demonstrates: bool = True,
) -> RewardFaults:
    """Play replies that should not win, and the answers of the tasks, which should.

    Args:
        play: plays one episode.
        tasks: tasks to play; only those whose data has an answer count, the first 8 of them with different answers.
        limit: the time after which nothing more is played.
        prompt: returns the text that a played task shows first; "" if it shows none.
        reward_code: the function that computes rewards, whose texts are tried as replies; None if it is not known.
        tools: tools of the environment; those with one required parameter are called with the answer.
        best_random: the best reward of other episodes.
        demonstrates: whether the class may have demonstrations.
    """
    answers: dict[str, Task] = {}
    for task in tasks:
        if (answer := answer_of(task.data)) and len(answers) < MAX_ANSWERS:
            answers.setdefault(answer, task)
    faults = RewardFaults()
    if len(answers) < MIN_TASKS:
        return faults

    def play_timed(task: Task, text: str) -> float:
        if limit.left < 0:
            raise TimeoutError
        return play(task, text) or 0.0

    try:
        played = list(answers.items())[:TASKS]
        form, best = _winning_form(play_timed, played, [*(form.format for form in ANSWER_FORMS), *_submissions(tools)])
        if form is None:
            text = _no_win_text(*played[0], best, demonstrates=demonstrates)
            return RewardFaults(no_win="" if best_random > best else text)
        faults.has_won = True
        if limit.left < 0.75 * limit.seconds:
            del played[MIN_TASKS:]
        right = [play_timed(task, form(answer)) for answer, task in played]
        best = max(right)
        rightly = [each for each, reward in zip(played, right, strict=True) if reward >= best]
        for name, reply in _replies(answers, form, prompt, tools, _literals(reward_code)):
            won = _won(play_timed, rightly, reply, best, max(MIN_TASKS - 1, len(played) / 2))
            if won:
                faults.easy_win = _easy_win_text(name, reply(won[0]), len(won), len(played), best)
                break
            if won is not None and name not in faults.tried:
                faults.tried.append(name)
    except TimeoutError:
        faults.is_cut = True
    return faults


def _winning_form(
    play: Callable[[Task, str], float], tasks: Sequence[tuple[str, Task]], forms: Sequence[Form]
) -> tuple[Form | None, float]:
    """Return the form whose answer earns most of the first task where one earns more than an empty reply, None if there
    is no such task; and the best reward of an answer so far. The other tasks need not be played in all forms, which
    leaves time for replies that should not win."""
    best = -math.inf
    for answer, task in tasks:
        blank = play(task, "")
        form, reward = max(((form, play(task, form(answer))) for form in forms), key=lambda item: item[1])
        best = max(best, reward)
        if reward > blank:
            return form, best
    return None, best


def _won(
    play: Callable[[Task, str], float], tasks: Sequence[tuple[str, Task]], reply: Reply, best: float, needed: float
) -> list[Task] | None:
    """Return the tasks that a reply wins although it is not their answer; none if they are fewer than `needed`, and
    None if no task was played. If the time ends when it has won enough, the others are not played."""
    won: list[Task] = []
    is_played = False
    for left, (answer, task) in zip(range(len(tasks), 0, -1), tasks, strict=True):
        if len(won) + left < needed:
            break
        text = reply(task)
        if not text or answer.strip() == text.strip():
            continue
        try:
            reward = play(task, text)
        except TimeoutError:
            if len(won) < needed:
                raise
            break
        is_played = True
        if reward >= best:
            won.append(task)
    if not is_played:
        return None
    return won if len(won) >= needed else []


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
    answers: Mapping[str, Task],
    form: Form,
    prompt: Callable[[Task], str],
    tools: Sequence[ToolSpec],
    literals: Sequence[str],
) -> Iterator[tuple[str, Reply]]:
    """Yield replies that should not win, each with its name."""
    listed = list(answers)
    for texts in (" ".join(listed), ", ".join(listed), "\n".join(listed), json.dumps(listed)):
        yield "a list of all answers", _always(form(texts))
    if all(answer.strip().removeprefix("-").isdecimal() for answer in listed):
        least, greatest = min(map(int, listed)), max(map(int, listed))
        if greatest - least < 10 * MAX_ANSWERS:
            yield "a list of numbers", _always(form(" ".join(map(str, range(least, greatest + 1)))))
    for answer in listed[:2]:
        yield "the answer of another task", _always(form(answer))
    yield "a list of the task's choices", lambda task: form(choices) if (choices := _choices(task, prompt)) else ""
    yield "the task's text", lambda task: _echo(task, prompt(task), listed)
    for text in literals:
        yield "a text in the code of the reward", _always(text)
    for tool in tools:
        for call in _self_serving_calls(tool, literals[:MAX_ARGUMENTS]):
            yield f"a call of `{tool.name}`", _always(call)


def _always(text: str) -> Reply:
    return lambda task: text


def _choices(task: Task, prompt: Callable[[Task], str]) -> str:
    """Return the items of the first list in a task's data that has several texts or numbers, all of them shown to the
    policy; "" if there is none. Lists that are not shown may be the right answers."""
    shown = prompt(task)
    for value in task.data.values():
        if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str | int | float) for item in value):
            items = list(map(str, value))
            if all(item in shown for item in items):
                return " ".join(items)[:10_000]
    return ""


def _echo(task: Task, shown: str, answers: Sequence[str]) -> str:
    """Return the text that a task shows. If it contains the answer, it stands between two wrong answers, since a sound
    reward may read the first or the last word of a reply."""
    shown, answer = shown[:10_000], answer_of(task.data).strip()
    if not shown or answer.casefold() not in shown.casefold():
        return shown
    wrong = next((each for each in answers if each.strip().casefold() != answer.casefold()), "")
    return f"{wrong}\n{shown}\n{wrong}"


def _self_serving_calls(tool: ToolSpec, literals: Sequence[str]) -> Iterator[str]:
    """Yield calls that write what a reward may read: the number 1, true, and texts in the code of the reward."""
    required = tool.parameters.get("required", [])
    if not 1 <= len(required) <= 2:
        return
    values: list[Sequence[Any]] = []
    for name in required:
        kind = tool.parameters["properties"][name].get("type")
        values.append({"string": literals, "boolean": (True,), "integer": (1,), "number": (1.0,)}.get(kind, ()))
    for arguments in itertools.product(*values):
        if len(set(map(str, arguments))) == len(arguments):
            yield format_reply({"name": tool.name, "arguments": dict(zip(required, arguments, strict=True))})


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


def _easy_win_text(name: str, reply: str, won: int, played: int, reward: float) -> str:
    shown = reply if len(reply) <= 60 else f"{reply[:57]}…"
    return (
        f"{name} wins {won} of {plural(played, 'task')}: the reply {shown!r} earns {reward:g}, as much as the right "
        "answer. Compare the whole answer with the task's"
    )


def _no_win_text(answer: str, task: Task, reward: float, *, demonstrates: bool) -> str:
    advice = "; if a right reply needs another form, `demonstrate` shows it to the check" if demonstrates else ""
    return (
        f"the answers in the tasks' data earn no more than an empty reply ({reward:g}): task {task.id!r} has "
        f"{answer!r}, tried plain and in {len(ANSWER_FORMS) - 1} usual forms. Check what the reward "
        f"compares{advice}"
    )
