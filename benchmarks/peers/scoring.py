"""Held-out rewards of a contestant's snapshots, all by the same sampler, after the contestant has ended."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.rollout.chat.chat_format import TemplateChatFormat
from benchmarks.naive_loop import evaluate
from benchmarks.peers.trainings import Training


def snapshots(directory: Path, every: int) -> dict[int, Path]:
    """Directories of the weights after each step whose number `every` divides."""
    found = {}
    for path in directory.glob("output/checkpoint-*"):
        found[int(path.name.removeprefix("checkpoint-"))] = path
    for path in directory.glob("runs/run/versions/*/*.*"):
        if match := re.fullmatch(r"\d+\.(\d+)", path.name):
            found[int(match[1])] = path
    return {step: found[step] for step in sorted(found) if step and step % every == 0}


def load(model: Path, snapshot: Path) -> PreTrainedModel:
    """The weights of a snapshot; an adapter is merged into the model."""
    if (snapshot / "adapter_config.json").exists():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        merged: PreTrainedModel = PeftModel.from_pretrained(base, snapshot).merge_and_unload()
        return merged
    whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
    return whole


def first_at(model: Path, directory: Path, training: Training) -> tuple[int | None, dict[int, float]]:
    """The first step whose snapshot reaches the goal, and the held-out rewards up to it."""
    chat, curve = TemplateChatFormat.load(model), {}
    torch.set_num_threads(2)
    for step, path in snapshots(directory, training.snapshot_every).items():
        curve[step] = evaluate(load(model, path), chat, count=training.held_out, game=training.game)
        if curve[step] >= training.goal:
            return step, curve
    return None, curve
