"""The canary of a version, answered by vLLM with full weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import EngineError
from agentrl.core.tokens import Tokens
from tests.contract.engine_kinds import ModelZoo, canary_of, check_logprobs, prompt, request, version, write_full
from tests.contract.test_engine_vllm_full import in_flight, steps, tensors_of
from tests.contract.vllm_server import MakeVllm


@pytest.mark.parametrize("refresh", ["token", "turn"])
def test_weights_that_are_others_are_found_by_their_probe_and_what_they_sampled_is_forgotten(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, refresh: str
) -> None:
    async def main() -> None:
        engine = make_vllm(refresh=refresh)
        context = prompt(40)
        heard: list[tuple[int, int]] = []

        def on_delta(request_id: str, tokens: Tokens) -> None:
            heard.extend((token, tokens.spans[0].version.step) for token in tokens.token_ids.tolist())

        first, second = (canary_of(zoo.load(seed=seed), zoo.load()) for seed in (1, 2))
        await engine.serve([write_full(tmp_path / "1", version(1), tensors_of(zoo, 1), canary=first)])
        running = asyncio.ensure_future(
            engine.open("s", "solver").generate(request("a", context, max_tokens=300), on_delta)
        )
        await in_flight(engine)
        for seed, message in ((3, "those the trainer computed"), (1, r"as solver@0\.1 would")):
            other = write_full(tmp_path / f"other{seed}", version(2), tensors_of(zoo, seed), canary=second)
            with pytest.raises(EngineError, match=rf"solver@0\.2 refused: .*{message}"):
                await engine.serve([other])
            assert not await make_vllm.llm.is_paused()
        completion = await running
        assert steps(completion) == [1]
        assert len(completion.token_ids) == 300
        check_logprobs(zoo.load(seed=1), context, completion)
        tokens = [int(token) for token in completion.token_ids]
        assert heard == [(token, 1) for token in tokens][: len(heard)]
        running = asyncio.ensure_future(engine.open("t", "solver").generate(request("b", context, max_tokens=300)))
        await in_flight(engine)
        await engine.serve([write_full(tmp_path / "2", version(2), tensors_of(zoo, 2), canary=second)])
        assert steps(await running) == ([1, 2] if refresh == "token" else [1])
        check_logprobs(zoo.load(seed=2), context, await engine.open("u", "solver").generate(request("c", context)))
        await engine.close()

    make_vllm.run(main)


def mixed(zoo: ModelZoo) -> dict[str, Any]:
    """Half an update: every other tensor is of the version before."""
    before, right = tensors_of(zoo, 1), tensors_of(zoo, 2)
    return {name: before[name] if number % 2 else right[name] for number, name in enumerate(right)}


FAULTS: dict[str, tuple[Callable[[ModelZoo], dict[str, Any]], str]] = {
    "never delivered": (lambda zoo: tensors_of(zoo, 1), r"as solver@0\.1 would"),
    "half an update": (mixed, "those the trainer computed"),
    "another base": (lambda zoo: tensors_of(zoo, 3), "those the trainer computed"),
    "rounded to eight bits": (
        lambda zoo: {name: each.to(torch.float8_e4m3fn).float() for name, each in tensors_of(zoo, 2).items()},
        "those the trainer computed",
    ),
    "another dtype": (
        lambda zoo: {name: each.bfloat16() for name, each in tensors_of(zoo, 2).items()},
        "in bfloat16, and the engine computes in float32",
    ),
}
"""Faults between trainer and engine: the tensors that arrive in place of version 2's."""


def test_every_fault_is_found_before_a_token_leaves(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine, context = make_vllm(), prompt(40)
        first, second = (canary_of(zoo.load(seed=seed), zoo.load()) for seed in (1, 2))
        await engine.serve([write_full(tmp_path / "1", version(1), tensors_of(zoo, 1), canary=first)])
        for number, (fault, (tensors, message)) in enumerate(FAULTS.items()):
            weights = write_full(tmp_path / f"fault{number}", version(2), tensors(zoo), canary=second)
            with pytest.raises(EngineError, match=rf"solver@0\.2 refused: .*{message}"):
                await engine.serve([weights])
            completion = await engine.open(fault, "solver").generate(request(fault, context))
            assert steps(completion) == [1]
        check_logprobs(zoo.load(seed=1), context, completion)
        await engine.close()

    make_vllm.run(main)
