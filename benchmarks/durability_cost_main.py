"""What the journal costs where a model is trained: the main job beside the same job with a store that forgets.

`journal_cost_main`: the journal's share of the CPU seconds per step of all processes, Ray's included; the median over
interleaved pairs. The learning rate is as good as nothing, so that both jobs of a pair play the same episodes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.durability_cost import ForgetfulJournal, ForgetfulLog
from benchmarks.main_job import EXAMPLE, ROOT, Recorder

PAIRS = 5
STEPS = 20


def figures(quick: bool) -> dict[str, float | None]:
    """The share, of 1."""
    if quick:
        return {"journal_cost_main": None}
    shares = []
    for pair in range(PAIRS):
        order = ("kept", "forgotten") if pair % 2 else ("forgotten", "kept")
        spent = {kind: _cpu_per_step(kind, pair) for kind in order}
        shares.append((spent["kept"] - spent["forgotten"]) / spent["kept"])
        print(f"cost_main: {spent['kept']:.3f} CPU s per step, {spent['forgotten']:.3f} without a journal", flush=True)
    low, median, high = statistics.quantiles(shares, n=4)
    print(f"cost_main: journal's share of the main job {median:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return {"journal_cost_main": median}


def _cpu_per_step(kind: str, seed: int) -> float:
    command = [sys.executable, "-m", __name__, kind, str(seed)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"the main job, {kind}, failed:\n{finished.stderr[-4000:]}")
    return float(finished.stdout.splitlines()[-1])


def _forget() -> None:
    """From here on a run writes its start and its end, and nothing in between."""
    from agentrl.journal import store

    kept = store.SqliteJournal

    class Forgetting(ForgetfulJournal, kept):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            kept.__init__(self, *arguments, **options)
            self._nothing = ForgetfulLog()

        def turn_log(self, worker: str) -> Any:
            kept.turn_log(self, worker)  # its file is there, and stays empty
            return self._nothing

        async def close(self) -> None:
            await kept.close(self)

    store.SqliteJournal = Forgetting  # type: ignore[misc]


def _main_job(directory: str, seed: int) -> float:
    import agentrl
    from agentrl.config.load import load

    overrides = {
        "name": "run",
        "directory": directory,
        "seed": seed,
        "steps": STEPS,
        "policies.solver.learning_rate": 1e-9,
        "evaluation.tasks": 0,
        "checkpoint.every": 0,
    }
    recorder = Recorder()
    config = load(EXAMPLE, [f"--{name}={value}" for name, value in overrides.items()])
    agentrl.train(config, quiet=True, observers=[recorder])
    return recorder.trace.cpu_per_step()


if __name__ == "__main__":
    if sys.argv[1] == "forgotten":
        _forget()
    with tempfile.TemporaryDirectory(prefix="agentrl-cost-") as scratch:
        print(_main_job(str(Path(scratch)), int(sys.argv[2])))
