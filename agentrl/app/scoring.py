"""Makes the scorers of a run's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from agentrl.config.run import RunConfig
from agentrl.config.scorers import ScorerConfig
from agentrl.core.custom_functions import FunctionCode, check_options, find_function
from agentrl.core.ports import ScoreCredit, ScoreOf
from agentrl.core.records import ScoreRequest
from agentrl.core.text import plural
from agentrl.rollout.replay import CallNotRecordedError
from agentrl.rollout.scoring.function import FunctionScorer


def find_scorer_codes(scorers: Mapping[str, ScorerConfig]) -> dict[str, FunctionCode]:
    """Return the code of the functions that score, by the scorer's name.

    Raises:
        ConfigError: there is no such function, or it cannot be recorded, or its options do not fit.
    """
    codes = {}
    for name, section in scorers.items():
        code, function = find_function("scorer", section.function, key=f"scorers.{name}.function")
        check_options(function, section.options, f"scorers.{name}.options")
        codes[name] = code
    return codes


def make_scorers(
    scorers: Mapping[str, ScorerConfig], codes: Mapping[str, FunctionCode] | None = None
) -> dict[str, FunctionScorer]:
    """Make the scorers of a process.

    Args:
        scorers: sections of the scorers.
        codes: code of the functions, as another process found it; None: found here.

    Raises:
        ConfigError: a function cannot be loaded.
    """
    codes = find_scorer_codes(scorers) if codes is None else codes
    return {
        name: FunctionScorer(
            name=name,
            function=codes[name].load(),
            options=section.options,
            per=section.per,
            credit=section.credit,
            timeout_s=section.timeout_s,
        )
        for name, section in scorers.items()
    }


def expected_scores(config: RunConfig) -> list[str]:
    """Describe the expected number of scores of each scorer in the run, for people, if every agent takes all turns. The
    number that `ctx.score` asks for is unknown."""
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
            lines.append(f"scorers.{name}: about {plural(scores, 'score')} of {plural(episodes, 'conversation')}")
    return lines


@dataclass(frozen=True, slots=True)
class RecordedScorer:
    """A scorer of a replay: its scores are in the journal, or the journal ends before them."""

    name: str
    per: ScoreOf
    credit: ScoreCredit

    async def score(self, request: ScoreRequest) -> NoReturn:
        raise CallNotRecordedError(request.call_id, f"a request to the scorer {self.name!r}")
