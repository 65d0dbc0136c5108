"""The server as a process: killed with SIGKILL between and inside requests, and driven by the unmodified SDK."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_tinker import policy_rows
from tests.support.tinker_client import KEY, Client, ServerProcess, encode_forward_backward, until_accepted

SDK = Path(os.environ.get("TINKER_PYTHON", Path.home() / ".cache/tinker-sdk/.venv/bin/python"))
"""Interpreter of the environment in which the SDK is installed: it needs other versions of our dependencies."""

INSTALL = "python -m venv ~/.cache/tinker-sdk/.venv && ~/.cache/tinker-sdk/.venv/bin/pip install tinker torch"


async def script(client: Client, steps: int, after: Callable[[int], None]) -> str:
    """A client's loop, repeating requests as the SDK does; `after` is called after each request.

    Returns:
        The digest of the weights at the end.
    """
    sent = 0

    async def post(route: str, **content: Any) -> Any:
        nonlocal sent
        promise = await until_accepted(client, lambda: client.post(route, **content))
        after(sent)
        sent += 1
        return promise

    async def result(promise: Any) -> Any:
        return await until_accepted(client, lambda: client.result(promise))

    created = {"session_id": client.session, "model_seq_id": 0, "base_model": "calc"}
    model = (await result(await post("create_model", **created, lora_config={"rank": 4, "seed": 1})))["model_id"]
    for step in range(steps):
        promises = []
        for number in range(2):
            sequence = 3 * step + number + 1
            body = encode_forward_backward(model, sequence, policy_rows(sequence), "importance_sampling")
            promise = await until_accepted(client, lambda body=body: client.send("POST", "forward_backward", data=body))
            after(sent)
            sent += 1
            promises.append(json.loads(promise))
        promises.append(
            await post("optim_step", model_id=model, seq_id=3 * step + 3, adam_params={"learning_rate": 1e-2})
        )
        norms = [await result(promise) for promise in promises]
        assert norms[-1]["metrics"]["grad_norm"] > 0
    end = {"model_id": model, "seq_id": 3 * steps + 1, "path": "end"}
    await result(await post("save_weights_for_sampler", **end))
    place = f"training_runs/{model}/checkpoints/sampler_weights/end/archive"
    archive = await until_accepted(client, lambda: client.send("GET", place))
    return hashlib.sha256(archive).hexdigest()


def killed(directory: Path, kills: set[int], steps: int) -> tuple[str, int]:
    """The digest of the weights of a client whose server is killed after some of its requests; and the steps taken."""
    directory.mkdir()
    server = ServerProcess(directory)
    address = server.start()

    def after(request: int) -> None:
        if request in kills:
            server.kill()
            server.start()

    async def work() -> tuple[str, int]:
        async with Client(address) as client:
            digest = await script(client, steps, after)
            models = (await client.get("training_runs"))["training_runs"]
            return digest, len(models)

    try:
        return asyncio.run(asyncio.wait_for(work(), 300))
    finally:
        server.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_no_acknowledged_step_is_lost_or_taken_twice(tmp_path: Path, seed: int) -> None:
    """The files of the adapter are those of an undisturbed server, bit for bit."""
    steps = 4
    kills = set(random.Random(seed).sample(range(1, 3 * steps + 1), 3))
    undisturbed = killed(tmp_path / "undisturbed", set(), steps)
    assert killed(tmp_path / "killed", kills, steps) == undisturbed == (undisturbed[0], 1)


LOOP = """
import sys
import numpy as np, tinker, torch
from tinker import types

service = tinker.ServiceClient()
created = service.create_lora_training_client(base_model="calc", rank=8)
client = created.result() if hasattr(created, "result") else created
prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
GOOD = set(range(20, 40))
rewards = []

def datum(prompt, sequence, advantage):
    tokens = prompt + list(sequence.tokens)
    zeros = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.array(zeros + list(sequence.logprobs), np.float32),
            "advantages": np.array(zeros + [advantage] * len(sequence.tokens), np.float32),
        },
    )

for step in range(4):
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 12, params) for prompt in prompts]
    data, means = [], []
    for prompt, future in zip(prompts, futures):
        sequences = future.result().sequences
        scores = np.array([np.mean([token in GOOD for token in one.tokens]) for one in sequences])
        means.append(scores.mean())
        data += [datum(prompt, one, float(score)) for one, score in zip(sequences, scores - scores.mean())]
    passed = client.forward_backward(data, "importance_sampling")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    outputs = passed.result().loss_fn_outputs
    stepped.result()
    for output, one in zip(outputs, data):
        sampled = one.loss_fn_inputs["logprobs"].to_numpy()
        difference = np.abs(np.array(output["logprobs"].data) - sampled)[sampled != 0]
        assert difference.max() < 1e-4, difference
    rewards.append(float(np.mean(means)))
assert rewards[-1] > rewards[0] + 0.3, rewards

def negative(data, logprobs):
    total = -sum((one * torch.tensor(row.loss_fn_inputs["advantages"].data)).sum() for one, row in zip(logprobs, data))
    return total, {"mine": float(total)}

if torch is not None:
    outcome = client.forward_backward_custom(data, negative).result()
    assert outcome.metrics["mine"] == outcome.metrics["loss:sum"]
saved = client.save_state("done").result()
again = service.create_training_client_from_state_with_optimizer(saved.path)
again = again.result() if hasattr(again, "result") else again
again.optim_step(types.AdamParams(learning_rate=1e-3)).result()
logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
assert logprobs[0] is None and logprobs[1] < 0
try:
    client.forward_backward(data, "gspo").result()
except Exception as error:
    assert "is not served here" in str(error), error
else:
    raise AssertionError("an unknown loss was accepted")
print("finished", tinker.__version__, rewards[0], rewards[-1])
"""
"""An RL loop of the SDK, a custom loss, saved and loaded weights, and a refusal."""


@pytest.mark.exhaustive
@pytest.mark.skipif(not SDK.exists(), reason=f"the tinker SDK is not installed: {INSTALL}; or set TINKER_PYTHON")
def test_the_sdk_runs_its_loop_unmodified(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    address = server.start()
    program = LOOP if _has_torch() else LOOP.replace("numpy as np, tinker, torch", "numpy as np, tinker; torch = None")
    try:
        finished = subprocess.run(
            [SDK, "-c", program],
            env={**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        server.kill()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "finished" in finished.stdout


def _has_torch() -> bool:
    """Whether the SDK's environment has torch, which client-side custom losses need."""
    return subprocess.run([SDK, "-c", "import torch"], capture_output=True, check=False).returncode == 0
