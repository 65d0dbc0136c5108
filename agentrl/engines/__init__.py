"""Engines, which sample: adapters of the `Engine` port.

`embedded/` computes in one process with transformers, `vllm/` over vLLM; `scripted.py` says what a script says, without
a model. Any of them runs in a process of its own behind `client.py` (here), `wire.py` (the messages) and `server.py`
(there), which `child_process.py` starts and keeps running; `fleet.py` makes several of them one. `external.py` and
`remote.py` ask policies that no engine serves. `sessions.py`, `models.py` and `weights.py` are what the engines share:
pins and leases, model directories, published weights and the canary check.
"""

from agentrl.core.machine import hide_broken_builds

hide_broken_builds()
