"""`agentrl run …`, and the shared part of all commands that read a run: `make_run_command` opens the run, asks a
question and prints.

A question is a function from a reader and the options to an `RunAnswer`, whose value `--json` prints and whose page a
terminal shows. The questions about episodes are in `episodes.py`, those about steps in `steps.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.cli.output import print_json, print_json_line, print_text
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.core.text import escape_line, plural
from agentrl.inspection.comparisons import locate_episode
from agentrl.inspection.reader import RunReader, convert_damage_errors, list_runs
from agentrl.observe.metrics import interval_metric
from agentrl.observe.run_directory import run_argument

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from agentrl.inspection.render import TerminalPage
    from agentrl.journal.port import PruneTotals

RUNS = Path("runs")
PROBLEMS_SHOWN = 5
"""Maximum number of problems that `run export` prints."""
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_EPISODE = re.compile(r"(forks/)?[a-z]\d+(?![\w-])")
"""Pattern of an episode id; a matching argument is taken as an episode."""


class RunAnswer(NamedTuple):
    """The answer to a question about a run."""

    value: Any
    """Record or records that `--json` prints."""
    page: Callable[[], TerminalPage]
    """Renders the page for a terminal."""
    code: int = 0
    """Exit code."""


Question = Callable[[RunReader, "argparse.Namespace"], RunAnswer]
"""Answers a question about a run."""


def make_run_command(question: Question) -> Callable[[argparse.Namespace], int]:
    """Make a command of the parser: open the run, ask the question, print the answer."""

    def run(options: argparse.Namespace) -> int:
        with open_run(options) as reader:
            return print_answer(question(reader, options), options)

    run.__doc__ = question.__doc__
    return run


def print_answer(answer: RunAnswer, options: argparse.Namespace) -> int:
    """Print an answer; returns its exit code."""
    if options.json:
        print_json(answer.value)
    else:
        print_text(answer.page())
    return answer.code


@contextlib.contextmanager
def open_run(options: argparse.Namespace) -> Iterator[RunReader]:
    """Open the run that a command names; the default is the newest in `runs/`.

    `agentrl episode show e12` names no run: an argument that looks like an episode and is not a run moves to the next
    place. For a single fork, `forks/f0`, the reader is that of the run's forks, and `options.id` the id there.
    """
    name = options.run
    takes_episode, takes_two = hasattr(options, "id"), hasattr(options, "other")
    lacks_episode = takes_episode and (options.id is None or (takes_two and options.other is None))
    if name is not None and lacks_episode and _EPISODE.match(name) and not find_run(name).exists():
        if takes_two:
            options.other = options.id
        name, options.id = None, name
    with contextlib.closing(RunReader(find_run(name))) as run, convert_damage_errors(run.log):
        if takes_episode and not takes_two and options.id is not None:
            with locate_episode(run, options.id) as (reader, options.id), convert_damage_errors(reader.log):
                options.id, options.attempt = reader.named_attempt(options.id, getattr(options, "attempt", None))
                yield reader
        else:
            yield run


def find_run(name: str | None) -> Path:
    """Return the directory of a run by its path, its name in `runs/`, or None for the newest there.

    Raises:
        InputError: there are no runs.
    """
    if name is None:
        runs = [path for path in RUNS.iterdir() if _is_run(path)] if RUNS.is_dir() else []
        if not runs:
            raise InputError(
                f"there are no runs in {RUNS.absolute()}; name a run's directory, or make one with `agentrl train`"
            )
        return max(runs, key=_written_at)
    path = Path(name)
    return path if path.exists() or not (RUNS / name).exists() else RUNS / name


def _is_run(path: Path) -> bool:
    try:
        return (path / "journal").is_dir()
    except OSError:  # such as a directory of another user
        return False


def _written_at(run: Path) -> float:
    """Time of the last write to a journal. A reader makes files as well: empty logs, and their indexes (`-shm`)."""
    times = [0.0]
    for path in (run / "journal").glob("*.db*"):
        with contextlib.suppress(OSError):  # SQLite removes the logs when a run ends
            file = path.stat()
            if file.st_size and not path.name.endswith("-shm"):
                times.append(file.st_mtime)
    return max(times)


# --- the commands -----------------------------------------------------------------------------------------------------


def run_list(options: argparse.Namespace) -> int:
    """`agentrl run list [DIRECTORY]`."""
    from agentrl.inspection.render import run_table

    lines = list_runs(options.directory)
    return print_answer(RunAnswer(lines, lambda: run_table(lines)), options)


@make_run_command
def run_stats(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl run stats [RUN]`."""
    from agentrl.inspection.render import statistics_page
    from agentrl.inspection.statistics import run_statistics

    figures = run_statistics(reader)
    return RunAnswer(figures, lambda: statistics_page(figures))


@make_run_command
def run_curve(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl run curve [RUN] [--metric NAME]`."""
    from agentrl.inspection.render import metric_curves_page, reward_curves_page

    if options.metric is None:
        points = reader.curve()
        return RunAnswer(points, lambda: reward_curves_page(points))
    values = reader.metric(options.metric)
    if not values:
        names = reader.metric_names()
        suggestions = [name for name in names if options.metric in name.split("/")]
        suggestions = suggestions or difflib.get_close_matches(options.metric, names, n=3)
        hint = (
            f"did you mean {' or '.join(suggestions)}?"
            if suggestions
            else f"recorded were: {', '.join(names) or 'none'}"
        )
        raise InputError(f"no metric {options.metric!r}; {hint}")
    series: list[dict[str, Any]] = [
        {"policy": name, "step": step, "value": value}
        for name, policy_points in values.items()
        for step, value in policy_points
    ]
    breaks = reader.evaluation_breaks() if options.metric.startswith("evaluation/") else {}
    errors = {name: dict(points) for name, points in reader.metric(interval_metric(options.metric)).items()}
    for point in series:
        if point["step"] in breaks.get(point["policy"], ()):
            point["tasks_changed"] = True
        if (error := errors.get(point["policy"], {}).get(point["step"])) is not None:
            point["error"] = error
    return RunAnswer(series, lambda: metric_curves_page(options.metric, values, breaks, errors))


def run_compare(options: argparse.Namespace) -> int:
    """`agentrl run compare A B … [--by AXIS] [--metric NAME]`."""
    from agentrl.inspection.render import comparison_page
    from agentrl.inspection.run_comparison import CURVES, compare_runs

    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(RunReader(find_run(name)))) for name in options.runs]
        for reader in readers:
            stack.enter_context(convert_damage_errors(reader.log))
        metrics = options.metric or CURVES
        comparison = compare_runs(readers, axis=options.by, metrics=metrics)
        return print_answer(RunAnswer(comparison, lambda: comparison_page(comparison)), options)


def run_view(options: argparse.Namespace) -> int:
    """`agentrl run view [RUN] [--once]`: until q, Ctrl-C, or the end of the run."""
    with open_run(options) as reader:
        if options.json:
            from agentrl.inspection.statistics import latest_metrics, run_state
            from agentrl.observe.alarms import find_alarms

            state = run_state(reader)
            print_json(
                {
                    "state": state.standing,
                    "status": state.status,
                    "metrics": latest_metrics(state),
                    "failure": state.failure,
                    "problem": state.problem,
                    "alarms": [alarm._asdict() for alarm in find_alarms(state)],
                }
            )
        elif options.once or not sys.stdout.isatty():
            print_text(_frame(reader, 100)[0])
        else:
            _show_frames(reader)
    return 0


def _frame(reader: RunReader, width: int) -> tuple[RenderableType, bool]:
    """Return the screen to show, and whether the run has ended."""
    from agentrl.inspection.statistics import run_state
    from agentrl.observe.run_screen import render_run_screen

    state = run_state(reader)
    status = state.status
    age_s = SystemClock().wall() - status.wall if status is not None and status.wall else None
    return render_run_screen(state, width=width, age_s=age_s), state.standing != "running"


def _show_frames(reader: RunReader) -> None:
    from rich.console import Console
    from rich.live import Live

    clock, console = SystemClock(), Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as wait_for_key,
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        has_ended, wait_s = False, 0.0
        while not has_ended and not wait_for_key(wait_s):
            start_s = clock.monotonic()
            frame, has_ended = _frame(reader, console.width)
            live.update(frame, refresh=True)
            # at most one frame a second, and at most a tenth of the time for reading: a long run is read less often
            wait_s = max(1.0, (clock.monotonic() - start_s) / 0.1)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, or until a key is pressed, and returns whether it was q."""
    import termios
    import tty

    streams = [sys.stdin] if sys.stdin is not None and sys.stdin.isatty() else []

    def wait_for_key(seconds: float) -> bool:
        ready, _, _ = select.select(streams, [], [], seconds)
        return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x04", b"")

    if not streams:
        yield wait_for_key
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    try:
        yield wait_for_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def run_metrics(options: argparse.Namespace) -> int:
    """`agentrl run metrics [RUN] [--prometheus]`: the newest value of each metric."""
    from agentrl.inspection.statistics import latest_metrics, run_state

    with open_run(options) as reader:
        state = run_state(reader)
    if options.prometheus:
        from agentrl.observe.sinks import format_prometheus_metrics

        sys.stdout.write(format_prometheus_metrics(state.plan.name, latest_metrics(state)))
    elif options.json:
        print_json(latest_metrics(state))
    else:
        from agentrl.inspection.render import metrics_page

        print_text(metrics_page(state))
    return 0


@make_run_command
def run_winrates(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl run winrates [RUN]`."""
    from agentrl.inspection.render import win_rate_table
    from agentrl.inspection.statistics import run_win_rates

    results = run_win_rates(reader)
    return RunAnswer(results, lambda: win_rate_table(results))


@make_run_command
def run_ledger(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl run ledger [RUN]`; exit code 1 if an equation does not hold, or data of a committed episode is
    missing.
    """
    from agentrl.inspection.render import ledger_page
    from agentrl.observe.progress import spinner

    with spinner("reading the control log", sys.stderr) as tell:

        def on_read(read: int, of: int) -> None:
            if read % 1000 == 0:
                tell(f"reading the entries of committed episodes: {read:,} of {of:,}")

        ledger = reader.ledger(on_read)
    value = {"holds": ledger.holds, **msgspec.to_builtins(ledger)}
    return RunAnswer(value, lambda: ledger_page(ledger), 0 if ledger.holds else CheckFailedError.exit_code)


@make_run_command
def run_prune(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl run prune [RUN] [--keep STEPS] [--dry-run]`."""
    from agentrl.inspection.render import pruned_page
    from agentrl.journal.port import PruneRule
    from agentrl.journal.pruning import prune
    from agentrl.journal.run_process import check_partitions_unlocked
    from agentrl.journal.store import SqliteJournal
    from agentrl.orchestrator.checkpoints import resumable_manifests

    section = reader.config().get("journal")
    run_setting = section.get("keep") if isinstance(section, dict) else None
    keep = run_setting if options.keep is None else options.keep
    if type(keep) is not int or keep < 0:
        raise InputError(
            "choose how much to keep: --keep=20 keeps the newest 20 steps of each policy; --keep=0 keeps only what "
            "resuming from a checkpoint needs"
        )
    manifests = resumable_manifests(reader.path / "checkpoints")
    rule = PruneRule(keep=keep, sealed=[manifest.versions for manifest in manifests])
    if not rule.sealed:
        raise InputError(
            f"{reader.path}: there is no checkpoint to resume from, so every episode may still be needed, and nothing "
            "can be pruned"
        )
    if options.dry_run:
        totals = prune(reader.journal, reader.log, rule, None)
    else:

        async def work() -> PruneTotals:
            journal = SqliteJournal(reader.journal)
            try:
                check_partitions_unlocked(reader.journal)
                return await journal.prune(rule)
            finally:
                await journal.close()

        totals = asyncio.run(work())
    return RunAnswer(totals, lambda: pruned_page(totals, is_dry=options.dry_run))


def run_export(options: argparse.Namespace) -> int:
    """`agentrl run export [RUN] --to FORMAT [--out PATH] [--where …] [--match …] [--limit N] [--force]`; exit code 1
    if an episode could not be written.
    """
    from agentrl.inspection.export.exporting import MAX_EPISODES, export
    from agentrl.observe.progress import ProgressLine

    with open_run(options) as reader, contextlib.closing(ProgressLine("exporting", sys.stderr)) as progress:
        export_result = export(
            reader,
            options.to,
            options.out,
            where=options.where,
            match=options.match,
            limit=options.limit,
            force=options.force,
            on_progress=progress,
        )
    code = CheckFailedError.exit_code if export_result.unreadable else 0
    if options.json:
        print_json(export_result)
        return code
    _say(f"{export_result.path}: {plural(export_result.episodes, 'episode')}")
    if export_result.left_out:
        count = export_result.episodes + export_result.unreadable + export_result.left_out
        is_too_long = options.to == "html" and count > MAX_EPISODES
        remedy = (
            f"browse all of them with `agentrl run serve {run_argument(reader.path)}`"
            if is_too_long
            else f"write all with --limit {count}"
        )
        _say(f"  the newest of {count:,}: {remedy}")
    for problem in export_result.problems[:PROBLEMS_SHOWN]:
        _say(f"  not readable: {problem}")
    if len(export_result.problems) > PROBLEMS_SHOWN:
        _say(f"  and {len(export_result.problems) - PROBLEMS_SHOWN:,} more (--json has them)")
    return code


def _say(line: str) -> None:
    sys.stdout.write(f"{escape_line(line)}\n")


def run_serve(options: argparse.Namespace) -> int:
    """`agentrl run serve [RUN] [--port N] [--host-name NAME]`."""
    if not 0 <= options.port < 65_536:
        raise InputError("--port must be a number from 0 to 65535")
    for name in options.host_name:
        if not _HOST_NAME.fullmatch(name):
            raise InputError(
                f"--host-name {name}: give a name alone, such as viewer.example.com, without scheme and port"
            )
    place = RUNS if options.run is None and RUNS.is_dir() else find_run(options.run)
    asyncio.run(_serve(place, options.port, options.host_name, as_json=options.json))
    return 0


async def _serve(run: Path, port: int, host_names: Sequence[str], *, as_json: bool) -> None:
    from agentrl.inspection.viewer.application import HOST, serve_viewer

    stop_event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_event.set)  # also if a background shell ignores Ctrl-C
    async with serve_viewer(run, port, host_names) as viewer:
        proxied = [viewer.address.replace(f"http://{HOST}:{viewer.port}", f"https://{name}") for name in host_names]
        if as_json:
            print_json_line({"address": viewer.address, "run": str(run), "proxied": proxied})
        else:
            lines = [f"{escape_line(str(run))} is at {viewer.address}"]
            lines += [f"and, with a proxy to port {viewer.port}, at {address}" for address in proxied]
            sys.stdout.write("\n".join([*lines, "Ctrl-C ends this.\n"]))
            sys.stdout.flush()
        await stop_event.wait()
