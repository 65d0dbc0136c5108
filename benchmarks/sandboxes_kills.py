"""A training run whose tools and rewards run in sandboxes, killed with SIGKILL."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import agentrl
from agentrl.environments.calculator import Calculator
from benchmarks.chaos import Chaos, Kind, Tally

KILLS = 30
KIND = Kind(
    "sandboxed",
    24,
    {"orchestrator": 5, "engine": 1, "worker": 4},
    calm_s=1.5,
    start_s=10.0,
    one_victim=True,
    after_progress=True,
)


class Sandboxed(Calculator):
    """The calculator, whose operations are commands that keep a list of their results, which a judge counts."""

    sandbox = agentrl.Sandbox(disk_mb=4, memory_mb=64, seconds=30)

    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        ran = await self.box.run(["sh", "-c", f"echo $(({a} {op} {b})) | tee -a results"])
        return int(ran.output)

    async def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:  # type: ignore[override]
        async with self.box.copy() as judge:
            counted = await judge.run(["sh", "-c", "cat results 2>/dev/null | wc -l"])
        answers = [message for message in episode.messages if message.role == "tool"]
        right = sum(not message.content.startswith("error") for message in answers)
        if int(counted.output) != right:
            raise agentrl.AgentRLError(f"{counted.output.strip()} results are in the sandbox, and {right} were seen")
        return super().reward(task, episode)


def figures(quick: bool) -> dict[str, float | None]:
    """Kill runs, and compare their ledgers and what was acknowledged."""
    if quick:
        return {}
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="sandboxes-kills-") as scratch:
        Chaos(KIND, Path(scratch), 0, tally).run(KILLS)
    faults = tally.verdict
    for fault in sorted([*tally.violations, *faults.lost, *faults.twice, *faults.ledger_errors, *tally.unexplained]):
        print(fault, flush=True)
    print(f"kills {dict(tally.kills)}, {tally.runs} runs", flush=True)
    wrong = [*faults.ledger_errors, *faults.lost, *faults.twice, *tally.violations, *tally.unexplained]
    return {"run_kills": float(tally.kills.total()), "ledger_errors": float(len(wrong))}
