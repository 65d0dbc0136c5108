"""The sets of tokens that vLLM's model runner V2 says its filters kept, against a naive filter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contract.engine_kinds import START, ModelZoo, plain_logprobs, prompt, request, version
from tests.contract.test_engine_adapters import with_adapter
from tests.contract.test_engine_embedded import filtered_logprobs
from tests.contract.test_engine_vllm_experts import whole
from tests.contract.test_engine_vllm_full import in_flight
from tests.contract.vllm_server import MakeVllm

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion

FILTERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.3},
]


def kept_sets(completion: Completion) -> list[set[int]]:
    mask = completion.kept
    assert mask is not None
    assert mask.counts.sum() == len(mask.ids)
    return [set(each.tolist()) for each in np.split(mask.ids, np.cumsum(mask.counts)[:-1])]


def naive_sets(model: Any, context: Int32Array, completion: Completion, filters: dict[str, Any]) -> list[set[int]]:
    scores = plain_logprobs(model, whole(context, completion))[len(context) - 1 :]
    return [set(np.flatnonzero(np.isfinite(filtered_logprobs(row, **filters))).tolist()) for row in scores]


def test_kept_sets_are_those_of_a_naive_filter(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    """Calls of both policies in one batch, each with another filter, beside one without."""

    async def main() -> None:
        engine: Any = make_vllm()
        assert engine.capabilities.sampling_mask
        policies = [name for name in START if name in engine.versions.current]
        contexts = [prompt(10 + at, at) for at in range(len(FILTERS))]
        calls = [
            engine.open(f"s{at}", policies[at % len(policies)]).generate(
                request(f"r{at}", context, seed=at, max_tokens=8, **filters)
            )
            for at, (context, filters) in enumerate(zip(contexts, FILTERS, strict=True))
        ]
        plain = engine.open("plain", "solver").generate(request("plain", prompt(9), max_tokens=8))
        unfiltered, *completions = await asyncio.gather(plain, *calls)
        assert unfiltered.kept is None
        model = zoo.load()
        for context, filters, completion in zip(contexts, FILTERS, completions, strict=True):
            sets = kept_sets(completion)
            assert sets == naive_sets(model, context, completion, filters)
            scores = plain_logprobs(model, whole(context, completion))[len(context) - 1 :]
            for row, token, logprob in zip(scores, completion.token_ids, completion.logprobs, strict=True):
                np.testing.assert_allclose(logprob, filtered_logprobs(row, **filters)[token], atol=1e-4)
        await engine.close()

    make_vllm.run(main)


def test_kept_sets_survive_an_update_and_an_abort(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    filters: dict[str, Any] = {"top_k": 20, "top_p": 0.9}

    async def main() -> None:
        engine: Any = make_vllm(keep_kv=False)
        running = asyncio.ensure_future(
            engine.open("s", "solver").generate(request("r", prompt(20), max_tokens=300, **filters))
        )
        await in_flight(engine)
        weights = make_vllm.publish(version(1), seed=1)
        await engine.serve([weights])
        await in_flight(engine)
        engine.abort("r")
        completion = await running
        assert completion.finish_reason == "abort"
        assert [span.version.step for span in completion.spans] == [0, 1]
        sets = kept_sets(completion)
        assert len(sets) == len(completion.token_ids)
        newer = zoo.load(seed=1) if weights.kind == "full" else with_adapter(zoo, weights)
        for (start, stop, _), model in zip(completion.spans, (zoo.load(), newer), strict=True):
            naive = naive_sets(model, prompt(20), completion, filters)
            assert sets[start:stop] == naive[start:stop]
        await engine.close()

    make_vllm.run(main)
