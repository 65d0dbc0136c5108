"""Live control of a run: answers `agentrl run pause | resume | drain | set` on a Unix socket in the run's directory.

Only the user of the run may connect: the socket has mode 0600, and the kernel names the caller. Each action is in the
journal before it takes effect, with who asked for it. A resume keeps a changed setting, unless its command line names
the setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import platform
import pwd
import socket
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.app.plan import RunPlan, resolve
from agentrl.config.load import changed_config, live_settings, parse_value, split_override
from agentrl.core.control_messages import (
    CONTROLS,
    MAX_ACTIONS,
    MAX_BYTES,
    SOCKET,
    ControlAction,
    ControlReply,
    ControlRequest,
    peer_of,
    read_actions,
    short_socket_path,
)
from agentrl.core.errors import AgentRLError, InputError
from agentrl.core.setting_paths import value_at
from agentrl.core.text import plural
from agentrl.observe.run_directory import run_argument

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.journal.store import SqliteJournal
    from agentrl.orchestrator.loop import Orchestrator


class RunControl:
    """Executes the actions of one start of a run.

    Args:
        plan: plan of the run.
        configured: data of the configuration that the run was started with, without its command line.
        orchestrator: loop of the run.
        store: records the actions.
        clock: clock of the run.
        apply: receives a changed plan.
        tell: shows a line.
    """

    def __init__(
        self,
        plan: RunPlan,
        configured: Mapping[str, Any],
        orchestrator: Orchestrator,
        store: SqliteJournal,
        *,
        clock: Clock,
        apply: Callable[[RunPlan], None],
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._run = run_argument(Path(plan.settings.directory) / plan.settings.name)
        self._configured = configured
        self._orchestrator = orchestrator
        self._store = store
        self._clock = clock
        self._apply = apply
        self._tell = tell
        self._lock = asyncio.Lock()

    async def execute(self, request: ControlRequest, who: str) -> str:
        """Journal an action and take it; returns what was done.

        Raises:
            InputError: it cannot be taken.
        """
        async with self._lock:
            loop = self._orchestrator
            if request.act == "set":
                return await self._set(request.setting, who)
            if request.act == "resume" and not loop.paused_by:
                raise InputError("the run is not paused")
            if request.act == "pause" and loop.paused_by:
                raise InputError(f"the run is paused already, by {loop.paused_by}")
            if request.act == "drain" and loop.drained_by:
                raise InputError(f"the run drains already, for {loop.drained_by}")
            await self._record(ControlAction(self._clock.wall(), who, request.act))
            match request.act:
                case "pause":
                    count = loop.pause(who)
                    return (
                        f"pausing: {plural(count, 'episode')} stop at the next turn, and a step in progress ends; "
                        f"`agentrl run resume {self._run}` continues the run"
                    )
                case "resume":
                    loop.unpause()
                    return "the run continues"
                case _:
                    count = loop.drain(who)
                    return f"draining: {plural(count, 'episode')} in flight end and are trained, then the run ends"

    async def _set(self, setting: str, who: str) -> str:
        path, text = split_override(setting)
        value, key = parse_value(text), ".".join(path)
        section = value_at(self._plan.settings.model_dump(mode="json"), *path[:-1])
        if section is None or (isinstance(section, Mapping) and path[-1] not in section):
            close = difflib.get_close_matches(key, live_settings(), n=1)
            raise InputError(
                f"{key}: there is no such setting{f'; did you mean {close[0]}?' if close else '.'} While the run runs, "
                f"these may change: {', '.join(live_settings())}"
            )
        new, differences = changed_config(self._plan.settings, path, value)
        if not differences:
            raise InputError(f"{key} is {value!r} already")
        if fixed := [difference.key for difference in differences if not difference.rule.is_live]:
            raise InputError(
                f"{', '.join(fixed)}: cannot change while the run runs; stop it with Ctrl-C, and resume it with "
                f"--resume --{setting}, if docs/reference/configuration.md allows that. While it runs, these may "
                "change: "
                f"{', '.join(live_settings())}"
            )
        for name, taken in self._store.newest_steps().items():
            if path[0] == "steps" and name in new.trained and new.steps_of(name) < taken:
                of_policy = f" of {name}" if len(new.trained) > 1 else ""
                raise InputError(
                    f"{setting}: the run has taken {plural(taken, 'step')}{of_policy}; set at least {taken}, or end "
                    f"the run with `agentrl run drain {self._run}`"
                )
        plan = resolve(new, self._plan.environment)
        (change,) = differences
        action = ControlAction(self._clock.wall(), who, "set", change.path, change.before, change.now)
        action = msgspec.structs.replace(action, configured=value_at(self._configured, *change.path))
        await self._record(action)
        self._plan = plan
        self._apply(plan)
        schedule = "; the learning rate keeps its schedule until a resume" if path[0] == "steps" else ""
        return f"{change}; a resume keeps it, unless it names --{key} or the value in the file has changed{schedule}"

    async def _record(self, action: ControlAction) -> None:
        actions = [*read_actions(self._store.info()), action]
        if len(actions) > MAX_ACTIONS:  # changes still hold on a resume, so the oldest of the others goes
            actions.pop(next((number for number, old in enumerate(actions) if old.act != "set"), 0))
        await self._store.describe(**{CONTROLS: msgspec.to_builtins(actions)})
        self._tell(f"control: {action.text}")


@contextlib.asynccontextmanager
async def serve_control(run: Path, control: RunControl, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Answer requests on the socket of a run within the context. If there can be none, for example on a file
    system that has no sockets, the run continues without live control."""
    try:
        listener = _listen(run)
    except OSError as error:
        tell(f"no live control: {run / SOCKET}: {error.strerror or error}")
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(60.0):
                reply = await _answer(control, reader, writer)
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listener, limit=MAX_BYTES)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(OSError):
            (run / SOCKET).unlink()


def _listen(run: Path) -> socket.socket:
    """Bind the socket of a run, in place of one that an earlier process left.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(run / SOCKET).st_mode):
            raise OSError(0, "is not a socket; remove it")
        os.unlink(run / SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_socket_path(run) as path:
            listener.bind(path)
            os.chmod(path, 0o600)  # no process can connect before it listens
        listener.listen(8)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def _answer(control: RunControl, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ControlReply:
    process, user = peer_of(writer.get_extra_info("socket"))
    if user != os.geteuid():
        return ControlReply(done=False, text="only the user of the run may control it")
    try:
        request = msgspec.json.decode(await reader.readuntil(b"\n"), type=ControlRequest)
    except (ValueError, RecursionError, asyncio.LimitOverrunError):
        return ControlReply(done=False, text="the request is not one that this version of agentrl knows")
    try:
        return ControlReply(done=True, text=await control.execute(request, _who(process, user)))
    except AgentRLError as error:
        return ControlReply(done=False, text=str(error))


def _who(process: int, user: int) -> str:
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    return f"{name}@{platform.node()} (process {process})"
