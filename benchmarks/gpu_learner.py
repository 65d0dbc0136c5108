"""The learner on one GPU, beside its own CPU path and beside plain transformers: `make gpu-learner`.

    python -m benchmarks.gpu_learner [--device cuda|cpu] [--small] [--only PIECE …] [--smollm2 PATH] [--output FILE]

For a machine with CUDA, torch ≥ 2.10 and transformers ≥ 5.10 and little else: beside these it imports msgspec, peft,
pydantic and rich, and neither Ray nor vLLM. Each piece is measured by itself: one that fails is recorded with its
error, and the file is written anew after each. On CPUs the whole command runs with `--device cpu --small`, which proves
the code and measures nothing.

`attention`: log-probabilities of a prefix tree in float32 against those of the CPU path; tokens per second in bfloat16,
forward and backward, against scaled_dot_product_attention over the same rows alone. `step`: an adapter, and all
weights, through `PolicyTrainer`, on a model of true shape and random weights: tokens per second, TFLOP/s, peak bytes of
the allocator, each with and without recomputation; beside a loop over transformers as it is. `doctor`: see
`real_models_doctor`. `families`: see `real_models_families`; the expected log-probabilities are of the CPU. `smollm2`,
`training`: whole runs with the embedded engine, of examples/08_smollm2.toml and of a few steps with the model of
`step`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import agentrl
from agentrl.config.load import load
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig, TrainerConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.records import TrainingSample, TrajectoryRow
from agentrl.learn.forward import TreeAttentionMask, flex_tree_attention, tree_attention
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from agentrl.learn.trainer import PolicyTrainer

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
TOKENIZER = ROOT / "environments" / "calculator" / "model"
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the pieces."""

    shape: dict[str, int]
    """Configuration of a Qwen3 with random weights."""
    rows: int
    length: int
    prefix: int
    """Tokens that all rows begin with, in the rows that share."""
    trained: int
    """Tokens at the end of each row."""
    repeats: int
    dtype: str
    steps: int
    """Optimizer steps of the runs."""


LARGE = Sizes(
    shape={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    rows=8,
    length=4096,
    prefix=3072,
    trained=512,
    repeats=5,
    dtype="bfloat16",
    steps=16,
)
"""Qwen3-1.7B."""
SMALL = Sizes(
    shape={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    },
    rows=3,
    length=96,
    prefix=64,
    trained=16,
    repeats=1,
    dtype="float32",
    steps=1,
)


class Machine:
    """Where the pieces are measured, and with which sizes."""

    def __init__(self, device: torch.device, sizes: Sizes, temporary: Path, smollm2: Path) -> None:
        self.device = device
        self.sizes = sizes
        self.temporary = temporary
        self.smollm2 = smollm2

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, so that there is an allocator that counts."""
        return self.device.type == "cuda"

    def seconds(self, act: Callable[[], object]) -> float:
        """The median time of an act, after one that compiles what it needs."""
        times = []
        for _ in range(self.sizes.repeats + 1):
            self._wait()
            start = time.perf_counter()
            act()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def peak_bytes(self, act: Callable[[], object]) -> int | None:
        """The most that was allocated during an act, what was there before included; null on CPUs."""
        if not self.is_gpu:
            act()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        act()
        return int(torch.cuda.max_memory_allocated(self.device))

    def free(self) -> None:
        """Give back what the last piece held, and what was compiled for it."""
        torch.compiler.reset()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def random_rows(sizes: Sizes, *, prefix: int) -> list[TrainingSample]:
    """Rows of random tokens, the first `prefix` of which they share; the last are trained."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, sizes.shape["vocab_size"], (sizes.rows, sizes.length)).astype(np.int32)
    tokens[:, :prefix] = tokens[0, :prefix]
    mask, blank = np.arange(sizes.length) >= sizes.length - sizes.trained, np.zeros(sizes.length, np.float32)
    return [TrainingSample(token_ids=row, loss_mask=mask, behavior_logprobs=blank, advantages=blank) for row in tokens]


def write_random_model(machine: Machine, path: Path) -> Path:
    """Save a Qwen3 with random weights and the tokenizer of the bundled model."""
    if not path.is_dir():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**machine.sizes.shape, tie_word_embeddings=True)
        dtype = getattr(torch, machine.sizes.dtype)
        with machine.device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(TOKENIZER / name, path / name)
    return path


def configured(machine: Machine, model: Path, *, lora: bool, recompute: bool) -> RunConfig:
    """The configuration of a trainer of a model."""
    sizes = machine.sizes
    return RunConfig(
        environment=EnvironmentConfig(id="none"),
        model=ModelConfig(path=str(model), dtype=sizes.dtype),
        engine=EngineConfig(max_context=sizes.length),
        policies={"policy": PolicyConfig(lora=LoraConfig(rank=16) if lora else None)},
        trainer=TrainerConfig(recompute=recompute, micro_batch_tokens=sizes.rows * sizes.length),
    )


# --- pieces -----------------------------------------------------------------------------------------------------------


def attention(machine: Machine) -> Figures:
    """Fused attention against the CPU path, and against torch's own over rows alone."""
    sizes = machine.sizes
    found: Figures = {"error": {}, "tokens_per_second": {}}
    heads, key_heads = sizes.shape["num_attention_heads"], sizes.shape["num_key_value_heads"]
    width = sizes.shape["head_dim"]
    (batch,) = pack(random_rows(sizes, prefix=sizes.prefix), max_tokens=1 << 30)
    count = len(batch.token_ids)
    torch.manual_seed(0)
    tensors = [torch.randn(1, each, count, width) for each in (heads, key_heads, key_heads)]
    there = [each.to(machine.device).requires_grad_(machine.is_gpu) for each in tensors]
    here = [each.clone().requires_grad_(True) for each in tensors]
    for name, window in (("all", None), ("window", sizes.length // 4)):
        expected, _ = tree_attention(
            torch.nn.Module(), *here, None, tree=TreeAttentionMask(batch, torch.device("cpu")), sliding_window=window
        )
        seen = flex_tree_attention(*there, TreeAttentionMask(batch, machine.device), window, None).transpose(1, 2)
        found["error"][name] = _error(seen, expected)
        if machine.is_gpu:  # flex_attention has no backward pass on CPUs
            weight = torch.randn_like(expected)
            (expected * weight).sum().backward()
            (seen * weight.to(machine.device)).sum().backward()
            pairs = zip(there, here, strict=True)
            found["error"][f"{name}, gradient"] = max(_error(mine.grad, other.grad) for mine, other in pairs)
            for each in (*there, *here):
                each.grad = None
    dtype = getattr(torch, sizes.dtype)
    rounded = [each.detach().to(dtype).requires_grad_(machine.is_gpu) for each in there]
    alone = [
        torch.randn(sizes.rows, each, sizes.length, width, device=machine.device, dtype=dtype, requires_grad=True)
        for each in (heads, key_heads, key_heads)
    ]
    tree = TreeAttentionMask(batch, machine.device)

    def fused() -> None:
        output = flex_tree_attention(*rounded, tree, None, None)
        if machine.is_gpu:
            output.sum().backward()

    def plain() -> None:
        output = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)
        if machine.is_gpu:
            output.sum().backward()

    tokens = sizes.rows * sizes.length
    found["tokens_per_second"] = {
        "tree, tokens forwarded": count / machine.seconds(fused),
        "rows alone": tokens / machine.seconds(plain),
    }
    found["tokens"] = {"rows": tokens, "tree": count}
    return found


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    expected = expected.detach().double()
    return float((found.detach().cpu().double() - expected).norm() / expected.norm())


def step(machine: Machine) -> Figures:
    """A training step of a model of true shape, and that of a loop over transformers."""
    path = write_random_model(machine, machine.temporary / "shape")
    sizes, found = machine.sizes, Figures()
    for lora in (True, False):
        for recompute in (False, True):
            name = ("adapter" if lora else "all weights") + (", recomputed" if recompute else "")
            found[name] = _tried(partial(_our_step, machine, path, lora=lora, recompute=recompute))
            machine.free()
    found["plain transformers, all weights, recomputed"] = _tried(partial(_plain_step, machine, path))
    machine.free()
    found["tokens"] = {"rows": sizes.rows * sizes.length, "parameters": _parameters(path)}
    return found


def _our_step(machine: Machine, path: Path, *, lora: bool, recompute: bool) -> Figures:
    """Steps of `PolicyTrainer`, as a run takes them, without publishing."""
    from tests.learn_cases import Episodes

    config, found = configured(machine, path, lora=lora, recompute=recompute), Figures()
    batches = {
        name: Episodes([_trajectory_row(row) for row in random_rows(machine.sizes, prefix=prefix)])
        for name, prefix in (("rows that differ", 0), ("rows that share", machine.sizes.prefix))
    }
    current = Episodes([])
    trainer = PolicyTrainer(
        config, machine.temporary / "steps", read=lambda units: current.read(units), publishes=False
    )
    found["start"], step_ids = trainer.start(), itertools.count(1)

    def act() -> None:
        step_id = next(step_ids)
        trainer.forward_backward(current.batch(step_id))
        found["shares_prefixes"] = bool(trainer.optim_step("policy", step_id).metrics["shares_prefixes"])

    for name, current in batches.items():  # noqa: B007 - `act` and the trainer read it
        found[name] = _rate(machine, act, path)
    return found


def _trajectory_row(sample: TrainingSample) -> TrajectoryRow:
    return TrajectoryRow(
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        behavior_logprobs=sample.behavior_logprobs,
        turn_index=np.where(sample.loss_mask, 0, -1).astype(np.int32),
        spans=(),
    )


def _plain_step(machine: Machine, path: Path) -> Figures:
    """A step of a plain training loop: whole rows, transformers, AdamW in the model's dtype."""
    load_model: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load_model(path, dtype=getattr(torch, machine.sizes.dtype), attn_implementation="sdpa").to(machine.device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.from_numpy(np.stack([row.token_ids for row in random_rows(machine.sizes, prefix=0)])).long()
    ids, kept = ids.to(machine.device), machine.sizes.trained

    def act() -> None:
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept).logits
        logprobs = logits.float().log_softmax(-1).gather(2, ids[:, -kept:, None])
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"rows that differ": _rate(machine, act, path)}


def _rate(machine: Machine, act: Callable[[], None], path: Path) -> Figures:
    tokens = machine.sizes.rows * machine.sizes.length
    seconds = machine.seconds(act)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": 6 * _parameters(path) * tokens / seconds / 1e12,  # of rows whole; attention apart
        "peak_bytes": machine.peak_bytes(act),
    }


def _parameters(path: Path) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    return int(model.num_parameters())


def doctor(machine: Machine) -> Figures:
    """The predicted and the held bytes of trainer processes, by configuration."""
    from benchmarks import real_models_doctor as part

    torch.manual_seed(0)
    shape = part.SHAPE if machine.is_gpu else part.SMALL
    path = machine.temporary / "doctor"
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).save_pretrained(path)
    names = list(part.CONFIGURATIONS)[: None if machine.is_gpu else 1]
    return {name: _tried(partial(part.error_of, path, name)) for name in names}


def families(machine: Machine) -> Figures:
    """The largest difference of a log-probability from that of transformers on the CPU, in nats, by architecture."""
    from benchmarks.real_models_families import QUICK
    from tests import model_families as cases

    found = Figures()
    for name in cases.FAMILIES if machine.is_gpu else QUICK[:2]:
        path = machine.temporary / "families" / name.replace(" ", "_").replace(",", "")
        try:
            cases.write_family(name, path)
            rows = cases.family_rows()
            expected = np.concatenate(cases.plain_logprobs(path, rows))
            policy = load_models(cases.long_run(path, policies={"policy": PolicyConfig()}), machine.device)["policy"]
            seen = {way: np.concatenate(cases.trained_logprobs(policy, rows, way=way)) for way in cases.ways(policy)}
            found[name] = {way: float(np.abs(each - expected).max()) for way, each in seen.items()}
        except AgentRLError as error:
            found[name] = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - the others are to be measured
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        machine.free()
    return found


def smollm2(machine: Machine) -> Figures:
    """A pretrained model learns a tool; with `--small`, a step of the bundled model in its place."""
    if machine.sizes is SMALL:
        return _run(machine, TOKENIZER, steps=1, overrides=("--policies.solver.step_size=8", "--evaluation.tasks=4"))
    if not machine.smollm2.is_dir():
        return {"skipped": f"{machine.smollm2} is not there: make smollm2, or --smollm2 DIRECTORY"}
    return _run(machine, machine.smollm2, steps=machine.sizes.steps, overrides=())


def training(machine: Machine) -> Figures:
    """A few steps of the model of `step`, sampled by the embedded engine: how fast both are, not what it learns."""
    path = write_random_model(machine, machine.temporary / "shape")
    # Random weights earn nothing; a bonus on entropy lets every row be trained all the same.
    overrides = ["--evaluation.tasks=0", "--trainer.recompute=true", "--trainer.entropy_bonus=1e-6"]
    overrides.append(f"--model.dtype={machine.sizes.dtype}")
    if machine.sizes is SMALL:
        overrides.append("--policies.solver.step_size=8")
    return _run(machine, path, steps=min(4, machine.sizes.steps), overrides=overrides)


def _run(machine: Machine, model: Path, *, steps: int, overrides: Sequence[str]) -> Figures:
    directory = machine.temporary / "runs"
    base = [f"--model.path={model}", f"--directory={directory}", f"--name=run-{model.name}", f"--steps={steps}"]
    started = time.perf_counter()
    run = agentrl.train(load(ROOT / "examples" / "08_smollm2.toml", [*base, *overrides]), quiet=True)
    names = ("reward_start", "reward_end", "rewards", "rl_seconds")
    last = {name: value for name, value in run.metrics[-1].items() if name in METRICS} if run.metrics else {}
    return {
        "seconds": time.perf_counter() - started,
        **{name: run.summary.get(name) for name in names},
        "last_step": last,
    }


METRICS = ("mismatch/k3", "mismatch/max_difference", "k3", "entropy", "sharing", "grad_norm")
"""Metrics of a step that are shown, those of them that it has."""
PIECES: dict[str, Callable[[Machine], Figures]] = {
    each.__name__: each for each in (attention, step, doctor, families, smollm2, training)
}


# --- the command ------------------------------------------------------------------------------------------------------


def _tried(act: Callable[[], Any]) -> Any:
    """The result of an act, or the error that it fails with: out of memory, most likely."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - the other measurements are still worth having
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def about(machine: Machine) -> Figures:
    """The card, and the versions."""
    card = torch.cuda.get_device_properties(machine.device) if machine.is_gpu else None
    return {
        "device": card.name if card else "CPU",
        "bytes": card.total_memory if card else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "small": machine.sizes is SMALL,
    }


def main(arguments: Sequence[str] | None = None) -> Figures:
    """Measure the pieces that the command line asks for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for CPUs: proves that the command runs")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu_learner.json")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU; --device cpu --small runs the command on CPUs")
    if options.device == "cpu" and torch.cuda.is_available():
        raise SystemExit("runs would take the GPU; set CUDA_VISIBLE_DEVICES= to measure the CPU of this machine")
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        sizes = SMALL if options.small else LARGE
        machine = Machine(torch.device(options.device), sizes, Path(temporary), options.smollm2)
        found = {"benchmark": "gpu_learner", **about(machine)}
        for name in options.only:
            print(f"{time.strftime('%H:%M:%S')} {name} …", flush=True)
            started = time.perf_counter()
            measured = _tried(partial(PIECES[name], machine))
            machine.free()
            found[name] = {**measured, "took_s": round(time.perf_counter() - started, 1)}
            print(f"{name}: {json.dumps(found[name])}", flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
