"""Checks which settings may differ when a run is resumed: each declares its rule; `check_unchanged` enforces them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from agentrl.config.fields import OnResume
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from agentrl.config.run import RunConfig


class Difference(NamedTuple):
    """A setting whose value on resume differs from the run's."""

    path: tuple[str, ...]
    before: Any
    now: Any
    rule: OnResume

    @property
    def key(self) -> str:
        """Key as written on a command line."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r} and is {self.now!r}"


def check_unchanged(before: Mapping[str, Any], now: RunConfig) -> list[Difference]:
    """Return the settings that differ from those of the run to resume, all of which may differ.

    Args:
        before: the configuration that the run was started with, as data; empty if unknown.
        now: the configuration to resume with.

    Raises:
        ConfigError: a setting differs that must not; the message has its key, both values, and what to do.
    """
    found = list(_differences(now, now.model_dump(mode="json"), before)) if before else []
    refused = [each for each in found if not each.rule.allows(deterministic=now.deterministic)]
    if refused:
        mend = " ".join(f"--{each.key}={json.dumps(each.before)}" for each in refused)
        also = " of a deterministic run" if any(each.rule.rule != "refused" for each in refused) else ""
        raise ConfigError(
            f"{'; '.join(map(str, refused))}: a run is resumed with the settings it was started with, and its "
            f"environment and model in the same place; docs/configuration.md lists the settings that may differ{also}. "
            f"Restore the original ({mend}), or start a new run with --name"
        )
    return found


def _differences(
    section: BaseModel, now: Mapping[str, Any], before: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """Compare setting by setting; one that an older version did not write had its default."""
    for name, field in type(section).model_fields.items():
        path, value = (*above, name), getattr(section, name)
        default = None
        if not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True, validated_data=dict(before)))
        then = before.get(name, default)
        if isinstance(value, BaseModel) and isinstance(then, Mapping):
            yield from _differences(value, now[name], then, path)
        elif path == ("policies",) and isinstance(then, Mapping):
            for policy in {**then, **value}:
                was, held = then.get(policy), value.get(policy)
                if isinstance(was, Mapping) and held is not None and was.get("kind") == held.kind:
                    yield from _differences(held, now[name][policy], was, (*path, policy))
                else:
                    kind = was.get("kind") if isinstance(was, Mapping) else None
                    yield Difference((*path, policy, "kind"), kind, held and held.kind, OnResume("refused"))
        elif then != now[name]:
            yield Difference(path, then, now[name], on_resume(field))


def on_resume(field: FieldInfo) -> OnResume:
    """The resume rule of a setting; a test refuses settings without one."""
    return next((mark for mark in field.metadata if isinstance(mark, OnResume)), OnResume("refused"))
