"""Draws one screen of a run for the terminal: converts a `RunState` to a rich renderable. Reads and decides nothing.

All text passes through `terminal_safe_line`, because names come from configurations and journals of others. Curves are
drawn in braille dots, two columns and four rows per character.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl.core.text import escape_line, format_rate, plural
from agentrl.observe.alarms import WINDOW, Alarm, find_alarms
from agentrl.observe.metrics import find_registered_metric, no_gradient_text, own_metrics, reward_metrics
from agentrl.observe.pace import recorded_choice
from agentrl.observe.run_state import SILENT_S

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentrl.core.records import ProcessStatus
    from agentrl.observe.run_state import PolicyMetricHistory, RunSnapshot, RunState

WIDTH = 100
"""Maximum width of the view in characters; the minimum is 60."""
MAX_TEXT = 4000
"""Maximum number of characters shown of one text."""
MAX_NODES = 16
"""Nodes that are shown."""
MAX_STEPS = 8
"""Maximum number of steps without a gradient that are listed."""
MAX_PLOTS = 3
"""Maximum number of seats whose reward is plotted."""
BY_WORD = (
    ("reward/<seat>", "{} reward", "{:.3f}"),
    ("named_reward/<name>", "{}", "{:.3f}"),
    ("seat_k3/<seat>", "{} k3", "{:.4f}"),
    ("won/<seat>", "{} wins", "{:.2f}"),
    ("win_rate/<policy>", "wins against {}", "{:.2f}"),
)
"""Metrics that exist per seat, reward or opponent, with label and number format."""


_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def render_run_screen(state: RunState, *, width: int = WIDTH, age_s: float | None = None) -> RenderableType:
    """Return the screen of a run.

    Args:
        state: state of the run.
        width: width of the screen in characters.
        age_s: seconds since another process wrote the status; None: the status is current.
    """
    width = max(60, min(width, WIDTH))
    alarms = find_alarms(state)
    parts: list[RenderableType] = [_heading(state, width, age_s)]
    if state.failure:
        parts.append(Text(terminal_safe_line(state.failure), "bold red"))
    if alarms:  # placed first, because a short terminal cuts off the end
        parts.append(_alarms(alarms))
    several = len(state.policies) > 1
    for policy in state.policies.values():
        if not state.plan.steps and not policy.steps:  # the run is an evaluation
            parts.append(_figures(policy, width, several=several))
            continue
        parts.append(_progress(state, policy, width, several=several))
        if not several:
            parts.append(_plot(policy, width))
        parts.append(_figures(policy, width, several=several))
        parts += _steps_without_gradient(policy)
        parts += _chosen_staleness(policy)
    if state.status is not None:
        parts.append(_status(state.status))
    if not alarms:
        steps = max((len(policy.steps) for policy in state.policies.values()), default=0)
        early = ""
        if steps < WINDOW and state.plan.steps:
            reason = "too early to tell" if state.standing == "running" else "too few steps to tell, as the run ended"
            early = f": {reason} after {plural(steps, 'step')}"
        earlier = ", ".join(f"{name} at step {step}" for name, step in state.raised.items())
        now = f" now; {len(state.raised)} earlier: {earlier}" if earlier else ""
        parts.append(Text(f"no alarms{now}{early}", "dim"))
    if state.problem:
        parts.append(Text(terminal_safe_line(f"not readable: {state.problem}"), "bold red"))
    return Group(*parts)


def terminal_safe_line(text: str) -> str:
    """Return `text` on one line, safe for a terminal (`escape_line`), cut at the end if too long."""
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"
    return escape_line(text)


def format_duration(seconds: float) -> str:
    """Format a duration in seconds for people.

    Example:
        >>> format_duration(3725)
        '1:02:05'
        >>> format_duration(65)
        '1:05'
    """
    minutes, seconds_left = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def _heading(state: RunState, width: int, age_s: float | None) -> Text:
    plan, status = state.plan, state.status
    text = Text().append(terminal_safe_line(plan.name), "bold")
    if plan.environment:
        text.append(terminal_safe_line(f"  {plan.environment.rsplit('/', 1)[-1]}"), "cyan")
    if status is None:
        return _cut(text.append("  no status yet", "dim"), width)
    is_running = state.standing == "running"
    phase = status.phase if is_running else state.standing or "ended"
    text.append(terminal_safe_line(f"  {phase}"), "green")
    if status.progress is not None and is_running:
        num_ended, total = status.progress
        text.append(f"  {'' if status.is_evaluating else 'evaluating alongside: '}{num_ended}/{total} ", "green")
        if total:
            text.append_text(_bar(num_ended / total, 12))
    if status.seconds:
        text.append(f"  {format_duration(status.seconds)}", "dim")
    if age_s is not None and age_s > SILENT_S and is_running:
        text.append(f"  silent for {format_duration(age_s)}: is it alive?", "bold yellow")
    if state.standing == "killed":
        text.append("  to continue: the same command with --resume", "dim")
    return _cut(text, width)


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _progress(state: RunState, policy: PolicyMetricHistory, width: int, *, several: bool) -> Text:
    steps = state.plan.steps_of(policy.name)
    text = Text().append(f"{terminal_safe_line(policy.name)}  " if several else "", "bold")
    text.append(f"step {policy.step}" + (f"/{steps}  " if steps else ""))
    if steps:
        text.append_text(_bar(min(policy.step / steps, 1.0), max(10, min(40, width - 50))))
        if (seconds_left := state.seconds_left(policy.name)) is not None:
            text.append(f"  about {format_duration(seconds_left)} left", "dim")
    return text


def _plot(policy: PolicyMetricHistory, width: int) -> RenderableType:
    """Plot the reward; of a policy with several seats, that of each seat instead of their sum."""
    plots: list[RenderableType] = []
    for name in reward_metrics(policy.last)[:MAX_PLOTS]:
        whose = "" if name == "reward/mean" else f" of {terminal_safe_line(name.partition('/')[2])[:16]}"
        steps, rewards = policy.series(name)
        if not rewards:
            return Text("reward: no step yet", "dim")
        if len(rewards) < 2:
            text = f"reward{whose} {rewards[0]:.3f} at step {steps[0]}; the curve begins with the second step"
            plots.append(Text(text, "dim"))
            continue
        title = f"reward of training{whose} by step"
        plots.append(Text(plot_curve(rewards, steps=steps, title=title, width=width - 10, height=5), "green"))
    return Group(*plots)


def _figures(policy: PolicyMetricHistory, width: int, *, several: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    spark = max(8, (width - 56) // 2)
    cells: list[tuple[str, Text]] = []
    rows = [("reward", "reward/mean", "{:.3f}"), ("staleness", "staleness/mean", "{:.1f}")]
    rows += [("tokens/s", "tokens/sampled_per_s", ""), ("entropy", "entropy", "{:.3f}")]
    rows += [("turns", "episodes/turns", "{:.1f}"), ("k3, all lags", "k3", "{:.4f}")]
    rows += [("mismatch k3", "mismatch/k3", "{:.1e}"), ("max |Δlogp|", "mismatch/max_difference", "{:.1e}")]
    rows += [("frontier", "pass_rate/frontier", "{:.2f}"), ("gate", "gate/acceptance", "{:.2f}")]
    rows += [("repeated", "proposals/repeated", "{:.2f}"), ("structures", "proposals/structure_entropy", "{:.2f}")]
    by_word = _by_word(policy)
    by_seat = [row for row in by_word if _group(row[1]) == "reward/<seat>"]
    first = [*(by_seat or (rows[:1] if several else [])), *_own(policy)]
    for label, name, form in [*first, *rows[1:], *(row for row in by_word if row not in by_seat)]:
        _, values = policy.series(name)
        if values:
            number = form.format(values[-1]) if form else format_rate(values[-1])  # no fixed number of digits
            cells.append((label, Text(f"{number:>8} ").append(sparkline(values, width=spark), "cyan")))
    evaluated = policy.evaluations[max(policy.evaluations)] if policy.evaluations else {}
    cells[:0] = [
        (
            f"held-out {terminal_safe_line(name.partition('/')[2].partition('/')[2])[:16]}".strip(),
            _held_out(policy, name),
        )
        for name in reward_metrics(evaluated, "evaluation/reward")
    ]
    last = policy.last
    for label, name in (("engine busy", "engine/busy_share"), ("trainer busy", "trainer/busy_share")):
        if name in last:
            cells.append((label, Text(f"{last[name]:>8.0%} ").append_text(_bar(min(last[name], 1.0), spark))))
    half = (len(cells) + 1) // 2
    for left_cell, right_cell in zip(cells[:half], [*cells[half:], ("", Text())][:half], strict=True):
        table.add_row(*left_cell, *right_cell)
    return table


def _steps_without_gradient(policy: PolicyMetricHistory) -> Iterator[RenderableType]:
    """Yield the newest steps without a gradient, and why the last of them had none."""
    texts = {step: text for step, metrics in policy.steps.items() if (text := no_gradient_text(metrics))}
    if texts:
        newest = list(texts)[-MAX_STEPS:]
        earlier = f"{len(texts) - len(newest):,} earlier, " if len(texts) > len(newest) else ""
        numbers = f"{earlier}{', '.join(map(str, newest))}"
        yield Text(f"{texts[newest[-1]]} at {plural(len(texts), 'step')} of {len(policy.steps):,}: {numbers}", "dim")


def _chosen_staleness(policy: PolicyMetricHistory) -> Iterator[RenderableType]:
    """Yield the bound on staleness that the run chose, and its reason."""
    if (reason := recorded_choice(policy.last)) is None:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("staleness", Text(reason))
    yield table


def _own(policy: PolicyMetricHistory) -> list[tuple[str, str, str]]:
    return [(terminal_safe_line(name)[:16], name, "{:.4g}") for name in own_metrics(policy.last)]


def _group(name: str) -> str:
    metric = find_registered_metric(name)
    return "" if metric is None else metric.name


def _by_word(policy: PolicyMetricHistory) -> list[tuple[str, str, str]]:
    rows = [
        (label.format(terminal_safe_line(name.partition("/")[2])[:16]), name, form)
        for group, label, form in BY_WORD
        for name in sorted(policy.last)
        if _group(name) == group
    ]
    return rows[:8]


def _held_out(policy: PolicyMetricHistory, name: str) -> Text:
    values = [(step, metrics[name]) for step, metrics in policy.comparable_evaluations() if name in metrics]
    if not values:
        return Text("not measured yet", "dim")
    (first, before), (step, value) = values[0], values[-1]
    error = policy.evaluations[step].get("evaluation/reward_error") if name == "evaluation/reward" else None
    text = Text().append(f"{value:>8.3f} ", "bold")
    text.append("" if error is None else f"± {error:.3f} ")
    return text.append(f"at step {step}" + (f", {before:.3f} at step {first}" if len(values) > 1 else ""), "dim")


def _status(status: RunSnapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    num_dropped = sum(status.dropped.values())
    counts = (
        f"{status.in_flight:,} in flight · {status.ready:,} ready · {status.trained:,} trained"
        f" · {num_dropped:,} dropped"
    )
    if num_dropped:
        commonest = sorted(status.dropped.items(), key=lambda item: -item[1])[:3]
        counts += f" ({', '.join(f'{terminal_safe_line(reason)} {count:,}' for reason, count in commonest)})"
    table.add_row("episodes", Text(counts))
    if status.pace:
        table.add_row("first step", Text(terminal_safe_line(status.pace)))
    for number, wait in enumerate(status.waits[:8]):
        table.add_row("waits" if number == 0 else "", Text(terminal_safe_line(wait)))
    if status.bottleneck:
        table.add_row("bottleneck", Text(terminal_safe_line(status.bottleneck)))
    nodes = list(dict.fromkeys(process.node for process in status.processes))
    for node in nodes[:MAX_NODES]:
        local = [process for process in status.processes if process.node == node]
        table.add_row(
            terminal_safe_line(node) or "this machine", Text(terminal_safe_line(" · ".join(map(_process, local))))
        )
    if len(nodes) > MAX_NODES:
        table.add_row("", Text(f"and {plural(len(nodes) - MAX_NODES, 'node')} more"))
    return table


def _process(process: ProcessStatus) -> str:
    return f"{process.name_with_gpus} {process.doing}"


def _alarms(alarms: Sequence[Alarm]) -> RenderableType:
    text = Text()
    for alarm in alarms:
        text.append(f"ALARM {terminal_safe_line(alarm.name)}  ", "bold red")
        text.append(
            terminal_safe_line(f"{alarm.policy}: " if alarm.policy else "") + terminal_safe_line(alarm.text) + ". "
        )
        text.append(f"Try: {terminal_safe_line(alarm.advice)}.\n", "yellow")
    text.rstrip()
    return text


def _bar(share: float, width: int) -> Text:
    num_filled = round(max(0.0, min(share, 1.0)) * width)
    return Text("█" * num_filled, "green").append("░" * (width - num_filled), "dim")


def plot_curve(
    values: Sequence[float],
    *,
    steps: Sequence[int] = (),
    title: str = "",
    width: int = 64,
    height: int = 10,
    breaks: Collection[int] = (),
) -> str:
    """Return a plot with axis labels, and with its first and last values in the title.

    Args:
        values: values to plot; those that are not finite are left out.
        steps: step of each value, in increasing order; empty: 1, 2, ….
        title: put before the first and last values.
        width: width of the plotting area in characters, at least 10.
        height: height of the plotting area in lines, at least 2.
        breaks: steps that no line joins to the step before. The title then has the last stretch alone.

    Returns:
        Lines without a trailing newline; a sentence if there is nothing to plot.
    """
    at = list(steps) or list(range(1, len(values) + 1))
    points = [(step, value) for step, value in zip(at, values, strict=True) if math.isfinite(value)]
    if not points:
        return f"{title}: nothing to plot yet".removeprefix(": ")
    width, height = max(width, 10), max(height, 2)
    low, high = _range([value for _, value in points])
    first, last = points[0][0], points[-1][0]
    columns, rows = 2 * width, 4 * height
    cells = [[0x2800] * width for _ in range(height)]

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def position(step: int, value: float) -> tuple[int, int]:
        x = (step - first) / (last - first) * (columns - 1) if last > first else 0
        return round(x), round((high - value) / (high - low) * (rows - 1))

    before = position(*points[0])
    for point in points:
        cell = position(*point)
        before = cell if point[0] in breaks else before
        length = max(abs(cell[0] - before[0]), abs(cell[1] - before[1]), 1)
        for part in range(length + 1):
            share = part / length
            dot(round(before[0] + share * (cell[0] - before[0])), round(before[1] + share * (cell[1] - before[1])))
        before = cell
    start = max((at for at, (step, _) in enumerate(points) if step in breaks), default=0)
    return _frame(cells, title, points, (low, high), points[start:])


def sparkline(values: Sequence[float], *, width: int = 20) -> str:
    """Return the newest values as one line of at most `width` characters, each the mean of its share of the values.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
        '▁▂▃▄▅▆▇█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    cuts = [index * len(finite) // count for index in range(count + 1)]
    means = [sum(finite[start:stop]) / (stop - start) for start, stop in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return round bounds that enclose the values, and whose middle is round too; a constant lies in the middle, or at
    the bottom if it is 0."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        constant = 0.0 if abs(low) < 1e-12 else low
        return (0.0, 1.0) if constant == 0.0 else (min(0.0, 2 * constant), max(0.0, 2 * constant))
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    for step in (unit * factor for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= 2:
            break
    last += (last - first) % 2
    return first * step, last * step


def _tick(value: float, span: float, decimals: int) -> str:
    """Format a value with enough digits to tell it from the next tick."""
    if abs(value) < 1e-9 * span:
        return f"{0.0:.{decimals}f}" if 1e-4 <= span < 1e9 else "0"
    return f"{value:.{decimals}f}" if 1e-4 <= span < 1e9 else f"{value:.2e}"


def _frame(
    cells: Sequence[Sequence[int]],
    title: str,
    points: Sequence[tuple[int, float]],
    bounds: tuple[float, float],
    last_stretch: Sequence[tuple[int, float]],
) -> str:
    low, high = bounds
    height = len(cells)
    decimals = max(0, min(6, 2 - math.floor(math.log10(high - low))))
    labels = {0: high, (4 * height - 1) // 2 // 4: (high + low) / 2, height - 1: low}
    texts = {row: _tick(value, high - low, decimals) for row, value in labels.items()}
    margin = max(len(text) for text in texts.values())
    first_value, last_value = (_tick(value, high - low, decimals) for value in (last_stretch[0][1], points[-1][1]))
    heading = f"{title}  {first_value} → {last_value}".strip()
    lines = [f"{'':{margin}}  {heading}"]
    for row, line in enumerate(cells):
        tick = "┤" if row in texts else "│"
        lines.append(f"{texts.get(row, ''):>{margin}} {tick}" + "".join(map(chr, line)).replace("\u2800", " ").rstrip())
    width = len(cells[0])
    lines.append(f"{'':{margin}} └" + "─" * width)
    first, last = str(points[0][0]), str(points[-1][0])
    axis = first if first == last else f"{first}{'step':^{width - len(first) - len(last)}}{last}"
    lines.append(f"{'':{margin}}  {axis}")
    return "\n".join(lines)
