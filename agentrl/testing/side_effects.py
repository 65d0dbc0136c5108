"""Detects acts of an environment's own code on the outside world during a check, through Python's audit events.

Only code that re-execution runs again counts: `run()`, tools that are not external, `replay` resources. Effects,
external tools and other resources are not restricted. C extensions that raise no audit event are not seen.
"""

from __future__ import annotations

import linecache
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import is_user_code
from agentrl.core.text import valid_unicode
from agentrl.environment.harness import HarnessEnvironment
from agentrl.rollout.calls.journal import running_strand

if TYPE_CHECKING:
    from types import FrameType

    from agentrl.environment.environment import Environment

_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn"}
_TALKS = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}
_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_MODEL_CLIENTS = {
    *("openai", "anthropic", "litellm", "mistralai", "cohere", "groq", "together", "ollama", "fireworks", "replicate"),
    *("google.genai", "google.generativeai", "vllm", "sglang", "aisuite", "instructor", "dspy", "pydantic_ai"),
    *("langchain", "langchain_core", "langchain_openai", "langchain_anthropic", "llama_index"),
}
"""Packages that call a language model."""
_MODEL_WORDS = re.compile(
    rf"^\s*(?:import|from)\s+(?:{'|'.join(map(re.escape, sorted(_MODEL_CLIENTS)))})\b"
    r"|/chat/completions|/v1/(?:completions|messages|responses)\b|/api/(?:generate|chat)\b|:generateContent"
    r"|api\.(?:openai|anthropic|mistral|groq|together|deepseek|cohere)\.",
    re.MULTILINE,
)
"""Lines of code that call a model directly: an import of a client, or the address of an endpoint."""
_FILE = re.compile(r"opens (?:the database )?'(.*)'")
"""Pattern for the file in the description of an act."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen")

_ADVICE = (
    "and would again on re-execution; make it an external tool (`@tool(external=True)`), `ctx.effect`, or a `snapshot` "
    "or `pinned` resource"
)
MODEL_ADVICE = (
    "it calls a language model itself, whose tokens are then neither recorded as turns nor trained: go through "
    "`ctx.agent(seat).act(…)` instead, and give the seat to a policy: one that learns or an endpoint "
    '(`[policies.NAME] kind = "remote"`). Only a model that is no agent of the episode, such as a search service of '
    "yours, belongs in an external tool or `ctx.effect`"
)
_PROGRAM_ADVICE = "and would again on re-execution; do it in `play`, or in the program"
"""Advice on a `HarnessEnvironment`, whose program is not watched."""
_PROGRAM_MODEL_ADVICE = (
    "it calls a language model itself, again on re-execution, and the run records none of it: let the run judge, by a "
    "scorer (`[scorers.NAME]`), or call the model in `play`"
)


@dataclass(slots=True)
class ObservedSideEffects:
    """Side effects of an environment that were observed."""

    source: str
    """Text of the environment's module."""
    advice: str = _ADVICE
    model_advice: str = MODEL_ADVICE
    findings: dict[tuple[str, str], str] = field(default_factory=dict)
    """Sentences about findings, keyed by event and place."""
    asked_model: bool = False


_watching: ObservedSideEffects | None = None
_written: Counter[str] | None = None
_installed = False


@contextmanager
def watch_side_effects(environment: type[Environment]) -> Iterator[ObservedSideEffects]:
    """Watch episodes of an environment within the context, and record their acts on the outside world."""
    global _watching
    _install_hook()
    _watching = ObservedSideEffects(environment.source())
    if issubclass(environment, HarnessEnvironment):
        _watching.advice, _watching.model_advice = _PROGRAM_ADVICE, _PROGRAM_MODEL_ADVICE
    try:
        yield _watching
    finally:
        _watching = None


@contextmanager
def written_files() -> Iterator[Counter[str]]:
    """Count how often each file is opened for writing, in this process, within the context."""
    global _written
    _install_hook()
    _written = Counter()
    try:
        yield _written
    finally:
        _written = None


def _install_hook() -> None:
    global _installed
    if not _installed:
        sys.addaudithook(_hook)  # an audit hook cannot be removed, but costs almost nothing while inactive
        _installed = True


def calls_language_model(source: str) -> bool:
    """Whether code seems to call a language model directly.

    Example:
        >>> calls_language_model("import openai"), calls_language_model("import math")
        (True, False)
        >>> calls_language_model("url = base + '/chat/completions'")
        True
    """
    return _MODEL_WORDS.search(source) is not None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _written is not None and (match := _FILE.match(_act(event, arguments) or "")):
        _written[match[1]] += 1
    observer = _watching
    if observer is None:
        return
    act = _act(event, arguments)
    if act is None:
        return
    branch = running_strand()
    if branch is None or not branch.is_open or branch.memoised is not None:
        return
    frame = sys._getframe(1)
    place = _location(frame)
    if place is not None and (event, place) not in observer.findings:
        model = event in _TALKS and _is_for_model(frame, observer.source)
        observer.asked_model |= model
        observer.findings[event, place] = (
            f"{place} {act}: {observer.model_advice}" if model else f"{place} {act}, {observer.advice}"
        )


def _is_for_model(frame: FrameType | None, source: str) -> bool:
    """Whether the environment's part of the stack contains a model's client, or code that seems to be one."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        name = str(frame.f_globals.get("__name__"))
        if not _MODEL_CLIENTS.isdisjoint({name.partition(".")[0], ".".join(name.split(".")[:2])}):
            return True
        if is_user_code(frame.f_code.co_filename) and calls_language_model(
            "".join(linecache.getlines(frame.f_code.co_filename))
        ):
            return True
        frame = frame.f_back
    return calls_language_model(source)


def _act(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return a description of an audit event; None if the event changes nothing outside."""
    # The first import of a module stores its bytecode. `str` of other objects may run their code.
    if arguments and issubclass(type(arguments[0]), str | bytes | os.PathLike) and "__pycache__" in str(arguments[0]):
        return None
    if event == "open":
        path, mode, flags = arguments
        writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITE_FLAGS)
        name = valid_unicode(os.fsdecode(path)) if isinstance(path, str | bytes) else ""
        return f"opens {name!r} for writing" if writes and name not in ("", os.devnull) else None
    if event == "sqlite3.connect":
        return None if arguments[0] in (":memory:", "") else f"opens the database {str(arguments[0])!r}"
    if event in _STARTS:
        return f"starts a process ({event})"
    if event in _TALKS and not _is_pair(arguments[0]):
        return f"uses the network ({event})"
    return f"changes files ({event} {str(arguments[0])!r})" if event in _CHANGES else None


def _is_pair(end: object) -> bool:
    """Whether a socket is one of a `socket.socketpair`: connected, and neither end has an address."""
    if not isinstance(end, socket.SocketType) or end.family != socket.AF_UNIX:
        return False
    try:
        return (end.getsockname(), end.getpeername()) == ("", "")
    except OSError:  # not connected
        return False


def _location(frame: FrameType | None) -> str | None:
    """Return the nearest code that belongs neither to Python nor to agentrl; None if there is none, so the environment
    did not cause the event, or if a library is being imported, which happens once in a process: urllib3 tries IPv6."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and (not file.startswith(_PYTHON) or "site-packages" in file):
            return (
                None
                if _imports_library(frame)
                else f"{frame.f_code.co_qualname} ({os.path.basename(file)}:{frame.f_lineno})"
            )
        frame = frame.f_back
    return None


def _imports_library(frame: FrameType | None) -> bool:
    """Whether code runs because the environment imports a library."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_name == "<module>" and not is_user_code(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
