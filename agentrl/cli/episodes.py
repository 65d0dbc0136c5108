"""`agentrl episode …` and `agentrl step …`: list, show and explain episodes and optimizer steps, and run them again.

`replay`, `rescore` and `fork` of episodes run the environment's code; the others only read.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.cli.runs import RunAnswer, make_run_command
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.core.text import escape_line
from agentrl.observe.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from agentrl.inspection.comparisons import ReplayResult
    from agentrl.inspection.reader import EpisodeLine, RunReader
    from agentrl.inspection.render import TerminalPage

MAX_EDIT_BYTES = 1 << 20


@make_run_command
def episode_list(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode list [RUN] [--where …] [--match …] [--sort …] [--columns …]`."""
    from agentrl.inspection.reader import COLUMNS, OBJECTS
    from agentrl.inspection.render import episode_table
    from agentrl.inspection.where_filter import find_column

    if options.limit < 0 or options.offset < 0:
        raise InputError("--limit and --offset must not be negative")
    columns = [name for name in re.split(r"[,\s]+", options.columns) if name]
    for name in columns:
        find_column("--columns", name, COLUMNS, OBJECTS)
    among = None
    if options.match:
        from agentrl.inspection.search import episodes_with_words

        among = episodes_with_words(reader, options.match)
    lines = reader.episodes(
        options.where,
        sort=options.sort,
        descending=not options.ascending,
        limit=options.limit,
        offset=options.offset,
        among=among,
        fields=list(dict.fromkeys(name for name in columns if name not in COLUMNS)),
    )

    def page() -> TerminalPage:
        table = episode_table(lines, reader.count(options.where, among=among), columns)
        if not lines:
            if phase := reader.start_phase():
                table.line(f"the run is starting: {phase}")
            for prefix, names in reader.field_names().items():
                if prefix in options.where:
                    table.line(f"the episodes have {', '.join(names) or f'no {prefix}NAME'}")
        return table

    return RunAnswer(lines, page)


@make_run_command
def episode_show(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode show [RUN] [ID] [--attempt N]`."""
    from agentrl.inspection.conversation import read_conversation
    from agentrl.inspection.render_episode import conversation_page

    view = read_conversation(reader, chosen_episode(reader, options), options.attempt)
    return RunAnswer(view, lambda: conversation_page(view))


@make_run_command
def episode_tokens(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode tokens [RUN] [ID] [--attempt N] [--details]`."""
    from agentrl.inspection import tokens
    from agentrl.inspection.render_episode import tokens_page

    view = tokens.episode_tokens(reader, chosen_episode(reader, options), options.attempt)
    return RunAnswer(view, lambda: tokens_page(view, details=options.details))


@make_run_command
def episode_why(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode why [RUN] [ID] [--attempt N]`."""
    from agentrl.inspection.reasons import explain_episode
    from agentrl.inspection.render_episode import reasons_page

    episode = chosen_episode(reader, options)
    reasons = explain_episode(reader, episode, options.attempt)
    return RunAnswer(reasons, lambda: reasons_page(episode, reasons))


@make_run_command
def episode_diff(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode diff [RUN] A [B]`: without B, a fork A is compared with its parent."""
    from agentrl.inspection.comparisons import compare_episodes
    from agentrl.inspection.render_episode import difference_page

    difference = compare_episodes(reader, options.id, options.other)
    return RunAnswer(difference, lambda: difference_page(difference))


@make_run_command
def episode_replay(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode replay [RUN] [ID] [--where …] [--until CALL] [--step]`; exit code 1 if an episode departs or is
    damaged.
    """
    from agentrl.app.replays import replay
    from agentrl.inspection.render_episode import replay_page

    with contextlib.closing(ProgressLine("replaying", sys.stderr)) as progress:
        results = replay(
            reader.path,
            _episodes(reader, options),
            until=options.until,
            environment=options.environment,
            overrides=options.overrides,
            on_progress=progress,
        )
    code = _exit_code(results)
    return RunAnswer(results, lambda: replay_page(results, step=options.step), code)


@make_run_command
def episode_rescore(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode rescore [RUN] [ID] [--where …] [--environment REF]`; exit code 1 if more than rewards
    differs, or an episode is damaged.
    """
    from agentrl.app.replays import replay
    from agentrl.inspection.render_episode import rescore_page

    with contextlib.closing(ProgressLine("rescoring", sys.stderr)) as progress:
        results = replay(
            reader.path,
            _episodes(reader, options),
            rescoring=True,
            environment=options.environment,
            overrides=options.overrides,
            on_progress=progress,
        )
    code = _exit_code(results)
    return RunAnswer(results, lambda: rescore_page(results), code)


@make_run_command
def episode_fork(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl episode fork [RUN] [ID | --where …] --at TURN|change [-n K] [--edit FILE] [--environment REF]
    [--policy [SEAT=]WHO]`; exit code 1 if a fork was dropped."""
    from agentrl.app.forks import fork
    from agentrl.inspection.comparisons import FORKS
    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render import forks_page

    if options.n < 1:
        raise InputError("-n must be at least 1")
    with contextlib.closing(ProgressLine("forking", sys.stderr)) as progress:
        headers = fork(
            reader.path,
            _episodes(reader, options),
            at=options.at,
            n=options.n,
            policy=options.policy,
            edit=None if options.edit is None else _edit(options.edit),
            environment=options.environment,
            overrides=options.overrides,
            on_progress=progress,
        )
    lines: list[EpisodeLine] = []
    if headers:
        with contextlib.closing(RunReader(reader.path if reader.path.name == FORKS else reader.path / FORKS)) as forks:
            lines = forks.lines([(header.episode_id, header.attempt) for header in headers])
    names = ("episode", "reward", "rewards", "stop_reason", "drop_reason", "detail", "turns")
    new_episodes = [{name: getattr(line, name) for name in names} for line in lines]
    code = CheckFailedError.exit_code if any(header.drop_reason for header in headers) else 0
    return RunAnswer(new_episodes, lambda: forks_page(lines), code)


def chosen_episode(reader: RunReader, options: argparse.Namespace) -> str:
    """Return the episode that a command names, or the newest that ended."""
    if options.id is not None:
        return str(options.id)
    newest = reader.episodes("committed_at != null", sort="committed_at", limit=1)
    if not newest:
        raise InputError(f"{reader.path}: no episode has ended yet")
    return newest[0].episode


def _exit_code(results: Sequence[ReplayResult]) -> int:
    """Return the exit code of replays."""
    is_wrong = any(result.outcome in ("departed", "damaged") for result in results)
    return CheckFailedError.exit_code if is_wrong else 0


def _episodes(reader: RunReader, options: argparse.Namespace) -> Sequence[tuple[str, int | None]]:
    if options.where is not None and options.id is not None:
        raise InputError("give either an episode or --where, not both")
    if options.where is None:
        return [(chosen_episode(reader, options), options.attempt)]
    lines = reader.episodes(options.where, descending=False, limit=options.limit)
    if not lines:
        raise InputError("--where: no episode matches")
    return [(line.episode, line.attempt) for line in lines]


def _edit(path: Path) -> str | Sequence[Mapping[str, Any]]:
    """Read `--edit FILE`: the content of the last message, or, as JSON, a list of messages."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_EDIT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if len(text) > MAX_EDIT_BYTES:
        raise InputError(f"{path}: longer than {MAX_EDIT_BYTES} bytes")
    if path.suffix != ".json":
        return text.removesuffix("\n")  # editors add a final newline
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise InputError(f"{path}: not a list of messages, each with `role` and `content`")
    return messages


# --- agentrl step -----------------------------------------------------------------------------------------------------


@make_run_command
def step_list(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl step list [RUN] [--policy NAME]`."""
    from agentrl.inspection import steps
    from agentrl.inspection.render import step_table

    problems: list[str] = []
    lines = steps.step_list(reader, options.policy, problems=problems)

    def page() -> TerminalPage:
        table = step_table(lines)
        for problem in problems:
            table.line(f"left out: {problem}")
        return table

    if options.json:
        sys.stderr.writelines(f"left out: {escape_line(problem)}\n" for problem in problems)
    return RunAnswer(lines, page)


@make_run_command
def step_replay(reader: RunReader, options: argparse.Namespace) -> RunAnswer:
    """`agentrl step replay RUN [N] [--policy NAME] [--lineage N]`; exit code 1 if a step differs from its record."""
    from agentrl.app.replays import recompute_step_loss, replay_step, replay_steps
    from agentrl.inspection.render import step_replays_page
    from agentrl.inspection.steps import step_view

    if options.step is None:
        with contextlib.closing(ProgressLine("replaying", sys.stderr)) as progress:
            results = replay_steps(reader, options.policy, progress)
    else:
        line = step_view(reader, options.step, options.policy, options.lineage).line
        computed = recompute_step_loss(reader, line, options.overrides)
        results = [msgspec.structs.replace(replay_step(reader, line), computed=computed)]
    departures = [
        result for result in results if not result.identical or (result.computed and result.computed.same is False)
    ]
    code = CheckFailedError.exit_code if departures else 0
    rows = [msgspec.to_builtins(result) for result in results]
    return RunAnswer(results, lambda: step_replays_page(rows), code)
