"""Models of the Tinker server with all weights: they are what a trainer and an engine would compute, they take turns in
memory, their versions take turns in the engine, and they survive kills."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl_tinker.config import ServedModelConfig, ServerConfig
from packages.tinker.tests.client import (
    MODEL,
    Client,
    Failed,
    Refused,
    Samples,
    decoded_pass,
    full_config,
    row,
    server_config,
    serving,
)
from packages.tinker.tests.kills import policy_rows

PROMPT = [5, 6, 7]


def run(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    asyncio.run(asyncio.wait_for(work(*arguments), 240))


async def train(client: Client, model: str, steps: int, *, first: int = 0) -> list[float]:
    """Take steps on rows that differ from step to step; returns the norms of the gradients."""
    norms = []
    for step in range(first, first + steps):
        await client.forward_backward(model, policy_rows(step), "importance_sampling")
        await client.forward_backward(model, policy_rows(step + 50), "ppo")
        norms.append(await client.step(model, 1e-3))
    return norms


async def download(client: Client, model: str, name: str, directory: Path) -> Path:
    """Save a model's weights and download them."""
    promise = await client.submit("save_weights_for_sampler", model, path=name)
    path = (await client.result(promise))["path"]
    assert path == f"tinker://{model}/sampler_weights/{name}"
    await client.download(model, name, directory / name)
    return directory / name


async def base_sampler(client: Client, number: int) -> str:
    created = await client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=number, base_model=MODEL
    )
    return str(created["sampling_session_id"])


def logprobs_of(network: Any, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
    """The log-probabilities that a model's own forward pass gives to tokens after a prompt."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = network(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()[len(prompt) - 1 :]


def check_samples(samples: Samples, network: Any) -> None:
    for tokens, logprobs in zip(samples.tokens, samples.logprobs, strict=True):
        assert np.abs(logprobs_of(network, PROMPT, tokens) - logprobs).max() < 1e-4


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_each_sampler_has_the_weights_that_were_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: int
) -> None:
    """Samplers of three versions, the base and one that follows are used at once, again and again: each gets its own
    log-probabilities, which are those of the downloaded model."""

    async def work() -> None:
        config = full_config(tmp_path, engine={"max_context": 64, "slots": 16, "vllm": False, "replicas": processes})
        base = transformers.AutoModelForCausalLM.from_pretrained(config.run.trained[MODEL].model)
        async with serving(config) as (address, _), Client(address) as client:
            model = await client.model(rank=0)
            samplers = [await base_sampler(client, 100)]
            networks = [base]
            for step in range(3):
                await train(client, model, 1, first=step)
                samplers.append(await client.sampler(model, step))
                directory = await download(client, model, f"step{step}", tmp_path)
                networks.append(transformers.AutoModelForCausalLM.from_pretrained(directory))
            assert len(list((tmp_path / "server/versions/calc").glob("*.*"))) == 3  # one version, several names
            samplers.append(await client.sampler(model, 50, kind="inflight"))
            await train(client, model, 1, first=3)
            directory = await download(client, model, "newest", tmp_path)
            networks.append(transformers.AutoModelForCausalLM.from_pretrained(directory))
            before = {}
            for repetition in range(3):
                calls = [client.sample(one, PROMPT, 2, stop=[], seed=4) for one in (*samplers, *reversed(samplers))]
                found = await asyncio.gather(*calls)
                for samples, network in zip(found, (*networks, *reversed(networks)), strict=True):
                    check_samples(samples, network)
                before[repetition] = [samples.tokens for samples in found]
            assert before[0] == before[1] == before[2]
            assert len({str(tokens) for tokens in before[0]}) > 2
            rows = [row([*PROMPT, *tokens]) for tokens in found[len(samplers) - 1].tokens]
            computed, _ = decoded_pass(
                await client.result(await client.forward_backward(model, rows, forward_only=True))
            )
            for trainer, engine in zip(computed, found[len(samplers) - 1].logprobs, strict=True):
                assert np.abs(trainer[len(PROMPT) - 1 :] - engine).max() < 1e-4
            scored = await client.sample(samplers[1], PROMPT, stop=[], prompt_logprobs=True, topk_sample_logprobs=2)
            assert scored.prompt_logprobs is not None
            expected = logprobs_of(networks[1], PROMPT[:1], PROMPT[1:])
            assert np.abs(scored.prompt_logprobs[1:] - expected).max() < 1e-4

    run(work)
    path = str(tmp_path / "server")
    assert main(["run", "ledger", path]) == 0
    capsys.readouterr()
    assert main(["step", "list", path, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["episode", "tokens", path, "e2"]) == 0
    assert "calc" in capsys.readouterr().out


async def trained(directory: Path, *, interrupted: bool) -> dict[str, bytes]:
    """The weights of a model after six steps; in between, others take its place in memory, and the server ends."""
    every = {"every": 4}
    steps, model = 0, ""
    for life in range(3 if interrupted else 1):
        config = full_config(directory, checkpoint=every)
        async with serving(config) as (address, service), Client(address) as client:
            model = model or await client.model(rank=0)
            client._next[model] = service.tables.models[model].next_sequence - 1
            for step in range(steps, steps + (2 if interrupted else 6)):
                await train(client, model, 1, first=step)
                if interrupted and life == 0:
                    other = await client.model(1 + step, rank=0)
                    await train(client, other, 1)
                    assert service.tables.bases[MODEL].learner.loaded == [other]
            steps += 2
            if life == 2 or not interrupted:
                found = await download(client, model, "end", directory)
                network = transformers.AutoModelForCausalLM.from_pretrained(found)
                return {name: value.numpy().tobytes() for name, value in network.state_dict().items()}
    raise AssertionError


def test_models_take_turns_in_memory_and_continue_after_a_start_bit_for_bit(tmp_path: Path) -> None:
    expected = asyncio.run(trained(tmp_path / "alone", interrupted=False))
    assert asyncio.run(trained(tmp_path / "turns", interrupted=True)) == expected


def test_two_waiting_models_both_train_and_seldom_change_places(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(full_config(tmp_path)) as (address, service), Client(address) as client:
            models = [await client.model(number, rank=0) for number in range(2)]
            learner, added = service.tables.bases[MODEL].learner, list[str]()
            load = learner.load
            learner.load = lambda name, *more: (added.append(name), load(name, *more))  # type: ignore[method-assign, assignment, func-returns-value]
            promises = []
            for _ in range(6):
                for model in models:
                    promises.append(await client.forward_backward(model, policy_rows(), "ppo"))
                    promises.append(await client.submit("optim_step", model, adam_params={"learning_rate": 1e-3}))
            results = [await client.result(promise) for promise in promises]
            assert results[0::4] == results[2::4]  # both from the same weights, with the same rows
            assert len(added) <= 4

    run(work)


def test_states_are_saved_and_loaded_with_and_without_optimizer(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(full_config(tmp_path)) as (address, _), Client(address) as client:
            model = await client.model(rank=0)
            await train(client, model, 2)
            path = (await client.result(await client.submit("save_weights", model, path="two")))["path"]
            shape = {"is_lora": False, "lora_rank": None}
            assert await client.post("weights_info", tinker_path=path) == {"base_model": MODEL, **shape}
            expected = await train(client, model, 1, first=2)
            for described in (
                await client.post("get_info", model_id=model),
                await client.get(f"training_runs/{model}"),
            ):
                assert {name: described[name] for name in shape} == shape
            end = await download(client, model, "end", tmp_path)
            for number, optimizer in ((1, True), (2, False)):
                promise = await client.post(
                    "load_weights", session_id=client.session, model_seq_id=number, path=path, optimizer=optimizer
                )
                loaded = (await client.result(promise))["model_id"]
                assert (await train(client, loaded, 1, first=2)) == expected  # of the gradient, before the step
                other = await download(client, loaded, f"end{number}", tmp_path)
                files = [(directory / "model.safetensors").read_bytes() for directory in (end, other)]
                assert (files[0] == files[1]) == optimizer
            saved = await client.submit("save_weights", model, path="two", overwrite=True, ttl_seconds=60)
            assert (await client.result(saved))["path"] == path
            checkpoints = (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
            assert [one["expires_at"] is None for one in checkpoints] == [True, False]
            every, second = await client.get("checkpoints"), await client.get("checkpoints?limit=1&offset=1")
            assert second["checkpoints"] == every["checkpoints"][1:2]
            assert second["cursor"] == {"offset": 1, "limit": 1, "total_count": len(every["checkpoints"])}
            for query in ("project_id=mine", "limit=-1"):
                with pytest.raises(Refused, match=query.partition("=")[0]):
                    await client.get(f"training_runs?{query}")
            assert len(list((tmp_path / "server/checkpoints/saved").glob("*/*"))) == 1
            await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/two")
            assert not list((tmp_path / "server/checkpoints/saved").glob("*/*"))

    run(work)


def test_a_script_that_is_run_again_and_again_leaves_bounded_files(tmp_path: Path) -> None:
    """The oldest model has lost its checkpoint, and its journal rebuilds it."""

    async def work() -> None:
        config = full_config(tmp_path, checkpoint={"every": 1, "versions": 2})
        ends: list[bytes] = []
        async with serving(config) as (address, _):
            for _ in range(4):
                async with Client(address) as client:
                    model = await client.model(rank=0)
                    for step in range(3):
                        await train(client, model, 1, first=step)
                        samplers.append((client.session, await client.sampler(model, step)))
                    models.append(model)
                    ends.append((await download(client, model, "end", tmp_path) / "model.safetensors").read_bytes())
                    await client.send("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/end")
            assert len(set(ends)) == 1
            assert len(list((tmp_path / "server/versions/calc").glob("*.*"))) == 2
            assert len(list((tmp_path / "server/checkpoints/models").glob("*/*"))) == 2
            async with Client(address) as client:
                with pytest.raises(Failed, match="keeps the newest 2 unnamed samplers of calc"):
                    await client.sample(samplers[0][1], PROMPT, seed=1)
                client._next[models[0]] = 13
                again = await download(client, models[0], "again", tmp_path)
                assert (again / "model.safetensors").read_bytes() == ends[0]

    models: list[str] = []
    samplers: list[tuple[str, str]] = []
    run(work)


def test_samplers_of_a_newer_model_outlive_a_name_of_an_older_one(tmp_path: Path) -> None:
    """A start, and the deletion of the name, leave the newest unnamed versions of the base."""
    versions = tmp_path / "server/versions/calc"
    config = full_config(tmp_path, checkpoint={"versions": 2})

    async def sample(client: Client) -> None:
        for sampler in samplers:
            assert (await client.sample(sampler, PROMPT)).tokens

    async def work() -> None:
        async with serving(config) as (address, _), Client(address) as client:
            older = await client.model(rank=0)
            await train(client, older, 1)
            await client.result(await client.submit("save_weights_for_sampler", older, path="kept"))
            newer = await client.model(1, rank=0)
            for number in range(2):
                await train(client, newer, 1)
                samplers.append(await client.sampler(newer, number))
        leftovers = (versions / ".tmp-1.9", tmp_path / "server/checkpoints/models/1/.tmp-9")
        for directory in leftovers:  # as a process leaves them that was killed while it wrote
            directory.mkdir(parents=True)
        async with serving(config) as (address, _), Client(address) as client:
            await sample(client)
            assert not any(directory.exists() for directory in leftovers)
            await client.send("DELETE", f"training_runs/{older}/checkpoints/sampler_weights/kept")
            assert sorted(path.name for path in versions.iterdir()) == ["2.0", "2.1"]
            await sample(client)

    samplers: list[str] = []
    run(work)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"rank": 4}, r"lora_config.rank = 4: all weights of calc are trained here .* give rank 0"),
        ({"rank": 0, "train_mlp": False}, "train_attn, train_mlp and train_unembed must be true"),
    ],
)
def test_a_part_of_the_weights_is_refused(tmp_path: Path, shape: dict[str, Any], sentence: str) -> None:
    async def work() -> None:
        async with serving(full_config(tmp_path)) as (address, _), Client(address) as client:
            with pytest.raises(Refused, match=sentence):
                await client.model(**shape)

    run(work)


def test_settings_that_do_not_fit_all_weights_are_refused(tmp_path: Path) -> None:
    path = "agentrl.environments:calculator/model"
    with pytest.raises(ValidationError, match="max_rank changes nothing with weights = 'full'"):
        server_config(tmp_path, models={MODEL: ServedModelConfig(path=path, weights="full", max_rank=8)})

    async def create(config: ServerConfig, rank: int) -> None:
        async with serving(config) as (address, _), Client(address) as client:
            await client.model(rank=rank)

    run(create, server_config(tmp_path), 4)
    with pytest.raises(ConfigError, match=r"policies.calc.lora was .* and is None"):
        run(create, full_config(tmp_path), 0)
