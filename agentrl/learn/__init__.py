"""Torch: losses, packing, the policy trainer, checkpoints."""

from agentrl.core.machine import hide_broken_builds

hide_broken_builds()
