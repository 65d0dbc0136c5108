"""`--to html`: the viewer and all the answers that it requests, as one file that opens without a server.

Answers are compressed separately, but those about one episode together, so the page opens before they are unpacked.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import AgentRLError, InputError
from agentrl.inspection.comparisons import FORKS, fork_tree
from agentrl.inspection.viewer.page import exported_page
from agentrl.inspection.viewer.questions import QUESTIONS, Parameters, about_episode, as_json, run_summary

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.exchange.exporting import Selection
    from agentrl.inspection.reader import RunReader

MAX_EPISODES = 10_000
"""Maximum number of episodes in a page; use `agentrl run serve` for more."""
_LEVEL = 6


def write(selection: Selection, path: Path) -> None:
    """Write the page. Damage of an episode is shown at the damaged part.

    Raises:
        InputError: there are too many episodes for one page.
    """
    if len(selection.keys) > MAX_EPISODES:
        raise InputError(
            f"{len(selection.keys):,} episodes are too many for one page, which holds {MAX_EPISODES:,}: choose some"
            " with --where, or browse all of them with `agentrl run serve`"
        )
    index: dict[str, int] = {}
    blocks = [b""]  # the first block is the index, which is filled in last
    for name, value in _answers(selection):
        index[name] = len(blocks)
        blocks.append(_packed(value))
    blocks[0] = _packed({"blocks": index, "all": selection.reader.count()})
    path.write_text(exported_page(blocks), encoding="utf-8")


def _answers(selection: Selection) -> Iterator[tuple[str, Any]]:
    """Yield the answers that the page requests, by name."""
    reader, problems = selection.reader, selection.problems
    lines = reader.lines(selection.keys)
    yield "run", run_summary(reader, Counter(line.status for line in lines))
    yield "episodes", lines
    for question in ("forks", "run_timeline", "evaluations"):
        yield question, _answer(QUESTIONS[question], reader, {}, problems)
    steps = _answer(QUESTIONS["steps"], reader, {}, problems)
    yield "steps", steps
    for step in steps if isinstance(steps, list) else []:
        named = {"policy": step.policy, "lineage": str(step.lineage), "step": str(step.step)}
        yield f"step {step.policy} {step.lineage} {step.step}", _answer(QUESTIONS["step"], reader, named, problems)
    forked = [(f"{FORKS}/{fork.line.episode}", fork.line) for fork in fork_tree(reader) if fork.depth]
    for name, line in [*((line.episode, line) for line in lines), *forked]:
        named = {"episode": name, "attempt": str(line.attempt)}
        yield f"episode {name} {line.attempt}", _answer(about_episode, reader, named, problems)


def _answer(
    ask: Callable[[RunReader, Parameters], Any], reader: RunReader, parameters: Parameters, problems: list[str]
) -> Any:
    try:
        return ask(reader, parameters)
    except AgentRLError as error:
        problems.append(str(error))
        return {"error": str(error)}


def _packed(value: Any) -> bytes:
    return gzip.compress(as_json(value), _LEVEL, mtime=0)
