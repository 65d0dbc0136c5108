"""The bound on staleness that a run chooses, and what the choice costs.

    python -m benchmarks.pace [--quick]
        [--part auto|calculator|smollm2|stale|growth|limit|start|publication|full_weights]

* `auto`. `auto_over_best`: the seconds of a run with "auto", its first steps included, over those of the best number;
  the worst of these workloads, over 80 steps.
* `calculator`. `calculator_auto_over_best`: the same for `examples/01_tool_use.toml` in real time. Runs take turns, and
  figures are medians over runs of their mean step; a machine with other work makes them meaningless. Not in `--quick`.
* `smollm2`. `smollm2_auto_over_best`: the same for `examples/07_smollm2.toml` with steps of 32 episodes.
  `smollm2_vllm_auto_over_best`: the same with vLLM and a merged LoRA.
* `stale`. `stale_over_lockstep`: versions until the episodes that one began reach a goal, with the default loss at the
  largest bound on staleness, over those in lockstep; `best_over_default`: the best variant's over the default's
  (`stale_data.VARIANTS`), in medians of five seeds. The same for SmolLM2, which takes hours. Not in `--quick`.
  `harm_default_over_lockstep`: on a task on which stale data does harm, in virtual time, what the policy earns with the
  default at staleness 4 over what it earns in lockstep, medians of five seeds. `harm_uncorrected_over_lockstep`: the
  same without correction, the control. `harm_best_over_default`: the best variant's over the default's.
* `growth`. `growth`: the CPU seconds of a command that reads a whole run of about 20,000 episodes, beyond its start,
  over what a run of a quarter of them predicts; the worst of `pace_growth.COMMANDS`. `jsonl_ms_per_episode`,
  `parquet_ms_per_episode`: CPU milliseconds of an export of the larger run.
* `limit`. `tokens_over_distinct`: the positions that the embedded engine computes, padding included, over those that
  differ in their weights or in the tokens up to them; the worse of two examples. `unshared_over_distinct`, the control:
  the calculator's, if conversations share nothing. `calculator_over_arithmetic`, `smollm2_over_arithmetic`: CPU seconds
  of a step, episodes included, over those of its linear layers alone. SmolLM2 is not in `--quick`.
* `start`. `calculator_first_token_s`, `smollm2_first_token_s`: CPU seconds of a run until its first sampled token.
  `imports_s`: those of torch and transformers alone, which no start can avoid and a busy machine raises too.
* `publication`. `publication_ratio`: seconds from the end of an optimizer step to the first token of the new version,
  for a merged LoRA on SmolLM2 with vLLM that is published as factors, over publishing the merged weights; median of
  interleaved rounds. `publication_cpu_ratio`, `publication_bytes`: the same of the CPU seconds of all processes, and
  of the published bytes. `publication_difference`: the largest
  difference of weights and of log-probabilities between the two. `publication_control`: whether that comparison finds
  one number of one factor moved by a thousandth.
* `full_weights`. `full_NAME_seconds`: seconds from the changed weights to the first token under them, journal included,
  over those of the commit before full weights were served without a sync, by `pace_publication.FULL`; medians of rounds
  in turn. `full_NAME_cpu`, `full_NAME_bytes`: the same of the CPU seconds of all processes, and of the bytes written to
  files. `full_control`: seconds of that commit over its own, for the calculator. `--quick` has only the calculator.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import pace_growth, pace_limit, pace_publication, stale_data
from benchmarks.parts import Figures, run_functions
from tests.simulation.pace import (
    BOUNDS,
    WORKLOADS,
    simulated,
)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
QUICK = ("engine and trainer", "trainer")
STEPS, QUICK_STEPS = 80, 24
"""Steps of a run in virtual time."""
FIRST_STEPS = 10
"""First steps of real runs, which are not measured: a run with "auto" times both bounds in them."""


def auto(quick: bool) -> dict[str, float]:
    """Compare "auto" with the best number."""
    ratios, steps = {}, QUICK_STEPS if quick else STEPS
    for name in _workloads(quick):
        seconds = {bound: simulated(name, bound, steps)[0].step_times[-1] for bound in (*BOUNDS, "auto")}
        ratios[name] = seconds["auto"] / min(seconds[bound] for bound in BOUNDS)
        print(f"  {name}: {ratios[name]:.3f}", flush=True)
    return {"auto_over_best": max(ratios.values())}


def calculator(quick: bool) -> dict[str, float]:
    """Compare both in real time."""
    return {} if quick else _in_real_time("calculator", "01_tool_use.toml", rounds=3, settings=("--steps=20",))


def smollm2(quick: bool) -> dict[str, float]:
    """The same with a pretrained model."""
    settings = ("--steps=18", "--policies.solver.step_size=32")
    vllm = ("--engine.vllm={}", "--policies.solver.lora.merge=true")
    return (
        {}
        if quick
        else _in_real_time("smollm2", "07_smollm2.toml", rounds=2, settings=settings)
        | _in_real_time("smollm2_vllm", "07_smollm2.toml", rounds=2, settings=(*settings, *vllm))
    )


def _in_real_time(name: str, example: str, *, rounds: int, settings: Sequence[str]) -> dict[str, float]:
    runs: dict[Any, list[Sequence[Mapping[str, float]]]] = {bound: [] for bound in (*BOUNDS, "auto")}
    for number in range(rounds):
        for bound in runs:
            runs[bound].append(_train(EXAMPLES / example, bound, number, settings)[FIRST_STEPS:])
    # Steps on what was sampled ahead come together, so their mean is the pace, and not their median.
    seconds = {bound: median(fmean(v["step/seconds"] for v in steps) for steps in runs[bound]) for bound in runs}
    print("  " + ", ".join(f"{bound}: {step_s:.3f} s" for bound, step_s in seconds.items()), flush=True)
    return {f"{name}_auto_over_best": seconds["auto"] / min(seconds[bound] for bound in BOUNDS)}


def _workloads(quick: bool) -> tuple[str, ...]:
    return QUICK if quick else tuple(WORKLOADS)


def _train(example: Path, max_staleness: Any, seed: int, settings: Sequence[str]) -> list[Mapping[str, float]]:
    """Train for a few steps in a process; returns the metrics of each."""
    with tempfile.TemporaryDirectory() as directory:
        settings = (
            *(f"--directory={directory}", "--name=run", f"--seed={seed}", "--evaluation.tasks=0"),
            "--evaluation.every=0",
            *(f"--policies.solver.max_staleness={json.dumps(max_staleness)}", *settings),
        )
        command = [sys.executable, "-m", "agentrl", "train", str(example), *settings]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


PARTS: Mapping[str, Figures] = {
    "auto": auto,
    "calculator": calculator,
    "smollm2": smollm2,
    "stale": stale_data.figures,
    "growth": pace_growth.figures,
    "limit": pace_limit.figures,
    "start": pace_limit.start,
    "publication": pace_publication.figures,
    "full_weights": pace_publication.full_figures,
}
FIGURES = (
    *("auto_over_best"),
    *("calculator_auto_over_best", "smollm2_auto_over_best", "smollm2_vllm_auto_over_best"),
    *("stale_over_lockstep", "best_over_default", "smollm2_stale_over_lockstep", "smollm2_best_over_default"),
    *("harm_default_over_lockstep", "harm_uncorrected_over_lockstep", "harm_best_over_default"),
    *("growth", "jsonl_ms_per_episode", "parquet_ms_per_episode"),
    *("calculator_first_token_s", "smollm2_first_token_s", "imports_s"),
    *("tokens_over_distinct", "unshared_over_distinct", "calculator_over_arithmetic", "smollm2_over_arithmetic"),
    *("publication_ratio", "publication_cpu_ratio", "publication_bytes"),
    *("publication_difference", "publication_control"),
    *("full_calculator_seconds", "full_calculator_cpu", "full_calculator_bytes", "full_control"),
    *("full_smollm2_seconds", "full_smollm2_cpu", "full_smollm2_bytes"),
    *("full_smollm2_process_seconds", "full_smollm2_process_cpu", "full_smollm2_process_bytes"),
    *("full_smollm2_vllm_seconds", "full_smollm2_vllm_cpu", "full_smollm2_vllm_bytes"),
)

if __name__ == "__main__":
    run_functions("pace", FIGURES, PARTS, description=__doc__)
