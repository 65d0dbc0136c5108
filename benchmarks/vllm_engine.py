"""The embedded engine beside vLLM, what our client adds to vLLM, and whether a run on vLLM learns.

    python -m benchmarks.vllm_engine [--quick] [--part speed|client|learning]

`over_vllm_b1`, `over_vllm_b8`, `over_vllm_b32`: tokens per second of the embedded engine over vLLM's called bare, at 1,
8 and 32 concurrent requests on the calculator's model; the lower of no adapter and two adapters mixed in a batch.
Shown beside: a model of 5 million parameters.
`client_overhead`: CPU seconds that an engine as a run has it, in its process beside vLLM and in the client's, takes
beyond a client in vLLM's own process that asks for nothing but the final tokens, over all CPU seconds of the latter,
vLLM's included; 64 concurrent requests.
`reward_end_lora`, `reward_end_full`: held-out reward of `examples/05_vllm.toml`, and of the same with full weights
(learning rate 3e-4, refresh `token`). For weights to arrive while episodes are in flight, both with max_staleness 2 and
the tool's latency log-normal (median 50 ms, P90/P50 = 5). Every step publishes; at how many steps episodes were in
flight when the update had been taken is shown beside: at all but the last at best, since a run admits no more episodes
than its steps consume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.engines.vllm import process as vllm_process
from benchmarks.report import Report

if TYPE_CHECKING:
    from agentrl.core.records import PolicyVersion

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "05_vllm.toml"
NAMES = ("over_vllm_b1", "over_vllm_b8", "over_vllm_b32", "client_overhead", "reward_end_lora", "reward_end_full")


class InFlight:
    """An observer that counts the steps whose update met episodes in flight."""

    def __init__(self) -> None:
        self.steps = self.met = 0

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note the step."""
        self.steps += 1
        self.met += metrics["episodes/in_flight"] > 0

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing to note."""


def train(kind: str, directory: str) -> dict[str, Any]:
    """The example with an adapter (`lora`) or with full weights (`full`), its tool behind a slow network."""
    import agentrl
    from agentrl.config.load import load
    from benchmarks.main_job import SlowCalculator

    config = load(EXAMPLE, [f"--name={kind}", f"--directory={directory}", "--policies.solver.max_staleness=2"])
    if kind == "full":
        values = config.model_dump(mode="json")
        values["policies"]["solver"] |= {"lora": None, "learning_rate": 3e-4}
        values["engine"]["refresh"] = "token"
        config = type(config).model_validate(values)
    counted = InFlight()
    run = agentrl.train(config, environment=SlowCalculator, quiet=True, observers=[counted])
    summary = {name: run.summary[name] for name in ("reward_start", "reward_end", "rl_seconds", "staleness_mean")}
    return {**summary, "steps": counted.steps, "steps_with_episodes_in_flight": counted.met}


def learning(report: Report) -> None:
    """Each kind in a process of its own."""
    for kind in ("lora", "full"):
        with tempfile.TemporaryDirectory(prefix="agentrl-vllm-") as scratch:
            command = [sys.executable, "-m", "benchmarks.vllm_engine", "--train", kind, scratch]
            finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if finished.returncode:
                raise SystemExit(f"{kind} failed:\n{finished.stderr[-4000:]}")
            result = json.loads(finished.stdout.strip().splitlines()[-1])
        print(f"{kind}: {result}", flush=True)
        report.figures[f"reward_end_{kind}"] = result["reward_end"]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, no learning, no larger model")
    parser.add_argument("--part", choices=["speed", "client", "learning"], help="measure this part alone")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        print(json.dumps(train(*options.train)))
        return
    repeats = 2 if options.quick else 15
    report = Report(
        "vllm_engine", quick=options.quick, repeats=repeats, compared_with="vLLM's AsyncLLM, called bare, by turns"
    )
    report.figures.update(dict.fromkeys(NAMES))
    vllm_process.prepare_vllm_process()
    if options.part != "learning":
        from benchmarks import vllm_engine_rates

        if options.part in (None, "speed"):
            asyncio.run(vllm_engine_rates.speed(report, repeats=repeats))
            if not options.quick:
                asyncio.run(vllm_engine_rates.larger_model(7))
        if options.part in (None, "client"):
            asyncio.run(vllm_engine_rates.client(report, repeats=repeats))
    if options.part in (None, "learning") and not options.quick:
        learning(report)
    report.print()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
