"""Unit tests: in 16 bits the canary check learns how far rounding goes, and refuses no right version meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.canary import Canary, ObservedRounding, check_canary_answer

TOKENS = 128


def away(nats: float, seed: int) -> np.ndarray:
    """Log-probabilities [1, TOKENS] whose mean absolute distance from 0, the mean taken off, is about `nats`."""
    noise = np.random.default_rng(seed).normal(size=(1, TOKENS))
    noise -= noise.mean()
    return noise * nats / np.abs(noise).mean()


class Engine:
    """Checks versions of one policy, one after another."""

    def __init__(self, precision: str = "bfloat16") -> None:
        self.precision = precision
        self.rounding: dict[str, ObservedRounding] = {}
        self.step = 0

    def check(self, *, change: float, rounding: float, is_stale: bool = False) -> None:
        """Check a version that changed the log-probabilities by `change` nats, answered with an error of `rounding`: by
        that version, or by the initial one if the answer is stale."""
        start = np.full((1, TOKENS), -20.0)
        logprobs = start + away(change, 1)
        canary = Canary(
            contexts=np.zeros((1, 16), np.int32),
            token_ids=np.arange(TOKENS, dtype=np.int32),
            logprobs=logprobs.astype(np.float32),
            start_logprobs=start.astype(np.float32),
            is_exact=False,
        )
        weights = WeightsRef(
            version=PolicyVersion("solver", 0, self.step), path="/nowhere", kind="adapter", sha256="0" * 64
        )
        answer = ((start if is_stale else logprobs) + away(rounding, 2 + self.step)).astype(np.float32)
        self.step += 1
        check_canary_answer(weights, canary, answer, precision=self.precision, others={}, rounding=self.rounding)


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param([(0, 0), (0.130, 0.106), (0.170, 0.139), (0.203, 0.120)], id="SmolLM2 at 1e-4"),
        pytest.param([(0, 0), (0.103, 0.051), (0.141, 0.066), (0.117, 0.074)], id="SmolLM2 at 3e-6"),
        pytest.param([(0, 0), (0.002, 0.0005), (0.012, 0.004), (0.1, 0.09), (0.2, 0.14)], id="a slow start"),
        pytest.param([(0, 0.044), (0.1, 0.05), (2.0, 0.06)], id="another engine, which rounds zero too"),
    ],
)
def test_right_versions_pass(versions: list[tuple[float, float]]) -> None:
    """Distances as measured in runs: the first version of an embedded engine rounds nothing, later ones do."""
    engine = Engine()
    for change, rounding in versions:
        engine.check(change=change, rounding=rounding)


def test_a_version_much_further_off_than_those_before_is_refused() -> None:
    engine = Engine()
    engine.check(change=0.1, rounding=0.016)
    with pytest.raises(EngineError, match=r"solver@0\.1 .*0\.08 .*0\.048"):
        engine.check(change=0.1, rounding=0.08)
    engine.check(change=0.1, rounding=0.03)


def test_versions_that_changed_nothing_do_not_tighten_the_limit() -> None:
    engine = Engine()
    for _ in range(3):
        engine.check(change=0.001, rounding=0.0)
    engine.check(change=0.3, rounding=0.24)
    with pytest.raises(EngineError, match=r"0\.25"):
        engine.check(change=0.6, rounding=0.26)


@pytest.mark.parametrize("precision", ["fp8", "mxfp4", "a KV cache in fp8_e4m3"])
def test_an_engine_in_eight_bits_is_checked_by_its_own_limit(precision: str) -> None:
    """Distances as SmolLM2-135M has them in FP8, by block and by tensor; they tighten no limit."""
    engine = Engine(precision)
    for change, rounding in [(0, 0.4), (0, 0.62), (0.01, 0.05), (0.3, 0.71)]:
        engine.check(change=change, rounding=rounding)
    with pytest.raises(EngineError, match=rf"with {precision} in the engine at most 1\.5"):
        engine.check(change=0.3, rounding=1.6)
    with pytest.raises(EngineError, match="as the model the run began with would"):
        engine.check(change=0.8, rounding=0.1, is_stale=True)
    with pytest.raises(EngineError, match=r"0\.25"):
        Engine().check(change=0, rounding=0.4)
