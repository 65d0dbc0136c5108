"""docs/reference/configuration.md, generated from the models: `python -m docs.generators.configuration >
docs/reference/configuration.md`.

Owns the layout of the page. The text about a field is the field's docstring.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from agentrl.config.fields import DerivedDefault, NumberUnit
from agentrl.config.load import resume_rule_of
from agentrl.config.mistakes import sections_in_annotation
from agentrl.config.run import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_INTRODUCTION = """# Configuration

<!-- Written by `make docs-config` from agentrl/config/run.py; changes belong there. -->

Every setting of a training run, as a TOML file and on the command line:

```toml
# run.toml, for `agentrl train run.toml`
{toml}
```

```
agentrl train run.toml --policies.solver.learning_rate=1e-4
```

From Python, pass `agentrl.RunConfig(policies={{"solver": {{"learning_rate": 1e-4}}}}, …)` to `agentrl.train`. On the
command line a value is JSON, a TOML inline table, or else text. `--dry-run` prints
the settings, and what follows from them: seats, groups, engines and devices.

Models, environments, functions and rubrics in a TOML file are relative to that file. Paths, there and on the
command line, may begin with `~` or be `file:` URLs; variables such as `$HOME` are left to the shell.

Each setting is shown with its default. `--resume` reads the configuration again and applies new values, except for
settings marked

* *fixed*: another value is refused;
* *new episodes*: episodes in flight keep their value;
* ¹: fixed with `deterministic = true`.

[`agentrl run set`](../how-to/recovery.md#controlling-a-running-run) changes settings marked *live* while
the run runs.
"""


def configuration_page() -> str:
    """Return the page as Markdown."""
    example = '[environment]\nid = "calculator"\n\n[model]\npath = "agentrl.environments:calculator/model"\n\n'
    example += "[policies.solver]\nlearning_rate = 1e-4"
    parts = [_INTRODUCTION.format(toml=example)]
    shown: set[str] = set()
    parts += [_section(section, path, shown) for section, path in _walk(RunConfig, "")]
    return "\n".join(parts)


def documented_keys() -> list[str]:
    """List every key that holds a value, such as `policies.NAME.url`, once, even if several kinds of a section have
    it. The heading of a section names its `kind`."""
    return list(
        dict.fromkeys(
            f"{path}{name}"
            for section, path in _walk(RunConfig, "")
            for name, field in section.model_fields.items()
            if name != "kind" and not sections_in_annotation(field.annotation)[0]
        )
    )


def _walk(section: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    yield section, path
    for name, field in section.model_fields.items():
        members, is_named = sections_in_annotation(field.annotation)
        for member in members:
            yield from _walk(member, f"{path}{name}.{'NAME.' if is_named else ''}")


def _section(section: type[BaseModel], path: str, shown: set[str]) -> str:
    """Render a section. `shown` collects the settings on the page: kinds of a section share some of them."""
    title = f"[{path.rstrip('.')}]" if path else "The run"
    if "kind" in section.model_fields:
        (tag,) = get_args(section.model_fields["kind"].annotation)
        title += f" with kind = {tag}"
    settings, repeated = [], []
    for name, field in section.model_fields.items():
        if name == "kind" or sections_in_annotation(field.annotation)[0]:
            continue
        setting = f"* {_heading(name, field)}<br>\n  {_flat(field.description or '')}"
        if f"{path}{setting}" in shown:
            repeated.append(f"`{name}`")
        else:
            settings.append(setting)
        shown.add(f"{path}{setting}")
    about = _flat(section.__doc__ or "") + (f" Also takes {' and '.join(repeated)}, as above." if repeated else "")
    return "\n".join([f"## {title}\n", f"{about}\n", *settings, *[""][: len(settings)]])


def _heading(name: str, field: FieldInfo) -> str:
    """Return the line above a description: the setting with its default, type, unit and resume rule."""
    default = next((mark.words for mark in field.metadata if isinstance(mark, DerivedDefault)), "")
    has_value = not (field.is_required() or default or field.default is None)
    shown = f"`{name} = {_toml(field.default)}`" if has_value else f"`{name}`"
    type_ = _type(field)
    facts = [
        "required" if field.is_required() else "",
        type_.removeprefix(_name(field.annotation)).strip() if has_value and _shows_type(field) else type_,
        _unit(field),
        f"default: {_flat(default)}" if default else "",
        _MARKS[resume_rule_of(field).rule],
        "*live*" if resume_rule_of(field).is_live else "",
    ]
    footnote = "" if resume_rule_of(field).of_deterministic else "¹"
    return ", ".join([shown, *filter(None, facts)]) + footnote


def _shows_type(field: FieldInfo) -> bool:
    """Whether the default shows the type: `0.0` is a number, `0` an integer."""
    return field.annotation in (str, bool, int, float)


def _toml(value: Any) -> str:
    """Return a default as TOML."""
    return "{}" if value == {} else json.dumps(value)


SLIPS = 10**6
"""Smallest upper bound that the page omits: bounds this large only catch typing errors."""


def _type(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [(k, getattr(mark, k)) for mark in field.metadata for k in signs if getattr(mark, k, None) is not None]
    bounds = [f"{signs[k]} {bound:,}" for k, bound in found if bound < SLIPS]
    return " ".join([_name(field.annotation), ", ".join(bounds)]).strip()


def _name(annotation: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "boolean", Any: "anything"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in names:
        return names[annotation]
    if origin is Literal:
        return "/".join(
            f"`{str(argument).lower() if argument in (False, True) else argument}`" for argument in arguments
        )
    if origin is Annotated:
        return _name(arguments[0])
    if origin is tuple and arguments[-1] is not ...:
        return f"[{', '.join(map(_name, arguments))}]"
    if origin is tuple:
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return "table" if arguments[1] is Any else f"table of {_name(arguments[1])}"
    return " or ".join("null (default)" if argument is type(None) else _name(argument) for argument in arguments)


def _unit(field: FieldInfo) -> str:
    return next((mark.name for mark in field.metadata if isinstance(mark, NumberUnit)), "")


_MARKS = {"may differ": "", "per episode": "*new episodes*", "refused": "*fixed*"}
"""Mark of a setting by its resume rule."""


def _flat(text: str) -> str:
    return linked(" ".join(text.split()))


def linked(text: str) -> str:
    """Make links of the pages that a text names."""
    page = re.compile(r"docs/(([\w-]+/)?(\w+)\.md(#[\w-]+)?)")
    return page.sub(lambda match: f"[{match[3].replace('_', ' ')}](../{match[1]})", text)


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
