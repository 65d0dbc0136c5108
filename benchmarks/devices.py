"""The learner and the embedded engine on devices other than the CPU, as far as a machine without a GPU can show.

    python -m benchmarks.devices [--quick] [--part PART]

* `mixing`: a make-believe accelerator (`tests/support/accelerator.py`). `device_cases`: cases of trainer, losses,
  references, checkpoints and embedded engine; `device_errors`: cases that failed there; `device_max_error`: the largest
  relative difference from the CPU in float32. Negative control: `planted_device_errors_found`, the share of 5 planted
  faults that are found. `host_syncs_per_micro_batch`, `host_copies_per_micro_batch`: waits of the host for the device,
  and copies to the device, of a step of small micro-batches, the largest of five kinds of steps.
  `float32_matmuls_share`: share of the matrix products of a LoRA step in bfloat16 that are computed in float32.
  `silent_fallbacks`: models that share no prefixes and do not say why, where the attention kernel cannot be compiled.
  `compiles_before_first_token`, `flex_compiles_per_run`: attention kernels that a card would compile.
* `smollm2`: `lora_reward_bf16`, `lora_reward_f32`: held-out reward of SmolLM2 after the same steps of an adapter in
  bfloat16 and in float32, means of three seeds; `lora_reward_lost`: their difference.
* `flex`: `flex_fits`, the share of the attention kernels that fit the shared memory of their card, over 5 compute
  capabilities, 3 head sizes and 2 dtypes. They are compiled for the absent cards.
* `kernels`: one layer of Qwen3-0.6B's shape with adapters of rank 16, forward and backward. `kernels_per_layer`,
  `elementwise_bytes_per_token`: kernels, and bytes that all but matrix products and attention read and write, with
  fused layers; the same `_unfused`, and `_plain`, of transformers and PEFT; `kernels_ratio`, `bytes_ratio`: fused over
  plain. `fused_max_error`: largest relative difference of liger-kernel's functions from the layers they replace, in
  float32 through Triton's interpreter, in log-probabilities and gradients of small models of eight families.
* `sharing`: steps of a small model over rows of 12 shapes, as prefix trees and row by row, on this machine's device.
  `sharing_choice_regret`: mean excess of the time that the trainer's choice takes over that of the faster way.
  `sharing_worst_regret`: the largest. `sharing_shapes`: their number.
* `start`: two starts of SmolLM2-135M with vLLM. `start_overlap`: seconds of loading to the first turn, over those until
  both trainer and engine are ready, the larger of the two. `second_start_ratio`: seconds of the second start over the
  first's, which finds no caches; `first_start_s`, `second_start_s`.
* `experts`: `moe_starts`, the number of 32 starts of mixtures of experts with default sizes that take two steps.
* `vllm`: conversations on a random Qwen3-MoE, sampled by vLLM's model runner V2 through Triton's interpreter.
  `routing_equal`: share of positions whose recorded experts are those of transformers' routers. `masks_equal`: share
  of tokens whose recorded kept set is that of a naive top-p filter. `k3_vllm_moe`: k3 of the sampled tokens under a
  trainer whose routers are rounded to bfloat16, with replay. `k3_vllm_top_p`: k3 of tokens sampled with top-p, with
  their kept sets. `k3_vllm_moe_without`, `k3_vllm_top_p_without`: the same without the record; `vllm_moe_gain`,
  `vllm_top_p_gain`: the ratios.
* `publishing`: `publish_blocked_s_per_gb`, `publish_blocked_s_per_gb_before`: seconds for which publishing 1 GB of full
  weights blocks the trainer, and for which it would if it wrote, synced, hashed and sent in turn;
  `publish_blocked_ratio`: their ratio.
* `contract`, only with `--part contract`, because it takes half an hour: `v2_contract_passed`, `v2_contract_failed`,
  tests of the engine contract on V2.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("device_cases", "device_errors", "device_max_error", "planted_device_errors_found"),
    *("host_syncs_per_micro_batch", "host_copies_per_micro_batch", "float32_matmuls_share", "silent_fallbacks"),
    *("compiles_before_first_token", "flex_compiles_per_run"),
    *("lora_reward_bf16", "lora_reward_f32", "lora_reward_lost"),
    *("flex_fits", "moe_starts"),
    *("kernels_per_layer", "kernels_per_layer_unfused", "kernels_per_layer_plain", "kernels_ratio"),
    *("elementwise_bytes_per_token", "elementwise_bytes_per_token_unfused", "elementwise_bytes_per_token_plain"),
    *("bytes_ratio", "fused_max_error"),
    *("sharing_choice_regret", "sharing_worst_regret", "sharing_shapes"),
    *("start_overlap", "second_start_ratio", "first_start_s", "second_start_s"),
    *("publish_blocked_s_per_gb", "publish_blocked_s_per_gb_before", "publish_blocked_ratio"),
    *("routing_equal", "masks_equal", "k3_vllm_moe", "k3_vllm_moe_without", "k3_vllm_top_p", "k3_vllm_top_p_without"),
    *("vllm_moe_gain", "vllm_top_p_gain", "v2_contract_passed", "v2_contract_failed"),
)

if __name__ == "__main__":
    run_parts("devices", FIGURES, description=__doc__, on_request={"contract"})
