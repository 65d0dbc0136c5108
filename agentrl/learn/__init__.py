"""Torch: losses, packing, the policy trainer, checkpoints."""

from agentrl.core.broken_builds import hide_broken_builds

hide_broken_builds()
