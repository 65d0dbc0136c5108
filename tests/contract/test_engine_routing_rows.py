"""From engine to rows: every token keeps the experts it was sampled with, through updates, evictions and aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from agentrl.core.tokens import EncodedTokens, TrajectoryRow
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.journal.entries import BeginEntry, EntryBody, JournalEntry, TurnEntry, encode_body
from agentrl.journal.rows import assemble_trajectories
from tests.contract.engine_kinds import ModelZoo, load_engine, prompt, request, version
from tests.contract.test_engine_capture import plain_routing
from tests.support.builders import spans_of


async def conversation(engine: EmbeddedEngine, number: int, turns: int) -> TrajectoryRow:
    """A row of several turns, read back from entries and from the wire of an engine in another process."""
    session = engine.open(f"s{number}", "solver")
    begin = BeginEntry("e", "", "t", {}, 0, {"solver": "solver"}, "train", "g", 1, None)
    bodies: list[EntryBody] = [begin]
    context = np.zeros(0, np.int32)
    for turn in range(turns):
        before = len(context)
        observed = prompt(30, 0) if turn == 0 else prompt(3 + number, 9 * number + turn)
        context = np.concatenate([context, observed])
        sent = await session.generate(request(f"{number}-{turn}", context, seed=number, max_tokens=20))
        wire = msgspec.msgpack.encode(sent.encode())
        completion = msgspec.msgpack.decode(wire, type=EncodedTokens).decode()
        entry = TurnEntry(
            seat="solver", index=0, policy="solver", row=0, turn=turn, context_ids=observed.tobytes(),
            tokens=completion.encode(), finish_reason=sent.finish_reason, text="", messages=(), temperature=1.0,
            seconds=0.0, started=0.0, parent_context=before,
        )  # fmt: skip
        bodies.append(entry)
        context = np.concatenate([context, completion.token_ids])
    entries = [JournalEntry("e0", 0, f"r#{at}", b"", encode_body(body)) for at, body in enumerate(bodies)]
    (found,) = assemble_trajectories(entries)
    return found.rows[0]


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"prefill_tokens": 16}], ids=["roomy", "evicting", "piecemeal"])
def test_each_token_has_the_experts_of_the_weights_that_sampled_it(zoo: ModelZoo, options: dict[str, Any]) -> None:
    """With KV computed again at each update, the whole context of a token went through its version's experts."""

    async def main() -> list[TrajectoryRow]:
        engine = load_engine(zoo, "mixtral", capture_routing=True, keep_kv=False, **options)
        running = [asyncio.ensure_future(conversation(engine, number, 3)) for number in range(6)]
        for step, tokens in ((1, 60), (2, 61), (3, 200)):  # the second update may interrupt the first one's prefill
            while engine.stats.sampled_tokens < tokens:
                await asyncio.sleep(0)
            await engine.serve([zoo.full(version(step), "mixtral", seed=step)])
            for _ in range(step if step > 1 else 0):  # calls that end while their context is computed again
                await asyncio.sleep(0)
            for number in range(0, 6, 2 if step > 1 else 6):
                engine.abort(f"{number}-{step - 1}")
        rows = await asyncio.gather(*running)
        await engine.close()
        return rows

    rows = asyncio.run(main())
    assert max(len(spans_of(row)) for row in rows) > 1, "no update fell into a row"
    models = {step: zoo.load("mixtral", step) for step in range(4)}
    for row in rows:
        assert (spans_of(row)[0].start, spans_of(row)[-1].stop) == (0, len(row.token_ids))
        assert [span.stop for span in spans_of(row)[:-1]] == [span.start for span in spans_of(row)[1:]]
        by_version = {span.version.step for span in row.spans}
        plain = {step: plain_routing(models[step], row.token_ids) for step in by_version}
        for start, stop, sampled in row.spans:
            for token in range(start, stop):
                (experts,) = (span.experts for span in spans_of(row) if span.start <= token < span.stop)
                assert np.array_equal(experts[:token], plain[sampled.step][:token]), (token, sampled)
