"""The `agentrl` command: noun, verb, arguments; a bare noun lists; `--json` everywhere.

Maps errors to exit codes: 0; 1 a check failed; 2 bad input; 70 internal; 74 storage; 130 interrupted. Imports nothing
heavy: each command imports what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module

from agentrl.cli.commands import make_parser, nearest_option
from agentrl.cli.output import INTERNAL, INTERRUPTED
from agentrl.core.errors import AgentRLError, CheckFailedError, InputError, StorageError, format_foreign_error
from agentrl.core.files import os_error_advice, temporary_directory
from agentrl.core.library_functions import LibraryFunctions, describe_removed
from agentrl.core.machine import describe_missing_package, rare_collections
from agentrl.core.removed import removed_name
from agentrl.core.text import escape_line, escape_text

_MACHINE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE}
"""Errors of the machine (permissions, space, limits), as opposed to bugs of agentrl."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process) and return its exit code."""
    _prepare_streams()
    library = LibraryFunctions()
    options = argparse.Namespace(opening="", takes_overrides=None)
    try:
        try:
            options, extra_arguments = make_parser().parse_known_args(arguments)
        except SystemExit:  # help was printed: report a failed write here, not when the interpreter exits
            sys.stdout.flush()
            raise
        options.overrides = _overrides(extra_arguments, options)
        with rare_collections():
            code = _call(options)
        sys.stdout.flush()
        return code
    except AgentRLError as error:
        _say(f"agentrl: {escape_text(str(error))}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        if not (text := describe_missing_package(error)):
            return _report_bug(error)
        instead = ", or train with one rank and without cluster.address" if error.name == "ray" else ""
        _say(f"agentrl: {text}{instead}\n")
        return InputError.exit_code
    except KeyboardInterrupt:
        _say("agentrl: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not options.opening:  # the reader closed our output, for example `| head`
            return 0
        _say("agentrl: the command was ended, because its output was closed\n")
        return StorageError.exit_code
    except BaseException as error:  # last resort: report the error in one line
        # Raised by the parser, which has printed the reason.
        if isinstance(error, SystemExit) and options.takes_overrides is None:
            raise
        return _report_unexpected(error, library.restore())


def _report_unexpected(error: BaseException, removed: Sequence[str] = ()) -> int:
    """Report an unexpected error on one line; returns the exit code.

    Args:
        error: the error.
        removed: functions of Python's library that were missing when it was raised.
    """
    event_loop = import_module("agentrl.core.event_loop")  # imports asyncio, which most commands do without
    if removed:
        _say(
            f"agentrl: the user's code {describe_removed(removed)} ({escape_line(format_foreign_error(error))[:200]}). "
            "Restore them after their use, or run that code in another process\n"
        )
        return CheckFailedError.exit_code
    if isinstance(error, SystemExit):
        _say(f"agentrl: the program was ended (exit code {error.code}) by {_raised_at(error)}\n")
        return CheckFailedError.exit_code
    if type(error).__name__ == "CancelledError" or event_loop.was_stopped(error):
        _say(
            "agentrl: an environment stopped the event loop of this process, or cancelled tasks that are not its own; "
            "an episode ends by raising or returning\n"
        )
        return CheckFailedError.exit_code
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        _say(
            "agentrl: an environment, or a library it uses, closed a file or connection of this process: look for "
            "os.close and os.closerange there\n"
        )
        return CheckFailedError.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        _say(f"agentrl: {escape_line(str(error.filename))[:100]}…: {error.strerror}; {os_error_advice(error)}\n")
        return InputError.exit_code
    if isinstance(error, FileNotFoundError) and error.filename is None:
        if not _has_working_directory():
            _say(
                "agentrl: the working directory of this process was removed, by an environment or another program; "
                "start the command in a directory that exists\n"
            )
            return InputError.exit_code
        try:
            temporary_directory()
        except StorageError as storage_error:
            _say(f"agentrl: {storage_error}\n")
            return StorageError.exit_code
    if isinstance(error, OSError) and error.errno in _MACHINE:
        location = escape_line(str(error.filename or "a file"))
        _say(f"agentrl: {location}: {error.strerror}; check the free space and the permissions there\n")
        return StorageError.exit_code
    return _report_bug(error)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _raised_at(error: BaseException) -> str:
    """Return file and line at which an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return escape_line(f"{frame.filename}:{frame.lineno}, in {frame.name}")


def _call(options: argparse.Namespace) -> int:
    if options.command is None:
        options.parser.print_help()
        return 0
    if options.opening:  # an answer at once: the imports that follow take seconds
        _say(f"{escape_line(options.opening.format_map(vars(options)))} …\n")
    module, _, function = options.command.partition(":")
    code: int = getattr(import_module(f"agentrl.cli.{module}"), function)(options)
    return code


def _prepare_streams() -> None:
    """Make a closed stream discard its output, and a stream without Unicode escape it instead of failing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader of the error stream may be gone as well
        sys.stderr.write(text)
        sys.stderr.flush()


def _report_bug(error: BaseException) -> int:
    _say(f"agentrl: internal error: {escape_line(format_foreign_error(error))[:500]}\n")
    for note in getattr(error, "__notes__", ()):
        _say(f"{escape_line(note)}\n")
    _say(f"This is a bug of agentrl, unless `agentrl doctor` finds the machine at fault. {_write_traceback()}\n")
    return INTERNAL


def _write_traceback() -> str:
    try:
        descriptor, path = tempfile.mkstemp(prefix="agentrl-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"The traceback could not be written ({error.strerror})."
    return f"The traceback is in {path}"


def _overrides(arguments: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the overrides as `--section.field=value`; they may be written as `--section.field value`."""
    overrides: list[str] = []
    accepted = options.takes_overrides
    for argument in arguments:
        is_option = argument.startswith("--")
        if accepted and is_option:
            overrides.append(argument)
        elif accepted and overrides and "=" not in overrides[-1]:
            overrides[-1] += f"={argument}"
        else:
            hint = "set a configuration field with --section.field=value" if accepted else "see --help"
            raise _unknown_argument(argument, hint, options)
    for override in overrides:
        if "=" not in override:
            raise _unknown_argument(override, f"a configuration field needs a value: {override}=VALUE", options)
    return overrides


def _unknown_argument(argument: str, hint: str, options: argparse.Namespace) -> InputError:
    if sentence := removed_name(f"{options.parser.prog} {argument.partition('=')[0]}"):
        return InputError(sentence)
    close = nearest_option(options.parser, argument)
    return InputError(f"unknown argument {argument!r}; {f'did you mean {close}?' if close else hint}")


if __name__ == "__main__":
    sys.exit(main())
