"""Pages about runs for the terminal, and `TerminalPage`, the only place where a run's content becomes terminal text,
escaped.

Callers build a `TerminalPage` of plain strings; only this module uses rich, and it makes `Text`, never markup. Styles
are constants of the caller. Content of a run reaches the terminal escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl.core.text import escape_line, escape_text, format_rate, plural, shorten_lines
from agentrl.inspection.reader import reward_columns
from agentrl.inspection.statistics import latest_metrics, win_rate_matrix
from agentrl.observe.metrics import find_registered_metric
from agentrl.observe.run_screen import plot_curve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from agentrl.inspection.ledger import RunLedger
    from agentrl.inspection.reader import EpisodeLine, RewardCurvePoint, RunLine
    from agentrl.inspection.run_comparison import CurvePoint, RunsComparison
    from agentrl.inspection.statistics import EpisodeDistribution, OpponentResult, RunStatistics
    from agentrl.inspection.steps import StepLine
    from agentrl.journal.port import PruneTotals
    from agentrl.observe.run_state import RunState

MAX_CELL = 500
"""Maximum characters of content in a table cell."""
MAX_BLOCK = 20_000
"""Maximum characters of content in a block; `--json` has all of it."""

Part = str | tuple[str, str]
"""Text, optionally with a style."""
EPISODE_COLUMNS = (
    *("episode", "attempt", "status", "environment", "task", "reward", "stop_reason", "drop_reason"),
    *("turns", "tokens", "oldest_step", "seconds"),
)
"""Default columns of `episode list`, with `reward/SEAT` instead of `reward` if several seats are rewarded, and without
`environment` if all listed episodes have the same."""
_NUMBERS = {"attempt", "oldest_step", "lineage", "staleness", "reward", "turns", "tokens", "seconds"}


class TerminalPage:
    """The output of a command, from top to bottom."""

    def __init__(self) -> None:
        self._parts: list[Text | Table] = []

    def __rich__(self) -> RenderableType:
        """Return the page for a rich console."""
        return Group(*self._parts)

    def add(self, page: TerminalPage) -> None:
        """Append another page."""
        self._parts += page._parts

    def line(self, *parts: Part) -> None:
        """Add a line made of `parts`."""
        self._parts.append(_as_text(parts))

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(Text("" if not self._parts else "\n") + Text(f"── {_short(text, MAX_CELL)} ──", "bold"))

    def block(self, content: str, style: str = "", *, indent: int = 4) -> None:
        """Add multi-line content; very long content is cut, with its length."""
        visible = escape_text(content[:MAX_BLOCK])
        if len(content) > MAX_BLOCK:
            visible += f"\n… and {len(content) - MAX_BLOCK:,} more characters (--json has them)"
        self._parts.append(Text("\n".join(" " * indent + line for line in visible.split("\n")), style))

    def flow(self, parts: Iterable[tuple[str, str]], *, indent: int = 2) -> None:
        """Add pieces of content one after the other, each in its style; newlines in them are marked, and kept."""
        text = Text(" " * indent)
        for content, style in parts:
            for number, piece in enumerate(content.split("\n")):
                if number:
                    text.append("⏎\n" + " " * indent, "dim")
                text.append(escape_line(piece), style)
        self._parts.append(text)

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Add names with their values, one per line."""
        for name, fact in facts:
            lines = escape_text(shorten_lines(fact, 8 * MAX_CELL)).replace("\t", "    ").split("\n")
            self._parts.append(Text(f"  {escape_line(name):<12} ", "dim") + Text(f"\n{'':15}".join(lines)))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Part]], *, caption: str = "") -> None:
        """Add a table; the heading of a column of numbers ends with `>`."""
        table = Table(box=None, pad_edge=False, header_style="bold", caption=escape_line(caption) or None)
        for column in columns:
            right = column.endswith(">")
            name = Text(escape_line(column.removesuffix(">")))
            table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in rows:
            table.add_row(*(_as_text([cell]) for cell in row))
        self._parts.append(table)

    def problems(self, problems: Iterable[str]) -> None:
        """Append a list of problems met while reading."""
        for problem in problems:
            self._parts.append(Text(f"\nnot readable: {escape_text(problem)}", "bold red"))


def _as_text(parts: Iterable[Part]) -> Text:
    text = Text()
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append(_short(content, MAX_CELL), style)
    return text


def _short(content: str, max_length: int) -> str:
    return escape_line(content if len(content) <= max_length else f"{content[:max_length]}…")


def run_table(lines: Sequence[RunLine]) -> TerminalPage:
    """Make a page with runs, one per line."""
    page = TerminalPage()
    if not lines:
        page.line("no runs here")
        return page
    rows = []
    for line in lines:
        steps = ", ".join(
            f"{step}" if len(line.steps) == 1 else f"{policy} {step}" for policy, step in line.steps.items()
        )
        is_one = len({name.partition("/")[0] for name in line.rewards}) < 2
        rewards = ", ".join(
            f"{name.partition('/')[2] if is_one else name} {format_number(reward)}".strip()
            for name, reward in line.rewards.items()
        )
        counts = [str(line.episodes), str(line.dropped), str(line.in_flight), steps, rewards]
        rows.append([line.name, line.purpose, line.state, *counts, line.problem or ""])
    page.table(["run", "purpose", "state", "episodes>", "dropped>", "in_flight>", "steps>", "reward>", ""], rows)
    if any(line.purpose == "train" and line.rewards for line in lines):
        page.line("reward: of training runs, the mean of the last 5 steps")
    return page


def ledger_page(ledger: RunLedger) -> TerminalPage:
    """Make a page with both equations, one per line, and the verdict."""
    page = TerminalPage()
    page.line("episodes, children counted")
    rows = []
    for name, counts in ledger.episodes.items():
        numbers = [counts.admitted, "", counts.in_flight, counts.ready, counts.trained, sum(counts.dropped.values())]
        rows.append([name, *map(str, numbers), _format_counts(counts.dropped)])
    page.table(["environment", "admitted>", "=", "in flight>", "+ ready>", "+ trained>", "+ dropped>", ""], rows)
    page.line("units")
    rows = []
    for name, unit in ledger.units.items():
        through = f"through {ledger.through[name]}" + (f"; {_format_counts(unit.dropped)}" if unit.dropped else "")
        numbers = [unit.committed, "", unit.ready, unit.consumed, sum(unit.dropped.values())]
        rows.append([name, *map(str, numbers), through])
    page.table(["policy", "committed>", "=", "ready>", "+ consumed>", "+ dropped>", ""], rows)
    if ledger.holds:
        page.line(("the ledger holds: nothing is lost, nothing was trained twice", "green"))
    else:
        page.block("\n".join(["the ledger does NOT hold", *ledger.problems]), "red", indent=0)
    return page


def pruned_page(totals: PruneTotals, *, is_dry: bool) -> TerminalPage:
    """Make a page with the episodes and steps whose tokens were pruned, or would be, and the consequences."""
    page = TerminalPage()
    verb = "would be removed" if is_dry else "removed"
    size = f"{totals.bytes / (1 << 20):.3g} MiB"
    subject = f"{plural(totals.episodes, 'episode')} and the columns of {plural(totals.files, 'step')}"
    page.line(f"{verb}: the tokens of {subject}, {size}, rule {totals.rule}")
    for policy, step in totals.last.items():
        page.line(f"{policy}: the episodes that steps up to {step} trained on, and those dropped before")
    page.line(
        "no longer possible: `episode show|tokens|replay|rescore|fork` of these episodes, `step replay` of these steps"
    )
    page.line("kept: rewards, credits, steps, ledger, curves, evaluations; every checkpoint can still be resumed from")
    return page


def win_rate_table(results: Sequence[OpponentResult]) -> TerminalPage:
    """Make a page with the matrix of win rates: a row per step of the policy, a column per past version."""
    page = TerminalPage()
    if not results:
        page.line("no episode was played against a past version")
        return page
    (policy_header, step, *versions), *rows = win_rate_matrix(results)
    page.table([policy_header, f"{step}>", *(f"{version}>" for version in versions)], rows)
    return page


def forks_page(lines: Sequence[EpisodeLine]) -> TerminalPage:
    """Make a page with new forks, and why some were dropped."""
    page = episode_table(lines, len(lines))
    for line in lines:
        if line.drop_reason:
            page.line((line.episode, "bold"), " ", ("dropped", "red"), f" as {line.drop_reason}")
            page.block(line.detail or "")
    return page


def episode_table(lines: Sequence[EpisodeLine], total: int, columns: Sequence[str] = ()) -> TerminalPage:
    """Make a page with episodes, one per line, and their total; every heading is a column of `--where` and `--sort`."""
    page = TerminalPage()
    if not lines:
        page.line("no episodes")
        return page
    column_names = list(columns or EPISODE_COLUMNS)
    if not columns:
        optional = {"attempt", "stop_reason", "drop_reason"}
        column_names = [name for name in column_names if name not in optional or any(getattr(x, name) for x in lines)]
        if len({line.environment for line in lines}) == 1:
            column_names.remove("environment")
        place = column_names.index("reward")
        column_names[place : place + 1] = reward_columns(line.rewards for line in lines)
    by_seat = any(name.startswith("reward/") for name in column_names)
    rows = [
        [format_rewards(line) if name == "reward" and not by_seat else _cell(line, name) for name in column_names]
        for line in lines
    ]
    headings = [f"{name}>" if name in _NUMBERS or name.startswith("reward/") else name for name in column_names]
    page.table(headings, rows, caption=f"{len(lines)} of {total:,} episodes" if total > len(lines) else "")
    page.problems(f"{line.episode}: {line.problem}" for line in lines if line.problem)
    return page


def format_rewards(line: EpisodeLine | StepLine) -> str:
    """Format the reward of an episode or step; if several seats were rewarded, the reward of each."""
    if len(line.rewards) < 2:
        return format_number(line.reward)
    return ", ".join(f"{seat} {format_number(reward)}" for seat, reward in line.rewards.items())


def _cell(line: EpisodeLine, column: str) -> str:
    value = line.field(column)
    if column in ("turns", "tokens"):
        return "" if value is None else f"{value:,}"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, dict):
        return ", ".join(f"{seat}: {policy}" for seat, policy in value.items())
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def metrics_page(state: RunState) -> TerminalPage:
    """Make a page with the newest value of each metric, its step, its unit and its meaning."""
    page, rows = TerminalPage(), []
    for policy, values in latest_metrics(state).items():
        for name, value in values.items():
            metric = find_registered_metric(name)
            label = f"{policy}: " if len(state.policies) > 1 else ""
            steps, _ = state.policies[policy].series(name)
            step = str(steps[-1] if steps else state.policies[policy].step)
            meaning = metric.meaning if metric else ""
            rows.append([f"{label}{name}", f"{value:.4g}", step, metric.unit if metric else "", meaning])
    if rows:
        page.table(["metric", "value>", "step>", "unit", "meaning"], rows)
    else:
        page.line("no metrics yet")
    return page


def reward_curves_page(points: Sequence[RewardCurvePoint], *, width: int = 64) -> TerminalPage:
    """Plot the reward of each policy over its steps."""
    page = TerminalPage()
    policies = dict.fromkeys(point.policy for point in points)
    if not policies:
        page.line("no optimizer step was taken yet; an evaluation takes none")
    for policy in policies:
        policy_points = [point for point in points if point.policy == policy]
        for column in reward_columns(point.rewards for point in policy_points):
            _, _, seat = column.partition("/")
            rewards = [(point.step, point.rewards.get(seat) if seat else point.reward) for point in policy_points]
            present = [(step, reward) for step, reward in rewards if reward is not None]
            title = f"reward of {policy}" + (f" as {seat}" if seat else "")
            curve = plot_curve([r for _, r in present], steps=[s for s, _ in present], title=title, width=width)
            page.block(curve, indent=0)
        for point in points:
            if point.policy == policy and point.mark:
                page.line((f"step {point.step}: ", "bold"), point.mark)
    return page


def metric_curves_page(
    metric: str,
    values: Mapping[str, Sequence[tuple[int, float | None]]],
    breaks: Mapping[str, set[int]],
    errors: Mapping[str, Mapping[int, float | None]],
) -> TerminalPage:
    """Plot a metric of each policy over its steps.

    Args:
        metric: name of the metric.
        values: its values by policy and step.
        breaks: steps of each policy before which the curve has a gap, because the held-out tasks changed.
        errors: half the widths of the intervals of estimates, by policy and step.
    """
    page = TerminalPage()
    for policy, points in values.items():
        present = [(step, value) for step, value in points if value is not None]
        title = f"{metric} of {policy}" if len(values) > 1 else metric
        gaps = breaks.get(policy, set())
        curve = plot_curve([v for _, v in present], steps=[s for s, _ in present], title=title, breaks=gaps)
        page.block(curve, indent=0)
        for step in sorted(gaps):
            page.line(
                (f"step {step}: ", "bold"), "the held-out tasks changed; values before and after are not compared"
            )
        for step, value in present:
            if (error := errors.get(policy, {}).get(step)) is not None:
                page.line((f"step {step}: ", "bold"), f"{value:.3f} ± {error:.3f}")
    return page


SIDE_BY_SIDE = ("reward/mean", "episodes/tokens", "entropy", "k3", "grad_norm", "tokens/sampled_per_s", "run/seconds")
"""Metrics that a terminal shows side by side, with those of evaluations; `--json` has all of them."""


def comparison_page(comparison: RunsComparison) -> TerminalPage:
    """Make a page with a comparison of runs."""
    page, names = TerminalPage(), [group.name for group in comparison.groups]
    for group in comparison.groups:
        if len(group.runs) > 1:
            page.line((f"{group.name}: ", "bold"), ", ".join(group.runs))
    page.heading("settings and code that differ")
    if comparison.settings:
        rows = [
            [line.name, *("" if value is None else str(value) for value in line.values)] for line in comparison.settings
        ]
        page.table(["setting", *names], rows)
    else:
        page.line("none")
    if comparison.paired or comparison.notes:
        page.heading("held-out reward, paired over the same tasks")
    rows = [
        [
            *(line.group, line.policy, format_number(line.baseline), format_number(line.reward)),
            *(f"{line.difference:+.3f} [{line.low:+.3f}, {line.high:+.3f}]", line.verdict),
            f"{line.better} / {line.worse} of {line.tasks}",
        ]
        for line in comparison.paired
    ]
    if rows:
        base = f"{names[0]}>"
        page.table(["run", "policy", base, "reward>", "difference [95 %]>", "verdict", "tasks better / worse>"], rows)
    for note in comparison.notes:
        page.line(note)
    several = len({line.policy for line in comparison.metrics}) > 1
    metrics_to_show = [
        line
        for line in comparison.metrics
        if line.metric in SIDE_BY_SIDE or line.metric in {"evaluation/reward", "evaluation/pass_at/1"}
    ]
    if metrics_to_show:
        page.heading("metrics: mean of the last 5 steps; newest evaluation, clock or total")
        page.table(
            ["metric", *(f"{name}>" for name in names)],
            [
                [f"{line.policy}: {line.metric}" if several else line.metric, *map(_small, line.values)]
                for line in metrics_to_show
            ],
        )
    for policy, metric in dict.fromkeys((curve.policy, curve.metric) for curve in comparison.curves):
        curves = {c.group: c.points for c in comparison.curves if (c.policy, c.metric) == (policy, metric)}
        places = sorted({point.x for points in curves.values() for point in points})
        stride = -(-len(places) // 20)  # show at most 20 rows of a curve
        title = f"{metric} of {policy}" if several else metric
        page.heading(title if stride == 1 else f"{title}, 1 in {stride} points")
        rows = _curve_rows(names, curves, places[::-1][::stride][::-1], is_exact=comparison.axis == "step")
        page.table([f"{comparison.axis}>", *(f"{name}>" for name in names)], rows)
    return page


def _curve_rows(
    names: Sequence[str], curves: Mapping[str, Sequence[CurvePoint]], places: Sequence[float], *, is_exact: bool
) -> list[list[str]]:
    """Return a row for each place, with the point of every curve there; the nearest one unless `is_exact`."""
    reach = 0.0 if is_exact else (places[-1] - places[0]) / max(len(places) - 1, 1) / 2
    rows = []
    for x in places:
        cells = []
        for name in names:
            nearest = min(curves.get(name, ()), key=lambda point: abs(point.x - x), default=None)
            is_here = nearest is not None and abs(nearest.x - x) <= reach
            spread = f" ± {nearest.error:.3f}" if nearest is not None and nearest.error else ""
            cells.append(f"{format_number(nearest.y)}{spread}" if nearest is not None and is_here else "")
        rows.append([f"{x:,.0f}", *cells])
    return rows


def step_table(lines: Sequence[StepLine]) -> TerminalPage:
    """Make a page with steps, one per line."""
    page = TerminalPage()
    if not lines:
        page.line("no optimizer step was taken")
        return page
    columns, rows = reward_columns(line.rewards for line in lines), []
    for line in lines:
        by_column = {"reward": line.reward, **{f"reward/{seat}": reward for seat, reward in line.rewards.items()}}
        numbers = [format_number(by_column.get(column)) for column in columns]
        numbers += [_small(line.loss), _small(line.grad_norm), str(line.units)]
        numbers += [f"{line.samples:,}", f"{line.tokens:,}", format_number(line.seconds)]
        note = line.no_gradient if line.survives else "undone by a rollback"
        rows.append([line.policy, f"{line.lineage}.{line.step}", *numbers, note])
    headings = ["policy", "version>", *(f"{column}>" for column in columns), "loss>", "grad_norm>", "episodes>"]
    headings += ["rows>", "tokens>", "seconds>", ""]
    page.table(headings, rows)
    return page


def step_replays_page(steps: Sequence[Mapping[str, Any]]) -> TerminalPage:
    """Make a page about repeated steps, each a `StepReplayResult` as a dictionary: whether they are equal, and if not,
    why.
    """
    page, rows = TerminalPage(), list[list[Part]]()
    for step in steps:
        version = f"{step['policy']}@{step['lineage']}.{step['step']}"
        rows.append([version, _verdict(step["identical"]), f"{step['rows']:,}", f"{step['tokens']:,}", step["text"]])
    page.table(["version", "input", "rows>", "tokens>", ""], rows)
    for step in steps:
        if (recomputation := step["computed"]) is None:
            continue
        if recomputation["same"] is not None:
            pairs = [(name, recomputation[name], recomputation[f"{name}_again"]) for name in ("loss", "grad_norm")]
            comparison_rows: list[list[Part]] = [
                [name, _digits(then), _digits(now), _verdict(then == now, close=recomputation["same"])]
                for name, then, now in pairs
            ]
            page.table(["", "recorded>", "computed again>", ""], comparison_rows)
        page.facts([("weights", recomputation["text"])])
    return page


def _verdict(identical: bool, *, close: bool = False) -> Part:
    if identical:
        return ("identical", "green")
    return ("the same to 1e-6", "green") if close else ("differs", "red")


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def statistics_page(figures: RunStatistics) -> TerminalPage:
    """Make a page with the figures of a run."""
    page = TerminalPage()
    speed_text = (
        ""
        if figures.tokens_per_second is None
        else f", {format_rate(figures.tokens_per_second)} sampled tokens a second"
    )
    page.line((figures.name, "bold"), f" · {format_number(figures.seconds)} s{speed_text}")
    page.line(f"{figures.in_flight} in flight, {plural(figures.repeated, 'attempt')} beyond the first")
    for kind in figures.episodes:
        page.heading(f"{kind.environment} · {kind.purpose}")
        page.line(f"  {plural(kind.episodes, 'episode')} ended: {_format_counts(kind.ended)}")
        spreads = {**kind.rewards, "turns": kind.turns, "tokens": kind.tokens, "seconds": kind.seconds}
        rows = [[f"  {name}", *_spread(spread)] for name, spread in spreads.items()]
        page.table(["  of committed ones", "mean>", "10 % below>", "median>", "10 % above>"], rows)
    page.heading("policies")
    rows = [
        [
            policy.policy,
            f"{policy.trajectories:,}",
            f"{policy.tokens:,}",
            format_number(policy.reward),
            str(policy.steps),
            ", ".join(
                f"{steps}: {count:,}"
                for steps, count in (*policy.staleness.items(), ("begun before a resume", policy.before_resume))
                if count
            ),
        ]
        for policy in figures.policies
    ]
    page.table(["policy", "trajectories>", "tokens>", "reward>", "steps>", "trained, by staleness"], rows)
    for policy in figures.policies:
        if policy.named_rewards:
            parts = ", ".join(f"{name} {format_number(value)}" for name, value in policy.named_rewards.items())
            page.line(f"rewards of {policy.policy} by name, before weights: {parts}")
    for caveat in figures.caveats:
        page.line(f"note: {caveat}")
    for action in figures.controls:
        page.line(f"control: {action}")
    return page


def _spread(spread: EpisodeDistribution) -> list[str]:
    return [format_number(value) for value in (spread.mean, spread.low, spread.median, spread.high)]


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def format_number(value: float | None) -> str:
    """Format a number with at most three decimals; None becomes ""."""
    text = "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
