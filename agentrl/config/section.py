"""What sections of the configuration are made of: their base, and numbers with their bounds and units."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Unit(NamedTuple):
    """What a number counts or measures, for the configuration page."""

    name: str


NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0), Unit("tokens")]
Episodes = Annotated[int, Field(gt=0), Unit("episodes")]
Steps = Annotated[int, Field(gt=0), Unit("optimizer steps")]
MaybeSteps = Annotated[int, Field(ge=0), Unit("optimizer steps")]
Threads = Annotated[int, Field(gt=0), Unit("threads")]
Seconds = Annotated[float, Field(gt=0), Unit("s")]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
