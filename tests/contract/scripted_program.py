"""The scripted engine of the contract suite, also for a process of its own, where torch need not be imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine

VOCABULARY = 97


def scripted_engine(
    versions: Mapping[str, PolicyVersion], *, max_context: int, refresh: Any, slots: int = 0
) -> ScriptedEngine:
    """Replies keyed by the seed, half a millisecond a token."""

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return np.random.default_rng(request.seed).integers(3, VOCABULARY, 600).tolist()  # type: ignore[no-any-return]

    return ScriptedEngine(
        script,
        versions=versions,
        seconds_per_token=5e-4,
        refresh=refresh,
        seeded_logprobs=True,
        max_context=max_context,
    )


def confused_engine(versions: Mapping[str, PolicyVersion]) -> ScriptedEngine:
    """Says token ids that are none."""
    return ScriptedEngine(lambda *_: [1 << 40] * 600, versions=versions, seconds_per_token=5e-4)
