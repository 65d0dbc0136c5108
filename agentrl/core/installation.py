"""How more of agentrl is installed: from where this copy came, never by its bare name.

On the Python Package Index the name `agentrl` belongs to another project (seen 2026-11-20).
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str = "") -> str:
    """The command that installs an extra of agentrl beside this copy; without an extra, agentrl itself again.

    Args:
        extra: as in pyproject.toml; several separated by commas.
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
    """What pip wrote down of a local directory or wheel that was installed (PEP 610)."""
    try:
        text = metadata.distribution("agentrl").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(text) if text else None
    return origin if isinstance(origin, dict) and str(origin.get("url")).startswith("file://") else None
