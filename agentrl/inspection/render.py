"""Runs for the terminal. All content passes `safe` here, and is never read as markup."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl.core.safe import safe, safe_line
from agentrl.inspection.statistics import win_rate_matrix
from agentrl.journal.entries import (
    EffectEntry,
    EntryBody,
    GatherEntry,
    ResourceEntry,
    RewardEntry,
    SpawnEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.observe.metrics import describe
from agentrl.observe.plot import curve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from agentrl.inspection.ledger import RunLedger
    from agentrl.inspection.reader import CurvePoint, EpisodeLine, EpisodeView, RunLine, WinRate

MAX_CELL = 500
"""Characters of content in a cell of a table."""
_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def run_table(lines: Sequence[RunLine]) -> RenderableType:
    """Runs, a line each."""
    if not lines:
        return Text("no runs here")
    table = _table("run", "purpose", "episodes>", "in_flight>", "steps>", "reward>", "")
    for line in lines:
        steps = ", ".join(
            f"{step}" if len(line.steps) == 1 else f"{policy} {step}" for policy, step in line.steps.items()
        )
        cells = [line.name, line.purpose, str(line.episodes), str(line.in_flight), steps, _number(line.reward)]
        cells.append(line.problem or "")
        table.add_row(*map(_cell, cells))
    return table


def ledger_view(ledger: RunLedger) -> RenderableType:
    """Both equations, a line each, and the verdict."""
    episodes = _table("environment", "admitted>", "=", "in flight>", "+ ready>", "+ trained>", "+ dropped>", "")
    for name, counts in ledger.episodes.items():
        numbers = [counts.admitted, "", counts.in_flight, counts.ready, counts.trained, sum(counts.dropped.values())]
        episodes.add_row(*map(_cell, [name, *map(str, numbers), _reasons(counts.dropped)]))
    units = _table("policy", "committed>", "=", "ready>", "+ consumed>", "+ dropped>", "")
    for name, unit in ledger.units.items():
        through = f"through {ledger.through[name]}" + (f"; {_reasons(unit.dropped)}" if unit.dropped else "")
        cells = [name, unit.committed, "", unit.ready, unit.consumed, sum(unit.dropped.values()), through]
        units.add_row(*map(_cell, map(str, cells)))
    verdict = Text("the ledger holds: nothing is lost, nothing was trained twice", style="green")
    if not ledger.holds:
        verdict = Text(safe("\n".join(["the ledger does NOT hold", *ledger.problems])), style="red")
    return Group(Text("episodes, children counted"), episodes, Text("units"), units, verdict)


def win_rate_table(found: Sequence[WinRate]) -> RenderableType:
    """The matrix of win rates: a row per step of the policy, a column per past version."""
    if not found:
        return Text("no episode was played against a past version")
    (who, step, *versions), *rows = win_rate_matrix(found)
    table = _table(who, f"{step}>", *(f"{version}>" for version in versions))
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))


def episode_table(lines: Sequence[EpisodeLine], total: int) -> RenderableType:
    """Episodes, a line each, and how many there are in all; every heading is a column of `--where` and `--sort`."""
    if not lines:
        return Text("no episodes pass")
    reasons = [name for name in ("stop_reason", "drop_reason") if any(getattr(line, name) for line in lines)]
    table = _table(
        *("episode", "status", "environment", "task", "reward>", *reasons),
        *("turns>", "tokens>", "oldest_step>", "seconds>"),
    )
    for line in lines:
        name = line.episode if line.attempt == 0 else f"{line.episode} (attempt {line.attempt})"
        step = "" if line.oldest_step is None else str(line.oldest_step)
        cells = [name, line.status, line.environment, line.task, _number(line.reward)]
        cells += [getattr(line, reason) or "" for reason in reasons]
        cells += [_count(line.turns), _count(line.tokens), step]
        table.add_row(*map(_cell, [*cells, _number(line.seconds)]))
    if total > len(lines):
        table.caption = f"{len(lines)} of {total:,} episodes"
    return table


def episode_view(view: EpisodeView) -> Text:
    """An episode: what it is, the conversation of each agent, and what else happened, in order."""
    text = Text()
    _summary(text, view)
    turns = [entry for _, entry in view.entries if isinstance(entry, TurnEntry)]
    for agent in dict.fromkeys((turn.seat, turn.index) for turn in turns):
        own = [turn for turn in turns if (turn.seat, turn.index) == agent]
        text.append(f"\n── {safe_line(agent[0])}[{agent[1]}] · {safe_line(own[0].policy)} ──\n", "bold")
        row = own[0].row
        for turn in own:
            if turn.row != row:
                row = turn.row
                text.append("  (the context was rewritten: a new row begins)\n", "dim")
            _turn(text, turn)
    others = [(call, line) for call, entry in view.entries if (line := _event(entry))]
    if others:
        text.append("\n── events ──\n", "bold")
        for call, line in others:
            text.append(f"  {safe_line(call):<10} ", "dim").append(safe_line(line) + "\n")
    for problem in view.problems:
        text.append(f"\nnot readable: {safe(problem)}\n", "bold red")
    text.rstrip()
    return text


def metric_table(latest: Mapping[str, Mapping[str, float]]) -> RenderableType:
    """The newest value of each metric, with its unit and meaning."""
    table = _table("metric", "value>", "unit", "meaning")
    for policy, values in latest.items():
        for name, value in values.items():
            known = describe(name)
            whose = f"{policy}: " if len(latest) > 1 else ""
            cells = [f"{whose}{name}", f"{value:.4g}", known.unit if known else "", known.meaning if known else ""]
            table.add_row(*map(_cell, cells))
    return table if table.row_count else Text("no metrics yet")


def curves(points: Sequence[CurvePoint], *, width: int = 64) -> Text:
    """The reward of each policy over its steps, as plots."""
    policies = dict.fromkeys(point.policy for point in points)
    if not policies:
        return Text("no optimizer step was taken yet; an evaluation takes none")
    text = Text()
    for policy in policies:
        own = [point for point in points if point.policy == policy and point.reward is not None]
        title = f"reward of {safe_line(policy)}"
        values = [point.reward for point in own if point.reward is not None]
        text.append(curve(values, steps=[point.step for point in own], title=title, width=width) + "\n")
    text.rstrip()
    return text


def _summary(text: Text, view: EpisodeView) -> None:
    line = view.summary
    text.append(f"{safe_line(line.episode)}", "bold")
    text.append(f" · attempt {line.attempt} · {line.status} · {line.purpose}\n")
    facts = [("environment", line.environment), ("task", line.task), ("group", line.group)]
    if line.parent:
        facts.append(("parent", line.parent))
    facts.append(("ended", line.drop_reason or line.stop_reason or "not yet"))
    if view.detail:
        facts.append(("because", view.detail))
    if line.reward is not None:
        facts.append(("reward", _number(line.reward)))
    if line.turns is not None:
        facts.append(("length", f"{line.turns} turns, {line.tokens} tokens, {_number(line.seconds)} s"))
    for agent in view.agents:
        what = f"{agent.policy}, reward {_number(agent.reward) or 'none'}, {agent.tokens} tokens"
        facts.append((f"{agent.seat}[{agent.index}]", f"{what}, oldest weights {agent.lineage}.{agent.oldest_step}"))
    if view.measured_against:
        facts.append(("against", ", ".join(view.measured_against)))
    for name, value in view.metrics.items():
        facts.append((name, _number(value)))
    for name, fact in facts:
        text.append(f"  {safe_line(name):<12} ", "dim").append(safe_line(fact) + "\n")


def _turn(text: Text, turn: TurnEntry) -> None:
    for message in turn.messages:
        role = str(message.get("role", "?"))
        _block(text, role, str(message.get("content", "")))
    versions = ", ".join(dict.fromkeys(f"{span.lineage}.{span.step}" for span in turn.spans))
    note = f"turn {turn.turn}, {len(turn.token_ids) // 4} tokens of version {versions}, {turn.finish_reason}"
    _block(text, "assistant", turn.text, note + (f", drift: {turn.drift}" if turn.drift else ""))


def _block(text: Text, role: str, content: str, note: str = "") -> None:
    style = _STYLES.get(role, "magenta")
    text.append(f"  {safe_line(role)}", f"bold {style}")
    text.append(f"  {safe_line(note)}\n" if note else "\n", "dim")
    for line in safe(content).split("\n"):
        text.append(f"    {line}\n", style)


def _event(entry: EntryBody) -> str:
    match entry:
        case ToolEntry():
            call = f"tool {entry.name}({_json(entry.arguments)})"
            return f"{call} → {entry.observation} [{entry.outcome}, {entry.seconds:.3f} s]"
        case EffectEntry():
            return (
                f"effect {entry.name} → {entry.error or _json(entry.value)} [{entry.guarantee}, {entry.seconds:.3f} s]"
            )
        case ResourceEntry():
            return f"resource {entry.resource}.{entry.method} → {_json(entry.value)} [{entry.level}]"
        case SpawnEntry():
            return f"spawn {entry.environment}: {', '.join(entry.children)}"
        case GatherEntry():
            by = ", ".join(f"{policy}@{lineage}.{step}" for policy, (lineage, step) in entry.versions.items())
            return f"child {entry.child}: {entry.drop_reason or _json(entry.rewards)}" + (f" [{by}]" if by else "")
        case RewardEntry():
            where = "the episode" if entry.turn is None else f"turn {entry.turn}"
            return f"reward {entry.value:g} to {entry.seat}[{entry.index}] for {where}"
    return ""


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _cell(text: str) -> Text:
    return Text(safe_line(text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
