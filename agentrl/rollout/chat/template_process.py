"""Chat templates, compiled and rendered in a process with limits of memory and time.

A template is a program, and may come from others: `{{ 'a' * 10**10 }}` is computed when it is compiled, and
`'%1000000000d'|format(1)` by the interpreter itself. So no check of its code would be complete. `TemplateProcess` sends
a template and its values to a `LimitedProcess`, and gets the text.

The process (`python -m agentrl.rollout.chat.template_process …`) renders in jinja2's immutable sandbox with the
helpers that templates expect. A run renders until it has stopped. See `core.limited_process` for its limits.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl.core.limited_process import LimitedProcess, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2 import Environment, Template

TEMPLATE_DATE = datetime(2026, 1, 1, tzinfo=UTC)
"""Date that `strftime_now` returns to a template: a constant, so that a prompt does not depend on the day."""
MAX_ADDED_CHARACTERS, MAX_GROWTH = 200_000, 16
"""Maximum length of a rendered conversation: the first number, and so many times the length of its values as JSON."""
MAX_CPU_S = 10.0
"""Maximum CPU seconds of a compilation or a rendering."""
_KEPT_TEMPLATES = 64
"""Number of compiled templates that the process keeps."""


class TemplateError(Exception):
    """A template cannot be compiled or rendered; the message says why."""


class TemplateProcess:
    """The process of this one, for all its templates. It starts when it is needed, and again after it ended.

    Args:
        cpu_s: maximum CPU seconds of a compilation or a rendering.
    """

    def __init__(self, cpu_s: float = MAX_CPU_S) -> None:
        self._process = LimitedProcess(__name__, cpu_s=cpu_s)

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
        self._process.close()

    def _ask(self, source: str, request: dict[str, Any]) -> Any:
        request["template"] = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        whole = {**request, "source": source}
        try:
            # After the process ended, perhaps killed by others or full of other templates, once more in a new one.
            kind, answer = self._process.ask(request, whole, whole)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"its values are no JSON data: {error}") from error
        except OSError as error:
            raise TemplateError(str(error)) from error
        if kind != "done":
            raise TemplateError(answer)
        return answer


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
        length, values = 0, request["values"]
        max_length = MAX_ADDED_CHARACTERS + MAX_GROWTH * len(json.dumps(values, ensure_ascii=False))
        for part in template.generate(values):
            parts.append(part)
            length += len(part)
            if length > max_length:
                return "error", f"it renders more than the {max_length:,} characters allowed for these values"
        return "done", "".join(parts)
    except Exception as error:  # noqa: BLE001 - a template can make jinja2 raise anything: `truncate` uses assert
        return "error", _describe(error)


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error
    return str(error)[:2000] or type(error).__name__


def _load() -> Callable[[Any], tuple[str, Any]]:
    return partial(_answer, _sandbox(), OrderedDict())


if __name__ == "__main__":
    serve(_load)
