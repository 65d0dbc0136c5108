"""The server of the Tinker protocol: what clients train and sample is what a trainer and an engine would compute; it
survives the end of its process; bad input is refused with a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from agentrl.cli.main import main
from agentrl.core.clock import SystemClock
from agentrl.core.errors import ConfigError, InputError, StorageError
from agentrl.engines.remote.client import ProcessEngine
from agentrl.gateway.bodies import zstd
from agentrl.journal.requests import _checksum
from agentrl_tinker import command, messages
from agentrl_tinker.config import ServedModelConfig, ServerConfig
from agentrl_tinker.http_server import TinkerServer
from agentrl_tinker.service import open_service
from packages.tinker.tests.client import (
    CALCULATOR,
    KEY,
    MODEL,
    Client,
    Failed,
    Refused,
    Samples,
    decoded_pass,
    encode_forward_backward,
    encode_tensor,
    full_config,
    row,
    server_config,
    serving,
)
from packages.tinker.tests.kills import policy_rows
from tests.support.likeliest import check_likeliest

ROWS = [row([5, 6, 7, 8, 9, 10]), row([5, 6, 7, 11, 12]), row([20, 21, 22])]


async def train(client: Client, model: str, steps: int, *, first: int = 0) -> list[float]:
    """Take steps on rows that differ from step to step; returns the norms of the gradients."""
    norms = []
    for step in range(first, first + steps):
        await client.forward_backward(model, policy_rows(step), "importance_sampling")
        await client.forward_backward(model, ROWS)
        norms.append(await client.step(model))
    return norms


async def weights(client: Client, model: str, name: str, directory: Path) -> dict[str, Any]:
    """The adapter of a model, saved and downloaded."""
    promise = await client.submit("save_weights_for_sampler", model, path=name)
    path = (await client.result(promise))["path"]
    assert path == f"tinker://{model}/sampler_weights/{name}"
    await client.download(model, name, directory / name)
    assert json.loads((directory / name / "adapter_config.json").read_text())["r"] == 4
    return load_file(directory / name / "adapter_model.safetensors")


def run(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    asyncio.run(asyncio.wait_for(work(*arguments), 120))


def test_a_loop_of_sampling_and_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples have the log-probabilities that the trainer computes, a seed repeats them, and commands show them."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            assert (await client.get("get_server_capabilities"))["supported_models"][0]["model_name"] == MODEL
            model = await client.model()
            await train(client, model, 1)
            sampler = await client.sampler(model)
            prompt = [5, 6, 7]
            samples = await client.sample(sampler, prompt, 4, stop=[], seed=7, prompt_logprobs=True)
            assert [len(tokens) for tokens in samples.tokens] == [8] * 4
            assert samples.stopped == [False] * 4
            again = await client.sample(sampler, prompt, 4, stop=[], seed=7)
            other = await client.sample(sampler, prompt, 4, stop=[], seed=8)
            assert again.tokens == samples.tokens != other.tokens
            rows = [row([*prompt, *tokens]) for tokens in samples.tokens]
            computed, _ = decoded_pass(
                await client.result(await client.forward_backward(model, rows, forward_only=True))
            )
            for trainer, engine in zip(computed, samples.logprobs, strict=True):
                assert np.abs(trainer[len(prompt) - 1 :] - engine).max() < 1e-4
            assert samples.prompt_logprobs is not None
            assert np.isnan(samples.prompt_logprobs[0])
            assert np.abs(samples.prompt_logprobs[1:] - computed[0][: len(prompt) - 1]).max() < 1e-4
            stopped = await client.sample(sampler, prompt, stop=[samples.tokens[0][2]], seed=7)
            assert stopped.tokens[0] == samples.tokens[0][: samples.tokens[0].index(samples.tokens[0][2]) + 1]
            assert stopped.stopped == [True]
            greedy = [await client.sample(sampler, prompt, temperature=0.0, stop=[]) for _ in range(2)]
            assert greedy[0].tokens == greedy[1].tokens

    run(work)
    path = str(tmp_path / "server")
    assert main(["episode", "list", path, "--json"]) == 0
    episodes = json.loads(capsys.readouterr().out)
    assert len(episodes) == 15
    assert main(["episode", "tokens", path, "e0"]) == 0
    assert "calc@1.0" in capsys.readouterr().out
    assert main(["run", "ledger", path]) == 0


def test_the_likeliest_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    """As the SDK reads them, of prompts and samples, of the base model and an adapter."""
    sdk = pytest.importorskip("tinker.proto.response_conv")
    prompt = [5, 6, 7, 8]

    def check(expected: np.ndarray[Any, Any], found: list[Any], count: int) -> None:
        for logprobs, pairs in zip(expected, found, strict=True):
            assert len(pairs) == min(count, len(logprobs))
            check_likeliest(logprobs, *zip(*pairs, strict=True), atol=1e-4)

    async def work() -> None:
        config = server_config(tmp_path)
        base, copy = [
            transformers.AutoModelForCausalLM.from_pretrained(config.run.trained[MODEL].model) for _ in range(2)
        ]
        vocabulary = base.config.vocab_size
        async with serving(config) as (address, _), Client(address) as client:
            created = await client.post(
                "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=MODEL
            )
            model = await client.model()
            await train(client, model, 1)
            await weights(client, model, "saved", tmp_path)
            adapted = peft.PeftModel.from_pretrained(copy, tmp_path / "saved").eval()
            for sampler, network in (
                (created["sampling_session_id"], base),
                (await client.sampler(model, 1), adapted),
            ):
                for count in (1, 4, vocabulary + 3):
                    asked = {"topk_prompt_logprobs": count, "topk_sample_logprobs": count, "temperature": 0.7}
                    body = await client.sample_body(sampler, prompt, 2, stop=[], **asked)
                    answer = sdk.deserialize_sample_response(body)
                    assert answer.prompt_logprobs is None
                    first, *found = answer.topk_prompt_logprobs
                    assert first is None
                    assert answer.topk_prompt_logprobs_np.token_ids.shape == (len(prompt), count)
                    for sample in answer.sequences:
                        tokens = torch.tensor([[*prompt, *sample.tokens]])
                        with torch.no_grad():
                            expected = network(tokens).logits[0, :-1].log_softmax(-1).numpy()
                        check(expected[: len(prompt) - 1], found, count)
                        check(expected[len(prompt) - 1 :], sample.topk_logprobs, count)
                last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 2}
                body = await client.sample_body(sampler, prompt, stop=[], **last)
                answer = sdk.deserialize_sample_response(body)
                assert [row is None for row in answer.topk_prompt_logprobs] == [True, True, False, False]
                assert [value is None for value in answer.prompt_logprobs] == [True, True, False, False]
                without = sdk.deserialize_sample_response(await client.sample_body(sampler, prompt, stop=[]))
                assert without.topk_prompt_logprobs is without.sequences[0].topk_logprobs is None

    run(work)


def test_a_base_model_without_a_chat_template_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients of base models send tokens."""

    async def work() -> None:
        async with serving(config) as (address, _), Client(address) as client:
            samples = await client.sample(await client.sampler(await client.model()), [5, 6, 7], stop="zz")
            assert samples.tokens[0]

    whole = server_config(tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(whole.run.trained[MODEL].model, bare)
    (bare / "chat_template.jinja").unlink()
    config = server_config(tmp_path, models={MODEL: ServedModelConfig(path=str(bare), max_rank=8)})
    run(work)
    assert main(["episode", "tokens", str(tmp_path / "server"), "e0"]) == 0
    assert "calc@1.0" in capsys.readouterr().out


def test_fixed_settings_of_a_server_stay(tmp_path: Path) -> None:
    """Acknowledged models belong to their base model's files, the seed and the dtype; base models may be added."""

    async def start(config: ServerConfig) -> None:
        async with serving(config):
            pass

    shutil.copytree(server_config(tmp_path).run.trained[MODEL].model, tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "sibling")
    base, sibling = (ServedModelConfig(path=str(tmp_path / name), max_rank=8) for name in ("base", "sibling"))
    shutil.copytree(tmp_path / "base", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    broken = base.model_copy(update={"path": str(tmp_path / "broken")})
    with pytest.raises(InputError, match=r"tokenizer.json"):
        run(start, server_config(tmp_path, models={MODEL: broken}))
    run(start, server_config(tmp_path, models={MODEL: base}))  # nothing was served yet
    for setting, changed in (
        (f"policies.{MODEL}.model", {"models": {MODEL: sibling}}),
        ("seed", {"models": {MODEL: base}, "seed": 1}),
        ("model.dtype", {"models": {MODEL: base}, "dtype": "bfloat16"}),
    ):
        with pytest.raises(ConfigError, match=rf"^{setting} was .* and is .*another `name`"):
            run(start, server_config(tmp_path, **changed))
    run(start, server_config(tmp_path, models={MODEL: base, "other": sibling}))
    (tmp_path / "sibling" / "generation_config.json").write_text("{}")
    run(start, server_config(tmp_path, models={MODEL: base.model_copy(update={"max_rank": 4})}))
    with pytest.raises(ConfigError, match=r"^policies.other.model: .*generation_config.json is not what the run began"):
        run(start, server_config(tmp_path, models={MODEL: base, "other": sibling}))


def test_a_stop_text_ends_a_sample_where_its_last_token_does(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            created = await client.post(
                "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=MODEL
            )
            sampler, decode = created["sampling_session_id"], service.parts.sampler._texts[MODEL].decode
            free = (await client.sample(sampler, [5, 6, 7], max_tokens=24, stop=[], seed=3)).tokens[0]
            text = decode(free)[6:9]
            cut = await client.sample(sampler, [5, 6, 7], max_tokens=24, stop=text, seed=3)
            assert cut.stopped == [True]
            (tokens,) = cut.tokens
            assert tokens == free[: len(tokens)]
            assert text in decode(tokens)
            assert text not in decode(tokens[:-1])

    run(work)


@pytest.mark.exhaustive
def test_custom_losses_in_two_passes_have_the_gradient_of_the_built_in_one(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            rows = policy_rows()
            norms = []
            for number in range(2):
                model = await client.model(number)
                if number:
                    promise = await client.forward_backward(model, ROWS, forward_only=True)
                    logprobs, _ = decoded_pass(await client.result(promise))
                    slopes = [  # of -exp(log p - q) A by log p
                        -np.exp(computed - one["logprobs"]) * one["advantages"]
                        for computed, one in zip(logprobs, rows, strict=True)
                    ]
                    weighted = [{**one, "weights": -slope} for one, slope in zip(ROWS, slopes, strict=True)]
                    await client.forward_backward(model, weighted, "cross_entropy")
                else:
                    await client.forward_backward(model, rows, "importance_sampling")
                norms.append(await client.step(model, 0.0))
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    run(work)


@asynccontextmanager
async def copied(directory: Path, name: str) -> AsyncIterator[Path]:
    """A copy of a running server's directory: what a kill at this moment would leave."""
    copy = directory / name
    shutil.copytree(directory / "live" / "server", copy / "server")
    yield copy


@pytest.mark.parametrize("moment", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_what_was_acknowledged_survives_at_any_moment(tmp_path: Path, moment: int) -> None:
    """A copy of the directory between requests, as a kill would leave it, leads to the same weights, bit for bit: with
    an accepted request that has no result, a gradient that no step took, after a checkpoint and before the first."""
    copies: list[tuple[Path, int]] = []

    async def live() -> dict[str, Any]:
        async with serving(server_config(tmp_path / "live")) as (address, _), Client(address) as client:
            model = await client.model()
            tokens.extend([client.session, model])
            for step in range(4):
                await train(client, model, 1, first=step)
                promise = await client.forward_backward(model, policy_rows(9), "ppo", clip_low_threshold=0.5)
                if step == moment:
                    async with copied(tmp_path, f"at{step}") as copy:
                        copies.append((copy, step))
                results.append(await client.result(promise))
            return await weights(client, model, "end", tmp_path)

    async def resumed(copy: Path, step: int) -> dict[str, Any]:
        async with serving(server_config(copy)) as (address, _), Client(address) as client:
            session, model = tokens
            assert session != client.session
            old = await client.result({"request_id": f"{model}:{4 * step + 4}"})
            assert old == results[step]  # answered or computed by this process, with the same bytes
            client.sequence(model, 4 * (step + 1) + 1)
            client._next[model] = 4 * (step + 1)
            for later in range(step + 1, 4):
                await train(client, model, 1, first=later)
                await client.forward_backward(model, policy_rows(9), "ppo", clip_low_threshold=0.5)
            return await weights(client, model, "end", copy)

    tokens: list[str] = []
    results: list[Any] = []
    expected = asyncio.run(live())
    for copy, step in copies:
        found = asyncio.run(resumed(copy, step))
        assert {name: value.tobytes() for name, value in found.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }


def test_a_repeated_publication_is_the_same_with_another_number_of_the_sampler(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            model = await client.model()
            save = {"model_id": model, "seq_id": 1}
            saved = [
                await client.post("save_weights_for_sampler", **save, sampling_session_seq_id=number)
                for number in (7, 8)  # the SDK takes a new number of the sampler for each try
            ]
            assert saved[0] == saved[1]
            session = (await client.result(saved[1]))["sampling_session_id"]
            assert session.endswith(":sample:7")
            with pytest.raises(Refused, match=r"seq_id 1 of .* was used by another request"):
                await client.post("save_weights_for_sampler", **save, path="named")
            sampled = {"sampling_session_id": session, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
            sampled |= {"prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]}}
            # A copy of the SDK's client in another process counts from a random multiple of a billion.
            await client.result(await client.post("asample", **sampled, seq_id=10**18))

    asyncio.run(work())


def test_a_repeated_request_is_the_same_request(tmp_path: Path) -> None:
    """The SDK repeats a request whose answer was lost: a step with one number is taken once."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            model = await client.model()
            body = encode_forward_backward(model, 1, ROWS, "cross_entropy", {})
            first, again = await asyncio.gather(
                client.send("POST", "forward_backward", data=body), client.send("POST", "forward_backward", data=body)
            )
            assert first == again
            step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
            promises = [await client.post("optim_step", **step) for _ in range(3)]
            assert len({promise["request_id"] for promise in promises}) == 1
            await client.result(promises[0])
            assert service.tables.bases[MODEL].learner.steps(model) == 1
            with pytest.raises(Refused, match="was used by a request of optim_step"):
                await client.post("save_weights", model_id=model, seq_id=2, path="x")
            with pytest.raises(Refused, match=r"seq_id 2 of .* was used by another request of optim_step"):
                await client.post("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 2e-2})
            sampler = {"session_id": client.session, "sampling_session_seq_id": 0}
            assert await client.post("create_sampling_session", **sampler, base_model=MODEL) == await client.post(
                "create_sampling_session", **sampler, base_model=MODEL
            )
            with pytest.raises(Refused, match="sampling_session_seq_id 0 was used by another sampler"):
                await client.post("create_sampling_session", **sampler, model_path="tinker://other")
            with pytest.raises(Refused, match="sampling_session_seq_id 0 was used by a sampler"):
                await client.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
            before = (await client.get(f"training_runs/{model}"))["last_request_time"]
            await client.result(await client.post("save_weights", model_id=model, seq_id=4, path="once"))
            assert (await client.get(f"training_runs/{model}"))["last_request_time"] > before
            for _ in range(2):
                await client.send("PUT", f"training_runs/{model}/checkpoints/weights/once/ttl", json={"ttl_seconds": 9})
            assert (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"][0]["expires_at"] is not None
            for _ in range(2):
                await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/once")
            assert (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"] == []
            with pytest.raises(Refused, match="there are no weights 'weights/other'"):
                await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/other")
            for _ in range(2):
                await client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
            with pytest.raises(Refused, match="has finished; create another"):
                await client.model(5)
            with pytest.raises(Refused, match="has finished; create another"):
                await client.post("save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=9)
            await client.result(await client.post("save_weights_for_sampler", model_id=model, seq_id=6, path="last"))
            assert (await client.get("sessions"))["sessions"] == [client.session]
            assert (await client.get(f"sessions/{client.session}"))["training_run_ids"] == [model]

    run(work)


def test_expired_weights_are_removed_without_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next save, and at a start; their names can be used again before that."""
    saved = tmp_path / "server" / "checkpoints" / "saved" / "1"
    wall, later_s = SystemClock().wall, 0.0
    monkeypatch.setattr(SystemClock, "wall", lambda clock: wall() + later_s)

    def there() -> list[str]:
        return sorted(directory.name for directory in saved.iterdir())

    async def work() -> None:
        nonlocal later_s
        config = server_config(tmp_path)
        async with serving(config) as (address, _), Client(address) as client:
            model = await client.model()
            await client.result(await client.submit("save_weights", model, path="a", ttl_seconds=60))
            with pytest.raises(Refused, match="there are weights 'a' already"):
                await client.submit("save_weights", model, path="a")
            later_s = 61.0
            await client.result(await client.submit("save_weights", model, path="a", ttl_seconds=60))
            assert there() == ["3"]
            later_s = 122.0
            await client.result(await client.submit("save_weights", model, path="b", ttl_seconds=60))
            assert there() == ["4"]
        later_s = 183.0
        async with serving(config):
            assert there() == []

    run(work)


def test_a_request_whose_client_leaves_is_executed(tmp_path: Path) -> None:
    """It is in the journal, so it must not hold up what comes after it, or stay in memory."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            model = await client.model()
            body = encode_forward_backward(model, 1, ROWS, "cross_entropy", {})
            request = messages.read_request("forward_backward", body)
            accepting = asyncio.create_task(service.accept("forward_backward", request, body))
            await asyncio.sleep(0)
            accepting.cancel()
            step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
            assert (await client.result(await client.post("optim_step", **step)))["metrics"]["grad_norm"] > 0
            assert not service._receiving

    run(work)


def test_a_sample_is_recorded_once(tmp_path: Path) -> None:
    """A process that was killed after it recorded samples, and before their result: the next one answers with them."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            sampler = await client.sampler(await client.model())
            promises.append({"request_id": f"{sampler}:0"})
            await client.sample(sampler, [5, 6, 7], 3, prompt_logprobs=True)
            answers.append(await client.result(promises[0]))

    async def again() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            answers.append(await client.result(promises[0]))

    promises: list[dict[str, str]] = []
    answers: list[Any] = []
    journal = tmp_path / "server/journal"
    run(work)
    with contextlib.closing(sqlite3.connect(journal / "requests.db")) as connection, connection:
        (removed,) = connection.execute("SELECT count(*) FROM results WHERE kind = 'protobuf'").fetchone()
        assert removed == 1
        connection.execute("DELETE FROM results WHERE kind = 'protobuf'")
    run(again)
    assert answers[0] == answers[1]
    with contextlib.closing(sqlite3.connect(journal / "control.db")) as connection:
        assert connection.execute("SELECT count(*) FROM episodes").fetchone() == (3,)


def test_a_model_that_cannot_be_rebuilt_does_not_go_on(tmp_path: Path) -> None:
    """Each request fails until its checkpoint is there again; none runs on weights that lack acknowledged steps."""

    async def work() -> None:
        config = server_config(tmp_path, checkpoint={"every": 1})
        async with serving(config) as (address, _), Client(address) as client:
            models.append(await client.model())
            await client.forward_backward(models[0], ROWS)
            await client.step(models[0])
            await client.result(await client.forward_backward(models[0], ROWS, forward_only=True))  # of the next turn

    async def again(*, fails: bool) -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            for _ in range(2):
                sequence = service.tables.models[models[0]].next_sequence
                promise = await client.post("optim_step", model_id=models[0], seq_id=sequence, adam_params={})
                if fails:
                    with pytest.raises(Failed, match="cannot be read"):
                        await client.result(promise)
                else:
                    await client.result(promise)
                    assert service.tables.bases[MODEL].learner.steps(models[0]) == sequence - 4

    models: list[str] = []
    run(work)
    (file,) = (tmp_path / "server/checkpoints/models").glob("*/*/state/weights.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    asyncio.run(again(fails=True))
    file.write_bytes(content)
    asyncio.run(again(fails=False))


def test_a_disk_that_cannot_be_written_ends_the_server(tmp_path: Path) -> None:
    """The request has no result, not a failed one: the next process executes it."""

    async def work() -> None:
        saved = tmp_path / "server/checkpoints/saved"
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            model = await client.model()
            saved.parent.mkdir(exist_ok=True)
            saved.write_text("in the way")
            promises.append(await client.submit("save_weights", model, path="x"))
            with pytest.raises(StorageError, match="saved/1/1: could not be written"):
                await service.failure
        saved.unlink()
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            assert (await client.result(promises[0]))["path"] == f"tinker://{model}/weights/x"

    promises: list[Any] = []
    run(work)


def test_a_step_that_overflows_is_not_taken(tmp_path: Path) -> None:
    """Neither in memory nor after a start: the next step is that of a model without it."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            norms = []
            for number in range(2):
                model = await client.model(number)
                await train(client, model, 1)
                await client.forward_backward(model, ROWS)
                if number:
                    with pytest.raises(Failed, match="lower the learning rate"):
                        await client.step(model, 1e300)
                norms.append([await client.step(model), *await train(client, model, 1, first=1)])
            assert norms[0] == norms[1]

    run(work)


def test_many_idle_polls_delay_nobody(tmp_path: Path) -> None:
    """Polls for a request behind a gap wait, others work meanwhile, and all get the result once the gap is filled."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_polls = min(1000, max_files // 5)  # each opens two files in this process, and admitted ones may use half

    async def poll(address: str, request_id: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        body = json.dumps({"request_id": request_id}).encode()
        head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {address[7:]}\r\nX-API-Key: {KEY}\r\nConnection: close"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return answer.partition(b"\r\n\r\n")[2]

    async def work() -> None:
        async with (
            serving(server_config(tmp_path)) as (address, service),
            Client(address) as client,
            Client(address) as other,
        ):
            model = await client.model()
            first = client.sequence(model)
            step = await client.submit("optim_step", model, adam_params={"learning_rate": 1e-2})
            event = service._done[step["request_id"]]
            polls = [asyncio.create_task(poll(address, step["request_id"])) for _ in range(num_polls)]
            while len(event._waiters) < num_polls:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            await train(other, await other.model(), 1)
            assert not event.is_set()
            body = encode_forward_backward(model, first, ROWS, "cross_entropy", {})
            await client.send("POST", "forward_backward", data=body)
            (answer,) = set(await asyncio.gather(*polls))
            assert json.loads(answer)["metrics"]["grad_norm"] > 0

    run(work)


async def _send_refused(client: Client, model: str) -> None:
    """Send nine requests that are refused."""
    image = b"\x1a\x04\x0a\x02\x12\x00"  # a datum whose chunk is no text
    nan = [row([1, 2], logprobs=[0.0], advantages=[float("nan")])]
    with pytest.raises(Refused, match=r"400: .*NaN"):
        await client.forward_backward(model, nan, "ppo")
    with pytest.raises(Refused, match=r"400: .*not served"):
        await client.forward_backward(model, ROWS, "nonsense")
    with pytest.raises(Refused, match=r"400: .*user_metadata"):
        await client.submit("save_weights", model, path="x", user_metadata=3)
    with pytest.raises(Refused, match=r"400: .*adam_params.fused"):
        await client.submit("optim_step", model, adam_params={"fused": True})
    body = encode_forward_backward(model, client.sequence(model), [], "ppo", {}) + image
    with pytest.raises(Refused, match=r"400: .*not images"):
        await client.send("POST", "forward_backward", data=body)
    long_rows = [{"tokens": range(messages.MAX_BODY_BYTES // 4)}]
    body = encode_forward_backward(model, client.sequence(model), long_rows, "ppo", {})
    with pytest.raises(Refused, match=r"413: .*longer than 8388608"):
        await client.send("POST", "forward_backward", data=io.BytesIO(body))
    packed = gzip.compress(encode_forward_backward(model, client.sequence(model), long_rows, "ppo", {}), 1)
    assert len(packed) < messages.MAX_BODY_BYTES
    with pytest.raises(Refused, match=r"413: .*when it is unpacked"):
        await client.send("POST", "forward_backward", data=io.BytesIO(packed), headers={"Content-Encoding": "gzip"})
    random_rows = [
        {"tokens": np.random.default_rng(0).integers(-(1 << 31), 1 << 31, size=messages.MAX_BODY_BYTES // 4)}
    ]
    for encoding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        packed = compress(encode_forward_backward(model, client.sequence(model), random_rows, "ppo", {}), 1)
        assert len(packed) > messages.MAX_BODY_BYTES
        with pytest.raises(Refused, match=r"413: .*longer than 8388608"):
            await client.send(
                "POST", "forward_backward", data=io.BytesIO(packed), headers={"Content-Encoding": encoding}
            )


def test_a_refused_request_uses_its_number_up(tmp_path: Path) -> None:
    """The SDK gives the next request the next number: it must not wait for the refused one, after a start neither."""

    async def work() -> None:
        async with serving(config) as (address, _), Client(address) as client:
            model = await client.model()
            await _send_refused(client, model)
            await train(client, model, 1)
            first = {"model_id": model, "seq_id": 1, "adam_params": {}}
            with pytest.raises(Refused, match=r"seq_id 1 of .* was used by a refused request: datum 0: advantages"):
                await client.post("optim_step", **first)
            with pytest.raises(Failed, match="datum 0: advantages has a value that is NaN"):
                await client.result({"request_id": f"{model}:1"})
            waiting = await client.submit("optim_step", model, adam_params={"learning_rate": 1e-2})
            await client.result(waiting)
            client.sequence(model)  # a gap, behind which the refused ones wait
            await _send_refused(client, model)
            later = await client.submit("save_weights", model, path="later")
            left.update({"model": model, "later": later, "gap": dict(client._next)})
        async with serving(config) as (address, _), Client(address) as client:
            gap = left["gap"][left["model"]] - 10  # the nine and `later`
            body = encode_forward_backward(left["model"], gap, ROWS, "cross_entropy", {})
            await client.send("POST", "forward_backward", data=body)
            assert (await client.result(left["later"]))["path"] == f"tinker://{left['model']}/weights/later"

    left: dict[str, Any] = {}
    config = server_config(tmp_path)
    run(work)


def test_a_refusal_that_waits_for_the_disk_delays_no_other_client(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            serving(server_config(tmp_path)) as (address, service),
            Client(address) as client,
            Client(address) as other,
        ):
            model, written, waits, refuse = await client.model(), asyncio.Event(), asyncio.Event(), service.refuse

            async def refuse_slowly(*arguments: Any) -> None:
                waits.set()
                await written.wait()
                await refuse(*arguments)

            monkeypatch.setattr(service, "refuse", refuse_slowly)
            refused = asyncio.ensure_future(client.submit("optim_step", model, adam_params={"fused": True}))
            await waits.wait()
            async with asyncio.timeout(60):
                await train(other, await other.model(), 1)
            written.set()
            with pytest.raises(Refused, match=r"adam_params.fused"):
                await refused
            await train(client, model, 1)

    with pytest.MonkeyPatch.context() as monkeypatch:
        run(work)


def test_a_request_that_is_half_sent_changes_nothing(tmp_path: Path) -> None:
    """The client leaves within the headers, within the body, or ends a body early."""

    async def send(address: str, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(data)
        await writer.drain()
        writer.close()
        await reader.read()

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            model = await client.model()
            body = json.dumps({"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}).encode()
            head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: {address[7:]}\r\nX-API-Key: {KEY}\r\n".encode()
            chunked = b"Transfer-Encoding: chunked\r\n\r\n"
            whole = f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            for part in (b"", whole[:-1], whole[:30], chunked + b"%x\r\n" % len(body) + body, chunked + b"zz\r\n"):
                await send(address, head + part)
            await train(client, model, 1)  # with the numbers from 1

    run(work)
    with contextlib.closing(sqlite3.connect(tmp_path / "server/journal/requests.db")) as connection:
        assert connection.execute("SELECT count(*) FROM requests WHERE route = 'optim_step'").fetchone() == (1,)


def test_named_weights_survive_a_start(tmp_path: Path) -> None:
    """Also if the server keeps one unnamed version; and weights that were saved again after they were deleted."""

    async def work() -> None:
        config = server_config(tmp_path, checkpoint={"versions": 1})
        async with serving(config) as (address, _), Client(address) as client:
            model = await client.model()
            promise: Any = await client.submit("save_weights", model, path="w")
            path = (await client.result(promise))["path"]
            before = []
            for name in ("a", "b", "c"):
                await train(client, model, 1)
                before.append(await weights(client, model, name, tmp_path))
            sequence = client.sequence(model)
            later = {"model_id": model, "seq_id": client.sequence(model), "path": "w", "overwrite": True}
            promise = await client.post("save_weights", **later)
            await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/w")  # while the other one waits
            await client.post("save_weights", model_id=model, seq_id=sequence, path="other")
            await client.result(promise)
            load = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
            await client.result(await client.post("load_weights", **load))
        async with serving(config) as (address, _), Client(address) as client:
            assert len((await client.get("training_runs"))["training_runs"]) == 2
            assert (await client.post("weights_info", tinker_path=path))["base_model"] == MODEL
            for name, expected in zip(("a", "b", "c"), before, strict=True):
                await client.download(model, name, tmp_path / f"again-{name}")
                found = load_file(tmp_path / f"again-{name}" / "adapter_model.safetensors")
                assert {key: value.tobytes() for key, value in found.items()} == {
                    key: value.tobytes() for key, value in expected.items()
                }

    run(work)


async def loss(client: Client, model: str) -> float:
    """The loss of a model's weights."""
    return decoded_pass(await client.result(await client.forward_backward(model, ROWS, forward_only=True)))[1]


def test_loaded_weights_survive_a_change_of_their_name(tmp_path: Path) -> None:
    """A load has no result before its checkpoint is written, so a restart does not read the name again."""

    async def before() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            client._next = numbers
            models.extend([await client.model(number) for number in range(2)])
            await train(client, models[0], 1)
            path = (await client.result(await client.submit("save_weights", models[0], path="w")))["path"]
            losses.append(await loss(client, models[0]))
            blocked.parent.mkdir(parents=True)
            blocked.write_text("in the way")
            promises.append(await client.submit("load_weights", models[1], path=path, optimizer=True))
            with pytest.raises(StorageError, match="models/2/1: could not be written"):
                await service.failure

    async def after() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            client._next = numbers
            await client.result(promises[0])
            await train(client, models[0], 1)
            await client.result(await client.submit("save_weights", models[0], path="w", overwrite=True))
            assert await loss(client, models[1]) == losses[0] != await loss(client, models[0])

    numbers: dict[str, int] = {}
    models: list[str] = []
    losses: list[float] = []
    promises: list[Any] = []
    blocked = tmp_path / "server/checkpoints/models/2"
    run(before)
    blocked.unlink()
    run(after)


def test_a_load_without_a_result_is_not_repeated(tmp_path: Path) -> None:
    """A process that was killed between the checkpoint of a load and its result: the name is gone since."""

    async def before() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            models.extend([await client.model(number) for number in range(2)])
            await train(client, models[0], 1)
            path = (await client.result(await client.submit("save_weights", models[0], path="w")))["path"]
            promises.append(await client.submit("load_weights", models[1], path=path, optimizer=True))
            await client.result(promises[0])
            await client.send("DELETE", f"training_runs/{models[0]}/checkpoints/weights/w")

    async def after() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            await client.result(promises[0])
            client.sequence(models[1])
            first = await loss(client, models[1])
            client._next[models[0]] = 4
            assert first == await loss(client, models[0])
            assert service.tables.models[models[1]].base.learner.steps(models[1]) == 1

    async def lost() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            client._next[models[1]] = 2
            with pytest.raises(Failed, match="the checkpoint of request 1, which loaded weights, is missing"):
                await loss(client, models[1])

    models: list[str] = []
    promises: list[Any] = []
    run(before)
    with contextlib.closing(sqlite3.connect(tmp_path / "server/journal/requests.db")) as connection, connection:
        connection.execute("DELETE FROM results WHERE id = ?", [promises[0]["request_id"]])
    run(after)
    shutil.rmtree(tmp_path / "server/checkpoints/models/2")
    run(lost)


def test_replaced_weights_stay_until_the_result_is_on_disk(tmp_path: Path) -> None:
    """A process that ends between the files of weights and their result leaves what the name had before."""

    async def before() -> None:
        async with serving(server_config(tmp_path)) as (address, service), Client(address) as client:
            model = await client.model()
            await client.result(await client.submit("save_weights", model, path="w"))
            is_moved = threading.Event()
            service._training._thread.submit(is_moved.wait)
            promises.append(await client.submit("save_weights", model, path="w", overwrite=True))
            journal.rename(moved)
            is_moved.set()
            with pytest.raises(StorageError, match="moved, removed or replaced"):
                await service.failure

    async def after() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            await client.result(promises[0])

    promises: list[Any] = []
    journal, moved, saved = (
        tmp_path / "server" / name for name in ("journal/requests.db", "moved", "checkpoints/saved")
    )
    run(before)
    assert {place.name for place in saved.glob("1/*")} == {"1", "2"}
    moved.rename(journal)
    run(after)
    assert [place.name for place in saved.glob("1/*")] == ["2"]


def test_a_cancelled_request_for_samples_ends_and_stays_ended(tmp_path: Path) -> None:
    """The engine stops, nothing is recorded, and the result is the same after a start."""

    async def work() -> None:
        async with serving(config) as (address, service), Client(address) as client:
            model = await client.model()
            sampler = await client.sampler(model)
            long = await client.submit_sample(sampler, [5, 6, 7], 1024, max_tokens=60, stop=[])
            short = await client.submit_sample(sampler, [5, 6, 7], 1, stop=[])
            with pytest.raises(Refused, match="there is no request"):
                await client.post("cancel_future", request_id="unknown:0")
            with pytest.raises(Refused, match="only those for samples can be cancelled"):
                await client.post("cancel_future", request_id=f"{model}:1")
            for _ in range(2):  # the SDK may repeat it
                assert await client.post("cancel_future", request_id=long["request_id"]) == {}
            with pytest.raises(Failed, match="cancelled by its client"):
                await client.result(long)
            body = await client.result(short)
            assert len(Samples(body).tokens[0]) == 8
            assert await client.post("cancel_future", request_id=short["request_id"]) == {}
            assert await client.result(short) == body
            assert not service._unfinished
        async with serving(config) as (address, _), Client(address) as client:
            with pytest.raises(Failed, match="cancelled by its client"):
                await client.result(long)

    config = server_config(tmp_path)
    run(work)
    with sqlite3.connect(tmp_path / "server/journal/control.db") as database:
        assert database.execute("SELECT count(*) FROM episodes").fetchone() == (1,)


@pytest.mark.parametrize("rank", [4, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_samples_survive_the_death_of_the_engine(tmp_path: Path, rank: int) -> None:
    """Requests in flight are sampled again by the next process, with the same seeds."""

    async def work() -> None:
        async with serving(config) as (address, service), Client(address) as client:
            model = await client.model(rank=rank)
            await client.forward_backward(model, ROWS)
            await client.step(model)
            sampler = await client.sampler(model)
            asked = {"stop": [], "seed": 3, "max_tokens": 60}
            before = await client.sample(sampler, [5, 6, 7], 64, **asked)
            promise = await client.submit_sample(sampler, [5, 6, 7], 64, **asked, topk_prompt_logprobs=2)
            engine = service.parts.sampler._engine
            assert isinstance(engine, ProcessEngine)
            killed = engine.supervisor.process_id
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            after = Samples(await client.result(promise))
            assert after.tokens == before.tokens
            assert engine.supervisor.process_id != killed

    engine = {"max_context": 64, "slots": 16, "vllm": False, "replicas": 1}
    config = (server_config if rank else full_config)(tmp_path, engine=engine)
    run(work)


def test_external_weights_are_downloaded_without_a_key(tmp_path: Path) -> None:
    """As the SDK's `tinker checkpoint download` does: each file by its signed URL, until it expires."""

    def fetch(url: str) -> bytes:
        with urllib.request.urlopen(url) as response:
            return bytes(response.read())

    async def refused(url: str) -> None:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await asyncio.to_thread(fetch, url)

    async def work() -> None:
        config = server_config(tmp_path)
        async with serving(config) as (address, _), Client(address) as client:
            model = await client.model()
            await train(client, model, 1)
            expected = await weights(client, model, "same", tmp_path)
            saved = await client.result(await client.submit("save_weights_external", model, path="out"))
            assert saved["path"] == f"tinker://{model}/external_weights/out"
            listed = (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
            assert [one["checkpoint_type"] for one in listed] == ["sampler", "external"]
            where = f"training_runs/{model}/checkpoints/external_weights/out"
            answer = await client.get(f"{where}/external_weights_urls")
            place = tmp_path / "downloaded"
            place.mkdir()
            for name, url in answer["urls"].items():
                (place / name).write_bytes(await asyncio.to_thread(fetch, url))
            found = load_file(place / "adapter_model.safetensors")
            assert {name: value.tobytes() for name, value in found.items()} == {
                name: value.tobytes() for name, value in expected.items()
            }
            assert json.loads((place / "adapter_config.json").read_text())["r"] == 4
            url = answer["urls"]["adapter_model.safetensors"]
            expires = url.partition("expires=")[2].partition("&")[0]
            for changed in (
                url.replace(expires, str(int(expires) + 1)),
                url.replace("adapter_model.safetensors", "adapter_config.json"),
                url.replace("signature=", "signature=%C3%A9"),
                f"{address}/api/v1/sessions?{url.partition('?')[2]}",
            ):
                await refused(changed)
            with pytest.raises(Refused, match="no file"):
                await client.get(f"{where}/files/other")
            monkeypatch.setattr(SystemClock, "wall", lambda clock: float(expires) + 1)
            await refused(url)
            monkeypatch.undo()
            with pytest.raises(Refused, match="age_encryption_recipients is not served"):
                await client.submit("save_weights_external", model, path="x", age_encryption_recipients=["age1"])
            await client.send("DELETE", where)
            with pytest.raises(urllib.error.HTTPError, match="400"):
                await asyncio.to_thread(fetch, url)

    with pytest.MonkeyPatch.context() as monkeypatch:
        run(work)


def test_requests_run_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """A later request waits for the gap before it, and the weights are those of the order of the numbers."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            norms = []
            for number, order in enumerate(([1, 2, 3], [3, 1, 2])):
                model = await client.model(number)
                promises = {}
                for sequence in order:
                    if sequence == 3:
                        promises[3] = await client.post(
                            "optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 1e-2}
                        )
                    else:
                        body = encode_forward_backward(model, sequence, policy_rows(sequence), "ppo", {})
                        promises[sequence] = json.loads(await client.send("POST", "forward_backward", data=body))
                norms.append((await client.result(promises[3]))["metrics"]["grad_norm"])
            assert norms[0] == norms[1] > 0

    run(work)


def test_steps_that_are_repeated_out_of_order_are_detected(tmp_path: Path) -> None:
    """A journal in which two passes of different steps changed places leads to an error, not to other weights."""

    async def work() -> None:
        async with serving(config) as (address, _), Client(address) as client:
            models.append(await client.model())
            await train(client, models[0], 3)

    async def again() -> None:
        async with serving(config) as (address, _), Client(address) as client:
            promise = await client.post("optim_step", model_id=models[0], seq_id=10, adam_params={})
            with pytest.raises(Failed, match=r"the step of request 3 had a gradient norm of .* when it was repeated"):
                await client.result(promise)

    config = server_config(tmp_path, checkpoint={"every": 0})
    models: list[str] = []
    run(work)
    places = [f"{models[0]}:{sequence}" for sequence in (1, 4)]
    with contextlib.closing(sqlite3.connect(tmp_path / "server/journal/requests.db")) as connection, connection:
        columns = "id, route, subject, sequence, body, received_at"
        rows = [connection.execute(f"SELECT {columns} FROM requests WHERE id = ?", [id]).fetchone() for id in places]
        for row, other in zip(rows, reversed(rows), strict=True):
            values = [*row[:4], other[4], row[5]]
            connection.execute(
                "UPDATE requests SET body = ?, checksum = ? WHERE id = ?",
                [other[4], _checksum("requests", values), row[0]],
            )
    run(again)


async def trained_tenants(directory: Path, numbers: Sequence[int], most: int = 2) -> dict[int, dict[str, bytes]]:
    """The weights of models, by number, that trained by turns, of which some fit in memory."""
    config = server_config(directory, max_models=most)
    async with serving(config) as (address, service), Client(address) as client:
        models = {number: await client.model(number, seed=number) for number in numbers}
        for step in range(3):
            for number, model in models.items():
                await train(client, model, 1, first=10 * number + step)
        resident = [model for model in service.tables.models.values() if model.id in model.base.learner.loaded]
        assert len(resident) == min(most, len(numbers))
        found = {number: await weights(client, model, f"w{number}", directory) for number, model in models.items()}
    return {number: {name: value.tobytes() for name, value in one.items()} for number, one in found.items()}


@pytest.mark.exhaustive
def test_models_do_not_touch_each_other_and_leave_memory(tmp_path: Path) -> None:
    """Three models by turns, of which two fit in memory, end with the weights that each has alone."""
    together = asyncio.run(trained_tenants(tmp_path / "all", [0, 1, 2]))
    assert len({str(values) for values in together.values()}) == 3
    assert asyncio.run(trained_tenants(tmp_path / "one", [1]))[1] == together[1]
    assert asyncio.run(trained_tenants(tmp_path / "four", [0, 1, 2], most=4)) == together


@pytest.mark.exhaustive
def test_weights_are_saved_listed_loaded_and_deleted(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            model = await client.model()
            await train(client, model, 2)
            path = (await client.result(await client.submit("save_weights", model, path="two")))["path"]
            with pytest.raises(Refused, match="there are weights 'two' already"):
                await client.post("save_weights", model_id=model, seq_id=99, path="two")
            expected = await train(client, model, 1, first=2)
            info = await client.post("weights_info", tinker_path=path)
            assert info == {"base_model": MODEL, "is_lora": True, "lora_rank": 4}
            ends: list[dict[str, Any]] = []
            for number, optimizer in ((1, True), (2, False)):
                promise = await client.post(
                    "load_weights", session_id=client.session, model_seq_id=number, path=path, optimizer=optimizer
                )
                loaded = (await client.result(promise))["model_id"]
                assert (await train(client, loaded, 1, first=2)) == expected  # of the gradient, before the step
                ends.append(await weights(client, loaded, f"end{number}", tmp_path))
            expected_weights = await weights(client, model, "end0", tmp_path)
            for end, is_equal in zip(ends, (True, False), strict=True):
                equal = [np.array_equal(value, end[name]) for name, value in expected_weights.items()]
                assert all(equal) == is_equal
            checkpoint, sampler = (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
            assert sampler["checkpoint_type"] == "sampler"
            assert (checkpoint["checkpoint_id"], checkpoint["tinker_path"]) == ("weights/two", path)
            assert len((await client.get("training_runs"))["training_runs"]) == 3
            await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/two")
            assert len((await client.get("checkpoints"))["checkpoints"]) == 3
            assert not list((tmp_path / "server/checkpoints/saved").glob("*/*"))
            with pytest.raises(Refused, match="there are no weights"):
                await client.post("weights_info", tinker_path=path)

    run(work)


def test_only_programs_with_the_key_are_admitted(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            for key in ("", "tml-wrong", KEY[:-1]):
                stranger = Client(address, key)
                with pytest.raises(Refused, match="key") as refusal:
                    await stranger.post("create_session")
                assert refusal.value.status == 401
                await stranger.__aexit__()
            for headers, status in (
                ({"Authorization": f"Bearer {KEY}"}, 400),  # a second key
                ({"Origin": "http://localhost"}, 403),
                ({"Host": "rebound.example:80"}, 403),
            ):
                with pytest.raises(Refused) as refusal:
                    await client.send("GET", "sessions", headers=headers)
                assert refusal.value.status == status
            bearer = Client(address, "")
            await bearer.send("GET", "sessions", headers={"Authorization": f"Bearer {KEY}"})
            await bearer.__aexit__()

    run(work)


def test_a_trailer_is_refused_and_ends_its_connection(tmp_path: Path) -> None:
    """The HTTP library would add it to the headers of the connection's next request, whoever sent that."""

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _):
            host = address.removeprefix("http://")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(host.rpartition(":")[2]))
            head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {KEY}\r\n"
            writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nx-api-key: {KEY}\r\n\r\n".encode())
            writer.write(f"GET /api/v1/sessions HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answers = await reader.read()
            writer.close()
        assert answers.startswith(b"HTTP/1.1 411")
        assert answers.count(b"HTTP/1.1") == 1

    run(work)


def test_a_socket_is_its_owner_s_and_needs_no_key(tmp_path: Path) -> None:
    async def work() -> None:
        socket = tmp_path / "tinker.sock"
        async with (
            open_service(server_config(tmp_path), lambda line: None) as service,
            TinkerServer(service).listen(socket),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as http,
            http.get("http://localhost:1/api/v1/sessions") as answer,
        ):
            assert socket.stat().st_mode & 0o777 == 0o600
            assert (await answer.json())["sessions"] == []

    run(work)


def test_bodies_of_waiting_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests behind a gap wait without end; a start counts them again."""
    monkeypatch.setattr("agentrl_tinker.service.MAX_WAITING_BYTES", 450)
    models: list[str] = []

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            models.append(await client.model())
            for sequence in (2, 3, 4):
                body = encode_forward_backward(models[0], sequence, ROWS[:1], "cross_entropy")
                assert 150 < len(body) < 225
                if sequence < 4:
                    await client.send("POST", "forward_backward", data=body)
            with pytest.raises(Refused, match=r"2 requests with .* bytes wait already") as refusal:
                await client.send("POST", "forward_backward", data=body)
            assert refusal.value.status == 429

    async def again() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            body = encode_forward_backward(models[0], 4, ROWS[:1], "cross_entropy")
            with pytest.raises(Refused, match=r"2 requests with .* bytes wait already"):
                await client.send("POST", "forward_backward", data=body)

    run(work)
    run(again)


PROMPT = [5, 6, 7]


def sampled_row(tokens: Sequence[int], logprobs: Sequence[float], sequence_id: str, advantage: float) -> dict[str, Any]:
    """A row of a sample after `PROMPT`, as the cookbook's `rl_loop` makes it for `stable_reinforce`."""
    zeros = [0.0] * (len(PROMPT) - 1)
    spans = [("prompt", sequence_id, 1, len(PROMPT) - 1), ("sampled", sequence_id, 0, len(tokens))]
    columns = {"logprobs": [*zeros, *logprobs], "advantages": [*zeros, *[advantage] * len(tokens)]}
    return {**row([*PROMPT, *tokens], **columns), "provenance": spans}


async def recorded_rows(client: Client, sampler: str, **content: Any) -> list[dict[str, Any]]:
    """Sample four times with stability information; the rows to train on, with advantages that sum to 0."""
    promise = await client.submit_sample(sampler, PROMPT, 4, stop=[], seed=3, record_stability_info=True, **content)
    samples = Samples(await client.result(promise))
    made = zip(samples.tokens, samples.logprobs, promise["sample_sequence_ids"], (1.0, -1.0, 2.0, -2.0), strict=True)
    return [sampled_row(tokens, logprobs.tolist(), name, advantage) for tokens, logprobs, name, advantage in made]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stable_reinforce_reads_what_its_samples_recorded(tmp_path: Path, temperature: float) -> None:
    """After a step its gradient is not that of `importance_sampling`, and a model that is rebuilt from the journal
    repeats it."""

    async def work() -> None:
        norms = []
        for settings in ({}, {"max_models": 1}):
            config = server_config(tmp_path / str(len(norms)), **settings)
            async with serving(config) as (address, _), Client(address) as client:
                model = await client.model()
                await train(client, model, 1)
                rows = await recorded_rows(client, await client.sampler(model), temperature=temperature)
                plain = [{name: value for name, value in one.items() if name != "provenance"} for one in rows]
                for loss, given in (("importance_sampling", plain), ("stable_reinforce", rows)) * 2:
                    await client.forward_backward(model, given, loss)
                    norms.append(await client.step(model, rate=0.05))
                    if settings:  # another model takes its place, so that it is rebuilt from the journal
                        await client.model(len(norms))
        assert norms[:4] == norms[4:]
        assert norms[1] != pytest.approx(norms[0], rel=1e-3)

    run(work)


def test_stable_reinforce_of_the_sampling_weights_is_reinforce(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            norms = []
            for number, loss in enumerate(("importance_sampling", "stable_reinforce")):
                model = await client.model(number)
                rows = await recorded_rows(client, await client.sampler(model, number))
                given = rows if loss == "stable_reinforce" else [{**one, "provenance": ()} for one in rows]
                await client.forward_backward(model, given, loss)
                norms.append(await client.step(model))
            assert norms[1] == pytest.approx(norms[0], rel=1e-4)

    run(work)


def test_a_row_that_its_samples_do_not_confirm_fails_its_pass(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            model = await client.model()
            sampler = await client.sampler(model)
            (one, *_) = await recorded_rows(client, sampler)
            prompt, (kind, name, offset, length) = one["provenance"]
            promise = await client.submit_sample(sampler, PROMPT, 1, stop=[], seed=3)
            unrecorded = promise["sample_sequence_ids"][0]
            await client.result(promise)
            bad: list[tuple[dict[str, Any], str]] = [
                ({"provenance": [prompt, (kind, unrecorded, offset, length)]}, "there is no sequence"),
                ({"provenance": [prompt, (kind, "nonsense", offset, length)]}, "there is no sequence"),
                ({"provenance": [prompt, (kind, f"{name}9", offset, length)]}, "there is no sequence"),
                ({"provenance": [prompt, (kind, name, 1, length)]}, "are not the tokens"),
                ({"logprobs": [-1.0] * len(one["logprobs"])}, "are not those that were sampled"),
            ]
            for change, sentence in bad:
                promise = await client.forward_backward(model, [{**one, **change}], "stable_reinforce")
                with pytest.raises(Failed, match=f"datum 0: .*{sentence}"):
                    await client.result(promise)
            await client.forward_backward(model, [one], "stable_reinforce")
            assert await client.step(model) > 0

    run(work)


@pytest.mark.parametrize("content", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}])
def test_stability_information_of_a_cut_distribution_is_refused_before_it_is_sampled(
    server: tuple[str, str], content: dict[str, Any]
) -> None:
    async def call(client: Client, model: str) -> Any:
        session = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await client.post("create_sampling_session", **session))["sampling_session_id"]
        return await client.sample(sampler, PROMPT, record_stability_info=True, **content)

    _refused(server, "the whole distribution must be sampled", call)


TOO_LONG = row(list(range(5, 72)))


@pytest.mark.parametrize(
    ("rows", "loss", "sentence"),
    [
        ([], "ppo", "no rows"),
        (ROWS, "nonsense", "'nonsense' is not served here"),
        (ROWS, "ppo", "datum 0: the loss ppo needs logprobs"),
        ([row([1, 2], logprobs=[0.0], advantages=[float("nan")])], "ppo", "advantages has a value that is NaN"),
        ([row([1, 2], weights=[float("inf")])], "cross_entropy", "weights has a value that is NaN or infinite"),
        ([row([1, 2], weights=[1.0, 1.0])], "cross_entropy", "2 weights for 1 tokens"),
        ([row([1, 2], mask=[1.0])], "cross_entropy", "does not read 'mask'"),
        ([row([1, 2], logprobs=[0.0], advantages=[1.0], weights=[0.0])], "ppo", "the loss ppo does not read 'weights'"),
        ([row([1, 99_999])], "cross_entropy", "target_tokens has a token outside the vocabulary"),
        ([row([-1, 2])], "cross_entropy", "model_input has a token outside the vocabulary"),
        ([{"tokens": [1]}], "cross_entropy", "target_tokens are missing"),
        ([{"tokens": [1], "target_tokens": np.array([1.0])}], "cross_entropy", "no integers"),
        ([{"tokens": [1, 2], "target_tokens": np.array([1])}], "cross_entropy", "1 target_tokens for 2 input tokens"),
        ([TOO_LONG], "cross_entropy", "66 tokens, but this server's contexts have at most 64"),
        ([{"tokens": [1], "target_tokens": encode_tensor([1, 2], [1, 2])}], "cross_entropy", "2 dimensions"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(
    server: tuple[str, str], rows: list[Any], loss: str, sentence: str
) -> None:
    _refused(server, sentence, lambda client, model: client.forward_backward(model, rows, loss))


@pytest.mark.parametrize(
    ("route", "content", "sentence"),
    [
        ("optim_step", {"seq_id": 1, "adam_params": {"learning_rate": -1}}, "learning_rate = -1"),
        ("optim_step", {"seq_id": 1, "adam_params": {"beta1": 1.0}}, "beta1 = 1.0 is out of range"),
        ("optim_step", {"seq_id": 0, "adam_params": {}}, "sequence number 0"),
        ("save_weights", {"seq_id": 1, "path": "x", "ttl_seconds": 10**30}, "ttl_seconds: from 1 to"),
        ("save_weights_for_sampler", {"seq_id": 1, "sampling_session_seq_id": -1}, "sequence number -1"),
        ("optim_step", {"seq_id": 1, "optimizer_params": {"type": "dimuon"}}, "optimizer_params is not served"),
        ("save_weights", {"seq_id": 1, "path": "../x"}, "becomes part of a path"),
        ("save_weights_for_sampler", {"seq_id": 1}, "either a path or a sampling_session_seq_id"),
        ("load_weights", {"seq_id": 1, "path": "tinker://x/weights/y", "optimizer": True}, "there are no weights"),
        ("load_weights", {"seq_id": 1, "path": "/etc/passwd", "optimizer": True}, "there are no weights"),
    ],
)
def test_requests_that_cannot_be_executed_are_refused(
    server: tuple[str, str], route: str, content: dict[str, Any], sentence: str
) -> None:
    _refused(server, sentence, lambda client, model: client.post(route, model_id=model, **content))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"base_model": "nobody/model"}, "'nobody/model' is not served here; there are: calc"),
        ({"lora_config": {"rank": 99}}, "may have a rank from 1 to 8"),
        ({"lora_config": {"rank": 4, "seed": 1 << 64}}, "lora_config.seed: a seed is a number"),
        ({"user_metadata": {"text": "x" * (1 << 17)}}, "user_metadata: more than 65536 bytes"),
        ({"lora_config": None}, "give lora_config"),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False}}, "needs layers"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "is not served here"),
    ],
)
def test_models_that_cannot_be_made_are_refused(
    server: tuple[str, str], content: dict[str, Any], sentence: str
) -> None:
    async def create(client: Client, model: str) -> Any:
        whole = {"base_model": MODEL, "lora_config": {"rank": 4}, **content}
        return await client.post("create_model", session_id=client.session, model_seq_id=7, **whole)

    _refused(server, sentence, create)


@pytest.mark.parametrize(
    ("prompt", "content", "sentence"),
    [
        ([], {}, "it has no tokens"),
        ([99_999], {}, "outside the vocabulary"),
        ([1 << 40], {}, "outside the vocabulary"),
        ([1] * 64, {}, "64 tokens"),
        ([1], {"max_tokens": 0}, "max_tokens = 0"),
        ([1], {"temperature": -1.0}, "temperature = -1.0"),
        ([1], {"temperature": 1e-300}, "temperature = 1e-300"),
        ([1], {"top_k": 1 << 70}, "top_k: -1, 0"),
        ([1], {"stop": [1 << 70]}, "stop: a token lies outside the vocabulary"),
        ([1], {"top_p": 0.0}, "top_p = 0.0"),
        ([1], {"stop": [""]}, "none of them empty"),
        ([1], {"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n = 3"),
        ([1, 2], {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs = -1: for 2 tokens, from 0 to 524288"),
        ([1, 2], {"topk_prompt_logprobs": 1 << 40}, "topk_prompt_logprobs = 1099511627776"),
        ([1], {"topk_sample_logprobs": 1 << 20}, "topk_sample_logprobs = 1048576: for 9 tokens"),
        ([1] * 50, {"max_tokens": 1, "topk_sample_logprobs": 1 << 20}, "for 51 tokens, from 0 to 20560"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(
    server: tuple[str, str], prompt: list[int], content: dict[str, Any], sentence: str
) -> None:
    async def sample(client: Client, model: str) -> Any:
        created = await client.post(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=MODEL
        )
        return await client.sample(created["sampling_session_id"], prompt, **content)

    _refused(server, sentence, sample)


def test_bodies_that_are_too_long_or_malformed_are_refused(server: tuple[str, str]) -> None:
    bodies = {
        b"x" * (9 << 20): "longer than 8388608 bytes",
        b"{": "not a JSON object",
        b"[]": "not a JSON object",
        b'{"model_id": 3, "seq_id": 1, "adam_params": {}}': "model_id",
        b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": NaN}}': "not a JSON object",
    }
    for body, sentence in bodies.items():
        _refused(
            server, sentence, lambda client, model, body=body: client.send("POST", "optim_step", data=io.BytesIO(body))
        )
    _refused(server, "is not served here", lambda client, model: client.post("unknown"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server in another thread, and a model, which requests that are refused leave as they are."""
    import threading

    ready: dict[str, Any] = {}
    has_started, directory = threading.Event(), tmp_path_factory.mktemp("server")

    async def work() -> None:
        ready["stop"], ready["loop"] = asyncio.Event(), asyncio.get_running_loop()
        async with serving(server_config(directory)) as (address, service):
            async with Client(address) as client:
                ready["server"] = address, await client.model()
            has_started.set()
            await ready["stop"].wait()
            (model,) = service.tables.models.values()
            assert model.base.learner.steps(model.id) == 0
            assert not model.has_gradient
            assert not model.waiting
            assert not model.saved

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    assert has_started.wait(60)
    yield ready["server"]
    ready["loop"].call_soon_threadsafe(ready["stop"].set)
    thread.join()


def _refused(server: tuple[str, str], sentence: str, call: Callable[[Client, str], Awaitable[Any]]) -> None:
    """A request gets an HTTP error of the client's with a sentence."""

    async def work() -> None:
        async with Client(server[0]) as client:
            with pytest.raises(Refused, match=sentence) as refusal:
                await call(client, server[1])
            assert refusal.value.status in (400, 404, 413)

    run(work)


@pytest.mark.parametrize("key", ["short", "tml-short", "sk-0123456789abcdef01234567"])
def test_a_key_that_clients_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "server.toml").write_text(CALCULATOR)
    monkeypatch.setenv("TINKER_API_KEY", key)
    assert command.main([str(tmp_path / "server.toml"), f"--directory={tmp_path}"]) == 2
    assert "TINKER_API_KEY holds no key of a client" in capsys.readouterr().err
