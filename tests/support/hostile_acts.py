"""What hostile environments do, by name: acts of `tests.support.hostile_environments`.

Each is called in the middle of an episode, in whichever process plays it. `HARMLESS` ones may cost the episode; `FATAL`
ones end the process, or leave it unable to go on.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import concurrent.futures
import contextlib
import ctypes
import decimal
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from agentrl import EpisodeContext, user

Act = Callable[[EpisodeContext], Awaitable[Any]]

HARMLESS: dict[str, Act] = {}
FATAL: dict[str, Act] = {}
MEMORY_BYTES = 256 << 20


class BareError(BaseException):
    """No `Exception`."""


def harmless(act: Act) -> Act:
    """Costs its own episode at most."""
    HARMLESS[act.__name__] = act
    return act


def fatal(act: Act) -> Act:
    """Ends its process."""
    FATAL[act.__name__] = act
    return act


def _run_directory(ctx: EpisodeContext) -> Path:
    return Path(ctx.task.data["place"]) / "run"


# --- exceptions -------------------------------------------------------------------------------------------------------


@harmless
async def raises(ctx: EpisodeContext) -> None:
    raise ValueError("no")


@harmless
async def raises_what_cannot_be_printed(ctx: EpisodeContext) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        __repr__ = __str__

    raise Unprintable


@harmless
async def raises_a_bare_exception(ctx: EpisodeContext) -> None:
    raise BareError


@harmless
async def raises_generator_exit(ctx: EpisodeContext) -> None:
    raise GeneratorExit


@harmless
async def raises_generator_exit_in_a_branch(ctx: EpisodeContext) -> None:
    await ctx.gather(raises_generator_exit(ctx), ctx.sleep(0.01))


@harmless
async def interrupts(ctx: EpisodeContext) -> None:
    raise KeyboardInterrupt


@harmless
async def interrupts_in_a_branch(ctx: EpisodeContext) -> None:
    await ctx.gather(interrupts(ctx), ctx.sleep(0.01))


@harmless
async def interrupts_in_an_effect(ctx: EpisodeContext) -> None:
    await ctx.effect("interrupt", lambda: interrupts(ctx))


@harmless
async def exits(ctx: EpisodeContext) -> None:
    sys.exit(0)


@harmless
async def exits_in_a_branch(ctx: EpisodeContext) -> None:
    await ctx.gather(exits(ctx), ctx.sleep(0.01))


@harmless
async def exits_in_a_thread(ctx: EpisodeContext) -> None:
    await ctx.effect("exit", lambda: asyncio.to_thread(sys.exit, 3))


@harmless
async def raises_cancelled_error(ctx: EpisodeContext) -> None:
    raise asyncio.CancelledError


@harmless
async def raises_stop_iteration(ctx: EpisodeContext) -> None:
    raise StopIteration


@harmless
async def raises_a_group(ctx: EpisodeContext) -> None:
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit(2), ValueError("no")])


@harmless
async def cancels_itself(ctx: EpisodeContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@harmless
async def swallows_its_cancellation(ctx: EpisodeContext) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)


@harmless
async def never_ends(ctx: EpisodeContext) -> None:
    while True:
        await asyncio.sleep(0)


# --- depth and memory -------------------------------------------------------------------------------------------------


def _deeper(depth: int) -> int:
    return _deeper(depth + 1) + 1


def _fill() -> list[bytearray]:
    held = []
    while True:
        held.append(bytearray(MEMORY_BYTES // 8))


@harmless
async def recurses(ctx: EpisodeContext) -> None:
    _deeper(0)


@harmless
async def recurses_in_an_effect(ctx: EpisodeContext) -> None:
    await ctx.effect("recurse", lambda: _deeper(0))


@harmless
async def recurses_in_a_thread(ctx: EpisodeContext) -> None:
    await ctx.effect("recurse", lambda: asyncio.to_thread(_deeper, 0))


@harmless
async def recurses_in_coroutines(ctx: EpisodeContext) -> None:
    async def deeper() -> None:
        await deeper()

    await deeper()


@harmless
async def journals_what_is_too_deep(ctx: EpisodeContext) -> None:
    def deep() -> list[Any]:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        return value

    await ctx.effect("deep", deep)


@harmless
async def exhausts_memory(ctx: EpisodeContext) -> None:
    _fill()


@harmless
async def exhausts_memory_in_an_effect(ctx: EpisodeContext) -> None:
    await ctx.effect("fill", _fill)


@harmless
async def exhausts_memory_in_a_thread(ctx: EpisodeContext) -> None:
    await ctx.effect("fill", lambda: asyncio.to_thread(_fill))


@harmless
async def sends_a_huge_message(ctx: EpisodeContext) -> None:
    await ctx.agent("player").act(user("x" * (8 << 20)))


@harmless
async def sends_a_huge_metric(ctx: EpisodeContext) -> None:
    ctx.metric("huge", 1e308)
    ctx.metric("huge", 1e308)


@harmless
async def sends_many_metrics(ctx: EpisodeContext) -> None:
    for number in range(20_000):
        ctx.metric(f"metric-{number}", float(number))


@harmless
async def takes_endless_tasks(ctx: EpisodeContext) -> None:
    def endless() -> Iterator[Awaitable[None]]:
        while True:
            yield ctx.sleep(0.0)

    await ctx.gather(*(branch for branch, _ in zip(endless(), range(3_000), strict=False)))


# --- event loops, tasks, threads --------------------------------------------------------------------------------------


@harmless
async def calls_asyncio_run(ctx: EpisodeContext) -> None:
    main = asyncio.sleep(0)
    try:
        asyncio.run(main)
    finally:
        main.close()


@harmless
async def nests_a_loop(ctx: EpisodeContext) -> None:
    loop, main = asyncio.new_event_loop(), asyncio.sleep(0)
    try:
        loop.run_until_complete(main)
    finally:
        main.close()
        loop.close()


@harmless
async def nests_a_loop_in_a_thread(ctx: EpisodeContext) -> None:
    await ctx.effect("loop", lambda: asyncio.to_thread(lambda: asyncio.run(asyncio.sleep(0.01))))


@harmless
async def replaces_the_current_loop(ctx: EpisodeContext) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())


@harmless
async def closes_the_loop(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().close()


@harmless
async def leaves_tasks_behind(ctx: EpisodeContext) -> None:
    for _ in range(100):
        ctx.kept = asyncio.ensure_future(asyncio.sleep(3600.0))  # type: ignore[attr-defined]


@harmless
async def leaves_a_task_that_raises(ctx: EpisodeContext) -> None:
    _kept.append(asyncio.ensure_future(raises(ctx)))


@harmless
async def leaves_a_callback_that_raises(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().call_soon(_raise)


@harmless
async def replaces_the_exception_handler(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: _raise())
    asyncio.get_running_loop().call_soon(_raise)


@harmless
async def leaves_an_async_generator_open(ctx: EpisodeContext) -> None:
    async def numbers() -> Any:
        try:
            while True:
                yield 1
        finally:
            raise ValueError("closed")

    async for _ in numbers():
        break


@harmless
async def starts_threads(ctx: EpisodeContext) -> None:
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()


@harmless
async def nests_threads(ctx: EpisodeContext) -> None:
    def nested(depth: int) -> int:
        if depth == 0:
            return 0
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return sum(pool.map(nested, [depth - 1] * 2))

    await ctx.effect("nest", lambda: asyncio.to_thread(nested, 4))


@harmless
async def raises_in_a_thread(ctx: EpisodeContext) -> None:
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()


@harmless
async def fills_the_thread_pool(ctx: EpisodeContext) -> None:
    for _ in range(64):
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 2.0)


_kept: list[Any] = []


def _raise(*_: object) -> NoReturn:
    raise ValueError("no")


# --- what all of the process shares -----------------------------------------------------------------------------------


@harmless
async def replaces_the_clocks(ctx: EpisodeContext) -> None:
    time.time = time.perf_counter = lambda: float("nan")  # type: ignore[assignment]
    time.monotonic = lambda: float("nan")  # type: ignore[assignment]


@harmless
async def replaces_random(ctx: EpisodeContext) -> None:
    random.random = lambda: 0.5  # type: ignore[method-assign]
    random.Random.random = lambda self: 0.5  # type: ignore[method-assign, assignment]


@harmless
async def seeds_random(ctx: EpisodeContext) -> None:
    random.seed(0)


@fatal
async def replaces_parts_of_asyncio(ctx: EpisodeContext) -> None:
    asyncio.sleep = asyncio.wait_for = asyncio.gather = _raise  # type: ignore[assignment]


@harmless
async def replaces_builtins(ctx: EpisodeContext) -> None:
    builtins.open = builtins.print = _raise  # type: ignore[assignment]


@fatal
async def replaces_json(ctx: EpisodeContext) -> None:
    json.dumps = json.loads = _raise  # type: ignore[assignment]


@harmless
async def forgets_modules(ctx: EpisodeContext) -> None:
    for name in ("json", "struct", "sqlite3", "random"):
        sys.modules.pop(name, None)
    sys.path.clear()


@harmless
async def replaces_signal_handlers(ctx: EpisodeContext) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


@harmless
async def takes_the_wakeup_descriptor(ctx: EpisodeContext) -> None:
    signal.set_wakeup_fd(-1)


@harmless
async def disables_the_collector(ctx: EpisodeContext) -> None:
    gc.disable()
    gc.set_threshold(0)


@harmless
async def makes_warnings_errors(ctx: EpisodeContext) -> None:
    warnings.simplefilter("error")
    warnings.warn("no", UserWarning, stacklevel=1)


@harmless
async def empties_the_environment(ctx: EpisodeContext) -> None:
    os.environ.clear()


@harmless
async def raises_the_recursion_limit(ctx: EpisodeContext) -> None:
    sys.setrecursionlimit(50_000)
    with contextlib.suppress(RecursionError):
        _deeper(0)


@harmless
async def lowers_the_recursion_limit(ctx: EpisodeContext) -> None:
    sys.setrecursionlimit(80)


@harmless
async def traces(ctx: EpisodeContext) -> None:
    sys.settrace(_raise)
    sys.setprofile(_raise)


@harmless
async def replaces_hooks(ctx: EpisodeContext) -> None:
    sys.excepthook = sys.unraisablehook = threading.excepthook = _raise
    Unfinished()


@harmless
async def raises_in_del(ctx: EpisodeContext) -> None:
    Unfinished()


class Unfinished:
    """Cannot be freed in peace."""

    def __del__(self) -> None:
        raise ValueError("no")


@harmless
async def raises_at_exit(ctx: EpisodeContext) -> None:
    atexit.register(_raise)


@harmless
async def changes_numbers_and_locale(ctx: EpisodeContext) -> None:
    decimal.getcontext().prec = 1
    locale.setlocale(locale.LC_ALL, "C")
    sys.set_int_max_str_digits(640)


@harmless
async def breaks_logging(ctx: EpisodeContext) -> None:
    logging.Logger.handle = _raise  # type: ignore[method-assign, assignment]
    logging.getLogger("asyncio").error("x")


@harmless
async def closes_stdout(ctx: EpisodeContext) -> None:
    sys.stdout.close()


@harmless
async def closes_standard_descriptors(ctx: EpisodeContext) -> None:
    os.close(0)
    os.close(1)
    os.close(2)


@harmless
async def takes_the_streams_away(ctx: EpisodeContext) -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


@harmless
async def changes_the_directory(ctx: EpisodeContext) -> None:
    place = tempfile.mkdtemp()
    os.chdir(place)
    os.rmdir(place)


@harmless
async def changes_the_umask(ctx: EpisodeContext) -> None:
    os.umask(0o777)


@harmless
async def deletes_files_of_the_run(ctx: EpisodeContext) -> None:
    for name in ("metrics.jsonl", "config.json", "process.json", "workers.log"):
        (_run_directory(ctx) / name).unlink(missing_ok=True)


@harmless
async def deletes_checkpoints(ctx: EpisodeContext) -> None:
    shutil.rmtree(_run_directory(ctx) / "checkpoints", ignore_errors=True)


@harmless
async def opens_many_files(ctx: EpisodeContext) -> None:
    _kept.extend(socket.socketpair() for _ in range(300))


# --- other processes --------------------------------------------------------------------------------------------------


@harmless
async def forks_and_exits(ctx: EpisodeContext) -> None:
    if (child := os.fork()) == 0:
        os._exit(7)
    os.waitpid(child, 0)  # noqa: ASYNC222 - it has ended


@harmless
async def forks_and_raises(ctx: EpisodeContext) -> None:
    if os.fork() == 0:
        raise ValueError("in the child")


@harmless
async def forks_and_waits(ctx: EpisodeContext) -> None:
    os.fork()
    await asyncio.sleep(0.01)


@harmless
async def starts_a_process_pool(ctx: EpisodeContext) -> None:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


@harmless
async def leaves_a_process_behind(ctx: EpisodeContext) -> None:
    _kept.append(subprocess.Popen(["sleep", "20"]))  # noqa: ASYNC220 - as an environment should not


# --- the end of the process -------------------------------------------------------------------------------------------


@fatal
async def kills_its_process(ctx: EpisodeContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@fatal
async def kills_its_process_in_a_thread(ctx: EpisodeContext) -> None:
    await ctx.effect("kill", lambda: asyncio.to_thread(os.kill, os.getpid(), signal.SIGKILL))


@fatal
async def terminates_its_process(ctx: EpisodeContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@fatal
async def crashes(ctx: EpisodeContext) -> None:
    ctypes.string_at(0)


@fatal
async def aborts(ctx: EpisodeContext) -> None:
    os.abort()


@fatal
async def exits_through_c(ctx: EpisodeContext) -> None:
    ctypes.CDLL(None)._exit(0)


@fatal
async def replaces_its_process(ctx: EpisodeContext) -> None:
    os.execv("/bin/true", ["true"])


@fatal
async def is_ended_by_an_alarm(ctx: EpisodeContext) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    time.sleep(1.0)  # noqa: ASYNC251 - as an environment should not


@fatal
async def stops_the_loop(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


@fatal
async def cancels_every_task(ctx: EpisodeContext) -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@fatal
async def exits_in_a_task_of_its_own(ctx: EpisodeContext) -> None:
    await asyncio.wait([asyncio.ensure_future(exits(ctx))])


@fatal
async def interrupts_in_a_task_of_its_own(ctx: EpisodeContext) -> None:
    await asyncio.wait([asyncio.ensure_future(interrupts(ctx))])


@fatal
async def exits_in_a_callback(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 0)
    await asyncio.sleep(0.01)


@fatal
async def closes_all_descriptors(ctx: EpisodeContext) -> None:
    os.closerange(3, 256)


@fatal
async def breaks_the_task_factory(ctx: EpisodeContext) -> None:
    asyncio.get_running_loop().set_task_factory(_raise)


@fatal
async def hangs(ctx: EpisodeContext) -> None:
    while True:
        time.sleep(0.01)  # noqa: ASYNC251 - as an environment should not
