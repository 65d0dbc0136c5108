"""`agentrl run …` and `agentrl episode …`: what a run's journal says."""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.cli.output import print_json, print_text
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.inspection.reader import RunReader, runs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RUNS = Path("runs")
_EPISODE = re.compile(r"[a-z]\d+(?![\w-])")
"""How the id of an episode begins, which no run is called by without intent."""


def run_list(options: argparse.Namespace) -> int:
    """`agentrl run list [DIRECTORY]`."""
    lines = runs(options.directory)
    if options.json:
        print_json(lines)
    else:
        from agentrl.inspection.render import run_table

        print_text(run_table(lines))
    return 0


def run_curve(options: argparse.Namespace) -> int:
    """`agentrl run curve [RUN] [--metric NAME]`."""
    with open_run(options.run) as reader:
        if options.metric is None:
            points = reader.curve()
            if options.json:
                print_json(points)
                return 0
            from agentrl.inspection.render import curves

            print_text(curves(points))
            return 0
        values = reader.metric(options.metric)
        if not values:
            names = reader.metric_names()
            near = [name for name in names if options.metric in name.split("/")]
            near = near or difflib.get_close_matches(options.metric, names, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"recorded were: {', '.join(names) or 'none'}"
            raise InputError(f"no metric {options.metric!r}; {hint}")
        if options.json:
            print_json(
                [
                    {"policy": policy, "step": step, "value": value}
                    for policy, points_of in values.items()
                    for step, value in points_of
                ]
            )
            return 0
        from rich.text import Text

        from agentrl.core.safe import safe_line
        from agentrl.observe.plot import curve

        for policy, points_of in values.items():
            known = [(step, value) for step, value in points_of if value is not None]
            title = safe_line(f"{options.metric} of {policy}" if len(values) > 1 else options.metric)
            print_text(Text(curve([value for _, value in known], steps=[step for step, _ in known], title=title)))
        return 0


def run_ledger(options: argparse.Namespace) -> int:
    """`agentrl run ledger [RUN]`; 1 if an equation does not hold."""
    with open_run(options.run) as reader:
        ledger = reader.ledger()
        if options.json:
            print_json({"holds": ledger.holds, **msgspec.to_builtins(ledger)})
        else:
            from agentrl.inspection.render import ledger_view

            print_text(ledger_view(ledger))
        return 0 if ledger.holds else CheckFailedError.exit_code


def run_winrates(options: argparse.Namespace) -> int:
    """`agentrl run winrates [RUN]`."""
    with open_run(options.run) as reader:
        found = reader.win_rates()
        if options.json:
            print_json(found)
        else:
            from agentrl.inspection.render import win_rate_table

            print_text(win_rate_table(found))
    return 0


def episode_list(options: argparse.Namespace) -> int:
    """`agentrl episode list [RUN] [--where …] [--sort …]`."""
    if options.limit < 0 or options.offset < 0:
        raise InputError("--limit and --offset are not negative")
    with open_run(options.run) as reader:
        lines = reader.episodes(
            options.where,
            sort=options.sort,
            descending=not options.ascending,
            limit=options.limit,
            offset=options.offset,
        )
        if options.json:
            print_json(lines)
            return 0
        from agentrl.inspection.render import episode_table

        print_text(episode_table(lines, reader.count(options.where)))
        return 0


def episode_show(options: argparse.Namespace) -> int:
    """`agentrl episode show [RUN] [ID] [--attempt N]`."""
    name, episode_id = options.run, options.id
    if name is not None and episode_id is None and _EPISODE.match(name) and not find_run(name).exists():
        name, episode_id = None, name
    with open_run(name) as reader:
        if episode_id is None:
            newest = reader.episodes("committed_at != null", sort="committed_at", limit=1)
            if not newest:
                raise InputError(f"{reader.path}: no episode has ended yet")
            episode_id = newest[0].episode
        view = reader.episode(episode_id, options.attempt)
        if options.json:
            print_json(view)
            return 0
        from agentrl.inspection.render import episode_view

        print_text(episode_view(view))
        return 0


@contextmanager
def open_run(name: str | None) -> Iterator[RunReader]:
    """A reader of the run a command names; None is the newest in `runs/`."""
    reader = RunReader(find_run(name))
    try:
        yield reader
    finally:
        reader.close()


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
