"""Executions of one episode over a prefix of its journal, in virtual time: what it wrote, said and came to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import agentrl
from agentrl.core.errors import EpisodeError
from agentrl.core.ports import GenerateRequest, ScoreCredit
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.journal.entries import EntryBody, JournalEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import PARTITION, StandInScorer, plain_rollout_settings, wire_dispatcher
from agentrl.testing.virtual_time import simulate


def digits(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A few digits that depend on the request alone."""
    return [*str(request.seed % 1000).encode(), STOP_TOKEN]


def digits_among_draws(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """The same in a process where others draw from the global generators, and leave half a normal draw behind."""
    for _ in range(request.seed % 5):
        random.random()
        np.random.randn()
    return digits(request, policy, version)


def told(request: GenerateRequest) -> bytes:
    """The text of a request."""
    return bytes(token for token in request.token_ids.tolist() if token < 256)


@dataclass
class Execution:
    """What came of one."""

    entries: list[JournalEntry]
    """All of the attempt, those it began with among them."""
    header: EpisodeHeader | None = None
    error: EpisodeError | None = None
    engine_calls: int = 0

    @property
    def bodies(self) -> dict[str, EntryBody]:
        return {entry.call_id: entry.decode() for entry in self.entries}

    @property
    def transcript(self) -> dict[str, tuple[Any, ...]]:
        """What was asked and what came back, by call id, without times."""
        untimed = {"seconds", "started"}
        return {
            entry.call_id: (
                entry.request_hash,
                *(getattr(body, name) for name in type(body).__struct_fields__ if name not in untimed),
            )
            for entry in self.entries
            for body in [entry.decode()]
        }


@dataclass(kw_only=True)
class Stage:
    """How an environment is executed."""

    environment: type[agentrl.Environment]
    data: dict[str, Any] = field(default_factory=dict)
    script: Script = digits
    seconds_per_token: float = 0.1
    stop_after: float | None = None
    """Virtual seconds after which the episode is stopped from outside."""
    cancel_without_notice: bool = False
    """Whoever stops it does not say so."""
    scorer_credit: ScoreCredit = "reward"
    """What the stand-in scorers' scores are credited as."""

    @property
    def spec(self) -> EpisodeSpec:
        return EpisodeSpec(
            episode_id="e0",
            environment=f"{self.environment.__module__}:{self.environment.__qualname__}",
            task=Task(id="t", data=self.data),
            seed=7,
            seats={seat: SeatBinding("policy") for seat in self.environment.seats},
            group_id="g0",
        )

    def play(self, recorded: Sequence[JournalEntry] = (), *, seed: int = 0) -> Execution:
        """Execute over what is recorded, under one schedule."""
        return simulate(lambda: self._play(recorded), seed=seed)

    async def _play(self, recorded: Sequence[JournalEntry]) -> Execution:
        journal = MemoryJournal()
        log = journal.turn_log(PARTITION)
        calls = 0

        def counted(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
            nonlocal calls
            calls += 1
            return self.script(request, policy, version)

        engine = ScriptedEngine(
            counted, versions={"policy": PolicyVersion("policy", 0, 0)}, seconds_per_token=self.seconds_per_token
        )
        settings = plain_rollout_settings(
            max_turns=100, max_context=1 << 16, tool_timeout_s=60.0, episode_timeout_s=3600.0
        )
        settings = replace(settings, missing_scorer=partial(StandInScorer, credit=self.scorer_credit))
        _, runner = wire_dispatcher(self.environment, engine, journal, settings, [], policy="policy")
        for entry in recorded:
            log.append(entry)
        spec = self.spec
        task = asyncio.get_running_loop().create_task(runner.run(spec, self.environment, recorded))
        if self.stop_after is not None:
            await asyncio.wait([task], timeout=self.stop_after)
            if not self.cancel_without_notice:
                runner.stop(spec)
            task.cancel()
        header, error = None, None
        try:
            header = await task
        except EpisodeError as raised:
            error = raised
        except asyncio.CancelledError:
            pass
        await log.flush()
        return Execution(log.read(spec.episode_id, spec.attempt), header, error, calls)


def resumed_everywhere(stage: Stage, *, seed: int = 0) -> list[Execution]:
    """The whole execution, then one from each of its prefixes."""
    whole = stage.play(seed=seed)
    assert whole.error is None, whole.error
    return [whole, *(stage.play(whole.entries[:cut], seed=seed + cut) for cut in range(1, len(whole.entries) + 1))]
