"""Plays several episodes at once, and finds those that differ from the same episodes played alone.

Episodes of one worker share its process, files and ports. An environment that keeps one episode's state there works as
long as it is played alone. When several play at once, rewards and tokens go to the wrong episode, without an error.

1. The episodes proceed in lockstep (`execute_together`), so that they overlap in every run of the check.
2. An episode is accused only of what differs from several executions of it alone, which agree with each other. These
   repeat the replies, and the answers of the outside world, that the episode got. Where chance could still explain the
   difference, several episodes must differ.
3. If the class can be imported, the episodes play in a new process, where no earlier episode has filled a cache.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentrl.core import event_loop
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.event_loop import CALL_THREADS
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.core.text import plural
from agentrl.engines.scripted import Script
from agentrl.environment.environment import Environment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.registry import module_of, resolve
from agentrl.gateway.conversations import FOREIGN_CONVERSATION
from agentrl.journal.entries import (
    EffectEntry,
    EffectIntentEntry,
    JournalEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.observe.blocked_loop import is_user_code
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.external.agent import external_turns_with_context
from agentrl.testing.differences import is_external, result_of
from agentrl.testing.execution import (
    ExecutedEpisode,
    execute_episode,
    execute_together,
    random_policy,
    spec_of,
)
from agentrl.testing.new_process import DeadProcessError, SilentProcessError, run_in_new_process, serve_new_process
from agentrl.testing.side_effects import written_files
from agentrl.testing.wrong_calls import shown_tools

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
THREAD_START_S = 0.02
"""Seconds after which a thread begins, while episodes are played at once."""
SWITCH_S = 1e-6
"""Seconds after which a thread lets another one run, while episodes are played at once."""
CALLED_TURNS = 2
"""Number of tool results after which the policy of external agents answers with text."""
MIN_TASK_TEXT = 12
"""Minimum length of a task's text that no other task's episode reads by chance."""
MIN_SHARED_TEXT = 3
"""Minimum length of a text that tells whose episode it belongs to."""
_MARK = re.compile(r"#[0-9a-f]{12}\b")
"""What makes a reply of `program_policy` unique."""
_PATH = re.compile(r"(?:/(?:tmp|var|dev/shm|home|root|run|opt)|~|\$HOME)/[\w.][\w./-]*")
SHOWN = 5
"""Maximum number of shared names in a finding."""
_LATE = ("did not end within", "took longer than", "timed out")
"""Words of failures that a loaded machine can cause."""
ADVICE = (
    "Episodes of a worker run at the same time: keep an episode's state in `self`, local variables or a directory of "
    "the episode, not in module-level names, class attributes, os.environ, the working directory, fixed paths or ports"
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in the check's event loop."""


class Outcome(msgspec.Struct):
    """The end of an episode, in a form that another process can send."""

    failure: str = ""
    reward: float | None = None
    stop_reason: str = ""
    entries: list[JournalEntry] = []
    states: dict[str, Any] = {}

    @classmethod
    def of(cls, executed: ExecutedEpisode | str) -> Outcome:
        """Convert the outcome of an execution."""
        if isinstance(executed, str):
            return cls(failure=executed)
        header = executed.header
        return cls("", header.reward, header.stop_reason or "", executed.entries, executed.states)


class _Play(msgspec.Struct):
    """What a process plays."""

    environment: str
    policy: str
    tasks: list[tuple[int, Task]]
    """Number and task of each episode; the number decides about its seed."""
    seed: int
    patience_s: float
    sampling: dict[str, float] = {}
    answers: list[JournalEntry] = []
    """Answers of the outside world, for a single episode."""


class _Played(msgspec.Struct):
    """What a process has played."""

    outcomes: list[Outcome]
    shared: list[str]
    """Names that episodes share, and that changed while they were played."""


@dataclass(slots=True)
class ConcurrencyResult:
    """The comparison of episodes that were played at once with the same episodes alone."""

    findings: list[str] = field(default_factory=list)
    episodes: int = 0
    """Number of episodes that were played at once and compared."""
    undecided: str = ""
    """Why episodes could not be compared; empty if they were."""


def program_policy(environment: type[Environment]) -> Script:
    """Return a policy for external agents that calls the offered tools, and then replies with a unique text."""
    chat_format = PlainChatFormat()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random_stream("concurrency", request.seed)
        mark = f"#{draw.getrandbits(48):012x}"
        prompt = chat_format.decode(request.token_ids.tolist())
        tools = shown_tools(prompt)
        text = f"{draw.choice(['yes', '0', 'hello world'])} {mark}"
        if tools and prompt.count("<|start|>tool\n") < CALLED_TURNS:
            name = draw.choice(sorted(tools))
            arguments = {parameter: draw.choice([draw.randint(1, 9), mark]) for parameter in tools[name]}
            call = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
            text = f"<tool_call>{call}</tool_call>"
        return [*text.encode(), STOP_TOKEN]

    return script


_POLICIES: dict[str, Callable[[type[Environment]], Script]] = {
    "program": program_policy,
    "random": partial(random_policy, calling=0.9),  # episodes with few turns overlap little
}


def compare_concurrent_episodes(
    run: Run,
    environment: type[Environment],
    tasks: Sequence[Task],
    *,
    seed: int,
    sampling: Mapping[str, float],
    alone_s: float,
) -> ConcurrencyResult:
    """Play episodes at once, and compare each with the same episode alone.

    Args:
        run: runs a coroutine to its end.
        environment: the class; each of its episodes passed the check alone.
        tasks: tasks to play.
        seed: seed of the policy.
        sampling: sampling parameters of the run.
        alone_s: seconds that an episode alone takes at most.
    """
    chosen = [tasks[0], *tasks[: EPISODES - 1]] if alone_s <= SLOW_S or len(tasks) == 1 else tasks[:2]
    numbered = list(enumerate(chosen))[::-1]  # in another order than alone, for caches that keep the first episode's
    patience_s = max(MIN_PATIENCE_S, 3 * len(chosen) * alone_s)
    is_program = issubclass(environment, HarnessEnvironment)
    result = ConcurrencyResult()
    for policy in ("program", "random") if is_program else ("random",):
        play = _Play(_importable_name(environment), policy, numbered, seed, patience_s, dict(sampling))
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

    def __init__(self, run: Run, environment: type[Environment], play: _Play) -> None:
        self._run = run
        self._environment = environment
        self._play = play
        if not issubclass(environment, HarnessEnvironment):
            self._views = [_View(), _View(of_outside=True)]
        else:
            self._views = [_View(is_program=True)] if environment.replay_stable else []
        played = self._played(play)
        self._together, self._shared = played.outcomes, played.shared
        self._alone = [self._played_alone(place, self._views[:1], here=True) for place in range(len(play.tasks))]

    @property
    def most_failed(self) -> bool:
        """Whether most episodes failed, so that little was compared."""
        return 2 * sum(bool(outcome.failure) for outcome in self._together) > len(self._together)

    def result(self) -> ConcurrencyResult:
        """Return what was found. One finding is enough: other episodes are other sides of the same fault."""
        result, problems = ConcurrencyResult(), list[_Problem]()
        for place, together in enumerate(self._together):
            if any(words in together.failure for words in _LATE):
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
            names = f" They share: {', '.join(self._shared[:SHOWN])}." if self._shared else ""
            result.findings.append(
                f"{len(self._together)} episodes played at once mix. The episode of {self._name(problems[0].place)} "
                f"{problems[0].text}.{names} {ADVICE}"
            )
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
            alone = self._played_alone(place, [view], here=True) if view.of_outside else self._alone[place]
            if alone.failure:
                continue
            differing = view.differing(together, alone)
            if not self._views:
                differing &= {_FAILURE}
            for _ in range(1, ALONE if view.is_program or view.of_outside else 2):
                if differing:
                    again = self._played_alone(place, [view], here=False)
                    differing = differing & view.differing(together, again) - view.differing(alone, again)
            if differing and (problem := self._describe(place, view, alone, differing)):
                return problem
        return None

    def _describe(self, place: int, view: _View, alone: Outcome, differing: set[str]) -> _Problem | None:
        """Describe a difference; None if chance may explain it."""
        together, places = self._together[place], range(len(self._together))
        if view.of_outside:  # the world may change by itself, but does not know the tasks
            entries = [entry for entry in together.entries if view.name_of(entry) in differing]
            own, others = self._task_texts(place), [*map(self._task_texts, places)]
        else:
            entries = together.entries
            own, others = self._texts_of(place, alone), [*map(self._texts_of, places, self._alone)]
        known = {text for _, text in _texts(alone.entries)}
        new = [(where, text) for where, text in _texts(entries) if text not in known]
        new += [("its error", together.failure)] * bool(together.failure)
        for where, text in new:
            if owner := self._owner(place, text, own, others):
                return _Problem(place, f"received {shortened_repr(text)} ({where}), {owner}", True)
        if view.of_outside:
            return None
        is_certain = not (view.is_program or together.failure or any(map(_may_vary, together.entries)))
        is_certain |= any(FOREIGN_CONVERSATION in text for _, text in new)
        if together.failure:
            return _Problem(place, f"fails, but not alone: {together.failure}", is_certain)
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

    def _owner(self, place: int, text: str, own: set[str], others: Sequence[set[str]]) -> str:
        """Return a clause that names the episode to which a part of a text belongs; empty if none is known."""
        parts = [
            (len(part), part, other)
            for other in range(len(others))
            if other != place
            for part in others[other]
            if len(part) >= MIN_SHARED_TEXT and part in text and not any(part in own_text for own_text in own)
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

    def _played_alone(self, place: int, views: Sequence[_View], *, here: bool) -> Outcome:
        """Play an episode alone, in this process, or where the episodes were played at once."""
        answers = views[0].answers(self._together[place]) if views else []
        number, task = self._play.tasks[place]
        if here:
            spec = spec_of(self._environment, task, number, self._play.seed)
            script = _POLICIES[self._play.policy](self._environment)
            executing = execute_episode(self._environment, spec, script, answers=answers, sampling=self._play.sampling)
            return Outcome.of(self._run(executing))
        play = msgspec.structs.replace(self._play, tasks=[(number, task)], answers=answers)
        return self._played(play).outcomes[0]

    def _played(self, play: _Play) -> _Played:
        if play.environment and (played := _play_in_new_process(play)) is not None:
            return played
        self._play = msgspec.structs.replace(self._play, environment="")  # also from now on
        here: _Played = self._run(_play(self._environment, play))
        return here


async def _play(environment: type[Environment], play: _Play) -> _Played:
    """Play one episode alone, or several at once, in this process."""
    script = _POLICIES[play.policy](environment)
    specs = [spec_of(environment, task, number, play.seed) for number, task in play.tasks]
    if len(specs) == 1:
        executed = await execute_episode(environment, specs[0], script, answers=play.answers, sampling=play.sampling)
        return _Played([Outcome.of(executed)], [])
    before = _process_state(environment)
    with written_files() as written, _interleaved_threads():
        outcomes = await execute_together(
            environment, specs, script, patience_s=play.patience_s, sampling=play.sampling
        )
    after = _process_state(environment)
    shared = [name for name in after if before.get(name) != after[name]]
    shared += [path for path, count in written.items() if count > 1]
    return _Played([Outcome.of(outcome) for outcome in outcomes], shared or _paths_in_command(environment))


@contextlib.contextmanager
def _interleaved_threads() -> Iterator[None]:
    """Let threads begin late and take turns often, so that those of several episodes overlap."""
    interval, submit = sys.getswitchinterval(), CALL_THREADS.submit

    def submit_late(call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        def run() -> Any:
            threading.Event().wait(THREAD_START_S)
            return call(*arguments, **named)

        return submit(run)

    sys.setswitchinterval(SWITCH_S)
    CALL_THREADS.submit = submit_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CALL_THREADS.submit
        sys.setswitchinterval(interval)


def _play_in_new_process(play: _Play) -> _Played | None:
    """Play in a new process; return None if it could not import the class, or raised an exception.

    Raises:
        SilentProcessError, DeadProcessError: see `run_in_new_process`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-check-") as scratch,
        contextlib.suppress(OSError, msgspec.MsgspecError),
    ):
        request, answer = Path(scratch, "request"), Path(scratch, "answer")
        request.write_bytes(msgspec.msgpack.encode(play))
        # The same order of sets in each process.
        if run_in_new_process("agentrl.testing.concurrency_check", [request, answer], hash_seed=0):
            return msgspec.msgpack.decode(answer.read_bytes(), type=_Played)
    return None


def _importable_name(environment: type[Environment]) -> str:
    """Return the reference by which another process imports a class; empty if it cannot."""
    if "<locals>" in environment.__qualname__:
        return ""
    try:
        return f"{module_of(environment)}:{environment.__qualname__}"
    except EnvironmentDefinitionError:  # of a notebook
        return ""


def _process_state(environment: type[Environment]) -> dict[str, object]:
    """Return what an environment can share between episodes: names of its modules and classes, and the process's own.

    Values are identities, and the lengths of containers."""
    state: dict[str, object] = {"the working directory": os.getcwd()}
    state |= {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    for base in environment.__mro__:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)
        if file is None or not is_user_code(file):
            continue
        for owner, members in ((Path(file).name, vars(module)), (base.__qualname__, vars(base))):
            for name, value in list(members.items()):
                if not name.startswith(("__", "_abc_")) and name != "own_random" and not inspect.ismodule(value):
                    length = len(value) if isinstance(value, list | dict | set) else 0
                    state[f"{owner}.{name}"] = (id(value), length)
    return state


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


def _load(arguments: Sequence[str]) -> Callable[[], None]:
    """Load the class in a new process, and return a function that plays and writes what was played."""
    request, answer = map(Path, arguments)
    play = msgspec.msgpack.decode(request.read_bytes(), type=_Play)
    environment = resolve(play.environment)
    for module in ("numpy.random", *["aiohttp.web"] * issubclass(environment, HarnessEnvironment)):
        import_module(module)  # an episode needs it, and its import would block the event loop

    def play_and_write() -> None:
        answer.write_bytes(msgspec.msgpack.encode(event_loop.run(_play(environment, play))))

    return play_and_write


if __name__ == "__main__":
    serve_new_process(_load)
