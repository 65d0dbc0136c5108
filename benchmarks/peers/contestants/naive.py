"""The naive loop of `benchmarks/naive_loop.py`, with the settings of the others."""

import dataclasses
import json
import math
import time  # measured
from pathlib import Path

from progress import MEDIAN_S, P90_S, SETTINGS, write  # measured

from agentrl.core.records import Task
from benchmarks import naive_loop
from benchmarks.peers.contestants.naive_words import WORDS

output = Path(SETTINGS["output"])
sigma = math.log(P90_S / MEDIAN_S) / 1.2815515655446004  # measured
wait = (lambda random: random.lognormvariate(math.log(MEDIAN_S), sigma)) if SETTINGS["waits"] else None  # measured


def on_step(number, step, model):
    if number == 0:  # measured
        write(begin=True, t=time.time() - step.wall)  # measured
    write(step=number + 1, sampled=step.tokens, trained=step.tokens)  # measured
    if (number + 1) % SETTINGS["snapshot_every"] == 0:
        model.save_pretrained(output / f"checkpoint-{number + 1}")


def answer(chat, episode, max_turns):
    if any(isinstance(call.arguments, str) for call in chat.parse(episode.said).tool_calls):  # not JSON
        naive_loop.end_turn(chat, episode)
        return []
    return naive_loop.answer(chat, episode, max_turns)


tasks = [Task(id=line, data=json.loads(line)) for line in Path(SETTINGS["tasks"]).read_text().splitlines()]
game = dataclasses.replace(naive_loop.CALCULATOR, answer=answer) if SETTINGS["has_tools"] else WORDS
naive_loop.run(
    SETTINGS["model"],
    seed=SETTINGS["seed"],
    steps=SETTINGS["steps"],
    groups=SETTINGS["step_size"] // 8,
    learning_rate=SETTINGS["learning_rate"],
    advantage="group_std",
    tokens_per_unit=None,
    latency=wait,  # measured
    on_step=on_step,
    game=dataclasses.replace(game, tasks=lambda split, seed: tasks),
)
