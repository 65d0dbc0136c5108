"""What the embedded engine records for the trainer: the experts of every position, the kept set of every token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.capture import ExpertRoutingRecorder
from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import START, ModelZoo, StepClock, plain_logprobs, prompt, request, update_after

if TYPE_CHECKING:
    from agentrl.core.records import ExpertArray, Int32Array

MOE = ("qwen3_moe", "mixtral", "many_experts")


def load(zoo: ModelZoo, architecture: str, **options: Any) -> EmbeddedEngine:
    settings = {"versions": START, "slots": 8, "max_context": 256, **options}
    return EmbeddedEngine.load(str(zoo.directory(architecture)), **settings)


def plain_routing(model: Any, token_ids: Int32Array) -> ExpertArray:
    """`[T, layers, top_k]` from the router logits of one plain forward pass."""
    with torch.no_grad():
        output = model.model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], output_router_logits=True)
    chosen = [logits.softmax(-1).topk(2, dim=-1).indices for logits in output.router_logits]
    rows: ExpertArray = torch.stack(chosen, dim=1).numpy()
    return rows


@pytest.mark.parametrize("architecture", MOE)
def test_routing_rows_are_those_of_the_routers(zoo: ModelZoo, architecture: str) -> None:
    model = zoo.load(architecture)

    async def conversation(engine: EmbeddedEngine, number: int) -> None:
        session, begin = engine.open(f"s{number}", "solver"), prompt(12, 0)
        context = np.concatenate([begin, prompt(3 + number, number)])
        covered = 0
        for turn in range(3):
            completion = await session.generate(request(f"{number}-{turn}", context, seed=number))
            context = np.concatenate([context, completion.token_ids])
            rows = completion.experts.rows
            assert rows is not None
            assert rows.shape[1:] == (2, 2)
            assert completion.experts.start == covered
            covered += len(rows)
            assert covered == len(context) - 1
            expected = plain_routing(model, context)[completion.experts.start : covered]
            assert np.array_equal(rows, expected)
            context = np.concatenate([context, prompt(4, 60 + turn)])

    async def main() -> None:
        engine = load(zoo, architecture, capture_routing=True, prefill_tokens=24)
        await asyncio.gather(*(conversation(engine, number) for number in range(6)))
        assert engine.capabilities.expert_routing
        await engine.close()

    asyncio.run(main())


def test_each_row_has_the_experts_of_a_prefix_that_it_shares(zoo: ModelZoo) -> None:
    """The trainer reads each row alone."""
    model = zoo.load("mixtral")

    async def main() -> None:
        engine = load(zoo, "mixtral", capture_routing=True)
        session, opening, row = engine.open("s", "solver"), prompt(20), 0
        context, covered = opening, 0
        for turn, restarts in enumerate((False, False, True, False, True)):
            if restarts:
                context, covered, row = np.concatenate([opening, prompt(3, turn)]), 0, row + 1
            completion = await session.generate(request(f"{turn}", context, seed=turn, row=row))
            assert (completion.cached_tokens > 0) is (turn > 0)
            assert completion.experts.start == covered
            context = np.concatenate([context, completion.token_ids])
            rows = completion.experts.rows
            assert np.array_equal(rows, plain_routing(model, context)[covered:-1])
            covered += len(rows)
            context = np.concatenate([context, prompt(4, 60 + turn)])
        await engine.close()

    asyncio.run(main())


def test_an_evicted_context_is_routed_again_from_its_start(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, "mixtral", capture_routing=True, slots=1)
        first, second = engine.open("a", "solver"), engine.open("b", "solver")
        completion = await first.generate(request("a", prompt(9)))
        await second.generate(request("b", prompt(9, 1)))
        context = np.concatenate([prompt(9), completion.token_ids])
        again = await first.generate(request("c", context))
        assert again.experts.start == 0
        assert again.experts is not None
        assert len(again.experts.rows) == len(context) + 8 - 1
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("keep_kv", [True, False])
def test_routing_of_tokens_sampled_before_an_update_stays(zoo: ModelZoo, keep_kv: bool) -> None:
    async def main() -> None:
        engine = load(zoo, "mixtral", capture_routing=True, keep_kv=keep_kv, clock=StepClock())
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("r", prompt(20), max_tokens=60)))
        await update_after(engine, 20, zoo.full(PolicyVersion("solver", 0, 1), "mixtral", seed=1))
        completion = await running
        context = np.concatenate([prompt(20), completion.token_ids])
        before = 20 + completion.spans[0].stop - 1
        rows = completion.experts.rows
        assert rows is not None
        assert np.array_equal(rows[:before], plain_routing(zoo.load("mixtral", 0), context)[:before])
        newer = plain_routing(zoo.load("mixtral", 1), context)[:79]
        if keep_kv:
            assert completion.experts.restarts == ()
            assert len(rows) == 79
            assert not np.array_equal(rows[before:], newer[before:])
        else:
            (again,) = completion.experts.restarts
            assert again.row == before
            assert np.array_equal(newer[: again.position], rows[: again.position])
            assert np.array_equal(rows[before:], newer[again.position :])
        await engine.close()

    asyncio.run(main())


def test_routing_follows_full_weights_to_their_own_copy(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, "qwen3_moe", capture_routing=True)
        await engine.serve([zoo.full(PolicyVersion("solver", 0, 1), "qwen3_moe", seed=1)])
        for policy, seed in (("solver", 1), ("proposer", 0)):
            completion = await engine.open(policy, policy).generate(request(policy, prompt(9)))
            context = np.concatenate([prompt(9), completion.token_ids])
            expected = plain_routing(zoo.load("qwen3_moe", seed), context)[:-1]
            assert np.array_equal(completion.experts.rows, expected)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "sampling", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.3}, {"top_k": 20, "top_p": 0.9}]
)
def test_the_kept_set_reproduces_the_logprobs(zoo: ModelZoo, sampling: dict[str, Any]) -> None:
    async def main() -> None:
        engine = load(zoo, "qwen3", capture_mask=True)
        company = [
            engine.open(f"c{i}", "solver").generate(request(f"c{i}", prompt(7, i), seed=i, max_tokens=20))
            for i in range(3)
        ]
        call = engine.open("s", "solver").generate(request("r", prompt(10), max_tokens=20, **sampling))
        completion, *others = await asyncio.gather(call, *company)
        mask = completion.kept
        assert mask is not None
        assert mask.counts.sum() == len(mask.ids)
        assert (mask.counts >= 1).all()
        assert len(set(mask.counts.tolist())) > 1 or "top_k" in sampling
        scores = plain_logprobs(zoo.load(), np.concatenate([prompt(10), completion.token_ids]))[9:]
        sets = np.split(mask.ids, np.cumsum(mask.counts)[:-1])
        for row, kept, token, logprob in zip(scores, sets, completion.token_ids, completion.logprobs, strict=True):
            assert token in kept
            processed = row[kept] / sampling.get("temperature", 1.0)
            expected = processed[kept == token] - np.log(np.exp(processed).sum())
            np.testing.assert_allclose(logprob, expected, atol=1e-4)
        for other in others:
            assert other.kept is None
        await engine.close()

    asyncio.run(main())


CHOICES = ((5, 6), (5, 7, 8), (9,), (9, 5))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "temperature": 1.3}])
def test_a_call_with_choices_is_one_of_them_under_its_probability_among_them(
    zoo: ModelZoo, filters: dict[str, Any]
) -> None:
    """Beside calls without. The token after a choice is a stop token, or continues a longer choice."""
    stops = (2, 3)

    async def main() -> list[tuple[int, ...]]:
        engine = load(zoo, "qwen3", capture_mask=True)
        assert engine.capabilities.choices
        options: dict[str, Any] = {"choices": CHOICES, "stop_token_ids": stops, **filters}
        calls = [
            engine.open(f"s{seed}", "solver").generate(request(f"r{seed}", prompt(10), seed=seed, **options))
            for seed in range(40)
        ]
        free = engine.open("free", "solver").generate(request("free", prompt(10), max_tokens=8))
        other, *completions = await asyncio.gather(free, *calls)
        assert other.kept is None
        model, temperature = zoo.load(), filters.get("temperature", 1.0)
        for completion in completions:
            reply, mask = tuple(completion.token_ids.tolist()), completion.kept
            assert completion.finish_reason == "stop"
            assert mask is not None
            scores = plain_logprobs(model, np.concatenate([prompt(10), completion.token_ids]))[9:] / temperature
            sets = np.split(mask.ids, np.cumsum(mask.counts)[:-1])
            for at, (row, kept) in enumerate(zip(scores, sets, strict=True)):
                same = [choice for choice in CHOICES if choice[:at] == reply[:at]]
                legal = {token for choice in same for token in (choice[at : at + 1] or stops)}
                assert set(kept.tolist()) <= legal if filters else set(kept.tolist()) == legal
                expected = row[reply[at]] - np.log(np.exp(row[kept]).sum())
                np.testing.assert_allclose(completion.logprobs[at], expected, atol=1e-4)
        first = completions[0]
        begun = request("again", [*prompt(10), *first.token_ids[:1]], seed=0, sampled_before=1, **options)
        continued = await engine.open("again", "solver").generate(begun)
        assert continued.token_ids.tolist() == first.token_ids[1:].tolist()
        cut = await engine.open("cut", "solver").generate(request("c", prompt(10), **options | {"max_tokens": 1}))
        assert cut.token_ids[0] in (5, 9)
        await engine.close()
        return [tuple(completion.token_ids.tolist()) for completion in completions]

    said = asyncio.run(main())
    assert {reply[-1] for reply in said} <= set(stops)
    assert {reply[:-1] for reply in said} <= set(CHOICES)
    assert len(set(said)) > 2


def test_nothing_is_recorded_unless_asked_for(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, "mixtral")
        completion = await engine.open("s", "solver").generate(request("r", prompt(10), top_k=5))
        assert completion.experts is None
        assert completion.kept is None
        assert not engine.capabilities.expert_routing
        await engine.close()

    asyncio.run(main())


class Named(torch.nn.Module):
    """A router that chooses the expert a token names."""

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(token_ids), 1), token_ids[:, None]


class NamedModel(torch.nn.Module):
    """One layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Named()
        self.config = PretrainedConfig(num_experts=9)
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> None:
        self.gate(input_ids.reshape(-1))


@pytest.mark.parametrize(
    ("passes", "computed", "rows", "breaks"),
    [
        ([(0, [1, 1]), (2, [2])], 3, [1, 1, 2], ()),
        ([(0, [1, 1, 1]), (0, [1, 1, 1, 4])], 4, [1, 1, 1, 4], ()),
        ([(0, [1, 1, 1]), (0, [1, 2, 2, 4])], 4, [1, 1, 1, 2, 2, 4], ((3, 1),)),
        ([(0, [1, 1, 1]), (0, [1]), (1, [2]), (2, [1]), (3, [4])], 4, [1, 1, 1, 2, 1, 4], ((3, 1),)),
        # Newer weights still, before the context was computed again to its end.
        ([(0, [1, 1, 1]), (0, [1, 2]), (0, [3, 2, 2, 4])], 4, [1, 1, 1, 3, 2, 2, 4], ((3, 0),)),
        # The call ends in the middle of it: what the KV then holds is what the next call builds on.
        ([(0, [1, 1, 1]), (0, [1, 2])], 2, [1, 1, 1, 2], ((3, 1),)),
        ([(0, [1, 1, 1]), (0, [1, 1])], 2, [1, 1, 1], ()),
        ([(0, [1, 1]), (0, [2, 1, 1]), (0, [2, 2, 1, 1])], 4, [1, 1, 2, 1, 1, 2, 1, 1], ((2, 0), (5, 1))),
    ],
)
def test_a_context_computed_again_through_other_experts_begins_again(
    passes: list[tuple[int, list[int]]], computed: int, rows: list[int], breaks: tuple[tuple[int, int], ...]
) -> None:
    model: Any = NamedModel()
    tap = ExpertRoutingRecorder(model, slots=2, capacity=16)
    tap.restart(1, 0, 0)
    for first, experts in passes:
        tap.begin()
        model(torch.tensor([experts]))
        tap.store(np.array([1]), np.array([first]), np.array([len(experts)]), len(experts))
    found = tap.routing_of_call(1, computed)
    assert found is not None
    assert found.rows[:, 0, 0].tolist() == rows
    assert (found.start, found.restarts) == (0, breaks)
