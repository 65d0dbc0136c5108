"""`python -m benchmarks.peers`; see the package."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.peers
from agentrl.environments.calculator import Calculator
from benchmarks.peers import orchestration, scoring, summary
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS, VERIFIERS, Contender, lines_of_code
from benchmarks.peers.environments import ROOT, Built, build, wheel
from benchmarks.peers.running import Life, Runner, Sampler, Samples, at, vllm_server

MODEL = ROOT / "environments" / "calculator" / "model"
PARTS = ("calculator", "tools", "orchestration")
GOAL, STEPS, KILL_AFTER, HELD_OUT = 0.9, 36, 10, 512
QUICK_GOAL, QUICK_STEPS, QUICK_KILL_AFTER, QUICK_HELD_OUT = 0.6, 6, 4, 128
LIMIT_S, QUICK_LIMIT_S = 900.0, 240.0
"""Seconds of training after which a run has not reached the goal."""
KILLS = 3
"""Seeds whose second run is killed."""
GROUPS = 8
"""Groups of a step."""


def train(
    name: str, contender: Contender, built: Built, directory: Path, *, part: str, seed: int, quick: bool
) -> dict[str, Any]:
    """Train to the end and find the goal, then train again with a kill in the middle; the record of both."""
    steps = QUICK_STEPS if quick else STEPS
    goal, held_out = (QUICK_GOAL, QUICK_HELD_OUT) if quick else (GOAL, HELD_OUT)
    record: dict[str, Any] = {"wall_s": None, "cpu_s": None, "steps_to_goal": None}
    shutil.rmtree(directory, ignore_errors=True)
    runner = prepare(contender, built, directory / "run", part=part, seed=seed, steps=steps)
    life, samples = life_of(contender, built, runner, limit_s=QUICK_LIMIT_S if quick else LIMIT_S)
    ended = life.steps
    record |= costs(samples, life)
    reached, record["curve"] = scoring.first_at(MODEL, runner.directory, goal, held_out)
    if reached is not None:
        moment = next(step["t"] for step in ended if step["step"] == reached)
        begin = training_began(samples, life)
        record |= {"steps_to_goal": reached, "wall_s": moment - begin}
        record["cpu_s"] = samples.cpu_between(begin, moment)
    record["steps"] = len(ended)
    if part == "calculator" and seed < KILLS:
        after = QUICK_KILL_AFTER if quick else KILL_AFTER
        record |= kill(contender, built, directory / "kill", part=part, seed=seed, after=after)
    return record


def prepare(contender: Contender, built: Built, directory: Path, *, part: str, seed: int, steps: int) -> Runner:
    """A directory with the model and the training tasks of this seed."""
    (directory / "output").mkdir(parents=True)
    (directory / "model").symlink_to(MODEL)
    tasks = Calculator.tasks("train", seed=seed)
    rows = [tasks[n].data for n in range(GROUPS * (steps + 8))]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": str(MODEL),
        "tasks": str(directory / "tasks.jsonl"),
        "output": str(directory / "output"),
        "steps": steps,
        "seed": seed,
        "waits": part == "tools",
    }
    if contender.config:
        settings["config"] = str(SCRIPTS / contender.config)
        settings["overrides"] = [
            f"--model.path={MODEL}",
            f"--directory={directory / 'runs'}",
            f"--seed={seed}",
            f"--steps={steps}",
            "--checkpoint.versions=0",  # keep the weights of every step, which are scored afterward
        ]
    return Runner(contender, built.python, directory, settings)


def life_of(
    contender: Contender,
    built: Built,
    runner: Runner,
    *,
    resume: bool = False,
    until_step: int | None = None,
    kill: bool = False,
    limit_s: float = LIMIT_S,
) -> tuple[Life, Samples]:
    """One life of a contestant with a vLLM server of its own, if it needs one, and what both cost."""
    with ExitStack() as stack:
        server: tuple[str, int] | None = None
        if contender.server:
            server = stack.enter_context(vllm_server(built.python, MODEL, runner.directory))
            runner.settings["server"] = server[0]
        sampler = stack.enter_context(Sampler(server and server[0]))
        if server is not None:
            sampler.add(server[1])
        life = runner.live(sampler, resume=resume, limit_s=limit_s, until_step=until_step, kill=kill)
    return life, sampler.samples


def costs(samples: Samples, life: Life) -> dict[str, Any]:
    """What a whole life cost: per step after the third, which fills the pipeline, and in tokens and memory."""
    first, last = life.steps[max(0, min(2, len(life.steps) - 2))], life.steps[-1]
    count = last["step"] - first["step"]  # 0 if the time limit came before the second step
    sampled = sampled_until(samples, life, last["t"])
    return {
        "wall_per_step": (last["t"] - first["t"]) / count if count else None,
        "cpu_per_step": samples.cpu_between(first["t"], last["t"]) / count if count else None,
        "tokens_sampled": sampled,
        "tokens_wasted": sampled - sum(step["trained"] for step in life.steps),
        "peak_mib": samples.peak_mib,
    }


def training_began(samples: Samples, life: Life) -> float:
    """The contestant's own beginning, or the last reading before its server sampled, if that is earlier.

    TRL's asynchronous trainer begins its first step when the first batch has been sampled.
    """
    unsampled = [moment for moment, tokens in samples.tokens if tokens == 0]
    return min([life.begin, *unsampled[-1:]])


def sampled_until(samples: Samples, life: Life, moment: float) -> float:
    """Tokens that a life sampled until then: by its server's count, otherwise by the contestant's own log."""
    if samples.tokens:
        return at(samples.tokens, moment)
    return float(sum(step["sampled"] for step in life.steps if step["t"] <= moment))


def kill(
    contender: Contender, built: Built, directory: Path, *, part: str, seed: int, after: int
) -> dict[str, float | None]:
    """SIGKILL in the middle of the step after `after`, then what it takes until the last step done is done again.

    A contestant that cannot resume begins again.
    """
    runner = prepare(contender, built, directory, part=part, seed=seed, steps=after + 6)
    first, _ = life_of(contender, built, runner, until_step=after, kill=True)
    highest = first.steps[-1]["step"]
    again, samples = life_of(contender, built, runner, until_step=highest, resume=contender.resumes)
    assert first.killed is not None
    back = next((step["t"] for step in again.steps if step["step"] >= highest), None)
    if back is None:
        return {"killed_s": None, "killed_tokens": None}
    return {"killed_s": back - first.killed, "killed_tokens": sampled_until(samples, again, back)}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=benchmarks.peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, help="this part alone; without it, all")
    parser.add_argument("--seeds", type=int, default=5, help="repeats, interleaved across the contestants")
    parser.add_argument("--quick", action="store_true", help="few steps and a low goal: shows that everything runs")
    parser.add_argument("--only", help="these contestants, separated by commas")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "agentrl-peers", help="environments")
    parser.add_argument("--output", type=Path, help="also write the last line here; docs/peers.json makes the tables")
    return parser.parse_args()


def main() -> None:
    """Build, run, interleave, report."""
    chosen = options()
    cache: Path = chosen.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    everyone = {**CONTENDERS, "verifiers": VERIFIERS}
    names = chosen.only.split(",") if chosen.only else list(everyone)
    if unknown := sorted(set(names) - set(everyone)):
        raise SystemExit(f"--only names {', '.join(unknown)}; known: {', '.join(everyone)}")
    built_wheel = wheel(cache)
    built = {name: build(everyone[name], cache, built_wheel) for name in names}
    parts = [chosen.part] if chosen.part else list(PARTS)
    reports = {}
    for part in parts:
        records: list[dict[str, Any]] = []
        goal = QUICK_GOAL if chosen.quick else GOAL
        for seed in range(chosen.seeds):
            for name in names:
                if (part == "orchestration") != (name == "verifiers") and not (
                    part == "orchestration" and name == "agentrl_embedded"
                ):
                    continue
                started = time.monotonic()
                contender = everyone[name]
                if part == "orchestration":
                    measured = orchestration.measure(name, built[name], quick=chosen.quick)
                else:
                    directory = cache / "runs" / part / f"{name}-{seed}"
                    measured = train(name, contender, built[name], directory, part=part, seed=seed, quick=chosen.quick)
                records.append(describe(name, contender, built[name], seed) | measured)
                shown = {key: short(value) for key, value in measured.items() if key in summary.MEASURED}
                print(f"{part}, seed {seed}, {name}: {time.monotonic() - started:.0f} s in all, {shown}", flush=True)
                reports[part] = summary.report(part, quick=chosen.quick, goal=goal, records=records)
                (cache / f"results-{part}.json").write_text(json.dumps(reports[part], indent=1))
    line = reports[parts[0]] if len(parts) == 1 else combined(reports)
    if chosen.output:
        chosen.output.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(line), flush=True)


def describe(name: str, contender: Contender, built: Built, seed: int) -> dict[str, Any]:
    """What a record says before anything is measured."""
    return {
        "contender": name,
        "seed": seed,
        "title": contender.title,
        "lines": lines_of_code(contender.user_files),
        "packages": built.packages,
        "megabytes": built.megabytes,
        "proposer_and_solver": contender.proposer_and_solver,
    }


def combined(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All parts in one line; a figure comes from the first part that has it."""
    first = next(iter(reports.values()))
    figures: dict[str, float | None] = dict.fromkeys(first["figures"])
    spread: dict[str, list[float] | None] = dict.fromkeys(first["figures"])
    for report in reports.values():
        for figure, value in report["figures"].items():
            if figures[figure] is None and value is not None:
                figures[figure], spread[figure] = value, report["quartiles"][figure]
    return {
        "benchmark": "peers",
        "quick": first["quick"],
        "repeats": first["repeats"],
        "figures": figures,
        "quartiles": spread,
        "parts": reports,
    }


def short(value: Any) -> Any:
    """A number for the terminal."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
