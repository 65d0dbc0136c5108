"""`replay` and `rescore`: re-execution of recorded episodes, without sampling, acting or writing.

A replay reports whether the program still does what its journal says, and if not, the call at which it departs. A
rescore recomputes the rewards, by the same or another program, over the same conversation; children first, because
rewards of parents may depend on theirs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import linecache
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.app.parts import Adapters
from agentrl.app.policies import MAX_EXTERNAL_CONTEXT, rollout_settings
from agentrl.config.load import recorded_config
from agentrl.config.run import RunConfig
from agentrl.core import ids
from agentrl.core.errors import (
    AgentRLError,
    EnvironmentDefinitionError,
    EpisodeError,
    InputError,
    ReplayMismatchError,
)
from agentrl.core.ports import EngineCapabilities
from agentrl.environment.base import described
from agentrl.environment.registry import loaded, registered, resolve
from agentrl.inspection.comparisons import Outcome, Replayed
from agentrl.inspection.reader import RunReader
from agentrl.journal.control import ADMISSION_COLUMNS, read_spec
from agentrl.journal.entries import Begin, GatherEntry, JournalEntry, decode_entries, encode_body
from agentrl.rollout.harness_agent import is_turn, standalone
from agentrl.rollout.replay import RecordEndedError, ReplayHost, ReplayLog, ReplayRunner, ReplayStoppedError

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat
    from agentrl.core.records import EpisodeHeader, EpisodeSpec
    from agentrl.environment.base import Environment
    from agentrl.inspection.reader import EpisodeLine

MAX_SHOWN = 200
"""Maximum number of characters shown of a name from a journal."""
OWN = ("agentrl.", "environments.")
"""Packages whose environments run when a journal names them, because they came with agentrl."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The arguments shared by all episodes of a call."""

    config: RunConfig
    chat_format: ChatFormat
    environment: type[Environment] | None
    until: str | None
    rescoring: bool


def replay(
    run: str | Path,
    episodes: Sequence[tuple[str, int | None]],
    *,
    until: str | None = None,
    rescoring: bool = False,
    environment: type | str | None = None,
    adapters: Adapters | None = None,
) -> list[Replayed]:
    """Execute recorded episodes again.

    Args:
        run: the run's directory.
        episodes: id and attempt of each episode; None: the newest attempt.
        until: stop after this call.
        rescoring: whether to recompute the rewards instead of comparing them.
        environment: replaces the environment named in the journal. A journal cannot choose the code that runs: its
            environment is used only if it is installed.
        adapters: factory of the chat format; default: that of the run's configuration.

    Raises:
        InputError: there is no such episode or call, or its environment may not run.
        JournalError: the control log is damaged.
    """
    reader = RunReader(run)
    try:
        config = recorded_config(reader.log.config())
        asked = _Asked(
            config=config,
            chat_format=(adapters or Adapters()).chat_format(config),
            environment=None if environment is None else resolve(environment),
            until=until,
            rescoring=rescoring,
        )
        return asyncio.run(_all(reader, episodes, asked))
    finally:
        reader.close()


async def _all(reader: RunReader, episodes: Sequence[tuple[str, int | None]], asked: _Asked) -> list[Replayed]:
    return [await _one(reader, episode_id, attempt, asked) for episode_id, attempt in episodes]


async def _one(reader: RunReader, episode_id: str, attempt: int | None, asked: _Asked) -> Replayed:
    view = reader.episode(episode_id, attempt)
    line = view.summary
    found = Replayed(episode=line.episode, attempt=line.attempt, outcome="not_replayable", calls=0, recorded=0)
    own, inherited = reader.recorded(line)
    if view.problems:
        return msgspec.structs.replace(found, recorded=len(own), text="; ".join(view.problems))
    turns = list(standalone([*inherited, *own]))  # turns of an external agent, which may request them in any order
    own, inherited = ([entry for entry in part if not is_turn(entry)] for part in (own, inherited))
    if not own:
        return msgspec.structs.replace(found, text="nothing of it was recorded: it was dropped before its first act")
    if asked.until is not None and asked.until not in {entry.call_id for entry in [*inherited, *own, *turns]}:
        raise InputError(
            f"episode {line.episode} has no call {asked.until!r}; `agentrl episode replay --step` names them"
        )
    spec = dataclasses.replace(_spec(reader, line), purpose="replay")
    begin = decode_entries(own[:1])[0]
    verb = "rescore" if asked.rescoring else "replay"
    environment = environment_to_run(
        spec.environment,
        asked.environment,
        recorded=recorded_code(reader.info()),
        code_hash=begin.code_hash if isinstance(begin, Begin) else "",
        command=f"agentrl episode {verb} {shlex.quote(str(reader.path))} {line.episode}",
    )
    if asked.rescoring:
        own = [await _rescored_child(reader, entry, asked) for entry in own]
    acts: list[tuple[str, str]] = []
    log = ReplayLog(inherited)
    runner = ReplayRunner(
        on_call=lambda call, words: acts.append((call, words)),
        until=asked.until,
        rescoring=asked.rescoring,
        engine=_NoEngine(),
        chat_format=asked.chat_format,
        store=log,
        log=log,
        host=ReplayHost([*inherited, *own]),
        clock=Adapters().clock,
        settings=dataclasses.replace(
            rollout_settings(asked.config, asked.chat_format, asked.config.engine.max_context or MAX_EXTERNAL_CONTEXT),
            on_code_change="try",
        ),
    )
    environment.load()
    outcome, call, text, header = await _run(runner, spec, environment, own, turns, line)
    before = {f"{agent.seat}[{agent.index}]": agent.reward for agent in view.agents}
    after = _rewards(header)
    if outcome == "identical" and header is not None and not asked.rescoring:
        outcome, text = _compared(header, line, before, after)
    return msgspec.structs.replace(
        found,
        outcome=outcome,
        calls=0 if runner.journal is None else runner.journal.reached,
        recorded=len(turns) + sum(ids.has_call_number(entry.call_id) for entry in [*inherited, *own]),
        call=call,
        text=text,
        acts=acts,
        before=before if asked.rescoring else {},
        after=after if asked.rescoring else {},
    )


async def _run(
    runner: ReplayRunner,
    spec: EpisodeSpec,
    environment: type[Environment],
    entries: Sequence[JournalEntry],
    turns: Sequence[JournalEntry],
    line: EpisodeLine,
) -> tuple[Outcome, str | None, str, EpisodeHeader | None]:
    """Execute the program over its journal; returns the outcome, the call and the reason of the end, and the header on
    success."""
    running = asyncio.get_running_loop().create_task(runner.run(spec, environment, entries, answers=turns))
    try:
        header = await running
    except ReplayStoppedError as stopped:
        return "stopped", runner.until, str(stopped), None
    except RecordEndedError as ended:
        if line.stop_reason is None:
            text = f"it does what was recorded, which ends before call {ended.call_id}"
            return "identical", ended.call_id, text, None
        return "departed", ended.call_id, f"the episode had ended, and the code now makes {ended.what}", None
    except ReplayMismatchError as mismatch:
        return "departed", mismatch.call_id, str(mismatch), None
    except EpisodeError as error:
        if error.reason == "resource_lost":
            return "not_replayable", None, str(error), None
        return _failed(error.reason, str(error), line)
    except AgentRLError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is the finding
        return _failed("environment_error", described(error), line)
    if line.drop_reason is not None:
        return "departed", None, f"it was dropped as {line.drop_reason}, and ends well now", None
    return "identical", None, "", header


def _failed(reason: str, text: str, line: EpisodeLine) -> tuple[Outcome, str | None, str, None]:
    if (
        line.drop_reason == reason or line.status == "repeated"
    ):  # the failure of an attempt that was started over is not recorded
        return "identical", None, f"it fails as it failed then: {text}", None
    then = line.drop_reason or line.stop_reason or "still running"
    return "departed", None, f"it fails now ({text}), and was {then} then", None


def _compared(
    header: EpisodeHeader, line: EpisodeLine, before: dict[str, float | None], after: dict[str, float | None]
) -> tuple[Outcome, str]:
    """Compare the result of an execution with the committed one."""
    pairs = {
        "stop reason": (line.stop_reason, header.stop_reason),
        "turns": (line.turns, header.turns),
        "tokens": (line.tokens, header.tokens),
        "rewards": (before, {agent: reward for agent, reward in after.items() if agent in before}),
    }
    for what, (then, now) in pairs.items():
        if then != now:
            return "departed", f"every call is the same, and the {what} differ: {then} then, {now} now"
    return "identical", ""


def _rewards(header: EpisodeHeader | None) -> dict[str, float | None]:
    units = () if header is None else header.trajectories
    return {f"{unit.seat}[{unit.index}]": unit.reward for unit in units}


async def _rescored_child(reader: RunReader, entry: JournalEntry, asked: _Asked) -> JournalEntry:
    """Return an entry; if it reports a child's end, with the child's new rewards."""
    body = entry.decode()
    if not isinstance(body, GatherEntry) or body.drop_reason is not None:
        return entry
    child = await _one(reader, body.child, None, asked)
    if child.outcome != "identical":
        return entry
    rewards: dict[str, float] = {}
    for agent, reward in child.after.items():
        if reward is not None:
            seat = agent.partition("[")[0]
            rewards[seat] = rewards.get(seat, 0.0) + reward
    return msgspec.structs.replace(entry, body=encode_body(msgspec.structs.replace(body, rewards=rewards)))


def _spec(reader: RunReader, line: EpisodeLine) -> EpisodeSpec:
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    statement = f"SELECT {columns} FROM admissions WHERE episode = ? AND attempt = ?"
    return read_spec(reader.log.rows(statement, line.episode, line.attempt)[0])


def environment_to_run(
    name: str, given: type[Environment] | None, *, recorded: Mapping[str, str], code_hash: str, command: str
) -> type[Environment]:
    """Choose the class to run for an episode of an environment.

    Args:
        name: name of the environment in the journal.
        given: the class that the user named.
        recorded: references to the code of the run's environments, by name; see `app.parts.code_of`.
        code_hash: hash of the environment's module when the episode was played.
        command: the user's command without `--environment`, for the message.

    Raises:
        InputError: only the journal names the code; the message has the command with which the user can name it.
    """
    if given is not None:
        own = name.rpartition(":")[2].rpartition(".")[2]
        beside = getattr(sys.modules.get(given.__module__), own, None)  # a child environment of the same module
        return beside if isinstance(beside, type) and own != given.__name__ else given
    found = loaded(name)
    if found is not None:
        return found
    if name not in {known.id for known in registered()} and not name.startswith(OWN):
        raise InputError(_how_to_name(name, recorded, code_hash, command))
    try:
        return resolve(name)
    except EnvironmentDefinitionError as error:
        raise InputError(f"{error}; name the code to run: {command} --environment path/to/env.py:Class") from error


def recorded_code(info: Mapping[str, Any]) -> Mapping[str, str]:
    """Return references to the code of a run's environments, by name, from its journal's `info`; see
    `app.parts.code_of`."""
    code = info.get("code")
    return {name: where for name, where in code.items() if isinstance(where, str)} if isinstance(code, dict) else {}


def _how_to_name(name: str, recorded: Mapping[str, str], code_hash: str, command: str) -> str:
    """Describe the refusal of code that only a journal names, with the command that names it."""
    name = name[:MAX_SHOWN]
    location, _, qualname = name.rpartition(":")
    if location == "__main__":  # undeclared child environments are in the same file
        location = next((r.rpartition(":")[0] for n, r in recorded.items() if n.startswith("__main__:")), location)
    elif name in recorded:
        location, _, qualname = recorded[name][:MAX_SHOWN].rpartition(":")
    because = f"the episode was played by {name!r}, and a journal does not decide what code is run here"
    example = f"{command} --environment path/to/env.py:Class"
    if "<locals>" in qualname:
        return (
            f"{because}. Its class was defined inside a function: move it to the top level of a file, then\n  {example}"
        )
    if location in ("", "__main__"):
        where = "registered under that name by the program that trained" if not location else "typed into a notebook"
        return f"{because}; it was {where}. Name the file it is in:\n  {example}"
    if not location.endswith(".py"):
        reference = shlex.quote(f"{location}:{qualname}")
        return f"{because}. Where Python finds that module (here, or on PYTHONPATH), say so:\n  {command} " + (
            f"--environment {reference}"
        )
    if not os.path.isfile(location):
        return (
            f"{because}, nor is there a file {location} any more. Name the place it has now:\n  {command} "
            f"--environment NEW/{Path(location).name}:{qualname}"
        )
    text = "".join(linecache.getlines(location))
    notes = ""
    if hashlib.blake2b(text.encode(), digest_size=8).hexdigest() != code_hash:
        notes += "\nIt was edited since, so the episode may depart."
    if name.startswith("__main__:") and "__name__" not in text:
        notes += "\nFirst put what that script does under `if __name__ == '__main__':`, or it is done again."
    return f"{because}. If you trust that file, say so:\n  {command} --environment " + (
        f"{shlex.quote(f'{location}:{qualname}')}{notes}"
    )


class _NoEngine:
    """An engine that must not be called: a replay samples nothing."""

    capabilities = EngineCapabilities(
        name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=0
    )

    def __getattr__(self, name: str) -> Any:
        raise InputError(f"a replay samples nothing, but the episode asked the engine for {name!r}")
