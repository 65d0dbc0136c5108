"""The past of a run, with which its loop is rebuilt."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import TYPE_CHECKING

from agentrl.core.errors import JournalError, StorageError
from agentrl.core.records import GroupScores
from agentrl.core.text import plural
from agentrl.journal.control_rows import CHECKED_TABLES, HISTORY_TABLES
from agentrl.journal.port import EpisodeEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from agentrl.core.records import EpisodeHeader, EpisodeSpec, FrozenGroupBaselines, PolicyVersion
    from agentrl.journal.run_log import RunLog


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's garbage collector, which would visit thousands of records over and over while they are made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class PastRun:
    """What the journal of a run says at a checkpoint, before its loop is rebuilt from `RunLog.history`.

    A new run has an empty past, so that a first start and a resume take the same path.

    Args:
        log: the run's control log.
        consumed_through: the checkpoint's version of each trainable policy; empty without a checkpoint.
        group_size: size of root groups, `credit.group_size`.

    Raises:
        JournalError: the control log is damaged.
        StorageError: tokens of episodes to be trained were pruned, because a checkpoint is missing.
    """

    @without_collections()
    def __init__(
        self,
        log: RunLog,
        consumed_through: Mapping[str, PolicyVersion],
        *,
        group_size: int,
    ) -> None:
        log.verify(set(CHECKED_TABLES).difference(HISTORY_TABLES))
        self.log = log
        self.group_size = group_size
        try:
            self.records = list(log.history())
            """Records of the log from which the loop is rebuilt."""
        except JournalError as error:
            raise JournalError(f"{log.path}: {error}") from error
        self.fates: Mapping[tuple[str, str], str | None] = {
            (policy, episode_id): reason
            for (episode_id, _, policy), reason in log.resolved_units(consumed_through).items()
        }
        """Drop reason of each unit that was resolved, by (policy, episode id); None: it was trained by a step that the
        checkpoint contains."""
        self.unfinished: Sequence[EpisodeSpec] = log.unfinished()
        """Training episodes, children included, that will continue."""
        ends = [record for record in self.records if isinstance(record, EpisodeEnd) and record.header.committed]
        self.ready = [(end.spec, end.header) for end in ends if self._is_ready(end.header, consumed_through.keys())]
        """Committed episodes with a unit that is to be trained."""
        _check_tokens_not_pruned(log, [spec for spec, _ in self.ready])
        self.open_groups = {spec.group_id for spec in (*(spec for spec, _ in self.ready), *self.unfinished)}
        """Groups with units that are to be trained."""
        self.ended = [end.spec for end in ends if end.spec.group_id in self.open_groups]
        """Committed members of the open groups."""
        self.baselines: Mapping[str, FrozenGroupBaselines] = log.baselines()
        self.num_scores = Counter(record.group_id for record in self.records if isinstance(record, GroupScores))
        """Number of recorded scores of each group."""
        self.next_training = -(-log.next_number("e") // group_size) * group_size
        """Number of the next root training episode, the first of its group."""

    def _is_ready(self, header: EpisodeHeader, learners: Set[str]) -> bool:
        """Whether a unit of an episode is to be trained; without a checkpoint all policies are taken for `learners`."""
        policies = {each.policy for each in header.trajectories}
        return any((policy, header.episode_id) not in self.fates for policy in policies & (learners or policies))

    def lost_numbers(self) -> Sequence[int]:
        """Return the numbers of root training episodes whose admission never reached the disk. Their entries may be
        there if they ran in a worker process, which does not wait for the admission."""
        return self.log.lost_numbers("e", self.next_training)


def _check_tokens_not_pruned(log: RunLog, ready: Sequence[EpisodeSpec]) -> None:
    """Refuse to continue if tokens of episodes to be trained were pruned, because a checkpoint is missing.

    Raises:
        StorageError: tokens were pruned.
    """
    pruned_ids = log.pruned({spec.episode_id for spec in ready})
    pruned_episodes = sorted(spec.episode_id for spec in ready if (spec.episode_id, spec.attempt) in pruned_ids)
    if pruned_episodes:
        raise StorageError(
            f"{plural(len(pruned_episodes), 'episode')} "
            f"({', '.join(pruned_episodes[:3])}{' …' if len(pruned_episodes) > 3 else ''}) would "
            "be trained again from this checkpoint, but their tokens were pruned after a newer one, which is missing: "
            "restore the removed checkpoints, or start a new run"
        )
