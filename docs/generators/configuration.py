"""docs/configuration.md, generated from the models: `python -m docs.generators.configuration > docs/configuration.md`.

Owns the layout of the page. The text about a field is the field's docstring.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from agentrl.config.fields import DerivedDefault, NumberUnit
from agentrl.config.load import resume_rule_of, sections_in_annotation
from agentrl.config.run import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_INTRODUCTION = """# Configuration

<!-- Written by `make docs-config` from agentrl/config/run.py; changes belong there. -->

Every setting of a training run. A configuration can be written in three ways:

```toml
# run.toml, for `agentrl train run.toml`
{toml}
```

```python
import agentrl

config = agentrl.RunConfig(
    environment={{"id": "calculator"}},
    model={{"path": "agentrl.environments:calculator/model"}},
    policies={{"solver": {{"learning_rate": 1e-4}}}},
)
agentrl.train(config)
```

```
agentrl train run.toml --policies.solver.learning_rate=1e-4
```

On the command line a value is JSON, a TOML inline table, or else text. `--dry-run` prints the resolved
configuration and stops. An unknown key is refused, with the nearest known one. Only
`environment.id` has no default; `model.path` may be empty only if every policy is remote or a bot.

`--resume` reads the configuration again. The column *on resume* says whether it may change a setting:

* *yes*: the new value holds from now on. *yes¹*: not with `deterministic = true`.
* *new episodes¹*: the same for episodes that begin or restart; an episode in flight keeps its value.
* *no*: `--resume` names the key and both values.
"""


def configuration_page() -> str:
    """Return the page as Markdown."""
    example = '[environment]\nid = "calculator"\n\n[model]\npath = "agentrl.environments:calculator/model"\n\n'
    example += "[policies.solver]\nlearning_rate = 1e-4"
    parts = [_INTRODUCTION.format(toml=example)]
    parts += [_section(section, path) for section, path in _walk(RunConfig, "")]
    return "\n".join(parts)


def documented_keys() -> list[str]:
    """List every key that holds a value, such as `policies.NAME.kind`, once, even if several kinds of a section have
    it."""
    return list(
        dict.fromkeys(
            f"{path}{name}"
            for section, path in _walk(RunConfig, "")
            for name, field in section.model_fields.items()
            if not sections_in_annotation(field.annotation)[0]
        )
    )


def _walk(section: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    yield section, path
    for name, field in section.model_fields.items():
        members, is_named = sections_in_annotation(field.annotation)
        for member in members:
            yield from _walk(member, f"{path}{name}.{'NAME.' if is_named else ''}")


def _section(section: type[BaseModel], path: str) -> str:
    title = f"[{path.rstrip('.')}]" if path else "The run"
    if len(tags := get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()) == 1:
        title += f" with kind = {tags[0]}"
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_unit(field)} | {_rule(field)} | "
        f"{_flat(field.description or '')} |"
        for name, field in section.model_fields.items()
        if not sections_in_annotation(field.annotation)[0]
    ]
    head = ["| field | type | default | unit | on resume | what it does, and why |", "|---|---|---|---|---|---|"]
    return "\n".join([f"## {title}\n", f"{_flat(section.__doc__ or '')}\n", *(head + rows if rows else []), ""])


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
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is Annotated:
        return _name(arguments[0])
    if origin is tuple and arguments[-1] is not ...:
        return f"[{', '.join(map(_name, arguments))}]"
    if origin is tuple:
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return f"table of {_name(arguments[1])}"
    return " or ".join("null" if argument is type(None) else _name(argument) for argument in arguments)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    if derived := next((mark.words for mark in field.metadata if isinstance(mark, DerivedDefault)), ""):
        return derived
    value = field.default
    if isinstance(value, tuple | list):
        return ", ".join(f"`{item}`" for item in value) or "empty"
    if isinstance(value, dict):
        return "empty" if not value else f"`{value}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def _unit(field: FieldInfo) -> str:
    return next((mark.name for mark in field.metadata if isinstance(mark, NumberUnit)), "")


_RULES = {"may differ": "yes", "per episode": "new episodes", "refused": "no"}
"""The column *on resume* by the rule of a setting."""


def _rule(field: FieldInfo) -> str:
    declared = resume_rule_of(field)
    return _RULES[declared.rule] + ("" if declared.of_deterministic else "¹")


def _flat(text: str) -> str:
    return re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", " ".join(text.split()).replace("|", "\\|"))


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
