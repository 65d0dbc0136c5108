"""`agentrl step …`: list and show optimizer steps, and recompute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agentrl.cli.output import follow
from agentrl.cli.runs import Answer, command
from agentrl.core.errors import CheckFailedError

if TYPE_CHECKING:
    import argparse

    from agentrl.inspection.reader import RunReader


@command
def step_list(reader: RunReader, options: argparse.Namespace) -> Answer | None:
    """`agentrl step list [RUN] [--policy NAME] [--follow]`."""
    from agentrl.inspection import steps
    from agentrl.inspection.render import step_table

    if options.follow:
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


@command
def step_replay(reader: RunReader, options: argparse.Namespace) -> Answer:
    """`agentrl step replay RUN [N] [--policy NAME] [--lineage N]`; exit code 1 if a step differs from its record."""
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
