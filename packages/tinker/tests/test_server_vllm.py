"""The SDK, unmodified, against a server with vLLM: two clients at once, and a kill of the server in their midst."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packages.tinker.tests.client import CALCULATOR, FULL_CALCULATOR, KEY, ServerProcess

SCRIPT = """
import sys
import numpy as np, tinker
from tinker import types

seed, rank = int(sys.argv[1]), int(sys.argv[2])
client = tinker.ServiceClient().create_lora_training_client(base_model="calc", rank=rank, seed=seed)
client = client.result() if hasattr(client, "result") else client
prompt = [5, 6, 7, 8]
model_input = types.ModelInput.from_ints(prompt)

def datum(tokens):
    targets = np.array(tokens[1:], np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

def sample(sampler, count, seed, **more):
    params = {name: more.pop(name) for name in ("stop", "max_tokens") if name in more}
    sampling = types.SamplingParams(**{"max_tokens": 8, "stop": [], "seed": seed, **params})
    return sampler.sample(model_input, count, sampling, **more)

for step in range(4):
    client.forward_backward([datum([*prompt, 9, 10 + seed])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    tops = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4, "topk_sample_logprobs": 3}
    answers = [future.result() for future in [sample(sampler, 3, number, **tops) for number in range(6)]]
    sequences = [sequence for answer in answers for sequence in answer.sequences]
    again = sample(sampler, 3, 0).result()
    assert [one.tokens for one in again.sequences] == [one.tokens for one in sequences[:3]]
    # The trainer's log-probabilities are those of the samples, of the prompt, and of the likeliest tokens.
    passed = client.forward([datum([*prompt, *one.tokens]) for one in sequences], "cross_entropy").result()
    for output, one in zip(passed.loss_fn_outputs, sequences, strict=True):
        logprobs = np.array(output["logprobs"].data)
        assert np.abs(logprobs[:3] - answers[0].prompt_logprobs[1:]).max() < 1e-4
        assert np.abs(logprobs[3:] - one.logprobs).max() < 1e-4
        for token, logprob, top in zip(one.tokens, one.logprobs, one.topk_logprobs, strict=True):
            assert len(top) == 3
            assert abs(dict(top).get(token, logprob) - logprob) < 1e-4
            assert token in dict(top) or logprob < top[-1][1] + 1e-4
    first, *rows = answers[0].topk_prompt_logprobs
    assert first is None and all(len(row) == 4 for row in rows)
    print("step", step, flush=True)

tokens = sequences[0].tokens
stopped = sample(sampler, 1, 0, stop=[tokens[2]]).result().sequences[0]
assert (stopped.stop_reason, stopped.tokens) == ("stop", tokens[: tokens.index(tokens[2]) + 1])
decode = client.get_tokenizer().decode
text = decode(tokens[1:3])
ended = sample(sampler, 1, 0, stop=text).result().sequences[0]
end = next(count for count in range(9) if text in decode(tokens[:count]))
assert text and (ended.stop_reason, ended.tokens) == ("stop", tokens[:end]), (text, ended, tokens)
everything = sample(sampler, 1, 0, topk_prompt_logprobs=10_000, max_tokens=1).result()
assert all(abs(sum(np.exp(value) for _, value in row) - 1) < 1e-4 for row in everything.topk_prompt_logprobs[1:])
base = tinker.ServiceClient().create_sampling_client(base_model="calc")
base = base.result() if hasattr(base, "result") else base
assert base.compute_logprobs(model_input).result() != sampler.compute_logprobs(model_input).result()
print("finished", flush=True)
"""
"""Trains, refreshes the weights that it samples from, and compares what engine and trainer say of each token."""


def steps_of(directory: Path) -> int:
    """Number of optimizer steps with a result."""
    with contextlib.closing(sqlite3.connect(directory / "server/journal/requests.db")) as connection:
        statement = "SELECT count(*) FROM requests q JOIN results r USING (id) WHERE q.route = 'optim_step'"
        return int(connection.execute(statement).fetchone()[0])


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("settings", "rank", "count"), [(CALCULATOR, 8, 2), (FULL_CALCULATOR, 0, 1)])
def test_clients_of_the_sdk_sample_from_vllm_and_survive_a_kill(
    tmp_path: Path, settings: str, rank: int, count: int
) -> None:
    """Two with adapters, and one with all weights."""
    pytest.importorskip("tinker")
    pytest.importorskip("vllm")
    settings = settings.replace("vllm = false", "")
    server = ServerProcess(tmp_path, f"{settings}\n[engine.vllm]\n")
    address = server.start()
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(number), str(rank)],
            env={**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        while steps_of(tmp_path) < 3 and all(client.poll() is None for client in clients):
            time.sleep(0.1)
        server.kill()
        server.start()
        for client in clients:
            output, errors = client.communicate(timeout=600)
            assert client.returncode == 0, errors[-3000:]
            assert output.endswith("finished\n")
    finally:
        server.kill()
        for client in clients:
            client.kill()
    assert steps_of(tmp_path) == 4 * count
