"""The command line: every command with its arguments and its function's name; the function is imported when called.

`READING` has the commands that read a run; their functions are in the module of the noun: `runs.py`, `episodes.py` (of
steps, too). `COMMANDS` has all commands.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.files import expand_path
from agentrl.core.removed import removed_name
from agentrl.inspection.export.formats import EXPORTS

Subparsers = argparse._SubParsersAction  # argparse has no public name for this type

EPISODE_COLUMNS = (
    "episode, attempt, status, purpose, environment, task, group, parent, seats, policies, oldest_step, lineage, "
    "staleness, reward, stop_reason, drop_reason, turns, tokens, seconds, detail, admitted_at, committed_at"
)
"""Columns that `episode list` filters and sorts by, for its help: nothing is imported to print it."""
LIVE_SETTINGS = "steps, max_in_flight, evaluation.every, checkpoint.every"
"""Settings that `run set` may change, for its help."""
_FILE = "TOML file; change it with --section.field=value"


def _bounded_int(text: str) -> int:
    """Parse a whole number within the range of every column and counter."""
    value = int(text)
    if not -(2**31) <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text[:20]} is out of range")
    return value


def _turn_or_change(text: str) -> int | str:
    return text if text == "change" else _bounded_int(text)


def _path(text: str) -> Path:
    return Path(expand_path(text))


class Argument(NamedTuple):
    """An argument of a command: its name, and its argparse keywords."""

    name: str
    keywords: dict[str, Any]


class Command(NamedTuple):
    """A command, such as `show` of `agentrl episode`."""

    name: str
    help: str
    function: str
    """Function of the command, as `module:function` in `agentrl.cli`; it takes the options and returns an exit code."""
    arguments: tuple[Argument, ...] = ()
    opening: str = ""
    """Text to print before the imports, which take seconds; "": the command only prints, so that a pipe closed early is
    not a failure."""
    takes_overrides: bool = False
    """Whether `--section.field=value` changes settings, or names what a recorded run may use here."""
    epilog: str | None = None

    @property
    def reads(self) -> bool:
        """Whether the command only reads."""
        return not self.opening


class CommandGroup(NamedTuple):
    """A group of commands; a bare noun runs its first verb."""

    name: str
    help: str
    verbs: tuple[Command, ...]


_KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "int": {"type": _bounded_int},
    "path": {"type": _path},
    "name": {"type": expand_path},
    "flag": {"action": "store_true"},
    "many": {"action": "append"},
}
"""Argparse keywords by the kind of an argument; a name may be that of a run, or a path."""


def _argument(text: str, help: str, **keywords: Any) -> Argument:
    """Make an argument from `NAME=METAVAR:KIND`. NAME may end in `?` or `+`, as in argparse; the rest may be absent."""
    name, _, kind = text.partition(":")
    name, _, metavar = name.partition("=")
    bare = name.rstrip("?+")
    given = {key: value for key, value in (("metavar", metavar), ("nargs", name[len(bare) :])) if value}
    return Argument(bare, {**_KINDS[kind], **given, **keywords, "help": help})


_RUN = _argument("run?:name", "name or directory of a run; default: the newest in runs/")
_ID = _argument("id?", "episode id, such as e100, or e100.1 for its attempt 1; default: the newest that ended")
_EPISODE = (_RUN, _ID, _argument("--attempt:int", "attempt of the episode; default: the newest"))
_REPLAY_ARGUMENTS = (
    *_EPISODE,
    _argument("--where", "every episode that matches this filter, instead of one"),
    _argument("--limit:int", "at most this many of them", default=100_000),
    _argument(
        "--environment=REF:name",
        "code to run, such as path/to/env.py:Class; required if the environment is not installed",
    ),
)
_POLICY = _argument("--policy", "policy name; required if several policies have this step")
_MODEL = _argument("--model:name", "directory of the base model, instead of model.path")
_STARTS = (
    _argument("--resume:flag", "continue from the run's newest checkpoint"),
    _argument("--dry-run:flag", "print the settings and the plan that follows from them, and stop"),
)
_READING_RUN = "reading the run"
_SETTINGS = (
    "Each setting is an option: --name=first, --steps=20, --seed=1, --policies.solver.learning_rate=1e-4, …; "
    "docs/reference/configuration.md lists them."
)
_RECEIVED = (
    "--section.field=value and --task.key=value name what a run that was not trained here may use on this machine, "
    "such as its model; the command prints the ones it needs."
)


def _replaying(function: str, help: str, *arguments: Argument) -> Command:
    """Make a command that executes a run's code again."""
    name = function.partition("_")[2]
    return Command(name, help, f"episodes:{function}", arguments, _READING_RUN, takes_overrides=True, epilog=_RECEIVED)


_EXPORT = (
    _RUN,
    _argument(
        "--to",
        "; ".join(f"{name}: {format.help}" for name, format in EXPORTS.items()),
        required=True,
        choices=list(EXPORTS),
    ),
    _argument("--out=PATH:path", "output path; default: in the run's directory"),
    _argument("--where", "only episodes that match this filter", default=""),
    _argument("--match", "only episodes that contain all these words", default=""),
    _argument("--limit=N:int", "only the newest N of them; default: 1000 for html, all for other formats"),
    _argument("--force:flag", "replace an existing file"),
)
_COMPARE = (
    _argument("runs+=RUN:name", "directories or names; the first is the baseline"),
    _argument("--by", "axis of the curves", choices=["step", "tokens", "seconds"], default="step"),
    _argument("--metric=NAME:many", "curves of this metric instead of the rewards; may be repeated"),
)
_SERVE = (
    _argument("run?:name", "run, or directory of runs; default: all runs in runs/"),
    _argument("--port:int", "port on 127.0.0.1; default: any free one", default=0),
    _argument(
        "--host-name=NAME:many",
        "answer requests under this name too, such as viewer.example.com, from a proxy; may be repeated",
        default=[],
    ),
)
_KEEP = _argument(
    "--keep=STEPS:int",
    "newest steps of each policy whose tokens stay; 0: only those that checkpoints need; default: journal.keep",
)
_LIST = (
    _RUN,
    _argument("--where", "filter by columns, such as 'reward < 0 and turns > 4'", default=""),
    _argument("--match", "only episodes that contain all these words; indexes the run", default=""),
    _argument("--sort", "column to sort by; largest first", default="admitted_at"),
    _argument("--ascending:flag", "smallest first"),
    _argument("--columns", "columns to show, such as 'episode,reward,data.level'", default=""),
    _argument("--limit:int", "at most this many (default 50)", default=50),
    _argument("--offset:int", "skip this many first", default=0),
)
_FORK = (
    *_REPLAY_ARGUMENTS,
    _argument(
        "--at=TURN",
        "turn number from 0; -1 is the last; change: the first call that differs in --environment",
        type=_turn_or_change,
        required=True,
    ),
    _argument("-n=K:int", "number of forks (default 1)", default=1),
    _argument("--edit=FILE:path", "file with messages that replace the turn's, or an external agent's reply"),
    _argument(
        "--policy=[SEAT=]WHO:many",
        "policies to use instead: a directory of weights, a version (solver@0.5), or another policy in a seat "
        "(checker=solver); may be given several times",
        default=[],
    ),
)
_EVALUATE = (
    _argument("file:path", _FILE),
    _argument(
        "--model=DIR|URL[,NAME]:name",
        "directory instead of model.path; or an OpenAI chat-completions endpoint for every seat, with its model name, "
        "such as https://api.example.com/v1,large",
    ),
    _argument("--api-key-env=VARIABLE", "environment variable with the endpoint's key; default: no key", default=""),
    _argument(
        "--policy=[NAME=]DIR:many",
        "trained weights, for policy NAME if there are several; default: the base model",
        default=[],
    ),
    _argument("--journal:path", "new directory for the episodes; default: one in runs/"),
    _argument(
        "--against=[NAME=]DIR|base:many",
        "other weights, or `base` for the base model, on the same tasks and seeds: shows whether the policy is better, "
        "with a paired interval",
        default=[],
    ),
    _argument("--tasks:int", "number of held-out tasks, instead of evaluation.tasks"),
)
_CHECK = (
    _argument("id?:name", "registered name, module:Class, path/to/env.py:Class, or a run's FILE.toml"),
    _argument("--model=DIR:name", "model directory: check whether its chat template shows the environment's tools"),
    _argument(
        "--loss=NAME:name",
        "call the loss on synthetic steps: shape, finite gradients, purity; module:name or FILE.py:name",
    ),
    _argument("--advantage=NAME:name", "call the advantage on synthetic groups"),
    _argument("--scorer=NAME:name", "call the scorer on synthetic conversations"),
)
_RUN_COMMANDS = (
    Command(
        "list",
        "list the runs in a directory",
        "runs:run_list",
        (_argument("directory?:path", "default: runs", default=Path("runs")),),
    ),
    Command("stats", "count episodes by policy, and show how long they took", "runs:run_stats", (_RUN,)),
    Command(
        "curve",
        "plot the reward over the steps",
        "runs:run_curve",
        (_RUN, _argument("--metric", "plot this metric instead of the reward")),
    ),
    Command(
        "compare",
        "compare runs: settings and code that differ, metrics, curves, paired held-out rewards with intervals",
        "runs:run_compare",
        _COMPARE,
    ),
    Command(
        "view",
        "show one screen of a run, also while it trains; q leaves",
        "runs:run_view",
        (_RUN, _argument("--once:flag", "print the screen once and stop")),
    ),
    Command("export", "write episodes as a file of another format", "runs:run_export", _EXPORT, _READING_RUN),
    Command(
        "serve",
        "show runs in a browser on this machine, also while they train; Ctrl-C ends it",
        "runs:run_serve",
        _SERVE,
        _READING_RUN,
    ),
    Command("pause", "stop a running run at the next safe point, until `run resume`", "control:run_pause", (_RUN,)),
    Command("resume", "continue a run that `run pause` stopped", "control:run_resume", (_RUN,)),
    Command("drain", "start no more episodes, train on those in flight, and end the run", "control:run_drain", (_RUN,)),
    Command(
        "set",
        "change settings of a running run",
        "control:run_set",
        (_RUN, _argument("settings+=KEY=VALUE", "such as max_in_flight=64")),
        epilog=f"settings that may change while the run runs: {LIVE_SETTINGS}",
    ),
    Command(
        "ledger",
        "count every episode and unit; exit code 1 if one is lost or was trained twice",
        "runs:run_ledger",
        (_RUN,),
        _READING_RUN,
    ),
    Command(
        "prune",
        "delete old tokens and step columns of a stopped run; rewards, credits and steps are kept",
        "runs:run_prune",
        (_RUN, _KEEP, _argument("--dry-run:flag", "print what would be deleted, and delete nothing")),
        _READING_RUN,
    ),
    Command("winrates", "show how policies do against their past versions", "runs:run_winrates", (_RUN,)),
    Command(
        "metrics",
        "print the newest value of each metric",
        "runs:run_metrics",
        (_RUN, _argument("--prometheus:flag", "in Prometheus' text format")),
    ),
)
_EPISODE_COMMANDS = (
    Command(
        "list",
        "list the episodes of a run",
        "episodes:episode_list",
        _LIST,
        epilog=f"columns: {EPISODE_COLUMNS}, reward/SEAT, metric.NAME, data.NAME",
    ),
    Command("show", "show what happened in an episode", "episodes:episode_show", _EPISODE),
    Command(
        "tokens",
        "show an episode's tokens, colored by the version that sampled them",
        "episodes:episode_tokens",
        (*_EPISODE, _argument("--details:flag", "one line per token, with everything recorded about it")),
    ),
    Command(
        "why",
        "explain an episode: why it waited and ended, its reward, and the step that trained on it",
        "episodes:episode_why",
        _EPISODE,
    ),
    Command(
        "diff",
        "compare two episodes, or a fork with its parent, up to where they differ",
        "episodes:episode_diff",
        (
            _RUN,
            _argument("id?", "episode id; forks/f0 is a fork of the run"),
            _argument("other?", "id of the other episode; default: the parent of the first"),
        ),
    ),
    _replaying(
        "episode_replay",
        "re-execute an episode over its journal; exit code 1 if it departs, with place and reason",
        *_REPLAY_ARGUMENTS,
        _argument("--until=CALL", "stop after this call, such as r#7"),
        _argument("--step:flag", "print each call as it is replayed"),
    ),
    _replaying(
        "episode_rescore",
        "recompute an episode's rewards with the current code; exit code 1 if anything else differs",
        *_REPLAY_ARGUMENTS,
    ),
    _replaying(
        "episode_fork",
        "resample an episode from one of its turns, or continue from an edited message; exit code 1 if a fork was "
        "dropped",
        *_FORK,
    ),
)
_STEP_COMMANDS = (
    Command("list", "list the steps of a run", "episodes:step_list", (_RUN, _POLICY)),
    _replaying(
        "step_replay",
        "rebuild the inputs of steps from the journal, or compute one step again; exit code 1 if it differs",
        _argument("run:name", "directory or name of a run"),
        _argument("step?:int", "step number; default: every step, without computing"),
        _POLICY,
        _argument("--lineage:int", "lineage; default: the newest that took the step"),
    ),
)
_ENV_COMMANDS = (
    Command("list", "list the installed environments", "environments:env_list"),
    Command(
        "check",
        "check that an environment, or your own loss, advantage or scorer, can be used for training",
        "environments:env_check",
        _CHECK,
        "loading the checks",
        takes_overrides=True,
    ),
    Command(
        "new",
        "write a new environment, with its tests and a configuration",
        "environments:env_new",
        (_argument("name", "lower-case letters, digits and underscores; the directory must not exist"),),
        "writing {name}",
    ),
)
READING = (
    CommandGroup(
        "run",
        "list, view, compare, serve, export or prune runs; pause, drain or change a running one",
        _RUN_COMMANDS,
    ),
    CommandGroup("episode", "list episodes, or show one", _EPISODE_COMMANDS),
    CommandGroup("step", "list optimizer steps, or repeat one", _STEP_COMMANDS),
)
"""Commands that read a run."""
COMMANDS: tuple[Command | CommandGroup, ...] = (
    Command(
        "train",
        "train the policies of a configuration",
        "training:train",
        (_argument("file:path", _FILE), _MODEL, *_STARTS),
        "reading {file}",
        takes_overrides=True,
        epilog=_SETTINGS,
    ),
    Command(
        "evaluate",
        "measure a policy on held-out tasks",
        "training:evaluate",
        _EVALUATE,
        "reading {file}",
        takes_overrides=True,
    ),
    Command(
        "demo",
        "train a small language model to use a tool, in about 100 CPU seconds",
        "training:demo",
        (_argument("example?", "a shipped example; default: 01_tool_use", default="01_tool_use"), *_STARTS),
        "reading example {example}",
        takes_overrides=True,
        epilog=_SETTINGS,
    ),
    *READING,
    CommandGroup("env", "list environments, check one, or write a new one", _ENV_COMMANDS),
    Command(
        "doctor",
        "report what this machine has, which resources a run will use, and what is missing",
        "doctor:doctor",
        (
            _argument("file?:path", f"{_FILE}; default: the demo's"),
            _MODEL,
            _argument("--sandbox:flag", "also check what this machine can isolate, with the driver of FILE"),
        ),
        "examining this machine",
        takes_overrides=True,
    ),
    Command(
        "skill",
        "print instructions for coding agents: write an environment, train, read episodes, fix, compare",
        "skill:print_skill",
    ),
)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests a command for one that does not exist."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            if sentence := removed_name(f"{self.prog} {value}"):
                self.error(sentence)
            close = difflib.get_close_matches(value, action.choices, n=1)
            close += [f"{name} {value}" for name, parser in action.choices.items() if value in _verbs(parser)]
            hint = f"did you mean {self.prog} {close[0]}?" if close else f"there are: {', '.join(action.choices)}"
            self.error(f"there is no command {value!r}; {hint}")
        super()._check_value(action, value)


def _verbs(parser: argparse.ArgumentParser) -> list[str]:
    """The commands of a group."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [verb for group in groups for verb in group.choices]


def nearest_option(parser: argparse.ArgumentParser, argument: str) -> str:
    """Return the option of a command that an unknown argument resembles; "" if there is none."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return next(iter(difflib.get_close_matches(argument.partition("=")[0], options, n=1, cutoff=0.75)), "")


@functools.cache
def make_parser() -> argparse.ArgumentParser:
    """Make the whole command line, once per process: argparse looks up every help text in the file system."""
    top: argparse.ArgumentParser = _Parser(
        prog="agentrl",
        description="Reinforcement learning of language-model agents; its unit is the episode.",
        allow_abbrev=False,
    )
    top.add_argument(
        "--version", action="store_const", dest="command", const="doctor:print_version", help="print the version"
    )
    top.set_defaults(command=None, parser=top, takes_overrides=False, opening="")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for entry in COMMANDS:
        if isinstance(entry, Command):
            _add_command(commands, entry)
            continue
        first = entry.verbs[0]
        parser = _add_command(commands, Command(entry.name, entry.help, first.function))
        silent = argparse.ArgumentParser(add_help=False)  # the bare noun runs the first verb with default arguments
        _add_arguments(silent, first)
        parser.set_defaults(**vars(silent.parse_args([])))
        verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
        for verb in entry.verbs:
            _add_command(verbs, verb)
    return top


def _add_command(commands: Subparsers[argparse.ArgumentParser], command: Command) -> argparse.ArgumentParser:
    parser = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(
        command=command.function, parser=parser, opening=command.opening, takes_overrides=command.takes_overrides
    )
    _add_arguments(parser, command)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
    parser.epilog = command.epilog
    for argument in command.arguments:
        parser.add_argument(argument.name, **argument.keywords)
