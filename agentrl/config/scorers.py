"""The scorers of a run: functions that give turns or conversations a named reward (docs/how-to/scores.md)."""

from __future__ import annotations

from agentrl.config.fields import Code, Free, Options, Seconds, Section, WaveFixed, check_function_name
from agentrl.core.ports import ScoreCredit, ScoreOf


class ScorerConfig(Section):
    """A scorer gives turns or conversations a reward under its name while episodes run (docs/how-to/scores.md)."""

    function: WaveFixed[Code[str]]
    """A function marked with `agentrl.scorer`: `module:function`, an installed name, or `path/to/file.py:function`."""
    options: WaveFixed[Code[Options]] = {}
    """Arguments of the function."""
    per: WaveFixed[ScoreOf] = "turn"
    """What is scored. `turn`: every turn of the policies that learn. `episode`: their whole conversations, when the
    episode ends. `group`: the conversations of a group together, when its last member has ended. `request`: only turns
    for which the environment calls `ctx.score`."""
    credit: WaveFixed[ScoreCredit] = "reward"
    """How the score is paid. `reward`: as it is. `difference`: the change from the agent's previous score (first: from
    0), so that extra turns earn nothing (Ng et al., 1999). `note`: not at all; it is recorded, and `run()` can read
    it."""
    timeout_s: Free[Seconds] = 600.0
    """Time limit of a score. A function that raises or takes longer drops the episode, or the group, as
    `scorer_failed`."""

    def check(self) -> None:
        check_function_name("scorer", self.function)
        if self.credit == "difference" and self.per in ("episode", "group"):
            raise ValueError("credit = 'difference' compares the scores of an agent's turns: set per = 'turn'")
