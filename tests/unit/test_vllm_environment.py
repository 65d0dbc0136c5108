"""What vLLM's processes are told by variables holds whatever the user's own environment says; vLLM is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from agentrl.engines.child_process import PRIVATE_DIRECTORY_VARIABLE

_HOSTILE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_RPC_BASE_PATH": "/tmp",
    "GLOO_SOCKET_IFNAME": "eth0",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def test_the_users_environment_opens_nothing(tmp_path: Path, repository: Path) -> None:
    program = "import json, os, agentrl.engines.vllm.process; print(json.dumps(dict(os.environ)))"
    told = {**os.environ, **_HOSTILE, PRIVATE_DIRECTORY_VARIABLE: str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], cwd=repository, env=told, capture_output=True, check=True)
    found = json.loads(ran.stdout)
    assert {name: found[name] for name in _HOSTILE} == {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_RPC_BASE_PATH": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
