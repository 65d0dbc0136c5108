"""The server as a process: killed with SIGKILL between and inside requests, and driven by the unmodified SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from packages.tinker.tests.client import (
    CALCULATOR,
    FULL_CALCULATOR,
    KEY,
    Client,
    Refused,
    ServerProcess,
    decoded_pass,
    encode_forward_backward,
)
from packages.tinker.tests.kills import CALLS, KilledServer, PersistentClient, plan, policy_rows, script


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rank", "forgets"), [(CALCULATOR, 4, False), (CALCULATOR, 4, True), (FULL_CALCULATOR, 0, False)]
)
def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, settings: str, rank: int, *, forgets: bool) -> None:
    """Scripts get the answers of an undisturbed one; those of a server without a journal of futures end with errors."""

    async def work() -> None:
        server = KilledServer(tmp_path / "run", forgets=forgets, settings=settings)
        try:
            async with PersistentClient(server, {}) as client:
                expected = await script(client, rank)
                assert client.calls == CALLS
            planned = {12: "answered"} if forgets else plan(0, 3)
            with pytest.raises(Refused, match="there is no request") if forgets else contextlib.nullcontext():
                async with PersistentClient(server, planned) as client:
                    assert await script(client, rank) == expected
            assert server.kills == len(planned)
            assert await server.lost() == 0
        finally:
            server.process.kill()

    asyncio.run(asyncio.wait_for(work(), 240))


def test_a_full_disk_ends_the_server_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of its files is its full disk. The next process executes what was accepted."""

    async def work() -> None:
        process = ServerProcess(tmp_path)
        async with Client(process.start()) as client:
            model = await client.model()
            size = (tmp_path / "server/journal/requests.db-wal").stat().st_size + 100_000
            resource.prlimit(process.process_id, resource.RLIMIT_FSIZE, (size, size))

            async def fill() -> None:
                while True:
                    promises.append(await client.forward_backward(model, policy_rows() * 50, "ppo"))

            with pytest.raises((Refused, aiohttp.ClientError)) as refusal:
                await fill()
            assert not isinstance(refusal.value, Refused) or refusal.value.status == 503
            assert await process.ended() == 74
            refused = client.sequence(model) - 1
            process.start()
            try:
                body = encode_forward_backward(model, refused, policy_rows() * 50, "ppo", {})
                promises.append(json.loads(await client.send("POST", "forward_backward", data=body)))
                assert len({decoded_pass(await client.result(promise))[1] for promise in promises}) == 1
            finally:
                process.kill()

    promises: list[Any] = []
    asyncio.run(asyncio.wait_for(work(), 120))
    assert len(promises) > 2


LOOP = """
import subprocess, sys
import numpy as np, tinker, torch
from tinker import types

service = tinker.ServiceClient()
rank, rate = int(sys.argv[1]), float(sys.argv[2])
created = service.create_lora_training_client(base_model="calc", rank=rank)
client = created.result() if hasattr(created, "result") else created
prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
GOOD = set(range(20, 40))
rewards = []

LOSSES = ("importance_sampling", "stable_reinforce", "gspo", "stable_reinforce")

def datum(prompt, sequence, advantage, loss):
    tokens = prompt + list(sequence.tokens)
    zeros = [0.0] * (len(prompt) - 1)
    masks = {"sequence_ratio_mask": np.array(zeros + [1] * len(sequence.tokens), np.float32)}
    one = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.array(zeros + list(sequence.logprobs), np.float32),
            "advantages": np.array(zeros + [advantage] * len(sequence.tokens), np.float32),
        } | (masks if loss == "gspo" else {}),
    )
    if loss != "stable_reinforce":
        return one
    span = {"sequence_id": sequence.sequence_id}
    return one.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(length=len(prompt), **span),
            types.SampledProvenanceSpan(length=len(sequence.tokens) - 1, **span),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(offset=1, length=len(prompt) - 1, **span),
            types.SampledProvenanceSpan(length=len(sequence.tokens), **span),
        ],
    )

for loss in LOSSES:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=loss == "stable_reinforce").result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 12, params) for prompt in prompts]
    data, means = [], []
    for prompt, future in zip(prompts, futures):
        sequences = future.result().sequences
        scores = np.array([np.mean([token in GOOD for token in one.tokens]) for one in sequences])
        means.append(scores.mean())
        assert all(one.topk_logprobs is None for one in sequences)
        data += [datum(prompt, one, float(score), loss) for one, score in zip(sequences, scores - scores.mean())]
    passed = client.forward_backward(data, loss)
    stepped = client.optim_step(types.AdamParams(learning_rate=rate))
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

outcome = client.forward_backward_custom(data, negative).result()
assert outcome.metrics["mine"] == outcome.metrics["loss:sum"]
saved = client.save_state("done").result()
again = service.create_training_client_from_state_with_optimizer(saved.path)
again = again.result() if hasattr(again, "result") else again
again.optim_step(types.AdamParams(learning_rate=1e-3)).result()
logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
assert logprobs[0] is None and logprobs[1] < 0
client.forward_backward(data, "dppo").result()
try:
    client.forward_backward(data, "nonsense").result()
except Exception as error:
    assert "is not served here" in str(error), error
else:
    raise AssertionError("an unknown loss was accepted")
exported = client.save_weights_external("out").result()
command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download"]
for number, path in enumerate((exported.path, saved.path)):  # the second is exported first, by another session
    subprocess.run([*command, path, "--output", f"download-{number}"], check=True, capture_output=True)
top = sampler.sample(
    types.ModelInput.from_ints([5, 6, 7]), 1, params, topk_prompt_logprobs=3, include_prompt_logprobs=True
).result()
assert [row and len(row) for row in top.topk_prompt_logprobs] == [None, 3, 3]
for token, logprob, row in zip([6, 7], top.prompt_logprobs[1:], top.topk_prompt_logprobs[1:]):
    assert abs(dict(row).get(token, logprob) - logprob) < 1e-4
rest = service.create_rest_client()
try:
    rest.copy_weights(exported.path, "project").result()
except tinker.NotFoundError as error:
    assert "is not served here" in str(error), error
else:
    raise AssertionError("a copy was accepted")
rest.set_checkpoint_ttl_from_tinker_path(saved.path, 3600).result()
sessions = rest.list_sessions().result().sessions
assert sorted(len(rest.get_session(one).result().training_run_ids) for one in sessions) == [1, 2]
training_run = rest.get_training_run(client.model_id).result()
assert (training_run.is_lora, training_run.lora_rank) == ((True, rank) if rank else (False, None))
assert client.get_info().lora_rank == training_run.lora_rank
service.close("success").result()
print("finished", tinker.__version__, rewards[0], rewards[-1])
"""
"""An RL loop of the SDK, a custom loss, saved, loaded and downloaded weights, the likeliest tokens, and refusals."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rank", "rate", "file"),
    [(CALCULATOR, 8, 1e-2, "adapter_model.safetensors"), (FULL_CALCULATOR, 0, 1e-3, "model.safetensors")],
)
def test_the_sdk_runs_its_loop_unmodified(tmp_path: Path, settings: str, rank: int, rate: float, file: str) -> None:
    pytest.importorskip("tinker")
    server = ServerProcess(tmp_path, settings)
    address = server.start()
    try:
        finished = subprocess.run(
            [sys.executable, "-c", LOOP, str(rank), str(rate)],
            env={**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        server.kill()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "finished" in finished.stdout
    first, second = (next(tmp_path.glob(f"download-{number}/*/{file}")) for number in range(2))
    assert first.read_bytes() == second.read_bytes()  # nothing was trained between them
