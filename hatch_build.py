"""Run by hatchling before it builds a wheel, an sdist or an editable installation of agentrl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EnvironmentsAreThere(BuildHookInterface):  # type: ignore[type-arg]
    """Refuses a tree in which the link `agentrl/environments` has become a file of its own."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Look before anything is built.

        Raises:
            RuntimeError: what is built here would hold no environments.
        """
        link = Path(self.root, "agentrl", "environments")
        if not (link / "__init__.py").is_file():
            raise RuntimeError(
                f"{link} is no directory: this tree was copied or cloned without symbolic links. Make it again where "
                "they are kept (`git config core.symlinks true; git checkout agentrl/environments`), or put a copy of "
                "the directory `environments` in its place"
            )
