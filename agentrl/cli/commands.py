"""The command line: every command with its arguments and its function's name; the function is imported when called.

The commands that read a run are a table, `READING`: noun, verbs, arguments. Their functions are in the module of the
noun: `runs.py`, `episodes.py` (of steps, too).
"""

from __future__ import annotations

import argparse
import difflib
import functools
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.files import expand_path
from agentrl.inspection.export.formats import EXPORTS

Subparsers = argparse._SubParsersAction  # argparse has no public name for this type

EPISODE_COLUMNS = (
    "episode, attempt, status, purpose, environment, task, group, parent, seats, policies, oldest_step, lineage, "
    "staleness, reward, stop_reason, drop_reason, turns, tokens, seconds, detail, admitted_at, committed_at"
)
"""Columns that `episode list` filters and sorts by, for its help: nothing is imported to print it."""
LIVE_SETTINGS = "steps, max_in_flight, max_in_flight_per_task, evaluation.every, checkpoint.every"
"""Settings that `run set` may change, for its help."""
_FILE = "TOML file; change it with --section.field=value"


def _bounded_int(text: str) -> int:
    """Parse a whole number within the range of every column and counter."""
    value = int(text)
    if not -(2**31) <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text[:20]} is out of range")
    return value


def _path(text: str) -> Path:
    return Path(expand_path(text))


class Argument(NamedTuple):
    """An argument of a command: its name, and its argparse keywords."""

    name: str
    keywords: dict[str, Any]


class Command(NamedTuple):
    """A command of a group, such as `show` of `agentrl episode`."""

    name: str
    help: str
    function: str
    """Function of the command, as `module:function` in `agentrl.cli`."""
    arguments: tuple[Argument, ...] = ()
    reads: bool = True
    """Whether the command only reads; see `_add_command`."""
    takes_overrides: bool = False
    """Whether `--section.field=value` names what a recorded run may use here."""
    epilog: str | None = None


class CommandGroup(NamedTuple):
    """A group of commands; a bare noun runs its first verb."""

    name: str
    help: str
    verbs: tuple[Command, ...]


def _argument(name: str, **keywords: Any) -> Argument:
    return Argument(name, keywords)


_RUN = _argument("run", nargs="?", type=expand_path, help="name or directory of a run; default: the newest in runs/")
_ID = _argument(
    "id", nargs="?", help="episode id, such as e100, or e100.1 for its attempt 1; default: the newest that ended"
)
_ATTEMPT = _argument("--attempt", type=_bounded_int, help="attempt of the episode; default: the newest")
_POLICY = _argument("--policy", help="policy name; required if several policies have this step")
_LINEAGE = _argument("--lineage", type=_bounded_int, help="lineage; default: the newest that took the step")
_EPISODE = (_RUN, _ID, _ATTEMPT)
_ENVIRONMENT = _argument(
    "--environment",
    type=expand_path,
    metavar="REF",
    help="code to run, such as path/to/env.py:Class; required if the environment is not installed",
)
_REPLAY_ARGUMENTS = (
    *_EPISODE,
    _argument("--where", help="every episode that matches this filter, instead of one"),
    _argument("--limit", type=_bounded_int, default=100_000, help="at most this many of them"),
    _ENVIRONMENT,
)

_RECEIVED = (
    "--section.field=value and --task.key=value name what a run that was not trained here may use on this machine, "
    "such as its model; the command prints the ones it needs."
)

READING = (
    CommandGroup(
        "run",
        "list, view, compare, serve, export, copy or prune runs; pause, drain or change a running one",
        (
            Command(
                "list",
                "list the runs in a directory",
                "runs:run_list",
                (_argument("directory", nargs="?", type=_path, default=Path("runs"), help="default: runs"),),
            ),
            Command("stats", "count episodes by policy, and show how long they took", "runs:run_stats", (_RUN,)),
            Command(
                "curve",
                "plot the reward over the steps",
                "runs:run_curve",
                (_RUN, _argument("--metric", help="plot this metric instead of the reward")),
            ),
            Command(
                "compare",
                "compare runs: settings and code that differ, metrics, curves, paired held-out rewards with intervals",
                "runs:run_compare",
                (
                    _argument(
                        "runs",
                        nargs="+",
                        type=expand_path,
                        metavar="RUN",
                        help="directories or names; the first is the baseline",
                    ),
                    _argument("--by", choices=["step", "tokens", "seconds"], default="step", help="axis of the curves"),
                    _argument(
                        "--metric",
                        action="append",
                        metavar="NAME",
                        help="curves of this metric instead of the rewards; may be repeated",
                    ),
                    _argument(
                        "--margin",
                        type=float,
                        default=0.0,
                        metavar="DIFFERENCE",
                        help="held-out reward by which a run must be better than the baseline; default: 0",
                    ),
                ),
            ),
            Command(
                "view",
                "show one screen of a run, also while it trains; q leaves",
                "runs:run_view",
                (_RUN, _argument("--once", action="store_true", help="print the screen once and stop")),
            ),
            Command(
                "export",
                "write episodes as a file of another format",
                "runs:run_export",
                (
                    _RUN,
                    _argument(
                        "--to",
                        required=True,
                        choices=list(EXPORTS),
                        help="; ".join(f"{name}: {format.help}" for name, format in EXPORTS.items()),
                    ),
                    _argument("--out", type=_path, metavar="PATH", help="output path; default: in the run's directory"),
                    _argument("--where", default="", help="only episodes that match this filter"),
                    _argument("--match", default="", help="only episodes that contain all these words"),
                    _argument(
                        "--limit",
                        type=_bounded_int,
                        metavar="N",
                        help="only the newest N of them; default: 1000 for html, all for other formats",
                    ),
                    _argument("--force", action="store_true", help="replace an existing file"),
                ),
                reads=False,
            ),
            Command(
                "serve",
                "show runs in a browser on this machine, also while they train; Ctrl-C ends it",
                "runs:run_serve",
                (
                    _argument(
                        "run", nargs="?", type=expand_path, help="run, or directory of runs; default: all runs in runs/"
                    ),
                    _argument("--port", type=_bounded_int, default=0, help="port on 127.0.0.1; default: any free one"),
                    _argument(
                        "--host-name",
                        action="append",
                        default=[],
                        metavar="NAME",
                        help="answer requests under this name too, such as viewer.example.com, from a proxy; may be "
                        "repeated",
                    ),
                ),
                reads=False,
            ),
            Command(
                "whatif",
                "execute recorded episodes in a changed environment, sampling only what follows the first difference",
                "episodes:run_whatif",
                (
                    _RUN,
                    _argument(
                        "--environment", type=expand_path, metavar="REF", help="the changed code, such as new.py:Class"
                    ),
                    _argument("--where", help="episodes that match this filter; default: the newest evaluation's"),
                    _argument("--limit", type=_bounded_int, default=1000, help="at most this many (default 1000)"),
                ),
                reads=False,
                takes_overrides=True,
                epilog=_RECEIVED,
            ),
            Command(
                "pause", "stop a running run at the next safe point, until `run resume`", "control:run_pause", (_RUN,)
            ),
            Command("resume", "continue a run that `run pause` stopped", "control:run_resume", (_RUN,)),
            Command(
                "drain",
                "start no more episodes, train on those in flight, and end the run",
                "control:run_drain",
                (_RUN,),
            ),
            Command(
                "set",
                "change settings of a running run",
                "control:run_set",
                (_RUN, _argument("settings", nargs="+", metavar="KEY=VALUE", help="such as max_in_flight=64")),
                epilog=f"settings that may change while the run runs: {LIVE_SETTINGS}",
            ),
            Command(
                "mirror",
                "keep a copy of a running run on another disk or node, to resume it from there",
                "runs:run_mirror",
                (
                    _RUN,
                    _argument(
                        "--to",
                        required=True,
                        type=expand_path,
                        metavar="PLACE",
                        help="PATH here, or NODE:/PATH in the cluster",
                    ),
                    _argument("--every", type=float, default=10.0, metavar="SECONDS", help="pause; default 10"),
                    _argument("--address", default="auto", help="of the Ray cluster; default: auto"),
                    _argument("--once", action="store_true", help="copy once and stop"),
                ),
                reads=False,
            ),
            Command(
                "ledger",
                "count every episode and unit; exit code 1 if one is lost or was trained twice",
                "runs:run_ledger",
                (_RUN,),
                reads=False,
            ),
            Command(
                "prune",
                "delete old tokens and step columns of a stopped run; rewards, credits and steps are kept",
                "runs:run_prune",
                (
                    _RUN,
                    _argument(
                        "--keep",
                        type=_bounded_int,
                        metavar="STEPS",
                        help="newest steps of each policy whose tokens stay; 0: only those that checkpoints need; "
                        "default: journal.keep",
                    ),
                    _argument("--dry-run", action="store_true", help="print what would be deleted, and delete nothing"),
                ),
                reads=False,
            ),
            Command("winrates", "show how policies do against their past versions", "runs:run_winrates", (_RUN,)),
            Command(
                "metrics",
                "print the newest value of each metric",
                "runs:run_metrics",
                (_RUN, _argument("--prometheus", action="store_true", help="in Prometheus' text format")),
            ),
        ),
    ),
    CommandGroup(
        "episode",
        "list episodes, or show one",
        (
            Command(
                "list",
                "list the episodes of a run",
                "episodes:episode_list",
                (
                    _RUN,
                    _argument("--where", default="", help="filter by columns, such as 'reward < 0 and turns > 4'"),
                    _argument(
                        "--match", default="", help="only episodes that contain all these words; indexes the run"
                    ),
                    _argument("--sort", default="admitted_at", help="column to sort by; largest first"),
                    _argument("--ascending", action="store_true", help="smallest first"),
                    _argument("--columns", default="", help="columns to show, such as 'episode,reward,data.level'"),
                    _argument("--limit", type=_bounded_int, default=50, help="at most this many (default 50)"),
                    _argument("--offset", type=_bounded_int, default=0, help="skip this many first"),
                ),
                epilog=f"columns: {EPISODE_COLUMNS}, reward/SEAT, metric.NAME, data.NAME",
            ),
            Command("show", "show what happened in an episode", "episodes:episode_show", _EPISODE),
            Command(
                "tokens",
                "show an episode's tokens, colored by the version that sampled them",
                "episodes:episode_tokens",
                (
                    *_EPISODE,
                    _argument(
                        "--details", action="store_true", help="one line per token, with everything recorded about it"
                    ),
                ),
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
                    _argument("id", nargs="?", help="episode id; forks/f0 is a fork of the run"),
                    _argument("other", nargs="?", help="id of the other episode; default: the parent of the first"),
                ),
            ),
            Command(
                "replay",
                "re-execute an episode over its journal; exit code 1 if it departs, with place and reason",
                "episodes:episode_replay",
                (
                    *_REPLAY_ARGUMENTS,
                    _argument("--until", metavar="CALL", help="stop after this call, such as r#7"),
                    _argument("--step", action="store_true", help="print each call as it is replayed"),
                ),
                reads=False,
                takes_overrides=True,
                epilog=_RECEIVED,
            ),
            Command(
                "rescore",
                "recompute an episode's rewards with the current code; exit code 1 if anything else differs",
                "episodes:episode_rescore",
                _REPLAY_ARGUMENTS,
                reads=False,
                takes_overrides=True,
                epilog=_RECEIVED,
            ),
            Command(
                "fork",
                "resample an episode from one of its turns, or continue from an edited message; exit code 1 if a fork "
                "was dropped",
                "episodes:episode_fork",
                (
                    *_EPISODE,
                    _argument(
                        "--at",
                        type=_bounded_int,
                        required=True,
                        metavar="TURN",
                        help="turn number from 0; -1 is the last",
                    ),
                    _ENVIRONMENT,
                    _argument("-n", type=_bounded_int, default=1, metavar="K", help="number of forks (default 1)"),
                    _argument(
                        "--edit",
                        type=_path,
                        metavar="FILE",
                        help="file with messages that replace the turn's, or an external agent's reply",
                    ),
                    _argument(
                        "--policy",
                        action="append",
                        default=[],
                        metavar="[SEAT=]WHO",
                        help="policies to use instead: a directory of weights, a version (solver@0.5), or another "
                        "policy in a seat (checker=solver); may be given several times",
                    ),
                ),
                reads=False,
                takes_overrides=True,
                epilog=_RECEIVED,
            ),
            Command("forks", "show the forks of a run as a tree", "episodes:episode_forks", (_RUN,)),
        ),
    ),
    CommandGroup(
        "step",
        "list optimizer steps, or repeat one",
        (
            Command("list", "list the steps of a run", "episodes:step_list", (_RUN, _POLICY)),
            Command(
                "replay",
                "rebuild the inputs of steps from the journal, or compute one step again; exit code 1 if it differs",
                "episodes:step_replay",
                (
                    _argument("run", type=expand_path, help="directory or name of a run"),
                    _argument(
                        "step", nargs="?", type=_bounded_int, help="step number; default: every step, without computing"
                    ),
                    _POLICY,
                    _LINEAGE,
                ),
                reads=False,
                takes_overrides=True,
                epilog=_RECEIVED,
            ),
        ),
    ),
)
"""Commands that read a run."""


class _Parser(argparse.ArgumentParser):
    """A parser that suggests a command for one that does not exist."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
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
    top.set_defaults(command=None, parser=top, takes_overrides=False, reads=True, opening="")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_demo(commands)
    for noun in READING:
        _add_reading(commands, noun)
    _add_env(commands)
    _add_serve(commands)
    _add_doctor(commands)
    text = "print instructions for coding agents: write an environment, train, read episodes, fix, compare"
    _add_command(commands, "skill", text, "skill:print_skill", reads=True)
    return top


def _add_serve(commands: Subparsers[argparse.ArgumentParser]) -> None:
    noun = _add_command(
        commands, "serve", "let programs of other libraries sample and train here", "serving:serve_tinker"
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "serve the Tinker protocol, for scripts that use the tinker SDK; Ctrl-C ends it, and a new start continues"
    parser = _add_command(verbs, "tinker", text, "serving:serve_tinker")
    parser.add_argument("file", type=_path, help=_FILE)
    parser.add_argument("--port", type=_bounded_int, default=8000, help="port to listen on; default: 8000; 0: any")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.set_defaults(takes_overrides=True, opening="reading {file}")


def _add_doctor(commands: Subparsers[argparse.ArgumentParser]) -> None:
    text = "report what this machine has, which resources a run will use, and what is missing"
    parser = _add_command(commands, "doctor", text, "doctor:doctor")
    parser.add_argument(
        "file", type=_path, nargs="?", help=f"{_FILE}; default: the demo's. A run: how long its steps take, and why"
    )
    parser.add_argument("--model", type=expand_path, help="directory of the base model, instead of model.path")
    parser.add_argument(
        "--sandbox", action="store_true", help="also check what this machine can isolate, with the driver of FILE"
    )
    parser.add_argument("--suggest", action="store_true", help="also show settings that suit the models' sizes")
    parser.add_argument(
        "--time",
        action="store_true",
        help="also measure what a step of FILE takes on this machine's CPUs: 20 s or more",
    )
    parser.set_defaults(takes_overrides=True, opening="examining this machine")


def _add_command(
    commands: Subparsers[argparse.ArgumentParser], name: str, text: str, command: str, *, reads: bool = False
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: group of the command.
        name: the word on the command line.
        text: help text.
        command: `module:function` in `agentrl.cli`, imported when called; it takes the options and returns an exit
            code.
        reads: whether the command only prints, so that a pipe closed early is not a failure.
    """
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=command, parser=parser, reads=reads, opening="")
    return parser


def _add_train(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "train", "train the policies of a configuration", "training:train")
    parser.add_argument("file", type=_path, help=_FILE)
    parser.add_argument("--model", type=expand_path, help="directory of the base model, instead of model.path")
    parser.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settings and the plan that follows from them, and stop"
    )
    parser.set_defaults(takes_overrides=True, opening="reading {file}")


class _ReplacedByAgainst(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error("--compare was replaced by --against, which shows whether the policy is better than other weights")


def _add_evaluate(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "evaluate", "measure a policy on held-out tasks", "training:evaluate")
    _add_endpoint_options(parser)
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="[NAME=]DIR|base",
        help="other weights, or `base` for the base model, on the same tasks and seeds: shows whether the policy is "
        "better by more than evaluation.margin, with an interval that may be read at any time",
    )
    parser.add_argument("--compare", action=_ReplacedByAgainst, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=_bounded_int, help="number of held-out tasks, instead of evaluation.tasks")


def _add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands in which policies act without being trained."""
    parser.add_argument("file", type=_path, help=_FILE)
    parser.add_argument(
        "--model",
        type=expand_path,
        metavar="DIR|URL[,NAME]",
        help="directory instead of model.path; or an OpenAI chat-completions endpoint for every seat, with its model "
        "name, such as https://api.example.com/v1,large",
    )
    parser.add_argument(
        "--api-key-env",
        default="",
        metavar="VARIABLE",
        help="environment variable with the endpoint's key; default: no key",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="trained weights, for policy NAME if there are several; default: the base model",
    )
    parser.add_argument(
        "--journal",
        type=_path,
        help="new directory for the episodes; default: one in runs/",
    )
    parser.set_defaults(takes_overrides=True, opening="reading {file}")


def _add_demo(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "demo", "train a small language model to use a tool, in about 100 CPU seconds", "training:demo"
    )
    parser.add_argument("example", nargs="?", default="01_tool_use", help="a shipped example; default: 01_tool_use")
    parser.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settings and the plan that follows from them, and stop"
    )
    sample = "write the sample run runs/sample instead, in seconds and without a model"
    parser.add_argument("--journal-only", action="store_true", help=sample)
    parser.set_defaults(takes_overrides=True, opening="reading example {example}")


def _add_reading(commands: Subparsers[argparse.ArgumentParser], noun: CommandGroup) -> None:
    """Add a noun of the table and its verbs; the bare noun runs the first verb with default arguments."""
    first = noun.verbs[0]
    parser = _add_command(commands, noun.name, noun.help, first.function, reads=True)
    silent = argparse.ArgumentParser(add_help=False)
    _add_arguments(silent, first)
    parser.set_defaults(**vars(silent.parse_args([])))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    for verb in noun.verbs:
        child = _add_command(verbs, verb.name, verb.help, verb.function, reads=verb.reads)
        child.set_defaults(takes_overrides=verb.takes_overrides, opening="" if verb.reads else "reading the run")
        _add_arguments(child, verb)


def _add_arguments(parser: argparse.ArgumentParser, verb: Command) -> None:
    parser.epilog = verb.epilog
    for argument in verb.arguments:
        parser.add_argument(argument.name, **argument.keywords)


def _add_env(commands: Subparsers[argparse.ArgumentParser]) -> None:
    noun = _add_command(
        commands, "env", "list environments, check one, or write a new one", "environments:env_list", reads=True
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND")
    _add_command(verbs, "list", "list the installed environments", "environments:env_list", reads=True)
    text = "check that an environment, or your own loss, advantage or scorer, can be used for training"
    parser = _add_command(verbs, "check", text, "environments:env_check")
    parser.set_defaults(takes_overrides=True, opening="loading the checks")
    parser.add_argument(
        "id",
        nargs="?",
        type=expand_path,
        help="registered name, module:Class, path/to/env.py:Class, or a run's FILE.toml",
    )
    text = "model directory: check whether its chat template shows the environment's tools"
    parser.add_argument("--model", type=expand_path, metavar="DIR", help=text)
    text = "call the loss on synthetic steps: shape, finite gradients, purity; module:name or FILE.py:name"
    parser.add_argument("--loss", type=expand_path, metavar="NAME", help=text)
    parser.add_argument("--advantage", type=expand_path, metavar="NAME", help="call the advantage on synthetic groups")
    parser.add_argument("--scorer", type=expand_path, metavar="NAME", help="call the scorer on synthetic conversations")
    text = "check which task directories of another format can run, and why others cannot"
    parser = _add_command(verbs, "import", text, "environments:env_import")
    parser.add_argument("format", choices=["harbor"])
    parser.add_argument("directory", type=expand_path, help="a task directory, or a directory of them")
    text = "directory with the files of an image, or / for this machine's /usr; may be repeated"
    parser.add_argument("--root", metavar="IMAGE=DIR", action="append", default=[], help=text)
    parser.add_argument("--network", choices=["none", "open"], default="none", help="network of the sandboxes")
    parser = _add_command(
        verbs, "new", "write a new environment, with its tests and a configuration", "environments:env_new"
    )
    parser.add_argument("name", help="lower-case letters, digits and underscores; the directory must not exist")
