"""Mutated databases and files of columns: whatever is asked of them, the answer is one, or a named error.

`fuzz_crashes`: mutations after which a question raised anything else. Each changes 1 to 64 bytes of one file of a copy
of the sample run, or cuts it, and asks every question there is.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from agentrl.app.step_replays import rebuild_steps
from agentrl.cli.sample_run import write_sample_run
from agentrl.core.errors import AgentRLError
from agentrl.core.rng import stream
from agentrl.inspection.conversation import conversation
from agentrl.inspection.differences import difference
from agentrl.inspection.figures import run_figures
from agentrl.inspection.forks import fork_tree
from agentrl.inspection.reader import RunReader
from agentrl.inspection.reasons import reasons
from agentrl.inspection.render_episode import conversation_page, reasons_page, tokens_page
from agentrl.inspection.search import matches
from agentrl.inspection.steps import step_list, step_view
from agentrl.inspection.timelines import episode_timeline, run_timeline
from agentrl.inspection.tokens import episode_tokens

MUTATIONS, QUICK_MUTATIONS = 10_000, 60
Question = Callable[[RunReader, str], object]
QUESTIONS: tuple[Question, ...] = (
    lambda reader, episode: reader.episodes("reward < 1 or status = dropped", sort="staleness"),
    lambda reader, episode: conversation_page(conversation(reader, episode)),
    lambda reader, episode: tokens_page(episode_tokens(reader, episode), details=True),
    lambda reader, episode: reasons_page(episode, reasons(reader, episode)),
    lambda reader, episode: episode_timeline(reader, episode),
    lambda reader, episode: difference(reader, episode, reader, "e0"),
    lambda reader, episode: run_figures(reader),
    lambda reader, episode: run_timeline(reader),
    lambda reader, episode: [step_view(reader, 2, line.policy) for line in step_list(reader)[:2]],
    lambda reader, episode: rebuild_steps(reader, "proposer"),
    lambda reader, episode: fork_tree(reader),
    lambda reader, episode: reader.ledger(),
    lambda reader, episode: reader.line(),
    lambda reader, episode: matches(reader, "right"),
)


def figures(quick: bool) -> dict[str, float | None]:
    crashes = 0
    with tempfile.TemporaryDirectory(prefix="agentrl-inspection-") as directory:
        whole = write_sample_run(directory).path
        run = Path(directory) / "mutated"
        shutil.copytree(whole, run, symlinks=True)
        files = ["journal/control.db", "journal/turns-0.db", "forks/journal/control.db"]
        files += [str(path.relative_to(whole)) for path in sorted((whole / "steps" / "proposer").iterdir())[:2]]
        for number in range(QUICK_MUTATIONS if quick else MUTATIONS):
            draw = stream("damage", number)
            name = draw.choice(files)
            (run / name).write_bytes(mutated((whole / name).read_bytes(), draw))
            crashes += asked(run, draw)
            shutil.copyfile(whole / name, run / name)
    return {"fuzz_crashes": float(crashes)}


def mutated(content: bytes, draw: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 4, 64))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.1 else changed)


def asked(run: Path, draw: Random) -> bool:
    """Whether a question raised what it must not."""
    try:
        reader = RunReader(run)
    except AgentRLError:
        return False
    try:
        for question in QUESTIONS:
            try:
                question(reader, f"e{draw.randrange(12)}~0.r#2.{draw.randrange(4)}")
            except AgentRLError:
                continue
    except Exception:  # noqa: BLE001 - what is looked for
        traceback.print_exc()
        return True
    finally:
        reader.close()
    return False
