"""Tasks that the packages of verifiers and Inspect play, each in a process with its own Python."""

from __future__ import annotations

from pathlib import Path

from agentrl_formats.runner import RunnerEnvironment

PLAYERS = Path(__file__).with_name("players.py")


class Verifiers(RunnerEnvironment):
    """Tasks of verifiers (version 1). `taskset` is the taskset's id; `config` has further sections of the environment's
    configuration, such as `{ taskset = { num_tasks = 100 }, agent = { harness = { id = "bash" } } }`."""

    package = "verifiers"
    players = PLAYERS


class Inspect(RunnerEnvironment):
    """Samples of an Inspect task. `taskset` is its `module:function`; `config` has the function's arguments."""

    package = "inspect"
    players = PLAYERS
