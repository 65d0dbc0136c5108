"""Generates docs/reference/combinations.md from the parts of a run: `python -m docs.generators.combinations >
docs/reference/combinations.md`.

Owns the layout of the page. Settings, needs, reasons and remedies are those of `agentrl.config.algorithms` and
`agentrl.config.combinations`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from agentrl.config import algorithms, combinations
from agentrl.config.algorithms import ADVANTAGES, LOSSES, NORMALIZERS, advantage_part, loss_part, normalizer_part
from agentrl.core.custom_functions import GROUPINGS, FunctionDeclaration
from agentrl.core.parts import Part, compatible

_PAGE = """# Combinations

<!-- Written by `make docs-config` from agentrl/config/algorithms.py and combinations.py; changes belong there. -->

Settings that cannot be combined. Most pairs are refused before a run starts, and the rest when its models are loaded or
its engine has started. The error names both settings, the reason and the nearest setting that works. In settings, NAME
is the name of a policy or scorer. Your own functions are listed by their marks ([losses and
advantages](../how-to/own_losses.md)).

{refusals}"""


def all_parts() -> list[Part]:
    """Return the parts of the tables in the order of their definition, and those of a user's functions by mark."""
    parts: list[Part] = []
    for value in [*vars(algorithms).values(), *vars(combinations).values()]:
        parts += [part for part in (value.values() if isinstance(value, dict) else [value]) if isinstance(part, Part)]
    algorithm_parts = [
        *(advantage_part(name, declaration, {}) for name, declaration in ADVANTAGES.items()),
        *(loss_part(name, declaration, {}) for name, declaration in LOSSES.items()),
        *(normalizer_part(normalizer) for normalizer in NORMALIZERS),
    ]
    return list(dict.fromkeys([*algorithm_parts, *_parts_by_mark(), *parts]))


def _parts_by_mark() -> Iterator[Part]:
    by_options: dict[str, FunctionDeclaration] = {
        **{
            f'over="{over}"': FunctionDeclaration("advantage", over=over, linear=True)
            for over in ("group", "step", "tree")
        },
        "linear=False": FunctionDeclaration("advantage", over="tree"),
    }
    for options, declaration in by_options.items():
        yield advantage_part("", declaration, {})._replace(setting=f"@agentrl.advantage({options})")
    token = FunctionDeclaration("loss", groups="token", linear=True)
    by_options = {
        **{f'groups="{groups}"': token._replace(groups=groups) for groups in GROUPINGS},
        "reference=True": token._replace(reference=True),
        "divergence=True": token._replace(reference=True, divergence=True),
        "linear=False": token._replace(linear=False),
    }
    for options, declaration in by_options.items():
        yield loss_part("", declaration, {})._replace(setting=f"@agentrl.loss({options})")


def combinations_page() -> str:
    """Make the page."""
    others: dict[tuple[str, str, str, str], list[str]] = {}
    for refusal in compatible(all_parts()):
        part, other, need = refusal
        remedy = need.remedy or ", or ".join(choice for choice in (other.instead, part.instead) if choice)
        others.setdefault((part.kind, part.setting, need.why, remedy), []).append(other.setting)
    tables: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for (kind, setting, why, remedy), refused in others.items():
        tables.setdefault(kind, {}).setdefault((_codes(refused), why, remedy), []).append(setting)
    sections = [
        f"## {kind[0].upper()}{kind[1:]}\n\n| setting | not with | because | instead |\n|---|---|---|---|\n"
        + "".join(f"| {_codes(settings)} | {' | '.join(row)} |\n" for row, settings in rows.items())
        for kind, rows in tables.items()
    ]
    return _PAGE.format(refusals="\n".join(sections))


def _codes(settings: list[str]) -> str:
    """List settings; of several values of one key, the key stands once."""
    by_key: dict[str, list[str]] = {}
    for setting in dict.fromkeys(settings):
        match = re.fullmatch(r"([\w.]+) = (.+)", setting)
        key, value = match.groups() if match else ("", setting)
        by_key.setdefault(key, []).append(value)
    lists = [
        f"`{key} = {values[0]}`" + "".join(f", `{value}`" for value in values[1:])
        if key
        else ", ".join(map(_code, values))
        for key, values in by_key.items()
    ]
    return "; ".join(lists)


def _code(setting: str) -> str:
    return f"`{setting}`" if re.fullmatch(r"@.+|[\w.]+", setting) else setting


if __name__ == "__main__":
    sys.stdout.write(combinations_page())
