"""The baseline: the shortest honest synchronous loop on the calculator, one process, plain transformers.

Same task, model, chat format, tool and reward as the main job; full weights, RLOO, AdamW, one update per step. It
shares the KV of a group's prompt, keeps KV between turns, stops computing for episodes that have ended, runs the tool
calls of a turn at once, and skips rows without advantage. What it lacks is everything else: no journal, no versions,
no overlap of sampling with learning, no second episode while one waits.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from agentrl.core.records import FinishReason, Message, Task
from agentrl.environment.environment import TaskSource
from agentrl.environment.tools import observation_of
from agentrl.environments.calculator import Calculator
from agentrl.rollout.chat.chat_format import TemplateChatFormat

Latency = Callable[[random.Random], float]
"""Draws the seconds one tool call waits."""
Advantage = Literal["leave_one_out", "group_std"]


@dataclass
class Episode:
    task: Task
    tokens: list[int]
    sampled: list[bool]
    said: list[int] = field(default_factory=list)
    """Tokens of the current turn."""
    turns: int = 0
    reward: float = 0.0


@dataclass(frozen=True)
class Step:
    wall: float
    """Seconds since the start of the run, at the end of the step."""
    cpu_seconds: float
    """Of this step."""
    mean_reward: float
    tokens: int
    """Sampled in this step."""


@dataclass(frozen=True)
class Game:
    """What the episodes are about."""

    tasks: Callable[[str, int], TaskSource]
    """Tasks of a split and a seed."""
    prompt: Callable[[TemplateChatFormat, Task], list[int]]
    max_tokens: int
    """Of a turn."""
    answer: Callable[[TemplateChatFormat, Episode, int], list[int]]
    """Append a turn; the tokens of its observation, or none where the episode has ended (and is rewarded)."""


class Rollout:
    """A batch of episodes in lock step over one KV cache; `feed` appends tokens, padding on the left."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]], copies: int) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.mask = torch.zeros(len(prompts), 0, dtype=torch.long)
        self.logits = self.feed(prompts).repeat_interleave(copies, 0)
        self.cache.batch_repeat_interleave(copies)
        self.mask = self.mask.repeat_interleave(copies, 0)

    def feed(self, rows: Sequence[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        new = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self.mask = torch.cat([self.mask, new], 1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -width:]
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self.cache.batch_select_indices(index)
        self.mask, self.logits = self.mask[index], self.logits[index]


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    chat: TemplateChatFormat,
    tasks: Sequence[Task],
    copies: int = 1,
    *,
    max_turns: int = 6,
    latency: Latency | None = None,
    draws: random.Random | None = None,
    game: Game,
) -> list[Episode]:
    """`copies` episodes of each task at temperature 1, those of a task next to each other."""
    prompts = [game.prompt(chat, task) for task in tasks]
    rollout = Rollout(model, prompts, copies)
    episodes = [Episode(t, [*p], [False] * len(p)) for t, p in zip(tasks, prompts, strict=True) for _ in range(copies)]
    active = episodes
    stop = set(chat.stop_token_ids)
    while active:
        speaking = [True] * len(active)
        for episode in active:
            episode.said = []
        for _ in range(game.max_tokens):
            drawn = torch.multinomial(rollout.logits.softmax(-1), 1)[:, 0].tolist()
            for n, token in enumerate(drawn):
                if speaking[n]:
                    active[n].said.append(token)
            rollout.logits = rollout.feed([[token] if speaking[n] else [] for n, token in enumerate(drawn)])
            speaking = [speaks and token not in stop for speaks, token in zip(speaking, drawn, strict=True)]
            if not any(speaking):
                break
        observations = [game.answer(chat, episode, max_turns) for episode in active]
        if latency is not None and draws is not None:
            time.sleep(max((latency(draws) for observed in observations if observed), default=0.0))
        going = [n for n, observed in enumerate(observations) if observed]
        if going:
            rollout.keep(going)
            rollout.logits = rollout.feed([observations[n] for n in going])
        active = [active[n] for n in going]
    return episodes


def question(chat: TemplateChatFormat, task: Task) -> list[int]:
    specs = [bound.spec for bound in Calculator.tool_table().values()]
    return chat.start([Message(role="user", content=task.data["question"])], specs)


def end_turn(chat: TemplateChatFormat, episode: Episode) -> Message:
    """Append the turn."""
    message = chat.parse(episode.said, context=episode.tokens)
    episode.tokens += episode.said
    episode.sampled += [True] * len(episode.said)
    episode.turns += 1
    return message


def answer(chat: TemplateChatFormat, episode: Episode, max_turns: int) -> list[int]:
    message = end_turn(chat, episode)
    if not message.tool_calls:
        episode.reward = float(message.content.strip() == episode.task.data["answer"])
        return []
    if episode.turns == max_turns:
        return []
    environment, table = Calculator(), Calculator.tool_table()
    replies = []
    for call in message.tool_calls:
        try:
            arguments = table[call.name].validate(call.arguments)
            text = observation_of(getattr(environment, call.name)(**arguments), call.name)
        except (KeyError, ValueError) as error:
            text = f"error: {error}"
        replies.append(Message(role="tool", content=text, tool_call_id=call.id, name=call.name))
    after: FinishReason = "stop" if episode.said[-1] in chat.stop_token_ids else "length"
    observed = chat.extend(replies, after=after)
    episode.tokens += observed
    episode.sampled += [False] * len(observed)
    return observed


CALCULATOR = Game(lambda split, seed: Calculator.tasks(split, seed=seed), question, 32, answer)


def learn(
    model: PreTrainedModel,
    episodes: Sequence[Episode],
    copies: int,
    tokens_per_unit: int | None,
    advantage: Advantage = "leave_one_out",
) -> None:
    """Accumulate the policy gradient of RLOO (arXiv:2402.14740) or GRPO (arXiv:2402.03300).

    Divided by a constant, or without one by the tokens of the step.
    """
    rows = []
    for start in range(0, len(episodes), copies):
        group = episodes[start : start + copies]
        rewards = [episode.reward for episode in group]
        mean, factor = sum(rewards) / copies, copies / (copies - 1)
        if advantage == "group_std":
            factor = 1 / (stdev(rewards) + 1e-6)
        rows += [(e, (e.reward - mean) * factor) for e in group if e.reward != mean]
    if not rows:
        return
    width = max(len(episode.tokens) for episode, _ in rows)
    ids = torch.tensor([e.tokens + [0] * (width - len(e.tokens)) for e, _ in rows])
    sampled = torch.tensor([e.sampled + [False] * (width - len(e.sampled)) for e, _ in rows])[:, 1:]
    logits = model(input_ids=ids[:, :-1]).logits[sampled]
    logprobs = logits.log_softmax(-1).gather(1, ids[:, 1:][sampled][:, None])[:, 0]
    advantages = torch.tensor([advantage for _, advantage in rows])[:, None].expand_as(sampled)[sampled]
    total = len(episodes) * tokens_per_unit if tokens_per_unit else sum(sum(e.sampled) for e in episodes)
    (-(advantages * logprobs).sum() / total).backward()


def evaluate(
    model_dir: str | Path | PreTrainedModel,
    chat: TemplateChatFormat,
    *,
    seed: int = 0,
    count: int = 512,
    game: Game = CALCULATOR,
) -> float:
    """Mean reward on held-out tasks, sampled as in training."""
    is_loaded = isinstance(model_dir, PreTrainedModel)
    model = model_dir if is_loaded else AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(seed)
    tasks = game.tasks("held_out", 0)
    batches = [[tasks[n] for n in range(start, min(start + 64, count))] for start in range(0, count, 64)]
    # Each token copies the whole KV cache, which for 512 episodes at once takes 3.5 times as long.
    return sum(episode.reward for batch in batches for episode in sample(model, chat, batch, game=game)) / count


def run(
    model_dir: str | Path,
    *,
    seed: int = 0,
    steps: int = 40,
    group_size: int = 8,
    groups: int = 8,
    learning_rate: float = 3e-4,
    tokens_per_unit: int | None = 64,
    advantage: Advantage = "leave_one_out",
    latency: Latency | None = None,
    on_step: Callable[[int, Step, PreTrainedModel], None] | None = None,
    game: Game = CALCULATOR,
) -> list[Step]:
    """Train a copy of the model for `steps` optimizer steps; returns each step's cost and reward."""
    torch.manual_seed(seed)
    draws = random.Random(seed)
    model, chat = AutoModelForCausalLM.from_pretrained(model_dir), TemplateChatFormat.load(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    tasks = game.tasks("train", seed)
    history: list[Step] = []
    start = time.monotonic()
    for number in range(steps):
        cpu = time.process_time()
        drawn = [tasks[number * groups + n] for n in range(groups)]
        episodes = sample(model, chat, drawn, group_size, latency=latency, draws=draws, game=game)
        learn(model, episodes, group_size, tokens_per_unit, advantage)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reward = sum(episode.reward for episode in episodes) / len(episodes)
        tokens = sum(sum(episode.sampled) for episode in episodes)
        history.append(Step(time.monotonic() - start, time.process_time() - cpu, reward, tokens))
        if on_step is not None:
            on_step(number, history[-1], model)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="environments/calculator/model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # this model gains nothing from more
    chat = TemplateChatFormat.load(arguments.model)

    def show(number: int, step: Step, model: PreTrainedModel) -> None:
        held_out = f"  held out {evaluate(model, chat):.3f}" if number % 10 == 9 else ""
        print(f"{number + 1:3d}  {step.wall:6.1f} s  {step.cpu_seconds:5.2f} CPU-s  {step.mean_reward:.3f}{held_out}")

    print(f"held out at the start: {evaluate(arguments.model, chat):.3f}")
    run(
        arguments.model,
        seed=arguments.seed,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        on_step=show,
    )


if __name__ == "__main__":
    main()
