"""`ToolEnvironment.prompt` may return messages: a system message, worked examples with calls, the question."""

from __future__ import annotations

import agentrl
from agentrl.testing import play


class Book(agentrl.ToolEnvironment):
    """Looks a number up."""

    @agentrl.tool
    def number(self, name: str) -> str:
        """Look up a number."""
        return {"Ann": "7", "Bob": "9"}[name]

    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        call = agentrl.ToolCall(id="shown", name="number", arguments={"name": "Ann"})
        return [
            agentrl.Message(role="system", content="Look numbers up."),
            agentrl.user("Ann?"),
            agentrl.Message(role="assistant", content="", tool_calls=(call,)),
            agentrl.Message(role="tool", content="7", tool_call_id="shown", name="number"),
            agentrl.Message(role="assistant", content="7"),
            agentrl.user(task.data["question"]),
        ]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == "9")

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="bob", data={"question": "Bob?"})]


def test_worked_examples_stand_before_the_question() -> None:
    call = {"name": "number", "arguments": {"name": "Bob"}}
    result = play(Book, Book.tasks("train")[0], [call, "9"])
    assert result.reward == 1.0
    assert result.observations[0].splitlines() == ["Look numbers up.", "Ann?", "", "7", "7", "Bob?"]
