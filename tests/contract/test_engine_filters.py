"""All sampling filters at once: every engine that filters applies them in the documented order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from agentrl.core.ports import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.forward import sampling_filter_mask
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from tests.contract.engine_kinds import START, ModelZoo, plain_logprobs, prompt, request
from tests.contract.test_engine_vllm_masks import kept_sets
from tests.contract.warm_processes import WarmPlacement

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALL: dict[str, Any] = {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.3}
"""Values at which the place of top-p among the three shows in the kept sets."""
TOKENS = 40


def _min_p(probabilities: NDArray[np.float64], value: float) -> NDArray[np.bool_]:
    return probabilities >= value * probabilities.max()


def _top_k(probabilities: NDArray[np.float64], value: int) -> NDArray[np.bool_]:
    return probabilities >= np.sort(probabilities)[-value]


def _top_p(probabilities: NDArray[np.float64], value: float) -> NDArray[np.bool_]:
    order = np.argsort(-probabilities, kind="stable")
    kept = np.zeros(len(probabilities), np.bool_)
    kept[order[: int(np.searchsorted(np.cumsum(probabilities[order]), value)) + 1]] = True
    return kept


_FILTERS: dict[str, Callable[..., NDArray[np.bool_]]] = {"min-p": _min_p, "top-k": _top_k, "top-p": _top_p}


def documented_order() -> tuple[str, ...]:
    """The filters in the order that the port documents."""
    names = re.search(r"order: temperature, ([a-z, -]+)[.;]", SamplingParams.__doc__ or "")
    assert names is not None
    return tuple(names[1].split(", "))


def naive_set(scores: NDArray[Any], order: tuple[str, ...], parameters: dict[str, Any]) -> set[int]:
    """Apply one filter after the other to the distribution that the one before has left, renormalized."""
    logits = scores.astype(np.float64) / parameters["temperature"]
    probabilities = np.exp(logits - logits.max())
    for name in order:
        probabilities = probabilities / probabilities.sum()
        kept = _FILTERS[name](probabilities, parameters[name.replace("-", "_")])
        probabilities = np.where(kept, probabilities, 0.0)
    return set(np.flatnonzero(probabilities).tolist())


def check_sets(found: list[set[int]], scores: NDArray[Any]) -> None:
    """The sets are those of the documented order, and of no other but min-p and top-k exchanged: these two commute."""
    agreeing = {
        order
        for order in permutations(_FILTERS)
        if found == [naive_set(row, order, ALL) for row in scores[: len(found)]]
    }
    first, second, last = documented_order()
    assert agreeing == {(first, second, last), (second, first, last)}


def test_the_embedded_filter_applies_the_documented_order() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 97)) * 4)
    columns = {name: np.full(64, ALL[name], dtype) for name, dtype in (("top_k", np.int64), ("min_p", np.float32))}
    mask = sampling_filter_mask(scores / ALL["temperature"], top_p=np.full(64, ALL["top_p"], np.float32), **columns)
    check_sets([set(np.flatnonzero(row).tolist()) for row in mask.numpy()], scores.numpy())


async def _check_engine(engine: Any, zoo: ModelZoo) -> None:
    """Of one conversation, beside another without filters."""
    context = prompt(10)
    plain = engine.open("plain", "solver").generate(request("plain", prompt(9), max_tokens=8))
    call = engine.open("s", "solver").generate(request("r", context, max_tokens=TOKENS, **ALL))
    completion, _ = await asyncio.gather(call, plain)
    assert len(completion.token_ids) == TOKENS
    scores = plain_logprobs(zoo.load(), np.concatenate([context, completion.token_ids]))[len(context) - 1 :]
    sets = kept_sets(completion)
    check_sets(sets, scores)
    for row, kept, token, logprob in zip(scores, sets, completion.token_ids, completion.logprobs, strict=True):
        tempered = row.astype(np.float64) / ALL["temperature"]
        expected = tempered[token] - np.log(np.exp(tempered[sorted(kept)]).sum())
        np.testing.assert_allclose(logprob, expected, atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("kind", ["embedded", "embedded in a process"])
def test_an_engine_applies_the_documented_order(zoo: ModelZoo, kind: str) -> None:
    options: dict[str, Any] = {"model_path": str(zoo.directory()), "max_context": 256, "capture_mask": True}

    async def main() -> None:
        if kind == "embedded":
            engine: Any = EmbeddedEngine.load(versions=START, **options)
        else:
            program = ChildProgram("agentrl.engines.embedded.engine:EmbeddedEngine.load", options)
            engine = await ProcessEngine(program, START, placement=WarmPlacement()).ready()
        await _check_engine(engine, zoo)

    asyncio.run(main())
