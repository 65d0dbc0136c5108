"""Recipes of tinker-cookbook, unmodified, against a Tinker server.

A model of two layers learns the recipes' form of conversations and answers "3" to a quarter of the questions. The
recipes train adapters on it: `sl_loop`, `rl_loop`, `rl_basic`, and `dpo`. Those with a setting for the rank are run
again with rank 0, against a server that trains all weights.

* `recipes_run`: recipes of the four that reach their end, and whose loss or reward in the second half of their steps is
  better than at the first by more than four standard deviations of that half.
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

import torch

from tests.support import tinker_recipe
from tests.support.tinker_client import KEY, ServerProcess

PYTHON = Path(os.environ.get("TINKER_PYTHON", Path.home() / ".cache/tinker-sdk/.venv/bin/python"))
"""Interpreter of the cookbook's environment, apart from ours."""
INSTALL = (
    "cd ~/.cache/tinker-sdk && python -m venv .venv && .venv/bin/pip install tinker==0.38.0 torch datasets blobfile "
    "chz math-verify pillow pylatexenc rich tiktoken && .venv/bin/pip install --no-deps tinker-cookbook==0.6.1"
)
"""The cookbook without its dependencies: no release of `tml-renderers` that it accepts installs on Python 3.11, and the
recipes here do not import it."""
COOKBOOK = "tinker_cookbook.recipes"
RECIPES: Mapping[str, tuple[str, Sequence[str]]] = {
    "sl_loop": ("-train_mean_nll", ("batch_size=8", "lora_rank=8", "learning_rate=3e-3", "max_steps=16")),
    "rl_loop": (
        "reward/total",
        (
            "batch_size=4",
            "group_size=8",
            "lora_rank=8",
            "learning_rate=3e-3",
            "max_steps=16",
            "max_tokens=12",
            "loss_fn=importance_sampling",
        ),
    ),
    "rl_basic": (
        "env/all/reward/total",
        (
            "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
            f"dataset_builder.model_name_for_tokenizer={tinker_recipe.MODEL}",
            "dataset_builder.renderer_name=role_colon",
            "dataset_builder.batch_size=4",
            "dataset_builder.group_size=8",
            "lora_rank=8",
            "learning_rate=3e-3",
            "max_steps=16",
            "max_tokens=12",
        ),
    ),
    "preference.dpo.train": ("-dpo_loss", ("batch_size=8", "learning_rate=1e-3", "max_steps=16", "max_length=256")),
}
"""What each recipe must raise, or lower after a minus sign, and its settings."""
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
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
        row = choose.choice(tinker_recipe.rows("openai/gsm8k"))
        return f"{_SHOWN}User: {row['question']}{_SUFFIX}\n\nAssistant: \\boxed{{{choose.randint(1, 4)}}}\n\nUser:"

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
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        batch = tokenizer([text() for _ in range(8)], return_tensors="pt", padding=False)["input_ids"]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


def improves(values: Sequence[float]) -> bool:
    """Whether the second half of values is larger than the first value by more than noise."""
    settled = values[len(values) // 2 :]
    return statistics.mean(settled) - values[0] > 4 * statistics.stdev(settled)


def figures(quick: bool) -> dict[str, float | None]:
    """Run the recipes against a server of adapters, and against one of all weights."""
    if not PYTHON.exists():
        raise SystemExit(f"the SDK and its cookbook are not installed: {INSTALL}; or set TINKER_PYTHON")
    torch.set_num_threads(1)
    ranked = {name: (goal, _full(settings)) for name, (goal, settings) in RECIPES.items() if "lora_rank=8" in settings}
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        write_model(model)
        return {
            name: run_recipes(
                Path(place) / weights, model, weights, dict(list(recipes.items())[: 1 if quick else None])
            )
            for name, weights, recipes in (("recipes_run", "adapter", RECIPES), ("full_recipes_run", "full", ranked))
        }


def _full(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings with which a recipe trains all weights, at a third of the learning rate."""
    return tuple(one.replace("lora_rank=8", "lora_rank=0").replace("rate=3e-3", "rate=1e-3") for one in settings)


def run_recipes(directory: Path, model: Path, weights: str, recipes: Mapping[str, tuple[str, Sequence[str]]]) -> int:
    """Run recipes against one server, one after the other; returns how many ended and improved."""
    directory.mkdir()
    server = ServerProcess(
        directory,
        f'keys = ["ALICE"]\n[models."{tinker_recipe.MODEL}"]\npath = "{model}"\nweights = "{weights}"\n'
        "[engine]\nmax_context = 256\nslots = 32\nvllm = false\n[trainer]\nmicro_batch_tokens = 4096\n",
    )
    address = server.start()
    try:
        return sum(run_recipe(recipe, *recipes[recipe], directory, model, address) for recipe in recipes)
    finally:
        server.kill()


def run_recipe(recipe: str, goal: str, settings: Sequence[str], directory: Path, model: Path, address: str) -> bool:
    """Run a recipe; returns whether it ended and improved."""
    log = directory / recipe
    finished = subprocess.run(
        [
            PYTHON,
            tinker_recipe.__file__,
            model,
            f"{COOKBOOK}.{recipe}",
            f"model_name={tinker_recipe.MODEL}",
            f"log_path={log}",
            *settings,
        ],
        env={**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        print(f"{recipe} failed: {finished.stderr[-2000:]}", flush=True)
        return False
    sign, name = (-1, goal[1:]) if goal.startswith("-") else (1, goal)
    rows = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    values = [row[name] for row in rows if name in row]
    print(f"{recipe}: {name} {' '.join(f'{value:.3f}' for value in values)}", flush=True)
    return improves([sign * value for value in values])
