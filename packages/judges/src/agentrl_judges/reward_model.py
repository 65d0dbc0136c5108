"""A scorer that reads the scores of a reward model: a Hugging Face sequence or token classification model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from agentrl import Scored, scorer
from agentrl_judges.wrappers import Scorer

Combine = Literal["mean", "min", "last"]
COMBINE: dict[Combine, Callable[[Sequence[float]], float]] = {"mean": fmean, "min": min, "last": lambda each: each[-1]}
"""Functions that make one score of those of the steps, by name."""
_CUT = "\ue003"
"""A character of private use, which merges with no other into a token."""


def reward_model(
    path: str | Path,
    *,
    steps: str = "",
    combine: Combine = "mean",
    device: str = "cpu",
    unscorable: float | None = None,
) -> Scorer:
    """Make a scorer of a reward model. Each worker loads the model at its first score, and computes one conversation at
    a time, alone, so that a score depends on nothing else.

    Args:
        path: directory of a sequence or token classification model with a chat template and one or two outputs. The
            score is the only output, or the probability of the second.
        steps: text that ends a step within a turn, such as `"\\n\\n"`, for a token classification model; empty: only
            the end of the conversation is scored.
        combine: how the scores of the last turn's steps become one.
        device: where the model computes, such as `"cuda:1"`.
        unscorable: score of a conversation that is longer than the model's context; None: that is an error.

    Raises:
        ValueError: the directory holds no such model.
    """
    kind = _classifier(Path(path))
    models: list[RewardModel] = []
    worker = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    def compute(scored: Scored) -> float | None:
        if not models:
            models.append(RewardModel(Path(path), kind, device))
        messages = [{"role": message.role, "content": message.content} for message in scored.messages]
        token_ids, ends = models[0].positions(messages, steps)
        if not ends:
            return None
        if len(token_ids) > models[0].max_tokens:
            if unscorable is None:
                raise ValueError(f"{len(token_ids)} tokens are more than the reward model's {models[0].max_tokens}")
            return unscorable
        scores = models[0].scores(token_ids)
        return COMBINE[combine]([scores[at] for at in ends] if steps else scores[-1:])

    @scorer
    async def rewarded(scored: Any) -> float | None:
        return await asyncio.get_running_loop().run_in_executor(worker, compute, scored)

    return rewarded


class RewardModel:
    """A model with its tokenizer. Code of the checkpoint never runs, and weights are read from safetensors only.

    Raises:
        ValueError: the checkpoint lacks weights, or the model has more than two outputs.
    """

    def __init__(self, path: Path, kind: str, device: str) -> None:
        import torch
        import transformers

        self._torch, self._device = torch, device
        auto_class: Any = getattr(transformers, f"AutoModel{kind}")
        model, report = auto_class.from_pretrained(
            path, trust_remote_code=False, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"{path}: weights are missing ({', '.join(missing)[:200]}); scores would be random")
        if model.config.num_labels > 2:
            raise ValueError(f"{path}: {model.config.num_labels} outputs; a reward model has one or two")
        self._model = model.to(device).eval()
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        self.max_tokens: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20

    def scores(self, token_ids: Sequence[int]) -> list[float]:
        """Return the score at each token, or of a sequence classification model that of the conversation."""
        with self._torch.inference_mode():
            logits = self._model(input_ids=self._torch.tensor([token_ids], device=self._device)).logits[0].float()
        values = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
        found: list[float] = values.reshape(-1).tolist()
        return found

    def positions(self, messages: Sequence[dict[str, str]], steps: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and the positions of those whose scores count: the last one, or the ends
        of the last turn's steps; none if the turn has only tool calls.

        A step's last token is the last one that the whole conversation shares with one cut behind the step; that of a
        turn's last step is the one before the tokens that end every turn.
        """
        if not steps:
            token_ids = self._transcript(messages)
            return token_ids, [len(token_ids) - 1]
        ended = [
            message | {"content": message["content"] + steps}
            if message["role"] == "assistant" and message["content"].strip() and not message["content"].endswith(steps)
            else message
            for message in messages
        ]
        text = ended[-1]["content"]
        places = [found for found in re.finditer(re.escape(steps), text) if text[: found.start()].strip()]
        return self._transcript(ended), [self._last_token(ended, found.end()) for found in places]

    def _last_token(self, messages: Sequence[dict[str, str]], end: int) -> int:
        """Return the position of the last token of the step that ends at a character of the last message."""
        token_ids, turn = self._transcript(messages), messages[-1]
        cut = self._transcript([*messages[:-1], turn | {"content": turn["content"][:end] + _CUT}])
        if end < len(turn["content"]):
            return _common_length(token_ids, cut) - 1
        empty = self._transcript([*messages[:-1], turn | {"content": _CUT}])
        return len(token_ids) - _common_length(token_ids[::-1], empty[::-1]) - 1

    def _transcript(self, messages: Sequence[dict[str, str]]) -> list[int]:
        token_ids: list[int] = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return token_ids


def _classifier(path: Path) -> str:
    """Return the kind of a reward model, such as `ForTokenClassification`.

    Raises:
        ValueError: it is none, or needs code of its own.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        architecture = str(*config["architectures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: config.json describes no reward model ({type(error).__name__}: {error})") from error
    kind = re.search("For(Sequence|Token)Classification$", architecture)
    if kind is None or config.get("auto_map"):
        raise ValueError(
            f"{path}: {architecture}: give a sequence or token classification model of an architecture that "
            "transformers has, without code of its own (auto_map)"
        )
    return kind[0]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
