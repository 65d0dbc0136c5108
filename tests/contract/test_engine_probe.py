"""The canary of a version, answered by the embedded engine: wrong weights of the right shapes are found by it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import EngineError
from agentrl.core.records import WeightsRef
from agentrl.engines.canary import CANARY_KEY, Canary
from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import (
    ModelZoo,
    canary_of,
    check_logprobs,
    check_refused,
    load_engine,
    prompt,
    request,
    version,
    write_adapter,
    write_full,
)
from tests.contract.test_engine_adapters import with_adapter

Tensors = dict[str, torch.Tensor]


def moved(by: float) -> Callable[[Tensors], None]:
    """A small update of an adapter: all its B a little larger."""

    def move(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.add_(by)

    return move


def vanished(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()


def publish_adapter(
    zoo: ModelZoo,
    directory: Path,
    step: int,
    *,
    seed: int,
    trained: Callable[[Tensors], None] = lambda tensors: None,
    served: Callable[[Tensors], None] | None = None,
    served_seed: int | None = None,
) -> WeightsRef:
    """A version with the canary of the adapter that was `trained`, and the tensors of one that may be another."""
    base = zoo.load()
    as_trained = write_adapter(directory / "trained", version(step), base, seed=seed, change=trained)
    canary = canary_of(with_adapter(zoo, as_trained), zoo.load())
    return write_adapter(
        directory / "served",
        version(step),
        base,
        seed=seed if served_seed is None else served_seed,
        change=served or trained,
        metadata=canary.metadata(),
    )


def tensors_of(zoo: ModelZoo, seed: int) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in zoo.load(seed=seed).state_dict().items() if name != "lm_head.weight"}


async def check_serves(engine: EmbeddedEngine, model: Any, step: int) -> None:
    completion = await engine.open(f"after {step}", "solver").generate(request(f"after {step}", prompt(12)))
    assert completion.spans[0].version == version(step)
    check_logprobs(model, prompt(12), completion)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_a_version_that_answers_its_probe_is_served(zoo: ModelZoo, tmp_path: Path, kind: str, dtype: str) -> None:
    async def main() -> None:
        engine = load_engine(zoo, dtype=dtype)
        for step in (1, 2):
            if kind == "adapter":
                weights = publish_adapter(zoo, tmp_path / f"{step}", step, seed=1, trained=moved(1e-4 * step))
            else:
                canary = canary_of(zoo.load(seed=step), zoo.load())
                tensors = {name: each.to(getattr(torch, dtype)) for name, each in tensors_of(zoo, step).items()}
                weights = write_full(tmp_path / f"{step}", version(step), tensors, canary=canary)
            await engine.serve([weights])
            completion = await engine.open(f"s{step}", "solver").generate(request(f"r{step}", prompt(12)))
            assert completion.spans[0].version == version(step)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("refresh", ["token", "lazy"])
def test_an_adapter_that_is_another_is_refused(zoo: ModelZoo, tmp_path: Path, refresh: str) -> None:
    async def main() -> None:
        engine = load_engine(zoo, adapter_slots=2 if refresh == "lazy" else 1, refresh=refresh)
        first = publish_adapter(zoo, tmp_path / "1", 1, seed=1)
        await engine.serve([first])
        session = engine.open("s", "solver")
        await session.generate(request("before", prompt(12)))
        wrong = {
            "those the trainer computed": publish_adapter(zoo, tmp_path / "2", 2, seed=2, served_seed=3),
            r"as solver@0\.1 would": publish_adapter(
                zoo, tmp_path / "3", 3, seed=1, trained=moved(1e-3), served=lambda tensors: None
            ),
            "as the model the run began with would": publish_adapter(zoo, tmp_path / "4", 4, seed=4, served=vanished),
        }
        for message, weights in wrong.items():
            with pytest.raises(EngineError, match=f"{weights.version} refused: .*{message}"):
                await engine.serve([weights])
            with pytest.raises(EngineError, match="is not served here"):
                engine.open("pinned", "solver", pin=weights.version)
            await check_serves(engine, with_adapter(zoo, first), 1)
        completion = await session.generate(request("later", prompt(12)))
        check_logprobs(with_adapter(zoo, first), prompt(12), completion)
        session.close()
        last = publish_adapter(zoo, tmp_path / "5", 5, seed=5)
        await engine.serve([last])
        await check_serves(engine, with_adapter(zoo, last), 5)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("kept", [False, True])
def test_full_weights_that_are_others_are_refused_and_those_before_come_back(
    zoo: ModelZoo, tmp_path: Path, kept: bool
) -> None:
    async def main() -> None:
        engine = load_engine(zoo)
        first = zoo.full(version(1), seed=1)
        pinned = [first] if kept else []
        await engine.serve([first], pinned)
        canary = canary_of(zoo.load(seed=2), zoo.load())
        running = asyncio.ensure_future(
            engine.open("s", "solver").generate(request("a", prompt(12), max_tokens=100, seed=1))
        )
        for step, seed, message in ((2, 3, "those the trainer computed"), (3, 0, "as the model the run began with")):
            wrong = write_full(tmp_path / f"{step}", version(step), tensors_of(zoo, seed), canary=canary)
            with pytest.raises(EngineError, match=message):
                await engine.serve([wrong], pinned)
        completion = await running
        assert [span.version.step for span in completion.spans] == [1]
        check_logprobs(zoo.load(seed=1), prompt(12), completion)
        await engine.serve([write_full(tmp_path / "4", version(4), tensors_of(zoo, 2), canary=canary)])
        await check_serves(engine, zoo.load(seed=2), 4)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_swap_that_fails_after_its_caller_is_gone_is_nobodys_error_and_what_was_asked_next_waits_for_it(
    zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancellations: int
) -> None:
    heard: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["message"]))
        engine = load_engine(zoo)
        canary = canary_of(zoo.load(seed=2), zoo.load())
        wrong = write_full(tmp_path / "wrong", version(1), tensors_of(zoo, 3), canary=canary)
        swapping = asyncio.Event()
        answer = engine.answer

        async def answer_late(serving: Any, asked: Canary) -> Any:
            swapping.set()
            await asyncio.sleep(0.05)
            return await answer(serving, asked)

        monkeypatch.setattr(engine, "answer", answer_late)
        update = asyncio.ensure_future(engine.serve([wrong]))
        await swapping.wait()
        for _ in range(cancellations):
            update.cancel()
            await asyncio.sleep(0)
        after = asyncio.ensure_future(
            engine.serve([write_full(tmp_path / "2", version(2), tensors_of(zoo, 2), canary=canary)])
        )
        with pytest.raises(asyncio.CancelledError):
            await update
        await after
        await check_serves(engine, zoo.load(seed=2), 2)
        await engine.close()

    asyncio.run(main())
    gc.collect()
    assert heard == []


def said(**changes: Any) -> str:
    sane = {"contexts": [[1, 2]], "token_ids": [3, 4], "logprobs": [[-2.0, -1.0]], "start_logprobs": [[-2.0, -1.0]]}
    return json.dumps({**sane, **changes})


HOSTILE = {
    "no json": ("\x1b[31m{", "cannot be read"),
    "other fields": (said(more=1), "cannot be read"),
    "a field too few": (said().replace("start_", "begin_"), "cannot be read"),
    "nan": (said().replace("-1.0", "NaN"), "cannot be read"),
    "infinite": (said(logprobs=[[0.0, -1e300]]), "log-probabilities outside"),
    "likelier than sure": (said(logprobs=[[0.0, 1.0]]), "log-probabilities outside"),
    "ragged": (said(contexts=[[1], [1, 2]]), "cannot be read"),
    "flat": (said(contexts=[1, 2]), "cannot be read"),
    "no contexts": (said(contexts=[], logprobs=[], start_logprobs=[]), "contexts of shape"),
    "empty contexts": (said(contexts=[[]]), "contexts of shape"),
    "many contexts": (said(contexts=[[1]] * 65, logprobs=[[0.0]] * 65, start_logprobs=[[0.0]] * 65), "of shape"),
    "long contexts": (said(contexts=[[1] * 513]), "contexts of shape"),
    "no tokens": (said(token_ids=[], logprobs=[[]], start_logprobs=[[]]), "0 tokens"),
    "many tokens": (said(token_ids=[1] * 129, logprobs=[[0.0] * 129], start_logprobs=[[0.0] * 129]), "129 tokens"),
    "lengths": (said(logprobs=[[0.0]]), "2 tokens and log-probabilities of shapes"),
    "huge": (" " * (1 << 20) + said(), "cannot be read"),
    "negative token": (said(token_ids=[1, -2]), "negative, or beyond 32 bits"),
    "token of 65 bits": (said(token_ids=[1, 1 << 65]), "cannot be read"),
    "another vocabulary": (said(contexts=[[1, 1 << 20]]), "outside the model's vocabulary"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_probe_that_is_none_is_refused(zoo: ModelZoo, tmp_path: Path, case: str) -> None:
    text, message = HOSTILE[case]
    weights = write_adapter(tmp_path / "1", version(1), zoo.load(), seed=1, metadata={CANARY_KEY: text})
    asyncio.run(check_refused(load_engine(zoo), zoo, weights, message))
