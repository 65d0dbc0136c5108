"""vLLM's process, `python -m agentrl.engines.vllm.process FD PARENT`: `engine_server.py` as vLLM needs it.

vLLM spawns further processes, and each of them imports this module before anything else: the module-level setup applies
to all of them. Imports nothing heavy.
Invariants: no process outlives the one that started it; nothing but loopback is bound; no usage report is sent; vLLM's
processes unpickle nothing that they send each other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from agentrl.core.parent_death import die_with_parent
from agentrl.engines.process import INTERFACE_VARIABLE, LOG_VARIABLE, PRIVATE_DIRECTORY_VARIABLE

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": os.environ.get(INTERFACE_VARIABLE, "lo"),
    # A forked worker would not import this module, and so not die with its parent.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    # Else vLLM gives a model on CPU a worker process in addition to its engine core, which costs 9 CPU s and 660 MB
    # at start and a hop at each step. Its reason, threads that only a new process can be bound to, is not ours.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment variables that override the user's own."""
_GENTLE = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Default environment variables, which the user's own override."""
_LOG_VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
"""Further defaults where standard error is the engine's log file: the size of the KV cache and the model runner, which
explain a first run on a GPU, are logged at this level."""


_STARTER = "AGENTRL_VLLM_STARTER"
"""Environment variable with the id of the spawning process, for the spawned ones."""


def prepare_vllm_process() -> None:
    """Set up this process before vLLM, torch or transformers are imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in {**_GENTLE, **(_LOG_VARIABLES if os.environ.get(LOG_VARIABLE) else {})}.items():
        os.environ.setdefault(name, value)
    private = os.environ.get(PRIVATE_DIRECTORY_VARIABLE)
    if private:
        _keep_files_in(Path(private))
    starter, os.environ[_STARTER] = os.environ.get(_STARTER), str(os.getpid())
    if starter is not None and getattr(multiprocessing.current_process(), "_inheriting", False):
        # Not getppid(), since the parent may be dead already, nor parent_process(), which is not set yet.
        die_with_parent(int(starter))


def _keep_files_in(private: Path) -> None:
    """Keep sockets, rendezvous files, shared memory and semaphores in a directory that the parent removes in any
    case.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = str(private)
    multiprocessing.current_process()._config["semprefix"] = f"/{private.name}"  # type: ignore[attr-defined]
    numbers = itertools.count()
    module: Any = shared_memory
    module._make_filename = lambda: f"/{private.name}-{os.getpid()}-{next(numbers)}"


prepare_vllm_process()

if __name__ == "__main__":
    from agentrl.engines.remote.engine_server import main

    main()
    os._exit(0)
