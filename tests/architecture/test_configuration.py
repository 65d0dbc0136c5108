"""Every setting is read by something, and explained."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import PurePath

from pydantic import BaseModel

from agentrl.config.fields import Selects
from agentrl.config.run import RunConfig
from tests.architecture.sources import sources


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The configuration sections inside a type: itself, union members, values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, field name) of every value a user can set; a union's sections all count."""
    for name, field in section.model_fields.items():
        nested = list(models_in(field.annotation))
        if not nested:
            yield f"{prefix}{name}", name
        for inner in nested:
            yield from leaves(inner, f"{prefix}{name}." + (f"{inner.__name__}." if len(nested) > 1 else ""))


def test_the_fields_of_nested_sections_and_unions_are_found() -> None:
    fields = [path for path, _ in leaves(RunConfig)]
    assert "trainer.loss.normalizer" in fields
    assert "policies.PolicyConfig.lora.rank" in fields


def test_every_field_is_read_somewhere() -> None:
    read = {
        node.attr
        for source in sources("agentrl")
        if source.path != "agentrl/config/run.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert not [path for path, name in leaves(RunConfig) if name not in read]


def test_every_field_explains_itself_or_its_section_does() -> None:
    sections = {section for path in (RunConfig,) for section in _sections(path)}
    assert not [section.__name__ for section in sections if not section.__doc__]


def holds_text(annotation: object) -> bool:
    """Whether a value of a type can be text of any content."""
    if annotation in (str, typing.Any, object) or (isinstance(annotation, type) and issubclass(annotation, PurePath)):
        return True
    if typing.get_origin(annotation) is typing.Literal or list(models_in(annotation)):
        return False
    return any(holds_text(argument) for argument in typing.get_args(annotation))


def test_every_setting_that_holds_text_declares_what_it_selects() -> None:
    """`app.received` takes the settings that select something from the user alone."""
    undeclared = [
        f"{section.__name__}.{name}"
        for section in _sections(RunConfig)
        for name, field in section.model_fields.items()
        if holds_text(field.annotation) and not any(isinstance(mark, Selects) for mark in field.metadata)
    ]
    assert not undeclared, "write Code[…], Endpoint[…], Variable[…], Location[…], Machine[…] or Label[…]"
    assert holds_text(dict[str, int] | None)
    assert not holds_text(typing.Literal["x"] | None)


def test_only_the_gate_reads_recorded_configurations() -> None:
    readers = [
        source.path
        for source in sources("agentrl")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and "recorded_config" in {alias.name for alias in node.names}
    ]
    assert readers == ["agentrl/app/received.py"]


def _sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for inner in models_in(field.annotation):
            yield from _sections(inner)
