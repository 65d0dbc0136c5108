"""`agentrl run …`, `agentrl episode …` and `agentrl step …`: what a run's journal says.

Each command is a question: a function from a reader and the options to an `Answer`, whose value `--json` prints and
whose page a terminal shows. `command` makes of it what the parser calls.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.cli.output import print_json, print_json_line, print_text
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.inspection.comparisons import located
from agentrl.inspection.damage import damage_named
from agentrl.inspection.reader import RunReader, runs

if TYPE_CHECKING:
    import argparse

    from agentrl.inspection.reader import EpisodeLine
    from agentrl.inspection.render import Page
    from agentrl.journal.port import Pruned

RUNS = Path("runs")
_EPISODE = re.compile(r"(forks/)?[a-z]\d+(?![\w-])")
"""How the id of an episode begins, which no run is called by without intent."""


class Answer(NamedTuple):
    """What a question came to."""

    value: Any
    """A record, or several: what `--json` prints."""
    page: Callable[[], Page]
    """Makes what a terminal shows."""
    code: int = 0
    """Exit code."""


Question = Callable[[RunReader, "argparse.Namespace"], "Answer | None"]
"""None: it has printed what it had to say, as it came."""


def command(question: Question) -> Callable[[argparse.Namespace], int]:
    """What the parser calls: open the run, ask, print."""

    def run(options: argparse.Namespace) -> int:
        with open_run(options) as reader:
            answer = question(reader, options)
            return 0 if answer is None else printed(answer, options)

    run.__doc__ = question.__doc__
    return run


def printed(answer: Answer, options: argparse.Namespace) -> int:
    """Print an answer; its exit code."""
    if options.json:
        print_json(answer.value)
    else:
        print_text(answer.page())
    return answer.code


# --- runs -------------------------------------------------------------------------------------------------------------


def run_list(options: argparse.Namespace) -> int:
    """`agentrl run list [DIRECTORY]`."""
    from agentrl.inspection.render import run_table

    lines = runs(options.directory)
    return printed(Answer(lines, lambda: run_table(lines)), options)


@command
def run_curve(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run curve [RUN] [--metric NAME]`."""
    from agentrl.inspection.render import curves, metric_curves

    if options.metric is None:
        points = reader.curve()
        return Answer(points, lambda: curves(points))
    values = reader.metric(options.metric)
    if not values:
        names = reader.metric_names()
        near = [name for name in names if options.metric in name.split("/")]
        near = near or difflib.get_close_matches(options.metric, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"recorded were: {', '.join(names) or 'none'}"
        raise InputError(f"no metric {options.metric!r}; {hint}")
    told = [{"policy": name, "step": step, "value": value} for name, found in values.items() for step, value in found]
    return Answer(told, lambda: metric_curves(options.metric, values))


@command
def run_ledger(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run ledger [RUN]`; 1 if an equation does not hold, or something of a committed episode is missing."""
    from agentrl.inspection.render import ledger_view
    from agentrl.observe.progress import waiting

    with waiting("reading the control log", sys.stderr) as tell:

        def on_read(read: int, of: int) -> None:
            if read % 1000 == 0:
                tell(f"reading the entries of committed episodes: {read:,} of {of:,}")

        ledger = reader.ledger(on_read)
    value = {"holds": ledger.holds, **msgspec.to_builtins(ledger)}
    return Answer(value, lambda: ledger_view(ledger), 0 if ledger.holds else CheckFailedError.exit_code)


@command
def run_prune(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run prune [RUN] [--keep STEPS] [--dry-run]`."""
    import asyncio

    from agentrl.inspection.render import pruned_page
    from agentrl.journal.lock import check_partitions
    from agentrl.journal.port import PruneRule
    from agentrl.journal.pruning import prune
    from agentrl.journal.store import SqliteJournal
    from agentrl.orchestrator.manifest import sealed

    config = reader.info().get("config")
    section = config.get("journal") if isinstance(config, dict) else None
    recorded = section.get("keep") if isinstance(section, dict) else None
    keep = recorded if options.keep is None else options.keep
    if type(keep) is not int or keep < 0:
        raise InputError(
            "choose how much to keep: --keep=20 keeps the newest 20 steps of each policy; --keep=0 keeps only what "
            "resuming from a checkpoint needs"
        )
    rule = PruneRule(keep=keep, sealed=sealed(reader.path / "checkpoints"))
    if not rule.sealed:
        raise InputError(
            f"{reader.path}: there is no checkpoint to resume from, so every episode may be trained again, and nothing "
            "can be given up"
        )
    if options.dry_run:
        given_up = prune(reader.journal, reader.log, rule, None)
    else:

        async def work() -> Pruned:
            journal = SqliteJournal(reader.journal)
            try:
                check_partitions(reader.journal)
                return await journal.prune(rule)
            finally:
                await journal.close()

        given_up = asyncio.run(work())
    return Answer(given_up, lambda: pruned_page(given_up, is_dry=options.dry_run))


@command
def run_winrates(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run winrates [RUN]`."""
    from agentrl.inspection.render import win_rate_table
    from agentrl.inspection.statistics import run_win_rates

    found = run_win_rates(reader)
    return Answer(found, lambda: win_rate_table(found))


@command
def run_stats(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run stats [RUN]`."""
    from agentrl.inspection.render import figures_page
    from agentrl.inspection.statistics import run_figures

    figures = run_figures(reader)
    return Answer(figures, lambda: figures_page(figures))


@command
def run_timeline(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl run timeline [RUN] [--parts N]`."""
    from agentrl.inspection import timelines
    from agentrl.inspection.render import run_timeline_page

    if not 1 <= options.parts <= 10_000:
        raise InputError("--parts is a number from 1 to 10000")
    line = timelines.run_timeline(reader, options.parts)
    return Answer(line, lambda: run_timeline_page(line))


# --- episodes ---------------------------------------------------------------------------------------------------------


@command
def episode_list(reader: RunReader, options: argparse.Namespace) -> Answer | None:
    """`agentrl episode list [RUN] [--where …] [--match …] [--sort …] [--columns …] [--follow]`."""
    from agentrl.inspection.reader import COLUMNS
    from agentrl.inspection.render import episode_table

    if options.limit < 0 or options.offset < 0:
        raise InputError("--limit and --offset are not negative")
    columns = [name for name in re.split(r"[,\s]+", options.columns) if name]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise InputError(f"--columns: {unknown[0]!r} is not a column; there are: {', '.join(COLUMNS)}")
    if options.follow:
        _follow_episodes(reader, options, columns)
        return None
    among = None
    if options.match:
        from agentrl.inspection.search import matches

        among = matches(reader, options.match)
    lines = reader.episodes(
        options.where,
        sort=options.sort,
        descending=not options.ascending,
        limit=options.limit,
        offset=options.offset,
        among=among,
    )
    return Answer(lines, lambda: episode_table(lines, reader.count(options.where, among=among), columns))


def _follow_episodes(reader: RunReader, options: argparse.Namespace, columns: list[str]) -> None:
    """Episodes as they end."""
    from agentrl.cli.following import follow
    from agentrl.inspection.render import EPISODE_COLUMNS, episode_table
    from agentrl.inspection.search import matches

    where = "committed_at != null" + (f" and ({options.where})" if options.where else "")
    newest = 0.0

    def ask() -> list[EpisodeLine]:
        nonlocal newest
        among = matches(reader, options.match) if options.match else None
        since = f"{where} and committed_at >= {newest!r}"
        lines = reader.episodes(since, sort="committed_at", descending=False, limit=options.limit, among=among)
        newest = max([newest, *(line.committed_at or 0.0 for line in lines)])
        return lines

    follow(
        *(reader, options, ask, lambda line: (line.episode, line.attempt)),
        page=lambda lines: episode_table(lines, len(lines), columns or EPISODE_COLUMNS),
    )


@command
def episode_show(reader: RunReader, options: argparse.Namespace) -> Answer | None:
    """`agentrl episode show [RUN] [ID] [--attempt N] [--follow]`."""
    from agentrl.inspection.conversation import conversation
    from agentrl.inspection.render_episode import conversation_page

    if options.follow:
        _follow_episode(reader, options)
        return None
    view = conversation(reader, chosen(reader, options), options.attempt)
    return Answer(view, lambda: conversation_page(view))


def _follow_episode(reader: RunReader, options: argparse.Namespace) -> None:
    """What an episode does, as it does it, and at last what it came to."""
    from agentrl.cli.following import follow
    from agentrl.inspection.conversation import Act, Update, conversation, events
    from agentrl.inspection.render_episode import events_page, summary_page

    if options.id is None:
        running = reader.episodes("status = in_flight", limit=1)
        options.id = running[0].episode if running else None
    episode = chosen(reader, options)

    attempt = 0

    def ask() -> list[Act | Update]:
        nonlocal attempt
        view = conversation(reader, episode, options.attempt)
        attempt = view.summary.attempt
        return events(view)

    follow(
        *(reader, options, ask),
        key=lambda event: (attempt, event.version if isinstance(event, Update) else event.call),
        page=events_page,
        ended=lambda: reader.episode(episode, options.attempt).summary.committed_at is not None,
    )
    view = conversation(reader, episode, options.attempt)
    if options.json:
        print_json_line(view.summary)
    else:
        print_text(summary_page(view))


@command
def episode_tokens(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode tokens [RUN] [ID] [--attempt N] [--details]`."""
    from agentrl.inspection import tokens
    from agentrl.inspection.render_episode import tokens_page

    view = tokens.episode_tokens(reader, chosen(reader, options), options.attempt)
    return Answer(view, lambda: tokens_page(view, details=options.details))


@command
def episode_why(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode why [RUN] [ID] [--attempt N]`."""
    from agentrl.inspection.reasons import reasons
    from agentrl.inspection.render_episode import reasons_page

    episode = chosen(reader, options)
    found = reasons(reader, episode, options.attempt)
    return Answer(found, lambda: reasons_page(episode, found))


@command
def episode_timeline(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode timeline [RUN] [ID] [--attempt N]`."""
    from agentrl.inspection import timelines
    from agentrl.inspection.render_episode import timeline_page

    line = timelines.episode_timeline(reader, chosen(reader, options), options.attempt)
    return Answer(line, lambda: timeline_page(line))


@command
def episode_forks(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode forks [RUN]`."""
    from agentrl.inspection.comparisons import fork_tree
    from agentrl.inspection.render_episode import fork_page

    tree = fork_tree(reader)
    return Answer(tree, lambda: fork_page(tree))


@command
def episode_diff(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode diff [RUN] A [B]`: B is A's parent where A is a fork and B is left out."""
    from agentrl.inspection.comparisons import compared
    from agentrl.inspection.render_episode import difference_page

    found = compared(reader, options.id, options.other)
    return Answer(found, lambda: difference_page(found))


def chosen(reader: RunReader, options: argparse.Namespace) -> str:
    """The episode a command names, or the newest that ended."""
    if options.id is not None:
        return str(options.id)
    newest = reader.episodes("committed_at != null", sort="committed_at", limit=1)
    if not newest:
        raise InputError(f"{reader.path}: no episode has ended yet")
    return newest[0].episode


# --- steps ------------------------------------------------------------------------------------------------------------


@command
def step_list(reader: RunReader, options: argparse.Namespace) -> Answer | None:
    """`agentrl step list [RUN] [--policy NAME] [--follow]`."""
    from agentrl.inspection import steps
    from agentrl.inspection.render import step_table

    if options.follow:
        from agentrl.cli.following import follow

        follow(
            *(reader, options, lambda: steps.step_list(reader, options.policy)),
            key=lambda line: (line.policy, line.lineage, line.step),
            page=step_table,
        )
        return None

    lines = steps.step_list(reader, options.policy)
    return Answer(lines, lambda: step_table(lines))


@command
def step_show(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl step show RUN N [--policy NAME] [--lineage N]`."""
    from agentrl.inspection import steps
    from agentrl.inspection.render import step_page

    view = steps.step_view(reader, options.step, options.policy, options.lineage)
    return Answer(view, lambda: step_page(view))


# --- which run --------------------------------------------------------------------------------------------------------


@contextmanager
def open_run(options: argparse.Namespace) -> Iterator[RunReader]:
    """A reader of the run a command names; none is the newest in `runs/`.

    `agentrl episode show e12` names no run: what looks like an episode and is no run moves to the next argument. Of a
    single episode that is a fork, `forks/f0`, it is the reader of the run's forks, and `options.id` its id there.
    """
    name = options.run
    takes_episode, takes_two = hasattr(options, "id"), hasattr(options, "other")
    lacks_episode = takes_episode and (options.id is None or (takes_two and options.other is None))
    if name is not None and lacks_episode and _EPISODE.match(name) and not find_run(name).exists():
        if takes_two:
            options.other = options.id
        name, options.id = None, name
    with closing(RunReader(find_run(name))) as run, damage_named(run.log):
        if takes_episode and not takes_two and options.id is not None:
            with located(run, options.id) as (reader, options.id), damage_named(reader.log):
                yield reader
        else:
            yield run


def find_run(name: str | None) -> Path:
    """The directory of a run by its path, its name in `runs/`, or None for the newest there.

    Raises:
        InputError: there are no runs.
    """
    if name is None:
        found = [path for path in RUNS.iterdir() if _is_run(path)] if RUNS.is_dir() else []
        if not found:
            raise InputError("there are no runs in runs/; name a run's directory, or make one with `agentrl train`")
        return max(found, key=lambda path: (path / "journal").stat().st_mtime)
    path = Path(name)
    return path if path.exists() or not (RUNS / name).exists() else RUNS / name


def _is_run(path: Path) -> bool:
    try:
        return (path / "journal").is_dir()
    except OSError:  # of another user, say
        return False
