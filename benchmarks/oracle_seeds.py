"""Programs whose order depends on string hashes, killed with SIGKILL and resumed under other hash seeds.

    python -m benchmarks.oracle --part seeds

A run plays programs that let their seats act, or reward them, in the order of a set; and, as a control, one that sorts
them. It is killed 200 times while episodes are in flight, and each life has another PYTHONHASHSEED. In every committed
episode, each agent's reward must be that of its own tokens, in the entries as in the trajectories. The negative control
takes the agent out of the recorded request.

Figures: `rewards_on_the_wrong_agent`, agents of committed episodes with another reward; `wrong_without_comparison`, the
same of the negative control; `hash_seed_kills`; `hash_seed_resumed`, episodes that were in flight at a kill, of which
`hash_seed_dropped` were dropped as `nondeterminism`; `sorted_dropped`, those of the program that sorts.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import tempfile
import time
from pathlib import Path

import agentrl
from agentrl.core.records import Task
from agentrl.rollout.calls import journal as call_journal
from agentrl.rollout.turn import agent
from benchmarks.oracle_lives import IN_FLIGHT, committed, life, query
from tests.journal_oracle import judge

KILLS, QUICK_KILLS, CONTROL_KILLS = 200, 3, 4
LIFE_LIMIT_S = 300.0
BLIND = "REPLAY_COMPARES_NO_AGENT"
PROGRAMS = ("turns", "gather", "rewards", "sorted")


class Both(agentrl.Environment):
    """Two seats act; each is rewarded by the number of its own tokens."""

    seats = ("alice", "bob")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        program = ctx.task.data["program"]
        unordered = sorted(self.seats) if program == "sorted" else list({"alice", "bob"})
        seats = sorted(self.seats) if program == "rewards" else unordered
        if program == "gather":
            await ctx.gather(*(ctx.agent(seat).act(agentrl.user("Say a number.")) for seat in seats))
        else:
            for seat in seats:
                await ctx.agent(seat).act(agentrl.user("Say a number."))
                await ctx.sleep(0.3 * ctx.rng.random())
        for seat in unordered:
            turn = ctx.agent(seat).turns[0]
            ctx.agent(seat).reward(1.0 if program == "rewards" else len(turn.completion.token_ids) / 100)
            await ctx.sleep(0.3 * ctx.rng.random())

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [Task(id=f"{program}-{n}", data={"program": program}) for n in range(16) for program in PROGRAMS]


if os.environ.get(BLIND):
    full_hash = agent.request_hash
    agent.request_hash = call_journal.request_hash = lambda *parts: full_hash(*parts[1:])


def measure(quick: bool) -> dict[str, float | None]:
    """Kill runs, and judge them."""
    with tempfile.TemporaryDirectory(prefix="agentrl-seeds-") as scratch:
        control = _killed(Path(scratch, "control"), 1 if quick else CONTROL_KILLS, blind=True)
        wrong, _ = _wrong(control)
        run = _killed(Path(scratch, "sound"), QUICK_KILLS if quick else KILLS, blind=False)
        found, drops = _wrong(run)
        violations = judge(run)
        for line in [*found[:20], *violations]:
            print(line, flush=True)
        resumed = sum(1 for _ in (run.parent / "resumed").open())
    return {
        "rewards_on_the_wrong_agent": float(len(found)),
        "wrong_without_comparison": float(len(wrong)),
        "hash_seed_kills": float(QUICK_KILLS if quick else KILLS),
        "hash_seed_resumed": float(resumed),
        "hash_seed_dropped": float(len(drops)),
        "sorted_dropped": float(sum(task.startswith("sorted") for task in drops)),
        "hash_seed_violations": float(len(violations)),
    }


def _killed(directory: Path, kills: int, *, blind: bool) -> Path:
    """Kill a run so often, and let all episodes of the last kill end; returns its directory."""
    directory.mkdir()
    draw, run = random.Random(0), directory / "run"
    control = run / "journal" / "control.db"
    for number in range(kills + 1):
        before = {episode for (episode,) in query(control, IN_FLIGHT_EPISODES)} if number else set()
        with (directory / "resumed").open("a") as resumed:
            resumed.writelines(f"{episode}\n" for episode in sorted(before))
        hash_seed = "16"[number % 2] if blind else str(draw.randrange(1, 1 << 31))  # 1 and 6 give the seats both orders
        variables = {"PYTHONHASHSEED": hash_seed, BLIND: "1" if blind else ""}
        with life(f"{__name__}:Both", directory, **variables) as process:
            deadline = time.monotonic() + LIFE_LIMIT_S
            while not _is_due(run / "journal", before):
                if process.poll() is not None or time.monotonic() > deadline:
                    log = (directory / "log").read_text(errors="replace")[-3000:]
                    raise SystemExit(f"life {number} ended with {process.poll()} or did not get on:\n{log}")
                time.sleep(0.02)
            time.sleep(0.3 * draw.random())
        if number % 20 == 19:
            found, drops = _wrong(run)
            print(f"{number + 1} kills: {len(found)} rewards on the wrong agent, {len(drops)} dropped", flush=True)
    return run


IN_FLIGHT_EPISODES = (
    "SELECT episode FROM admissions a WHERE NOT EXISTS"
    " (SELECT 1 FROM episodes e WHERE e.episode = a.episode AND e.attempt = a.attempt)"
)
EPISODES_THAT_ACTED = (
    "SELECT episode FROM entries WHERE episode IN (SELECT value FROM json_each(?)) GROUP BY episode HAVING count(*) > 3"
)


def _is_due(journal: Path, before: set[str]) -> bool:
    """Whether all episodes that the life resumed have ended, and half of those in their places are past their first
    turns. An episode that two processes died with would move to worker processes."""
    try:
        flying = {episode for (episode,) in query(journal / "control.db", IN_FLIGHT_EPISODES)}
        if before & flying:
            return False
        acted = query(journal / "turns-0.db", EPISODES_THAT_ACTED, json.dumps(sorted(flying)))
    except sqlite3.OperationalError:  # the first life makes its databases
        return False
    return len(acted) >= IN_FLIGHT // 2


def _wrong(run: Path) -> tuple[list[str], list[str]]:
    """Agents of committed episodes with a reward that is not their own, and the tasks of episodes that were dropped as
    nondeterminism."""
    control = run / "journal" / "control.db"
    tasks = dict(query(control, "SELECT episode, task FROM episodes"))
    wrong = []
    for episode, recorded, told in committed(run):
        for key in sorted(recorded.keys() | told.keys()):
            tokens, reward = recorded.get(key, (0, None))
            own = 1.0 if tasks[episode].startswith("rewards") else tokens / 100
            if told.get(key) != (tokens, own) or reward != own:
                wrong.append(f"{episode} ({tasks[episode]}), {key}: {tokens} tokens, {reward}; {told.get(key)}")
    dropped = query(control, "SELECT task FROM episodes WHERE drop_reason = 'nondeterminism'")
    return wrong, [task for (task,) in dropped]
