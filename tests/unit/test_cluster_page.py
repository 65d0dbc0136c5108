"""The files for Slurm and KubeRay are what their tools read; tests/e2e/test_cluster_page.py runs the script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest


def test_the_ray_cluster_is_one_that_kuberay_reads(repository: Path) -> None:
    yaml = pytest.importorskip("yaml")
    cluster = yaml.safe_load((repository / "examples/kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    pinned = re.search(r"^ray==([\d.]+)", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"].isdecimal()
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    volumes = {volume["name"] for volume in head["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in head["template"]["spec"]["containers"][0]["volumeMounts"]} == volumes


def test_the_batch_script_is_one_that_bash_reads(repository: Path) -> None:
    script = (repository / "examples/slurm.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert all(line.startswith("#SBATCH --") for line in script.splitlines()[1:5])
