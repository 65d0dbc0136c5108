"""A judge that computes the probabilities of its answers instead of sampling them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentrl.core.ports import SamplingParams
from agentrl.core.records import Message, PolicyVersion, ScoreRequest
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.scoring.judge import JudgeScorer
from tests.sim.test_judges import scored
from tests.support.reward_models import BASE

ANSWER = {"yes": 1.0, "maybe not": 0.25, "no": 0.0}


def test_the_score_is_the_expected_value_under_the_judges_own_probabilities() -> None:
    chat_format = TemplateChatFormat.load(BASE)
    engine = EmbeddedEngine.load(
        str(BASE), versions={"critic": PolicyVersion("critic", 0, 0)}, slots=4, max_context=512
    )
    judge = JudgeScorer(
        name="helpful",
        engine=engine,
        policy="critic",
        chat_format=chat_format,
        sampling=SamplingParams(max_tokens=8),
        max_context=512,
        rubric="Is it right?",
        answer=ANSWER,
        votes=0,
    )
    what = scored("1 + 1", "2")

    async def main() -> Any:
        answer = await judge.judge(ScoreRequest(call_id="c", where="e0", seed=0, scored=what), 0)
        await engine.close()
        return answer

    answer = asyncio.run(main())
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(BASE).eval()
    question = judge.question(what)
    assert question.endswith("Judge the last message. Answer with one of: yes, maybe not, no.")
    context = chat_format.start([Message(role="user", content=question)], ())
    probabilities = []
    for text in ANSWER:
        tokens = chat_format.encode(text)
        with torch.inference_mode():
            logprobs = model(torch.tensor([[*context, *tokens]])).logits[0].log_softmax(-1)
        rows = range(len(context) - 1, len(context) + len(tokens) - 1)
        probabilities.append(
            math.exp(sum(float(logprobs[row, token]) for row, token in zip(rows, tokens, strict=True)))
        )
    expected = np.average(list(ANSWER.values()), weights=probabilities)
    assert answer.value == pytest.approx(float(expected), rel=1e-3)
    assert 0.0 < answer.value < 1.0
    assert answer.note == ", ".join(f"{text} {each:.3g}" for text, each in zip(ANSWER, probabilities, strict=True))
    assert answer.tokens == sum(len(context) + len(chat_format.encode(text)) for text in ANSWER)
