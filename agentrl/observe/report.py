"""A run as one self-contained HTML page: numbers, curves, alarms, configuration. No script, nothing is fetched.

Owns the page's layout and text. Everything that comes from a run is hostile, and passes `_text` on its way in; a
content security policy forbids whatever would slip through from running or loading anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.observe.alarm_lines import Alarm
from agentrl.observe.metrics import PASS_RATES, describe
from agentrl.observe.run_state import LARGEST
from agentrl.observe.svg import Line, plot
from agentrl.observe.view import duration, plain
from agentrl.observe.windows import total, weighted

if TYPE_CHECKING:
    from agentrl.observe.run_state import PolicyState, RunState


class Figure(NamedTuple):
    """A plot of the page."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    """(label, metric name); of a name that ends in `<…>` there is a line for each word, which is added to the label."""
    low: float | None = None
    high: float | None = None


COLOURS = 6
HISTOGRAM_ROWS = 8
FIGURES = (
    Figure("Reward", "mean per unit", (("training", "reward/mean"), ("held-out", "evaluation/reward"))),
    Figure("Staleness", "optimizer steps", (("mean", "staleness/mean"), ("largest", "staleness/max")), low=0),
    Figure("Busy shares", "of wall time", (("engine", "engine/busy_share"), ("trainer", "trainer/busy_share")), 0, 1),
    Figure("Throughput", "sampled tokens/s", (("tokens/s", "tokens/sampled_per_s"),), low=0),
    Figure("Episode length", "turns", (("training", "episodes/turns"), ("held-out", "evaluation/turns")), low=0),
    Figure("Episode length", "sampled tokens", (("training", "episodes/tokens"), ("held-out", "evaluation/tokens")), 0),
    Figure("Entropy", "nats per token", (("entropy", "entropy"),), low=0),
    Figure("Engine and trainer apart (k3)", "nats per token", (("k3", "k3"),), low=0),
    Figure(
        "What taught nothing, what broke",
        "fraction",
        (("units without advantage", "advantage/zero_share"), ("turns breaking the format", "format/broken_turns")),
        0,
        1,
    ),
    Figure(
        "Proposals",
        "fraction",
        (
            ("p from 0.2 to 0.8", "pass_rate/frontier"),
            ("nobody solves", "pass_rate/0"),
            ("everybody solves", "pass_rate/1"),
            ("accepted by the gate", "gate/acceptance"),
            ("made before", "proposals/repeated"),
        ),
        0,
        1,
    ),
    Figure("Proposals", "entropy of their structures, nats", (("entropy", "proposals/structure_entropy"),), low=0),
    Figure("Reward by seat", "mean per agent", (("", "reward/<seat>"),)),
    Figure("KL to the trained weights by seat", "k3, nats per token", (("", "seat_k3/<seat>"),), low=0),
    Figure("Games", "fraction", (("won against ", "win_rate/<policy>"), ("won by ", "won/<seat>")), 0, 1),
    Figure("Gradient", "norm before clipping", (("gradient norm", "grad_norm"),), low=0),
)

STYLE = """
:root { color-scheme: light dark; --fg: #1c2330; --dim: #667085; --bg: #ffffff; --card: #f6f7f9; --line: #dfe3ea;
  --c0: #2563eb; --c1: #d9480f; --c2: #2b8a3e; --c3: #9c36b5; --c4: #0b7285; --c5: #b08900; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ef; --dim: #98a2b3; --bg: #12161d; --card: #1a2029;
  --line: #2d3643; --c0: #74a7ff; --c1: #ff9a62; --c2: #69db7c; --c3: #e599f7; --c4: #66d9e8; --c5: #ffd43b;
  --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 28px 20px 60px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 34px 0 10px; } h3 { font-size: 14px; margin: 0; }
p { margin: 4px 0; } .dim { color: var(--dim); } .path { overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-top: 18px; }
.numbers div, figure, .alarm { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.numbers div { padding: 10px 14px; }
.numbers b { display: block; white-space: nowrap; font-size: 20px; font-weight: 600; }
.numbers span { color: var(--dim); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 6px; } figcaption { display: flex; flex-wrap: wrap; gap: 2px 12px; }
figcaption span { font-size: 12px; color: var(--dim); } figcaption i { font-style: normal; font-size: 12px; }
svg { width: 100%; height: auto; display: block; margin-top: 6px; } svg text { font-size: 11px; fill: var(--dim); }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--dim); stroke-dasharray: 3 3; }
polyline { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
COLOURS
.alarm { padding: 10px 14px; margin: 8px 0; border-left: 4px solid var(--bad); } .alarm b { color: var(--bad); }
table { border-collapse: collapse; font-size: 14px; } td, th { padding: 3px 18px 3px 0; text-align: left;
  vertical-align: top; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
tr + tr td { border-top: 1px solid var(--line); } .wide { overflow-x: auto; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; overflow-x: auto;
  font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; margin-top: 30px; font-size: 18px; font-weight: 600; }
""".replace(
    "COLOURS",
    "\n".join(
        f"polyline.c{n} {{ stroke: var(--c{n}); }} circle.c{n}, i.c{n} {{ fill: var(--c{n}); color: var(--c{n}); }}"
        for n in range(COLOURS)
    ),
)


def page(
    state: RunState,
    *,
    config: Mapping[str, Any],
    raised: Sequence[tuple[int, Alarm]],
    summary: Mapping[str, Any],
    win_rates: Sequence[Sequence[str]] = (),
) -> str:
    """The report.

    Args:
        state: the run.
        config: its resolved configuration, shown as it is.
        raised: (step, alarm) of every alarm, in order.
        summary: what `summary.json` holds; empty where the run has not ended.
        win_rates: the matrix of results against past versions, its heading first; empty where there are none.
    """
    parts = [_heading(state, summary), _numbers(state, summary), _alarms(raised)]
    for policy in state.policies.values():
        title = f"<h2>{_text(policy.name)}</h2>" if len(state.policies) > 1 else "<h2>Curves</h2>"
        parts.append(f'{title}<div class="plots">{"".join(_figure(figure, policy) for figure in FIGURES)}</div>')
    parts += [_pass_rates(state), _win_rates(win_rates), _episodes(state), _evaluations(state), _last_values(state)]
    parts.append(f"<details><summary>Configuration</summary><pre>{_text_block(config)}</pre></details>")
    allowed = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(state.plan.name)} · agentrl</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _heading(state: RunState, summary: Mapping[str, Any]) -> str:
    plan = state.plan
    how = state.status.outcome if state.status is not None else ""
    status = {
        "": "" if summary else "<p><b>The run has not ended.</b></p>",
        "killed": "<p><b>The run was killed; it can be resumed.</b></p>",
        "failed": "<p><b>The run ended with an error; it can be resumed.</b></p>",
    }.get(how, "")
    if summary.get("state") == "stopped" and how in ("", "stopped"):
        status = "<p><b>The run was stopped; it can be resumed.</b></p>"
    return (
        f'<h1>{_text(plan.name)}</h1><p class="dim path">{_text(plan.environment)} · {_text(plan.model)}<br>'
        f"{_text(state.path)}</p>{status}"
    )


def _numbers(state: RunState, summary: Mapping[str, Any]) -> str:
    cells: list[tuple[str, str]] = []
    several = len(state.policies) > 1
    for policy in state.policies.values():
        whose = f" of {policy.name}" if several else ""
        steps = state.plan.steps_of(policy.name)
        cells.append((f"{policy.step}" + (f" / {steps}" if steps else ""), f"steps{whose}"))
        _, held_out = policy.series("evaluation/reward")
        if held_out:
            value = f"{held_out[0]:.3f} → {held_out[-1]:.3f}" if len(held_out) > 1 else f"{held_out[0]:.3f}"
            cells.append((value, f"held-out reward{whose}"))
        _, lags = policy.series("staleness/mean")
        if lags:
            cells.append((f"{sum(lags) / len(lags):.2f}", f"mean staleness{whose}, in steps"))
        _, rewards = policy.series("reward/mean")
        if rewards:
            last = rewards[-5:]
            cells.append((f"{sum(last) / len(last):.3f}", f"training reward{whose}, last {len(last)} steps"))
    seconds = _number(summary.get("rl_seconds"))
    if seconds is not None:
        cells.append((duration(seconds), "training"))
    for key, label in (("engine_busy_share", "engine busy"), ("trainer_busy_share", "trainer busy")):
        share = _number(summary.get(key))
        if share is not None:
            cells.append((f"{share:.0%}", label))
    if state.status is not None:
        cells.append((f"{state.status.trained:,}", "episodes trained"))
        cells.append((f"{sum(state.status.dropped.values()):,}", "episodes dropped"))
    boxes = "".join(f"<div><b>{_text(value)}</b><span>{_text(label)}</span></div>" for value, label in cells)
    return f'<div class="numbers">{boxes}</div>'


def _alarms(raised: Sequence[tuple[int, Alarm]]) -> str:
    if not raised:
        return '<h2>Alarms</h2><p class="dim">None was raised.</p>'
    items = [
        f'<div class="alarm"><b>{_text(alarm.name)}</b> {_text(alarm.policy)} <span class="dim">from step {step}</span>'
        f"<p>{_text(alarm.text)}.</p><p>Try: {_text(alarm.advice)}.</p></div>"
        for step, alarm in raised
    ]
    return "<h2>Alarms</h2>" + "".join(items)


def _figure(figure: Figure, policy: PolicyState) -> str:
    lines = []
    for colour, (label, name) in enumerate(_series(figure, policy)):
        steps, values = policy.series(name)
        if values:
            lines.append(Line(label, steps, values, colour % COLOURS, dots=name.startswith("evaluation/")))
    title = f"{figure.title}, {figure.unit}"
    drawn = plot(lines, title=title, low=figure.low, high=figure.high, marks=policy.marks())
    if not drawn:
        return ""
    legend = "".join(f'<i class="c{line.colour}">— {_text(line.label)} {line.values[-1]:.4g}</i>' for line in lines)
    caption = f"<h3>{_text(figure.title)}</h3><span>{_text(figure.unit)}</span>{legend}"
    return f"<figure><figcaption>{caption}</figcaption>{drawn}</figure>"


def _series(figure: Figure, policy: PolicyState) -> list[tuple[str, str]]:
    series: list[tuple[str, str]] = []
    for label, name in figure.series:
        if not name.endswith(">"):
            series.append((label, name))
            continue
        measured = sorted({one for values in policy.steps.values() for one in values})
        words = [one for one in measured if (known := describe(one)) is not None and known.name == name]
        series += [(label + one.partition("/")[2], one) for one in words[:COLOURS]]
    return series


def _pass_rates(state: RunState) -> str:
    """The histogram of p over the run, of the policy that stepped most: what is proposed belongs to all."""
    policy = max(state.policies.values(), key=lambda policy: policy.step, default=None)
    measured = [(step, v) for step, v in policy.steps.items() if "pass_rate/groups" in v] if policy is not None else []
    size = -(-len(measured) // HISTOGRAM_ROWS)
    rows = []
    for at in range(0, len(measured), size or 1):
        window = [values for _, values in measured[at : at + size]]
        shares = [f"{weighted(window, f'pass_rate/{name}', 'pass_rate/groups'):.2f}" for name in PASS_RATES]
        groups = f"{total(window, 'pass_rate/groups'):,.0f}"
        rows.append((f"{measured[at][0]} to {measured[at : at + size][-1][0]}", groups, *shares))
    if not rows:
        return ""
    heading = ("steps", "proposals", *(f"p = {name}" if name in "01" else f"p in {name}" for name in PASS_RATES))
    return f'<h2>Pass rate p of the proposals</h2><div class="wide">{_table(heading, rows)}</div>'


def _episodes(state: RunState) -> str:
    status = state.status
    if status is None:
        return ""
    rows = [("in flight", status.in_flight), ("ready", status.ready), ("trained", status.trained)]
    rows += [(f"dropped: {reason}", count) for reason, count in status.dropped.items()]
    return f"<h2>Episodes</h2>{_table(('', 'episodes'), [(name, f'{count:,}') for name, count in rows])}"


def _win_rates(matrix: Sequence[Sequence[str]]) -> str:
    if not matrix:
        return ""
    heading, *rows = matrix
    return f'<h2>Win rates against past versions</h2><div class="wide">{_table(heading, rows)}</div>'


def _evaluations(state: RunState) -> str:
    rows = [
        (policy.name, str(step), *(_shown(values.get(f"evaluation/{name}")) for name in ("reward", "turns", "tokens")))
        for policy in state.policies.values()
        for step, values in sorted(policy.evaluations.items())
    ]
    heading = ("policy", "step", "reward", "turns", "sampled tokens")
    return f"<h2>Held-out evaluations</h2>{_table(heading, rows)}" if rows else ""


def _last_values(state: RunState) -> str:
    rows = []
    for policy in state.policies.values():
        for name, value in sorted(policy.last.items()):
            known = describe(name)
            unit, meaning = (known.unit, known.meaning) if known else ("", "of the environment")
            whose = f"{policy.name}: " if len(state.policies) > 1 else ""
            rows.append((f"{whose}{name}", _shown(value), unit, meaning))
    if not rows:
        return ""
    table = _table(("metric", "value", "unit", "meaning"), rows, numbers=(1,))
    return f'<details><summary>All metrics of the last step</summary><div class="wide">{table}</div></details>'


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | None = None) -> str:
    right = set(range(1, len(heading)) if numbers is None else numbers)

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if at in right else ''}>{_text(cell)}</{tag}>" for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(heading, 'th')}</tr>{body}</table>"


def _text(value: str) -> str:
    return html.escape(plain(value))


def _text_block(value: Mapping[str, Any]) -> str:
    lines = json.dumps(value, indent=2, ensure_ascii=False, default=str).split("\n")
    return "\n".join(_text(line) for line in lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None
