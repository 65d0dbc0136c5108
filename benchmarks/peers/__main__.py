"""`python -m benchmarks.peers`; see the package."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.peers
from agentrl.config.load import load
from benchmarks.peers import orchestration, scoring, summary
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS, VERIFIERS, Contender, lines_of_code, user_files
from benchmarks.peers.environments import ROOT, Built, build, float32_model, wheel
from benchmarks.peers.running import Life, Runner, Sampler, Samples, at, vllm_server
from benchmarks.peers.trainings import QUICK, TRAININGS, Training

PARTS = ("calculator", "tools", "word_problems", "orchestration")
KILL_AFTER, QUICK_KILL_AFTER = 10, 4
KILLS = 3
"""Seeds whose second run is killed."""
ONE_SEED = {"tools": ("trl_sync", "naive"), "word_problems": ("trl_sync",)}
"""Contestants with a single seed in a part, to save time: one takes five to ten minutes there."""


def train(
    contender: Contender, built: Built, directory: Path, model: Path, *, part: str, seed: int, quick: bool
) -> dict[str, Any]:
    """Train to the end and find the goal, then train again with a kill in the middle; the record of both."""
    training = (QUICK if quick else TRAININGS)[part]
    record: dict[str, Any] = {"wall_s": None, "cpu_s": None, "steps_to_goal": None}
    shutil.rmtree(directory, ignore_errors=True)
    runner = prepare(contender, built, directory / "run", model, training, part=part, seed=seed)
    life, samples = life_of(runner, training)
    ended = life.steps
    record |= costs(samples, life)
    reached, record["curve"] = scoring.first_at(
        model, runner.directory, training.goal, training.held_out, training.game
    )
    if reached is not None:
        moment = next(step["t"] for step in ended if step["step"] == reached)
        begin = training_began(samples, life)
        record |= {"steps_to_goal": reached, "wall_s": moment - begin}
        record["cpu_s"] = samples.cpu_between(begin, moment)
    record["steps"] = len(ended)
    if part == "calculator" and seed < KILLS:
        after = QUICK_KILL_AFTER if quick else KILL_AFTER
        runner = prepare(
            contender, built, directory / "kill", model, replace(training, steps=after + 6), part=part, seed=seed
        )
        record |= kill(runner, training, after=after)
    if part == "word_problems":  # a run's snapshots take gigabytes
        for snapshots in ("runs", "output"):
            shutil.rmtree(directory / "run" / snapshots, ignore_errors=True)
    return record


def prepare(
    contender: Contender, built: Built, directory: Path, model: Path, training: Training, *, part: str, seed: int
) -> Runner:
    """A directory with the model and the training tasks of this seed."""
    (directory / "output").mkdir(parents=True)
    (directory / "model").symlink_to(model)
    files = user_files(contender, part)
    steps = (training.adapter_steps if contender.weights == "adapter" else 0) or training.steps
    tasks = training.game.tasks("train", seed)
    rows = [tasks[n].data for n in range(training.step_size // 8 * (steps + 8))]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "script": files[0],
        "task": Path(files[1]).stem,
        "has_tools": part != "word_problems",
        "model": str(model),
        "tasks": str(directory / "tasks.jsonl"),
        "output": str(directory / "output"),
        "steps": steps,
        "seed": seed,
        "step_size": training.step_size,
        "learning_rate": training.learning_rates[contender.weights],
        "max_tokens": training.game.max_tokens,
        "max_episode_tokens": training.max_episode_tokens,
        "waits": part == "tools",
    }
    if contender.config:
        settings["config"] = str(SCRIPTS / contender.config)
        settings["overrides"] = [
            f"--model.path={model}",
            f"--directory={directory / 'runs'}",
            f"--seed={seed}",
            f"--steps={steps}",
            f"--policies.solver.step_size={training.step_size}",
            f"--policies.solver.learning_rate={training.learning_rates[contender.weights]}",
            f"--sampling.max_tokens={training.game.max_tokens}",
            f"--engine.max_context={training.max_context}",
            *training.agentrl,
            *contender.overrides,
            "--checkpoint.versions=0",  # keep the weights of every step, which are scored afterward
        ]
    return Runner(contender, built.python, directory, settings, threads=threads_of(contender, training))


def threads_of(contender: Contender, training: Training) -> int:
    """Threads of torch in each process of the contestant."""
    return training.threads.get(Path(contender.user_files[0]).stem, 1)


def life_of(
    runner: Runner,
    training: Training,
    *,
    resume: bool = False,
    until_step: int | None = None,
    kill: bool = False,
) -> tuple[Life, Samples]:
    """One life of a contestant with a vLLM server of its own, if it needs one, and what both cost."""
    with ExitStack() as stack:
        server: tuple[str, int] | None = None
        if runner.contender.server:
            server = stack.enter_context(
                vllm_server(
                    runner.python,
                    runner.settings["model"],
                    runner.directory,
                    kv_bytes=training.kv_bytes,
                    threads=training.threads.get("server", 1),
                )
            )
            runner.settings["server"] = server[0]
        sampler = stack.enter_context(Sampler(server and server[0]))
        if server is not None:
            sampler.add(server[1])
        life = runner.live(sampler, resume=resume, limit_s=training.limit_s, until_step=until_step, kill=kill)
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


def kill(runner: Runner, training: Training, *, after: int) -> dict[str, float | None]:
    """SIGKILL in the middle of the step after `after`, then what it takes until the last step done is done again.

    A contestant that cannot resume begins again.
    """
    first, _ = life_of(runner, training, until_step=after, kill=True)
    highest = first.steps[-1]["step"]
    again, samples = life_of(runner, training, until_step=highest, resume=runner.contender.resumes)
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
    models = {part: training.model for part, training in TRAININGS.items()}
    if "word_problems" in parts:
        models["word_problems"] = float32_model(models["word_problems"], cache)
    for part in parts:
        records: list[dict[str, Any]] = []
        training = (QUICK if chosen.quick else TRAININGS).get(part)
        goal = training.goal if training else None
        for seed in range(chosen.seeds):
            for name in names:
                if not takes_part(name, part, seed):
                    continue
                started = time.monotonic()
                contender = everyone[name]
                if part == "orchestration":
                    measured = orchestration.measure(name, built[name], quick=chosen.quick)
                else:
                    directory = cache / "runs" / part / f"{name}-{seed}"
                    measured = train(
                        contender, built[name], directory, models[part], part=part, seed=seed, quick=chosen.quick
                    )
                records.append(describe(name, contender, built[name], part, seed, training) | measured)
                shown = {key: short(value) for key, value in measured.items() if key in summary.MEASURED}
                print(f"{part}, seed {seed}, {name}: {time.monotonic() - started:.0f} s in all, {shown}", flush=True)
                reports[part] = summary.report(
                    part, quick=chosen.quick, goal=goal, records=records, conditions=conditions()
                )
                (cache / f"results-{part}.json").write_text(json.dumps(reports[part], indent=1))
    line = reports[parts[0]] if len(parts) == 1 else combined(reports)
    if chosen.output:
        chosen.output.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(line), flush=True)


def takes_part(name: str, part: str, seed: int) -> bool:
    """Whether a part measures a contestant with a seed."""
    if part == "orchestration":
        return name in ("agentrl_embedded", "verifiers")
    if name in ONE_SEED.get(part, ()):
        return seed == 0
    return name != "verifiers"


def describe(
    name: str, contender: Contender, built: Built, part: str, seed: int, training: Training | None
) -> dict[str, Any]:
    """What a record says before anything is measured."""
    return {
        "contender": name,
        "seed": seed,
        "title": contender.title,
        "lines": lines_of_code(user_files(contender, part)),
        "packages": built.packages,
        "megabytes": built.megabytes,
        "proposer_and_solver": contender.proposer_and_solver,
        "settings": {"versions": ", ".join(contender.requirements).replace(".[", "agentrl[")}
        | ({} if training is None else settings_of(contender, part, training)),
    }


def settings_of(contender: Contender, part: str, training: Training) -> dict[str, str]:
    """The settings that are not the same for all, in words."""
    words = dict(contender.settings)
    if part == "word_problems":
        del words["bad_call"]  # nobody has tools there
    threads = str(threads_of(contender, training))
    words["in_flight"] = str(training.step_size)
    if contender.server:
        threads += f", server {training.threads.get('server', 1)}"
        words["in_flight"] = str(2 * training.step_size)
    if contender.config:
        config = load(SCRIPTS / contender.config, [*training.agentrl, *contender.overrides])
        words["staleness"] = f"mean {config.policies['solver'].max_staleness}, none dropped"
        words["in_flight"] = str(config.engine.slots)
    return {**words, "threads": threads, "learning_rate": f"{training.learning_rates[contender.weights]:g}"}


def conditions() -> dict[str, str]:
    """What the runs share: when, where, and of which commit."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    commit = subprocess.run(
        ("git", "rev-parse", "--short=8", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%-d %B %Y"),
        "machine": f"{len(os.sched_getaffinity(0))} CPU cores ({cpu[1] if cpu else 'unknown'})",
        "commit": commit.stdout.strip(),
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
