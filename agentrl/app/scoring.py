"""Makes the scorers of a run's configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from agentrl.config.plans import RolloutPlan
from agentrl.config.policies import OpponentPoolPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.scorers import ScorerConfig, reward_model_name
from agentrl.core.clock import Clock
from agentrl.core.custom_functions import FunctionCode, check_options, find_function
from agentrl.core.ports import ChatFormat, Sampler, ScoreCredit, ScoreOf
from agentrl.core.records import Score, ScoreRequest
from agentrl.core.text import plural
from agentrl.rollout.episode import PolicySettings, RolloutSettings
from agentrl.rollout.replay import CallNotRecordedError
from agentrl.rollout.scoring.judge import JudgeScorer
from agentrl.rollout.scoring.retrying import FunctionScorer, Places, RetryingScorer
from agentrl.rollout.scoring.reward_model import RewardModelScorer

NO_SCORES: Mapping[str, Mapping[bytes, Score]] = MappingProxyType({})


def find_scorer_codes(scorers: Mapping[str, ScorerConfig]) -> dict[str, FunctionCode]:
    """Return the code of the functions that score, by the scorer's name.

    Raises:
        ConfigError: there is no such function, or it cannot be recorded, or its options do not fit.
    """
    codes = {}
    for name, section in scorers.items():
        if not section.function:
            continue
        code, function = find_function("scorer", section.function, key=f"scorers.{name}.function")
        check_options(function, section.options, f"scorers.{name}.options")
        codes[name] = code
    return codes


def make_scorers(
    plan: RolloutPlan,
    engine: Sampler,
    chat_format: ChatFormat,
    settings: RolloutSettings,
    clock: Clock,
    codes: Mapping[str, FunctionCode] | None = None,
    workers: int | None = None,
    kept: Mapping[str, Mapping[bytes, Score]] = NO_SCORES,
) -> dict[str, RetryingScorer]:
    """Make the scorers of one worker, or with `workers = 1` of the run's process.

    Args:
        plan: the workers' part of the run.
        engine: samples the replies of judges, and serves reward models.
        chat_format: that of the run's base model.
        settings: settings of the worker's episodes.
        clock: times the waits.
        codes: code of the functions, as another process found it; None: found here.
        workers: number of processes that share `max_concurrent`; None: as configured.
        kept: see `kept_scores`.

    Raises:
        ConfigError: a function cannot be loaded.
        ModelError: a reward model has no tokenizer or chat template.
    """
    codes = find_scorer_codes(plan.scorers) if codes is None else codes
    scorers: dict[str, RetryingScorer] = {}
    for name, section in plan.scorers.items():
        limits: dict[str, Any] = {
            "name": name,
            "per": section.per,
            "credit": section.credit,
            "attempts": section.attempts,
            "timeout_s": section.timeout_s,
            "unscorable": section.unscorable,
            "places": Places(max(1, section.max_concurrent // (workers or plan.workers))),
            "cache": 0 if section.judge in plan.trained else section.cache,
            "identity": _identity(plan, section, codes.get(name)),
            "recorded": kept.get(name, {}),
            "run_seed": plan.seed,
            "clock": clock,
        }
        if section.function:
            scorers[name] = FunctionScorer(function=codes[name].load(), options=section.options, **limits)
        elif section.reward_model:
            from agentrl.rollout.chat.chat_format import TemplateChatFormat  # the core is installed without tokenizers

            scorers[name] = RewardModelScorer(
                engine=engine,
                model=reward_model_name(name),
                chat_format=TemplateChatFormat.load(section.reward_model),
                steps=section.steps,
                combine=section.combine,
                **limits,
            )
        else:
            run = PolicySettings(chat_format=chat_format, seat=settings.seat)
            policy = settings.policies.get(section.judge, run)
            scorers[name] = JudgeScorer(
                engine=engine,
                policy=section.judge,
                chat_format=policy.chat_format,
                sampling=policy.sampling,
                max_context=policy.limits.max_context,
                rubric=section.rubric,
                answer=section.answer,
                scale=section.scale or (0.0, 0.0),
                votes=section.votes,
                learns=isinstance(plan.policies[section.judge], PolicyConfig | OpponentPoolPolicy),
                **limits,
            )
    for name, section in plan.scorers.items():
        if section.on_failure != "drop":
            scorers[name].other = scorers[section.on_failure]
    return scorers


def with_scorers(plan: RolloutPlan, names: Iterable[str]) -> RolloutPlan:
    """Return the plan with only these scorers and their fallbacks."""
    scorer_names: set[str] = set()
    for first in names:
        name = first
        while name != "drop" and name not in scorer_names:
            scorer_names.add(name)
            name = plan.scorers[name].on_failure
    return replace(plan, scorers={name: plan.scorers[name] for name in plan.scorers if name in scorer_names})


def kept_scores(plan: RolloutPlan, newest: Callable[[str, int], dict[bytes, Score]]) -> dict[str, dict[bytes, Score]]:
    """Return the scores that scorers with a cache keep from earlier attempts of the run, by the scorer's name.

    Args:
        plan: the workers' part of the run.
        newest: returns a number of a scorer's newest scores from the journal.
    """
    return {
        name: newest(name, section.cache)
        for name, section in plan.scorers.items()
        if section.cache and section.per != "group" and section.judge not in plan.trained
    }


def _identity(plan: RolloutPlan, section: ScorerConfig, code: FunctionCode | None) -> str:
    """Return all settings on which a scorer's answer depends: a resumed run may have changed them."""
    policy = plan.policies.get(section.judge)
    judge = None if policy is None else [policy.model_dump(), plan.sampling_by_policy[section.judge].model_dump()]
    asked = {"judge", "rubric", "answer", "scale", "votes"}
    decides = asked | {"per", "options", "reward_model", "steps", "combine", "unscorable"}
    code_digest = "" if code is None else code.digest
    return json.dumps([section.model_dump(include=decides), judge, code_digest], sort_keys=True, default=str)


def expected_scores(config: RunConfig) -> list[str]:
    """Describe the expected number of scores of each scorer in the run, for people, if every agent takes all turns, and
    no score is cached or retried. The number that `ctx.score` asks for is unknown."""
    lines = []
    for name, section in config.scorers.items():
        episodes = sum(config.steps_of(policy) * section_of.step_size for policy, section_of in config.trained.items())
        per_episode = {
            "turn": float(config.sampling.max_turns),
            "episode": 1.0,
            "group": 1.0 / config.credit.group_size,
        }
        if section.per in per_episode:
            scores = math.ceil(episodes * per_episode[section.per])
            calls = scores * ((section.votes or len(section.answer)) if section.judge else 1)
            limit = f" of {section.limit.requests:,} allowed" if section.limit.requests else ""
            lines.append(
                f"scorers.{name}: about {plural(scores, 'score')} of {plural(episodes, 'conversation')}, "
                f"{plural(calls, 'request')}{limit}"
            )
    return lines


@dataclass(frozen=True, slots=True)
class RecordedScorer:
    """A scorer of a replay: its scores are in the journal, or the journal ends before them."""

    name: str
    per: ScoreOf
    credit: ScoreCredit

    async def score(self, request: ScoreRequest) -> NoReturn:
        raise CallNotRecordedError(request.call_id, f"a request to the scorer {self.name!r}")
