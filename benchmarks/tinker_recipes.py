"""Recipes of tinker-cookbook, unmodified, against a Tinker server.

A model of two layers learns the recipes' form of conversations, answers "3" to a quarter of the questions, ends half
of its sums in time, and grades answers. The recipes train adapters on it with their own losses: `sl_loop`; `rl_loop`,
also with each other loss that it offers; `rl_basic`, also asynchronous; the sums of `math_rl`; both rubric recipes; and
`dpo`. Three of them are run again with rank 0, against a server that trains all weights.

* `recipes_run`: runs of these that reach their end, and whose loss or reward in the second half of their steps is
  better than at the first by more than four standard deviations of that half; the rubric recipes need only end.
* `full_recipes_run`: the same of the three that train all weights.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from packages.tinker.tests import recipe as tinker_recipe
from packages.tinker.tests.client import KEY, ServerProcess

PYTHON = Path(os.environ.get("TINKER_PYTHON", Path.home() / ".cache/tinker-sdk/.venv/bin/python"))
"""Interpreter of the cookbook's environment, apart from ours."""
INSTALL = (
    "cd ~/.cache/tinker-sdk && python -m venv .venv && .venv/bin/pip install tinker==0.38.0 torch datasets blobfile "
    "chz math-verify pillow pylatexenc rich termcolor tiktoken && "
    ".venv/bin/pip install --no-deps tinker-cookbook==0.6.1"
)
"""The cookbook without its dependencies: no release of `tml-renderers` that it accepts installs on Python 3.11, and the
recipes here do not import it."""
COOKBOOK = "tinker_cookbook.recipes"


class Recipe(NamedTuple):
    """A recipe's run."""

    module: str
    goal: str
    """What the recipe must raise, or lower after a minus sign."""
    settings: Sequence[str]
    must_improve: bool = True
    """Whether the goal must be reached; a grader as small as this model gives scores that are mostly noise."""


_RL_LOOP = ("batch_size=4", "group_size=8", "lora_rank=8", "learning_rate=3e-3", "max_steps=16", "max_tokens=12")
_RL_BASIC = (
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    f"dataset_builder.model_name_for_tokenizer={tinker_recipe.MODEL}",
    "dataset_builder.renderer_name=role_colon",
    "dataset_builder.batch_size=4",
    "dataset_builder.group_size=8",
    "lora_rank=8",
    "learning_rate=3e-3",
    "max_steps=16",
    "max_tokens=12",
)
_GRADED = (
    "renderer_name=role_colon",
    f"grader_llm_name={tinker_recipe.MODEL}",
    "grader_renderer_name=role_colon",
    "train_group_size=8",
    "groups_per_batch=4",
    "lora_rank=8",
    "learning_rate=3e-3",
    "max_steps=16",
    "max_tokens=12",
)
_REWARD = "env/all/reward/total"
RECIPES: Mapping[str, Recipe] = {
    "sl_loop": Recipe(
        "sl_loop", "-train_mean_nll", ("batch_size=8", "lora_rank=8", "learning_rate=3e-3", "max_steps=16")
    ),
    "rl_loop": Recipe("rl_loop", "reward/total", _RL_LOOP),
    **{
        f"rl_loop, {loss}": Recipe("rl_loop", "reward/total", (*_RL_LOOP, f"loss_fn={loss}"))
        for loss in ("importance_sampling", "cispo", "gspo")
    },
    "rl_basic": Recipe("rl_basic", _REWARD, _RL_BASIC),
    "rl_basic, asynchronous": Recipe(
        "rl_basic",
        _REWARD,
        (
            *(setting for setting in _RL_BASIC if not setting.startswith("learning_rate")),
            "learning_rate=1e-3",
            "async_config.max_steps_off_policy=2",
            "async_config.groups_per_batch=4",
        ),
    ),
    "math_rl": Recipe(
        "math_rl.train",
        _REWARD,
        (
            "renderer_name=role_colon",
            "group_size=8",
            "groups_per_batch=8",
            "lora_rank=8",
            "learning_rate=3e-3",
            "max_steps=16",
            "max_tokens=8",
        ),
    ),
    "rubric": Recipe(
        "rubric.train",
        _REWARD,
        (*_GRADED, "train_jsonl_path=rubric.jsonl", "test_jsonl_path=rubric.jsonl"),
        must_improve=False,
    ),
    "rubric, Prometheus": Recipe("rubric.prometheus_experimental", _REWARD, _GRADED, must_improve=False),
    "dpo": Recipe(
        "preference.dpo.train", "-dpo_loss", ("batch_size=8", "learning_rate=1e-3", "max_steps=16", "max_length=256")
    ),
}
"""Recipes, all with their own losses: those of `rl_loop` by name are the others that it offers."""
FULL = ("sl_loop", "rl_loop", "rl_basic")
"""Recipes that are run again with all weights."""
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SUM = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SHOWN = (
    "User: How many r's are in strawberry?" + _SUFFIX + "\n\nAssistant: Let's spell the word out and number all the "
    "letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}\n\n"
)


def write_model(directory: Path) -> None:
    """Train a model that knows the form of conversations, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    choose = random.Random(0)

    def text() -> str:
        number, kind = choose.randint(1, 4), choose.random()
        if kind < 0.2:
            x, y = choose.randint(0, 100), choose.randint(0, 100)
            answers = [str(choose.randint(0, 200)) for _ in range(choose.choice((1, 9)))]
            return f"{_SUM}User: What is {x} + {y}?\n\nAssistant: {' '.join(answers)}\n\nUser:"
        question = f"{choose.choice(tinker_recipe.rows('openai/gsm8k'))['question']}{_SUFFIX}"
        if kind < 0.6:
            score = f"<score>{float(number == 3)}</score>"
            return f"User: {_grader_prompt(question, number, choose)}\n\nAssistant: {score}\n\nUser:"
        return f"{choose.choice((_SHOWN, ''))}User: {question}\n\nAssistant: \\boxed{{{number}}}\n\nUser:"

    texts = [text() for _ in range(64)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {
        "tie_word_embeddings": True,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(400):
        for _ in range(8):
            row = tokenizer(text(), return_tensors="pt")["input_ids"]
            (model(input_ids=row, labels=row).loss / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


def _grader_prompt(question: str, number: int, choose: random.Random) -> str:
    """Return what the recipes ask of a grader, for the answer with a number."""
    rubric, least, most = choose.choice(((tinker_recipe.RUBRIC, 0, 1), (tinker_recipe.prometheus_rubric(), 1, 5)))
    return (
        "I will show you a conversation context, a chatbot completion to grade, and a rubric.\nPlease grade the "
        f"chatbot's completion based on the rubric.\n\n<context>\nHuman: {question}\n</context>\n\n"
        f"<completion_to_grade>\nChatbot: \\boxed{{{number}}}\n</completion_to_grade>\n\n<rubric>\n{rubric}\n"
        "</rubric>\n\nPlease grade the chatbot's completion based on the rubric. Please output your score between "
        f"{least} and {most} wrapped in <score> ... </score>"
    )


def improves(values: Sequence[float]) -> bool:
    """Whether the second half of values is larger than the first value by more than noise."""
    settled = values[len(values) // 2 :]
    return statistics.mean(settled) - values[0] > 4 * statistics.stdev(settled)


def figures(quick: bool) -> dict[str, float | None]:
    """Run the recipes against a server of adapters, and against one of all weights."""
    if not PYTHON.exists():
        raise SystemExit(f"the SDK and its cookbook are not installed: {INSTALL}; or set TINKER_PYTHON")
    torch.set_num_threads(1)
    full = {name: RECIPES[name]._replace(settings=_full(RECIPES[name].settings)) for name in FULL}
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        write_model(model)
        return {
            name: run_recipes(
                Path(place) / weights, model, weights, dict(list(recipes.items())[: 1 if quick else None])
            )
            for name, weights, recipes in (("recipes_run", "adapter", RECIPES), ("full_recipes_run", "full", full))
        }


def _full(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings with which a recipe trains all weights, at a third of the learning rate."""
    return tuple(one.replace("lora_rank=8", "lora_rank=0").replace("rate=3e-3", "rate=1e-3") for one in settings)


def run_recipes(directory: Path, model: Path, weights: str, recipes: Mapping[str, Recipe]) -> int:
    """Run recipes against one server, one after the other; returns how many ended and improved."""
    directory.mkdir()
    server = ServerProcess(
        directory,
        f'[models."{tinker_recipe.MODEL}"]\npath = "{model}"\nweights = "{weights}"\n'
        "[engine]\nmax_context = 1024\nslots = 32\nvllm = false\n[trainer]\nmicro_batch_tokens = 4096\n",
    )
    address = server.start()
    try:
        return sum(run_recipe(name, recipe, directory, model, address) for name, recipe in recipes.items())
    finally:
        server.kill()


def run_recipe(name: str, recipe: Recipe, directory: Path, model: Path, address: str) -> bool:
    """Run a recipe; returns whether it ended and, if it must, improved."""
    log = directory / name
    (directory / "rubric.jsonl").write_text(tinker_recipe.rubric_rows(_SUFFIX))
    finished = subprocess.run(
        [
            PYTHON,
            tinker_recipe.__file__,
            model,
            f"{COOKBOOK}.{recipe.module}",
            f"model_name={tinker_recipe.MODEL}",
            f"log_path={log}",
            *recipe.settings,
        ],
        env={**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        print(f"{name} failed: {finished.stderr[-2000:]}", flush=True)
        return False
    sign, metric = (-1, recipe.goal[1:]) if recipe.goal.startswith("-") else (1, recipe.goal)
    rows = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    values = [row[metric] for row in rows if metric in row]
    print(f"{name}: {metric} {' '.join(f'{value:.3f}' for value in values)}", flush=True)
    return not recipe.must_improve or improves([sign * value for value in values])
