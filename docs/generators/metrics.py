"""Generates docs/metrics.md from the registry: `python -m docs.generators.metrics > docs/metrics.md`.

Owns the layout of the page. Names, units and meanings are those of `metrics.py` and `alarms.py`.
"""

from __future__ import annotations

import sys

from agentrl.observe.alarms import MEANINGS
from agentrl.observe.metrics import METRICS

_PAGE = """# Metrics

<!-- Written by `make docs-config` from agentrl/observe/metrics.py and alarms.py; changes belong there. -->

Every optimizer step and every evaluation records numbers under the names below, which stay. `<…>` stands for any word.
What could not be measured is left out.

| where | what |
|---|---|
| `runs/NAME/metrics.jsonl` | a line per step and policy: `{{"policy": …, "step": …, name: value, …}}` |
| `runs/NAME/journal/control.db` | table `metrics`: [journal format](journal_format.md) |
| `agentrl run view NAME` | one screen, also while it trains; `q` leaves |
| `agentrl run curve NAME --metric k3` | one metric over the steps |
| `agentrl run metrics NAME [--json]` | the newest value of each |
| `agentrl run metrics NAME --prometheus` | the same in Prometheus' text format, for its textfile collector |
| `sinks = ["tensorboard"]` | also to tensorboard, `trackio` or `wandb`; each is an extra of its name |

`ctx.metric(name, value)` in an environment adds a name of its own: the sum within an episode, the mean over the
episodes with the policy that set it and were committed since its last step. In an evaluation it is
`evaluation/metric/<name>`. An environment that reads free text counts what it
cannot read as `ctx.metric("turns/illegal", 1)`, so that the alarms know. That, cut turns and tool calls are counted for
the agent that acted last only, so no policy is blamed for another.

**Measured tokens.** `entropy`, `kept_mass`, `k3` and its variants by lag, seat and mismatch, `abs_logprob_difference`,
`mean_ratio`, `masked_fraction`, `truncated_fraction`, `effective_sample_fraction` and `reference_kl` are means over the
tokens that went through the model. Most losses skip rows whose advantages are all 0 (`skipped_samples`), so these
tokens are in none of the means, and the alarms do not see them; over all trained tokens the values can differ by a
factor of two and more. Losses that see a whole step, `gae`, a reference, an entropy bonus and your own losses
forward every row, and then all trained tokens are measured.

## Names

| name | unit | meaning |
|---|---|---|
{metrics}

## Alarms

Named on the screen, once as a line of the error stream and in `runs/NAME/alarms.jsonl`, each with what
was measured and what to try. None ends a run. For `engine_mismatch` see [mismatch](off_policy.md).

| alarm | raised when |
|---|---|
{alarms}
"""


def render_metrics_page() -> str:
    """Return the text of the page."""
    metrics = (
        f"| `{metric.name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |" for metric in METRICS
    )
    alarms = (f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items())
    return _PAGE.format(metrics="\n".join(metrics), alarms="\n".join(alarms))


if __name__ == "__main__":
    sys.stdout.write(render_metrics_page())
