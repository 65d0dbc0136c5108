"""What ranks compute together, and what weights and recorded experts cost on their way between machines.

    python -m benchmarks.parallel [--quick] [--part PART]

* `exchange`: experts to which tokens travel, and tokens divided among context ranks, over gloo, each case compared with
  one rank. `ep_gradient_error`, `cp_gradient_error`: largest difference of the gradient in float32 over its norm.
  `ep_control`, `cp_control`: smallest of these errors with a planted fault: outputs of experts in another order,
  gradients of copies not added up, recorded experts ignored; attention that does not see the tokens of other ranks.
  `expert_lora_error`: largest difference of log-probabilities and gradients of adapters on experts from PEFT's own.
  `collective_bytes`: largest deviation of the bytes that all ranks send from the formulas of
  docs/how-to/several_gpus.md, as a share of them, for gathered experts, dispatched experts and context ranks.
  `experts_held`: share of the experts' weights on a rank of two. `context_peak`: peak of the tensors that a rank of two
  allocates in a step over long rows, relative to one rank that computes all tokens. `experts_peak`: growth of a rank's
  resident memory in a step whose experts are dispatched, relative to gathered ones.
* `replay`: a model with 512 experts on two sharded ranks, whose routers are rounded. `routing_replay_k3`: k3 of the
  tokens that the embedded engine sampled, with its recorded experts; `routing_replay_gain`: k3 without them, relative.
* `publishing`: runs of the calculator whose versions are stored as changes, in bfloat16. `delta_bytes`,
  `delta_bytes_1e_5`: bytes of a version's changes over those of all weights, at learning rates of 1e-6 and 1e-5, in the
  steady state, where float32 masters lie anywhere between two roundings. `changed_numbers`, `changed_numbers_1e_5`: the
  share of numbers that a step changes there; `changed_predicted`, `changed_predicted_1e_5`: the mean of
  min(1, |update| / spacing). `changed_at_start`: the share in the first steps of a run at 1e-6, whose masters start in
  the middle between two roundings. `delta_digest_errors`: versions whose rebuilt weights have another digest than was
  published, and failed tests of lost, damaged and reordered deltas and of restarted engines. `delta_control`: 1 if the
  digest detects changes that are applied to another base.
* `smollm2`: the same of SmolLM2-135M-Instruct in the last four of eight steps: `smollm2_delta_bytes`,
  `smollm2_changed_numbers`, `smollm2_changed_predicted`, `smollm2_digest_errors`, and each at 1e-5. Needs
  `make smollm2`.
* `routing`: turns of 512 new and 512 sampled tokens from a worker to a rank, through the receiver on the run's host.
  `receiver_tokens_per_cpu_s`, `worker_tokens_per_cpu_s`, `reader_tokens_per_cpu_s`: tokens for each CPU second of the
  receiver, the sending worker, and the reading rank. The same with `_routed` and `_routed_512`: with the experts of 48
  layers, 8 for each position, of 128 and 512. `receiver_routing_ratio`: largest slowdown of the receiver by routing;
  `receiver_routing_control`: the same if entries hold the routing.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("ep_gradient_error", "ep_control", "cp_gradient_error", "cp_control", "expert_lora_error"),
    *("collective_bytes", "experts_held", "context_peak", "experts_peak"),
    *("routing_replay_k3", "routing_replay_gain"),
    *("delta_bytes", "delta_bytes_1e_5", "changed_numbers", "changed_numbers_1e_5"),
    *("changed_predicted", "changed_predicted_1e_5", "changed_at_start", "delta_digest_errors", "delta_control"),
    *("smollm2_delta_bytes", "smollm2_changed_numbers", "smollm2_changed_predicted", "smollm2_digest_errors"),
    *("smollm2_delta_bytes_1e_5", "smollm2_changed_numbers_1e_5", "smollm2_changed_predicted_1e_5"),
    "smollm2_digest_errors_1e_5",
    *("receiver_tokens_per_cpu_s", "receiver_tokens_per_cpu_s_routed", "receiver_tokens_per_cpu_s_routed_512"),
    *("worker_tokens_per_cpu_s", "worker_tokens_per_cpu_s_routed", "worker_tokens_per_cpu_s_routed_512"),
    *("reader_tokens_per_cpu_s", "reader_tokens_per_cpu_s_routed", "reader_tokens_per_cpu_s_routed_512"),
    *("receiver_routing_ratio", "receiver_routing_control"),
)

if __name__ == "__main__":
    run_parts("parallel", FIGURES, description=__doc__)
