"""How each policy is spoken to: chat format, sampling, limits, from the run's sections and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentrl.config.policies import OutsidePolicy
from agentrl.config.run import RunConfig, SamplingConfig
from agentrl.core.ports import ChatFormat, SamplingParams
from agentrl.environment.base import Limits
from agentrl.rollout.byte_formats import JsonFormat
from agentrl.rollout.episode import PolicySettings, RolloutSettings

MAX_OUTSIDE_CONTEXT = 1 << 20
"""Longest conversation with a policy outside our engines, in bytes; how many tokens it takes is an endpoint's."""


def rollout_settings(config: RunConfig, chat_format: ChatFormat, max_context: int) -> RolloutSettings:
    """How a worker's episodes are spoken to and limited, by an engine with contexts of this length."""
    run = spoken_to(config.sampling, chat_format, max_context)
    return RolloutSettings(
        sampling=run.sampling,
        limits=run.limits,
        policies=spoken_to_otherwise(config, chat_format, max_context),
        tool_timeout_s=config.environment.tool_timeout_s,
        episode_timeout_s=config.episode_timeout_s,
        max_staleness={name: policy.max_staleness for name, policy in config.trained.items()},
        on_code_change=config.environment.on_code_change,
    )


def spoken_to_otherwise(config: RunConfig, chat_format: ChatFormat, max_context: int) -> Mapping[str, PolicySettings]:
    """The policies that are not spoken to as the run's `[sampling]` and the base model's chat format say."""
    outside = config.of_kind(OutsidePolicy)
    return {
        name: _spoken_to_outside(config.sampling_of(name))
        if name in outside
        else spoken_to(config.sampling_of(name), chat_format, max_context)
        for name in config.policies
        if name in outside or config.sampling_of(name) != config.sampling
    }


def _spoken_to_outside(sampling: SamplingConfig) -> PolicySettings:
    return replace(spoken_to(sampling, JsonFormat(), MAX_OUTSIDE_CONTEXT), is_outside=True)


def spoken_to(sampling: SamplingConfig, chat_format: ChatFormat, max_context: int) -> PolicySettings:
    """The settings of policies that sample by a section, in conversations of up to `max_context` tokens."""
    return PolicySettings(
        chat_format=chat_format,
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=chat_format.stop_token_ids,
        ),
        limits=Limits(max_turns=sampling.max_turns, max_tokens=sampling.max_tokens, max_context=max_context),
    )
