"""Runs an unmodified recipe of tinker-cookbook in the SDK's environment: `tinker_recipe.py TOKENIZER MODULE KEY=VALUE`.

Only what a hub would send is local: the data sets, a few short rows each, and the tokenizer.
"""

import json
import runpy
import sys
from typing import Any

ANIMALS = ("cat", "dog", "fox", "owl", "pig", "hen", "bee", "ant")
COLORS = ("red", "blue", "green", "black")
MODEL = "meta-llama/Llama-3.2-1B"
"""A model for which the cookbook has a format of conversations without special tokens."""


RUBRIC = "The answer is correct."
"""What the grader of the rubric recipes judges."""


def prometheus_rubric() -> str:
    """The rubric that the cookbook makes of a row of the Feedback Collection."""
    (row, *_) = rows("prometheus-eval/Feedback-Collection")
    lines = [
        f"Your job is to evaluate the following: {row['orig_criteria']}. "
        "Your response should be a score between 1 to 5.",
        "Here is the calibration for each score:",
        *(f"<score>{number}.0</score>: {row[f'orig_score{number}_description']}" for number in range(1, 6)),
        f"Here is a reference response that achieved a score of 5: {row['orig_reference_answer']}",
    ]
    return "\n".join(lines)


def rubric_rows(suffix: str) -> str:
    """The data of the rubric recipe: questions with the rubric, one row of JSON each."""
    rubric = {
        "rubric_str": RUBRIC,
        "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Please output your score between 0 and 1 wrapped in <score> ... </score>",
    }
    asked = [{"role": "user", "content": row["question"] + suffix} for row in rows("openai/gsm8k")[:64]]
    return "".join(json.dumps({"convo": [one], "rubric_items": [rubric]}) + "\n" for one in asked)


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a data set, by its name in the hub."""
    pairs = [(animal, color) for animal in ANIMALS for color in COLORS] * 8
    if name == "openai/gsm8k":
        return [{"question": f"How many {color} {animal}s?", "answer": "#### 3"} for animal, color in pairs]
    if name == "prometheus-eval/Feedback-Collection":
        suffix = " Provide a numerical answer without units, written inside \\boxed{}."
        graded = {"orig_criteria": "is it correct", "orig_reference_answer": "a number"}
        graded |= {f"orig_score{number}_description": f"grade {number}" for number in range(1, 6)}
        return [{"orig_instruction": f"How many {color} {animal}s?{suffix}", **graded} for animal, color in pairs]
    questions = [f"What is the color of the {color} {animal}?" for animal, color in pairs]
    if name == "HuggingFaceH4/no_robots":
        return [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {color}."}]}
            for question, (_, color) in zip(questions, pairs, strict=True)
        ]
    asked = [f"\n\nHuman: {question}\n\nAssistant: " for question in questions]
    return [
        {"chosen": f"{one}It is {color}.", "rejected": f"{one}How many {animal}s?"}
        for one, (animal, color) in zip(asked, pairs, strict=True)
    ]


def main(tokenizer: str, module: str, *settings: str) -> None:
    """Replace the hub, and run the recipe's command line."""
    import datasets
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import PreTrainedTokenizerFast

    def load_dataset(path: str, *_: object, split: str = "", **__: object) -> Any:
        made = datasets.DatasetDict({part: datasets.Dataset.from_list(rows(path)) for part in ("train", "test")})
        return made[split] if split else made

    datasets.load_dataset = load_dataset
    register_tokenizer(MODEL, lambda: PreTrainedTokenizerFast.from_pretrained(tokenizer))
    sys.argv = [module, *settings]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
