"""The SAO preset as docs/reference/algorithms.md shows it."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.load import load
from agentrl.config.run import RunConfig


def preset(repository: Path, place: Path, *changes: str) -> RunConfig:
    """Load the preset for the calculator's or another shipped environment."""
    page = (repository / "docs/reference/algorithms.md").read_text(encoding="utf-8")
    toml = page.partition("### One episode per task")[2].partition("```toml\n")[2].partition("```")[0]
    file = place / "sao.toml"
    file.write_text(toml, encoding="utf-8")
    return load(file, [f"--directory={place}", *changes])
