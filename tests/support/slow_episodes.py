"""Slow episodes for env check, without waiting: classes count their seconds, and the check's clock shows the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from agentrl.core.clock import SystemClock
from agentrl.testing import load_clock

if TYPE_CHECKING:
    import pytest


class SlowClass(Protocol):
    """A class each of whose episodes adds `episode_s` to `now_s`."""

    episode_s: ClassVar[float]
    now_s: ClassVar[float]


def make_slow(monkeypatch: pytest.MonkeyPatch, environment: type[SlowClass], episode_s: float) -> None:
    """Let each episode take some seconds of an idle machine."""

    class EpisodeClock(SystemClock):
        monotonic = staticmethod(lambda: environment.now_s)

    monkeypatch.setattr(load_clock, "LoadClock", EpisodeClock)
    monkeypatch.setattr(environment, "episode_s", episode_s, raising=False)
