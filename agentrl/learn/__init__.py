"""Training: losses, packing, the forward pass, the policy trainer, checkpoints and published versions."""

from agentrl.core.machine import hide_broken_builds

hide_broken_builds()
