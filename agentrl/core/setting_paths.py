"""Settings in a configuration's data, by path: `("policies", "solver", "step_size")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.errors import ConfigError


def value_at(data: object, *path: str) -> Any:
    """Return the value at a path of keys in a configuration's data, which need not be valid; None if there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def set_value(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value in a configuration's data; tables on its path are created.

    Raises:
        ConfigError: there is a value in the place of a table, or the path is empty.
    """
    if not path:
        raise ConfigError("no setting is named")
    for depth, key in enumerate(path[:-1]):
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{'.'.join(path)}: {'.'.join(path[: depth + 1])} is a value, not a section")
    data[path[-1]] = value
