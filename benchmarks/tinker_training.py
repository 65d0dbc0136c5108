"""What a client of the Tinker server gets: gradients, log-probabilities, its share, its own weights; and what it costs.

* `gradient_error`: largest relative difference, over the losses by token, between the gradient of a client's rows and
  that of the trainer of runs for the same rows. `custom_loss_error`: between a loss that the client computes, in two
  passes, and the same built-in one. `wire_logprob_error`: largest difference, in nats, between the log-probabilities of
  samples and those that the trainer computes for them, as the client receives both.
* `tenants_equal`: share of three clients' models that end with the weights, bit for bit, that each has alone.
  `disorder_detected`: whether a journal in which passes of two steps changed places is detected.
* `overhead`: CPU seconds of the server for steps of a client, over those of the trainer of runs for the same rows;
  median of pairs.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.core.tokens import TrajectoryRow
from agentrl.learn.trainer import PolicyTrainer
from benchmarks.parts import outcomes
from packages.tinker.tests.client import Client, Row, decoded_pass, row, server_config, serving
from packages.tinker.tests.test_server import trained_tenants
from packages.tinker.tests.test_tinker_trainer import (
    NAIVE,
    client_trainer,
    custom_gradients,
    gradients_of_both_trainers,
)
from tests.learn_cases import Episodes, run_config

STEPS = 6


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def custom_loss_error(directory: Path) -> float:
    """Compare gradients of losses in two passes with those of the built-in ones."""
    trainer = client_trainer(directory)
    trainer.load("custom", LoraConfig(rank=4), seed=1)
    return max(relative_error(*custom_gradients(trainer, loss)) for loss in NAIVE)


async def wire_logprob_error(directory: Path) -> float:
    """Compare samples' log-probabilities with the trainer's."""
    errors = []
    async with serving(server_config(directory)) as (address, _), Client(address) as client:
        model = await client.model()
        for step in range(3):
            sampler = await client.sampler(model, step)
            samples = await client.sample(sampler, [5, 6, 7], 16, stop=[], max_tokens=24)
            rows = [
                row([5, 6, 7, *tokens], logprobs=[0.0, 0.0, *logprobs], advantages=np.linspace(-1, 1, len(tokens) + 2))
                for tokens, logprobs in zip(samples.tokens, samples.logprobs, strict=True)
            ]
            promise = await client.forward_backward(model, rows, "importance_sampling")
            computed, _ = decoded_pass(await client.result(promise))
            errors += [
                float(np.abs(found[2:] - sampled).max())
                for found, sampled in zip(computed, samples.logprobs, strict=True)
            ]
            await client.step(model)
    return max(errors)


def tenants_equal(directory: Path) -> float:
    """Compare models that trained by turns with models that trained alone."""
    numbers = range(3)
    together = asyncio.run(trained_tenants(directory / "all", numbers))
    alone = {number: asyncio.run(trained_tenants(directory / str(number), [number]))[number] for number in numbers}
    return statistics.mean(together[number] == alone[number] for number in numbers)


def overhead(directory: Path, pairs: int) -> float:
    """Compare the CPU time of a client's steps with that of a run's."""
    generator = np.random.default_rng(0)
    rows = [
        TrajectoryRow(
            token_ids=generator.integers(5, 60, 60).astype(np.int32),
            loss_mask=np.arange(60) > 0,
            logprobs=np.full(60, -3.0, np.float32),
            turn_index=np.zeros(60, np.int32),
            spans=(),
        )
        for _ in range(24)
    ]
    client_rows = [
        row(one.token_ids.tolist(), logprobs=one.logprobs[1:], advantages=np.full(59, advantage, np.float32))
        for one, advantage in zip(rows, Episodes(rows).advantages, strict=True)
    ]
    ratios = [
        asyncio.run(_served(directory / f"served{pair}", client_rows)) / _of_run(directory / f"run{pair}", rows)
        for pair in range(pairs)
    ]
    return statistics.median(ratios)


async def _served(directory: Path, rows: list[Row]) -> float:
    async with serving(server_config(directory)) as (address, _), Client(address) as client:
        model = await client.model()
        await client.step(model)
        start = time.process_time()
        for _ in range(STEPS):
            await client.forward_backward(model, rows, "ppo")
            await client.step(model)
        return time.process_time() - start


def _of_run(directory: Path, rows: list[TrajectoryRow]) -> float:
    episodes = Episodes(rows)
    config = run_config(
        Path(server_config(directory).run.trained["calc"].model),
        policies={"policy": PolicyConfig(lora=LoraConfig(rank=4))},
        loss={"name": "ppo"},
        micro_batch_tokens=512,
    )
    trainer = PolicyTrainer(config.trainer_plan, directory, read=episodes.read, publishes=False)
    trainer.start()
    start = 0.0
    for step in range(STEPS + 1):
        if step == 1:  # the first one is not measured
            start = time.process_time()
        trainer.forward_backward(replace(episodes.batch(step + 1)))
        trainer.optim_step("policy", step + 1)
    return time.process_time() - start


def figures(quick: bool) -> dict[str, float | None]:
    """Measure everything but kills and recipes."""
    torch.set_num_threads(1)
    order = outcomes("-n", "0", "packages/tinker/tests/test_server.py", "-k", "out_of_order")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        return {
            "gradient_error": max(
                relative_error(*gradients_of_both_trainers(directory / loss, loss)) for loss in NAIVE
            ),
            "custom_loss_error": custom_loss_error(directory / "custom"),
            "wire_logprob_error": asyncio.run(wire_logprob_error(directory / "wire")),
            "tenants_equal": tenants_equal(directory / "tenants"),
            "disorder_detected": statistics.mean(order.values()),
            "overhead": overhead(directory, 1 if quick else 7),
        }
