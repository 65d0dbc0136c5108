"""What sections of the configuration are made of: their base, and numbers with their bounds and units."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Unit(NamedTuple):
    """What a number counts or measures, for the configuration page."""

    name: str


class OnResume(NamedTuple):
    """Whether a setting may differ when a run is resumed; `config.run.check_unchanged` enforces it."""

    rule: Literal["may differ", "per episode", "refused"]
    """`per episode`: an episode keeps, to its end, the value that it began with; the journal has it."""
    of_deterministic: bool = True
    """Whether it may differ in a deterministic run, too."""

    def allows(self, *, deterministic: bool) -> bool:
        """Whether a run may be resumed with another value."""
        return self.rule != "refused" and (self.of_deterministic or not deterministic)


T = TypeVar("T")

Free = Annotated[T, OnResume("may differ")]
"""A setting that may differ on resume: a limit, a place, or what optimizer steps do from then on."""
WaveFixed = Annotated[T, OnResume("may differ", of_deterministic=False)]
"""A setting that may differ but of a deterministic run, whose waves are each played with one value of it."""
PerEpisode = Annotated[T, OnResume("per episode", of_deterministic=False)]
"""A setting that episodes to come take over, and episodes that have begun do not."""
Fixed = Annotated[T, OnResume("refused")]
"""A setting that says which run it is."""

# Upper bounds lie far above what any machine holds: they refuse slips, such as bytes where MiB are meant.
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**6)]
Rate = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0, le=10**8), Unit("tokens")]
Episodes = Annotated[int, Field(gt=0, le=10**7), Unit("episodes")]
Steps = Annotated[int, Field(gt=0, le=10**9), Unit("optimizer steps")]
MaybeSteps = Annotated[int, Field(ge=0, le=10**9), Unit("optimizer steps")]
Seconds = Annotated[float, Field(gt=0, le=1e9), Unit("s")]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
