"""The Ray session a run lives in: attached to where there is one, else a small local one of its own.

A local session listens on loopback only, wants the token in a private file (0600), reports nothing to anyone, has no
dashboard and prestarts no workers. Owns: starting, attaching, stopping, Ray's environment variables. Does not own:
actors. Invariants: the caller's signal handlers stay in place; a session that was attached to is never shut down.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.core.errors import InputError

OBJECT_STORE_BYTES = 80 << 20
"""Trainers get small records and read token data themselves: the smallest store Ray accepts is plenty."""

ANSWERS_S = 5.0
"""How long the Ray of `RAY_ADDRESS` may take to accept a connection."""

_LONGEST_TEMPORARY = 40
"""Ray's sockets lie deep below its directory, and a Unix socket's path has at most 107 characters."""

_LOCAL_ENVIRONMENT = {
    # Makes Ray take 127.0.0.1 for this node, as it does on a desktop: otherwise its servers listen on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}


@functools.cache
def _process_token() -> str:
    """One token for all sessions a process starts, one after another: Ray reads it once."""
    return secrets.token_hex(32)


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Put SIGINT's and SIGTERM's handlers back on leaving: Ray replaces them, for Python and below it.

    In a thread that is not the main one this does nothing: only the main thread may set handlers.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
                signal.siginterrupt(number, False)  # as asyncio sets it


def forget_the_dead(parent: Path) -> None:
    """Remove the directories, tokens included, of sessions whose process was killed before it could."""
    for directory in parent.glob("agentrl-*-*"):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists() and directory.stat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def check_answers(address: str) -> None:
    """Whether somebody listens at a `HOST:PORT`; Ray itself would try for minutes, without a word.

    Raises:
        InputError: nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # `auto`, and whatever else Ray understands
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"RAY_ADDRESS is {address!r}, and no Ray answers there ({error}); start one, or unset RAY_ADDRESS for a "
            "session of the run's own"
        ) from None


class RaySession:
    """One process's connection to Ray."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._started = False

    def start(self) -> None:
        """Attach to the Ray this process already uses or `RAY_ADDRESS` names, else start a local one (about 4 s).

        From a thread other than the main one, the main thread wraps the wait in `kept_signal_handlers`. A second call
        does nothing.
        """
        if self._started:
            return
        self._started = True
        if "RAY_ADDRESS" not in os.environ:
            self._prepare_environment()
        else:
            check_answers(os.environ["RAY_ADDRESS"])
        import ray  # Ray reads its environment when it is imported

        if ray.is_initialized():
            self._forget_directory()
            return
        with kept_signal_handlers():
            if self._directory is None:
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
                return
            ray.init(
                address="local",
                # Idle prestarted workers burn CPU; our actors ask for no CPU slots.
                num_cpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Ray opens its own directory to everyone; the one around it stays private.
                _temp_dir=str(self._directory / "ray"),
            )
            # Ray prints a page on our standard output when one of its processes dies; we say it in a line.
            ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None

    def addresses(self) -> set[str]:
        """The addresses of the session's nodes: loopback alone for a local one."""
        import ray

        nodes: list[dict[str, str]] = ray.nodes()
        return {node["NodeManagerAddress"] for node in nodes}

    def dead(self) -> str:
        """Which process a local session cannot do without is dead; empty while all live, and for other people's Ray."""
        if self._directory is None or not self._started:
            return ""
        import ray

        node = ray._private.worker._global_node
        gone: list[str] = [name for name, _ in node.dead_processes()] if node is not None else []
        return " and ".join(name for name in gone if name in ("raylet", "gcs_server"))

    def stop(self) -> None:
        """Shut down what `start` started. Idempotent."""
        if self._directory is not None:
            import ray

            ray.shutdown()
        self._forget_directory()
        self._started = False

    def _prepare_environment(self) -> None:
        parent = tempfile.gettempdir()
        if len(parent) > _LONGEST_TEMPORARY:
            parent = "/tmp"
        forget_the_dead(Path(parent))
        self._directory = Path(tempfile.mkdtemp(prefix=f"agentrl-{os.getpid()}-", dir=parent))
        atexit.register(self.stop)
        for name, value in _LOCAL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ:
            token = self._directory / "token"
            token.touch(mode=0o600)
            token.write_text(_process_token())
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def _forget_directory(self) -> None:
        if self._directory is None:
            return
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(self._directory / "token"):
            del os.environ["RAY_AUTH_TOKEN_PATH"], os.environ["RAY_AUTH_MODE"]
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
