"""What `agentrl.environments.tiny_model` says of demonstrations that earn nothing."""

from __future__ import annotations

from agentrl.core.records import Message
from agentrl.environments.tiny_model.model import Demonstration
from agentrl.environments.tiny_model.warm_up import _failed_demonstration


def shown(*messages: tuple[str, str]) -> Demonstration:
    return Demonstration(tuple(Message(role=role, content=content) for role, content in messages))  # type: ignore[arg-type]


def test_the_first_demonstration_that_fails_is_shown() -> None:
    good = shown(("user", "2 + 2?"), ("assistant", "4"))
    failing = shown(("user", "3 + 3?"), ("assistant", "add(3)"), ("tool", "error: b is\nmissing"), ("assistant", "?"))
    assert _failed_demonstration([good, failing, good]) == (
        "  user: 3 + 3?\n  assistant: add(3)\n  tool: error: b is missing\n  assistant: ?"
    )
    assert _failed_demonstration([good, good]) == "  user: 2 + 2?\n  assistant: 4", "else the first"
    assert len(_failed_demonstration([shown(("user", "x" * 9000))])) < 400
