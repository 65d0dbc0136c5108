"""`agentrl run pause | resume | drain | set`: ask the process of a running run, over the socket in its directory."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.cli.output import print_json
from agentrl.cli.runs import find_run
from agentrl.core.control_messages import (
    MAX_BYTES,
    SOCKET,
    Act,
    ControlReply,
    ControlRequest,
    peer_of,
    short_socket_path,
)
from agentrl.core.errors import InputError
from agentrl.core.text import escape_line
from agentrl.observe.run_directory import describe_missing_run

if TYPE_CHECKING:
    import argparse

ANSWER_S = 60.0
"""Seconds that a run has to answer."""


def run_pause(options: argparse.Namespace) -> int:
    """Stop sampling at the next turns and training after the step in progress."""
    return _request(options, "pause")


def run_resume(options: argparse.Namespace) -> int:
    """Continue a paused run."""
    return _request(options, "resume")


def run_drain(options: argparse.Namespace) -> int:
    """Start no more episodes, train on those in flight, and end the run."""
    return _request(options, "drain")


def run_set(options: argparse.Namespace) -> int:
    """Change settings of a running run, in their order."""
    run, settings = options.run, list(options.settings)
    if run is not None and "=" in run and not find_run(run).exists():  # the first of several settings, without a run
        run, settings = None, [run, *settings]
    replies = [_ask(find_run(run), ControlRequest("set", setting), options) for setting in settings]
    if options.json:
        print_json(replies if len(replies) > 1 else replies[0])
    return 0


def _request(options: argparse.Namespace, act: Act) -> int:
    reply = _ask(find_run(options.run), ControlRequest(act), options)
    if options.json:
        print_json(reply)
    return 0


def _ask(run: Path, request: ControlRequest, options: argparse.Namespace) -> ControlReply:
    reply = ask_run(run, request)
    if not reply.done:
        raise InputError(reply.text)
    if not options.json:
        sys.stdout.write(f"{escape_line(reply.text)}\n")
    return reply


def ask_run(run: Path, request: ControlRequest) -> ControlReply:
    """Send a request to the process that leads a run.

    Only a process of this user on this machine is asked: a run directory may come from someone else, and its socket
    may lead anywhere.

    Raises:
        InputError: the run is not running here, is another user's, or does not answer.
    """
    from agentrl.journal.run_process import RunProcessRecord, find_writing_process, is_writer_dead, read_process_state

    if not (run / "journal").is_dir():
        raise InputError(describe_missing_run(run))
    if os.stat(run).st_uid != os.geteuid():
        raise InputError(f"{run} belongs to another user, who alone may control it")
    process = find_writing_process(run / "journal")
    if process is None:
        state = read_process_state(run)
        if RunProcessRecord.read(run).state == "running" and not is_writer_dead(run):
            raise InputError(f"{run}: no process of this machine leads it; if it runs on another one, ask there")
        raise InputError(
            f"{run} is not running ({state or 'it never ran'}); `agentrl train FILE --resume` continues it"
        )
    try:
        found = os.lstat(run / SOCKET)
    except FileNotFoundError:
        raise InputError(
            f"{run} takes no requests yet, because it is starting or ending; try again in a while"
        ) from None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise InputError(f"{run / SOCKET} is not a socket of yours, so no request is sent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, short_socket_path(run) as path:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(path)
            if peer_of(connection) != (process, os.geteuid()):
                raise InputError(f"{run / SOCKET} belongs to another process than {process}, which leads the run")
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as file:
                return msgspec.json.decode(file.readline(MAX_BYTES), type=ControlReply)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InputError(
                f"{run}: process {process} does not answer ({reason}); its event loop may be blocked, or it has ended"
            ) from error
