"""The word problems for TRL's trainers: data set and reward."""

import words
from datasets import load_dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template

tools = None


def exact(completions, answer, **_):
    return [words.reward(c[-1].get("content") or "", a) for c, a in zip(completions, answer, strict=True)]


def dataset(path):
    rows = load_dataset("json", data_files=path, split="train")
    return rows.map(lambda row: {"prompt": words.prompt(row["question"])}, remove_columns="question")


def tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = qwen3_template  # the asynchronous trainer needs one, also without tools
    return tokenizer
