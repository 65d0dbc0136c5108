"""The naive loop, beside which agentrl is measured."""

from __future__ import annotations

from pathlib import Path

from agentrl.rollout.chat.chat_format import TemplateChatFormat
from benchmarks import naive_loop


def test_the_naive_loop_answers_tool_calls(repository: Path) -> None:
    chat = TemplateChatFormat.load(repository / "environments" / "calculator" / "model")
    task = naive_loop.CALCULATOR.tasks("held_out", 0)[0]
    prompt = naive_loop.CALCULATOR.prompt(chat, task)

    def answered(text: str) -> tuple[naive_loop.Episode, str]:
        episode = naive_loop.Episode(task, [*prompt], [False] * len(prompt), said=chat.encode(text))
        return episode, chat.decode(naive_loop.answer(chat, episode, max_turns=6))

    call = '<tool_call>\n{"name": "calculate", "arguments": {"a": 12, "op": "*", "b": 7}}\n</tool_call><|im_end|>'
    assert "84" in answered(call)[1]
    assert "error: " in answered(call.replace("12", '"x"'))[1]
    assert "error: " in answered(call.replace("calculate", "guess"))[1]
    episode, observation = answered(f"{task.data['answer']}<|im_end|>")
    assert (episode.reward, observation) == (1.0, "")
