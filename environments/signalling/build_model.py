"""Builds the tiny model in this directory, which answers a state with any word and a word with any state.

`python -m agentrl.environments.signalling.build_model [--seed 0] [--steps 1600] [--output DIR]` takes half a minute on
one core. The result is an ordinary Hugging Face directory (Qwen3 architecture, with a token per byte).
"""

from __future__ import annotations

from pathlib import Path

from agentrl.environments.kuhn_poker.build_model import build_undecided
from agentrl.environments.signalling.env import STATES, WORDS
from agentrl.environments.tiny_model import model as tiny_model


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    answers = {**dict.fromkeys(STATES, WORDS), **dict.fromkeys(WORDS, STATES)}
    build_undecided(directory, answers, seed=seed, steps=steps)


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=1600, description=__doc__ or ""
    )
