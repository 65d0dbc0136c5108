"""What the journal costs where a model is trained: its share of the CPU seconds of the main job, Ray's included.

`journal_cost_main`: CPU seconds of the writer's thread, and of the calls on the journal in the event loop's, over those
of all processes of the same run, from its first step to its last; the median over seeds. Counted inside one run: the
trainer reads its tokens from the journal, so beside a store that forgets there is no main job.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.main_job import EXAMPLE, ROOT
from benchmarks.processes import ProcessTree

SEEDS = 5
STEPS = 20


def figures(quick: bool) -> dict[str, float | None]:
    """The share, of 1."""
    if quick:
        return {"journal_cost_main": None}
    shares = []
    for seed in range(SEEDS):
        finished = subprocess.run(
            [sys.executable, "-m", __name__, str(seed)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise SystemExit(f"the main job failed:\n{finished.stderr[-4000:]}")
        journal, everything = map(float, finished.stdout.splitlines()[-1].split())
        shares.append(journal / everything)
        print(f"cost_main: {journal:.2f} of {everything:.1f} CPU s are the journal's", flush=True)
    low, median, high = statistics.quantiles(shares, n=4)
    print(f"cost_main: journal's share of the main job {median:.4f} ({low:.4f} to {high:.4f})", flush=True)
    return {"journal_cost_main": median}


class Counted:
    """CPU seconds of the journal in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, method: str) -> None:
        """Count the thread's CPU seconds in a method that does not wait."""
        inner: Callable[..., Any] = getattr(owner, method)

        def counted(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - started

        setattr(owner, method, counted)


def main_job(seed: int) -> None:
    """Run it; prints the journal's CPU seconds and those of everything."""
    import agentrl
    from agentrl.config.load import load
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.store import GroupCommitWriter, SqliteJournal, SqliteTurnLog

    counted = Counted()
    counted.around(GroupCommitWriter, "_round")
    for method in ("admit", "record"):
        counted.around(SqliteJournal, method)
    for method in ("append", "append_partial", "remove_partials"):
        counted.around(SqliteTurnLog, method)
    counted.around(JournalEntry, "decode")
    tree = ProcessTree()
    with tempfile.TemporaryDirectory(prefix="agentrl-cost-") as directory:
        overrides = {
            "name": "run",
            "directory": directory,
            "seed": seed,
            "steps": STEPS,
            "evaluation.tasks": 0,
            "checkpoint.every": 0,
        }
        observer = Watching(tree, counted)
        config = load(EXAMPLE, [f"--{name}={value}" for name, value in overrides.items()])
        agentrl.train(config, quiet=True, observers=[observer])
    (journal, everything), (journal_then, everything_then) = observer.seen[-1], observer.seen[0]
    print(journal - journal_then, everything - everything_then)


class Watching:
    """An observer that reads, step by step, what the journal and all processes have spent."""

    def __init__(self, tree: ProcessTree, journal: Counted) -> None:
        self._tree = tree
        self._journal = journal
        self.seen: list[tuple[float, float]] = []

    def on_step(self, *_: Any) -> None:
        """Read it."""
        self.seen.append((self._journal.seconds, self._tree.cpu_seconds()))

    def on_evaluation(self, *_: Any) -> None:
        """Nothing to read."""


if __name__ == "__main__":
    main_job(int(sys.argv[1]))
