"""What a run admitted, from its journal."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, Purpose
from agentrl.journal.port import Admission, EpisodeEnd
from agentrl.journal.run_log import RunLog

Members = list[tuple[EpisodeSpec, EpisodeHeader]]


def dispatched(log: RunLog) -> list[tuple[EpisodeSpec, EpisodeHeader | None]]:
    """Return the training episodes at their newest attempts, in order of admission, with their headers; None if one has
    not ended."""
    specs, headers = dict[str, EpisodeSpec](), dict[str, EpisodeHeader]()
    for record in log.history():
        if isinstance(record, Admission):
            specs[record.spec.episode_id] = record.spec
        elif isinstance(record, EpisodeEnd):
            headers[record.spec.episode_id] = record.header
    return [(spec, headers.get(name)) for name, spec in specs.items()]


def members(log: RunLog, groups: Collection[str] | None = None, purpose: Purpose = "train") -> Members:
    """Return the committed episodes of a purpose and some groups, or all, in order of commit, with their headers."""
    ends = (record for record in log.history(purpose) if isinstance(record, EpisodeEnd) and record.header.committed)
    return [(end.spec, end.header) for end in ends if groups is None or end.spec.group_id in groups]


def ready_units(log: RunLog, consumed_through: Mapping[str, PolicyVersion]) -> Members:
    """Return the committed episodes with a unit that a resume would train."""
    fates = log.resolved_units(consumed_through)
    learners = consumed_through.keys()
    return [
        (spec, header)
        for spec, header in members(log)
        if any(
            (header.episode_id, header.attempt, each.policy) not in fates
            for each in header.trajectories
            if each.policy in learners or not learners
        )
    ]
