"""What vLLM's processes are told by variables holds whatever the user's own environment says; vLLM is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from agentrl.engines.process import INTERFACE_VARIABLE, LOG_VARIABLE, PRIVATE_DIRECTORY_VARIABLE

_HOSTILE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_RPC_BASE_PATH": "/tmp",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def environment_of(repository: Path, **told: str) -> dict[str, str]:
    """The variables of vLLM's process, started with these."""
    program = "import json, os, agentrl.engines.vllm.process; print(json.dumps(dict(os.environ)))"
    environment = {**os.environ, **told}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, env=environment, capture_output=True, check=True
    )
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def test_on_a_cluster_only_nccl_uses_the_interface_of_the_node(tmp_path: Path, repository: Path) -> None:
    found = environment_of(repository, **{PRIVATE_DIRECTORY_VARIABLE: str(tmp_path), INTERFACE_VARIABLE: "eth1"})
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("eth1", "lo")


def test_the_users_environment_opens_nothing(tmp_path: Path, repository: Path) -> None:
    found = environment_of(repository, **_HOSTILE, **{PRIVATE_DIRECTORY_VARIABLE: str(tmp_path)})
    assert {name: found[name] for name in _HOSTILE} == {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_RPC_BASE_PATH": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }


def test_vllm_logs_what_it_decides_if_there_is_a_log_file(repository: Path) -> None:
    levels = [environment_of(repository, **{LOG_VARIABLE: logged}).get("VLLM_LOGGING_LEVEL") for logged in ("", "1")]
    assert levels == ["ERROR", "INFO"]
    logged = environment_of(repository, **{LOG_VARIABLE: "1", "VLLM_LOGGING_LEVEL": "DEBUG"})
    assert (logged["VLLM_LOGGING_LEVEL"], logged["VLLM_LOGGING_STREAM"]) == ("DEBUG", "ext://sys.stderr")
