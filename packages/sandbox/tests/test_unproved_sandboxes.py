"""A run that asks for a sandbox does not start where the machine cannot prove one, unless the user accepts that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from agentrl_sandbox import bubblewrap

import agentrl
from agentrl.app.run_parts import unproved_sandbox_promises
from agentrl.core.errors import InputError
from agentrl_formats.harbor import Harbor

pytestmark = pytest.mark.needs("bubblewrap")


class Shell(agentrl.ToolEnvironment):
    sandbox = agentrl.Sandbox(disk_mb=8)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="1", data={"question": "?"})]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


class Parent(agentrl.Environment):
    """Has no sandbox, but its children have."""

    fan_out = {"Shell": 2}  # noqa: RUF012

    async def run(self, ctx: agentrl.EpisodeContext) -> None: ...


class Plain(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None: ...


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap that isolates nothing."""
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: "/bin/false")


def config(directory: Path, unproved: str) -> agentrl.RunConfig:
    return agentrl.RunConfig(
        name="sandboxed",
        directory=str(directory),
        steps=1,
        environment={"id": "calculator"},  # type: ignore[arg-type]
        model={"path": "agentrl.environments:calculator/model"},  # type: ignore[arg-type]
        sandbox={"unproved": unproved},  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("unproved")
def test_the_run_does_not_start_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot prove: sandboxes: .*bubblewrap did not start the command"):
        agentrl.train(config(tmp_path, "refuse"), environment=Shell)
    with pytest.raises(InputError, match=r"sandbox\.unproved = 'accept'"):
        agentrl.evaluate(config(tmp_path, "refuse"), environment=Shell)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("environment", [Shell, Parent, Harbor])
def test_it_is_accepted_with_a_warning(environment: type[agentrl.Environment], tmp_path: Path) -> None:
    [line] = asyncio.run(unproved_sandbox_promises(config(tmp_path, "accept").sandbox, environment))
    assert line.startswith("this machine's sandboxes are unproved: sandboxes: ")
    assert asyncio.run(unproved_sandbox_promises(config(tmp_path, "refuse").sandbox, Plain)) == []


def test_this_machine_proves_them(tmp_path: Path) -> None:
    assert asyncio.run(unproved_sandbox_promises(config(tmp_path, "refuse").sandbox, Shell)) == []
