"""Inference engines: adapters of the `Engine` port.

`embedded/` computes with transformers in one process, `vllm/` runs vLLM; `scripted.py` follows a script, without a
model. Each can run in a child process: `remote/client.py` on this side, `remote/engine_server.py` on the other, the
messages of `protocol.py` between them. `process.py` starts child processes and keeps them running. `router.py` routes
calls and versions to replicas and base models. `external.py` and `remote_policy.py` call policies that no engine
serves. `version_table.py` and `models.py` are shared by the engines: versions, pins and leases; model directories.
`weights/` holds published weights, the canary check, and the transfer of full weights from the trainer to an engine.
"""

from agentrl.core.machine import hide_mismatched_torch_builds

hide_mismatched_torch_builds()
