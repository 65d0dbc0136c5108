"""The batch script examples/slurm.sh, with a Slurm of two commands over hosts that share nothing but TCP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.e2e,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

SETTINGS = """
name = "job"
steps = 2
workers = 2
environment.id = "calculator"
model.path = "agentrl.environments:calculator/model"
policies.solver = { learning_rate = 3e-4, step_size = 8 }
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 4 }
engine = { slots = 16, max_context = 192 }
trainer.loss.normalizer = 64
evaluation.tasks = 0
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in --nodelist=h*) number=${1#--nodelist=h} ;; esac
    shift
done
holders=(_ %s)
exec nsenter -t "${holders[$number]}" -n -m -- env HOME=/tmp/home TMPDIR=/tmp \\
    bash -c 'cd "$0" && exec "$@"' "$PWD" "$@"
"""
COMMANDS = {
    "scontrol": "#!/bin/bash\nprintf 'h1\\nh2\\n'\n",
    "hostname": "#!/bin/bash\nip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1\n",
}


def test_the_batch_script_runs_over_the_nodes_of_a_job(repository: Path, tmp_path: Path) -> None:
    script = (repository / "examples/slurm.sh").read_text()
    with Hosts(2) as hosts, (tmp_path / "said").open("w") as lines:
        commands = hosts.directory / "bin"  # found on the hosts, too
        commands.mkdir()
        holders = " ".join(hosts.entering(number)[2] for number in (1, 2))
        for name, text in {**COMMANDS, "srun": SRUN % holders}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        (hosts.directory / "run.toml").write_text(SETTINGS)
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            "PATH": path,
            "PYTHONPATH": str(repository),
            "RUNS": "/tmp/runs",
            "SLURM_JOB_NODELIST": "h[1-2]",
        }
        job = subprocess.run(
            ["bash", "-c", script],
            cwd=hosts.directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=subprocess.STDOUT,
            check=False,
        )
        said = (tmp_path / "said").read_text()
        assert job.returncode == 0, said
        assert f"node {hosts.address(2)}: engine 0, worker 1" in said
        assert judge(hosts.directory / "1" / "tmp" / "runs" / "job") == []
