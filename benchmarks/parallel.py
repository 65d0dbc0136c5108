"""Recorded experts: replayed by sharded ranks, and what they cost on their way between machines.

    python -m benchmarks.parallel [--quick] [--part PART]

* `replay`: a model with 512 experts on two sharded ranks, whose routers are rounded. `routing_replay_k3`: k3 of the
  tokens that the embedded engine sampled, with its recorded experts; `routing_replay_gain`: k3 without them, relative.
* `routing`: turns of 512 new and 512 sampled tokens from a worker to a rank, through the receiver on the run's host.
  `receiver_tokens_per_cpu_s`, `worker_tokens_per_cpu_s`, `reader_tokens_per_cpu_s`: tokens for each CPU second of the
  receiver, the sending worker, and the reading rank. The same with `_routed` and `_routed_512`: with the experts of 48
  layers, 8 for each position, of 128 and 512. `receiver_routing_ratio`: largest slowdown of the receiver by routing;
  `receiver_routing_control`: the same if entries hold the routing.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("routing_replay_k3", "routing_replay_gain"),
    *("receiver_tokens_per_cpu_s", "receiver_tokens_per_cpu_s_routed", "receiver_tokens_per_cpu_s_routed_512"),
    *("worker_tokens_per_cpu_s", "worker_tokens_per_cpu_s_routed", "worker_tokens_per_cpu_s_routed_512"),
    *("reader_tokens_per_cpu_s", "reader_tokens_per_cpu_s_routed", "reader_tokens_per_cpu_s_routed_512"),
    *("receiver_routing_ratio", "receiver_routing_control"),
)

if __name__ == "__main__":
    run_parts("parallel", FIGURES, description=__doc__)
