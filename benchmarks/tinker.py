"""What a client of the Tinker server gets, and what kills of the server cost it.

    python -m benchmarks.tinker [--quick]

* `gradient_error`: largest relative difference between the gradient of a server's pass and that of each row alone, over
  the five losses. `wire_logprob_error`: largest difference, in nats, between the log-probabilities of samples and those
  that the trainer computes for them, as the client receives both.
* `kills`: times that the server was killed with SIGKILL after a request of a client. `futures_lost`: requests of that
  client that got no result. `weights_differ`: scripts that ended with other weights than an undisturbed one, which a
  step that is lost or taken twice would cause.
* `overhead`: CPU seconds of the server for steps of a client, over those of the same passes and steps in a process
  without server and journal; medians of pairs.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from agentrl.config.policies import LoraConfig
from agentrl.config.sections import EngineConfig, TrainerConfig
from agentrl.config.server import ServedModelConfig, ServerConfig
from agentrl.gateway.tinker_messages import ForwardBackwardRequest, read_forward_backward
from agentrl.learn.client_training import CLIENT_LOSSES, AdamSettings, AdapterTrainer, ClientRow
from benchmarks.parts import run
from tests.e2e.test_tinker_processes import killed
from tests.learn_cases import write_model
from tests.support.tinker_client import Client, decoded_pass, encode_forward_backward, row, server_config, serving
from tests.unit.test_client_training import NAIVE, SETTINGS, client_rows, gradient, row_by_row

NAMES = ("gradient_error", "wire_logprob_error", "kills", "futures_lost", "weights_differ", "overhead")
STEPS = 6


def gradient_error(directory: Path) -> float:
    """Compare the gradients of the losses with those of each row alone."""
    config = ServerConfig(
        models={"tiny": ServedModelConfig(path=str(write_model(directory / "model")))},
        engine=EngineConfig(max_context=32, vllm=False),
        trainer=TrainerConfig(micro_batch_tokens=24),
    )
    trainer = AdapterTrainer(config.run.trainer_plan, directory / "model", directory, torch.device("cpu"))
    errors = []
    for loss in NAIVE:
        trainer.add(loss, LoraConfig(rank=4), seed=5)
        trainer.forward(loss, client_rows(), loss, SETTINGS.get(loss, {}), backward=True)
        found = gradient(trainer, loss)
        expected = row_by_row(trainer, loss, client_rows())
        errors.append(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
    assert NAIVE.keys() == CLIENT_LOSSES.keys()
    return max(errors)


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


def kills(directory: Path, count: int) -> dict[str, float]:
    """Kill servers after requests of scripts that must end as an undisturbed one does."""
    expected = killed(directory / "undisturbed", set(), STEPS)
    lost = differ = done = 0
    while done < count:
        places = set(random.Random(done).sample(range(3 * STEPS + 1), min(5, count - done)))
        done += len(places)
        try:
            differ += killed(directory / f"killed{done}", places, STEPS) != expected
        except Exception as error:  # noqa: BLE001 - counted
            print(f"kills after {sorted(places)}: {error!r}", flush=True)
            lost += 1
    return {"kills": done, "futures_lost": lost, "weights_differ": differ}


def overhead(directory: Path, pairs: int) -> float:
    """Compare the CPU time of a server's steps with that of the same passes and steps alone."""
    random_rows = np.random.default_rng(0)
    rows = [row(random_rows.integers(5, 60, 60).tolist()) for _ in range(24)]
    bodies = [encode_forward_backward("m", number + 1, rows, "cross_entropy") for number in range(STEPS)]
    ratios = [
        asyncio.run(_served(directory / f"served{pair}", rows)) / _alone(directory / f"alone{pair}", bodies)
        for pair in range(pairs)
    ]
    return statistics.median(ratios)


async def _served(directory: Path, rows: list[object]) -> float:
    async with serving(server_config(directory)) as (address, _), Client(address) as client:
        model = await client.model()
        await client.step(model)
        start = time.process_time()
        for _ in range(STEPS):
            await client.forward_backward(model, rows)  # type: ignore[arg-type]
            await client.step(model)
        return time.process_time() - start


def _alone(directory: Path, bodies: list[bytes]) -> float:
    config = server_config(directory)
    path = Path(config.models["calc"].path)
    trainer = AdapterTrainer(config.run.trainer_plan, path, directory, torch.device("cpu"))
    trainer.add("m", LoraConfig(rank=4), seed=1)
    adam = AdamSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=0.0)
    passes = [_client_rows(read_forward_backward(body)) for body in bodies]
    trainer.optim_step("m", adam)
    start = time.process_time()
    for number in range(len(bodies)):
        trainer.forward("m", passes[number], "cross_entropy", {}, backward=True)
        trainer.optim_step("m", adam)
    return time.process_time() - start


def _client_rows(request: ForwardBackwardRequest) -> list[ClientRow]:
    return [
        ClientRow(token_ids=datum.token_ids, targets=datum.inputs["target_tokens"].astype(np.int64))
        for datum in request.data
    ]


def figures(quick: bool) -> dict[str, float | None]:
    """Measure everything."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        return {
            "gradient_error": gradient_error(directory),
            "wire_logprob_error": asyncio.run(wire_logprob_error(directory / "wire")),
            **kills(directory, 2 if quick else 100),
            "overhead": overhead(directory, 1 if quick else 7),
        }


if __name__ == "__main__":
    run("tinker", NAMES, figures, description=__doc__)
