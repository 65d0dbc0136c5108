"""`python -m benchmarks.peers`; see the package."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.peers
from agentrl.config.load import load
from benchmarks.peers import orchestration, scoring, summary
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS, Contender, lines_of_code, user_files
from benchmarks.peers.environments import Built, build, float32_model, wheel
from benchmarks.peers.running import Life, Runner, Sampler, Samples, at, machine_cpu_seconds, read_log, vllm_server
from benchmarks.peers.trainings import QUICK, TRAININGS, Training
from benchmarks.report import conditions

PARTS = ("calculator", "curves", "word_problems", "orchestration", "kills", "tools")
KILL_AFTER, QUICK_KILL_AFTER = 10, 4


def train(
    contender: Contender, built: Built, directory: Path, model: Path, *, part: str, seed: int, quick: bool
) -> dict[str, Any]:
    """Train to the end and find the goal, or kill it in the middle; the record."""
    training = (QUICK if quick else TRAININGS)[part]
    shutil.rmtree(directory, ignore_errors=True)
    runner = prepare(contender, built, directory / "run", model, training, part=part, seed=seed)
    if part == "kills":
        return kill(runner, training, after=QUICK_KILL_AFTER if quick else KILL_AFTER)
    life, samples = life_of(runner, training)
    begin = training_began(samples, life)
    if part == "curves":
        _, curve = scoring.first_at(model, runner.directory, training)
        others = samples.cores_of_others(begin, life.steps[-1]["t"])
        return {"curve": curve, "steps": len(life.steps), "cores_of_others": others}
    record: dict[str, Any] = {"wall_s": None, "cpu_s": None, "steps_to_goal": None}
    record |= costs(samples, life) | {"cores_of_others": samples.cores_of_others(begin, life.steps[-1]["t"])}
    reached, record["curve"] = scoring.first_at(model, runner.directory, training)
    if reached is not None:
        moment = next(step["t"] for step in life.steps if step["step"] == reached)
        record |= {"steps_to_goal": reached, "wall_s": moment - begin}
        record["cpu_s"] = samples.cpu_between(begin, moment)
        record["cores_of_others"] = samples.cores_of_others(begin, moment)
    record["steps"] = len(life.steps)
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
    rows = [dict(tasks[n].data) for n in range(training.step_size // 8 * (steps + 8))]
    random.Random(seed).shuffle(rows)  # neighbors differ in kind; agentrl and TRL's synchronous trainer shuffle, too
    (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        "snapshot_every": training.snapshot_every,
    }
    if contender.config:
        settings["config"] = str(SCRIPTS / contender.config)
        settings["overrides"] = [
            f"--model.path={model}",
            f"--directory={directory / 'runs'}",
            f"--seed={seed}",
            f"--steps={steps}",
            *overrides(contender, training),
            "--checkpoint.versions=0",  # keep the weights of every step, which are scored afterward
        ]
    return Runner(contender, built.python, directory, settings, threads=threads_of(contender, training))


def overrides(contender: Contender, training: Training) -> list[str]:
    """Settings of agentrl that a part or a row of the table changes in the TOML file."""
    staleness, in_flight, slots = training.schedules[contender.schedule]
    return [
        f"--policies.solver.step_size={training.step_size}",
        f"--policies.solver.learning_rate={training.learning_rates[contender.weights]}",
        f"--policies.solver.max_staleness={staleness}",
        *([f"--policies.solver.max_lag={staleness}"] if contender.schedule == "as_trl" else []),
        f"--max_in_flight={round(in_flight * training.step_size)}",
        f"--engine.slots={round(slots * training.step_size)}",
        f"--engine.max_context={training.max_context}",
        f"--sampling.max_tokens={training.game.max_tokens}",
        f"--checkpoint.every={training.snapshot_every}",
        *contender.overrides,
    ]


def threads_of(contender: Contender, training: Training) -> int:
    """Threads of torch in each process of the contestant; agentrl chooses its own."""
    if contender.config:
        return load(SCRIPTS / contender.config, overrides(contender, training)).threads
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
                    arguments=runner.contender.server,
                    kv_bytes=training.kv_bytes,
                    threads=training.threads.get("server", 1),
                    sequences=2 * training.step_size,
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
        **staleness(life),
    }


def staleness(life: Life) -> dict[str, float]:
    """How many steps behind the trained episodes were, and how many were dropped; of asynchronous contestants."""
    steps = [step for step in life.steps if "staleness_mean" in step]
    if not steps:
        return {}
    return {
        "staleness_mean": statistics.fmean(step["staleness_mean"] for step in steps),
        "staleness_max": max(step["staleness_max"] for step in steps),
        "episodes_dropped": sum(step["dropped"] for step in steps),
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
    ended = again.steps[-1]["t"] if back is None else back
    record: dict[str, float | None] = {"cores_of_others": samples.cores_of_others(samples.cpu[0][0], ended)}
    if back is None:
        return record | {"killed_s": None, "killed_tokens": None}
    return record | {"killed_s": back - first.killed, "killed_tokens": sampled_until(samples, again, back)}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=benchmarks.peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="these parts; without it, all")
    parser.add_argument("--seeds", type=int, default=5, help="repeats, interleaved across the contestants")
    parser.add_argument("--quick", action="store_true", help="few steps and a low goal: shows that everything runs")
    parser.add_argument("--only", help="these contestants, separated by commas")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "agentrl-peers", help="environments")
    parser.add_argument("--results", type=Path, help="one line per run, in place of CACHE/results.jsonl")
    parser.add_argument("--others", type=float, default=0.3, help="CPU cores that other processes may use")
    parser.add_argument("--report", action="store_true", help="run nothing: report what has been measured")
    parser.add_argument("--output", type=Path, help="also write the last line here; docs/peers.json makes the tables")
    return parser.parse_args()


def main() -> None:
    """Run what the results lack, seed by seed, and report them all."""
    chosen = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the contestants, too
    cache: Path = chosen.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    results: Path = chosen.results or cache / ("results-quick.jsonl" if chosen.quick else "results.jsonl")
    names = chosen.only.split(",") if chosen.only else list(CONTENDERS)
    if unknown := sorted(set(names) - set(CONTENDERS)):
        raise SystemExit(f"--only names {', '.join(unknown)}; known: {', '.join(CONTENDERS)}")
    if not chosen.report:
        measure(chosen, cache, results, {name: CONTENDERS[name] for name in names})
    records = [record for record in read_log(results) if record["part"] in chosen.part and record["contender"] in names]
    trainings = QUICK if chosen.quick else TRAININGS
    reports = {}
    for part in chosen.part:
        goal = trainings[part].goal if part in trainings and math.isfinite(trainings[part].goal) else None
        if own := [record for record in records if record["part"] == part]:
            reports[part] = summary.report(part, quick=chosen.quick, goal=goal, records=own)
    if not reports:
        raise SystemExit(f"{results} has no run of {', '.join(chosen.part)}")
    line = combined(reports)
    if chosen.output:
        chosen.output.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(line), flush=True)


def measure(chosen: argparse.Namespace, cache: Path, results: Path, contenders: Mapping[str, Contender]) -> None:
    """Append to the results the runs that they lack. One beside which others computed is repeated."""
    built_wheel = wheel(cache)
    built = {name: build(contender, cache, built_wheel) for name, contender in contenders.items()}
    models = {part: training.model for part, training in TRAININGS.items()}
    if "word_problems" in chosen.part:
        models["word_problems"] = float32_model(models["word_problems"], cache)
    done = {(record["part"], record["contender"], record["seed"]) for record in read_log(results)}
    for seed in range(chosen.seeds):
        for part in chosen.part:
            for name, contender in contenders.items():
                if (part, name, seed) in done or seed >= contender.seeds.get(part, 0):
                    continue
                training = (QUICK if chosen.quick else TRAININGS).get(part)
                others = math.inf if part == "curves" else chosen.others  # curves show no times
                record = describe(name, contender, built[name], part, seed, training)
                directory = cache / "runs" / part / f"{name}-{seed}"
                while True:
                    wait_for_quiet(others)
                    started = time.monotonic()
                    record |= {**conditions(), "load_average": os.getloadavg()[0]}
                    if part == "orchestration":
                        record |= orchestration.measure(name, built[name], quick=chosen.quick)
                    else:
                        record |= train(
                            contender, built[name], directory, models[part], part=part, seed=seed, quick=chosen.quick
                        )
                    shown = {key: short(value) for key, value in record.items() if key in summary.MEASURED}
                    print(
                        f"{part}, seed {seed}, {name}: {time.monotonic() - started:.0f} s in all, {shown}", flush=True
                    )
                    if record["cores_of_others"] <= others:
                        break
                    print(f"repeated: others had {record['cores_of_others']:.2f} cores", flush=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


def wait_for_quiet(cores: float) -> None:
    """Wait until all processes of the machine used at most so many cores for five seconds."""
    used = math.inf
    while used > cores:
        before, started = machine_cpu_seconds(), time.monotonic()
        time.sleep(5.0)
        used = (machine_cpu_seconds() - before) / (time.monotonic() - started)


def describe(
    name: str, contender: Contender, built: Built, part: str, seed: int, training: Training | None
) -> dict[str, Any]:
    """What a record says before anything is measured."""
    return {
        "part": part,
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
    words = {"clip": "0.2", **contender.settings}
    if part != "word_problems":
        words["bad_call"] = "ends the episode, reward 0"
    threads = str(threads_of(contender, training))
    words["in_flight"] = str(training.step_size)
    if contender.server:
        threads += f", server {training.threads.get('server', 1)}"
        words["in_flight"] = str(2 * training.step_size)
    if contender.config:
        config = load(SCRIPTS / contender.config, overrides(contender, training))
        solver = config.policies["solver"]
        bound = "mean at most {}, none dropped" if solver.max_lag is None else "at most {}, older tokens masked"
        words["staleness"] = bound.format(solver.max_staleness) if solver.max_staleness else "0"
        words["in_flight"] = str(config.max_in_flight)
        if config.engine.slots < config.max_in_flight:
            words["in_flight"] += f", {config.engine.slots} sampled at once"
    return {**words, "threads": threads, "learning_rate": f"{training.learning_rates[contender.weights]:g}"}


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
