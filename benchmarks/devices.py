"""The learner and the embedded engine on devices other than the CPU, as far as a machine without a GPU can show.

    python -m benchmarks.devices [--quick] [--part PART]

* `mixing`: a make-believe accelerator (`tests/support/accelerator.py`). `device_cases`: cases of trainer, losses,
  references, checkpoints and embedded engine; `device_errors`: cases that failed there; `device_max_error`: the largest
  relative difference from the CPU in float32. Negative control: `planted_device_errors_found`, the share of 5 planted
  faults that are found. `host_syncs_per_micro_batch`, `host_copies_per_micro_batch`: waits of the host for the device,
  and copies to the device, of a step of small micro-batches, the largest of five kinds of steps.
  `float32_matmuls_share`: share of the matrix products of a LoRA step in bfloat16 that are computed in float32.
  `silent_fallbacks`: models that share no prefixes and do not say why, where the attention kernel cannot be compiled.
* `smollm2`: `lora_reward_bf16`, `lora_reward_f32`: held-out reward of SmolLM2 after the same steps of an adapter in
  bfloat16 and in float32, means of three seeds; `lora_reward_lost`: their difference.
* `flex_fits`, not measured yet (null): share of the attention kernels that fit the shared memory of their card, over 5
  compute capabilities, 3 head sizes and 2 dtypes, compiled for cards that are absent.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("device_cases", "device_errors", "device_max_error", "planted_device_errors_found"),
    *("host_syncs_per_micro_batch", "host_copies_per_micro_batch", "float32_matmuls_share", "silent_fallbacks"),
    *("lora_reward_bf16", "lora_reward_f32", "lora_reward_lost"),
    *("flex_fits",),
)

if __name__ == "__main__":
    run_parts("devices", FIGURES, description=__doc__)
