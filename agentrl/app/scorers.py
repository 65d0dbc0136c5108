"""Makes the scorers of a run's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from agentrl.config.policies import LocalPolicy
from agentrl.config.run import RunConfig
from agentrl.core.clock import Clock
from agentrl.core.custom_functions import FunctionCode, check_options, find_function
from agentrl.core.ports import ScoreOf
from agentrl.core.records import ScoreRequest
from agentrl.rollout.replay import CallNotRecordedError
from agentrl.rollout.scorers import FunctionScorer, RetryingScorer


def find_scorer_codes(config: RunConfig) -> dict[str, FunctionCode]:
    """Return the code of the functions that score, by the scorer's name.

    Raises:
        ConfigError: there is no such function, or it cannot be recorded, or its options do not fit.
    """
    codes = {}
    for name, section in config.scorers.items():
        code, function = find_function("scorer", section.function, key=f"scorers.{name}.function")
        check_options(function, section.options, f"scorers.{name}.options")
        codes[name] = code
    return codes


def make_scorers(
    config: RunConfig, clock: Clock, codes: Mapping[str, FunctionCode] | None = None
) -> dict[str, RetryingScorer]:
    """Make the scorers of one worker.

    Args:
        config: configuration of the run.
        clock: times the waits.
        codes: code of the functions, as another process found it; None: found here.

    Raises:
        ConfigError: a function cannot be loaded.
    """
    codes = find_scorer_codes(config) if codes is None else codes
    scorers: dict[str, RetryingScorer] = {
        name: FunctionScorer(
            name=name,
            per=section.per,
            attempts=section.attempts,
            timeout_s=section.timeout_s,
            unscorable=section.unscorable,
            places=asyncio.Semaphore(max(1, section.max_concurrent // config.workers)),
            function=codes[name].load(),
            options=section.options,
            clock=clock,
        )
        for name, section in config.scorers.items()
    }
    for name, section in config.scorers.items():
        if section.on_failure != "drop":
            scorers[name].other = scorers[section.on_failure]
    return scorers


def scored_policies(config: RunConfig) -> frozenset[str]:
    """Return the policies whose turns are scored: those that learn or, where none does (evaluations, forks), those with
    weights."""
    weights = [name for name, policy in config.policies.items() if isinstance(policy, LocalPolicy)]
    return frozenset(config.trained or weights)


@dataclass(frozen=True, slots=True)
class RecordedScorer:
    """A scorer of a replay: its scores are in the journal, or the journal ends before them."""

    name: str
    per: ScoreOf

    async def score(self, request: ScoreRequest) -> NoReturn:
        raise CallNotRecordedError(request.call_id, f"a request to the scorer {self.name!r}")
