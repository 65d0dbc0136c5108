"""Masks secrets in configurations, wherever these are shown or sent: a key belongs into an environment variable, but an
environment's options may hold one. `config.json` and the journal, which a resume reads, keep the value."""

from __future__ import annotations

import os
import re
from typing import Any

MASK = "<secret>"
MIN_LENGTH = 8
"""Number of characters from which on a value that equals a secret variable's is taken for it."""
MAX_DEPTH = 100
"""Maximum nesting; what is nested deeper is masked whole, because a run of someone else may hold anything."""
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = {"key", "apikey", "token", "secret", "secrets", "password", "passwords", "passphrase", "credentials"}
_REFERENCE = {"env", "file", "path", "name", "id"}
"""Last parts of names of places that hold a secret, such as `api_key_env`."""


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return JSON data with `MASK` in place of each text that looks like a secret: its name, or that of a table around
    it, has a part such as `key`, `token` or `password`, or it is the value of an environment variable of such a name.

    Args:
        value: data to show.
        name: name of the data, with those of the tables around it, such as `environment.options.api_key`.
    """
    secrets = {text for variable, text in os.environ.items() if _is_secret(variable) and len(text) >= MIN_LENGTH}
    return _masked(value, secrets, MAX_DEPTH, is_secret=_is_secret(name))


def _masked(value: Any, secrets: set[str], depth: int, *, is_secret: bool) -> Any:
    if isinstance(value, dict | list | tuple) and not depth:
        return MASK
    if isinstance(value, dict):
        return {
            key: _masked(item, secrets, depth - 1, is_secret=is_secret or _is_secret(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(item, secrets, depth - 1, is_secret=is_secret) for item in value]
    return MASK if isinstance(value, str) and value and (is_secret or value in secrets) else value


def _is_secret(name: object) -> bool:
    for word in str(name).split("."):
        parts = [part.lower() for part in _PART.findall(word)]
        if not _SECRET.isdisjoint(parts) and parts[-1] not in _REFERENCE:
            return True
    return False
