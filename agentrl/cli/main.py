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
from pathlib import Path

from agentrl.cli.output import INTERNAL, INTERRUPTED
from agentrl.core.errors import AgentRLError, CheckFailedError, InputError, StorageError
from agentrl.core.safe import safe, safe_line

EPISODE_COLUMNS = (
    "episode, attempt, status, purpose, environment, task, group, parent, seats, policies, oldest_step, lineage, "
    "reward, stop_reason, drop_reason, turns, tokens, seconds, admitted_at, committed_at"
)
"""What `episode list` filters and sorts by, told without reading anything."""

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "peft", "safetensors", "tokenizers", "jinja2"), "train"),
    "ray": "ray",
    "reasoning_gym": "calculator",
}
"""The extra of agentrl that brings a module."""
_MACHINE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE}
"""What a machine refuses, wherever it is asked: no bug of ours."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process where None) and return its exit code."""
    _prepare_streams()
    options = argparse.Namespace(reads=True, takes_overrides=None)
    try:
        try:
            options, rest = _parser().parse_known_args(arguments)
        except SystemExit:  # help was printed; what it could not write is told here, not at the interpreter's end
            sys.stdout.flush()
            raise
        options.overrides = _overrides(rest, wanted=options.takes_overrides)
        code = _call(options)
        sys.stdout.flush()
        return code
    except AgentRLError as error:
        _say(f"agentrl: {safe(str(error))}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _report_bug(error)
        from agentrl.core.installation import install_command

        instead = ", or set --trainer.kind=in_process" if extra == "ray" else ""
        _say(f"agentrl: {error.name} is not installed: {install_command(extra)}{instead}\n")
        return InputError.exit_code
    except KeyboardInterrupt:
        _say("agentrl: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if options.reads:  # the reader of our output has seen enough
            return 0
        _say("agentrl: the output was closed before the command had ended, and the command with it\n")
        return StorageError.exit_code
    except BaseException as error:  # the last resort, told in one line
        if isinstance(error, SystemExit) and options.takes_overrides is None:  # the parser's, which has said why
            raise
        return _report_unexpected(error)


def _report_unexpected(error: BaseException) -> int:
    """Tell, on one line, of what should not have come this far; returns the exit code."""
    if isinstance(error, SystemExit):
        _say(f"agentrl: the program was told to end (exit code {error.code}) by {_place_of(error)}\n")
        return CheckFailedError.exit_code
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        _say(
            "agentrl: a file or connection of this process was closed under it, by an environment or a library of its: "
            "look for os.close and os.closerange there\n"
        )
        return CheckFailedError.exit_code
    if isinstance(error, OSError) and error.errno in _MACHINE:
        where = safe_line(str(error.filename or "a file"))
        _say(f"agentrl: {where}: {error.strerror}; make room or permission there\n")
        return StorageError.exit_code
    return _report_bug(error)


def _place_of(error: BaseException) -> str:
    """File and line of where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return safe_line(f"{frame.filename}:{frame.lineno}, in {frame.name}")


def _call(options: argparse.Namespace) -> int:
    if options.command is None:
        options.parser.print_help()
        return 0
    module, _, function = options.command.partition(":")
    code: int = getattr(import_module(f"agentrl.cli.{module}"), function)(options)
    return code


def _prepare_streams() -> None:
    """A stream the caller closed swallows what is written; one that knows no Unicode gets escapes, not an error."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the errors may have gone too
        sys.stderr.write(text)
        sys.stderr.flush()


def _report_bug(error: BaseException) -> int:
    _say(f"agentrl: internal error: {safe_line(f'{type(error).__name__}: {error}')[:500]}\n")
    _say(f"This is a bug of agentrl, unless `agentrl doctor` finds the machine at fault. {_write_traceback()}\n")
    return INTERNAL


def _write_traceback() -> str:
    try:
        descriptor, path = tempfile.mkstemp(prefix="agentrl-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"The traceback could not be kept ({error.strerror})."
    return f"The traceback is in {path}"


def _overrides(rest: Sequence[str], *, wanted: bool) -> list[str]:
    for argument in rest:
        if not wanted or not argument.startswith("--") or "=" not in argument:
            hint = "; see --help"
            if wanted:
                hint = "; a field of the configuration is set by --section.field=value, in one word"
                hint += f": {argument}=VALUE" if argument.startswith("--") else ""
            raise InputError(f"unknown argument {argument!r}{hint}")
    return list(rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentrl", description="RL of language-model agents whose unit is the episode.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="store_const", dest="command", const="doctor:version", help="print the version"
    )
    parser.set_defaults(command=None, parser=parser, takes_overrides=False, reads=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_demo(commands)
    _add_run(commands)
    _add_episode(commands)
    _add_env(commands)
    _add(commands, "doctor", "what this machine has, what a run will use, what is missing", "doctor:doctor")
    return parser


Subparsers = argparse._SubParsersAction  # the type has no public name
_FILE = "TOML file; change it with --section.field=value"
_RUN = "directory or name of a run; default: the newest in runs/"


def _add(
    commands: Subparsers[argparse.ArgumentParser], name: str, text: str, command: str, *, reads: bool = False
) -> argparse.ArgumentParser:
    """A command.

    Args:
        commands: where it belongs.
        name: what is typed.
        text: its help.
        command: `module:function` in `agentrl.cli`, imported when called: from the options to an exit code.
        reads: it only prints, and has succeeded when whoever reads it has seen enough.
    """
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=command, reads=reads)
    return parser


def _add_train(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "train", "train the policies of a configuration", "training:train")
    parser.add_argument("file", type=Path, help=_FILE)
    parser.add_argument("--model", help="directory of the base model, instead of model.path")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.set_defaults(takes_overrides=True)


def _add_evaluate(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "evaluate", "measure a policy on held-out tasks", "training:evaluate")
    parser.add_argument("file", type=Path, help=_FILE)
    parser.add_argument("--model", help="directory of the base model, instead of model.path")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="directory of trained weights, of policy NAME where there are several; the base model where absent",
    )
    parser.add_argument("--tasks", type=int, help="how many held-out tasks, instead of evaluation.tasks")
    parser.add_argument("--journal", type=Path, help="new directory that keeps the episodes for inspection")
    parser.set_defaults(takes_overrides=True)


def _add_demo(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "demo", "a language model learns to use a tool, in a minute on two cores", "training:demo")
    parser.add_argument("example", nargs="?", default="01_tool_use", help="a shipped example; default: 01_tool_use")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    sample = "write runs/sample instead, in seconds and without a model, to try the reading commands on"
    parser.add_argument("--journal-only", action="store_true", help=sample)
    parser.set_defaults(takes_overrides=True)


def _add_run(commands: Subparsers[argparse.ArgumentParser]) -> None:
    noun = _add(commands, "run", "list runs, or show how one went", "reading:run_list", reads=True)
    noun.set_defaults(directory=Path("runs"))
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND")
    parser = _add(verbs, "list", "list the runs in a directory", "reading:run_list", reads=True)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    parser = _add(verbs, "curve", "plot the reward over the steps", "reading:run_curve", reads=True)
    parser.add_argument("run", nargs="?", help=_RUN)
    parser.add_argument("--metric", help="plot this metric instead of the reward")
    parser = _add(
        verbs, "view", "show one screen of a run, also while it trains; q leaves", "view:run_view", reads=True
    )
    parser.add_argument("run", nargs="?", help=_RUN)
    parser.add_argument("--once", action="store_true", help="print the screen once and stop")
    parser = _add(verbs, "report", "write report.html into the run directory", "view:run_report")
    parser.add_argument("run", nargs="?", help=_RUN)
    ledger = "count every episode and unit; exit code 1 if one is lost or was trained twice"
    parser = _add(verbs, "ledger", ledger, "reading:run_ledger")
    parser.add_argument("run", nargs="?", help=_RUN)
    parser = _add(verbs, "winrates", "how policies do against their past versions", "reading:run_winrates", reads=True)
    parser.add_argument("run", nargs="?", help=_RUN)
    parser = _add(verbs, "metrics", "print the newest value of each metric", "view:run_metrics", reads=True)
    parser.add_argument("run", nargs="?", help=_RUN)
    parser.add_argument("--prometheus", action="store_true", help="in Prometheus' text format")


def _add_episode(commands: Subparsers[argparse.ArgumentParser]) -> None:
    noun = _add(commands, "episode", "list episodes, or show one", "reading:episode_list", reads=True)
    noun.set_defaults(run=None, where="", sort="admitted_at", ascending=False, limit=50, offset=0)
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND")
    parser = _add(verbs, "list", "list the episodes of a run", "reading:episode_list", reads=True)
    parser.add_argument("run", nargs="?", help=_RUN)
    parser.epilog = f"columns: {EPISODE_COLUMNS}"
    parser.add_argument("--where", default="", help="filter by columns, such as 'reward < 0 and turns > 4'")
    parser.add_argument("--sort", default="admitted_at", help="column to sort by; largest first")
    parser.add_argument("--ascending", action="store_true", help="smallest first")
    parser.add_argument("--limit", type=int, default=50, help="at most so many (default 50)")
    parser.add_argument("--offset", type=int, default=0, help="leave out so many first")
    parser = _add(verbs, "show", "show what happened in an episode", "reading:episode_show", reads=True)
    parser.add_argument("run", nargs="?", help=_RUN)
    parser.add_argument("id", nargs="?", help="of the episode, such as e100; default: the newest that ended")
    parser.add_argument("--attempt", type=int, help="default: the newest")


def _add_env(commands: Subparsers[argparse.ArgumentParser]) -> None:
    noun = _add(
        commands, "env", "list environments, check one, or write a new one", "environments:env_list", reads=True
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND")
    _add(verbs, "list", "list the installed environments", "environments:env_list", reads=True)
    parser = _add(verbs, "check", "check that an environment can be trained on", "environments:env_check")
    parser.add_argument("id", help="registered name, module:Class, or path/to/env.py:Class")
    parser = _add(verbs, "new", "write a new environment, with its tests and a configuration", "scaffold:env_new")
    parser.add_argument("name", help="lower-case letters, digits and underscores; the directory must not exist")


if __name__ == "__main__":
    sys.exit(main())
