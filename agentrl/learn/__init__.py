"""Torch: losses, packing, the policy trainer, checkpoints."""
