"""The past of a run, from which the parts of its loop restore their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

from agentrl.core import ids
from agentrl.core.errors import StorageError
from agentrl.core.text import plural
from agentrl.journal.entries import add_group_scores

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader, EpisodeSpec, FrozenGroupBaselines, GroupScores, PolicyVersion
    from agentrl.journal.run_log import RunLog

Value = TypeVar("Value")


class PastRun:
    """What the journal of a run says at a checkpoint: the episodes that are not finished or not trained yet, and the
    rows of all others.

    A new run has an empty past, so that a first start and a resume take the same path.

    Args:
        log: the run's control log.
        consumed_through: the checkpoint's version of each trainable policy; empty without a checkpoint.
        group_size: size of root groups, `credit.group_size`.
        reward_weights: weights of named rewards.

    Raises:
        JournalError: the control log is damaged.
        StorageError: tokens of episodes to be trained were pruned, because a checkpoint is missing.
    """

    def __init__(
        self,
        log: RunLog,
        consumed_through: Mapping[str, PolicyVersion],
        *,
        group_size: int,
        reward_weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        log.verify()
        self.log = log
        self.group_size = group_size
        self._consumed_through = consumed_through
        self._reward_weights = reward_weights
        self.unfinished: Sequence[EpisodeSpec] = log.unfinished()
        """Training episodes, children included, that will continue."""
        ready = [spec for spec, _ in log.ready_units(consumed_through)]
        _check_tokens_not_pruned(log, ready)
        self.open_groups = {spec.group_id for spec in (*ready, *self.unfinished)}
        """Groups with units that are still to be trained: they will end, or end again, in this attempt of the run."""
        self.ended: Sequence[tuple[EpisodeSpec, EpisodeHeader]] = tuple(log.members(self.open_groups))
        """Committed members of the open groups, without the scores of their groups."""
        self.group_scores: Mapping[str, Sequence[GroupScores]] = _of_keys(log.group_scores(), self.open_groups)
        """Scores of each open group."""
        self.baselines: Mapping[str, FrozenGroupBaselines] = _of_keys(log.baselines(), self.open_groups)
        """Baselines of each open group."""
        self.root_tasks = self._root_tasks()
        """Ids of the tasks of the root episodes of `ended` and `unfinished`, by episode id."""
        self.next_training = -(-log.next_number("e") // group_size) * group_size
        """Number of the next root training episode, the first of its group."""

    def lost_numbers(self) -> Sequence[int]:
        """Return the numbers of root training episodes whose admission never reached the disk. Their entries may be
        there if they ran in a worker process, which does not wait for the admission."""
        return self.log.lost_numbers("e", self.next_training)

    def members(self) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield all committed training episodes in order of commit, with the headers that the run's parts received:
        with the scores of their groups, or dropped with a group that could not be scored."""
        received = self._received_headers()
        for spec, header in self.log.members():
            yield spec, received(header)

    def headers_against(self, policies: Collection[str]) -> Iterator[EpisodeHeader]:
        """Yield those headers of `members` in which one of these policies acted."""
        received = self._received_headers()
        for header in self.log.headers_against(policies):
            yield received(header)

    def _received_headers(self) -> Callable[[EpisodeHeader], EpisodeHeader]:
        scores, unscored = self.log.group_scores(), self.log.unscored()

        def received(header: EpisodeHeader) -> EpisodeHeader:
            drop_reason = unscored.get((header.episode_id, header.attempt))
            if drop_reason is not None:
                return replace(header, drop_reason=drop_reason, trajectories=())
            return add_group_scores(header, scores.get(header.group_id, ()), self._reward_weights)

        return received

    def resolved_units(self, episode_ids: Collection[str]) -> Mapping[tuple[str, str], str | None]:
        """Map each resolved unit of some episodes, keyed by (policy, episode id), to its drop reason; None: trained."""
        resolved = self.log.resolved_units(self._consumed_through, episode_ids)
        return {(policy, episode_id): reason for (episode_id, _, policy), reason in resolved.items()}

    def _root_tasks(self) -> Mapping[str, str]:
        open_specs = [*(spec for spec, _ in self.ended), *self.unfinished]
        tasks = _tasks_of_roots(open_specs)
        roots = {ids.root_episode_id(spec.episode_id) for spec in open_specs}
        if roots - tasks.keys():  # roots that ended, with children in groups that did not
            tasks |= _tasks_of_roots(spec for spec, _ in self.log.members() if spec.episode_id in roots)
        return tasks


class Resumable(Protocol):
    """A part of the loop whose state is restored from the journal."""

    def restore(self, past: PastRun) -> None:
        """Restore the state that the previous attempts of the run left; called once, before any episode runs."""
        ...


def _of_keys(values: Mapping[str, Value], keys: Collection[str]) -> dict[str, Value]:
    return {key: value for key, value in values.items() if key in keys}


def _tasks_of_roots(specs: Iterable[EpisodeSpec]) -> dict[str, str]:
    return {spec.episode_id: spec.task.id for spec in specs if spec.parent_id is None}


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
