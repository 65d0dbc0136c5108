"""`agentrl episode replay|rescore|fork`, `agentrl step replay`: what was recorded is done again.

Those of episodes run the environment's code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.cli.reading import Answer, chosen, command
from agentrl.core.errors import CheckFailedError, InputError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from agentrl.app.parts import Adapters
    from agentrl.inspection.reader import RunReader

MAX_EDIT_BYTES = 1 << 20


@command
def episode_replay(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode replay [RUN] [ID] [--where …] [--until CALL] [--step]`; 1 if one departs."""
    from agentrl.app.replays import replay
    from agentrl.inspection.render_episode import replay_page

    found = replay(
        reader.path,
        _episodes(reader, options),
        until=options.until,
        environment=options.environment,
        adapters=_adapters(reader),
    )
    code = CheckFailedError.exit_code if any(each.outcome == "departed" for each in found) else 0
    return Answer(found, lambda: replay_page(found, step=options.step), code)


@command
def episode_rescore(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode rescore [RUN] [ID] [--where …] [--environment REF]`; 1 if one departs in more than rewards."""
    from agentrl.app.replays import replay
    from agentrl.inspection.render_episode import rescore_page

    found = replay(
        reader.path,
        _episodes(reader, options),
        rescoring=True,
        environment=options.environment,
        adapters=_adapters(reader),
    )
    code = CheckFailedError.exit_code if any(each.outcome == "departed" for each in found) else 0
    return Answer(found, lambda: rescore_page(found), code)


@command
def episode_fork(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl episode fork [RUN] [ID] --at TURN [-n K] [--edit FILE] [--environment REF] [--policy [SEAT=]WHO]`."""
    from agentrl.app.forks import fork
    from agentrl.inspection.comparisons import fork_tree
    from agentrl.inspection.render_episode import fork_page

    if options.n < 1:
        raise InputError("-n is at least 1")
    headers = fork(
        reader.path,
        chosen(reader, options),
        at=options.at,
        n=options.n,
        attempt=options.attempt,
        policy=options.policy,
        edit=None if options.edit is None else _edit(options.edit),
        environment=options.environment,
        adapters=_adapters(reader),
    )
    made = {header.episode_id for header in headers}
    root = reader.path if reader.path.name != "forks" else reader.path.parent

    def page() -> Any:
        from agentrl.inspection.reader import RunReader

        opened = RunReader(root)
        try:
            return fork_page(fork_tree(opened), made)
        finally:
            opened.close()

    told = [
        {
            "episode": header.episode_id,
            "reward": header.reward,
            "stop_reason": header.stop_reason,
            "drop_reason": header.drop_reason,
            "turns": header.turns,
        }
        for header in headers
    ]
    return Answer(told, page)


@command
def step_replay(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl step replay RUN [N] [--policy NAME] [--lineage N]`; 1 if a step is not what it was."""
    from agentrl.app.step_replays import compute_step, rebuild_step, rebuild_steps
    from agentrl.inspection.render import rebuilt_page
    from agentrl.inspection.steps import step_view

    if options.step is None:
        found = rebuild_steps(reader, options.policy)
    else:
        line = step_view(reader, options.step, options.policy, options.lineage).line
        found = [msgspec.structs.replace(rebuild_step(reader, line), computed=compute_step(reader, line))]
    departed = [each for each in found if not each.identical or (each.computed and each.computed.same is False)]
    code = CheckFailedError.exit_code if departed else 0
    rows = [msgspec.to_builtins(each) for each in found]
    return Answer(found, lambda: rebuilt_page(rows), code)


def _episodes(reader: RunReader, options: argparse.Namespace) -> Sequence[tuple[str, int | None]]:
    if options.where is not None and options.id is not None:
        raise InputError("name an episode, or filter them by --where, not both")
    if options.where is None:
        return [(chosen(reader, options), options.attempt)]
    lines = reader.episodes(options.where, descending=False, limit=options.limit)
    if not lines:
        raise InputError("--where: no episode passes")
    return [(line.episode, line.attempt) for line in lines]


def _adapters(reader: RunReader) -> Adapters | None:
    """Those of the sample run, where it is one: its policies are a script, and its tokens bytes."""
    config = reader.info().get("config")
    if not isinstance(config, dict):
        raise InputError(f"{reader.path}: its journal holds no configuration, so it cannot be executed again")
    from agentrl.cli.sample_run import is_sample, sample_adapters

    return sample_adapters() if is_sample(config) else None


def _edit(path: Path) -> str | Sequence[Mapping[str, Any]]:
    """What a file says the policy is to be told: the content of a message, or, as JSON, a list of messages."""
    try:
        text = path.read_bytes()[: MAX_EDIT_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if len(text) > MAX_EDIT_BYTES:
        raise InputError(f"{path}: longer than {MAX_EDIT_BYTES} bytes")
    if path.suffix != ".json":
        return text.removesuffix("\n")  # an editor's
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise InputError(f"{path}: not a list of messages, each with `role` and `content`")
    return messages
