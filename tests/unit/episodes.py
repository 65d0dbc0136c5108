"""Runs single episodes of an environment against a scripted policy, with everything in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import agentrl
from agentrl.core.ports import GenerateRequest, SamplingParams, Scorer
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import EntryBody
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.episode import GatewaySampling
from agentrl.testing.execution import PARTITION, POLICY, plain_rollout_settings, wire_dispatcher


@dataclass
class Played:
    """What came of an episode."""

    header: EpisodeHeader
    entries: list[EntryBody]
    said: str
    """What the worker remembers of a failure."""
    seen: list[list[int]]
    """What the engine saw in each call, in order: the context it was given and the tokens it sampled."""
    rows: list[int]
    """Row that each call names."""
    metrics: Mapping[str, float]
    """What it counted, as committed."""
    told: str
    """Detail of the committed episode."""
    activity: Mapping[str, float]
    """Totals of the worker."""
    sampling: list[SamplingParams]
    """How each call was sampled."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an episode is run."""

    data: dict[str, object]
    max_turns: int
    max_tokens: int
    max_context: int
    tool_timeout_s: float
    episode_timeout_s: float
    attempts: int
    seed: int
    gateway_sampling: GatewaySampling
    reward_weights: Mapping[str, float]
    scorers: Sequence[Scorer]


def play(
    environment: type[agentrl.Environment],
    replies: Sequence[str | bytes],
    *,
    data: dict[str, object] | None = None,
    max_turns: int = 8,
    max_tokens: int = 512,
    max_context: int = 4096,
    tool_timeout_s: float = 30.0,
    episode_timeout_s: float = 60.0,
    attempts: int = 1,
    seed: int = 1,
    gateway_sampling: GatewaySampling = "agent",
    reward_weights: Mapping[str, float] = MappingProxyType({}),
    scorers: Sequence[Scorer] = (),
) -> Played:
    """Run one episode in which the policy says `replies`, turn by turn: text, or tokens, which are bytes."""
    setting = Setting(
        data=data or {"question": "?"},
        max_turns=max_turns,
        max_tokens=max_tokens,
        max_context=max_context,
        tool_timeout_s=tool_timeout_s,
        episode_timeout_s=episode_timeout_s,
        attempts=attempts,
        seed=seed,
        gateway_sampling=gateway_sampling,
        reward_weights=reward_weights,
        scorers=scorers,
    )
    return asyncio.run(_play(environment, list(replies), setting))


async def _play(environment: type[agentrl.Environment], replies: list[str | bytes], setting: Setting) -> Played:
    journal, said = MemoryJournal(), iter(replies)
    seen: list[list[int]] = []
    rows: list[int] = []
    sampling: list[SamplingParams] = []

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        reply = next(said)
        sampled = [*(reply.encode() if isinstance(reply, str) else reply), STOP_TOKEN]
        seen.append([*request.token_ids.tolist(), *sampled])
        rows.append(request.row)
        sampling.append(request.sampling)
        return sampled

    engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, max_context=setting.max_context)
    settings = plain_rollout_settings(
        max_turns=setting.max_turns,
        max_tokens=setting.max_tokens,
        max_context=setting.max_context,
        tool_timeout_s=setting.tool_timeout_s,
        episode_timeout_s=setting.episode_timeout_s,
    )
    settings = replace(settings, gateway_sampling=setting.gateway_sampling, reward_weights=setting.reward_weights)
    settings = replace(settings, scorers={scorer.name: scorer for scorer in setting.scorers}, scored=[POLICY])
    failures: list[BaseException] = []
    dispatcher, _ = wire_dispatcher(environment, engine, journal, settings, failures, data_attempts=setting.attempts)
    worker = dispatcher.worker
    ended: list[EpisodeHeader] = []
    spec = _spec(environment, setting)
    worker.submit(spec, ended.append)
    await worker.drain()
    if failures:
        raise failures[0]
    entries = [entry.decode() for entry in journal.turn_log(PARTITION).read("e0", ended[0].attempt)]
    end = next(end for end in journal.of_kind(EpisodeEnd) if end.header.episode_id == "e0")
    return Played(
        ended[0], entries, worker.last_failure, seen, rows, end.metrics, end.detail, worker.activity(), sampling
    )


def _spec(environment: type[agentrl.Environment], setting: Setting) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e0",
        environment=name_of(environment),
        task=Task(id="t", data=setting.data),
        seed=setting.seed,
        seats={seat: SeatBinding(POLICY) for seat in environment.seats},
        group_id="g0",
    )
