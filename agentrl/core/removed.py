"""Names of earlier versions that are gone, each with a sentence about what took its place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_JUDGES = "function = 'score.py:NAME' names a scorer that episodic-rl-judges makes: pip install -e packages/judges"
REMOVED: Mapping[str, str] = {
    "trainer.context_ranks": "a smaller trainer.micro_batch_tokens, trainer.recompute and trainer.sharding save memory",
    "trainer.experts": "experts are gathered like other weights",
    "agentrl.MCPServer": "`agentrl_mcp.MCPServer`, in the package episodic-rl-mcp: pip install -e packages/mcp",
    "agentrl run mirror": "copy the run directory, or SQLite's `.backup` of its databases while it runs",
    "agentrl env import": "install packages/formats: `python -m agentrl_formats.harbor DIR` (docs/how-to/harbor.md)",
    "agentrl serve": "install packages/tinker, whose command is `agentrl-tinker FILE.toml` (docs/how-to/tinker.md)",
    "engine.publish": "versions of full weights are always whole files",
    **{
        f"scorers.NAME.{name}": _JUDGES
        for name in (
            *("judge", "rubric", "answer", "scale", "votes", "unscorable"),
            *("reward_model", "steps", "combine", "device", "cache_tokens"),
            *("attempts", "max_concurrent", "cache", "limit", "on_failure"),
        )
    },
    "agentrl.Unscorable": "return the score of such content, or raise an error, which drops the episode",
    "agentrl.EpisodeContext.resample": "only ctx.branch continues an episode several times",
    "agentrl.EpisodeContext.roulette": "return from run() to stop an episode, with a reward for the state it reached",
    "agentrl episode forks": "`agentrl episode list RUN/forks`; `agentrl run serve` draws the tree",
    "agentrl run whatif": "`agentrl episode fork --at change --environment NEW`, compared by `agentrl run compare`",
    "evaluation.bounds": "intervals use 0 and 1, or the smallest and the largest reward seen",
    "evaluation.margin": "the interval of `agentrl evaluate --against` shows by how much versions differ",
    "evaluation.stop": "an evaluation plays all its tasks: set evaluation.tasks",
    "environment.start_from": "a task source can read another run (docs/how-to/branches.md)",
    "journal.budget_mib": "journal.keep bounds the journal (docs/how-to/operations.md, Disk)",
    "credit.advantage.gae": "`leave_one_out` compares groups, and `role_mean` single episodes, without a value head",
    "trainer.loss.kl_estimator": "trainer.loss.kl estimates by k3",
    "max_in_flight_per_task": "a task source's `select` decides how often a task repeats (docs/how-to/selection.md)",
    "trainer.compile": "on CUDA, the extra `liger` computes norms, rotary embeddings and SwiGLU in one kernel each",
    "best.stop_fall": "best.metric keeps the best versions, and `agentrl run curve` shows a fall",
    "cluster.min_nodes": "start the Ray nodes before the run; `ray status` lists them",
    "sample_until_end": "the last steps wait for the episodes in flight, and nothing is thrown away",
    "policies.NAME.lora.experts": "without policies.NAME.lora, all weights are trained, those of experts too",
    "policies.NAME.lora.rank_stabilized": "set policies.NAME.lora.alpha, by which the adapter's output is scaled",
    "policies.NAME.over_lag": "tokens beyond policies.NAME.max_lag are never trained",
    "agentrl demo --journal-only": "`agentrl demo` writes a run in about 100 CPU seconds",
    "agentrl doctor --suggest": "docs/how-to/settings.md lists the usual settings by model size",
    "agentrl doctor --time": "`agentrl train` shows the time of its first steps, and how long the rest takes",
}
"""Sentences by name: a setting (`policies.NAME.max_lag`), a command or option (`agentrl run view`), or a name of the
package (`agentrl.train`)."""

_USER_NAMES = re.compile(r"^(policies|scorers)\.[^.]+")


def removed_setting(path: str) -> str:
    """Return the sentence for a setting that is gone; "" for any other."""
    return removed_name(_USER_NAMES.sub(r"\1.NAME", path))


def removed_settings(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield a sentence for each setting in a configuration's data that is gone."""
    for key, value in data.items():
        if sentence := removed_setting(f"{above}{key}"):
            yield sentence
        elif isinstance(value, Mapping):
            yield from removed_settings(value, f"{above}{key}.")


def removed_name(name: str) -> str:
    """Return the sentence for a command, an option or a name of the package that is gone; "" for any other."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else ""
