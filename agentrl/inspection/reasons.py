"""Explains an episode's state: why it was admitted, retried, delayed, ended, rewarded, trained or dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from agentrl.core import ids
from agentrl.core.errors import JournalError
from agentrl.core.records import find_stop_reason
from agentrl.core.setting_paths import value_at
from agentrl.core.text import plural
from agentrl.inspection.conversation import (
    ConversationView,
    EffectAct,
    PolicyTurn,
    ToolAct,
    read_conversation,
    reward_components,
)
from agentrl.inspection.reader import verified_control_rows
from agentrl.journal.control_rows import decode_admission_row, decode_baselines_row, decode_group_scores_row
from agentrl.observe.alarms import ADVICE_ON_DROPS, LIMITS, fill_commands, raise_reply_limit
from agentrl.observe.run_directory import run_argument
from agentrl.observe.run_state import display_settings_from_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentrl.inspection.reader import EpisodeLine, Row, RunReader

SHOWN_TURNS = 12
"""Number of turns whose advantages are shown."""
MAX_NAMED = 8


class Reason(msgspec.Struct, frozen=True):
    """A sentence about one aspect."""

    about: str
    """Aspect: `admitted`, `order`, `attempt`, `time`, `ended`, `reward`, `tool`, `group`, `released`, `unit` or
    `problem`."""
    text: str
    advice: str = ""


def explain_episode(reader: RunReader, episode_id: str, attempt: int | None = None) -> list[Reason]:
    """Return what the journal says about an episode's outcome, most important first. Raises as `RunReader.episode`."""
    return explain_conversation(reader, read_conversation(reader, episode_id, attempt))


def explain_conversation(reader: RunReader, view: ConversationView) -> list[Reason]:
    """Return the reasons of an episode that was read; see `explain_episode`."""
    problems: list[str] = []
    reasons = [
        *_admissions(reader, view, problems),
        *_time(view),
        *_end(reader, view),
        *_reward(view),
        *_group_scores(reader, view.summary, problems),
        *_group(reader, view.summary),
        *_release(reader, view.summary, problems),
        *_units(reader, view, problems),
    ]
    return reasons + [Reason("problem", text) for text in [*view.problems, *problems]]


def _admissions(reader: RunReader, view: ConversationView, problems: list[str]) -> list[Reason]:
    """Explain the admission of the attempt, and the number of attempts."""
    line = view.summary
    rows = verified_control_rows(
        reader.log, "admissions", "episode = ? ORDER BY attempt", line.episode, problems=problems
    )
    own_rows = [row for row in rows if row["attempt"] == line.attempt]
    return [*_admission(line, own_rows, problems), *_attempts(line, rows)]


def _admission(line: EpisodeLine, rows: list[Row], problems: list[str]) -> list[Reason]:
    if ids.main_episode_id(line.episode) != line.episode:
        text = f"as branch {line.episode.rpartition('.b')[2]} of {line.parent}, in group {line.group}"
        reasons = [Reason("admitted", f"{text}; branches are always admitted")]
    elif line.parent is not None:
        reasons = [
            Reason("admitted", f"as a child of {line.parent}, in group {line.group}; children are always admitted")
        ]
    else:
        purpose_text = {
            "train": "to be trained on",
            "evaluate": "an evaluation episode; it is never trained on",
            "fork": "forked from a turn of another episode; never trained on",
        }
        group = "" if line.purpose == "evaluate" else f", in group {line.group}"
        reasons = [Reason("admitted", f"{purpose_text.get(line.purpose, line.purpose)}{group}")]
    for row in rows:
        try:
            spec = decode_admission_row(tuple(row.values()))
        except JournalError as error:
            problems.append(str(error))
            continue
        if spec.fork is not None and line.purpose == "train":
            point = spec.fork
            text = f"to begin at call {point.call_id} of {point.episode_id}, attempt {point.attempt}"
            reasons.append(Reason("admitted", f"{text}; the turns before it are context"))
        if spec.waited:
            waits = " and ".join(wait.text for wait in spec.waited)
            reasons.append(Reason("admitted", f"its start waited {waits}"))
        if line.purpose == "train":
            text = f"started for step {spec.deadline + 1}; a full engine serves the calls of earlier steps first"
            reasons.append(Reason("order", text))
        elif line.purpose == "evaluate":
            reasons.append(Reason("order", "a full engine serves the calls of training first"))
    return reasons


def _attempts(line: EpisodeLine, rows: list[Row]) -> list[Reason]:
    if len(rows) < 2:
        return []
    other_attempts = ", ".join(str(row["attempt"]) for row in rows if row["attempt"] != line.attempt)
    text = f"attempt {line.attempt} of {len(rows)} (the others: {other_attempts}); failed attempts are retried"
    return [Reason("attempt", text)]


def _time(view: ConversationView) -> list[Reason]:
    reasons = []
    total = view.summary.seconds or 0.0
    num_parked, cut = view.metrics.get("parked"), view.metrics.get("turns/interrupted")
    if num_parked:
        reasons.append(
            Reason(
                "time",
                f"parked {plural(num_parked, 'time')}: its calls were cut, and later resumed from their tokens",
            )
        )
    if cut:
        reasons.append(Reason("time", f"interrupted in {plural(cut, 'turn')}, each resumed from its partial output"))
    reasons += _kv_waits(view)
    acts = view.acts[view.inherited :]
    durations = [(act.seconds, _name_of_act(act)) for act in acts if isinstance(act, PolicyTurn | ToolAct | EffectAct)]
    durations += [(act.waited, f"the wait before {_name_of_act(act)}") for act in acts if isinstance(act, PolicyTurn)]
    for seconds, name in sorted(durations, reverse=True)[:MAX_NAMED]:
        if total and seconds > 0.3 * total:  # shorter delays are not named
            # `total` counts the last life only.
            of_total = f"of its {total:.3f} s" if seconds <= total else "s, with the time until the run was resumed"
            reasons.append(Reason("time", f"{name} took {seconds:.3f} {of_total}"))
    inside = [act for act in view.acts if isinstance(act, PolicyTurn) and len(act.versions) > 1]
    for act in inside[:MAX_NAMED]:
        versions = " → ".join(version for _, version in act.versions)
        reasons.append(Reason("time", f"new weights took over inside {_name_of_act(act)}: {versions}"))
    return reasons


def _kv_waits(view: ConversationView) -> list[Reason]:
    turns = [act for act in view.acts if isinstance(act, PolicyTurn)]
    waits = [(sum(pause.seconds for pause in act.pauses if pause.why == "no_room"), _name_of_act(act)) for act in turns]
    waits = [wait for wait in waits if wait[0] > 0]
    if not waits:
        return []
    longest, name = max(waits)
    text = (
        f"it waited {sum(seconds for seconds, _ in waits):.3f} s for room in the engine's memory, in {len(waits)} of "
        f"its {plural(len(turns), 'turn')}, longest before {name}: {longest:.3f} s. Cache space is reserved at the "
        "first turn, and released between turns when recomputing the context is cheaper than holding it"
    )
    return [Reason("time", text, "raise engine.slots, or shorten the contexts")]


def _name_of_act(act: PolicyTurn | ToolAct | EffectAct) -> str:
    if isinstance(act, PolicyTurn):
        return f"turn {act.turn} of {act.seat}[{act.index}]"
    return f"tool {act.name}" if isinstance(act, ToolAct) else f"effect {act.name}"


def _end(reader: RunReader, view: ConversationView) -> list[Reason]:
    line, turns = view.summary, [act for act in view.acts if isinstance(act, PolicyTurn)]
    if line.drop_reason is not None and line.stop_reason is None:
        return [
            Reason(
                "ended",
                f"dropped as {line.drop_reason}: {view.detail or 'nothing more was told'}",
                _drop_advice(reader, line, line.drop_reason),
            )
        ]
    if line.stop_reason is None:
        last = f"; the last thing it did was {view.acts[-1].call}" if view.acts else ""
        return [Reason("ended", f"it has not ended: in flight, or of a process that died{last}")]
    reasons = [
        Reason(
            "ended",
            f"{line.stop_reason}, after {plural(line.turns or 0, 'turn')} and {plural(line.tokens or 0, 'token')}",
        )
    ]
    stop = find_stop_reason(line.stop_reason)
    if stop in LIMITS:
        setting, config, value = LIMITS[stop], reader.config(), None
        if stop in ("max_turns", "max_tokens") and turns:  # a limit of the seat, fixed when the episode began
            seat, policy = turns[-1].seat, turns[-1].policy
            value = (view.settings.get(seat) or view.settings.get("") or {}).get(stop)
            own = f"policies.{policy}.{setting}"
            setting = setting if value_at(config, *own.split(".")) is None else own
        value = value_at(config, *setting.split(".")) if value is None else value
        limit = setting if value is None else f"{setting} = {value}"
        text = f"{reasons[0].text}: a limit cut it short ({limit})"
        calls = [act for act in view.acts if isinstance(act, ToolAct)]
        is_symptom = bool(calls) and not any(act.outcome == "ok" for act in calls)
        first = "find out why no tool call succeeded (below); otherwise " if is_symptom else ""
        advice = f"{first}raise {setting}, or shorten the episode"
        reasons[0] = Reason("ended", text, advice)
    elif stop == "refused":
        reasons[0] = Reason("ended", f"{reasons[0].text}: the endpoint of a remote policy refused a turn")
    if view.detail:
        reasons.append(Reason("ended", view.detail))
    return [*reasons, *_cut_turns(reader, view, turns)]


def _cut_turns(reader: RunReader, view: ConversationView, turns: Sequence[PolicyTurn]) -> Iterator[Reason]:
    """Yield the limits that cut turns, with the turns and what to change."""
    short = [
        act
        for act in turns
        if act.finish_reason == "length" and not any(stop in act.text for stop in act.asked.get("stop", ()))
    ]
    plan = display_settings_from_config(reader.config() if short else {})
    by_limit: dict[tuple[str, str], list[PolicyTurn]] = {}
    for act in short:
        name, limit = plan.limit_of(act.policy, LIMITS["max_tokens"])
        settings = view.settings.get(act.seat) or view.settings.get("") or {}
        limit = int(settings.get("max_tokens", limit))
        requested_limit = act.asked.get("max_tokens")
        if isinstance(requested_limit, int | float) and act.tokens >= requested_limit:
            key = f"the request's own max_tokens = {requested_limit:.0f}", "let the agent ask for more"
        elif act.tokens < limit:
            context = LIMITS["context_length"]
            key = f"the full context ({plan.limit_text(act.policy, context)})", f"raise {context}"
        else:
            in_force = replace(plan, limits={**plan.limits, name: limit})
            num_cut = sum(turn.policy == act.policy for turn in short)
            total = sum(turn.policy == act.policy for turn in turns)
            key = f"{name} = {limit}" if limit else name, raise_reply_limit(in_force, act.policy, num_cut, total)
        by_limit.setdefault(key, []).append(act)
    for (limit_text, advice), acts in by_limit.items():
        names = ", ".join(_name_of_act(act) for act in acts[:MAX_NAMED])
        yield Reason("ended", f"cut at {limit_text}: {names}", advice)


def _drop_advice(reader: RunReader, line: EpisodeLine, reason: str) -> str:
    """Return the advice on a drop, for the episode's page instead of any example's."""
    advice = ADVICE_ON_DROPS.get(reason, "")
    return fill_commands(advice, run_argument(reader.path), line.episode)


def _reward(view: ConversationView) -> list[Reason]:
    reasons = []
    components = reward_components(view)
    for agent in view.agents:
        name = f"{agent.seat}[{agent.index}]"
        parts = [component.words for component in components.get(name, [])]
        reward_text = "none" if agent.reward is None else f"{agent.reward:g}"
        reasons.append(
            Reason(
                "reward",
                f"{name} ({agent.policy}): {reward_text}" + (f" = {' + '.join(parts)}" if len(parts) > 1 else ""),
            )
        )
    failed = [act for act in view.acts if isinstance(act, ToolAct) and act.outcome != "ok"]
    outcomes = [f"tool {act.name} ended as {act.ending}: {act.observation[:200]}" for act in failed[:MAX_NAMED]]
    errors = [(act.name, act.error) for act in view.acts if isinstance(act, EffectAct) and act.error]
    outcomes += [f"effect {name} failed: {error[:200]}" for name, error in errors[:MAX_NAMED]]
    return reasons + [Reason("tool", text) for text in outcomes]


def _group_scores(reader: RunReader, line: EpisodeLine, problems: list[str]) -> list[Reason]:
    """Explain the rewards that scorers of groups gave, which are not part of the episode's own reward."""
    if line.purpose != "train":
        return []
    reasons = []
    for row in verified_control_rows(reader.log, "group_scores", "group_id = ?", line.group, problems=problems):
        scores = decode_group_scores_row(tuple(row.values()))
        for episode, seat, agent, value in scores.scores:
            if episode == line.episode:
                score = "says nothing" if value is None else f"{value:g}"
                effect = "noted only" if scores.weight is None else f"credited with weight {scores.weight:g}"
                text = f"{seat}[{agent}]: {scores.scorer} {score}, compared with the group; {effect}"
                reasons.append(Reason("reward", text))
    return reasons


def _group(reader: RunReader, line: EpisodeLine) -> list[Reason]:
    members = reader.group(line.group)
    if len(members) < 2:
        return []
    by_seat: dict[str, list[float]] = {}
    for member in members:
        for seat, reward in member.rewards.items():
            by_seat.setdefault(seat, []).append(reward)
    statuses: dict[str, int] = {}
    for member in members:
        statuses[member.status] = statuses.get(member.status, 0) + 1
    counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    text = f"{len(members)} episodes are compared with each other: {counts}"
    for seat, rewards in by_seat.items():
        whose = f" of {seat}" if len(by_seat) > 1 else ""
        text += f"; rewards{whose} from {min(rewards):g} to {max(rewards):g}, mean {sum(rewards) / len(rewards):.3g}"
        if len(rewards) > 1 and min(rewards) == max(rewards):
            text += "; all are equal, so they teach nothing"
    if statuses.get("in_flight") and line.status == "ready":
        text += "; it waits for those in flight"
    return [Reason("group", text)]


def _release(reader: RunReader, line: EpisodeLine, problems: list[str]) -> list[Reason]:
    """Explain when the episode's group was released, with its baseline set if the journal has the group's first
    finishers."""
    if line.purpose != "train" or line.stop_reason is None:
        return []
    rows = verified_control_rows(reader.log, "baselines", "group_id = ?", line.group, problems=problems)
    if not rows:
        return _release_of_group(reader, line)
    frozen = decode_baselines_row(tuple(rows[0].values()))
    names = ", ".join(frozen.finishers)
    other_members = [name for name in frozen.finishers if name != line.episode][: len(frozen.finishers) - 1]
    if line.episode not in frozen.finishers:
        when = f"late, when it ended: {names} had been released without it"
    else:
        when = f"early, with the first {len(frozen.finishers)} of its group to end: {names}"
    against = [f"the rewards of {', '.join(other_members)}"] if other_members else []
    against += [f"{mean.mean:.3g}, what {mean.seat} used to get before it was admitted" for mean in frozen.earlier]
    comparison = f"; compared with {' and '.join(against)}" if against else "; there was nothing to compare it with"
    return [Reason("released", when + comparison)]


def _release_of_group(reader: RunReader, line: EpisodeLine) -> list[Reason]:
    members = reader.group(line.group)
    ends = [(member.committed_at, member.episode) for member in members if member.committed_at is not None]
    if len(ends) < len(members) or len(members) < 2:
        return []
    at, last = max(ends)
    last_member = "itself" if last == line.episode else f"{last}, {at - (line.committed_at or at):.3f} s after it"
    return [Reason("released", f"when the last of its group had ended: {last_member}")]


def _units(reader: RunReader, view: ConversationView, problems: list[str]) -> list[Reason]:
    line = view.summary
    if line.purpose != "train" or line.stop_reason is None:
        return []
    key = (line.episode, line.attempt)
    unit_rows = verified_control_rows(reader.log, "step_units", "episode = ? AND attempt = ?", *key, problems=problems)
    drops = verified_control_rows(reader.log, "unit_drops", "episode = ? AND attempt = ?", *key, problems=problems)
    reasons = []
    for policy in dict.fromkeys(agent.policy for agent in view.agents):
        policy_rows = [row for row in unit_rows if row["policy"] == policy]
        reason = next((row["reason"] for row in drops if row["policy"] == policy), None)
        reasons += [Reason("training", _consumption(policy, row)) for row in policy_rows]
        if reason is not None:
            reasons.append(Reason("training", f"of {policy}: dropped as {reason}", _drop_advice(reader, line, reason)))
        elif not policy_rows and not reader.log.rows("SELECT 1 FROM versions WHERE policy = ? LIMIT 1", policy):
            reasons.append(Reason("training", f"{policy} does not learn: nothing of it is trained"))
        elif not policy_rows:
            reasons.append(Reason("training", f"of {policy}: ready, waits for its group and for a step"))
    return reasons


def _consumption(policy: str, row: Row) -> str:
    version_text = f"{policy}@{row['lineage']}.{row['step']}"
    numbers = f"reward {row['reward']:.3g} - baseline {row['baseline']:.3g} = advantage {row['advantage']:.3g}"
    if abs(row["reward"] - row["baseline"] - row["advantage"]) > 1e-6 * (1.0 + abs(row["reward"])):
        # scaled, or along a tree of branches
        numbers = f"reward {row['reward']:.3g}, baseline {row['baseline']:.3g}, advantage {row['advantage']:.3g}"
    by_turn = _advantages_by_turn(row)
    if len(set(by_turn)) > 1:
        values = ", ".join(f"{value:.3g}" for value in by_turn[:SHOWN_TURNS])
        numbers += f"; by turn {values}{', …' if len(by_turn) > SHOWN_TURNS else ''}"
    return f"{row['seat']}[{row['agent']}] was trained by the step that made {version_text}: {numbers}"


def _advantages_by_turn(row: Row) -> list[float]:
    """Read the advantages of a trajectory's turns; none where turns do not differ, or the row is damaged."""
    try:
        return msgspec.json.decode(row["turn_advantages"] or "[]", type=list[float])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return []
