"""A real run of all that there is (Ray, trainer ranks, vLLM in actors, every kind of policy): who can be reached
while it goes on, and which weights played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.contract.test_engine_vllm_process import needs_vllm
from tests.e2e.matches import answering, check_critic, check_played, config_of, played, write_judge
from tests.processes import is_loopback
from tests.support import warm

pytestmark = [
    needs_vllm,
    pytest.mark.e2e,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

_RUN = """
import json, os, stat, sys
from pathlib import Path
import agentrl
from tests.e2e.matches import WatchedMatch
from tests.processes import can_be_reached, descendants

class Looks:  # at every step, since processes are read one after another while others start and end
    def __init__(self):
        self.names, self.reached = set(), {}

    def on_step(self, policy, step, metrics):
        processes = descendants(os.getpid())
        self.names.update(processes.values())
        for each in can_be_reached(processes):
            kind, _, where = each.partition(" ")
            above = Path(where).parents if kind == "unix" and where.startswith("/") else ()
            self.reached.setdefault(each, [stat.S_IMODE(directory.stat().st_mode) for directory in above])

    def on_evaluation(self, versions, metrics):
        pass

looks = Looks()
config = agentrl.RunConfig.model_validate_json(sys.argv[1])
agentrl.train(config, environment=WatchedMatch, observers=[looks], quiet=True)
print(json.dumps([sorted(looks.names), looks.reached]))
"""
VLLM: dict[str, Any] = {"vllm": {}, "max_context": 64, "slots": 8}


class Ran(NamedTuple):
    path: Path
    judge: Path
    processes: list[str]
    reached: dict[str, list[int]]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)])
def ran(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("runs")
    base = repository / "environments" / "calculator" / "model"
    judge = write_judge(base, directory / "judge")
    with answering("7") as url:
        critic = {"critic": {"kind": "remote", "url": url, "model": "any"}}
        ray = {"trainer": {"ranks": 2}, "cluster": {"address": "local"}}
        config = config_of(
            base, judge, directory, steps=4, policies=critic, engine={**VLLM, "replicas": request.param}, **ray
        )
        run = warm.cell(repository, _RUN, config.model_dump_json())
    assert run.returncode == 0, run.stdout + run.stderr
    return Ran(directory / "match", judge, *json.loads(run.stdout))


def test_a_run_is_reached_from_its_own_machine_only(ran: Ran) -> None:
    for name in ("gcs_server", "raylet", "ray::TrainerRank", "ray::EngineActor", "VLLM::EngineCor"):
        assert any(each.startswith(name[:15]) for each in ran.processes), f"no {name} among {ran.processes}"
    assert any(each.startswith("tcp") for each in ran.reached)
    assert [each for each in ran.reached if not is_loopback(each)] == []
    for each, modes in ran.reached.items():
        if each.startswith("unix"):
            assert 0o700 in modes, f"{each}: open to other users"


def test_each_seat_is_played_by_the_weights_it_says_on_vllm_in_replicas(ran: Ran) -> None:
    turns = played(ran.path)
    check_critic(turns, "7")
    check_played(turns, ran.path, ran.judge)
