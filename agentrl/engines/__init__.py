"""Inference engines: adapters of the `Engine` port.

`embedded/` computes with transformers in one process, `vllm/` runs vLLM; `scripted.py` follows a script, without a
model. Each can run in a child process behind `client.py` (this side), `wire.py` (the messages) and `server.py` (the
other side), which `child_process.py` starts and keeps running; `fleet.py` combines replicas, `bases.py` one engine per
base model. `external.py` and `remote_policy.py` call policies that no engine serves. `versions.py`, `models.py` and
`weights.py` are shared by the engines: versions, pins and leases; model directories; published weights and the canary
check. `weight_transfer.py` sends full weights from the trainer to an engine.
"""

from agentrl.core.machine import hide_mismatched_torch_builds

hide_mismatched_torch_builds()
