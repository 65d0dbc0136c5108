"""Masks secrets in configurations and errors, wherever these are shown or sent: a key belongs in an environment
variable, but an environment's options may hold one. `config.json` and the journal, which a resume reads, keep the
value."""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MASK = "<secret>"
MIN_LENGTH = 8
"""Minimum length of a variable's value to be masked in other texts: shorter ones are ordinary words."""
MAX_DEPTH = 100
"""Maximum nesting; what is nested deeper is masked whole, because a run of someone else may hold anything."""
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = (
    *("secret", "password", "passwd", "passphrase", "credential"),
    *("apikey", "accesskey", "privatekey", "secretkey", "accesstoken", "authtoken", "connectionstring"),
)
"""Ends of words that name a secret anywhere in a name."""
_PAIRS = {*((word, "key") for word in ("api", "access", "private", "secret")), ("connection", "string")}
_MODEL_TOKENS = {
    *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "special", "stop"),
    *("start", "begin", "end", "think", "call", "image", "video", "audio"),
}
"""Words before `token` in the names of a model's tokens."""
_ABOUT_SECRETS = {
    *("env", "file", "path", "name", "id", "url", "type", "mode", "header", "field", "column", "prefix"),
    *("length", "len", "size", "count", "limit", "level", "policy"),
}
"""Last words of names of things other than the secret itself, such as `api_key_env`."""
_CREDENTIALS = re.compile(
    r"""(?P<url>://[^\s/?\#@:"'<>]*:)[^\s/?\#"'<>]+(?=@)
    |(?P<header>\bauthorization["']?\s*[:=]\s*["']?(?:bearer|basic|token|digest)\s+)[^\s"',;<>]+
    |(?P<bearer>\bbearer\s+)(?=[^\s"',;<>]*\d)[^\s"',;<>]{8,}""",
    re.IGNORECASE | re.VERBOSE,
)


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return JSON data with `MASK` in place of each secret: texts and numbers whose name, or that of a table around
    them, has a word such as `api_key`, `token` or `password`, and the secrets inside other texts (`mask_text`).

    Args:
        value: data to show.
        name: full name of the data, such as `environment.options.api_key`.
    """
    return _masked(value, name, _secret_values(), MAX_DEPTH, is_secret=any(map(_is_secret, name.split("."))))


def mask_text(text: str) -> str:
    """Return a text with `MASK` in place of the values of environment variables with names of secrets, of passwords in
    URLs, and of the credentials of `Authorization` headers."""
    return _masked_text(text, _secret_values())


def _secret_values() -> list[str]:
    """Return the values of environment variables with names of secrets, the longest first: one may contain another."""
    variables = {text for name, text in os.environ.items() if _is_secret(name) and name != "PWD"}
    return sorted((text for text in variables if len(text) >= MIN_LENGTH), key=len, reverse=True)


def _masked(value: Any, name: str, secrets: Sequence[str], depth: int, *, is_secret: bool) -> Any:
    if isinstance(value, dict | list | tuple) and not depth:
        return MASK
    if isinstance(value, dict):
        return {
            key: _masked(item, str(key), secrets, depth - 1, is_secret=is_secret or _is_secret(str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(item, name, secrets, depth - 1, is_secret=is_secret) for item in value]
    if isinstance(value, str):
        return MASK if value and is_secret else _masked_text(value, secrets)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # a number of tokens, or a token's id, is no secret
    return MASK if is_number and is_secret and _words(name)[-1:] != ["token"] else value


def _masked_text(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _CREDENTIALS.sub(lambda match: f"{match[match.lastgroup or 0]}{MASK}", text)


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case and in the singular."""
    return [re.sub("(?<=..[^s])s$", "", part.lower()) for part in _PART.findall(name)]


def _is_secret(name: str) -> bool:
    words = _words(name)
    if not words or words[-1] in _ABOUT_SECRETS:
        return False
    if words[-1] in {"token", "auth", "authorization", "bearer", "pwd", "dsn"}:
        return words[-1] != "token" or _MODEL_TOKENS.isdisjoint(words[-2:-1])
    pairs = itertools.pairwise(words)
    return any(word.endswith(_SECRET_WORDS) for word in words) or not _PAIRS.isdisjoint(pairs)
