"""`fork`: resample an episode of a run from one of its turns.

A fork refers to the entries before the turn and has its own sampling seeds, random streams and effects from there on.
Forks are written to a separate journal, `RUN/forks`, which is read like a run; the run itself, which may still be
running, is not touched. Forks are neither trained nor counted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.app.evaluation import play_without_training, reporting, with_frozen_policies
from agentrl.app.model_files import check_models_unchanged, model_paths
from agentrl.app.policies import (
    check_tokenizers,
    frozen_policy_weights,
    serve_configured_weights,
    weights_from_directory,
)
from agentrl.app.received import FORK, ReceivedRun, recorded_environment_code
from agentrl.app.replays import replay
from agentrl.app.run_parts import RunFactories
from agentrl.cluster.session import gpu_reservation
from agentrl.config.policies import AnyPolicy, OpponentPoolPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core import event_loop, ids
from agentrl.core.errors import InputError, JournalError
from agentrl.core.files import expand_path, refuse_links
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, SeatBinding, Task, WeightsRef
from agentrl.core.text import escape_line, plural
from agentrl.environment.environment import Environment
from agentrl.environment.registry import name_of
from agentrl.inspection.comparisons import FORKS
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import BeginEntry, EntryBody, JournalEntry, TurnEntry, decode_entries
from agentrl.journal.reader import AT_END, TurnLogReader, load_fork_prefix, referred_journal
from agentrl.journal.run_log import SqliteRunLog
from agentrl.observe.run_directory import ENGINE_LOG, run_argument
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.turn_entries import decode_message

if TYPE_CHECKING:
    from agentrl.orchestrator.dispatch import Dispatcher

_VERSION = re.compile(r"(?P<policy>[^@/]+)@((?P<lineage>\d{1,9})\.)?(?P<step>\d{1,9})")

ForkStart = int | str
"""Where a fork leaves an episode. A turn: its number, over all agents in recorded order and from the end if negative. A
call: its id; one that the episode did not make stands for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkParent:
    """An episode to be forked at one of its turns."""

    begin: BeginEntry
    task: Task
    point: ForkPoint
    """Start of the fork; its journal is an absolute path."""
    prefix: Sequence[EntryBody]
    """Entries before the fork point."""
    turns: Sequence[TurnEntry]
    """Turns up to and including the one at the fork point; at least the first one."""
    ancestors: Sequence[ForkPoint]
    """Journal directories and attempts of the parent and its ancestors, the nearest first; call ids are ignored."""

    @property
    def spec(self) -> EpisodeSpec:
        """The spec of the parent, as its first entry has it."""
        begin = self.begin
        return EpisodeSpec(
            episode_id=self.point.episode_id,
            environment=begin.environment,
            task=self.task,
            seed=begin.seed,
            seats={seat: SeatBinding(policy) for seat, policy in begin.seats.items()},
            group_id=begin.group_id,
            group_size=begin.group_size,
            attempt=self.point.attempt,
        )

    def point_for(self, journal: Path) -> ForkPoint:
        """The fork point in the form for episodes of a journal directory."""
        return replace(self.point, journal=os.path.relpath(self.point.journal, journal))


class ForkPolicies(NamedTuple):
    """The policies of a fork."""

    seats: Mapping[str, str]
    """Policies of the seats whose policy differs from the parent's."""
    weights: Sequence[WeightsRef]
    """Weights of the policies that differ from the base model."""


@outside_event_loop
def fork(  # noqa: PLR0913 (one keyword per choice)
    run: str | Path,
    episodes: str | Sequence[tuple[str, int | None]],
    *,
    at: int | Literal["change"],
    n: int = 1,
    attempt: int | None = None,
    policy: str | Path | Sequence[str | Path] = (),
    edit: str | Sequence[Mapping[str, Any]] | None = None,
    environment: type | str | None = None,
    overrides: Sequence[str] = (),
    factories: RunFactories | None = None,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
) -> list[EpisodeHeader]:
    """Resample episodes from one of their turns. Nothing is trained.

    Forks reuse results of children that the episode had received, and of children that have ended since; other children
    start over.

    Args:
        run: the run's directory, or `RUN/forks` to fork a fork.
        episodes: the id of an episode, as `agentrl episode list` shows it; or several ids, each with an attempt or None
            for the newest. Episodes with the same weights share an engine.
        at: the turn, counted from 0 over all agents in recorded order; negative numbers count from the end. "change":
            each episode's first call that differs in `environment`. Episodes without such a call, and those that the
            environment fails before it, are not forked.
        n: number of forks of each episode.
        attempt: attempt of a single episode; default: the newest.
        policy: other policies, one or several: see `fork_policies`. Default: the policies of the parent, each with its
            weights as of that turn, if they are still on disk.
        edit: replaces the messages of that turn: the content of the last one, or all of them, with `role` and
            `content`. For an external agent, which chooses its own messages, it replaces the reply: the text as the
            policy would have written it, calls included, or one message with the role `assistant`.
        environment: a class, a name, `module:Class` or a path that replaces the environment named in the journal. A
            journal cannot choose the code that runs: its environment is used only if it is installed or already
            imported, or if the user trained the run here.
        overrides: values for what the run would choose on this machine, as `section.field=value` or `task.key=value`;
            needed once for a run that the user did not train here.
        factories: factories of the engine and the chat format; default: as in the run's configuration.
        on_progress: receives the current part, and the share of the forks that have ended, about twice a second.

    Returns:
        Results of the forks, in the order of their parents. They are in `RUN/forks`, which is read like a run.

    Raises:
        InputError: there is no such episode or turn, the weights are gone, or only the run names what it needs.
        JournalError: the run or an episode cannot be read.
    """
    path = Path(expand_path(run))
    received = ReceivedRun(path, overrides)
    chosen = [(episodes, attempt)] if isinstance(episodes, str) else list(episodes)
    replacements = [policy] if isinstance(policy, str | Path) else policy
    options: list[object] = ["--at", at]
    options += ["-n", n] if n != 1 else []
    options += ["--attempt", attempt] if attempt is not None else []
    options += [option for replacement in replacements for option in ("--policy", replacement)]
    options += ["--edit", "FILE"] if edit is not None else []
    command = received.command("episode fork", *[name for name, _ in chosen[:1]], *options, environment=environment)
    starts: list[tuple[str, int | None, ForkStart]] = []
    if at == "change":
        if environment is None:
            raise InputError("--at change forks where changed code differs: name it with --environment new.py:Class")
        replays = replay(
            path, chosen, environment=environment, overrides=overrides, factories=factories, on_progress=on_progress
        )
        starts += [
            (each.episode, each.attempt, each.call) for each in replays if each.outcome == "departed" and each.call
        ]
    else:
        starts += [(name, its_attempt, at) for name, its_attempt in chosen]
    with contextlib.closing(RunReader(path)) as reader:
        info, recorded_settings = reader.info(), reader.log.config()
        parents = [edit_fork_parent(find_parent(reader.journal, *start), edit) for start in starts]
    if not parents:
        return []
    use = FORK if factories is None else FORK.without_models()

    def choose_code(command: str, parent: ForkParent = parents[0]) -> type[Environment]:
        return received.environment(
            parent.begin.environment,
            environment,
            references=recorded_environment_code(info),
            code_hash=parent.begin.code_hash,
            command=command,
            is_child=ids.child_depth(parent.ancestors[-1].episode_id) > 0,
        )

    config = received.config(recorded_settings, use, command, choose_code)
    check_models_unchanged(model_paths(config), info.get("models"), ignored=use.ignored)
    directory = path if info.get("forks") else path / FORKS  # forks of forks are written beside them
    refuse_links(directory)
    info_fields = {"name": f"forks of {directory.parent.name}", "forks": True, "code": info.get("code", {})}
    groups: dict[str, tuple[type[Environment], ForkPolicies, list[int]]] = {}
    known_parents = []
    for number, parent in enumerate(parents):
        environment_class = choose_code(command, parent)
        known_parents.append(replace(parent, task=received.task(environment_class, parent.task, command)))
        policies = fork_policies(config.policies, parent, replacements, received)
        key = repr((environment_class, policies))
        groups.setdefault(key, (environment_class, policies, []))[2].append(number)
    received.remember_weights(
        weights for _, policies, _ in groups.values() for weights in policies.weights if weights.version.lineage < 0
    )
    headers: dict[int, list[EpisodeHeader]] = {}
    for position, (environment_class, policies, numbers) in enumerate(groups.values(), 1):
        prefix = f"weights {position} of {len(groups)}: " if len(groups) > 1 else ""
        played = event_loop.run(
            _fork(
                *(config, environment_class, [known_parents[number] for number in numbers], directory, n, policies),
                *(factories or RunFactories(), info_fields),
                partial(_report_group, on_progress, prefix),
            )
        )
        for place, number in enumerate(numbers):
            headers[number] = played[place * n : (place + 1) * n]
    return [header for number in range(len(parents)) for header in headers[number]]


def _report_group(on_progress: Callable[[str, float], None], prefix: str, part: str, share: float) -> None:
    on_progress(prefix + part, share)


def find_parent(journal: Path, episode_id: str, attempt: int | None, at: ForkStart) -> ForkParent:
    """Find the turn or call of an episode at which to fork.

    Raises:
        InputError: there is no such episode, turn or call, or no policy acts.
        JournalError: the episode cannot be read.
    """
    partition, entries = _entries(journal, episode_id, attempt)
    begin = decode_entries(entries[:1])[0]
    if not isinstance(begin, BeginEntry):
        raise JournalError(f"{journal}: the first entries of episode {episode_id} are missing; the journal is damaged")
    points = _points(journal, partition, entries[0], begin)
    all_entries = entries if begin.fork is None else [*load_fork_prefix(journal, begin.fork), *entries]
    bodies = decode_entries(all_entries)
    places = [place for place, body in enumerate(bodies) if isinstance(body, TurnEntry)]
    if isinstance(at, str):
        place = next((place for place, entry in enumerate(all_entries) if entry.call_id == at), len(all_entries))
    elif -len(places) <= at < len(places):
        place = places[at]
    else:
        raise InputError(f"episode {episode_id} has {plural(len(places), 'turn')}, so it cannot be forked at turn {at}")
    if not places:
        raise InputError(f"no policy acts in episode {episode_id}, so its weights are not known")
    entry = all_entries[min(place, len(all_entries) - 1)]
    point = replace(points[entry.episode_id], call_id=entry.call_id if place < len(all_entries) else AT_END)
    last_turn = max(place, places[0])
    return ForkParent(
        begin=begin,
        task=Task(id=begin.task_id, data=begin.task),
        point=point,
        prefix=[body for body in bodies[:place] if not isinstance(body, BeginEntry)],
        turns=[body for body in bodies[: last_turn + 1] if isinstance(body, TurnEntry)],
        ancestors=tuple(points.values()),
    )


def edit_fork_parent(parent: ForkParent, edit: str | Sequence[Mapping[str, Any]] | None) -> ForkParent:
    """Return the parent with other messages at the fork point or, for an external agent, with another reply.

    Raises:
        InputError: `edit` has no valid messages, or the turn has no message whose content could be edited.
    """
    if edit is None:
        return parent
    if not ids.has_call_number(parent.point.call_id):
        reply = {"role": "assistant", "content": edit} if isinstance(edit, str) else dict(edit[-1])
        if reply.keys() != {"role", "content"} or reply["role"] != "assistant" or not isinstance(reply["content"], str):
            raise InputError(
                "the turn belongs to an external agent, whose requests cannot be edited: edit the reply instead, as "
                "text or as "
                '[{"role": "assistant", "content": "…"}], with tool calls in the format of the policy'
            )
        return replace(parent, point=replace(parent.point, messages=(reply,)))
    messages = [dict(message) for message in parent.turns[-1].messages]
    if isinstance(edit, str):
        if not messages:
            raise InputError("the turn has no new messages to edit")
        messages[-1]["content"] = edit
    else:
        messages = [dict(message) for message in edit]
    try:
        for message in messages:
            decode_message(message)
    except JournalError as error:
        raise InputError(f'{error}; write [{{"role": "user", "content": "…"}}]') from error
    return replace(parent, point=replace(parent.point, messages=tuple(messages)))


def fork_policies(
    known: Mapping[str, AnyPolicy], parent: ForkParent, requested: Sequence[str | Path], received: ReceivedRun
) -> ForkPolicies:
    """Return the policies of a fork: its parent's, with their weights as of the turn, or those in `requested`.

    A policy has the same weights in all its seats, and in the children. Each item of `requested` is one of

        DIR                            weights for the policy that takes the turn, such as a run's `policies/NAME`
        POLICY@LINEAGE.STEP            a version of a policy of the run, in all its seats; POLICY@STEP: the one of the
                                       newest lineage
        SEAT=POLICY                    another policy of the run in a seat of the episode
        SEAT=POLICY@LINEAGE.STEP       the same, at a version
        SEAT=DIR                       weights for the policy that holds the seat

    Raises:
        InputError: there is no such seat, policy, version or directory, or weights are no longer on disk.
    """
    for policy in [*parent.begin.seats.values(), *(turn.policy for turn in parent.turns)]:
        _check_known(policy, known, "the episode")
    seats: dict[str, str] = {}
    weights_by_policy: dict[str, WeightsRef | None] = {}
    for request in requested:
        seat, source = _split(parent, request)
        policy = parent.turns[-1].policy if seat is None else parent.begin.seats[seat]
        if source in known:
            policy = str(source)
        elif match := _VERSION.fullmatch(str(source)):
            policy = match["policy"]
            _check_known(policy, known, "--policy")
            step = int(match["step"])
            lineage = _newest_lineage(parent, policy, step) if match["lineage"] is None else int(match["lineage"])
            weights_by_policy[policy] = _weights(parent, PolicyVersion(policy, lineage, step))
        else:
            weights_by_policy[policy] = weights_from_directory(policy, source)
        if isinstance(pool := known[policy], OpponentPoolPolicy):
            raise InputError(f"--policy: {policy} plays past versions of {pool.of}; name one, such as {pool.of}@0.5")
        if seat is not None:
            seats[seat] = policy
    other_weights = weights_at_fork_point(
        parent,
        [name for name, policy in known.items() if isinstance(policy, PolicyConfig) and name not in weights_by_policy],
        _usable_pins(parent, known, {**parent.begin.seats, **seats}.values()),
        leave_out=weights_by_policy,
    )
    for weights in other_weights:
        policy = weights.version.policy
        if weights.version.lineage < 0 and not received.allows_weights(policy, weights.path):
            seat = next((seat for seat, holder in parent.begin.seats.items() if holder == policy), policy)
            raise InputError(
                f"only the run names the weights of {policy}, {escape_line(weights.path)}: if you trust them, add "
                f"--policy {shlex.quote(escape_line(f'{seat}={weights.path}'))}"
            )
    return ForkPolicies(
        seats, [*(weights for weights in weights_by_policy.values() if weights is not None), *other_weights]
    )


def _check_known(policy: str, known: Collection[str], origin: str) -> None:
    if policy not in known:
        raise InputError(f"{origin}: the run has no policy {policy!r}; it has {', '.join(known)}")


def _split(parent: ForkParent, request: str | Path) -> tuple[str | None, str | Path]:
    """Split an item into the seat, if it names one, and the policy, version or directory."""
    if isinstance(request, Path) or "=" not in request or Path(request).is_dir():
        return None, request
    seat, _, source = request.partition("=")
    if seat not in parent.begin.seats:
        raise InputError(f"--policy: the episode has no seat {seat!r}; it has {', '.join(parent.begin.seats)}")
    return seat, source


def _usable_pins(
    parent: ForkParent, known: Mapping[str, AnyPolicy], holders: Collection[str]
) -> Mapping[str, PolicyVersion]:
    """Return the versions at which the episode fixed policies, such as past opponents. A version that is gone is left
    out if its policy holds no seat.

    Raises:
        InputError: the weights of a policy that holds a seat are no longer on disk.
    """
    usable: dict[str, PolicyVersion] = {}
    for policy, version in _pins(parent).items():
        if policy not in known:
            continue
        try:
            _weights(parent, version)
            usable[policy] = version
        except InputError as error:
            if policy in holders:
                pool = known[policy]
                other = f", or --policy SEAT={pool.of}@STEP" if isinstance(pool, OpponentPoolPolicy) else ""
                raise InputError(f"{policy} played {version}: {error}{other}") from None
    return usable


def _pins(parent: ForkParent) -> Mapping[str, PolicyVersion]:
    """Return the versions at which the episode, or the nearest of its ancestors with any, fixed policies."""
    for point in parent.ancestors:
        log = SqliteRunLog(Path(point.journal))
        try:
            spec = log.admitted(point.episode_id, point.attempt)
        finally:
            log.close()
        if spec is not None and spec.pins:
            return spec.pins
    return {}


def weights_at_fork_point(
    parent: ForkParent,
    learners: Collection[str] = (),
    pins: Mapping[str, PolicyVersion] = MappingProxyType({}),
    *,
    leave_out: Collection[str] = (),
) -> list[WeightsRef]:
    """Return the weights that each policy had last used at the turn. A policy that had not acted gets its version in
    `pins`; a learning policy without one gets the newest version at that time.

    Raises:
        InputError: weights are no longer on disk.
    """
    versions = {
        turn.policy: turn.tokens.spans[-1].version
        for turn in parent.turns
        if turn.tokens.spans and turn.policy not in leave_out
    }
    for policy, version in pins.items():
        if policy not in leave_out:
            versions.setdefault(policy, version)
    for policy in learners:
        newest = None if policy in versions else _newest(parent, policy)
        if newest is not None:
            versions[policy] = newest
    weights_of = {policy: _weights(parent, version) for policy, version in versions.items()}
    return [
        replace(weights, version=weights.version._replace(policy=policy))
        for policy, weights in weights_of.items()
        if weights is not None
    ]


def _newest(parent: ForkParent, policy: str) -> PolicyVersion | None:
    """Return the newest version of a policy when the turn began."""
    row = _newest_row(parent, policy, "published_at <= ? ORDER BY published_at", parent.turns[-1].started)
    return None if row is None else PolicyVersion(policy, *row)


def _newest_lineage(parent: ForkParent, policy: str, step: int) -> int:
    """Return the newest lineage in which a run published a step of a policy; 0 without one."""
    row = _newest_row(parent, policy, "step = ? ORDER BY lineage", step)
    return 0 if row is None else row[0]


def _newest_row(parent: ForkParent, policy: str, newest: str, value: float) -> tuple[int, int] | None:
    """Return lineage and step of the newest version of a policy that a run of the episode published, by a condition on
    `value` and an order; None without one. Lineages below 0 are weights that a user gave."""
    statement = f"SELECT lineage, step FROM versions WHERE policy = ? AND lineage >= 0 AND {newest} DESC LIMIT 1"
    for point in parent.ancestors:
        log = SqliteRunLog(Path(point.journal))
        try:
            rows = log.rows(statement, policy, value)
        finally:
            log.close()
        for lineage, step in rows:
            return lineage, step
    return None


def _weights(parent: ForkParent, version: PolicyVersion) -> WeightsRef | None:
    """Return the weights of a version; None for the base model.

    Raises:
        InputError: the weights are no longer on disk.
    """
    for point in parent.ancestors:
        log = SqliteRunLog(Path(point.journal))
        try:
            weights = log.published(version, outside=True)
        finally:
            log.close()
        if weights is not None and Path(weights.path).is_dir():
            return weights
    if version.step > 0:
        run = Path(parent.ancestors[-1].journal).parent
        raise InputError(
            f"the weights of {version} are not on disk (or were removed); give --policy a directory, such as "
            f"{run}/policies/{version.policy}, or a version that `agentrl step list {run_argument(run)}` shows and "
            "`checkpoint.versions` kept"
        )
    return None


def fork_episode_spec(
    parent: ForkParent,
    number: int,
    journal: Path,
    environment: type[Environment],
    n: int,
    seats: Mapping[str, str] = MappingProxyType({}),
) -> EpisodeSpec:
    """Make the spec of fork `number` of `n`, to be written to a journal directory. `seats` has the policies that differ
    from the parent's."""
    point, episode_id = parent.point, ids.episode_id("f", number)
    return parent.spec.start_another(
        *(point.call_id, episode_id),
        episode_id=episode_id,
        environment=name_of(environment),
        seats={**parent.spec.seats, **{seat: SeatBinding(policy) for seat, policy in seats.items()}},
        group_id=f"{point.episode_id}.{point.attempt}.{point.call_id}",
        group_size=n,
        purpose="fork",
        fork=parent.point_for(journal),
    )


async def _fork(  # noqa: PLR0913 (what `fork` has found)
    config: RunConfig,
    environment: type[Environment],
    parents: Sequence[ForkParent],
    directory: Path,
    n: int,
    policies: ForkPolicies,
    factories: RunFactories,
    info_fields: Mapping[str, Any],
    on_progress: Callable[[str, float], None],
) -> list[EpisodeHeader]:
    """Play `n` forks of each parent with the same weights; returns their headers in this order."""
    from agentrl.journal.store import SqliteJournal

    # The turn determines the weights. Paths into the run would be wrong once it is moved.
    recorded = with_frozen_policies(config, ())
    chosen = {weights.version.policy for weights in policies.weights}
    other_weights = frozen_policy_weights(
        base._replace(policies={name: policy for name, policy in base.policies.items() if name not in chosen})
        for base in config.bases
    )
    config = with_frozen_policies(config, policies.weights)
    check_tokenizers(config.engine_plan)
    on_progress("loading the model", 0.0)
    chat_format = factories.chat_format(config.model)
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(directory / "journal", info={**info_fields, "config": recorded.model_dump(mode="json")})
        stack.push_async_callback(store.close)
        versions = {name: PolicyVersion(name, 0, 0) for name in config.policies}
        await stack.enter_async_context(gpu_reservation())
        engine = await factories.engine(config.engine_plan, versions, lambda death: None, directory / ENGINE_LOG)
        stack.push_async_callback(engine.close)
        await serve_configured_weights(config.bases, ServedVersions(engine), store, [*policies.weights, *other_weights])
        numbers = itertools.count(store.next_number("f"))
        journal = directory / "journal"
        specs = [
            fork_episode_spec(parent, number, journal, environment, n, policies.seats)
            for parent in parents
            for number in itertools.islice(numbers, n)
        ]
        ended_children = {name: header for parent in parents for name, header in ended_child_episodes(parent).items()}

        async def play(dispatcher: Dispatcher) -> list[EpisodeHeader]:
            def report() -> None:
                num_ended, _ = dispatcher.evaluated.progress()
                calls = sum(store.progress(spec.episode_id, spec.attempt)[0] for spec in specs)
                text = f"{num_ended} of {plural(len(specs), 'fork')} ended, {calls:,} calls recorded"
                on_progress(text, num_ended / len(specs))

            return await reporting(dispatcher.play_forks(specs, ended_children), report)

        return await play_without_training(config.rollout_plan, environment, engine, chat_format, store, play)


def _entries(journal: Path, episode_id: str, attempt: int | None) -> tuple[str, list[JournalEntry]]:
    """Return the partition of an episode's attempt and its own entries."""
    log, turns = SqliteRunLog(journal), TurnLogReader(journal)
    try:
        attempts = [row[0] for row in log.rows("SELECT attempt FROM admissions WHERE episode = ?", episode_id)]
        if not attempts or (attempt is not None and attempt not in attempts):
            name = episode_id if attempt is None else f"{episode_id}, attempt {attempt}"
            raise InputError(f"{journal.parent}: no episode {name}; `agentrl episode list {journal.parent}` shows them")
        attempt_number = max(attempts) if attempt is None else attempt
        statement = "SELECT partition FROM episodes WHERE episode = ? AND attempt = ? AND partition IS NOT NULL"
        rows = log.rows(statement, episode_id, attempt_number)
        partition: str | None = rows[0][0] if rows else turns.partition_of(episode_id, attempt_number)
        entries = [] if partition is None else turns.read(partition, episode_id, attempt_number)
        if partition is not None and entries:
            return partition, entries
        turns.check_pruned(episode_id, attempt_number)
    finally:
        log.close()
        turns.close()
    raise InputError(f"{journal.parent}: episode {episode_id} has no entries yet; fork it later")


def _points(journal: Path, partition: str, first: JournalEntry, begin: BeginEntry) -> dict[str, ForkPoint]:
    """Return the fork points that name the journal directories of an episode and its ancestors, by episode id; call ids
    are ignored."""
    directory = os.path.abspath(journal)
    points = {first.episode_id: _point(directory, partition, first)}
    while begin.fork is not None:
        if begin.fork.episode_id in points:
            raise JournalError(f"{journal}: the forks of {first.episode_id} refer to each other in a circle")
        directory = str(referred_journal(Path(directory), begin.fork.journal))
        points[begin.fork.episode_id] = replace(begin.fork, journal=directory)
        _, entries = _entries(Path(directory), begin.fork.episode_id, begin.fork.attempt)
        begin_entry = decode_entries(entries[:1])[0]
        assert isinstance(begin_entry, BeginEntry)
        begin = begin_entry
    return points


def _point(directory: str, partition: str, entry: JournalEntry) -> ForkPoint:
    return ForkPoint(
        journal=directory,
        partition=partition,
        episode_id=entry.episode_id,
        attempt=entry.attempt,
        call_id=entry.call_id,
    )


def ended_child_episodes(parent: ForkParent) -> dict[str, EpisodeHeader]:
    """Return the headers of the ended children of an episode and its ancestors."""
    headers: dict[str, EpisodeHeader] = {}
    for point in parent.ancestors:
        log = SqliteRunLog(Path(point.journal))
        try:
            headers.update(log.ended_children(point.episode_id))
        finally:
            log.close()
    return headers
