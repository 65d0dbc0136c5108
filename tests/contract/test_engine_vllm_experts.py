"""The experts that vLLM's model runner V2 returns, against the routers of transformers; on a mixture of experts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentrl.core.tokens import KeptSets, TrajectoryRow
from tests.contract.engine_kinds import ModelZoo, prompt, request, version
from tests.contract.test_engine_capture import plain_routing
from tests.contract.test_engine_routing_rows import conversation
from tests.contract.test_engine_to_trainer import difference, model_of, trained
from tests.contract.test_engine_vllm_full import in_flight
from tests.contract.vllm_server import MakeVllm
from tests.support.builders import spans_of

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion


def whole(context: Int32Array, completion: Completion) -> Int32Array:
    joined: Int32Array = np.concatenate([context, completion.token_ids])
    return joined


def test_each_turn_returns_the_experts_of_its_new_positions(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    model = zoo.load()

    async def talk(engine: Any, number: int) -> int:
        session, begin, cached = engine.open(f"s{number}", "solver"), prompt(40, 0), 0
        context, covered = np.concatenate([begin, prompt(3 + number, number)]), 0
        for turn in range(3):
            completion = await session.generate(request(f"{number}-{turn}", context, seed=number, max_tokens=6))
            context = whole(context, completion)
            rows = completion.experts.rows
            assert rows.shape[1:] == (2, 2)
            assert completion.experts.start == covered
            covered += len(rows)
            assert covered == len(context) - 1
            assert np.array_equal(rows, plain_routing(model, context)[completion.experts.start : covered])
            cached = completion.cached_tokens
            context = np.concatenate([context, prompt(4, 60 + turn)])
        session.close()
        return cached

    async def main() -> None:
        engine: Any = make_vllm()
        assert engine.capabilities.expert_routing
        cached = [await talk(engine, 0), *await asyncio.gather(*(talk(engine, number) for number in (1, 2, 3)))]
        assert min(cached) >= 32, "prefix-cached positions are among them"
        await engine.close()

    make_vllm.run(main)


def test_another_context_returns_the_experts_from_where_it_differs(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine: Any = make_vllm()
        session = engine.open("s", "solver")
        await session.generate(request("a", prompt(50)))
        context = np.concatenate([prompt(50)[:37], prompt(9, 5)])
        for name in ("b", "c"):
            again = await session.generate(request(name, context))
            assert again.experts.start == (37 if name == "b" else len(context) - 1)
            expected = plain_routing(zoo.load(), whole(context, again))[again.experts.start : -1]
            assert np.array_equal(again.experts.rows, expected)
        row = await session.generate(request("d", context, row=1))
        assert row.experts.start == 0, "the trainer reads each row alone"
        assert np.array_equal(row.experts.rows, plain_routing(zoo.load(), whole(context, row))[:-1])
        await engine.close()

    make_vllm.run(main)


def test_an_aborted_call_and_its_continuation_have_their_experts(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> None:
        engine: Any = make_vllm()
        session, begun = engine.open("s", "solver"), asyncio.Event()
        call = request("a", prompt(10), max_tokens=300)
        running = asyncio.ensure_future(session.generate(call, lambda *delta: begun.set()))
        await begun.wait()
        engine.abort("a")
        first = await running
        assert first.finish_reason == "abort"
        assert 0 < len(first.token_ids) < 300
        context = whole(prompt(10), first)
        rest = await session.generate(request("b", context, max_tokens=5, sampled_before=len(first.token_ids)))
        assert len(first.experts.rows) == rest.experts.start == len(context) - 1
        rows = np.concatenate([first.experts.rows, rest.experts.rows])
        assert np.array_equal(rows, plain_routing(zoo.load(), whole(context, rest))[:-1])
        await engine.close()

    make_vllm.run(main)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_an_update_within_a_turn_keeps_the_experts_of_earlier_tokens(
    make_vllm: MakeVllm, zoo: ModelZoo, keep_kv: bool
) -> None:
    async def main() -> None:
        engine: Any = make_vllm(keep_kv=keep_kv)
        session = engine.open("s", "solver")
        running = asyncio.ensure_future(session.generate(request("r", prompt(20), max_tokens=60)))
        await in_flight(engine)
        await engine.serve([zoo.full(version(1), seed=1)])
        completion = await running
        assert [span.version.step for span in completion.spans] == [0, 1]
        context = whole(prompt(20), completion)
        before, rows = 20 + completion.spans[0].stop - 1, completion.experts.rows
        newer = plain_routing(zoo.load(seed=1), context)[:-1]
        assert np.array_equal(rows[:before], plain_routing(zoo.load(), context)[:before])
        if keep_kv:
            assert completion.experts.restarts == ()
            assert len(rows) == len(context) - 1
        else:
            assert completion.experts.restarts == ((before, 0),)
            assert np.array_equal(rows[before:], newer)
        again = await session.generate(request("next", context, max_tokens=4))
        if keep_kv:  # what older weights computed is computed again
            assert again.experts.start == 0
            assert np.array_equal(again.experts.rows[: len(newer)], newer)
        else:
            assert again.experts.start == len(newer)
        await engine.close()

    make_vllm.run(main)


def test_each_token_has_the_experts_of_the_weights_that_sampled_it(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    async def main() -> list[TrajectoryRow]:
        engine: Any = make_vllm(keep_kv=False)
        running = [asyncio.ensure_future(conversation(engine, number, 3)) for number in range(4)]
        for step in (1, 2, 3):
            await in_flight(engine)
            await engine.serve([zoo.full(version(step), seed=step)])
            engine.abort(f"0-{step - 1}")
        rows = await asyncio.gather(*running)
        await engine.close()
        return rows

    rows: list[TrajectoryRow] = []

    async def keep() -> None:
        rows.extend(await main())

    make_vllm.run(keep)
    assert max(len(spans_of(row)) for row in rows) > 1, "no update fell into a row"
    models = {step: zoo.load(seed=step) for step in range(4)}
    for row in rows:
        assert (spans_of(row)[0].start, spans_of(row)[-1].stop) == (0, len(row.token_ids))
        plain = {step: plain_routing(models[step], row.token_ids) for step in {s.version.step for s in row.spans}}
        for start, stop, sampled in row.spans:
            for token in range(start, stop):
                (experts,) = (span.experts for span in spans_of(row) if span.start <= token < span.stop)
                assert np.array_equal(experts[:token], plain[sampled.step][:token]), (token, sampled)


def test_the_trainer_computes_the_recorded_logprobs(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    context, completions = prompt(12), []

    async def main() -> None:
        engine = make_vllm()
        call = request("r", context, max_tokens=40, top_k=20, top_p=0.9)
        completions.append(await engine.open("s", "solver").generate(call))
        await engine.close()

    make_vllm.run(main)
    (completion,) = completions
    mask, blank = completion.kept, np.zeros(12, np.int32)
    assert mask is not None
    row = TrajectoryRow(
        token_ids=whole(context, completion),
        loss_mask=np.arange(52) >= 12,
        logprobs=np.concatenate([blank.astype(np.float32), completion.logprobs]),
        turn_index=np.concatenate([blank - 1, np.zeros(40, np.int32)]),
        spans=(),
        experts=completion.experts,
        kept=KeptSets(counts=np.concatenate([blank, mask.counts]), ids=mask.ids),
    )
    found = difference(model_of(zoo, "qwen3_moe"), trained(row))
    assert sorted(found) == list(range(12, 52))
    assert max(map(abs, found.values())) < 1e-4
