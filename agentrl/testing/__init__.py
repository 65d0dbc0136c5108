"""Public test tools: scripted play, simulated loop, in-memory journal, recording trainer, builders.

Names are imported on first use, so that the pytest plugin costs nothing where it is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.testing.builders import make_completion, make_episode_header, make_spec, make_task, make_trajectory
    from agentrl.testing.memory_journal import MemoryJournal, MemoryTurnLog
    from agentrl.testing.playing import Played, play
    from agentrl.testing.recording_trainer import RecordingTrainer
    from agentrl.testing.sim import DeadlockError, SimLoop, SimulationError, StepLimitError, simulate

__all__ = [
    "DeadlockError",
    "MemoryJournal",
    "MemoryTurnLog",
    "Played",
    "RecordingTrainer",
    "SimLoop",
    "SimulationError",
    "StepLimitError",
    "make_completion",
    "make_episode_header",
    "make_spec",
    "make_task",
    "make_trajectory",
    "play",
    "simulate",
]

_MODULES = {
    "DeadlockError": "sim",
    "MemoryJournal": "memory_journal",
    "MemoryTurnLog": "memory_journal",
    "Played": "playing",
    "RecordingTrainer": "recording_trainer",
    "SimLoop": "sim",
    "SimulationError": "sim",
    "StepLimitError": "sim",
    "make_completion": "builders",
    "make_episode_header": "builders",
    "make_spec": "builders",
    "make_task": "builders",
    "make_trajectory": "builders",
    "play": "playing",
    "simulate": "sim",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
