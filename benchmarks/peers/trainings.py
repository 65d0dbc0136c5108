"""The parts that train: model, task, goal, and the settings that differ between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.naive_loop import CALCULATOR, Game
from benchmarks.peers.contestants.naive_words import WORDS
from benchmarks.peers.environments import ROOT


@dataclass(frozen=True, kw_only=True)
class Training:
    """The same for all contestants."""

    game: Game
    model: Path
    goal: float
    """Held-out reward."""
    held_out: int
    """Tasks of one score."""
    snapshot_every: int = 3
    """Steps between two snapshots that are scored."""
    steps: int
    adapter_steps: int = 0
    """Steps of an adapter, where it needs more; 0 for the same."""
    step_size: int
    """Episodes of a step, in groups of 8."""
    learning_rates: dict[str, float]
    """For whole weights, and for an adapter."""
    max_episode_tokens: int
    """Of all turns and observations."""
    max_context: int
    kv_bytes: int
    """Of TRL's vLLM server: the contexts of all conversations in flight."""
    threads: Mapping[str, int] = field(default_factory=lambda: {"trl_sync": 2})
    """Threads of torch, by script, of contestants that are faster with more than one; `server`: TRL's vLLM."""
    schedules: Mapping[str, tuple[int, float, float]] = field(
        default_factory=lambda: {"default": (1, 2.0, 1.5), "lockstep": (0, 1.0, 1.0), "as_trl": (4, 2.0, 2.0)}
    )
    """Of agentrl: `max_staleness`, conversations in flight, and how many of them the engine samples at once, both as
    multiples of the step. `as_trl`: what TRL's asynchronous trainer has."""
    limit_s: float = 900.0
    """Seconds of training after which a run has not reached the goal."""


ARITHMETIC = Training(
    game=CALCULATOR,
    model=ROOT / "environments" / "calculator" / "model",
    goal=0.9,
    held_out=512,
    snapshot_every=1,
    steps=27,
    step_size=64,
    learning_rates={"full": 3e-4, "adapter": 1e-3},
    max_episode_tokens=174,  # with the prompt, 192
    max_context=192,
    kv_bytes=128 << 20,
)
WORD_PROBLEMS = Training(
    game=WORDS,
    model=ROOT / "models" / "SmolLM2-135M-Instruct",
    goal=0.6,
    held_out=128,
    steps=12,
    adapter_steps=24,
    step_size=32,
    learning_rates={"full": 3e-5, "adapter": 5e-4},
    max_episode_tokens=WORDS.max_tokens,
    max_context=128,
    kv_bytes=384 << 20,
    threads={"trl_sync": 2, "naive": 2, "server": 2},
    limit_s=1800.0,
)
TOOLS = replace(
    ARITHMETIC,
    snapshot_every=3,
    limit_s=600.0,
    schedules={**ARITHMETIC.schedules, "default": (4, 2.0, 2.0)},  # as agentrl's documentation says for slow tools
)
KILLED = replace(ARITHMETIC, snapshot_every=3, steps=16)
"""Killed after step 10, and run again until that step is done."""
CURVES = replace(ARITHMETIC, snapshot_every=3, goal=math.inf)
"""Every snapshot is scored."""
TRAININGS = {
    "calculator": ARITHMETIC,
    "word_problems": WORD_PROBLEMS,
    "kills": KILLED,
    "tools": TOOLS,
    "curves": CURVES,
}
QUICK = {
    "calculator": replace(ARITHMETIC, goal=0.6, held_out=128, steps=6, limit_s=240.0),
    "tools": replace(TOOLS, goal=0.6, held_out=128, steps=6, limit_s=240.0),
    "kills": replace(KILLED, steps=10, limit_s=240.0),
    "curves": replace(CURVES, held_out=128, steps=6, limit_s=240.0),
    "word_problems": replace(WORD_PROBLEMS, goal=0.2, held_out=32, steps=3, adapter_steps=3, limit_s=600.0),
}
