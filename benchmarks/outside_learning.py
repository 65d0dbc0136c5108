"""The calculator as a loop over `AsyncOpenAI` (examples/09_openai_client.py), beside the environment of this package.

Both begin from the same model, with the same configuration but for the environment. Steps are those to a 5-step mean
reward of 0.9.
"""

from __future__ import annotations

import importlib.util
import runpy
import statistics
import tempfile
from pathlib import Path

import agentrl
from benchmarks.main_job import Recorder, Trace
from benchmarks.report import completed

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/09_openai_client.py"
SEEDS = (0, 1)


def figures(quick: bool) -> dict[str, float | None]:
    if quick or importlib.util.find_spec("openai") is None:
        return {}
    config: agentrl.RunConfig = runpy.run_path(str(EXAMPLE))["CONFIG"]
    traces: dict[str, list[Trace]] = {config.environment.id: [], "calculator": []}
    for seed in SEEDS:
        for environment, found in traces.items():
            found.append(_trained(config, environment, seed))
    outside, native = traces.values()
    measured: dict[str, float | None] = {"reward_end": min(trace.summary["reward_end"] for trace in outside)}
    reached = [[trace.steps_to(0.9) for trace in each] for each in (outside, native)]
    print(f"0.9 at steps {reached[0]} through the gateway, {reached[1]} by act", flush=True)
    steps = [[step for step in each if step is not None] for each in reached]
    if all(len(each) == len(SEEDS) for each in steps):
        measured["steps_over_native"] = statistics.fmean(steps[0]) / statistics.fmean(steps[1])
    return measured


def _trained(config: agentrl.RunConfig, environment: str, seed: int) -> Trace:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as directory:
        changes = {"environment": {"id": environment}, "seed": seed, "directory": directory}
        settings = agentrl.RunConfig.model_validate({**config.model_dump(), **changes})
        run = completed(agentrl.train(settings, quiet=True, observers=[recorder]))
    recorder.trace.summary = {name: run.summary[name] for name in ("reward_start", "reward_end")}
    print(f"{environment}, seed {seed}: {recorder.trace.summary}, {recorder.trace.wall[-1]:.0f} s", flush=True)
    return recorder.trace
