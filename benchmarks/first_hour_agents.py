"""Agents written for libraries of others, trained, killed and resumed; see `first_hour.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.outside_agents.environments import AGENTS, InstallationError, install
from tests.outside_agents.runs import STEPS, train_killed


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part; two libraries if `quick`."""
    trained = resampled = 0
    for library in list(AGENTS)[: 2 if quick else None]:
        try:
            install(library)
            with tempfile.TemporaryDirectory(prefix=f"agents-{library}-") as directory:
                outcome = train_killed(library, Path(directory))
        except (InstallationError, AssertionError) as error:
            print(f"{library}: {error}", flush=True)
            continue
        print(f"{library}: {outcome}", flush=True)
        resampled += outcome.resampled_tokens
        trained += outcome.steps == STEPS and outcome.recalled > 0 and not outcome.dropped and not outcome.violations
    return {"agents_trained": trained, "agents_tokens_resampled": resampled}
