"""Limits on what scorers may spend in a run: requests, and tokens that models compute.

What is spent is a metric of committed episodes (`scores/requests/NAME`, `scores/tokens/NAME`) and a column of scored
groups. So the journal has it, and a resumed run continues from there. Scores in flight when a limit is reached are in
addition to it. Requests of a group whose scorer failed count until the run is resumed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.core.errors import CheckFailedError
from agentrl.observe.metrics import SCORE_REQUESTS, SCORE_TOKENS

if TYPE_CHECKING:
    from agentrl.core.ports import PolicyCounts
    from agentrl.journal.past_run import PastRun


@dataclass(slots=True, kw_only=True)
class ScoreLimits:
    """The limits of a run's scorers, and what they have spent."""

    limits: Mapping[str, float]
    """Limit of each metric, such as `scores/requests/NAME`."""
    fail: Callable[[CheckFailedError], None]
    """Callback that ends the run, when a scorer has reached a limit."""
    spent: Counter[str] = field(default_factory=Counter)
    """What has been spent, by metric."""

    def restore(self, past: PastRun) -> None:
        """Count what the journal says was spent.

        Raises:
            CheckFailedError: a limit was reached before.
        """
        self.spent.update({name: int(past.log.metric_total(name)) for name in self.limits})
        for scores in itertools.chain.from_iterable(past.log.group_scores().values()):
            self._count(scores.scorer, scores.requests, scores.tokens)
        self._check()

    def add(self, counted: Iterable[PolicyCounts]) -> None:
        """Count a committed episode."""
        for counts in counted:
            for name in self.limits.keys() & counts.metrics.keys():
                self.spent[name] += int(counts.metrics[name])
        self._fail_if_reached()

    def add_spent(self, scorer: str, requests: int, tokens: int) -> None:
        """Count what a scorer of groups has spent."""
        self._count(scorer, requests, tokens)
        self._fail_if_reached()

    def _count(self, scorer: str, requests: int, tokens: int) -> None:
        for name, amount in ((SCORE_REQUESTS + scorer, requests), (SCORE_TOKENS + scorer, tokens)):
            if name in self.limits:
                self.spent[name] += amount

    def _fail_if_reached(self) -> None:
        try:
            self._check()
        except CheckFailedError as error:
            self.fail(error)

    def _check(self) -> None:
        for name, limit in sorted(self.limits.items()):
            if self.spent[name] >= limit:
                _, what, scorer = name.split("/")
                raise CheckFailedError(
                    f"the scorer {scorer!r} has used {self.spent[name]:,} {what} of scorers.{scorer}.limit.{what} = "
                    f"{limit:,.0f}. The run stops with a checkpoint and keeps its episodes: raise the limit, then "
                    "start again with --resume"
                )
