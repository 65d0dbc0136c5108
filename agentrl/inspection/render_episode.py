"""Pages about one or two episodes, for the terminal."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.records import PolicyVersion
from agentrl.core.text import plural, shorten_lines, shorten_middle
from agentrl.inspection.conversation import (
    ChildEpisodeResultAct,
    EffectAct,
    PolicyTurn,
    RewardAct,
    SpawnAct,
    ToolAct,
    WeightUpdate,
    acts_with_weight_updates,
    reward_components,
)
from agentrl.inspection.reader import reward_columns
from agentrl.inspection.render import (
    MAX_BLOCK,
    Part,
    TerminalPage,
    episode_table,
    format_number,
    format_rewards,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.inspection.comparisons import (
        DifferingSide,
        EpisodeDifference,
        FirstDifference,
        ReplayResult,
    )
    from agentrl.inspection.conversation import Act, ConversationView
    from agentrl.inspection.reasons import Reason
    from agentrl.inspection.tokens import EpisodeToken, EpisodeTokens, TokenRow

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
_COLORS = ("blue", "dark_orange", "green", "magenta", "red", "cyan", "yellow", "purple")
DRIFT_TEXTS = {
    "retokenised": "its text would be tokenized differently; the tokens are kept and trained as sampled",
    "undecodable": "its tokens are no valid text; they are kept and trained as sampled",
}


def conversation_page(view: ConversationView) -> TerminalPage:
    """Make a page about an episode: its header, then the acts of each agent in order."""
    page = _summary_page(view)
    page.line()
    if view.note:
        page.line((view.note, "dim"))
    page.add(
        _events_page(
            acts_with_weight_updates(view),
            selected_event=view.acts[view.inherited] if 0 < view.inherited < len(view.acts) else None,
        )
    )
    if view.children:
        page.heading("children")
        attempt = ["attempt"] if any(child.attempt for child in view.children) else []
        rewards = reward_columns(child.rewards for child in view.children)
        fields = ["episode", *attempt, "status", *rewards, "stop_reason", "drop_reason", "turns", "tokens", "seconds"]
        page.add(episode_table(view.children, len(view.children), fields))
    page.problems(view.problems)
    return page


def _events_page(events: Sequence[Act | WeightUpdate], *, selected_event: Act | None = None) -> TerminalPage:
    """Make a page with the acts of an episode in order; `own` is a fork's first act of its own."""
    page, speaker = TerminalPage(), ""
    for event in events:
        if event is selected_event:
            page.heading("the fork goes its own way from here")
            speaker = ""
        if isinstance(event, WeightUpdate):
            page.line((f"  ↻ {event.version} was published", "magenta"))
        elif isinstance(event, PolicyTurn):
            event_speaker = f"{event.seat}[{event.index}] · {event.policy}"
            if event_speaker != speaker:
                page.heading(event_speaker)
                speaker = event_speaker
            _turn(page, event)
        elif isinstance(event, ToolAct) and "\n" in event.observation:
            page.line((f"  {event.call:<10} ", "dim"), f"{_tool_call(event)} [{event.ending}, {event.seconds:.3f} s]")
            page.block(event.observation, "yellow")
        elif isinstance(event, EffectAct) and (texts := _long_texts(event.value)):
            rest = {name: value for name, value in event.value.items() if name not in texts}
            line = _event(msgspec.structs.replace(event, value=rest))
            page.line((f"  {event.call:<10} ", "dim"), line)
            for name, text in texts.items():
                page.line((f"    {name}", "dim"))
                page.block(shorten_lines(text, MAX_BLOCK))
        elif line := _event(event):
            page.line((f"  {event.call:<10} ", "dim"), line)
    return page


def _summary_page(view: ConversationView) -> TerminalPage:
    """Make a page with an episode's identity and outcome."""
    page, line = TerminalPage(), view.summary
    page.line((line.episode, "bold"), f" · attempt {line.attempt} · {line.status} · {line.purpose}")
    facts = [("environment", line.environment), ("task", f"{line.task} {_json(view.task)}"), ("group", line.group)]
    if line.parent:
        facts.append(("parent", line.parent))
    facts.append(("ended", line.stop_reason or line.drop_reason or "not yet"))
    if view.detail:
        facts.append(("note" if line.stop_reason else "because", view.detail))
    if rewards := format_rewards(line):
        facts.append(("reward", rewards))
    if line.turns is not None:
        facts.append(
            (
                "length",
                f"{plural(line.turns, 'turn')}, {plural(line.tokens or 0, 'token')}, {format_number(line.seconds)} s",
            )
        )
    elif line.drop_reason is not None:
        turns = [act.tokens for act in view.acts if isinstance(act, PolicyTurn)]
        facts.append(("length", f"{plural(len(turns), 'turn')} and {plural(sum(turns), 'token')} before the failure"))
    components = reward_components(view)
    for agent in view.agents:
        name = f"{agent.seat}[{agent.index}]"
        parts = [component.words for component in components.get(name, [])]
        reward = format_number(agent.reward) or "none"
        sum_text = f" = {' + '.join(parts)}" if len(parts) > 1 else ""
        text = f"{agent.policy}, reward {reward}{sum_text}, {plural(agent.tokens, 'token')}"
        if agent.oldest_step < 0:
            text += ", oldest weights unknown"
        elif line.oldest_step is not None:  # otherwise no policy of the episode is trained
            text += f", oldest weights {PolicyVersion(agent.policy, agent.lineage, agent.oldest_step)}"
        facts.append((name, text))
    if view.measured_against:
        facts.append(("against", ", ".join(view.measured_against)))
    facts += [(name, format_number(value)) for name, value in view.metrics.items()]
    page.facts(facts)
    return page


def _turn(page: TerminalPage, act: PolicyTurn) -> None:
    if act.waited >= 0.05:  # shorter waits get no line
        page.line((f"  … waited {act.waited:.3f} s", "magenta"))
    if act.beside_messages:
        page.line(("  tools and other text of the chat template", "bold dim"))
        page.block(shorten_lines(act.beside_messages, MAX_BLOCK), "dim")
    for message in act.messages:
        role = str(message.get("role", "?"))
        page.line((f"  {role}", f"bold {_STYLES.get(role, 'magenta')}"))
        if message.get("content") or not message.get("tool_calls"):
            page.block(str(message.get("content", "")), _STYLES.get(role, "magenta"))
        _calls(page, [call for call in _as_list(message.get("tool_calls")) if isinstance(call, dict)])
    if act.state is not None:
        page.line(("  state", "dim"))
        page.block(act.state, "dim")
    versions = " → ".join(dict.fromkeys(version for _, version in act.versions))
    tokens = plural(act.tokens, "token") if act.tokens or act.finish_reason == "abort" else "token ids not recorded"
    note = f"turn {act.turn}, {tokens} of {versions or 'unknown weights'}, {act.finish_reason}, {act.seconds:.3f} s"
    note += f", row {act.row}" if act.row else ""
    page.line(("  assistant", "bold green"), (f"  {note}", "dim"))
    if request := _request(act.asked, act.ignored):
        page.line((f"    {request}", "dim"))
    if act.drift:
        page.line((f"    drift: {DRIFT_TEXTS.get(act.drift, act.drift)}", "magenta"))
    for start, version in act.versions[1:]:
        page.line((f"    ↻ {version} took over after {start} of its tokens", "magenta"))
    for pause in act.pauses:
        page.line((f"    ⏸ {pause.why}, {pause.seconds:.3f} s after {pause.start} of its tokens", "magenta"))
    if act.thinking:
        page.line(("    thinking", "dim italic"))
        page.block(act.thinking, "dim", indent=6)
    if act.content:
        page.block(act.content, "green")
    _calls(page, act.calls)


def _request(asked: Mapping[str, Any], ignored: Sequence[str] = ()) -> str:
    """Describe a request: the values it asked for, and its fields without effect; "" if there are neither.

    Example:
        >>> _request({"temperature": 0.7, "tool_choice": "required", "stop": ["."]}, ["seed"])
        'asked for temperature 0.7, tool_choice required, stop ["."]; without effect: seed'
    """
    fields = ", ".join(f"{name} {_short_value(value)}" for name, value in asked.items())
    parts = [f"asked for {fields}"] * bool(asked) + [f"without effect: {', '.join(ignored)}"] * bool(ignored)
    return shorten_middle("; ".join(parts), 300)


def _short_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return value if isinstance(value, str) else _json(value)


def _calls(page: TerminalPage, calls: Sequence[dict[str, Any]]) -> None:
    for call in calls:
        name, arguments = call.get("name"), call.get("arguments")
        form = call.get("form")
        if form and isinstance(form, str) and isinstance(arguments, str):  # its text is the reply, shown already
            page.line((f"    ✗ call of {name} written as {form}, which the run does not read", "bold red"))
        elif isinstance(arguments, str):
            page.line((f"    ✗ malformed call of {name or 'no tool'}", "bold red"))
            page.block(arguments, "red", indent=6)
        else:
            page.line(("    → ", "yellow"), (f"{name}({_json(arguments)})", "yellow"))


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _long_texts(value: object) -> dict[str, str]:
    """Return the texts of several lines in a value by name, such as a program's output."""
    items = value.items() if isinstance(value, dict) else ()
    return {name: text.rstrip() for name, text in items if isinstance(text, str) and "\n" in text.strip()}


def _tool_call(act: ToolAct) -> str:
    if isinstance(act.arguments, str):
        return f"malformed call of {act.name or 'no tool'}: {_json(act.arguments)}"
    return f"tool {act.name}({_json(act.arguments)})"


def _event(act: Act) -> str:
    match act:
        case ToolAct():
            return f"{_tool_call(act)} → {act.observation} [{act.ending}, {act.seconds:.3f} s]"
        case EffectAct():
            name = f"effect {act.name}" if act.guarantee else f"{act.name}({_json(act.arguments)})"
            kind = act.guarantee or act.level
            return f"{name} → {_ends(act.error or _json(act.value))} [{kind}, {act.seconds:.3f} s]"
        case SpawnAct():
            return f"spawn {act.environment}: {', '.join(act.children)}"
        case ChildEpisodeResultAct():
            by = f" [{', '.join(act.versions)}]" if act.versions else ""
            return f"child {act.child}: {act.drop_reason or _json(act.rewards)}{by}"
        case RewardAct():
            return f"reward {act.words} to {act.seat}[{act.index}]" + (
                "" if act.turn is not None else " for the episode"
            )
    return ""


def tokens_page(view: EpisodeTokens, *, details: bool = False) -> TerminalPage:
    """Make a page with an episode's tokens, colored by the version that sampled them; with `details`, one per line."""
    page = TerminalPage()
    versions = dict.fromkeys(token.version for row in view.rows for token in row.tokens if token.version)
    colors = {version: _COLORS[place % len(_COLORS)] for place, version in enumerate(versions)}
    hint = "" if details else " · --details lists each token of the loss with its log-probability"
    page.line((view.episode, "bold"), f" · attempt {view.attempt}{hint}")
    page.line(*((f" {version} ", f"bold {color}") for version, color in colors.items()))
    for row in view.rows:
        step_text = f"trained into {row.step}" if row.step else "no step trained it"
        page.heading(
            f"{row.seat}[{row.index}] · {row.policy} · row {row.row} · {plural(len(row.tokens), 'token')} · {step_text}"
        )
        if details:
            _token_table(page, row, colors)
        else:
            _token_text(page, row, colors)
    page.problems(view.problems)
    return page


def _token_text(page: TerminalPage, row: TokenRow, colors: dict[str, str]) -> None:
    turns: dict[int, list[EpisodeToken]] = {}
    for token in row.tokens:
        turns.setdefault(token.turn, []).append(token)
    for turn, tokens in turns.items():
        request = _request(row.asked.get(turn, {}))
        page.line((f"  turn {turn}", "bold"), *[(f"  {request}", "dim")] * bool(request))
        for is_trained, run in itertools.groupby(tokens, lambda token: bool(token.loss_mask)):
            page.line(("    in the loss:" if is_trained else "    context:", "dim"))
            styles = colors if is_trained else {}
            page.flow(
                ((token.text or f"{token.id} ", styles.get(token.version or "", "dim")) for token in run), indent=6
            )


def _token_table(page: TerminalPage, row: TokenRow, colors: dict[str, str]) -> None:
    for turn, asked in row.asked.items():
        page.line((f"  turn {turn} {_request(asked)}", "dim"))
    rows: list[list[Part]] = []
    for token in row.tokens:
        if not token.loss_mask:
            continue
        style = colors.get(token.version or "", "")
        values = [token.logprob, token.trainer_logprob, token.ratio, token.advantage, token.entropy]
        recorded = [column[token.position] for column in row.recorded.values()]
        counts = ["" if value is None else str(value) for value in (token.kept, token.lag)]
        cells: list[Part] = [
            str(token.position),
            str(token.turn),
            str(token.id),
            (_shown(token), style),
            (token.version or "", style),
        ]
        rows.append([*cells, *map(format_number, values), *counts, token.routing or "", *map(format_number, recorded)])
    headings = ["position>", "turn>", "id>", "text", "version", "logprob>", "trainer>", "ratio>", "advantage>"]
    headings += ["entropy>", "kept>", "lag>", "routing", *(f"{name}>" for name in row.recorded)]
    columns = [place for place in range(len(headings)) if any(cells[place] for cells in rows)]
    page.table([headings[place] for place in columns], [[cells[place] for place in columns] for cells in rows])
    context = sum(not token.loss_mask for token in row.tokens)
    page.line((f"  and {plural(context, 'token')} of context", "dim"))


def _shown(token: EpisodeToken) -> str:
    return token.text.replace(" ", "·")


def reasons_page(episode: str, reasons: Sequence[Reason]) -> TerminalPage:
    """Make a page with the reasons for an episode's state."""
    page = TerminalPage()
    page.line((episode, "bold"))
    for reason in reasons:
        style = "red" if reason.about == "problem" else ""
        first, *others = reason.text.split("\n")
        page.line((f"  {reason.about:<9} ", "dim"), (first, style))
        if others:
            page.block("\n".join(others), style, indent=12)
        if reason.advice:
            page.line(("            try: ", "dim"), reason.advice)
    return page


def replay_page(results: Sequence[ReplayResult], *, step: bool = False) -> TerminalPage:
    """Make a page about replayed episodes: identical, or the departure and its reason; with `step`, each call."""
    page = TerminalPage()
    for result in results:
        if step:
            for call, words in result.acts:
                page.line((f"  {call:<10} ", "dim"), words)
        if len(results) > 1 and result.outcome == "identical":
            continue
        style = {"identical": "green", "departed": "red", "damaged": "red"}.get(result.outcome, "yellow")
        page.line(
            (result.episode, "bold"),
            " ",
            (result.outcome, style),
            f": {result.calls} of {result.recorded} calls replayed",
        )
        if result.text:
            page.block(result.text)
    outcomes = Counter(result.outcome for result in results)
    if len(results) > 1:
        page.line(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    _advise(page, results)
    return page


def rescore_page(results: Sequence[ReplayResult]) -> TerminalPage:
    """Make a page with the rewards of episodes as recorded, and by the current code."""
    page, rows = TerminalPage(), list[list[Part]]()
    for result in results:
        for agent in dict.fromkeys([*result.before, *result.after]):
            then, now = result.before.get(agent), result.after.get(agent)
            style = "" if then == now else "bold"
            rows.append([result.episode, agent, format_number(then) or "none", (format_number(now) or "none", style)])
    page.table(["episode", "agent", "recorded>", "now>"], rows)
    for result in results:
        if result.outcome != "identical":
            page.line((result.episode, "bold"), f" {result.outcome}: {result.text}")
    _advise(page, results)
    return page


def _advise(page: TerminalPage, results: Sequence[ReplayResult]) -> None:
    """Add the advice of replays, each once."""
    for advice in dict.fromkeys(result.advice for result in results if result.advice):
        page.block(advice, indent=0)


def difference_page(difference: EpisodeDifference) -> TerminalPage:
    """Make a page with two episodes side by side: their first difference, and both outcomes."""
    page = TerminalPage()
    page.line(
        (difference.a.episode, "bold"),
        " and ",
        (difference.b.episode, "bold"),
        f": {difference.same_acts} acts in common",
    )
    if difference.departure is None:
        page.line(("they are the same, but for times", "green"))
    else:
        _departure(page, difference.departure)
    rows = [
        [agent, *(format_number(reward) or "none" for reward in rewards)]
        for agent, rewards in difference.rewards.items()
    ]
    page.heading("rewards")
    page.table(["agent", f"{difference.a.episode}>", f"{difference.b.episode}>"], rows)
    page.heading("turns")
    agents = dict.fromkeys(agent for agent, _, _ in difference.turns)
    for agent in agents:
        marks = "".join("=" if is_same else "≠" for name, _, is_same in difference.turns if name == agent)
        page.line(f"  {agent:<14} ", (marks, "bold"))
    page.problems(difference.problems)
    return page


def _departure(page: TerminalPage, departure: FirstDifference) -> None:
    place = f"call {departure.call}"
    if departure.turn is not None:
        place += f", turn {departure.turn} of {departure.agent}"
    if departure.token is not None:
        place += f", token {departure.token} of what was {'told' if departure.kind == 'context' else 'sampled'}"
    page.line(f"they part at {place} ({departure.kind})")
    for side, style in ((departure.a, "cyan"), (departure.b, "dark_orange")):
        _side(page, side, style)


def _side(page: TerminalPage, side: DifferingSide, style: str) -> None:
    if side.version:
        page.line((f"    by {side.version}", "dim"))
    page.block(side.text, style)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _ends(text: str) -> str:
    """Cut the middle out of a long text."""
    head, tail = 120, 300  # a traceback names its cause last
    return text if len(text) <= head + tail else f"{text[:head]} … {text[-tail:]}"
