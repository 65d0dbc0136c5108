"""The scripted engine under virtual time: when each token is said, and what an update, a pause, an abort do then."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion, Tokens
from agentrl.engines.scripted import ScriptedEngine
from agentrl.testing.virtual_time import simulate

TEN = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def version(step: int) -> PolicyVersion:
    return PolicyVersion("policy", 0, step)


def weights(step: int) -> WeightsRef:
    return WeightsRef(version=version(step), path="", kind="full", sha256="")


def make(script: Any = (TEN,), **options: Any) -> ScriptedEngine:
    return ScriptedEngine(script, versions={"policy": version(0)}, **options)


def request(name: str = "r", *, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=np.arange(5, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 32, **sampling}),
        seed=seed,
    )


def said(completion: Completion) -> tuple[list[int], str, list[tuple[int, int, int]]]:
    spans = [(span.start, span.stop, span.version.step) for span in completion.spans]
    return completion.token_ids.tolist(), completion.finish_reason, spans


def test_without_latency_a_call_returns_without_suspending() -> None:
    engine = make([[1, 2], [3]])
    session = engine.open("s", "policy")
    call = session.generate(request(seed=1))
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    assert said(ended.value.value) == ([3], "stop", [(0, 1, 0)])


def test_a_script_sees_request_policy_and_version() -> None:
    async def main() -> None:
        engine = make(lambda request, policy, version: [len(policy), version.step, request.seed])
        await engine.serve([weights(4)])
        completion = await engine.open("s", "policy").generate(request(seed=9))
        assert said(completion) == ([6, 4, 9], "stop", [(0, 3, 4)])

    simulate(main, seed=0)


def test_stops_and_limits_cut_what_the_script_says() -> None:
    async def main() -> None:
        session = make(max_context=12).open("s", "policy")
        assert said(await session.generate(request(stop_token_ids=(13,)))) == (TEN[:4], "stop", [(0, 4, 0)])
        assert said(await session.generate(request(max_tokens=3)))[:2] == (TEN[:3], "length")
        assert said(await session.generate(request()))[:2] == (TEN[:7], "length")
        assert said(await session.generate(request(max_tokens=0)))[:2] == ([], "length")

    simulate(main, seed=0)


def test_logprobs_are_constant_or_follow_the_seed() -> None:
    async def main() -> None:
        constant = await make().open("s", "policy").generate(request())
        assert constant.logprobs.tolist() == [-1.0] * 10
        session = make(seeded_logprobs=True).open("s", "policy")
        one, same, other = [await session.generate(request(seed=seed)) for seed in (1, 1, 2)]
        assert one.logprobs.tolist() == same.logprobs.tolist() != other.logprobs.tolist()

    simulate(main, seed=0)


def test_an_update_falls_between_two_tokens() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = make(seconds_per_call=2.0, seconds_per_token=1.0)
        running = asyncio.ensure_future(engine.open("s", "policy").generate(request()))
        for step, wait in ((1, 4.5), (2, 0.1), (3, 3.0)):
            await asyncio.sleep(wait)
            await engine.serve([weights(step)])
        assert said(await running) == (TEN, "stop", [(0, 2, 0), (2, 5, 2), (5, 10, 3)])
        assert loop.time() == pytest.approx(12.0)
        assert engine.busy_seconds() == pytest.approx(12.0)

    simulate(main, seed=0)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"refresh": "turn"}, [0, 1, 2, 3, 4]),
        ({"refresh": "episode"}, [0, 0, 0, 0, 0]),
        ({"refresh": "lazy", "max_staleness": {"policy": 1}}, [0, 0, 2, 2, 4]),
    ],
)
def test_sessions_move_to_newer_versions_as_refresh_says(options: dict[str, Any], steps: list[int]) -> None:
    async def main() -> None:
        engine = make(seconds_per_token=1.0, **options)
        session, found = engine.open("s", "policy"), []
        for step in range(5):
            running = asyncio.ensure_future(session.generate(request(f"r{step}")))
            await asyncio.sleep(4.5)
            await engine.serve([weights(step + 1)])
            found.append(said(await running)[2])
        assert found == [[(0, 10, step)] for step in steps]

    simulate(main, seed=0)


def test_a_pinned_session_ignores_updates() -> None:
    async def main() -> None:
        engine = make(seconds_per_token=1.0)
        await engine.serve([weights(1)], [weights(1)])
        running = asyncio.ensure_future(engine.open("s", "policy", pin=version(1)).generate(request()))
        await asyncio.sleep(3.5)
        await engine.serve([weights(2)], [weights(1)])
        assert said(await running)[2] == [(0, 10, 1)]

    simulate(main, seed=0)


def test_a_pause_stops_the_clock_of_a_call() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = make(seconds_per_token=1.0)
        running = asyncio.ensure_future(engine.open("s", "policy").generate(request("a")))
        await asyncio.sleep(3.5)
        await engine.pause()
        await engine.serve([weights(1)])
        queued = asyncio.ensure_future(engine.open("t", "policy").generate(request("b", max_tokens=1)))
        await asyncio.sleep(100)
        assert not running.done()
        assert not queued.done()
        await engine.resume()
        assert said(await queued)[2] == [(0, 1, 1)]
        assert said(await running)[2] == [(0, 3, 0), (3, 10, 1)]
        assert loop.time() == pytest.approx(110.0)

    simulate(main, seed=0)


def test_an_abort_returns_what_was_said_by_then() -> None:
    async def main() -> None:
        engine = make(seconds_per_token=1.0)
        running = asyncio.ensure_future(engine.open("s", "policy").generate(request("a")))
        await asyncio.sleep(4.2)
        engine.abort("a")
        engine.abort("b")
        assert said(await running) == (TEN[:4], "abort", [(0, 4, 0)])
        assert asyncio.get_running_loop().time() == pytest.approx(4.2)

    simulate(main, seed=0)


def test_a_cancelled_call_is_in_flight_no_more() -> None:
    async def main() -> None:
        engine = make(seconds_per_token=1.0)
        running = asyncio.ensure_future(engine.open("s", "policy").generate(request("a")))
        await asyncio.sleep(1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.in_flight == 0
        assert said(await engine.open("s", "policy").generate(request("a")))[0] == TEN

    simulate(main, seed=0)


def test_deltas_come_about_every_fifth_of_a_second_apart_by_version() -> None:
    async def main() -> None:
        engine = make(seconds_per_token=0.08)
        pieces: list[tuple[list[int], int]] = []

        def on_delta(name: str, tokens: Tokens) -> None:
            assert tokens.logprobs.tolist() == [-1.0] * len(tokens)
            pieces.append((tokens.token_ids.tolist(), tokens.spans[0].version.step))

        running = asyncio.ensure_future(engine.open("s", "policy").generate(request("a"), on_delta))
        await asyncio.sleep(0.3)
        await engine.serve([weights(1)])
        await running
        assert pieces == [([10, 11], 0), ([12], 0), ([13, 14, 15], 1), ([16, 17], 1)]

    simulate(main, seed=0)


def test_held_calls_stay_in_flight_until_released() -> None:
    async def main() -> None:
        engine = make(hold=True)
        calls = [asyncio.ensure_future(engine.open("s", "policy").generate(request(f"r{i}"))) for i in range(50)]
        await asyncio.sleep(10)
        assert engine.in_flight == 50
        engine.release_held()
        assert {tuple(said(c)[0]) for c in await asyncio.gather(*calls)} == {tuple(TEN)}
        assert said(await engine.open("s", "policy").generate(request("late")))[0] == TEN

    simulate(main, seed=0)


def test_two_calls_of_one_id_are_refused() -> None:
    async def main() -> None:
        engine = make(hold=True)
        first = asyncio.ensure_future(engine.open("s", "policy").generate(request("a")))
        await asyncio.sleep(1)
        with pytest.raises(EngineError, match="in flight"):
            await engine.open("t", "policy").generate(request("a"))
        engine.release_held()
        await first

    simulate(main, seed=0)


def test_a_call_that_waits_out_a_pause_can_be_aborted() -> None:
    async def main() -> None:
        engine = make(seconds_per_token=1.0)
        await engine.pause()
        calls = [asyncio.ensure_future(engine.open("s", "policy").generate(request(name))) for name in ("a", "b")]
        await asyncio.sleep(1)
        engine.abort("a")
        assert said(await calls[0]) == ([], "abort", [])
        await engine.resume()
        assert said(await calls[1]) == (TEN, "stop", [(0, 10, 0)])

    simulate(main, seed=0)


def test_a_lost_engine_fails_what_runs_and_what_waits_and_takes_new_sessions_when_it_is_back() -> None:
    async def main() -> None:
        engine, told = make(seconds_per_token=0.1), list[int]()
        session = engine.open("s", "policy")
        running = asyncio.ensure_future(
            session.generate(request("a"), lambda name, tokens: told.extend(tokens.token_ids.tolist()))
        )
        await asyncio.sleep(0.55)
        await engine.pause()
        waiting = asyncio.ensure_future(engine.open("t", "policy").generate(request("b")))
        await asyncio.sleep(1)
        engine.lose()
        for call in (running, waiting):
            with pytest.raises(EngineLostError):
                await call
        assert told == TEN[:4]
        with pytest.raises(EngineLostError):
            engine.open("u", "policy")
        engine.restore()
        with pytest.raises(EngineLostError):
            await session.generate(request("c"))
        session.close()
        again = engine.open("s", "policy")
        assert said(await again.generate(request("a"))) == (TEN, "stop", [(0, 10, 0)])
        again.close()
        again.close()
        assert (engine.sessions, engine.in_flight) == (0, 0)

    simulate(main, seed=0)
