"""Do environments that nobody here wrote come back by re-execution?

    python -m benchmarks.resume_foreign [--quick] [--only NAME]

Each is played to its end by a policy that draws legal actions. Then the journal is cut after every entry, and a second
process, with another hash seed, runs the episode again over each prefix and on to the end, while other code draws from
the global random generators between the calls. Transcript, rewards and the final state of everything reachable from
the environment and its resources must be those of the first process.

The class of an environment: `replay`, where every resumption gave the same; `pinned`, where one ended in an error by
name (the episode is restarted or dropped); `SILENT`, where one came back as something else and nobody said so. An
environment that draws chance from outside plays on differently even where it came back exactly: for one whose second
undisturbed run differs from the first, a resumption counts as silent if its state differs where the prefix ends (and
the prefix holds a turn: before the first one, nothing has come of the episode).
`snapshot`: as `replay`, its state restored instead of made again. `unmodified_share`: of all, those that come back as
they were written. `silent_mismatches`: environments of the class SILENT. Not counted: remedies, which are pinned
environments with a state that can be told and taken, and traps, which break the documented rules on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeSpec, PolicyVersion, SeatBinding
from agentrl.engines.scripted import Script
from agentrl.environment.registry import name_of
from agentrl.journal.entries import JournalEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.execution import POLICY, execute_episode
from benchmarks.report import Report
from benchmarks.resume_foreign_games import Case, gymnasium_cases, pettingzoo_cases, textarena_cases
from benchmarks.resume_foreign_state import digest
from benchmarks.resume_foreign_tools import remedy_cases, tool_cases, trap_cases
from benchmarks.resume_foreign_trl import trl_cases

TURNS = 240
QUICK_TURNS = 40
QUICK_CUTS = 4
BESIDE = 2
"""Processes that play at the same time, an environment each."""
VARYING = ("seconds", "started", "cached_tokens")
"""Fields of entries that say how long something took or what the engine still had."""


class Played(msgspec.Struct, frozen=True):
    """How an execution went: what the first process hands to the second."""

    name: str
    error: str | None = None
    """What was raised, by name; the rest is empty then."""
    entries: list[JournalEntry] = []
    ending: str = ""
    """Rewards by seat and the stop reason."""
    state: str = ""
    turns: int = 0
    trail: dict[int, str] = {}
    """The state when a turn was sampled, by the seed of the turn's request."""


class Verdict(msgspec.Struct, frozen=True):
    """What the second process found."""

    name: str
    resumed: int
    named: int
    """Resumptions that ended in an error by name."""
    silent: int
    """Resumptions that came back as something else, or went on differently where nothing is left to chance."""
    chance: int = 0
    """Resumptions that came back exactly and went on differently, the environment being one of chance."""
    cause: str = ""
    checker: str = ""
    """What `check_environment` says of an environment that does not simply come back."""


def cases(only: str | None = None) -> list[Case]:
    """All environments of the study, or one."""
    games = [*gymnasium_cases(), *pettingzoo_cases(), *textarena_cases()]
    made = [*games, *trl_cases(), *tool_cases(), *remedy_cases(), *trap_cases()]
    return [case for case in made if only is None or case.name == only]


# --- one execution ----------------------------------------------------------------------------------------------------


class _Watched:
    """The context with its resources seen."""

    def __init__(self, ctx: Any, made: list[object]) -> None:
        self._ctx = ctx
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def resource(self, factory: Any, *, level: str, seed: int | None = None) -> Any:
        def make() -> object:
            self._made.append(factory())
            return self._made[-1]

        return self._ctx.resource(make, level=level, seed=seed)


class _Observer:
    """Takes the digest of the running environment's state."""

    def __init__(self, case: Case) -> None:
        self.trail: dict[int, str] = {}
        self.final = ""
        self._case = case
        self._environment: Any = None
        self._made: list[object] = []

    def environment(self) -> type[agentrl.Environment]:
        """The case's environment, observed."""
        observer = self

        class Observed(self._case.environment):  # type: ignore[name-defined, misc]
            async def run(self, ctx: Any) -> None:
                observer._environment = self
                await super().run(_Watched(ctx, observer._made))
                observer.final = observer._state()

        kind = self._case.environment
        Observed.__module__, Observed.__qualname__ = kind.__module__, kind.__qualname__
        return Observed

    def script(self, *, every: bool) -> Script:
        """The case's policy, in a process where other code draws from the global generators."""
        chat_format = PlainChatFormat()

        def script(request: GenerateRequest, name: str, version: PolicyVersion) -> list[int]:
            for _ in range(os.urandom(1)[0] % 7):
                random.random()
                np.random.random()
            if every or not self.trail:
                self.trail[request.seed] = self._state()
            text = chat_format.decode(request.token_ids.tolist())
            return [*self._case.policy(text, random_stream("foreign", request.seed)).encode(), STOP_TOKEN]

        return script

    def _state(self) -> str:
        if self._case.state is not None:
            return digest(self._case.state(self._environment))
        return digest([self._environment.__dict__, self._made])


def play(case: Case, task: agentrl.Task, recorded: Sequence[JournalEntry] = (), *, quick: bool) -> Played:
    """An execution of a case over a prefix."""
    observer = _Observer(case)
    environment = observer.environment()
    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(case.environment),
        task=task,
        seed=list(case.tasks).index(task),
        seats={seat: SeatBinding(POLICY) for seat in environment.seats},
        group_id="g0",
    )
    script = observer.script(every=not recorded)
    outcome = asyncio.run(
        execute_episode(environment, spec, script, recorded, max_turns=QUICK_TURNS if quick else TURNS)
    )
    if isinstance(outcome, str):
        return Played(name=case.name, error=outcome)
    header, entries = outcome.header, outcome.entries
    rewards = [(t.seat, t.index, t.reward) for t in header.trajectories]
    ending = f"{rewards} {header.stop_reason}"
    return Played(
        name=case.name,
        entries=entries,
        ending=ending,
        state=observer.final,
        turns=header.turns,
        trail=observer.trail,
    )


# --- the processes ----------------------------------------------------------------------------------------------------


def beginning(name: str, quick: bool) -> list[Played]:
    """Every task of a case, played once: what a process of the first kind does."""
    case = _case(name)
    return [play(case, task, quick=quick) for task in _tasks(case, quick=quick)]


def resumption(name: str, games: list[Played], quick: bool) -> Verdict:
    """A case resumed from every cut: what a process of the second kind does."""
    return resume(_case(name), games, quick=quick)


def processes(hash_seed: str) -> ProcessPoolExecutor:
    """Processes with a hash seed of their own, each beside another; what they play is in no order."""
    os.environ["PYTHONHASHSEED"] = hash_seed
    return ProcessPoolExecutor(BESIDE, get_context("spawn"), initializer=warnings.simplefilter, initargs=("ignore",))


@cache
def _case(name: str) -> Case:
    return cases(name)[0]


def resume(case: Case, games: Sequence[Played], *, quick: bool) -> Verdict:
    """Every cut of every game of a case."""
    resumed = named = silent = chance = 0
    cause = ""
    for task, before in zip(_tasks(case, quick=quick), games, strict=True):
        if before.error is not None:
            return Verdict(name=case.name, resumed=0, named=1, silent=0, cause=f"was not played: {before.error}")
        repeats: bool | None = None
        for cut in _cuts(len(before.entries), quick=quick):
            after = play(case, task, before.entries[:cut], quick=quick)
            has_turns = any(isinstance(entry.decode(), TurnEntry) for entry in before.entries[:cut])
            found = _compared(before, after)
            came_back = all(before.trail.get(seed) in (state, None) for seed, state in after.trail.items())
            resumed += 1
            named += after.error is not None
            if found and repeats is None:
                repeats = not _compared(before, play(case, task, quick=quick))
            is_silent = bool(found) and after.error is None and (repeats or (has_turns and not came_back))
            silent += is_silent
            chance += bool(found) and after.error is None and not is_silent
            if found and (not cause or (is_silent and silent == 1)):
                cause = f"{task.id}, after entry {cut} of {len(before.entries)}: {found}"
    checker = ""
    if cause:
        passed = agentrl.check_environment(case.environment, tasks=case.tasks).passed
        checker = "check_environment sees nothing" if passed else "check_environment says so beforehand"
    return Verdict(
        name=case.name, resumed=resumed, named=named, silent=silent, chance=chance, cause=cause, checker=checker
    )


def _tasks(case: Case, *, quick: bool) -> Sequence[agentrl.Task]:
    return case.tasks[:1] if quick else case.tasks


def _compared(before: Played, after: Played) -> str:
    return after.error or difference(before, after)


def _cuts(entries: int, *, quick: bool) -> Iterator[int]:
    if not quick:
        yield from range(1, entries + 1)
        return
    yield from sorted({max(1, round(entries * share / QUICK_CUTS)) for share in range(1, QUICK_CUTS + 1)})


def difference(before: Played, after: Played) -> str:
    """What differs between two executions, in words; empty where nothing does."""
    then, now = ({entry.call_id: entry for entry in played.entries} for played in (before, after))
    for call_id, entry in then.items():
        if call_id not in now:
            return f"call {call_id} is missing"
        if entry.request_hash != now[call_id].request_hash or _told(entry) != _told(now[call_id]):
            return f"call {call_id} was {_shown(entry)}, is {_shown(now[call_id])}"
    if len(now) > len(then):
        return f"call {next(call_id for call_id in now if call_id not in then)} is new"
    if before.ending != after.ending:
        return f"ended with {after.ending} instead of {before.ending}"
    return "" if before.state == after.state else "the final state is another one"


def _told(entry: JournalEntry) -> list[Any]:
    body = entry.decode()
    return [getattr(body, name) for name in body.__struct_fields__ if name not in VARYING]


def _shown(entry: JournalEntry) -> str:
    body = entry.decode()
    if isinstance(body, TurnEntry):
        return " / ".join(str(message.get("content")) for message in body.messages)[-80:]
    return str(getattr(body, "observation", getattr(body, "value", body)))[:80]


# --- the study --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the study, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short episode each, cut four times")
    parser.add_argument("--only", help="one environment, by its name in the table")
    arguments = parser.parse_args()
    chosen = cases(arguments.only)
    if not chosen:
        parser.error(f"no environment {arguments.only!r}")
    started = time.monotonic()
    names, quick = [case.name for case in chosen], [arguments.quick] * len(chosen)
    with processes("1") as first:
        games = list(first.map(beginning, names, quick))
    print(f"played in {time.monotonic() - started:.0f} s; now killed and resumed", flush=True)
    print(f"{'':9} {'environment':42} {'family':11} turns entries resumed  named chance silent  class", flush=True)
    with processes("2") as second:
        running = {second.submit(resumption, *a): i for i, a in enumerate(zip(names, games, quick, strict=True))}
        for done, resumed in enumerate(as_completed(running), 1):
            index = running[resumed]
            print(f"{done:2}/{len(names)} {time.monotonic() - started:4.0f}s", end=" ")
            show(chosen[index], games[index], resumed.result())
    verdicts = [resumed.result() for resumed in running]
    classes = [kind_of(case, found) for case, found in zip(chosen, verdicts, strict=True) if case.foreign]
    figures: dict[str, float | None] = {
        "environments": len(classes),
        "unmodified_share": sum(kind in {"replay", "snapshot"} for kind in classes) / max(1, len(classes)),
        "silent_mismatches": classes.count("SILENT"),
        "resumptions": sum(found.resumed for found in verdicts),
    }
    line = Report(
        "resume_foreign", quick=arguments.quick, repeats=1, compared_with="the undisturbed episodes", figures=figures
    )
    line.print()


def kind_of(case: Case, found: Verdict) -> str:
    """The class of an environment."""
    return "SILENT" if found.silent else "pinned" if found.named else case.level


def show(case: Case, games: Sequence[Played], found: Verdict) -> None:
    """A row of the table."""
    length = f"{sum(game.turns for game in games):5} {sum(len(game.entries) for game in games):7}"
    counts = f"{found.resumed:7} {found.named:6} {found.chance:6} {found.silent:6}"
    print(f"{case.name:42} {case.family:11} {length} {counts}  {kind_of(case, found)}", flush=True)
    if found.cause:
        print(f"    {' '.join(found.cause.split())[:300]}; {found.checker}")


if __name__ == "__main__":
    main()
