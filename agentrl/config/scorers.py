"""The scorers of a run: functions and judges that give turns or conversations a named reward (docs/scores.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.fields import Free, NumberUnit, Positive, Seconds, Section


class ScorerConfig(Section):
    """A scorer, which gives turns or conversations a reward of its name while episodes run (docs/scores.md)."""

    function: Free[str] = ""
    """A function marked with `agentrl.scorer`: `module:function`, the name of one that an installed package provides,
    or `path/to/file.py:function`, in a TOML file relative to that file."""
    options: Free[dict[str, Any]] = {}
    """Arguments of the function."""
    per: Free[Literal["turn", "episode", "request"]] = "turn"
    """What is scored: `turn`, every turn of the policies that learn; `episode`, their whole conversations, when the
    episode ends; `request`, only the turns for which the environment calls `ctx.score`."""
    attempts: Free[Annotated[Positive, NumberUnit("requests")]] = 4
    """Number of times that a failing scorer is asked for one score, with waits of 1 to 30 s in between."""
    timeout_s: Free[Seconds] = 60.0
    """Time limit of each."""
    max_concurrent: Free[Annotated[Positive, NumberUnit("scores")]] = 64
    """Maximum number of scores in progress at once, over all `workers`."""
    on_failure: Free[str] = "drop"
    """What follows when all attempts have failed: `drop` drops the episode (`scorer_failed`), or the name of another
    scorer, which is asked instead. Never a number."""
    unscorable: Free[Annotated[float, Field(ge=-1e6, le=1e6), NumberUnit("reward")] | None] = None
    """Score of content that no attempt can judge: a function raises `agentrl.Unscorable`. Null: such content stops the
    run."""

    @model_validator(mode="after")
    def _check_kind(self) -> ScorerConfig:
        if not self.function:
            raise ValueError("name the function that scores: function = 'mine.py:short'")
        return self
