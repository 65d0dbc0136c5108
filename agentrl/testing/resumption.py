"""Kills an episode of a check at its journal's entries, resumes it, and compares."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.core.records import EpisodeSpec
from agentrl.core.text import plural
from agentrl.engines.scripted import Script
from agentrl.environment.context import ResourceLevel
from agentrl.environment.environment import Environment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.journal.entries import JournalEntry, ResourceCallEntry, TurnEntry
from agentrl.rollout.calls.mismatch import REMEDY, REPLAY_REMEDY
from agentrl.rollout.external.agent import describe_request_difference, external_turns_with_context
from agentrl.testing.differences import difference, is_external
from agentrl.testing.execution import ExecutedEpisode, Failure, execute_episode

MAX_CUTS = 64
"""Maximum number of prefixes tried per episode; longer journals are cut at evenly spaced entries."""
_STRAY = re.compile(
    r"\b(?:random\.(?:Random|RandomState|default_rng)\(\)|random\.SystemRandom\("
    r"|(?:time\.(?:time|monotonic|perf_counter)|uuid\.uuid[14]|os\.urandom|secrets\.\w+"
    r"|datetime\.(?:now|utcnow|today))\()"
)


@dataclass(slots=True)
class Resumptions:
    """How often the episodes of a check were resumed, and how."""

    number: int = 0
    untried_kills: int = 0
    """Number of entries after which an episode was not killed, because its resumptions are slow."""
    resume_class: ResourceLevel = "replay"
    """Form of recovery: episodes are re-executed and compared, restored from snapshots of their resources, or
    neither.
    """


async def resume_at_every_entry(
    environment: type[Environment],
    spec: EpisodeSpec,
    script: Script,
    first: ExecutedEpisode,
    totals: Resumptions,
    on_progress: Callable[[str], None] = lambda part: None,
    *,
    max_cuts: int = MAX_CUTS,
) -> str | None:
    """Kill an episode at every entry, resume it and compare; returns the first difference. An episode with more than
    `max_cuts` entries is killed at evenly spaced ones."""
    entries = first.entries
    cuts = _cuts(len(entries), min(max_cuts, MAX_CUTS))
    totals.untried_kills += len(entries) - len(cuts)
    for before, cut in enumerate(cuts):
        on_progress(f"killed after entry {cut} of {len(entries)} and resumed ({before} of {len(cuts)} kills)")
        answers = [entry for entry in entries[cut:] if is_external(entry)]
        outcome = await execute_episode(environment, spec, script, entries[:cut], answers=answers)
        totals.number += 1
        if isinstance(outcome, Failure):
            problem, remedy = outcome.text, ""
            if outcome.reason == "resource_lost" and _has_pinned(entries[:cut]):
                continue  # as declared, the episode starts over
        else:
            problem, remedy = difference(first, outcome) or "", f". {REMEDY}{_stray_lines(environment)}"
        if problem:
            return f"killed after entry {cut} of {len(entries)} and run again: {problem}{remedy}"
    totals.resume_class = _weaker(totals.resume_class, entries)
    return None


async def resume_over_replies(
    environment: type[HarnessEnvironment],
    spec: EpisodeSpec,
    script: Script,
    first: ExecutedEpisode,
    totals: Resumptions,
    on_progress: Callable[[str], None],
    *,
    sampling: Mapping[str, float],
) -> str | None:
    """Restart an episode of an external agent over the first of its replies, then over all. Returns the first request
    that the agent does not repeat."""
    if not environment.replay_stable:
        totals.resume_class = "pinned"
        return None
    recorded_turns = list(external_turns_with_context(first.entries))
    turns = {entry.call_id: body for entry in recorded_turns if isinstance(body := entry.decode(), TurnEntry)}
    for count in sorted({min(1, len(recorded_turns)), len(recorded_turns)}):
        on_progress(f"resumed with {plural(count, 'recorded reply', 'recorded replies')}")
        next_attempt = dataclasses.replace(spec, attempt=1)
        outcome = await execute_episode(
            environment, next_attempt, script, answers=recorded_turns[:count], sampling=sampling
        )
        totals.number += 1
        if isinstance(outcome, Failure):
            return f"after resuming with {plural(count, 'recorded reply', 'recorded replies')}: {outcome.text}"
        recorded_requests = {
            entry.call_id: body
            for entry in external_turns_with_context(outcome.entries)
            if isinstance(body := entry.decode(), TurnEntry)
        }
        missing = [body for call_id, body in turns.items() if call_id not in recorded_requests][:count]
        if missing and len(missing) > len(turns) - count:
            new = [
                body
                for call_id, body in recorded_requests.items()
                if call_id not in turns and body.seat == missing[0].seat
            ]
            if not new:
                return f"after resuming, turn {missing[0].turn} of seat {missing[0].seat!r} was never requested"
            assert new[0].request is not None
            difference = describe_request_difference(missing[:1], new[0].messages, new[0].request)
            return f"after resuming, the request differs: {difference}; {REPLAY_REMEDY}"
    return None


def _has_pinned(entries: Sequence[JournalEntry]) -> bool:
    return any(isinstance(body := entry.decode(), ResourceCallEntry) and body.level == "pinned" for entry in entries)


def _weaker(level: ResourceLevel, entries: Sequence[JournalEntry]) -> ResourceLevel:
    """Return the weakest resource level that the environment has used."""
    levels = {body.level for entry in entries if isinstance(body := entry.decode(), ResourceCallEntry)} | {level}
    return "pinned" if "pinned" in levels else "snapshot" if "snapshot" in levels else "replay"


def _cuts(entries: int, max_cuts: int) -> list[int]:
    if entries <= max_cuts:
        return list(range(1, entries + 1))
    return sorted({max(round(index * entries / max_cuts), 1) for index in range(1, max_cuts + 1)})


def _stray_lines(environment: type[Environment]) -> str:
    """Return up to three lines of an environment that seem to use time or unseeded randomness, as a clause; "" if there
    are none.

    Example:
        >>> bool(_STRAY.search("draw = random.Random()")), bool(_STRAY.search("draw = random.Random(3)"))
        (True, False)
    """
    lines = enumerate(environment.source().splitlines(), start=1)
    stray = [f"line {number}: `{line.strip()}`" for number, line in lines if _STRAY.search(line)][:3]
    return f". Look at {', '.join(stray)}" if stray else ""
