"""Small random reward models with the tokenizer of a shipped model."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.config.fields import resolve_package_directory
from agentrl.config.scorers import ScorerConfig
from agentrl.core.records import Message, Scored, ScoreRequest, Task, Turn
from agentrl.engines.reward_model import RewardModelEngine
from agentrl.journal.entries import EntryBody, TurnEntry
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.scoring.reward_model import RewardModelScorer
from agentrl.rollout.turn_entries import decode_message

BASE = Path(resolve_package_directory("agentrl.environments:calculator/model"))
SHAPE: dict[str, Any] = {
    "vocab_size": 440,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 435,
    "bos_token_id": 436,
    "eos_token_id": 437,
}


def save_reward_model(
    directory: Path, architecture: str = "Qwen3ForTokenClassification", *, labels: int = 2, seed: int = 0, **shape: Any
) -> Path:
    """Write a random reward model of an architecture, such as `LlamaForSequenceClassification`."""
    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**SHAPE, "num_labels": labels, **shape}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # sharp enough that a wrong position shows
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, directory / name)
    return directory


def recomputed_scores(
    entries: Mapping[str, EntryBody], directory: Path, section: ScorerConfig
) -> dict[str, tuple[float | None, int]]:
    """The scores of an episode's turns, in order, computed anew from its journal, with the tokens of the conversation;
    the score None is that of a turn without steps."""
    chat_format = TemplateChatFormat.load(directory)
    scorer = RewardModelScorer(name="prm", engine=_engine(directory), model="prm", chat_format=chat_format)
    scorer.steps, scorer.combine = section.steps, section.combine
    found: dict[str, tuple[float | None, int]] = {}
    messages: list[Message] = []
    for body in entries.values():
        if isinstance(body, TurnEntry):
            reply = chat_format.parse(body.sampled().token_ids.tolist())
            messages += [*map(decode_message, body.messages), reply]
            turn = Turn(text=reply.content, message=reply, completion=None)  # type: ignore[arg-type]
            task = Task(id="t", data={})
            scored = Scored(task=task, seat=body.seat, turn=turn, number=body.turn, messages=tuple(messages))
            name = f"{body.seat}.{body.index}.{body.turn}?prm"
            request = ScoreRequest(call_id=name, where=name, seed=0, scored=scored)
            value = asyncio.run(scorer.judge(request, 0)).value
            found[name] = value, len(scorer.positions(scored.messages)[0])
    return found


@cache
def _engine(directory: Path) -> RewardModelEngine:
    return RewardModelEngine.load(
        versions={}, model_path=str(directory), device="cpu", cache_tokens=0, fixed_shapes=True, threads=1
    )
