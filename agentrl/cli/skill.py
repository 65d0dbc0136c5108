"""`agentrl skill`: prints instructions for coding agents that train with agentrl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json

if TYPE_CHECKING:
    import argparse

SKILL = Path(__file__).with_suffix(".md")
"""The instructions, as a skill: Markdown behind a header with its name and description."""


def print_skill(options: argparse.Namespace) -> int:
    """`agentrl skill`."""
    text = SKILL.read_text(encoding="utf-8")
    if options.json:
        print_json({"skill": text})
    else:
        sys.stdout.write(text)
    return 0
