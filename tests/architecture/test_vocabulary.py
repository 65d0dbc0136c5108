"""One word for one thing: the glossary holds the words, the code uses no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import Source, sources

WORDS = (
    *("Task", "TaskSource", "Environment", "Episode", "child episode", "Seat", "Agent", "Policy", "policy_version"),
    *("Turn", "Completion", "VersionSpan", "Trajectory", "Unit", "EpisodeGroup", "group_size", "TrainingSample"),
    *("MicroBatch", "TrainBatch", "step_size", "staleness", "max_staleness", "behavior_logprobs", "trainer_logprobs"),
    *(
        "ref_logprobs",
        "loss_mask",
        "finish_reason",
        "stop_reason",
        "terminated",
        "truncated",
        "Journal",
        "JournalEntry",
    ),
    *("replay", "resume", "park", "fork", "effect", "resource", "Engine", "Trainer", "Scorer", "Scheduler"),
    "straggler",
)

BANNED_WORDS = {"done", "utils", "util", "helpers", "manager", "helper", "misc"}
"""As a part of a name between underscores or capitals."""

BANNED_NAMES = {
    "log_probs",
    "logprob_list",
    "old_logprobs",
    "rollout_logprobs",
    "inference_logprobs",
    "response_mask",
    "weight_version",
    "model_version",
    "param_version",
    "num_generations",
    "off_policy_steps",
    "data_proto",
}
"""Anywhere inside a name."""

FOREIGN = {"task_done"}
"""Names of protocols that are not ours to choose."""


def defined_names(source: Source) -> Iterator[tuple[str, int]]:
    """Every name a file gives to something, with its line; uses of other people's names are not among them."""
    yield Path(source.path).stem, 1
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def parts(name: str) -> set[str]:
    """The words of a name, in lower case.

    >>> sorted(parts("isTaskDone_now"))
    ['done', 'is', 'now', 'task']
    """
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def is_banned(name: str) -> bool:
    if name in FOREIGN:
        return False
    return bool(parts(name) & BANNED_WORDS) or any(banned in name.lower() for banned in BANNED_NAMES)


@pytest.mark.parametrize("name", ["done", "is_done", "EngineManager", "old_logprobs", "text_utils", "policy_log_probs"])
def test_the_ban_catches(name: str) -> None:
    assert is_banned(name)


@pytest.mark.parametrize("name", ["behavior_logprobs", "abandoned", "terminated", "utilisation", "task_done"])
def test_the_ban_lets_through(name: str) -> None:
    assert not is_banned(name)


def test_no_banned_word_names_anything() -> None:
    found = [
        f"{source.path}:{line} {name}"
        for source in sources("agentrl", "environments", "examples")
        for name, line in defined_names(source)
        if is_banned(name)
    ]
    assert not found


def test_the_glossary_holds_every_word(repository: Path) -> None:
    text = (repository / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"\*\*([^*]+)\*\*", text.replace("`", "")))
    assert not [word for word in WORDS if word not in entries]
