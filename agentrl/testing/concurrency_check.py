"""Plays several episodes at once, and finds those that differ from the same episodes played alone.

Episodes of one worker share its process, files and ports. An environment that keeps one episode's state there works as
long as it is played alone. When several play at once, rewards and tokens go to the wrong episode, without an error.

1. The episodes proceed in lockstep (`execute_together`), so that they overlap in every run of the check.
2. An episode is accused only of what differs from several executions of it alone, which agree with each other. These
   repeat the replies, and the answers of the outside world, that the episode got. A program whose requests differ
   between them is not repeatable, which is another finding. Where chance could still explain the difference, several
   episodes must differ.
3. If the class can be imported, the episodes play in a new process, where no earlier episode has filled a cache.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentrl.core.records import Task
from agentrl.core.text import plural
from agentrl.environment.environment import Environment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.journal.entries import (
    EffectEntry,
    EffectIntentEntry,
    JournalEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.external.agent import describe_request_difference, external_turns_with_context
from agentrl.testing.differences import is_external, result_of
from agentrl.testing.new_process import (
    DeadProcessError,
    Outcome,
    Play,
    Played,
    SilentProcessError,
    importable_name,
    play_here,
    play_in_new_process,
)

EPISODES = 4
"""Number of episodes that are played at once. Two of them play the same task, like members of a group."""
SLOW_S = 10.0
"""Seconds of an episode alone beyond which only two are played at once."""
ALONE = 4
"""Number of executions alone that must agree before an episode is accused; of those that cannot vary, two."""
MIN_PATIENCE_S = 5.0
"""Minimum seconds to wait for an episode that is behind the others. It is longer if episodes alone took longer."""
UNCERTAIN_PROBLEMS = 2
"""Number of episodes that must differ if chance could explain each difference."""
MIN_TASK_TEXT = 12
"""Minimum length of a task's text that no other task's episode reads by chance."""
MIN_SHARED_TEXT = 3
"""Minimum length of a text that tells whose episode it belongs to."""
_MARK = re.compile(r"#[0-9a-f]{12}\b")
"""What makes a reply of `program_policy` unique."""
_PATH = re.compile(r"(?:/(?:tmp|var|dev/shm|home|root|run|opt)|~|\$HOME)/[\w.][\w./-]*")
SHOWN = 5
"""Maximum number of shared names in a finding."""
ADVICE = (
    "Episodes of a worker run at the same time: keep an episode's state in `self`, local variables or a directory of "
    "the episode, not in module-level names, class attributes, os.environ, the working directory, fixed paths or ports"
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in the check's event loop."""


@dataclass(slots=True)
class ConcurrencyResult:
    """The comparison of episodes that were played at once with the same episodes alone."""

    findings: list[str] = field(default_factory=list)
    episodes: int = 0
    """Number of episodes that were played at once and compared."""
    undecided: str = ""
    """Why episodes could not be compared; empty if they were."""


def compare_concurrent_episodes(
    run: Run,
    environment: type[Environment],
    tasks: Sequence[Task],
    *,
    seed: int,
    sampling: Mapping[str, float],
    alone_s: float,
    demonstrated: bool = False,
) -> ConcurrencyResult:
    """Play episodes at once, and compare each with the same episode alone.

    Args:
        run: runs a coroutine to its end.
        environment: the class; each of its episodes passed the check alone.
        tasks: tasks to play.
        seed: seed of the policy.
        sampling: sampling parameters of the run.
        alone_s: seconds that an episode alone takes at most.
        demonstrated: whether `demonstrate` gives the replies.
    """
    chosen = [tasks[0], *tasks[: EPISODES - 1]] if alone_s <= SLOW_S or len(tasks) == 1 else tasks[:2]
    numbered = list(enumerate(chosen))[::-1]  # in another order than alone, for caches that keep the first episode's
    patience_s = max(MIN_PATIENCE_S, 3 * len(chosen) * alone_s)
    is_program = issubclass(environment, HarnessEnvironment)
    result = ConcurrencyResult()
    policies = ("demonstrated",) if demonstrated else ("program", "calling") if is_program else ("calling",)
    for policy in policies:
        play = Play(importable_name(environment), policy, numbered, seed, patience_s, dict(sampling))
        try:
            comparison = _Comparison(run, environment, play)
            result = comparison.result()
        except SilentProcessError as error:
            return ConcurrencyResult(undecided=str(error))
        except DeadProcessError as error:
            finding = f"{len(chosen)} episodes cannot be played at once, although each can alone: {error}. {ADVICE}"
            return ConcurrencyResult([finding])
        if result.findings or not comparison.most_failed:
            break
    return result


@dataclass(frozen=True, slots=True)
class _View:
    """A part of an episode that is compared."""

    is_program: bool = False
    """Whether an external agent played it, whose requests are compared."""
    of_outside: bool = False
    """Whether the answers of the outside world are compared, instead of all that follows from them."""

    def answers(self, together: Outcome) -> list[JournalEntry]:
        """Return the entries from which an execution alone repeats what it gets."""
        if self.is_program:
            return list(external_turns_with_context(together.entries))
        return [] if self.of_outside else [entry for entry in together.entries if is_external(entry)]

    def name_of(self, entry: JournalEntry) -> str:
        """Return the name of a call; of the outside world, only equal requests are compared."""
        return f"{entry.call_id} {entry.request_hash.hex()}" if self.of_outside else entry.call_id

    def differing(self, first: Outcome, second: Outcome) -> set[str]:
        """Return the names of the parts that differ."""
        if first.failure or second.failure:
            return {_FAILURE} if bool(first.failure) != bool(second.failure) else set()
        before, after = self._parts(first), self._parts(second)
        names = before.keys() & after.keys() if self.of_outside else before.keys() | after.keys()
        return {name for name in names if before.get(name) != after.get(name)}

    def _parts(self, outcome: Outcome) -> dict[str, object]:
        parts: dict[str, object] = {}
        if not self.of_outside:
            parts = {"reward": (outcome.reward, outcome.stop_reason), "states": outcome.states}
        for entry in outcome.entries:
            body = entry.decode()
            if self.is_program and isinstance(body, TurnEntry):
                parts[entry.call_id] = True
            elif self.is_program and isinstance(body, EffectEntry):
                parts[entry.call_id] = (body.value, body.error)
            elif self.of_outside and isinstance(body, EffectEntry | ToolEntry) and is_external(entry):
                value = body.observation if isinstance(body, ToolEntry) else (body.value, body.error)
                parts[self.name_of(entry)] = value
            elif not (self.is_program or self.of_outside or isinstance(body, EffectIntentEntry)):
                parts[entry.call_id] = (entry.request_hash, result_of(entry))
        return parts


_FAILURE = "failure"


class _Problem(NamedTuple):
    """How an episode differs from the same episode alone."""

    place: int
    text: str
    is_certain: bool
    """Whether chance, or a world that changes by itself, cannot explain it."""


class _Comparison:
    """Episodes that were played at once, and what they are compared with."""

    def __init__(self, run: Run, environment: type[Environment], play: Play) -> None:
        self._run = run
        self._environment = environment
        self._play = play
        if not issubclass(environment, HarnessEnvironment):
            self._views = [_View(), _View(of_outside=True)]
        else:
            self._views = [_View(is_program=True)] if environment.replay_stable else []
        self.unrepeatable = ""
        """How a program's requests differ between executions alone; empty if they were not found to."""
        played = self._played(play)
        self._together, self._shared = played.outcomes, played.shared
        # Unlike random calls, demonstrations succeed in a state that earlier episodes of this process did not change.
        self._is_demonstrated = play.policy == "demonstrated"
        self._alone = [
            self._played_alone(place, self._views[:1], in_new_process=self._is_demonstrated)
            for place in range(len(play.tasks))
        ]

    @property
    def most_failed(self) -> bool:
        """Whether most episodes failed, so that little was compared."""
        return 2 * sum(bool(outcome.failure) for outcome in self._together) > len(self._together)

    def result(self) -> ConcurrencyResult:
        """Return what was found. One finding is enough: other episodes are other sides of the same fault."""
        result, problems = ConcurrencyResult(), list[_Problem]()
        for place, together in enumerate(self._together):
            if together.failure is not None and together.failure.is_late:
                result.undecided = f"{plural(len(self._together), 'episode')} at once took too long"
                continue
            result.episodes += 1
            if not any(problem.is_certain for problem in problems):
                problems += filter(
                    None, [self._foreign_reply(place) or self._foreign_task(place) or self._difference(place)]
                )
        problems.sort(key=lambda problem: not problem.is_certain)
        num_tasks = len({task.id for _, task in self._play.tasks})
        if problems and (problems[0].is_certain or len(problems) >= min(UNCERTAIN_PROBLEMS, max(num_tasks - 1, 1))):
            shared = self._shared or _paths_in_command(self._environment)
            names = f" They share: {', '.join(shared[:SHOWN])}." if shared else ""
            kind = "demonstrations" if self._is_demonstrated else "episodes"
            result.findings.append(
                f"{len(self._together)} {kind} played at once mix. The episode of {self._name(problems[0].place)} "
                f"{problems[0].text}.{names} {ADVICE}"
            )
        elif self.unrepeatable:
            result.findings.append(self.unrepeatable)
        return result

    def _name(self, place: int) -> str:
        number, task = self._play.tasks[place]
        is_twice = sum(other == task for _, other in self._play.tasks) > 1
        return f"task {task.id!r}" + (f" (episode {number})" if is_twice else "")

    def _foreign_reply(self, place: int) -> _Problem | None:
        """Return a problem if an episode received a reply to another one."""
        marks = {
            mark: other
            for other, outcome in enumerate(self._together)
            for mark in _MARK.findall(" ".join(_replies(outcome)))
        }
        for where, text in _texts(self._together[place].entries):
            for mark in _MARK.findall(text):
                if marks.get(mark, place) != place:
                    holds = f"which holds a reply to {self._name(marks[mark])}"
                    return _Problem(place, f"received {shortened_repr(text)} ({where}), {holds}", True)
        return None

    def _foreign_task(self, place: int) -> _Problem | None:
        """Return a problem if an episode read a text of another task where its own has another one: a cache that is
        kept in files gives every later episode the same."""
        read = "\n".join(text for _, text in _texts(self._together[place].entries))
        own = self._play.tasks[place][1].data
        for other, (_, task) in enumerate(self._play.tasks):
            read_by_other = "\n".join(text for _, text in _texts(self._alone[other].entries))
            for name, text in task.data.items():
                own_text = own.get(name)
                if not (isinstance(text, str) and isinstance(own_text, str) and len(text) >= MIN_TASK_TEXT):
                    continue
                if text in read and text in read_by_other and own_text not in read and text not in own.values():
                    holds = f"received {shortened_repr(text)}, the {name} of {self._name(other)}, and not its own"
                    return _Problem(place, holds, True)
        return None

    def _difference(self, place: int) -> _Problem | None:
        """Return how an episode differs from the same episode alone."""
        together = self._together[place]
        for view in self._views or [_View(is_program=True)]:
            if view.of_outside and not any(is_external(entry) for entry in together.entries):
                continue
            alone = self._alone[place]
            if view.of_outside:
                alone = self._played_alone(place, [view], in_new_process=self._is_demonstrated)
            if alone.failure:
                continue
            differing = view.differing(together, alone)
            if not self._views:
                differing &= {_FAILURE}
            repeats: list[Outcome] = []
            for _ in range(1, ALONE if view.is_program or view.of_outside else 2):
                if differing:
                    repeats.append(repeat := self._played_alone(place, [view], in_new_process=True))
                    differing = differing & view.differing(together, repeat) - view.differing(alone, repeat)
            if differing and view.is_program and (change := _changing_request(repeats)):
                self.unrepeatable = (
                    f"{self._name(place)}, played several times alone with the same replies, sends another request: "
                    f"{change}"
                )
                return None
            if differing and (problem := self._describe(place, view, alone, differing)):
                return problem
        return None

    def _describe(self, place: int, view: _View, alone: Outcome, differing: set[str]) -> _Problem | None:
        """Describe a difference; None if chance may explain it."""
        together, places = self._together[place], range(len(self._together))
        if view.of_outside:  # the world may change by itself, but does not know the tasks
            entries = [entry for entry in together.entries if view.name_of(entry) in differing]
            own_texts, all_texts = self._task_texts(place), [*map(self._task_texts, places)]
        else:
            entries = together.entries
            own_texts, all_texts = self._texts_of(place, alone), [*map(self._texts_of, places, self._alone)]
        texts_alone = {text for _, text in _texts(alone.entries)}
        new = [(where, text) for where, text in _texts(entries) if text not in texts_alone]
        if together.failure is not None:
            new.append(("its error", together.failure.text))
        for where, text in new:
            if owner := self._owner(place, text, own_texts, all_texts):
                return _Problem(place, f"received {shortened_repr(text)} ({where}), {owner}", True)
        if view.of_outside:
            return None
        is_certain = not (view.is_program or together.failure or any(map(_may_vary, together.entries)))
        if together.failure is not None:
            is_certain |= together.failure.refusal == "foreign_conversation"
            return _Problem(place, f"fails, but not alone: {together.failure.text}", is_certain)
        if view.is_program and differing <= {entry.call_id for entry in together.entries if _is_effect(entry)}:
            return None  # such as a time in the output
        if new:
            text = f"received {shortened_repr(new[0][1])} ({new[0][0]}), which it does not receive alone"
            return _Problem(place, text, is_certain)
        count, count_alone = (len([*_replies(outcome)]) for outcome in (together, alone))
        if count != count_alone:
            return _Problem(place, f"got {plural(count, 'reply', 'replies')}, and alone {count_alone}", is_certain)
        if "reward" in differing:
            owners = [other for other, outcome in enumerate(self._alone) if outcome.reward == together.reward]
            owner = f", which is that of {self._name(owners[0])}" if owners else ""
            return _Problem(place, f"got reward {together.reward}{owner}, and alone {alone.reward}", is_certain)
        return _Problem(place, f"differs from the same episode alone in {min(differing)}", is_certain)

    def _owner(self, place: int, text: str, own_texts: set[str], all_texts: Sequence[set[str]]) -> str:
        """Return a clause that names the episode to which a part of a text belongs; empty if none is known."""
        parts = [
            (len(part), part, other)
            for other, other_texts in enumerate(all_texts)
            if other != place
            for part in other_texts
            if len(part) >= MIN_SHARED_TEXT and part in text and not any(part in own for own in own_texts)
        ]
        if not parts:
            return ""
        _, part, other = max(parts)
        return f"which holds {shortened_repr(part)} of {self._name(other)}"

    def _task_texts(self, place: int) -> set[str]:
        """Return the texts of an episode's task."""
        task = self._play.tasks[place][1]
        return {task.id, *_strings(task.data)}

    def _texts_of(self, place: int, alone: Outcome) -> set[str]:
        """Return the texts that belong to an episode: of its task, and those that it reads and writes alone."""
        return {*self._task_texts(place), *(text for _, text in _texts(alone.entries)), *_replies(alone)}

    def _played_alone(self, place: int, views: Sequence[_View], *, in_new_process: bool) -> Outcome:
        """Play an episode alone, in this process, or where the episodes were played at once."""
        answers = views[0].answers(self._together[place]) if views else []
        play = msgspec.structs.replace(self._play, tasks=[self._play.tasks[place]], answers=answers)
        if not in_new_process:
            played: Played = self._run(play_here(self._environment, play))
            return played.outcomes[0]
        return self._played(play).outcomes[0]

    def _played(self, play: Play) -> Played:
        if play.environment and (played := play_in_new_process(play)) is not None:
            return played
        self._play = msgspec.structs.replace(self._play, environment="")  # also from now on
        here: Played = self._run(play_here(self._environment, play))
        return here


def _paths_in_command(environment: type[Environment]) -> list[str]:
    """Return the temporary files that a command mentions, and the files that it names: it leaves no other trace."""
    if not issubclass(environment, HarnessEnvironment):
        return []
    texts = list(environment.command)
    for argument in environment.command[1:]:
        with contextlib.suppress(OSError, ValueError):
            texts.append(Path(argument).read_text(errors="replace"))
    return sorted({path for text in texts for path in _PATH.findall(text)}.difference(environment.command))


def _may_vary(entry: JournalEntry) -> bool:
    """Whether an entry is a call of a resource that is not the same whenever it is made again."""
    body = entry.decode()
    return isinstance(body, ResourceCallEntry) and body.level != "replay"


def _changing_request(outcomes: Sequence[Outcome]) -> str:
    """Return how a request differs that a program does not repeat in each execution; "" if it repeats all of them."""
    turns = [
        {entry.call_id: body for entry in external_turns_with_context(outcome.entries) if (body := _turn(entry))}
        for outcome in outcomes
        if outcome.failure is None
    ]
    for first, second in itertools.pairwise(turns):
        missing = [body for call_id, body in first.items() if call_id not in second]
        new = [body for call_id, body in second.items() if call_id not in first]
        if missing and new and new[0].request is not None:
            return describe_request_difference(missing, new[0].messages, new[0].request)
    return ""


def _turn(entry: JournalEntry) -> TurnEntry | None:
    body = entry.decode()
    return body if isinstance(body, TurnEntry) else None


def _is_effect(entry: JournalEntry) -> bool:
    return isinstance(entry.decode(), EffectEntry)


def _texts(entries: Iterable[JournalEntry]) -> Iterator[tuple[str, str]]:
    """Yield what an episode read, each with its place."""
    for entry in entries:
        match entry.decode():
            case TurnEntry(seat=seat, turn=turn, messages=messages):
                for message in messages:
                    yield f"{message['role']} message of turn {turn}, seat {seat!r}", str(message["content"])
            case ToolEntry(name=name, observation=observation):
                yield f"result of tool {name!r}", observation
            case EffectEntry(name=name, value=value, error=error):
                for text in [error] if error is not None else _strings(value):
                    yield f"effect {name!r}", text


def _replies(outcome: Outcome) -> Iterator[str]:
    """Yield what the policy wrote in an episode."""
    chat_format = PlainChatFormat()
    for entry in outcome.entries:
        if isinstance(body := entry.decode(), TurnEntry):
            yield chat_format.decode(body.tokens.decode().token_ids.tolist()).removesuffix("<|stop|>")


def _strings(value: object) -> Iterator[str]:
    """Yield the texts and numbers in JSON data."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
