"""The ledger of a run, counted from its control log: accounts for every episode and every unit exactly once.

    episodes, children counted:  admitted  = in flight + ready + trained + dropped
    units of each policy:        committed = ready + consumed + dropped

The two sides are counted from different tables, and every row that fits neither side is a problem with a message: an
ended episode that was never admitted; a unit trained twice, trained and dropped, or trained without having been
committed; a checkpoint with versions unknown to the log, which has lost its end since the checkpoint was sealed; and
committed episodes whose entries are missing, give an agent other turns or rewards than its trajectory has, or name a
version without a row, digest or step.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec

from agentrl.core.errors import EntriesError, JournalError
from agentrl.core.files import open_regular, read_at_most, refuse_links
from agentrl.core.records import PolicyVersion, reported_token_usage
from agentrl.core.text import agent_name, plural
from agentrl.journal.entries import BeginEntry, EntryBody, RewardEntry, TurnEntry, decode_entries, sum_by_key
from agentrl.journal.reader import read_whole_partition
from agentrl.journal.rows import ForkPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.run_log import SqliteRunLog


MAX_MANIFEST_BYTES = 64 << 20

_TURN, _BEGIN = b"\xa4turn", b"\xa5begin"
"""Encoded kinds of a turn and of the first entry, after the three bytes of an array of 16 or more elements."""
_REWARD, _SCORE = b"\xa6reward", b"\xa5score"
"""Encoded kinds of rewards, after the one byte with which a shorter array begins."""

Key = tuple[str, int]
"""Episode id and attempt."""
Agent = tuple[str, int]
"""Seat and index."""


class EpisodeCounts(msgspec.Struct):
    """Training episodes of one environment, children included."""

    admitted: int = 0
    in_flight: int = 0
    ready: int = 0
    trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of dropped episodes by reason; `frozen` if no policy of the episode was trainable."""

    @property
    def balances(self) -> bool:
        """Whether the equation holds."""
        return self.admitted == self.in_flight + self.ready + self.trained + sum(self.dropped.values())


class UnitCounts(msgspec.Struct):
    """Units of one policy."""

    committed: int = 0
    ready: int = 0
    consumed: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def balances(self) -> bool:
        """Whether the equation holds."""
        return self.committed == self.ready + self.consumed + sum(self.dropped.values())


class RunLedger(msgspec.Struct):
    """Both equations, and the problems found."""

    episodes: dict[str, EpisodeCounts]
    """Episode counts, keyed by environment."""
    units: dict[str, UnitCounts]
    """Unit counts, keyed by policy."""
    through: dict[str, str]
    """Newest version of each policy: units of steps that do not lead to it are ready again."""
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether both equations hold and no problem was found."""
        balances = [count.balances for count in self.episodes.values()]
        balances += [count.balances for count in self.units.values()]
        return not self.problems and all(balances)


class _Manifest(msgspec.Struct):
    """Versions named by a checkpoint's manifest, as (lineage, step) by policy."""

    versions: dict[str, tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]]


def run_ledger(
    log: SqliteRunLog, checkpoints: Path, on_read: Callable[[int, int], None] = lambda read, of: None
) -> RunLedger:
    """Count a run's episodes and units, and read their entries. Policies that were never published have no units.

    Args:
        log: the run's control log.
        checkpoints: the run's checkpoint directory.
        on_read: callback with the number of committed episodes whose entries were read, and their total.

    Raises:
        JournalError: the control log is damaged.
    """
    log.verify()
    counter = _LedgerCounter(log, _sealed_versions(checkpoints))
    counter.read_entries(log, on_read)
    return counter.ledger()


class _LedgerCounter:
    """The tables of one run, read once."""

    def __init__(self, log: SqliteRunLog, checkpoint_names: Mapping[PolicyVersion, str]) -> None:
        self._run = str(log.info()["run"])
        self._problems: list[str] = []
        self._more = 0
        self._through = _newest_versions(log)
        versions = {PolicyVersion(*row) for row in log.rows("SELECT policy, lineage, step FROM versions")}
        for version, checkpoint in checkpoint_names.items():
            if version.step and version not in versions:
                self._problem(f"checkpoint {checkpoint} is of {version}, which the control log does not know")
        self._purposes: dict[Key, str] = {
            (episode, attempt): environment
            for episode, attempt, environment in log.rows(
                "SELECT episode, attempt, environment FROM admissions WHERE purpose = 'train'"
            )
        }
        self._end_rows: dict[Key, tuple[str, str | None]] = {
            (episode, attempt): (environment, reason)
            for episode, attempt, environment, reason in log.rows(
                "SELECT episode, attempt, environment, drop_reason FROM episodes WHERE purpose = 'train'"
            )
        }
        self._committed_policies: dict[Key, set[str]] = {}
        for episode, attempt, policy in log.rows("SELECT DISTINCT episode, attempt, policy FROM trajectories"):
            if self._end_rows.get((episode, attempt), ("", "never ended"))[1] is None:
                self._committed_policies.setdefault((episode, attempt), set()).add(policy)
        self._drop_reasons: dict[tuple[Key, str], str] = {
            ((episode, attempt), policy): reason
            for episode, attempt, policy, reason in log.rows("SELECT episode, attempt, policy, reason FROM unit_drops")
        }
        self._consumed_counts = self._count_consumed(log)

    def read_entries(self, log: SqliteRunLog, on_read: Callable[[int, int], None]) -> None:
        """Check the entries of every committed episode, and the versions named by its tokens."""
        partitions: dict[str, dict[Key, int]] = {}
        for name, episode, attempt, entries in log.rows(
            "SELECT partition, episode, attempt, entries FROM episodes"
            " WHERE purpose = 'train' AND drop_reason IS NULL AND partition IS NOT NULL"
        ):
            partitions.setdefault(str(name), {})[episode, attempt] = entries
        # Read after the episodes, so that it has every version they name even while the run is written.
        versions = _Versions(log)
        total, before = sum(map(len, partitions.values())), 0
        for name, expected in sorted(partitions.items()):
            path = log.path.parent / name
            if path.is_file():
                try:
                    missing = self._read_partition(
                        log,
                        path,
                        expected,
                        versions,
                        lambda read, before=before: on_read(before + read, total),  # type: ignore[misc]
                    )
                    self._name_missing(log, name, expected, missing)
                except JournalError as error:
                    self._problem(f"{error}. What follows in {name} was not read")
            else:
                self._problem(
                    f"{path} is missing, and it contains {plural(len(expected), 'committed episode')}; restore it"
                )
            before += len(expected)

    def _read_partition(
        self,
        log: SqliteRunLog,
        path: Path,
        expected: Mapping[Key, int],
        versions: _Versions,
        on_read: Callable[[int], None],
    ) -> dict[Key, int]:
        """Read a partition; returns the number of missing entries per episode."""
        missing = dict(expected)
        agent_totals: dict[Key, _AgentTotals] = {}
        read = 0
        for entry in read_whole_partition(path, self._run):
            key = (entry.episode_id, entry.attempt)
            if key not in missing:
                continue
            missing[key] -= 1
            if entry.body[3:9] == _BEGIN:
                self._add_inherited(agent_totals.setdefault(key, _AgentTotals()), path.parent, entry)
            if entry.body[3:8] == _TURN or entry.body[1:8] == _REWARD or entry.body[1:7] == _SCORE:
                (body,) = decode_entries([entry])
                agent_totals.setdefault(key, _AgentTotals()).add(body)
                for fault in versions.faults(body) if isinstance(body, TurnEntry) else ():
                    self._problem(f"episode {key[0]} attempt {key[1]}, call {entry.call_id}: {fault}")
            if not missing[key]:
                read += 1
                on_read(read)
                self._compare_agents(log, key, agent_totals.pop(key, _AgentTotals()))
        return missing

    def _add_inherited(self, totals: _AgentTotals, journal: Path, entry: JournalEntry) -> None:
        """Add the turns and rewards with which an episode began, if it is a fork."""
        try:
            prefix_entries = ForkPrefixes(journal).of([entry])
        except EntriesError as error:
            self._problem(f"episode {entry.episode_id} attempt {entry.attempt}: {error}")
            return
        (begin,) = decode_entries([entry])
        is_branch = isinstance(begin, BeginEntry) and begin.fork is not None and begin.fork.branch > 0
        for body in decode_entries(prefix_entries):
            totals.inherit(body, is_branch=is_branch)

    def _compare_agents(self, log: SqliteRunLog, key: Key, totals: _AgentTotals) -> None:
        """Compare an episode's turns and rewards, by agent, with its trajectories."""
        rows = log.rows(
            "SELECT seat, agent, tokens, reward, turn_rewards FROM trajectories WHERE episode = ? AND attempt = ?", *key
        )
        committed_text = {(seat, index): _describe_agent(*row) for seat, index, *row in rows}
        recorded_text = {agent: totals.describe(agent) for agent in totals.turns}
        if any(reward is None for _, _, _, reward, _ in rows):
            ((stop_reason,),) = log.rows("SELECT stop_reason FROM episodes WHERE episode = ? AND attempt = ?", *key)
            if stop_reason != "completed":  # then its header leaves the rewards out (`truncated_reward = None`)
                for seat, index, _, reward, _ in rows:
                    if reward is None and (seat, index) in totals.turns:
                        recorded_text[seat, index] = totals.describe((seat, index), rewarded=False)
        for agent in sorted(committed_text.keys() | recorded_text.keys()):
            was, came = recorded_text.get(agent, "no turn"), committed_text.get(agent, "no row")
            if was != came:
                name = agent_name(*agent)
                self._problem(
                    f"episode {key[0]} attempt {key[1]}: {name} has {was} in its entries, {came} in trajectories"
                )
        for agent, numbers in totals.turns.items():
            first = totals.inherited[agent]
            if sorted(numbers) != [*range(first, first + len(numbers))]:
                name = agent_name(*agent)
                self._problem(f"episode {key[0]} attempt {key[1]}: {name} has turns {sorted(numbers)} in its entries")

    def _name_missing(
        self, log: SqliteRunLog, name: str, expected: Mapping[Key, int], missing_entries: Mapping[Key, int]
    ) -> None:
        """Report the episodes with missing entries, unless they were pruned."""
        missing = {key: count for key, count in missing_entries.items() if count}
        # Read afterward: a run records what it prunes before pruning.
        pruned_attempts = log.pruned({episode for episode, _ in missing})
        for (episode, attempt), count in missing.items():
            present = expected[episode, attempt] - count
            if present or (episode, attempt) not in pruned_attempts:
                num_entries = plural(expected[episode, attempt], "entry", "entries")
                self._problem(
                    f"episode {episode} attempt {attempt}: {num_entries} were committed, {name} has {present}"
                )

    def _count_consumed(self, log: SqliteRunLog) -> Counter[tuple[Key, str]]:
        """Count how often each unit was trained on the line that led to the newest versions."""
        counts: Counter[tuple[Key, str]] = Counter()
        for policy, version in self._through.items():
            for lineage, first, last in log.surviving(version):
                rows = log.rows(  # each trajectory of a unit is one row of a step
                    "SELECT episode, attempt, max(times) FROM (SELECT episode, attempt, step, count(*) AS times"
                    " FROM step_units WHERE policy = ? AND lineage = ? AND step > ? AND step <= ?"
                    " GROUP BY episode, attempt, step, seat, agent) GROUP BY episode, attempt, step",
                    *(policy, lineage, first, last),
                )
                for episode, attempt, times in rows:
                    counts[(episode, attempt), policy] += times
        return counts

    def ledger(self) -> RunLedger:
        """Compute both equations."""
        newest: dict[str, int] = {}
        for episode, attempt in self._purposes:
            newest[episode] = max(attempt, newest.get(episode, attempt))
        for episode, attempt in self._end_rows.keys() - self._purposes.keys():
            self._problem(f"episode {episode} attempt {attempt} ended and was never admitted")
        units = {policy: UnitCounts() for policy in sorted(self._through)}
        states = {key: self._count_units(key, policies, units) for key, policies in self._committed_policies.items()}
        for key, policy in self._consumed_counts.keys() - {
            (k, p) for k, committed_policies in self._committed_policies.items() for p in committed_policies
        }:
            self._problem(f"episode {key[0]} attempt {key[1]}: trained as a unit of {policy} and never committed")
        episodes: dict[str, EpisodeCounts] = {}
        for episode, attempt in sorted(newest.items()):
            key = (episode, attempt)
            counts = episodes.setdefault(self._purposes[key], EpisodeCounts())
            counts.admitted += 1
            self._count_episode(key, counts, states)
        if self._more:
            self._problems.append(f"… and {self._more} more")
        through = {policy: str(version) for policy, version in self._through.items()}
        return RunLedger(episodes=episodes, units=units, through=through, problems=self._problems)

    def _count_episode(self, key: Key, counts: EpisodeCounts, states: Mapping[Key, set[str]]) -> None:
        """Count an episode as in flight, dropped, or by the states of its units: ready as long as one is."""
        if key not in self._end_rows:
            counts.in_flight += 1
            return
        reason = self._end_rows[key][1]
        reasons = states.get(key, set())
        if reason is not None:
            counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
        elif "ready" in reasons:
            counts.ready += 1
        elif "consumed" in reasons:
            counts.trained += 1
        else:
            cause = min(reasons, default="frozen")
            counts.dropped[cause] = counts.dropped.get(cause, 0) + 1

    def _count_units(self, key: Key, policies: set[str], units: Mapping[str, UnitCounts]) -> set[str]:
        """Return the states of a committed episode's units: `ready`, `consumed`, or drop reasons."""
        fates = set()
        for policy in policies & units.keys():
            counts = units[policy]
            counts.committed += 1
            times, reason = self._consumed_counts[key, policy], self._drop_reasons.get((key, policy))
            if times > 1:
                self._problem(f"episode {key[0]} attempt {key[1]}: the unit of {policy} was trained {times} times")
            if times and reason is not None:
                self._problem(f"episode {key[0]} attempt {key[1]}: the unit of {policy} was trained and dropped")
            if times:
                counts.consumed += 1
                fates.add("consumed")
            elif reason is not None:
                counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
                fates.add(reason)
            else:
                counts.ready += 1
                fates.add("ready")
        return fates

    def _problem(self, text: str) -> None:
        if len(self._problems) < 20:  # further ones are only counted
            self._problems.append(text)
        else:
            self._more += 1


class _AgentTotals:
    """Turns and rewards of one attempt's entries, by agent."""

    def __init__(self) -> None:
        self.turns: dict[Agent, list[int]] = {}
        """Numbers of the attempt's own turns."""
        self.inherited: Counter[Agent] = Counter()
        """Number of turns that a fork inherited."""
        self._tokens: Counter[Agent] = Counter()
        self._rewards: dict[Agent, list[RewardEntry]] = {}

    def add(self, body: EntryBody) -> None:
        """Add an entry."""
        if isinstance(body, TurnEntry):
            self.turns.setdefault((body.seat, body.index), []).append(body.turn)
            self._tokens[body.seat, body.index] += _sampled_tokens(body)
        elif isinstance(body, RewardEntry):
            self._rewards.setdefault((body.seat, body.index), []).append(body)

    def inherit(self, body: EntryBody, *, is_branch: bool) -> None:
        """Add an entry that the attempt inherited. Agents of a branch have a trajectory even without a turn in it."""
        if isinstance(body, TurnEntry):
            self.inherited[body.seat, body.index] += 1
            if is_branch:
                self.turns.setdefault((body.seat, body.index), [])
        elif isinstance(body, RewardEntry):
            self.add(body)

    def describe(self, agent: Agent, *, rewarded: bool = True) -> str:
        """Describe an agent's part in the words of `_describe_agent`, without its rewards unless `rewarded`."""
        rewards = self._rewards.get(agent, []) if rewarded else []
        by_turn = sum_by_key((reward.turn, reward.weighted) for reward in rewards if reward.turn is not None)
        total = math.fsum(reward.weighted for reward in rewards) if rewards else None
        return _describe_agent(
            self._tokens[agent], total, msgspec.json.encode(sorted(by_turn.items())).decode() if by_turn else None
        )


def _describe_agent(tokens: int, reward: float | None, turn_rewards: str | None) -> str:
    by_turn = f" ({turn_rewards} by turn)" if turn_rewards else ""
    return f"{plural(tokens, 'token')} and {'no reward' if reward is None else f'the reward {reward!r}'}{by_turn}"


def _sampled_tokens(turn: TurnEntry) -> int:
    """Number of a turn's tokens, as in `trajectories.tokens`: of a turn without logprobs, what its endpoint counted."""
    count = len(turn.tokens)
    if any(turn.tokens.columns.get("logprobs", b"")):
        return count
    try:
        reply = msgspec.json.decode(turn.text)
    except (msgspec.DecodeError, RecursionError):
        return count
    return reported_token_usage(reply).get("completion_tokens", count) if isinstance(reply, dict) else count


class _Versions:
    """Checks the versions that tokens name against the control log."""

    def __init__(self, log: SqliteRunLog) -> None:
        self._digests: dict[PolicyVersion, str] = {}
        self._first: dict[tuple[str, int], int] = {}
        for policy, lineage, step, sha256 in log.rows("SELECT policy, lineage, step, sha256 FROM versions"):
            self._digests[PolicyVersion(policy, lineage, step)] = sha256
            self._first[policy, lineage] = min(step, self._first.get((policy, lineage), step))
        self._step_versions = {PolicyVersion(*row) for row in log.rows("SELECT policy, lineage, step FROM steps")}
        self._trained_policies = {policy for policy, lineage in self._first if lineage >= 0}
        self._verdicts: dict[PolicyVersion, str | None] = {}

    def faults(self, turn: TurnEntry) -> list[str]:
        """Return the reasons why versions of a turn's tokens are unknown; empty if all are known."""
        faults = (self._fault(span.version) for span in turn.tokens.spans)
        return [fault for fault in faults if fault is not None]

    def _fault(self, version: PolicyVersion) -> str | None:
        if version not in self._verdicts:
            self._verdicts[version] = self._judge(version)
        return self._verdicts[version]

    def _judge(self, version: PolicyVersion) -> str | None:
        policy, lineage, step = version
        if version not in self._digests:
            if policy not in self._trained_policies and (lineage, step) == (0, 0):
                return None  # the base model, an endpoint or a program
            return f"its tokens are of {version}, which the control log does not know"
        if not self._digests[version]:
            return f"its tokens are of {version}, of which the control log has no digest"
        if lineage >= 0 and step > self._first[policy, lineage] and version not in self._step_versions:
            return f"its tokens are of {version}, and the control log does not know the step that made it"
        return None


def _newest_versions(log: SqliteRunLog) -> dict[str, PolicyVersion]:
    """Return the last version of the last lineage of each trained policy."""
    newest = "SELECT policy, lineage, max(step) FROM versions WHERE lineage >= 0 GROUP BY policy, lineage"
    return {row[0]: PolicyVersion(*row) for row in log.rows(f"{newest} ORDER BY policy, lineage")}


def _sealed_versions(checkpoints: Path) -> dict[PolicyVersion, str]:
    """Return the versions at which checkpoints were sealed, with the checkpoints' names; unreadable manifests are
    skipped."""
    refuse_links(checkpoints)
    checkpoint_names = {}
    for path in sorted(checkpoints.glob("step_*/manifest.json")):
        try:
            refuse_links(path.parent)
            with open_regular(path) as file:
                manifest = msgspec.json.decode(read_at_most(file, MAX_MANIFEST_BYTES), type=_Manifest)
        except (OSError, ValueError, RecursionError, JournalError):
            continue
        for policy, (lineage, step) in manifest.versions.items():
            checkpoint_names[PolicyVersion(policy, lineage, step)] = path.parent.name
    return checkpoint_names
