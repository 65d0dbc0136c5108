"""Kill a training run with SIGKILL mid-conversation, resume it, and count the losses.

python 04_crash_and_resume.py        (about a minute on two CPU cores; needs no other file)

A child process trains a language model to use a calculator and is killed after five steps, without any clean-up. A
second process resumes the run and finishes it. The counts are read from the run's journal.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import agentrl

RUN = Path("runs/crash_and_resume")
STEPS = 12
KILL_AFTER = 5  # steps; the newest checkpoint is then that of step 4


def train(*, resume: bool) -> None:
    """Run in the child process: train, or resume the training."""
    config = agentrl.RunConfig(
        directory=str(RUN.parent),
        name=RUN.name,
        steps=STEPS,
        environment={"id": "calculator"},
        model={"path": "agentrl.environments:calculator/model"},
        policies={"solver": {"step_size": 32, "learning_rate": 3e-4}},
        sampling={"max_tokens": 32, "max_turns": 6},
        engine={"slots": 96, "max_context": 192},
        trainer={"loss": {"normalizer": 64}},
        checkpoint={"every": 2},
        evaluation={"tasks": 0},
    )
    agentrl.train(config, resume=resume)


def start(how: str) -> subprocess.Popen[str]:
    """Run this file in a child process."""
    return subprocess.Popen(
        [sys.executable, __file__, how], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def follow(process: subprocess.Popen[str], until: str = "never") -> None:
    """Print a run's progress until it ends or prints a line that begins with `until`."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(("step", "WARNING", "starting")):
            print("   ", line.rstrip()[:90])
        if line.startswith(until):
            return
    if process.wait() != 0:
        sys.exit("".join(lines[-20:]))


def ask(query: str, database: str = "control.db") -> list[tuple]:
    """Query the run's journal: two SQLite databases, described in docs/reference/journal_format.md."""
    connection = sqlite3.connect(RUN / "journal" / database)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


COMMITTED_EPISODES = "SELECT episode, attempt FROM episodes WHERE drop_reason IS NULL"
IN_FLIGHT = """SELECT episode FROM admissions a WHERE purpose = 'train'
    AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode = a.episode AND e.attempt = a.attempt)
    AND NOT EXISTS (SELECT 1 FROM admissions b WHERE b.episode = a.episode AND b.attempt > a.attempt)"""
TURNS = "SELECT episode, attempt, call FROM entries"


def main() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    print("A process trains:")
    process = start("train")
    follow(process, until=f"step {KILL_AFTER}/")
    process.send_signal(signal.SIGKILL)
    process.wait()

    committed_episodes, turns = set(ask(COMMITTED_EPISODES)), set(ask(TURNS, "turns-0.db"))
    in_flight = {episode for (episode,) in ask(IN_FLIGHT)}
    started_episodes = in_flight & {episode for episode, _, call in turns if call != "begin"}
    print(f"kill -9. On disk: {len(committed_episodes)} committed episodes, {len(turns)} journal entries.")
    print(f"In flight: {len(in_flight)} episodes, {len(started_episodes)} of them in the middle of a conversation.\n")

    print("Another process resumes it:")
    follow(start("resume"))

    entries = ask(TURNS, "turns-0.db")
    lineages = dict(ask("SELECT lineage, min(step) FROM versions GROUP BY lineage"))
    # Steps of lineage 0 after the checkpoint do not count: their weights were lost, their episodes were not.
    trained_episodes = ask(f"SELECT DISTINCT episode FROM step_units WHERE lineage = 1 OR step <= {lineages[1]}")
    twice = ask(
        f"SELECT episode FROM step_units WHERE lineage = 1 OR step <= {lineages[1]} GROUP BY episode"
        " HAVING count(DISTINCT step) > 1"
    )
    dropped_episodes = ask(
        "SELECT episode FROM episodes WHERE drop_reason IS NOT NULL UNION SELECT episode FROM unit_drops"
    )
    admitted_episodes = ask("SELECT DISTINCT episode FROM admissions WHERE purpose = 'train'")
    print(f"It resumed from step {lineages[1]}, as lineage 1, and took steps {lineages[1] + 1} to {STEPS}.\n")
    print("committed episodes lost:      ", len(committed_episodes - set(ask(COMMITTED_EPISODES))))
    print("journal entries lost:         ", len(turns - set(entries)))
    print("turns sampled a second time:  ", len(entries) - len(set(entries)))
    print("episodes trained twice:       ", len(twice))
    print(
        f"ledger: {len(admitted_episodes)} admitted = {len(ask(IN_FLIGHT))} in flight + {len(trained_episodes)} "
        "trained",
        end="",
    )
    print(f" + {len({*dropped_episodes} - {*trained_episodes})} dropped when the run ended")
    print(f"`agentrl run ledger {RUN}` counts the same from other tables.")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else train(resume=sys.argv[1] == "resume")
