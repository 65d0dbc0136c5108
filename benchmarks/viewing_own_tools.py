"""A pretrained model learns a user's own tool although its chat template ignores tools. Needs `make smollm2`.

SmolLM2-135M-Instruct, whose template ignores `tools`, learns to look people up with `model.tools_in = "system"`.
`own_tools_smollm2_start`, `own_tools_smollm2_end`: held-out reward before and after training, means of three seeds.
`own_tools_smollm2_gain`: the smallest gain of the three.
`own_tools_hidden_end`: the reward at the end with `tools_in = "template"`, one seed: the negative control.

A run takes minutes, so a quick benchmark trains none.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import agentrl
from agentrl.config.load import load
from benchmarks.report import completed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "08_smollm2.toml"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SEEDS = (0, 1, 2)
FIRST = ("Ann", "Bob", "Eva", "Tom", "Mia", "Max", "Zoe", "Leo", "Ida", "Ben")
LAST = ("Lee", "Kim", "Fox", "Ray", "Day", "Hill", "Wood", "Bell", "Cole", "Reed")
NAMES = tuple(f"{first} {last}" for first in FIRST for last in LAST)
EXAMPLES = ("Ann Lee", "Tom Ray")
QUESTION = "What is the phone extension of {}?"
SETTINGS = (
    *("steps=10", "policies.solver.lora.rank=8", "policies.solver.learning_rate=5e-4", "policies.solver.step_size=64"),
    *("policies.solver.max_staleness=1", "credit.group_size=8", "sampling.max_tokens=48", "sampling.max_turns=3"),
    *("engine.slots=64", "engine.max_context=512", "evaluation.tasks=64", "model.dtype=float32"),
)


class PhoneBook(agentrl.ToolEnvironment):
    """Answer with a person's extension, which only the tool knows."""

    @agentrl.tool
    def extension(self, name: str) -> str:
        """Look up a person's phone extension."""
        return str(_extension(name)) if name in NAMES else "unknown name"

    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        """Two worked examples, then the question."""
        shown = [message for name in EXAMPLES for message in _example(name)]
        return [*shown, agentrl.user(QUESTION.format(task.data["name"]))]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """1 if the answer contains the extension, else 0."""
        return float(str(_extension(task.data["name"])) in episode.answer)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Every third person is held out."""
        names = [name for n, name in enumerate(NAMES) if (n % 3 == 0) == (split != "train")]
        return [agentrl.Task(id=name, data={"name": name}) for name in names if name not in EXAMPLES]


def _example(name: str) -> list[agentrl.Message]:
    call = agentrl.ToolCall(id="shown", name="extension", arguments={"name": name})
    answer = str(_extension(name))
    return [
        agentrl.user(QUESTION.format(name)),
        agentrl.Message(role="assistant", content="", tool_calls=(call,)),
        agentrl.Message(role="tool", content=answer, tool_call_id="shown", name="extension"),
        agentrl.Message(role="assistant", content=answer),
    ]


def _extension(name: str) -> int:
    return 1000 + 37 * NAMES.index(name) % 9000


def trained(directory: Path, *, seed: int, tools_in: str) -> tuple[float, float]:
    """Train with a seed; returns the held-out reward before and after."""
    overrides = [
        *(f"model.path={MODEL}", f"model.tools_in={tools_in}", f"directory={directory}", f"seed={seed}"),
        *(f"name={tools_in}-{seed}", "environment.id=benchmarks.viewing_own_tools:PhoneBook"),
    ]
    run = completed(agentrl.train(load(EXAMPLE, [*SETTINGS, *overrides]), quiet=True))
    print(f"seed {seed}, tools_in {tools_in}: {run.summary}", file=sys.stderr, flush=True)
    return run.summary["reward_start"], run.summary["reward_end"]


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    if quick:
        return {}
    if not MODEL.is_dir():
        print(f"skipped: {MODEL} is not there: make smollm2", flush=True)
        return {}
    with tempfile.TemporaryDirectory() as directory:
        rewards = [trained(Path(directory), seed=seed, tools_in="system") for seed in SEEDS]
        _, hidden_end = trained(Path(directory), seed=SEEDS[0], tools_in="template")
    starts, ends = zip(*rewards, strict=True)
    return {
        "own_tools_smollm2_start": statistics.fmean(starts),
        "own_tools_smollm2_end": statistics.fmean(ends),
        "own_tools_smollm2_gain": min(end - start for start, end in rewards),
        "own_tools_hidden_end": hidden_end,
    }
