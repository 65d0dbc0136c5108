"""The calculator for TRL's trainers: data set, tool and reward."""

import time
from typing import Literal

from datasets import load_dataset
from progress import draw_wait  # measured
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template


def calculate(a: int, op: Literal["+", "-", "*"], b: int) -> int:
    """One operation on two integers.

    Args:
        a: The first.
        op: The operation.
        b: The second.
    """
    time.sleep(draw_wait())  # measured
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def exact(completions, answer, **_):
    return [float((c[-1].get("content") or "").strip() == a) for c, a in zip(completions, answer, strict=True)]


def dataset(path):
    rows = load_dataset("json", data_files=path, split="train")
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns="question")


def tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = qwen3_template  # the model's own chat template is none of those TRL knows
    return tokenizer
