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


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


def penalized(logits: NDArray[np.float64], context: NDArray[np.int32], turn: list[int]) -> NDArray[np.float64]:
    """Logits after the penalties, token by token."""
    made = logits.copy()
    for token in range(len(logits)):
        if token in turn or token in context:
            made[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        if token in turn:
            made[token] -= 0.7 + 0.4 * turn.count(token)
    return made


def model_logits(model: Any, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False).logits[0]
    found: NDArray[np.float64] = logits.double().numpy()
    return found


def test_greedy_and_penalized_calls_share_a_batch_with_others(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = EmbeddedEngine.load(versions=START, model_path=str(zoo.directory()), max_context=256)
        calls = {
            "plain": {},
            "greedy": {"temperature": 0.0, "top_p": 0.5},
            "penalized": {"temperature": 0.9, **PENALTIES},
            "greedy, penalized": {"temperature": 0.0, **PENALTIES},
        }
        contexts = {name: prompt(9, number) for number, name in enumerate(calls)}
        sent = [
            engine.open(name, "solver").generate(request(name, contexts[name], max_tokens=TOKENS, **sampling))
            for name, sampling in calls.items()
        ]
        found = dict(zip(calls, await asyncio.gather(*sent), strict=True))
        alone = await engine.open("alone", "solver").generate(request("alone", contexts["plain"], max_tokens=TOKENS))
        assert alone.token_ids.tolist() == found["plain"].token_ids.tolist()
        model = zoo.load()
        for name, completion in found.items():
            context, tokens = contexts[name], completion.token_ids.tolist()
            logits = model_logits(model, np.concatenate([context, completion.token_ids]))[len(context) - 1 :]
            for number, (token, logprob) in enumerate(zip(tokens, completion.logprobs, strict=True)):
                row = logits[number]
                if "penalized" in name:
                    row = penalized(row, context, tokens[:number])
                if "greedy" in name:
                    assert (token, logprob) == (int(row.argmax()), 0)
                else:
                    row = row / calls[name].get("temperature", 1.0)
                    expected = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
                    np.testing.assert_allclose(logprob, expected, atol=1e-4)
        await engine.close()

    asyncio.run(main())


def test_a_turn_that_continues_keeps_its_penalties(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = EmbeddedEngine.load(versions=START, model_path=str(zoo.directory()), max_context=256)
        context = prompt(9)
        whole = await engine.open("a", "solver").generate(request("a", context, max_tokens=20, seed=3, **PENALTIES))
        first = whole.token_ids[:7]
        rest = await engine.open("b", "solver").generate(
            request("b", np.concatenate([context, first]), max_tokens=13, seed=3, sampled_before=7, **PENALTIES)
        )
        assert whole.token_ids.tolist() == [*first.tolist(), *rest.token_ids.tolist()]
        await engine.close()

    asyncio.run(main())


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
