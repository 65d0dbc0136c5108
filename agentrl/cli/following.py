"""`--follow`: what is new in a run, printed as it comes, until the run has ended or Ctrl-C."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

from agentrl.cli.output import print_json_line, print_text

if TYPE_CHECKING:
    import argparse

    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render import Page

INTERVAL_S = 1.0
T = TypeVar("T")


def follow(
    reader: RunReader,
    options: argparse.Namespace,
    ask: Callable[[], Sequence[T]],
    key: Callable[[T], Hashable],
    page: Callable[[Sequence[T]], Page],
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Ask again and again, and print what was not there before: pages, or a line of JSON each.

    Args:
        reader: of the run.
        options: of the command.
        ask: gives what there is, in order.
        key: what an item is known by.
        page: makes a page of items.
        ended: whether nothing more will come, though the run goes on.
    """
    seen: set[Hashable] = set()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            has_ended = reader.standing() != "running" or ended()  # asked first: what came before is then on disk
            new = [item for item in ask() if key(item) not in seen]
            seen.update(map(key, new))
            if options.json:
                for item in new:
                    print_json_line(item)
            elif new:
                print_text(page(new))
            if has_ended:
                return
            select.select([], [], [], INTERVAL_S)
