"""The pytest plugin, active wherever agentrl is installed, with the fixtures `simulated_loop` and `always_replay`.

`AGENTRL_SIM_SEED=n` runs only seed n, which repeats the schedule of the failure that printed it; `AGENTRL_SIM_SEEDS=n`
runs every test with n seeds, from `AGENTRL_SIM_FIRST` on (default 0). pytest's header names the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from agentrl.core.records import Task

T = TypeVar("T")

DEFAULT_SEEDS = 3


class SeededSimulation:
    """Runs a coroutine function once per seed; see `agentrl.testing.virtual_time.simulate`.

    Example:
        >>> async def main() -> int:
        ...     return 1
        >>> SeededSimulation(range(3)).run(main)
        [1, 1, 1]
    """

    def __init__(self, seeds: range, *, is_fixed: bool = False) -> None:
        self._seeds = seeds
        self._is_fixed = is_fixed

    def seeds(self, default: int = DEFAULT_SEEDS) -> range:
        """Return the seeds to run: those of the environment variables, and at least `default` of them."""
        first = self._seeds.start
        return self._seeds if self._is_fixed else range(first, first + max(default, len(self._seeds)))

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], *, seeds: int = 0, max_steps: int = 2_000_000) -> list[T]:
        """Return the results of `main()` under each seed; a failure names its seed.

        Args:
            main: a coroutine function without arguments, called once per seed.
            seeds: minimum number of seeds, unless an environment variable sets one seed.
            max_steps: maximum number of steps per seed.
        """
        from agentrl.testing.virtual_time import simulate

        return [simulate(main, seed=seed, max_steps=max_steps) for seed in self.seeds(seeds)]


@pytest.fixture
def simulated_loop() -> SeededSimulation:
    """Return a simulation over the seeds of the environment variables, 3 by default.

    Example:
        >>> def test_transfer(simulated_loop):
        ...     async def main() -> None: ...
        ...     simulated_loop.run(main, seeds=200)
    """
    return _simulation()


@pytest.fixture
def always_replay(simulated_loop: SeededSimulation) -> Callable[..., None]:
    """Return a function that plays an environment under simulated schedules and runs it again from every entry; see
    `replay_from_every_entry`.

    Example:
        >>> def test_my_environment_resumes(always_replay):
        ...     always_replay(MyEnvironment)
    """
    from agentrl.testing.check import replay_from_every_entry

    def check(environment: str | type, *, tasks: Sequence[Task] | None = None, episodes: int = 2) -> None:
        report = replay_from_every_entry(environment, tasks=tasks, episodes=episodes, schedules=simulated_loop.seeds(0))
        assert report.passed, report.text

    return check


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker for projects that use `--strict-markers`."""
    config.addinivalue_line("markers", "sim: runs under the simulated loop over many seeds (AGENTRL_SIM_SEEDS widens)")


def _simulation() -> SeededSimulation:
    seed = _number("AGENTRL_SIM_SEED")
    if seed is not None:
        return SeededSimulation(range(seed, seed + 1), is_fixed=True)
    first = _number("AGENTRL_SIM_FIRST") or 0
    return SeededSimulation(range(first, first + (_number("AGENTRL_SIM_SEEDS") or DEFAULT_SEEDS)))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise pytest.UsageError(f"{variable} is {text!r}; it must be a whole number from 0")
    return int(text)
