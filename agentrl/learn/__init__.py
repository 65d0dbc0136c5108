"""Training: losses, packing, the forward pass, the policy trainer, checkpoints and published versions."""

from agentrl.core.machine import hide_mismatched_torch_builds

hide_mismatched_torch_builds()
