"""Generates docs/reference/metrics.md from the registry: `python -m docs.generators.metrics >
docs/reference/metrics.md`.

Owns the layout of the page. Names, units and meanings are those of `metrics.py` and `alarms.py`.
"""

from __future__ import annotations

import sys

from agentrl.observe.alarms import MEANINGS, WINDOW
from agentrl.observe.metrics import METRICS, RESERVED_NAMES, Metric
from docs.generators.configuration import linked

_PAGE = """# Metrics

<!-- Written by `make docs-config` from agentrl/observe/metrics.py and alarms.py; changes belong there. -->

Optimizer steps and evaluations record these metrics; `<…>` stands for any word. Values that could not be measured are
left out.

| where | what |
|---|---|
| `agentrl run view NAME` | one screen, also while it trains; `q` leaves |
| `agentrl run curve NAME --metric k3` | one metric over the steps |
| `agentrl run metrics NAME` | the newest value of each; `--prometheus` for Prometheus' textfile collector |
| `runs/NAME/metrics.jsonl` | a line per step and policy: `{{"policy": …, "step": …, name: value, …}}` |
| `runs/NAME/journal/control.db` | table `metrics` ([journal format](journal_format.md)) |
| `sinks = ["wandb"]` | W&B, TensorBoard (`tensorboard`) or `trackio` |

**Measured tokens.** Means over tokens, from `entropy` to `reference_kl` below, cover the tokens that went through the
model. Most losses skip rows whose advantages are all 0 (`skipped_samples`). Losses over a whole step, a
reference, an entropy bonus and your own losses forward every row.

## Metrics of your own

`ctx.metric(name, value)` in an environment adds a metric: summed within an episode, then averaged over the
environment's episodes in the step. An episode that does not set the metric counts as 0, so `ctx.metric("no_deal", 1)`
gives the share of episodes without a deal. With several policies, it is reported once, at the steps of the first
learning policy, by name, that acted in the episode. Names of this page are refused, except `turns/illegal`, for replies
that the environment cannot read; and so are {reserved}.

## W&B, TensorBoard, trackio

`sinks = ["wandb"]`, beside `name` in the configuration, also sends each step's metrics and the configuration there.

{metrics}
## Alarms

An alarm appears on the screen, once on stderr, and in `runs/NAME/alarms.jsonl`, with measured values and advice. None
ends a run. Conditions cover the newest {window} steps unless they say otherwise.

{alarms}
"""

_HEADINGS = {
    "reward/mean": "Rewards",
    "evaluation/reward": "Evaluations",
    "staleness/mean": "Staleness and advantages",
    "step/units": "Progress and speed",
    "tool/<outcome>": "Turns, tools and scores",
    "win_rate/<policy>": "Games and formats",
    "advantage/variance_ratio": "Selection and proposals",
    "step": "Optimizer steps",
}
"""Heading before a metric, by its name."""


def _metrics() -> str:
    lines = []
    for metric in METRICS:
        if heading := _HEADINGS.get(metric.name):
            lines.append(f"\n## {heading}\n" if lines else f"## {heading}\n")
        lines.append(f"* `{metric.name}`{_unit(metric)}: {linked(metric.meaning)}")
    return "\n".join(lines) + "\n"


def _unit(metric: Metric) -> str:
    """Return the unit in parentheses, unless the meaning says it."""
    says_it = {"fraction": "share", "s": "seconds", "1": ""}.get(metric.unit, metric.unit) in metric.meaning
    return "" if says_it else f" ({metric.unit})"


def render_metrics_page() -> str:
    """Return the text of the page."""
    reserved = ", ".join(f"`{name}`" for name in RESERVED_NAMES)
    alarms = (f"* `{name}`: {meaning}" for name, meaning in MEANINGS.items())
    return _PAGE.format(metrics=_metrics(), alarms="\n".join(alarms), window=WINDOW, reserved=reserved)


if __name__ == "__main__":
    sys.stdout.write(render_metrics_page())
