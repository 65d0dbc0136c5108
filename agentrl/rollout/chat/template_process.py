"""Chat templates, compiled and rendered in a process with limits of memory and time.

A template is a program, and may come from others: `{{ 'a' * 10**10 }}` is computed when it is compiled, and
`'%1000000000d'|format(1)` by the interpreter itself. So no check of its code would be complete. `TemplateProcess` sends
a template and its values to a process, as JSON over a socket pair, and gets the text.

The process (`python -m agentrl.rollout.chat.template_process …`) renders in jinja2's immutable sandbox with the
helpers that templates expect. It limits its address space, and its CPU time per request by a timer, so that the verdict
does not depend on the machine's load. It ends when the other end of its socket is closed, and when its memory is full,
which other templates may fill. It ignores the signals that stop a run, because Slurm and systemd send them to every
process, and a run renders until it has stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl.core.files import os_error_advice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Environment, Template

TEMPLATE_DATE = datetime(2026, 1, 1, tzinfo=UTC)
"""Date that `strftime_now` returns to a template: a constant, so that a prompt does not depend on the day."""
MAX_RENDERED_CHARACTERS = 1 << 26
"""Maximum length of a rendered conversation."""
MAX_MEMORY_BYTES = 1 << 30
"""Maximum memory of a rendering, with all templates of a process: sixteen times the longest text."""
MAX_CPU_S = 10.0
"""Maximum CPU seconds of a compilation or a rendering."""
_KEPT_TEMPLATES = 64
"""Number of compiled templates that the process keeps."""
_LENGTH_BYTES = 8
_OUT_OF_MEMORY = 12
"""Exit code of the process when its memory is full."""


class TemplateError(Exception):
    """A template cannot be compiled or rendered; the message says why."""


class TemplateProcess:
    """The process of this one, for all its templates. It starts when it is needed, and again after it ended.

    Args:
        cpu_s: maximum CPU seconds of a compilation or a rendering.
    """

    def __init__(self, cpu_s: float = MAX_CPU_S) -> None:
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def compile(self, source: str) -> None:
        """Compile a template.

        Raises:
            TemplateError: it does not compile.
        """
        self._ask(source, {"asks": "compile"})

    def variables(self, source: str) -> list[str]:
        """Return the variables that a template reads and does not set itself, without those of the sandbox.

        Raises:
            TemplateError: see `compile`.
        """
        return list(self._ask(source, {"asks": "variables"}))

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Render a template.

        Raises:
            TemplateError: the template refuses the values, or needs too much memory or time.
        """
        return str(self._ask(source, {"asks": "text", "values": values}))

    def close(self) -> None:
        """End the process. Idempotent."""
        line, process = self._line, self._process
        self._line = self._process = None
        if line is not None and process is not None:
            line.close()
            process.kill()
            process.wait()

    def _forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        self._lock = threading.Lock()
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.returncode = 0  # no child of this process
        self._line = self._process = None

    def _ask(self, source: str, request: dict[str, Any]) -> Any:
        request["template"] = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        try:
            frame = _encode(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"its values are no JSON data: {error}") from error
        with self._lock:
            kind, answer = self._exchange(frame)
            if kind == "unknown":
                kind, answer = self._exchange(_encode({**request, "source": source}))
            if kind == "ended":  # perhaps killed by others, or full of other templates: once more, in a new process
                kind, answer = self._exchange(_encode({**request, "source": source}))
        if kind != "done":
            raise TemplateError(answer)
        return answer

    def _exchange(self, frame: bytes) -> tuple[str, Any]:
        line, process = self._start()
        try:
            line.sendall(frame)
            kind, answer = json.loads(_receive(line))
        except (OSError, EOFError):
            code = process.wait()
            self.close()
            if code == -signal.SIGPROF:
                return "error", f"it takes more than {self._cpu_s:g} s of CPU time"
            if code == _OUT_OF_MEMORY:
                return "ended", f"it needs more than {MAX_MEMORY_BYTES >> 20:,} MiB"
            return "ended", f"the process that renders it ended ({code})"
        except BaseException:
            self.close()  # its answer would be taken for that of the next request
            raise
        return kind, answer

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        if self._line is not None and self._process is not None:
            return self._line, self._process
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_", "PATH"))}
        # The same imports as here, and none from the working directory alone.
        environment |= {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._cpu_s)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which may render until it has stopped
                )
        except OSError as error:
            ours.close()
            raise TemplateError(
                f"no process can be started for it ({error.strerror}); {os_error_advice(error)}"
            ) from error
        self._line, self._process = ours, process
        return ours, process


def _encode(value: Any) -> bytes:
    content = json.dumps(value).encode()
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def _receive(line: socket.socket) -> bytes:
    """Read a frame.

    Raises:
        OSError, EOFError: the other end is closed.
    """
    return _exactly(line, int.from_bytes(_exactly(line, _LENGTH_BYTES), "little"))


def _exactly(line: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        if not (part := line.recv(min(count - len(content), 1 << 20))):
            raise EOFError
        content += part
    return bytes(content)


# --- in the process ---------------------------------------------------------------------------------------------------


def _sandbox() -> Environment:
    from jinja2 import TemplateError as Refusal
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag `{% generation %}…{% endgeneration %}`, with which some templates mark assistant text; rendered as
        its body."""

        tags = {"generation"}  # noqa: RUF012 - so declared by jinja2

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise Refusal(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def _answer(environment: Environment, templates: OrderedDict[str, Template], request: Any) -> tuple[str, Any]:
    """Compile or render.

    Raises:
        MemoryError: this needs more memory than is left.
    """
    from jinja2.meta import find_undeclared_variables

    template, source = templates.get(request["template"]), request.get("source")
    if template is None:
        if source is None:
            return "unknown", ""
        try:
            template = templates[request["template"]] = environment.from_string(source)
        except Exception as error:  # noqa: BLE001 - jinja2 and the interpreter raise many kinds
            return "error", _describe(error)
        if len(templates) > _KEPT_TEMPLATES:
            templates.popitem(last=False)
    templates.move_to_end(request["template"])
    try:
        if request["asks"] == "compile":
            return "done", None
        if request["asks"] == "variables":
            if source is None:
                return "unknown", ""
            return "done", sorted(find_undeclared_variables(environment.parse(source)) - environment.globals.keys())
        parts: list[str] = []
        length = 0
        for part in template.generate(request["values"]):
            parts.append(part)
            length += len(part)
            if length > MAX_RENDERED_CHARACTERS:
                return "error", f"it renders more than {MAX_RENDERED_CHARACTERS:,} characters"
        return "done", "".join(parts)
    except Exception as error:  # noqa: BLE001 - a template can make jinja2 raise anything: `truncate` uses assert
        return "error", _describe(error)


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error
    return str(error)[:2000] or type(error).__name__


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, size + MAX_MEMORY_BYTES))


def _serve(line: socket.socket, cpu_s: float) -> None:
    """Answer requests until the other end is closed."""
    environment, templates = _sandbox(), OrderedDict[str, Any]()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process starts with its parent's ignored and blocked signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with contextlib.suppress(OSError, ValueError):  # where there is no /proc
        _limit_memory()
    while True:
        try:
            frame = _receive(line)
        except (OSError, EOFError):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # at its end, SIGPROF ends the process
        content = _encode(_answer(environment, templates, json.loads(frame)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        try:
            line.sendall(content)
        except OSError:
            return


if __name__ == "__main__":
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    os._exit(0)
